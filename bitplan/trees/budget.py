"""`fit(X, y, seconds=60)`: the settings that give the smallest loss on rows held out, found in part of a given time.

The defaults come first. Candidates are compared on a sixteenth of the rows, the best quarter of them on a quarter, the
best of those on all, by the loss after early stopping; then neighbours of the best one, and float32 gradients beside
codes. Every trial has a deadline, so that a setting which is slow on this machine loses. The rest of the time goes to
the model: all rows, and the smallest learning rate for whose rounds there is time. What was chosen is recorded, and a
plain fit with it gives the same trees, to the bit: the rounds that there was time for are part of the record.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from bitplan.trees.boost import EvalSet, Rows, split_rows, with_weight
from bitplan.trees.checks import has_default, number, seed_of
from bitplan.trees.distributed.shards import ALONE
from bitplan.trees.estimator_base import FitOptions, callbacks_of
from bitplan.trees.gradients import GradientPrecision
from bitplan.trees.objectives import Objective, metrics_of

CHOICES: dict[str, tuple[Any, ...]] = {
    "max_leaves": (31, 15, 63, 127, 255),  # the first are the defaults
    "min_child_samples": (20, 5, 50, 100),
    "l2": (0.0, 1.0, 10.0),
    "colsample": (1.0, 0.7, 0.4),
    "subsample": (1.0, 0.7),
    "max_bins": (255, 63),
}
ROW_SHARES = (1 / 16, 1 / 4, 1.0)  # of the rows, in turn
SEARCH_SHARE = 0.5  # of the time
MANY_TRIALS = 20  # on all rows: as many need no smaller numbers of rows first
FEWEST_ROWS = 1000  # to compare settings by
HELD_ROWS = 2000  # at least, if that is no more than three tenths
MOST_TRIALS, MOST_ROUNDS, SPEED_ROUNDS, PATIENCE = 60, 1000, 4, 30
TRIAL_RATE, SMALLEST_RATE, LARGEST_RATE = 0.1, 0.02, 0.3
LEAST_ROUNDS = 100  # are wanted where no trial went on until early stopping
LOSS_MARGIN = 0.01  # by which that of codes may be larger than float32's
SPARE = 0.95  # of the time that is left is planned with

clock: Callable[[], float] = time.perf_counter


def start_of(options: FitOptions) -> float | None:
    """The time now, if the fit has a limit of seconds; None if it has none."""
    if options.seconds is None:
        return None
    number("seconds", options.seconds, 0, above=True)
    return clock()


@dataclass(frozen=True)
class SettingsTrial:
    """A trial of settings on some of the rows: its settings, loss, rounds and seconds."""

    settings: dict[str, Any]
    rows: int
    rounds: int  # of the smallest loss
    loss: float
    seconds: float
    setup_seconds: float  # before its first round
    round_seconds: float
    was_cut: bool  # by its deadline, before early stopping

    @property
    def rounds_wanted(self) -> float:
        """Rounds at the trial's learning rate; one that was cut has not shown them."""
        return max(1.5 * self.rounds, LEAST_ROUNDS) if self.was_cut else self.rounds


