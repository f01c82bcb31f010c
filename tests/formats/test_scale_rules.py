"""Which scale each rule chooses, and that it is the one its description promises."""

from __future__ import annotations

import math

import pytest
import torch

from bitplan.base.errors import FormatError
from bitplan.formats import elements as el
from bitplan.formats import get_format
from bitplan.formats.codec import decode, encode
from tests.crosses import few
from tests.formats.samples import SCALED_FORMATS, gaussian, heavy_tailed, per_block

# A fine grid of the normal density: sums over it are integrals.
NORMAL = torch.linspace(-8, 8, 20001, dtype=torch.float64)
DENSITY = torch.exp(-NORMAL.square() / 2) / torch.exp(-NORMAL.square() / 2).sum()
MEAN = math.sqrt(2 / math.pi)


def gaussian_error(element: el.Element, multiple: float) -> float:
    """Mean squared error of normal numbers that are clipped at `multiple` times their mean magnitude."""
    limit = multiple * MEAN
    if element.name.startswith("uint"):
        step = 2 * limit / element.limit
        middle = round(limit / step)
        values = element.value(element.round((NORMAL / step).round() + middle), torch.float64) - middle
    else:
        step = limit / element.limit
        values = element.value(element.round(NORMAL / step), torch.float64)
    return float((DENSITY * (values * step - NORMAL).square()).sum())


@pytest.mark.parametrize(
    "element",
    [
        *[pytest.param(el.INT8, id="int8"), pytest.param(el.INT4, id="int4"), pytest.param(el.INT2, id="int2")],
        *[pytest.param(el.UINT8, id="uint8"), pytest.param(el.UINT4, id="uint4"), pytest.param(el.UINT2, id="uint2")],
        *[pytest.param(el.INT8_HALF_AWAY, id="int8_half_away"), pytest.param(el.INT4_HALF_AWAY, id="int4_half_away")],
        *[pytest.param(el.INT4_ON_LOW, id="int4_on_low"), pytest.param(el.E2M1, id="e2m1")],
        pytest.param(el.BINARY, id="binary"),
    ],
)
def test_absmean_constant_is_the_optimum_for_normal_numbers(element):
    candidates = [element.gauss * (0.7 + 0.01 * step) for step in range(61)]
    errors = [gaussian_error(element, candidate) for candidate in candidates]
    best = candidates[errors.index(min(errors))]
    assert best == pytest.approx(element.gauss, rel=0.02)
    assert gaussian_error(element, element.gauss) <= 1.003 * min(errors)


def test_ternary_keeps_bitnets_mean_although_wider_is_better():
    assert el.TERNARY.gauss == 1.0
    assert gaussian_error(el.TERNARY, 1.0) > gaussian_error(el.TERNARY, 1.53) == pytest.approx(0.1902, abs=2e-4)


@pytest.mark.parametrize("name", ["int8", "int4", "int2", "ternary", "binary", "fp4", "ternary_absmean"])
def test_absmean_scale_is_that_multiple_of_the_mean(name):
    x = gaussian(40, 50)
    fmt = get_format(name)
    scale = float(encode(x, fmt, scale_rule="absmean").scales)
    assert scale == pytest.approx(fmt.element.gauss * float(x.double().abs().mean()) / fmt.element.limit, rel=1e-6)


@pytest.mark.parametrize("name", ["int8", "int4", "uint4", "int2", "uint2", "fp4"])
def test_absmean_beats_absmax_on_normal_numbers(name):
    x = gaussian(1000, 100)
    errors = {rule: float((decode(encode(x, name, scale_rule=rule)) - x).norm()) for rule in ("absmax", "absmean")}
    assert errors["absmean"] < errors["absmax"]


