"""The nodes of a tree that is growing, as rows of tables, and the queue of its leaves.

As Python objects they would keep threads waiting for the interpreter lock: 16 threads take 1.5 times as long.
Threads call `take` one at a time, and expand what it gave them without a lock: of the tables they then touch only the
rows of that node's children, which nobody looks at before the node is EXPANDED.

To compile takes long, so each is one function of plain loops: numba compiles a part again for every caller of it.
"""

from __future__ import annotations

import numpy as np

from bitplan.trees.loops.compiling import compiled
from bitplan.trees.loops.rows import part_rows
from bitplan.trees.loops.split import (
    BIN,
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
    MISSING_LEFT,
    ROWS,
    START,
    STATE,
    STOP,
    WORTH,
    leaf_value,
)

OPEN, TAKEN, EXPANDED = range(3)
# Columns of `leaves`: the node, and where the tree points to it: 2 * split + side. The third is not by leaf, it is the
# queue: leaves in its order, of which the last is split first.
NODE, LINK, QUEUE = range(3)
# Columns of `splits`: the node, and its children, as `Tree` has them.
LEFT, RIGHT = 1, 2
# Columns of `ready`, a list of nodes that can be expanded: the node, its rows. The third is a list of its own: nodes
# that the last `take` found to be hopeless.
SIZE, HOPELESS = 1, 2
# Places in `counts`; KNOWN: nodes that could be split, but for the root; DROPPED: those in the list of the
# hopeless; BUSY: nodes that are taken, and not expanded; GATHERING: all threads come together for one.
LEAVES, SPLITS, MADE, QUEUED, READY, KNOWN, DROPPED, BUSY, GATHERING = range(9)
# Places in `sharing`: from how many rows on a node is for all threads, whatever else there is to do; what a node costs
# all of them beside its rows, in rows; the per cent of a thread that each adds there.
LARGE_ROWS, MEETING_ROWS, HELP = range(3)
ANY_ROWS = (2**62, 0, 100)  # no node is too large for one thread
NODE_ROWS = 2048  # what a node costs one thread beside its rows: its splits are searched
# What `take` says instead of a node
COMPLETE, SHARED, WAIT = -1, -2, -3
U = np.uint64


