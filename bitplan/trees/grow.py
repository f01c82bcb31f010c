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

import heapq
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from bitplan.kernels import trees_rows, trees_split
from bitplan.kernels.jit import on_threads
from bitplan.trees.binning import BinnedRows, Bins
from bitplan.trees.gradients import Array, Gradients
from bitplan.trees.histogram import Histogram, HistogramBuilder
from bitplan.trees.shards import ALONE, Shards
from bitplan.trees.tree import Tree
from bitplan.trees.wire import HistogramSum

SHARED_ROWS = 2**17  # from here on all threads work on one node
THREADS_FROM_ROWS = 2**13  # below, starting threads takes longer than they save
NODES_A_STEP = 8  # that several processes expand together
FAR = 1.7976931348623157e308  # the threshold that only missing values are beyond
ANY_VALUE = (-np.inf, np.inf)


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

    @property
    def numbers(self) -> Array:
        """In the order of `trees_split`."""
        return np.array(
            [
                self.l1,
                self.l2,
                self.min_child_weight,
                self.min_child_rows,
                self.min_gain,
                self.category_smoothing,
                self.category_l2,
            ],
            np.float64,
        )


@dataclass(slots=True, eq=False)
class _Node:
    start: int
    stop: int
    depth: int
    totals: Array  # integers: gradient, hessian, rows
    bounds: tuple[float, float]
    histogram: Histogram | None = None
    gain: float = 0.0
    feature: int = -1
    bin: int = -1
    missing_left: bool = False
    left_sums: Array = field(default_factory=lambda: np.zeros(3, np.int64))
    goes_left: Array = field(default_factory=lambda: np.zeros(256, np.uint8))
    children: tuple[_Node, _Node] | None = None
    busy: bool = False
    rows: int = field(init=False)  # of all processes: what decisions depend on

    @property
    def size(self) -> int:
        """Rows of this process."""
        return self.stop - self.start

    def __post_init__(self) -> None:
        self.rows = int(self.totals[2])


@dataclass(frozen=True)
class Grown:
    """A tree whose leaf values are plain Newton steps; the rows of each leaf; which bins go left at each node.

    The rows lie in space that the grower's next tree needs.
    """

    tree: Tree
    leaf_rows: list[Array]
    leaf_bounds: list[tuple[float, float]]
    left_bins: Array


