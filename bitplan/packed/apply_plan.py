"""Rewrites a model by a plan (`apply_plan`), and reports what was changed and why.

Everything is decided before anything is built: every name, shape, tie and layer is checked first, and one error lists
all faults. Then every weight is packed beside the model, and the model changes only when all of them are packed. A
failure (numbers that are not finite, memory) leaves the model as it was.

Names are those of parameters: `model.layers.0.mlp.up_proj.weight`. A packed format turns the layer that owns the weight
into a packed one (`layer_replacement` says which); float32, bfloat16, float16 and float64 cast the parameter
or buffer where it is. A weight that several layers share, such as an embedding and the head, is packed once and stays
shared.

Refuses plans under which float types would clash: a Linear takes inputs of its weight's own type, and no other.

A norm in float32 gives float32 for any input, unless its forward casts back: so each norm that a plan changes is run
once on its own, in its new type. Embeddings give their own type. Packed linears take any type. A mixture of types that
the model had before the plan is not refused: such a model casts by itself.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from bitplan.base.errors import ArgumentError, PlanError, StoreError, did_you_mean
from bitplan.files.models.decoded_in_eval import Morphed
from bitplan.formats import get_format
from bitplan.formats.dispatch import decode, encode
from bitplan.formats.elements import dtype_name
from bitplan.formats.format import Format
from bitplan.formats.scale_rules import ScaleRule
from bitplan.packed.checkpoints.save import adapt_to_transformers, forget
from bitplan.packed.layer_replacement import (
    are_columns,
    format_fault,
    lacking,
    packed_layer,
    packed_shape,
    replaced_layer,
    with_output_rows,
)
from bitplan.packed.packed_weight import PackedWeight
from bitplan.packed.product_strategy import check_strategy
from bitplan.packed.quant_embedding import QuantEmbedding
from bitplan.packed.quant_linear import QuantLinear
from bitplan.packed.rounded_inputs import set_inputs
from bitplan.packed.rounded_kv import round_kv
from bitplan.packed.tile_cache import TileCache
from bitplan.plan.format_choices import Wanted, choose_formats
from bitplan.plan.kv_formats import split_kv
from bitplan.plan.names import listed
from bitplan.plan.plan import Plan
from bitplan.plan.structure.describe import is_norm
from bitplan.plan.structure.model_view import TensorSpec
from bitplan.plan.structure.packable import packed_kind, weights_read_outside, why_not_packed
from bitplan.plan.structure.parameters import NamedParameter, named_parameters_of

# ---- dtype checks ----------------------------------------------------------------------------------------------------


def meeting_faults(
    parameters: Mapping[str, NamedParameter], casts: Mapping[int, torch.dtype], packed: set[int], plan: Plan
) -> list[str]:
    """Sentences on layers that would get inputs of another type than their weights. `casts`, `packed`: by id."""

    def after(tensor: Tensor) -> torch.dtype:
        return casts.get(id(tensor), tensor.dtype)

    replaced = {id(named.module) for named in parameters.values() if id(named.parameter) in packed}
    unchanged = {name: named for name, named in parameters.items() if id(named.module) not in replaced}
    products = {
        name: named.parameter
        for name, named in unchanged.items()
        if isinstance(named.module, nn.Linear | _ConvNd) and named.local == "weight"
    }
    if not products or not casts:
        return []
    common = Counter(after(weight) for weight in products.values()).most_common(1)[0][0]
    takes = next(name for name, weight in products.items() if after(weight) == common)
    faults = []
    for name, named in unchanged.items():
        outgoing = _output_type(named, after, common)
        was = _output_type(named, lambda tensor: tensor.dtype, products[takes].dtype)
        if outgoing is None or outgoing == common or (was is not None and was != products[takes].dtype):
            continue
        faults.append(
            f"{name} would be {_short(after(named.parameter))} ({_reason(plan, name)}) and meet {takes}, "
            f"{_short(common)} ({_reason(plan, takes)}), which takes no other type: change one of the two rules"
        )
    return faults


def _output_type(
    named: NamedParameter, after: Callable[[Tensor], torch.dtype], incoming: torch.dtype
) -> torch.dtype | None:
    """The type of the output of a parameter's module for this input; None where the parameter does not decide it."""
    dtype = after(named.parameter)
    module = named.module
    if not dtype.is_floating_point:
        return None
    if isinstance(module, nn.Linear | _ConvNd | nn.Embedding):
        return dtype
    is_factor = named.local == "weight" and named.parameter.dim() == 1
    if not is_factor or dtype == incoming or not is_norm(module):
        return None
    return _tried(module, {name: after(parameter) for name, parameter in _floats(module)}, incoming)


