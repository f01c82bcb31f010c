"""Tensorwise casts by the maximum of a group: one scale, whoever holds the largest number."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from bitplan.fp8.casts import cast_reference, pad_rows
from bitplan.fp8.layer_settings import Fp8LayerError, Fp8Recipe
from bitplan.fp8.layers.linear import Fp8Linear
from bitplan.fp8.layers.parallel import shared_amax_cast, shared_amax_linear

HERE = pytest.param("cuda", marks=pytest.mark.gpu)
DTYPES = [torch.bfloat16, torch.float32]


def with_other(other: float):
    """A group whose other member has this largest number."""

    def largest(bits: torch.Tensor) -> torch.Tensor:
        assert bits.shape == (1,)
        assert bits.dtype == torch.int32
        return torch.maximum(bits, torch.tensor([other], device=bits.device).view(torch.int32))

    return largest


@pytest.mark.parametrize("device", ["cpu", HERE])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("other", [0.5, 1000.0])
@pytest.mark.parametrize("asked", [{}, {"rows": False}, {"cols": False}])
def test_the_larger_of_both_decides(device, dtype, other, asked) -> None:
    x = torch.randn(21, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    pair = shared_amax_cast(x.to(device), "e4m3", 0.0, with_other(other), **asked)
    whole = pad_rows(x, 32)
    for name, source, made in (("rows", whole, pair.rows), ("cols", whole.t(), pair.cols)):
        if not asked.get(name, True):
            assert made is None
            continue
        expected = cast_reference(source, "tensor", "e4m3", max(other, float(x.float().abs().max())))
        assert torch.equal(made.codes.view(torch.uint8).cpu(), expected.codes.view(torch.uint8))
        assert torch.equal(made.scale.cpu(), expected.scale)


@pytest.mark.parametrize("device", ["cpu", HERE])
@pytest.mark.parametrize("other", [torch.inf, torch.nan])
def test_what_is_not_finite_elsewhere_shows_here(device, other) -> None:
    pair = shared_amax_cast(torch.ones(16, 16, device=device).bfloat16(), "e4m3", 0.0, with_other(other))
    assert pair.rows is not None
    assert pair.rows.scale.isnan()
    assert (pair.rows.codes.view(torch.uint8) == 0x7F).all()


@pytest.mark.parametrize("device", ["cpu", HERE])
def test_a_share_without_rows_still_takes_part(device) -> None:
    asked = []
    pair = shared_amax_cast(torch.ones(0, 16, device=device), "e4m3", 0.0, lambda bits: asked.append(bits) or bits)
    assert len(asked) == 1
    assert pair.rows is not None
    assert pair.rows.shape == (0, 16)


def test_autocast_casts_the_input_as_in_a_whole_layer() -> None:
    layer, x = Fp8Linear(64, 32, recipe=Fp8Recipe("tensorwise")), torch.randn(5, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = shared_amax_linear(x, layer, divided=("weight", "grad"), largest=lambda bits: bits)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, layer(x))
    with pytest.raises(Fp8LayerError, match="a layer of 64 inputs takes"):
        shared_amax_linear(torch.randn(5, 32), layer, divided=("weight", "grad"), largest=lambda bits: bits)


def test_a_compiled_model_shares_the_maximum_too() -> None:
    """The operators of compiled graphs cast by a maximum of their own: this layer runs between graphs."""
    layer = Fp8Linear(32, 32, bias=False, recipe=Fp8Recipe("tensorwise"))
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))

    def run(x: torch.Tensor) -> torch.Tensor:
        return shared_amax_linear(x, layer, divided=("input", "weight", "grad"), largest=with_other(1e6)) + 1

    with torch.no_grad():  # dynamo asks a result between graphs for its .grad, of which torch warns
        expected = run(x)
        assert not torch.equal(expected, layer(x) + 1)
        assert torch.equal(torch.compile(run, backend="aot_eager")(x), expected)
