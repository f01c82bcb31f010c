"""TelemetryFile: lines of JSON for a run that must not stop for them.

Each line is one write, so a killed process costs the line it was in and no other. What cannot be written (a full disk,
a folder that was deleted or made read-only) is logged once and counted in `lost_lines`; a file that is deleted is made
again, for writing on into one that has no name would lose every line in silence.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bitplan.errors import StoreError
from bitplan.records import open_log

log = logging.getLogger("bitplan")


class TelemetryFile:
    """Appends to a file, which is opened by `open` or with the first line."""

    def __init__(self, path: str | Path, begins: bytes, *, what: str) -> None:
        """`begins` and `what`: how a file of this kind begins, and what it is called (`records.open_log`)."""
        self.path = Path(path)
        self._begins, self._what = begins, what
        self.lost_lines = 0
        self._file: int | None = None

    def open(self) -> None:
        """Raises OSError where the file cannot be written, StoreError where it is some other file."""
        self.close()
        self._file = open_log(self.path, self._begins, what=self._what)

    def append(self, record: Mapping[str, Any]) -> None:
        """One line, in one write; never raises for the file."""
        line = json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        try:
            self._write(line)
        except (OSError, StoreError) as error:
            if not self.lost_lines:
                log.error("bitplan: %s: telemetry is being lost, training goes on: %s", self.path, error)
            self.lost_lines += 1

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _write(self, line: bytes) -> None:
        if self._file is None or not os.fstat(self._file).st_nlink:
            self.open()
        assert self._file is not None
        written = os.write(self._file, line)
        if written != len(line):
            os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise OSError(f"only {written} of {len(line)} bytes were written")
