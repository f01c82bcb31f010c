"""`fp8 confirm` from the shell: table, JSON, exit codes, one-line errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bitplan.cli import run
from bitplan.fp8 import layer_settings
from bitplan.fp8.bench import confirm as fp8_confirm
from bitplan.fp8.bench import confirm_policy
from tests.fp8.bench.test_confirm_model import LLAMA
from tests.fp8.policy.fp8_samples import H200
from tests.fp8.test_apply import ALL, LAYERS, WINS, SetClock, policy_of

LOSES = {64: 0.5, 128: 0.6}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    policy_of(**ALL).save("policy.json")
    Path("config.json").write_text(json.dumps(LLAMA))


def confirm(*arguments, policy="policy.json", model="config.json", tokens="64,128", device="cpu"):
    return run(["fp8", "confirm", policy, model, "--tokens", tokens, "--device", device, *arguments])


def tell(monkeypatch, fp8_ms):
    """The command has no clock to be told; the one that it finds for its device is."""
    clock = SetClock(fp8_ms).watch(monkeypatch)
    monkeypatch.setattr(fp8_confirm, "stopwatch_of", lambda _: clock)


def test_confirmed(capsys, monkeypatch):
    tell(monkeypatch, 8.0)
    assert confirm() == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0] == "FP8 is emulated on the CPU: this shows that the command runs; no speed is shown by it"
    assert lines[1] == "policy.json on blocks of config.json: cpu, eager, tp 1"
    row = next(line for line in lines if "model.layers.0" in line)
    for text in (" 64 ", "1x64", "win", "plan", "1.250x", "1.250x to 1.250x", "4 of 4"):
        assert text in row
    assert "built 1 of 5 blocks: all blocks are alike" in lines
    assert "128 tokens, model.layers.0: win: 1.250x BF16, between 1.250x and 1.250x" in lines
    assert captured.err == ""


def test_turned_down(capsys, monkeypatch):
    tell(monkeypatch, 12.5)
    assert confirm("--json", "--timing", "graph", "--recipe", "tensorwise", tokens="128, 128") == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["emulated"], document["timing"], document["compiled"]) == (True, "graph", False)
    (count,) = document["counts"]
    (block,) = count["blocks"]
    assert (block["answer"], block["taken"], block["planned"], block["fp8_layers"]) == ("lose", "bf16", 4, 0)
    assert block["speedup"] == pytest.approx(0.8)
    assert count["layers"][0]["reason"].startswith("turned down by confirming model.layers.0: 0.800x")
    assert count["planned"][0]["reason"].startswith("measured: win at 128 tokens")


def test_a_plan_of_bf16_is_fine(capsys, monkeypatch):
    policy_of(**dict.fromkeys(LAYERS, LOSES)).save("policy.json")
    tell(monkeypatch, 12.5)
    assert confirm() == 0
    out = capsys.readouterr().out
    assert "0 of 4" in out
    assert "all FP8 is turned down and BF16 is kept" in out


def test_a_policy_that_knows_none_of_the_layers_confirms_nothing(capsys, monkeypatch):
    tell(monkeypatch, 12.5)
    assert confirm("--recipe", "blockwise", tokens="64") == 1
    assert "64 tokens: the policy knows none of these layers: " in capsys.readouterr().out
    assert confirm("--recipe", "blockwise", "--json", tokens="64") == 1
    (count,) = json.loads(capsys.readouterr().out)["counts"]
    assert count["unknown"]
    assert not count["turned_down"]


def test_advice_on_a_gpu(capsys, monkeypatch):
    """What a GPU is told, without one: the same, with its name, and where to keep BF16."""
    from bitplan.cli.verbs import fp8 as confirm_verbs

    tell(monkeypatch, {2: 12.5, 4: 12.5})
    policy_of(fc1=WINS, fc2=WINS, qkv=LOSES, proj=LOSES).save("policy.json")
    shown = confirm_verbs._show
    monkeypatch.setattr(
        confirm_verbs,
        "_show",
        lambda how, results: shown(how | {"emulated": False, "device": "NVIDIA H200"}, results),
    )
    assert confirm() == 1
    out = capsys.readouterr().out
    assert "policy.json on blocks of config.json: NVIDIA H200, eager, tp 1" in out
    assert "not confirmed at 64, 128 tokens: keep BF16 there" in out
    assert "this shows that the command runs" not in out


def test_memory_that_ran_out_is_a_row(capsys, monkeypatch):
    def example(*_):
        raise MemoryError

    monkeypatch.setattr("bitplan.fp8.bench.confirm_policy.SmallModel.example", example)
    assert confirm(tokens="64") == 1
    out = capsys.readouterr().out
    assert "unmeasured" in out
    assert "64 tokens: nothing was confirmed: 1 blocks did not fit into memory" in out


def test_on_the_machines_own_clock(capsys):
    """FP8 takes longer emulated, on any machine; the answer is that of the clock."""
    code = confirm("--json", tokens="64")
    (count,) = json.loads(capsys.readouterr().out)["counts"]
    (block,) = count["blocks"]
    assert block["low"] <= block["speedup"] <= block["high"]
    assert code == (1 if block["taken"] == "bf16" else 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"policy": "none.json"}, "none.json: cannot be read: No such file"),
        ({"policy": "config.json"}, "config.json: version must be 1"),
        ({"model": "none"}, "none/config.json: cannot be read: No such file"),
        ({"model": "policy.json"}, "policy.json: model_type null is not known"),
        ({"model": "model.yaml"}, "model.yaml: a YAML cannot be built by transformers; give a config.json"),
        ({"model": "vlm.json"}, "vlm.json: a vision-language model"),
        ({"tokens": "0"}, "--tokens must be whole numbers from 1 with commas between"),
        ({"tokens": "2k"}, "such as 2048,8192, got '2k'"),
        ({"tokens": "64,"}, "got '64,'"),
        ({"tokens": "9" * 5000}, "--tokens must be whole numbers from 1"),
    ],
)
def test_one_line_errors(given, message, capsys):
    Path("vlm.json").write_text(json.dumps(LLAMA | {"vision_config": {}}))
    assert confirm(**given) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "int8"], "recipe must be one of tensorwise, rowwise, blockwise, mxfp8, got 'int8'"),
        (["--timing", "both"], "--timing"),
        (["--tp", "0"], "--tp"),
        (["--tp", "4"], "num_key_value_heads is 2, which tp 4 does not divide"),
    ],
)
def test_bad_options(arguments, message, capsys):
    assert confirm(*arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_no_gpu_and_another_gpu(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert confirm(device="cuda") == 2
    assert "torch sees no CUDA GPU, so there is nothing to confirm" in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr(layer_settings, "require_fp8", lambda *_: None)
    monkeypatch.setattr(confirm_policy, "fingerprint_of", lambda _: replace(H200, gpu="NVIDIA B200"))
    assert confirm(device="cuda") == 2
    captured = capsys.readouterr()
    assert (
        "policy.json: measured on 'NVIDIA H200', this is 'NVIDIA B200'; run the benchmark on this GPU" in captured.err
    )
    assert captured.err.count("\n") == 1
