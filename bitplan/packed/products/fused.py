"""Finds the fused product for a device: one interface for the CPU's and the GPU's.

"Fused" is a kernel that reads packed weights and never writes an expanded one: a Triton kernel on CUDA, numba's or
torch's on a CPU (`cpu_fused`). Each may need tensors that are made once per weight (`prepare`), such as scales in its
own order; only the kernel knows what they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from bitplan.formats import Encoded
from bitplan.formats.format import Format
from bitplan.packed.products.cpu_fused import FusedOnCpu, IntegersOnCpu, RoundedFirst

Launch = Mapping[str, int]
Prepared = tuple[Tensor, ...]  # at most three tensors that a kernel made from a weight
Bound = Callable[[Tensor, tuple[int, ...]], Tensor | None]  # x, the result's shape -> the result; None: x does not fit
BoundInto = Callable[[Tensor, Tensor], bool]  # x, the result to be written -> whether they fit and it was written


class FusedMatmul(Protocol):
    """A kernel for x @ W.T + bias over a packed W."""

    name: str

    def why_not(self, weight: Encoded, dtype: torch.dtype) -> str | None:
        """Why the kernel cannot run for inputs of this type; None if it can."""

    def prepare(self, weight: Encoded) -> Prepared:
        """The tensors that the kernel reads beside the weight, or instead of it."""

    def join(self, parts: Sequence[Prepared]) -> Prepared | None:
        """The prepared tensors of weights that lie one below the other in one matrix; None if it cannot join them."""

    def launches(self, weight: Encoded, rows: int) -> Sequence[Launch]:
        """Launches that are worth measuring; empty if there is only one."""

    def run(
        self, x_MK: Tensor, weight: Encoded, prepared: Prepared, bias: Tensor | None, launch: Launch | None
    ) -> Tensor:
        """The product, in the type of x."""

    def bind(
        self, x_MK: Tensor, weight: Encoded, prepared: Prepared, bias: Tensor | None, launch: Launch | None
    ) -> Bound | None:
        """A call that gives the same for other x of this shape and checks nothing anew; None if there is none.

        It is valid on the present stream, as long as weight and bias stay where they are.
        """

    def note(self, weight: Encoded) -> str:
        """What a user should know of its results and memory."""


class TritonOnCuda:
    """The Triton kernel, imported at first use, because that loads Triton."""

    name = "the Triton kernel"

    def __init__(self) -> None:
        from bitplan.packed.products import fused_few_rows

        self._kernel: Any = fused_few_rows

    def why_not(self, weight: Encoded, dtype: torch.dtype) -> str | None:
        if weight.fmt.name not in self._kernel.FUSED_FORMATS:
            return f"the Triton kernel has no {weight.fmt.name}"
        reason: str | None = self._kernel.why_not_fused(weight, dtype)
        return reason

    def prepare(self, weight: Encoded) -> Prepared:
        prepared: Prepared = self._kernel.arrange_scales(weight)
        return prepared

    def join(self, parts: Sequence[Prepared]) -> Prepared | None:
        joined: Prepared | None = self._kernel.join_scales([self._kernel.ArrangedScales(*part) for part in parts])
        return joined

    def launches(self, weight: Encoded, rows: int) -> Sequence[Launch]:
        return [launch.to_dict() for launch in self._kernel.candidate_launches(weight, rows)]

    def run(
        self, x_MK: Tensor, weight: Encoded, prepared: Prepared, bias: Tensor | None, launch: Launch | None
    ) -> Tensor:
        if bias is not None and bias.dtype not in (torch.bfloat16, torch.float32):
            bias = bias.float()
        how = self._launch(weight, x_MK.shape[0], launch)
        arranged = self._kernel.ArrangedScales(*prepared)
        y: Tensor = self._kernel.fused_matmul(x_MK.contiguous(), weight, arranged, bias, launch=how)
        return y

    def bind(
        self, x_MK: Tensor, weight: Encoded, prepared: Prepared, bias: Tensor | None, launch: Launch | None
    ) -> Bound | None:
        bound = self._bind(x_MK, weight, prepared, bias, launch)
        return None if bound is None else _bound_call(x_MK, weight.shape[0], *bound)

    def bind_into(
        self, x_MK: Tensor, weight: Encoded, prepared: Prepared, bias: Tensor | None, launch: Launch | None
    ) -> BoundInto | None:
        """Bind as `bind` does, for results whose memory is given, on whichever stream is present at the call."""
        bound = self._bind(x_MK, weight, prepared, bias, launch)
        return None if bound is None else _bound_call_into(x_MK, weight.shape[0], *bound)

    def _bind(
        self, x_MK: Tensor, weight: Encoded, prepared: Prepared, bias: Tensor | None, launch: Launch | None
    ) -> tuple[Callable[..., None], int] | None:
        """What launches the product, and its split."""
        if not x_MK.is_cuda or (bias is not None and bias.dtype not in (torch.bfloat16, torch.float32)):
            return None
        how = self._launch(weight, x_MK.shape[0], launch)
        arranged = self._kernel.ArrangedScales(*prepared)
        bound: tuple[Callable[..., None], int] | None = self._kernel.bind_matmul(x_MK, weight, arranged, bias, how)
        return bound

    def _launch(self, weight: Encoded, rows: int, launch: Launch | None) -> Any:
        if launch is None:
            return self._kernel.default_launch(weight, rows) if rows else None
        return self._kernel.MatmulLaunch.from_dict(dict(launch))

    def note(self, weight: Encoded) -> str:
        return "sums in float32"


def _bound_call(x_MK: Tensor, outputs: int, launch: Callable[..., None], split: int) -> Bound:
    """A call that allocates the result, and memory for the parts of a split, and launches."""
    from bitplan.base.loops.launch import current_device, current_stream, empty_on_gpu

    index, stream = x_MK.get_device(), current_stream(x_MK.get_device())
    parts = (split, x_MK.shape[0], outputs)
    dtype, part_strides = torch.bfloat16, _strides(parts)

    def run(x: Tensor, shape: tuple[int, ...]) -> Tensor | None:
        address = x.data_ptr()
        if address & 15 or not x.is_contiguous() or current_stream(index) != stream or current_device() != index:
            return None
        out = empty_on_gpu(shape, _strides(shape), dtype)
        if split == 1:
            launch(stream, address, out.data_ptr(), 0)
        else:
            launch(stream, address, out.data_ptr(), empty_on_gpu(parts, part_strides, torch.float32).data_ptr())
        return out

    return run


@functools.lru_cache(4096)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of contiguous memory."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _bound_call_into(x_MK: Tensor, outputs: int, launch: Callable[..., None], split: int) -> BoundInto:
    """A call that launches; x is contiguous, and its device the present one."""
    from bitplan.base.loops.launch import current_stream, empty_on_gpu

    index = x_MK.get_device()
    parts = (split, x_MK.shape[0], outputs)
    part_strides = _strides(parts)

    def run(x: Tensor, out: Tensor) -> bool:
        address, target = x.data_ptr(), out.data_ptr()
        if (address | target) & 15:
            return False
        if split == 1:
            launch(current_stream(index), address, target, 0)
        else:
            room = empty_on_gpu(parts, part_strides, torch.float32)
            launch(current_stream(index), address, target, room.data_ptr())
        return True

    return run


_kernels: dict[tuple[str, str | None], FusedMatmul | None] = {}


def fused_for(device_type: str, input: str | None = None) -> FusedMatmul | None:
    """The fused product of a kind of device, for inputs that are rounded to a format or None; None: there is none."""
    key = device_type, input
    if key not in _kernels:
        _kernels[key] = _find(device_type, input)
    return _kernels[key]


def _find(device_type: str, input: str | None) -> FusedMatmul | None:
    if device_type == "cpu":
        return FusedOnCpu() if input is None else IntegersOnCpu(input)
    if device_type != "cuda":
        return None
    try:
        return TritonOnCuda() if input is None else RoundedFirst(TritonOnCuda(), input)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "triton":
            raise
        return None


def arranged_bytes(fmt: Format, shape: tuple[int, ...]) -> int:
    """Bytes of what `arrange_scales` makes of a weight [..., N, K] and holds beside it; 0 where it is not fused."""
    from bitplan.packed.products.fused_weights import FUSED_FORMATS, WIDEST_STEP

    if fmt.name not in FUSED_FORMATS or len(shape) < 2:
        return 0
    experts, outputs = math.prod(shape[:-2]), shape[-2]
    counters = 32 * -(-outputs // 16)
    if fmt.block.cols is None:  # of whole rows they stay where they are, but for FP8's
        return counters + (4 * experts * outputs if fmt.name == "fp8_e4m3_row" else 0)
    dtype, (*_, groups) = fmt.part_shapes(shape)["scales"]
    multiple = 1 if fmt.block.cols == 128 else WIDEST_STEP // fmt.block.cols
    return counters + experts * outputs * -(-groups // multiple) * multiple * dtype.itemsize
