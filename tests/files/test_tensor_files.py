"""One view of every file: what the specs say is what read gives, and lies in the metadata are named."""

from __future__ import annotations

import json

import gguf
import pytest
import safetensors
import safetensors.torch
import torch

from bitplan.base.errors import BitplanError, FileFormatError, StoreError
from bitplan.files.gguf import dequantizable_types
from bitplan.files.gguf_tensors import GGUF_TYPES, file_metadata
from bitplan.files.open_files import open_tensors, write_tensors
from bitplan.files.safetensors_tensors import METADATA_KEY
from bitplan.files.tensor_file import TensorSpec
from bitplan.formats import Encoded
from bitplan.formats.codec import decode, encode
from bitplan.formats.registry import list_formats
from tests.crosses import few

FORMATS = [fmt.name for fmt in list_formats()]


def packed_file(path, fmt, *, shape=(6, 256)):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    encoded = encode(weight, fmt)
    promises = [TensorSpec.of("w", shape, encoded.fmt), TensorSpec.of("bias", (3,), dtype=torch.float16)]
    with write_tensors(path, promises) as writer:
        writer.write("bias", torch.ones(3, dtype=torch.float16))
        writer.write("w", encoded)
    return encoded


@pytest.mark.parametrize("fmt", few(FORMATS, 16))
def test_a_packed_tensor_comes_back_part_for_part(fmt, tmp_path):
    encoded = packed_file(tmp_path / "a.safetensors", fmt)
    with open_tensors(tmp_path / "a.safetensors") as file:
        assert set(file.specs) == {"w", "bias"}
        spec, result = file.spec("w"), file.read("w")
        assert (spec.format, spec.shape, spec.nbytes) == (fmt, (6, 256), encoded.nbytes)
        assert isinstance(result, Encoded)
        assert result.to_bytes() == encoded.to_bytes()
        assert torch.equal(file.read_float("w"), decode(encoded))


@pytest.mark.parametrize("fmt", few(FORMATS, 16))
def test_the_safetensors_library_opens_our_files(fmt, tmp_path):
    encoded = packed_file(tmp_path / "a.safetensors", fmt)
    loaded = safetensors.torch.load_file(tmp_path / "a.safetensors")
    for part, tensor in encoded.parts.items():
        theirs = loaded["w" if part == "data" else f"w.{part}"]
        assert theirs.dtype == tensor.dtype
        assert torch.equal(theirs.flatten().view(torch.uint8), tensor.flatten().view(torch.uint8))


@pytest.mark.parametrize("fmt", GGUF_TYPES)
def test_the_gguf_library_decodes_our_files(fmt, tmp_path):
    encoded = packed_file(tmp_path / "a.gguf", fmt)
    tensor = next(tensor for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors if tensor.name == "w")
    assert tensor.tensor_type.name == GGUF_TYPES[fmt]
    theirs = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
    assert torch.equal(theirs.reshape(6, 256), decode(encoded))
    with open_tensors(tmp_path / "a.gguf") as file:
        assert torch.equal(file.read_float("w").float(), decode(encoded))


def test_file_types_are_llama_cpps() -> None:
    """Of files of one type their number; the number of mixtures where two types of blocks are in a file."""
    for kind, number in (
        ("iq4_xs", 30),
        ("iq3_s", 26),
        ("iq3_xxs", 23),
        ("iq2_s", 28),
        ("iq2_xs", 20),
        ("iq2_xxs", 19),
    ):
        assert gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"] == number
        weight = TensorSpec.of("w", (4, 256), f"{kind}_gguf")
        assert file_metadata({}, [weight])["general.file_type"].value == number
    mixed = [TensorSpec.of("w", (4, 256), "iq3_s_gguf"), TensorSpec.of("v", (1, 256), "q6_k_gguf")]
    assert file_metadata({}, mixed)["general.file_type"].value == gguf.LlamaFileType.MOSTLY_IQ3_M


