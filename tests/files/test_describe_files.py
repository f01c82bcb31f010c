"""Views of folders and files: a config's model is run without numbers; names alone are called a table."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

from bitplan import describe
from bitplan.base.errors import StoreError
from bitplan.cli import run
from bitplan.files import describe_files
from bitplan.files.engines.targets import ExportRequest, prepare_export
from bitplan.files.safetensors import write_safetensors

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen2")
    config = transformers.Qwen2Config(**SIZES, num_hidden_layers=2, vocab_size=64, tie_word_embeddings=False)
    transformers.Qwen2ForCausalLM(config).save_pretrained(path)
    return path


def test_a_folder_is_seen_by_its_config(folder: Path) -> None:
    view = describe(folder)
    assert view.source == "traced"
    assert view.role("model.layers.1.mlp.down_proj.weight") == "down"
    assert view.by_name["lm_head.weight"].format == "float32"
    assert view.joined == tuple(
        tuple(f"model.layers.{index}.{part}_proj.weight" for part in parts)
        for index in (0, 1)
        for parts in (("self_attn.q", "self_attn.k", "self_attn.v"), ("mlp.gate", "mlp.up"))
    )


def test_a_file_alone_is_read_by_the_table_and_says_so(folder: Path) -> None:
    view, seen = describe(folder / "model.safetensors"), describe(folder)
    assert view.source == "table"
    assert view.notes[0].startswith("no code was run")
    assert not view.linears
    assert {tensor.name: tensor.role for tensor in view.tensors} == {
        tensor.name: tensor.role for tensor in seen.tensors
    }
    assert {frozenset(names) for names in view.joined} == {frozenset(names) for names in seen.joined}


def test_a_gguf_file_is_read_by_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = {"blk.0.ffn_gate_inp": (4, 32), "blk.0.ffn_gate_exps": (4, 64, 32), "blk.0.ffn_up_exps": (4, 64, 32)}
    shapes |= {"blk.0.ffn_down_exps": (4, 32, 64), "output": (64, 32), "token_embd": (64, 32), "rope_freqs": (4,)}
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", torch.zeros(shape).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    view = describe(tmp_path / "a.gguf")
    assert view.source == "table"
    assert [(tensor.role, tensor.experts) for tensor in view.tensors] == [
        *(("router", 0), ("gate", 4), ("up", 4), ("down", 4), ("head", 0), ("embedding", 0), ("unknown", 0)),
    ]
    assert view.joined == (("blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight"),)
    assert run(["inspect", str(tmp_path / "a.gguf"), "--structure"]) == 0
    assert "by its names alone, 7 tensors" in capsys.readouterr().out
    assert run(["inspect", str(tmp_path / "a.gguf"), "--structure", "--chart"]) == 2
    assert "nothing was run" in capsys.readouterr().err


def test_experts_are_shown_one_by_one_whatever_the_file_calls_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.MixtralConfig(**SIZES, num_hidden_layers=1, vocab_size=64, num_local_experts=2)
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path / "plain")
    assert run(["quantize", str(tmp_path / "plain"), str(tmp_path / "packed"), "-f", "mxfp4"]) == 0
    capsys.readouterr()
    for folder, fmt in (("plain", "float32"), ("packed", "mxfp4")):
        view = describe(tmp_path / folder)
        rows = {row["part"]: (row["what"], row["weight"]) for row in view.table_rows()}
        assert rows["model.layers.0.mlp.experts.gate_up_proj"] == ("gate_up", "2x128x32")
        assert rows["model.layers.0.mlp.experts.down_proj"] == ("down", "2x32x64")
        assert rows["model.layers.0.mlp.gate"] == ("router", "2x32")
        experts = "model.layers.0.block_sparse_moe.experts.0"
        assert view.by_name[f"{experts}.w2.weight"].format == fmt
        assert (f"{experts}.w1.weight", f"{experts}.w3.weight") in view.joined


def test_projections_that_no_table_names_are_joined_as_they_were_seen(tmp_path: Path) -> None:
    config = transformers.CTRLConfig(n_embd=32, dff=64, n_layer=1, n_head=2, vocab_size=64, n_positions=16)
    transformers.CTRLLMHeadModel(config).save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").touch()
    weights = tuple(f"transformer.h.0.multi_head_attention.W{letter}.weight" for letter in "qkv")
    assert describe(tmp_path).joined == (weights,)
    wanted = {weights[0]: "int8_row"}
    with pytest.raises(StoreError, match=r"Wq.weight' is int8_row, '\S+Wk.weight' not packed; engines compute them"):
        prepare_export(ExportRequest(tmp_path, tmp_path / "out", wanted), "compressed-tensors")


def test_a_config_of_code_that_is_not_here_falls_back_on_the_table_with_the_reason(tmp_path: Path) -> None:
    name = "blk.0.attn_q.weight"
    with write_safetensors(tmp_path / "model.safetensors", [(name, torch.float32, (2, 2))]) as writer:
        writer.write(name, torch.ones(2, 2))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["TheirsForCausalLM"]}))
    view = describe(str(tmp_path))
    assert (view.source, view.role(name)) == ("table", "query")
    assert "code that comes with a model is not run" in view.notes[-1]


def test_inspect_shows_structure_as_a_table_json_and_a_chart(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(folder), "--structure"]) == 0
    shown = capsys.readouterr().out
    assert "model.layers.[0..1].mlp.up_proj" in shown
    assert "silu before it" in shown
    assert run(["inspect", str(folder), "--structure", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["source"] == "traced"
    assert document["gated"][0]["activation"] == "silu"
    assert run(["inspect", str(folder), "--structure", "--chart"]) == 0
    chart = capsys.readouterr().out.splitlines()
    assert chart[0] == "graph TD"
    assert '  N2["model.layers.[0..1].self_attn.q_proj: query"]' in chart
    assert "  N1 --> N2" in chart
    assert run(["inspect", str(folder), "--chart"]) == 2
    assert "--structure" in capsys.readouterr().err


def test_models_made_in_two_threads_leave_transformers_as_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers leaves ties out by a patch of its class: two that overlap would leave the patch on."""
    first_is_inside, second_is_inside, first_has_left = (threading.Event() for _ in range(3))
    model_class, tie_weights = describe_files.model_class, transformers.PreTrainedModel.tie_weights

    def waiting(where: Path, config: Any) -> Any:
        if first_is_inside.is_set():
            second_is_inside.set()
            first_has_left.wait(10)
        else:
            first_is_inside.set()
            second_is_inside.wait(0.3)
        return model_class(where, config)

    monkeypatch.setattr(describe_files, "model_class", waiting)
    threads = [threading.Thread(target=lambda: describe_files.empty_model(folder, ties=False)) for _ in range(2)]
    threads[0].start()
    assert first_is_inside.wait(10)
    threads[1].start()
    threads[0].join()
    first_has_left.set()
    threads[1].join()
    assert second_is_inside.is_set()
    assert transformers.PreTrainedModel.tie_weights is tie_weights
    print("seen", file=sys.stderr)
    assert "seen" in capsys.readouterr().err
