"""apply_fp8 on small models with made-up policies, FP8 emulated: decided, built, kept, confirmed, refused."""

from __future__ import annotations

import copy
import json
import logging

import pytest
import torch
import transformers
from torch import nn

from bitplan.base.paired_timing import CpuStopwatch
from bitplan.fp8 import build as replacements
from bitplan.fp8 import decide
from bitplan.fp8.apply import apply_fp8
from bitplan.fp8.build import has_fp8
from bitplan.fp8.decide import Fp8Options
from bitplan.fp8.layers.linear import Fp8Linear, Fp8NormLinear
from bitplan.fp8.policy.layers import layers_of_shapes
from bitplan.fp8.policy.merge import merge_reports
from bitplan.fp8.policy.vocabulary import (
    FingerprintError,
    Fp8Error,
    ModelConfigError,
    PolicyError,
    PolicyKindError,
    PolicyVersionError,
)
from tests.crosses import few
from tests.fp8.policy.fp8_samples import H200, report, series
from tests.fp8.test_find_linears import DEEPSEEK, MOE, SMALL, VisionLanguage

LAYERS = {
    "qkv": ("layernorm_column", (256, 128)),
    "proj": ("row", (128, 128)),
    "fc1": ("layernorm_column", (512, 128)),
    "fc2": ("row", (128, 256)),
}


def policy_of(recipe="tensorwise", part="llm", **speedups):
    """A policy by layer name, {tokens: speedup}; a layer that is not named was never measured."""
    rows = []
    for name, series_of in speedups.items():
        kind, shape = LAYERS[name]
        rows += series(series_of, part=part, kind=kind, name=name, shape=shape, tp=1)
    return merge_reports([report(rows, recipe=recipe)]).policy


WINS = {64: 1.3, 128: 1.4}
ALL = dict.fromkeys(LAYERS, WINS)


def llama(**more):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**(SMALL | more))
    return transformers.LlamaForCausalLM(config).train()


def tokens_of(count, seed=1):
    return torch.randint(0, 64, (1, count), generator=torch.Generator().manual_seed(seed))


def test_counts_for_a_part_that_is_not_there_are_said(caplog):
    apply_fp8(llama(), policy_of(**ALL), tokens={"LLM": 100, "llm": 100}, emulate=True)
    assert caplog.text.count("tokens names 'LLM', no part of this model: its counts are not used; the parts are") == 1


def test_everything_wins_and_the_model_computes_nearly_the_same():
    model = llama()
    plain = copy.deepcopy(model)
    applied = apply_fp8(model, policy_of(**ALL), tokens=100, emulate=True)
    assert applied.fp8_layers == len(applied.rows) == 8
    assert isinstance(model.model.layers[0].self_attn.q_proj.fused, Fp8NormLinear)
    assert isinstance(model.model.layers[0].mlp.down_proj, Fp8Linear)
    ids = tokens_of(100)
    ours, theirs = model(input_ids=ids, labels=ids), plain(input_ids=ids, labels=ids)
    assert ((ours.logits - theirs.logits).norm() / theirs.logits.norm()).item() < 0.1
    ours.loss.backward()
    theirs.loss.backward()
    mine = model.model.layers[0]
    fused = mine.self_attn.q_proj.fused
    attention = plain.model.layers[0].self_attn
    expected = torch.cat([attention.q_proj.weight.grad, attention.k_proj.weight.grad, attention.v_proj.weight.grad])
    assert float((fused.weight.grad - expected).norm() / expected.norm()) < 0.15
    expected = plain.model.layers[0].input_layernorm.weight.grad
    assert float((fused.norm.weight.grad - expected).norm() / expected.norm()) < 0.15
    assert not mine.self_attn.q_proj.shared.is_waiting  # nothing of the step is kept


def test_each_layer_by_its_own_rule():
    model = llama()
    before = dict(model.named_modules())
    policy = policy_of(qkv={64: 0.8, 128: 0.9}, fc1=WINS, fc2={64: 1.2, 128: 1.3})
    applied = apply_fp8(model, policy, tokens=128, emulate=True, options=Fp8Options(estimate=False))
    chosen = {row.path: (row.precision, row.answer) for row in applied.rows if ".0." in row.path}
    assert chosen == {
        "model.layers.0.self_attn.q_proj+k_proj+v_proj": ("bf16", "lose"),
        "model.layers.0.self_attn.o_proj": ("bf16", "unmeasured"),
        "model.layers.0.mlp.gate_proj+up_proj": ("fp8", "win"),
        "model.layers.0.mlp.down_proj": ("fp8", "win"),
    }
    after = dict(model.named_modules())
    for name in ("self_attn.q_proj", "self_attn.o_proj", "input_layernorm"):
        assert after[f"model.layers.0.{name}"] is before[f"model.layers.0.{name}"]  # untouched
    assert after["lm_head"] is before["lm_head"]
    assert applied.left == ("lm_head (the output layer)",)
    text = str(applied)
    assert text.startswith("4 of 8 layers in FP8")
    assert "model.layers.*.mlp.gate_proj+up_proj" in text
    assert "measured: lose at 128 tokens" in text


