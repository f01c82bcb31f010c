"""The definition of scaled FP8 operands: rules stated one by one, against values worked out by hand or by ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from bitplan.base.errors import FormatError
from bitplan.fp8.casts import (
    FP8_DTYPES,
    FP8_LIMITS,
    SCALINGS,
    cast_reference,
    decode_scaled,
    padded_tokens,
    round_to_fp8,
    scale_of_amax,
    scaling_of,
)

SHAPES = {"tensor": (), "row": (256, 1), "1x128": (256, 3), "128x128": (2, 3), "1x32": (256, 12)}


def sample(seed: int = 0) -> torch.Tensor:
    return torch.randn(256, 384, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(("fp8", "bound"), [("e4m3", 0.031), ("e5m2", 0.061)])
def test_a_cast_is_near_what_was_cast(scaling, fp8, bound) -> None:
    x = sample()
    cast = cast_reference(x, scaling, fp8)
    assert cast.codes.is_contiguous()
    assert cast.codes.dtype == FP8_DTYPES[fp8]
    assert tuple(cast.scale.shape) == SHAPES[scaling]
    error = (decode_scaled(cast) - x).norm() / x.norm()
    assert 0.4 * bound < error < bound


@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
def test_rounding_is_that_of_another_implementation(fp8) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(FP8_DTYPES[fp8]).float()
    codes = codes[codes.isfinite()].sort().values
    middles = (codes[1:] + codes[:-1]) / 2  # the ties
    near = torch.cat([codes, middles, middles.nextafter(torch.tensor(1e9)), middles.nextafter(torch.tensor(-1e9))])
    other = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[fp8]
    expected = torch.from_numpy(near.numpy().astype(other).view(np.uint8))
    assert torch.equal(round_to_fp8(near, fp8).view(torch.uint8), expected)


@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
def test_beyond_the_limit_saturates_and_nan_is_one_code(fp8) -> None:
    limit = FP8_LIMITS[fp8]
    odd = torch.tensor([1e9, -1e9, torch.inf, torch.nan, -torch.nan, -0.0])
    result = round_to_fp8(odd, fp8)
    assert result.float()[:3].tolist() == [limit, -limit, limit]
    assert result.view(torch.uint8)[3:].tolist() == [0x7F, 0x7F, 0x80]


def test_the_largest_number_takes_the_largest_code() -> None:
    x = sample()
    for scaling in ("row", "1x128", "128x128"):
        cast = cast_reference(x, scaling)
        assert cast.codes.float().abs().max() == 448.0
    assert torch.equal(cast_reference(x, "row").scale, x.abs().amax(1, keepdim=True) / torch.tensor(448.0))


@pytest.mark.parametrize("largest", [448.0, 447.0, 225.0, 224.0, 1e-30, 2.0**127])
def test_the_scale_of_a_tensor_is_the_next_power_of_two(largest) -> None:
    x = sample() / sample().abs().max() * largest
    cast = cast_reference(x, "tensor")
    mantissa, exponent = torch.frexp(cast.scale)
    assert mantissa == 0.5
    assert cast.scale / 2 < x.abs().max() / 448 <= cast.scale, exponent
    assert 224.0 <= cast.codes.float().abs().max() <= 448.0


def test_power_of_two_scales_are_the_next_power_up() -> None:
    x = torch.zeros(4, 32)
    x[:, 0] = torch.tensor([448.0, 449.0, 224.0, 225.0])
    cast = cast_reference(x, "1x32")
    assert cast.scale.flatten().tolist() == [127, 128, 126, 127]
    assert cast.codes.float()[:, 0].tolist() == [448.0, 224.0, 448.0, 224.0]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_zeros_stay_zeros(scaling) -> None:
    cast = cast_reference(torch.zeros(128, 128), scaling)
    assert not decode_scaled(cast).any()
    assert cast.scale.float().isfinite().all()


def test_epsilon_is_the_least_amax() -> None:
    x = torch.full((1, 128), 1e-6)
    assert cast_reference(x, "row", eps=1e-3).scale == torch.tensor(1e-3) / 448
    assert cast_reference(x, "row", eps=1e-12).scale == x.amax() / 448
    assert cast_reference(x, "tensor", eps=1e-3).scale == 2.0**-18


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_makes_its_group_nan(scaling, bad) -> None:
    x = torch.ones(256, 256)
    x[130, 5] = bad
    result = decode_scaled(cast_reference(x, scaling))
    groups = {
        "tensor": torch.ones(256, 256, dtype=torch.bool),
        "row": torch.zeros(256, 256, dtype=torch.bool).index_fill_(0, torch.tensor([130]), True),
    }
    expected = groups.get(scaling, torch.zeros(256, 256, dtype=torch.bool))
    if scaling == "1x128":
        expected[130, :128] = True
    elif scaling == "128x128":
        expected[128:, :128] = True
    elif scaling == "1x32":
        expected[130, :32] = True
    assert torch.equal(result.isnan(), expected)
    assert torch.equal(result[~expected], x[~expected])


def test_subnormal_amax_does_not_overflow() -> None:
    x = torch.full((1, 128), 1e-44)
    for scaling in ("tensor", "row", "1x128", "1x32"):
        cast = cast_reference(x, scaling)
        assert decode_scaled(cast).isfinite().all()
    assert scale_of_amax(torch.tensor(1e-44)) == 2.0**-126


def test_layouts_are_what_products_take() -> None:
    x = sample()
    assert cast_reference(x, "1x128").scale.stride() == (1, 256)
    assert cast_reference(x, "128x128").scale.stride() == (4, 1)


def test_tokens_are_padded_as_the_recipe_needs() -> None:
    assert [padded_tokens(name, 17) for name in ("tensorwise", "rowwise", "blockwise", "mxfp8")] == [32, 32, 128, 32]
    assert padded_tokens("blockwise", 0) == 0


def test_what_cannot_be_cast_is_refused() -> None:
    with pytest.raises(FormatError, match="whole blocks of 1x128"):
        cast_reference(torch.zeros(4, 100), "1x128")
    with pytest.raises(FormatError, match="whole blocks of 128x128"):
        cast_reference(torch.zeros(100, 128), "128x128")
    with pytest.raises(FormatError, match="a matrix of bfloat16"):
        cast_reference(torch.zeros(4, 128, dtype=torch.int32), "tensor")
    with pytest.raises(FormatError, match="did you mean 'tensorwise'"):
        scaling_of("tensor_wise")
