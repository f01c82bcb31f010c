"""Objectives of boosted trees: gradients, a starting score, a loss for early stopping.

A raw score is what trees add up to; `mean` turns it into what the user asked for. `renew` gives the leaf values of an
objective whose best leaf is not a Newton step (the median of absolute errors). Starts, losses and renewed leaves are
those of the rows of all processes, and do not depend on how these are divided.

Objectives for numbers whose mean is not what is asked for, or that are amounts; gradients are LightGBM's.

Metrics of rows that are watched: the objective's loss, and functions of the user's.
"""

from __future__ import annotations

import inspect
import math
import numbers
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from bitplan.base.loops.row_pieces import Cut
from bitplan.base.loops.row_pieces import run as run_pieces
from bitplan.trees.checks import other_name
from bitplan.trees.distributed.shards import ALONE, Array, Shards, average, find_medians, find_quantiles, sum_exactly
from bitplan.trees.gradients import TreesError
from bitplan.trees.loops import gradients as trees_gradients

GRADIENT_NS = 8.0  # of a row and an output, about
POISSON_CAUTION = math.exp(0.7)  # LightGBM's: a hessian larger than the real one, against steps that overshoot
SMALLEST = float(np.finfo(np.float64).tiny)
Leaves = Callable[[], Sequence[Array]]  # the rows of each
CustomObjective = Callable[[Array, Array], tuple[Any, Any]]


class Objective(Protocol):
    name: str
    outputs: int  # trees a round

    def start(self, y: Array, weights: Array, shards: Shards = ALONE) -> Array: ...
    def gradients(self, y: Array, scores: Array, weights: Array, grads: Array, hess: Array) -> None: ...
    def mean(self, scores: Array) -> Array: ...
    def loss(self, y: Array, scores: Array, weights: Array, shards: Shards = ALONE) -> float: ...
    def renew(
        self, y: Array, scores: Array, weights: Array, leaves: Leaves, shards: Shards, output: int = 0
    ) -> Array | None: ...
    def limit(self, steps: Array, rate: float, output: int = 0) -> Array: ...


MOST_STEPS = 5  # of a leaf of one class where all classes are as frequent


class OneScore:
    """The base of objectives with one score a row: scores (rows, 1), gradients and hessians (1, rows)."""

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

    def renew(
        self, y: Array, scores: Array, weights: Array, leaves: Leaves, shards: Shards, output: int = 0
    ) -> Array | None:
        return None

    def limit(self, steps: Array, rate: float, output: int = 0) -> Array:
        """The Newton steps of leaves, of which a share `rate` is made, or smaller ones."""
        return steps


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

    def renew(
        self, y: Array, scores: Array, weights: Array, leaves: Leaves, shards: Shards, output: int = 0
    ) -> Array | None:
        return find_medians(y - scores[:, 0], weights, leaves(), shards)


class LogMean(OneScore):
    """The base of objectives whose raw scores are logarithms of predicted means: Tweedie losses, by their power."""

    _power = 1.0
    _caution = 1.0  # of hessians, above the real ones

    def start(self, y: Array, weights: Array, shards: Shards = ALONE) -> Array:
        return np.array([math.log(average(y, weights, shards))])

    def mean(self, scores: Array) -> Array:
        return np.exp(scores[:, 0])

    def limit(self, steps: Array, rate: float, output: int = 0) -> Array:
        """No step leads past the best value of its leaf: far from it, Newton's would be too long by any factor."""
        newton = steps * self._caution
        up, down = 1 + (2 - self._power) * newton, 1 - (self._power - 1) * newton
        best: Array = np.log(np.maximum(up, SMALLEST)) - np.log(np.maximum(down, SMALLEST))
        return np.where(np.abs(steps) * rate > np.abs(best), best / rate, steps)


class Poisson(LogMean):
    name = "poisson"
    _kernel, _numbers = staticmethod(trees_gradients.poisson), (POISSON_CAUTION,)
    _caution = POISSON_CAUTION

    def start(self, y: Array, weights: Array, shards: Shards = ALONE) -> Array:
        refuse_targets_outside(y, "the Poisson objective expects counts of at least 0 and one above 0", shards)
        return super().start(y, weights, shards)

    def loss(self, y: Array, scores: Array, weights: Array, shards: Shards = ALONE) -> float:
        score: Array = scores[:, 0]
        expected: Array = np.exp(score)
        explained: Array = y * score
        return average(expected - explained, weights, shards)


def limited_log_odds(steps: Array, classes: int) -> Array:
    """Steps of log odds, none so long that a few rows of a rare class make all of their leaf sure to be of it.

    Where all rows of a leaf are of a class of probability p, Newton's step is 1 / p: of `classes` alike their number.
    """
    return np.clip(steps, -MOST_STEPS * classes, MOST_STEPS * classes)


