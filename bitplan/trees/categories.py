"""Categories that are no numbers: columns of a frame's type of categories, and text, become whole numbers.

The number of a category is its place among the sorted categories that `fit` saw, in all processes; `predict` looks
values up, whatever the column's own numbering is. A value that `fit` did not see is missing, and goes with the rest.

Settings go by feature, too: which are categorical, which are monotone. A feature is named or numbered.
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
    """The index of the feature that the setting `where` names, by name or number."""
    known_names = list(names)
    if name in known_names:
        return known_names.index(name)
    if isinstance(name, numbers.Integral) and 0 <= int(name) < features:
        return int(name)
    hint = did_you_mean(str(name), map(str, known_names))
    raise TreesError(f"{where}: no feature {name!r:.80}; expected a column name, or 0 to {features - 1}{hint}")


def monotone_signs(constraints: Any, names: Sequence[Any], features: int) -> Array:
    """The monotone constraint of each feature: -1, 0 or 1."""
    if constraints is None:
        return np.zeros(features, np.int64)
    if isinstance(constraints, dict):
        signs = [0] * features
        for name, sign in constraints.items():
            signs[feature_place("monotone_constraints", name, names, features)] = sign
        constraints = signs
    constraints = constraints.tolist() if isinstance(constraints, np.ndarray) else constraints
    is_list = isinstance(constraints, Sequence) and not isinstance(constraints, str)
    if not is_list or len(constraints) != features or any(sign not in (-1, 0, 1) for sign in constraints):
        raise TreesError(
            f"monotone_constraints: expected {features} numbers, one a feature, each -1, 0 or 1, "
            f"got {constraints!r:.80}"
        )
    return np.array(constraints, np.int64)


def interaction_groups(constraints: Any, names: Sequence[Any], features: int) -> Array | None:
    """A bit for every group that a feature is in, by feature; features that no group names are a group of their own."""
    if constraints is None:
        return None
    is_list = isinstance(constraints, (list, tuple)) and all(
        isinstance(group, Collection) and not isinstance(group, (str, bytes, dict)) for group in constraints
    )
    if not is_list:
        raise TreesError(f"interaction_constraints: expected a list of lists of features, got {constraints!r:.60}")
    where = "interaction_constraints"
    named_groups = [{feature_place(where, name, names, features) for name in group} for group in constraints]
    rest = set(range(features)).difference(*named_groups) if named_groups else set(range(features))
    groups = [*named_groups, rest] if rest else named_groups
    if len(groups) > MAX_GROUPS:
        raise TreesError(f"interaction_constraints: expected at most {MAX_GROUPS} groups, got {len(groups)}")
    bits = np.zeros(features, np.int64)
    for number, group in enumerate(groups):
        bits[list(group)] |= 1 << number
    return bits


def category_flags(setting: Any, names: Sequence[Any], features: int) -> Array:
    """Whether each feature is categorical, by the setting `categorical_features`."""
    is_category = np.zeros(features, np.bool_)
    setting = () if setting is None else setting
    if isinstance(setting, (str, bytes, dict)) or not isinstance(setting, Collection):
        raise TreesError(
            f"categorical_features: expected a list of names or places, or a flag for each feature, got {setting!r:.60}"
            "; columns of a categorical type are categorical without it"
        )
    if len(setting) == features and all(isinstance(flag, (bool, np.bool_)) for flag in setting):
        return np.array(setting, np.bool_)
    for name in setting:
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
        for index in range(table.count):
            typed = table.categories(index)
            if typed is not None:
                values = [plain(value) for value in typed]
            elif index in before or (named[index] and table.kind(index) == "O"):
                values = _distinct(table.cells(index))
                if index not in before and not any(isinstance(value, str) for value in values):
                    continue  # numbers in an array of objects
            else:
                continue
            learned[index] = _checked(values, table.shown(index))
    if shards.count > 1:
        parts = gather_json({str(index): values for index, values in learned.items()}, "categories", shards)
        indices = sorted({int(index) for part in parts for index in part})
        together = {index: [value for part in parts for value in part.get(str(index), ())] for index in indices}
        learned = {index: _checked(list(set(values)), f"column {index}") for index, values in together.items()}
    return {
        index: [*before.get(index, ()), *sorted(set(learned.get(index, ())) - set(before.get(index, ())))]
        for index in sorted({*before, *learned})
    }


def encode(x: Any, categories: Known) -> Any:
    """X with numbers for categories: a frame as before, with the same names, or an array."""
    table = table_of(x)
    if table is None or not categories or max(categories) >= table.count:
        return x  # another number of features is refused later
    others = [index for index in range(table.count) if index not in categories]
    numbers = np.empty((len(x), table.count))
    if others:
        rest = table.part(others)
        refuse_text(rest)
        numbers[:, others] = check_array(rest, dtype=np.float64, ensure_all_finite=False, ensure_min_samples=0)
    for index, values in categories.items():
        numbers[:, index] = _numbers(table, index, values)
    return table.with_numbers(numbers)


def _numbers(table: Table, index: int, values: Sequence[Any]) -> Array:
    number_of = {value: float(number) for number, value in enumerate(values)}
    has_text = any(isinstance(value, str) for value in values)
    typed = table.categories(index)
    if typed is not None:
        if typed and values and any(isinstance(value, str) for value in typed) != has_text:
            raise _other_kind(table, index, values, f"categories such as {typed[0]!r:.60}")
        return table.category_numbers(index, number_of)
    if has_text and table.kind(index) != "O":
        raise _other_kind(table, index, values, str(table.dtype(index)))
    if values and not has_text:
        text = next((cell for cell in table.cells(index) if isinstance(cell, str)), None)
        if text is not None:
            raise _other_kind(table, index, values, f"text such as {text!r:.60}")
    return table.category_numbers(index, number_of)


def _other_kind(table: Table, index: int, values: Sequence[Any], got: str) -> TreesError:
    kind = "text as categories" if isinstance(values[0], str) else "categories that are no text"
    return TreesError(
        f"X: {table.shown(index)} has {kind}, such as {values[0]!r:.60}, got {got}; give the same column as at fit"
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
