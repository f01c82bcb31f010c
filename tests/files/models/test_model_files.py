"""Saving and loading models: byte-identical round trips, and files that do not fit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bitplan
from bitplan.base.errors import ArgumentError, FileFormatError, StoreError
from bitplan.files.gguf_tensors import GGUF_TYPES
from bitplan.files.models.morph import formats_of, morph_model, stores_of
from bitplan.files.models.save_load import load_model, write_model
from bitplan.files.open_files import open_tensors
from bitplan.formats.registry import DTYPE_NAMES, get_format
from tests.crosses import few
from tests.formats.samples import SMALL_BLOCKS

LAYERS = {
    "Linear": lambda: nn.Linear(128, 6),
    "Embedding": lambda: nn.Embedding(5, 128),
    "Conv1d": lambda: nn.Conv1d(32, 3, 4),
    "Conv2d": lambda: nn.Conv2d(32, 3, 2),
    "Conv3d": lambda: nn.Conv3d(16, 3, 2),
    "RNN": lambda: nn.RNN(128, 128, num_layers=2),
    "LSTM": lambda: nn.LSTM(128, 128, bidirectional=True),
    "GRU": lambda: nn.GRU(128, 128),
    "MultiheadAttention": lambda: nn.MultiheadAttention(128, 2),
}
FORMATS = [fmt.name for fmt in SMALL_BLOCKS]


def round_trip(layer, fmt, folder, suffix):
    torch.manual_seed(0)
    model = nn.Sequential(LAYERS[layer](), nn.LayerNorm(8))
    morph_model(model, fmt)
    first, second = folder / f"first{suffix}", folder / f"second{suffix}"
    write_model(model, first)
    loaded = load_model(first, nn.Sequential(LAYERS[layer](), nn.LayerNorm(8)))
    write_model(loaded, second)
    return model, loaded, first, second


@pytest.mark.cross("layer", LAYERS)
@pytest.mark.cross("fmt", few(FORMATS, 16))
def test_save_load_save_is_byte_identical(layer, fmt, tmp_path):
    model, loaded, first, second = round_trip(layer, fmt, tmp_path, ".safetensors")
    assert first.read_bytes() == second.read_bytes()
    assert stores_of(model)
    assert formats_of(loaded) == formats_of(model)
    for name, store in stores_of(model).items():
        assert torch.equal(store.simulate(fmt), stores_of(loaded)[name].simulate(fmt))
        assert torch.equal(stores_of(loaded)[name].master, store.simulate(fmt))


@pytest.mark.cross("layer", [name for name in LAYERS if name != "Conv3d"])
@pytest.mark.cross("fmt", [fmt for fmt in GGUF_TYPES if fmt != "mxfp4" and get_format(fmt).block.cols != 256])
def test_gguf_round_trip_is_byte_identical(layer, fmt, tmp_path):
    if layer.startswith("Conv") and fmt not in ("float32", "float16", "bfloat16"):
        pytest.skip("GGUF's blocks lie along the last axis, which a convolution kernel has no room for")
    _, _, first, second = round_trip(layer, fmt, tmp_path, ".gguf")
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.cross("layer", LAYERS)
@pytest.mark.cross("fmt", few(DTYPE_NAMES, 10))
def test_network_json_round_trip_is_byte_identical(layer, fmt, tmp_path):
    _, _, first, second = round_trip(layer, fmt, tmp_path, ".json")
    assert first.read_bytes() == second.read_bytes()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(32, 64)
        self.head = nn.Linear(64, 32, bias=False)
        self.head.weight = self.tokens.weight


def test_a_tied_weight_in_two_formats_keeps_both(tmp_path):
    model = Tied()
    morph_model(model, {"tokens.*": "int8_row", "head.*": "mxfp4"})
    write_model(model, tmp_path / "a.safetensors")
    loaded = load_model(tmp_path / "a.safetensors", Tied())
    write_model(loaded, tmp_path / "b.safetensors")
    assert {name: fmt.name for name, fmt in formats_of(loaded).items()} == {
        "tokens.weight": "int8_row",
        "head.weight": "mxfp4",
    }
    assert loaded.head.weight is loaded.tokens.weight
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_tied_weights_are_written_once_and_stay_tied(tmp_path):
    model = Tied()
    morph_model(model, "mxfp4")
    write_model(model, tmp_path / "a.safetensors")
    loaded = load_model(tmp_path / "a.safetensors", Tied())
    assert loaded.head.weight is loaded.tokens.weight
    assert stores_of(loaded)["head.weight"] is stores_of(loaded)["tokens.weight"]
    write_model(loaded, tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    with open_tensors(tmp_path / "a.safetensors") as file:
        assert sum(spec.nbytes for spec in file.specs.values()) < 32 * 64


def test_buffers_travel_with_the_model(tmp_path):
    model = nn.Sequential(nn.Conv1d(32, 4, 1), nn.BatchNorm1d(4))
    model(torch.randn(3, 32, 5))
    write_model(model, tmp_path / "a.safetensors")
    loaded = load_model(tmp_path / "a.safetensors", nn.Sequential(nn.Conv1d(32, 4, 1), nn.BatchNorm1d(4)))
    assert loaded[1].num_batches_tracked == 1
    assert torch.equal(loaded[1].running_mean, model[1].running_mean)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (nn.Sequential(nn.Linear(128, 6), nn.Linear(6, 2)), "2 missing in the file: 1.bias, 1.weight"),
        (nn.Sequential(nn.Linear(128, 6, bias=False)), "1 unknown to the model: 0.bias"),
        (nn.Sequential(nn.Linear(128, 5)), r"'0.bias' is \(6,\), the model's is \(5,\)"),
        (nn.Sequential(nn.Linear(128, 6).half()), "cannot hold exactly"),
    ],
)
def test_a_file_for_another_model_changes_nothing(other, message, tmp_path):
    write_model(nn.Sequential(nn.Linear(128, 6)), tmp_path / "a.safetensors")
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(FileFormatError, match=message):
        load_model(tmp_path / "a.safetensors", other)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


def test_a_stale_version_is_never_saved(tmp_path):
    model = nn.Linear(128, 6)
    morph_model(model, "int8_row")
    write_model(model, tmp_path / "a.safetensors")
    with torch.no_grad():
        model.weight.mul_(2)
    write_model(model, tmp_path / "b.safetensors")
    loaded = load_model(tmp_path / "b.safetensors", nn.Linear(128, 6))
    assert torch.allclose(loaded.weight, model.weight, atol=0.01)
    assert (tmp_path / "a.safetensors").read_bytes() != (tmp_path / "b.safetensors").read_bytes()


def test_a_padded_format_keeps_its_padding_in_the_file(tmp_path):
    model = nn.Linear(33, 3)
    morph_model(model, "mxfp4", pad="zero")
    write_model(model, tmp_path / "a.safetensors")
    loaded = load_model(tmp_path / "a.safetensors", nn.Linear(33, 3))
    write_model(loaded, tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    with pytest.raises(StoreError, match=r"GGUF|row"):
        write_model(loaded, tmp_path / "a.gguf")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("fmt", ["q8_0_gguf", "int8_row", "mxfp4"])
def test_models_of_other_float_types_load_and_save_to_the_same_bytes(dtype, fmt, tmp_path):
    model = nn.Linear(64, 64).to(dtype)
    morph_model(model, fmt)
    write_model(model, tmp_path / "a.safetensors")
    loaded = load_model(tmp_path / "a.safetensors", nn.Linear(64, 64).to(dtype))
    write_model(loaded, tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert loaded.weight.dtype == dtype
    x = torch.randn(3, 64).to(dtype)
    assert torch.equal(loaded.eval()(x), model.eval()(x))


def test_load_packed_fills_masters_of_a_model_of_ones_own(tmp_path):
    model = nn.Linear(64, 64)
    morph_model(model, "int8_row")
    bitplan.save_packed(model, tmp_path / "new.safetensors")
    loaded, report = bitplan.load_packed(tmp_path / "new.safetensors", model=nn.Linear(64, 64), masters=True)
    assert loaded.weight.requires_grad
    x = torch.randn(3, 64)
    assert torch.equal(loaded.eval()(x), model.eval()(x))
    assert (report.packed_tensors, report.plain_tensors) == (1, 1)
    with pytest.raises(ArgumentError, match="masters=True fills the Parameters of your own model"):
        bitplan.load_packed(tmp_path / "new.safetensors", masters=True)


def test_a_file_that_exists_is_replaced_with_force_alone(tmp_path):
    bitplan.save_packed(nn.Linear(4, 4), tmp_path / "a.safetensors")
    before = (tmp_path / "a.safetensors").read_bytes()
    with pytest.raises(StoreError, match=r"a.safetensors: exists already"):
        bitplan.save_packed(nn.Linear(4, 4), tmp_path / "a.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == before
    bitplan.save_packed(nn.Linear(4, 4), tmp_path / "a.safetensors", force=True)
    assert (tmp_path / "a.safetensors").read_bytes() != before
