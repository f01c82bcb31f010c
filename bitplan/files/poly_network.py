"""Poly's network JSON: reads files of the original program, and writes files that are unambiguous.

A network is {id, depth, rows, cols, layers_per_cell, layers}. A layer has its cell (z, y, x, l), type, activation,
dtype, sizes, and its weights in base64: packed in `dtype` where `native` is true, else a float32 master. Layers nest
(parallel_branches, sequential_layers, meta_observed_layer). Numbers of several bytes are little-endian; several numbers
in a byte begin at the highest bits, as our 21 dtypes pack them.

The original's own files leave much unsaid, so there are two readings:

| | without `codec` (the original) | `"codec": "bitplan-1"` (ours) |
|---|---|---|
| float16, fp8*, fp4 | by the version that wrote them, see `versions` | the floats of that name times scale |
| unsigned | integers times scale | (integer - zero_point) times scale |
| scale 0 or missing | 1 | a tensor of zeros / an error |
| count | what the bytes give; a Dense layer's sizes trim the padding | `shape` |
| a layer is called | its path, `layers[3].parallel_branches[0]` | `name` |
| damage | is not seen | `crc32` of format, shape, numbers and scale; files of earlier versions have none |
| comes out as | float32, flat | Encoded, exact |
| keys we do not know | kept untouched | an error |

Source: the files and sources of the project behind the format. Its packing of float16, fp8 and fp4 changed, unmarked in
files:

| dtype | older versions | today's |
|---|---|---|
| float16 | the upper half of a float32 | an IEEE half |
| fp8e4m3, fp8e5m2 | an int8 times scale | a small float times scale: exponent 0 is written for zero alone |
| fp4 | the lower half of an int8: what it stood for is lost | a code of twelve numbers times scale; not 6, 7, 14, 15 |

The numbers tell them apart. Today's version writes no FP8 code with exponent 0 except zero, and scales so that the
largest number lies well below the largest code: an older file has such codes among any hundred numbers. The two
readings of a 16-bit code differ eightfold in their exponents: read the wrong way, numbers of a layer lie within a
factor of two of each other, or hundreds of octaves apart. All layers of a file vote, since one program wrote them; if
no layer is sure, or two disagree, the file is refused.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
from torch import Tensor

from bitplan.base.documents import FLAG, LIST, MAX_RANK, NUMBER, OBJECT, SHAPE, SIZE, STRING, TEXT, Kind, Reader, show
from bitplan.base.errors import FileFormatError, FormatError, StoreError
from bitplan.base.records import atomic_file, check_input, read_json
from bitplan.files.tensor_bytes import CERTIFICATE, SEAL
from bitplan.formats import Encoded, get_format
from bitplan.formats.codec import decode, encode
from bitplan.formats.format import Format
from bitplan.formats.registry import DTYPE_NAMES

# ---- which version of the original wrote a network -------------------------------------------------------------------


Version = Literal["older", "today"]
AMBIGUOUS = ("float16", "fp8e4m3", "fp8e5m2", "fp4")
# Exponent bits, mantissa bits, and the largest code up to twice the number that the scale was made for.
_SMALL_FLOATS = {"fp8e4m3": (4, 3, 0x77), "fp8e5m2": (5, 2, 0x5B)}
_FP4 = (0.0, 0.75, 1.0, 1.5, 2.0, 3.0, float("inf"), float("nan"))
_FP4_UNUSED = (6, 7, 14, 15)
# Among this many numbers an older file has codes that today's version never writes: 0.88 to the power of 96 is 6e-6.
ENOUGH = 96
_STEPS_OF_SCALE = 127  # the scale is the largest number over this
_HALF_ROUNDING, _UPPER_ROUNDING = 2.0**-9, 2.0**-6


def vote(dtype: str, payload: bytes, scale: float) -> Version | None:
    """The version that wrote a layer, by its numbers; None if they do not show it."""
    raw = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    if dtype == "float16":
        return _vote_of_halves(raw[: len(raw) // 2 * 2].view(torch.int16), scale)
    if dtype == "fp4":
        codes = torch.cat((raw >> 4, raw & 15))
        if bool(torch.isin(codes, torch.tensor(_FP4_UNUSED)).any()):
            return "older"
        return "today" if int((codes & 7 != 0).sum()) >= ENOUGH else None
    _, mantissa, largest = _SMALL_FLOATS[dtype]
    sizes = (raw & 127)[raw & 127 != 0]
    if bool((sizes < 2**mantissa).any()):
        return "older"
    beyond = float((sizes > largest).float().mean()) if len(sizes) else 0.0
    if beyond > 0.02:
        return "older"
    return "today" if len(sizes) >= (ENOUGH if beyond == 0 else 4 * ENOUGH) else None


def _vote_of_halves(bits: Tensor, scale: float) -> Version | None:
    codes = bits[bits & 0x7FFF != 0]
    if not len(codes):
        return None
    half, upper = codes.view(torch.float16).float().abs(), codes.view(torch.bfloat16).float().abs()
    if not bool(half.isfinite().all()):
        return "older" if bool(upper.isfinite().all()) else None
    step = _STEPS_OF_SCALE * abs(scale)
    if scale not in (0, 1):
        as_half = abs(float(half.max()) / step - 1) < _HALF_ROUNDING
        as_upper = abs(float(upper.max()) / step - 1) < _UPPER_ROUNDING
        if as_half != as_upper:
            return "today" if as_half else "older"
    if len(codes) < ENOUGH:
        return None
    spread = float(upper.median()) / float(upper.max())
    if spread < 2.0**-8:
        return "today"
    negative = float((codes < 0).float().mean())
    return "older" if spread > 2.0**-6 and 0.2 < negative < 0.8 else None


def numbers_of(dtype: str, payload: bytes, scale: float, version: Version) -> Tensor:
    """The weights as float32, padding of the last byte included; fp4 of older versions has none."""
    raw = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    if dtype == "float16":
        return raw.view(torch.float16 if version == "today" else torch.bfloat16).float()
    if version == "older":
        assert dtype != "fp4"
        return raw.view(torch.int8).float() * scale
    if dtype == "fp4":
        table = torch.tensor([*_FP4, *(-value for value in _FP4)])
        return table[torch.stack((raw >> 4, raw & 15), dim=-1).flatten().long()] * scale
    return _small_floats(dtype)[raw.long()] * scale


def _small_floats(dtype: str) -> Tensor:
    """The number of each code; unused codes with exponent 0 are decoded as the original reads them."""
    exponent_bits, mantissa_bits, _ = _SMALL_FLOATS[dtype]
    bias, steps = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    values = []
    for code in range(128):
        exponent, mantissa = divmod(code, steps)
        value = 2.0 ** (exponent - bias) * (1 + mantissa / steps)
        if exponent == 0:
            value = 0.0 if mantissa == 0 else value / 8 if dtype == "fp8e4m3" else value
        if dtype == "fp8e5m2" and exponent == 31:
            value = float("nan") if mantissa else float("inf")
        values.append(value)
    return torch.tensor([*values, *(-value for value in values)])


# ---- the network -----------------------------------------------------------------------------------------------------


CODEC = "bitplan-1"
MAX_FILE_BYTES = 2**31
MAX_LAYER_DEPTH = 32
MAX_JSON_DEPTH = 128
MAX_NUMBERS = 2**40  # of a tensor, with empty axes counted as 1; far more than a file holds

# The file's dtype -> the format of the same numbers: only fp8 is spelled differently.
DTYPES = {name.replace("fp8_", "fp8"): name for name in DTYPE_NAMES}
_TAGS = {name: tag for tag, name in DTYPES.items()}
_PLAIN_TENSORS = {get_format(name).storage: name for name in ("float64", "float32", "float16", "bfloat16")}

Weights = Encoded | Tensor


@dataclass(frozen=True)
class PolyNetwork:
    """A network file in memory: the document, which `write_poly_json` writes, and the weights read from it.

    `tensors` is a view of the document that cannot be assigned to: to change weights, build a new network. `damaged`
    are those whose numbers are not what the document's checksums say; `has_checksums` says that all of them have one.
    """

    document: dict[str, Any]
    tensors: Mapping[str, Weights]
    damaged: frozenset[str] = frozenset()
    has_checksums: bool = False

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Weights], certificate: str | None = None) -> PolyNetwork:
        """A network of one cell with a Dense layer per tensor, in the order given, and what it was made of.

        Dense treats its tensor as [first axis, all others], a vector as one row. Plain tensors must be of a float type
        that files know.
        """
        layers = [_layer_of(name, _exportable(name, item), index) for index, (name, item) in enumerate(tensors.items())]
        cell = {"depth": 1, "rows": 1, "cols": 1, "layers_per_cell": len(layers)}
        sealed = {} if certificate is None else {CERTIFICATE: certificate}
        document = {"codec": CODEC, **sealed, "id": "bitplan", **cell, "layers": layers}
        return _NetworkReader("network 'bitplan'", document).network()


def read_poly_json(path: str | Path) -> PolyNetwork:
    """Read a network file, the original's or ours; every weight is decoded and checked."""
    check_input(path)
    document = read_json(path, max_bytes=MAX_FILE_BYTES)
    if isinstance(document, dict) and not document.keys() & {"id", "layers"}:
        raise FileFormatError(
            f"{path}: is JSON without weights: no network of poly's, which has `id` and `layers`; a model is given "
            "by its folder, its index (*.safetensors.index.json) or a file of weights"
        )
    return _NetworkReader(str(path), document).network()


