"""What users of LightGBM, XGBoost and scikit-learn look for: metrics by name, leaves, first rounds, sparse tables."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import sparse
from sklearn import metrics

from bitplan.trees import BoostedTreesClassifier, BoostedTreesRegressor, TreesError
from tests.trees.samples import table

SMALL = {"n_estimators": 4, "max_leaves": 6, "n_jobs": 1}


@pytest.fixture(scope="module")
def rows():
    x, y = table(300, missing=0.1)
    return x, y, np.digitize(y, [-0.5, 0.5])


def test_metrics_by_name_are_scikit_learns(rows):
    x, y, places = rows
    weights = np.linspace(0.5, 2.0, 300)
    model = BoostedTreesClassifier(**SMALL, early_stopping_rounds=2)
    named = ["auc", "average_precision", "logloss", "accuracy", "error"]
    model.fit(x, y > 0, eval_set=(x, y > 0), eval_metric=named, eval_sample_weight=weights)
    seen = {name: values[model.n_iter_ - 1] for name, values in model.evals_result_["valid_0"].items()}
    proba = model.predict_proba(x)[:, 1]
    np.testing.assert_allclose(seen["auc"], metrics.roc_auc_score(y > 0, proba, sample_weight=weights))
    np.testing.assert_allclose(seen["logloss"], metrics.log_loss(y > 0, proba, sample_weight=weights))
    np.testing.assert_allclose(seen["error"], 1 - seen["accuracy"])
    classes = BoostedTreesClassifier(**SMALL).fit(
        x, places, eval_set=(x, places), eval_metric=["auc", "logloss", "error"]
    )
    last = {name: values[-1] for name, values in classes.evals_result_["valid_0"].items()}
    np.testing.assert_allclose(last["logloss"], last["multiclass"])
    numbers = BoostedTreesRegressor(**SMALL).fit(x, y, eval_set=(x, y), eval_metric=["rmse", "mae", "l2", "r2"])
    last = {name: values[-1] for name, values in numbers.evals_result_["valid_0"].items()}
    np.testing.assert_allclose(last["rmse"] ** 2, last["l2"])
    np.testing.assert_allclose(last["l2"], last["squared_error"])
    with pytest.raises(TreesError, match=r"one of 'auc'.*got 'gini'"):
        numbers.fit(x, y, eval_set=(x, y), eval_metric="gini")
    with pytest.raises(TreesError, match="eval_metric: 'auc' is not for these targets"):
        numbers.fit(x, y, eval_set=(x, y), eval_metric="auc")


def test_leaves_first_rounds_and_the_table_of_trees_agree(rows):
    lightgbm = pytest.importorskip("lightgbm")
    x, _, places = rows
    model = BoostedTreesClassifier(**SMALL).fit(x, places)
    leaves = model.apply(x)
    assert leaves.shape == (300, 12)
    booster = lightgbm.Booster(model_str=model.to_lightgbm())
    np.testing.assert_array_equal(leaves, booster.predict(x, pred_leaf=True))
    frame = model.trees_to_dataframe()
    of_tree = frame[(frame["tree"] == 5) & frame["leaf"].notna()]
    assert of_tree["output"].unique().tolist() == [2]
    np.testing.assert_array_equal(of_tree["rows"], np.bincount(leaves[:, 5], minlength=len(of_tree)))
    assert frame.loc[frame["node"].notna(), "gain"].min() > 0
    two = model.first_rounds(2)
    assert two.n_iter_ == 2
    np.testing.assert_array_equal(two.predict_proba(x), list(model.staged_predict_proba(x))[1])
    np.testing.assert_array_equal(two.apply(x), leaves[:, :6])
    assert model.n_iter_ == 4
    with pytest.raises(TreesError, match="rounds: expected a whole number, 0 to 4, got 5"):
        model.first_rounds(5)


def test_metrics_that_cannot_be_are_refused(rows):
    x, y, places = rows
    model = BoostedTreesClassifier(**SMALL)
    with pytest.raises(TreesError, match="eval_metric: 'auc' is not for these targets and predictions: Only one class"):
        model.fit(x, y > 0, eval_set=(x[y > 0], y[y > 0] > 0), eval_metric="auc")
    with pytest.raises(TreesError, match=r"eval_metric: expected each name once, got \['auc', 'auc'\]"):
        model.fit(x, y > 0, eval_set=(x, y > 0), eval_metric=["auc", "auc"])
    for wrong in ("aucc", [["auc"]], 3):  # without a set to watch, too
        with pytest.raises(TreesError, match=r"eval_metric: expected a function of .* or a list of such, got "):
            model.fit(x, y > 0, eval_metric=wrong)
    model.fit(x, places, eval_set=(x, places), eval_metric="multi_logloss")
    losses = model.evals_result_["valid_0"]
    np.testing.assert_allclose(losses["multi_logloss"], losses["multiclass"])


@pytest.mark.parametrize("form", [sparse.csr_matrix, sparse.csc_array, sparse.coo_matrix])
def test_sparse_tables_are_their_numbers(form, rows):
    x, y, _ = rows
    x = np.where(np.nan_to_num(x) > 0.3, x, 0.0)
    model = BoostedTreesRegressor(**SMALL).fit(form(x), y)
    assert model.to_lightgbm() == BoostedTreesRegressor(**SMALL).fit(x, y).to_lightgbm()
    np.testing.assert_array_equal(model.predict(form(x)), model.predict(x))


@pytest.mark.parametrize("dense_columns", [0, 2])
def test_sparse_columns_of_a_frame_are_their_numbers(dense_columns, rows):
    pandas = pytest.importorskip("pandas")
    x, y, _ = rows
    x = np.where(np.nan_to_num(x) > 0.3, x, 0.0)
    plain = pandas.DataFrame(x, columns=[f"column {place}" for place in range(x.shape[1])])
    plain["text"] = pandas.Categorical(np.where(x[:, 0] > 0, "a", "b"))
    frame = plain.copy()
    for place in range(dense_columns, x.shape[1]):
        frame.isetitem(place, pandas.arrays.SparseArray(x[:, place], fill_value=0.0))
    model = BoostedTreesRegressor(**SMALL).fit(frame, y)
    assert model.to_lightgbm() == BoostedTreesRegressor(**SMALL).fit(plain, y).to_lightgbm()
    np.testing.assert_array_equal(model.predict(frame), model.predict(plain))
    everything = frame.drop(columns="text")
    model.fit(everything, y)
    np.testing.assert_array_equal(model.predict(everything), model.predict(plain.drop(columns="text")))


def test_names_of_others_are_answered_with_ours(rows):
    x, y, _ = rows
    with pytest.raises(TypeError, match="BoostedTreesClassifier: num_leaves is called max_leaves here"):
        BoostedTreesClassifier(num_leaves=31)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        BoostedTreesClassifier(nonsense=1)
    with pytest.raises(TreesError, match=r"max_depth \(None: no limit\): expected a whole number, at least 1, got -1"):
        BoostedTreesRegressor(max_depth=-1).fit(x, y)


def test_a_generator_is_a_seed_and_numpys_bools_end_a_fit(rows):
    x, y, _ = rows
    models = [
        BoostedTreesRegressor(**SMALL, subsample=0.5, random_state=np.random.default_rng(seed)).fit(x, y)
        for seed in (1, 1, 2)
    ]
    assert models[0].to_lightgbm() == models[1].to_lightgbm() != models[2].to_lightgbm()
    stopped = BoostedTreesRegressor(**SMALL).fit(x, y, callbacks=[lambda state: np.float64(state.round) >= 2])
    assert stopped.n_iter_ == 2