class Binary(OneScore):
    """Log loss for two classes; targets y are 0 or 1."""

    name = "binary"
    _kernel = staticmethod(trees_gradients.binary)

    def start(self, y: Array, weights: Array, shards: Shards = ALONE) -> Array:
        share = min(max(average(y, weights, shards), 1e-15), 1 - 1e-15)
        return np.array([math.log(share / (1 - share))])

    def limit(self, steps: Array, rate: float, output: int = 0) -> Array:
        return limited_log_odds(steps, 2)

    def mean(self, scores: Array) -> Array:
        return 1.0 / (1.0 + np.exp(-scores[:, 0]))

    def loss(self, y: Array, scores: Array, weights: Array, shards: Shards = ALONE) -> float:
        score: Array = scores[:, 0]
        both: Array = np.logaddexp(0.0, score)
        explained: Array = y * score
        return average(both - explained, weights, shards)


class Multiclass:
    """Log loss of several classes; y is 0 .. classes - 1; scores (rows, classes), grads and hess (classes, rows)."""

    name = "multiclass"

    def __init__(self, classes: int) -> None:
        self.outputs = classes

    def start(self, y: Array, weights: Array, shards: Shards = ALONE) -> Array:
        row_weights = weights if len(weights) else np.ones(len(y))
        counts = np.array(sum_exactly([row_weights[y == label] for label in range(self.outputs)], shards))
        shares: Array = counts / counts.sum()
        return np.log(np.maximum(shares, 1e-15))

    def limit(self, steps: Array, rate: float, output: int = 0) -> Array:
        return limited_log_odds(steps, self.outputs)

    def gradients(self, y: Array, scores: Array, weights: Array, grads: Array, hess: Array) -> None:
        columns = Cut(y), Cut(np.ascontiguousarray(scores.T), axis=1), Cut(weights) if len(weights) else weights
        results = Cut(grads, axis=1), Cut(hess, axis=1)
        run_pieces(trees_gradients.softmax, len(y), GRADIENT_NS * self.outputs, *columns, *results)

    def mean(self, scores: Array) -> Array:
        powers: Array = np.exp(scores - scores.max(axis=1, keepdims=True))
        powers /= powers.sum(axis=1, keepdims=True)
        return powers

    def loss(self, y: Array, scores: Array, weights: Array, shards: Shards = ALONE) -> float:
        chosen = np.take_along_axis(self.mean(scores), y.astype(np.int64)[:, None], axis=1)[:, 0]
        return average(-np.log(np.maximum(chosen, 1e-300)), weights, shards)

    def renew(
        self, y: Array, scores: Array, weights: Array, leaves: Leaves, shards: Shards, output: int = 0
    ) -> Array | None:
        return None


class Custom(OneScore):
    """The user's function of (y, raw scores), which returns gradients and hessians; weights multiply both."""

    name = "custom"

    def __init__(self, function: CustomObjective, outputs: int = 1) -> None:
        self._function, self.outputs = function, outputs

    def start(self, y: Array, weights: Array, shards: Shards = ALONE) -> Array:
        return np.zeros(self.outputs)

    def gradients(self, y: Array, scores: Array, weights: Array, grads: Array, hess: Array) -> None:
        if not len(y):  # a process without rows
            return
        own_scores = scores[:, 0].copy() if self.outputs == 1 else scores.copy()
        returned = self._function(_read_only(y), own_scores)
        is_pair = isinstance(returned, tuple) and len(returned) == 2
        if not is_pair or any(np.shape(part) != own_scores.shape for part in returned):
            size = " x ".join(map(str, own_scores.shape))
            raise TreesError(
                f"custom objective: expected (gradients, hessians), two arrays of {size} numbers, got {returned!r:.80}"
            )
        factor = weights if len(weights) else 1.0
        with np.errstate(over="ignore"):  # what becomes infinite is refused by row, in `largest`
            for target, part in zip((grads, hess), returned, strict=True):
                target[:] = np.asarray(part).T * factor

    def mean(self, scores: Array) -> Array:
        return scores[:, 0] if self.outputs == 1 else scores

    def loss(self, y: Array, scores: Array, weights: Array, shards: Shards = ALONE) -> float:
        raise TreesError("early stopping: a custom objective has no loss to watch; set early_stopping_rounds=None")


class CustomOfClasses(Custom):
    """A custom objective for classes: its scores become probabilities as those of the objective without it do."""

    def __init__(self, function: CustomObjective, plain: Binary | Multiclass) -> None:
        super().__init__(function, plain.outputs)
        self._plain = plain

    def mean(self, scores: Array) -> Array:
        return self._plain.mean(scores)