def write_poly_json(path: str | Path, network: PolyNetwork) -> None:
    """Write a network's document atomically; a document that could not be read back is refused.

    The text is ASCII, indented by two, keys in the document's order: reading and writing a file of ours gives the same
    bytes. A fresh certificate gets the file's hash.
    """
    _NetworkReader(str(path), network.document).tensors()
    seal, digest, seal_at = SEAL.encode(), hashlib.sha256(), None
    with atomic_file(path) as file:
        for piece in (*json.JSONEncoder(indent=2, allow_nan=False).iterencode(network.document), "\n"):
            raw = piece.encode("ascii")
            if seal_at is None and seal in raw:
                seal_at = file.tell() + raw.index(seal)
            digest.update(raw)
            file.write(raw)
        if file.tell() > MAX_FILE_BYTES:
            raise StoreError(
                f"{path}: the network takes {file.tell()} bytes as JSON, which is too large to be read back "
                f"(limit {MAX_FILE_BYTES}); use safetensors for weights of this size"
            )
        if seal_at is not None:
            file.seek(seal_at)
            file.write(digest.hexdigest().encode())


# ---- writing ---------------------------------------------------------------------------------------------------------


def _exportable(name: str, weights: Weights) -> Encoded:
    if isinstance(weights, Tensor):
        if weights.dtype not in _PLAIN_TENSORS:
            raise FormatError(
                f"{name}: a plain tensor must be one of {', '.join(_PLAIN_TENSORS.values())}, got {weights.dtype}; "
                "encode it first, so that its scale is known"
            )
        return encode(weights, _PLAIN_TENSORS[weights.dtype], name=name)
    if weights.fmt.name not in _TAGS:
        raise FormatError(
            f"{name}: network JSON cannot hold {weights.fmt.name}, only one scale per tensor in one of "
            f"{', '.join(_TAGS)}; decode it and encode it in one of these, or use safetensors"
        )
    return weights


