"""Checks what the estimators are given: settings by name, targets and weights by what is wrong with them."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from bitplan.base.errors import did_you_mean
from bitplan.trees.distributed.shards import ALONE, Shards
from bitplan.trees.gradients import NO_WEIGHTS, Array, TreesError
from bitplan.trees.pieces import TablePieces
from bitplan.trees.scikit import check_array, check_consistent_length, column_or_1d
from bitplan.trees.tables import is_missing, on_host

FLOAT32 = np.finfo(np.float32)
MAX_TARGET = 1e300
MAX_COUNT = 2**53  # some settings become float64
# Our values, by what LightGBM, XGBoost and scikit-learn call them; by setting.
OTHER_VALUES: dict[str, dict[str, str]] = {
    setting: {other: ours for ours, others in values.items() for other in others.split()}
    for setting, values in {
        "device": {"cuda": "gpu cuda:0"},
        "growth": {"leaf": "lossguide leafwise leaf-wise", "depth": "depthwise depth-wise SymmetricTree"},
        "sampling": {"gradient": "goss gradient_based", "uniform": "bagging"},
        "boosting": {"gradient": "gbdt gbtree gbrt"},
        "gradient_precision": {"f32": "float32 fp32 float", "i16": "int16", "i8": "int8 quantized"},
        "importance_type": {"split": "weight", "gain": "total_gain"},
        "objective": {
            "squared_error": "regression regression_l2 l2 mse mean_squared_error rmse reg:squarederror RMSE",
            "absolute_error": "regression_l1 l1 mae mean_absolute_error reg:absoluteerror MAE",
            "poisson": "count:poisson Poisson",
            "gamma": "reg:gamma",
            "tweedie": "reg:tweedie Tweedie",
            "quantile": "reg:quantileerror Quantile",
            "huber": "reg:pseudohubererror Huber",
        },
        "eval_metric": {
            "auc": "roc_auc AUC",
            "average_precision": "ap aucpr",
            "logloss": "neg_log_loss mlogloss log_loss cross_entropy",
            "error": "merror binary_error multi_error",
            "rmse": "root_mean_squared_error neg_root_mean_squared_error",
            "mse": "mean_squared_error neg_mean_squared_error",
            "mae": "mean_absolute_error neg_mean_absolute_error",
        },
    }.items()
}


def pieces_of(
    model: Any, x: TablePieces, fewest: int, y: Any = None, *, reset: bool = True, multi_output: bool = False
) -> Any:
    """A table in files as `validate_data` takes one in memory: number and names of features, a target for each row."""
    names = None if x.columns is None else np.array(x.columns, object)
    if reset:
        model.n_features_in_ = x.shape[1]
        vars(model).pop("feature_names_in_", None)
        if names is not None:
            model.feature_names_in_ = names
    fitted_names = getattr(model, "feature_names_in_", None)
    has_others = names is not None and fitted_names is not None and list(names) != list(fitted_names)
    if x.shape[1] != model.n_features_in_ or has_others:
        raise TreesError(
            f"X: expected the {model.n_features_in_} features of `fit`, in their order, got {x.shape[1]}"
            + (f": {x.columns!r:.120}" if has_others else "")
        )
    if model.categories_:
        raise TreesError(
            f"X: feature {min(model.categories_)} had categories at fit that are no numbers, and files hold numbers "
            "alone; give a frame"
        )
    if len(x) < fewest:
        raise TreesError("X: the files have no rows, expected at least one")
    if y is None:
        return x
    check_consistent_length(x, y)
    return x, np.asarray(y) if multi_output else column_or_1d(y, warn=True)


def targets_of(y: Array) -> Array:
    """The targets as float64: (rows,), or (rows, targets)."""
    if y.dtype.kind in "mM":
        raise TreesError(f"y: has dates or times ({y.dtype}), expected numbers; give days or seconds since a date")
    try:
        targets = y.astype(np.float64)
    except (TypeError, ValueError):
        raise TreesError(f"y: expected numbers, got {y.dtype}; a regressor cannot be fitted to {y[:1]!r}") from None
    if targets.ndim not in (1, 2) or not np.isfinite(targets).all():
        raise TreesError(f"y: expected finite numbers, got shape {y.shape} with NaN or infinity in it")
    if np.abs(targets).max(initial=0.0) > MAX_TARGET:
        raise TreesError(
            f"y: expected numbers within {MAX_TARGET:g}, whose sums and differences are finite; scale them"
        )
    return targets


def refuse_masked(name: str, values: Any) -> None:
    """Refuse a masked array: it keeps numbers under its mask, which nobody means."""
    if np.ma.is_masked(values):
        raise TreesError(f"{name}: {np.ma.count_masked(values)} of its numbers are masked; leave those rows out")


def refuse_missing_targets(y: Any) -> None:
    """Refuse labels of several types and missing ones, which scikit-learn cannot sort or takes for a class (NaT)."""
    try:
        labels = np.asarray(y)
    except ValueError:  # rows of different lengths, which scikit-learn refuses
        return
    if labels.dtype.kind not in "OM" or not labels.ndim:
        return
    row = next((row for row, label in enumerate(labels) if is_missing(label)), None)
    if row is not None:
        raise TreesError(
            f"y: row {row} has {labels[row]!s}, expected a target for every row; leave that row out, or label it"
        )
    if len(kinds := sorted({type(label).__name__ for label in labels})) > 1:
        raise TreesError(f"y: has labels of types {', '.join(kinds)}, expected one; convert them first (y.astype(str))")


def with_place(error: ValueError, x: Any, y: Any) -> ValueError:
    """scikit-learn's error about NaN or infinity, with row and column of the first one added."""
    if "infinity" not in str(error) and "NaN" not in str(error):
        return error
    for name, values, advice in (("X", x, "NaN is a missing value"), ("y", y, "leave that row out")):
        if values is None or f"Input {name} " not in str(error):
            continue
        try:
            numbers = np.asarray(values, np.float64)
        except (TypeError, ValueError):
            return error
        wrong = np.isinf(numbers) if name == "X" else ~np.isfinite(numbers)
        if not wrong.any():
            return error
        row, *column = np.argwhere(wrong)[0].tolist()
        shown = (
            f", column {list(getattr(values, 'columns', range(numbers.shape[1])))[column[0]]!r:.80}" if column else ""
        )
        return TreesError(
            f"{str(error).split(chr(10))[0]} The first is {numbers[wrong][0]} in row {row}{shown}; {advice}"
        )
    return error


