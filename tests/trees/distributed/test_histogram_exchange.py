"""Histograms between processes: the narrowest form, and not a bit lost in it, at exactly the rows where it changes."""

from __future__ import annotations

import numpy as np
import pytest

from bitplan.trees.distributed.histogram_exchange import HistogramSum, WireForm, pack, unpack, wire_form
from bitplan.trees.gradients import GradientPrecision, prepare
from bitplan.trees.histogram import HistogramBuilder
from tests.trees.samples import binned, table

F32, I16, I8 = GradientPrecision.F32, GradientPrecision.I16, GradientPrecision.I8
ENDS = {I16: (127, 255), I8: (7, 15), F32: (2**44, 2**31 - 2**7)}  # the largest codes of a row


@pytest.mark.parametrize(
    ("precision", "rows", "bytes_per_cell"),
    [
        (I16, 1, 4),
        (I16, 31, 4),
        (I16, 32, 8),
        (I16, 65_535, 8),
        (I16, 65_536, 12),
        (I16, 8_388_607, 12),
        (I16, 8_388_608, 24),
        (I8, 255, 4),
        (I8, 256, 8),
        (I8, 262_143, 8),
        (I8, 262_144, 12),
        (I8, 134_217_727, 12),
        (I8, 134_217_728, 24),
        (F32, 65_535, 16),
        (F32, 65_536, 24),
    ],
)
def test_every_row_at_its_largest_fits(precision, rows, bytes_per_cell):
    form = wire_form(precision, rows)
    assert form.bytes_per_cell == bytes_per_cell
    grad, hess = ENDS[precision]
    if precision is F32:
        grad = min(grad, 2**61 // rows)  # what `gradients.units` sees to
    share = rows // 3
    fields = [
        [[-grad * part, hess * part, part], [grad * part, 0, part], [-part, 0, part], [0, 0, 0]]
        for part in (share, rows - share)
    ]
    total = sum(pack(np.array(part), form) for part in fields)
    assert total.dtype == form.dtype
    np.testing.assert_array_equal(unpack(total, form), np.sum(fields, axis=0))


@pytest.mark.parametrize(("precision", "rows"), [(I16, 32), (I16, 65_536), (I8, 256), (I8, 262_144)])
def test_the_form_of_one_row_less_would_overflow(precision, rows):
    grad, hess = ENDS[precision]
    fields = np.array([[-grad * rows, hess * rows, rows]])
    narrow = wire_form(precision, rows - 1)
    assert not np.array_equal(unpack(pack(fields, narrow), narrow), fields)


def test_three_int32_end_where_hessians_do():
    assert 255 * 8_388_607 < 2**31 <= 255 * 8_421_505  # the next power of two would be too many
    assert wire_form(I16, 8_388_607) == WireForm(np.int32, 3)


class OtherProcessIsTheSame:
    """As if a second process had the same rows."""

    rank, count = 0, 2

    def __init__(self):
        self.sent = []

    def add(self, integers, what):
        self.sent.append(integers)
        return integers + integers


@pytest.mark.parametrize("precision", list(GradientPrecision))
@pytest.mark.parametrize("rows", [12, 300, 40_000])  # 40 000 twice are more than narrow cells hold
def test_sum_is_the_histogram_of_all_rows(precision, rows):
    x, y = table(rows, 3)
    x[:, 1] = np.arange(rows) % 3
    data, bins = binned(x)
    gradients = prepare(y.astype(np.float32), np.ones(rows, np.float32), precision, 5)
    features = np.array([0, 1])
    builder = HistogramBuilder(data, gradients, features)
    here = builder.enter(np.arange(rows, dtype=np.uint32))
    shards = OtherProcessIsTheSame()
    summing = HistogramSum(shards, gradients, builder, features, bins.counts)
    few, summed = summing([builder.build(here[:5]), builder.build(here)], [10, 2 * rows])
    np.testing.assert_array_equal(few.sums(0), builder.build(np.concatenate([here[:5], here[:5]])).sums(0))
    twice = builder.build(np.concatenate([here, here]))
    assert summed.words == twice.words
    for feature in features:
        np.testing.assert_array_equal(summed.sums(feature), twice.sums(feature))
    cells = bins.counts[features] + 1  # of the second feature 3, and one for missing values
    both = wire_form(precision, 10).bytes_per_cell + wire_form(precision, 2 * rows).bytes_per_cell
    assert sum(one.nbytes for one in shards.sent) == cells.sum() * both
    assert len(shards.sent) == len({one.dtype for one in shards.sent})  # one step for a type
