"""Reads and writes GGUF one tensor at a time, with a header parser that trusts no count.

`gguf.GGUFReader` maps the whole file and believes its lengths. Here every length is compared with the remaining bytes
before anything is allocated, and a read fills one new tensor, so memory is bounded by the header and the largest
tensor.

Layout (version 2 and 3, little-endian): "GGUF", version, tensor count, key count; the keys with
typed values; per tensor name, dimensions (fastest first), type, offset; then, from an aligned
position, the payloads one after the other, each padded to `general.alignment`. Tensors must lie in
header order without gaps: llama.cpp demands the same. Source: ggml's docs/gguf.md. Shapes here are
torch's (slowest first). Metadata keeps its types, so that writing what was read gives the same
bytes (only a signalling NaN in it would come back quiet).

Files that bitplan writes say in `bitplan.crc32` what the bytes of every tensor must be: 8 hexadecimal digits of the
list of tensors, then 8 for each of them. Other programs copy metadata into files of other tensors; by the first digits
such a file has no checksums.

A long array of metadata stays as bytes of the file, and its items are made when needed: a tokenizer has hundreds of
thousands of strings and numbers, which as Python objects take ten times their bytes.

A model may be split over several files, `NAME-00001-of-00003.gguf`: naming any part opens all (`open_gguf`).
llama.cpp's gguf-split writes into each part its number (`split.no`, from 0), the number of parts (`split.count`), and
the number of tensors in all parts (`split.tensors.count`); the first part has the model's metadata. All of this is
checked against the file names and the tensors, so that no incomplete model is read. Parts that bitplan wrote say in
`split.run` what was written into all of them.
"""

from __future__ import annotations

import math
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from bitplan.base.errors import FileFormatError, StoreError
from bitplan.base.records import atomic_file
from bitplan.files.tensor_bytes import MOST_OPEN, ContainerFile, PayloadWriter, parse_checksums, take_certificate
from bitplan.formats.elements import torch_dtype
from bitplan.plan.structure.model_view import TensorSpec

if TYPE_CHECKING:
    import torch

# ---- values of metadata ----------------------------------------------------------------------------------------------


STRUCT_CODES = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.FLOAT64: "d",
    GGUFValueType.BOOL: "?",
}


class GGUFArray(Sequence[Any]):
    """An array of numbers or strings as bytes of the file, already checked; equal to a sequence of the same items."""

    def __init__(self, item_type: GGUFValueType, count: int, raw: bytes) -> None:
        self.item_type, self.raw, self._count = item_type, raw, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        if self.item_type != GGUFValueType.STRING:
            return (item for (item,) in struct.iter_unpack(f"<{STRUCT_CODES[self.item_type]}", self.raw))
        return self._strings()

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, GGUFArray) and other.item_type == self.item_type:
            return self.raw == other.raw
        if not isinstance(other, Sequence) or isinstance(other, str) or len(other) != len(self):
            return False
        return all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{self._count} items of {self.item_type.name}>"

    def _strings(self) -> Iterator[str]:
        at = 0
        for _ in range(self._count):
            length = int.from_bytes(self.raw[at : at + 8], "little")
            yield self.raw[at + 8 : at + 8 + length].decode()
            at += 8 + length


@dataclass(frozen=True)
class GGUFValue:
    """One metadata value with its type in the file.

    An array has a sequence as value and names the type of its items; the items of an array of arrays
    are `GGUFValue` themselves.
    """

    type: GGUFValueType
    value: Any
    item_type: GGUFValueType | None = None


# ---- files -----------------------------------------------------------------------------------------------------------


DEFAULT_ALIGNMENT = 32
CHECKSUMS = "bitplan.crc32"
MAX_ALIGNMENT = 2**20
MAX_HEADER_BYTES = 2**27  # several times the largest tokenizer in use
MAX_KEY_BYTES = 2**16 - 1
MAX_NAME_BYTES = 1024  # llama.cpp itself reads names of up to 63 bytes
MAX_RANK = 4
MAX_NESTING = 4
# Each item becomes Python objects, many times its bytes. The largest models in use have some 90,000 tensors and 100
# keys, and tokenizers 700,000 strings.
MAX_KEYS, MAX_TENSORS, MAX_STRINGS = 2**14, 2**18, 2**22

