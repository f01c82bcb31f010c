"""The fused product for many rows of x, from 33 on: weights decoded in registers, x read from shared memory.

With many rows the tensor cores are the limit, and they take their second operand from shared memory without help of the
lanes (Hopper's wgmma); the lanes only decode. A weight is decoded once for a tile of up to 128 rows. It pays in the
narrow gap between the fused product for few rows and decoding the whole matrix: on an H200, 8192 x 8192, it took 42 us
at 64 rows and 66 us at 128 (BF16 39 and 40; decode, then multiply 84 and 87), and lost to decoding from 256 on. Its
programs wait for their decoders: two groups of warps that take turns would be the next step. For codes of 4 bits x is
split once, before the launch, into the inputs that low nibbles meet and those that high ones do.

Here four bytes of a register belong to two rows of the weight: only the decoder "0123" of `decode_words` is right.

Legend: N outputs, K inputs, M rows of x, B bytes of a step, S scales of a step.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitplan.base.loops.launch import INTERPRETED, PreparedLaunch
from bitplan.formats.encoded import Encoded
from bitplan.formats.format import Format
from bitplan.formats.registry import get_format
from bitplan.formats.triton_numbers import narrow
from bitplan.packed.products.decode_words import (
    floats_of_bytes,
    floats_of_nibbles,
    is_last_of_split,
    multiplier_of_scale,
    scaled_with_bias,
    sum_of_split,
    words_of_bytes,
    words_of_nibbles,
)
from bitplan.packed.products.fused_weights import ArrangedScales, MatmulLaunch

STEP = 128


def wide_candidates(weight: Encoded, rows: int) -> list[MatmulLaunch]:
    """Launches worth measuring, the likeliest first: about 256 programs came first for every number of rows."""
    nibbles = weight.fmt.packing is not None
    cuts = [(128, 64, 4), (64, 64, 4)] if rows <= 64 else [(64, 128, 4), (128, 64, 4)]
    if nibbles:
        cuts.sort(reverse=True)
    launches = []
    for outputs, tile, warps in cuts:
        programs = triton.cdiv(weight.shape[-2], outputs) * triton.cdiv(rows, tile)
        for split in (1, 2, 4):
            if split == 1 or (programs * split <= 512 and weight.shape[-1] >= 8 * split * STEP):
                launches.append((abs(math.log2(programs * split / 256)), outputs, tile, split, warps))
    launches.sort(key=lambda launch: launch[0])
    return [MatmulLaunch(outputs, tile, STEP, 1, split, warps, 3) for _, outputs, tile, split, warps in launches[:3]]


def wide_matmul(
    x: Tensor, weight: Encoded, arranged: ArrangedScales, bias: Tensor | None, out: Tensor, launch: MatmulLaunch
) -> None:
    """Fill out [M, N] with x [M, K] times weight [N, K], plus bias [N]."""
    fmt, (outputs, inputs) = weight.fmt, weight.shape
    blocks, tiles = triton.cdiv(outputs, launch.outputs), triton.cdiv(x.shape[0], launch.rows)
    split = launch.split if blocks * tiles <= arranged.counters.shape[0] else 1
    partial = arranged.counters
    if split > 1:
        partial = torch.empty((split, *out.shape), dtype=torch.float32, device=x.device)
    bias_name = "none" if bias is None else {torch.bfloat16: "bf16", torch.float32: "f32"}[bias.dtype]
    run = _prepared(
        fmt.name,
        (outputs, inputs),
        launch,
        (blocks * tiles, split),
        x.shape[0],
        bias_name,
        arranged.kind(fmt),
        arranged.factor.dim() == 1,
        x.device,
    )
    unread = arranged.counters
    run(
        split_inputs(x, fmt),
        out,
        partial,
        weight.data,
        arranged.scales,
        arranged.factor,
        unread if bias is None else bias.contiguous(),
        arranged.counters,
    )


@functools.lru_cache(4096)
def _prepared(
    format_name: str,
    shape: tuple[int, int],
    launch: MatmulLaunch,
    grid: tuple[int, int],
    rows: int,
    bias: str,
    scale: str,
    factors: bool,
    device: torch.device,  # noqa: ARG001 (a launch is for one)
) -> PreparedLaunch:
    fmt = get_format(format_name)
    assert fmt.element is not None
    words = "none" if INTERPRETED or torch.version.hip is not None else "0123"
    constants = {
        "N": shape[0],
        "K": shape[1],
        "ELEMENT": fmt.element.name,
        "SCALE": scale,
        "NIBBLES": fmt.packing is not None,
        "GROUP": fmt.block.cols or 0,
        "FACTORS": factors,
        "BIAS": bias,
        "BN": launch.outputs,
        "BM": launch.rows,
        "BK": launch.step,
        "SPLIT": grid[1],
        "STAGES": launch.stages,
        "WORDS": words,
    }
    types = {} if words == "none" else {0: torch.bfloat16}
    if scale == "e5m3":
        types[4] = torch.uint8
    return PreparedLaunch(_wide, grid, (rows,), constants, types=types, num_warps=launch.warps)


def split_inputs(x: Tensor, fmt: Format) -> Tensor:
    """x [M, K] as [2, M, K / 2]: what low nibbles meet, and what high nibbles meet; x itself for codes of 8 bits."""
    if fmt.packing is None:
        return x
    rows, inputs = x.shape
    if fmt.packing.order == "halves":
        return x.view(rows, inputs // 32, 2, 16).permute(2, 0, 1, 3).reshape(2, rows, inputs // 2)
    return x.view(rows, inputs // 2, 2).permute(2, 0, 1).contiguous()


@triton.jit(do_not_specialize=["rows"])
def _wide(
    x_ptr,
    out_ptr,
    partial_ptr,
    data_ptr,
    scales_ptr,
    factor_ptr,
    bias_ptr,
    counters_ptr,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    NIBBLES: tl.constexpr,
    GROUP: tl.constexpr,
    FACTORS: tl.constexpr,
    BIAS: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    WORDS: tl.constexpr,
):
    # Neighbouring programs take the same weights and other rows: the weights come from memory once.
    tiles = (rows + BM - 1) // BM
    block, tile, split = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1)
    m_M = tile * BM + tl.arange(0, BM)
    n_N = block * BN + tl.arange(0, BN)
    ok_M = m_M < rows
    row_N = tl.minimum(n_N, N - 1) if N % BN != 0 else n_N

    PER_BYTE: tl.constexpr = 2 if NIBBLES else 1
    BYTES: tl.constexpr = BK // PER_BYTE
    WIDTH: tl.constexpr = K // PER_BYTE
    STEPS: tl.constexpr = (K + BK - 1) // BK
    EACH: tl.constexpr = (STEPS + SPLIT - 1) // SPLIT
    WHOLE: tl.constexpr = K % BK == 0
    IS_PRE: tl.constexpr = GROUP != 0 and GROUP < 128
    IS_POST: tl.constexpr = GROUP == 128
    S: tl.constexpr = BK // GROUP if IS_PRE else 1
    byte_B = tl.arange(0, BYTES)
    at_NB = row_N[:, None].to(tl.int64) * WIDTH + byte_B[None, :]
    at_BM = m_M[None, :].to(tl.int64) * WIDTH + byte_B[:, None]
    scale_S = tl.arange(0, S)
    at_NS = row_N[:, None] * 4 + (scale_S // 4 * (N * 4) + scale_S % 4)[None, :]
    high_ptr = x_ptr + rows.to(tl.int64) * WIDTH

    acc_NM = tl.zeros([BN, BM], tl.float32)
    for step in tl.range(split * EACH, tl.minimum(split * EACH + EACH, STEPS), num_stages=STAGES):
        ok_BM = ok_M[None, :]
        if WHOLE:
            byte_NB = tl.load(data_ptr + step * BYTES + at_NB)
        else:
            ok_B = step * BYTES + byte_B < WIDTH
            ok_BM = ok_BM & ok_B[:, None]
            byte_NB = tl.load(data_ptr + step * BYTES + at_NB, mask=ok_B[None, :], other=0)
        x_BM = _operand(tl.load(x_ptr + step * BYTES + at_BM, mask=ok_BM, other=0), WORDS)
        if NIBBLES:
            if IS_PRE:
                stored_NS = tl.load(scales_ptr + step * (S * N) + at_NS)
                first_NS, second_NS = multiplier_of_scale(stored_NS, SCALE, WORDS)
                first = tl.reshape(tl.broadcast_to(first_NS[:, :, None], [BN, S, BYTES // S]), [BN, BYTES])
                second = tl.reshape(tl.broadcast_to(second_NS[:, :, None], [BN, S, BYTES // S]), [BN, BYTES])
            else:
                one: tl.constexpr = 0x7E807E80 if WORDS != "none" else 0x3F800000  # 2^126 twice, or 1.0
                first = tl.full([BN, BYTES], one, tl.int32)
                second = first
            if WORDS != "none":
                low_NB, high_NB = words_of_nibbles(byte_NB, first, second, ELEMENT, SCALE, WORDS)
            else:
                low_NB, high_NB = floats_of_nibbles(byte_NB, first, ELEMENT)
            high_BM = _operand(tl.load(high_ptr + step * BYTES + at_BM, mask=ok_BM, other=0), WORDS)
            if IS_POST:
                sum_NM = tl.dot(low_NB, x_BM, input_precision="ieee")
                sum_NM = tl.dot(high_NB, high_BM, sum_NM, input_precision="ieee")
            else:
                acc_NM = tl.dot(low_NB, x_BM, acc_NM, input_precision="ieee")
                acc_NM = tl.dot(high_NB, high_BM, acc_NM, input_precision="ieee")
        else:
            w_NB = words_of_bytes(byte_NB, ELEMENT) if WORDS != "none" else floats_of_bytes(byte_NB, ELEMENT)
            if IS_POST:
                sum_NM = tl.dot(w_NB, x_BM, input_precision="ieee")
            else:
                acc_NM = tl.dot(w_NB, x_BM, acc_NM, input_precision="ieee")
        if IS_POST:
            scale_N = tl.load(scales_ptr + step * N + row_N).to(tl.float32)
            acc_NM += sum_NM * scale_N[:, None]

    ok_NM = (n_N < N)[:, None] & ok_M[None, :]
    at_NM = m_M[None, :].to(tl.int64) * N + n_N[:, None]
    if SPLIT > 1:
        size = rows.to(tl.int64) * N
        counter_ptr = counters_ptr + tl.program_id(0)
        if not is_last_of_split(acc_NM, partial_ptr, counter_ptr, split, size, at_NM, ok_NM, SPLIT):
            return
        acc_NM = sum_of_split(partial_ptr, size, at_NM, ok_NM, SPLIT)
    acc_NM = scaled_with_bias(acc_NM, scales_ptr, factor_ptr, bias_ptr, row_N, GROUP, FACTORS, BIAS)
    tl.store(out_ptr + at_NM, narrow(acc_NM, "bf16"), mask=ok_NM)


@triton.jit
def _operand(x, WORDS: tl.constexpr):
    """x as the product reads it: bfloat16 unchanged; in the interpreter float32, made of its bits."""
    return x if WORDS != "none" else (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
