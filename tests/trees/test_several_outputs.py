"""Several targets, or several quantiles, in one fit: the trees of each are those of a fit to it alone."""

from __future__ import annotations

import numpy as np
import pytest

from bitplan.trees import BoostedTreesClassifier, BoostedTreesRegressor, TreesError, load_trees

SMALL = {"n_estimators": 4, "max_leaves": 6}
rng = np.random.default_rng(0)
X = rng.standard_normal((300, 4))
Y = np.column_stack([X[:, 0] + X[:, 1], X[:, 2] * X[:, 3], rng.standard_normal(300)])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"objective": "absolute_error", "subsample": 0.7},
        {"objective": "poisson", "gradient_precision": "i16", "stochastic_rounding": False},
    ],
)
def test_each_target_has_the_trees_of_a_fit_to_it_alone(settings):
    y = np.exp(Y) if settings.get("objective") == "poisson" else Y
    weights = rng.random(300)
    together = BoostedTreesRegressor(**SMALL, **settings).fit(X, y, weights)
    for place in range(3):
        alone = BoostedTreesRegressor(**SMALL, **settings).fit(X, y[:, place], weights)
        np.testing.assert_array_equal(together.predict(X)[:, place], alone.predict(X))
    assert together.n_outputs_ == 3
    assert together.fit(X, y[:, 0]).predict(X).shape == (300,)


def test_several_quantiles_are_those_of_fits_alone_and_survive_files(tmp_path):
    lightgbm = pytest.importorskip("lightgbm")
    model = BoostedTreesRegressor(**SMALL, objective="quantile", alpha=np.array([0.1, 0.5, 0.9])).fit(X, Y[:, 0])
    for place, alpha in enumerate(model.alpha):
        alone = BoostedTreesRegressor(**SMALL, objective="quantile", alpha=alpha).fit(X, Y[:, 0])
        np.testing.assert_array_equal(model.predict(X)[:, place], alone.predict(X))
    several = BoostedTreesRegressor(**SMALL).fit(X, Y)
    for saved in (model, several):
        saved.save(tmp_path / "model.json")
        again = load_trees(tmp_path / "model.json")
        np.testing.assert_array_equal(again.predict(X), saved.predict(X))
        raw = lightgbm.Booster(model_str=saved.to_lightgbm()).predict(X, raw_score=True)
        np.testing.assert_array_equal(raw, saved.predict(X))
        further = BoostedTreesRegressor(**saved.get_params() | {"n_estimators": 2})
        target = Y[:, 0] if saved is model else Y
        whole = saved.set_params(n_estimators=6).fit(X, target).predict(X)
        np.testing.assert_array_equal(further.fit(X, target, init_model=again).predict(X), whole)


def test_watched_sets_objectives_of_ones_own_and_contributions_have_several_too():
    def squared(y, scores):
        assert y.shape == scores.shape == (300, 3)
        return scores - y, np.ones_like(y)

    own = BoostedTreesRegressor(objective=squared, **SMALL).fit(X, Y - Y.mean(axis=0))
    plain = BoostedTreesRegressor(**SMALL).fit(X, Y - Y.mean(axis=0))
    np.testing.assert_allclose(own.predict(X), plain.predict(X), atol=1e-6)
    parts = plain.predict(X[:5], contributions=True).reshape(5, 3, 5)
    np.testing.assert_allclose(parts.sum(axis=2), plain.predict(X[:5]))
    model = BoostedTreesRegressor(**SMALL, early_stopping_rounds=2).fit(X, Y, eval_set=(X, Y), eval_metric="rmse")
    mean = np.mean((model.predict(X) - Y) ** 2)
    np.testing.assert_allclose(model.evals_result_["valid_0"]["squared_error"][-1], mean)


def test_what_cannot_be_several_is_refused():
    with pytest.raises(TreesError, match="alpha: a list is for objective='quantile' and one target"):
        BoostedTreesRegressor(objective="quantile", alpha=[0.1, 0.9]).fit(X, Y)
    with pytest.raises(TreesError, match="alpha: a list is for objective='quantile'"):
        BoostedTreesRegressor(objective="huber", alpha=[1.0, 2.0]).fit(X, Y[:, 0])
    with pytest.raises(TreesError, match="alpha: a quantile is above 0 and below 1, got 1"):
        BoostedTreesRegressor(objective="quantile", alpha=[0.5, 1]).fit(X, Y[:, 0])
    with pytest.raises(TreesError, match=r"eval_set, set 0: y: expected a target .* shape \(300, 3\), got \(300,\)"):
        BoostedTreesRegressor().fit(X, Y, eval_set=(X, Y[:, 0]))
    with pytest.raises(ValueError, match="1d array"):
        BoostedTreesClassifier().fit(X, Y > 0)
