"""Packed float16, fp8 and fp4 of the original's networks, as its versions of today and before write them."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bitplan.base.errors import FileFormatError
from bitplan.files.poly_network import read_poly_json, vote
from tests.files.test_poly_json import b64, layer, network, save

FP4 = {0: 0.0, 1: 0.75, 2: 1.0, 3: 1.5, 4: 2.0, 5: 3.0, 8: -0.0, 9: -0.75, 10: -1.0, 11: -1.5, 12: -2.0, 13: -3.0}


def small_float(value: float, exponent_bits: int, mantissa_bits: int) -> tuple[int, float]:
    """A code and its number: rounded towards zero, nothing with exponent 0 but zero."""
    bias, sign = 2 ** (exponent_bits - 1) - 1, 128 if math.copysign(1, value) < 0 else 0
    fraction, exponent = math.frexp(abs(value))
    place = exponent - 1 + bias
    if value == 0 or place <= 0:
        return sign, 0.0
    mantissa = int((fraction * 2 - 1) * 2**mantissa_bits)
    number = math.copysign((1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - 1), value)
    return sign | place << mantissa_bits | mantissa, number


def today(dtype: str, weights: list[float]) -> tuple[bytes, float, list[float]]:
    """Bytes, scale, and the numbers they stand for."""
    scale = struct.unpack("<f", struct.pack("<f", max(map(abs, weights)) / (3 if dtype == "fp4" else 127)))[0]
    if dtype == "float16":
        bits = [struct.unpack("<I", struct.pack("<f", value))[0] for value in weights]
        cut = [struct.unpack("<f", struct.pack("<I", each & 0xFFFFE000))[0] for each in bits]
        return b"".join(struct.pack("<e", value) for value in cut), scale, cut
    if dtype == "fp4":
        codes = [min(FP4, key=lambda code: abs(FP4[code] - value / scale)) for value in weights]
        raw = bytes(high << 4 | low for high, low in zip(codes[::2], codes[1::2], strict=True))
        return raw, scale, [FP4[code] * scale for code in codes]
    sizes = (4, 3) if dtype == "fp8e4m3" else (5, 2)
    made = [small_float(value / scale, *sizes) for value in weights]
    return bytes(code for code, _ in made), scale, [number * scale for _, number in made]


def older(dtype: str, weights: list[float]) -> tuple[bytes, float, list[float]]:
    scale = struct.unpack("<f", struct.pack("<f", max(map(abs, weights)) / 127))[0]
    if dtype == "float16":
        raw = b"".join(struct.pack("<f", value)[2:] for value in weights)
        return raw, scale, [struct.unpack("<f", b"\0\0" + raw[at : at + 2])[0] for at in range(0, len(raw), 2)]
    codes = [int(value / scale) for value in weights]
    if dtype == "fp4":
        return bytes((a & 15) << 4 | b & 15 for a, b in zip(codes[::2], codes[1::2], strict=True)), scale, []
    return struct.pack(f"<{len(codes)}b", *codes), scale, [code * scale for code in codes]


def drawn(count: int, shape: str, seed: int = 0) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator) if shape == "normal" else torch.rand(count, generator=generator)
    return [float(value) for value in (values * 0.05 if shape == "normal" else values * 2 - 1)]


Packer = Callable[[str, list[float]], tuple[bytes, float, list[float]]]


def packed(dtype: str, pack: Packer, weights: list[float], **keys: Any) -> dict[str, Any]:
    raw, scale, _ = pack(dtype, weights)
    return layer(dtype=dtype.upper(), weights=b64(raw), native=True, scale=scale) | keys


@pytest.mark.parametrize("shape", ["normal", "uniform"])
@pytest.mark.parametrize("pack", [today, older])
@pytest.mark.parametrize("dtype", ["float16", "fp8e4m3", "fp8e5m2", "fp4"])
def test_each_version_is_known_by_its_numbers(tmp_path: Path, dtype: str, pack: Packer, shape: str) -> None:
    for seed in range(3):
        weights = drawn(256, shape, seed)
        path = save(tmp_path / "net.json", network(packed(dtype, pack, weights)))
        if pack is older and dtype == "fp4":
            with pytest.raises(FileFormatError, match="cut numbers off"):
                read_poly_json(path)
            continue
        found = read_poly_json(path).tensors["layers[0]"]
        assert found.tolist() == pytest.approx(pack(dtype, weights)[2], rel=1e-6)


def test_trained_further_and_without_a_scale_it_is_still_known(tmp_path: Path) -> None:
    weights = drawn(512, "normal")
    for pack in (today, older):
        path = save(tmp_path / "net.json", network(packed("float16", pack, weights, scale=1.0)))
        assert read_poly_json(path).tensors["layers[0]"].tolist() == pack("float16", weights)[2]


def test_a_layer_that_cannot_tell_is_read_as_the_others_are(tmp_path: Path) -> None:
    sure, few = packed("fp8e4m3", today, drawn(256, "normal")), packed("fp8e4m3", today, [0.5, -0.25])
    tensors = read_poly_json(save(tmp_path / "net.json", network(few, sure))).tensors
    assert tensors["layers[0]"].tolist() == pytest.approx(today("fp8e4m3", [0.5, -0.25])[2])


@pytest.mark.parametrize(
    "layers",
    [
        [packed("fp8e4m3", today, [0.5, -0.25])],
        [packed("float16", today, [1.0, 1.25, 0.75] * 50, scale=1.0)],
        [packed("fp8e4m3", today, drawn(256, "normal")), packed("fp8e5m2", older, drawn(256, "normal"))],
    ],
    ids=["few", "nearly constant", "two versions"],
)
def test_what_does_not_show_its_version_is_refused(tmp_path: Path, layers: list[dict[str, Any]]) -> None:
    with pytest.raises(FileFormatError, match="do not show which it was"):
        read_poly_json(save(tmp_path / "net.json", network(*layers)))


def test_zeros_are_zeros_in_any_version(tmp_path: Path) -> None:
    path = save(tmp_path / "net.json", network(layer(dtype="fp4", weights=b64(bytes(2)), native=True, scale=0.5)))
    assert read_poly_json(path).tensors["layers[0]"].tolist() == [0.0] * 4


def test_a_largest_number_at_the_limit_of_rounding_shows_no_version() -> None:
    upper = struct.pack("<f", 65.0)[2:]
    assert vote("float16", upper, 64 / 127) is None
    assert vote("float16", upper, 64.1 / 127) == "older"
    assert vote("float16", upper, 0.0) is None  # no scale: the numbers alone, and they are few
