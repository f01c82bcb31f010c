"""Finds which version of the original wrote a network: its packing of float16, fp8 and fp4 changed, unmarked in files.

| dtype | older versions | today's |
|---|---|---|
| float16 | the upper half of a float32 | an IEEE half |
| fp8e4m3, fp8e5m2 | an int8 times scale | a small float times scale: exponent 0 is written for zero alone |
| fp4 | the lower half of an int8: what it stood for is lost | a code of twelve numbers times scale; not 6, 7, 14, 15 |

The numbers tell them apart. Today's version writes no FP8 code with exponent 0 except zero, and scales so that the
largest number lies well below the largest code: an older file has such codes among any hundred numbers. The two
readings of a 16-bit code differ eightfold in their exponents: read the wrong way, numbers of a layer lie within a
factor of two of each other, or hundreds of octaves apart. All layers of a file vote, since one program wrote them; if
no layer is sure, or two disagree, the file is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

Version = Literal["older", "today"]
AMBIGUOUS = ("float16", "fp8e4m3", "fp8e5m2", "fp4")
# Exponent bits, mantissa bits, and the largest code up to twice the number that the scale was made for.
_SMALL_FLOATS = {"fp8e4m3": (4, 3, 0x77), "fp8e5m2": (5, 2, 0x5B)}
_FP4 = (0.0, 0.75, 1.0, 1.5, 2.0, 3.0, float("inf"), float("nan"))
_FP4_UNUSED = (6, 7, 14, 15)
# Among this many numbers an older file has codes that today's version never writes: 0.88 to the power of 96 is 6e-6.
ENOUGH = 96
_STEPS_OF_SCALE = 127  # the scale is the largest number over this
_HALF_ROUNDING, _UPPER_ROUNDING = 2.0**-9, 2.0**-6


def vote(dtype: str, payload: bytes, scale: float) -> Version | None:
    """The version that wrote a layer, by its numbers; None if they do not show it."""
    raw = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    if dtype == "float16":
        return _vote_of_halves(raw[: len(raw) // 2 * 2].view(torch.int16), scale)
    if dtype == "fp4":
        codes = torch.cat((raw >> 4, raw & 15))
        if bool(torch.isin(codes, torch.tensor(_FP4_UNUSED)).any()):
            return "older"
        return "today" if int((codes & 7 != 0).sum()) >= ENOUGH else None
    _, mantissa, largest = _SMALL_FLOATS[dtype]
    sizes = (raw & 127)[raw & 127 != 0]
    if bool((sizes < 2**mantissa).any()):
        return "older"
    beyond = float((sizes > largest).float().mean()) if len(sizes) else 0.0
    if beyond > 0.02:
        return "older"
    return "today" if len(sizes) >= (ENOUGH if beyond == 0 else 4 * ENOUGH) else None


def _vote_of_halves(bits: Tensor, scale: float) -> Version | None:
    own = bits[bits & 0x7FFF != 0]
    if not len(own):
        return None
    half, upper = _halves(own).abs(), _uppers(own).abs()
    if not bool(half.isfinite().all()):
        return "older" if bool(upper.isfinite().all()) else None
    wanted = _STEPS_OF_SCALE * abs(scale)
    if scale not in (0, 1):
        as_half = abs(float(half.max()) / wanted - 1) < _HALF_ROUNDING
        as_upper = abs(float(upper.max()) / wanted - 1) < _UPPER_ROUNDING
        if as_half != as_upper:
            return "today" if as_half else "older"
    if len(own) < ENOUGH:
        return None
    spread = float(upper.median()) / float(upper.max())
    if spread < 2.0**-8:
        return "today"
    negative = float((own < 0).float().mean())
    return "older" if spread > 2.0**-6 and 0.2 < negative < 0.8 else None


def decide(votes: Iterable[Version | None]) -> Version | None:
    """The version on which all votes that are not None agree; None without such votes, or if they disagree."""
    told = {each for each in votes if each is not None}
    return told.pop() if len(told) == 1 else None


def numbers_of(dtype: str, payload: bytes, scale: float, version: Version) -> Tensor:
    """The weights as float32, padding of the last byte included; fp4 of older versions has none."""
    raw = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    if dtype == "float16":
        return _halves(raw.view(torch.int16)) if version == "today" else _uppers(raw.view(torch.int16))
    if version == "older":
        assert dtype != "fp4"
        return raw.view(torch.int8).float() * scale
    if dtype == "fp4":
        table = torch.tensor([*_FP4, *(-value for value in _FP4)])
        return table[torch.stack((raw >> 4, raw & 15), dim=-1).flatten().long()] * scale
    return _small_floats(dtype)[raw.long()] * scale


def _small_floats(dtype: str) -> Tensor:
    """The number of each code; unused codes with exponent 0 are decoded as the original reads them."""
    exponent_bits, mantissa_bits, _ = _SMALL_FLOATS[dtype]
    bias, steps = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    values = []
    for code in range(128):
        exponent, mantissa = divmod(code, steps)
        value = 2.0 ** (exponent - bias) * (1 + mantissa / steps)
        if exponent == 0:
            value = 0.0 if mantissa == 0 else value / 8 if dtype == "fp8e4m3" else value
        if dtype == "fp8e5m2" and exponent == 31:
            value = float("nan") if mantissa else float("inf")
        values.append(value)
    return torch.tensor([*values, *(-value for value in values)])


def _halves(bits: Tensor) -> Tensor:
    return bits.view(torch.float16).float()


def _uppers(bits: Tensor) -> Tensor:
    return bits.view(torch.bfloat16).float()
