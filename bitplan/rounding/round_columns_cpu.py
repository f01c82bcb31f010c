"""The loops of `round_columns`, compiled for CPUs: the same numbers to the bit, in the same order of arithmetic.

Beside them are loops over whole blocks, of one scale each (`ScaledRounder`) or of GGUF's groups (`BlockRounder`), which
are rounded a few rows at a time, a thousand times a weight: there calls of torch take longer than what they compute.
Candidates of a scale lie side by side, so that one vector instruction rounds a number with many of them. Sweeps over
whole blocks, which `error_compensation` and `weights` define, add up in another order: a number that lies on a tie may
differ. The loops of `round_vectors` are here, too: they take one row after the other, and their sweeps add up in
another order likewise. Importing this module imports numba.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitplan.base.loops.jit import compiled, inlined, on_threads, thread_count
from bitplan.base.loops.vectors import same_bits
from bitplan.formats.format import Format
from bitplan.formats.gguf.cpu_block_search import RowSearch
from bitplan.formats.gguf.cpu_vector_search import book_of, empty_room, nearest_eight, numbers_of_eight
from bitplan.formats.gguf.grids import MOST, NUMBERS, VectorLayout
from bitplan.formats.gguf.layouts import Layout
from bitplan.formats.scale_rules import SMALLEST_SCALE, BasedScales
from bitplan.rounding.layout import Grid, VectorScales, inverse_of
from bitplan.rounding.scale_search import GroupScales, ScaleLadder

# ---- how scales are stored -------------------------------------------------------------------------------------------


F32, U32 = np.float32, np.uint32
ZERO, HALF, ONE = F32(0), F32(0.5), F32(1)
EXPONENT, OPPOSITE = U32(0x7F800000), U32(0x7F000000)
NEAREST = F32(1.5 * 2.0**23)  # x + NEAREST - NEAREST is x to the nearest integer, ties to even, for |x| < 2^22
SMALLEST = F32(SMALLEST_SCALE)
# Added to the bits of a float, this moves its exponent to the nearer power of two in ratio: from sqrt(2) on upwards.
TO_NEAREST_POWER, FRACTION_BITS, LARGEST_POWER = U32(0x004AFB0C), U32(23), U32(254)
SMALLEST_POWER = F32(2.0**-127)
# Of a scale's storage: distance of neighbours over the power of two below, or zero where all float32 numbers are
# stored; the least such distance; the largest number, to which others are clamped; from where on there is none.
STORAGES = {
    torch.float32: (0.0, 0.0, math.inf, math.inf),
    torch.float16: (2.0**-10, 2.0**-24, math.inf, 65520.0),
    torch.bfloat16: (2.0**-7, 2.0**-133, math.inf, 2.0**128 - 2.0**119),
    torch.float8_e4m3fn: (2.0**-3, 2.0**-9, 448.0, math.inf),
}
HALF_SCALES = np.array((*STORAGES[torch.float16], 1.0), F32)


def storage_of(fmt: Format, base: Tensor | None) -> Any:
    """Return five float32 numbers that say how scales are stored, and their base factor; None where the loops do not
    know it.

    Of powers of two it is not read.
    """
    scales = fmt.scales
    if scales is None or (isinstance(scales, BasedScales) and base is None):
        return None
    if fmt.power_of_two_scales:
        return HALF_SCALES
    numbers = STORAGES.get(scales.dtype)
    return None if numbers is None else np.array((*numbers, 1.0 if base is None else float(base)), F32)


# ---- compiled loops --------------------------------------------------------------------------------------------------


@compiled
def candidates(piece, plain, multiples, high, storage, is_power, tried):
    """[R, 1 + C] scales that are tried for a block of each row; what overflows its storage becomes zero."""
    exponent = math.frexp(high)[1]
    for row in range(piece.shape[0]):
        largest = ZERO
        for j in range(piece.shape[1]):
            largest = max(largest, abs(piece[row, j]))
        start = F32(largest / high)
        if is_power:
            start = F32(math.ldexp(1.0, math.frexp(largest)[1] - exponent)) if largest > ZERO else ZERO
        tried[row, 0] = plain[row]
        for index in range(multiples.size):
            scale = _as_stored(F32(start * multiples[index]), storage, is_power)
            tried[row, 1 + index] = scale if abs(scale) < np.inf else ZERO


@compiled
def round_rows(piece, factor, steps, offsets, parts, codes, errors, low, high, mantissa, least, is_float, table):
    width = piece.shape[1]
    left = np.empty(width, F32)
    for row in range(piece.shape[0]):
        for j in range(width):  # not left[:] = ...: numba takes seconds to compile its error
            left[j] = piece[row, j]
        for j in range(width):
            step, offset = steps[row, parts[j]], offsets[row, parts[j]]
            scaled = F32(F32(left[j] - offset) * reciprocal(step))
            code = nearest(scaled, low, high, mantissa, least, is_float, table)
            error = F32(F32(left[j] - F32(F32(code * step) + offset)) / factor[j, j])
            codes[row, j], errors[row, j] = code, error
            rest, shares = left[j + 1 :], factor[j, j + 1 :]  # views from zero: else LLVM makes no vectors of it
            for k in range(rest.size):
                rest[k] -= F32(error * shares[k])


@compiled
def try_rows(piece, factor, scales, cost, low, high, mantissa, least, is_float, table):
    width, count = piece.shape[1], scales.shape[1]
    left, inverses, errors = np.empty((width, count), F32), np.empty(count, F32), np.empty(count, F32)
    for row in range(piece.shape[0]):
        for c in range(count):
            inverses[c] = reciprocal(scales[row, c])
            cost[row, c] = ZERO
        for j in range(width):
            for c in range(count):
                left[j, c] = piece[row, j]
        for j in range(width):
            unit = factor[j, j]
            for c in range(count):
                code = nearest(F32(left[j, c] * inverses[c]), low, high, mantissa, least, is_float, table)
                error = F32(F32(left[j, c] - F32(code * scales[row, c])) / unit)
                errors[c] = error
                cost[row, c] += F32(error * error)
            for k in range(j + 1, width):
                share, rest = factor[j, k], left[k]
                for c in range(count):
                    rest[c] -= F32(errors[c] * share)


@compiled
def pick(tried, cost, scales):
    """The first of those that cost least; what is not a number never wins."""
    for row in range(tried.shape[0]):
        best, least = 0, F32(np.inf)
        for index in range(tried.shape[1]):
            if cost[row, index] < least:
                best, least = index, cost[row, index]
        scales[row, 0] = tried[row, best]


@compiled
def sweep_blocks(
    slopes,
    changes,
    hessian,
    codes,
    scales,
    numbers,
    storage,
    is_power,
    is_signed,
    low,
    high,
    mantissa,
    least,
    is_float,
    table,
):
    """Better scales and codes of whole blocks, `numbers` each, and by how much the values changed.

    slopes   [R, n]: (weight - value) @ the whole Hessian, in these columns; used up
    """
    width = slopes.shape[1]
    way = np.empty(numbers, F32)
    for row in range(slopes.shape[0]):
        for block in range(width // numbers):
            begin, end = block * numbers, (block + 1) * numbers
            slope, code, change = slopes[row, begin:end], codes[row, begin:end], changes[row, begin:end]
            for k in range(numbers):
                way[k] = ZERO
                change[k] = ZERO
            for k in range(numbers):
                share, line = code[k], hessian[begin + k, begin:end]
                if share != ZERO:
                    for index in range(numbers):
                        way[index] += share * line[index]
            rise = curve = ZERO
            for k in range(numbers):
                rise += code[k] * slope[k]
                curve += code[k] * way[k]
            now = scales[row, block]
            step = now
            if curve > ZERO:
                wanted = _as_stored(F32(now + F32(rise / curve)), storage, is_power)
                move = F32(wanted - now)
                is_usable = abs(wanted) < np.inf and (is_signed or wanted >= ZERO)
                if is_usable and F32(2) * move * rise > move * move * curve:
                    step = wanted
                    scales[row, block] = wanted
                    for k in range(numbers):
                        slope[k] -= move * way[k]
                        change[k] = move * code[k]
            if step != ZERO:
                inverse = F32(ONE / step)
                for k in range(numbers):
                    best = F32(F32(code[k] * step) + F32(slope[k] / hessian[begin + k, begin + k]))
                    better = nearest(F32(best * inverse), low, high, mantissa, least, is_float, table)
                    move = F32(F32(better - code[k]) * step)
                    if move != ZERO:
                        code[k] = better
                        change[k] += move
                        line = hessian[begin + k, begin:end]
                        for index in range(numbers):
                            slope[index] -= move * line[index]
            after = slopes[row, end:]
            for k in range(numbers):
                share, line = change[k], hessian[begin + k, end:]
                if share != ZERO:
                    for index in range(after.size):
                        after[index] -= share * line[index]


@inlined
def _as_stored(wanted, storage, is_power):
    """The scale that is loaded after this one was stored; NaN where it overflows."""
    if is_power:
        if not wanted > ZERO:
            return SMALLEST_POWER
        field = min(U32(U32(same_bits(F32(wanted), U32) + TO_NEAREST_POWER) >> FRACTION_BITS), LARGEST_POWER)
        return same_bits(U32(field << FRACTION_BITS), F32) if field > U32(0) else SMALLEST_POWER
    mantissa, least, most, limit, base = storage[0], storage[1], storage[2], storage[3], storage[4]
    number = min(F32(wanted / base), most) if base > ZERO and not abs(wanted) < SMALLEST else ZERO
    if not abs(number) < limit:
        return F32(np.nan)
    if mantissa > ZERO:
        power = same_bits(U32(same_bits(F32(number), U32) & EXPONENT), F32)
        step = max(F32(power * mantissa), least)
        number = F32(F32(F32(F32(number / step) + NEAREST) - NEAREST) * step)
    number = F32(number * base)
    return number if abs(number) >= SMALLEST else ZERO


@inlined
def as_half(number):
    """The nearest float16; what has none stays out: it is given as NaN, which no comparison takes."""
    return _as_stored(number, HALF_SCALES, False)


@inlined
def reciprocal(scale):
    return ZERO if scale == ZERO else F32(ONE / scale)


@inlined
def nearest(scaled, low, high, mantissa, least, is_float, table):
    """The nearest number of the grid. Steps of floats are powers of two: exponents give their inverse."""
    if table is not None:
        index = 0
        for below in range(table.size - 1):
            if F32(scaled) > F32(F32(table[below] + table[below + 1]) * HALF):
                index += 1
        return table[index]
    inside = min(max(F32(scaled), low), high)
    if not is_float:
        return F32(F32(inside + NEAREST) - NEAREST)
    power = same_bits(U32(same_bits(F32(inside), U32) & EXPONENT), F32)
    step = max(F32(power * mantissa), least)
    inverse = same_bits(U32(OPPOSITE - same_bits(F32(step), U32)), F32)
    return F32(F32(F32(F32(inside * inverse) + NEAREST) - NEAREST) * step)


# ---- what the rest of the wing calls ---------------------------------------------------------------------------------


FEWEST_ROWS = 16
SPAN = 128  # columns swept at once, of blocks that have one scale
PIECE = 256  # the same of blocks of groups: a K-quant's block, or eight of 32


def round_piece(
    piece: Tensor, factor: Tensor, steps: Tensor, offsets: Tensor, parts: Tensor, grid: Grid
) -> tuple[Tensor, Tensor]:
    """This is `round_columns.round_piece`, compiled."""
    codes, errors = torch.empty(piece.shape), torch.empty(piece.shape)
    arrays = (factor, steps, offsets, parts, codes, errors)
    _by_rows(round_rows, piece, (1, 2, 4, 5), arrays, grid)
    return codes, errors


def cost_of_scales(piece: Tensor, factor: Tensor, scales: Tensor, grid: Grid) -> Tensor:
    """This is `round_columns.cost_of_scales`, compiled."""
    cost = torch.empty(scales.shape)
    _by_rows(try_rows, piece, (1, 2), (factor, scales, cost), grid)
    return cost


def sweep_piece(
    gradient: Tensor, codes: Tensor, hessian: Tensor, steps: Tensor, parts: Tensor, grid: Grid
) -> tuple[Tensor, Tensor]:
    """This is `round_columns.sweep_piece`, compiled."""
    better, changes = codes.clone(memory_format=torch.contiguous_format), torch.empty(codes.shape)
    _by_rows(_sweep_rows, gradient, (0, 2, 4), (better, hessian, steps, parts, changes), grid)
    return better, changes


def weighted_cost(piece: Tensor, weights: Tensor, scales: Tensor, grid: Grid) -> Tensor:
    """This is `round_columns.weighted_cost`, compiled."""
    cost = torch.empty(scales.shape)
    _by_rows(_weigh_rows, piece, (1, 2), (weights, scales, cost), grid)
    return cost


class ScaledRounder:
    """Blocks of a row that have one scale each: rounds them, one after the other, and sweeps over all of them.

    storage   how scales are stored, as `storage_of` says it
    """

    def __init__(self, width: int, grid: Grid, storage: Any, *, is_power: bool, is_signed: bool) -> None:
        self._width, self._storage, self._is_power, self._is_signed = width, storage, is_power, is_signed
        self._grid = _numbers_of(grid)

    def round(
        self, piece: Tensor, factor: Tensor, plain: Tensor, multiples: tuple[float, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Codes and errors [R, g] of a block, and its scales [R]: the best of what `candidates_of` gives."""
        numbers, shares, first_tried = (tensor.contiguous().numpy() for tensor in (piece, factor, plain))
        rows, wide, high = len(numbers), np.array(multiples, F32), self._grid[1]
        codes, errors, scales = torch.empty(piece.shape), torch.empty(piece.shape), torch.empty(rows, 1)
        outs = codes.numpy(), errors.numpy(), scales.numpy()
        step, parts = rows_at_once(rows), np.zeros(piece.shape[1], np.int64)

        def work(first: int) -> None:
            some = slice(first, first + step)
            some_numbers, offsets = numbers[some], np.zeros((len(numbers[some]), 1), F32)
            tried, cost = (np.empty((len(some_numbers), 1 + len(wide)), F32) for _ in range(2))
            some_codes, some_errors, steps = (out[some] for out in outs)
            candidates(some_numbers, first_tried[some], wide, high, self._storage, self._is_power, tried)
            try_rows(some_numbers, shares, tried, cost, *self._grid)
            pick(tried, cost, steps)
            round_rows(some_numbers, shares, steps, offsets, parts, some_codes, some_errors, *self._grid)

        on_threads(work, range(0, rows, step))
        return codes, errors, scales.squeeze(1)

    def sweep(self, gradient: Tensor, codes: Tensor, scales: Tensor, hessian: Tensor, sweeps: int) -> None:
        """Better codes [R, K] and scales [R, blocks], where they are; `gradient` [R, K] is (weight - value) @ hessian.

        Some whole blocks at a time, of all rows; between them the gradient moves by a matrix product.
        """
        settings = self._width, self._storage, self._is_power, self._is_signed, *self._grid
        all_codes, all_scales = codes.numpy(), scales.numpy()

        def sweep_rows(rows: slice, cols: slice, own_hessian: Any, slopes: Any, changes: Any) -> None:
            blocks = slice(cols.start // self._width, cols.stop // self._width)
            code, scale = np.ascontiguousarray(all_codes[rows, cols]), np.ascontiguousarray(all_scales[rows, blocks])
            sweep_blocks(slopes, changes, own_hessian, code, scale, *settings)
            all_codes[rows, cols], all_scales[rows, blocks] = code, scale

        sweep_pieces(sweep_rows, gradient, hessian, max(1, SPAN // self._width) * self._width, sweeps)


def scaled_rounder_of(width: int, ladder: ScaleLadder) -> ScaledRounder | None:
    """None where the loops do not know how the format stores scales."""
    storage = storage_of(ladder.fmt, ladder.base)
    if storage is None:
        return None
    is_power = ladder.fmt.power_of_two_scales
    return ScaledRounder(width, ladder.grid, storage, is_power=is_power, is_signed=ladder.is_signed)


def sweep_pieces(sweep_rows: Callable[..., None], gradient: Tensor, hessian: Tensor, width: int, sweeps: int) -> None:
    """Sweep over `width` columns of all rows at a time; between them the gradient moves by a matrix product.

    sweep_rows   (rows, columns, their part of the Hessian, slopes, changes): writes by how much values changed
    """
    columns, step = gradient.shape[1], rows_at_once(len(gradient))
    pieces = [slice(first, min(first + width, columns)) for first in range(0, columns, width)]
    own_hessians = [hessian[cols, cols].contiguous().numpy() for cols in pieces]
    for done in range(sweeps):
        for cols, own_hessian in zip(pieces, own_hessians, strict=True):
            slopes = gradient[:, cols].clone(memory_format=torch.contiguous_format).numpy()
            changes = torch.empty(slopes.shape)

            def work(at: int) -> None:
                rows = slice(at, at + step)
                sweep_rows(rows, cols, own_hessian, slopes[rows], changes.numpy()[rows])  # noqa: B023

            on_threads(work, range(0, len(gradient), step))
            others = slice(cols.stop if done + 1 == sweeps else 0, columns)  # after the last sweep: what comes next
            if others.start < others.stop:
                gradient[:, others].addmm_(changes, hessian[cols, others], alpha=-1)


class BlockRounder:
    """Rounds blocks of GGUF's groups, one after the other: searches what is stored for a block, then its codes.

    weights   [K] of columns, as the search takes them
    inside    [K]: the place within its block of each column, in the order in which columns are rounded
    """

    def __init__(self, layout: Layout, grid: Grid, weights: Tensor, inside: Tensor, scales: GroupScales) -> None:
        self._layout, self._scales, self._search = layout, scales, RowSearch(layout)
        self._weights = weights.reshape(-1, layout.group_count, layout.group).numpy()
        self._inside, self._groups = inside.numpy(), (inside // layout.group).numpy()
        self._grid = _numbers_of(grid)

    def round(self, piece: Tensor, factor: Tensor, block: int, columns: slice) -> tuple[Tensor, Tensor]:
        """Codes and errors [R, n] of a block's numbers, in the order of `columns`; its scales are put in place."""
        ordered, shares = piece.contiguous().numpy(), factor.contiguous().numpy()
        codes, errors = torch.empty(piece.shape), torch.empty(piece.shape)
        outs = codes.numpy(), errors.numpy()
        inside, groups, weights = self._inside[columns], self._groups[columns], self._weights[block]
        step = rows_at_once(len(ordered))

        def work(first: int) -> None:
            rows = slice(first, first + step)
            numbers = np.empty_like(ordered[rows])
            numbers[:, inside] = ordered[rows]
            steps, offsets = self._store(
                self._search(numbers.reshape(len(numbers), -1, self._layout.group), weights), block, rows
            )
            round_rows(ordered[rows], shares, steps, offsets, groups, *(out[rows] for out in outs), *self._grid)

        on_threads(work, range(0, len(ordered), step))
        return codes, errors

    def _store(self, parts: tuple[Any, ...], block: int, rows: slice) -> tuple[Any, Any]:
        """What a code is multiplied by and what is added, [R, groups]; rounded once, as the decoder does."""
        d, dmin, scales, mins = parts
        into, groups = self._scales, self._scales.groups(block)
        if scales is None:
            into.d.numpy()[rows, block], into.dmin.numpy()[rows, block] = d[:, 0], dmin[:, 0]
            return d, dmin
        into.d.numpy()[rows, block], into.dmin.numpy()[rows, block] = d[:, 0], -dmin[:, 0]
        into.scales.numpy()[rows, groups], into.mins.numpy()[rows, groups] = scales, mins
        return d * scales, -dmin * mins


def sweep_groups(
    gradient: Tensor, codes: Tensor, hessian: Tensor, scales: GroupScales, grid: Grid, sweeps: int
) -> None:
    """Better codes [R, K] and scales, where they are; `gradient` [R, K] is (weight - value) @ hessian.

    Some whole blocks at a time, of all rows: their integers, d, dmin and codes. Between them the gradient moves by a
    matrix product.
    """
    layout, columns = scales.layout, gradient.shape[1]
    if not layout.has_groups and not layout.has_min:
        rounder = ScaledRounder(layout.numbers, grid, HALF_SCALES, is_power=False, is_signed=True)
        rounder.sweep(gradient, codes, scales.d, hessian, sweeps)
        return
    numbers, width = (*_limits(layout), *_numbers_of(grid)), max(PIECE, layout.numbers)
    parts = [part.numpy() for part in (codes, scales.d, scales.dmin, scales.scales, scales.mins)]
    sums = {}  # of the Hessian's rows in each group, by the first column of a piece
    for first in range(0, columns, width):
        own_hessian = hessian[first : first + width, first : first + width]
        sums[first] = own_hessian.reshape(-1, layout.group, len(own_hessian)).sum(1).numpy()

    def sweep_rows(rows: slice, cols: slice, hessian_part: Any, slopes: Any, changes: Any) -> None:
        of_rows = (part[rows] for part in parts)
        _sweep_groups(slopes, changes, hessian_part, sums[cols.start], *of_rows, cols.start, *numbers)

    sweep_pieces(sweep_rows, gradient, hessian, width, sweeps)


def _limits(layout: Layout) -> tuple[int, int, bool, bool, np.float32, np.float32]:
    low, high = layout.scale_low or 0, layout.scale_high or 0
    return layout.numbers, layout.group, layout.has_groups, layout.has_min, F32(low), F32(high)


def _by_rows(
    loop: Callable[..., None], piece: Tensor, by_row: tuple[int, ...], tensors: tuple[Tensor, ...], grid: Grid
) -> None:
    """Run `loop` on some rows at a time of the piece, and of tensors that have its rows (`by_row`: their indices)."""
    numbers_in = piece.contiguous().numpy()
    arrays: list[Any] = [tensor.contiguous().numpy() for tensor in tensors]
    numbers = _numbers_of(grid)
    step = rows_at_once(len(numbers_in))

    def work(first: int) -> None:
        rows = slice(first, first + step)
        of_rows = (array[rows] if index in by_row else array for index, array in enumerate(arrays))
        loop(numbers_in[rows], *of_rows, *numbers)

    on_threads(work, range(0, len(numbers_in), step))


def _numbers_of(grid: Grid) -> tuple[Any, ...]:
    table = None if grid.table is None else np.array(grid.table, F32)  # None: loops without a table are compiled apart
    return F32(grid.low), F32(grid.high), F32(grid.mantissa), F32(grid.least), grid.is_float, table


def rows_at_once(rows: int) -> int:
    """What a thread takes at a time; all of them where there is one thread: each call costs as much as some rows."""
    threads = thread_count()
    return max(FEWEST_ROWS, rows if threads == 1 else -(-rows // (4 * threads)))


@compiled
def _sweep_rows(gradient, codes, hessian, steps, parts, changes, low, high, mantissa, least, is_float, table):
    width = gradient.shape[1]
    slope = np.empty(width, F32)
    for row in range(gradient.shape[0]):
        for j in range(width):
            slope[j] = gradient[row, j]
        for j in range(width):
            step = steps[row, parts[j]]
            best = F32(F32(codes[row, j] * step) + F32(slope[j] / hessian[j, j]))
            code = nearest(F32(best * reciprocal(step)), low, high, mantissa, least, is_float, table)
            if step == ZERO:
                code = codes[row, j]
            change = F32(F32(code - codes[row, j]) * step)
            codes[row, j], changes[row, j] = code, change
            if change != ZERO:
                shares = hessian[j]
                for k in range(width):
                    slope[k] -= F32(change * shares[k])


@compiled
def _weigh_rows(piece, weights, scales, cost, low, high, mantissa, least, is_float, table):
    count = scales.shape[1]
    inverses = np.empty(count, F32)
    for row in range(piece.shape[0]):
        for c in range(count):
            inverses[c] = reciprocal(scales[row, c])
            cost[row, c] = ZERO
        for j in range(piece.shape[1]):
            number, weight = piece[row, j], weights[j]
            for c in range(count):
                code = nearest(F32(number * inverses[c]), low, high, mantissa, least, is_float, table)
                error = F32(number - F32(code * scales[row, c]))
                cost[row, c] += F32(weight * F32(error * error))


@compiled
def _sweep_groups(
    slopes,
    changes,
    hessian,
    hessian_sums,
    codes,
    ds,
    dmins,
    scales,
    mins,
    first,
    numbers,
    group,
    has_groups,
    has_min,
    scale_low,
    scale_high,
    low,
    high,
    mantissa,
    least,
    is_float,
    table,
):
    width = slopes.shape[1]
    of_groups = np.empty((numbers // group, width), F32)
    change, before = np.empty(width, F32), np.empty(width, F32)
    for row in range(slopes.shape[0]):
        slope, code = slopes[row], codes[row, first : first + width]
        for start in range(0, width, numbers):
            block = (first + start) // numbers
            for k in range(start, start + numbers):
                at = (first + k) // group
                step, offset = F32(ds[row, block] * scales[row, at]), F32(dmins[row, block] * mins[row, at])
                before[k] = F32(F32(code[k] * step) + offset)
            for part in range(numbers // group):
                begin = start + part * group
                line_sums = of_groups[part]
                line_sums[:] = ZERO
                for k in range(begin, begin + group):
                    share, line = code[k], hessian[k]
                    if share != ZERO:
                        for index in range(width):
                            line_sums[index] += share * line[index]
                if has_groups:
                    at = (first + begin) // group
                    rise, curve = _along(code, slope, line_sums, begin, begin + group)
                    scales[row, at] = _better_integer(
                        scales[row, at], ds[row, block], rise, curve, scale_low, scale_high, slope, line_sums
                    )
                    if has_min:
                        sums = hessian_sums[begin // group]
                        rise = curve = ZERO
                        for k in range(begin, begin + group):
                            rise += slope[k]
                            curve += sums[k]
                        mins[row, at] = _better_integer(
                            mins[row, at], dmins[row, block], rise, curve, ZERO, scale_high, slope, sums
                        )
            for is_minimum in range(1 + has_min):
                change[:] = ZERO
                rise = curve = ZERO
                for part in range(numbers // group):
                    begin = start + part * group
                    at = (first + begin) // group
                    factor = mins[row, at] if is_minimum else scales[row, at]
                    line = hessian_sums[begin // group] if is_minimum else of_groups[part]
                    for index in range(width):
                        change[index] += factor * line[index]
                for k in range(start, start + numbers):
                    at = (first + k) // group
                    way = mins[row, at] if is_minimum else F32(code[k] * scales[row, at])
                    rise += way * slope[k]
                    curve += way * change[k]
                units = dmins if is_minimum else ds
                now = units[row, block]
                wanted = as_half(F32(now + F32(rise / curve))) if curve > ZERO else now
                if is_minimum and has_groups:
                    wanted = min(wanted, ZERO)
                move = F32(wanted - now)
                if F32(2) * move * rise > move * move * curve:
                    units[row, block] = wanted
                    for index in range(width):
                        slope[index] -= move * change[index]
            for k in range(start, start + numbers):
                at = (first + k) // group
                step = F32(ds[row, block] * scales[row, at])
                if step != ZERO:
                    best = F32(F32(code[k] * step) + F32(slope[k] / hessian[k, k]))
                    better = nearest(F32(best * reciprocal(step)), low, high, mantissa, least, is_float, table)
                    move = F32(F32(better - code[k]) * step)
                    if move != ZERO:
                        code[k] = better
                        line = hessian[k]
                        for index in range(width):
                            slope[index] -= move * line[index]
                value = F32(F32(code[k] * step) + F32(dmins[row, block] * mins[row, at]))
                changes[row, k] = value - before[k]


@inlined
def _along(way, slope, change, begin, end):
    rise = curve = ZERO
    for k in range(begin, end):
        rise += way[k] * slope[k]
        curve += way[k] * change[k]
    return rise, curve


@inlined
def _better_integer(now, unit, rise, curve, low, high, slope, change):
    """The integer that makes the error least, if it does; the slope moves with it."""
    if not (curve > ZERO and unit != ZERO):
        return now
    wanted = min(max(F32(F32(F32(now + F32(F32(rise / curve) / unit)) + NEAREST) - NEAREST), low), high)
    move = F32(F32(wanted - now) * unit)
    if not F32(2) * move * rise > move * move * curve:
        return now
    for index in range(slope.size):
        slope[index] -= move * change[index]
    return wanted


# ---- vectors of eight numbers: the loops of round_vectors ------------------------------------------------------------


def round_vector_piece(
    piece: Tensor, factor: Tensor, weights: Tensor, steps: Tensor, layout: VectorLayout
) -> tuple[Tensor, Tensor]:
    """This is `round_vectors._round_piece`, compiled."""
    v, errors = torch.empty(piece.shape), torch.empty(piece.shape)
    arrays_in = [tensor.contiguous().numpy() for tensor in (piece, steps, factor, weights.reshape(1, -1))]
    outs, step = (v.numpy(), errors.numpy()), rows_at_once(len(piece))

    def work(first: int) -> None:
        rows = slice(first, first + step)
        arrays = [array[rows] for array in (*arrays_in[:2], *outs)]
        round_rows_to_vectors(*arrays, *arrays_in[2:], *book_of(layout.ggml_type), layout.even)

    on_threads(work, range(0, len(piece), step))
    return v, errors


def sweep_vectors(gradient: Tensor, v: Tensor, hessian: Tensor, scales: VectorScales, sweeps: int) -> None:
    """This is `round_vectors._sweep_vectors`, compiled."""
    layout, book = scales.layout, book_of(scales.layout.ggml_type)
    per_block = NUMBERS // layout.group
    parts = hessian.reshape(len(hessian) // 8, 8, len(hessian) // 8, 8)
    inverses = inverse_of(torch.stack([parts[unit, :, unit] for unit in range(len(parts))])).numpy()
    weights = hessian.diagonal().contiguous().reshape(1, -1).numpy()
    all_numbers, ds, stored = v.numpy(), scales.d.numpy(), scales.stored.numpy()

    def sweep_rows(rows: slice, cols: slice, own_hessian: Any, slopes: Any, changes: Any) -> None:
        block = cols.start // NUMBERS
        groups = slice(block * per_block, (block + 1) * per_block)
        numbers, d, multiples = (
            np.ascontiguousarray(all_numbers[rows, cols]),
            ds[rows, block].copy(),
            stored[rows, groups].copy(),
        )
        of_units = inverses[cols.start // 8 : cols.stop // 8]
        own_weights = np.ascontiguousarray(weights[:, cols])
        sweep_block(
            slopes,
            changes,
            own_hessian,
            of_units,
            own_weights,
            numbers,
            d,
            multiples,
            layout.group,
            F32(layout.unit),
            *book,
            layout.even,
        )
        all_numbers[rows, cols], ds[rows, block], stored[rows, groups] = numbers, d, multiples

    sweep_pieces(sweep_rows, gradient, hessian, NUMBERS, sweeps)


# ---- compiled ------------------------------------------------------------------------------------------------------


@compiled
def round_rows_to_vectors(piece, steps, v, errors, factor, weights, numbers, levels, begins, seconds, positions, even):
    width = piece.shape[1]
    room, pair, left = empty_room(), np.empty(2, np.int32), np.empty((1, width), F32)
    for row in range(piece.shape[0]):
        for k in range(width):
            left[0, k] = piece[row, k]
        for unit in range(width // 8):
            step, at = steps[row, unit], 8 * unit
            signs = nearest_eight(
                left, 0, at, weights, 0, at, step, numbers, levels, begins, seconds, positions, even, room, pair
            )
            numbers_of_eight(signs, pair, numbers, v[row], at)
            for j in range(at, at + 8):
                error = F32(F32(left[0, j] - F32(v[row, j] * step)) / factor[j, j])
                errors[row, j] = error
                for k in range(j + 1, width):
                    left[0, k] -= error * factor[j, k]


@compiled
def sweep_block(
    slopes, changes, hessian, inverses, weights, v, ds, stored, group, unit,
    numbers, levels, begins, seconds, positions, even,
):  # fmt: skip
    width = slopes.shape[1]
    room, pair, best, tried = empty_room(), np.empty(2, np.int32), np.empty((1, 8), F32), np.empty(8, F32)
    line, whole, before = np.empty(width, F32), np.empty(width, F32), np.empty(width, F32)
    for row in range(slopes.shape[0]):
        slope, row_values = slopes[row], v[row]
        for k in range(width):
            before[k] = row_values[k] * F32(ds[row] * F32(F32(stored[row, k // group] * 2 + 1) * unit))
        whole[:] = ZERO
        for part in range(width // group):
            line[:] = ZERO
            rise = curve = ZERO
            for k in range(part * group, (part + 1) * group):
                rise += row_values[k] * slope[k]
                for col in range(width):
                    line[col] += row_values[k] * hessian[k, col]
            for k in range(part * group, (part + 1) * group):
                curve += row_values[k] * line[k]
            now, d = F32(F32(stored[row, part] * 2 + 1) * unit), ds[row]
            if d > ZERO:
                wanted = F32(F32(now + F32(F32(rise / curve) / d)) / unit)
                index = min(max(F32(F32(F32(F32(wanted - 1) * F32(0.5)) + NEAREST) - NEAREST), ZERO), F32(MOST))
                multiple = F32(F32(index * 2 + 1) * unit)
                move = F32(F32(multiple - now) * d)
                if F32(2) * move * rise > move * move * curve:
                    stored[row, part], now = index, multiple
                    for col in range(width):
                        slope[col] -= move * line[col]
            for col in range(width):
                whole[col] += now * line[col]
        rise = curve = ZERO
        for k in range(width):
            way = row_values[k] * F32(F32(stored[row, k // group] * 2 + 1) * unit)
            rise += way * slope[k]
            curve += way * whole[k]
        wanted = as_half(max(F32(ds[row] + F32(rise / curve)), ZERO))
        move = F32(wanted - ds[row])
        if F32(2) * move * rise > move * move * curve:
            ds[row] = wanted
            for col in range(width):
                slope[col] -= move * whole[col]
        for vector in range(width // 8):
            at = 8 * vector
            step = F32(ds[row] * F32(F32(stored[row, at // group] * 2 + 1) * unit))
            for j in range(8):
                total = ZERO
                for k in range(8):
                    total += slope[at + k] * inverses[vector, k, j]
                best[0, j] = row_values[at + j] * step + total
            signs = nearest_eight(
                best, 0, 0, weights, 0, at, step, numbers, levels, begins, seconds, positions, even, room, pair
            )
            numbers_of_eight(signs, pair, numbers, tried, 0)
            gain = F32(0)
            for j in range(8):
                change = F32(F32(tried[j] - row_values[at + j]) * step)
                if change != ZERO:
                    total = ZERO
                    for k in range(8):
                        total += F32(F32(tried[k] - row_values[at + k]) * step) * hessian[at + k, at + j]
                    gain += change * F32(F32(2) * slope[at + j] - total)
            if gain > ZERO:
                for j in range(8):
                    change = F32(F32(tried[j] - row_values[at + j]) * step)
                    if change != ZERO:
                        row_values[at + j] = tried[j]
                        for col in range(width):
                            slope[col] -= change * hessian[at + j, col]
        for k in range(width):
            step = F32(ds[row] * F32(F32(stored[row, k // group] * 2 + 1) * unit))
            changes[row, k] = F32(row_values[k] * step) - before[k]
