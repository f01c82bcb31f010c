"""choose_formats: makes a plan from a format, mapping, manifest or plan, by names, shapes and types alone.

This is the one place where formats are decided: `quantize_file`, `morph_model`, `apply_plan`, `stream_blocks` and the
command line ask it, and below them there are only plans. docs/manifest.md ("Without a manifest") lists what may be
given, and what each tensor gets from a single format. Every choice has its reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from bitplan.base.errors import ArgumentError, FormatError, PlanError
from bitplan.formats import get_format
from bitplan.formats.format import NARROW_KERNEL, Format
from bitplan.formats.gguf.grids import VECTOR_LAYOUTS
from bitplan.formats.gguf.layouts import LAYOUTS, SMALLER_BLOCKS
from bitplan.formats.input_formats import Inputs, input_format
from bitplan.plan.manifest import Manifest
from bitplan.plan.names import ShellPatterns, listed
from bitplan.plan.plan import Cause, Choice, Plan, Planned
from bitplan.plan.structure.families import guess_role, role_of, split_expert
from bitplan.plan.structure.model_view import TensorSpec

SMALL_NUMBERS = 1024
NOT_FLOATS = "not floats"
FLOAT_TYPES = ("float64", "float32", "float16", "bfloat16")
_NARROW_FLOATS = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float4_e2m1fn_x2")
GGUF_FORMATS = ("q4_0_gguf", "q8_0_gguf", "mxfp4_gguf", *LAYOUTS, *VECTOR_LAYOUTS)
# A tensor of another type stays as it is; its plan names the format whose codes have this type.
_CODES = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "complex64": "int64", "complex128": "int64"}
_CODES |= dict.fromkeys(("bool", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2"), "uint8")


Wanted = Format | str | Plan | Manifest | Mapping[str, Format | str | None]
NamedBy = Literal["any", "own name", "module", "whole name"]
ONE_AXIS = "one axis: norms, biases and scalars stay"


@dataclass(frozen=True)
class NamedTensor(TensorSpec):
    """A tensor that a pattern of a mapping must name closely enough.

    `named_by`: "any" pattern that matches will do; or the pattern must end in the tensor's "own name" (`*.bias`), be
    its whole name or that of its "module", or be its "whole name". `else_stays` is the reason if none does.
    """

    named_by: NamedBy = "any"
    else_stays: str = ""


def _is_named(tensor: TensorSpec, name: str, pattern: str) -> bool:
    """Whether a pattern that matches names a tensor closely enough; one of a single axis by its whole name."""
    module, _, last = name.rpartition(".")
    match tensor.named_by if isinstance(tensor, NamedTensor) else "any" if len(tensor.shape) > 1 else "whole name":
        case "any":
            return True
        case "own name":
            return pattern.rpartition(".")[2] == last
        case "module":
            return pattern in (name, module)
    return pattern == name


def _is_float(tensor: TensorSpec) -> bool:
    """Whether a format can hold the numbers; powers of two (E8M0) count as scales, not as numbers."""
    return tensor.encoded or tensor.dtype in FLOAT_TYPES or tensor.dtype in _NARROW_FLOATS


class Substitutes(NamedTuple):
    """The formats of a container or an engine for tensors that cannot have the one format that is wanted for all.

    eight_bits   for embeddings and output heads, where the wanted format has fewer bits
    nearest      format -> formats to try, in order, if rows are not whole blocks; "*" is for all other formats
    """

    eight_bits: str
    nearest: Mapping[str, tuple[str, ...]]

    def of(self, name: str) -> tuple[str, ...]:
        return self.nearest.get(name, self.nearest.get("*", ()))


_OWN = Substitutes("int8_row", {"*": ("nvfp4", "int8_row")})
_OWN_WIDE = Substitutes("int8_row", {"*": ("int8_row",)})
GGUF_SUBSTITUTES = Substitutes("q8_0_gguf", {name: (smaller,) for name, smaller in SMALLER_BLOCKS.items()})


# Roles that stay in any shape; then roles that stay unless the wanted format is a plain float type.
_SMALL_ROLES = {"bias": "a bias: it stays, that of many experts too", "norm": "a norm: it stays"}
_SENSITIVE_ROLES = {
    "router": "a router: a small change sends tokens to other experts, so it stays",
    "rope": "a rotary table: it stays",
    "position": "a position table: it is small and added to every token, so it stays",
    "state": "a state matrix: its powers are taken, so it stays",
}


def choose_formats(
    tensors: Mapping[str, TensorSpec | tuple[int, ...]],
    formats: Wanted,
    *,
    keep: Sequence[str] = (),
    only: Sequence[str] = (),
    pad: bool = False,
    gguf: bool = False,
    substitutes: Substitutes | None = None,
    base: Plan | None = None,
    where: str = "",
) -> Plan:
    """Choose a format for every tensor, with the reason; a bare shape stands for float32.

    formats      a format, a mapping, a manifest or a plan (see above)
    keep, only   names or shell patterns of tensors or modules: tensors in `keep` stay, and all that are not in `only`
    pad          the last block of a row may be filled, so that every format holds every row
    gguf         take formats that a GGUF file can hold
    substitutes  take these instead, where the wanted format does not fit
    base         formats of the tensors that no pattern of a mapping names; without it they stay
    where        what messages begin with, such as a file's name
    """
    if not isinstance(tensors, Mapping):
        raise ArgumentError(f"tensors must map names to shapes, got a {type(tensors).__name__}")
    stored = {name: _as_spec(name, item) for name, item in tensors.items()}
    ShellPatterns((*keep, *only)).check(stored, where)
    if isinstance(formats, Plan):
        plan = formats.of_kind("weight")
        _check_fit(plan, stored, where)
    elif isinstance(formats, Manifest):
        plan = formats.resolve({name: item.shape for name, item in stored.items()})
    elif not isinstance(formats, Format | str):
        plan = _by_patterns(formats, stored, base, where)
    else:
        fmt = get_format(formats)
        if substitutes is None:
            ours = _OWN if _bits(fmt) < 8 else _OWN_WIDE
            substitutes = GGUF_SUBSTITUTES if gguf or fmt.name in GGUF_FORMATS else ours
        rules = _Rules(fmt, _Kept(keep, only), pad, substitutes)
        entries = {name: rules.planned(name, item) for name, item in stored.items()}
        return Plan(entries, padding="zero" if pad else "none")
    return _keep_tensors(plan, stored, _Kept(keep, only), pad)


def multiplied_names(plan: Plan) -> list[str]:
    """The packed weights whose products may round their inputs: all but an embedding beside which there is a head."""
    has_head = any(role_of(name) == "head" for name in plan)
    return [
        name
        for name, entry in plan.entries.items()
        if entry.kind == "weight" and entry.stored is None and not get_format(entry.choice.format).is_cast
        if not (has_head and role_of(name) == "embedding")
    ]


def give_inputs(plan: Plan, inputs: Inputs, where: str) -> Plan:
    """The plan whose products round their inputs to one format, or to their own; "keep": to none; None: no change."""
    if inputs is None:
        return plan
    names = dict.fromkeys([*multiplied_names(plan), *plan.inputs])
    if isinstance(inputs, Mapping):
        return plan.with_inputs({name: inputs.get(name) for name in names})
    return plan.with_inputs(dict.fromkeys(names, input_format(inputs, where)))


def refuse_inputs_of_experts(plan: Plan, where: str) -> None:
    """Raise where a plan rounds the inputs of experts' products: packed layers of experts cannot."""
    for name, fmt in plan.inputs.items():
        shape = plan.entries[name].shape
        if split_expert(name) is not None or (shape is not None and len(shape) != 2):
            raise PlanError(
                f"{where}: {name}: packed experts have no products of inputs in {fmt}; leave inputs as they are "
                "(keep), or give other weights theirs by a manifest's rules"
            )


