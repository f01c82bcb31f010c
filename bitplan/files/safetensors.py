"""Reads and writes safetensors one tensor at a time, and finds the shards of a checkpoint.

The safetensors library maps a file to read it and wants all tensors at once to write it. Here a
read fills one fresh tensor, a write streams, and memory is bounded by the largest tensor. The
header is checked as strictly as the library does, before the first payload byte is touched.

Layout: 8 bytes little-endian header length; a JSON object {name: {dtype, shape, data_offsets}},
with an optional `__metadata__` of strings, padded with spaces to a multiple of 8; the payloads
without gaps. Source: the format section of the safetensors README. `F4` holds two elements per
byte: the file counts elements, torch counts pairs, and `TensorSpec.shape` is torch's.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

from bitplan.base.documents import Kind, Reader, is_text
from bitplan.base.errors import FileFormatError, StoreError, did_you_mean, visible
from bitplan.base.records import Closing, atomic_file, check_input, parse_json, read_json
from bitplan.files.tensor_bytes import MOST_OPEN, ContainerFile, PayloadWriter, parse_checksums, take_certificate
from bitplan.formats.elements import ITEM_BYTES, dtype_name
from bitplan.plan.structure.model_view import TensorSpec

if TYPE_CHECKING:
    import torch

log = logging.getLogger("bitplan")
MAX_HEADER_BYTES = 100_000_000  # the library's own limit
MAX_RANK = 64  # torch's own limit
MAX_BYTES = 2**63 - 1
_FILE_NAME = Kind("a file name", is_text)
_INDEX_KEYS = {
    "weight_map": Kind("an object of tensor names to file names", lambda value: type(value) is dict and value != {})
}
INDEX_SUFFIX = ".safetensors.index.json"
CHECKSUMS = "bitplan_crc32"  # metadata: the CRC-32 of each tensor's bytes, 8 digits each, in the order of the file

# The format's name of a type, and torch's.
DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F4": "float4_e2m1fn_x2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
}
TAGS = {dtype: tag for tag, dtype in DTYPES.items()}

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_PICKLE = (
    "looks like a pickle, and bitplan never opens pickles because loading one can run any code; convert it where "
    "you trust it with safetensors.torch.save_file, or save_pretrained(..., safe_serialization=True)"
)
_OTHER_FORMATS = {
    b"PK\x03\x04": _PICKLE,
    b"\x80\x02\x8a\x0a": _PICKLE,
    b"\x80\x04\x95": _PICKLE,
    b"\x80\x05\x95": _PICKLE,
    b"GGUF": "is a GGUF file; open it with bitplan.files.gguf.GGUFFile",
    b"version ": "looks like a Git LFS pointer; fetch the real file with `git lfs pull`",
}
_TEXT = re.compile(rb"[\t\n\r -~]{8}")  # as the length of a header it would be more than 2^59


class SafetensorsFile(ContainerFile[TensorSpec]):
    """One .safetensors file open for reading; `tensors` is in file order."""

    tensors: dict[str, TensorSpec]
    metadata: dict[str, str]

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor into new memory."""
        entry = self._entry(name)
        raw = self._read_exactly(f"tensor {name!r}", entry.start, entry.nbytes)
        return raw.view(entry.torch_dtype).reshape(entry.shape)

    def read_bytes(self, name: str) -> bytes:
        """The bytes of a small tensor; needs no torch."""
        entry = self._entry(name)
        return self._read_bytes(f"tensor {name!r}", entry.start, entry.nbytes)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows start..stop along the first dimension; only their bytes are read."""
        entry = self._entry(name)
        if not entry.shape:
            raise StoreError(f"{self.path}: tensor {name!r} is a scalar and has no rows; use read()")
        rows = entry.shape[0]
        raw = self._read_rows(name, entry.start, entry.nbytes // max(rows, 1), rows, start, stop)
        return raw.view(entry.torch_dtype).reshape(stop - start, *entry.shape[1:])

    def _read_header(self) -> None:
        if self._size < 8:
            raise self._not_safetensors(f"the header length takes 8 bytes, the file has {self._size}")
        length = int.from_bytes(self._read_bytes("the header length", 0, 8), "little")
        if length > min(MAX_HEADER_BYTES, self._size - 8):
            raise self._not_safetensors(
                f"the header says it takes {length} bytes, the file has {self._size - 8} "
                f"and the format allows {MAX_HEADER_BYTES}"
            )
        document = parse_json(self._json_header(length), where=f"{self.path}: header")
        metadata = document.pop("__metadata__", None)  # MLX writes null for none
        self.metadata = {} if metadata is None else _check_metadata(metadata, where=str(self.path))
        entries = [self._parse_entry(name, fields, 8 + length) for name, fields in document.items()]
        entries.sort(key=lambda entry: (entry.start, entry.nbytes, entry.name))
        end = 8 + length
        for entry in entries:
            if entry.start != end:
                fault = "overlaps the tensor before it" if entry.start < end else "leaves a hole before it"
                raise FileFormatError(
                    f"{self.path}: tensor {entry.name[:80]!r} {fault}: starts at {entry.start}, expected {end}"
                )
            end += entry.nbytes
        if end != self._size:
            raise FileFormatError(
                f"{self.path}: the tensors end at byte {end}, the file at {self._size}; "
                "it is cut short or has bytes that belong to no tensor"
            )
        self.tensors = {entry.name: entry for entry in entries}
        self.certificate = take_certificate(self.metadata)
        where = f"{self.path}: metadata {CHECKSUMS!r}"
        self.checksums = parse_checksums(self.metadata.pop(CHECKSUMS, ""), list(self.tensors), where)

    def _json_header(self, length: int) -> bytes:
        """The header's bytes; not kept, because parsing already holds bytes and result in memory."""
        header = self._read_bytes("the header", 8, length)
        if header[:1] != b"{" or b"\0" in header:
            raise self._not_safetensors("the header is not a UTF-8 JSON object")
        return header

    def _parse_entry(self, name: str, fields: Any, payload_start: int) -> TensorSpec:
        where = f"{self.path}: tensor {name[:80]!r}"
        if not is_text(name):
            raise FileFormatError(f"{where}: the name is not valid Unicode")
        if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
            came = sorted(fields) if isinstance(fields, dict) else type(fields).__name__
            raise FileFormatError(f"{where}: expected exactly dtype, shape and data_offsets, got {repr(came)[:80]}")
        tag, file_shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
        if not isinstance(tag, str) or tag not in DTYPES:
            raise FileFormatError(f"{where}: dtype {repr(tag)[:80]} is not one of {', '.join(DTYPES)}")
        if not _are_sizes(file_shape) or len(file_shape) > MAX_RANK:
            raise FileFormatError(
                f"{where}: shape must be at most {MAX_RANK} integers from 0, got {repr(file_shape)[:80]}"
            )
        if not _are_sizes(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= self._size - payload_start:
            raise FileFormatError(
                f"{where}: data_offsets must be [begin, end] within the {self._size - payload_start} payload bytes, "
                f"got {repr(offsets)[:80]}"
            )
        dtype, shape = DTYPES[tag], _torch_shape(tag, file_shape)
        if shape is None or math.prod(max(size, 1) for size in shape) * ITEM_BYTES[dtype] > MAX_BYTES:
            raise FileFormatError(f"{where}: no {tag} tensor can have shape {repr(file_shape)[:80]}")
        nbytes = math.prod(shape) * ITEM_BYTES[dtype]
        if nbytes != offsets[1] - offsets[0]:
            raise FileFormatError(
                f"{where}: {tag} of shape {repr(file_shape)[:80]} takes {nbytes} bytes, "
                f"data_offsets {offsets} give it {offsets[1] - offsets[0]}"
            )
        return TensorSpec(name, shape, dtype, format=dtype, nbytes=nbytes, start=payload_start + offsets[0])

    def _not_safetensors(self, fault: str) -> FileFormatError:
        """The error, which names the file's real kind if it is recognised."""
        head = self._read_bytes("the first bytes", 0, min(self._size, 8))
        if self.path.suffix in _PICKLE_SUFFIXES:
            return FileFormatError(f"{self.path}: {_PICKLE}")
        for magic, answer in _OTHER_FORMATS.items():
            if head.startswith(magic):
                return FileFormatError(f"{self.path}: {answer}")
        if _TEXT.fullmatch(head):
            return FileFormatError(
                f"{self.path}: is text (it begins with {head.decode()!r}); give a .safetensors or .gguf file, or a "
                "model's folder"
            )
        return FileFormatError(f"{self.path}: not a safetensors file, or cut short: {fault}")


@contextmanager
def write_safetensors(
    path: str | Path,
    entries: Sequence[tuple[str, torch.dtype, Sequence[int]]],
    metadata: Mapping[str, str] | None = None,
    *,
    checksums: bool = False,
) -> Iterator[PayloadWriter]:
    """Yield a writer of a file: tensors (name, dtype, shape) are known first, bytes come one by one.

    The largest dtypes come first and then names in order, which keeps every tensor aligned. The
    file appears when the block ends without an error and every tensor was written. With `checksums` the metadata
    say what the bytes of every tensor must be.
    """
    strings = _check_metadata(dict(metadata or {}), where=str(path))
    if checksums:
        strings[CHECKSUMS] = "0" * 8 * len(entries)
    header, payloads = _build_header(entries, strings, where=str(path))
    header = len(header).to_bytes(8, "little") + header
    with atomic_file(path) as file:
        file.write(header)
        placed = [replace(payload, start=len(header) + payload.start) for payload in payloads]
        size = len(header) + sum(payload.nbytes for payload in payloads)
        writer = PayloadWriter(file, path, placed, size, header, checksums)
        yield writer
        writer.finish()
        if checksums:
            writer.fill_checksums(f'"{CHECKSUMS}":"'.encode())  # elsewhere its quotes would be escaped
        writer.seal()


def _build_header(
    entries: Sequence[tuple[str, torch.dtype, Sequence[int]]], metadata: dict[str, str], where: str
) -> tuple[bytes, list[TensorSpec]]:
    document: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    payloads: list[TensorSpec] = []
    end = 0
    for name, dtype, sizes in sorted(entries, key=lambda entry: (-entry[1].itemsize, entry[0])):
        shape = tuple(sizes)
        if name in document or name == "__metadata__" or not is_text(name):
            raise StoreError(f"{where}: the tensor name {name[:80]!r} is taken or not valid Unicode")
        if dtype_name(dtype) not in TAGS:
            raise StoreError(
                f"{where}: tensor {name!r}: safetensors has no {dtype_name(dtype)}; it has {', '.join(TAGS)}"
            )
        tag = TAGS[dtype_name(dtype)]
        file_shape = (*shape[:-1], shape[-1] * 2) if tag == "F4" and shape else shape
        if not _are_sizes(list(shape)) or len(shape) > MAX_RANK or _torch_shape(tag, file_shape) is None:
            raise StoreError(f"{where}: tensor {name!r}: no {dtype} tensor can have shape {shape}")
        nbytes = math.prod(shape) * dtype.itemsize
        document[name] = {"dtype": tag, "shape": file_shape, "data_offsets": (end, end + nbytes)}
        payloads.append(TensorSpec.of(name, shape, dtype=dtype, start=end))
        end += nbytes
    header = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > MAX_HEADER_BYTES:
        raise StoreError(f"{where}: the header takes {len(header)} bytes, the format allows {MAX_HEADER_BYTES}")
    return header, payloads


def _check_metadata(metadata: Any, where: str) -> dict[str, str]:
    if not isinstance(metadata, dict):
        raise FileFormatError(f"{where}: __metadata__ must be an object of strings, got {type(metadata).__name__}")
    for key, value in metadata.items():
        if not (is_text(key) and is_text(value)):
            raise FileFormatError(f"{where}: __metadata__ {key[:80]!r} must be a string, got {repr(value)[:80]}")
    return metadata


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= MAX_BYTES for value in values)


