"""FP8 products in Triton: of two matrices whose scales belong to blocks, and of all experts of a layer.

`block_scaled_product` takes a [M, K] in blocks of 1x128 and b [N, K] in blocks of 1x128 or 128x128. A step of its loop
is one block along K: the tensor cores add its 128 products from zero, and the sum is scaled and added in float32. So no
more than 128 products are ever added with the tensor cores' 14 bits. It is used where the library has no such product
(an operand in E5M2, GPUs that are not Hopper); the library's own reaches 1300 TFLOP/s.

The products of experts are FP8 rows times each expert's matrix, and the weight gradients, one launch each. Both
contract over the last, contiguous axis of both operands, which is the only layout Hopper's FP8 tensor cores read:

    rows_product    a_TK  rows sorted by expert          b_ENK  a matrix of each expert     -> out [T, N]
    sums_product    a_NP  columns padded per expert      b_KP   likewise                    -> out [E, N, K]

The first is the forward (K inputs) and the input gradient (K outputs of the layer); the second is the weight gradient,
where each expert contracts over its own stretch of P, a multiple of STEP long and filled up with zeros.

Scales come in two kinds. "vector": one for each row of `a` and of `b`, applied once to the finished sum; for tensorwise
they are equal. "block": one for each STEP of the contraction, applied to the sum of every step; this also takes sums
out of the tensor cores, which keep fewer bits than float32, every STEP.

Operands are read by pointers or by TMA descriptors (`tma`), which leave the lanes free. There is no persistent grid,
which the faster "vector" products of `experts_hopper_products` have, and no split contraction for few tokens.

Legend: M rows of a or of a tile, N rows of b or outputs, K the contraction or inputs, T rows of tokens, E experts, P
padded rows.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitplan.base.errors import FormatError
from bitplan.formats.triton_numbers import as_bits, device_of, float_name, float_of_bits, narrow
from bitplan.fp8.casts import FP8_NAMES, ScaledFp8
from bitplan.fp8.kernels.experts_layout import TILE_ROWS, GroupedFp8, GroupLayout
from bitplan.fp8.kernels.triton_fp8_rounding import operand_of, operand_values


@dataclass(frozen=True)
class ProductLaunch:
    """Rows and columns of the tile that a program computes, warps, stages, and tiles of M that share a strip of N.

    On an H200 the default reaches 580 to 690 TFLOP/s; 64x256 with 8 warps is level or 10% behind, 128x128 with 8 warps
    reaches 450 to 560, 128x256 310, and 128x128 with 4 warps 180.
    """

    rows: int = 64
    cols: int = 128
    warps: int = 4
    stages: int = 4
    group: int = 8


def block_scaled_product(
    a_MK: ScaledFp8,
    b_NK: ScaledFp8,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    launch: ProductLaunch | None = None,
) -> Tensor:
    """Compute a times b transposed, [M, N], plus bias [N]."""
    if a_MK.scaling != "1x128" or b_NK.scaling not in ("1x128", "128x128"):
        raise FormatError(
            f"the block scaled kernel takes 1x128 with 1x128 or 128x128, got {a_MK.scaling} and {b_NK.scaling}"
        )
    (rows, width), cols = a_MK.shape, b_NK.shape[0]
    launch = launch or ProductLaunch()
    out = torch.empty((rows, cols), dtype=out_dtype, device=a_MK.codes.device)
    square = b_NK.scaling == "128x128"
    with device_of(out):
        _block_scaled[(triton.cdiv(rows, launch.rows) * triton.cdiv(cols, launch.cols),)](
            operand_of(a_MK.codes),
            operand_of(b_NK.codes),
            a_MK.scale,
            b_NK.scale,
            as_bits(bias.contiguous()) if bias is not None else as_bits(out),
            as_bits(out),
            rows,
            cols,
            width,
            b_NK.scale.stride(0) if square else b_NK.scale.stride(1),
            A=a_MK.fp8,
            B=b_NK.fp8,
            SQUARE=square,
            BIAS=float_name(bias.dtype) if bias is not None else "none",
            OUT=float_name(out_dtype),
            BM=launch.rows,
            BN=launch.cols,
            GROUP=launch.group,
            STAGES=launch.stages,
            num_warps=launch.warps,
        )
    return out


@triton.jit
def _block_scaled(
    a_ptr,
    b_ptr,
    a_scale_ptr,
    b_scale_ptr,
    bias_ptr,
    out_ptr,
    rows,
    cols,
    width,
    b_scale_stride,
    A: tl.constexpr,
    B: tl.constexpr,
    SQUARE: tl.constexpr,
    BIAS: tl.constexpr,
    OUT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Programs that run at the same time take GROUP tiles of M with the same strips of N: both operands come from L2.
    tiles_m, tiles_n = (rows + BM - 1) // BM, (cols + BN - 1) // BN
    band = tl.program_id(0) // (GROUP * tiles_n)
    in_band = tl.minimum(tiles_m - band * GROUP, GROUP)
    tile_m = band * GROUP + tl.program_id(0) % (GROUP * tiles_n) % in_band
    tile_n = tl.program_id(0) % (GROUP * tiles_n) // in_band
    m_M = tile_m * BM + tl.arange(0, BM)
    n_N = tile_n * BN + tl.arange(0, BN)
    ok_M, ok_N = m_M < rows, n_N < cols
    k_K = tl.arange(0, 128)
    a_MK = a_ptr + m_M[:, None].to(tl.int64) * width + k_K[None, :]
    b_KN = b_ptr + n_N[None, :].to(tl.int64) * width + k_K[:, None]
    if SQUARE:
        b_scale_N = b_scale_ptr + n_N // 128 * b_scale_stride
        b_step = 1
    else:
        b_scale_N = b_scale_ptr + n_N
        b_step = b_scale_stride

    acc_MN = tl.zeros([BM, BN], tl.float32)
    for step in tl.range(0, width // 128, num_stages=STAGES):
        a = tl.load(a_MK + step * 128, mask=ok_M[:, None], other=0.0)
        b = tl.load(b_KN + step * 128, mask=ok_N[None, :], other=0.0)
        sum_MN = tl.dot(operand_values(a, A), operand_values(b, B), input_precision="ieee")
        scale_M = tl.load(a_scale_ptr + step * rows + m_M, mask=ok_M, other=0.0)
        scale_N = tl.load(b_scale_N + step * b_step, mask=ok_N, other=0.0)
        acc_MN += sum_MN * scale_M[:, None] * scale_N[None, :]

    if BIAS != "none":
        acc_MN += float_of_bits(tl.load(bias_ptr + n_N, mask=ok_N, other=0), BIAS)[None, :]
    at_MN = m_M[:, None].to(tl.int64) * cols + n_N[None, :]
    tl.store(out_ptr + at_MN, narrow(acc_MN, OUT), mask=ok_M[:, None] & ok_N[None, :])


# ---- products of experts ---------------------------------------------------------------------------------------------


STEP = 128  # numbers of one step of the contraction, which is also a block of scales


@dataclass(frozen=True)
class GroupedLaunch:
    """How a product is cut up: the tile of the output, warps and stages of a program, and how operands are read.

    `rows` must divide TILE_ROWS in `rows_product`. `together` rows of tiles go through the columns together.
    """

    rows: int
    cols: int
    warps: int
    stages: int
    tma: bool = True
    together: int = 8


# The shapes that dense FP8 products favour on Hopper. On an H200, with 8 experts of 2048x7168, "vector" by 128x128 with
# 4 warps is 1 to 8% faster with `fast_accum`; without it, as layers compute gradients, it was not measured.
DEFAULT_LAUNCHES = {"vector": GroupedLaunch(128, 256, 8, 3), "block": GroupedLaunch(128, 128, 8, 4)}


def rows_product(
    a_TK: GroupedFp8,
    b_ENK: GroupedFp8,
    layout: GroupLayout,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    fast_accum: bool = True,
    launch: GroupedLaunch | None = None,
) -> None:
    """Multiply rows of tokens by their experts' matrices, into `out` [T, N]."""
    launch = launch or DEFAULT_LAUNCHES[a_TK.kind]
    experts, outputs, inputs = b_ENK.codes.shape
    halves = TILE_ROWS // launch.rows
    tiles = layout.tiles * halves
    codes = a_TK.codes, b_ENK.codes.view(experts * outputs, inputs)
    tables = layout.tile_expert, layout.tile_row, layout.ends
    numbers = a_TK.codes.shape[0], tiles, inputs
    _run(a_TK, b_ENK, codes, bias, out, tables, numbers, (0, outputs, inputs, halves), fast_accum, launch, tiles)


