"""Loops over rows of boosted trees: numbers to bins, rows to children, trees to scores.

Bins are kept twice: in panels for histograms (`histogram`), and feature by feature for the partition, which reads
one feature of many rows: a byte a row, 64 rows to a cache line, instead of a line for each row.
"""

from __future__ import annotations

import numpy as np

from bitplan.kernels.base.jit import compiled, inlined
from bitplan.kernels.base.vectors import prefetch
from bitplan.trees.loops.histogram import ROW

MISSING = 255
TILE = 1024  # rows
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
def bin_numbers(numbers, limits, first_row, panel, column, place):  # type: ignore[no-untyped-def]
    """Write the bins of one feature, given as any strided float array, into its column and into its panel's bytes.

    `limits` are as many as bins can be, filled up with infinity. Four searches at a time, of eight steps each: a step
    waits for the one before it, other searches do not. Past the end the last number is done again.
    """
    last = numbers.size - 1
    for at in range(0, numbers.size, 4):
        at_b, at_c, at_d = at + 1, at + 2, at + 3
        if at_d > last:
            at_b, at_c, at_d = at_b if at_b < last else last, at_c if at_c < last else last, last
        a, b, c, d = numbers[at], numbers[at_b], numbers[at_c], numbers[at_d]
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
        bin_ = MISSING
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
def add_to_rows(scores, rows, value):  # type: ignore[no-untyped-def]
    for i in range(rows.size):
        scores[U(rows[U(i)])] += value


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


@compiled
def add_trees(  # type: ignore[no-untyped-def]
    numbers, first, roots, feature, threshold, missing_left, category, bits, left, right, values, leaf_starts, scores
):
    """Add trees to scores[i, tree % outputs] for the rows of `numbers`, whose row 0 is the scores' row `first`.

    All trees lie one after the other; a child below zero is the leaf ~child. `category[node]` is -1 for a numeric node,
    else the place of its bit set, a bit for each category. Rows go in tiles: tile and tree stay in the cache.
    """
    outputs = scores.shape[1]
    for start in range(0, numbers.shape[0], TILE):
        stop = start + TILE if start + TILE < numbers.shape[0] else numbers.shape[0]
        for tree in range(roots.size - 1):
            root = roots[tree]
            if roots[tree + 1] == root:  # a single leaf
                for row in range(start, stop):
                    scores[first + row, tree % outputs] += values[leaf_starts[tree]]
                continue
            for row in range(start, stop):
                node = 0
                while node >= 0:
                    at = U(root + node)
                    number = np.float64(numbers[row, feature[at]])
                    if np.isnan(number):
                        goes_left = missing_left[at]
                    elif category[at] < 0:
                        goes_left = number <= threshold[at]
                    else:
                        goes_left = _in_set(bits, category[at], number)
                    node = left[at] if goes_left else right[at]
                scores[first + row, tree % outputs] += values[leaf_starts[tree] + ~node]


@inlined
def _in_set(bits, place, number):  # type: ignore[no-untyped-def]
    if number <= -1 or number >= 32 * bits.shape[1]:  # as LightGBM: the fraction is cut off
        return False
    code = np.int64(number)
    return (bits[place, code >> 5] >> np.uint32(code & 31)) & np.uint32(1) != 0
