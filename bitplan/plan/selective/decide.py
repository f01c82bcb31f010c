"""Which precision each block gets next: pure functions of (state, statistics, config), every answer with its reason.

`runtime.selective.training_policy` asks at each step. A unit is a block, or one layer of it.

In order of precedence: the force lists; the mode (off and static leave all else bf16); an open trial, which freezes
everything; warm-up and update interval; then the scores. With `scoring="gradient"`:

    never assigned        score >= 0.6 -> bf16    score < 0.3 -> low    between -> ambiguous_default
    currently bf16        score < 0.2 -> low (int8_threshold - hysteresis_margin)
    currently low         score >= 0.6 -> bf16
    otherwise             no change, and none within min_steps_between_switches of the last one

The margin applies only to switches from bf16 to the low format. In mode off the stream's formats stay as they are (the
state says bf16), but force lists hold in every mode. `ambiguous_default` applies only before a block's first
assignment; until then a block runs as bf16.

With `scoring="impact"` the units share one damage budget, in units of loss. Low is int8 or fp8, by hardware and error.

With `byte_share` the units share one byte budget instead, and descend a ladder of bf16 and all low precisions, the
least damage per byte first (`choose_rungs`). Damage is the measured impact, or the gradient's relative magnitude times
the calibration error. A unit's present rung counts as better by `hysteresis_margin`, and cooldowns hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import cast

from bitplan.plan.selective.byte_budget import decide_by_bytes, knows_errors, require_errors
from bitplan.plan.selective.choose_low_units import Candidate, choose_low_set
from bitplan.plan.selective.config import Precision, SelectiveError, SelectivePrecisionConfig
from bitplan.plan.selective.evidence import (
    NO_EVIDENCE,
    Decision,
    Evidence,
    damages_of,
    is_cooling,
    steps_since_switch_of,
    why_unmeasured,
    why_unscored,
)
from bitplan.plan.selective.score import average_stats, compute_sensitivity_score
from bitplan.plan.selective.state import PolicyState, UnitState


@dataclass(frozen=True)
class BlockPrecisionHint:
    """The precision of one block from this step on, and why; `changed`: it differs from the precision before."""

    block_id: str
    precision: Precision
    reason: str
    step_id: int
    sensitivity: float | None = None
    changed: bool = False
    forced: bool = False


Hints = dict[str, BlockPrecisionHint]


def decide_with_hysteresis(
    sensitivity: float,
    current: Precision | None,
    config: SelectivePrecisionConfig,
    *,
    steps_since_switch: int | None = None,
    low: Precision = "int8",
) -> Decision:
    """The hysteresis rule for one block; `current` None: never assigned; `low`: the precision it would get."""
    score = f"score {sensitivity:.4g}"
    wanted: Precision
    if current is None:
        if sensitivity >= config.bf16_threshold:
            wanted, why = "bf16", f"{score} >= {config.bf16_threshold}"
        elif sensitivity < config.int8_threshold:
            wanted, why = low, f"{score} < {config.int8_threshold}"
        else:
            wanted = "bf16" if config.ambiguous_default == "bf16" else low
            why = f"{score} between {config.int8_threshold} and {config.bf16_threshold}: ambiguous_default"
    elif current == "bf16" and sensitivity < config.go_low_below:
        wanted, why = low, f"{score} < {config.go_low_below}"
    elif current != "bf16" and sensitivity >= config.bf16_threshold:
        wanted, why = "bf16", f"{score} >= {config.bf16_threshold}"
    else:
        bound = f"not < {config.go_low_below}" if current == "bf16" else f"not >= {config.bf16_threshold}"
        return Decision(current, f"{score} {bound}: stays {current}", sensitivity)
    if wanted != (current or "bf16") and is_cooling(steps_since_switch, config):
        left = f"{steps_since_switch} of {config.min_steps_between_switches} steps since the last switch"
        return Decision(current, f"{why}, but cooling down: {left}", sensitivity)
    return Decision(wanted, why, sensitivity)


def is_update_due(state: PolicyState, step: int, config: SelectivePrecisionConfig) -> bool:
    """Whether scores count in this step: mode dynamic, after warm-up, at a multiple of the update interval."""
    dynamic = config.enabled and config.mode == "dynamic" and state.trial is None
    return dynamic and state.steps_collected >= config.warmup_steps and step % config.update_interval_steps == 0


def compute_hints(
    state: PolicyState, step: int, config: SelectivePrecisionConfig, evidence: Evidence = NO_EVIDENCE
) -> tuple[PolicyState, Hints]:
    """Decide every block's precision after `step`; returns the new state and hints. Between updates nothing changes."""
    if state.last_update_step is not None and step < state.last_update_step:
        raise SelectiveError(
            f"step {step} is before the last update at step {state.last_update_step}: steps must go up"
        )
    decided: Mapping[str, Decision] = {}
    due = is_update_due(state, step, config)
    if due:
        _require_evidence(state, config, evidence)
        by_damage = _by_score if config.scoring == "gradient" else _by_impact
        decided = (decide_by_bytes if config.has_byte_budget else by_damage)(state, step, config, evidence)
    state, hints = _assign(state, step, config, decided)
    return replace(state, last_update_step=step if due else state.last_update_step), hints


