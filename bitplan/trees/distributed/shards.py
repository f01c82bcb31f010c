"""Rows that lie in several processes: what training must ask the others for, and how sums come out the same.

`boost`, `grow` and the objectives work on the rows of one process. Where a number depends on all rows they ask their
`Shards`: integers are added, maxima are taken, arrays are laid one after the other in the order of the processes.
None of these depends on how the rows are divided, so neither do the trees. `ALONE` is one process that has every row:
nothing is sent, and the same code gives the same numbers. `distributed.Ranks` asks real processes.

Floats are never added as floats across processes. `sum_exactly` turns them into integers twice: multiples of a unit
near the largest one, and what is left as multiples of a much finer unit.

Medians and quantiles of groups of rows are the same however the rows are divided among processes.

One process sorts. Several look for a quantile byte by byte: each counts how many of its numbers begin with which byte,
counts are added, and the byte in which it lies is known to all; eight rounds give all 64 bits. Nobody sends
numbers, only 256 counts a group, and the result is a number that some row has (or between two).

Weights become integers first (`whole_weights`), so that a share of the weight is reached at the same row everywhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from bitplan.base.errors import BitplanError
from bitplan.base.loops.jit import on_threads
from bitplan.base.records import parse_json
from bitplan.trees.loops import gradients as loops

Array = np.ndarray[Any, Any]
SUM_ROWS = 2**17
LARGE_POWER = 900  # of two: with less, and 61 bits more, float64 are normal numbers
MAX_ROWS = 2**48  # of all processes: what no table has


class TreesError(BitplanError, ValueError):
    """Data, settings or a model that boosted trees cannot work with."""


class ProcessLostError(BitplanError, RuntimeError):
    """Another process of a distributed fit failed, died or hangs; this one has stopped too."""


class Shards(Protocol):
    """The processes that fit one model together: sums, maxima and arrays of all; `label` names the step in errors."""

    @property
    def rank(self) -> int: ...
    @property
    def count(self) -> int: ...
    def add(self, integers: Array, label: str) -> Array: ...  # element by element
    def top(self, numbers: Array, label: str) -> Array: ...  # the largest, element by element
    def gather(self, part: Array, label: str) -> list[Array]: ...  # flat arrays of one type, of any length
    def sent_for(self, label: str) -> None: ...  # what was sent since the last call was for this


class _Alone:
    """The `Shards` of a fit in one process, which has all rows."""

    rank, count = 0, 1

    def add(self, integers: Array, label: str) -> Array:
        return integers

    def top(self, numbers: Array, label: str) -> Array:
        return numbers

    def gather(self, part: Array, label: str) -> list[Array]:
        return [part]

    def sent_for(self, label: str) -> None:
        """Do nothing: a single process sends nothing."""


ALONE: Shards = _Alone()


@dataclass(frozen=True, slots=True)
class Span:
    """Which of all rows are this process's: `total` rows in all, of which the first here is number `first`."""

    shards: Shards
    first: int
    total: int

    @classmethod
    def of(cls, rows: int, shards: Shards) -> Span:
        sizes = gather_numbers(rows, "number of rows", shards)
        if min(sizes) < 0 or sum(sizes) >= MAX_ROWS:
            raise BitplanError(
                f"distributed fit: expected a number of rows from every process, got {sizes!r:.80}; run the same "
                "version of bitplan everywhere"
            )
        return cls(shards, sum(sizes[: shards.rank]), sum(sizes))


def gather_numbers(number: int, label: str, shards: Shards) -> list[int]:
    """Gather an int64 of each process, in their order."""
    parts = shards.gather(np.array([number], np.int64), label)
    wrong = [rank for rank, part in enumerate(parts) if len(part) != 1]
    if wrong:
        raise BitplanError(
            f"distributed fit, in step {label!r}: expected one number from rank {wrong[0]}, "
            f"got {len(parts[wrong[0]])}; run the same version of bitplan everywhere"
        )
    return [int(part[0]) for part in parts]


