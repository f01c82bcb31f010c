"""Folders for torchao: its own classes are built from them, with our numbers."""

from __future__ import annotations

import json
import logging
import warnings
from contextlib import nullcontext

import pytest
import safetensors
import safetensors.torch
import torch

from bitplan.base.errors import StoreError
from bitplan.cli import run
from bitplan.files import packed_folder
from bitplan.files.engines.targets import ExportRequest, export_model, prepare_export
from bitplan.files.engines.torchao import FORMATS
from bitplan.files.transformers_names import silence_transformers
from bitplan.formats.codec import decode, encode
from tests.crosses import few
from tests.files.engines.tiny_models import save_tiny

UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("models") / "qwen3"
    save_tiny(place, "qwen3", hidden_size=128, intermediate_size=256)
    return place


@pytest.fixture(scope="module")
def torchao():
    """Its import warns of kernels that this torch cannot load, and of torch's own deprecations."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return pytest.importorskip("torchao.prototype.safetensors.safetensors_support", exc_type=ImportError)
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.parametrize("fmt", FORMATS)
def test_torchao_builds_its_tensors_and_dequantizes_to_our_numbers(fmt, torchao, folder, tmp_path):
    from torchao.core.config import config_from_dict

    export_model(folder, tmp_path / "out", "torchao", {"*up_proj*": fmt, "*gate_proj*": fmt})
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["quant_type"]["default"]
    assert UP.removesuffix(".weight") in config_from_dict(said).fqn_to_config
    path = tmp_path / "out" / "model.safetensors"
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    built, left = torchao.unflatten_tensor_state_dict(safetensors.torch.load_file(path), metadata)
    assert not left
    source = safetensors.torch.load_file(folder / "model.safetensors")[UP]
    assert torch.equal(built[UP].dequantize(), decode(encode(source, fmt)))


@pytest.mark.usefixtures("torchao")
def test_transformers_loads_a_mixed_plan_in_several_files_and_gives_our_logits(folder, tmp_path, monkeypatch):
    import transformers

    monkeypatch.setattr(packed_folder.cut_shards, "__defaults__", (300_000,))
    mixed = {"*self_attn*": "int8_row", "*up_proj*": "int4_g64", "*gate_proj*": "fp8_e4m3_row", "*down_proj*": "nvfp4"}
    report = export_model(folder, tmp_path / "out", "torchao", mixed)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    formats = {row.source: row.format for row in report.rows if row.format != "float32"}
    assert set(formats.values()) == set(mixed.values())
    with silence_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
        ids = torch.arange(3, 19).reshape(1, -1)
        with torch.no_grad():
            for name, parameter in ours.named_parameters():
                if name in formats:
                    parameter.copy_(decode(encode(parameter, formats[name])))
            assert type(theirs.model.layers[0].mlp.down_proj.weight.data).__name__ == "NVFP4Tensor"
            torch.testing.assert_close(theirs(ids).logits, ours(ids).logits, rtol=1e-4, atol=1e-4)


def test_what_torchao_cannot_hold_is_refused(folder, tmp_path):
    for fmt, why in (("mxfp4", "quantize activations"), ("fp8_e4m3_b128", "per row"), ("q4_0_gguf", "no tensor class")):
        with pytest.raises(StoreError, match=f"torchao has no {fmt} .*{why}"):
            prepare_export(ExportRequest(folder, tmp_path / "a", {"*up_proj*": fmt}), "torchao")
    assert not (tmp_path / "a").exists()


def test_the_type_that_a_folder_must_be_loaded_in_is_said(folder, tmp_path, capsys):
    assert run(["export", str(folder), str(tmp_path / "int4"), "--to", "torchao", "--format", "int4_g32"]) == 0
    words = 'load it with dtype="auto" (float32): torchao multiplies by these tensors in no other type'
    assert words in " ".join(capsys.readouterr().out.split())
    said = json.loads((tmp_path / "int4" / "config.json").read_text())["quantization_config"]
    assert said["load_with"].startswith(words)
    report = export_model(folder, tmp_path / "int8", "torchao", "int8_row")
    assert not report.notes


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("fmt", few(FORMATS, 2))
def test_every_other_type_fails_in_torchao_but_for_int8_row(fmt, folder, tmp_path):
    import transformers

    export_model(folder, tmp_path / "out", "torchao", fmt)
    for dtype, runs in (("auto", True), (torch.bfloat16, fmt == "int8_row")):
        with silence_transformers(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
        with nullcontext() if runs else pytest.raises(RuntimeError, match="same dtype"):
            model(torch.arange(3, 9)[None])
