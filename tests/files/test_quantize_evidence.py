"""`quantize --evidence`: the same bytes, better numbers, and what had no statistics is named."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import safetensors.torch
import torch

from bitplan.base.errors import StoreError
from bitplan.cli import run
from bitplan.files.input_statistics import weight_digest, write_evidence
from bitplan.files.open_files import open_tensors
from bitplan.files.quantize_files import quantize_file
from bitplan.files.round_with_evidence import evidence_for, open_evidence


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    weights = {f"{name}.weight": torch.randn(16, 64, generator=generator) for name in "abc"}
    safetensors.torch.save_file(weights, tmp_path / "in.safetensors")
    inputs = torch.randn(200, 64, generator=generator) @ torch.randn(64, 64, generator=generator)
    statistics = {"a.weight.hessian": inputs.T @ inputs, "b.weight.moments": inputs.square().mean(0)}
    with write_evidence(tmp_path / "evidence.safetensors", {k: tuple(v.shape) for k, v in statistics.items()}) as out:
        for key, value in statistics.items():
            out.write(key, value)
    torch.save(inputs, tmp_path / "inputs.pt")
    return tmp_path


def test_a_file_is_quantized_with_evidence(folder: Path) -> None:
    plain = quantize_file(folder / "in.safetensors", folder / "plain.safetensors", "mxfp4")
    report = quantize_file(
        folder / "in.safetensors", folder / "better.safetensors", "mxfp4", evidence=folder / "evidence.safetensors"
    )
    assert report.bytes_after == plain.bytes_after
    rounding = {row["name"]: row["rounding"] for row in report.rows}
    assert [rounding[f"{name}.weight"]["measure"] for name in "ab"] == ["hessian", "moments"]
    assert rounding["c.weight"] == "no statistics"
    assert "c.weight" in report.warnings[0]
    inputs = torch.load(folder / "inputs.pt", weights_only=True)
    names = ("in", "better", "plain")
    with ExitStack() as opened:
        source, better, worse = (opened.enter_context(open_tensors(folder / f"{name}.safetensors")) for name in names)
        exact = source.read_float("a.weight")
        errors = [float(((exact - file.read_float("a.weight")) @ inputs.T).square().sum()) for file in (better, worse)]
        assert torch.equal(better.read_float("c.weight"), worse.read_float("c.weight"))
    assert errors[0] < 0.5 * errors[1]


def test_evidence_of_another_model_is_refused(folder: Path) -> None:
    with write_evidence(folder / "other.safetensors", {"z.weight.moments": (64,)}) as out:
        out.write("z.weight.moments", torch.ones(64))
    with pytest.raises(StoreError, match=r"statistics of other tensors than .* 'z.weight' there, 'a.weight' here"):
        quantize_file(
            folder / "in.safetensors", folder / "out.safetensors", "mxfp4", evidence=folder / "other.safetensors"
        )
    with write_evidence(folder / "other.safetensors", {"a.weight.moments": (32,)}) as out:
        out.write("a.weight.moments", torch.ones(32))
    with pytest.raises(StoreError, match=r"evidence of another model: .*'a.weight' .* 32 columns, .* \[16, 64\]"):
        quantize_file(
            folder / "in.safetensors", folder / "out.safetensors", "mxfp4", evidence=folder / "other.safetensors"
        )
    with pytest.raises(StoreError, match="give one"):
        quantize_file(
            folder / "in.safetensors", folder / "o.safetensors", "mxfp4", evidence=folder / "x", scale_rule="mse"
        )


def test_the_json_of_a_search_is_no_statistics(folder: Path) -> None:
    (folder / "evidence.json").write_text('{"document": "evidence"}')
    with pytest.raises(StoreError, match=r"evidence\.json: is JSON, .*give .*evidence\.safetensors"):
        quantize_file(folder / "in.safetensors", folder / "out.safetensors", "mxfp4", evidence=folder / "evidence.json")
    assert not (folder / "out.safetensors").exists()


def test_evidence_is_of_the_weights_that_it_names(folder: Path) -> None:
    """Another model of the same names and shapes is refused; a copy of this one in bfloat16 is not."""
    weights = safetensors.torch.load_file(folder / "in.safetensors")
    digests = {f"weights.{name}": weight_digest(weight) for name, weight in weights.items()}
    with write_evidence(folder / "own.safetensors", {"b.weight.moments": (64,)}, digests) as out:
        out.write("b.weight.moments", torch.ones(64))
    options = {"evidence": folder / "own.safetensors", "only": ["b.weight"]}
    safetensors.torch.save_file({k: v.bfloat16() for k, v in weights.items()}, folder / "half.safetensors")
    for source in ("in", "half"):
        report = quantize_file(folder / f"{source}.safetensors", folder / "out.safetensors", "mxfp4", **options)
        assert not report.warnings
    weights["b.weight"] = weights["b.weight"] * 1.01
    safetensors.torch.save_file(weights, folder / "tuned.safetensors")
    with pytest.raises(StoreError, match=r"own.safetensors: evidence of another model: .*tuned.safetensors: b.weight"):
        quantize_file(folder / "tuned.safetensors", folder / "new.safetensors", "mxfp4", **options)
    assert not (folder / "new.safetensors").exists()


def test_the_verb_takes_evidence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    command = ["quantize", "in.safetensors", "out.safetensors", "-f", "int4_g32", "--evidence", "evidence.safetensors"]
    assert run(command) == 0
    warnings = capsys.readouterr().err
    assert "no statistics" in warnings
    assert "cannot be checked" in warnings


def test_experts_in_one_tensor_share_the_statistics_of_their_columns(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a.weight": torch.ones(2, 16, 64)}, tmp_path / "in.safetensors")
    for columns in (64, 16 * 64):  # of the last axis, or of a convolution seen as a matrix
        with write_evidence(tmp_path / f"{columns}.safetensors", {"a.weight.moments": (columns,)}) as out:
            out.write("a.weight.moments", torch.ones(columns))
        place = tmp_path / f"{columns}.safetensors"
        with open_tensors(tmp_path / "in.safetensors") as file, open_evidence(place) as evidence:
            assert evidence_for(evidence, file).names == {"a.weight": ("a.weight", None, None)}
