"""ConductorLink: applies the transfer limits for each phase of a training step to a stream.

`plan.selective.transfer_limits` decides; this module passes it the pressure that the stream reports, and passes its
limits to the stream (`set_limits`), where they hold at once. The stream's step telemetry shows the limits and
their reasons.

All slots of a busy ring are taken, so the rule about full copy slots does not apply unless you give a bridge of your
own; the rules about memory pressure and the optimizer's phase do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bitplan.plan.selective.decide import BlockPrecisionHint
from bitplan.plan.selective.transfer_limits import ConductorState, HeuristicPolicyBridge, Phase, RuntimeLimitHints
from bitplan.runtime.streaming.stream_blocks import BlockStream
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
