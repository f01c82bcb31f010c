"""The loops of compensated rounding for GPUs: a program takes a row, and its columns one after the other.

The first four are twins of `round_columns`, which says what each does; as plain torch a column takes a dozen launches,
and a matrix has thousands of columns. A row's piece stays in registers; its column j is taken out by a sum over all
columns of which all others are zero.

`round_batch` and `sweep_batches` are the loops of `error_compensation` over blocks of one scale, many columns in one
launch: scales are tried, chosen and stored on the way, and between launches one matrix product spreads what the columns
lost to all others. `sweep_groups` is the loop of `weights` that moves scales and codes of one block of GGUF's; there a
program takes two rows, which share what it reads of the Hessian. Numbers of these three differ from their definition's
by the order of sums.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitplan.formats.format import Format
from bitplan.formats.gguf.layouts import Layout
from bitplan.formats.scale_rules import BasedScales
from bitplan.formats.triton_numbers import (
    FLOAT_NAMES,
    MAGIC,
    device_of,
    float_of_bits,
    flush_small,
    load_scale,
    power_of_two,
    reciprocal,
    round_bf16,
    round_e4m3_in_integers,
)

EXPONENT = tl.constexpr(0x7F800000)
COLUMNS = 64  # of a row that `weighted_cost` reads at once


def round_piece(
    piece: Tensor, factor: Tensor, steps: Tensor, offsets: Tensor, parts: Tensor, grid: Any
) -> tuple[Tensor, Tensor]:
    """This is `round_columns.round_piece`, compiled; rows of all tensors may lie apart."""
    codes, errors = (torch.empty(piece.shape, device=piece.device) for _ in range(2))
    parts = parts.to(piece.device, torch.int32)
    rows, width = piece.shape
    piece, factor, steps, offsets = (
        tensor if tensor.stride(1) == 1 else tensor.contiguous() for tensor in (piece, factor, steps, offsets)
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
    """This is `round_columns.cost_of_scales`, compiled."""
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
    """This is `round_columns.sweep_piece`, compiled."""
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
    """This is `round_columns.weighted_cost`, compiled, but for the order of the sum."""
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
    return tuple(tensor.float().contiguous() for tensor in tensors)


def table_of(grid: Any, like: Tensor) -> Tensor:
    """The grid's numbers on the device; for a grid without a table any tensor, which the kernel does not read."""
    return like if grid.table is None else _on_device(grid.table, like.device)


@functools.cache
def _on_device(table: tuple[float, ...], device: torch.device) -> Tensor:
    """A tensor of these numbers; cached, because making one from Python numbers waits for the GPU."""
    return torch.tensor(table, dtype=torch.float32, device=device)


