"""Numbers to bins: at most 255 for each feature, found once, from a sample; bin 255 is for missing values.

Few distinct numbers get a bin each, with the limit halfway to the next; many get bins of about equal numbers of rows.
A categorical feature's bins are its categories, at most 255 of them, the rarest of too many being treated as missing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bitplan.kernels import trees_rows
from bitplan.kernels.jit import on_threads
from bitplan.kernels.trees_histogram import PANEL
from bitplan.trees.gradients import Array, TreesError

MAX_BINS = 255
MAX_CATEGORY = 255  # the largest number that may stand for a category
SAMPLE_ROWS = 200_000
ROWS_AT_ONCE = 2**13


@dataclass(frozen=True)
class Bins:
    """For each feature the upper limits of its bins but the last, or its categories."""

    edges: tuple[Array, ...]
    is_category: Array

    @property
    def counts(self) -> Array:
        """Bins of each feature, the one for missing values not counted."""
        sizes = [len(edges) + (0 if kind else 1) for edges, kind in zip(self.edges, self.is_category, strict=True)]
        return np.array(sizes, np.int64)


@dataclass(frozen=True)
class BinnedRows:
    """The same bins twice: columns (features, rows) for partitions, panels (16 bytes a row each) for histograms."""

    columns: Array
    panels: tuple[Array, ...]  # uint64, two words a row
    widths: tuple[int, ...]  # features in each panel

    @property
    def rows(self) -> int:
        return int(self.columns.shape[1])


def find_bins(x: Array, categorical: Array, max_bins: int, seed: int) -> Bins:
    """Bins from at most SAMPLE_ROWS rows of x."""
    sample = x
    if len(x) > SAMPLE_ROWS:
        chosen = np.random.default_rng(seed).choice(len(x), SAMPLE_ROWS, replace=False)
        chosen.sort()
        sample = x[chosen]

    def edges(feature: int) -> Array:
        if categorical[feature]:
            return _categories(x[:, feature], feature, max_bins)
        return _limits(sample[:, feature], max_bins)

    return Bins(tuple(on_threads(edges, range(x.shape[1]))), np.asarray(categorical, np.bool_))


def bin_rows(x: Array, bins: Bins) -> BinnedRows:
    """Every number of x replaced by its bin."""
    rows, features = x.shape
    columns = np.empty((features, rows), np.uint8)
    firsts = range(0, features, PANEL)
    panels = tuple(np.zeros((rows, PANEL), np.uint8) for _ in firsts)

    def work(piece: tuple[int, int]) -> None:
        first, start = piece
        stop = min(start + ROWS_AT_ONCE, rows)
        for feature in range(first, min(first + PANEL, features)):
            kernel = trees_rows.bin_categories if bins.is_category[feature] else trees_rows.bin_numbers
            panel, place = panels[feature // PANEL], feature % PANEL
            kernel(x[start:stop, feature], bins.edges[feature], start, panel, columns[feature], place)

    on_threads(work, [(first, start) for start in range(0, rows, ROWS_AT_ONCE) for first in firsts])
    words = tuple(panel.view(np.uint64).reshape(-1) for panel in panels)
    return BinnedRows(columns, words, tuple(min(PANEL, features - first) for first in firsts))


def _limits(numbers: Array, max_bins: int) -> Array:
    present = np.sort(numbers[~np.isnan(numbers)].astype(np.float64))
    starts = np.flatnonzero(np.diff(present, prepend=np.nan) != 0)  # of each distinct number
    if len(starts) > max_bins:
        # A cut after every 1/max_bins of the rows, moved to the end of the run of equal numbers it falls into.
        wanted = np.arange(1, max_bins) * (len(present) / max_bins)
        cuts = np.unique(np.searchsorted(starts, wanted, side="left"))
        cuts = cuts[(cuts > 0) & (cuts < len(starts))]
    else:
        cuts = np.arange(1, len(starts))
    below, above = present[starts[cuts - 1]], present[starts[cuts]]
    middle = below + (above - below) / 2
    return np.where(middle < above, middle, below)  # two floats that touch have no middle


def _categories(numbers: Array, feature: int, max_bins: int) -> Array:
    found, counts = np.unique(numbers[~np.isnan(numbers)], return_counts=True)
    wrong = found[(found < 0) | (found > MAX_CATEGORY) | (found != np.floor(found))]
    if len(wrong):
        raise TreesError(
            f"X: feature {feature} is categorical, so its values must be whole numbers from 0 to {MAX_CATEGORY}, "
            f"got {wrong[0]:g}; encode it first (sklearn.preprocessing.OrdinalEncoder), or leave it numeric"
        )
    kept = np.sort(np.argsort(-counts, kind="stable")[:max_bins])
    return found[kept].astype(np.float64)
