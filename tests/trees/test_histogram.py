"""Histograms: against a loop, against each other to the bit, and at the sizes where fields would overflow."""

from __future__ import annotations

import numpy as np
import pytest

from bitplan.trees import histogram
from bitplan.trees.binning import BinnedRows
from bitplan.trees.gradients import GradientPrecision, GradientsF32, GradientsI8, GradientsI16, prepare
from bitplan.trees.histogram import Histogram, HistogramBuilder, codes_of
from bitplan.trees.loops import histogram as kernels
from tests.trees.naive import integer_gradients, naive_histogram
from tests.trees.samples import binned, table


def random_gradients(rows, precision, seed=0):
    rng = np.random.default_rng(seed)
    return prepare(rng.standard_normal(rows).astype(np.float32), rng.random(rows).astype(np.float32), precision, 1)


# Each multiple of 4 has a loop of its own to compile: of those every number of words a row has, and several panels.
ALWAYS, ALSO = [1, 7, 16, 17, 70], [4, 9, 21, 28, 32, 40]


@pytest.mark.parametrize("precision", GradientPrecision)
@pytest.mark.parametrize("features", ALWAYS + [pytest.param(features, marks=pytest.mark.long) for features in ALSO])
def test_every_width_equals_a_loop(precision, features):
    x, _ = table(150, features, missing=0.1)
    data, _ = binned(x)
    gradients = random_gradients(150, precision)
    rows = np.arange(0, 150, 2, dtype=np.uint32)
    builder = HistogramBuilder(data, gradients, np.arange(features))
    result = builder.build(builder.enter(rows))
    for feature in range(features):
        expected = naive_histogram(data.columns[feature], *integer_gradients(gradients), rows)
        np.testing.assert_array_equal(result.sums(feature), expected)


def test_integer_gradients_give_the_same_sums_in_every_precision():
    """The oracle: with power-of-two scales nothing is rounded, so quantized and float histograms agree to the bit."""
    rng = np.random.default_rng(0)
    x, _ = table(500, 6)
    data, _ = binned(x)
    rows = np.arange(500, dtype=np.uint32)
    scale = 2.0**-5
    grads, hess = rng.integers(-7, 8, 500), rng.integers(0, 16, 500)
    grads[0], hess[0] = 7, 15
    floats = (grads * scale).astype(np.float32), (hess * scale).astype(np.float32)
    kinds = [
        GradientsF32.from_floats(*floats),
        GradientsI16(*floats, scale, scale),
        GradientsI8(*floats, scale, scale),
    ]
    result = []
    for gradients in kinds:
        builder = HistogramBuilder(data, gradients, np.arange(6))
        sums = builder.build(builder.enter(rows)).sums(2).astype(np.float64)
        result.append(sums * [gradients.grad_scale, gradients.hess_scale, 1])
    np.testing.assert_array_equal(result[0], result[1])
    np.testing.assert_array_equal(result[0], result[2])
    quantized = GradientsI8.quantize(*floats)
    np.testing.assert_allclose(quantized.grad_scale, scale)
    np.testing.assert_array_equal(codes_of(quantized)[0], grads)


@pytest.mark.parametrize("precision", GradientPrecision)
@pytest.mark.parametrize("limit", [64, 300, 1000])
def test_blocks_and_subtraction(precision, limit, monkeypatch):
    """A small limit makes parents wide, and one of their children narrow or both; the sums do not care."""
    monkeypatch.setattr(histogram, "NARROW_ROWS", limit)
    x, _ = table(400, 18)
    data, _ = binned(x)
    builder = HistogramBuilder(data, random_gradients(400, precision), np.arange(18))
    rows = builder.enter(np.arange(400, dtype=np.uint32))
    for size in (50, 150):
        parent, small, large = (builder.build(part) for part in (rows, rows[:size], rows[size:]))
        expected = large.sums(17)
        result = builder.subtract(parent, small, 400 - size)
        np.testing.assert_array_equal(result.sums(17), expected)
    rest = builder.subtract(builder.build(rows), builder.build(rows[:370]), 30)
    np.testing.assert_array_equal(rest.sums(3), builder.build(rows[370:]).sums(3))


@pytest.mark.parametrize(("precision", "sign"), [("i16", 1), ("i16", -1), ("i8", 1), ("f32", -1)])
def test_a_hundred_million_rows_in_one_bin_do_not_overflow(precision, sign):
    """100M rows' worth of counts: the same full block, at the largest codes, added as often as 100M rows would."""
    block, times = kernels.NARROW_ROWS, 1526
    assert block * times > 100_000_000
    columns = np.full((1, block), 200, np.uint8)
    panel = np.zeros((block, 8), np.uint8)
    panel[:, 0] = 200
    data = BinnedRows(columns, np.ones(1, np.uint8), panel.view(np.uint64).reshape(-1), np.zeros(1, np.int64), (1,))
    grads, hess = np.full(block, sign, np.float32), np.ones(block, np.float32)
    gradients = prepare(grads, hess, GradientPrecision(precision), None)
    if precision == "f32":  # the unit depends on how many rows there are
        gradients = GradientsF32(grads, hess, *_units(1.0, block * times))
    builder = HistogramBuilder(data, gradients, np.arange(1))
    narrow = builder.build(builder.enter(np.arange(block, dtype=np.uint32)))
    assert narrow.words < histogram.WIDE
    total = Histogram(np.zeros(4 * 256 * histogram.WIDE, np.int64), histogram.WIDE)
    for _ in range(times):
        kernels.add_wide(narrow.cells, narrow.words, total.cells)
    one_grad, one_hess = (int(part[0]) for part in integer_gradients(gradients))
    assert narrow.sums(0)[200].tolist() == [one_grad * block, one_hess * block, block]
    assert total.sums(0)[200].tolist() == [one_grad * block * times, one_hess * block * times, block * times]
    assert total.sums(0)[199].tolist() == [0, 0, 0]


def test_wide_nodes_are_built_in_blocks():
    rows = 2 * kernels.NARROW_ROWS + 5
    panel = np.zeros((rows, 8), np.uint8)
    data = BinnedRows(
        np.zeros((1, rows), np.uint8),
        np.ones(1, np.uint8),
        panel.view(np.uint64).reshape(-1),
        np.zeros(1, np.int64),
        (1,),
    )
    gradients = prepare(np.full(rows, -1, np.float32), np.ones(rows, np.float32), GradientPrecision.I16, None)
    builder = HistogramBuilder(data, gradients, np.arange(1))
    result = builder.build(builder.enter(np.arange(rows, dtype=np.uint32)))
    assert result.words == histogram.WIDE
    assert result.sums(0)[0].tolist() == [-127 * rows, 255 * rows, rows]


def _units(top, rows):
    from bitplan.trees.gradients import units

    return units(top, top, rows)
