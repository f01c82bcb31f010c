"""`BoostedTreesClassifier` and `BoostedTreesRegressor`: scikit-learn's conventions over `boost`.

`class_weights` multiplies weights of classes into those of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from bitplan.base.loops.jit import use_threads
from bitplan.trees.boost import EvalSet, Rows
from bitplan.trees.budget import fit_in_seconds, start_of
from bitplan.trees.checks import first_scores_of, number, one_of, targets_of, weights_of
from bitplan.trees.continuing import Initial
from bitplan.trees.distributed.agreement import merge_classes
from bitplan.trees.distributed.shards import ALONE, Shards
from bitplan.trees.estimator_base import BoostedTreesBase, FitOptions, hints_for_others, leaves_model_if_refused
from bitplan.trees.gradients import Array, TreesError
from bitplan.trees.objectives import OBJECTIVES, Binary, Custom, CustomOfClasses, Multiclass, Objective, Several
from bitplan.trees.scikit import ClassifierMixin, RegressorMixin, check_classification_targets
from bitplan.trees.tables import plain
from bitplan.trees.threads import distinct_labels, places_among, threads_of

# ---- class weights ---------------------------------------------------------------------------------------------------


def class_weights(
    weight_by_class: Any, scale_pos_weight: Any, classes: Array, class_numbers: Array, weights: Array, shards: Shards
) -> Array:
    """A weight for each row; `class_numbers` are those of the rows' classes, `weights` the rows' own, or none."""
    if weight_by_class is None and scale_pos_weight is None:
        return weights
    class_numbers = class_numbers.astype(np.int64)
    by_class = _by_class(weight_by_class, classes, class_numbers, shards)
    if scale_pos_weight is not None:
        if len(classes) != 2:
            raise TreesError(
                f"scale_pos_weight: expected None for {len(classes)} classes, as it weighs the second of two; use "
                "class_weight"
            )
        by_class[1] *= number("scale_pos_weight", scale_pos_weight, 0, above=True)
    of_rows: Array = by_class[class_numbers]
    return of_rows * weights if len(weights) else of_rows


def _by_class(weight_by_class: Any, classes: Array, class_numbers: Array, shards: Shards) -> Array:
    if weight_by_class is None:
        return np.ones(len(classes))
    if isinstance(weight_by_class, str) and weight_by_class == "balanced":
        counts = shards.add(np.bincount(class_numbers, minlength=len(classes)), "rows of each class")
        balanced: Array = counts.sum() / (len(classes) * np.maximum(counts, 1))
        return balanced
    if not isinstance(weight_by_class, Mapping):
        raise TreesError(f"class_weight: expected None, 'balanced' or a weight by class, got {weight_by_class!r:.60}")
    labels = classes.tolist()
    unknown = [label for label in weight_by_class if label not in labels]
    if unknown:
        raise TreesError(f"class_weight: {unknown[0]!r:.40} is not among the classes of y, {labels[:5]}; name these")
    return np.array([number("class_weight", weight_by_class.get(label, 1.0), 0) for label in labels])


# ---- estimators ------------------------------------------------------------------------------------------------------


class _FitToTargets(BoostedTreesBase):
    """What classifier and regressor share: `fit`, in one process or several."""

    @hints_for_others
    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        eval_set: Any = None,
        *,
        eval_sample_weight: Any = None,
        eval_metric: Any = None,
        callbacks: Any = None,
        init_model: Any = None,
        init_score: Any = None,
        eval_init_score: Any = None,
        seconds: float | None = None,
        memory: int | str | None = None,
    ) -> Self:
        """Fit; with `early_stopping_rounds`, `eval_set` ((X, y), or the last of a list) is watched, or else a share of
        the rows. `init_model` is a model to train further, ours or LightGBM's.

        `init_score` are raw scores of the rows that trees are added to (another model's, the logarithm of an exposure),
        `eval_init_score` those of `eval_set`. Predictions are without them: add them to raw scores.

        `seconds` is a time for the whole fit: settings that have their defaults are searched in part of it, by the loss
        on `eval_set` or on rows held out, and the best are in `search_["settings"]`: a plain fit with these gives the
        same trees. `memory` (bytes, or "2GB") limits what the search and the fit take beside the table.
        """
        options = FitOptions(
            eval_sample_weight, eval_metric, callbacks, init_model, init_score, eval_init_score, seconds, memory
        )
        return self._fit(X, y, sample_weight, eval_set, ALONE, options)

    @leaves_model_if_refused
    def _fit(
        self, X: Any, y: Any, sample_weight: Any, eval_set: Any, shards: Shards, options: FitOptions | None = None
    ) -> Self:
        options = options or FitOptions()
        started = start_of(options)
        initial = self._initial(options)
        with use_threads(threads_of(self.n_jobs)):
            x, targets = self._read_both(X, y, initial, shards)
            x = self._agree(x, targets, sample_weight, eval_set, options, initial, shards)
            rows = self._rows(x, targets, sample_weight, shards)
        self.objective_ = objective = self._new_objective()
        first = first_scores_of(options.init_score, len(rows.x), objective.outputs, "init_score")
        if first is not None and initial is not None:
            raise TreesError("init_score: a model that is trained further has scores of its own; give one of the two")
        rows = replace(rows, first_scores=first)
        watched = self._eval_sets(objective, eval_set, options, shards)
        if hasattr(self, "search_"):
            del self.search_
        if started is not None:
            self._search(rows, objective, watched, options, initial, started)
            return self
        self._boost(rows, objective, watched, options, initial, shards)
        return self

    def _search(
        self,
        rows: Rows,
        objective: Objective,
        watched: Sequence[EvalSet],
        options: FitOptions,
        initial: Initial | None,
        started: float,
    ) -> None:
        if initial is not None or not isinstance(rows.x, np.ndarray):
            raise TreesError("seconds: settings are searched for a new model, and X in memory; leave seconds out")
        if isinstance(objective, Custom) and options.eval_metric is None:
            raise TreesError("seconds: a custom objective has no loss to search by; give eval_metric")
        self._settings(rows.x.shape[1])  # refuses what is wrong before the search
        fit_in_seconds(self, rows, objective, watched, options, started)

    def _rows(self, x: Array, targets: Array, sample_weight: Any, shards: Shards) -> Rows:
        """The rows with their targets and weights as the objective takes them."""
        raise NotImplementedError

    def _objective(self) -> Objective:
        """The objective of `fit`, whatever the settings are by now; of a model that was read, that of its settings."""
        fitted: Objective = vars(self).get("objective_") or self._new_objective()
        return fitted

    def _new_objective(self) -> Objective:
        raise NotImplementedError

    def _refuse_changed(self) -> None:
        now, fitted = self._new_objective(), self._objective()
        if (now.name, now.outputs) != (fitted.name, fitted.outputs):
            raise TreesError(
                f"objective, alpha: were set to {now.name} with {now.outputs} scores a row after a fit by "
                f"{fitted.name} with {fitted.outputs}, and a file holds the settings; set them back, or fit again"
            )


@dataclass(kw_only=True, eq=False, repr=False)
class BoostedTreesClassifier(ClassifierMixin, _FitToTargets):  # type: ignore[misc]
    """Boosted trees for two or more classes.

    objective   None, or a function of (y, scores) that returns gradients and hessians: y has the places of the classes
                in `classes_`, scores a number for each row, or of more than two classes (rows, classes)
    """

    file_kind = "classifier"
    objective: Any = None
    class_weight: Any = None
    scale_pos_weight: float | None = None

    def _read_both(self, x: Any, y: Any, initial: Initial | None, shards: Shards) -> tuple[Array, Array]:
        table, labels = super()._read_both(x, y, initial, shards)
        if len(labels):
            # scikit-learn sorts what it gets, and warns of labels that are nearly all different.
            few = distinct_labels(labels)
            check_classification_targets(labels if 2 * len(few) >= len(labels) else np.repeat(few, 3))
        return table, labels

    def _rows(self, x: Array, labels: Array, sample_weight: Any, shards: Shards) -> Rows:
        self.classes_ = merge_classes(distinct_labels(labels), shards)
        if len(self.classes_) < 2:
            raise TreesError(
                f"y: a classifier needs at least two classes, and these {len(labels)} labels have only one class, "
                f"{self.classes_.tolist()[0]!r}; check how the labels were selected"
            )
        class_numbers = places_among(self.classes_, labels)
        weights = weights_of(sample_weight, x, shards)
        weights = class_weights(self.class_weight, self.scale_pos_weight, self.classes_, class_numbers, weights, shards)
        return Rows(x, class_numbers, weights)

    def _targets(self, y: Array) -> Array:
        unknown = ~np.isin(y, self.classes_)
        if unknown.any():
            raise TreesError(
                f"y: label {y[unknown].tolist()[0]!r} is not among the classes of fit's y, {self.classes_[:5].tolist()}"
            )
        return np.searchsorted(self.classes_, y).astype(np.float64)

    def _new_objective(self) -> Objective:
        plain = Binary() if len(self.classes_) == 2 else Multiclass(len(self.classes_))
        return plain if self._refuse_named() is None else CustomOfClasses(self.objective, plain)

    def _refuse_named(self) -> Any:
        if self.objective is not None and not callable(self.objective):
            raise TreesError(
                "objective: a classifier's follows from its classes; expected None or a function of (y, scores), got "
                f"{self.objective!r:.60}"
            )
        return self.objective

    def _check_parameters(self, features: int) -> None:
        super()._check_parameters(features)
        self._refuse_named()

    def decision_function(self, X: Any) -> Array:
        """Raw scores: (rows,) for two classes, else (rows, classes)."""
        return self._decision(self._scores(X))

    @hints_for_others
    def predict_proba(self, X: Any) -> Array:
        """The probability of each class, (rows, classes); rows sum to 1."""
        return self._proba(self._scores(X))

    @hints_for_others
    def predict(self, X: Any, *, contributions: bool = False) -> Array:
        """The likeliest class of each row; or what each feature adds to the raw scores (`contributions`)."""
        return self._contributions(X) if contributions else self._labels(self._scores(X))

    def staged_decision_function(self, X: Any) -> Iterator[Array]:
        """`decision_function` after each round."""
        return map(self._decision, self._staged_scores(X))

    def staged_predict_proba(self, X: Any) -> Iterator[Array]:
        """`predict_proba` after each round."""
        return map(self._proba, self._staged_scores(X))

    def staged_predict(self, X: Any) -> Iterator[Array]:
        """`predict` after each round."""
        return map(self._labels, self._staged_scores(X))

    def _decision(self, scores: Array) -> Array:
        return scores[:, 0] if len(self.classes_) == 2 else scores

    def _proba(self, scores: Array) -> Array:
        means = self._objective().mean(scores)
        return np.column_stack([1 - means, means]) if len(self.classes_) == 2 else means

    def _labels(self, scores: Array) -> Array:
        raw = self._decision(scores)
        labels: Array = self.classes_[(raw > 0).astype(np.int64) if raw.ndim == 1 else raw.argmax(axis=1)]
        return labels


@dataclass(kw_only=True, eq=False, repr=False)
class BoostedTreesRegressor(RegressorMixin, _FitToTargets):  # type: ignore[misc]
    """Boosted trees for numbers.

    objective      squared_error, absolute_error, poisson, quantile, huber, gamma, tweedie, or a function of (y, scores)
    alpha          which quantile, or a list of them; or from which error on `huber` counts absolute errors
    tweedie_power  from 1 (counts) to 2 (gamma)

    y may have several columns: a round has a tree for each, and predictions are (rows, targets), as those of several
    quantiles are (rows, quantiles). The trees of each are those of a fit to it alone, where columns are not sampled
    and rounding is to nearest.
    """

    file_kind = "regressor"
    objective: Any = "squared_error"
    alpha: float | Sequence[float] = 0.9
    tweedie_power: float = 1.5

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = self.objective == "gamma"
        tags.target_tags.multi_output = True
        return tags

    def _takes_several(self, y: Any) -> bool:
        try:
            shape = y.shape if hasattr(y, "shape") else np.asarray(y).shape
        except ValueError:  # rows of different lengths, which scikit-learn refuses
            return False
        return len(shape) == 2 and shape[1] > 1

    def _rows(self, x: Array, targets: Array, sample_weight: Any, shards: Shards) -> Rows:
        self.n_outputs_ = targets.shape[1] if targets.ndim == 2 else 1
        return Rows(x, targets_of(targets), weights_of(sample_weight, x, shards))

    def _targets(self, y: Array) -> Array:
        return targets_of(y)

    @hints_for_others
    def predict(self, X: Any, *, contributions: bool = False) -> Array:
        """Numbers for each row (custom objective: raw scores), or each feature's `contributions` to them."""
        return self._contributions(X) if contributions else self._objective().mean(self._scores(X))

    def staged_predict(self, X: Any) -> Iterator[Array]:
        """`predict` after each round."""
        return map(self._objective().mean, self._staged_scores(X))

    def _new_objective(self) -> Objective:
        if callable(self.objective):
            return Custom(self.objective, self.n_outputs_)
        make = OBJECTIVES[one_of("objective", self.objective, tuple(OBJECTIVES))]
        power = number("tweedie_power", self.tweedie_power, 1, 2, above=True)
        if power == 2:
            raise TreesError("tweedie_power: expected a number above 1 and below 2, got 2; use objective='gamma'")
        if np.ndim(self.alpha) == 0:
            alpha = self._alpha(self.alpha)
            return make(alpha, power) if self.n_outputs_ == 1 else Several([make(alpha, power)] * self.n_outputs_)
        alphas = [self._alpha(plain(alpha)) for alpha in np.ravel(np.asarray(self.alpha, dtype=object))]
        if self.objective != "quantile" or not alphas or self.n_outputs_ > 1:
            raise TreesError(
                f"alpha: a list is for objective='quantile' and one target, got {self.alpha!r:.60} for "
                f"{self.objective!r:.40} and {self.n_outputs_} targets; give one number"
            )
        return Several([make(alpha, power) for alpha in alphas])

    def _alpha(self, value: Any) -> float:
        alpha = number("alpha", value, 0, 1 if self.objective == "quantile" else math.inf, above=True)
        if alpha == 1 and self.objective == "quantile":
            raise TreesError("alpha: a quantile is above 0 and below 1, got 1; give alpha=0.9, say")
        return alpha

    def _check_parameters(self, features: int) -> None:
        super()._check_parameters(features)
        self._new_objective()
