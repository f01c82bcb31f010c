"""Models of many makes in FP8 beside their BF16 selves, and blocks that differ, which stay apart or BF16."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

from bitplan.fp8 import self_check
from bitplan.fp8.apply import apply_fp8
from bitplan.fp8.layers.joined_mlp import JoinedMlp
from bitplan.fp8.layers.linear import Fp8Linear, Fp8NormLinear
from bitplan.fp8.recorded_wiring import Wiring
from tests.fp8.test_find_linears import SMALL
from tests.plan.structure.handwritten_models import DiT, NanoGPT, Titan

IDS = torch.arange(3, 19)[None]
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}

OPT = {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
OPT |= {"vocab_size": 64, "max_position_embeddings": 64, "dropout": 0.0}
WHISPER = {
    "d_model": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 128,
    "decoder_layers": 1,
}
WHISPER |= {"num_mel_bins": 8, "max_source_positions": 8, "num_labels": 4, "dropout": 0.0}


def of(kind, **sizes):
    return getattr(transformers, kind)(getattr(transformers, kind).config_class(**sizes))


# maker, what it is called with, FP8 layers, norms taken over, joined MLPs
MODELS = {
    "nanogpt": (NanoGPT, (IDS,), 8, 4, 2),
    "titan": (Titan, (IDS,), 8, 4, 2),
    "gpt2": (lambda: of("GPT2LMHeadModel", **GPT2), (IDS,), 8, 4, 2),
    "bert": (lambda: of("BertModel", **SMALL), (IDS,), 8, 0, 0),
    "llama": (lambda: of("LlamaForCausalLM", **SMALL), (IDS,), 8, 4, 2),
    "gemma2": (lambda: of("Gemma2ForCausalLM", **SMALL, head_dim=32), (IDS,), 8, 0, 2),
    "phi3": (lambda: of("Phi3ForCausalLM", **SMALL, pad_token_id=0), (IDS,), 8, 4, 2),
    "opt": (lambda: of("OPTForCausalLM", **OPT), (IDS,), 8, 4, 0),
}  # fmt: skip


def test_mlps_that_no_module_computes_alone_are_named():
    """The block itself calls fc1, the activation and fc2, among others: their code stays, and the summary says so."""
    model = of("OPTForCausalLM", **OPT).eval()
    notes = apply_fp8(model, None, tokens=16, recipe="tensorwise", emulate=True).notes
    (note,) = (note for note in notes if "the activation between" in note)
    block = "model.decoder.layers.*"
    assert note == (
        f"the activation between {block}.fc1 and {block}.fc2 stays apart: no module computes it alone: {block} "
        "computes more"
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # dynamo's own, of the autograd function
@pytest.mark.parametrize("compiled", [False, True])
def test_a_bias_that_the_other_projections_lack_is_added_to_its_part_and_learns(compiled):
    """Whisper's queries and values have biases, its keys have none; a joined one would give the keys one to learn."""
    torch.manual_seed(0)
    plain = of("WhisperForAudioClassification", **WHISPER).eval()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model, given = copy.deepcopy(plain), torch.randn(1, 8, 16)
    applied = apply_fp8(model, None, tokens=8, recipe="tensorwise", emulate=True)
    assert "encoder.layers.0.self_attn.q_proj+k_proj+v_proj" in {
        row.path.replace("q_proj+v_proj+k_proj", "q_proj+k_proj+v_proj") for row in applied.rows
    }
    attention = model.encoder.layers[0].self_attn
    assert (attention.q_proj.has_bias, attention.k_proj.has_bias, attention.v_proj.has_bias) == (True, False, True)
    assert model.state_dict().keys() == plain.state_dict().keys()
    block, plain_block = (each.encoder.layers[0] for each in (model, plain))
    run = torch.compile(block, backend="eager", fullgraph=True) if compiled else block
    x = torch.randn(1, 8, 64)
    with torch.no_grad():
        ours, theirs = (each(x, None)[0] for each in (run, plain_block))
    assert ((ours - theirs).norm() / theirs.norm()).item() < 0.1
    model(given).logits.square().mean().backward()
    plain(given).logits.square().mean().backward()
    for name in ("q_proj", "v_proj"):
        mine, exact = (getattr(each.encoder.layers[0].self_attn, name).bias.grad for each in (model, plain))
        assert ((mine - exact).norm() / exact.norm()).item() < 0.2


