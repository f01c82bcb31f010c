"""Drift telemetry: how far each packed weight is from its master, one line of JSON per layer and call.

A person who fine-tunes over a packed base watches these lines: the largest error after decoding, and the counters that
say why it grows. Lines are kept until a call is complete and then appended in one write, so a killed process
leaves whole lines; should one be torn all the same (a full disk, a power cut), it is left out when the log is
read and cut off when it is next opened.

    {"step": 12, "name": "up.weight", "format": "mxfp4", "count": 8192, "max_abs_error": 0.21, "relative_error": 0.11,
     "blocks": 256, "nan_scales": 0, "saturated_scales": 0, "clipped_scales": 0, "underflowed_scales": 0,
     "saturated_codes": 410, "flushed_codes": 698, "undefined_codes": 0, "bytes": 4352,
     "tiles_saturated": 0, "tiles_underflowed": 0, "tiles_rebased": 0, "base_rebased": false}

The last four are null where nothing was requantized, and so is an error that is not finite.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from torch import Tensor, nn

from bitplan.documents import show
from bitplan.errors import FileFormatError, StoreError
from bitplan.formats import Encoded
from bitplan.formats.quantization_error import Similarity, similarity
from bitplan.formats.scales.checks import ScaleHealth, scale_health
from bitplan.formats.scales.drift import DriftCounts
from bitplan.kernels import decode
from bitplan.records import open_log, parse_json
from bitplan.store.models.morph import formats_of, stores_of

BUFFER_LINES = 1024
_BEGINS = b'{"step": 0, "name": "'


class DriftLayer(NamedTuple):
    """A weight, its encoding, and what `requantize` counted if it made it."""

    name: str
    master: Tensor
    encoded: Encoded
    counts: DriftCounts | None = None


Layers = (
    nn.Module | Iterable[DriftLayer | tuple[str, Tensor, Encoded] | tuple[str, Tensor, Encoded, DriftCounts | None]]
)


@dataclass(frozen=True)
class DriftRow:
    """One line of the log. `relative_error` is the root of squared error over squared master, as in `error_report`."""

    step: int
    name: str
    format: str
    count: int
    max_abs_error: float
    relative_error: float
    health: ScaleHealth
    bytes: int
    counts: DriftCounts | None = None

    @classmethod
    def of(
        cls, step: int, name: str, sums: Similarity, health: ScaleHealth, nbytes: int, counts: DriftCounts | None = None
    ) -> Self:
        count = health.codes
        return cls(step, name, health.fmt, count, sums.max_error, sums.relative_error, health, nbytes, counts)

    @property
    def badness(self) -> float:
        """For sorting, the worst highest: the relative error, and what is not a number above all numbers."""
        return math.inf if math.isnan(self.relative_error) else self.relative_error

    def to_dict(self) -> dict[str, Any]:
        """The keys of a line, in order."""
        health = self.health.to_dict()
        health.pop("fmt")
        health.pop("codes")
        tiles = asdict(self.counts) if self.counts is not None else {}
        return {
            "step": self.step,
            "name": self.name,
            "format": self.format,
            "count": self.count,
            "max_abs_error": _finite(self.max_abs_error),
            "relative_error": _finite(self.relative_error),
            **health,
            "bytes": self.bytes,
            **{f"tiles_{key}": tiles.get(key) for key in ("saturated", "underflowed", "rebased")},
            "base_rebased": tiles.get("base_rebased"),
        }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


class DriftLog:
    """A JSONL file that lines are appended to; a context manager, or `close()` it.

    Lines wait in memory until `flush()`, `close()` or 1024 of them. Opening makes the file, so a path that cannot be
    written is known before the first step. One process writes a log: ranks of a distributed run need a file each.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lines: list[bytes] = []
        try:
            self._file = open_log(self.path, _BEGINS, what="drift log")
        except OSError as error:
            raise StoreError(
                f"{self.path}: the drift log cannot be written ({error.strerror}); give a file in a folder that exists"
            ) from None
        self._open = True

    def write(self, row: DriftRow) -> None:
        """Take one line; it reaches the file with the next flush."""
        if not self._open:
            raise StoreError(f"{self.path}: the drift log is closed; open it again to write on")
        self._lines.append(json.dumps(row.to_dict(), ensure_ascii=False, allow_nan=False).encode() + b"\n")
        if len(self._lines) >= BUFFER_LINES:
            self.flush()

    def flush(self) -> None:
        """Append all lines that wait, whole lines or none."""
        if not self._lines:
            return
        text, self._lines = b"".join(self._lines), []
        end = os.fstat(self._file).st_size
        try:
            done = 0
            while done < len(text):
                done += os.write(self._file, text[done:])
        except OSError as error:
            os.ftruncate(self._file, end)
            raise StoreError(
                f"{self.path}: {len(text)} bytes could not be appended ({error.strerror}); free some space"
            ) from None

    def close(self) -> None:
        if self._open:
            try:
                self.flush()
            finally:
                self._open = False
                os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def log_drift(log: DriftLog | None, step: int, layers: Layers) -> list[DriftRow]:
    """Measure every layer, append its lines to the log in one write, and return them.

    `layers` are (name, master, encoded) or (name, master, encoded, counts), or a model that `morph_model` morphed: then
    each parameter against its version. Log None measures and writes nothing.
    """
    named = _layers_of(layers) if isinstance(layers, nn.Module) else (DriftLayer(*layer) for layer in layers)
    rows = []
    for layer in named:
        rows.append(measure_drift(step, *layer))
        if log is not None:
            log.write(rows[-1])
    if log is not None:
        log.flush()
    return rows


def measure_drift(
    step: int, name: str, master: Tensor, encoded: Encoded, counts: DriftCounts | None = None
) -> DriftRow:
    """How far an encoding is from its master now."""
    if tuple(master.shape) != encoded.shape:
        raise StoreError(f"{name}: the master is {tuple(master.shape)}, its encoding {encoded.shape}")
    sums = similarity(master.to(encoded.device), decode(encoded))
    return DriftRow.of(step, name, sums, scale_health(encoded), encoded.nbytes, counts)


def _layers_of(model: nn.Module) -> Iterator[DriftLayer]:
    formats, seen = formats_of(model), set()
    for name, store in stores_of(model).items():
        if (id(store), formats[name].name) not in seen:  # tied weights count once
            seen.add((id(store), formats[name].name))
            yield DriftLayer(name, store.master, store.morph(formats[name]))


def read_drift(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a log; a torn last one is left out, any other that is not JSON is an error with its number."""
    lines = Path(path).read_bytes().split(b"\n")[:-1]
    entries = [parse_json(line, where=f"{path}: line {number}") for number, line in enumerate(lines, 1)]
    for number, line in enumerate(entries, 1):
        if not isinstance(line, dict) or "step" not in line or "name" not in line:
            raise FileFormatError(f"{path}: line {number}: expected an object with step and name, got {show(line)}")
    return entries
