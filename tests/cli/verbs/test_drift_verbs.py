"""check --deep and drift from the shell: tables, JSON, exit codes, one-line errors."""

from __future__ import annotations

import json
import math

import pytest
import safetensors.torch
import torch

from bitplan.cli import run
from bitplan.files.drift import DriftLog
from bitplan.formats.codec import encode

PREFIX = "model.layers.0"


@pytest.fixture
def llama(tmp_path, monkeypatch):
    """A llama checkpoint of one layer: how to write it, with some tensors changed."""
    monkeypatch.chdir(tmp_path)
    shapes = {"model.embed_tokens.weight": (8, 64), "model.norm.weight": (64,), "lm_head.weight": (8, 64)}
    shapes |= {f"{PREFIX}.self_attn.{part}_proj.weight": (64, 64) for part in "qkvo"}
    shapes |= {f"{PREFIX}.mlp.{part}_proj.weight": (64, 64) for part in ("gate", "up", "down")}
    shapes |= {f"{PREFIX}.{part}_layernorm.weight": (64,) for part in ("input", "post_attention")}
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}

    def save(**change):
        safetensors.torch.save_file(tensors | change, "llama.safetensors")
        return "llama.safetensors"

    return save


def test_deep_says_clean(llama, capsys):
    assert run(["verify", "llama", llama()]) == 0
    assert capsys.readouterr().out == (
        "llama.safetensors: 12 tensors, 59.78 kB of data checked, no findings under llama\n"
        "llama.safetensors: has no checksums, so a changed byte that makes a sound number is not seen\n"
    )
    assert run(["verify", "llama", llama(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_deep_findings_come_after_the_headers(llama, capsys):
    norm = torch.ones(64).bfloat16()
    norm[5] = math.nan
    path = llama(**{f"{PREFIX}.input_layernorm.weight": norm, "extra.w": torch.ones(2).bfloat16()})
    assert run(["verify", "llama", path, "--headers", "--json"]) == 1
    assert [finding["code"] for finding in json.loads(capsys.readouterr().out)] == ["unmatched"]
    assert run(["verify", "llama", path, "--json"]) == 1
    captured = capsys.readouterr()
    header, deep = json.loads(captured.out)
    assert captured.err == ""
    assert header["code"] == "unmatched"
    assert (deep["code"], deep["where"]) == ("norm-not-finite", f"{PREFIX}.input_layernorm.weight")
    assert "1 NaN and 0 infinite of 64 numbers, the first, nan, at [5]" in deep["message"]
    assert run(["verify", "llama", path]) == 1
    assert "norm-not-finite" in capsys.readouterr().out


def test_a_file_that_is_not_there(llama, capsys):
    llama()
    assert run(["verify", "llama", "none.safetensors"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_drift_table_json_and_log(llama, capsys):
    path = llama()
    assert run(["quantize", path, "packed.safetensors", "-f", "mxfp4"]) == 0
    capsys.readouterr()
    assert run(["compare", "--scales", path, "packed.safetensors", "--jsonl", "drift.jsonl", "--step", "3"]) == 0
    out = capsys.readouterr().out
    assert f"{PREFIX}.mlp.up_proj.weight" in out
    assert "7 lines appended to drift.jsonl" in out
    assert run(["compare", "--scales", path, "packed.safetensors", "--json"]) == 0
    layers = json.loads(capsys.readouterr().out)["layers"]
    errors = [layer["relative_error"] for layer in layers]
    assert errors == sorted(errors, reverse=True)
    assert all(0.05 < error < 0.2 for error in errors)
    lines = DriftLog.read("drift.jsonl")
    assert [line | {"step": 0} for line in lines] == layers
    assert {line["step"] for line in lines} == {3}
    assert run(["compare", "--scales", path, "packed.safetensors", "--jsonl", "drift.jsonl"]) == 0
    assert len(DriftLog.read("drift.jsonl")) == 14


def test_the_worst_layer_comes_first(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    safetensors.torch.save_file({"a": x, "b": x.clone(), "c": x.clone()}, "m.safetensors")
    assert run(["quantize", "m.safetensors", "p.safetensors", "-f", "int8_row"]) == 0
    safetensors.torch.save_file(
        {"a": x, "b": x * 2, "c": x.clone()}, "m.safetensors"
    )  # trained on, and not packed again
    capsys.readouterr()
    assert run(["compare", "--scales", "m.safetensors", "p.safetensors", "--json"]) == 0
    layers = json.loads(capsys.readouterr().out)["layers"]
    assert [layer["name"] for layer in layers] == ["b", "a", "c"]
    assert layers[0]["relative_error"] == pytest.approx(0.5, abs=0.01)


def test_drift_findings_and_errors(llama, capsys):
    path = llama()
    safetensors.torch.save_file({"gone": torch.ones(32, 64)}, "other.safetensors")
    assert run(["quantize", "other.safetensors", "packed.safetensors", "-f", "mxfp4"]) == 0
    capsys.readouterr()
    assert run(["compare", "--scales", path, "packed.safetensors"]) == 1
    assert capsys.readouterr().out == f"gone: in packed.safetensors, but 'gone' is not in {path}\n"
    assert run(["compare", "--scales", path, "packed.safetensors", "--jsonl", "no/such/d.jsonl"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("bitplan: no/such/d.jsonl: the drift log cannot be written")
    assert error.count("\n") == 1
    assert run(["compare", "--scales", path, "packed.safetensors", "--jsonl", path]) == 2
    assert "exists and is not a drift log" in capsys.readouterr().err


def test_saturated_scales_show_in_the_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    encoded = encode(x, "mxfp4")
    encoded.scales[1, 1] = 255
    tensors = {"w.blocks": encoded.data.reshape(4, 2, 16), "w.scales": encoded.scales}
    safetensors.torch.save_file(tensors, "p.safetensors")
    safetensors.torch.save_file({"w": x}, "m.safetensors")
    assert run(["compare", "--scales", "m.safetensors", "p.safetensors", "--json"]) == 1
    (layer,) = json.loads(capsys.readouterr().out)["layers"]
    assert (layer["nan_scales"], layer["max_abs_error"]) == (1, None)
    assert run(["compare", "--scales", "m.safetensors", "p.safetensors"]) == 1
    out = capsys.readouterr().out
    assert "1 NaN" in out
    assert "w: NaN or infinity on one side" in out


def test_names_with_escape_sequences_do_not_reach_the_terminal(llama, capsys):
    file = llama(**{"evil\x1b[2J\nname": torch.ones(2)})
    assert run(["verify", "llama", file]) == 1
    shown = capsys.readouterr().out
    assert "evil\\x1b[2J\\nname" in shown
    safetensors.torch.save_file({"a\x1b[2Jb": torch.ones(2)}, "other.safetensors")
    assert run(["compare", file, "other.safetensors"]) == 1
    shown += capsys.readouterr().out
    assert "\x1b" not in shown
    assert "a\\x1b[2Jb: in other.safetensors" in shown
