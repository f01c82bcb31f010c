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
TILE = 128  # rows
LANES = 8  # pairs of a row and a tree that go down together
# A node's word: below zero for a leaf; whether missing values go right, or it has a set of categories; the feature; the
# left child, which the right one follows.
MISSING_SHIFT, IS_CATEGORY, FEATURE_SHIFT, FEATURE_MASK, CHILD_MASK = 62, 1 << 61, 32, (1 << 28) - 1, (1 << 32) - 1
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


@inlined
def _child(numbers, row, at, nodes, thresholds, bits, misses):  # type: ignore[no-untyped-def]
    """Where a row goes from node `at`; a leaf leads to itself. `misses`: numbers may be missing."""
    word = nodes[at + at]
    number = np.float64(numbers[row, U((word >> FEATURE_SHIFT) & FEATURE_MASK)])
    to_right = np.int64(number > thresholds[at + at + U(1)])
    if bits is not None and word & IS_CATEGORY and number == number:
        to_right = np.int64(not _in_set(bits, np.int64(thresholds[at + at + U(1)]), number))
    if misses:
        to_right |= np.int64(number != number) & (word >> MISSING_SHIFT) & 1
    return U((word & CHILD_MASK) + to_right)


@inlined
def _go_down(numbers, nodes, thresholds, bits, misses, rows, roots):  # type: ignore[no-untyped-def]
    """The leaves of eight pairs of a row and a tree, that go down together: a step waits for the one before it, other
    pairs do not."""
    in_a, in_b, in_c, in_d, in_e, in_f, in_g, in_h = rows
    a, b, c, d, e, f, g, h = roots
    while True:
        first = nodes[a + a] & nodes[b + b] & nodes[c + c] & nodes[d + d]
        if first & nodes[e + e] & nodes[f + f] & nodes[g + g] & nodes[h + h] < 0:  # all are leaves
            return a, b, c, d, e, f, g, h
        a = _child(numbers, in_a, a, nodes, thresholds, bits, misses)
        b = _child(numbers, in_b, b, nodes, thresholds, bits, misses)
        c = _child(numbers, in_c, c, nodes, thresholds, bits, misses)
        d = _child(numbers, in_d, d, nodes, thresholds, bits, misses)
        e = _child(numbers, in_e, e, nodes, thresholds, bits, misses)
        f = _child(numbers, in_f, f, nodes, thresholds, bits, misses)
        g = _child(numbers, in_g, g, nodes, thresholds, bits, misses)
        h = _child(numbers, in_h, h, nodes, thresholds, bits, misses)


@inlined
def _eight(first, step, last):  # type: ignore[no-untyped-def]
    """Places first, first + step, ... but none behind the last."""
    a, b, c = first, min(first + step, last), min(first + 2 * step, last)
    d, e, f = min(first + 3 * step, last), min(first + 4 * step, last), min(first + 5 * step, last)
    return U(a), U(b), U(c), U(d), U(e), U(f), U(min(first + 6 * step, last)), U(min(first + 7 * step, last))


@inlined
def _are_finite(tile):  # type: ignore[no-untyped-def]
    odd = 0
    for row in range(tile.shape[0]):
        for feature in range(tile.shape[1]):
            odd |= tile[row, feature] - tile[row, feature] != 0  # true of NaN, too
    return odd == 0


@inlined
def _has_infinity(tile):  # type: ignore[no-untyped-def]
    for row in range(tile.shape[0]):
        for feature in range(tile.shape[1]):
            if np.isinf(tile[row, feature]):
                return True
    return False


@compiled
def add_trees(numbers, first, roots, nodes, thresholds, values, bits, scores):  # type: ignore[no-untyped-def]
    """Add trees to scores[i, tree % outputs] for the rows of `numbers`, whose row 0 is the scores' row `first`; returns
    whether a number is infinite.

    Nodes and leaves of all trees lie in one table (`tree.Steps`), children side by side, so that a step is one
    comparison and no branch. Rows go in tiles: tile and tree stay in the nearest cache. All rows go down a tree, then
    down the next, eight at a time; a single row goes down eight trees. `bits` is None where no node has a set of
    categories.
    """
    outputs, has_infinity, last = scores.shape[1], False, roots.size - 1
    for start in range(0, numbers.shape[0], TILE):
        tile, into = numbers[start : start + TILE], scores[first + start : first + start + TILE]
        size, misses = tile.shape[0], not _are_finite(tile)
        if misses:
            has_infinity |= _has_infinity(tile)
        whole = size - size % 8
        for tree in range(roots.size):
            root, output = U(roots[tree]), U(tree % outputs)
            for row in range(0, whole, 8):
                rows, at = _eight(row, 1, size), (root, root, root, root, root, root, root, root)
                if misses:
                    leaves = _go_down(tile, nodes, thresholds, bits, True, rows, at)
                else:
                    leaves = _go_down(tile, nodes, thresholds, bits, False, rows, at)
                for lane in range(8):
                    into[rows[lane], output] += values[leaves[lane]]
        for row in range(whole, size):
            rows = _eight(row, 0, row)
            for tree in range(0, roots.size, 8):
                t = _eight(tree, 1, last)
                at = (
                    U(roots[t[0]]), U(roots[t[1]]), U(roots[t[2]]), U(roots[t[3]]),
                    U(roots[t[4]]), U(roots[t[5]]), U(roots[t[6]]), U(roots[t[7]]),
                )  # fmt: skip
                leaves = _go_down(tile, nodes, thresholds, bits, True, rows, at)
                for lane in range(min(8, roots.size - tree)):
                    into[U(row), U((tree + lane) % outputs)] += values[leaves[lane]]
    return has_infinity


@inlined
def _in_set(bits, place, number):  # type: ignore[no-untyped-def]
    if number <= -1 or number >= 32 * bits.shape[1]:  # as LightGBM: the fraction is cut off
        return False
    code = np.int64(number)
    return (bits[place, code >> 5] >> np.uint32(code & 31)) & np.uint32(1) != 0
