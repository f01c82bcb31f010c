"""The objectives against LightGBM: losses on held-out rows, and models that both read."""

from __future__ import annotations

import numpy as np
import pytest

from bitplan.trees import BoostedTreesRegressor, TreesError, from_lightgbm, load_trees
from tests.trees.samples import table

lightgbm = pytest.importorskip("lightgbm")

OBJECTIVES = {
    "quantile": {"alpha": 0.3},
    "huber": {"alpha": 0.6},
    "gamma": {},
    "tweedie": {"tweedie_power": 1.3},
}


def amounts(rows=1500):
    x, y = table(rows)
    rng = np.random.default_rng(2)
    return x, np.exp(0.7 * y), rng.gamma(2.0, np.exp(0.7 * y) / 2)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_losses_are_lightgbms(objective, tmp_path):
    x, _, y = amounts()
    if objective == "tweedie":
        y = np.where(np.arange(len(y)) % 3 == 0, 0.0, y)
    weights = np.linspace(0.5, 2.0, 1000)
    options = OBJECTIVES[objective]
    model = BoostedTreesRegressor(objective=objective, n_estimators=30, max_leaves=8, **options)
    model.fit(x[:1000], y[:1000], sample_weight=weights, eval_set=(x[1000:], y[1000:]))
    theirs = {"tweedie_power": "tweedie_variance_power"}
    parameters = {"objective": objective, "num_leaves": 8, "verbose": -1, "num_threads": 1}
    parameters |= {theirs.get(name, name): value for name, value in options.items()}
    peer = lightgbm.train(parameters, lightgbm.Dataset(x[:1000], y[:1000], weight=weights), 30)
    held = model._objective()
    raw = peer.predict(x[1000:], raw_score=True)[:, None]
    none = np.empty(0)
    ours = model.evals_result_["valid_0"][objective]
    assert ours[-1] == pytest.approx(held.loss(y[1000:], raw, none), rel=0.01)
    assert ours[-1] < ours[0]
    # What each wrote, the other reads.
    read = lightgbm.Booster(model_str=model.to_lightgbm())
    np.testing.assert_allclose(read.predict(x), model.predict(x), rtol=1e-12)
    again = from_lightgbm(peer)
    np.testing.assert_allclose(again.predict(x), peer.predict(x), rtol=1e-12)
    assert again.objective == objective
    assert {name: getattr(again, name) for name in options} == options
    assert from_lightgbm(model.to_lightgbm()).to_lightgbm() == model.to_lightgbm()
    model.save(tmp_path / "model.json")
    assert load_trees(tmp_path / "model.json").get_params() == model.get_params()


def test_gradients_are_those_of_the_losses():
    _, _, y = amounts(50)
    scores = np.linspace(-1, 1.5, 50)[:, None]
    for name, options in OBJECTIVES.items():
        objective = BoostedTreesRegressor(objective=name, **options)._objective()
        grads, hess = np.empty((1, 50), np.float32), np.empty((1, 50), np.float32)
        objective.gradients(y, scores, np.empty(0), grads, hess)
        step, none = 1e-5, np.empty(0)
        for row in range(0, 50, 7):
            one, at = y[row : row + 1], scores[row : row + 1]
            slope = (objective.loss(one, at + step, none) - objective.loss(one, at - step, none)) / (2 * step)
            np.testing.assert_allclose(grads[0, row], slope, rtol=1e-4, atol=1e-5)
        assert (hess > 0).all()


def test_a_quantile_has_its_share_below():
    x, _, y = amounts()
    model = BoostedTreesRegressor(objective="quantile", alpha=0.1, n_estimators=25, max_leaves=8).fit(x, y)
    assert abs((y < model.predict(x)).mean() - 0.1) < 0.03


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "quantile", "alpha": 1}, "alpha: a quantile is above 0 and below 1"),
        ({"objective": "huber", "alpha": 0}, "alpha: expected a number above 0"),
        ({"objective": "tweedie", "tweedie_power": 2}, "tweedie_power: expected a number above 1 and below 2"),
        ({"objective": "tweedie", "tweedie_power": 2.5}, "tweedie_power: expected a number above 1 and at most 2"),
        ({"objective": "gamma"}, "y: the gamma objective expects numbers above 0, got values from 0.0"),
    ],
)
def test_refusals(settings, message):
    x, _, y = amounts(60)
    with pytest.raises(TreesError, match=message):
        BoostedTreesRegressor(**settings).fit(x, np.where(np.arange(60) == 5, 0.0, y))


def test_a_target_a_little_below_zero_is_refused():
    x, _, y = amounts(60)
    with pytest.raises(TreesError, match=r"y: .*got values from -0\.5 to "):
        BoostedTreesRegressor(objective="tweedie").fit(x, np.where(np.arange(60) == 5, -0.5, y))
