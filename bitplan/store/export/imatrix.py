"""Reads llama.cpp's importance matrix: for every weight, the mean square of the inputs that met its columns.

`llama-imatrix` writes a GGUF file with two tensors for each weight: NAME.in_sum2 [matrices, columns] and NAME.counts
[matrices]. Names are GGUF's; experts of a layer share a name and have a row each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gguf.constants import GGUFValueType
from torch import Tensor

from bitplan.errors import FileFormatError
from bitplan.store.files.gguf_split import open_gguf
from bitplan.store.files.gguf_values import GGUFValue

_SUMS, _COUNTS = ".in_sum2", ".counts"


class ImportanceMatrix:
    """Open for reading; `keys` are what a quantized file says of it."""

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, open_gguf(path)
        self._names = [name.removesuffix(_SUMS) for name in self._file.tensors if name.endswith(_SUMS)]
        if not self._names:
            self._file.close()
            raise FileFormatError(f"{path}: no tensor ends in {_SUMS!r}, so not what llama-imatrix writes")

    @property
    def keys(self) -> dict[str, GGUFValue]:
        found = {
            "quantize.imatrix.file": GGUFValue(GGUFValueType.STRING, self.path.name),
            "quantize.imatrix.entries_count": GGUFValue(GGUFValueType.UINT32, len(self._names)),
        }
        datasets = self._said("imatrix.datasets")
        if datasets:
            found["quantize.imatrix.dataset"] = GGUFValue(GGUFValueType.STRING, str(datasets[0]))
        chunks = self._said("imatrix.chunk_count")
        if type(chunks) is int:
            found["quantize.imatrix.chunks_count"] = GGUFValue(GGUFValueType.UINT32, chunks)
        return found

    def of(self, name: str, columns: int) -> Tensor | None:
        """[matrices, columns] mean squares; None where the file has none for this weight, or no input reached it."""
        if name not in self._names:
            return None
        sums, counts = self._read(name + _SUMS), self._read(name + _COUNTS)
        matrices = counts.numel()
        if sums.numel() != matrices * columns or not bool((counts >= 0).all()) or not bool(sums.isfinite().all()):
            raise FileFormatError(
                f"{self.path}: {name!r} has {sums.numel()} sums over {matrices} counts, expected {columns} for each; "
                "the matrix is of another model: make it again"
            )
        mean = sums.reshape(matrices, columns) / counts.reshape(-1, 1).clamp(min=1)
        return torch.where(counts.reshape(-1, 1) > 0, mean, 1.0) if bool((counts > 0).any()) else None

    def close(self) -> None:
        self._file.close()

    def _said(self, key: str) -> Any:
        value = self._file.metadata.get(key)
        return None if value is None else value.value

    def _read(self, name: str) -> Tensor:
        if name not in self._file.tensors:
            raise FileFormatError(f"{self.path}: no tensor {name!r}; the file is damaged: make it again")
        return self._file.read_raw(name).reshape(-1).view(torch.float32)
