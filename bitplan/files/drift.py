"""Drift telemetry: how far each packed weight is from its master, one line of JSON per layer and call.

Whoever fine-tunes over a packed base watches these lines: the largest error after decoding, and the counters that
explain its growth. The lines of a call are appended in one write (`logs`). A torn line is skipped when the log is read.

    {"step": 12, "name": "up.weight", "format": "mxfp4", "count": 8192, "max_abs_error": 0.21, "relative_error": 0.11,
     "blocks": 256, "nan_scales": 0, "saturated_scales": 0, "clipped_scales": 0, "underflowed_scales": 0,
     "saturated_codes": 410, "flushed_codes": 698, "undefined_codes": 0, "bytes": 4352,
     "tiles_saturated": 0, "tiles_underflowed": 0, "tiles_rebased": 0, "base_rebased": false}

The last four are null where nothing was requantized, and so is an error that is not finite.

`drift_files` gives the same of two files, a checkpoint and its packed version. `compare_files` takes any two files and
says how alike their numbers are; this compares packed tensors only, and also checks their scales and codes. Both files
are read in pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from torch import Tensor, nn

from bitplan.base.documents import STRING, Kind, Reader
from bitplan.base.errors import BitplanError, FileFormatError, StoreError
from bitplan.base.logs import JsonLog
from bitplan.base.records import parse_json, read_bytes
from bitplan.files.models.morph import formats_of, stores_of
from bitplan.files.open_files import open_tensors
from bitplan.files.packed_rows import PackedTensor, packed_pair, packed_tensor, scales_name
from bitplan.files.safetensors_tensors import NativeTensors
from bitplan.files.tensor_file import TensorFile
from bitplan.formats import Encoded, get_format
from bitplan.formats.dispatch import decode
from bitplan.formats.quantization_error import Similarity, similarity
from bitplan.formats.reencode import DriftCounts
from bitplan.formats.scale_checks import ScaleHealth, scale_health

MAX_LOG_BYTES = 2**30
_BEGINS = b'{"step": 0, "name": "'
_READ_KEYS = {"step": Kind("an integer", lambda value: type(value) is int), "name": STRING}


class DriftLayer(NamedTuple):
    """A weight, its encoding, and the counts of `requantize`, if that made the encoding."""

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
        """A key for sorting, the largest is the worst: the relative error; NaN is above all numbers."""
        return math.inf if math.isnan(self.relative_error) else self.relative_error

    def to_dict(self) -> dict[str, Any]:
        """The row as a JSON object, keys in the log's order."""
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


