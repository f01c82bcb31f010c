"""Every element against torch's and ml_dtypes' casts, over every code and over all 2^16 patterns."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from bitplan.formats import elements as el
from bitplan.formats.codec import decode, encode

from .samples import bits, every_16_bit_float, every_byte, same

INF = float("inf")
FLOAT8 = [
    pytest.param(el.E4M3, torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn, id="e4m3"),
    pytest.param(el.E5M2, torch.float8_e5m2, ml_dtypes.float8_e5m2, id="e5m2"),
]
NARROW_INTEGERS = [
    pytest.param(el.INT4, ml_dtypes.int4, id="int4"),
    pytest.param(el.INT2, ml_dtypes.int2, id="int2"),
    pytest.param(el.UINT4, ml_dtypes.uint4, id="uint4"),
    pytest.param(el.UINT2, ml_dtypes.uint2, id="uint2"),
]


@pytest.mark.parametrize(("element", "torch_type", "numpy_type"), FLOAT8)
@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16])
def test_float8_of_every_16_bit_float_equals_the_saturated_casts(element, torch_type, numpy_type, source):
    x = every_16_bit_float(source)
    clamped = x.clamp(-element.limit, element.limit)
    codes = element.round(x)
    assert same(codes, clamped.to(torch_type))
    assert np.array_equal(bits(codes).numpy(), clamped.numpy().astype(numpy_type).view(np.uint8))


@pytest.mark.parametrize(("element", "torch_type", "numpy_type"), FLOAT8)
def test_float8_value_of_every_code(element, torch_type, numpy_type):
    codes = every_byte().view(torch_type)
    expected = every_byte().numpy().view(numpy_type).astype(np.float32)
    assert np.array_equal(element.value(codes).numpy(), expected, equal_nan=True)


@pytest.mark.parametrize("element", [el.E4M3, el.E5M2], ids=["e4m3", "e5m2"])
def test_float8_rounds_every_midpoint_to_the_even_code(element):
    """Midpoints of neighbours need one bit more than the codes; one float32 ulp to either side decides."""
    positive = torch.arange(0, 128, dtype=torch.uint8).view(element.codes).float()
    positive = positive[positive.isfinite()]
    middle = (positive[:-1] + positive[1:]) / 2
    even = torch.arange(len(middle)) // 2 * 2 + torch.arange(len(middle)) % 2 * 2
    assert torch.equal(bits(element.round(middle)).long(), even)
    below, above = torch.nextafter(middle, torch.tensor(0.0)), torch.nextafter(middle, torch.tensor(INF))
    assert torch.equal(bits(element.round(below)).long(), torch.arange(len(middle)))
    assert torch.equal(bits(element.round(above)).long(), torch.arange(len(middle)) + 1)
    assert torch.equal(bits(element.round(-middle)).long(), even + 128)


@pytest.mark.parametrize(
    ("element", "x", "value"),
    [
        (el.E4M3, 448.0, 448.0),
        (el.E4M3, 464.0, 448.0),
        (el.E4M3, 1e9, 448.0),
        (el.E4M3, -INF, -448.0),
        (el.E4M3, 2.0**-9, 2.0**-9),  # the smallest subnormal
        (el.E4M3, 2.0**-10, 0.0),  # halfway to it: even is zero
        (el.E4M3, 1.5 * 2.0**-9, 2.0**-8),
        (el.E5M2, 57344.0, 57344.0),
        (el.E5M2, 61440.0, 57344.0),
        (el.E5M2, INF, 57344.0),
        (el.E5M2, 2.0**-16, 2.0**-16),
        (el.E5M2, -(2.0**-17), 0.0),
    ],
)
def test_float8_saturates_and_keeps_subnormals(element, x, value):
    assert float(element.value(element.round(torch.tensor([x])))) == value


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16])
def test_e2m1_of_every_16_bit_float_equals_ml_dtypes(source):
    x = every_16_bit_float(source)
    expected = x.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert np.array_equal(el.E2M1.round(x).numpy(), expected)


def test_e2m1_value_of_every_code_equals_ml_dtypes():
    codes = torch.arange(16, dtype=torch.uint8)
    expected = codes.numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert same(el.E2M1.value(codes), torch.from_numpy(expected))
    assert el.E2M1.value(codes, torch.float64).dtype == torch.float64


@pytest.mark.parametrize(
    ("x", "code"),
    [
        (0.0, 0),
        (-0.0, 8),
        (0.25, 0),  # a tie, and zero is even
        (0.75, 2),
        (1.25, 2),
        (1.75, 4),
        (2.5, 4),
        (3.5, 6),
        (5.0, 6),
        (6.0, 7),
        (7.0, 7),
        (1e30, 7),
        (-0.1, 8),
        (-0.5, 9),
        (-5.0, 14),
        (-5.1, 15),
        (-INF, 15),
    ],
)
def test_e2m1_ties_to_even_and_saturates(x, code):
    assert int(el.E2M1.round(torch.tensor([x]))) == code


@pytest.mark.parametrize("step", range(7))
def test_e2m1_one_ulp_beside_each_midpoint_decides(step):
    low, high = el.E2M1_MAGNITUDES[step : step + 2]
    middle = torch.tensor([(low + high) / 2, -(low + high) / 2])
    assert el.E2M1.round(torch.nextafter(middle, torch.zeros(2))).tolist() == [step, step + 8]
    assert el.E2M1.round(torch.nextafter(middle, middle * INF)).tolist() == [step + 1, step + 9]


@pytest.mark.parametrize(("element", "numpy_type"), NARROW_INTEGERS)
def test_narrow_integers_equal_ml_dtypes(element, numpy_type):
    whole = torch.arange(element.low, element.high + 1).float()
    expected = whole.numpy().astype(numpy_type)
    codes = element.round(whole)
    assert codes.dtype == element.codes
    assert np.array_equal(codes.numpy(), expected.astype(np.int8))
    assert np.array_equal(element.value(codes).numpy(), expected.astype(np.float32))


@pytest.mark.parametrize(
    ("element", "x", "code"),
    [
        (el.INT8, 0.5, 0),
        (el.INT8, 1.5, 2),
        (el.INT8, -2.5, -2),
        (el.INT8, 126.5, 126),
        (el.INT8, 127.5, 127),
        (el.INT8, 1e20, 127),
        (el.INT8, -128.0, -128),
        (el.INT8, -1e20, -128),
        (el.INT8_HALF_AWAY, 0.5, 1),
        (el.INT8_HALF_AWAY, -0.5, -1),
        (el.INT8_HALF_AWAY, 2.5, 3),
        (el.INT8_HALF_AWAY, -2.5, -3),
        (el.INT8_HALF_AWAY, 0.49999997, 0),  # adding a half first would round this up
        (el.INT8_HALF_AWAY, 127.5, 127),
        (el.INT4_HALF_AWAY, 6.5, 7),
        (el.INT4_HALF_AWAY, -7.5, -8),
        (el.INT4_HALF_AWAY, -9.0, -8),
        (el.INT4, 7.4, 7),
        (el.INT4, 8.0, 7),
        (el.INT4, -8.5, -8),
        (el.INT2, -2.0, -2),
        (el.INT2, 2.0, 1),
        (el.UINT8, -1.0, 0),
        (el.UINT8, 255.5, 255),
        (el.UINT4, 16.0, 15),
        (el.UINT2, 2.5, 2),
        (el.TERNARY, 0.5, 0),
        (el.TERNARY, 0.51, 1),
        (el.TERNARY, -9.0, -1),
    ],
)
def test_integers_round_and_saturate(element, x, code):
    assert int(element.round(torch.tensor([x]))) == code


@pytest.mark.parametrize(
    ("x", "code", "value"), [(2.0, 1, 1.0), (1e-30, 1, 1.0), (0.0, 0, -1.0), (-0.0, 0, -1.0), (-3.0, 0, -1.0)]
)
def test_binary_is_the_sign_and_zero_counts_as_negative(x, code, value):
    codes = el.BINARY.round(torch.tensor([x]))
    assert (int(codes), float(el.BINARY.value(codes))) == (code, value)


@pytest.mark.parametrize(
    ("x", "dtype", "code"),
    [
        (2.0**63, torch.int64, 2**63 - 1),
        (2.0**63 - 1024, torch.int64, 2**63 - 1024),  # the largest double below 2^63
        (1e300, torch.int64, 2**63 - 1),
        (INF, torch.int64, 2**63 - 1),
        (-(2.0**63), torch.int64, -(2**63)),
        (-1e300, torch.int64, -(2**63)),
        (2.0**53 + 2, torch.int64, 2**53 + 2),
        (-3.0, torch.uint64, 0),
        (-1e300, torch.uint64, 0),
        (2.0**63 - 1024, torch.uint64, 2**63 - 1024),
        (2.0**63, torch.uint64, 2**63),
        (2.0**64 - 2048, torch.uint64, 2**64 - 2048),
        (2.0**64, torch.uint64, 2**64 - 1),
        (INF, torch.uint64, 2**64 - 1),
        (2.0**31, torch.int32, 2**31 - 1),
        (-(2.0**31) - 5, torch.int32, -(2**31)),
        (2.0**24 + 1, torch.int32, 2**24 + 1),
        (2.0**32, torch.uint32, 2**32 - 1),
        (2.0**31 + 1, torch.uint32, 2**31 + 1),
        (-1.0, torch.uint32, 0),
        (65536.0, torch.uint16, 65535),
        (40000.0, torch.uint16, 40000),
        (-40000.0, torch.int16, -32768),
    ],
)
def test_wide_integers_saturate_and_never_wrap(x, dtype, code):
    limits = torch.iinfo(dtype)
    codes = el.exact_integers(torch.tensor([x], dtype=torch.float64), limits.min, limits.max, dtype)
    assert codes.dtype == dtype
    assert codes.tolist() == [code]


@pytest.mark.parametrize("code", [0, 1, 2**53 + 2, 2**63 - 1, 2**63, 2**63 + 2048, 2**64 - 2048, 2**64 - 1])
def test_uint64_as_float_is_rounded_once(code):
    codes = torch.tensor([code], dtype=torch.uint64)
    assert el.integers_as_floats(codes, torch.float64).item() == float(code)


def test_every_uint16_as_float():
    codes = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)
    assert torch.equal(el.integers_as_floats(codes, torch.float32), torch.arange(2**16).float())


def test_binary_keeps_the_sign_of_numbers_far_below_the_largest():
    x = torch.tensor([3e38, 1e-45, 2.0**-126, -1e-45, 1.0, 0.0])
    assert torch.equal(decode(encode(x, "binary")).sign(), torch.tensor([1.0, 1.0, 1.0, -1.0, 1.0, -1.0]))
