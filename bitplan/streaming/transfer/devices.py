"""Devices that compute blocks: a CUDA device with copy streams, and a stand-in on the CPU that behaves the same.

The scheduler sees this interface only:

    mark()                       a point in the work queued so far
    copy_in(to, from, *after)    host -> device on a copy stream, once `after` has passed; returns two marks
    copy_out(to, from, *after)   device -> host, in the same way
    wait(copied)                 the computation goes on when the copy is done; on CUDA the host does not wait
    claim(slot)                  the slot's old numbers are worthless from now on

`SimulatedDevice` computes on the CPU, synchronously, and its copies run on the worker thread that asks for them. A
claimed slot is filled with 0xff (NaN in every float type) before the copy, so code that reads or frees a slot too early
computes NaN every time instead of sometimes. It counts bytes, has a capacity, and its copies can be slowed down or made
to fail: that is how ordering, eviction and faults are tested without a GPU.
"""

from __future__ import annotations

import itertools
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from bitplan.base.errors import StreamError

Queue = Literal["weights", "activations", "experts"]  # copies of one queue and direction run one after another
Direction = Literal["in", "out"]
RESERVE_BYTES = 512 * 2**20  # slots="auto" leaves this beside what a step was seen to take
FIRST_SHARE = 8  # and one part in so many of the memory, until a step was seen


@dataclass(frozen=True, eq=False)
class Mark:
    """A point in time on a device: a CUDA event, or seconds on the host's clock."""

    event: Any = None
    time_s: float = 0.0


class Copied(NamedTuple):
    """Marks on a device's clock: where a copy began and where it ended."""

    start: Mark
    end: Mark