def sums_product(
    a_NP: GroupedFp8,
    b_KP: GroupedFp8,
    layout: GroupLayout,
    out: Tensor,
    *,
    fast_accum: bool = True,
    launch: GroupedLaunch | None = None,
) -> None:
    """Fill out [E, N, K]; the layout is padded to STEP."""
    launch = launch or DEFAULT_LAUNCHES[a_NP.kind]
    experts, outputs, inputs = out.shape
    codes, tables = (a_NP.codes, b_KP.codes), (layout.by_size, layout.by_size, layout.padded_ends)
    numbers = 0, 0, layout.padded_rows
    tiles = experts * triton.cdiv(outputs, launch.rows)
    _run(a_NP, b_KP, codes, None, out, tables, numbers, (outputs, inputs, 0, 1), fast_accum, launch, tiles)


def _run(
    a: GroupedFp8,
    b: GroupedFp8,
    codes: tuple[Tensor, Tensor],
    bias: Tensor | None,
    out: Tensor,
    tables: tuple[Tensor, Tensor, Tensor],
    numbers: tuple[int, int, int],
    sizes: tuple[int, int, int, int],
    fast_accum: bool,
    launch: GroupedLaunch,
    tiles: int,
) -> None:
    """Launch `tiles` rows of tiles; `numbers` and `sizes` are `_tile_product`'s, in its order."""
    height, width, length, halves = sizes
    with device_of(out):
        _tile_product[(tiles * triton.cdiv(width, launch.cols),)](
            _operand(codes[0], launch.rows, launch.tma),
            _operand(codes[1], launch.cols, launch.tma),
            a.scale,
            b.scale,
            a.scale if bias is None else bias.float(),
            as_bits(out),
            *tables,
            *numbers,
            HEIGHT=height,
            WIDTH=width,
            LENGTH=length,
            SCALES=a.kind,
            A=FP8_NAMES[a.codes.dtype],
            B=FP8_NAMES[b.codes.dtype],
            OUT=float_name(out.dtype),
            FAST=fast_accum,
            BIAS=bias is not None,
            BM=launch.rows,
            BN=launch.cols,
            BK=STEP,
            HALVES=halves,
            TOGETHER=launch.together,
            TMA=launch.tma,
            num_warps=launch.warps,
            num_stages=launch.stages,
        )


