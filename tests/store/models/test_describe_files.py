"""Views of folders and files: a config's model is run without numbers; names alone are called a table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from bitplan import describe
from bitplan.cli import run
from bitplan.store.files.safetensors import write_safetensors

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