@pytest.mark.parametrize(
    ("name", "x", "scale"),
    [
        ("int8", [1.27, -0.5], 0.01),
        ("int8", [-2.54, 0.5], 0.02),
        ("int4", [0.7, -0.1], 0.1),
        ("int2", [3.0, -1.0], 3.0),
        ("ternary", [0.25, -4.0], 4.0),
        ("binary", [0.25, -4.0], 4.0),
        ("int16", [32767.0, 1.0], 1.0),
        ("int32", [1.0, -(2.0**31 - 1)], 1.0),
        ("fp4", [12.0, -3.0], 2.0),
        ("fp8_e4m3", [-896.0, 3.0], 2.0),
        ("fp8_e5m2", [28672.0, 3.0], 0.5),
        ("uint8", [255.0, 3.0], 1.0),
        ("uint8", [-55.0, 200.0], 1.0),
        ("uint4", [-15.0, -3.0], 1.0),
    ],
)
def test_absmax_puts_the_largest_magnitude_on_the_largest_code(name, x, scale):
    assert float(encode(torch.tensor(x), name).scales) == pytest.approx(scale, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "largest", "byte"),
    [
        ("mxfp4", 1.0, 125),
        ("mxfp4", 1.99, 125),
        ("mxfp4", 6.0, 127),
        ("mxfp4", 7.99, 127),
        ("mxfp4", 8.0, 128),
        ("mxfp4", 1.0 - 2.0**-24, 124),  # one ulp below a power of two: floor, not a rounded logarithm
        ("mxfp4", 2.0**60 - 2.0**36, 184),
        ("mxfp4", 3e38, 252),
        ("mxfp4", 2.0**-124, 1),
        ("mxfp4", 2.0**-125, 0),
        ("mxfp4", 2.0**-149, 0),
        ("mxfp4", 0.0, 0),
        ("mxfp8_e4m3", 448.0, 127),
        ("mxfp8_e4m3", 1.0, 119),
        ("mxfp8_e4m3", 0.0, 0),
    ],
)
def test_mx_scale_is_the_ocp_floor(name, largest, byte):
    x = torch.zeros(32)
    x[17] = -largest
    assert encode(x, name).scales.tolist() == [byte]


def test_nvfp4_base_puts_the_largest_block_on_448():
    x = gaussian(4, 64)
    encoded = encode(x, "nvfp4")
    assert float(encoded.base) == pytest.approx(float(x.abs().max()) / 2688, rel=1e-6)
    assert float(encoded.scales.float().max()) == 448.0


def test_linear_scales_put_the_largest_block_on_255_and_keep_small_blocks_alive():
    x = gaussian(3, 256)
    x[1] *= 1e-6
    encoded = encode(x, "fp4_u8_g128")
    assert int(encoded.scales.max()) == 255
    assert float(encoded.base) == pytest.approx(float(x.abs().max()) / 6 / 255, rel=1e-6)
    assert encoded.scales[1].tolist() == [1, 1]


@pytest.mark.parametrize("name", ["nvfp4", "fp4_u8_g128"])
def test_an_explicit_base_is_kept(name):
    encoded = encode(gaussian(2, 128), name, base=0.015625)
    assert float(encoded.base) == 0.015625
    assert float((decode(encoded) - gaussian(2, 128)).abs().max()) < 0.5


@pytest.mark.parametrize(
    ("percentile", "count", "clipped"),
    [(100, 1000, 0), (99.9, 1000, 1), (99, 1000, 10), (95, 1000, 50), (50, 1000, 500), (99.9, 100, 0), (99, 250, 2)],
)
def test_percentile_clips_the_share_asked_for(percentile, count, clipped):
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    x = (order + 1).float() * torch.where(order % 2 == 0, 1.0, -1.0)
    limit = float(encode(x, "int8", scale_rule="percentile", percentile=percentile).scales) * 127
    assert int((x.abs() > limit * (1 + 1e-6)).sum()) == clipped
    rows = encode(torch.stack([x, 10 * x]), "int8_row", scale_rule="percentile", percentile=percentile).scales * 127
    assert rows[:, 0].tolist() == pytest.approx([limit, 10 * limit], rel=1e-6)


