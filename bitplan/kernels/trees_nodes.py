"""The nodes of a tree that is growing, as rows of tables, and the queue of its leaves.

Python objects for nodes cost 50 us a split, as much as all the sums of a node of a thousand rows; what is here and in
`trees_split` takes a few calls a split. Threads call `take` one at a time, and expand what it gave them without a lock:
of the tables they then touch only the rows of that node's children, which nobody looks at before it is `finish`ed.
"""

from __future__ import annotations

import numpy as np

from bitplan.kernels import trees_split
from bitplan.kernels.jit import compiled, inlined
from bitplan.kernels.trees_histogram import subtract_cells
from bitplan.kernels.trees_rows import partition_rows
from bitplan.kernels.trees_split import L1, L2, MAX_DEPTH, MIN_ROWS, find_split, leaf_value

# Columns of `nodes` (integers): rows of this process, depth, sums, sums of the left child, the split, the left child
# (the right one is next), how far it has come. ROWS are those of all processes: what decisions depend on.
START, STOP, DEPTH, GRAD, HESS, ROWS, LEFT_GRAD, LEFT_HESS, LEFT_ROWS = range(9)
FEATURE, BIN, MISSING_LEFT, CHILD, STATE = range(9, 14)
NODE_COLUMNS = 14
OPEN, TAKEN, EXPANDED = range(3)
# Columns of `reals`: a gain of zero says that the node stays a leaf.
GAIN, LOW, HIGH = range(3)
# Columns of `leaves`: the node, when it was put into the queue, where the tree points to it: 2 * split + side.
NODE, PUSHED, LINK = range(3)
# Columns of `splits`: the node, and its children, as `Tree` has them.
LEFT, RIGHT = 1, 2
# Places in `counts`
LEAVES, SPLITS, MADE = range(3)
# What `take` says instead of a node
COMPLETE, SHARED, WAIT = -1, -2, -3


@inlined
def _before(reals, nodes, leaves, a, b, best_first):  # type: ignore[no-untyped-def]
    """Whether leaf `a` is split before leaf `b`."""
    at, other = leaves[a, NODE], leaves[b, NODE]
    if best_first and reals[at, GAIN] != reals[other, GAIN]:
        return reals[at, GAIN] > reals[other, GAIN]
    if not best_first and nodes[at, DEPTH] != nodes[other, DEPTH]:
        return nodes[at, DEPTH] < nodes[other, DEPTH]
    return leaves[a, PUSHED] < leaves[b, PUSHED]


@compiled
def _rank(nodes, reals, leaves, counts, best_first, most, ranked):  # type: ignore[no-untyped-def]
    """The first `most` leaves of the queue, in its order, into `ranked`; returns how many there are."""
    found = 0
    for leaf in range(counts[LEAVES]):
        if reals[leaves[leaf, NODE], GAIN] <= 0.0:
            continue
        if found == most and not _before(reals, nodes, leaves, leaf, ranked[most - 1], best_first):
            continue
        at = found if found < most else most - 1
        while at > 0 and _before(reals, nodes, leaves, leaf, ranked[at - 1], best_first):
            ranked[at] = ranked[at - 1]
            at -= 1
        ranked[at] = leaf
        found = min(found + 1, most)
    return found


@compiled
def next_leaves(nodes, reals, leaves, splits, counts, best_first, most, ranked):  # type: ignore[no-untyped-def]
    """Move expanded leaves into the tree, first in the queue first, as far as expansions have come.

    Then `ranked` has the leaves that are next, as many as the tree has room for and not more than `most`.
    """
    while counts[LEAVES] < len(leaves):
        if _rank(nodes, reals, leaves, counts, best_first, 1, ranked) == 0:
            return 0
        leaf = ranked[0]
        node, link = leaves[leaf, NODE], leaves[leaf, LINK]
        if nodes[node, STATE] != EXPANDED:
            if most == 1:
                return 1
            return _rank(nodes, reals, leaves, counts, best_first, min(len(leaves) - counts[LEAVES], most), ranked)
        at, new = counts[SPLITS], counts[LEAVES]
        splits[at, NODE], splits[at, LEFT], splits[at, RIGHT] = node, ~leaf, ~new
        if link >= 0:
            splits[link >> 1, LEFT + (link & 1)] = at
        child = nodes[node, CHILD]
        leaves[leaf, NODE], leaves[leaf, PUSHED], leaves[leaf, LINK] = child, 2 * at + 1, 2 * at
        leaves[new, NODE], leaves[new, PUSHED], leaves[new, LINK] = child + 1, 2 * at + 2, 2 * at + 1
        counts[SPLITS], counts[LEAVES] = at + 1, new + 1
    return 0


@compiled
def begin(nodes, counts, node):  # type: ignore[no-untyped-def]
    """Take a leaf: its children get their places."""
    nodes[node, STATE], nodes[node, CHILD] = TAKEN, counts[MADE]
    nodes[counts[MADE] : counts[MADE] + 2, STATE] = OPEN
    counts[MADE] += 2


