"""Casts for experts of bfloat16 that keep pace with memory: the tile of `kernels.fp8.fast_tile`, expert by expert.

A tile does not cross experts. Its pointers are moved to the expert's first row, and what is cast from there is a matrix
like any other, with as many rows as the expert has, and as many as its stretch of the transposed layout is padded to.

A tensorwise scale is one for each expert, and costs a second read, or none:

    without guesses   maxima of experts, by atomics; then the cast: 6 bytes a number
    by guesses        the cast goes by the expert's last scale and finds its maximum on the way; then a check, which
                      casts the tiles of those experts again whose scale was another: 4 bytes a number, and 4 more of
                      those experts only

As in `fp8.guessed_cast`, whose states these are with a column for each expert: results never depend on a guess, and a
state is used by one cast at a time. An expert without tokens is not cast: its guess stays, and nothing is counted.

Codes and scales equal the definition in `bitplan.kernels.fp8.experts.products` bit for bit.

Legend: E experts, R rows, C columns of a tile; Q, W as in `kernels.fp8.fast_tile`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitplan.errors import FormatError
from bitplan.kernels.base.launch import PreparedLaunch, launch_in_turn
from bitplan.kernels.base.numbers import TINY
from bitplan.kernels.fp8.experts.layout import TILE_ROWS, GroupLayout
from bitplan.kernels.fp8.fast_tile import amax_of_tile, load_tile, store_by_one_scale
from bitplan.kernels.fp8.guessed_cast import CASTS, CHECKING_WARPS, GUESS, LARGEST, SEEN, STATE_SIZE, WRONG
from bitplan.kernels.fp8.numbers import power_of_two_of_bits, quick_inverse
from bitplan.kernels.fp8.triton_cast import PAIR_LAUNCHES, CastLaunch

# Of one layout: codes and scales.
Made = tuple[Tensor, Tensor] | None

# Tokens come in the tiles of their layout's tables; the rows of a matrix are cut as those of a dense one. On an H200,
# by guesses, 32768 tokens of 7168 numbers: 248 us, 89% of a copy; tiles of 128x64 252 to 258. Matrices, 8 of 4096x7168:
# 242 us, 92%; tiles of 128x64 and 128x128 the same within 2 us.
TOKENS_LAUNCH = CastLaunch(TILE_ROWS, 128, 8, vector=4)
MATRICES_LAUNCH = PAIR_LAUNCHES["tensor"]
_SIZES = ["experts", "group16", "stride16", "cols16"]


def cast_tokens_in_pairs(
    x_TC: Tensor, layout: GroupLayout, fp8: str, eps: float, out: Made, out_t: Made, guess: Tensor | None
) -> None:
    tables = (layout.ends, layout.padded_ends, layout.tile_expert, layout.tile_row)
    sizes = (layout.tiles, layout.experts, 0, layout.padded_rows, x_TC.shape[1])
    _cast(x_TC, tables, sizes, fp8, eps, out, out_t, guess, TOKENS_LAUNCH)


def cast_matrices_in_pairs(
    x_RC: Tensor, experts: int, fp8: str, eps: float, out: Made, out_t: Made, guess: Tensor | None
) -> None:
    """x: all experts' matrices, one below the other."""
    rows = x_RC.shape[0] // experts
    sizes = (experts * triton.cdiv(rows, MATRICES_LAUNCH.rows), experts, rows, rows, x_RC.shape[1])
    _cast(x_RC, (None,) * 4, sizes, fp8, eps, out, out_t, guess, MATRICES_LAUNCH)


def _cast(
    x: Tensor,
    tables: tuple[Tensor | None, ...],
    sizes: tuple[int, int, int, int, int],
    fp8: str,
    eps: float,
    out: Made,
    out_t: Made,
    guess: Tensor | None,
    launch: CastLaunch,
) -> None:
    experts = sizes[1]
    if guess is not None and guess.shape != (STATE_SIZE, experts):
        raise FormatError(f"guesses of {experts} experts have shape {(STATE_SIZE, experts)}, got {tuple(guess.shape)}")
    wanted = (out is not None, out_t is not None)
    plan = _plan(sizes, fp8, float(eps), wanted, guess is not None, launch)
    made = (*(out or (None, None)), *(out_t or (None, None)))
    if guess is not None:
        launch_in_turn(plan, (x, guess, *made, *tables))
        return
    amax = torch.zeros(experts, dtype=torch.int32, device=x.device)
    plan[0](x, amax, *tables)
    plan[1](x, amax, *made, *tables)


