"""Formats of the inputs of a model's packed layers: set, read, measured, and refused by name where a layer has none.

round_inputs(model, "int8")                                # all products with packed weights; "keep" ends it
round_inputs(model, {"lm_head.weight": "int8_row"})        # those with these weights, as a plan names them
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from bitplan.base.errors import StoreError
from bitplan.formats.input_formats import (
    KEEP,
    STATIC,
    Inputs,
    input_format,
    require_scale,
    round_input,
    with_scale,
)
from bitplan.packed.product_strategy import LayerError
from bitplan.packed.products.cpu_fused import INTEGER_INPUTS, IntegersOnCpu
from bitplan.packed.products.fused import fused_for
from bitplan.packed.quant_embedding import QuantEmbedding
from bitplan.packed.quant_experts import QuantExperts
from bitplan.packed.quant_linear import QuantLinear
from bitplan.plan.plan import Plan
from bitplan.plan.structure.describe import is_product


def round_inputs(model: nn.Module, inputs: Inputs) -> list[str]:
    """Give packed linear layers of a model formats of inputs; returns the names of those that have one now.

    inputs   a format of `bitplan.formats.input_formats`, or "keep", for all packed linear layers; or a mapping from
             names of weights to such, which leaves other layers as they are
    """
    layers = dict(model.named_modules(remove_duplicate=False))
    formats = set_inputs(layers, inputs, "round_inputs")
    if not isinstance(inputs, Mapping) and input_format(inputs) is not None and not formats:
        raise LayerError(
            f"round_inputs: nothing in this {type(model).__name__} is packed, so nothing rounds its inputs to "
            f"{input_format(inputs)}; apply_plan packs it"
        )
    return list(formats)


def set_inputs(layers: Mapping[str, nn.Module], inputs: Inputs, where: str) -> dict[str, str | None]:
    """Give packed linear layers their formats of inputs, all or none; returns them by path.

    layers   modules by path; a layer whose weight another one shares is also found by the other's name: a tied output
             head by its embedding's. An embedding itself multiplies nothing, so a format has no effect on it.
    """
    formats = _by_layer(layers, inputs, where)
    linears = {path: layer for path, layer in layers.items() if isinstance(layer, QuantLinear) and path in formats}
    for path, layer in linears.items():
        if layer.inputs != formats[path]:
            layer.inputs = formats[path]
    return {path: formats[path] for path in linears}


def _by_layer(layers: Mapping[str, nn.Module], inputs: Inputs, where: str) -> dict[str, str | None]:
    """The formats of layers that read a weight; what no layer can do is refused by name."""
    if not isinstance(inputs, Mapping):
        fmt = input_format(inputs, where)
        require_scale(fmt, where)
        experts = next((path for path, layer in layers.items() if isinstance(layer, QuantExperts)), None)
        if fmt is not None and experts is not None:
            raise LayerError(_without_products(experts, layers[experts], fmt))
        return dict.fromkeys(layers, fmt)
    formats, readers = dict[str, str | None](), _readers(layers)
    for name, wished in inputs.items():
        fmt, path = input_format(wished, f"{where}: {name}"), name.rpartition(".")[0]
        require_scale(fmt, f"{where}: {name}")
        holder = layers.get(path)
        if fmt is not None and not isinstance(holder, QuantLinear | QuantEmbedding):
            raise LayerError(_without_products(name, holder, fmt))
        others = [other for other in readers.get(path, ()) if other == path or f"{other}.weight" not in inputs]
        formats |= dict.fromkeys(others, fmt)
    return formats


def _readers(layers: Mapping[str, nn.Module]) -> dict[str, list[str]]:
    """The layers that multiply by the weight of each: all that share it, but embeddings."""
    weights = {path: weight for path, one in layers.items() if (weight := getattr(one, "weight", None)) is not None}
    sharing: dict[int, list[str]] = {}
    for path, weight in weights.items():
        if not isinstance(layers[path], nn.Embedding | QuantEmbedding):
            sharing.setdefault(id(weight), []).append(path)
    return {path: sharing.get(id(weight), []) for path, weight in weights.items()}


def _without_products(name: str, layer: nn.Module | None, fmt: str) -> str:
    if isinstance(layer, QuantExperts):
        return f"{name}: packed experts have no products of inputs in {fmt}; leave inputs as they are (keep)"
    holder = "no layer" if layer is None else f"a {type(layer).__name__}"
    return f"{name}: {holder} holds it, and only packed linear layers round their inputs, here to {fmt}; leave it out"


def runs_on_integers(model: nn.Module) -> bool:
    """Whether all products with packed weights would be products of whole numbers, with inputs in int8."""
    kernel = fused_for("cpu", INTEGER_INPUTS[0])
    layers = [layer for layer in model.modules() if isinstance(layer, QuantLinear | QuantExperts)]
    return (
        bool(layers)
        and isinstance(kernel, IntegersOnCpu)
        and all(
            isinstance(layer, QuantLinear)
            and layer.weight.device.type == "cpu"
            and kernel.why_no_integers(layer.weight.encoded) is None
            for layer in layers
        )
    )


def shown_inputs(model: nn.Module) -> str | None:
    """The formats that packed layers round their inputs to, in words; None where none does."""
    formats = {layer.inputs or KEEP for layer in model.modules() if isinstance(layer, QuantLinear)}
    names = sorted({name.partition("@")[0] for name in formats})
    return None if names in ([], [KEEP]) else " and ".join(names)


def inputs_of(model: nn.Module) -> dict[str, str | None]:
    """Formats of inputs by names of packed weights, all names of one that layers share; an error where those differ."""
    layers = dict(model.named_modules(remove_duplicate=False))
    by_weight: dict[int, tuple[str, str | None]] = {}
    for path, layer in layers.items():
        if isinstance(layer, QuantLinear):
            other, fmt = by_weight.setdefault(id(layer.weight), (path, layer.inputs))
            if fmt != layer.inputs:
                raise StoreError(
                    f"{other} rounds its inputs to {fmt or 'nothing'} and {path} to {layer.inputs or 'nothing'}; they "
                    "share a weight, and a folder holds one format of inputs for it: give both layers one (inputs)"
                )
    weights = {f"{path}.weight": getattr(layer, "weight", None) for path, layer in layers.items()}
    return {name: by_weight[id(weight)][1] for name, weight in weights.items() if id(weight) in by_weight}


# ---- static scales ---------------------------------------------------------------------------------------------------


def calibrate_inputs(
    model: nn.Module, plan: Plan, batches: Iterable[Any], run: Callable[[Any], object] | None = None
) -> Plan:
    """The plan with measured scales for inputs in `int8_static`: the largest magnitude that a layer's input had, / 127.

    model     the model before it is packed, or after; linear layers are found by the names of their weights
    batches   what the model is run on, one after the other
    run       how it is run on one; None: model(batch)
    """
    names = [name for name, rounded in plan.inputs.items() if rounded == STATIC]
    layers = dict(model.named_modules(remove_duplicate=False))
    unknown = [name for name in names if name.rpartition(".")[0] not in layers]
    if unknown:
        raise LayerError(
            f"calibrate_inputs: the model has no layer of {unknown[0]!r}, which the plan rounds to {STATIC}; "
            "give the model's own plan"
        )
    largest: dict[str, float] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(_layer: nn.Module, args: tuple[Any, ...]) -> None:
            largest_now = float(args[0].detach().abs().amax()) if args[0].numel() else 0.0
            largest[name] = max(largest.get(name, 0.0), largest_now)

        return hook

    readers = _readers(layers)
    paths = [(name, path) for name in names for path in readers.get(name.rpartition(".")[0], ())]
    hooks = [layers[path].register_forward_pre_hook(watch(name)) for name, path in paths]
    try:
        with torch.no_grad():
            for batch in batches:
                (run or model)(batch)
    finally:
        for hook in hooks:
            hook.remove()
    for name in names:
        if not 0 < largest.get(name, 0.0) < float("inf"):
            raise LayerError(
                f"calibrate_inputs: {name}: its input was never seen, or is {largest.get(name, 0.0)}; give other text, "
                f"or another format of inputs than {STATIC}"
            )
    return plan.with_inputs({name: with_scale(largest[name] / 127) for name in names})


# ---- models that are not packed -------------------------------------------------------------------------------------


def round_linear_inputs(model: nn.Module, inputs: Inputs, *, keep: Collection[str] = ()) -> list[RemovableHandle]:
    """Let linear layers round their inputs (`round_input`): as packed layers do, in a model that is not packed.

    inputs   one format for all, except those whose weights are in `keep`; or formats by names of weights
    """
    linears = {f"{path}.weight": module for path, module in model.named_modules() if is_product(module)}
    if not isinstance(inputs, Mapping):
        formats = {name: input_format(inputs) for name in linears if name not in keep}
    else:
        named = {name: input_format(fmt, name) for name, fmt in inputs.items()}
        shared = {id(tensor): named[name] for name, tensor in model.named_parameters() if name in named}
        formats = {name: named.get(name, shared.get(id(layer.weight))) for name, layer in linears.items()}
    for name, fmt in formats.items():
        require_scale(fmt, name)
    return hook_rounding({linears[name]: fmt for name, fmt in formats.items() if fmt is not None})


def hook_rounding(layers: Mapping[nn.Module, str]) -> list[RemovableHandle]:
    """Let layers round their inputs to formats until the handles are removed."""

    def hook(fmt: str) -> Callable[..., tuple[Any, ...]]:
        return lambda _module, args: (round_input(args[0], fmt), *args[1:])

    return [layer.register_forward_pre_hook(hook(fmt)) for layer, fmt in layers.items()]
