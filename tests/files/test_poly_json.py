"""The original's files by hand-packed bytes, ours in every dtype both ways, and everything that must be refused."""

from __future__ import annotations

import base64
import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitplan.base.errors import FileFormatError, FormatError, StoreError
from bitplan.files import poly_network
from bitplan.files.poly_network import DTYPES, PolyNetwork, read_poly_json, write_poly_json
from bitplan.formats import Encoded, get_format
from bitplan.formats.codec import decode, encode
from bitplan.formats.registry import DTYPE_NAMES
from tests.crosses import few

Json = dict[str, Any]

# Python's own packers, by dtype: struct letters for whole bytes, bits for codes that share one.
LETTERS = {"float64": "d", "float32": "f", "int64": "q", "int32": "i", "int16": "h", "int8": "b"}
LETTERS |= {"uint64": "Q", "uint32": "I", "uint16": "H", "uint8": "B", "fp8e4m3": "b", "fp8e5m2": "b"}
BITS = {"int4": 4, "uint4": 4, "fp4": 4, "int2": 2, "uint2": 2, "ternary": 2, "binary": 1}
SHAPES = [(0,), (1,), (2,), (3,), (5,), (7,), (9,), (17,), (), (0, 4), (3, 0, 2), (3, 5), (2, 3, 3)]


def pack(dtype: str, codes: list[Any]) -> bytes:
    """Codes as the file holds them: little-endian, or the first code in the highest bits."""
    if dtype in LETTERS:
        return struct.pack(f"<{len(codes)}{LETTERS[dtype]}", *codes)
    if dtype in ("float16", "bfloat16"):  # the original's both: the upper half of the float32
        return b"".join(struct.pack("<f", value)[2:] for value in codes)
    bits = BITS[dtype]
    text = "".join(f"{code & (1 << bits) - 1:0{bits}b}" for code in codes)
    text += "0" * (-len(text) % 8)
    return bytes(int(text[at : at + 8], 2) for at in range(0, len(text), 8))


def b64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def bits_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(left: Encoded, right: Encoded) -> bool:
    def parts(encoded: Encoded) -> dict[str, Any]:
        return {name: (part.dtype, part.shape, bits_of(part)) for name, part in encoded.parts.items()}

    return left.fmt == right.fmt and left.shape == right.shape and parts(left) == parts(right)


