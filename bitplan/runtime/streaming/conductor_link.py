"""ConductorLink: the conductor's phases of a training step, pushed to a stream that obeys them.

The decisions are `plan.selective.conductor`'s; here are only the two ends: the pressure that the stream reports, and
`set_limits`, which it obeys at once. The stream's step telemetry shows the limits and their reasons.

A ring whose slots are all taken is a ring at work, so without a bridge of your own the rule about full copy slots does
not apply; memory pressure and the optimizer's phase do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bitplan.plan.selective.conductor import ConductorState, HeuristicPolicyBridge, Phase, RuntimeLimitHints
from bitplan.plan.selective.decide import BlockPrecisionHint
from bitplan.runtime.streaming.stream_blocks import BlockStream
from bitplan.runtime.streaming.training.host_training import GRADIENTS_WAITING


class ConductorLink:
    """One conductor over one stream; `bridge` None: the stream's own size is where limits start from."""

    def __init__(self, stream: BlockStream, bridge: HeuristicPolicyBridge | None = None) -> None:
        self.stream = stream
        self._given = bridge
        self._bridge = bridge or HeuristicPolicyBridge(self._size())
        self.state: ConductorState = self._bridge.start()

    @property
    def hints(self) -> RuntimeLimitHints:
        return self.state.hints

    def begin_step(self, step: int, hints: Mapping[str, BlockPrecisionHint]) -> None:
        """Start anew, after a step that was ended or one that broke off; the forward pass follows."""
        self._bridge = self._given or HeuristicPolicyBridge(self._size())
        if self.state.phase is not Phase.STEP_END:
            self.state = self._bridge.start()
        self.state = self._bridge.begin_step(self.state, step, hints)
        self.enter(Phase.FORWARD)

    def restart(self) -> None:
        """Forget the step, as when a state of another time is loaded."""
        self.state = self._bridge.start()

    def enter(self, phase: Phase) -> None:
        """The limits of a phase under the pressure of this moment."""
        if phase is Phase.OPTIMIZER and self.state.phase is Phase.FORWARD:
            self.enter(Phase.BACKWARD)  # nobody saw it: no gradient went through the last block
        pressure = self.stream.pressure()
        if self._given is None:
            pressure = replace(pressure, slots_full=False)
        self.state = self._bridge.enter(self.state, phase, pressure)
        self.stream.set_limits(self.state.hints)

    def _size(self) -> RuntimeLimitHints:
        slots = max(1, self.stream.stats.ring_slots)
        return RuntimeLimitHints(slots, GRADIENTS_WAITING, slots)
