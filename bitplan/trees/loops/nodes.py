"""The nodes of a tree that is growing, as rows of tables, and the queue of its leaves.

Python objects for nodes cost 50 us a split, as much as all the sums of a node of a thousand rows; what is here and in
`split` takes a few calls a split. Threads call `take` one at a time, and expand what it gave them without a lock:
of the tables they then touch only the rows of that node's children, which nobody looks at before it is `finish`ed.
"""

from __future__ import annotations

import numpy as np

from bitplan.kernels.base.jit import called, compiled, inlined
from bitplan.trees.loops.rows import part_rows
from bitplan.trees.loops.split import (
    BIN,
    CHILD,
    DEPTH,
    FEATURE,
    GAIN,
    GRAD,
    HESS,
    HIGH,
    L1,
    L2,
    LEFT_GRAD,
    LOW,
    MAX_DEPTH,
    MISSING_LEFT,
    NODE_COLUMNS,
    ROWS,
    START,
    STATE,
    STOP,
    can_split,
    judge,
    leaf_value,
)

__all__ = [  # what the grower takes from here, of `split` too
    "BIN",
    "CHILD",
    "DEPTH",
    "FEATURE",
    "GAIN",
    "GRAD",
    "HESS",
    "LOW",
    "MISSING_LEFT",
    "NODE_COLUMNS",
    "ROWS",
    "START",
    "STATE",
    "STOP",
    "divide",
    "judge",
    "take",
]

OPEN, TAKEN, EXPANDED = range(3)
# Columns of `leaves`: the node, when it was put into the queue, where the tree points to it: 2 * split + side.
NODE, PUSHED, LINK = range(3)
# Columns of `splits`: the node, and its children, as `Tree` has them.
LEFT, RIGHT = 1, 2
# Places in `counts`
LEAVES, SPLITS, MADE = range(3)
# What `take` says instead of a node
COMPLETE, SHARED, WAIT = -1, -2, -3
ONE = np.int64(1)  # numba compiles a part once more for every literal it is given
U = np.uint64


@inlined
def _before(reals, nodes, leaves, a, b, best_first):  # type: ignore[no-untyped-def]
    """Whether leaf `a` is split before leaf `b`."""
    at, other = leaves[a, NODE], leaves[b, NODE]
    if best_first and reals[at, GAIN] != reals[other, GAIN]:
        return reals[at, GAIN] > reals[other, GAIN]
    if not best_first and nodes[at, DEPTH] != nodes[other, DEPTH]:
        return nodes[at, DEPTH] < nodes[other, DEPTH]
    return leaves[a, PUSHED] < leaves[b, PUSHED]


@called
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
        found = found + 1 if found < most else most
    return found


@called
def _next_leaf(nodes, reals, leaves, splits, counts, best_first, ranked):  # type: ignore[no-untyped-def]
    """Move expanded leaves into the tree, first in the queue first, as far as expansions have come.

    Returns the leaf that is next, or -1: the tree is complete.
    """
    while counts[LEAVES] < len(leaves):
        if _rank(nodes, reals, leaves, counts, best_first, ONE, ranked) == 0:
            return -1
        leaf = ranked[0]
        node, link = leaves[leaf, NODE], leaves[leaf, LINK]
        if nodes[node, STATE] != EXPANDED:
            return leaf
        at, new = counts[SPLITS], counts[LEAVES]
        splits[at, NODE], splits[at, LEFT], splits[at, RIGHT] = node, ~leaf, ~new
        if link >= 0:
            splits[link >> 1, LEFT + (link & 1)] = at
        child = nodes[node, CHILD]
        leaves[leaf, NODE], leaves[leaf, PUSHED], leaves[leaf, LINK] = child, 2 * at + 1, 2 * at
        leaves[new, NODE], leaves[new, PUSHED], leaves[new, LINK] = child + 1, 2 * at + 2, 2 * at + 1
        counts[SPLITS], counts[LEAVES] = at + 1, new + 1
    return -1


