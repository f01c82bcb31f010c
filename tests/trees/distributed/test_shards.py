"""Sums and medians that do not depend on how rows are divided."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bitplan.trees.distributed.shards import (
    ALONE,
    Span,
    average,
    find_medians,
    find_quantiles,
    sorted_quantile,
    sum_exactly,
    whole_weights,
)

FLOATS = st.lists(st.floats(-1e12, 1e12, allow_subnormal=True), max_size=30)


class OtherProcessIsEmpty:
    """As if a second process had no rows: the ways of several processes, with results that one can compute."""

    rank, count = 0, 2

    def add(self, integers, what):
        return integers

    def top(self, numbers, what):
        return numbers

    def gather(self, part, what):
        return [part, part[:0]]


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(FLOATS, st.randoms())
def test_sum_is_right_and_has_no_order(numbers, random):
    (result,) = sum_exactly([np.array(numbers)], ALONE)
    exact = float(sum(map(Fraction, numbers), Fraction(0)))
    assert result == pytest.approx(exact, rel=1e-15, abs=1e-20 * max(map(abs, numbers), default=0))
    random.shuffle(numbers)
    assert sum_exactly([np.array(numbers)], ALONE) == [result]


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [([], 0.0), ([0.0, -0.0], 0.0), ([5e-324, 5e-324], 1e-323), ([1.7e308], 1.7e308), ([1e16, 1.0, -1e16], 1.0)],
)
def test_sums_at_the_ends(numbers, expected):
    assert sum_exactly([np.array(numbers)], ALONE) == [expected]


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_sum_of_what_is_not_finite_is_infinite(odd):
    assert sum_exactly([np.array([1.0, odd]), np.array([2.0])], ALONE) == [math.inf, 2.0]


def test_a_sum_that_no_float_holds_is_infinite():
    assert sum_exactly([np.full(9, 1e308), np.full(9, -1e308)], ALONE) == [math.inf, -math.inf]
    assert average(np.full(3, 1e300), np.full(3, 1e30), ALONE) == math.inf


def test_average_with_and_without_weights():
    numbers = np.array([1.0, 2.0, 6.0])
    assert average(numbers, np.empty(0), ALONE) == 3.0
    assert average(numbers, np.array([1.0, 1.0, 0.0]), ALONE) == 1.5


def test_span_counts_the_rows_before():
    class Second(OtherProcessIsEmpty):
        rank = 1

        def gather(self, part, what):
            return [np.array([7]), part]

    assert Span.of(3, Second()).first == 7
    assert Span.of(3, Second()).total == 10


@settings(deadline=None)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=40), st.booleans())
def test_median_byte_by_byte_is_the_sorted_one(numbers, is_weighted):
    numbers = np.array(numbers)
    weights = np.random.default_rng(0).integers(1, 5, len(numbers)) / 4 if is_weighted else np.empty(0)
    groups = [np.arange(len(numbers)), np.arange(0, len(numbers), 2)]
    shards = OtherProcessIsEmpty()
    result = find_medians(numbers, weights, groups, shards)
    np.testing.assert_array_equal(result, find_medians(numbers, weights, groups, ALONE))
    if not is_weighted:
        np.testing.assert_array_equal(result, [np.median(numbers[rows]) for rows in groups])


def test_a_median_among_numbers_that_differ_in_their_last_bytes_alone():
    numbers = 1 + np.array([0, 256, 257]) * 2.0**-52
    assert find_medians(numbers, np.empty(0), [np.arange(3)], OtherProcessIsEmpty()).tolist() == [numbers[1]]


def test_weighted_median_is_where_half_the_weight_is_reached():
    numbers, weights = np.array([3.0, 1.0, 2.0]), whole_weights(np.array([0.5, 0.25, 0.25]), ALONE)
    assert sorted_quantile(numbers, weights) == 2.0
    assert sorted_quantile(numbers, whole_weights(np.array([0.5000001, 0.25, 0.25]), ALONE)) == 3.0


def test_quantiles_are_numpys():
    numbers, groups = np.random.default_rng(3).standard_normal(101), [np.arange(40), np.arange(40, 101)]
    for share in (0.01, 0.3, 0.5, 0.97):
        expected = [np.quantile(numbers[rows], share) for rows in groups]
        np.testing.assert_allclose(find_quantiles(numbers, np.empty(0), groups, share, ALONE), expected, rtol=1e-12)