@pytest.mark.parametrize("kind", dequantizable_types(), ids=lambda kind: kind.name)
def test_every_gguf_type_that_gguf_py_decodes_is_read(kind, tmp_path):
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = torch.randint(0, 60, (3, 2 * block_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "test")
    writer.add_tensor("w", raw.numpy(), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_tensors(tmp_path / "a.gguf") as file:
        result = file.read_float("w")
        assert file.spec("w").shape == (3, 2 * block)
    tensor = gguf.GGUFReader(tmp_path / "a.gguf").tensors[0]
    if result.dtype in (torch.float32, torch.float16, torch.bfloat16):
        theirs = torch.from_numpy(gguf.quants.dequantize(tensor.data, kind).copy()).reshape(result.shape)
        assert torch.equal(result.float().nan_to_num(nan=7.0), theirs.float().nan_to_num(nan=7.0))
    else:
        assert result.flatten().view(torch.uint8).tolist() == raw.flatten().tolist()


def rewrite_metadata(path, change):
    """Change bitplan's metadata in a file and leave everything else."""
    with safetensors.safe_open(path, "pt") as file:
        document = json.loads(file.metadata()[METADATA_KEY])
    tensors = safetensors.torch.load_file(path)
    text = change(document)
    metadata = {METADATA_KEY: text if isinstance(text, str) else json.dumps(document)}
    safetensors.torch.save_file(tensors, path, metadata=metadata)


LIES = {
    "another format": (lambda d: d["tensors"]["w"].update(format="int8_g128"), "must be int8"),
    "unknown format": (lambda d: d["tensors"]["w"].update(format="mxfp5"), "no format 'mxfp5'"),
    "another shape": (lambda d: d["tensors"]["w"].update(shape=[6, 64]), "must be uint8"),
    "absurd shape": (lambda d: d["tensors"]["w"].update(shape=[2**61, 2**61]), "must be"),
    "negative shape": (lambda d: d["tensors"]["w"].update(shape=[-6, 128]), "shape must be a list of sizes"),
    "shape of strings": (lambda d: d["tensors"]["w"].update(shape=["6", "128"]), "shape must be a list of sizes"),
    "missing tensor": (lambda d: d["tensors"].update(v={"format": "int8", "shape": [1]}), "part 'data' is missing"),
    "extra key": (lambda d: d["tensors"]["w"].update(extra=1), "unknown key 'extra'"),
    "no tensors": (lambda d: d.pop("tensors") and None, "tensors is missing; it must be an object"),
    "newer version": (lambda d: d.update(version=2), "version must be 1, .* got 2"),
    "not an object": (lambda _: "[]", "the document must be an object"),
    "not JSON": (lambda _: "{", "not valid JSON"),
    "tied to nothing": (lambda d: d.update(tied={"x": "y"}), "ties 'x' to 'y'"),
    "ties that are no names": (lambda d: d.update(tied={"x": 1}), "tied: x must be a string"),
}


@pytest.mark.parametrize("lie", LIES)
def test_metadata_that_lies_is_refused_by_name(lie, tmp_path):
    change, message = LIES[lie]
    path = tmp_path / "a.safetensors"
    packed_file(path, "mxfp4")
    rewrite_metadata(path, change)
    with pytest.raises(FileFormatError, match=message) as caught:
        open_tensors(path)
    assert "a.safetensors" in str(caught.value)


def test_a_pickle_is_never_opened(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(BitplanError, match="never opens pickles"):
        open_tensors(tmp_path / "a.pt")


def test_an_unknown_tensor_gets_a_suggestion(tmp_path):
    packed_file(tmp_path / "a.safetensors", "int8")
    with (
        open_tensors(tmp_path / "a.safetensors") as file,
        pytest.raises(StoreError, match="did you mean 'bias'"),
    ):
        file.read("bais")


def test_gguf_holds_only_its_own_formats(tmp_path):
    with (
        pytest.raises(StoreError, match="GGUF cannot hold int8_row"),
        write_tensors(tmp_path / "a.gguf", [TensorSpec.of("w", (2, 32), encode(torch.ones(1, 1), "int8_row").fmt)]),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_an_unknown_suffix_is_refused(tmp_path):
    with (
        pytest.raises(StoreError, match=r"\.safetensors, \.gguf, \.json .*; got '.bin'"),
        write_tensors(tmp_path / "a.bin", []),
    ):
        pass
