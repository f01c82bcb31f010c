"""Sweeps over GGUF's blocks of groups, compiled for CPUs: what `group_blocks` defines, row by row.

A piece is some whole blocks of columns, for which one call moves integers, d, dmin and codes of every row. Between
pieces the gradient moves by a matrix product. Sums run in another order than in torch: a number that lies on a tie may
differ.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bitplan.formats.gguf.layouts import Layout
from bitplan.kernels.base.jit import compiled, inlined, on_threads, thread_count
from bitplan.store.rounding.code_grids import Grid
from bitplan.store.rounding.group_scales import GroupScales
from bitplan.store.rounding.round_columns_cpu import (
    EXPONENT,
    F32,
    FEWEST_ROWS,
    NEAREST,
    OPPOSITE,
    U32,
    ZERO,
    nearest,
    reciprocal_of,
)

PIECE = 256  # columns at once: a K-quant's block, or eight of 32
HALF_STEP, HALF_LEAST, HALF_LIMIT = F32(2.0**-10), F32(2.0**-24), F32(65520.0)  # of a float16; above, it is infinite


def sweep_groups(
    gradient: Tensor, codes: Tensor, hessian: Tensor, scales: GroupScales, grid: Grid, sweeps: int
) -> None:
    """Better codes [R, K] and scales, where they are; `gradient` [R, K] is (weight - value) @ hessian."""
    layout, columns = scales.layout, gradient.shape[1]
    table = None if grid.table is None else np.array(grid.table, F32)
    numbers = (*_limits(layout), F32(grid.low), F32(grid.high), F32(grid.mantissa), F32(grid.least), grid.is_float)
    given = [each.numpy() for each in (codes, scales.d, scales.dmin, scales.scales, scales.mins)]
    step = max(FEWEST_ROWS, -(-len(gradient) // (4 * thread_count())))
    width = max(PIECE, layout.numbers)
    pieces = [slice(first, min(first + width, columns)) for first in range(0, columns, width)]
    owns = [hessian[cols, cols].contiguous() for cols in pieces]
    sums = [own.reshape(-1, layout.group, len(own)).sum(1).numpy() for own in owns]
    for _ in range(sweeps):
        for cols, own, own_sums in zip(pieces, owns, sums, strict=True):
            slopes, changes = gradient[:, cols].contiguous().numpy(), torch.empty(len(gradient), len(own))
            first, matrix, out = cols.start, own.numpy(), changes.numpy()

            def work(at: int) -> None:
                rows = slice(at, at + step)
                parts = [each[rows] for each in given]
                _sweep_rows(slopes[rows], out[rows], matrix, own_sums, *parts, first, *numbers, table)  # noqa: B023

            on_threads(work, range(0, len(gradient), step))
            gradient -= changes @ hessian[cols]


def _limits(layout: Layout) -> tuple[int, int, bool, bool, np.float32, np.float32]:
    low, high = layout.scale_low or 0, layout.scale_high or 0
    return layout.numbers, layout.group, layout.has_groups, layout.has_min, F32(low), F32(high)


@compiled
def _sweep_rows(
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
                before[k] = F32(F32(code[k] * F32(ds[row, block] * scales[row, at])) + F32(dmins[row, block] * mins[row, at]))
            for part in range(numbers // group):
                begin = start + part * group
                own = of_groups[part]
                own[:] = ZERO
                for k in range(begin, begin + group):
                    share, line = code[k], hessian[k]
                    if share != ZERO:
                        for each in range(width):
                            own[each] += share * line[each]
                if has_groups:
                    at = (first + begin) // group
                    rise, curve = _along(code, slope, own, begin, begin + group)
                    scales[row, at] = _better_integer(
                        scales[row, at], ds[row, block], rise, curve, scale_low, scale_high, slope, own
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
                    for each in range(width):
                        change[each] += factor * line[each]
                for k in range(start, start + numbers):
                    at = (first + k) // group
                    way = mins[row, at] if is_minimum else F32(code[k] * scales[row, at])
                    rise += way * slope[k]
                    curve += way * change[k]
                units = dmins if is_minimum else ds
                now = units[row, block]
                wanted = _as_half(F32(now + F32(rise / curve))) if curve > ZERO else now
                if is_minimum and has_groups:
                    wanted = min(wanted, ZERO)
                move = F32(wanted - now)
                if F32(2) * move * rise > move * move * curve:
                    units[row, block] = wanted
                    for each in range(width):
                        slope[each] -= move * change[each]
            for k in range(start, start + numbers):
                at = (first + k) // group
                step = F32(ds[row, block] * scales[row, at])
                if step != ZERO:
                    best = F32(F32(code[k] * step) + F32(slope[k] / hessian[k, k]))
                    better = nearest(F32(best * reciprocal_of(step)), low, high, mantissa, least, is_float, table)
                    move = F32(F32(better - code[k]) * step)
                    if move != ZERO:
                        code[k] = better
                        line = hessian[k]
                        for each in range(width):
                            slope[each] -= move * line[each]
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
    for each in range(slope.size):
        slope[each] -= move * change[each]
    return wanted


@inlined
def _as_half(number):
    """The nearest float16; what has none stays out: it is given as NaN, which no comparison takes."""
    size = abs(number)
    if not size < HALF_LIMIT:
        return F32(np.nan)
    power = U32(F32(size).view(U32) & EXPONENT).view(F32)
    step = max(F32(power * HALF_STEP), HALF_LEAST)
    inverse = U32(OPPOSITE - F32(step).view(U32)).view(F32)
    return F32(F32(F32(F32(number * inverse) + NEAREST) - NEAREST) * step)
