"""Measures from how many rows on it is faster to expand a packed weight, for one weight shape on one GPU.

A fused kernel reads a quarter of the bytes and wins while memory is the limit; with many rows arithmetic is the limit,
and it is faster to expand the weight first for the vendor's product. Where the two cross depends on format, shape and
GPU, so it is measured for the row counts that occur, each rounded up to a power of two up to 8192: the time of

    fused      the kernel on packed bytes, by the best of its candidate launches
    decode     expand the weight, then F.linear: every call pays for the expansion
    expanded   F.linear on a weight expanded before: what a tile in the cache costs
    fp8        inputs rounded to E4M3, and the product on FP8 units (`products.fp8_rows`): for layers with such inputs

The L2 cache is overwritten before every timed call: else a small weight would be read from the cache, where it is not
when a model's other layers have run in between. That write also gives the host the time to enqueue the call, so that
events around it time the GPU. Medians decide, samples are kept. Before any of this the fused result is compared with
decode and F.linear: a kernel that is wrong here is not used, and the log says so.

`pick` reads a record and nothing else. Records lie on disk, one file per GPU model, in the user's cache folder:

    $BITPLAN_CACHE_DIR, else $XDG_CACHE_HOME/bitplan, else ~/.cache/bitplan:  crossover/nvidia_h200.json

    {"document": "bitplan-crossover", "version": 1, "fingerprint": {...},
     "weights": [{"format": F, "out_features": N, "in_features": K, "refused": null, "stopped": null,
                  "timings": [{"rows": 1, "launch": {...}, "samples_ms": {"fused": [...], "decode": [...], ...}}]}]}

A file counts only if its fingerprint is the present one: GPU, driver, torch, Triton, bitplan, and the source of the
kernels. Else everything is measured anew and the file replaced, and the log says what differs; likewise for a file that
cannot be read.

Records of some GPUs come with the package (`bitplan/data/crossover_*.json`). Such a record counts if GPU and kernel
source are the same, with any driver and libraries: common shapes then need not be measured at first use. Measurements
of this machine take precedence.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import logging
import re
import statistics
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from bitplan.base.documents import LIST, NAME, OBJECT, SIZE, Kind, Reader, is_number, load_document, one_of
from bitplan.base.errors import FileFormatError
from bitplan.base.folders import cache_dir
from bitplan.base.hardware import describe_gpu
from bitplan.base.paired_timing import CudaStopwatch
from bitplan.base.records import write_json
from bitplan.formats import Encoded
from bitplan.formats.dispatch import decode
from bitplan.formats.input_formats import round_input

if TYPE_CHECKING:
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
Run = Callable[["Launch | None"], Tensor]  # the fused product with a launch
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
        """Both records' timings; of equal row counts and ways those of `other`."""
        by_rows = {timing.rows: timing for timing in self.timings}
        for timing in other.timings:
            earlier = by_rows.get(timing.rows, timing)
            launch = timing.launch if "fused" in timing.samples_ms else earlier.launch
            by_rows[timing.rows] = Timing(timing.rows, {**earlier.samples_ms, **timing.samples_ms}, launch)
        timings = tuple(by_rows[rows] for rows in sorted(by_rows))
        return replace(
            self, timings=timings, refused=other.refused or self.refused, stopped=other.stopped or self.stopped
        )


def bucket_of(rows: int) -> int:
    """The row count that is measured in place of `rows`: the next power of two, within limits."""
    return min(1 << max(0, rows - 1).bit_length(), ROW_COUNTS[-1])


def pick(record: Crossover, rows: int, *, room: bool, in_fp8: bool = False) -> Pick:
    """The fastest way for this many rows: a pure function of the record.

    `room`: whether a cache can hold the expanded weight. Of equal times the way that needs less memory wins. `in_fp8`:
    whether the product may run in FP8. It then does so where it was not measured, but would be decoded: that reads and
    writes more.
    """
    timing = record.at(rows)
    times = {
        "fused": None if record.refused else timing.median_ms("fused"),
        "decode": timing.median_ms("decode"),
        "tile_cache": timing.median_ms("expanded") if room else None,
        "fp8": timing.median_ms("fp8") if in_fp8 else None,
    }
    measured = {way: time for way, time in times.items() if time is not None}
    best = min(measured, key=lambda way: measured[way])  # the first of equals
    shown = ", ".join(f"{way} {time:.4f} ms" for way, time in measured.items())
    reason = f"measured for {timing.rows} rows: {shown}"
    if record.refused:
        reason += f"; fused is not used: {record.refused}"
    if not room:
        reason += "; no room in a tile cache"
    if best == "decode" and in_fp8 and times["fp8"] is None:
        best, reason = "fp8", f"{reason}; fp8 saves most of the decoding"
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