@functools.lru_cache(maxsize=1024)
def _plan(
    sizes: tuple[int, int, int, int, int],
    fp8: str,
    eps: float,
    wanted: tuple[bool, bool],
    guessed: bool,
    launch: CastLaunch,
) -> tuple[PreparedLaunch, PreparedLaunch]:
    """(cast, check) by guesses, else (maxima, cast).

    `sizes`: tiles from top to bottom, experts, rows of a matrix (0: of tokens, by tables), codes from one column to the
    next in the transposed layout, columns.
    """
    down, experts, rows, stride, cols = sizes
    tiles = down * triton.cdiv(cols, launch.cols)
    shape = (rows // 16, cols // 16)
    numbers = (experts, rows // 16, stride // 16, cols // 16, eps)
    place = {"TOKENS": not rows, "BR": launch.rows, "BC": launch.cols}
    how = {"FP8": fp8, "TO_ROWS": wanted[0], "TO_COLS": wanted[1], "V": launch.vector}
    options = {"num_warps": launch.warps, "enable_fp_fusion": False}
    cast = PreparedLaunch(_cast_pairs, (tiles,), numbers, place | how | {"GUESSED": guessed}, **options)
    if not guessed:
        return PreparedLaunch(_amax_pairs, (tiles,), shape, place, **options), cast
    checkers = (min(tiles, CHECKING_WARPS // launch.warps),)
    room = {"EXPERTS": max(2, triton.next_power_of_2(experts))}
    return cast, PreparedLaunch(_check_pairs, checkers, numbers, place | how | room, **options)


# ---- where a tile lies -----------------------------------------------------------------------------------------------


@triton.jit
def place_of_tile(
    tile, tile_expert_ptr, tile_row_ptr, ends_ptr, group16, cols16, TOKENS: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """(expert, or -1 where the tables have no tile; which of its tiles from top to bottom, and from left to right)."""
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
def span_of_expert(expert, ends_ptr, padded_ends_ptr, group16, cols16, TOKENS: tl.constexpr):
    """(first row, rows, where its codes begin in the transposed layout, rows / 16 that it has there)."""
    if TOKENS:
        start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
        rows = tl.load(ends_ptr + expert) - start
        # In sixteens, so that Triton knows what the addresses are multiples of.
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
def _store_expert_tile(
    out_ptr,
    scale_ptr,
    out_t_ptr,
    scale_t_ptr,
    expert,
    down,
    across,
    start,
    rows,
    first,
    rows16,
    stride16,
    cols16,
    a_QW,
    b_QW,
    c_QW,
    d_QW,
    scale,
    BR: tl.constexpr,
    BC: tl.constexpr,
    FP8: tl.constexpr,
    TO_ROWS: tl.constexpr,
    TO_COLS: tl.constexpr,
    V: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Codes, and the scale once for each of the expert's rows and columns: by the tiles at its left, and at its top."""
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
        out_ptr, out_t_ptr, down, across, rows, rows16, stride16, cols16, a_QW, b_QW, c_QW, d_QW, quick_inverse(scale),
        FP8, TO_ROWS, TO_COLS, BR, BC, V, TOKENS,
    )  # fmt: skip


@triton.jit
def scale_empty_experts(scale_t_ptr, ends_ptr, experts, cols16):
    """The scales of experts without tokens, to whom no tile belongs: those of zeros."""
    cols = cols16 * 16
    for expert in range(tl.program_id(0), experts, tl.num_programs(0)):
        if tl.load(ends_ptr + expert) == tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0):
            for col in range(0, cols, 1024):
                c_C = col + tl.arange(0, 1024)
                tl.store(scale_t_ptr + expert * cols + c_C, tl.zeros([1024], tl.float32) + TINY, mask=c_C < cols)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=_SIZES)
def _amax_pairs(
    x_ptr,
    amax_ptr,
    ends_ptr,
    padded_ends_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    group16,
    cols16,
    TOKENS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    expert, down, across = place_of_tile(
        tl.program_id(0), tile_expert_ptr, tile_row_ptr, ends_ptr, group16, cols16, TOKENS, BR, BC
    )
    if expert < 0:
        return
    start, rows, _, _ = span_of_expert(expert, ends_ptr, padded_ends_ptr, group16, cols16, TOKENS)
    first_ptr = x_ptr + start.to(tl.int64) * (cols16 * 16)
    a_QW, b_QW, c_QW, d_QW = load_tile(first_ptr, down, across, rows, cols16, BR, BC)
    tl.atomic_max(amax_ptr + expert, amax_of_tile(a_QW, b_QW, c_QW, d_QW))


@triton.jit(do_not_specialize=_SIZES)
def _cast_pairs(
    x_ptr,
    state_ptr,  # of the guesses; without guesses, the experts' maxima
    out_ptr,
    scale_ptr,
    out_t_ptr,
    scale_t_ptr,
    ends_ptr,
    padded_ends_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    experts,
    group16,  # rows of a matrix / 16
    stride16,  # codes from one column to the next in the transposed layout / 16
    cols16,  # columns / 16
    eps,
    TOKENS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    FP8: tl.constexpr,
    TO_ROWS: tl.constexpr,
    TO_COLS: tl.constexpr,
    V: tl.constexpr,
    GUESSED: tl.constexpr,
):
    if TOKENS and TO_COLS:
        scale_empty_experts(scale_t_ptr, ends_ptr, experts, cols16)
    tile = tl.program_id(0)
    if not GUESSED:
        tile = tl.num_programs(0) - 1 - tile  # from the end: what the maximum read last is still in L2
    expert, down, across = place_of_tile(tile, tile_expert_ptr, tile_row_ptr, ends_ptr, group16, cols16, TOKENS, BR, BC)
    if expert < 0:
        return
    if GUESSED:
        scale = tl.load(state_ptr + GUESS * experts + expert).to(tl.float32, bitcast=True)
    else:
        scale = power_of_two_of_bits(tl.load(state_ptr + expert), eps, FP8)
    start, rows, first, rows16 = span_of_expert(expert, ends_ptr, padded_ends_ptr, group16, cols16, TOKENS)
    first_ptr = x_ptr + start.to(tl.int64) * (cols16 * 16)
    a_QW, b_QW, c_QW, d_QW = load_tile(first_ptr, down, across, rows, cols16, BR, BC)
    _store_expert_tile(
        out_ptr, scale_ptr, out_t_ptr, scale_t_ptr, expert, down, across, start, rows, first, rows16, stride16, cols16,
        a_QW, b_QW, c_QW, d_QW, scale, BR, BC, FP8, TO_ROWS, TO_COLS, V, TOKENS,
    )  # fmt: skip
    if GUESSED:
        tl.atomic_max(state_ptr + LARGEST * experts + expert, amax_of_tile(a_QW, b_QW, c_QW, d_QW))


@triton.jit
def _settle(state_ptr, is_cast_E, e_E, experts, eps, FP8: tl.constexpr):
    """(bits of the right scales, which guesses were wrong); leaves the state for the next cast."""
    here_E = e_E < experts
    guess_E = tl.load(state_ptr + GUESS * experts + e_E, mask=here_E, other=0)
    largest_E = tl.load(state_ptr + LARGEST * experts + e_E, mask=here_E, other=0)
    right_E = power_of_two_of_bits(largest_E, eps, FP8).to(tl.int32, bitcast=True)
    wrong_E = is_cast_E & (right_E != guess_E)
    # Every thread has read before its program says so, and the last to say so clears the state for the next cast.
    tl.debug_barrier()
    if tl.atomic_add(state_ptr + SEEN * experts, 1) == tl.num_programs(0) - 1:
        casts_ptr, wrong_ptr = state_ptr + CASTS * experts + e_E, state_ptr + WRONG * experts + e_E
        tl.store(state_ptr + GUESS * experts + e_E, right_E, mask=is_cast_E)
        tl.store(state_ptr + LARGEST * experts + e_E, tl.zeros_like(right_E), mask=is_cast_E)
        tl.store(casts_ptr, tl.load(casts_ptr, mask=is_cast_E, other=0) + 1, mask=is_cast_E)
        tl.store(wrong_ptr, tl.load(wrong_ptr, mask=wrong_E, other=0) + 1, mask=wrong_E)
        tl.store(state_ptr + SEEN * experts, 0)
    return right_E, wrong_E


@triton.jit(do_not_specialize=_SIZES)
def _check_pairs(
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
    FP8: tl.constexpr,
    TO_ROWS: tl.constexpr,
    TO_COLS: tl.constexpr,
    V: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    e_E = tl.arange(0, EXPERTS)
    if TOKENS:
        padded_end_E = tl.load(padded_ends_ptr + e_E, mask=e_E < experts, other=0)
        before_E = tl.load(padded_ends_ptr + e_E - 1, mask=(e_E > 0) & (e_E < experts), other=0)
        height_E = padded_end_E - before_E
    else:
        height_E = tl.where(e_E < experts, group16 * 16, 0)
    right_E, wrong_E = _settle(state_ptr, height_E > 0, e_E, experts, eps, FP8)

    # The tiles of experts whose guess was wrong, one after the other, are dealt out to all programs.
    wide = (cols16 * 16 + BC - 1) // BC
    tiles_E = tl.where(wrong_E, (height_E + BR - 1) // BR * wide, 0)
    if tl.max(tiles_E, 0) > 0:
        end_E = tl.cumsum(tiles_E, 0)
        for tile in range(tl.program_id(0), tl.max(end_E, 0), tl.num_programs(0)):
            done_E = end_E <= tile
            expert = tl.sum(done_E.to(tl.int32), 0)
            inside = tile - tl.max(tl.where(done_E, end_E, 0), 0)
            scale = tl.max(tl.where(e_E == expert, right_E, 0), 0).to(tl.float32, bitcast=True)
            down, across = inside // wide, inside % wide
            start, rows, first, rows16 = span_of_expert(expert, ends_ptr, padded_ends_ptr, group16, cols16, TOKENS)
            first_ptr = x_ptr + start.to(tl.int64) * (cols16 * 16)
            a_QW, b_QW, c_QW, d_QW = load_tile(first_ptr, down, across, rows, cols16, BR, BC)
            _store_expert_tile(
                out_ptr, scale_ptr, out_t_ptr, scale_t_ptr, expert, down, across, start, rows, first, rows16, stride16,
                cols16, a_QW, b_QW, c_QW, d_QW, scale, BR, BC, FP8, TO_ROWS, TO_COLS, V, TOKENS,
            )  # fmt: skip
