"""Searches the scales of GGUF's blocks by compiled loops, with the same bits as the definition.

`CompiledSearch` does what `SearchBySums` does in `formats.gguf.search`, and `NumbaSums` what `TorchSums` does. By whole
tensors each step of a block's search is some calls of torch, and rounding with feedback searches a few rows at a time,
a thousand times a weight: there the calls took longer than the numbers.

A group is 16 or 32 numbers, so that everything about it stays in registers and the L1 cache; groups are independent,
and threads take runs of them. Importing this module imports numba.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitplan.base.loops.jit import compiled, inlined, merged, on_threads, thread_count
from bitplan.formats.gguf.layouts import BlockParts, Layout
from bitplan.formats.gguf.search import FIT_STEPS, FLOAT16_MAX, REFINEMENTS, Sums, starts

# ---- cpu search ------------------------------------------------------------------------------------------------------


F32 = np.float32
ZERO, ONE, SMALLEST = F32(0), F32(1), F32(2.0**-126)
NEAREST = F32(1.5 * 2.0**23)  # adding and subtracting it rounds to the nearest integer, ties to even, below 2^22
PIECES_PER_THREAD = 4
Array = np.ndarray[Any, Any]


class NumbaSums:
    """`GroupSums` by compiled loops: x [R, P, g]; w [P, g], or [1, g]; scale and low [R, P]; all float32 on the CPU."""

    def best_scales(self, x: Tensor, w: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        scale, low = torch.empty(x.shape[:2]), torch.empty(x.shape[:2])
        starting = np.array([_start(start.width, start.clip, layout) for start in starts(layout)], dtype=F32)
        settings = (starting, *_limits(layout), layout.has_min, layout.has_groups)
        _on_groups(best_scales, _groups(x), w.contiguous().numpy(), *settings, out=(_flat(scale), _flat(low)))
        return scale, low

    def sums(self, x: Tensor, w: Tensor, scale: Tensor, low: Tensor, layout: Layout) -> Sums:
        group_sums = torch.empty((4, *x.shape[:2]))
        by = (w.contiguous().numpy(), _flat(scale), _flat(low), *_limits(layout))
        _on_groups(sums, _groups(x), *by, out=(group_sums.numpy().reshape(4, -1),))
        return Sums(*group_sums)

    def errors(self, x: Tensor, w: Tensor, scale: Tensor, low: Tensor, layout: Layout) -> Tensor:
        out = torch.empty(x.shape[:2])
        by = (w.contiguous().numpy(), _flat(scale), _flat(low), *_limits(layout))
        _on_groups(errors, _groups(x), *by, out=(_flat(out),))
        return out

    def codes(self, x: Tensor, scale: Tensor, low: Tensor, layout: Layout) -> Tensor:
        out = torch.empty(x.shape, dtype=torch.uint8)
        _on_groups(codes, _groups(x), _flat(scale), _flat(low), *_limits(layout), out=(_groups(out),))
        return out


def _on_groups(kernel: Any, x_NG: Array, *by: Any, out: tuple[Array, ...]) -> None:
    """Run a kernel over all groups, on threads; it fills `out`."""
    on_threads(lambda run: kernel(x_NG, *by, run.start, run.stop, *out), runs_of(len(x_NG)))


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
# Callers pass `size` as a literal, so that every loop has a known length.


@inlined
def _total(numbers_G, size):
    """The sum of a buffer by halves, which overwrites it."""
    if size == 32:
        for i in range(16):
            numbers_G[i] += numbers_G[i + 16]
    for i in range(8):
        numbers_G[i] += numbers_G[i + 8]
    for i in range(4):
        numbers_G[i] += numbers_G[i + 4]
    return (numbers_G[0] + numbers_G[2]) + (numbers_G[1] + numbers_G[3])


@inlined
def _round(x_G, scale, low, first, last, table, v_G, size):
    """Write the numbers of the nearest codes to v_G."""
    inverse = ZERO if abs(scale) < SMALLEST else ONE / scale
    if table.size == 0:
        for i in range(size):
            scaled = (x_G[i] - low) * inverse
            scaled = scaled if scaled > first else first
            scaled = scaled if scaled < last else last
            v_G[i] = (scaled + NEAREST) - NEAREST
        return
    for i in range(size):
        v_G[i] = table[0]
    for step in range(table.size - 1):
        middle, more = (table[step] + table[step + 1]) * F32(0.5), table[step + 1]
        for i in range(size):
            v_G[i] = more if (x_G[i] - low) * inverse > middle else v_G[i]


@inlined
def _error(x_G, w_G, scale, low, v_G, buffer_G, size):
    for i in range(size):
        difference = x_G[i] - (v_G[i] * scale + low)
        buffer_G[i] = w_G[i] * (difference * difference)
    return _total(buffer_G, size)


@inlined
def _products(x_G, w_G, v_G, buffer_G, size):
    """The sums of w v v, w v and w x v over a group."""
    for i in range(size):
        buffer_G[i] = w_G[i] * (v_G[i] * v_G[i])
    vv = _total(buffer_G, size)
    for i in range(size):
        buffer_G[i] = w_G[i] * v_G[i]
    v = _total(buffer_G, size)
    for i in range(size):
        buffer_G[i] = w_G[i] * (x_G[i] * v_G[i])
    return vv, v, _total(buffer_G, size)


@inlined
def _fitted(x_G, w_G, v_G, weight, x_sum, scale, low, has_min, has_groups, buffer_G, size):
    vv, v, xv = _products(x_G, w_G, v_G, buffer_G, size)
    alone = xv / vv if vv > ZERO else scale
    if not has_min:
        return alone, low
    spread = weight * vv - v * v
    if spread > ZERO:
        scale = (weight * xv - x_sum * v) / spread
        low = (x_sum - scale * v) / weight
    if has_groups and low > ZERO:
        return alone, ZERO
    return scale, low


@inlined
def _best_of_group(x_G, w_G, starting, first, last, table, has_min, has_groups, v_G, buffer_G, size):
    bottom, top = x_G[0], x_G[0]
    for i in range(size):
        bottom, top = min(bottom, x_G[i]), max(top, x_G[i])
    for i in range(size):
        buffer_G[i] = w_G[i]
    weight = _total(buffer_G, size)
    for i in range(size):
        buffer_G[i] = w_G[i] * x_G[i]
    x_sum = _total(buffer_G, size)
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
        _round(x_G, scale, low, first, last, table, v_G, size)
        scale, low = _fitted(x_G, w_G, v_G, weight, x_sum, scale, low, has_min, has_groups, buffer_G, size)
        _round(x_G, scale, low, first, last, table, v_G, size)
        error = _error(x_G, w_G, scale, low, v_G, buffer_G, size)
        if step == 0 or error < least:
            best, best_low, least = scale, low, error
    return best, best_low


@compiled
def best_scales(x_NG, w_PG, starting, first, last, table, has_min, has_groups, start, stop, scale_N, low_N):
    v_G, buffer_G = np.empty(32, np.float32), np.empty(32, np.float32)
    for group in range(start, stop):
        x_G, w_G = x_NG[group], w_PG[group % w_PG.shape[0]]
        if x_NG.shape[1] == 32:
            scale_N[group], low_N[group] = _best_of_group(
                x_G, w_G, starting, first, last, table, has_min, has_groups, v_G, buffer_G, 32
            )
        else:
            scale_N[group], low_N[group] = _best_of_group(
                x_G, w_G, starting, first, last, table, has_min, has_groups, v_G, buffer_G, 16
            )


@inlined
def _sums_of_group(x_G, w_G, scale, low, first, last, table, v_G, buffer_G, size):
    _round(x_G, scale, low, first, last, table, v_G, size)
    error = _error(x_G, w_G, scale, low, v_G, buffer_G, size)
    vv, v, xv = _products(x_G, w_G, v_G, buffer_G, size)
    return error, vv, v, xv


@compiled
def sums(x_NG, w_PG, scale_N, low_N, first, last, table, start, stop, out):
    v_G, buffer_G = np.empty(32, np.float32), np.empty(32, np.float32)
    for group in range(start, stop):
        x_G, w_G = x_NG[group], w_PG[group % w_PG.shape[0]]
        scale, low = scale_N[group], low_N[group]
        if x_NG.shape[1] == 32:
            group_sums = _sums_of_group(x_G, w_G, scale, low, first, last, table, v_G, buffer_G, 32)
        else:
            group_sums = _sums_of_group(x_G, w_G, scale, low, first, last, table, v_G, buffer_G, 16)
        out[0, group], out[1, group], out[2, group], out[3, group] = group_sums


@compiled
def errors(x_NG, w_PG, scale_N, low_N, first, last, table, start, stop, out):
    v_G, buffer_G = np.empty(32, np.float32), np.empty(32, np.float32)
    for group in range(start, stop):
        x_G, w_G = x_NG[group], w_PG[group % w_PG.shape[0]]
        scale, low = scale_N[group], low_N[group]
        if x_NG.shape[1] == 32:
            _round(x_G, scale, low, first, last, table, v_G, 32)
            out[group] = _error(x_G, w_G, scale, low, v_G, buffer_G, 32)
        else:
            _round(x_G, scale, low, first, last, table, v_G, 16)
            out[group] = _error(x_G, w_G, scale, low, v_G, buffer_G, 16)


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
    """Finds what is stored for blocks of some rows, on one thread: `NumbaSums`' starts, and one loop for the rest."""

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
            codes = NumbaSums().codes(x, d, dmin, layout)
            return BlockParts(codes.reshape(-1, layout.numbers), halves, lows)
        by_block = (len(d), -1, layout.group_count)
        steps = (d.unsqueeze(-1) * scales.reshape(by_block)).reshape(scales.shape)
        low = -(dmin.unsqueeze(-1) * mins.reshape(by_block)).reshape(scales.shape)
        codes = NumbaSums().codes(x, steps, low, layout).reshape(-1, layout.numbers)
        integers = [tensor.reshape(-1, layout.group_count).to(torch.int8) for tensor in (scales, mins)]
        return BlockParts(codes, halves, lows, integers[0], integers[1] if layout.has_min else None)


