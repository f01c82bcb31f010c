"""Bins: numbers fall where their thresholds say, in both layouts; missing values and categories have their places."""

from __future__ import annotations

import numpy as np
import pytest

from bitplan.base.loops import row_pieces
from bitplan.trees.binning import Bins, bin_rows, find_bins
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


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_largest_numbers_are_kept_apart_without_a_warning(dtype):
    """The difference of two of them is infinite; -largest has no number below it that a limit could be."""
    largest = np.finfo(dtype).max
    x = np.array([-largest, np.nextafter(-largest, dtype(0)), 0, largest], dtype)[:, None]
    bins = find_bins(x, np.zeros(1, bool), 255, 0)
    assert bin_rows(x, bins).columns[0].tolist() == [0, 1, 2, 3]
    wide = find_bins(np.array([[-1.7e308], [1.7e308]]), np.zeros(1, bool), 255, 0)
    assert bin_rows(np.array([[-1.7e308], [1.7e308]]), wide).columns[0].tolist() == [0, 1]


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


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, ">f8"])
def test_bins_are_numpys_and_a_table_is_not_copied(monkeypatch, order, dtype):
    rng = np.random.default_rng(0)
    x = np.asarray(rng.standard_normal((3000, 5)).round(2).astype(dtype), order=order)
    x[::7, 1], x[::5, 2] = np.nan, 0.0
    bins = find_bins(x, np.zeros(5, bool), 255, 0)
    used = []
    run = row_pieces.run
    monkeypatch.setattr(row_pieces, "run", lambda loop, *given: used.append(given[2]) or run(loop, *given))
    data = bin_rows(x, bins)
    assert (used == [x.ctypes.data]) == x.dtype.isnative
    for column, (edges, numbers) in enumerate(zip(bins.edges, x.T.astype(np.float64), strict=True)):
        expected = np.where(np.isnan(numbers), 255, np.searchsorted(edges, numbers))
        np.testing.assert_array_equal(data.columns[column], expected)


def test_float32_limits_keep_numbers_on_their_sides():
    """Limits between two float32 that touch, and beyond the largest."""
    numbers = np.array([1.0, np.nextafter(np.float32(1), np.float32(2)), 3.4e38, -3.4e38, 0.0, -0.0], np.float32)
    limits = np.sort(np.array([1.0 + 2.0**-25, 1e300, -1e300, -0.0, 3.4e38]))
    data = bin_rows(np.tile(numbers, (1, 1)).T, Bins((limits,), np.zeros(1, bool), np.zeros(1, np.int64)))
    np.testing.assert_array_equal(data.columns[0], np.searchsorted(limits, numbers.astype(np.float64)))
