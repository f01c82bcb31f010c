"""Growing one tree: best leaf first or level by level, on every core, with the same result on any number of cores.

Expanding a node means: partition its rows, build the histogram of the smaller child, subtract for the larger one, find
the best split of both. None of it depends on any other leaf, so threads expand *ahead*: while one works on the leaf
that is next, the others take those that the tree will probably need after it. Which splits enter the tree is decided
afterwards, in the order of the queue alone; an expansion that the tree did not need is dropped. In one process all of
it is compiled (`trees.loops.grow_tree`).

With rows in several processes every process grows the same tree: histograms are summed over all of them, and decisions
depend on sums alone. Waiting for each other is the cost, so several leaves are expanded together, and their histograms
summed in one step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from bitplan.base.loops.jit import on_threads, thread_count
from bitplan.trees.binning import SAMPLE_ROWS, BinnedRows, Bins
from bitplan.trees.distributed.histogram_exchange import HistogramSum
from bitplan.trees.distributed.shards import ALONE, Shards
from bitplan.trees.gradients import Array, GradientPrecision, Gradients
from bitplan.trees.histogram import NARROW_ROWS, WIDE, Histogram, HistogramBuilder, enter
from bitplan.trees.loops import nodes as queue
from bitplan.trees.loops import rows as trees_rows
from bitplan.trees.loops import split as kernels
from bitplan.trees.loops.histogram import BINS, GROUP, PANEL, words_a_row
from bitplan.trees.thread_workspace import Growth, TeamSpace, team_size, tree_ns
from bitplan.trees.tree import FAR, Tree

THREADS_FROM_ROWS = 2**13  # below, starting threads takes longer than they save
NO_SUMS = np.zeros(3, np.int64)
NODES_A_STEP = 8  # that several processes expand together
ALONE_NS = 1e6  # of work: quicker trees grow one after the other
SLACK = 1.1  # memory is counted with so much more, for what is small
MOST_SPACE = 2**30  # bytes, beside the table, of trees that grow at the same time


def bytes_to_grow(
    rows: int, columns: int, row_bytes: int, outputs: int, leaves: int, precise: bool, threads: int
) -> int:
    """The most memory that a fit takes beside its table and its trees: to find bins, and then to grow trees.

    columns    of bins
    row_bytes  of the table
    """
    panels, rest = divmod(columns, PANEL)
    bins = rows * (columns + 8 * (panels * words_a_row(PANEL) + (words_a_row(rest) if rest else 0)))
    sample = min(rows, SAMPLE_ROWS)
    to_find_bins = sample * (row_bytes * (rows > sample) + 40 * threads) + 32 * rows
    cells, most = -(-columns // GROUP) * GROUP * BINS, max(min(leaves, rows), 1)
    narrow, wide = 2 if precise else 1, rows // NARROW_ROWS + 4 + threads
    pool = 8 * cells * (narrow * (2 * most + 3 + 2 * threads) + WIDE * wide)
    tables = most * (4 * (BINS + 200) + 200)
    one = 16 * rows + pool + tables
    space = 16 * rows + 2 * most * columns * BINS * 16  # as `TreeGrower.at_once` has it
    at_once = max(min(outputs, threads, MOST_SPACE // space), 1)
    growers = at_once + outputs % at_once  # those of the last few outputs have their own space
    return int(SLACK * (max(to_find_bins, bins + growers * one + rows * (32 * outputs + 48)) + 2**20))


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
    groups: Array | None = None  # by feature, bits: features that share a group may lie below one another
    category_smoothing: float = 10.0
    category_l2: float = 10.0

    @cached_property
    def numbers(self) -> Array:
        """The rules as numbers, in the order of `trees.loops.split`."""
        return np.array(
            [
                self.l1,
                self.l2,
                self.min_child_weight,
                self.min_child_rows,
                self.min_gain,
                self.category_smoothing,
                self.category_l2,
                self.max_depth,
                float(np.any(self.monotone)),
            ],
            np.float64,
        )


@dataclass(frozen=True)
class Grown:
    """A tree whose leaf values are plain Newton steps; all rows, and where those of each leaf lie; of each node its
    column of bins, and which bins go left. Rows lie in runs that rise: where each ends, and its leaf.

    The rows lie in space that the grower's next tree needs.
    """

    tree: Tree
    rows: Array
    spans: Array  # (leaves, 2): first row and end
    leaf_bounds: Array
    columns: Array
    goes_left: Array  # of all nodes that were made, by bin
    node_numbers: Array  # of each node, its place there
    run_ends: Array
    run_leaves: Array

    @property
    def left_bins(self) -> Array:
        """(nodes, bins); copied only when somebody asks, since few do."""
        bins: Array = self.goes_left[self.node_numbers]
        return bins

    @property
    def leaf_rows(self) -> list[Array]:
        return [self.rows[start:stop] for start, stop in self.spans.tolist()]


class TreeGrower:
    """Grows trees on the same rows and bins, round after round."""

    def __init__(self, data: BinnedRows, bins: Bins, rules: GrowthRules, shards: Shards = ALONE) -> None:
        self._data, self._bins, self._rules, self._shards = data, bins, rules, shards
        self._monotone = rules.monotone[bins.features].astype(np.int64)
        self._is_bounded = bool(rules.l1 or np.any(self._monotone))
        self._has_categories = bool(np.any(bins.is_category))
        self._numbers = rules.numbers
        self._team: TeamSpace | None = None
        self._team_growth: Growth | None = None
        self._space, self._spare = np.empty(data.rows, np.uint64), np.empty(data.rows, np.uint64)
        self._entries, self._scales = self._space[:0], np.zeros(2)
        self._chosen: Array | None = None
        groups = np.full(len(bins.edges), -1) if rules.groups is None else rules.groups[bins.features]
        self._by_feature = np.column_stack([bins.counts, groups])
        self._thresholds = np.full((len(bins.edges), 256), FAR)
        for feature, edges in enumerate(bins.edges):
            self._thresholds[feature, : len(edges)] = edges

    @cached_property
    def _judging_parts(self) -> Array:
        parts: Array = kernels.judging_parts(self._has_categories, self._is_bounded)
        return parts

    @property
    def columns(self) -> Array:
        """The bins by column, then row."""
        return self._data.columns

    @property
    def idle_space(self) -> Array:
        """Memory, 8 bytes a row, that is free until a tree's first rows are partitioned."""
        return self._spare

    def at_once(self, outputs: int) -> int:
        """How many trees of a round to grow at once: threads of one tree wait for each other."""
        rows, features = self._data.rows, len(self._bins.edges)
        work, leaves = tree_ns(rows, features, self._rules.max_leaves), min(self._rules.max_leaves, rows)
        if self._shards.count > 1 or work < ALONE_NS:
            return 1
        space = 16 * rows + 2 * leaves * features * BINS * 16  # entries, and histograms of leaves
        return max(min(outputs, thread_count(), MOST_SPACE // space), 1)

    def twin(self) -> TreeGrower:
        """Another grower for the same rows, with its own list of copied columns, to grow trees beside this one's."""
        return TreeGrower(replace(self._data, is_there=self._data.is_there.copy()), self._bins, self._rules)

    def grow(self, gradients: Gradients, rows: Array | range, features: Array) -> Grown:
        """Grow one tree from `rows` and the features it may use."""
        self._scales[:] = gradients.grad_scale, gradients.hess_scale
        columns = self._choose_columns(features)
        packs = len(self._by_kind[0]) > 0 and self._can_pack(gradients)
        entries = enter(gradients, rows, self._space)
        if len(entries) != len(self._entries):
            self._entries = entries  # reordered leaf by leaf
        if self._shards.count == 1:
            return self._grow_by_team(gradients, columns, packs)
        return self._grow_with_others(gradients, columns)

    def _choose_columns(self, features: Array) -> Array:
        """The columns of bins of some features; as long as these are the same, the same array."""
        if features is not self._chosen and (self._chosen is None or not np.array_equal(features, self._chosen)):
            self._chosen = features
            columns = self._columns = np.flatnonzero(np.isin(self._bins.features, features))
            is_category = self._bins.is_category[columns]
            self._by_kind = columns[~is_category], columns[is_category], columns
        return self._columns

    def _grow_with_others(self, gradients: Gradients, features: Array, _packs: bool = False) -> Grown:
        """Grow a tree together with other processes: each sums its rows, and histograms are added."""
        numbers = self._by_feature, self._scales, self._numbers
        self._judging = features, *numbers, self._bins.is_category, self._monotone, self._judging_parts
        self._builder = HistogramBuilder(self._data, gradients, features)
        rows = len(self._entries)
        histogram = self._builder.build(self._entries, threads=rows >= THREADS_FROM_ROWS)
        self._sum = HistogramSum(self._shards, gradients, self._builder, features, self._bins.counts)
        total_rows = int(self._shards.add(np.array([rows], np.int64), "rows of a tree")[0])
        (histogram,) = self._sum([histogram], [total_rows])
        self._growth = growth = Growth(min(self._rules.max_leaves, max(total_rows, 1)), self._rules.best_first)
        growth.set_root(rows, histogram.sums(int(features[0])).sum(axis=0))
        self._judge(histogram, histogram, 0, -1)
        growth.open_root()
        while nodes := growth.take_together(NODES_A_STEP):
            self._expand_together(nodes)
        return self._finish(growth)

    def _grow_by_team(self, gradients: Gradients, features: Array, packs: bool) -> Grown:
        """Grow by a team of threads, in compiled code from the root to the last leaf."""
        precise, rows = gradients.precision is GradientPrecision.F32, len(self._entries)
        leaves = min(self._rules.max_leaves, max(rows, 1))
        if self._team_growth is None or len(self._team_growth.leaves) != leaves:
            self._team_growth = Growth(leaves, self._rules.best_first)
        growth = self._team_growth
        growth.begin()
        growth.set_root(rows, NO_SUMS)
        size = team_size(self._data.rows, len(self._data.is_there), self._rules.max_leaves)
        if self._team is None or self._team.size != size:
            self._team = TeamSpace(self._data, size)
        numbers = self._by_feature, self._scales, self._numbers, self._bins.is_category, self._monotone
        by_kind = self._by_kind if packs else (features, features, features)
        options = *numbers, self._judging_parts, packs and not precise
        self._team.grow(growth, (self._entries, self._spare), gradients, by_kind, options)
        return self._finish(growth)

    def _expand_together(self, nodes: list[int]) -> None:
        """Expand several nodes, with rows in several processes: one step for the sums of all."""
        growth = self._growth
        divided = [(node, *self._divide(node, threads=growth.size(node) >= THREADS_FROM_ROWS)) for node in nodes]
        counted = [(node, small, histogram) for node, small, histogram in divided if histogram is not None]
        rows = [int(growth.nodes[small, kernels.ROWS]) for _, small, _ in counted]
        sums = self._sum([histogram for _, _, histogram in counted], rows)
        for (node, small, _), histogram in zip(counted, sums, strict=True):
            self._judge_children(node, small, histogram)
        for node in nodes:
            growth.finish(node)

    def _divide(self, node: int, threads: bool) -> tuple[int, Histogram | None]:
        """Partition a node's rows; its child of fewer rows, and that one's histogram. None: neither can be split."""
        growth = self._growth
        left_size = self._partition(node) if threads else -1
        space, tables = (self._entries, self._data.columns, self._spare), (growth.goes_left, growth.nodes, growth.reals)
        small = queue.divide(*space, *tables, node, left_size, self._monotone, self._scales, self._numbers)
        if small < 0:
            return small, None
        start, stop = growth.nodes[small, : kernels.STOP + 1].tolist()
        entries = self._entries[start:stop]
        return small, self._builder.build(entries, threads=threads and len(entries) >= THREADS_FROM_ROWS)

    def _judge_children(self, node: int, small: int, histogram: Histogram) -> None:
        """Find the best splits of a node's children, from the histogram of the smaller one."""
        growth = self._growth
        large, parent = 2 * int(growth.nodes[node, kernels.CHILD]) + 1 - small, growth.histograms.pop(node)
        rest = self._builder.subtract(parent, histogram, int(growth.nodes[large, kernels.ROWS]))
        self._judge(histogram, rest, small, large)

    def _judge(self, histogram: Histogram, rest: Histogram, small: int, large: int) -> None:
        """Find the best splits of two nodes; `rest` is that of the larger. -1: no node."""
        growth, space = self._growth, np.empty((4, BINS), np.int64)
        at = small, large, growth.nodes, growth.reals, growth.goes_left
        cells = histogram.cells, histogram.words, rest.cells, rest.words, False
        splits = kernels.judge(*cells, *at, *self._judging, space, np.empty((2, BINS)))
        if splits & 1:
            growth.histograms[small] = histogram
        if splits & 2:
            growth.histograms[large] = rest

    def _can_pack(self, gradients: Gradients) -> bool:
        """Whether one-word cells may be judged as they are: nothing is bounded, and float32 holds what it must."""
        square, hess_scale = gradients.grad_scale * gradients.grad_scale, gradients.hess_scale
        if self._is_bounded or not (square > 0 and hess_scale > 0):
            return False
        extra, unit, limit = self._rules.l2 / hess_scale, hess_scale / square, kernels.QUICK_L2
        return (extra == 0 or 1 / limit < extra < limit) and 0 < unit < math.inf

    def _partition(self, node: int) -> int:
        """Partition a node's rows by all threads; returns how many went left."""
        growth = self._growth
        start, stop, feature = growth.nodes[node, [kernels.START, kernels.STOP, kernels.FEATURE]].tolist()
        size, entries, spare = stop - start, self._entries[start:stop], self._spare[start:stop]
        share = max(-(-size // thread_count()), 1)
        cuts = [slice(first, min(first + share, size)) for first in range(0, size, share)]

        def part_rows(cut: slice) -> int:
            which = self._data.columns, feature, growth.goes_left, node
            return int(trees_rows.part_rows(entries, cut.start, cut.stop, *which, spare))

        lefts = on_threads(part_rows, cuts)
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

    def _finish(self, growth: Growth) -> Grown:
        leaves, splits = growth.leaves[: growth.counts[queue.LEAVES]], growth.splits[: growth.counts[queue.SPLITS]]
        count, ends = len(splits), len(leaves)
        children, numbers = np.empty((3, count), np.int32), np.empty((4, count))
        integers, sides = np.empty((2, count), np.int64), np.empty(count, np.bool_)
        values, spans, bounds = np.empty((2, ends)), np.empty((3, ends), np.int64), np.empty((ends, 2))
        tables = growth.nodes, growth.reals, leaves, splits, self._scales, self._numbers, self._thresholds
        arguments = *tables, self._bins.features, children, numbers, integers, sides, values, spans, bounds
        queue.lay_out(*arguments)
        (rows, columns), node_numbers = integers, splits[:, queue.NODE]
        tree = Tree(
            feature=children[0],
            threshold=numbers[0],
            missing_left=sides,
            left=children[1],
            right=children[2],
            gain=numbers[1],
            node_value=numbers[2],
            node_weight=numbers[3],
            node_rows=rows,
            categories=self._category_sets(columns, growth.goes_left, node_numbers),
            leaf_value=values[0],
            leaf_weight=values[1],
            leaf_rows=spans[0],
        )
        entered = self._entries.view(np.uint32)[::2]  # the lower half of each entry
        return Grown(tree, entered, spans[1:].T, bounds, columns, growth.goes_left, node_numbers, *growth.runs())

    def _category_sets(self, columns: Array, goes_left: Array, node_numbers: Array) -> tuple[Array | None, ...]:
        """Each node's categories that go left, as `Grown` has them; None for other features."""
        sets: list[Array | None] = [None] * len(columns)
        for node in np.flatnonzero(self._bins.is_category[columns]) if self._has_categories else ():
            categories = self._bins.edges[columns[node]]
            sets[node] = categories[goes_left[node_numbers[node], : len(categories)].astype(np.bool_)]
        return tuple(sets)


def newton_steps(sums: Array, units: tuple[float, float], rules: GrowthRules, bounds: Array) -> Array:
    """The Newton step of each leaf, within bounds; sums (leaves, 2) are of gradients and hessians, in these units."""
    steps: Array = np.empty(len(sums))
    kernels.leaf_values(sums, *units, rules.numbers, bounds, steps)
    return steps
