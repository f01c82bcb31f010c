"""encode and decode by the fastest implementation for a tensor, with the same bits as the definition.

A fast version (twin) does one thing: the default scale rule on whole blocks. Everything else goes to the plain torch
definition, and `explain_encode` and `explain_decode` say which is used and why. An error in a twin is raised, not tried
again elsewhere; only numbers that are not finite go to the definition, for its message or its replacement.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from bitplan.base.errors import NonFiniteError
from bitplan.formats import Encoded, codec, get_format
from bitplan.formats.codec import (
    NonFinite,
    check_decodable,
    check_importance,
    encode_opaque,
    finite,
    readable,
)
from bitplan.formats.format import Format
from bitplan.formats.gguf.blocks import GgufBlocks, GgufVectors
from bitplan.formats.input_formats import Q8_K, STATIC, round_input

TWIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Below this a CPU twin gains less than a millisecond, and its first use may cost seconds of compiling.
SMALLEST_FOR_CPU = 2**16
_MODULES = {
    "cpu": ("numba", "bitplan.formats.cpu_codec"),
    "cuda": ("triton", "bitplan.formats.triton_codec"),
}
WithNumbers = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # x, decoded numbers and a bias -> a product
_whole: ContextVar[int] = ContextVar("numbers of what tensors are parts of", default=0)


@dataclass(frozen=True)
class Picked:
    """Which implementation runs ("torch", "numba" or "triton"), and why."""

    implementation: str
    reason: str


@contextmanager
def parts_of(numbers: int) -> Iterator[None]:
    """Within the block tensors are parts of so many numbers: small ones, too, take what is compiled for large ones."""
    before = _whole.set(max(numbers, _whole.get()))
    try:
        yield
    finally:
        _whole.reset(before)


def size_with_others(numbers: int) -> int:
    """How many numbers a tensor has together with those that it is a part of."""
    return max(numbers, _whole.get())


def encode(x: Tensor, fmt: Format | str, **options: Any) -> Encoded:
    """Hold a float tensor in a format; options and result are those of `bitplan.formats.encode`."""
    fmt = get_format(fmt)
    readable(x, options.get("name", "tensor"))
    if explain_encode(x, fmt, **options).implementation == "torch":
        return codec.encode(x, fmt, **options)
    if isinstance(fmt, GgufBlocks):
        return _encode_blocks(x, fmt, **options)
    try:
        encoded = _encode_by_twin(x.detach(), fmt)
    except NonFiniteError:
        return codec.encode(x, fmt, **options)
    scales = encoded.scales
    if x.is_cuda and scales is not None and not _all_finite(scales):  # the CPU twins check by themselves, and raise
        return codec.encode(x, fmt, **options)
    return encoded


def encode_unchecked(x: Tensor, fmt: Format | str) -> Encoded:
    """`encode` without waiting for a GPU where it has a kernel: nothing looks for numbers that are not finite."""
    fmt = get_format(fmt)
    if explain_encode(x, fmt).implementation != "triton":
        return encode(x, fmt)
    return _encode_by_twin(x.detach(), fmt)


def _encode_by_twin(x: Tensor, fmt: Format, importance: Tensor | None = None) -> Encoded:
    shape, twins = tuple(x.shape), _twins(x.device.type)
    matrix = x.reshape(fmt.matrix_shape(shape)).contiguous()
    if isinstance(fmt, GgufBlocks):
        search = twins.VECTOR_SEARCH if isinstance(fmt, GgufVectors) else twins.BLOCK_SEARCH
        return encode_opaque(fmt, shape, matrix, importance, search)
    data, scales = twins.ENCODERS[fmt.name](matrix, fmt)
    if scales is None:
        return Encoded(fmt, shape, data.reshape(shape))
    parts = fmt.part_shapes(shape)
    return Encoded(fmt, shape, data.reshape(parts["data"][1]), scales.reshape(parts["scales"][1]))


def _encode_blocks(
    x: Tensor,
    fmt: GgufBlocks,
    *,
    importance: Tensor | None = None,
    nonfinite: NonFinite = "error",
    name: str = "tensor",
    **_: Any,
) -> Encoded:
    """Encode GGUF's block formats by compiled code, with the checks of the plain definition."""
    if importance is not None:
        check_importance(fmt, importance, "mse", tuple(x.shape), name)
    numbers = finite(x.detach(), nonfinite, name)
    fmt.check_range(numbers, name)
    return _encode_by_twin(numbers, fmt, importance)


