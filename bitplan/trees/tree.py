"""A grown tree, and many of them laid out for prediction.

As in LightGBM: inner nodes and leaves are numbered apart, a child below zero is the leaf ~child, and the left child of
a split leaf keeps its number. A split sends numbers up to `threshold` to the left; a categorical one the numbers in its
set. Missing values go where training found best, and with the larger child where training saw none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bitplan.kernels.base.jit import on_threads, thread_count, worthwhile_threads
from bitplan.trees.gradients import Array
from bitplan.trees.loops import rows as trees_rows

SMALL = 2**15  # so many numbers are turned into one type and order, so that a loop for each need not be compiled
STEP_NS = 3  # a row's step down a tree
PARTS_A_THREAD = 4
SET_WORDS = 8  # at least: 256 categories


@dataclass(frozen=True)
class Tree:
    """Arrays by inner node, then by leaf."""

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
    """The same trees for prediction alone (`trees.loops.rows.add_trees`): nodes and leaves in one table.

    Of each tree the root comes first, then the children of its nodes, two by two.
    """

    roots: Array
    nodes: Array  # two int64 for each: its word, and the bits of its threshold (of a set of categories: its place)
    values: Array  # of leaves
    has_sets: bool

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
        nodes, held = np.empty((begins[-1], 2), np.int64), np.zeros(begins[-1])
        words, thresholds = nodes[:, 0], nodes.view(np.float64)[:, 1]
        thresholds[:] = np.inf
        is_set = category >= 0
        words[at_node] = feature.astype(np.int64) << trees_rows.FEATURE_SHIFT | child
        words[at_node] |= (~missing_left).astype(np.int64) << trees_rows.MISSING_SHIFT
        words[at_node] |= is_set * trees_rows.IS_CATEGORY
        thresholds[at_node] = np.where(is_set, category, threshold)
        words[at_leaf], held[at_leaf] = at_leaf | -(1 << 63), values
        return cls(begins[:-1], nodes.reshape(-1), held, bool(is_set.any()))


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
        return cls(outputs=outputs, bits=bits, steps=Steps.of(**parts), **parts)

    def parts(self, rows: int) -> int:
        """How many threads are worth their start for the predictions of some rows."""
        return worthwhile_threads(rows * self.row_ns)

    @cached_property
    def row_ns(self) -> float:
        """About what a row takes on one thread."""
        return float(STEP_NS * np.log2(np.diff(self.leaf_starts)).sum() + STEP_NS)

    def add_to(self, scores: Array, x: Array) -> bool:
        """Add every tree's leaf values to the raw scores (rows, outputs); whether a number of x is infinite."""
        steps, bits = self.steps, self.bits if self.steps.has_sets else None
        thresholds, step = steps.nodes.view(np.float64), self._rows_at_once(len(x))
        if x.size <= SMALL:
            x = np.array(x, np.float64, order="C")

        def work(start: int) -> bool:
            rows = x[start : start + step]
            given = steps.roots, steps.nodes, thresholds, steps.values, bits
            return bool(trees_rows.add_trees(rows, start, *given, scores))

        return any(on_threads(work, range(0, len(x), step)))

    def _rows_at_once(self, rows: int) -> int:
        """A part for each thread that pays; of many rows several, since some threads are slower than others."""
        parts = self.parts(rows)
        threads = min(parts, thread_count())
        share = -(-rows // (threads * max(min(parts // threads, PARTS_A_THREAD), 1)))
        return max(-(-share // trees_rows.LANES) * trees_rows.LANES, 1)


def bit_set(numbers: Array | None) -> Array:
    """Bit n of the set is set for each number n."""
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