def numbers(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def save(path: Path, document: object) -> Path:
    path.write_text(document if isinstance(document, str) else json.dumps(document, indent=2))
    return path


# --- the original's files --------------------------------------------------------------------

# As the original prints them: 2-space indent, zeros omitted, floats as Go writes them.
ORIGINAL = """{
  "id": "network",
  "depth": 1,
  "rows": 1,
  "cols": 2,
  "layers_per_cell": 2,
  "layers": [
    {
      "z": 0,
      "y": 0,
      "x": 0,
      "l": 0,
      "type": "Dense",
      "activation": "ReLU",
      "dtype": "int4",
      "input_height": 3,
      "output_height": 1,
      "softmax_type": "Standard",
      "weights": "HoA=",
      "native": true,
      "scale": 0.25,
      "invented_in_2031": {
        "deep": [
          1,
          2.50,
          null,
          "<&>"
        ]
      }
    },
    {
      "z": 0,
      "y": 0,
      "x": 0,
      "l": 1,
      "type": "Softmax",
      "activation": "Linear",
      "dtype": "nf4",
      "temperature": 1e-7,
      "softmax_rows": 2
    },
    {
      "z": 0,
      "y": 0,
      "x": 1,
      "l": 0,
      "type": "Parallel",
      "activation": "Linear",
      "dtype": "float32",
      "parallel_branches": [
        {
          "z": 0,
          "y": 0,
          "x": 0,
          "l": 0,
          "type": "RNN",
          "activation": "Tanh",
          "dtype": "int8",
          "weights": "AACAPwAAIMA="
        },
        {
          "z": 0,
          "y": 0,
          "x": 0,
          "l": 0,
          "type": "Sequential",
          "activation": "Linear",
          "dtype": "float32",
          "sequential_layers": [
            {
              "z": 0,
              "y": 0,
              "x": 0,
              "l": 0,
              "type": "Embedding",
              "activation": "Linear",
              "dtype": "binary",
              "weights": "oA==",
              "native": true,
              "scale": 3
            }
          ]
        }
      ],
      "combine_mode": "concat"
    },
    {
      "z": 0,
      "y": 0,
      "x": 1,
      "l": 1,
      "type": "Metacognition",
      "activation": "Linear",
      "dtype": "float32",
      "is_disabled": true,
      "meta_rules": [],
      "meta_observed_layer": {
        "z": 0,
        "y": 0,
        "x": 0,
        "l": 0,
        "type": "CNN2",
        "activation": "Linear",
        "dtype": "int8",
        "kernel_size": 3,
        "weights": "AX//",
        "native": true,
        "scale": 0.1
      }
    }
  ]
}"""


def layer(**keys: Any) -> Json:
    return {"z": 0, "y": 0, "x": 0, "l": 0, "type": "RNN", "activation": "Linear", "dtype": "int8"} | keys


def network(*layers: Json, **keys: Any) -> Json:
    top = {"id": "network", "depth": 1, "rows": 1, "cols": 1, "layers_per_cell": len(layers)}
    return top | {"layers": list(layers)} | keys


def test_a_file_of_the_originals(tmp_path):
    result = read_poly_json(save(tmp_path / "net.json", ORIGINAL))
    assert "codec" not in result.document
    assert {name: tensor.tolist() for name, tensor in result.tensors.items()} == {
        "layers[0]": [0.25, -0.5, -2.0],  # nibbles 1 E 8; the 0 after them is padding
        "layers[2].parallel_branches[0]": [1.0, -2.5],
        "layers[2].parallel_branches[1].sequential_layers[0]": [3.0, -3.0, 3.0, -3.0, -3.0, -3.0, -3.0, -3.0],
        "layers[3].meta_observed_layer": [pytest.approx(0.1), pytest.approx(12.7), pytest.approx(-0.1)],
    }
    assert all(tensor.dtype == torch.float32 for tensor in result.tensors.values())


def test_a_file_of_the_originals_comes_back_with_the_same_values(tmp_path):
    first = read_poly_json(save(tmp_path / "net.json", ORIGINAL))
    write_poly_json(tmp_path / "again.json", first)
    again = read_poly_json(tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == json.loads(ORIGINAL) == again.document
    assert list(again.document["layers"][0]) == list(json.loads(ORIGINAL)["layers"][0])
    assert {name: bits_of(t) for name, t in again.tensors.items()} == {
        name: bits_of(t) for name, t in first.tensors.items()
    }
    # Where JSON leaves no choice the text is the original's too: only these numbers have several spellings.
    ours = (tmp_path / "again.json").read_text()
    assert ours == ORIGINAL.replace("2.50", "2.5").replace("1e-7", "1e-07") + "\n"


AMBIGUOUS = ("float16", "fp8e4m3", "fp8e5m2", "fp4")
EVERY_ORIGINAL = {
    "float64": ([1.5, -0.1, 1e300], [1.5, struct.unpack("<f", struct.pack("<f", -0.1))[0], math.inf]),
    "float32": ([1.5, -0.0, 1e-40], None),
    "float16": ([1.5, -2.0, 3e38], None),
    "bfloat16": ([1.5, -2.0, 0.0], [1.5, -2.0, 0.0]),
    "fp8e4m3": ([1, 127, -128], None),
    "fp8e5m2": ([1, 127, -128], None),
    "int64": ([1, -(2**62), 2**63 - 1], [0.5, -(2.0**61), 2.0**62]),
    "int32": ([1, -(2**31), 2**24], [0.5, -(2.0**30), 2.0**23]),
    "int16": ([1, -32768, 32767], [0.5, -16384.0, 16383.5]),
    "int8": ([1, -128, 127], [0.5, -64.0, 63.5]),
    "uint64": ([1, 2**63, 2**64 - 1], [0.5, 2.0**62, 2.0**63]),
    "uint32": ([1, 2**31, 0], [0.5, 2.0**30, 0.0]),
    "uint16": ([1, 65535, 0], [0.5, 32767.5, 0.0]),
    "uint8": ([1, 255, 128], [0.5, 127.5, 64.0]),
    "int4": ([1, -8, 7], [0.5, -4.0, 3.5]),
    "uint4": ([1, 8, 15], [0.5, 4.0, 7.5]),
    "fp4": ([1, -8, 7], None),
    "int2": ([1, -2, -1], [0.5, -1.0, -0.5]),
    "uint2": ([1, 2, 3], [0.5, 1.0, 1.5]),
    "ternary": ([1, 0, -1], [0.5, 0.0, -0.5]),
    "binary": ([1, 0, 1], [0.5, -0.5, 0.5]),
}


def test_the_table_names_every_dtype():
    assert list(EVERY_ORIGINAL) == list(DTYPES)
    assert len(DTYPES) == 21
    assert {tag for tag, name in DTYPES.items() if tag != name} == {"fp8e4m3", "fp8e5m2"}


@pytest.mark.parametrize("dtype", AMBIGUOUS)
def test_a_few_numbers_that_the_original_packs_differently_today_are_refused(dtype, tmp_path):
    """-1.5256 as an IEEE half has the bits of a bfloat16 of -0.15: neither the file nor a number says which it is."""
    raw = struct.pack("<e", -1.5256) if dtype == "float16" else b"\xbc\x3d"
    path = save(tmp_path / "net.json", network(layer(dtype=dtype, weights=b64(raw), native=True, scale=0.5)))
    with pytest.raises(FileFormatError, match=rf"layers\[0\]: packed {dtype} weights mean different numbers"):
        read_poly_json(path)
    master = layer(dtype=dtype, weights=b64(struct.pack("<f", -1.5)))
    assert read_poly_json(save(tmp_path / "net.json", network(master))).tensors["layers[0]"].tolist() == [-1.5]


@pytest.mark.parametrize("dtype", [dtype for dtype in EVERY_ORIGINAL if dtype not in AMBIGUOUS])
def test_every_dtype_as_the_original_reads_it(dtype, tmp_path):
    codes, expected = EVERY_ORIGINAL[dtype]
    raw = pack(dtype, codes)
    packed = layer(dtype=dtype, weights=b64(raw), native=True, scale=0.5)
    dense = packed | {"type": "Dense", "input_height": 3, "output_height": 1}
    master = layer(dtype=dtype, weights=b64(struct.pack("<2f", 2.5, -1e-40)), scale=0.5)
    unscaled = {key: value for key, value in packed.items() if key != "scale"}
    path = save(tmp_path / "net.json", network(packed, dense, master, unscaled, packed | {"scale": 0}))
    tensors = list(read_poly_json(path).tensors.values())
    if expected is None:
        assert bits_of(tensors[0]) == raw
        expected = tensors[0].tolist()
    assert tensors[0].tolist()[:3] == expected
    assert tensors[0].numel() == -(-3 * BITS.get(dtype, 8) // 8) * 8 // BITS.get(dtype, 8)
    assert tensors[1].tolist() == expected  # the sizes of a Dense layer trim the padding
    assert bits_of(tensors[2]) == struct.pack("<2f", 2.5, -1e-40)
    factor = 1 if "float" in dtype else 2  # a missing scale and a scale of 0 stand for 1
    assert tensors[3].tolist()[:3] == tensors[4].tolist()[:3] == [value * factor for value in expected]


def test_names_of_dtypes_in_other_case(tmp_path):
    path = save(tmp_path / "net.json", network(layer(dtype="INT8", weights="AQ==", native=True)))
    assert read_poly_json(path).tensors["layers[0]"].tolist() == [1.0]


def test_keys_of_ours_mean_nothing_without_the_codec(tmp_path):
    keys = {"name": ["not", "a", "name"], "shape": -1, "zero_point": 1.5}
    path = save(tmp_path / "net.json", network(layer(weights="AQI=", native=True, **keys), layers_per_cell=7))
    assert read_poly_json(path).tensors["layers[0]"].tolist() == [1.0, 2.0]


# --- ours, both ways -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", few(DTYPES, 10))
def test_ours_comes_back_bit_for_bit_and_byte_for_byte(dtype, tmp_path):
    tensors = {f"w{shape}": encode(numbers(shape), DTYPES[dtype]) for shape in SHAPES}
    tensors |= {"zeros": encode(torch.zeros(5), DTYPES[dtype]), "tiny": encode(numbers((3,)) * 1e-30, DTYPES[dtype])}
    tensors |= {"below": encode(torch.arange(3) - 2.0, DTYPES[dtype]), "one": encode(torch.ones(2, 1), DTYPES[dtype])}
    built = PolyNetwork.from_tensors(tensors)
    write_poly_json(tmp_path / "one.json", built)
    result = read_poly_json(tmp_path / "one.json")
    write_poly_json(tmp_path / "two.json", result)
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    assert result.document["codec"] == "bitplan-1"
    assert result.document == built.document
    assert list(result.tensors) == list(built.tensors) == list(tensors)
    for name, encoded in tensors.items():
        assert same(result.tensors[name], encoded), name
        assert same(built.tensors[name], encoded), name


def codes_of(encoded: Encoded, dtype: str) -> list[Any]:
    """One Python number per weight, in the terms that `pack` takes."""
    codes = encoded.codes().reshape(-1)
    if dtype.startswith("fp8"):
        return codes.view(torch.int8).tolist()
    return codes.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bytes_of_ours(dtype, tmp_path):
    encoded = encode(numbers((3, 5)), DTYPES[dtype])
    write_poly_json(tmp_path / "net.json", PolyNetwork.from_tensors({"w": encoded}))
    (result,) = json.loads((tmp_path / "net.json").read_text())["layers"]
    if dtype == "float16":
        raw = struct.pack("<15e", *encoded.data.flatten().tolist())
    else:
        raw = pack(dtype, codes_of(encoded, dtype))
    assert result["weights"] == b64(raw)
    assert result["dtype"] == dtype
    assert result["shape"] == [3, 5]
    assert (result["type"], result["output_height"], result["input_height"]) == ("Dense", 3, 5)
    assert ("scale" in result) == ("float" not in dtype)
    assert ("zero_point" in result) == dtype.startswith("uint")
    assert result.get("native", False) == (dtype != "float32")


def test_the_text_of_ours(tmp_path):
    tensors = {"a.weight": encode(torch.tensor([[0.0, 2.0, 3.0]]), "uint4", scale=0.2, zero_point=1)}
    tensors |= {"ä": torch.zeros(0, dtype=torch.float64)}
    write_poly_json(tmp_path / "net.json", PolyNetwork.from_tensors(tensors))
    assert (
        (tmp_path / "net.json").read_text()
        == """{
  "codec": "bitplan-1",
  "id": "bitplan",
  "depth": 1,
  "rows": 1,
  "cols": 1,
  "layers_per_cell": 2,
  "layers": [
    {
      "name": "a.weight",
      "z": 0,
      "y": 0,
      "x": 0,
      "l": 0,
      "type": "Dense",
      "activation": "Linear",
      "dtype": "uint4",
      "shape": [
        1,
        3
      ],
      "input_height": 3,
      "output_height": 1,
      "native": true,
      "scale": 0.20000000298023224,
      "zero_point": 1,
      "weights": "G/A=",
      "crc32": "771553dd"
    },
    {
      "name": "\\u00e4",
      "z": 0,
      "y": 0,
      "x": 0,
      "l": 1,
      "type": "Dense",
      "activation": "Linear",
      "dtype": "float64",
      "shape": [
        0
      ],
      "output_height": 1,
      "native": true,
      "crc32": "0a6d355c"
    }
  ]
}
"""
    )


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32", "uint64"])
@pytest.mark.parametrize("scale", [1 / 3, 1e-300, math.pi * 1e200, 2.0**-126])
def test_wide_scales_are_doubles(dtype, scale, tmp_path):
    fmt = get_format(dtype)
    zero = torch.tensor(2**31 + 1, dtype=fmt.storage) if dtype.startswith("u") else None
    encoded = Encoded(fmt, (1,), torch.ones(1, dtype=fmt.storage), torch.tensor(scale, dtype=torch.float64), None, zero)
    write_poly_json(tmp_path / "net.json", PolyNetwork.from_tensors({"w": encoded}))
    assert f'"scale": {scale!r}' in (tmp_path / "net.json").read_text()
    assert same(read_poly_json(tmp_path / "net.json").tensors["w"], encoded)


def test_largest_zero_point(tmp_path):
    fmt = get_format("uint64")
    top = torch.tensor(2**64 - 1, dtype=torch.uint64)
    encoded = Encoded(fmt, (2,), top.repeat(2), torch.zeros((), dtype=torch.float64), None, top)
    write_poly_json(tmp_path / "net.json", PolyNetwork.from_tensors({"w": encoded}))
    assert same(read_poly_json(tmp_path / "net.json").tensors["w"], encoded)


def test_plain_tensors_are_cast_dtypes(tmp_path):
    dtypes = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    tensors = {name: torch.nn.Parameter(numbers((4, 3)).to(dtype).T) for name, dtype in dtypes.items()}
    tensors["float32"].data[0, 0] = math.nan
    write_poly_json(tmp_path / "net.json", PolyNetwork.from_tensors(tensors))
    result = read_poly_json(tmp_path / "net.json")
    assert result.document["id"] == "bitplan"
    for name, tensor in tensors.items():
        assert result.tensors[name].fmt.name == name
        assert bits_of(result.tensors[name].data) == bits_of(tensor.detach())


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=("Cs",)), max_size=12),
        st.tuples(st.sampled_from(DTYPE_NAMES), st.lists(st.integers(0, 4), max_size=4), st.integers(0, 99)),
        max_size=4,
    )
)
@settings(max_examples=30, deadline=None)
def test_any_network_of_ours(tmp_path_factory, recipe):
    tensors = {name: encode(numbers(tuple(shape), seed), fmt) for name, (fmt, shape, seed) in recipe.items()}
    folder = tmp_path_factory.mktemp("any")
    write_poly_json(folder / "one", PolyNetwork.from_tensors(tensors))
    result = read_poly_json(folder / "one")
    write_poly_json(folder / "two", result)
    assert (folder / "one").read_bytes() == (folder / "two").read_bytes()
    assert list(result.tensors) == list(tensors)
    assert all(same(result.tensors[name], encoded) for name, encoded in tensors.items())