def measure_fp8(weight: Encoded, rows: int, *, timer: Timer | None = None) -> Timing | str:
    """The timing of the product in FP8 with inputs in bfloat16; or, in words, how its result is wrong."""
    from bitplan.packed.products.fp8_rows import FP8_INPUT, fp8_linear

    device = weight.device
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        generator = torch.Generator(device).manual_seed(0)
        x = torch.randn((rows, weight.shape[1]), generator=generator, device=device).bfloat16()
        bench = _Bench(weight, decode(weight, x.dtype), timer or cuda_timer(device))
        wrong = bench.why_wrong(round_input(x, FP8_INPUT), lambda _: fp8_linear(x, weight, None), [None])
        return wrong or Timing(rows, {"fp8": tuple(bench.timer(lambda: fp8_linear(x, weight, None), REPEATS))})


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


def _too_large_for_the_gpu() -> tuple[type[Exception], ...]:
    """What Triton raises for a launch that needs more than the GPU has; nothing where Triton was not imported."""
    triton = sys.modules.get("triton")
    return () if triton is None else (triton.OutOfResources,)


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
            except _too_large_for_the_gpu() as error:
                if len(launches) == 1:
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


# ---- on disk ---------------------------------------------------------------------------------------------------------


DOCUMENT = "bitplan-crossover"
VERSION = 1
Fingerprint = dict[str, str]
PACKAGE = Path(__file__).parents[1]
SHIPPED = PACKAGE / "data"
SHIPPED_KEYS = ("gpu", "kernels")
GPU_SOURCES = (
    "formats/triton_numbers.py",
    "packed/products/decode_words.py",
    "packed/products/direct_products.py",
    "packed/products/expert_routing.py",
    "packed/products/fused_few_rows.py",
    "packed/products/fused_many_rows.py",
    "packed/products/fused_weights.py",
)
Key = tuple[str, int, int]
Measure = Callable[..., Crossover]  # as measure_crossover

_TEXT_OR_NULL = Kind("a string or null", lambda value: value is None or type(value) is str)
_POSITIVE = Kind("an integer from 1", lambda value: type(value) is int and 1 <= value < 2**63)
_TIMINGS = Kind("a list of one timing or more", lambda value: type(value) is list and bool(value))
_LAUNCH = Kind(
    "null, or an object of integers",
    lambda value: value is None or (type(value) is dict and all(type(item) is int for item in value.values())),
)
_SAMPLES = Kind(
    "a list of numbers above 0",
    lambda v: type(v) is list and bool(v) and all(is_number(item) and item > 0 for item in v),
)
_WEIGHT_KEYS = {
    "format": NAME,
    "out_features": SIZE,
    "in_features": SIZE,
    "refused": _TEXT_OR_NULL,
    "stopped": _TEXT_OR_NULL,
    "timings": _TIMINGS,
}
_TIMING_KEYS = {"rows": _POSITIVE, "launch": _LAUNCH, "samples_ms": OBJECT}
_WAYS = {"fused": _SAMPLES, "decode": _SAMPLES, "expanded": _SAMPLES, "fp8": _SAMPLES}


