"""Refuses plans under which float types would clash: a Linear takes inputs of its weight's own type, and no other.

A norm in float32 gives float32 for any input, unless its forward casts back: so each norm that a plan changes is run
once on its own, in its new type. Embeddings give their own type. Packed linears take any type. A mixture of types that
the model had before the plan is not refused: such a model casts by itself.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from bitplan.plan.plan import Plan
from bitplan.plan.structure.describe import is_norm
from bitplan.store.models.morph import ParameterPlace


def meeting_faults(
    places: Mapping[str, ParameterPlace], casts: Mapping[int, torch.dtype], packed: set[int], plan: Plan
) -> list[str]:
    """The clashes of a forward after the plan. `casts` and `packed` hold ids of parameters."""

    def after(tensor: Tensor) -> torch.dtype:
        return casts.get(id(tensor), tensor.dtype)

    replaced = {id(place.module) for place in places.values() if id(place.parameter) in packed}
    unchanged = {name: place for name, place in places.items() if id(place.module) not in replaced}
    products = {
        name: place.parameter
        for name, place in unchanged.items()
        if isinstance(place.module, nn.Linear | _ConvNd) and place.local == "weight"
    }
    if not products or not casts:
        return []
    wanted = Counter(after(weight) for weight in products.values()).most_common(1)[0][0]
    takes = next(name for name, weight in products.items() if after(weight) == wanted)
    faults = []
    for name, place in unchanged.items():
        given = _given(place, after, wanted)
        was = _given(place, lambda tensor: tensor.dtype, products[takes].dtype)
        if given is None or given == wanted or (was is not None and was != products[takes].dtype):
            continue
        faults.append(
            f"{name} would be {_named(after(place.parameter))} ({_reason(plan, name)}) and meet {takes}, "
            f"{_named(wanted)} ({_reason(plan, takes)}), which takes no other type: change one of the two rules"
        )
    return faults


def _given(place: ParameterPlace, after: Callable[[Tensor], torch.dtype], incoming: torch.dtype) -> torch.dtype | None:
    """The type of the output of a parameter's module for this input; None where the parameter does not decide it."""
    dtype = after(place.parameter)
    module = place.module
    if not dtype.is_floating_point:
        return None
    if isinstance(module, nn.Linear | _ConvNd | nn.Embedding):
        return dtype
    is_factor = place.local == "weight" and place.parameter.dim() == 1
    if not is_factor or dtype == incoming or not is_norm(module):
        return None
    return _tried(module, {name: after(own) for name, own in _floats(module)}, incoming)


def _floats(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, own) for name, own in module.named_parameters(recurse=False) if own.is_floating_point())


def _tried(module: nn.Module, types: Mapping[str, torch.dtype], incoming: torch.dtype) -> torch.dtype:
    """The type of a norm's output; the type of its weight where the norm refuses the mixture of types."""
    trial = copy.deepcopy(module)
    for name, own in _floats(trial):
        own.data = own.data.to(types[name])
    weight = next(own for _, own in _floats(trial))
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that a mixture is slow
            out = trial(torch.ones(2, weight.shape[-1], dtype=incoming, device=weight.device))
    except (RuntimeError, TypeError, ValueError):
        return weight.dtype
    return out.dtype if isinstance(out, Tensor) else incoming


def _reason(plan: Plan, name: str) -> str:
    return plan[name].reason if name in plan else "not in the plan"


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
