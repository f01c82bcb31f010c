"""Number arithmetic shared by the Triton encoders and decoders: bits to floats, scales, rounding.

Every function is the twin of one in `bitplan.formats` and equal to it bit for bit. Two habits serve that:

- Numbers enter and leave as integer bits, and bfloat16 is widened by shifting: Triton's interpreter widens subnormal
  bfloat16 wrongly, narrows to bfloat16 by truncation, and does not round to E4M3 as the GPU does. Where the GPU has
  a cheap instruction for it, a second branch does the same in integers: for the interpreter (`INTERPRETED`), and
  for GPUs without FP8 (before compute capability 8.9; ELEMENT "e4m3_in_integers").
- No fused multiply-add but where `tl.fma` says so: launches pass `enable_fp_fusion=False`, because x * inverse + MAGIC
  must round twice. Triton emits no flush-to-zero for these operations, so subnormals are kept.

Constants of a launch that kernels branch on are strings: SOURCE and OUT "bf16" "f16" "f32"; ELEMENT as
`Format.element.name`, or "int8_half_away", "e4m3_in_integers"; SCALE "f32" "f16" "bf16" "e8m0" "e4m3".
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (the arguments of Triton functions are Triton's, not Python's)
from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitplan.base.errors import FormatError
from bitplan.base.loops.launch import INTERPRETED
from bitplan.formats.elements import HalfAwayElement
from bitplan.formats.format import Format
from bitplan.formats.scale_rules import SMALLEST_SCALE

# 1.5 * 2^23: floats near it are whole numbers, so adding it rounds to nearest even, and the low bits of the sum are
# the code in two's complement. Exact for |y| < 2^22.
MAGIC = tl.constexpr(12582912.0)
TINY = tl.constexpr(SMALLEST_SCALE)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
PAIR_MAGNITUDE_16 = tl.constexpr(0x7FFF7FFF)
PAIR_MAGNITUDE_32 = tl.constexpr(0x7FFFFFFF7FFFFFFF)

FLOAT_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


@dataclass(frozen=True)
class Launch:
    """How a kernel is cut up: numbers per program, warps per program, neighbouring numbers per thread.

    `numbers` is a power of two. `vector` None leaves the width of memory accesses to the launcher's default.
    """

    numbers: int
    warps: int
    vector: int | None = None


def float_name(dtype: torch.dtype) -> str:
    if dtype not in FLOAT_NAMES:
        raise FormatError(f"the Triton codecs take and give bfloat16, float16 and float32, got {dtype}; cast first")
    return FLOAT_NAMES[dtype]


def element_name(fmt: Format, device: torch.device) -> str:
    assert fmt.element is not None
    if isinstance(fmt.element, HalfAwayElement):
        return fmt.element.name + "_half_away"
    if fmt.element.name == "e4m3" and not has_e4m3_instructions(device):
        return "e4m3_in_integers"
    return fmt.element.name


@functools.cache
def has_e4m3_instructions(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def scale_name(fmt: Format) -> str:
    assert fmt.scales is not None
    if fmt.power_of_two_scales:
        return "e8m0"
    return {torch.float8_e4m3fn: "e4m3", torch.uint8: "u8", **FLOAT_NAMES}[fmt.scales.dtype]


def as_bits(tensor: Tensor) -> Tensor:
    """The same memory as integers of the same width; float32 and float16 stay, Triton handles them everywhere."""
    narrow = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}
    return tensor.view(narrow.get(tensor.dtype, tensor.dtype))


def whole_groups(fmt: Format, cols: int) -> None:
    """Raise where rows are not whole groups: kernels see memory as one run of groups."""
    assert fmt.block.cols is not None
    if cols % fmt.block.cols:
        raise FormatError(
            f"{fmt.name}: the Triton codecs take whole blocks of {fmt.block.cols}, got rows of {cols}; "
            "use bitplan.formats, which pads"
        )


def device_of(tensor: Tensor) -> AbstractContextManager[None]:
    """Triton launches on torch's current device, which need not be the tensor's."""
    return torch.cuda.device_of(tensor)


# ---- bits to floats --------------------------------------------------------------------------------------------------


@triton.jit
def float_of_bits(bits, SOURCE: tl.constexpr):
    """Raw bits of a number -> float32, exactly."""
    if SOURCE == "bf16":
        x = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif SOURCE == "f16":
        x = bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        x = bits.to(tl.float32, bitcast=True)
    return x


@triton.jit
def magnitude_bits(x):
    """|x| as an integer that orders as |x| does, with NaN above infinity: its maximum cannot lose a NaN."""
    return x.to(tl.int32, bitcast=True) & MAGNITUDE


@triton.jit
def pair_of_word(word, SOURCE: tl.constexpr):
    """Two neighbouring numbers held in one integer of twice their width -> (even, odd) as float32."""
    if SOURCE == "bf16":
        even = (word << 16).to(tl.float32, bitcast=True)
        odd = (word & -65536).to(tl.float32, bitcast=True)
    elif SOURCE == "f16":
        even = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        odd = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        even = word.to(tl.int32).to(tl.float32, bitcast=True)
        odd = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return even, odd


@triton.jit
def magnitude_pair_of_word(word, SOURCE: tl.constexpr):
    mask: tl.constexpr = PAIR_MAGNITUDE_32 if SOURCE == "f32" else PAIR_MAGNITUDE_16
    return pair_of_word(word & mask, SOURCE)


@triton.jit
def nibble_signs_of_word(word, SOURCE: tl.constexpr):
    """The two sign bits where a byte of two 4-bit floats has them: 3 (even) and 7 (odd)."""
    if SOURCE == "f32":
        signs = ((word.to(tl.int32) >> 28) & 0x08) | ((word >> 32).to(tl.int32) >> 24 & 0x80)
    else:
        signs = ((word >> 12) & 0x08) | ((word >> 24) & 0x80)
    return signs


@triton.jit
def float_of_e4m3(byte, ELEMENT: tl.constexpr):
    """E4M3 bits (uint8) -> float32."""
    is_cast: tl.constexpr = ELEMENT == "e4m3"
    return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32) if is_cast else float_of_e4m3_in_integers(byte)


@triton.jit
def float_of_e4m3_in_integers(byte):
    """Aligned with the fields of a float32 the value lacks a factor 2^120, for subnormals too."""
    byte = byte.to(tl.int32)
    magnitude = byte & 0x7F
    aligned = (magnitude << 20) | ((byte & 0x80) << 24)
    value = aligned.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where(magnitude == 0x7F, float("nan"), value)


@triton.jit
def float_of_e2m1(sign, magnitude):
    """Sign (at bit 31) and magnitude (at bits 24..22) of an E2M1 code -> float32; as for E4M3, a factor 2^126 lacks."""
    return (sign | magnitude).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


# ---- scales ----------------------------------------------------------------------------------------------------------


@triton.jit
def flush_small(scale):
    return tl.where(tl.abs(scale) < TINY, 0.0, scale)


@triton.jit
def reciprocal(scale):
    """1 / scale correctly rounded, and 0 for 0; the inner where keeps zero off the slow path of the division."""
    is_zero = scale == 0
    return tl.where(is_zero, 0.0, tl.div_rn(1.0, tl.where(is_zero, 1.0, scale)))


@triton.jit
def e8m0_of_limit(limit_bits, LARGEST_EXPONENT: tl.constexpr):
    """Exponent byte of 2^(floor(log2 limit) - LARGEST_EXPONENT), from the float32 bits of the limit.

    A subnormal limit has exponent field 0 and so byte 0, as the reference's clamp gives.
    Infinity and NaN give a byte below 255; `mark_nonfinite` sets it.
    """
    return tl.maximum((limit_bits >> 23) - LARGEST_EXPONENT, 0)


@triton.jit
def mark_nonfinite(byte, limit_bits):
    return tl.where(limit_bits >= 0x7F800000, 255, byte).to(tl.uint8)


@triton.jit
def power_of_two(exponent_field):
    return (exponent_field << 23).to(tl.float32, bitcast=True)


@triton.jit
def load_scale(stored, base, SCALE: tl.constexpr):
    """A scale as stored (bits) -> float32; `base` only matters to E4M3 scales and to integers."""
    if SCALE == "e8m0":
        byte = stored.to(tl.int32)
        bits = tl.where(byte == 0, 0x00400000, byte << 23)
        scale = tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    elif SCALE == "e4m3":
        scale = flush_small(float_of_e4m3_in_integers(stored) * base)
    elif SCALE == "u8":
        scale = flush_small(stored.to(tl.float32) * base)
    elif SCALE == "bf16":
        scale = float_of_bits(stored, "bf16")
    else:
        scale = stored.to(tl.float32)
    return scale


# ---- rounding --------------------------------------------------------------------------------------------------------


@triton.jit
def round_to_integer(y):
    """Nearest integer, ties to even, in the low bits of an int32."""
    return (y + MAGIC).to(tl.int32, bitcast=True)


@triton.jit
def round_half_away(y):
    """Nearest integer, ties away from zero. 0.49999997 is the float below 0.5: with 0.5 itself, the float below a tie
    would reach the next integer in the addition."""
    magnitude = (tl.abs(y) + 0.4999999701976776).to(tl.int32)
    return tl.where(y < 0, -magnitude, magnitude)


@triton.jit
def round_e2m1(magnitude, half_inverse):
    """|x| and half the inverse of its scale -> the E2M1 code in the low 3 bits of an int32; ties to even, 6 saturates.

    With h = |x| / scale / 2 the code is a ramp of slope 4 up to h = 1, 2 up to h = 2, 1 up to h = 3. Each ramp is a
    multiply-add with free saturation, and each addition to MAGIC rounds to nearest even; as a ramp ends on an
    even code, what follows starts on one and ties stay right. Six operations, none on the half-rate integer pipe.
    """
    first = tl.clamp(magnitude * half_inverse, 0.0, 1.0)
    second = tl.clamp(tl.fma(magnitude, half_inverse, -1.0), 0.0, 1.0)
    third = tl.clamp(tl.fma(magnitude, half_inverse, -2.0), 0.0, 1.0)
    code = tl.fma(first, 4.0, MAGIC)
    code = tl.fma(second, 2.0, code)
    return (code + third).to(tl.int32, bitcast=True)


@triton.jit
def round_e4m3(y, ELEMENT: tl.constexpr):
    """E4M3 bits, ties to even, +-448 saturates: just what the GPU's conversion does, two numbers an instruction."""
    return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True) if ELEMENT == "e4m3" else round_e4m3_in_integers(y)


