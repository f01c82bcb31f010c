"""A fit in a given time: what it chose is recorded, and gives the same trees without a clock."""

from __future__ import annotations

import dataclasses
import itertools
import json
import tracemalloc

import numpy as np
import pytest

from bitplan.trees import BoostedTreesClassifier, BoostedTreesRegressor, TreesError, budget
from bitplan.trees.boost import Rows
from bitplan.trees.estimator_base import FitOptions
from bitplan.trees.objectives import SquaredError
from tests.trees.samples import table


class Clock:
    """Time that passes by looking at it, faster from some look on, or until one."""

    def __init__(self, step=0.01, slow_from=10**9, slow_until=0):
        self.looks, self.now, self.step = itertools.count(), 0.0, step
        self.slow_from, self.slow_until = slow_from, slow_until

    def __call__(self):
        look = next(self.looks)
        self.now += self.step * (100 if look >= self.slow_from or look < self.slow_until else 1)
        return self.now


@pytest.fixture
def clock(monkeypatch):
    def use(**given):
        kept = Clock(**given)
        monkeypatch.setattr(budget, "clock", kept)
        monkeypatch.setattr(budget, "MOST_TRIALS", 6)
        return kept

    return use


def test_the_record_gives_the_same_trees_and_the_search_is_repeatable(clock):
    x, y = table(1200, missing=0.1)
    clock()
    model = BoostedTreesRegressor(l1=0.5, n_jobs=1).fit(x, y, seconds=1.5)
    settings = model.search_["settings"]
    assert BoostedTreesRegressor(**settings).fit(x, y).to_lightgbm() == model.to_lightgbm()
    assert settings["l1"] == 0.5
    assert settings["n_estimators"] == model.n_iter_ > 1
    assert model.get_params() == BoostedTreesRegressor(l1=0.5, n_jobs=1).get_params()
    assert json.loads(json.dumps(model.search_)) == model.search_
    clock()
    again = BoostedTreesRegressor(l1=0.5, n_jobs=1).fit(x, y, seconds=1.5)
    assert again.search_ == model.search_
    assert again.fit(x, y).n_iter_ == 100  # the estimator's own settings, and no record of a search
    assert not hasattr(again, "search_")


def test_the_best_settings_on_the_watched_rows_are_taken_and_the_users_stay(clock):
    x, y = table(1500)
    clock()

    def right(y, proba):
        return "right", float(np.mean((proba > 0.5) == y)), True

    model = BoostedTreesClassifier(max_leaves=4, learning_rate=0.2, gradient_precision="i8", n_jobs=1)
    model.fit(x[:1100], y[:1100] > 0, eval_set=(x[1100:], y[1100:] > 0), eval_metric=right, seconds=1)
    found = model.search_
    kept = {name: found["settings"][name] for name in ("max_leaves", "learning_rate", "gradient_precision")}
    assert kept == {"max_leaves": 4, "learning_rate": 0.2, "gradient_precision": "i8"}
    whole = [trial for trial in found["trials"] if trial["rows"] == 1100]
    best = min(whole, key=lambda trial: trial["loss"])
    assert best["settings"].items() <= found["settings"].items()
    assert best["loss"] < -0.5  # the first metric, less is better
    assert len(model.evals_result_["valid_0"]["right"]) == model.n_iter_


def test_rounds_that_the_user_gave_have_a_learning_rate_that_is_right_for_them(clock):
    x, y = table(1200)
    clock(step=0.001)
    settings = BoostedTreesRegressor(n_estimators=20, n_jobs=1).fit(x, y, seconds=0.5).search_["settings"]
    assert settings["n_estimators"] == 20
    assert settings["learning_rate"] > 0.1


