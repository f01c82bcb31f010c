"""A norm fused with its FP8 cast: the cast bit for bit given the norm, the norm near float64, and its gradient."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from bitplan.base.errors import FormatError
from bitplan.fp8.kernels import triton_norm
from bitplan.fp8.kernels.cast import NormWeights, cast_layouts, norm_and_cast, norm_gradient


def sample(kind: str, device, rows: int = 37, cols: int = 384, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(rows, cols, generator=generator) * 3 + 1).to(device, dtype)
    weight, bias, dy = (torch.randn(size, generator=generator).to(device, dtype) for size in (cols, cols, (rows, cols)))
    return x, NormWeights(kind, weight, bias if kind == "layer" else None, 1e-5), dy


def exact_norm(x, norm: NormWeights):
    if norm.kind == "layer":
        return torch.nn.functional.layer_norm(x, x.shape[-1:], norm.weight.double(), norm.bias.double(), norm.eps)
    return torch.nn.functional.rms_norm(x, x.shape[-1:], norm.weight.double(), norm.eps)


@pytest.mark.cross("kind", ["rms", "layer"])
@pytest.mark.cross("by", [("tensorwise", "tensorwise"), ("rowwise", "blockwise"), ("mxfp8", None), (None, "rowwise")])
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_what_is_cast_is_the_rounded_norm(kind, by, impl, device) -> None:
    x, norm, _ = sample(kind, device)
    made = norm_and_cast(x, norm, *by, plain=True, impl=impl)
    expected = exact_norm(x.double(), norm)
    assert made.plain.dtype == x.dtype
    assert ((made.plain.double() - expected).norm() / expected.norm()) < 3e-3
    for recipe, value, layout in ((by[0], made.rows, "rows"), (by[1], made.cols, "cols")):
        assert (value is None) == (recipe is None)
        if recipe is not None:
            again = getattr(cast_layouts(made.plain.cpu(), recipe, impl="reference"), layout)
            assert torch.equal(value.codes.view(torch.uint8).cpu(), again.codes.view(torch.uint8))
            assert torch.equal(value.scale.cpu(), again.scale)


@pytest.mark.cross("kind", ["layer", "rms"])
@pytest.mark.cross("recipe", ["tensorwise", "blockwise"])
@pytest.mark.cross(("rows", "weights"), [(37, torch.bfloat16), (256, torch.float32)])
def test_words_of_two_numbers_are_cast_as_single_ones(kind, recipe, rows, weights, device) -> None:
    x, norm, _ = sample(kind, device, rows=rows)
    norm.weight = norm.weight.to(weights)
    norm.bias = None if norm.bias is None else norm.bias.to(weights)
    made = norm_and_cast(x, norm, recipe, recipe, impl="triton")
    expected = norm_and_cast(x, norm, recipe, recipe, plain=True, impl="triton")  # writes the norm: one at a time
    assert made.plain is None
    for one, other in ((made.rows, expected.rows), (made.cols, expected.cols)):
        assert torch.equal(one.codes.view(torch.uint8), other.codes.view(torch.uint8))
        assert torch.equal(one.scale, other.scale)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_without_a_layout_only_the_norm_is_made(kind, device) -> None:
    x, norm, _ = sample(kind, device, rows=5)
    made = norm_and_cast(x, norm, None, None, plain=True, impl="triton")
    assert made.rows is None
    assert made.cols is None
    expected = exact_norm(x.double(), norm)
    assert ((made.plain.double() - expected).norm() / expected.norm()) < 3e-3
    assert norm_and_cast(x, norm, "rowwise", None).plain is None


@pytest.mark.cross(
    ("kind", "impl"), [("rms", "reference"), ("rms", "triton"), ("layer", "triton"), ("layer", "reference")]
)
@pytest.mark.cross("rows", [1, 22])
def test_the_gradient_is_near_float64(kind, impl, rows, device, monkeypatch) -> None:
    monkeypatch.setattr(triton_norm, "GRADIENT_PROGRAMS", 4)  # several rows a program, as with many rows
    monkeypatch.setattr(triton_norm, "MOST_PIECES", 4)
    x, norm, dy = sample(kind, device, rows=rows, cols=128, dtype=torch.float32)
    made = norm_and_cast(x, norm, "tensorwise", None, impl=impl)
    result = norm_gradient(dy, x, norm, made.mean, made.rstd, impl=impl)
    exact = [
        each.double().requires_grad_() for each in (x, norm.weight, *([norm.bias] if norm.bias is not None else []))
    ]
    if kind == "layer":
        y = torch.nn.functional.layer_norm(exact[0], (128,), exact[1], exact[2], norm.eps)
    else:
        y = torch.nn.functional.rms_norm(exact[0], (128,), exact[1], norm.eps)
    y.backward(dy.double())
    for one, two in zip(result, exact, strict=False):
        assert ((one.double() - two.grad).norm() / two.grad.norm()) < 1e-6
    assert (result[2] is None) == (norm.bias is None)


def test_nan_and_no_rows(device) -> None:
    x, norm, dy = sample("rms", device, rows=4)
    x[2, 7] = torch.nan
    made = norm_and_cast(x, norm, "rowwise", "rowwise", impl="triton")
    assert made.rows.scale.cpu().isnan().flatten().tolist()[:4] == [False, False, True, False]
    empty = norm_and_cast(x[:0], norm, "tensorwise", "tensorwise", impl="triton")
    assert empty.rows.shape == (0, 384)
    assert norm_gradient(dy[:0], x[:0], norm, None, empty.rstd, impl="triton")[1].count_nonzero() == 0


def test_refusals() -> None:
    with pytest.raises(FormatError, match="a norm is one of rms, layer"):
        NormWeights("batch", torch.ones(4), None, 1e-5)
    norm = NormWeights("rms", torch.ones(40000), None, 1e-5)
    with pytest.raises(FormatError, match="rows of up to 32768"):
        norm_and_cast(torch.ones(1, 40000), norm, "tensorwise", None, impl="triton")


@pytest.mark.filterwarnings("ignore:divide by zero")  # Triton's interpreter warns
def test_without_an_epsilon_rows_beyond_the_last_are_not_in_the_maximum(monkeypatch, device) -> None:
    """Programs of five rows take four at once: the last three of eight are no rows, and 0 / 0 is not a number."""
    monkeypatch.setattr(triton_norm, "MOST_PIECES", 2)
    x, norm, _ = sample("rms", device, rows=9, cols=48)
    made = triton_norm.row_stats(x, "rms", norm.weight, None, 0.0, with_amax=True)
    expected = (x.float() * made.rstd[:, None] * norm.weight.float()).to(x.dtype).abs().amax().float()
    assert made.partial.view(torch.float32).max() == expected