class DriftLog(JsonLog):
    """A JSONL file that lines are appended to; a context manager, or `close()` it. Opening makes the file."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path, _BEGINS, noun="drift log")

    def write(self, *rows: DriftRow) -> None:
        """Append a line for each row; they are in the file when this returns."""
        self.write_lines(*(row.to_dict() for row in rows))

    def add(self, step: int, layers: Layers) -> list[DriftRow]:
        """Measure every layer, append its lines in one write, and return them."""
        rows = drift_of(step, layers)
        self.write(*rows)
        return rows

    @staticmethod
    def read(path: str | Path) -> list[dict[str, Any]]:
        """The lines of a log; a torn last line is skipped, another that is no JSON is an error with its number."""
        rows = []
        for number, line in enumerate(read_bytes(path, max_bytes=MAX_LOG_BYTES, noun="drift log").split(b"\n")[:-1], 1):
            where = f"{path}: line {number}"
            reader = Reader(where, FileFormatError, strict=False)
            rows.append(reader.keys("", parse_json(line, where=where), _READ_KEYS, _READ_KEYS))
        return rows


def drift_of(step: int, layers: Layers) -> list[DriftRow]:
    """Measure every layer.

    `layers` are (name, master, encoded) or (name, master, encoded, counts), or a model that `morph_model` morphed: then
    each parameter is compared with its version.
    """
    named = _layers_of(layers) if isinstance(layers, nn.Module) else (DriftLayer(*layer) for layer in layers)
    return [measure_drift(step, *layer) for layer in named]


def measure_drift(
    step: int, name: str, master: Tensor, encoded: Encoded, counts: DriftCounts | None = None
) -> DriftRow:
    """Measure the error of an encoding against its master weight as it is now, as a row of the log."""
    if tuple(master.shape) != encoded.shape:
        raise StoreError(f"{name}: the master is {tuple(master.shape)}, its encoding {encoded.shape}")
    sums = similarity(master.to(encoded.device), decode(encoded))
    return DriftRow.of(step, name, sums, scale_health(encoded), encoded.nbytes, counts)


def _layers_of(model: nn.Module) -> Iterator[DriftLayer]:
    formats, counted = formats_of(model), set()
    for name, store in stores_of(model).items():
        if (id(store), formats[name].name) not in counted:  # tied weights count once
            counted.add((id(store), formats[name].name))
            yield DriftLayer(name, store.master, store.morph(formats[name]))


OnBytes = Callable[[int, str], None]


@dataclass(frozen=True)
class FileDrift:
    """A row per packed tensor, the largest relative error first, and findings where tensors cannot be compared."""

    rows: tuple[DriftRow, ...]
    findings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {"layers": [row.to_dict() for row in self.rows], "findings": list(self.findings)}


def drift_files(master: str | Path, packed: str | Path, *, step: int = 0, on_bytes: OnBytes | None = None) -> FileDrift:
    """Compare every packed tensor of one file with the tensor of its name in another.

    gpt-oss's pairs NAME.blocks and NAME.scales (OpenAI's) are compared with NAME; NAME_blocks and NAME_scales (Hugging
    Face's) with NAME transposed, which is how transformers holds experts in floats; so are experts of packed folders.
    """
    rows: list[DriftRow] = []
    findings: list[str] = []
    with open_tensors(master) as one, open_tensors(packed) as two:
        for tensor, name, transposed in _packed(two, findings):
            spec = one.specs.get(one.tied.get(name, name))
            shape = (*tensor.shape[:-2], *tensor.shape[:-3:-1]) if transposed else tensor.shape
            if spec is None:
                findings.append(f"{tensor.name}: in {packed}, but {name!r} is not in {master}")
            elif spec.shape_in_model != shape:
                findings.append(f"{tensor.name}: {name!r} must be {shape} in {master}, got {spec.shape_in_model}")
            elif not spec.torch_dtype.is_floating_point:
                findings.append(f"{tensor.name}: {name!r} must be floats in {master}, got {spec.format}")
            else:
                rows.append(_drift(_Master(one, spec.name, tensor.steps, transposed), tensor, name, step, on_bytes))
                if not math.isfinite(rows[-1].max_abs_error):
                    findings.append(f"{name}: NaN or infinity on one side, so its figures say nothing")
    if not rows and not findings:
        findings.append(f"{packed}: no packed tensor; `bitplan compare` takes any two files")
    rows.sort(key=lambda row: (-row.badness, row.name))
    return FileDrift(tuple(rows), tuple(findings))


def _drift(master: _Master, tensor: PackedTensor, name: str, step: int, on_bytes: OnBytes | None) -> DriftRow:
    sums, health = Similarity(), None
    for start, stop in tensor.spans():
        encoded = tensor.read(start, stop)
        sums += similarity(master.read(start, stop), decode(encoded))
        piece_health = scale_health(encoded)
        health = piece_health if health is None else health + piece_health
        if on_bytes:
            on_bytes((stop - start) * tensor.nbytes // tensor.steps, name)
    assert health is not None
    return DriftRow.of(step, name, sums, health, tensor.nbytes)


class _Master:
    """A master tensor, read beside its packed version: by rows where the file allows it, else as a whole."""

    def __init__(self, file: TensorFile, name: str, steps: int, transposed: bool) -> None:
        spec = file.spec(name)
        self._file, self._name, self._steps, self._transposed = file, name, steps, transposed
        has_rows = spec.shape[:1] == (steps,) and not (transposed and len(spec.shape) == 2)
        self._by_rows = isinstance(file, NativeTensors) and not spec.encoded and has_rows
        self._whole: Tensor | None = None

    def read(self, start: int, stop: int) -> Tensor:
        if self._by_rows:
            assert isinstance(self._file, NativeTensors)
            return self._turned(self._file.checkpoint.read_rows(self._name, start, stop))
        if self._whole is None:
            self._whole = self._turned(self._file.read_float(self._name)).reshape(self._steps, -1)
        return self._whole[start:stop]

    def _turned(self, numbers: Tensor) -> Tensor:
        return numbers.mT if self._transposed else numbers


def _packed(file: TensorFile, findings: list[str]) -> Iterator[tuple[PackedTensor, str, bool]]:
    """Every packed tensor that is not empty, the name of its master, and whether it is the transpose of the model's."""
    for name, spec in file.specs.items():
        if not math.prod(spec.shape):
            continue
        if spec.encoded:
            yield packed_tensor(file, name), name, spec.transposed
        elif spec.format == "uint8" and name.endswith(("_blocks", ".blocks")):
            scales = scales_name(name)
            if scales in file.specs:
                try:
                    pair = packed_pair(file, name, scales, get_format("mxfp4"))
                except BitplanError as error:
                    findings.append(str(error))
                    continue
                yield pair, name[: -len("_blocks")], name.endswith("_blocks")
