"""Which linears of a model are which layers of a policy."""

from __future__ import annotations

import functools

import pytest
import torch
import transformers
from torch import nn

from bitplan.fp8.apply import apply_fp8
from bitplan.fp8.find_linears import find_sites
from bitplan.fp8.layers.linear import Fp8Linear
from bitplan.fp8.policy.layers import Parallel, local_layers, model_parts
from bitplan.fp8.policy.vocabulary import Fp8Error
from tests.plan.structure.handwritten_models import DiT, NanoGPT, Titan

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
    """Two experts, each run on the tokens that chose it; under names of its own."""

    def __init__(self, width=16):
        super().__init__()
        self.into = nn.Parameter(torch.randn(2, 2 * width, width) / width**0.5)
        self.back = nn.Parameter(torch.randn(2, width, width) / width**0.5)

    def joined(self, both):
        gate, up = both.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up

    def last(self, rows):
        return rows

    def forward(self, tokens, chosen, weights):
        result = torch.zeros_like(tokens)
        for expert in range(2):
            rows, slots = torch.where(chosen == expert)
            inner = self.joined(nn.functional.linear(tokens[rows], self.into[expert]))
            result.index_add_(0, rows, self.last(inner @ self.back[expert].T) * weights[rows, slots, None])
        return result


class ClampedExperts(PlainExperts):
    def joined(self, both):
        gate, up = both.chunk(2, dim=-1)
        return nn.functional.silu(gate.clamp(max=1)) * up


class InterleavedExperts(PlainExperts):
    def joined(self, both):
        return nn.functional.silu(both[..., ::2]) * both[..., 1::2]


class UpFirstExperts(PlainExperts):
    def joined(self, both):
        up, gate = both.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up


class NormedExperts(PlainExperts):
    def last(self, rows):
        return nn.functional.rms_norm(rows, (16,))


class ScaledExperts(PlainExperts):
    def last(self, rows):
        return rows * 2


class SortedExperts(PlainExperts):
    def forward(self, tokens):
        return torch.bmm(self.joined(torch.bmm(tokens.view(2, -1, 16), self.into.mT)), self.back.mT)


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        (PlainExperts, lambda _: None, None),
        (ClampedExperts, lambda _: None, "in its own way"),
        (InterleavedExperts, lambda _: None, "interleaved"),
        (UpFirstExperts, lambda _: None, "into has the rows of up before those of gate"),
        (NormedExperts, lambda _: None, "more than its experts' sum: rms_norm"),
        (ScaledExperts, lambda _: None, "more than its experts' sum: mul"),
        (PlainExperts, lambda one: setattr(one, "back", nn.Parameter(torch.zeros(3, 16, 16))), "and back 3"),
        (PlainExperts, lambda one: setattr(one, "more", nn.Parameter(torch.zeros(1))), "more beside"),
        (PlainExperts, lambda one: one.register_forward_hook(print), "hooks, which would be lost"),
    ],
)
def test_experts_are_known_by_what_they_compute(kind, change, says):
    model = nn.ModuleDict({"experts": kind()})
    change(model["experts"])
    sites = find_sites(model).sites
    assert [site.path for site in sites] == ["experts.into", "experts.back"]
    for site in sites:
        assert site.obstacle is None if says is None else says in site.obstacle


def test_experts_that_were_not_followed_are_left_and_named():
    found = find_sites(nn.Sequential(SortedExperts()), example=torch.zeros(4, 16))
    assert not found.sites
    assert found.left == ("0 (it takes tokens, not tokens, the experts of each and their weights)",)


def test_stacks_of_matrices_that_are_no_experts_are_not_called_so():
    layer = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 4, 3))
    found = find_sites(nn.Sequential(layer))
    assert not found.sites
    assert not found.left


def norms_of(model):
    """Whether each layer that takes a norm over in a llama does, and why not."""
    return {site.name: (site.norm is not None, site.apart) for site in find_sites(model).sites if "0." in site.path}


