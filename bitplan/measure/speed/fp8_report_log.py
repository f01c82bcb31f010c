"""The report while it is being measured: a line per row, each written whole, so that a killed benchmark can go on.

A row is appended with one write and flushed to the disk before the next is measured. A process killed in between leaves
whole lines; should a line be torn all the same (a full disk, a power cut), it is cut off when the log is opened again.
What the file says (fingerprint, recipe, model, settings) must be what this run says: rows of two machines never share a
file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bitplan.documents import show
from bitplan.plan.fp8.report import Fingerprint, Report, Row, describe_row, one_line, report_of, split_report
from bitplan.plan.fp8.terms import ReportError
from bitplan.records import open_log

_FIRST_BYTES = b'{"document": "bitplan-fp8-report"'


class ReportLog:
    """Opens or resumes a report; `done` has the keys of the rows that are already there."""

    def __init__(
        self,
        path: str | Path,
        fingerprint: Fingerprint,
        recipe: str,
        *,
        model: str = "",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = Path(path)
        empty = Report(fingerprint, recipe, (), model, settings, str(path))
        report_of(empty.head(), [], where=str(path))  # a head that cannot be read back is known before the work
        self.finished = False
        self.rows: list[Row] = []
        self._file = open_log(self.path, _FIRST_BYTES, what="report of the layer benchmark", error=ReportError)
        try:
            data = self.path.read_bytes()
            if data:
                self._resume(data, empty)
            else:
                self._write(one_line(empty.head()))
        except BaseException:
            os.close(self._file)
            raise
        self.done = {row.key for row in self.rows}

    def append(self, row: Row) -> None:
        """Add one row; it is on the disk when this returns."""
        if self.finished:
            raise ReportError(f"{self.path}: finished; a new measurement needs a new file")
        if row.key in self.done:
            raise ReportError(f"{self.path}: {describe_row(row)} is already there; skip what is in `done`")
        self._write(one_line(row.to_document()))
        self.rows.append(row)
        self.done.add(row.key)

    def finish(self) -> None:
        """Write the end line; without it the report is not merged."""
        if not self.finished:
            self._write(one_line({"end": len(self.rows)}))
            self.finished = True

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _resume(self, data: bytes, empty: Report) -> None:
        head, rows, self.finished = split_report(data, where=str(self.path))
        report = report_of(head, rows, where=str(self.path))
        for key, mine in empty.head().items():
            theirs = report.head()[key]
            if theirs != mine:
                raise ReportError(
                    f"{self.path}: begun with {key} {show(theirs)}, this run has {show(mine)}; use another path"
                )
        self.rows = list(report.rows)

    def _write(self, text: str) -> None:
        data = text.encode()
        while data:
            data = data[os.write(self._file, data) :]
        os.fsync(self._file)