def test_single_products_reach_the_layer():
    rows = []
    for gemm, speedup in (("module", 0.9), ("fprop", 1.2), ("dgrad", 0.8), ("wgrad", 1.1)):
        kind, shape = LAYERS["fc2"]
        rows += series({128: speedup}, part="llm", kind=kind, name="fc2", shape=shape, tp=1, gemm=gemm)
    model = llama()
    apply_fp8(model, merge_reports([report(rows, recipe="tensorwise")]).policy, tokens=128, emulate=True)
    gemms = model.model.layers[1].mlp.down_proj.gemms
    assert (gemms.fprop, gemms.dgrad, gemms.wgrad) == ("tensorwise", "bf16", "tensorwise")


def test_checkpoints_keep_their_names(tmp_path):
    model = llama(attention_bias=True)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    apply_fp8(model, policy_of(**ALL), tokens=100, emulate=True)
    changed = model.state_dict()
    assert set(changed) == set(state)
    assert all(torch.equal(changed[name], state[name]) for name in state)
    other = {name: torch.randn_like(tensor) for name, tensor in state.items()}
    assert str(model.load_state_dict(other)) == "<All keys matched successfully>"
    assert torch.equal(
        model.model.layers[0].self_attn.q_proj.fused.weight[:128], other["model.layers.0.self_attn.q_proj.weight"]
    )
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({name: t for name, t in other.items() if "0.self_attn.k_proj.weight" not in name})
    model.save_pretrained(tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(tensor, other[name]) for name, tensor in plain.state_dict().items())


@pytest.mark.parametrize("way", ["transformers", "accelerate", "peft"])
@pytest.mark.parametrize("fp8_param", [False, True])
def test_plain_transformers_loads_what_was_saved(way, fp8_param, tmp_path):
    """Joined projections and weights stored in FP8 are saved under the model's own names, as its own numbers."""
    model = llama(num_hidden_layers=1)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if way == "peft":
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=2))
    apply_fp8(model, policy_of(**ALL), tokens=100, emulate=True, options=Fp8Options(fp8_param=fp8_param))
    if way == "accelerate":
        pytest.importorskip("accelerate").Accelerator(cpu=True).save_model(model, tmp_path)
        model.config.save_pretrained(tmp_path)
    else:
        (model.unload() if way == "peft" else model).save_pretrained(tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    loaded = plain.state_dict()
    assert set(loaded) == set(state)
    for name, tensor in loaded.items():
        if fp8_param and way == "peft" and tensor.ndim == 2 and "layers" in name:  # frozen, so rounded to FP8
            assert ((tensor - state[name]).norm() / state[name].norm()).item() < 0.04
        else:
            assert torch.equal(tensor, state[name]), name


def test_a_step_of_an_optimizer_is_seen():
    model = llama()
    apply_fp8(model, policy_of(**ALL), tokens=100, emulate=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = tokens_of(100)
    losses = []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
def test_compiles_without_a_graph_break():
    model = llama(num_hidden_layers=1)
    apply_fp8(model, policy_of(**ALL), tokens=100, emulate=True)
    layer = model.model.layers[0]
    x = torch.randn(1, 100, 128)
    position = model.model.rotary_emb(x, torch.arange(100)[None])
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, position_embeddings=position), layer(x, position_embeddings=position))


def test_counts_outside_the_band_are_said_once(caplog):
    model = llama()
    apply_fp8(model, policy_of(**ALL), tokens=100, emulate=True, options=Fp8Options(estimate=False))
    with caplog.at_level(logging.WARNING, "bitplan"):
        for count in (64, 100, 128):
            model(input_ids=tokens_of(count))
        assert caplog.messages == []
        model.eval()
        model(input_ids=tokens_of(3))
        assert caplog.messages == []  # generation is not training
        model.train()
        for count in (129, 3):
            model(input_ids=tokens_of(count))
    (message,) = caplog.messages
    assert "was given 129 tokens; its FP8 plan was made for 100 and holds from 64 to 128" in message


