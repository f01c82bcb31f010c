"""Triton casts for experts: all experts' tokens, or all experts' matrices, in one launch and every layout needed.

A layout on the device says which expert each tile of TILE_ROWS rows belongs to, so nothing waits for the host, for any
routing. A program reads a tile once and writes it as it lies and transposed. The transposed layout contracts over
tokens: there each expert's stretch starts at a multiple of `pad` and is filled up with zeros.

bfloat16 that begins at a multiple of 16 bytes is cast as words of two numbers (`fast_tile`); everything else is cast
here, one number at a time:

    tensorwise  maxima of experts, by atomics; then the cast: two reads
    rowwise     maxima of rows and of each expert's columns, by atomics; then the cast: two reads
    blockwise   the tile is the block: one read

A maximum of magnitudes does not depend on the order of the atomics. Codes and scales equal the definition in
`products` bit for bit. A tensorwise scale is written once for each row and column, so that products
see two kinds of scales only ("vector", "block").

Legend: T rows of tokens (or of all experts' matrices), C columns, E experts, R rows of a tile, P padded rows.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitplan.errors import FormatError
from bitplan.formats.fp8 import FP8_DTYPES, scaling_of
from bitplan.formats.fp8_recipes import BLOCK
from bitplan.formats.scales.rules import SMALLEST_SCALE
from bitplan.kernels.base.launch import PreparedLaunch, launch_in_turn
from bitplan.kernels.base.numbers import float_name, magnitude_bits
from bitplan.kernels.fp8.experts.fast_tile import MATRICES_LAUNCHES, TOKENS_LAUNCHES, plan_pairs
from bitplan.kernels.fp8.experts.layout import TILE_ROWS, GroupLayout, GroupSizes, scale_kind
from bitplan.kernels.fp8.fast_tile import fits_pairs, is_aligned
from bitplan.kernels.fp8.general_tile import read_numbers
from bitplan.kernels.fp8.guessed_cast import STATE_SIZE
from bitplan.kernels.fp8.triton_fp8_rounding import fp8_code, inverse_of, power_of_two_of_bits, scale_of_bits

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
    """((codes [T, C], scales), (codes [C, P], scales)), each where asked for. `guess`: see `fast_tile`."""
    (count, width), experts = x_TC.shape, layout.experts
    blocks = scale_kind(recipe) == "block"
    row_scales = (width // BLOCK, count) if blocks else (count,)
    col_scales = (layout.padded_rows // BLOCK, width) if blocks else (experts, width)
    made = (
        _room((count, width), row_scales, fp8, x_TC, rows),
        _room((width, layout.padded_rows), col_scales, fp8, x_TC, cols),
    )
    x_TC = x_TC.contiguous()
    paired = x_TC.numel() > 0 and _fits_pairs(x_TC, layout.pad)
    if made[1] is not None and not blocks and not paired:
        made[1][1].fill_(SMALLEST_SCALE)  # the scale of an expert without tokens
    sizes = GroupSizes(experts, width, layout.padded_rows, tokens=count if blocks else 0, tiles=layout.tiles)
    tables = (layout.ends, layout.padded_ends, layout.tile_expert, layout.tile_row)
    _cast(x_TC, scaling_of(recipe), sizes, tables, fp8, eps, made, guess, paired=paired)
    return made


def cast_expert_tiles(
    w_ENK: Tensor, recipe: str, eps: float, *, rows: bool, cols: bool, guess: Tensor | None = None
) -> Pair:
    """((codes [E, N, K], scales), (codes [E, K, N], scales)), each where asked for; blocks share one scale."""
    experts, outputs, inputs = w_ENK.shape
    flat = w_ENK.reshape(experts * outputs, inputs).contiguous()
    blocks = scale_kind(recipe) == "block"
    row_scales = (experts, outputs // BLOCK, inputs // BLOCK) if blocks else (experts, outputs)
    col_scales = (experts, inputs // BLOCK, outputs // BLOCK) if blocks else (experts, inputs)
    made = (
        _room(tuple(w_ENK.shape), row_scales, "e4m3", flat, rows),
        _room((experts, inputs, outputs), col_scales, "e4m3", flat, cols),
    )
    sizes, paired = GroupSizes(experts, inputs, outputs, matrix_rows=outputs), _fits_pairs(flat, outputs)
    scaling = scaling_of(recipe, is_weight=True)
    _cast(flat, scaling, sizes, (None,) * 4, "e4m3", eps, made, guess, paired=paired)
    return made


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
    made: Pair,
    guess: Tensor | None,
    *,
    paired: bool,
) -> None:
    wanted = (made[0] is not None, made[1] is not None)
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
    codes_and_scales = (*(made[0] or (None, None)), *(made[1] or (None, None)))
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
        PreparedLaunch(_cast_tiles, grid, numbers, fixed | {"MAXIMA": maxima}, num_warps=WARPS, enable_fp_fusion=False)
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
def _place_of_tile(tile, tile_expert_ptr, tile_row_ptr, ends_ptr, GROUP: tl.constexpr, BR: tl.constexpr):
    """(expert, first row of the tile, first and end row of the expert): by the tables, or groups of GROUP rows each."""
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
def _cast_tiles(
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
    expert, row, start, end = _place_of_tile(tl.program_id(0), tile_expert_ptr, tile_row_ptr, ends_ptr, GROUP, BR)
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