def _joined(pieces: Sequence[Array]) -> Tensor:
    return torch.from_numpy(pieces[0] if len(pieces) == 1 else np.concatenate(pieces))


# ---- compiled ------------------------------------------------------------------------------------------------------
# Callers pass `size` as a literal here, too. Of arrays by group, _P, a block has 8 or 16.


@compiled
def fit_floats(x_RPG, w_PG, first, last, table, has_min, scales_RP, lows_RP):
    """Blocks of one group: scales and low ends become float16 numbers, better ones where there are."""
    v_G, buffer_G = np.empty(32, np.float32), np.empty(32, np.float32)
    for row in range(x_RPG.shape[0]):
        for group in range(x_RPG.shape[1]):
            x_G, w_G = x_RPG[row, group], w_PG[group % w_PG.shape[0]]
            weight, x_sum = _sum_of(w_G, w_G, buffer_G, False, 32), _sum_of(w_G, x_G, buffer_G, True, 32)
            scale, low = _half(scales_RP[row, group]), _half(lows_RP[row, group])
            new, new_low, error, vv, v, xv = scale, low, ZERO, ZERO, ZERO, ZERO
            for fit in range(1 + REFINEMENTS):
                if fit > 0:
                    new, new_low = _half(xv / vv if vv > ZERO else scale), low
                    if has_min:
                        spread = weight * vv - v * v
                        new = _half((weight * xv - x_sum * v) / spread if spread > ZERO else scale)
                        new_low = _half((x_sum - new * v) / weight)
                group_sums = _sums_of_group(x_G, w_G, new, new_low, first, last, table, v_G, buffer_G, 32)
                if fit == 0 or group_sums[0] < error:
                    scale, low = new, new_low
                    error, vv, v, xv = group_sums
            scales_RP[row, group], lows_RP[row, group] = scale, low


