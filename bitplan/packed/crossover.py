"""Measures from how many rows on it is faster to expand a packed weight, for one weight shape on one GPU.

A fused kernel reads a quarter of the bytes and wins while memory is the limit; with many rows arithmetic is the limit,
and it is faster to expand the weight first for the vendor's product. Where the two cross depends on format, shape and
GPU, so it is measured for the row counts that occur, each rounded up to a power of two up to 8192: the time of

    fused      the kernel on packed bytes, by the best of its candidate launches
    decode     expand the weight, then F.linear: every call pays for the expansion
    expanded   F.linear on a weight expanded before: what a tile in the cache costs

The L2 cache is overwritten before every timed call: else a small weight would be read from the cache, where it is not
when a model's other layers have run in between. That write also gives the host the time to enqueue the call, so that
events around it time the GPU. Medians decide, samples are kept. Before any of this the fused result is compared with
decode and F.linear: a kernel that is wrong here is not used, and the log says so.

`pick` reads a record and nothing else. Files: `crossover_files`.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bitplan.base.paired_timing import CudaStopwatch
from bitplan.formats import Encoded
from bitplan.formats.dispatch import decode
from bitplan.packed.products.fused import FusedMatmul, Launch

log = logging.getLogger("bitplan")

ROW_COUNTS: tuple[int, ...] = tuple(1 << power for power in range(14))
REPEATS = 15
REPEATS_PER_CANDIDATE = 5
MOST_FUSED_ROWS = 256  # with more rows the fused kernels were never fastest, and are not even compiled
COMPILERS = 16
# Limits for the fused result against decode and F.linear, all in bfloat16 (unit roundoff 2^-8): of the norm of the
# difference, and of each number |difference| <= NUMBER_OF_RESULT * |result| + NUMBER_OF_ROW * ||w_n|| for x of unit
# variance.
NORM_TOLERANCE = 2.0**-6
NUMBER_OF_RESULT = 2.0**-6
NUMBER_OF_ROW = 2.0**-5

Call = Callable[[], Tensor]
Run = Callable[[Launch | None], Tensor]  # the fused product with a launch
Timer = Callable[[Call, int], Sequence[float]]  # a call and a number of samples -> milliseconds


@dataclass(frozen=True)
class Pick:
    """How a product is run, and why. `launch` is the fused kernel's best launch, where one was measured."""

    strategy: str
    reason: str
    launch: Launch | None = None


@dataclass(frozen=True)
class Timing:
    """All samples at one row count, in milliseconds; none of fused if the kernel could not run."""

    rows: int
    samples_ms: Mapping[str, tuple[float, ...]]
    launch: Launch | None = None

    def median_ms(self, way: str) -> float | None:
        samples = self.samples_ms.get(way)
        return statistics.median(samples) if samples else None


@dataclass(frozen=True)
class Crossover:
    """The timings of weights of one format and shape. `refused` says why the fused kernel must not be used."""

    format: str
    out_features: int
    in_features: int
    timings: tuple[Timing, ...]
    refused: str | None = None
    stopped: str | None = None  # why there are no timings beyond the last

    @property
    def key(self) -> tuple[str, int, int]:
        return self.format, self.out_features, self.in_features

    def at(self, rows: int) -> Timing:
        """The timing at the next row count that was measured; beyond the last, the last."""
        return next((timing for timing in self.timings if timing.rows >= rows), self.timings[-1])

    def has(self, rows: int) -> bool:
        """Whether this row count was measured, or could not be for lack of memory."""
        return any(timing.rows == rows for timing in self.timings) or (
            self.stopped is not None and rows > self.timings[-1].rows
        )

    def joined(self, other: Crossover) -> Crossover:
        """Both records' timings; at equal row counts those of `other`."""
        by_rows = {timing.rows: timing for timing in (*self.timings, *other.timings)}
        timings = tuple(by_rows[rows] for rows in sorted(by_rows))
        return replace(
            self, timings=timings, refused=other.refused or self.refused, stopped=other.stopped or self.stopped
        )


def bucket_of(rows: int) -> int:
    """The row count that is measured in place of `rows`: the next power of two, within limits."""
    return min(1 << max(0, rows - 1).bit_length(), ROW_COUNTS[-1])


def pick(record: Crossover, rows: int, *, room: bool) -> Pick:
    """The fastest way for this many rows: a pure function of the record.

    `room`: whether a cache can hold the expanded weight. Of equal times the way that needs less memory wins.
    """
    timing = record.at(rows)
    times = {
        "fused": None if record.refused else timing.median_ms("fused"),
        "decode": timing.median_ms("decode"),
        "tile_cache": timing.median_ms("expanded") if room else None,
    }
    measured = {way: time for way, time in times.items() if time is not None}
    best = min(measured, key=lambda way: measured[way])  # the first of equals
    shown = ", ".join(f"{way} {time:.4f} ms" for way, time in measured.items())
    reason = f"measured for {timing.rows} rows: {shown}"
    if record.refused:
        reason += f"; fused is not used: {record.refused}"
    if not room:
        reason += "; no room in a tile cache"
    return Pick(best, reason, timing.launch if best == "fused" else None)


# ---- measuring -------------------------------------------------------------------------------------------------------


