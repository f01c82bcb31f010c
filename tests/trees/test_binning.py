"""Bins: numbers fall where their thresholds say, in both layouts; missing values and categories have their places."""

from __future__ import annotations

import numpy as np
import pytest

from bitplan.trees.binning import bin_rows, find_bins
from bitplan.trees.gradients import TreesError


def bins_of(*columns, categorical=(), max_bins=255):
    x = np.column_stack([np.asarray(column, np.float64) for column in columns])
    bins = find_bins(x, np.isin(np.arange(x.shape[1]), categorical), max_bins, 0)
    return bin_rows(x, bins), bins


def test_few_distinct_numbers_get_a_bin_each():
    data, bins = bins_of([3, 1, 2, 1, np.nan])
    assert bins.edges[0].tolist() == [1.5, 2.5]
    assert data.columns[0].tolist() == [2, 0, 1, 0, 255]


def test_many_numbers_get_bins_of_equal_size():
    numbers = np.random.default_rng(0).standard_normal(100_000)
    data, bins = bins_of(numbers)
    counts = np.bincount(data.columns[0])
    assert len(counts) == 255
    assert counts.min() > 0.95 * counts.mean()
    assert counts.max() < 1.05 * counts.mean()
    expected = np.searchsorted(bins.edges[0], numbers, side="left")
    np.testing.assert_array_equal(data.columns[0], expected)


def test_a_number_that_fills_half_the_rows_has_one_bin():
    numbers = np.concatenate([np.zeros(5000), np.random.default_rng(0).random(5000) + 1])
    data, bins = bins_of(numbers, max_bins=16)
    assert len(bins.edges[0]) < 16
    assert (data.columns[0][:5000] == data.columns[0][0]).all()
    assert (data.columns[0][5000:] != data.columns[0][0]).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_neighbours_are_kept_apart(dtype):
    low = dtype(1)
    numbers = np.array([low, np.nextafter(low, dtype(2))])
    x = numbers[:, None]
    data = bin_rows(x, find_bins(x, np.zeros(1, bool), 255, 0))
    assert data.columns[0].tolist() == [0, 1]


def test_constant_and_all_missing():
    data, bins = bins_of([5, 5], [np.nan, np.nan])
    assert bins.counts.tolist() == [1, 1]
    assert data.columns.tolist() == [[0, 0], [255, 255]]


def test_panels_hold_the_same_bins():
    x = np.random.default_rng(0).standard_normal((300, 37))
    data = bin_rows(x, find_bins(x, np.zeros(37, bool), 255, 0))
    assert data.widths == (32, 5)
    assert all(panel.ctypes.data % 64 == 0 for panel in data.panels)
    panels = np.concatenate([panel.view(np.uint8).reshape(300, -1) for panel in data.panels], axis=1)
    np.testing.assert_array_equal(panels[:, :37].T, data.columns)


def test_categories_keep_their_numbers_and_the_rarest_are_missing():
    data, bins = bins_of([7, 2, 7, 2, 9, np.nan], categorical=(0,), max_bins=2)
    assert bins.edges[0].tolist() == [2, 7]
    assert data.columns[0].tolist() == [1, 0, 1, 0, 255, 255]


def test_many_categories_have_several_columns():
    data, bins = bins_of([*range(300), *range(200)], list(range(500)), categorical=(0,))
    assert bins.features.tolist() == [0, 0, 1]
    assert sorted(np.concatenate(bins.edges[:2])) == list(range(300))
    assert ((data.columns[0] == 255) != (data.columns[1] == 255)).all()  # each row is in one of them


@pytest.mark.parametrize("wrong", [-1, 0.5, 65536])
def test_what_is_no_category_is_refused(wrong):
    with pytest.raises(TreesError, match=r"feature 0 is categorical.*OrdinalEncoder"):
        bins_of([1, wrong], categorical=(0,))
