"""The queue of leaves against sorting, the tables' room, and what threads may take."""

from __future__ import annotations

import numpy as np
import pytest

from bitplan.trees.loops import nodes as kernels
from bitplan.trees.loops.split import CHILD, DEPTH, GAIN, START, STATE, STOP
from bitplan.trees.thread_workspace import Growth

NOT_TOGETHER = (100, 0, 1)  # where all threads are slower than one; nodes of 100 rows are theirs all the same


class Queue(Growth):
    """Tables whose root is a leaf; `expand` gives a node's children their gains."""

    def __init__(self, max_leaves, best_first=True, places=0):
        super().__init__(max_leaves, best_first, places)
        self.set_root(10, [0, 0, 10])
        self.reals[0, GAIN] = 1.0
        self.open_root()

    def next(self, done=-1):
        return self.take(NOT_TOGETHER, done)

    def expand(self, node, gains, sizes=(10, 10)):
        child = self.nodes[node, CHILD]
        self.reals[child : child + 2, GAIN] = gains
        self.nodes[child : child + 2, DEPTH] = self.nodes[node, DEPTH] + 1
        self.nodes[child : child + 2, STOP] = sizes


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
            child, depth = int(queue.nodes[node, CHILD]) + side, float(queue.nodes[node, DEPTH] + 1)
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
    queue.expand(queue.next(), [5.0, 4.0])
    first = queue.next(done=0)
    second = queue.next()
    assert queue.reals[[first, second], GAIN].tolist() == [5.0, 4.0]
    assert queue.next() == kernels.WAIT  # nothing is left to take ahead
    queue.expand(second, [9.0, 0.0])
    ahead = queue.next(done=second)  # its child is ready before it is in the tree,
    assert ahead == queue.nodes[second, CHILD]
    assert queue.counts[kernels.SPLITS] == 1  # which it may not enter before the first
    queue.expand(first, [7.0, 1.0])
    third = queue.next(done=first)
    assert third == queue.nodes[first, CHILD]
    assert queue.next(done=third) == kernels.COMPLETE
    assert queue.splits[:3, kernels.NODE].tolist() == [0, first, third]  # the expansions ahead are dropped


def test_what_the_tree_has_no_room_for_is_not_taken_ahead():
    queue = Queue(3)
    queue.expand(queue.next(), [5.0, 4.0])
    assert queue.next(done=0) == 1
    assert queue.next() == kernels.WAIT  # one more split, and that is the first's


def test_no_more_is_expanded_ahead_than_the_tables_have_room_for():
    queue = Queue(4, places=7)  # exactly what a tree of four leaves needs
    queue.expand(queue.next(), [5.0, 4.0])
    first = queue.next(done=0)
    assert queue.next() == kernels.WAIT
    queue.expand(first, [6.0, 0.0])
    third = queue.next(done=first)
    assert queue.counts[kernels.MADE] == 7
    queue.expand(third, [1.0, 1.0])
    assert queue.next(done=third) == kernels.COMPLETE


def test_a_large_leaf_is_left_to_all_threads_and_waits_for_nobody_who_is_busy():
    queue = Queue(9)
    queue.expand(queue.next(), [2.0, 1.0], sizes=(100, 10))
    assert queue.next(done=0) == kernels.SHARED
    assert queue.nodes[2, STATE] == kernels.OPEN  # though one thread could take it
    assert queue.take(NOT_TOGETHER, team=4, for_all=True) == 1
    queue.expand(1, [3.0, 0.5], sizes=(10, 200))
    assert queue.take(NOT_TOGETHER, 1, team=4) == kernels.SHARED
    queue.expand(queue.take(NOT_TOGETHER, team=4, for_all=True), [0.0, 0.0])  # large, so it is taken early
    small = [queue.take(NOT_TOGETHER, 4, team=4), queue.take(NOT_TOGETHER, team=4)]
    assert sorted(queue.reals[small, GAIN]) == [1.0, 3.0]
    assert queue.take(NOT_TOGETHER, team=4) == kernels.WAIT


