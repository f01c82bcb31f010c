"""Growing one tree: best leaf first or level by level, on every core, with the same result on any number of cores.

Expanding a node means: partition its rows, build the histogram of the smaller child, subtract for the larger one, find
the best split of both. None of it depends on any other leaf, so threads expand *ahead*: while one works on the leaf
that is next, the others take the leaves behind it in the queue. Which splits enter the tree is decided afterwards, in
the order of the queue alone; an expansion that the tree did not need is dropped. Nodes too large for one thread are
expanded one at a time, by all of them.

With rows in several processes every process grows the same tree: histograms are summed over all of them, and decisions
depend on sums alone. Waiting for each other is the cost, so the leaves at the head of the queue are expanded together,
in the queue's order, and their histograms summed in one step.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bitplan.kernels.base.jit import on_threads, thread_count
from bitplan.trees.binning import BinnedRows, Bins
from bitplan.trees.distributed.shards import ALONE, Shards
from bitplan.trees.distributed.wire import HistogramSum
from bitplan.trees.gradients import Array, Gradients
from bitplan.trees.histogram import Histogram, HistogramBuilder
from bitplan.trees.loops import rows as trees_rows
from bitplan.trees.loops import split as kernels
from bitplan.trees.loops.histogram import BINS
from bitplan.trees.tree import Tree

SHARED_ROWS = 2**17  # from here on all threads work on one node
THREADS_FROM_ROWS = 2**13  # below, starting threads takes longer than they save
ALL_ROWS = 2**62  # no node is too large
NODES_A_STEP = 8  # that several processes expand together
COMPLETE, SHARED, WAIT = -1, -2, -3  # what `take` says instead of a node
OPEN, TAKEN, EXPANDED = range(3)  # how far a node has come
FAR = 1.7976931348623157e308  # the threshold that only missing values are beyond


@dataclass(frozen=True)
class GrowthRules:
    """What a tree may look like; `monotone` by feature: 1 rising, -1 falling, 0 free."""

    max_leaves: int
    max_depth: int  # 0: no limit
    best_first: bool
    l1: float
    l2: float
    min_child_weight: float
    min_child_rows: int
    min_gain: float
    monotone: Array
    category_smoothing: float = 10.0
    category_l2: float = 10.0

    def may_split(self, rows: int) -> bool:
        return rows >= 2 and rows >= 2 * self.min_child_rows

    @property
    def numbers(self) -> Array:
        """In the order of `trees.loops.split`."""
        return np.array(
            [
                self.l1,
                self.l2,
                self.min_child_weight,
                self.min_child_rows,
                self.min_gain,
                self.category_smoothing,
                self.category_l2,
                float(np.any(self.monotone)),
            ],
            np.float64,
        )


@dataclass(frozen=True)
class Grown:
    """A tree whose leaf values are plain Newton steps; the rows of each leaf; which bins go left at each node.

    The rows lie in space that the grower's next tree needs.
    """

    tree: Tree
    leaf_rows: list[Array]
    leaf_bounds: Array
    left_bins: Array


class TreeGrower:
    """Grows trees on the same rows and bins, round after round."""

    def __init__(self, data: BinnedRows, bins: Bins, rules: GrowthRules, shards: Shards = ALONE) -> None:
        self._data, self._bins, self._rules, self._shards = data, bins, rules, shards
        # None where there are none: then numba leaves out what is for them.
        self._bounding = rules.monotone if rules.l1 or np.any(rules.monotone) else None
        self._is_category = bins.is_category if np.any(bins.is_category) else None
        self._numbers = rules.numbers
        self._space, self._spare = np.empty(data.rows, np.uint64), np.empty(data.rows, np.uint64)
        self._thresholds = np.full((len(bins.edges), 256), FAR)
        for feature, edges in enumerate(bins.edges):
            self._thresholds[feature, : len(edges)] = edges

    @property
    def columns(self) -> Array:
        """Bins by feature, then row."""
        return self._data.columns

    def grow(self, gradients: Gradients, rows: Array | range, features: Array) -> Grown:
        """One tree from `rows` and the features it may use."""
        self._scales = np.array([gradients.grad_scale, gradients.hess_scale])
        is_category = self._bins.is_category[features]
        self._features, self._numeric, self._categories = features, features[~is_category], features[is_category]
        self._packs = self._can_pack()
        self._builder = HistogramBuilder(self._data, gradients, features)
        self._entries = self._builder.enter(rows, self._space)  # reordered leaf by leaf
        histogram, total_rows = self._builder.build(self._entries, threads=len(rows) >= THREADS_FROM_ROWS), len(rows)
        if self._shards.count > 1:
            self._sum = HistogramSum(self._shards, gradients.precision, self._builder, features, self._bins.counts)
            total_rows = int(self._shards.add(np.array([len(rows)], np.int64), "rows of a tree")[0])
            (histogram,) = self._sum([histogram], [total_rows])
        self._growth = growth = _Growth(min(self._rules.max_leaves, max(total_rows, 1)), self._rules.best_first)
        growth.set_root(len(rows), histogram.sums(int(features[0])).sum(axis=0))
        self._judge(0, histogram)
        while self._shards.count > 1 and (nodes := growth.take_together(NODES_A_STEP)):
            self._expand_together(nodes)
        while (node := growth.work_ahead(self._expand)) is not None:
            self._expand(node, threads=True)
            growth.finish(node)
        return self._finish(growth)

    def _expand(self, node: int, threads: bool = False) -> None:
        small, histogram = self._divide(node, threads)
        if histogram is not None:
            self._judge_children(node, small, histogram)

    def _expand_together(self, nodes: list[int]) -> None:
        """The same for several nodes and processes: one step for the sums of all."""
        growth = self._growth
        divided = [(node, *self._divide(node, threads=growth.size(node) >= THREADS_FROM_ROWS)) for node in nodes]
        here = [(node, small, histogram) for node, small, histogram in divided if histogram is not None]
        rows = [int(growth.nodes[small, kernels.ROWS]) for _, small, _ in here]
        sums = self._sum([histogram for _, _, histogram in here], rows)
        for (node, small, _), histogram in zip(here, sums, strict=True):
            self._judge_children(node, small, histogram)
        for node in nodes:
            growth.finish(node)

    def _divide(self, node: int, threads: bool) -> tuple[int, Histogram | None]:
        """Partition a node's rows; its child of fewer rows, and that one's histogram. None: neither can be split."""
        growth = self._growth
        start, stop = growth.spans[node]
        small = growth.divide(
            node, start + self._partition(node, 0 if threads else stop - start), self._rules, self._scales
        )
        if small < 0:
            return small, None
        start, stop = growth.spans[small]
        entries = self._entries[start:stop]
        return small, self._builder.build(entries, threads=threads and len(entries) >= THREADS_FROM_ROWS)

    def _judge_children(self, node: int, small: int, histogram: Histogram) -> None:
        """Find the best splits of a node's children, from the histogram of the smaller one."""
        growth = self._growth
        large = 2 * growth.child[node] + 1 - small
        rest = self._builder.subtract(growth.histograms.pop(node), histogram, growth.rows(large))
        self._judge(small, histogram)
        self._judge(large, rest)

    def _judge(self, node: int, histogram: Histogram) -> None:
        """Find the best split of a node."""
        growth, numbers = self._growth, (self._scales, self._numbers)
        if not self._rules.may_split(growth.rows(node)):
            return
        tables = growth.nodes[node], growth.reals[node], growth.goes_left[node]
        features, is_packed = self._features, self._packs and histogram.words == 1
        splits = False
        if is_packed and len(self._numeric):
            prefixes = np.empty(BINS, np.int64)
            splits = kernels.judge_packed(
                histogram.cells, *tables, self._numeric, self._bins.counts, *numbers, prefixes
            )
            features = self._categories
        if len(features):
            special = self._is_category, self._bounding
            space = np.empty((4, BINS), np.int64), np.empty((2, BINS))
            splits = kernels.judge(
                histogram.cells, histogram.words, *tables, features, self._bins.counts, *special, *numbers, *space
            )
        if splits:
            growth.histograms[node] = histogram

    def _can_pack(self) -> bool:
        """Whether one-word cells may be judged as they are: nothing is bounded, and float32 holds what it must."""
        grad_scale, hess_scale = self._scales
        if self._bounding is not None or not (grad_scale > 0 and hess_scale > 0):
            return False
        with np.errstate(all="ignore"):
            extra, unit = self._rules.l2 / hess_scale, hess_scale / (grad_scale * grad_scale)
        limit = kernels.QUICK_L2
        return bool((extra == 0 or 1 / limit < extra < limit) and 0 < unit < np.inf)

    def _partition(self, node: int, share: int = 0) -> int:
        """Move the rows of a node, `share` at a time on all threads (0: as many for each); how many went left."""
        start, stop = self._growth.spans[node]
        size, goes_left = stop - start, self._growth.goes_left[node]
        column = self._data.columns[self._growth.nodes[node, kernels.FEATURE]]
        entries, spare = self._entries[start:stop], self._spare[start:stop]
        if share >= size:
            left = int(trees_rows.part_rows(entries, column, goes_left, spare))
            entries[left:] = spare[: size - left]
            return left
        share = share or -(-size // thread_count())
        cuts = [slice(first, min(first + share, size)) for first in range(0, size, share)]
        lefts = on_threads(lambda cut: int(trees_rows.part_rows(entries[cut], column, goes_left, spare[cut])), cuts)
        left = 0
        for cut, count in zip(cuts, lefts, strict=True):  # in order: each moves to what was read already
            entries[left : left + count] = entries[cut.start : cut.start + count]
            left += count
        rights = [cut.stop - cut.start - count for cut, count in zip(cuts, lefts, strict=True)]
        ends = left + np.cumsum(rights)

        def bring_back(part: tuple[slice, int, int]) -> None:
            cut, count, end = part
            entries[end - count : end] = spare[cut.start : cut.start + count]

        on_threads(bring_back, list(zip(cuts, rights, ends, strict=True)))
        return left

    def _finish(self, growth: _Growth) -> Grown:
        at_splits, left, right = (np.array(part, np.int64) for part in (growth.splits, growth.left, growth.right))
        at_leaves = np.array([node for node, _ in growth.leaves])
        nodes, left_bins = growth.nodes[at_splits], growth.goes_left[at_splits]
        feature, bin_ = nodes[:, kernels.FEATURE], nodes[:, kernels.BIN]
        node_value, node_weight = self._values(growth, at_splits)
        leaf_value, leaf_weight = self._values(growth, at_leaves)
        tree = Tree(
            feature=feature.astype(np.int32),
            threshold=np.where(bin_ < 0, 0.0, self._thresholds[feature, bin_]),
            missing_left=nodes[:, kernels.MISSING_LEFT].astype(np.bool_),
            left=left.astype(np.int32),
            right=right.astype(np.int32),
            gain=growth.reals[at_splits, kernels.GAIN],
            node_value=node_value,
            node_weight=node_weight,
            node_rows=nodes[:, kernels.ROWS].copy(),
            categories=tuple(
                None if bin_ >= 0 else self._category_set(feature, goes_left)
                for feature, bin_, goes_left in zip(feature.tolist(), bin_.tolist(), left_bins, strict=True)
            ),
            leaf_value=leaf_value,
            leaf_weight=leaf_weight,
            leaf_rows=growth.nodes[at_leaves, kernels.ROWS],
        )
        numbers = self._entries.view(np.uint32)[::2]  # the lower half of each entry
        leaf_rows = [numbers[slice(*growth.spans[node])] for node, _ in growth.leaves]
        return Grown(tree, leaf_rows, growth.reals[at_leaves, kernels.LOW :], left_bins)

    def _values(self, growth: _Growth, nodes: Array) -> tuple[Array, Array]:
        """What each node's step would be, and its hessian."""
        grads, hess = (
            growth.nodes[nodes, kernels.GRAD] * self._scales[0],
            growth.nodes[nodes, kernels.HESS] * self._scales[1],
        )
        return newton_steps(grads, hess, self._rules, growth.reals[nodes, kernels.LOW :]), hess

    def _category_set(self, feature: int, goes_left: Array) -> Array:
        known = self._bins.edges[feature]
        chosen: Array = known[goes_left[: len(known)].astype(np.bool_)]
        return chosen


class _Growth:
    """One tree so far: tables of its nodes (`loops.split`), histograms of leaves that could be split, its queue, its
    threads.

    Threads call `take` one at a time, and expand what it gave them without a lock: they then touch only that node's
    children, which nobody looks at before it is `finish`ed.
    """

    def __init__(self, max_leaves: int, best_first: bool, places: int = 0) -> None:
        places = places or 4 * max_leaves + 2  # half of them for expansions that the tree will not need
        self._max_leaves, self._best_first = max_leaves, best_first
        self.nodes, self.reals = np.zeros((places, kernels.NODE_COLUMNS), np.int64), np.zeros((places, 3))
        self.goes_left = np.empty((places, BINS), np.uint8)
        self.state, self.depth, self.child, self.made = [OPEN] * places, [0] * places, [0] * places, 1
        self.spans = [(0, 0)] * places  # rows of this process
        self.leaves = [(0, -1)]  # the node, and where the tree points to it: 2 * split + side
        self.splits: list[int] = []  # the node
        self.left: list[int] = []  # its children, as `Tree` has them
        self.right: list[int] = []
        self._queue: list[tuple[float, int, int]] = []  # leaves in the order in which they are split
        self.histograms: dict[int, Histogram] = {}
        self._changed = threading.Condition()
        self._failed = False

    def set_root(self, size: int, totals: Array) -> None:
        self.spans[0] = 0, size
        self.nodes[0, kernels.GRAD : kernels.ROWS + 1] = totals
        self.reals[0, kernels.LOW :] = -np.inf, np.inf

    def size(self, node: int) -> int:
        """Rows of this process."""
        start, stop = self.spans[node]
        return stop - start

    def rows(self, node: int) -> int:
        """Rows of all processes: what decisions depend on."""
        return int(self.nodes[node, kernels.ROWS])

    def divide(self, node: int, middle: int, rules: GrowthRules, scales: Array) -> int:
        """Rows, sums and bounds of a node's children, of which the right one's rows begin at `middle`.

        Returns the child of fewer rows, or -1 if neither can be split. Children of a monotone split may not cross the
        middle between them, however they are split again.
        """
        (start, stop), left = self.spans[node], self.child[node]
        grad, hess, rows, left_grad, left_hess, left_rows, feature, *_ = self.nodes[node].tolist()
        sums = ((left_grad, left_hess, left_rows), (grad - left_grad, hess - left_hess, rows - left_rows))
        self.nodes[left : left + 2] = 0
        self.nodes[left : left + 2, : kernels.ROWS + 1] = sums
        self.reals[left : left + 2] = self.reals[node]
        self.reals[left : left + 2, kernels.GAIN] = 0.0
        self.spans[left : left + 2] = (start, middle), (middle, stop)
        self.depth[left : left + 2] = [self.depth[node] + 1] * 2
        direction = rules.monotone[feature]
        if direction:
            children = self.nodes[left : left + 2] * 1.0
            steps = newton_steps(
                children[:, kernels.GRAD] * scales[0],
                children[:, kernels.HESS] * scales[1],
                rules,
                self.reals[left : left + 2, kernels.LOW :],
            )
            upper, lower = (left, left + 1) if direction > 0 else (left + 1, left)
            self.reals[upper, kernels.HIGH] = self.reals[lower, kernels.LOW] = (0.0 + steps[0] + steps[1]) / 2
        fewer, more = sorted((left_rows, rows - left_rows))
        if self.depth[left] == rules.max_depth or not rules.may_split(more):
            return -1
        return left if left_rows == fewer else left + 1

    def take_together(self, most: int) -> list[int]:
        """The leaves at the head of the queue, as many as the tree has room for and not more than `most`."""
        taken: list[int] = []
        while len(taken) < most and (node := self.take(ALL_ROWS, most)) >= 0:
            taken.append(node)
        return taken

    def take(self, shared_rows: int, ahead: int) -> int:
        """The first leaf of the queue that nobody has taken and one thread can expand, of the first `ahead`.

        Or COMPLETE: the tree is; SHARED: the next leaf is one for all threads; WAIT: all that are next are taken.
        """
        self._move_into_tree()
        room = self._max_leaves - len(self.leaves)
        if not room or not self._queue:
            return COMPLETE
        node = self.leaves[self._queue[0][2]][0]
        if self.size(node) >= shared_rows:
            return SHARED
        if self.state[node] != OPEN:
            node = WAIT
            if self.made + 2 + 2 * room <= len(self.nodes):  # there are places for what the tree may still need
                behind = (self.leaves[leaf][0] for _, _, leaf in self._queue[: min(room, ahead)])
                is_free = (at for at in behind if self.state[at] == OPEN and self.size(at) < shared_rows)
                node = next(is_free, WAIT)
        if node >= 0:  # its children get their places
            self.state[node], self.child[node] = TAKEN, self.made
            self.made += 2
        return node

    def _move_into_tree(self) -> None:
        """Split leaves that are expanded, first in the queue first, as far as expansions have come."""
        if not self.splits and not self._queue:
            self._push(0, 0)
        while len(self.leaves) < self._max_leaves and self._queue:
            leaf = self._queue[0][2]
            node, link = self.leaves[leaf]
            if self.state[node] != EXPANDED:
                return
            del self._queue[0]
            at, new = len(self.splits), len(self.leaves)
            self.splits.append(node)
            self.left.append(~leaf)
            self.right.append(~new)
            if link >= 0:
                (self.right if link & 1 else self.left)[link >> 1] = at
            child = self.child[node]
            self.leaves[leaf] = child, 2 * at
            self.leaves.append((child + 1, 2 * at + 1))
            self._push(leaf, 2 * at + 1)
            self._push(new, 2 * at + 2)

    def _push(self, leaf: int, pushed: int) -> None:
        """Into the queue: a leaf of equal rank comes after those that were there before."""
        node = self.leaves[leaf][0]
        gain = float(self.reals[node, kernels.GAIN])
        if gain > 0:
            insort(self._queue, (-gain if self._best_first else self.depth[node], pushed, leaf))

    def finish(self, node: int) -> None:
        """The node is expanded."""
        self.state[node] = EXPANDED

    def work_ahead(self, expand: Callable[[int], None]) -> int | None:
        """Expand leaves on all threads, until the next one needs all of them, and take that; None: it was the last."""
        on_threads(lambda _: self._work(expand), range(thread_count()))
        node = self.take(ALL_ROWS, NODES_A_STEP)
        return None if node == COMPLETE else node

    def _work(self, expand: Callable[[int], None]) -> None:
        """What each thread does: take the best leaf that nobody has taken."""
        done, ahead = -1, 2 * thread_count()
        try:
            while True:
                with self._changed:
                    if done >= 0:
                        self.finish(done)
                        self._changed.notify_all()
                    while (node := self.take(SHARED_ROWS, ahead)) == WAIT and not self._failed:
                        self._changed.wait()
                if node < 0 or self._failed:
                    return
                expand(node)
                done = node
        except BaseException:
            self._failed = True  # so that no thread waits for what this one had taken
            raise
        finally:
            with self._changed:
                self._changed.notify_all()


def newton_steps(grads: Array, hess: Array, rules: GrowthRules, bounds: Array) -> Array:
    """`trees.loops.split.leaf_value` of many leaves; bounds (leaves, 2)."""
    shrunk = np.maximum(np.abs(grads) - rules.l1, 0.0)
    heavy = hess + rules.l2 > 0
    steps = np.where(heavy, -np.copysign(shrunk, grads) / np.where(heavy, hess + rules.l2, 1.0), 0.0)
    clipped: Array = np.minimum(np.maximum(steps, bounds[:, 0]), bounds[:, 1])
    return clipped