@triton.jit
def round_e4m3_in_integers(y):
    magnitude = tl.minimum(tl.abs(y), 448.0)
    # The power of two of |y|, or 2^-6, times 2^20: added to |y| it leaves 3 bits behind the leading one, or 2^-9 steps.
    exponent = tl.maximum(magnitude.to(tl.int32, bitcast=True), 0x3C800000) & 0x7F800000
    rounded = magnitude + (exponent + (20 << 23)).to(tl.float32, bitcast=True)
    # The low bits of the sum count those steps; exponent field 121 (2^-6) begins at code 8, which is 8 steps.
    code = rounded.to(tl.int32, bitcast=True) + (exponent >> 20) - (121 << 3)
    return ((code & 0x7F) | ((y.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def round_bf16(x):
    """bfloat16 bits (int16), ties to even."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        code = tl.where((bits & MAGNITUDE) > 0x7F800000, 0x7FC0, rounded).to(tl.int16)
    else:
        code = x.to(tl.bfloat16).to(tl.int16, bitcast=True)
    return code


@triton.jit
def narrow(x, OUT: tl.constexpr):
    """float32 -> what is stored for `OUT`: bfloat16 as its bits."""
    if OUT == "bf16":
        y = round_bf16(x)
    elif OUT == "f16":
        y = x.to(tl.float16)
    else:
        y = x
    return y
