"""The search for scales of GGUF's blocks on GPUs: the twin of `bitplan.formats.gguf.search`, with the same bits.

A program takes a block, and tries everything while its numbers stay in registers: in plain torch a block
takes two thousand launches. Sums are taken by halves, as the definition takes them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitplan.formats.gguf.layouts import BlockParts, Layout
from bitplan.formats.gguf.search import FIT_STEPS, FLOAT16_MAX, REFINEMENTS, starts
from bitplan.formats.triton_numbers import MAGIC, device_of, flush_small, reciprocal

STEPS = (1.0, 0.985, 1.015, 0.97, 1.03)  # multiples that are tried of the step of integers
_FITS, _REFINEMENTS = tl.constexpr(FIT_STEPS), tl.constexpr(REFINEMENTS)
_LARGEST = tl.constexpr(FLOAT16_MAX)


class TritonSearch:
    """What `search_blocks` takes in place of the sums: whole blocks in one launch."""

    def parts(self, x: Tensor, w: Tensor, layout: Layout) -> BlockParts:
        """Search x [R, P, g] with weights w [P, g] or [1, g]: blocks, row by row, with codes."""
        rows, groups, group = x.shape
        matrix = x.contiguous().reshape(rows, groups * group)
        blocks, count = groups // layout.group_count, layout.group_count
        d, dmin = (matrix.new_empty(rows, blocks) for _ in range(2))
        scales, mins = (matrix.new_empty(rows, groups) for _ in range(2))
        codes = torch.empty((rows, groups * group), dtype=torch.uint8, device=x.device)
        order = torch.arange(layout.numbers, dtype=torch.int32, device=x.device)
        search_into(matrix, w.expand(groups, group).reshape(-1), layout, order, d, dmin, scales, mins, codes)
        halves, flat = (d.reshape(-1).half(), dmin.reshape(-1).half()), codes.reshape(-1, layout.numbers)
        if not layout.has_groups:
            return BlockParts(flat, halves[0], halves[1] if layout.has_min else None)
        integers = [part.reshape(-1, count).to(torch.int8) for part in (scales, mins)]
        if not layout.has_min:
            return BlockParts(flat, halves[0], None, integers[0])
        return BlockParts(flat, halves[0], halves[1], integers[0], integers[1])


def search_into(
    matrix: Tensor,
    weights: Tensor,
    layout: Layout,
    order: Tensor,
    d: Tensor,
    dmin: Tensor,
    scales: Tensor,
    mins: Tensor,
    codes: Tensor,
) -> None:
    """Search the blocks of [R, C] numbers; d and dmin [R, blocks], scales and minima [R, groups], codes are written.

    weights   [C], with a mean near 1 in the blocks that were weighed together
    order     [numbers of a block] int32: where in a block its columns lie
    """
    rows, blocks = len(matrix), matrix.shape[1] // layout.numbers
    assert matrix.stride(1) == 1
    assert d.stride() == dmin.stride()
    assert scales.stride() == mins.stride()
    with device_of(matrix):
        _search_blocks[(rows, blocks)](
            matrix,
            weights,
            _starting(layout, matrix.device),
            _numbers(layout.table or (0,), matrix.device),
            _numbers(STEPS, matrix.device),
            d,
            dmin,
            scales,
            mins,
            codes,
            order,
            matrix.stride(0),
            codes.stride(0),
            d.stride(0),
            scales.stride(0),
            len(starts(layout)),
            COUNT=layout.group_count,
            SIZE=layout.group,
            LOW=float(layout.low),
            HIGH=float(layout.high),
            TABLE=len(layout.table or ()),
            HAS_GROUPS=layout.has_groups,
            HAS_MIN=layout.has_min,
            SCALE_LOW=float(layout.scale_low or 0),
            SCALE_HIGH=float(layout.scale_high or 0),
            num_warps=1,
            enable_fp_fusion=False,
        )


@functools.cache
def _starting(layout: Layout, device: torch.device) -> Tensor:
    """The starts, [starts, 2]: factors of the range, or the extreme, for the scale and for the shift of the low end."""
    if layout.has_min:
        pairs = [(start.width / layout.high, (1.0 - start.width) * start.clip) for start in starts(layout)]
    else:
        end = float(layout.table[0] if layout.table else layout.low)
        pairs = [(start.width / end, 0.0) for start in starts(layout)]
    return torch.tensor(pairs, dtype=torch.float32, device=device)


@functools.cache
def _numbers(table: tuple[Any, ...], device: torch.device) -> Tensor:
    return torch.tensor(table, dtype=torch.float32, device=device)


@triton.jit
def _by_halves(numbers, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Sum [ROWS, SIZE] over the last axis, halves first: numbers [0, n/2) + [n/2, n), and so on."""
    if SIZE == 32:
        numbers = tl.sum(tl.reshape(numbers, [ROWS, 2, 16]), 1)
    if SIZE >= 16:
        numbers = tl.sum(tl.reshape(numbers, [ROWS, 2, 8]), 1)
    numbers = tl.sum(tl.reshape(numbers, [ROWS, 2, 4]), 1)
    numbers = tl.sum(tl.reshape(numbers, [ROWS, 2, 2]), 1)
    return tl.sum(numbers, 1)


