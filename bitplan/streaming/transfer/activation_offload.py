"""ActivationOffload: a block's input waits in pinned memory between its forward and its backward.

    forward    input -> outgoing buffer, on the computing stream; from there to the host while the block computes
    backward   host -> landing buffer, ahead of the block; copied out of it when the block is computed again

Every block is checkpointed here, as a region of its own, so only its input must be kept. (Other checkpointing would
hold the input before we see it: such models are refused.) Between forward and backward the device holds only the input
of the last block, which would come straight back.

The device has two buffers for each direction, and the arena on the host one buffer for each input that is out at the
same time: both grow in the first step, or when larger inputs come, and stay. Copies have streams of their own, and only
events are waited for. Inputs come back unchanged: gradients are bit for bit those without offloading.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bitplan.base.errors import StreamError
from bitplan.streaming.saved_tensors import outer_hooks
from bitplan.streaming.telemetry import StepRecorder
from bitplan.streaming.transfer.copies import Transfer, Worker
from bitplan.streaming.transfer.devices import Copied, Mark, StreamDevice
from bitplan.streaming.transfer.host_memory import exact_buffer

BUFFERS = 2  # for each direction: the computation uses one while the other crosses the bus
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Compute = Callable[[Args, Kwargs], Any]


@dataclass(eq=False)
class OffloadBuffer:
    """A pinned host buffer for one block's input, and the last copy that used it."""

    memory: Tensor
    last: Transfer | None = None


@dataclass(eq=False)
class Landing:
    """A buffer on the device, what it holds or will hold, and when it may be overwritten."""

    buffer: Tensor
    free_after: Mark
    transfer: Transfer | None = None
    owner: weakref.ref[SavedInput] | None = None


class SavedInput:
    """One block's input, from its forward to its backward; frees its buffer when autograd drops it."""

    def __init__(self, owner: ActivationOffload, block: int, what: str, x: Tensor) -> None:
        self.owner, self.block, self.what = owner, block, what
        # The memory order of the axes is restored too: kernels, and so the last bit, may depend on it.
        self.axes = sorted(range(x.dim()), key=lambda axis: -x.stride()[axis])
        self.shape, self.dtype, self.requires_grad = [x.shape[axis] for axis in self.axes], x.dtype, x.requires_grad
        self.nbytes, self.order, self.serial = x.nbytes, 0, owner.serial
        self.tensor: Tensor | None = None  # kept on the device
        self.host_buffer: OffloadBuffer | None = None
        self.sent: Transfer | None = None

    def laid_out(self, flat: Tensor) -> Tensor:
        """A view of a flat tensor with the input's shape and strides."""
        order = sorted(range(len(self.axes)), key=lambda position: self.axes[position])
        return flat.view(self.shape).permute(order)

    def view(self, buffer: Tensor) -> Tensor:
        return self.laid_out(buffer[: self.nbytes].view(self.dtype))

    def __del__(self) -> None:
        if self.host_buffer is not None:
            self.owner.take_back(self.host_buffer)


