"""What a model of boosted trees is fitted to: gradients, a starting score, a loss for early stopping.

A raw score is what trees add up to; `mean` turns it into what the user asked for. `renew` gives the leaf values of an
objective whose best leaf is not a Newton step (the median of absolute errors).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from bitplan.kernels import trees_gradients
from bitplan.kernels.jit import on_threads
from bitplan.trees.gradients import Array, TreesError, pieces

POISSON_CAUTION = math.exp(0.7)  # LightGBM's: a hessian larger than the real one, against steps that overshoot
CustomObjective = Callable[[Array, Array], tuple[Any, Any]]


class Objective(Protocol):
    name: str
    outputs: int  # trees a round

    def start(self, y: Array, weights: Array) -> Array: ...
    def gradients(self, y: Array, scores: Array, weights: Array, grads: Array, hess: Array) -> None: ...
    def mean(self, scores: Array) -> Array: ...
    def loss(self, y: Array, scores: Array, weights: Array) -> float: ...
    def renew(self, residuals: Array, weights: Array) -> float | None: ...


class _OneScore:
    """Scores (rows, 1); grads and hess (1, rows)."""

    name: str
    outputs = 1
    _kernel: Any

    def gradients(self, y: Array, scores: Array, weights: Array, grads: Array, hess: Array) -> None:
        flat = scores[:, 0]

        def work(at: slice) -> None:
            self._run(y[at], flat[at], weights[at] if len(weights) else weights, grads[0, at], hess[0, at])

        on_threads(work, pieces(len(y)))

    def _run(self, y: Array, scores: Array, weights: Array, grads: Array, hess: Array) -> None:
        self._kernel(y, scores, weights, grads, hess)

    def mean(self, scores: Array) -> Array:
        return scores[:, 0]

    def renew(self, residuals: Array, weights: Array) -> float | None:
        return None


class SquaredError(_OneScore):
    name = "squared_error"
    _kernel = staticmethod(trees_gradients.squared_error)

    def start(self, y: Array, weights: Array) -> Array:
        return np.array([_average(y, weights)])

    def loss(self, y: Array, scores: Array, weights: Array) -> float:
        return _average((scores[:, 0] - y) ** 2, weights)


class AbsoluteError(_OneScore):
    name = "absolute_error"
    _kernel = staticmethod(trees_gradients.absolute_error)

    def start(self, y: Array, weights: Array) -> Array:
        return np.array([weighted_median(y, weights)])

    def loss(self, y: Array, scores: Array, weights: Array) -> float:
        return _average(np.abs(scores[:, 0] - y), weights)

    def renew(self, residuals: Array, weights: Array) -> float | None:
        return weighted_median(residuals, weights)


class Poisson(_OneScore):
    name = "poisson"

    def start(self, y: Array, weights: Array) -> Array:
        if y.min() < 0 or not y.any():
            raise TreesError(
                f"y: the Poisson objective expects counts of at least 0 and one above 0, got values from {y.min()} to "
                f"{y.max()}; choose another objective"
            )
        return np.array([math.log(_average(y, weights))])

    def _run(self, y: Array, scores: Array, weights: Array, grads: Array, hess: Array) -> None:
        trees_gradients.poisson(y, scores, weights, grads, hess, POISSON_CAUTION)

    def mean(self, scores: Array) -> Array:
        return np.exp(scores[:, 0])

    def loss(self, y: Array, scores: Array, weights: Array) -> float:
        return _average(np.exp(scores[:, 0]) - y * scores[:, 0], weights)


class Binary(_OneScore):
    """y is 0 or 1."""

    name = "binary"
    _kernel = staticmethod(trees_gradients.binary)

    def start(self, y: Array, weights: Array) -> Array:
        share = min(max(_average(y, weights), 1e-15), 1 - 1e-15)
        return np.array([math.log(share / (1 - share))])

    def mean(self, scores: Array) -> Array:
        return 1.0 / (1.0 + np.exp(-scores[:, 0]))

    def loss(self, y: Array, scores: Array, weights: Array) -> float:
        return _average(np.logaddexp(0.0, scores[:, 0]) - y * scores[:, 0], weights)


class Multiclass:
    """y is 0 .. classes - 1; scores (rows, classes), grads and hess (classes, rows)."""

    name = "multiclass"

    def __init__(self, classes: int) -> None:
        self.outputs = classes

    def start(self, y: Array, weights: Array) -> Array:
        counts = np.bincount(y.astype(np.int64), weights=weights if len(weights) else None, minlength=self.outputs)
        shares: Array = counts / counts.sum()
        return np.log(np.maximum(shares, 1e-15))

    def gradients(self, y: Array, scores: Array, weights: Array, grads: Array, hess: Array) -> None:
        def work(at: slice) -> None:
            trees_gradients.softmax(
                y[at], scores[at], weights[at] if len(weights) else weights, grads[:, at], hess[:, at]
            )

        on_threads(work, pieces(len(y)))

    def mean(self, scores: Array) -> Array:
        powers: Array = np.exp(scores - scores.max(axis=1, keepdims=True))
        powers /= powers.sum(axis=1, keepdims=True)
        return powers

    def loss(self, y: Array, scores: Array, weights: Array) -> float:
        chosen = np.take_along_axis(self.mean(scores), y.astype(np.int64)[:, None], axis=1)[:, 0]
        return _average(-np.log(np.maximum(chosen, 1e-300)), weights)

    def renew(self, residuals: Array, weights: Array) -> float | None:
        return None


class Custom(_OneScore):
    """The user's function of (y, raw scores), which returns gradients and hessians; weights multiply both."""

    name = "custom"

    def __init__(self, function: CustomObjective) -> None:
        self._function = function

    def start(self, y: Array, weights: Array) -> Array:
        return np.zeros(1)

    def gradients(self, y: Array, scores: Array, weights: Array, grads: Array, hess: Array) -> None:
        found = self._function(y, scores[:, 0].copy())
        if not (isinstance(found, tuple) and len(found) == 2 and all(np.shape(part) == y.shape for part in found)):
            raise TreesError(
                f"custom objective: expected (gradients, hessians), two arrays of {len(y)} numbers, got {found!r:.80}"
            )
        factor = weights if len(weights) else 1.0
        with np.errstate(over="ignore"):  # what becomes infinite is refused by row, in `largest`
            grads[0] = np.asarray(found[0]) * factor
            hess[0] = np.asarray(found[1]) * factor

    def loss(self, y: Array, scores: Array, weights: Array) -> float:
        raise TreesError("early stopping: a custom objective has no loss to watch; set early_stopping_rounds=None")


OBJECTIVES: dict[str, type[SquaredError | AbsoluteError | Poisson]] = {
    kind.name: kind for kind in (SquaredError, AbsoluteError, Poisson)
}


def weighted_median(numbers: Array, weights: Array) -> float:
    """The median; with weights, the first number at which half the weight is reached."""
    if not len(weights):
        return float(np.median(numbers))
    order = np.argsort(numbers, kind="stable")
    reached = np.cumsum(weights[order])
    return float(numbers[order][np.searchsorted(reached, 0.5 * reached[-1])])


def _average(numbers: Array, weights: Array) -> float:
    return float(np.average(numbers, weights=weights if len(weights) else None))