@compiled
def fit_blocks(x_RPG, w_PG, first, last, table, has_min, least, most, scales_RP, lows_RP, d_RB, dmin_RB):
    """Blocks of groups: d and dmin, and integers in place of the groups' scales and low ends."""
    work = np.empty((8, 32), np.float32)
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
    v_G, buffer_G, one_P, two_P, three_P, four_P = work[0], work[1], work[2], work[3], work[4], work[5]
    weight_P, x_sum_P = work[6], work[7]
    for part in range(count):
        x_G, w_G, low = x_PG[part], w_PG[(at + part) % w_PG.shape[0]], mins_P[part]
        one_P[part], two_P[part] = scales_P[part], -low
        three_P[part] = _sums_of_group(x_G, w_G, scales_P[part], low, first, last, table, v_G, buffer_G, size)[1]
        weight_P[part] = _sum_of(w_G, w_G, buffer_G, False, size)
        x_sum_P[part] = _sum_of(w_G, x_G, buffer_G, True, size)
        mins_P[part] = ZERO
    d, dmin = _integers(one_P, three_P, least, most, scales_P, four_P, buffer_G, count), ZERO
    if has_min:
        dmin = _integers(two_P, weight_P, ZERO, most, mins_P, four_P, buffer_G, count)
    for refinement in range(REFINEMENTS + 1):
        for part in range(count):
            x_G, w_G = x_PG[part], w_PG[(at + part) % w_PG.shape[0]]
            _neighbours(
                x_G, w_G, d, dmin, scales_P, mins_P, part, first, last, table, has_min, least, most, v_G, buffer_G, size
            )
        if refinement == REFINEMENTS:
            break
        for part in range(count):
            x_G, w_G, scale, minimum = x_PG[part], w_PG[(at + part) % w_PG.shape[0]], scales_P[part], mins_P[part]
            group_sums = _sums_of_group(x_G, w_G, d * scale, -(dmin * minimum), first, last, table, v_G, buffer_G, size)
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
            x_G, w_G = x_PG[part], w_PG[(at + part) % w_PG.shape[0]]
            scale, low = new * scales_P[part], -(new_min * mins_P[part])
            one_P[part] = _error_of(x_G, w_G, scale, low, first, last, table, v_G, buffer_G, size)
        if _halves(one_P, count) < before:
            d, dmin = new, new_min
    return d, dmin


@merged
def _neighbours(
    x_G, w_G, d, dmin, scales_P, mins_P, part, first, last, table, has_min, least, most, v_G, buffer_G, size
):
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
        error = _error_of(x_G, w_G, d * tried, -(dmin * tried_min), first, last, table, v_G, buffer_G, size)
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
def _error_of(x_G, w_G, scale, low, first, last, table, v_G, buffer_G, size):
    _round(x_G, scale, low, first, last, table, v_G, size)
    return _error(x_G, w_G, scale, low, v_G, buffer_G, size)


@inlined
def _sum_of(w_G, x_G, buffer_G, by_x, size):
    """The sum of w, or of w x, over a group."""
    for i in range(size):
        buffer_G[i] = w_G[i] * x_G[i] if by_x else w_G[i]
    return _total(buffer_G, size)


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
