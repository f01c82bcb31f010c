"""PackedWeight: moves and loads whole or not at all, and nothing that was made from it outlives it."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

import bitplan
from bitplan.base.errors import BitplanError, StoreError
from bitplan.packed.packed_weight import PackedWeight
from tests.packed.linear_samples import FORMATS, packed


class Listener:
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def drop(self, token: int) -> None:
        self.tokens.append(token)


def parts(weight: PackedWeight) -> bytes:
    return weight.encoded.to_bytes()


@pytest.mark.parametrize("name", FORMATS)
def test_casts_of_the_model_leave_the_bytes_alone(name: str) -> None:
    model = nn.Sequential(PackedWeight(packed(name)))
    before, state = parts(model[0]), model[0].state
    model.half().bfloat16().double().to(torch.float16)
    assert parts(model[0]) == before
    assert model[0].state == state  # nothing was moved, so what was made of it is still good


def test_a_cast_that_would_change_bytes_is_refused() -> None:
    with pytest.raises(StoreError, match="mxfp4 weights are bytes"):
        PackedWeight(packed("mxfp4")).type(torch.float32)


def test_moving_drops_what_was_made_and_tells() -> None:
    weight, listener = PackedWeight(packed("mxfp4")), Listener()
    weight.add_listener(listener)
    weight.add_listener(listener)  # once is enough
    weight.derived("sum", lambda: torch.ones(3))
    assert weight.derived_nbytes == 12
    weight._apply(torch.clone)  # another place
    assert weight.derived_nbytes == 0
    assert listener.tokens == [weight.token]


def test_derived_is_made_once_per_state() -> None:
    weight, made = PackedWeight(packed("int8_row")), []

    def make() -> torch.Tensor:
        made.append(1)
        return torch.ones(1)

    assert weight.derived("a", make) is weight.derived("a", make)
    assert len(made) == 1
    weight.derived("b", make, keep=False)
    weight.derived("b", make)
    assert len(made) == 3
    assert isinstance(weight.scales, torch.Tensor)
    weight.scales.mul_(2)  # written in place: only torch's own count tells
    weight.derived("a", make)
    assert len(made) == 4


def test_weights_made_in_inference_mode_work() -> None:
    with torch.inference_mode():
        weight = PackedWeight(packed("mxfp4"))
        assert weight.state == weight.state
        assert weight.derived("a", lambda: 1) == 1


def test_a_weight_that_is_gone_is_told() -> None:
    weight, listener = PackedWeight(packed("mxfp4")), Listener()
    weight.add_listener(listener)
    token = weight.token
    del weight
    gc.collect()
    assert listener.tokens == [token]


def test_a_copy_is_a_weight_of_its_own() -> None:
    weight, listener = PackedWeight(packed("nvfp4")), Listener()
    weight.add_listener(listener)
    weight.derived("a", lambda: torch.ones(1))
    twin = copy.deepcopy(weight)
    assert parts(twin) == parts(weight)
    assert twin.token != weight.token
    assert twin.derived_nbytes == 0
    twin._apply(torch.clone)
    assert listener.tokens == []


@pytest.mark.cross("name", FORMATS)
@pytest.mark.cross("assign", [False, True])
def test_state_round_trip(name: str, assign: bool) -> None:
    source, target, listener = PackedWeight(packed(name, seed=0)), PackedWeight(packed(name, seed=5)), Listener()
    target.add_listener(listener)
    before = target.state
    target.load_state_dict(source.state_dict(), assign=assign)
    assert parts(target) == parts(source)
    assert target.state != before
    assert set(listener.tokens) == {target.token}


def test_every_entry_of_the_state_is_a_tensor_so_that_safetensors_can_hold_it() -> None:
    state = PackedWeight(packed("nvfp4")).state_dict()
    assert set(state) == {"data", "scales", "base", "_extra_state"}
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    assert bytes(state["_extra_state"].tolist()) == b'{"format": "nvfp4", "shape": [48, 256]}'


def without(state: dict[str, torch.Tensor], key: str) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if name != key}


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (lambda _: PackedWeight(packed("int4_g32")).state_dict(), "expected mxfp4 .* holds int4_g32"),
        (lambda _: PackedWeight(packed("mxfp4", rows=32)).state_dict(), r"\[48, 256\].*\[32, 256\]"),
        (lambda s: s | {"scales": s["scales"][:1]}, r"'scales' of mxfp4 must be torch.uint8 \(48, 8\)"),
        (lambda s: s | {"data": s["data"].view(torch.int8)}, "'data' of mxfp4 must be torch.uint8"),
        (lambda s: s | {"data": torch.empty(48, 128, dtype=torch.uint8, device="meta")}, "on meta"),
        (lambda s: without(s, "scales"), "'scales' is missing"),
        (lambda s: without(s, "_extra_state"), "which says their format"),
        (lambda s: s | {"_extra_state": {"format": "mxfp4"}}, "uint8 tensor, got dict"),
        (lambda s: s | {"_extra_state": torch.tensor([123], dtype=torch.uint8)}, "not valid JSON"),
        (lambda s: s | {"_extra_state": torch.zeros(2**17, dtype=torch.uint8)}, "too long"),
        (lambda s: s | {"_extra_state": torch.tensor(list(b"[1]"), dtype=torch.uint8)}, "must be an object"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_state_that_does_not_fit_is_refused_and_nothing_is_copied(state, said: str, strict: bool) -> None:
    weight = PackedWeight(packed("mxfp4"))
    before = parts(weight)
    with pytest.raises(RuntimeError, match=said):
        weight.load_state_dict(state(PackedWeight(packed("mxfp4", seed=9)).state_dict()), strict=strict)
    assert parts(weight) == before


def test_a_state_without_this_weight_is_missing_keys() -> None:
    weight = PackedWeight(packed("mxfp4"))
    assert set(weight.load_state_dict({}, strict=False).missing_keys) == {"data", "scales", "_extra_state"}
    with pytest.raises(RuntimeError, match="Missing key"):
        weight.load_state_dict({})


def test_a_weight_says_it_is_bytes() -> None:
    """Adapters (peft) take the type of numbers from a weight, and must not take that of codes, which may be float8."""
    assert PackedWeight(packed("fp8_e4m3_row")).dtype == torch.uint8


def test_the_longest_description_of_a_format_is_read() -> None:
    weight = PackedWeight(packed("mxfp4"))
    state = weight.state_dict()
    said = bytes(state["_extra_state"].tolist()).ljust(2**16)
    weight.load_state_dict(state | {"_extra_state": torch.tensor(list(said), dtype=torch.uint8)})
    longer = torch.tensor(list(said + b" "), dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="of 65537 bytes is too long"):
        weight.load_state_dict(state | {"_extra_state": longer})


def test_code_that_multiplies_by_a_packed_weight_is_told_to_keep_it() -> None:
    weight = PackedWeight(packed("int8_row", 64, 64))
    said = r"got a weight of shape \(64, 64\) in int8_row: the model's code reads this weight itself.*keep=.NAME"
    with pytest.raises(StoreError, match=said):
        weight @ torch.ones(64, 1)
    with pytest.raises(StoreError, match=said):
        torch.nn.functional.linear(torch.ones(1, 64), weight)  # type: ignore[arg-type]
    for compute in (
        lambda: weight * 2,
        lambda: 2 - weight,
        lambda: -weight,
        lambda: weight[0],
        lambda: weight.t(),
        lambda: weight.norm(),
    ):
        with pytest.raises(StoreError, match=said):
            compute()
    assert not hasattr(weight, "t")
    assert weight.data.dtype == torch.int8


def test_the_error_of_a_weight_that_is_read_directly_can_be_pasted() -> None:
    """Of layers in a model, where no run shows it: what reads them is outside of the model."""
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(64, 64)})
    bitplan.apply_plan(model, {"head.weight": "int8_row"}, match="common")
    head: Any = model["head"]
    with pytest.raises(BitplanError, match=r"^head.weight: arithmetic got .*\(keep='head.weight'\)$"):
        head.weight @ torch.ones(64, 1)
    with pytest.raises(BitplanError, match=r"got torch.uint8, the type of a packed.*\(keep='head.weight'\)$"):
        head(torch.ones(1, 64).to(head.weight.dtype))
