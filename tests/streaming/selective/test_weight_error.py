"""What a format takes from a weight: the difference, the relative output error, and the impact."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bitplan import decode, encode
from bitplan.formats import codec, dispatch
from bitplan.formats.gguf.search import SearchBySums, TorchSums
from bitplan.streaming.selective.gradient_statistics import impact_of, relative_output_error, rounding_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fmt", ["int8_row", "int8_g128", "fp8_e4m3_row", "q8_0_gguf"])
def test_the_difference_is_exact(fmt, dtype):
    torch.manual_seed(0)
    weight = torch.randn(24, 256).to(dtype)
    expected = weight - decode(encode(weight, fmt), dtype)
    result = rounding_error(weight, fmt)
    assert result.dtype == dtype
    assert torch.equal(result, expected)
    assert result.abs().max() > 0


def test_the_relative_error_is_that_of_the_outputs():
    torch.manual_seed(0)
    weight, bias, x = torch.randn(16, 128), torch.randn(16), torch.randn(3, 5, 128)
    y = torch.nn.functional.linear(x, weight, bias)
    low = torch.nn.functional.linear(x, decode(encode(weight, "int8_row"), torch.float32), bias)
    result = relative_output_error(x, rounding_error(weight, "int8_row"), y)
    assert float(result) == pytest.approx(float((y - low).norm() / y.norm()), rel=1e-4)


def test_the_impact_is_the_inner_product():
    torch.manual_seed(0)
    x, gradient, difference = torch.randn(4, 16, 8), torch.randn(4, 16, 4), torch.randn(4, 8)
    whole = float((gradient * (x @ difference.t())).sum())
    assert float(impact_of(gradient, x, difference)) == pytest.approx(whole, rel=1e-4)
    assert float(impact_of(gradient.bfloat16(), x, difference)) == pytest.approx(whole, rel=1e-2)


@pytest.mark.parametrize(("fmt", "picked"), [("int8_row", "triton"), ("q6_k_gguf", "triton"), ("nvfp4", "torch")])
def test_every_format_is_encoded_where_the_twins_are_those_of_a_gpu(fmt, picked, monkeypatch):
    """Formats of a GPU have an encoder in the table, a search of blocks, or neither."""
    weight = torch.randn(2, 256, generator=torch.Generator().manual_seed(0))
    expected = rounding_error(weight, fmt)

    def encode_rows(matrix, fmt):
        encoded = codec.encode(matrix, fmt)
        return encoded.data, encoded.scales

    twins = SimpleNamespace(ENCODERS={"int8_row": encode_rows}, DECODERS={}, BLOCK_SEARCH=SearchBySums(TorchSums()))
    monkeypatch.setattr(dispatch, "SMALLEST_FOR_CPU", 0)
    monkeypatch.setattr(dispatch, "_is_installed", lambda _: True)
    monkeypatch.setitem(dispatch._MODULES, "cpu", ("triton", "unused"))
    monkeypatch.setattr(dispatch, "_twins", lambda _: twins)
    assert dispatch.explain_encode(weight, fmt).implementation == picked
    assert torch.equal(rounding_error(weight, fmt), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["int8_row", "fp8_e4m3_row", "int8_g128", "q6_k_gguf", "q4_k_gguf"])
def test_on_the_gpu_nothing_waits_and_the_difference_is_the_same(fmt):
    torch.manual_seed(0)
    weight = torch.randn(256, 512).bfloat16()
    on_device = weight.cuda()
    rounding_error(on_device, fmt)
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = rounding_error(on_device, fmt)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(result.cpu(), rounding_error(weight, fmt))
