"""Quick calls on a CPU: they run where nothing has changed but an input's numbers, and give way to what has."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("numba")

from bitplan.formats import Encoded
from bitplan.formats.dispatch import decode
from bitplan.packed import bound_calls, quant_linear
from bitplan.packed.bound_calls import QUICK
from bitplan.packed.fused_projections import JointProjection
from bitplan.packed.packed_weight import PackedWeight
from bitplan.packed.product_strategy import LayerError
from bitplan.packed.products import cpu_fused
from bitplan.packed.quant_linear import QuantLinear
from tests.packed.linear_samples import normal, packed

pytestmark = pytest.mark.skipif(
    cpu_fused.why_not_ours(packed("int8_row", 64, 128)) is not None, reason="no fused kernel of ours on this CPU"
)


def prepared(name: str = "int8_row", *, bias: bool = False, **options: Any) -> QuantLinear:
    """A layer that has a quick call for inputs [1, 1, 128] without a gradient."""
    layer = QuantLinear(packed(name, 64, 128), normal(64, seed=1) if bias else None, **options)
    with torch.no_grad():
        layer(normal(1, 1, 128))
        layer(normal(1, 1, 128))
    return layer


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A word for each product that a quick call ran."""
    ran: list[str] = []
    make = bound_calls.quick_product

    def counted(call: Any, shape: tuple[int, ...]) -> Any:
        product = make(call, shape)

        def run(x: Tensor) -> Tensor | None:
            ran.append("quick")
            return None if product is None else product(x)

        return None if product is None else run

    monkeypatch.setattr(bound_calls, "quick_product", counted)
    return ran


def right(layer: QuantLinear, x: Tensor) -> Tensor:
    """What a layer that has never run gives."""
    made: Tensor = copy.deepcopy(layer)(x)
    return made


@pytest.mark.parametrize("inputs", [None, "int8"])
@pytest.mark.parametrize("name", ["int8_row", "q4_0_gguf", "q5_1_gguf"])
def test_the_third_call_is_quick_and_gives_the_same_numbers(name: str, inputs: str | None, quick: list[str]) -> None:
    layer = prepared(name, inputs=inputs)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            x = normal(1, 1, 128, seed=3)
            expected = right(layer, x)
            layer(x)  # an inference tensor is another kind of input
            quick.clear()
            assert torch.equal(layer(x), expected)
            assert torch.equal(layer(2 * x), right(layer, 2 * x))
        assert quick == ["quick"] * 2


