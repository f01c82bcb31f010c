"""Splits that a GPU's kernels find are those of the CPU's loops, to the bit, on a card where there is one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bitplan.trees.binning import Bins
from bitplan.trees.loops import split
from tests.trees.samples import rules

pytest.importorskip("triton")

from bitplan.trees.cuda import waves
from bitplan.trees.cuda.judge import Judge
from bitplan.trees.cuda.kernels import CELL_SHIFT

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SCALES = 0.013, 0.0071


def histogram(rng, bins, rows):
    """(features, 256, 3) of rows with few codes or many, some of them missing."""
    grads = rng.integers(-127, 128, rows) if rng.random() < 0.7 else rng.integers(-1, 2, rows)
    hess = rng.integers(0, 256, rows) if rng.random() < 0.7 else np.ones(rows, np.int64)
    cells = np.zeros((len(bins.edges), 256, 3), np.int64)
    for feature, count in enumerate(bins.counts):
        at = rng.integers(0, count, rows)
        at[rng.random(rows) < rng.choice([0, 0.2])] = split.MISSING
        np.add.at(cells[feature], at, np.column_stack([grads, hess, np.ones(rows, np.int64)]))
    return cells


def find_by_loops(cells, bins, which, bounds, allowed, of):
    """(gain, feature, bin, missing left, three sums), sets as `trees.loops.split.judge` finds them."""
    nodes, reals = np.zeros((1, split.NODE_COLUMNS), np.int64), np.zeros((1, 4))
    left = np.zeros((1, 256), np.uint8)
    nodes[0, split.GRAD : split.ROWS + 1], nodes[0, split.GROUPS] = cells[0].sum(0), -1
    reals[0, split.LOW : split.HIGH + 1] = bounds
    by_feature = np.column_stack([bins.counts, np.where(allowed, -1, 0)])
    parts = split.judging_parts(bool(bins.is_category.any()), bool(of.l1 or of.monotone.any()))
    whole = cells.reshape(-1)
    split.judge(
        whole, 3, whole, 3, False, 0, -1, nodes, reals, left, which, by_feature, np.array(SCALES), of.numbers,
        bins.is_category, of.monotone, parts, np.empty((4, 256), np.int64), np.empty((2, 256)),
    )  # fmt: skip
    columns = [split.FEATURE, split.BIN, split.MISSING_LEFT, split.LEFT_GRAD, split.LEFT_HESS, split.LEFT_ROWS]
    return reals[0, split.GAIN], nodes[0, columns].tolist(), left[0].tolist()


def find_by_kernels(judge, wave, cells, bounds, allowed):
    """(results, sets) of nodes whose children have these cells, (nodes, 2, features, 256, 3); the first node is a root.

    bounds  of the children's values, (nodes, 2, 2)
    """
    count = len(cells)
    nodes = np.arange(count)
    packed = np.stack([(cells[..., 0] << CELL_SHIFT) + cells[..., 2], cells[..., 1]], -1)
    packed[1:, 1] += packed[1:, 0]  # of the parent
    table = np.zeros((wave + 1, waves.COLUMNS), np.int64)
    table[:, waves.SMALL_SLOT : waves.LARGE_SLOT + 1] = -1
    table[:count, waves.SMALL_SLOT], table[1:count, waves.LARGE_SLOT] = 2 * nodes, 2 * nodes[1:] + 1
    table[:count, waves.GROUPS], table[wave, waves.NODES] = -1, count
    judge.begin(np.where(allowed, -1, 0), np.array(SCALES))
    ends = np.zeros((wave, 2, 2))
    ends[:count] = bounds
    given = [torch.from_numpy(np.ascontiguousarray(each)).to(DEVICE).view(-1) for each in (table, packed, ends)]
    result = torch.full((2 * wave * waves.RESULT,), -7, dtype=torch.int64, device=DEVICE)
    sets = torch.full((2 * wave * 256,), 7, dtype=torch.uint8, device=DEVICE)
    for step, pointers in judge.launches(*given, result, sets):
        step(*pointers)
    left = given[1].view(packed.shape).cpu().numpy()[1:, 1]
    assert np.array_equal(left[..., 0] >> CELL_SHIFT, cells[1:, 1, ..., 0]), "the larger child's"
    assert np.array_equal(left[..., 1], cells[1:, 1, ..., 1])
    shape = wave, 2, -1
    return result.view(shape).cpu().numpy(), sets.view(shape).cpu().numpy()


@pytest.mark.parametrize("most_bins", [3, 50, 254])
@pytest.mark.parametrize("is_monotone", [False, True])
def test_splits_are_those_of_the_loops(is_monotone, most_bins):
    seen = set()
    for seed in range(12):
        rng = np.random.default_rng([seed, most_bins])
        features, count = int(rng.integers(1, 6)), int(rng.integers(1, 4))
        is_category = rng.random(features) < 0.5
        edges = tuple(np.sort(rng.random(int(rng.integers(1, most_bins)))) for _ in range(features))
        bins = Bins(edges, is_category, np.arange(features))
        signs = np.where(is_category, 0, rng.integers(-1, 2, features))
        of = rules(
            features,
            monotone=signs if is_monotone else np.zeros(features, np.int64),
            l1=float(rng.choice([0, 0.5])),
            l2=float(rng.choice([0, 1.0])),
            min_child_rows=int(rng.choice([1, 5])),
            min_gain=float(rng.choice([0, 0.5])),
        )
        cells = np.stack([histogram(rng, bins, int(rng.integers(2, 400))) for _ in range(2 * count)])
        cells = cells.reshape(count, 2, features, 256, 3)
        bounds = np.sort(rng.standard_normal((count, 2, 2)))
        bounds[rng.random((count, 2)) < 0.5] = [-np.inf, np.inf]
        allowed = rng.random(features) < 0.8
        result, sets = find_by_kernels(Judge(bins, of, of.monotone, 4, DEVICE), 4, cells, bounds, allowed)
        for node, side in np.ndindex(count, 2):
            if (node, side) == (0, 1):
                continue  # a root's
            of_child, found = cells[node, side], result[node, side]
            which = np.arange(features)
            gain, split_, goes_left = find_by_loops(of_child, bins, which, bounds[node, side], allowed, of)
            assert found[:1].view(np.float64)[0] == gain, seed
            assert found[7:].tolist() == of_child[0].sum(0).tolist()
            if gain > 0:
                assert found[1:7].tolist() == split_, seed
                assert split_[1] >= 0 or sets[node, side].tolist() == goes_left, seed
            seen.add(gain > 0 and split_[1] < 0)
            seen.add(("none", gain == 0))
    assert {True, False, ("none", True), ("none", False)} <= seen
