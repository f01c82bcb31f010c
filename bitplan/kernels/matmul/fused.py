"""Finds the fused product for a device: one interface over the CPU's and the GPU's.

"Fused" is a kernel that reads packed weights and never writes an expanded one: a Triton kernel on CUDA, numba's or
torch's on a CPU (`cpu_fused`). Each may want something made once per weight (`prepare`), such as scales in an order of
its own; what that is, only the kernel knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from bitplan.formats import Encoded
from bitplan.kernels.matmul.cpu_fused import FusedOnCpu

Launch = Mapping[str, int]


class FusedMatmul(Protocol):
    """A kernel for x @ W.T + bias over a packed W."""

    name: str

    def why_not(self, weight: Encoded, dtype: torch.dtype) -> str | None:
        """Why it cannot run for inputs of this type; None if it can."""

    def prepare(self, weight: Encoded) -> Any:
        """What it reads beside the weight, or instead of it."""

    def launches(self, weight: Encoded, rows: int) -> Sequence[Launch]:
        """Ways to run it that are worth measuring; empty where there is only one."""

    def run(self, x_MK: Tensor, weight: Encoded, prepared: Any, bias: Tensor | None, launch: Launch | None) -> Tensor:
        """The product, in the type of x."""

    def note(self, weight: Encoded) -> str:
        """What a user should know of its results and memory."""


class TritonOnCuda:
    """The Triton kernel; importing it loads Triton, so that happens here and only when it is asked for."""

    name = "the Triton kernel"

    def __init__(self) -> None:
        from bitplan.kernels.matmul import fused_few_rows

        self._kernel: Any = fused_few_rows

    def why_not(self, weight: Encoded, dtype: torch.dtype) -> str | None:
        if weight.fmt.name not in self._kernel.FUSED_FORMATS:
            return f"the Triton kernel has no {weight.fmt.name}"
        reason: str | None = self._kernel.why_not_fused(weight, dtype)
        return reason

    def prepare(self, weight: Encoded) -> Any:
        return self._kernel.arrange_scales(weight)

    def launches(self, weight: Encoded, rows: int) -> Sequence[Launch]:
        return [launch.to_dict() for launch in self._kernel.candidate_launches(weight, rows)]

    def run(self, x_MK: Tensor, weight: Encoded, prepared: Any, bias: Tensor | None, launch: Launch | None) -> Tensor:
        if bias is not None and bias.dtype not in (torch.bfloat16, torch.float32):
            bias = bias.float()
        how = None if launch is None else self._kernel.MatmulLaunch.from_dict(dict(launch))
        y: Tensor = self._kernel.fused_matmul(x_MK.contiguous(), weight, prepared, bias, launch=how)
        return y

    def note(self, weight: Encoded) -> str:
        return "sums in float32"


_by_device: dict[str, FusedMatmul | None] = {}


def fused_for(device_type: str) -> FusedMatmul | None:
    """The fused product of a kind of device; None where there is none."""
    if device_type not in _by_device:
        _by_device[device_type] = _find(device_type)
    return _by_device[device_type]


def _find(device_type: str) -> FusedMatmul | None:
    if device_type == "cpu":
        return FusedOnCpu()
    if device_type != "cuda":
        return None
    try:
        return TritonOnCuda()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "triton":
            raise
        return None
