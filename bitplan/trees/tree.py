"""A grown tree, many of them laid out for prediction, and a model of them.

As in LightGBM: inner nodes and leaves are numbered apart, a child below zero is the leaf ~child, and the left child of
a split leaf keeps its number. A split sends numbers up to `threshold` to the left; a categorical one the numbers in its
set. Missing values go where training found best, and with the larger child where training saw none.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from bitplan.base.loops.helper_threads import run
from bitplan.base.loops.jit import thread_count
from bitplan.base.loops.row_pieces import data_address
from bitplan.trees.binning import blocks_of
from bitplan.trees.distributed.shards import Array
from bitplan.trees.loops import predict
from bitplan.trees.pieces import TablePieces

ROW_NS, TREE_NS, STEP_NS = 20.0, 3.0, 3.0  # of a row: for itself, each tree's first splits, a step further down
HELPER_NS = 20_000.0  # of work, for which a thread is asked to help
GIVEN = struct.Struct(f"{predict.OUTPUTS}q")  # the part of a job that each prediction has of its own
PARTS_A_THREAD = 4
FAR = 1.7976931348623157e308  # the threshold that only missing values are beyond
SET_WORDS = 8  # at least: 256 categories


@dataclass(frozen=True)
class Tree:
    """A decision tree as arrays: one entry for each inner node, and one for each leaf."""

    feature: Array
    threshold: Array
    missing_left: Array
    left: Array
    right: Array
    gain: Array
    node_value: Array
    node_weight: Array
    node_rows: Array
    categories: tuple[Array | None, ...]  # by node: None, or the numbers that go left
    leaf_value: Array
    leaf_weight: Array
    leaf_rows: Array

    @property
    def leaves(self) -> int:
        return len(self.leaf_value)


@dataclass(frozen=True)
class Steps:
    """Trees as prediction reads them (`trees.loops.predict`): nodes and leaves in one table.

    Of each tree the root comes first, then the children of its nodes, two by two.
    """

    nodes: Array  # two int64 for each: its word, and the bits of its threshold (of a set of categories: its place)
    values: Array  # of leaves
    plans: Array  # of trees
    splits: (
        Array  # the first ones of each tree: threshold, place of the feature in a tile, exits that are not on the left
    )
    exits: Array  # of each tree's first splits, from left to right: places in the table

    @classmethod
    def of(
        cls,
        roots: Array,
        leaf_starts: Array,
        feature: Array,
        threshold: Array,
        missing_left: Array,
        category: Array,
        left: Array,
        right: Array,
        values: Array,
        node_rows: Array,
    ) -> Steps:
        begins = 2 * roots + np.arange(len(roots))  # a tree of m nodes has m + 1 leaves
        tree = np.repeat(np.arange(len(roots) - 1), np.diff(roots))
        child = begins[tree] + 1 + 2 * (np.arange(len(feature)) - roots[tree])
        at_node, at_leaf = np.empty(len(feature), np.int64), np.empty(len(values), np.int64)
        is_single = np.diff(roots) == 0
        at_node[roots[:-1][~is_single]], at_leaf[leaf_starts[:-1][is_single]] = (
            begins[:-1][~is_single],
            begins[:-1][is_single],
        )
        for side, children in enumerate((left, right)):
            inner = children >= 0
            at_node[roots[tree[inner]] + children[inner]] = child[inner] + side
            at_leaf[leaf_starts[tree[~inner]] + ~children[~inner]] = child[~inner] + side
        nodes, leaf_values = np.empty((begins[-1], 2), np.int64), np.zeros(begins[-1])
        words, thresholds = nodes[:, 0], nodes.view(np.float64)[:, 1]
        thresholds[:] = np.inf
        is_set = category >= 0
        words[at_node] = feature.astype(np.int64) << predict.FEATURE_SHIFT | child
        words[at_node] |= (~missing_left).astype(np.int64) << predict.MISSING_SHIFT
        words[at_node] |= is_set * predict.IS_CATEGORY
        thresholds[at_node] = np.where(is_set, category, threshold)
        words[at_leaf], leaf_values[at_leaf] = at_leaf | -(1 << 63), values
        plans = np.zeros((len(roots) - 1, predict.PLAN_SIZE), np.int64)
        splits, exits = [np.empty((0, 3), np.int64)], [np.empty(0, np.int64)]
        for number, plan in enumerate(plans):
            nodes_of_tree, leaves = (slice(*starts[number : number + 2].tolist()) for starts in (roots, leaf_starts))
            order, masks, exits_at, steps = _first_splits(
                left[nodes_of_tree], right[nodes_of_tree], is_set[nodes_of_tree], node_rows[nodes_of_tree]
            )
            split_nodes = np.array(order, np.int64) + nodes_of_tree.start
            by_side = np.argsort(~missing_left[split_nodes], kind="stable")
            split_nodes, goes_left = split_nodes[by_side], int(missing_left[split_nodes].sum())
            table = np.empty((len(split_nodes), 3), np.int64)
            table.view(np.float64)[:, 0] = threshold[split_nodes]
            table[:, 1] = feature[split_nodes].astype(np.int64) * (8 * predict.TILE)
            table[:, 2] = np.array(masks, np.uint64)[by_side].view(np.int64)
            plan[predict.LEFT_SPLITS :] = (
                goes_left,
                len(split_nodes) - goes_left,
                max(steps),
                is_set[nodes_of_tree].any(),
            )
            exit_targets = np.array(exits_at, np.int64)
            is_node = exit_targets >= 0
            exit_targets[is_node], exit_targets[~is_node] = (
                at_node[nodes_of_tree][exit_targets[is_node]],
                at_leaf[leaves][~exit_targets[~is_node]],
            )
            kinds = np.minimum(steps, predict.KINDS - 1).astype(np.int64)
            splits.append(table)
            exits.append(exit_targets | kinds << predict.STEPS_SHIFT)
        for column, parts in ((predict.FIRST_SPLIT, splits), (predict.FIRST_EXIT, exits)):
            plans[:, column] = np.cumsum([len(part) for part in parts])[:-1]
        return cls(nodes.reshape(-1), leaf_values, plans, np.concatenate(splits), np.concatenate(exits))


def _first_splits(
    left: Array, right: Array, is_set: Array, node_rows: Array
) -> tuple[list[int], list[int], list[int], list[int]]:
    """A tree's first splits by thresholds, those that most rows meet, and for each the exits that are not on its left,
    as bits; what is at each exit, from left to right: a node, or ~leaf; how many steps a leaf is away at most.
    """
    sides, sets = list(zip(left.tolist(), right.tolist(), strict=True)), is_set.tolist()
    order, reached = [], {0}
    for node in np.argsort(-node_rows, kind="stable").tolist():  # nodes before their children
        if node in reached and not sets[node]:
            order.append(node)
            reached.update(sides[node])
            if len(order) == predict.EXITS - 1:
                break
    order.sort()
    heights = [0] * len(sides)
    for node in range(len(sides) - 1, -1, -1):  # children come after their node
        heights[node] = 1 + max(heights[child] if child >= 0 else 0 for child in sides[node])
    if not order:
        return [], [], [0 if sides else ~0], heights[:1] or [0]
    sizes: dict[int, int] = {}
    for node in reversed(order):
        sizes[node] = sum(sizes.get(child, 1) for child in sides[node])
    first, masks, exits = {0: 0}, [], [0] * sizes[0]
    for node in order:
        at = first[node]
        for child in sides[node]:
            if child in sizes:
                first[child] = at
            else:
                exits[at] = child
            at += sizes.get(child, 1)
        count = sizes.get(sides[node][0], 1)
        masks.append((1 << 64) - 1 - (((1 << count) - 1) << first[node]))
    return order, masks, exits, [heights[exit_node] if exit_node >= 0 else 0 for exit_node in exits]


@dataclass(frozen=True)
class Forest:
    """All trees in one set of arrays; tree i adds to output i % outputs."""

    outputs: int
    roots: Array
    leaf_starts: Array
    feature: Array
    threshold: Array
    missing_left: Array
    category: Array
    bits: Array
    left: Array
    right: Array
    values: Array
    steps: Steps

    @classmethod
    def of(cls, trees: Sequence[Tree], outputs: int) -> Forest:
        sets = [numbers for tree in trees for numbers in tree.categories]
        category = np.full(len(sets), -1, np.int32)
        present = [at for at, numbers in enumerate(sets) if numbers is not None]
        category[present] = np.arange(len(present))
        words = [bit_set(sets[at]) for at in present]
        bits = np.zeros((max(1, len(present)), max(map(len, words), default=SET_WORDS)), np.uint32)
        for row, part in enumerate(words):
            bits[row, : len(part)] = part

        def joined(name: str, dtype: type) -> Array:
            return np.concatenate([np.empty(0), *(getattr(tree, name) for tree in trees)]).astype(dtype)

        parts = {
            "roots": np.cumsum([0, *(len(tree.feature) for tree in trees)]),
            "leaf_starts": np.cumsum([0, *(tree.leaves for tree in trees)]),
            "feature": joined("feature", np.int32),
            "threshold": joined("threshold", np.float64),
            "missing_left": joined("missing_left", np.bool_),
            "category": category,
            "left": joined("left", np.int32),
            "right": joined("right", np.int32),
            "values": joined("leaf_value", np.float64),
        }
        steps = Steps.of(**parts, node_rows=joined("node_rows", np.int64))
        return cls(outputs=outputs, bits=bits, steps=steps, **parts)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles go without `_job`, whose addresses are those of this forest's arrays."""
        return {name: part for name, part in self.__dict__.items() if name != "_job"}

    def parts(self, rows: int) -> int:
        """How many threads are worth using to predict this many rows."""
        return max(int(rows * self.row_ns / HELPER_NS), 1)

    @cached_property
    def row_ns(self) -> float:
        """About how many nanoseconds a row takes on one thread."""
        leaves = np.diff(self.leaf_starts)
        return float(ROW_NS + (TREE_NS + STEP_NS * np.log2(np.maximum(leaves / predict.EXITS, 1))).sum())

    def add_to(self, scores: Array, x: Array, threads: int | None = None) -> bool:
        """Add every tree's leaf values to the raw scores (rows, outputs); whether a number of x is infinite.

        threads  at most; None: `thread_count()`
        """
        if x.dtype.char not in "fd" or not x.dtype.isnative:
            x = x.astype(np.float64)
        rows, features = x.shape
        if not rows:
            return False
        threads, tiles = min(self.parts(rows), threads or thread_count()), -(-rows // predict.TILE)
        size = predict.TILE_AT + 8 * predict.TILE * features
        space = np.empty(predict.JOB_SIZE + (threads * size + predict.LINE) // 8, np.int64)
        space[: predict.JOB_SIZE] = self._job
        job = data_address(space)
        scratch = -(-(job + 8 * predict.JOB_SIZE) // predict.LINE) * predict.LINE
        step = predict.TILE * max(tiles // (threads * PARTS_A_THREAD), 1)
        table = data_address(x), *x.strides, x.itemsize == 4, features
        GIVEN.pack_into(space.data, 0, rows, step, *table, data_address(scores), scores.strides[0], scratch, size)
        run(predict.adder(), job, threads)
        return bool(space[predict.HAS_INFINITY])

    @cached_property
    def _job(self) -> Array:
        """The int64 array of sizes and addresses with which `trees.loops.predict` predicts by this ensemble."""
        job, steps = np.zeros(predict.JOB_SIZE, np.int64), self.steps
        arrays = steps.plans, steps.splits, steps.exits, steps.nodes, steps.values, self.bits
        job[predict.OUTPUTS : predict.SET_WORDS + 1] = (
            self.outputs,
            len(steps.plans),
            *(array.ctypes.data for array in arrays),
            self.bits.shape[1],
        )
        return job


def bit_set(numbers: Array | None) -> Array:
    """A set of small numbers as words of bits: bit n is set for each number n."""
    members = np.empty(0, np.int64) if numbers is None else numbers.astype(np.int64)
    words = np.zeros(max(SET_WORDS, int(members.max(initial=0)) // 32 + 1), np.uint32)
    np.bitwise_or.at(words, members // 32, np.uint32(1) << (members % 32).astype(np.uint32))
    return words


def is_tree(left: Array, right: Array, leaves: int) -> bool:
    """Every leaf, and every node but the root, is the child of exactly one node that comes before it."""
    children = np.concatenate([left, right])
    expected = np.concatenate([np.arange(1, leaves - 1), ~np.arange(leaves)]) if leaves > 1 else children[:0]
    parents = np.tile(np.arange(leaves - 1), 2)
    ordered = bool(np.all((children < 0) | (children > parents)))
    return ordered and np.array_equal(np.sort(children), np.sort(expected))


@dataclass
class Booster:
    """A trained model: the scores it starts from, and `outputs` trees for each round."""

    start: Array
    features: int
    trees: list[Tree] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # what early stopping watches, a number a round: less is better
    rounds_before: int = 0  # of the model that was trained further
    evals: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # by set, by metric: a number a round
    _forest: tuple[int, Forest] | None = field(default=None, repr=False, compare=False)

    @property
    def outputs(self) -> int:
        return len(self.start)

    def of_rounds(self, numbers: Array) -> Booster:
        """A booster with only the trees of these rounds, whose scores start at zero."""
        trees = [tree for number in numbers for tree in self.trees[number * self.outputs :][: self.outputs]]
        return Booster(np.zeros(self.outputs), self.features, trees)

    def add_round(self, trees: list[Tree], smaller: Array, share: float) -> None:
        """Add a round's trees, and leave a share of those of some earlier rounds; both at once, as Ctrl-C may come."""
        if not len(smaller):
            self.trees.extend(trees)
            return
        before = list(self.trees)
        for index in (smaller[:, None] * self.outputs + np.arange(self.outputs)).flat:
            tree = before[index]
            before[index] = replace(tree, leaf_value=tree.leaf_value * share, node_value=tree.node_value * share)
        self.trees[:] = before + trees

    def first_rounds(self, count: int) -> Booster:
        """The trees of the first rounds alone, without what was watched."""
        return Booster(self.start, self.features, self.trees[: count * self.outputs])

    @property
    def rounds(self) -> int:
        return len(self.trees) // self.outputs

    def scores(self, x: Array | TablePieces) -> Array:
        """Compute raw scores (rows, outputs)."""
        return self.scores_checked(x, thread_count())[0]

    def scores_checked(self, x: Array | TablePieces, threads: int) -> tuple[Array, bool]:
        """Scores, and whether a number of x is infinite, if there are trees."""
        scores, has_infinity = np.empty((len(x), self.outputs)), False
        scores[:] = self.start
        if type(x) is np.ndarray and self.trees:
            return scores, self.forest().add_to(scores, x, threads)
        for first, block in blocks_of(x) if self.trees else ():
            has_infinity |= self.forest().add_to(scores[first : first + len(block)], block, threads)
        return scores, has_infinity

    def forest(self) -> Forest:
        """The trees laid out for prediction, kept until their number changes."""
        if self._forest is None or self._forest[0] != len(self.trees):
            self._forest = len(self.trees), Forest.of(self.trees, self.outputs)
        return self._forest[1]

    def importances(self, kind: str = "gain") -> Array:
        """The gain of every feature's splits, or ("split") their number."""
        total = np.zeros(self.features)
        for tree in self.trees:
            np.add.at(total, tree.feature, tree.gain if kind == "gain" else 1.0)
        return total

    @property
    def best_rounds(self) -> int | None:
        """The number of rounds after which the watched metric was best; None if nothing was watched."""
        return self.rounds_before + int(np.argmin(self.losses)) + 1 if self.losses else None
