"""Models exported to GGUF: read back by transformers they give the logits of the original."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext

import gguf
import pytest
import safetensors.torch
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from bitplan.base.errors import BitplanError, StoreError
from bitplan.cli import run
from bitplan.files.engines.gguf import write_parts
from bitplan.files.engines.gguf_metadata import ModelConfig, model_metadata
from bitplan.files.engines.targets import ExportRequest, export_model, prepare_export
from bitplan.files.gguf import GGUFValue
from bitplan.files.headers import plan_for_file
from bitplan.files.open_files import open_tensors
from bitplan.files.quantize_files import quantize_file
from bitplan.files.tensor_file import TensorSpec
from bitplan.files.transformers_names import silence_transformers
from bitplan.formats import Encoded
from bitplan.formats.codec import decode
from bitplan.packed.checkpoints.causal_lm import load_causal_lm
from bitplan.plan import Plan
from bitplan.rounding.weights import round_weight
from tests.files.engines.tiny_models import TOKENS, save_tiny

IDS = torch.arange(3, 19).reshape(1, -1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each family, made when it is asked for."""
    place, made = tmp_path_factory.mktemp("models"), {}

    def folder(kind: str):
        if kind not in made:
            made[kind] = save_tiny(place / kind, kind)
        return place / kind, made[kind]

    return folder


def metadata(path) -> dict:
    with open_tensors(path) as file:
        return {key: value.value for key, value in file.metadata.items()}


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_transformers_reads_the_same_model_back(kind, folders, tmp_path):
    folder, model = folders(kind)
    report = export_model(folder, tmp_path / "a.gguf", "gguf", "float32")
    assert {row.format for row in report.rows} == {"float32"}
    again = load_causal_lm(tmp_path / "a.gguf")
    with torch.no_grad():
        torch.testing.assert_close(again(IDS), model(IDS).logits, rtol=1e-4, atol=1e-4)
    assert again.tokenizer("the cat", add_special_tokens=False)["input_ids"] == [TOKENS.index("the"), 3, 6, 4, 23]


@pytest.mark.parametrize("kind", ["qwen3", "gemma3", "qwen3_moe"])
def test_transformers_turns_every_tensor_back(kind, folders, tmp_path):
    """Its reader of configs leaves out sizes of heads, so that the tensors are compared, and not the logits."""
    folder, model = folders(kind)
    export_model(folder, tmp_path / "a.gguf", "gguf", "float32")
    with silence_transformers():
        found = load_gguf_checkpoint(str(tmp_path / "a.gguf"), return_tensors=True, model_to_load=model)["tensors"]
    for name, own in model.state_dict().items():
        if name != "lm_head.weight" or not model.config.tie_word_embeddings:
            torch.testing.assert_close(torch.as_tensor(found[name]), own, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["llama3", "mixtral"])
def test_what_transformers_does_not_read_has_its_tensors_in_place(kind, folders, tmp_path):
    folder, model = folders(kind)
    report = export_model(folder, tmp_path / "a.gguf", "gguf", "float32")
    names = {row.name: row for row in report.rows}
    with open_tensors(tmp_path / "a.gguf") as file, open_tensors(folder) as source:
        if kind == "mixtral":
            stacked = file.read_float("blk.1.ffn_up_exps.weight")
            for expert in range(4):
                own = source.read_float(f"model.layers.1.block_sparse_moe.experts.{expert}.w3.weight")
                assert torch.equal(stacked[expert], own)
            assert names["blk.0.ffn_gate_inp.weight"].format == "float32"
            assert metadata(tmp_path / "a.gguf")["llama.expert_used_count"] == 2
            return
        ours = model.model.rotary_emb.inv_freq
        plain = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
        torch.testing.assert_close(plain / file.read_float("rope_freqs.weight"), ours)
        assert "output.weight" in names


