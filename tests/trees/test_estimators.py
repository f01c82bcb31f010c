"""The estimators: scikit-learn's own checks, every objective and setting, refusals by name."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import mean_absolute_error, r2_score, roc_auc_score
from sklearn.utils.estimator_checks import check_estimator

from bitplan.trees import BoostedTreesClassifier, BoostedTreesRegressor, TreesError
from bitplan.trees import boost as boosting
from bitplan.trees.checks import seed_of
from bitplan.trees.gradients import GradientPrecision
from tests.crosses import few
from tests.trees.naive import naive_scores
from tests.trees.samples import table

PRECISIONS = ["f32", "i16", "i8"]


def small(kind=BoostedTreesRegressor, **changes):
    return kind(**({"n_estimators": 10, "max_leaves": 8, "min_child_samples": 5} | changes))


@pytest.mark.parametrize("kind", [BoostedTreesClassifier, BoostedTreesRegressor])
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
def test_scikit_learn_agrees(kind):
    done = check_estimator(kind(n_estimators=5), on_skip=None)
    assert {result["status"] for result in done} <= {"passed", "skipped"}


# ---- objectives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_regression_learns(precision):
    x, y = table(2000)
    model = small(gradient_precision=precision, n_estimators=40).fit(x[:1500], y[:1500])
    assert r2_score(y[1500:], model.predict(x[1500:])) > 0.85


@pytest.mark.parametrize("precision", few(PRECISIONS, 2))
def test_binary_learns(precision):
    x, y = table(2000)
    labels = np.where(y > 0, "yes", "no")
    model = small(BoostedTreesClassifier, gradient_precision=precision, n_estimators=40).fit(x[:1500], labels[:1500])
    assert model.classes_.tolist() == ["no", "yes"]
    proba = model.predict_proba(x[1500:])
    np.testing.assert_allclose(proba.sum(axis=1), 1)
    assert roc_auc_score(labels[1500:], proba[:, 1]) > 0.95
    assert (model.predict(x[1500:]) == labels[1500:]).mean() > 0.85


@pytest.mark.parametrize("precision", few(PRECISIONS, 2))
def test_many_classes_learn(precision):
    x, y = table(1500)
    labels = np.digitize(y, [-0.7, 0.1, 0.8]) * 10
    model = small(BoostedTreesClassifier, gradient_precision=precision, n_estimators=20).fit(x[:1000], labels[:1000])
    proba = model.predict_proba(x[1000:])
    assert proba.shape == (500, 4)
    np.testing.assert_allclose(proba.sum(axis=1), 1)
    assert (model.predict(x[1000:]) == labels[1000:]).mean() > 0.7
    assert len(model.booster_.trees) == 80


@pytest.mark.parametrize("precision", few(PRECISIONS, 2))
def test_absolute_error_is_a_median(precision):
    x, y = table(2000)
    y[::10] += 100  # outliers that a mean would follow
    models = {
        objective: small(objective=objective, gradient_precision=precision, n_estimators=60).fit(x, y)
        for objective in ("absolute_error", "squared_error")
    }
    errors = {name: mean_absolute_error(y, model.predict(x)) for name, model in models.items()}
    assert errors["absolute_error"] < 0.8 * errors["squared_error"]


def test_poisson_predicts_means():
    x, y = table(2000)
    counts = np.random.default_rng(0).poisson(np.exp(0.5 * y))
    model = small(objective="poisson", n_estimators=60).fit(x, counts)
    result = model.predict(x)
    assert (result > 0).all()
    assert np.corrcoef(result, np.exp(0.5 * y))[0, 1] > 0.85
    np.testing.assert_allclose(result.mean(), counts.mean(), rtol=0.05)
    with pytest.raises(TreesError, match="Poisson objective expects counts"):
        small(objective="poisson").fit(x, -counts)


def test_a_custom_objective_equal_to_squared_error():
    x, y = table()
    custom = small(objective=lambda y, scores: (scores - y, np.ones_like(y)), n_estimators=30).fit(x, y - y.mean())
    plain = small(n_estimators=30).fit(x, y - y.mean())
    np.testing.assert_allclose(custom.predict(x), plain.predict(x), rtol=1e-5, atol=1e-6)


def test_a_custom_objective_that_fails_is_named():
    x, y = table()
    with pytest.raises(TreesError, match=r"custom objective: expected \(gradients, hessians\)"):
        small(objective=lambda y, scores: scores - y).fit(x, y)
    with pytest.raises(TreesError, match="row 0 has gradient nan"):
        small(objective=lambda y, scores: (scores * np.nan, np.ones_like(y))).fit(x, y)
    with pytest.raises(TreesError, match="hessian -1"):
        small(objective=lambda y, scores: (scores, -np.ones_like(y))).fit(x, y)


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_same_seed_same_trees_whatever_the_threads(precision):
    x, y = table(3000, 20)
    result = []
    for n_jobs in (1, 2, 3):
        settings = {"subsample": 0.7, "colsample": 0.5, "renew_leaves": True, "n_jobs": n_jobs}
        result.append(small(gradient_precision=precision, **settings).fit(x, y).predict(x))
    np.testing.assert_array_equal(result[0], result[1])
    np.testing.assert_array_equal(result[0], result[2])


def test_stochastic_rounding_follows_the_seed():
    x, y = table(3000)
    first, again, other = (small(gradient_precision="i8", random_state=seed).fit(x, y).predict(x) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_scores_kept_while_training_are_the_predictions():
    """Rows left out of a tree get its values all the same."""
    x, y = table(500, missing=0.1)
    seen = []

    def watch(y, scores):
        seen.append(scores)
        return scores - y, np.ones_like(y)

    model = small(objective=watch, subsample=0.5, n_estimators=6).fit(x, y)
    del model.booster_.trees[-1]
    np.testing.assert_allclose(seen[-1], model.predict(x), rtol=1e-12, atol=1e-12)


def test_renewed_leaves_are_closer_to_the_float_model():
    x, y = table(3000)
    full = small(n_estimators=1, learning_rate=1.0).fit(x, y).predict(x)
    errors = [
        np.abs(
            small(n_estimators=1, learning_rate=1.0, gradient_precision="i8", renew_leaves=renew).fit(x, y).predict(x)
            - full
        ).mean()
        for renew in (True, False)
    ]
    assert errors[0] < errors[1]


def test_early_stopping_keeps_the_best_round():
    x, y = table(600)
    noise = y + np.random.default_rng(1).standard_normal(600)
    settings = {"n_estimators": 300, "learning_rate": 0.5, "early_stopping_rounds": 5}
    given = small(**settings).fit(x[:400], noise[:400], eval_set=(x[400:], noise[400:]))
    assert given.n_iter_ == int(np.argmin(given.booster_.losses)) + 1
    assert len(given.booster_.losses) == given.n_iter_ + 5
    split = small(**settings).fit(x, noise)
    assert split.n_iter_ < 300
    classes = small(BoostedTreesClassifier, **settings).fit(x, y > 0)
    assert classes.n_iter_ < 300


def test_weights_are_repetitions():
    x, y = table(200)
    weights = np.random.default_rng(0).integers(0, 3, 200)
    settings = {"min_child_samples": 1, "min_child_weight": 5.0}
    weighted = small(**settings).fit(x, y, sample_weight=weights)
    repeated = small(**settings).fit(np.repeat(x, weights, axis=0), np.repeat(y, weights))
    np.testing.assert_allclose(weighted.predict(x), repeated.predict(x), rtol=1e-5, atol=1e-6)
    equal = small().fit(x, y, sample_weight=2.0).predict(x)  # one number is everyone's
    np.testing.assert_array_equal(equal, small().fit(x, y, sample_weight=np.full(200, 2, np.float32)).predict(x))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.zeros(200), "every weight is zero"),
        (np.ones(199), r"each of 200 rows, got shape \(199,\)"),
        (np.ones((200, 1)), r"got shape \(200, 1\)"),
        (np.linspace(-1, 1, 200), "expected no negative numbers, got -1.0"),
        (np.full(200, np.nan), "sample_weight contains NaN"),
        (["a"] * 200, "could not convert string"),
    ],
)
def test_weights_that_cannot_be_used(weights, message):
    x, y = table(200)
    with pytest.raises(ValueError, match=message):
        small().fit(x, y, sample_weight=weights)


@pytest.mark.parametrize("weight", [1e308, 1e39, 1e-40, 5e-324])
def test_weights_that_float32_cannot_hold_are_refused(weight):
    x, y = table(200)
    for kind, target in ((BoostedTreesRegressor, y), (BoostedTreesClassifier, y > 0)):
        with pytest.raises(TreesError, match="sample_weight: the largest weight is"):
            small(kind).fit(x, target, sample_weight=np.full(200, weight))
    some = np.where(np.arange(200) < 100, weight, 1.0)
    if weight < 1:  # rows that count for nothing
        assert np.isfinite(small().fit(x, y, sample_weight=some).predict(x)).all()


def test_targets_whose_sums_are_no_floats_are_refused():
    x, _ = table(200)
    for objective in ("squared_error", "absolute_error", "poisson"):
        with pytest.raises(TreesError, match="y: expected numbers within 1e\\+300"):
            small(objective=objective).fit(x, np.where(x[:, 0] > 0, 1e308, 1.7e308))
    with pytest.raises(TreesError, match="gradients: row 0 has gradient"):
        small().fit(x, np.where(x[:, 0] > 0, 1e300, -1e300))
    assert np.isfinite(small(objective="absolute_error").fit(x, 1e300 * np.sign(x[:, 0])).predict(x)).all()


@pytest.mark.cross("precision", PRECISIONS)
@pytest.mark.cross("objective", ["squared_error", "absolute_error"])
def test_monotone_constraints_hold(precision, objective):
    x, y = table(1500)
    model = small(
        monotone_constraints=[1, -1, 0, 0, 0], gradient_precision=precision, objective=objective, renew_leaves=True
    )
    model.fit(x, y - 0.8 * np.sin(3 * x[:, 0]))
    grid = np.linspace(-3, 3, 50)
    for feature, sign in ((0, 1), (1, -1)):
        rows = np.repeat(x[:20], 50, axis=0)
        rows[:, feature] = np.tile(grid, 20)
        assert (sign * np.diff(model.predict(rows).reshape(20, 50)) >= -1e-12).all()


def test_missing_values_are_learned():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1000, 2))
    is_missing = rng.random(1000) < 0.3
    y = np.where(is_missing, 5.0, np.sign(x[:, 0]))
    x[is_missing, 0] = np.nan
    model = small(n_estimators=50, learning_rate=0.3).fit(x, y)
    assert np.abs(model.predict(x) - y).max() < 0.05
    assert model.predict([[np.nan, 0.0]])[0] > 4.9


def test_categories_are_learned_and_new_ones_predicted():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 40, 3000)
    effect = rng.permutation(40) / 40
    frame = pd.DataFrame({"shop": codes, "size": rng.standard_normal(3000)})
    y = effect[codes]
    by_set = small(categorical_features=["shop"], n_estimators=30, max_leaves=4).fit(frame, y)
    by_order = small(n_estimators=30, max_leaves=4).fit(frame, y)
    assert r2_score(y, by_set.predict(frame)) > r2_score(y, by_order.predict(frame)) + 0.05
    new = pd.DataFrame({"shop": [200.0, np.nan, -3.0], "size": [0.0, 0.0, 0.0]})
    assert len(set(by_set.predict(new))) == 1


def test_frames_and_importances():
    x, y = table()
    frame = pd.DataFrame(x, columns=list("abcde"))
    model = small().fit(frame, y)
    assert model.feature_names_in_.tolist() == list("abcde")
    np.testing.assert_array_equal(model.predict(frame), small().fit(x, y).predict(x))
    np.testing.assert_allclose(model.feature_importances_.sum(), 1)
    assert model.feature_importances_.argmax() == 0
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame[["b", "a", "c", "d", "e"]])
    with pytest.raises(ValueError, match="5 features"):
        small().fit(x, y).predict(x[:, :3])


def test_depth_wise_growth_fills_levels():
    x, y = table(2000)
    tree = small(growth="depth", max_leaves=8, n_estimators=1).fit(x, y).booster_.trees[0]
    depth = np.zeros(len(tree.feature), int)
    for node, children in enumerate(zip(tree.left, tree.right, strict=True)):
        for child in children:
            if child >= 0:
                depth[child] = depth[node] + 1
    assert depth.tolist() == sorted(depth)
    limited = small(max_depth=2, n_estimators=1, max_leaves=100).fit(x, y)
    assert limited.booster_.trees[0].leaves == 4


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_estimators": 0}, "n_estimators: expected a whole number, at least 1, got 0"),
        ({"max_bins": 256}, "max_bins: expected a whole number, 2 to 255"),
        ({"learning_rate": float("nan")}, "learning_rate: expected a number above 0"),
        ({"subsample": 0}, "subsample"),
        ({"growth": "leafs"}, "did you mean 'leaf'"),
        ({"objective": "poison"}, "did you mean 'poisson'"),
        ({"gradient_precision": "i32"}, "gradient_precision: expected one of 'f32', 'i16', 'i8'"),
        ({"monotone_constraints": [1]}, "monotone_constraints: expected 5 numbers"),
        ({"categorical_features": [9]}, "categorical_features: no feature 9"),
        ({"monotone_constraints": {0: 1}, "categorical_features": [0]}, "a categorical feature has no order"),
        ({"random_state": "now"}, "random_state"),
    ],
)
def test_settings_are_refused_by_name(changes, message):
    x, y = table()
    x[:, 0] = np.abs(x[:, 0] * 10).round()
    with pytest.raises(TreesError, match=message):
        small(**changes).fit(x, y)


def test_a_random_state_gives_a_seed():
    assert seed_of(np.random.RandomState(0)) == int(np.random.RandomState(0).randint(2**31)) == 209652396


def test_precision_as_an_enum():
    x, y = table()
    by_name = small(gradient_precision="i16").fit(x, y).predict(x)
    np.testing.assert_array_equal(small(gradient_precision=GradientPrecision.I16).fit(x, y).predict(x), by_name)


def test_infinity_is_refused_in_predictions_of_plain_arrays():
    x, y = table(200)
    model = small().fit(x, y)
    far = x[:70].copy()
    far[69, 2], far[3, 0] = -np.inf, np.nan
    with pytest.raises(ValueError, match="infinity"):
        model.predict(far)
    assert np.isfinite(model.predict(far[:69])).all()


def test_rows_are_predicted_alike_alone_and_together(monkeypatch):
    """64 rows go down a tree together, its first 63 splits are judged before others, and threads take parts."""
    x, y = table(300)
    x[::7, 1] = np.nan
    x[:, 2] = np.arange(300) % 9  # categories
    more = {"max_leaves": 150, "min_child_samples": 1, "min_child_weight": 0.0, "categorical_features": [2]}
    model = small(BoostedTreesClassifier, n_estimators=4, **more).fit(x, np.digitize(y, [-0.5, 0.5]))
    assert max(tree.leaves for tree in model.booster_.trees) > 64
    together = model.decision_function(x)
    np.testing.assert_array_equal(together, naive_scores(model.booster_, x))
    alone = np.concatenate([model.decision_function(x[row : row + 1]) for row in range(20)])
    np.testing.assert_array_equal(alone, together[:20])
    monkeypatch.setattr("bitplan.trees.tree.HELPER_NS", 1.0)
    for jobs in (1, 3):
        np.testing.assert_array_equal(model.set_params(n_jobs=jobs).decision_function(x[:299]), together[:299])


def test_copies_of_a_model_that_has_predicted_have_arrays_of_their_own():
    """Prepared calls hold addresses: with those of the original, a copy would read memory that may be gone."""
    x, y = table(100)
    model = small().fit(x, y)
    expected = model.predict(x)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    model.booster_.forest().steps.values[:] = 0.0
    assert not np.array_equal(model.predict(x), expected)
    for each in copies:
        np.testing.assert_array_equal(each.predict(x), expected)


def test_data_is_refused_clearly():
    x, y = table(50)
    with pytest.raises(ValueError, match="infinity"):
        small().fit(np.where(x > 1, np.inf, x), y)
    with pytest.raises(ValueError, match="0 sample"):
        small().fit(x[:0], y[:0])
    with pytest.raises(TreesError, match="only one class"):
        small(BoostedTreesClassifier).fit(x, np.ones(50))
    with pytest.raises(TreesError, match=r"eval_set, set 0: y: label .* is not among the classes"):
        small(BoostedTreesClassifier).fit(x, y > 0, eval_set=(x, np.full(50, 3)))
    with pytest.raises(TreesError, match="leaves none to fit"):
        small(early_stopping_rounds=2).fit(x[:1], y[:1])


FRAME = pd.DataFrame({"size": [1.0, 2.0], "city": ["Bonn", "Rome"]})
TEXTS = [
    (FRAME, "X: column 'city' has text, 'Bonn' in row 0, expected numbers; .*categorical_features"),
    (FRAME.astype({"city": "string"}), "X: column 'city' has text, 'Bonn' in row 0"),
    (FRAME.assign(city=["1", "2"]).astype(object), "X: column 'city' has text, '1' in row 0"),  # not read as numbers
    (np.array([["1.5", "2"], ["3", "4"]]), r"X: column 0 has text, .*'1\.5'.* in row 0"),
    (np.array([[1.0, None], [2.0, "x"]], dtype=object), "X: column 1 has text, 'x' in row 1"),
    ([[1.0, 2.0], [3.0, "x"]], "X: column 1 has text, 'x' in row 1"),
]


@pytest.mark.parametrize(("x", "message"), TEXTS)
def test_text_is_refused_by_column(x, message):
    with pytest.raises(TreesError, match=message):
        small().fit(x, [0.0, 1.0])
    model = small().fit(FRAME[["size", "size"]].to_numpy(), [0.0, 1.0])
    if not isinstance(x, pd.DataFrame):  # there the names differ, too
        with pytest.raises(TreesError, match=message):
            model.predict(x)


def test_one_row_and_constant_features_give_the_mean():
    assert small().fit([[1.0, 2.0]], [3.0]).predict([[0.0, 9.0]]).tolist() == [3.0]
    model = small().fit(np.ones((50, 2)), np.arange(50))
    np.testing.assert_allclose(model.predict([[5.0, np.nan]]), 24.5)


def test_a_subclass_with_fewer_parameters_fits():
    class Small(BoostedTreesRegressor):
        def __init__(self, n_estimators=2):
            super().__init__(n_estimators=n_estimators)

    model = Small().fit([[0.0], [1.0]], [0.0, 1.0])
    assert model.get_params() == {"n_estimators": 2}
    assert len(model.predict([[0.0]])) == 1


def test_ctrl_c_leaves_the_whole_rounds(monkeypatch):
    x, y = table()
    real, calls = boosting.TreeGrower.grow, []

    def grow(self, *arguments):
        calls.append(1)
        if len(calls) > 4:
            raise KeyboardInterrupt
        return real(self, *arguments)

    monkeypatch.setattr(boosting.TreeGrower, "grow", grow)
    model = small()
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y)
    assert model.n_iter_ == 4
    monkeypatch.undo()
    np.testing.assert_array_equal(model.predict(x), small(n_estimators=4).fit(x, y).predict(x))


def test_progress_goes_to_standard_error(capsys):
    x, y = table(100)
    small(verbose=True).fit(x, y)
    out = capsys.readouterr()
    assert out.out == ""
    assert "boosting" in out.err


@pytest.mark.parametrize("name", ["subsample", "colsample"])
def test_a_share_is_above_0_and_at_most_1(name):
    x, y = table(60)
    for share in (0, 1.5):
        with pytest.raises(TreesError, match=f"{name}: expected a number above 0 and at most 1"):
            BoostedTreesRegressor(n_estimators=1, **{name: share}).fit(x, y)
    BoostedTreesRegressor(n_estimators=1, **{name: 1}).fit(x, y)


def test_dates_and_missing_labels_are_refused_in_one_line():
    pandas = pytest.importorskip("pandas")
    days = pandas.date_range("2026-01-01", periods=40)
    frame = pandas.DataFrame({"size": np.arange(40.0), "when": days})
    labels = np.where(np.arange(40) % 3, "a", "b").astype(object)
    model = BoostedTreesClassifier(n_estimators=1)
    for x, name in ((frame, "'when'"), (frame.astype(object), "'when'"), (days.to_numpy()[:, None], "0")):
        with pytest.raises(TreesError, match=f"X: column {name} has dates or times .*, expected numbers"):
            model.fit(x, labels)
    labels[7] = None
    with pytest.raises(TreesError, match="y: row 7 has None, expected a target for every row"):
        model.fit(frame[["size"]], labels)
    for missing in (days.where(labels == "a").to_numpy(), pandas.Series(labels, dtype="string")):
        with pytest.raises(TreesError, match=r"y: row . has (NaT|<NA>), expected a target for every row"):
            model.fit(frame[["size"]], missing)
    for dates in (days, days.to_numpy() - days.to_numpy()[0]):
        with pytest.raises(TreesError, match=r"y: has dates or times .*, expected numbers"):
            BoostedTreesRegressor().fit(frame[["size"]], dates)
    with pytest.raises(TreesError, match=r"X: column 'size' has pandas\.NA in row 3 of a column of objects"):
        model.fit(frame[["size"]].astype(object).replace(3.0, pandas.NA), np.arange(40) % 2)
    labels[7] = 3
    with pytest.raises(TreesError, match="y: has labels of types int, str, expected one"):
        model.fit(frame[["size"]], labels)


def test_errors_about_a_watched_set_name_it():
    x, y = table(60)
    model = BoostedTreesRegressor(n_estimators=1)
    for given, message in (
        ({"eval_set": (np.full_like(x, "a", dtype=object), y)}, "eval_set, set 0: X: column 0 has text"),
        ({"eval_set": (x, y[:9])}, "eval_set, set 0: y: expected a target for each of 60 rows"),
        ({"eval_set": (x[:, :2], y)}, "eval_set, set 0: X has 2 features"),
        ({"eval_set": (x, y), "eval_sample_weight": -np.ones(60)}, "eval_sample_weight: expected no negative"),
    ):
        with pytest.raises(ValueError, match=message):
            model.fit(x, y, **given)


def test_many_classes_begin_as_lightgbm_does_and_leaves_keep_their_rows():
    """On numbers that both bin alike; later LightGBM guesses a leaf's rows by its hessians, and has leaves of few."""
    lightgbm = pytest.importorskip("lightgbm")
    rng = np.random.default_rng(0)
    x = rng.integers(0, 40, (1500, 6)).astype(float)
    y = ((x - 20) @ rng.normal(size=(6, 50)) + 10 * rng.gumbel(size=(1500, 50))).argmax(axis=1)
    assert len(np.unique(y)) == 50
    ours = BoostedTreesClassifier(n_estimators=2, n_jobs=1).fit(x, y)
    theirs = lightgbm.LGBMClassifier(n_estimators=2, n_jobs=1, verbose=-1).fit(x, y)
    scores = next(iter(ours.staged_decision_function(x))), theirs.predict(x, raw_score=True, num_iteration=1)
    totals = [np.logaddexp.reduce(each, axis=1) for each in scores]
    losses = [(total - each[np.arange(1500), y]).mean() for each, total in zip(scores, totals, strict=True)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)
    assert losses[0] < np.log(50) - 0.5
    assert np.isclose(*scores, rtol=1e-5).mean() > 0.9  # the rest: splits of equal gain
    text = lightgbm.Booster(model_str=ours.to_lightgbm()).trees_to_dataframe()
    assert text[text.split_feature.isna()]["count"].min() >= 20