# ---- regression losses -----------------------------------------------------------------------------------------------


class Quantile(OneScore):
    """Pinball loss: predicts the number below which a given share of the targets lies."""

    name = "quantile"
    _kernel = staticmethod(trees_gradients.quantile)

    def __init__(self, share: float) -> None:
        self._share, self._numbers = share, (float(share),)

    def start(self, y: Array, weights: Array, shards: Shards = ALONE) -> Array:
        return find_quantiles(y, weights, [np.arange(len(y))], self._share, shards)

    def loss(self, y: Array, scores: Array, weights: Array, shards: Shards = ALONE) -> float:
        error = y - scores[:, 0]
        return average(np.maximum(self._share * error, (self._share - 1.0) * error), weights, shards)

    def renew(
        self, y: Array, scores: Array, weights: Array, leaves: Leaves, shards: Shards, output: int = 0
    ) -> Array | None:
        return find_quantiles(y - scores[:, 0], weights, leaves(), self._share, shards)


class Huber(OneScore):
    """Huber loss: squared errors up to a limit, absolute errors beyond it."""

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
    """Gamma deviance, for positive amounts whose spread grows with their mean."""

    name = "gamma"
    _kernel, _power = staticmethod(trees_gradients.gamma), 2.0

    def start(self, y: Array, weights: Array, shards: Shards = ALONE) -> Array:
        refuse_targets_outside(y, "the gamma objective expects numbers above 0", shards, above_zero=True)
        return super().start(y, weights, shards)

    def loss(self, y: Array, scores: Array, weights: Array, shards: Shards = ALONE) -> float:
        return average(y * np.exp(-scores[:, 0]) + scores[:, 0], weights, shards)


class Tweedie(LogMean):
    """Tweedie deviance, for amounts of which many are zero; `power` from 1 (counts) to 2 (gamma)."""

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


class Several:
    """An objective for each output: several targets, y (rows, targets), or several quantiles of one."""

    def __init__(self, parts: Sequence[Objective]) -> None:
        self._parts, self.outputs, self.name = parts, len(parts), parts[0].name

    def _target(self, y: Array, output: int) -> Array:
        return y if y.ndim == 1 else np.ascontiguousarray(y[:, output])

    def start(self, y: Array, weights: Array, shards: Shards = ALONE) -> Array:
        starts = [part.start(self._target(y, output), weights, shards) for output, part in enumerate(self._parts)]
        return np.concatenate(starts)

    def gradients(self, y: Array, scores: Array, weights: Array, grads: Array, hess: Array) -> None:
        for output, part in enumerate(self._parts):
            one = slice(output, output + 1)
            part.gradients(self._target(y, output), scores[:, [output]], weights, grads[one], hess[one])

    def mean(self, scores: Array) -> Array:
        return np.column_stack([part.mean(scores[:, [output]]) for output, part in enumerate(self._parts)])

    def loss(self, y: Array, scores: Array, weights: Array, shards: Shards = ALONE) -> float:
        losses = [
            part.loss(self._target(y, output), scores[:, [output]], weights, shards)
            for output, part in enumerate(self._parts)
        ]
        return sum(losses) / len(losses)

    def renew(
        self, y: Array, scores: Array, weights: Array, leaves: Leaves, shards: Shards, output: int = 0
    ) -> Array | None:
        return self._parts[output].renew(self._target(y, output), scores[:, [output]], weights, leaves, shards)

    def limit(self, steps: Array, rate: float, output: int = 0) -> Array:
        return self._parts[output].limit(steps, rate)


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


# ---- metrics ---------------------------------------------------------------------------------------------------------


# Of targets, raw scores and weights: name, value, whether higher is better.
Metric = Callable[[Array, Array, Array, Shards], tuple[str, float, bool]]


def metrics_of(objective: Objective, eval_metric: Any) -> tuple[Metric, ...]:
    """The user's metrics, the first of which early stopping watches; then the objective's loss, if it has one."""
    given_metrics = custom_metrics(objective, eval_metric)
    return given_metrics if given_metrics and isinstance(objective, Custom) else (*given_metrics, loss_of(objective))


def custom_metrics(objective: Objective, eval_metric: Any) -> tuple[Metric, ...]:
    """The metrics that a user asks for by `eval_metric`."""
    metrics = [] if eval_metric is None else eval_metric
    metrics = [metrics] if callable(metrics) or isinstance(metrics, str) else metrics
    metrics = metrics if isinstance(metrics, Sequence) else [None]
    if not all(callable(metric) or (isinstance(metric, str) and metric in NAMED_METRICS) for metric in metrics):
        raise TreesError(
            "eval_metric: expected a function of (y, predictions[, weights]) that returns (name, value, "
            f"is_higher_better), one of {', '.join(map(repr, NAMED_METRICS))}, or a list of such, "
            f"got {eval_metric!r:.60}"
            + next(filter(None, (other_name("eval_metric", metric) for metric in metrics)), "")
        )
    names = [metric for metric in metrics if isinstance(metric, str)]
    if len(set(names)) < len(names):
        raise TreesError(f"eval_metric: expected each name once, got {eval_metric!r:.60}")
    return tuple(_custom(_named(metric) if isinstance(metric, str) else metric, objective) for metric in metrics)