def test_estimates_between_counts_and_only_there():
    policy = policy_of(
        qkv={64: 0.8, 128: 1.4}, proj={64: 0.6, 128: 0.7}, fc1={64: 0.8, 128: 1.4}, fc2={64: 0.8, 128: 1.0}
    )
    applied = apply_fp8(llama(num_hidden_layers=1), policy, tokens=100, emulate=True)
    assert [row.precision for row in applied.rows] == ["fp8", "bf16", "fp8", "bf16"]
    assert applied.rows[0].reason.startswith("estimated 1.1")
    applied = apply_fp8(
        llama(num_hidden_layers=1), policy, tokens=100, emulate=True, options=Fp8Options(estimate=False)
    )
    assert applied.fp8_layers == 0


def test_an_estimate_holds_as_far_as_its_neighbours_reach(caplog):
    """proj was never measured; fc2, of twice its size, was: the plan holds where both are estimated to win."""
    model = llama(num_hidden_layers=1)
    applied = apply_fp8(model, policy_of(fc2=WINS), tokens=128, emulate=True)
    chosen = {row.name: row for row in applied.rows if row.precision == "fp8"}
    assert set(chosen) == {"proj", "fc2"}
    assert chosen["proj"].reason.startswith(
        "estimated 1.300x: never measured itself; it has no less work and intensity"
    )
    with caplog.at_level(logging.WARNING, "bitplan"):
        for count in (110, 256, 90):
            model(input_ids=tokens_of(count))
    (message,) = caplog.messages
    assert "was given 90 tokens; its FP8 plan was made for 128 and holds from 100 to 256" in message


def test_a_shape_that_the_recipe_cannot_cast_stays_as_it_is():
    model = llama(num_hidden_layers=1, hidden_size=128, intermediate_size=200)
    applied = apply_fp8(model, policy_of(recipe="blockwise", **ALL), tokens=128, emulate=True)
    reasons = {row.name: row.reason for row in applied.rows if row.precision == "bf16"}
    assert reasons == {
        "fc1": "out_features 400 is not a multiple of 128, which blockwise needs",
        "fc2": "in_features 200 is not a multiple of 128, which blockwise needs",
    }


def test_no_fp8_hardware_is_bf16_and_says_so():
    model = llama()
    before = dict(model.named_modules())
    applied = apply_fp8(model, policy_of(**ALL), tokens=100)
    assert applied.fp8_layers == 0
    assert {row.reason for row in applied.rows} == {
        "no FP8 hardware: the model is on the CPU; move it to the GPU first"
    }
    assert dict(model.named_modules()) == before


def test_a_policy_of_another_gpu_is_an_error(monkeypatch):
    monkeypatch.setattr(decide, "_lacking", lambda *_: None)
    monkeypatch.setattr(decide, "fingerprint_of", lambda _: decide.replace(H200, gpu="NVIDIA B200"))
    plans = {"llm": decide.PartPlan(policy_of(**ALL), 100)}
    with pytest.raises(FingerprintError, match="measured on 'NVIDIA H200', this is 'NVIDIA B200'"):
        decide._differences(plans.values(), torch.device("cuda"))
    monkeypatch.setattr(decide, "fingerprint_of", lambda _: decide.replace(H200, driver="590"))
    assert decide._differences(plans.values(), torch.device("cuda")) == [
        "the merged reports: driver: measured with '580.82', now '590'"
    ]


def test_dimensions_that_the_recipe_does_not_divide_stay_bf16():
    model = llama(intermediate_size=200)
    applied = apply_fp8(model, None, tokens=100, recipe="blockwise", emulate=True)
    reasons = {row.name: (row.precision, row.reason) for row in applied.rows}
    assert reasons["fc2"] == ("bf16", "in_features 200 is not a multiple of 128, which blockwise needs")
    assert reasons["qkv"][0] == "fp8"