def code_limits(grid: Any) -> dict[str, Any]:
    """The compile-time constants that the kernel function `nearest` needs for a grid."""
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
        value = tl.where(scaled > 0.0, first, first)  # as many as there are numbers
        for below in range(TABLE - 1):
            one, two = tl.load(table_ptr + below), tl.load(table_ptr + below + 1)
            value = tl.where(scaled > (one + two) * 0.5, two, value)
    else:
        inside = tl.minimum(tl.maximum(scaled, LOW), HIGH)
        if KIND == "integer":
            value = (inside + MAGIC) - MAGIC
        else:
            power = (inside.to(tl.int32, bitcast=True) & EXPONENT).to(tl.float32, bitcast=True)
            step = tl.maximum(power * MANTISSA, LEAST)
            inverse = (0x7F000000 - step.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
            value = ((inside * inverse + MAGIC) - MAGIC) * step
    return value


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


# ---- batches of columns whose blocks have one scale each -------------------------------------------------------------


BATCH = 128  # columns of one launch, where blocks are not wider
WIDEST = 128
INFINITY = tl.constexpr(float("inf"))
# Added to the bits of a float, this moves its exponent to the nearer power of two in ratio: from sqrt(2) on upwards.
TO_NEAREST_POWER = tl.constexpr(0x004AFB0C)


def storage_of(fmt: Format) -> str | None:
    """How a format's scales are stored; None where the kernels do not know it."""
    scales = fmt.scales
    if scales is None:
        return None
    if fmt.power_of_two_scales:
        return "e8m0"
    if isinstance(scales, BasedScales):
        return {torch.float8_e4m3fn: "e4m3", torch.uint8: "u8"}.get(scales.dtype)
    return FLOAT_NAMES.get(scales.dtype)


def is_width_known(width: int) -> bool:
    """Whether the kernels take blocks of so many columns."""
    return 1 < width <= WIDEST and width & (width - 1) == 0


@dataclass(frozen=True)
class BlockScales:
    """What the kernels know of a format whose blocks have one scale each.

    storage     how scales are stored: "f32" "f16" "bf16" "e8m0", or "e4m3" and "u8" times the base
    grid        numbers of codes: low, high, mantissa, least, table, is_float
    multiples   of the scale that puts a block's largest number on the largest code, which are tried
    """

    storage: str
    width: int
    grid: Any
    multiples: tuple[float, ...] = ()
    is_signed: bool = False
    base: Tensor | None = None

    @property
    def span(self) -> int:
        """How many columns the kernels round in one launch."""
        return max(BATCH, self.width)

    def constants(self) -> dict[str, Any]:
        return {
            **code_limits(self.grid),
            "SCALE": self.storage,
            "WIDTH": self.width,
            "SPAN": self.span,
            "enable_fp_fusion": False,
        }

    def base_on(self, like: Tensor) -> Tensor:
        """The base factor on the device; without one any tensor, which the kernel does not read."""
        return like if self.base is None else self.base.to(like.device, torch.float32)


def round_batch(
    left: Tensor,
    factor: Tensor,
    plain: Tensor,
    blocks: Tensor,
    start: int,
    scaled: BlockScales,
    codes: Tensor,
    scales: Tensor,
    errors: Tensor,
) -> None:
    """Round the columns [start, start + span) of [R, K] numbers in the order of `factor` [K, K].

    plain    [R, across]: the first scale that is tried for each block
    blocks   [across] int32: the block of each place in the order
    codes, scales, errors   [R, K], [R, across], [R, span]: written
    """
    rows, cols = left.shape
    count = 1 + len(scaled.multiples)
    many = triton.next_power_of_2(count)
    with device_of(left):
        _round_batch[(rows,)](
            left,
            factor,
            plain,
            blocks,
            _multiples(scaled.multiples, left.device),
            scaled.base_on(left),
            codes,
            scales,
            errors,
            start,
            min(scaled.span, cols - start) // scaled.width,
            cols,
            plain.shape[1],
            count,
            MANY=many,
            HIGH_EXPONENT=math.frexp(scaled.grid.high)[1],
            **scaled.constants(),
            num_warps=1 if many * scaled.width <= 2048 else 4,
        )


def sweep_batch(
    gradient: Tensor, codes: Tensor, scales: Tensor, hessian: Tensor, start: int, scaled: BlockScales, changes: Tensor
) -> None:
    """Improve, in place, scales and codes of columns [start, start + span); writes `changes` of values [R, span].

    gradient   [R, K]: (weight - value) @ hessian, as it is before these columns change
    """
    rows, cols = gradient.shape
    with device_of(gradient):
        _sweep_batch[(rows,)](
            gradient,
            codes,
            scales,
            hessian,
            scaled.base_on(gradient),
            table_of(scaled.grid, gradient),
            changes,
            start,
            min(scaled.span, cols - start) // scaled.width,
            cols,
            scales.shape[1],
            SIGNED=scaled.is_signed,
            **scaled.constants(),
            num_warps=1,
        )


def sweep_batches(
    gradient: Tensor, codes: Tensor, scales: Tensor, hessian: Tensor, scaled: BlockScales, *, is_last: bool
) -> None:
    """Improve, in place, all scales and codes, and keep the gradient up to date unless `is_last`."""
    cols = gradient.shape[1]
    changes = gradient.new_empty(len(gradient), scaled.span)
    for start in range(0, cols, scaled.span):
        stop = min(start + scaled.span, cols)
        sweep_batch(gradient, codes, scales, hessian, start, scaled, changes)
        others = slice(stop if is_last else 0, cols)
        gradient[:, others].addmm_(changes[:, : stop - start], hessian[start:stop, others], alpha=-1)


@functools.cache
def _multiples(multiples: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(multiples, dtype=torch.float32, device=device)


# ---- kernels of batches ----------------------------------------------------------------------------------------------


@triton.jit
def over(one, two):
    """one / two where `two` is above zero, else 0."""
    return tl.where(two > 0.0, tl.div_rn(one, tl.where(two > 0.0, two, 1.0)), 0.0)


@triton.jit
def if_better(move, rise, curve):
    """The move of a scale if it makes the error smaller, else 0."""
    return tl.where(2 * move * rise > move * move * curve, move, 0.0)


@triton.jit
def is_finite(numbers):
    return tl.abs(numbers) < INFINITY


@triton.jit
def _as_stored(wanted, base, SCALE: tl.constexpr):
    """The scales that the format would load after storing these."""
    if SCALE == "f16":
        scale = flush_small(wanted).to(tl.float16).to(tl.float32)
    elif SCALE == "bf16":
        scale = float_of_bits(round_bf16(flush_small(wanted)), "bf16")
    elif SCALE == "f32":
        scale = flush_small(wanted)
    elif SCALE == "e8m0":
        field = (wanted.to(tl.int32, bitcast=True) + TO_NEAREST_POWER) >> 23
        byte = tl.where(wanted > 0.0, tl.minimum(tl.maximum(field, 0), 254), 0)
        scale = load_scale(byte, base, "e8m0")
    else:
        steps = tl.where(base > 0.0, tl.div_rn(wanted, tl.where(wanted > 0.0, base, base)), 0.0)
        if SCALE == "e4m3":
            scale = load_scale(round_e4m3_in_integers(steps), base, "e4m3")
        else:
            steps = tl.minimum(tl.maximum(steps, 1.0), 255.0)
            steps = (steps + MAGIC) - MAGIC
            scale = flush_small(tl.where(wanted > 0.0, steps, 0.0) * base)
    return scale


@triton.jit(do_not_specialize=["pieces", "across", "count"])
def _round_batch(
    left_ptr,
    factor_ptr,
    plain_ptr,
    blocks_ptr,
    multiples_ptr,
    base_ptr,
    codes_ptr,
    scales_ptr,
    errors_ptr,
    start,
    pieces,
    cols,
    across,
    count,
    MANY: tl.constexpr,
    HIGH_EXPONENT: tl.constexpr,
    KIND: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    MANTISSA: tl.constexpr,
    LEAST: tl.constexpr,
    TABLE: tl.constexpr,
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
):
    PIECES: tl.constexpr = SPAN // WIDTH
    row = tl.program_id(0).to(tl.int64)
    span, near, tries = tl.arange(0, SPAN), tl.arange(0, WIDTH), tl.arange(0, MANY)
    inside = span < pieces * WIDTH
    corner_ptr = factor_ptr + start.to(tl.int64) * cols + start
    left = tl.load(left_ptr + row * cols + start + span, mask=inside, other=0.0)
    codes, errors = tl.zeros_like(left), tl.zeros_like(left)
    multiples = tl.load(multiples_ptr + tries - 1, mask=(tries > 0) & (tries < count), other=0.0)
    base = tl.load(base_ptr)
    for piece in range(pieces):
        first = piece * WIDTH
        own_ptr = corner_ptr + first * cols + first
        block = tl.load(blocks_ptr + start // WIDTH + piece)
        is_piece = tl.arange(0, PIECES)[:, None] == piece
        numbers = tl.sum(tl.where(is_piece, tl.reshape(left, [PIECES, WIDTH]), 0.0), 0)
        largest = tl.max(tl.abs(numbers), 0)
        if SCALE == "e8m0":
            field = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) + (1 - HIGH_EXPONENT), 0)
            unit = tl.where(largest > 0.0, power_of_two(field), 0.0)
        else:
            unit = tl.div_rn(largest, tl.where(largest > 0.0, HIGH, HIGH))
        tried = _as_stored(unit * multiples, base, SCALE)
        tried = tl.where(is_finite(tried), tried, 0.0)
        tried = tl.where(tries == 0, tl.load(plain_ptr + row * across + block), tried)
        inverses, cost = reciprocal(tried), tl.zeros_like(tried)
        remaining = tl.zeros([MANY, WIDTH], tl.float32) + numbers[None, :]
        for j in range(WIDTH):
            number = tl.sum(tl.where((near == j)[None, :], remaining, 0.0), 1)
            code = nearest(number * inverses, base_ptr, KIND, LOW, HIGH, MANTISSA, LEAST, TABLE)
            diagonal = tl.load(own_ptr + j * cols + j)
            error = tl.div_rn(number - code * tried, tl.where(tries >= 0, diagonal, diagonal))
            cost += error * error
            shares = tl.load(own_ptr + j * cols + near)
            remaining = tl.where((near > j)[None, :], remaining - error[:, None] * shares[None, :], remaining)
        cost = tl.where((cost == cost) & (tries < count), cost, INFINITY)
        scale = tl.sum(tl.where(tries == tl.argmin(cost, 0), tried, 0.0), 0)
        tl.store(scales_ptr + row * across + block, scale)
        inverse = reciprocal(scale)
        for j in range(WIDTH):
            at = first + j
            is_column = span == at
            number = tl.sum(tl.where(is_column, left, 0.0), 0)
            code = nearest(number * inverse, base_ptr, KIND, LOW, HIGH, MANTISSA, LEAST, TABLE)
            line_ptr = corner_ptr + at * cols
            error = tl.div_rn(number - code * scale, tl.load(line_ptr + at))
            shares = tl.load(line_ptr + span, mask=inside, other=0.0)
            left = tl.where(span > at, left - error * shares, left)
            codes, errors = tl.where(is_column, code, codes), tl.where(is_column, error, errors)
    tl.store(codes_ptr + row * cols + start + span, codes, mask=inside)
    tl.store(errors_ptr + row * SPAN + span, errors)


@triton.jit(do_not_specialize=["pieces", "across"])
def _sweep_batch(
    gradient_ptr,
    codes_ptr,
    scales_ptr,
    hessian_ptr,
    base_ptr,
    table_ptr,
    changes_ptr,
    start,
    pieces,
    cols,
    across,
    SIGNED: tl.constexpr,
    KIND: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    MANTISSA: tl.constexpr,
    LEAST: tl.constexpr,
    TABLE: tl.constexpr,
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    span = tl.arange(0, SPAN)
    inside = span < pieces * WIDTH
    corner_ptr = hessian_ptr + start.to(tl.int64) * cols + start
    here = row * cols + start
    slope = tl.load(gradient_ptr + here + span, mask=inside, other=0.0)
    codes = tl.load(codes_ptr + here + span, mask=inside, other=0.0)
    changes, base = tl.zeros_like(slope), tl.load(base_ptr)
    for piece in range(pieces):
        first = piece * WIDTH
        scale_ptr = scales_ptr + row * across + start // WIDTH + piece
        scale = tl.load(scale_ptr)
        way = tl.where((span >= first) & (span < first + WIDTH), codes, 0.0)
        along = tl.zeros_like(slope)
        for j in range(WIDTH):
            at = first + j
            line = tl.load(corner_ptr + at * cols + span, mask=inside, other=0.0)
            along += tl.load(codes_ptr + here + at) * line
        rise, curve = tl.sum(way * slope, 0), tl.sum(way * along, 0)
        wanted = _as_stored(scale + over(rise, curve), base, SCALE)
        usable = is_finite(wanted) if SIGNED else is_finite(wanted) & (wanted >= 0.0)
        move = if_better(tl.where(usable, wanted - scale, 0.0), rise, curve)
        scale += move
        tl.store(scale_ptr, scale)
        changes += move * way
        slope -= move * along
        inverse = reciprocal(scale)
        for j in range(WIDTH):
            at = first + j
            is_column = span == at
            line_ptr = corner_ptr + at * cols
            before = tl.sum(tl.where(is_column, codes, 0.0), 0)
            best = before * scale + tl.div_rn(tl.sum(tl.where(is_column, slope, 0.0), 0), tl.load(line_ptr + at))
            code = nearest(best * inverse, table_ptr, KIND, LOW, HIGH, MANTISSA, LEAST, TABLE)
            code = tl.where(scale == 0.0, before, code)
            change = (code - before) * scale
            slope -= change * tl.load(line_ptr + span, mask=inside, other=0.0)
            codes, changes = tl.where(is_column, code, codes), tl.where(is_column, changes + change, changes)
    tl.store(codes_ptr + here + span, codes, mask=inside)
    tl.store(changes_ptr + row * SPAN + span, changes)


# ---- blocks of GGUF's groups -----------------------------------------------------------------------------------------


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
    """Improve, in place, scales and codes of the GGUF block that begins at column `first` of [R, K] numbers.

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
    """A group's integer moved to where the error is least, and by how much the scale changes with it."""
    by = over(rise, curve)
    wanted = now + tl.where(unit != 0.0, tl.div_rn(by, tl.where(unit != 0.0, unit, 1.0)), 0.0)
    wanted = (tl.minimum(tl.maximum(wanted, LEAST), MOST) + MAGIC) - MAGIC
    move = if_better((wanted - now) * unit, rise, curve)
    return tl.where(move != 0.0, wanted, now), move


@triton.jit
def _moved_half(now, rise, curve, AT_MOST_ZERO: tl.constexpr):
    """A float16 scale moved to where the error is least, and by how much it changes."""
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
        for index in range(COUNT):
            is_group = (wide // GROUP == index)[None, :]
            is_number = (group == index)[None, :]
            along, ones = tl.zeros_like(slope), tl.zeros([WIDE], tl.float32)
            for j in range(GROUP):
                at = index * GROUP + j
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
                curve = tl.zeros_like(rise) + tl.sum(tl.where(wide // GROUP == index, ones, 0.0), 0)
                now = tl.sum(tl.where(is_number, mins, 0.0), 1)
                now, move = _moved_integer(now, dmin, rise, curve, 0.0, SCALE_HIGH)
                mins = tl.where(is_number, now[:, None], mins)
                slope -= move[:, None] * ones[None, :]
    along, low_along = tl.zeros_like(slope), tl.zeros_like(slope)
    for index in range(COUNT):
        is_number = (group == index)[None, :]
        scale = tl.sum(tl.where(is_number, scales, 0.0), 1)
        low = tl.sum(tl.where(is_number, mins, 0.0), 1)
        for j in range(GROUP):
            at = index * GROUP + j
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
    for index in range(COUNT):
        step = d * tl.sum(tl.where((group == index)[None, :], scales, 0.0), 1)
        inverse = reciprocal(step)
        for j in range(GROUP):
            at = index * GROUP + j
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