def _floats(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return (
        (name, parameter) for name, parameter in module.named_parameters(recurse=False) if parameter.is_floating_point()
    )


def _tried(module: nn.Module, types: Mapping[str, torch.dtype], incoming: torch.dtype) -> torch.dtype:
    """The type of a norm's output, by trying it; its weight's type where it refuses a mixture of types."""
    trial = copy.deepcopy(module)
    for name, parameter in _floats(trial):
        parameter.data = parameter.data.to(types[name])
    weight = next(parameter for _, parameter in _floats(trial))
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that a mixture is slow
            out = trial(torch.ones(2, weight.shape[-1], dtype=incoming, device=weight.device))
    except (RuntimeError, TypeError, ValueError):
        return weight.dtype
    return out.dtype if isinstance(out, Tensor) else incoming


def _reason(plan: Plan, name: str) -> str:
    return plan[name].reason if name in plan else "not in the plan"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- apply plan ------------------------------------------------------------------------------------------------------


MAX_FAULTS_SHOWN = 10
MATCHES = ("all", "common")
SKIP_HINT = 'or unsupported="skip" leaves such layers as they are'
UNSUPPORTED = ("error", "skip")


class ApplyError(PlanError):
    """A plan that does not fit the model it is for."""


@dataclass(frozen=True)
class Change:
    """The change that a plan made to one tensor: formats before and after, and the plan's reason."""

    name: str
    before: str
    after: str
    format: str
    bytes_before: int
    bytes_after: int
    reason: str


@dataclass(frozen=True)
class Skipped:
    """A tensor that `apply_plan` left as it was, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class AppliedPlan:
    """Every tensor that was changed, and every one that was not, in the plan's order."""

    changes: tuple[Change, ...]
    skipped: tuple[Skipped, ...]

    @property
    def bytes_before(self) -> int:
        return sum(change.bytes_before for change in self.changes)

    @property
    def bytes_after(self) -> int:
        return sum(change.bytes_after for change in self.changes)

    def lines(self) -> list[str]:
        """A line of text for each tensor."""
        changed = [
            f"{one.name}: {one.before} -> {one.after}, {one.bytes_before} -> {one.bytes_after} bytes ({one.reason})"
            for one in self.changes
        ]
        return [*changed, *(f"{one.name}: left alone ({one.reason})" for one in self.skipped)]


def apply_plan(
    model: nn.Module,
    plan: Wanted,
    *,
    strategy: str = "auto",
    cache: TileCache | None = None,
    match: Literal["all", "common"] = "all",
    unsupported: Literal["error", "skip"] = "error",
    inputs: str | None = None,
    scale_rule: ScaleRule | None = None,
    pad: Literal["zero"] | None = None,
) -> AppliedPlan:
    """Rewrite a model in place so that every tensor has the format of the plan, and keys and values those it names.

    plan              a Plan; or a format, mapping or manifest, from which `choose_formats` makes a plan for this model
    strategy, cache   of the packed layers that are made
    match             "all": plan and model must name the same tensors; "common": tensors of one only are skipped
    unsupported       "skip": a tensor whose layer cannot hold the plan's format stays as it is, listed as skipped
    inputs            the format that all packed layers round their inputs to (`round_inputs`); None: the plan's
    scale_rule, pad   as `bitplan.encode` takes them; pad="zero" fills rows that are not whole blocks,
                      as a plan whose padding is "zero" does
    """
    check_strategy(strategy, "apply_plan")
    set_inputs({}, inputs, "apply_plan")  # refuses an unknown name before anything is read
    for option, value, values in (("match", match, MATCHES), ("unsupported", unsupported, UNSUPPORTED)):
        if value not in values:
            raise ApplyError(f"{option} must be {' or '.join(map(repr, values))}, got {value!r}")
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"apply_plan(model, plan): model must be a torch.nn.Module, got a {type(model).__name__}")
    if any(isinstance(module, Morphed) for module in model.modules()):
        raise ApplyError(
            "the model is morphed: its weights are read in another way; undo it first: morph_model(model, None)"
        )
    tensors = _Tensors(model)
    if not isinstance(plan, Plan):
        plan = choose_formats(tensors.stored(), plan, where="apply_plan")
    plan, kv = split_kv(plan)
    decided = _decide(plan, tensors, match, unsupported)
    _check_meetings(tensors, decided, plan)
    packed_layers = _pack(decided, strategy, cache, {"scale_rule": scale_rule, "pad": pad or plan.pad})
    for decision in decided.casts:
        _check_range(decision)
    layers = {path: packed_layers.get(id(layer), layer) for path, layer in model.named_modules(remove_duplicate=False)}
    planned = {name: fmt for name, fmt in plan.inputs.items() if name in tensors and name not in decided.unsupported}
    set_inputs(layers, planned if inputs is None else inputs, "apply_plan")
    _swap(model, packed_layers)
    if kv is not None:
        round_kv(model, kv)
    if packed_layers:
        adapt_to_transformers(model)
    for decision in decided.casts:
        decision.cast()
    order = {name: index for index, name in enumerate(plan)}
    changes = [one.change for one in decided.packs] + [one.change for one in decided.casts]
    changes.sort(key=lambda change: order[change.name])
    skipped = sorted(decided.skipped, key=lambda one: order.get(one.name, len(order)))
    return AppliedPlan(tuple(changes), tuple(skipped))


