"""Codes to bfloat16, whole 32-bit words at a time: what the fused products spend their instructions on.

Four bytes of codes lie in one register, and integer operations are half rate on Hopper, so they are counted here.
E2M1, for two nibbles n spread to the low ends of the two halves of a word: n * (2^6 + 2^12) puts a copy of n at bits
6..9 and one at 12..15, and the mask 0x81C0 keeps the magnitude at the lowest bits of a bfloat16's exponent and the
top of its mantissa, and the sign at bit 15: the value times 2^-126, subnormals included. One multiplication with the
block's scale times 2^126 makes it a weight. Two masks and a (full-rate) multiplication for two codes.

Pairs of bfloat16 are multiplied by `fma` with z = -0.0 twice, and added by `fma` with o = 1.0 twice, which give the
same bits: `mul.bf16x2` and `sub.bf16x2` need compute capability 9.0, `fma` 8.0.

WORDS says which assembly: "0123", right for any four codes that Triton puts into one register; "0213", an eighth fewer
integer operations, right where those four are neighbours of one row and share a scale, which is how Triton feeds its
`mma` instructions (`fused_few_rows` tries it before it trusts it); or "none", plain Triton with float32 results, for
its interpreter and for other makers' GPUs.

Finishes the sums of the fused products: adds up the parts of a split, scales, adds the bias.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from bitplan.formats.triton_numbers import float_of_e2m1, float_of_e4m3_in_integers, load_scale, round_bf16

# ---- sums ------------------------------------------------------------------------------------------------------------


@triton.jit
def is_last_of_split(acc, partial_ptr, counter_ptr, split, size, at, ok, SPLIT: tl.constexpr):
    """Leave this program's sum for the others; true for the last of them to come, which sets the counter back."""
    tl.store(partial_ptr + split * size + at, acc, mask=ok)
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == SPLIT - 1
    if is_last:
        tl.store(counter_ptr, 0)
    return is_last


