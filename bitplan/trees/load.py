"""Models from JSON, read strictly.

A file that was cut short or edited is refused with the place of the fault: unknown or missing keys, wrong types, arrays
of different lengths, children that are no tree.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bitplan.base.documents import LIST, OBJECT, SIZE, Kind, Reader, is_number, is_text, load_bytes, one_of
from bitplan.base.errors import FileFormatError
from bitplan.base.records import MAX_JSON_BYTES, parse_json
from bitplan.trees.binning import MAX_CATEGORY
from bitplan.trees.categories import CATEGORIES, are_categories
from bitplan.trees.estimators import BoostedTreesClassifier, BoostedTreesRegressor
from bitplan.trees.gradients import Array, TreesError
from bitplan.trees.lightgbm_read import (
    MAX_DIGITS,
    lightgbm_classes_of,
    lightgbm_text,
    lightgbm_text_of,
    read_lightgbm_text,
)
from bitplan.trees.objectives import OBJECTIVES
from bitplan.trees.ranker import BoostedTreesRanker
from bitplan.trees.save import FORMAT, LATER_PARAMETERS, LEAF_FIELDS, MAX_FEATURES, NODE_FIELDS, VERSION
from bitplan.trees.tree import FAR, Booster, Tree, is_tree

MAX_INTEGER = 2**62
BoostedTrees = BoostedTreesClassifier | BoostedTreesRegressor | BoostedTreesRanker
_KINDS: dict[str, Any] = {
    kind.file_kind: kind for kind in (BoostedTreesClassifier, BoostedTreesRegressor, BoostedTreesRanker)
}
_DTYPES = {"feature": np.int32, "left": np.int32, "right": np.int32, "node_rows": np.int64, "leaf_rows": np.int64}
_ANY = Kind("a value", lambda _: True)
HEAD = {
    "format": one_of(FORMAT),
    "version": SIZE,
    "kind": one_of(*_KINDS),
    "parameters": OBJECT,
    "classes": _ANY,
    "features": Kind(f"1 to {MAX_FEATURES}", lambda value: type(value) is int and 0 < value <= MAX_FEATURES),
    "feature_names": _ANY,
    "start": LIST,
    "losses": LIST,
    "trees": LIST,
}
LATER = {"categories": OBJECT, "rounds_before": SIZE}  # not in every file
_TREE = dict.fromkeys((*NODE_FIELDS, *LEAF_FIELDS, "categories"), LIST)


def load_trees(path: str | Path) -> BoostedTrees:
    """Read an estimator that `save` wrote, or a model that LightGBM saved as text."""
    data = load_bytes(path, FileFormatError, max_bytes=MAX_JSON_BYTES, noun="model of trees")
    if data.startswith(b"tree\n"):
        return _from_text(lightgbm_text(data, str(path)), str(path))
    document = parse_json(data, where=str(path))
    reader = Reader(str(path), FileFormatError)
    reader.version(document, VERSION)
    reader.keys("", document, HEAD | LATER, HEAD)
    model: BoostedTrees = _estimator(reader, document)
    trees, features = document["trees"], document["features"]
    start = _numbers(reader, "start", document["start"], float)
    outputs = model._objective().outputs
    if len(start) != outputs or len(trees) % outputs:
        reader.stop(f"expected {outputs} starting scores and as many trees in each round")
    model.booster_ = Booster(
        start,
        features,
        [_tree(reader, f"tree {number}", tree, features) for number, tree in enumerate(trees)],
        _numbers(reader, "losses", document["losses"], float).tolist(),
        document.get("rounds_before", 0),
    )
    return model


def from_lightgbm(model: Any) -> BoostedTrees:
    """An estimator that predicts as a LightGBM model does: its text or file, its Booster, or its estimator.

    LightGBM's text has no labels, so the classes are 0, 1, ...; those of an LGBMClassifier are its own.
    """
    text, where = lightgbm_text_of(model)
    estimator, classes = _from_text(text, where), lightgbm_classes_of(model)
    if isinstance(estimator, BoostedTreesClassifier) and classes is not None:
        estimator.classes_ = classes
    return estimator


def _from_text(text: str, where: str) -> BoostedTrees:
    read = read_lightgbm_text(text, where)
    settings: dict[str, Any] = {"n_estimators": max(read.booster.rounds, 1)}
    model: BoostedTrees
    if read.objective in ("binary", "multiclass"):
        model = BoostedTreesClassifier(**settings)
        model.classes_ = np.arange(max(read.booster.outputs, 2))
    elif read.objective == "lambdarank":
        model = BoostedTreesRanker(**settings)
    else:
        model = BoostedTreesRegressor(objective=read.objective, **(settings | read.options))
    model.booster_, model.categories_, model.n_features_in_ = read.booster, read.categories, read.booster.features
    if read.feature_names is not None:
        model.feature_names_in_ = np.array(read.feature_names, dtype=object)
    return model


def _estimator(reader: Reader, document: dict[str, Any]) -> Any:
    """The estimator of a document, with its features, which parameters may name, and its classes."""
    kind, parameters, features = _KINDS[document["kind"]], document["parameters"], document["features"]
    defaults = kind().get_params()
    later = LATER_PARAMETERS | ({"objective"} if defaults.get("objective") is None else set())
    model = kind(**reader.keys("parameters", parameters, dict.fromkeys(defaults, _ANY), set(defaults) - later))
    if isinstance(parameters.get("class_weight"), list):
        model.class_weight = _class_weights(reader, parameters["class_weight"])
    if kind is BoostedTreesRegressor and not isinstance(parameters.get("alpha"), list):
        model.n_outputs_ = max(len(document["start"]), 1)
    model.n_features_in_ = features
    model.categories_ = _categories(reader, document.get("categories", {}), features)
    names = document["feature_names"]
    if names is not None:
        if type(names) is not list or len(names) != features or not all(map(is_text, names)):
            reader.fail("feature_names", f"{features} names, or null", names)
        model.feature_names_in_ = np.array(names, dtype=object)
    try:
        model._check_parameters(features)
    except TreesError as error:
        reader.stop(f"parameters: {error}")
    if kind is BoostedTreesRegressor:
        if parameters["objective"] not in list(OBJECTIVES):
            reader.fail("parameters: objective", f"one of {list(OBJECTIVES)}", parameters["objective"])
    elif kind is BoostedTreesClassifier:
        model.classes_ = _classes(reader, document["classes"])
    return model


def _class_weights(reader: Reader, pairs: list[Any]) -> dict[Any, float]:
    """Read weights by class label, which a file holds as pairs: JSON's keys are texts."""
    labels = (bool, int, float, str)
    is_pair = [isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in labels for pair in pairs]
    if not all(is_pair) or not all(is_number(weight) for _, weight in pairs):
        reader.fail("parameters: class_weight", "pairs of a label and a weight", pairs)
    return dict(pairs)


