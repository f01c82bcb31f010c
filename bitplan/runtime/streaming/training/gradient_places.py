"""GradientPlaces: where the gradients of trained weights arrive on the host, the same memory in every step.

Memory that is new to the process is expensive: the kernel maps and clears each page at its first use, and a gradient of
180 MB takes longer for that than for crossing the bus. So a gradient is copied by the device straight to its own place,
in the type it has there, and stays in that type until AdamW reads it. A second gradient of the same weight in a step
(accumulation) needs float32: such sums have places of their own, made when they are first needed.

A place is free again when its gradient comes: the weight's forward of that step has waited for the update that read it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bitplan.kernels.adamw_torch import pieces
from bitplan.runtime.streaming.blocks.layout import ParameterSpec, Part, aligned
from bitplan.runtime.streaming.errors import StreamError
from bitplan.runtime.streaming.transfer.devices import StreamDevice
from bitplan.runtime.streaming.transfer.host_memory import exact_buffer

NUMBERS_ADDED_AT_A_TIME = 2**22
Key = tuple[str, str]  # block and parameter


class GradientPlaces:
    """The memory of one stream's gradients."""

    def __init__(self, device: StreamDevice, specs: Mapping[str, Mapping[str, ParameterSpec]], *, pinned: bool) -> None:
        """pinned: the device writes into the places; else into one pinned buffer, from which they are filled."""
        self.device, self.specs, self.pinned = device, specs, pinned
        self._places: dict[Key, Tensor] = {}
        self._wide: dict[Key, Tensor] = {}
        self._measured: Tensor | None = None  # one gradient in float32
        self._buffers = [self._block(block, parameters) for block, parameters in specs.items()]
        largest = max((spec.nbytes for parameters in specs.values() for spec in parameters.values()), default=0)
        self.staging = exact_buffer(largest)
        for buffer in [self.staging, *(self._buffers if pinned else ())]:
            device.pin(buffer)

    def _block(self, block: str, parameters: Mapping[str, ParameterSpec]) -> Tensor:
        parts, end = {}, 0
        for name, spec in parameters.items():
            parts[name] = Part(end, spec.dtype, spec.shape)
            end = aligned(end + spec.nbytes)
        buffer = exact_buffer(end)
        self._places |= {(block, name): part.view(buffer) for name, part in parts.items()}
        return buffer

    def target(self, key: Key, dtype: torch.dtype, *, is_first: bool) -> Tensor:
        """Memory that the device copies a gradient to."""
        place = self._places[key]
        if is_first and self.pinned and place.dtype == dtype:
            return place
        return self.staging[: place.numel() * dtype.itemsize].view(dtype).view(place.shape)

    def added(self, key: Key, arrived: Tensor, before: Tensor | None) -> Tensor:
        """The sum of a weight's gradients, after one that has arrived at its `target`."""
        if before is not None:
            wide = self.wide(key, before)
            for into, part in pieces((wide, arrived), NUMBERS_ADDED_AT_A_TIME):
                into.add_(part)  # another type is widened in memory of this size, which the process has already
            return wide
        place = self._places[key]
        return place if arrived.data_ptr() == place.data_ptr() else place.copy_(arrived)

    def wide(self, key: Key, gradient: Tensor) -> Tensor:
        """A gradient in float32: itself if it has this type, else a copy in memory of its own."""
        if gradient.dtype == torch.float32:
            return gradient
        if key not in self._wide:
            self._wide[key] = torch.empty(gradient.shape)
        return self._wide[key].copy_(gradient)

    def norm(self, gradient: Tensor) -> Tensor:
        """The norm of a gradient, computed in float32."""
        if gradient.dtype != torch.float32:
            if self._measured is None:
                sizes = [math.prod(spec.shape) for parameters in self.specs.values() for spec in parameters.values()]
                self._measured = torch.empty(max(sizes))
            gradient = self._measured[: gradient.numel()].view(gradient.shape).copy_(gradient)
        norm: Tensor = torch.linalg.vector_norm(gradient)
        return norm

    def close(self) -> None:
        for buffer in [self.staging, *self._buffers]:
            self.device.unpin(buffer)
        self._places.clear()
        self._wide.clear()
        self._measured = None
        self._buffers, self.staging = [], exact_buffer(0)


@dataclass(eq=False)
class StepGradients:
    """The gradients of one step as they arrive, by block and parameter; dropped when the step is over."""

    step: int
    places: GradientPlaces
    sums: dict[Key, Tensor] = field(default_factory=dict)
    factor: float = 1.0  # that AdamW multiplies all of them with, in float32
    expected: int = 0
    arrived: int = 0
    failure: Exception | None = None
    unfinished: set[int] = field(default_factory=set)  # backwards that have begun and not ended
    overflowed: bool | None = None  # None until `unscale_gradients` has looked

    def note_backward(self) -> None:
        """Within a backward: note that it has begun. Autograd calls back at its end, unless something in it failed."""
        task = torch._C._current_graph_task_id()
        if task not in self.unfinished:
            self.unfinished.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self.unfinished.discard(task))

    def require_backward_ended(self) -> None:
        if self.unfinished:
            raise StreamError(
                f"step {self.step}: a backward failed, so that only some weights have their gradients, and the step "
                "cannot be applied; begin_step drops it"
            )

    def apply_factor(self) -> None:
        """Multiply the gradients themselves, for clipping that was done before."""
        if self.factor != 1.0:
            for key, gradient in self.sums.items():
                self.sums[key] = self.places.wide(key, gradient).mul_(self.factor)
            self.factor = 1.0
