"""Model files: what is read predicts the same, and what was cut or edited is refused with the place of the fault."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from bitplan.base.errors import BitplanError, FileFormatError
from bitplan.trees import BoostedTreesClassifier, BoostedTreesRegressor, TreesError, load_trees
from bitplan.trees.gradients import GradientPrecision
from tests.trees.samples import table


def fitted(kind=BoostedTreesRegressor, **changes):
    x, y = table(300, missing=0.1)
    x[:, 4] = np.abs(np.nan_to_num(x[:, 4]) * 10).round()
    settings = {"n_estimators": 3, "max_leaves": 5, "categorical_features": [4]} | changes
    target = np.digitize(np.nan_to_num(y), [-0.5, 0.5]) if kind is BoostedTreesClassifier else np.nan_to_num(y)
    return kind(**settings).fit(x, target), x


@pytest.fixture
def saved(tmp_path):
    model, _ = fitted()
    path = tmp_path / "model.json"
    model.save(path)
    return path


@pytest.mark.parametrize("kind", [BoostedTreesRegressor, BoostedTreesClassifier])
def test_round_trip(kind, tmp_path):
    model, x = fitted(kind, gradient_precision=GradientPrecision.I8)
    model.save(tmp_path / "model.json")
    again = load_trees(tmp_path / "model.json")
    assert type(again) is kind
    np.testing.assert_array_equal(again.predict(x), model.predict(x))
    np.testing.assert_array_equal(again.booster_.scores(x), model.booster_.scores(x))
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "model.json").read_bytes()
    assert again.to_lightgbm() == model.to_lightgbm()
    assert again.get_params()["gradient_precision"] == "i8"


@pytest.mark.parametrize("labels", [["a", "b"], [True, False], [1, 2], [0.5, 1.5]])
def test_labels_and_names_survive(labels, tmp_path):
    x, _ = table(100)
    frame = pd.DataFrame(x, columns=list("abcde"))
    y = np.array(labels)[(x[:, 0] > 0).astype(int)]
    if isinstance(labels[0], float):
        y = y.astype(object).astype(str)
    model = BoostedTreesClassifier(n_estimators=2).fit(frame, y)
    model.save(tmp_path / "model.json")
    again = load_trees(tmp_path / "model.json")
    assert again.predict(frame).tolist() == model.predict(frame).tolist()
    assert again.feature_names_in_.tolist() == list("abcde")
    with pytest.raises(ValueError, match="feature names"):
        again.predict(frame[list("edcba")])


NAMED = [
    {"monotone_constraints": {"a": 1, "c": -1}, "categorical_features": ["e"]},
    {"monotone_constraints": {"b": np.int64(1)}, "categorical_features": np.array(["e"])},
    {"monotone_constraints": np.array([0, 1, 0, 0, 0]), "categorical_features": (np.int64(4),), "n_jobs": np.int64(2)},
    {"monotone_constraints": (0.0, 1.0, 0.0, 0.0, 0.0), "categorical_features": np.arange(5) == 4},
    {"learning_rate": np.float32(0.1), "l2": np.float64(1), "verbose": np.bool_(False), "max_depth": np.int32(3)},
    {"random_state": np.random.RandomState(3), "stochastic_rounding": np.bool_(True), "gradient_precision": "I16"},
]


@pytest.mark.parametrize("settings", NAMED)
def test_settings_by_name_and_of_numpy_survive(settings, tmp_path):
    x, y = table(100)
    frame = pd.DataFrame(x, columns=list("abcde"))
    frame["e"] = frame["e"].abs().round()
    model = BoostedTreesRegressor(n_estimators=2, **settings).fit(frame, y)
    model.save(tmp_path / "model.json")
    again = load_trees(tmp_path / "model.json")
    np.testing.assert_array_equal(again.predict(frame), model.predict(frame))
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "model.json").read_bytes()
    if "random_state" not in settings:  # what it drew is not in the file
        np.testing.assert_array_equal(again.fit(frame, y).predict(frame), model.predict(frame))


UNWRITABLE = [
    ({"monotone_constraints": {0: 1}}, "monotone_constraints: in a model file features go by name"),
    ({"categorical_features": {4}}, "categorical_features: a set cannot be written"),
]


@pytest.mark.parametrize(("settings", "message"), UNWRITABLE)
def test_settings_that_no_file_holds_are_refused_at_save(settings, message, tmp_path):
    x, y = table(60)
    x[:, 4] = np.abs(x[:, 4]).round()
    model = BoostedTreesRegressor(n_estimators=1, **settings).fit(x, y)
    with pytest.raises(TreesError, match=message):
        model.save(tmp_path / "model.json")
    assert not list(tmp_path.iterdir())


def test_names_and_losses_that_no_file_holds_are_refused_at_save(tmp_path):
    x, y = table(60)
    frame = pd.DataFrame(x)
    frame.columns = pd.Index(["a", "b", "c", "d", "e\ud800"], dtype=object)  # a string type may refuse it itself
    with pytest.raises(TreesError, match=r"feature_names: .* is no Unicode text"):
        BoostedTreesRegressor(n_estimators=1).fit(frame, y).save(tmp_path / "model.json")
    model = BoostedTreesRegressor(n_estimators=1).fit(x, y)
    model.booster_.losses.append(np.inf)
    with pytest.raises(TreesError, match="losses: inf cannot be written"):
        model.save(tmp_path / "model.json")


def test_what_json_cannot_hold_is_refused(tmp_path):
    x, y = table(100)
    model = BoostedTreesRegressor(n_estimators=1, objective=lambda y, s: (s - y, np.ones_like(y))).fit(x, y)
    with pytest.raises(TreesError, match="objective: a function cannot be written"):
        model.save(tmp_path / "model.json")
    assert not list(tmp_path.iterdir())


def test_a_file_cut_short_is_refused_everywhere(saved):
    text = saved.read_bytes()
    for size in range(0, len(text) - 2, max(1, len(text) // 40)):
        saved.write_bytes(text[:size])
        with pytest.raises(FileFormatError, match=r"model\.json"):
            load_trees(saved)


def test_what_is_no_model_file_is_one_line(tmp_path):
    (tmp_path / "empty.json").touch()
    for name, message in (
        ("none.json", "none.json: cannot be read: No such file"),
        ("", "is a folder, and a model of trees is read from a regular file or a pipe"),
        ("empty.json", "not valid JSON"),
    ):
        with pytest.raises(FileFormatError, match=message) as caught:
            load_trees(tmp_path / name)
        assert "\n" not in str(caught.value)


EDITS = [
    ("version", lambda d: d.update(version=2)),
    ("kind", lambda d: d.update(kind="forest")),
    ("unknown", lambda d: d.update(extra=1)),
    ("missing", lambda d: d.pop("start")),
    ("parameters", lambda d: d["parameters"].update(n_estimators=-1)),
    ("parameters", lambda d: d["parameters"].update(wrong=1)),
    ("objective", lambda d: d["parameters"].update(objective=["poisson"])),
    ("features", lambda d: d.update(features=0)),
    ("feature_names", lambda d: d.update(feature_names=["a"])),
    ("half of a surrogate pair", lambda d: d.update(feature_names=["a", "b", "c", "d", "\ud800"])),
    ("parameters: max_leaves", lambda d: d["parameters"].update(max_leaves=10**30)),
    ("starting scores", lambda d: d.update(start=[0.0, 1.0])),
    ("start", lambda d: d.update(start=["0"])),
    ("tree 1: feature", lambda d: d["trees"][1]["feature"].__setitem__(0, 5)),
    ("tree 0: left, right", lambda d: d["trees"][0]["left"].__setitem__(0, 0)),
    ("tree 0: left, right", lambda d: d["trees"][0]["right"].__setitem__(0, -1)),
    ("tree 0: .*leaf_rows", lambda d: d["trees"][0]["leaf_rows"].pop()),
    ("tree 0: threshold", lambda d: d["trees"][0]["threshold"].__setitem__(0, True)),
    ("tree 0: missing_left", lambda d: d["trees"][0]["missing_left"].__setitem__(0, 1)),
    ("tree 0: categories", lambda d: d["trees"][0]["categories"].__setitem__(0, [70000])),
    ("tree 2", lambda d: d["trees"].__setitem__(2, [])),
    ("trees", lambda d: d.update(trees={})),
    ("version", lambda d: d.update(version=True)),
    ("features", lambda d: d.update(features=2**31 - 1)),
    ("start: a number is out of range", lambda d: d.update(start=[10**400])),
    ("losses: a number is out of range", lambda d: d.update(losses=[float("1e308"), 10**309])),
    ("parameters: l1", lambda d: d["parameters"].update(l1=10**400)),
    ("parameters: min_child_samples", lambda d: d["parameters"].update(min_child_samples=10**400)),
    ("parameters: monotone_constraints", lambda d: d["parameters"].update(monotone_constraints=1)),
    ("parameters: categorical_features", lambda d: d["parameters"].update(categorical_features="a")),
    ("parameters: renew_leaves", lambda d: d["parameters"].update(renew_leaves=[10**400])),
    ("parameters: verbose", lambda d: d["parameters"].update(verbose="no")),
    ("parameters: n_jobs", lambda d: d["parameters"].update(n_jobs=0)),
    ("tree 0: feature", lambda d: d["trees"][0]["feature"].__setitem__(0, -1)),
    ("tree 0: node_rows: a number is out of range", lambda d: d["trees"][0]["node_rows"].__setitem__(0, 2**63)),
    ("tree 0: threshold", lambda d: d["trees"][0]["threshold"].__setitem__(0, None)),
    ("NaN", lambda d: d["trees"][0]["threshold"].__setitem__(0, float("nan"))),
]


@pytest.mark.parametrize(("message", "edit"), EDITS)
def test_an_edited_file_is_refused_by_place(message, edit, saved):
    document = json.loads(saved.read_text())
    edit(document)
    saved.write_text(json.dumps(document))
    with pytest.raises(BitplanError, match=rf"model\.json: .*{message}"):
        load_trees(saved)


def test_a_key_twice_and_deep_nesting_are_refused(saved):
    text = saved.read_text()
    for edit in (
        text.replace('"kind":', '"kind": "classifier",\n  "kind":', 1),
        text.replace('"monotone_constraints": null', f'"monotone_constraints": {"[" * 900}{"]" * 900}', 1),
        text.replace('"start": [', f'"start": [{"9" * 5000},', 1),
    ):
        assert edit != text
        saved.write_text(edit)
        with pytest.raises(FileFormatError, match=r"model\.json"):
            load_trees(saved)
