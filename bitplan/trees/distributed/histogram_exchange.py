"""Histograms between processes: as few bytes a bin as the rows of the node allow, summed without losing a bit.

A node of R rows over all processes, r = the bits of R. Codes of b bits (I16: 8, I8: 4) give sums of R codes that need
b + r bits for the gradient (with its sign), b + r for the hessian and r for the row count, in any bin of any process.
The narrowest form that holds all three is sent:

| form | when | I16 up to | I8 up to |
|---|---|---|---|
| one int32 for the three | 2b + 3r <= 32 | 31 rows | 255 rows |
| one int64 for the three | 2b + 3r <= 64 | 65 535 rows | 262 143 rows |
| three int32 | b + r <= 31 | 8 388 607 rows | 134 217 727 rows |
| three int64 | else | | |

F32 is summed in fixed point: an int64 for the gradient, and hessian (31 + r bits) and row count (r) share a second one
up to 65 535 rows; above, three int64. Only the bins that a tree's features have are sent, with the one for missing
values: a feature of 3 bins is 4 cells. In a round with far rows (`gradients`) R has as many rows more as have the same
sum. Row counts decide the form, and they are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bitplan.trees.distributed.shards import Shards
from bitplan.trees.gradients import FAR_SUMS, QUANTIZED, Array, GradientPrecision, Gradients
from bitplan.trees.histogram import WIDE, Histogram, HistogramBuilder
from bitplan.trees.loops import histogram as kernels
from bitplan.trees.loops.histogram import BINS

CODE_BITS = {GradientPrecision.I16: 8, GradientPrecision.I8: 4}
F32_HESSIAN_BITS = 31  # see `gradients.units`


@dataclass(frozen=True, slots=True)
class WireForm:
    """How a histogram's cell is sent: `integers` of `dtype`; fields in the last one begin at bits `shifts`."""

    dtype: type
    integers: int
    shifts: tuple[int, ...] = ()

    @property
    def bytes_per_cell(self) -> int:
        return int(np.dtype(self.dtype).itemsize) * self.integers


def wire_form(precision: GradientPrecision, rows: int) -> WireForm:
    """The narrowest form in which no sum over `rows` rows can overflow."""
    count_bits = rows.bit_length()
    if precision is GradientPrecision.F32:
        if F32_HESSIAN_BITS + 2 * count_bits <= 63:
            return WireForm(np.int64, 2, (count_bits, 0))
        return WireForm(np.int64, 3)
    sum_bits = CODE_BITS[precision] + count_bits
    shifts = (sum_bits + count_bits, count_bits, 0)
    for dtype, bits in ((np.int32, 32), (np.int64, 64)):
        if 2 * sum_bits + count_bits <= bits:
            return WireForm(dtype, 1, shifts)
    return WireForm(np.int32 if sum_bits <= 31 else np.int64, 3)


def far_rows(gradients: Gradients) -> int:
    """How many rows with the largest regular code add up to what rows beyond the codes may add at most."""
    if not gradients.far:
        return 0
    ends = QUANTIZED[gradients.precision].ends
    return max(-(-far // end) for far, end in zip(FAR_SUMS, ends, strict=True))


def pack(fields: Array, form: WireForm) -> Array:
    """Pack sums, (cells, 3) int64, into (cells, integers)."""
    if not form.shifts:
        return fields.astype(form.dtype)
    shared = len(form.shifts)
    word = sum(fields[:, 3 - shared + field] << shift for field, shift in enumerate(form.shifts))
    return np.column_stack([fields[:, : 3 - shared], word]).astype(form.dtype)


def unpack(words: Array, form: WireForm) -> Array:
    """Unpack what `pack` packed: the lower fields by their bits, the highest with its sign."""
    words = words.astype(np.int64)
    if not form.shifts:
        return words
    shared, last = words[:, :-1], words[:, -1]
    tops = (64, *form.shifts)  # int64 now, so the first field goes up to the sign
    fields = [last >> form.shifts[0]]
    fields += [last >> shift & ((1 << top - shift) - 1) for top, shift in zip(tops[1:-1], form.shifts[1:], strict=True)]
    return np.column_stack([shared, *fields])


class HistogramSum:
    """Adds up the histograms of one tree over all processes."""

    def __init__(
        self, shards: Shards, gradients: Gradients, builder: HistogramBuilder, features: Array, counts: Array
    ) -> None:
        """Prepare for one tree; `counts` has the number of bins of each feature."""
        self._shards, self._precision, self._builder = shards, gradients.precision, builder
        self._more = far_rows(gradients)
        used = [
            np.append(feature * BINS + np.arange(counts[feature]), feature * BINS + BINS - 1) for feature in features
        ]
        self._cells = np.unique(np.concatenate(used))

    def __call__(self, histograms: Sequence[Histogram], rows: Sequence[int]) -> list[Histogram]:
        """Histograms summed over all processes; `rows` are those that each node has in all."""
        if self._shards.count == 1:
            return list(histograms)
        forms = [wire_form(self._precision, count + self._more) for count in rows]
        words = [pack(self._fields(one), form) for one, form in zip(histograms, forms, strict=True)]
        for dtype in (np.int32, np.int64):  # what has one type goes in one step
            indices = [index for index, form in enumerate(forms) if form.dtype is dtype]
            if indices:
                sent = np.concatenate([words[index] for index in indices], axis=None)
                summed = self._shards.add(sent, "histograms of nodes")
                ends = np.cumsum([words[index].size for index in indices])[:-1]
                for index, part in zip(indices, np.split(summed, ends), strict=True):
                    words[index] = part.reshape(words[index].shape)
        size = max((len(one.cells) // one.words for one in histograms), default=0)  # every one has as many cells
        return [self._histogram(size, *one_node) for one_node in zip(words, forms, rows, strict=True)]

    def _fields(self, histogram: Histogram) -> Array:
        """The sums of the cells that are sent, (cells, 3)."""
        wide = np.zeros(len(histogram.cells) // histogram.words * WIDE, np.int64)
        kernels.add_wide(histogram.cells, histogram.words, wide)
        fields: Array = wide.reshape(-1, WIDE)[self._cells]
        return fields

    def _histogram(self, size: int, words: Array, form: WireForm, rows: int) -> Histogram:
        """The histogram, in the form that a node of that many rows has here."""
        wide = np.zeros(size * WIDE, np.int64)
        wide.reshape(-1, WIDE)[self._cells] = unpack(words, form)
        nothing = Histogram(np.zeros_like(wide), WIDE)
        return self._builder.subtract(Histogram(wide, WIDE), nothing, rows)
