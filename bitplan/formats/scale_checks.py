"""Checks the scales and codes of an encoding: which are at the end of their range, at zero, or undefined.

A format fails quietly at its edges. A scale that does not fit its narrow type is clamped, or becomes zero; codes pile
up at the largest magnitude, or at zero; a damaged byte becomes a NaN. All of this shows in the bytes alone, without the
original numbers. Everything is counted on the tensors' device, and read back once.

| of a scale | E8M0 | E4M3 or uint8 times a base | floats |
|---|---|---|---|
| NaN | byte 255 (ggml reads it as 2^128) | E4M3's NaN, or a base that is NaN | NaN |
| saturated | byte 254 | 448 or 255, or an infinite base | infinite |
| underflowed, under codes that are not all zero | byte 0 | zero | zero; float16 from 0 to limit x 2^-24 |

The largest block of a tensor has 448 or 255 by design, so for these storages `clipped` says more: the scale is
saturated, and at least half of the block's codes are at the largest magnitude. A float16 scale below 2^-14 is coarse,
but does harm only where its own rounding (up to 2^-25) moves the largest code (`limit`) by half a step or more: at
limit x 2^-24 and below.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor

from bitplan.base.errors import FormatError
from bitplan.formats.codec import _codes_of_tile
from bitplan.formats.elements import BinaryElement, E2M1Element, IntegerElement, TorchFloat8Element
from bitplan.formats.encoded import Encoded
from bitplan.formats.format import Format, tile_of_grid, tiles, to_blocks
from bitplan.formats.gguf.blocks import GgufBlocks
from bitplan.formats.scale_rules import E8M0_NAN, BasedScales, PowerOfTwoScales

FLOAT16_STEP = 2.0**-24  # the distance of neighbours below 2^-14
_FLOAT8_LARGEST = {torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7B}  # without the sign; above it are inf and NaN


@dataclass(frozen=True)
class ScaleHealth:
    """Counts over one encoding; the counts of pieces of a tensor add up. A plain cast has no blocks, only codes.

    saturated_codes  at the element's largest magnitude, or at either end of an unsigned range; infinities of a cast
    flushed_codes    zeros in blocks that are not all zero
    undefined_codes  patterns that stand for no number: NaN and infinity in 8-bit floats, ternary's fourth, a cast's NaN
    """

    fmt: str
    blocks: int
    codes: int
    nan_scales: int = 0
    saturated_scales: int = 0
    clipped_scales: int = 0
    underflowed_scales: int = 0
    saturated_codes: int = 0
    flushed_codes: int = 0
    undefined_codes: int = 0

    def __add__(self, other: ScaleHealth) -> ScaleHealth:
        if self.fmt != other.fmt:
            raise FormatError(f"counts of {self.fmt} and {other.fmt} do not add up: they are of different formats")
        counts, more = asdict(self), asdict(other)
        return ScaleHealth(self.fmt, **{f.name: counts[f.name] + more[f.name] for f in fields(self) if f.name != "fmt"})

    def to_dict(self) -> dict[str, str | int]:
        return asdict(self)


@dataclass(frozen=True)
class ScaleFlags:
    """Which scales are NaN, at the top of their storage's range, or at its bottom."""

    nan: Tensor
    top: Tensor
    bottom: Tensor


@dataclass(frozen=True)
class BlockFlags:
    """Flags and counts of an encoding: tensors with one entry for each block, [down, across]."""

    nan: Tensor
    saturated: Tensor
    clipped: Tensor
    underflowed: Tensor
    zeros: Tensor
    at_end: Tensor
    undefined: Tensor
    numbers: Tensor


def scale_health(encoded: Encoded) -> ScaleHealth:
    """Count scales and codes at the edges of their format; waits for a GPU once, at the end."""
    fmt = encoded.fmt
    if fmt.is_cast:
        counts = torch.stack([encoded.data.isinf().sum(), encoded.data.isnan().sum()]).tolist()
        return ScaleHealth(fmt.name, 0, encoded.data.numel(), saturated_codes=counts[0], undefined_codes=counts[1])
    flags = block_flags(encoded)
    flushed = torch.where(flags.zeros < flags.numbers, flags.zeros, 0)
    summed = (
        flags.numbers,
        flags.nan,
        flags.saturated,
        flags.clipped,
        flags.underflowed,
        flags.at_end,
        flushed,
        flags.undefined,
    )
    return ScaleHealth(fmt.name, flags.nan.numel(), *torch.stack([part.sum() for part in summed]).tolist())


