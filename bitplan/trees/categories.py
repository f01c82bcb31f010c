"""Categories that are no numbers: pandas' categorical columns, and text, become whole numbers.

The number of a category is its place among the sorted categories that `fit` saw, in all processes; `predict` looks
values up, whatever the column's own numbering is. A value that `fit` did not see is missing, and goes with the rest.

Settings that go by feature: which are categorical, which are monotone. Features go by name or by place.
"""

from __future__ import annotations

import numbers
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from bitplan.base.documents import is_number, is_text
from bitplan.base.errors import did_you_mean
from bitplan.trees.checks import is_missing, refuse_text
from bitplan.trees.distributed.shards import Shards, gather_json
from bitplan.trees.gradients import Array, TreesError
from bitplan.trees.scikit import check_array

# ---- feature settings ------------------------------------------------------------------------------------------------


MAX_GROUPS = 62  # of features that may interact: bits of an integer


def feature_place(where: str, name: Any, names: Sequence[Any], features: int) -> int:
    """The place of a feature that the setting `where` names."""
    known = list(names)
    if name in known:
        return known.index(name)
    if isinstance(name, numbers.Integral) and 0 <= int(name) < features:
        return int(name)
    hint = did_you_mean(str(name), map(str, known))
    raise TreesError(f"{where}: no feature {name!r:.80}; expected a column name, or 0 to {features - 1}{hint}")


def monotone_signs(given: Any, names: Sequence[Any], features: int) -> Array:
    """-1, 0 or 1 for each feature."""
    if given is None:
        return np.zeros(features, np.int64)
    if isinstance(given, dict):
        signs = [0] * features
        for name, sign in given.items():
            signs[feature_place("monotone_constraints", name, names, features)] = sign
        given = signs
    given = given.tolist() if isinstance(given, np.ndarray) else given
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    if not is_list or len(given) != features or any(sign not in (-1, 0, 1) for sign in given):
        raise TreesError(
            f"monotone_constraints: expected {features} numbers, one a feature, each -1, 0 or 1, got {given!r:.80}"
        )
    return np.array(given, np.int64)


def interaction_groups(given: Any, names: Sequence[Any], features: int) -> Array | None:
    """For each feature a bit for every group it is in; features that no group names are a group of their own."""
    if given is None:
        return None
    is_list = isinstance(given, (list, tuple)) and all(
        isinstance(group, Collection) and not isinstance(group, (str, bytes, dict)) for group in given
    )
    if not is_list:
        raise TreesError(f"interaction_constraints: expected a list of lists of features, got {given!r:.60}")
    places = [{feature_place("interaction_constraints", name, names, features) for name in group} for group in given]
    rest = set(range(features)).difference(*places) if places else set(range(features))
    groups = [*places, rest] if rest else places
    if len(groups) > MAX_GROUPS:
        raise TreesError(f"interaction_constraints: expected at most {MAX_GROUPS} groups, got {len(groups)}")
    bits = np.zeros(features, np.int64)
    for number, group in enumerate(groups):
        bits[list(group)] |= 1 << number
    return bits


def category_flags(given: Any, names: Sequence[Any], features: int) -> Array:
    """Whether each feature is categorical, by the setting `categorical_features`."""
    is_category = np.zeros(features, np.bool_)
    given = () if given is None else given
    if isinstance(given, (str, bytes, dict)) or not isinstance(given, Collection):
        raise TreesError(
            f"categorical_features: expected a list of names or places, or a flag for each feature, got {given!r:.60}"
        )
    if len(given) == features and all(isinstance(flag, (bool, np.bool_)) for flag in given):
        return np.array(given, np.bool_)
    for name in given:
        is_category[feature_place("categorical_features", name, names, features)] = True
    return is_category


# ---- categories ------------------------------------------------------------------------------------------------------


MAX_CATEGORIES = 2**16  # a category set has a bit for each
Known = dict[int, list[Any]]  # by the place of a feature: its categories, in the order of their numbers
CATEGORY_KINDS = ({str}, {bool}, {int, float})
CATEGORIES = "distinct texts, numbers or truth values, in a list"


def are_categories(values: Any) -> bool:
    """Whether a value of a file can be what the numbers of a categorical feature stand for."""
    if type(values) is not list or len(values) > MAX_CATEGORIES:
        return False
    kinds = {type(value) for value in values}
    is_known = any(kinds <= allowed for allowed in CATEGORY_KINDS) and len(set(values)) == len(values)
    return is_known and all(is_text(value) or type(value) is bool or is_number(value) for value in values)


class _Table:
    """The columns of a frame, an array or a list of rows."""

    def __init__(self, x: Any) -> None:
        self.is_frame = hasattr(x, "iloc") and hasattr(x, "columns")
        self.x = x
        self.names: list[Any] = list(x.columns) if self.is_frame else []
        self.count = len(self.names) if self.is_frame else int(x.shape[1])

    def column(self, place: int) -> Any:
        return self.x.iloc[:, place] if self.is_frame else self.x[:, place]

    def shown(self, place: int) -> str:
        return f"column {self.names[place]!r:.80}" if self.is_frame else f"column {place}"

    def is_pandas_category(self, place: int) -> bool:
        return self.is_frame and str(self.column(place).dtype) == "category"

    def may_be_text(self, place: int) -> bool:
        return getattr(self.column(place).dtype, "kind", "O") in "OSU"