def test_percentile_of_a_zero_point_format_clips_both_ends():
    x = torch.cat([torch.linspace(-1, 3, 998), torch.tensor([-50.0, 100.0])])
    encoded = encode(x, "uint8", scale_rule="percentile", percentile=99.8)
    assert float(encoded.scales) == pytest.approx((3 + 3) / 255, rel=1e-6)  # -50 is clipped at -3, 100 at 3


@pytest.mark.cross("fmt", few(SCALED_FORMATS, 8))
@pytest.mark.cross("sample", [gaussian, heavy_tailed])
def test_mse_is_never_worse_than_absmax_in_any_block(fmt, sample):
    x = sample(128, 128, seed=3)
    plain, searched = (
        per_block(fmt, decode(encode(x, fmt, scale_rule=rule)).double() - x).square().sum(dim=1)
        for rule in ("absmax", "mse")
    )
    assert bool((searched <= plain * (1 + 1e-5)).all())
    if fmt.element.bits <= 4:
        assert float(searched.sum()) < float(plain.sum())


def test_mse_keeps_the_absmax_scale_where_another_is_no_better():
    """Ones are exact under several powers of two."""
    assert torch.equal(encode(torch.ones(32), "mxfp4", scale_rule="mse").scales, encode(torch.ones(32), "mxfp4").scales)


@pytest.mark.parametrize("zero_point", [0, 3, 8, 15])
def test_mse_is_never_worse_than_absmax_around_a_fixed_zero_point(zero_point):
    x = heavy_tailed(500)
    plain, searched = (
        float((decode(encode(x, "uint4", scale_rule=rule, zero_point=zero_point)) - x).norm())
        for rule in ("absmax", "mse")
    )
    assert searched < plain


@pytest.mark.parametrize("fmt", few(SCALED_FORMATS, 5))
def test_importance_lowers_the_weighted_error(fmt):
    x = gaussian(128, 128, seed=5)
    x[:, ::2] *= 5
    weight = torch.arange(128) % 2  # the large columns do not matter

    def weighted(**options: torch.Tensor) -> torch.Tensor:
        decoded = decode(encode(x, fmt, scale_rule="mse", **options)).double()
        return per_block(fmt, (decoded - x).square() * weight).sum(dim=1)

    plain, guided = weighted(), weighted(importance=weight)
    assert bool((guided <= plain * (1 + 1e-5)).all())
    if fmt.element.bits <= 4:
        assert float(guided.sum()) < float(plain.sum())


def test_importance_of_a_convolution_is_per_column_of_its_matrix():
    x = gaussian(4, 8, 2, 2)
    per_column = torch.linspace(0, 1, 32)
    whole = encode(x.reshape(4, 32), "int4_g32", scale_rule="mse", importance=per_column)
    assert torch.equal(encode(x, "int4_g32", scale_rule="mse", importance=per_column).scales, whole.scales)


@pytest.mark.parametrize(
    ("name", "shape", "count", "options", "complaint"),
    [
        ("int4_g32", (4, 5, 64), 320, {}, "one weight per column (64), got 320"),
        ("int4", (4, 5, 64), 63, {}, "one weight per column (64 or 320), got 63"),
        ("int8_row", (4, 64), 4, {}, "one weight per column (64), got 4"),
        ("int8", (4, 64), 64, {"scale_rule": "absmax"}, "got 'absmax'"),
    ],
)
def test_importance_that_does_not_fit_is_refused(name, shape, count, options, complaint):
    with pytest.raises(FormatError) as refusal:
        encode(torch.ones(shape), name, importance=torch.ones(count), **{"scale_rule": "mse", **options})
    assert complaint in str(refusal.value)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_importance_must_be_a_weight(weight):
    with pytest.raises(FormatError, match="finite and not below zero"):
        encode(torch.ones(4), "int4", scale_rule="mse", importance=torch.tensor([1.0, 1.0, 1.0, weight]))


