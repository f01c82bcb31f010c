"""Checks before a distributed fit that all processes fit the same model to the same kind of table.

A process without rows still has to have the settings and features of the others, but its arrays may have any type.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitplan.trees.distributed.shards import Array, Shards, gather_json
from bitplan.trees.gradients import TreesError

LABEL_KINDS = "biufUO"  # numpy's letters
SAME_VERSION = "run the same version of bitplan everywhere"


def agree(always: dict[str, Any], of_rows: dict[str, Any], rows: int, shards: Shards) -> dict[str, Any]:
    """The facts in which all processes agree; `of_rows` counts only where there are rows. Refuses by name."""
    document = {name: describe(value) for name, value in always.items()}
    document |= {name: describe(value) for name, value in of_rows.items()} if rows else {}
    documents = gather_json(document, "settings and features", shards)
    _refuse_other_keys(documents, {*always} | {*of_rows}, {*always})
    common: dict[str, Any] = {}
    for name in (*always, *of_rows):
        values = {rank: facts[name] for rank, facts in enumerate(documents) if name in facts}
        if not values:
            raise TreesError("X: no process has any rows; give at least one of them some")
        first = min(values)
        others = [rank for rank, value in values.items() if value != values[first]]
        if others:
            raise TreesError(
                f"distributed fit: {name} differs between processes: rank {first} has {values[first]!r:.80}, rank "
                f"{others[0]} has {values[others[0]]!r:.80}; every process must fit the same model to the same columns"
            )
        common[name] = values[first]
    return common


def describe(value: Any) -> Any:
    """A setting as JSON, so that it can be compared: functions by their names."""
    if isinstance(value, np.ndarray):
        return describe(value.tolist())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [describe(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if callable(value):
        return f"function {getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"
    return str(getattr(value, "value", type(value).__name__))  # an enum; a generator of random numbers by its kind


def merge_classes(classes: Array, shards: Shards) -> Array:
    """The classes of all processes, sorted; `classes` are this one's."""
    if shards.count == 1:
        return classes
    labels = classes.tolist()
    is_text = all(isinstance(label, str) for label in labels)
    if classes.dtype.kind not in LABEL_KINDS or (classes.dtype.kind == "O" and not is_text):
        raise TreesError(
            f"y: labels of type {classes.dtype} cannot be sent to other processes; use numbers, truth values or text"
        )
    documents = gather_json({"type": classes.dtype.str, "labels": labels}, "classes", shards)
    _refuse_other_keys(documents, {"type", "labels"}, {"type", "labels"})
    parts = [_labels(part, rank) for rank, part in enumerate(documents) if part["labels"]]
    if not parts:
        raise TreesError("y: no process has any labels; give at least one of them some rows")
    merged: Array = np.unique(np.concatenate(parts))
    return merged


def _labels(part: dict[str, Any], rank: int) -> Array:
    try:
        labels: Array = np.array(part["labels"], dtype=part["type"])
    except (TypeError, ValueError, OverflowError):
        labels = np.empty((0, 0))
    if labels.ndim != 1 or labels.dtype.kind not in LABEL_KINDS:
        raise TreesError(f"distributed fit: rank {rank} sent classes that are no labels, {part!r:.80}; {SAME_VERSION}")
    return labels


def _refuse_other_keys(documents: list[Any], allowed: set[str], required: set[str]) -> None:
    for rank, part in enumerate(documents):
        if not isinstance(part, dict) or not required <= set(part) <= allowed:
            raise TreesError(f"distributed fit: rank {rank} sent {part!r:.80}, which is not expected; {SAME_VERSION}")
