"""What users of LightGBM, XGBoost and scikit-learn look for: metrics by name, leaves, first rounds, sparse tables."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy import sparse
from sklearn import metrics
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from bitplan.trees import (
    BoostedTreesClassifier,
    BoostedTreesRanker,
    BoostedTreesRegressor,
    TreesError,
    load_trees,
    tables,
)
from bitplan.trees.boost import dropped_rounds
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


def test_settings_that_are_changed_have_the_same_hints_in_searches_and_pipelines():
    x, y = np.arange(40.0).reshape(20, 2), np.arange(20) % 2
    model = BoostedTreesClassifier(n_estimators=2, min_child_samples=1)
    for given, message in (
        ({"num_leaves": 31}, "num_leaves is called max_leaves here"),
        ({"n_estimators": 5, "reg_lambda": 1}, "reg_lambda is called l2 here"),
        ({"bagging_freq": 1}, "there is no bagging_freq, leave it out"),
        ({"learnig_rate": 1}, "there is no setting 'learnig_rate'; did you mean 'learning_rate'"),
        ({"nonsense": 1}, "Invalid parameter 'nonsense'"),
    ):
        with pytest.raises(ValueError, match=message):
            model.set_params(**given)
        assert model.n_estimators == 2
    with pytest.raises(ValueError, match="num_leaves is called max_leaves here"):
        GridSearchCV(model, {"num_leaves": [2, 3]}, cv=2).fit(x, y)
    with pytest.raises(ValueError, match="num_leaves is called max_leaves here"):
        make_pipeline(StandardScaler(), model).set_params(boostedtreesclassifier__num_leaves=3)
    assert GridSearchCV(model, {"max_leaves": [2, 3]}, cv=2).fit(x, y).best_params_["max_leaves"] in (2, 3)
    with pytest.raises(TypeError, match="no argument 'qid': queries are of BoostedTreesRanker"):
        model.fit(x, y, qid=[1])


def test_names_of_others_are_answered_with_ours(rows):
    x, y, _ = rows
    with pytest.raises(TypeError, match="BoostedTreesClassifier: num_leaves is called max_leaves here"):
        BoostedTreesClassifier(num_leaves=31)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        BoostedTreesClassifier(nonsense=1)
    with pytest.raises(TreesError, match=r"max_depth \(None: no limit\): expected a whole number, at least 1, got -1"):
        BoostedTreesRegressor(max_depth=-1).fit(x, y)


@pytest.mark.parametrize("name", ["bagging_freq", "boosting_type", "booster", "num_class"])
def test_settings_that_are_not_ours_are_answered_with_what_is_so_here(name):
    with pytest.raises(TypeError, match=f"there is no {name}, leave it out: "):
        BoostedTreesRegressor(**{name: 1})


def test_rows_of_large_gradients_are_kept_and_others_stand_for_those_left_out():
    rng = np.random.default_rng(5)
    x = rng.integers(0, 12, (3000, 3)).astype(float)
    y = x[:, 0] * np.sin(x[:, 1]) + rng.standard_normal(3000)
    settings = {"n_estimators": 2, "learning_rate": 1.0, "max_leaves": 7}
    model = BoostedTreesRegressor(**settings, subsample=0.3, sampling="gradient").fit(x, y)
    before = BoostedTreesRegressor(**settings | {"n_estimators": 1}).fit(x, y).predict(x)
    assert_array_equal(model.first_rounds(1).predict(x), before)  # all rows, as long as gradients say little
    order = np.argsort(-np.abs(before - y), kind="stable")
    weights = np.zeros(3000)
    weights[order[:600]] = 1.0
    draws = np.random.Generator(np.random.PCG64([0, 1])).random(3000)
    weights[(weights == 0) & (draws < 0.1 / 0.8)] = 8.0
    second = BoostedTreesRegressor(**settings | {"n_estimators": 1}).fit(x, y, weights, init_score=before)
    assert_allclose(model.predict(x), before + second.predict(x), atol=1e-5)
    by_codes = BoostedTreesRegressor(**settings, subsample=0.3, sampling="gradient", gradient_precision="i16")
    assert_array_equal(by_codes.fit(x, y).predict(x), by_codes.set_params(n_jobs=1).fit(x, y).predict(x))
    with pytest.raises(TreesError, match=r"sampling: 'gradient' draws a share .* set subsample=0.3"):
        BoostedTreesRegressor(sampling="gradient").fit(x, y)


def test_a_generator_is_a_seed_and_numpys_bools_end_a_fit(rows):
    x, y, _ = rows
    models = [
        BoostedTreesRegressor(**SMALL, subsample=0.5, random_state=np.random.default_rng(seed)).fit(x, y)
        for seed in (1, 1, 2)
    ]
    assert models[0].to_lightgbm() == models[1].to_lightgbm() != models[2].to_lightgbm()
    stopped = BoostedTreesRegressor(**SMALL).fit(x, y, callbacks=[lambda state: np.float64(state.round) >= 2])
    assert stopped.n_iter_ == 2


# ---- scores to begin with, and objectives of one's own ---------------------------------------------------------------


def focal(y, scores):
    """Of two classes: errors that are nearly right count less."""
    share = 1 / (1 + np.exp(-scores))
    grads = (share - y) * np.abs(share - y)
    return grads, np.maximum(share * (1 - share), 1e-3)


def softmax_by_hand(y, scores):
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    return shares - np.eye(scores.shape[1])[y.astype(int)], 1.5 * shares * (1 - shares)


def test_scores_to_begin_with_are_added_to_and_are_not_in_predictions():
    x, y = table(300)
    first = BoostedTreesRegressor(n_estimators=3, max_leaves=4).fit(x, y)
    rest = BoostedTreesRegressor(n_estimators=2, max_leaves=4)
    rest.fit(x, y, init_score=first.predict(x))
    both = BoostedTreesRegressor(n_estimators=5, max_leaves=4).fit(x, y)
    assert_allclose(first.predict(x) + rest.predict(x), both.predict(x), rtol=1e-12, atol=1e-12)
    assert not rest.booster_.start.any()
    weights = np.r_[np.zeros(100), np.ones(200)]  # rows that are left out take their scores with them
    part = BoostedTreesRegressor(n_estimators=2, max_leaves=4).fit(x, y, weights, init_score=first.predict(x))
    alone = BoostedTreesRegressor(n_estimators=2, max_leaves=4)
    alone.fit(x[100:], y[100:], init_score=first.predict(x[100:]))
    assert_array_equal(part.predict(x), alone.predict(x))


def test_watched_rows_begin_with_scores_too():
    x, y = table(300)
    offset = np.full(len(y), 5.0)
    settings = {"n_estimators": 2, "max_leaves": 4}
    model = BoostedTreesRegressor(**settings)
    model.fit(x, y, eval_set=(x, y), init_score=offset, eval_init_score=offset)
    expected = np.mean((model.predict(x) + 5.0 - y) ** 2)
    assert_allclose(model.evals_result_["valid_0"]["squared_error"][-1], expected, rtol=1e-6)
    held = BoostedTreesRegressor(**settings, early_stopping_rounds=5).fit(x, y, init_score=offset)
    assert held.best_iteration_ == 2
    with pytest.raises(TreesError, match="eval_init_score: watched sets begin with scores where the rows do"):
        model.fit(x, y, eval_set=(x, y), init_score=offset)
    with pytest.raises(TreesError, match="eval_init_score: there is no eval_set"):
        model.fit(x, y, eval_init_score=offset)
    with pytest.raises(TreesError, match=r"init_score: expected a number for each of 300 rows, got shape \(3,\)"):
        model.fit(x, y, init_score=offset[:3])
    with pytest.raises(TreesError, match="init_score: a model that is trained further has scores of its own"):
        model.fit(x, y, init_score=offset, init_model=held)


def test_scores_of_classes_are_by_row_or_in_lightgbms_order():
    x, y = table(300)
    labels = np.digitize(y, [-0.5, 0.5])
    scores = np.random.default_rng(0).normal(size=(300, 3))
    by_row, flat = (BoostedTreesClassifier(n_estimators=2, max_leaves=4) for _ in range(2))
    by_row.fit(x, labels, init_score=scores)
    flat.fit(x, labels, init_score=scores.T.ravel())
    assert_array_equal(by_row.decision_function(x), flat.decision_function(x))


def test_a_classifier_takes_an_objective():
    x, y = table(300)
    labels = np.digitize(y, [-0.5, 0.5])
    settings = {"n_estimators": 3, "max_leaves": 4}
    own = BoostedTreesClassifier(**settings, objective=softmax_by_hand).fit(x, labels)
    plain = BoostedTreesClassifier(**settings).fit(x, labels, init_score=np.zeros((300, 3)))
    assert_allclose(own.predict_proba(x), plain.predict_proba(x), rtol=1e-5)
    assert_allclose(own.predict_proba(x).sum(axis=1), 1.0)
    two = BoostedTreesClassifier(**settings, objective=focal).fit(x, np.array(["a", "b"])[(y > 0).astype(int)])
    assert set(two.predict(x)) == {"a", "b"}
    assert two.score(x, np.array(["a", "b"])[(y > 0).astype(int)]) > 0.8
    with pytest.raises(TreesError, match=r"two arrays of 300 x 3 numbers, got"):
        BoostedTreesClassifier(objective=lambda y, _: (y, y)).fit(x, labels)
    with pytest.raises(TreesError, match="objective: a classifier's follows from its classes; expected None or a func"):
        BoostedTreesClassifier(objective="binary").fit(x, y > 0)


DART = {"boosting": "dart", "drop_rate": 0.4, "skip_drop": 0.2, "max_leaves": 5, "n_jobs": 1}


@pytest.mark.parametrize("precision", ["f32", "i16"])
def test_dart_is_its_definition(rows, precision):
    """Round by round with public parts: a tree fitted to what the trees that were not left out lack."""
    x, y, _ = rows
    settings = {**DART, "n_estimators": 12, "gradient_precision": precision, "stochastic_rounding": False}
    model = BoostedTreesRegressor(**settings).fit(x, y, init_score=np.zeros(300), eval_set=(x, y), eval_init_score=y)
    plain = BoostedTreesRegressor(**settings | {"boosting": "gradient", "n_estimators": 1})
    parts, shares, most = [], np.empty(0), 0
    for number in range(12):
        dropped = dropped_rounds(model._settings(x.shape[1]), number, shares)
        most, share = max(most, len(dropped)), 1 / (len(dropped) + 1)
        kept = [part for place, part in enumerate(parts) if place not in dropped]
        new = plain.fit(x, y, init_score=np.sum([np.zeros(300), *kept], axis=0)).predict(x)
        parts = [part * (1 - share) if place in dropped else part for place, part in enumerate(parts)] + [new * share]
        shares[dropped] *= 1 - share
        shares = np.append(shares, share)
    assert most > 2
    assert_allclose(model.predict(x), np.sum(parts, axis=0), rtol=1e-9, atol=1e-12)
    watched = model.evals_result_["valid_0"]["squared_error"]
    assert_allclose(watched[-1], np.mean(np.sum(parts, axis=0) ** 2))  # of sets whose scores began elsewhere


def test_dart_repeats_is_saved_and_is_refused_what_it_cannot_do(rows, tmp_path):
    x, y, places = rows
    model = BoostedTreesClassifier(**DART, n_estimators=12, max_drop=3).fit(x, places, eval_set=(x, places))
    again = BoostedTreesClassifier(**DART | {"n_jobs": 2}, n_estimators=12, max_drop=3).fit(x, places)
    assert again.to_lightgbm() == model.to_lightgbm()
    again.save(tmp_path / "model.json")
    assert load_trees(tmp_path / "model.json").get_params()["max_drop"] == 3
    assert_array_equal(load_trees(tmp_path / "model.json").predict_proba(x), again.predict_proba(x))
    last = model.evals_result_["valid_0"]["multiclass"][-1]
    assert_allclose(last, metrics.log_loss(places, model.predict_proba(x)))
    assert model.set_params(random_state=1).fit(x, places).to_lightgbm() != again.to_lightgbm()
    never = BoostedTreesRegressor(**DART | {"skip_drop": 1.0}).fit(x, y)
    assert_array_equal(never.predict(x), BoostedTreesRegressor(max_leaves=5, n_jobs=1).fit(x, y).predict(x))
    for settings, more, said in [
        ({"early_stopping_rounds": 3}, {}, "leave early_stopping_rounds and seconds out"),
        ({}, {"seconds": 1}, "leave early_stopping_rounds and seconds out"),
        ({}, {"init_model": never}, "begins a new model; leave init_model"),
        ({"device": "cuda"}, {}, "grows trees on the CPU"),
    ]:
        with pytest.raises(TreesError, match=f"boosting: 'dart' .*{said}"):
            BoostedTreesRegressor(**DART, **settings).fit(x, y, **more)


def test_dart_is_as_good_as_lightgbms():
    lightgbm = pytest.importorskip("lightgbm")
    x, y = table(1000)
    settings = {"n_estimators": 30, "drop_rate": 0.3, "skip_drop": 0.0}
    ours, theirs = [], []
    for seed in range(3):
        model = BoostedTreesRegressor(boosting="dart", random_state=seed, **settings).fit(x, y)
        peer = lightgbm.LGBMRegressor(boosting_type="dart", drop_seed=seed, n_jobs=1, verbose=-1, **settings).fit(x, y)
        ours.append(np.mean((model.predict(x) - y) ** 2))
        theirs.append(np.mean((peer.predict(x) - y) ** 2))
    assert np.mean(ours) == pytest.approx(np.mean(theirs), rel=0.1)


def test_what_a_masked_array_hides_is_missing(rows):
    x, y, _ = rows
    hidden = x > 1
    model = BoostedTreesRegressor(**SMALL).fit(np.ma.array(x, mask=hidden), y)
    plain = BoostedTreesRegressor(**SMALL).fit(np.where(hidden, np.nan, x), y)
    assert_array_equal(model.predict(np.ma.array(x, mask=hidden)), plain.predict(np.where(hidden, np.nan, x)))
    masked = np.ma.array(y, mask=y > 1)
    for said, given in (("y", (x, masked)), ("sample_weight", (x, y, masked)), ("y", (x, y, None, (x, masked)))):
        with pytest.raises(TreesError, match=f"{said}: {int((y > 1).sum())} of its numbers are masked"):
            BoostedTreesRegressor(**SMALL).fit(*given)


def test_columns_of_frames_that_are_no_numbers(rows):
    pandas = pytest.importorskip("pandas")
    _, y, _ = rows
    for column in (pandas.period_range("2020", periods=300), pandas.arrays.IntervalArray.from_breaks(range(301))):
        with pytest.raises(TreesError, match=r"X: column 'a' has .* in row 0, expected numbers"):
            BoostedTreesRegressor(**SMALL).fit(pandas.DataFrame({"a": column}), y)
    arrow = pytest.importorskip("pyarrow")
    words = np.array(["a", "b", "c"])[np.arange(300) % 3]
    held = pandas.arrays.ArrowExtensionArray(arrow.array(words).dictionary_encode())
    model = BoostedTreesRegressor(**SMALL).fit(pandas.DataFrame({"a": held}), y)
    text = pandas.DataFrame({"a": words})
    plain = BoostedTreesRegressor(**SMALL, categorical_features=["a"]).fit(text, y)
    assert_array_equal(model.predict(text), plain.predict(pandas.DataFrame({"a": held})))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("n_estimator", "there is no setting 'n_estimator'; did you mean 'n_estimators'"),
        ("min_split_loss", "min_split_loss is called min_split_gain here"),
        ("booster", "leave it out: set boosting='dart'"),
        ("client", "unexpected keyword argument 'client'"),
    ],
)
def test_settings_that_are_not_ours(name, said):
    with pytest.raises(TypeError, match=said):
        BoostedTreesRegressor(**{name: 1})
    with pytest.raises(TypeError, match=r"BoostedTreesRegressor: settings are given by name .*, got 10"):
        BoostedTreesRegressor(10)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"objective": "mae"}, "objective: .* is called 'absolute_error' here"),
        ({"device": "gpu"}, "device: .* is called 'cuda' here"),
        ({"sampling": "goss"}, "sampling: .* is called 'gradient' here"),
        ({"boosting": "goss"}, "boosting: 'goss' is sampling='gradient' with subsample=0.3 here"),
        ({"boosting": "gbdt"}, "boosting: .* is called 'gradient' here"),
        ({"growth": "lossguide"}, "growth: .* is called 'leaf' here"),
        ({"gradient_precision": "int16"}, "gradient_precision: .* is called 'i16' here"),
    ],
    ids=str,
)
def test_values_of_others_are_answered_with_ours(settings, said, rows):
    x, y, _ = rows
    with pytest.raises(TreesError, match=said):
        BoostedTreesRegressor(**settings).fit(x, y)


def test_a_settings_change_after_fit_changes_no_prediction(rows, tmp_path):
    x, y, _ = rows
    model = BoostedTreesRegressor(**SMALL).fit(x, y)
    expected = model.predict(x)
    for changes in ({"objective": "poisson"}, {"objective": "quantile", "alpha": [0.1, 0.9]}):
        model.set_params(**changes)
        assert_array_equal(model.predict(x), expected)
        for write in (lambda: model.save(tmp_path / "model.json"), model.to_lightgbm):
            with pytest.raises(TreesError, match=r"after a fit by squared_error with 1, .*; set them back"):
                write()
    with pytest.raises(TreesError, match="warm_start: has objective squared_error, 1 scores"):
        model.set_params(warm_start=True).fit(x, y)
    model.set_params(objective="squared_error", alpha=0.9).save(tmp_path / "model.json")
    assert_array_equal(load_trees(tmp_path / "model.json").predict(x), expected)


def test_arguments_of_others_are_answered_with_what_there_is(rows):
    x, y, _ = rows
    model = BoostedTreesRegressor(**SMALL)
    with pytest.raises(TypeError, match=r"Regressor.fit\(\) has no argument 'early_stopping_rounds': it is a setting"):
        model.fit(x, y, early_stopping_rounds=3)
    with pytest.raises(TypeError, match=r"has no argument 'eval_sets'; did you mean 'eval_set'"):
        model.fit(x, y, eval_sets=[(x, y)])
    model.fit(x, y)
    with pytest.raises(TypeError, match=r"predict\(\) has no argument 'num_iteration': first_rounds\(n\)"):
        model.predict(x, num_iteration=2)
    with pytest.raises(TypeError, match=r"predict_proba\(\) has no argument 'raw_score': decision_function"):
        BoostedTreesClassifier(**SMALL).fit(x, y > 0).predict_proba(x, raw_score=True)
    with pytest.raises(TreesError, match="'roc_auc' is called 'auc' here"):
        model.fit(x, y, eval_set=(x, y), eval_metric=["mse", "roc_auc"])
    lightgbm = pytest.importorskip("lightgbm")
    with pytest.raises(TreesError, match="got LightGBM's EarlyStoppingCallback; early_stopping_rounds"):
        model.fit(x, y, callbacks=[lightgbm.early_stopping(3)])


def test_numbers_that_are_not_finite_are_named_by_place(rows):
    pandas = pytest.importorskip("pandas")
    x, y, _ = rows
    wrong = pandas.DataFrame(x, columns=list("abcde"))
    wrong.loc[7, "d"] = -np.inf
    with pytest.raises(TreesError, match=r"X contains infinity.* -inf in row 7, column 'd'; NaN is a missing value"):
        BoostedTreesRegressor(**SMALL).fit(wrong, y)
    model = BoostedTreesRegressor(**SMALL).fit(x, y)
    with pytest.raises(TreesError, match="is -inf in row 7, column 3"):
        model.predict(wrong.to_numpy())
    with pytest.raises(TreesError, match=r"y contains NaN. The first is nan in row 5; leave that row out"):
        model.fit(x, np.where(np.arange(300) == 5, np.nan, y))
    with pytest.raises(TreesError, match=r"X: expected a table, got the path 'file.csv'; read it first"):
        model.fit("file.csv", y)


def test_arrays_of_other_devices_are_copied(rows, monkeypatch):
    torch = pytest.importorskip("torch")
    x, y, places = rows
    monkeypatch.setattr(tables, "HOST_DEVICES", ())  # torch's, on the CPU, count as those of a GPU
    seen = []
    plain, to_cpu = BoostedTreesRegressor(**SMALL).fit(x, y, np.arange(1.0, 301.0)), torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: seen.append(tensor.shape) or to_cpu(tensor))
    there, targets, weights = map(torch.from_numpy, (x, y, np.arange(1.0, 301.0)))
    sets = {"eval_set": (there, targets), "eval_sample_weight": weights}
    model = BoostedTreesRegressor(**SMALL).fit(there.requires_grad_(), targets, weights, **sets)
    assert model.to_lightgbm() == plain.to_lightgbm()
    assert len(seen) == 6
    assert_array_equal(model.predict(there), plain.predict(x))
    ranker = BoostedTreesRanker(**SMALL).fit(there, torch.from_numpy(places), [300], init_score=targets)
    assert_array_equal(ranker.predict(x), BoostedTreesRanker(**SMALL).fit(x, places, [300], init_score=y).predict(x))


def test_a_ranker_begins_with_scores(rows):
    x, _, places = rows
    first = BoostedTreesRanker(**SMALL).fit(x, places, [100] * 3)
    whole = BoostedTreesRanker(**SMALL | {"n_estimators": 8}).fit(x, places, [100] * 3)
    begun = first.predict(x)
    sets = {"eval_set": (x, places), "eval_group": [100] * 3}
    rest = BoostedTreesRanker(**SMALL).fit(x, places, [100] * 3, init_score=begun, eval_init_score=begun, **sets)
    assert_allclose(begun + rest.predict(x), whole.predict(x), rtol=1e-9)
    whole.fit(x, places, [100] * 3, **sets)
    assert_allclose(rest.evals_result_["valid_0"]["ndcg@5"], whole.evals_result_["valid_0"]["ndcg@5"][4:])
    with pytest.raises(TreesError, match=r"eval_init_score: .* give both or none"):
        rest.fit(x, places, [100] * 3, init_score=begun, **sets)
    with pytest.raises(TreesError, match="init_score: a model that is trained further has scores of its own"):
        rest.fit(x, places, [100] * 3, init_score=begun, init_model=first)
    with pytest.raises(TreesError, match=r"init_score: expected a number for each of 300 rows, got shape \(3,\)"):
        rest.fit(x, places, [100] * 3, init_score=np.zeros(3))
    weights = (np.arange(300) % 2).astype(float)  # rows without weight take their scores along
    rest.fit(x, places, [100] * 3, weights, init_score=begun)
    half = weights > 0
    alone = BoostedTreesRanker(**SMALL).fit(x[half], places[half], [50] * 3, weights[half], init_score=begun[half])
    assert rest.to_lightgbm() == alone.to_lightgbm()
