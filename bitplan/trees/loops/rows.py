"""Loops over rows of boosted trees: numbers to bins, rows to children, leaves to scores.

Bins are kept twice: in panels for histograms (`histogram`), and feature by feature for the partition, which reads
one feature of many rows: a byte a row, 64 rows to a cache line, instead of a line for each row.
"""

from __future__ import annotations

import numpy as np

from bitplan.kernels.base.vectors import prefetch
from bitplan.trees.loops.compiling import compiled, inlined
from bitplan.trees.loops.histogram import ROW

MISSING = 255
AHEAD = 32  # rows
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
def _step(limits, low, step, number):  # type: ignore[no-untyped-def]
    return low + step if limits[U(low + step - 1)] < number else low


@inlined
def _put(column, panel, place, row, number, bin_number):  # type: ignore[no-untyped-def]
    bin_ = bin_number if number == number else MISSING
    column[U(row)] = bin_
    panel[U(row), U(place)] = bin_


@compiled
def bin_numbers(block, columns, features, all_limits, first_row, panel, first_column, bins):  # type: ignore[no-untyped-def]
    """Write the bins of some columns into `bins`, by column, and into the bytes of their panel.

    Column k of bins is that of feature `features[k]` in the rows of `block`. `all_limits` are as many as bins can be,
    filled up with infinity. Four searches at a time, of eight steps each: a step waits for the one before it, other
    searches do not. Past the end the last number is done again.
    """
    last = block.shape[0] - 1
    for k in columns:
        feature, limits, column, place = features[k], all_limits[k], bins[k], k - first_column
        for at in range(0, last + 1, 4):
            at_b, at_c, at_d = at + 1, at + 2, at + 3
            if at_d > last:
                at_b, at_c, at_d = at_b if at_b < last else last, at_c if at_c < last else last, last
            a, b, c, d = block[at, feature], block[at_b, feature], block[at_c, feature], block[at_d, feature]
            in_a, in_b, in_c, in_d = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
            for power in range(8):
                step = 128 >> power
                in_a, in_b = _step(limits, in_a, step, a), _step(limits, in_b, step, b)
                in_c, in_d = _step(limits, in_c, step, c), _step(limits, in_d, step, d)
            _put(column, panel, place, first_row + at, a, in_a)
            _put(column, panel, place, first_row + at_b, b, in_b)
            _put(column, panel, place, first_row + at_c, c, in_c)
            _put(column, panel, place, first_row + at_d, d, in_d)


@compiled
def bin_categories(numbers, categories, first_row, panel, column, place):  # type: ignore[no-untyped-def]
    """The same for a categorical feature: its bin is the place in `categories`, sorted; unknown is missing."""
    for i in range(numbers.size):
        number = np.float64(numbers[i])
        bin_ = np.int64(MISSING)
        if not np.isnan(number):
            at = _find_bin(categories, number)
            if at < categories.size and categories[at] == number:
                bin_ = at
        column[first_row + i] = bin_
        panel[first_row + i, place] = bin_


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


@compiled
def add_leaves(scores, output, rows, first, last, ends, values):  # type: ignore[no-untyped-def]
    """Add the value of its leaf to each of rows first..last; leaf after leaf ends at one of `ends`."""
    leaf = 0
    while ends[leaf] <= first:
        leaf += 1
    while first < last:
        end = min(ends[leaf], last)
        for i in range(first, end):
            scores[U(rows[U(i)]), U(output)] += values[leaf]
        first, leaf = end, leaf + 1


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
