"""Searches the scales of GGUF's blocks by compiled loops, with the same bits as the definition.

`CompiledSearch` does what `SearchBySums` does in `formats.gguf.search`. By whole tensors each step of a search is some
calls of torch, and rounding with feedback searches a few rows at a time, a thousand times a weight: there the calls
took longer than the numbers.

A group is 16 or 32 numbers, so that everything about it stays in registers and the L1 cache; groups are independent,
and threads take runs of them. Importing this module imports numba.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from torch import Tensor

from bitplan.base.loops.jit import compiled, inlined, merged, on_threads, thread_count
from bitplan.base.loops.vectors import INT32, define, lanewise, load
from bitplan.formats.gguf.layouts import BlockParts, Layout
from bitplan.formats.gguf.search import FIT_STEPS, FLOAT16_MAX, REFINEMENTS, starts

# ---- cpu search ------------------------------------------------------------------------------------------------------


F32 = np.float32
ZERO, ONE, SMALLEST = F32(0), F32(1), F32(2.0**-126)
NEAREST = F32(1.5 * 2.0**23)  # adding and subtracting it rounds to the nearest integer, ties to even, below 2^22
PIECES_PER_THREAD = 4
Array = np.ndarray[Any, Any]


def _codes_of(x: Tensor, scale: Tensor, low: Tensor, layout: Layout) -> Tensor:
    """The nearest codes of groups x [R, P, g], as `TorchSums.codes` gives them; scale and low [R, P]."""
    out = torch.empty(x.shape, dtype=torch.uint8)
    by = (_groups(x), _flat(scale), _flat(low), *_limits(layout))
    on_threads(lambda run: codes(*by, run.start, run.stop, _groups(out)), runs_of(len(by[0])))
    return out


def _flat(numbers: Tensor) -> Array:
    """Flatten an array: a view of one that is contiguous, as all outputs are, else a copy."""
    return numbers.contiguous().numpy().ravel()


def _groups(x: Tensor) -> Array:
    return x.contiguous().numpy().reshape(-1, x.shape[-1])


def runs_of(count: int) -> list[slice]:
    """Slices of groups, one for each thread."""
    threads = thread_count()
    step = max(1, count if threads == 1 else -(-count // (threads * PIECES_PER_THREAD)))
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _start(width: float, clip: float, layout: Layout) -> tuple[float, float]:
    """The factors of the range (or the extreme) that give the scale, and the shift of the low end."""
    if layout.has_min:
        return width / layout.high, (1.0 - width) * clip
    return width / float(layout.table[0] if layout.table else layout.low), 0.0


def _limits(layout: Layout) -> tuple[Any, Any, Array]:
    """The numbers of the first and last code, and the table of all (empty where codes are the numbers)."""
    return F32(layout.low), F32(layout.high), np.array(layout.table or (), dtype=F32)


# ---- compiled ------------------------------------------------------------------------------------------------------
# The numbers and weights of a group, x and w, are vectors of 16 or 32 lanes, which stay in registers: of arrays LLVM
# takes it that they may share memory.


def _sum_by_halves(writer, value):
    width = writer.vector.width
    while width > 1:
        width //= 2
        parts = [writer.shuffle(value, value, range(first, first + width)) for first in (0, width)]
        value = writer.builder.fadd(*parts)
    return writer.builder.extract_element(value, ir.Constant(INT32, 0))


def _chosen(sign):
    """The first where it is above or below the second, lane by lane, else the second."""
    return lanewise(lambda writer, a, b: writer.builder.select(writer.builder.fcmp_ordered(sign, a, b), a, b))


_total = define(1, lambda vector: vector.lane, _sum_by_halves)
_larger, _smaller = _chosen(">"), _chosen("<")
_repeated = lanewise(lambda _writer, _like, number: number)
_above = lanewise(  # `more` where a lane is above the middle, else what was there
    lambda writer, lanes, middle, more, there: writer.builder.select(
        writer.builder.fcmp_ordered(">", lanes, middle), more, there
    ),
    arity=4,
)


@inlined
def _round(x, scale, low, first, last, table):
    """The numbers of the nearest codes."""
    inverse = ZERO if abs(scale) < SMALLEST else ONE / scale
    scaled = (x - low) * inverse
    if table.size == 0:
        return (_smaller(_larger(scaled, first), last) + NEAREST) - NEAREST
    numbers = _repeated(scaled, table[0])
    for step in range(table.size - 1):
        numbers = _above(scaled, (table[step] + table[step + 1]) * F32(0.5), table[step + 1], numbers)
    return numbers


@inlined
def _error(x, w, scale, low, v):
    difference = x - (v * scale + low)
    return _total(w * (difference * difference))


@inlined
def _fitted(x, w, v, weight, x_sum, scale, low, has_min, has_groups):
    vv, v_sum, xv = _total(w * (v * v)), _total(w * v), _total(w * (x * v))
    alone = xv / vv if vv > ZERO else scale
    if not has_min:
        return alone, low
    spread = weight * vv - v_sum * v_sum
    if spread > ZERO:
        scale = (weight * xv - x_sum * v_sum) / spread
        low = (x_sum - scale * v_sum) / weight
    if has_groups and low > ZERO:
        return alone, ZERO
    return scale, low


@inlined
def _best_of_group(x, w, bottom, top, starting, first, last, table, has_min, has_groups):
    weight, x_sum = _total(w), _total(w * x)
    if has_min and has_groups:
        bottom = min(bottom, ZERO)
    extreme = top - bottom if has_min else (top if top > -bottom else bottom)
    best, best_low, least = ZERO, ZERO, ZERO
    for step in range(starting.shape[0] + FIT_STEPS):
        if step < starting.shape[0]:
            scale = extreme * starting[step, 0]
            low = bottom + extreme * starting[step, 1] if has_min else ZERO
        else:
            scale, low = best, best_low
        v = _round(x, scale, low, first, last, table)
        scale, low = _fitted(x, w, v, weight, x_sum, scale, low, has_min, has_groups)
        error = _error_of(x, w, scale, low, first, last, table)
        if step == 0 or error < least:
            best, best_low, least = scale, low, error
    return best, best_low


@compiled
def best_scales(x_NG, w_PG, starting, first, last, table, has_min, has_groups, start, stop, scale_N, low_N):
    for group in range(start, stop):
        x_G, w_G = x_NG[group], w_PG[group % w_PG.shape[0]]
        bottom, top = x_G[0], x_G[0]
        for i in range(x_G.size):
            bottom, top = min(bottom, x_G[i]), max(top, x_G[i])
        if x_NG.shape[1] == 32:
            scale_N[group], low_N[group] = _best_of_group(
                load(x_G, 0, 32), load(w_G, 0, 32), bottom, top, starting, first, last, table, has_min, has_groups
            )
        else:
            scale_N[group], low_N[group] = _best_of_group(
                load(x_G, 0, 16), load(w_G, 0, 16), bottom, top, starting, first, last, table, has_min, has_groups
            )


@inlined
def _sums_of_group(x, w, scale, low, first, last, table):
    v = _round(x, scale, low, first, last, table)
    return _error(x, w, scale, low, v), _total(w * (v * v)), _total(w * v), _total(w * (x * v))


@compiled
def codes(x_NG, scale_N, low_N, first, last, table, start, stop, out):
    for group in range(start, stop):
        x_G, scale, low = x_NG[group], scale_N[group], low_N[group]
        inverse = ZERO if abs(scale) < SMALLEST else ONE / scale
        for i in range(x_G.size):
            scaled = (x_G[i] - low) * inverse
            if table.size == 0:
                out[group, i] = np.uint8(min(max(np.rint(scaled), first), last) - first)
            else:
                code = 0
                for step in range(table.size - 1):
                    code += scaled > (table[step] + table[step + 1]) * F32(0.5)
                out[group, i] = code


# ---- cpu block search ------------------------------------------------------------------------------------------------


U32 = np.uint32
MULTIPLES = np.array((1.0, 0.985, 1.015, 0.97, 1.03), F32)  # of the step that the largest number asks for
LEAST_SPREAD = F32(1e-6)
LARGEST = F32(FLOAT16_MAX)
EXPONENT, OPPOSITE = U32(0x7F800000), U32(0x7F000000)
HALF_STEP, HALF_LEAST = F32(2.0**-10), F32(2.0**-24)


class RowSearch:
    """Finds what is stored for blocks of some rows, on one thread: the best starts, and one loop for the rest."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._starting = np.array([_start(start.width, start.clip, layout) for start in starts(layout)], dtype=F32)
        self._limits = _limits(layout)
        self._integers = F32(layout.scale_low or 0), F32(layout.scale_high or 0)

    def __call__(self, x_RPG: Array, w_PG: Array) -> tuple[Array, Array, Array | None, Array | None]:
        """Gives d and dmin [R, B], and where the layout has them integers [R, P]; contiguous float32 throughout."""
        layout, limits = self.layout, self._limits
        rows, groups, size = x_RPG.shape
        scale, low = np.empty((rows, groups), F32), np.empty((rows, groups), F32)
        flat = x_RPG.reshape(-1, size), w_PG, self._starting, *limits, layout.has_min, layout.has_groups
        best_scales(*flat, 0, rows * groups, scale.reshape(-1), low.reshape(-1))
        if not layout.has_groups:
            fit_floats(x_RPG, w_PG, *limits, layout.has_min, scale, low)
            return scale, low, None, None
        d, dmin = (np.empty((rows, groups // layout.group_count), F32) for _ in range(2))
        fit_blocks(x_RPG, w_PG, *limits, layout.has_min, *self._integers, scale, low, d, dmin)
        return d, dmin, scale, low


class CompiledSearch:
    """A `BlockSearch` on the CPU."""

    def parts(self, x: Tensor, w: Tensor, layout: Layout) -> BlockParts:
        """Search x [R, P, g] with weights w [P, g], or [1, g]: blocks, row by row, with codes."""
        threads, search = thread_count(), RowSearch(layout)
        step = max(1, len(x) if threads == 1 else -(-len(x) // (threads * PIECES_PER_THREAD)))
        x_RPG, w_PG = x.contiguous().numpy(), w.contiguous().numpy()
        pieces = on_threads(lambda first: search(x_RPG[first : first + step], w_PG), range(0, max(1, len(x)), step))
        d, dmin, scales, mins = (None if part[0] is None else _joined(part) for part in zip(*pieces, strict=True))
        assert d is not None
        assert dmin is not None
        halves, lows = d.reshape(-1).half(), dmin.reshape(-1).half() if layout.has_min else None
        if scales is None or mins is None:
            codes = _codes_of(x, d, dmin, layout)
            return BlockParts(codes.reshape(-1, layout.numbers), halves, lows)
        by_block = (len(d), -1, layout.group_count)
        steps = (d.unsqueeze(-1) * scales.reshape(by_block)).reshape(scales.shape)
        low = -(dmin.unsqueeze(-1) * mins.reshape(by_block)).reshape(scales.shape)
        codes = _codes_of(x, steps, low, layout).reshape(-1, layout.numbers)
        integers = [tensor.reshape(-1, layout.group_count).to(torch.int8) for tensor in (scales, mins)]
        return BlockParts(codes, halves, lows, integers[0], integers[1] if layout.has_min else None)


def _joined(pieces: Sequence[Array]) -> Tensor:
    return torch.from_numpy(pieces[0] if len(pieces) == 1 else np.concatenate(pieces))


# ---- compiled ------------------------------------------------------------------------------------------------------
# Callers pass `size` as a literal. Of arrays by group, _P, a block has 8 or 16.


@compiled
def fit_floats(x_RPG, w_PG, first, last, table, has_min, scales_RP, lows_RP):
    """Blocks of one group: scales and low ends become float16 numbers, better ones where there are."""
    for row in range(x_RPG.shape[0]):
        for group in range(x_RPG.shape[1]):
            x, w = load(x_RPG[row, group], 0, 32), load(w_PG[group % w_PG.shape[0]], 0, 32)
            weight, x_sum = _total(w), _total(w * x)
            scale, low = _half(scales_RP[row, group]), _half(lows_RP[row, group])
            new, new_low, error, vv, v, xv = scale, low, ZERO, ZERO, ZERO, ZERO
            for fit in range(1 + REFINEMENTS):
                if fit > 0:
                    new, new_low = _half(xv / vv if vv > ZERO else scale), low
                    if has_min:
                        spread = weight * vv - v * v
                        new = _half((weight * xv - x_sum * v) / spread if spread > ZERO else scale)
                        new_low = _half((x_sum - new * v) / weight)
                group_sums = _sums_of_group(x, w, new, new_low, first, last, table)
                if fit == 0 or group_sums[0] < error:
                    scale, low = new, new_low
                    error, vv, v, xv = group_sums
            scales_RP[row, group], lows_RP[row, group] = scale, low


@compiled
def fit_blocks(x_RPG, w_PG, first, last, table, has_min, least, most, scales_RP, lows_RP, d_RB, dmin_RB):
    """Blocks of groups: d and dmin, and integers in place of the groups' scales and low ends."""
    work = np.empty((7, 16), np.float32)
    count = x_RPG.shape[1] // d_RB.shape[1]
    for row in range(x_RPG.shape[0]):
        for block in range(d_RB.shape[1]):
            at = block * count
            x_PG, scales_P, lows_P = (
                x_RPG[row, at : at + count],
                scales_RP[row, at : at + count],
                lows_RP[row, at : at + count],
            )
            if x_PG.shape[1] == 32:
                fit = _fit_block(
                    x_PG, w_PG, at, first, last, table, has_min, least, most, scales_P, lows_P, work, 8, 32
                )
            else:
                fit = _fit_block(
                    x_PG, w_PG, at, first, last, table, has_min, least, most, scales_P, lows_P, work, 16, 16
                )
            d_RB[row, block], dmin_RB[row, block] = fit


@inlined
def _fit_block(x_PG, w_PG, at, first, last, table, has_min, least, most, scales_P, mins_P, work, count, size):
    buffer_P, one_P, two_P, three_P, four_P, weight_P, x_sum_P = (
        work[0],
        work[1],
        work[2],
        work[3],
        work[4],
        work[5],
        work[6],
    )
    for part in range(count):
        x, w, low = load(x_PG[part], 0, size), load(w_PG[(at + part) % w_PG.shape[0]], 0, size), mins_P[part]
        one_P[part], two_P[part] = scales_P[part], -low
        three_P[part] = _sums_of_group(x, w, scales_P[part], low, first, last, table)[1]
        weight_P[part], x_sum_P[part] = _total(w), _total(w * x)
        mins_P[part] = ZERO
    d, dmin = _integers(one_P, three_P, least, most, scales_P, four_P, buffer_P, count), ZERO
    if has_min:
        dmin = _integers(two_P, weight_P, ZERO, most, mins_P, four_P, buffer_P, count)
    for refinement in range(REFINEMENTS + 1):
        for part in range(count):
            x, w = load(x_PG[part], 0, size), load(w_PG[(at + part) % w_PG.shape[0]], 0, size)
            _neighbours(x, w, d, dmin, scales_P, mins_P, part, first, last, table, has_min, least, most)
        if refinement == REFINEMENTS:
            break
        for part in range(count):
            x, w = load(x_PG[part], 0, size), load(w_PG[(at + part) % w_PG.shape[0]], 0, size)
            scale, minimum = scales_P[part], mins_P[part]
            group_sums = _sums_of_group(x, w, d * scale, -(dmin * minimum), first, last, table)
            one_P[part], two_P[part] = group_sums[0], group_sums[1] * (scale * scale)
            three_P[part], four_P[part] = group_sums[3] * scale, group_sums[2] * (scale * minimum)
        before, aa, ax, ab = (
            _halves(one_P, count),
            _halves(two_P, count),
            _halves(three_P, count),
            _halves(four_P, count),
        )
        new, new_min = ax / aa if aa > ZERO else d, dmin
        if has_min:
            for part in range(count):
                one_P[part] = weight_P[part] * (mins_P[part] * mins_P[part])
                two_P[part] = x_sum_P[part] * mins_P[part]
            bb, bx = _halves(one_P, count), _halves(two_P, count)
            spread = aa * bb - ab * ab
            if spread > aa * bb * LEAST_SPREAD:
                new, new_min = (ax * bb - bx * ab) / spread, (ax * ab - bx * aa) / spread
        new, new_min = _half(new), _half(new_min)
        for part in range(count):
            x, w = load(x_PG[part], 0, size), load(w_PG[(at + part) % w_PG.shape[0]], 0, size)
            one_P[part] = _error_of(x, w, new * scales_P[part], -(new_min * mins_P[part]), first, last, table)
        if _halves(one_P, count) < before:
            d, dmin = new, new_min
    return d, dmin


@merged
def _neighbours(x, w, d, dmin, scales_P, mins_P, part, first, last, table, has_min, least, most):
    """The integers of a group or their neighbours, whichever give the least error."""
    scale, minimum = scales_P[part], mins_P[part]
    best, best_min, lowest = scale, minimum, ZERO
    for move in range(-1, 9 if has_min else 3):
        if move == (4 if has_min else 1):  # no move, which was tried first
            continue
        tried, tried_min = scale, minimum
        if move >= 0:
            up, up_min = (move // 3, move % 3) if has_min else (move, 1)
            tried = min(max(scale + F32(up - 1), least), most)
            tried_min = min(max(minimum + F32(up_min - 1), ZERO), most)
        error = _error_of(x, w, d * tried, -(dmin * tried_min), first, last, table)
        if move < 0 or error < lowest:
            best, best_min, lowest = tried, tried_min, error
    scales_P[part], mins_P[part] = best, best_min


@inlined
def _integers(numbers_P, weights_P, least, most, integers_P, tried_P, buffer_P, count):
    """A step rounded to float16, and integers such that step x integer is near the numbers."""
    bottom, top = numbers_P[0], numbers_P[0]
    for part in range(count):
        bottom, top = min(bottom, numbers_P[part]), max(top, numbers_P[part])
    extreme = top if top > -bottom else bottom
    best, lowest = ZERO, ZERO
    for attempt in range(10 if least < ZERO else 5):
        end = top / most
        if least < ZERO:
            end = extreme / least if attempt < 5 else extreme / most
        step = _half(end * MULTIPLES[attempt % 5])
        inverse = ZERO if step == ZERO else ONE / step
        for part in range(count):
            scaled = min(max(numbers_P[part] * inverse, least), most)
            tried_P[part] = (scaled + NEAREST) - NEAREST
            difference = numbers_P[part] - tried_P[part] * step
            buffer_P[part] = weights_P[part] * (difference * difference)
        error = _halves(buffer_P, count)
        if attempt == 0 or error < lowest:
            best, lowest = step, error
            for part in range(count):
                integers_P[part] = tried_P[part]
    return best


@inlined
def _error_of(x, w, scale, low, first, last, table):
    return _error(x, w, scale, low, _round(x, scale, low, first, last, table))


@inlined
def _halves(numbers_P, count):
    """The sum by halves of 8 or 16 numbers; overwrites the buffer."""
    if count == 16:
        for i in range(8):
            numbers_P[i] += numbers_P[i + 8]
    for i in range(4):
        numbers_P[i] += numbers_P[i + 4]
    return (numbers_P[0] + numbers_P[2]) + (numbers_P[1] + numbers_P[3])


@inlined
def _half(number):
    """The nearest float16 within its range, as a float32."""
    inside = min(max(number, -LARGEST), LARGEST)
    power = U32(F32(inside).view(U32) & EXPONENT).view(F32)
    step = max(F32(power * HALF_STEP), HALF_LEAST)
    inverse = U32(OPPOSITE - F32(step).view(U32)).view(F32)
    rounded = F32(F32(F32(F32(inside * inverse) + NEAREST) - NEAREST) * step)
    return rounded if rounded != ZERO else F32(inside * ZERO)  # a zero has the sign of what became zero