# ---- the model's tensors ---------------------------------------------------------------------------------------------


class _Tensors:
    """The tensors of a model by name: parameters, packed weights, and buffers that are saved."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.parameters = {named.name: named for named in named_parameters_of(model)}
        self.parents = {id(child): parent for parent in model.modules() for child in parent.children()}
        modules = list(model.named_modules(remove_duplicate=False))
        self.packed = {path: module for path, module in modules if isinstance(module, PackedWeight)}
        self.buffers = {
            f"{path}.{name}".lstrip("."): (module, name)
            for path, module in modules
            if not isinstance(module, PackedWeight)
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        }

    def __contains__(self, name: object) -> bool:
        return name in self.parameters or name in self.packed or name in self.buffers

    def __iter__(self) -> Iterator[str]:
        yield from (*self.parameters, *self.packed, *self.buffers)

    @cached_property
    def read_outside(self) -> dict[str, str]:
        """Sentences on weights that the model's code reads itself, by their names."""
        return weights_read_outside(self._model)

    def stored(self) -> dict[str, TensorSpec]:
        """A record of every tensor, as `choose_formats` takes them."""
        items = {name: _tensor_of(self, name) for name in self}
        return {
            name: TensorSpec.of(name, tuple(item.shape), item.fmt, transposed=item.transposed)
            if isinstance(item, PackedWeight)
            else TensorSpec.of(name, self.packed_shape(name, tuple(item.shape)), dtype=item.dtype)
            for name, item in items.items()
        }

    def packed_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (
            packed_shape(self.parameters[name].module, self.parameters[name].local, shape)
            if name in self.parameters
            else shape
        )

    def groups(self) -> list[list[str]]:
        """Names that stand for one and the same parameter or packed weight."""
        by_id: dict[int, list[str]] = {}
        for name, named in self.parameters.items():
            by_id.setdefault(id(named.parameter), []).append(name)
        for name, packed in self.packed.items():
            by_id.setdefault(id(packed), []).append(name)
        return list(by_id.values())


# ---- what is decided for each tensor ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PackDecision:
    """A weight that will be packed in format `fmt`: its Parameter under every name, for several layers may share it."""

    parameters: tuple[NamedParameter, ...]
    fmt: Format
    change: Change


@dataclass(frozen=True)
class _CastDecision:
    tensor: Tensor
    dtype: torch.dtype
    cast: Callable[[], None]
    change: Change


@dataclass
class _Decided:
    packs: list[_PackDecision]
    casts: list[_CastDecision]
    skipped: list[Skipped]
    unsupported: set[str]  # names of tensors whose layer cannot hold the plan's format


class _RefusedError(Exception):
    """A tensor cannot have its format. `layer`: the reason is the layer that holds the tensor, not the plan."""

    def __init__(self, reason: str, *, layer: bool = False) -> None:
        super().__init__(reason)
        self.layer = layer


