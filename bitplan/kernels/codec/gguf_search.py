"""The compiled version of `bitplan.formats.gguf.search.TorchSums`, with the same bits.

A group is 16 or 32 numbers, so that everything about it stays in registers and the L1 cache; groups are independent,
and threads take runs of them. Importing this module imports numba.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitplan.formats.gguf.layouts import Layout
from bitplan.formats.gguf.search import FIT_STEPS, Sums, starts
from bitplan.kernels.base.jit import compiled, inlined, on_threads, thread_count

F32 = np.float32
ZERO, ONE, SMALLEST = F32(0), F32(1), F32(2.0**-126)
NEAREST = F32(1.5 * 2.0**23)  # adding and subtracting it rounds to the nearest integer, ties to even, below 2^22
PIECES_PER_THREAD = 4
Array = np.ndarray[Any, Any]


class NumbaSums:
    """x [R, P, g]; w [P, g], or [1, g]; scale and low [R, P]; all float32 on the CPU."""

    def best_scales(self, x: Tensor, w: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        scale, low = torch.empty(x.shape[:2]), torch.empty(x.shape[:2])
        starting = np.array([_start(each.width, each.clip, layout) for each in starts(layout)], dtype=F32)
        settings = (starting, *_limits(layout), layout.has_min, layout.has_groups)
        _on_groups(best_scales, _groups(x), w.contiguous().numpy(), *settings, out=(_flat(scale), _flat(low)))
        return scale, low

    def sums(self, x: Tensor, w: Tensor, scale: Tensor, low: Tensor, layout: Layout) -> Sums:
        found = torch.empty((4, *x.shape[:2]))
        by = (w.contiguous().numpy(), _flat(scale), _flat(low), *_limits(layout))
        _on_groups(sums, _groups(x), *by, out=(found.numpy().reshape(4, -1),))
        return Sums(*found)

    def errors(self, x: Tensor, w: Tensor, scale: Tensor, low: Tensor, layout: Layout) -> Tensor:
        found = torch.empty(x.shape[:2])
        by = (w.contiguous().numpy(), _flat(scale), _flat(low), *_limits(layout))
        _on_groups(errors, _groups(x), *by, out=(_flat(found),))
        return found

    def codes(self, x: Tensor, scale: Tensor, low: Tensor, layout: Layout) -> Tensor:
        found = torch.empty(x.shape, dtype=torch.uint8)
        _on_groups(codes, _groups(x), _flat(scale), _flat(low), *_limits(layout), out=(_groups(found),))
        return found


def _on_groups(kernel: Any, x_NG: Array, *by: Any, out: tuple[Array, ...]) -> None:
    """Run a kernel over all groups, on threads; it fills `out`."""
    on_threads(lambda run: kernel(x_NG, *by, run.start, run.stop, *out), _runs(len(x_NG)))


def _flat(numbers: Tensor) -> Array:
    """A view where they are contiguous, as all outputs are."""
    return numbers.contiguous().numpy().ravel()


def _groups(x: Tensor) -> Array:
    return x.contiguous().numpy().reshape(-1, x.shape[-1])


def _runs(count: int) -> list[slice]:
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
    """The sum by halves; overwrites the buffer."""
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
    """Sums of w v v, w v and w x v."""
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
    for place in range(starting.shape[0] + FIT_STEPS):
        if place < starting.shape[0]:
            scale = extreme * starting[place, 0]
            low = bottom + extreme * starting[place, 1] if has_min else ZERO
        else:
            scale, low = best, best_low
        _round(x_G, scale, low, first, last, table, v_G, size)
        scale, low = _fitted(x_G, w_G, v_G, weight, x_sum, scale, low, has_min, has_groups, buffer_G, size)
        _round(x_G, scale, low, first, last, table, v_G, size)
        error = _error(x_G, w_G, scale, low, v_G, buffer_G, size)
        if place == 0 or error < least:
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
            found = _sums_of_group(x_G, w_G, scale, low, first, last, table, v_G, buffer_G, 32)
        else:
            found = _sums_of_group(x_G, w_G, scale, low, first, last, table, v_G, buffer_G, 16)
        out[0, group], out[1, group], out[2, group], out[3, group] = found


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
                place = 0
                for step in range(table.size - 1):
                    place += scaled > (table[step] + table[step + 1]) * F32(0.5)
                out[group, i] = place
