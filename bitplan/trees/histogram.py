"""The one builder of histograms: which loop runs is decided once a round, by the precision of the gradients.

A node of up to 65535 rows keeps narrow cells (8 bytes a bin, 16 for F32); a larger one is summed block by block into
wide cells, so that no field can overflow, however many rows there are. Threads share a node by its rows: each sums a
block into cells of its own, and integers may be added up in any order.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from bitplan.base.loops.jit import on_threads, thread_count
from bitplan.base.loops.row_pieces import Cut, First
from bitplan.base.loops.row_pieces import run as run_pieces
from bitplan.trees.binning import BinnedRows
from bitplan.trees.gradients import Array, GradientPrecision, Gradients
from bitplan.trees.loops import histogram as kernels
from bitplan.trees.loops.histogram import BINS, GROUP, PANEL

ENTER_NS, ROUND_NS = 2.0, 4.0  # of a row
NO_ROWS = np.empty(0, np.uint32)
WIDE = 3  # words: gradient, hessian, rows
NARROW_ROWS = kernels.NARROW_ROWS  # that narrow cells hold


@dataclass(slots=True)
class Histogram:
    """A histogram of features * 256 cells, of `words` int64 each."""

    cells: Array
    words: int

    def sums(self, feature: int) -> Array:
        """Gradient, hessian and rows of each bin, as integers: (256, 3)."""
        first = feature * BINS * self.words
        *grads, last = self.cells[first : first + BINS * self.words].reshape(BINS, self.words).T
        if self.words == WIDE:
            return np.column_stack([*grads, last])
        if self.words == 1:
            grads, last = [last >> 40], last & (1 << 40) - 1
        return np.column_stack([*grads, last >> 16, last & 0xFFFF])


def enter(gradients: Gradients, rows: Array | range, space: Array | None = None) -> Array:
    """Entries of some rows: one word each with row and gradients, rounded here if quantized (`loops.histogram`)."""
    entries = np.empty(len(rows), np.uint64) if space is None else space[: len(rows)]
    first, row_numbers = (First(rows.start), NO_ROWS) if isinstance(rows, range) else (First(), Cut(rows))
    if gradients.precision is GradientPrecision.F32:
        bits = gradients.grads.view(np.uint32)
        run_pieces(kernels.enter_f32, len(rows), ENTER_NS, row_numbers, first, bits, Cut(entries))
        return entries
    per = (1.0 / scale if scale else 0.0 for scale in (gradients.grad_scale, gradients.hess_scale))
    key, stochastic = np.uint64(gradients.key or 0), gradients.key is not None
    rounding = gradients.grads, gradients.hessians, gradients.first, *per, key, stochastic
    run_pieces(kernels.enter_codes, len(rows), ROUND_NS, row_numbers, first, *rounding, Cut(entries))
    return entries


def codes_of(gradients: Gradients, rows: Array | range | None = None) -> tuple[Array, Array]:
    """The int64 codes to which gradients and hessians of some rows (or all) are rounded for sums."""
    entries = enter(gradients, range(len(gradients.grads)) if rows is None else rows).view(np.int64)
    return entries >> 48, entries >> 32 & 0xFFFF


class HistogramBuilder:
    """Histograms of one round's gradients, for the panels that hold `features`."""

    def __init__(self, data: BinnedRows, gradients: Gradients, features: Array) -> None:
        self._data, self._gradients = data, gradients
        precise = gradients.precision is GradientPrecision.F32
        loops, self._narrow = (kernels.add_floats, 2) if precise else (kernels.add_quantized, 1)
        groups = [-(-width // GROUP) for width in data.widths]
        self._features = (len(groups) - 1) * PANEL + groups[-1] * GROUP
        used = sorted({int(feature) // PANEL for feature in features})
        self._panels = [(data.panels[panel], loops[groups[panel]], panel * PANEL * BINS) for panel in used]

    def enter(self, rows: Array | range, space: Array | None = None) -> Array:
        """The entries of some rows: what `build` and partitions work on."""
        return enter(self._gradients, rows, space)

    def build(self, entries: Array, *, threads: bool = False) -> Histogram:
        """Add up gradients of some rows by feature and bin."""
        out = self._empty(len(entries))
        workers = thread_count() if threads else 1
        blocks = -(-len(entries) // (workers * NARROW_ROWS)) * workers  # as many for each of them
        step = -(-len(entries) // max(blocks, 1))
        if step >= len(entries):
            self._add_rows(entries, out.cells)
            return out
        lock = threading.Lock()

        def work(start: int) -> None:
            block = np.zeros(self._features * BINS * self._narrow, np.int64)
            self._add_rows(entries[start : start + step], block)
            with lock:
                if out.words == WIDE:
                    kernels.add_wide(block, self._narrow, out.cells)
                else:
                    np.add(out.cells, block, out=out.cells)

        starts = range(0, len(entries), step)
        if threads:
            on_threads(work, starts)
        else:
            for start in starts:
                work(start)
        return out

    def subtract(self, parent: Histogram, child: Histogram, rows: int) -> Histogram:
        """The histogram of the parent's other child, of `rows` rows; the parent's is used up.

        Where all three have one form nothing is unpacked: no field borrows, since every one of the child is within its
        parent's.
        """
        if parent.words == child.words == self._words(rows):
            np.subtract(parent.cells, child.cells, out=parent.cells)
            return parent
        out = self._empty(rows)
        kernels.subtract_cells(parent.cells, parent.words, child.cells, child.words, out.cells, out.words)
        return out

    def _words(self, rows: int) -> int:
        return WIDE if rows > NARROW_ROWS else self._narrow

    def _empty(self, rows: int) -> Histogram:
        words = self._words(rows)
        return Histogram(np.zeros(self._features * BINS * words, np.int64), words)

    def _add_rows(self, entries: Array, cells: Array) -> None:
        gradients = self._gradients
        pairs = np.empty(2 * kernels.CHUNK if gradients.precision is GradientPrecision.F32 else 0, np.int64)
        more = gradients.hessians.view(np.uint8), gradients.grad_scale, gradients.hess_scale, pairs
        for panel, add, first in self._panels:
            add(panel, entries, *more, cells[first * self._narrow :] if first else cells)
