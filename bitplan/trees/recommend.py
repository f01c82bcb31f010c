"""Recommends a gradient precision: measures F32, I16 and I8 on your table; switches nothing on.

Whether quantized gradients help depends on rows, features, threads and caches more than on any rule of thumb, so this
trains. Time: a few rounds on the whole table, with the threads that a fit would use, every precision in turns; what a
round takes, and what comes before the first, give the time of the whole fit. Loss: the objective's, after more rounds
on a sample, of rows held out, where targets that are hard to quantize show. A precision is recommended only if it was
faster in every turn, and its loss not worse by more than 1%.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bitplan.base.records import write_json
from bitplan.trees.estimators import BoostedTreesClassifier, BoostedTreesRegressor
from bitplan.trees.gradients import NO_WEIGHTS, Array, GradientPrecision, TreesError
from bitplan.trees.scikit import clone, type_of_target
from bitplan.trees.tables import names_of, rows_of
from bitplan.trees.threads import threads_of

TURNS = 3
ROUNDS = 6  # on the whole table, in each turn
LOSS_MARGIN = 0.01
FEWEST_ROWS = 100


@dataclass(frozen=True)
class PrecisionSeen:
    """What was measured of one precision: seconds of rounds, loss on held-out rows, and seconds before a round."""

    precision: GradientPrecision
    seconds: tuple[float, ...]
    loss: float
    setup_s: float = 0.0

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    def fit_s(self, rounds: int) -> float:
        """Seconds that a fit of so many rounds will take."""
        return self.setup_s + rounds * self.median_s


@dataclass(frozen=True)
class TableSeen:
    """The size of the table that was measured, threads, and the rounds of the whole fit."""

    rows: int
    features: int
    threads: int
    rounds: int

    def __str__(self) -> str:
        return f"{self.rows:,} rows, {self.features} features, {self.threads} threads"


@dataclass(frozen=True)
class PrecisionAdvice:
    """A recommended precision, the reason, and all measurements."""

    precision: GradientPrecision
    reason: str
    seen: tuple[PrecisionSeen, ...]
    table: TableSeen

    @property
    def fit_seconds(self) -> dict[GradientPrecision, float]:
        """What the whole fit will take in each precision."""
        return {one.precision: one.fit_s(self.table.rounds) for one in self.seen}

    def save(self, path: str | Path) -> None:
        """Write a plan with one entry, `gradients`, which `read_plan`, `diff`, `explain` and `report` read."""
        evidence: dict[str, Any] = {key: getattr(self.table, key) for key in ("rows", "features", "threads", "rounds")}
        for one in self.seen:
            name = one.precision.value
            evidence |= {f"{name}_seconds": list(one.seconds), f"{name}_setup_s": one.setup_s, f"{name}_loss": one.loss}
        fmt = "float32" if self.precision is GradientPrecision.F32 else self.precision.value
        entry = {"format": fmt, "kind": "gradient", "reason": self.reason, "evidence": evidence}
        document = {"document": "bitplan-plan", "version": 1, "tensors": {"gradients": {**entry, "cause": "policy"}}}
        write_json(path, document)

    def __str__(self) -> str:
        rows = [
            f"{one.precision.value}: {one.median_s:.3f} s a round, {one.fit_s(self.table.rounds):.1f} s for "
            f"{self.table.rounds} rounds, loss {one.loss:.5f}"
            for one in self.seen
        ]
        return f"{self.precision.value}: {self.reason} ({self.table}; {'; '.join(rows)})"


def recommend_gradient_precision(
    X: Any, y: Any, *, sample_rows: int = 200_000, trees: int = 10, random_state: int = 0, **settings: Any
) -> PrecisionAdvice:
    """Time a few rounds on all rows in each precision; `settings` are the estimator's, for the whole fit.

    sample_rows, trees  how much is trained to compare losses
    """
    x, targets = X if names_of(X) else np.asarray(X), np.asarray(y)  # a frame has names and categories
    if len(x.shape) != 2 or len(x) != len(targets) or len(x) < FEWEST_ROWS:
        raise TreesError(
            f"X, y: expected a table of at least {FEWEST_ROWS} rows with a target each, got shapes {x.shape} and "
            f"{targets.shape}; below that every precision takes the same time, so keep f32"
        )
    is_number = "objective" in settings or type_of_target(targets) in ("continuous", "continuous-multioutput")
    kind: Any = BoostedTreesRegressor if is_number else BoostedTreesClassifier
    estimator = kind(random_state=random_state, **settings)
    models = {precision: clone(estimator).set_params(gradient_precision=precision) for precision in GradientPrecision}
    chosen = np.random.default_rng(random_state).permutation(len(x))[: max(sample_rows, FEWEST_ROWS)]
    held_count = len(chosen) // 5
    fit_rows, held_rows = np.sort(chosen[held_count:]), np.sort(chosen[:held_count])
    losses = {}
    for precision, model in models.items():
        model.set_params(n_estimators=trees).fit(rows_of(x, fit_rows), targets[fit_rows])
        losses[precision] = _loss(model, rows_of(x, held_rows), targets[held_rows])
    rounds: dict[GradientPrecision, list[float]] = {precision: [] for precision in models}
    setups: list[float] = []
    for turn in range(-1, TURNS):  # the first loads or compiles the code
        for precision, model in models.items():
            setup, a_round = _time_rounds(model.set_params(n_estimators=ROUNDS if turn >= 0 else 1), x, targets)
            if turn >= 0:
                rounds[precision].append(a_round)
                setups.append(setup)
    setup = statistics.median(setups)  # the same in every precision
    measured = [PrecisionSeen(precision, tuple(rounds[precision]), losses[precision], setup) for precision in models]
    table = TableSeen(x.shape[0], x.shape[1], threads_of(estimator.n_jobs), int(estimator.n_estimators))
    return advise(measured, table)


def _time_rounds(model: Any, x: Any, targets: Array) -> tuple[float, float]:
    """Fit a model of few rounds; returns seconds before the first round, and of one round."""
    ends: list[float] = []
    started = time.perf_counter()
    model.fit(x, targets, callbacks=[lambda _: ends.append(time.perf_counter())])
    a_round = statistics.median(np.diff(ends).tolist() or [0.0])
    return max(ends[0] - started - a_round, 0.0), a_round


def advise(measured: Sequence[PrecisionSeen], table: TableSeen) -> PrecisionAdvice:
    """The decision, from figures alone: the fastest that is clearly faster than F32 and not worse."""
    full = next(one for one in measured if one.precision is GradientPrecision.F32)
    fit = [
        one
        for one in measured
        if one is not full
        and max(one.seconds) < min(full.seconds)
        and one.loss <= full.loss + LOSS_MARGIN * abs(full.loss)
    ]
    if not fit:
        reason = "no other precision was faster in every turn at a loss within 1%: keep float32"
        return PrecisionAdvice(full.precision, reason, tuple(measured), table)
    best = min(fit, key=lambda one: one.median_s)
    change = (best.loss - full.loss) / abs(full.loss) if full.loss else 0.0
    reason = f"{full.median_s / best.median_s:.2f}x as fast as f32, loss {change:+.2%}"
    return PrecisionAdvice(best.precision, reason, tuple(measured), table)


def _loss(model: Any, x: Any, y: Array) -> float:
    """The objective's loss; of a function of the user's, which has none, the mean squared error."""
    if callable(getattr(model, "objective", None)):
        return float(np.mean((model.predict(x) - y) ** 2))
    rows = np.flatnonzero(np.isin(y, model.classes_)) if hasattr(model, "classes_") else np.arange(len(y))
    loss: float = model._objective().loss(model._targets(y[rows]), model._scores(rows_of(x, rows)), NO_WEIGHTS)
    return loss
