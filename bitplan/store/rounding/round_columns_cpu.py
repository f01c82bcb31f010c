"""The loops of `pieces`, compiled for CPUs: the same numbers to the bit, in the same order of arithmetic.

Candidates of a scale lie side by side, so that one vector instruction rounds a number with many of them.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitplan.kernels.base.jit import compiled, inlined, on_threads, thread_count
from bitplan.kernels.base.vectors import same_bits
from bitplan.store.rounding.code_grids import Grid

F32, U32 = np.float32, np.uint32
EXPONENT, OPPOSITE = U32(0x7F800000), U32(0x7F000000)
NEAREST = F32(1.5 * 2.0**23)  # x + NEAREST - NEAREST is x to the nearest integer, ties to even, for |x| < 2^22
ZERO, HALF, ONE = F32(0), F32(0.5), F32(1)
FEWEST_ROWS = 16


def round_piece(
    piece: Tensor, factor: Tensor, steps: Tensor, offsets: Tensor, parts: Tensor, grid: Grid
) -> tuple[Tensor, Tensor]:
    """As `pieces.round_piece`."""
    codes, errors = torch.empty(piece.shape), torch.empty(piece.shape)
    given = (factor, steps, offsets, parts, codes, errors)
    _by_rows(_round_rows, piece, (1, 2, 4, 5), given, grid)
    return codes, errors


def cost_of_scales(piece: Tensor, factor: Tensor, scales: Tensor, grid: Grid) -> Tensor:
    """As `pieces.cost_of_scales`."""
    cost = torch.empty(scales.shape)
    _by_rows(_try_rows, piece, (1, 2), (factor, scales, cost), grid)
    return cost


def sweep_piece(
    gradient: Tensor, codes: Tensor, hessian: Tensor, steps: Tensor, parts: Tensor, grid: Grid
) -> tuple[Tensor, Tensor]:
    """As `pieces.sweep_piece`."""
    better, changes = codes.clone(memory_format=torch.contiguous_format), torch.empty(codes.shape)
    _by_rows(_sweep_rows, gradient, (0, 2, 4), (better, hessian, steps, parts, changes), grid)
    return better, changes


def weighted_cost(piece: Tensor, weights: Tensor, scales: Tensor, grid: Grid) -> Tensor:
    """As `pieces.weighted_cost`."""
    cost = torch.empty(scales.shape)
    _by_rows(_weigh_rows, piece, (1, 2), (weights, scales, cost), grid)
    return cost


def _by_rows(
    loop: Callable[..., None], piece: Tensor, by_row: tuple[int, ...], given: tuple[Tensor, ...], grid: Grid
) -> None:
    """`loop` on some rows of the piece, and of what is given by row, at a time."""
    whole = piece.contiguous().numpy()
    arrays: list[Any] = [each.contiguous().numpy() for each in given]
    table = None if grid.table is None else np.array(grid.table, F32)  # None: loops without a table are compiled apart
    numbers = (F32(grid.low), F32(grid.high), F32(grid.mantissa), F32(grid.least), grid.is_float, table)
    step = max(FEWEST_ROWS, -(-len(whole) // (4 * thread_count())))

    def work(first: int) -> None:
        rows = slice(first, first + step)
        loop(whole[rows], *(each[rows] if place in by_row else each for place, each in enumerate(arrays)), *numbers)

    on_threads(work, range(0, len(whole), step))


@compiled
def _round_rows(piece, factor, steps, offsets, parts, codes, errors, low, high, mantissa, least, is_float, table):
    width = piece.shape[1]
    left = np.empty(width, F32)
    for row in range(piece.shape[0]):
        for j in range(width):  # not left[:] = ...: numba takes seconds to compile its error
            left[j] = piece[row, j]
        for j in range(width):
            step, offset = steps[row, parts[j]], offsets[row, parts[j]]
            scaled = F32(F32(left[j] - offset) * _reciprocal(step))
            code = _nearest(scaled, low, high, mantissa, least, is_float, table)
            error = F32(F32(left[j] - F32(F32(code * step) + offset)) / factor[j, j])
            codes[row, j], errors[row, j] = code, error
            rest, shares = left[j + 1 :], factor[j, j + 1 :]  # views from zero: else LLVM makes no vectors of it
            for k in range(rest.size):
                rest[k] -= F32(error * shares[k])


@compiled
def _try_rows(piece, factor, scales, cost, low, high, mantissa, least, is_float, table):
    width, count = piece.shape[1], scales.shape[1]
    left, inverses, errors = np.empty((width, count), F32), np.empty(count, F32), np.empty(count, F32)
    for row in range(piece.shape[0]):
        for c in range(count):
            inverses[c] = _reciprocal(scales[row, c])
            cost[row, c] = ZERO
        for j in range(width):
            for c in range(count):
                left[j, c] = piece[row, j]
        for j in range(width):
            unit = factor[j, j]
            for c in range(count):
                code = _nearest(F32(left[j, c] * inverses[c]), low, high, mantissa, least, is_float, table)
                error = F32(F32(left[j, c] - F32(code * scales[row, c])) / unit)
                errors[c] = error
                cost[row, c] += F32(error * error)
            for k in range(j + 1, width):
                share, rest = factor[j, k], left[k]
                for c in range(count):
                    rest[c] -= F32(errors[c] * share)


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
            code = _nearest(F32(best * _reciprocal(step)), low, high, mantissa, least, is_float, table)
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
            inverses[c] = _reciprocal(scales[row, c])
            cost[row, c] = ZERO
        for j in range(piece.shape[1]):
            number, weight = piece[row, j], weights[j]
            for c in range(count):
                code = _nearest(F32(number * inverses[c]), low, high, mantissa, least, is_float, table)
                error = F32(number - F32(code * scales[row, c]))
                cost[row, c] += F32(weight * F32(error * error))


@inlined
def _reciprocal(scale):
    return ZERO if scale == ZERO else F32(ONE / scale)


@inlined
def _nearest(scaled, low, high, mantissa, least, is_float, table):
    """The nearest number of the grid. Steps of floats are powers of two: exponents give their inverse."""
    if table is not None:
        place = 0
        for below in range(table.size - 1):
            if F32(scaled) > F32(F32(table[below] + table[below + 1]) * HALF):
                place += 1
        return table[place]
    inside = min(max(F32(scaled), low), high)
    if not is_float:
        return F32(F32(inside + NEAREST) - NEAREST)
    power = same_bits(U32(same_bits(F32(inside), U32) & EXPONENT), F32)
    step = max(F32(power * mantissa), least)
    inverse = same_bits(U32(OPPOSITE - same_bits(F32(step), U32)), F32)
    return F32(F32(F32(F32(inside * inverse) + NEAREST) - NEAREST) * step)