def first_tensor(output):
    return output if isinstance(output, torch.Tensor) else output[0]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_models_of_any_names_compute_nearly_the_same(name):
    make, given, layers, norms, mlps = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    for parameter in model.parameters():  # norms' weights too, which begin as ones
        with torch.no_grad():
            parameter.add_(0.05 * torch.randn_like(parameter))
    plain, state = copy.deepcopy(model), {key: one.clone() for key, one in model.state_dict().items()}
    applied = apply_fp8(model, None, tokens=16, recipe="tensorwise", emulate=True)
    modules = list(model.modules())
    assert applied.fp8_layers == sum(isinstance(each, Fp8Linear) for each in modules) == layers
    assert sum(isinstance(each, Fp8NormLinear) for each in modules) == norms
    assert sum(isinstance(each, JoinedMlp) for each in modules) == mlps
    (compared,) = applied.compared
    assert compared.kept == "all"
    assert 0 < compared.difference < 0.12
    assert f"differs by {compared.difference:.3f} from its BF16 self (bound 0.2)" in str(applied)
    ours, theirs = first_tensor(model(*given)), first_tensor(plain(*given))
    assert ((ours - theirs).norm() / theirs.norm()).item() < 0.15
    after = model.state_dict()
    assert after.keys() == state.keys()
    assert all(torch.equal(after[key], one) for key, one in state.items())
    plain.load_state_dict(after)
    model.load_state_dict({key: 2 * one for key, one in state.items()})
    assert all(torch.equal(one, 2 * state[key]) for key, one in model.state_dict().items())
    first_tensor(model.train()(*given)).square().mean().backward()
    trained = [one for one in model.parameters() if one.grad is not None]
    assert trained
    assert all(one.grad.isfinite().all() for one in trained)


def test_gradients_of_nanogpts_block_are_those_of_its_layers():
    torch.manual_seed(0)
    plain = NanoGPT()
    model = copy.deepcopy(plain)
    apply_fp8(model, None, tokens=16, recipe="tensorwise", emulate=True)
    for each in (plain, model):
        first_tensor(each(IDS)).square().mean().backward()
    theirs = dict(plain.named_parameters())
    names = {name: name for name in ("mlp.c_fc.bias", "mlp.c_proj.bias", "mlp.c_fc.weight")}
    names |= {"mlp.c_fc.norm.weight": "ln_2.weight", "mlp.c_fc.norm.bias": "ln_2.bias"}
    ours = dict(model.named_parameters())
    for own, other in names.items():
        expected = theirs[f"transformer.h.0.{other}"].grad
        made = ours[f"transformer.h.0.{own}"].grad
        assert ((made - expected).norm() / expected.norm()).item() < 0.2, own


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
def test_nanogpts_block_compiles_as_one_graph():
    torch.manual_seed(0)
    model = NanoGPT()
    apply_fp8(model, None, tokens=16, recipe="tensorwise", emulate=True)
    block = model.transformer.h[0]
    x = torch.randn(1, 16, block.ln_1.weight.shape[0], requires_grad=True)
    results = []
    for run in (block, torch.compile(block, backend="aot_eager", fullgraph=True)):
        block.zero_grad()
        run(x).square().mean().backward()
        results.append({name: one.grad.clone() for name, one in block.named_parameters()})
    for name, expected in results[0].items():
        assert torch.allclose(results[1][name], expected, rtol=1e-4, atol=1e-6), name


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_diffusion_transformer_needs_no_config():
    torch.manual_seed(0)
    model = DiT()
    applied = apply_fp8(model, None, tokens=16, recipe="tensorwise", emulate=True)
    assert applied.fp8_layers >= 10
    assert all(each.kept == "all" for each in applied.compared)


@pytest.mark.parametrize("where", ["class", "instance"])
def test_a_forward_that_others_have_patched_keeps_its_code(where, monkeypatch):
    def parallel(self, hidden_states, **more):
        normed = self.input_layernorm(hidden_states)
        return hidden_states + self.self_attn(normed, **more)[0] + self.mlp(normed)

    torch.manual_seed(0)
    model = of("LlamaForCausalLM", **SMALL).eval()
    kind = type(model.model.layers[0])
    if where == "class":
        monkeypatch.setattr(kind, "forward", parallel)
    else:
        for layer in model.model.layers:
            layer.forward = parallel.__get__(layer)
    seen = []
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((args or tuple(kwargs.values()))[0]), with_kwargs=True
    )
    expected = model(IDS).logits
    applied = apply_fp8(model, None, tokens=16, recipe="tensorwise", emulate=True)
    assert applied.fp8_layers == 8
    assert not any(isinstance(each, Fp8NormLinear) for each in model.modules())
    made = model(IDS).logits
    assert ((made - expected).norm() / expected.norm()).item() < 0.1
    assert torch.equal(*seen)  # what the hook sees is what it saw


