"""Tables that lie on the GPU already (torch's tensors, CuPy's arrays, all that speaks DLPack): trees are grown from
them, and predict them, without a copy of theirs on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitplan.trees.gradients import Array, TreesError


@dataclass(frozen=True)
class CudaTable:
    """Numbers (rows, features), float32 or float64; as an array it is a copy on the host."""

    numbers: Tensor

    @classmethod
    def of(cls, given: Any) -> CudaTable:
        """A table on the GPU, checked: its form, its type, and that no number is infinite."""
        numbers = torch.from_dlpack(given) if not isinstance(given, Tensor) else given.detach()
        if numbers.ndim != 2 or numbers.dtype not in (torch.float32, torch.float64):
            raise TreesError(
                f"X: expected float32 or float64 of two dimensions on the GPU, got {numbers.dtype} of shape "
                f"{tuple(numbers.shape)}; convert it there (X.to(torch.float32), X.astype('float32'))"
            )
        if bool(torch.isinf(numbers).any()):
            raise TreesError("X: expected finite numbers or NaN, got infinity; replace it (torch.nan_to_num)")
        return cls(numbers)

    @property
    def shape(self) -> tuple[int, int]:
        rows, features = self.numbers.shape
        return rows, features

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, rows: Array) -> CudaTable:
        chosen = torch.from_numpy(np.asarray(rows)).to(self.numbers.device)
        return CudaTable(self.numbers[chosen])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        on_host: Array = self.numbers.cpu().numpy()
        return on_host if dtype is None else on_host.astype(dtype)
