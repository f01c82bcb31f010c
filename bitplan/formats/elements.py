"""Elements: the small sets of numbers that a code can name.

An element knows nothing of scales, blocks or packing. It rounds numbers that are already
scaled to codes (one code per number: int8, uint8, a torch float8, or a wider integer) and gives
the number each code stands for. Rounding is to nearest, ties to even, and out-of-range numbers
saturate, unless the class says otherwise. Sources: OCP Microscaling v1.0 (E2M1, E4M3, E8M0),
OCP FP8, poly (ternary, binary).

`Packing` puts several codes into one byte, in the three orders that files in the wild use.

| order | 4-bit byte holds | used by |
|---|---|---|
| low_first | code 2j in bits 3..0, code 2j+1 in bits 7..4 | gpt-oss, NVFP4, q4_0_poly |
| high_first | first code in the highest bits | poly's JSON files (4-, 2- and 1-bit) |
| halves | code j low, code j + block/2 high | GGUF |

A field is the code's low bits: two's complement, or `offset` added first (offset binary).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor


# Types of numbers by their names in torch, so that layouts are known before torch is imported.
ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float4_e2m1fn_x2": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}


def wider_types(name: str) -> str:
    """A hint for errors: the types that hold numbers too large for this one."""
    return {"bfloat16": "float32", "float32": "float64"}.get(name, "bfloat16 or float32")


def dtype_name(dtype: torch.dtype) -> str:
    """The name that torch has for a type, without `torch.`."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The type that torch has under this name."""
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


# The eight magnitudes of E2M1 in code order; codes 8..15 are their negatives.
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Midpoints between neighbours. A tie goes to the even code: upwards if the upper code is even.
_E2M1_MIDPOINTS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


