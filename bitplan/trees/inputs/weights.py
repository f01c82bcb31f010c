"""Weights of classes, multiplied into those of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bitplan.trees.checks import number
from bitplan.trees.distributed.shards import Shards
from bitplan.trees.gradients import Array, TreesError


def class_weights(
    given: Any, scale_pos_weight: Any, classes: Array, places: Array, weights: Array, shards: Shards
) -> Array:
    """A weight for each row; `places` are those of the rows' classes, `weights` the rows' own, or none."""
    if given is None and scale_pos_weight is None:
        return weights
    places = places.astype(np.int64)
    by_class = _by_class(given, classes, places, shards)
    if scale_pos_weight is not None:
        if len(classes) != 2:
            raise TreesError(
                f"scale_pos_weight: expected None for {len(classes)} classes, as it weighs the second of two; use "
                "class_weight"
            )
        by_class[1] *= number("scale_pos_weight", scale_pos_weight, 0, above=True)
    each: Array = by_class[places]
    return each * weights if len(weights) else each


def _by_class(given: Any, classes: Array, places: Array, shards: Shards) -> Array:
    if given is None:
        return np.ones(len(classes))
    if isinstance(given, str) and given == "balanced":
        counts = shards.add(np.bincount(places, minlength=len(classes)), "rows of each class")
        balanced: Array = counts.sum() / (len(classes) * np.maximum(counts, 1))
        return balanced
    if not isinstance(given, Mapping):
        raise TreesError(f"class_weight: expected None, 'balanced' or a weight by class, got {given!r:.60}")
    labels = classes.tolist()
    unknown = [label for label in given if label not in labels]
    if unknown:
        raise TreesError(f"class_weight: {unknown[0]!r:.40} is not among the classes of y, {labels[:5]}")
    return np.array([number("class_weight", given.get(label, 1.0), 0) for label in labels])
