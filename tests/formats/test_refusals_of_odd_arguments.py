"""Arguments that are no tensors, or ask for what would lose numbers without a word."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import bitplan
from bitplan import formats
from bitplan.base.errors import FormatError


@pytest.mark.parametrize("module", [bitplan, formats], ids=["fast", "definition"])
@pytest.mark.parametrize(
    ("x", "kind"),
    [
        (np.ones((2, 32), np.float32), "ndarray"),
        ([1.0, 2.0], "list"),
        (torch.ones(2, 32, device="meta"), "torch.strided on meta"),
        (torch.eye(32).to_sparse(), "torch.sparse_coo on cpu"),
    ],
)
def test_encode_takes_dense_tensors(module, x, kind):
    with pytest.raises(FormatError, match=f"w: expected a dense torch tensor with numbers in it, got {kind}"):
        module.encode(x, "mxfp4", name="w")


@pytest.mark.parametrize("module", [bitplan, formats], ids=["fast", "definition"])
def test_decode_gives_floats_of_an_encoding(module):
    encoded = formats.encode(torch.randn(2, 32), "mxfp4")
    with pytest.raises(FormatError, match=r"decode gives floats, got dtype=torch.int8"):
        module.decode(encoded, torch.int8)
    with pytest.raises(FormatError, match="decode takes an Encoded, got Tensor"):
        module.decode(torch.ones(2))


def test_the_filling_of_a_last_block_is_no_part_of_its_mean():
    x = torch.rand(8, 33, generator=torch.Generator().manual_seed(0)) + 1
    error = (formats.decode(formats.encode(x, "int4_g32", pad="zero", scale_rule="absmean")) - x).abs()
    assert float(error[:, 32].max()) < 0.5
    assert torch.equal(
        formats.decode(formats.encode(x, "int4_g32", pad="zero", scale_rule="absmean"))[:, :32],
        formats.decode(formats.encode(x[:, :32], "int4_g32", scale_rule="absmean")),
    )
