"""Training further from a model that exists: ours, or LightGBM's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bitplan.trees.categories import Known
from bitplan.trees.fitted import FittedTrees
from bitplan.trees.gradients import Array, TreesError
from bitplan.trees.lightgbm_read import lightgbm_classes_of, lightgbm_text_of, read_lightgbm_text
from bitplan.trees.objectives import Objective
from bitplan.trees.scikit import check_is_fitted
from bitplan.trees.tree import Booster


@dataclass(frozen=True)
class Initial:
    """A model whose training goes on: its trees, its objective, and what its numbers of categories stand for.

    names, classes  None where the model does not say: LightGBM's text has no classes
    """

    booster: Booster
    objective: str
    categories: dict[int, list[Any]]
    is_own: bool  # the estimator's own (`warm_start`)
    names: list[str] | None = None
    classes: list[Any] | None = None

    @property
    def where(self) -> str:
        return "warm_start" if self.is_own else "init_model"

    def check_names(self, names: Sequence[Any]) -> None:
        """Refuse a model whose columns are others than those of this fit."""
        ours = [str(name).replace(" ", "_") for name in names]  # as LightGBM writes them
        if self.names is not None and ours and [name.replace(" ", "_") for name in self.names] != ours:
            raise TreesError(
                f"{self.where}: its features are {self.names!r:.120}, expected {list(names)!r:.120} in this order; "
                "give the columns as they were"
            )

    def check_meaning(self, classes: Array | None, categories: Known) -> None:
        """Refuse a model whose categories or classes mean something else than those of this fit."""
        if self.classes is not None and classes is not None and self.classes != classes.tolist():
            raise TreesError(
                f"{self.where}: its classes are {self.classes!r:.80}, expected those of y, {classes.tolist()!r:.80}; "
                "fit a new model"
            )
        if new := sorted(set(categories) - set(self.categories)):
            raise TreesError(
                f"{self.where}: features {new!r:.80} have categories here and numbers in the model; "
                "give the columns as they were"
            )

    def check(self, objective: Objective, features: int) -> None:
        """Refuse a model of another objective, or of other features."""
        theirs = self.objective, self.booster.outputs, self.booster.features
        ours = objective.name, objective.outputs, features
        if theirs != ours:
            raise TreesError(
                "{}: has objective {}, {} scores a row and {} features, expected {}, {} and {}; fit a new model".format(
                    self.where, *theirs, *ours
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
    """The model to train further (ours or LightGBM's) in one form; None where there is none."""
    if model is None:
        return None
    if isinstance(model, FittedTrees):
        check_is_fitted(model)
        names, classes = getattr(model, "feature_names_in_", None), getattr(model, "classes_", None)
        return Initial(
            model.booster_,
            model._objective().name,
            model.categories_,
            is_own,
            None if names is None else [str(name) for name in names],
            None if classes is None else classes.tolist(),
        )
    read = read_lightgbm_text(*lightgbm_text_of(model))
    classes = lightgbm_classes_of(model)
    return Initial(
        read.booster,
        read.objective,
        read.categories,
        is_own,
        read.feature_names,
        None if classes is None else classes.tolist(),
    )