@triton.jit
def _values(x, scale, low, table_ptr, LOW: tl.constexpr, HIGH: tl.constexpr, TABLE: tl.constexpr):
    """The numbers of the nearest codes."""
    scaled = (x - low[:, None]) * reciprocal(flush_small(scale))[:, None]
    if TABLE > 0:
        first = tl.load(table_ptr)
        value = tl.where(scaled > 0.0, first, first)
        for below in range(TABLE - 1):
            one, two = tl.load(table_ptr + below), tl.load(table_ptr + below + 1)
            value = tl.where(scaled > (one + two) * 0.5, two, value)
    else:
        value = (tl.minimum(tl.maximum(scaled, LOW), HIGH) + MAGIC) - MAGIC
    return value


@triton.jit
def _error(x, w, v, scale, low, ROWS: tl.constexpr, SIZE: tl.constexpr):
    difference = x - (v * scale[:, None] + low[:, None])
    return _by_halves(w * (difference * difference), ROWS, SIZE)


@triton.jit
def _divided(one, two):
    """one / two, correctly rounded, where `two` is above zero."""
    return tl.div_rn(one, tl.where(two > 0.0, two, 1.0))


@triton.jit
def _fit(
    x, w, v, weight, x_sum, scale, low, ROWS: tl.constexpr, SIZE: tl.constexpr, HAS_GROUPS: tl.constexpr,
    HAS_MIN: tl.constexpr,
):  # fmt: skip
    """The scale and low end that fit the codes best; unchanged where the codes do not determine them."""
    vv = _by_halves(w * (v * v), ROWS, SIZE)
    xv = _by_halves(w * (x * v), ROWS, SIZE)
    alone = tl.where(vv > 0.0, _divided(xv, vv), scale)
    if HAS_MIN:
        total = _by_halves(w * v, ROWS, SIZE)
        spread = weight * vv - total * total
        new = tl.where(spread > 0.0, _divided(weight * xv - x_sum * total, spread), scale)
        new_low = tl.where(spread > 0.0, _divided(x_sum - new * total, weight), low)
        if HAS_GROUPS:
            above = new_low > 0.0
            new, new_low = tl.where(above, alone, new), tl.where(above, 0.0, new_low)
    else:
        new, new_low = alone, low
    return new, new_low


@triton.jit
def _half(numbers):
    """Round numbers to float16; returns them as float32."""
    return tl.minimum(tl.maximum(numbers, -_LARGEST), _LARGEST).to(tl.float16).to(tl.float32)


