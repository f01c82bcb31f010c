"""Crosses of parameters, of which every run takes a part: `@pytest.mark.cross`, written as `parametrize` is."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise by the `cross` marks of a test: all combinations, of which those that `covering` leaves are `long`.

    `@pytest.mark.cross` is written as `@pytest.mark.parametrize` is. Where the run leaves `long` tests out, those
    combinations are not even made: collecting thousands of tests takes longer than running hundreds.
    """
    axes = [_axis(*mark.args, **mark.kwargs) for mark in metafunc.definition.iter_markers("cross")]
    if not axes:
        return
    names = [name for axis_names, _ in axes for name in axis_names]
    always = [[place for place, value in enumerate(values) if not _is_long(value)] for _, values in axes]
    chosen = {
        tuple(places[at] for places, at in zip(always, row, strict=True)) for row in covering([len(p) for p in always])
    }
    rows = []
    for places in itertools.product(*(range(len(values)) for _, values in axes)):
        if places not in chosen and metafunc.config.option.markexpr == "not long":
            continue
        parts = [values[place] for (_, values), place in zip(axes, places, strict=True)]
        marks = [mark for part in parts for mark in part.marks] + [pytest.mark.long] * (places not in chosen)
        values = [value for part in parts for value in part.values]
        rows.append(pytest.param(*values, marks=marks, id="-".join(str(part.id) for part in parts)))
    metafunc.parametrize(names, rows)


def covering(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Of the combinations of `sizes` values, few in which each value occurs, and each pair at most once if it can."""
    longest = max(range(len(sizes)), key=lambda axis: sizes[axis])
    used: Counter[Any] = Counter()

    def repetition(places: tuple[int, ...]) -> tuple[int, int]:
        placed = list(enumerate(places))
        return sum(used[pair] for pair in itertools.combinations(placed, 2)), sum(used[value] for value in placed)

    for place in range(sizes[longest]):
        ranges = [[place] if axis == longest else range(size) for axis, size in enumerate(sizes)]
        best = min(itertools.product(*ranges), key=repetition)
        placed = list(enumerate(best))
        used.update(itertools.chain(placed, itertools.combinations(placed, 2)))
        yield best


def _axis(names: str | Sequence[str], values: Any, ids: Any = None) -> tuple[list[str], list[Any]]:
    """The names of one `cross` mark, and its values as `pytest.param` with ids."""
    split = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    params = []
    given = [None] * len(list(values)) if ids is None or callable(ids) else list(ids)
    for value, stated in zip(values, given, strict=True):
        param = value if hasattr(value, "marks") else pytest.param(*(value if len(split) > 1 else (value,)))
        shown = stated or param.id or "-".join(ids(each) if callable(ids) else _shown(each) for each in param.values)
        params.append(pytest.param(*param.values, marks=param.marks, id=shown))
    return split, params


def _is_long(param: Any) -> bool:
    return any(mark.name == "long" for mark in param.marks)


def _shown(value: Any) -> str:
    return str(getattr(value, "__name__", value)).removeprefix("torch.")


def few(values: Iterable[Any], count: int) -> list[Any]:
    """Of many alike, `count` spread over the list for every run; `make test-all` takes the others, too.

    As in `parametrize`, a tuple is one value of each argument.
    """
    listed = [
        value if hasattr(value, "marks") else pytest.param(*(value if type(value) is tuple else (value,)))
        for value in values
    ]
    often = [place for place, value in enumerate(listed) if not _is_long(value)]
    always = {often[round(at * (len(often) - 1) / max(count - 1, 1))] for at in range(count)}
    return [
        value if place in always else pytest.param(*value.values, id=value.id, marks=[*value.marks, pytest.mark.long])
        for place, value in enumerate(listed)
    ]
