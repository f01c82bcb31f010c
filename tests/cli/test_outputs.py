"""One rule for every verb that writes: an existing file needs --force, an input is never replaced, nor a device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import safetensors.torch
import torch

from bitplan.cli import run
from bitplan.plan import Manifest
from tests.fp8.policy.fp8_samples import report, series

RULES = {"version": 1, "patterns": [{"regex": ".*", "format": "bfloat16"}]}
# verb, arguments before the output, and the inputs that must survive
WRITERS = {
    "quantize": (["model.safetensors", "OUT", "-f", "int8"], ["model.safetensors"]),
    "quantize --plan": (["model.safetensors", "OUT", "--plan", "plan.safetensors"], ["plan.safetensors"]),
    "quantize index": (["shards", "OUT", "-f", "int8"], ["shards/b.safetensors"]),
    "plan": (["rules.json", "model.safetensors", "-o", "OUT"], ["rules.json", "model.safetensors"]),
    "report": (["plan.json", "-o", "OUT"], ["plan.json"]),
    "fp8 merge": (["--reports", "tp1.json", "-o", "OUT"], ["tp1.json"]),
    "gpt-oss convert": (["gpt-oss", "OUT", "--to", "hf"], ["gpt-oss/model.safetensors"]),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("outputs")
    tensors = {"a.weight": torch.ones(2, 32), "b.weight": torch.ones(2, 32)}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    (folder / "shards").mkdir()
    for name in "ab":
        safetensors.torch.save_file({f"{name}.weight": torch.ones(2, 32)}, folder / "shards" / f"{name}.safetensors")
    (folder / "shards" / "model.safetensors.index.json").write_text(
        '{"metadata": {}, "weight_map": {"a.weight": "a.safetensors", "b.weight": "b.safetensors"}}'
    )
    Path(folder / "rules.json").write_text(str(RULES).replace("'", '"'))
    plan = Manifest.from_document(RULES).resolve(dict.fromkeys(tensors, (2, 32)))
    plan.save(folder / "plan.json")
    plan.save(folder / "plan.safetensors")  # a name is no kind
    report(series({1024: 0.8, 4096: 1.4})).save(folder / "tp1.json")
    assert run(["gpt-oss", "make", str(folder / "gpt-oss"), "--to", "hf", "--layers", "1"]) == 0
    return folder


def write(case, output, *more):
    arguments = [output if word == "OUT" else word for word in WRITERS[case][0]]
    group, *verb = case.split()
    return run([group, *(verb if group in ("fp8", "gpt-oss") else ()), *arguments, *more])


@pytest.mark.parametrize("case", WRITERS)
def test_inputs_survive_under_every_name(case, files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(files)
    capsys.readouterr()
    for name in WRITERS[case][1]:
        before = Path(name).read_bytes()
        os.link(name, tmp_path / "hard.safetensors")
        (tmp_path / "soft.safetensors").symlink_to(files / name)
        for given in (name, str(tmp_path / "hard.safetensors"), str(tmp_path / "soft.safetensors")):
            assert write(case, given, "--force") == 2
            message = capsys.readouterr()
            assert f"{given}: is the input {name} itself; write to another file" in message.err.replace(f"{files}/", "")
            assert message.err.count("\n") == 1
            assert Path(name).read_bytes() == before
        for made in ("hard", "soft"):
            (tmp_path / f"{made}.safetensors").unlink()


@pytest.mark.parametrize("case", [*WRITERS, "gpt-oss make"])
def test_an_existing_file_needs_force_and_a_device_is_refused(case, files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(files)
    monkeypatch.setitem(WRITERS, "gpt-oss make", (["OUT", "--layers", "1"], []))
    taken = tmp_path / "taken.safetensors"
    taken.write_text("old")
    assert write(case, str(taken)) == 2
    assert f"{taken}: exists already; choose another name, or replace it (--force)" in capsys.readouterr().err
    assert taken.read_text() == "old"
    assert write(case, str(taken), "--force") == 0
    assert taken.read_bytes() != b"old"
    (tmp_path / "full.safetensors").symlink_to("/dev/full")
    assert write(case, str(tmp_path / "full.safetensors"), "--force") == 2
    assert "full.safetensors: is a device, and only a regular file can be written" in capsys.readouterr().err
