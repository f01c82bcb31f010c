"""Calibration: the error of each candidate format in the output of each block and layer, and its file.

The figure is relative_error = ||out_bf16 - out_low|| / ||out_bf16||, on real activations, averaged over the samples.
`streaming.selective.run_calibration` measures it; this module has the result, its cache, and the check
whether a cache is still valid.

The document, version 1. It is written after every pass, so that a killed run can go on:

    {"document": "bitplan-calibration", "version": 1,
     "fingerprint": {"weights": {BLOCK: HASH}, "quantizer": {FORMAT: TEXT}, "layout": {BLOCK: TEXT},
                     "data": {"batch 0": HASH}, "versions": {PACKAGE: VERSION}},
     "layers": {"0": {LAYER: {FORMAT: ERROR}}},          by batch
     "blocks": {FORMAT: {"0": {BLOCK: ERROR}}}}          by format and batch

ERROR is null where the output was zero or not finite. A file whose fingerprint differs in any part is refused, and the
error names that part: a calibration of other weights would never be noticed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitplan.base.documents import OBJECT, SIZE, Reader, is_number, load_document, one_of, short
from bitplan.base.errors import BitplanError, FileFormatError
from bitplan.base.fingerprints import hash_tensors
from bitplan.base.records import write_json
from bitplan.base.version import __version__
from bitplan.formats import get_format
from bitplan.plan.names import listed, natural_order
from bitplan.streaming.selective.score import mean_of

DOCUMENT = "bitplan-calibration"
VERSION = 1
Errors = dict[str, dict[str, float]]
Fingerprint = Mapping[str, Mapping[str, str]]
_PARTS = {
    "weights": "the weights of",
    "quantizer": "the quantizer settings of",
    "layout": "the block layout of",
    "data": "the data of",
    "versions": "the versions of",
}


class CalibrationError(BitplanError, ValueError):
    """A calibration that cannot be made."""


class CalibrationFileError(CalibrationError, FileFormatError):
    """A cache that cannot be read."""


class StaleCalibrationError(CalibrationFileError):
    """A cache of other weights, data, formats or versions."""


@dataclass(frozen=True)
class CalibrationResult:
    """Relative output errors: block or layer -> format -> error; `excluded` counts samples without an error."""

    blocks: Errors
    layers: Errors
    excluded: Mapping[str, int] = field(default_factory=dict)

    def of(self, name: str, fmt: str) -> float | None:
        """The error of a block or layer in a format, if it was measured."""
        return self.blocks.get(name, self.layers.get(name, {})).get(fmt)


@dataclass
class Calibration:
    """The measurements so far, and their fingerprint."""

    fingerprint: Fingerprint
    layers: dict[str, dict[str, dict[str, float | None]]] = field(default_factory=dict)
    blocks: dict[str, dict[str, dict[str, float | None]]] = field(default_factory=dict)

    def missing_formats(self, batch: int, formats: Iterable[str]) -> list[str]:
        """Formats whose blocks were not measured on a batch."""
        return [fmt for fmt in formats if str(batch) not in self.blocks.get(fmt, {})]

    def is_done(self, batch: int, formats: Sequence[str]) -> bool:
        return str(batch) in self.layers and not self.missing_formats(batch, formats)

    def result(self) -> CalibrationResult:
        """Means over the samples."""
        blocks: dict[str, dict[str, list[float | None]]] = {}
        layers: dict[str, dict[str, list[float | None]]] = {}
        for fmt, batches in self.blocks.items():
            for row in batches.values():
                for name, error in row.items():
                    blocks.setdefault(name, {}).setdefault(fmt, []).append(error)
        for row_of in self.layers.values():
            for name, errors in row_of.items():
                for fmt, error in errors.items():
                    layers.setdefault(name, {}).setdefault(fmt, []).append(error)
        excluded = {
            name: count
            for name, samples in {**blocks, **layers}.items()
            if (count := sum(error is None for measured in samples.values() for error in measured))
        }
        return CalibrationResult(_means(blocks), _means(layers), excluded)

    def save(self, path: str | Path) -> None:
        write_json(
            path,
            {
                "document": DOCUMENT,
                "version": VERSION,
                "fingerprint": {part: dict(rows) for part, rows in self.fingerprint.items()},
                "layers": self.layers,
                "blocks": self.blocks,
            },
        )


def load_calibration(path: str | Path, fingerprint: Fingerprint) -> Calibration:
    """A complete or partial cache, if it is of this model, data and code."""
    reader = Reader(str(path), CalibrationFileError)
    document = load_document(path, CalibrationFileError)
    reader.version(document, VERSION)
    known = {"document": one_of(DOCUMENT), "version": SIZE, "fingerprint": OBJECT, "layers": OBJECT, "blocks": OBJECT}
    item = reader.keys("", document, known, tuple(known))
    differing = compare_fingerprints(item["fingerprint"], fingerprint)
    if differing:
        raise StaleCalibrationError(
            f"{path}: this calibration is stale: {'; '.join(differing)}; calibrate again (on_stale='redo', or delete "
            "the file), or give the cache another path"
        )
    for part in ("layers", "blocks"):
        _check_errors(reader, part, item[part])
    return Calibration(fingerprint, item["layers"], item["blocks"])


def compare_fingerprints(saved: Any, now: Fingerprint) -> list[str]:
    """A text for each part that differs, with the names that differ in it."""
    differences = []
    for part, label in _PARTS.items():
        old = saved.get(part) if isinstance(saved, Mapping) else None
        old = old if isinstance(old, Mapping) else {}
        names = [name for name in natural_order({*old, *now[part]}) if old.get(name) != now[part].get(name)]
        if names:
            first = names[0]
            was, now_is = old.get(first, "not there"), now[part].get(first, "not there")
            differences.append(
                f"{label} {listed(names, 3)} differ ({short(first)} was {short(str(was), 60)}, is {now_is})"
            )
    return differences


def fingerprint_of(
    weights: Mapping[str, Iterable[Tensor]], formats: Iterable[str], layout: Mapping[str, str], batches: Sequence[Any]
) -> Fingerprint:
    """Everything a calibration depends on, by content."""
    return {
        "weights": {name: hash_tensors(tensors) for name, tensors in weights.items()},
        "quantizer": {fmt: _quantizer(fmt) for fmt in formats},
        "layout": dict(layout),
        "data": {f"batch {at}": hash_tensors(tensors_of(batch)) for at, batch in enumerate(batches)},
        "versions": {"bitplan": __version__, "torch": torch.__version__, "calibration": str(VERSION)},
    }


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in order: a tensor, or lists and mappings of tensors and plain values."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        return [tensor for key in sorted(batch) for tensor in tensors_of(batch[key])]
    if isinstance(batch, list | tuple):
        return [tensor for one in batch for tensor in tensors_of(one)]
    if isinstance(batch, bool | int | float | str | None):
        return [torch.tensor(list(repr(batch).encode()), dtype=torch.uint8)]
    raise CalibrationError(
        f"a batch must be a tensor, or lists and mappings of tensors, got a {type(batch).__name__} in it"
    )


def relative_error(reference: Tensor, output: Tensor) -> float | None:
    """||reference - output|| / ||reference||; None where that is no number."""
    reference = reference.float()
    error = float(torch.linalg.vector_norm(reference - output.float()) / torch.linalg.vector_norm(reference))
    return finite_or_none(error)


def finite_or_none(error: float) -> float | None:
    return error if math.isfinite(error) else None


def _quantizer(name: str) -> str:
    fmt = get_format(name)
    return f"{fmt.description}; rule {fmt.default_rule}; {fmt.element}; {fmt.block}"


def _means(samples: Mapping[str, Mapping[str, Sequence[float | None]]]) -> Errors:
    means: Errors = {}
    for name in natural_order(samples):
        row = {fmt: [error for error in errors if error is not None] for fmt, errors in samples[name].items()}
        means[name] = {fmt: mean_of(errors) for fmt, errors in row.items() if errors}
    return means


def _check_errors(reader: Reader, path: str, rows: Mapping[str, Any]) -> None:
    """Three levels of names, then a number from 0 or null."""
    for outer, middle in rows.items():
        for inner, row in (middle if isinstance(middle, Mapping) else {"": middle}).items():
            if not isinstance(row, Mapping):
                reader.fail(f"{path}.{outer}.{inner}".rstrip("."), "an object", row)
            for name, error in row.items():
                if error is not None and not (is_number(error) and error >= 0):
                    reader.fail(f"{path}.{outer}.{inner}.{name}", "a number from 0, or null", error)