class CrossoverTable:
    """The crossovers of one GPU model: read at first use, measured if missing, kept on disk."""

    def __init__(
        self,
        path: Path,
        fingerprint: Fingerprint,
        measure: Measure = measure_crossover,
        shipped: Path | None = None,
    ) -> None:
        self.path, self.fingerprint, self.shipped = path, fingerprint, shipped
        self._measure = measure
        self._crossovers: dict[Key, Crossover] | None = None
        self._failed: dict[Key, str] = {}
        self.wrong_in_fp8: dict[Key, str] = {}  # weights whose products in FP8 were wrong when they were measured
        self._lock = threading.RLock()

    def find(self, fmt: str, out_features: int, in_features: int) -> Crossover | None:
        """The recorded timings of this format and shape; None where there are none. Nothing is measured."""
        with self._lock:
            if self._crossovers is None:
                shipped = {} if self.shipped is None else read_shipped(self.shipped, self.fingerprint)
                self._crossovers = _joined(shipped, read_crossovers(self.path, self.fingerprint))
            return self._crossovers.get((fmt, out_features, in_features))

    def why_never(self, fmt: str, out_features: int, in_features: int) -> str | None:
        """Why a weight that was tried in this process could not be measured."""
        return self._failed.get((fmt, out_features, in_features))

    def find_or_measure(
        self, weight: Encoded, fused: FusedMatmul | None, rows: int, *, in_fp8: bool = False
    ) -> Crossover | None:
        """The record of this format and shape, with `rows` measured now if missing; on failure the old record.

        in_fp8   whether the product in FP8 is wanted as well
        """
        key, bucket = (weight.fmt.name, weight.shape[0], weight.shape[1]), bucket_of(rows)
        with self._lock:
            record = self._find_or_measure(key, weight, fused, bucket)
            if not in_fp8 or record is None or key in self.wrong_in_fp8:
                return record
            timing = record.at(bucket)
            if timing.rows != bucket or "fp8" in timing.samples_ms:
                return record
            try:
                measured = measure_fp8(weight, bucket)
            except torch.OutOfMemoryError as error:
                log.warning("bitplan: %s of shape %s in FP8: %s", key[0], key[1:], str(error).splitlines()[0])
                return record
            if isinstance(measured, str):
                log.error("bitplan: products of %s in FP8 are wrong and will not be used: %s", key[0], measured)
                self.wrong_in_fp8[key] = measured
                return record
            return self._keep(record.joined(replace(record, timings=(measured,))))

    def _find_or_measure(self, key: Key, weight: Encoded, fused: FusedMatmul | None, bucket: int) -> Crossover | None:
        with self._lock:
            record = self.find(*key)
            if key in self._failed or (record is not None and (record.refused or record.has(bucket))):
                return record
            say_progress(
                f"bitplan: measuring {key[0]} of {key[1]} x {key[2]} at {bucket} rows, once on this GPU; "
                f"kept in {self.path}"
            )
            try:
                measured = self._measure(weight, fused, row_counts=(bucket,))
            except torch.OutOfMemoryError as error:
                self._failed[key] = f"out of memory while measuring: {str(error).splitlines()[0]}"
                log.warning("bitplan: %s of shape %s: %s", key[0], key[1:], self._failed[key])
                return record
            finally:
                say_progress("")
            return self._keep(measured if record is None else record.joined(measured))

    def _keep(self, record: Crossover) -> Crossover:
        assert self._crossovers is not None
        self._crossovers[record.key] = record
        # Another process may have measured other shapes meanwhile; for equal ones ours are newer.
        merged = _joined(read_crossovers(self.path, self.fingerprint), self._crossovers)
        self._crossovers = merged
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, to_document(merged, self.fingerprint))
        except OSError as error:
            log.warning("bitplan: %s cannot be written, so it is measured again next time: %s", self.path, error)
        return merged[record.key]


def _joined(first: dict[Key, Crossover], second: dict[Key, Crossover]) -> dict[Key, Crossover]:
    """The records of both mappings; records of the same format and shape become one with both's timings."""
    return first | {key: first[key].joined(record) if key in first else record for key, record in second.items()}


