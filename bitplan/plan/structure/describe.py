"""`describe`: one `ModelView` of a module."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from bitplan.base.errors import PlanError
from bitplan.plan.structure.model_view import (
    TRACED,
    UNKNOWN,
    UNUSED,
    AttentionUse,
    ExpertsUse,
    LinearUse,
    ModelView,
    ModuleUse,
    TensorRecord,
)

if TYPE_CHECKING:
    from torch import nn

    from bitplan.plan.structure.graph import Graph
    from bitplan.plan.structure.recognise import Recogniser
    from bitplan.plan.structure.recorder import Recording


def describe(model: nn.Module, example: Any = None) -> ModelView:
    """What a module computes, seen in one run of its forward without numbers; the module is not altered.

    example   what the forward is called with: a tensor, a tuple of arguments, or a dict of keywords. Without it one is
              made from the module's config, or from the arguments of its forward.

    Hooks are not run; modules that have them are in `changed`. Parameters that the run did not read are "unused", and
    "unknown" where a part of the model could not be followed. Raises `PlanError` where no example fits.
    """
    from bitplan.plan.structure.recorder import NumbersNeededError
    from bitplan.plan.structure.untouched import examples_for

    if example is not None:
        return _view(model, run_once(model, *arguments_of(example)))
    faults = []
    for args, kwargs in examples_for(model):
        try:
            return _view(model, run_once(model, args, kwargs))
        except PlanError as error:
            faults.append(error)
    if faults and isinstance(faults[0].__cause__, NumbersNeededError):  # the likeliest example: no other would do
        raise PlanError(
            f"{faults[0]}, so what it computes cannot be seen without them; its linear layers can be packed and put "
            "into FP8 one by one (apply_plan, apply_fp8), and joined layers and norms stay apart"
        ) from faults[0]
    tried = f": {faults[0]}" if faults else ""
    raise PlanError(
        f"{type(model).__name__}: no input was found that its forward takes ({len(faults)} tried){tried}; give one: "
        "bitplan.describe(model, example=(x,)) or example={'input_ids': ids}"
    )


_PRODUCT_STEPS = {"linear", "matmul", "mm", "addmm", "add", "T", "t", "mT", "transpose", "view", "reshape"}


def product_of(module: nn.Module) -> LinearUse | None:
    """The product that a module alone is: its weight with its input, its bias and nothing else; None if it is more."""
    weight = module._parameters.get("weight")
    return None if weight is None or weight.ndim != 2 else _seen_once(_products_seen, module, _see_product)


def is_product(module: nn.Module) -> bool:
    """Whether a layer multiplies its input by its `weight`, in one way or the other."""
    from torch import nn

    return isinstance(module, nn.Linear) or (not isinstance(module, nn.Embedding) and product_of(module) is not None)


def is_product_alone(module: nn.Module) -> bool:
    """Whether a layer computes its product and bias alone; of a class that has another name for a reason, by a run."""
    from torch import nn

    if type(module) is nn.Linear or type(module).forward is nn.Linear.forward:
        return type(module) is nn.Linear
    return not isinstance(module, nn.Embedding) and product_of(module) is not None


def multiplies_transposed(module: nn.Module, local: str) -> bool:
    """Whether a parameter of a module is a matrix [inputs, outputs], or experts of such, as its own run shows."""
    from torch import nn

    if type(module) is nn.Linear or isinstance(module, nn.Embedding) or module._parameters.get(local) is None:
        return False
    product = product_of(module) if local == "weight" else None
    experts = experts_of(module)
    return (product is not None and product.is_columns) or (
        experts is not None and local in experts.weights and experts.is_columns
    )


def _see_product(module: nn.Module) -> LinearUse | None:
    import torch

    from bitplan.plan.structure.graph import Graph
    from bitplan.plan.structure.recognise import Recogniser
    from bitplan.plan.structure.recorder import record

    weight = module.get_parameter("weight")
    for size in dict.fromkeys((weight.shape[1], weight.shape[0])):
        try:
            recording = record(module, (torch.zeros(3, size, dtype=weight.dtype),), {})
        except Exception:  # whatever its forward raises: it takes no such input
            continue
        parts = Recogniser(Graph(recording))
        uses = list(parts.linears.values())
        adds = [step for step in recording.steps if step.name == "add"]
        is_plain = {step.name for step in recording.steps} <= _PRODUCT_STEPS and len(recording.outputs) == 1
        if not is_plain or len(uses) != 1 or uses[0].weight != "weight" or not uses[0].is_whole:
            return None
        if len(adds) > 1 or any(parts.graph.before_bias(step) is None for step in adds):
            return None
        bias = "bias" if module._parameters.get("bias") is not None else None
        return uses[0] if uses[0].bias == bias else None
    return None


def scale_of_rows(table: nn.Module) -> float | None:
    """The factor by which a table multiplies the rows that it looks up; None where it does anything else with them."""
    import torch

    from bitplan.plan.structure.graph import CASTS, Graph
    from bitplan.plan.structure.recognise import Products
    from bitplan.plan.structure.recorder import record

    if type(table).forward is torch.nn.Embedding.forward:
        return None  # it has another name for a reason: code that reads its weight
    try:
        recording = record(table, (torch.zeros(2, dtype=torch.long),), {})
    except Exception:  # whatever its forward raises: it looks no rows up
        return None
    graph = Graph(recording)
    tables = Products(graph).embeddings
    steps = [step for step in recording.steps if step.name not in CASTS]
    if (
        [part.weight for part in tables] != ["weight"]
        or len(recording.outputs) != 1
        or steps[0].index != tables[0].step
    ):
        return None
    if len(steps) == 1:
        return 1.0 if recording.outputs == (tables[0].output,) else None
    if len(steps) != 2 or steps[1].name != "mul" or recording.outputs != steps[1].outputs:
        return None
    factors = [factor for factor in steps[1].args if isinstance(factor, float | int)]
    named = [graph.values[graph.uncast(value)].names for value in steps[1].inputs if value != tables[0].output]
    if named and len(named[0]) == 1:
        name = named[0][0]
        # The number in a buffer. One on the meta device has none: transformers keeps it beside, as scalar_NAME.
        buffer = table._buffers.get(name)
        if buffer is None or buffer.numel() != 1:
            return None
        number = getattr(table, f"scalar_{name}", None) if buffer.is_meta else float(buffer)
        return None if number is None else float(number)
    return float(factors[0]) if len(factors) == 1 and len(steps[1].inputs) == 1 else None


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm: one of torch's, or one whose own run was seen to be one, with a weight of its own."""
    from torch import nn

    if isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm | nn.modules.batchnorm._NormBase):
        return True
    weights = [one for one in module._parameters.values() if one is not None]
    if not weights or any(map(nn.parameter.is_lazy, weights)) or any(True for _ in module.children()):
        return False
    return weights[0].ndim == 1 and _seen_once(_norms_seen, module, _see_norm)


