"""What every fitted estimator offers: importances, rounds, stages of its predictions, files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator  # type: ignore[import-untyped]
from sklearn.utils.validation import check_is_fitted  # type: ignore[import-untyped]

from bitplan.kernels.base.jit import use_threads
from bitplan.trees.boost import Booster
from bitplan.trees.checks import one_of
from bitplan.trees.files.lightgbm_text import to_lightgbm_text
from bitplan.trees.files.save import save_trees
from bitplan.trees.gradients import Array
from bitplan.trees.models.contributions import contributions
from bitplan.trees.objectives import Objective
from bitplan.trees.threads import threads_for, threads_of
from bitplan.trees.tree import Forest

IMPORTANCES = ("gain", "split")


class FittedTrees(BaseEstimator):  # type: ignore[misc]
    """Shared by all estimators; they say how a table is read."""

    file_kind: str  # what a file calls the estimator
    booster_: Booster
    n_features_in_: int
    classes_: Array  # a classifier's
    categories_: dict[int, list[Any]]  # by the place of a feature: what its numbers stand for
    importance_type: str
    n_jobs: int | None

    def _read(self, x: Any) -> Array:
        raise NotImplementedError

    def _is_plain(self, x: Any) -> bool:
        raise NotImplementedError

    def _objective(self) -> Objective:
        raise NotImplementedError

    @property
    def feature_importances_(self) -> Array:
        """Each feature's share of the gain of all splits, or of their number (`importance_type`)."""
        check_is_fitted(self)
        total = self.booster_.importances(one_of("importance_type", self.importance_type, IMPORTANCES))
        return total / total.sum() if total.any() else total

    @property
    def n_iter_(self) -> int:
        """Rounds in the model, after early stopping."""
        check_is_fitted(self)
        return self.booster_.rounds

    @property
    def best_iteration_(self) -> int | None:
        """Rounds that the model had when what is watched was best; None if nothing was watched."""
        check_is_fitted(self)
        return self.booster_.best_rounds

    @property
    def evals_result_(self) -> dict[str, dict[str, list[float]]]:
        """A list for each metric of each watched set, one number a round: {"valid_0": {"binary": [...]}}. Files do
        not hold them."""
        check_is_fitted(self)
        return self.booster_.evals

    def save(self, path: str | Path) -> None:
        """Write the model as JSON, atomically."""
        save_trees(self, path)

    def to_lightgbm(self) -> str:
        """The model in LightGBM's text format: `lightgbm.Booster(model_str=...)` predicts the same."""
        check_is_fitted(self)
        return to_lightgbm_text(self)

    def _scores(self, x: Any) -> Array:
        """Raw scores (rows, outputs)."""
        if "booster_" not in vars(self):  # scikit-learn's own look takes as long as the trees of one row
            check_is_fitted(self)
        booster = self.booster_
        # The loops look at the numbers of a plain array, too: another look takes longer than many threads do.
        is_plain = bool(booster.trees) and self._is_plain(x)
        table = x if is_plain else self._read(x)
        parts = booster.forest().parts(len(table))
        scores, has_infinity = booster.scores_checked(table, min(parts, threads_for(self.n_jobs, parts)))
        if is_plain and has_infinity:
            self._read(x)  # refuses it
        return scores

    def _contributions(self, x: Any) -> Array:
        check_is_fitted(self)
        with use_threads(threads_of(self.n_jobs)):
            return contributions(self.booster_, np.asarray(self._read(x)))

    def _staged_scores(self, x: Any) -> Iterator[Array]:
        """Raw scores after each round; the last are those of the whole model, to the bit."""
        check_is_fitted(self)
        booster, table = self.booster_, np.asarray(self._read(x))
        scores = np.tile(booster.start, (len(table), 1))
        for first in range(0, len(booster.trees), booster.outputs):
            with use_threads(threads_of(self.n_jobs)):
                Forest.of(booster.trees[first : first + booster.outputs], booster.outputs).add_to(scores, table)
            yield scores.copy()
