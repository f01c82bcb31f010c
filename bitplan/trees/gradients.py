"""Gradients in three precisions, as trees use them to look for splits.

| precision | a row | codes | cost of a split search |
|---|---|---|---|
| F32 (default) | 8 bytes | float32 | two words per cell |
| I16 | 2 bytes | int8 gradient, uint8 hessian | one word per cell |
| I8 | 1 byte | 4 + 4 bits, two rows to a byte of each | one word per cell |

Structure of arrays, scales from the data every round. A gradient is `code * grad_scale`, but nobody computes that per
row: codes are summed as integers, and sums are scaled when a split is judged. F32 is summed in fixed point as well,
with units so fine that rounding is below that of float32 itself, and sums are as reproducible.

Defined: all zero (scale 0, codes 0), constant (codes at their end), zero hessians, largest float32. Refused: NaN,
infinity, hessians below zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Protocol

import numpy as np

from bitplan.base.errors import BitplanError
from bitplan.base.loops import row_pieces
from bitplan.base.loops.jit import thread_count, worthwhile_threads
from bitplan.trees.distributed.shards import ALONE, Shards, Span
from bitplan.trees.loops import gradients as trees_gradients

Array = np.ndarray[Any, Any]
PIECE = 2**16  # rows
# Nanoseconds of a row, about.
LARGEST_NS, QUANTIZE_NS = 0.5, 3.0


class TreesError(BitplanError, ValueError):
    """Data, settings or a model that boosted trees cannot work with."""


class GradientPrecision(Enum):
    """F32 unless you ask for less: quantized gradients are faster and lossy."""

    F32 = "f32"
    I16 = "i16"
    I8 = "i8"


class Gradients(Protocol):
    """One round's gradients of all rows, from which histograms are made."""

    precision: ClassVar[GradientPrecision]

    @property
    def grads(self) -> Array: ...
    @property
    def hessians(self) -> Array: ...
    @property
    def grad_scale(self) -> float: ...  # an integer sum of gradients times this is the sum
    @property
    def hess_scale(self) -> float: ...


@dataclass(frozen=True, slots=True)
class GradientsF32:
    """Full precision; the scales are units of fixed point."""

    grads: Array
    hessians: Array
    grad_scale: float
    hess_scale: float
    precision: ClassVar[GradientPrecision] = GradientPrecision.F32

    @classmethod
    def from_floats(cls, grads: Array, hess: Array, span: Span | None = None) -> GradientsF32:
        check_floats(grads, hess)
        span = span or Span(ALONE, 0, len(grads))
        return cls(grads, hess, *units(*largest(grads, hess, span.shards), span.total))


@dataclass(frozen=True, slots=True)
class GradientsI16:
    """8 + 8 bits: int8 within -127..127, uint8."""

    grads: Array
    hessians: Array
    grad_scale: float
    hess_scale: float
    precision: ClassVar[GradientPrecision] = GradientPrecision.I16

    @classmethod
    def quantize(cls, grads: Array, hess: Array, *, key: int | None = None, span: Span | None = None) -> GradientsI16:
        """Round to nearest; with a key, up or down by chance, right on average."""
        check_floats(grads, hess)
        codes = np.empty(len(grads), np.int8), np.empty(len(grads), np.uint8)
        scales = _quantize(trees_gradients.quantize_i16, grads, hess, (127, 255), key, codes, 1, span)
        return cls(*codes, *scales)


@dataclass(frozen=True, slots=True)
class GradientsI8:
    """4 + 4 bits: -7..7 and 0..15, row 2i in the low half of byte i of `grads` and `hess`."""

    grads: Array
    hessians: Array
    grad_scale: float
    hess_scale: float
    rows: int
    precision: ClassVar[GradientPrecision] = GradientPrecision.I8

    @classmethod
    def quantize(cls, grads: Array, hess: Array, *, key: int | None = None, span: Span | None = None) -> GradientsI8:
        """Round to nearest; with a key, up or down by chance, right on average."""
        check_floats(grads, hess)
        size = (len(grads) + 1) // 2
        codes = np.empty(size, np.uint8), np.empty(size, np.uint8)
        scales = _quantize(trees_gradients.quantize_i8, grads, hess, (7, 15), key, codes, 2, span)
        return cls(*codes, *scales, len(grads))


