"""The fast grower against the naive one, tree by tree; threads change nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bitplan.base.loops import helper_threads, jit
from bitplan.base.loops.jit import use_threads
from bitplan.trees import histogram, thread_workspace
from bitplan.trees.gradients import GradientPrecision, prepare
from bitplan.trees.grow import TreeGrower
from tests.crosses import few
from tests.trees.naive import NaiveGrower
from tests.trees.samples import binned, rules, table


@pytest.fixture(autouse=True)
def by_a_team(monkeypatch):
    monkeypatch.setattr(jit, "HAND_OUT_NS", 1)  # every thread pays


def assert_same_tree(grown, splits, leaves):
    tree = grown.tree
    assert len(splits) == len(tree.feature)
    for node, split in enumerate(splits):
        assert tree.feature[node] == split["feature"]
        assert tree.gain[node] == split["gain"]
        assert tree.missing_left[node] == split["missing_left"]
        np.testing.assert_array_equal(grown.left_bins[node].astype(bool), split["goes_left"])
    for rows, leaf in zip(grown.leaf_rows, leaves, strict=True):
        np.testing.assert_array_equal(np.sort(rows), leaf.rows)


def both(x, y, precision, tree_rules, categorical=(), features=None, key=7, rows=None):
    data, bins = binned(x, categorical)
    rng = np.random.default_rng(1)
    hess = rng.uniform(0.1, 1.0, len(y)).astype(np.float32)
    gradients = prepare(y.astype(np.float32), hess, precision, key)
    features = np.arange(x.shape[1]) if features is None else features
    rows = np.arange(len(x), dtype=np.uint32) if rows is None else rows
    grower = TreeGrower(data, bins, tree_rules)
    grower.grow(prepare(hess, hess, precision, None), rows.copy(), features)  # of which the next keeps nothing
    grown = grower.grow(gradients, rows.copy(), features)
    naive = NaiveGrower(data.columns, bins, tree_rules)
    splits, leaves = naive.grow(gradients, rows, features)
    assert_same_tree(grown, splits, leaves)
    values = [naive.value(leaf.totals, leaf.bounds) for leaf in leaves]
    np.testing.assert_array_equal(grown.tree.leaf_value, values)
    return grown


@pytest.mark.cross("precision", GradientPrecision)
@pytest.mark.cross(
    "changes",
    [
        {},
        {"best_first": False},
        {"max_depth": 3, "l2": 1.0},
        {"l1": 3.0, "min_child_weight": 8.0},
        {"min_gain": 2.0, "min_child_rows": 1, "max_leaves": 24},
        {"monotone": np.array([1, -1, 0, 0, 1])},
        {"max_leaves": 1},
    ],
    ids=lambda changes: "-".join(changes) or "plain",
)
def test_fast_equals_naive(precision, changes):
    x, y = table(missing=0.1)
    both(x, y, precision, rules(**changes))


@pytest.mark.parametrize("precision", GradientPrecision)
def test_categories_equal_naive(precision):
    x, y = table()
    rng = np.random.default_rng(3)
    x[:, 3] = rng.integers(0, 12, len(x))
    x[rng.random(len(x)) < 0.05, 3] = np.nan
    grown = both(x, y + np.sin(3 * np.nan_to_num(x[:, 3])), precision, rules(), categorical=(3,))
    assert any(numbers is not None for numbers in grown.tree.categories)


@pytest.mark.parametrize("precision", GradientPrecision)
def test_nodes_beyond_the_narrow_cells_equal_naive(precision, monkeypatch):
    monkeypatch.setattr(histogram, "NARROW_ROWS", 60)  # parents wide, children wide or narrow
    x, y = table(missing=0.1)
    both(x, y, precision, rules(max_leaves=12))


@pytest.mark.parametrize("l2", few([1e-300, 1e-14, 1e-9, 1e9, 1e14, 1e30, 1e300], 3))
def test_regularization_of_any_size_equals_naive(l2):
    x, y = table(200, missing=0.1)
    both(x, y, GradientPrecision.I16, rules(l2=l2))


@pytest.mark.parametrize("scale", few([1e-30, 1e-12, 1e12, 1e30], 2))
def test_gradients_of_any_size_equal_naive(scale):
    x, y = table(200, missing=0.1)
    both(x, y * scale, GradientPrecision.I16, rules(l2=0.5))


def test_some_features_and_some_rows():
    x, y = table()
    rows = np.arange(0, len(x), 3, dtype=np.uint32)
    grown = both(x, y, GradientPrecision.I16, rules(), features=np.array([1, 4]), rows=rows)
    assert set(grown.tree.feature) <= {1, 4}


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    precision=st.sampled_from(GradientPrecision),
    features=st.sampled_from([1, 2, 3, 5, 8, 18, 20]),  # few loops to compile
    rows=st.integers(2, 120),
    missing=st.sampled_from([0.0, 0.3]),
    l1=st.sampled_from([0.0, 0.5]),
    best_first=st.booleans(),
)
def test_any_table_equals_naive(seed, precision, features, rows, missing, l1, best_first):
    x, y = table(rows, features, seed, missing)
    changes = {"min_child_rows": 2, "max_leaves": 6, "l1": l1, "best_first": best_first}
    both(x, y, precision, rules(features, **changes))


@pytest.mark.cross("precision", GradientPrecision)
@pytest.mark.cross("changes", [{}, {"best_first": False}, {"monotone": np.array([1, -1, 0, 0, 1])}], ids=str)
def test_growing_with_other_processes_equals_naive(precision, changes, monkeypatch):
    monkeypatch.setattr(TreeGrower, "_grow_by_team", TreeGrower._grow_with_others)
    x, y = table(missing=0.1)
    both(x, y, precision, rules(**changes))


@pytest.mark.parametrize("precision", GradientPrecision)
def test_threads_change_nothing(precision, monkeypatch):
    monkeypatch.setattr(thread_workspace, "MEETING_NUMBERS", 100)  # so that this table has nodes of both kinds
    x, y = table(6000, 20, missing=0.05)
    data, bins = binned(x)
    gradients = prepare(y.astype(np.float32), np.ones(len(y), np.float32), precision, 3)
    result = []
    for threads in (1, 2, 4):
        with use_threads(threads):
            grower = TreeGrower(data, bins, rules(20, max_leaves=63))
            result.append(grower.grow(gradients, np.arange(len(x), dtype=np.uint32), np.arange(20)))
    for other in result[1:]:
        for name in ("feature", "threshold", "left", "right", "gain", "leaf_value", "leaf_rows"):
            np.testing.assert_array_equal(getattr(result[0].tree, name), getattr(other.tree, name))
        for a, b in zip(result[0].leaf_rows, other.leaf_rows, strict=True):
            np.testing.assert_array_equal(np.sort(a), np.sort(b))


def test_a_team_begins_without_a_thread_that_does_not_come(monkeypatch):
    """Of seven threads that were asked for one is there: the tree is that of one."""
    x, y = table(3000, 4)
    data, bins = binned(x)
    gradients = prepare(y.astype(np.float32), np.ones(len(y), np.float32), GradientPrecision.I16, 3)
    grown = []
    for threads in (1, 7):
        with use_threads(threads):
            grower = TreeGrower(data, bins, rules(4))
            grown.append(grower.grow(gradients, np.arange(len(x), dtype=np.uint32), np.arange(4)).tree)
        monkeypatch.setattr(helper_threads, "run", lambda function, job, *_, **__: function(job))
    np.testing.assert_array_equal(grown[0].leaf_value, grown[1].leaf_value)
    assert grown[0].leaves > 2


@pytest.mark.parametrize("features", [5, 40])
def test_columns_are_copied_for_large_nodes_alone(features):
    """The tree is that of columns that were all there; small nodes are divided by panels."""
    x, y = table(6000, features)
    gradients = prepare(y.astype(np.float32), np.ones(len(y), np.float32), GradientPrecision.I16, 3)
    grown = []
    for threads, copies_all in ((2, True), (2, False), (1, False)):
        data, bins = binned(x)
        assert not data.is_there.any()
        if copies_all:
            assert data.columns.shape == (features, len(x))
        with use_threads(threads):
            grower = TreeGrower(data, bins, rules(features, max_leaves=200, min_child_rows=2))
            grown.append(grower.grow(gradients, np.arange(len(x), dtype=np.uint32), np.arange(features)))
    used = set(grown[0].columns.tolist())
    assert 0 < data.is_there.sum() < len(used)
    for other in grown[1:]:
        for name in ("feature", "threshold", "left", "right", "leaf_value", "leaf_rows"):
            np.testing.assert_array_equal(getattr(grown[0].tree, name), getattr(other.tree, name))
        for a, b in zip(grown[0].leaf_rows, other.leaf_rows, strict=True):
            np.testing.assert_array_equal(np.sort(a), np.sort(b))
    filled = data.columns.copy()
    np.testing.assert_array_equal(filled, binned(x)[0].columns)