def scale_flags(fmt: Format, scales: Tensor, base: Tensor | None) -> ScaleFlags:
    """Flags of stored scales alone, in any shape; the codes are not needed."""
    assert fmt.scales is not None
    assert fmt.element is not None
    if isinstance(fmt.scales, PowerOfTwoScales):
        return ScaleFlags(scales == E8M0_NAN, scales == E8M0_NAN - 1, scales == 0)
    loaded = fmt.scales.load(scales, base)
    nan, top, bottom = loaded.isnan(), loaded.isinf(), loaded == 0
    if isinstance(fmt.scales, BasedScales):
        top = (top | (scales.float().abs() == fmt.scales.largest)) & ~nan
    elif scales.dtype == torch.float16:
        bottom = loaded.abs() <= fmt.element.limit * FLOAT16_STEP
    return ScaleFlags(nan, top, bottom)


def scales_at_an_end(fmt: Format, scales: Tensor, base: Tensor | None) -> Tensor:
    """Which scales have any flag of `scale_flags`, by bit patterns alone: many times faster, for whole files."""
    low, high, magnitudes = _edges(fmt, scales)
    at_an_end = (magnitudes <= low) | (magnitudes >= high)
    return at_an_end if base is None else at_an_end | ~(base.isfinite() & (base != 0))


def all_scales_inside(fmt: Format, scales: Tensor, base: Tensor | None) -> Tensor:
    """Whether `scales_at_an_end` is false everywhere; faster still."""
    if not scales.numel():
        return torch.ones((), dtype=torch.bool, device=scales.device)
    low, high, magnitudes = _edges(fmt, scales)
    least, most = torch.aminmax(magnitudes)
    inside = (least > low) & (most < high)
    return inside if base is None else inside & base.isfinite() & (base != 0)


def _edges(fmt: Format, scales: Tensor) -> tuple[int, int, Tensor]:
    """Scales as unsigned integers, the last integer that is at the bottom, and the first that is at the top or NaN."""
    assert fmt.element is not None
    if scales.dtype == torch.uint8:
        return 0, 255 if isinstance(fmt.scales, BasedScales) else E8M0_NAN - 1, scales
    if scales.dtype == torch.float8_e4m3fn:
        return 0, _FLOAT8_LARGEST[scales.dtype], scales.view(torch.uint8) & 0x7F
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[scales.itemsize]
    magnitudes = scales.view(integers) & torch.iinfo(integers).max
    infinity = int(torch.tensor(torch.inf, dtype=scales.dtype).view(integers))
    return int(fmt.element.limit) if scales.dtype == torch.float16 else 0, infinity, magnitudes


def block_flags(encoded: Encoded) -> BlockFlags:
    """Flags and counts per block of an encoding that has blocks, on its device."""
    fmt = encoded.fmt
    grid = fmt.grid(encoded.shape)
    if isinstance(fmt, GgufBlocks):
        return _flags_of_blocks(fmt, encoded, grid)
    assert encoded.scales is not None
    zeros, at_end, undefined, numbers = _count_codes(encoded, grid)
    scales = scale_flags(fmt, encoded.scales.reshape(grid), encoded.base)
    crowded = (2 * at_end >= numbers) & (numbers > 0) if isinstance(fmt.scales, BasedScales) else scales.top
    return BlockFlags(
        nan=scales.nan,
        saturated=scales.top,
        clipped=scales.top & crowded,
        underflowed=scales.bottom & (zeros < numbers),
        zeros=zeros,
        at_end=at_end,
        undefined=undefined,
        numbers=numbers,
    )