@contextmanager
def naming_set(index: int) -> Iterator[None]:
    """A context that puts the watched set's number in front of errors about X and y."""
    try:
        yield
    except TreesError as error:
        raise TreesError(f"eval_set, set {index}: {error}") from error
    except ValueError as error:  # scikit-learn's
        raise ValueError(f"eval_set, set {index}: {error}") from error


def weights_of(sample_weight: Any, x: Array, shards: Shards = ALONE, name: str = "sample_weight") -> Array:
    """The rows' weights as float64; an empty array stands for none given."""
    sample_weight = on_host(sample_weight)
    if sample_weight is None or (not len(x) and not len(sample_weight)):
        return NO_WEIGHTS
    if shards.count > 1 and np.shape(sample_weight) == (len(x),) and not np.any(sample_weight):
        return np.zeros(len(x))  # other processes may have rows with a weight
    refuse_masked(name, sample_weight)
    if isinstance(sample_weight, numbers.Real):  # scikit-learn's convention
        sample_weight = np.full(len(x), sample_weight)
    weights: Array = check_array(
        sample_weight, dtype=np.float64, order="C", ensure_2d=False, allow_nd=True, input_name=name
    )
    if weights.shape != (len(x),):
        raise TreesError(f"{name}: expected a number for each of {len(x)} rows, got shape {weights.shape}")
    if (weights < 0).any():
        raise TreesError(f"{name}: expected no negative numbers, got {weights.min()}")
    if not weights.any():
        raise TreesError(f"{name}: every weight is zero, so there is nothing to fit; give some rows a weight")
    if not FLOAT32.tiny <= weights.max() <= FLOAT32.max:
        raise TreesError(
            f"{name}: the largest weight is {weights.max():g}, and gradients, which weights multiply, are "
            f"float32; divide all weights by one number, so that the largest is {FLOAT32.tiny:g} to {FLOAT32.max:g}"
        )
    return weights


