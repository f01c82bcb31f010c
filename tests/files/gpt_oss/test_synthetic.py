"""Drawn checkpoints: sizes as asked, numbers as a model has them, the same in every layout."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch

from bitplan.base.errors import StoreError
from bitplan.files.gpt_oss import GptOssFile, GptOssShape, checkpoint_bytes, make_checkpoint
from bitplan.files.gpt_oss.layouts import LAYOUTS
from bitplan.formats.codec import decode

SIZES = {
    "layers": 3,
    "experts": 5,
    "hidden": 96,
    "intermediate": 160,
    "heads": 6,
    "kv_heads": 3,
    "head_dim": 8,
    "vocab": 70,
}


@pytest.mark.parametrize("expert_format", ["mxfp4", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_sizes_in_any_layout(tmp_path, layout, expert_format):
    path = tmp_path / ("model.gguf" if layout == "gguf" else "model.safetensors")
    if (layout, expert_format) == ("openai", "bfloat16"):
        with pytest.raises(StoreError, match="MXFP4 and in nothing else"):
            make_checkpoint(path, naming=layout, expert_format=expert_format, **SIZES)
        assert list(tmp_path.iterdir()) == []
        return
    report = make_checkpoint(path, naming=layout, expert_format=expert_format, **SIZES)
    assert {tensor.action for tensor in report.tensors} == {"drawn"}
    assert report.nbytes == checkpoint_bytes(layout, GptOssShape(**SIZES), packed=expert_format == "mxfp4")
    with GptOssFile(path) as file:
        assert file.shape == GptOssShape(**SIZES)
        assert file.experts == (None if expert_format == "mxfp4" else torch.bfloat16)


def test_the_same_seed_gives_the_same_file_and_another_seed_another(tmp_path):
    files = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_checkpoint(tmp_path / name, seed=seed)
        files.append((tmp_path / name / "model.safetensors").read_bytes())
    assert files[0] == files[1] != files[2]


def test_the_numbers_look_like_a_models(tmp_path):
    make_checkpoint(tmp_path / "m", naming="hf", hidden=256, intermediate=128)
    tensors = safetensors.torch.load_file(tmp_path / "m" / "model.safetensors")
    assert tensors["model.layers.0.self_attn.q_proj.weight"].float().std() == pytest.approx(1 / 16, rel=0.05)
    assert tensors["model.norm.weight"].float().mean() == pytest.approx(1, abs=0.05)
    blocks = tensors["model.layers.1.mlp.experts.gate_up_proj_blocks"]
    codes = torch.cat([(blocks & 15).flatten(), (blocks >> 4).flatten()]).long().bincount(minlength=16)
    assert int(codes.min()) > 0.01 * int(codes.sum())  # every code is in use
    assert len(tensors["model.layers.1.mlp.experts.gate_up_proj_scales"].unique()) < 6
    with GptOssFile(tmp_path / "m") as file:
        first, second = (decode(file.expert(0, ("gate", "up"), index)) for index in (0, 1))
    assert first.std() == pytest.approx(1 / 16, rel=0.05)
    assert not torch.equal(first, second)


def test_the_config_fits(tmp_path):
    make_checkpoint(tmp_path / "m", naming="hf", experts=2)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["architectures"] == ["GptOssForCausalLM"]
    assert config["model_type"] == "gpt_oss"
    assert config["num_experts_per_tok"] == config["num_local_experts"] == 2
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    make_checkpoint(tmp_path / "w", naming="hf", expert_format="bfloat16")
    assert "quantization_config" not in json.loads((tmp_path / "w" / "config.json").read_text())


def test_refusals(tmp_path):
    if not torch.cuda.is_available():
        with pytest.raises(StoreError, match="torch sees no GPU here"):
            make_checkpoint(tmp_path / "m", device="cuda")
    with pytest.raises(StoreError, match="device 'gpu': there is no such kind; use cpu, or cuda"):
        make_checkpoint(tmp_path / "m", device="gpu")
    make_checkpoint(tmp_path / "m.safetensors")
    with pytest.raises(StoreError, match="exists already"):
        make_checkpoint(tmp_path / "m.safetensors")
    make_checkpoint(tmp_path / "m.safetensors", force=True)


@pytest.mark.gpu
def test_drawing_on_a_gpu_gives_a_valid_checkpoint(tmp_path):
    make_checkpoint(tmp_path / "m", naming="hf", device="cuda")
    with GptOssFile(tmp_path / "m") as file:
        assert decode(file.expert(1, ("down",), 3)).std() == pytest.approx(96**-0.5, rel=0.1)
