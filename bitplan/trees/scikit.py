"""What the estimators use of scikit-learn, imported without what it imports and these parts never call.

Its base imports pandas and the modules of POSTPONED, for functions that no estimator of ours reaches: two thirds of its
time. Here those are imported when their first attribute is read, by anyone, and scikit-learn does not see pandas while
this module is imported: it looks for frames among the modules that are loaded, whenever it gets a table.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

POSTPONED = "scipy.stats", "scipy.special", "numpy.f2py", "numpy.testing"


class _Postponing:
    """An import finder that puts off some imports in this thread alone; other threads import as ever."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(self, name: str, path: Any = None, _target: Any = None) -> ModuleSpec | None:
        if threading.get_ident() != self._thread or name not in ("pandas", *POSTPONED):
            return None
        if name == "pandas":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec


@contextmanager
def _postponing() -> Iterator[None]:
    finder = _Postponing()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


with _postponing():
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, clone  # type: ignore[import-untyped]
    from sklearn.utils import check_array, check_consistent_length, column_or_1d  # type: ignore[import-untyped]
    from sklearn.utils.multiclass import (  # type: ignore[import-untyped]
        check_classification_targets,
        type_of_target,
    )
    from sklearn.utils.validation import check_is_fitted, validate_data  # type: ignore[import-untyped]

__all__ = [
    "BaseEstimator",
    "ClassifierMixin",
    "RegressorMixin",
    "check_array",
    "check_classification_targets",
    "check_consistent_length",
    "check_is_fitted",
    "clone",
    "column_or_1d",
    "type_of_target",
    "validate_data",
]
