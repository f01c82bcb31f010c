"""choose_formats: a plan for any model from one wanted format, by names, shapes and types alone.

`bitplan quantize --format`, `bitplan plan --format` and `bitplan perplexity --format` all ask this function. The first
line that fits a tensor decides:

| tensor | gets |
|---|---|
| integers, flags, powers of two (E8M0) | stays |
| matches `keep`; or `only` is given and nothing of it matches | stays |
| matches `only` | the wanted format, whatever it is |
| one axis (norms, biases, scalars), stacked biases, norms of several axes | stays |
| anything else, where the wanted format is a plain float type | the wanted format |
| router, position table, rotary table, state matrix, single learned row, under 1024 numbers | stays |
| convolution kernel | stays |
| embedding, output head | an 8-bit format where the wanted one is smaller, else the wanted one |
| linear layer, experts | the wanted format |

Where a row is not whole blocks of the format, the nearest format that holds it is taken. Every choice has its reason.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bitplan.errors import ArgumentError, FormatError
from bitplan.formats import Format, get_format
from bitplan.formats.format import NARROW_KERNEL
from bitplan.plan.plan import Choice, Plan, Planned
from bitplan.plan.roles import guess_role

SMALL_NUMBERS = 1024
NOT_FLOATS = "not floats"
FLOAT_TYPES = ("float64", "float32", "float16", "bfloat16")
_NARROW_FLOATS = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float4_e2m1fn_x2")
GGUF_FORMATS = ("q4_0_gguf", "q8_0_gguf", "mxfp4_gguf")
# A tensor of another type stays as it is; the format named in its plan is the one whose codes have this type.
_CODES = {"bool": "uint8", "float8_e8m0fnu": "uint8", "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}


class Stored(NamedTuple):
    """What a file or a model holds under a name: shape, torch dtype, or the format where it is `packed` already."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    packed: bool = False

    @property
    def is_integer(self) -> bool:
        return not self.packed and "float" not in self.dtype and "complex" not in self.dtype


# Tensors that stay whatever their shape; then those that stay unless the wanted format is a plain float type.
_SMALL_ROLES = {"bias": "a bias: it stays, that of many experts too", "norm": "a norm: it stays"}
_SENSITIVE_ROLES = {
    "router": "a router: a small change sends tokens to other experts, so it stays",
    "rope": "a rotary table: it stays",
    "position": "a position table: it is small and added to every token, so it stays",
    "state": "a state matrix: its powers are taken, so it stays",
}


def choose_formats(
    tensors: Mapping[str, Stored | tuple[int, ...]],
    fmt: Format | str,
    *,
    keep: Sequence[str] = (),
    only: Sequence[str] = (),
    pad: bool = False,
    gguf: bool = False,
) -> Plan:
    """Choose a format for every tensor, with the reason; a bare shape stands for float32.

    keep, only   names or shell patterns of tensors, or of modules that hold them (see the table above)
    pad          the last block of a row may be filled, so that every format holds every row
    gguf         take formats that a GGUF file can hold
    """
    if not isinstance(tensors, Mapping):
        raise ArgumentError(f"tensors must map names to shapes, got a {type(tensors).__name__}")
    wanted = get_format(fmt)
    rules = _Rules(wanted, tuple(keep), tuple(only), pad, gguf or wanted.name in GGUF_FORMATS)
    entries = {name: rules.planned(name, _stored(item)) for name, item in tensors.items()}
    return Plan(entries, padding="zero" if pad else "none")


def keep_tensors(
    plan: Plan, tensors: Mapping[str, Stored | tuple[int, ...]], *, keep: Sequence[str] = (), only: Sequence[str] = ()
) -> Plan:
    """The plan, but for tensors that `keep` names, `only` does not, or that are no floats: those stay as they are."""
    entries = dict(plan.entries)
    for name, item in tensors.items():
        stored, reason = _stored(item), _why_kept(name, keep, only)
        if reason is None and name in entries and entries[name].part is None and stored.is_integer:
            reason = NOT_FLOATS
        if reason is not None and name in entries:
            entries[name] = _stays(stored, entries[name].role, reason)
    return Plan(entries, padding=plan.padding)


def name_matches(name: str, pattern: str) -> bool:
    """A name itself, which may hold brackets, or a shell pattern for it or for a module that holds it."""
    if name == pattern:
        return True
    parts = name.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


