"""The report of a running benchmark: a line per row, each written whole, so that a killed benchmark can go on.

The file's fingerprint, recipe, model and settings must be those of this run: rows of two machines never share a file.
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bitplan.base import __version__
from bitplan.base.documents import show
from bitplan.base.hardware import describe_gpu, version_of
from bitplan.base.logs import JsonLog
from bitplan.base.records import on_failure, read_bytes
from bitplan.fp8.policy.report import Fingerprint, Report, Row, describe_row, report_of, split_report
from bitplan.fp8.policy.vocabulary import BenchReportError

_FIRST_BYTES = b'{"document": "bitplan-fp8-report"'


class ReportLog(JsonLog):
    """Opens or resumes a report; `done` has the keys of the rows that the file already has."""

    def __init__(
        self,
        path: str | Path,
        fingerprint: Fingerprint,
        recipe: str,
        *,
        model: str = "",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        empty = Report(fingerprint, recipe, (), model, settings, str(path))
        head = empty.head()
        report_of(head, [], where=str(path))  # checks that the head can be read back, before the work
        super().__init__(path, _FIRST_BYTES, what="report of the layer benchmark", head=head, error=BenchReportError)
        with on_failure(self.close):
            self.rows, self.finished = self._resume(head)
        self.done = {row.key for row in self.rows}

    def append(self, row: Row) -> None:
        """Add one row; it is in the file when this returns."""
        if self.finished:
            raise BenchReportError(f"{self.path}: finished; a new measurement needs a new file")
        if row.key in self.done:
            raise BenchReportError(f"{self.path}: {describe_row(row)} is already there; skip what is in `done`")
        self.write_lines(row.to_document())
        self.rows.append(row)
        self.done.add(row.key)

    def finish(self) -> None:
        """Write the end line; without it the report is not merged."""
        if not self.finished:
            self.write_lines({"end": len(self.rows)})
            self.finished = True

    def _resume(self, mine: Mapping[str, Any]) -> tuple[list[Row], bool]:
        """The rows in the file, and whether the report is finished."""
        head, rows, finished = split_report(read_bytes(self.path, what="report"), where=str(self.path))
        begun = report_of(head, rows, where=str(self.path))
        for key, theirs in begun.head().items():
            if theirs != mine[key]:
                raise BenchReportError(
                    f"{self.path}: begun with {key} {show(theirs)}, this run has {show(mine[key])}; use another path"
                )
        return list(begun.rows), finished


EMULATED = "none: FP8 emulated on the CPU"


def fingerprint_of(device: torch.device) -> Fingerprint:
    """What a time on this device depends on, except the layer.

    On a CPU FP8 is emulated, and the fingerprint says so instead of naming a GPU: such times are never merged with
    those of a GPU, and a policy made from them is refused on every GPU.
    """
    if device.type == "cuda":
        stated = describe_gpu(torch.cuda.get_device_name(device))
        gpu, driver, triton = stated["gpu"], stated["driver"], stated["triton"]
    else:
        gpu, driver, triton = EMULATED, "none", version_of("triton")
    return Fingerprint(gpu, driver, str(torch.__version__), triton, __version__, commit())


@functools.cache
def commit() -> str:
    """The commit of a checkout, with `+changes` if files differ from it; without git, BITPLAN_COMMIT."""
    if stated := os.environ.get("BITPLAN_COMMIT"):
        return stated
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return "none"
    head = _git(root, "rev-parse", "--short=12", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return f"{head}{'+changes' if changed else ''}" if head else "none"


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