def test_the_metadata_says_what_llama_cpp_asks_for(folders, tmp_path):
    folder, _ = folders("llama")
    export_model(folder, tmp_path / "a.gguf", "gguf", "q4_0_gguf")
    found = metadata(tmp_path / "a.gguf")
    assert found["general.architecture"] == "llama"
    assert (found["general.file_type"], found["general.quantization_version"]) == (2, 2)
    assert found["llama.attention.head_count_kv"] == 2
    assert found["llama.rope.dimension_count"] == 16
    assert (found["tokenizer.ggml.model"], found["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    assert list(found["tokenizer.ggml.tokens"])[-4:] == ["the", "[PAD33]", "[PAD34]", "[PAD35]"]
    assert list(found["tokenizer.ggml.merges"]) == ["t h", "h e", "th e"]
    assert list(found["tokenizer.ggml.token_type"])[:4] == [3, 3, 3, 1]
    assert (found["tokenizer.ggml.bos_token_id"], found["tokenizer.ggml.eos_token_id"]) == (1, 2)
    assert found["tokenizer.chat_template"] == "{{ messages[0].content }}"
    with open_tensors(tmp_path / "a.gguf") as file:
        assert file.spec("blk.0.attn_norm.weight").format == "float32"
        assert file.spec("blk.0.attn_q.weight").format == "q4_0_gguf"
        assert "output.weight" not in file.specs  # tied
    assert len(gguf.GGUFReader(tmp_path / "a.gguf").tensors) == len(file.specs)


def test_gemma_of_62_layers_scales_by_another_size(tmp_path):
    """llama.cpp knows Gemma 3 27B by its layers."""
    save_tiny(tmp_path, "gemma3")
    config = json.loads((tmp_path / "config.json").read_text()) | {"query_pre_attn_scalar": 16, "layer_types": None}
    for layers in (62, 63):
        (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
        with nullcontext() if layers == 62 else pytest.raises(StoreError, match="takes the size of a head, 32"):
            model_metadata(ModelConfig(tmp_path), "a")


@pytest.mark.parametrize(
    ("kind", "changes", "wanted"),
    [
        ("gemma3", {"sliding_window_pattern": 3}, {"sliding_window": 16, "sliding_window_pattern": 3}),
        ("gemma3", {"_sliding_window_pattern": 4}, {"sliding_window": 16, "sliding_window_pattern": 4}),
        ("gemma3", {}, {"sliding_window": 16}),
        ("gemma3", {"sliding_window": None}, {}),
        ("llama", {}, {}),  # llama.cpp's has none
        ("qwen3_moe", {}, {}),
    ],
)
def test_windows_of_configs_that_leave_settings_out(kind, changes, wanted, folders, tmp_path):
    left_out = {"layer_types", "_sliding_window_pattern", "sliding_window_pattern", "decoder_sparse_step"}
    config = json.loads((folders(kind)[0] / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in left_out}
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": 16} | changes))
    found = model_metadata(ModelConfig(tmp_path), "a")
    windows = {key.split(".")[-1]: value.value for key, value in found.items() if "sliding" in key}
    assert windows == wanted


def test_gemma_layers_that_look_at_a_window_are_those_of_the_config(tmp_path):
    window, whole = "sliding_attention", "full_attention"
    for place, (kinds, wanted) in enumerate((([window, whole], 2), ([window, window], None))):
        save_tiny(tmp_path / f"{place}", "gemma3", layer_types=kinds)
        export_model(tmp_path / f"{place}", tmp_path / f"{place}.gguf", "gguf", "float32")
        assert metadata(tmp_path / f"{place}.gguf").get("gemma3.attention.sliding_window_pattern") == wanted
    config = json.loads((tmp_path / "0" / "config.json").read_text())
    for change, message in (
        ({"layer_types": [whole, window]}, "repeat in no pattern"),
        ({"query_pre_attn_scalar": 16}, "takes the size of a head, 32"),
    ):
        (tmp_path / "0" / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(StoreError, match=message):
            prepare_export(ExportRequest(tmp_path / "0", tmp_path / "a.gguf", "float32"), "gguf")


def test_a_plan_decides_and_packed_rows_are_moved_not_rounded_again(folders, tmp_path):
    folder, _ = folders("llama")
    quantize_file(folder / "model.safetensors", tmp_path / "m.safetensors", "q8_0_gguf")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with open_tensors(tmp_path / "m.safetensors") as file:
        plan = plan_for_file(file, {"*q_proj*": "q8_0_gguf", "*down*": "q5_1_gguf"})
        packed = file.read("model.layers.0.self_attn.q_proj.weight")
    report = export_model(tmp_path / "m.safetensors", tmp_path / "a.gguf", "gguf", plan)
    assert {row.name: row.format for row in report.rows}["blk.0.ffn_down.weight"] == "q5_1_gguf"
    with open_tensors(tmp_path / "a.gguf") as file:
        moved = file.read("blk.0.attn_q.weight")
    assert isinstance(moved, Encoded)
    order = torch.tensor([h * 16 + half * 8 + place for h in range(4) for place in range(8) for half in range(2)])
    assert torch.equal(decode(moved), decode(packed)[order])


def test_compare_says_that_the_numbers_are_those_of_the_folder(folders, tmp_path, capsys):
    folder, _ = folders("qwen3")
    export_model(folder, tmp_path / "a.gguf", "gguf", "float32")
    assert run(["compare", str(folder), str(tmp_path / "a.gguf")]) == 0
    assert "values identical: all 25 tensors" in capsys.readouterr().out
    export_model(folder, tmp_path / "b.gguf", "gguf", "q8_0_gguf")
    assert run(["compare", str(folder), str(tmp_path / "b.gguf")]) == 0
    assert "worst: " in capsys.readouterr().out


def test_rows_that_blocks_do_not_divide_get_the_nearest_format_and_the_reason(folders, tmp_path):
    folder, _ = folders("llama")
    report = export_model(folder, tmp_path / "a.gguf", "gguf", "q4_k_gguf")
    row = next(row for row in report.rows if row.name == "blk.0.ffn_up.weight")
    assert row.format == "q5_0_gguf"
    assert "rows of 64 are not whole blocks of 256 (q4_k_gguf), q5_0_gguf holds them" in row.reason


def test_an_imatrix_weighs_the_search_and_is_named(folders, tmp_path):
    folder, _ = folders("llama")
    export_model(folder, tmp_path / "plain.gguf", "gguf", "q4_1_gguf")
    writer = gguf.GGUFWriter(tmp_path / "imatrix.gguf", "imatrix")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["text.txt"])
    writer.add_uint32("imatrix.chunk_count", 7)
    sums = torch.randn(1, 64, generator=torch.Generator().manual_seed(1)).exp() * 5
    writer.add_tensor("blk.0.ffn_up.weight.in_sum2", sums.numpy())
    writer.add_tensor("blk.0.ffn_up.weight.counts", torch.tensor([[5.0]]).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    export_model(folder, tmp_path / "a.gguf", "gguf", "q4_1_gguf", evidence=tmp_path / "imatrix.gguf")
    found = metadata(tmp_path / "a.gguf")
    assert found["quantize.imatrix.file"] == "imatrix.gguf"
    assert (found["quantize.imatrix.entries_count"], found["quantize.imatrix.chunks_count"]) == (1, 7)
    with open_tensors(folder) as file:
        numbers = file.read_float("model.layers.0.mlp.up_proj.weight")
    with open_tensors(tmp_path / "a.gguf") as weighted, open_tensors(tmp_path / "plain.gguf") as plain:
        own = weighted.read("blk.0.ffn_up.weight")
        assert own.to_bytes() == round_weight(numbers, "q4_1_gguf", moments=sums[0] / 5).to_bytes()
        assert own.to_bytes() != plain.read("blk.0.ffn_up.weight").to_bytes()
        assert weighted.read("blk.1.ffn_up.weight").to_bytes() == plain.read("blk.1.ffn_up.weight").to_bytes()


SPLIT = ("split.no", "split.count", "split.tensors.count", "split.run")


def test_from_gguf_to_gguf_in_parts(folders, tmp_path):
    folder, _ = folders("llama")
    export_model(folder, tmp_path / "a.gguf", "gguf", "float16")
    report = export_model(tmp_path / "a.gguf", tmp_path / "b.gguf", "gguf", "q8_0_gguf", part_bytes=2**20)
    assert [name.rpartition("/")[2] for name in report.files] == ["b-00001-of-00001.gguf"]
    before, after = metadata(tmp_path / "a.gguf"), metadata(tmp_path / "b-00001-of-00001.gguf")
    changed = {"general.file_type", "general.quantization_version", *SPLIT}
    assert {k: v for k, v in before.items() if k not in changed} == {k: v for k, v in after.items() if k not in changed}
    assert (before["general.file_type"], after["general.file_type"]) == (1, 7)
    assert load_causal_lm(tmp_path / "a.gguf").positions == 64


def test_parts_are_read_as_one(tmp_path):
    promises = [TensorSpec.of(f"t{place}", (4, 8)) for place in range(5)]
    kept = {"general.architecture": GGUFValue(gguf.GGUFValueType.STRING, "llama")}
    with write_parts(tmp_path / "a.gguf", promises, kept, 256) as writer:
        for place in range(5):
            writer.write(f"t{place}", torch.full((4, 8), float(place)))
    assert [path.name for path in writer.paths] == [f"a-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    with open_tensors(tmp_path / "a-00001-of-00003.gguf") as file:
        assert [float(file.read(f"t{place}")[0, 0]) for place in range(5)] == [0, 1, 2, 3, 4]
        assert set(file.metadata) == {"general.architecture"}
    with pytest.raises(RuntimeError), write_parts(tmp_path / "b.gguf", promises, kept, 256) as writer:
        raise RuntimeError("killed")
    assert not list(tmp_path.glob("b-*"))


# ---- refusals --------------------------------------------------------------------------------------------------------


def refused(folder, output, formats="q8_0_gguf", **options) -> str:
    with pytest.raises(BitplanError) as refusal:
        prepare_export(ExportRequest(folder, output, formats, **options), "gguf")
    assert not output.exists() or options
    return str(refusal.value)


def test_what_llama_cpp_could_not_load_is_refused_before_anything_is_written(folders, tmp_path):
    folder, _ = folders("llama")
    out = tmp_path / "a.gguf"
    assert "GGUF cannot hold int8_row" in refused(folder, out, "int8_row")
    assert "q8_0_gguf is the nearest" in refused(folder, out, "int8_row")
    assert "GGUF files end in .gguf" in refused(folder, tmp_path / "a.bin")
    out.write_text("here")
    assert "exists" in refused(folder, out, force=False)
    with pytest.raises(StoreError, match="no target 'ggml'; there are gguf"):
        prepare_export(ExportRequest(folder, out, "q8_0_gguf"), "ggml")


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "falcon"}, 'model_type "falcon" is none that is exported'),
        ({"num_hidden_layers": 3}, "no tensor becomes 'blk.2.attn_k.weight'"),
        ({"num_hidden_layers": 1}, "has no tensor for 'model.layers.1."),
        ({"vocab_size": 2**31 - 1}, "vocab_size is 2147483647, and no model has more than"),
        ({"hidden_size": None}, "no hidden_size, which llama.cpp needs"),
        ({"vocab_size": 20}, "a token of number 32, the model 20 tokens"),
        ({"model_type": "mistral", "layer_types": 1}, "layer_types must be a list, got 1"),
        ({"hidden_act": "gelu"}, "activation \"gelu\"; llama.cpp's llama computes 'silu'"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}}, 'rotary positions of type "longrope"'),
        ({"rope_parameters": YARN | {"attention_factor": 1.5}}, "YaRN with an attention factor of 1.5 "),
        ({"rope_parameters": YARN | {"mscale": 0.5, "mscale_all_dim": 1.0}}, "llama.cpp computes it with 1.138629 "),
        ({"rope_parameters": YARN | {"truncate": False}}, "and truncate false is not exported"),
    ],
)
def test_a_config_that_does_not_fit_is_one_line(change, text, folders, tmp_path):
    folder, _ = folders("llama")
    copy = tmp_path / "model"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    config = json.loads((copy / "config.json").read_text()) | change
    (copy / "config.json").write_text(json.dumps(config))
    message = refused(copy, tmp_path / "a.gguf")
    assert text in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("kind", "change", "context"),
    [
        ("llama", {"model_type": "mistral", "sliding_window": 16}, 16),
        ("llama", {"model_type": "mistral", "sliding_window": None}, 64),
        ("llama", {"model_type": "mistral", "sliding_window": 4096}, 64),
        ("mixtral", {"sliding_window": 16}, 16),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True}, 16),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": False}, 64),
        ("gemma3", {}, 64),
    ],
)
def test_a_window_that_llama_cpp_does_not_have_is_the_context(kind, change, context, folders, tmp_path):
    folder, _ = folders(kind)
    copy = shutil.copytree(folder, tmp_path / "model")
    config = json.loads((copy / "config.json").read_text()) | change
    (copy / "config.json").write_text(json.dumps(config))
    report = export_model(copy, tmp_path / "a.gguf", "gguf", "float32")
    found = metadata(tmp_path / "a.gguf")
    assert found[f"{found['general.architecture']}.context_length"] == context
    assert any("attention reaches back 16 tokens here" in note for note in report.notes) == (context == 16)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is true; llama.cpp's gemma3 computes"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0; llama.cpp's gemma3 computes with null"),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 5e3}}}, "the window's rope_theta is 5000.0"),
        ({"rope_parameters": None, "rope_local_base_freq": 5e3}, "the window's rope_theta is 5000.0"),
    ],
)
def test_what_llama_cpp_computes_otherwise_for_gemma_is_refused(change, text, folders, tmp_path):
    folder, _ = folders("gemma3")
    copy = shutil.copytree(folder, tmp_path / "model")
    config = json.loads((copy / "config.json").read_text()) | change
    (copy / "config.json").write_text(json.dumps(config))
    assert text in refused(copy, tmp_path / "a.gguf")


