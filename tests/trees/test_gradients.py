"""Gradients in each precision: codes, scales, edge cases, and rounding that is fair and reproducible."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from bitplan.base.loops.jit import use_threads
from bitplan.trees import gradients
from bitplan.trees.distributed.shards import ALONE
from bitplan.trees.gradients import (
    FAR_SUMS,
    GradientPrecision,
    GradientsF32,
    GradientsI8,
    GradientsI16,
    TreesError,
    prepare,
)
from bitplan.trees.histogram import codes_of
from bitplan.trees.loops import gradients as loops
from tests.trees.naive import decoded_gradients

F32_MAX = float(np.finfo(np.float32).max)
POWERS = "045d45145cdc313b6133d38224ca8fd7b20ade20763f0b7a49ba251796ff0712"


def floats(*numbers):
    return np.array(numbers, np.float32)


def sample(rows=1001, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal(rows).astype(np.float32), rng.random(rows).astype(np.float32)


def test_float32_is_the_default_and_exact():
    grads, hess = sample()
    held = prepare(grads, hess, GradientPrecision.F32, None)
    assert held.grads.tolist() == grads.tolist()
    assert held.hessians.tolist() == hess.tolist()


@pytest.mark.parametrize("kind", [GradientsI16, GradientsI8])
def test_nearest_is_within_half_a_step(kind):
    grads, hess = sample()
    held = kind.quantize(grads, hess)
    result = decoded_gradients(held)
    assert np.abs(result[0] - grads).max() <= 0.5001 * held.grad_scale
    assert np.abs(result[1] - hess).max() <= 0.5001 * held.hess_scale


def test_scales_are_the_largest_number_over_the_largest_code():
    held = GradientsI16.quantize(floats(-2, 1), floats(0.5, 3))
    assert (held.grad_scale, held.hess_scale) == (2 / 127, 3 / 255)
    assert [codes.tolist() for codes in codes_of(held)] == [[-127, 64], [43, 255]]
    assert [codes.tolist() for codes in codes_of(held, np.array([1], np.uint32))] == [[64], [255]]


@pytest.mark.parametrize("kind", [GradientsI16, GradientsI8])
@pytest.mark.parametrize("many", [1, 40, 200])
def test_few_rows_do_not_decide_a_scale(kind, many):
    """They have larger codes, and with all others at their ends no sum of 65535 rows leaves its bits."""
    grads, hess = sample(20_000)
    without = kind.quantize(grads, hess)
    grads[:many], hess[:many] = -1e3 * np.arange(1, many + 1), 1e4
    held = kind.quantize(grads, hess)
    assert held.far
    assert not without.far
    grad_codes, hess_codes = codes_of(held)
    for part, codes, scale in ((grads, grad_codes, held.grad_scale), (hess, hess_codes, held.hess_scale)):
        assert np.abs(codes * scale - part).max() <= 0.5001 * scale
    assert np.maximum(np.abs(grad_codes) - kind.ends[0], 0).sum() <= FAR_SUMS[0]
    assert np.maximum(hess_codes - kind.ends[1], 0).sum() <= FAR_SUMS[1]
    if many == 1:
        assert held.grad_scale < 8 * without.grad_scale
        assert max(np.abs(grads) / held.grad_scale) <= 32767.5
    grads[: 20_000 // 64 + 1] = 1e3  # more than few: they do
    assert kind.quantize(grads, hess).grad_scale == np.abs(grads).max() / kind.ends[0]


def test_the_compiled_scale_is_that_of_the_definition():
    """Gradients of every size, with none, few and too many that are far from the others."""
    rng, far_ones = np.random.default_rng(3), 0
    for rows in (1, 63, 64, 500, 5000):
        few = gradients.few_of(rows)
        for far in {0, 1, few, few + 1, 2 * few}:
            for size in (1e-40, 1e-31, 1.0, 1e20):
                numbers = (rng.standard_normal(rows) * size).astype(np.float32)
                numbers[: min(far, rows)] *= np.float32(10.0) ** rng.integers(0, 9, min(far, rows)).astype(np.float32)
                top = float(np.abs(numbers).max())
                for end, room in zip((127, 255, 7, 15), 2 * FAR_SUMS, strict=True):
                    by_definition = gradients.far_scale(gradients._Magnitudes(numbers, ALONE), top, end, room, few)
                    assert gradients._find_scale(numbers, top, end, room, few, ALONE) == by_definition
                    far_ones += by_definition < top / end
    assert far_ones > 50


def test_sums_of_narrow_cells_hold_far_rows():
    (grad_end, hess_end), (grads, hess) = GradientsI16.ends, FAR_SUMS
    assert 65535 * grad_end + grads < 2**23
    assert 65535 * hess_end + hess < 2**24
    assert 3584 * grad_end + grads < 2**19, "what the GPU adds up in shared memory, 20 bits"


@pytest.mark.parametrize("precision", GradientPrecision)
@pytest.mark.parametrize("key", [None, 5])
@pytest.mark.parametrize(
    ("grads", "hess"),
    [
        ((0, 0, 0), (0, 0, 0)),
        ((-3, -3, -3), (2, 2, 2)),
        ((0, 0, 0), (1, 0, 1)),
        ((F32_MAX, -F32_MAX, 0), (F32_MAX, 0, F32_MAX)),
        ((1e-45, -1e-45, 0), (1e-45, 1e-45, 0)),
    ],
    ids=["zero", "constant", "zero-hessians", "largest", "smallest"],
)
def test_edges_survive(precision, key, grads, hess):
    """Numbers at the ends of the range are hit exactly, whatever the rounding."""
    held = prepare(floats(*grads), floats(*hess), precision, key)
    top = max(map(abs, floats(*grads).tolist())), max(floats(*hess).tolist())
    for found, wanted, largest in zip(decoded_gradients(held), (grads, hess), top, strict=True):
        np.testing.assert_allclose(found, floats(*wanted), rtol=1e-6, atol=largest * 1e-9)


@pytest.mark.parametrize("precision", GradientPrecision)
@pytest.mark.parametrize(("grad", "hess"), [(np.nan, 1), (np.inf, 1), (1, np.nan), (1, np.inf), (1, -1e-3)])
def test_what_has_no_scale_is_refused_by_row(precision, grad, hess):
    with pytest.raises(TreesError, match="row 2 has gradient"):
        prepare(floats(1, 1, grad), floats(1, 1, hess), precision, None)


@pytest.mark.parametrize("kind", [GradientsI16, GradientsI8])
def test_stochastic_rounding_is_fair(kind):
    rows = 200_000
    grads, hess = np.full(rows, 0.013, np.float32), np.full(rows, 0.27, np.float32)
    grads[:4000] = hess[:4000] = 1
    held = kind.quantize(grads, hess, key=11)
    mean = [np.mean(each[4000:24_000]) for each in decoded_gradients(held)]
    np.testing.assert_allclose(mean, [0.013, 0.27], rtol=0.04)
    nearest = kind.quantize(grads, hess)
    assert len(set(decoded_gradients(nearest)[0][4000:4100])) == 1


@pytest.mark.parametrize("kind", [GradientsI16, GradientsI8])
def test_codes_depend_on_key_and_row_alone(kind):
    grads, hess = sample(200_001)
    result = []
    for threads in (1, 3):
        with use_threads(threads):
            result.append(codes_of(kind.quantize(grads, hess, key=3)))
    np.testing.assert_array_equal(result[0], result[1])
    other = codes_of(kind.quantize(grads, hess, key=4))
    assert (other[0] != result[0][0]).mean() > 0.1


@pytest.mark.parametrize("make", [GradientsF32.from_floats, GradientsI16.quantize, GradientsI8.quantize])
def test_arrays_that_loops_would_misread_are_refused_by_name(make):
    plain = np.linspace(0.1, 1.0, 10, dtype=np.float32)
    wide, swapped = plain.astype(np.float64), plain.astype(">f4")
    for grads, hess, says in (
        (wide, plain, r"grads: expected float32 numbers in one dimension.*got float64 of shape \(10,\); numpy"),
        (plain, wide, "hess: expected float32.*got float64"),
        (plain, swapped, "hess: expected float32.*got >f4"),
        (plain, plain[:5], "hess: expected 10 numbers, as grads has, got 5"),
        (plain[:5], plain, "hess: expected 5 numbers, as grads has, got 10"),
        (plain[::2], plain[::2], r"grads: .*of shape \(5,\), with gaps"),
        (plain.reshape(2, 5), plain.reshape(2, 5), r"grads: .*of shape \(2, 5\)"),
        (plain.tolist(), plain, "grads: expected a numpy array of float32, got list"),
        (plain, np.float32(1), "hess: expected a numpy array of float32, got float32"),
    ):
        with pytest.raises(TreesError, match=says):
            make(grads, hess)
    make(plain, plain)
    make(plain[:0], plain[:0])


@pytest.mark.parametrize("farthest", [1e-9, 3.0, 400.0, 800.0, np.inf])
def test_gradients_of_two_classes_at_any_score(farthest):
    """Beyond 500 the system's exp is called, for all rows of a piece."""
    scores = np.r_[np.linspace(-3, 3, 1001), -farthest, farthest]
    y = np.arange(len(scores)) % 2.0
    grads, hess = np.empty((2, len(scores)), np.float32)
    loops.binary(y, scores, np.empty(0), grads, hess)
    with np.errstate(over="ignore"):
        share = 1 / (1 + np.exp(-scores))
    np.testing.assert_array_max_ulp(grads, (share - y).astype(np.float32))
    np.testing.assert_array_max_ulp(hess, (share * (1 - share)).astype(np.float32))


def test_exponentials_are_the_same_bits_on_every_system():
    powers, left = loops._powers_of_two()
    whole = powers + (np.arange(128, dtype=np.uint64) << np.uint64(45))
    np.testing.assert_array_max_ulp(whole.view(np.float64), 2.0 ** (np.arange(128) / 128))
    assert np.abs(left).max() < 2.0**-53
    assert hashlib.sha256(powers.tobytes() + left.tobytes()).hexdigest() == POWERS


@pytest.mark.parametrize("drawn_by", [(0, 0, 0), (2**32 - 1, 499, 9), (12345, 1, 0)])
def test_keys_of_trees_are_numpys(drawn_by):
    keys = np.empty(2, np.uint64)
    loops.draw_keys(*drawn_by, keys)
    expected = np.random.SeedSequence(np.array(drawn_by, np.uint32)).generate_state(2, np.uint64)
    np.testing.assert_array_equal(keys, expected)