class ActivationOffload:
    """Checkpoints blocks: moves their inputs to the host after the forward, and back before the backward."""

    def __init__(
        self,
        device: StreamDevice,
        count: int,
        where: Callable[[int], str],
        room: Callable[[], int | None],
        timeout_s: float,
    ) -> None:
        """Prepare for `count` blocks; `room` says how many more copies to the device may start now."""
        self._device, self._count, self._where = device, count, where
        self._room, self._timeout_s = room, timeout_s
        self.serial = 0
        self.max_out: int | None = None
        self.recorder: StepRecorder | None = None
        self._worker = Worker("activation")
        self._nbytes = 0
        self._outgoing: list[Landing] = []
        self._landings: list[Landing] = []
        self._host_buffers: list[OffloadBuffer] = []
        self._free: list[OffloadBuffer] = []
        self._order: list[weakref.ref[SavedInput]] = []
        self._token = torch.empty(0, device=device.torch_device)  # tells checkpoint which device's random state to save

    # ---- steps -------------------------------------------------------------------------------------------------------

    def start(self, recorder: StepRecorder | None) -> None:
        """Begin a step; copies that an earlier step left under way no longer count."""
        self.serial += 1
        self.recorder, self._order = recorder, []
        if not self._worker.drain(self._timeout_s):
            if self._worker.is_alive:
                raise StreamError(
                    f"the activation thread has been in one copy for over {self._timeout_s:g} s; "
                    "the device hangs, or raise timeout_s"
                )
            self._worker = Worker("activation")
        for landing in [*self._outgoing, *self._landings]:
            landing.owner = None
            if landing.transfer is not None and landing.transfer.copied is None:
                landing.transfer = None  # the copy failed, or its thread died before it

    def stop(self) -> None:
        self.serial += 1
        self.recorder = None

    def close(self) -> None:
        self.stop()
        self._worker.stop(self._timeout_s)
        self._resize(0)
        for host_buffer in self._host_buffers:
            self._unpin(host_buffer)
        self._host_buffers, self._free = [], []

    def in_flight(self) -> int:
        """Inputs on their way back for which the computation has not waited yet."""
        moving = [landing.transfer for landing in self._landings if landing.transfer is not None]
        return sum(not (one.is_awaited or one.is_done(self._device)) for one in moving)

    # ---- a block -----------------------------------------------------------------------------------------------------

    def run(self, block: int, compute: Compute, args: Args, kwargs: Kwargs) -> Any:
        """Compute a block such that backward computes it again from its restored input."""
        _refuse_other_checkpointing(self._where(block))
        key, x = _find_input(args, kwargs, self._where(block))
        args, kwargs = _with_input(args, kwargs, key, None)  # the saved arguments must not hold the input
        saved, first = self._keep(block, x), [x]
        del x

        def region(_: Tensor) -> Any:
            value = first.pop() if first else self._restore(saved)
            return compute(*_with_input(args, kwargs, key, value))

        return checkpoint(region, self._token, use_reentrant=False)

    def take_back(self, host_buffer: OffloadBuffer) -> None:
        """Free a buffer; any thread may call this, as the last reference is dropped anywhere."""
        self._free.append(host_buffer)

    def _keep(self, block: int, x: Tensor) -> SavedInput:
        saved = SavedInput(self, block, f"{self._where(block)}: its input", x)
        saved.order = len(self._order)
        self._order.append(weakref.ref(saved))
        if block == self._count - 1 or not x.numel():
            saved.tensor = x.detach()
        else:
            self._send(saved, x.detach())
        return saved

    def _send(self, saved: SavedInput, x: Tensor) -> None:
        nbytes = x.nbytes
        if nbytes > self._nbytes:
            self._resize(nbytes)
        out = self._outgoing_for_next()
        saved.view(out.buffer).copy_(x)
        after, host_buffer = self._device.mark(), self._buffer_for(nbytes)
        before, transfer = host_buffer.last, Transfer(saved.what, after)
        out.transfer = saved.sent = host_buffer.last = transfer
        saved.host_buffer = host_buffer

        def copy() -> Copied:  # must not hold `saved`, which frees its buffer when it is dropped
            marks = [after] if before is None or before.copied is None else [after, before.copied.end]
            return self._device.copy_out(host_buffer.memory[:nbytes], out.buffer[:nbytes], *marks, queue="activations")

        self._start(transfer, copy)
        if self.recorder is not None:
            self.recorder.sent.append((transfer, nbytes))

    def _outgoing_for_next(self) -> Landing:
        """The least recently used buffer, after waiting for its copy, and for others if `max_out` limits copies."""
        out, *rest = self._outgoing
        others = [] if self.max_out is None else rest[: max(0, BUFFERS - self.max_out)]
        self._outgoing = [*rest, out]
        for one in [out, *others]:
            if one.transfer is not None:
                self._await(one.transfer)
        return out

    def _restore(self, saved: SavedInput) -> Tensor:
        """Bring a saved input back to the device, for the block that backward computes now."""
        if saved.serial != self.serial:
            raise StreamError(
                f"{saved.what} is gone: backward came after its step ended; call backward between begin_step and "
                "end_step"
            )
        if saved.tensor is not None:
            x = saved.tensor.detach()
        else:
            landing = self._landing_of(saved) or self._fetch(saved)
            assert landing.transfer is not None
            self._await(landing.transfer)
            flat = torch.empty(math.prod(saved.shape), dtype=saved.dtype, device=self._device.torch_device)
            x = saved.laid_out(flat).copy_(saved.view(landing.buffer))
            landing.owner, landing.free_after = None, self._device.mark()
        self._prefetch(saved.order)
        return x.requires_grad_(saved.requires_grad)

    def _prefetch(self, order: int) -> None:
        """Bring back the inputs that backward needs next, as many as there are free landings."""
        for reference in reversed(self._order[:order]):
            saved = reference()
            if saved is None or saved.tensor is not None or self._landing_of(saved) is not None:
                continue
            room = self._room()
            if all(landing.owner is not None for landing in self._landings):
                return
            if room is not None and room < 1:
                if self.recorder is not None:
                    self.recorder.held_back += 1
                return
            self._fetch(saved)

    def _fetch(self, saved: SavedInput) -> Landing:
        host_buffer, sent, nbytes = saved.host_buffer, saved.sent, saved.nbytes
        assert host_buffer is not None
        assert sent is not None
        landing = next((one for one in self._landings if one.owner is None), self._landings[0])
        after, transfer = landing.free_after, Transfer(saved.what)
        landing.owner, landing.transfer, host_buffer.last = weakref.ref(saved), transfer, transfer
        self._device.claim(landing.buffer)

        def copy() -> Copied:
            arrived = sent.wait_launched(None, self._timeout_s)
            target, source = landing.buffer[:nbytes], host_buffer.memory[:nbytes]
            return self._device.copy_in(target, source, after, arrived.end, queue="activations")

        self._start(transfer, copy)
        if self.recorder is not None:
            self.recorder.returned.append((transfer, nbytes))
        return landing

    def _landing_of(self, saved: SavedInput) -> Landing | None:
        return next((one for one in self._landings if one.owner is not None and one.owner() is saved), None)

    def _start(self, transfer: Transfer, copy: Callable[[], Copied]) -> None:
        if self._device.copies_in_background:
            transfer.launch(copy)
        else:
            self._worker.submit(lambda: transfer.launch(copy), transfer.what, self._timeout_s)

    def _await(self, transfer: Transfer) -> None:
        before = self._device.mark()
        transfer.is_awaited = True
        self._device.wait(transfer.wait_launched(self._worker, self._timeout_s))
        if self.recorder is not None:
            self.recorder.waits.append((before, self._device.mark()))

    # ---- memory ------------------------------------------------------------------------------------------------------

    def _resize(self, nbytes: int) -> None:
        """Allocate device buffers for inputs of up to this size; old ones are freed after their copies."""
        for landing in [*self._outgoing, *self._landings]:
            if landing.transfer is not None and landing.transfer.copied is not None:
                self._device.wait(landing.transfer.copied)
            self._device.give_back(landing.buffer)
        self._outgoing, self._landings, self._nbytes = [], [], 0
        for index in range(2 * BUFFERS if nbytes else 0):
            buffer = self._device.allocate(nbytes, f"buffer {index} for activations")
            (self._outgoing if index < BUFFERS else self._landings).append(Landing(buffer, self._device.mark()))
        self._nbytes = nbytes

    def _buffer_for(self, nbytes: int) -> OffloadBuffer:
        fitting = [one for one in self._free if one.memory.nbytes >= nbytes]
        if fitting:
            host_buffer = min(fitting, key=lambda one: one.memory.nbytes)
            self._free.remove(host_buffer)
            return host_buffer
        if self._free:  # all are too small: replace one, so that the arena does not keep it
            small = self._free.pop()
            self._host_buffers.remove(small)
            self._unpin(small)
        host_buffer = OffloadBuffer(exact_buffer(nbytes))
        self._device.pin(host_buffer.memory)
        self._host_buffers.append(host_buffer)
        return host_buffer

    def _unpin(self, host_buffer: OffloadBuffer) -> None:
        if host_buffer.last is not None and host_buffer.last.copied is not None:
            self._device.finish(host_buffer.last.copied.end)
        self._device.unpin(host_buffer.memory)


def _find_input(args: Args, kwargs: Kwargs, what: str) -> tuple[int | str, Tensor]:
    """A block's input: its first floating-point argument."""
    arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for key, value in arguments:
        if isinstance(value, Tensor) and value.is_floating_point():
            return key, value
    raise StreamError(
        f"{what}: offload_activations=True, but the block is given no floating-point tensor to keep; leave it out"
    )


def _with_input(args: Args, kwargs: Kwargs, key: int | str, value: Any) -> tuple[Args, Kwargs]:
    if isinstance(key, str):
        return args, kwargs | {key: value}
    return (*args[:key], value, *args[key + 1 :]), kwargs


def _refuse_other_checkpointing(what: str) -> None:
    """Raise where other code checkpoints the block too: by its hooks, or a forward within backward."""
    hooks = outer_hooks()
    is_checkpointed = hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__
    if is_checkpointed or torch._C._current_graph_task_id() != -1:
        raise StreamError(
            f"{what}: the model checkpoints this block itself, and so keeps its input on the device; "
            "offload_activations=True checkpoints every block: turn the model's own checkpointing off"
        )
