"""A header that lies about a shape is refused before any tensor's bytes are read, in every container."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import nn

from bitplan.base.errors import BitplanError, FileFormatError
from bitplan.files.gguf import write_gguf
from bitplan.files.models.save_load import load_model
from bitplan.files.open_files import open_tensors
from bitplan.files.packed_rows import packed_pair
from bitplan.files.safetensors import write_safetensors
from bitplan.files.safetensors_tensors import part_name
from bitplan.files.tensor_bytes import ContainerFile
from bitplan.formats import get_format
from bitplan.formats.codec import encode
from bitplan.formats.registry import list_formats
from tests.crosses import few

PACKED = [pytest.param(fmt, id=fmt.name) for fmt in list_formats()]


@pytest.fixture(autouse=True)
def no_tensor_is_read(monkeypatch):
    """Headers may be read; the bytes of a tensor may not."""
    read = ContainerFile._read_exactly

    def guard(self, what, offset, nbytes):
        assert not what.startswith("tensor"), f"{what} was read"
        return read(self, what, offset, nbytes)

    monkeypatch.setattr(ContainerFile, "_read_exactly", guard)


def refused(path, match):
    with pytest.raises(FileFormatError, match=match):
        open_tensors(path).close()


def native(path, fmt, shape, *, stated=None, change=None):
    """A packed tensor `w` of a shape, in a file whose metadata tell another, or with a part of another shape."""
    encoded = encode(torch.ones(shape), fmt)
    parts = encoded.parts | (change or {})
    document = {"version": 1, "tensors": {"w": {"format": fmt.name, "shape": list(stated or shape)}}}
    entries = [(part_name("w", part), tensor.dtype, tuple(tensor.shape)) for part, tensor in parts.items()]
    with write_safetensors(path, entries, {"bitplan": json.dumps(document)}) as writer:
        for part, tensor in parts.items():
            writer.write(part_name("w", part), tensor)
    return path


@pytest.mark.cross("fmt", few(PACKED, 16))
@pytest.mark.cross("stated", [(64, 256), (128, 384), (256, 128), (127, 256), (128, 256, 2), (0, 256)], ids=str)
def test_native_metadata_that_do_not_fit_the_parts(fmt, stated, tmp_path):
    path = native(tmp_path / "a.safetensors", fmt, (128, 256), stated=stated)
    same_parts = fmt.part_shapes(stated) == fmt.part_shapes((128, 256))
    if same_parts:  # one scale and packed codes in one row: the bytes fit any shape of so many numbers
        assert fmt.block.is_tensor
        assert torch.Size(stated).numel() == 128 * 256
        open_tensors(path).close()
    else:
        refused(path, rf"'w' is {fmt.name} of shape .* must be")


@pytest.mark.parametrize("fmt", few([p for p in PACKED if p.values[0].scales is not None], 12))
def test_native_scales_of_another_shape(fmt, tmp_path):
    scales = torch.ones(3, 7).to(get_format(fmt).scales.dtype)
    refused(native(tmp_path / "a.safetensors", fmt, (128, 256), change={"scales": scales}), r"'w\.scales' must be")


def edited_header(path, edit):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    document = json.loads(data[8 : 8 + length])
    edit(document)
    text = json.dumps(document).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return path


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"shape": [4, 9]}, "takes 144 bytes"),
        ({"shape": [2, 4]}, "takes 32 bytes"),
        ({"shape": [2**40, 2**40]}, "no F32 tensor can have shape"),
        ({"shape": [-4, -8]}, "shape must be"),
        ({"dtype": "BF16"}, "takes 64 bytes"),
        ({"data_offsets": [0, 64]}, "give it 64"),
        ({"data_offsets": [0, 4096]}, "data_offsets must be"),
        ({"shape": [4, 4], "data_offsets": [64, 128]}, "leaves a hole"),
        ({"shape": [4, 4], "data_offsets": [0, 64]}, "cut short or has bytes that belong to no tensor"),
    ],
)
def test_safetensors_entries(change, match, tmp_path):
    path = tmp_path / "a.safetensors"
    with write_safetensors(path, [("w", torch.float32, (4, 8))]) as writer:
        writer.write("w", torch.ones(4, 8))
    refused(edited_header(path, lambda document: document["w"].update(change)), match)


@pytest.mark.parametrize("rows", [1, 3, 5, 2**40])
def test_gguf_dimensions(rows, tmp_path):
    path = tmp_path / "a.gguf"
    with write_gguf(path, [("w", Type.Q8_0, (4, 64))], {}) as writer:
        writer.write("w", bytes(4 * 68))
    data, there = path.read_bytes(), struct.pack("<QQ", 64, 4)
    assert data.count(there) == 1
    path.write_bytes(data.replace(there, struct.pack("<QQ", 64, rows)))
    refused(path, "the file at|belong to no tensor")


def test_network_json(tmp_path):
    from bitplan.files.poly_network import PolyNetwork, write_poly_json

    path = tmp_path / "a.json"
    write_poly_json(path, PolyNetwork.from_tensors({"w": encode(torch.ones(4, 8), "int8")}))
    document = json.loads(path.read_text())
    (layer,) = [layer for layer in _layers(document) if layer.get("name") == "w"]
    layer["shape"] = [4, 9]
    path.write_text(json.dumps(document))
    refused(path, "must be 32 numbers, got 36")


def _layers(node):
    if isinstance(node, dict):
        yield node
        node = list(node.values())
    if isinstance(node, list):
        for child in node:
            yield from _layers(child)


def test_a_pair_of_blocks_and_scales(tmp_path):
    entries = [("w.blocks", torch.uint8, (4, 2, 16)), ("w.scales", torch.uint8, (4, 3)), ("f", torch.float32, (4, 2))]
    entries += [("n.blocks", torch.uint8, (4, 2, 8)), ("n.scales", torch.float8_e4m3fn, (4, 2))]
    with write_safetensors(tmp_path / "a.safetensors", entries) as writer:
        for name, dtype, shape in entries:
            writer.write(name, torch.zeros(shape, dtype=dtype))
    with open_tensors(tmp_path / "a.safetensors") as file:
        with pytest.raises(FileFormatError, match=r"codes of mxfp4 must be \(4, 3, 16\), 16 for each scale"):
            packed_pair(file, "w.blocks", "w.scales", get_format("mxfp4"))
        with pytest.raises(FileFormatError, match=r"'f' must be torch\.uint8 in mxfp4, got float32"):
            packed_pair(file, "w.blocks", "f", get_format("mxfp4"))
        with pytest.raises(BitplanError, match="multiples of a base"):
            packed_pair(file, "n.blocks", "n.scales", get_format("nvfp4"))


def test_a_model_of_another_shape(tmp_path):
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(64, 4))
    native(tmp_path / "a.safetensors", get_format("mxfp4"), (4, 64))
    with pytest.raises(FileFormatError, match=r"'w' is \(4, 64\), the model's is \(64, 4\)"):
        load_model(tmp_path / "a.safetensors", model)


def test_the_guard_can_fail(tmp_path):
    native(tmp_path / "a.safetensors", get_format("mxfp4"), (4, 64))
    with open_tensors(tmp_path / "a.safetensors") as file, pytest.raises(AssertionError, match="was read"):
        file.read("w")
