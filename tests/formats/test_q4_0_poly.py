"""q4_0_poly against its definition, written out again as loops over single numbers."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

from bitplan.formats import Encoded
from bitplan.formats.codec import decode, encode

from .samples import gaussian, heavy_tailed


def half_away(number: np.float32) -> int:
    """Go's math.Round."""
    magnitude = int(abs(float(number)) + 0.5)
    return -magnitude if number < 0 else magnitude


def quantize_q4_0(weights: list[np.float32]) -> bytes:
    """maxAbs, scale = maxAbs / 7, round(w / scale) in [-8, 7], byte[j] = q1 & 0xF | (q2 & 0xF) << 4."""
    packed = b""
    for start in range(0, len(weights), 32):
        block = weights[start : start + 32]
        largest = np.float32(0)
        for weight in block:
            largest = max(largest, abs(weight))
        scale = np.float32(largest / np.float32(7))
        packed += struct.pack("<f", scale)
        for j in range(16):
            q1, q2 = (
                max(-8, min(7, half_away(np.float32(block[i] / scale)))) if scale else 0 for i in (2 * j, 2 * j + 1)
            )
            packed += struct.pack("B", (q1 & 0xF) | ((q2 & 0xF) << 4))
    return packed


def dequantize_q4_0(packed: bytes) -> list[np.float32]:
    weights = []
    for start in range(0, len(packed), 20):
        (scale,) = struct.unpack_from("<f", packed, start)
        for byte in packed[start + 4 : start + 20]:
            for nibble in (byte & 0xF, byte >> 4):
                weights.append(np.float32(nibble - 16 if nibble > 7 else nibble) * np.float32(scale))
    return weights


SAMPLES = {
    "gaussian": gaussian(20, 64),
    "heavy_tailed": heavy_tailed(20, 64),
    "ties": torch.cat([torch.tensor([7.0]), torch.arange(-15, 16) / 2 - 0.5]).clamp(-7, 7),
    "constant": torch.full((32,), -0.3),
    "zeros": torch.zeros(32),
    "minus_zeros": torch.full((32,), -0.0),
    "spike": torch.nn.functional.one_hot(torch.tensor(5), 32).float() * -1e5,
    "tiny": gaussian(32) * 1e-30,
    "huge": gaussian(32) * 1e30,
    "zero_block_between": torch.cat([gaussian(32), torch.zeros(32), gaussian(32)]),
}


@pytest.mark.parametrize("x", SAMPLES.values(), ids=SAMPLES.keys())
def test_bytes_equal_the_loops(x):
    packed = quantize_q4_0(list(x.numpy().reshape(-1)))
    encoded = encode(x, "q4_0_poly")
    assert encoded.to_bytes() == packed
    assert decode(encoded).reshape(-1).tolist() == [float(weight) for weight in dequantize_q4_0(packed)]


def test_every_byte_decodes_as_the_loops():
    packed = b"".join(
        struct.pack("<f", 0.1 * step - 0.5) + bytes(range(16 * step, 16 * step + 16)) for step in range(16)
    )
    decoded = decode(Encoded.from_bytes("q4_0_poly", (16, 32), packed))
    assert decoded.reshape(-1).tolist() == [float(weight) for weight in dequantize_q4_0(packed)]


def test_a_tie_goes_away_from_zero():
    x = torch.zeros(32)
    x[:5] = torch.tensor([7.0, 0.5, -0.5, 2.5, -6.5])
    assert decode(encode(x, "q4_0_poly"))[:5].tolist() == [7.0, 1.0, -1.0, 3.0, -7.0]
