"""The loops of compensated rounding for GPUs: a program takes a row, and its columns one after the other.

Twins of `bitplan.store.rounding.round_columns`, which says what each does; as plain torch a column takes a dozen
launches, and a matrix has thousands of columns. A row's piece stays in registers; its column j is taken out by a sum
over all columns of which all others are zero.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitplan.kernels.base.numbers import MAGIC, device_of, reciprocal

EXPONENT = tl.constexpr(0x7F800000)
COLUMNS = 64  # of a row that `weighted_cost` reads at once


def round_piece(
    piece: Tensor, factor: Tensor, steps: Tensor, offsets: Tensor, parts: Tensor, grid: Any
) -> tuple[Tensor, Tensor]:
    """As `round_columns.round_piece`; rows of all may lie apart."""
    codes, errors = (torch.empty(piece.shape, device=piece.device) for _ in range(2))
    parts = parts.to(piece.device, torch.int32)
    rows, width = piece.shape
    piece, factor, steps, offsets = (
        each if each.stride(1) == 1 else each.contiguous() for each in (piece, factor, steps, offsets)
    )
    with device_of(piece):
        _round_rows[(rows,)](
            piece,
            factor,
            steps,
            offsets,
            parts,
            codes,
            errors,
            table_of(grid, piece),
            width,
            piece.stride(0),
            factor.stride(0),
            steps.stride(0),
            offsets.stride(0),
            WIDE=triton.next_power_of_2(width),
            **_launch(grid, width),
        )
    return codes, errors


def cost_of_scales(piece: Tensor, factor: Tensor, scales: Tensor, grid: Any) -> Tensor:
    """As `round_columns.cost_of_scales`."""
    piece, factor, scales = _contiguous(piece, factor, scales)
    cost = torch.empty_like(scales)
    (rows, width), count = piece.shape, scales.shape[1]
    wide, many = triton.next_power_of_2(width), triton.next_power_of_2(count)
    with device_of(piece):
        _try_rows[(rows,)](
            piece,
            factor,
            scales,
            cost,
            table_of(grid, piece),
            width,
            count,
            WIDE=wide,
            MANY=many,
            **_launch(grid, wide * many // 4),
        )
    return cost


def sweep_piece(
    gradient: Tensor, codes: Tensor, hessian: Tensor, steps: Tensor, parts: Tensor, grid: Any
) -> tuple[Tensor, Tensor]:
    """As `round_columns.sweep_piece`."""
    gradient, codes, hessian, steps = _contiguous(gradient, codes, hessian, steps)
    better, changes, parts = torch.empty_like(codes), torch.empty_like(codes), parts.to(codes.device, torch.int32)
    rows, width = gradient.shape
    with device_of(gradient):
        _sweep_rows[(rows,)](
            gradient,
            codes,
            hessian,
            steps,
            parts,
            better,
            changes,
            table_of(grid, gradient),
            width,
            steps.shape[1],
            WIDE=triton.next_power_of_2(width),
            **_launch(grid, width),
        )
    return better, changes


def weighted_cost(piece: Tensor, weights: Tensor, scales: Tensor, grid: Any) -> Tensor:
    """As `round_columns.weighted_cost`, but for the order of the sum."""
    piece, weights, scales = _contiguous(piece, weights, scales)
    cost = torch.empty_like(scales)
    (rows, width), count = piece.shape, scales.shape[1]
    many = triton.next_power_of_2(count)
    with device_of(piece):
        _weigh_rows[(rows,)](
            piece,
            weights,
            scales,
            cost,
            table_of(grid, piece),
            width,
            count,
            WIDE=COLUMNS,
            MANY=many,
            **_launch(grid, COLUMNS * many // 4),
        )
    return cost


def _contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(each.float().contiguous() for each in tensors)


def table_of(grid: Any, like: Tensor) -> Tensor:
    """The grid's numbers, or some that are not read."""
    return like if grid.table is None else _on_device(grid.table, like.device)


