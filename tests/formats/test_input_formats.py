"""Inputs rounded to a format: the same numbers as encode and decode give; rows that are not finite stay visible."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import bitplan
from bitplan.base.errors import FormatError
from bitplan.formats.input_formats import (
    INPUT_FORMATS,
    STATIC,
    input_format,
    llama_cpp_input,
    round_input,
    with_scale,
)

DYNAMIC = [fmt for fmt in INPUT_FORMATS if fmt != STATIC]
ALL = [*DYNAMIC, with_scale(0.05)]


@pytest.mark.parametrize("fmt", [fmt for fmt in DYNAMIC if fmt != "q8_k"])
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


def blocks_of_llama_cpp(row: list[float]) -> list[float]:
    """`quantize_row_q8_K_ref` and `dequantize_row_q8_K`, number by number in float32."""
    numbers: list[float] = []
    for start in range(0, len(row), 256):
        block = np.array(row[start : start + 256], np.float32)
        largest = max(block, key=abs)
        if largest == 0:
            numbers += [0.0] * len(block)
            continue
        factor = np.float32(-127.0) / largest
        codes = [min(127, int(np.rint(factor * number))) for number in block]
        numbers += [float(np.float32(1) / factor * np.float32(code)) for code in codes]
    return numbers


@pytest.mark.parametrize("width", [256, 512, 300])
def test_blocks_of_256_are_those_of_llama_cpp(width: int) -> None:
    x = torch.randn(4, width) * torch.tensor([[1.0], [1e-3], [300.0], [0.0]])
    expected = torch.tensor([blocks_of_llama_cpp(row) for row in x.tolist()])
    assert torch.equal(round_input(x, "q8_k"), expected)


def test_static_scales_are_for_all_tokens_and_saturate() -> None:
    name = with_scale(0.5)
    assert round_input(torch.tensor([[0.2, 0.25, 0.75, -63.4, 1000.0, -1000.0]]), name).tolist() == [
        [0.0, 0.0, 1.0, -63.5, 63.5, -63.5]
    ]
    assert input_format(with_scale(1 / 3)) == with_scale(1 / 3)  # a name gives its scale back
    for bad in ("0", "-1", "nan", "inf", "x", ""):
        with pytest.raises(FormatError, match=r"the scale of 'int8_static@.*' must be a positive number"):
            input_format(f"int8_static@{bad}")
    with pytest.raises(FormatError, match="int8_static has no scale yet; a text gives one"):
        round_input(torch.zeros(1, 2), STATIC)


def test_llama_cpp_takes_larger_blocks_with_k_quants() -> None:
    formats = ("q4_0_gguf", "q4_1_gguf", "mxfp4_gguf", "q4_k_gguf", "iq2_xs_gguf", "gguf:IQ1_S", "bfloat16")
    assert [llama_cpp_input(fmt) for fmt in formats] == ["q8_0_gguf"] * 3 + ["q8_k"] * 3 + [None]


@pytest.mark.parametrize("fmt", ALL)
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
    assert input_format("int8") == "q8_0_gguf" == input_format("8")
    assert input_format("fp8") == "fp8_e4m3_row"
    with pytest.raises(FormatError, match=r"layer: no format of inputs 'int4_g32'; there are keep, int8, 8, fp8"):
        input_format("int4_g32", "layer")
