"""Loops over rows in pieces: every row is done once, and arrays are cut as Python would cut them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from bitplan.base.loops import helper_threads, row_pieces
from bitplan.base.loops.jit import use_threads
from bitplan.trees.gradients import GradientPrecision, TreesError, prepare
from bitplan.trees.loops import rows as loops

ROWS = 5001
pytestmark = pytest.mark.usefixtures("in_pieces")


@pytest.fixture
def in_pieces(monkeypatch):
    monkeypatch.setattr(row_pieces, "HELPER_NS", 1.0)
    with use_threads(3):
        yield
    helper_threads.stop()


def test_whole_arrays_with_the_first_row_and_the_end_of_a_piece():
    scores, rows = np.zeros((ROWS, 2), order="F"), np.random.default_rng(0).permutation(ROWS).astype(np.uint32)
    ends, values = np.array([100, 4000, 4001, ROWS]), np.array([1.0, 2.0, 3.0, 4.0])
    wanted = np.empty(ROWS)
    wanted[rows] = np.repeat(values, np.diff([0, *ends]))
    for start, stop in itertools.pairwise([0, *ends]):
        rows[start:stop].sort()
    first, end = row_pieces.First(), row_pieces.End()
    row_pieces.run(loops.add_leaves, ROWS, 3.0, scores[:, 1], rows, first, end, ends, values)
    assert np.array_equal(scores[:, 1], wanted)
    assert not scores[:, 0].any()


@pytest.mark.parametrize("precision", [GradientPrecision.I16, GradientPrecision.I8])
def test_codes_are_those_of_one_thread(precision):
    rng = np.random.default_rng(0)
    grads, hess = rng.standard_normal(ROWS).astype(np.float32), rng.random(ROWS, dtype=np.float32)
    by_three = prepare(grads, hess, precision, 2**63 + 5)
    with use_threads(1):
        by_one = prepare(grads, hess, precision, 2**63 + 5)
    assert (by_three.grad_scale, by_three.hess_scale) == (by_one.grad_scale, by_one.hess_scale)
    assert np.array_equal(by_three.grads, by_one.grads)
    assert np.array_equal(by_three.hessians, by_one.hessians)


@pytest.mark.parametrize("at", ["grad", "hess"])
@pytest.mark.parametrize("number", [np.nan, -np.inf, -1e-45])
def test_a_row_without_a_scale_is_named_in_whatever_piece(at, number):
    grads, hess = np.ones(ROWS, np.float32), np.full(ROWS, -0.0, np.float32)
    if at == "grad" and number > -1:
        prepare(grads, hess, GradientPrecision.I16, None)  # minus zero is zero
        return
    (grads if at == "grad" else hess)[4000] = number
    with pytest.raises(TreesError, match="row 4000 has"):
        prepare(grads, hess, GradientPrecision.I16, None)
