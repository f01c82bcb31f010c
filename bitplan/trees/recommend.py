"""Recommends a gradient precision: measures F32, I16 and I8 on a sample of your table; switches nothing on.

Whether quantized gradients help depends on rows, features and caches more than on any rule of thumb, so this trains:
the same few trees in each precision, in turns, and the loss of each on rows held out. A precision is recommended only
if it was faster by more than the runs differ among themselves, and its loss not worse by more than 1%.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.utils.multiclass import type_of_target  # type: ignore[import-untyped]

from bitplan.trees.estimators import BoostedTreesClassifier, BoostedTreesRegressor
from bitplan.trees.gradients import Array, GradientPrecision, TreesError

TURNS = 3
LOSS_MARGIN = 0.01
FEWEST_ROWS = 100


@dataclass(frozen=True)
class PrecisionSeen:
    """What one precision did: seconds of every turn, and the loss on rows held out."""

    precision: GradientPrecision
    seconds: tuple[float, ...]
    loss: float

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class PrecisionAdvice:
    """A recommended precision, the reason, and all measurements."""

    precision: GradientPrecision
    reason: str
    seen: tuple[PrecisionSeen, ...]

    def __str__(self) -> str:
        rows = [f"{one.precision.value}: {one.median_s:.3f} s, loss {one.loss:.5f}" for one in self.seen]
        return f"{self.precision.value}: {self.reason} ({'; '.join(rows)})"


def recommend_gradient_precision(
    X: Any, y: Any, *, sample_rows: int = 200_000, trees: int = 10, random_state: int = 0, **settings: Any
) -> PrecisionAdvice:
    """Train `trees` trees in each precision on at most `sample_rows` rows; `settings` are the estimator's."""
    x, targets = np.asarray(X), np.asarray(y)
    if x.ndim != 2 or len(x) != len(targets) or len(x) < FEWEST_ROWS:
        raise TreesError(
            f"X, y: expected a table of at least {FEWEST_ROWS} rows with a target each, got shapes {x.shape} and "
            f"{targets.shape}; below that every precision takes the same time, so keep f32"
        )
    chosen = np.random.default_rng(random_state).permutation(len(x))[: max(sample_rows, FEWEST_ROWS)]
    held = len(chosen) // 5
    fit_rows, held_rows = np.sort(chosen[held:]), np.sort(chosen[:held])
    kind: Any = BoostedTreesRegressor if type_of_target(targets) == "continuous" else BoostedTreesClassifier
    models = {
        precision: kind(n_estimators=trees, gradient_precision=precision, random_state=random_state, **settings)
        for precision in GradientPrecision
    }
    for model in models.values():  # loads or compiles the code
        model.fit(x[fit_rows[:FEWEST_ROWS]], targets[fit_rows[:FEWEST_ROWS]])
    seconds: dict[GradientPrecision, list[float]] = {precision: [] for precision in models}
    train_x, train_y = x[fit_rows], targets[fit_rows]
    for _ in range(TURNS):
        for precision, model in models.items():
            started = time.perf_counter()
            model.fit(train_x, train_y)
            seconds[precision].append(time.perf_counter() - started)
    return advise(
        [
            PrecisionSeen(precision, tuple(seconds[precision]), _loss(model, x[held_rows], targets[held_rows]))
            for precision, model in models.items()
        ]
    )


def advise(seen: Sequence[PrecisionSeen]) -> PrecisionAdvice:
    """The decision, from figures alone: the fastest that is clearly faster than F32 and not worse."""
    full = next(one for one in seen if one.precision is GradientPrecision.F32)
    fit = [
        one
        for one in seen
        if one is not full
        and max(one.seconds) < min(full.seconds)
        and one.loss <= full.loss + LOSS_MARGIN * abs(full.loss)
    ]
    if not fit:
        reason = "no other precision was faster in every turn at a loss within 1%: keep float32"
        return PrecisionAdvice(full.precision, reason, tuple(seen))
    best = min(fit, key=lambda one: one.median_s)
    change = (best.loss - full.loss) / abs(full.loss) if full.loss else 0.0
    reason = f"{full.median_s / best.median_s:.2f}x as fast as f32, loss {change:+.2%}"
    return PrecisionAdvice(best.precision, reason, tuple(seen))


def _loss(model: Any, x: Array, y: Array) -> float:
    """Mean squared error, or the logarithmic loss."""
    if isinstance(model, BoostedTreesRegressor):
        return float(np.mean((model.predict(x) - y) ** 2))
    places = np.searchsorted(model.classes_, y)
    known = np.isin(y, model.classes_)
    proba = model.predict_proba(x[known])
    return float(-np.log(np.maximum(proba[np.arange(len(proba)), places[known]], 1e-15)).mean())