def say_progress(text: str) -> None:
    """Show one line on a terminal, which the next overwrites; elsewhere log it."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        log.info("%s", text)


@functools.cache
def _table_of(gpu: str) -> CrossoverTable:
    slug = re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_")
    path = cache_dir() / "crossover" / f"{slug}.json"
    return CrossoverTable(path, gpu_fingerprint(gpu), shipped=SHIPPED / f"crossover_{slug}.json")


def crossovers_of(device: torch.device) -> CrossoverTable:
    """The table of the GPU that a tensor lies on."""
    return _table_of(torch.cuda.get_device_name(device))


def gpu_fingerprint(gpu: str) -> Fingerprint:
    """All that a measured time depends on, except the weight."""
    return describe_gpu(gpu) | {"kernels": _source_hash()}


def _source_hash() -> str:
    """A hash of the code that runs on a GPU, without comments and docstrings: edited kernels are measured again."""
    digest = hashlib.sha256()
    for name in GPU_SOURCES:
        source = (PACKAGE / name).read_text(encoding="utf-8")
        texts = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr) and _is_text(node.value)]
        left_out = {number for text in texts for number in range(text.lineno, (text.end_lineno or text.lineno) + 1)}
        for number, line in enumerate(source.splitlines(), start=1):
            if line.strip() and not line.lstrip().startswith("#") and number not in left_out:
                digest.update(line.encode() + b"\n")
    return digest.hexdigest()[:16]


def _is_text(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


# ---- the document ----------------------------------------------------------------------------------------------------


def to_document(crossovers: dict[Key, Crossover], fingerprint: Fingerprint) -> dict[str, Any]:
    weights = [_weight_document(crossovers[key]) for key in sorted(crossovers)]
    return {"document": DOCUMENT, "version": VERSION, "fingerprint": fingerprint, "weights": weights}


def read_crossovers(path: Path, fingerprint: Fingerprint) -> dict[Key, Crossover]:
    """The records in a file that were measured under this fingerprint; a reason for having none is logged."""
    if not path.exists():
        return {}
    try:
        return from_document(load_document(path, FileFormatError), fingerprint, where=str(path))
    except FileFormatError as error:
        log.warning("bitplan: %s; everything is measured again", error)
        return {}


def read_shipped(path: Path, fingerprint: Fingerprint) -> dict[Key, Crossover]:
    """The records that came with the package, if GPU and kernels are the same."""
    if not path.exists():
        return {}
    document = load_document(path, FileFormatError)
    theirs = document.get("fingerprint", {}) if isinstance(document, dict) else {}
    if any(theirs.get(key) != fingerprint[key] for key in SHIPPED_KEYS):
        log.info("bitplan: %s was measured with other kernels, and is not used", path)
        return {}
    return from_document(document, theirs, where=str(path))


def from_document(document: Any, fingerprint: Fingerprint, *, where: str) -> dict[Key, Crossover]:
    reader = Reader(where, FileFormatError)
    reader.version(document, VERSION)
    kinds = {"document": one_of(DOCUMENT), "version": SIZE, "fingerprint": OBJECT, "weights": LIST}
    parts = reader.keys("", document, kinds, tuple(kinds))
    if parts["fingerprint"] != fingerprint:
        theirs = parts["fingerprint"]
        differing = [key for key in sorted({*theirs, *fingerprint}) if theirs.get(key) != fingerprint.get(key)]
        differences = ", ".join(f"{key} {theirs.get(key)!r}, now {fingerprint.get(key)!r}" for key in differing)
        reader.stop(f"measured under other conditions ({differences})")
    records = [_read_weight(reader, f"weights[{index}]", item) for index, item in enumerate(parts["weights"])]
    return {record.key: record for record in records}


def _weight_document(record: Crossover) -> dict[str, Any]:
    timings = [
        {
            "rows": timing.rows,
            "launch": None if timing.launch is None else dict(timing.launch),
            "samples_ms": {way: list(samples) for way, samples in timing.samples_ms.items()},
        }
        for timing in record.timings
    ]
    return {
        "format": record.format,
        "out_features": record.out_features,
        "in_features": record.in_features,
        "refused": record.refused,
        "stopped": record.stopped,
        "timings": timings,
    }


def _read_weight(reader: Reader, path: str, value: Any) -> Crossover:
    item = reader.keys(path, value, _WEIGHT_KEYS, tuple(_WEIGHT_KEYS))
    timings: list[Timing] = []
    for index, timing in enumerate(item["timings"]):
        at = f"{path}.timings[{index}]"
        values = reader.keys(at, timing, _TIMING_KEYS, tuple(_TIMING_KEYS))
        ways = reader.keys(f"{at}.samples_ms", values["samples_ms"], _WAYS, ("decode", "expanded"))
        if timings and values["rows"] <= timings[-1].rows:
            reader.fail(f"{at}: rows", f"more than {timings[-1].rows}", values["rows"])
        timings.append(Timing(values["rows"], {way: tuple(samples) for way, samples in ways.items()}, values["launch"]))
    return Crossover(
        item["format"],
        item["out_features"],
        item["in_features"],
        tuple(timings),
        item["refused"],
        item["stopped"],
    )
