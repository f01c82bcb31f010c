"""The loop of `bitplan.store.rounding.group_blocks` that moves scales and codes of one block of GGUF's, for GPUs.

A program takes two rows, which share what it reads of the Hessian. Numbers differ from the definition's by the order of
sums.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from bitplan.formats.gguf.layouts import Layout
from bitplan.kernels.base.numbers import MAGIC, device_of, reciprocal
from bitplan.kernels.codec.triton_batches import if_better, is_finite, over
from bitplan.kernels.codec.triton_rounding import code_limits, nearest, table_of

ROWS = 2


def sweep_groups(
    gradient: Tensor,
    codes: Tensor,
    hessian: Tensor,
    first: int,
    layout: Layout,
    grid: Any,
    d: Tensor,
    dmin: Tensor,
    scales: Tensor,
    mins: Tensor,
    changes: Tensor,
) -> None:
    """Better scales and codes of the block of GGUF's at column `first` of [R, K] numbers, where they are.

    gradient   [R, K]: (weight - value) @ hessian, as it is before; scales are as `GroupScales` has them
    changes    [R, numbers of a block]: written, how the values changed
    """
    rows, cols = gradient.shape
    with device_of(gradient):
        _sweep_groups[(triton.cdiv(rows, ROWS),)](
            gradient,
            codes,
            hessian,
            d,
            dmin,
            scales,
            mins,
            changes,
            table_of(grid, gradient),
            first,
            rows,
            cols,
            d.shape[1],
            ROWS=ROWS,
            WIDE=layout.numbers,
            GROUP=layout.group,
            COUNT=layout.group_count,
            HAS_GROUPS=layout.has_groups,
            HAS_MIN=layout.has_min,
            SCALE_LOW=float(layout.scale_low or 0),
            SCALE_HIGH=float(layout.scale_high or 0),
            **code_limits(grid),
            enable_fp_fusion=False,
            num_warps=1,
        )


@triton.jit
def _of_columns(per_group, ROWS: tl.constexpr, COUNT: tl.constexpr, GROUP: tl.constexpr):
    """[ROWS, COUNT] numbers of groups -> [ROWS, COUNT x GROUP] of their columns."""
    return tl.reshape(tl.broadcast_to(per_group[:, :, None], [ROWS, COUNT, GROUP]), [ROWS, COUNT * GROUP])


@triton.jit
def _moved_integer(now, unit, rise, curve, LEAST: tl.constexpr, MOST: tl.constexpr):
    """A group's integer at its best place, and by how much the scale moves with it."""
    by = over(rise, curve)
    wanted = now + tl.where(unit != 0.0, tl.div_rn(by, tl.where(unit != 0.0, unit, 1.0)), 0.0)
    wanted = (tl.minimum(tl.maximum(wanted, LEAST), MOST) + MAGIC) - MAGIC
    move = if_better((wanted - now) * unit, rise, curve)
    return tl.where(move != 0.0, wanted, now), move


@triton.jit
def _moved_half(now, rise, curve, AT_MOST_ZERO: tl.constexpr):
    """A float16 number at its best place, and by how much it moves."""
    wanted = (now + over(rise, curve)).to(tl.float16).to(tl.float32)
    if AT_MOST_ZERO:
        wanted = tl.minimum(wanted, 0.0)
    move = if_better(tl.where(is_finite(wanted), wanted - now, 0.0), rise, curve)
    return tl.where(move != 0.0, wanted, now), move