@dataclass(frozen=True)
class Element(ABC):
    """The numbers of one code: `bits` wide, codes held in the type `codes`, largest magnitude `limit`.

    Saturation changes a number beyond `clip_low` or `clip_high`: rounding alone would put it outside the range. `gauss`
    is the clipping limit, in units of mean |x|, that minimises the squared error of Gaussian numbers; None where
    clipping gains nothing (8-bit floats, 16 bits and more).
    """

    is_sign: ClassVar[bool] = False  # a code is the sign of a number, whatever the scale
    name: str
    bits: int
    codes_name: str
    limit: float
    clip_low: float
    clip_high: float
    gauss: float | None = None

    @abstractmethod
    def round(self, scaled: Tensor) -> Tensor:
        """Round scaled numbers to codes."""

    def value(self, codes: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Codes -> the numbers they stand for, in float32 unless another type is named."""
        return self._value(codes, dtype or torch_dtype("float32"))

    @abstractmethod
    def _value(self, codes: Tensor, dtype: torch.dtype) -> Tensor: ...

    @property
    def codes(self) -> torch.dtype:
        return torch_dtype(self.codes_name)


@dataclass(frozen=True)
class IntegerElement(Element):
    """The element whose numbers are the integers `low`..`high`."""

    low: int = 0
    high: int = 0

    def round(self, scaled: Tensor) -> Tensor:
        return exact_integers(scaled.round(), self.low, self.high, self.codes)

    def _value(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        return integers_as_floats(codes, dtype)


class HalfAwayElement(IntegerElement):
    """Whole numbers with ties away from zero, as C's roundf and Go's math.Round."""

    def round(self, scaled: Tensor) -> Tensor:
        truncated = scaled.trunc()
        ties_out = truncated + (scaled - truncated).abs().ge(0.5) * scaled.sign()
        return exact_integers(ties_out, self.low, self.high, self.codes)


class BinaryElement(Element):
    """The element of two numbers: +1 (code 1) for numbers above zero, else -1 (code 0), as in poly: zero becomes -1."""

    is_sign: ClassVar[bool] = True

    def round(self, scaled: Tensor) -> Tensor:
        import torch

        return (scaled > 0).to(torch.uint8)

    def _value(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        return codes.to(dtype) * 2 - 1


class E2M1Element(Element):
    """The element of 4-bit floats: sign, 2 exponent bits, 1 mantissa bit; no NaN, no infinity; -0 is code 8."""

    def round(self, scaled: Tensor) -> Tensor:
        import torch

        magnitude = scaled.abs()
        code = torch.signbit(scaled).to(torch.uint8) << 3
        for midpoint, tie_goes_up in _E2M1_MIDPOINTS:
            code += (magnitude >= midpoint) if tie_goes_up else (magnitude > midpoint)
        return code

    def _value(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        import torch

        table = torch.tensor(E2M1_MAGNITUDES + tuple(-v for v in E2M1_MAGNITUDES), dtype=dtype, device=codes.device)
        return table[codes.int()]


class TorchFloat8Element(Element):
    """An 8-bit float that torch casts to, with finite saturation made explicit.

    torch 2.11 turns an out-of-range e4m3 into NaN and 2.13 saturates it; clamping first gives one answer.
    """

    def round(self, scaled: Tensor) -> Tensor:
        return scaled.clamp(-self.limit, self.limit).to(self.codes)

    def _value(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        return codes.to(dtype)


def exact_integers(numbers: Tensor, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """Cast floats that are integers, saturating at `low` and `high` even where a float cannot hold them."""
    import torch

    if dtype == torch.uint64:  # torch casts doubles through int64: shift the upper half into its range and back
        upper = numbers >= 2.0**63
        shifted = torch.where(upper, numbers - 2.0**64, numbers.clamp(min=0.0)).clamp(-(2.0**63), 2.0**63 - 1024)
        codes = torch.where(numbers >= 2.0**64, -1, shifted.to(torch.int64))
        return codes.view(torch.uint64)
    if dtype == torch.int64:
        codes = numbers.clamp(-(2.0**63), 2.0**63 - 1024).to(torch.int64)
        return torch.where(numbers >= 2.0**63, high, codes)
    return (
        numbers.to(torch.float64 if high > 2**24 else numbers.dtype).clamp(low, high).to(_cast_through(dtype)).to(dtype)
    )


def integers_as_floats(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Integers as floats, each rounded once; unsigned 64-bit through two signed halves."""
    import torch

    if codes.dtype == torch.uint64:
        signed = codes.view(torch.int64)
        low, high = (signed & 0xFFFFFFFF).to(torch.float64), (signed >> 32 & 0xFFFFFFFF).to(torch.float64)
        return (high * 2.0**32 + low).to(dtype)
    return codes.to(dtype)


def _cast_through(dtype: torch.dtype) -> torch.dtype:
    """The signed type to cast through: torch has few kernels for wide unsigned types."""
    import torch

    return {torch.uint16: torch.int32, torch.uint32: torch.int64}.get(dtype, dtype)


def signed_integer(bits: int, codes: str, gauss: float | None = None) -> IntegerElement:
    high = 2 ** (bits - 1) - 1
    return IntegerElement(f"int{bits}", bits, codes, high, -high - 1.5, high + 0.5, gauss, -high - 1, high)


def unsigned_integer(bits: int, codes: str, gauss: float | None = None) -> IntegerElement:
    high = 2**bits - 1
    return IntegerElement(f"uint{bits}", bits, codes, high, -0.5, high + 0.5, gauss, 0, high)


# Clipping limits for Gaussian numbers, in units of mean |x| (sigma = 1.2533 mean |x|).
# tests/formats/test_scale_rules.py checks them by search. Ternary's limit is BitNet's, not the optimum (1.53).
INT8 = signed_integer(8, "int8", gauss=4.90)
INT4 = signed_integer(4, "int8", gauss=2.97)
INT4_ON_LOW = replace(INT4, limit=8, gauss=3.40)  # the limit gets code -8, as in GGUF's Q4_0
INT4_HALF_AWAY = HalfAwayElement("int4", 4, "int8", 7, -8.5, 7.5, 2.97, -8, 7)
INT8_HALF_AWAY = HalfAwayElement("int8", 8, "int8", 127, -128.5, 127.5, 4.90, -128, 127)
INT2 = signed_integer(2, "int8", gauss=1.31)
UINT8 = unsigned_integer(8, "uint8", gauss=4.92)
UINT4 = unsigned_integer(4, "uint8", gauss=3.18)
UINT2 = unsigned_integer(2, "uint8", gauss=1.97)
TERNARY = IntegerElement("ternary", 2, "int8", 1, -1.5, 1.5, 1.0, -1, 1)
BINARY = BinaryElement("binary", 1, "uint8", 1, -math.inf, math.inf, 1.0)
E2M1 = E2M1Element("e2m1", 4, "uint8", 6.0, -7.0, 7.0, 3.66)
E4M3 = TorchFloat8Element("e4m3", 8, "float8_e4m3fn", 448.0, -464.0, 464.0)
E5M2 = TorchFloat8Element("e5m2", 8, "float8_e5m2", 57344.0, -61440.0, 61440.0)


# ---- packing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packing:
    """How codes of `bits` bits (1, 2 or 4) share bytes; `signed` fields are sign-extended by `unpack`."""

    bits: int
    order: Literal["low_first", "high_first", "halves"]
    signed: bool = False
    offset: int = 0

    @property
    def per_byte(self) -> int:
        return 8 // self.bits

    def packed_length(self, count: int) -> int:
        return -(-count // self.per_byte)

    def pack(self, codes: Tensor) -> Tensor:
        """Pack [..., n] codes into [..., ceil(n / per_byte)] bytes; the last byte is filled up with zero bits."""
        import torch

        fields = (codes + self.offset).view(torch.uint8) & (2**self.bits - 1)
        missing = -fields.shape[-1] % self.per_byte
        fields = torch.nn.functional.pad(fields, (0, missing)) if missing else fields
        lanes = self._lanes(fields)
        packed = torch.zeros_like(lanes[0])
        for shift, lane in zip(self._shifts(), lanes, strict=True):
            packed |= lane << shift
        return packed

    def unpack(self, packed: Tensor, count: int) -> Tensor:
        """Unpack [..., bytes] to [..., count] codes, int8 for signed fields, else uint8."""
        import torch

        fields = [packed >> shift & (2**self.bits - 1) for shift in self._shifts()]
        flat = torch.cat(fields, dim=-1) if self.order == "halves" else torch.stack(fields, dim=-1).flatten(-2)
        codes = flat[..., :count]
        if self.signed:
            sign_bit = 0 if self.offset else 2 ** (self.bits - 1)
            return (codes ^ sign_bit).view(torch.int8) - (self.offset or sign_bit)
        return codes

    def _shifts(self) -> list[int]:
        shifts = [self.bits * lane for lane in range(self.per_byte)]
        return shifts[::-1] if self.order == "high_first" else shifts

    def _lanes(self, fields: Tensor) -> tuple[Tensor, ...]:
        if self.order == "halves":
            return fields.chunk(self.per_byte, dim=-1)
        grouped = fields.reshape(*fields.shape[:-1], fields.shape[-1] // self.per_byte, self.per_byte)
        return grouped.unbind(-1)