@pytest.mark.parametrize("fmt", few(SCALED_FORMATS, 12))
def test_an_explicit_scale_is_used_as_given(fmt):
    x = gaussian(128, 256)
    base = {"base": 0.0625} if fmt.scales.needs_base else {}
    encoded = encode(x, fmt, scale=0.25, **base)
    assert bool((fmt.scales.load(encoded.scales, encoded.base) == 0.25).all())


@pytest.mark.parametrize("name", ["int8_row", "int4_g32", "mxfp4", "q4_0_poly", "q4_0_gguf", "fp8_e4m3_b128"])
def test_a_scale_per_block_is_used_as_given(name):
    x = gaussian(256, 256)
    fmt = get_format(name)
    grid = fmt.grid((256, 256))
    scale = 2.0 ** (torch.arange(grid[0] * grid[1]) % 7 - 3).float()
    encoded = encode(x, fmt, scale=scale.reshape(grid))
    assert torch.equal(fmt.scales.load(encoded.scales, None).reshape(-1).float(), scale)


@pytest.mark.parametrize(
    ("name", "scale", "complaint"),
    [
        ("int8", 0.0, "finite and above zero"),
        ("int8", -1.0, "finite and above zero"),
        ("int8", float("nan"), "finite and above zero"),
        ("int8_row", torch.ones(3), "one per block (2), got 3"),
        ("mxfp4", 3.0, "power of two"),
        ("mxfp4_gguf", torch.tensor([1.0, 2.0, 4.0, 5.0]), "power of two"),
        ("q4_0_gguf", 1e6, "4 of 4 scales of q4_0_gguf overflow torch.float16"),
    ],
)
def test_a_scale_that_cannot_be_is_refused(name, scale, complaint):
    with pytest.raises(FormatError) as refusal:
        encode(torch.ones(2, 64), name, scale=scale)
    assert complaint in str(refusal.value)


def test_a_scale_of_any_one_element_shape_will_do():
    for scale in (0.5, torch.tensor(0.5), torch.full((1, 1, 1), 0.5, requires_grad=True)):
        encoded = encode(torch.ones(3), "int8", scale=scale)
        assert encoded.scales.tolist() == 0.5
        assert not encoded.scales.requires_grad


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("int8", {"scale_rule": "maxabs"}, "no scale rule 'maxabs'; use one of absmax, absmean, percentile, mse"),
        ("fp8_e4m3", {"scale_rule": "absmean"}, "no best multiple of mean |x|; use one of absmax, percentile, mse"),
        ("int16", {"scale_rule": "absmean"}, "no best multiple"),
        ("bfloat16", {"scale_rule": "maxabs"}, "no scale rule 'maxabs'"),
        ("int8", {"scale_rule": "percentile", "percentile": 0}, "`percentile` lies above 0 and up to 100, got 0"),
        ("int8", {"scale_rule": "percentile", "percentile": 101}, "got 101"),
        ("int8", {"zero_point": 3}, "int8 is signed and has no zero point"),
        ("uint4", {"zero_point": 16}, "lies in 0..15, got 16"),
        ("uint4", {"zero_point": -1}, "lies in 0..15, got -1"),
        ("int8", {"base": 1.0}, "the scales of int8 have no base factor"),
        ("nvfp4", {"base": 0.0}, "finite and above zero"),
        ("float16", {"scale": 2.0, "zero_point": 0}, "float16 is a plain cast and takes no `scale` and `zero_point`"),
    ],
)
def test_an_option_that_the_format_would_ignore_is_refused(name, options, complaint):
    with pytest.raises(FormatError) as refusal:
        encode(torch.ones(32), name, name="blk.0.w", **options)
    assert complaint in str(refusal.value)
    assert str(refusal.value).startswith("blk.0.w: ")


def test_a_plain_cast_accepts_a_rule_that_a_whole_model_is_given():
    assert torch.equal(decode(encode(torch.ones(3), "bfloat16", scale_rule="mse")), torch.ones(3))