def test_version_1_policies(tmp_path):
    policy_of(**ALL).to_thresholds().save(tmp_path / "v1.json")
    applied = apply_fp8(llama(), tmp_path / "v1.json", tokens=4096, recipe="tensorwise", emulate=True)
    assert applied.fp8_layers == 8
    assert any("version 1 does not say on which GPU" in note for note in applied.notes)
    blockwise = apply_fp8(llama(hidden_size=64), tmp_path / "v1.json", tokens=4096, emulate=True)
    assert blockwise.fp8_layers == 0  # blockwise is the default, and 64 is no multiple of 128
    assert all("is not a multiple of 128" in row.reason for row in blockwise.rows)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ('{"version": 3}', PolicyVersionError, "version must be 1 .* or 2"),
        (
            '{"version": 1, "speedup_threshold": 1.0, "rules": {"rows": {}}}',
            PolicyKindError,
            "unknown module kind 'rows'",
        ),
        ('{"version": 1, "version": 1}', PolicyError, "version"),
        ('{"version": 1, "speedup_threshold": "1", "rules": {}}', PolicyError, "speedup_threshold must be"),
        ('{"version": 1, "speedup', PolicyError, "JSON"),
    ],
)
def test_policies_that_cannot_be_read_leave_the_model(text, error, message, tmp_path):
    path = tmp_path / "p.json"
    path.write_text(text)
    model = llama()
    before = dict(model.named_modules())
    with pytest.raises(error, match=message):
        apply_fp8(model, path, tokens=100, emulate=True)
    assert dict(model.named_modules()) == before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tokens": 0}, "tokens must be an integer from 1"),
        ({"tokens": 1.5}, "tokens must be an integer from 1"),
        ({"parts": ("audio",)}, "parts must be among llm, vit, got audio"),
        ({"recipe": "int8"}, "recipe must be one of"),
    ],
)
def test_bad_arguments(given, message):
    for policy in (policy_of(**ALL), None):
        with pytest.raises(Fp8Error, match=message):
            apply_fp8(llama(), policy, **({"tokens": 100, "emulate": True} | given))


def test_twice_is_refused():
    model = llama()
    apply_fp8(model, policy_of(**ALL), tokens=100, emulate=True)
    with pytest.raises(Fp8Error, match="has FP8 layers already"):
        apply_fp8(model, policy_of(**ALL), tokens=100, emulate=True)


@pytest.mark.parametrize("fp8_param", [False, True])
@pytest.mark.parametrize("held", [False, True])
def test_an_error_half_way_leaves_the_model_as_it_was(fp8_param, held, monkeypatch):
    model = llama()
    modules = {name: type(one) for name, one in model.named_modules()}
    state = {name: one.clone() for name, one in model.state_dict().items()}
    parameters = dict(model.named_parameters()) if held else {}  # as an optimizer that was made before holds them
    made = []

    def fail_late(build):
        def build_or_fail(*args, **more):
            made.append(1)
            if len(made) == 4 + 7:  # four are built to be compared
                raise RuntimeError("out of memory")
            return build(*args, **more)

        return build_or_fail

    monkeypatch.setattr(replacements, "build_layer", fail_late(replacements.build_layer))
    given = {"tokens": 100, "recipe": "tensorwise", "emulate": True, "options": Fp8Options(fp8_param=fp8_param)}
    with pytest.raises(RuntimeError, match="out of memory"):
        apply_fp8(model, None, **given)
    assert {name: type(one) for name, one in model.named_modules()} == modules
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(one, state[name]) for name, one in model.state_dict().items())
    assert all(one.is_leaf and one.requires_grad for one in model.parameters())
    assert all(dict(model.named_parameters())[name] is one for name, one in parameters.items())
    monkeypatch.undo()
    assert apply_fp8(model, None, **given).fp8_layers == 8
    assert fp8_param or model.state_dict().keys() == state.keys()


def test_frozen_weights_stored_in_fp8_before_an_error_are_named(monkeypatch):
    model = llama(num_hidden_layers=1).requires_grad_(False)
    calls = []
    monkeypatch.setattr(replacements, "cast_weights_together", lambda _: calls.append(1) or 1 / (len(calls) - 2))
    with pytest.raises(ZeroDivisionError) as raised:
        apply_fp8(model, None, tokens=100, recipe="tensorwise", emulate=True, options=Fp8Options(fp8_param=True))
    assert "self_attn.q_proj" in raised.value.__notes__[0]
    assert "load the model again" in raised.value.__notes__[0]
    assert not has_fp8(model)
    assert not any(one.requires_grad for one in model.parameters())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("model.safetensors", None), "a loaded torch.nn.Module, got a str; load it first"),
        ((nn.Linear(2, 2), 3), "the path of its file, or None, got a int"),
    ],
)
def test_what_is_no_model_or_no_policy_is_refused(given, message):
    with pytest.raises(Fp8Error, match=message):
        apply_fp8(*given, tokens=100, emulate=True)


def test_a_parametrized_layer_has_a_state_dict():
    model = llama(num_hidden_layers=1)
    apply_fp8(model, None, tokens=100, recipe="tensorwise", emulate=True)
    layer = model.model.layers[0].self_attn.o_proj
    torch.nn.utils.parametrizations.weight_norm(layer)
    assert "model.layers.0.self_attn.o_proj.parametrizations.weight.original1" in model.state_dict()
    model.eval()(input_ids=tokens_of(32))


