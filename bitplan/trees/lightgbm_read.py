"""LightGBM's text format, read: its trees become ours, and raw predictions are equal to the bit.

What our trees cannot do is refused by name: linear leaves, zero as a missing value, averaged forests, and objectives
that have no counterpart here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from bitplan.base.documents import load_bytes, show
from bitplan.base.errors import FileFormatError
from bitplan.base.records import MAX_JSON_BYTES, parse_json
from bitplan.trees.binning import MAX_CATEGORY
from bitplan.trees.categories import CATEGORIES, are_categories
from bitplan.trees.gradients import Array, TreesError
from bitplan.trees.lightgbm_text import CATEGORICAL, DEFAULT_LEFT, MISSING_IS_NAN, OBJECTIVE_NAMES
from bitplan.trees.save import MAX_FEATURES
from bitplan.trees.tree import FAR, Booster, Tree, is_tree

MISSING_KIND, MISSING_IS_ZERO = 12, 4  # bits of LightGBM's decision_type
MAX_OUTPUTS = 2**16
MAX_DIGITS = 12


@dataclass(frozen=True)
class LightGBMModel:
    """A model read from LightGBM's text: its trees, objective, features and categories."""

    booster: Booster
    objective: str  # our name for it
    options: dict[str, float]  # of the objective, by our names
    feature_names: list[str] | None
    categories: dict[int, list[Any]]


def read_lightgbm_text(text: str, where: str = "LightGBM model") -> LightGBMModel:
    """The model that `lightgbm.Booster.model_to_string` or `save_model` wrote."""
    reading = _Reading(where)
    head, *rest = text.split("\nTree=")
    header = _fields(head)
    if not head.startswith("tree\n") or not rest:
        reading.stop(
            "expected a line 'tree' and at least one tree, as lightgbm.Booster.save_model writes it; files that "
            "bitplan's save wrote are read by load_trees(path)"
        )
    if "average_output" in header:
        reading.stop("boosting=rf averages its trees, which boosted trees do not; train it with boosting=gbdt")
    outputs = reading.whole(header, "num_tree_per_iteration", 1, MAX_OUTPUTS)
    features = reading.whole(header, "max_feature_idx", 0, MAX_FEATURES - 1) + 1
    last, _, after = rest[-1].partition("end of trees")
    lines = [line[1:-1].partition(": ") for line in after.split("\n") if line.startswith("[")]
    parameters = {name: value for name, _, value in lines}
    objective, options = reading.objective(header.get("objective"), parameters, outputs)
    trees = [reading.tree(number, part, features) for number, part in enumerate([*rest[:-1], last])]
    if len(trees) % outputs:
        reading.stop(f"has {len(trees)} trees, expected {outputs} in each round")
    names = header.get("feature_names", "").split(" ")
    named = len(names) == features and names != [f"Column_{number}" for number in range(features)]
    booster = Booster(np.zeros(outputs), features, trees)
    categories = reading.categories(header, parameters, after)
    return LightGBMModel(booster, objective, options, names if named else None, categories)


def lightgbm_text_of(model: Any) -> tuple[str, str]:
    """The text of a model, and a name for it in errors."""
    if isinstance(model, str) and "\n" in model:
        return model, "LightGBM model"
    if isinstance(model, (str, Path)):
        return read_lightgbm_file(model), str(model)
    booster = getattr(model, "booster_", model)  # LGBMClassifier has one
    if not hasattr(booster, "model_to_string"):
        raise TreesError(
            f"LightGBM model: expected its text, the path of its file, a lightgbm.Booster or a fitted LGBM estimator, "
            f"got {type(model).__name__}"
        )
    return str(booster.model_to_string()), f"LightGBM model in a {type(model).__name__}"


def lightgbm_classes_of(model: Any) -> Array | None:
    """The labels that LightGBM's own classifier knows; its text and its Booster have none."""
    classes = getattr(model, "classes_", None)
    return None if classes is None else np.asarray(classes)


