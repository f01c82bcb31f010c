"""Contributions of features to raw scores: exact Shapley values, by the rows that training sent through each node."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bitplan.kernels.base.jit import on_threads
from bitplan.trees.boost import Booster
from bitplan.trees.gradients import Array
from bitplan.trees.loops.contributions import add_contributions
from bitplan.trees.tree import Tree

ROWS_AT_ONCE = 256


def contributions(booster: Booster, x: Array) -> Array:
    """(rows, (features + 1) * outputs), as LightGBM's `pred_contrib`: for each output what each feature adds to its raw
    score, then the mean raw score of the training rows. A row's numbers sum to its raw score."""
    width = booster.features + 1
    out = np.zeros((len(x), booster.outputs, width))
    out[:, :, -1] = booster.start
    paths = [_Paths.of(tree) for tree in booster.trees]
    forest = booster.forest()
    nodes = forest.feature, forest.threshold, forest.missing_left, forest.category, forest.bits
    for place, tree in enumerate(booster.trees):
        out[:, place % booster.outputs, -1] += np.average(tree.leaf_value, weights=_rows_of(tree))

    def work(start: int) -> None:
        rows = x[start : start + ROWS_AT_ONCE]
        for place, (tree, path) in enumerate(zip(booster.trees, paths, strict=True)):
            if tree.leaves > 1:
                into = out[start : start + ROWS_AT_ONCE, place % booster.outputs]
                add_contributions(rows, forest.roots[place], *nodes, tree.leaf_value, *path.arrays, into)

    on_threads(work, range(0, len(x), ROWS_AT_ONCE))
    return out.reshape(len(x), booster.outputs * width)


@dataclass(frozen=True)
class _Paths:
    """For each leaf its parts, for each part its steps, in the order of `add_contributions`."""

    arrays: tuple[Array, Array, Array, Array, Array, Array]

    @classmethod
    def of(cls, tree: Tree) -> _Paths:
        leaf_rows = _rows_of(tree)
        node_rows = np.zeros(len(tree.feature))
        for node in range(len(tree.feature) - 1, -1, -1):  # children come after their parents
            for child in (tree.left[node], tree.right[node]):
                node_rows[node] += node_rows[child] if child >= 0 else leaf_rows[~child]
        above: dict[int, list[tuple[int, bool]]] = {0: []}
        leaves: dict[int, list[tuple[int, bool]]] = {0: []} if tree.leaves == 1 else {}
        for node in range(len(tree.feature)):
            for child, is_left in ((int(tree.left[node]), True), (int(tree.right[node]), False)):
                (above if child >= 0 else leaves)[child if child >= 0 else ~child] = [*above[node], (node, is_left)]
        part_starts, part_feature, part_share, step_starts, steps = [0], [], [], [0], []
        for leaf in range(tree.leaves):
            parts: dict[int, list[tuple[int, bool]]] = {}
            for node, is_left in leaves[leaf]:
                parts.setdefault(int(tree.feature[node]), []).append((node, is_left))
            for feature, here in parts.items():
                shares = []
                for node, is_left in here:
                    child = tree.left[node] if is_left else tree.right[node]
                    shares.append((node_rows[child] if child >= 0 else leaf_rows[~child]) / node_rows[node])
                part_feature.append(feature)
                part_share.append(float(np.prod(shares)))
                steps += here
                step_starts.append(len(steps))
            part_starts.append(len(part_feature))
        return cls(
            (
                np.array(part_starts, np.int64),
                np.array(part_feature, np.int64),
                np.array(part_share, np.float64),
                np.array(step_starts, np.int64),
                np.array([node for node, _ in steps], np.int64),
                np.array([is_left for _, is_left in steps], np.bool_),
            )
        )


def _rows_of(tree: Tree) -> Array:
    """Rows of each leaf; as if each had one where a model says that none had any."""
    return tree.leaf_rows if tree.leaf_rows.any() else np.ones(tree.leaves, np.int64)