class TreeGrower:
    """Grows trees on the same rows and bins, round after round."""

    def __init__(self, data: BinnedRows, bins: Bins, rules: GrowthRules, shards: Shards = ALONE) -> None:
        self._data, self._bins, self._rules, self._shards = data, bins, rules, shards
        self._counts, self._numbers = bins.counts, rules.numbers
        self._bounded = bool(np.any(rules.monotone))
        self._space, self._spare = np.empty(data.rows, np.uint64), np.empty(data.rows, np.uint64)

    @property
    def columns(self) -> Array:
        """Bins by feature, then row."""
        return self._data.columns

    def grow(self, gradients: Gradients, rows: Array | range, features: Array) -> Grown:
        """One tree from `rows` and the features it may use."""
        self._features = features
        self._scales = np.array([gradients.grad_scale, gradients.hess_scale])
        self._builder = HistogramBuilder(self._data, gradients, features)
        self._sum = HistogramSum(self._shards, gradients.precision, self._builder, features, self._counts)
        total_rows = int(self._shards.add(np.array([len(rows)], np.int64), "rows of a tree")[0])
        self._entries = self._builder.enter(rows, self._space)  # reordered leaf by leaf
        (histogram,) = self._sum(
            [self._builder.build(self._entries, threads=len(rows) >= THREADS_FROM_ROWS)], [total_rows]
        )
        root = _Node(0, len(rows), 0, histogram.sums(int(features[0])).sum(axis=0), ANY_VALUE, histogram)
        self._find_split(root)
        growth = _Growth(root, self._rules)
        while self._shards.count > 1 and (nodes := growth.next_together(NODES_A_STEP)):
            self._expand_together(nodes)
        while (node := growth.next_shared()) is not None:
            if node.size >= SHARED_ROWS:
                self._expand(node, threads=True)
            else:
                on_threads(lambda _: growth.expand_ahead(self._expand), range(torch.get_num_threads()))
        return self._finish(growth)

    def _expand(self, node: _Node, threads: bool = False) -> None:
        self._judge(node, *self._divide(node, threads))

    def _expand_together(self, nodes: list[_Node]) -> None:
        """The same for several nodes and processes: one step for the sums of all."""
        divided = [self._divide(node, threads=node.size >= THREADS_FROM_ROWS) for node in nodes]
        here = [(histogram, min(left.rows, right.rows)) for left, right, histogram in divided if histogram is not None]
        sums = iter(self._sum([histogram for histogram, _ in here], [rows for _, rows in here]))
        for node, (left, right, histogram) in zip(nodes, divided, strict=True):
            self._judge(node, left, right, None if histogram is None else next(sums))

    def _divide(self, node: _Node, threads: bool) -> tuple[_Node, _Node, Histogram | None]:
        """A node's children, and the histogram of the smaller one; None: they are as deep as leaves may be."""
        left_size = self._partition(node, threads)
        assert self._shards.count > 1 or left_size == node.left_sums[2]
        left_bounds, right_bounds = self._child_bounds(node)
        middle, depth = node.start + left_size, node.depth + 1
        left = _Node(node.start, middle, depth, node.left_sums, left_bounds)
        right_sums = node.totals - node.left_sums
        right = _Node(middle, node.stop, depth, right_sums, right_bounds)
        if self._rules.max_depth and depth >= self._rules.max_depth:
            return left, right, None
        small = left if left.rows <= right.rows else right
        entries = self._entries[small.start : small.stop]
        return left, right, self._builder.build(entries, threads=threads and small.size >= THREADS_FROM_ROWS)

    def _judge(self, node: _Node, left: _Node, right: _Node, histogram: Histogram | None) -> None:
        """Find the best splits of the children, from the histogram of the smaller one."""
        if histogram is not None:
            assert node.histogram is not None
            small, large = (left, right) if left.rows <= right.rows else (right, left)
            small.histogram = histogram
            large.histogram = self._builder.subtract(node.histogram, histogram, large.rows)
            self._find_split(left)
            self._find_split(right)
        node.histogram = None
        node.children = left, right

    def _partition(self, node: _Node, threads: bool) -> int:
        column = self._data.columns[node.feature]
        entries, spare = self._entries[node.start : node.stop], self._spare[node.start : node.stop]
        if not threads:
            return int(trees_rows.partition_rows(entries, column, node.goes_left, spare))
        share = -(-node.size // torch.get_num_threads())
        cuts = [slice(start, min(start + share, node.size)) for start in range(0, node.size, share)]
        lefts = on_threads(
            lambda cut: int(trees_rows.part_rows(entries[cut], column, node.goes_left, spare[cut])), cuts
        )
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

    def _find_split(self, node: _Node) -> None:
        """Also decides that a node stays a leaf: then its histogram is not kept."""
        histogram = node.histogram
        assert histogram is not None
        if node.rows < 2 * self._rules.min_child_rows or node.rows < 2:
            node.histogram = None
            return
        found = np.zeros(4)
        trees_split.find_split(
            histogram.cells,
            histogram.words,
            self._features,
            self._counts,
            self._bins.is_category,
            self._rules.monotone,
            self._bounded,
            node.bounds,
            node.totals,
            self._scales,
            self._numbers,
            found,
            node.left_sums,
            node.goes_left,
        )
        if found[trees_split.GAIN] <= 0:
            node.histogram = None
            return
        node.gain, node.feature = float(found[trees_split.GAIN]), int(found[trees_split.FEATURE])
        node.bin, node.missing_left = int(found[trees_split.BIN]), bool(found[trees_split.MISSING_LEFT])

    def _values(self, nodes: Sequence[_Node]) -> tuple[Array, Array]:
        """What each node's step would be, and its hessian."""
        sums = np.array([node.totals for node in nodes], np.float64).reshape(-1, 3)
        bounds = np.array([node.bounds for node in nodes]).reshape(-1, 2)
        hess = sums[:, 1] * self._scales[1]
        return newton_steps(sums[:, 0] * self._scales[0], hess, self._rules, bounds), hess

    def _child_bounds(self, node: _Node) -> tuple[tuple[float, float], tuple[float, float]]:
        """Children of a monotone split may not cross the middle between them, however they are split again."""
        direction = self._rules.monotone[node.feature] if self._bounded else 0
        if direction == 0:
            return node.bounds, node.bounds
        sums = np.array([node.left_sums, node.totals - node.left_sums], np.float64)
        grads, hess = sums[:, 0] * self._scales[0], sums[:, 1] * self._scales[1]
        left, right = newton_steps(grads, hess, self._rules, np.array([node.bounds] * 2)).tolist()
        middle, (low, high) = (left + right) / 2, node.bounds
        return ((low, middle), (middle, high)) if direction > 0 else ((middle, high), (low, middle))

    def _finish(self, growth: _Growth) -> Grown:
        nodes, leaves = growth.nodes, growth.leaves
        left, right = np.array(growth.links, np.int32).reshape(-1, 2).T
        left_bins = np.array([node.goes_left for node in nodes], np.uint8).reshape(-1, 256)
        node_value, node_weight = self._values(nodes)
        leaf_value, leaf_weight = self._values(leaves)
        tree = Tree(
            feature=np.array([node.feature for node in nodes], np.int32),
            threshold=np.array([self._threshold(node) for node in nodes]),
            missing_left=np.array([node.missing_left for node in nodes], np.bool_),
            left=left.copy(),
            right=right.copy(),
            gain=np.array([node.gain for node in nodes]),
            node_value=node_value,
            node_weight=node_weight,
            node_rows=np.array([node.rows for node in nodes], np.int64),
            categories=tuple(self._category_set(node) for node in nodes),
            leaf_value=leaf_value,
            leaf_weight=leaf_weight,
            leaf_rows=np.array([leaf.rows for leaf in leaves], np.int64),
        )
        numbers = self._entries.view(np.uint32)[::2]  # the lower half of each entry
        leaf_rows = [numbers[leaf.start : leaf.stop] for leaf in leaves]
        return Grown(tree, leaf_rows, [leaf.bounds for leaf in leaves], left_bins)

    def _threshold(self, node: _Node) -> float:
        limits = self._bins.edges[node.feature]
        if node.bin < 0:
            return 0.0
        return float(limits[node.bin]) if node.bin < len(limits) else FAR

    def _category_set(self, node: _Node) -> Array | None:
        if node.bin >= 0:
            return None
        known = self._bins.edges[node.feature]
        return known[node.goes_left[: len(known)].astype(np.bool_)]


class _Growth:
    """The queue of leaves that could be split, and the tree so far."""

    def __init__(self, root: _Node, rules: GrowthRules) -> None:
        self._rules = rules
        self._queue: list[tuple[float, int, _Node, int, int]] = []
        self._pushed = 0
        self._ended = False
        self._changed = threading.Condition()
        self.nodes: list[_Node] = []
        self.links: list[list[int]] = []
        self.leaves = [root]
        self._push(root, 0, -1)

    def _push(self, node: _Node, leaf: int, link: int) -> None:
        """`link` says where the tree points to this leaf: 2 * parent + side."""
        if node.gain > 0:
            rank = -node.gain if self._rules.best_first else float(node.depth)
            heapq.heappush(self._queue, (rank, self._pushed, node, leaf, link))
        self._pushed += 1

    def _commit(self) -> None:
        """Move expanded leaves into the tree, best first, as far as expansions have come."""
        while self._queue and len(self.leaves) < self._rules.max_leaves:
            _, _, node, leaf, link = self._queue[0]
            if node.children is None:
                return
            heapq.heappop(self._queue)
            at, new_leaf = len(self.nodes), len(self.leaves)
            self.nodes.append(node)
            self.links.append([~leaf, ~new_leaf])
            if link >= 0:
                self.links[link // 2][link % 2] = at
            left, right = node.children
            self.leaves[leaf] = left
            self.leaves.append(right)
            self._push(left, leaf, 2 * at)
            self._push(right, new_leaf, 2 * at + 1)

    def next_shared(self) -> _Node | None:
        """The leaf that must be expanded next; None when the tree is complete."""
        self._commit()
        return self._queue[0][2] if self._queue and len(self.leaves) < self._rules.max_leaves else None

    def next_together(self, most: int) -> list[_Node]:
        """The leaves at the head of the queue, as many as the tree has room for and not more than `most`."""
        self._commit()
        room = self._rules.max_leaves - len(self.leaves)
        ahead = heapq.nsmallest(min(room, most), self._queue)
        return [node for _, _, node, _, _ in ahead if node.children is None]

    def _take(self) -> _Node | None:
        node = self.next_shared()
        if node is None or node.size >= SHARED_ROWS:
            self._ended = True
            return None
        if not node.busy:
            return node
        room = self._rules.max_leaves - len(self.leaves)
        ahead = heapq.nsmallest(min(room, 2 * torch.get_num_threads()), self._queue)
        return next(
            (node for _, _, node, _, _ in ahead if not node.busy and node.children is None and node.size < SHARED_ROWS),
            None,
        )

    def expand_ahead(self, expand: Callable[[_Node], None]) -> None:
        """What each thread does: take the best leaf that nobody has taken, until the next one needs all threads."""
        with self._changed:
            self._ended = False
        try:
            while True:
                with self._changed:
                    while (node := self._take()) is None:
                        if self._ended:
                            return
                        self._changed.wait()
                    node.busy = True
                expand(node)
                with self._changed:
                    node.busy = False
                    self._changed.notify_all()
        except BaseException:
            with self._changed:
                self._queue.clear()  # so that no thread waits for what this one had taken
            raise
        finally:
            with self._changed:
                self._changed.notify_all()


def newton_steps(grads: Array, hess: Array, rules: GrowthRules, bounds: Array) -> Array:
    """`trees_split.leaf_value` of many leaves; bounds (leaves, 2)."""
    shrunk = np.maximum(np.abs(grads) - rules.l1, 0.0)
    heavy = hess + rules.l2 > 0
    steps = np.where(heavy, -np.copysign(shrunk, grads) / np.where(heavy, hess + rules.l2, 1.0), 0.0)
    clipped: Array = np.minimum(np.maximum(steps, bounds[:, 0]), bounds[:, 1])
    return clipped
