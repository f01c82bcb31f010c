"""Drift between two files: the same figures as tensor by tensor, in pieces, under every naming."""

from __future__ import annotations

import math

import pytest
import safetensors.torch
import torch

from bitplan.files import packed_rows
from bitplan.files.compare import compare_files
from bitplan.files.drift import drift_files
from bitplan.files.open_files import write_tensors
from bitplan.files.quantize_files import quantize_file
from bitplan.files.tensor_file import TensorSpec
from bitplan.formats import error_report, get_format
from bitplan.formats.codec import decode, encode
from bitplan.formats.scale_checks import scale_health
from tests.crosses import few
from tests.formats.samples import SMALL_BLOCKS

FORMATS = [pytest.param(fmt, id=fmt.name) for fmt in SMALL_BLOCKS]


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[16 * 2**20, 2048], ids=["whole", "pieces"], autouse=True)
def piece_bytes(request, monkeypatch):
    monkeypatch.setattr(packed_rows, "PIECE_BYTES", request.param)


@pytest.mark.cross("fmt", few(FORMATS, 6))
@pytest.mark.cross("dtype", [torch.float32, torch.bfloat16])
def test_every_format_has_the_figures_of_a_report(fmt, dtype, tmp_path):
    tensors = {"a": gaussian(128, 128).to(dtype), "b": (gaussian(64, 256, seed=1) * 3).to(dtype), "norm": gaussian(8)}
    safetensors.torch.save_file(tensors, tmp_path / "m.safetensors")
    quantize_file(tmp_path / "m.safetensors", tmp_path / "p.safetensors", fmt)
    drift = drift_files(tmp_path / "m.safetensors", tmp_path / "p.safetensors", step=3)
    assert drift.findings == ()
    assert sorted(row.name for row in drift.rows) == ["a", "b"]  # norms stay as they are, and are not packed
    assert [row.relative_error for row in drift.rows] == sorted(
        (row.relative_error for row in drift.rows), reverse=True
    )
    for row in drift.rows:
        encoded = encode(tensors[row.name], fmt)
        report = error_report(tensors[row.name], encoded)
        assert row.max_abs_error == report.max_error
        assert row.relative_error == pytest.approx(report.relative_error, rel=1e-9)
        assert row.health == scale_health(encoded)
        assert (row.step, row.bytes, row.count) == (3, encoded.nbytes, tensors[row.name].numel())


@pytest.mark.parametrize("name", ["q4_0_gguf", "q8_0_gguf", "mxfp4_gguf", "bfloat16"])
def test_gguf_against_safetensors(name, tmp_path):
    tensors = {"w": gaussian(3, 16, 64)}
    safetensors.torch.save_file(tensors, tmp_path / "m.safetensors")
    with write_tensors(tmp_path / "p.gguf", [TensorSpec.of("w", (3, 16, 64), get_format(name))]) as writer:
        writer.write("w", encode(tensors["w"], name))
    (row,) = drift_files(tmp_path / "m.safetensors", tmp_path / "p.gguf").rows
    agreement = compare_files(tmp_path / "m.safetensors", tmp_path / "p.gguf").overall
    assert row.max_abs_error == agreement.max_error > 0
    assert row.relative_error == pytest.approx(agreement.relative_error, rel=1e-9)
    assert row.health == scale_health(encode(tensors["w"], name))


@pytest.mark.parametrize(("suffix", "transposed"), [(".", False), ("_", True)])
def test_pairs_of_blocks_and_scales(suffix, transposed, tmp_path):
    """OpenAI's masters lie as their blocks do, Hugging Face's transposed; 64 x 64 would not tell."""
    x = gaussian(3, 64, 64)
    encoded = encode(x, "mxfp4")
    packed = {f"w{suffix}blocks": encoded.data.reshape(3, 64, 2, 16), f"w{suffix}scales": encoded.scales}
    safetensors.torch.save_file(packed, tmp_path / "p.safetensors")
    safetensors.torch.save_file({"w": (x.mT if transposed else x).contiguous()}, tmp_path / "m.safetensors")
    (row,) = drift_files(tmp_path / "m.safetensors", tmp_path / "p.safetensors").rows
    report = error_report(x, encoded)
    assert (row.name, row.format, row.max_abs_error) == ("w", "mxfp4", report.max_error)
    assert row.health == scale_health(encoded)


def test_a_packed_master_is_decoded(tmp_path):
    x = gaussian(8, 64)
    safetensors.torch.save_file({"w": x}, tmp_path / "x.safetensors")
    quantize_file(tmp_path / "x.safetensors", tmp_path / "m.safetensors", "int8_row", only=["*"])
    quantize_file(tmp_path / "x.safetensors", tmp_path / "p.safetensors", "mxfp4", only=["*"])
    (row,) = drift_files(tmp_path / "m.safetensors", tmp_path / "p.safetensors").rows
    difference = decode(encode(x, "int8_row")).double() - decode(encode(x, "mxfp4")).double()
    assert row.max_abs_error == float(difference.abs().max())


def test_findings(tmp_path):
    encoded = encode(gaussian(4, 64), "mxfp4")
    safetensors.torch.save_file(
        {n: gaussian(4, 64) for n in ("gone", "other", "ids", "good")}, tmp_path / "x.safetensors"
    )
    quantize_file(tmp_path / "x.safetensors", tmp_path / "p.safetensors", "mxfp4", only=["*"])
    masters = {"other": gaussian(4, 32), "ids": torch.zeros(4, 64, dtype=torch.int32), "good": gaussian(4, 64)}
    masters["good"][1, 1] = math.nan
    safetensors.torch.save_file(masters, tmp_path / "m.safetensors")
    drift = drift_files(tmp_path / "m.safetensors", tmp_path / "p.safetensors")
    assert [row.name for row in drift.rows] == ["good"]
    shown = "\n".join(drift.findings)
    assert "gone: in" in shown
    assert "other: 'other' must be (4, 64) in" in shown
    assert "ids: 'ids' must be floats in" in shown
    assert "good: NaN or infinity on one side" in shown
    assert drift.to_dict()["layers"][0]["relative_error"] is None
    broken = {"w.blocks": encoded.data.reshape(4, 2, 16), "w.scales": encoded.scales[:, :1].contiguous()}
    safetensors.torch.save_file(broken, tmp_path / "b.safetensors")
    (finding,) = drift_files(tmp_path / "m.safetensors", tmp_path / "b.safetensors").findings
    assert "'w.blocks' is (4, 2, 16), its scales 'w.scales' are (4, 1)" in finding


def test_nothing_packed(tmp_path):
    safetensors.torch.save_file({"w": gaussian(4)}, tmp_path / "m.safetensors")
    drift = drift_files(tmp_path / "m.safetensors", tmp_path / "m.safetensors")
    assert drift.rows == ()
    assert "no packed tensor" in drift.findings[0]
