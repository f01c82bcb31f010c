"""FP8 casts of bfloat16 at the speed of memory: each thread holds words of two numbers, from four rows.

A tile is four sets of words: rows 0, 4, 8..., rows 1, 5, 9... and so on. A thread holds the same columns of four
neighbouring rows, so it can write two neighbours' codes for the plain layout, and pack four rows' codes of a column
into a word for the transposed layout: threads exchange words, where `triton_cast` moves bytes. With scales by a few
multiply-adds that is 11 instructions a number for blocks instead of 25, and no registers spill.

Its limits: a word is two 16-bit numbers that a shift turns into float32, so only bfloat16; both layouts are written in
words of 4, so columns and padded rows are multiples of 16 (which a product asks for anyway), and x begins at a multiple
of 16 bytes; mxfp8 has blocks of 32; maxima of rows after a norm are found one number at a time. `triton_cast` casts
everything else.

Legend: Q groups of four rows, W words (two columns) of a tile, R rows, C columns; x_4QW is a tile, a tuple of the words
of rows 0, 1, 2 and 3 of each four.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from bitplan.fp8.casts import scale_of_amax
from bitplan.fp8.kernels.triton_fp8_rounding import (
    PAIR_OF_MAGNITUDES,
    four_codes,
    high_float,
    largest_bits,
    low_float,
    pair_max,
    pair_of_floats,
    pair_of_rows,
    pair_times_power,
    power_of_two_of_bits,
    quick_inverse,
    quick_scale,
    reduce_pairs,
    two_codes,
)
from bitplan.fp8.kernels.triton_norm import normalise_words

_SIZES = ["rows", "cols16", "rows16", "scale_stride", "scale_t_stride", "pieces"]


def is_aligned(x: Tensor) -> bool:
    """Whether x begins at a multiple of 16 bytes; a view into other memory need not."""
    return not x.data_ptr() & 15


def fits_pairs(shape: tuple[int, int], dtype: torch.dtype, padded: int, *, aligned: bool) -> bool:
    """Whether a matrix can be cast as words of two numbers."""
    return dtype == torch.bfloat16 and aligned and not shape[1] % 16 and not padded % 16


def least_scale(eps: float, fp8: str) -> float:
    """The scale of a group of zeros."""
    return float(scale_of_amax(torch.tensor(eps, dtype=torch.float32), fp8))


# ---- a tile in registers ---------------------------------------------------------------------------------------------


@triton.jit
def words_of(x_ptr):
    """Turn a pointer to 16-bit numbers into one to 32-bit words of two numbers."""
    return x_ptr.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def place_of(tile, cols16, BC: tl.constexpr):
    """Return (block of rows, block of columns) of a tile, by its number."""
    across = (cols16 * 16 + BC - 1) // BC
    return tile // across, tile % across


@triton.jit
def _load_words(x_ptr, r_Q, left, words, w_W, ok_W):
    at_QW = (r_Q * words)[:, None] + w_W[None, :]
    return tl.load(x_ptr + at_QW, mask=(r_Q < left)[:, None] & ok_W[None, :], other=0)


@triton.jit
def load_tile(x_ptr, down, across, rows, cols16, BR: tl.constexpr, BC: tl.constexpr):
    """A tile x_4QW; zeros beyond the last row or column."""
    r_Q, w_W = tl.arange(0, BR // 4) * 4, tl.arange(0, BC // 2)
    words = cols16 * 8
    row, word = down * BR, across * (BC // 2)
    ok_W = word + w_W < words
    first_ptr = words_of(x_ptr) + (row.to(tl.int64) * words + word)
    a_QW = _load_words(first_ptr, r_Q, rows - row, words, w_W, ok_W)
    b_QW = _load_words(first_ptr, r_Q + 1, rows - row, words, w_W, ok_W)
    c_QW = _load_words(first_ptr, r_Q + 2, rows - row, words, w_W, ok_W)
    d_QW = _load_words(first_ptr, r_Q + 3, rows - row, words, w_W, ok_W)
    return a_QW, b_QW, c_QW, d_QW


@triton.jit
def _largest_of_fours(x_4QW):
    return pair_max(pair_max(x_4QW[0], x_4QW[1]), pair_max(x_4QW[2], x_4QW[3]))


@triton.jit
def amax_of_tile(x_4QW):
    """Bits of the largest magnitude, as float32."""
    return largest_bits(reduce_pairs(reduce_pairs(_largest_of_fours(x_4QW), 1), 0))


@triton.jit
def _store_codes(
    out_ptr, r_Q, ok_Q, words, w_W, ok_W, x_QW, inverse_Q, FP8: tl.constexpr, V: tl.constexpr, SCALED: tl.constexpr
):
    # Triton makes the loads as wide as these stores, so the width is set here.
    at_QW = tl.max_contiguous(out_ptr + ((r_Q * words)[:, None] + w_W[None, :]), [1, V])
    tl.store(at_QW, two_codes(x_QW, inverse_Q[:, None], FP8, SCALED), mask=ok_Q[:, None] & ok_W[None, :])


@triton.jit
def store_tile(
    out_ptr,
    down,
    across,
    rows,
    cols16,
    x_4QW,
    inverse_4Q,
    FP8: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    V: tl.constexpr,
    BY_ROW: tl.constexpr = False,
    SCALED: tl.constexpr = False,
):
    """Store codes of rows, within bounds: whole fours of rows, or with BY_ROW single rows, which needs more masks."""
    r_Q, w_W = tl.arange(0, BR // 4) * 4, tl.arange(0, BC // 2)
    words = cols16 * 8
    row, word = down * BR, across * (BC // 2)
    left, ok_W = rows - row, word + w_W < words
    STEP: tl.constexpr = 1 if BY_ROW else 0
    out_ptr = out_ptr.to(tl.pointer_type(tl.int16), bitcast=True) + (row.to(tl.int64) * words + word)
    _store_codes(out_ptr, r_Q, r_Q < left, words, w_W, ok_W, x_4QW[0], inverse_4Q[0], FP8, V, SCALED)
    _store_codes(out_ptr, r_Q + 1, r_Q + STEP < left, words, w_W, ok_W, x_4QW[1], inverse_4Q[1], FP8, V, SCALED)
    _store_codes(out_ptr, r_Q + 2, r_Q + 2 * STEP < left, words, w_W, ok_W, x_4QW[2], inverse_4Q[2], FP8, V, SCALED)
    _store_codes(out_ptr, r_Q + 3, r_Q + 3 * STEP < left, words, w_W, ok_W, x_4QW[3], inverse_4Q[3], FP8, V, SCALED)


@triton.jit
def store_transposed_tile(
    out_t_ptr,
    down,
    across,
    rows16,
    stride16,
    cols16,
    x_4QW,
    inverse_even_W,
    inverse_odd_W,
    FP8: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    SCALED: tl.constexpr = False,
):
    """Store codes of columns, four rows a word, within bounds; a column is 16 `stride16` codes long."""
    q_Q, c_C = tl.arange(0, BR // 4), tl.arange(0, BC)
    quads = stride16 * 4
    quad, col = down * (BR // 4), across * BC
    a_QW, b_QW, c_QW, d_QW = x_4QW
    even_QW = four_codes(a_QW, b_QW, c_QW, d_QW, inverse_even_W[None, :], False, FP8, SCALED)
    odd_QW = four_codes(a_QW, b_QW, c_QW, d_QW, inverse_odd_W[None, :], True, FP8, SCALED)
    codes_CQ = tl.trans(tl.reshape(tl.join(even_QW, odd_QW), [BR // 4, BC]))
    at_CQ = c_C[:, None] * quads + q_Q[None, :]
    room_CQ = (col + c_C < cols16 * 16)[:, None] & (quad + q_Q < rows16 * 4)[None, :]
    tl.store(words_of(out_t_ptr) + (col.to(tl.int64) * quads + quad) + at_CQ, codes_CQ, mask=room_CQ)


@triton.jit
def store_by_one_scale(
    out_ptr,
    out_t_ptr,
    down,
    across,
    rows,
    rows16,
    stride16,
    cols16,
    x_4QW,
    inverse,
    FP8: tl.constexpr,
    TO_ROWS: tl.constexpr,
    TO_COLS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    V: tl.constexpr,
    BY_ROW: tl.constexpr = False,
    POWER: tl.constexpr = False,
):
    """Store both layouts, each if asked for. POWER: the scale is a power of two, which multiplies whole words."""
    if POWER:
        pair = pair_of_floats(inverse, inverse)
        x_4QW = (
            pair_times_power(x_4QW[0], pair),
            pair_times_power(x_4QW[1], pair),
            pair_times_power(x_4QW[2], pair),
            pair_times_power(x_4QW[3], pair),
        )
    if TO_ROWS:
        by_Q = tl.zeros([BR // 4], tl.float32) + inverse
        by_4Q = (by_Q, by_Q, by_Q, by_Q)
        store_tile(out_ptr, down, across, rows, cols16, x_4QW, by_4Q, FP8, BR, BC, V, BY_ROW, POWER)
    if TO_COLS:
        by_W = tl.zeros([BC // 2], tl.float32) + inverse
        store_transposed_tile(out_t_ptr, down, across, rows16, stride16, cols16, x_4QW, by_W, by_W, FP8, BR, BC, POWER)


@triton.jit
def largest_of_rows(a_QW, b_QW, Q: tl.constexpr, W: tl.constexpr, V: tl.constexpr):
    """Return pairs of maxima [Q] of words of two rows [Q, W]: first within threads, then two rows per shuffle."""
    a_QWV, b_QWV = tl.reshape(a_QW, [Q, W // V, V]), tl.reshape(b_QW, [Q, W // V, V])
    pairs_QW = pair_of_rows(reduce_pairs(a_QWV, 2), reduce_pairs(b_QWV, 2))
    return reduce_pairs(pairs_QW, 1) & PAIR_OF_MAGNITUDES


@triton.jit
def largest_of_cols(x_4QW):
    """Return the maxima of a tile's columns, as pairs [W]."""
    return reduce_pairs(_largest_of_fours(x_4QW), 0) & PAIR_OF_MAGNITUDES


