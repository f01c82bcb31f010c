"""Weights stored in FP8: what is stored, what an optimizer does with it, what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitplan.fp8.casts import cast_reference, decode_scaled
from bitplan.fp8.layer_settings import Fp8LayerError, Fp8Recipe, GemmChoice
from bitplan.fp8.layers import stored_weight as fp8_stored
from bitplan.fp8.layers.linear import Fp8Linear
from bitplan.fp8.layers.stored_weight import stored_weight, transposed
from bitplan.fp8.layers.weight_casts import drop_weight_casts, kept_casts

K, N = 256, 384


def pair(recipe: str, gemms: GemmChoice | None = None) -> tuple[Fp8Linear, Fp8Linear]:
    """A layer and the same with its weight in FP8."""
    torch.manual_seed(0)
    layer = Fp8Linear(K, N, recipe=Fp8Recipe(recipe), gemms=gemms)
    return layer, Fp8Linear.from_linear(layer, recipe=layer.recipe, gemms=gemms, fp8_param=True)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_it_computes_what_the_layer_with_casts_computes(recipe) -> None:
    layer, stored = pair(recipe)
    assert stored.weight.dtype == torch.float8_e4m3fn
    assert stored.weight.nbytes * 4 == layer.weight.nbytes
    results = []
    for each in (layer, stored):
        x = torch.randn(33, K, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = each(x)
        y.square().sum().backward()
        results.append((y.detach(), x.grad, each.weight_master.grad if each.fp8_param else each.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_products_in_bf16_read_the_decoded_weight() -> None:
    _, stored = pair("tensorwise", GemmChoice("bf16", "bf16", "bf16"))
    x = torch.randn(5, K, requires_grad=True)
    y = stored(x)
    y.sum().backward()
    weight = decode_scaled(stored_weight(stored))
    torch.testing.assert_close(y, torch.nn.functional.linear(x, weight, stored.bias))
    torch.testing.assert_close(x.grad, weight.sum(0).expand(5, K))


def test_micro_batches_add_up_in_float32() -> None:
    _, stored = pair("tensorwise")
    x = torch.randn(8, K)
    stored(x).sum().backward()
    once = stored.weight_master.grad.clone()
    stored(x).sum().backward()
    assert stored.weight_master.grad.dtype == torch.float32
    assert torch.equal(stored.weight_master.grad, 2 * once)
    with torch.no_grad():
        stored(x)


def test_micro_batches_share_one_transpose_and_a_step_ends_it(monkeypatch) -> None:
    made = []
    monkeypatch.setattr(fp8_stored, "transposed", lambda weight: made.append(weight) or transposed(weight))
    _, stored = pair("tensorwise")
    x = torch.randn(4, K, requires_grad=True)
    for _ in range(2):
        stored(x).sum().backward()
    assert len(made) == 1
    with torch.no_grad():
        stored.weight_master.mul_(2)
    stored(x).sum().backward()
    assert len(made) == 2
    assert kept_casts(stored.weight) is not None
    drop_weight_casts(stored)
    assert kept_casts(stored.weight) is None


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_an_ordinary_optimizer_trains_it(recipe) -> None:
    """The masters are parameters like others; the FP8 weight follows them."""
    _, stored = pair(recipe)
    optimizer = torch.optim.AdamW(stored.parameters(), lr=3e-3)
    x, target = torch.randn(32, K), torch.randn(32, N)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = (stored(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    stored(x)
    again = cast_reference(stored.weight_master.detach(), stored_weight(stored).scaling)
    assert torch.equal(again.codes.view(torch.uint8), stored.weight.detach().view(torch.uint8))
    assert torch.equal(again.scale, stored.weight_scale)


def test_small_steps_are_not_lost() -> None:
    """Steps below half a code of FP8 add up in the master until the code changes."""
    _, stored = pair("tensorwise")
    optimizer = torch.optim.SGD([stored.weight_master], lr=1.0)
    before = decode_scaled(stored_weight(stored))
    for _ in range(100):
        stored.weight_master.grad = 1e-3 * before
        optimizer.step()
    stored(torch.randn(2, K))
    after = decode_scaled(stored_weight(stored))
    assert 0.85 < float(after.norm() / before.norm()) < 0.95


def test_a_frozen_weight_has_no_master() -> None:
    layer, _ = pair("tensorwise")
    layer.weight.requires_grad_(False)
    stored = Fp8Linear.from_linear(layer, recipe=layer.recipe, fp8_param=True)
    assert stored.weight_master is None
    assert sorted(stored.state_dict()) == ["bias", "weight"]
    x = torch.randn(4, K, requires_grad=True)
    stored(x).sum().backward()
    torch.testing.assert_close(x.grad, decode_scaled(stored_weight(stored)).sum(0).expand(4, K), rtol=0.1, atol=0.5)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_a_frozen_weight_comes_back_code_for_code_from_the_type_it_had(recipe) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(K, N, dtype=torch.bfloat16).requires_grad_(False)
    stored = Fp8Linear.from_linear(plain, recipe=Fp8Recipe(recipe), fp8_param=True)
    codes, state = stored.weight.view(torch.uint8).clone(), stored.state_dict()
    assert state["weight"].dtype == torch.bfloat16
    other = Fp8Linear(K, N, recipe=Fp8Recipe(recipe), fp8_param=True, dtype=torch.bfloat16)
    other.load_state_dict(state)
    assert torch.equal(other.weight.view(torch.uint8), codes)


def test_a_step_between_forward_and_backward_is_refused() -> None:
    _, stored = pair("tensorwise")
    first = stored(torch.randn(4, K)).sum()
    with torch.no_grad():
        stored.weight_master.mul_(2)
    stored(torch.randn(4, K))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.backward()


def test_a_state_dict_goes_there_and_back() -> None:
    _, stored = pair("blockwise")
    torch.manual_seed(5)
    other = Fp8Linear(K, N, recipe=Fp8Recipe("blockwise"), fp8_param=True)
    assert {name: one.dtype for name, one in stored.state_dict().items()} == {
        "weight": torch.float32,
        "bias": torch.float32,
    }
    other.load_state_dict(stored.state_dict())
    x = torch.randn(4, K)
    assert torch.equal(other(x), stored(x))
    assert torch.equal(other.weight_master, stored.weight_master)
    codes = {"weight": stored.weight, "weight_scale": stored.weight_scale, "bias": stored.bias}
    other.load_state_dict(codes)  # as an earlier version saved it, here without masters
    assert torch.equal(other.weight_master, decode_scaled(stored_weight(stored)))


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("strict", [True, False])
def test_a_checkpoint_of_a_plain_linear_loads(trained, strict) -> None:
    torch.manual_seed(0)
    plain, other = (nn.Linear(32, 32, dtype=torch.bfloat16).requires_grad_(trained) for _ in range(2))
    how = {"recipe": Fp8Recipe("tensorwise"), "fp8_param": True}
    layer, expected = Fp8Linear.from_linear(other, **how), Fp8Linear.from_linear(plain, **how)
    layer.load_state_dict(plain.state_dict(), strict=strict)
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    assert torch.equal(layer(x), expected(x))
    assert not trained or torch.equal(layer.weight_master, plain.weight.float())


@pytest.mark.parametrize("scaling", ["tensor", "128x128"])
def test_the_transpose_of_codes_is_the_cast_of_the_transpose(scaling) -> None:
    w = torch.randn(256, 384)
    result, expected = transposed(cast_reference(w, scaling)), cast_reference(w.t(), scaling)
    assert torch.equal(result.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(result.scale, expected.scale)
    assert result.scale.stride() == expected.scale.stride()


def test_refusals() -> None:
    with pytest.raises(Fp8LayerError, match="by tensorwise or blockwise, got rowwise"):
        Fp8Linear(K, N, recipe=Fp8Recipe("rowwise"), fp8_param=True)
    mixed = GemmChoice("tensorwise", "blockwise", "bf16")
    with pytest.raises(Fp8LayerError, match="got blockwise, tensorwise"):
        Fp8Linear(K, N, recipe=Fp8Recipe("tensorwise"), gemms=mixed, fp8_param=True)
    _, stored = pair("tensorwise")
    with pytest.raises(Fp8LayerError, match="move such a layer with"):
        stored.to(torch.bfloat16)(torch.randn(4, K))
