"""Objectives for numbers whose mean is not what is asked for, or that are amounts; gradients are LightGBM's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bitplan.trees.distributed.medians import find_quantiles
from bitplan.trees.distributed.shards import ALONE, Array, Shards, average
from bitplan.trees.loops import gradients as trees_gradients
from bitplan.trees.objectives import (
    AbsoluteError,
    Leaves,
    LogMean,
    Objective,
    OneScore,
    Poisson,
    SquaredError,
    refuse_targets_outside,
)


class Quantile(OneScore):
    """The number below which a share of the targets lies."""

    name = "quantile"
    _kernel = staticmethod(trees_gradients.quantile)

    def __init__(self, share: float) -> None:
        self._share, self._numbers = share, (float(share),)

    def start(self, y: Array, weights: Array, shards: Shards = ALONE) -> Array:
        return find_quantiles(y, weights, [np.arange(len(y))], self._share, shards)

    def loss(self, y: Array, scores: Array, weights: Array, shards: Shards = ALONE) -> float:
        error = y - scores[:, 0]
        return average(np.maximum(self._share * error, (self._share - 1.0) * error), weights, shards)

    def renew(self, y: Array, scores: Array, weights: Array, leaves: Leaves, shards: Shards) -> Array | None:
        return find_quantiles(y - scores[:, 0], weights, leaves, self._share, shards)


class Huber(OneScore):
    """Squared errors up to a limit, absolute ones beyond it."""

    name = "huber"
    _kernel = staticmethod(trees_gradients.huber)

    def __init__(self, limit: float) -> None:
        self._limit, self._numbers = limit, (float(limit),)

    def start(self, y: Array, weights: Array, shards: Shards = ALONE) -> Array:
        return np.array([average(y, weights, shards)])

    def loss(self, y: Array, scores: Array, weights: Array, shards: Shards = ALONE) -> float:
        error = np.abs(scores[:, 0] - y)
        far = self._limit * (error - 0.5 * self._limit)
        return average(np.where(error <= self._limit, 0.5 * error * error, far), weights, shards)


class Gamma(LogMean):
    """Positive amounts, whose spread grows with their mean."""

    name = "gamma"
    _kernel = staticmethod(trees_gradients.gamma)

    def start(self, y: Array, weights: Array, shards: Shards = ALONE) -> Array:
        refuse_targets_outside(y, "the gamma objective expects numbers above 0", shards, above_zero=True)
        return super().start(y, weights, shards)

    def loss(self, y: Array, scores: Array, weights: Array, shards: Shards = ALONE) -> float:
        return average(y * np.exp(-scores[:, 0]) + scores[:, 0], weights, shards)


class Tweedie(LogMean):
    """Amounts of which many are zero; `power` from 1 (counts) to 2 (gamma)."""

    name = "tweedie"
    _kernel = staticmethod(trees_gradients.tweedie)

    def __init__(self, power: float) -> None:
        self._power, self._numbers = power, (float(power),)

    def start(self, y: Array, weights: Array, shards: Shards = ALONE) -> Array:
        refuse_targets_outside(y, "the Tweedie objective expects amounts of at least 0 and one above 0", shards)
        return super().start(y, weights, shards)

    def loss(self, y: Array, scores: Array, weights: Array, shards: Shards = ALONE) -> float:
        one, two = 1.0 - self._power, 2.0 - self._power
        score: Array = scores[:, 0]
        spread: Array = np.exp(two * score)
        expected: Array = y * np.exp(one * score)
        return average(spread / two - expected / one, weights, shards)


# By name, from the settings `alpha` and `tweedie_power`.
OBJECTIVES: dict[str, Callable[[float, float], Objective]] = {
    "squared_error": lambda _alpha, _power: SquaredError(),
    "absolute_error": lambda _alpha, _power: AbsoluteError(),
    "poisson": lambda _alpha, _power: Poisson(),
    "quantile": lambda alpha, _power: Quantile(alpha),
    "huber": lambda alpha, _power: Huber(alpha),
    "gamma": lambda _alpha, _power: Gamma(),
    "tweedie": lambda _alpha, power: Tweedie(power),
}
