"""Memory where blocks wait on the host: pinned, pageable, or files.

pinned     one anonymous mapping a block, of exactly its size, registered with CUDA. torch's pin_memory() rounds up to a
           power of two: up to 1.8 times the RAM of a model.
pageable   the same, not registered: a copy goes through a pinned staging buffer on the transfer thread
file       one .safetensors file a block, read into the staging buffer. Read, not mapped: touching a mapped file
           that was cut short kills the process (SIGBUS); a read raises an error.
           The page cache makes a second read as fast as a mapping, and the kernel may drop it: so a model may be
           larger than RAM.

A host holds bytes in a BlockLayout and knows nothing of formats.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from bitplan.base.errors import StreamError, TransferError
from bitplan.files.safetensors import SafetensorsFile, write_safetensors
from bitplan.streaming.find_blocks import BlockLayout
from bitplan.streaming.transfer.devices import StreamDevice

HostKind = Literal["pinned", "pageable", "file"]
Fill = Callable[[Tensor], None]
TENSOR = "block"


class HostBlocks(ABC):
    """The interface of what holds every block's bytes on the host: in memory, or in files."""

    # Whether `source` needs a staging buffer to put the bytes in.
    needs_staging: bool

    @abstractmethod
    def put(self, block: str, layout: BlockLayout, fill: Fill) -> Tensor | None:
        """Hold a block, whose bytes `fill` writes. Returns the buffer if it stays in memory and may be viewed."""

    @abstractmethod
    def source(self, block: str, staging: Tensor | None) -> Tensor:
        """The bytes of a block, in memory that the device can copy from; may read a file."""

    def buffer(self, block: str, layout: BlockLayout) -> Tensor | None:
        """The bytes of a block, if they stay in memory and have this layout."""
        return None

    def lost(self) -> list[str]:
        """Blocks whose bytes are gone, to be `put` again."""
        return []

    @abstractmethod
    def close(self) -> None: ...


class MemoryHost(HostBlocks):
    """Keeps the bytes of all blocks in RAM."""

    def __init__(self, device: StreamDevice, *, pinned: bool) -> None:
        self._device, self._pinned = device, pinned
        self.needs_staging = not pinned
        self._buffers: dict[str, Tensor] = {}
        self._layouts: dict[str, BlockLayout] = {}

    def put(self, block: str, layout: BlockLayout, fill: Fill) -> Tensor:
        if self._layouts.get(block) == layout:
            fill(self._buffers[block])
            return self._buffers[block]
        # Another layout gets new memory, even of the same size: parameters may be views of the old memory.
        buffer = exact_buffer(layout.nbytes)
        fill(buffer)
        self._drop(block)
        self._buffers[block] = buffer
        if self._pinned:
            self._device.pin(buffer)
        self._layouts[block] = layout  # last: an interrupted block is made again
        return buffer

    def buffer(self, block: str, layout: BlockLayout) -> Tensor | None:
        return self._buffers[block] if self._layouts.get(block) == layout else None

    def source(self, block: str, staging: Tensor | None) -> Tensor:
        buffer = self._buffers[block]
        if staging is None:
            return buffer
        staged = staging[: buffer.nbytes]
        staged.copy_(buffer)
        return staged

    def close(self) -> None:
        """Unregister the memory from CUDA before it is unmapped; parameters may still be views of it."""
        for block in list(self._buffers):
            self._drop(block)

    def _drop(self, block: str) -> None:
        self._layouts.pop(block, None)
        buffer = self._buffers.get(block)
        if buffer is not None and self._pinned:
            self._device.unpin(buffer)
        self._buffers.pop(block, None)


class FileHost(HostBlocks):
    """Blocks in files of a folder: the given one, or a temporary one that is removed when the host is closed."""

    needs_staging = True

    def __init__(self, folder: str | Path | None) -> None:
        self._temporary = folder is None
        self.folder = Path(tempfile.mkdtemp(prefix="bitplan-blocks-") if folder is None else folder)
        if not self.folder.is_dir():
            raise StreamError(f"{self.folder}: no such folder; host='file' writes one file a block into `host_folder`")
        self._files: dict[str, tuple[int, int, int]] = {}  # descriptor, offset, bytes
        self._lost: set[str] = set()

    def path_of(self, block: str) -> Path:
        return self.folder / f"{block or 'block'}.safetensors"

    def put(self, block: str, layout: BlockLayout, fill: Fill) -> None:
        buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
        fill(buffer)
        path = self.path_of(block)
        pieces = {
            name: {"format": piece.fmt.name, "shape": piece.spec.shape, "offset": piece.parts["data"].offset}
            for name, piece in layout.pieces.items()
        }
        metadata = {"bitplan_block_layout": json.dumps(pieces, separators=(",", ":"))}
        with write_safetensors(path, [(TENSOR, torch.uint8, (layout.nbytes,))], metadata) as writer:
            writer.write(TENSOR, buffer)
        self._forget(block)
        with SafetensorsFile(path) as file:
            start = file.tensors[TENSOR].start
        self._files[block] = os.open(path, os.O_RDONLY), start, layout.nbytes
        self._lost.discard(block)

    def source(self, block: str, staging: Tensor | None) -> Tensor:
        assert staging is not None
        descriptor, start, nbytes = self._files[block]
        view, done = staging.numpy().data, 0
        try:
            while done < nbytes:
                got = os.preadv(descriptor, [view[done:nbytes]], start + done)
                if not got:
                    raise TransferError(
                        f"{self.path_of(block)}: holds {done} of the {nbytes} bytes of {block}; it was cut short "
                        "or replaced while in use; begin_step writes it again"
                    )
                done += got
        except BaseException:
            self._lost.add(block)
            raise
        return staging[:nbytes]

    def lost(self) -> list[str]:
        return sorted(self._lost)

    def close(self) -> None:
        for block in list(self._files):
            self._forget(block)
        if self._temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _forget(self, block: str) -> None:
        if block in self._files:
            os.close(self._files.pop(block)[0])


def open_host(kind: HostKind, device: StreamDevice, folder: str | Path | None) -> HostBlocks:
    if kind not in ("pinned", "pageable", "file"):
        raise StreamError(f"host={kind!r}: there are 'pinned', 'pageable' and 'file'")
    if kind == "file":
        return FileHost(folder)
    if folder is not None:
        raise StreamError(f"host_folder={str(folder)!r} goes with host='file', got host={kind!r}")
    return MemoryHost(device, pinned=kind == "pinned")


def exact_buffer(nbytes: int) -> Tensor:
    """Zeroed, page-aligned memory of exactly this size; freed when the last view of it goes.

    It is a shared mapping: a fork (a DataLoader's worker) must not move pages that the copy engine reads.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
