"""Triton casts for experts: all experts' tokens, or all experts' matrices, in one launch and every layout needed.

A layout on the device says which expert each tile of TILE_ROWS rows belongs to, so nothing waits for the host, for any
routing. A program reads a tile once and writes it as it lies and transposed; a tile does not cross experts. The
transposed layout contracts over tokens: there each expert's stretch starts at a multiple of `pad` and is filled up with
zeros. There are two kernels, which differ in how they hold a tile:

    words     bfloat16 that begins at a multiple of 16 bytes, at the speed of memory: the tile of `fast_tile`, with its
              pointers moved to the expert's first row
    numbers   everything else, one number at a time

    tensorwise   a scale for each expert. Without guesses: maxima of experts, by atomics; then the cast: 6 bytes a
                 number. With guesses (words alone): the cast uses the expert's last scale and finds its maximum on the
                 way; then a check casts the tiles of experts again whose guess was wrong: 4 bytes a number, and 4 more
                 for these experts only
    rowwise      scales of rows and of an expert's columns extend over several tiles, so there are two reads: maxima of
                 both by atomics, then the cast, in which each program computes the few scales it needs from the maxima
    blockwise    one launch and one read: the tile is the block. An expert's tokens have a scale for each row and each
                 column of a tile, its matrix one for the whole tile, as the dense casts have

A maximum of magnitudes does not depend on the order of the atomics. Codes and scales equal the definition in
`experts_products` bit for bit, but for casts with room. A tensorwise scale is written once for each row and column, so
that products see two kinds of scales only ("vector", "block").

Guesses work as in `guessed_cast`, but take no drift from other layers; a state has a column for each expert. Without
room results never depend on a guess. A state is used by one cast at a time. An expert without tokens is not cast: its
guess stays, and nothing is counted.

Legend: T rows of tokens (or of all experts' matrices), C columns, E experts, R rows of a tile, P padded rows; x_4QW as
in `fast_tile`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitplan.base.errors import FormatError
from bitplan.base.loops.launch import PreparedLaunch, launch_in_turn
from bitplan.formats.scale_rules import SMALLEST_SCALE
from bitplan.formats.triton_numbers import TINY, float_name, magnitude_bits
from bitplan.fp8.casts import FP8_DTYPES, scaling_of
from bitplan.fp8.kernels.experts_layout import TILE_ROWS, GroupLayout, GroupSizes, scale_kind
from bitplan.fp8.kernels.fast_tile import (
    amax_of_tile,
    fits_pairs,
    is_aligned,
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
from bitplan.fp8.kernels.guessed_cast import CASTS, GUESS, LARGEST, ROOM, SEEN, SMALL, STATE_SIZE, WRONG, scale_near
from bitplan.fp8.kernels.triton_cast import PAIR_LAUNCHES, CastLaunch, read_numbers
from bitplan.fp8.kernels.triton_fp8_rounding import (
    fp8_code,
    inverse_of,
    power_of_two_of_bits,
    quick_inverse,
    quick_scale,
    scale_of_bits,
)
from bitplan.fp8.recipes import BLOCK

# ---- words -----------------------------------------------------------------------------------------------------------


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
    tiling = {"TOKENS": not sizes.matrix_rows, "BR": launch.rows, "BC": launch.cols}
    to = {"TO_ROWS": wanted[0], "TO_COLS": wanted[1], "V": launch.vector}
    options: dict[str, Any] = {"num_warps": launch.warps, "enable_fp_fusion": False}
    sums = (*numbers, sizes.tokens, eps, least_scale(eps, fp8))
    constants = tiling | to | {"FP8": fp8, "SCALING": scaling, "GUESSED": guessed}
    cast = PreparedLaunch(_cast_words, (tiles,), sums, constants | {"MAXIMA": False}, **options)
    if guessed:
        checkers = (min(tiles, CHECKING_WARPS // launch.warps),)
        room = {"FP8": fp8, "EXPERTS": max(2, triton.next_power_of_2(sizes.experts))}
        return cast, PreparedLaunch(_check_tiles, checkers, (*numbers, eps), tiling | to | room, **options)
    if scaling not in ("tensor", "row"):
        return (cast,)
    return PreparedLaunch(_cast_words, (tiles,), sums, constants | {"MAXIMA": True}, **options), cast


# ---- place of a tile -------------------------------------------------------------------------------------------------


@triton.jit
def _tile_of_words(
    tile, tile_expert_ptr, tile_row_ptr, ends_ptr, group16, cols16, TOKENS: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Return (expert, row, column) of a tile; expert -1 where the tables have no such tile."""
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
    """Return an expert's (first row, rows, first code in the transposed layout, rows / 16 that it has there)."""
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
    """Find a tile's largest magnitudes, of the expert, or of its rows (`amax_ptr`) and columns (`amax_t_ptr`)."""
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
def _cast_words(
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
    expert, down, across = _tile_of_words(
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
    """Return (bits of scales to cast by, which guesses were wrong), and leave the state for the next cast."""
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


# ---- layouts, casts, and the kernel of numbers -----------------------------------------------------------------------


WARPS = 8
Pair = tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]


def lay_out_groups(counts: Tensor, rows: int, pad: int, tiles: int, misrouted: Tensor | None) -> tuple[Tensor, ...]:
    """Ends, padded ends and experts by size [E each]; expert, first row and end of each tile; [1] tiles used.

    Counts that do not add up to `rows` are cut so that no kernel leaves its tensors; `misrouted` keeps the difference.
    """
    experts = counts.shape[0]
    # Every table begins at a multiple of 16 bytes: kernels are compiled once, whatever the sizes.
    sizes = [size for length in (experts,) * 3 + (tiles,) * 3 for size in (length, -length % 4)]
    out = torch.empty(sum(sizes) + 1, dtype=torch.int32, device=counts.device)
    if misrouted is None:
        misrouted = torch.zeros(1, dtype=torch.int32, device=counts.device)
    _lay_out_launch(counts.dtype, rows, experts, tiles, pad)(counts, out, misrouted)
    tables: tuple[Tensor, ...] = out.split([*sizes, 1])[::2]
    return tables


@functools.lru_cache(maxsize=256)
def _lay_out_launch(counts: torch.dtype, rows: int, experts: int, tiles: int, pad: int) -> PreparedLaunch:
    del counts  # a launch always gets tensors of the same types
    room = max(2, triton.next_power_of_2(experts))
    constants = {"EXPERTS": room, "PAD": pad, "TILE": TILE_ROWS, "CHUNK": max(16, 8192 // room)}
    return PreparedLaunch(_lay_out, (1,), (rows, experts, tiles), constants, num_warps=8)


def cast_token_tiles(
    x_TC: Tensor,
    recipe: str,
    layout: GroupLayout,
    fp8: str,
    eps: float,
    *,
    rows: bool,
    cols: bool,
    guess: Tensor | None = None,
) -> Pair:
    """Cast tokens; return ((codes [T, C], scales), (codes [C, P], scales)), each where asked for. `guess`: see
    `fast_tile`.
    """
    (count, width), experts = x_TC.shape, layout.experts
    blocks = scale_kind(recipe) == "block"
    row_scales = (width // BLOCK, count) if blocks else (count,)
    col_scales = (layout.padded_rows // BLOCK, width) if blocks else (experts, width)
    layouts = (
        _room((count, width), row_scales, fp8, x_TC, rows),
        _room((width, layout.padded_rows), col_scales, fp8, x_TC, cols),
    )
    x_TC = x_TC.contiguous()
    paired = x_TC.numel() > 0 and _fits_pairs(x_TC, layout.pad)
    if layouts[1] is not None and not blocks and not paired:
        layouts[1][1].fill_(SMALLEST_SCALE)  # the scale of an expert without tokens
    sizes = GroupSizes(experts, width, layout.padded_rows, tokens=count if blocks else 0, tiles=layout.tiles)
    tables = (layout.ends, layout.padded_ends, layout.tile_expert, layout.tile_row)
    _cast(x_TC, scaling_of(recipe), sizes, tables, fp8, eps, layouts, guess, paired=paired)
    return layouts


def cast_expert_tiles(
    w_ENK: Tensor, recipe: str, eps: float, *, rows: bool, cols: bool, guess: Tensor | None = None
) -> Pair:
    """Cast matrices of experts; return ((codes [E, N, K], scales), (codes [E, K, N], scales)), each where asked for;
    blocks share one scale.
    """
    experts, outputs, inputs = w_ENK.shape
    flat = w_ENK.reshape(experts * outputs, inputs).contiguous()
    blocks = scale_kind(recipe) == "block"
    row_scales = (experts, outputs // BLOCK, inputs // BLOCK) if blocks else (experts, outputs)
    col_scales = (experts, inputs // BLOCK, outputs // BLOCK) if blocks else (experts, inputs)
    layouts = (
        _room(tuple(w_ENK.shape), row_scales, "e4m3", flat, rows),
        _room((experts, inputs, outputs), col_scales, "e4m3", flat, cols),
    )
    sizes, paired = GroupSizes(experts, inputs, outputs, matrix_rows=outputs), _fits_pairs(flat, outputs)
    scaling = scaling_of(recipe, is_weight=True)
    _cast(flat, scaling, sizes, (None,) * 4, "e4m3", eps, layouts, guess, paired=paired)
    return layouts


def _fits_pairs(x_RC: Tensor, padded: int) -> bool:
    """Whether these rows can be cast as words. `padded`: an expert's transposed rows are a multiple of this."""
    return fits_pairs((x_RC.shape[0], x_RC.shape[1]), x_RC.dtype, padded, aligned=is_aligned(x_RC))


def _room(shape, scale_shape, fp8: str, like: Tensor, wanted: bool) -> tuple[Tensor, Tensor] | None:
    if not wanted:
        return None
    codes = torch.empty(shape, dtype=FP8_DTYPES[fp8], device=like.device)
    return codes, torch.empty(scale_shape, dtype=torch.float32, device=like.device)


def _cast(
    x: Tensor,
    scaling: str,
    sizes: GroupSizes,
    tables: tuple[Tensor | None, ...],
    fp8: str,
    eps: float,
    layouts: Pair,
    guess: Tensor | None,
    *,
    paired: bool,
) -> None:
    wanted = (layouts[0] is not None, layouts[1] is not None)
    if not any(wanted) or not x.numel():
        return
    guess = guess if paired and scaling == "tensor" else None
    if guess is not None and guess.shape != (STATE_SIZE, sizes.experts):
        expected = (STATE_SIZE, sizes.experts)
        raise FormatError(f"guesses of {sizes.experts} experts have shape {expected}, got {tuple(guess.shape)}")
    if paired:
        launch = (MATRICES_LAUNCHES if sizes.matrix_rows else TOKENS_LAUNCHES)[scaling]
        launches = plan_pairs(sizes, scaling, fp8, float(eps), wanted, guess is not None, launch)
    else:
        launches = _plan_numbers(x.dtype, sizes, scaling, fp8, eps, wanted)
    amax, amax_t = guess, None
    if guess is None and scaling in ("tensor", "row"):
        of_rows = sizes.experts if scaling == "tensor" else -(-x.shape[0] // 4) * 4 * wanted[0]
        of_cols = sizes.experts * sizes.cols * (scaling == "row" and wanted[1])
        maxima = torch.zeros(of_rows + of_cols, dtype=torch.int32, device=x.device)
        # Both begin at a multiple of 16 bytes.
        amax, amax_t = maxima if of_rows else None, maxima[of_rows:] if of_cols else None
    codes_and_scales = (*(layouts[0] or (None, None)), *(layouts[1] or (None, None)))
    launch_in_turn(launches, (x, amax, *codes_and_scales, *tables, amax_t))


@functools.lru_cache(maxsize=1024)
def _plan_numbers(
    source: torch.dtype, sizes: GroupSizes, scaling: str, fp8: str, eps: float, wanted: tuple[bool, bool]
) -> tuple[PreparedLaunch, ...]:
    """Maxima if the scales need them, and the cast, one number at a time."""
    grid = (sizes.tiles_down(TILE_ROWS), triton.cdiv(sizes.cols, BLOCK))
    fixed = {
        "C": sizes.cols,
        "GROUP": sizes.matrix_rows,
        "SOURCE": float_name(source),
        "SCALING": scaling,
        "BR": TILE_ROWS,
        "BC": BLOCK,
        "TO_ROWS": wanted[0],
        "TO_COLS": wanted[1],
        "FP8": fp8,
    }
    numbers = (sizes.tokens, sizes.stride, eps)
    return tuple(
        PreparedLaunch(
            _cast_numbers, grid, numbers, fixed | {"MAXIMA": maxima}, num_warps=WARPS, enable_fp_fusion=False
        )
        for maxima in ((True, False) if scaling in ("tensor", "row") else (False,))
    )


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows", "tiles"])
def _lay_out(
    counts_ptr,
    out_ptr,
    misrouted_ptr,
    rows,
    experts,
    tiles,
    EXPERTS: tl.constexpr,
    PAD: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    e_E = tl.arange(0, EXPERTS)
    given_E = tl.load(counts_ptr + e_E, mask=e_E < experts, other=0).to(tl.int64)
    sum_E = tl.cumsum(tl.maximum(given_E, 0), 0)
    end_E = tl.minimum(sum_E, rows)
    count_E = end_E - tl.minimum(sum_E - tl.maximum(given_E, 0), rows)
    wrong = tl.maximum(tl.abs(tl.sum(given_E, 0) - rows), tl.max(-given_E, 0))
    tl.atomic_max(misrouted_ptr, tl.minimum(wrong, 2147483647).to(tl.int32))
    padded_E = tl.cumsum((count_E + PAD - 1) // PAD * PAD, 0)
    tile_end_E = tl.cumsum((count_E + TILE - 1) // TILE, 0)
    across, down = (experts + 3) // 4 * 4, (tiles + 3) // 4 * 4
    tl.store(out_ptr + e_E, end_E.to(tl.int32), mask=e_E < experts)
    tl.store(out_ptr + across + e_E, padded_E.to(tl.int32), mask=e_E < experts)
    for first in range(0, EXPERTS, 16):  # rank 16 experts at a time: all at once would not fit in registers
        f_F = first + tl.arange(0, 16)
        size_F = tl.load(counts_ptr + f_F, mask=f_F < experts, other=-1).to(tl.int64)
        earlier_FE = (given_E[None, :] == size_F[:, None]) & (e_E[None, :] < f_F[:, None])
        before_FE = (e_E < experts)[None, :] & ((given_E[None, :] > size_F[:, None]) | earlier_FE)
        tl.store(out_ptr + 2 * across + tl.sum(before_FE.to(tl.int32), 1), f_F, mask=f_F < experts)
    total = tl.max(tile_end_E, 0)
    tile_ptr = out_ptr + 3 * across
    tl.store(tile_ptr + 3 * down, total.to(tl.int32))
    for first in range(0, tiles, CHUNK):
        tile_C = first + tl.arange(0, CHUNK)
        ok_C = tile_C < tiles
        before_CE = tile_end_E[None, :] <= tile_C[:, None]
        expert_C = tl.where(tile_C < total, tl.sum(before_CE.to(tl.int32), 1), -1)
        start_C = tl.max(tl.where(before_CE, end_E[None, :], 0), 1)
        end_C = tl.min(tl.where(before_CE, rows, end_E[None, :]), 1)  # the first end that is not before the tile
        inside_C = tile_C - tl.max(tl.where(before_CE, tile_end_E[None, :], 0), 1)
        tl.store(tile_ptr + tile_C, expert_C, mask=ok_C)
        tl.store(tile_ptr + down + tile_C, (start_C + inside_C * TILE).to(tl.int32), mask=ok_C)
        tl.store(tile_ptr + 2 * down + tile_C, end_C.to(tl.int32), mask=ok_C)


@triton.jit
def _tile_of_numbers(tile, tile_expert_ptr, tile_row_ptr, ends_ptr, GROUP: tl.constexpr, BR: tl.constexpr):
    """Return (expert, the tile's first row, the expert's first and end row), by tables or for GROUP rows each."""
    if GROUP > 0:
        TILES: tl.constexpr = (GROUP + BR - 1) // BR
        expert = tile // TILES
        start = expert * GROUP
        row = start + tile % TILES * BR
        end = start + GROUP
    else:
        expert = tl.load(tile_expert_ptr + tile)
        row = tl.load(tile_row_ptr + tile)
        start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
        end = tl.load(ends_ptr + expert, mask=expert >= 0, other=0)
    return expert, row, start, end


@triton.jit(do_not_specialize=["tokens"])
def _cast_numbers(
    x_ptr,
    amax_ptr,
    out_ptr,
    scale_ptr,
    out_t_ptr,
    scale_t_ptr,
    ends_ptr,
    padded_ends_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    amax_t_ptr,
    tokens,
    cols_stride,
    eps,
    C: tl.constexpr,
    GROUP: tl.constexpr,
    SOURCE: tl.constexpr,
    SCALING: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    TO_ROWS: tl.constexpr,
    TO_COLS: tl.constexpr,
    FP8: tl.constexpr,
    MAXIMA: tl.constexpr,  # only find those of experts, or of rows and of each expert's columns
):
    expert, row, start, end = _tile_of_numbers(tl.program_id(0), tile_expert_ptr, tile_row_ptr, ends_ptr, GROUP, BR)
    if expert < 0:
        return
    across = tl.program_id(1)
    r_R, c_C = row + tl.arange(0, BR), across * BC + tl.arange(0, BC)
    ok_R, ok_C = r_R < end, c_C < C
    at_RC = r_R[:, None].to(tl.int64) * C + c_C[None, :]
    ok_RC = ok_R[:, None] & ok_C[None, :]
    x_RC = read_numbers(x_ptr, r_R, c_C, end, C, SOURCE)
    if MAXIMA:
        size_RC = magnitude_bits(x_RC)
        if SCALING == "tensor":
            tl.atomic_max(amax_ptr + expert, tl.max(tl.max(size_RC, axis=1), axis=0))
        else:
            if TO_ROWS:
                tl.atomic_max(amax_ptr + r_R, tl.max(size_RC, axis=1), mask=ok_R)
            if TO_COLS:
                tl.atomic_max(amax_t_ptr + expert * C + c_C, tl.max(size_RC, axis=0), mask=ok_C)
        return

    # In the transposed layout missing rows are zeros, which fill up the expert's stretch.
    if GROUP > 0:
        first = expert.to(tl.int64) * (GROUP * C) + (row - start)
        room_R = ok_R
    else:
        padded_start = tl.load(padded_ends_ptr + expert - 1, mask=expert > 0, other=0)
        # Every expert starts and ends at a multiple of 16 bytes; without this hint Triton would store single bytes.
        first = tl.multiple_of((padded_start + (row - start)).to(tl.int64), 16)
        room_R = first + tl.arange(0, BR) < tl.multiple_of(tl.load(padded_ends_ptr + expert), 16)
    at_CR = first + c_C[:, None].to(tl.int64) * cols_stride + tl.arange(0, BR)[None, :]
    room_CR = ok_C[:, None] & room_R[None, :]

    if SCALING == "tensor" or SCALING == "128x128":
        if SCALING == "tensor":
            scale = power_of_two_of_bits(tl.load(amax_ptr + expert), eps, FP8)
        else:
            scale = scale_of_bits(tl.max(tl.max(magnitude_bits(x_RC), axis=1), axis=0), eps, FP8)
        byte_RC = fp8_code(x_RC * inverse_of(scale), FP8)
        if TO_ROWS:
            tl.store(out_ptr + at_RC, byte_RC, mask=ok_RC)
        if TO_COLS:
            tl.store(out_t_ptr + at_CR, tl.trans(byte_RC), mask=room_CR)
        if SCALING == "tensor":
            if TO_ROWS and across == 0:
                tl.store(scale_ptr + r_R, tl.zeros([BR], tl.float32) + scale, mask=ok_R)
            if TO_COLS and row == start:
                tl.store(scale_t_ptr + expert * C + c_C, tl.zeros([BC], tl.float32) + scale, mask=ok_C)
        else:
            down = (row - start) // BR
            if TO_ROWS:
                tl.store(scale_ptr + (expert * (GROUP // BR) + down) * (C // BC) + across, scale)
            if TO_COLS:
                tl.store(scale_t_ptr + (expert * (C // BC) + across) * (GROUP // BR) + down, scale)
    else:
        if TO_ROWS:
            if SCALING == "row":
                scale_R = scale_of_bits(tl.load(amax_ptr + r_R, mask=ok_R, other=0), eps, FP8)
                if across == 0:
                    tl.store(scale_ptr + r_R, scale_R, mask=ok_R)
            else:
                scale_R = scale_of_bits(tl.max(magnitude_bits(x_RC), axis=1), eps, FP8)
                tl.store(scale_ptr + across * tokens.to(tl.int64) + r_R, scale_R, mask=ok_R)
            tl.store(out_ptr + at_RC, fp8_code(x_RC * inverse_of(scale_R)[:, None], FP8), mask=ok_RC)
        if TO_COLS:
            if SCALING == "row":
                scale_C = scale_of_bits(tl.load(amax_t_ptr + expert * C + c_C, mask=ok_C, other=0), eps, FP8)
                if row == start:
                    tl.store(scale_t_ptr + expert * C + c_C, scale_C, mask=ok_C)
            else:
                scale_C = scale_of_bits(tl.max(magnitude_bits(x_RC), axis=0), eps, FP8)
                tl.store(scale_t_ptr + (first // BR) * C + c_C, scale_C, mask=ok_C)
            tl.store(out_t_ptr + at_CR, tl.trans(fp8_code(x_RC * inverse_of(scale_C)[None, :], FP8)), mask=room_CR)
