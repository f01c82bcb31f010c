"""The compiled search of GGUF's scales gives the bytes of the definition."""

from __future__ import annotations

import pytest
import torch

from bitplan.base.errors import FormatError, NonFiniteError
from bitplan.formats import dispatch
from bitplan.formats.codec import encode as by_definition
from bitplan.formats.dispatch import encode, explain_encode
from bitplan.formats.gguf.grids import VECTOR_LAYOUTS
from bitplan.formats.gguf.layouts import LAYOUTS
from tests.crosses import few
from tests.formats.samples import gaussian, heavy_tailed, same


def numbers(rows: int = 12, cols: int = 512) -> torch.Tensor:
    """Bell-shaped and heavy-tailed rows, and rows where something degenerates."""
    x = torch.cat([gaussian(rows, cols) * 0.02, heavy_tailed(4, cols)])
    x[0], x[1], x[2], x[3] = 0.0, 1e-33, 0.5, -0.5
    x[4, : cols // 2] *= 1e-4
    x[5] = x[5].abs()
    return x


@pytest.mark.parametrize("size", [(12, 512), pytest.param((60, 1024), marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("name", [*few(LAYOUTS, 5), *VECTOR_LAYOUTS])
def test_the_twin_gives_the_bytes_of_the_definition(name, size, monkeypatch):
    monkeypatch.setattr(dispatch, "SMALLEST_FOR_CPU", 0)
    x, importance = numbers(*size), gaussian(size[1], seed=5).exp()
    assert explain_encode(x, name).implementation == "numba"
    assert same(encode(x, name).data, by_definition(x, name).data)
    weighted = explain_encode(x, name, importance=importance)
    assert weighted.implementation == "numba"
    assert same(encode(x, name, importance=importance).data, by_definition(x, name, importance=importance).data)


def test_the_twin_refuses_what_the_definition_refuses():
    x = numbers(60, 1024)
    with pytest.raises(FormatError, match="one weight per column"):
        encode(x, "q4_k_gguf", importance=torch.ones(7))
    x[0, 0] = torch.inf
    with pytest.raises(NonFiniteError, match="1 infinite"):
        encode(x, "q4_k_gguf", name="w")
    assert same(
        encode(x, "q5_0_gguf", nonfinite="replace").data, by_definition(x, "q5_0_gguf", nonfinite="replace").data
    )
