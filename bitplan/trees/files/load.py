"""Models from JSON, read strictly.

A file that was cut short or edited is refused with the place of the fault: unknown or missing keys, wrong types, arrays
of different lengths, children that are no tree.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bitplan.errors import FileFormatError
from bitplan.records import read_json
from bitplan.trees.boost import Booster
from bitplan.trees.estimators import BoostedTreesClassifier, BoostedTreesRegressor
from bitplan.trees.files.save import FORMAT, HEAD, LEAF_FIELDS, MAX_FEATURES, NODE_FIELDS, VERSION, is_text
from bitplan.trees.gradients import Array, TreesError
from bitplan.trees.grow import FAR
from bitplan.trees.objectives import OBJECTIVES
from bitplan.trees.tree import Tree

MAX_INTEGER = 2**62
_KINDS = {"classifier": BoostedTreesClassifier, "regressor": BoostedTreesRegressor}
_DTYPES = {"feature": np.int32, "left": np.int32, "right": np.int32, "node_rows": np.int64, "leaf_rows": np.int64}


def load_trees(path: str | Path) -> BoostedTreesClassifier | BoostedTreesRegressor:
    """Read an estimator that `save` wrote."""
    try:
        document = read_json(path)
    except OSError as error:
        raise FileFormatError(
            f"{path}: cannot be read: {error.strerror or error}; give the name of a file that save wrote"
        ) from None
    try:
        return _model(str(path), document)
    except RecursionError:  # lists within lists, in a message about them
        raise FileFormatError(f"{path}: nested too deeply for a model") from None


def _model(where: str, document: Any) -> BoostedTreesClassifier | BoostedTreesRegressor:
    _check_keys(where, document, HEAD)
    version = document["version"]
    if document["format"] != FORMAT or type(version) is not int or version != VERSION:
        raise FileFormatError(
            f"{where}: expected format {FORMAT!r}, version {VERSION}, got {document['format']!r:.40}, "
            f"{version!r:.40}; a newer bitplan may have written it"
        )
    if document["kind"] not in ("classifier", "regressor"):
        raise FileFormatError(f"{where}: kind: expected 'classifier' or 'regressor', got {document['kind']!r:.40}")
    model: BoostedTreesClassifier | BoostedTreesRegressor = _estimator(where, document)
    start = _numbers(where, document["start"], "start", float)
    trees = document["trees"]
    outputs = _expected_outputs(model)
    if len(start) != outputs or not isinstance(trees, list) or len(trees) % outputs:
        raise FileFormatError(f"{where}: expected {outputs} starting scores and as many trees in each round")
    features = document["features"]
    model.booster_ = Booster(
        start,
        features,
        [_tree(f"{where}: tree {place}", tree, features) for place, tree in enumerate(trees)],
        _numbers(where, document["losses"], "losses", float).tolist(),
    )
    return model


def _estimator(where: str, document: dict[str, Any]) -> Any:
    """With its features, which parameters may name, and its classes."""
    kind, parameters, features = _KINDS[document["kind"]], document["parameters"], document["features"]
    known = kind().get_params()
    if not isinstance(parameters, dict) or set(parameters) != set(known):
        odd = sorted(set(parameters) ^ set(known)) if isinstance(parameters, dict) else parameters
        raise FileFormatError(f"{where}: parameters: expected those of the {document['kind']}, differs in {odd!r:.80}")
    if type(features) is not int or not 0 < features <= MAX_FEATURES:
        raise FileFormatError(f"{where}: features: expected 1 to {MAX_FEATURES}, got {features!r:.40}")
    model = kind(**parameters)
    model.n_features_in_ = features
    names = document["feature_names"]
    if names is not None:
        if not isinstance(names, list) or len(names) != features or not all(map(is_text, names)):
            raise FileFormatError(f"{where}: feature_names: expected {features} names, or null")
        model.feature_names_in_ = np.array(names, dtype=object)
    try:
        model._check_parameters(features)
    except TreesError as error:
        raise FileFormatError(f"{where}: parameters: {error}") from None
    if kind is BoostedTreesRegressor:
        if parameters["objective"] not in list(OBJECTIVES):
            raise FileFormatError(f"{where}: objective: expected one of {list(OBJECTIVES)}")
    else:
        model.classes_ = _classes(where, document["classes"])
    return model


def _classes(where: str, classes: Any) -> Array:
    kinds = {type(label) for label in classes} if isinstance(classes, list) else set()
    is_known = len(kinds) == 1 and kinds <= {bool, int, float, str} and len(classes) >= 2
    if is_known and sorted(set(classes)) == classes:
        labels: Array = np.array(classes, dtype=object if kinds == {str} else None)
        is_exact = labels.dtype.kind in "biuf" and labels.tolist() == classes and bool(np.isfinite(labels).all())
        if is_exact or all(map(is_text, classes)):
            return labels
    raise FileFormatError(
        f"{where}: classes: expected two or more labels of one type, sorted, numbers finite and of 64 bits, "
        f"got {classes!r:.80}"
    )


def _expected_outputs(model: Any) -> int:
    classes = getattr(model, "classes_", ())
    return len(classes) if len(classes) > 2 else 1


# ---- trees -----------------------------------------------------------------------------------------------------------


def _tree(where: str, document: Any, features: int) -> Tree:
    _check_keys(where, document, (*NODE_FIELDS, *LEAF_FIELDS, "categories"))
    arrays = {name: _numbers(where, document[name], name, kind) for name, kind in (NODE_FIELDS | LEAF_FIELDS).items()}
    leaves = len(arrays["leaf_value"])
    sets = document["categories"]
    wrong = [name for name in NODE_FIELDS if len(arrays[name]) != leaves - 1]
    wrong += [name for name in LEAF_FIELDS if len(arrays[name]) != leaves]
    if wrong or leaves < 1 or not isinstance(sets, list) or len(sets) != leaves - 1:
        raise FileFormatError(f"{where}: {wrong or ['categories']}: expected {leaves - 1} nodes and {leaves} leaves")
    if leaves > 1 and not 0 <= arrays["feature"].min() <= arrays["feature"].max() < features:
        raise FileFormatError(f"{where}: feature: expected 0 to {features - 1}")
    _check_is_tree(where, arrays["left"], arrays["right"], leaves)
    categories = tuple(None if numbers is None else _category_numbers(where, numbers) for numbers in sets)
    return Tree(
        categories=categories, **{name: array.astype(_DTYPES.get(name, array.dtype)) for name, array in arrays.items()}
    )


def _check_is_tree(where: str, left: Array, right: Array, leaves: int) -> None:
    """Every leaf, and every node but the root, is the child of exactly one node that comes before it."""
    children = np.concatenate([left, right])
    expected = np.concatenate([np.arange(1, leaves - 1), ~np.arange(leaves)]) if leaves > 1 else children[:0]
    parents = np.tile(np.arange(leaves - 1), 2)
    ordered = bool(np.all((children < 0) | (children > parents)))
    if not (ordered and np.array_equal(np.sort(children), np.sort(expected))):
        raise FileFormatError(f"{where}: left, right: the children do not form a tree; the file was edited or damaged")


def _category_numbers(where: str, numbers: Any) -> Array:
    array = _numbers(where, numbers, "categories", float)
    if not np.all((array >= 0) & (array < 256) & (array == np.floor(array))):
        raise FileFormatError(f"{where}: categories: expected whole numbers from 0 to 255")
    return array


def _check_keys(where: str, document: Any, keys: tuple[str, ...]) -> None:
    if not isinstance(document, dict) or set(document) != set(keys):
        odd = sorted(set(document) ^ set(keys)) if isinstance(document, dict) else type(document).__name__
        raise FileFormatError(
            f"{where}: expected an object with the keys {', '.join(keys)}; missing or unknown: {odd!r:.200}"
        )


def _numbers(where: str, values: Any, name: str, kind: type) -> Array:
    allowed = (int, float) if kind is float else (kind,)
    if not isinstance(values, list) or not all(type(value) in allowed for value in values):
        raise FileFormatError(f"{where}: {name}: expected a list of {kind.__name__}, got {values!r:.60}")
    try:
        array: Array = np.array(values, dtype=np.int64 if kind is int else kind)
    except OverflowError:  # an integer of hundreds of digits
        array = np.array([np.inf])
    if kind is not bool and not np.all(np.abs(array) <= (MAX_INTEGER if kind is int else FAR)):
        raise FileFormatError(f"{where}: {name}: a number is out of range")
    return array
