"""Statistics gathered block by block are those of the whole model, and round its weights better."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from bitplan.cli import run
from bitplan.errors import MeasureError, StoreError
from bitplan.formats import Encoded
from bitplan.runtime.causal_lm import load_causal_lm
from bitplan.runtime.input_statistics import LOOKED_UP, gather_inputs
from bitplan.store.export.targets import export_model
from bitplan.store.files.open_files import open_tensors
from bitplan.store.rounding.evidence import EvidenceFile
from tests.store.export.tiny_models import LETTERS, save_tiny

TEXT = "".join(LETTERS[number] for number in torch.randint(26, (400,), generator=torch.Generator().manual_seed(0)))
CONTEXT = 32


def whole_model(folder: Path) -> dict[str, torch.Tensor]:
    """X^T X of every linear layer, with the whole model in memory."""
    lm, found = load_causal_lm(folder), {}

    def hook(name: str) -> object:
        def add(_: nn.Module, args: tuple[torch.Tensor]) -> None:
            rows = args[0].reshape(-1, args[0].shape[-1])
            found[name] = found.get(name, 0) + rows.T @ rows

        return add

    for name, module in lm.model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(hook(f"{name}.weight"))  # type: ignore[arg-type]
    with torch.no_grad():
        for window in lm.windows(TEXT, CONTEXT):
            if len(window) == CONTEXT:
                lm(window[None])
    return found


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3"])
def test_block_by_block_is_the_whole_model(tmp_path: Path, kind: str) -> None:
    save_tiny(tmp_path / kind, kind)
    wanted, blocks = whole_model(tmp_path / kind), []
    path = tmp_path / "evidence.safetensors"
    gather_inputs(tmp_path / kind, TEXT, path, context=CONTEXT, on_block=blocks.append)
    with open_tensors(tmp_path / kind) as file, EvidenceFile(path) as evidence:
        head = "lm_head.weight" if "lm_head.weight" in file.specs else "model.embed_tokens.weight"
        if head != "lm_head.weight":
            wanted[head] = wanted.pop("lm_head.weight")
            wanted[head].diagonal().add_(LOOKED_UP * wanted[head].diagonal().mean())
        assert evidence.names == wanted.keys()
        for name, hessian in wanted.items():
            found = evidence.hessian(name)
            assert found is not None
            torch.testing.assert_close(found, hessian, rtol=1e-4, atol=1e-4 * float(hessian.abs().max()))
    assert blocks == ["model.layers.0", "model.layers.1", head]


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


def test_what_cannot_be_gathered_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="expected a Hugging Face folder"):
        gather_inputs(tmp_path, TEXT, tmp_path / "evidence.safetensors")
    save_tiny(tmp_path / "llama", "llama")
    with pytest.raises(MeasureError, match="the text has 3 tokens"):
        gather_inputs(tmp_path / "llama", "abc", tmp_path / "evidence.safetensors")
    assert not (tmp_path / "evidence.safetensors").exists()
