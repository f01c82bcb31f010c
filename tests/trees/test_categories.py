"""Categories that are no numbers, and many of them: the same model as from numbers, and as LightGBM's."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from bitplan.trees import (
    BoostedTreesClassifier,
    BoostedTreesRegressor,
    TreesError,
    categories,
    load_trees,
    recommend_gradient_precision,
)
from bitplan.trees.tables import is_missing
from tests.crosses import few

SETTINGS = {"n_estimators": 6, "max_leaves": 8}


def towns(rows=800, count=12):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, count, rows)
    frame = pd.DataFrame({"town": [f"town {code:04}" for code in codes], "size": rng.standard_normal(rows)})
    return frame, codes, np.sin(codes * 1.7) + 0.3 * frame["size"].to_numpy()


@pytest.mark.parametrize("dtype", few(["category", "str", "string", object], 2))
def test_a_column_of_text_is_as_its_numbers(dtype):
    frame, codes, y = towns()
    by_number = BoostedTreesRegressor(categorical_features=["town"], **SETTINGS).fit(frame.assign(town=codes), y)
    named = None if dtype == "category" else ["town"]  # pandas says it itself
    model = BoostedTreesRegressor(categorical_features=named, **SETTINGS).fit(frame.astype({"town": dtype}), y)
    np.testing.assert_array_equal(model.predict(frame), by_number.predict(frame.assign(town=codes)))
    other_order = pd.Categorical(frame["town"], categories=sorted(set(frame["town"]), reverse=True))
    np.testing.assert_array_equal(model.predict(frame.assign(town=other_order)), model.predict(frame))
    new = pd.DataFrame({"town": ["elsewhere", None], "size": [0.0, 0.0]})
    assert len(set(model.predict(new))) == 1


@pytest.mark.parametrize("library", ["polars", "pyarrow"])
def test_frames_of_polars_and_tables_of_arrow_are_as_those_of_pandas(library):
    package = pytest.importorskip(library)
    frame, _, y = towns(200)
    expected = BoostedTreesRegressor(categorical_features=["town"], **SETTINGS).fit(frame, y)
    columns = {"town": frame["town"].tolist(), "size": frame["size"].tolist()}
    if library == "polars":
        text = package.DataFrame(columns)
        typed, with_date = text.cast({"town": package.Categorical}), text.with_columns(size=package.date(2026, 1, 1))
    else:
        text = package.table(columns)
        typed = text.set_column(0, "town", text["town"].dictionary_encode())
        with_date = text.set_column(1, "size", package.array([0] * 200, "timestamp[s]"))
    by_text = BoostedTreesRegressor(categorical_features=["town"], **SETTINGS).fit(text, y, eval_set=(typed, y))
    by_type = BoostedTreesRegressor(**SETTINGS).fit(typed, y)
    assert list(by_type.feature_names_in_) == ["town", "size"]
    for given in (frame, text, typed):
        for model in (expected, by_text, by_type):
            np.testing.assert_array_equal(model.predict(given), expected.predict(frame))
    with pytest.raises(TreesError, match=r"column 'town' has text, .* name the column in categorical_features"):
        BoostedTreesRegressor().fit(text, y)
    with pytest.raises(TreesError, match="column 'size' has dates or times"):
        by_type.predict(with_date)
    assert recommend_gradient_precision(typed, y, trees=1, n_jobs=1).table.rows == 200
    if library == "polars":
        with pytest.raises(TreesError, match=r"give X.collect\(\)"):
            by_type.predict(text.lazy())
    else:
        turned = text.select(["size", "town"]).to_batches()[0]
        with pytest.raises(ValueError, match="same order"):
            by_text.predict(turned)
        np.testing.assert_array_equal(by_text.predict(text.to_batches()[0]), expected.predict(frame))


def test_text_in_an_array_and_in_a_list():
    frame, _, y = towns(200)
    expected = BoostedTreesRegressor(categorical_features=["town"], **SETTINGS).fit(frame, y).predict(frame)
    rows = frame.astype(object).to_numpy()
    for given in (rows, rows.tolist()):
        model = BoostedTreesRegressor(categorical_features=[0], **SETTINGS).fit(given, y)
        np.testing.assert_array_equal(model.predict(given), expected)
    alone = rows[:, :1]
    model = BoostedTreesRegressor(categorical_features=[0], **SETTINGS)
    by_objects = model.fit(alone, y).predict(alone)
    given = alone.astype(np.dtypes.StringDType())
    np.testing.assert_array_equal(model.fit(given, y).predict(given), by_objects)


def test_categories_survive_files_and_lightgbm_reads_the_same_frame(tmp_path):
    lightgbm = pytest.importorskip("lightgbm")
    frame, _, y = towns()
    frame = frame.astype({"town": "category"})
    model = BoostedTreesClassifier(**SETTINGS).fit(frame, y > 0)
    model.save(tmp_path / "model.json")
    again = load_trees(tmp_path / "model.json")
    assert again.categories_ == model.categories_
    np.testing.assert_array_equal(again.predict_proba(frame), model.predict_proba(frame))
    read = lightgbm.Booster(model_str=model.to_lightgbm())
    np.testing.assert_array_equal(read.predict(frame, raw_score=True), model.decision_function(frame))


def test_a_thousand_categories_are_learned_as_lightgbm_learns_them():
    lightgbm = pytest.importorskip("lightgbm")
    rng = np.random.default_rng(1)
    codes, effect = rng.integers(0, 1000, 20_000), rng.standard_normal(1000)
    x = np.column_stack([codes, rng.standard_normal(len(codes))])
    y = effect[codes] + 0.1 * rng.standard_normal(len(codes))
    train, held = slice(0, 16_000), slice(16_000, None)
    settings = {"n_estimators": 30, "max_leaves": 31, "learning_rate": 0.3, "subsample": 0.9}
    model = BoostedTreesRegressor(categorical_features=[0], gradient_precision="i16", **settings)
    model.fit(x[train], y[train])
    parameters = {"num_leaves": 31, "learning_rate": 0.3, "verbose": -1, "min_data_per_group": 20, "num_threads": 1}
    peer = lightgbm.train(parameters, lightgbm.Dataset(x[train], y[train], categorical_feature=[0]), 30)
    ours, theirs = (np.mean((each.predict(x[held]) - y[held]) ** 2) for each in (model, peer))
    assert ours < 1.05 * theirs < 0.5
    read = lightgbm.Booster(model_str=model.to_lightgbm())
    np.testing.assert_array_equal(read.predict(x[held]), model.predict(x[held]))


def test_as_many_categories_as_a_set_has_bits(monkeypatch):
    frame, _, y = towns(200, 12)
    monkeypatch.setattr(categories, "MAX_CATEGORIES", 12)
    model = BoostedTreesRegressor(categorical_features=["town"], **SETTINGS).fit(frame, y)
    monkeypatch.setattr(categories, "MAX_CATEGORIES", 11)
    with pytest.raises(TreesError, match="column 'town' has 12 categories, expected at most 11"):
        model.fit(frame, y)


def test_what_cannot_be_a_category_is_refused():
    frame, _, y = towns(60)
    model = BoostedTreesRegressor(**SETTINGS)
    model.fit(frame.assign(town=pd.Categorical(["only"] * 60)), y)
    with pytest.raises(TreesError, match="column 'town' has text as categories, such as 'only', got int64"):
        model.predict(frame.assign(town=1))
    with pytest.raises(TreesError, match=r"column 'town' has categories of type Timestamp.*astype\(str\)"):
        model.fit(frame.assign(town=pd.Categorical(pd.date_range("2026-01-01", periods=60))), y)
    with pytest.raises(TreesError, match=r"column 'town' has \[1, 2\] in row 0, expected numbers; give a column for"):
        model.fit(frame.assign(town=[[1, 2]] * 60), y)
    with pytest.raises(ValueError, match="Expected"):
        model.fit(frame["size"], y)  # a column, and no table
    mixed = frame.assign(town=[1, "a"] * 30)
    with pytest.raises(TreesError, match=r"column 'town' has categories of type int, str"):
        BoostedTreesRegressor(categorical_features=["town"]).fit(mixed, y)
    model.fit(frame.astype({"town": "category"}), y)
    with pytest.raises(TreesError, match="column 'town' has text as categories, such as 'town 0000', got int64"):
        model.predict(frame.assign(town=1))
    with pytest.raises(TreesError, match="column 'size' has the type category, and had numbers at fit"):
        model.predict(frame.astype("category"))


@pytest.mark.parametrize("dtype", [object, "category"])
def test_text_where_fit_had_numbers_as_categories_is_refused(dtype):
    frame, codes, y = towns(200)
    model = BoostedTreesRegressor(**SETTINGS).fit(frame.assign(town=pd.Categorical(codes)), y)
    text = frame.assign(town=[str(code) for code in codes]).astype({"town": dtype})
    with pytest.raises(TreesError, match=r"column 'town' has categories that are no text, such as 0, got .*'\d+'"):
        model.predict(text)


def test_missing_is_what_pandas_says_and_no_class_of_that_name():
    class NAType:
        pass

    assert all(map(is_missing, (None, float("nan"), np.float32("nan"), pd.NA, pd.NaT, np.datetime64("NaT"))))
    assert not any(map(is_missing, (NAType(), "", 0, "nan", [float("nan")], (None,))))
