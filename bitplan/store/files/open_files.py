"""One view of every file that holds weights: names, formats, shapes, and one tensor at a time.

| kind | what | a tensor comes as |
|---|---|---|
| safetensors | one file, an index of shards, or their folder | Encoded where bitplan packed it, else a plain tensor |
| gguf | llama.cpp's container | Encoded for Q4_0, Q8_0, MXFP4, F16, BF16; plain for F32 and integers; else decoded |
| poly json | poly's network file | Encoded, or float32 from files of the original |

A bitplan safetensors file keeps a packed tensor's codes under its own name and its other parts beside it
(`NAME.scales`, `NAME.base`, `NAME.zero_point`); the metadata key `bitplan` holds
`{"version": 1, "tensors": {NAME: {"format": F, "shape": [...]}}, "tied": {NAME: NAME}}`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from bitplan.documents import show
from bitplan.errors import BitplanError, FileFormatError, StoreError, did_you_mean
from bitplan.formats import Format, get_format
from bitplan.formats.dtypes import dtype_name, torch_dtype
from bitplan.records import parse_json
from bitplan.store.files.safetensors import INDEX_SUFFIX, Checkpoint, SafetensorsFile, open_checkpoint

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bitplan.formats import Encoded

METADATA_KEY = "bitplan"
METADATA_VERSION = 1
GGUF_FORMATS = {
    "Q4_0": "q4_0_gguf",
    "Q8_0": "q8_0_gguf",
    "MXFP4": "mxfp4_gguf",
    "F16": "float16",
    "BF16": "bfloat16",
}
DEQUANTIZE_NUMBERS = 2**20
# Floats of which torch computes nothing; most stand for numbers, E8M0 for powers of two.
NARROW_FLOATS = (
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
)


@dataclass(frozen=True)
class TensorSpec:
    """What a file says of one tensor, before its bytes are read.

    `format` is one of ours, or a torch dtype's name, or `gguf:TYPE` for types that come decoded.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    nbytes: int
    dtype_name: str
    encoded: bool

    @property
    def dtype(self) -> torch.dtype:
        """The type of the numbers: of a packed tensor, float32."""
        return torch_dtype(self.dtype_name)


