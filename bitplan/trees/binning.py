"""Numbers to bins: at most 255 for each feature, found once, from a sample; bin 255 is for missing values.

Few distinct numbers get a bin each, with the limit halfway to the next; many get bins of about equal numbers of rows.
A categorical feature's bins are its categories. One of more than 256 categories has several columns of bins, each with
some of them, to which the others are missing: a split then chooses its set among those of one column. Of more
categories than 16 columns hold, and where `max_bins` is less than 255, the rarest are treated as missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitplan.base.loops import row_pieces
from bitplan.base.loops.jit import on_threads, thread_count
from bitplan.trees.distributed.shards import ALONE, Array, Shards, Span, TreesError
from bitplan.trees.loops import rows as trees_rows
from bitplan.trees.loops.histogram import PANEL, words_a_row
from bitplan.trees.pieces import TablePieces

MAX_BINS = 255
MAX_CATEGORY = 2**16 - 1  # the largest number that may stand for a category
ONE_COLUMN = 256  # categories; more have several columns
MAX_COLUMNS = 16  # of bins, for one feature
SAMPLE_ROWS = 200_000
GATHERED = 2**17  # numbers of a sample that are worth a thread
ROWS_AT_ONCE = 2**14  # of categories
BIN_NS, COPY_NS = 4.0, 1.0  # of a number
CACHE_LINE = 64  # bytes


@dataclass(frozen=True)
class Bins:
    """The bins of each column: the upper limits of all but the last, or its categories, and the column's feature."""

    edges: tuple[Array, ...]
    is_category: Array
    features: Array

    @property
    def counts(self) -> Array:
        """How many bins each column has, without that for missing values."""
        sizes = [len(edges) + (0 if kind else 1) for edges, kind in zip(self.edges, self.is_category, strict=True)]
        return np.array(sizes, np.int64)


