"""Unsigned formats: a zero point makes signed numbers survive, and zero stays exactly zero."""

from __future__ import annotations

import pytest
import torch

from bitplan.formats import get_format
from bitplan.formats.codec import decode, encode

from .samples import gaussian

UNSIGNED = ["uint64", "uint32", "uint16", "uint8", "uint4", "uint2"]
SAMPLES = {
    "signed": gaussian(1000),
    "skewed": torch.cat([gaussian(999).abs(), torch.tensor([-0.2])]),
    "positive": gaussian(1000).abs() + 0.1,
    "negative": -gaussian(1000).abs() - 0.1,
    "constant": torch.full((5,), 0.7),
    "one_negative": torch.tensor([-3.0]),
}


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES.keys())
@pytest.mark.parametrize("name", UNSIGNED)
def test_the_round_trip_is_within_half_a_step_and_zero_is_exact(name, sample):
    x = torch.cat([sample, torch.tensor([0.0, -0.0])]).double()
    encoded = encode(x, name)
    decoded = decode(encoded, torch.float64)
    step = float(encoded.scales)
    assert step == pytest.approx((float(x.max()) - float(x.min())) / get_format(name).element.limit, rel=1e-6)
    rounding = torch.finfo(get_format(name).work).eps * 4 * float(x.abs().max())
    assert bool(((decoded - x).abs() <= step / 2 + rounding).all())
    assert decoded[-2:].tolist() == [0.0, 0.0]
    assert bool((decoded * x >= 0).all())


@pytest.mark.parametrize("name", UNSIGNED)
@pytest.mark.parametrize(("sign", "zero_share"), [(1, 0), (-1, 1)])
def test_one_sided_numbers_use_all_codes(name, sign, zero_share):
    x = sign * (gaussian(100).abs() + 1)
    encoded = encode(x, name)
    assert encoded.zero_point.tolist() == zero_share * get_format(name).element.limit
    assert float((decode(encoded) - x).abs().max()) <= float(encoded.scales) * 0.5001 + 1e-6


@pytest.mark.parametrize(
    ("name", "zero_point"),
    [
        *[("uint8", 0), ("uint8", 128), ("uint8", 255), ("uint4", 7), ("uint2", 1), ("uint16", 1000)],
        *[("uint32", 2**31), ("uint64", 2**63), ("uint64", 2**64 - 1), ("uint64", 0)],
    ],
)
def test_an_explicit_zero_point_is_kept_and_stands_for_zero(name, zero_point):
    top = get_format(name).element.limit
    x = torch.cat([gaussian(200), torch.zeros(3)])
    if zero_point == 0:
        x = x.abs()
    elif zero_point == top:
        x = -x.abs()
    encoded = encode(x, name, zero_point=zero_point)
    assert encoded.zero_point.tolist() == zero_point
    decoded = decode(encoded)
    assert decoded[-3:].tolist() == [0.0] * 3
    assert float((decoded - x).abs().max()) <= float(encoded.scales) * 0.5001 + 1e-6


@pytest.mark.parametrize(("zero_point", "stored"), [(0, [2.0, 0.0]), (255, [0.0, -1.0])])
def test_numbers_on_a_side_without_codes_become_zero(zero_point, stored):
    decoded = decode(encode(torch.tensor([2.0, -1.0]), "uint8", zero_point=zero_point))
    assert decoded.tolist() == pytest.approx(stored)


def test_zero_points_by_hand():
    encoded = encode(torch.tensor([-1.0, 0.0, 2.0]), "uint4")  # a step of 3 / 15 = 0.2, zero at code 5
    assert float(encoded.scales) == pytest.approx(0.2)
    assert int(encoded.zero_point) == 5
    assert encoded.codes().tolist() == [[0, 5, 15]]
    assert encoded.data.tolist() == [0x05, 0xF0]
    assert decode(encoded).tolist() == pytest.approx([-1.0, 0.0, 2.0])


@pytest.mark.parametrize("name", UNSIGNED)
def test_an_explicit_scale_leaves_the_zero_point_to_the_range(name):
    x = torch.tensor([-1.0, 0.0, 2.0])
    encoded = encode(x, name, scale=1.0)
    assert (float(encoded.scales), encoded.zero_point.tolist()) == (1.0, 1)
    assert decode(encoded).tolist() == [-1.0, 0.0, 2.0]


@pytest.mark.parametrize("zero_point", [1, 2])
def test_ties_go_to_even_multiples_of_the_step_wherever_zero_lies(zero_point):
    decoded = decode(encode(torch.tensor([0.5, 1.5, 2.5, -0.5]), "uint8", scale=1.0, zero_point=zero_point))
    assert decoded.tolist() == [0.0, 2.0, 2.0, 0.0]


@pytest.mark.parametrize("rule", ["absmax", "absmean", "percentile", "mse"])
@pytest.mark.parametrize("name", ["uint8", "uint4", "uint2"])
def test_zero_survives_every_rule(name, rule):
    x = torch.cat([gaussian(300), torch.zeros(1)])
    assert float(decode(encode(x, name, scale_rule=rule))[-1]) == 0.0


@pytest.mark.parametrize("name", UNSIGNED)
def test_extremes_saturate_and_never_wrap(name):
    top = get_format(name).element.limit
    encoded = encode(torch.tensor([1e30, -1e30, 5.0], dtype=torch.float64), name, scale=1.0, zero_point=1)
    assert encoded.codes().reshape(-1).tolist() == [top, 0, min(6, top)]
