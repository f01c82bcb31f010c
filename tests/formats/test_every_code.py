"""decode over every code and every scale byte, against tables built from ml_dtypes and plain arithmetic."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from bitplan.formats import Encoded, get_format
from bitplan.formats.codec import decode, encode

from .samples import gaussian

BYTES = np.arange(256, dtype=np.uint8)
E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
INT4 = np.array([*range(8), *range(-8, 0)], dtype=np.float32)  # two's complement
INT4_OFFSET = np.arange(16, dtype=np.float32) - 8
INT2 = np.array([0, 1, -2, -1], dtype=np.float32)
E4M3 = BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
E5M2 = BYTES.view(ml_dtypes.float8_e5m2).astype(np.float32)
INT8 = BYTES.view(np.int8).astype(np.float32)
E8M0 = BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)


def fields(packed: np.ndarray, bits: int, order: str) -> np.ndarray:
    """[blocks, bytes] -> [blocks, fields], by the table in packing.py."""
    lanes = [packed >> bits * lane & 2**bits - 1 for lane in range(8 // bits)]
    if order == "halves":
        return np.concatenate(lanes, axis=-1)
    lanes = lanes[::-1] if order == "high_first" else lanes
    return np.stack(lanes, axis=-1).reshape(len(packed), -1)


def held(name: str, shape: tuple[int, ...], **parts: np.ndarray | float) -> Encoded:
    """An Encoded from raw arrays, whatever type its parts have."""
    layout = get_format(name).part_shapes(shape)
    tensors = {}
    for part, raw in parts.items():
        dtype, size = layout[part]
        flat = torch.from_numpy(np.atleast_1d(np.ascontiguousarray(raw))).reshape(-1)
        tensors[part] = (flat.view(dtype) if flat.dtype.itemsize == dtype.itemsize else flat.to(dtype)).reshape(size)
    return Encoded(get_format(name), shape, **tensors)


def assert_decodes(encoded: Encoded, expected: np.ndarray) -> None:
    decoded = decode(encoded).numpy().reshape(expected.shape)
    assert np.array_equal(decoded, expected, equal_nan=True)
    assert np.array_equal(np.signbit(decoded) & (decoded == 0), np.signbit(expected) & (expected == 0))


@pytest.mark.parametrize(
    ("name", "table"), [("int8", INT8), ("fp8_e4m3", E4M3), ("fp8_e5m2", E5M2)], ids=["int8", "fp8_e4m3", "fp8_e5m2"]
)
@pytest.mark.parametrize("scale", [1.0, 0.01, 2.0**-126])
def test_8_bit_dtypes(name, table, scale):
    assert_decodes(held(name, (256,), data=BYTES, scales=np.float32(scale)), table * np.float32(scale))


@pytest.mark.parametrize(
    ("name", "bits", "table"),
    [
        ("int4", 4, INT4),
        ("fp4", 4, E2M1),
        ("int2", 2, INT2),
        ("ternary", 2, INT2),  # code -2 is never written, and reads as what it says
        ("ternary_absmean", 2, INT2),
        ("binary", 1, np.array([-1, 1], dtype=np.float32)),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_packed_dtypes(name, bits, table, scale):
    count = 256 * 8 // bits
    expected = table[fields(BYTES[None], bits, "high_first")[0]] * np.float32(scale)
    assert_decodes(held(name, (count,), data=BYTES, scales=np.float32(scale)), expected)


@pytest.mark.parametrize(("name", "bits"), [("uint8", 8), ("uint4", 4), ("uint2", 2)])
@pytest.mark.parametrize("zero_share", [0.0, 0.5, 1.0])
def test_unsigned_dtypes(name, bits, zero_share):
    zero = round((2**bits - 1) * zero_share)
    codes = fields(BYTES[None], bits, "high_first")[0] if bits < 8 else BYTES
    encoded = held(name, codes.shape, data=BYTES, scales=np.float32(0.3), zero_point=np.uint8(zero))
    assert_decodes(encoded, (codes.astype(np.float32) - zero) * np.float32(0.3))


@pytest.mark.parametrize("name", ["mxfp4", "mxfp4_gguf"])
def test_mxfp4_every_data_byte_under_every_scale_byte(name):
    data = np.tile(BYTES.reshape(16, 16), (256, 1))
    scales = np.repeat(BYTES, 16)
    if name == "mxfp4":
        with np.errstate(over="ignore"):
            expected = E2M1[fields(data, 4, "low_first")] * E8M0[scales][:, None]
    else:  # ggml: no -0.0, and byte 255 is 2^128, out of which float32 holds only the smallest codes
        table = np.where(E2M1 == 0, 0.0, E2M1).astype(np.float64)
        with np.errstate(over="ignore"):
            wide = table[fields(data, 4, "halves")] * 2.0 ** (scales.astype(np.float64) - 127)[:, None]
            expected = wide.astype(np.float32)
    assert_decodes(held(name, (len(data), 32), data=data, scales=scales), expected)


def test_mxfp8_every_code_under_every_scale_byte():
    data = np.tile(BYTES.reshape(8, 32), (256, 1))
    scales = np.repeat(BYTES, 8)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = E4M3[data] * E8M0[scales][:, None]
    assert_decodes(held("mxfp8_e4m3", (len(data), 32), data=data, scales=scales), expected)


@pytest.mark.parametrize("base", [1.0, 0.37, 2.0**-120])
def test_nvfp4_every_data_byte_under_every_scale_byte(base):
    data = np.tile(BYTES.reshape(32, 8), (256, 1))
    scales = np.repeat(BYTES, 32)
    scale = E4M3[scales] * np.float32(base)
    scale = np.where(np.abs(scale) < 2.0**-126, np.float32(0), scale)
    expected = E2M1[fields(data, 4, "low_first")] * scale[:, None]
    assert_decodes(held("nvfp4", (len(data), 16), data=data, scales=scales, base=np.float32(base)), expected)


@pytest.mark.parametrize("base", [1.0, 0.37])
def test_linear_scales_every_data_byte_under_every_scale_byte(base):
    data = np.tile(BYTES.reshape(4, 64), (256, 1))
    scales = np.repeat(BYTES, 4)
    scale = scales.astype(np.float32) * np.float32(base)
    expected = E2M1[fields(data, 4, "low_first")] * scale[:, None]
    assert_decodes(held("fp4_u8_g128", (len(data), 128), data=data, scales=scales, base=np.float32(base)), expected)


@pytest.mark.parametrize(
    ("name", "table", "order", "scale_type"),
    [
        ("q4_0_poly", INT4, "low_first", np.float32),
        ("q4_0_gguf", INT4_OFFSET, "halves", np.float16),
        ("int4_g32", INT4_OFFSET, "low_first", ml_dtypes.bfloat16),
    ],
)
def test_4_bit_blocks_every_data_byte(name, table, order, scale_type):
    data = BYTES.reshape(16, 16)
    scales = np.array([0.1, -0.3, 7e-5, 0.0, *[1.5 * 2.0**step for step in range(-8, 4)]], dtype=scale_type)
    expected = table[fields(data, 4, order)] * scales.astype(np.float32)[:, None]
    raw = scales.view(np.uint32 if scale_type is np.float32 else np.uint16)
    assert_decodes(held(name, (16, 32), data=data, scales=raw), expected)


def test_q8_0_every_code():
    scales = np.array([0.1, -0.3, 7e-8, 0.0, 1.0, 2.0, 1e-3, 100.0], dtype=np.float16)
    expected = INT8.reshape(8, 32) * scales.astype(np.float32)[:, None]
    assert_decodes(held("q8_0_gguf", (8, 32), data=BYTES, scales=scales), expected)


@pytest.mark.parametrize(
    ("name", "shape", "table", "scales"),
    [
        ("int8_row", (2, 128), INT8, [0.01, 3.0]),
        ("int8_g128", (1, 256), INT8, [0.01, 3.0]),
        ("fp8_e4m3_row", (2, 128), E4M3, [0.01, 3.0]),
        ("fp8_e4m3_b128", (1, 256), E4M3, [0.01, 3.0]),
    ],
)
def test_8_bit_blocks_every_code(name, shape, table, scales):
    expected = table.reshape(2, 128) * np.array(scales, dtype=np.float32)[:, None]
    assert_decodes(held(name, shape, data=BYTES, scales=np.array(scales, dtype=np.float32)), expected)


@pytest.mark.parametrize("name", ["int8", "int4", "uint8", "uint4", "int2", "uint2", "fp8_e4m3", "fp8_e5m2", "fp4"])
def test_every_code_that_decodes_to_a_number_encodes_to_itself(name):
    """At the same scale and zero point; codes of NaN and infinity aside."""
    fmt = get_format(name)
    first = encode(gaussian(2048), fmt)
    packed = torch.arange(256, dtype=torch.uint8)
    shape = (256 * (fmt.packing.per_byte if fmt.packing else 1),)
    every = Encoded(fmt, shape, packed.view(fmt.storage), first.scales, None, first.zero_point)
    numbers = decode(every)
    options = {} if first.zero_point is None else {"zero_point": int(first.zero_point)}
    again = encode(numbers.nan_to_num(posinf=0, neginf=0), fmt, scale=first.scales, **options)
    finite = numbers.isfinite()
    assert torch.equal(
        again.codes().reshape(-1).view(torch.uint8)[finite], every.codes().reshape(-1).view(torch.uint8)[finite]
    )
