"""The block scaled FP8 product on the GPU: a [M, K] in blocks of 1x128, b [N, K] in blocks of 1x128 or 128x128.

A step of the loop is one block along K: the tensor cores add its 128 products from zero, and the sum is scaled and
added in float32. So no more than 128 products are ever added with the tensor cores' 14 bits. It is used where the
library has no such product (an operand in E5M2, GPUs that are not Hopper); the library's own reaches 1300 TFLOP/s.

Legend: M rows of a, N rows of b, K the contraction.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitplan.base.errors import FormatError
from bitplan.formats.triton_numbers import as_bits, device_of, float_name, float_of_bits, narrow
from bitplan.fp8.casts import ScaledFp8
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
    """a times b transposed, [M, N], plus bias [N]."""
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
