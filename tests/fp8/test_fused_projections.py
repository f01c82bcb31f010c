"""Projections fused into one layer: parts, once each, for the right input; names in state dicts."""

from __future__ import annotations

import copy

import pytest
import safetensors.torch as safetensors_torch
import torch
from torch import nn

from bitplan.fp8.fused_projections import FusedPart, FusedProjections, NormTakenOver, keep_names
from bitplan.fp8.layer_settings import Fp8LayerError


class Counting(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def fused():
    torch.manual_seed(0)
    head = FusedProjections(Counting(4, 9, bias=False), (4, 3, 2))
    return head, FusedPart(head, 1), FusedPart(head, 2)


def test_one_product_for_all_parts():
    head, second, third = fused()
    x = torch.randn(5, 4)
    parts = head(x), second(x), third(x)
    assert head.fused.calls == 1
    assert torch.equal(torch.cat(parts, -1), nn.functional.linear(x, head.fused.weight))
    assert not head.shared.is_waiting  # no activation outlives the forward


@pytest.mark.parametrize("order", [(1, 2), (2, 1), (1, 1), (2, 2)])
def test_any_order_and_twice(order):
    head, *rest = fused()
    x = torch.randn(5, 4)
    expected = nn.functional.linear(x, head.fused.weight).split((4, 3, 2), -1)
    head(x)
    for index in order:
        assert torch.equal(rest[index - 1](x), expected[index])
    assert head.fused.calls == (1 if order[0] != order[1] else 2)


def test_another_input_is_never_given_the_kept_part():
    head, second, _ = fused()
    x, other = torch.randn(5, 4), torch.randn(5, 4)
    head(x)
    assert torch.equal(second(other), nn.functional.linear(other, head.fused.weight)[:, 4:7])
    assert torch.equal(second(x), nn.functional.linear(x, head.fused.weight)[:, 4:7])


@pytest.mark.parametrize("change", ["input", "weight", "gradients", "thread"])
def test_a_part_of_another_state_is_never_given(change):
    head, second, _ = fused()
    x = torch.randn(5, 4)
    with torch.no_grad():
        head(x)
        if change == "input":
            x.mul_(3)
        elif change == "weight":
            head.fused.weight.mul_(3)
        elif change == "thread":  # another one calls the head on its own input meanwhile
            head(torch.randn(5, 4))
    part = second(x)
    assert part.requires_grad  # the kept one was made without gradients
    assert torch.equal(part, nn.functional.linear(x, head.fused.weight)[:, 4:7])


def test_one_projection_of_several_is_not_frozen_in_silence():
    head, second, _ = fused()
    for each in (head, second):
        with pytest.raises(Fp8LayerError, match="freeze before apply_fp8"):
            each.requires_grad_(False)
    nn.ModuleList([head, second]).requires_grad_(False)
    assert not head.fused.weight.requires_grad
    norm = nn.LayerNorm(4)
    NormTakenOver(norm).requires_grad_(False)
    assert not norm.weight.requires_grad


def test_what_cannot_work_is_refused_with_what_to_do():
    head, second, _ = fused()
    with pytest.raises(Fp8LayerError, match="train with DistributedDataParallel"):
        second._replicate_for_data_parallel()
    head.fused.base_layer = nn.Linear(4, 9)  # as an adapter of peft has it
    with pytest.raises(Fp8LayerError, match="make adapters first"):
        head(torch.randn(5, 4))


def test_without_the_head_being_called():
    head, second, _ = fused()
    x = torch.randn(5, 4)
    assert torch.equal(second(x), nn.functional.linear(x, head.fused.weight)[:, 4:7])


def test_weights_can_be_looked_at():
    head, second, third = fused()
    assert [tuple(each.weight.shape) for each in (head, second, third)] == [(4, 4), (3, 4), (2, 4)]
    assert torch.equal(third.weight, head.fused.weight[7:])
    assert [name for name, _ in second.named_parameters()] == []


def test_a_copy_has_its_own_head_and_no_activations():
    model = nn.ModuleDict(dict(zip("abc", fused(), strict=True)))
    model["a"](torch.randn(5, 4))
    other = copy.deepcopy(model)
    assert other["b"]._head[0] is other["a"]
    assert not other["a"].shared.is_waiting


def test_offloading_by_accelerate_is_refused_with_what_to_do():
    accelerate = pytest.importorskip("accelerate")
    head, second, _ = fused()
    model = nn.ModuleList([head, second])
    accelerate.cpu_offload(model, execution_device="cpu")
    with pytest.raises(Fp8LayerError, match="does not find weights that apply_fp8 has joined"):
        head(torch.randn(5, 4))


def test_names_are_kept_with_rows_and_without():
    head, second, third = fused()
    model = nn.ModuleDict({"a": head, "b": second, "c": third, "norm": NormTakenOver(nn.Identity())})
    keep_names(model)
    outer = nn.ModuleDict({"model": model})
    state = outer.state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        "model.a.weight": (4, 4),
        "model.b.weight": (3, 4),
        "model.c.weight": (2, 4),
    }
    new = {name: torch.randn_like(tensor) for name, tensor in state.items()}
    outer.load_state_dict(new)
    assert torch.equal(head.fused.weight, torch.cat(list(new.values())))
    result = outer.load_state_dict({name: new[name] for name in list(new)[:2]}, strict=False)
    assert result.missing_keys == ["model.a.fused.weight"]  # a part that is missing is not made up


def test_parts_in_a_state_dict_have_storages_of_their_own(tmp_path):
    head, second, third = fused()
    model = nn.ModuleDict({"a": head, "b": second, "c": third})
    keep_names(model)
    state = model.state_dict()
    storages = [each.untyped_storage() for each in state.values()]
    assert [each.nbytes() for each in storages] == [64, 48, 32]  # else accelerate saves one of the three alone
    version = head.fused.weight._version
    state["b.weight"].zero_()  # and they are still the model's own memory
    assert not head.fused.weight[4:7].any()
    assert head.fused.weight._version > version
    safetensors_torch.save_model(model, str(tmp_path / "model.safetensors"))
    saved = safetensors_torch.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], one) for name, one in state.items())


def test_parts_with_the_rows_of_others_are_refused():
    """As many rows in all, but those of two parts are exchanged."""
    head, second, third = fused()
    model = nn.ModuleDict({"a": head, "b": second, "c": third})
    keep_names(model)
    state, before = model.state_dict(), head.fused.weight.detach().clone()
    state = {"a.weight": state["a.weight"] + 1, "b.weight": state["c.weight"], "c.weight": state["b.weight"]}
    message = r"size mismatch for b.weight: it has 3 rows here, and shape \(2, 4\) in the checkpoint"
    with pytest.raises(RuntimeError, match=message):
        model.load_state_dict(state, strict=False)
    assert torch.equal(head.fused.weight, before)
