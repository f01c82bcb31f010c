"""Growing one tree on the GPU: the same queue as on the CPU, waves of leaves instead of threads.

The host holds the tables of nodes and decides what is expanded (`trees.loops.nodes`), as for several processes: the
leaf at the head of the queue and those that the tree will probably need after it, in one step on the GPU. Expansions
that the tree does not need are dropped. Row counts are exact, so the host knows where the rows of both children will
lie before they are moved.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
import triton
from torch import Tensor

from bitplan.base.loops.launch import PreparedLaunch
from bitplan.trees.binning import BinnedRows, Bins
from bitplan.trees.cuda import kernels, waves
from bitplan.trees.cuda.binning import CudaBins, copy_bins
from bitplan.trees.cuda.judge import Judge, Launches
from bitplan.trees.cuda.limits import Sent, check_memory, table_bytes
from bitplan.trees.cuda.score_kernels import PARTS_COLUMNS, CudaGradients, collect_rows
from bitplan.trees.distributed.shards import ALONE, Shards
from bitplan.trees.gradients import Array, Gradients
from bitplan.trees.grow import Grown, GrowthRules, TreeGrower
from bitplan.trees.histogram import enter
from bitplan.trees.loops import nodes as queue
from bitplan.trees.loops import split
from bitplan.trees.thread_workspace import Growth

WAVE = 32  # nodes at most
BLOCK = 1024  # rows that are partitioned together
ADDERS, PARTERS = 2, 6  # programs on each processor: of 512 threads and 64 registers; of PART_WARPS
PART_WARPS = 8


class CudaTreeGrower(TreeGrower):
    """Grows trees on rows that stay on the GPU."""

    def __init__(self, data: BinnedRows | CudaBins, bins: Bins, rules: GrowthRules, shards: Shards = ALONE) -> None:
        super().__init__(cast(BinnedRows, data), bins, rules, shards)
        there_already = data if isinstance(data, CudaBins) else copy_bins(data)
        self._panels, self._device = there_already.panels, there_already.device
        self._groups, self._width = there_already.groups, there_already.width
        self._count, self._features, device = data.rows, len(bins.edges), self._device
        self.most_leaves = leaves = min(rules.max_leaves, max(data.rows, 1))
        self._wave = min(WAVE, triton.next_power_of_2(leaves))
        self._slots = 2 * leaves + 2
        self._most_parts = triton.next_power_of_2(self._slots)
        sets = 2 * self._wave * int(np.count_nonzero(bins.is_category))
        check_memory(device, data.rows, self._features, table_bytes(data.rows, self._features, self._slots, sets))
        self._sides = self._empty(2 * data.rows)
        self._pool = self._empty(self._slots * self._features * 2 * kernels.BINS)
        self._judge_there = Judge(bins, rules, self._monotone, self._wave, device)
        # What goes to the card before a wave, and what comes back, each by one copy.
        width = kernels.BINS if self._has_categories else 0  # of a set
        words = max(width, 16) // 8
        self._ends_at = (self._wave + 1) * waves.COLUMNS
        self._sets_at, self._found_sets_at = self._ends_at + 4 * self._wave, 2 * self._wave * waves.RESULT
        given, result = Sent(self._sets_at + self._wave * words, device), self._found_sets_at + 2 * self._wave * words
        self._given, self._result = given, self._empty(result)
        self._host_result = torch.zeros(result, dtype=torch.int64, pin_memory=device.type == "cuda")
        # Both as `waves` has them: table, bounds and sets; result and sets.
        of_children = given.host[self._ends_at : self._sets_at].numpy().view(np.float64).reshape(-1, 2)
        sets, found_sets = (
            part.numpy().view(np.uint8).reshape(-1, 8 * words)[:, :width]
            for part in (given.host[self._sets_at :], self._host_result[self._found_sets_at :])
        )
        table = given.host[: self._ends_at].numpy().reshape(-1, waves.COLUMNS)
        result_rows = self._host_result[: self._found_sets_at].numpy().reshape(-1, waves.RESULT)
        self._wave_given, self._wave_found = (table, of_children, sets), (result_rows, found_sets)
        self._parts = Sent((self._most_parts + 1) * PARTS_COLUMNS, device)
        self._of_leaves: dict[str, PreparedLaunch] = {}  # by the kernel's name
        self._launches = self._prepare()
        self._compile()
        self._loops: Array | None = None
        chunk = kernels.TILE * kernels.TILES
        self._sizes = BLOCK, chunk, self._groups, self._programs(ADDERS)

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int64, device=self._device)

    def _programs(self, of_each: int) -> int:
        """The programs of a grid that fills the card."""
        if self._device.type != "cuda":
            return 2
        return of_each * int(torch.cuda.get_device_properties(self._device).multi_processor_count)

    def _prepare(self) -> Launches:
        """The launches of a wave, in their order, with what each gets."""
        wave, sizes = self._wave, (self._count, self._features)
        shared = {"SHARED": kernels.HAS_SHARED_ATOMICS, "TILE": kernels.TILE, "TILES": kernels.TILES}
        part_rows = PreparedLaunch(
            kernels.part_rows,
            (self._programs(PARTERS),),
            (*sizes, self._width),
            {"K": wave, "BLOCK": BLOCK, "SETS": self._has_categories},
            num_warps=PART_WARPS,
        )
        add_rows = PreparedLaunch(
            kernels.add_rows,
            (self._programs(ADDERS),),
            (*sizes, self._groups),
            {"WIDTH": self._width, "K": wave, **shared},
            num_warps=16,
        )
        given, panels = self._given.there, self._panels
        table, bounds = given[: self._ends_at], given[self._ends_at : self._sets_at].view(torch.float64)
        sets, found_sets = (
            words.view(torch.uint8) for words in (given[self._sets_at :], self._result[self._found_sets_at :])
        )
        return [
            (part_rows, (table, self._sides, panels, self._pool, sets)),
            (add_rows, (table, self._sides, panels.view(torch.int64), self._pool)),
            *self._judge_there.launches(table, self._pool, bounds, self._result[: self._found_sets_at], found_sets),
        ]

    def _compile(self) -> None:
        """Begin to compile what a tree launches; see `base.loops.launch.compiling_together`."""
        for step, pointers in self._launches:
            step.compile(*pointers)

    # ---- a tree ------------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def features(self) -> int:
        return self._features

    @property
    def panels(self) -> tuple[Tensor, int]:
        """Bins by group, row and place, and how many features a group has."""
        return self._panels, self._width

    def at_once(self, outputs: int) -> int:
        """How many trees grow at once: one keeps the card busy."""
        return 1

    def grow(self, gradients: Gradients | CudaGradients, rows: Array | range, features: Array) -> Grown:
        """Grow one tree from `rows` and the features it may use, the one that the CPU grows.

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
        """Copy to the GPU what judging needs to know of this tree."""
        groups = np.zeros(self._features, np.int64)
        groups[columns] = self._by_feature[columns, split.FEATURE_GROUPS]
        self._judge_there.begin(groups, self._scales)

    def _enter(self, gradients: Gradients | CudaGradients, rows: Array | range) -> None:
        """Write entries of all rows into the first side of the entries."""
        if isinstance(gradients, CudaGradients):
            gradients.enter(self._sides, rows)
            return
        self._sides[: len(rows)] = torch.from_numpy(enter(gradients, rows).view(np.int64)).to(self._device)

    # ---- waves -------------------------------------------------------------------------------------------------------

    def _judge_root(self, rows: int) -> Array:
        """The root's best split, into the tables; its sums."""
        self._free[-1] -= 1
        slot = int(self._free[self._free[-1]])
        table, bounds, _ = self._wave_given
        waves.root_wave(table, rows, slot, self._sizes)
        growth = self._growth
        bounds[0] = growth.reals[0, split.LOW : split.HIGH + 1]
        self._run_wave()
        result, found_set = (part[0] for part in self._wave_found)
        waves.note_root(result, found_set, growth.nodes, growth.reals, growth.goes_left, self._by_feature)
        growth.nodes[0, split.SLOT] = slot
        sums: Array = result[waves.RESULT_NODE :]
        return sums

    def _expand_leaves(self) -> None:
        """Run waves until the tree is complete."""
        growth = self._growth
        tables = growth.nodes, growth.reals, growth.leaves, growth.splits, growth.counts, growth.ready, growth.top
        wave = np.zeros((self._wave, 2), np.int64)
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
                self._wave_found,
                self._wave_given,
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
        self._given.send()
        for step, pointers in self._launches:
            step(*pointers)
        self._host_result.copy_(self._result, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _find_parts(self) -> None:
        """Find where the rows of the tree's leaves lie: ranges of nodes that were not expanded, wanted or not."""
        growth = self._growth
        nodes, leaves = growth.nodes[: growth.counts[queue.MADE]], growth.counts[queue.LEAVES]
        leaf_of = np.full(len(nodes), -1)
        leaf_of[growth.leaves[:leaves, queue.NODE]] = np.arange(leaves)
        is_expanded = nodes[:, split.STATE] == queue.EXPANDED
        is_wanted = np.zeros(len(nodes), np.bool_)
        is_wanted[growth.splits[: growth.counts[queue.SPLITS], queue.NODE]] = True
        for node in np.flatnonzero(is_expanded & ~is_wanted):  # few; parents come before their children
            child = nodes[node, split.CHILD]
            leaf_of[child : child + 2] = leaf_of[node]
        last = np.flatnonzero(~is_expanded & (nodes[:, split.STOP] > nodes[:, split.START]))
        ranges = nodes[last]
        blocks = -(-(ranges[:, split.STOP] - ranges[:, split.START]) // BLOCK)
        parts = self._parts.host.numpy().reshape(-1, PARTS_COLUMNS)
        parts[:] = waves.FAR_AWAY
        sides = ranges[:, split.DEPTH] & 1
        of_blocks = np.cumsum(blocks) - blocks
        parts[: len(last)] = np.column_stack([ranges[:, : split.STOP + 1], of_blocks, sides, leaf_of[last]])
        parts[-1, 0] = blocks.sum()
        self._parts.send()
        self.depth = int(growth.nodes[growth.leaves[:leaves, queue.NODE], split.DEPTH].max())

    def launch_on_leaves(self, kernel: Any, *pointers: Tensor) -> None:
        """Run a kernel over the rows of the last tree's leaves."""
        self._on_leaves(kernel)(self._parts.there, self._sides, *pointers)

    def compile_for_leaves(self, kernel: Any, *pointers: Tensor) -> None:
        """Begin to compile a kernel of `launch_on_leaves`, which gets such pointers."""
        self._on_leaves(kernel).compile(self._parts.there, self._sides, *pointers)

    def _on_leaves(self, kernel: Any) -> PreparedLaunch:
        name = kernel.__name__
        if name not in self._of_leaves:
            grid, sizes = (self._programs(PARTERS),), {"PARTS": self._most_parts, "BLOCK": BLOCK}
            self._of_leaves[name] = PreparedLaunch(
                kernel, grid, (self._count,), sizes, num_warps=8, enable_fp_fusion=False
            )
        return self._of_leaves[name]

    def _collect(self, rows: int) -> None:
        """Copy the row numbers of all leaves to the host, in rising runs."""
        self.launch_on_leaves(collect_rows)
        ends = torch.from_numpy(self._growth.runs()[0]).to(self._device)
        run = torch.bucketize(torch.arange(rows, device=self._device), ends, right=True)
        entries = self._sides[:rows] & 0xFFFFFFFF | run << 32
        self._entries = entries.sort().values.cpu().numpy().view(np.uint64)