@pytest.mark.parametrize(
    ("shape", "rows", "cols"),
    [((3, 5), 3, 5), ((7,), 1, 7), ((), 1, 1), ((2, 3, 4), 2, 12), ((0, 5), None, 5), ((5, 0), 5, None)],
)
def test_dense_sizes(shape, rows, cols):
    (result,) = PolyNetwork.from_tensors({"w": torch.zeros(shape)}).document["layers"]
    assert (result.get("output_height"), result.get("input_height")) == (rows, cols)


def test_layers_and_their_places():
    built = PolyNetwork.from_tensors({"embed": numbers((4, 2)), "conv": numbers((2, 3, 3)), "out": numbers((2, 4))})
    assert [(result["type"], result["l"]) for result in built.document["layers"]] == [("Dense", at) for at in range(3)]
    assert built.document["layers_per_cell"] == 3


@pytest.mark.parametrize("fmt", ["q4_0_poly", "mxfp4", "int8_row", "ternary_absmean"])
def test_block_formats_cannot_be_held(fmt):
    with pytest.raises(FormatError, match=rf"^block.w: network JSON cannot hold {fmt}, .* float64, .* binary; decode"):
        PolyNetwork.from_tensors({"block.w": encode(numbers((2, 32)), fmt)})


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bool])
def test_plain_tensors_without_a_scale_cannot_be_held(dtype):
    with pytest.raises(FormatError, match=r"^w: a plain tensor must be one of float64, .* bfloat16, got torch."):
        PolyNetwork.from_tensors({"w": torch.zeros(2).to(dtype)})


