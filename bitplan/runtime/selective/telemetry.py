"""PrecisionTelemetry: one line of JSON per update, with Stagehand's fields, and the bytes that were really saved.

The ten fields from `step_id` to `block_details` are Stagehand's; tools that read its files read these. Its
`estimated_bandwidth_saving_pct` counts blocks (a low block as half a bf16 block), not bytes, so it is wrong for blocks
of different sizes, and for scales and vectors that stay bf16: `bytes_sent` and `bytes_not_sent` are exact.

    {"step_id": 50, "timestamp": 1234567.89, "blocks_bf16": 19, "blocks_int8": 29, "mean_sensitivity": 0.34,
     "max_sensitivity": 0.87, "min_sensitivity": 0.04, "precision_changes": 2, "estimated_bandwidth_saving_pct": 30.2,
     "block_details": {"block.0": {"precision": "int8", "sensitivity": 0.04, "reason": "...", "excluded": {}}},
     "blocks_fp8": 0, "bytes_sent": 1234, "bytes_not_sent": 567, "blocks_int4": 0}

Sensitivities are null where no block has one. Bytes are null where the caller does not know them.

The file is opened when training starts, so that a path that cannot be written is an error then and not after an hour. A
write that fails later does not stop the training.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bitplan.errors import BitplanError
from bitplan.logs import JsonLog
from bitplan.plan.selective.config import SelectivePrecisionConfig
from bitplan.plan.selective.decide import BlockPrecisionHint
from bitplan.plan.selective.score import mean_of

_BEGINS = b'{"step_id": 0, "timestamp": '


class TelemetryError(BitplanError, OSError):
    """A telemetry file that cannot be written."""


@dataclass(frozen=True)
class PrecisionStepMetrics:
    """One line: Stagehand's fields in their order, then ours."""

    step_id: int
    timestamp: float
    blocks_bf16: int
    blocks_int8: int
    mean_sensitivity: float | None
    max_sensitivity: float | None
    min_sensitivity: float | None
    precision_changes: int
    estimated_bandwidth_saving_pct: float
    block_details: Mapping[str, Any] = field(default_factory=dict)
    blocks_fp8: int = 0
    bytes_sent: int | None = None
    bytes_not_sent: int | None = None
    blocks_int4: int = 0


def step_metrics(
    step_id: int,
    hints: Mapping[str, BlockPrecisionHint],
    timestamp: float,
    *,
    unit_bytes: Mapping[str, Mapping[str, int]] | None = None,
    excluded: Mapping[str, Mapping[str, int]] | None = None,
) -> PrecisionStepMetrics:
    """The line for these hints. `unit_bytes`: block -> precision -> bytes sent; `excluded`: the counts so far."""
    counts = Counter(hint.precision for hint in hints.values())
    scores = [hint.sensitivity for hint in hints.values() if hint.sensitivity is not None]
    sent = in_bf16 = None
    if unit_bytes is not None:
        sent = sum(unit_bytes[name][hint.precision] for name, hint in hints.items())
        in_bf16 = sum(unit_bytes[name]["bf16"] for name in hints)
    return PrecisionStepMetrics(
        step_id=step_id,
        timestamp=timestamp,
        blocks_bf16=counts["bf16"],
        blocks_int8=counts["int8"],
        mean_sensitivity=mean_of(scores) if scores else None,
        max_sensitivity=max(scores, default=None),
        min_sensitivity=min(scores, default=None),
        precision_changes=sum(hint.changed for hint in hints.values()),
        estimated_bandwidth_saving_pct=estimate_saving_pct(len(hints) - counts["bf16"], len(hints)),
        block_details={name: _detail(hint, (excluded or {}).get(name, {})) for name, hint in hints.items()},
        blocks_fp8=counts["fp8"],
        bytes_sent=sent,
        bytes_not_sent=None if sent is None or in_bf16 is None else in_bf16 - sent,
        blocks_int4=counts["int4"],
    )


def estimate_saving_pct(low_blocks: int, blocks: int) -> float:
    """A rough estimate: a low block is half the bytes of a bf16 one, so 60% of the blocks save 30%."""
    return round(50.0 * low_blocks / blocks, 1) if blocks else 0.0


def _detail(hint: BlockPrecisionHint, excluded: Mapping[str, int]) -> dict[str, Any]:
    return {
        "precision": hint.precision,
        "sensitivity": hint.sensitivity,
        "reason": hint.reason,
        "excluded": dict(excluded),
    }


class PrecisionTelemetry(JsonLog):
    """Appends lines to a file. `clock` gives the timestamps: seconds since 1970 unless another one is given."""

    def __init__(self, path: str | Path, *, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        try:
            what = "selective precision telemetry file"
            super().__init__(path, _BEGINS, what=what, error=TelemetryError, may_lose_lines=True)
        except TelemetryError as refused:
            raise TelemetryError(f"{refused}; set telemetry_file to it, or telemetry_enabled to false") from None

    @classmethod
    def from_config(cls, config: SelectivePrecisionConfig, folder: str | Path = ".") -> PrecisionTelemetry | None:
        """The file that the config names, within `folder` unless the path is absolute; None where it is turned off."""
        if not (config.enabled and config.telemetry_enabled):
            return None
        return cls(Path(folder) / config.telemetry_file)

    def record(
        self,
        step_id: int,
        hints: Mapping[str, BlockPrecisionHint],
        *,
        unit_bytes: Mapping[str, Mapping[str, int]] | None = None,
        excluded: Mapping[str, Mapping[str, int]] | None = None,
    ) -> PrecisionStepMetrics:
        """Write the line of these hints, and return it."""
        metrics = step_metrics(step_id, hints, self.clock(), unit_bytes=unit_bytes, excluded=excluded)
        self.write(metrics)
        return metrics

    def write(self, metrics: PrecisionStepMetrics) -> None:
        """Append one line, in one write."""
        self.write_lines(asdict(metrics))
