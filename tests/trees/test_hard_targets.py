"""Targets that are hard to quantize: a model of codes is as good as one of float32 on rows held out."""

from __future__ import annotations

import numpy as np
import pytest

from bitplan.trees import BoostedTreesClassifier, BoostedTreesRegressor, recommend_gradient_precision
from bitplan.trees.objectives import Gamma, Poisson, Tweedie

ROWS = 3000
SETTINGS = {"n_estimators": 40, "n_jobs": 1}


def hard_table(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2 * ROWS, 5))
    return rng, x, 0.8 * x[:, 0] + 0.6 * x[:, 1] * x[:, 2]


@pytest.mark.parametrize(("precision", "bound"), [("i16", 1.1), ("i8", 1.7)])
def test_one_target_far_from_all_others(precision, bound):
    errors = {}
    rng, x, signal = hard_table()
    y = signal + 0.5 * rng.standard_normal(len(x))
    y[7] = 1e4
    for kind in ("f32", precision):
        model = BoostedTreesRegressor(gradient_precision=kind, **SETTINGS).fit(x[:ROWS], y[:ROWS])
        errors[kind] = np.median(np.abs(model.predict(x[ROWS:]) - signal[ROWS:]))
    assert errors[precision] < bound * errors["f32"]


@pytest.mark.parametrize("stochastic", [True, False])
def test_leaves_of_few_codes(stochastic):
    """Gamma's hessians are the targets' size: leaves of small ones had a few codes, or none."""
    rng, x, signal = hard_table(3)
    y = rng.gamma(1.0, np.exp(signal))
    losses = {}
    for kind in ("f32", "i16"):
        settings = SETTINGS | {"objective": "gamma", "gradient_precision": kind, "stochastic_rounding": stochastic}
        predicted = BoostedTreesRegressor(**settings).fit(x[:ROWS], y[:ROWS]).predict(x[ROWS:])
        losses[kind] = np.mean(np.log(predicted) + y[ROWS:] / predicted)
    assert losses["i16"] < losses["f32"] + 0.05


@pytest.mark.parametrize("precision", ["f32", "i16"])
def test_means_that_span_many_decades_do_not_run_away(precision):
    """Newton's step of a leaf far below its mean is its hessian's inverse: it led to 1e-300 and NaN."""
    rng, x, signal = hard_table()
    y = rng.gamma(1.0, np.exp(4 * signal))
    model = BoostedTreesRegressor(objective="gamma", gradient_precision=precision, **SETTINGS).fit(x[:ROWS], y[:ROWS])
    predicted, mean = model.predict(x[ROWS:]), np.exp(4 * signal[ROWS:])
    assert np.mean(np.log(predicted) + mean / predicted) < np.log(mean.mean()) - 2  # a constant has no -2, but + 1


@pytest.mark.parametrize(("objective", "power"), [(Poisson(), 1.0), (Gamma(), 2.0), (Tweedie(1.3), 1.3)])
def test_steps_end_at_the_best_value_of_a_leaf(objective, power):
    y = np.array([3.0, 1.0, 0.5])
    for score in (-30.0, -1.0, 0.0, 1.0, 30.0):
        gradients, hessians = np.empty((2, 1, 3), np.float32)
        objective.gradients(y, np.full((3, 1), score), np.empty(0), gradients, hessians)
        step = -gradients.sum(dtype=np.float64) / hessians.sum(dtype=np.float64)
        best = np.log(y.mean()) - score
        for rate in (0.1, 1.0):
            limited = objective.limit(np.array([step]), rate)[0]
            expected = step if abs(step) * rate <= abs(best) else best / rate
            assert abs(limited - expected) < 2e-2 * abs(expected), (power, score, rate)


def test_leaves_that_are_sums_of_few_codes_are_named():
    _, x, signal = hard_table()
    settings = {"gradient_precision": "i16", "renew_leaves": False, "n_estimators": 1, "objective": "gamma"}
    with pytest.warns(UserWarning, match=r"renew_leaves=False: \d+ of \d+ leaves.*gradient_precision='i16'"):
        BoostedTreesRegressor(**settings).fit(x, np.exp(6 * signal))
    BoostedTreesRegressor(**settings | {"renew_leaves": None}).fit(x, np.exp(6 * signal))


def test_advice_is_by_the_loss_of_the_objective():
    rng, x, signal = hard_table()
    counts = rng.poisson(np.exp(signal[:400]))
    advice = recommend_gradient_precision(x[:400], counts, trees=2, n_jobs=1, objective="poisson")
    predicted = np.exp(np.log(counts.mean()))
    assert all(abs(one.loss - (predicted - counts.mean() * np.log(predicted))) < 0.5 for one in advice.seen)


@pytest.mark.parametrize("precision", ["f32", "i16", "i8"])
@pytest.mark.parametrize("classes", [2, 4])
def test_a_few_rows_of_a_rare_class_do_not_make_others_sure(precision, classes):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8000, 4))
    y = rng.integers(0, classes - 1, 8000)
    y[np.argsort(x[:, 0] + rng.gumbel(size=8000))[-16:]] = classes - 1
    model = BoostedTreesClassifier(n_estimators=20, gradient_precision=precision, n_jobs=1).fit(x[:4000], y[:4000])
    scores = model.decision_function(x)
    start = np.abs(model.booster_.start).max()
    assert np.abs(scores).max() <= start + 20 * 0.1 * 5 * classes + 1e-9  # before, 1 / p a round
    held = model.predict_proba(x[4000:])[np.arange(4000), y[4000:]]
    frequent = np.bincount(y[:4000], minlength=classes) / 4000
    assert -np.log(np.maximum(held, 1e-300)).mean() < -np.log(frequent[y[4000:]]).mean() + 0.15
