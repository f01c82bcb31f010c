"""Experts that the file, or a model in memory, has as one tensor a layer: searched, packed, run and timed."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr
from types import SimpleNamespace

import pytest
import torch
import transformers

import bitplan
from bitplan import open_tensors, quantize_file
from bitplan.cli import run
from bitplan.files.input_statistics import expert_name
from bitplan.files.open_files import write_tensors
from bitplan.files.round_with_evidence import open_evidence
from bitplan.files.tensor_file import TensorSpec
from bitplan.rounding.weights import round_weight
from bitplan.searching import timing
from bitplan.searching.damage import ExpertDamage, RoundedWeights
from bitplan.searching.goal import SearchError
from bitplan.searching.runtime_formats import TARGETS
from bitplan.searching.searched_model import items_of_gguf, prepare, subject_of
from bitplan.searching.statistics import InputStatistics
from bitplan.searching.timing import ExpertArms
from tests.files.engines.tiny_models import save_tokenizer
from tests.searching.tiny_mixtral import rounding_to_nearest

EXPERTS, HIDDEN, INNER = 4, 64, 32
FORMATS = ("int4_g32", "int8_row", "nvfp4", "bfloat16")
SIZES = {
    "vocab_size": 96,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
}
GATE_UP, DOWN = (f"model.layers.0.mlp.experts.{name}_proj" for name in ("gate_up", "down"))
IDS = torch.randint(96, (12, 16), generator=torch.Generator().manual_seed(1))
HELD_OUT = torch.randint(96, (3, 16), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module", autouse=True)
def plain_rounding():
    with rounding_to_nearest():
        yield


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    """A tiny gpt-oss as a folder, [experts, inputs, outputs] with biases, and a search of it."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = transformers.GptOssConfig(**SIZES, head_dim=32, rope_parameters=rope, layer_types=["full_attention"])
    model = transformers.GptOssForCausalLM(config).eval()
    with redirect_stderr(io.StringIO()):  # its progress bar
        model.save_pretrained(folder / "model")
    save_tokenizer(folder / "model")
    return model, folder, _search(folder / "model", folder / "found")


@pytest.fixture(scope="module")
def in_memory():
    """A tiny Mixtral in memory, [experts, outputs, inputs], and a search of it."""
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES)).eval()
    return model, _search(model, None)


def _search(model, out):
    return bitplan.search(model, [IDS], goal={"bits": 6.0}, held_out=[HELD_OUT], formats=FORMATS, out=out)


def _kl(model, other):
    with torch.no_grad():
        one, two = (each(HELD_OUT).logits.double().log_softmax(-1)[:, :-1] for each in (model, other))
    return float((one.exp() * (one - two)).sum(-1).mean())


def test_gpt_oss_runs_packed_as_far_from_the_model_as_the_search_said(gpt_oss, tmp_path):
    model, folder, found = gpt_oss
    assert found.plan.entries[GATE_UP].shape == (EXPERTS, 2 * INNER, HIDDEN)  # rows are outputs
    assert {found.plan[name].format for name in (GATE_UP, DOWN)} <= {
        "int4_g32",
        "int8_row",
    }  # no shared factor, no cast
    words = ["quantize", str(folder / "model"), str(tmp_path / "packed"), "--plan", str(folder / "found" / "plan.json")]
    assert run(words) == 0
    packed = bitplan.load_packed(tmp_path / "packed", dtype=torch.float32).model
    assert _kl(model, packed) == pytest.approx(found.winner.kl.mean, rel=1e-3)
    bitplan.save_packed(packed, tmp_path / "again")
    again = bitplan.load_packed(tmp_path / "again", dtype=torch.float32).model
    assert _kl(packed, again) == 0.0


def test_evidence_rounds_each_expert_by_its_own_inputs(gpt_oss, tmp_path):
    model, folder, _ = gpt_oss
    path = folder / "found" / "evidence.safetensors"
    report = quantize_file(
        folder / "model", tmp_path / "packed", {GATE_UP: "int4_g32", DOWN: "int4_g32"}, evidence=path
    )
    rounding = next(row["rounding"] for row in report.rows if row["name"] == GATE_UP)
    assert rounding["measure"] == "hessian"
    assert rounding["after"] < rounding["before"]
    numbers = model.get_parameter(GATE_UP).detach()
    with open_evidence(path) as evidence, open_tensors(tmp_path / "packed") as file:
        hessian = evidence.hessian(expert_name(GATE_UP, 2))
        alone = round_weight(numbers[2].T.contiguous(), "int4_g32", hessian=hessian)
        torch.testing.assert_close(file.read(GATE_UP).data[2], alone.data)


