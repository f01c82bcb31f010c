"""Looks at all of a large array by all threads: numpy and scikit-learn would take longer for it than trees do."""

from __future__ import annotations

from typing import Any

import numpy as np

from bitplan.kernels.base.jit import on_threads

Array = np.ndarray[Any, Any]
NUMBERS = 2**20  # of a table, at once
LABELS = 2**17


def is_large_table(x: Any) -> bool:
    """Numbers that scikit-learn takes as they are, and many of them."""
    return type(x) is np.ndarray and x.dtype in (np.float32, np.float64) and x.ndim == 2 and x.size > NUMBERS


def has_infinity(x: Array) -> bool:
    """Whether a number of the table (rows, features) is infinite."""
    step = max(NUMBERS // max(x.shape[1], 1), 1)
    return any(on_threads(lambda first: bool(np.isinf(x[first : first + step]).any()), range(0, len(x), step)))


def distinct_labels(labels: Array) -> Array:
    """`np.unique`."""
    if labels.dtype.kind not in "biuf" or len(labels) <= LABELS:
        return np.unique(labels)
    firsts = range(0, len(labels), LABELS)
    return np.unique(np.concatenate(on_threads(lambda first: np.unique(labels[first : first + LABELS]), firsts)))


def places_among(classes: Array, labels: Array) -> Array:
    """The place of each label in the sorted classes, as float32, which is exact: a class is a small number."""
    places = np.empty(len(labels), np.float32)

    def find(first: int) -> None:
        places[first : first + LABELS] = np.searchsorted(classes, labels[first : first + LABELS])

    on_threads(find, range(0, len(labels), LABELS))
    return places