class StreamDevice(ABC):
    """The interface of a device that blocks are streamed to: memory, copies, marks in its queue."""

    torch_device: torch.device
    # Whether copy_in returns before the copy is done, so that the computing thread can call it.
    copies_in_background: bool

    def __init__(self) -> None:
        self.bytes_in = 0
        self.bytes_out = 0
        # By address. Freed memory no longer counts, also if Ctrl-C kept `give_back` from being called.
        self._allocated: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._pinned: dict[int, int] = {}
        self.peak_pinned_bytes = 0

    @property
    def allocated_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in list(self._allocated.values()))

    @property
    def pinned_bytes(self) -> int:
        return sum(self._pinned.values())

    def allocate(self, nbytes: int, what: str) -> Tensor:
        """Flat memory of the device; `what` is for the error."""
        buffer = self._allocate(nbytes, what)
        self._allocated[buffer.data_ptr()] = buffer
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        """Count a buffer's memory as free; the caller then drops its last reference."""
        self._allocated.pop(buffer.data_ptr(), None)

    def pin(self, buffer: Tensor) -> None:
        """Make host memory readable by the copy engine, where it is, without rounding its size up."""
        self._pin(buffer)
        self._pinned[buffer.data_ptr()] = buffer.nbytes
        self.peak_pinned_bytes = max(self.peak_pinned_bytes, self.pinned_bytes)

    def unpin(self, buffer: Tensor) -> None:
        """Undo `pin`; does nothing for memory that is not pinned."""
        if self._pinned.pop(buffer.data_ptr(), None) is not None:
            self._unpin(buffer)

    @abstractmethod
    def _allocate(self, nbytes: int, what: str) -> Tensor: ...

    @abstractmethod
    def _pin(self, buffer: Tensor) -> None: ...

    @abstractmethod
    def _unpin(self, buffer: Tensor) -> None: ...

    @abstractmethod
    def spare_bytes(self) -> int:
        """The memory that slots may take without displacing anything else."""

    @abstractmethod
    def guessed_step_bytes(self) -> int:
        """What a step may take beside its slots, for activations; used until a step has shown it."""

    @abstractmethod
    def used_bytes(self) -> int:
        """Memory in use now, read from counters of the host."""

    @abstractmethod
    def total_bytes(self) -> int:
        """Memory that may be in use at most."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """The most memory in use since `reset_peak`."""

    @abstractmethod
    def reset_peak(self) -> None: ...

    @abstractmethod
    def mark(self) -> Mark: ...

    @abstractmethod
    def claim(self, slot: Tensor) -> None: ...

    def copy_in(self, target: Tensor, source: Tensor, *after: Mark, queue: Queue = "weights") -> Copied:
        copied = self._copy("in", queue, target, source, after)
        self.bytes_in += target.nbytes
        return copied

    def copy_all_in(self, pairs: Sequence[tuple[Tensor, Tensor]], *after: Mark, queue: Queue = "weights") -> Copied:
        """Do `copy_in` for several pairs of target and source; returns the first start and the last end."""
        copied = self._copy_all("in", queue, pairs, after)
        self.bytes_in += sum(target.nbytes for target, _ in pairs)
        return copied

    def copy_out(self, target: Tensor, source: Tensor, *after: Mark, queue: Queue = "weights") -> Copied:
        return self.copy_all_out([(target, source)], *after, queue=queue)

    def copy_all_out(self, pairs: Sequence[tuple[Tensor, Tensor]], *after: Mark, queue: Queue = "weights") -> Copied:
        """Do `copy_out` for several pairs, as `copy_all_in` does."""
        copied = self._copy_all("out", queue, pairs, after)
        self.bytes_out += sum(target.nbytes for target, _ in pairs)
        return copied

    @abstractmethod
    def _copy(
        self, direction: Direction, queue: Queue, target: Tensor, source: Tensor, after: tuple[Mark, ...]
    ) -> Copied: ...

    def _copy_all(
        self, direction: Direction, queue: Queue, pairs: Sequence[tuple[Tensor, Tensor]], after: tuple[Mark, ...]
    ) -> Copied:
        copies = [self._copy(direction, queue, target, source, after) for target, source in pairs]
        return Copied(copies[0].start, copies[-1].end)

    @abstractmethod
    def wait(self, copied: Copied) -> None: ...

    @abstractmethod
    def finish(self, mark: Mark) -> None:
        """Wait for a mark on the host: for worker threads, and at the end."""

    @abstractmethod
    def has_passed(self, mark: Mark) -> bool: ...

    @abstractmethod
    def elapsed_ms(self, start: Mark, end: Mark) -> float: ...


class SimulatedDevice(StreamDevice):
    """A "device" in host memory; `before_copy` is called on the copying thread and may wait or raise."""

    torch_device = torch.device("cpu")
    copies_in_background = False

    def __init__(
        self,
        capacity_bytes: int | None = None,
        *,
        bytes_per_s: float | None = None,
        before_copy: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self.capacity_bytes, self.bytes_per_s, self.before_copy = capacity_bytes, bytes_per_s, before_copy
        self._peak = 0

    def _allocate(self, nbytes: int, what: str) -> Tensor:
        if self.capacity_bytes is not None and self.allocated_bytes + nbytes > self.capacity_bytes:
            raise torch.OutOfMemoryError(
                f"{what}: {nbytes} bytes asked for, {self.capacity_bytes - self.allocated_bytes} of "
                f"{self.capacity_bytes} are free on the simulated device"
            )
        self._peak = max(self._peak, self.allocated_bytes + nbytes)
        return torch.full((nbytes,), 0xFF, dtype=torch.uint8)

    def _pin(self, buffer: Tensor) -> None:
        """Do nothing: all memory is the host's."""

    def _unpin(self, buffer: Tensor) -> None:
        """Do nothing: memory of a simulated device is not pinned."""

    def spare_bytes(self) -> int:
        return self.total_bytes() - self.allocated_bytes

    def guessed_step_bytes(self) -> int:
        return 0  # activations are not counted here

    def used_bytes(self) -> int:
        return self.allocated_bytes

    def total_bytes(self) -> int:
        return 2**62 if self.capacity_bytes is None else self.capacity_bytes

    def peak_bytes(self) -> int:
        return self._peak

    def reset_peak(self) -> None:
        self._peak = self.allocated_bytes

    def mark(self) -> Mark:
        return Mark(time_s=time.perf_counter())

    def claim(self, slot: Tensor) -> None:
        slot.fill_(0xFF)

    def _copy(
        self, direction: Direction, queue: Queue, target: Tensor, source: Tensor, after: tuple[Mark, ...]
    ) -> Copied:
        start = self.mark()
        if self.before_copy is not None:
            self.before_copy()
        if self.bytes_per_s is not None:
            time.sleep(target.nbytes / self.bytes_per_s)
        target.copy_(source)
        return Copied(start, self.mark())

    def wait(self, copied: Copied) -> None:
        """Do nothing: `copy_in` returns after the copy."""

    def finish(self, mark: Mark) -> None:
        """Do nothing: work is done when its call returns."""

    def has_passed(self, mark: Mark) -> bool:
        return True

    def elapsed_ms(self, start: Mark, end: Mark) -> float:
        return (end.time_s - start.time_s) * 1e3


