"""Measured crossovers on disk: one file per GPU model, in the user's cache folder.

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

import functools
import hashlib
import logging
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bitplan.base.cache_folder import cache_dir
from bitplan.base.documents import LIST, NAME, OBJECT, SIZE, Kind, Reader, is_number, load_document, one_of
from bitplan.base.errors import FileFormatError
from bitplan.base.fingerprints import describe_gpu
from bitplan.base.records import write_json
from bitplan.formats import Encoded
from bitplan.packed.crossover import Crossover, Timing, bucket_of, measure_crossover
from bitplan.packed.products.fused import FusedMatmul

log = logging.getLogger("bitplan")

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
_WAYS = {"fused": _SAMPLES, "decode": _SAMPLES, "expanded": _SAMPLES}


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
        self._lock = threading.RLock()

    def find(self, fmt: str, out_features: int, in_features: int) -> Crossover | None:
        """The record, if there is one; measures nothing."""
        with self._lock:
            if self._crossovers is None:
                shipped = {} if self.shipped is None else read_shipped(self.shipped, self.fingerprint)
                self._crossovers = _joined(shipped, read_crossovers(self.path, self.fingerprint))
            return self._crossovers.get((fmt, out_features, in_features))

    def why_never(self, fmt: str, out_features: int, in_features: int) -> str | None:
        """Why a weight that was tried in this process could not be measured."""
        return self._failed.get((fmt, out_features, in_features))

    def find_or_measure(self, weight: Encoded, fused: FusedMatmul | None, rows: int) -> Crossover | None:
        """The record of this format and shape, with `rows` measured now if missing; on failure the old record."""
        key, bucket = (weight.fmt.name, weight.shape[0], weight.shape[1]), bucket_of(rows)
        with self._lock:
            known = self.find(*key)
            if key in self._failed or (known is not None and (known.refused or known.has(bucket))):
                return known
            say_progress(
                f"bitplan: measuring {key[0]} of {key[1]} x {key[2]} at {bucket} rows, once on this GPU; "
                f"kept in {self.path}"
            )
            try:
                measured = self._measure(weight, fused, row_counts=(bucket,))
            except torch.OutOfMemoryError as error:
                self._failed[key] = f"out of memory while measuring: {str(error).splitlines()[0]}"
                log.warning("bitplan: %s of shape %s: %s", key[0], key[1:], self._failed[key])
                return known
            finally:
                say_progress("")
            return self._keep(measured if known is None else known.joined(measured))

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
    """The records of both; records of the same weights are joined."""
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
    """A hash of the code that runs on a GPU, without comment lines: edited kernels are measured again."""
    digest = hashlib.sha256()
    for name in GPU_SOURCES:
        for line in (PACKAGE / name).read_text(encoding="utf-8").splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                digest.update(line.encode() + b"\n")
    return digest.hexdigest()[:16]


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
    known = {"document": one_of(DOCUMENT), "version": SIZE, "fingerprint": OBJECT, "weights": LIST}
    parts = reader.keys("", document, known, tuple(known))
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
        place = f"{path}.timings[{index}]"
        values = reader.keys(place, timing, _TIMING_KEYS, tuple(_TIMING_KEYS))
        ways = reader.keys(f"{place}.samples_ms", values["samples_ms"], _WAYS, ("decode", "expanded"))
        if timings and values["rows"] <= timings[-1].rows:
            reader.fail(f"{place}: rows", f"more than {timings[-1].rows}", values["rows"])
        timings.append(Timing(values["rows"], {way: tuple(samples) for way, samples in ways.items()}, values["launch"]))
    return Crossover(
        item["format"],
        item["out_features"],
        item["in_features"],
        tuple(timings),
        item["refused"],
        item["stopped"],
    )
