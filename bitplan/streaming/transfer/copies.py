"""Transfer, one copy of one block to the device, and Worker, the thread for copies that would block the caller.

A transfer has two waits. The host waits until the copy is in the device's queue (`launched`): not at all for pinned
memory, for the staging of pageable memory and files, for the optimizer where weights are being updated. The device
waits for the copy itself, by events. A job that fails leaves its error in the transfer, for the thread that waits for
it; every wait notices a dead thread, and has a limit. Ctrl-C may come between any two lines: nothing is counted beside
the queue itself, one call puts a job into it, and there is no lock of Python's that an interrupt could leave locked
(threading.Event and Condition have one).

Turns let one thread at a time use a stream. Forwards outside a step take turns block by block; a step belongs to the
thread that computes in it first, because another could load a block between the moment when autograd asks for a weight
and its use.

FiniteCheck detects NaN and infinity without waiting for the device: 0 times the sum of a block's output is added to a
number on the device, which is sent to the host at the end of the step. The first such block, in forward order, is the
cause. Gradients are looked at some at a time, on a GPU in three kernels for all of them.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from bitplan.base.errors import BlockNonFiniteError, StreamError, TransferError
from bitplan.streaming.transfer.devices import Copied, Mark, StreamDevice


class Turns:
    """A lock that gives up after a timeout (its thread may take it again), and which thread has the open step."""

    def __init__(self, timeout_s: float) -> None:
        self._lock, self._timeout_s = threading.RLock(), timeout_s
        self._serial: int | None = None
        self._thread = threading.current_thread()

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=self._timeout_s):
            raise StreamError(
                f"another thread has used this stream for over {self._timeout_s:g} s; let one thread use it at a time"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def claim_step(self, serial: int, where: str) -> None:
        """Give the step of this serial number to the calling thread, or refuse it; within a turn, in a forward."""
        thread = threading.current_thread()
        if self._serial != serial:
            self._serial, self._thread = serial, thread
        elif thread is not self._thread:
            raise StreamError(
                f"{where}: the step is computed by thread {self._thread.name!r}, and {thread.name!r} computes in it "
                "too: one thread computes a step; end_step first, or run forwards of several threads outside a step, "
                "under torch.no_grad()"
            )


Method = TypeVar("Method", bound=Callable[..., Any])


def alone(method: Method) -> Method:
    """A method of an object with a `_loader` that runs while no other thread uses the stream."""

    @wraps(method)
    def in_turn(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        with self._loader.turns:
            return method(self, *args, **kwargs)

    return cast(Method, in_turn)


class SentFlags(NamedTuple):
    """A step's flags on their way to the host, and the mark of their arrival."""

    step: int
    flags: Tensor
    mark: Mark


