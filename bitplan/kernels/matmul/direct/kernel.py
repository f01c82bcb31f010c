"""The kernel of `direct.products`: 16 bytes of codes to a lane, decoded there, summed by the tensor cores.

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
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc"
from __future__ import annotations

import triton
import triton.language as tl

from bitplan.kernels.base.numbers import narrow
from bitplan.kernels.matmul.direct.words import add_bytes, add_word, four_words, multipliers, stay, stored_scale


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
    """Four words of each lane's two outputs, and their stored scales."""
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
    """Of the codes of a lane's two outputs, and of their scales."""
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
    """Both sums in one exchange between warps."""
    both = tl.join(first_XRT, second_XRT)
    return tl.split(tl.sum(tl.reshape(both, [both.shape[0], both.shape[1], W, 32, 2]), axis=2))


@triton.jit
def _of_lanes(sum_MRT, W: tl.constexpr):
    """Of the interpreter's sums, which no tensor core has summed over the four lanes of an output."""
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