@dataclass(frozen=True)
class BinnedRows:
    """Bins in panels of up to 32 columns, for histograms; and space for columns (columns, rows), for partitions.

    A team of threads copies the columns that it needs (`trees.loops.grow_tree`): space that is not written to is not
    memory yet.
    """

    space: Array
    is_there: Array  # by column: 1 if it is copied
    words: Array  # uint64, all panels, one after the other
    firsts: Array  # where each panel begins
    widths: tuple[int, ...]  # columns in each panel

    @property
    def rows(self) -> int:
        return int(self.space.shape[1])

    @property
    def panels(self) -> tuple[Array, ...]:
        """The bins as panels of up to 32 columns, `words_a_row` 64-bit words for each row."""
        sizes = [self.rows * words_a_row(width) for width in self.widths]
        return tuple(self.words[first : first + size] for first, size in zip(self.firsts, sizes, strict=True))

    @property
    def panel_bytes(self) -> list[Array]:
        """The same panels as bytes: a row of the array for each row of the table."""
        widths = (8 * words_a_row(width) for width in self.widths)
        return [
            panel.view(np.uint8).reshape(self.rows, width) for panel, width in zip(self.panels, widths, strict=True)
        ]

    @property
    def columns(self) -> Array:
        """The bins by column; columns that were not copied from the panels yet are copied now."""
        panels = self.panel_bytes
        for column in np.flatnonzero(self.is_there == 0).tolist():
            cut = row_pieces.Cut(panels[column // PANEL]), column % PANEL, row_pieces.Cut(self.space[column])
            row_pieces.run(trees_rows.copy_column, self.rows, COPY_NS, *cut)
        self.is_there[:] = 1
        return self.space


def blocks_of(x: Array | TablePieces) -> Iterator[tuple[int, Array]]:
    """Yield (number of the first row, rows) for each block of a table; an array in memory is one block."""
    if isinstance(x, TablePieces):
        yield from x.blocks()
    else:
        yield 0, x


def find_bins(x: Array | TablePieces, categorical: Array, max_bins: int, seed: int, span: Span | None = None) -> Bins:
    """Bins from at most SAMPLE_ROWS rows; x has the rows of `span`, and bins are those of the rows of all processes."""
    span = span or Span(ALONE, 0, len(x))
    sample = x
    if span.total > SAMPLE_ROWS:
        chosen = np.random.default_rng(seed).choice(span.total, SAMPLE_ROWS, replace=False)
        chosen.sort()
        chosen = chosen[(chosen >= span.first) & (chosen < span.first + len(x))] - span.first
        sample = _gather(x, chosen)
    sample = np.asarray(sample)
    ordered = [feature for feature in range(x.shape[1]) if not categorical[feature]]
    edges: dict[int, list[Array]] = {}
    step = len(ordered) if span.shards.count == 1 else PANEL  # between processes: no more than a panel's sample at once
    for first in range(0, len(ordered), max(step, 1)):
        block = ordered[first : first + step]
        columns = _from_all(sample, block, span.shards)
        edges |= zip(block, on_threads(lambda column: [_limits(column, max_bins)], columns), strict=True)
    sets = [feature for feature in range(x.shape[1]) if categorical[feature]]
    if sets:
        counted = [np.zeros(1, np.int64) for _ in sets]
        for _, part in blocks_of(x):
            more = on_threads(lambda feature: _count_categories(part[:, feature], feature), sets)  # noqa: B023
            counted = [_padded(old, len(new)) + _padded(new, len(old)) for old, new in zip(counted, more, strict=True)]
        most = np.array([max(map(len, counted))], np.float64)
        size = int(span.shards.top(most, "largest category")[0])
        rows = span.shards.add(np.array([_padded(counts, size) for counts in counted]), "rows of each category")
        edges |= {feature: _categories(part, max_bins) for feature, part in zip(sets, rows, strict=True)}
    features = np.repeat(np.arange(x.shape[1]), [len(edges[feature]) for feature in range(x.shape[1])])
    columns = [column for feature in range(x.shape[1]) for column in edges[feature]]
    return Bins(tuple(columns), np.asarray(categorical, np.bool_)[features], features)


def bin_rows(x: Array | TablePieces, bins: Bins) -> BinnedRows:
    """Replace every number of x by its bin."""
    rows, features = len(x), len(bins.edges)
    firsts = range(0, features, PANEL)
    widths = tuple(min(PANEL, features - first) for first in firsts)
    lines = [-(-rows * words_a_row(width) * 8 // CACHE_LINE) for width in widths]
    begins = np.cumsum([0, *lines[:-1]]) * (CACHE_LINE // 8)
    space, is_there = np.empty((features, rows), np.uint8), np.zeros(features, np.uint8)
    binned = BinnedRows(space, is_there, _aligned(sum(lines)), begins, widths)
    bytes_ = binned.panel_bytes

    limits = np.full((features, trees_rows.MISSING + 1), np.inf)
    for column, (edges, is_category) in enumerate(zip(bins.edges, bins.is_category, strict=True)):
        if not is_category:
            limits[column, : len(edges)] = edges
    in_groups = {kind: _in_groups(limits, kind) for kind in (np.float32, np.float64)}
    numeric, sets = np.flatnonzero(~bins.is_category), np.flatnonzero(bins.is_category)

    for before, block in blocks_of(x):
        table = block if block.dtype.type in in_groups and block.dtype.isnative else block.astype(np.float64)
        loop = trees_rows.bin_float32 if table.dtype == np.float32 else trees_rows.bin_float64
        where = table.ctypes.data, *table.strides, row_pieces.First(), row_pieces.End(), before
        for number, first in enumerate(firsts):
            in_panel = numeric[(numeric >= first) & (numeric < first + PANEL)]
            more = in_panel, bins.features, in_groups[table.dtype.type], bytes_[number], first, widths[number]
            row_pieces.run(loop, len(table), BIN_NS * (len(in_panel) + 1), *where, *more)
        parts = [(start, before, table) for start in range(0, len(table), ROWS_AT_ONCE)] if len(sets) else []
        on_threads(lambda part: _bin_categories(*part, sets, bins, bytes_), parts)
    return binned


def _in_groups(limits: Array, kind: Any) -> Array:
    """Arrange bin limits for the search in `trees.loops.rows`; float32 limits are rounded down, to keep sides."""
    with np.errstate(over="ignore"):  # limits of other processes' float64
        rounded = limits.astype(kind)
        rounded = np.where(rounded > limits, np.nextafter(rounded, kind(-np.inf)), rounded)
    ends = rounded[:, trees_rows.GROUP - 1 :: trees_rows.GROUP]
    return np.concatenate([ends, rounded], axis=1).reshape(-1)


def _bin_categories(start: int, before: int, table: Array, sets: Array, bins: Bins, panels: list[Array]) -> None:
    part = table[start : start + ROWS_AT_ONCE]
    for column in sets:
        into = panels[column // PANEL], column % PANEL
        numbers = np.ascontiguousarray(part[:, bins.features[column]], np.float64)  # one form: one loop is compiled
        trees_rows.bin_categories(numbers, bins.edges[column], before + start, *into)


def _gather(x: Array | TablePieces, chosen: Array) -> Array:
    """Copy some rows, by all threads."""
    if isinstance(x, TablePieces):
        return np.asarray(x[chosen])
    out = np.empty((len(chosen), x.shape[1]), x.dtype)

    step = max(-(-len(chosen) // thread_count()), GATHERED // max(x.shape[1], 1), 1)

    def work(first: int) -> None:
        out[first : first + step] = x[chosen[first : first + step]]

    on_threads(work, range(0, max(len(chosen), 1), step))
    return out


def _aligned(lines: int) -> Array:
    """Uninitialised memory of so many cache lines that begins at one: then no row of bins lies in two."""
    spare = CACHE_LINE // 8
    space = np.empty((lines + 1) * spare, np.uint64)
    first = -space.ctypes.data % CACHE_LINE // 8
    return space[first : first + lines * spare]


def _limits(numbers: Array, max_bins: int) -> Array:
    present = numbers[~np.isnan(numbers)]
    present.sort()  # in its own type: half the work for float32
    is_start = np.ones(len(present), np.bool_)  # of a run of equal numbers
    np.not_equal(present[1:], present[:-1], out=is_start[1:])
    starts = np.flatnonzero(is_start)
    if len(starts) > max_bins:
        # A cut after every 1/max_bins of the rows, moved to the end of the run of equal numbers it falls into.
        quantiles = np.arange(1, max_bins) * (len(present) / max_bins)
        cuts = np.searchsorted(starts, quantiles, side="left")
        cuts = cuts[np.append(True, cuts[1:] > cuts[:-1]) & (cuts > 0) & (cuts < len(starts))]
    else:
        cuts = np.arange(1, len(starts))
    below, above = (present[starts[at]].astype(np.float64) for at in (cuts - 1, cuts))
    with np.errstate(over="ignore"):  # a difference of huge numbers is infinite, and so is no middle
        middle = below + (above - below) / 2
    return np.where(middle < above, middle, below)  # two floats that touch have no middle


def _from_all(sample: Array, block: list[int], shards: Shards) -> list[Array]:
    """The sample's columns of some features, with the rows of all processes."""
    if shards.count == 1:
        return [sample[:, feature] for feature in block]
    parts = shards.gather(sample[:, block].reshape(-1), "sample of rows for bins")
    return list(np.concatenate(parts).reshape(-1, len(block)).T)


def _padded(rows: Array, size: int) -> Array:
    return np.pad(rows, (0, max(size - len(rows), 0)))


def _count_categories(numbers: Array, feature: int) -> Array:
    """Count the rows of each category of a feature."""
    categories, counts = np.unique(numbers[~np.isnan(numbers)], return_counts=True)
    wrong = categories[(categories < 0) | (categories > MAX_CATEGORY) | (categories != np.floor(categories))]
    if len(wrong):
        raise TreesError(
            f"X: feature {feature} is categorical, so its values must be whole numbers from 0 to {MAX_CATEGORY}, "
            f"got {wrong[0]:g}; encode it first (sklearn.preprocessing.OrdinalEncoder), or leave it numeric"
        )
    rows = np.zeros(int(categories.max(initial=0)) + 1, np.int64)
    rows[categories.astype(np.int64)] = counts
    return rows


def _categories(rows: Array, max_bins: int) -> list[Array]:
    """The categories of each column of a feature; columns get frequent and rare ones alike."""
    categories = np.flatnonzero(rows)
    columns = 1 if len(categories) <= ONE_COLUMN else min(-(-len(categories) // max_bins), MAX_COLUMNS)
    largest = categories[np.argsort(-rows[categories], kind="stable")[: columns * max_bins]]
    return [np.sort(largest[first::columns]).astype(np.float64) for first in range(columns)]