def _check_fit(plan: Plan, tensors: Mapping[str, TensorSpec], where: str) -> None:
    """Refuse a plan whose names and shapes are not those of the tensors."""
    begin = f"{where}: " if where else ""
    for kind, names in (("lacks", tensors.keys() - plan.keys()), ("has beyond them", plan.keys() - tensors.keys())):
        if names:
            raise PlanError(
                f"{begin}the plan is for other tensors: it {kind} {len(names)}: {listed(sorted(names))}; "
                "`bitplan plan` makes one for a file"
            )
    for name, entry in plan.entries.items():
        if entry.shape is not None and tuple(entry.shape) != tuple(tensors[name].shape):
            raise PlanError(
                f"{begin}{name}: the plan is for shape {entry.shape}, here it is {tensors[name].shape}; "
                "give this model's plan"
            )


def _by_patterns(
    formats: Mapping[str, Format | str | None], tensors: Mapping[str, TensorSpec], base: Plan | None, where: str
) -> Plan:
    if not isinstance(formats, Mapping):
        raise ArgumentError(
            f"formats must be a format, a mapping, a Manifest or a Plan, got a {type(formats).__name__}"
        )
    begin = f"{where}: " if where else ""
    for pattern, fmt in formats.items():
        if not isinstance(fmt, Format | str | None):
            raise ArgumentError(
                f"{begin}{pattern!r} maps to a {type(fmt).__name__}, and a mapping's values are formats or None; a "
                "manifest's rules (bitplan.plan.Manifest) say more, such as formats of inputs"
            )
    chosen = {pattern: None if fmt is None else get_format(fmt).name for pattern, fmt in formats.items()}
    patterns = ShellPatterns(chosen)
    patterns.check(tensors, where)

    def planned(name: str, tensor: TensorSpec) -> Planned:
        reason, role = "not in the mapping" if formats else "nothing else is asked for", guess_role(name)
        for pattern in patterns.matching(name):
            fmt = chosen[pattern]
            if fmt is None:
                return _stays(tensor, role, f"{pattern!r}: None in the mapping", "kept")
            if _is_float(tensor) and _is_named(tensor, name, pattern):
                why = f"{fmt} for all weights" if pattern == "*" else f"{pattern!r} in the mapping"
                return Planned(Choice(fmt, why, cause="rule"), tensor.shape, role)
            why_not = tensor.else_stays if isinstance(tensor, NamedTensor) else ONE_AXIS
            reason = why_not if _is_float(tensor) else NOT_FLOATS
        return base.entries[name] if base is not None and name in base else _stays(tensor, role, reason, "held")

    return Plan({name: planned(name, tensor) for name, tensor in tensors.items()})


