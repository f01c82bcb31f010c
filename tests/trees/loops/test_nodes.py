"""The queue of leaves against sorting, the tables' room, and what threads may take."""

from __future__ import annotations

import numpy as np
import pytest

from bitplan.trees.loops import nodes as kernels


class Queue:
    """Tables whose root is a leaf; `expand` gives a node's children their gains."""

    def __init__(self, max_leaves, best_first=True, places=None):
        places = places or 4 * max_leaves + 2
        self.nodes, self.reals = np.zeros((places, kernels.NODE_COLUMNS), np.int64), np.zeros((places, 3))
        self.leaves, self.splits = np.zeros((max_leaves, 3), np.int64), np.zeros((max_leaves, 3), np.int64)
        self.counts, self.best_first = np.array([1, 0, 1]), best_first
        self.nodes[0, kernels.STOP], self.reals[0, kernels.GAIN], self.leaves[0, kernels.LINK] = 10, 1.0, -1

    def take(self, ahead=4, done=-1, shared_rows=100):
        tables = self.nodes, self.reals, self.leaves, self.splits, self.counts
        return kernels.take(*tables, self.best_first, shared_rows, np.empty(ahead, np.int64), done)

    def expand(self, node, gains, sizes=(10, 10)):
        child = self.nodes[node, kernels.CHILD]
        self.reals[child : child + 2, kernels.GAIN] = gains
        self.nodes[child : child + 2, kernels.DEPTH] = self.nodes[node, kernels.DEPTH] + 1
        self.nodes[child : child + 2, kernels.STOP] = sizes


@pytest.mark.parametrize("best_first", [True, False])
def test_leaves_are_split_in_the_order_of_the_queue(best_first):
    rng, queue = np.random.default_rng(5), Queue(40, best_first)
    waiting, order, done, pushed = [((-1.0 if best_first else 0.0, 0), 0)], [], -1, 1
    while (node := queue.take(done=done)) >= 0:
        waiting.sort()
        assert node == waiting.pop(0)[1]
        order.append(node)
        gains = rng.integers(0, 4, 2).astype(float)  # ties, and leaves that stay
        queue.expand(node, gains)
        for side in range(2):
            child, depth = int(queue.nodes[node, kernels.CHILD]) + side, float(queue.nodes[node, kernels.DEPTH] + 1)
            if gains[side] > 0:
                waiting.append(((-gains[side] if best_first else depth, pushed), child))
            pushed += 1
        done = node
    assert node == kernels.COMPLETE
    splits = queue.splits[: queue.counts[kernels.SPLITS]]
    assert splits[:, kernels.NODE].tolist() == order
    assert queue.counts[kernels.LEAVES] == len(order) + 1
    pointed = splits[:, kernels.LEFT :].ravel().tolist()  # to every split but the first, and to every leaf, once
    assert sorted(pointed) == [*range(-len(order) - 1, 0), *range(1, len(order))]


def test_what_is_taken_ahead_enters_the_tree_only_in_its_turn():
    queue = Queue(4)
    queue.expand(queue.take(), [5.0, 4.0])
    first = queue.take(done=0)
    second = queue.take()
    assert queue.reals[[first, second], kernels.GAIN].tolist() == [5.0, 4.0]
    assert queue.take() == kernels.WAIT  # nothing is left to take ahead
    queue.expand(second, [9.0, 9.0])
    assert queue.take(done=second) == kernels.WAIT  # and the second may not overtake the first
    queue.expand(first, [7.0, 1.0])
    third = queue.take(done=first)
    assert third == queue.nodes[first, kernels.CHILD]
    assert queue.take(done=third) == kernels.COMPLETE
    assert queue.splits[:3, kernels.NODE].tolist() == [0, first, third]  # the expansion ahead is dropped


def test_no_more_is_expanded_ahead_than_the_tables_have_room_for():
    queue = Queue(4, places=7)  # exactly what a tree of four leaves needs
    queue.expand(queue.take(), [5.0, 4.0])
    first = queue.take(done=0)
    assert queue.take() == kernels.WAIT
    queue.expand(first, [6.0, 0.0])
    third = queue.take(done=first)
    assert queue.counts[kernels.MADE] == 7
    queue.expand(third, [1.0, 1.0])
    assert queue.take(done=third) == kernels.COMPLETE


def test_a_leaf_for_all_threads_is_left_to_them():
    queue = Queue(5)
    queue.expand(queue.take(), [2.0, 1.0], sizes=(100, 10))
    assert queue.take(done=0) == kernels.SHARED
    assert queue.take(shared_rows=101) == 1
    assert queue.take() == kernels.SHARED  # taken or not
    assert queue.nodes[2, kernels.STATE] == kernels.OPEN
