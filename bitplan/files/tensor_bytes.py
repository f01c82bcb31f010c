"""What the safetensors and GGUF modules share: exact reads, and payloads of promised sizes.

Both containers are a header that lists tensors, then their bytes. Memory must stay bounded by the largest tensor, so a
file is never mapped: each read goes from its offset straight into the storage of the tensor that is returned. A write
states all sizes first, which fixes the header and every offset, and then writes the payloads one by one, in any order:
in a file sorted by alignment the parts of one tensor lie apart. If a caller does not write what it stated, the old file
stays in place.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Generic, TypeVar

from bitplan.base.errors import FileFormatError, StoreError, did_you_mean
from bitplan.base.records import Closing, check_input, on_failure, require_unchanged, stamps_of
from bitplan.plan.structure.model_view import TensorSpec

if TYPE_CHECKING:
    import torch

    Data = torch.Tensor | bytes | bytearray | memoryview


Entry = TypeVar("Entry", bound=TensorSpec)
CHECKSUM_PIECE = 2**24
MOST_OPEN = 256  # shards or parts of one checkpoint; systems allow a process as few as 1024 files


class ContainerFile(Closing, ABC, Generic[Entry]):
    """The base of readers: a file that stays open, whose whole header was checked first."""

    tensors: Mapping[str, Entry]
    checksums: Mapping[str, int]  # of every tensor, or of none

    def __init__(self, path: str | Path, *, stays_open: bool = True) -> None:
        """Open a file and check its header; without `stays_open` it is opened again for every read."""
        self.path = Path(path)
        check_input(self.path)
        self._file = self.path.open("rb")
        self._lock = threading.Lock()
        self._is_closed = False
        with on_failure(self.close):
            self._size = os.fstat(self._file.fileno()).st_size
            self._read_header()
        if not stays_open:
            self._stamps = stamps_of([self.path])
            self._file.close()

    @abstractmethod
    def _read_header(self) -> None: ...

    def close(self) -> None:
        self._is_closed = True
        self._file.close()

    def is_damaged(self, name: str) -> bool:
        """Whether a tensor's bytes are not those that were written; False where the file has no checksums."""
        entry = self._entry(name)
        expected = self.checksums.get(name)
        return expected is not None and self._checksum(f"tensor {name!r}", entry.start, entry.nbytes) != expected

    def _entry(self, name: str) -> Entry:
        if name not in self.tensors:
            raise StoreError(f"{self.path}: no tensor {name!r}{did_you_mean(name, self.tensors)}")
        return self.tensors[name]

    def _read_rows(self, name: str, first: int, row_bytes: int, rows: int, start: int, stop: int) -> torch.Tensor:
        """The bytes of rows start..stop of a tensor of `rows` rows that begins at offset `first`."""
        if not 0 <= start <= stop <= rows:
            raise StoreError(f"{self.path}: tensor {name!r} has {rows} rows; rows {start} to {stop} are not among them")
        return self._read_exactly(f"tensor {name!r}", first + start * row_bytes, (stop - start) * row_bytes)

    def _read_exactly(self, label: str, offset: int, nbytes: int) -> torch.Tensor:
        """A fresh uint8 tensor with exactly these bytes of the file."""
        import torch

        buffer = torch.empty(nbytes, dtype=torch.uint8)
        self._fill(buffer.numpy().data, label, offset)
        return buffer

    def _checksum(self, label: str, offset: int, nbytes: int) -> int:
        """The CRC-32 of these bytes of the file, read a piece at a time; needs no torch."""
        checksum, buffer = 0, memoryview(bytearray(min(nbytes, CHECKSUM_PIECE)))
        for start in range(0, nbytes, CHECKSUM_PIECE):
            piece = buffer[: min(CHECKSUM_PIECE, nbytes - start)]
            self._fill(piece, label, offset + start)
            checksum = zlib.crc32(piece, checksum)
        return checksum

    def _read_bytes(self, label: str, offset: int, nbytes: int) -> bytes:
        """Read bytes of the file without torch, for headers."""
        buffer = bytearray(nbytes)
        self._fill(memoryview(buffer), label, offset)
        return bytes(buffer)

    def _fill(self, view: memoryview, label: str, offset: int) -> None:
        if self._is_closed:
            raise StoreError(f"{self.path}: {label} was asked for after the file was closed")
        if not self._file.closed:
            self._fill_from(self._file, view, label, offset)
            return
        require_unchanged(self._stamps)
        with self.path.open("rb") as file:
            self._fill_from(file, view, label, offset)

    def _fill_from(self, file: BinaryIO, view: memoryview, label: str, offset: int) -> None:
        nbytes, done = len(view), 0
        while done < nbytes:
            got = self._read_at(file, view[done:], offset + done)
            if not got:
                raise FileFormatError(
                    f"{self.path}: {label} needs {nbytes} bytes at offset {offset}, the file ends after {done} of "
                    "them; it is cut short: copy or download it again"
                )
            done += got

    def _read_at(self, file: BinaryIO, view: memoryview, offset: int) -> int:
        # A positioned read shares no file offset with other threads or forked workers.
        if hasattr(os, "preadv"):
            return os.preadv(file.fileno(), [view], offset)
        with self._lock:
            file.seek(offset)
            return file.readinto(view)  # type: ignore[attr-defined, no-any-return]


