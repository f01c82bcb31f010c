"""Splits that torch finds for a GPU are those of the CPU's loops, to the bit, on a card where there is one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bitplan.trees.binning import Bins
from bitplan.trees.loops import split
from tests.trees.samples import rules

pytest.importorskip("triton")

from bitplan.trees.cuda.judge import Nodes, TorchJudge

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


@pytest.mark.parametrize("most_bins", [3, 50, 254])
@pytest.mark.parametrize("is_monotone", [False, True])
def test_splits_are_those_of_the_loops(is_monotone, most_bins):
    seen = set()
    for seed in range(40):
        rng = np.random.default_rng([seed, most_bins])
        features = int(rng.integers(1, 6))
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
        cells = histogram(rng, bins, int(rng.integers(2, 400)))
        bounds = np.sort(rng.standard_normal(2)) if rng.random() < 0.5 else np.array([-np.inf, np.inf])
        allowed = rng.random(features) < 0.8
        there = [torch.from_numpy(each)[None].to(DEVICE) for each in (cells, allowed, bounds)]
        result, sets = TorchJudge(bins, of, of.monotone, DEVICE).find(Nodes(*there), SCALES)
        gain, split_, goes_left = find_by_loops(cells, bins, np.arange(features), bounds, allowed, of)
        found = result[0].cpu().numpy()
        assert found[:1].view(np.float64)[0] == gain, seed
        assert found[7:].tolist() == cells[0].sum(0).tolist()
        if gain > 0:
            assert found[1:7].tolist() == split_, seed
            assert split_[1] >= 0 or sets[0].tolist() == goes_left, seed
        seen.add(gain > 0 and split_[1] < 0)
        seen.add(("none", gain == 0))
    assert {True, False, ("none", True), ("none", False)} <= seen


def test_many_nodes_are_judged_as_each_alone(monkeypatch):
    rng = np.random.default_rng(0)
    bins = Bins(tuple(np.sort(rng.random(20)) for _ in range(3)), np.array([True, False, False]), np.arange(3))
    of = rules(3, monotone=np.array([0, 1, 0]))
    cells = torch.from_numpy(np.stack([histogram(rng, bins, 300) for _ in range(5)])).to(DEVICE)
    allowed = torch.ones((5, 3), dtype=torch.bool, device=DEVICE)
    nodes = Nodes(cells, allowed, torch.tensor([[-np.inf, np.inf]] * 5, dtype=torch.float64, device=DEVICE))
    judge = TorchJudge(bins, of, of.monotone, DEVICE)
    together, sets = judge.find(nodes, SCALES)
    monkeypatch.setattr("bitplan.trees.cuda.judge.MOST_CELLS", 2 * 3 * 256)
    apart, other_sets = judge.find(nodes, SCALES)
    assert torch.equal(together, apart)
    assert torch.equal(sets, other_sets)
    assert len({tuple(row) for row in together.tolist()}) == 5
