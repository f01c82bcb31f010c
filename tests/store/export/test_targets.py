"""Every target by the verb: what a dry run says is what is written, and what is wrong is one line."""

from __future__ import annotations

import json

import pytest
import safetensors.torch

from bitplan.cli import run

from .tiny_models import save_tiny

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
    assert "exists already; replace it with --force" in capsys.readouterr().err
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
    assert list(tmp_path.iterdir()) == []