def test_a_norm_that_others_use_stays_apart():
    model = built("Llama", num_hidden_layers=1)
    assert norms_of(model)["qkv"] == (True, None)
    model.another = model.model.layers[0].input_layernorm
    assert norms_of(model)["qkv"] == (False, "model.layers.0.input_layernorm is shared with another module")


@pytest.mark.parametrize(
    ("where", "change", "says"),
    [
        ("input_layernorm", lambda one: one.register_forward_hook(print), "input_layernorm has a forward hook"),
        ("self_attn", lambda one: one.register_forward_pre_hook(print), "self_attn has a forward pre-hook"),
        ("self_attn", lambda one: one.register_full_backward_hook(print), "self_attn has a backward hook"),
        ("self_attn", lambda one: setattr(one, "forward", one.forward), "self_attn has a forward of its own"),
        ("", lambda one: setattr(one, "forward", one.forward), "model.layers.0 has a forward of somebody else's"),
    ],
)
def test_a_norm_that_a_hook_or_a_patch_would_miss_stays_apart(where, change, says):
    model = built("Llama", num_hidden_layers=1)
    change(model.model.layers[0].get_submodule(where))
    taken, why = norms_of(model)["qkv"]
    assert not taken
    assert says in why


@pytest.mark.parametrize("wiring", ["parallel", "sandwich", "none"])
def test_a_class_with_a_known_name_and_other_wiring_is_seen_as_it_is(wiring):
    class LlamaDecoderLayer(nn.Module):
        def __init__(self, like):
            super().__init__()
            self.__dict__.update(like.__dict__)

        def forward(self, x, **more):
            if wiring == "parallel":  # attention and MLP read one norm
                normed = self.input_layernorm(x)
                return x + self.self_attn(normed, **more)[0] + self.mlp(normed)
            if wiring == "sandwich":  # the second norm is behind the MLP
                x = x + self.self_attn(self.input_layernorm(x), **more)[0]
                return x + self.post_attention_layernorm(self.mlp(x))
            return x + self.self_attn(x, **more)[0] + self.mlp(self.post_attention_layernorm(x))

    model = built("Llama", num_hidden_layers=1)
    model.model.layers[0] = LlamaDecoderLayer(model.model.layers[0])
    taken = {name: norm for name, (norm, _) in norms_of(model).items() if name in ("qkv", "fc1")}
    assert (
        taken
        == {
            "parallel": {"qkv": False, "fc1": False},
            "sandwich": {"qkv": True, "fc1": False},
            "none": {"qkv": False, "fc1": True},
        }[wiring]
    )


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
    """The same shapes that the benchmark measures from config.json, so that every rule is found."""
    model = built(kind, **more)
    sites = find_sites(model).sites
    measured = local_layers(model_parts(model.config.to_dict()), Parallel())

    def key(layer):
        return layer.shape, layer.kind == "layernorm_column", layer.num_gemms, layer.moe_router_topk

    expected = {}
    for layer in measured:
        expected[key(layer)] = expected.get(key(layer), 0) + layer.blocks
    own = [site for site in sites if site.shape[0] > 1]  # qwen2's gate of a shared expert has one output
    assert expected == {key(site): sum(key(site) == key(other) for other in own) for site in own}
    assert all(site.obstacle is None for site in sites)
    assert all(site.norm is not None for site in sites if site.kind == "layernorm_column")
    assert "lm_head (the output layer)" in find_sites(model).left


def test_joined_projections_and_their_norms():
    first = find_sites(built("Llama")).sites[0]
    assert first.path == "model.layers.0.self_attn.q_proj+k_proj+v_proj"
    assert [path.rpartition(".")[2] for path in first.modules] == ["q_proj", "k_proj", "v_proj"]
    assert first.norm.path == "model.layers.0.input_layernorm"


def summary_of(model, **more):
    sites = find_sites(model, **more)
    layers = [(site.path, site.name, site.norm is not None) for site in sites.sites]
    return layers, [(mlp.path, mlp.function, mlp.tail) for mlp in sites.mlps]