def _decide(plan: Plan, tensors: _Tensors, match: str, unsupported: str) -> _Decided:
    decided = _Decided([], [], [], set())
    _match_names(plan, tensors, match, decided)
    faults, may_skip = [], False
    groups = [[name for name in group if name in plan] for group in tensors.groups()]
    groups += [[name] for name in tensors.buffers if name in plan]
    for names in groups:
        if not names:
            continue
        try:
            _decide_group(plan, tensors, names, decided)
        except _RefusedError as fault:
            if fault.layer and unsupported == "skip":
                decided.skipped += [Skipped(name, str(fault)) for name in names]
                decided.unsupported |= set(names)
            else:
                may_skip |= fault.layer
                faults.append(f"{names[0]}: {fault}")
    faults += _half_packed(decided)
    if faults:
        more = f"; and {len(faults) - MAX_FAULTS_SHOWN} more" if len(faults) > MAX_FAULTS_SHOWN else ""
        skip = f"; {SKIP_HINT}" if may_skip else ""
        raise ApplyError(f"the plan cannot be applied: {'; '.join(faults[:MAX_FAULTS_SHOWN])}{more}{skip}")
    return decided


def _half_packed(decided: _Decided) -> list[str]:
    """Layers of which a plan packs some weights but not all that must be packed together."""
    packed: dict[int, set[str]] = {}
    parameters = [named for decision in decided.packs for named in decision.parameters]
    for named in parameters:
        packed.setdefault(id(named.module), set()).add(named.local)
    return [
        f"{named.name}: is packed by the plan and {listed(missing)} of the same layer is not; pack both or neither"
        for named in parameters
        if (missing := lacking(named.module, packed[id(named.module)]))
    ]


def _match_names(plan: Plan, tensors: _Tensors, match: str, decided: _Decided) -> None:
    lacking = [name for name in plan if name not in tensors]
    unplanned = [names[0] for names in tensors.groups() if not any(name in plan for name in names)]
    if match == "common":
        decided.skipped += [Skipped(name, "the model has no tensor of this name") for name in lacking]
        decided.skipped += [Skipped(name, "not in the plan") for name in unplanned]
        return
    differences = []
    if lacking:
        parts = any(plan.entries[name].part for name in lacking)
        hint = did_you_mean(lacking[0], list(tensors)) + (
            " (codes and scales of experts: load_packed)" if parts else ""
        )
        differences.append(f"the plan names {len(lacking)} tensors that the model lacks: {listed(lacking)}{hint}")
    if unplanned:
        differences.append(f"the model has {len(unplanned)} tensors that the plan lacks: {listed(unplanned)}")
    if differences:
        raise ApplyError(f"{'; '.join(differences)}; resolve the plan from this model's names, or pass match='common'")


def _decide_group(plan: Plan, tensors: _Tensors, names: list[str], decided: _Decided) -> None:
    name = names[0]
    formats = {plan[one].format for one in names}
    if len(formats) > 1:
        raise _RefusedError(
            f"tied to {listed(names[1:])}, for which the plan has another format ({', '.join(sorted(formats))})"
        )
    entry, fmt = plan.entries[name], get_format(plan[name].format)
    if entry.part is not None:
        raise _RefusedError(f"the plan means a part ({entry.part}) of {fmt.name}, and this is a whole tensor")
    tensor = _tensor_of(tensors, name)
    shape = tuple(tensor.shape)
    if entry.shape is not None and entry.shape not in (shape, tensors.packed_shape(name, shape)):
        raise _RefusedError(f"the plan is for shape {entry.shape}, the model has {shape}")
    if isinstance(tensor, PackedWeight):
        if tensor.fmt.name != fmt.name:
            raise _RefusedError(
                f"already packed as {tensor.fmt.name}, the plan has {fmt.name}; packing it again would lose more: "
                "apply the plan to the float model"
            )
        decided.skipped += [Skipped(one, f"already {fmt.name}") for one in names]
        return
    if entry.stored is not None and not tensor.is_floating_point():
        decided.skipped += [Skipped(one, entry.choice.reason) for one in names]
        return
    if not tensor.is_floating_point():
        raise _RefusedError(f"holds {tensor.dtype}, the plan has {fmt.name}", layer=True)
    if fmt.is_cast:
        _decide_cast(plan, tensors, names, tensor, fmt, decided)
    else:
        _decide_pack(plan, tensors, names, tensor, fmt, decided)
    decided.skipped += [Skipped(one, f"tied to {name}") for one in names[1:]]


def _tensor_of(tensors: _Tensors, name: str) -> Tensor | PackedWeight:
    if name in tensors.packed:
        return tensors.packed[name]
    if name in tensors.parameters:
        parameter: Tensor = tensors.parameters[name].parameter
        if nn.parameter.is_lazy(parameter):
            raise StoreError(f"{name}: has no shape yet; run the model once, so that its lazy layers get their weights")
        return parameter
    module, local = tensors.buffers[name]
    buffer: Tensor | None = module._buffers[local]
    assert buffer is not None
    return buffer