def _torch_shape(tag: str, file_shape: Sequence[int]) -> tuple[int, ...] | None:
    """The shape in torch's counting, or None where F4 elements do not pair up along the last dimension."""
    if tag != "F4":
        return tuple(file_shape)
    if not file_shape or file_shape[-1] % 2:
        return None
    return (*file_shape[:-1], file_shape[-1] // 2)


class Checkpoint(Closing):
    """The tensors of one file, or of all shards that an index names.

    `metadata` holds the keys that have the same value in all files that have them; `sources` are the shards and their
    index.
    """

    def __init__(self, files: Sequence[SafetensorsFile], index: Path | None = None) -> None:
        self._files = {file.path: file for file in files}
        self.shards = list(self._files)
        self.sources = self.shards if index is None else [*self.shards, index]
        self.tensors: dict[str, TensorSpec] = {}
        self.weight_map: dict[str, Path] = {}
        for file in files:
            for name, entry in file.tensors.items():
                if name in self.tensors:
                    raise FileFormatError(
                        f"{file.path}: tensor {name[:80]!r} is also in {self.weight_map[name].name}; "
                        "one of the two shards is stale: download the checkpoint again"
                    )
                self.tensors[name] = entry
                self.weight_map[name] = file.path
        pairs = {pair for file in files for pair in file.metadata.items()}
        spellings = Counter(key for key, _ in pairs)
        self.metadata = {key: value for key, value in sorted(pairs) if spellings[key] == 1}

    @property
    def files(self) -> list[SafetensorsFile]:
        return list(self._files.values())

    def file_at(self, shard: Path) -> SafetensorsFile:
        return self._files[shard]

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor from its shard into new memory."""
        return self._file(name).read(name)

    def is_damaged(self, name: str) -> bool:
        """Whether a tensor's bytes are not those that were written; False where its file has no checksums."""
        return self._file(name).is_damaged(name)

    def read_bytes(self, name: str) -> bytes:
        """The bytes of a small tensor; needs no torch."""
        return self._file(name).read_bytes(name)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows start..stop along the first dimension; only their bytes are read."""
        return self._file(name).read_rows(name, start, stop)

    def reshape(self, name: str, shape: tuple[int, ...]) -> TensorSpec:
        """Read a tensor in another shape of as many numbers from now on."""
        file = self._file(name)
        self.tensors[name] = file.tensors[name] = replace(file.tensors[name], shape=shape)
        return self.tensors[name]

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self.weight_map:
            raise StoreError(f"no tensor {name!r} in this checkpoint{did_you_mean(name, self.weight_map)}")
        return self._files[self.weight_map[name]]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a .safetensors file, an index of shards, or the folder that holds one of them."""
    source = Path(path)
    folder = source if source.is_dir() else None
    if folder is not None:
        source = _find_in_folder(folder)
    if source.name.endswith(".bin.index.json"):
        raise FileFormatError(f"{source}: names files of which each {_PICKLE}")
    weight_map = read_index(source) if source.name.endswith(".json") else None
    shards = [source] if weight_map is None else sorted({source.parent / shard for shard in weight_map.values()})
    if folder is not None:
        taken = {source, *shards}
        ignored = [name for name in _weight_files(folder) if folder / name not in taken]
        if ignored:
            _say_ignored(str(folder), source.name, ", ".join(ignored[:6]) + (", ..." if len(ignored) > 6 else ""))
    with ExitStack() as opened:
        stays_open = len(shards) <= MOST_OPEN
        files = [opened.enter_context(SafetensorsFile(shard, stays_open=stays_open)) for shard in shards]
        checkpoint = Checkpoint(files, None if weight_map is None else source)
        if weight_map is not None:
            _check_against_index(source, weight_map, checkpoint)
        opened.pop_all()
    return checkpoint


def _weight_files(folder: Path) -> list[str]:
    return sorted(
        name
        for name in os.listdir(folder)
        if name.endswith((".safetensors", INDEX_SUFFIX)) and not name.startswith(".")
    )


@functools.cache
def _say_ignored(folder: str, taken: str, ignored: str) -> None:
    """Log once which files are ignored, however often a command opens the folder."""
    log.warning("%s: %s is read, as transformers does; ignored: %s", visible(folder), visible(taken), visible(ignored))


def _find_in_folder(folder: Path) -> Path:
    """Find a folder's weights as transformers does: model.safetensors, else its index; else the only index or file."""
    names = _weight_files(folder)
    single, index = "model.safetensors", f"model{INDEX_SUFFIX}"
    if single in names and not (index in names and single in read_index(folder / index).values()):
        return folder / single
    if index in names:
        return folder / index
    candidates = [name for name in names if name.endswith(INDEX_SUFFIX)] or names
    if len(candidates) == 1:
        return folder / candidates[0]
    if candidates:
        raise FileFormatError(
            f"{folder}: has neither {single} nor {index}, and {len(candidates)} others: "
            f"{', '.join(candidates[:6])}; pass the one you mean"
        )
    pickles = sorted(name for name in os.listdir(folder) if name.endswith(_PICKLE_SUFFIXES))
    if pickles:
        raise FileFormatError(f"{folder}: has no .safetensors file; {pickles[0]} {_PICKLE}")
    raise FileFormatError(f"{folder}: has neither a .safetensors file nor an index (*{INDEX_SUFFIX})")


def read_index(path: Path) -> dict[str, str]:
    """The weight map of an index: tensor name to the shard's name within the same folder."""
    check_input(path)
    reader = Reader(str(path), FileFormatError, strict=False)
    weight_map: dict[str, str] = reader.keys("", read_json(path), _INDEX_KEYS, _INDEX_KEYS)["weight_map"]
    reader.keys("weight_map", weight_map, dict.fromkeys(weight_map, _FILE_NAME))
    for shard in sorted(set(weight_map.values())):
        if PurePosixPath(shard).is_absolute() or PureWindowsPath(shard).anchor or ".." in PureWindowsPath(shard).parts:
            raise FileFormatError(f"{path}: {shard[:80]!r} leaves the index's folder; shards must lie within it")
        if not os.path.isfile(path.parent / shard):
            raise FileFormatError(f"{path}: the shard {shard[:80]!r} does not exist; download it again")
    return weight_map


def _check_against_index(path: Path, weight_map: Mapping[str, str], checkpoint: Checkpoint) -> None:
    for name, shard in weight_map.items():
        if checkpoint.weight_map.get(name) != path.parent / shard:
            raise FileFormatError(f"{path}: says that tensor {name[:80]!r} is in {shard}, and it is not")
    for name, file in checkpoint.weight_map.items():
        if name not in weight_map:
            raise FileFormatError(
                f"{path}: does not list tensor {name[:80]!r}, which is in {file.name}; "
                "add it to weight_map, or open the shard by itself"
            )
