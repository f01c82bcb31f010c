"""Contributions against their definition, and against LightGBM's of the exported model."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from bitplan.trees import BoostedTreesClassifier, BoostedTreesRegressor
from tests.trees.samples import table


def rows_with_categories():
    x, y = table(600, missing=0.1)
    x[:, 4] = np.random.default_rng(5).integers(0, 30, len(x))
    return x, np.nan_to_num(y) + np.sin(x[:, 4])


def expected_score(tree, row, known, node=0):
    """The mean of a tree's leaves, where a feature that is not known sends training's rows both ways."""
    if node < 0:
        return tree.leaf_value[~node], tree.leaf_rows[~node]
    sides = [expected_score(tree, row, known, child) for child in (tree.left[node], tree.right[node])]
    rows = sides[0][1] + sides[1][1]
    if tree.feature[node] not in known:
        return sum(value * count for value, count in sides) / rows, rows
    number = row[tree.feature[node]]
    goes_left = tree.missing_left[node] if np.isnan(number) else number <= tree.threshold[node]
    return sides[0 if goes_left else 1][0], rows


def test_contributions_are_shapley_values():
    x, y = table(200, 4, missing=0.1)
    model = BoostedTreesRegressor(n_estimators=1, max_leaves=12, min_child_samples=5).fit(x, np.nan_to_num(y))
    tree, row = model.booster_.trees[0], x[7]
    found = model.predict(x[7:8], contributions=True)[0]
    for feature in range(4):
        others, value = [other for other in range(4) if other != feature], 0.0
        for size in range(4):
            weight = math.factorial(size) * math.factorial(3 - size) / math.factorial(4)
            for known in itertools.combinations(others, size):
                value += weight * (
                    expected_score(tree, row, {*known, feature})[0] - expected_score(tree, row, known)[0]
                )
        np.testing.assert_allclose(found[feature], value, atol=1e-12)
    np.testing.assert_allclose(found[4], model.booster_.start[0] + expected_score(tree, row, ())[0])


@pytest.mark.parametrize("classes", [0, 2, 3])
def test_contributions_are_lightgbms(classes):
    lightgbm = pytest.importorskip("lightgbm")
    x, y = rows_with_categories()
    kind, target = BoostedTreesRegressor, y
    if classes:
        kind, target = BoostedTreesClassifier, np.digitize(y, np.quantile(y, np.arange(1, classes) / classes))
    model = kind(n_estimators=10, categorical_features=[4]).fit(x, target)
    rows = np.concatenate([x, [[np.nan] * 5, [1e300] * 5, [0, 0, 0, 0, -1]]])
    found = model.predict(rows, contributions=True)
    expected = lightgbm.Booster(model_str=model.to_lightgbm()).predict(rows, pred_contrib=True)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-11)
    sums = found.reshape(len(rows), -1, 6).sum(axis=2)
    np.testing.assert_allclose(sums, model.booster_.scores(rows), rtol=1e-9, atol=1e-11)
    one = kind(n_estimators=10, categorical_features=[4], n_jobs=1).fit(x, target)
    np.testing.assert_array_equal(one.predict(rows, contributions=True), found)


def test_a_tree_without_splits_contributes_to_the_base_only():
    x, y = table(60, 4)
    model = BoostedTreesRegressor(n_estimators=2, max_leaves=1).fit(x, np.nan_to_num(y))
    found = model.predict(x[:3], contributions=True)
    np.testing.assert_array_equal(found[:, :4], 0.0)
    np.testing.assert_allclose(found[:, 4], model.predict(x[:3]))
