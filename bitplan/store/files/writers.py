"""Writing files of weights: what will come is stated first, then tensors come one at a time.

Stating sizes first fixes the header, so that nothing is kept in memory; every writer is atomic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from bitplan.errors import StoreError
from bitplan.formats import Encoded, Format, repack
from bitplan.formats.dtypes import dtype_name
from bitplan.store.files.container import PayloadWriter
from bitplan.store.files.headers import SUFFIXES
from bitplan.store.files.open_files import GGUF_FORMATS, METADATA_KEY, format_metadata, part_name
from bitplan.store.files.safetensors import write_safetensors

# The formats GGUF can hold; mxfp4 is repacked into GGUF's byte order, value for value.
GGUF_TYPES = {ours: theirs for theirs, ours in GGUF_FORMATS.items()} | {
    "mxfp4": "MXFP4",
    "float32": "F32",
}
_GGUF_PLAIN = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
}


@dataclass(frozen=True)
class Promise:
    """A tensor that will come: in a format, or plain (fmt None) with its dtype."""

    name: str
    shape: tuple[int, ...]
    fmt: Format | None = None
    dtype: torch.dtype = torch.float32

    @property
    def nbytes(self) -> int:
        if self.fmt is not None:
            return self.fmt.nbytes(self.shape)
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Writer(Protocol):
    def write(self, name: str, item: Tensor | Encoded) -> None: ...


class _NativeWriter:
    def __init__(self, parts: PayloadWriter) -> None:
        self._parts = parts

    def write(self, name: str, item: Tensor | Encoded) -> None:
        parts = item.parts if isinstance(item, Encoded) else {"data": item}
        for part, tensor in parts.items():
            self._parts.write(part_name(name, part), tensor)


@contextmanager
def write_native(
    path: str | Path,
    promises: Sequence[Promise],
    *,
    metadata: Mapping[str, str] | None = None,
    tied: Mapping[str, str] | None = None,
) -> Iterator[Writer]:
    """A safetensors file with packed payloads; tensors may come in any order."""
    entries: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
    packed = {}
    names = {promise.name for promise in promises}
    for promise in promises:
        if promise.fmt is None:
            entries.append((promise.name, promise.dtype, promise.shape))
            continue
        packed[promise.name] = (promise.fmt, promise.shape)
        for part, (dtype, shape) in promise.fmt.part_shapes(promise.shape).items():
            own = part_name(promise.name, part)
            if part != "data" and own in names:
                raise StoreError(
                    f"{path}: two tensors would be {own!r}: the {part} of {promise.name!r} in {promise.fmt.name}, and "
                    f"the one of that name; leave {promise.name!r} as it is (--keep {promise.name!r}), or rename one"
                )
            entries.append((own, dtype, shape))
    extra = dict(metadata or {})
    if packed or tied:
        extra[METADATA_KEY] = format_metadata(packed, tied or {})
    with write_safetensors(path, entries, extra) as parts:
        yield _NativeWriter(parts)


class _GGUFWriter:
    def __init__(self, payloads: PayloadWriter) -> None:
        self._payloads = payloads

    def write(self, name: str, item: Tensor | Encoded) -> None:
        if isinstance(item, Encoded):
            if item.fmt.name == "mxfp4":
                item = repack(item, "mxfp4_gguf")
            self._payloads.write(name, item.data if item.fmt.is_cast else item.to_bytes())
        else:
            self._payloads.write(name, item)


@contextmanager
def write_gguf_tensors(
    path: str | Path, promises: Sequence[Promise], *, metadata: Mapping[str, Any] | None = None
) -> Iterator[Writer]:
    """A GGUF file; metadata values are `GGUFValue`, kept as they came from another GGUF file."""
    from gguf import GGMLQuantizationType, GGUFValueType

    from bitplan.store.files.gguf import write_gguf
    from bitplan.store.files.gguf_values import GGUFValue

    values = dict(metadata or {"general.architecture": GGUFValue(GGUFValueType.STRING, "bitplan")})
    entries = [(promise.name, GGMLQuantizationType[_gguf_type(promise, path)], promise.shape) for promise in promises]
    with write_gguf(path, entries, values) as payloads:
        yield _GGUFWriter(payloads)


def _gguf_type(promise: Promise, path: str | Path) -> str:
    if promise.fmt is None:
        if promise.dtype not in _GGUF_PLAIN:
            raise StoreError(f"{path}: GGUF has no {dtype_name(promise.dtype)} ({promise.name!r}); write .safetensors")
        return _GGUF_PLAIN[promise.dtype]
    if promise.fmt.name not in GGUF_TYPES:
        raise StoreError(
            f"{path}: GGUF cannot hold {promise.fmt.name} ({promise.name!r}); "
            f"it holds {', '.join(GGUF_TYPES)}; write .safetensors for the others"
        )
    row, block = promise.shape[-1] if promise.shape else 1, promise.fmt.block.cols or 1
    if row % block:
        raise StoreError(
            f"{path}: GGUF's blocks of {block} lie along the last axis and are never filled, and {promise.name!r} has "
            f"{row} there; leave it as it is (--keep {promise.name!r}), or write .safetensors"
        )
    return GGUF_TYPES[promise.fmt.name]


class _PolyWriter:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor | Encoded] = {}

    def write(self, name: str, item: Tensor | Encoded) -> None:
        self.tensors[name] = item


@contextmanager
def write_poly_tensors(path: str | Path, promises: Sequence[Promise]) -> Iterator[Writer]:
    """Poly's JSON. A JSON document is written in one piece, so all tensors are held until the end."""
    from bitplan.store.files.poly_json import PolyNetwork, write_poly_json

    writer = _PolyWriter()
    yield writer
    missing = [promise.name for promise in promises if promise.name not in writer.tensors]
    if missing:
        raise StoreError(f"{path}: {len(missing)} tensors were promised and never came, {missing[0]!r} first")
    write_poly_json(path, PolyNetwork.from_tensors({p.name: writer.tensors[p.name] for p in promises}))


@contextmanager
def write_tensors(
    path: str | Path,
    promises: Sequence[Promise],
    *,
    metadata: Mapping[str, str] | None = None,
    tied: Mapping[str, str] | None = None,
    gguf_metadata: Mapping[str, Any] | None = None,
) -> Iterator[Writer]:
    """The writer that the file's suffix asks for: .safetensors, .gguf or .json (poly's)."""
    suffix = Path(path).suffix
    if suffix == ".safetensors":
        with write_native(path, promises, metadata=metadata, tied=tied) as writer:
            yield writer
    elif suffix == ".gguf":
        with write_gguf_tensors(path, promises, metadata=gguf_metadata) as writer:
            yield writer
    elif suffix == ".json":
        with write_poly_tensors(path, promises) as writer:
            yield writer
    else:
        raise StoreError(
            f"{path}: the suffix says what to write, {', '.join(SUFFIXES)} (a folder takes a sharded source); "
            f"got {suffix!r}"
        )
