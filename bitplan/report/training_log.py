"""The record of a training run: one line of JSON per step. The report draws loss curves from it.

    {"document": "bitplan-training-log", "version": 1, "run": "int8 blocks", "machine": {...}, "versions": {...}}
    {"step": 0, "loss": 4.21}
    {"step": 1, "loss": 4.02, "validation_loss": 4.1, "learning_rate": 0.0003, "tokens": 8192, "time_s": 1.5}

`run` names the curve; `machine` and `versions` are optional. A step has `step` and `loss`, and any other figure under a
name of its own; null stands for a number that is not finite. No other part writes losses, so the writer is here.

The head is written when the log is opened, so a path that cannot be written is known before the first step. Each line
is one write: a killed process leaves whole lines, and a torn one is cut off when the log is opened again.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bitplan.records import open_log
from bitplan.report.fields import ReportError

DOCUMENT = "bitplan-training-log"
VERSION = 1
_FIRST_BYTES = b'{"document": "bitplan-training-log"'


class TrainingLog:
    """Appends steps to a file; a context manager, or `close()` it. An existing log of ours is continued."""

    def __init__(
        self,
        path: str | Path,
        *,
        run: str = "",
        machine: Mapping[str, Any] | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        self.path = Path(path)
        self._file = -1
        head: dict[str, Any] = {"document": DOCUMENT, "version": VERSION, "run": run or self.path.stem}
        head |= {key: dict(value) for key, value in (("machine", machine), ("versions", versions)) if value}
        try:
            self._file = open_log(self.path, _FIRST_BYTES, what="training log", error=ReportError)
            if not os.fstat(self._file).st_size:
                self._write(head)
        except OSError as error:
            self.close()
            raise ReportError(
                f"{self.path}: the training log cannot be written: {error.strerror or error}; "
                "give a file in a folder that exists"
            ) from None
        except BaseException:
            self.close()
            raise

    def write(self, step: int, loss: float, **figures: float) -> None:
        """Append one step; the line is in the file when this returns."""
        if self._file < 0:
            raise ReportError(f"{self.path}: the training log is closed; open it again to write on")
        numbers = {"step": int(step), "loss": float(loss), **figures}
        self._write({key: value if math.isfinite(value) else None for key, value in numbers.items()})

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        data = json.dumps(line, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        while data:
            data = data[os.write(self._file, data) :]
