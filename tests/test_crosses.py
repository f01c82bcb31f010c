"""What every run takes of a cross of parameters: each value, and no pair twice where there are others."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import LONGEST
from tests.crosses import covering, few


@pytest.mark.parametrize("sizes", [(1,), (5,), (35, 13), (3, 3), (3, 11, 7), (2, 2, 3, 3), (12, 3, 2)], ids=str)
def test_every_value_is_there_and_pairs_are_spread(sizes):
    rows = list(covering(sizes))
    assert len(rows) == max(sizes)
    for axis, size in enumerate(sizes):
        assert {row[axis] for row in rows} == set(range(size))
    for one, other in itertools.combinations(range(len(sizes)), 2):
        most = max(Counter((row[one], row[other]) for row in rows).values())
        assert most <= -(-len(rows) // (sizes[one] * sizes[other])) + 1


@pytest.mark.cross("letter", ["a", "b", "c"])
@pytest.mark.cross(("digit", "sign"), [(1, "+"), pytest.param(2, "-", id="two")])
def test_a_cross_names_its_tests_as_parametrize_does(letter, digit, sign, request):
    shown = f"{digit}-{sign}" if digit == 1 else "two"
    assert request.node.name.endswith(f"[{shown}-{letter}]")


def test_a_few_are_spread_over_the_list():
    rows = few([1, (2, 3), 4, 5, 6], 3)
    assert [row.values for row in rows] == [(1,), (2, 3), (4,), (5,), (6,)]
    assert [bool(row.marks) for row in rows] == [False, True, False, True, False]


def test_files_that_are_to_begin_first_exist():
    missing = [name for name in LONGEST if not (Path(__file__).parents[1] / name).is_file()]
    assert missing == []
