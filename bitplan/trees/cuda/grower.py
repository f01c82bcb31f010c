"""Growing one tree on the GPU: the same queue as on the CPU, waves of leaves instead of threads.

The host holds the tables of nodes and decides what is expanded (`trees.loops.nodes`), as for several processes: the
leaf at the head of the queue and those that the tree will probably need after it, in one step on the GPU. Expansions
that the tree does not need are dropped. Row counts are exact, so the host knows where the rows of both children will
lie before they are moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from bitplan.base.loops.launch import PreparedLaunch
from bitplan.trees.binning import BinnedRows, Bins
from bitplan.trees.cuda import kernels, waves
from bitplan.trees.cuda import kernels as there
from bitplan.trees.cuda.binning import CudaBins, copy_bins
from bitplan.trees.cuda.kernels import BLOCK
from bitplan.trees.cuda.limits import check_memory, table_bytes
from bitplan.trees.cuda.score_kernels import LEAF_OPTIONS, CudaGradients, collect_rows
from bitplan.trees.distributed.shards import ALONE, Shards
from bitplan.trees.gradients import Array, GradientPrecision, Gradients
from bitplan.trees.grow import Grown, GrowthRules, TreeGrower
from bitplan.trees.histogram import enter
from bitplan.trees.loops import nodes as queue
from bitplan.trees.loops import split
from bitplan.trees.thread_workspace import Growth

ADDERS, PARTERS = 2, 6  # programs on each processor: of 512 threads and 64 registers; of 256


@dataclass
class WaveSteps:
    """The launches of a wave, in their order."""

    part_rows: PreparedLaunch
    add_rows: PreparedLaunch
    judge_features: PreparedLaunch
    pick_features: PreparedLaunch


class CudaTreeGrower(TreeGrower):
    """Grows trees on rows that stay on the GPU."""

    def __init__(
        self,
        data: BinnedRows | CudaBins,
        bins: Bins,
        rules: GrowthRules,
        shards: Shards = ALONE,
        precision: GradientPrecision = GradientPrecision.I16,
    ) -> None:
        super().__init__(cast(BinnedRows, data), bins, rules, shards)
        precise = self._precise = precision is GradientPrecision.F32
        there_already = data if isinstance(data, CudaBins) else copy_bins(data, precise)
        self._panels, self._device = there_already.panels, there_already.device
        self._groups, self._width = there_already.groups, there_already.width
        self._count, self._features, device = data.rows, len(bins.edges), self._device
        leaves = min(rules.max_leaves, max(data.rows, 1))
        self._wave = min(kernels.MOST_NODES, leaves)
        self._slots = 2 * leaves + 2
        categories = int(bins.is_category.sum())
        needed = table_bytes(data.rows, self._features, self._slots, precise)
        check_memory(device, data.rows, self._features, needed)
        self._sides = self._empty(2 * data.rows, torch.int64)
        self._weights = self._empty(2 * data.rows if precise else 2, torch.float32)
        self._pool = self._empty(self._slots * self._features * there.cell_words(precise) * kernels.BINS, torch.int64)
        self._gains = self._empty(2 * self._wave * self._features, torch.float64)
        self._by_column = self._empty(2 * self._wave * self._features * there.RESULT, torch.int64)
        self._scratch = self._empty(max(2 * self._wave * categories * there.SCRATCH, 2), torch.int64)
        self._result = self._empty(2 * self._wave * there.RESULT, torch.int64)
        self._table = self._empty((kernels.MOST_NODES + 1) * there.COLUMNS, torch.int64)
        pinned = device.type == "cuda"
        self._host_table = torch.zeros((kernels.MOST_NODES + 1, there.COLUMNS), dtype=torch.int64, pin_memory=pinned)
        self._host_result = torch.zeros((2 * self._wave, there.RESULT), dtype=torch.int64, pin_memory=pinned)
        self.steps = self._prepare(categories)
        self._loops: Array | None = None
        chunk = kernels.TILE * kernels.TILES
        self._sizes = BLOCK, chunk, self._groups, self.steps.add_rows.grid[0]

    def _empty(self, size: int, kind: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=kind, device=self._device)

    def _programs(self, of_each: int) -> int:
        """Of a grid that fills the card."""
        if self._device.type != "cuda":
            return 2
        return of_each * int(torch.cuda.get_device_properties(self._device).multi_processor_count)

    def _prepare(self, categories: int) -> WaveSteps:
        features, children, precise = self._features, 2 * self._wave, {"PRECISE": self._precise}
        sizes = self._count, features, self._width
        shared = {"SHARED": kernels.HAS_SHARED_ATOMICS, "TILE": kernels.TILE, "TILES": kernels.TILES}
        judging = {**precise, "KIND": kernels.kind_of_gains(self._rules), "HAS_CATEGORIES": categories > 0}
        parters, adders = (self._programs(PARTERS),), (self._programs(ADDERS),)
        blocks, picked = {**precise, "BLOCK": BLOCK}, {"PICKED": kernels.PICKED}
        each_feature = (children * features,), (features, categories), judging
        return WaveSteps(
            PreparedLaunch(kernels.part_rows, parters, sizes, blocks, **kernels.PART_OPTIONS),
            PreparedLaunch(
                kernels.add_rows, adders, (*sizes, self._groups), {**precise, **shared}, **kernels.ADD_OPTIONS
            ),
            PreparedLaunch(kernels.judge_features, *each_feature, **kernels.JUDGE_OPTIONS),
            PreparedLaunch(kernels.pick_features, (children,), (features,), picked, **kernels.PICK_OPTIONS),
        )

    # ---- a tree ------------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def features(self) -> int:
        return self._features

    @property
    def panels(self) -> tuple[Tensor, int, int]:
        """Bins by group, row and place, how many features a group has, and how many bytes a row of it."""
        return self._panels, self._width, there.group_bytes(self._precise)

    def grow(self, gradients: Gradients | CudaGradients, rows: Array | range, features: Array) -> Grown:
        """One tree from `rows` and the features it may use, the one that the CPU grows.

        From gradients on the GPU the rows of its leaves stay there, too: see `launch_on_leaves`.
        """
        columns = np.flatnonzero(np.isin(self._bins.features, features))
        self._scales = np.array([gradients.grad_scale, gradients.hess_scale])
        self._begin(columns)
        self._enter(gradients, rows)
        self._entries = np.empty(0, np.uint64)
        growth = self._growth = Growth(min(self._rules.max_leaves, max(len(rows), 1)), self._rules.best_first)
        growth.set_root(len(rows), np.zeros(3, np.int64))
        self._free = np.arange(self._slots + 1)  # the last number says how many
        root = self._judge_root(len(rows))
        growth.nodes[0, split.GRAD : split.ROWS + 1] = root
        growth.open_root()
        self._expand_leaves()
        self._find_parts()
        if not isinstance(gradients, CudaGradients):
            self._collect(len(rows))
        return self._finish(growth)

    def _begin(self, columns: Array) -> None:
        """What judging needs to know of this tree."""
        of_columns = np.zeros((self._features, there.OF_COLUMN), np.int64)
        of_columns[:, there.BIN_COUNT] = self._by_feature[:, split.BIN_COUNT]
        of_columns[columns, there.FEATURE_GROUPS] = self._by_feature[columns, split.FEATURE_GROUPS]
        is_category = self._bins.is_category
        of_columns[is_category, there.CATEGORY] = np.arange(1, int(is_category.sum()) + 1)
        of_columns[:, there.DIRECTION] = self._monotone
        rules = self._rules
        rest = rules.l1, rules.l2, rules.min_child_weight, rules.min_child_rows, rules.min_gain
        numbers = *self._scales, *rest, rules.category_smoothing, rules.category_l2
        self._columns_there = torch.from_numpy(of_columns).to(self._device)
        self._numbers_there = torch.tensor(numbers, dtype=torch.float64).to(self._device)
        with np.errstate(over="ignore"):  # only those of codes, which are not used
            self._per_unit = torch.from_numpy(1.0 / np.where(self._scales > 0, self._scales, 1.0)).to(self._device)

    def _enter(self, gradients: Gradients | CudaGradients, rows: Array | range) -> None:
        """All rows into the first side of the entries."""
        if isinstance(gradients, CudaGradients):
            gradients.enter(self._sides, self._weights, rows)
            return
        self._sides[: len(rows)] = torch.from_numpy(enter(gradients, rows).view(np.int64)).to(self._device)
        if self._precise:
            hessians = gradients.hessians if isinstance(rows, range) else gradients.hessians[rows]
            self._weights[: len(rows)] = torch.from_numpy(np.ascontiguousarray(hessians)).to(self._device)

    # ---- waves -------------------------------------------------------------------------------------------------------

    def _judge_root(self, rows: int) -> Array:
        """The root's best split, into the tables; its sums."""
        self._free[-1] -= 1
        slot = int(self._free[self._free[-1]])
        waves.root_wave(self._host_table.numpy(), rows, slot, self._sizes)
        self._run_wave()
        growth, found = self._growth, self._host_result.numpy()[0]
        waves.note_root(found, growth.nodes, growth.reals, growth.goes_left, self._by_feature)
        growth.nodes[0, split.SLOT] = slot
        sums: Array = found[there.RESULT_NODE : there.RESULT_SET]
        return sums

    def _expand_leaves(self) -> None:
        """Waves until the tree is complete."""
        growth = self._growth
        tables = growth.nodes, growth.reals, growth.leaves, growth.splits, growth.counts, growth.ready, growth.top
        wave = np.zeros((self._wave, 2), np.int64)
        result, table = self._host_result.numpy(), self._host_table.numpy()
        if self._loops is None:
            self._loops = waves.addresses(growth, self._monotone, self._scales, self._numbers)
        done = 0
        while True:
            done = waves.next_wave(
                self._loops,
                (*tables, growth.best_first),
                growth.goes_left,
                wave,
                done,
                result,
                table,
                self._free,
                self._by_feature,
                self._monotone,
                waves.NO_ROWS,
                self._scales,
                self._numbers,
                self._sizes,
            )
            if not done:
                return
            self._run_wave()

    def _run_wave(self) -> None:
        """Launch the steps of a wave and wait for its result."""
        self._table.copy_(self._host_table.view(-1), non_blocking=True)
        self._launch_steps()
        self._host_result.view(-1).copy_(self._result, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _launch_steps(self) -> None:
        steps, panels = self.steps, self._panels
        rows = self._table, self._sides, self._weights
        steps.part_rows(*rows, panels, self._pool)
        steps.add_rows(*rows, panels.view(torch.int64), self._pool, self._per_unit)
        by_column = self._gains, self._by_column
        judging = self._columns_there, self._numbers_there, self._scratch
        steps.judge_features(self._table, self._pool, *judging, *by_column)
        steps.pick_features(self._table, *by_column, self._result)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _find_parts(self) -> None:
        """Where the rows of the tree's leaves lie: ranges of nodes that were not expanded, wanted or not."""
        growth = self._growth
        made, leaves = growth.nodes[: growth.counts[queue.MADE]], growth.counts[queue.LEAVES]
        leaf_of = np.full(len(made), -1)
        leaf_of[growth.leaves[:leaves, queue.NODE]] = np.arange(leaves)
        is_expanded = made[:, split.STATE] == queue.EXPANDED
        for node in np.flatnonzero(is_expanded):  # parents come before their children
            if leaf_of[node] >= 0:
                child = made[node, split.CHILD]
                leaf_of[child : child + 2] = leaf_of[node]
        last = np.flatnonzero(~is_expanded & (made[:, split.STOP] > made[:, split.START]))
        ranges = made[last]
        blocks = -(-(ranges[:, split.STOP] - ranges[:, split.START]) // BLOCK)
        sides = ranges[:, split.DEPTH] & 1
        of_blocks = np.cumsum(blocks) - blocks
        parts = np.column_stack([ranges[:, : split.STOP + 1], of_blocks, sides, leaf_of[last]]).astype(np.int64)
        self._parts, self._blocks = torch.from_numpy(parts).to(self._device), int(blocks.sum())
        self.depth = int(growth.nodes[growth.leaves[:leaves, queue.NODE], split.DEPTH].max())

    def launch_on_leaves(self, kernel: Any, *pointers: Tensor) -> None:
        """Run a kernel over the rows of the last tree's leaves."""
        sizes = self._count, len(self._parts), self._blocks
        shape = {"BLOCK": BLOCK, **LEAF_OPTIONS}
        kernel[(self._programs(PARTERS),)](self._parts, self._sides, *pointers, *sizes, **shape)

    def _collect(self, rows: int) -> None:
        """Entries of all leaves to the host, where each node's range has its rows."""
        self.launch_on_leaves(collect_rows)
        self._entries = self._sides[:rows].cpu().numpy().view(np.uint64)
