"""Times several arms in turns on one device, with the memory each needs, to compare what their calls cost.

A GPU gets warmer, its clocks change, a neighbour becomes busy: times taken minutes apart cannot be compared. So the
arms take turns, and every other turn runs them in the opposite order, because each run affects the next. A sample lies
between two marks of a stopwatch:

    GPU     events; before each sample the GPU finishes its work and the L2 cache is overwritten: else a small layer
            would read its weights from the cache, as it does not in a model. `graph` replays a captured CUDA
            graph: the GPU's own time. `eager` calls several times in a row, as a training step does, so that a host
            which cannot launch as fast as the GPU computes shows.
    CPU     a monotonic clock. It is for tests: an emulated FP8 has no speed.

An arm is a function that builds what is timed. Running out of memory is caught in building as in running, and
distinguished from every other error. If one arm fails, the others go on; but a device that no longer answers is raised,
because the next arm would be blamed for it. With several processes (`Peers`) an arm fails if it fails on any of them,
and the slowest process counts.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from bitplan.base.errors import MeasureError

OK, OOM, ERROR = "ok", "oom", "error"
FLUSH_BYTES = 512 * 2**20  # ten times the L2 of an H200
EAGER_SAMPLE_MS = 4.0  # long compared with the head start that the flush gives the host
MAX_CALLS_PER_SAMPLE = 50
MIN_SAMPLE_MS = 1e-6  # two marks of a coarse clock may be equal
MAX_MESSAGE = 300

Call = Callable[[], object]
Arm = Callable[[], Call]  # builds what is timed


class Stopwatch(Protocol):
    """The interface through which a device is timed: marks in its queue, waiting, peak memory, graphs."""

    def prepare(self) -> None:
        """Bring the caches into the state that a model leaves; called before each sample."""

    def mark(self) -> Any:
        """A mark at this point of the device's queue."""

    def wait(self) -> None:
        """Wait until the device has done all its work."""

    def elapsed_ms(self, begin: Any, end: Any) -> float:
        """The time between two marks; call `wait` first."""

    def peak_bytes(self, call: Call) -> int | None:
        """Run a call; returns its peak memory above what was held before, or None if unknown."""

    def capture(self, call: Call) -> Call:
        """The call as a graph that is replayed; the call itself on a device without graphs."""

    def recover(self) -> None:
        """Give memory back after an error, or raise if the device no longer answers."""


class Peers:
    """The processes that time together; this class is for a single process."""

    def worst(self, status: str) -> str:
        """The worst status ("ok" is the best) that any process has for what was just tried."""
        return status

    def slowest(self, samples_ms: Sequence[float]) -> list[float]:
        """The time of the slowest process for each sample: a step ends when the last process does."""
        return list(samples_ms)


@dataclass(frozen=True)
class Timed:
    """The samples of a timed variant, or why it failed. `in_turns`: all variants' samples i were taken in turn."""

    status: str
    samples_ms: tuple[float, ...] = ()
    peak_bytes: int | None = None
    message: str = ""
    in_turns: bool = False


def time_in_turns(
    arms: Mapping[str, Arm],
    stopwatch: Stopwatch,
    *,
    turns: int,
    warmup: int,
    graph: bool = False,
    peers: Peers | None = None,
) -> dict[str, Timed]:
    """Take `turns` samples of every arm, in turns, after `warmup` calls of each; a failed arm has a message."""
    if turns < 1 or warmup < 0:
        raise MeasureError(f"turns must be from 1 and warmup from 0, got {turns} and {warmup}")
    run = _Run(stopwatch, peers or Peers(), {}, {}, {})
    for name, arm in arms.items():
        run.make_ready(name, arm, max(warmup, 1), graph)
    calls_per_sample = 1 if graph else run.calls_per_sample(warmup)
    marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in run.ready}
    for turn in range(turns):
        order = list(run.ready) if turn % 2 == 0 else list(run.ready)[::-1]
        for name in order:
            run.attempt(name, partial(run.add_sample, name, calls_per_sample, marks[name]))
    return run.read(arms, marks, calls_per_sample)