@compiled
def take(nodes, reals, leaves, splits, counts, best_first, shared_rows, ranked, done):  # type: ignore[no-untyped-def]
    """The first leaf of the queue that nobody has taken and one thread can expand; `done`: what the caller expanded.

    Or COMPLETE: the tree is; SHARED: the next leaf is one for all threads; WAIT: all that are next are taken.
    """
    if done >= 0:
        nodes[done, STATE] = EXPANDED
    if next_leaves(nodes, reals, leaves, splits, counts, best_first, 1, ranked) == 0:
        return COMPLETE
    node, room = leaves[ranked[0], NODE], len(leaves) - counts[LEAVES]
    if nodes[node, STOP] - nodes[node, START] >= shared_rows:
        return SHARED
    if nodes[node, STATE] == OPEN:
        begin(nodes, counts, node)
        return node
    if counts[MADE] + 2 + 2 * room > len(nodes):  # the tables have places for what the tree may still need
        return WAIT
    for place in range(_rank(nodes, reals, leaves, counts, best_first, min(room, len(ranked)), ranked)):
        node = leaves[ranked[place], NODE]
        if nodes[node, STATE] == OPEN and nodes[node, STOP] - nodes[node, START] < shared_rows:
            begin(nodes, counts, node)
            return node
    return WAIT


@inlined
def _can_split(nodes, node, rules):  # type: ignore[no-untyped-def]
    return nodes[node, ROWS] >= max(2 * rules[MIN_ROWS], 2)


@compiled
def set_children(nodes, reals, node, left_size, monotone, bounded, scales, rules):  # type: ignore[no-untyped-def]
    """Rows, sums and bounds of a node's children. Returns the one of fewer rows, or -1 if neither can be split.

    Children of a monotone split may not cross the middle between them, however they are split again.
    """
    left, right = nodes[node, CHILD], nodes[node, CHILD] + 1
    middle = nodes[node, START] + left_size
    nodes[left, START], nodes[left, STOP] = nodes[node, START], middle
    nodes[right, START], nodes[right, STOP] = middle, nodes[node, STOP]
    for i in range(3):
        nodes[left, GRAD + i] = nodes[node, LEFT_GRAD + i]
        nodes[right, GRAD + i] = nodes[node, GRAD + i] - nodes[node, LEFT_GRAD + i]
    for child in (left, right):
        nodes[child, DEPTH] = nodes[node, DEPTH] + 1
        reals[child, GAIN], reals[child, LOW], reals[child, HIGH] = 0.0, reals[node, LOW], reals[node, HIGH]
    direction = monotone[nodes[node, FEATURE]] if bounded else 0
    if direction != 0:
        low, high = reals[node, LOW], reals[node, HIGH]
        middle_value = 0.0
        for child in (left, right):
            grad, hess = np.float64(nodes[child, GRAD]) * scales[0], np.float64(nodes[child, HESS]) * scales[1]
            middle_value += leaf_value(grad, hess, rules[L1], rules[L2], low, high)
        middle_value /= 2
        reals[left if direction > 0 else right, HIGH] = middle_value
        reals[right if direction > 0 else left, LOW] = middle_value
    if nodes[left, DEPTH] == rules[MAX_DEPTH] or not (
        _can_split(nodes, left, rules) or _can_split(nodes, right, rules)
    ):
        return -1
    return left if nodes[left, ROWS] <= nodes[right, ROWS] else right


@compiled
def divide(entries, columns, spare, goes_left, nodes, reals, node, monotone, bounded, scales, rules):  # type: ignore[no-untyped-def]
    """Partition the rows of a node, and `set_children`."""
    start, stop = nodes[node, START], nodes[node, STOP]
    column = columns[nodes[node, FEATURE]]
    left_size = partition_rows(entries[start:stop], column, goes_left[node], spare[start:stop])
    return set_children(nodes, reals, node, left_size, monotone, bounded, scales, rules)


@compiled
def judge(  # type: ignore[no-untyped-def]
    cells, words, goes_left, nodes, reals, node, features, bins, is_category, monotone, bounded, scales, rules
):
    """Find a node's best split, from its histogram. Returns whether there is one."""
    if not _can_split(nodes, node, rules):
        return False
    found = np.zeros(4)
    find_split(
        cells,
        words,
        features,
        bins,
        is_category,
        monotone,
        bounded,
        reals[node, LOW : HIGH + 1],
        nodes[node, GRAD : ROWS + 1],
        scales,
        rules,
        found,
        nodes[node, LEFT_GRAD : LEFT_ROWS + 1],
        goes_left[node],
    )
    reals[node, GAIN] = found[trees_split.GAIN]
    nodes[node, FEATURE], nodes[node, BIN] = found[trees_split.FEATURE], found[trees_split.BIN]
    nodes[node, MISSING_LEFT] = found[trees_split.MISSING_LEFT]
    return found[trees_split.GAIN] > 0.0


@compiled
def judge_children(  # type: ignore[no-untyped-def]
    parent,
    words,
    cells,
    child_words,
    rest,
    rest_words,
    small,
    large,
    goes_left,
    nodes,
    reals,
    features,
    bins,
    is_category,
    monotone,
    bounded,
    scales,
    rules,
):
    """Subtract the smaller child's cells from its parent's, and `judge` both: for the small one, for the large one."""
    subtract_cells(parent, words, cells, child_words, rest, rest_words)
    more = features, bins, is_category, monotone, bounded, scales, rules
    small_splits = judge(cells, child_words, goes_left, nodes, reals, small, *more)
    return small_splits, judge(rest, rest_words, goes_left, nodes, reals, large, *more)