def _see_norm(module: nn.Module) -> bool:
    import torch

    from bitplan.plan.structure.graph import Graph
    from bitplan.plan.structure.recognise import Norms
    from bitplan.plan.structure.recorder import record

    vector = next(one for one in module._parameters.values() if one is not None)
    try:
        recording = record(module, (torch.zeros(2, *vector.shape, dtype=vector.dtype),), {})
    except Exception:  # whatever its forward raises: it takes no such input
        return False
    return any(norm.weight in module._parameters for norm in Norms(Graph(recording)).norms)


# What sends tokens to experts and brings the results back; factors are looked at one by one.
_ROUTING_STEPS = {"T", "any", "arange", "argsort", "bincount", "clone", "contiguous", "cumsum", "empty_like"}
_ROUTING_STEPS |= {"eq", "expand", "flatten", "float", "floordiv", "gather", "ge", "getitem", "greater", "gt", "histc"}
_ROUTING_STEPS |= {"index_add", "index_select", "int", "long", "mT", "new_zeros", "nonzero", "one_hot"}
_ROUTING_STEPS |= {"ones_like", "permute", "repeat_interleave", "reshape", "scatter_add", "setitem", "shape"}
_ROUTING_STEPS |= {"size", "sort", "squeeze", "sum", "t", "to", "transpose", "type", "unbind", "unflatten"}
_ROUTING_STEPS |= {"unsqueeze", "view", "where", "zeros", "zeros_like"}
_PLAIN = (int, float, bool, str, dict, set, OrderedDict)
Use = TypeVar("Use")
Seen = weakref.WeakKeyDictionary["nn.Module", tuple[Any, Use]]
_norms_seen: Seen[bool] = weakref.WeakKeyDictionary()
_experts_seen: Seen[ExpertsUse] = weakref.WeakKeyDictionary()
_products_seen: Seen[LinearUse | None] = weakref.WeakKeyDictionary()