@compiled
def take(nodes, reals, leaves, splits, counts, ready, top, best_first, sharing, for_all, team, done):  # type: ignore[no-untyped-def]
    """A leaf to expand next, by one thread; with `for_all`, by all of them.

    Or COMPLETE: the tree is; SHARED: the next is for all threads; WAIT: there is nothing to do before somebody has
    expanded what is taken. `done` is what the caller has expanded, or below zero; no `team`: nobody takes one. Leaves
    that are expanded move into the tree, first in the queue first; the children of one that waits for its turn are
    ready before that.

    A node's *worth* is the least gain on the way to it (level by level: minus its depth). Nodes of more worth enter the
    tree before it, so that one that is behind as many as the tree can have, `top`, is hopeless. A team first takes what
    is in the upper half of them and large, for what is large and comes late keeps threads waiting; one thread takes the
    best. A node is for all threads where these, one node after the other, do all that there is to do sooner than one
    thread does that node.
    """
    all_leaves, counts[DROPPED] = leaves.shape[0], 0
    if done >= 0:
        nodes[done, STATE] = EXPANDED
        counts[BUSY] -= 1
        for child in range(nodes[done, CHILD], nodes[done, CHILD] + 2):
            if reals[child, GAIN] > 0.0:
                worth = -np.float64(nodes[child, DEPTH])
                if best_first:
                    worth = reals[child, GAIN] if reals[child, GAIN] < reals[done, WORTH] else reals[done, WORTH]
                reals[child, WORTH] = worth
                ready[counts[READY], NODE], ready[counts[READY], SIZE] = child, nodes[child, STOP] - nodes[child, START]
                counts[READY] += 1
                place = counts[KNOWN] if counts[KNOWN] < top.size else top.size - 1
                if place >= 0 and (counts[KNOWN] < top.size or top[place] < worth):
                    while place > 0 and top[place - 1] < worth:
                        top[place] = top[place - 1]
                        place -= 1
                    top[place] = worth
                counts[KNOWN] += 1
    queued, new, head = counts[QUEUED], counts[LEAVES], np.int64(COMPLETE)
    while new < all_leaves and queued > 0:
        leaf = leaves[queued - 1, QUEUE]
        head = leaves[leaf, NODE]
        if nodes[head, STATE] != EXPANDED:
            break
        queued -= 1
        at, link, child = counts[SPLITS], leaves[leaf, LINK], nodes[head, CHILD]
        splits[at, NODE], splits[at, LEFT], splits[at, RIGHT] = head, ~leaf, ~new
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
    # Ahead of the head: not unless the tables have places for what the tree may still need.
    head_only = made + 2 + 2 * room > nodes.shape[0]
    least = top[top.size - 1] if 0 < top.size <= counts[KNOWN] else -np.inf
    safe = top[top.size // 2] if top.size // 2 < min(counts[KNOWN], top.size) else -np.inf
    mine, mine_worth, mine_size = np.int64(-1), -np.inf, np.int64(0)
    shared, shared_worth, place, to_do = np.int64(-1), -np.inf, np.int64(0), np.int64(0)
    while place < counts[READY]:
        node, size = ready[place, NODE], ready[place, SIZE]
        worth, is_head = reals[node, WORTH], node == head
        if worth < least:
            ready[counts[DROPPED], HOPELESS] = node
            counts[DROPPED] += 1
            counts[READY] -= 1
            ready[place, NODE], ready[place, SIZE] = ready[counts[READY], NODE], ready[counts[READY], SIZE]
            continue
        if team > 0 and (is_head or not head_only):
            if size >= sharing[LARGE_ROWS]:
                if worth > shared_worth or (is_head and worth == shared_worth):
                    shared, shared_worth = place, worth
            else:
                to_do += size + NODE_ROWS
                size = size if team > 1 and worth >= safe else np.int64(0)
                is_better = worth > mine_worth or (is_head and worth == mine_worth)
                if size > mine_size or (size == mine_size and is_better):
                    mine, mine_worth, mine_size = place, worth, size
        place += 1
    is_next = shared >= 0 and shared_worth >= safe
    if team == 1 and shared >= 0:
        is_next = shared_worth > mine_worth or (shared_worth == mine_worth and ready[shared, NODE] == head)
    if for_all:
        counts[GATHERING] = 0
        mine = shared if is_next or mine < 0 else mine
    else:
        if is_next or (mine < 0 <= shared and counts[BUSY] == 0):
            counts[GATHERING] = 1
        elif mine >= 0 and team > 1:
            alone = ready[mine, SIZE] + NODE_ROWS
            together = sharing[MEETING_ROWS] + 100 * alone // (sharing[HELP] * team)
            counts[GATHERING] |= alone * alone > (to_do + alone * counts[BUSY]) * together
        if counts[GATHERING]:
            return np.int64(SHARED)
    if mine < 0:
        return np.int64(WAIT)
    node = ready[mine, NODE]
    counts[READY] -= 1
    ready[mine, NODE], ready[mine, SIZE] = ready[counts[READY], NODE], ready[counts[READY], SIZE]
    nodes[node, STATE], nodes[node, CHILD] = TAKEN, made  # its children get their places
    counts[MADE] = made + 2
    counts[BUSY] += 1
    return node


@compiled
def divide(  # type: ignore[no-untyped-def]
    entries, columns, spare, goes_left, nodes, reals, node, left_size, monotone, scales, rules
):
    """Partition the rows of a node, unless `left_size` says how many went left; then rows, sums and bounds of its
    children. Returns the child of fewer rows, or -1 if neither can be split.

    `monotone` is by feature. Children of a monotone split may not cross the middle between them, however
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
    if monotone[feature] != 0:
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


@compiled
def find_runs(nodes, leaves, count, runs, places):  # type: ignore[no-untyped-def]
    """Where runs of rows end that were not divided, and the leaf of each, into `runs`; returns how many there are.

    Rows of a leaf that was expanded ahead lie in several. `places` are of two numbers for each node.
    """
    leaf_of, waiting = places[0], places[1]
    for node in range(nodes.shape[0]):
        leaf_of[node] = -1
    for leaf in range(count):
        leaf_of[leaves[leaf, NODE]] = leaf
    found, depth = np.int64(0), np.int64(1)
    waiting[0] = 0
    while depth > 0:  # left children first, for so do rows lie
        depth -= 1
        node = waiting[depth]
        if nodes[node, STATE] == EXPANDED:
            for side in range(2):
                child = nodes[node, CHILD] + 1 - side
                leaf_of[child] = leaf_of[node] if leaf_of[node] >= 0 else leaf_of[child]
                waiting[depth] = child
                depth += 1
        elif nodes[node, STOP] > nodes[node, START]:
            runs[0, found], runs[1, found] = nodes[node, STOP], leaf_of[node]
            found += 1
    return found


@compiled
def lay_out(  # type: ignore[no-untyped-def]
    nodes,
    reals,
    leaves,
    splits,
    scales,
    rules,
    thresholds,
    features,
    places,
    numbers,
    wholes,
    sides,
    values,
    spans,
    bounds,
):
    """A finished tree as `Tree` and `Grown` have it, by split and by leaf: features and children into `places`;
    thresholds, gains, steps and hessians into `numbers`; rows and columns of bins into `wholes`; where missing values
    go into `sides`; of leaves steps and hessians into `values`, rows, the first of them and their end into `spans`.
    """
    for at in range(sides.size + spans.shape[1]):
        is_leaf = at >= sides.size
        place = at - sides.size if is_leaf else at
        node = leaves[place, NODE] if is_leaf else splits[place, NODE]
        grad, hess = np.float64(nodes[node, GRAD]) * scales[0], np.float64(nodes[node, HESS]) * scales[1]
        low, high = reals[node, LOW], reals[node, HIGH]
        step = leaf_value(grad, hess, rules[L1], rules[L2], low, high)
        if is_leaf:
            values[0, place], values[1, place] = step, hess
            spans[0, place], spans[1, place], spans[2, place] = nodes[node, ROWS], nodes[node, START], nodes[node, STOP]
            bounds[place, 0], bounds[place, 1] = low, high
        else:
            column, bin_ = nodes[node, FEATURE], nodes[node, BIN]
            places[0, place], places[1, place] = features[column], splits[place, LEFT]
            places[2, place] = splits[place, RIGHT]
            numbers[0, place] = 0.0 if bin_ < 0 else thresholds[column, bin_]
            numbers[1, place], numbers[2, place], numbers[3, place] = reals[node, GAIN], step, hess
            wholes[0, place], wholes[1, place] = nodes[node, ROWS], column
            sides[place] = nodes[node, MISSING_LEFT]