def assign_forced(state: PolicyState, step: int, config: SelectivePrecisionConfig) -> tuple[PolicyState, Hints]:
    """Apply the force lists and the mode, which hold from the first step on, before anything is scored."""
    return _assign(state, step, config, {})


def assign_first(
    state: PolicyState, step: int, config: SelectivePrecisionConfig, evidence: Evidence
) -> tuple[PolicyState, Hints]:
    """Before the first step: force lists and mode, and a byte budget where calibration has the errors it needs."""
    by_errors = config.enabled and config.mode == "dynamic" and config.has_byte_budget and not state.history
    if by_errors and knows_errors(state, config, evidence):
        return _assign(state, step, config, decide_by_bytes(state, step, config, evidence))
    return assign_forced(state, step, config)


def _assign(
    state: PolicyState, step: int, config: SelectivePrecisionConfig, decided: Mapping[str, Decision]
) -> tuple[PolicyState, Hints]:
    units, hints = {}, {}
    for name, unit in state.units.items():
        forced = config.forced(name) if config.enabled else None
        decision = _precedence(unit, decided.get(name), forced, config)
        switched = (decision.precision or "bf16") != unit.running
        units[name] = replace(
            unit,
            precision=decision.precision,
            reason=decision.reason,
            score=unit.score if decision.score is None else decision.score,
            last_switch_step=step if switched else unit.last_switch_step,
        )
        hints[name] = BlockPrecisionHint(
            name, units[name].running, decision.reason, step, units[name].score, switched, forced is not None
        )
    return replace(state, units=units), hints


def current_hints(
    state: PolicyState, step: int, config: SelectivePrecisionConfig, before: Mapping[str, str] | None = None
) -> Hints:
    """The present precisions as hints; `changed` compares with the precisions `before`."""
    return {
        name: BlockPrecisionHint(
            name,
            unit.running,
            unit.reason,
            step,
            unit.score,
            before is not None and before[name] != unit.running,
            config.enabled and config.forced(name) is not None,
        )
        for name, unit in state.units.items()
    }


def describe_changes(hints: Mapping[str, BlockPrecisionHint]) -> list[str]:
    """A line for each block that changes, for the log (`log_decisions`)."""
    return [
        f"step {hint.step_id}: {name} is now {hint.precision} ({hint.reason})"
        for name, hint in hints.items()
        if hint.changed
    ]


def _precedence(
    unit: UnitState,
    decided: Decision | None,
    forced: tuple[Precision, str] | None,
    config: SelectivePrecisionConfig,
) -> Decision:
    if not config.enabled:
        return Decision("bf16", "selective precision is not enabled: the stream's own format")
    if forced is not None:
        return Decision(forced[0], f"forced by force_{forced[0]}_blocks ({forced[1]!r})", decided and decided.score)
    if config.mode != "dynamic":
        default = "the stream's own format" if config.mode == "off" else "bf16"
        return Decision("bf16", f"mode {config.mode}: {default} unless forced")
    return decided or Decision(unit.precision, unit.reason)


# ---- gradient scores -------------------------------------------------------------------------------------------------