def test_products_with_more_than_bytes_in_them_have_no_quick_call(quick: list[str]) -> None:
    layer = prepared("nvfp4")
    assert layer._bound
    assert layer._bound.get(QUICK) is None
    with torch.no_grad():
        layer.weight.get_buffer("base").mul_(2)  # in the product's constants
        assert torch.equal(layer(normal(1, 1, 128)), right(layer, normal(1, 1, 128)))
    assert not quick


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Decoded products on a pretended GPU, bound as there; the rows of each one."""
    ran: list[int] = []

    def bind(encoded: Encoded, dtype: torch.dtype, compute: Any, bias: Tensor | None) -> Any:
        def product(x: Tensor, _shape: Any = None) -> Tensor:
            ran.append(x.numel() // x.shape[-1])
            made: Tensor = compute(x, decode(encoded, dtype), bias)
            return made

        return product

    monkeypatch.setattr(quant_linear, "bind_with_numbers", bind)
    return ran


def of_decoded(*, bias: bool = False) -> QuantLinear:
    layer = prepared(bias=bias, strategy="decode")
    assert layer._bound.get(QUICK) is not None
    return layer


def test_a_decoded_weight_has_one_quick_call_for_all_rows_of_a_pick(decoded: list[int]) -> None:
    layer = of_decoded()
    with torch.no_grad():
        layer(normal(1, 5, 128))
        layer(normal(1, 5, 128))
        quick = layer._bound[QUICK]
        for rows, is_quick in ((5, True), (8, True), (7, True), (4, False), (9, False), (0, False)):
            x, turned = normal(1, rows, 128), normal(1, 128, rows).mT
            decoded.clear()
            assert (quick(x) is not None) == (quick(turned) is not None) == is_quick, rows
            assert decoded == [rows, rows] * is_quick
            assert torch.equal(layer(x), right(layer, x))
        assert quick(normal(5, 128)) is quick(normal(1, 5, 64)) is quick(normal(1, 5, 128).double()) is None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert quick(normal(1, 5, 128)) is None
    x = nn.Parameter(normal(1, 1, 128))
    layer(x).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("strategy", ["decode", "fp8"])
def test_a_quick_call_of_parts_notices_what_changes(decoded: list[int], strategy: str) -> None:  # noqa: ARG001
    for change in CHANGES:
        layer, x = prepared(bias=True), normal(1, 1, 128)
        calls: list[str] = []

        def numbers(x: Tensor, _shape: Any, layer: QuantLinear = layer, calls: list[str] = calls) -> Tensor:
            calls.append("quick")
            return torch.nn.functional.linear(x, decode(layer.weight.encoded), layer.bias)

        picked = layer.explain(1)
        call = bound_calls.bound_call(numbers, (1, 1, 64), layer, replace(picked, strategy=strategy))
        with torch.no_grad():
            quick = call.quick_for(layer, x)
            assert quick is not None
            assert quick(x) is not None
            change(layer)
            calls.clear()
            keeps = change in (_write_bias, _round_inputs) or (strategy == "decode" and change is _write_part)
            assert (quick(x) is not None) == keeps, change
            assert bool(calls) == keeps


def _set_part(layer: QuantLinear) -> None:
    layer.weight.data = layer.weight.data.flip(0).contiguous()


def _set_part_unseen(layer: QuantLinear) -> None:
    layer.weight._buffers["scales"] = layer.weight.scales * 2


def _write_part(layer: QuantLinear) -> None:
    layer.weight.data[3:9].zero_()


def _set_weight(layer: QuantLinear) -> None:
    layer.weight = PackedWeight(packed("int8_row", 64, 128, seed=9))


def _set_weight_unseen(layer: QuantLinear) -> None:
    layer._modules["weight"] = PackedWeight(packed("int8_row", 64, 128, seed=9))


def _set_bias(layer: QuantLinear) -> None:
    layer.bias = nn.Parameter(torch.ones(64))


def _move_bias(layer: QuantLinear) -> None:
    assert layer.bias is not None
    layer.bias.data = layer.bias.data + 1


def _write_bias(layer: QuantLinear) -> None:
    assert layer.bias is not None
    layer.bias.mul_(2)


def _share(layer: QuantLinear) -> None:
    """Moves storages into shared memory, in place, as sending a model to another process does."""
    layer.share_memory()


def _load(layer: QuantLinear) -> None:
    layer.load_state_dict(QuantLinear(packed("int8_row", 64, 128, seed=9), layer.bias).state_dict())


def _round_inputs(layer: QuantLinear) -> None:
    layer.inputs = "int8"


CHANGES = [
    _set_part,
    _set_part_unseen,
    _write_part,
    _set_weight,
    _set_weight_unseen,
    _set_bias,
    _move_bias,
    _write_bias,
    _share,
    _load,
    _round_inputs,
]


@pytest.mark.parametrize("strategy", ["auto", "decode"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_is_noticed(
    change: Callable[[QuantLinear], None],
    strategy: str,
    decoded: list[int],  # noqa: ARG001
) -> None:
    layer, x = prepared(bias=True, strategy=strategy), normal(1, 1, 128)
    with torch.no_grad():
        before = layer(x)
        assert layer._bound[QUICK] is not None
        change(layer)
        overwritten = [torch.full((64, 128), 7, dtype=torch.uint8) for _ in range(8)]  # memory that was freed
        expected = right(layer, x)
        assert torch.equal(before, expected) == (change is _share)
        for _ in range(3):
            assert torch.equal(layer(x), expected)
    assert overwritten


@pytest.mark.parametrize("change", [change for change in CHANGES if "bias" not in change.__name__])
@pytest.mark.parametrize("member", [0, 1])
def test_what_changes_in_one_of_joined_layers_is_noticed(member: int, change: Callable[[QuantLinear], None]) -> None:
    layers = [QuantLinear(packed("int8_row", 64, 128, seed=seed)) for seed in range(2)]
    JointProjection(layers, "joined")
    with torch.no_grad():
        for seed in range(3):
            x = normal(1, 1, 128, seed=seed)
            before = [layer(x) for layer in layers]
        assert all(layer._bound.get(QUICK) is not None for layer in layers)
        change(layers[member])
        overwritten = [torch.full((128, 128), 7, dtype=torch.uint8) for _ in range(8)]
        alone = [QuantLinear(layer.weight.encoded, layer.bias, inputs=layer.inputs) for layer in layers]
        for seed in range(2, 5):
            x = normal(1, 1, 128, seed=seed)
            made = [layer(x) for layer in layers]
            assert all(torch.equal(one, layer(x)) for one, layer in zip(made, alone, strict=True))
            if seed == 2:
                assert torch.equal(made[member], before[member]) == (change is _share)
    assert overwritten


def test_joined_layers_have_quick_calls_until_their_inputs_differ(quick: list[str]) -> None:
    layers = [QuantLinear(packed("int8_row", 64, 128, seed=seed)) for seed in range(2)]
    alone = [copy.deepcopy(layer) for layer in layers]
    JointProjection(layers, "joined")
    with torch.no_grad():
        for seed in range(4):
            x = normal(1, 1, 128, seed=seed)
            assert all(torch.equal(layer(x), one(x)) for layer, one in zip(layers, alone, strict=True))
        assert "quick" in quick
        x = normal(1, 1, 128)
        layers[0](x)
        x.mul_(2)  # the second layer's part is of other numbers
        assert torch.equal(layers[1](x), alone[1](x))
        for seed in range(12):
            x, other = normal(1, 1, 128, seed=seed), normal(1, 1, 128, seed=100 + seed)
            assert torch.equal(layers[0](x), alone[0](x))
            assert torch.equal(layers[1](other), alone[1](other))
        assert all(layer._bound.get(QUICK) is None for layer in layers)


class _Passing(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "x",
    [
        normal(1, 1, 128).bfloat16(),
        normal(1, 1, 128).double(),
        normal(1, 1, 256)[..., ::2],
        normal(128),
        normal(2, 1, 128),
        nn.Parameter(normal(1, 1, 128)),
    ],
    ids=["bfloat16", "float64", "gaps", "one axis", "two rows", "learns"],
)
def test_other_inputs_take_other_paths(x: Tensor, quick: list[str]) -> None:
    layer, like = prepared(), normal(1, 1, 128)
    quick.clear()
    made = layer(x)
    assert not quick
    assert torch.allclose(made.double(), x.double() @ decode(layer.weight.encoded).double().T, rtol=1e-2, atol=1e-2)
    assert made.dtype == x.dtype
    assert made.requires_grad == x.requires_grad
    with torch.no_grad():
        assert torch.equal(layer(like), right(layer, like))


def test_modes_and_transforms_take_other_paths(quick: list[str]) -> None:
    layer, x = prepared(), normal(1, 1, 128)
    quick.clear()
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        with _Passing():  # type: ignore[no-untyped-call]
            layer(x)
        assert torch.func.vmap(layer)(normal(3, 1, 128)).shape == (3, 1, 64)
        assert not quick
        layer(x)  # finds the bound call again, and makes a quick one
        layer(x)
        assert quick == ["quick"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, as it enters a dual level
def test_tangents_are_refused_by_a_layer_with_a_quick_call() -> None:
    layer, x = prepared(), normal(1, 1, 128)
    with torch.no_grad(), forward_ad.dual_level(), pytest.raises(LayerError, match="forward-mode derivatives"):
        layer(forward_ad.make_dual(x, torch.ones_like(x)))


def test_a_bias_that_learns_gets_its_gradient() -> None:
    layer, x = prepared(bias=True), normal(1, 1, 128)
    layer(x).sum().backward()
    assert layer.bias is not None
    assert layer.bias.grad is not None
    assert torch.equal(layer.bias.grad, torch.ones(64))


def test_the_last_pick_is_that_of_the_last_call() -> None:
    layer, one, many = prepared(), normal(1, 1, 128), normal(1, 40, 128)
    with torch.no_grad():
        for x in (one, many, many, one, many, one):
            layer(x)
            assert layer.last_pick == layer.explain(x.shape[1])
