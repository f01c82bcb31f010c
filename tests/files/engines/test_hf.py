"""Plain folders of packed ones and of GGUF: every tensor back under its name, with config and tokenizer."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import gguf
import pytest
import safetensors.torch
import torch
import transformers

from bitplan import quantize_file
from bitplan.base.errors import BitplanError, StoreError
from bitplan.cli import run
from bitplan.files.engines.gguf_source import open_model
from bitplan.files.engines.targets import ExportRequest, export_model, prepare_export
from bitplan.files.transformers_names import silence_transformers
from bitplan.formats.codec import decode, encode
from tests.crosses import few
from tests.files.engines.tiny_models import LLAMA3_ROPE, save_tiny

IDS = torch.arange(3, 19).reshape(1, -1)


def logits(folder):
    with silence_transformers(), torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model(IDS).logits


@pytest.mark.parametrize("kind", few(["llama", "llama3", "qwen2", "qwen3", "mixtral", "qwen3_moe"], 4))
def test_a_gguf_file_becomes_the_folder_it_was_made_from(kind, tmp_path):
    save_tiny(tmp_path / "in", kind)
    export_model(tmp_path / "in", tmp_path / "a.gguf", "gguf", "float32")
    export_model(tmp_path / "a.gguf", tmp_path / "out", "hf", {})
    wanted = safetensors.torch.load_file(tmp_path / "in" / "model.safetensors")
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "in"))
    tokenizers = [transformers.AutoTokenizer.from_pretrained(tmp_path / place) for place in ("in", "out")]
    one, two = (tokenizer("the hen", add_special_tokens=False)["input_ids"] for tokenizer in tokenizers)
    assert one == two
    assert tokenizers[0].chat_template == tokenizers[1].chat_template


def test_packed_tensors_of_a_gguf_file_keep_their_bits_on_the_way_to_mlx(tmp_path):
    save_tiny(tmp_path / "in", "llama")  # whose rows of q and k lie in another order in GGUF
    export_model(tmp_path / "in", tmp_path / "a.gguf", "gguf", "q4_1_gguf")
    report = export_model(tmp_path / "a.gguf", tmp_path / "out", "mlx", {})
    assert {row.format for row in report.rows} == {"q4_1_gguf", "q8_0_gguf", "float32"}
    name = "model.layers.0.self_attn.q_proj"
    source = safetensors.torch.load_file(tmp_path / "in" / "model.safetensors")[f"{name}.weight"]
    held = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    words = held[f"{name}.weight"].view(torch.uint8).reshape(*source.shape[:1], -1, 16)
    codes = torch.stack([words & 15, words >> 4], dim=-1).flatten(-2).float()
    numbers = codes * held[f"{name}.scales"].float().unsqueeze(-1) + held[f"{name}.biases"].float().unsqueeze(-1)
    assert torch.equal(numbers.flatten(-2), decode(encode(source, "q4_1_gguf")))


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_a_packed_folder_becomes_a_plain_one(dtype, tmp_path):
    save_tiny(tmp_path / "in", "qwen3")
    quantize_file(tmp_path / "in", tmp_path / "packed", {"*_proj*": "mxfp4"})
    report = export_model(tmp_path / "packed", tmp_path / "out", "hf", dtype or {})
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == (dtype or "float32")
    name = "model.layers.0.mlp.up_proj.weight"
    source = safetensors.torch.load_file(tmp_path / "in" / "model.safetensors")[name]
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")[name]
    assert found.dtype == getattr(torch, dtype or "float32")
    assert torch.equal(found.float(), decode(encode(source, "mxfp4")))  # exact in float16, too
    (row,) = (row for row in report.rows if row.name == name)
    assert (row.before, row.format, row.reason) == ("mxfp4", dtype or "float32", "unpacked from mxfp4")


@pytest.mark.parametrize("target", ["hf", "mlx"])
def test_matrices_that_are_packed_as_their_transpose_lie_again_as_their_model_has_them(target, tmp_path):
    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 2, "vocab_size": 96, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "in")
    save_tiny(tmp_path / "other", "llama")
    shutil.copy(tmp_path / "other" / "tokenizer.json", tmp_path / "in")
    quantize_file(tmp_path / "in", tmp_path / "packed", {"*.c_*.weight": "mxfp4", "*.wte.weight": "mxfp4"})
    export_model(tmp_path / "packed", tmp_path / "out", target, {})
    source, plain = (safetensors.torch.load_file(tmp_path / one / "model.safetensors") for one in ("in", "out"))
    for layer in ("attn.c_attn", "attn.c_proj"):
        name = f"transformer.h.0.{layer}.weight"
        assert torch.equal(plain[name], decode(encode(source[name].T.contiguous(), "mxfp4")).T)


def test_numbers_that_a_type_does_not_hold_are_counted(tmp_path, capsys):
    save_tiny(tmp_path / "in", "llama", dtype="bfloat16")
    export_model(tmp_path / "in", tmp_path / "a.gguf", "gguf", "q8_0_gguf")
    command = ["export", str(tmp_path / "a.gguf"), str(tmp_path / "out"), "--to", "hf", "--force"]
    with open_model(tmp_path / "a.gguf") as file:
        weights = {name: file.read_float(name) for name, spec in file.specs.items() if spec.encoded}
    lost = {name: int((numbers.bfloat16().float() != numbers).sum()) for name, numbers in weights.items()}
    count, numbers = sum(lost.values()), sum(tensor.numel() for name, tensor in weights.items() if lost[name])
    assert count
    assert run([*command, "--format", "bfloat16"]) == 0
    assert f"rounded to bfloat16: {count} of {numbers} numbers in " in capsys.readouterr().out
    assert run([*command, "--format", "float32"]) == 0
    assert "rounded" not in capsys.readouterr().out


def test_what_no_plain_folder_can_be_made_of_is_refused(tmp_path):
    def refuse(source, formats=None, **options):
        with pytest.raises(BitplanError) as refusal:
            prepare_export(ExportRequest(source, tmp_path / "out", formats or {}, **options), "hf")
        assert "\n" not in str(refusal.value)
        assert not (tmp_path / "out" / "model.safetensors").exists()
        return str(refusal.value)

    save_tiny(tmp_path / "llama3", "llama3")
    assert "a plain folder holds" in refuse(tmp_path / "llama3", "int8_row")
    assert "the plan has int8_row for" in refuse(tmp_path / "llama3", {"*up_proj*": "int8_row"})
    assert "for GGUF alone" in refuse(tmp_path / "llama3", part_bytes=1000)
    save_tiny(tmp_path / "other", "llama3", rope_parameters={**LLAMA3_ROPE, "low_freq_factor": 1.5})
    export_model(tmp_path / "other", tmp_path / "other.gguf", "gguf", "float32")
    assert "none of llama 3's, so no config.json" in refuse(tmp_path / "other.gguf")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    assert "exists already" in refuse(tmp_path / "llama3")
    assert "is no model's folder and is not replaced" in refuse(tmp_path / "llama3", force=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "llama3" / name).unlink()
    assert "no tokenizer" in refuse(tmp_path / "llama3")


def test_yarn_comes_back_with_its_betas_and_what_no_config_says_is_refused(tmp_path):
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
    save_tiny(tmp_path / "in", "llama3", rope_parameters=yarn | {"beta_fast": 24.0, "attention_factor": 1.1386294})
    export_model(tmp_path / "in", tmp_path / "a.gguf", "gguf", "float32")
    export_model(tmp_path / "a.gguf", tmp_path / "out", "hf", {})
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_parameters"] == yarn | {"beta_fast": 24.0}
    whole = (tmp_path / "a.gguf").read_bytes()
    name = b"\4\0\0\0\0\0\0\0"
    assert name + b"yarn" in whole
    (tmp_path / "b.gguf").write_bytes(whole.replace(name + b"yarn", name + b"what"))
    with pytest.raises(StoreError, match='rotary positions of type "what"'):
        export_model(tmp_path / "b.gguf", tmp_path / "b", "hf", {})


@pytest.mark.parametrize(
    ("kind", "key", "value", "said"),
    [
        ("qwen2", "rope.dimension_count", 8, "qwen2.rope.dimension_count is 8"),
        ("llama", "attention.causal", False, "llama.attention.causal is false"),
        ("llama", "attention.layer_norm_rms_epsilon", None, "layer_norm_rms_epsilon must be a number, got null"),
        ("llama", "rope.freq_base", 0.0, "llama.rope.freq_base must be above zero, got 0.0"),
        ("llama", "context_length", -5, "context_length must be a whole number from 1 to 2147483647, got -5"),
        (
            "llama",
            "attention.head_count",
            ["a", "a"],
            'head_count must be a whole number from 1 to 2147483647, got "a"',
        ),
        ("gemma3", "rope.freq_base_swa", 5000.0, "gemma3.rope.freq_base_swa is 5000.0"),
        ("gemma3", "final_logit_softcapping", 30.0, "gemma3.final_logit_softcapping is 30.0"),
    ],
)
def test_what_a_gguf_file_computes_and_no_config_says_is_refused(kind, key, value, said, tmp_path):
    gguf_with(tmp_path, kind, key, value)
    with pytest.raises(StoreError, match=re.escape(said)):
        export_model(tmp_path / "b.gguf", tmp_path / "out", "hf", {})


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_of_rotations_without_a_type_is_linear_as_in_llama_cpp(key, tmp_path):
    gguf_with(tmp_path, "llama", key, 2.0)
    export_model(tmp_path / "b.gguf", tmp_path / "out", "hf", {})
    rope = json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"]
    assert (rope["rope_type"], rope["factor"]) == ("linear", 2.0)


def test_a_number_for_each_layer_is_read_where_all_are_the_same(tmp_path):
    gguf_with(tmp_path, "llama", "attention.head_count_kv", [2, 2])
    export_model(tmp_path / "b.gguf", tmp_path / "out", "hf", {})
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "in"))


def gguf_with(tmp_path, kind, key, value):
    """b.gguf: a tiny model with another value under one key, or without it."""
    save_tiny(tmp_path / "in", kind)
    export_model(tmp_path / "in", tmp_path / "a.gguf", "gguf", "float32")
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(tmp_path / "b.gguf", architecture)
    fields = {name: (field.contents(), field.types) for name, field in reader.fields.items() if "." in name}
    del fields["general.architecture"]
    for name in [name for name in fields if name.startswith(("GGUF.", "bitplan")) or name == f"{architecture}.{key}"]:
        del fields[name]
    if value is not None:
        kinds = [gguf.GGUFValueType.get_type(value)]
        kinds += [gguf.GGUFValueType.get_type(value[0])] if isinstance(value, list) else []
        fields[f"{architecture}.{key}"] = value, kinds
    for name, (said, kinds) in fields.items():
        writer.add_key_value(name, said, kinds[0], kinds[-1] if kinds[0] == gguf.GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()


def test_files_that_were_there_before_are_kept_and_not_named_as_written(tmp_path):
    save_tiny(tmp_path / "in", "llama3")
    save_tiny(tmp_path / "out", "qwen3")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    report = export_model(tmp_path / "in", tmp_path / "out", "hf", {}, force=True)
    assert {Path(name).name for name in report.files} == {path.name for path in (tmp_path / "out").iterdir()} - {
        "notes.txt"
    }


def test_numbers_beyond_float16_are_refused_and_nothing_is_left(tmp_path):
    save_tiny(tmp_path / "in", "qwen3")
    path = tmp_path / "in" / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e6
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(StoreError, match=r"up_proj.weight: holds numbers beyond float16"):
        export_model(tmp_path / "in", tmp_path / "out", "hf", "float16")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in"]
