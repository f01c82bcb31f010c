"""Encodes changed weights again, with new scales only for the tiles that need one; repacks codes as they are.

Someone who fine-tunes over a packed base encodes the same weight after every step. Most blocks have hardly moved: a new
scale for each would change every byte of the file for nothing. So a block (tile) keeps its scale while it fits:

    fresh <= kept x reach    under the kept scale no number clips that a fresh scale would not clip
    fresh >= kept / 2        the codes still use at least half of the range

where reach is clip_high / limit: how far rounding alone stays within the codes (int8 127.5/127, E2M1 7/6, E4M3
464/448), and 1 for power-of-two scales, whose rule has its own margin. Else the tile is *rebased*: it gets the scale
and the codes of a fresh encode. A tile that became all zeros fits any scale.

This gives a bound: a kept scale is at most twice the fresh one, and no number clips that would not clip in a fresh
encode; so the largest error of a kept tile is at most twice that of a fresh one, (half the widest gap between codes) x
scale. Rules that clip on purpose (absmean, percentile, mse) clip as they would in a fresh encode.

Scales that are multiples of a `base` (nvfp4, fp4_u8_g128) can only be rebased within base x 448 or base x 255. When the
largest scale no longer fits, or a tile's scale would underflow although the base could be half as large, the base
itself is rebased, and with it every tile. Unsigned formats have one scale and one zero point, kept or rebased together.

`repack` moves the same codes into another byte layout, without rounding a value.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from bitplan.base.errors import FormatError
from bitplan.formats.codec import (
    check_magnitude,
    check_options,
    check_scales,
    choose_affine,
    choose_scales,
    encode,
    encode_with_scales,
    finite,
    readable,
)
from bitplan.formats.elements import BinaryElement
from bitplan.formats.encoded import Encoded
from bitplan.formats.format import Format
from bitplan.formats.registry import get_format
from bitplan.formats.scale_rules import E8M0_NAN, BasedScales, ScaleRule

SHRINK = 2.0  # a scale this many times the fresh one still fits
BINARY_REACH = 2.0  # binary never clips, so both directions get the same room


@dataclass(frozen=True)
class DriftCounts:
    """Counts of tiles: `saturated` and `underflowed` ones did not fit their scale, `rebased` ones got another scale.

    A tile can fail to fit and yet keep its scale, if a fresh scale would be stored as the same byte: steps are coarse
    for the smallest scales of nvfp4 and fp4_u8_g128.
    """

    tiles: int = 0
    saturated: int = 0
    underflowed: int = 0
    rebased: int = 0
    base_rebased: bool = False

    def to_dict(self) -> dict[str, int | bool]:
        return asdict(self)


def requantize(
    encoded: Encoded,
    x: Tensor,
    *,
    scale_rule: ScaleRule | None = None,
    percentile: float = 99.9,
    name: str = "tensor",
) -> tuple[Encoded, DriftCounts]:
    """Encode the weight's new numbers in the same format, keeping each scale that still fits; see the module.

    The options are those of `encode`, and define a fresh scale: give the ones that the encoding was made with. If the
    numbers did not change, the bytes do not change. `encoded` itself is not modified.
    """
    fmt, x = encoded.fmt, readable(x, name)
    if tuple(x.shape) != encoded.shape or x.device != encoded.device:
        raise FormatError(
            f"{name}: the encoding is {encoded.shape} on {encoded.device}, "
            f"the new numbers are {tuple(x.shape)} on {x.device}; they must be the same weight"
        )
    if fmt.is_cast:
        return encode(x, fmt, scale_rule=scale_rule, name=name), DriftCounts()
    if fmt.is_opaque:
        new = encode(x, fmt, scale_rule=scale_rule, pad="zero", name=name)
        # For blocks that hold their own scales, which are searched anew: blocks whose bytes changed count as rebased.
        blocks = math.prod(encoded.fmt.grid(encoded.shape))
        one, two = (item.data.reshape(blocks, -1) if blocks else item.data for item in (encoded, new))
        return new, DriftCounts(blocks, rebased=int((one != two).any(dim=-1).sum()) if blocks else 0)
    rule = check_options(fmt, scale_rule, None, None, None, encoded.shape, name)
    matrix = finite(x, "error", name).reshape(fmt.matrix_shape(encoded.shape))
    check_magnitude(fmt, matrix, name)
    if fmt.zero_point:
        step, zero = choose_affine(fmt, matrix, rule, percentile, None, None, None)
        again, counts = _requantize_affine(encoded, matrix, step, zero)
    else:
        exact_scales, base = choose_scales(fmt, matrix, rule, percentile, None, None, None)
        again, counts = _requantize_blocks(encoded, matrix, exact_scales, base)
    check_scales(again, name)
    return again, counts


def _requantize_blocks(
    encoded: Encoded, matrix: Tensor, exact_scales: Tensor, fresh_base: Tensor | None
) -> tuple[Encoded, DriftCounts]:
    fmt = encoded.fmt
    assert fmt.scales is not None
    assert encoded.scales is not None
    before = encoded.scales.reshape(exact_scales.shape)
    stored = fmt.scales.load(before, encoded.base).to(fmt.work)
    saturated, underflowed = _misfits(fmt, exact_scales, stored)
    base, moves = encoded.base, torch.zeros((), dtype=torch.bool, device=matrix.device)
    if isinstance(fmt.scales, BasedScales):
        assert fresh_base is not None
        assert base is not None
        moves = _base_moves(fmt, fmt.scales, exact_scales, base, fresh_base)
        base = torch.where(moves, fresh_base, base)
    changed = _bits(fmt.scales.store(exact_scales, base)) != _bits(before)
    rebased = ((saturated | underflowed) & changed) | moves
    # If the stored scale would be the same, take the fresh scale before storage: GGUF computes codes from it.
    used = torch.where(rebased | ~changed, exact_scales, stored)
    again = encode_with_scales(fmt, encoded.shape, matrix, used, base, None)
    counts = torch.stack([saturated.sum(), underflowed.sum(), rebased.sum(), moves.long()]).tolist()
    return again, DriftCounts(exact_scales.numel(), counts[0], counts[1], counts[2], bool(counts[3]))


def _misfits(fmt: Format, exact_scales: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
    """Which kept scales no longer fit: too small for the numbers, and too large. NaN counts as too small."""
    assert fmt.element is not None
    reach = _reach(fmt)
    room: Tensor | float = reach
    if fmt.element.clip_high < fmt.element.limit:  # Q4_0 gives its extreme code -8; code 7 has less room
        flipped = torch.signbit(exact_scales) != torch.signbit(stored)
        room = torch.where(flipped, fmt.element.clip_high / fmt.element.limit, reach)
    saturated = ~(exact_scales.abs() <= stored.abs() * room)
    underflowed = exact_scales.abs() * SHRINK < stored.abs()
    if not isinstance(fmt.element, BinaryElement):
        underflowed &= exact_scales != 0
    return saturated, underflowed & ~saturated


def _reach(fmt: Format) -> float:
    """The factor by which a fresh scale may exceed the kept one before numbers clip."""
    assert fmt.element is not None
    if fmt.power_of_two_scales:
        return 1.0
    if math.isinf(fmt.element.clip_high):
        return BINARY_REACH
    on_high = fmt.element.clip_high >= fmt.element.limit
    return (fmt.element.clip_high if on_high else -fmt.element.clip_low) / fmt.element.limit


def _base_moves(fmt: Format, scales: BasedScales, exact_scales: Tensor, base: Tensor, fresh_base: Tensor) -> Tensor:
    """Whether to replace the base of a tensor's scales by `fresh_base`: a bool tensor on the device.

    True if scales overflow with the present base, or are lost although a much smaller one would hold them.
    """
    overflows = ~(fresh_base <= base * _reach(fmt))
    stored = scales.load(scales.store(exact_scales, base), base)
    lost = (exact_scales > 0) & ((stored == 0) | (stored > SHRINK * exact_scales))
    return overflows | (lost.any() & (fresh_base * SHRINK <= base))


def _requantize_affine(encoded: Encoded, matrix: Tensor, step: Tensor, zero: Tensor) -> tuple[Encoded, DriftCounts]:
    """Encode by one scale and zero point, kept while the range that a fresh encode covers lies within the codes."""
    fmt, element = encoded.fmt, encoded.fmt.element
    assert element is not None
    assert fmt.scales is not None
    assert encoded.scales is not None
    assert encoded.zero_point is not None
    stored = fmt.scales.load(encoded.scales, None).reshape(1, 1).to(fmt.work)
    fresh_code, stored_code = (element.value(code, fmt.work) for code in (zero, encoded.zero_point))
    low, high = -fresh_code * step, (element.limit - fresh_code) * step
    inside = (low >= (element.clip_low - stored_code) * stored) & (high <= (element.clip_high - stored_code) * stored)
    saturated = ~inside
    underflowed = inside & (step * SHRINK < stored) & (step > 0)
    same = (step == stored) & (fresh_code == stored_code)
    flags = torch.cat([saturated, underflowed, (saturated | underflowed) & ~same]).long().flatten().tolist()
    used, code = (step, zero) if flags[2] else (stored, encoded.zero_point)
    again = encode_with_scales(fmt, encoded.shape, matrix, used, None, code)
    return again, DriftCounts(1, saturated=flags[0], underflowed=flags[1], rebased=flags[2])


def _bits(stored: Tensor) -> Tensor:
    """Stored scales as integers: a NaN equals itself, and 8-bit floats can be compared."""
    return stored.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[stored.itemsize])


# Pairs of formats that hold the same numbers in different bytes.
_TWINS = ({"q4_0_poly", "q4_0_gguf"}, {"mxfp4", "mxfp4_gguf"})


def repack(encoded: Encoded, fmt: Format | str, *, round_scales: bool = False) -> Encoded:
    """Move codes and scales to a twin layout: q4_0_poly <-> q4_0_gguf, mxfp4 <-> mxfp4_gguf.

    The codes never change. GGUF's scales are float16: a float32 scale that does not fit is an error,
    unless `round_scales` accepts the nearest one.
    """
    target = get_format(fmt)
    if {encoded.fmt.name, target.name} not in _TWINS:
        pairs = ", ".join(" <-> ".join(sorted(pair)) for pair in _TWINS)
        raise FormatError(
            f"{encoded.fmt.name} does not repack to {target.name} without rounding (only {pairs}); "
            "decode and encode instead"
        )
    assert encoded.scales is not None
    assert target.scales is not None
    assert target.packing is not None
    scales = encoded.scales.to(target.scales.dtype)
    if scales.dtype.is_floating_point:
        _check_rounding(encoded, scales, round_scales)
    elif bool((scales == E8M0_NAN).any()):
        raise FormatError(f"a scale byte 255 of {encoded.fmt.name} is NaN to mxfp4 and 2^128 to mxfp4_gguf")
    data = target.packing.pack(encoded.codes())
    return Encoded(target, encoded.shape, data.reshape(target.part_shapes(encoded.shape)["data"][1]), scales)


def _check_rounding(encoded: Encoded, scales: Tensor, round_scales: bool) -> None:
    assert encoded.scales is not None
    changed = int((scales.to(encoded.scales.dtype) != encoded.scales).sum())
    if changed and not (round_scales and bool(torch.isfinite(scales).all())):
        raise FormatError(
            f"{changed} of {scales.numel()} scales of {encoded.fmt.name} do not fit {scales.dtype} exactly; "
            "pass round_scales=True to round those in range (each value then moves by at most 2^-11 of itself, "
            "or 2^-22 where the scale is below 2^-14)"
        )