@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0, 0.0])
def test_scales_that_cannot_be_held(scale):
    broken = Encoded(get_format("int8"), (1,), torch.ones(1, dtype=torch.int8), torch.tensor(scale))
    with pytest.raises(FileFormatError, match=r"^network 'bitplan': .*layers\[0\].*scale"):
        PolyNetwork.from_tensors({"w": broken})


def test_weights_are_seen_and_not_assigned():
    built = PolyNetwork.from_tensors({"w": numbers((2,))})
    with pytest.raises(TypeError):
        built.tensors["w"] = torch.zeros(2)


# --- our files, nested and edited ------------------------------------------------------------


def ours(*layers: Json, **keys: Any) -> Json:
    return network(*layers, codec="bitplan-1", **keys)


def named(name: str = "w", **keys: Any) -> Json:
    """A layer of ours with the int8 weights 1 and -1."""
    return layer(name=name, shape=[2], native=True, scale=0.5, weights="Af8=") | keys


def test_nested_layers_of_ours(tmp_path):
    inner = layer(type="Sequential", sequential_layers=[named("b"), named("c", meta_observed_layer=named("d"))])
    path = save(tmp_path / "net.json", ours(named("a", parallel_branches=[inner], d_model=3, temperature=0.5)))
    result = read_poly_json(path)
    assert list(result.tensors) == ["a", "b", "c", "d"]
    assert all(decode(encoded).tolist() == [0.5, -0.5] for encoded in result.tensors.values())