@triton.jit
def _integers(
    numbers, weights, steps_ptr, BLOCKS: tl.constexpr, COUNT: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr
):  # fmt: skip
    """Return steps [BLOCKS], rounded to float16, and integers [BLOCKS, COUNT]: step x integer is near the numbers."""
    ends: tl.constexpr = 2 if LEAST < 0 else 1
    bottom, top = tl.min(numbers, 1), tl.max(numbers, 1)
    if LEAST < 0:
        extreme = tl.where(top > -bottom, top, bottom)
        end = tl.div_rn(extreme, tl.where(extreme > 0.0, LEAST, LEAST))
        other = tl.div_rn(extreme, tl.where(extreme > 0.0, MOST, MOST))
    else:
        end = tl.div_rn(top, tl.where(top > 0.0, MOST, MOST))
        other = end
    best, integers, error = tl.zeros_like(top), tl.zeros_like(numbers), tl.zeros_like(top)
    for place in range(ends * 5):
        step = _half(tl.where(place < 5, end, other) * tl.load(steps_ptr + place % 5))
        tried = tl.minimum(tl.maximum(numbers * reciprocal(step)[:, None], LEAST), MOST)
        tried = (tried + MAGIC) - MAGIC
        difference = numbers - tried * step[:, None]
        lost = _by_halves(weights * (difference * difference), BLOCKS, COUNT)
        better = (lost < error) | (place == 0)
        best, error = tl.where(better, step, best), tl.where(better, lost, error)
        integers = tl.where(better[:, None], tried, integers)
    return best, integers