def test_a_fit_that_is_slower_than_planned_ends_in_time(clock):
    x, y = table(1200)
    kept = clock()
    BoostedTreesRegressor(n_jobs=1).fit(x, y, seconds=1)
    kept = clock(slow_from=next(kept.looks) - 12)  # in the midst of the last fit
    model = BoostedTreesRegressor(n_jobs=1).fit(x, y, seconds=1)
    assert model.search_["seconds_taken"] < 1 + 3 * 100 * kept.step
    settings = model.search_["settings"]
    assert settings["n_estimators"] == model.n_iter_
    assert BoostedTreesRegressor(**settings).fit(x, y).to_lightgbm() == model.to_lightgbm()


def test_a_first_round_that_loads_code_does_not_count_as_slow(clock):
    x, y = table(1200)
    clock(step=0.003, slow_until=4)
    model = BoostedTreesRegressor(n_jobs=1).fit(x, y, seconds=2)
    assert model.n_iter_ > 50


@pytest.mark.parametrize("random_state", [None, np.random.default_rng(3)])
def test_a_drawn_seed_is_in_the_record(clock, random_state):
    x, y = table(1200)
    clock()
    model = BoostedTreesRegressor(random_state=random_state, n_jobs=1).fit(x, y, seconds=1)
    again = BoostedTreesRegressor(**model.search_["settings"]).fit(x, y)
    assert again.to_lightgbm() == model.to_lightgbm()
    assert model.random_state is random_state


@pytest.mark.parametrize(
    ("wanted", "affordable", "rate", "expected"),
    [
        (100, 100, 0.1, (0.1, 100)),
        (100, 250, 0.1, (0.04, 250)),
        (100, 5000, 0.1, (0.02, 500)),  # no smaller rate
        (100, 50, 0.1, (0.2, 50)),
        (100, 10, 0.1, (0.3, 10)),  # no larger one
        (100, -3.0, 0.1, (0.3, 1)),
    ],
)
def test_the_learning_rate_is_that_for_whose_rounds_there_is_time(wanted, affordable, rate, expected):
    assert budget.rate_and_rounds(wanted, affordable, rate) == expected


def test_the_defaults_are_kept_where_time_is_short(clock):
    x, y = table(1200)
    clock(step=0.001)
    short = BoostedTreesRegressor(n_jobs=1).fit(x, y, seconds=0.2).search_
    defaults = BoostedTreesRegressor().get_params()
    free = [name for name in budget.CHOICES if name != "max_leaves"]
    assert {name: short["settings"][name] for name in free} == {name: defaults[name] for name in free}
    assert short["settings"]["learning_rate"] * short["settings"]["n_estimators"] == pytest.approx(10, rel=0.05)


@pytest.mark.parametrize(("noise", "time_given", "kept"), [(3.0, 100.0, False), (0.0, 100.0, True), (3.0, 0.3, True)])
def test_better_settings_are_compared_with_the_defaults_on_other_rows(clock, noise, time_given, kept):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((300, 2))
    y = x[:, 0] + noise * rng.standard_normal(300)  # 100 rounds learn the noise
    now = clock(step=0.001)
    model = BoostedTreesRegressor(n_jobs=1).set_params(n_estimators=1).fit(x, y).set_params(n_estimators=100)
    search = budget.Search(model, Rows(x, y), SquaredError(), [], FitOptions(seconds=time_given), time_given)
    defaults = {name: values[0] for name, values in budget.CHOICES.items()} | {"gradient_precision": "i16"}
    usual = budget.SettingsTrial(defaults, 210, 0, 100, 1.0, 0.1, 0.0, 0.001, False)
    best = dataclasses.replace(usual, rounds=20, loss=0.5)
    chosen, reason = search._compared(usual, best, now() + time_given)
    assert (chosen is usual) == kept
    if time_given == 0.3:  # for fewer splits than are needed
        assert "too few rows were held out to find better settings in this time" in reason
    else:
        assert "rows held out 5 times more" in reason
        assert {trial.split for trial in search.trials} == {1, 2, 3, 4, 5}
        assert kept or chosen.rounds < 20


