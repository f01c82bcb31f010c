"""`fit(X, y, seconds=60)`: the settings that give the smallest loss on rows held out, found in part of a given time.

The defaults come first. Candidates are compared on a sixteenth of the rows, the best quarter of them on a quarter, the
best of those on all, by the loss after early stopping; then neighbours of the best one. Every trial has a deadline, so
that a setting which is slow on this machine loses. The best one is then compared with the defaults on other rows held
out, for the first ones have chosen it, and float32 gradients with codes. The rest of the time goes to the model: all
rows, and the smallest learning rate for whose rounds there is time. As much as the defaults need is always left. What
was chosen is recorded, and a plain fit with it gives the same trees, to the bit: the rounds that there was time for
are part of the record.

`memory` leaves out settings whose fit would take more, and gives the search fewer rows where its copies of them would.
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

from bitplan.trees.binning import MAX_COLUMNS, ONE_COLUMN
from bitplan.trees.boost import EvalSet, Rows, with_weight
from bitplan.trees.checks import byte_count, has_default, number, seed_of
from bitplan.trees.distributed.shards import ALONE
from bitplan.trees.estimator_base import FitOptions, callbacks_of
from bitplan.trees.gradients import GradientPrecision, TreesError
from bitplan.trees.grow import bytes_to_grow
from bitplan.trees.objectives import Objective, metrics_of
from bitplan.trees.threads import threads_of

CHOICES: dict[str, tuple[Any, ...]] = {
    "max_leaves": (31, 15, 63, 127, 255),  # the first are the defaults
    "min_child_samples": (20, 5, 50, 100),
    "l2": (0.0, 1.0, 10.0),
    "colsample": (1.0, 0.7, 0.4),
    "subsample": (1.0, 0.7),
    "max_bins": (255, 63),
}
ROW_SHARES = (1 / 16, 1 / 4, 1.0)  # of the rows, in turn
FIRST_SHARE, SEARCH_SHARE, COMPARED_SHARE = 0.2, 0.4, 0.8  # of the time, at the end of each part
MANY_TRIALS = 20  # on all rows: as many need no smaller numbers of rows first
FEWEST_ROWS = 1000  # to compare settings by
HELD_ROWS = 2000  # at least, if that is no more than three tenths
FEW_HELD, ENOUGH_HELD = 1000, 20_000  # rows held out in all, to compare with the defaults by
FEW_SPLITS, MOST_SPLITS = 3, 5
MOST_TRIALS, MOST_ROUNDS, PATIENCE = 60, 1000, 30
DEFAULT_ROUNDS, TRIAL_RATE, SMALLEST_RATE, LARGEST_RATE = 100, 0.1, 0.02, 0.3
LOSS_MARGIN = 0.01  # by which that of codes may be larger than float32's
CHANCE = 0.3  # the share by which losses on a held-out row may differ by chance; of many, the root of their number less
SPARE = 0.95  # of the time that is left is planned with
TREE_BYTES, LEAF_BYTES = 4000, 130  # of a tree that is kept, and of each of its leaves
COPIES = 1.25  # of the rows that a search has: all of them, and a quarter

clock: Callable[[], float] = time.perf_counter


def start_of(options: FitOptions) -> float | None:
    """The time now, if the fit has a limit of seconds; None if it has none."""
    if options.seconds is None:
        if options.memory is not None:
            raise TreesError("memory: it limits a search; give seconds, too (seconds=60), or leave memory out")
        return None
    number("seconds", options.seconds, 0, above=True)
    return clock()


@dataclass(frozen=True)
class SettingsTrial:
    """A trial of settings on some of the rows: its settings, loss, rounds and seconds."""

    settings: dict[str, Any]
    rows: int
    split: int  # which rows were held out
    rounds: int  # of the smallest loss
    loss: float
    seconds: float
    setup_seconds: float  # before its first round
    round_seconds: float
    was_cut: bool  # by its deadline, before early stopping

    @property
    def rounds_wanted(self) -> int:
        """Rounds at the trial's learning rate; one that was cut has not shown them."""
        return max(math.ceil(1.5 * self.rounds), DEFAULT_ROUNDS) if self.was_cut else self.rounds