class FiniteCheck:
    """One flag a block, and the flags of earlier steps that have not been read yet."""

    def __init__(self, device: StreamDevice, names: Sequence[str]) -> None:
        self._device, self._names = device, list(names)
        self._flags = torch.zeros(len(names), device=device.torch_device)
        self._by_block = self._flags.unbind()
        self._pending: list[SentFlags] = []

    def start(self) -> None:
        self._flags.zero_()

    def look_at(self, block: int, output: Any) -> None:
        """Note whether a block's output is finite; queues two small kernels."""
        for tensor in tensors_in(output):  # detached: Ctrl-C could leave torch.no_grad() on for the rest of the run
            if not tensor.is_floating_point():
                continue
            self._by_block[block].add_(tensor.detach().sum(dtype=torch.float32), alpha=0)  # infinity times 0 is NaN

    def look_at_gradients(self, numbers: Sequence[int], gradients: list[Tensor]) -> None:
        """Note which gradients, of different names and none without numbers, are finite; they must have no graph."""
        figures = norms_of(gradients) if self._flags.is_cuda else sums_of(gradients)
        torch._foreach_add_([self._by_block[number] for number in numbers], figures, alpha=0)

    def send(self, step: int) -> SentFlags:
        """Send the step's flags to the host."""
        host = torch.empty(len(self._names), pin_memory=self._flags.is_cuda)
        host.copy_(self._flags, non_blocking=True)
        return SentFlags(step, host, self._device.mark())

    def keep(self, sent: SentFlags) -> None:
        """Keep a step's flags, so that `find` reads them later."""
        self._pending.append(sent)

    def find(self, *, wait: bool = False) -> BlockNonFiniteError | None:
        """The first step that was not finite, among those whose flags have arrived (or all: `wait`); reported once."""
        while self._pending and (wait or self._device.has_passed(self._pending[0].mark)):
            failure = self.read(self._pending.pop(0))
            if failure is not None:
                return failure
        return None

    def read(self, sent: SentFlags) -> BlockNonFiniteError | None:
        """The error that a step's flags show, if any; waits until they have arrived."""
        bad = self.not_finite(sent)
        if not bad:
            return None
        return BlockNonFiniteError(
            f"{bad[0]}, step {sent.step}: its output holds NaN or infinity ({len(bad)} of {len(self._names)} "
            "blocks do, this is the first); look at its inputs, learning rate and formats; begin_step goes on"
        )

    def not_finite(self, sent: SentFlags) -> list[str]:
        """The names whose flags are not finite; waits until they have arrived."""
        self._device.finish(sent.mark)
        return [name for name, flag in zip(self._names, sent.flags.isfinite().tolist(), strict=True) if not flag]


def norms_of(tensors: list[Tensor]) -> list[Tensor]:
    """The largest magnitude of each tensor: NaN or infinity where it holds one. Two kernels on a GPU for all."""
    return list(torch._foreach_norm(tensors, math.inf, dtype=torch.float32))


def sums_of(tensors: list[Tensor]) -> list[Tensor]:
    """Sums, which are NaN or infinite too; on a CPU they take a fifth of the time of `norms_of`."""
    return [one.sum(dtype=torch.float32) for one in tensors]


