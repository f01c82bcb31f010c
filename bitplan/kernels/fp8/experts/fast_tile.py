"""Casts of experts in bfloat16 at the speed of memory: the tile of `kernels.fp8.fast_tile`, expert by expert.

A tile does not cross experts. Its pointers are moved to the expert's first row; from there it casts a matrix like any
other, with the expert's rows, padded in the transposed layout to the expert's stretch.

    tensorwise   a scale for each expert. Without guesses: maxima of experts, by atomics; then the cast: 6 bytes a
                 number. With guesses: the cast uses the expert's last scale and finds its maximum on the way; then a
                 check casts the tiles of experts again whose guess was wrong: 4 bytes a number, and 4 more for these
                 experts only
    rowwise      scales of rows and of an expert's columns extend over several tiles, so there are two reads: maxima of
                 both by atomics, then the cast, in which each program computes the few scales it needs from the maxima
    blockwise    one launch and one read: the tile is the block. An expert's tokens have a scale for each row and each
                 column of a tile, its matrix one for the whole tile, as the dense casts have

Guesses work as in `fp8.guessed_cast`, but take no drift from other layers; a state has a column for each expert.
Without room results never depend on a guess. A state is used by one cast at a time. An expert without tokens is not
cast: its guess stays, and nothing is counted.

Codes and scales equal the definition in `bitplan.kernels.fp8.experts.products` bit for bit, but for casts with room.

Legend: E experts, R rows, C columns of a tile; x_4QW as in `kernels.fp8.fast_tile`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl

from bitplan.kernels.base.launch import PreparedLaunch
from bitplan.kernels.base.numbers import TINY
from bitplan.kernels.fp8.experts.layout import TILE_ROWS, GroupSizes
from bitplan.kernels.fp8.fast_tile import (
    amax_of_tile,
    largest_of_cols,
    largest_of_rows,
    least_scale,
    load_tile,
    store_by_blocks_of_cols,
    store_by_blocks_of_rows,
    store_by_one_scale,
    store_tile,
    store_transposed_tile,
)
from bitplan.kernels.fp8.guessed_cast import (
    CASTS,
    GUESS,
    LARGEST,
    ROOM,
    SEEN,
    SMALL,
    WRONG,
    scale_near,
)
from bitplan.kernels.fp8.triton_cast import PAIR_LAUNCHES, CastLaunch
from bitplan.kernels.fp8.triton_fp8_rounding import power_of_two_of_bits, quick_inverse, quick_scale

# Launches for matrices, whose rows are cut as those of a dense matrix, and for tokens, which come in the tiles of their
# layout's tables. On an H200, tensorwise by guesses, 32768 tokens of 7168 numbers: 248 us, 89% of a copy; tiles of
# 128x64 252 to 258. Matrices, 8 of 4096x7168: 242 us, 92%; tiles of 128x64 and 128x128 the same within 2 us.
MATRICES_LAUNCHES = dict(PAIR_LAUNCHES)
TOKENS_LAUNCHES = PAIR_LAUNCHES | {"tensor": CastLaunch(TILE_ROWS, 128, 8, vector=4)}
CHECKING_WARPS = 2112  # of the check of guesses
_SIZES = ["experts", "group16", "stride16", "cols16", "tokens"]


@functools.lru_cache(maxsize=1024)
def plan_pairs(
    sizes: GroupSizes,
    scaling: str,
    fp8: str,
    eps: float,
    wanted: tuple[bool, bool],
    guessed: bool,
    launch: CastLaunch,
) -> tuple[PreparedLaunch, ...]:
    """Maxima if the scales need them, the cast, and the check of guesses if there are any."""
    tiles = sizes.tiles_down(launch.rows) * triton.cdiv(sizes.cols, launch.cols)
    numbers = (sizes.experts, sizes.matrix_rows // 16, sizes.stride // 16, sizes.cols // 16)
    place = {"TOKENS": not sizes.matrix_rows, "BR": launch.rows, "BC": launch.cols}
    to = {"TO_ROWS": wanted[0], "TO_COLS": wanted[1], "V": launch.vector}
    options: dict[str, Any] = {"num_warps": launch.warps, "enable_fp_fusion": False}
    sums = (*numbers, sizes.tokens, eps, least_scale(eps, fp8))
    constants = place | to | {"FP8": fp8, "SCALING": scaling, "GUESSED": guessed}
    cast = PreparedLaunch(_cast_tiles, (tiles,), sums, constants | {"MAXIMA": False}, **options)
    if guessed:
        checkers = (min(tiles, CHECKING_WARPS // launch.warps),)
        room = {"FP8": fp8, "EXPERTS": max(2, triton.next_power_of_2(sizes.experts))}
        return cast, PreparedLaunch(_check_tiles, checkers, (*numbers, eps), place | to | room, **options)
    if scaling not in ("tensor", "row"):
        return (cast,)
    return PreparedLaunch(_cast_tiles, (tiles,), sums, constants | {"MAXIMA": True}, **options), cast


# ---- place of a tile -------------------------------------------------------------------------------------------------


@triton.jit
def _place_of_tile(
    tile, tile_expert_ptr, tile_row_ptr, ends_ptr, group16, cols16, TOKENS: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """(expert, or -1 where the tables have no tile; row and column of the tile within the expert)."""
    wide = (cols16 * 16 + BC - 1) // BC
    place = tile // wide
    if TOKENS:
        expert = tl.load(tile_expert_ptr + place)
        down = (tl.load(tile_row_ptr + place) - tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)) // BR
    else:
        high = (group16 * 16 + BR - 1) // BR
        expert, down = place // high, place % high
    return expert, down, tile % wide


@triton.jit
def _span_of_expert(expert, ends_ptr, padded_ends_ptr, group16, cols16, TOKENS: tl.constexpr):
    """(first row, rows, where its codes begin in the transposed layout, rows / 16 that it has there)."""
    if TOKENS:
        start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
        rows = tl.load(ends_ptr + expert) - start
        # In sixteens, so that Triton knows that the addresses are multiples of 16.
        start16 = tl.load(padded_ends_ptr + expert - 1, mask=expert > 0, other=0) // 16
        rows16 = tl.load(padded_ends_ptr + expert) // 16 - start16
        first = start16.to(tl.int64) * 16
    else:
        rows16 = group16
        rows = group16 * 16
        start = expert * rows
        first = start.to(tl.int64) * (cols16 * 16)
    return start, rows, first, rows16


# ---- a tile by its expert's scale ------------------------------------------------------------------------------------


@triton.jit
def _store_by_expert_scale(
    out_ptr,
    scale_ptr,
    out_t_ptr,
    scale_t_ptr,
    expert,
    down,
    across,
    span,
    stride16,
    cols16,
    x_4QW,
    scale,
    TOKENS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    TO_ROWS: tl.constexpr,
    TO_COLS: tl.constexpr,
    V: tl.constexpr,
    FP8: tl.constexpr,
):
    """Write codes, and the scale for each of the expert's rows (by its left tiles) and columns (by its top tiles)."""
    start, rows, first, rows16 = span
    if TO_ROWS:
        out_ptr += start.to(tl.int64) * (cols16 * 16)
        if across == 0:
            r_R = down * BR + tl.arange(0, BR)
            tl.store(scale_ptr + start + r_R, tl.zeros([BR], tl.float32) + scale, mask=r_R < rows)
    if TO_COLS:
        out_t_ptr += first
        if down == 0:
            c_C = across * BC + tl.arange(0, BC)
            at_C = scale_t_ptr + expert * (cols16 * 16) + c_C
            tl.store(at_C, tl.zeros([BC], tl.float32) + scale, mask=c_C < cols16 * 16)
    store_by_one_scale(
        out_ptr, out_t_ptr, down, across, rows, rows16, stride16, cols16, x_4QW, quick_inverse(scale),
        FP8, TO_ROWS, TO_COLS, BR, BC, V, TOKENS,
    )  # fmt: skip