@triton.jit
def _error_of_integers(
    x, w, d, dmin, scales, mins, table_ptr, BLOCKS: tl.constexpr, COUNT: tl.constexpr, SIZE: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Return the error of every group [BLOCKS, COUNT] with these integers as scales and minima."""
    GROUPS: tl.constexpr = BLOCKS * COUNT
    scale = tl.reshape(d[:, None] * scales, [GROUPS])
    low = -tl.reshape(dmin[:, None] * mins, [GROUPS])
    v = _values(x, scale, low, table_ptr, LOW, HIGH, TABLE)
    return tl.reshape(_error(x, w, v, scale, low, GROUPS, SIZE), [BLOCKS, COUNT])


@triton.jit
def _neighbours(
    x, w, d, dmin, scales, mins, table_ptr, BLOCKS: tl.constexpr, COUNT: tl.constexpr, SIZE: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, TABLE: tl.constexpr, HAS_MIN: tl.constexpr, SCALE_LOW: tl.constexpr,
    SCALE_HIGH: tl.constexpr,
):  # fmt: skip
    """For each group its integers or their neighbours, whichever give the least error."""
    best, best_min = scales, mins
    least = _error_of_integers(x, w, d, dmin, scales, mins, table_ptr, BLOCKS, COUNT, SIZE, LOW, HIGH, TABLE)
    ways: tl.constexpr = 9 if HAS_MIN else 3
    for way in range(ways):
        if HAS_MIN:
            up, up_min = (way // 3 - 1) * 1.0, (way % 3 - 1) * 1.0
        else:
            up, up_min = (way - 1) * 1.0, 0.0
        tried = tl.minimum(tl.maximum(scales + up, SCALE_LOW), SCALE_HIGH)
        tried_min = tl.minimum(tl.maximum(mins + up_min, 0.0), SCALE_HIGH)
        error = _error_of_integers(x, w, d, dmin, tried, tried_min, table_ptr, BLOCKS, COUNT, SIZE, LOW, HIGH, TABLE)
        better = error < least
        best, best_min = tl.where(better, tried, best), tl.where(better, tried_min, best_min)
        least = tl.where(better, error, least)
    return best, best_min


@triton.jit
def _refit(
    x, w, weight, x_sum, d, dmin, scales, mins, table_ptr, BLOCKS: tl.constexpr, COUNT: tl.constexpr,
    SIZE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, TABLE: tl.constexpr, HAS_MIN: tl.constexpr,
):  # fmt: skip
    """d and dmin by least squares for the present codes and integers, where that makes the error smaller."""
    GROUPS: tl.constexpr = BLOCKS * COUNT
    scale = tl.reshape(d[:, None] * scales, [GROUPS])
    low = -tl.reshape(dmin[:, None] * mins, [GROUPS])
    v = _values(x, scale, low, table_ptr, LOW, HIGH, TABLE)
    before = tl.reshape(_error(x, w, v, scale, low, GROUPS, SIZE), [BLOCKS, COUNT])
    vv = tl.reshape(_by_halves(w * (v * v), GROUPS, SIZE), [BLOCKS, COUNT])
    xv = tl.reshape(_by_halves(w * (x * v), GROUPS, SIZE), [BLOCKS, COUNT])
    aa = _by_halves(vv * (scales * scales), BLOCKS, COUNT)
    ax = _by_halves(xv * scales, BLOCKS, COUNT)
    new, new_min = tl.where(aa > 0.0, _divided(ax, aa), d), dmin
    if HAS_MIN:
        total = tl.reshape(_by_halves(w * v, GROUPS, SIZE), [BLOCKS, COUNT])
        ab = _by_halves(total * (scales * mins), BLOCKS, COUNT)
        bb = _by_halves(tl.reshape(weight, [BLOCKS, COUNT]) * (mins * mins), BLOCKS, COUNT)
        bx = _by_halves(tl.reshape(x_sum, [BLOCKS, COUNT]) * mins, BLOCKS, COUNT)
        spread = aa * bb - ab * ab
        both = spread > aa * bb * 1e-6
        new = tl.where(both, _divided(ax * bb - bx * ab, spread), new)
        new_min = tl.where(both, _divided(ax * ab - bx * aa, spread), dmin)
    new, new_min = _half(new), _half(new_min)
    after = _error_of_integers(x, w, new, new_min, scales, mins, table_ptr, BLOCKS, COUNT, SIZE, LOW, HIGH, TABLE)
    better = _by_halves(after, BLOCKS, COUNT) < _by_halves(before, BLOCKS, COUNT)
    return tl.where(better, new, d), tl.where(better, new_min, dmin)


@triton.jit(
    do_not_specialize=["block_stride", "group_stride", "start_count"],  # compiled once for all shapes
    do_not_specialize_on_alignment=["d_ptr", "dmin_ptr", "scales_ptr", "mins_ptr"],
)
def _search_blocks(
    matrix_ptr,
    weights_ptr,
    starts_ptr,
    table_ptr,
    steps_ptr,
    d_ptr,
    dmin_ptr,
    scales_ptr,
    mins_ptr,
    codes_ptr,
    order_ptr,
    row_stride,
    code_stride,
    block_stride,
    group_stride,
    start_count,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    TABLE: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    HAS_MIN: tl.constexpr,
    SCALE_LOW: tl.constexpr,
    SCALE_HIGH: tl.constexpr,
):
    BLOCKS: tl.constexpr = 1
    GROUPS: tl.constexpr = COUNT
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = block * (COUNT * SIZE)
    groups = tl.arange(0, COUNT)
    places = groups[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(matrix_ptr + row * row_stride + first + tl.load(order_ptr + places))
    w = tl.load(weights_ptr + first + places)
    weight, x_sum = _by_halves(w, GROUPS, SIZE), _by_halves(w * x, GROUPS, SIZE)
    bottom, top = tl.min(x, 1), tl.max(x, 1)
    if HAS_MIN:
        if HAS_GROUPS:  # a minimum is only subtracted, so the low end is at most 0
            bottom = tl.minimum(bottom, 0.0)
        extreme = top - bottom
    else:
        extreme = tl.where(top > -bottom, top, bottom)
    best, best_low, least = tl.zeros_like(top), tl.zeros_like(top), tl.zeros_like(top)
    for start in range(start_count + _FITS):
        is_start = start < start_count
        place = tl.where(is_start, start, 0)
        scale = tl.where(is_start, extreme * tl.load(starts_ptr + 2 * place), best)
        low = best_low
        if HAS_MIN:
            low = tl.where(is_start, bottom + extreme * tl.load(starts_ptr + 2 * place + 1), best_low)
        v = _values(x, scale, low, table_ptr, LOW, HIGH, TABLE)
        scale, low = _fit(x, w, v, weight, x_sum, scale, low, GROUPS, SIZE, HAS_GROUPS, HAS_MIN)
        v = _values(x, scale, low, table_ptr, LOW, HIGH, TABLE)
        error = _error(x, w, v, scale, low, GROUPS, SIZE)
        better = (error < least) | (start == 0)
        best, best_low = tl.where(better, scale, best), tl.where(better, low, best_low)
        least = tl.where(better, error, least)
    if HAS_GROUPS:
        numbers, lows = tl.reshape(best, [BLOCKS, COUNT]), tl.reshape(best_low, [BLOCKS, COUNT])
        v = _values(x, best, best_low, table_ptr, LOW, HIGH, TABLE)
        curve = tl.reshape(_by_halves(w * (v * v), GROUPS, SIZE), [BLOCKS, COUNT])
        d, scales = _integers(numbers, curve, steps_ptr, BLOCKS, COUNT, SCALE_LOW, SCALE_HIGH)
        dmin, mins = tl.zeros_like(d), tl.zeros_like(scales)
        if HAS_MIN:
            dmin, mins = _integers(
                -lows, tl.reshape(weight, [BLOCKS, COUNT]), steps_ptr, BLOCKS, COUNT, 0.0, SCALE_HIGH
            )
        for refinement in range(_REFINEMENTS + 1):
            scales, mins = _neighbours(
                x, w, d, dmin, scales, mins, table_ptr, BLOCKS, COUNT, SIZE, LOW, HIGH, TABLE, HAS_MIN, SCALE_LOW,
                SCALE_HIGH,
            )  # fmt: skip
            if refinement < _REFINEMENTS:
                d, dmin = _refit(
                    x, w, weight, x_sum, d, dmin, scales, mins, table_ptr, BLOCKS, COUNT, SIZE, LOW, HIGH, TABLE,
                    HAS_MIN,
                )  # fmt: skip
        scale, low = tl.reshape(d[:, None] * scales, [GROUPS]), -tl.reshape(dmin[:, None] * mins, [GROUPS])
        which = row * block_stride + block + tl.arange(0, BLOCKS)
        tl.store(d_ptr + which, d)
        tl.store(dmin_ptr + which, dmin)
        which = row * group_stride + block * COUNT + groups
        tl.store(scales_ptr + which, tl.reshape(scales, [GROUPS]))
        tl.store(mins_ptr + which, tl.reshape(mins, [GROUPS]))
    else:
        scale, low = _half(best), _half(best_low)
        v = _values(x, scale, low, table_ptr, LOW, HIGH, TABLE)
        least = _error(x, w, v, scale, low, GROUPS, SIZE)
        for _ in range(_REFINEMENTS):
            v = _values(x, scale, low, table_ptr, LOW, HIGH, TABLE)
            new, new_low = _fit(x, w, v, weight, x_sum, scale, low, GROUPS, SIZE, HAS_GROUPS, HAS_MIN)
            new = _half(new)
            if HAS_MIN:  # the best low end for the rounded scale
                new_low = _half(_divided(x_sum - new * _by_halves(w * v, GROUPS, SIZE), weight))
            tried = _values(x, new, new_low, table_ptr, LOW, HIGH, TABLE)
            error = _error(x, w, tried, new, new_low, GROUPS, SIZE)
            better = error < least
            scale, low = tl.where(better, new, scale), tl.where(better, new_low, low)
            least = tl.where(better, error, least)
        which = row * block_stride + block + groups
        tl.store(d_ptr + which, scale)
        tl.store(dmin_ptr + which, low)
    scaled = (x - low[:, None]) * reciprocal(flush_small(scale))[:, None]
    if TABLE > 0:
        codes = tl.zeros_like(x)
        for below in range(TABLE - 1):
            middle = (tl.load(table_ptr + below) + tl.load(table_ptr + below + 1)) * 0.5
            codes += tl.where(scaled > middle, 1.0, 0.0)
    else:
        codes = (tl.minimum(tl.maximum(scaled, LOW), HIGH) + MAGIC) - MAGIC - LOW
    tl.store(codes_ptr + row * code_stride + first + places, codes.to(tl.int32).to(tl.uint8))