def measure_crossover(
    weight: Encoded,
    fused: FusedMatmul | None,
    *,
    timer: Timer | None = None,
    row_counts: Sequence[int] = ROW_COUNTS,
    dtype: torch.dtype = torch.bfloat16,
) -> Crossover:
    """Measure one weight where it lies. A fused kernel with a wrong result is refused, and logged as an error."""
    device = weight.device
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        bench = _Bench(weight, decode(weight, dtype), timer or cuda_timer(device))
        refused = "there is no fused kernel" if fused is None else fused.why_not(weight, dtype)
        if refused is None and not bool(bench.expanded.isfinite().all()):
            refused = "the weight holds NaN or infinity, so a result could not be checked"
        prepared = None if fused is None or refused else fused.prepare(weight)
        generator = torch.Generator(device).manual_seed(0)
        timings: list[Timing] = []
        stopped: str | None = None
        for rows in row_counts:
            try:
                x = torch.randn((rows, weight.shape[1]), generator=generator, device=device).to(dtype)
                if fused is None or refused or rows > MOST_FUSED_ROWS:
                    timings.append(bench.time(x))
                    continue
                run = _runner(fused, weight, prepared, x)
                launches: list[Launch | None] = [*fused.launches(weight, rows)]
                launches = launches or [None]
                compile_together(device, [_call(run, launch) for launch in launches])
                refused = bench.why_wrong(x, run, launches)
                if refused:
                    log.error("bitplan: %s is wrong and will not be used: %s", fused.name, refused)
                timings.append(bench.time(x) if refused else bench.time(x, run, launches))
            except torch.OutOfMemoryError:
                stopped = f"out of memory at {rows} rows"
                log.warning("bitplan: measuring %s stopped: %s", weight, stopped)
                break
    if not timings:
        raise torch.OutOfMemoryError(f"measuring {weight!r}: {stopped}")
    return Crossover(weight.fmt.name, weight.shape[0], weight.shape[1], tuple(timings), refused, stopped)


def compile_together(device: torch.device, calls: Sequence[Callable[[], object]]) -> None:
    """Run every call once, several at a time, so that their kernels are compiled in parallel. Errors are ignored."""
    if device.type != "cuda" or len(calls) < 2:
        return

    def run(call: Callable[[], object]) -> None:
        with torch.cuda.device(device), torch.no_grad(), contextlib.suppress(Exception):
            call()

    torch.cuda.synchronize(device)
    with ThreadPoolExecutor(min(COMPILERS, len(calls))) as pool:
        list(pool.map(run, calls))
    torch.cuda.synchronize(device)


def _runner(fused: FusedMatmul, weight: Encoded, prepared: Any, x: Tensor) -> Run:
    return lambda launch: fused.run(x, weight, prepared, None, launch)


@dataclass(frozen=True)
class _Bench:
    weight: Encoded
    expanded: Tensor
    timer: Timer

    def time(self, x: Tensor, run: Run | None = None, launches: Sequence[Launch | None] = ()) -> Timing:
        """Time every way at one row count; fused with its fastest launch."""
        samples: dict[str, tuple[float, ...]] = {}
        best: Launch | None = None
        if run is not None:
            tried = [statistics.median(self.timer(_call(run, one), REPEATS_PER_CANDIDATE)) for one in launches]
            best = launches[tried.index(min(tried))]
            samples["fused"] = tuple(self.timer(_call(run, best), REPEATS))
        samples["decode"] = tuple(self.timer(lambda: functional.linear(x, decode(self.weight, x.dtype)), REPEATS))
        samples["expanded"] = tuple(self.timer(lambda: functional.linear(x, self.expanded), REPEATS))
        return Timing(x.shape[0], samples, best)

    def why_wrong(self, x: Tensor, run: Run, launches: list[Launch | None]) -> str | None:
        """Compare every launch with decode and F.linear; launches that do not fit the GPU leave the list."""
        expected = functional.linear(x, self.expanded).float()
        allowed = NUMBER_OF_RESULT * expected.abs() + NUMBER_OF_ROW * self.expanded.float().norm(dim=1)
        for launch in list(launches):
            try:
                product = run(launch).float()
            except Exception as error:
                if type(error).__name__ != "OutOfResources" or len(launches) == 1:
                    raise
                log.info("bitplan: launch %s needs more than this GPU has: %s", launch, error)
                launches.remove(launch)
                continue
            off = (product - expected).abs()
            relative = float(off.norm() / expected.norm().clamp(min=torch.finfo(torch.float32).tiny))
            beyond = int((~(off <= allowed)).sum())  # NaN counts as beyond
            if beyond or not relative <= NORM_TOLERANCE:
                return (
                    f"{beyond} of {off.numel()} results at {x.shape[0]} rows, launch {dict(launch or {})}, differ from "
                    f"decode and F.linear by more than rounding (norm {relative:.2e}, allowed {NORM_TOLERANCE:.2e})"
                )
        return None


def _call(run: Run, launch: Launch | None) -> Call:
    return lambda: run(launch)


def cuda_timer(device: torch.device) -> Timer:
    """Times calls by events, each after the L2 cache was overwritten."""
    stopwatch = CudaStopwatch(device)

    def time(call: Call, repeats: int) -> Sequence[float]:
        with torch.cuda.device(device):
            for _ in range(2):  # compile, choose an algorithm
                call()
            pairs: list[tuple[Any, Any]] = []
            for _ in range(repeats):
                stopwatch.prepare()
                begin = stopwatch.mark()
                call()
                pairs.append((begin, stopwatch.mark()))
            stopwatch.wait()
        return [round(stopwatch.elapsed_ms(*pair), 5) for pair in pairs]

    return time