def nest(depth: int, make: Any) -> Json:
    result = make()
    for _ in range(depth - 1):
        result = layer(type="Parallel", parallel_branches=[result])
    return result


@pytest.mark.parametrize("top", [network, ours])
def test_depth_of_layers(top, tmp_path):
    assert read_poly_json(save(tmp_path / "fits.json", top(nest(32, layer)))).tensors == {}
    with pytest.raises(FileFormatError, match=r"layers\[0\]\.parallel_branches.* more than 32 deep"):
        read_poly_json(save(tmp_path / "deep.json", top(nest(33, layer))))
    with pytest.raises(FileFormatError, match="lies within more than 128 objects and lists"):
        read_poly_json(save(tmp_path / "deeper.json", top(nest(80, layer))))


def test_a_document_edited_in_memory_is_checked_again(tmp_path):
    built = PolyNetwork.from_tensors({"w": numbers((2, 3))})
    write_poly_json(tmp_path / "net.json", built)
    before = (tmp_path / "net.json").read_bytes()
    built.document["layers"][0]["activation"] = "ReLU"
    write_poly_json(tmp_path / "net.json", built)
    assert (tmp_path / "net.json").read_bytes() == before.replace(b'"Linear"', b'"ReLU"')
    built.document["layers"][0]["shape"] = [7]
    with pytest.raises(FileFormatError, match=r"net.json: layers\[0\]: weights .* must be 6 numbers, got 7"):
        write_poly_json(tmp_path / "net.json", built)
    assert (tmp_path / "net.json").read_bytes() == before.replace(b'"Linear"', b'"ReLU"')
    assert [file.name for file in tmp_path.iterdir()] == ["net.json"]


