"""One round's gradients on the GPU, in float32; they are rounded when a tree enters its rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from bitplan.trees.cuda.score_kernels import enter_floats
from bitplan.trees.gradients import Array, GradientPrecision

BLOCK = 1024
ENDS = {GradientPrecision.I16: (127, 255), GradientPrecision.I8: (7, 15)}  # the largest codes


@dataclass(frozen=True)
class CudaGradients:
    """float32 gradients and hessians of all rows, and how they are to be rounded; no key: to nearest."""

    grads: Tensor
    hessians: Tensor
    ends: tuple[int, int]
    tops: tuple[float, float]
    key: int | None

    @property
    def grad_scale(self) -> float:
        return self.tops[0] / self.ends[0]

    @property
    def hess_scale(self) -> float:
        return self.tops[1] / self.ends[1]

    def enter(self, entries: Tensor, rows: Array | range) -> None:
        """Write the entries of some rows."""
        device = entries.device
        inverse = [end / top if top else 0.0 for end, top in zip(self.ends, self.tops, strict=True)]
        key = np.array([self.key or 0], np.uint64).view(np.int64)
        is_all = isinstance(rows, range)
        numbers = self.grads if is_all else torch.from_numpy(np.asarray(rows, np.int32)).to(device)
        enter_floats[(triton.cdiv(max(len(rows), 1), BLOCK),)](
            entries,
            self.grads,
            self.hessians,
            numbers,
            torch.tensor(inverse, dtype=torch.float64).to(device),
            torch.from_numpy(key).to(device),
            len(rows),
            MOST_GRAD=self.ends[0],
            MOST_HESS=self.ends[1],
            STOCHASTIC=self.key is not None,
            ALL=is_all,
            BLOCK=BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
