"""Safetensors, sharded or not, with or without tensors that bitplan packed.

A bitplan safetensors file keeps a packed tensor's codes under its own name and its other parts beside it
(`NAME.scales`, `NAME.base`, `NAME.zero_point`). Codes that would have the shape of the weight have one dimension more,
of size 1: a program that knows nothing of bitplan then refuses them, and does not take them for numbers. The metadata
key `bitplan` holds `{"version": 1, "tensors": {NAME: {"format": F, "shape": [...]}}, "tied": {NAME: NAME}}`, with
`"transposed": true` at a tensor that is packed as the transpose of the model's, and `bitplan_crc32` the checksums of
all tensors, which `bitplan verify` verifies; files of earlier versions have none.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitplan.base.documents import FLAG, NAME, OBJECT, SIZE, Kind, Reader, list_of
from bitplan.base.errors import BitplanError, FileFormatError, StoreError
from bitplan.base.records import on_failure, parse_json
from bitplan.files.safetensors import CHECKSUMS, Checkpoint, SafetensorsFile, open_checkpoint, write_safetensors
from bitplan.files.tensor_bytes import CERTIFICATE, PayloadWriter
from bitplan.files.tensor_file import Container, TensorFile, TensorSpec, Writer
from bitplan.formats import get_format
from bitplan.formats.format import Format

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bitplan.formats import Encoded

METADATA_KEY = "bitplan"
METADATA_VERSION = 1


class NativeTensors(TensorFile):
    """Safetensors, sharded or not, with or without bitplan's metadata."""

    kind = "safetensors"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint: Checkpoint = open_checkpoint(path)
        with on_failure(self.close):
            self.packed: dict[str, TensorSpec] = {}
            self.tied = {}
            for file in self.checkpoint.files:
                packed, tied = read_metadata(file)
                self.packed.update(packed)
                self.tied.update(tied)
            self._check_ties()
            self.specs = self._list()
            by_shard = [set(self.metadata_of(shard).items()) for shard in self.shards]
            self.metadata = dict(sorted(set.intersection(*by_shard)))  # keys with the same value in all shards

    @property
    def files(self) -> list[Path]:
        return self.checkpoint.sources

    @property
    def shards(self) -> list[Path]:
        return self.checkpoint.shards

    def shard_of(self, name: str) -> Path:
        return self.checkpoint.weight_map[name]

    def shard_name(self, shard: Path) -> Path:
        """A shard's path in the index; folders may have shards of the same name."""
        return shard.relative_to(self.path if self.path.is_dir() else self.path.parent)

    def metadata_of(self, shard: Path) -> dict[str, str]:
        """A shard's own metadata, without bitplan's key."""
        metadata = self.checkpoint.file_at(shard).metadata
        return {key: value for key, value in metadata.items() if key != METADATA_KEY}

    def read(self, name: str) -> Tensor | Encoded:
        name = self.spec(name).name
        if name not in self.packed:
            return self.checkpoint.read(name)
        from bitplan.formats import Encoded

        fmt, shape = get_format(self.packed[name].format), self.packed[name].shape
        parts = {part: self.checkpoint.read(part_name(name, part)) for part in fmt.part_layouts(shape)}
        return Encoded(fmt, shape, **parts)

    @property
    def has_checksums(self) -> bool:
        return all(file.checksums.keys() == file.tensors.keys() for file in self.checkpoint.files)

    @property
    def certificate(self) -> str | None:
        return self.checkpoint.files[0].certificate if len(self.checkpoint.files) == 1 else None

    def damaged_parts(self, name: str) -> list[str]:
        spec = self.packed.get(name)
        parts = ("data",) if spec is None else get_format(spec.format).part_layouts(spec.shape)
        return [part for part in parts if self.checkpoint.is_damaged(part_name(name, part))]

    def close(self) -> None:
        self.checkpoint.close()

    def _list(self) -> dict[str, TensorSpec]:
        entries = self.checkpoint.tensors
        hidden: set[str] = set()
        for name, spec in self.packed.items():
            fmt, shape = get_format(spec.format), spec.shape
            for part, (dtype, part_shape) in fmt.part_layouts(shape).items():
                entry = entries.get(part_name(name, part))
                if entry is None:
                    raise FileFormatError(f"{self.path}: {name!r} is {fmt.name}, but its part {part!r} is missing")
                if entry.shape == _shape_in_file(fmt, shape, part, part_shape):  # earlier files have the part's own
                    entry = self.checkpoint.reshape(entry.name, part_shape)
                if entry.dtype != dtype or entry.shape != part_shape:
                    raise FileFormatError(
                        f"{self.path}: {name!r} is {fmt.name} of shape {shape}, so {entry.name!r} must be "
                        f"{dtype} {part_shape}, got {entry.dtype} {entry.shape}"
                    )
                hidden.add(entry.name)
        specs = {}
        for name, entry in entries.items():
            owner = name.removesuffix("._extra_state")
            if owner != name and f"{owner}.data" in entries:
                raise FileFormatError(
                    f"{self.path}: {owner!r} lies here as parts of a packed weight, as state_dict() of a model with a "
                    "plan applied has it; load it by load_state_dict into such a model, and write it with save_packed"
                )
            if name in self.packed:
                specs[name] = self.packed[name]
            elif name not in hidden:
                specs[name] = entry
        return dict(sorted(specs.items()))

    def _check_ties(self) -> None:
        for alias, name in self.tied.items():
            if alias in self.checkpoint.tensors or name not in self.checkpoint.tensors:
                raise FileFormatError(f"{self.path}: ties {alias!r} to {name!r}, but the tensors do not bear it out")


