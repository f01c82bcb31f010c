"""`n_jobs`: how many threads a fit or a prediction may use. It changes no result.

Looks at all of a large array by all threads: numpy and scikit-learn would take longer for it than trees do.
"""

from __future__ import annotations

import functools
import numbers
import os
from typing import Any

import numpy as np

from bitplan.base.loops.jit import on_threads
from bitplan.trees.gradients import TreesError

# ---- large arrays ----------------------------------------------------------------------------------------------------


Array = np.ndarray[Any, Any]
NUMBERS = 2**20  # of a table, at once
LABELS = 2**17


def is_large_table(x: Any) -> bool:
    """Whether x is a large array of numbers that scikit-learn takes as it is."""
    return type(x) is np.ndarray and x.dtype in (np.float32, np.float64) and x.ndim == 2 and x.size > NUMBERS


def has_infinity(x: Array) -> bool:
    """Whether a number of the table (rows, features) is infinite."""
    step = max(NUMBERS // max(x.shape[1], 1), 1)
    return any(on_threads(lambda first: bool(np.isinf(x[first : first + step]).any()), range(0, len(x), step)))


def distinct_labels(labels: Array) -> Array:
    """The distinct labels, as `np.unique` gives them."""
    if labels.dtype.kind not in "biuf" or len(labels) <= LABELS:
        return np.unique(labels)
    firsts = range(0, len(labels), LABELS)
    return np.unique(np.concatenate(on_threads(lambda first: np.unique(labels[first : first + LABELS]), firsts)))


def places_among(classes: Array, labels: Array) -> Array:
    """The place of each label in the sorted classes, as float32, which is exact: a class is a small number."""
    positions = np.empty(len(labels), np.float32)

    def find(first: int) -> None:
        positions[first : first + LABELS] = np.searchsorted(classes, labels[first : first + LABELS])

    on_threads(find, range(0, len(labels), LABELS))
    return positions


# ---- threads ---------------------------------------------------------------------------------------------------------


# OpenMP's and numba's own limits; joblib sets both in its workers (`inner_max_num_threads`).
LIMITS = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")


def threads_of(n_jobs: Any) -> int:
    """None and -1: every core that this process may use; -2: one fewer, and so on; a positive number: itself."""
    if n_jobs is None:
        return allowed_cores()
    if not isinstance(n_jobs, numbers.Integral) or isinstance(n_jobs, bool) or n_jobs == 0:
        raise TreesError(
            f"n_jobs: expected None, a whole number of threads, or a negative one (-1: every core, -2: one fewer), "
            f"got {n_jobs!r:.40}"
        )
    count = int(n_jobs)
    return count if count > 0 else max(allowed_cores() + 1 + count, 1)


def threads_for(n_jobs: Any, parts: int) -> int:
    """`threads_of`, but 1 for one part of work: to ask for the cores takes longer than to predict a row."""
    is_plain = n_jobs is None or (type(n_jobs) is int and n_jobs != 0)
    return 1 if parts <= 1 and is_plain else threads_of(n_jobs)


def allowed_cores() -> int:
    """The cores that affinity, the container, joblib and the usual variables leave to this process."""
    limits = (os.environ.get(name, "").split(",")[0].strip() for name in LIMITS)  # OpenMP's may be a list by level
    affinity = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
    cores = _joblib_cores(affinity, os.environ.get("LOKY_MAX_CPU_COUNT"))
    return min([cores, *(int(text) for text in limits if text.isdecimal() and int(text) > 0)])


@functools.lru_cache(maxsize=8)
def _joblib_cores(_affinity: frozenset[int], _limit: str | None) -> int:
    """The cores that joblib counts, remembered as long as what may change them is the same: it reads files to count."""
    import joblib  # type: ignore[import-untyped]  # comes with scikit-learn

    return int(joblib.cpu_count())
