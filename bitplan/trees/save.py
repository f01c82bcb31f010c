"""A fitted model as JSON: readable, exact (floats survive the round trip), written atomically; never a pickle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bitplan.base.documents import is_text
from bitplan.base.records import write_json
from bitplan.trees.checks import has_default
from bitplan.trees.gradients import GradientPrecision, TreesError
from bitplan.trees.tree import FAR, Tree

FORMAT, VERSION = "bitplan.trees", 1
MAX_FEATURES = 2**24  # bounds what a reader allocates for a number in a file
NODE_FIELDS = {
    "feature": int,
    "threshold": float,
    "missing_left": bool,
    "left": int,
    "right": int,
    "gain": float,
    "node_value": float,
    "node_weight": float,
    "node_rows": int,
}
LEAF_FIELDS = {"leaf_value": float, "leaf_weight": float, "leaf_rows": int}
# Parameters that came after the first version of the format: left out where they have their defaults. The device is
# never written: the model is the same.
LATER_PARAMETERS = {
    "alpha",
    "boosting",
    "class_weight",
    "device",
    "drop_rate",
    "importance_type",
    "interaction_constraints",
    "max_drop",
    "sampling",
    "scale_pos_weight",
    "skip_drop",
    "tweedie_power",
    "warm_start",
}


def save_trees(model: Any, path: str | Path) -> None:
    """Write a fitted estimator; what `load_trees` would not read is refused here, by name."""
    booster, classes = model.booster_, getattr(model, "classes_", None)
    if booster.features > MAX_FEATURES:
        raise TreesError(f"features: a model file holds at most {MAX_FEATURES}, this model has {booster.features}")
    names = getattr(model, "feature_names_in_", None)
    defaults = type(model)().get_params()
    parameters = {
        name: value
        for name, value in model.get_params().items()
        if name != "device" and (name not in LATER_PARAMETERS or not has_default(value, defaults[name]))
        if name != "objective" or value is not None  # a classifier's follows from its classes
    }
    document = {
        "format": FORMAT,
        "version": VERSION,
        "kind": model.file_kind,
        "parameters": {name: _plain(name, value) for name, value in parameters.items()},
        "classes": None if classes is None else _plain("classes", classes),
        "features": booster.features,
        "feature_names": None if names is None else [_plain("feature_names", str(name)) for name in names],
        "start": _plain("start", booster.start),
        "losses": _plain("losses", booster.losses),
        "trees": [_tree_document(tree) for tree in booster.trees],
    }
    if model.categories_:
        document["categories"] = {
            str(index): _plain("categories", values) for index, values in model.categories_.items()
        }
    if booster.rounds_before:
        document["rounds_before"] = booster.rounds_before
    write_json(path, document)


def _tree_document(tree: Tree) -> dict[str, Any]:
    fields = {name: getattr(tree, name).tolist() for name in (*NODE_FIELDS, *LEAF_FIELDS)}
    return fields | {"categories": [None if numbers is None else numbers.tolist() for numbers in tree.categories]}


def _plain(name: str, value: Any) -> Any:
    """A value as JSON can hold it; anything else is refused by name."""
    if isinstance(value, GradientPrecision):
        return value.value
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, np.generic):
        value = value.item()
    if name == "class_weight" and isinstance(value, dict):  # labels may be numbers, and keys may not
        return [[_plain(name, label), _plain(name, weight)] for label, weight in value.items()]
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TreesError(
                f"{name}: in a model file features go by name, and a key of {value!r:.60} is none; give names, or a "
                "list with an item for each feature"
            )
        return {_plain(name, key): _plain(name, item) for key, item in value.items()}
    if name == "interaction_constraints" and isinstance(value, (set, frozenset, range)):
        value = sorted(value, key=str)
    if isinstance(value, (list, tuple)):
        return [_plain(name, item) for item in value]
    if isinstance(value, str) and not is_text(str(value)):
        raise TreesError(f"{name}: {value!r:.60} is no Unicode text, so no file can hold it; rename it")
    if isinstance(value, (int, float)) and not abs(value) <= FAR:
        raise TreesError(
            f"{name}: {value} cannot be written to a model file, which holds finite numbers; set a finite one"
        )
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if name == "random_state":  # what it drew is in the trees
        return None
    raise TreesError(
        f"{name}: a {type(value).__name__} cannot be written to a model file; export with to_lightgbm instead"
    )
