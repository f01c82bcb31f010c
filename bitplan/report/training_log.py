"""The record of a training run: one line of JSON per step. The report draws loss curves from it.

    {"document": "bitplan-training-log", "version": 1, "run": "int8 blocks", "machine": {...}, "versions": {...}}
    {"step": 0, "loss": 4.21}
    {"step": 1, "loss": 4.02, "validation_loss": 4.1, "learning_rate": 0.0003, "tokens": 8192, "time_s": 1.5}

`run` names the curve; `machine` and `versions` are optional. A step has `step` and `loss`, and any other figure under a
name of its own; null stands for a number that is not finite. No other part writes losses, so the writer is here.

The head is written when the log is opened, so a path that cannot be written is an error before the first step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bitplan.logs import JsonLog
from bitplan.report.read_records import ReportError

DOCUMENT = "bitplan-training-log"
VERSION = 1
_FIRST_BYTES = b'{"document": "bitplan-training-log"'


class TrainingLog(JsonLog):
    """Appends steps to a file; a context manager, or `close()` it. An existing log of ours is continued."""

    def __init__(
        self,
        path: str | Path,
        *,
        run: str = "",
        machine: Mapping[str, Any] | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        head: dict[str, Any] = {"document": DOCUMENT, "version": VERSION, "run": run or Path(path).stem}
        head |= {key: dict(value) for key, value in (("machine", machine), ("versions", versions)) if value}
        super().__init__(path, _FIRST_BYTES, what="training log", head=head, error=ReportError)

    def write(self, step: int, loss: float, **figures: float) -> None:
        """Append one step; the line is in the file when this returns."""
        numbers = {"step": int(step), "loss": float(loss), **figures}
        self.write_lines({key: value if math.isfinite(value) else None for key, value in numbers.items()})