def test_fp8_param_stores_weights_in_fp8():
    model = llama()
    applied = apply_fp8(model, policy_of(**ALL), tokens=100, emulate=True, options=Fp8Options(fp8_param=True))
    assert model.model.layers[0].mlp.down_proj.weight.dtype == torch.float8_e4m3fn
    assert any("weight_master" in note for note in applied.notes)


@pytest.mark.parametrize("trainer", ["AdamW", "Trainer"])
def test_every_tensor_learns_with_fp8_param(trainer, tmp_path):
    model = llama()
    apply_fp8(model, policy_of(**ALL), tokens=100, emulate=True, options=Fp8Options(fp8_param=True))
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    ids = tokens_of(100)
    if trainer == "AdamW":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
        model(input_ids=ids)  # FP8 weights follow their masters in the next forward
    else:
        run_trainer(model, ids, tmp_path)
    for name, tensor in model.state_dict().items():
        if not name.endswith("weight_scale"):  # a power of two, which may stay
            assert not torch.equal(tensor.float(), before[name].float()), name


def test_norms_keep_out_of_weight_decay(tmp_path):
    from transformers import Trainer, TrainingArguments

    model = llama()
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    before = Trainer(model, arguments).get_decay_parameter_names(model)
    assert not any("norm" in name for name in before)
    apply_fp8(model, policy_of(**ALL), tokens=100, emulate=True)
    assert any(name.endswith("fused.norm.weight") for name, _ in model.named_parameters())
    after = Trainer(model, arguments).get_decay_parameter_names(model)
    assert not any("norm" in name for name in after)


def run_trainer(model, ids, folder):
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row} for row in ids]
    arguments = TrainingArguments(
        str(folder), max_steps=2, learning_rate=1e-2, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True
    )
    Trainer(model, arguments, train_dataset=rows).train()
    model(input_ids=ids)


# ---- confirming ------------------------------------------------------------------------------------------------------


class SetClock(CpuStopwatch):
    """A clock on which FP8 blocks take the time they are told, for any count of FP8 layers or by it."""

    def __init__(self, fp8_ms):
        self.now, self.fp8_ms, self.calls = 0.0, fp8_ms, 0
        super().__init__(lambda: self.now)

    def watch(self, monkeypatch):
        from bitplan.fp8.bench import confirm

        plain_step = confirm._step

        def step(block, inputs, compiled):
            run = plain_step(block, inputs, compiled)
            layers = sum(isinstance(module, Fp8Linear) for module in block.modules())
            fp8_ms = self.fp8_ms[layers] if layers and isinstance(self.fp8_ms, dict) else self.fp8_ms

            def timed():
                if self.calls < 2:
                    run()  # it must really run
                self.calls += 1
                self.now += (fp8_ms if layers else 10.0) / 1e3

            return timed

        monkeypatch.setattr(confirm, "_step", step)
        return self


@pytest.mark.parametrize(
    ("fp8_ms", "answer", "layers"),
    [(8.0, "win", 8), (12.0, "lose", 0), (10.0, "win", 8)],
    ids=["faster", "slower", "equal"],
)
def test_confirm(fp8_ms, answer, layers, monkeypatch):
    model = llama()
    clock = SetClock(fp8_ms).watch(monkeypatch)
    applied = apply_fp8(
        model, policy_of(**ALL), tokens=100, emulate=True, confirm=True, options=Fp8Options(stopwatch=clock)
    )
    (confirmed,) = applied.confirmed  # both blocks are of one make
    assert (confirmed.block, confirmed.answer) == ("model.layers.0", answer)
    assert applied.fp8_layers == layers
    assert sum(isinstance(module, Fp8Linear) for module in model.modules()) == layers
    if not layers:
        assert applied.rows[0].reason.startswith("turned down by confirming model.layers.0: 0.833x BF16")
        assert "turned down" in str(applied)
    ids = tokens_of(100)
    model(input_ids=ids, labels=ids).loss.backward()


@pytest.mark.parametrize(
    ("wins", "times", "taken", "layers"),
    [
        (("fc1", "fc2"), {2: 9.0, 4: 7.0}, "all", 8),  # what loses alone gains beside the others
        (("fc1", "fc2"), {2: 7.0, 4: 9.0}, "plan", 4),
        (("fc1", "fc2"), {2: 7.0, 4: 7.0}, "plan", 4),  # not shown to be faster
        (("fc1", "fc2"), {2: 12.0, 4: 8.0}, "all", 8),
        (("fc1", "fc2"), {2: 12.0, 4: 12.0}, "bf16", 0),
        ((), {4: 8.0}, "all", 8),
        ((), {4: 12.0}, "bf16", 0),
    ],
)
def test_confirm_takes_all_fp8_where_that_is_faster(wins, times, taken, layers, monkeypatch):
    model = llama()
    clock = SetClock(times).watch(monkeypatch)
    speedups = {name: WINS if name in wins else {64: 0.5, 128: 0.6} for name in LAYERS}
    applied = apply_fp8(
        model, policy_of(**speedups), tokens=100, emulate=True, confirm=True, options=Fp8Options(stopwatch=clock)
    )
    (confirmed,) = applied.confirmed
    assert confirmed.taken == taken
    assert applied.fp8_layers == layers
    if taken == "all":
        assert applied.rows[0].reason.startswith("all FP8, by confirming model.layers.0: ")
    ids = tokens_of(100)
    model(input_ids=ids, labels=ids).loss.backward()


