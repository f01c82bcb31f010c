"""The filter for torchao and the decision for TransformerEngine's classes, neither of which is installed here."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from torch import nn

from bitplan.fp8.other_libraries import torchao_filter, transformer_engine_decision, transformer_engine_kind
from bitplan.fp8.policy.merge import merge_reports
from bitplan.fp8.policy.vocabulary import Fp8Error
from tests.fp8.policy.fp8_samples import experts, report, series


class Attention(nn.Module):
    def __init__(self, sizes=(64, 32, 32)):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, size, bias=False) for size in sizes)
        self.o_proj = nn.Linear(sizes[0], 64, bias=False)

    def forward(self, x):
        q, k, v = (each(x).unflatten(-1, (-1, 8)).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.self_attn = Attention(*sizes)

    def forward(self, x):
        return x + self.self_attn(x)


class Model(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.layers = nn.ModuleList([Block(*sizes) for _ in range(2)])
        self.lm_head = nn.Linear(64, 100, bias=False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def policy():
    qkv = {"part": "llm", "kind": "layernorm_column", "name": "qkv", "shape": (128, 64), "tp": 1}
    proj = {"part": "llm", "kind": "row", "name": "proj", "shape": (64, 64), "tp": 1}
    rows = series({512: 1.3, 1024: 1.4}, **qkv) + series({512: 0.8, 1024: 1.2}, **proj)
    return merge_reports([report(rows, recipe="tensorwise")]).policy


@pytest.mark.parametrize(
    ("tokens", "names"),
    [
        (512, {"q_proj", "k_proj", "v_proj"}),
        (1024, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        (256, set()),
        (2048, {"q_proj", "k_proj", "v_proj", "o_proj"}),  # estimated, as apply_fp8 does
        (2049, set()),
        (768, {"q_proj", "k_proj", "v_proj", "o_proj"}),
    ],
)
def test_torchao_takes_what_wins(tokens, names):
    model = Model()
    takes = torchao_filter(model, policy(), tokens=tokens)
    taken = {path for path, module in model.named_modules() if takes(module, path)}
    assert taken == {f"layers.{block}.self_attn.{name}" for block in (0, 1) for name in names}


def test_torchao_without_estimates():
    model = Model()
    takes = torchao_filter(model, policy(), tokens=768, estimate=False)
    taken = {path.rsplit(".", 1)[1] for path, module in model.named_modules() if takes(module, path)}
    assert taken == {"q_proj", "k_proj", "v_proj"}


def test_other_libraries_run_whole_modules():
    """fprop and dgrad apart are worth more than the module; who cannot have them takes the module where it wins."""
    model = Model()
    for module, taken in ((1.05, True), (0.95, False)):
        proj = {"part": "llm", "kind": "row", "name": "proj", "shape": (64, 64), "tp": 1}
        rows = series({512: module}, **proj)
        for gemm, speedup in (("fprop", 1.2), ("dgrad", 1.2), ("wgrad", 0.7)):
            rows += series({512: speedup}, gemm=gemm, **proj)
        rules = merge_reports([report(rows, recipe="tensorwise")]).policy
        takes = torchao_filter(model, rules, tokens=512)
        assert takes(model.layers[0].self_attn.o_proj, "layers.0.self_attn.o_proj") is taken
        assert bool(transformer_engine_decision(rules, tokens=512)(named("TERowParallelLinear"), "proj")) is taken


def test_torchao_has_no_blockwise():
    with pytest.raises(
        Fp8Error, match="torchao's float8 linears have the recipes tensorwise, rowwise, got 'blockwise'"
    ):
        torchao_filter(Model(), policy(), tokens=512, recipe="blockwise")


def test_torchao_leaves_linears_that_it_cannot_cast():
    model = Model((96, 24, 24))
    qkv = {"part": "llm", "kind": "layernorm_column", "name": "qkv", "shape": (144, 64), "tp": 1}
    takes = torchao_filter(
        model, merge_reports([report(series({512: 1.3}, **qkv), recipe="tensorwise")]).policy, tokens=512
    )
    attention = model.layers[0].self_attn
    assert takes(attention.q_proj, "layers.0.self_attn.q_proj")
    assert not takes(attention.k_proj, "layers.0.self_attn.k_proj")  # 24 is not a multiple of 16


MEGATRON = "megatron.core.extensions.transformer_engine"
ENGINE = "transformer_engine.pytorch"
FAKES = {name: type(name, (), {}) for name in ("Linear", "LayerNormLinear", "GroupedLinear", "LayerNormMLP")}
OPS_LINEAR = type("Linear", (), {})
WRAPPERS = {"TELayerNormColumnParallelLinear": "LayerNormLinear", "TELinear": "Linear"}
WRAPPERS |= {"TEColumnParallelGroupedLinear": "GroupedLinear", "TERowParallelGroupedLinear": "GroupedLinear"}
TE = FAKES | {name: type(name, (FAKES[base],), {}) for name, base in WRAPPERS.items()}
TE |= {name: type(name, (TE["TELinear"],), {}) for name in ("TEColumnParallelLinear", "TERowParallelLinear")}


@pytest.fixture(autouse=True)
def _loaded(monkeypatch):
    """Modules in the place of TransformerEngine's and Megatron's, with classes of their make."""
    engine = {name: cls for name, cls in TE.items() if not name.startswith("TE")}
    monkeypatch.setitem(sys.modules, ENGINE, SimpleNamespace(**engine))
    monkeypatch.setitem(sys.modules, f"{ENGINE}.ops", SimpleNamespace(Linear=OPS_LINEAR))
    wrappers = {name: cls for name, cls in TE.items() if name.startswith("TE")}
    monkeypatch.setitem(sys.modules, MEGATRON, SimpleNamespace(**wrappers))


def named(name):
    return TE[name]


@pytest.mark.parametrize(
    ("cls", "kwargs", "kind"),
    [
        (named("TELayerNormColumnParallelLinear"), {}, "layernorm_column"),
        (named("TEColumnParallelLinear"), {}, "column"),
        (named("TERowParallelLinear"), {}, "row"),
        (named("TERowParallelLinear"), {"is_expert": True}, "row_grouped"),
        (named("TEColumnParallelGroupedLinear"), {}, "column_grouped"),
        (named("TERowParallelGroupedLinear"), {}, "row_grouped"),
        (named("TELinear"), {}, "duplicated"),
        (named("Linear"), {"parallel_mode": "row"}, "row"),
        (OPS_LINEAR, {"tensor_parallel_mode": "row"}, "row"),
        (named("GroupedLinear"), {"parallel_mode": "row"}, "row_grouped"),
        (named("LayerNormMLP"), {}, None),
        (named("LayerNormLinear"), {}, "layernorm_column"),
        (nn.Linear, {}, None),
        (type("TERowParallelLinear", (), {}), {}, None),  # a user's class of that name
        (type("Mine", (named("TERowParallelLinear"),), {}), {}, "row"),
    ],
)
def test_kind_by_class(cls, kwargs, kind):
    assert transformer_engine_kind(cls, kwargs) == kind


def test_decision_at_construction():
    decide = transformer_engine_decision(policy(), tokens=512)
    assert decide(named("TELayerNormColumnParallelLinear"), "qkv")
    answer = decide(named("TERowParallelLinear"), "proj")
    assert not answer
    assert answer.answer == "lose"
    assert decide(nn.Linear, "proj") is None
    rules = merge_reports([report(series({424: 1.3}, **experts("row_grouped")))]).policy
    decide = transformer_engine_decision(rules, tokens=53, moe_router_topk=8)
    assert decide(named("TERowParallelLinear"), "fc2", {"is_expert": True, "num_gemms": 64})
    assert not decide(named("TERowParallelLinear"), "fc2", {"is_expert": True})  # how many experts is not known
