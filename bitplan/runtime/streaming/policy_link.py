"""What a policy of selective precision gives to a stream, and what it learns from it.

ConductorLink applies the transfer limits for each phase of a training step to a stream.

`plan.selective.transfer_limits` decides; this module passes it the pressure that the stream reports, and passes its
limits to the stream (`set_limits`), where they hold at once. The stream's step telemetry shows the limits and
their reasons.

All slots of a busy ring are taken, so the rule about full copy slots does not apply unless you give a bridge of your
own; the rules about memory pressure and the optimizer's phase do.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace

from bitplan.plan.selective.choose_low_units import TransferFacts
from bitplan.plan.selective.decide import BlockPrecisionHint
from bitplan.plan.selective.transfer_limits import ConductorState, HeuristicPolicyBridge, Phase, RuntimeLimitHints
from bitplan.runtime.streaming.stream_blocks import BlockStream
from bitplan.runtime.streaming.telemetry import StreamStepStats
from bitplan.runtime.streaming.training.host_training import GRADIENTS_WAITING


class ConductorLink:
    """One conductor over one stream; without a `bridge` limits start from the stream's own size."""

    def __init__(self, stream: BlockStream, bridge: HeuristicPolicyBridge | None = None) -> None:
        self.stream = stream
        self._given = bridge
        self._bridge = bridge or HeuristicPolicyBridge(self._size())
        self.state: ConductorState = self._bridge.start()

    @property
    def hints(self) -> RuntimeLimitHints:
        return self.state.hints

    def begin_step(self, step: int, hints: Mapping[str, BlockPrecisionHint]) -> None:
        """Begin a step and its forward pass, after a step that ended or was interrupted."""
        self._bridge = self._given or HeuristicPolicyBridge(self._size())
        if self.state.phase is not Phase.STEP_END:
            self.state = self._bridge.start()
        self.state = self._bridge.begin_step(self.state, step, hints)
        self.enter(Phase.FORWARD)

    def restart(self) -> None:
        """Forget the step, as after a saved state is loaded."""
        self.state = self._bridge.start()

    def enter(self, phase: Phase) -> None:
        """Enter a phase, and set its limits for the present pressure."""
        if phase is Phase.OPTIMIZER and self.state.phase is Phase.FORWARD:
            self.enter(Phase.BACKWARD)  # no hook saw it: no gradient passed the last block
        pressure = self.stream.pressure()
        if self._given is None:
            pressure = replace(pressure, slots_full=False)
        self.state = self._bridge.enter(self.state, phase, pressure)
        self.stream.set_limits(self.state.hints)

    def _size(self) -> RuntimeLimitHints:
        slots = max(1, self.stream.stats.ring_slots)
        return RuntimeLimitHints(slots, GRADIENTS_WAITING, slots)


KEYS = ("compute_ms", "bytes_per_ms", "crossings")


class TransferMeter:
    """How fast the bus is and how long computing takes, from the clocks of the stream's first steps.

    `note` every step, `settle` when a decision (`bandwidth_aware`) needs the facts. Times differ from run to run, so
    both are fixed once, as the median of the steps until then, and saved with the policy's state: a resumed run uses
    the same facts.
    """

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
