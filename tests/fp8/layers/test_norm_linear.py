"""Fp8NormLinear against a norm and a linear layer in float64, parameters' gradients included."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitplan.fp8.layer_settings import Fp8LayerError, Fp8Recipe, GemmChoice
from bitplan.fp8.layers.linear import Fp8NormLinear
from bitplan.fp8.layers.weight_casts import drop_weight_casts

K, N = 256, 128
BOUND = 0.05


@pytest.fixture(autouse=True)
def _no_casts_left():
    drop_weight_casts()
    yield
    drop_weight_casts()


def norm_of(kind: str) -> nn.Module:
    norm = nn.LayerNorm(K) if kind == "layer" else nn.RMSNorm(K, eps=1e-5)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(K))
    return norm


def gradients(module: nn.Module, x: torch.Tensor, g: torch.Tensor, parameters) -> list[torch.Tensor]:
    for parameter in parameters:
        parameter.grad = None
    x = x.detach().requires_grad_()
    y = module(x)
    y.backward(g)
    return [y.detach(), x.grad, *(parameter.grad for parameter in parameters)]


def errors(kind: str, recipe: str, gemms: GemmChoice | None, device: str = "cpu", dtype=torch.float32) -> list[float]:
    torch.manual_seed(0)
    norm, linear = norm_of(kind).to(device, dtype), nn.Linear(K, N).to(device, dtype)
    layer = Fp8NormLinear.from_modules(norm, linear, recipe=Fp8Recipe(recipe), gemms=gemms)
    parameters = [*norm.parameters(), *linear.parameters()]
    assert {id(each) for each in layer.parameters()} == {id(each) for each in parameters}
    x, g = torch.randn(3, 7, K).to(device, dtype) * 2 + 1, torch.randn(3, 7, N).to(device, dtype)
    result = gradients(layer, x, g, parameters)
    exact = nn.Sequential(norm, linear).double()
    expected = gradients(exact, x.double(), g.double(), list(exact.parameters()))
    assert result[0].shape == (3, 7, N)
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(result, expected, strict=True)]


@pytest.mark.cross("kind", ["rms", "layer"])
@pytest.mark.cross("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_outputs_and_gradients_are_near_float64(kind, recipe) -> None:
    result = errors(kind, recipe, None)
    assert max(result) < BOUND
    assert result[0] > 0.01


@pytest.mark.cross("kind", ["rms", "layer"])
@pytest.mark.cross(
    "gemms",
    [GemmChoice.all("bf16"), GemmChoice("blockwise", "bf16", "bf16"), GemmChoice("bf16", "rowwise", "tensorwise")],
)
def test_products_can_be_chosen(kind, gemms) -> None:
    result = errors(kind, "tensorwise", gemms)
    assert max(result) < BOUND
    exact = [result[0] < 1e-5, result[1] < 1e-5, result[-2] < 1e-5]
    assert exact == [value == "bf16" for value in (gemms.fprop, gemms.dgrad, gemms.wgrad)]


def test_built_by_itself_it_begins_as_a_norm_should() -> None:
    layer = Fp8NormLinear(K, N, norm="layer", recipe=Fp8Recipe("tensorwise"))
    assert sorted(layer.state_dict()) == ["bias", "norm.bias", "norm.weight", "weight"]
    plain = Fp8NormLinear(K, N, False, recipe=Fp8Recipe("tensorwise"), dtype=torch.bfloat16)
    assert sorted(plain.state_dict()) == ["norm.weight", "weight"]
    assert "norm=rms" in repr(plain)
    with torch.no_grad():
        assert plain(torch.randn(5, K, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_frozen_parts_get_no_gradient() -> None:
    layer = Fp8NormLinear(K, N, recipe=Fp8Recipe("blockwise"))
    layer.weight.requires_grad_(False)
    layer(torch.randn(5, K)).sum().backward()
    assert layer.weight.grad is None
    assert layer.norm.weight.grad is not None
    layer.norm.weight.requires_grad_(False)
    layer.weight.requires_grad_(True)
    layer(torch.randn(5, K)).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own doing
@pytest.mark.cross("gemms", [GemmChoice.all("blockwise"), GemmChoice("tensorwise", "bf16", "bf16")])
@pytest.mark.cross("kind", ["rms", "layer"])
def test_a_compiled_layer_is_one_graph_and_the_same(gemms, kind) -> None:
    torch._dynamo.reset()
    layer = Fp8NormLinear(K, N, norm=kind, recipe=Fp8Recipe("blockwise"), gemms=gemms)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x, g = torch.randn(9, K), torch.randn(9, N)
    parameters = list(layer.parameters())
    result, expected = (gradients(each, x, g, parameters) for each in (compiled, layer))
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


def test_refusals() -> None:
    with pytest.raises(Fp8LayerError, match="norm must be one of rms, layer"):
        Fp8NormLinear(K, N, norm="batch", recipe=Fp8Recipe("tensorwise"))
    with pytest.raises(Fp8LayerError, match="LayerNorm has no weight of 256 numbers"):
        Fp8NormLinear.from_modules(nn.LayerNorm(K, elementwise_affine=False), nn.Linear(K, N), recipe=Fp8Recipe())
    with pytest.raises(Fp8LayerError, match="256 inputs"):
        Fp8NormLinear(K, N, recipe=Fp8Recipe())(torch.randn(3, 16))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_the_gpu_is_near_float64(kind, recipe) -> None:
    assert max(errors(kind, recipe, None, "cuda", torch.bfloat16)) < BOUND
