"""The host's part of a wave, compiled: what the last one found goes into the tables, and the next one is chosen.

In Python this takes longer than the GPU takes for a wave of a million rows.
"""

from __future__ import annotations

import numpy as np

from bitplan.base.loops.jit import address_of, call_at, compiled, inlined
from bitplan.base.loops.vectors import same_bits
from bitplan.trees.gradients import Array
from bitplan.trees.loops import nodes as queue
from bitplan.trees.loops import split
from bitplan.trees.thread_workspace import Growth

COLUMNS = 16
# Columns of the table that goes to the GPU: of a node's row
START, STOP, SIDE, FEATURE, BIN, MISSING_LEFT, FIRST_BLOCK = range(7)
SMALL_START, SMALL_STOP, SMALL_SIDE, SMALL_SLOT, LARGE_SLOT, GROUPS, FIRST_SEGMENT, LEFTS, RIGHTS = range(7, 16)
# and of its last row
NODES, BLOCKS, SEGMENTS, SEGMENT_ROWS = range(4)
# Of a node's row of the result: the gain's bits, the split, three sums of its left side, three of the node
RESULT_GAIN, RESULT_FEATURE, RESULT_BIN, RESULT_MISSING_LEFT, RESULT_LEFT = range(5)
RESULT_NODE, RESULT = 7, 10
NODE, SMALL = range(2)  # columns of `wave`: nodes that are expanded, and of each the child of fewer rows, or -1
FAR_AWAY = 2**62
TAKE, DIVIDE = range(2)  # places in `kernels`
# No rows: they are moved on the card.
NO_ROWS = np.empty(0, np.uint64), np.empty((0, 0), np.uint8), np.empty(0, np.uint64)


def addresses(growth: Growth, monotone: Array, scales: Array, rules: Array) -> Array:
    """The CPU's own loops, called by address: by name they would be compiled once more."""
    tables = growth.nodes, growth.reals
    order = growth.leaves, growth.splits, growth.counts, growth.ready, growth.top, growth.best_first
    take = address_of(queue.take, *tables, *order, queue.ANY_ROWS, False, 0, 0)
    divide = address_of(queue.divide, *NO_ROWS, growth.goes_left, *tables, 0, 0, monotone, scales, rules)
    return np.array([take, divide], np.int64)


@inlined
def _note_split(child, found, found_set, nodes, reals, goes_left, by_feature):  # type: ignore[no-untyped-def]
    """A row of the result into the tables; the bin of a set of categories is -1."""
    feature = found[RESULT_FEATURE]
    reals[child, split.GAIN] = same_bits(found[RESULT_GAIN], np.float64)
    nodes[child, split.FEATURE], nodes[child, split.BIN] = feature, found[RESULT_BIN]
    nodes[child, split.MISSING_LEFT] = found[RESULT_MISSING_LEFT]
    for i in range(3):
        nodes[child, split.LEFT_GRAD + i] = found[RESULT_LEFT + i]
    nodes[child, split.GROUPS_BELOW] = nodes[child, split.GROUPS] & by_feature[feature, split.FEATURE_GROUPS]
    if found[RESULT_BIN] < 0:
        for bin_ in range(found_set.size):
            goes_left[child, bin_] = found_set[bin_]
    else:
        for bin_ in range(split.MISSING):
            goes_left[child, bin_] = bin_ <= found[RESULT_BIN]
        goes_left[child, split.MISSING] = found[RESULT_MISSING_LEFT]


@inlined
def _set_segments(table, count, all_rows, sizes):  # type: ignore[no-untyped-def]
    """Cut the rows of histograms into segments, about one for each program."""
    _block, chunk, groups, programs = sizes
    each = (all_rows * groups + programs * chunk - 1) // (programs * chunk)
    length = (each if each > 1 else 1) * chunk
    first = np.int64(0)
    for k in range(count):
        table[k, FIRST_SEGMENT] = first
        first += (table[k, SMALL_STOP] - table[k, SMALL_START] + length - 1) // length
    table[-1, SEGMENTS], table[-1, SEGMENT_ROWS] = first, length