def prepare(
    grads: Array, hess: Array, precision: GradientPrecision, key: int | None, span: Span | None = None
) -> Gradients:
    """The round's float32 gradients in the precision asked for: the one place that dispatches on it.

    `span` says which of all rows these are: scales come from all of them, and a row is rounded by its number there.
    """
    if precision is GradientPrecision.I16:
        return GradientsI16.quantize(grads, hess, key=key, span=span)
    if precision is GradientPrecision.I8:
        return GradientsI8.quantize(grads, hess, key=key, span=span)
    return GradientsF32.from_floats(grads, hess, span)


def check_floats(grads: Array, hess: Array) -> None:
    """Refuse what loops would read as other numbers, or past their end."""
    for name, part in (("grads", grads), ("hess", hess)):
        if not isinstance(part, np.ndarray):
            raise TreesError(f"{name}: expected a numpy array of float32, got {type(part).__name__}")
        if part.dtype != np.float32 or part.ndim != 1 or not part.flags.c_contiguous:
            lies = "" if part.flags.c_contiguous else ", with gaps"
            raise TreesError(
                f"{name}: expected float32 numbers in one dimension, one after the other, got {part.dtype} of shape "
                f"{part.shape}{lies}; numpy.ascontiguousarray({name}, numpy.float32) makes them of one dimension"
            )
    if len(grads) != len(hess):
        raise TreesError(f"hess: expected {len(grads)} numbers, as grads has, got {len(hess)}")


def largest(grads: Array, hess: Array, shards: Shards = ALONE) -> tuple[float, float]:
    """Largest |gradient| and hessian of all processes; refuses what has no scale."""
    piece = row_pieces.piece_rows(len(grads), row_pieces.threads_for(len(grads), LARGEST_NS))
    found = np.zeros((max(-(-len(grads) // piece), 1), 3), np.int32)
    bits = (row_pieces.Cut(part.view(np.int32)) for part in (grads, hess))
    row_pieces.run(trees_gradients.find_largest, len(grads), LARGEST_NS, *bits, row_pieces.First(), piece, found)
    here = found[:, :2].max(axis=0, initial=0).view(np.float32).astype(np.float64)
    if not np.all(here < np.inf) or np.any(found[:, 2]):
        row = int(np.argmax(~(np.isfinite(grads) & np.isfinite(hess) & (hess >= 0))))
        raise TreesError(
            f"gradients: row {row} has gradient {grads[row]} and hessian {hess[row]}, expected finite float32 and "
            "a hessian of at least 0; look at the targets and weights of that row, at the learning rate, or at the "
            "custom objective"
        )
    top_grad, top_hess = shards.top(here, "largest gradient and hessian")
    return float(top_grad), float(top_hess)


def units(top_grad: float, top_hess: float, rows: int) -> tuple[float, float]:
    """Powers of two: sums of `rows` multiples fit 62 bits, and 31 bits of a hessian leave room for the row count."""
    bits = min(46, 61 - max(rows, 1).bit_length())
    return _unit(top_grad, bits), _unit(top_hess, 31)


def _unit(top: float, bits: int) -> float:
    return math.ldexp(1.0, math.frexp(top)[1] - bits) if top else 1.0


def pieces(count: int, row_ns: float) -> list[slice]:
    """A part of the rows for each thread that pays, if a row takes `row_ns`. Even: I8 puts two rows into a byte."""
    parts = min(thread_count(), worthwhile_threads(count * row_ns))
    step = max(-(-count // (2 * parts)) * 2, 1)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _quantize(
    kernel: Any,
    grads: Array,
    hess: Array,
    ends: tuple[int, int],
    key: int | None,
    codes: tuple[Array, Array],
    share: int,
    span: Span | None,
) -> tuple[float, float]:
    span = span or Span(ALONE, 0, len(grads))
    top_grad, top_hess = largest(grads, hess, span.shards)
    scales = top_grad / ends[0], top_hess / ends[1]
    per_grad, per_hess = (ends[0] / top_grad if top_grad else 0.0), (ends[1] / top_hess if top_hess else 0.0)
    seed = np.uint64(key or 0)

    at = [row_pieces.Cut(part, share=share) for part in codes]
    rounding = row_pieces.First(span.first), per_grad, per_hess, seed, key is not None
    cuts = row_pieces.Cut(grads), row_pieces.Cut(hess)
    row_pieces.run(kernel, len(grads), QUANTIZE_NS, *cuts, *rounding, *at)
    return scales