def read_lightgbm_file(path: str | Path) -> str:
    try:
        data = load_bytes(path, FileFormatError, max_bytes=MAX_JSON_BYTES, noun="LightGBM model's text")
    except FileFormatError as error:
        raise FileFormatError(f"{error}; give a LightGBM model's text, or the path of its file") from None
    return lightgbm_text(data, str(path))


def lightgbm_text(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise FileFormatError(
            f"{where}: expected a LightGBM model's text in UTF-8, and byte {error.start} is not"
        ) from None


class _Reading:
    def __init__(self, where: str) -> None:
        self._where = where

    def stop(self, message: str) -> NoReturn:
        raise FileFormatError(f"{self._where}: {message}")

    def whole(self, fields: dict[str, str], name: str, least: int, most: int) -> int:
        text = fields.get(name, "")
        if not text.isdecimal() or len(text) > MAX_DIGITS or not least <= int(text) <= most:
            self.stop(f"{name}: expected a whole number, {least} to {most}, got {text!r:.40}")
        return int(text)

    def objective(self, text: str | None, parameters: dict[str, str], outputs: int) -> tuple[str, dict[str, float]]:
        """Our name, and our settings; a model without an objective predicts raw scores."""
        name, *options = (text or "regression").split(" ")
        names = {theirs: ours for ours, (theirs, _) in OBJECTIVE_NAMES.items()}
        expected = outputs if name == "multiclass" else 1
        plain = all(option.startswith("num_class:") or option == "sigmoid:1" for option in options)
        if name not in names or outputs != expected or not plain:
            self.stop(f"objective: {text!r:.60} has no counterpart here; expected one of {', '.join(names)}")
        settings = OBJECTIVE_NAMES[names[name]][1]
        values = {ours: parameters[theirs] for ours, theirs in settings.items() if theirs in parameters}
        return names[name], {ours: float(self.numbers(ours, value, 1)[0]) for ours, value in values.items()}

    def numbers(self, name: str, text: str, count: int, kind: type = np.float64, *, infinite: bool = False) -> Array:
        try:
            array: Array = np.array(text.split(), np.float64)
        except ValueError:
            array = np.empty(0)
        most = np.inf if kind is np.float64 else min(2**62, np.iinfo(kind).max)
        is_whole = kind is np.float64 or bool(np.all((array == np.floor(array)) & (np.abs(array) <= most)))
        if len(array) != count or not np.all(np.abs(array) <= (np.inf if infinite else FAR)) or not is_whole:
            self.stop(f"{name}: expected {count} numbers, got {text!r:.60}")
        return array.astype(kind)

    def tree(self, number: int, text: str, features: int) -> Tree:
        where, fields = f"tree {number}", _fields(text)
        if fields.get("is_linear", "0") != "0":
            self.stop(f"{where}: has linear leaves (linear_tree), which our trees have not")
        leaves = self.whole(fields, "num_leaves", 1, 2**31)
        if leaves > len(text):
            self.stop(f"{where}: num_leaves: {leaves} leaves in {len(text)} characters; the file was cut or edited")
        nodes = leaves - 1

        def of(
            name: str, count: int, kind: type = np.float64, *, required: bool = True, infinite: bool = False
        ) -> Array:
            if not count or (not required and not fields.get(name)):
                return np.zeros(count, kind)
            return self.numbers(f"{where}: {name}", fields.get(name, ""), count, kind, infinite=infinite)

        feature, left, right = (of(name, nodes, np.int32) for name in ("split_feature", "left_child", "right_child"))
        if nodes and not 0 <= feature.min() <= feature.max() < features:
            self.stop(f"{where}: split_feature: expected 0 to {features - 1}")
        if not is_tree(left, right, leaves):
            self.stop(f"{where}: left_child, right_child: the children do not form a tree; the file was edited")
        kinds = of("decision_type", nodes, np.int64)
        threshold = np.clip(of("threshold", nodes, infinite=True), -FAR, FAR)  # beyond either end there is no number
        is_set, missing = (kinds & CATEGORICAL) > 0, kinds & MISSING_KIND
        default, zero_left = (kinds & DEFAULT_LEFT) > 0, threshold >= 0.0
        if np.any(~is_set & (missing == MISSING_IS_ZERO) & (default != zero_left)):
            self.stop(f"{where}: zero is a missing value (zero_as_missing), which our trees do not know")
        # Without missing values in training LightGBM takes NaN for 0.
        missing_left = np.where(missing == MISSING_IS_NAN, default, zero_left) & ~is_set
        sets = self._sets(where, fields, threshold[is_set])
        return Tree(
            feature=feature,
            threshold=np.where(is_set, 0.0, threshold),
            missing_left=missing_left,
            left=left,
            right=right,
            gain=of("split_gain", nodes, required=False),
            node_value=of("internal_value", nodes, required=False),
            node_weight=of("internal_weight", nodes, required=False),
            node_rows=of("internal_count", nodes, np.int64, required=False),
            categories=tuple(sets.pop(0) if has_set else None for has_set in is_set),
            leaf_value=of("leaf_value", leaves),
            leaf_weight=of("leaf_weight", leaves if nodes else 1, required=False),
            leaf_rows=of("leaf_count", leaves, np.int64, required=False),
        )

    def _sets(self, where: str, fields: dict[str, str], set_numbers: Array) -> list[Array]:
        """The categories that go left at each categorical node."""
        if not len(set_numbers):
            return []
        count = self.whole(fields, "num_cat", 1, 2**31)
        starts = self.numbers(f"{where}: cat_boundaries", fields.get("cat_boundaries", ""), count + 1, np.int64)
        size = len(fields.get("cat_threshold", "").split())
        words = self.numbers(f"{where}: cat_threshold", fields.get("cat_threshold", ""), size, np.int64)
        ordered = starts[0] == 0 and starts[-1] == size and bool(np.all(np.diff(starts) >= 0))
        is_known = bool(np.all((set_numbers >= 0) & (set_numbers < count) & (set_numbers == np.floor(set_numbers))))
        if not (ordered and is_known and np.all((words >= 0) & (words < 2**32))):
            self.stop(f"{where}: cat_boundaries, cat_threshold: they are no sets of categories; the file was edited")
        sets = []
        for set_number in set_numbers.astype(np.int64):
            part = words[starts[set_number] : starts[set_number + 1]].astype("<u4")
            members = np.flatnonzero(np.unpackbits(part.view(np.uint8), bitorder="little"))
            if members.max(initial=0) > MAX_CATEGORY:
                self.stop(f"{where}: category {members.max()}: expected at most {MAX_CATEGORY}")
            sets.append(members.astype(np.float64))
        return sets

    def categories(self, header: dict[str, str], parameters: dict[str, str], after: str) -> dict[int, list[Any]]:
        """The values that each of pandas' categorical columns had at training, by feature, in their order."""
        line = next((line for line in after.split("\n") if line.startswith("pandas_categorical:")), "")
        text = line.partition(":")[2].encode("utf-8", "replace")
        lists = parse_json(text or b"null", where=f"{self._where}: pandas_categorical") or []
        if type(lists) is not list or not all(map(are_categories, lists)):
            self.stop(f"pandas_categorical: expected lists of {CATEGORIES}, got {show(lists)}")
        named = parameters.get("categorical_feature", "").split(",")
        columns = [int(part) for part in named if part.isdecimal() and len(part) <= MAX_DIGITS]
        if not lists:
            return {}
        if len(columns) != len(lists):  # the ranges of values say it too, but for features that were never used
            infos = header.get("feature_infos", "").split(" ")
            columns = [column for column, info in enumerate(infos) if info != "none" and not info.startswith("[")]
        if len(columns) != len(lists):
            self.stop(
                f"pandas_categorical: has {len(lists)} lists for {len(columns)} categorical features; replace the "
                "columns by their codes (column.cat.codes) before LightGBM is trained"
            )
        return dict(zip(columns, lists, strict=True))


def _fields(text: str) -> dict[str, str]:
    """The lines "name=value" of a text as a dict; a line without "=" is a name with no value."""
    return {name: value for name, _, value in (line.partition("=") for line in text.split("\n"))}
