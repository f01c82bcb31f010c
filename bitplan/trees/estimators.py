"""`BoostedTreesClassifier` and `BoostedTreesRegressor`: scikit-learn's conventions over `boost`.

Parameters are checked when `fit` is called, by name; fitted state ends in an underscore. `n_jobs` says how many threads
`fit` and predictions use, and changes no result.
"""

from __future__ import annotations

import numbers
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin  # type: ignore[import-untyped]
from sklearn.utils.multiclass import check_classification_targets  # type: ignore[import-untyped]
from sklearn.utils.validation import check_is_fitted, validate_data  # type: ignore[import-untyped]

from bitplan.errors import did_you_mean
from bitplan.kernels.base.jit import use_threads
from bitplan.trees.boost import Booster, BoostSettings, Rows, boost
from bitplan.trees.checks import (
    number,
    one_of,
    pieces_of,
    refuse_text,
    seed_of,
    split_rows,
    targets_of,
    truth,
    weights_of,
    whole_number,
    with_weight,
)
from bitplan.trees.distributed.agreement import agree, merge_classes
from bitplan.trees.distributed.shards import ALONE, Shards, Span, gather_numbers
from bitplan.trees.files.lightgbm_text import to_lightgbm_text
from bitplan.trees.files.pieces import TablePieces
from bitplan.trees.files.save import save_trees
from bitplan.trees.gradients import Array, GradientPrecision, TreesError
from bitplan.trees.grow import GrowthRules
from bitplan.trees.objectives import OBJECTIVES, Binary, Custom, Multiclass, Objective
from bitplan.trees.progress import round_bar
from bitplan.trees.threads import threads_of
from bitplan.version import __version__