@pytest.mark.parametrize(
    ("rows", "features", "given"),
    [
        (300, 5, {"max_leaves": 255, "gradient_precision": "f32"}),
        (20_000, 28, {"gradient_precision": "i16", "n_jobs": 2}),
        (20_000, 3, {"max_leaves": 4, "gradient_precision": "f32", "n_jobs": 2}),
        (3000, 40, {"max_leaves": 127, "gradient_precision": "i16"}),
    ],
)
@pytest.mark.parametrize("classes", [2, 4])
def test_no_fit_takes_more_memory_than_is_counted(rows, features, given, classes):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, features))
    y = np.digitize(x[:, 0], np.linspace(-1, 1, classes + 1)[1:-1])
    settings = BoostedTreesClassifier(n_jobs=1, n_estimators=2).set_params(**given)
    settings.fit(x, y)  # loads code
    tracemalloc.start()
    try:
        settings.fit(x, y)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    outputs, threads = 1 if classes == 2 else classes, settings.n_jobs
    room = budget.FitMemory(np.inf, features, 8 * features + 16, 0, outputs, threads)
    counted = room.fit_bytes(settings.get_params(), rows, rounds=2)
    assert 0.3 * counted < peak < counted


def test_memory_limits_trees_and_the_rows_of_the_search(clock):
    x, y = table(4000, features=6)
    clock(step=0.005)
    free = BoostedTreesRegressor(n_jobs=1).fit(x, y, seconds=1).search_
    assert free["memory"] is None
    clock(step=0.005)
    model = BoostedTreesRegressor(n_jobs=1).fit(x, y, seconds=1, memory="2.75 MB")
    found = model.search_
    assert found["memory"] == 2_750_000 >= found["memory_needed"]
    assert found["trials"][0]["rows"] < free["trials"][0]["rows"] == 2800  # fewer rows are copied
    assert max(trial["settings"]["max_leaves"] for trial in found["trials"]) < 127
    assert BoostedTreesRegressor(**found["settings"]).fit(x, y).to_lightgbm() == model.to_lightgbm()


def test_memory_that_is_none_or_too_little_is_refused():
    x, y = table(2000)
    with pytest.raises(TreesError, match=r"memory: 2000 rows in 5 columns of bins need (\d+) bytes") as refused:
        BoostedTreesRegressor(n_jobs=1).fit(x, y, seconds=1, memory="100kB")
    least = int(str(refused.value).rsplit("memory=", 1)[1].split()[0])
    assert BoostedTreesRegressor(n_jobs=1).fit(x, y, seconds=0.2, memory=least).search_["memory_needed"] <= least
    for wrong in ("much", 0, -1, 1.5, True, "2 apples"):
        with pytest.raises(TreesError, match="memory: expected a number of bytes, or a size such as '2GB'"):
            BoostedTreesRegressor().fit(x, y, seconds=1, memory=wrong)
    with pytest.raises(TreesError, match="memory: it limits a search; give seconds, too"):
        BoostedTreesRegressor().fit(x, y, memory="2GB")


def test_what_cannot_be_searched_is_refused():
    x, y = table(100)
    model = BoostedTreesRegressor(n_estimators=2).fit(x, y)
    for given, message in (
        ({"seconds": 0}, "seconds: expected a number above 0, got 0"),
        ({"seconds": "1 h"}, "seconds: expected a number above 0, got '1 h'"),
        ({"seconds": 1, "init_model": model}, "seconds: settings are searched for a new model"),
    ):
        with pytest.raises(TreesError, match=message):
            BoostedTreesRegressor().fit(x, y, **given)
    with pytest.raises(TreesError, match="seconds: a custom objective has no loss to search by; give eval_metric"):
        BoostedTreesRegressor(objective=lambda y, s: (s - y, np.ones(len(y)))).fit(x, y, seconds=1)
    with pytest.raises(TreesError, match="l2: expected a number"):
        BoostedTreesRegressor(l2=-1).fit(x, y, seconds=1)