class TensorFile(ABC):
    """A file of weights open for reading."""

    kind: str
    path: Path
    specs: Mapping[str, TensorSpec]
    # Names that share another name's tensor, as alias -> name.
    tied: Mapping[str, str] = {}

    @abstractmethod
    def read(self, name: str) -> Tensor | Encoded:
        """One tensor, in its own memory."""

    def read_float(self, name: str) -> Tensor:
        """One tensor as numbers: an Encoded is decoded to float32, and 8-bit floats come as float32."""
        from bitplan.formats import Encoded
        from bitplan.kernels import decode

        spec = self.spec(name)
        self.require_numbers(spec)
        tensor = self.read(name)
        if isinstance(tensor, Encoded):
            return decode(tensor)
        return tensor.float() if spec.dtype_name in NARROW_FLOATS else tensor

    def require_numbers(self, spec: TensorSpec) -> None:
        """Refuse 4- and 8-bit floats that are codes, whose scales lie beside them under another name."""
        if spec.encoded or spec.dtype_name not in NARROW_FLOATS:
            return
        if spec.dtype_name == "float4_e2m1fn_x2":
            fault = "two to a byte, and safetensors does not say which comes first"
        elif scales := next((name for name in _scale_names(spec.name) if name in self.specs), None):
            fault = f"codes with scales beside them ({scales!r})"
        else:
            return
        raise StoreError(
            f"{self.path}: {spec.name!r} is {spec.format}: {fault}; bitplan does not decode it: "
            "write the checkpoint in bfloat16 with the program that made it"
        )

    @abstractmethod
    def close(self) -> None:
        """Release the file; reading after this is an error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def files(self) -> list[Path]:
        """Every file that is read; none of them may be written to meanwhile."""
        return [self.path]

    def spec(self, name: str) -> TensorSpec:
        """What the file says of a tensor; a tied name gives that of the tensor it shares."""
        own = self.tied.get(name, name)
        if own not in self.specs:
            raise StoreError(f"{self.path}: no tensor {name!r}{did_you_mean(name, self.specs)}")
        return self.specs[own]


def open_tensors(path: str | Path) -> TensorFile:
    """Open any file of weights; its first bytes decide what it is, not its name."""
    source = Path(path)
    if source.is_file():
        with source.open("rb") as file:
            head = file.read(4)
        if not head:
            raise FileFormatError(f"{source}: the file is empty")
        if head == b"GGUF":
            return GGUFTensors(source)
        if source.suffix == ".gguf":
            raise FileFormatError(
                f"{source}: not a GGUF file, which begins with the letters GGUF; this one begins with {head!r}"
            )
        if head[:1] == b"{" and not source.name.endswith(INDEX_SUFFIX):
            return PolyTensors(source)
    return NativeTensors(source)


class NativeTensors(TensorFile):
    """Safetensors, sharded or not, with or without bitplan's metadata."""

    kind = "safetensors"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._checkpoint: Checkpoint = open_checkpoint(path)
        try:
            self.formats: dict[str, tuple[Format, tuple[int, ...]]] = {}
            self.tied = {}
            for file in self._checkpoint.files:
                formats, tied = read_metadata(file)
                self.formats.update(formats)
                self.tied.update(tied)
            self._check_ties()
            self.specs = self._list()
        except BaseException:
            self.close()
            raise

    @property
    def files(self) -> list[Path]:
        return self._checkpoint.sources

    @property
    def shards(self) -> list[Path]:
        return self._checkpoint.shards

    def shard_of(self, name: str) -> Path:
        return self._checkpoint.weight_map[name]

    def shard_name(self, shard: Path) -> Path:
        """A shard's path as the index has it: two folders may each have a shard of one name."""
        return shard.relative_to(self.path if self.path.is_dir() else self.path.parent)

    def metadata_of(self, shard: Path) -> dict[str, str]:
        """A shard's own metadata, without bitplan's key."""
        file = next(file for file in self._checkpoint.files if file.path == shard)
        return {key: value for key, value in file.metadata.items() if key != METADATA_KEY}

    def read(self, name: str) -> Tensor | Encoded:
        name = self.spec(name).name
        if name not in self.formats:
            return self._checkpoint.read(name)
        from bitplan.formats import Encoded

        fmt, shape = self.formats[name]
        parts = {part: self._checkpoint.read(part_name(name, part)) for part in fmt.part_layouts(shape)}
        return Encoded(fmt, shape, **parts)

    def close(self) -> None:
        self._checkpoint.close()

    def _list(self) -> dict[str, TensorSpec]:
        entries = self._checkpoint.tensors
        hidden: set[str] = set()
        for name, (fmt, shape) in self.formats.items():
            for part, (dtype, part_shape) in fmt.part_layouts(shape).items():
                entry = entries.get(part_name(name, part))
                if entry is None:
                    raise FileFormatError(f"{self.path}: {name!r} is {fmt.name}, but its part {part!r} is missing")
                if entry.dtype_name != dtype or entry.shape != part_shape:
                    raise FileFormatError(
                        f"{self.path}: {name!r} is {fmt.name} of shape {shape}, so {entry.name!r} must be "
                        f"{dtype} {part_shape}, got {entry.dtype_name} {entry.shape}"
                    )
                hidden.add(entry.name)
        specs = {}
        for name, entry in entries.items():
            owner = name.removesuffix("._extra_state")
            if owner != name and f"{owner}.data" in entries:
                raise FileFormatError(
                    f"{self.path}: {owner!r} lies here as parts of a packed weight, as state_dict() of a model with a "
                    "plan applied has it; load it by load_state_dict into such a model, and write it with save_model"
                )
            if name in self.formats:
                fmt, shape = self.formats[name]
                specs[name] = TensorSpec(name, fmt.name, shape, fmt.nbytes(shape), "float32", encoded=True)
            elif name not in hidden:
                specs[name] = TensorSpec(name, entry.dtype_name, entry.shape, entry.nbytes, entry.dtype_name, False)
        return dict(sorted(specs.items()))

    def _check_ties(self) -> None:
        for alias, name in self.tied.items():
            if alias in self._checkpoint.tensors or name not in self._checkpoint.tensors:
                raise FileFormatError(f"{self.path}: ties {alias!r} to {name!r}, but the tensors do not bear it out")


