"""Decisions under a byte budget (`byte_share`): every unit gets a rung of the ladder bf16, int8, int4 (or fp8).

Damage is the measured impact with `scoring="impact"`, else the gradient's relative magnitude times the calibration
error. Before any gradient is known, calibration errors alone decide, so that the budget holds from the first step on.
A unit without a usable gradient or impact keeps its precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from bitplan.plan.selective.choose_rungs import RungCandidate, choose_rungs
from bitplan.plan.selective.config import Precision, SelectiveError, SelectivePrecisionConfig
from bitplan.plan.selective.evidence import (
    Decision,
    Evidence,
    damages_of,
    is_cooling,
    steps_since_switch_of,
    why_unmeasured,
    why_unscored,
)
from bitplan.plan.selective.score import average_stats
from bitplan.plan.selective.state import PolicyState


def decide_by_bytes(
    state: PolicyState, step: int, config: SelectivePrecisionConfig, evidence: Evidence
) -> dict[str, Decision]:
    """A precision for every unit, so that all bytes are at most `byte_share` of bf16's, with the least damage."""
    lows = [name for name in config.low_precisions if name != "fp8" or evidence.has_fp8]
    damages = _damages(state, config, evidence, lows)
    why = why_unmeasured if config.scoring == "impact" else why_unscored
    candidates = []
    for name, unit in state.units.items():
        forced = config.forced(name)
        current = forced[0] if forced else unit.running
        known = all(low in damages[name] for low in lows)
        locked = forced is not None or not known or is_cooling(steps_since_switch_of(unit, step), config)
        damage = {"bf16": 0.0} | {low: damages[name].get(low, 0.0) for low in lows}
        nbytes = {rung: evidence.unit_bytes[name][rung] for rung in (*damage, current)}
        candidates.append(RungCandidate(name, nbytes, damage, current, locked))
    limit = int(config.byte_share * sum(evidence.unit_bytes[name]["bf16"] for name in state.units))
    chosen = choose_rungs(candidates, limit, margin=config.hysteresis_margin)
    decided = {}
    for one in candidates:
        if not damages[one.name]:
            decided[one.name] = Decision(state.units[one.name].precision, why(state, one.name))
        else:
            score = max(one.damage.values())
            precision = cast(Precision, chosen.precisions[one.name])
            decided[one.name] = Decision(precision, chosen.reasons[one.name], score)
    return decided


def knows_errors(state: PolicyState, config: SelectivePrecisionConfig, evidence: Evidence) -> bool:
    """Whether every unit has a calibration error of every low precision."""
    return not any(set(config.low_precisions) - set(evidence.quant_errors.get(name, {})) for name in state.units)


def require_errors(state: PolicyState, config: SelectivePrecisionConfig, evidence: Evidence) -> None:
    """Refuse to compare precisions by gradients alone: they say nothing about what four bits do and eight do not."""
    if config.scoring == "gradient" and not knows_errors(state, config, evidence):
        raise SelectiveError(
            f"byte_share compares the errors of {', '.join(config.low_precisions)}, and no unit may lack them; "
            "calibrate before the first step (policy.calibrate), or use scoring 'impact'"
        )


def _damages(
    state: PolicyState, config: SelectivePrecisionConfig, evidence: Evidence, lows: list[str]
) -> dict[str, Mapping[str, float]]:
    """Unit -> precision -> damage; nothing for units without a usable figure."""
    averages = average_stats(state.history)
    damages: dict[str, Mapping[str, float]] = {}
    for name in state.units:
        errors = evidence.quant_errors.get(name, {})
        if not state.history:
            damages[name] = {low: errors[low] for low in lows}
        elif config.scoring == "impact":
            damages[name] = damages_of(state, name)
        elif name in averages:
            damages[name] = {low: averages[name].relative_magnitude * errors[low] for low in lows}
        else:
            damages[name] = {}
    return damages
