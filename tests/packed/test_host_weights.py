"""Weights in the host's memory: the same products and files, one matrix where layers are joined, and moves."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import bitplan
from bitplan.base.errors import PlanError
from bitplan.packed.fused_projections import fuse_projections
from bitplan.packed.packed_weight import PackedWeight, addressed, wait_in_host
from bitplan.packed.quant_linear import QuantLinear
from bitplan.plan.plan import Choice, Plan
from tests.cli.verbs.test_perplexity_verb import save_llama

CPU = torch.device("cpu")


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(64, 96, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x):
        return torch.cat([self.gate(x), self.up(x)], dim=-1)


def drawn(fmt="int8_row"):
    torch.manual_seed(0)
    model = Gated()
    bitplan.apply_plan(model, {"*.weight": fmt})
    return model


@pytest.mark.parametrize("fmt", ["mxfp4", "int8_row", "nvfp4", "q4_k_gguf", "fp8_e4m3_row"])
def test_a_copy_in_pinned_memory_has_the_same_bytes_and_shape(fmt):
    torch.manual_seed(0)
    encoded = bitplan.encode(torch.randn(8, 256), fmt)
    weight = wait_in_host(PackedWeight(encoded), CPU)
    assert bitplan.decode(weight.encoded).equal(bitplan.decode(encoded))
    assert set(weight.waiting) == set(encoded.parts)
    for name, part in encoded.parts.items():
        assert weight.get_buffer(name).dtype == part.dtype
        assert weight.get_buffer(name).data_ptr() == weight.waiting[name].data_ptr() != part.data_ptr()


def test_an_empty_part_has_no_memory():
    host, seen = addressed(torch.empty(0, 4), CPU)
    assert host.shape == seen.shape == (0, 4)


def test_joined_layers_stay_there_as_one_matrix_with_the_same_product():
    x, plain, model = torch.randn(3, 64), drawn(), drawn()
    fuse_projections(model, x)
    fuse_projections(plain, x)
    for layer in (model.gate, model.up):
        wait_in_host(layer.weight, CPU)
    with torch.inference_mode():
        expected, made = plain(x), model(x)
    assert made.equal(expected)
    gate, up = (layer.weight.waiting["data"] for layer in (model.gate, model.up))
    assert gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
    assert model.gate.joint.layer.weight.data.data_ptr() == gate.data_ptr() == model.gate.weight.data.data_ptr()


def test_layers_of_which_one_waits_run_by_themselves():
    x, plain, model = torch.randn(3, 64), drawn(), drawn()
    fuse_projections(model, x)
    wait_in_host(model.up.weight, CPU)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), plain(x))
    assert model.gate.joint.layer is None


def test_a_copy_and_a_move_do_not_wait_any_more():
    layer = QuantLinear(bitplan.encode(torch.randn(8, 64), "mxfp4"))
    wait_in_host(layer.weight, CPU)
    assert not copy.deepcopy(layer).weight.waiting
    layer.to("meta")
    assert not layer.weight.waiting


def test_a_folder_whose_plan_says_host_is_loaded_so_and_says_the_same(tmp_path):
    save_llama(tmp_path / "llama", blocks=2)
    bitplan.quantize_file(tmp_path / "llama", tmp_path / "plain", "mxfp4")
    plan = Plan.load(tmp_path / "plain")
    entries = {
        name: replace(entry, choice=replace(entry.choice, place="host"))
        if ".layers.1." in name and entry.choice.format == "mxfp4"
        else entry
        for name, entry in plan.entries.items()
    }
    bitplan.quantize_file(tmp_path / "llama", tmp_path / "split", Plan(entries, padding=plan.padding))
    plain, split = (bitplan.load_packed(tmp_path / name).model for name in ("plain", "split"))
    waiting = {path for path, one in split.named_modules() if isinstance(one, PackedWeight) and one.waiting}
    assert waiting == {name for name, entry in entries.items() if entry.choice.place}
    ids = torch.arange(8)[None]
    with torch.inference_mode():
        assert split(ids).logits.equal(plain(ids).logits)
    assert Plan.load(tmp_path / "split").diff(plan).changed.keys() == waiting


def test_only_packed_weights_have_a_place():
    with pytest.raises(PlanError, match="a packed weight may lie on the host"):
        Choice("bfloat16", "so", place="host")
    with pytest.raises(PlanError, match='"disk"'):
        Choice("mxfp4", "so", place="disk")


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["mxfp4", "int8_row", "int4_g32", "q4_k_gguf"])
@pytest.mark.parametrize("rows", [1, 16, 256])
def test_a_gpu_multiplies_with_a_weight_in_the_hosts_memory(fmt, rows):
    device = torch.device("cuda", torch.cuda.current_device())
    encoded = bitplan.encode(torch.randn(512, 1024, generator=torch.Generator().manual_seed(0)), fmt)
    x = torch.randn(rows, 1024, device=device).to(torch.bfloat16)
    with torch.inference_mode():
        expected = QuantLinear(PackedWeight(encoded.to(device)))(x)
        before = torch.cuda.memory_allocated()
        layer = QuantLinear(wait_in_host(PackedWeight(encoded), device))
        assert torch.cuda.memory_allocated() == before
        assert layer.weight.device == device
        torch.testing.assert_close(layer(x), expected)