class _BoostedTrees(BaseEstimator):  # type: ignore[misc]
    """What classifier and regressor share."""

    booster_: Booster
    n_features_in_: int

    def __init__(
        self,
        *,
        n_estimators: int = 100,
        learning_rate: float = 0.1,
        max_leaves: int = 31,
        max_depth: int | None = None,
        growth: str = "leaf",
        max_bins: int = 255,
        l1: float = 0.0,
        l2: float = 0.0,
        min_child_weight: float = 1e-3,
        min_child_samples: int = 20,
        min_split_gain: float = 0.0,
        subsample: float = 1.0,
        colsample: float = 1.0,
        monotone_constraints: Any = None,
        categorical_features: Any = None,
        gradient_precision: GradientPrecision | str = "f32",
        stochastic_rounding: bool | None = None,
        renew_leaves: bool | None = None,
        early_stopping_rounds: int | None = None,
        validation_fraction: float = 0.1,
        random_state: Any = 0,
        n_jobs: int | None = None,
        verbose: bool = False,
    ) -> None:
        self.n_estimators = n_estimators
        self.learning_rate = learning_rate
        self.max_leaves = max_leaves
        self.max_depth = max_depth
        self.growth = growth
        self.max_bins = max_bins
        self.l1 = l1
        self.l2 = l2
        self.min_child_weight = min_child_weight
        self.min_child_samples = min_child_samples
        self.min_split_gain = min_split_gain
        self.subsample = subsample
        self.colsample = colsample
        self.monotone_constraints = monotone_constraints
        self.categorical_features = categorical_features
        self.gradient_precision = gradient_precision
        self.stochastic_rounding = stochastic_rounding
        self.renew_leaves = renew_leaves
        self.early_stopping_rounds = early_stopping_rounds
        self.validation_fraction = validation_fraction
        self.random_state = random_state
        self.n_jobs = n_jobs
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    @property
    def feature_importances_(self) -> Array:
        """Each feature's share of the gain of all splits."""
        check_is_fitted(self)
        return self.booster_.importances()

    @property
    def n_iter_(self) -> int:
        """Rounds in the model, after early stopping."""
        check_is_fitted(self)
        return self.booster_.rounds

    def save(self, path: str | Path) -> None:
        """Write the model as JSON, atomically."""
        save_trees(self, path)

    def to_lightgbm(self) -> str:
        """The model in LightGBM's text format: `lightgbm.Booster(model_str=...)` predicts the same."""
        check_is_fitted(self)
        return to_lightgbm_text(self)

    # ---- fitting -----------------------------------------------------------------------------------------------------

    def _read(self, x: Any, shards: Shards = ALONE) -> Array:
        """Features as at `fit`: the same number, with the same names."""
        table: Array = self._validated(x, shards, reset=False)
        return table

    def _read_both(self, x: Any, y: Any, shards: Shards) -> tuple[Array, Array]:
        pair: tuple[Array, Array] = self._validated(x, shards, y=y)
        return pair

    def _validated(self, x: Any, shards: Shards, **more: Any) -> Any:
        if isinstance(x, TablePieces):
            return pieces_of(self, x, _fewest_rows(shards), **more)
        has_types = hasattr(x, "dtype") or hasattr(x, "dtypes")
        if has_types:  # text that spells a number would pass as one
            refuse_text(x)
        try:
            return validate_data(
                self,
                x,
                dtype=[np.float64, np.float32],
                ensure_all_finite="allow-nan",
                ensure_min_samples=_fewest_rows(shards),
                **more,
            )
        except ValueError:
            if not has_types:
                refuse_text(x)
            raise

    def _agree(self, x: Array, y: Array, sample_weight: Any, eval_set: Any, shards: Shards) -> Array:
        """x in the type that all processes have; refuses settings, features and targets that differ between them."""
        always = {
            "the version of bitplan": __version__,
            "the estimator": type(self).__name__,
            "the number of features": x.shape[1],
            "the names of features": getattr(self, "feature_names_in_", None),
            "eval_set (given or not)": eval_set is not None,
        }
        parameters = self.get_params()
        del parameters["verbose"], parameters["n_jobs"]  # each process may have its own
        always |= {f"parameter {name}": value for name, value in parameters.items()}
        of_rows = {
            "the type of X": str(x.dtype),
            "the type of y": y.dtype.kind,
            "sample_weight (given or not)": sample_weight is not None,
        }
        return x.astype(agree(always, of_rows, len(x), shards)["the type of X"], copy=False)

    def _boost(self, rows: Rows, objective: Objective, validation: Rows | None, shards: Shards) -> None:
        settings = self._settings(rows.x.shape[1])
        drawn = gather_numbers(settings.seed, "seed", shards)
        settings = replace(settings, seed=drawn[0])  # random_state=None draws one in every process
        rows = with_weight(rows)
        if not Span.of(len(rows.x), shards).total:
            raise TreesError("sample_weight: every weight of every process is zero, so there is nothing to fit")
        if settings.patience is not None and validation is None:
            rows, validation = split_rows(rows, self.validation_fraction, settings.seed, shards)
        categorical = self._categorical(rows.x.shape[1])
        if np.any(settings.rules.monotone[categorical]):
            raise TreesError("monotone_constraints: a categorical feature has no order; set its constraint to 0")
        with (
            use_threads(threads_of(self.n_jobs)),
            round_bar(settings.rounds, shown=truth("verbose", self.verbose)) as advance,
        ):
            boost(rows, categorical, objective, settings, validation, advance, self._keep, shards)

    def _scores(self, x: Any) -> Array:
        """Raw scores (rows, outputs)."""
        check_is_fitted(self)
        with use_threads(threads_of(self.n_jobs)):
            return self.booster_.scores(self._read(x))

    def _keep(self, booster: Booster) -> None:
        self.booster_ = booster

    def _settings(self, features: int) -> BoostSettings:
        precision = self._precision()
        quantized = precision is not GradientPrecision.F32
        coarse = precision is GradientPrecision.I8
        rules = GrowthRules(
            max_leaves=whole_number("max_leaves", self.max_leaves, 1),
            max_depth=0 if self.max_depth is None else whole_number("max_depth", self.max_depth, 1),
            best_first=one_of("growth", self.growth, ("leaf", "depth")) == "leaf",
            l1=number("l1", self.l1, 0),
            l2=number("l2", self.l2, 0),
            min_child_weight=number("min_child_weight", self.min_child_weight, 0),
            min_child_rows=whole_number("min_child_samples", self.min_child_samples, 1),
            min_gain=number("min_split_gain", self.min_split_gain, 0),
            monotone=self._monotone(features),
        )
        patience, stochastic = self.early_stopping_rounds, self.stochastic_rounding
        return BoostSettings(
            rules=rules,
            rounds=whole_number("n_estimators", self.n_estimators, 1),
            learning_rate=number("learning_rate", self.learning_rate, 0, above=True),
            max_bins=whole_number("max_bins", self.max_bins, 2, 255),
            precision=precision,
            stochastic=quantized if stochastic is None else truth("stochastic_rounding", stochastic),
            renew_leaves=coarse if self.renew_leaves is None else truth("renew_leaves", self.renew_leaves),
            row_share=number("subsample", self.subsample, 0, 1, above=True),
            column_share=number("colsample", self.colsample, 0, 1, above=True),
            seed=seed_of(self.random_state),
            patience=None if patience is None else whole_number("early_stopping_rounds", patience, 1),
        )

    def _check_parameters(self, features: int) -> None:
        """What `fit` would refuse, whatever the rows."""
        self._settings(features)
        self._categorical(features)
        threads_of(self.n_jobs)
        truth("verbose", self.verbose)
        number("validation_fraction", self.validation_fraction, 0, 1, above=True)

    def _precision(self) -> GradientPrecision:
        if isinstance(self.gradient_precision, GradientPrecision):
            return self.gradient_precision
        known = [precision.value for precision in GradientPrecision]
        return GradientPrecision(one_of("gradient_precision", str(self.gradient_precision).lower(), known))

    def _monotone(self, features: int) -> Array:
        given = self.monotone_constraints
        if given is None:
            return np.zeros(features, np.int64)
        if isinstance(given, dict):
            signs = [0] * features
            for name, sign in given.items():
                signs[self._feature_place("monotone_constraints", name)] = sign
            given = signs
        given = given.tolist() if isinstance(given, np.ndarray) else given
        is_list = isinstance(given, Sequence) and not isinstance(given, str)
        if not is_list or len(given) != features or any(sign not in (-1, 0, 1) for sign in given):
            raise TreesError(
                f"monotone_constraints: expected {features} numbers, one a feature, each -1, 0 or 1, got {given!r:.80}"
            )
        return np.array(given, np.int64)

    def _categorical(self, features: int) -> Array:
        is_category = np.zeros(features, np.bool_)
        given = () if self.categorical_features is None else self.categorical_features
        if isinstance(given, (str, bytes, dict)) or not isinstance(given, Collection):
            raise TreesError(
                "categorical_features: expected a list of names or places, or a flag for each feature, got "
                f"{given!r:.60}"
            )
        if len(given) == features and all(isinstance(flag, (bool, np.bool_)) for flag in given):
            return np.array(given, np.bool_)
        for name in given:
            is_category[self._feature_place("categorical_features", name)] = True
        return is_category

    def _feature_place(self, where: str, name: Any) -> int:
        names = list(getattr(self, "feature_names_in_", ()))
        if name in names:
            return names.index(name)
        if isinstance(name, numbers.Integral) and 0 <= int(name) < self.n_features_in_:
            return int(name)
        hint = did_you_mean(str(name), map(str, names))
        raise TreesError(
            f"{where}: no feature {name!r:.80}; expected a column name, or 0 to {self.n_features_in_ - 1}{hint}"
        )


