"""Blockwise casts for experts of bfloat16 in words of two numbers: the tile of `kernels.fp8.fast_tile` is the block.

One launch and one read. An expert's tokens have a scale for each row and each column of a tile, its matrix one for the
whole tile, as the dense casts have; where a tile lies is known as in `fast_tile`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from bitplan.kernels.base.launch import PreparedLaunch
from bitplan.kernels.fp8.experts.fast_tile import Made, place_of_tile, span_of_expert
from bitplan.kernels.fp8.experts.layout import GroupLayout
from bitplan.kernels.fp8.fast_tile import (
    amax_of_tile,
    least_scale,
    load_tile,
    store_by_blocks_of_cols,
    store_by_blocks_of_rows,
    store_by_one_scale,
)
from bitplan.kernels.fp8.numbers import quick_inverse, quick_scale
from bitplan.kernels.fp8.triton_cast import PAIR_LAUNCHES, CastLaunch

# Tiles are blocks, and the tiles of a layout's tables: 128 x 128 whatever these say.
TOKENS_LAUNCH = PAIR_LAUNCHES["1x128"]
MATRICES_LAUNCH = PAIR_LAUNCHES["128x128"]


def cast_tokens_in_blocks(x_TC: Tensor, layout: GroupLayout, fp8: str, eps: float, out: Made, out_t: Made) -> None:
    sizes = (layout.tiles, 0, layout.padded_rows, x_TC.shape[1], x_TC.shape[0])
    launch = _prepare(sizes, fp8, float(eps), (out is not None, out_t is not None), TOKENS_LAUNCH)
    tables = (layout.tile_expert, layout.tile_row, layout.ends, layout.padded_ends)
    launch(x_TC, *(out or (None, None)), *(out_t or (None, None)), *tables)


def cast_matrices_in_blocks(x_RC: Tensor, experts: int, fp8: str, eps: float, out: Made, out_t: Made) -> None:
    """x: all experts' matrices, one below the other."""
    rows = x_RC.shape[0] // experts
    sizes = (experts * (rows // 128), rows, rows, x_RC.shape[1], 0)
    launch = _prepare(sizes, fp8, float(eps), (out is not None, out_t is not None), MATRICES_LAUNCH)
    launch(x_RC, *(out or (None, None)), *(out_t or (None, None)), *(None,) * 4)


@functools.lru_cache(maxsize=1024)
def _prepare(
    sizes: tuple[int, int, int, int, int], fp8: str, eps: float, wanted: tuple[bool, bool], launch: CastLaunch
) -> PreparedLaunch:
    """`sizes`: tiles from top to bottom, rows of a matrix (0: of tokens, by tables), codes from one column to the next
    in the transposed layout, columns, tokens."""
    down, rows, stride, cols, tokens = sizes
    constants = {"TOKENS": not rows, "BR": 128, "BC": 128, "FP8": fp8}
    constants |= {"TO_ROWS": wanted[0], "TO_COLS": wanted[1], "V": launch.vector}
    return PreparedLaunch(
        _cast_blocks,
        (down * (cols // 128),),
        (rows // 16, stride // 16, cols // 16, tokens, least_scale(eps, fp8)),
        constants,
        num_warps=launch.warps,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["group16", "stride16", "cols16", "tokens"])
def _cast_blocks(
    x_ptr,
    out_ptr,
    scale_ptr,
    out_t_ptr,
    scale_t_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    ends_ptr,
    padded_ends_ptr,
    group16,
    stride16,
    cols16,
    tokens,
    least,
    TOKENS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    FP8: tl.constexpr,
    TO_ROWS: tl.constexpr,
    TO_COLS: tl.constexpr,
    V: tl.constexpr,
):
    expert, down, across = place_of_tile(
        tl.program_id(0), tile_expert_ptr, tile_row_ptr, ends_ptr, group16, cols16, TOKENS, BR, BC
    )
    if expert < 0:
        return
    start, rows, first, rows16 = span_of_expert(expert, ends_ptr, padded_ends_ptr, group16, cols16, TOKENS)
    begin = start.to(tl.int64) * (cols16 * 16)
    a_QW, b_QW, c_QW, d_QW = load_tile(x_ptr + begin, down, across, rows, cols16, BR, BC)
    if TO_ROWS:
        out_ptr += begin
    if TO_COLS:
        out_t_ptr += first
    if TOKENS:
        if TO_ROWS:
            store_by_blocks_of_rows(
                out_ptr, scale_ptr + start, down, across, rows, tokens, cols16, a_QW, b_QW, c_QW, d_QW, least,
                FP8, BR, BC, V, True,
            )  # fmt: skip
        if TO_COLS:
            store_by_blocks_of_cols(
                out_t_ptr, scale_t_ptr + first // BR * (cols16 * 16), down, across, rows16, stride16, cols16,
                a_QW, b_QW, c_QW, d_QW, least, FP8, BR, BC,
            )  # fmt: skip
    else:
        scale = quick_scale(amax_of_tile(a_QW, b_QW, c_QW, d_QW).to(tl.float32, bitcast=True), least, FP8)
        high, wide = group16 // (BR // 16), cols16 // (BC // 16)
        if TO_ROWS:
            tl.store(scale_ptr + (expert * high + down) * wide + across, scale)
        if TO_COLS:
            tl.store(scale_t_ptr + (expert * wide + across) * high + down, scale)
        store_by_one_scale(
            out_ptr, out_t_ptr, down, across, rows, rows16, stride16, cols16, a_QW, b_QW, c_QW, d_QW,
            quick_inverse(scale), FP8, TO_ROWS, TO_COLS, BR, BC, V,
        )  # fmt: skip
