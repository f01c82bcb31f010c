"""Settings that go by feature: which are categorical, which are monotone. Features go by name or by place."""

from __future__ import annotations

import numbers
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from bitplan.errors import did_you_mean
from bitplan.trees.gradients import Array, TreesError

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
