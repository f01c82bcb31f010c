"""The kernel of `fused_few_rows`.

Legend: N outputs, K inputs, M rows of x, B bytes of a step, S scales of a step, L slices.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from bitplan.kernels.base.numbers import narrow
from bitplan.kernels.matmul.decode_words import (
    floats_of_bytes,
    floats_of_nibbles,
    multiplier_of_scale,
    split_pairs,
    words_of_bytes,
    words_of_nibbles,
)
from bitplan.kernels.matmul.sums import is_last_of_split, scaled_with_bias, sum_of_split


@triton.jit(do_not_specialize=["rows"])
def few_rows_kernel(
    x_ptr,
    out_ptr,
    partial_ptr,
    data_ptr,
    scales_ptr,
    factor_ptr,
    bias_ptr,
    counters_ptr,
    tile_expert_ptr,
    pairs_ptr,
    tile_first_ptr,
    tile_count_ptr,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    ORDER: tl.constexpr,
    NIBBLES: tl.constexpr,
    GROUP: tl.constexpr,
    FACTORS: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPED: tl.constexpr,
    PAIRS_A_ROW: tl.constexpr,
    EXPERTS: tl.constexpr,
    QUADS_OF_ROW: tl.constexpr,
    SLICES: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    WORDS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    block, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    lane_M = tl.arange(0, BM)
    PER_BYTE: tl.constexpr = 2 if NIBBLES else 1
    BYTES: tl.constexpr = BK // PER_BYTE
    STEPS: tl.constexpr = (K + BK * SLICES - 1) // (BK * SLICES)
    EACH: tl.constexpr = (STEPS + SPLIT - 1) // SPLIT
    WHOLE: tl.constexpr = K % (BK * SLICES) == 0
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # before anything is read that the kernel before may write
    if GROUPED != "no":
        expert = tl.load(tile_expert_ptr + tile)
        if GROUPED == "sorted":
            if expert < 0:
                return
            ok_M = lane_M < tl.load(tile_count_ptr + tile)
            out_M = tl.load(pairs_ptr + tl.load(tile_first_ptr + tile) + lane_M, mask=ok_M, other=0)
        else:
            ok_M = lane_M == 0
            out_M = tile + lane_M
        x_M = out_M // PAIRS_A_ROW
        if (expert < 0) | (expert >= EXPERTS):
            n_N = block * BN + tl.arange(0, BN)
            at_NM = out_M[None, :].to(tl.int64) * N + n_N[:, None]
            tl.store(out_ptr + at_NM, tl.full([BN, BM], 0x7FC0, tl.int16), mask=(n_N < N)[:, None] & ok_M[None, :])
            return
    else:
        expert = 0
        out_M = tile * BM + lane_M
        ok_M = out_M < rows
        x_M = out_M
    n_N = block * BN + tl.arange(0, BN)
    row_N = tl.minimum(n_N, N - 1) if N % BN != 0 else n_N

    # A step covers SLICES neighbouring pieces of K, one for each group of warps: no program waits for another's sum.
    slice_L = tl.arange(0, SLICES)
    byte_LB = slice_L[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    data_ptr += expert.to(tl.int64) * (N * (K // PER_BYTE)) if GROUPED != "no" else 0
    at_LNB = row_N[None, :, None].to(tl.int64) * (K // PER_BYTE) + byte_LB[:, None, :]
    # "halves": byte j of a block holds inputs j and j + 16
    input_LB = byte_LB // 16 * 32 + byte_LB % 16 if ORDER == "halves" else byte_LB
    X_WIDTH: tl.constexpr = K // 2 if ORDER == "low_first" else K
    X_STEP: tl.constexpr = SLICES * BK // 2 if ORDER == "low_first" else SLICES * BK
    at_LBM = x_M[None, None, :].to(tl.int64) * X_WIDTH + input_LB[:, :, None]
    IS_PRE: tl.constexpr = GROUP != 0 and GROUP < 128
    IS_POST: tl.constexpr = GROUP == 128
    S: tl.constexpr = BK // GROUP if IS_PRE else 1
    PER_SCALE: tl.constexpr = BYTES // S
    QUADS: tl.constexpr = QUADS_OF_ROW
    if IS_PRE:
        scales_ptr += expert.to(tl.int64) * (QUADS * N * 4) if GROUPED != "no" else 0
        scale_LS = slice_L[:, None] * S + tl.arange(0, S)[None, :]
        at_LNS = row_N[None, :, None] * 4 + (scale_LS // 4 * (N * 4) + scale_LS % 4)[:, None, :]
    elif IS_POST:
        scales_ptr += expert.to(tl.int64) * ((K // 128) * N) if GROUPED != "no" else 0
        at_LN = slice_L[:, None] * N + row_N[None, :]
    else:
        scales_ptr += expert.to(tl.int64) * N if GROUPED != "no" else 0

    acc_LNM = tl.zeros([SLICES, BN, BM], tl.float32)
    for step in tl.range(split * EACH, tl.minimum(split * EACH + EACH, STEPS), num_stages=STAGES):
        ok_LBM = ok_M[None, None, :]
        if WHOLE:
            byte_LNB = tl.load(data_ptr + step * (SLICES * BYTES) + at_LNB)
        else:
            ok_LB = step * (SLICES * BYTES) + byte_LB < K // PER_BYTE
            ok_LBM = ok_LBM & ok_LB[:, :, None]
            byte_LNB = tl.load(data_ptr + step * (SLICES * BYTES) + at_LNB, mask=ok_LB[:, None, :], other=0)
        if IS_POST:
            if WHOLE:
                scale_LN = tl.load(scales_ptr + step * (SLICES * N) + at_LN).to(tl.float32)
            else:
                ok_L1 = (step * SLICES + slice_L < K // 128)[:, None]
                scale_LN = tl.load(scales_ptr + step * (SLICES * N) + at_LN, mask=ok_L1, other=0).to(tl.float32)
        if NIBBLES:
            if IS_PRE:
                stored_LNS = tl.load(scales_ptr + step * (SLICES * S * N) + at_LNS)
                first_LNS, second_LNS = multiplier_of_scale(stored_LNS, SCALE, WORDS)
                first = tl.reshape(
                    tl.broadcast_to(first_LNS[:, :, :, None], [SLICES, BN, S, PER_SCALE]), [SLICES, BN, BYTES]
                )
                if SCALE == "f16":
                    second = tl.reshape(
                        tl.broadcast_to(second_LNS[:, :, :, None], [SLICES, BN, S, PER_SCALE]), [SLICES, BN, BYTES]
                    )
                else:
                    second = first
            else:
                first = tl.full(
                    [SLICES, BN, BYTES], 0x7E807E80 if WORDS != "none" else 0x3F800000, tl.int32
                )  # 2^126, or 1.0
                second = first
            if WORDS != "none":
                low_LNB, high_LNB = words_of_nibbles(byte_LNB, first, second, ELEMENT, SCALE, WORDS)
            else:
                low_LNB, high_LNB = floats_of_nibbles(byte_LNB, first, ELEMENT)
            if ORDER == "low_first":
                pair_LBM = tl.load(x_ptr + step * X_STEP + at_LBM, mask=ok_LBM, other=0)
                xlow_LBM, xhigh_LBM = split_pairs(pair_LBM, WORDS)
            else:
                xlow_LBM = _wide(tl.load(x_ptr + step * X_STEP + at_LBM, mask=ok_LBM, other=0), WORDS)
                xhigh_LBM = _wide(tl.load(x_ptr + step * X_STEP + at_LBM + 16, mask=ok_LBM, other=0), WORDS)
            if IS_POST:
                sum_LNM = tl.dot(low_LNB, xlow_LBM, input_precision="ieee")
                sum_LNM = tl.dot(high_LNB, xhigh_LBM, sum_LNM, input_precision="ieee")
                acc_LNM += sum_LNM * scale_LN[:, :, None]
            else:
                acc_LNM = tl.dot(low_LNB, xlow_LBM, acc_LNM, input_precision="ieee")
                acc_LNM = tl.dot(high_LNB, xhigh_LBM, acc_LNM, input_precision="ieee")
        else:
            w_LNB = words_of_bytes(byte_LNB, ELEMENT) if WORDS != "none" else floats_of_bytes(byte_LNB, ELEMENT)
            x_LBM = _wide(tl.load(x_ptr + step * X_STEP + at_LBM, mask=ok_LBM, other=0), WORDS)
            if IS_POST:
                acc_LNM += tl.dot(w_LNB, x_LBM, input_precision="ieee") * scale_LN[:, :, None]
            else:
                acc_LNM = tl.dot(w_LNB, x_LBM, acc_LNM, input_precision="ieee")
    if OVERLAP:
        # Not earlier: programs of the next launch would take the places of programs that still have weights to read.
        tl.extra.cuda.gdc_launch_dependents()
    acc_NM = tl.sum(acc_LNM, axis=0)

    ok_NM = (n_N < N)[:, None] & ok_M[None, :]
    at_NM = out_M[None, :].to(tl.int64) * N + n_N[:, None]
    if SPLIT > 1:
        size = rows.to(tl.int64) * N
        counter_ptr = counters_ptr + tile * tl.num_programs(0) + block
        if not is_last_of_split(acc_NM, partial_ptr, counter_ptr, split, size, at_NM, ok_NM, SPLIT):
            return
        acc_NM = sum_of_split(partial_ptr, size, at_NM, ok_NM, SPLIT)
    bias_ptr += expert * N if GROUPED != "no" else 0
    acc_NM = scaled_with_bias(acc_NM, scales_ptr, factor_ptr, bias_ptr, row_N, GROUP, FACTORS, BIAS)
    tl.store(out_ptr + at_NM, narrow(acc_NM, "bf16"), mask=ok_NM)


@triton.jit
def _wide(bits, WORDS: tl.constexpr):
    """bfloat16 bits as the type the product is taken in."""
    if WORDS != "none":
        x = bits.to(tl.bfloat16, bitcast=True)
    else:
        x = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x
