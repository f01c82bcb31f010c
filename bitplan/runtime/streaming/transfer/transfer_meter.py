"""TransferMeter: how fast the bus is and how long computing takes, from the clocks of the stream's first steps.

`bandwidth_aware` decisions need both. Times differ from run to run, so both are fixed once, as the median of the steps
until then, and saved with the policy's state: a resumed run uses the same facts.
"""

from __future__ import annotations

import statistics

from bitplan.plan.selective.choose_low_units import TransferFacts
from bitplan.runtime.streaming.telemetry import StreamStepStats

KEYS = ("compute_ms", "bytes_per_ms", "crossings")


class TransferMeter:
    """`note` every step, `settle` when a decision needs the facts."""

    def __init__(self) -> None:
        self.facts: TransferFacts | None = None
        self._seen: dict[int, TransferFacts] = {}

    def note(self, last: StreamStepStats | None, one_crossing_bytes: int) -> None:
        """Add a step whose clocks have been read; moving all blocks once takes `one_crossing_bytes`."""
        if self.facts is not None or last is None or last.step in self._seen:
            return
        if last.bytes_h2d and last.h2d_gb_per_s:
            crossings = last.bytes_h2d / one_crossing_bytes
            self._seen[last.step] = TransferFacts(last.compute_ms, last.h2d_gb_per_s * 1e6, crossings)
        else:  # every block is resident: nothing is transferred
            self._seen[last.step] = TransferFacts(last.compute_ms, float(one_crossing_bytes), 1e-9)

    def settle(self) -> TransferFacts | None:
        """The facts, fixed from now on; None where no clock has been read yet."""
        if self.facts is None and self._seen:
            seen = list(self._seen.values())
            self.facts = TransferFacts(*(statistics.median(getattr(one, key) for one in seen) for key in KEYS))
        return self.facts

    def to_document(self) -> dict[str, float] | None:
        return None if self.facts is None else {key: getattr(self.facts, key) for key in KEYS}