@functools.cache
def _on_device(table: tuple[float, ...], device: torch.device) -> Tensor:
    """Made once: a tensor made of Python numbers waits for the GPU."""
    return torch.tensor(table, dtype=torch.float32, device=device)


def code_limits(grid: Any) -> dict[str, Any]:
    """The constants of `nearest`."""
    kind = "table" if grid.table is not None else "float" if grid.is_float else "integer"
    limits = {"LOW": grid.low, "HIGH": grid.high, "MANTISSA": grid.mantissa, "LEAST": grid.least}
    return {"KIND": kind, **limits, "TABLE": len(grid.table or ())}


def _launch(grid: Any, numbers: int) -> dict[str, Any]:
    return {**code_limits(grid), "num_warps": 4 if numbers > 512 else 1, "enable_fp_fusion": False}


@triton.jit
def nearest(
    scaled,
    table_ptr,
    KIND: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    MANTISSA: tl.constexpr,
    LEAST: tl.constexpr,
    TABLE: tl.constexpr,
):
    """The nearest number of the grid, ties to even codes; of a table the smaller one."""
    if KIND == "table":
        first = tl.load(table_ptr)
        found = tl.where(scaled > 0.0, first, first)  # as many as there are numbers
        for below in range(TABLE - 1):
            one, two = tl.load(table_ptr + below), tl.load(table_ptr + below + 1)
            found = tl.where(scaled > (one + two) * 0.5, two, found)
    else:
        inside = tl.minimum(tl.maximum(scaled, LOW), HIGH)
        if KIND == "integer":
            found = (inside + MAGIC) - MAGIC
        else:
            power = (inside.to(tl.int32, bitcast=True) & EXPONENT).to(tl.float32, bitcast=True)
            step = tl.maximum(power * MANTISSA, LEAST)
            inverse = (0x7F000000 - step.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
            found = ((inside * inverse + MAGIC) - MAGIC) * step
    return found


@triton.jit(do_not_specialize=["step_stride", "offset_stride"])
def _round_rows(
    piece_ptr,
    factor_ptr,
    steps_ptr,
    offsets_ptr,
    parts_ptr,
    codes_ptr,
    errors_ptr,
    table_ptr,
    width,
    piece_stride,
    factor_stride,
    step_stride,
    offset_stride,
    WIDE: tl.constexpr,
    KIND: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    MANTISSA: tl.constexpr,
    LEAST: tl.constexpr,
    TABLE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, WIDE)
    inside = cols < width
    left = tl.load(piece_ptr + row * piece_stride + cols, mask=inside, other=0.0)
    codes, errors = tl.zeros_like(left), tl.zeros_like(left)
    for j in range(width):
        is_column = cols == j
        part = tl.load(parts_ptr + j)
        step = tl.load(steps_ptr + row * step_stride + part)
        offset = tl.load(offsets_ptr + row * offset_stride + part)
        number = tl.sum(tl.where(is_column, left, 0.0), 0)
        code = nearest((number - offset) * reciprocal(step), table_ptr, KIND, LOW, HIGH, MANTISSA, LEAST, TABLE)
        error = tl.div_rn(number - (code * step + offset), tl.load(factor_ptr + j * factor_stride + j))
        shares = tl.load(factor_ptr + j * factor_stride + cols, mask=inside, other=0.0)
        left = tl.where(cols > j, left - error * shares, left)
        codes, errors = tl.where(is_column, code, codes), tl.where(is_column, error, errors)
    tl.store(codes_ptr + row * width + cols, codes, mask=inside)
    tl.store(errors_ptr + row * width + cols, errors, mask=inside)


@triton.jit
def _try_rows(
    piece_ptr,
    factor_ptr,
    scales_ptr,
    cost_ptr,
    table_ptr,
    width,
    count,
    WIDE: tl.constexpr,
    MANY: tl.constexpr,
    KIND: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    MANTISSA: tl.constexpr,
    LEAST: tl.constexpr,
    TABLE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols, tries = tl.arange(0, WIDE), tl.arange(0, MANY)
    inside = cols < width
    scales = tl.load(scales_ptr + row * count + tries, mask=tries < count, other=0.0)
    inverses, cost = reciprocal(scales), tl.zeros_like(scales)
    left = tl.zeros([MANY, WIDE], tl.float32) + tl.load(piece_ptr + row * width + cols, mask=inside, other=0.0)[None, :]
    for j in range(width):
        number = tl.sum(tl.where((cols == j)[None, :], left, 0.0), 1)
        code = nearest(number * inverses, table_ptr, KIND, LOW, HIGH, MANTISSA, LEAST, TABLE)
        unit = tl.load(factor_ptr + j * width + j)
        error = tl.div_rn(number - code * scales, tl.where(tries >= 0, unit, unit))
        cost += error * error
        shares = tl.load(factor_ptr + j * width + cols, mask=inside, other=0.0)
        left = tl.where((cols > j)[None, :], left - error[:, None] * shares[None, :], left)
    tl.store(cost_ptr + row * count + tries, cost, mask=tries < count)


@triton.jit
def _sweep_rows(
    gradient_ptr,
    codes_ptr,
    hessian_ptr,
    steps_ptr,
    parts_ptr,
    better_ptr,
    changes_ptr,
    table_ptr,
    width,
    step_count,
    WIDE: tl.constexpr,
    KIND: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    MANTISSA: tl.constexpr,
    LEAST: tl.constexpr,
    TABLE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, WIDE)
    inside = cols < width
    slope = tl.load(gradient_ptr + row * width + cols, mask=inside, other=0.0)
    codes = tl.load(codes_ptr + row * width + cols, mask=inside, other=0.0)
    changes = tl.zeros_like(slope)
    for j in range(width):
        is_column = cols == j
        step = tl.load(steps_ptr + row * step_count + tl.load(parts_ptr + j))
        before = tl.sum(tl.where(is_column, codes, 0.0), 0)
        here = tl.sum(tl.where(is_column, slope, 0.0), 0)
        best = before * step + tl.div_rn(here, tl.load(hessian_ptr + j * width + j))
        code = nearest(best * reciprocal(step), table_ptr, KIND, LOW, HIGH, MANTISSA, LEAST, TABLE)
        code = tl.where(step == 0.0, before, code)
        change = (code - before) * step
        slope -= change * tl.load(hessian_ptr + j * width + cols, mask=inside, other=0.0)
        codes, changes = tl.where(is_column, code, codes), tl.where(is_column, change, changes)
    tl.store(better_ptr + row * width + cols, codes, mask=inside)
    tl.store(changes_ptr + row * width + cols, changes, mask=inside)


@triton.jit
def _weigh_rows(
    piece_ptr,
    weights_ptr,
    scales_ptr,
    cost_ptr,
    table_ptr,
    width,
    count,
    WIDE: tl.constexpr,
    MANY: tl.constexpr,
    KIND: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    MANTISSA: tl.constexpr,
    LEAST: tl.constexpr,
    TABLE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tries = tl.arange(0, MANY)
    scales = tl.load(scales_ptr + row * count + tries, mask=tries < count, other=0.0)
    inverses, cost = reciprocal(scales), tl.zeros_like(scales)
    for start in range(0, width, WIDE):
        cols = start + tl.arange(0, WIDE)
        numbers = tl.load(piece_ptr + row * width + cols, mask=cols < width, other=0.0)
        weights = tl.load(weights_ptr + cols, mask=cols < width, other=0.0)
        scaled = numbers[None, :] * inverses[:, None]
        codes = nearest(scaled, table_ptr, KIND, LOW, HIGH, MANTISSA, LEAST, TABLE)
        errors = numbers[None, :] - codes * scales[:, None]
        cost += tl.sum(weights[None, :] * (errors * errors), 1)
    tl.store(cost_ptr + row * count + tries, cost, mask=tries < count)
