"""Rowwise casts for experts of bfloat16 in words of two numbers.

A row's scale and that of an expert's column reach across tiles, so there are two reads: maxima of both by atomics, then
the cast, each program of which makes the few scales it needs from the maxima. Where a tile lies is known as in
`fast_tile`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitplan.kernels.base.launch import PreparedLaunch
from bitplan.kernels.fp8.experts.fast_tile import Made, place_of_tile, scale_empty_experts, span_of_expert
from bitplan.kernels.fp8.experts.layout import TILE_ROWS, GroupLayout
from bitplan.kernels.fp8.fast_tile import (
    largest_of_cols,
    largest_of_rows,
    least_scale,
    load_tile,
    store_tile,
    store_transposed_tile,
)
from bitplan.kernels.fp8.numbers import quick_inverse, quick_scale
from bitplan.kernels.fp8.triton_cast import PAIR_LAUNCHES, CastLaunch

LAUNCH = PAIR_LAUNCHES["row"]  # of tokens, whose tables have tiles of 128 rows, and of matrices
assert LAUNCH.rows == TILE_ROWS
_SIZES = ["experts", "group16", "stride16", "cols16"]


def cast_tokens_by_rows(x_TC: Tensor, layout: GroupLayout, fp8: str, eps: float, out: Made, out_t: Made) -> None:
    tables = (layout.tile_expert, layout.tile_row, layout.ends, layout.padded_ends)
    sizes = (layout.tiles, layout.experts, 0, layout.padded_rows, x_TC.shape[1])
    _cast(x_TC, tables, sizes, fp8, eps, out, out_t)


def cast_matrices_by_rows(x_RC: Tensor, experts: int, fp8: str, eps: float, out: Made, out_t: Made) -> None:
    """x: all experts' matrices, one below the other."""
    rows = x_RC.shape[0] // experts
    sizes = (experts * triton.cdiv(rows, LAUNCH.rows), experts, rows, rows, x_RC.shape[1])
    _cast(x_RC, (None,) * 4, sizes, fp8, eps, out, out_t)