def tensors_in(output: Any) -> Iterator[Tensor]:
    """The tensors of a block's output, in whatever containers of Python and transformers it has."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for item in output:
            yield from tensors_in(item)
    elif isinstance(output, Mapping):
        yield from tensors_in(list(output.values()))


POLL_S = 0.05
WAIT_TIMEOUT_S = 300.0
Job = Callable[[], None]


class Latch:
    """An event that is set once and that any number of threads can wait for."""

    def __init__(self) -> None:
        self._is_set = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        self._is_set = True
        self._wake.put(None)

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout_s: float) -> bool:
        """Wait until the latch is set, at most `timeout_s`; whether it is."""
        if not self._is_set:
            try:
                self._wake.get(timeout=timeout_s)
            except queue.Empty:
                return self._is_set
            self._wake.put(None)  # wakes the next waiter; a waiter that misses this looks again after its own timeout
        return self._is_set


@dataclass(eq=False)
class Transfer:
    """A copy under way, or done; `what` names the block in messages; `after` is when its target was free."""

    what: str
    after: Mark | None = None
    launched: Latch = field(default_factory=Latch)
    copied: Copied | None = None
    error: BaseException | None = None
    # The computation waits for this copy: work that is queued from now on runs after it, however far ahead the host is.
    is_awaited: bool = False

    def launch(self, copy: Callable[[], Copied]) -> None:
        """Run the copy now, on this thread; an error is kept for the thread that waits."""
        try:
            self.copied = copy()
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.launched.set()

    def is_done(self, device: StreamDevice) -> bool:
        """Whether the copy is over, or none will be made; nothing waits for it."""
        return self.launched.is_set() and (self.copied is None or device.has_passed(self.copied.end))

    def wait_launched(self, worker: Worker | None, timeout_s: float) -> Copied:
        """Wait on the host until the device has the copy in its queue."""
        wait_for(self.launched, worker, timeout_s, self.what)
        if self.error is not None:
            if not isinstance(self.error, Exception):
                raise TransferError(f"{self.what}: the transfer thread was stopped ({self.error!r})") from self.error
            raise TransferError(f"{self.what}: {type(self.error).__name__}: {self.error}") from self.error
        assert self.copied is not None
        return self.copied


class Worker:
    """A thread that runs jobs in order. A job handles its own Exception; any other BaseException ends the thread."""

    def __init__(self, name: str, max_unfinished: int | None = None) -> None:
        self.name = name
        self.max_unfinished = max_unfinished  # may change at any time
        self._jobs: deque[Job] = deque()  # the first is running, and is removed when it is done
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._room = Latch()
        self._is_stopping = self._has_died = False
        self._thread = threading.Thread(target=self._run, name=f"bitplan-{name}", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._has_died

    @property
    def unfinished(self) -> int:
        return len(self._jobs)

    def submit(self, job: Job, what: str, timeout_s: float = WAIT_TIMEOUT_S) -> None:
        """Queue a job; waits while too many are unfinished, which slows a producer down to the thread's pace."""
        deadline = time.monotonic() + timeout_s
        while self.is_alive and self._is_full() and time.monotonic() <= deadline:
            room = self._room = Latch()
            if self._is_full():
                self.nudge()
                room.wait(POLL_S)
        if not self.is_alive or self._is_full():
            state = "took no job in time" if self.is_alive else "has died"
            raise TransferError(f"{what}: the {self.name} thread {state}; begin_step starts afresh")
        self._jobs.append(job)  # one call, so that Ctrl-C leaves either no job or a whole one
        self.nudge()

    def nudge(self) -> None:
        """Make the thread look at its queue; waiters call it, in case the submitter was interrupted before it did."""
        self._wake.put(None)

    def drain(self, timeout_s: float) -> bool:
        """Wait until every job has run; False where the thread has died or time ran out."""
        if self._jobs:
            deadline, done = time.monotonic() + timeout_s, Latch()
            self._jobs.append(done.set)
            self.nudge()
            while not done.wait(POLL_S):
                if not self.is_alive or time.monotonic() > deadline:
                    return False
        return self.is_alive

    def stop(self, timeout_s: float) -> None:
        """End the thread after its present jobs; a thread that hangs in a job is left, as a daemon."""
        if self.is_alive:
            self._is_stopping = True
            self.nudge()
            self._thread.join(timeout_s)

    def _is_full(self) -> bool:
        return self.max_unfinished is not None and self.unfinished >= self.max_unfinished

    def _run(self) -> None:
        try:
            while self._jobs or not self._is_stopping:
                if self._jobs:
                    self._run_first()
                else:
                    self._wake.get()
        except BaseException:  # every wait checks the thread, and names its job
            self._has_died = True

    def _run_first(self) -> None:
        job = self._jobs[0]
        try:
            job()
        except Exception:  # the job keeps its error for its waiter
            pass
        except BaseException:
            self._has_died = True  # set before waiters wake up; is_alive would change only later
            raise
        finally:
            self._jobs.popleft()
            self._room.set()


def wait_for(event: Latch, worker: Worker | None, timeout_s: float, what: str) -> None:
    """Wait for an event that a worker sets; a dead worker or a passed deadline is an error that names `what`."""
    if worker is not None and not event.is_set():
        worker.nudge()
    deadline = time.monotonic() + timeout_s
    while not event.wait(POLL_S):
        if worker is not None and not worker.is_alive and not event.is_set():
            raise TransferError(f"{what}: the {worker.name} thread has died; begin_step starts another and loads again")
        if time.monotonic() > deadline:
            raise StreamError(
                f"{what}: nothing came within {timeout_s:g} s; is the disk or device stuck? Else raise timeout_s"
            )