@dataclass(frozen=True)
class FitMemory:
    """The memory that a fit may take beside its table, and what a fit takes of it."""

    limit: float  # bytes
    columns: int  # of bins
    row_bytes: int  # of the table, targets and weights
    held_bytes: int  # of raw scores of watched rows
    outputs: int
    threads: int

    @classmethod
    def of(cls, model: Any, rows: Rows, objective: Objective, watched: Sequence[EvalSet], memory: Any) -> FitMemory:
        limit = math.inf if memory is None else byte_count("memory", memory)
        x, columns = np.asarray(rows.x), 0
        for feature, is_category in enumerate(model._categorical(x.shape[1])):
            most = np.nanmax(x[:, feature], initial=0.0) + 1 if is_category else 1
            columns += min(math.ceil(most / model.max_bins), MAX_COLUMNS) if most > ONE_COLUMN else 1
        held = sum(len(one.rows.x) for one in watched)
        row_bytes, held_bytes = x.shape[1] * x.itemsize + 16, 32 * objective.outputs * held
        return cls(limit, columns, row_bytes, held_bytes, objective.outputs, threads_of(model.n_jobs))

    def fit_bytes(self, settings: dict[str, Any], rows: int, rounds: int = 1) -> int:
        """What a fit takes at most: its arrays, and its trees."""
        trees = rounds * self.outputs * (TREE_BYTES + LEAF_BYTES * settings["max_leaves"])
        is_precise = settings["gradient_precision"] == GradientPrecision.F32.value
        sizes = rows, self.columns, self.row_bytes, self.outputs, settings["max_leaves"], is_precise
        return int(trees + self.held_bytes + bytes_to_grow(*sizes, self.threads))

    def rounds(self, settings: dict[str, Any], rows: int, copied_rows: int = 0) -> float:
        """How many rounds there is room for beside copies of so many rows."""
        one, two = (self.fit_bytes(settings, rows, rounds) for rounds in (1, 2))
        left = self.limit - COPIES * copied_rows * self.row_bytes - one
        return left / (two - one) + 1