def gather_json(document: Any, label: str, shards: Shards) -> list[Any]:
    """Gather a document of each process, in their order."""
    text = np.frombuffer(json.dumps(document).encode(), np.uint8)
    return [
        parse_json(part.tobytes(), where=f"distributed fit, in step {label!r}: document of rank {rank}")
        for rank, part in enumerate(shards.gather(text, label))
    ]


def fixed_point(numbers: Array, top: float, bits: int) -> Array:
    """Multiples of 2^-bits of the power of two above `top`, as int64; numbers are finite and at most `top`."""
    return np.rint(np.ldexp(numbers, bits - math.frexp(top)[1])).astype(np.int64)


def sum_exactly(parts: Sequence[Array], shards: Shards) -> list[float]:
    """The sum of each array over all processes, the same however rows are divided; infinity if a number is not finite.

    Of a number, about 100 bits below the largest of its array count (30 less at a billion rows): where float64 sums
    are exact, so are these.
    """
    tops = np.array([_largest(part) for part in parts])
    tops = shards.top(tops, "largest terms of a sum")
    sizes = shards.add(np.array([len(part) for part in parts], np.int64), "terms of a sum")
    limbs = np.zeros((len(parts), 2), np.int64)
    widths = [61 - int(size).bit_length() for size in sizes]  # so that a sum stays below 2^61
    for index, (part, top, bits) in enumerate(zip(parts, tops, widths, strict=True)):
        if not 0 < top < math.inf:
            continue
        limbs[index] = sum(_limbs(part, float(top), bits), start=limbs[index])
    limbs = shards.add(limbs, "sums")
    return [
        _joined(int(coarse), int(fine), float(top), bits)
        for (coarse, fine), top, bits in zip(limbs, tops, widths, strict=True)
    ]


def _limbs(part: Array, top: float, bits: int) -> list[Array]:
    """Sum floats as two integers, for each piece of `part`: an array [coarse sum, fine sum] a piece.

    Coarse sums count in units of which numbers up to `top` have `bits` bits; fine sums add up what rounding to those
    units left. Pieces keep a long array from being copied as a whole.
    """
    power = bits - math.frexp(top)[1]

    def add_up(start: int) -> Array:
        piece = np.ascontiguousarray(part[start : start + SUM_ROWS], np.float64)
        return np.array(loops.sum_limbs(piece, power, bits, abs(power) > LARGE_POWER))

    return on_threads(add_up, range(0, len(part), SUM_ROWS))


def average(numbers: Array, weights: Array, shards: Shards) -> float:
    """The mean over all processes; weights: one a number, or an empty array."""
    if len(weights):
        with np.errstate(over="ignore"):  # an infinite term makes the sum infinite, which callers refuse by row
            terms = numbers * weights
        total, weight = sum_exactly([terms, weights], shards)
    else:
        ones = np.broadcast_to(np.float64(1), len(numbers))  # a process without rows has no weights, others may have
        total, weight = sum_exactly([numbers, ones], shards)
    return total / weight


def _largest(numbers: Array) -> float:
    top = float(np.maximum(numbers.max(initial=0.0), -numbers.min(initial=0.0)))  # without a second array
    return math.inf if math.isnan(top) else top


def _joined(coarse: int, fine: int, top: float, bits: int) -> float:
    if not top < math.inf:
        return math.inf
    if not top:
        return 0.0
    total = (coarse << bits) + fine
    try:
        return math.ldexp(float(total), math.frexp(top)[1] - 2 * bits)
    except OverflowError:  # terms that are finite, and a sum that is not
        return math.copysign(math.inf, total)


# ---- medians ---------------------------------------------------------------------------------------------------------


SIGN = np.uint64(1 << 63)
STEP = "median, byte by byte"


def find_medians(numbers: Array, weights: Array, groups: Sequence[Array], shards: Shards) -> Array:
    """The median of each group of rows; with weights, the first number at which half the weight is reached."""
    return find_quantiles(numbers, weights, groups, 0.5, shards)