def _cast(
    x: Tensor,
    tables: tuple[Tensor | None, ...],
    sizes: tuple[int, int, int, int, int],
    fp8: str,
    eps: float,
    out: Made,
    out_t: Made,
) -> None:
    find_maxima, cast = _plan(sizes, fp8, float(eps), (out is not None, out_t is not None), LAUNCH)
    of_rows = -(-x.shape[0] // 4) * 4 if out is not None else 0  # both begin at a multiple of 16 bytes
    of_cols = sizes[1] * x.shape[1] if out_t is not None else 0
    amax = torch.zeros(of_rows + of_cols, dtype=torch.int32, device=x.device)
    maxima = amax if of_rows else None, amax[of_rows:] if of_cols else None
    find_maxima(x, *maxima, *tables)
    cast(x, *maxima, *(out or (None, None)), *(out_t or (None, None)), *tables)


@functools.lru_cache(maxsize=1024)
def _plan(
    sizes: tuple[int, int, int, int, int], fp8: str, eps: float, wanted: tuple[bool, bool], launch: CastLaunch
) -> tuple[PreparedLaunch, PreparedLaunch]:
    """(maxima, cast); `sizes` as in `fast_tile`."""
    down, experts, rows, stride, cols = sizes
    grid = (down * triton.cdiv(cols, launch.cols),)
    constants = {"TOKENS": not rows, "BR": launch.rows, "BC": launch.cols}
    constants |= {"TO_ROWS": wanted[0], "TO_COLS": wanted[1], "V": launch.vector}
    numbers = (experts, rows // 16, stride // 16, cols // 16, least_scale(eps, fp8))
    options = {"num_warps": launch.warps, "enable_fp_fusion": False}
    return (
        PreparedLaunch(_amax_rows, grid, (rows // 16, cols // 16), constants, **options),
        PreparedLaunch(_cast_rows, grid, numbers, constants | {"FP8": fp8}, **options),
    )


@triton.jit(do_not_specialize=_SIZES)
def _amax_rows(
    x_ptr,
    amax_ptr,
    amax_t_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    ends_ptr,
    padded_ends_ptr,
    group16,
    cols16,
    TOKENS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    TO_ROWS: tl.constexpr,
    TO_COLS: tl.constexpr,
    V: tl.constexpr,
):
    expert, down, across = place_of_tile(
        tl.program_id(0), tile_expert_ptr, tile_row_ptr, ends_ptr, group16, cols16, TOKENS, BR, BC
    )
    if expert < 0:
        return
    start, rows, _, _ = span_of_expert(expert, ends_ptr, padded_ends_ptr, group16, cols16, TOKENS)
    first_ptr = x_ptr + start.to(tl.int64) * (cols16 * 16)
    a_QW, b_QW, c_QW, d_QW = load_tile(first_ptr, down, across, rows, cols16, BR, BC)
    if TO_ROWS:
        ab_Q, cd_Q = largest_of_rows(a_QW, b_QW, BR // 4, BC // 2, V), largest_of_rows(c_QW, d_QW, BR // 4, BC // 2, V)
        r_Q = down * BR + tl.arange(0, BR // 4) * 4
        at_Q = amax_ptr + start + r_Q
        tl.atomic_max(at_Q, ab_Q << 16, mask=r_Q < rows)
        tl.atomic_max(at_Q + 1, ab_Q & -65536, mask=r_Q + 1 < rows)
        tl.atomic_max(at_Q + 2, cd_Q << 16, mask=r_Q + 2 < rows)
        tl.atomic_max(at_Q + 3, cd_Q & -65536, mask=r_Q + 3 < rows)
    if TO_COLS:
        pair_W = largest_of_cols(a_QW, b_QW, c_QW, d_QW)
        c_W = across * BC + tl.arange(0, BC // 2) * 2
        at_W = amax_t_ptr + expert * (cols16 * 16) + c_W
        tl.atomic_max(at_W, pair_W << 16, mask=c_W < cols16 * 16)
        tl.atomic_max(at_W + 1, pair_W & -65536, mask=c_W < cols16 * 16)


@triton.jit
def _scale_from(amax_ptr, scale_ptr, at, ok, is_writer, least, FP8: tl.constexpr):
    """1 / scales of maxima; one tile of those that need them writes the scales."""
    scale = quick_scale(tl.load(amax_ptr + at, mask=ok, other=0).to(tl.float32, bitcast=True), least, FP8)
    if is_writer:
        tl.store(scale_ptr + at, scale, mask=ok)
    return quick_inverse(scale)


@triton.jit(do_not_specialize=_SIZES)
def _cast_rows(
    x_ptr,
    amax_ptr,
    amax_t_ptr,
    out_ptr,
    scale_ptr,
    out_t_ptr,
    scale_t_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    ends_ptr,
    padded_ends_ptr,
    experts,
    group16,
    stride16,
    cols16,
    least,
    TOKENS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    TO_ROWS: tl.constexpr,
    TO_COLS: tl.constexpr,
    V: tl.constexpr,
    FP8: tl.constexpr,
):
    if TOKENS and TO_COLS:
        scale_empty_experts(scale_t_ptr, ends_ptr, experts, cols16)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # from the end: what the maxima read last is still in L2
    expert, down, across = place_of_tile(tile, tile_expert_ptr, tile_row_ptr, ends_ptr, group16, cols16, TOKENS, BR, BC)
    if expert < 0:
        return
    start, rows, first, rows16 = span_of_expert(expert, ends_ptr, padded_ends_ptr, group16, cols16, TOKENS)
    begin = start.to(tl.int64) * (cols16 * 16)
    a_QW, b_QW, c_QW, d_QW = load_tile(x_ptr + begin, down, across, rows, cols16, BR, BC)
    if TO_ROWS:
        r_Q = down * BR + tl.arange(0, BR // 4) * 4
        by_a_Q = _scale_from(amax_ptr, scale_ptr, start + r_Q, r_Q < rows, across == 0, least, FP8)
        by_b_Q = _scale_from(amax_ptr, scale_ptr, start + r_Q + 1, r_Q + 1 < rows, across == 0, least, FP8)
        by_c_Q = _scale_from(amax_ptr, scale_ptr, start + r_Q + 2, r_Q + 2 < rows, across == 0, least, FP8)
        by_d_Q = _scale_from(amax_ptr, scale_ptr, start + r_Q + 3, r_Q + 3 < rows, across == 0, least, FP8)
        store_tile(
            out_ptr + begin, down, across, rows, cols16, a_QW, b_QW, c_QW, d_QW, by_a_Q, by_b_Q, by_c_Q, by_d_Q,
            FP8, BR, BC, V, TOKENS,
        )  # fmt: skip
    if TO_COLS:
        c_W = across * BC + tl.arange(0, BC // 2) * 2
        ok_W, at_W = c_W < cols16 * 16, expert * (cols16 * 16) + c_W
        by_even_W = _scale_from(amax_t_ptr, scale_t_ptr, at_W, ok_W, down == 0, least, FP8)
        by_odd_W = _scale_from(amax_t_ptr, scale_t_ptr, at_W + 1, ok_W, down == 0, least, FP8)
        store_transposed_tile(
            out_t_ptr + first, down, across, rows16, stride16, cols16, a_QW, b_QW, c_QW, d_QW, by_even_W, by_odd_W,
            FP8, BR, BC,
        )  # fmt: skip
