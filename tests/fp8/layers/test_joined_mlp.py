"""An MLP with the gating in its casts computes what its layers compute one by one, under the same names."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import functional

from bitplan import apply_fp8
from bitplan.fp8.layer_settings import Fp8LayerError
from bitplan.fp8.layers.joined_mlp import JoinedMlp, joining_obstacle

WIDTH, FEATURES, TOKENS = 64, 128, 24


class Mlp(nn.Module):
    def __init__(self, activation=functional.silu) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, FEATURES, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(FEATURES, WIDTH, bias=False)
        self.activation = activation

    def forward(self, x):
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class LlamaDecoderLayer(nn.Module):
    def __init__(self, **given) -> None:
        super().__init__()
        self.mlp, self.post_attention_layernorm = Mlp(**given), nn.RMSNorm(WIDTH, eps=1e-6)

    def forward(self, x):
        return x + self.mlp(self.post_attention_layernorm(x))


def block(device="cpu", recipe="tensorwise", **given) -> tuple[nn.Module, nn.Module]:
    """(plain, FP8)"""
    torch.manual_seed(0)
    plain = nn.ModuleList([LlamaDecoderLayer(**given)]).to(device, torch.bfloat16)
    made = copy.deepcopy(plain)
    apply_fp8(made, None, tokens=TOKENS, recipe=recipe, emulate=True)
    return plain[0], made[0]


def gradients(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    generator = torch.Generator(x.device).manual_seed(1)
    dy = torch.randn(y.shape, generator=generator, device=x.device).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], dy)]


def one_by_one(layer: nn.Module) -> nn.Module:
    """The same with a hook, which a layer that is not called would not run."""
    layer = copy.deepcopy(layer)
    layer.mlp.down_proj.register_forward_hook(lambda *_: layer.__setattr__("seen", True))
    return layer


def far(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).norm() / other.float().norm())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_results_and_gradients_are_those_of_the_layers_one_by_one(device) -> None:
    plain, layer = block(device)
    assert isinstance(layer.mlp, JoinedMlp)
    assert set(layer.state_dict()) == set(plain.state_dict())
    x = torch.randn(2, TOKENS // 2 - 1, WIDTH, device=device).bfloat16()
    apart = one_by_one(layer)
    for _ in range(2):  # the second time by guesses, where there are any
        made, expected = gradients(layer, x), gradients(apart, x)
        assert max(far(*pair) for pair in zip(made, expected, strict=True)) < 0.05
    assert apart.seen
    exact = gradients(plain, x)
    assert max(far(*pair) for pair in zip(made[:2], exact[:2], strict=True)) < 0.08


@pytest.mark.parametrize("given", [{"activation": functional.mish}, {"recipe": "rowwise"}])
def test_other_gatings_and_recipes_stay_apart(given) -> None:
    assert type(block(**given)[1].mlp) is Mlp


class Dropping(Mlp):
    def __init__(self, activation=functional.silu) -> None:
        super().__init__(activation)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.down_proj(self.drop(self.activation(self.gate_proj(x)) * self.up_proj(x)))


class Clamping(Mlp):
    def forward(self, x):
        return self.down_proj(self.activation(self.gate_proj(x)).clamp(max=100.0) * self.up_proj(x))


@pytest.mark.parametrize("kind", [Dropping, Clamping])
def test_what_numbers_do_not_show_is_in_the_code(monkeypatch, kind) -> None:
    """Dropout while it is off, a clamp that is not reached."""
    monkeypatch.setitem(globals(), "Mlp", kind)
    torch.manual_seed(0)
    made = nn.ModuleList([LlamaDecoderLayer()]).to(torch.bfloat16).eval()
    apply_fp8(made, None, tokens=TOKENS, recipe="tensorwise", emulate=True)
    assert type(made[0].mlp) is kind


class Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return 2 * self.inner(x)


def _twice(mlp: nn.Module) -> None:
    mlp.up_proj = Twice(mlp.up_proj)


def _patched(mlp: nn.Module) -> None:
    forward = mlp.down_proj.forward
    mlp.down_proj.forward = lambda x: 2 * forward(x)


def _other_activation(mlp: nn.Module) -> None:
    mlp.activation = lambda x: 2 * functional.silu(x)


@pytest.mark.parametrize("change", [_twice, _patched, _other_activation])
def test_a_part_that_is_replaced_counts(change) -> None:
    layer = block()[1]
    x = torch.randn(TOKENS, WIDTH).bfloat16()
    before = layer.mlp(x)
    change(layer.mlp)
    assert far(layer.mlp(x).detach(), 2 * before.detach()) < 0.05


def test_a_pickled_model_is_whole(tmp_path) -> None:
    """torch.save keeps what is joined joined, the names of its state, and the watch for hooks."""
    layer = block()[1]
    torch.save(layer, tmp_path / "layer.pt")
    loaded = torch.load(tmp_path / "layer.pt", weights_only=False)
    x = torch.randn(TOKENS, WIDTH).bfloat16()
    assert isinstance(loaded.mlp, JoinedMlp)
    assert all(torch.equal(*pair) for pair in zip(gradients(loaded, x), gradients(layer, x), strict=True))
    state = layer.state_dict()
    assert list(loaded.state_dict()) == list(state)
    loaded.load_state_dict({name: 2 * tensor for name, tensor in state.items()})
    assert torch.equal(loaded.mlp.gate_proj.fused.weight, 2 * layer.mlp.gate_proj.fused.weight)
    seen = []
    loaded.mlp.down_proj.register_forward_hook(lambda *_: seen.append(True))
    loaded(x)
    layer(x)
    assert seen == [True]


def test_a_hook_is_called_after_all_hooks_were_taken_away_by_a_new_dictionary() -> None:
    layer, seen = block()[1], []
    layer.mlp.down_proj._forward_hooks = OrderedDict()
    layer.mlp.down_proj.register_forward_hook(lambda *_: seen.append(True))
    layer(torch.randn(TOKENS, WIDTH).bfloat16())
    assert seen == [True]


def test_a_wrong_input_is_named_by_the_layer() -> None:
    with pytest.raises(Fp8LayerError, match=f"a layer of {WIDTH} inputs"):
        block()[1].mlp(torch.randn(TOKENS, WIDTH - 1).bfloat16())


def test_frozen_weights_get_no_gradient() -> None:
    layer = block()[1]
    layer.mlp.gate_proj.fused.weight.requires_grad_(False)
    layer.mlp.down_proj.weight.requires_grad_(False)
    x = torch.randn(TOKENS, WIDTH).bfloat16().requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.mlp.gate_proj.fused.norm.weight.grad is not None
    assert layer.mlp.down_proj.weight.grad is None
    assert layer.mlp.gate_proj.fused.weight.grad is None


def test_the_obstacle_is_named() -> None:
    mlp = block()[1].mlp
    assert joining_obstacle(mlp.gate_proj.fused, mlp.down_proj) is None
    assert "not all FP8" in str(joining_obstacle(nn.Linear(2, 2), mlp.down_proj))