@pytest.mark.parametrize(
    ("team", "sizes", "sharing", "together"),
    [
        (4, (30_000, 30_000), (10**6, 0, 100), True),  # half the time of one after the other, each by one thread
        (4, (30_000, 30_000), (10**6, 0, 50), False),  # as long
        (8, (30_000, 30_000), (10**6, 0, 50), True),
        (1, (30_000, 30_000), (10**6, 0, 100), False),
        (8, (30_000, 30_000), (10**6, 20_000, 100), False),  # for what they meet
        (4, (90_000, 10), (10**6, 0, 50), True),  # one would be at the large one when others have done the rest
        (8, (10, 10), (10**6, 600, 60), True),
        (4, (10, 10), (10**6, 600, 60), False),
    ],
)
def test_all_threads_expand_a_node_where_that_is_sooner_than_one_does(team, sizes, sharing, together):
    queue = Queue(9)
    queue.expand(queue.next(), [2.0, 1.0], sizes)
    first = queue.take(sharing, 0, team=team)
    assert (first == kernels.SHARED) is together
    if together:  # all come, whatever is done before they are there
        assert queue.take(sharing, team=team) == kernels.SHARED
        assert queue.take(sharing, team=team, for_all=True) == 1
    else:
        assert [first, queue.take(sharing, team=team)] == [1, 2]


def test_a_thread_that_is_busy_counts_as_work_that_others_do_meanwhile():
    queue, sharing = Queue(9), (10**6, 0, 40)
    queue.expand(queue.next(), [2.0, 1.0], (10, 10))
    assert queue.take(sharing, 0, team=4) == 1  # two nodes: 1.25 times the time of one
    queue.expand(1, [0.5, 0.0], (10, 10))
    assert queue.take(sharing, team=4) == 2  # the other, beside a thread that is busy
    queue.expand(2, [0.0, 0.0])
    assert queue.take(sharing, 2, team=4) == kernels.WAIT
    assert queue.take(sharing, 1, team=4) == kernels.SHARED  # one is left, and nobody is busy


def test_a_node_is_said_to_be_expanded_and_none_is_taken():
    queue = Queue(9)
    queue.expand(queue.next(), [2.0, 1.0])
    queue.finish(0)
    assert queue.counts[kernels.BUSY] == 0
    assert queue.counts[kernels.READY] == 2


def test_a_node_below_one_of_little_gain_is_hopeless_however_large_its_own_gain_is():
    queue = Queue(5)  # the root, and three more
    queue.expand(queue.next(), [5.0, 1.0])
    first, second = queue.next(done=0), queue.next()
    queue.expand(second, [9.0, 0.0])
    queue.expand(first, [4.0, 3.0])
    assert queue.next(done=second) == queue.nodes[second, CHILD]  # worth 1, and so far among the best three
    assert queue.next(done=first) == queue.nodes[first, CHILD]
    assert queue.counts[kernels.DROPPED] == 0
    assert queue.reals[queue.next(), GAIN] == 3.0
    assert queue.next() == kernels.WAIT


def test_runs_lie_as_rows_do_and_have_the_leaf_above_them():
    queue = Queue(3)
    queue.expand(queue.next(), [5.0, 4.0])
    queue.nodes[0, STOP] = 30
    first, second = queue.next(done=0), queue.take(NOT_TOGETHER)
    assert second == kernels.WAIT
    queue.expand(first, [0.5, 0.0])
    assert queue.next(done=first) == kernels.COMPLETE  # three leaves: the second, and the children of the first
    children = int(queue.nodes[first, CHILD])
    for node, start, stop in ((1, 0, 20), (2, 20, 30), (children, 0, 13), (children + 1, 13, 20)):
        queue.nodes[node, START], queue.nodes[node, STOP] = start, stop
    assert queue.runs().tolist() == [[13, 20, 30], [0, 2, 1]]
    ahead = 5  # what was divided ahead is a leaf all the same; one of its children has no rows
    queue.nodes[2, STATE], queue.nodes[2, CHILD] = kernels.EXPANDED, ahead
    for node, start, stop in ((ahead, 20, 20), (ahead + 1, 20, 30)):
        queue.nodes[node, START], queue.nodes[node, STOP] = start, stop
    assert queue.runs().tolist() == [[13, 20, 30], [0, 2, 1]]
    queue.nodes[ahead, STOP] = queue.nodes[ahead + 1, START] = 24
    assert queue.runs().tolist() == [[13, 20, 24, 30], [0, 2, 1, 1]]
