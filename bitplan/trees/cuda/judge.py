"""The best splits of a wave's nodes in plain torch, where `kernels.judge_features` does not know how: categories and
monotone constraints.

The arithmetic is that of `trees.loops.split`, operation by operation, each rounded to float64 on its own as there, and
sums are integers until then: the splits are those of the CPU, to the bit. Torch takes about a hundred small launches a
wave for that, where the kernels take two.

Shapes: N nodes, C columns of bins, B bins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bitplan.trees.binning import Bins
from bitplan.trees.cuda import kernels as there
from bitplan.trees.gradients import Array
from bitplan.trees.grow import GrowthRules
from bitplan.trees.loops.split import MISSING, NOISE

MOST_CELLS = 2**21  # that are judged at once: about 20 tensors of so many float64


@dataclass(frozen=True)
class Nodes:
    """Nodes to judge: their cells, which columns may split them, the bounds of their values."""

    cells: Tensor  # (N, C, B, 3): gradients, hessians and rows, int64
    allowed: Tensor  # (N, C)
    bounds: Tensor  # (N, 2) of a leaf's value, float64

    def at(self, cut: slice) -> Nodes:
        return Nodes(self.cells[cut], self.allowed[cut], self.bounds[cut])


@dataclass(frozen=True)
class _Found:
    """The best split of each node by each column, as tensors (nodes, columns)."""

    gain: Tensor  # 0: there is none
    cut: Tensor
    turn: Tensor  # 1: with the missing rows; of categories: from the end
    left: Tensor  # (N, C, 3) sums


class TorchJudge:
    """Judges nodes of one tree after the other."""

    def __init__(self, bins: Bins, rules: GrowthRules, monotone: Array, device: torch.device) -> None:
        self._rules, self._is_monotone, self._device = rules, bool(np.any(monotone)), device
        self._counts, self._monotone = (torch.from_numpy(table).to(device) for table in (bins.counts, monotone))
        numeric, sets = np.flatnonzero(~bins.is_category), np.flatnonzero(bins.is_category)
        self._numeric, self._sets = torch.from_numpy(numeric).to(device), torch.from_numpy(sets).to(device)
        position = np.zeros(len(bins.is_category), np.int64)
        position[sets] = np.arange(len(sets))
        self._place_of_set = torch.from_numpy(position).to(device)  # of a column among those of categories
        self._is_set = torch.from_numpy(bins.is_category).to(device)
        self._bins = torch.arange(there.BINS, device=device)

    def find(self, nodes: Nodes, scales: tuple[float, float]) -> tuple[Tensor, Tensor]:
        """The best splits, (N, RESULT) as `kernels.pick_features` writes it; (N, B): 1 for categories that go left."""
        step = max(MOST_CELLS // (nodes.cells.shape[1] * there.BINS), 1)
        cuts = [slice(first, first + step) for first in range(0, len(nodes.cells), step)]
        results = [self._find(nodes.at(cut), scales) for cut in cuts]
        return torch.cat([result for result, _ in results]), torch.cat([sets for _, sets in results])

    def _find(self, nodes: Nodes, scales: tuple[float, float]) -> tuple[Tensor, Tensor]:
        cells, (count, columns) = nodes.cells, nodes.allowed.shape
        total = cells[:, 0].sum(1)  # (N, 3); every column has every row
        before = self._before(total, nodes.bounds, scales)
        gain = torch.zeros((count, columns), dtype=torch.float64, device=self._device)
        cut, turn = (torch.zeros((count, columns), dtype=torch.int64, device=self._device) for _ in range(2))
        left_sums = torch.zeros((count, columns, 3), dtype=torch.int64, device=self._device)
        order = used = None
        for chosen, of_sets in ((self._numeric, False), (self._sets, True)):
            if not len(chosen):
                continue
            some_nodes = Nodes(cells[:, chosen], nodes.allowed[:, chosen], nodes.bounds)
            if of_sets:
                order, used = self._order(some_nodes.cells, chosen, scales)
                splits = self._best_of_sets(some_nodes, order, used, total, before, scales)
            else:
                splits = self._best_of_numbers(some_nodes, chosen, total, before, scales)
            gain[:, chosen], cut[:, chosen], turn[:, chosen] = splits.gain, splits.cut, splits.turn
            left_sums[:, chosen] = splits.left
        best = gain.amax(1)
        # of equal gains the lowest column: argmax of a GPU may take any
        column = torch.where(gain == best[:, None], torch.arange(columns, device=self._device), columns).amin(1)
        at = torch.arange(count, device=self._device)
        cut, turn, left_sums = cut[at, column], turn[at, column], left_sums[at, column]
        is_set = self._is_set[column]
        has_missing = cells[at, column, MISSING, 2] > 0
        missing_left = torch.where(has_missing, turn, (2 * left_sums[:, 2] >= total[:, 2]).long())
        missing_left = missing_left.masked_fill(is_set, 0)
        bin_ = cut.masked_fill(is_set, -1)
        result = torch.column_stack([best.view(torch.int64), column, bin_, missing_left, left_sums, total])
        sets = torch.zeros((count, there.BINS), dtype=torch.uint8, device=self._device)
        if order is not None and used is not None:
            of = self._place_of_set[column]
            many = used[at, of, None]
            rank = torch.where(turn[:, None] > 0, many - 1 - self._bins, self._bins)
            goes_left = is_set[:, None] & (rank >= 0) & (rank <= cut[:, None]) & (self._bins < many)
            sets.scatter_(1, order[at, of], goes_left.to(torch.uint8))
        return result, sets

    # ---- candidates --------------------------------------------------------------------------------------------------

    def _best_of_numbers(
        self, nodes: Nodes, chosen: Tensor, total: Tensor, before: Tensor, scales: tuple[float, float]
    ) -> _Found:
        """Every place between bins; with missing rows twice, these right and left."""
        missing = nodes.cells[:, :, MISSING]
        present = nodes.cells.clone()
        present[:, :, MISSING] = 0
        prefixes = present.cumsum(2)
        has_missing, counts = missing[:, :, 2] > 0, self._counts[chosen]
        limits = torch.where(has_missing, counts, counts - 1), torch.where(has_missing, counts - 1, 0)
        turns = [
            self._scan(nodes, sums, limit, self._monotone[chosen], total, self._rules.l2, before, scales)
            for sums, limit in zip((prefixes, prefixes + missing[:, :, None]), limits, strict=True)
        ]
        return _better(*turns)

    def _order(self, cells: Tensor, chosen: Tensor, scales: tuple[float, float]) -> tuple[Tensor, Tensor]:
        """Categories that have rows, by the ratio of gradient to hessian, then the others; how many have."""
        smooth = cells[..., 1].double() * scales[1] + self._rules.category_smoothing
        ratio = cells[..., 0].double() * scales[0] / torch.where(smooth > 0, smooth, 1.0)
        ratio = torch.where(smooth > 0, ratio, 0.0) + 0.0  # of zeros none is below the other
        is_used = (cells[..., 2] > 0) & (self._bins < self._counts[chosen][:, None])
        order = torch.where(is_used, ratio, torch.inf).sort(dim=2, stable=True).indices
        return order, is_used.sum(2)

    def _best_of_sets(
        self, nodes: Nodes, order: Tensor, used: Tensor, total: Tensor, before: Tensor, scales: tuple[float, float]
    ) -> _Found:
        """The first categories in that order to the left, from either end; missing and new ones go right."""
        l2, free = self._rules.l2 + self._rules.category_l2, torch.zeros_like(used[0])
        turns = []
        for from_end in (False, True):
            rank = used[..., None] - 1 - self._bins if from_end else self._bins.expand(order.shape)
            bins = order.gather(2, rank.clamp(min=0))
            inside = (self._bins < used[..., None])[..., None]
            in_order = nodes.cells.gather(2, bins[..., None].expand(*bins.shape, 3))
            prefixes = torch.where(inside, in_order, 0).cumsum(2)
            turns.append(self._scan(nodes, prefixes, used, free, total, l2, before, scales))
        return _better(*turns)

    # ---- gains -------------------------------------------------------------------------------------------------------

    def _before(self, total: Tensor, bounds: Tensor, scales: tuple[float, float]) -> Tensor:
        """The gain of a node that is not split."""
        rules = self._rules
        grad, hess = total[:, 0].double() * scales[0], total[:, 1].double() * scales[1]
        if self._is_monotone:
            return self._gain_of_value(grad, hess, rules.l2, self._value(grad, hess, rules.l2, bounds))
        shrunk = self._shrunk(grad)
        return torch.where(hess + rules.l2 > 0, shrunk * shrunk / (hess + rules.l2), 0.0)

    def _scan(
        self,
        nodes: Nodes,
        prefixes: Tensor,
        limit: Tensor,
        direction: Tensor,
        total: Tensor,
        l2: float,
        before: Tensor,
        scales: tuple[float, float],
    ) -> _Found:
        """The first of the best of `limit` prefixes that the rules allow."""
        rules, total = self._rules, total[:, None, None]
        left, left_hess = prefixes[..., 0].double() * scales[0], prefixes[..., 1].double() * scales[1]
        right = (total[..., 0] - prefixes[..., 0]).double() * scales[0]
        right_hess = (total[..., 1] - prefixes[..., 1]).double() * scales[1]
        left_rows, right_rows = prefixes[..., 2], total[..., 2] - prefixes[..., 2]
        left_all, right_all = left_hess + l2, right_hess + l2
        valid = (self._bins < limit[..., None]) & nodes.allowed[..., None]
        valid &= (left_rows >= rules.min_child_rows) & (right_rows >= rules.min_child_rows)
        valid &= (left_hess >= rules.min_child_weight) & (right_hess >= rules.min_child_weight)
        valid &= (left_all > 0) & (right_all > 0)
        if self._is_monotone:
            left_value, right_value = (
                self._value(grad, hess, l2, nodes.bounds[:, None, None])
                for grad, hess in ((left, left_hess), (right, right_hess))
            )
            gain = self._gain_of_value(left, left_hess, l2, left_value)
            gain = gain + self._gain_of_value(right, right_hess, l2, right_value)
            valid &= ~((right_value - left_value) * direction[:, None] < 0)
        elif rules.l1:
            left, right = self._shrunk(left), self._shrunk(right)
            gain = left * left / left_all + right * right / right_all
        else:
            gain = (left * left * right_all + right * right * left_all) / (left_all * right_all)
        gain = torch.where(valid & ~gain.isnan(), gain, -torch.inf)
        best = gain.amax(2)
        cut = torch.where(gain == best[..., None], self._bins, there.BINS).amin(2)
        above = best - before[:, None]
        is_split = (above > (before.abs() * NOISE).clamp(min=rules.min_gain)[:, None]) & (above > 0)
        sums = prefixes.gather(2, cut[..., None, None].expand(*cut.shape, 1, 3))[:, :, 0]
        return _Found(torch.where(is_split, above, 0.0), cut, torch.zeros_like(cut), sums)

    def _shrunk(self, grad: Tensor) -> Tensor:
        return (grad.abs() - self._rules.l1).clamp(min=0.0)

    def _value(self, grad: Tensor, hess: Tensor, l2: float, bounds: Tensor) -> Tensor:
        """The value of a leaf, as `loops.split.leaf_value`."""
        step = -torch.copysign(self._shrunk(grad), grad) / (hess + l2)
        step = torch.where(hess + l2 <= 0, 0.0, step)
        step = torch.where(bounds[..., 0] > step, bounds[..., 0], step)
        return torch.where(bounds[..., 1] < step, bounds[..., 1], step)

    def _gain_of_value(self, grad: Tensor, hess: Tensor, l2: float, value: Tensor) -> Tensor:
        return -(2.0 * grad * value + (hess + l2) * value * value + 2.0 * self._rules.l1 * value.abs())


def _better(first: _Found, second: _Found) -> _Found:
    """The second split where it gains more than the first."""
    use = second.gain > first.gain
    return _Found(
        torch.where(use, second.gain, first.gain),
        torch.where(use, second.cut, first.cut),
        use.long(),
        torch.where(use[..., None], second.left, first.left),
    )
