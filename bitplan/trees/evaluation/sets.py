"""`eval_set`: one pair (X, y), or several of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bitplan.trees.gradients import TreesError


def eval_pairs(eval_set: Any, eval_sample_weight: Any = None) -> list[tuple[Any, Any, Any]]:
    """(X, y, weights) of each set. Several sets are a list or tuple of tuples; anything else of two parts is a pair."""
    if eval_set is None:
        if eval_sample_weight is not None:
            raise TreesError("eval_sample_weight: there is no eval_set to weigh; give both or neither")
        return []
    is_list = isinstance(eval_set, (list, tuple))
    several = is_list and len(eval_set) > 0 and all(isinstance(pair, tuple) for pair in eval_set)
    pairs = list(eval_set) if several else [eval_set]
    if not is_list or any(len(pair) != 2 for pair in pairs):
        raise TreesError(
            f"eval_set: expected (X, y) or a list of such pairs, got {type(eval_set).__name__} of "
            f"{len(eval_set) if is_list else 'no'} parts"
        )
    weights = _weights_of(eval_sample_weight, len(pairs), several)
    return [(x, y, weight) for (x, y), weight in zip(pairs, weights, strict=True)]


def _weights_of(given: Any, sets: int, several: bool) -> Sequence[Any]:
    if given is None:
        return [None] * sets
    if not several:
        return [given]
    if not isinstance(given, (list, tuple)) or len(given) != sets:
        raise TreesError(f"eval_sample_weight: expected a list with the weights of each of {sets} sets, or None")
    return given