class _Rules(NamedTuple):
    wanted: Format
    keep: tuple[str, ...]
    only: tuple[str, ...]
    pad: bool
    gguf: bool

    def planned(self, name: str, tensor: Stored) -> Planned:
        if tensor.dtype not in (*FLOAT_TYPES, *_NARROW_FLOATS) and not tensor.packed:
            return _stays(tensor, "other", NOT_FLOATS)
        kept = _why_kept(name, self.keep, self.only)
        if kept is not None:
            return _stays(tensor, guess_role(name), kept)
        if self.only:
            pattern = next(pattern for pattern in self.only if name_matches(name, pattern))
            return Planned(Choice(self.wanted.name, f"matches {pattern!r}"), tensor.shape, guess_role(name))
        return self._by_role(name, tensor)

    def _by_role(self, name: str, tensor: Stored) -> Planned:
        shape, role = tensor.shape, guess_role(name)
        if len(shape) < 2:
            return _stays(tensor, role, "one axis: norms, biases and scalars stay")
        if role in _SMALL_ROLES:
            return _stays(tensor, role, _SMALL_ROLES[role])
        if self.wanted.is_cast:
            return Planned(Choice(self.wanted.name, "floats of two axes or more"), shape, role)
        if role in _SENSITIVE_ROLES:
            return _stays(tensor, role, _SENSITIVE_ROLES[role])
        if len(shape) > 2 and shape[0] == 1:
            return _stays(tensor, role, "a single learned table, which is added to every input: it stays")
        if len(shape) > 2 and shape[-1] < NARROW_KERNEL:
            return _stays(tensor, "conv", "a convolution kernel: few numbers, used many times; it stays")
        if math.prod(shape) < SMALL_NUMBERS:
            return _stays(tensor, role, f"under {SMALL_NUMBERS} numbers: nothing to gain, so it stays")
        if role == "embed" and _bits(self.wanted) < 8:
            why = f"embedding or output head: 8 bits, for in {_bits(self.wanted)} it costs more than it saves"
            return self._fitting(tensor, role, [self._eight_bits], why)
        why = "embedding or output head" if role == "embed" else "a weight of two axes or more"
        return self._fitting(tensor, role, [self.wanted.name, *self._nearest], why)

    @property
    def _eight_bits(self) -> str:
        return "q8_0_gguf" if self.gguf else "int8_row"

    @property
    def _nearest(self) -> list[str]:
        """What to take where the wanted format does not hold the rows: as many bits or more, with smaller blocks."""
        if self.gguf:
            return []  # GGUF's own have blocks of 32, all of them
        return ["nvfp4", "int8_row"] if _bits(self.wanted) < 8 else ["int8_row"]

    def _fitting(self, tensor: Stored, role: str, names: list[str], why: str) -> Planned:
        for name in names:
            fmt = get_format(name)
            cols = fmt.matrix_shape(tensor.shape)[1]
            if self.pad or fmt.padded_cols(cols) == cols or (tensor.packed and tensor.dtype == name):
                first = get_format(names[0])
                changed = (
                    f"; rows of {cols} are not whole blocks of {first.block.cols} ({first.name}), {name} holds them"
                )
                return Planned(Choice(name, why + (changed if name != names[0] else "")), tensor.shape, role)
        text = f"rows of {cols} are not whole blocks of {get_format(names[0]).block.cols} ({names[0]}): it stays"
        return _stays(tensor, role, f"{why}; {text}")


def _stored(item: Stored | tuple[int, ...]) -> Stored:
    if isinstance(item, Stored):
        return item
    if not isinstance(item, tuple | list) or not all(isinstance(size, int) for size in item):
        raise ArgumentError(
            f"tensors must map names to shapes or Stored, got a {type(item).__name__}; of a state_dict it is "
            "{name: tuple(tensor.shape) for name, tensor in state.items()}"
        )
    return Stored(tuple(item))


def _why_kept(name: str, keep: Sequence[str], only: Sequence[str]) -> str | None:
    pattern = next((pattern for pattern in keep if name_matches(name, pattern)), None)
    if pattern is not None:
        return f"kept by {pattern!r}"
    if only and not any(name_matches(name, pattern) for pattern in only):
        return "not among --only"
    return None


def _stays(tensor: Stored, role: str, reason: str) -> Planned:
    """The tensor in its own type; a type of GGUF's that bitplan only decodes becomes float32."""
    if tensor.packed:
        return Planned(Choice(tensor.dtype, reason), tensor.shape, role)
    name = _CODES.get(tensor.dtype, tensor.dtype)
    try:
        get_format(name)
    except FormatError:
        raise FormatError(f"the type {tensor.dtype!r} is none that bitplan knows") from None
    return Planned(Choice(name, reason), tensor.shape, role, stored=tensor.dtype)


def _bits(fmt: Format) -> int:
    return 8 * fmt.storage.itemsize if fmt.element is None else fmt.element.bits
