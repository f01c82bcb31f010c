"""A model in LightGBM's text format (its version v4), so that SHAP, Treelite and LightGBM itself can read it.

Our trees have LightGBM's shape already. The starting score becomes part of the first tree's leaves, as LightGBM does
it, and sums run in the same order: raw predictions are equal to the bit.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from bitplan.trees.gradients import Array
from bitplan.trees.tree import Tree, bit_set

CATEGORICAL, DEFAULT_LEFT, MISSING_IS_NAN = 1, 2, 8  # bits of LightGBM's decision_type
# Our names: LightGBM's, and its names for our settings of the objective.
OBJECTIVE_NAMES: dict[str, tuple[str, dict[str, str]]] = {
    "squared_error": ("regression", {}),
    "absolute_error": ("regression_l1", {}),
    "poisson": ("poisson", {}),
    "quantile": ("quantile", {"alpha": "alpha"}),
    "huber": ("huber", {"alpha": "alpha"}),
    "gamma": ("gamma", {}),
    "tweedie": ("tweedie", {"tweedie_power": "tweedie_variance_power"}),
    "lambdarank": ("lambdarank", {}),
    "binary": ("binary", {}),
    "multiclass": ("multiclass", {}),
}


def to_lightgbm_text(model: Any) -> str:
    """An estimator as LightGBM's text, without objectives that it lacks (custom, several): raw scores then."""
    booster = model.booster_
    name = model._objective().name
    objective = OBJECTIVE_NAMES[name][0] if name in OBJECTIVE_NAMES else None
    if booster.outputs > 1:
        objective = None
    if name in ("binary", "multiclass"):
        objective = "binary sigmoid:1" if name == "binary" else f"multiclass num_class:{booster.outputs}"
    used = {int(feature) for tree in booster.trees for feature in tree.feature}
    names = getattr(model, "feature_names_in_", [f"Column_{index}" for index in range(booster.features)])
    trees = [_tree_text(index, tree, booster) for index, tree in enumerate(booster.trees)]
    head = {
        "version": "v4",
        "num_class": booster.outputs,
        "num_tree_per_iteration": booster.outputs,
        "label_index": 0,
        "max_feature_idx": booster.features - 1,
        "objective": objective,
        "feature_names": " ".join("_".join(str(name).split()) or f"Column_{index}" for index, name in enumerate(names)),
        "feature_infos": " ".join("[-1e+308:1e+308]" if index in used else "none" for index in range(booster.features)),
        "tree_sizes": " ".join(str(len(text.encode())) for text in trees),
    }
    lines = ["tree", *(f"{key}={value}" for key, value in head.items() if value is not None), ""]
    end = [
        "end of trees",
        "",
        "feature_importances:",
        "",
        "parameters:",
        *_parameters(model, objective),
        "end of parameters",
        "",
        f"pandas_categorical:{json.dumps(list(model.categories_.values()) or None)}",
    ]
    return "\n".join(lines) + "\n" + "".join(trees) + "\n".join(end) + "\n"


def _parameters(model: Any, objective: str | None) -> list[str]:
    """Lines that LightGBM would write of its parameters: those which a reader needs."""
    of_trees = {"categorical_feature": ",".join(map(str, model.categories_))} if model.categories_ else {}
    ours = next((settings for name, settings in OBJECTIVE_NAMES.values() if name == objective), {})
    of_objective = {theirs: f"{getattr(model, name):.17g}" for name, theirs in ours.items()}
    return [f"[{name}: {value}]" for name, value in (of_trees | of_objective).items()]


def _tree_text(number: int, tree: Tree, booster: Any) -> str:
    first = number < booster.outputs
    leaf_value = tree.leaf_value + booster.start[number % booster.outputs] if first else tree.leaf_value
    fields: dict[str, str] = {"num_leaves": str(tree.leaves), "num_cat": "0"}
    if tree.leaves > 1:
        sets = [None if numbers is None else bit_set(numbers) for numbers in tree.categories]
        threshold, set_nodes = tree.threshold.copy(), [at for at, words in enumerate(sets) if words is not None]
        threshold[set_nodes] = np.arange(len(set_nodes))
        kinds = np.where(tree.missing_left, DEFAULT_LEFT, 0) | MISSING_IS_NAN
        kinds[set_nodes] = CATEGORICAL | MISSING_IS_NAN
        fields |= {
            "num_cat": str(len(set_nodes)),
            "split_feature": _joined(tree.feature),
            "split_gain": _joined(tree.gain),
            "threshold": _joined(threshold),
            "decision_type": _joined(kinds),
            "left_child": _joined(tree.left),
            "right_child": _joined(tree.right),
        }
        words = [sets[at] for at in set_nodes]
        if words:
            fields["cat_boundaries"] = _joined(np.cumsum([0, *map(len, words)]))  # type: ignore[arg-type]
            fields["cat_threshold"] = _joined(np.concatenate(words))  # type: ignore[arg-type]
    fields["leaf_value"] = _joined(leaf_value)
    if tree.leaves > 1:
        fields |= {
            "leaf_weight": _joined(tree.leaf_weight),
            "leaf_count": _joined(tree.leaf_rows),
            "internal_value": _joined(tree.node_value),
            "internal_weight": _joined(tree.node_weight),
            "internal_count": _joined(tree.node_rows),
        }
    fields |= {"is_linear": "0", "shrinkage": "1"}
    return f"Tree={number}\n" + "".join(f"{key}={value}\n" for key, value in fields.items()) + "\n\n"


def _joined(numbers: Array) -> str:
    if numbers.dtype.kind == "f":
        return " ".join(f"{number:.17g}" for number in numbers)
    return " ".join(map(str, numbers.tolist()))