def _decide_cast(
    plan: Plan, tensors: _Tensors, names: list[str], tensor: Tensor, fmt: Format, decided: _Decided
) -> None:
    name, before = names[0], dtype_name(tensor.dtype)
    if tensor.dtype == fmt.storage:
        decided.skipped.append(Skipped(name, f"already {fmt.name}"))
        return
    nbytes = fmt.nbytes(tuple(tensor.shape))
    change = Change(name, before, fmt.name, fmt.name, tensor.nbytes, nbytes, plan[name].reason)
    if name in tensors.buffers:
        module, local = tensors.buffers[name]
        cast = _buffer_cast(module, local, tensor, fmt.storage)
    else:
        cast = _parameter_cast(tensor, fmt.storage)
    decided.casts.append(_CastDecision(tensor, fmt.storage, cast, change))


def _decide_pack(
    plan: Plan, tensors: _Tensors, names: list[str], parameter: Tensor, fmt: Format, decided: _Decided
) -> None:
    name = names[0]
    fault = format_fault(fmt)
    if fault is not None:
        raise _RefusedError(fault)
    if name in tensors.buffers:
        raise _RefusedError(f"a buffer, which cannot be {fmt.name}", layer=True)
    sharing = [named for named in tensors.parameters.values() if named.parameter is parameter]
    for named in sharing:
        reason = why_not_packed(named.module, named.local, tensors.parents.get(id(named.module)))
        reason = reason or tensors.read_outside.get(named.name)
        if reason is not None:
            tied = "" if named.name == name else f"tied to {named.name}, which is "
            next_step = "; untie them, or plan a float format for it" if tied else "; plan a float format for it"
            raise _RefusedError(f"{tied}{reason}, and cannot be {fmt.name}{next_step}", layer=True)
        if are_columns(named.module, named.local) != are_columns(sharing[0].module, sharing[0].local):
            raise _RefusedError(
                f"shared by {sharing[0].owner} and {named.owner}, of which one multiplies by its transpose; untie "
                "them, or plan a float format for it",
                layer=True,
            )
    change = Change(
        name,
        f"{type(sharing[0].module).__name__} {dtype_name(parameter.dtype)}",
        f"{packed_kind(sharing[0].module, sharing[0].local)} {fmt.name}",
        fmt.name,
        parameter.nbytes,
        fmt.nbytes(packed_shape(sharing[0].module, sharing[0].local, tuple(parameter.shape))),
        plan[name].reason,
    )
    decided.packs.append(_PackDecision(tuple(sharing), fmt, change))


def _check_meetings(tensors: _Tensors, decided: _Decided, plan: Plan) -> None:
    casts = {id(one.tensor): one.dtype for one in decided.casts}
    packed = {id(one.parameters[0].parameter) for one in decided.packs}
    faults = meeting_faults(tensors.parameters, casts, packed, plan)
    if faults:
        more = f"; and {len(faults) - 1} more such meetings" if len(faults) > 1 else ""
        raise ApplyError(f"the plan cannot be applied: {faults[0]}{more}")


# ---- packing and casting ---------------------------------------------------------------------------------------------


def _pack(
    decided: _Decided, strategy: str, cache: TileCache | None, options: Mapping[str, Any]
) -> dict[int, nn.Module]:
    """The packed layers, each by the id of the layer that it will replace; the model is not touched."""
    weights: dict[int, dict[str, PackedWeight]] = {}
    to_replace: dict[int, NamedParameter] = {}
    for decision in decided.packs:
        first = decision.parameters[0]
        encoded = encode(with_output_rows(first), decision.fmt, name=first.name, **options)
        weight = PackedWeight(encoded, transposed=are_columns(first.module, first.local))
        for named in decision.parameters:
            weights.setdefault(id(named.module), {})[named.local] = weight
            to_replace[id(named.module)] = named
    return {
        key: packed_layer(
            named.module,
            weights[key],
            plain=named.module._parameters,
            dtype=named.parameter.dtype,
            name=named.owner,
            strategy=strategy,
            cache=cache,
        )
        for key, named in to_replace.items()
    }


def _swap(model: nn.Module, packed_layers: Mapping[int, nn.Module]) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if id(child) in packed_layers:
                setattr(parent, name, packed_layers[id(child)])