def _of_all(part: Array, shards: Shards) -> Array:
    """The rows of all processes, in their order: a metric need not be a sum over rows."""
    gathered = shards.gather(np.ascontiguousarray(part, np.float64).ravel(), "rows of a metric")
    return np.concatenate(gathered).reshape(-1, *part.shape[1:])


# By the names that LightGBM, XGBoost and scikit-learn have: scikit-learn's function, what it takes of predictions
# (their mean, or the likeliest class), and whether higher is better.
NAMED_METRICS: dict[str, tuple[str, bool, bool]] = {
    "auc": ("roc_auc_score", False, True),
    "average_precision": ("average_precision_score", False, True),
    "logloss": ("log_loss", False, False),
    "binary_logloss": ("log_loss", False, False),
    "multi_logloss": ("log_loss", False, False),
    "accuracy": ("accuracy_score", True, True),
    "error": ("zero_one_loss", True, False),
    "mse": ("mean_squared_error", False, False),
    "l2": ("mean_squared_error", False, False),
    "rmse": ("root_mean_squared_error", False, False),
    "mae": ("mean_absolute_error", False, False),
    "l1": ("mean_absolute_error", False, False),
    "mape": ("mean_absolute_percentage_error", False, False),
    "r2": ("r2_score", False, True),
}


def _named(name: str) -> Callable[..., tuple[str, float, bool]]:
    function, by_class, higher_is_better = NAMED_METRICS[name]

    def metric(y: Array, predicted: Array, weights: Array | None = None) -> tuple[str, float, bool]:
        from sklearn import metrics  # type: ignore[import-untyped]
        from sklearn.exceptions import UndefinedMetricWarning  # type: ignore[import-untyped]

        if by_class:
            predicted = predicted > 0.5 if predicted.ndim == 1 else predicted.argmax(axis=1)
        more: dict[str, Any] = {"sample_weight": weights}
        if function == "log_loss":
            more |= {"labels": np.arange(predicted.shape[1] if predicted.ndim == 2 else 2)}
        elif name == "auc" and predicted.ndim == 2:
            more |= {"labels": np.arange(predicted.shape[1]), "multi_class": "ovr"}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", UndefinedMetricWarning)  # one class alone: the value would be NaN
                value = getattr(metrics, function)(y, predicted, **more)
        except (ValueError, UndefinedMetricWarning) as error:
            raise TreesError(f"eval_metric: {name!r} is not for these targets and predictions: {error}") from error
        return name, float(value), higher_is_better

    metric.__name__ = name
    return metric


def loss_of(objective: Objective) -> Metric:
    """The objective's own loss, under the objective's name."""

    def of(y: Array, scores: Array, weights: Array, shards: Shards) -> tuple[str, float, bool]:
        return objective.name, objective.loss(y, scores, weights, shards), False

    return of


def _takes(function: Callable[..., Any], arguments: int) -> bool:
    """Whether a function can be called with so many arguments; True for one that does not say."""
    try:
        inspect.signature(function).bind(*range(arguments))
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def _read_only(y: Array) -> Array:
    """The targets as a user's function gets them: one that writes to them fails, and changes no later round."""
    view = y.view()
    view.setflags(write=False)
    return view


def _custom(function: Callable[..., Any], objective: Objective) -> Metric:
    shown = getattr(function, "__name__", type(function).__name__)
    takes_weights = _takes(function, 3)

    def of(y: Array, scores: Array, weights: Array, shards: Shards) -> tuple[str, float, bool]:
        if shards.count > 1:
            y, scores, weights = (_of_all(part, shards) for part in (y, scores, weights))
        weighted = (weights,) if len(weights) and takes_weights else ()
        returned = function(_read_only(y), objective.mean(scores), *weighted)
        is_triple = isinstance(returned, tuple) and len(returned) == 3 and isinstance(returned[0], str)
        if not is_triple or not isinstance(returned[1], numbers.Real) or not math.isfinite(returned[1]):
            raise TreesError(
                f"eval_metric: {shown} returned {returned!r:.80}, expected (name, value, is_higher_better) with a "
                "finite value"
            )
        return returned[0], float(returned[1]), bool(returned[2])

    return of
