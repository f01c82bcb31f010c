"""Tensors that a search writes for itself and reads again: raw bytes in files of a scratch folder.

Statistics are as large as the model, so they are written and read at the speed of memory: without a header, without
waiting for the disk, and where a GPU computes, through page-locked memory, while the GPU goes on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from bitplan.errors import FileFormatError


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in a file; `written` is the work that puts it there, if it may not be done yet."""

    path: Path
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    written: Future[None] | None = field(default=None, repr=False, compare=False)

    def read(self) -> Tensor:
        """A fresh tensor in memory; page-locked where this process uses a GPU."""
        self.wait()
        nbytes, done = math.prod(self.shape) * self.dtype.itemsize, 0
        buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=_uses_gpu())
        view = buffer.numpy().data
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start)
            while done < nbytes:
                got = file.readinto(view[done:])
                if not got:
                    raise FileFormatError(
                        f"{self.path}: the file of a running search ends after {done} of {nbytes} bytes"
                    )
                done += got
        return buffer.view(self.dtype).reshape(self.shape)

    def wait(self) -> None:
        """Until it is written; a disk that is full is said here."""
        if self.written is not None:
            self.written.result()


class ScratchWriter:
    """Writes files of tensors, those of a GPU in the background: one file at a time, so that little waits in memory."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None

    def write(self, path: Path, tensors: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
        """Where each tensor will lie."""
        if self._last is not None:
            self._last.result()
        own = {key: _on_host(each.detach()) for key, each in tensors.items()}
        if any(each.is_cuda for each in tensors.values()):
            self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="bitplan-search-writes")
            self._last = self._pool.submit(_write, path, list(own.values()))
        else:
            _write(path, list(own.values()))
        places, start = {}, 0
        for key, each in own.items():
            places[key] = StoredTensor(path, start, tuple(each.shape), each.dtype, self._last)
            start += each.nbytes
        return places

    def close(self) -> None:
        """Until everything is written."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _write(path: Path, tensors: list[Tensor]) -> None:
    with path.open("wb", buffering=0) as file:
        for each in tensors:
            view, done = each.reshape(-1).view(torch.uint8).numpy().data, 0
            while done < len(view):
                done += file.write(view[done:])


def _on_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.cpu().contiguous()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def _uses_gpu() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