def _flags_of_blocks(fmt: GgufBlocks, encoded: Encoded, grid: tuple[int, int]) -> BlockFlags:
    """Which blocks, of those that hold their own scales, have non-finite float16 numbers; codes are not counted."""
    halves = fmt.stored_scales(encoded.data)
    nan, infinite = halves.isnan().any(dim=1).reshape(grid), halves.isinf().any(dim=1).reshape(grid)
    none, counts = torch.zeros_like(nan), torch.zeros(grid, dtype=torch.int32, device=encoded.device)
    return BlockFlags(nan, infinite, infinite, none, counts, counts, counts, counts + (fmt.block.cols or 0))


def every_code_is_defined(fmt: Format) -> bool:
    """Whether every bit pattern is a valid code, so that the scales alone show whether bytes are sound."""
    element = fmt.element
    if isinstance(element, IntegerElement):
        return bool(element.high - element.low + 1 == 2**element.bits)
    return isinstance(element, E2M1Element | BinaryElement)


def any_undefined_code(encoded: Encoded) -> Tensor:
    """Whether any code stands for no number, as a flag on the device; many times faster than counting."""
    data, fmt = encoded.data, encoded.fmt
    if every_code_is_defined(fmt) or not data.numel():
        return torch.zeros((), dtype=torch.bool, device=data.device)
    if isinstance(fmt.element, TorchFloat8Element):
        return (data.view(torch.uint8) & 0x7F).amax() > _FLOAT8_LARGEST[data.dtype]
    assert fmt.packing is not None
    assert fmt.packing.bits == 2
    return ((data >> 1) & ~data & 0b01010101).amax() > 0  # ternary: the high bit of a field without the low one


def _count_codes(encoded: Encoded, grid: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Zeros, codes at the ends, undefined codes and all codes, per block, without the filling of last blocks."""
    fmt = encoded.fmt
    rows, cols = fmt.matrix_shape(encoded.shape)
    wide = torch.int64 if fmt.block.is_tensor else torch.int32  # one block may hold more than 2^31 numbers
    zeros, at_end, undefined, numbers = torch.zeros((4, *grid), dtype=wide, device=encoded.device)
    data = encoded.data.reshape(rows, fmt.data_cols(cols))
    for tile in tiles(fmt, rows, cols):
        height, width = tile[0].stop - tile[0].start, tile[1].stop - tile[1].start
        codes = _codes_of_tile(fmt, data, tile, width)
        real = None
        if codes.numel() == height * width:
            tile_of_grid(fmt, numbers, tile).add_(codes.shape[-1])
        else:
            real = to_blocks(fmt, torch.ones((height, width), dtype=torch.bool, device=encoded.device))
            tile_of_grid(fmt, numbers, tile).view(-1).add_(real.sum(dim=-1, dtype=torch.int32))
        for count, kind in zip((zeros, at_end, undefined), _kinds(fmt, codes, encoded.zero_point), strict=True):
            if kind is not None:
                counted = (kind if real is None else kind & real).sum(dim=-1, dtype=torch.int32)
                tile_of_grid(fmt, count, tile).view(-1).add_(counted)
    return zeros, at_end, undefined, numbers


def _kinds(fmt: Format, codes: Tensor, zero_point: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Which codes are zero, which lie at an end of the range, and which stand for no number (None: none can)."""
    element = fmt.element
    if isinstance(element, E2M1Element):
        magnitude = codes & 7
        return magnitude == 0, magnitude == 7, None
    if isinstance(element, TorchFloat8Element):
        magnitude, largest = codes.view(torch.uint8) & 0x7F, _FLOAT8_LARGEST[codes.dtype]
        return magnitude == 0, magnitude == largest, magnitude > largest
    if isinstance(element, BinaryElement):  # it has no zero: all codes are ends, and a zero block has scale zero
        return codes == 0, codes >= 0, None
    assert isinstance(element, IntegerElement)
    # torch has few comparisons for wide unsigned types; doubles hold every code that rounding doubles can give.
    values = codes if codes.dtype.itemsize == 1 else element.value(codes, torch.float64)
    zero: Tensor | int = 0
    if zero_point is not None:
        zero = zero_point if values is codes else element.value(zero_point, torch.float64)
    is_zero = values == zero
    top, bottom = min(element.high, element.limit), max(element.low, -element.limit)
    at_end = ((values >= top) | (values <= bottom)) & ~is_zero
    return is_zero, at_end, None if every_code_is_defined(fmt) else (values < element.low) | (values > element.high)
