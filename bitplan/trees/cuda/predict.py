"""Raw scores of rows that lie on the GPU: every row goes down one tree after the other, as on the CPU, to the bit."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from bitplan.base.loops.launch import INTERPRETED
from bitplan.trees.gradients import Array
from bitplan.trees.tree import Booster, Forest

BLOCK = 256  # rows
FEATURE, LEFT, RIGHT, FLAGS, NODE_COLUMNS = range(
    5
)  # of a node; FLAGS: missing left, and twice the set's number plus 1
FIRST_NODE, FIRST_LEAF, DEPTH, TREE_COLUMNS = range(4)  # of a tree
_NODE, _TREE = tl.constexpr(NODE_COLUMNS), tl.constexpr(TREE_COLUMNS)


def can_predict(x: Tensor) -> bool:
    """Whether the kernel reads this table; the interpreter's lies on the CPU."""
    is_there = x.device.type == "cuda" or INTERPRETED.value
    return bool(is_there and x.ndim == 2 and len(x) and x.dtype in (torch.float32, torch.float64))


def scores_there(booster: Booster, x: Tensor) -> Array:
    """Compute raw scores (rows, outputs) on the GPU; gives them on the host."""
    forest, device = booster.forest(), x.device
    scores = torch.from_numpy(np.tile(booster.start, (len(x), 1))).to(device)
    nodes = [forest.feature, forest.left, forest.right, forest.missing_left + 2 * (forest.category + 1)]
    tables = np.stack(nodes, axis=1).astype(np.int32), forest.threshold, _trees(forest), forest.bits.view(np.int32)
    of_nodes, thresholds, trees, bits = (torch.from_numpy(np.ascontiguousarray(table)).to(device) for table in tables)
    values, empty = torch.from_numpy(forest.values).to(device), torch.zeros(1, dtype=torch.int32, device=device)
    pointers = (
        of_nodes if of_nodes.numel() else empty,
        thresholds if thresholds.numel() else scores,
        trees,
        bits,
        values,
    )
    counts = len(x), *x.stride(), len(trees), booster.outputs, bits.shape[1]
    has_sets = bool((forest.category >= 0).any())
    add_trees[(triton.cdiv(len(x), BLOCK),)](x, scores, *pointers, *counts, BLOCK=BLOCK, SETS=has_sets, num_warps=8)
    host_scores: Array = scores.cpu().numpy()
    return host_scores


def _trees(forest: Forest) -> Array:
    """A row for each tree, (trees, columns): its first node and leaf, how many splits lie above its lowest leaf."""
    roots, count = forest.roots.astype(np.int64), len(forest.roots) - 1
    trees = np.zeros((count, TREE_COLUMNS), np.int32)
    trees[:, FIRST_NODE], trees[:, FIRST_LEAF] = roots[:-1], forest.leaf_starts[:-1]
    of_node = np.repeat(np.arange(count), np.diff(roots))
    level, depth = roots[:-1][np.diff(roots) > 0], 0
    while len(level):
        depth += 1
        trees[of_node[level], DEPTH] = depth
        below = [(side[level].astype(np.int64), roots[of_node[level]]) for side in (forest.left, forest.right)]
        level = np.concatenate([(child + root)[child >= 0] for child, root in below])
    return trees


@triton.jit(do_not_specialize=["rows", "row_stride", "feature_stride", "trees", "outputs", "words"])
def add_trees(
    numbers_ptr,
    scores_ptr,
    nodes_ptr,
    thresholds_ptr,
    trees_ptr,
    bits_ptr,
    values_ptr,
    rows,
    row_stride,
    feature_stride,
    trees,
    outputs,
    words,
    BLOCK: tl.constexpr,
    SETS: tl.constexpr,
):
    """Add each tree's leaf values to scores (rows, outputs); `words` of 32 bits are a set of categories."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    for tree in range(trees):
        of = trees_ptr + tree * _TREE
        first_node, first_leaf, depth = tl.load(of), tl.load(of + 1), tl.load(of + 2)
        node = tl.zeros([BLOCK], tl.int32) - (depth == 0).to(tl.int32)
        for _step in range(depth):
            here = first_node + tl.maximum(node, 0)
            feature, flags = tl.load(nodes_ptr + here * _NODE), tl.load(nodes_ptr + here * _NODE + 3)
            place = numbers_ptr + row * row_stride + feature.to(tl.int64) * feature_stride
            number = tl.load(place, mask=inside, other=0.0).to(tl.float64)
            goes_left = number <= tl.load(thresholds_ptr + here)
            if SETS:
                known = (number > -1.0) & (number < 32.0 * words)
                code = tl.where(known, number, 0.0).to(tl.int32)
                word = tl.load(bits_ptr + tl.maximum((flags >> 1) - 1, 0) * words + (code >> 5))
                goes_left = tl.where(flags > 1, known & (((word >> (code & 31)) & 1) != 0), goes_left)
            goes_left = tl.where(number == number, goes_left, (flags & 1) != 0)
            left, right = tl.load(nodes_ptr + here * _NODE + 1), tl.load(nodes_ptr + here * _NODE + 2)
            node = tl.where(node >= 0, tl.where(goes_left, left, right), node)
        to = scores_ptr + row * outputs + tree % outputs
        value = tl.load(values_ptr + first_leaf - 1 - node)
        tl.store(to, tl.load(to, mask=inside, other=0.0) + value, mask=inside)