CERTIFICATE = "bitplan_evidence"  # metadata: a JSON document, with the file's own hash in it
DOCUMENT = "bitplan-certificate"
SEAL = "sha256-of-this-file".ljust(64, "=")  # where that hash comes; the file is hashed with this in its place
_HASHED_AT_ONCE = 2**22


def take_certificate(metadata: dict[str, Any]) -> str | None:
    """Remove the certificate from a file's metadata and return it; under a damaged key it is known by what it says."""
    for key, value in metadata.items():
        text = getattr(value, "value", value)  # of GGUF, or a text
        if key == CERTIFICATE or (isinstance(text, str) and text.startswith(f'{{"document":"{DOCUMENT}"')):
            del metadata[key]
            return str(text)
    return None


def sealed_sha256(path: str | Path, seal: str = SEAL) -> str | None:
    """The hash of a file that holds its own, with `SEAL` in its place; None where the file does not hold it."""
    digest, rest, overlap = hashlib.sha256(), b"", len(SEAL) - 1  # bytes in which the place may begin
    with open(path, "rb") as file:
        while piece := file.read(_HASHED_AT_ONCE):
            rest += piece
            if overlap and seal.encode() in rest:
                rest, overlap = rest.replace(seal.encode(), SEAL.encode(), 1), 0
            digest.update(rest[: len(rest) - overlap])
            rest = rest[len(rest) - overlap :] if overlap else b""
    return None if overlap else digest.hexdigest()


def parse_checksums(text: str, names: Sequence[str], where: str) -> dict[str, int]:
    """The checksum of every tensor, 8 digits each in the order of the file.

    None where there are others: another program has copied the metadata into a file of other tensors.
    """
    if not re.fullmatch("[0-9a-f]*", text):
        raise FileFormatError(
            f"{where} must be 8 hexadecimal digits for each tensor, got {text[:40]!r}; copy or write the file again"
        )
    if len(text) != 8 * len(names):
        return {}
    return {name: int(text[8 * at : 8 * at + 8], 16) for at, name in enumerate(names)}


