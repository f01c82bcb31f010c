"""What a lane of `direct.kernel` does with a word of codes: load it, decode it, multiply it with x.

WORDS "none" is plain Triton for the interpreter; its sums have an axis of rows of x, and are not yet summed over lanes.

Legend: T lanes, R tiles of 16 outputs, X tiles of 8 rows of x.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from bitplan.kernels.matmul.decode_words import (
    E2M1_0213,
    E4M3,
    INT4_0213,
    INT4_TWO_SCALES_0213,
    INT8,
    floats_of_bytes,
    floats_of_nibbles,
    multiplier_of_scale,
)

_FOUR_WORDS = tl.constexpr("ld.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];")
_FOUR_PAIRS = tl.constexpr("ld.global.v4.b32 {$0, $1, $2, $3}, [$4];")
_TWO_AND_TWO_PAIRS = tl.constexpr("ld.global.v2.b32 {$0, $1}, [$4];\nld.global.v2.b32 {$2, $3}, [$4 + 32];")
_TWO_PAIRS = tl.constexpr("ld.global.v2.b32 {$0, $1}, [$2];")
_BYTE = tl.constexpr("{ .reg .u16 h; ld.global.u8 h, [$1]; cvt.u32.u16 $0, h; }")
_FOUR_BYTES = tl.constexpr("ld.global.b32 $0, [$1];")
_TWO_BYTES = tl.constexpr("{ .reg .u16 h; ld.global.u16 h, [$1]; cvt.u32.u16 $0, h; }")
# The inputs of a word in the order of `decode_words` "0213": eight neighbours, or "halves".
_ORDER_OF_CODES = tl.constexpr("""
prmt.b32 $0, $4, $6, 0x5410;
prmt.b32 $1, $5, $7, 0x5410;
prmt.b32 $2, $4, $6, 0x7632;
prmt.b32 $3, $5, $7, 0x7632;
""")
_ORDER_OF_HALVES = tl.constexpr("""
prmt.b32 $0, $4, $5, 0x5410;
prmt.b32 $1, $4, $5, 0x7632;
prmt.b32 $2, $6, $7, 0x5410;
prmt.b32 $3, $6, $7, 0x7632;
""")
# Sums $0 to $3 from codes of the lane's first output ($4 to $7) and its second ($8 to $11), x, and the sums before.
_MULTIPLY = tl.constexpr("""
{
.reg .f32 s, t, u, v;
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {s,t,u,v}, {$4,$8,$5,$9}, {$12,$13}, {$16,$17,$18,$19};
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$6,$10,$7,$11}, {$14,$15}, {s,t,u,v};
}
""")
# The same for codes of 8 bits, a word of which is two pairs.
_MULTIPLY_BYTES = tl.constexpr(
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$6,$5,$7}, {$8,$9}, {$10,$11,$12,$13};"
)


@triton.jit
def four_words(at, WORDS: tl.constexpr):
    """16 bytes of codes."""
    if WORDS == "none":
        words = (tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3))
    else:
        words = _four(at, _FOUR_WORDS)
    return words


@triton.jit
def stay():
    """Loads before it are not moved behind it: the assembler would put them off to save registers."""
    tl.inline_asm_elementwise("bar.warp.sync -1; mov.b32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1)


@triton.jit
def _four(at, CODE: tl.constexpr):
    return tl.inline_asm_elementwise(
        CODE, "=r,=r,=r,=r,l", [at.to(tl.int64)], (tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1
    )


@triton.jit
def stored_scale(at, SCALE: tl.constexpr, WORDS: tl.constexpr):
    """A stored scale (or two in 16 bits) as an integer."""
    if WORDS == "none":
        stored = tl.load(at).to(tl.int32)
    else:
        narrowest: tl.constexpr = _BYTE if SCALE == "e8m0" or SCALE == "u8" else _TWO_BYTES
        code: tl.constexpr = _FOUR_BYTES if SCALE == "f32" else narrowest
        stored = tl.inline_asm_elementwise(code, "=r,l", [at.to(tl.int64)], tl.int32, is_pure=False, pack=1)
    return stored


@triton.jit
def multipliers(stored, SCALE: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr):
    """What a lane's first and last 16 codes are multiplied with; for float16 scales the two parts of one multiplier."""
    if GROUP == 16:
        low, _ = multiplier_of_scale(stored & 0xFF, SCALE, WORDS)
        high, _ = multiplier_of_scale(stored >> 8 & 0xFF, SCALE, WORDS)
    elif SCALE == "f16":
        low, high = multiplier_of_scale(stored.to(tl.int16).to(tl.float16, bitcast=True), SCALE, WORDS)
    else:
        low, _ = multiplier_of_scale(stored, SCALE, WORDS)
        high = low
    return low, high