@compiled
def next_wave(  # type: ignore[no-untyped-def]
    kernels, tables, goes_left, wave, done, found, given, free, by_feature, monotone, space, scales, rules, sizes
):
    """Note the results of the last wave's `done` nodes, then fill `given` for the next; returns how many it has.

    kernels addresses, see `addresses`
    tables  those of `nodes.take`, with whether the best leaf is first
    found   of each child: the result; the set of categories that goes left, empty where no feature is a category
    given   the table; bounds of each child's value; of each node the bins that go left, as wide as found sets
    free    slots for histograms; how many are free is the last number
    sizes   rows of a block, rows of a chunk of a histogram, groups of features, programs
    """
    nodes, reals, leaves, splits, counts, ready, top, best_first = tables
    entries, columns, spare = space
    result, found_sets = found
    table, bounds, sets = given
    queued = nodes, reals, leaves, splits, counts, ready, top, best_first, queue.ANY_ROWS
    for k in range(done):
        node, small = wave[k, NODE], wave[k, SMALL]
        if small < 0:
            free[free[-1]] = nodes[node, split.SLOT]
            free[-1] += 1
            continue
        for side in range(2):
            child = 2 * nodes[node, split.CHILD] + 1 - small if side else small
            at = 2 * k + side
            slot = table[k, LARGE_SLOT if side else SMALL_SLOT]
            _note_split(child, result[at], found_sets[at], nodes, reals, goes_left, by_feature)
            nodes[child, split.SLOT] = slot
            if not reals[child, split.GAIN] > 0.0:
                free[free[-1]] = slot
                free[-1] += 1
    for k in range(done):
        call_at(kernels[TAKE], (*queued, False, np.int64(0), wave[k, NODE]))  # it is expanded; none is taken
    most, count = wave.shape[0], 0
    while count < most:
        node = call_at(kernels[TAKE], (*queued, False, np.int64(1), np.int64(-1)))
        if node < 0:
            break
        wave[count, NODE] = node
        count += 1
    table[:] = 0
    blocks, all_rows = np.int64(0), np.int64(0)
    for k in range(most):
        here = table[k]
        here[SMALL_SLOT], here[LARGE_SLOT] = -1, -1
        here[FIRST_BLOCK], here[FIRST_SEGMENT] = FAR_AWAY, FAR_AWAY
        if k >= count:
            continue
        node = wave[k, NODE]
        lefts = nodes[node, split.LEFT_ROWS]
        parts = goes_left, nodes, reals, node, lefts, monotone, scales, rules
        small = call_at(kernels[DIVIDE], (entries, columns, spare, *parts))
        wave[k, SMALL] = small
        here[START], here[STOP] = nodes[node, split.START], nodes[node, split.STOP]
        here[SIDE], here[SMALL_SIDE] = nodes[node, split.DEPTH] & 1, 1 - (nodes[node, split.DEPTH] & 1)
        here[FEATURE], here[BIN] = nodes[node, split.FEATURE], nodes[node, split.BIN]
        here[MISSING_LEFT], here[GROUPS] = nodes[node, split.MISSING_LEFT], nodes[node, split.GROUPS_BELOW]
        here[FIRST_BLOCK] = blocks
        blocks += (here[STOP] - here[START] + sizes[0] - 1) // sizes[0]
        if small >= 0:
            free[-1] -= 1
            here[SMALL_SLOT], here[LARGE_SLOT] = free[free[-1]], nodes[node, split.SLOT]
            here[SMALL_START], here[SMALL_STOP] = nodes[small, split.START], nodes[small, split.STOP]
            all_rows += here[SMALL_STOP] - here[SMALL_START]
            for side in range(2):
                child = 2 * nodes[node, split.CHILD] + 1 - small if side else small
                bounds[2 * k + side, 0], bounds[2 * k + side, 1] = reals[child, split.LOW], reals[child, split.HIGH]
        for bin_ in range(sets.shape[1]):
            sets[k, bin_] = goes_left[node, bin_]
    table[most, NODES], table[most, BLOCKS] = count, blocks
    _set_segments(table, count, all_rows, sizes)
    return count


@compiled
def root_wave(table, rows, slot, sizes):  # type: ignore[no-untyped-def]
    """Fill `table` for the histogram of all rows."""
    table[:] = 0
    for k in range(table.shape[0] - 1):
        table[k, SMALL_SLOT], table[k, LARGE_SLOT] = -1, -1
        table[k, FIRST_BLOCK], table[k, FIRST_SEGMENT] = FAR_AWAY, FAR_AWAY
    table[0, SMALL_STOP], table[0, SMALL_SLOT], table[0, GROUPS] = rows, slot, -1
    table[-1, NODES] = 1
    _set_segments(table, 1, rows, sizes)


@compiled
def note_root(found, found_set, nodes, reals, goes_left, by_feature):  # type: ignore[no-untyped-def]
    """Its best split, into the tables."""
    _note_split(0, found, found_set, nodes, reals, goes_left, by_feature)
