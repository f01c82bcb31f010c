"""Folders for MLX: its own arithmetic gives our numbers, and mlx_lm our logits."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.torch
import torch

from bitplan import open_tensors
from bitplan.base.errors import StoreError
from bitplan.files.engines.mlx import QUANTIZATIONS, older_keys
from bitplan.files.engines.targets import ExportRequest, export_model, prepare_export
from bitplan.formats.codec import decode, encode
from tests.crosses import few
from tests.files.engines.tiny_models import LLAMA3_ROPE, save_tiny

UP = "model.layers.0.mlp.up_proj"
SIZES = {"hidden_size": 128, "intermediate_size": 256}
FAMILIES = {
    "llama3": SIZES,
    "gemma3": {**SIZES, "layer_types": ["sliding_attention", "full_attention"]},
    "mixtral": SIZES,
    "qwen3_moe": SIZES,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("models") / "llama3"
    save_tiny(place, "llama3", **SIZES)
    return place


@pytest.mark.parametrize("fmt", few(QUANTIZATIONS, 5))
def test_mlx_dequantizes_to_our_numbers(fmt, folder, tmp_path):
    mx = pytest.importorskip("mlx.core")
    export_model(folder, tmp_path / "out", "mlx", {f"{UP}.weight": fmt, "*embed_tokens*": "mxfp4"})
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    how = {key: said.get(UP, said)[key] for key in ("group_size", "bits", "mode")}
    held = mx.load(str(tmp_path / "out" / "model.safetensors"))
    with open_tensors(tmp_path / "out") as back:
        assert back.spec(f"{UP}.weight").encoded
        read = back.read_float(f"{UP}.weight").numpy()
    scales, biases = held[f"{UP}.scales"], held.get(f"{UP}.biases")
    if biases is not None:  # MLX computes in the type of the scales; in float32 nothing is lost
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    theirs = np.array(mx.dequantize(held[f"{UP}.weight"], scales, biases, **how, dtype=mx.float32))
    source = safetensors.torch.load_file(folder / "model.safetensors")[f"{UP}.weight"]
    wanted = decode(encode(source, fmt)).numpy()
    np.testing.assert_array_equal(read, wanted)
    if fmt == "int8_g128":  # its scales fill a float32, so that 128 of them do not cancel without a rest
        np.testing.assert_allclose(theirs, wanted, rtol=0, atol=2**-22 * np.abs(wanted).max())
    else:
        np.testing.assert_array_equal(theirs, wanted)


@pytest.mark.parametrize("kind", FAMILIES)
def test_mlx_lm_loads_every_family_and_gives_our_logits(kind, tmp_path):
    mx = pytest.importorskip("mlx.core")
    mlx_lm = pytest.importorskip("mlx_lm.utils")
    model = save_tiny(tmp_path / "in", kind, **FAMILIES[kind])
    feed = "*experts*" if kind in ("mixtral", "qwen3_moe") else "*mlp*_proj*"
    report = export_model(tmp_path / "in", tmp_path / "out", "mlx", {"*self_attn*_proj*": "int4_g32", feed: "mxfp4"})
    assert {row.format for row in report.rows} == {"int4_g32", "mxfp4", "float32"}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "_proj" in name:
                weight.copy_(decode(encode(weight, "int4_g32" if "self_attn" in name else "mxfp4")))
        ids = torch.arange(3, 19).reshape(1, -1)
        wanted = model(ids).logits.numpy()
    theirs, _ = mlx_lm.load_model(tmp_path / "out")
    np.testing.assert_allclose(np.array(theirs(mx.array(ids.numpy()))), wanted, rtol=2e-3, atol=2e-3)


def test_every_layer_with_another_format_has_an_entry(folder, tmp_path):
    formats = {"*.0.mlp*": "mxfp4", "*_proj*": "int4_g64", "*embed*": "q8_0_gguf"}
    export_model(folder, tmp_path / "out", "mlx", formats)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    said = config["quantization"]
    assert (said["group_size"], said["bits"], said["mode"]) == (64, 4, "affine")
    assert said[UP] == {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    assert said["model.embed_tokens"] == {"group_size": 32, "bits": 8, "mode": "affine"}
    assert "model.layers.1.mlp.up_proj" not in said
    assert config["rope_scaling"]["factor"] == 8.0
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_what_mlx_cannot_hold_is_refused(folder, tmp_path):
    def refuse(formats, source=folder):
        with pytest.raises(StoreError) as refusal:
            prepare_export(ExportRequest(source, tmp_path / "out", formats), "mlx")
        assert "\n" not in str(refusal.value)
        return str(refusal.value)

    assert "no scale for the whole tensor; take mxfp4 or int4_g32" in refuse({"*_proj*": "nvfp4"})
    assert "take int8_g64" in refuse({"*_proj*": "int8_row"})
    assert "no mode of MLX has these numbers" in refuse({"*_proj*": "ternary"})
    assert "no layer would be packed" in refuse("bfloat16")
    save_tiny(tmp_path / "experts", "mixtral")
    assert "need one format" in refuse({"*experts.1.*": "mxfp4"}, tmp_path / "experts")
    save_tiny(tmp_path / "gpt_oss", "gpt_oss")
    assert "gpt-oss" in refuse("mxfp4", tmp_path / "gpt_oss")
    assert not (tmp_path / "out").exists()


def test_config_of_transformers_5_has_the_keys_that_mlx_lm_reads():
    layers = {"full_attention": {"rope_theta": 1e6, "rope_type": "default"}, "sliding_attention": {"rope_theta": 1e4}}
    kinds = ["sliding_attention", "full_attention"] * 2
    found = older_keys({"model_type": "gemma3_text", "rope_parameters": layers, "layer_types": kinds})
    assert found == {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 2}
    found = older_keys({"rope_parameters": LLAMA3_ROPE, "num_local_experts": 4})
    assert found["num_experts"] == 4
    assert found["rope_theta"] == LLAMA3_ROPE["rope_theta"]
    assert "rope_theta" not in found["rope_scaling"]


def test_a_packed_folder_keeps_its_bits(folder, tmp_path):
    from bitplan import quantize_file

    quantize_file(folder, tmp_path / "packed", {"*_proj*": "int4_g32"}, scale_rule="mse")
    report = export_model(tmp_path / "packed", tmp_path / "out", "mlx", {})
    assert {row.format for row in report.rows} == {"int4_g32", "float32"}
    held = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    source = safetensors.torch.load_file(folder / "model.safetensors")[f"{UP}.weight"]
    wanted = encode(source, "int4_g32", scale_rule="mse")
    assert torch.equal(held[f"{UP}.weight"].view(torch.uint8), wanted.data)
    assert torch.equal(held[f"{UP}.scales"], wanted.scales)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
