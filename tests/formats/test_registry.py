"""The list of formats: which there are, in which order, and what an unknown name is told."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import bitplan.formats
from bitplan.base.errors import FormatError
from bitplan.formats import get_format
from bitplan.formats.registry import DTYPE_NAMES, list_formats
from tests.crosses import few

from .samples import ALL_FORMATS

THE_21_DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int64", "int32", "int16", "int8"),
    *("uint64", "uint32", "uint16", "uint8", "int4", "uint4", "fp4", "int2", "uint2", "ternary", "binary"),
)
THE_17_BLOCK_FORMATS = (
    *("q4_0_poly", "q4_0_gguf", "q8_0_gguf", "mxfp4", "mxfp4_gguf", "mxfp8_e4m3", "nvfp4", "fp4_u8_g128", "int8_row"),
    *("int8_g128", "int8_g64", "int4_g32", "int4_g64", "int4_g128", "fp8_e4m3_row", "fp8_e4m3_b128", "ternary_absmean"),
)
THE_15_GGUF_BLOCKS = (
    *("q4_1_gguf", "q5_0_gguf", "q5_1_gguf", "iq4_nl_gguf", "q2_k_gguf", "q3_k_gguf", "q4_k_gguf", "q5_k_gguf"),
    *("q6_k_gguf", "iq4_xs_gguf", "iq3_s_gguf", "iq3_xxs_gguf", "iq2_s_gguf", "iq2_xs_gguf", "iq2_xxs_gguf"),
)


def test_the_formats_are_these():
    assert DTYPE_NAMES == THE_21_DTYPES
    assert tuple(fmt.name for fmt in list_formats()) == THE_21_DTYPES + THE_17_BLOCK_FORMATS + THE_15_GGUF_BLOCKS


@pytest.mark.parametrize("fmt", ALL_FORMATS)
def test_a_format_is_found_by_name_and_is_itself(fmt):
    assert get_format(fmt.name) is fmt
    assert get_format(fmt) is fmt
    assert len(fmt.description) > 10
    assert fmt.is_cast == (fmt.element is None) == (fmt.rules == ())
    assert fmt.is_cast or fmt.default_rule in fmt.rules


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("q4_0", "llama.cpp's q4_0 is 'q4_0_gguf'"),
        ("IQ3_S", "llama.cpp's IQ3_S is 'iq3_s_gguf'"),
        ("IQ2_XXS", "llama.cpp's IQ2_XXS is 'iq2_xxs_gguf'"),
        ("iq3_m", "llama.cpp's iq3_m is 'iq3_s_gguf', the type of most of its tensors"),
        ("mxpf4", "did you mean 'mxfp4'"),
        ("int-8", "did you mean 'int8'"),
        ("bf16", "did you mean 'bfloat16'"),
        ("nvfp_4", "did you mean 'nvfp4'"),
        (torch.float16, "did you mean 'float16'"),
    ],
)
def test_an_unknown_name_gets_a_suggestion(wrong, hint):
    with pytest.raises(FormatError) as refusal:
        get_format(wrong)
    assert hint in str(refusal.value)
    assert str(refusal.value).startswith(f"no format {wrong!r}; `bitplan inspect` lists them all; ")


def test_a_name_like_no_other_gets_none():
    with pytest.raises(FormatError) as refusal:
        get_format("zzzz")
    assert str(refusal.value) == "no format 'zzzz'; `bitplan inspect` lists them all"


def test_the_list_is_a_copy():
    list_formats().clear()
    assert len(list_formats()) == 53


def test_public_names_exist():
    assert all(hasattr(bitplan.formats, name) for name in bitplan.formats.__all__)


@pytest.mark.cross("fmt", few(ALL_FORMATS, 12))
@pytest.mark.cross("again", [copy.deepcopy, lambda fmt: pickle.loads(pickle.dumps(fmt))], ids=["deepcopy", "pickle"])
def test_a_format_survives_copies(fmt, again):
    """A model that holds Encoded weights is deep-copied and sent to workers."""
    assert again(fmt).nbytes((4, 128)) == fmt.nbytes((4, 128))
    assert again(fmt).name == fmt.name