def test_models_under_other_names():
    layers, mlps = summary_of(NanoGPT())
    assert layers[:4] == [
        ("transformer.h.0.attn.c_attn", "qkv", True),
        ("transformer.h.0.attn.c_proj", "proj", False),
        ("transformer.h.0.mlp.c_fc", "fc1", True),
        ("transformer.h.0.mlp.c_proj", "fc2", False),
    ]
    assert mlps[0] == ("transformer.h.0.mlp", "gelu", ())
    layers, mlps = summary_of(Titan())
    assert [(path.removeprefix("layers.0."), norm) for path, _, norm in layers[:4]] == [
        ("attention.wq+wk+wv", True),
        ("attention.wo", False),
        ("feed_forward.w1+w3", True),
        ("feed_forward.w2", False),
    ]
    assert mlps[0] == ("layers.0.feed_forward", "silu_gated", ())
    layers, mlps = summary_of(DiT())
    assert {path for path, _, norm in layers if norm} == set()  # its norms are shifted and scaled
    assert ("blocks.0.to_qkv", "qkv", False) in layers
    assert mlps[0] == ("blocks.0.ff", "gelu_tanh", ())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_gpt2_and_bert():
    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 2, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
    layers, mlps = summary_of(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)))
    assert [(name, norm) for _, name, norm in layers] == [("qkv", True), ("proj", False), ("fc1", True), ("fc2", False)]
    assert mlps == [("transformer.h.0.mlp", "gelu_tanh", ("dropout",))]
    small = SMALL | {"num_hidden_layers": 1}
    layers, mlps = summary_of(transformers.BertModel(transformers.BertConfig(**small)))
    assert ("encoder.layer.0.attention.self.query+key+value", "qkv", False) in layers
    assert mlps == []  # its norms stand behind sums, its MLP is two modules


class Columns(nn.Module):
    """A matrix [inputs, outputs] that the forward multiplies by, with a bias or none."""

    def __init__(self, inputs=64, outputs=32, bias=True):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(outputs)) if bias else None

    def forward(self, x):
        product = x @ self.weight
        return product if self.bias is None else product + self.bias


class Rows(Columns):
    """A matrix [outputs, inputs], and no class of torch's."""

    def __init__(self, inputs=64, outputs=32, bias=True):
        super().__init__(outputs, inputs)
        self.bias = nn.Parameter(torch.randn(outputs)) if bias else None

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


class TurnedLinear(nn.Linear):
    """Square, so that nothing but its run shows that it lies as [inputs, outputs]."""

    def forward(self, x):
        return x @ self.weight + self.bias


class Falcon(nn.Linear):
    def forward(self, x):
        return x @ self.weight.T + self.bias


@pytest.mark.parametrize(
    "make",
    [
        Columns,
        functools.partial(Columns, bias=False),
        Rows,
        functools.partial(TurnedLinear, 64, 64),
        functools.partial(Falcon, 64, 32),
    ],
    ids=["columns", "columns without a bias", "rows", "a square linear", "falcon"],
)
def test_layers_of_any_class_that_are_a_product_alone_become_fp8(make):
    torch.manual_seed(0)
    model, x = nn.Sequential(make()), torch.randn(16, 64)
    state = {key: one.clone() for key, one in model.state_dict().items()}
    (site,) = find_sites(model, include=["0"]).sites
    expected = model(x).detach()
    assert (site.shape, site.obstacle) == ((expected.shape[1], 64), None)
    applied = apply_fp8(model, None, tokens=16, recipe="tensorwise", emulate=True, include=["0"])
    assert applied.fp8_layers == 1
    assert type(model[0]) is Fp8Linear
    assert 0 < ((model(x) - expected).norm() / expected.norm()).item() < 0.1
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(one, state[key]) for key, one in model.state_dict().items())
    model.load_state_dict({key: 2 * one for key, one in state.items()})
    assert torch.equal(model.state_dict()["0.weight"], 2 * state["0.weight"])