def learn_categories(x: Any, categorical_features: Any, before: Mapping[int, list[Any]], shards: Shards) -> Known:
    """The categories of pandas' categorical columns, and of the columns of text that `categorical_features` names.

    `before` are those of a model that is trained further: their numbers stay, and new ones follow.
    """
    table = _table_of(x)
    found: Known = {}
    if table is not None:
        named = category_flags(categorical_features, table.names, table.count)
        for place in range(table.count):
            if table.is_pandas_category(place):
                values = [_plain(value) for value in table.column(place).cat.categories]
            elif place in before or (named[place] and table.may_be_text(place)):
                values = _distinct(table.column(place))
                if place not in before and not any(isinstance(value, str) for value in values):
                    continue  # numbers in an array of objects
            else:
                continue
            found[place] = _checked(values, table.shown(place))
    if shards.count > 1:
        parts = gather_json({str(place): values for place, values in found.items()}, "categories", shards)
        places = sorted({int(place) for part in parts for place in part})
        together = {place: [value for part in parts for value in part.get(str(place), ())] for place in places}
        found = {place: _checked(list(set(values)), f"column {place}") for place, values in together.items()}
    return {
        place: [*before.get(place, ()), *sorted(set(found.get(place, ())) - set(before.get(place, ())))]
        for place in sorted({*before, *found})
    }


def encode(x: Any, known: Known) -> Any:
    """X with numbers for categories: a frame as before, with the same names, or an array."""
    table = _table_of(x)
    if table is None or not known or max(known) >= table.count:
        return x  # another number of features is refused later
    others = [place for place in range(table.count) if place not in known]
    numbers = np.empty((len(x), table.count))
    rest = table.x.iloc[:, others] if table.is_frame else table.x[:, others]
    if others:
        refuse_text(rest)
        numbers[:, others] = check_array(rest, dtype=np.float64, ensure_all_finite=False, ensure_min_samples=0)
    for place, values in known.items():
        numbers[:, place] = _numbers(table, place, values)
    return type(x)(numbers, columns=x.columns, index=x.index) if table.is_frame else numbers


def _table_of(x: Any) -> _Table | None:
    """None where there are no columns to look at, which scikit-learn refuses."""
    if hasattr(x, "iloc") and hasattr(x, "columns"):
        return _Table(x)
    if not isinstance(x, (np.ndarray, list, tuple)):
        return None
    try:
        array = np.asarray(x)
    except ValueError:  # rows of different lengths
        return None
    if array.dtype.kind in "SU" and not isinstance(x, np.ndarray):
        array = np.array(x, dtype=object)  # numbers beside text stay numbers
    return _Table(array) if array.ndim == 2 else None


def _numbers(table: _Table, place: int, values: Sequence[Any]) -> Array:
    place_of = {value: float(number) for number, value in enumerate(values)}
    column = table.column(place)
    has_text = any(isinstance(value, str) for value in values)
    if table.is_pandas_category(place):
        given = list(column.cat.categories)
        if given and values and any(isinstance(value, str) for value in given) != has_text:
            raise _other_kind(table, place, values, f"categories such as {given[0]!r:.60}")
        by_code: list[float] = [place_of.get(_plain(value), np.nan) for value in column.cat.categories]
        numbers: Array = np.array([*by_code, np.nan])[np.asarray(column.cat.codes)]  # -1 is missing
        return numbers
    if has_text and not table.may_be_text(place):
        raise _other_kind(table, place, values, str(column.dtype))
    cells = np.asarray(column, dtype=object).tolist()
    if values and not has_text and (text := next((cell for cell in cells if isinstance(cell, str)), None)) is not None:
        raise _other_kind(table, place, values, f"text such as {text!r:.60}")
    return np.array([place_of.get(value, np.nan) for value in cells])


def _other_kind(table: _Table, place: int, values: Sequence[Any], got: str) -> TreesError:
    kind = "text as categories" if isinstance(values[0], str) else "categories that are no text"
    return TreesError(
        f"X: {table.shown(place)} has {kind}, such as {values[0]!r:.60}, got {got}; give the same column as at fit"
    )


def _distinct(column: Any) -> list[Any]:
    """The values of a column, missing ones left out."""
    values = set(np.asarray(column, dtype=object).tolist())
    return [_plain(value) for value in values if isinstance(value, str) or not is_missing(value)]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _checked(values: list[Any], where: str) -> list[Any]:
    kinds = {type(value) for value in values}
    if not any(kinds <= allowed for allowed in CATEGORY_KINDS):
        shown = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise TreesError(
            f"X: {where} has categories of type {shown}, expected text alone, numbers alone, or truth values; convert "
            "it first (column.astype(str))"
        )
    if len(values) > MAX_CATEGORIES:
        raise TreesError(
            f"X: {where} has {len(values)} categories, expected at most {MAX_CATEGORIES}; join the rare ones, or leave "
            "the column out"
        )
    return sorted(values)