def first_scores_of(raw_scores: Any, count: int, outputs: int, name: str) -> Array | None:
    """Raw scores to begin with as float64 (rows, outputs); flat ones are of one output, or as LightGBM has them."""
    if raw_scores is None:
        return None
    scores: Array = check_array(
        on_host(raw_scores), dtype=np.float64, ensure_2d=False, ensure_min_samples=0, input_name=name
    )
    if scores.shape == (count * outputs,):  # LightGBM's flat order: all rows of the first class, then of the second
        scores = scores.reshape(outputs, count).T
    if scores.shape != (count, outputs):
        expected = "a number" if outputs == 1 else f"{outputs} numbers"
        raise TreesError(f"{name}: expected {expected} for each of {count} rows, got shape {scores.shape}")
    return np.ascontiguousarray(scores)


def whole_number(name: str, value: Any, least: int, most: int | None = None) -> int:
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_whole or value < least or value > (MAX_COUNT if most is None else most):
        limit = f"{least} to {most}" if most is not None else f"at least {least}"
        raise TreesError(f"{name}: expected a whole number, {limit}, got {value!r:.80}")
    return int(value)


def number(name: str, value: Any, least: float, most: float = math.inf, *, above: bool = False) -> float:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    try:
        is_number = is_number and math.isfinite(value)
    except OverflowError:  # an int of hundreds of digits
        is_number = False
    if not is_number or value < least or value > most or (above and value == least):
        limit = f"{'above' if above else 'at least'} {least}" + (f" and at most {most}" if most < math.inf else "")
        raise TreesError(f"{name}: expected a number {limit}, got {value!r:.80}")
    return float(value)


def byte_count(name: str, value: Any) -> int:
    """A number of bytes, or a size such as "2GB"."""
    from bitplan.base.hardware import read_size

    size = read_size(value) if isinstance(value, str) else value
    if size is None or isinstance(size, bool) or not isinstance(size, numbers.Integral) or size <= 0:
        raise TreesError(f"{name}: expected a number of bytes, or a size such as '2GB' or '500MiB', got {value!r:.40}")
    return int(size)


def truth(name: str, value: Any) -> bool:
    """A setting that is True, False, 1 or 0, numpy's among them, as a bool; others are refused."""
    if not isinstance(value, (bool, np.bool_, numbers.Integral)) or value not in (0, 1):
        raise TreesError(f"{name}: expected True or False, got {value!r:.40}")
    return bool(value)


def has_default(value: Any, default: Any) -> bool:
    """Whether a setting has its default; arrays and lists of them never do."""
    return value is default or (isinstance(value, (str, numbers.Real)) and bool(value == default))


def other_name(name: str, value: Any) -> str:
    """A hint for an error if `value` is another library's word for one of our settings' values, else ""."""
    ours = OTHER_VALUES.get(name, {}).get(value) if isinstance(value, str) else None
    return "" if ours is None else f"; {value!r} is called {ours!r} here"


def one_of(name: str, value: Any, choices: Any) -> str:
    if value not in choices:
        hint = other_name(name, value) or did_you_mean(str(value), choices)
        raise TreesError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r:.80}{hint}")
    return str(value)


def seed_of(random_state: Any) -> int:
    if random_state is None:
        return int(np.random.SeedSequence().generate_state(1)[0])
    if isinstance(random_state, np.random.RandomState):  # scikit-learn's convention
        return int(random_state.randint(2**31))
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(2**31))
    return whole_number("random_state", random_state, 0, 2**32 - 1)