def decode(encoded: Encoded, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers an Encoded stands for, as `bitplan.formats.decode` gives them."""
    check_decodable(encoded, dtype)
    if explain_decode(encoded, dtype).implementation == "torch":
        return codec.decode(encoded, dtype)
    numbers: Tensor = _twins(encoded.device.type).DECODERS[encoded.fmt.name](encoded, dtype)
    return numbers


def bind_with_numbers(
    encoded: Encoded, dtype: torch.dtype, compute: WithNumbers, bias: Tensor | None
) -> Callable[[Tensor, Any], Tensor | None] | None:
    """A call of x that gives compute(x, numbers, bias), with the numbers that it decodes from these parts on their GPU.

    It checks nothing, is valid as long as the parts stay where they are, and gives None where another GPU is the
    present one. None where no kernel decoded the parts before. The second argument of the call is not read.
    """
    if encoded.device.type != "cuda" or explain_decode(encoded, dtype).implementation != "triton":
        return None
    from bitplan.formats import triton_codec

    return triton_codec.bind_with_numbers(encoded, dtype, compute, bias)


def rounded(x: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """`input_formats.round_input`, on a GPU by the kernels of the format where it has some."""
    if x.is_cuda and not name.startswith(STATIC) and name != Q8_K:
        fmt, matrix = get_format(name), x.detach().reshape(-1, x.shape[-1])
        picked = (_explain(table, fmt, x.device, tuple(matrix.shape), x.dtype) for table in ("ENCODERS", "DECODERS"))
        if x.numel() and dtype in TWIN_DTYPES and all(pick.implementation != "torch" for pick in picked):
            return decode(_encode_by_twin(matrix, fmt), dtype).reshape(x.shape)
    return round_input(x, name, dtype)


def explain_encode(x: Tensor, fmt: Format | str, **options: Any) -> Picked:
    """What `encode` would run for this call."""
    fmt = get_format(fmt)
    same = {
        "scale_rule": fmt.default_rule,
        "pad": "zero",
    }  # no change: the default, rows of whole blocks
    for option, value in options.items():
        if isinstance(value, Tensor) and not (option == "importance" and fmt.is_opaque):
            return Picked("torch", f"{option} has no twin")
        if option not in ("name", "nonfinite", "importance") and value is not None and same.get(option) != value:
            return Picked("torch", f"{option}={value!r} has no twin")
    if not x.is_floating_point() or (fmt.is_cast and options.get("nonfinite") == "replace"):
        return Picked("torch", "the definition checks this input")
    return _explain("ENCODERS", fmt, x.device, tuple(x.shape), x.dtype)


def explain_decode(encoded: Encoded, dtype: torch.dtype = torch.float32) -> Picked:
    """What `decode` would run for this call."""
    if not all(part.is_contiguous() for part in encoded.parts.values()):
        return Picked("torch", "a part is not contiguous")
    return _explain("DECODERS", encoded.fmt, encoded.device, encoded.shape, dtype)


def has_decoder(fmt: Format, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether a compiled kernel decodes contiguous parts of this format and shape there."""
    return _explain("DECODERS", fmt, device, shape, dtype).implementation != "torch"


def _explain(table: str, fmt: Format, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Picked:
    if device.type not in _MODULES:
        return Picked("torch", f"no twins for {device.type}")
    library, _ = _MODULES[device.type]
    cols, count = fmt.matrix_shape(shape)[1], torch.Size(shape).numel()
    if dtype not in TWIN_DTYPES:
        return Picked("torch", f"{dtype} has no twin")
    if fmt.padded_cols(cols) != cols:
        return Picked("torch", "the last block of a row is not whole")
    if device.type == "cpu" and size_with_others(count) < SMALLEST_FOR_CPU:
        return Picked("torch", f"small: {count} numbers")
    if not _is_installed(library):
        return Picked("torch", f"{library} is not installed")
    twins = _twins(device.type)
    searched = fmt.is_opaque and (hasattr(twins, "VECTOR_SEARCH") or not isinstance(fmt, GgufVectors))
    if fmt.name not in getattr(twins, table) and not (table == "ENCODERS" and searched):
        return Picked("torch", f"{fmt.name} has no {library} twin")
    return Picked(library, f"{fmt.name}, whole blocks, default scale rule, {count} numbers on {device.type}")


@functools.cache
def _is_installed(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


@functools.cache
def _twins(device: str) -> ModuleType:
    """Import the module of compiled implementations for a device; this loads numba or Triton."""
    return importlib.import_module(_MODULES[device][1])


def _all_finite(scales: Tensor) -> bool:
    """Whether all scales are finite: no number was infinite or NaN, or too large for its scale. Waits for a GPU.

    Computed from minimum and maximum, which propagate NaN: ten times faster than isfinite on narrow scales.
    """
    if not scales.numel():
        return True
    if scales.dtype == torch.uint8:
        return int(scales.amax()) < 255
    low, high = torch.aminmax(scales)
    return bool(torch.isfinite(low)) and bool(torch.isfinite(high))