class Safetensors(Container):
    """Takes what no other container recognises: a file, an index of shards, or the folder that holds one of them."""

    suffix = ".safetensors"
    file_type = NativeTensors
    holds_ties = True
    holds_transposed = True

    def recognises(self, path: Path, head: bytes) -> bool:
        return True

    def certificate_entry(self, text: str) -> dict[str, Any]:
        return {CERTIFICATE: text}

    @contextmanager
    def write(
        self, path: Path, tensors: Sequence[TensorSpec], metadata: Mapping[str, Any], tied: Mapping[str, str]
    ) -> Iterator[Writer]:
        packed = [spec for spec in tensors if spec.encoded]
        names = {spec.name for spec in tensors}
        entries = [entry for spec in tensors for entry in _entries(spec, names, path)]
        extra = dict(metadata)
        has_checksums = extra.pop(CHECKSUMS, None) is not None or bool(packed or tied)
        if packed or tied:
            extra[METADATA_KEY] = format_metadata(packed, tied)
        with write_safetensors(path, entries, extra, checksums=has_checksums) as parts:
            yield _NativeWriter(parts)


class _NativeWriter:
    def __init__(self, parts: PayloadWriter) -> None:
        self._parts = parts

    def write(self, name: str, item: Tensor | Encoded) -> None:
        from bitplan.formats import Encoded

        if not isinstance(item, Encoded):
            self._parts.write(name, item)
            return
        for part, tensor in item.parts.items():
            shape = _shape_in_file(item.fmt, item.shape, part, tuple(tensor.shape))
            self._parts.write(part_name(name, part), tensor.reshape(shape))


def _entries(
    spec: TensorSpec, names: Collection[str], path: Path
) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Names, types and shapes of the file's entries that make up one tensor."""
    fmt = spec.fmt
    if fmt is None:
        yield spec.name, spec.torch_dtype, spec.shape
        return
    for part, (dtype, shape) in fmt.part_shapes(spec.shape).items():
        entry_name = part_name(spec.name, part)
        if part != "data" and entry_name in names:
            raise StoreError(
                f"{path}: two tensors would be {entry_name!r}: the {part} of {spec.name!r} in {spec.format}, and "
                f"the one of that name; rename one, or leave {spec.name!r} as it is",
                settings={"keep": spec.name},
            )
        yield entry_name, dtype, _shape_in_file(fmt, spec.shape, part, shape)


def _shape_in_file(fmt: Format, shape: tuple[int, ...], part: str, part_shape: tuple[int, ...]) -> tuple[int, ...]:
    """A part's shape in the file, which for codes is never that of the weight they stand for."""
    return (*part_shape, 1) if part == "data" and part_shape == shape and not fmt.is_cast else part_shape


# ---- bitplan's metadata in a safetensors header ----------------------------------------------------------------------


_SIZES = list_of(Kind("a size", lambda value: type(value) is int and 0 <= value < 2**62), "a list of sizes")


def part_name(name: str, part: str) -> str:
    """The name of a part of a packed tensor in a safetensors file."""
    return name if part == "data" else f"{name}.{part}"


def format_metadata(packed: Sequence[TensorSpec], tied: Mapping[str, str]) -> str:
    """The value of the metadata key `bitplan`, the same bytes for the same content."""
    tensors = {
        spec.name: {"format": spec.format, "shape": list(spec.shape)}
        | ({"transposed": True} if spec.transposed else {})
        for spec in sorted(packed, key=lambda spec: spec.name)
    }
    document: dict[str, Any] = {"version": METADATA_VERSION, "tensors": tensors}
    if tied:
        document["tied"] = dict(sorted(tied.items()))
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False)


def read_metadata(file: SafetensorsFile) -> tuple[dict[str, TensorSpec], dict[str, str]]:
    """Which tensors of a file are packed, and how; a file without the key has none."""
    text = file.metadata.get(METADATA_KEY)
    if text is None:
        return {}, {}
    where = f"{file.path}: metadata {METADATA_KEY!r}"
    reader, document = Reader(where, FileFormatError), parse_json(text.encode(), where=where)
    reader.version(document, METADATA_VERSION)
    reader.keys("", document, {"version": SIZE, "tensors": OBJECT, "tied": OBJECT}, ("version", "tensors"))
    tied = document.get("tied", {})
    reader.keys("tied", tied, dict.fromkeys(tied, NAME))
    return {name: _read_entry(reader, name, entry) for name, entry in document["tensors"].items()}, tied


def _read_entry(reader: Reader, name: str, entry: Any) -> TensorSpec:
    path = repr(name)
    reader.keys(path, entry, {"format": NAME, "shape": _SIZES, "transposed": FLAG}, ("format", "shape"))
    shape, transposed = tuple(entry["shape"]), entry.get("transposed", False)
    if transposed and len(shape) < 2:
        reader.stop(f"{path}: transposed: expected at least two axes, got the shape {shape}")
    try:
        return TensorSpec.of(name, shape, get_format(entry["format"]), transposed=transposed)
    except BitplanError as error:
        reader.stop(f"{path}: {error}")
