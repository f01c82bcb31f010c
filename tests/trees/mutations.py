"""Damaged model files: what an editor, a broken disk or an attacker makes of a document. Knows the file's structure."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

ODD = [
    None, True, False, 0, -1, 1, 2, 255, 256, 2**31, -(2**31) - 1, 2**53 + 1, 2**62, 2**63, 2**64, -(2**64), 10**400,
    0.5, -0.0, 1e308, -1e308, 5e-324, float("inf"), float("nan"), "", "a", "NaN", "\ud800", [], {}, [[]], [{}],
    {"a": 1}, [None], [10**400], ["x"], [0.5] * 3,
]  # fmt: skip


def mutations(document: Any, seed: int) -> Iterator[Any]:
    """Without end: copies of a JSON document, each with one to three changes; the same for the same seed."""
    rng = random.Random(seed)
    while True:
        changed = copy.deepcopy(document)
        for _ in range(rng.choice([1, 1, 2, 3])):
            changed = _change(changed, rng)
        yield changed


def _change(document: Any, rng: random.Random) -> Any:
    places = list(_places(document))
    if not places:
        return copy.deepcopy(rng.choice(ODD))
    # A place is drawn by its depth first: else nearly every change would hit a number of a tree.
    depth = rng.choice(sorted({len(path) for path in places}))
    path = rng.choice([path for path in places if len(path) == depth])
    holder = document
    for step in path[:-1]:
        holder = holder[step]
    at, how = path[-1], rng.randrange(7)
    value = holder[at]
    if how == 0:
        del holder[at]
    elif how == 1:
        other = document
        for step in rng.choice(places):
            other = other[step]
        holder[at] = copy.deepcopy(other)
    elif how == 2 and isinstance(value, int | float) and not isinstance(value, bool):
        holder[at] = rng.choice([value + 1, value - 1, -value, value * 2, ~value if isinstance(value, int) else value])
    elif how == 3 and isinstance(value, list) and value:
        place = rng.randrange(len(value))
        rng.choice([value.reverse, value.clear, lambda: value.append(value[place]), lambda: value.pop(place)])()
    elif how == 4 and isinstance(value, dict):
        value[rng.choice(["", "extra", "0", *value])] = copy.deepcopy(rng.choice(ODD))
    elif how == 5:
        deep: Any = value
        for _ in range(rng.choice([1, 3, 200])):
            deep = [deep]
        holder[at] = deep
    else:
        holder[at] = copy.deepcopy(rng.choice(ODD))
    return document


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, item in list(items):
        yield (*path, step)
        yield from _places(item, (*path, step))
