"""The one builder of histograms: which loop runs is decided once a round, by the precision of the gradients.

A node of up to 65535 rows keeps narrow cells (8 bytes a bin, 16 for F32); a larger one is summed block by block into
wide cells, so that no field can overflow, however many rows there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bitplan.kernels import trees_histogram as kernels
from bitplan.kernels.jit import on_threads
from bitplan.kernels.trees_histogram import BINS, NARROW_ROWS, PANEL
from bitplan.trees.binning import BinnedRows
from bitplan.trees.gradients import Array, GradientPrecision, Gradients

WIDE = 3  # words: gradient, hessian, rows
# By precision: what a row adds, the loop that adds it, words of a narrow cell.
_WAYS = {
    GradientPrecision.F32: (kernels.increments_f32, kernels.add_rows_in_pairs, 2),
    GradientPrecision.I16: (kernels.increments_i16, kernels.add_rows, 1),
    GradientPrecision.I8: (kernels.increments_i8, kernels.add_rows, 1),
}


@dataclass(slots=True)
class Histogram:
    """cells: features * 256 cells of `words` int64 each."""

    cells: Array
    words: int

    def sums(self, feature: int) -> Array:
        """(256, 3): gradient, hessian and rows of each bin, as integers."""
        first = feature * BINS * self.words
        wide = np.zeros(BINS * WIDE, np.int64)
        kernels.add_wide(self.cells[first : first + BINS * self.words], self.words, wide)
        return wide.reshape(BINS, WIDE)


class HistogramBuilder:
    """Histograms of one round's gradients, for the panels that hold `features`."""

    def __init__(self, data: BinnedRows, gradients: Gradients, features: Array) -> None:
        self._data, self._gradients = data, gradients
        self._find_increments, self._add_rows, self._narrow = _WAYS[gradients.precision]
        self._panels = sorted({int(feature) // PANEL for feature in features})

    def build(self, rows: Array, *, threads: bool = False) -> Histogram:
        """The histogram of some rows; with threads, a panel each."""
        out = self._empty(len(rows))
        if out.words == WIDE:
            on_threads(lambda panel: self._add_blocks(panel, rows, out), self._panels)
            return out
        increments = self._increments(rows)
        size = PANEL * BINS * out.words

        def work(panel: int) -> None:
            cells = out.cells[panel * size : (panel + 1) * size]
            self._add_rows(self._data.panels[panel], self._data.widths[panel], rows, increments, cells)

        if threads:
            on_threads(work, self._panels)
        else:
            for panel in self._panels:
                work(panel)
        return out

    def subtract(self, parent: Histogram, child: Histogram, rows: int) -> Histogram:
        """The histogram of the parent's other child, of `rows` rows; the parent's is used up."""
        words = WIDE if rows > NARROW_ROWS else self._narrow
        out = parent if words == parent.words else self._empty(rows)
        kernels.subtract_cells(parent.cells, parent.words, child.cells, child.words, out.cells, out.words)
        return out

    def _empty(self, rows: int) -> Histogram:
        words = WIDE if rows > NARROW_ROWS else self._narrow
        return Histogram(np.zeros(len(self._data.panels) * PANEL * BINS * words, np.int64), words)

    def _increments(self, rows: Array) -> Array:
        out = np.empty(len(rows) * self._narrow, np.int64)
        held = self._gradients
        self._find_increments(rows, held.grads, held.hessians, held.grad_scale, held.hess_scale, out)
        return out

    def _add_blocks(self, panel: int, rows: Array, out: Histogram) -> None:
        size = PANEL * BINS * WIDE
        wide = out.cells[panel * size : (panel + 1) * size]
        block = np.empty(PANEL * BINS * self._narrow, np.int64)
        for start in range(0, len(rows), NARROW_ROWS):
            block.fill(0)
            part = rows[start : start + NARROW_ROWS]
            increments = self._increments(part)
            self._add_rows(self._data.panels[panel], self._data.widths[panel], part, increments, block)
            kernels.add_wide(block, self._narrow, wide)
