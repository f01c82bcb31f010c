"""Two files are compared by the model's numbers: across layouts, never by codes, and integers apart."""

from __future__ import annotations

import math

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch

from bitplan.cli import run
from bitplan.files.compare import compare_files
from bitplan.files.drift import drift_files
from bitplan.files.engines.targets import export_model
from bitplan.files.gpt_oss import convert_gpt_oss, make_checkpoint
from bitplan.files.open_files import write_tensors
from bitplan.files.quantize_files import quantize_file
from bitplan.files.tensor_file import TensorSpec
from tests.files.engines.tiny_models import save_tiny


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A gpt-oss of bfloat16 experts, its packed version in three layouts, and that packed in 8 bits by us."""
    folder = tmp_path_factory.mktemp("made")
    make_checkpoint(folder / "floats", naming="hf", expert_format="bfloat16")
    convert_gpt_oss(folder / "floats", folder / "hf", to="hf", experts="mxfp4")
    convert_gpt_oss(folder / "hf", folder / "openai", to="openai")
    convert_gpt_oss(folder / "hf", folder / "oss.gguf", to="gguf")
    quantize_file(folder / "floats", folder / "ours.safetensors", "int8_row")
    return folder


@pytest.mark.parametrize("packed", ["hf", "openai", "oss.gguf"])
def test_packed_experts_are_compared_by_their_values(made, packed):
    result = compare_files(made / "floats", made / packed)
    assert result.findings == ()
    experts = {name: layer for name, layer in result.layers.items() if name.endswith("experts.down_proj")}
    assert len(experts) == 2
    assert all(15 < layer.sqnr_db < 25 and layer.format_b == "mxfp4" for layer in experts.values())
    others = [layer for name, layer in result.layers.items() if not name.endswith(("_proj", "down_proj"))]
    assert all(layer.sqnr_db == math.inf for layer in others)


@pytest.mark.parametrize("reference", ["floats", "hf"])
@pytest.mark.parametrize("inside", ["", "model.safetensors"])
def test_experts_of_a_packed_folder_are_compared_as_the_model_has_them(made, tmp_path, reference, inside):
    """The folder holds them as their transpose: a square down_proj had the error of other numbers, without a word."""
    quantize_file(made / "floats", tmp_path / "packed", "int8_row", only=["*.experts.*_proj"])
    packed = tmp_path / "packed" / inside
    result = compare_files(made / reference, packed)
    assert result.findings == ()
    experts = [layer for layer in result.layers.values() if layer.format_b == "int8_row"]
    assert len(experts) == 4
    assert all(layer.sqnr_db > (30 if reference == "floats" else 15) for layer in experts)
    if reference == "floats":
        drift = drift_files(made / reference, packed)
        assert drift.findings == ()
        assert {row.name: row.relative_error for row in drift.rows} == pytest.approx(
            {name: layer.relative_error for name, layer in result.layers.items() if layer.format_b == "int8_row"}
        )


@pytest.mark.parametrize(("one", "two"), [("hf", "openai"), ("openai", "oss.gguf"), ("oss.gguf", "hf")])
def test_layouts_of_one_model_agree(made, one, two):
    result = compare_files(made / one, made / two)
    assert result.findings == ()
    assert result.overall.sqnr_db == math.inf
    assert result.overall.count > 0


def test_a_file_that_we_packed_beside_the_published_layout(made):
    result = compare_files(made / "hf", made / "ours.safetensors")
    assert result.findings == ()
    assert 15 < result.overall.sqnr_db < 40


def test_large_equal_tensors_do_not_hide_what_differs(tmp_path, capsys):
    torch.manual_seed(0)
    one = {"embed": torch.randn(1000, 64), "w": torch.randn(32, 64), "v": torch.randn(32, 64)}
    safetensors.torch.save_file(one, tmp_path / "a.safetensors")
    quantize_file(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "mxfp4", keep=["embed"])
    result = compare_files(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    low, high = sorted(result.layers[name].sqnr_db for name in "vw")
    assert low <= result.differing.sqnr_db <= high < result.overall.sqnr_db - 10
    assert result.layers[result.worst].sqnr_db == low
    document = result.to_dict()
    assert (document["differing"]["tensors"], document["worst"]) == (2, result.worst)
    assert run(["compare", str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")]) == 0
    message = capsys.readouterr().out
    assert "overall: the 2 that differ" in message
    figure = f"overall, 2 that differ: SQNR {result.differing.sqnr_db:.2f} dB; worst: {result.worst}, {low:.2f} dB"
    assert f"{figure}; 1 tensor equal" in message
    assert f"{result.overall.sqnr_db:.2f}" not in message
    same = compare_files(tmp_path / "a.safetensors", tmp_path / "a.safetensors")
    assert (same.worst, same.differing.count, same.overall.sqnr_db) == (None, 0, math.inf)


def test_integers_are_compared_for_equality_and_count_in_no_figure(tmp_path, capsys):
    weight = torch.randn(32, 64)
    one = {"w": weight, "positions": torch.arange(50000)}
    safetensors.torch.save_file(one, tmp_path / "a.safetensors")
    quantize_file(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "int8_row")
    result = compare_files(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert list(result.layers) == ["w"]
    assert result.overall.sqnr_db == result.layers["w"].sqnr_db < 60
    assert result.overall.count == weight.numel()
    safetensors.torch.save_file(one | {"positions": torch.arange(1, 50001)}, tmp_path / "c.safetensors")
    assert compare_files(tmp_path / "a.safetensors", tmp_path / "c.safetensors").findings == (
        "positions: 50000 of 50000 integers differ",
    )
    safetensors.torch.save_file({"w": weight, "positions": torch.ones(50000)}, tmp_path / "d.safetensors")
    assert run(["compare", str(tmp_path / "a.safetensors"), str(tmp_path / "d.safetensors")]) == 1
    assert "positions: int64 on one side, float32 on the other" in capsys.readouterr().out


def test_a_llama_under_ggufs_names_is_the_same_model(tmp_path):
    """llama.cpp has other names, and the rows of q and k in another order."""
    q, up = torch.randn(64, 64), torch.randn(96, 64)
    name = "model.layers.0.{}.weight"
    weights = {name.format("self_attn.q_proj"): q, name.format("mlp.up_proj"): up}
    safetensors.torch.save_file(weights, tmp_path / "a.safetensors")
    for path, kind in (("a.gguf", "llama"), ("g.gguf", "gemma2")):
        writer = gguf.GGUFWriter(tmp_path / path, kind)
        writer.add_head_count(4)
        writer.add_head_count_kv(4)
        turned = q.numpy().reshape(4, 2, 8, 64).swapaxes(1, 2).reshape(64, 64)
        writer.add_tensor("blk.0.attn_q.weight", np.ascontiguousarray(turned))
        writer.add_tensor("blk.0.ffn_up.weight", up.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    result = compare_files(tmp_path / "a.safetensors", tmp_path / "a.gguf")
    assert (result.findings, result.overall.sqnr_db, len(result.layers)) == ((), math.inf, 2)
    assert list(compare_files(tmp_path / "a.gguf", tmp_path / "a.gguf").layers) == [
        "blk.0.attn_q.weight",
        "blk.0.ffn_up.weight",
    ]
    findings = compare_files(tmp_path / "a.safetensors", tmp_path / "g.gguf").findings
    assert any("'gemma2' are not translated" in finding for finding in findings)


def test_a_gguf_file_and_what_was_quantized_from_it_share_their_names(tmp_path):
    with write_tensors(tmp_path / "a.gguf", [TensorSpec.of("blk.0.ffn_up.weight", (32, 64))]) as writer:
        writer.write("blk.0.ffn_up.weight", torch.randn(32, 64))
    quantize_file(tmp_path / "a.gguf", tmp_path / "b.safetensors", "int8_row")
    result = compare_files(tmp_path / "a.gguf", tmp_path / "b.safetensors")
    assert list(result.layers) == ["blk.0.ffn_up.weight"]
    assert result.findings == ()


def test_a_tensor_with_nan_comes_first(tmp_path):
    good = {"a": torch.randn(8, 32), "b": torch.randn(8, 32)}
    safetensors.torch.save_file(good, tmp_path / "a.safetensors")
    safetensors.torch.save_file(good | {"b": torch.full((8, 32), torch.nan)}, tmp_path / "b.safetensors")
    assert list(compare_files(tmp_path / "a.safetensors", tmp_path / "b.safetensors").layers) == ["b", "a"]


@pytest.mark.parametrize("kind", ["llama3", "gemma3", "mixtral"])
def test_an_exported_family_is_the_same_model(tmp_path, capsys, kind):
    """Names, order of rows, stacked experts, norms plus one; packed on both sides where a format is given."""
    save_tiny(tmp_path / "hf", kind)
    fmt = "q8_0_gguf" if kind == "llama3" else "float32"
    export_model(tmp_path / "hf", tmp_path / "m.gguf", "gguf", fmt)
    quantize_file(tmp_path / "hf", tmp_path / "ours", fmt)
    assert run(["compare", str(tmp_path / "ours"), str(tmp_path / "m.gguf")]) == 0
    count = len(compare_files(tmp_path / "m.gguf", tmp_path / "ours").layers)
    assert f"values identical: all {count} tensors" in capsys.readouterr().out


def test_progress_counts_every_number_once(tmp_path):
    safetensors.torch.save_file({"a": torch.ones(4, 8), "b": torch.ones(3)}, tmp_path / "a.safetensors")
    seen = []
    compare_files(tmp_path / "a.safetensors", tmp_path / "a.safetensors", on_numbers=lambda *args: seen.append(args))
    assert sorted(seen) == [(0, "a"), (0, "b"), (3, "b"), (32, "a")]