@pytest.mark.parametrize(
    ("lost", "missing"),
    [("lm_head.weight", "output.weight"), ("model.layers.1.mlp.up_proj.weight", "blk.1.ffn_up.weight")],
)
def test_a_model_that_lacks_a_tensor_is_refused(lost, missing, folders, tmp_path):
    folder, _ = folders("llama3")
    copy = shutil.copytree(folder, tmp_path / "model")
    held = safetensors.torch.load_file(copy / "model.safetensors")
    del held[lost]
    safetensors.torch.save_file(held, copy / "model.safetensors")
    assert f"no tensor becomes {missing!r}; the checkpoint lacks a part" in refused(copy, tmp_path / "a.gguf")


def test_biases_of_a_llama_go_to_gguf_and_back(tmp_path):
    model = save_tiny(tmp_path / "model", "llama", attention_bias=True, mlp_bias=True)
    export_model(tmp_path / "model", tmp_path / "a.gguf", "gguf", "float32")
    export_model(tmp_path / "a.gguf", tmp_path / "back", "hf", "float32")
    with silence_transformers(), torch.no_grad():
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32)
        torch.testing.assert_close(again(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)


def test_tokenizers_that_are_missing_or_unknown_are_refused(folders, tmp_path):
    folder, _ = folders("llama")
    copy = tmp_path / "model"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    document = json.loads((copy / "tokenizer.json").read_text())
    document["pre_tokenizer"] = {"type": "Whitespace"}
    (copy / "tokenizer.json").write_text(json.dumps(document))
    assert "splits text by rules that are none of gpt-2" in refused(copy, tmp_path / "a.gguf")
    export_model(copy, tmp_path / "a.gguf", "gguf", "q8_0_gguf", pretokenizer="tekken")
    assert metadata(tmp_path / "a.gguf")["tokenizer.ggml.pre"] == "tekken"
    (copy / "tokenizer.json").unlink()
    assert "no tokenizer.json and no tokenizer.model" in refused(copy, tmp_path / "b.gguf")


def test_the_verb_shows_what_became_of_each_tensor(folders, tmp_path, capsys):
    folder, _ = folders("llama")
    out = tmp_path / "a.gguf"
    command = ["export", str(folder), str(out), "--to", "gguf", "--format", "q8_0_gguf"]
    assert run([*command, "--dry-run", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert not out.exists()
    assert {row["format"] for row in shown["rows"]} == {"q8_0_gguf", "float32"}
    assert run(command) == 0
    assert "20 tensors" in capsys.readouterr().out
    assert run(command) == 2
    assert "exists" in capsys.readouterr().err
    assert run([*command, "--force", "--split", "nonsense"]) == 2
    with open_tensors(folder) as file:
        Plan(plan_for_file(file, "q5_1_gguf").entries).save(tmp_path / "plan.json")
    assert run([*command[:5], "--plan", str(tmp_path / "plan.json"), "--force"]) == 0