def _operand(codes: Tensor, rows: int, tma: bool) -> Any:
    """Codes as a kernel reads them: by a pointer or a TMA descriptor."""
    codes = operand_of(codes)
    if not tma:
        return codes
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(codes, [rows, STEP])


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows", "tiles"])
def _tile_product(
    a_ptr,
    b_ptr,
    a_scales_ptr,
    b_scales_ptr,
    bias_ptr,
    out_ptr,
    expert_ptr,  # of each tile; of sums, the experts by size
    row_ptr,  # first row of each tile
    ends_ptr,
    rows,
    tiles,
    stride,  # numbers from one row of an operand to the next
    HEIGHT: tl.constexpr,  # rows of an expert's result; 0: rows of tokens, in tiles by the tables
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,  # of the contraction; of sums it is an expert's stretch
    SCALES: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    OUT: tl.constexpr,
    FAST: tl.constexpr,
    BIAS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    HALVES: tl.constexpr,
    TOGETHER: tl.constexpr,
    TMA: tl.constexpr,
):
    SUMS: tl.constexpr = HEIGHT > 0
    COLS: tl.constexpr = (WIDTH + BN - 1) // BN
    STEPS: tl.constexpr = (LENGTH + BK - 1) // BK
    if SUMS:
        ROWS: tl.constexpr = (HEIGHT + BM - 1) // BM
        # The expert with the most rows takes longest: it starts first.
        expert = tl.load(expert_ptr + tl.program_id(0) // (ROWS * COLS))
        tile, block = _tile_of_program(tl.program_id(0) % (ROWS * COLS), ROWS, COLS, TOGETHER)
        row, b_row, end, pitch = tile * BM, block * BN, HEIGHT, stride
        first = tl.multiple_of(tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0), BK)
        last = tl.load(ends_ptr + expert)
    else:
        tile, block = _tile_of_program(tl.program_id(0), tiles, COLS, TOGETHER)
        expert = tl.load(expert_ptr + tile // HALVES)
        if expert < 0:  # the grid has room for the worst routing
            return
        end = tl.load(ends_ptr + expert)
        row = tl.load(row_ptr + tile // HALVES) + tile % HALVES * BM
        if row >= end:
            return
        b_row, pitch, first, last = expert * WIDTH + block * BN, LENGTH, 0, STEPS * BK
    m_M, n_N, k_K = row + tl.arange(0, BM), block * BN + tl.arange(0, BN), tl.arange(0, BK)
    ok_M, ok_N = m_M < end, n_N < WIDTH
    at_MK = m_M[:, None].to(tl.int64) * pitch + k_K[None, :]
    at_NK = (b_row + tl.arange(0, BN))[:, None].to(tl.int64) * pitch + k_K[None, :]

    acc_MN = tl.zeros([BM, BN], tl.float32)
    for at in range(first, last, BK):
        if TMA:
            a_MK, b_NK = a_ptr.load([row, at]), b_ptr.load([b_row, at])
        elif LENGTH % BK == 0:
            a_MK = tl.load(a_ptr + at_MK + at, mask=ok_M[:, None], other=0.0)
            b_NK = tl.load(b_ptr + at_NK + at, mask=ok_N[:, None], other=0.0)
        else:
            ok_K = at + k_K < LENGTH
            a_MK = tl.load(a_ptr + at_MK + at, mask=ok_M[:, None] & ok_K[None, :], other=0.0)
            b_NK = tl.load(b_ptr + at_NK + at, mask=ok_N[:, None] & ok_K[None, :], other=0.0)
        if SCALES == "block":
            part_MN = tl.dot(operand_values(a_MK, A), tl.trans(operand_values(b_NK, B)), input_precision="ieee")
            step = at // BK
            if SUMS:
                scale_M = tl.load(a_scales_ptr + step * HEIGHT + m_M, mask=ok_M, other=0.0)
                scale_N = tl.load(b_scales_ptr + step * WIDTH + n_N, mask=ok_N, other=0.0)
                acc_MN += part_MN * (scale_M[:, None] * scale_N[None, :])
            else:
                scale_M = tl.load(a_scales_ptr + step * rows.to(tl.int64) + m_M, mask=ok_M, other=0.0)
                of_expert_ptr = b_scales_ptr + expert * (WIDTH // BK * STEPS)
                if BN == BK:
                    scale_M *= tl.load(of_expert_ptr + block * STEPS + step)
                    acc_MN += part_MN * scale_M[:, None]
                else:
                    scale_N = tl.load(of_expert_ptr + n_N // BK * STEPS + step, mask=ok_N, other=0.0)
                    acc_MN += part_MN * (scale_M[:, None] * scale_N[None, :])
        else:
            acc_MN = _add_product(operand_values(a_MK, A), tl.trans(operand_values(b_NK, B)), acc_MN, FAST)
    if SCALES == "vector":
        scale_M = tl.load(a_scales_ptr + (expert * HEIGHT if SUMS else 0) + m_M, mask=ok_M, other=0.0)
        scale_N = tl.load(b_scales_ptr + expert * WIDTH + n_N, mask=ok_N, other=0.0)
        acc_MN = acc_MN * scale_M[:, None] * scale_N[None, :]
    if BIAS:
        acc_MN += tl.load(bias_ptr + expert * WIDTH + n_N, mask=ok_N, other=0.0)[None, :]
    out_row = expert.to(tl.int64) * HEIGHT  # 0 where rows are those of tokens
    at_MN = (out_row + m_M)[:, None].to(tl.int64) * WIDTH + n_N[None, :]
    tl.store(out_ptr + at_MN, narrow(acc_MN, OUT), mask=ok_M[:, None] & ok_N[None, :])


@triton.jit
def _tile_of_program(program, rows, COLS: tl.constexpr, TOGETHER: tl.constexpr):
    """Return a program's (row, column) of tiles; `TOGETHER` rows of tiles go through the columns side by side."""
    first = program // (TOGETHER * COLS) * TOGETHER
    side = tl.minimum(rows - first, TOGETHER)
    inside = program % (TOGETHER * COLS)
    return first + inside % side, inside // side


@triton.jit
def _add_product(a, b, acc, FAST: tl.constexpr):
    """acc + a b; not FAST: the tensor cores' sum is added to float32 at every step."""
    if FAST:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee", max_num_imprecise_acc=a.shape[1])
    return acc