@pytest.mark.parametrize(("timing", "captured"), [("eager", 0), ("graph", 2)])
def test_confirm_times_as_it_is_told(timing, captured, monkeypatch):
    clock = SetClock(8.0).watch(monkeypatch)
    seen = []
    monkeypatch.setattr(clock, "capture", lambda call: seen.append(call) or call, raising=False)
    options = Fp8Options(confirm_timing=timing, stopwatch=clock)
    apply_fp8(llama(), policy_of(**ALL), tokens=100, emulate=True, confirm=True, options=options)
    assert len(seen) == captured


def test_confirm_refuses_a_timing_that_it_does_not_know():
    with pytest.raises(Fp8Error, match="confirm_timing must be one of eager, graph, got 'cuda'"):
        apply_fp8(
            llama(), policy_of(**ALL), tokens=100, emulate=True, confirm=True, options=Fp8Options(confirm_timing="cuda")
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"confirm_compiled": "reduce_overhead"},
            "must be True, False or one of .*reduce-overhead.*, got 'reduce_overhead'",
        ),
        ({"confirm_compiled": "reduce-overhead", "confirm_timing": "graph"}, "makes CUDA graphs by itself"),
        ({"fp8": "e3m4"}, "fp8 must be 'e4m3' or 'hybrid'"),
    ],
)
def test_options_that_cannot_be_are_refused(given, message):
    with pytest.raises(Fp8Error, match=message):
        Fp8Options(**given)


def test_an_unknown_keyword_is_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'extrapolates'"):
        apply_fp8(llama(num_hidden_layers=1), None, tokens=100, extrapolates=True)


def test_confirm_compiles_every_block_or_says_that_it_could_not(monkeypatch):
    limits = []
    clock = SetClock(8.0).watch(monkeypatch)
    monkeypatch.setattr(torch, "compile", lambda call, **_mode: limits.append(dynamo_limits()) or call)
    apply_fp8(
        llama(),
        policy_of(**ALL),
        tokens=100,
        emulate=True,
        confirm=True,
        options=Fp8Options(confirm_compiled=True, stopwatch=clock),
    )
    assert limits == [{"recompile_limit": 256, "fail_on_recompile_limit_hit": True}] * 2
    assert dynamo_limits()["recompile_limit"] < 256  # the user's own again


def dynamo_limits():
    import torch._dynamo.config as dynamo

    return {key: getattr(dynamo, key) for key in ("recompile_limit", "fail_on_recompile_limit_hit")}


def test_confirm_on_a_real_clock_and_a_plain_model():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(128, 512, bias=False), nn.Linear(512, 128, bias=False)

        def forward(self, x):
            return x + self.fc2(self.fc1(x).relu())

    model = nn.Sequential(Block(), Block())
    applied = apply_fp8(model, None, tokens=64, recipe="tensorwise", emulate=True, confirm=True)
    assert applied.confirmed[0].answer in ("win", "lose", "undecided")
    assert applied.fp8_layers == (4 if applied.confirmed[0].answer == "win" else 0)


# ---- YAML ------------------------------------------------------------------------------------------------------------

MODEL_KEYS = "num_layers: 2\nhidden_size: 128\nffn_hidden_size: 256\nnum_attention_heads: 4\nnum_query_groups: 2\n"


def yaml_of(tmp_path, text):
    (tmp_path / "base.yaml").write_text(MODEL_KEYS)
    path = tmp_path / "model.yaml"
    path.write_text(text)
    return path


def test_loongforges_keys(tmp_path):
    policy_of(recipe="blockwise", **ALL).save(tmp_path / "policy.json")
    path = yaml_of(
        tmp_path,
        "defaults:\n  - base\n  - _self_\nfp8: 'e4m3'\nfp8_recipe: 'blockwise'\nfp8_param: False\nselective_fp8: true\n"
        "fp8_dynamic_policy_path: 'policy.json'\nfp8_dynamic_num_tokens: 128\n",
    )
    model = llama()
    applied = apply_fp8(model, path, emulate=True)
    assert applied.fp8_layers == 8
    assert {row.tokens for row in applied.rows} == {128}
    assert model.model.layers[0].mlp.down_proj.recipe.name == "blockwise"


