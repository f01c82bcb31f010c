"""Compiled loops for blocks that have one scale each: scales are tried, codes rounded, and both swept over.

`store.rounding` rounds with them a few rows at a time, a thousand times a weight: there calls of torch take longer than
what they compute. Candidates of a scale lie side by side, so that one vector instruction rounds a number with many of
them. Importing this module imports numba.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitplan.formats import Format
from bitplan.formats.scales.rules import SMALLEST_SCALE, BasedScales
from bitplan.kernels.base.jit import compiled, inlined
from bitplan.kernels.base.vectors import same_bits

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
    """[5] float32: how scales are stored, and their base factor; None where the loops do not know it.

    Of powers of two it is not read.
    """
    scales = fmt.scales
    if scales is None or (isinstance(scales, BasedScales) and base is None):
        return None
    if fmt.power_of_two_scales:
        return HALF_SCALES
    numbers = STORAGES.get(scales.dtype)
    return None if numbers is None else np.array((*numbers, 1.0 if base is None else float(base)), F32)


# ---- compiled ------------------------------------------------------------------------------------------------------


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
        for place in range(multiples.size):
            scale = _as_stored(F32(start * multiples[place]), storage, is_power)
            tried[row, 1 + place] = scale if abs(scale) < np.inf else ZERO


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
        place, least = 0, F32(np.inf)
        for each in range(tried.shape[1]):
            if cost[row, each] < least:
                place, least = each, cost[row, each]
        scales[row, 0] = tried[row, place]


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
                    for each in range(numbers):
                        way[each] += share * line[each]
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
                        for each in range(numbers):
                            slope[each] -= move * line[each]
            after = slopes[row, end:]
            for k in range(numbers):
                share, line = change[k], hessian[begin + k, end:]
                if share != ZERO:
                    for each in range(after.size):
                        after[each] -= share * line[each]


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