def _layer_of(name: str, encoded: Encoded, index: int) -> dict[str, Any]:
    layer: dict[str, Any] = {"name": name, "z": 0, "y": 0, "x": 0, "l": index}
    layer |= {"type": "Dense", "activation": "Linear", "dtype": _TAGS[encoded.fmt.name], "shape": [*encoded.shape]}
    rows = encoded.shape[0] if len(encoded.shape) > 1 else 1
    cols = math.prod(encoded.shape[1:] if len(encoded.shape) > 1 else encoded.shape)
    layer |= {key: size for key, size in (("input_height", cols), ("output_height", rows)) if size}
    if encoded.fmt.name != "float32":  # a float32 payload is the master itself
        layer["native"] = True
    if encoded.scales is not None:
        layer["scale"] = float(encoded.scales)
    if encoded.zero_point is not None:
        layer["zero_point"] = encoded.zero_point.item()  # int() overflows on uint64
    payload = encoded.to_bytes()[: encoded.data.nbytes]
    if payload:
        layer["weights"] = base64.b64encode(payload).decode("ascii")
    layer["crc32"] = _checksum(encoded)
    return layer


def _checksum(encoded: Encoded) -> str:
    """The CRC-32 of a layer's format, shape, numbers and scale."""
    return f"{zlib.crc32(encoded.to_bytes(), zlib.crc32(f'{encoded.fmt.name} {encoded.shape}'.encode())):08x}"


# ---- reading ---------------------------------------------------------------------------------------------------------


