"""The nodes of a tree that is growing, as rows of tables, and the queue of its leaves.

As Python objects they would keep threads waiting for the interpreter lock: 16 threads take 1.5 times as long.
Threads call `take` one at a time, and expand what it gave them without a lock: of the tables they then touch only the
rows of that node's children, which nobody looks at before the node is EXPANDED.

To compile takes long, so each is one function of plain loops: numba compiles a part again for every caller of it.
"""

from __future__ import annotations

import numpy as np

from bitplan.kernels.base.jit import compiled
from bitplan.trees.loops.rows import part_rows
from bitplan.trees.loops.split import (
    CHILD,
    DEPTH,
    FEATURE,
    GAIN,
    GRAD,
    GROUPS,
    GROUPS_BELOW,
    HESS,
    HIGH,
    L1,
    L2,
    LEFT_GRAD,
    LOW,
    MAX_DEPTH,
    MIN_ROWS,
    ROWS,
    START,
    STATE,
    STOP,
    leaf_value,
)

OPEN, TAKEN, EXPANDED = range(3)
# Columns of `leaves`: the node, and where the tree points to it: 2 * split + side. The third is not by leaf, it is the
# queue: leaves in its order, of which the last is split first.
NODE, LINK, QUEUE = range(3)
# Columns of `splits`: the node, and its children, as `Tree` has them.
LEFT, RIGHT = 1, 2
# Places in `counts`
LEAVES, SPLITS, MADE, QUEUED, READY = range(5)
# What `take` says instead of a node
COMPLETE, SHARED, WAIT = -1, -2, -3
U = np.uint64


@compiled
def take(nodes, reals, leaves, splits, counts, ready, best_first, shared_rows, done):  # type: ignore[no-untyped-def]
    """The leaf at the head of the queue, or one of `ready` that the tree will probably need after it.

    Or COMPLETE: the tree is; SHARED: the head is for all threads; WAIT: there is nothing to do ahead of the head, which
    somebody has taken. `done` is what the caller has expanded, or below zero. Leaves that are expanded move into the
    tree, first in the queue first; the children of one that waits for its turn are ready before that.
    """
    if done >= 0:
        nodes[done, STATE] = EXPANDED
        for child in range(nodes[done, CHILD], nodes[done, CHILD] + 2):
            if reals[child, GAIN] > 0.0:
                ready[counts[READY]] = child
                counts[READY] += 1
    queued, new, all_leaves = counts[QUEUED], counts[LEAVES], leaves.shape[0]
    node = np.int64(COMPLETE)
    while new < all_leaves and queued > 0:
        leaf = leaves[queued - 1, QUEUE]
        node = leaves[leaf, NODE]
        if nodes[node, STATE] != EXPANDED:
            break
        queued -= 1
        at, link, child = counts[SPLITS], leaves[leaf, LINK], nodes[node, CHILD]
        splits[at, NODE], splits[at, LEFT], splits[at, RIGHT] = node, ~leaf, ~new
        if link >= 0:
            splits[link >> 1, LEFT + (link & 1)] = at
        for side in range(2):
            leaf, node = new if side else leaf, child + side
            leaves[leaf, NODE], leaves[leaf, LINK] = node, 2 * at + side
            gain = reals[node, GAIN]
            if gain > 0.0:  # behind those of equal gain; level by level: behind all
                place = queued
                while place > 0:
                    other = leaves[place - 1, QUEUE]
                    if best_first and reals[leaves[other, NODE], GAIN] < gain:
                        break
                    leaves[place, QUEUE] = other
                    place -= 1
                leaves[place, QUEUE] = leaf
                queued += 1
        counts[SPLITS], new = at + 1, new + 1
    counts[LEAVES], counts[QUEUED] = new, queued
    made, room = counts[MADE], all_leaves - new
    if room == 0 or queued == 0:
        return np.int64(COMPLETE)
    if nodes[node, STATE] != OPEN:
        # Ahead of the head: not unless the tables have places for what the tree may still need, and not what is behind
        # as many leaves of the queue as the tree has room for.
        if made + 2 + 2 * room > nodes.shape[0]:
            return np.int64(WAIT)
        least = reals[leaves[leaves[queued - room, QUEUE], NODE], GAIN] if best_first and queued >= room else 0.0
        node, gain, at = np.int64(WAIT), least, counts[READY]
        place = np.int64(0)
        while place < at:
            other = ready[place]
            if nodes[other, STATE] != OPEN:  # it was the head
                at -= 1
                ready[place] = ready[at]
                continue
            if nodes[other, STOP] - nodes[other, START] < shared_rows:
                if best_first:
                    if reals[other, GAIN] > gain or (node < 0 and reals[other, GAIN] == gain):
                        node, gain = other, reals[other, GAIN]
                elif node < 0 or other < node:  # made before
                    node = other
            place += 1
        counts[READY] = at
        if node < 0:
            return np.int64(WAIT)
    elif nodes[node, STOP] - nodes[node, START] >= shared_rows:
        return np.int64(SHARED)
    nodes[node, STATE], nodes[node, CHILD] = TAKEN, made  # its children get their places
    counts[MADE] = made + 2
    return node


@compiled
def divide(  # type: ignore[no-untyped-def]
    entries, columns, spare, goes_left, nodes, reals, node, left_size, monotone, scales, rules
):
    """Partition the rows of a node, unless `left_size` says how many went left; then rows, sums and bounds of its
    children. Returns the child of fewer rows, or -1 if neither can be split.

    `monotone` is None where no feature is. Children of a monotone split may not cross the middle between them, however
    they are split again.
    """
    start, stop, left = nodes[node, START], nodes[node, STOP], nodes[node, CHILD]
    feature = nodes[node, FEATURE]
    if left_size < 0:
        left_size = part_rows(entries, start, stop, columns, feature, goes_left, node, spare)
        for i in range(start + left_size, stop):
            entries[U(i)] = spare[U(i - left_size)]
    middle = start + left_size
    for side in range(2):
        child = left + side
        nodes[child, START], nodes[child, STOP] = middle if side else start, stop if side else middle
        nodes[child, DEPTH], nodes[child, GROUPS] = nodes[node, DEPTH] + 1, nodes[node, GROUPS_BELOW]
        for i in range(3):
            part = nodes[node, LEFT_GRAD + i]
            nodes[child, GRAD + i] = nodes[node, GRAD + i] - part if side else part
        reals[child, LOW], reals[child, HIGH] = reals[node, LOW], reals[node, HIGH]
    if monotone is not None and monotone[feature] != 0:
        between = 0.0
        for child in range(left, left + 2):
            grad, hess = np.float64(nodes[child, GRAD]) * scales[0], np.float64(nodes[child, HESS]) * scales[1]
            between += leaf_value(grad, hess, rules[L1], rules[L2], reals[node, LOW], reals[node, HIGH])
        upper = left if monotone[feature] > 0 else left + 1
        reals[upper, HIGH] = between / 2
        reals[2 * left + 1 - upper, LOW] = between / 2
    left_rows, right_rows = nodes[left, ROWS], nodes[left + 1, ROWS]
    more = left_rows if left_rows > right_rows else right_rows
    if np.float64(nodes[left, DEPTH]) == rules[U(MAX_DEPTH)] or more < 2 or more < 2 * rules[U(MIN_ROWS)]:
        return np.int64(-1)
    return left if left_rows <= right_rows else left + 1
