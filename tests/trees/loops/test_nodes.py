"""The queue of leaves against sorting, the tables' room, and what threads may take."""

from __future__ import annotations

import numpy as np
import pytest

from bitplan.trees.grow import COMPLETE, OPEN, SHARED, WAIT, _Growth
from bitplan.trees.loops.split import GAIN


class Queue(_Growth):
    """A tree whose root is a leaf; `expand` gives a node's children their gains."""

    def __init__(self, max_leaves, best_first=True, places=0):
        super().__init__(max_leaves, best_first, places)
        self.set_root(10, [0, 0, 10])
        self.reals[0, GAIN] = 1.0

    def next(self, ahead=4, done=-1, shared_rows=100):
        if done >= 0:
            self.finish(done)
        return self.take(shared_rows, ahead)

    def expand(self, node, gains, sizes=(10, 10)):
        child = self.child[node]
        self.reals[child : child + 2, GAIN] = gains
        self.depth[child : child + 2] = [self.depth[node] + 1] * 2
        self.spans[child : child + 2] = [(0, size) for size in sizes]


@pytest.mark.parametrize("best_first", [True, False])
def test_leaves_are_split_in_the_order_of_the_queue(best_first):
    rng, queue = np.random.default_rng(5), Queue(40, best_first)
    waiting, order, done, pushed = [((-1.0 if best_first else 0.0, 0), 0)], [], -1, 1
    while (node := queue.next(done=done)) >= 0:
        waiting.sort()
        assert node == waiting.pop(0)[1]
        order.append(node)
        gains = rng.integers(0, 4, 2).astype(float)  # ties, and leaves that stay
        queue.expand(node, gains)
        for side in range(2):
            if gains[side] > 0:
                rank = -gains[side] if best_first else queue.depth[node] + 1.0
                waiting.append(((rank, pushed), queue.child[node] + side))
            pushed += 1
        done = node
    assert node == COMPLETE
    assert queue.splits == order
    assert len(queue.leaves) == len(order) + 1
    pointed = sorted(queue.left + queue.right)  # to every split but the first, and to every leaf, once
    assert pointed == [*range(-len(order) - 1, 0), *range(1, len(order))]


def test_what_is_taken_ahead_enters_the_tree_only_in_its_turn():
    queue = Queue(4)
    queue.expand(queue.next(), [5.0, 4.0])
    first = queue.next(done=0)
    second = queue.next()
    assert queue.reals[[first, second], GAIN].tolist() == [5.0, 4.0]
    assert queue.next() == WAIT  # nothing is left to take ahead
    queue.expand(second, [9.0, 9.0])
    assert queue.next(done=second) == WAIT  # and the second may not overtake the first
    queue.expand(first, [7.0, 1.0])
    third = queue.next(done=first)
    assert third == queue.child[first]
    assert queue.next(done=third) == COMPLETE
    assert queue.splits == [0, first, third]  # the expansion ahead is dropped


def test_no_more_is_expanded_ahead_than_the_tables_have_room_for():
    queue = Queue(4, places=7)  # exactly what a tree of four leaves needs
    queue.expand(queue.next(), [5.0, 4.0])
    first = queue.next(done=0)
    assert queue.next() == WAIT
    queue.expand(first, [6.0, 0.0])
    third = queue.next(done=first)
    assert queue.made == 7
    queue.expand(third, [1.0, 1.0])
    assert queue.next(done=third) == COMPLETE


def test_a_leaf_for_all_threads_is_left_to_them():
    queue = Queue(5)
    queue.expand(queue.next(), [2.0, 1.0], sizes=(100, 10))
    assert queue.next(done=0) == SHARED
    assert queue.next(shared_rows=101) == 1
    assert queue.next() == SHARED  # taken or not
    assert queue.state[2] == OPEN