def _by_score(
    state: PolicyState, step: int, config: SelectivePrecisionConfig, evidence: Evidence
) -> dict[str, Decision]:
    averages = average_stats(state.history)
    decided = {}
    for name, unit in state.units.items():
        low, why = pick_low(unit, evidence.quant_errors.get(name, {}), config, has_fp8=evidence.has_fp8)
        if name not in averages:
            decided[name] = Decision(unit.precision, why_unscored(state, name))
            continue
        error = evidence.quant_errors.get(name, {}).get(low or "int8")
        score = compute_sensitivity_score(averages[name], error, config)
        if low is None:
            decided[name] = Decision("bf16", f"{why}: bf16", score)
            continue
        # A low precision that this hardware lacks (a run resumed elsewhere) becomes one that it has.
        current = unit.precision if unit.precision in (None, "bf16") else low
        decision = decide_with_hysteresis(
            score, current, config, steps_since_switch=steps_since_switch_of(unit, step), low=low
        )
        decided[name] = _hold_back(unit, decision, step, why)
    if config.bandwidth_aware:
        decided |= _only_what_hides(state, step, config, evidence, decided)
    return decided


def _hold_back(unit: UnitState, decision: Decision, step: int, why: str) -> Decision:
    """Keep a unit that raised the loss in bf16 until its back-off ends; else add to the reason why this low format."""
    if decision.precision in (None, "bf16") or unit.running != "bf16":
        return decision
    if _backing_off(unit, step):
        return Decision("bf16", f"{decision.reason}, but {_backoff_text(unit)}", decision.score)
    return decision._replace(reason=f"{decision.reason}; {why}" if why else decision.reason)


def _only_what_hides(
    state: PolicyState,
    step: int,
    config: SelectivePrecisionConfig,
    evidence: Evidence,
    decided: Mapping[str, Decision],
) -> dict[str, Decision]:
    """Units that may be low but need not be to hide the transfer: they stay high."""
    candidates = []
    for name, unit in state.units.items():
        forced = config.forced(name)
        precision = forced[0] if forced else decided[name].precision
        if precision not in (None, "bf16"):
            is_low = unit.running != "bf16" or forced is not None
            locked = forced is not None or (is_low and is_cooling(steps_since_switch_of(unit, step), config))
            saved = _bytes_saved(evidence, name, precision)
            # Without a new score the last one counts; without any, 1.0: the unit leaves first.
            score = next((one for one in (decided[name].score, unit.score) if one is not None), 1.0)
            candidates.append(Candidate(name, score, saved, is_low, locked))
    chosen = choose_low_set(candidates, bytes_to_save=_bytes_to_save(state, evidence))
    dropped = {}
    for candidate in candidates:
        name, decision = candidate.name, decided[candidate.name]
        if name not in chosen.names:
            # A unit never assigned stays so: its first thresholds must hold when the bus becomes the limit.
            high: Precision | None = None if state.units[name].precision is None else "bf16"
            dropped[name] = Decision(high, f"{decision.reason}; {chosen.reasons[name]}", decision.score)
    return dropped


# ---- damage in units of loss -----------------------------------------------------------------------------------------


def _by_impact(
    state: PolicyState, step: int, config: SelectivePrecisionConfig, evidence: Evidence
) -> dict[str, Decision]:
    decided: dict[str, Decision] = {}
    candidates: list[Candidate] = []
    picked: dict[str, Precision] = {}
    known: dict[str, float] = {}
    for name, unit in state.units.items():
        forced = config.forced(name)
        damages = damages_of(state, name)
        low, why = pick_low(unit, damages, config, has_fp8=evidence.has_fp8)
        if forced:
            low, why = (None, "forced to bf16") if forced[0] == "bf16" else (forced[0], "")
        is_low = unit.running != "bf16" or bool(low and forced)
        # A low unit without a fresh figure still does damage: the last known figure counts.
        cost = damages.get(low or "", unit.score if is_low else None)
        if low is None:
            decided[name] = Decision("bf16", f"{why}: bf16")
        elif cost is None and not forced:
            precision = None if unit.precision is None else unit.precision if not is_low else "bf16"
            decided[name] = Decision(precision, why_unmeasured(state, name))
        else:
            backing_off = not is_low and _backing_off(unit, step)
            locked = bool(forced) or is_cooling(steps_since_switch_of(unit, step), config) or backing_off
            picked[name] = low
            if cost is not None:
                known[name] = cost
            candidates.append(Candidate(name, cost or 0.0, _bytes_saved(evidence, name, low), is_low, locked))
    needed = _bytes_to_save(state, evidence) if config.bandwidth_aware else None
    share = 1.0 - config.hysteresis_margin
    chosen = choose_low_set(candidates, budget=config.damage_budget, entry_share=share, bytes_to_save=needed)
    for candidate in candidates:
        name = candidate.name
        why = chosen.reasons[name]
        if candidate.locked and not candidate.is_low and _backing_off(state.units[name], step):
            why = _backoff_text(state.units[name])
        damage = f"damage {known[name]:.3g} in loss" if name in known else "damage not known"
        precision = picked[name] if name in chosen.names else "bf16"
        decided[name] = Decision(precision, f"{damage}: {why}", known.get(name))
    return decided