def test_tokens_from_the_caller_full_fp8_and_none(tmp_path):
    path = yaml_of(tmp_path, MODEL_KEYS + "fp8: hybrid\nfp8_recipe: tensorwise\n")
    model = llama()
    assert apply_fp8(model, path, tokens=4096, emulate=True).fp8_layers == 8
    assert model.model.layers[0].mlp.down_proj.recipe.fp8 == "hybrid"
    path = yaml_of(tmp_path, MODEL_KEYS)
    applied = apply_fp8(llama(), path, tokens=4096, emulate=True)
    assert {row.reason for row in applied.rows} == {"FP8 was not asked for in the part llm"}


def test_a_vlm_has_a_policy_for_each_part(tmp_path):
    policy_of(fc1=WINS, fc2=WINS).save(tmp_path / "llm.json")
    policy_of(part="vit", fc2=WINS).save(tmp_path / "vit.json")
    keys = "".join(f"    {line}\n" for line in MODEL_KEYS.splitlines())
    part = "    fp8: e4m3\n    fp8_recipe: tensorwise\n    selective_fp8: true\n    fp8_dynamic_num_tokens: {}\n"
    path = yaml_of(
        tmp_path,
        f"model:\n  foundation:\n{keys}{part.format(128)}    fp8_dynamic_policy_path: llm.json\n"
        f"  image_encoder:\n{keys}{part.format(64)}    fp8_dynamic_policy_path: vit.json\n",
    )

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(128, 512, bias=False), nn.Linear(256, 128, bias=False)

        def forward(self, x):
            gate, up = self.fc1(x).chunk(2, -1)
            return self.fc2(nn.functional.silu(gate) * up)

    model = nn.ModuleDict({"image": nn.ModuleList([Mlp()]), "text": nn.ModuleList([Mlp()])})
    model.config, model["image"].config = VisionLanguage(), VisionLanguage.vision_config
    applied = apply_fp8(model, path, emulate=True)
    assert [(row.part, row.name, row.precision, row.tokens) for row in applied.rows] == [
        ("vit", "fc1", "fp8", 64),  # estimated: it has more work than fc2, which wins
        ("vit", "fc2", "fp8", 64),
        ("llm", "fc1", "fp8", 128),
        ("llm", "fc2", "fp8", 128),
    ]
    assert "its norm fused, which here stays apart" in applied.rows[2].reason


def test_shapes_that_were_never_measured_are_named_with_the_command_that_measures_them(tmp_path):
    policy_of(fc2=WINS).save(tmp_path / "policy.json")
    applied = apply_fp8(
        llama(num_hidden_layers=1),
        tmp_path / "policy.json",
        tokens=100,
        emulate=True,
        options=Fp8Options(estimate=False),
    )
    assert applied.fp8_layers == 1
    (note,) = [note for note in applied.notes if note.startswith("never measured")]
    command = note.partition("measure them: ")[2]
    assert "--shapes 256x128:norm,128x128,512x128:norm --part llm --recipe tensorwise" in command
    assert f"--into {tmp_path / 'policy.json'}" in command
    layers = layers_of_shapes(command.split()[4])
    assert [(layer.kind, layer.shape) for layer in layers] == [
        ("layernorm_column", (256, 128)),
        ("column", (128, 128)),
        ("layernorm_column", (512, 128)),
    ]
    with pytest.raises(ModelConfigError, match=r"OUTxIN or OUTxIN:norm .* got '12x'"):
        layers_of_shapes("12x")


def test_a_layer_under_any_name_is_found_by_its_shape():
    policy = policy_of(qkv=WINS, proj={64: 0.8, 128: 0.9}, fc1=WINS, fc2=WINS)
    model = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 128), nn.Tanh(), nn.Linear(128, 128))
    applied = apply_fp8(model, policy, tokens=100, emulate=True, include=["*"])
    assert [(row.shape, row.name, row.precision) for row in applied.rows] == [
        ((256, 128), "qkv", "fp8"),
        ((128, 256), "fc2", "fp8"),
        ((128, 128), "proj", "bf16"),
    ]
    assert "measured with its norm fused, which here stays apart" in applied.rows[0].reason


def test_a_summary_as_json():
    applied = apply_fp8(llama(), policy_of(**ALL), tokens=100, emulate=True)
    assert (
        json.loads(json.dumps(applied.to_dict()))["rows"][0]["path"] == "model.layers.0.self_attn.q_proj+k_proj+v_proj"
    )


