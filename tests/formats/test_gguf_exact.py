"""q4_0_gguf, q8_0_gguf and mxfp4_gguf against gguf-py, byte for byte, both ways."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from bitplan.formats import Encoded, get_format
from bitplan.formats.codec import decode, encode
from tests.crosses import few

from .samples import gaussian, heavy_tailed

TYPES = {
    "q4_0_gguf": GGMLQuantizationType.Q4_0,
    "q8_0_gguf": GGMLQuantizationType.Q8_0,
    "mxfp4_gguf": GGMLQuantizationType.MXFP4,
}
POWERS = np.array([2.0**exponent for exponent in range(-100, 101)], dtype=np.float32)
SMALL_POWERS = POWERS[60:116]  # within reach of a float16 scale


def spikes(values: np.ndarray) -> np.ndarray:
    """One block for each value, where it is the largest magnitude, beside some of its fractions."""
    fractions = np.array([-1 / 3, 0.25, -0.125, 0.0833, 0.5, -0.6, 1e-3, 0.999], dtype=np.float32)
    blocks = np.zeros((len(values), 32), dtype=np.float32)
    blocks[:, 13] = values
    blocks[:, 16:24] = values[:, None] * fractions
    return blocks


def neighbours(values: np.ndarray) -> np.ndarray:
    """Each value and the floats up to 3 ulps to either side.

    numpy's float32 log2 depends on the CPU's vector library: where its floor is not that of the rounded logarithm,
    gguf-py differs from ggml itself, and the value is left out.
    """
    steps = np.arange(-3, 4, dtype=np.int32)
    near = (values.view(np.int32)[:, None] + steps).reshape(-1).view(np.float32)
    return near[np.floor(np.log2(near)) == np.floor(np.log2(near.astype(np.float64)).astype(np.float32))]


def lattice() -> np.ndarray:
    """Blocks whose numbers lie on, and one ulp beside, every tie of their scale."""
    ties = np.arange(-64, 65, dtype=np.float32) / 8
    near = np.concatenate([np.nextafter(ties, np.float32(-100)), ties, np.nextafter(ties, np.float32(100))])
    rows = np.stack([np.roll(near, row)[:30] for row in range(len(near))])
    extremes = np.where(np.arange(len(near)) % 2 == 0, np.float32(8), np.float32(-8))
    return np.concatenate([extremes[:, None], rows, extremes[::-1, None]], axis=1).astype(np.float32)


def by_hand() -> np.ndarray:
    rows = [
        np.zeros(32),
        np.full(32, -0.0),
        np.resize([-0.0, 0.0], 32),
        np.full(32, 0.37),
        np.full(32, -5.0),
        np.resize([3.0, -3.0], 32),  # the extreme of either sign: the first one decides
        np.resize([-3.0, 3.0], 32),
        np.resize([0.0, -0.0, 1.0, -1.0], 32),
        np.arange(32) - 16.0,
        np.resize([1e-30, -2e-30, 0.0], 32),  # a float16 scale of zero, and codes all the same
        np.resize([1e-7, -3e-8], 32),
    ]
    return np.array(rows, dtype=np.float32)


SAMPLES = {
    "gaussian": gaussian(300, 512).numpy(),
    "heavy_tailed": heavy_tailed(300, 512).numpy(),
    "small": gaussian(20, 64).numpy() * np.float32(1e-4),
    "rounded": (gaussian(100, 256) * 4).round().numpy(),
    "bfloat16": gaussian(100, 256).bfloat16().float().numpy(),
    "three_axes": gaussian(3, 4, 96).numpy(),
    "one_block": gaussian(32).numpy(),
    "powers_of_two": spikes(neighbours(SMALL_POWERS)),
    "negative_powers_of_two": -spikes(neighbours(SMALL_POWERS)),
    "ties": lattice(),
    "by_hand": by_hand(),
}


def assert_same_bytes(name: str, x: np.ndarray) -> None:
    expected = quantize(x, TYPES[name])
    encoded = encode(torch.from_numpy(x), name)
    assert encoded.to_bytes() == expected.tobytes()
    assert np.array_equal(decode(encoded).numpy(), dequantize(expected, TYPES[name]).reshape(x.shape))


@pytest.mark.parametrize("x", few(SAMPLES.values(), 6), ids=SAMPLES.keys())
@pytest.mark.parametrize("name", TYPES)
def test_encode_equals_gguf_py(name, x):
    assert_same_bytes(name, x)


ANY_MAGNITUDE = {
    "powers": spikes(neighbours(POWERS)),
    "negative_powers": -spikes(neighbours(POWERS)),
    "huge": gaussian(20, 64).numpy() * np.float32(1e30),
    "tiny": gaussian(20, 64).numpy() * np.float32(1e-30),
}


@pytest.mark.parametrize("x", ANY_MAGNITUDE.values(), ids=ANY_MAGNITUDE.keys())
def test_mxfp4_equals_gguf_py_at_any_magnitude(x):
    """ggml takes floor of a *float32* logarithm, which rounds up just below most powers of two."""
    assert_same_bytes("mxfp4_gguf", x)


def test_the_float32_logarithm_makes_a_difference():
    below = np.zeros(32, dtype=np.float32)
    below[0] = np.nextafter(np.float32(2.0**60), np.float32(0))
    ours, ggml = (int(encode(torch.from_numpy(below), name).scales) for name in ("mxfp4", "mxfp4_gguf"))
    assert (ours, ggml) == (127 + 57, 127 + 58)


@pytest.mark.parametrize("name", TYPES)
def test_random_maxima_of_every_binade(name):
    generator = np.random.default_rng(3)
    low, high = (-100, 100) if name == "mxfp4_gguf" else (-40, 14)
    largest = np.ldexp(1 + generator.random(4000), generator.integers(low, high, 4000)).astype(np.float32)
    assert_same_bytes(name, spikes(largest))


@pytest.mark.parametrize("name", TYPES)
def test_decode_of_random_bytes_equals_gguf_py(name):
    generator = np.random.default_rng(4)
    raw = generator.integers(0, 256, (20_000, get_format(name).nbytes((32,))), dtype=np.uint8)
    assert_decodes_as_gguf_py(name, raw)


@pytest.mark.parametrize("name", ["q4_0_gguf", "q8_0_gguf"])
def test_decode_under_every_float16_scale_equals_gguf_py(name):
    """All 2^16 patterns: subnormal, negative, -0.0, and infinity and NaN as gguf-py has them."""
    generator = np.random.default_rng(5)
    width = {"q4_0_gguf": 16, "q8_0_gguf": 32}[name]
    scales = np.arange(2**16, dtype=np.uint16).view(np.uint8).reshape(-1, 2)
    codes = generator.integers(0, 256, (2**16, width), dtype=np.uint8)
    assert_decodes_as_gguf_py(name, np.concatenate([scales, codes], axis=1))


def test_decode_of_mxfp4_under_every_scale_byte_equals_gguf_py():
    codes = np.tile(np.arange(256, dtype=np.uint8).reshape(16, 16), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8), 16)[:, None]
    assert_decodes_as_gguf_py("mxfp4_gguf", np.concatenate([scales, codes], axis=1))


def assert_decodes_as_gguf_py(name: str, raw: np.ndarray) -> None:
    """Bit for bit, but for which NaN a NaN is."""
    with np.errstate(invalid="ignore", over="ignore"):
        expected = dequantize(raw, TYPES[name])
    encoded = Encoded.from_bytes(name, (len(raw), 32), raw.tobytes())
    assert encoded.to_bytes() == raw.tobytes()
    decoded = decode(encoded).numpy()
    assert np.array_equal(np.isnan(decoded), np.isnan(expected))
    numbers = ~np.isnan(expected)
    assert np.array_equal(decoded.view(np.uint32)[numbers], expected.view(np.uint32)[numbers])


def test_a_zero_block_of_q4_0_is_minus_zero_and_eights():
    assert encode(torch.zeros(32), "q4_0_gguf").to_bytes() == bytes.fromhex("0080" + "88" * 16)
