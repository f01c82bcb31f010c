"""The dispatcher: what it picks, why, and that the pick never changes a result."""

from __future__ import annotations

import pytest
import torch

from bitplan import formats
from bitplan.base.errors import FormatError, NonFiniteError
from bitplan.formats import dispatch
from bitplan.formats.dispatch import decode, encode, explain_decode, explain_encode
from bitplan.formats.registry import list_formats
from tests.crosses import few

LARGE = (256, 512)


def numbers(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.cross("fmt", few([fmt.name for fmt in list_formats()], 16))
@pytest.mark.cross("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_pick_never_changes_a_result(fmt, dtype, monkeypatch):
    monkeypatch.setattr(dispatch, "SMALLEST_FOR_CPU", 0)
    x = numbers(24, 512, dtype=dtype)
    ours, definition = encode(x, fmt), formats.encode(x, fmt)
    assert ours.to_bytes() == definition.to_bytes()
    for out in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert torch.equal(decode(ours, out), formats.decode(definition, out))


@pytest.mark.parametrize("fmt", ["int8_row", "mxfp4", "q4_0_gguf", "bfloat16"])
def test_a_large_tensor_gets_its_twin(fmt):
    assert explain_encode(numbers(*LARGE), fmt).implementation == "numba"
    assert "small" not in explain_encode(numbers(*LARGE), fmt).reason


CASES = {
    "small": (numbers(4, 64), "mxfp4", {}, "small: 256 numbers"),
    "rule": (numbers(*LARGE), "mxfp4", {"scale_rule": "mse"}, "scale_rule='mse' has no twin"),
    "scale": (numbers(*LARGE), "int8_row", {"scale": 1.0}, "scale=1.0 has no twin"),
    "scales": (numbers(*LARGE), "int8_row", {"scale": torch.ones(256, 1)}, "scale has no twin"),
    "pad": (numbers(*LARGE), "mxfp4", {"pad": "mirror"}, "pad='mirror' has no twin"),
    "percentile": (numbers(*LARGE), "mxfp4", {"percentile": 200.0}, "percentile=200.0 has no twin"),
    "format": (numbers(*LARGE), "uint8", {}, "uint8 has no numba twin"),
    "dtype": (numbers(*LARGE).double(), "int8_row", {}, "torch.float64 has no twin"),
    "ragged": (numbers(4096, 33), "mxfp4", {"pad": "zero"}, "the last block of a row is not whole"),
    "meta": (numbers(*LARGE).to("meta"), "mxfp4", {}, "no twins for meta"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_has_no_twin_goes_to_the_definition_and_says_why(case):
    x, fmt, options, reason = CASES[case]
    assert explain_encode(x, fmt, **options) == dispatch.Picked("torch", reason)


def test_the_default_rule_by_name_keeps_the_twin():
    assert explain_encode(numbers(*LARGE), "int8_row", scale_rule="absmax", name="w").implementation == "numba"


def test_without_numba_the_definition_runs(monkeypatch):
    monkeypatch.setattr(dispatch, "_is_installed", lambda _: False)
    assert explain_encode(numbers(*LARGE), "int8_row").reason == "numba is not installed"
    assert torch.equal(
        decode(encode(numbers(*LARGE), "int8_row")), formats.decode(formats.encode(numbers(*LARGE), "int8_row"))
    )


def test_views_are_encoded_like_copies():
    x = numbers(512, 1024)
    for view in (x.t(), x[:, ::2], x[1:]):
        assert encode(view, "int8_row").to_bytes() == formats.encode(view.contiguous(), "int8_row").to_bytes()


def test_a_part_that_is_not_contiguous_goes_to_the_definition():
    encoded = encode(numbers(256, 512), "int8_row")
    wide = torch.empty(256, 1024, dtype=torch.int8)
    wide[:, ::2] = encoded.data
    strided = formats.Encoded(encoded.fmt, encoded.shape, wide[:, ::2], encoded.scales)
    assert explain_decode(strided).reason == "a part is not contiguous"
    assert torch.equal(decode(strided), decode(encoded))


@pytest.mark.cross("fmt", ["int8_row", "int8_g128", "mxfp4", "q4_0_gguf", "q8_0_gguf", "int4_g32", "fp8_e4m3_row"])
@pytest.mark.cross("bad", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_get_the_definitions_error(fmt, bad):
    x = numbers(*LARGE)
    x[200, 13] = bad
    with pytest.raises(NonFiniteError, match=r"^w: . NaN and . infinite of 131072 numbers"):
        encode(x, fmt, name="w")
    replaced = encode(x, fmt, nonfinite="replace")
    assert replaced.to_bytes() == formats.encode(x, fmt, nonfinite="replace").to_bytes()


def test_a_scale_beyond_float16_is_refused_as_the_definition_does():
    x = numbers(*LARGE) * 1e9
    with pytest.raises(FormatError) as ours:
        encode(x, "q4_0_gguf")
    with pytest.raises(FormatError) as definition:
        formats.encode(x, "q4_0_gguf")
    assert str(ours.value) == str(definition.value)


def test_a_bfloat16_cast_keeps_nan_and_infinity():
    x = numbers(*LARGE)
    x[0, :3] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    assert torch.equal(
        decode(encode(x, "bfloat16")).nan_to_num(7), formats.decode(formats.encode(x, "bfloat16")).nan_to_num(7)
    )
    assert bool(decode(encode(x, "bfloat16"))[0, 0].isnan())
