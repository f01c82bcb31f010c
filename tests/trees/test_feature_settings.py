"""Interaction constraints: along a branch only features that may interact, as LightGBM has it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from bitplan.trees import BoostedTreesRegressor, TreesError
from bitplan.trees.categories import interaction_groups
from tests.trees.samples import table

SETTINGS = {"n_estimators": 6, "max_leaves": 10, "min_child_samples": 5}


def branches(tree):
    """The set of features above each leaf."""
    found, open_ = [], [(0, frozenset())]
    while open_:
        node, above = open_.pop()
        if node < 0:
            found.append(above)
        else:
            below = above | {int(tree.feature[node])}
            open_ += [(int(tree.left[node]), below), (int(tree.right[node]), below)]
    return found


@pytest.mark.parametrize("precision", ["f32", "i16"])
def test_features_of_a_branch_share_a_group(precision):
    x, y = table(1500)
    x[:, 4] = np.abs(x[:, 4] * 5).round()
    groups = [[0, 3], [1, 2, 4]]
    settings = SETTINGS | {"gradient_precision": precision, "categorical_features": [4]}
    model = BoostedTreesRegressor(interaction_constraints=groups, **settings).fit(x, y + np.sin(x[:, 4]))
    found = [branch for tree in model.booster_.trees for branch in branches(tree)]
    assert all(any(branch <= set(group) for group in groups) for branch in found)
    assert any(len(branch) == 2 for branch in found)
    free = BoostedTreesRegressor(**settings).fit(x, y + np.sin(x[:, 4]))
    everything = BoostedTreesRegressor(interaction_constraints=[range(5)], **settings).fit(x, y + np.sin(x[:, 4]))
    assert everything.to_lightgbm() == free.to_lightgbm()
    one = BoostedTreesRegressor(interaction_constraints=groups, n_jobs=1, **settings).fit(x, y + np.sin(x[:, 4]))
    assert one.to_lightgbm() == model.to_lightgbm()


def test_constraints_give_lightgbms_trees():
    lightgbm = pytest.importorskip("lightgbm")
    x, y = table(1500)
    frame = pd.DataFrame(x, columns=list("abcde"))
    model = BoostedTreesRegressor(interaction_constraints=[["a", "d"], ["a", "b"]], **SETTINGS).fit(frame, y)
    parameters = {"num_leaves": 10, "min_data_in_leaf": 5, "min_data_in_bin": 1, "verbose": -1, "num_threads": 1}
    parameters["interaction_constraints"] = [[0, 3], [0, 1], [2, 4]]  # the features that we did not name
    peer = lightgbm.train(parameters, lightgbm.Dataset(x, y), 6)
    np.testing.assert_allclose(model.predict(frame), peer.predict(x), rtol=1e-4, atol=1e-4)


def test_groups_are_refused_by_name():
    assert interaction_groups([["a"], ["a", "c"]], ["a", "b", "c"], 3).tolist() == [3, 4, 2]
    for wrong, message in (
        ([["x"]], "interaction_constraints: no feature 'x'"),
        ("ab", "interaction_constraints: expected a list of lists"),
        ([[0]] * 63, "at most 62 groups, got 64"),
    ):
        with pytest.raises(TreesError, match=message):
            interaction_groups(wrong, ["a", "b", "c"], 3)
