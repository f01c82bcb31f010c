"""What the estimators share: settings, how tables are read, how `fit` boosts.

Parameters are checked when `fit` is called, by name; fitted state ends in an underscore. `n_jobs` says how many threads
`fit` and predictions use, `device` where trees grow; neither changes a result.

Callbacks are functions of the user's, called after each round, which may end the fit.

`round_bar` shows rich's progress bar over rounds, on standard error, and only when asked for.

`eval_set`: one pair (X, y), or several of them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar, cast

import numpy as np

from bitplan.base import __version__
from bitplan.base.errors import did_you_mean
from bitplan.base.loops.helper_threads import staying_awake
from bitplan.base.loops.jit import use_threads
from bitplan.trees.boost import DEVICES, BoostSettings, Dropout, EvalSet, Rows, boost, split_rows, with_weight
from bitplan.trees.categories import category_flags, encode, interaction_groups, learn_categories, monotone_signs
from bitplan.trees.checks import (
    first_scores_of,
    naming_set,
    number,
    one_of,
    pieces_of,
    refuse_masked,
    refuse_missing_targets,
    seed_of,
    truth,
    weights_of,
    whole_number,
    with_place,
)
from bitplan.trees.continuing import Initial, initial_of
from bitplan.trees.distributed.agreement import agree
from bitplan.trees.distributed.shards import ALONE, Shards, Span, gather_numbers
from bitplan.trees.fitted import IMPORTANCES, FittedTrees
from bitplan.trees.gradients import Array, GradientPrecision, TreesError
from bitplan.trees.grow import GrowthRules
from bitplan.trees.objectives import Objective, custom_metrics, metrics_of
from bitplan.trees.pieces import TablePieces
from bitplan.trees.scikit import validate_data
from bitplan.trees.tables import dense, names_of, on_host, refuse_text
from bitplan.trees.threads import allowed_cores, has_infinity, is_large_table, threads_of
from bitplan.trees.tree import Booster

# ---- evaluation sets -------------------------------------------------------------------------------------------------


def eval_pairs(
    eval_set: Any, eval_sample_weight: Any = None, eval_init_score: Any = None
) -> list[tuple[Any, Any, Any, Any]]:
    """The watched sets as (X, y, weights, first scores): a list or tuple of tuples, or one pair."""
    more = {"eval_sample_weight": eval_sample_weight, "eval_init_score": eval_init_score}
    if eval_set is None:
        for name, values in more.items():
            if values is not None:
                raise TreesError(f"{name}: there is no eval_set that it is of; give both or neither")
        return []
    is_list = isinstance(eval_set, (list, tuple))
    several = is_list and len(eval_set) > 0 and all(isinstance(pair, tuple) for pair in eval_set)
    pairs = list(eval_set) if several else [eval_set]
    if not is_list or any(len(pair) != 2 for pair in pairs):
        raise TreesError(
            f"eval_set: expected (X, y) or a list of such pairs, got {type(eval_set).__name__} of "
            f"{len(eval_set) if is_list else 'no'} parts"
        )
    weights, scores = (_of_each_set(name, values, len(pairs), several) for name, values in more.items())
    return [(x, y, weight, first) for (x, y), weight, first in zip(pairs, weights, scores, strict=True)]


def _of_each_set(name: str, values: Any, sets: int, several: bool) -> Sequence[Any]:
    if values is None:
        return [None] * sets
    if not several:
        return [values]
    if not isinstance(values, (list, tuple)) or len(values) != sets:
        raise TreesError(f"{name}: expected a list with those of each of {sets} sets, or None")
    return values


# ---- progress --------------------------------------------------------------------------------------------------------


@contextmanager
def round_bar(rounds: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """A context that shows progress; yields a function to call with the number of each finished round."""
    if not shown:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("boosting", total=rounds)
        yield lambda number: progress.update(task, completed=number + 1)


# ---- callbacks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoundState:
    """What a callback sees: the model so far, which predicts; its rounds; the metrics of every round of this fit."""

    model: Any
    round: int  # rounds that the model has
    last_round: int  # rounds it will have
    evals_result: Mapping[str, Mapping[str, Sequence[float]]]


Callback = Callable[[RoundState], Any]


def callbacks_of(callbacks: Any) -> tuple[Callback, ...]:
    callbacks = () if callbacks is None else (callbacks,) if callable(callbacks) else callbacks
    if (
        not isinstance(callbacks, Sequence)
        or isinstance(callbacks, str)
        or not all(callable(callback) for callback in callbacks)
    ):
        raise TreesError(f"callbacks: expected a list of functions of a RoundState, got {callbacks!r:.60}")
    for callback in callbacks:
        if type(callback).__module__.startswith("lightgbm."):
            raise TreesError(
                f"callbacks: expected functions of a RoundState, got LightGBM's {type(callback).__name__.strip('_')}; "
                "early_stopping_rounds, verbose and evals_result_ stand for its callbacks"
            )
    return tuple(callbacks)


def wants_to_stop(callbacks: Sequence[Callback], state: RoundState) -> bool:
    """Every callback is called; True from any of them ends the fit after this round."""
    answers = [(callback, callback(state)) for callback in callbacks]
    for callback, answer in answers:
        if answer is not None and not isinstance(answer, bool | np.bool_):
            name = getattr(callback, "__name__", type(callback).__name__)
            raise TreesError(f"callbacks: {name} returned {answer!r:.40}, expected True to stop, else False or None")
    return any(bool(answer) for _, answer in answers)


# ---- estimator base --------------------------------------------------------------------------------------------------


# Our settings, by what LightGBM, XGBoost and scikit-learn call them.
OTHER_NAMES = {
    other: ours
    for ours, others in {
        "max_leaves": "num_leaves max_leaf_nodes",
        "n_estimators": "num_iterations max_iter num_boost_round iterations num_trees",
        "learning_rate": "eta",
        "max_bins": "max_bin",
        "l1": "reg_alpha lambda_l1",
        "l2": "reg_lambda lambda_l2 l2_regularization l2_leaf_reg",
        "max_depth": "depth",
        "growth": "grow_policy",
        "verbose": "verbosity verbose_eval",
        "class_weight": "class_weights",
        "class_weight ('balanced')": "is_unbalance auto_class_weights",
        "device ('cuda')": "device_type gpu_id task_type",
        "eval_metric of fit, and no setting": "metric eval_metric scoring custom_metric",
        "callbacks of fit, and no setting": "callbacks",
        "min_child_samples": "min_data_in_leaf min_samples_leaf",
        "min_child_weight": "min_sum_hessian_in_leaf",
        "min_split_gain": "min_gain_to_split min_split_loss gamma",
        "subsample": "bagging_fraction",
        "sampling ('gradient', with subsample)": "data_sample_strategy sampling_method top_rate other_rate",
        "colsample": "feature_fraction colsample_bytree max_features",
        "drop_rate": "rate_drop",
        "categorical_features": "categorical_feature",
        "monotone_constraints": "monotonic_cst",
        "interaction_constraints": "interaction_cst",
        "early_stopping_rounds": "n_iter_no_change early_stopping_round early_stopping",
        "n_jobs": "num_threads nthread thread_count",
        "random_state": "seed random_seed",
        "gradient_precision ('i16')": "use_quantized_grad",
        "tweedie_power": "tweedie_variance_power",
        "objective": "loss loss_function",
    }.items()
    for other in others.split()
}
# What others set, and what is so here.
NO_SETTINGS = {
    "subsample_freq": "rows are drawn in every round (subsample)",
    "bagging_freq": "rows are drawn in every round (subsample)",
    "boosting_type": "set boosting='dart' for DART; sampling='gradient' with subsample=0.3 is LightGBM's GOSS",
    "tree_method": "trees always grow by histograms",
    "enable_categorical": "columns of a categorical type are categorical features, others where categorical_features "
    "names them",
    "num_class": "the classes are those of y",
    "linear_tree": "leaves are constants",
    "deterministic": "trees are the same to the bit for any number of threads",
    "missing": "NaN is missing",
    "use_missing": "NaN is missing",
    "zero_as_missing": "NaN is missing, and zero a number",
    "force_col_wise": "nothing is to be chosen",
    "force_row_wise": "nothing is to be chosen",
}
NO_SETTINGS["booster"] = NO_SETTINGS["boosting_type"]
SAMPLINGS, BOOSTINGS = ("uniform", "gradient"), ("gradient", "dart")
Fit = TypeVar("Fit", bound=Callable[..., Any])


@dataclass(frozen=True)
class FitOptions:
    """What `fit` takes beside rows, targets, weights and the sets to watch."""

    eval_sample_weight: Any = None
    eval_metric: Any = None
    callbacks: Any = None
    init_model: Any = None
    init_score: Any = None
    eval_init_score: Any = None
    seconds: Any = None
    memory: Any = None


# Arguments of `fit` and of predictions elsewhere, and what there is here.
OTHER_ARGUMENTS = {
    "early_stopping_rounds": "it is a setting of the estimator",
    "verbose": "it is a setting of the estimator",
    "categorical_feature": "categorical_features is a setting of the estimator",
    "cat_features": "categorical_features is a setting of the estimator",
    "feature_name": "names are those of a frame's columns",
    "eval_names": "sets are called valid_0, valid_1, ... in evals_result_",
    "base_margin": "it is called init_score",
    "base_margin_eval_set": "it is called eval_init_score",
    "sample_weight_eval_set": "it is called eval_sample_weight",
    "xgb_model": "it is called init_model",
    "raw_score": "decision_function(X) of a classifier has raw scores, predict(X, contributions=True).sum(axis=1) any",
    "pred_contrib": "it is called contributions",
    "pred_leaf": "leaves are apply(X)",
    "num_iteration": "first_rounds(n) is a model of the first n rounds, which predicts",
    "group": "queries are of BoostedTreesRanker",
    "group_id": "it is called qid, of BoostedTreesRanker",
    "eval_class_weight": "class_weight is a setting of the estimator, and eval_sample_weight weighs watched rows",
}
OTHER_ARGUMENTS |= dict.fromkeys(("output_margin", "prediction_type"), OTHER_ARGUMENTS["raw_score"])
OTHER_ARGUMENTS |= dict.fromkeys(("eval_group", "qid", "eval_qid"), OTHER_ARGUMENTS["group"])
OTHER_ARGUMENTS["pred_contribs"] = OTHER_ARGUMENTS["pred_contrib"]
OTHER_ARGUMENTS |= dict.fromkeys(("iteration_range", "ntree_limit", "ntree_end"), OTHER_ARGUMENTS["num_iteration"])


def hints_for_others(method: Fit) -> Fit:
    """Decorate a method: an unknown argument raises an error that names ours, if other libraries have it."""
    arguments, name = set(inspect.signature(method).parameters), method.__name__

    @functools.wraps(method)
    def call(self: Any, *args: Any, **more: Any) -> Any:
        for other in more:
            if other not in arguments:
                hint = OTHER_ARGUMENTS.get(other)
                hint = did_you_mean(other, arguments) if hint is None else f": {hint}"
                raise TypeError(f"{type(self).__name__}.{name}() has no argument {other!r}{hint}")
        return method(self, *args, **more)

    return cast(Fit, call)


def leaves_model_if_refused(fit: Fit) -> Fit:
    """A `fit` that is refused before its first round leaves the estimator as it was."""

    @functools.wraps(fit)
    def refusing(self: Any, *args: Any, **more: Any) -> Any:
        before = {name: value for name, value in vars(self).items() if name.endswith("_")}
        try:
            return fit(self, *args, **more)
        except BaseException:
            if vars(self).get("booster_") is before.get("booster_"):
                for name in [name for name in vars(self) if name.endswith("_")]:
                    delattr(self, name)
                vars(self).update(before)
            raise

    return cast(Fit, refusing)


@dataclass(kw_only=True, eq=False, repr=False)
class BoostedTreesBase(FittedTrees):
    """The base of all estimators; its fields are their common parameters, as scikit-learn wants these in `__init__`."""

    n_estimators: int = 100
    learning_rate: float = 0.1
    max_leaves: int = 31
    max_depth: int | None = None
    growth: str = "leaf"
    max_bins: int = 255
    l1: float = 0.0
    l2: float = 0.0
    min_child_weight: float = 1e-3
    min_child_samples: int = 20
    min_split_gain: float = 0.0
    subsample: float = 1.0
    sampling: str = "uniform"
    colsample: float = 1.0
    boosting: str = "gradient"
    drop_rate: float = 0.1
    max_drop: int = 50
    skip_drop: float = 0.5
    monotone_constraints: Any = None
    interaction_constraints: Any = None
    categorical_features: Any = None
    gradient_precision: GradientPrecision | str = "f32"
    stochastic_rounding: bool | None = None
    renew_leaves: bool | None = None
    early_stopping_rounds: int | None = None
    validation_fraction: float = 0.1
    importance_type: str = "gain"
    warm_start: bool = False
    random_state: Any = 0
    n_jobs: int | None = None
    device: str = "cpu"
    verbose: bool = False

    def __new__(cls, *given: Any, **settings: Any) -> Self:
        """An estimator; settings under the names that LightGBM, XGBoost or scikit-learn have for them are refused."""
        if given:
            raise TypeError(f"{cls.__name__}: settings are given by name (n_estimators=100), got {given[0]!r:.60}")
        if unknown := cls._unknown_setting(settings):
            raise TypeError(unknown)
        estimator: Self = super().__new__(cls)
        return estimator

    @classmethod
    def _unknown_setting(cls, names: Iterable[str]) -> str:
        """What to say of the first of these names that is no setting; "" where there is none, or nothing to say."""
        for name in names:
            if name in OTHER_NAMES and name not in cls.__dataclass_fields__:
                return f"{cls.__name__}: {name} is called {OTHER_NAMES[name]} here"
            if name in NO_SETTINGS:
                return f"{cls.__name__}: there is no {name}, leave it out: {NO_SETTINGS[name]}"
            is_known = name in cls.__dataclass_fields__ or name in inspect.signature(cls.__init__).parameters
            if not is_known and (meant := did_you_mean(name, cls.__dataclass_fields__)):
                return f"{cls.__name__}: there is no setting {name!r}{meant}"
        return ""

    def set_params(self, **params: Any) -> Self:
        """Change settings; names that other libraries have for them are refused with ours, as in the constructor."""
        if unknown := self._unknown_setting(params):
            raise ValueError(unknown)
        changed: Self = super().set_params(**params)
        return changed

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.sparse = True
        return tags

    # ---- tables ------------------------------------------------------------------------------------------------------

    def _read(self, x: Any, shards: Shards = ALONE) -> Array:
        """Check a table for prediction, which must have the features of `fit`, and return it as an array."""
        if shards is ALONE and self._is_plain(x) and not np.isinf(x).any():
            plain: Array = x
            return plain
        x = dense(x)
        if names_of(x) and not isinstance(x, TablePieces):  # before anything is said about what a column has
            validate_data(self, x, reset=False, skip_check_array=True)
        table: Array = self._validated(encode(x, self.categories_), shards, reset=False)
        return table

    def _is_plain(self, x: Any) -> bool:
        """Whether x is an array that needs no change: to look closer takes longer than predicting a row."""
        if type(x) is not np.ndarray or x.dtype not in (np.float32, np.float64) or x.ndim != 2 or not len(x):
            return False
        return x.shape[1] == self.n_features_in_ and not self.categories_ and not hasattr(self, "feature_names_in_")

    def _read_both(self, x: Any, y: Any, initial: Initial | None, shards: Shards) -> tuple[Array, Array]:
        x, y = dense(x), on_host(y)
        if initial is not None:  # before anything is said about what a column has
            initial.check_names(names_of(x) or ())
        before = initial.categories if initial else {}
        self.categories_ = learn_categories(x, self.categorical_features, before, shards)
        refuse_masked("y", y)
        refuse_missing_targets(y)
        several = self._takes_several(y)
        table, targets = self._validated(encode(x, self.categories_), shards, y=y, multi_output=several)
        return table, targets

    def _takes_several(self, y: Any) -> bool:
        """Whether y is several targets, for an estimator that is fitted to such."""
        return False

    def _validated(self, x: Any, shards: Shards, **more: Any) -> Any:
        fewest = 1 if shards.count == 1 else 0  # a process may have none
        if isinstance(x, TablePieces):
            return pieces_of(self, x, fewest, **more)
        has_types = hasattr(x, "dtype") or names_of(x) is not None
        if has_types:  # text that spells a number would pass as one
            refuse_text(x)
        is_large = is_large_table(x) and not has_infinity(x)  # then scikit-learn need not look, with one thread
        try:
            return validate_data(
                self,
                x,
                dtype=[np.float64, np.float32],
                ensure_all_finite=False if is_large else "allow-nan",
                ensure_min_samples=fewest,
                **more,
            )
        except ValueError as error:
            if not has_types:
                refuse_text(x)
            located = with_place(error, x, more.get("y"))
            if located is error:
                raise
            raise located from None

    def _eval_sets(self, objective: Objective, eval_set: Any, options: FitOptions, shards: Shards) -> list[EvalSet]:
        sets = []
        custom_metrics(objective, options.eval_metric)  # refuses what is none without a set to watch, too
        pairs = eval_pairs(eval_set, options.eval_sample_weight, options.eval_init_score)
        for index, (x, y, weight, first) in enumerate(pairs):
            if (first is None) != (options.init_score is None):
                raise TreesError("eval_init_score: watched sets begin with scores where the rows do; give both or none")
            with naming_set(index):
                table = self._read(x, shards)
                refuse_masked("y", y)
                targets = self._targets(np.asarray(on_host(y)))
                expected = (len(table),) if self.n_outputs_ == 1 else (len(table), self.n_outputs_)
                if targets.shape != expected:
                    raise TreesError(
                        f"y: expected a target for each of {len(table)} rows, shape {expected}, got {targets.shape}"
                    )
            scores = first_scores_of(first, len(table), objective.outputs, "eval_init_score")
            rows = Rows(table, targets, weights_of(weight, table, shards, "eval_sample_weight"), scores)
            sets.append(EvalSet(f"valid_{index}", rows, metrics_of(objective, options.eval_metric)))
        return sets

    def _targets(self, y: Array) -> Array:
        """The targets of a watched set as the objective takes them."""
        raise NotImplementedError

    def _agree(
        self,
        x: Array,
        y: Array,
        sample_weight: Any,
        eval_set: Any,
        options: FitOptions,
        initial: Initial | None,
        shards: Shards,
    ) -> Array:
        """Agree on the type of x, which is returned in it; refuses settings, features and targets that differ."""
        if shards.count == 1:
            return x
        always = {
            "the version of bitplan": __version__,
            "the estimator": type(self).__name__,
            "the number of features": x.shape[1],
            "the names of features": getattr(self, "feature_names_in_", None),
            "eval_set (how many)": len(eval_pairs(eval_set)),
            "eval_metric": options.eval_metric,
            "callbacks (how many)": len(callbacks_of(options.callbacks)),
            "the rounds of the model to train further": initial.booster.rounds if initial else 0,
        }
        parameters = self.get_params()
        of_process = ("verbose", "n_jobs")  # each process may have its own; a subclass need not take them
        always |= {f"parameter {name}": value for name, value in parameters.items() if name not in of_process}
        of_rows = {
            "the type of X": str(x.dtype),
            "the type of y": y.dtype.kind,
            "the number of targets": y.shape[1] if y.ndim == 2 else 1,
            "sample_weight (given or not)": sample_weight is not None,
        }
        return x.astype(agree(always, of_rows, len(x), shards)["the type of X"], copy=False)

    def _initial(self, options: FitOptions) -> Initial | None:
        """The model to train further: `init_model`, or with `warm_start` this one, if it is fitted."""
        is_warm = truth("warm_start", self.warm_start) and hasattr(self, "booster_")
        if is_warm and options.init_model is not None:
            raise TreesError("init_model: warm_start trains the estimator's own model further; give one of the two")
        return initial_of(self if is_warm else options.init_model, is_own=is_warm)

    # ---- boosting ----------------------------------------------------------------------------------------------------

    def _boost(
        self,
        rows: Rows,
        objective: Objective,
        watched: Sequence[EvalSet],
        options: FitOptions,
        initial: Initial | None,
        shards: Shards,
    ) -> None:
        settings = self._settings(rows.x.shape[1])
        if initial is not None:
            initial.check(objective, rows.x.shape[1])
            initial.check_meaning(getattr(self, "classes_", None), self.categories_)
            if initial.is_own:  # n_estimators are those of the whole model
                settings = replace(settings, rounds=initial.rounds_left(settings.rounds))
        drawn = gather_numbers(settings.seed, "seed", shards)
        settings = replace(settings, seed=drawn[0])  # random_state=None draws one in every process
        rows = with_weight(rows)
        if not Span.of(len(rows.x), shards).total:
            raise TreesError(
                "sample_weight: every weight of every process is zero, so there is nothing to fit; "
                "leave sample_weight out"
            )
        if settings.patience is not None and not watched:
            rows, held_out = split_rows(rows, self.validation_fraction, settings.seed, shards)
            watched = [EvalSet("valid_0", held_out, metrics_of(objective, options.eval_metric))]
        categorical = self._categorical(rows.x.shape[1])
        if np.any(settings.rules.monotone[categorical]):
            raise TreesError("monotone_constraints: a categorical feature has no order; set its constraint to 0")
        callbacks = callbacks_of(options.callbacks)
        threads = threads_of(self.n_jobs)
        cores = allowed_cores() if settings.device == "cpu" and shards.count == 1 else 0  # others wait for other things
        with (
            use_threads(threads),
            staying_awake(threads, cores),
            round_bar(settings.rounds, shown=truth("verbose", self.verbose)) as advance,
        ):

            def after_round(number: int) -> bool:
                advance(number)
                booster = self.booster_
                state = RoundState(self, booster.rounds, booster.rounds_before + settings.rounds, booster.evals)
                stops = wants_to_stop(callbacks, state)
                if callbacks and shards.count > 1:  # one process that stops ends the fit of all
                    stops = bool(shards.top(np.array([float(stops)]), "answers of callbacks")[0])
                return stops

            start = initial.booster if initial else None
            boost(rows, categorical, objective, settings, watched, after_round, self._keep, shards, start)

    def _keep(self, booster: Booster) -> None:
        self.booster_ = booster

    # ---- settings ----------------------------------------------------------------------------------------------------

    def _settings(self, features: int) -> BoostSettings:
        one_of("importance_type", self.importance_type, IMPORTANCES)
        precision = self._precision()
        quantized = precision is not GradientPrecision.F32
        rules = GrowthRules(
            max_leaves=whole_number("max_leaves", self.max_leaves, 1),
            max_depth=0 if self.max_depth is None else whole_number("max_depth (None: no limit)", self.max_depth, 1),
            best_first=one_of("growth", self.growth, ("leaf", "depth")) == "leaf",
            l1=number("l1", self.l1, 0),
            l2=number("l2", self.l2, 0),
            min_child_weight=number("min_child_weight", self.min_child_weight, 0),
            min_child_rows=whole_number("min_child_samples", self.min_child_samples, 1),
            min_gain=number("min_split_gain", self.min_split_gain, 0),
            monotone=monotone_signs(self.monotone_constraints, self._names(), features),
            groups=interaction_groups(self.interaction_constraints, self._names(), features),
        )
        patience, stochastic = self.early_stopping_rounds, self.stochastic_rounding
        return BoostSettings(
            rules=rules,
            rounds=whole_number("n_estimators", self.n_estimators, 1),
            learning_rate=number("learning_rate", self.learning_rate, 0, above=True),
            max_bins=whole_number("max_bins", self.max_bins, 2, 255),
            precision=precision,
            stochastic=quantized if stochastic is None else truth("stochastic_rounding", stochastic),
            renew_leaves=quantized if self.renew_leaves is None else truth("renew_leaves", self.renew_leaves),
            row_share=number("subsample", self.subsample, 0, 1, above=True),
            column_share=number("colsample", self.colsample, 0, 1, above=True),
            seed=seed_of(self.random_state),
            patience=None if patience is None else whole_number("early_stopping_rounds", patience, 1),
            device=one_of("device", self.device, DEVICES),
            by_gradient=self._by_gradient(),
            dropout=self._dropout(),
        )

    def _dropout(self) -> Dropout | None:
        if self.boosting == "goss":
            raise TreesError("boosting: 'goss' is sampling='gradient' with subsample=0.3 here")
        dropout = Dropout(
            rate=number("drop_rate", self.drop_rate, 0, 1),
            most=whole_number("max_drop", self.max_drop, 1),
            skip=number("skip_drop", self.skip_drop, 0, 1),
        )
        return dropout if one_of("boosting", self.boosting, BOOSTINGS) == "dart" else None

    def _by_gradient(self) -> bool:
        by_gradient = one_of("sampling", self.sampling, SAMPLINGS) == "gradient"
        if by_gradient and self.subsample == 1:
            raise TreesError("sampling: 'gradient' draws a share of the rows, and subsample is 1; set subsample=0.3")
        return by_gradient

    def _check_parameters(self, features: int) -> None:
        """Raise the errors that `fit` would raise for the parameters alone, with tables of `features` columns."""
        self._settings(features)
        self._categorical(features)
        threads_of(self.n_jobs)
        truth("verbose", self.verbose)
        truth("warm_start", self.warm_start)
        number("validation_fraction", self.validation_fraction, 0, 1, above=True)

    def _precision(self) -> GradientPrecision:
        if isinstance(self.gradient_precision, GradientPrecision):
            return self.gradient_precision
        names = [precision.value for precision in GradientPrecision]
        return GradientPrecision(one_of("gradient_precision", str(self.gradient_precision).lower(), names))

    def _categorical(self, features: int) -> Array:
        """Which features are categorical: by the setting, and columns of categories that are no numbers."""
        is_category = category_flags(self.categorical_features, self._names(), features)
        is_category[list(self.categories_)] = True
        return is_category

    def _names(self) -> Sequence[Any]:
        return list(getattr(self, "feature_names_in_", ()))
