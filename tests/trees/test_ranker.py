"""Ranking against LightGBM's lambdarank: the first tree, NDCG on held-out queries, files."""

from __future__ import annotations

import numpy as np
import pytest

from bitplan.trees import BoostedTreesRanker, TreesError, from_lightgbm, load_trees
from bitplan.trees.ranking_loss import Queries
from tests.trees.samples import table

SETTINGS = {"max_leaves": 8, "min_child_samples": 1, "min_child_weight": 0.5}  # LightGBM only estimates row counts


def queries(count=80, seed=0):
    """Rows, relevance 0 to 3, and sizes of queries from 5 to 24 rows."""
    sizes = np.random.default_rng(seed).integers(5, 25, count)
    x, y = table(int(sizes.sum()), seed=seed)
    return x, np.digitize(y, [0.3, 1.0, 1.6]), sizes


def test_ranking_is_lightgbms(tmp_path):
    lightgbm = pytest.importorskip("lightgbm")
    (x, y, sizes), (held_x, held_y, held_sizes) = queries(), queries(seed=1)
    parameters = {"objective": "lambdarank", "num_leaves": 8, "min_data_in_leaf": 1, "verbose": -1, "num_threads": 1}
    parameters |= {"min_data_in_bin": 1, "min_sum_hessian_in_leaf": 0.5}
    data, seen = lightgbm.Dataset(x, y, group=sizes), {}
    held = lightgbm.Dataset(held_x, held_y, group=held_sizes, reference=data)
    parameters["eval_at"] = [5]
    peer = lightgbm.train(parameters, data, 30, valid_sets=[held], callbacks=[lightgbm.record_evaluation(seen)])
    model = BoostedTreesRanker(n_estimators=30, **SETTINGS)
    model.fit(x, y, sizes, eval_set=[(held_x, held_y)], eval_group=[held_sizes])
    stages = list(model.staged_predict(held_x))
    np.testing.assert_allclose(stages[0], peer.predict(held_x, num_iteration=1), rtol=1e-4)
    ours, theirs = model.evals_result_["valid_0"]["ndcg@5"], seen["valid_0"]["ndcg@5"]
    assert ours[0] == pytest.approx(theirs[0])  # the same trees: the metric is the same
    assert ours[-1] > theirs[-1] - 0.01
    assert ours[-1] > ours[0] > 0.6  # an order by chance has 0.4
    read = lightgbm.Booster(model_str=model.to_lightgbm())
    np.testing.assert_array_equal(read.predict(held_x), model.predict(held_x))
    np.testing.assert_array_equal(from_lightgbm(peer).predict(held_x), peer.predict(held_x))
    model.save(tmp_path / "model.json")
    again = load_trees(tmp_path / "model.json")
    assert type(again) is BoostedTreesRanker
    np.testing.assert_array_equal(again.predict(held_x), model.predict(held_x))


def test_rows_without_weight_do_not_count_and_early_stopping_keeps_the_best():
    x, y, sizes = queries(30)
    ends = zip(sizes, sizes.cumsum(), strict=True)
    junk = np.concatenate([np.r_[np.arange(stop - size, stop), 0] for size, stop in ends])
    weights = np.concatenate([np.r_[np.ones(size), 0.0] for size in sizes])
    settings = SETTINGS | {"n_estimators": 25, "early_stopping_rounds": 3, "eval_at": [3, 10]}
    held = {"eval_set": (x, y), "eval_group": sizes}
    plain = BoostedTreesRanker(**settings).fit(x, y, sizes, **held)
    weighted = BoostedTreesRanker(**settings).fit(x[junk], y[junk], sizes + 1, weights, **held)
    np.testing.assert_array_equal(weighted.predict(x), plain.predict(x))
    seen = plain.evals_result_["valid_0"]
    assert list(seen) == ["ndcg@3", "ndcg@10"]
    assert plain.n_iter_ == int(np.argmax(seen["ndcg@3"])) + 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "group: expected the number of rows of each query"),
        ({"group": [3, 3]}, "group: expected whole numbers above 0, the rows of each query, 8 together"),
        ({"group": [8], "eval_set": (np.ones((8, 2)), np.ones(8))}, "eval_group: expected the number of rows"),
        ({"group": [4, 4], "y": np.full(8, 0.5)}, "y: a relevance is a whole number from 0 to 31, got 0.5 in row 0"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(TreesError, match=message):
        BoostedTreesRanker().fit(np.ones((8, 2)), **({"y": np.arange(8) % 3} | arguments))
    with pytest.raises(TreesError, match="early_stopping_rounds: a ranker watches whole queries"):
        BoostedTreesRanker(early_stopping_rounds=2).fit(np.ones((8, 2)), np.arange(8) % 3, [8])


def test_a_query_may_have_one_row():
    assert Queries("group", [1, 7], np.zeros(8)).starts.tolist() == [0, 1, 8]
    with pytest.raises(TreesError, match="group: expected whole numbers above 0"):
        Queries("group", [0, 8], np.zeros(8))


def test_queries_of_rows_are_as_good_as_sizes():
    x, y, sizes = queries(20)
    ids = np.repeat([f"query {number}" for number in range(len(sizes))], sizes)
    settings = SETTINGS | {"n_estimators": 3}
    plain = BoostedTreesRanker(**settings).fit(x, y, sizes, eval_set=(x, y), eval_group=sizes)
    by_row = BoostedTreesRanker(**settings).fit(x, y, qid=ids, eval_set=[(x, y)], eval_qid=[ids])
    np.testing.assert_array_equal(by_row.predict(x), plain.predict(x))
    assert by_row.evals_result_ == plain.evals_result_
    with pytest.raises(TreesError, match="qid: rows of one query lie apart; sort X, y and qid by query"):
        plain.fit(x, y, qid=np.arange(len(y)) % 7)
    for ids in (np.r_[np.zeros(len(y) - 1), np.nan], [*["a"] * (len(y) - 1), None]):
        with pytest.raises(TreesError, match=f"qid: row {len(y) - 1} has no query, (nan|None)"):
            plain.fit(x, y, qid=ids)
    ids = np.zeros(len(y))
    with pytest.raises(TreesError, match="qid: the sizes of queries are given, too"):
        plain.fit(x, y, sizes, qid=ids)
    with pytest.raises(TreesError, match=r"eval_qid: expected the query of each row, got shape \(0,\)"):
        plain.fit(x, y, sizes, eval_set=(x, y), eval_qid=[])
