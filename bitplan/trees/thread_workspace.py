"""The threads that grow a tree together, and the memory they share from tree to tree (`trees.loops.grow_tree`).

The tables of a tree that is growing (`trees.loops.nodes`), as Python holds them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitplan.base.loops import helper_threads
from bitplan.base.loops.atomics import LINE
from bitplan.base.loops.jit import address_of, thread_count, worthwhile_threads
from bitplan.base.loops.row_pieces import call_of, form_of, words_of
from bitplan.trees import histogram
from bitplan.trees.binning import BinnedRows
from bitplan.trees.gradients import Array, GradientPrecision, Gradients
from bitplan.trees.histogram import Histogram
from bitplan.trees.loops import grow_tree as loops
from bitplan.trees.loops import histogram as histogram_loops
from bitplan.trees.loops import nodes as nodes_loops
from bitplan.trees.loops import nodes as queue
from bitplan.trees.loops import split
from bitplan.trees.loops import split as kernels
from bitplan.trees.loops.histogram import BINS, CHUNK, GROUP, PANEL, words_a_row

# ---- tree tables -----------------------------------------------------------------------------------------------------


FIRST_COUNTS = 1, 0, 1, *[0] * 8  # the root is a leaf, and has a place


class Growth:
    """One tree so far: its tables (`trees.loops.nodes`); between processes, histograms of leaves to be split."""

    def __init__(self, max_leaves: int, best_first: bool, capacity: int = 0) -> None:
        capacity = capacity or 4 * max_leaves + 2  # half of them for expansions that the tree will not need
        shapes = (capacity, kernels.NODE_COLUMNS), (capacity, 4), (max_leaves, 3), (max_leaves, 3), (capacity, 3)
        ends = np.cumsum([rows * columns for rows, columns in shapes])
        self._space = np.zeros(ends[-1], np.int64)  # of all tables that begin empty
        tables = [part.reshape(shape) for part, shape in zip(np.split(self._space, ends[:-1]), shapes, strict=True)]
        self.nodes, reals, self.leaves, self.splits, self.ready = tables
        self.reals: Array = reals.view(np.float64)
        self.goes_left = np.empty((capacity, BINS), np.uint8)
        self.counts = np.array(FIRST_COUNTS)
        self.best_first = best_first
        self.histograms: dict[int, Histogram] = {}
        self.top = np.empty(max(max_leaves - 2, 0))
        self._tables = self.nodes, self.reals, self.leaves, self.splits, self.counts, self.ready, self.top, best_first

    def begin(self) -> None:
        """Forget the tree that is there: the next one has only its root."""
        self._space[:] = 0
        self.counts[:] = FIRST_COUNTS

    def set_root(self, size: int, totals: Array) -> None:
        self.nodes[0, kernels.STOP], self.leaves[0, queue.LINK] = size, -1
        self.nodes[0, kernels.GROUPS] = -1  # all of them
        self.nodes[0, kernels.GRAD : kernels.ROWS + 1] = totals
        self.reals[0, kernels.LOW :] = -np.inf, np.inf, np.inf

    def open_root(self) -> None:
        """Put the root into the queue, if it can be split."""
        self.counts[queue.QUEUED] = self.counts[queue.READY] = self.reals[0, kernels.GAIN] > 0
        self.ready[0, queue.SIZE] = self.size(0)

    def size(self, node: int) -> int:
        """How many of this process's rows lie in a node."""
        return int(self.nodes[node, kernels.STOP] - self.nodes[node, kernels.START])

    def take_together(self, most: int) -> list[int]:
        """The leaf at the head of the queue and those that the tree will probably need next, not more than `most`."""
        taken: list[int] = []
        while len(taken) < most and (node := self.take()) >= 0:
            taken.append(node)
        return taken

    def take(
        self, sharing: tuple[int, ...] = queue.ANY_ROWS, done: int = -1, *, for_all: bool = False, team: int = 1
    ) -> int:
        """Take a leaf to split from the queue, as `trees.loops.nodes.take` does; negative where there is none now."""
        return int(queue.take(*self._tables, sharing, for_all, team, done))

    def runs(self) -> Array:
        """Where runs of rows that were not divided end, and their leaves: (2, runs)."""
        runs = np.empty((4, len(self.nodes)), np.int64)
        count = queue.find_runs(self.nodes, self.leaves, int(self.counts[queue.LEAVES]), runs, runs[2:])
        return runs[:2, :count]

    def finish(self, node: int) -> None:
        """Note that a node is split: its children may be taken from the queue."""
        self.take(done=node, team=0)


