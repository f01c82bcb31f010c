"""The command line as a person meets it: tables, JSON, one-line errors, exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import safetensors.torch
import torch

from bitplan.base import __version__
from bitplan.cli import run
from bitplan.formats.registry import list_formats
from bitplan.plan import Choice, Plan, Planned


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    tensors = {"up.weight": torch.randn(8, 128, generator=generator), "up.bias": torch.zeros(8)}
    safetensors.torch.save_file(tensors, "model.safetensors")
    return "model.safetensors"


def test_quantize_sums_up_by_formats_where_every_tensor_has_a_reason_of_its_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tensors = {f"{number}.weight": torch.ones(4, 32) for number in range(9)} | {"norm.weight": torch.ones(4)}
    safetensors.torch.save_file(tensors, "model.safetensors")
    kept = Planned(Choice("float32", "norms stay"), (4,), "norm")
    for count, lines in ((7, ["1 │ int8_row", "reason 6"]), (9, ["9 │ int8_row", "9 reasons: see the plan"])):
        reasons = {name: f"reason {number % count}" for number, name in enumerate(tensors) if name != "norm.weight"}
        planned = {name: Planned(Choice("int8_row", why), (4, 32), "mlp") for name, why in reasons.items()}
        Plan({**planned, "norm.weight": kept}).save("plan.json")
        assert run(["quantize", "model.safetensors", f"{count}.safetensors", "--plan", "plan.json"]) == 0
        shown = capsys.readouterr().out
        assert all(line in shown for line in [*lines, "norms stay"]), shown


def test_module_and_script_are_the_same():
    for command in ([sys.executable, "-m", "bitplan"], [sys.executable, "-c", "from bitplan.cli import main; main()"]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert done.stdout == f"bitplan {__version__}\n"


def test_formats_lists_every_format(capsys):
    assert run(["inspect"]) == 0
    out = capsys.readouterr().out
    assert all(f" {fmt.name} " in out for fmt in list_formats())


def test_a_folder_that_is_gone_and_a_closed_output_are_no_tracebacks(model, tmp_path, monkeypatch, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert run(["quantize", str(tmp_path / model), "out.safetensors", "--format", "int8_row"]) == 2
    assert "the current folder is no longer there" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdout", None)
    assert run(["inspect"]) == 0


def test_formats_as_json(capsys):
    assert run(["inspect", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(list_formats())


def test_formats_on_a_tensor(model, capsys):
    assert run(["inspect", f"{model}", "--tensor", "up.weight", "--json"]) == 0
    rows = {row["format"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["float32"]["sqnr_db"] is None
    assert 40 < rows["int8_row"]["sqnr_db"] < 50
    assert run(["inspect", f"{model}", "--tensor", "up.bias"]) == 0
    assert "mxfp4 has blocks of 32" in capsys.readouterr().out


def test_quantize_inspect_compare(model, capsys):
    assert run(["quantize", model, "small.safetensors", "--format", "mxfp4"]) == 0
    assert "1 │ mxfp4" in capsys.readouterr().out
    assert run(["inspect", "small.safetensors", "--json"]) == 0
    inspected = json.loads(capsys.readouterr().out)
    assert {row["name"]: row["format"] for row in inspected["tensors"]} == {"up.bias": "float32", "up.weight": "mxfp4"}
    assert run(["compare", model, "small.safetensors"]) == 0
    assert "overall" in capsys.readouterr().out
    assert run(["compare", model, "small.safetensors", "--json"]) == 0
    assert 0.98 < json.loads(capsys.readouterr().out)["overall"]["cosine"] < 1
    assert run(["inspect", "small.safetensors"]) == 0
    assert "8x128" in capsys.readouterr().out


def test_quantize_warns_of_a_tensor_that_saturates(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    safetensors.torch.save_file({"high.weight": torch.full((64, 64), 7.9)}, "high.safetensors")
    assert run(["quantize", "high.safetensors", "small.safetensors", "-f", "mxfp4"]) == 0
    shown = capsys.readouterr()
    assert shown.err.startswith("bitplan: warning: mxfp4: 1 of 1 tensors lost much: high.weight (100.0% saturated")
    assert "100.0%" in shown.out
    assert run(["quantize", "high.safetensors", "mse.safetensors", "-f", "mxfp4", "--scale-rule", "mse"]) == 0
    assert capsys.readouterr().err == ""  # the rule that the warning names helps


def test_quantize_as_json_prints_json_alone(model, capsys):
    assert run(["quantize", model, "small.safetensors", "-f", "q8_0_gguf", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"][1]["to"] == "q8_0_gguf"


def test_compare_exits_1_on_findings(model, capsys):
    safetensors.torch.save_file({"other": torch.ones(2), "up.bias": torch.ones(3)}, "other.safetensors")
    assert run(["compare", model, "other.safetensors"]) == 1
    out = capsys.readouterr().out
    assert "up.weight: in model.safetensors, not in other.safetensors" in out
    assert "up.bias: shape (8,) in model.safetensors, (3,) in other.safetensors" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "nowhere"], "nowhere: no such file"),
        (["quantize", "model.safetensors", "o.safetensors", "-f", "mxfp5"], "did you mean 'mxfp4'"),
        (["quantize", "model.safetensors", "no/such/o.safetensors", "-f", "int8"], "no/such: no such folder"),
        (["quantize", "model.safetensors", "o.safetensors"], "--format"),
        (["quantise"], "quantize"),
        (["inspect", "model.safetensors", "--jsno"], "--json"),
        (["inspect", "--tensor", "up.weight"], "give FILE"),
        (["inspect", "model.safetensors", "--tensor", "up.wieght"], "did you mean 'up.weight'"),
        (["inspect", "model.safetensors", "--tensor", "up.weight", "--scale-rule", "median"], "absmax"),
    ],
)
@pytest.mark.usefixtures("model")
def test_errors_are_one_line_and_exit_2(arguments, message, capsys):
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("bitplan: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


WRONG_FILES = {
    "rand.gguf": (
        b"\x07\x99" * 20,
        r"rand.gguf: not a GGUF file: it begins with .*, expected b'GGUF'",
    ),
    "short.gguf": (b"GGUF\x03", r"short.gguf: .*(cut short|ends)"),
    "rand.safetensors": (b"\x07\x99" * 20, "rand.safetensors: not a safetensors file, or cut short: the header says"),
    "config.json": (
        b'{"model_type": "llama"}',
        "config.json: is JSON without weights: .* a model is given by its folder",
    ),
    "notes.txt": (b"some words", "notes.txt: is text .it begins with 'some wor'.; give a .safetensors or .gguf file"),
    "/dev/null": (None, "/dev/null: is a device, and a regular file is expected"),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_a_wrong_file_is_called_what_it_is(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    content, message = WRONG_FILES[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert run(["inspect", name]) == 2
    text = capsys.readouterr().err
    assert re.search(message, text), text
    assert text.count("\n") == 1


def test_scales_that_meet_a_tensor_of_their_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    safetensors.torch.save_file({"x": torch.ones(64, 64), "x.scales": torch.ones(4)}, "in.safetensors")
    assert run(["quantize", "in.safetensors", "out.safetensors", "-f", "int8_row"]) == 2
    assert "two tensors would be 'x.scales': the scales of 'x' in int8_row, and the one of" in capsys.readouterr().err


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder that takes no files")
def test_a_folder_that_takes_no_files_is_named_without_our_temporary_name(model, capsys):
    assert run(["quantize", model, "/proc/x.safetensors", "-f", "int8_row"]) == 2
    assert capsys.readouterr().err.startswith("bitplan: /proc/x.safetensors: ")


@pytest.mark.parametrize("verb", ["inspect", "quantize", "compare"])
def test_help_has_an_example(verb, capsys):
    assert run([verb, "--help"]) == 0
    assert f"bitplan {verb}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("model")
def test_formats_on_a_tensor_with_nan_is_one_line(capsys):
    safetensors.torch.save_file({"w": torch.full((2, 32), torch.nan), "ids": torch.ones(3).long()}, "nan.safetensors")
    for name, message in (("w", "64 NaN and 0 infinite"), ("ids", "expected a float tensor")):
        assert run(["inspect", "nan.safetensors", "--tensor", f"{name}"]) == 2
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1
        assert message in captured.err


def test_a_file_that_grew_is_said_to_have_grown(model, capsys):
    assert run(["quantize", model, "small.safetensors", "-f", "mxfp4"]) == 0
    assert run(["quantize", "small.safetensors", "large.safetensors", "-f", "float32"]) == 0
    assert "x larger" in capsys.readouterr().out
