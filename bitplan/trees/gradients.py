"""Gradients in three precisions, as trees use them to look for splits.

| precision | gradient, hessian | cost of a split search |
|---|---|---|
| F32 (default) | float32 | two words per cell |
| I16 | codes within -127..127, 0..255 | one word per cell |
| I8 | codes within -7..7, 0..15 | one word per cell |

Scales come from the data every round, and a row is rounded when it becomes a tree's entry (`loops.histogram`). A
gradient is `code * grad_scale`, but nobody computes that per row: codes are summed as integers, and sums are scaled
when a split is judged. F32 is summed in fixed point as well, with units so fine that rounding is below that of float32
itself, and sums are as reproducible.

Few rows do not decide a scale. Where no more than `FAR_ROWS` of them, and one in 64, are within a quarter of the
largest, those *far* rows have codes beyond the ends, up to 16 bits, and the others the codes that they would have
without them. What far rows add is bounded, so that no sum of 65535 rows leaves its 24 bits (`FAR_SUMS`).

Defined: all zero (scale 0, codes 0), constant (codes at their end), zero hessians, largest float32. Refused: NaN,
infinity, hessians below zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Protocol

import numpy as np

from bitplan.base.loops import row_pieces
from bitplan.trees.distributed.shards import ALONE, Shards, Span
from bitplan.trees.distributed.shards import TreesError as TreesError  # all parts of trees raise it
from bitplan.trees.loops import gradients as trees_gradients

Array = np.ndarray[Any, Any]
NO_WEIGHTS = np.empty(0)  # of rows that all count once
PIECE = 2**16  # rows
LARGEST_NS = 0.5  # of a row, about
MOST_CODES = 32767, 65535  # that an entry holds
FAR_ROWS = 256
# What the codes of far rows, gradients and hessians, may add up to beyond the ends: with 65535 rows at the ends of I16
# they stay below 2^23 and 2^24.
FAR_SUMS = 65_024, 65_280
FEWEST = 2.0**-100  # a largest number below this has a plain scale: a quarter of it may be none of float32


class GradientPrecision(Enum):
    """F32 unless you ask for less: quantized gradients are faster and lossy."""

    F32 = "f32"
    I16 = "i16"
    I8 = "i8"


@dataclass(frozen=True, slots=True)
class Gradients:
    """One round's float32 gradients and hessians of all rows, and how they are summed: an integer sum times the scale
    is the sum. `tops` are the largest; without a `key` codes are rounded to nearest, else by chance, by the key and
    the row's number, which for the first row is `first`. `far`: whether codes go beyond their ends.
    """

    grads: Array
    hessians: Array
    grad_scale: float
    hess_scale: float
    tops: tuple[float, float] = (0.0, 0.0)
    key: int | None = None
    first: int = 0
    far: bool = False
    precision: ClassVar[GradientPrecision]


class GradientsF32(Gradients):
    """Gradients in full precision: sums are fixed-point multiples of the two scales."""

    __slots__ = ()
    precision = GradientPrecision.F32

    @classmethod
    def from_floats(cls, grads: Array, hess: Array, span: Span | None = None) -> GradientsF32:
        check_floats(grads, hess)
        span = span or Span(ALONE, 0, len(grads))
        tops = largest(grads, hess, span.shards)
        return cls(grads, hess, *units(*tops, span.total), tops)


class GradientsI16(Gradients):
    """Gradients and hessians rounded to codes of 8 bits each."""

    __slots__ = ()
    precision, ends = GradientPrecision.I16, (127, 255)

    @classmethod
    def quantize(cls, grads: Array, hess: Array, *, key: int | None = None, span: Span | None = None) -> Gradients:
        """Round to nearest; with a key, up or down by chance, right on average."""
        check_floats(grads, hess)
        span = span or Span(ALONE, 0, len(grads))
        tops = largest(grads, hess, span.shards)
        few = few_of(span.total)
        counts = _count_beyond(grads, hess, tops, span.shards)
        scales = [
            top / end if count > few else _find_scale(part, top, end, far, few, span.shards)
            for part, top, end, far, count in zip((grads, hess), tops, cls.ends, FAR_SUMS, counts, strict=True)
        ]
        is_far = scales[0] < tops[0] / cls.ends[0] or scales[1] < tops[1] / cls.ends[1]
        return cls(grads, hess, scales[0], scales[1], tops, key, span.first, is_far)


class GradientsI8(GradientsI16):
    """Gradients and hessians rounded to codes of 4 bits each."""

    __slots__ = ()
    precision, ends = GradientPrecision.I8, (7, 15)


QUANTIZED: dict[GradientPrecision, type[GradientsI16]] = {kind.precision: kind for kind in (GradientsI16, GradientsI8)}


def prepare(
    grads: Array, hess: Array, precision: GradientPrecision, key: int | None, span: Span | None = None
) -> Gradients:
    """The round's float32 gradients in the precision asked for: the one place that dispatches on it.

    `span` says which of all rows these are: scales come from all of them, and a row is rounded by its number there.
    """
    if precision is GradientPrecision.F32:
        return GradientsF32.from_floats(grads, hess, span)
    return QUANTIZED[precision].quantize(grads, hess, key=key, span=span)


def check_floats(grads: Array, hess: Array) -> None:
    """Refuse what loops would read as other numbers, or past their end."""
    for name, part in (("grads", grads), ("hess", hess)):
        if not isinstance(part, np.ndarray):
            raise TreesError(f"{name}: expected a numpy array of float32, got {type(part).__name__}")
        if part.dtype != np.float32 or part.ndim != 1 or not part.flags.c_contiguous:
            lies = "" if part.flags.c_contiguous else ", with gaps"
            raise TreesError(
                f"{name}: expected float32 numbers in one dimension, one after the other, got {part.dtype} of shape "
                f"{part.shape}{lies}; numpy.ravel({name}).astype(numpy.float32) gives them so"
            )
    if len(grads) != len(hess):
        raise TreesError(f"hess: expected {len(grads)} numbers, as grads has, got {len(hess)}")


def largest(grads: Array, hess: Array, shards: Shards = ALONE) -> tuple[float, float]:
    """Largest |gradient| and hessian of all processes; refuses what has no scale."""
    tops = _of_pieces(trees_gradients.find_largest, grads, hess, np.int32).max(axis=0)
    top_grad, top_hess = tops[:2].view(np.float32).tolist()
    if tops[2] or not (top_grad < math.inf and top_hess < math.inf):
        row = int(np.argmax(~(np.isfinite(grads) & np.isfinite(hess) & (hess >= 0))))
        raise TreesError(
            f"gradients: row {row} has gradient {grads[row]} and hessian {hess[row]}, expected finite float32 and "
            "a hessian of at least 0; look at the targets and weights of that row, at the learning rate, or at the "
            "custom objective"
        )
    if shards.count == 1:
        return top_grad, top_hess
    top_grad, top_hess = shards.top(np.array([top_grad, top_hess]), "largest gradient and hessian").tolist()
    return top_grad, top_hess


def _of_pieces(loop: Any, grads: Array, hess: Array, kind: type, *more: Any) -> Array:
    """Run a compiled loop over pieces of gradients and hessians, as int32 bits; returns its results, a row a piece."""
    piece = row_pieces.piece_rows(len(grads), row_pieces.threads_for(len(grads), LARGEST_NS))
    results: Array = np.zeros((max(-(-len(grads) // piece), 1), 3), kind)
    bits = row_pieces.Cut(grads.view(np.int32)), row_pieces.Cut(hess.view(np.int32))
    row_pieces.run(loop, len(grads), LARGEST_NS, *bits, row_pieces.First(), piece, *more, results)
    return results


def units(top_grad: float, top_hess: float, rows: int) -> tuple[float, float]:
    """Powers of two: sums of `rows` multiples fit 62 bits, and 31 bits of a hessian leave room for the row count."""
    bits = min(46, 61 - max(rows, 1).bit_length())
    return _unit(top_grad, bits), _unit(top_hess, 31)


def _unit(top: float, bits: int) -> float:
    return math.ldexp(1.0, math.frexp(top)[1] - bits) if top else 1.0


# ---- scales that few rows do not decide ------------------------------------------------------------------------------


def few_of(rows: int) -> int:
    """How many of `rows` rows may have gradients beyond the range of a scale's codes."""
    return min(FAR_ROWS, rows // 64)


def _count_beyond(grads: Array, hess: Array, tops: tuple[float, float], shards: Shards) -> tuple[int, int]:
    """How many gradients and hessians of all processes exceed a quarter of the largest; 0, 0 for few rows."""
    if shards.count == 1 and row_pieces.threads_for(len(grads), LARGEST_NS) == 1:
        return 0, 0
    limits = (np.array(tops, np.float32) / np.float32(4)).view(np.int32).tolist()
    counts = _of_pieces(trees_gradients.count_beyond, grads, hess, np.int64, *limits)[:, :2]
    of_grads, of_hess = shards.add(counts.sum(axis=0), "rows near the largest").tolist()
    return of_grads, of_hess


def _find_scale(numbers: Array, top: float, end: int, far: int, few: int, shards: Shards) -> float:
    """Find the `far_scale` of numbers in memory."""
    if shards.count > 1:
        return far_scale(_Magnitudes(numbers, shards), top, end, far, few)
    ordered, scale = np.empty(few, np.float32), np.empty(1)
    trees_gradients.find_scale(numbers, top, end, MOST_CODES[0], FEWEST, far, few, ordered, scale)
    return float(scale[0])


class Magnitudes(Protocol):
    """Absolute values of gradients or hessians of all processes, wherever they lie."""

    def count(self, bound: float) -> int: ...  # how many are beyond
    def beyond(self, bound: float) -> Array: ...  # those, in any order


class _Magnitudes:
    def __init__(self, numbers: Array, shards: Shards) -> None:
        self._sizes, self._shards = np.abs(numbers), shards

    def count(self, bound: float) -> int:
        count = int(np.count_nonzero(self._sizes > np.float32(bound)))
        if self._shards.count == 1:
            return count
        return int(self._shards.add(np.array([count], np.int64), "rows beyond a bound")[0])

    def beyond(self, bound: float) -> Array:
        return np.concatenate(self._shards.gather(self._sizes[self._sizes > np.float32(bound)], "far rows"))


def far_scale(sizes: Magnitudes, top: float, end: int, far: int, few: int) -> float:
    """The size of a code: that of the largest, `top`, unless at most `few` numbers are beyond a quarter of it.

    Then the others end at `end`, far ones at 16 bits, and what the largest j numbers add up to beyond their ends, with
    a code each for rounding up, is at most `far`.
    """
    if not (few and top > FEWEST) or sizes.count(top / 4) > few:
        return top / end
    most, bound = MOST_CODES[0], top / 4
    while bound / end > top / most and sizes.count(bound / 4) <= few:
        bound /= 4
    ordered = np.sort(sizes.beyond(bound).astype(np.float64))[::-1]
    least = np.cumsum(ordered) / (far + (end - 1) * np.arange(1, len(ordered) + 1))
    return float(max(bound / end, top / most, least.max()))
