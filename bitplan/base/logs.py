"""JsonLog: lines of JSON that are appended to a file. Every log that bitplan writes is one.

The lines of a call go to the system in one write, so a killed process loses at most the line it was writing; closing
waits for the disk. A line that is torn nevertheless (a full disk, a power cut) is cut off, at once or when the log is
opened again. Lines are appended only to a new or empty file, or to a file that begins like logs of this kind. One
process writes a log: ranks of a distributed run need a file each.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from bitplan.base.errors import BitplanError, StoreError
from bitplan.base.records import Closing, check_output, on_failure

_log = logging.getLogger("bitplan")


class JsonLog(Closing):
    """A log file of JSON lines, open for appending; use it in a `with` block, or `close()` it."""

    def __init__(
        self,
        path: str | Path,
        begins: bytes,
        *,
        noun: str,
        head: Mapping[str, Any] | None = None,
        error: type[BitplanError] = StoreError,
        may_lose_lines: bool = False,
    ) -> None:
        """Open the file, so that a path that cannot be written is an error before the work.

        begins  the beginning of the first line of such a log; its numbers match any number
        noun    the name of this kind of log in errors, whose class is `error`
        head    the first line, written where the file is new or empty

        may_lose_lines  for a run that must not stop for its log: a line that cannot be written is counted in
        `lost_lines`, the first of them is logged as an error, and a file that was deleted is made again
        """
        self.path = Path(path)
        self.lost_lines = 0
        self._begins, self._noun, self._head, self._error = begins, noun, head, error
        self._may_lose_lines = may_lose_lines
        self._file: int | None = None
        self._closed = False
        self._open()

    def write_lines(self, *records: Mapping[str, Any]) -> None:
        """Append a line for each record, all of them in one write."""
        if self._closed:
            raise self._error(f"{self.path}: the {self._noun} is closed; open it again to write on")
        lines = "".join(map(json_line, records)).encode()
        try:
            if self._file is None or not os.fstat(self._file).st_nlink:  # a deleted file would lose lines silently
                if not self._may_lose_lines:
                    raise self._error(f"{self.path}: the {self._noun} was deleted while it was open; start it again")
                self._close_file()
                self._open()
            self._write(lines)
        except self._error as fault:
            if not self._may_lose_lines:
                raise
            if not self.lost_lines:
                _log.error("bitplan: %s; telemetry is being lost, the run goes on", fault)
            self.lost_lines += len(records)

    def close(self) -> None:
        self._closed = True
        self._close_file()

    def _open(self) -> None:
        try:
            check_output(self.path)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except StoreError as refused:
            raise self._error(str(refused)) from None
        except OSError as fault:
            raise self._error(
                f"{self.path}: the {self._noun} cannot be written: {fault.strerror or fault}; "
                "give a file in a folder that exists"
            ) from None
        with on_failure(self._close_file):
            start, expected = os.pread(self._file, 4 * len(self._begins), 0), _without_numbers(self._begins)
            beginning = _without_numbers(start)
            if beginning[: len(expected)] != expected[: len(beginning)]:
                raise self._error(
                    f"{self.path}: exists and is not a {self._noun}; nothing was appended to it: give another name"
                )
            _cut_torn_line(self._file)
            if self._head is not None and not os.fstat(self._file).st_size:
                self._write(json_line(self._head).encode())

    def _write(self, lines: bytes) -> None:
        """Write whole lines or none."""
        assert self._file is not None
        end, done = os.fstat(self._file).st_size, 0
        try:
            while done < len(lines):
                done += os.write(self._file, lines[done:])
        except OSError as fault:
            with suppress(OSError):  # a torn rest is cut off when the log is opened again
                os.ftruncate(self._file, end)
            raise self._error(
                f"{self.path}: {len(lines)} bytes could not be appended ({fault.strerror or fault}); free some space"
            ) from None

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                with suppress(OSError) if self._may_lose_lines else nullcontext():
                    os.fsync(file)
            finally:
                os.close(file)


def json_line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"


def _cut_torn_line(descriptor: int) -> None:
    size = start = os.fstat(descriptor).st_size
    while start:
        start = max(0, start - 2**16)
        newline = os.pread(descriptor, 2**16, start).rfind(b"\n")
        if newline >= 0 or start == 0:
            if start + newline + 1 < size:
                os.ftruncate(descriptor, start + newline + 1)
            return


def _without_numbers(head: bytes) -> bytes:
    return re.sub(rb"-?[0-9]+|-$", b"0", head)