def _check_range(decision: _CastDecision) -> None:
    """Refuse a cast that would turn large numbers into infinities."""
    tensor, largest = decision.tensor, torch.finfo(decision.dtype).max
    if largest >= torch.finfo(tensor.dtype).max or not tensor.numel():
        return
    low, high = torch.aminmax(tensor.detach().nan_to_num(posinf=0.0, neginf=0.0))
    if float(high) > largest or float(low) < -largest:
        raise ApplyError(
            f"{decision.change.name}: numbers up to {max(float(high), -float(low)):.3g} do not fit {decision.dtype} "
            f"(largest {largest:.3g}); plan bfloat16 or float32 for it"
        )


def _parameter_cast(parameter: Tensor, dtype: torch.dtype) -> Callable[[], None]:
    def cast() -> None:
        grad, parameter.grad = parameter.grad, None
        parameter.data = parameter.data.to(dtype)
        parameter.grad = None if grad is None else grad.to(dtype)

    return cast


def _buffer_cast(module: nn.Module, local: str, buffer: Tensor, dtype: torch.dtype) -> Callable[[], None]:
    def cast() -> None:
        module._buffers[local] = buffer.to(dtype)

    return cast


# ---- a packed model as a plain one -----------------------------------------------------------------------------------


def dequantize(model: nn.Module, *, dtype: torch.dtype | None = None) -> None:
    """Put plain layers in the place of all packed ones, in place; weights take the room of unpacked ones again.

    dtype   the type of the weights that were packed; the model's own unless given

    Numbers that packing rounded stay rounded. Weights that layers share stay shared. Layers are again what they were;
    of a packed layer that replaced none (`QuantLinear.from_linear`) a Linear or an Embedding is made.
    """
    if hasattr(model, "peft_config"):
        raise StoreError("dequantize: the model has adapters; dequantize the model below them (model.get_base_model())")
    layers = {
        path: module
        for path, module in model.named_modules()
        if any(isinstance(child, PackedWeight) for child in module.children())
    }
    if not layers:
        raise StoreError(f"dequantize: nothing in this {type(model).__name__} is packed")
    if "" in layers:
        raise StoreError("dequantize: the model itself is one packed layer, which has no parent to be replaced in")
    target = dtype or _type_of(model)
    plain: dict[str, nn.Module] = {}
    numbers: dict[int, nn.Parameter] = {}
    for path, layer in layers.items():
        plain_layer = _plain_twin(layer, path)
        _fill(plain_layer, layer, target, numbers)
        plain[path] = plain_layer.train(layer.training)
    for path, plain_layer in plain.items():
        model.set_submodule(path, plain_layer)
    forget(model)


def _type_of(model: nn.Module) -> torch.dtype:
    """The type of the model's floats that are not packed."""
    kinds = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
    return kinds[0] if kinds else torch.float32


def _plain_twin(layer: nn.Module, path: str) -> nn.Module:
    """The layer that a packed one replaced, or one of torch's own, without numbers."""
    replaced = replaced_layer(layer)
    if replaced is not None:
        return replaced
    with torch.device("meta"):
        if isinstance(layer, QuantLinear):
            rows, columns = layer.weight.shape
            return nn.Linear(columns, rows, bias=layer.bias is not None)
        if isinstance(layer, QuantEmbedding) and layer.scale is None:
            return nn.Embedding(layer.num_embeddings, layer.embedding_dim, padding_idx=layer.padding_idx)
    raise StoreError(f"dequantize: {path!r}, a {type(layer).__name__}, replaced no layer, so none is known for it")


def _fill(plain: Any, layer: nn.Module, dtype: torch.dtype, numbers: dict[int, nn.Parameter]) -> None:
    """Give the plain layer the packed one's weights, decoded once even if layers share them, and its biases."""
    for local, weight in layer.named_children():
        if not isinstance(weight, PackedWeight):
            continue
        if id(weight) not in numbers:
            decoded = decode(weight.encoded, dtype)
            if weight.transposed:
                decoded = decoded.mT.contiguous()
            numbers[id(weight)] = nn.Parameter(decoded, requires_grad=dtype.is_floating_point)
        plain.register_parameter(local, numbers[id(weight)])
    for local, parameter in layer.named_parameters(recurse=False):
        plain.register_parameter(local, parameter)
    if isinstance(layer, QuantEmbedding) and layer.scale is not None:
        plain.register_buffer("embed_scale", layer.scale.detach().clone(), persistent=False)