def test_a_file_too_large_to_read_back_is_not_written(tmp_path, monkeypatch):
    (tmp_path / "net.json").write_text("old")
    monkeypatch.setattr(poly_network, "MAX_FILE_BYTES", 1000)
    built = PolyNetwork.from_tensors({"w": numbers((1000,))})
    with pytest.raises(StoreError, match=r"net.json: the network takes \d+ bytes as JSON, .*limit 1000.* safetensors"):
        write_poly_json(tmp_path / "net.json", built)
    assert (tmp_path / "net.json").read_text() == "old"
    (tmp_path / "net.json").write_text(" " * 1001)
    with pytest.raises(FileFormatError, match="too large for a JSON document"):
        read_poly_json(tmp_path / "net.json")


@pytest.mark.parametrize("name", ["missing.json", "folder"])
def test_no_such_file(name, tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileFormatError, match=r"no such file|is a folder, and a regular file"):
        read_poly_json(tmp_path / name)


# --- malformed files -------------------------------------------------------------------------


def without(result: Json, *keys: str) -> Json:
    return {key: value for key, value in result.items() if key not in keys}


def packed(**keys: Any) -> Json:
    return layer(weights="Af8=", native=True, scale=0.5) | keys


MALFORMED = {
    # of both
    "not JSON": ("{", "not valid JSON"),
    "a key twice": ('{"id": "a", "id": "b"}', "key 'id' appears twice"),
    "not an object": ("[]", r"the document must be an object, got \[\]"),
    "not even that": ("1e999", "a number is larger than any float64"),
    "no id": (without(network(), "id"), "id is missing; it must be a string"),
    "no layers": (without(network(), "layers"), "layers is missing; it must be a list"),
    "rows not whole": (network(rows=1.0), r"rows must be an integer from 0 to 2\^63 - 1, got 1.0"),
    "rows a boolean": (network(rows=True), "rows must be an integer .* got true"),
    "depth negative": (network(depth=-1), "depth must be an integer .* got -1"),
    "layers not a list": (network(layers={}), "layers must be a list, got {}"),
    "layer not an object": (network(layers=[[1]]), r"layers\[0\] must be an object, got \[1\]"),
    "no type": (network(without(layer(), "type")), r"layers\[0\]: type is missing; it must be a string"),
    "dtype a number": (network(layer(dtype=3)), r"layers\[0\]: dtype must be a string, got 3"),
    "z too large": (network(layer(z=2**63)), r"layers\[0\]: z must be an integer from 0 to 2\^63 - 1, got 9223372036"),
    "branches not a list": (network(layer(parallel_branches=0)), "parallel_branches must be a list, got 0"),
    "branch not an object": (network(layer(parallel_branches=[0])), r"\.parallel_branches\[0\] must be an object"),
    "observed a list": (network(layer(meta_observed_layer=[])), "meta_observed_layer must be an object, got"),
    "no room": (network(layer(kernel_size="3")), "kernel_size must be an integer"),
    "infinite": (
        json.dumps(network(layer(temperature=1e-9))).replace("1e-09", "1e999"),
        "a number is larger than any float64",
    ),
    "infinite where unknown": (
        json.dumps(network(layer(unknown=[1e-9]))).replace("1e-09", "-1e999"),
        "a number is larger than any float64",
    ),
    "other codec": (network(codec="bitplan-2"), "codec must be 'bitplan-1', or missing in .* got \"bitplan-2\""),
    "codec a number": (network(codec=1), "codec must be 'bitplan-1'"),
    "codec null": (network(codec=None), "codec must be 'bitplan-1', .* got null"),
    # of the original
    "unknown dtype": (
        network(packed(dtype="nf4")),
        r"layers\[0\]: dtype of packed weights must be one of float64, .* binary, got \"nf4\"",
    ),
    "weights not a string": (network(packed(weights=[1])), r"layers\[0\]: weights must be a string, got \[1\]"),
    "weights not base64": (network(packed(weights="A*==")), r"weights must be base64 with padding .* got \"A\*==\""),
    "weights not ASCII": (network(packed(weights="ä===")), "weights must be base64 with padding"),
    "no padding": (network(packed(weights="AQ")), 'weights must be base64 with padding .incorrect padding., got "AQ"'),
    "after the padding": (network(packed(weights="AQ==AQ==")), "weights must be base64 with padding .excess data"),
    "URL alphabet": (network(packed(weights="-_8=")), "weights must be base64 with padding"),
    "native a number": (network(packed(native=1)), "native must be true or false, got 1"),
    "scale a string": (network(packed(scale="1")), 'scale must be a finite number, got "1"'),
    "scale beyond float32": (network(packed(scale=1e39)), r"scale must be a finite float32, got 1e\+39"),
    "scale without end": (network(packed(scale=10**400)), "scale must be a finite number, got 1000"),
    "half a number": (network(packed(dtype="int16", weights="AQID")), "weights must be whole int16 numbers of 2 bytes"),
    "half a master": (network(packed(native=False)), "whole float32 numbers of 4 bytes, got 2 bytes"),
    "dense too short": (
        network(packed(type="Dense", input_height=3, output_height=1)),
        "Dense layer with input_height x output_height = 3 x 1 must be 3 numbers, got 2",
    ),
    "dense too long": (network(packed(type="dense", input_height=1, output_height=1)), "must be 1 numbers, got 2"),
    "dense off by a byte": (
        network(packed(type="Dense", input_height=2, output_height=1, dtype="int4")),
        "must be 2 numbers, got 4",
    ),
    # of ours
    "unknown key": (ours(named(weigths="")), r"layers\[0\]: unknown key 'weigths'; did you mean 'weights'"),
    "unknown key on top": (ours(version=1), "unknown key 'version'"),
    "same name twice": (ours(named(), named()), r"layers\[1\]: name must differ .* got \"w\""),
    "same name within": (ours(named(sequential_layers=[named()])), r"sequential_layers\[0\]: name must differ"),
    "no name": (ours(without(named(), "name")), r"layers\[0\]: name of int8 weights must be a string .* is missing"),
    "name not a string": (ours(named(name=1)), "name must be a string of valid Unicode, got 1"),
    "half a surrogate pair": (ours(named(name="\ud800")), "a string with half of a surrogate pair"),
    "no shape": (ours(without(named(), "shape")), "shape of int8 weights must be a list .* is missing"),
    "shape not a list": (ours(named(shape=2)), "shape must be a list of at most 64 sizes"),
    "negative size": (ours(named(shape=[-2])), r"shape must be a list .* got \[-2\]"),
    "two negative sizes": (ours(named(shape=[-2, -1])), r"shape must be a list .* got \[-2, -1\]"),
    "fractional size": (ours(named(shape=[2.0])), r"shape must be a list .* got \[2.0\]"),
    "boolean size": (ours(named(shape=[2, True])), r"shape must be a list"),
    "rank 65": (ours(named(shape=[1] * 65)), "shape must be a list of at most 64"),
    "absurd shape": (ours(named(shape=[2**40, 2])), "shape must be a list .* at most 2.40 numbers in all"),
    "absurd shape of nothing": (ours(named(shape=[0, 2**40, 2**40])), "shape must be a list"),
    "large shape": (
        ours(named(shape=[2**20, 2**20])),
        "weights must be 1099511627776 bytes for int8 of shape .* got 2",
    ),
    "payload too short": (ours(named(shape=[3])), r"weights must be 3 bytes for int8 of shape \[3\], got 2"),
    "payload too long": (ours(named(shape=[])), r"weights must be 1 bytes for int8 of shape \[\], got 2"),
    "no payload": (ours(without(named(), "weights")), "weights must be 2 bytes for int8 of shape .* got 0"),
    "payload of nothing": (ours(named(shape=[0])), "weights must be 0 bytes for int8 of shape"),
    "bits too many": (ours(named(dtype="binary", shape=[8])), "weights must be 1 bytes for binary"),
    "weights not base64, ours": (ours(named(weights="Af8")), "weights must be base64 with padding"),
    "unknown dtype, ours": (ours(named(dtype="nf4")), 'dtype must be one of float64, .* got "nf4"'),
    "our own name of fp8": (ours(named(dtype="fp8_e4m3")), "dtype must be one of .* fp8e4m3"),
    "dtype in other case": (ours(named(dtype="INT8")), "dtype must be one of"),
    "not native": (ours(named(native=False)), "native must be true for int8 weights, got false"),
    "native missing": (
        ours(without(named(), "native")),
        "native of int8 weights must be true or false, and is missing",
    ),
    "native master": (ours(without(named(dtype="float32"), "scale")), "native of float32 weights does not belong"),
    "scale missing": (ours(without(named(), "scale")), "scale of int8 weights must be a finite number, and is missing"),
    "scale of a float": (ours(named(dtype="bfloat16", shape=[1])), "scale of bfloat16 weights does not belong there"),
    "scale zero": (ours(named(scale=0)), r"layers\[0\]: scale must be above zero unless every weight is zero, got 0"),
    "scale that rounds to zero": (ours(named(scale=1e-60)), "scale must be above zero unless .* got 1e-60"),
    "scale negative": (ours(named(scale=-0.5)), "scale must be above zero unless every weight is zero, got -0.5"),
    "scale negative on zeros": (ours(named(scale=-0.5, weights="AAA=")), "scale must be above zero"),
    "scale beyond float32, ours": (ours(named(scale=1e39)), "scale must be a finite float32"),
    "zero scale off the zero point": (
        ours(named(dtype="uint8", scale=0.0, zero_point=1, weights="AQI=")),
        "scale must be above zero unless",
    ),
    "zero point missing": (ours(named(dtype="uint8")), "zero_point of uint8 weights must be an integer .* is missing"),
    "zero point of int8": (ours(named(zero_point=0)), "zero_point of int8 weights does not belong there"),
    "zero point too large": (
        ours(named(dtype="uint8", zero_point=256)),
        r"zero_point must be one of the uint8 codes 0..255, got 256",
    ),
    "zero point beyond all": (
        ours(named(dtype="uint64", zero_point=2**64)),
        r"zero_point must be an integer from 0 to",
    ),
    "zero point negative": (ours(named(dtype="uint8", zero_point=-1)), "zero_point must be an integer .* got -1"),
    "zero point a float": (ours(named(dtype="uint8", zero_point=1.0)), "zero_point must be an integer .* got 1.0"),
    "fourth ternary code": (
        ours(named(dtype="ternary", weights="gA==")),
        r"layers\[0\]: weights must be the ternary codes 00, 01 and 11, got 10",
    ),
    "dense of another size": (
        ours(named(type="Dense", input_height=2, output_height=2)),
        "input_height x output_height = 2 x 2 must be 4 numbers, got 2",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_file_is_refused(case, tmp_path):
    document, message = MALFORMED[case]
    path = save(tmp_path / "bad.json", document)
    with pytest.raises(FileFormatError, match=message) as caught:
        read_poly_json(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_the_malformed_table_starts_from_good_files(tmp_path):
    good = [network(), network(layer()), network(packed()), ours(), ours(layer()), ours(named())]
    good += [ours(named(scale=0, weights="AAA=")), ours(named(dtype="uint8", scale=0, zero_point=1, weights="AQE="))]
    for index, document in enumerate(good):
        read_poly_json(save(tmp_path / f"{index}.json", document))
