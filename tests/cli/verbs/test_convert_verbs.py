"""convert and make-checkpoint from the shell."""

from __future__ import annotations

import json

import pytest

from bitplan.cli import run


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["gpt-oss", "make", "small", "--to", "hf", "--layers", "1"]) == 0
    return tmp_path


@pytest.mark.usefixtures("here")
def test_make_checkpoint_says_what_it_made(capsys):
    capsys.readouterr()
    assert run(["gpt-oss", "make", "m.gguf", "--to", "gguf", "--expert-count", "2", "--seed", "3"]) == 0
    assert capsys.readouterr().out.startswith("m.gguf (gguf): 41 tensors, 129.07 kB, ")
    assert run(["gpt-oss", "make", "t", "--to", "hf", "--experts", "bfloat16", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["counts"] == [{"action": "drawn", "format": "bfloat16", "tensors": 37, "bytes": 383392}]
    assert report["files"] == ["config.json", "bitplan_evidence.json"]


def test_convert_ends_with_a_summary(here, capsys):
    assert run(["gpt-oss", "convert", "small", "small.gguf", "--to", "gguf"]) == 0
    out = capsys.readouterr().out
    for text in ("small (hf) -> small.gguf (gguf)", "byte for byte", "rearranged", "22 tensors, ", "no tokenizer"):
        assert text in out
    assert run(["gpt-oss", "convert", "small.gguf", "back", "--to", "hf"]) == 0
    assert "with config.json" in capsys.readouterr().out
    assert (here / "back/model.safetensors").read_bytes() == (here / "small/model.safetensors").read_bytes()


@pytest.mark.usefixtures("here")
def test_convert_as_json(capsys):
    capsys.readouterr()
    assert run(["gpt-oss", "convert", "small", "wide", "--to", "hf", "--experts", "bfloat16", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["from_layout"], report["to_layout"], report["output"]) == ("hf", "hf", "wide")
    actions = {tensor["name"]: tensor["action"] for tensor in report["tensors"]}
    assert actions["model.layers.0.mlp.experts.down_proj"] == "expanded"
    assert actions["model.layers.0.self_attn.q_proj.weight"] == "copied"
    assert run(["gpt-oss", "convert", "wide", "packed", "--to", "openai", "--scale-rule", "mse"]) == 0
    assert "floats to MXFP4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing", "out", "--to", "hf"], "nothing: no such file"),
        (["small", "out"], "--to"),
        (["small", "out", "--to", "elsewhere"], "elsewhere"),
        (["small", "out", "--to", "gguf"], "the layout gguf is written to a .gguf file"),
        (["small", "small", "--to", "hf", "--force"], "small: holds the input small/model.safetensors itself"),
        (
            ["small", "taken.gguf", "--to", "gguf"],
            "taken.gguf: exists already; choose another name, or replace it (--force)",
        ),
        (["small", "out", "--to", "openai", "--experts", "bfloat16"], "in MXFP4 and in nothing else"),
        (["small", "out", "--to", "hf", "--scale-rule", "mse"], "these are MXFP4 already"),
    ],
)
def test_errors_are_one_line(here, capsys, arguments, message):
    (here / "taken.gguf").write_text("old")
    capsys.readouterr()
    assert run(["gpt-oss", "convert", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert {path.name for path in here.iterdir()} == {"small", "taken.gguf"}


def test_force_replaces_a_file(here, capsys):
    (here / "taken.gguf").write_text("old")
    assert run(["gpt-oss", "convert", "small", "taken.gguf", "--to", "gguf", "--force"]) == 0
    assert run(["inspect", "taken.gguf"]) == 0
    assert "blk.0.ffn_down_exps.weight" in capsys.readouterr().out


@pytest.mark.usefixtures("here")
def test_a_bad_size_is_one_line(capsys):
    capsys.readouterr()
    assert run(["gpt-oss", "make", "m", "--hidden", "33"]) == 2
    assert "`hidden` must be a multiple of 32" in capsys.readouterr().err
    assert run(["gpt-oss", "make", "m", "--size", "20B"]) == 2
    assert "did you mean '20b'" in capsys.readouterr().err
    assert run(["gpt-oss", "make", "m", "--layers", "0"]) == 2
