"""Models that other libraries quantized: they run packed or decoded, are measured, and become folders of ours."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import bitplan
from bitplan import open_tensors
from bitplan.base.errors import FileFormatError
from bitplan.files.compare import compare_files
from bitplan.files.quantize_files import quantize_file
from bitplan.packed.checkpoints.causal_lm import load_causal_lm
from bitplan.packed.quant_linear import QuantLinear
from tests.files.engines.tiny_models import save_tiny
from tests.files.quantized_folders import stream

GROUP = 32


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("foreign") / "llama"
    save_tiny(folder, "llama", dtype="float16")
    return folder


def quantized(plain: Path, folder: Path, method: str) -> Path:
    """The model with its linear layers as GPTQ has them, or in FP8 with one scale."""
    folder.mkdir()
    for path in plain.iterdir():
        if path.suffix == ".json":
            (folder / path.name).write_bytes(path.read_bytes())
    tensors = {}
    for name, weight in load_file(plain / "model.safetensors").items():
        owner = name.removesuffix(".weight")
        if not owner.endswith("_proj"):
            tensors[name] = weight
        elif method == "fp8":
            tensors[name] = (weight.float() / 0.01).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale"] = torch.tensor(0.01)
        else:
            blocks = weight.float().reshape(len(weight), -1, GROUP)
            scales = (blocks.abs().amax(-1) / 7).half()
            codes = (blocks / scales.float()[..., None]).round().clamp(-8, 7).reshape(weight.shape) + 8
            words = stream(codes.long().numpy(), 4).T
            tensors[f"{owner}.qweight"] = torch.from_numpy(np.ascontiguousarray(words))
            tensors[f"{owner}.scales"] = scales.T.contiguous()
            tensors[f"{owner}.qzeros"] = torch.full((scales.shape[1], len(weight) // 8), 0x77777777, dtype=torch.int32)
            tensors[f"{owner}.g_idx"] = (torch.arange(weight.shape[1]) // GROUP).int()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": GROUP, "sym": True}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("method", ["gptq", "fp8"])
def test_a_folder_of_another_library_runs_and_becomes_one_of_ours(plain: Path, tmp_path: Path, method: str) -> None:
    theirs = quantized(plain, tmp_path / "theirs", method)
    model, report = bitplan.load_packed(theirs, dtype=torch.float32)
    assert report.layout == method
    packed = [module for module in model.modules() if isinstance(module, QuantLinear)]
    assert len(packed) == 14
    ids = torch.arange(3, 19)[None]
    decoded = load_causal_lm(theirs)
    with torch.no_grad():
        expected = decoded.model(ids).logits
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-2, atol=2e-2)
    fmt = "q4_0_gguf" if method == "gptq" else "fp8_e4m3_row"
    quantize_file(theirs, tmp_path / "ours", {"*_proj.weight": fmt})
    comparison = compare_files(theirs, tmp_path / "ours")
    assert (comparison.worst, comparison.findings) == (None, ())
    with open_tensors(tmp_path / "ours") as file:
        assert file.spec("model.layers.0.mlp.up_proj.weight").format == fmt
    bitplan.save_packed(model, tmp_path / "saved")
    assert compare_files(theirs, tmp_path / "saved").findings == ()


def test_a_method_that_is_not_read_is_refused_by_name(plain: Path, tmp_path: Path) -> None:
    theirs = quantized(plain, tmp_path / "theirs", "hqq")
    with pytest.raises(FileFormatError, match="quant_method 'hqq', which bitplan does not load"):
        bitplan.load_packed(theirs)