@compiled
def take(nodes, reals, leaves, splits, counts, best_first, shared_rows, ranked, done):  # type: ignore[no-untyped-def]
    """The first leaf of the queue that nobody has taken and one thread can expand; `done`: what the caller expanded.

    Or COMPLETE: the tree is; SHARED: the next leaf is one for all threads; WAIT: all that are next are taken.
    """
    if done >= 0:
        nodes[done, STATE] = EXPANDED
    leaf = _next_leaf(nodes, reals, leaves, splits, counts, best_first, ranked)
    if leaf < 0:
        return COMPLETE
    node, room = leaves[leaf, NODE], len(leaves) - counts[LEAVES]
    if nodes[node, STOP] - nodes[node, START] >= shared_rows:
        return SHARED
    if nodes[node, STATE] != OPEN:
        node = WAIT
        if counts[MADE] + 2 + 2 * room <= len(nodes):  # the tables have places for what the tree may still need
            most = room if room < len(ranked) else len(ranked)
            for place in range(_rank(nodes, reals, leaves, counts, best_first, most, ranked)):
                ahead = leaves[ranked[place], NODE]
                if nodes[ahead, STATE] == OPEN and nodes[ahead, STOP] - nodes[ahead, START] < shared_rows:
                    node = ahead
                    break
    if node >= 0:  # its children get their places
        nodes[node, STATE], nodes[node, CHILD] = TAKEN, counts[MADE]
        nodes[counts[MADE], STATE] = OPEN
        nodes[counts[MADE] + 1, STATE] = OPEN
        counts[MADE] += 2
    return node


@compiled
def divide(  # type: ignore[no-untyped-def]
    entries, columns, spare, goes_left, nodes, reals, node, left_size, monotone, scales, rules
):
    """Partition the rows of a node, unless `left_size` says how many went left; then rows, sums and bounds of its
    children. Returns the child of fewer rows, or -1 if neither can be split.

    Children of a monotone split may not cross the middle between them, however they are split again.
    """
    start, stop = nodes[node, START], nodes[node, STOP]
    if left_size < 0:
        left_size = part_rows(entries[start:stop], columns[nodes[node, FEATURE]], goes_left[node], spare[start:stop])
        for i in range(stop - start - left_size):
            entries[U(start + left_size + i)] = spare[U(start + i)]
    left, right = nodes[node, CHILD], nodes[node, CHILD] + 1
    nodes[left, START], nodes[left, STOP] = start, start + left_size
    nodes[right, START], nodes[right, STOP] = start + left_size, stop
    for i in range(3):
        nodes[left, GRAD + i] = nodes[node, LEFT_GRAD + i]
        nodes[right, GRAD + i] = nodes[node, GRAD + i] - nodes[node, LEFT_GRAD + i]
    for child in range(left, right + 1):
        nodes[child, DEPTH] = nodes[node, DEPTH] + 1
        reals[child, GAIN], reals[child, LOW], reals[child, HIGH] = 0.0, reals[node, LOW], reals[node, HIGH]
    if monotone is not None:
        direction = monotone[nodes[node, FEATURE]]
        if direction != 0:
            middle = 0.0
            for child in range(left, right + 1):
                grad, hess = np.float64(nodes[child, GRAD]) * scales[0], np.float64(nodes[child, HESS]) * scales[1]
                middle += leaf_value(grad, hess, rules[L1], rules[L2], reals[node, LOW], reals[node, HIGH])
            middle /= 2
            reals[left if direction > 0 else right, HIGH] = middle
            reals[right if direction > 0 else left, LOW] = middle
    if nodes[left, DEPTH] == rules[MAX_DEPTH] or not (can_split(nodes, left, rules) or can_split(nodes, right, rules)):
        return -1
    return left if nodes[left, ROWS] <= nodes[right, ROWS] else right
