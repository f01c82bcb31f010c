"""Products over packed codes without shared memory: up to 16 rows of x, on NVIDIA's GPUs from Ampere on.

What it is for: a product of one row ends when its bytes have come, and a kernel that stages them in shared memory, or
whose programs add up their parts through memory, adds microseconds to each of the hundreds of products of a token.

The kernel of `direct.products`: 16 bytes of codes to a lane, decoded there, summed by the tensor cores.

Written as lanes see it: a tensor's last axis is the 32 * W lanes of a program, one number a lane, and the axes before
it are registers. The instruction m16n8k16 multiplies 16 outputs with 8 rows of x; lane l has outputs l / 4 and
l / 4 + 8 and a quarter of the inputs. Which quarter is free, as long as codes and x agree, so a lane takes 32
neighbouring inputs: its codes are one load of 16 bytes, under one or two scales, and no lane needs another's. The warps
of a program take every W-th piece of 128 inputs, and meet only in the last sum: no shared memory, no barrier before it,
few registers, so that many warps wait for memory at once.

Codes are loaded STAGES - 1 steps ahead, for memory takes a microsecond to answer; `stay` is there to keep the assembler
from putting loads off until just before their use. A warp's RUN neighbouring pieces come one after the other. The
instruction mma sums over all lanes of an output; every lane of a warp must come to it, so lanes past the end take the
last inputs, and codes of 0.

WORDS "none" is plain Triton for the interpreter, with the same loads, and sums of float32.

Legend: T lanes, L lanes of a warp, R tiles of 16 outputs, X tiles of 8 rows of x, M rows of x, W warps.

What a lane of `direct.kernel` does with a word of codes: load it, decode it, multiply it with x.

WORDS "none" is plain Triton for the interpreter; its sums have an axis of rows of x, and are not yet summed over lanes.

Legend: T lanes, R tiles of 16 outputs, X tiles of 8 rows of x.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc"
from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitplan.base.errors import FormatError
from bitplan.base.loops.launch import INTERPRETED, PreparedLaunch
from bitplan.formats.encoded import Encoded
from bitplan.formats.registry import get_format
from bitplan.formats.triton_numbers import narrow
from bitplan.packed.products.decode_words import (
    E2M1_0213,
    E4M3,
    INT4_0213,
    INT4_TWO_SCALES_0213,
    INT8,
    floats_of_bytes,
    floats_of_nibbles,
    multiplier_of_scale,
)
from bitplan.packed.products.fused_weights import ArrangedScales, MatmulLaunch, can_overlap

# ---- direct words ----------------------------------------------------------------------------------------------------


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
    """Load 16 bytes of codes as four words."""
    if WORDS == "none":
        words = (tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3))
    else:
        words = _four(at, _FOUR_WORDS)
    return words


@triton.jit
def stay():
    """Keep loads before it where they are: the assembler would put them off to save registers."""
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
    """Add the products of eight inputs (four pairs x) with a word of codes of each of two outputs."""
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
    """Add the products of four inputs (two pairs x) with a word of 8-bit codes of each of two outputs."""
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


# ---- direct kernel ---------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows"])
def direct_kernel(
    x_ptr,
    out_ptr,
    data_ptr,
    scales_ptr,
    factor_ptr,
    bias_ptr,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    ORDER: tl.constexpr,
    GROUP: tl.constexpr,
    FACTORS: tl.constexpr,
    BIAS: tl.constexpr,
    ONE_ROW: tl.constexpr,
    X: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    RUN: tl.constexpr,
    STAGES: tl.constexpr,
    WORDS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    T: tl.constexpr = 32 * W
    INPUTS: tl.constexpr = 64 if ORDER == "bytes" else 128  # of a warp and step
    STEPS: tl.constexpr = (K + INPUTS * W * RUN - 1) // (INPUTS * W * RUN) * RUN
    AHEAD: tl.constexpr = STAGES - 1 if STAGES - 1 < STEPS else STEPS
    lane_T = tl.arange(0, T)
    output_T = lane_T // 4 % 8
    chunk_T = lane_T // 32 * (4 * RUN) + lane_T % 4  # of INPUTS / 4
    n_RT = tl.program_id(0) * (16 * R) + tl.arange(0, R)[:, None] * 16 + output_T[None, :]
    first_RT, second_RT = n_RT, n_RT + 8
    if N % (16 * R) != 0:
        first_RT = tl.minimum(first_RT, N - 1)
        second_RT = tl.minimum(second_RT, N - 1)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # before anything is read that the kernel before may write, weights included
    ahead = ()
    for step in tl.static_range(AHEAD):
        codes = _codes(
            data_ptr, scales_ptr, step, chunk_T, first_RT, second_RT, N, K, SCALE, ORDER, GROUP, R, W, RUN, WORDS
        )
        ahead = ahead + (codes,)  # noqa: RUF005 (Triton knows no stars)
    if WORDS != "none":
        stay()
    M: tl.constexpr = 8 * X
    if WORDS != "none":
        m_XT = tl.program_id(1) * M + tl.arange(0, X)[:, None] * 8 + output_T[None, :]
        m_XT = m_XT * 0 if ONE_ROW else tl.minimum(m_XT, rows - 1)
        x = x_ptr + m_XT.to(tl.int64) * (K // 2)
        zero = tl.zeros([X, R, T], tl.float32)
    else:
        m_M1 = tl.minimum(tl.program_id(1) * M + tl.arange(0, M), rows - 1)[:, None]
        x = x_ptr + m_M1.to(tl.int64) * (K // 2)
        zero = tl.zeros([M, R, T], tl.float32)
    sums = (zero, zero, zero, zero)
    for step in tl.range(0, STEPS - AHEAD, num_stages=1, loop_unroll_factor=AHEAD):
        at = step + AHEAD
        codes = _codes(
            data_ptr, scales_ptr, at, chunk_T, first_RT, second_RT, N, K, SCALE, ORDER, GROUP, R, W, RUN, WORDS
        )
        if WORDS != "none":
            stay()
        sums = _add_step(sums, ahead[0], x, step, chunk_T, K, ELEMENT, SCALE, ORDER, GROUP, W, RUN, WORDS)
        ahead = ahead[1:] + (codes,)  # noqa: RUF005
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    for step in tl.static_range(AHEAD):
        at = STEPS - AHEAD + step
        sums = _add_step(sums, ahead[step], x, at, chunk_T, K, ELEMENT, SCALE, ORDER, GROUP, W, RUN, WORDS)

    tile = tl.program_id(0) * (16 * R) + tl.arange(0, R)[None, :, None] * 16
    if WORDS != "none":
        lane_L = tl.arange(0, 32)[None, None, :]
        n = tile + lane_L // 4
        m = tl.program_id(1) * M + tl.arange(0, X)[:, None, None] * 8 + lane_L % 4 * 2
        first, second = _of_warps(sums[0], sums[2], W)
        _store(first, n, m, out_ptr, factor_ptr, bias_ptr, rows, N, FACTORS, BIAS)
        _store(second, n + 8, m, out_ptr, factor_ptr, bias_ptr, rows, N, FACTORS, BIAS)
        if not ONE_ROW:
            first, second = _of_warps(sums[1], sums[3], W)
            _store(first, n, m + 1, out_ptr, factor_ptr, bias_ptr, rows, N, FACTORS, BIAS)
            _store(second, n + 8, m + 1, out_ptr, factor_ptr, bias_ptr, rows, N, FACTORS, BIAS)
    else:
        n = tile + tl.arange(0, 8)[None, None, :]
        m = tl.program_id(1) * M + tl.arange(0, M)[:, None, None]
        _store(_of_lanes(sums[0], W), n, m, out_ptr, factor_ptr, bias_ptr, rows, N, FACTORS, BIAS)
        _store(_of_lanes(sums[2], W), n + 8, m, out_ptr, factor_ptr, bias_ptr, rows, N, FACTORS, BIAS)


@triton.jit
def _codes(
    data_ptr,
    scales_ptr,
    step,
    chunk_T,
    first_RT,
    second_RT,
    N: tl.constexpr,
    K: tl.constexpr,
    SCALE: tl.constexpr,
    ORDER: tl.constexpr,
    GROUP: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    RUN: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Load four words of codes of each lane's two outputs, and their stored scales."""
    words_at, second_words_at, scale_at, second_scale_at = _addresses(
        data_ptr, scales_ptr, step, chunk_T, first_RT, second_RT, N, K, ORDER, GROUP, R, W, RUN
    )
    first = four_words(words_at, WORDS)
    second = four_words(second_words_at, WORDS)
    if GROUP == 0:
        scale = first[0]
        scale_of_second = second[0]
    else:
        scale = stored_scale(scale_at, SCALE, WORDS)
        scale_of_second = stored_scale(second_scale_at, SCALE, WORDS)
    return first + second + (scale, scale_of_second)