# ---- thread workspace ------------------------------------------------------------------------------------------------


NO_NUMBERS = np.empty(0, np.float32)
# What a tree takes, in nanoseconds: on each level of a row, for its own sake and for each feature; of a leaf's feature.
ROW_NS, ROW_FEATURE_NS, LEAF_FEATURE_NS = 2.0, 0.4, 2000.0
# What threads take to meet, as the time in which one adds so many rows to a feature; of what a thread could add to a
# node that all expand, the per cent that it does.
MEETING_NUMBERS, HELP = 15_000, 45
SETS = 8  # trees that have helpers at the same time; a ninth one is grown by one thread
# How often the first thread yields (half a microsecond) until the others are there, and more for a large table: who is
# late is missed to the end of the tree.
YIELDS, ROWS_A_YIELD = 500, 1000
PHASES = ("partition", "histograms", "splits", "waiting", "queue")  # as `loops.grow_tree` counts their cycles


def tree_ns(rows: int, features: int, leaves: int) -> float:
    """An estimate of the nanoseconds that one thread takes to grow a tree."""
    levels = max(leaves, 2).bit_length()
    return rows * levels * (ROW_NS + ROW_FEATURE_NS * features) + leaves * features * LEAF_FEATURE_NS


def team_size(rows: int, features: int, leaves: int) -> int:
    """The threads that are worth their start: at most `thread_count()`."""
    return min(thread_count(), worthwhile_threads(tree_ns(rows, features, leaves)))


# Addresses of the loops of a kind of trees, which stay: asking numba for them takes a millisecond.
_kernels_for: dict[Any, Array] = {}


