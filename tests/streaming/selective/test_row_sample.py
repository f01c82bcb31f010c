"""The sample of rows: the same again, evenly spread, unbiased, with the variance that is stated."""

from __future__ import annotations

import statistics

import pytest

from bitplan.streaming.selective.layer_probes import sample_rows


@pytest.mark.parametrize(("count", "most"), [(64, 16), (60, 7), (4096, 1024), (5, 4), (1000, 1)])
def test_one_row_of_every_stretch_and_the_same_again(count, most):
    rows = sample_rows(count, most, "step 3")
    assert rows == sample_rows(count, most, "step 3")
    assert len(rows) == most
    assert rows == sorted(rows)
    for at, row in enumerate(rows):
        assert at * count // most <= row <= (at + 1) * count / most
        assert row < count
    others = [sample_rows(count, most, f"step {step}") for step in range(20)]
    assert any(other != rows for other in others)


def test_the_drawing_does_not_change():
    """A resumed run takes the rows that the first one would have: Python 3.6 to 3.13 draw these."""
    assert sample_rows(64, 8, "step 0") == [0, 9, 23, 24, 32, 45, 50, 61]


@pytest.mark.parametrize(("count", "most"), [(64, 0), (64, 64), (64, 1000), (0, 0), (1, 1)])
def test_all_rows(count, most):
    assert sample_rows(count, most, "step 0") is None


@pytest.mark.parametrize(("count", "most"), [(64, 16), (60, 7), (9, 8)])
def test_every_row_is_drawn_as_often(count, most):
    draws = 4000
    counts = [0] * count
    for key in range(draws):
        for row in sample_rows(count, most, str(key)):
            counts[row] += 1
    expected = draws * most / count
    assert sum(counts) == draws * most
    assert all(abs(result - expected) < 5 * expected**0.5 for result in counts)


def test_the_estimate_has_the_sum_for_its_mean_and_the_stated_variance():
    count, most, draws = 64, 16, 4000
    numbers = [((7 * at) % 13 - 6) * (1 + at / 10) for at in range(count)]
    estimates = [count / most * sum(numbers[row] for row in sample_rows(count, most, str(key))) for key in range(draws)]
    length = count // most
    within = [statistics.pvariance(numbers[at : at + length]) for at in range(0, count, length)]
    variance = length**2 * sum(within)
    assert statistics.mean(estimates) == pytest.approx(sum(numbers), abs=4 * (variance / draws) ** 0.5)
    assert statistics.pvariance(estimates) == pytest.approx(variance, rel=0.1)