@triton.jit
def _chunk(chunk_T, step, K: tl.constexpr, EACH: tl.constexpr, W: tl.constexpr, RUN: tl.constexpr):
    """Which piece of a row a lane takes in a step: a warp's RUN neighbours, then the next run of the program."""
    chunk_T += (step // RUN) * (4 * W * RUN) + step % RUN * 4
    ok = (chunk_T < K // EACH)[None, :]
    if K % (4 * EACH * W * RUN) != 0:
        chunk_T = tl.minimum(chunk_T, K // EACH - 1)
    return chunk_T, ok


@triton.jit
def _addresses(
    data_ptr,
    scales_ptr,
    step,
    chunk_T,
    first_RT,
    second_RT,
    N: tl.constexpr,
    K: tl.constexpr,
    ORDER: tl.constexpr,
    GROUP: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    RUN: tl.constexpr,
):
    """Return addresses of the codes of a lane's two outputs, and of their scales."""
    EACH: tl.constexpr = 16 if ORDER == "bytes" else 32
    WIDTH: tl.constexpr = K // 4 if ORDER == "bytes" else K // 8
    chunk_T, _ = _chunk(chunk_T, step, K, EACH, W, RUN)
    PER_ROW: tl.constexpr = 4 if GROUP == 32 else 2 if GROUP == 16 else 1  # a lane's 32 codes have two scales of 16
    at_T = chunk_T // PER_ROW * (N * PER_ROW) + chunk_T % PER_ROW if GROUP != 128 else chunk_T // (128 // EACH) * N
    words_at = data_ptr + first_RT.to(tl.int64) * WIDTH + (chunk_T * 4)[None, :]
    scale_at = scales_ptr + (first_RT * PER_ROW + at_T[None, :])
    if N % (16 * R) == 0:  # one address for both, and a constant
        second_words_at = words_at + 8 * WIDTH
        second_scale_at = scale_at + 8 * PER_ROW
    else:
        second_words_at = data_ptr + second_RT.to(tl.int64) * WIDTH + (chunk_T * 4)[None, :]
        second_scale_at = scales_ptr + (second_RT * PER_ROW + at_T[None, :])
    return words_at, second_words_at, scale_at, second_scale_at


@triton.jit
def _add_step(
    sums,
    codes,
    x,
    step,
    chunk_T,
    K: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    ORDER: tl.constexpr,
    GROUP: tl.constexpr,
    W: tl.constexpr,
    RUN: tl.constexpr,
    WORDS: tl.constexpr,
):
    """The sums with the products of one step added."""
    EACH: tl.constexpr = 16 if ORDER == "bytes" else 32
    chunk_T, ok = _chunk(chunk_T, step, K, EACH, W, RUN)
    x += (chunk_T * (EACH // 2))[None, :]
    zero = tl.zeros_like(sums[0])
    new = (zero, zero, zero, zero) if GROUP == 128 else sums
    if ORDER == "bytes":
        words = codes
        if K % (4 * EACH * W * RUN) != 0:
            words = (
                tl.where(ok, codes[0], 0),
                tl.where(ok, codes[1], 0),
                tl.where(ok, codes[2], 0),
                tl.where(ok, codes[3], 0),
                tl.where(ok, codes[4], 0),
                tl.where(ok, codes[5], 0),
                tl.where(ok, codes[6], 0),
                tl.where(ok, codes[7], 0),
            )
        new = add_bytes(new, words[0], words[4], x, ELEMENT, WORDS)
        new = add_bytes(new, words[1], words[5], x + 2, ELEMENT, WORDS)
        new = add_bytes(new, words[2], words[6], x + 4, ELEMENT, WORDS)
        new = add_bytes(new, words[3], words[7], x + 6, ELEMENT, WORDS)
    else:
        if GROUP == 128:  # four lanes share a scale, and sums are scaled
            one: tl.constexpr = 0x7E807E80 if WORDS != "none" else 0x3F800000  # 2^126 twice, or 1.0
            low = tl.full(codes[8].shape, one, tl.int32)
            high, second_low, second_high = low, low, low
        else:
            low, high = multipliers(codes[8], SCALE, GROUP, WORDS)
            second_low, second_high = multipliers(codes[9], SCALE, GROUP, WORDS)
        if K % (4 * EACH * W * RUN) != 0:
            low, high = tl.where(ok, low, 0), tl.where(ok, high, 0)
            second_low, second_high = tl.where(ok, second_low, 0), tl.where(ok, second_high, 0)
        # Of 32 codes the first half and the second have a scale each; a float16 scale has two parts, for all of them.
        TWO: tl.constexpr = SCALE == "f16"
        FAR: tl.constexpr = 4 if ORDER == "low_first" else 2
        later, second_later = (low, second_low) if TWO else (high, second_high)
        new = add_word(new, codes[0], codes[4], low, high, second_low, second_high, x, ELEMENT, ORDER, TWO, WORDS)
        x += FAR
        new = add_word(new, codes[1], codes[5], low, high, second_low, second_high, x, ELEMENT, ORDER, TWO, WORDS)
        x += FAR
        new = add_word(new, codes[2], codes[6], later, high, second_later, second_high, x, ELEMENT, ORDER, TWO, WORDS)
        x += FAR
        new = add_word(new, codes[3], codes[7], later, high, second_later, second_high, x, ELEMENT, ORDER, TWO, WORDS)
    if GROUP == 128:
        scale = codes[8].to(tl.float32, bitcast=SCALE == "f32")[None, :, :]
        second = codes[9].to(tl.float32, bitcast=SCALE == "f32")[None, :, :]
        new = (
            sums[0] + new[0] * scale,
            sums[1] + new[1] * scale,
            sums[2] + new[2] * second,
            sums[3] + new[3] * second,
        )
    return new


@triton.jit
def _of_warps(first_XRT, second_XRT, W: tl.constexpr):
    """Add up the sums of all warps, both outputs in one exchange."""
    both = tl.join(first_XRT, second_XRT)
    return tl.split(tl.sum(tl.reshape(both, [both.shape[0], both.shape[1], W, 32, 2]), axis=2))


@triton.jit
def _of_lanes(sum_MRT, W: tl.constexpr):
    """Add up an output's four lanes in the interpreter; on a GPU the tensor cores have done so."""
    return tl.sum(tl.sum(tl.reshape(sum_MRT, [sum_MRT.shape[0], sum_MRT.shape[1], W, 8, 4]), axis=4), axis=2)


@triton.jit
def _store(
    total,
    n,
    m,
    out_ptr,
    factor_ptr,
    bias_ptr,
    rows,
    N: tl.constexpr,
    FACTORS: tl.constexpr,
    BIAS: tl.constexpr,
):
    ok_n = n < N
    total *= tl.load(factor_ptr + n, mask=ok_n, other=0.0) if FACTORS else tl.load(factor_ptr)
    if BIAS != "none":
        bias = tl.load(bias_ptr + n, mask=ok_n, other=0)
        if BIAS == "bf16":
            bias = (bias.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        total += bias
    tl.store(out_ptr + m.to(tl.int64) * N + n, narrow(total, "bf16"), mask=ok_n & (m < rows))


# ---- direct products -------------------------------------------------------------------------------------------------


MOST_ROWS = 16
STEP = 128  # inputs that a warp takes at a time


def runs_direct(device: torch.device) -> bool:
    """Whether the kernel can run here: tensor cores multiply bfloat16 from Ampere on."""
    if torch.version.hip is not None:
        return False
    return bool(INTERPRETED) or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0))


def direct_launch(outputs: int, rows: int, warps: int, stages: int, run: int = 1) -> MatmulLaunch:
    """Programs of `warps` warps for a tile of outputs x rows, `stages` steps of codes in registers.

    A warp's step is 128 inputs (64 of 8-bit codes), `run` steps lie side by side.
    """
    return MatmulLaunch(outputs, rows, run * STEP, warps, 1, warps, stages, overlap=1, direct=1)


def prepare_direct(
    device: torch.device, weight: Encoded, arranged: ArrangedScales, bias: str, rows: int, launch: MatmulLaunch
) -> PreparedLaunch:
    """All of a launch but its pointers: x, out, codes, scales, factor, bias."""
    overlap = launch.overlap == 1 and can_overlap(device)
    return _prepared(
        weight.fmt.name,
        weight.shape,
        launch,
        rows,
        bias,
        arranged.kind(weight.fmt),
        arranged.factor.dim() == 1 or weight.fmt.block.cols is None,
        overlap,
        device,
    )


def direct_pointers(weight: Encoded, arranged: ArrangedScales, bias: Tensor | None) -> tuple[Tensor, ...]:
    """Codes, scales, factor and bias; the scales of whole rows are factors."""
    scales, factor = arranged.scales, arranged.factor
    if weight.fmt.block.cols is None:
        scales, factor = factor, scales
    return weight.data, scales, factor, arranged.factor if bias is None else bias.contiguous()


@functools.lru_cache(4096)
def _prepared(
    format_name: str,
    shape: tuple[int, int],
    launch: MatmulLaunch,
    rows: int,
    bias: str,
    scale: str,
    factors: bool,
    overlap: bool,
    device: torch.device,  # noqa: ARG001 (a launch is for one)
) -> PreparedLaunch:
    fmt, (outputs, inputs) = get_format(format_name), shape
    assert fmt.element is not None
    tiles_of_x, tiles = launch.rows // 8, launch.outputs // 16
    if launch.rows not in (8, MOST_ROWS) or launch.slices != launch.warps:
        raise FormatError(f"{fmt.name}: {launch} is no launch of the direct kernel")
    constants = {
        "N": outputs,
        "K": inputs,
        "ELEMENT": fmt.element.name,
        "SCALE": scale,
        "ORDER": fmt.packing.order if fmt.packing is not None else "bytes",
        "GROUP": fmt.block.cols or 0,
        "FACTORS": factors,
        "BIAS": bias,
        "ONE_ROW": rows == 1,
        "X": tiles_of_x,
        "R": tiles,
        "W": launch.warps,
        "RUN": launch.step // STEP,
        "STAGES": launch.stages,
        "WORDS": "none" if INTERPRETED else "0213",
        "OVERLAP": overlap,
    }
    of_scales = {"e8m0": torch.uint8, "u8": torch.uint8, "f32": torch.int32}.get(scale, torch.int16)
    types = {0: torch.int32, 2: torch.int32, 3: of_scales}
    options = {"num_warps": launch.warps, **({"launch_pdl": True} if overlap else {})}
    grid = (triton.cdiv(outputs, launch.outputs), triton.cdiv(rows, launch.rows))
    return PreparedLaunch(direct_kernel, grid, (rows,), constants, types=types, **options)
