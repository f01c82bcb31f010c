"""What decisions are made from: measurements from outside, and what a policy's state says of a unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from bitplan.plan.selective.choose_low_units import TransferFacts
from bitplan.plan.selective.config import Precision, SelectivePrecisionConfig
from bitplan.plan.selective.score import estimate_damage
from bitplan.plan.selective.state import PolicyState, UnitState


@dataclass(frozen=True)
class Evidence:
    """Measurements from outside. Errors are relative output errors of calibration; bytes are those that are sent."""

    quant_errors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # unit -> precision -> error
    unit_bytes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # unit -> precision -> bytes
    transfer: TransferFacts | None = None
    has_fp8: bool = False


class Decision(NamedTuple):
    """A precision (None: still not assigned), its reason and its score."""

    precision: Precision | None
    reason: str
    score: float | None = None


NO_EVIDENCE = Evidence()


def damages_of(state: PolicyState, name: str) -> dict[str, float]:
    """Precision -> estimated damage, for precisions with impacts in the window."""
    samples: dict[str, list[float]] = {}
    for step in state.history:
        for precision, impact in step.impacts.get(name, {}).items():
            samples.setdefault(precision, []).append(impact)
    estimates = {precision: estimate_damage(impacts) for precision, impacts in samples.items()}
    return {precision: damage for precision, damage in estimates.items() if damage is not None}


def steps_since_switch_of(unit: UnitState, step: int) -> int | None:
    return None if unit.last_switch_step is None else step - unit.last_switch_step


def is_cooling(steps_since_switch: int | None, config: SelectivePrecisionConfig) -> bool:
    return steps_since_switch is not None and steps_since_switch < config.min_steps_between_switches


def why_unscored(state: PolicyState, name: str) -> str:
    counts = Counter(step.excluded[name] for step in state.history if name in step.excluded)
    reasons = ", ".join(f"{count} {why}" for why, count in sorted(counts.items())) or "none collected"
    return f"no usable gradient in the last {len(state.history)} steps ({reasons}): no score, no change"


def why_unmeasured(state: PolicyState, name: str) -> str:
    """Why a unit has no impact: it was not its turn, or nothing usable was measured."""
    score = state.units[name].score
    if score is None or any(name in step.excluded for step in state.history):
        return why_unscored(state, name)
    return f"damage {score:.3g} in loss when last measured, and not measured before this update: no change"
