"""Conductor: how fast and how far ahead blocks may be moved, phase by phase, as pure decisions.

Selective precision decides which block gets which precision; the conductor decides when and how fast they transfer.
It knows the phase of the step and the pressure on the GPU's memory, and
answers with `RuntimeLimitHints`, which the streaming runtime obeys. The rules and their figures are Stagehand's:

    backward, memory above 80%      the prefetch window is 1, no speculation: activations and gradients need the memory
    optimizer                       no speculation, one transfer at a time: blocks loaded now would disturb it
    copy slots full in a row        from the fourth check in a row on, each makes the window one smaller

Within a step hints only tighten, so that a runtime never takes back room it has just given up; a new step starts anew.
Precisions change at step boundaries only, so `block_precision_map` is the same throughout a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from bitplan.base.errors import BitplanError
from bitplan.streaming.selective.decide import BlockPrecisionHint


class ConductorError(BitplanError, ValueError):
    """The conductor was called out of order, or given impossible limits or pressures."""


class Phase(StrEnum):
    STEP_BEGIN = "step_begin"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    STEP_END = "step_end"


# Forward follows backward with several micro-batches, and a step may end without an optimizer (evaluation, a skip).
# Entering the same phase again is another check of the pressure.
_FOLLOWS: Mapping[Phase | None, tuple[Phase, ...]] = {
    None: (Phase.STEP_BEGIN,),
    Phase.STEP_BEGIN: (Phase.FORWARD, Phase.STEP_END),
    Phase.FORWARD: (Phase.FORWARD, Phase.BACKWARD, Phase.STEP_END),
    Phase.BACKWARD: (Phase.BACKWARD, Phase.FORWARD, Phase.OPTIMIZER, Phase.STEP_END),
    Phase.OPTIMIZER: (Phase.OPTIMIZER, Phase.STEP_END),
    Phase.STEP_END: (Phase.STEP_BEGIN,),
}


@dataclass(frozen=True)
class RuntimeLimitHints:
    """Limits that the streaming runtime must not exceed, the reasons for them, and the precision of each block."""

    max_inflight_h2d: int
    max_inflight_d2h: int
    prefetch_window_cap: int
    suppress_speculative: bool = False
    block_precision_map: Mapping[str, str] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for key in ("max_inflight_h2d", "max_inflight_d2h", "prefetch_window_cap"):
            value = getattr(self, key)
            if type(value) is not int or value < 1:
                raise ConductorError(f"{key} must be an integer from 1, got {value!r}: with less nothing would move")
        object.__setattr__(self, "block_precision_map", MappingProxyType(dict(self.block_precision_map)))

    def tightened(self, limits: RuntimeLimitHints) -> RuntimeLimitHints:
        """The stricter limit in every field; the map is that of `self`, because precisions are not limits."""
        return RuntimeLimitHints(
            min(self.max_inflight_h2d, limits.max_inflight_h2d),
            min(self.max_inflight_d2h, limits.max_inflight_d2h),
            min(self.prefetch_window_cap, limits.prefetch_window_cap),
            self.suppress_speculative or limits.suppress_speculative,
            self.block_precision_map,
            tuple(dict.fromkeys((*self.reasons, *limits.reasons))),
        )


@dataclass(frozen=True)
class Pressure:
    """Pressure on the device at one moment: memory in use, and whether every copy slot was taken."""

    vram_used_bytes: int = 0
    vram_total_bytes: int = 1
    slots_full: bool = False

    @property
    def vram_share(self) -> float:
        if self.vram_total_bytes <= 0 or self.vram_used_bytes < 0:
            raise ConductorError(
                f"memory in use must be from 0 and the total above 0, got {self.vram_used_bytes} of "
                f"{self.vram_total_bytes}; give the bytes as the driver reports them"
            )
        return self.vram_used_bytes / self.vram_total_bytes


@dataclass(frozen=True)
class ConductorState:
    """The phase of the step, the present hints, and for how many checks in a row the slots were full."""

    hints: RuntimeLimitHints
    phase: Phase | None = None
    step: int | None = None
    full_in_a_row: int = 0


@dataclass(frozen=True)
class HeuristicPolicyBridge:
    """Applies the conductor's three rules to a runtime's own limits."""

    base: RuntimeLimitHints
    vram_pressure_above: float = 0.8
    pressure_window: int = 1
    optimizer_h2d: int = 1
    contention_after: int = 3

    def __post_init__(self) -> None:
        if not (math.isfinite(self.vram_pressure_above) and 0 < self.vram_pressure_above <= 1):
            raise ConductorError(f"vram_pressure_above must be above 0, at most 1, got {self.vram_pressure_above!r}")
        for key in ("pressure_window", "optimizer_h2d", "contention_after"):
            if getattr(self, key) < 1:
                raise ConductorError(f"{key} must be an integer from 1, got {getattr(self, key)!r}")

    def start(self) -> ConductorState:
        return ConductorState(self.base)

    def begin_step(
        self, state: ConductorState, step: int, hints: Mapping[str, BlockPrecisionHint] | None = None
    ) -> ConductorState:
        """Begin a step: with the initial limits, and the precisions that hold until it ends."""
        self._require_next(state, Phase.STEP_BEGIN)
        if state.step is not None and step <= state.step:
            raise ConductorError(f"step {step} comes after step {state.step}: steps must go up")
        precisions = {name: hint.precision for name, hint in (hints or {}).items()}
        fresh = replace(
            self.base, block_precision_map=precisions if hints is not None else self.base.block_precision_map
        )
        return ConductorState(fresh, Phase.STEP_BEGIN, step, state.full_in_a_row)

    def enter(self, state: ConductorState, phase: Phase, pressure: Pressure) -> ConductorState:
        """The hints in this phase under this pressure: never looser than earlier hints of the step."""
        if phase is Phase.STEP_BEGIN:
            raise ConductorError("a step begins with begin_step, which takes its number and its precisions")
        self._require_next(state, phase)
        full = state.full_in_a_row + 1 if pressure.slots_full else 0
        hints = state.hints
        for limits in self._limits(phase, pressure, full, hints):
            hints = hints.tightened(limits)
        return ConductorState(hints, phase, state.step, full)

    def _limits(self, phase: Phase, pressure: Pressure, full: int, now: RuntimeLimitHints) -> list[RuntimeLimitHints]:
        result = []
        if phase is Phase.BACKWARD and pressure.vram_share > self.vram_pressure_above:
            reason = f"backward: memory {pressure.vram_share:.1%} full, above {self.vram_pressure_above:.0%}"
            result.append(self._limit(reason, window=self.pressure_window, quiet=True))
        if phase is Phase.OPTIMIZER:
            result.append(self._limit("optimizer: no speculation", h2d=self.optimizer_h2d, quiet=True))
        if full > self.contention_after and now.prefetch_window_cap > 1:
            reason = f"copy slots full {full} times in a row: window {now.prefetch_window_cap - 1}"
            result.append(self._limit(reason, window=now.prefetch_window_cap - 1))
        return result

    def _limit(
        self, reason: str, *, h2d: int | None = None, window: int | None = None, quiet: bool = False
    ) -> RuntimeLimitHints:
        base = self.base
        return replace(
            base,
            max_inflight_h2d=h2d or base.max_inflight_h2d,
            prefetch_window_cap=window or base.prefetch_window_cap,
            suppress_speculative=quiet,
            reasons=(reason,),
        )

    @staticmethod
    def _require_next(state: ConductorState, phase: Phase) -> None:
        allowed = _FOLLOWS[state.phase]
        if phase not in allowed:
            before = state.phase.value if state.phase else "nothing"
            raise ConductorError(
                f"phase {phase.value} cannot follow {before} (step {state.step}); "
                f"expected {' or '.join(one.value for one in allowed)}"
            )
