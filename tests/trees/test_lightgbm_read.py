"""Models that the real LightGBM trained: they predict the same here, and are trained further."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest

from bitplan.base.errors import FileFormatError
from bitplan.trees import BoostedTreesClassifier, BoostedTreesRegressor, TreesError, from_lightgbm, load_trees
from bitplan.trees.lightgbm_read import MAX_OUTPUTS
from tests.crosses import few
from tests.trees.test_lightgbm_text import data, hostile

lightgbm = pytest.importorskip("lightgbm")

QUIET = {"verbose": -1, "num_threads": 1, "num_leaves": 8, "min_data_in_leaf": 5}


def trained(x, y, rounds=6, categorical=None, **parameters):
    table = lightgbm.Dataset(x, y, categorical_feature=categorical or [])
    return lightgbm.train(QUIET | parameters, table, rounds)


@pytest.mark.parametrize("objective", few(["regression", "regression_l1", "poisson", "binary", "multiclass"], 3))
def test_the_same_predictions_to_the_bit(objective, tmp_path):
    x, y = data()
    classes = {"binary": 2, "multiclass": 3}.get(objective, 0)
    target = np.digitize(y, np.quantile(y, np.arange(1, classes) / classes)) if classes else np.abs(y)
    more = {"num_class": 3} if objective == "multiclass" else {}
    theirs = trained(x, target, objective=objective, categorical=[4], **more)
    theirs.save_model(tmp_path / "model.txt")
    model = load_trees(tmp_path / "model.txt")
    rows = hostile(x)
    raw = theirs.predict(rows, raw_score=True).reshape(len(rows), -1)
    np.testing.assert_array_equal(model.booster_.scores(rows), raw)
    ours = model.predict_proba(rows) if classes else model.predict(rows)
    np.testing.assert_allclose(ours[:, 1] if classes == 2 else ours, theirs.predict(rows), rtol=1e-12)
    contributions = theirs.predict(x[:50], pred_contrib=True)
    np.testing.assert_allclose(model.predict(x[:50], contributions=True), contributions, atol=1e-9)
    written = lightgbm.Booster(model_str=model.to_lightgbm())
    np.testing.assert_array_equal(written.predict(rows, raw_score=True).reshape(len(rows), -1), raw)


def test_where_training_saw_no_missing_value_nan_is_zero():
    x, y = data()
    theirs = trained(np.nan_to_num(x), y)
    np.testing.assert_array_equal(from_lightgbm(theirs).predict(hostile(x)), theirs.predict(hostile(x)))


def test_a_frame_with_categories_reads_the_same():
    x, y = data()
    frame = pd.DataFrame(x, columns=list("abcde"))
    frame["e"] = pd.Categorical([f"town {town:.0f}" for town in x[:, 4]])
    theirs = lightgbm.LGBMRegressor(n_estimators=4, **QUIET).fit(frame, y)
    model = from_lightgbm(theirs)
    np.testing.assert_array_equal(model.predict(frame), theirs.predict(frame))
    assert model.feature_names_in_.tolist() == list("abcde")


def test_lightgbms_model_is_trained_further():
    x, y = data()
    theirs = trained(x, y, categorical=[4])
    model = BoostedTreesRegressor(n_estimators=10, categorical_features=[4]).fit(x, y, init_model=theirs)
    assert model.n_iter_ == 16
    stages = list(model.staged_predict(x))
    np.testing.assert_array_equal(stages[5], theirs.predict(x))
    errors = [np.mean((stage - y) ** 2) for stage in stages]
    assert errors[5:] == sorted(errors[5:], reverse=True)
    assert errors[-1] < 0.6 * errors[5]


@pytest.mark.parametrize("precision", ["f32", "i8"])
def test_a_model_trained_further_is_the_model_trained_at_once(precision):
    x, y = data()
    labels = np.digitize(y, [-0.5, 0.8])
    settings = {"gradient_precision": precision, "max_leaves": 6, "subsample": 0.8, "colsample": 0.7}
    whole = BoostedTreesClassifier(n_estimators=7, **settings).fit(x, labels, eval_set=(x, labels))
    first = BoostedTreesClassifier(n_estimators=4, **settings).fit(x, labels)
    further = BoostedTreesClassifier(n_estimators=3, **settings)
    further.fit(x, labels, init_model=first, eval_set=(x, labels))
    assert further.to_lightgbm() == whole.to_lightgbm()
    assert further.evals_result_["valid_0"]["multiclass"] == whole.evals_result_["valid_0"]["multiclass"][4:]
    assert further.best_iteration_ == whole.best_iteration_ == 7
    first.set_params(warm_start=True, n_estimators=7).fit(x, labels)
    assert first.to_lightgbm() == whole.to_lightgbm()
    with pytest.raises(TreesError, match="with warm_start expected at least the 7 rounds"):
        first.set_params(n_estimators=6).fit(x, labels)
    with pytest.raises(TreesError, match="init_model: has objective multiclass, 3 scores a row and 5 features"):
        BoostedTreesRegressor().fit(x, y, init_model=whole)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"linear_tree": True}, "tree 0: has linear leaves"),
        ({"objective": "regression", "reg_sqrt": True}, "objective: 'regression sqrt' has no counterpart"),
        ({"objective": "fair"}, "objective: 'fair' has no counterpart here; expected one of regression, "),
        ({"boosting": "rf", "bagging_freq": 1, "bagging_fraction": 0.5}, "boosting=rf averages"),
        ({"zero_as_missing": True}, "tree 0: zero is a missing value"),
    ],
)
def test_what_our_trees_cannot_do_is_refused(parameters, message):
    x, y = data()
    with pytest.raises(FileFormatError, match=message):
        from_lightgbm(trained(np.where(x < -0.5, 0, x), np.abs(y), **parameters))


EDITS = [
    ("left_child=", "left_child=0 ", "tree 0: left_child"),
    ("split_feature=", "split_feature=9 ", "tree 0: split_feature: expected 7 numbers"),
    ("num_leaves=8", "num_leaves=99999999", "num_leaves: 99999999 leaves in"),
    ("leaf_value=", "leaf_value=x", "tree 0: leaf_value: expected 8 numbers"),
    ("num_tree_per_iteration=1", f"num_tree_per_iteration={MAX_OUTPUTS}", "objective: .* has no counterpart"),
    ("num_tree_per_iteration=1", f"num_tree_per_iteration={MAX_OUTPUTS + 1}", f"expected .*, 1 to {MAX_OUTPUTS}, got"),
    ("max_feature_idx=4", "max_feature_idx=0", "tree 0: split_feature: expected 0 to 0"),
    ("tree\n", "forest\n", "expected a line 'tree'"),
]


@pytest.mark.parametrize(("old", "new", "message"), EDITS)
def test_an_edited_text_is_refused_by_place(old, new, message):
    x, y = data()
    text = trained(x, y, rounds=1).model_to_string()
    assert old in text
    with pytest.raises(FileFormatError, match=f"LightGBM model: .*{message}"):
        from_lightgbm(text.replace(old, new, 1))


def test_infinite_thresholds_paths_and_the_classes_of_an_estimator(tmp_path):
    x, y = data()
    theirs = trained(x, y, rounds=1)
    text = theirs.model_to_string()
    first = text[text.index("threshold=") + 10 :].split(" ")[0]
    endless = text.replace(f"threshold={first} ", "threshold=inf ", 1)
    rows = np.nan_to_num(x)
    np.testing.assert_array_equal(
        from_lightgbm(endless).predict(rows), lightgbm.Booster(model_str=endless).predict(rows)
    )
    theirs.save_model(tmp_path / "model.txt")
    for path in (tmp_path / "model.txt", str(tmp_path / "model.txt")):
        assert from_lightgbm(path).to_lightgbm() == from_lightgbm(text).to_lightgbm()
        assert BoostedTreesRegressor(n_estimators=1).fit(x, y, init_model=path).n_iter_ == 2
    with pytest.raises(
        FileFormatError, match=r"missing.txt: .*; give a LightGBM model's text, or the path of its file"
    ):
        from_lightgbm(str(tmp_path / "missing.txt"))
    labels = np.where(y > 0, "up", "down")
    estimator = lightgbm.LGBMClassifier(n_estimators=2, verbose=-1, n_jobs=1).fit(x, labels)
    ours = from_lightgbm(estimator)
    assert ours.classes_.tolist() == ["down", "up"]
    np.testing.assert_array_equal(ours.predict(x), estimator.predict(x))
    with pytest.raises(TreesError, match=r"init_model: its classes are \['down', 'up'\], expected those of y"):
        BoostedTreesClassifier(n_estimators=1).fit(x, y > 0, init_model=estimator)


def test_edited_sets_of_categories_are_refused():
    x, y = data()
    text = trained(x, y, rounds=1, categorical=[4]).model_to_string()
    for field, number in (("cat_threshold", "-1"), ("cat_threshold", str(2**32)), ("cat_boundaries", "1")):
        edited = re.sub(rf"^{field}=\d+", f"{field}={number}", text, flags=re.MULTILINE)
        assert edited != text
        with pytest.raises(FileFormatError, match=r"tree 0: .*they are no sets of categories"):
            from_lightgbm(edited)
    empty = re.sub(r"^cat_threshold=\d+", "cat_threshold=0", text, flags=re.MULTILINE)
    np.testing.assert_array_equal(from_lightgbm(empty).predict(x), lightgbm.Booster(model_str=empty).predict(x))