@triton.jit
def _scale_empty_experts(scale_t_ptr, ends_ptr, experts, cols16):
    """Write the scales of experts without tokens, which have no tile: those of zeros."""
    cols = cols16 * 16
    for expert in range(tl.program_id(0), experts, tl.num_programs(0)):
        if tl.load(ends_ptr + expert) == tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0):
            for col in range(0, cols, 1024):
                c_C = col + tl.arange(0, 1024)
                tl.store(scale_t_ptr + expert * cols + c_C, tl.zeros([1024], tl.float32) + TINY, mask=c_C < cols)


@triton.jit
def _inverse_from(amax_ptr, scale_ptr, at, ok, is_writer, least, FP8: tl.constexpr):
    """1 / scales from maxima; of the tiles that need them, one writes the scales."""
    scale = quick_scale(tl.load(amax_ptr + at, mask=ok, other=0).to(tl.float32, bitcast=True), least, FP8)
    if is_writer:
        tl.store(scale_ptr + at, scale, mask=ok)
    return quick_inverse(scale)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _find_maxima(
    amax_ptr, amax_t_ptr, expert, down, across, span, cols16, x_4QW, SCALING: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr, TO_ROWS: tl.constexpr, TO_COLS: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Of the expert, or of its rows (`amax_ptr`) and columns (`amax_t_ptr`)."""
    start, rows, _, _ = span
    if SCALING == "tensor":
        tl.atomic_max(amax_ptr + expert, amax_of_tile(x_4QW))
    else:
        if TO_ROWS:
            ab_Q = largest_of_rows(x_4QW[0], x_4QW[1], BR // 4, BC // 2, V)
            cd_Q = largest_of_rows(x_4QW[2], x_4QW[3], BR // 4, BC // 2, V)
            r_Q = down * BR + tl.arange(0, BR // 4) * 4
            at_Q = amax_ptr + start + r_Q
            tl.atomic_max(at_Q, ab_Q << 16, mask=r_Q < rows)
            tl.atomic_max(at_Q + 1, ab_Q & -65536, mask=r_Q + 1 < rows)
            tl.atomic_max(at_Q + 2, cd_Q << 16, mask=r_Q + 2 < rows)
            tl.atomic_max(at_Q + 3, cd_Q & -65536, mask=r_Q + 3 < rows)
        if TO_COLS:
            pair_W = largest_of_cols(x_4QW)
            c_W = across * BC + tl.arange(0, BC // 2) * 2
            at_W = amax_t_ptr + expert * (cols16 * 16) + c_W
            tl.atomic_max(at_W, pair_W << 16, mask=c_W < cols16 * 16)
            tl.atomic_max(at_W + 1, pair_W & -65536, mask=c_W < cols16 * 16)


@triton.jit(do_not_specialize=_SIZES)
def _cast_tiles(
    x_ptr,
    state_ptr,  # state of the guesses; without guesses, the maxima of experts or of rows
    out_ptr,
    scale_ptr,
    out_t_ptr,
    scale_t_ptr,
    ends_ptr,
    padded_ends_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    amax_t_ptr,  # of each expert's columns
    experts,
    group16,  # rows of a matrix / 16
    stride16,  # codes from one column to the next in the transposed layout / 16
    cols16,  # columns / 16
    tokens,
    eps,
    least,  # the smallest scale, that of eps
    TOKENS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    TO_ROWS: tl.constexpr,
    TO_COLS: tl.constexpr,
    V: tl.constexpr,
    FP8: tl.constexpr,
    SCALING: tl.constexpr,
    GUESSED: tl.constexpr,
    MAXIMA: tl.constexpr,  # only find the maxima
):
    if TOKENS and TO_COLS and SCALING != "1x128" and not MAXIMA:
        _scale_empty_experts(scale_t_ptr, ends_ptr, experts, cols16)
    tile = tl.program_id(0)
    if (SCALING == "row" or (SCALING == "tensor" and not GUESSED)) and not MAXIMA:
        tile = tl.num_programs(0) - 1 - tile  # from the end: the tiles that the maximum read last are still in L2
    expert, down, across = _place_of_tile(
        tile, tile_expert_ptr, tile_row_ptr, ends_ptr, group16, cols16, TOKENS, BR, BC
    )
    if expert < 0:
        return
    if SCALING == "tensor" and not MAXIMA:
        if GUESSED:
            scale = tl.load(state_ptr + GUESS * experts + expert).to(tl.float32, bitcast=True)
        else:
            scale = power_of_two_of_bits(tl.load(state_ptr + expert), eps, FP8)
    span = _span_of_expert(expert, ends_ptr, padded_ends_ptr, group16, cols16, TOKENS)
    start, rows, first, rows16 = span
    begin = start.to(tl.int64) * (cols16 * 16)
    x_4QW = load_tile(x_ptr + begin, down, across, rows, cols16, BR, BC)
    if MAXIMA:
        _find_maxima(
            state_ptr, amax_t_ptr, expert, down, across, span, cols16, x_4QW, SCALING, BR, BC, TO_ROWS, TO_COLS, V
        )
    elif SCALING == "tensor":
        _store_by_expert_scale(
            out_ptr, scale_ptr, out_t_ptr, scale_t_ptr, expert, down, across, span, stride16, cols16, x_4QW, scale,
            TOKENS, BR, BC, TO_ROWS, TO_COLS, V, FP8,
        )  # fmt: skip
        if GUESSED:
            tl.atomic_max(state_ptr + LARGEST * experts + expert, amax_of_tile(x_4QW))
    elif SCALING == "row":
        if TO_ROWS:
            r_Q = down * BR + tl.arange(0, BR // 4) * 4
            at_Q = start + r_Q
            by_4Q = (
                _inverse_from(state_ptr, scale_ptr, at_Q, r_Q < rows, across == 0, least, FP8),
                _inverse_from(state_ptr, scale_ptr, at_Q + 1, r_Q + 1 < rows, across == 0, least, FP8),
                _inverse_from(state_ptr, scale_ptr, at_Q + 2, r_Q + 2 < rows, across == 0, least, FP8),
                _inverse_from(state_ptr, scale_ptr, at_Q + 3, r_Q + 3 < rows, across == 0, least, FP8),
            )
            store_tile(out_ptr + begin, down, across, rows, cols16, x_4QW, by_4Q, FP8, BR, BC, V, TOKENS)
        if TO_COLS:
            c_W = across * BC + tl.arange(0, BC // 2) * 2
            ok_W, at_W = c_W < cols16 * 16, expert * (cols16 * 16) + c_W
            by_even_W = _inverse_from(amax_t_ptr, scale_t_ptr, at_W, ok_W, down == 0, least, FP8)
            by_odd_W = _inverse_from(amax_t_ptr, scale_t_ptr, at_W + 1, ok_W, down == 0, least, FP8)
            store_transposed_tile(
                out_t_ptr + first, down, across, rows16, stride16, cols16, x_4QW, by_even_W, by_odd_W, FP8, BR, BC
            )
    elif SCALING == "1x128":
        if TO_ROWS:
            store_by_blocks_of_rows(
                out_ptr + begin, scale_ptr + start, down, across, rows, tokens, cols16, x_4QW, least,
                FP8, BR, BC, V, True,
            )  # fmt: skip
        if TO_COLS:
            scale_t_ptr += first // BR * (cols16 * 16)
            store_by_blocks_of_cols(
                out_t_ptr + first, scale_t_ptr, down, across, rows16, stride16, cols16, x_4QW, least, FP8, BR, BC
            )
    else:
        scale = quick_scale(amax_of_tile(x_4QW).to(tl.float32, bitcast=True), least, FP8)
        high, wide = group16 // (BR // 16), cols16 // (BC // 16)
        if TO_ROWS:
            out_ptr += begin
            tl.store(scale_ptr + (expert * high + down) * wide + across, scale)
        if TO_COLS:
            out_t_ptr += first
            tl.store(scale_t_ptr + (expert * wide + across) * high + down, scale)
        store_by_one_scale(
            out_ptr, out_t_ptr, down, across, rows, rows16, stride16, cols16, x_4QW, quick_inverse(scale),
            FP8, TO_ROWS, TO_COLS, BR, BC, V,
        )  # fmt: skip


@triton.jit
def _settle(state_ptr, is_cast_E, e_E, experts, eps, FP8: tl.constexpr):
    """(bits of the scales to cast by, which guesses were wrong); leaves the state for the next cast."""
    here_E = e_E < experts
    guess_E = tl.load(state_ptr + GUESS * experts + e_E, mask=here_E, other=0)
    largest_E = tl.load(state_ptr + LARGEST * experts + e_E, mask=here_E, other=0)
    right_E = power_of_two_of_bits(largest_E, eps, FP8).to(tl.int32, bitcast=True)
    room_E = tl.load(state_ptr + ROOM * experts + e_E, mask=here_E, other=0)
    bits_E = scale_near(guess_E, right_E, room_E)
    wrong_E = is_cast_E & (bits_E != guess_E)
    # A program counts itself after all its threads have read; the last one clears the state for the next cast.
    tl.debug_barrier()
    if tl.atomic_add(state_ptr + SEEN * experts, 1) == tl.num_programs(0) - 1:
        casts_ptr, wrong_ptr = state_ptr + CASTS * experts + e_E, state_ptr + WRONG * experts + e_E
        tl.store(state_ptr + GUESS * experts + e_E, bits_E, mask=is_cast_E)
        tl.store(state_ptr + LARGEST * experts + e_E, tl.zeros_like(right_E), mask=is_cast_E)
        tl.store(casts_ptr, tl.load(casts_ptr, mask=is_cast_E, other=0) + 1, mask=is_cast_E)
        tl.store(wrong_ptr, tl.load(wrong_ptr, mask=wrong_E, other=0) + 1, mask=wrong_E)
        small_ptr, small_E = state_ptr + SMALL * experts + e_E, is_cast_E & (guess_E < right_E)
        tl.store(small_ptr, tl.load(small_ptr, mask=small_E, other=0) + 1, mask=small_E)
        tl.store(state_ptr + SEEN * experts, 0)
    return bits_E, wrong_E


@triton.jit(do_not_specialize=_SIZES)
def _check_tiles(
    x_ptr,
    state_ptr,
    out_ptr,
    scale_ptr,
    out_t_ptr,
    scale_t_ptr,
    ends_ptr,
    padded_ends_ptr,
    experts,
    group16,
    stride16,
    cols16,
    eps,
    TOKENS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    TO_ROWS: tl.constexpr,
    TO_COLS: tl.constexpr,
    V: tl.constexpr,
    FP8: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    e_E = tl.arange(0, EXPERTS)
    if TOKENS:
        padded_end_E = tl.load(padded_ends_ptr + e_E, mask=e_E < experts, other=0)
        before_E = tl.load(padded_ends_ptr + e_E - 1, mask=(e_E > 0) & (e_E < experts), other=0)
        height_E = padded_end_E - before_E
    else:
        height_E = tl.where(e_E < experts, group16 * 16, 0)
    bits_E, wrong_E = _settle(state_ptr, height_E > 0, e_E, experts, eps, FP8)

    # The tiles of experts whose guess was wrong are dealt out, one after the other, to all programs.
    wide = (cols16 * 16 + BC - 1) // BC
    tiles_E = tl.where(wrong_E, (height_E + BR - 1) // BR * wide, 0)
    if tl.max(tiles_E, 0) > 0:
        end_E = tl.cumsum(tiles_E, 0)
        for tile in range(tl.program_id(0), tl.max(end_E, 0), tl.num_programs(0)):
            done_E = end_E <= tile
            expert = tl.sum(done_E.to(tl.int32), 0)
            inside = tile - tl.max(tl.where(done_E, end_E, 0), 0)
            scale = tl.max(tl.where(e_E == expert, bits_E, 0), 0).to(tl.float32, bitcast=True)
            down, across = inside // wide, inside % wide
            span = _span_of_expert(expert, ends_ptr, padded_ends_ptr, group16, cols16, TOKENS)
            x_4QW = load_tile(x_ptr + span[0].to(tl.int64) * (cols16 * 16), down, across, span[1], cols16, BR, BC)
            _store_by_expert_scale(
                out_ptr, scale_ptr, out_t_ptr, scale_t_ptr, expert, down, across, span, stride16, cols16, x_4QW, scale,
                TOKENS, BR, BC, TO_ROWS, TO_COLS, V, FP8,
            )  # fmt: skip
