"""`quantize --text`: a model's weights are rounded by what they meet on a text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bitplan.base.errors import MeasureError
from bitplan.cli import run
from bitplan.files.engines.targets import export_model
from bitplan.files.input_statistics import EvidenceFile
from bitplan.files.open_files import open_tensors
from bitplan.formats import Encoded
from bitplan.searching.collect import gather_evidence
from tests.files.engines.tiny_models import LETTERS, save_tiny

TEXT = "".join(LETTERS[number] for number in torch.randint(26, (400,), generator=torch.Generator().manual_seed(0)))


def test_quantize_takes_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path / "llama", "llama")
    (tmp_path / "text.txt").write_text(TEXT)
    words = [
        "quantize",
        "llama",
        "packed",
        "--text",
        "text.txt",
        "--format",
        "q4_0_gguf",
        "--keep",
        "*embed*",
        "--json",
    ]
    assert run([str(tmp_path / word) if word in ("llama", "packed", "text.txt") else word for word in words]) == 0
    rows = json.loads(capsys.readouterr().out)["tensors"]
    gains = [row["rounding"]["after"] / row["rounding"]["before"] for row in rows if "rounding" in row]
    assert len(gains) == 14
    assert max(gains) < 0.9
    assert not list(tmp_path.glob(".bitplan-*"))
    export_model(tmp_path / "packed", tmp_path / "packed.gguf", "gguf", "q4_0_gguf", keep=["*embed*"])
    with open_tensors(tmp_path / "packed") as file, open_tensors(tmp_path / "packed.gguf") as exported:
        packed, same = file.read("model.layers.1.mlp.down_proj.weight"), exported.read("blk.1.ffn_down.weight")
        assert isinstance(packed, Encoded)
        assert isinstance(same, Encoded)
        assert packed.to_bytes() == same.to_bytes()


def test_quantize_takes_text_that_the_model_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "llama", "llama")
    Path("text.txt").write_text(TEXT)
    texts = {"given": ["text.txt"], "both": ["text.txt", "self"], "own": ["self"], "again": ["self"]}
    digests = {}
    for output, names in texts.items():
        words = [word for name in names for word in ("--text", name)]
        assert run(["quantize", "llama", output, "--format", "q4_0_gguf", "--windows", "6", *words]) == 0
        with open_tensors(output) as file:
            weight = file.read("model.layers.1.mlp.down_proj.weight")
        assert isinstance(weight, Encoded)
        digests[output] = weight.to_bytes()
    assert digests["again"] == digests["own"]
    assert len(set(digests.values())) == 3
    Path("self").write_text(TEXT)
    assert run(["quantize", "llama", "file", "--format", "q4_0_gguf", "--text", "self"]) == 2
    assert f"give the file as {tmp_path / 'self'}" in capsys.readouterr().err


def test_static_scales_are_of_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path / "llama", "llama")
    words = ["--format", "int8_row", "--inputs", "int8_static", "--text", "self"]
    assert run(["quantize", str(tmp_path / "llama"), str(tmp_path / "packed"), *words]) == 2
    assert "int8_static takes its scales from one --text" in capsys.readouterr().err


def test_what_cannot_be_gathered_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path / "llama", "llama")
    with pytest.raises(MeasureError, match="the text has 3 tokens"):
        gather_evidence(tmp_path / "llama", "abc", tmp_path)
    assert not (tmp_path / "evidence.safetensors").exists()


def test_outputs_are_gathered_where_rows_keep_their_place(tmp_path: Path) -> None:
    save_tiny(tmp_path / "llama", "llama")
    export_model(tmp_path / "llama", tmp_path / "llama.gguf", "gguf", "float32")
    with EvidenceFile(gather_evidence(tmp_path / "llama", TEXT, tmp_path, context=64)) as evidence:
        name = "model.layers.1.self_attn.q_proj.weight"
        assert evidence.outputs(name) is None  # of too few tokens for its outputs
        evidence.metadata = {**evidence.metadata, "gradient_tokens": "100000"}
        outputs = evidence.outputs(name)
        assert outputs is not None
        assert torch.allclose(outputs, outputs.T)
        assert float(torch.linalg.eigvalsh(outputs.double()).min()) > -1e-6 * float(outputs.diagonal().max())
        assert not evidence.has_outputs("model.embed_tokens.weight")
    with EvidenceFile(gather_evidence(tmp_path / "llama.gguf", TEXT, tmp_path, context=64)) as evidence:
        assert evidence.has_outputs("blk.1.attn_v.weight")
        assert not evidence.has_outputs("blk.1.attn_q.weight")  # GGUF has its rows in another order