def _categories(reader: Reader, document: dict[str, Any], features: int) -> dict[int, list[Any]]:
    """What the numbers of each categorical feature stand for."""
    categories = {}
    for feature, values in document.items():
        if not are_categories(values):
            reader.fail(f"categories: {feature:.20}", CATEGORIES, values)
        if not feature.isdecimal() or len(feature) > MAX_DIGITS or int(feature) >= features:
            reader.stop(f"categories: {feature:.20}: expected the place of a feature, 0 to {features - 1}")
        categories[int(feature)] = values
    return categories


def _classes(reader: Reader, classes: Any) -> Array:
    kinds = {type(label) for label in classes} if isinstance(classes, list) else set()
    is_known = len(kinds) == 1 and kinds <= {bool, int, float, str} and len(classes) >= 2
    if is_known and sorted(set(classes)) == classes:
        labels: Array = np.array(classes, dtype=object if kinds == {str} else None)
        is_exact = labels.dtype.kind in "biuf" and labels.tolist() == classes and bool(np.isfinite(labels).all())
        if is_exact or all(map(is_text, classes)):
            return labels
    return reader.fail("classes", "two or more labels of one type, sorted, numbers finite and of 64 bits", classes)


# ---- trees -----------------------------------------------------------------------------------------------------------


def _tree(reader: Reader, path: str, document: Any, features: int) -> Tree:
    reader.keys(path, document, _TREE, _TREE)
    kinds, sets = NODE_FIELDS | LEAF_FIELDS, document["categories"]
    arrays = {name: _numbers(reader, f"{path}: {name}", document[name], kind) for name, kind in kinds.items()}
    leaves = len(arrays["leaf_value"])
    wrong = [name for name in NODE_FIELDS if len(arrays[name]) != leaves - 1]
    wrong += [name for name in LEAF_FIELDS if len(arrays[name]) != leaves]
    if wrong or leaves < 1 or len(sets) != leaves - 1:
        reader.stop(f"{path}: {wrong or ['categories']}: expected {leaves - 1} nodes and {leaves} leaves")
    if leaves > 1 and not 0 <= arrays["feature"].min() <= arrays["feature"].max() < features:
        reader.stop(f"{path}: feature: expected 0 to {features - 1}")
    if not is_tree(arrays["left"], arrays["right"], leaves):
        reader.stop(f"{path}: left, right: the children do not form a tree; the file was edited or damaged")
    categories = tuple(None if numbers is None else _category_numbers(reader, path, numbers) for numbers in sets)
    return Tree(
        categories=categories, **{name: array.astype(_DTYPES.get(name, array.dtype)) for name, array in arrays.items()}
    )


def _category_numbers(reader: Reader, path: str, numbers: Any) -> Array:
    array = _numbers(reader, f"{path}: categories", numbers, float)
    if not np.all((array >= 0) & (array <= MAX_CATEGORY) & (array == np.floor(array))):
        reader.fail(f"{path}: categories", f"whole numbers from 0 to {MAX_CATEGORY}", numbers)
    return array


def _numbers(reader: Reader, path: str, values: Any, kind: type) -> Array:
    allowed = (int, float) if kind is float else (kind,)
    if type(values) is not list or not all(type(value) in allowed for value in values):
        reader.fail(path, f"a list of {kind.__name__}", values)
    try:
        array: Array = np.array(values, dtype=np.int64 if kind is int else kind)
    except OverflowError:  # an integer of hundreds of digits
        array = np.array([np.inf])
    if kind is not bool and not np.all(np.abs(array) <= (MAX_INTEGER if kind is int else FAR)):
        reader.stop(f"{path}: a number is out of range")
    return array