class Search:
    """Trials of an estimator's settings; those that differ from their defaults are the user's, and stay."""

    def __init__(self, model: Any, rows: Rows, objective: Objective, held_out: EvalSet) -> None:
        self._model, self._rows, self._objective, self._held = model, rows, objective, held_out
        defaults, settings = type(model)().get_params(), model.get_params()
        self.of_user = {name: value for name, value in settings.items() if not has_default(value, defaults[name])}
        self._free = {name: values for name, values in CHOICES.items() if name not in self.of_user}
        self._random = np.random.default_rng(0)
        self._order = self._random.permutation(len(rows.x))
        self._patience = model.early_stopping_rounds or PATIENCE
        self.trials: list[SettingsTrial] = []

    def run(self, settings: dict[str, Any], count: int, deadline: float, rounds: int = MOST_ROUNDS) -> SettingsTrial:
        """Run a trial on `count` rows, recorded; it ends at the deadline, after at least two rounds.

        The first round of a process loads code: alone it would say that rounds are slow.
        """
        rows = self._rows if count == len(self._order) else self._rows.at(np.sort(self._order[:count]))
        usual = {"learning_rate": TRIAL_RATE, "gradient_precision": GradientPrecision.I16.value}
        always = {
            "n_estimators": rounds,
            "early_stopping_rounds": self._patience,
            "verbose": False,
            "warm_start": False,
        }
        model = copy.copy(self._model).set_params(**usual | self.of_user | settings | always)
        started, ends = clock(), []

        def is_over(_state: Any) -> bool:
            ends.append(clock())
            return len(ends) > 1 and ends[-1] >= deadline

        model._boost(rows, self._objective, [self._held], FitOptions(callbacks=[is_over]), None, ALONE)
        losses, best = model.booster_.losses, int(np.argmin(model.booster_.losses)) + 1
        round_s = float(np.median(np.diff(ends))) if len(ends) > 1 else ends[0] - started
        trial = SettingsTrial(
            settings=settings,
            rows=count,
            rounds=best,
            loss=float(losses[best - 1]),
            seconds=ends[-1] - started,
            setup_seconds=max(ends[0] - started - round_s, 0.0),
            round_seconds=round_s,
            was_cut=len(losses) < rounds and len(losses) - best < self._patience,
        )
        self.trials.append(trial)
        return trial

    def best(self, end: float) -> SettingsTrial:
        """The best trial on all rows until `end`; the first has the defaults, and may be the only one."""
        total, started = len(self._order), clock()
        first = self.run({name: values[0] for name, values in self._free.items()}, total, (started + end) / 2)
        if first.was_cut or not self._free:
            return first
        fits_many = MANY_TRIALS * first.seconds <= end - clock()
        shares = ROW_SHARES[-1:] if fits_many else ROW_SHARES
        counts = sorted({min(max(math.ceil(share * total), FEWEST_ROWS), total) for share in shares})
        step_s = (end - clock()) / len(counts)
        candidates: Iterable[dict[str, Any]] = itertools.islice(self._candidates(), MOST_TRIALS)
        for remaining, count in zip(reversed(range(len(counts))), counts, strict=True):
            ranked = self._until(end - remaining * step_s, candidates, count, first.seconds)
            ranked.sort(key=lambda trial: trial.loss)
            candidates = [trial.settings for trial in ranked[: math.ceil(len(ranked) / 4)]]
        best = min([first, *ranked], key=lambda trial: trial.loss)
        around = self._until(end, self._neighbours(best.settings), total, first.seconds)
        return min([best, *around], key=lambda trial: trial.loss)

    def _until(
        self, end: float, candidates: Iterable[dict[str, Any]], count: int, usual_s: float
    ) -> list[SettingsTrial]:
        """Fit the candidates on `count` rows each until the clock reads `end`; return a trial of each that was begun.

        A fit is cut off after twice `usual_s`, the seconds that the defaults took on all rows.
        """
        trials: list[SettingsTrial] = []
        for settings in candidates:
            if clock() >= end:
                break
            trials.append(self.run(settings, count, min(clock() + 2 * usual_s, end)))
        return trials

    def _candidates(self) -> Iterator[dict[str, Any]]:
        while True:
            yield {name: values[int(self._random.integers(len(values)))] for name, values in self._free.items()}

    def _neighbours(self, settings: dict[str, Any]) -> list[dict[str, Any]]:
        """Settings that differ from these in one, in any order."""
        others = [
            settings | {name: value}
            for name, values in self._free.items()
            for value in values
            if value != settings[name]
        ]
        return [others[index] for index in self._random.permutation(len(others))]

    def with_precision(self, best: SettingsTrial) -> tuple[SettingsTrial, str]:
        """The best settings, and why: with float32 gradients where codes are slower or the loss 1% larger."""
        if "gradient_precision" in self.of_user:
            return best, "gradient_precision was given"
        if best.was_cut or self._model.device == "cuda":
            settings = best.settings | {"gradient_precision": GradientPrecision.I16.value}
            return replace(best, settings=settings), "f32 was not tried: not on a GPU, nor where time is short"
        settings = best.settings | {"gradient_precision": GradientPrecision.F32.value}
        full = self.run(settings, best.rows, clock() + 1.2 * best.seconds)
        change, speed = (best.loss - full.loss) / (abs(full.loss) or 1.0), full.round_seconds / best.round_seconds
        reason = f"a round of i16 is {speed:.2f} times as fast as one of f32, and its loss {change:+.2%}"
        if change > LOSS_MARGIN or speed <= 1:
            return full, reason
        settings = best.settings | {"gradient_precision": GradientPrecision.I16.value}
        return replace(best, settings=settings), reason


def rate_and_rounds(rounds: float, affordable: float, rate: float) -> tuple[float, int]:
    """The learning rate and rounds that time allows: half the rate needs twice the rounds, and is better."""
    affordable = max(affordable, 1.0)
    chosen = float(f"{min(max(rate * rounds / affordable, SMALLEST_RATE), LARGEST_RATE):.3g}")
    return chosen, max(int(min(affordable, rounds * rate / chosen)), 1)


def fit_in_seconds(
    estimator: Any,
    rows: Rows,
    objective: Objective,
    watched: Sequence[EvalSet],
    options: FitOptions,
    started: float,
) -> None:
    """Search settings, fit the estimator with the best of them to all rows, and record both in its `search_`."""
    model = copy.copy(estimator).set_params(random_state=seed_of(estimator.random_state))  # one seed for all fits
    rows, seconds = with_weight(rows), float(options.seconds)
    if watched:
        fitted, held_out = rows, watched[-1]
    else:
        share = max(model.validation_fraction, min(HELD_ROWS / len(rows.x), 0.3))
        fitted, held_rows = split_rows(rows, share, 0)
        held_out = EvalSet("held out", held_rows, metrics_of(objective, options.eval_metric))
    search = Search(model, fitted, objective, held_out)
    best, reason = search.with_precision(search.best(started + SEARCH_SHARE * seconds))
    fastest = best if best.rows == len(fitted.x) else search.run(best.settings, len(fitted.x), math.inf, SPEED_ROUNDS)
    round_s = max(fastest.round_seconds * len(rows.x) / len(fitted.x), 1e-9)
    left_s = SPARE * (started + seconds - clock()) - fastest.setup_seconds
    trial_rate = search.of_user.get("learning_rate", TRIAL_RATE)
    affordable = min(left_s / round_s, search.of_user.get("n_estimators", math.inf))
    rate, rounds = rate_and_rounds(best.rounds_wanted, affordable, trial_rate)
    chosen = {"learning_rate": rate, "n_estimators": rounds} | search.of_user | best.settings
    settings = model.get_params() | chosen | {"early_stopping_rounds": None, "warm_start": False}
    last = copy.copy(model).set_params(**settings)
    callbacks = [*callbacks_of(options.callbacks), lambda _state: clock() >= started + seconds]
    try:
        last._boost(rows, objective, watched, replace(options, callbacks=callbacks), None, ALONE)
    finally:
        vars(estimator).update({name: value for name, value in vars(last).items() if name == "booster_"})
    settings["n_estimators"] = last.booster_.rounds
    estimator.search_ = {
        "settings": settings,
        "seconds": seconds,
        "seconds_taken": clock() - started,
        "precision": reason,
        "trials": [asdict(trial) for trial in search.trials],
    }