_LEAST_BYTES = {kind: struct.calcsize(f"<{code}") for kind, code in STRUCT_CODES.items()}
_LEAST_BYTES |= {GGUFValueType.STRING: 8, GGUFValueType.ARRAY: 12}

_PLAIN_DTYPES = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
    GGMLQuantizationType.F64: "float64",
    GGMLQuantizationType.I8: "int8",
    GGMLQuantizationType.I16: "int16",
    GGMLQuantizationType.I32: "int32",
    GGMLQuantizationType.I64: "int64",
}


@dataclass(frozen=True)
class GGUFTensor(TensorSpec):
    """A tensor of a GGUF file; its `format` is a dtype, or the name of a type made of blocks."""

    type: GGMLQuantizationType = GGMLQuantizationType.F32

    @classmethod
    def at(cls, name: str, kind: GGMLQuantizationType, shape: tuple[int, ...], start: int) -> GGUFTensor:
        """A record of a tensor of this GGUF type and shape whose bytes begin at `start`."""
        plain, nbytes = _PLAIN_DTYPES.get(kind), math.prod(_raw_shape(kind, shape))
        return cls(name, shape, plain or "float32", format=plain or kind.name, nbytes=nbytes, start=start, type=kind)

    @property
    def raw_shape(self) -> tuple[int, ...]:
        """The shape of the encoded bytes: the last dimension counts bytes per row."""
        return _raw_shape(self.type, self.shape)

    @property
    def accepts(self) -> dict[torch.dtype, tuple[int, ...]]:
        """What the writer takes for this tensor, dtype to shape: encoded bytes or, for a plain type, numbers."""
        return {torch_dtype("uint8"): self.raw_shape, **({} if self.format != self.dtype else super().accepts)}