def _fewest_rows(shards: Shards) -> int:
    return 1 if shards.count == 1 else 0  # a process may have none


class BoostedTreesClassifier(ClassifierMixin, _BoostedTrees):  # type: ignore[misc]
    """Boosted trees for two or more classes."""

    classes_: Array

    def fit(self, X: Any, y: Any, sample_weight: Any = None, eval_set: Any = None) -> Self:
        """Fit; with `early_stopping_rounds`, `eval_set` (X, y) is watched, or else a share of the rows."""
        return self._fit(X, y, sample_weight, eval_set, ALONE)

    def _fit(self, X: Any, y: Any, sample_weight: Any, eval_set: Any, shards: Shards) -> Self:
        x, labels = self._read_both(X, y, shards)
        if len(labels):
            check_classification_targets(labels)
        x = self._agree(x, labels, sample_weight, eval_set, shards)
        self.classes_ = merge_classes(np.unique(labels), shards)
        if len(self.classes_) < 2:
            raise TreesError(
                f"y: a classifier needs at least two classes, and these {len(labels)} labels have only one class, "
                f"{self.classes_[0]!r}; check how the labels were selected"
            )
        objective: Objective = Binary() if len(self.classes_) == 2 else Multiclass(len(self.classes_))
        targets = np.searchsorted(self.classes_, labels).astype(np.float64)
        rows = Rows(x, targets, weights_of(sample_weight, x, shards))
        validation = None
        if eval_set is not None:
            validation_x, validation_y = self._read(eval_set[0], shards), np.asarray(eval_set[1])
            unknown = ~np.isin(validation_y, self.classes_)
            if unknown.any():
                raise TreesError(
                    f"eval_set: label {validation_y[unknown][0]!r} is not among the classes of y, {self.classes_[:5]}"
                )
            validation = Rows(validation_x, np.searchsorted(self.classes_, validation_y).astype(np.float64))
        self._boost(rows, objective, validation, shards)
        return self

    def decision_function(self, X: Any) -> Array:
        """Raw scores: (rows,) for two classes, else (rows, classes)."""
        scores = self._scores(X)
        return scores[:, 0] if len(self.classes_) == 2 else scores

    def predict_proba(self, X: Any) -> Array:
        """(rows, classes), rows sum to 1."""
        scores = self._scores(X)
        if len(self.classes_) == 2:
            second = Binary().mean(scores)
            return np.column_stack([1 - second, second])
        return Multiclass(len(self.classes_)).mean(scores)

    def predict(self, X: Any) -> Array:
        """The likeliest class of each row."""
        raw = self.decision_function(X)
        labels: Array = self.classes_[(raw > 0).astype(np.int64) if raw.ndim == 1 else raw.argmax(axis=1)]
        return labels


