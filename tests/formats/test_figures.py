"""The figures that the documentation prints: cosine of Gaussian weights, format by format."""

from __future__ import annotations

import math

import pytest

from bitplan.formats import error_report
from bitplan.formats.codec import encode

from .samples import gaussian


@pytest.fixture(scope="module")
def weights():
    """With 5.34 sigma, which 4096 x 4096 numbers reach on average: one scale per tensor depends on it."""
    sample = gaussian(1024, 1024)
    sample[0, 0] = 5.34
    return sample


@pytest.mark.parametrize(
    ("name", "cosine", "within"),
    [
        ("bfloat16", 0.999997, 2e-6),
        ("fp8_e4m3", 0.99965, 1e-4),
        ("int8", 0.99993, 1e-5),
        ("int4", 0.9765, 5e-4),
        ("int2", 0.258, 5e-3),
        ("ternary", 0.258, 5e-3),
        ("ternary_absmean", 0.887, 1e-3),
        ("binary", math.sqrt(2 / math.pi), 1e-3),
        ("q4_0_poly", 0.9958, 1e-3),
        ("q4_0_gguf", 0.9963, 1e-3),
        ("q8_0_gguf", 0.99998, 1e-5),
        ("mxfp4", 0.9932, 2e-3),
        ("nvfp4", 0.9953, 1e-3),
    ],
)
def test_cosine_of_gaussian_weights(weights, name, cosine, within):
    assert error_report(weights, encode(weights, name)).cosine == pytest.approx(cosine, abs=within)


def test_block_scales_beat_one_scale(weights):
    sqnr = {
        name: error_report(weights, encode(weights, name)).sqnr_db for name in ("int4", "int4_g32", "int8", "int8_row")
    }
    assert sqnr["int4_g32"] > sqnr["int4"] + 6
    assert sqnr["int8_row"] > sqnr["int8"]