def find_quantiles(numbers: Array, weights: Array, groups: Sequence[Array], share: float, shards: Shards) -> Array:
    """Quantiles of groups of rows: between two numbers as numpy has it; with weights, a number that is there."""
    integers = whole_weights(weights, shards)
    if shards.count == 1:
        return np.array(
            [sorted_quantile(numbers[rows], integers[rows] if len(integers) else integers, share) for rows in groups]
        )
    rows = np.concatenate([np.empty(0, np.int64), *groups]).astype(np.int64)
    group = np.repeat(np.arange(len(groups)), [len(part) for part in groups])
    keys = _ordered(numbers[rows])
    is_weighted = bool(shards.top(np.array([float(len(integers) > 0)]), "use of weights")[0])  # an empty shard has none
    row_weights = integers[rows] if len(integers) else np.ones(len(rows), np.int64)
    totals = np.zeros(len(groups), np.int64)
    np.add.at(totals, group, row_weights)
    totals = shards.add(totals, "weight of each group")
    if is_weighted:
        return _select(keys, group, row_weights, _weight_below(totals, share), shards)
    position = (totals - 1) * share
    below = np.floor(position).astype(np.int64)
    lower = _select(keys, group, row_weights, below + 1, shards)
    upper = _select(keys, group, row_weights, np.minimum(below + 2, totals), shards)
    return _between(lower, upper, position - below)


def sorted_quantile(numbers: Array, weights: Array, share: float = 0.5) -> float:
    """The quantile of one process's numbers; weights are integers, or none."""
    if not len(weights):
        position = (len(numbers) - 1) * share
        below = math.floor(position)
        above = min(below + 1, len(numbers) - 1)
        ordered = np.partition(numbers, [below, above])
        return float(_between(ordered[below], ordered[above], np.array(position - below)))
    order = np.argsort(numbers, kind="stable")
    reached = np.cumsum(weights[order])
    return float(numbers[order][np.searchsorted(reached, _weight_below(reached[-1], share))])


def _weight_below(totals: Array, share: float) -> Array:
    """The integer weight of each group at which this share of it is reached."""
    if share == 0.5:
        return (totals + 1) // 2
    return np.clip(np.ceil(totals * share).astype(np.int64), 1, totals)


def _between(lower: Array, upper: Array, part: Array) -> Array:
    """Interpolate elementwise: lower + part * (upper - lower); the mean of both where `part` is 0.5."""
    inside = np.where(part == 0.5, (lower + upper) / 2, lower + (upper - lower) * part)
    return np.where((lower == upper) | (part == 0.0), lower, inside)


def whole_weights(weights: Array, shards: Shards) -> Array:
    """Weights as multiples of a unit so small that the sum of all of them just fits an int64."""
    top = float(shards.top(np.array([weights.max(initial=0.0)]), "largest weight")[0])
    count = int(shards.add(np.array([len(weights)], np.int64), "number of weights")[0])
    if not len(weights) or not top:
        return weights.astype(np.int64)
    return fixed_point(weights, top, 61 - count.bit_length())


def _ordered(numbers: Array) -> Array:
    """Floats as uint64 in the same order: of those below zero all bits are turned, of the others the sign."""
    bits = (numbers + 0.0).view(np.uint64)  # -0.0 becomes 0.0
    return np.where(bits & SIGN, ~bits, bits | SIGN)


def _select(keys: Array, group: Array, weights: Array, goals: Array, shards: Shards) -> Array:
    """The smallest number of each group at which `goals` of its weight is reached."""
    groups, begin = len(goals), np.zeros(len(goals), np.uint64)
    for shift in range(56, -1, -8):
        table = np.zeros(groups * 256, np.int64)
        byte = (keys >> np.uint64(shift) & np.uint64(255)).astype(np.int64)
        np.add.at(table, group * 256 + byte, weights)
        reached = np.cumsum(shards.add(table, STEP).reshape(groups, 256), axis=1)
        chosen = np.argmax(reached >= goals[:, None], axis=1)
        below = np.where(chosen > 0, reached[np.arange(groups), chosen - 1], 0)
        goals, begin = goals - below, begin << np.uint64(8) | chosen.astype(np.uint64)
        within = byte == chosen[group]
        keys, group, weights = keys[within], group[within], weights[within]
    return np.where(begin & SIGN, begin ^ SIGN, ~begin).view(np.float64)
