"""encode and decode: casts over every pattern, shapes, input types, and the tensors that are refused."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from bitplan.base.errors import BitplanError, FormatError, NonFiniteError
from bitplan.formats import get_format
from bitplan.formats.codec import decode, encode
from tests.crosses import few

from .samples import (
    ALL_FORMATS,
    FORMATS_AND_RULES,
    SCALED_FORMATS,
    SHAPE_PARAMS,
    SHAPES,
    WITH_CODES,
    every_16_bit_float,
    gaussian,
    same,
)

INF, NAN = float("inf"), float("nan")
FLT_MAX, LARGEST_SUBNORMAL = torch.finfo(torch.float32).max, 2.0**-126 - 2.0**-149
BLOCKED = [fmt for fmt in WITH_CODES if fmt.block.rows == 1 and fmt.block.cols]
STOP_AT_65504 = ("q4_0_gguf", "q8_0_gguf", "float16")
HALVES = [("float16", torch.float16, np.float16), ("bfloat16", torch.bfloat16, ml_dtypes.bfloat16)]


# ---- casts and minifloats against torch and ml_dtypes ----------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype", "numpy_type"), HALVES)
def test_half_casts_at_every_midpoint_and_one_ulp_beside_it(name, dtype, numpy_type):
    values = every_16_bit_float(dtype).double().unique()
    middle = ((values[:-1] + values[1:]) / 2).float()  # exact: one bit more than the codes
    x = torch.cat([torch.nextafter(middle, torch.tensor(-INF)), middle, torch.nextafter(middle, torch.tensor(INF))])
    encoded = encode(x, name)
    assert same(encoded.data, x.to(dtype))
    with np.errstate(over="ignore"):
        expected = x.numpy().astype(numpy_type)
    assert np.array_equal(encoded.data.view(torch.int16).numpy(), expected.view(np.int16))
    assert same(decode(encoded), x.to(dtype).float())


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "bfloat16"])
def test_casts_keep_nan_infinity_and_the_sign_of_zero(name):
    x = torch.tensor([NAN, INF, -INF, -0.0, 0.0])
    decoded = decode(encode(x, name))
    assert decoded.isnan().tolist() == [True, False, False, False, False]
    assert same(decoded[1:], x[1:])


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_a_cast_replaces_when_told_to(name):
    replaced = decode(encode(torch.tensor([NAN, INF, -INF, 2.0, -3.0]), name, nonfinite="replace"))
    assert replaced.tolist() == [0.0, 3.0, -3.0, 2.0, -3.0]


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "bfloat16"])
def test_an_encoding_does_not_follow_its_source(name):
    x = torch.ones(4, dtype=get_format(name).storage)
    encoded = encode(x, name)
    x.zero_()
    decoded = decode(encoded, x.dtype)
    decoded.zero_()
    assert decode(encoded).tolist() == [1.0] * 4


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("name", "dtype"), [("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_fp8_of_every_16_bit_pattern_at_scale_one_is_torchs_saturated_cast(name, dtype, source):
    x = every_16_bit_float(source)
    encoded = encode(x, name, scale=1.0)
    largest = torch.finfo(dtype).max
    assert same(encoded.data, x.clamp(-largest, largest).to(dtype))
    assert same(decode(encoded), encoded.data.float())


def test_fp4_of_every_bf16_pattern_at_scale_one_is_ml_dtypes_saturated_cast():
    x = every_16_bit_float(torch.bfloat16)
    expected = x.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn)
    encoded = encode(x, "fp4", scale=1.0)
    assert np.array_equal(encoded.codes()[0].numpy(), expected.view(np.uint8))
    assert np.array_equal(decode(encoded).numpy(), expected.astype(np.float32))


@pytest.mark.parametrize(
    ("name", "numpy_type"),
    [("int4", ml_dtypes.int4), ("int2", ml_dtypes.int2), ("uint4", ml_dtypes.uint4), ("uint2", ml_dtypes.uint2)],
)
def test_whole_numbers_at_scale_one_are_ml_dtypes_integers(name, numpy_type):
    low, high = int(ml_dtypes.iinfo(numpy_type).min), int(ml_dtypes.iinfo(numpy_type).max)
    x = torch.arange(low, high + 1).float()
    options = {"zero_point": 0} if name.startswith("u") else {}
    encoded = encode(x, name, scale=1.0, **options)
    expected = x.numpy().astype(numpy_type)
    assert np.array_equal(encoded.codes()[0].numpy(), expected.astype(np.int8))
    assert np.array_equal(decode(encoded).numpy(), expected.astype(np.float32))


def test_a_worked_example():
    """int8 with scale 0.01: 0.437 -> 44 -> 0.44."""
    encoded = encode(torch.tensor([0.437]), "int8", scale=0.01)
    assert encoded.data.tolist() == [44]
    assert float(decode(encoded)) == pytest.approx(0.44, abs=1e-7)


# ---- shapes, views, input types --------------------------------------------------------------------------------------


@pytest.mark.cross("shape", SHAPE_PARAMS)
@pytest.mark.cross("fmt", few(ALL_FORMATS, 16))
def test_every_shape_comes_back(fmt, shape):
    x = gaussian(*shape)
    decoded = decode(encode(x, fmt, pad="zero"))
    assert decoded.shape == x.shape
    assert decoded.dtype == torch.float32
    matrix = x.reshape(fmt.matrix_shape(shape))
    assert same(decoded.reshape(matrix.shape), decode(encode(matrix, fmt, pad="zero")))


@pytest.mark.parametrize("fmt", BLOCKED, ids=lambda fmt: fmt.name)
def test_padding_changes_no_number(fmt):
    """A row of 33 in blocks is a block of 32 and a block of one, whatever fills it."""
    width = fmt.block.cols
    x = gaussian(3, width + 1)
    base = {"base": 2.0**-9} if fmt.scales.needs_base else {}
    whole = decode(encode(x, fmt, pad="zero", **base))
    assert same(whole[:, :width], decode(encode(x[:, :width], fmt, **base)))
    assert same(whole[:, width:], decode(encode(x[:, width:], fmt, pad="zero", **base)))


VIEWS = {
    "transposed": lambda x: x.T,
    "strided": lambda x: x[::2, ::3],
    "expanded": lambda x: x[:1].expand(5, -1),
    "expanded_scalar": lambda x: x[0, 0].expand(3, 32),
    "permuted": lambda x: x.reshape(4, 8, 96).permute(2, 0, 1),
    "offset": lambda x: x.reshape(-1)[5:69],
}


@pytest.mark.cross("view", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.cross("fmt", few(ALL_FORMATS, 16))
def test_a_view_encodes_as_its_copy(fmt, view):
    x = view(gaussian(32, 96))
    copied = x.clone(memory_format=torch.contiguous_format)
    assert encode(x, fmt, pad="zero").to_bytes() == encode(copied, fmt, pad="zero").to_bytes()


@pytest.mark.cross(("fmt", "rule"), few(FORMATS_AND_RULES, 24))
@pytest.mark.cross(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float8_e5m2],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
def test_a_narrow_float_encodes_as_the_same_number_in_float32(fmt, rule, dtype):
    x = gaussian(3, 128).to(dtype)
    assert encode(x, fmt, scale_rule=rule).to_bytes() == encode(x.float(), fmt, scale_rule=rule).to_bytes()


@pytest.mark.parametrize(("fmt", "rule"), few(FORMATS_AND_RULES, 12))
def test_doubles_encode_close_to_their_float32(fmt, rule):
    x = gaussian(3, 128)
    wide, narrow = (decode(encode(y, fmt, scale_rule=rule), torch.float64) for y in (x.double(), x))
    assert torch.allclose(wide, narrow, rtol=1e-5, atol=0)


@pytest.mark.parametrize("fmt", few(ALL_FORMATS, 12))
def test_gradients_stay_outside(fmt):
    x = gaussian(2, 128).requires_grad_()
    encoded = encode(x, fmt)
    assert not any(part.requires_grad for part in encoded.parts.values())
    assert not decode(encoded).requires_grad


@pytest.mark.cross("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.cross("fmt", few(SCALED_FORMATS, 14))
def test_decode_rounds_once_to_the_type_asked_for(fmt, dtype):
    encoded = encode(gaussian(2, 128), fmt)
    assert same(decode(encoded, dtype), decode(encoded, fmt.work).to(dtype))


# ---- wide types ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "relative"),
    [("float64", 0.0), ("int64", 2.0**-52), ("uint64", 2.0**-51), ("int32", 2.0**-31), ("uint32", 2.0**-32)],
)
def test_double_precision_survives_in_wide_formats(name, relative):
    x = gaussian(1000, dtype=torch.float64)
    error = (decode(encode(x, name), torch.float64) - x).abs().max()
    assert float(error) <= relative * 2 * float(x.abs().max())
    if name != "float64":
        assert float(error) < float((x.float().double() - x).abs().max())


@pytest.mark.parametrize("name", ["int64", "uint64", "int32", "uint32"])
@pytest.mark.parametrize("magnitude", [1e-250, 1e-30, 1e-20, 1e20, 1e250])
def test_wide_formats_hold_any_magnitude_of_double(name, magnitude):
    x = torch.tensor([1.0, -0.3, 0.0, 0.7], dtype=torch.float64) * magnitude
    assert torch.allclose(decode(encode(x, name), torch.float64), x, rtol=1e-8, atol=0)


@pytest.mark.parametrize(
    ("name", "scale", "x", "codes"),
    [
        ("int64", 1.0, [1e30, -1e30, 2.0**62], [2**63 - 1, -(2**63), 2**62]),
        ("int32", 1.0, [1e30, -1e30, 2.0**30 + 1], [2**31 - 1, -(2**31), 2**30 + 1]),
        ("int16", 1.0, [1e30, -1e30, 300.0], [32767, -32768, 300]),
        ("int8", 1.0, [1e30, -1e30, 128.0], [127, -128, 127]),
    ],
)
def test_an_explicit_scale_saturates_and_never_wraps(name, scale, x, codes):
    assert encode(torch.tensor(x, dtype=torch.float64), name, scale=scale).data.tolist() == codes


def test_int16_uses_all_its_levels():
    x = gaussian(10_000)
    assert int(encode(x, "int16").data.unique().numel()) > 5000


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("name", ["int8", "float32"])
def test_only_floats_are_encoded(name, dtype):
    with pytest.raises(FormatError, match=r"blk: expected a float tensor, got torch\.\w+; cast it first"):
        encode(torch.zeros(3, dtype=dtype), name, name="blk")


@pytest.mark.parametrize("name", ["int8", "float32"])
def test_packed_float4_is_refused_in_words(name):
    with pytest.raises(FormatError, match=r"expected a float tensor, got torch\.float4_e2m1fn_x2"):
        encode(torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), name)


@pytest.mark.parametrize("fmt", BLOCKED, ids=lambda fmt: fmt.name)
def test_an_indivisible_row_is_refused_and_the_padding_named(fmt):
    width = fmt.block.cols
    with pytest.raises(FormatError) as refusal:
        encode(torch.ones(2, width + 1), fmt, name="blk.3.ffn")
    message = str(refusal.value)
    assert message.startswith(f"blk.3.ffn: {fmt.name} has blocks of {width} along the last axis")
    assert f"quantize_file can fill it to {2 * width} (pad='zero')" in message
    assert encode(torch.ones(2, width + 1), fmt, pad="zero").shape == (2, width + 1)


def test_an_unknown_padding_is_refused():
    with pytest.raises(FormatError, match="the only padding is pad='zero', got 'edge'"):
        encode(torch.ones(3), "mxfp4", pad="edge")


@pytest.mark.parametrize("fmt", few(SCALED_FORMATS, 12))
def test_nan_and_infinity_are_counted_and_named(fmt):
    x = torch.ones(2, 128)
    x[0, :3], x[1, 5:7], x[1, 9] = NAN, INF, -INF
    with pytest.raises(NonFiniteError, match=r"lm_head: 3 NaN and 3 infinite of 256 numbers.*nonfinite='replace'"):
        encode(x, fmt, name="lm_head")
    assert issubclass(NonFiniteError, BitplanError)


@pytest.mark.cross("fmt", few(SCALED_FORMATS, 14))
@pytest.mark.cross("dtype", [torch.float32, torch.float16, torch.float64])
def test_replace_means_zero_and_the_largest_finite_magnitude(fmt, dtype):
    x = gaussian(2, 128).to(dtype)
    mended = x.clone()
    x[0, 0], x[0, 1], x[1, 2] = NAN, INF, -INF
    mended[0, 0] = mended[0, 1] = mended[1, 2] = 0.0
    largest = mended.abs().max()
    mended[0, 1], mended[1, 2] = largest, -largest
    assert encode(x, fmt, nonfinite="replace").to_bytes() == encode(mended, fmt).to_bytes()


def test_all_nan_replaced_is_all_zero():
    assert decode(encode(torch.full((3,), NAN), "int8", nonfinite="replace")).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", ["int8", "float16"])
def test_an_unknown_way_with_nan_is_refused(name):
    with pytest.raises(FormatError, match="`nonfinite` is 'error' or 'replace', got 'keep'"):
        encode(torch.ones(3), name, nonfinite="keep")


@pytest.mark.parametrize("fmt", few(SCALED_FORMATS, 12))
def test_doubles_beyond_float32_are_refused_where_float32_does_the_work(fmt):
    x = torch.ones(128, dtype=torch.float64)
    x[3] = -1e300
    if fmt.work == torch.float64:
        assert math.isclose(float(decode(encode(x, fmt), torch.float64)[3]), -1e300, rel_tol=1e-6)
        return
    with pytest.raises(FormatError, match=r"blk: 1 of 128 numbers lie beyond 3\.4e\+38"):
        encode(x, fmt, name="blk")


@pytest.mark.parametrize("name", STOP_AT_65504[:2])
def test_numbers_too_large_for_a_float16_scale_are_refused(name):
    x = torch.ones(4, 32)
    x[2, 7] = 1e30
    with pytest.raises(FormatError, match=f"blk: 1 of 4 scales of {name} overflow torch.float16"):
        encode(x, name, name="blk")


# GGUF fixes the bytes of these, and they decode to infinity there too; the others refuse a range that has no float32.
REFUSE_FLT_MAX = {"q4_0_gguf", "q8_0_gguf", "mxfp4_gguf"}


@pytest.mark.parametrize("fmt", few([fmt for fmt in WITH_CODES if not fmt.is_cast], 14), ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_float32_decodes_to_a_finite_number_or_is_refused(fmt, sign):
    x = torch.zeros(2, 128)
    x[0, :2] = torch.tensor([sign * FLT_MAX, LARGEST_SUBNORMAL])
    if fmt.name not in REFUSE_FLT_MAX:
        decoded = decode(encode(x, fmt))
        assert bool(decoded.isfinite().all())
        assert abs(float(decoded[0, 0])) >= FLT_MAX / 2 or fmt.default_rule == "absmean"
    x[0, 2] = -sign * FLT_MAX
    if fmt.name in REFUSE_FLT_MAX or (fmt.zero_point and fmt.work == torch.float32):
        with pytest.raises(FormatError, match=f"w: .* of {fmt.name} overflow"):
            encode(x, fmt, name="w")
    else:
        assert bool(decode(encode(x, fmt)).isfinite().all())


def test_a_given_scale_that_rounds_a_number_to_infinity_is_refused():
    with pytest.raises(FormatError, match=r"w: 1 of 2 numbers of int8 overflow torch\.float32"):
        encode(torch.tensor([FLT_MAX, 1.0]), "int8", scale=FLT_MAX / 2.6, name="w")


def test_a_range_wider_than_float32_is_refused():
    with pytest.raises(FormatError, match="overflow"):
        encode(torch.tensor([-3e38, 3e38]), "uint8")


# ---- zeros and the very small ----------------------------------------------------------------------------------------


@pytest.mark.cross("fmt", few(ALL_FORMATS, 16))
@pytest.mark.cross("zero", [0.0, -0.0])
def test_zeros_stay_zero(fmt, zero):
    assert bool((decode(encode(torch.full((2, 128), zero), fmt)) == 0).all())


@pytest.mark.parametrize("fmt", few([fmt for fmt in WITH_CODES if fmt.name != "binary"], 12), ids=lambda fmt: fmt.name)
def test_a_zero_row_beside_others_stays_zero(fmt):
    x = gaussian(3, 256)
    x[1] = 0.0
    assert bool((decode(encode(x, fmt))[1] == 0).all())


@pytest.mark.parametrize(
    ("fmt", "magnitude"),
    [
        pytest.param(
            fmt, magnitude, id=f"{fmt.name}-{magnitude}", marks=[] if place % 3 == turn % 3 else [pytest.mark.long]
        )
        for turn, fmt in enumerate(WITH_CODES)
        for place, magnitude in enumerate((1e-45, 1e-40, 1e-38, 1e30, 3e38, 1e-30))
        if magnitude < 1 or fmt.name not in STOP_AT_65504
    ],
)
def test_extreme_magnitudes_give_finite_numbers_near_them(fmt, magnitude):
    x = gaussian(2, 128).sign() * magnitude
    x[:, ::2] /= 2
    if fmt.zero_point:
        x = x.abs()
    decoded = decode(encode(x, fmt), torch.float64)
    assert bool(decoded.isfinite().all())
    assert bool((decoded.abs() <= x.abs().max().double() * 1.25).all())
    assert bool((decoded * x >= 0).all()) or fmt.name == "binary"


@pytest.mark.cross("fmt", few(ALL_FORMATS, 16))
@pytest.mark.cross("shape", [shape for shape in SHAPES if math.prod(shape) == 0], ids=str)
def test_an_empty_tensor_has_defined_parts(fmt, shape):
    """Two encodings of nothing are the same bytes: no part is left uninitialised."""
    first, second = (encode(torch.empty(shape), fmt, pad="zero").to_bytes() for _ in range(2))
    assert first == second
    assert not any(first) or fmt.scales.needs_base
