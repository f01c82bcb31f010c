"""Objectives of boosted trees: gradients, a starting score, a loss for early stopping.

A raw score is what trees add up to; `mean` turns it into what the user asked for. `renew` gives the leaf values of an
objective whose best leaf is not a Newton step (the median of absolute errors). Starts, losses and renewed leaves are
those of the rows of all processes, and do not depend on how these are divided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from bitplan.kernels.base.row_pieces import Cut
from bitplan.kernels.base.row_pieces import run as run_pieces
from bitplan.trees.distributed.medians import find_medians
from bitplan.trees.distributed.shards import ALONE, Array, Shards, average, sum_exactly
from bitplan.trees.gradients import TreesError
from bitplan.trees.loops import gradients as trees_gradients

GRADIENT_NS = 8.0  # of a row and an output, about
POISSON_CAUTION = math.exp(0.7)  # LightGBM's: a hessian larger than the real one, against steps that overshoot
Leaves = Sequence[Array]  # the rows of each
CustomObjective = Callable[[Array, Array], tuple[Any, Any]]


class Objective(Protocol):
    name: str
    outputs: int  # trees a round

    def start(self, y: Array, weights: Array, shards: Shards = ALONE) -> Array: ...
    def gradients(self, y: Array, scores: Array, weights: Array, grads: Array, hess: Array) -> None: ...
    def mean(self, scores: Array) -> Array: ...
    def loss(self, y: Array, scores: Array, weights: Array, shards: Shards = ALONE) -> float: ...
    def renew(self, y: Array, scores: Array, weights: Array, leaves: Leaves, shards: Shards) -> Array | None: ...


class OneScore:
    """Scores (rows, 1); grads and hess (1, rows)."""

    name: str
    outputs = 1
    _kernel: Any
    _numbers: tuple[float, ...] = ()  # what the kernel takes beside rows

    def gradients(self, y: Array, scores: Array, weights: Array, grads: Array, hess: Array) -> None:
        parts = y, scores[:, 0], weights, grads[0], hess[0]
        cut = [Cut(part) if len(part) else part for part in parts]
        run_pieces(self._kernel, len(y), GRADIENT_NS, *cut, *self._numbers)

    def mean(self, scores: Array) -> Array:
        return scores[:, 0]

    def renew(self, y: Array, scores: Array, weights: Array, leaves: Leaves, shards: Shards) -> Array | None:
        return None


def refuse_targets_outside(y: Array, expected: str, shards: Shards, *, above_zero: bool = False) -> None:
    """Refuse targets below zero, or at zero (`above_zero`), or all of them zero."""
    ends = np.array([-y.min(initial=np.inf), y.max(initial=-np.inf)])
    below, most = shards.top(ends, "smallest and largest target")
    if below > 0 or not most > 0 or (above_zero and below >= 0):
        raise TreesError(f"y: {expected}, got values from {-below} to {most}; choose another objective")


class SquaredError(OneScore):
    name = "squared_error"
    _kernel = staticmethod(trees_gradients.squared_error)

    def start(self, y: Array, weights: Array, shards: Shards = ALONE) -> Array:
        return np.array([average(y, weights, shards)])

    def loss(self, y: Array, scores: Array, weights: Array, shards: Shards = ALONE) -> float:
        return average((scores[:, 0] - y) ** 2, weights, shards)


class AbsoluteError(OneScore):
    name = "absolute_error"
    _kernel = staticmethod(trees_gradients.absolute_error)

    def start(self, y: Array, weights: Array, shards: Shards = ALONE) -> Array:
        return find_medians(y, weights, [np.arange(len(y))], shards)

    def loss(self, y: Array, scores: Array, weights: Array, shards: Shards = ALONE) -> float:
        return average(np.abs(scores[:, 0] - y), weights, shards)

    def renew(self, y: Array, scores: Array, weights: Array, leaves: Leaves, shards: Shards) -> Array | None:
        return find_medians(y - scores[:, 0], weights, leaves, shards)


class LogMean(OneScore):
    """Raw scores are logarithms of means."""

    def start(self, y: Array, weights: Array, shards: Shards = ALONE) -> Array:
        return np.array([math.log(average(y, weights, shards))])

    def mean(self, scores: Array) -> Array:
        return np.exp(scores[:, 0])


class Poisson(LogMean):
    name = "poisson"
    _kernel, _numbers = staticmethod(trees_gradients.poisson), (POISSON_CAUTION,)

    def start(self, y: Array, weights: Array, shards: Shards = ALONE) -> Array:
        refuse_targets_outside(y, "the Poisson objective expects counts of at least 0 and one above 0", shards)
        return super().start(y, weights, shards)

    def loss(self, y: Array, scores: Array, weights: Array, shards: Shards = ALONE) -> float:
        score: Array = scores[:, 0]
        expected: Array = np.exp(score)
        explained: Array = y * score
        return average(expected - explained, weights, shards)


class Binary(OneScore):
    """y is 0 or 1."""

    name = "binary"
    _kernel = staticmethod(trees_gradients.binary)

    def start(self, y: Array, weights: Array, shards: Shards = ALONE) -> Array:
        share = min(max(average(y, weights, shards), 1e-15), 1 - 1e-15)
        return np.array([math.log(share / (1 - share))])

    def mean(self, scores: Array) -> Array:
        return 1.0 / (1.0 + np.exp(-scores[:, 0]))

    def loss(self, y: Array, scores: Array, weights: Array, shards: Shards = ALONE) -> float:
        score: Array = scores[:, 0]
        both: Array = np.logaddexp(0.0, score)
        explained: Array = y * score
        return average(both - explained, weights, shards)


class Multiclass:
    """y is 0 .. classes - 1; scores (rows, classes), grads and hess (classes, rows)."""

    name = "multiclass"

    def __init__(self, classes: int) -> None:
        self.outputs = classes

    def start(self, y: Array, weights: Array, shards: Shards = ALONE) -> Array:
        each = weights if len(weights) else np.ones(len(y))
        counts = np.array(sum_exactly([each[y == place] for place in range(self.outputs)], shards))
        shares: Array = counts / counts.sum()
        return np.log(np.maximum(shares, 1e-15))

    def gradients(self, y: Array, scores: Array, weights: Array, grads: Array, hess: Array) -> None:
        parts = [Cut(part) if len(part) else part for part in (y, scores, weights)]
        row_ns = GRADIENT_NS * self.outputs
        run_pieces(trees_gradients.softmax, len(y), row_ns, *parts, Cut(grads, axis=1), Cut(hess, axis=1))

    def mean(self, scores: Array) -> Array:
        powers: Array = np.exp(scores - scores.max(axis=1, keepdims=True))
        powers /= powers.sum(axis=1, keepdims=True)
        return powers

    def loss(self, y: Array, scores: Array, weights: Array, shards: Shards = ALONE) -> float:
        chosen = np.take_along_axis(self.mean(scores), y.astype(np.int64)[:, None], axis=1)[:, 0]
        return average(-np.log(np.maximum(chosen, 1e-300)), weights, shards)

    def renew(self, y: Array, scores: Array, weights: Array, leaves: Leaves, shards: Shards) -> Array | None:
        return None


class Custom(OneScore):
    """The user's function of (y, raw scores), which returns gradients and hessians; weights multiply both."""

    name = "custom"

    def __init__(self, function: CustomObjective) -> None:
        self._function = function

    def start(self, y: Array, weights: Array, shards: Shards = ALONE) -> Array:
        return np.zeros(1)

    def gradients(self, y: Array, scores: Array, weights: Array, grads: Array, hess: Array) -> None:
        if not len(y):  # a process without rows
            return
        returned = self._function(y, scores[:, 0].copy())
        if not (
            isinstance(returned, tuple) and len(returned) == 2 and all(np.shape(part) == y.shape for part in returned)
        ):
            raise TreesError(
                f"custom objective: expected (gradients, hessians), two arrays of {len(y)} numbers, "
                f"got {returned!r:.80}"
            )
        factor = weights if len(weights) else 1.0
        with np.errstate(over="ignore"):  # what becomes infinite is refused by row, in `largest`
            grads[0] = np.asarray(returned[0]) * factor
            hess[0] = np.asarray(returned[1]) * factor

    def loss(self, y: Array, scores: Array, weights: Array, shards: Shards = ALONE) -> float:
        raise TreesError("early stopping: a custom objective has no loss to watch; set early_stopping_rounds=None")