def experts_of(module: nn.Module) -> ExpertsUse | None:
    """The experts that a module alone is, seen in a run of its own; None if it holds no two stacks of matrices."""
    if sum(weight is not None and weight.ndim == 3 for weight in module._parameters.values()) < 2:
        return None
    return _seen_once(_experts_seen, module, _see_experts)


def _seen_once(seen: Seen[Use], module: nn.Module, see: Callable[[nn.Module], Use]) -> Use:
    """What a run of a module shows; of modules that run the same lines one is run."""
    forward = module.__dict__.get("forward", type(module).forward)  # either may be patched after it was seen
    if module not in seen or seen[module][0] is not forward:
        others = ((other, use) for other, (ran, use) in seen.items() if ran is forward and other is not module)
        alike = next((use for other, use in others if _is_same_code(other, module)), _seen_once)
        seen[module] = forward, see(module) if alike is _seen_once else alike  # type: ignore[assignment]
    return seen[module][1]


def _is_same_code(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules run the same lines: of one class, with equal settings, and weights of the same shapes."""
    if type(one) is not type(other) or one._buffers or other._buffers or one._modules.keys() != other._modules.keys():
        return False
    layouts, settings = [], []
    for module in (one, other):
        weights = module._parameters.items()
        layouts.append([(name, None if weight is None else (weight.shape, weight.dtype)) for name, weight in weights])
        settings.append({key: value for key, value in vars(module).items() if key not in ("_parameters", "_modules")})
    if layouts[0] != layouts[1] or settings[0].keys() != settings[1].keys():
        return False
    for value, theirs in zip(settings[0].values(), map(settings[1].__getitem__, settings[0]), strict=True):
        if value is not theirs and (type(value) not in _PLAIN or value != theirs):
            return False
    inner = zip(one._modules.values(), other._modules.values(), strict=True)
    return all(
        part is theirs or (part is not None and theirs is not None and _is_same_code(part, theirs))
        for part, theirs in inner
    )


def _see_experts(module: nn.Module) -> ExpertsUse:
    import inspect

    import torch

    from bitplan.plan.structure.graph import Graph
    from bitplan.plan.structure.recognise import Recogniser
    from bitplan.plan.structure.recorder import record

    taken = tuple(inspect.signature(type(module).forward).parameters)[1:]
    if len(taken) != 3:
        return ExpertsUse(fault=f"it takes {', '.join(taken)}, not tokens, the experts of each and their weights")
    stacks = [weight for weight in module._parameters.values() if weight is not None and weight.ndim == 3]
    faults: dict[str, None] = {}
    for size in dict.fromkeys(size for weight in stacks for size in (weight.shape[2], weight.shape[1])):
        hidden = torch.zeros(4, size, dtype=stacks[0].dtype)
        routes = torch.tensor([[0, min(1, len(stacks[0]) - 1)]] * 4)
        try:
            recording = record(module, (hidden, routes, torch.zeros(4, 2, dtype=hidden.dtype)), {})
        except Exception as error:  # whatever its forward raises: it takes no such input
            faults[" ".join(str(error).split())[:200]] = None
            continue
        return _experts_in(module, recording, Recogniser(Graph(recording)))
    return ExpertsUse(fault=f"its forward could not be followed: {next(iter(faults))}")


def _experts_in(module: nn.Module, recording: Recording, parts: Recogniser) -> ExpertsUse:
    uses = {
        ExpertsUse(
            mlp.gate.weight,
            mlp.down.weight,
            mlp.gate.bias,
            mlp.down.bias,
            mlp.activation,
            mlp.gate.is_columns,
            mlp.is_interleaved,
        )
        for mlp in parts.gated
        if mlp.is_fused and mlp.gate.is_columns == mlp.down.is_columns
    }
    if len(uses) != 1 or len(parts.linears) != 2 * len(parts.gated):
        return ExpertsUse(fault="its experts are not down(act(gate(x)) * up(x)) with gate and up in one matrix")
    use = uses.pop()
    weights = {name for name, weight in module._parameters.items() if weight is not None}
    read = {name for name in (use.gate_up, use.down, use.gate_up_bias, use.down_bias) if name is not None}
    if use.activation != "other" and any(mlp.gate_part for mlp in parts.gated):
        return replace(use, fault=f"{use.gate_up} has the rows of up before those of gate")
    if weights != read:
        beside = ", ".join(sorted(weights - read))
        return replace(use, fault=f"it holds {beside} beside its experts' weights and biases")
    counts = [len(module.get_parameter(name)) for name in use.weights]
    if len(set(counts)) > 1:
        return replace(use, fault=f"{use.gate_up} has {counts[0]} matrices, and {use.down} {counts[1]}")
    if (more := _beside_experts(recording, parts)) is not None:
        return replace(use, fault=f"it computes more than its experts' sum: {more}")
    return use


def _beside_experts(recording: Recording, parts: Recogniser) -> str | None:
    """What is computed beside gating, products, and the sum by the router's weights."""
    graph = parts.graph
    inside = set(parts.linears)
    for mlp in parts.gated:
        behind = graph.slots_behind(mlp.down.input, parts.linears)
        inside |= behind[1] if behind is not None else set()
    routes = recording.calls[0].inputs[2]
    for step in recording.steps:
        if step.index in inside or step.name in _ROUTING_STEPS or step.name in ("bmm", "chunk"):
            continue
        if graph.before_bias(step) is not None:
            continue
        if all(not graph.values[value].dtype.is_floating_point for value in (*step.inputs, *step.outputs)):
            continue  # of indices
        if step.name != "mul" or not any(_is_made_of(graph, value, routes) for value in step.inputs):
            return step.name
    return None


def _is_made_of(graph: Graph, value: int, source: int) -> bool:
    """Whether a value is rows of another, in some order and type."""
    while value != source:
        step = graph.maker(value)
        if step is None or step.name not in _ROUTING_STEPS or not step.inputs:
            return False
        value = step.inputs[0]
    return True


def arguments_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An example as a forward is called with it: a tensor, a tuple of arguments, or a mapping of keywords."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example), {}) if isinstance(example, tuple | list) else ((example,), {})


def run_once(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording:
    """Record a model's forward with these arguments; where it cannot go, `PlanError` says why."""
    from bitplan.plan.structure.recorder import NumbersNeededError, record

    try:
        return record(model, args, kwargs)
    except NumbersNeededError as error:
        raise PlanError(f"{type(model).__name__}: its forward asks for numbers: {error}") from error
    except Exception as error:  # whatever a forward raises
        words = " ".join(str(error).split())[:300]
        raise PlanError(f"{type(model).__name__}: its forward raised {type(error).__name__}: {words}") from error


def _view(model: nn.Module, recording: Recording) -> ModelView:
    from bitplan.plan.structure.graph import Graph
    from bitplan.plan.structure.recognise import Recogniser, describe_step, find_stacks
    from bitplan.plan.structure.untouched import changes_of

    graph = Graph(recording)
    parts = Recogniser(graph)
    linears = tuple(sorted(parts.linears.values(), key=lambda linear: linear.step))
    others: dict[int, list[str]] = {}
    for linear in linears:
        if linear.source >= 0 and linear.source not in others:
            others[linear.source] = [
                describe_step(step)
                for step, value in graph.final_readers(linear.source)
                if step.index not in parts.linears or parts.linears[step.index].input != value
            ]
    paths_by_value: dict[int, dict[str, None]] = {}
    for call in recording.calls:
        for value in (*call.inputs, *call.outputs):
            paths_by_value.setdefault(value, {})[call.path] = None
    return ModelView(
        source=TRACED,
        tensors=_tensors(model, recording, parts),
        linears=linears,
        norms=tuple(parts.norms),
        embeddings=tuple(parts.embeddings),
        convolutions=tuple(parts.convolutions),
        attentions=tuple(parts.attentions),
        residuals=tuple(parts.residuals),
        gated=tuple(parts.gated),
        plain=tuple(parts.plain),
        stacks=find_stacks(recording, parts),
        joined=_joined(linears, tuple(parts.attentions)),
        changed=changes_of(model),
        unknown=recording.unknown,
        notes=tuple(recording.notes),
        producers=_producers(graph, parts),
        others={value: tuple(dict.fromkeys(readers)) for value, readers in others.items()},
        seen_by={value: tuple(paths) for value, paths in paths_by_value.items()},
        calls=_single_calls(graph),
        fed_by=_fed_by(graph, parts),
    )


def _single_calls(graph: Graph) -> dict[str, ModuleUse]:
    """The one call of each module that is called exactly once, by the module's path."""
    counts: dict[str, int] = {}
    for call in graph.calls:
        counts[call.path] = counts.get(call.path, 0) + 1
    uses = {}
    for call in graph.calls:
        if counts[call.path] == 1:
            functions = tuple(
                (step.index, "identity" if graph.is_dropout_of_nothing(step) else step.name, step.module)
                for step in graph.steps[call.first : call.last]
            )
            uses[call.path] = ModuleUse(call.inputs, call.outputs, functions)
    return uses


def _fed_by(graph: Any, parts: Recogniser) -> dict[int, tuple[int, ...]]:
    """Find for every part the parts whose results reach it with no other part between."""
    every = [*parts.linears.values(), *parts.norms, *parts.embeddings, *parts.convolutions]
    by_output = {part.output: part.step for part in every}
    steps = {graph.values[output].step for output in by_output} - {None}
    step_of = {graph.values[output].step: step for output, step in by_output.items()}
    return {
        part.step: tuple(sorted({step_of[index] for index in graph.behind(part.input, steps)} - {part.step}))
        for part in every
        if part.input >= 0
    }


def _joined(linears: tuple[LinearUse, ...], attentions: tuple[AttentionUse, ...]) -> tuple[tuple[str, ...], ...]:
    """Queries, keys and values of one attention and input, and gate and up of one: what engines compute as one layer.

    Attentions are told apart because all layers of a decoder may read the one output of an encoder.
    """
    readers = {
        weight: number
        for number, attention in enumerate(attentions)
        for weight in (*attention.queries, *attention.keys, *attention.values)
    }
    groups: dict[tuple[int, int | None], dict[str, None]] = {}
    for linear in linears:
        if linear.role in ("query", "key", "value", "gate", "up") and linear.weight and not linear.experts:
            attention = None if linear.role in ("gate", "up") else readers.get(linear.weight, -1)
            groups.setdefault((linear.source, attention), {})[linear.weight] = None
    return tuple(tuple(weights) for weights in groups.values() if len(weights) > 1)


def _producers(graph: Any, parts: Recogniser) -> dict[int, str]:
    """Who made the values that projections read: a part by its path, else a function and its module."""
    from bitplan.plan.structure.recognise import describe_step

    paths = {norm.output: norm.path for norm in parts.norms}
    paths |= {part.output: part.path for part in (*parts.linears.values(), *parts.embeddings, *parts.convolutions)}
    producers: dict[int, str] = {}
    for linear in parts.linears.values():
        value = linear.source
        if value < 0:
            producers[value] = "attention"
        elif value in paths:
            producers[value] = paths[value]
        else:
            step = graph.maker(value)
            producers[value] = "the model's input" if step is None else describe_step(step)
    return producers


def _tensors(model: nn.Module, recording: Recording, parts: Recogniser) -> tuple[TensorRecord, ...]:
    from bitplan.plan.structure.recognise import parameter_roles, roles_by_function

    roles, others = parameter_roles(parts), roles_by_function(parts.graph)
    names: dict[int, list[str]] = {}
    parameters = [*model.named_parameters(remove_duplicate=False), *recording.packed.items()]
    for name, parameter in parameters:
        names.setdefault(id(parameter), []).append(name)
    records = []
    for name, parameter in parameters:
        same = names[id(parameter)]
        path = name.rpartition(".")[0]
        missing = (
            UNKNOWN
            if any(top == "" or path == top or path.startswith(f"{top}.") for top in recording.unknown)
            else UNUSED
        )
        role = next((table[other] for table in (roles, others) for other in (name, *same) if other in table), missing)
        records.append(
            TensorRecord(
                name,
                tuple(parameter.shape),
                str(parameter.dtype).removeprefix("torch."),
                role,
                path,
                tied_to=tuple(other for other in same if other != name),
                experts=next((linear.experts for linear in parts.linears.values() if linear.weight in same), 0),
            )
        )
    return tuple(records)