def test_evidence_of_fewer_experts_is_refused(gpt_oss, tmp_path):
    _, folder, _ = gpt_oss
    torch.manual_seed(0)
    sizes = SIZES | {"num_local_experts": EXPERTS + 1}
    config = transformers.GptOssConfig(**sizes, head_dim=32, layer_types=["full_attention"])
    with redirect_stderr(io.StringIO()):
        transformers.GptOssForCausalLM(config).save_pretrained(tmp_path / "model")
    with pytest.raises(bitplan.BitplanError, match=r"fewer experts of .*_proj' than the 5"):
        quantize_file(
            tmp_path / "model", tmp_path / "packed", "int4_g32", evidence=folder / "found" / "evidence.safetensors"
        )


def test_a_model_in_memory_is_as_far_from_itself_as_the_search_said(in_memory):
    model, found = in_memory
    reference = transformers.MixtralForCausalLM(model.config).eval()
    reference.load_state_dict(model.state_dict())
    packed = transformers.MixtralForCausalLM(model.config).eval()
    packed.load_state_dict(model.state_dict())
    bitplan.apply_plan(packed, found.plan)
    assert found.plan[GATE_UP].format in ("int4_g32", "int8_row")
    assert _kl(reference, packed) == pytest.approx(found.winner.kl.mean, rel=1e-3)


@pytest.mark.parametrize("chosen", [{"keep": ["*experts.down_proj"]}, {"only": ["*experts.gate_up_proj", "*q_proj*"]}])
def test_a_packed_layer_keeps_both_of_its_tensors_or_neither(gpt_oss, in_memory, chosen):
    for model, path in ((gpt_oss[0], gpt_oss[1] / "model"), (in_memory[0], None)):
        subject = subject_of(model, path=path, **chosen)
        assert set(subject.tensors) >= {GATE_UP}
        subject.aim_at(TARGETS["bitplan"])
        assert not {GATE_UP, DOWN} & set(subject.tensors)
        assert any("q_proj" in name for name in subject.tensors)
        assert subject.stays[GATE_UP].reason == f"kept with {DOWN}: a packed layer has all its experts packed or none"
        assert "kept with" not in subject.stays[DOWN].reason
    elsewhere = subject_of(in_memory[0], **chosen)
    elsewhere.aim_at(TARGETS["llama.cpp"])
    assert GATE_UP in elsewhere.tensors


def test_experts_predicted_together_are_about_the_sum_of_each(gpt_oss):
    _, folder, _ = gpt_oss
    subject, _ = prepare(folder / "model", [IDS], None, None)
    rounded = RoundedWeights(subject, InputStatistics.load(folder / "found", {}))
    names = subject.tensors[GATE_UP].weights
    together = ExpertDamage(rounded).predicted(names, "int4_g32")
    assert together == pytest.approx(sum(rounded.predicted(name, "int4_g32") for name in names), rel=0.25)


def test_experts_are_timed_as_one_product(in_memory):
    model, found = in_memory
    subject, wanted = subject_of(model), found.evidence
    timing.time_groups(subject, wanted, 3, ["int8_row"], lambda _count, _name: None)
    group = next(each for each in wanted.groups.values() if GATE_UP in each.tensors)
    assert group.reference_us[3] > 0
    assert group.formats["int8_row"].us[3] > 0
    arms = ExpertArms(subject, model.get_parameter(GATE_UP).detach(), 3)
    plain, packed = arms.plain()(), arms.packed("int8_row")()()
    assert plain.shape == (3 * 2, 2 * INNER)
    torch.testing.assert_close(packed.float(), plain.float(), atol=0.1, rtol=0.05)
    silent = SimpleNamespace(model=torch.nn.Linear(1, 1), where="mine")
    with pytest.raises(SearchError, match="does not say how many a token is sent to"):
        ExpertArms(silent, model.get_parameter(GATE_UP).detach(), 3)


def test_experts_of_a_gguf_file_are_rows_of_the_models(in_memory, tmp_path):
    model, _ = in_memory
    gate_up, down = (model.get_parameter(name).detach() for name in (GATE_UP, DOWN))
    tensors = {"gate": gate_up[:, :INNER], "up": gate_up[:, INNER:], "down": down + 1}  # the last is another model's
    named = {f"blk.0.ffn_{part}_exps.weight": numbers.contiguous() for part, numbers in tensors.items()}
    promises = [TensorSpec.of(name, tuple(each.shape), None, torch.float32) for name, each in named.items()]
    with write_tensors(tmp_path / "some.gguf", promises) as writer:
        for name, each in named.items():
            writer.write(name, each)
    slices = {}
    found = items_of_gguf(model, lambda _name: True, tmp_path / "some.gguf", slices)
    assert sorted(set(found.values())) == ["blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight"]
    last = slices[expert_name("blk.0.ffn_up_exps.weight", 3)]
    assert torch.equal(last.read(gate_up), gate_up[3, INNER:])


def test_gpt_oss_in_mxfp4_is_told_how_to_be_decoded(gpt_oss, tmp_path):
    _, folder, _ = gpt_oss
    config = json.loads((folder / "model" / "config.json").read_text())
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / name).symlink_to(folder / "model" / name)
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(SearchError, match=r"decodes them .*\(to='hf', experts='bfloat16'\)"):
        prepare(tmp_path, [IDS], None, None)
