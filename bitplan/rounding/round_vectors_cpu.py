"""`round_vectors` by compiled loops: a row after the other. Sums of sweeps have another order than the definition's.

Importing this module imports numba.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitplan.base.loops.jit import compiled, on_threads
from bitplan.formats.gguf.cpu_vector_search import book_of, empty_room, nearest_eight, numbers_of_eight
from bitplan.formats.gguf.grids import MOST, NUMBERS, VectorLayout
from bitplan.rounding.layout import VectorScales, inverse_of
from bitplan.rounding.round_columns_cpu import as_half, rows_at_once, sweep_pieces

F32 = np.float32
ZERO = F32(0)
NEAREST = F32(1.5 * 2.0**23)  # adding and subtracting it rounds to the nearest integer, ties to even


def round_piece(
    piece: Tensor, factor: Tensor, weights: Tensor, steps: Tensor, layout: VectorLayout
) -> tuple[Tensor, Tensor]:
    """As `round_vectors._round_piece`."""
    v, errors = torch.empty(piece.shape), torch.empty(piece.shape)
    given = [tensor.contiguous().numpy() for tensor in (piece, steps, factor, weights.reshape(1, -1))]
    outs, step = (v.numpy(), errors.numpy()), rows_at_once(len(piece))

    def work(first: int) -> None:
        rows = slice(first, first + step)
        arrays = [array[rows] for array in (*given[:2], *outs)]
        round_rows_to_vectors(*arrays, *given[2:], *book_of(layout.ggml_type), layout.even)

    on_threads(work, range(0, len(piece), step))
    return v, errors


def sweep_vectors(gradient: Tensor, v: Tensor, hessian: Tensor, scales: VectorScales, sweeps: int) -> None:
    """As `round_vectors._sweep_vectors`."""
    layout, book = scales.layout, book_of(scales.layout.ggml_type)
    per_block = NUMBERS // layout.group
    parts = hessian.reshape(len(hessian) // 8, 8, len(hessian) // 8, 8)
    inverses = inverse_of(torch.stack([parts[unit, :, unit] for unit in range(len(parts))])).numpy()
    weights = hessian.diagonal().contiguous().reshape(1, -1).numpy()
    whole, ds, stored = v.numpy(), scales.d.numpy(), scales.stored.numpy()

    def sweep_rows(rows: slice, cols: slice, own: Any, slopes: Any, changes: Any) -> None:
        block = cols.start // NUMBERS
        groups = slice(block * per_block, (block + 1) * per_block)
        numbers, d, multiples = (
            np.ascontiguousarray(whole[rows, cols]),
            ds[rows, block].copy(),
            stored[rows, groups].copy(),
        )
        of_units = inverses[cols.start // 8 : cols.stop // 8]
        own_weights = np.ascontiguousarray(weights[:, cols])
        sweep_block(
            slopes,
            changes,
            own,
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
        whole[rows, cols], ds[rows, block], stored[rows, groups] = numbers, d, multiples

    sweep_pieces(sweep_rows, gradient, hessian, NUMBERS, sweeps)


# ---- compiled ------------------------------------------------------------------------------------------------------


@compiled
def round_rows_to_vectors(piece, steps, v, errors, factor, weights, numbers, levels, begins, seconds, places, even):
    width = piece.shape[1]
    room, pair, left = empty_room(), np.empty(2, np.int32), np.empty((1, width), F32)
    for row in range(piece.shape[0]):
        for k in range(width):
            left[0, k] = piece[row, k]
        for unit in range(width // 8):
            step, at = steps[row, unit], 8 * unit
            signs = nearest_eight(
                left, 0, at, weights, 0, at, step, numbers, levels, begins, seconds, places, even, room, pair
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
    numbers, levels, begins, seconds, places, even,
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
        for place in range(width // 8):
            at = 8 * place
            step = F32(ds[row] * F32(F32(stored[row, at // group] * 2 + 1) * unit))
            for j in range(8):
                total = ZERO
                for k in range(8):
                    total += slope[at + k] * inverses[place, k, j]
                best[0, j] = row_values[at + j] * step + total
            signs = nearest_eight(
                best, 0, 0, weights, 0, at, step, numbers, levels, begins, seconds, places, even, room, pair
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