@triton.jit
def sum_of_split(partial_ptr, size, at, ok, SPLIT: tl.constexpr):
    """What all programs of a tile left, added in order: the result does not depend on who came last."""
    total = tl.load(partial_ptr + at, mask=ok, other=0.0, cache_modifier=".cg")
    for other in tl.static_range(1, SPLIT):
        total += tl.load(partial_ptr + other * size + at, mask=ok, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def scaled_with_bias(
    acc,
    scales_ptr,
    factor_ptr,
    bias_ptr,
    row,
    GROUP: tl.constexpr,
    FACTORS: tl.constexpr,
    BIAS: tl.constexpr,
):
    """[outputs, rows] sums times their row's scale (or a factor, the tensor's or the row's), plus their bias."""
    if GROUP == 0:
        acc *= tl.load(scales_ptr + row)[:, None]
    elif FACTORS:
        acc *= tl.load(factor_ptr + row)[:, None]
    else:
        acc *= tl.load(factor_ptr)
    if BIAS != "none":
        bias = tl.load(bias_ptr + row)
        if BIAS == "bf16":
            bias = (bias.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        acc += bias[:, None]
    return acc


# ---- decode words ----------------------------------------------------------------------------------------------------


# $0, $1: low nibbles of bytes 0..3 as bfloat16 pairs; $2, $3: high nibbles; $4 the bytes; $5 to $8 each byte's
# multiplier, in both halves.
_E2M1 = tl.constexpr("""
{
.reg .b32 t, u, a, b, c, d, p, q, z;
mov.b32 z, 0x80008000;
prmt.b32 p, $5, $6, 0x7610;
prmt.b32 q, $7, $8, 0x7610;
prmt.b32 t, $4, 0, 0x4140;
prmt.b32 u, $4, 0, 0x4342;
and.b32 a, t, 0x000F000F;
and.b32 b, u, 0x000F000F;
and.b32 c, t, 0x00F000F0;
and.b32 d, u, 0x00F000F0;
mul.lo.u32 a, a, 4160;
mul.lo.u32 b, b, 4160;
mul.lo.u32 c, c, 260;
mul.lo.u32 d, d, 260;
and.b32 a, a, 0x81C081C0;
and.b32 b, b, 0x81C081C0;
and.b32 c, c, 0x81C081C0;
and.b32 d, d, 0x81C081C0;
fma.rn.bf16x2 $0, a, p, z;
fma.rn.bf16x2 $1, b, q, z;
fma.rn.bf16x2 $2, c, p, z;
fma.rn.bf16x2 $3, d, q, z;
}
""")
# The same for four bytes that share a scale, in the order 0 2 1 3, which `_SPLIT_0213` gives x too: no spreading.
E2M1_0213 = tl.constexpr("""
{
.reg .b32 v, a, b, c, d, z;
mov.b32 z, 0x80008000;
shr.b32 v, $4, 8;
and.b32 a, $4, 0x000F000F;
and.b32 b, v, 0x000F000F;
and.b32 c, $4, 0x00F000F0;
and.b32 d, v, 0x00F000F0;
mul.lo.u32 a, a, 4160;
mul.lo.u32 b, b, 4160;
mul.lo.u32 c, c, 260;
mul.lo.u32 d, d, 260;
and.b32 a, a, 0x81C081C0;
and.b32 b, b, 0x81C081C0;
and.b32 c, c, 0x81C081C0;
and.b32 d, d, 0x81C081C0;
fma.rn.bf16x2 $0, a, $5, z;
fma.rn.bf16x2 $1, b, $5, z;
fma.rn.bf16x2 $2, c, $5, z;
fma.rn.bf16x2 $3, d, $5, z;
}
""")
# Stored plus 8: 0x4300 | n is 128 + n, and 136 less (k, times o = 1.0) is the code; times the scale, rounded once.
_INT4 = tl.constexpr("""
{
.reg .b32 t, u, a, b, c, d, k, p, q, z, o;
mov.b32 z, 0x80008000;
mov.b32 o, 0x3F803F80;
prmt.b32 p, $5, $6, 0x7610;
prmt.b32 q, $7, $8, 0x7610;
mov.b32 k, 0xC308C308;
prmt.b32 t, $4, 0, 0x4140;
prmt.b32 u, $4, 0, 0x4342;
lop3.b32 a, t, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 b, u, 0x000F000F, 0x43004300, 0xEA;
shr.b32 t, t, 4;
shr.b32 u, u, 4;
lop3.b32 c, t, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 d, u, 0x000F000F, 0x43004300, 0xEA;
fma.rn.bf16x2 a, a, o, k;
fma.rn.bf16x2 b, b, o, k;
fma.rn.bf16x2 c, c, o, k;
fma.rn.bf16x2 d, d, o, k;
fma.rn.bf16x2 $0, a, p, z;
fma.rn.bf16x2 $1, b, q, z;
fma.rn.bf16x2 $2, c, p, z;
fma.rn.bf16x2 $3, d, q, z;
}
""")
INT4_0213 = tl.constexpr("""
{
.reg .b32 t, a, b, c, d, k, z, o;
mov.b32 z, 0x80008000;
mov.b32 o, 0x3F803F80;
mov.b32 k, 0xC308C308;
lop3.b32 a, $4, 0x000F000F, 0x43004300, 0xEA;
shr.b32 t, $4, 4;
lop3.b32 c, t, 0x000F000F, 0x43004300, 0xEA;
shr.b32 t, $4, 8;
lop3.b32 b, t, 0x000F000F, 0x43004300, 0xEA;
shr.b32 t, $4, 12;
lop3.b32 d, t, 0x000F000F, 0x43004300, 0xEA;
fma.rn.bf16x2 a, a, o, k;
fma.rn.bf16x2 b, b, o, k;
fma.rn.bf16x2 c, c, o, k;
fma.rn.bf16x2 d, d, o, k;
fma.rn.bf16x2 $0, a, $5, z;
fma.rn.bf16x2 $1, b, $5, z;
fma.rn.bf16x2 $2, c, $5, z;
fma.rn.bf16x2 $3, d, $5, z;
}
""")
# A float16 scale is the sum of two bfloat16 ($5.. and $9..); code * $9 is exact, so the fused product rounds once.
_INT4_TWO_SCALES = tl.constexpr("""
{
.reg .b32 t, u, a, b, c, d, r, k, p, q, v, w, z, o;
mov.b32 z, 0x80008000;
mov.b32 o, 0x3F803F80;
prmt.b32 p, $5, $6, 0x7610;
prmt.b32 q, $7, $8, 0x7610;
prmt.b32 v, $9, $10, 0x7610;
prmt.b32 w, $11, $12, 0x7610;
mov.b32 k, 0xC308C308;
prmt.b32 t, $4, 0, 0x4140;
prmt.b32 u, $4, 0, 0x4342;
lop3.b32 a, t, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 b, u, 0x000F000F, 0x43004300, 0xEA;
shr.b32 t, t, 4;
shr.b32 u, u, 4;
lop3.b32 c, t, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 d, u, 0x000F000F, 0x43004300, 0xEA;
fma.rn.bf16x2 a, a, o, k;
fma.rn.bf16x2 b, b, o, k;
fma.rn.bf16x2 c, c, o, k;
fma.rn.bf16x2 d, d, o, k;
fma.rn.bf16x2 r, a, v, z;
fma.rn.bf16x2 $0, a, p, r;
fma.rn.bf16x2 r, b, w, z;
fma.rn.bf16x2 $1, b, q, r;
fma.rn.bf16x2 r, c, v, z;
fma.rn.bf16x2 $2, c, p, r;
fma.rn.bf16x2 r, d, w, z;
fma.rn.bf16x2 $3, d, q, r;
}
""")
# The same for four bytes that share a scale: $5 and $6.
INT4_TWO_SCALES_0213 = tl.constexpr("""
{
.reg .b32 t, a, b, c, d, r, k, z, o;
mov.b32 z, 0x80008000;
mov.b32 o, 0x3F803F80;
mov.b32 k, 0xC308C308;
lop3.b32 a, $4, 0x000F000F, 0x43004300, 0xEA;
shr.b32 t, $4, 4;
lop3.b32 c, t, 0x000F000F, 0x43004300, 0xEA;
shr.b32 t, $4, 8;
lop3.b32 b, t, 0x000F000F, 0x43004300, 0xEA;
shr.b32 t, $4, 12;
lop3.b32 d, t, 0x000F000F, 0x43004300, 0xEA;
fma.rn.bf16x2 a, a, o, k;
fma.rn.bf16x2 b, b, o, k;
fma.rn.bf16x2 c, c, o, k;
fma.rn.bf16x2 d, d, o, k;
fma.rn.bf16x2 r, a, $6, z;
fma.rn.bf16x2 $0, a, $5, r;
fma.rn.bf16x2 r, b, $6, z;
fma.rn.bf16x2 $1, b, $5, r;
fma.rn.bf16x2 r, c, $6, z;
fma.rn.bf16x2 $2, c, $5, r;
fma.rn.bf16x2 r, d, $6, z;
fma.rn.bf16x2 $3, d, $5, r;
}
""")
# Byte q + 128 under the exponent of 2^23 is 2^23 + 128 + q in float32; bfloat16 holds q exactly.
INT8 = tl.constexpr("""
{
.reg .b32 u, p;
.reg .f32 a, b, c, d;
xor.b32 u, $2, 0x80808080;
prmt.b32 p, u, 0x4B000000, 0x7440;
mov.b32 a, p;
prmt.b32 p, u, 0x4B000000, 0x7441;
mov.b32 b, p;
prmt.b32 p, u, 0x4B000000, 0x7442;
mov.b32 c, p;
prmt.b32 p, u, 0x4B000000, 0x7443;
mov.b32 d, p;
sub.f32 a, a, 0f4B000080;
sub.f32 b, b, 0f4B000080;
sub.f32 c, c, 0f4B000080;
sub.f32 d, d, 0f4B000080;
cvt.rn.bf16x2.f32 $0, b, a;
cvt.rn.bf16x2.f32 $1, d, c;
}
""")
# A byte at the upper end of each half, its seven lower bits moved to the lowest of the exponent and the top of the
# mantissa: the value times 2^-120, subnormals included. NaN is not among them (`arrange_scales` sees to it).
E4M3 = tl.constexpr("""
{
.reg .b32 t, u, v, w, k, z;
mov.b32 z, 0x80008000;
mov.b32 k, 0x7B807B80;
prmt.b32 t, $2, 0, 0x1404;
prmt.b32 u, $2, 0, 0x3424;
shr.b32 v, t, 4;
shr.b32 w, u, 4;
and.b32 v, v, 0x07F007F0;
and.b32 w, w, 0x07F007F0;
lop3.b32 v, t, 0x80008000, v, 0xEA;
lop3.b32 w, u, 0x80008000, w, 0xEA;
fma.rn.bf16x2 $0, v, k, z;
fma.rn.bf16x2 $1, w, k, z;
}
""")
_SPLIT = tl.constexpr("""
prmt.b32 $0, $4, $5, 0x5410;
prmt.b32 $1, $6, $7, 0x5410;
prmt.b32 $2, $4, $5, 0x7632;
prmt.b32 $3, $6, $7, 0x7632;
""")
_SPLIT_0213 = tl.constexpr("""
prmt.b32 $0, $4, $6, 0x5410;
prmt.b32 $1, $5, $7, 0x5410;
prmt.b32 $2, $4, $6, 0x7632;
prmt.b32 $3, $5, $7, 0x7632;
""")


@triton.jit
def multiplier_of_scale(stored, SCALE: tl.constexpr, WORDS: tl.constexpr):
    """A stored scale -> what a decoded code is multiplied with, and (for float16 scales) the rest of it.

    For the assembly a bfloat16 twice in an int32, with the 2^126 that E2M1 lacks; else the bits of a float32.
    E8M0 bytes are at most 129 here, and nvfp4 lacks a factor 2^9 (`arrange_scales` sees to both).
    """
    if SCALE == "e8m0":
        if WORDS != "none":
            first = stored.to(tl.int32) * 0x00800080 + 126 * 0x00800080
        else:
            byte = stored.to(tl.int32)
            bits = tl.where(byte == 0, 0x00400000, byte << 23)
            first = tl.where(byte == 129, 0x7F800000, bits)
        second = first
    elif SCALE == "e5m3":
        if WORDS != "none":
            first = stored.to(tl.int32) * 0x00100010 + 0x70007000  # 2^117 more
        else:
            first = (stored.to(tl.int32) << 20) + (98 << 23)  # 2^-9 of it
        second = first
    elif SCALE == "e4m3":
        if WORDS != "none":
            first = _twice(round_bf16(float_of_e4m3_in_integers(stored) * 1.661534994731145e35))  # 2^117
        else:
            first = (float_of_e4m3_in_integers(stored) * 0.001953125).to(tl.int32, bitcast=True)  # 2^-9
        second = first
    elif SCALE == "bf16":
        first = _twice(stored) if WORDS != "none" else stored.to(tl.int32) << 16
        second = first
    else:
        scale = load_scale(stored, 1.0, SCALE)
        head = round_bf16(scale)
        rest = scale - (head.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        if WORDS != "none":
            first = _twice(head)
            second = _twice(round_bf16(rest))
        else:
            first = scale.to(tl.int32, bitcast=True)
            second = first
    return first, second


@triton.jit
def _twice(bits):
    return (bits.to(tl.int32) & 0xFFFF) * 0x00010001


@triton.jit
def words_of_nibbles(byte, first, second, ELEMENT: tl.constexpr, SCALE: tl.constexpr, WORDS: tl.constexpr):
    """Bytes of two codes and multipliers -> (low, high) weights as bfloat16."""
    if SCALE == "f16":
        low, high = tl.inline_asm_elementwise(
            _INT4_TWO_SCALES,
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r",
            [byte, first, second],
            (tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        plain: tl.constexpr = _E2M1 if ELEMENT == "e2m1" else _INT4
        faster: tl.constexpr = E2M1_0213 if ELEMENT == "e2m1" else INT4_0213
        code: tl.constexpr = faster if WORDS == "0213" else plain
        low, high = tl.inline_asm_elementwise(
            code, "=r,=r,=r,=r,r,r,r,r,r", [byte, first], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    return low, high


@triton.jit
def floats_of_nibbles(byte, first, ELEMENT: tl.constexpr):
    """The same numbers as `words_of_nibbles`, as float32."""
    byte = byte.to(tl.int32)
    scale = first.to(tl.float32, bitcast=True)
    if ELEMENT == "e2m1":
        low = float_of_e2m1((byte & 0x08) << 28, (byte & 0x07) << 22) * scale
        high = float_of_e2m1((byte & 0x80) << 24, (byte & 0x70) << 18) * scale
    else:
        low = ((byte & 0x0F) - 8).to(tl.float32) * scale
        high = ((byte >> 4) - 8).to(tl.float32) * scale
    low = (round_bf16(low).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    high = (round_bf16(high).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def words_of_bytes(byte, ELEMENT: tl.constexpr):
    """8-bit codes -> bfloat16, exactly."""
    if ELEMENT == "int8":
        w = tl.inline_asm_elementwise(INT8, "=r,=r,r", [byte], tl.bfloat16, is_pure=True, pack=4)
    else:
        w = tl.inline_asm_elementwise(E4M3, "=r,=r,r", [byte], tl.bfloat16, is_pure=True, pack=4)
    return w


@triton.jit
def floats_of_bytes(byte, ELEMENT: tl.constexpr):
    return byte.to(tl.float32) if ELEMENT == "int8" else float_of_e4m3_in_integers(byte)


@triton.jit
def split_pairs(pair, WORDS: tl.constexpr):
    """Two neighbouring bfloat16 in an int32 -> (even, odd)."""
    if WORDS == "none":
        even = (pair << 16).to(tl.float32, bitcast=True)
        odd = (pair & -65536).to(tl.float32, bitcast=True)
    else:
        code: tl.constexpr = _SPLIT_0213 if WORDS == "0213" else _SPLIT
        even, odd = tl.inline_asm_elementwise(
            code, "=r,=r,=r,=r,r,r,r,r", [pair], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    return even, odd
