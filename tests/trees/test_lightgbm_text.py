"""The export, read by the real LightGBM: the same predictions, to the bit where only sums are compared."""

from __future__ import annotations

import numpy as np
import pytest

from bitplan.trees import BoostedTreesClassifier, BoostedTreesRegressor
from tests.crosses import few
from tests.trees.samples import table

lightgbm = pytest.importorskip("lightgbm")


def data():
    x, y = table(1500, missing=0.1)
    rng = np.random.default_rng(5)
    x[:, 4] = rng.integers(0, 60, len(x))
    return x, np.nan_to_num(y) + np.sin(x[:, 4])


def hostile(x):
    """Rows that training never saw: missing everywhere, far away, new categories."""
    extra = np.array([[np.nan] * 5, [1e300] * 5, [-1e300] * 4 + [200], [0, 0, 0, 0, -1]])
    return np.concatenate([x, extra])


@pytest.mark.parametrize("categorical", [None, [4]])
@pytest.mark.parametrize("objective", few(["squared_error", "absolute_error", "poisson"], 2))
def test_regressors(objective, categorical):
    x, y = data()
    y = np.abs(y) if objective == "poisson" else y
    settings = {"n_estimators": 12, "objective": objective, "categorical_features": categorical}
    model = BoostedTreesRegressor(gradient_precision="i16", **settings).fit(x, y)
    read = lightgbm.Booster(model_str=model.to_lightgbm())
    rows = hostile(x)
    np.testing.assert_array_equal(read.predict(rows, raw_score=True), model.booster_.scores(rows)[:, 0])
    np.testing.assert_allclose(read.predict(rows), model.predict(rows), rtol=1e-14)


@pytest.mark.parametrize("classes", [2, 4])
def test_classifiers(classes):
    x, y = data()
    labels = np.digitize(y, np.quantile(y, np.arange(1, classes) / classes))
    model = BoostedTreesClassifier(n_estimators=8).fit(x, labels)
    read = lightgbm.Booster(model_str=model.to_lightgbm())
    rows = hostile(x)
    raw = read.predict(rows, raw_score=True).reshape(len(rows), -1)
    np.testing.assert_array_equal(raw, model.booster_.scores(rows))
    expected = model.predict_proba(rows)
    np.testing.assert_allclose(read.predict(rows), expected[:, 1] if classes == 2 else expected, rtol=1e-12)
    assert read.num_trees() == len(model.booster_.trees)
    assert read.num_feature() == 5


def test_a_tree_without_splits_and_a_custom_objective():
    x, y = data()
    stump = BoostedTreesRegressor(n_estimators=3, max_leaves=1).fit(x, y)
    read = lightgbm.Booster(model_str=stump.to_lightgbm())
    np.testing.assert_array_equal(read.predict(x), stump.predict(x))
    assert "split_feature=" not in stump.to_lightgbm()
    custom = BoostedTreesRegressor(n_estimators=3, objective=lambda y, s: (s - y, np.ones_like(y))).fit(x, y)
    read = lightgbm.Booster(model_str=custom.to_lightgbm())
    np.testing.assert_array_equal(read.predict(x), custom.predict(x))