class GGUFTensors(TensorFile):
    """A GGUF file, or all parts of a split one; every type that gguf-py can decode."""

    kind = "gguf"

    def __init__(self, path: Path) -> None:
        from bitplan.store.files.gguf import plain_dtype_name
        from bitplan.store.files.gguf_split import open_gguf

        self.file = open_gguf(path)
        self.path = path
        self.specs = {}
        for name, entry in self.file.tensors.items():
            type_name = entry.type.name
            plain = plain_dtype_name(entry.type)
            ours = GGUF_FORMATS.get(type_name) or plain or f"gguf:{type_name}"
            encoded = type_name in GGUF_FORMATS
            self.specs[name] = TensorSpec(name, ours, entry.shape, entry.nbytes, plain or "float32", encoded)

    def read(self, name: str) -> Tensor | Encoded:
        spec, entry = self.spec(name), self.file.tensors[name]
        if spec.encoded:
            from bitplan.formats import Encoded

            return Encoded.from_bytes(spec.format, spec.shape, self.file.read_raw(name).numpy().data.cast("B"))
        if not spec.format.startswith("gguf:"):
            return self.file.read_raw(name).reshape(-1).view(spec.dtype).reshape(spec.shape)
        return self._dequantize(name, entry.raw_shape)

    @property
    def files(self) -> list[Path]:
        return self.file.parts

    def close(self) -> None:
        self.file.close()

    def _dequantize(self, name: str, raw_shape: tuple[int, ...]) -> Tensor:
        """Decode some rows at a time: gguf-py's temporaries are many times the size of what they decode."""
        import torch

        from bitplan.store.files.gguf import dequantize_rows

        shape = self.specs[name].shape
        out = torch.empty(shape).reshape(-1, shape[-1])
        step = max(1, DEQUANTIZE_NUMBERS // max(1, shape[-1]))
        for start in range(0, out.shape[0], step):
            stop = min(start + step, out.shape[0])
            raw = self.file.read_raw_rows(name, start, stop)
            try:
                out[start:stop] = dequantize_rows(raw, self.file.tensors[name].type)
            except StoreError as error:
                raise StoreError(f"{self.path}: {name}: {error}") from None
        return out.reshape(shape)


class PolyTensors(TensorFile):
    """Poly's JSON network; small enough by nature to be read whole."""

    kind = "poly json"

    def __init__(self, path: Path) -> None:
        from bitplan.formats import Encoded
        from bitplan.store.files.poly_json import read_poly_json

        self.path = path
        self.network = read_poly_json(path)
        self.specs = {}
        for name, item in self.network.tensors.items():
            if isinstance(item, Encoded):
                spec = TensorSpec(name, item.fmt.name, item.shape, item.nbytes, "float32", encoded=True)
            else:
                kind = dtype_name(item.dtype)
                spec = TensorSpec(name, kind, tuple(item.shape), item.nbytes, kind, False)
            self.specs[name] = spec

    def read(self, name: str) -> Tensor | Encoded:
        self.spec(name)
        return self.network.tensors[name]

    def close(self) -> None:
        """Nothing is held open: the document was read whole."""


# ---- bitplan's metadata in a safetensors header ----------------------------------------------------------------------


def part_name(name: str, part: str) -> str:
    """Under which name a safetensors file keeps a part of a packed tensor."""
    return name if part == "data" else f"{name}.{part}"


def _scale_names(name: str) -> Iterator[str]:
    """Where FP8 checkpoints keep a weight's scales: NAME_scale_inv, NAME_scale, NAME.scale, with .weight or without."""
    for stem in (name, name.removesuffix(".weight")):
        yield from (f"{stem}{mark}{suffix}" for mark in "_." for suffix in ("scale_inv", "scale", "scales"))


def format_metadata(packed: Mapping[str, tuple[Format, tuple[int, ...]]], tied: Mapping[str, str]) -> str:
    """The value of the metadata key `bitplan`, the same bytes for the same content."""
    tensors = {name: {"format": fmt.name, "shape": list(shape)} for name, (fmt, shape) in sorted(packed.items())}
    document: dict[str, Any] = {"version": METADATA_VERSION, "tensors": tensors}
    if tied:
        document["tied"] = dict(sorted(tied.items()))
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False)


def read_metadata(file: SafetensorsFile) -> tuple[dict[str, tuple[Format, tuple[int, ...]]], dict[str, str]]:
    """Which tensors of a file are packed, and how; a file without the key has none."""
    text = file.metadata.get(METADATA_KEY)
    if text is None:
        return {}, {}
    where = f"{file.path}: metadata {METADATA_KEY!r}"
    document = parse_json(text.encode(), where=where)
    if not isinstance(document, dict) or document.get("version") != METADATA_VERSION:
        version = document.get("version") if isinstance(document, dict) else document
        raise FileFormatError(f"{where}: this bitplan reads version {METADATA_VERSION}, got {str(version)[:40]!r}")
    if not set(document) <= {"version", "tensors", "tied"} or not isinstance(document.get("tensors"), dict):
        raise FileFormatError(f"{where}: expected version, tensors and tied, got {sorted(document)}")
    tied = document.get("tied", {})
    if not isinstance(tied, dict) or not all(isinstance(name, str) for name in tied.values()):
        raise FileFormatError(f"{where}: `tied` must map names to names")
    return {name: _read_entry(entry, f"{where}: {name!r}") for name, entry in document["tensors"].items()}, tied


def _read_entry(entry: Any, where: str) -> tuple[Format, tuple[int, ...]]:
    if not isinstance(entry, dict) or set(entry) != {"format", "shape"}:
        raise FileFormatError(f"{where}: expected format and shape, got {show(entry)}")
    name, shape = entry["format"], entry["shape"]
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < 2**62 for size in shape):
        raise FileFormatError(f"{where}: shape must be a list of sizes, got {show(shape)}")
    try:
        return get_format(str(name)), tuple(shape)
    except BitplanError as error:
        raise FileFormatError(f"{where}: {error}") from None