@triton.jit
def add_word(
    sums,
    first,
    second,
    multiplier,
    rest,
    second_multiplier,
    second_rest,
    x,
    ELEMENT: tl.constexpr,
    ORDER: tl.constexpr,
    TWO: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Eight inputs: a word of codes of each output, and four pairs of x."""
    HALVES: tl.constexpr = ORDER == "halves"
    if WORDS == "none":
        new, of_second = sums[0], sums[2]
        for byte in tl.static_range(4):
            # Inputs of the low and the high nibble: neighbours, or 16 apart.
            pair = tl.load(x + (byte // 2 if HALVES else byte))
            other = tl.load(x + 8 + byte // 2) if HALVES else pair
            even = (pair & -65536 if HALVES and byte % 2 else pair << 16).to(tl.float32, bitcast=True)[:, None, :]
            odd = (other << 16 if HALVES and byte % 2 == 0 else other & -65536).to(tl.float32, bitcast=True)[:, None, :]
            low, high = floats_of_nibbles((first >> (8 * byte)) & 0xFF, multiplier, ELEMENT)
            new += low[None, :, :] * even + high[None, :, :] * odd
            low, high = floats_of_nibbles((second >> (8 * byte)) & 0xFF, second_multiplier, ELEMENT)
            of_second += low[None, :, :] * even + high[None, :, :] * odd
        result = (new, sums[1], of_second, sums[3])
    else:
        load: tl.constexpr = _TWO_AND_TWO_PAIRS if HALVES else _FOUR_PAIRS
        order: tl.constexpr = _ORDER_OF_HALVES if HALVES else _ORDER_OF_CODES
        x0, x1, x2, x3 = _four(x, load)
        x0, x1, x2, x3 = tl.inline_asm_elementwise(
            order,
            "=r,=r,=r,=r,r,r,r,r",
            [x0, x1, x2, x3],
            (tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        a0, a1, a2, a3 = _decoded(first, multiplier, rest, ELEMENT, TWO)
        b0, b1, b2, b3 = _decoded(second, second_multiplier, second_rest, ELEMENT, TWO)
        result = tl.inline_asm_elementwise(
            _MULTIPLY,
            "=f,=f,=f,=f,r,r,r,r,r,r,r,r,r,r,r,r,f,f,f,f",
            [
                a0[None, :, :],
                a1[None, :, :],
                a2[None, :, :],
                a3[None, :, :],
                b0[None, :, :],
                b1[None, :, :],
                b2[None, :, :],
                b3[None, :, :],
                x0[:, None, :],
                x1[:, None, :],
                x2[:, None, :],
                x3[:, None, :],
                sums[0],
                sums[1],
                sums[2],
                sums[3],
            ],
            (tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    return result


@triton.jit
def add_bytes(sums, first, second, x, ELEMENT: tl.constexpr, WORDS: tl.constexpr):
    """Four inputs: a word of 8-bit codes of each output, and two pairs of x."""
    if WORDS == "none":
        new, of_second = sums[0], sums[2]
        for byte in tl.static_range(4):
            pair = tl.load(x + byte // 2)
            number = (pair & -65536 if byte % 2 else pair << 16).to(tl.float32, bitcast=True)[:, None, :]
            new += floats_of_bytes(_byte(first, byte, ELEMENT), ELEMENT)[None, :, :] * number
            of_second += floats_of_bytes(_byte(second, byte, ELEMENT), ELEMENT)[None, :, :] * number
        result = (new, sums[1], of_second, sums[3])
    else:
        x0, x1 = tl.inline_asm_elementwise(
            _TWO_PAIRS, "=r,=r,l", [x.to(tl.int64)], (tl.int32, tl.int32), is_pure=False, pack=1
        )
        code: tl.constexpr = INT8 if ELEMENT == "int8" else E4M3
        a0, a1 = tl.inline_asm_elementwise(code, "=r,=r,r", [first], (tl.int32, tl.int32), is_pure=True, pack=1)
        b0, b1 = tl.inline_asm_elementwise(code, "=r,=r,r", [second], (tl.int32, tl.int32), is_pure=True, pack=1)
        result = tl.inline_asm_elementwise(
            _MULTIPLY_BYTES,
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            [
                a0[None, :, :],
                a1[None, :, :],
                b0[None, :, :],
                b1[None, :, :],
                x0[:, None, :],
                x1[:, None, :],
                sums[0],
                sums[1],
                sums[2],
                sums[3],
            ],
            (tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    return result


@triton.jit
def _byte(word, byte: tl.constexpr, ELEMENT: tl.constexpr):
    """One byte of a word, with its sign where it is an integer."""
    return (word << (24 - 8 * byte)) >> 24 if ELEMENT == "int8" else (word >> (8 * byte)) & 0xFF


@triton.jit
def _decoded(word, multiplier, rest, ELEMENT: tl.constexpr, TWO: tl.constexpr):
    """Eight codes as four pairs of bfloat16, in the order 0213 of their bytes."""
    if TWO:
        pairs = tl.inline_asm_elementwise(
            INT4_TWO_SCALES_0213,
            "=r,=r,=r,=r,r,r,r",
            [word, multiplier, rest],
            (tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        code: tl.constexpr = E2M1_0213 if ELEMENT == "e2m1" else INT4_0213
        pairs = tl.inline_asm_elementwise(
            code, "=r,=r,=r,=r,r,r", [word, multiplier], (tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
        )
    return pairs
