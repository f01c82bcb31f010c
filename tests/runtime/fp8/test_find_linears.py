"""Which linears of a model are which layers of a policy."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from bitplan.plan.fp8.layers import Parallel, local_layers
from bitplan.plan.fp8.model_parts import model_parts
from bitplan.runtime.fp8.find_linears import find_sites

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
MOE = {"num_experts": 4, "moe_intermediate_size": 64, "num_experts_per_tok": 2}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}


def built(kind, **more):
    config = getattr(transformers, f"{kind}Config")(**(SMALL | more))
    with torch.device("meta"):
        return getattr(transformers, f"{kind}ForCausalLM")(config)


class PlainExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.zeros(2, 32, 16)), nn.Parameter(torch.zeros(2, 16, 16))
        self.act_fn = nn.functional.silu

    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise NotImplementedError


class ClampedExperts(PlainExperts):
    def _apply_gate(self, gate_up):
        raise NotImplementedError


class SortedExperts(PlainExperts):
    def forward(self, hidden_states):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        (PlainExperts, lambda _: None, None),
        (ClampedExperts, lambda _: None, "in its own way"),
        (SortedExperts, lambda _: None, "other tensors or arguments"),
        (PlainExperts, lambda one: delattr(one, "act_fn"), "in its own way"),
        (PlainExperts, lambda one: setattr(one, "has_post_expert_norm", True), "norm of their own"),
        (PlainExperts, lambda one: setattr(one, "is_concatenated", False), "interleaved"),
        (PlainExperts, lambda one: one.register_forward_hook(print), "hooks, which would be lost"),
    ],
)
def test_experts_that_compute_something_else_stay_as_they_are(kind, change, says):
    model = nn.ModuleDict({"experts": kind()})
    change(model["experts"])
    for site in find_sites(model).sites:
        assert site.obstacle is None if says is None else says in site.obstacle
    assert len(find_sites(model).sites) == 2


@pytest.mark.parametrize("change", ["hook", "shared"])
def test_a_norm_that_others_use_stays_apart(change):
    model = built("Llama", num_hidden_layers=1)
    block = model.model.layers[0]
    assert [site.norm is not None for site in find_sites(model).sites if site.name == "qkv"] == [True]
    if change == "hook":
        block.input_layernorm.register_forward_hook(print)
    else:
        model.another = block.input_layernorm
    assert [site.norm is not None for site in find_sites(model).sites if site.name == "qkv"] == [False]


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Llama", {}),
        ("Mistral", {}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 32}),
        ("Mixtral", {"num_local_experts": 4}),
        ("Qwen2Moe", MOE | {"shared_expert_intermediate_size": 128}),
        ("Qwen3Moe", MOE | {"head_dim": 32}),
        ("DeepseekV3", DEEPSEEK),
        ("DeepseekV3", DEEPSEEK | {"q_lora_rank": None}),
    ],
)
def test_the_model_has_the_layers_that_its_config_says(kind, more):
    """The same kinds, names and shapes that the benchmark measures from config.json, so that every rule is found."""
    model = built(kind, **more)
    sites = find_sites(model).sites
    measured = local_layers(model_parts(model.config.to_dict()), Parallel())
    message = {
        (layer.kind, layer.name, layer.shape, layer.num_gemms, layer.moe_router_topk): layer for layer in measured
    }
    result = {(site.kind, site.name, site.shape, site.num_gemms, site.moe_router_topk) for site in sites}
    assert result == set(message)
    for key, layer in message.items():
        assert layer.blocks == sum(
            (site.kind, site.name, site.shape, site.num_gemms, site.moe_router_topk) == key for site in sites
        )
    assert all(site.obstacle is None for site in sites)
    assert all(site.norm is not None for site in sites if site.kind == "layernorm_column")
    assert "lm_head" in find_sites(model).left


def test_fused_projections_and_their_norms():
    first = find_sites(built("Llama")).sites[0]
    assert first.path == "model.layers.0.self_attn.qkv"
    assert [path.rpartition(".")[2] for path in first.modules] == ["q_proj", "k_proj", "v_proj"]
    assert first.norm == "model.layers.0.input_layernorm"


class Block(nn.Module):
    def __init__(self, **linears):
        super().__init__()
        for name, linear in linears.items():
            setattr(self, name, linear)


def linear(out=32, inputs=64, **more):
    return nn.Linear(inputs, out, **({"bias": False} | more))


def hooked():
    layer = linear()
    layer.register_forward_hook(lambda *_: None)
    return layer


class OddLinear(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("linears", "reason"),
    [
        ({"fc1": OddLinear(64, 32)}, "fc1 is a OddLinear, whose forward is not Linear's own"),
        ({"fc1": hooked()}, "fc1 has hooks"),
        ({"gate_proj": linear(), "up_proj": linear(bias=True)}, "differ in bias, input, dtype"),
        ({"gate_proj": linear(), "up_proj": linear(dtype=torch.float64)}, "differ in bias, input, dtype"),
    ],
)
def test_what_cannot_be_replaced_says_why(linears, reason):
    (site,) = find_sites(Block(**linears)).sites
    assert reason in site.obstacle


def test_tied_weights_are_not_replaced():
    one, other = linear(), linear()
    other.weight = one.weight
    assert all("shared with another" in site.obstacle for site in find_sites(Block(fc1=one, down_proj=other)).sites)


def test_a_norm_of_an_unknown_block_stays_apart():
    block = Block(self_attn=Block(q_proj=linear(), k_proj=linear(), v_proj=linear()), input_layernorm=nn.RMSNorm(64))
    (site,) = find_sites(Block(layers=nn.ModuleList([block]))).sites
    assert (site.kind, site.name, site.norm) == ("layernorm_column", "qkv", None)


def test_parts_experts_and_names_that_are_none():
    model = Block(
        visual=Block(blocks=nn.ModuleList([Block(attn=Block(qkv=linear(), proj=linear()), mlp=Block(fc1=linear()))])),
        projector=Block(fc1=linear()),
        experts=nn.ModuleList([Block(w1=linear(), w2=linear(), w3=linear())]),
        something=linear(),
    )
    sites = find_sites(model)
    assert [(site.part, site.name) for site in sites.sites[:3]] == [("vit", "qkv"), ("vit", "proj"), ("vit", "fc1")]
    assert {site.obstacle[:20] for site in sites.sites[3:]} == {"an expert of its own"}
    assert set(sites.left) == {"projector.fc1", "something"}