def _keep_tensors(plan: Plan, tensors: Mapping[str, TensorSpec], stays: _Kept, pad: bool) -> Plan:
    """The plan without packing of tensors that `keep` names, that `only` does not name, or that hold no floats."""
    entries = dict(plan.entries)
    for name, entry in plan.entries.items():
        reason = stays.why(name)
        cause: Cause = "kept"
        is_number = tensors[name].encoded or "float" in tensors[name].dtype
        if reason is None and entry.part is None and entry.stored is None and not is_number:
            reason, cause = NOT_FLOATS, "held"
        if reason is not None:
            entries[name] = _stays(tensors[name], entry.role, reason, cause)
    return Plan(entries, padding="zero" if pad else plan.padding)


class _Kept:
    """Decides by `keep` and `only` which tensors stay as they are, and why."""

    def __init__(self, keep: Sequence[str], only: Sequence[str]) -> None:
        self._keep, self.only = ShellPatterns(keep), ShellPatterns(only)
        self.has_only = bool(only)

    def why(self, name: str) -> str | None:
        if pattern := self._keep.matching(name):
            return f"kept by {pattern[0]!r}"
        return "not among those that alone change" if self.has_only and not self.only.matching(name) else None


class _Rules(NamedTuple):
    wanted: Format
    kept: _Kept
    pad: bool
    substitutes: Substitutes

    def planned(self, name: str, tensor: TensorSpec) -> Planned:
        if not _is_float(tensor):
            return _stays(tensor, "other", NOT_FLOATS, "held")
        stays = self.kept.why(name)
        if stays is not None:
            return _stays(tensor, guess_role(name), stays, "kept")
        if asked := self.kept.only.matching(name):
            choice = Choice(self.wanted.name, f"matches {asked[0]!r}", cause="rule")
            return Planned(choice, tensor.shape, guess_role(name))
        return self._by_role(name, tensor)

    def _by_role(self, name: str, tensor: TensorSpec) -> Planned:
        shape, role = tensor.shape, guess_role(name)
        if len(shape) < 2:
            return _stays(tensor, role, ONE_AXIS)
        if role in _SMALL_ROLES:
            return _stays(tensor, role, _SMALL_ROLES[role])
        if self.wanted.is_cast:
            return Planned(Choice(self.wanted.name, "floats of two axes or more", cause="default"), shape, role)
        if role in _SENSITIVE_ROLES:
            return _stays(tensor, role, _SENSITIVE_ROLES[role])
        if len(shape) > 2 and shape[0] == 1:
            return _stays(tensor, role, "a single learned table, which is added to every input: it stays")
        if len(shape) > 2 and shape[-1] < NARROW_KERNEL:
            return _stays(tensor, "conv", "a convolution kernel: few numbers, used many times; it stays")
        if math.prod(shape) < SMALL_NUMBERS:
            return _stays(tensor, role, f"under {SMALL_NUMBERS} numbers: nothing to gain, so it stays")
        if role == "embed" and _bits(self.wanted) < 8:
            eight = self.substitutes.eight_bits
            why = f"embedding or output head: 8 bits, for in {_bits(self.wanted)} it costs more than it saves"
            return self._fitting(tensor, role, [eight, *self.substitutes.of(eight)], why)
        why = "embedding or output head" if role == "embed" else "a weight of two axes or more"
        return self._fitting(tensor, role, [self.wanted.name, *self.substitutes.of(self.wanted.name)], why)

    def _fitting(self, tensor: TensorSpec, role: str, names: list[str], why: str) -> Planned:
        for name in names:
            fmt = get_format(name)
            cols = fmt.matrix_shape(tensor.shape)[1]
            if self.pad or fmt.padded_cols(cols) == cols or (tensor.encoded and tensor.format == name):
                first = get_format(names[0])
                changed = (
                    f"; rows of {cols} are not whole blocks of {first.block.cols} ({first.name}), {name} holds them"
                )
                why += changed if name != names[0] else ""
                return Planned(Choice(name, why, cause="default"), tensor.shape, role)
        text = f"rows of {cols} are not whole blocks of {get_format(names[0]).block.cols} ({names[0]}): it stays"
        return _stays(tensor, role, f"{why}; {text}")


def _as_spec(name: str, item: Any) -> TensorSpec:
    if isinstance(item, TensorSpec):
        return item
    shape: object = item
    if not isinstance(shape, tuple | list) or not all(isinstance(size, int) for size in shape):
        raise ArgumentError(
            f"tensors must map names to shapes or TensorSpecs, got a {type(item).__name__}; of a state_dict it is "
            "{name: tuple(tensor.shape) for name, tensor in state.items()}"
        )
    return TensorSpec.of(name, tuple(shape))


def _stays(tensor: TensorSpec, role: str, reason: str, cause: Cause = "default") -> Planned:
    """The plan's entry for a tensor that stays in its own format or type."""
    if tensor.encoded:
        return Planned(Choice(tensor.format, reason, cause=cause), tensor.shape, role)
    name = _CODES.get(tensor.dtype, tensor.dtype)
    try:
        get_format(name)
    except FormatError:
        raise FormatError(f"the type {tensor.dtype!r} is none that bitplan knows") from None
    return Planned(Choice(name, reason, cause=cause), tensor.shape, role, stored=tensor.dtype)


def _bits(fmt: Format) -> int:
    return 8 * fmt.storage.itemsize if fmt.element is None else fmt.element.bits