@triton.jit
def _interleave(a_Q, b_Q, c_Q, d_Q, R: tl.constexpr):
    return tl.reshape(tl.join(tl.join(a_Q, c_Q), tl.join(b_Q, d_Q)), [R])


@triton.jit
def store_by_blocks_of_rows(
    out_ptr,
    scale_ptr,
    down,
    across,
    rows,
    scale_stride,
    cols16,
    x_4QW,
    least,
    FP8: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    V: tl.constexpr,
    BY_ROW: tl.constexpr = False,
):
    """Store codes of rows, and a scale for each row of the tile; `scale_stride` from one tile to the next."""
    Q: tl.constexpr = BR // 4
    W: tl.constexpr = BC // 2
    ab_Q = largest_of_rows(x_4QW[0], x_4QW[1], Q, W, V)
    cd_Q = largest_of_rows(x_4QW[2], x_4QW[3], Q, W, V)
    scale_a_Q, scale_b_Q = quick_scale(low_float(ab_Q), least, FP8), quick_scale(high_float(ab_Q), least, FP8)
    scale_c_Q, scale_d_Q = quick_scale(low_float(cd_Q), least, FP8), quick_scale(high_float(cd_Q), least, FP8)
    by_4Q = quick_inverse(scale_a_Q), quick_inverse(scale_b_Q), quick_inverse(scale_c_Q), quick_inverse(scale_d_Q)
    r_R = down * BR + tl.arange(0, BR)
    at_R = scale_ptr + across.to(tl.int64) * scale_stride + r_R
    tl.store(at_R, _interleave(scale_a_Q, scale_b_Q, scale_c_Q, scale_d_Q, BR), mask=r_R < rows)
    store_tile(out_ptr, down, across, rows, cols16, x_4QW, by_4Q, FP8, BR, BC, V, BY_ROW)


