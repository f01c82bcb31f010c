"""error_report: figures by hand, and counts of what saturated and what became zero."""

from __future__ import annotations

import json
import math

import pytest
import torch

from bitplan.base.errors import FormatError
from bitplan.formats import error_report
from bitplan.formats import quantization_error as report
from bitplan.formats.codec import decode, encode
from bitplan.formats.quantization_error import Similarity, similarity
from tests.crosses import few

from .samples import ALL_FORMATS, SCALED_FORMATS, gaussian

INF, NAN = float("inf"), float("nan")


def test_a_case_by_hand():
    """[3, 4] in int8 with a scale of 2.5 is [1, 2] * 2.5 = [2.5, 5]: the difference is [0.5, -1]."""
    x = torch.tensor([3.0, 4.0])
    result = error_report(x, encode(x, "int8", scale=2.5))
    assert result.fmt == "int8"
    assert result.count == 2
    assert result.cosine == pytest.approx((3 * 2.5 + 4 * 5) / (5 * math.hypot(2.5, 5)))
    assert result.sqnr_db == pytest.approx(10 * math.log10(25 / 1.25))
    assert result.relative_error == pytest.approx(math.sqrt(1.25 / 25))
    assert result.max_error == 1.0
    assert (result.saturated, result.underflowed) == (0, 0)
    assert result.bytes_per_weight == (2 + 4) / 2


@pytest.mark.parametrize(
    ("name", "options", "x", "saturated"),
    [
        ("int8", {"scale": 1.0}, [127.0, 127.4, 127.6, 500.0, -128.4, -128.6, -500.0, 0.0], 4),
        ("int4", {"scale": 0.5}, [3.5, 3.7, 3.8, -4.2, -4.3], 2),
        ("uint4", {"scale": 1.0, "zero_point": 5}, [10.0, 10.4, 10.6, -5.4, -5.6, -99.0], 3),
        ("fp8_e4m3", {"scale": 1.0}, [448.0, 460.0, 465.0, -465.0, 1e9], 3),
        ("fp4", {"scale": 2.0}, [12.0, 13.9, 14.1, -15.0], 2),
        ("ternary", {"scale": 1.0}, [1.0, 1.4, 1.6, -7.0], 2),
        ("binary", {"scale": 1.0}, [1.0, 100.0, -100.0], 0),
        ("int64", {"scale": 1.0}, [1e18, 1e19, -1e19], 2),
        ("uint64", {"scale": 1.0, "zero_point": 0}, [1e19, 1e20, -1.0], 2),
        ("float16", {}, [65504.0, 1e6, -1e6, 1.0], 2),
        ("bfloat16", {}, [65504.0, 1e6, -1e6, 1.0], 0),
    ],
)
def test_saturated_numbers_are_counted(name, options, x, saturated):
    numbers = torch.tensor(x)
    assert error_report(numbers, encode(numbers, name, **options)).saturated == saturated


def test_saturated_numbers_of_blocks_are_counted_against_their_own_scale():
    x = torch.ones(3, 64)
    x[1, 40:50] = 7.9  # under the OCP floor rule its scale is 1: beyond 7 saturates
    x[2, 0] = -100.0
    result = error_report(x, encode(x, "mxfp4"))
    assert result.saturated == 10


def test_clipping_rules_saturate_and_absmax_does_not():
    x = gaussian(128, 128)
    for name in ("int8", "int4", "int8_row", "int4_g32", "fp8_e4m3_b128", "q8_0_gguf"):
        assert error_report(x, encode(x, name)).saturated == 0
        clipped = error_report(x, encode(x, name, scale_rule="percentile", percentile=80))
        assert 0.1 < clipped.saturated / x.numel() <= 0.2


@pytest.mark.parametrize(
    ("name", "x", "underflowed"),
    [
        ("int8", [127.0, 0.4, -0.4, 0.6, 0.0], 2),
        ("fp4", [6.0, 0.2, -0.2, 0.3], 2),
        ("float16", [1e-9, 1.0, -1e-9, 0.0], 2),
        ("ternary", [1.0, 0.4, -0.4], 2),
        ("uint8", [255.0, 0.4, 1.0], 1),
        ("float32", [1e-45, 1.0], 0),
    ],
)
def test_numbers_that_became_zero_are_counted(name, x, underflowed):
    numbers = torch.tensor(x)
    assert error_report(numbers, encode(numbers, name)).underflowed == underflowed


@pytest.mark.parametrize("name", ["float32", "float64", "int8"])
def test_an_exact_tensor_has_infinite_sqnr_and_null_in_json(name):
    x = torch.tensor([127.0, -64.0, 1.0])
    result = error_report(x, encode(x, name))
    assert (result.cosine, result.sqnr_db, result.relative_error, result.max_error) == (1.0, INF, 0.0, 0.0)
    written = result.to_dict()
    assert written["sqnr_db"] is None
    assert written["cosine"] == 1.0
    assert json.loads(json.dumps(written, allow_nan=False)) == written


