"""Tables that lie on the GPU already (torch's tensors, CuPy's arrays, all that speaks DLPack): trees are grown from
them, and predict them, without a copy of theirs on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from bitplan.trees.cuda.score_kernels import BLOCK, OPTIONS, add_trees
from bitplan.trees.gradients import Array, TreesError
from bitplan.trees.tree import Forest


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
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(str(self.numbers.dtype).removeprefix("torch."))

    @property
    def shape(self) -> tuple[int, int]:
        rows, features = self.numbers.shape
        return rows, features

    def astype(self, dtype: Any, copy: bool = True) -> CudaTable:
        return CudaTable(self.numbers.to(getattr(torch, np.dtype(dtype).name)))

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, rows: Array) -> CudaTable:
        chosen = torch.from_numpy(np.asarray(rows)).to(self.numbers.device)
        return CudaTable(self.numbers[chosen])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        on_host: Array = self.numbers.cpu().numpy()
        return on_host if dtype is None else on_host.astype(dtype)

    def add_trees(self, scores: Array, forest: Forest) -> Array:
        """Raw scores (rows, outputs) of the host with those of all trees, to the bit as the CPU adds them."""
        device, (count, outputs) = self.numbers.device, scores.shape
        parts = forest.roots, forest.leaf_starts, forest.feature, forest.values, forest.threshold
        parts += forest.missing_left.view(np.uint8), forest.category, forest.bits.view(np.int32)
        there = [
            torch.from_numpy(np.ascontiguousarray(part)).to(device) for part in (*parts, forest.left, forest.right)
        ]
        sums = torch.from_numpy(np.ascontiguousarray(scores)).to(device)
        sizes = count, len(forest.roots) - 1, outputs, forest.bits.shape[1]
        add_trees[(triton.cdiv(max(count, 1), BLOCK), outputs)](
            self.numbers, *there, sums, *sizes, *self.numbers.stride(), BLOCK=BLOCK, **OPTIONS
        )
        on_host: Array = sums.cpu().numpy()
        return on_host