def test_a_layer_named_conv1d_is_what_it_computes(monkeypatch):
    class Conv1D(Columns):
        def forward(self, x):
            return super().forward(x) + x @ self.weight.square()

    with pytest.raises(Fp8Error, match="matches no linear layer"):
        find_sites(nn.Sequential(Conv1D()), include=["0"])
    theirs = transformers.pytorch_utils.Conv1D(32, 64)
    (site,) = find_sites(nn.Sequential(theirs), include=["0"]).sites
    assert (site.shape, site.obstacle) == ((32, 64), None)
    monkeypatch.setattr(type(theirs), "forward", lambda self, x: (x @ self.weight).relu() + self.bias)
    with pytest.raises(Fp8Error, match="matches no linear layer"):
        find_sites(nn.Sequential(theirs), include=["0"])


def test_include_and_exclude():
    model = NanoGPT()
    layers, _ = summary_of(model, include=["*.mlp"], exclude=["transformer.h.1"])
    assert [path for path, *_ in layers] == ["transformer.h.0.mlp.c_fc", "transformer.h.0.mlp.c_proj"]
    layers, _ = summary_of(Titan(), include=["output"])
    assert [path for path, *_ in layers] == ["output"]  # the output layer, if it is named
    with pytest.raises(Fp8Error, match="include: the pattern 'c_fcc' matches no linear layer"):
        find_sites(model, include=["c_fcc"])


def test_a_model_that_cannot_be_run_has_single_layers():
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = linear(), linear()

        def forward(self, x):
            if self.one(x).sum() > 0:
                return self.two(x)
            return x

    sites = find_sites(Asks())
    assert [site.path for site in sites.sites] == ["one", "two"]
    assert "asks for numbers" in sites.run.faults[0]


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
    ],
)
def test_what_cannot_be_replaced_says_why(linears, reason):
    (site,) = find_sites(Block(**linears)).sites
    assert reason in site.obstacle


def test_tied_weights_are_not_replaced():
    one, other = linear(), linear()
    other.weight = one.weight
    assert all("shared with another" in site.obstacle for site in find_sites(Block(fc1=one, down_proj=other)).sites)


def test_projections_that_differ_are_not_joined():
    model = Titan()
    model.layers["0"].feed_forward.w3 = nn.Linear(32, 64, bias=True)  # a bias of its own is added to its part
    model.layers["1"].feed_forward.w3.requires_grad_(False)
    paths = [site.path for site in find_sites(model).sites]
    assert {"layers.0.feed_forward.w1+w3", "layers.1.feed_forward.w1", "layers.1.feed_forward.w3"} <= set(paths)


class VisionLanguage:
    class vision_config:  # noqa: N801  as transformers' configs have it
        pass


class Captions(nn.Module):
    """Patches of an image, then tokens that read them; nothing has a name that says so."""

    def __init__(self):
        super().__init__()
        self.cut, self.first, self.between = nn.Conv2d(3, 64, 4, 4), linear(64), linear(64)
        self.words, self.last = nn.Embedding(8, 64), linear(64)

    def forward(self, pixels, ids):
        image = self.first(self.cut(pixels).flatten(2).transpose(1, 2))
        return self.last(torch.cat([self.between(image), self.words(ids)], 1))


def test_what_computes_from_an_image_alone_is_the_vision_part():
    example = {"pixels": torch.zeros(1, 3, 8, 8), "ids": torch.zeros(1, 2, dtype=torch.int64)}
    sites = find_sites(Captions(), example=example, include=["*"]).sites
    assert {site.path: site.part for site in sites} == {"first": "vit", "between": "vit", "last": "llm"}


def test_parts_and_experts():
    model = Block(
        eyes=Block(blocks=nn.ModuleList([Block(attn=Block(qkv=linear(), proj=linear()))])),
        experts=nn.ModuleList([Block(w1=linear(), w2=linear(), w3=linear())]),
        visual=linear(),
    )
    model.config, model.eyes.config = VisionLanguage(), VisionLanguage.vision_config
    sites = find_sites(model).sites
    assert [site.part for site in sites] == ["vit", "vit", "llm", "llm", "llm", "llm"]
    assert {site.obstacle[:20] for site in sites[2:5]} == {"an expert of its own"}
    assert sites[5].obstacle is None