# ---- experts ---------------------------------------------------------------------------------------------------------

MOE_MODELS = {
    "Mixtral": SMALL | {"num_local_experts": 4},
    "Qwen2Moe": SMALL | MOE | {"shared_expert_intermediate_size": 128},
    "DeepseekV3": SMALL | DEEPSEEK,
}


@pytest.mark.parametrize("kind", few(MOE_MODELS, 2))
def test_moe_models_in_fp8_compute_nearly_the_same(kind):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**MOE_MODELS[kind])
    model = getattr(transformers, f"{kind}ForCausalLM")(config).train()
    plain = copy.deepcopy(model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    applied = apply_fp8(model, None, tokens=100, recipe="tensorwise", emulate=True)
    grouped = [row for row in applied.rows if row.kind.endswith("_grouped")]
    assert grouped
    assert applied.fp8_layers == len(applied.rows)
    changed = model.state_dict()
    assert set(changed) == set(state)
    assert all(torch.equal(changed[name], state[name]) for name in state)
    hidden = torch.randn(60, 128, generator=torch.Generator().manual_seed(0))
    experts = model.model.layers[-1].mlp.experts
    index = torch.rand(60, 4, generator=torch.Generator().manual_seed(1)).topk(2).indices
    weights = torch.full((60, 2), 0.5)
    ours = experts(hidden, index, weights)
    theirs = plain.model.layers[-1].mlp.experts(hidden, index, weights)
    assert ((ours - theirs).norm() / theirs.norm()).item() < 0.1
    ids = tokens_of(100)
    model(input_ids=ids, labels=ids).loss.backward()
    assert experts.fc1.weight.grad.isfinite().all()


def test_experts_by_their_own_rules():
    size = {"part": "llm", "etp": 1, "ep": 1, "num_gemms": 4, "topk": 2, "routing": "uniform"}
    rows = series({200: 1.3}, kind="column_grouped", shape=(512, 128), **size)
    rows += series({200: 0.8}, kind="row_grouped", shape=(128, 256), **size)
    policy = merge_reports([report(rows, recipe="rowwise")]).policy
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**MOE_MODELS["Mixtral"])).train()
    applied = apply_fp8(model, policy, tokens=100, emulate=True)
    chosen = {row.name: (row.precision, row.tokens) for row in applied.rows if row.kind.endswith("_grouped")}
    assert chosen == {"fc1": ("fp8", 200), "fc2": ("bf16", 200)}
    experts = model.model.layers[0].mlp.experts
    assert experts.fc1.gemms.recipes == ("rowwise",)
    assert experts.fc2.gemms.is_bf16


def test_experts_have_no_mxfp8():
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**MOE_MODELS["Mixtral"])).train()
    applied = apply_fp8(model, None, tokens=100, recipe="mxfp8", emulate=True)
    reasons = {row.name: row.reason for row in applied.rows if row.kind.endswith("_grouped")}
    assert set(reasons.values()) == {"experts have the recipes tensorwise, rowwise, blockwise, not mxfp8"}


# ---- GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own, of torch 2.11
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # the rotary table is float32
@pytest.mark.gpu
def test_gpu_compiled_layers_agree_with_bf16():
    from bitplan.fp8.layer_settings import fp8_obstacle

    device = torch.device("cuda")
    if fp8_obstacle(device) is not None:
        pytest.skip("this GPU has no FP8")
    model = llama(hidden_size=256, intermediate_size=512).to(device, torch.bfloat16)
    plain = copy.deepcopy(model)
    applied = apply_fp8(model, None, tokens=256, recipe="tensorwise")
    assert applied.fp8_layers == 8
    ids = tokens_of(256).to(device)
    theirs = plain(input_ids=ids, labels=ids)
    for run in (model, torch.compile(model)):
        ours = run(input_ids=ids, labels=ids)
        assert abs(ours.loss.item() - theirs.loss.item()) < 0.05
        ours.loss.backward()
    assert model.model.layers[0].self_attn.q_proj.fused.weight.grad.isfinite().all()


@pytest.mark.gpu
def test_gpu_confirm_gives_an_interval():
    device = torch.device("cuda")
    model = llama(hidden_size=256, intermediate_size=512).to(device, torch.bfloat16)
    applied = apply_fp8(model, None, tokens=512, recipe="tensorwise", confirm=True)
    (confirmed,) = applied.confirmed
    assert confirmed.low <= confirmed.speedup <= confirmed.high
    assert applied.fp8_layers == (8 if confirmed.answer == "win" else 0)
