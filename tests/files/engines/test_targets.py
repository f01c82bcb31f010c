"""Every target by the verb: what a dry run says is what is written, and what is wrong is one line."""

from __future__ import annotations

import json
import re

import pytest
import safetensors.torch
import torch
import transformers

from bitplan import open_tensors, quantize_file
from bitplan.base.errors import FileFormatError, StoreError
from bitplan.cli import run
from bitplan.files.engines.targets import export_model
from bitplan.files.input_statistics import write_evidence
from bitplan.formats.codec import decode, encode
from bitplan.rounding.weights import round_weight
from tests.files.engines.tiny_models import save_tiny, save_tokenizer

UP = "model.layers.0.mlp.up_proj.weight"
FOLDERS = {"compressed-tensors": "int4_g32", "mlx": "int4_g64", "torchao": "int8_row", "hf": "bfloat16"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("models") / "qwen2"
    save_tiny(place, "qwen2")
    return place


@pytest.mark.parametrize("target", FOLDERS)
def test_a_dry_run_says_what_is_then_written(target, folder, tmp_path, capsys):
    command = ["export", str(folder), str(tmp_path / "out"), "--to", target, "--format", FOLDERS[target]]
    assert run([*command, "--dry-run", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert not (tmp_path / "out").exists()
    assert run([*command, "--dry-run"]) == 0
    table = capsys.readouterr().out
    assert "nothing is written" in table
    assert FOLDERS[target] in table
    assert run([*command, "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["rows"] == said["rows"]
    held = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert sum(tensor.nbytes for tensor in held.values()) == said["nbytes"] == done["nbytes"]
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert run(command) == 2  # it exists now
    assert "exists already; choose another name, or replace it (--force)" in capsys.readouterr().err
    assert run([*command, "--force"]) == 0


def test_what_is_asked_for_twice_or_of_no_target_is_one_line(folder, tmp_path, capsys):
    command = ["export", str(folder), str(tmp_path / "out"), "--to"]
    for more, message in (
        (["mlx", "--format", "int4_g64", "--plan", "plan.json"], "give one of --format, --manifest and --plan"),
        (["mxl", "--format", "int4_g64"], "did you mean 'mlx'"),
        (["mlx", "--format", "nvfp4"], "MLX has no nvfp4"),
        (["hf", "--format", "int8_row"], "a plain folder holds"),
    ):
        assert run([*command, *more]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert run(["export", str(folder), str(tmp_path / "a.gguf"), "--to", "mlx", "--format", "int4_g32"]) == 2
    assert "a folder's name" in capsys.readouterr().err
    assert run(["export", str(folder), str(tmp_path), "--to", "gguf", "--format", "q8_0_gguf"]) == 2
    assert "is a folder, and GGUF is a file" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_evidence_chooses_the_numbers_of_every_target_that_packs(folder, tmp_path):
    source = safetensors.torch.load_file(folder / "model.safetensors")[UP]
    moments = torch.randn(source.shape[1], generator=torch.Generator().manual_seed(1)).exp()
    evidence = tmp_path / "evidence.safetensors"
    with write_evidence(evidence, {f"{UP}.moments": tuple(moments.shape)}) as writer:
        writer.write(f"{UP}.moments", moments)
    wanted = round_weight(source, "int4_g32", moments=moments)
    assert not torch.equal(decode(wanted), decode(encode(source, "int4_g32")))
    for target in ("mlx", "torchao"):
        export_model(folder, tmp_path / target, target, "int4_g32", evidence=evidence)
        with open_tensors(tmp_path / target) as file:
            assert torch.equal(file.read_float(UP).float(), decode(wanted))
    for target, name, fmt in (("hf", "hf", "bfloat16"), ("gguf", "out.gguf", "float16")):
        with pytest.raises(StoreError, match="so it would change nothing"):
            export_model(folder, tmp_path / name, target, fmt, evidence=evidence)
        assert not (tmp_path / name).exists()


@pytest.mark.parametrize("target", ["compressed-tensors", "torchao"])
def test_a_packed_embedding_that_the_target_unpacks_gets_the_type_of_the_model(target, tmp_path):
    save_tiny(tmp_path / "in", "llama", dtype="bfloat16")
    quantize_file(tmp_path / "in", tmp_path / "packed", "int8_row")
    export_model(tmp_path / "packed", tmp_path / "out", target, {})
    held = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert held["model.embed_tokens.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("to", ["compressed-tensors", "torchao", "mlx"])
def test_what_is_packed_is_what_the_model_was_seen_to_multiply_by(tmp_path, to):
    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": 96}
    config = transformers.GPT2Config(**sizes, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    save_tokenizer(tmp_path / "gpt2")
    formats = {"*": "int8_g64"} if to == "compressed-tensors" else "int8_g64"  # there a head is packed if it is named
    report = export_model(tmp_path / "gpt2", tmp_path / "out", to, formats)
    packed = {row.source for row in report.rows if row.format == "int8_g64"}
    table = {"transformer.wte.weight"} if to == "mlx" else set()
    assert packed == {"lm_head.weight"} | table, "weights of Conv1D lie transposed, and positions are added"


@pytest.mark.parametrize("to", ["packed", "compressed-tensors", "mlx", "torchao", "hf"])
@pytest.mark.parametrize("lost", ["model.norm.weight", "lm_head.weight", "model.layers.0.mlp.experts.2.up_proj.weight"])
def test_a_checkpoint_that_lacks_a_tensor_is_refused_before_anything_is_written(to, lost, tmp_path):
    save_tiny(tmp_path / "source", "qwen3_moe", tie_word_embeddings=False)
    path = tmp_path / "source" / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    del tensors[lost]
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    shown = lost if "experts" not in lost else "model.layers.0.mlp.experts.gate_up_proj"
    write = quantize_file if to == "packed" else lambda source, out, fmt: export_model(source, out, to, fmt)
    with pytest.raises(FileFormatError, match=f"not the whole Qwen3MoeForCausalLM .*{re.escape(shown)}") as refused:
        write(tmp_path / "source", tmp_path / "out", "bfloat16" if to in ("packed", "hf") else {})
    assert "get the rest of the checkpoint" in str(refused.value)
    assert not (tmp_path / "out").exists()
    quantize_file(tmp_path / "source", tmp_path / "out.safetensors", "int8_row")  # any tensors, as the message says


def test_a_folder_whose_model_nobody_here_knows_is_exported_with_a_note(tmp_path):
    save_tiny(tmp_path / "source", "llama")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    (tmp_path / "source" / "config.json").write_text(json.dumps(config | {"architectures": ["OtherForCausalLM"]}))
    report = quantize_file(tmp_path / "source", tmp_path / "out", "int8_row")
    (note,) = [note for note in report.notes if "was not checked" in note]
    assert "'OtherForCausalLM' is not one of transformers" in note
    assert note in export_model(tmp_path / "source", tmp_path / "plain", "hf", {}).notes
