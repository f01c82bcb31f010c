"""Inputs rounded to a format: the same numbers as encode and decode give; rows that are not finite stay visible."""

from __future__ import annotations

import pytest
import torch

import bitplan
from bitplan.base.errors import FormatError
from bitplan.formats.input_formats import INPUT_FORMATS, input_format, round_input


@pytest.mark.parametrize("fmt", INPUT_FORMATS)
@pytest.mark.parametrize("width", [32, 96, 100])
def test_rounding_is_encoding_and_decoding(fmt: str, width: int) -> None:
    x = torch.randn(5, width) * torch.tensor([[1.0], [1e-3], [300.0], [0.0], [1e-30]])
    rounded = round_input(x, fmt)
    assert torch.equal(rounded, bitplan.decode(bitplan.encode(x, fmt, pad="zero")))
    assert torch.equal(round_input(x.reshape(5, 1, width), fmt), rounded.reshape(5, 1, width))


def test_rounding_follows_the_first_quantizer_of_llama_cpp() -> None:
    """Scale max / 127 as float16; x times its unrounded reciprocal, ties away from zero."""
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([127.0, 0.5, -0.5, 2.5])
    assert round_input(x, "q8_0_gguf")[0, :4].tolist() == [127.0, 1.0, -1.0, 3.0]
    assert round_input(x, "int8_row")[0, :4].tolist() == [127.0, 0.0, -0.0, 2.0]


@pytest.mark.parametrize("fmt", INPUT_FORMATS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_stays_so_and_others_are_untouched(fmt: str, bad: float) -> None:
    x = torch.randn(3, 64)
    x[1, 7] = bad
    rounded = round_input(x, fmt)
    assert not rounded[1].isfinite().all()
    assert torch.equal(rounded[[0, 2]], round_input(x[[0, 2]], fmt))


def test_types_of_16_bits_are_rounded_in_float32() -> None:
    x = torch.randn(2, 64).bfloat16()
    assert round_input(x, "q8_0_gguf").dtype == torch.bfloat16
    wide = round_input(x, "q8_0_gguf", torch.float32)
    assert torch.equal(wide, round_input(x.float(), "q8_0_gguf"))


def test_names() -> None:
    assert input_format("keep") is None is input_format(None)
    assert input_format("int8") == "q8_0_gguf"
    assert input_format("fp8") == "fp8_e4m3_row"
    with pytest.raises(FormatError, match=r"layer: no format of inputs 'int4_g32'; there are keep, int8, fp8"):
        input_format("int4_g32", "layer")
