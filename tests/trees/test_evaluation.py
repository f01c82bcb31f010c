"""What is watched while boosting: sets, metrics, callbacks, stages."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from bitplan.trees import BoostedTreesClassifier, BoostedTreesRegressor, TreesError
from tests.trees.samples import table

SETTINGS = {"n_estimators": 12, "max_leaves": 6, "min_child_samples": 5}


def auc(y, predicted):
    return "auc", roc_auc_score(y, predicted), True


def test_a_list_of_sets_is_recorded_and_the_last_one_is_watched():
    x, y = table(600)
    y = y + np.random.default_rng(1).standard_normal(600)
    train, held = (x[:400], y[:400]), (x[400:], y[400:])
    settings = SETTINGS | {"n_estimators": 100, "learning_rate": 0.5, "early_stopping_rounds": 4}
    model = BoostedTreesRegressor(**settings).fit(*train, eval_set=[train, held])
    alone = BoostedTreesRegressor(**settings).fit(*train, eval_set=held)
    listed = BoostedTreesRegressor(**settings).fit(*train, eval_set=[held])
    assert model.evals_result_["valid_1"] == alone.evals_result_["valid_0"] == listed.evals_result_["valid_0"]
    losses = model.evals_result_["valid_1"]["squared_error"]
    assert model.best_iteration_ == model.n_iter_ == int(np.argmin(losses)) + 1 < len(losses)
    np.testing.assert_allclose(losses[model.best_iteration_ - 1], np.mean((model.predict(held[0]) - held[1]) ** 2))
    assert model.evals_result_["valid_0"]["squared_error"] == sorted(
        model.evals_result_["valid_0"]["squared_error"], reverse=True
    )


def test_a_metric_of_ones_own_is_watched_first():
    x, y = table(600)
    labels = y > 0
    model = BoostedTreesClassifier(**SETTINGS, early_stopping_rounds=3)
    model.fit(x[:400], labels[:400], eval_set=[(x[400:], labels[400:])], eval_metric=auc)
    seen = model.evals_result_["valid_0"]
    assert list(seen) == ["auc", "binary"]
    assert model.best_iteration_ == int(np.argmax(seen["auc"])) + 1
    np.testing.assert_allclose(max(seen["auc"]), roc_auc_score(labels[400:], model.predict_proba(x[400:])[:, 1]))
    own = BoostedTreesRegressor(objective=lambda y, s: (s - y, np.ones_like(y)), early_stopping_rounds=2, **SETTINGS)
    own.fit(x, y, eval_metric=lambda y, predicted: ("mse", np.mean((y - predicted) ** 2), False))
    assert list(own.evals_result_["valid_0"]) == ["mse"]  # a custom objective has no loss of its own
    with pytest.raises(TreesError, match=r"eval_metric: <lambda> returned 1.0, expected \(name"):
        model.fit(x, labels, eval_set=(x, labels), eval_metric=lambda *_: 1.0)


def test_weights_of_a_watched_set():
    x, y = table(300)
    weight = np.arange(100) % 3
    model = BoostedTreesRegressor(**SETTINGS)
    model.fit(x[:200], y[:200], eval_set=[(x[200:], y[200:])], eval_sample_weight=[weight])
    expected = np.average((model.predict(x[200:]) - y[200:]) ** 2, weights=weight)
    np.testing.assert_allclose(model.evals_result_["valid_0"]["squared_error"][-1], expected)


def test_functions_of_the_user_get_the_weights_they_take_and_cannot_change_targets():
    x = np.random.default_rng(0).standard_normal((300, 2))
    y, weight = x[:, 0] > 0, np.linspace(0.1, 2, 300)
    fit = {"sample_weight": weight, "eval_set": (x, y), "eval_sample_weight": weight}

    def counted(y, predicted, weights):
        assert len(y) == len(predicted)
        return "total", float(weights.sum()), False

    model = BoostedTreesClassifier(n_estimators=2).fit(x, y, **fit, eval_metric=[auc, counted])
    assert model.evals_result_["valid_0"]["total"] == [weight.sum()] * 2
    BoostedTreesClassifier(n_estimators=2, early_stopping_rounds=1).fit(x, y, weight, eval_metric=auc)

    def writing(y, predicted):
        y -= predicted
        return "own", 0.0, False

    with pytest.raises(ValueError, match="read-only"):
        BoostedTreesClassifier(n_estimators=2).fit(x, y, eval_set=(x, y), eval_metric=writing)
    with pytest.raises(TreesError, match=r"eval_metric: .* are called \['total', 'total', 'binary'\]; rename"):
        BoostedTreesClassifier(n_estimators=2).fit(x, y, **fit, eval_metric=[counted, counted])


def test_callbacks_see_each_round_and_may_stop():
    x, y = table(300)
    seen = []

    def watch(state):
        seen.append((state.round, state.last_round, len(state.evals_result["valid_0"]["squared_error"])))
        return state.round == 5

    model = BoostedTreesRegressor(**SETTINGS).fit(x, y, eval_set=(x, y), callbacks=[lambda _: None, watch])
    assert seen == [(number, 12, number) for number in range(1, 6)]
    np.testing.assert_array_equal(
        model.predict(x), BoostedTreesRegressor(**SETTINGS | {"n_estimators": 5}).fit(x, y).predict(x)
    )
    with pytest.raises(TreesError, match="returned 5, expected True to stop"):
        model.fit(x, y, callbacks=lambda _: 5)


@pytest.mark.parametrize("classes", [0, 2, 3])
def test_stages_are_the_models_of_fewer_rounds(classes):
    x, y = table(300)
    kind = BoostedTreesClassifier if classes else BoostedTreesRegressor
    target = np.digitize(y, np.linspace(-1, 1, classes - 1)) if classes else y
    model = kind(**SETTINGS).fit(x, target)
    methods = ["predict", "predict_proba", "decision_function"] if classes else ["predict"]
    for method in methods:
        stages = list(getattr(model, f"staged_{method}")(x))
        fewer = kind(**SETTINGS | {"n_estimators": 4}).fit(x, target)
        np.testing.assert_array_equal(stages[3], getattr(fewer, method)(x))
        np.testing.assert_array_equal(stages[-1], getattr(model, method)(x))
        assert len(stages) == 12


@pytest.mark.parametrize("wrong", [np.ones((3, 2)), (1, 2, 3), [(1, 2, 3)], []])
def test_sets_that_are_no_pairs(wrong):
    x, y = table(60)
    with pytest.raises(TreesError, match=r"eval_set: expected \(X, y\) or a list"):
        BoostedTreesRegressor(**SETTINGS).fit(x, y, eval_set=wrong)