@dataclass
class _Run:
    stopwatch: Stopwatch
    peers: Peers
    ready: dict[str, Call]
    failed: dict[str, tuple[str, str]]
    peaks: dict[str, int | None]

    def make_ready(self, name: str, arm: Arm, warmup: int, graph: bool) -> None:
        """Build an arm, let it compile and choose algorithms, and measure its memory."""

        def build() -> None:
            call = arm()
            for _ in range(warmup):
                call()
            self.peaks[name] = self.stopwatch.peak_bytes(call)
            self.stopwatch.wait()
            self.ready[name] = self.stopwatch.capture(call) if graph else call

        self.attempt(name, build)

    def attempt(self, name: str, work: Call) -> None:
        """Do some work of an arm; if that fails here or at a peer, the arm is dropped and its memory freed."""
        status, message = OK, ""
        try:
            work()
        except Exception as error:
            status = OOM if is_out_of_memory(error) else ERROR
            message = _one_line(error)
        shared = self.peers.worst(status)
        if shared != OK:
            self.failed[name] = (shared, message or "it failed in another process")
            self.ready.pop(name, None)
            self.stopwatch.recover()

    def calls_per_sample(self, warmup: int) -> int:
        """Calls in an eager sample, the same for all arms: enough to make a sample of the fastest arm long."""
        fastest = math.inf
        for name in list(self.ready):
            times_ms: list[float] = []
            self.attempt(name, partial(self._once_ms, name, times_ms))
            fastest = min([fastest, *times_ms])
        fastest = self.peers.slowest([fastest])[0]  # every process must call equally often
        if warmup == 0 or not math.isfinite(fastest):
            return 1
        return min(MAX_CALLS_PER_SAMPLE, max(1, math.ceil(EAGER_SAMPLE_MS / max(fastest, MIN_SAMPLE_MS))))

    def _once_ms(self, name: str, times_ms: list[float]) -> None:
        marks: list[tuple[Any, Any]] = []
        self.add_sample(name, 1, marks)
        self.stopwatch.wait()
        times_ms.append(self.stopwatch.elapsed_ms(*marks[0]))

    def add_sample(self, name: str, calls: int, marks: list[tuple[Any, Any]]) -> None:
        call = self.ready[name]
        self.stopwatch.wait()  # a host that is ahead from the last sample would hide its own cost in this one
        self.stopwatch.prepare()
        begin = self.stopwatch.mark()
        for _ in range(calls):
            call()
        marks.append((begin, self.stopwatch.mark()))

    def read(self, arms: Mapping[str, Arm], marks: Mapping[str, list[tuple[Any, Any]]], calls: int) -> dict[str, Timed]:
        """Wait for the device, then return the samples of every variant, and the message of those that failed."""
        for name in list(self.ready):
            self.attempt(name, self.stopwatch.wait)
        samples_ms = {}
        for name in arms:
            if name in self.failed:
                status, message = self.failed[name]
                samples_ms[name] = Timed(status, message=message)
                continue
            times = [self.stopwatch.elapsed_ms(begin, end) / calls for begin, end in marks[name]]
            samples = [round(max(time_ms, MIN_SAMPLE_MS), 6) for time_ms in self.peers.slowest(times)]
            samples_ms[name] = Timed(OK, tuple(samples), self.peaks[name], in_turns=len(self.ready) > 1)
        return samples_ms


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: torch has a class for it, cuBLAS and graph capture only a text."""
    texts = ("out of memory", "alloc_failed", "can't allocate memory")
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in texts)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 3] + "..."


# ---- devices ---------------------------------------------------------------------------------------------------------


class CpuStopwatch:
    """A monotonic clock, or another one that is given. No memory is counted and no cache is flushed."""

    def __init__(self, clock_s: Callable[[], float] = time.perf_counter) -> None:
        self.clock_s = clock_s

    def prepare(self) -> None:
        return

    def mark(self) -> float:
        return self.clock_s()

    def wait(self) -> None:
        return

    def elapsed_ms(self, begin: float, end: float) -> float:
        return (end - begin) * 1e3

    def peak_bytes(self, call: Call) -> int | None:
        call()
        return None

    def capture(self, call: Call) -> Call:
        return call

    def recover(self) -> None:
        gc.collect()


class CudaStopwatch:
    """A stopwatch of events on the current stream of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        free, _ = torch.cuda.mem_get_info(device)
        self._flush = torch.empty(min(FLUSH_BYTES, free // 4), dtype=torch.uint8, device=device)

    def prepare(self) -> None:
        self._flush.zero_()

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def elapsed_ms(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end))

    def peak_bytes(self, call: Call) -> int | None:
        self.wait()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        result = call()
        self.wait()
        del result
        return max(torch.cuda.max_memory_allocated(self.device) - before, 0)

    def capture(self, call: Call) -> Call:
        """A graph of one call. Tensors that it makes lie in the graph's own memory; each replay overwrites them."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(2):  # runs autotuners and makes this stream's workspaces, which a capture must not do
                call()
        torch.cuda.current_stream(self.device).wait_stream(side)
        self.wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()

        def replay(_keeps_its_inputs: Call = call) -> None:
            graph.replay()

        return replay

    def recover(self) -> None:
        gc.collect()
        self.wait()  # an illegal access is raised here, and not blamed on the next arm
        torch.cuda.empty_cache()


def stopwatch_of(device: torch.device) -> Stopwatch:
    return CudaStopwatch(device) if device.type == "cuda" else CpuStopwatch()


def release_workspaces() -> None:
    """Free the workspaces of timed products: cuBLAS keeps one, about 34 MB on Hopper, for each thread and stream that a
    product ran on, and every capture runs on streams of its own.

    torch does the same before it records graphs for `mode="reduce-overhead"`; graphs that were timed are gone by now.
    """
    gc.collect()  # a graph in a reference cycle would still use its workspace
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
