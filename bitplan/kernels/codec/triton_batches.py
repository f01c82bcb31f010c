"""Compensated rounding on GPUs, many columns in one launch: scales are tried, chosen and stored on the way.

A program takes a row, and its columns one after the other; between launches one matrix product spreads what
they lost to all other columns. `bitplan.store.rounding` says what is computed: `round_batch` and `sweep_batch` are the
loops of `error_compensation` over blocks of one scale; `triton_group_sweep` has that of GGUF's blocks.
Numbers differ from theirs by the order of sums.
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
from bitplan.formats.scales.rules import BasedScales
from bitplan.kernels.base.numbers import (
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
from bitplan.kernels.codec.triton_rounding import code_limits, nearest, table_of

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
        """Columns of a batch."""
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
        """The base factor, or a number that is not read."""
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
    """Better scales and codes in the columns [start, start + span), where they are; `changes` [R, span] of the values.

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
    """Better scales and codes in all columns, where they are. The gradient follows; after the last sweep it is no more
    asked for.
    """
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


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def over(one, two):
    """one / two where `two` is above zero, else 0."""
    return tl.where(two > 0.0, tl.div_rn(one, tl.where(two > 0.0, two, 1.0)), 0.0)


@triton.jit
def if_better(move, rise, curve):
    """The move where the error becomes smaller, else none."""
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