class PayloadWriter:
    """Puts payloads at the places that the header states, in any order; gaps between them are zeros."""

    def __init__(
        self,
        file: BinaryIO,
        path: str | Path,
        tensors: Sequence[TensorSpec],
        size: int,
        header: bytes,
        checksums: bool,
    ) -> None:
        """Take over a file that has its header; with `checksums` those of payloads are kept for `fill`."""
        self.path = Path(path)
        self._header = header
        self.checksums = dict.fromkeys((spec.name for spec in tensors), 0) if checksums else None
        self.order = tuple(spec.name for spec in tensors)  # writing in this order never seeks back
        self._file = file
        self._payloads = {spec.name: spec for spec in tensors}
        self._written = dict.fromkeys(self._payloads, 0)
        file.truncate(size)

    def write(self, name: str, data: Data) -> None:
        """Write one whole tensor: a tensor of the promised dtype and shape, or its raw bytes."""
        import torch

        payload = self._promised(name)
        view = self._bytes(payload, data)
        if isinstance(data, torch.Tensor) and tuple(data.shape) != payload.accepts[data.dtype]:
            expected = payload.accepts[data.dtype]
            raise StoreError(f"{self.path}: tensor {name!r} was promised as {expected}, came as {tuple(data.shape)}")
        if len(view) != payload.nbytes or self._written[name]:
            raise StoreError(
                f"{self.path}: tensor {name!r} was promised with {payload.nbytes} bytes, "
                f"write() came with {len(view)} after {self._written[name]}; use write_chunk for parts"
            )
        self._put(payload, view)

    def write_chunk(self, name: str, data: Data) -> None:
        """Write the next bytes of one tensor; the tensor is complete when its last byte came."""
        payload = self._promised(name)
        view = self._bytes(payload, data)
        if self._written[name] + len(view) > payload.nbytes:
            raise StoreError(
                f"{self.path}: tensor {name!r} was promised with {payload.nbytes} bytes, "
                f"{self._written[name]} came and {len(view)} more are too many"
            )
        self._put(payload, view)

    def fill(self, placeholder: bytes, value: bytes) -> None:
        """Replace bytes of the header by others of the same length, which are known when the payloads are."""
        assert len(placeholder) == len(value)
        self._file.seek(self._header.index(placeholder))
        self._file.write(value)

    def fill_checksums(self, before: bytes) -> None:
        """Put the checksums of all payloads where the header has zeros for them behind these bytes."""
        digits = "".join(f"{checksum:08x}" for checksum in (self.checksums or {}).values())
        self.fill(before + b"0" * len(digits), before + digits.encode())

    def seal(self) -> None:
        """Put the file's own hash where its certificate has a place for it: the last that is written."""
        if SEAL.encode() in self._header:
            self._file.flush()
            self.fill(SEAL.encode(), str(sealed_sha256(self._file.name)).encode())

    def finish(self) -> None:
        """Check that every promised byte was written."""
        for name, payload in self._payloads.items():
            if self._written[name] != payload.nbytes:
                raise StoreError(
                    f"{self.path}: tensor {name!r} was promised with {payload.nbytes} bytes, "
                    f"{self._written[name]} came; the file was not written"
                )

    def _promised(self, name: str) -> TensorSpec:
        if name not in self._payloads:
            raise StoreError(
                f"{self.path}: tensor {name!r} came but was not promised{did_you_mean(name, self._payloads)}"
            )
        return self._payloads[name]

    def _bytes(self, payload: TensorSpec, data: Data) -> memoryview:
        import torch

        if isinstance(data, torch.Tensor):
            if data.dtype not in payload.accepts:
                expected = " or ".join(map(str, payload.accepts))
                raise StoreError(
                    f"{self.path}: tensor {payload.name!r} was promised as {expected}, came as {data.dtype}"
                )
            plain = data.detach().resolve_conj().resolve_neg().cpu().contiguous()
            data = plain.reshape(-1).view(torch.uint8).numpy().data
        view = memoryview(data)
        return view.cast("B") if view.nbytes else memoryview(b"")

    def _put(self, payload: TensorSpec, view: memoryview) -> None:
        self._file.seek(payload.start + self._written[payload.name])
        self._file.write(view)
        self._written[payload.name] += len(view)
        if self.checksums is not None:
            self.checksums[payload.name] = zlib.crc32(view, self.checksums[payload.name])
