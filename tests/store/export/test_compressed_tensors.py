"""Folders for vLLM and transformers: compressed-tensors decompresses them to our numbers."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch

from bitplan.errors import StoreError
from bitplan.formats import decode, encode
from bitplan.store.export.targets import ExportRequest, export_model, prepare_export
from bitplan.store.models.transformers_names import silence_transformers

from .tiny_models import save_tiny

UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("models") / "qwen3"
    save_tiny(place, "qwen3", hidden_size=128, intermediate_size=256)
    return place


@pytest.mark.parametrize("fmt", ["int4_g32", "int8_row", "fp8_e4m3_row", "fp8_e4m3_b128"])
def test_the_library_decompresses_to_our_numbers(fmt, folder, tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    export_model(folder, tmp_path / "out", "compressed-tensors", fmt)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    assert UP.removesuffix(".weight") in scheme.targets
    held = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    module = UP.removesuffix("weight")
    own = {name.removeprefix(module): tensor for name, tensor in held.items() if name.startswith(module)}
    theirs = BaseCompressor.load_from_registry(config["format"]).decompress(own, scheme)["weight"]
    source = safetensors.torch.load_file(folder / "model.safetensors")[UP]
    wanted = decode(encode(source, fmt), torch.bfloat16 if fmt == "int4_g32" else torch.float32)
    assert torch.equal(theirs, wanted)


def test_transformers_loads_the_folder_and_gives_our_logits(folder, tmp_path):
    pytest.importorskip("compressed_tensors")
    import transformers

    report = export_model(folder, tmp_path / "out", "compressed-tensors", "int4_g32")
    packed = {row.source for row in report.rows if row.format == "int4_g32"}
    assert len(packed) == 14
    with silence_transformers():
        ours = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.arange(3, 19).reshape(1, -1)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name in packed:
                parameter.copy_(decode(encode(parameter, "int4_g32")))
        torch.testing.assert_close(theirs(ids).logits, ours(ids).logits, rtol=1e-5, atol=1e-5)


def test_layers_that_engines_join_need_one_format(folder, tmp_path):
    with pytest.raises(StoreError, match="engines compute them as one layer"):
        prepare_export(ExportRequest(folder, tmp_path / "a", {"*.q_proj*": "int8_row"}), "compressed-tensors")
    with pytest.raises(StoreError, match="compressed-tensors has no mxfp4"):
        prepare_export(ExportRequest(folder, tmp_path / "a", "mxfp4"), "compressed-tensors")
    with pytest.raises(StoreError, match="no layer would be packed"):
        prepare_export(ExportRequest(folder, tmp_path / "a", "bfloat16"), "compressed-tensors")


def test_a_mixed_plan_has_a_group_for_each_format(folder, tmp_path):
    mixed = {"*self_attn*_proj*": "int8_row", "*gate_proj*": "int4_g32", "*up_proj*": "int4_g32"}
    report = export_model(folder, tmp_path / "out", "compressed-tensors", mixed)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert {group["format"] for group in config["config_groups"].values()} == {"int-quantized", "pack-quantized"}
    assert "model.layers.0.mlp.down_proj" in config["ignore"]
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert {row.format for row in report.rows} == {"int8_row", "int4_g32", "float32"}
    with pytest.raises(StoreError, match="is quantized already"):
        prepare_export(ExportRequest(tmp_path / "out", tmp_path / "b", "int8_row"), "compressed-tensors")
