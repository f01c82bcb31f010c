"""Training further from a model that exists: ours, or LightGBM's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sklearn.utils.validation import check_is_fitted  # type: ignore[import-untyped]

from bitplan.trees.boost import Booster
from bitplan.trees.files.lightgbm_read import lightgbm_text_of, read_lightgbm_text
from bitplan.trees.gradients import TreesError
from bitplan.trees.models.fitted import FittedTrees
from bitplan.trees.objectives import Objective


@dataclass(frozen=True)
class Initial:
    """Trees to begin with, the name of their objective, and what the numbers of categories stand for."""

    booster: Booster
    objective: str
    categories: dict[int, list[Any]]
    is_own: bool  # the estimator's own (`warm_start`)

    def check(self, objective: Objective, features: int) -> None:
        """Refuse a model of another objective, or of other features."""
        theirs = self.objective, self.booster.outputs, self.booster.features
        ours = objective.name, objective.outputs, features
        if theirs != ours:
            raise TreesError(
                "{}: has objective {}, {} scores a row and {} features, expected {}, {} and {}; fit a new model".format(
                    "warm_start" if self.is_own else "init_model", *theirs, *ours
                )
            )

    def rounds_left(self, rounds: int) -> int:
        if rounds < self.booster.rounds:
            raise TreesError(
                f"n_estimators: with warm_start expected at least the {self.booster.rounds} rounds that the model has, "
                f"got {rounds}"
            )
        return rounds - self.booster.rounds


def initial_of(model: Any, *, is_own: bool) -> Initial | None:
    """None: there is nothing to begin with."""
    if model is None:
        return None
    if isinstance(model, FittedTrees):
        check_is_fitted(model)
        return Initial(model.booster_, model._objective().name, model.categories_, is_own)
    read = read_lightgbm_text(*lightgbm_text_of(model))
    return Initial(read.booster, read.objective, read.categories, is_own)