_SHAPE = Kind(
    f"a list of at most {MAX_RANK} sizes from 0, at most 2^40 numbers in all",
    lambda value: SHAPE.holds(value) and math.prod(max(size, 1) for size in value) <= MAX_NUMBERS,
)
_CODE = Kind("an integer from 0 to 2^64 - 1", lambda value: type(value) is int and 0 <= value < 2**64)

_NETWORK_KEYS = {"id": STRING, **dict.fromkeys(("depth", "rows", "cols", "layers_per_cell"), SIZE), "layers": LIST}
_OUR_KEYS = {"codec": STRING, CERTIFICATE: STRING}
_REQUIRED_KEYS = {**dict.fromkeys("zyxl", SIZE), **dict.fromkeys(("type", "activation", "dtype"), STRING)}
_PLANE_SIZES = ("input_height", "input_width", "input_depth", "output_height", "output_width", "output_depth")
_CONV_SIZES = ("input_channels", "filters", "kernel_size", "stride", "padding", "output_padding")
_ATTENTION_SIZES = ("num_heads", "num_kv_heads", "head_dim", "query_dim", "d_model", "seq_length")
_OTHER_SIZES = ("vocab_size", "embedding_dim", "num_clusters", "softmax_rows", "softmax_cols", "tile_size")
_LAYER_KEYS = {
    **_REQUIRED_KEYS,
    **dict.fromkeys(_PLANE_SIZES + _CONV_SIZES + _ATTENTION_SIZES + _OTHER_SIZES, SIZE),
    **dict.fromkeys(("rope_freq_base", "kmeans_temperature", "temperature", "entmax_alpha", "scale"), NUMBER),
    **dict.fromkeys(("output_mode", "softmax_type", "combine_mode", "weights"), STRING),
    **dict.fromkeys(("gumbel_noise", "use_tiling", "is_disabled", "native"), FLAG),
    **dict.fromkeys(("meta_rules", "parallel_branches", "sequential_layers"), LIST),
    "meta_observed_layer": OBJECT,
}
_SUM = Kind("8 hexadecimal digits", lambda value: type(value) is str and re.fullmatch("[0-9a-f]{8}", value) is not None)
_OUR_LAYER_KEYS = {**_LAYER_KEYS, "name": TEXT, "shape": _SHAPE, "zero_point": _CODE, "crc32": _SUM}
_OF_WEIGHTS = ("name", "shape", "weights", "native", "scale", "zero_point", "crc32")


