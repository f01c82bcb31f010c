"""Predictions of rows on a GPU are those of the CPU, to the bit; without a card Triton's interpreter computes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bitplan.trees import BoostedTreesClassifier, BoostedTreesRegressor, TreesError, tables
from tests.trees.samples import table

pytest.importorskip("triton")

from bitplan.trees.cuda import predict

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {"n_estimators": 3, "max_leaves": 9, "min_child_samples": 5, "n_jobs": 1}


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Tables that were predicted there; torch's on the CPU stand in for those of a GPU where there is none."""
    if DEVICE == "cpu":
        monkeypatch.setattr(tables, "HOST_DEVICES", ())
    seen, plain = [], predict.scores_there
    monkeypatch.setattr(predict, "scores_there", lambda booster, x: seen.append(x.shape) or plain(booster, x))
    return seen


def there(x):
    return torch.from_numpy(x).to(DEVICE)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_numbers_and_categories(dtype, calls):
    x, y = table(400, 4, missing=0.1, dtype=dtype)
    x[:, 1] = np.random.default_rng(2).integers(0, 70, 400)  # more than two words
    y = y + 3 * np.sin(x[:, 1])
    model = BoostedTreesRegressor(**SMALL, categorical_features=[1]).fit(x, y)
    assert any(numbers is not None for tree in model.booster_.trees for numbers in tree.categories)
    x[:5, 1] = np.nan, 200, -1, 69.5, -0.5  # missing, new ones, and none of the categories
    assert np.array_equal(model.predict(there(x)), model.predict(x))
    wide = np.repeat(x, 2, axis=1)
    assert np.array_equal(model.predict(there(wide)[:, ::2]), model.predict(x)), "columns that lie apart"
    assert np.array_equal(model.predict(there(np.asfortranarray(x[:7]))), model.predict(x[:7]))
    assert calls == [(400, 4), (400, 4), (7, 4)]


def test_classes_and_trees_of_one_leaf(calls):
    x, y = table(300, 3, missing=0.2)
    classes = BoostedTreesClassifier(**SMALL).fit(x, np.digitize(y, [-0.5, 0.5]))
    assert np.array_equal(classes.predict_proba(there(x)), classes.predict_proba(x))
    stumps = BoostedTreesClassifier(**SMALL | {"min_child_samples": 200}).fit(x, y > 0)
    assert {tree.leaves for tree in stumps.booster_.trees} == {1}
    assert np.array_equal(stumps.decision_function(there(x)), stumps.decision_function(x))
    assert len(calls) == 2


def test_what_is_wrong_with_a_table_is_said_as_on_the_cpu(calls):
    x, y = table(100, 3)
    model = BoostedTreesRegressor(**SMALL).fit(x, y)
    with pytest.raises(ValueError, match="X has 2 features, but BoostedTreesRegressor is expecting 3"):
        model.predict(there(x[:, :2].copy()))
    x[3, 1] = np.inf
    with pytest.raises(TreesError, match="is inf in row 3, column 1"):
        model.predict(there(x))
    assert np.array_equal(model.predict(there(np.ones((4, 3), np.int64))), model.predict(np.ones((4, 3))))
    assert not calls


@pytest.mark.gpu
def test_many_rows_on_a_card(calls):
    x, y = table(200_000, 28, missing=0.05, dtype=np.float32)
    model = BoostedTreesRegressor(n_estimators=30, max_leaves=255).fit(x, y)
    assert np.array_equal(model.predict(there(x)), model.predict(x))
    assert len(calls) == 1
