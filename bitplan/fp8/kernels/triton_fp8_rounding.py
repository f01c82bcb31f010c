"""FP8 codes and scales as Triton kernels make them: one number at a time, and two bfloat16 numbers in a word.

All equal `bitplan.fp8.casts` bit for bit. The GPU's conversion rounds to nearest even and saturates; the
interpreter's does not, so next to each piece of assembly stands the same in integer arithmetic, for the interpreter.

Why words of two numbers: a cast of bfloat16 has about 16 instructions a number before it is slower than memory, and
widening alone takes one of them and twice the registers. So numbers stay as they lie in memory up to the conversion:

    maxima      of two numbers in one instruction (`pair_max`)
    scales      without a division (`quick_scale`, `quick_inverse`): there are only 2^15 magnitudes, and tests try all
    codes       two neighbours of a row (`two_codes`), or four rows of a column (`four_codes`), so that the transposed
                layout moves words of four codes and not single bytes
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitplan.base.loops.launch import INTERPRETED
from bitplan.formats.triton_numbers import TINY, float_of_e4m3_in_integers, narrow

INFINITY_BITS = tl.constexpr(0x7F800000)
PAIR_OF_MAGNITUDES = tl.constexpr(0x7FFF7FFF)


def _for_each_type(assembly: str) -> tuple[tl.constexpr, tl.constexpr]:
    """Assembly for E4M3 and for E5M2, made of one text."""
    return tl.constexpr(assembly.replace("TYPE", "e4m3")), tl.constexpr(assembly.replace("TYPE", "e5m2"))


# Four codes leave as one word. If each pair of codes were a value of its own (as Triton's conversion makes it), used
# whole for one layout and byte by byte for the transposed one, ptxas 12.8 would fold it into the word and then read the
# bytes from a register that nothing has written: a matrix of float32 had 3 of 8 transposed codes wrong.
_CODES_E4M3, _CODES_E5M2 = _for_each_type("""{
    .reg .b16 a, b;
    cvt.rn.satfinite.TYPEx2.f32 a, $2, $1;
    cvt.rn.satfinite.TYPEx2.f32 b, $4, $3;
    mov.b32 $0, {a, b};
}""")
_TWO = """{
    .reg .b16 a, b;
    .reg .b32 l, h;
    .reg .f32 x, y;
    shl.b32 l, $1, 16;
    and.b32 h, $1, 0xFFFF0000;
    mov.b32 x, l;
    mov.b32 y, h;
    mul.rn.f32 x, x, $3;
    mul.rn.f32 y, y, $3;
    cvt.rn.satfinite.TYPEx2.f32 a, y, x;
    shl.b32 l, $2, 16;
    and.b32 h, $2, 0xFFFF0000;
    mov.b32 x, l;
    mov.b32 y, h;
    mul.rn.f32 x, x, $4;
    mul.rn.f32 y, y, $4;
    cvt.rn.satfinite.TYPEx2.f32 b, y, x;
    mov.b32 $0, {a, b};
}"""
# The words are widened by other instructions than for rows: else ptxas would keep the widened words of the rows.
_FOUR = """{
    .reg .b16 a, b;
    .reg .b32 i;
    .reg .f32 x, y;
    prmt.b32 i, $1, 0, SELECT;
    mov.b32 x, i;
    prmt.b32 i, $2, 0, SELECT;
    mov.b32 y, i;
    mul.rn.f32 x, x, $5;
    mul.rn.f32 y, y, $5;
    cvt.rn.satfinite.TYPEx2.f32 a, y, x;
    prmt.b32 i, $3, 0, SELECT;
    mov.b32 x, i;
    prmt.b32 i, $4, 0, SELECT;
    mov.b32 y, i;
    mul.rn.f32 x, x, $5;
    mul.rn.f32 y, y, $5;
    cvt.rn.satfinite.TYPEx2.f32 b, y, x;
    mov.b32 $0, {a, b};
}"""
_TWO_E4M3, _TWO_E5M2 = _for_each_type(_TWO)
_LOW_E4M3, _LOW_E5M2 = _for_each_type(_FOUR.replace("SELECT", "0x1044"))
_HIGH_E4M3, _HIGH_E5M2 = _for_each_type(_FOUR.replace("SELECT", "0x3244"))


def _without_products(assembly: str) -> str:
    """The assembly without its multiplications, for words that `pair_times_power` has multiplied."""
    return "\n".join(line for line in assembly.split("\n") if "mul.rn.f32" not in line)


_SCALED_TWO_E4M3, _SCALED_TWO_E5M2 = _for_each_type(_without_products(_TWO))
_SCALED_LOW_E4M3, _SCALED_LOW_E5M2 = _for_each_type(_without_products(_FOUR).replace("SELECT", "0x1044"))
_SCALED_HIGH_E4M3, _SCALED_HIGH_E5M2 = _for_each_type(_without_products(_FOUR).replace("SELECT", "0x3244"))
_PAIR_PRODUCT = tl.constexpr("""{
    .reg .b32 z;
    mov.b32 z, 0x80008000;
    fma.rn.bf16x2 $0, $1, $2, z;
}""")  # plus -0, which changes nothing: a product alone needs compute capability 9.0
_RECIPROCAL = tl.constexpr("""{
    .reg .f32 r, e;
    rcp.approx.ftz.f32 r, $1;
    fma.rn.f32 e, $1, r, 0fBF800000;
    neg.f32 e, e;
    fma.rn.f32 $0, r, e, r;
}""")


# ---- one number ------------------------------------------------------------------------------------------------------


@triton.jit
def fp8_code(y, FP8: tl.constexpr):
    """Scaled numbers -> FP8 bits (uint8): nearest even, saturating, NaN 0x7F."""
    if INTERPRETED:
        BITS: tl.constexpr = 3 if FP8 == "e4m3" else 2
        LIMIT: tl.constexpr = 448.0 if FP8 == "e4m3" else 57344.0
        LEAST: tl.constexpr = 121 if FP8 == "e4m3" else 113  # exponent field of the smallest normal number
        magnitude = tl.minimum(tl.where(y != y, 0.0, tl.abs(y)), LIMIT)
        exponent = tl.maximum(magnitude.to(tl.int32, bitcast=True), LEAST << 23) & INFINITY_BITS
        rounded = magnitude + (exponent + ((23 - BITS) << 23)).to(tl.float32, bitcast=True)
        code = rounded.to(tl.int32, bitcast=True) + (exponent >> (23 - BITS)) - (LEAST << BITS)
        code = (code & 0x7F) | ((y.to(tl.int32, bitcast=True) >> 24) & 0x80)
        byte = tl.where(y != y, 0x7F, code).to(tl.uint8)
    else:
        ASSEMBLY: tl.constexpr = _CODES_E4M3 if FP8 == "e4m3" else _CODES_E5M2
        byte = tl.inline_asm_elementwise(ASSEMBLY, "=r,f,f,f,f", [y], dtype=tl.uint8, is_pure=True, pack=4)
    return byte


@triton.jit
def scale_of_bits(amax_bits, eps, FP8: tl.constexpr):
    """Bits of a largest magnitude -> its scale: at least eps / limit and 2^-126, NaN where it is not finite."""
    LIMIT: tl.constexpr = 448.0 if FP8 == "e4m3" else 57344.0
    is_finite = amax_bits < INFINITY_BITS
    amax = tl.where(is_finite, amax_bits, 0).to(tl.float32, bitcast=True)
    scale = tl.maximum(tl.div_rn(tl.maximum(amax, eps), LIMIT), TINY)
    return tl.where(is_finite, scale, float("nan"))


@triton.jit
def power_of_two_of_bits(amax_bits, eps, FP8: tl.constexpr):
    """The scale of a whole tensor: the same rounded up to a power of two.

    Both limits are 1.75 times a power of two, so the scale's exponent is that of amax minus that of the limit, plus 1
    if the mantissa of amax is above 0.75: no division, exact for every float32.
    """
    LIMIT_EXPONENT: tl.constexpr = 8 if FP8 == "e4m3" else 15
    is_finite = amax_bits < INFINITY_BITS
    amax = tl.maximum(tl.where(is_finite, amax_bits, 0).to(tl.float32, bitcast=True), eps)
    power = ((amax.to(tl.int32, bitcast=True) + 0x1FFFFF) & INFINITY_BITS) - (LIMIT_EXPONENT << 23)
    return tl.where(is_finite, tl.maximum(power, 0x00800000).to(tl.float32, bitcast=True), float("nan"))


@triton.jit
def inverse_of(scale):
    return tl.div_rn(1.0, scale)


@triton.jit
def e8m0_of_bits(amax_bits, eps, FP8: tl.constexpr):
    """Bits of a largest magnitude -> (E8M0 byte, 1 / its scale): exact powers of two, NaN where it is not finite."""
    LIMIT: tl.constexpr = 448.0 if FP8 == "e4m3" else 57344.0
    is_finite = amax_bits < INFINITY_BITS
    amax = tl.maximum(tl.where(is_finite, amax_bits, 0).to(tl.float32, bitcast=True), eps)
    byte = (tl.div_rn(amax, LIMIT).to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
    inverse = ((254 - byte) << 23).to(tl.float32, bitcast=True)
    return tl.where(is_finite, byte, 255), tl.where(is_finite, inverse, float("nan"))


def operand_of(codes: Tensor) -> Tensor:
    """FP8 codes as a product reads them: unchanged for the tensor cores, as bytes for the interpreter."""
    return codes.view(torch.uint8) if INTERPRETED.value else codes


@triton.jit
def operand_values(codes, FP8: tl.constexpr):
    """The codes for the tensor cores; for the interpreter, which converts FP8 wrongly, bytes become float32 here."""
    if INTERPRETED:
        if FP8 == "e4m3":
            values = float_of_e4m3_in_integers(codes)
        else:  # E5M2 is the upper half of a float16
            values = (codes.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        values = codes
    return values


# ---- two bfloat16 numbers in a word ----------------------------------------------------------------------------------


@triton.jit
def pair_max(a, b):
    """Larger magnitude of the low bfloat16s and of the high ones, NaN the largest; signs are left undefined."""
    if INTERPRETED:
        low = tl.maximum(a & 0x7FFF, b & 0x7FFF)
        high = tl.maximum((a >> 16) & 0x7FFF, (b >> 16) & 0x7FFF)
        largest = low | (high << 16)
    else:
        largest = tl.inline_asm_elementwise(
            "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    return largest


@triton.jit
def reduce_pairs(words, AXIS: tl.constexpr):
    """`pair_max` of all words along an axis."""
    if INTERPRETED:  # the interpreter has no reductions by user functions
        low = tl.max(words & 0x7FFF, axis=AXIS)
        high = tl.max((words >> 16) & 0x7FFF, axis=AXIS)
        largest = low | (high << 16)
    else:
        largest = tl.reduce(words, AXIS, pair_max)
    return largest


@triton.jit
def pair_of_rows(a, b):
    """Words of two rows -> (largest of row a) | (largest of row b) << 16."""
    return pair_max((a & 0xFFFF) | (b << 16), ((a >> 16) & 0xFFFF) | (b & -65536))


@triton.jit
def largest_bits(pairs):
    """A pair of magnitudes -> the larger one as bits of a float32."""
    return tl.maximum((pairs << 16) & 0x7FFF0000, pairs & 0x7FFF0000)


@triton.jit
def low_float(pairs):
    return (pairs << 16).to(tl.float32, bitcast=True)


@triton.jit
def high_float(pairs):
    return (pairs & -65536).to(tl.float32, bitcast=True)


@triton.jit
def pair_of_floats(low, high):
    """A word of two numbers rounded to bfloat16."""
    if INTERPRETED:
        word = (narrow(low, "bf16").to(tl.int32) & 0xFFFF) | (narrow(high, "bf16").to(tl.int32) << 16)
    else:
        word = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    return word


@triton.jit
def pair_times_power(x, inverse_pair):
    """A word's two numbers times a power of two, that of `pair_of_floats(inverse, inverse)`: one product for both.

    Exact but at the ends of the range, where codes do not change: what becomes infinite saturates as the product in
    float32 would, and what is rounded among the subnormal numbers has code 0.
    """
    if INTERPRETED:
        inverse = high_float(inverse_pair)
        scaled = pair_of_floats(low_float(x) * inverse, high_float(x) * inverse)
    else:
        scaled = tl.inline_asm_elementwise(
            _PAIR_PRODUCT, "=r,r,r", [x, inverse_pair], dtype=tl.int32, is_pure=True, pack=1
        )
    return scaled


@triton.jit
def quick_scale(amax, least, FP8: tl.constexpr):
    """`scale_of_bits` for the magnitude of a bfloat16, given as float32; `least`: the smallest scale, that of eps.

    A product and two fused multiply-adds equal the division for each of the 2^15 magnitudes; an infinity gives inf -
    inf, which is NaN.
    """
    LIMIT: tl.constexpr = 448.0 if FP8 == "e4m3" else 57344.0
    if INTERPRETED:  # the interpreter's multiply-add rounds twice
        scale = tl.where(amax < float("inf"), tl.maximum(tl.div_rn(amax, LIMIT), least), float("nan"))
    else:
        INVERSE: tl.constexpr = 0.0022321429569274187 if FP8 == "e4m3" else 1.743861685099546e-05
        near = amax * INVERSE
        rest = tl.fma(near, -LIMIT, amax)
        scale = tl.maximum(tl.fma(rest, INVERSE, near), least, propagate_nan=tl.PropagateNan.ALL)
    return scale


@triton.jit
def quick_inverse(scale):
    """1 / scale correctly rounded for scales of 2^-126 to 2^125, and NaN: a division without its test of the range."""
    if INTERPRETED:
        inverse = tl.div_rn(1.0, scale)
    else:
        inverse = tl.inline_asm_elementwise(_RECIPROCAL, "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1)
    return inverse


@triton.jit
def two_codes(x, inverse, FP8: tl.constexpr, SCALED: tl.constexpr = False):
    """Codes of a word's two numbers in an int16: neighbours of one row. SCALED: of x as it is, without `inverse`.

    In assembly, because LLVM would keep each number widened for the second layout, in twice the registers.
    """
    if INTERPRETED:
        if SCALED:
            inverse = 1.0
        low, high = fp8_code(low_float(x) * inverse, FP8), fp8_code(high_float(x) * inverse, FP8)
        codes = (low.to(tl.int32) | (high.to(tl.int32) << 8)).to(tl.int16)
    elif SCALED:
        PLAIN: tl.constexpr = _SCALED_TWO_E4M3 if FP8 == "e4m3" else _SCALED_TWO_E5M2
        codes = tl.inline_asm_elementwise(PLAIN, "=r,r,r", [x], dtype=tl.int16, is_pure=True, pack=2)
    else:
        ASSEMBLY: tl.constexpr = _TWO_E4M3 if FP8 == "e4m3" else _TWO_E5M2
        codes = tl.inline_asm_elementwise(ASSEMBLY, "=r,r,r,f,f", [x, inverse], dtype=tl.int16, is_pure=True, pack=2)
    return codes


@triton.jit
def four_codes(a, b, c, d, inverse, HIGH: tl.constexpr, FP8: tl.constexpr, SCALED: tl.constexpr = False):
    """Codes of four words' low or high numbers in an int32: four rows of one column. SCALED: as in `two_codes`."""
    if INTERPRETED:
        if SCALED:
            inverse = 1.0
        if HIGH:
            a, b, c, d = high_float(a), high_float(b), high_float(c), high_float(d)
        else:
            a, b, c, d = low_float(a), low_float(b), low_float(c), low_float(d)
        low = fp8_code(a * inverse, FP8).to(tl.int32) | (fp8_code(b * inverse, FP8).to(tl.int32) << 8)
        high = fp8_code(c * inverse, FP8).to(tl.int32) | (fp8_code(d * inverse, FP8).to(tl.int32) << 8)
        codes = low | (high << 16)
    elif SCALED:
        PLAIN_LOW: tl.constexpr = _SCALED_LOW_E4M3 if FP8 == "e4m3" else _SCALED_LOW_E5M2
        PLAIN_HIGH: tl.constexpr = _SCALED_HIGH_E4M3 if FP8 == "e4m3" else _SCALED_HIGH_E5M2
        PLAIN: tl.constexpr = PLAIN_HIGH if HIGH else PLAIN_LOW
        codes = tl.inline_asm_elementwise(PLAIN, "=r,r,r,r,r", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)
    else:
        LOW: tl.constexpr = _LOW_E4M3 if FP8 == "e4m3" else _LOW_E5M2
        ASSEMBLY: tl.constexpr = LOW if not HIGH else _HIGH_E4M3 if FP8 == "e4m3" else _HIGH_E5M2
        codes = tl.inline_asm_elementwise(
            ASSEMBLY, "=r,r,r,r,r,f", [a, b, c, d, inverse], dtype=tl.int32, is_pure=True, pack=1
        )
    return codes