# ---- int8 or fp8 -----------------------------------------------------------------------------------------------------


def pick_low(
    unit: UnitState, errors: Mapping[str, float], config: SelectivePrecisionConfig, *, has_fp8: bool
) -> tuple[Precision | None, str]:
    """The low precision that a unit would get, and why: one that the hardware has, with the smaller error.

    Equal errors are decided by the order of `low_precisions`. A unit that is low keeps its precision: both cost one
    byte, and a change is a risk.
    """
    allowed = [cast(Precision, name) for name in config.low_precisions if name != "fp8" or has_fp8]
    if not allowed:
        return None, "fp8 is the only low precision allowed, and this hardware has none"
    if unit.running in allowed:
        return unit.running, ""
    if len(allowed) == 1:
        return allowed[0], "" if len(config.low_precisions) == 1 else "fp8 is not in this hardware"
    if not all(name in errors for name in allowed):
        return allowed[0], f"{allowed[0]} first: not all errors are known"
    best = min(allowed, key=lambda name: errors[name])  # the first of equals
    shown = ", ".join(f"{name} {errors[name]:.3g}" for name in allowed)
    return best, f"{best} has the smaller error ({shown})"


# ---- helpers ---------------------------------------------------------------------------------------------------------


def _backing_off(unit: UnitState, step: int) -> bool:
    return unit.backoff_until is not None and step < unit.backoff_until


def _backoff_text(unit: UnitState) -> str:
    return f"it raised the loss {unit.rollbacks} times: bf16 until step {unit.backoff_until}"


def _bytes_saved(evidence: Evidence, name: str, precision: str | None) -> int:
    sizes = evidence.unit_bytes[name]
    return sizes["bf16"] - sizes[precision or "bf16"]


def _bytes_to_save(state: PolicyState, evidence: Evidence) -> int:
    assert evidence.transfer is not None  # _require_evidence has checked
    return evidence.transfer.bytes_to_save(sum(evidence.unit_bytes[name]["bf16"] for name in state.units))


def _require_evidence(state: PolicyState, config: SelectivePrecisionConfig, evidence: Evidence) -> None:
    if config.has_byte_budget:
        require_errors(state, config, evidence)
    if not (config.bandwidth_aware or config.scoring == "impact" or config.has_byte_budget):
        return
    setting = "byte_share" if config.has_byte_budget else 'scoring "impact"'
    setting = "bandwidth_aware" if config.bandwidth_aware else setting
    needed = {"bf16", *config.low_precisions, *_forced_precisions(state.units, config)}
    for name in state.units:
        missing = sorted(needed - set(evidence.unit_bytes.get(name, {})))
        if missing:
            raise SelectiveError(
                f"{setting} needs to know how many bytes {name!r} is in {', '.join(missing)}; "
                "give them in Evidence.unit_bytes"
            )
    if config.bandwidth_aware and evidence.transfer is None:
        raise SelectiveError("bandwidth_aware needs compute time and bus speed; give them in Evidence.transfer")


def _forced_precisions(names: Iterable[str], config: SelectivePrecisionConfig) -> set[str]:
    return {forced[0] for forced in map(config.forced, names) if forced}
