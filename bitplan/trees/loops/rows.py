"""Loops over rows of boosted trees: numbers to bins, rows to children, leaves to scores.

Bins lie in panels, for histograms (`histogram`). A column that divides a large node is copied out of its panel first:
the partition reads one feature of many rows, a byte a row, 64 rows to a cache line, instead of a line for each row. Of
a small node each row has a line of its own in either form, so that no copy is made for it.
"""

from __future__ import annotations

import numpy as np

from bitplan.base.loops.addresses import read
from bitplan.base.loops.vectors import count_below
from bitplan.trees.loops.compiling import compiled, inlined, prefetch
from bitplan.trees.loops.histogram import PANEL, ROW

MISSING = 255
AHEAD = 32  # rows
GROUP = 16  # limits of bins that a number is held against at once
TILE = 64  # rows whose numbers stay in the L1 cache from column to column
U = np.uint64


@inlined
def _find_bin(limits, number):  # type: ignore[no-untyped-def]
    """The first bin whose upper limit is not below the number; one more than the limits there are if none."""
    low, size = 0, limits.size
    while size > 0:  # without branches: the processor cannot guess them
        half = (size + 1) // 2 if size > 1 else 1
        low = low + half if limits[low + half - 1] < number else low
        size = size - half
    return low


@inlined
def _bin_numbers(  # type: ignore[no-untyped-def]
    table, row_bytes, column_bytes, first, last, before, columns, features, limits, panel, first_column, width, kind
):
    """Write the bins of some columns of rows first..last into the bytes of their panel.

    Column k of bins is that of feature `features[k]` of the table at this address; its first row is number `before`
    there. `limits` are 256 for each column, filled up with infinity, in groups of 16, after the last limits of all 16
    groups: how many of these are below a number says which group it is in, how many of that group's, which bin.
    """
    for start in range(first, last, TILE):
        stop = min(start + TILE, last)
        for row in range(start, stop):  # of no column
            for place in range(width, panel.shape[1]):
                panel[U(before + row), U(place)] = 0
        for k in columns:
            at, place = table + features[k] * column_bytes, k - first_column
            ends = k * (GROUP + MISSING + 1)
            for row in range(start, stop):
                number = read(at + row * row_bytes, kind)
                group = count_below(limits, ends, number, GROUP)
                bin_ = GROUP * group + count_below(limits, ends + GROUP * (group + 1), number, GROUP)
                bin_ = bin_ if number == number else np.int64(MISSING)
                panel[U(before + row), U(place)] = bin_


@compiled
def bin_float32(  # type: ignore[no-untyped-def]
    table, row_bytes, column_bytes, first, last, before, columns, features, limits, panel, first_column, width
):
    where = table, row_bytes, column_bytes, first, last, before
    _bin_numbers(*where, columns, features, limits, panel, first_column, width, np.float32)


@compiled
def bin_float64(  # type: ignore[no-untyped-def]
    table, row_bytes, column_bytes, first, last, before, columns, features, limits, panel, first_column, width
):
    where = table, row_bytes, column_bytes, first, last, before
    _bin_numbers(*where, columns, features, limits, panel, first_column, width, np.float64)


@compiled
def bin_categories(numbers, categories, first_row, panel, place):  # type: ignore[no-untyped-def]
    """The same for a categorical feature: its bin is the place in `categories`, sorted; unknown is missing."""
    for i in range(numbers.size):
        number = np.float64(numbers[i])
        bin_ = np.int64(MISSING)
        if not np.isnan(number):
            at = _find_bin(categories, number)
            if at < categories.size and categories[at] == number:
                bin_ = at
        panel[first_row + i, place] = bin_


@compiled
def copy_column(panel, place, column):  # type: ignore[no-untyped-def]
    for i in range(column.size):
        column[U(i)] = panel[U(i), U(place)]


@compiled
def part_rows(entries, start, stop, columns, feature, goes_left, node, spare):  # type: ignore[no-untyped-def]
    """Of entries start..stop those that go left first, in their order; the others go to `spare`, from `start` on.

    `goes_left[node]` says which bins of `columns[feature]` do. Returns how many went left. Every entry is written to
    both sides, and one of the two places is written again: no branch to guess.
    """
    column, left, right, last = columns[U(feature)], U(start), U(start), stop - 1
    for i in range(start, stop):
        prefetch(column, np.int64(entries[U(i + AHEAD if i + AHEAD < last else last)] & ROW))
        entry = entries[U(i)]
        is_left = U(goes_left[U(node), U(column[entry & ROW])])
        entries[left] = entry  # never past i
        spare[right] = entry
        left += is_left
        right += U(1) - is_left
    return np.int64(left) - start


@inlined
def bins_of(work, data, feature):  # type: ignore[no-untyped-def]
    """The bins of a column, and how many bytes apart they are: its copy, or where its panel has them."""
    columns, is_there, panels, row_bytes = work[2], work[3], work[4], work[5]
    if is_there[feature]:
        return columns.reshape(columns.size)[feature * columns.shape[1] :], np.int64(1)
    panel = feature // PANEL
    return panels[8 * data[1][panel] + feature % PANEL :], row_bytes[panel]


@inlined
def part_by_panel(entries, start, stop, bins, row_bytes, goes_left, node, spare):  # type: ignore[no-untyped-def]
    """The same by bins that lie `row_bytes` apart, and the others follow those that went left."""
    left, right, last = U(start), U(start), stop - 1
    for i in range(start, stop):
        prefetch(bins, np.int64(entries[U(i + AHEAD if i + AHEAD < last else last)] & ROW) * row_bytes)
        entry = entries[U(i)]
        is_left = U(goes_left[U(node), U(bins[(entry & ROW) * U(row_bytes)])])
        entries[left] = entry
        spare[right] = entry
        left += is_left
        right += U(1) - is_left
    for i in range(U(stop) - left):
        entries[left + U(i)] = spare[U(start) + U(i)]
    return np.int64(left) - start


@inlined
def first_of(rows, start, stop, least):  # type: ignore[no-untyped-def]
    """The first place in start..stop, where rows rise, whose row is `least` or more; `stop` if none is."""
    while start < stop:
        middle = (start + stop) >> 1
        is_below = rows[U(middle)] < least
        start, stop = (middle + 1, stop) if is_below else (start, middle)
    return start


@compiled
def add_leaves(scores, rows, first, last, ends, values):  # type: ignore[no-untyped-def]
    """Add the value of its leaf to the scores first..last.

    `rows` lie run after run, which rise, each of one leaf: where each ends, and the leaf's value.
    """
    start = np.int64(0)
    for run in range(ends.size):
        stop, value = ends[run], values[run]
        for i in range(first_of(rows, start, stop, first), first_of(rows, start, stop, last)):
            scores[U(rows[U(i)])] += value
        start = stop


@compiled
def add_binned_tree(columns, rows, feature, left_bins, left, right, values, scores):  # type: ignore[no-untyped-def]
    """Add a tree's leaf values to the scores of `rows`; left_bins[node] says which bins go left."""
    for i in range(rows.size):
        row = rows[i]
        node = 0
        while node >= 0:
            goes_left = left_bins[node, columns[feature[node], row]]
            node = left[node] if goes_left else right[node]
        scores[row] += values[~node]
