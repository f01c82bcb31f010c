"""A model is trained further only on what its columns, categories and classes meant."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from bitplan.trees import BoostedTreesClassifier, BoostedTreesRegressor, TreesError

RNG = np.random.default_rng(0)
FRAME = pd.DataFrame(RNG.standard_normal((200, 3)), columns=["a", "b", "c"])
Y = FRAME["a"].to_numpy() * 3
SMALL = {"n_estimators": 2, "max_leaves": 4}


@pytest.mark.parametrize("warm", [False, True])
def test_columns_in_another_order_are_refused(warm):
    model = BoostedTreesRegressor(warm_start=warm, **SMALL).fit(FRAME, Y)
    other = FRAME[["c", "b", "a"]]
    again = model.set_params(n_estimators=3) if warm else BoostedTreesRegressor(**SMALL)
    message = r"its features are \['a', 'b', 'c'\], expected \['c', 'b', 'a'\] in this order"
    with pytest.raises(TreesError, match=message):
        again.fit(other, Y, init_model=None if warm else model)


def test_other_classes_and_new_categories_are_refused():
    labels = np.where(Y > 0, "b", "a")
    model = BoostedTreesClassifier(**SMALL).fit(FRAME, labels)
    with pytest.raises(TreesError, match=r"init_model: its classes are .*'a'.*expected those of y, .*'c'"):
        BoostedTreesClassifier(**SMALL).fit(FRAME, np.where(Y > 0, "b", "c"), init_model=model)
    numbers = FRAME.assign(b=np.arange(200.0) % 3)
    model = BoostedTreesRegressor(**SMALL).fit(numbers, Y)
    with pytest.raises(TreesError, match=r"features \[1\] have categories here and numbers in the model"):
        BoostedTreesRegressor(**SMALL).fit(numbers.astype({"b": "category"}), Y, init_model=model)


def test_a_refused_fit_leaves_the_model_as_it_was():
    labels = np.where(Y > 0, "b", "a")
    model = BoostedTreesClassifier(warm_start=True, **SMALL).fit(FRAME, labels)
    before = model.predict_proba(FRAME)
    for x, y in ((FRAME[["c", "b", "a"]], labels), (FRAME, np.where(Y > 0, "b", "c")), (FRAME, [None, *labels[1:]])):
        with pytest.raises(TreesError):
            model.set_params(n_estimators=3).fit(x, y)
    assert model.classes_.tolist() == ["a", "b"]
    np.testing.assert_array_equal(model.predict_proba(FRAME), before)
    first = BoostedTreesClassifier(**SMALL)
    with pytest.raises(TreesError):
        first.fit(FRAME, np.zeros(200))
    assert not [name for name in vars(first) if name.endswith("_")]


def test_columns_in_another_order_are_named_before_what_they_have():
    texts = FRAME.assign(b=np.where(Y > 0, "x", "y"))
    settings = SMALL | {"categorical_features": ["b"]}
    model = BoostedTreesRegressor(**settings).fit(texts, Y)
    other = texts[["b", "a", "c"]]
    with pytest.raises(ValueError, match="in the same order as they were in fit"):
        model.predict(other)
    with pytest.raises(TreesError, match=r"init_model: its features are \['a', 'b', 'c'\], expected \['b', 'a', 'c'\]"):
        BoostedTreesRegressor(**settings).fit(other, Y, init_model=model)