class BoostedTreesRegressor(RegressorMixin, _BoostedTrees):  # type: ignore[misc]
    """Boosted trees for numbers: squared_error, absolute_error, poisson, or a function of (y, scores)."""

    def __init__(
        self,
        *,
        objective: Any = "squared_error",
        n_estimators: int = 100,
        learning_rate: float = 0.1,
        max_leaves: int = 31,
        max_depth: int | None = None,
        growth: str = "leaf",
        max_bins: int = 255,
        l1: float = 0.0,
        l2: float = 0.0,
        min_child_weight: float = 1e-3,
        min_child_samples: int = 20,
        min_split_gain: float = 0.0,
        subsample: float = 1.0,
        colsample: float = 1.0,
        monotone_constraints: Any = None,
        categorical_features: Any = None,
        gradient_precision: GradientPrecision | str = "f32",
        stochastic_rounding: bool | None = None,
        renew_leaves: bool | None = None,
        early_stopping_rounds: int | None = None,
        validation_fraction: float = 0.1,
        random_state: Any = 0,
        n_jobs: int | None = None,
        verbose: bool = False,
    ) -> None:
        super().__init__(
            n_estimators=n_estimators,
            learning_rate=learning_rate,
            max_leaves=max_leaves,
            max_depth=max_depth,
            growth=growth,
            max_bins=max_bins,
            l1=l1,
            l2=l2,
            min_child_weight=min_child_weight,
            min_child_samples=min_child_samples,
            min_split_gain=min_split_gain,
            subsample=subsample,
            colsample=colsample,
            monotone_constraints=monotone_constraints,
            categorical_features=categorical_features,
            gradient_precision=gradient_precision,
            stochastic_rounding=stochastic_rounding,
            renew_leaves=renew_leaves,
            early_stopping_rounds=early_stopping_rounds,
            validation_fraction=validation_fraction,
            random_state=random_state,
            n_jobs=n_jobs,
            verbose=verbose,
        )
        self.objective = objective

    def fit(self, X: Any, y: Any, sample_weight: Any = None, eval_set: Any = None) -> Self:
        """Fit; with `early_stopping_rounds`, `eval_set` (X, y) is watched, or else a share of the rows."""
        return self._fit(X, y, sample_weight, eval_set, ALONE)

    def _fit(self, X: Any, y: Any, sample_weight: Any, eval_set: Any, shards: Shards) -> Self:
        x, targets = self._read_both(X, y, shards)
        x = self._agree(x, targets, sample_weight, eval_set, shards)
        objective = self._objective()
        rows = Rows(x, targets_of(targets), weights_of(sample_weight, x, shards))
        validation = None
        if eval_set is not None:
            validation = Rows(self._read(eval_set[0], shards), targets_of(np.asarray(eval_set[1])))
        self._boost(rows, objective, validation, shards)
        return self

    def predict(self, X: Any) -> Array:
        """A number for each row; raw scores for a custom objective."""
        return self._objective().mean(self._scores(X))

    def _objective(self) -> Objective:
        if callable(self.objective):
            return Custom(self.objective)
        return OBJECTIVES[one_of("objective", self.objective, tuple(OBJECTIVES))]()