@triton.jit
def store_by_blocks_of_cols(
    out_t_ptr,
    scale_t_ptr,
    down,
    across,
    rows16,
    stride16,
    cols16,
    x_4QW,
    least,
    FP8: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Store codes of columns, and a scale for each column of the tile."""
    largest_W = largest_of_cols(x_4QW)
    even_W = quick_scale(low_float(largest_W), least, FP8)
    odd_W = quick_scale(high_float(largest_W), least, FP8)
    c_C = across * BC + tl.arange(0, BC)
    at_C = scale_t_ptr + down.to(tl.int64) * (cols16 * 16) + c_C
    tl.store(at_C, tl.reshape(tl.join(even_W, odd_W), [BC]), mask=c_C < cols16 * 16)
    by_even_W, by_odd_W = quick_inverse(even_W), quick_inverse(odd_W)
    store_transposed_tile(out_t_ptr, down, across, rows16, stride16, cols16, x_4QW, by_even_W, by_odd_W, FP8, BR, BC)


# ---- the cast --------------------------------------------------------------------------------------------------------


@triton.jit
def _scale_of_maximum(bits_ptr, scale_ptr, at, ok, tile, least, FP8: tl.constexpr):
    """1 / scales of these rows or columns, from the bits of their maxima; tile 0 stores the scales."""
    bits = tl.load(bits_ptr + at, mask=ok, other=0)
    scale = quick_scale(bits.to(tl.float32, bitcast=True), least, FP8)
    tl.store(scale_ptr + at, scale, mask=ok & (at - at + tile == 0))
    return quick_inverse(scale)


@triton.jit(do_not_specialize=_SIZES)
def cast_pairs(
    x_ptr,
    out_ptr,
    out_t_ptr,
    scale_ptr,
    scale_t_ptr,
    pieces_ptr,
    rstd_ptr,
    mean_ptr,
    weight_ptr,
    bias_ptr,
    rows,
    cols16,  # columns / 16
    rows16,  # padded rows / 16
    scale_stride,
    scale_t_stride,
    pieces,
    eps,
    least,  # the smallest scale, that of eps
    FP8: tl.constexpr,
    SCALING: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RAGGED: tl.constexpr,  # whether the last tiles have rows beyond x's
    TO_ROWS: tl.constexpr,
    TO_COLS: tl.constexpr,
    PIECES: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    V: tl.constexpr,  # adjacent words of a thread: with 4 it loads 16 bytes and stores 8 at once, with 8 32 and 16
    OVERLAP: tl.constexpr,  # whether this is launched before a norm's statistics, or maxima of rows, are done
):
    if OVERLAP:
        cuda.gdc_wait()
    tile = tl.program_id(0)
    if SCALING == "tensor" or SCALING == "row":
        tile = tl.num_programs(0) - 1 - tile  # from the end: the tiles that the maximum read last are still in L2
    down, across = place_of(tile, cols16, BC)
    padded = rows16 * 16
    x_4QW = load_tile(x_ptr, down, across, rows, cols16, BR, BC)
    if NORM != "none":
        r_Q, c_W = down * BR + tl.arange(0, BR // 4) * 4, across * BC + tl.arange(0, BC // 2) * 2
        x_4QW = normalise_words(
            x_4QW, r_Q, c_W, rows, cols16 * 16, rstd_ptr, mean_ptr, weight_ptr, bias_ptr,
            NORM, WEIGHT, HAS_BIAS, RAGGED,
        )  # fmt: skip
    if SCALING == "tensor" or SCALING == "128x128":
        if SCALING == "tensor":
            piece = tl.arange(0, PIECES)
            amax = tl.max(tl.load(pieces_ptr + piece, mask=piece < pieces, other=0), axis=0)
            scale = power_of_two_of_bits(amax, eps, FP8)
            if tl.program_id(0) == 0:
                tl.store(scale_ptr, scale)
        else:
            scale = quick_scale(amax_of_tile(x_4QW).to(tl.float32, bitcast=True), least, FP8)
            if TO_ROWS:
                tl.store(scale_ptr + down * scale_stride + across, scale)
            if TO_COLS:
                tl.store(scale_t_ptr + across * scale_t_stride + down, scale)
        store_by_one_scale(
            out_ptr, out_t_ptr, down, across, padded, rows16, rows16, cols16, x_4QW, quick_inverse(scale),
            FP8, TO_ROWS, TO_COLS, BR, BC, V, POWER=SCALING == "tensor",
        )  # fmt: skip
    # Rows are finished before columns are begun, so that registers hold the scales of one layout only.
    elif SCALING == "1x128":
        if TO_ROWS:
            store_by_blocks_of_rows(
                out_ptr, scale_ptr, down, across, padded, padded, cols16, x_4QW, least, FP8, BR, BC, V
            )
        if TO_COLS:
            store_by_blocks_of_cols(
                out_t_ptr, scale_t_ptr, down, across, rows16, rows16, cols16, x_4QW, least, FP8, BR, BC
            )
    else:
        if TO_ROWS:
            r_Q = down * BR + tl.arange(0, BR // 4) * 4
            by_4Q = (
                _scale_of_maximum(pieces_ptr, scale_ptr, r_Q, r_Q < padded, across, least, FP8),
                _scale_of_maximum(pieces_ptr, scale_ptr, r_Q + 1, r_Q < padded, across, least, FP8),
                _scale_of_maximum(pieces_ptr, scale_ptr, r_Q + 2, r_Q < padded, across, least, FP8),
                _scale_of_maximum(pieces_ptr, scale_ptr, r_Q + 3, r_Q < padded, across, least, FP8),
            )
            store_tile(out_ptr, down, across, padded, cols16, x_4QW, by_4Q, FP8, BR, BC, V)
        if TO_COLS:
            c_W = across * BC + tl.arange(0, BC // 2) * 2
            ok_W = c_W < cols16 * 16
            by_even_W = _scale_of_maximum(pieces_ptr + padded, scale_t_ptr, c_W, ok_W, down, least, FP8)
            by_odd_W = _scale_of_maximum(pieces_ptr + padded, scale_t_ptr, c_W + 1, ok_W, down, least, FP8)
            store_transposed_tile(
                out_t_ptr, down, across, rows16, rows16, cols16, x_4QW, by_even_W, by_odd_W, FP8, BR, BC
            )
