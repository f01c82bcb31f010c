"""Metrics of rows that are watched: the objective's loss, and functions of the user's."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

from bitplan.trees.distributed.shards import Array, Shards
from bitplan.trees.gradients import TreesError
from bitplan.trees.objectives import Custom, Objective

# Of targets, raw scores and weights: name, value, whether higher is better.
Metric = Callable[[Array, Array, Array, Shards], tuple[str, float, bool]]


def metrics_of(objective: Objective, eval_metric: Any) -> tuple[Metric, ...]:
    """The user's metrics, the first of which early stopping watches; then the objective's loss, if it has one."""
    own = custom_metrics(objective, eval_metric)
    return own if own and isinstance(objective, Custom) else (*own, loss_of(objective))


def custom_metrics(objective: Objective, eval_metric: Any) -> tuple[Metric, ...]:
    """The user's alone."""
    given = [] if eval_metric is None else [eval_metric] if callable(eval_metric) else eval_metric
    if not isinstance(given, Sequence) or isinstance(given, str) or not all(callable(each) for each in given):
        raise TreesError(
            "eval_metric: expected a function of (y, predictions) that returns (name, value, is_higher_better), or a "
            f"list of such, got {eval_metric!r:.60}"
        )
    return tuple(_custom(each, objective) for each in given)


def loss_of(objective: Objective) -> Metric:
    """The objective's own loss, under the objective's name."""

    def of(y: Array, scores: Array, weights: Array, shards: Shards) -> tuple[str, float, bool]:
        return objective.name, objective.loss(y, scores, weights, shards), False

    return of


def _custom(function: Callable[..., Any], objective: Objective) -> Metric:
    shown = getattr(function, "__name__", type(function).__name__)

    def of(y: Array, scores: Array, weights: Array, shards: Shards) -> tuple[str, float, bool]:
        if shards.count > 1:
            raise TreesError(f"eval_metric: {shown} sees the rows of one process alone; leave it out of this fit")
        weighted = (weights,) if len(weights) else ()
        returned = function(y, objective.mean(scores), *weighted)
        is_triple = isinstance(returned, tuple) and len(returned) == 3 and isinstance(returned[0], str)
        if not is_triple or not isinstance(returned[1], numbers.Real) or not math.isfinite(returned[1]):
            raise TreesError(
                f"eval_metric: {shown} returned {returned!r:.80}, expected (name, value, is_higher_better) with a "
                "finite value"
            )
        return returned[0], float(returned[1]), bool(returned[2])

    return of
