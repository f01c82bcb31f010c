"""Comparing two files of weights by the numbers they stand for, one tensor at a time."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bitplan.formats.report import Similarity, similarity
from bitplan.store.tensor_files import TensorFile, open_tensors


@dataclass(frozen=True)
class ComparedTensor:
    """One tensor of the first file against the same name in the second."""

    name: str
    format: str
    cosine: float
    sqnr_db: float
    relative_error: float
    max_error: float

    @classmethod
    def of(cls, name: str, fmt: str, sums: Similarity) -> ComparedTensor:
        return cls(name, fmt, sums.cosine, sums.sqnr_db, sums.relative_error, sums.max_error)

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity: an exact tensor's SQNR is null."""
        return {key: None if value in (math.inf, -math.inf) else value for key, value in asdict(self).items()}


@dataclass(frozen=True)
class FileComparison:
    """Rows from the worst SQNR to the best, all of them together, and what could not be compared."""

    rows: list[ComparedTensor]
    overall: ComparedTensor
    findings: list[str]

    def to_dict(self) -> dict[str, Any]:
        return {
            "overall": self.overall.to_dict(),
            "tensors": [row.to_dict() for row in self.rows],
            "findings": self.findings,
        }


def compare_files(first: str | Path, second: str | Path) -> FileComparison:
    """Compare all tensors that both files have; names and shapes that differ are findings."""
    with open_tensors(first) as one, open_tensors(second) as two:
        rows, total = [], Similarity()
        findings = _missing(one, two) + _missing(two, one)
        for name, spec in one.specs.items():
            if name not in two.specs:
                continue
            if spec.shape != two.specs[name].shape:
                findings.append(f"{name}: shape {spec.shape} in {first}, {two.specs[name].shape} in {second}")
                continue
            sums = similarity(one.read_float(name), two.read_float(name))
            total += sums
            rows.append(ComparedTensor.of(name, two.specs[name].format, sums))
    rows.sort(key=lambda row: (row.sqnr_db, row.name))
    return FileComparison(rows, ComparedTensor.of("overall", "", total), findings)


def _missing(one: TensorFile, two: TensorFile) -> list[str]:
    return [f"{name}: in {one.path}, not in {two.path}" for name in one.specs if name not in two.specs]