class GGUFFile(ContainerFile[GGUFTensor]):
    """One .gguf file open for reading; `tensors` and `metadata` are in file order."""

    version: int
    alignment: int
    metadata: dict[str, GGUFValue]

    @property
    def parts(self) -> list[Path]:
        """The files that hold the tensors."""
        return [self.path]

    def read_raw(self, name: str) -> torch.Tensor:
        """The encoded bytes as a fresh uint8 tensor of shape [*shape[:-1], bytes per row]."""
        tensor = self._entry(name)
        return self._read_exactly(f"tensor {name!r}", tensor.start, tensor.nbytes).reshape(tensor.raw_shape)

    def read_raw_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows start..stop of the tensor with its leading dimensions flattened, [rows, bytes per row]."""
        tensor = self._entry(name)
        *lead, row_bytes = tensor.raw_shape
        raw = self._read_rows(name, tensor.start, row_bytes, math.prod(lead), start, stop)
        return raw.reshape(stop - start, row_bytes)

    def _read_header(self) -> None:
        header = _Header(self._file, self._size, self.path)
        self.version = _check_version(header)
        tensor_count = header.count("tensors", least_bytes=24, most=MAX_TENSORS)
        key_count = header.count("metadata keys", least_bytes=13, most=MAX_KEYS)
        self.metadata = {}
        for _ in range(key_count):
            key = header.string("a metadata key", MAX_KEY_BYTES)
            if key in self.metadata:
                raise FileFormatError(f"{self.path}: metadata key {key[:80]!r} appears twice")
            self.metadata[key] = header.value(header.value_type(key), key)
        self.alignment = _check_alignment(self.metadata, where=str(self.path))
        start = header.position
        infos = [header.tensor_info() for _ in range(tensor_count)]
        self.tensors = self._place(infos, first=header.position + -header.position % self.alignment)
        self.checksums = self._read_checksums(start, header.position)
        self.certificate = take_certificate(self.metadata)

    def _read_checksums(self, start: int, stop: int) -> dict[str, int]:
        """Read the checksums in the metadata of this list of tensors, which lies at these bytes of the header."""
        stored = self.metadata.pop(CHECKSUMS, None)
        if stored is None:
            return {}
        listed = f"{zlib.crc32(self._read_bytes('the list of tensors', start, stop - start)):08x}"
        text, where = str(stored.value), f"{self.path}: metadata {CHECKSUMS!r}"
        checksums = parse_checksums(text, ["", *self.tensors], where)
        return {name: checksums[name] for name in self.tensors} if text.startswith(listed) and checksums else {}

    def _place(self, infos: Sequence[tuple[str, Any, tuple[int, ...], int]], first: int) -> dict[str, GGUFTensor]:
        """Check the offsets against the sizes: aligned, one after the other, up to the end of the file."""
        tensors: dict[str, GGUFTensor] = {}
        end = 0
        for name, kind, shape, offset in infos:
            where = f"{self.path}: tensor {name[:80]!r}"
            tensor = GGUFTensor.at(name, kind, shape, first + offset)
            nbytes = tensor.nbytes
            expected = end + -end % self.alignment
            if name in tensors:
                raise FileFormatError(f"{where} appears twice")
            if offset % self.alignment:
                raise FileFormatError(f"{where}: offset {offset} is not a multiple of the alignment {self.alignment}")
            if first + offset + nbytes > self._size:
                raise FileFormatError(
                    f"{where} ends at byte {first + offset + nbytes}, the file at {self._size}; "
                    "it is cut short: copy or download it again"
                )
            if offset != expected:
                fault = "overlaps the tensor before it" if offset < expected else "leaves a hole before it"
                raise FileFormatError(f"{where} {fault}: offset {offset}, expected {expected}")
            tensors[name] = tensor
            end = offset + nbytes
        if self._size > first + end + -end % self.alignment:
            raise FileFormatError(
                f"{self.path}: the tensors end at byte {first + end}, the file at {self._size}: "
                "some bytes belong to no tensor"
            )
        return tensors


class _Header:
    """A cursor over the header that never reads or allocates more than the file has left."""

    def __init__(self, file: BinaryIO, size: int, path: Path) -> None:
        self.path = path
        self.position = 0
        self._file = file
        self._end = min(size, MAX_HEADER_BYTES)
        self._strings = self._arrays = 0

    def take(self, nbytes: int, label: str) -> bytes:
        remaining = self._end - self.position
        raw = self._file.read(nbytes) if nbytes <= remaining else b""
        if len(raw) < nbytes:
            raise FileFormatError(
                f"{self.path}: {label} at byte {self.position} needs {nbytes} bytes, {remaining} are left "
                f"(a header may take {MAX_HEADER_BYTES}); the file is cut short or damaged"
            )
        self.position += nbytes
        return raw

    def number(self, code: str, label: str) -> int:
        return int(struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), label))[0])

    def count(self, label: str, least_bytes: int, most: int | None = None) -> int:
        count = self.number("Q", f"the number of {label}")
        unread = self._end - self.position
        if count > unread // least_bytes:
            raise FileFormatError(
                f"{self.path}: {count} {label[:80]} before byte {self.position} cannot fit in the {unread} bytes left"
            )
        if most is not None and count > most:
            raise FileFormatError(f"{self.path}: {count} {label[:80]}, at most {most} are read")
        return count

    def string(self, label: str, most_bytes: int = MAX_HEADER_BYTES) -> str:
        length = self.number("Q", f"the length of {label}")
        if length > most_bytes:
            raise FileFormatError(f"{self.path}: {label} has {length} bytes, at most {most_bytes} are allowed")
        raw = self.take(length, label)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise FileFormatError(f"{self.path}: {label} before byte {self.position} is not UTF-8: {error}") from None

    def value_type(self, key: str) -> GGUFValueType:
        number = self.number("I", f"the type of {key[:80]!r}")
        if number not in _LEAST_BYTES:
            raise FileFormatError(
                f"{self.path}: metadata {key[:80]!r} has type {number}, known are 0 to {max(_LEAST_BYTES)}"
            )
        return GGUFValueType(number)

    def value(self, kind: GGUFValueType, key: str, depth: int = 0) -> GGUFValue:
        label = f"metadata {key[:80]!r}"
        if kind == GGUFValueType.STRING:
            return GGUFValue(kind, self.string(label))
        if kind != GGUFValueType.ARRAY:
            return GGUFValue(kind, struct.unpack(f"<{STRUCT_CODES[kind]}", self.scalars(kind, 1, label))[0])
        if depth == MAX_NESTING:
            raise FileFormatError(f"{self.path}: {label} nests arrays more than {MAX_NESTING} deep")
        item = self.value_type(key)
        count = self.count(f"items of {label}", _LEAST_BYTES[item])
        if item == GGUFValueType.STRING:
            return GGUFValue(kind, GGUFArray(item, count, self.strings(count, label)), item)
        if item == GGUFValueType.ARRAY:
            self._arrays += count
            if self._arrays > MAX_KEYS:
                raise FileFormatError(f"{self.path}: {label} has arrays in arrays, at most {MAX_KEYS} are read")
            return GGUFValue(kind, tuple([self.value(item, key, depth + 1) for _ in range(count)]), item)
        return GGUFValue(kind, GGUFArray(item, count, self.scalars(item, count, label)), item)

    def scalars(self, kind: GGUFValueType, count: int, label: str) -> bytes:
        raw = self.take(count * _LEAST_BYTES[kind], label)
        if kind == GGUFValueType.BOOL and raw.strip(b"\0\1"):
            raise FileFormatError(f"{self.path}: {label} is a bool, but no byte 0 or 1; download it again")
        return raw

    def strings(self, count: int, label: str) -> bytes:
        """The bytes of `count` strings, each checked; a separate loop, since a tokenizer has hundreds of thousands."""
        self._strings += count
        if self._strings > MAX_STRINGS:
            raise FileFormatError(
                f"{self.path}: {label}: {self._strings} strings in all, at most {MAX_STRINGS} are read"
            )
        raw = bytearray()
        for _ in range(count):
            head = self.take(8, label)
            text = self.take(int.from_bytes(head, "little"), label)
            try:
                text.decode()
            except UnicodeDecodeError as error:
                location = f"{label} before byte {self.position}"
                raise FileFormatError(f"{self.path}: {location} is not UTF-8: {error}") from None
            raw += head
            raw += text
        return bytes(raw)

    def tensor_info(self) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        """Name, type, shape (slowest dimension first) and offset of the next tensor."""
        name = self.string("a tensor name", MAX_NAME_BYTES)
        label = f"tensor {name[:80]!r}"
        rank = self.number("I", f"the rank of {label}")
        if rank > MAX_RANK:
            raise FileFormatError(f"{self.path}: {label} has {rank} dimensions, ggml holds at most {MAX_RANK}")
        shape = tuple([self.number("Q", f"the shape of {label}") for _ in range(rank)][::-1])
        number = self.number("I", f"the type of {label}")
        if number not in GGML_QUANT_SIZES:
            types = ", ".join(f"{kind.value} {kind.name}" for kind in GGML_QUANT_SIZES)
            raise FileFormatError(f"{self.path}: {label} has type {number}, known to the installed gguf are: {types}")
        kind = GGMLQuantizationType(number)
        if fault := _shape_fault(kind, shape):
            raise FileFormatError(f"{self.path}: {label}: {fault}")
        return name, kind, shape, self.number("Q", f"the offset of {label}")


def _check_version(header: _Header) -> int:
    magic = header.take(4, "the magic")
    if magic != b"GGUF":
        raise FileFormatError(f"{header.path}: not a GGUF file: it begins with {magic!r}, expected b'GGUF'")
    version = header.number("I", "the version")
    if version and version % 2**16 == 0:
        raise FileFormatError(
            f"{header.path}: a big-endian GGUF file; only little-endian is read: convert it with gguf-convert-endian"
        )
    if version not in (2, 3):
        raise FileFormatError(
            f"{header.path}: GGUF version {version}, read are 2 and 3; convert it with a current llama.cpp"
        )
    return version


def _check_alignment(metadata: Mapping[str, GGUFValue], where: str) -> int:
    stored = metadata.get("general.alignment", GGUFValue(GGUFValueType.UINT32, DEFAULT_ALIGNMENT))
    alignment = stored.value if stored.type == GGUFValueType.UINT32 else 0
    if not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise FileFormatError(
            f"{where}: general.alignment must be a UINT32 power of two up to {MAX_ALIGNMENT}, "
            f"got {stored.type.name} {repr(stored.value)[:80]}"
        )
    return int(alignment)


def _shape_fault(kind: GGMLQuantizationType, shape: Sequence[int]) -> str | None:
    if len(shape) > MAX_RANK or not all(type(size) is int and 0 < size < 2**63 for size in shape):
        return f"shape must be at most {MAX_RANK} positive integers, got {tuple(shape)}"
    block = GGML_QUANT_SIZES[kind][0]
    row = shape[-1] if shape else 1
    return f"rows of {row} elements do not divide into {kind.name} blocks of {block}" if row % block else None


def _raw_shape(kind: GGMLQuantizationType, shape: Sequence[int]) -> tuple[int, ...]:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    *lead, row = shape or (1,)
    return (*lead, row // block * block_bytes)


def plain_dtype(type: GGMLQuantizationType) -> torch.dtype | None:
    """The torch dtype with the same bytes as a plain type such as F16; None for types made of blocks."""
    return torch_dtype(_PLAIN_DTYPES[type]) if type in _PLAIN_DTYPES else None


def dequantize_rows(raw: torch.Tensor, type: GGMLQuantizationType) -> torch.Tensor:
    """Encoded rows, uint8 [..., bytes per row], as fresh float32 [..., elements per row] on the CPU."""
    import torch
    from gguf.quants import dequantize

    block, block_bytes = GGML_QUANT_SIZES[type]
    if raw.dtype != torch.uint8 or raw.dim() == 0 or raw.shape[-1] % block_bytes:
        raise StoreError(
            f"{type.name} rows are uint8 of a multiple of {block_bytes} bytes, got {raw.dtype} {tuple(raw.shape)}"
        )
    shape = (*raw.shape[:-1], raw.shape[-1] // block_bytes * block)
    if not raw.numel():
        return torch.empty(shape)
    if (plain := plain_dtype(type)) is not None:
        return raw.cpu().contiguous().clone().view(plain).to(torch.float32)
    try:
        with np.errstate(all="ignore"):  # damaged scales give inf and NaN, not warnings
            return torch.from_numpy(dequantize(raw.cpu().contiguous().numpy(), type).reshape(shape))
    except NotImplementedError:
        types = ", ".join(kind.name for kind in dequantizable_types())
        raise StoreError(f"the installed gguf cannot decode {type.name}; it can decode: {types}") from None


def dequantizable_types() -> list[GGMLQuantizationType]:
    """The types that `dequantize_rows` takes, found by decoding one block of zeros of each type."""
    from gguf.quants import dequantize

    types = list(_PLAIN_DTYPES)
    for kind, (_, block_bytes) in GGML_QUANT_SIZES.items():
        if kind not in _PLAIN_DTYPES:
            try:
                dequantize(np.zeros((1, block_bytes), np.uint8), kind)
            except NotImplementedError:
                continue
            types.append(kind)
    return sorted(types)


@contextmanager
def write_gguf(
    path: str | Path,
    entries: Sequence[tuple[str, GGMLQuantizationType, Sequence[int]]],
    metadata: Mapping[str, GGUFValue],
    *,
    checksums: bool = False,
) -> Iterator[PayloadWriter]:
    """Yield a writer of a version 3 file: tensors (name, type, shape) are known first, bytes come one by one.

    Tensors lie in the order given. Each comes as encoded bytes (uint8, `raw_shape`), or, for a plain
    type such as F16, as a tensor of that dtype. llama.cpp wants `general.architecture` in the
    metadata. The file appears when the block ends without an error and every tensor was written. With `checksums` the
    metadata say what the bytes of every tensor must be.
    """
    alignment = _check_alignment(metadata, where=str(path))
    entries_of_metadata = {key: value for key, value in metadata.items() if key != CHECKSUMS}
    if checksums:
        entries_of_metadata[CHECKSUMS] = GGUFValue(GGUFValueType.STRING, "0" * 8 * (1 + len(entries)))
    head = [b"GGUF", struct.pack("<IQQ", 3, len(entries), len(entries_of_metadata))]
    for key, value in entries_of_metadata.items():
        entry = _pack_string(key, MAX_KEY_BYTES), struct.pack("<I", value.type), _pack_value(value, f"{path}: {key!r}")
        head.append(b"".join(entry))
    infos: list[bytes] = []
    payloads: dict[str, GGUFTensor] = {}
    end = 0
    for name, kind, shape in entries:
        if fault := _shape_fault(kind, shape) or ("the name is taken" if name in payloads else None):
            raise StoreError(f"{path}: tensor {name!r}: {fault}")
        payloads[name] = GGUFTensor.at(name, kind, tuple(shape), end)
        infos += [_pack_string(name, MAX_NAME_BYTES), struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))]
        infos += [struct.pack("<IQ", kind, end)]
        end += payloads[name].nbytes + -payloads[name].nbytes % alignment
    listed = f"{zlib.crc32(b''.join(infos)):08x}".encode()
    if checksums:
        head[-1] = head[-1].replace(b"0" * 8, listed, 1)
    header = b"".join(head + infos)
    if len(header) > MAX_HEADER_BYTES:
        raise StoreError(f"{path}: the header takes {len(header)} bytes, at most {MAX_HEADER_BYTES} are read back")
    with atomic_file(path) as file:
        file.write(header)
        first = len(header) + -len(header) % alignment
        placed = [replace(payload, start=first + payload.start) for payload in payloads.values()]
        writer = PayloadWriter(file, path, placed, first + end, header, checksums)
        yield writer
        writer.finish()
        if checksums:
            writer.fill_checksums(head[-1][: len(head[-1]) - 8 * len(entries)])
        writer.seal()


def _pack_string(text: str, most_bytes: int = MAX_HEADER_BYTES) -> bytes:
    try:
        raw = text.encode()
    except UnicodeEncodeError as error:
        raise StoreError(f"{text[:80]!r} cannot be written as UTF-8: {error}") from None
    if len(raw) > most_bytes:
        raise StoreError(f"{text[:80]!r} takes {len(raw)} bytes, at most {most_bytes} are allowed here")
    return struct.pack("<Q", len(raw)) + raw


def _pack_value(value: GGUFValue, where: str) -> bytes:
    try:
        if value.type != GGUFValueType.ARRAY:
            return _pack_items(value.type, [value.value], where)
        items = _pack_items(value.item_type, value.value, where)
        return struct.pack("<IQ", value.item_type, len(value.value)) + items
    except (struct.error, TypeError, AttributeError, KeyError, OverflowError):
        kind = value.type.name if value.item_type is None else f"{value.type.name} of {value.item_type.name}"
        raise StoreError(f"{where}: {repr(value.value)[:80]} is not a GGUF {kind}") from None


def _pack_items(kind: GGUFValueType | None, items: Sequence[Any], where: str) -> bytes:
    if isinstance(items, GGUFArray) and items.item_type == kind:
        return items.raw
    if kind == GGUFValueType.STRING:
        return b"".join(_pack_string(item) for item in items)
    if kind == GGUFValueType.ARRAY:
        return b"".join(_pack_value(item, where) for item in items)
    if kind == GGUFValueType.BOOL and not all(isinstance(item, bool) for item in items):
        raise TypeError("not a bool")
    return struct.pack(f"<{len(items)}{STRUCT_CODES[kind]}", *items)


# ---- models in several files -----------------------------------------------------------------------------------------


PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_SPLIT = "split."
MAX_PARTS = 99_999  # five digits


class SplitGGUF(GGUFFile):
    """All parts as one file; `path` and `metadata` are those of the first part, without the keys of the split."""

    def __init__(self, parts: list[GGUFFile]) -> None:
        first = parts[0]
        self.path, self.version, self.alignment = first.path, first.version, first.alignment
        self.metadata = {key: value for key, value in first.metadata.items() if not key.startswith(_SPLIT)}
        self.certificate = first.certificate
        self._opened = parts
        self._part_of: dict[str, GGUFFile] = {}
        for part in parts:
            for name in part.tensors:
                if name in self._part_of:
                    raise FileFormatError(
                        f"{part.path}: tensor {name[:80]!r} is also in {self._part_of[name].path.name}; "
                        "one of the two parts is stale: download the model again"
                    )
                self._part_of[name] = part
        self.tensors = {name: part.tensors[name] for name, part in self._part_of.items()}
        self.checksums = {name: checksum for part in parts for name, checksum in part.checksums.items()}

    @property
    def parts(self) -> list[Path]:
        return [part.path for part in self._opened]

    def read_raw(self, name: str) -> torch.Tensor:
        self._entry(name)
        return self._part_of[name].read_raw(name)

    def read_raw_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        self._entry(name)
        return self._part_of[name].read_raw_rows(name, start, stop)

    def is_damaged(self, name: str) -> bool:
        self._entry(name)
        return self._part_of[name].is_damaged(name)

    def close(self) -> None:
        for part in self._opened:
            part.close()


def open_gguf(path: str | Path) -> GGUFFile:
    """A GGUF file, or all parts of the split model that it belongs to."""
    with ExitStack() as opened:
        part = opened.enter_context(GGUFFile(path))
        named = PART_NAME.fullmatch(part.path.name)
        count = _number(part, "count", default=1)
        if count == 1 and (named is None or int(named["count"]) == 1):
            opened.pop_all()
            return part
        if named is None or (int(named["number"]), int(named["count"])) != (_number(part, "no") + 1, count):
            says = f"part {_number(part, 'no') + 1} of {count}" if count > 1 else "nothing of parts"
            raise FileFormatError(
                f"{part.path}: its metadata says {says}, which its name must say too, "
                f"as NAME-00001-of-{count:05d}.gguf; name the file as it was published"
            )
        stem, given_number = named["stem"], int(named["number"])
        files = [
            part if number == given_number else opened.enter_context(_open_part(part, stem, number, count))
            for number in range(1, count + 1)
        ]
        _require_one_run(files)
        split = SplitGGUF(files)
        expected = _number(files[0], "tensors.count", default=len(split.tensors))
        if len(split.tensors) != expected:
            raise FileFormatError(
                f"{split.path}: split.tensors.count is {expected}, and the {count} parts hold {len(split.tensors)} "
                "tensors; download the parts again"
            )
        opened.pop_all()
        return split


def _open_part(opened: GGUFFile, stem: str, number: int, count: int) -> GGUFFile:
    path = opened.path.with_name(f"{stem}-{number:05d}-of-{count:05d}.gguf")
    if not path.is_file():
        raise FileFormatError(
            f"{opened.path}: the model is split into {count} parts, and {path.name!r} is missing; "
            "put all parts into one folder"
        )
    part = GGUFFile(path, stays_open=count <= MOST_OPEN)
    if (_number(part, "no"), _number(part, "count")) != (number - 1, count):
        part.close()
        raise FileFormatError(
            f"{path}: its metadata does not say that it is part {number} of {count}; it is another model's"
        )
    return part


def _require_one_run(files: list[GGUFFile]) -> None:
    """Refuse parts that were written by two runs, such as one that was killed while it replaced the other's."""
    runs: dict[str, GGUFFile] = {}
    for file in files:
        entry = file.metadata.get(_SPLIT + "run")
        if entry is not None:
            runs.setdefault(str(entry.value), file)
    if len(runs) > 1:
        first, second = list(runs.values())[:2]
        raise FileFormatError(
            f"{second.path}: is of another run than {first.path.name!r}: some parts were replaced and others not; "
            "write or download all parts again"
        )


def _number(file: GGUFFile, key: str, default: int | None = None) -> int:
    entry = file.metadata.get(_SPLIT + key)
    value: Any = default if entry is None else entry.value
    least = 1 if key == "count" else 0
    if type(value) is not int or not least <= value <= (MAX_PARTS if key != "tensors.count" else 2**31):
        raise FileFormatError(f"{file.path}: {_SPLIT}{key} must be a number from {least}, got {str(value)[:40]!r}")
    return value