def wrong_norm(monkeypatch):
    norm_before = Wiring.norm_before

    def wrong(self, paths):
        norm = norm_before(self, paths)
        return None if norm is None else replace(norm, kind="layer" if norm.kind == "rms" else "rms", eps=3.0)

    monkeypatch.setattr(Wiring, "norm_before", wrong)


def test_a_block_that_differs_keeps_its_own_norms(monkeypatch):
    torch.manual_seed(0)
    plain = Titan()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.3)
    model = copy.deepcopy(plain)
    wrong_norm(monkeypatch)
    applied = apply_fp8(model, None, tokens=16, recipe="tensorwise", emulate=True)
    (compared,) = applied.compared
    assert compared.kept == "apart"
    assert "with norms and activations joined; they stay apart, which differs by 0.0" in compared.reason
    assert applied.fp8_layers == 8
    assert not any(isinstance(each, Fp8NormLinear | JoinedMlp) for each in model.modules())
    assert any("its norm stays apart" in row.reason for row in applied.rows)
    ours, theirs = model(IDS), plain(IDS)
    assert ((ours - theirs).norm() / theirs.norm()).item() < 0.1


def test_a_block_that_differs_all_the_same_stays_bf16(monkeypatch):
    monkeypatch.setattr(self_check, "BOUND", 1e-6)
    model = Titan()
    applied = apply_fp8(model, None, tokens=16, recipe="tensorwise", emulate=True)
    assert applied.fp8_layers == 0
    assert not any(isinstance(each, Fp8Linear) for each in model.modules())
    assert "and stays BF16" in applied.rows[0].reason


def test_nothing_of_a_comparison_stays_behind():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer, self.drop = nn.Linear(64, 64), nn.Linear(64, 64), nn.Dropout(0.5)
            self.calls = 0
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x):
            self.calls += 1
            self.seen += 1
            return x + self.drop(self.outer(self.inner(x).tanh()))

    model, hooked = nn.Sequential(Counts(), Counts()).train(), []
    model[0].drop.register_forward_hook(lambda *_: hooked.append(1))
    before = torch.get_rng_state()
    applied = apply_fp8(model, None, tokens=16, recipe="tensorwise", emulate=True)
    assert applied.fp8_layers == 4
    assert (model[0].calls, float(model[0].seen), hooked) == (0, 0.0, [])
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training for module in model.modules())


def test_a_cache_that_blocks_write_into_is_new_in_each_run():
    """T5's decoder gives one to every block, whose second run would read twice the keys."""
    sizes = {"vocab_size": 64, "d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 1, "num_heads": 2}
    model = of("T5ForConditionalGeneration", **sizes, decoder_start_token_id=0).bfloat16().eval()
    example = {"input_ids": IDS, "decoder_input_ids": IDS}
    applied = apply_fp8(model, None, tokens=16, recipe="tensorwise", emulate=True, example=example)
    assert [(compared.block, compared.kept) for compared in applied.compared] == [
        ("encoder.block.0", "all"),
        ("decoder.block.0", "all"),
    ]


def test_a_block_that_is_called_twice_is_compared_as_a_whole():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(self.norm(x))))

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.head = Recurrent(), nn.Linear(64, 64)

        def forward(self, x):
            return self.head(self.block(self.block(x)))

    torch.manual_seed(0)
    model, x = Twice().bfloat16(), torch.randn(4, 16, 64).bfloat16()
    expected = model(x)
    applied = apply_fp8(model, None, tokens=64, recipe="tensorwise", emulate=True, example=(x,))
    assert isinstance(model.block.up, Fp8Linear)
    assert [compared.kept for compared in applied.compared] == ["all"]
    assert (model(x) - expected).norm() < 0.1 * expected.norm()


def test_a_model_without_all_numbers_is_not_compared():
    model = Titan()
    model.output.weight = nn.Parameter(model.output.weight.to("meta"))  # as accelerate's offloading leaves it
    applied = apply_fp8(model, None, tokens=16, recipe="tensorwise", emulate=True)
    assert "not compared: the model has no numbers" in applied.compared[0].reason


def test_a_block_that_cannot_be_copied_is_said():
    model = Titan()
    model.layers["0"].kept = torch.ones(1, requires_grad=True) * 2  # torch copies no tensor in the middle of a graph
    applied = apply_fp8(model, None, tokens=16, recipe="tensorwise", emulate=True)
    assert applied.fp8_layers == 8
    assert "not compared: layers.0 cannot be copied" in applied.compared[0].reason