class Search:
    """Trials of an estimator's settings; those that differ from their defaults are the user's, and stay."""

    def __init__(
        self, model: Any, rows: Rows, objective: Objective, watched: Sequence[EvalSet], options: FitOptions, end: float
    ) -> None:
        self._model, self._objective, self._options = model, objective, options
        self._watched, self._end = watched, end
        self._latest = end  # when the fit to all rows must begin if it has the defaults
        defaults, settings = type(model)().get_params(), model.get_params()
        self.of_user = {name: value for name, value in settings.items() if not has_default(value, defaults[name])}
        self._free = {name: values for name, values in CHOICES.items() if name not in self.of_user}
        usual = {"learning_rate": TRIAL_RATE, "gradient_precision": GradientPrecision.I16.value}
        self._usual = settings | usual | self.of_user
        self._random = np.random.default_rng(0)
        self._patience = model.early_stopping_rounds or PATIENCE
        self._rows, self.memory = rows, FitMemory.of(model, rows, objective, watched, options.memory)
        self._share = max(model.validation_fraction, min(HELD_ROWS / len(rows.x), 0.3))
        self._count = self._rows_within_room()
        self._fitted, self._held = self._split(0)
        self._order = self._random.permutation(len(self._fitted.x))
        self.trials: list[SettingsTrial] = []

    def _defaults(self) -> list[dict[str, Any]]:
        """The defaults; then with smaller trees."""
        defaults = {name: values[0] for name, values in self._free.items()}
        sizes = [leaves for leaves in self._free.get("max_leaves", ()) if leaves < defaults["max_leaves"]]
        return [defaults, *(defaults | {"max_leaves": leaves} for leaves in sizes)]

    def _rows_within_room(self) -> int:
        """How many rows there is room to search with, beside a fit to all; refuses a limit that is too low."""
        count, row_bytes = len(self._rows.x), COPIES * self.memory.row_bytes
        for settings in self._defaults():
            needed = self.memory.fit_bytes(self._usual | settings, count)
            room = (self.memory.limit - needed) / row_bytes
            if room >= min(count, FEWEST_ROWS):
                return int(min(count, room))
        least = math.ceil(needed + min(count, FEWEST_ROWS) * row_bytes)
        raise TreesError(
            f"memory: {count} rows in {self.memory.columns} columns of bins need {least} bytes beside the table, and "
            f"{self.memory.limit} are given; give memory={least} or more, or fewer rows"
        )

    def _has_room(self, settings: dict[str, Any]) -> bool:
        return self.memory.rounds(self._usual | settings, len(self._rows.x), self._count) >= 1

    def _split(self, split: int) -> tuple[Rows, EvalSet]:
        """Rows to fit, and rows held out; the user's own, if there are any."""
        numbers = np.random.default_rng([split, 1]).permutation(len(self._rows.x))[: self._count]
        if self._watched:
            return self._rows if len(numbers) == len(self._rows.x) else self._rows.at(np.sort(numbers)), self._watched[
                -1
            ]
        count = math.ceil(len(numbers) * self._share)
        if count >= len(numbers):
            raise TreesError(
                f"seconds: validation_fraction={self._share:g} of {len(numbers)} rows leaves none to fit; give eval_set"
            )
        fitted, held = (self._rows.at(np.sort(part)) for part in (numbers[count:], numbers[:count]))
        return fitted, EvalSet("held out", held, metrics_of(self._objective, self._options.eval_metric))

    def _run(
        self,
        settings: dict[str, Any],
        count: int,
        deadline: float,
        split: int = 0,
        rounds: int = MOST_ROUNDS,
        stops_early: bool = True,
        is_first: bool = False,
    ) -> tuple[SettingsTrial, list[float]]:
        """Run a trial on `count` rows until the deadline, for two rounds at least; returns it and its losses.

        The first round of a process loads code: alone it would say that rounds are slow. The first trial ends before
        there is too little time for the defaults.
        """
        rows = self._fitted if count == len(self._order) else self._fitted.at(np.sort(self._order[:count]))
        always = {
            "n_estimators": int(
                min(rounds, self.memory.rounds(self._usual | settings, len(self._rows.x), self._count))
            ),
            "early_stopping_rounds": self._patience if stops_early else None,
            "verbose": False,
            "warm_start": False,
        }
        model = copy.copy(self._model).set_params(**self._usual | settings | always)
        started, ends = clock(), []

        def is_over(_state: Any) -> bool:
            ends.append(clock())
            if is_first and len(ends) > 1:
                needed = ends[0] - started + DEFAULT_ROUNDS * float(np.median(np.diff(ends)))
                self._latest = self._end - needed * len(self._rows.x) / len(rows.x) / SPARE
            return len(ends) > 1 and ends[-1] >= min(deadline, self._latest)

        model._boost(rows, self._objective, [self._held], FitOptions(callbacks=[is_over]), None, ALONE)
        losses, best = model.booster_.losses, int(np.argmin(model.booster_.losses)) + 1
        round_s = float(np.median(np.diff(ends))) if len(ends) > 1 else ends[0] - started
        trial = SettingsTrial(
            settings=settings,
            rows=count,
            split=split,
            rounds=best,
            loss=float(losses[best - 1]),
            seconds=ends[-1] - started,
            setup_seconds=max(ends[0] - started - round_s, 0.0),
            round_seconds=round_s,
            was_cut=len(losses) < rounds and len(losses) - best < self._patience,
        )
        self.trials.append(trial)
        return trial, losses

    def run(self) -> tuple[SettingsTrial, str]:
        """The best settings, and why these."""
        started, total = clock(), len(self._order)
        given_s = self._end - started
        defaults = next(settings for settings in self._defaults() if self._has_room(settings))
        first, losses = self._run(defaults, total, started + FIRST_SHARE * given_s, is_first=True)
        default_loss = losses[min(DEFAULT_ROUNDS, len(losses)) - 1]
        usual = replace(first, rounds=DEFAULT_ROUNDS, loss=default_loss, was_cut=False)
        best = self._best(first, min(started + SEARCH_SHARE * given_s, self._latest))
        end = min(started + COMPARED_SHARE * given_s, self._latest)
        precise, reason = self._with_precision(best, end)
        alike = usual.settings | {"gradient_precision": precise.settings["gradient_precision"]}
        usual = replace(
            usual,
            settings=alike,
            round_seconds=usual.round_seconds * precise.round_seconds / best.round_seconds,
        )
        chosen, compared = self._compared(usual, precise, end)
        return chosen, f"{compared}; {reason}"

    def _best(self, first: SettingsTrial, end: float) -> SettingsTrial:
        """The best trial on all rows until `end`; the first has the defaults, and may be the only one."""
        total = len(self._order)
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
        for settings in filter(self._has_room, candidates):
            if clock() >= end:
                break
            trials.append(self._run(settings, count, min(clock() + 2 * usual_s, end))[0])
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

    def _with_precision(self, best: SettingsTrial, end: float) -> tuple[SettingsTrial, str]:
        """The best settings, and why: with float32 gradients where codes are slower or the loss 1% larger."""
        settings = {"gradient_precision": self._usual["gradient_precision"]} | best.settings
        if "gradient_precision" in self.of_user:
            return replace(best, settings=settings), "gradient_precision was given"
        full_settings = settings | {"gradient_precision": GradientPrecision.F32.value}
        is_late = best.was_cut or clock() + 1.2 * best.seconds > end
        if is_late or self._model.device == "cuda" or not self._has_room(full_settings):
            reason = "f32 was not tried: not on a GPU, nor where time or memory is short"
            return replace(best, settings=settings), reason
        full, _ = self._run(full_settings, best.rows, clock() + 1.2 * best.seconds)
        change, speed = (best.loss - full.loss) / (abs(full.loss) or 1.0), full.round_seconds / best.round_seconds
        reason = f"a round of i16 is {speed:.2f} times as fast as one of f32, and its loss {change:+.2%}"
        return full if change > LOSS_MARGIN or speed <= 1 else replace(best, settings=settings), reason

    def _compared(self, usual: SettingsTrial, best: SettingsTrial, end: float) -> tuple[SettingsTrial, str]:
        """The best trial, with the rounds that are best on other rows, if it is better there than the defaults.

        Where many rows were held out, or time is short, the first ones decide; where those are few, none do.
        """
        rounds = best.rounds_wanted
        if (best.settings, rounds) == (usual.settings, DEFAULT_ROUNDS):
            return usual, "nothing was better than the defaults"
        held = 0 if self._watched else len(self._held.rows.x)
        few, most = (math.ceil(rows / max(held, 1)) for rows in (FEW_HELD, ENOUGH_HELD))
        least, most = min(few, FEW_SPLITS), min(most, MOST_SPLITS)
        usual_s = usual.setup_seconds + DEFAULT_ROUNDS * usual.round_seconds
        one_s = (end - clock()) / least - usual_s - best.setup_seconds
        rounds = min(rounds, int(one_s / best.round_seconds))
        splits = 0
        if held and rounds >= min(best.rounds_wanted, DEFAULT_ROUNDS):
            needed_s = usual_s + best.setup_seconds + rounds * best.round_seconds
            plans = (usual, np.zeros(DEFAULT_ROUNDS)), (best, np.zeros(rounds))  # sums of losses, by round
            while splits < least or (splits < most and clock() + needed_s <= end):
                splits += 1
                del self._fitted, self._held
                self._fitted, self._held = self._split(splits)
                for plan, sums in plans:
                    more = len(sums), False
                    sums += self._run(plan.settings, plan.rows, math.inf, splits, *more)[1]
            rounds = int(np.argmin(sums)) + 1
            losses, where = [plans[0][1][-1], sums[rounds - 1]], f"rows held out {splits} times more"
            best = replace(best, rounds=rounds, was_cut=False)
        elif held < FEW_HELD and not self._watched:
            return usual, "too few rows were held out to find better settings in this time: the defaults are kept"
        else:
            splits, losses, where = 1, [usual.loss, best.loss], "the rows held out"
        margin = CHANCE * abs(losses[0]) / math.sqrt(held * splits) if held else 0.0
        text = f"on {where} the loss was {losses[1] / splits:.6g}, that of the defaults {losses[0] / splits:.6g}"
        return (best, text) if losses[1] < losses[0] - margin else (usual, f"{text}: these are kept")


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
    rows, end = with_weight(rows), started + float(options.seconds)
    search = Search(model, rows, objective, watched, options, end)
    best, reason = search.run()
    trials, room, of_user, searched = search.trials, search.memory, search.of_user, best.rows
    del search  # and its copies of rows
    left_s = SPARE * (end - clock()) - best.setup_seconds * len(rows.x) / searched
    affordable = left_s / max(best.round_seconds * len(rows.x) / searched, 1e-9)
    most = room.rounds(model.get_params() | best.settings, len(rows.x))
    affordable = min(affordable, of_user.get("n_estimators", math.inf), most)
    rate, rounds = rate_and_rounds(best.rounds_wanted, affordable, of_user.get("learning_rate", TRIAL_RATE))
    chosen = {"learning_rate": rate, "n_estimators": rounds} | of_user | best.settings
    settings = model.get_params() | chosen | {"early_stopping_rounds": None, "warm_start": False}
    last = copy.copy(model).set_params(**settings)
    callbacks = [*callbacks_of(options.callbacks), lambda _state: clock() >= end]
    try:
        last._boost(rows, objective, watched, replace(options, callbacks=callbacks), None, ALONE)
    finally:
        vars(estimator).update({name: value for name, value in vars(last).items() if name == "booster_"})
    settings["n_estimators"] = last.booster_.rounds
    estimator.search_ = {
        "settings": settings,
        "seconds": float(options.seconds),
        "seconds_taken": clock() - started,
        "memory": None if options.memory is None else int(room.limit),
        "memory_needed": room.fit_bytes(settings, len(rows.x), last.booster_.rounds),
        "reason": reason,
        "trials": [asdict(trial) for trial in trials],
    }
