"""Joined projections: the product of all in one launch, with the numbers and the state of separate layers."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from bitplan.packed import fused_projections, product_strategy, quant_linear
from bitplan.packed import linear_operator as operator
from bitplan.packed.fused_projections import MOST_UNCLAIMED, JointLinear, fuse_projections
from bitplan.packed.products.fused import TritonOnCuda
from bitplan.packed.quant_linear import QuantLinear
from tests.packed import linear_samples
from tests.packed.linear_samples import packed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*shape: int) -> Tensor:
    return linear_samples.normal(*shape).to(DEVICE)


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = TritonOnCuda()
    for module in (product_strategy, quant_linear, operator, fused_projections):
        monkeypatch.setattr(module, "fused_for", lambda _device, _input=None: kernel)


class Attention(nn.Module):
    def __init__(self, name: str, way: str = "fused") -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (
            QuantLinear(packed(name, outputs, 128, seed=seed), strategy=way)
            for seed, outputs in enumerate((32, 16, 16))
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)


@pytest.mark.parametrize("name", ["nvfp4", pytest.param("int8_row", marks=pytest.mark.long)])
def test_joined_projections_give_the_numbers_and_the_state_of_separate_ones(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = nn.Sequential(Attention(name)).to(DEVICE), normal(1, 3, 128).bfloat16()
    expected, state = model[0](x), {key: part.clone() for key, part in model.state_dict().items()}
    assert fuse_projections(model) == ["0.q_proj+k_proj+v_proj"]
    assert fuse_projections(model) == []  # they are joined already
    calls = []
    right = JointLinear._forward
    monkeypatch.setattr(JointLinear, "_forward", lambda self, x: (calls.append(self.name), right(self, x))[1])
    with torch.no_grad():
        assert torch.equal(model[0](x), expected)
        assert torch.equal(torch.compile(model[0], backend="eager", fullgraph=True)(x), expected)
    assert calls == ["0.q_proj+k_proj+v_proj"]
    after = model.state_dict()
    assert after.keys() == state.keys()
    assert all(
        torch.equal(after[key].view(torch.uint8), part.view(torch.uint8)) for key, part in state.items() if part.dim()
    )
    data = [layer.weight.data for layer in (model[0].q_proj, model[0].k_proj)]
    assert data[0].untyped_storage().data_ptr() == data[1].untyped_storage().data_ptr()


def test_prompts_that_run_apart_do_not_end_the_joined_product_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats with a factor of their own are decoded one by one, as prompts are, and multiplied together by tokens."""
    model = Attention("fp4_u8_g128").to(DEVICE)
    fuse_projections(model)
    products = []
    joined = JointLinear._forward
    monkeypatch.setattr(JointLinear, "_forward", lambda self, x: (products.append(len(x)), joined(self, x))[1])
    monkeypatch.setattr(JointLinear, "runs_joined", lambda _self, rows, _dtype: rows == 1)
    with torch.inference_mode():
        for _ in range(MOST_UNCLAIMED + 1):
            model(normal(2, 128).bfloat16())
        assert products == []
        model(normal(1, 128).bfloat16())
    assert products == [1]


def test_joined_layers_keep_one_copy_of_bytes_and_scales() -> None:
    model, kernel = Attention("int4_g32").to(DEVICE), TritonOnCuda()
    fuse_projections(model)
    layers = (model.q_proj, model.k_proj, model.v_proj)
    for layer in layers:
        layer.weight._apply(torch.clone)  # samples are shared between tests
    before = [weakref.ref(part) for layer in layers for part in layer.weight.buffers()]
    with torch.inference_mode():
        model(normal(1, 128).bfloat16())
    gc.collect()
    assert [part() for part in before] == [None] * len(before)
    joint = layers[0].joint.layer
    same = [a.data_ptr() == b.data_ptr() for a, b in zip(joint.prepared(kernel), joint._prepared, strict=True)]
    assert same == [True, True, False]  # scales, factors, and counters, of which each stream has its own


def test_what_changes_is_seen_and_a_gradient_runs_each_layer_alone() -> None:
    model, x = Attention("mxfp4").to(DEVICE), normal(2, 128).bfloat16()
    fuse_projections(model)
    other = Attention("mxfp4").to(DEVICE)
    other.load_state_dict(
        {key: part.flip(0) if key.endswith("data") else part for key, part in model.state_dict().items()}
    )
    twin = copy.deepcopy(model)
    with torch.no_grad():
        before = model(x)
        assert torch.equal(twin(x), before)
        model.load_state_dict(other.state_dict())
        after = other(x)
        assert torch.equal(model(x), after)
        assert torch.equal(twin(x), before)
        x.mul_(2)  # and so is every product, to the bit
        assert torch.equal(model(x), 2 * after)
        model.k_proj.strategy = "decode"
        torch.testing.assert_close(model(x), 2 * after, rtol=0.02, atol=0.1)
    y = twin(x.requires_grad_())
    assert y.grad_fn is not None


def test_layers_that_differ_stay_alone() -> None:
    model = Attention("mxfp4")
    model.v_proj = QuantLinear(packed("nvfp4", 16, 128), strategy="fused")
    assert fuse_projections(model) == ["q_proj+k_proj"]
    model = Attention("mxfp4")
    model.v_proj = QuantLinear(packed("mxfp4", 16, 128), normal(16), strategy="fused")
    assert fuse_projections(model) == ["q_proj+k_proj"]


class Wired(nn.Module):
    """Names of a llama's attention that say nothing: k and v read what q makes; two others read one input."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.c_fc = (
            QuantLinear(packed("mxfp4", 128, 128, seed=seed), strategy="fused") for seed in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x)
        return self.k_proj(q) + self.v_proj(2 * q) + self.c_fc(x)


def test_the_input_decides_what_is_joined_and_no_name() -> None:
    assert fuse_projections(Wired()) == ["q_proj+c_fc"]
    wrapped = nn.ModuleList([Wired()])
    with pytest.raises(ValueError, match=r"no input was found .* give one: .*example"):
        fuse_projections(wrapped)
