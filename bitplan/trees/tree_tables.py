"""The tables of a tree that is growing (`trees.loops.nodes`), as Python holds them."""

from __future__ import annotations

import numpy as np

from bitplan.trees.gradients import Array
from bitplan.trees.histogram import Histogram
from bitplan.trees.loops import nodes as queue
from bitplan.trees.loops import split as kernels
from bitplan.trees.loops.histogram import BINS

ALL_ROWS = 2**62  # no node is too large


class Growth:
    """One tree so far: its tables (`trees.loops.nodes`); between processes, histograms of leaves to be split."""

    def __init__(self, max_leaves: int, best_first: bool, places: int = 0) -> None:
        places = places or 4 * max_leaves + 2  # half of them for expansions that the tree will not need
        self.nodes, self.reals = np.zeros((places, kernels.NODE_COLUMNS), np.int64), np.zeros((places, 4))
        self.goes_left = np.empty((places, BINS), np.uint8)
        self.leaves, self.splits = np.zeros((max_leaves, 3), np.int64), np.zeros((max_leaves, 3), np.int64)
        self.counts = np.array([1, 0, 1, *[0] * 7])  # the root is a leaf, and has a place
        self.best_first = best_first
        self.histograms: dict[int, Histogram] = {}
        self.ready, self.top = np.zeros((places, 3), np.int64), np.empty(max(max_leaves - 2, 0))
        self._tables = self.nodes, self.reals, self.leaves, self.splits, self.counts, self.ready, self.top, best_first

    def set_root(self, size: int, totals: Array) -> None:
        self.nodes[0, kernels.STOP], self.leaves[0, queue.LINK] = size, -1
        self.nodes[0, kernels.GROUPS] = -1  # all of them
        self.nodes[0, kernels.GRAD : kernels.ROWS + 1] = totals
        self.reals[0, kernels.LOW :] = -np.inf, np.inf, np.inf

    def open_root(self) -> None:
        """Put the root into the queue, if it can be split."""
        self.counts[queue.QUEUED] = self.counts[queue.READY] = self.reals[0, kernels.GAIN] > 0
        self.ready[0, queue.SIZE] = self.size(0)

    def size(self, node: int) -> int:
        """Rows of this process."""
        return int(self.nodes[node, kernels.STOP] - self.nodes[node, kernels.START])

    def take_together(self, most: int) -> list[int]:
        """The leaf at the head of the queue and those that the tree will probably need next, not more than `most`."""
        taken: list[int] = []
        while len(taken) < most and (node := self.take()) >= 0:
            taken.append(node)
        return taken

    def take(self, shared_rows: int = ALL_ROWS, done: int = -1, *, for_all: bool = False, team: int = 1) -> int:
        """`trees.loops.nodes.take`."""
        return int(queue.take(*self._tables, shared_rows, for_all, team, done))

    def finish(self, node: int) -> None:
        """The node is expanded: its children may be taken, even before it enters the tree."""
        self.take(done=node, for_all=True)  # which takes none