class CudaDevice(StreamDevice):
    """A GPU: one stream for each queue and direction beside the one that computes, and events between them."""

    copies_in_background = True

    def __init__(self, device: torch.device | str) -> None:
        super().__init__()
        if not torch.cuda.is_available():
            raise StreamError(f"device {device}: torch sees no CUDA device; device='cpu' runs the simulated one")
        self.torch_device = torch.empty(0, device=device).device  # "cuda" becomes the current one, cuda:0
        self._memory_bytes = torch.cuda.get_device_properties(self.torch_device).total_memory
        lanes = itertools.product(get_args(Direction), get_args(Queue))
        self._streams = {lane: torch.cuda.Stream(self.torch_device) for lane in lanes}

    def _allocate(self, nbytes: int, what: str) -> Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            error.add_note(f"bitplan: {what}")
            raise

    def _pin(self, buffer: Tensor) -> None:
        if buffer.nbytes:
            _check_cuda(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0), buffer.nbytes)

    def _unpin(self, buffer: Tensor) -> None:
        if buffer.nbytes:
            _check_cuda(torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr()), buffer.nbytes)

    def spare_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        reserved = torch.cuda.memory_reserved(self.torch_device)
        unused = reserved - torch.cuda.memory_allocated(self.torch_device)
        return max(0, min(free, self.total_bytes() - reserved) + unused - RESERVE_BYTES)

    def guessed_step_bytes(self) -> int:
        return self.total_bytes() // FIRST_SHARE

    def used_bytes(self) -> int:
        return int(torch.cuda.memory_allocated(self.torch_device))

    def total_bytes(self) -> int:
        # Torch's share may be limited to less than the GPU has (set_per_process_memory_fraction).
        return int(self._memory_bytes * torch.cuda.get_per_process_memory_fraction(self.torch_device))

    def peak_bytes(self) -> int:
        # Not max_memory_allocated, which sorts some hundred figures first.
        return int(torch.cuda.memory_stats_as_nested_dict(self.torch_device)["allocated_bytes"]["all"]["peak"])

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def mark(self) -> Mark:
        return self._record(torch.cuda.current_stream(self.torch_device))

    def claim(self, slot: Tensor) -> None:
        """Do nothing: the copy stream waits for the mark after which the slot is free."""

    def _copy(
        self, direction: Direction, queue: Queue, target: Tensor, source: Tensor, after: tuple[Mark, ...]
    ) -> Copied:
        return self._copy_all(direction, queue, [(target, source)], after)

    def _copy_all(
        self, direction: Direction, queue: Queue, pairs: Sequence[tuple[Tensor, Tensor]], after: tuple[Mark, ...]
    ) -> Copied:
        stream = self._streams[direction, queue]
        with torch.cuda.stream(stream):
            for mark in after:
                stream.wait_event(mark.event)
            start = self._record(stream)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return Copied(start, self._record(stream))

    def wait(self, copied: Copied) -> None:
        torch.cuda.current_stream(self.torch_device).wait_event(copied.end.event)

    def finish(self, mark: Mark) -> None:
        mark.event.synchronize()

    def has_passed(self, mark: Mark) -> bool:
        return bool(mark.event.query())

    def elapsed_ms(self, start: Mark, end: Mark) -> float:
        return float(start.event.elapsed_time(end.event))

    def _record(self, stream: torch.cuda.Stream) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return Mark(event)


def open_device(device: StreamDevice | torch.device | str) -> StreamDevice:
    """A device by name; "cpu" is the simulated one."""
    if isinstance(device, StreamDevice):
        return device
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise StreamError(f"device={device!r}: expected 'cuda', 'cuda:1', or 'cpu' to try it out") from error
    if kind == "cuda":
        return CudaDevice(device)
    if kind == "cpu":
        return SimulatedDevice()
    raise StreamError(f"device {device}: blocks are streamed to CUDA devices, or to 'cpu' to try it out")


def _check_cuda(status: Any, nbytes: int) -> None:
    if int(status) != 0:
        raise StreamError(
            f"CUDA refused to pin {nbytes} bytes of host memory (error {int(status)}); raise the limit on locked "
            "memory (ulimit -l), or use host='pageable'"
        )