@triton.jit(do_not_specialize=["rows", "blocks"])
def _sweep_groups(
    gradient_ptr,
    codes_ptr,
    hessian_ptr,
    d_ptr,
    dmin_ptr,
    scales_ptr,
    mins_ptr,
    changes_ptr,
    table_ptr,
    first,
    rows,
    cols,
    blocks,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    GROUP: tl.constexpr,
    COUNT: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    HAS_MIN: tl.constexpr,
    SCALE_LOW: tl.constexpr,
    SCALE_HIGH: tl.constexpr,
    KIND: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    MANTISSA: tl.constexpr,
    LEAST: tl.constexpr,
    TABLE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row, wide, group = row < rows, tl.arange(0, WIDE), tl.arange(0, COUNT)
    block = first // WIDE
    own_ptr = hessian_ptr + first.to(tl.int64) * cols + first
    here = row[:, None] * cols + first + wide[None, :]
    of_groups = row[:, None] * (blocks * COUNT) + block * COUNT + group[None, :]
    slope = tl.load(gradient_ptr + here, mask=is_row[:, None], other=0.0)
    codes = tl.load(codes_ptr + here, mask=is_row[:, None], other=0.0)
    d = tl.load(d_ptr + row * blocks + block, mask=is_row, other=0.0)
    dmin = tl.load(dmin_ptr + row * blocks + block, mask=is_row, other=0.0)
    scales = tl.load(scales_ptr + of_groups, mask=is_row[:, None], other=0.0)
    mins = tl.load(mins_ptr + of_groups, mask=is_row[:, None], other=0.0)
    before = codes * _of_columns(d[:, None] * scales, ROWS, COUNT, GROUP)
    before += _of_columns(dmin[:, None] * mins, ROWS, COUNT, GROUP)
    if HAS_GROUPS:
        for each in range(COUNT):
            is_group = (wide // GROUP == each)[None, :]
            is_number = (group == each)[None, :]
            along, ones = tl.zeros_like(slope), tl.zeros([WIDE], tl.float32)
            for j in range(GROUP):
                at = each * GROUP + j
                line = tl.load(own_ptr + at * cols + wide)
                code = tl.load(codes_ptr + row * cols + first + at, mask=is_row, other=0.0)
                along += code[:, None] * line[None, :]
                ones += line
            way = tl.where(is_group, codes, 0.0)
            rise, curve = tl.sum(way * slope, 1), tl.sum(way * along, 1)
            now = tl.sum(tl.where(is_number, scales, 0.0), 1)
            now, move = _moved_integer(now, d, rise, curve, SCALE_LOW, SCALE_HIGH)
            scales = tl.where(is_number, now[:, None], scales)
            slope -= move[:, None] * along
            if HAS_MIN:
                rise = tl.sum(tl.where(is_group, slope, 0.0), 1)
                curve = tl.zeros_like(rise) + tl.sum(tl.where(wide // GROUP == each, ones, 0.0), 0)
                now = tl.sum(tl.where(is_number, mins, 0.0), 1)
                now, move = _moved_integer(now, dmin, rise, curve, 0.0, SCALE_HIGH)
                mins = tl.where(is_number, now[:, None], mins)
                slope -= move[:, None] * ones[None, :]
    along, low_along = tl.zeros_like(slope), tl.zeros_like(slope)
    for each in range(COUNT):
        is_number = (group == each)[None, :]
        scale = tl.sum(tl.where(is_number, scales, 0.0), 1)
        low = tl.sum(tl.where(is_number, mins, 0.0), 1)
        for j in range(GROUP):
            at = each * GROUP + j
            line = tl.load(own_ptr + at * cols + wide)
            code = tl.load(codes_ptr + row * cols + first + at, mask=is_row, other=0.0)
            along += (code * scale)[:, None] * line[None, :]
            if HAS_MIN:
                low_along += low[:, None] * line[None, :]
    way = codes * _of_columns(scales, ROWS, COUNT, GROUP)
    d, move = _moved_half(d, tl.sum(way * slope, 1), tl.sum(way * along, 1), False)
    slope -= move[:, None] * along
    if HAS_MIN:
        way = _of_columns(mins, ROWS, COUNT, GROUP)
        dmin, move = _moved_half(dmin, tl.sum(way * slope, 1), tl.sum(way * low_along, 1), HAS_GROUPS)
        slope -= move[:, None] * low_along
    changes = codes * _of_columns(d[:, None] * scales, ROWS, COUNT, GROUP)
    changes = changes + _of_columns(dmin[:, None] * mins, ROWS, COUNT, GROUP) - before
    for each in range(COUNT):
        step = d * tl.sum(tl.where((group == each)[None, :], scales, 0.0), 1)
        inverse = reciprocal(step)
        for j in range(GROUP):
            at = each * GROUP + j
            is_column = (wide == at)[None, :]
            code = tl.sum(tl.where(is_column, codes, 0.0), 1)
            diagonal = tl.load(own_ptr + at * cols + at)
            rise = tl.sum(tl.where(is_column, slope, 0.0), 1)
            best = code * step + tl.div_rn(rise, tl.where(is_row, diagonal, diagonal))
            better = nearest(best * inverse, table_ptr, KIND, LOW, HIGH, MANTISSA, LEAST, TABLE)
            better = tl.where(step == 0.0, code, better)
            change = (better - code) * step
            slope -= change[:, None] * tl.load(own_ptr + at * cols + wide)[None, :]
            codes = tl.where(is_column, better[:, None], codes)
            changes = tl.where(is_column, changes + change[:, None], changes)
    tl.store(codes_ptr + here, codes, mask=is_row[:, None])
    tl.store(changes_ptr + row[:, None] * WIDE + wide[None, :], changes, mask=is_row[:, None])
    tl.store(d_ptr + row * blocks + block, d, mask=is_row)
    tl.store(dmin_ptr + row * blocks + block, dmin, mask=is_row)
    tl.store(scales_ptr + of_groups, scales, mask=is_row[:, None])
    tl.store(mins_ptr + of_groups, mins, mask=is_row[:, None])