class TeamSpace:
    """Memory of up to `size` threads that grow one tree."""

    def __init__(self, data: BinnedRows, size: int) -> None:
        self.size, self._data = size, data
        self._sync = np.zeros(loops.LEFTS + LINE * size, np.int64)
        self._groups = [-(-width // GROUP) for width in data.widths]
        self._cells = ((len(self._groups) - 1) * PANEL + self._groups[-1] * GROUP) * BINS
        self._row_bytes = np.array([8 * words_a_row(width) for width in data.widths])
        self._pool = np.empty(0, np.int64)
        self._parts: tuple[Array, Array, Array] | None = None
        self._given_by: tuple[Any, ...] = ()  # what the words below were made of
        self._own = (
            np.zeros((2 * size, split.NODE_COLUMNS), np.int64),
            np.zeros((2 * size, 3)),
            np.empty((2 * size, BINS), np.uint8),
            np.empty((size, 4, BINS), np.int64),
            np.empty((size, 2, BINS)),
            np.zeros((size, LINE), np.int64),
        )

    @property
    def ticks(self) -> Array:
        """(threads, phases): cycles of the processor's clock that each thread spent in each of PHASES, of all trees."""
        return self._own[5][:, : len(PHASES)]

    def grow(
        self,
        growth: Growth,
        entries: tuple[Array, Array],
        gradients: Gradients,
        features: tuple[Array, Array, Array],
        options: tuple[Any, ...],
    ) -> None:
        """Grow the tree whose root is in `growth`, from entries, with as much space beside them.

        What the loops are told is made once for all trees of the same arrays: on small tables it takes as long as they.
        """
        precise = gradients.precision is GradientPrecision.F32
        hess = gradients.hessians if precise else NO_NUMBERS
        given_by = growth, *entries, hess, *features, *options
        if len(given_by) != len(self._given_by) or any(
            one is not other for one, other in zip(given_by, self._given_by, strict=True)
        ):
            self._words = self._describe(growth, entries, hess, precise, features, options)
            self._given_by = given_by
        self._free[:] = self._all_free
        growth.counts[loops.FREE :] = self._slots
        self._sync[:] = 0
        self._sync[loops.LOOKS] = helper_threads.looks()
        helper_threads.run(self._function, self._words.ctypes.data, self.size, sets=SETS)

    def _describe(
        self,
        growth: Growth,
        entries: tuple[Array, Array],
        hess: Array,
        precise: bool,
        features: tuple[Array, Array, Array],
        options: tuple[Any, ...],
    ) -> Array:
        """Write a job for the threads as 64-bit words: the loop's address, and all its arguments."""
        rows = (*entries, self._data.space, self._data.is_there, self._data.words.view(np.uint8), self._row_bytes)
        narrow, count, most, team = 2 if precise else 1, len(rows[0]), histogram.NARROW_ROWS, self.size
        slots, wide_slots = self._slots = len(growth.nodes) // 2 + 2 + team, count // most + 4
        wide_from = slots * self._cells * narrow
        if len(self._pool) < wide_from + wide_slots * self._cells * histogram.WIDE:
            self._pool = np.empty(wide_from + wide_slots * self._cells * histogram.WIDE, np.int64)
        self._all_free = np.zeros((2, max(slots, wide_slots)), np.int64)
        self._all_free[0, :slots] = np.arange(slots)[::-1] * (self._cells * narrow)
        self._all_free[1, :wide_slots] = wide_from + np.arange(wide_slots)[::-1] * (self._cells * histogram.WIDE)
        self._free = np.empty_like(self._all_free)
        patience, meeting = YIELDS + count // ROWS_A_YIELD, MEETING_NUMBERS // len(self._data.is_there)
        sizes = np.array([most + 1, meeting, HELP, narrow, self._cells, wide_from, team, patience], np.int64)
        if self._parts is None or self._parts[0].shape[1] != self._cells * narrow:
            block = min(loops.BLOCK, most)
            wide = self._cells * histogram.WIDE if -(-self._data.rows // block) > most // block else 0
            self._parts = (
                np.empty((team, self._cells * narrow), np.int64),
                np.empty((team, wide), np.int64),
                np.empty((team, 2 * CHUNK if precise else 0), np.int64),
            )
        used = np.flatnonzero(np.bincount(features[2] // PANEL))
        data = self._data.words, self._data.firsts, used, hess.view(np.uint8)
        tables = growth.nodes, growth.reals, growth.goes_left
        order = growth.leaves, growth.splits, growth.counts, growth.ready, growth.top
        packs = options[-1]
        judges_all = not packs or len(features[1]) > 0 or count > most
        arrays = hess, rows, tables, order, features, options
        needed = precise, packs, judges_all, growth.best_first, tuple(map(int, self._groups)), form_of(arrays)
        if needed not in _kernels_for:
            used_by = precise, judges_all, hess, rows, tables, order, growth.best_first, features, options
            _kernels_for[needed] = self._kernels(*used_by)
        self._held = sizes, used, data, _kernels_for[needed]  # as long as their addresses are used
        arguments = (
            self._sync, sizes, _kernels_for[needed], tables, order, growth.best_first, rows, data, self._pool,
            self._free, self._parts, features, options, self._own,
        )  # fmt: skip
        self._function, address = call_of(loops.grow_tree, arguments)
        return np.array([address, *words_of(arguments)])

    def _kernels(
        self,
        precise: bool,
        judges_all: bool,
        hess: Array,
        rows: tuple[Array, ...],
        tables: tuple[Array, Array, Array],
        order: tuple[Array, Array, Array, Array, Array],
        best_first: bool,
        features: tuple[Array, Array, Array],
        options: tuple[Any, ...],
    ) -> Array:
        """Addresses of the compiled loops that this kind of tree needs; 0 for those it does not."""
        (entries, spare, columns, *_), (nodes, reals, goes_left), cells = rows, tables, self._pool
        bins, scales, numbers, is_category, monotone, judging, packs = options
        at, dividing = (0, 0, nodes, reals, goes_left), (entries, columns, spare, goes_left, nodes, reals)
        space, by_bin = self._own[3][0], self._own[4][0]
        packed = general = 0
        if packs:
            packed = address_of(split.judge_packed, cells, cells, False, *at, features[0], bins, scales, numbers, space)
        if judges_all:
            more = features[2], bins, scales, numbers, is_category, monotone, judging, space, by_bin
            general = address_of(split.judge, cells, 0, cells, 0, False, *at, *more)
        adders = histogram_loops.add_floats if precise else histogram_loops.add_quantized
        assert self._parts is not None
        few = histogram_loops.add_few_floats if precise else histogram_loops.add_few_quantized
        panel, rest = self._data.words, (entries, hess.view(np.uint8), 1.0, 1.0, self._parts[2][0], cells)
        return np.array(
            [
                address_of(nodes_loops.take, nodes, reals, *order, best_first, queue.ANY_ROWS, False, 0, 0),
                address_of(nodes_loops.divide, *dividing, 0, 0, monotone, scales, numbers),
                packed,
                general,
                address_of(few, panel, 0, 0, 0, *rest),
                *(address_of(adders[groups], panel, *rest) for groups in self._groups),
            ],
            np.int64,
        )
