"""`DaskBoostedTreesClassifier` and `DaskBoostedTreesRegressor`: scikit-learn's conventions on dask collections.

A fit is that of the plain estimator on all rows, in the collection's order, to the bit, for any number of workers and
partitions. Predictions of a collection are lazy dask arrays; those of anything else are the plain estimator's.
"""

from __future__ import annotations

from typing import Any, Self

import dask
import dask.array
import numpy as np
from sklearn.utils.validation import check_is_fitted  # type: ignore[import-untyped]

from bitplan.trees.checks import number
from bitplan.trees.dask.cluster import fit_on_cluster
from bitplan.trees.dask.on_worker import predict_part
from bitplan.trees.estimators import BoostedTreesClassifier, BoostedTreesRegressor


class _OnDask:
    """What both share: `client` is a distributed.Client, None the current one; `timeout_s` as of `fit_distributed`."""

    _plain: type[BoostedTreesClassifier | BoostedTreesRegressor]

    def __init__(self, *, client: Any = None, timeout_s: float = 300.0, **settings: Any) -> None:
        super().__init__(**settings)  # the plain estimator's own
        self.client, self.timeout_s = client, timeout_s

    @classmethod
    def _get_param_names(cls) -> list[str]:
        """scikit-learn's: the plain estimator's settings. A client cannot be copied, nor written to a file."""
        names: list[str] = cls._plain._get_param_names()
        return names

    def __getstate__(self) -> dict[str, Any]:
        state: Any = super().__getstate__()
        return {**state, "client": None}

    def fit(self, X: Any, y: Any, sample_weight: Any = None, eval_set: Any = None) -> Self:
        """Fit to dask collections, as many partitions of each; Ctrl-C leaves the rounds that were complete."""
        limit = number("timeout_s", self.timeout_s, 0, above=True)
        fit_on_cluster(self._unfitted(), X, y, sample_weight, eval_set, self.client, limit, self._take)
        return self

    def _unfitted(self) -> Any:
        here: Any = self
        return self._plain(**here.get_params())

    def _take(self, fitted: Any) -> None:
        """Everything that `fit` leaves in an estimator."""
        for name, value in vars(fitted).items():
            if name.endswith("_"):
                setattr(self, name, value)

    def to_local(self) -> BoostedTreesClassifier | BoostedTreesRegressor:
        """The plain estimator, fitted as this one is."""
        model: BoostedTreesClassifier | BoostedTreesRegressor = self._unfitted()
        for name, value in vars(self).items():
            if name.endswith("_"):
                setattr(model, name, value)
        return model

    def _predict_contributions(self, x: Any) -> Any:
        booster = self.to_local().booster_
        return self._predict("_contributions", x, np.dtype(np.float64), (booster.features + 1) * booster.outputs)

    def _predict(self, method: str, x: Any, dtype: Any, columns: int = 0) -> Any:
        """By partition, when it is computed; `columns` 0: a number for each row."""
        model = self.to_local()
        if not dask.is_dask_collection(x):
            return getattr(model, method)(x)
        shipped = dask.delayed(model, traverse=False)
        sizes: tuple[Any, ...]
        if isinstance(x, dask.array.Array):
            x = x.rechunk({1: -1})
            parts, sizes = x.to_delayed()[:, 0], x.chunks[0]
        else:
            parts = x.to_delayed()
            sizes = (np.nan,) * len(parts)
        run = dask.delayed(predict_part)
        pieces = [
            dask.array.from_delayed(
                run(shipped, method, part, dtype, columns), (rows, columns) if columns else (rows,), dtype
            )
            for part, rows in zip(parts, sizes, strict=True)
        ]
        return dask.array.concatenate(pieces, allow_unknown_chunksizes=True)


class DaskBoostedTreesClassifier(_OnDask, BoostedTreesClassifier):  # type: ignore[misc]
    """Boosted trees for two or more classes, on a Dask cluster."""

    _plain = BoostedTreesClassifier

    def predict(self, X: Any, *, contributions: bool = False) -> Any:
        """The likeliest class of each row; or what each feature adds to the raw scores (`contributions`)."""
        if contributions:
            return self._predict_contributions(X)
        check_is_fitted(self)
        return self._predict("predict", X, self.classes_.dtype)

    def predict_proba(self, X: Any) -> Any:
        """(rows, classes), rows sum to 1."""
        check_is_fitted(self)
        return self._predict("predict_proba", X, np.dtype(np.float64), len(self.classes_))

    def decision_function(self, X: Any) -> Any:
        """Raw scores: (rows,) for two classes, else (rows, classes)."""
        check_is_fitted(self)
        classes = len(self.classes_)
        return self._predict("decision_function", X, np.dtype(np.float64), 0 if classes == 2 else classes)


class DaskBoostedTreesRegressor(_OnDask, BoostedTreesRegressor):  # type: ignore[misc]
    """Boosted trees for numbers, on a Dask cluster."""

    _plain = BoostedTreesRegressor

    def predict(self, X: Any, *, contributions: bool = False) -> Any:
        """A number for each row, raw scores for a custom objective; or what each feature adds (`contributions`)."""
        if contributions:
            return self._predict_contributions(X)
        return self._predict("predict", X, np.dtype(np.float64))