@pytest.mark.cross("fmt", few(ALL_FORMATS, 16))
@pytest.mark.cross("shape", [(), (0,), (3, 0), (7,), (2, 3, 3, 3), (131, 130)], ids=str)
def test_every_format_and_shape_has_a_report(fmt, shape):
    x = gaussian(*shape)
    encoded = encode(x, fmt, pad="zero")
    result = error_report(x, encoded)
    assert result.count == x.numel()
    assert result.bytes_per_weight == (encoded.nbytes / x.numel() if x.numel() else 0.0)
    difference = decode(encoded).double() - x.double()
    assert result.max_error == (float(difference.abs().max()) if x.numel() else 0.0)
    assert -1.0 <= result.cosine <= 1.0
    json.dumps(result.to_dict(), allow_nan=False)


@pytest.mark.parametrize("fmt", few(SCALED_FORMATS, 12))
def test_zeros_are_exact(fmt):
    x = torch.zeros(2, 128)
    result = error_report(x, encode(x, fmt))
    assert (result.cosine, result.relative_error, result.saturated, result.underflowed) == (1.0, 0.0, 0, 0)


def test_everything_lost_is_said():
    x = torch.full((4,), 0.1)
    result = error_report(x, encode(x, "int8", scale=1.0))
    assert (result.cosine, result.relative_error, result.sqnr_db, result.underflowed) == (0.0, 1.0, 0.0, 4)


@pytest.mark.parametrize("place", [0, -1])
def test_a_nan_spoils_the_figures_instead_of_hiding(place, monkeypatch):
    monkeypatch.setattr(report, "PIECE", 4)  # in the first piece and in the last
    x = gaussian(10)
    x[place] = NAN
    result = error_report(x, encode(x, "float16"))
    assert math.isnan(result.cosine)
    assert math.isnan(result.max_error)
    assert math.isnan(result.sqnr_db)
    assert result.to_dict()["cosine"] is None


def test_a_cast_that_overflows_has_a_report():
    x = torch.tensor([1.0, 1e6])
    result = error_report(x, encode(x, "float16"))
    assert (result.max_error, result.relative_error, result.sqnr_db, result.saturated) == (INF, INF, -INF, 1)
    json.dumps(result.to_dict(), allow_nan=False)


def test_double_precision_is_seen():
    x = torch.tensor([1.0, 1.0 + 2.0**-40], dtype=torch.float64)
    assert error_report(x, encode(x, "float32")).max_error == 2.0**-40
    assert error_report(x, encode(x, "float64")).max_error == 0.0


def test_8_bit_floats_are_compared_too():
    x = gaussian(64).to(torch.float8_e4m3fn)
    assert error_report(x, encode(x, "fp8_e4m3", scale=1.0)).sqnr_db == INF


def test_another_shape_is_refused():
    with pytest.raises(FormatError, match=r"the tensor is \(3,\), its encoding \(4,\)"):
        error_report(torch.ones(3), encode(torch.ones(4), "int8"))


def test_pieces_add_up(monkeypatch):
    a, b = gaussian(1000), gaussian(1000, seed=1)
    whole = similarity(a, b)
    monkeypatch.setattr(report, "PIECE", 7)
    for name, value in vars(similarity(a, b)).items():
        assert value == pytest.approx(getattr(whole, name))
    halves = similarity(a[:300], b[:300]) + similarity(a[300:], b[300:])
    assert halves.cosine == pytest.approx(whole.cosine)
    assert halves.max_error == whole.max_error
    assert Similarity() + whole == whole


def test_nothing_compared_with_nothing_is_the_same():
    assert (similarity(torch.empty(0), torch.empty(0)).cosine, Similarity().sqnr_db) == (1.0, INF)


def test_opposite_numbers():
    result = similarity(torch.tensor([1.0, -2.0]), torch.tensor([-1.0, 2.0]))
    assert result.cosine == pytest.approx(-1.0)
    assert result.relative_error == 2.0


@pytest.mark.parametrize("fmt", few(ALL_FORMATS, 6))
def test_a_sample_of_an_encoding_decodes_as_the_whole_does(fmt):
    x = gaussian(256, 128)
    encoded = encode(x, fmt)
    some, sample = report.sample(x, encoded, most=4000)
    assert 1000 < some.numel() <= 4000 + 128 or encoded.fmt.block.rows == 128
    pairs = set(zip(x.reshape(-1).tolist(), decode(encoded).reshape(-1).tolist(), strict=True))
    assert pairs >= set(zip(some.reshape(-1).tolist(), decode(sample).reshape(-1).tolist(), strict=True))


@pytest.mark.parametrize("shape", [(1, 2**16), (2**16,), (3, 40), (), (2, 3, 512, 64)])
@pytest.mark.parametrize("name", ["int8_row", "mxfp4", "int4", "fp8_e4m3_b128", "bfloat16"])
def test_a_sample_of_any_shape_is_bounded(name, shape):
    x = torch.ones(shape)
    some, sample = report.sample(x, encode(x, name, pad="zero"), most=1000)
    assert some.numel() <= 1064 or name == "fp8_e4m3_b128"
    assert torch.allclose(decode(sample), some)


def test_a_sample_goes_over_every_column_of_a_matrix_of_powers_of_two():
    x = torch.zeros(256, 256)
    x[:, 32:64] = 1.0  # one column of blocks
    some, _ = report.sample(x, encode(x, "mxfp4"), most=2**13)
    assert float(some.mean()) == pytest.approx(1 / 8, rel=0.1)