class _NetworkReader:
    """One document being checked: `where` names the file in every error."""

    def __init__(self, where: str, document: Any) -> None:
        _check_values(where, document)
        self.ours = type(document) is dict and "codec" in document
        self.reader = Reader(where, FileFormatError, strict=self.ours)
        if self.ours and document["codec"] != CODEC:
            self.reader.fail("codec", f"{CODEC!r}, or missing in a file of the original's", document["codec"])
        self.document = document
        self.checksums: dict[str, str] = {}

    def network(self) -> PolyNetwork:
        tensors = self.tensors()
        checked = self.ours and len(self.checksums) == len(tensors)
        wrong = {name for name, crc in self.checksums.items() if _checksum(cast(Encoded, tensors[name])) != crc}
        return PolyNetwork(self.document, tensors, frozenset(wrong), checked)

    def tensors(self) -> Mapping[str, Weights]:
        """Name -> weights of every layer that has some, in file order."""
        self.reader.keys("", self.document, _NETWORK_KEYS | (_OUR_KEYS if self.ours else {}), _NETWORK_KEYS)
        tensors: dict[str, Weights] = {}
        version = None if self.ours else self._version()
        for path, layer in self._layers("layers", self.document["layers"], 1):
            if not self.ours:
                decoded = self._read_original(path, layer, version)
                if decoded is not None:
                    tensors[path] = decoded
            elif any(key in layer for key in _OF_WEIGHTS):
                exact = self._read_exact(path, layer)
                if layer["name"] in tensors:
                    self.reader.stop(
                        f"{path}: name must differ from those of the layers before, got {show(layer['name'])}"
                    )
                tensors[layer["name"]] = exact
                if "crc32" in layer:
                    self.checksums[layer["name"]] = layer["crc32"]
        return MappingProxyType(tensors)

    # -- structure --

    def _layers(self, path: str, layers: list[Any], depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
        for index, layer in enumerate(layers):
            yield from self._layer(f"{path}[{index}]", layer, depth)

    def _layer(self, path: str, value: Any, depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """A layer and its nested layers, each with its path and its keys checked."""
        if depth > MAX_LAYER_DEPTH:
            self.reader.stop(f"{path}: layers lie within layers more than {MAX_LAYER_DEPTH} deep")
        layer = self.reader.keys(path, value, _OUR_LAYER_KEYS if self.ours else _LAYER_KEYS, _REQUIRED_KEYS)
        yield path, layer
        for key in ("parallel_branches", "sequential_layers"):
            yield from self._layers(f"{path}.{key}", layer.get(key, []), depth + 1)
        if "meta_observed_layer" in layer:
            yield from self._layer(f"{path}.meta_observed_layer", layer["meta_observed_layer"], depth + 1)

    # -- weights --

    def _payload(self, path: str, layer: dict[str, Any]) -> bytes:
        text = layer.get("weights", "")
        try:
            return binascii.a2b_base64(text, strict_mode=True) if text else b""
        except ValueError as error:
            reason = str(error).lower()
            self.reader.fail(f"{path}: weights", f"base64 with padding ({reason})", text)

    def _scale(self, path: str, layer: dict[str, Any], dtype: torch.dtype) -> Tensor:
        """A layer's scale in the type in which the format stores it; in JSON it is a double."""
        scale = torch.tensor(float(layer["scale"]), dtype=torch.float64).to(dtype)
        if not bool(torch.isfinite(scale)):
            self.reader.fail(f"{path}: scale", f"a finite {str(dtype).removeprefix('torch.')}", layer["scale"])
        return scale

    def _read_exact(self, path: str, layer: dict[str, Any]) -> Encoded:
        """The weights of a layer in our files, which has exactly the keys that its dtype needs."""
        if layer["dtype"] not in DTYPES:
            self.reader.fail(f"{path}: dtype", f"one of {', '.join(DTYPES)}", layer["dtype"])
        fmt = get_format(DTYPES[layer["dtype"]])
        needs = {"name": True, "shape": True, "scale": fmt.scales is not None, "zero_point": fmt.zero_point}
        for key, needed in (needs | {"native": fmt.name != "float32"}).items():
            if (key in layer) != needed:
                fault = f"must be {_OUR_LAYER_KEYS[key].text}, and is missing" if needed else "does not belong there"
                self.reader.stop(f"{path}: {key} of {layer['dtype']} weights {fault}")
        if layer.get("native") is False:
            self.reader.fail(f"{path}: native", f"true for {layer['dtype']} weights", False)
        shape, payload = tuple(layer["shape"]), self._payload(path, layer)
        self._true_count(path, layer, math.prod(shape))
        dtype, data_shape = fmt.part_shapes(shape)["data"]
        nbytes = math.prod(data_shape) * dtype.itemsize
        if len(payload) != nbytes:
            expected = f"must be {nbytes} bytes for {layer['dtype']} of shape {show(layer['shape'])}"
            self.reader.stop(f"{path}: weights {expected}, got {len(payload)}")
        scale = None if fmt.scales is None else self._scale(path, layer, fmt.scales.dtype)
        if fmt.zero_point and fmt.element is not None and layer["zero_point"] >> fmt.element.bits:
            expected = f"one of the {layer['dtype']} codes 0..{2**fmt.element.bits - 1}"
            self.reader.fail(f"{path}: zero_point", expected, layer["zero_point"])
        encoded = _encoded(fmt, shape, payload, scale, layer.get("zero_point"))
        self._check_codes(path, layer, encoded)
        return encoded

    def _check_codes(self, path: str, layer: dict[str, Any], encoded: Encoded) -> None:
        """Refuse a scale that is not above zero, unless all weights are zero, and ternary's fourth code."""
        if encoded.scales is not None and not float(encoded.scales) > 0:
            codes = _integers(encoded.codes())
            zero = 0 if encoded.zero_point is None else _integers(encoded.zero_point)
            if float(encoded.scales) < 0 or bool((codes != zero).any()):
                self.reader.fail(f"{path}: scale", "above zero unless every weight is zero", layer["scale"])
        if encoded.fmt.name == "ternary" and bool((encoded.codes() == -2).any()):
            self.reader.stop(f"{path}: weights must be the ternary codes 00, 01 and 11, got 10")

    def _version(self) -> Version | None:
        """Which version of the original wrote the file: that on which all layers agree whose numbers show one."""
        votes: set[Version | None] = set()
        for path, layer in self._layers("layers", self.document["layers"], 1):
            dtype = layer["dtype"].lower()
            if layer.get("native", False) and dtype in AMBIGUOUS and (payload := self._payload(path, layer)):
                votes.add(vote(dtype, payload, float(layer.get("scale", 0))))
        votes.discard(None)
        return votes.pop() if len(votes) == 1 else None

    def _read_original(self, path: str, layer: dict[str, Any], version: Version | None) -> Tensor | None:
        """The weights of a layer in the original's files, as float32 in one row; None if it has none."""
        payload, dtype = self._payload(path, layer), layer["dtype"].lower()
        if not payload:
            return None
        if not layer.get("native", False):
            dtype = "float32"
        if dtype not in DTYPES:
            self.reader.fail(f"{path}: dtype of packed weights", f"one of {', '.join(DTYPES)}", layer["dtype"])
        fmt = get_format(DTYPES[dtype])
        whole, left = divmod(len(payload), fmt.storage.itemsize)
        if left:
            expected = f"must be whole {dtype} numbers of {fmt.storage.itemsize} bytes"
            self.reader.stop(f"{path}: weights {expected}, got {len(payload)} bytes")
        per_byte = 1 if fmt.packing is None else fmt.packing.per_byte
        count = self._true_count(path, layer, whole * per_byte, padding=per_byte - 1)
        # A float32 number, zero for a scale that was never computed.
        scale = self._scale(path, {"scale": layer.get("scale", 0) or 1}, torch.float32)
        if dtype in AMBIGUOUS:
            if not any(payload):
                return torch.zeros(count)
            self._check_version(path, dtype, version)
            assert version is not None
            return numbers_of(dtype, payload, float(scale), version)[:count]
        factor = None if fmt.scales is None else scale.to(fmt.scales.dtype)
        return decode(_encoded(fmt, (count,), payload, factor, 0 if fmt.zero_point else None))

    def _check_version(self, path: str, dtype: str, version: Version | None) -> None:
        if version is None:
            self.reader.stop(
                f"{path}: packed {dtype} weights mean different numbers by the version of the program that wrote them, "
                "and the numbers of this file do not show which it was; save the network again as float32 or bfloat16"
            )
        if version == "older" and dtype == "fp4":
            self.reader.stop(
                f"{path}: packed fp4 weights of an older version of the program, which cut numbers off; "
                "save the network again as float32 or bfloat16"
            )

    def _true_count(self, path: str, layer: dict[str, Any], count: int, padding: int = 0) -> int:
        """How many of `count` weights are real: a Dense layer that states its sizes has their product."""
        sizes = [layer.get(key, 0) for key in ("input_height", "output_height")]
        if layer["type"].lower() != "dense" or not all(sizes):
            return count
        product = int(math.prod(sizes))
        if not product <= count <= product + padding:
            stated = " x ".join(map(str, sizes))
            self.reader.stop(
                f"{path}: weights of a Dense layer with input_height x output_height = {stated} must be "
                f"{product} numbers, got {count}"
            )
        return product


def _encoded(
    fmt: Format, shape: tuple[int, ...], payload: bytes, scale: Tensor | None, zero_point: int | None
) -> Encoded:
    flat = torch.frombuffer(bytearray(payload), dtype=fmt.storage) if payload else torch.empty(0, dtype=fmt.storage)
    parts = fmt.part_shapes(shape)
    zero = None if zero_point is None else torch.tensor(zero_point, dtype=parts["zero_point"][0])
    return Encoded(fmt, shape, flat.reshape(parts["data"][1]), scale, zero_point=zero)


def _check_values(where: str, value: Any, path: str = "", depth: int = 0) -> None:
    """Refuse values on which JSON readers disagree: numbers that are not finite, and very deep nesting."""
    if depth > MAX_JSON_DEPTH:
        raise FileFormatError(f"{where}: {show(path)} lies within more than {MAX_JSON_DEPTH} objects and lists")
    if isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(child, dict | list | float):  # others cannot be wrong; paths for them would be slow
                step = f".{key[:40]}" if isinstance(key, str) else f"[{key}]"
                _check_values(where, child, path + step if path else step.lstrip("."), depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise FileFormatError(f"{where}: {show(path)} must be a finite number, got {value}")


def _integers(codes: Tensor) -> Tensor:
    """Codes as signed integers of the same bits, because torch cannot compare most other types."""
    return codes.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[codes.itemsize])
