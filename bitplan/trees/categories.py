"""Categories that are no numbers: columns of a frame's type of categories, and text, become whole numbers.

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
from bitplan.trees.distributed.shards import Shards, gather_json
from bitplan.trees.gradients import Array, TreesError
from bitplan.trees.scikit import check_array
from bitplan.trees.tables import Table, is_missing, plain, refuse_text, table_of

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


def learn_categories(x: Any, categorical_features: Any, before: Mapping[int, list[Any]], shards: Shards) -> Known:
    """The categories of columns of a frame's type for them, and of columns of text that `categorical_features` names.

    `before` are those of a model that is trained further: their numbers stay, and new ones follow.
    """
    table = table_of(x)
    learned: Known = {}
    if table is not None:
        named = category_flags(categorical_features, table.names, table.count)
        for place in range(table.count):
            typed = table.categories(place)
            if typed is not None:
                values = [plain(value) for value in typed]
            elif place in before or (named[place] and table.kind(place) == "O"):
                values = _distinct(table.cells(place))
                if place not in before and not any(isinstance(value, str) for value in values):
                    continue  # numbers in an array of objects
            else:
                continue
            learned[place] = _checked(values, table.shown(place))
    if shards.count > 1:
        parts = gather_json({str(place): values for place, values in learned.items()}, "categories", shards)
        places = sorted({int(place) for part in parts for place in part})
        together = {place: [value for part in parts for value in part.get(str(place), ())] for place in places}
        learned = {place: _checked(list(set(values)), f"column {place}") for place, values in together.items()}
    return {
        place: [*before.get(place, ()), *sorted(set(learned.get(place, ())) - set(before.get(place, ())))]
        for place in sorted({*before, *learned})
    }


def encode(x: Any, known: Known) -> Any:
    """X with numbers for categories: a frame as before, with the same names, or an array."""
    table = table_of(x)
    if table is None or not known or max(known) >= table.count:
        return x  # another number of features is refused later
    others = [place for place in range(table.count) if place not in known]
    numbers = np.empty((len(x), table.count))
    if others:
        rest = table.part(others)
        refuse_text(rest)
        numbers[:, others] = check_array(rest, dtype=np.float64, ensure_all_finite=False, ensure_min_samples=0)
    for place, values in known.items():
        numbers[:, place] = _numbers(table, place, values)
    return table.with_numbers(numbers)


def _numbers(table: Table, place: int, values: Sequence[Any]) -> Array:
    number_of = {value: float(number) for number, value in enumerate(values)}
    has_text = any(isinstance(value, str) for value in values)
    typed = table.categories(place)
    if typed is not None:
        if typed and values and any(isinstance(value, str) for value in typed) != has_text:
            raise _other_kind(table, place, values, f"categories such as {typed[0]!r:.60}")
        return table.category_numbers(place, number_of)
    if has_text and table.kind(place) != "O":
        raise _other_kind(table, place, values, str(table.dtype(place)))
    if values and not has_text:
        text = next((cell for cell in table.cells(place) if isinstance(cell, str)), None)
        if text is not None:
            raise _other_kind(table, place, values, f"text such as {text!r:.60}")
    return table.category_numbers(place, number_of)


def _other_kind(table: Table, place: int, values: Sequence[Any], got: str) -> TreesError:
    kind = "text as categories" if isinstance(values[0], str) else "categories that are no text"
    return TreesError(
        f"X: {table.shown(place)} has {kind}, such as {values[0]!r:.60}, got {got}; give the same column as at fit"
    )


def _distinct(cells: Sequence[Any]) -> list[Any]:
    """The values of a column, missing ones left out."""
    return [plain(value) for value in set(cells) if isinstance(value, str) or not is_missing(value)]


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
