"""Which precision each block gets next: pure functions of (state, statistics, config), every answer with its reason.

`training_policy` asks at each step. A unit is a block, or one layer of it. In order of precedence: the force lists; the
mode (off and static leave all else bf16); an open trial, which freezes everything; warm-up and update interval; then
the scores. With `scoring="gradient"`:

    never assigned        score >= 0.6 -> bf16    score < 0.3 -> low    between -> ambiguous_default
    currently bf16        score < 0.2 -> low (int8_threshold - hysteresis_margin)
    currently low         score >= 0.6 -> bf16
    otherwise             no change, and none within min_steps_between_switches of the last one

In mode off the stream's formats stay as they are (the state says bf16), but force lists hold in every mode. Until its
first assignment a block runs as bf16. With `scoring="impact"` the units share one damage budget, in units of loss. Low
is int8 or fp8, by hardware and error.

`choose_low_set` picks the units that go low within a damage budget, and only as many as hide the transfer: INT8 saves
time only while computing does not hide it. It is greedy by damage per byte saved, then drops units that are not needed,
so that without any one that may leave the transfer would show. (Least damage is a knapsack problem; for equal blocks,
the usual case, the answer is the same.)

With `byte_share` the units share one byte budget instead, and `choose_rungs` lets them descend a ladder of bf16, 8 and
4 bits, the least damage per saved byte first, until the bytes fit, and then lets those rise again that need not have
descended. For each unit only rungs on the lower convex hull of (bytes, damage) count. Damage is the measured impact, or
the gradient's relative magnitude times the calibration error; before any gradient is known, calibration errors alone. A
unit's present rung counts as better by `hysteresis_margin`; one without a usable figure keeps its precision.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

from bitplan.plan.names import natural_order
from bitplan.streaming.selective.config import Precision, SelectiveError, SelectivePrecisionConfig
from bitplan.streaming.selective.score import average_stats, compute_sensitivity_score, estimate_damage
from bitplan.streaming.selective.state import PolicyState, UnitState


@dataclass(frozen=True)
class TransferFacts:
    """Measured, per step: how long computing takes, how fast the bus is, and how often a byte is sent.

    The latter is nearly 2 with a backward: blocks that stay on the device at the turns are sent once.
    """

    compute_ms: float
    bytes_per_ms: float
    crossings: float = 2

    def __post_init__(self) -> None:
        for key in ("compute_ms", "bytes_per_ms", "crossings"):
            value = getattr(self, key)
            if not (math.isfinite(value) and value > 0):
                raise SelectiveError(f"transfer facts: {key} must be a finite number above 0, got {value!r}")

    def bytes_to_save(self, streamed_bytes: int) -> int:
        """By how many bytes the streamed bytes exceed what computing hides; 0 or less: computing hides them all."""
        return streamed_bytes - math.floor(self.compute_ms * self.bytes_per_ms / self.crossings)


@dataclass(frozen=True)
class Candidate:
    """A unit that may be low: its cost (on any common scale), the bytes it saves, and whether it may change.

    `locked` keeps it as it is, low or not: a cooldown, a back-off, a force list.
    """

    name: str
    cost: float
    bytes_saved: int
    is_low: bool = False
    locked: bool = False

    @property
    def cost_per_byte(self) -> float:
        return self.cost / self.bytes_saved if self.bytes_saved > 0 else math.inf


@dataclass(frozen=True)
class LowSet:
    """The units to be low, and for every candidate why it is or is not."""

    names: frozenset[str]
    reasons: Mapping[str, str]
    cost: float
    bytes_saved: int


def choose_low_set(
    candidates: Iterable[Candidate],
    *,
    budget: float = math.inf,
    entry_share: float = 1.0,
    bytes_to_save: int | None = None,
) -> LowSet:
    """The units to be low. A low unit stays while the sum of costs is within `budget`; another enters only within
    `entry_share` of it. With `bytes_to_save`, no more units than needed to save that much.
    """
    order = {candidate.name: candidate for candidate in candidates}
    units = sorted((order[name] for name in natural_order(order)), key=lambda unit: (unit.cost_per_byte, unit.cost))
    reasons = {unit.name: "kept: may not change now" for unit in units if unit.locked}
    chosen = [unit for unit in units if unit.is_low]
    if bytes_to_save is not None and bytes_to_save <= 0:
        out = [unit for unit in units if not unit.locked]
        reasons |= {unit.name: "computing already hides the transfer: no precision is given up" for unit in out}
        return _low_set([unit for unit in chosen if unit.locked], reasons)
    _leave_over_budget(chosen, budget, reasons)
    _enter(units, chosen, budget * entry_share, bytes_to_save, reasons)
    if bytes_to_save is not None:
        _leave_unneeded(chosen, bytes_to_save, reasons)
    for unit in chosen:
        reasons.setdefault(unit.name, f"stays low: cost {unit.cost:.3g} within the budget of {budget:.3g}")
    return _low_set(chosen, reasons)


def _leave_over_budget(chosen: list[Candidate], budget: float, reasons: dict[str, str]) -> None:
    for unit in sorted(chosen, key=lambda unit: -unit.cost_per_byte):
        total = _cost(chosen)
        if total <= budget:
            return
        if not unit.locked:
            chosen.remove(unit)
            reasons[unit.name] = f"leaves: the costs together, {total:.3g}, exceed the budget of {budget:.3g}"


def _enter(
    units: list[Candidate], chosen: list[Candidate], room: float, bytes_to_save: int | None, reasons: dict[str, str]
) -> None:
    for unit in units:
        if unit.is_low or unit.locked:
            continue
        total = _cost([*chosen, unit])
        if unit.bytes_saved <= 0:
            reasons[unit.name] = "stays high: low precision would save no byte"
        elif bytes_to_save is not None and _saved(chosen) >= bytes_to_save:
            reasons[unit.name] = f"stays high: {_saved(chosen)} bytes fewer already hide the transfer"
        elif total > room:
            reasons[unit.name] = f"stays high: the costs would come to {total:.3g}, above {room:.3g} of the budget"
        else:
            chosen.append(unit)
            reasons[unit.name] = f"goes low: cost {unit.cost:.3g}, {total:.3g} with the others, within {room:.3g}"


def _leave_unneeded(chosen: list[Candidate], bytes_to_save: int, reasons: dict[str, str]) -> None:
    """Remove unneeded units, the most costly first, so that the remaining set costs least."""
    for unit in sorted(chosen, key=lambda unit: -unit.cost):
        if not unit.locked and _saved(chosen) - unit.bytes_saved >= bytes_to_save:
            chosen.remove(unit)
            reasons[unit.name] = f"high: {_saved(chosen)} bytes fewer already hide the transfer"


def _cost(units: Iterable[Candidate]) -> float:
    return math.fsum(unit.cost for unit in units)


def _saved(units: Iterable[Candidate]) -> int:
    return sum(unit.bytes_saved for unit in units)


def _low_set(chosen: list[Candidate], reasons: dict[str, str]) -> LowSet:
    return LowSet(frozenset(unit.name for unit in chosen), reasons, _cost(chosen), _saved(chosen))


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


@dataclass(frozen=True)
class RungCandidate:
    """A unit: bytes and damage of each precision that it may have, and its present one. `locked`: it may not change."""

    name: str
    nbytes: Mapping[str, int]
    damage: Mapping[str, float]
    current: str
    locked: bool = False


class Descent(NamedTuple):
    """One step down for one unit."""

    damage_per_byte: float
    order: int
    name: str
    above: str
    below: str
    saved: int


@dataclass(frozen=True)
class Rungs:
    """The precision of every candidate, the reason, and all bytes together."""

    precisions: Mapping[str, str]
    reasons: Mapping[str, str]
    nbytes: int


def choose_rungs(candidates: Iterable[RungCandidate], byte_limit: int, *, margin: float = 0.0) -> Rungs:
    """The rungs with the least damage, greedily, whose bytes together are at most `byte_limit`.

    Where even the lowest rungs exceed it (locked units), all that may descend are at their lowest.
    """
    by_name = {unit.name: unit for unit in candidates}
    units = [by_name[name] for name in natural_order(by_name)]
    precisions = {unit.name: unit.current if unit.locked else _largest(unit) for unit in units}
    reasons = {unit.name: "kept: may not change now" for unit in units if unit.locked}
    total = sum(unit.nbytes[precisions[unit.name]] for unit in units)
    descents = sorted(one for index, unit in enumerate(units) for one in _descents(unit, index, margin))
    taken: list[Descent] = []
    for one in descents:
        if total <= byte_limit:
            break
        taken.append(one)
        precisions[one.name] = one.below
        total -= one.saved
    for one in reversed(taken):  # the last descent may have saved more than was needed
        if total + one.saved <= byte_limit and precisions[one.name] == one.below:
            precisions[one.name] = one.above
            total += one.saved
    for unit in units:
        damage = unit.damage.get(precisions[unit.name], 0.0)
        reasons.setdefault(unit.name, f"damage {damage:.3g}, {total} of {byte_limit} bytes together")
    return Rungs(precisions, reasons, total)


def _largest(unit: RungCandidate) -> str:
    return max(unit.nbytes, key=lambda precision: unit.nbytes[precision])


def _descents(unit: RungCandidate, order: int, margin: float) -> Iterable[Descent]:
    """The steps along the lower hull, from the most bytes to the fewest; each costs more per byte than the last."""
    if unit.locked:
        return
    damage = {
        precision: value * (1.0 - margin) if precision == unit.current else value
        for precision, value in unit.damage.items()
    }
    at = _largest(unit)
    while True:
        lower = [precision for precision in damage if unit.nbytes[precision] < unit.nbytes[at]]
        if not lower:
            return

        def per_byte(precision: str, above: str = at) -> float:
            return (damage[precision] - damage[above]) / (unit.nbytes[above] - unit.nbytes[precision])

        below = min(lower, key=lambda precision: (per_byte(precision), unit.nbytes[precision]))
        yield Descent(per_byte(below), order, unit.name, at, below, unit.nbytes[at] - unit.nbytes[below])
        at = below


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
