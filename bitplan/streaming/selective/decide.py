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
is int8, in the config's `int8_format`.

`choose_low_set` picks the units that go low within a damage budget, and only as many as hide the transfer: INT8 saves
time only while computing does not hide it. It is greedy by damage per byte saved, then drops units that are not needed,
so that without any one that may leave the transfer would show. (Least damage is a knapsack problem; for equal blocks,
the usual case, the answer is the same.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

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


class LowSet(NamedTuple):
    """Which units are to be in low precision, with a reason for every candidate."""

    names: frozenset[str]
    reasons: Mapping[str, str]


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
        return LowSet(frozenset(unit.name for unit in chosen if unit.locked), reasons)
    _leave_over_budget(chosen, budget, reasons)
    _enter(units, chosen, budget * entry_share, bytes_to_save, reasons)
    if bytes_to_save is not None:
        _leave_unneeded(chosen, bytes_to_save, reasons)
    for unit in chosen:
        reasons.setdefault(unit.name, f"stays low: cost {unit.cost:.3g} within the budget of {budget:.3g}")
    return LowSet(frozenset(unit.name for unit in chosen), reasons)


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


@dataclass(frozen=True)
class Evidence:
    """Measurements from outside. Errors are relative output errors of calibration; bytes are those that are sent."""

    quant_errors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # unit -> precision -> error
    unit_bytes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # unit -> precision -> bytes
    transfer: TransferFacts | None = None


class Decision(NamedTuple):
    """A precision (None: still not assigned), its reason and its score."""

    precision: Precision | None
    reason: str
    score: float | None = None


NO_EVIDENCE = Evidence()


def damage_of(state: PolicyState, name: str) -> float | None:
    """The estimated damage of int8, if there are impacts of it in the window."""
    rows = [step.impacts.get(name, {}) for step in state.history]
    return estimate_damage([row["int8"] for row in rows if "int8" in row])


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
) -> Decision:
    """The hysteresis rule for one block; `current` None: never assigned."""
    score = f"score {sensitivity:.4g}"
    wanted: Precision
    if current is None:
        if sensitivity >= config.bf16_threshold:
            wanted, why = "bf16", f"{score} >= {config.bf16_threshold}"
        elif sensitivity < config.int8_threshold:
            wanted, why = "int8", f"{score} < {config.int8_threshold}"
        else:
            wanted = "bf16" if config.ambiguous_default == "bf16" else "int8"
            why = f"{score} between {config.int8_threshold} and {config.bf16_threshold}: ambiguous_default"
    elif current == "bf16" and sensitivity < config.go_low_below:
        wanted, why = "int8", f"{score} < {config.go_low_below}"
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
        decided = (_by_score if config.scoring == "gradient" else _by_impact)(state, step, config, evidence)
    state, hints = _assign(state, step, config, decided)
    return replace(state, last_update_step=step if due else state.last_update_step), hints


def assign_forced(state: PolicyState, step: int, config: SelectivePrecisionConfig) -> tuple[PolicyState, Hints]:
    """Apply the force lists and the mode, which hold from the first step on, before anything is scored."""
    return _assign(state, step, config, {})


def _assign(
    state: PolicyState, step: int, config: SelectivePrecisionConfig, decided: Mapping[str, Decision]
) -> tuple[PolicyState, Hints]:
    units = {}
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
    before = {name: unit.running for name, unit in state.units.items()}
    state = replace(state, units=units)
    return state, current_hints(state, step, config, before)


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
        if name not in averages:
            decided[name] = Decision(unit.precision, why_unscored(state, name))
            continue
        score = compute_sensitivity_score(averages[name], evidence.quant_errors.get(name, {}).get("int8"), config)
        since = steps_since_switch_of(unit, step)
        decided[name] = _hold_back(
            unit, decide_with_hysteresis(score, unit.precision, config, steps_since_switch=since), step
        )
    if config.bandwidth_aware:
        decided |= _only_what_hides(state, step, config, evidence, decided)
    return decided


def _hold_back(unit: UnitState, decision: Decision, step: int) -> Decision:
    """Keep a unit that raised the loss in bf16 until its back-off ends."""
    if decision.precision in (None, "bf16") or unit.running != "bf16" or not _backing_off(unit, step):
        return decision
    return Decision("bf16", f"{decision.reason}, but {_backoff_text(unit)}", decision.score)


def _only_what_hides(
    state: PolicyState,
    step: int,
    config: SelectivePrecisionConfig,
    evidence: Evidence,
    decided: Mapping[str, Decision],
) -> dict[str, Decision]:
    """Keep units high that need not be low for computing to hide the transfer; returns the changed decisions."""
    candidates = []
    for name, unit in state.units.items():
        forced = config.forced(name)
        precision = forced[0] if forced else decided[name].precision
        if precision not in (None, "bf16"):
            is_low = unit.running != "bf16" or forced is not None
            locked = forced is not None or (is_low and is_cooling(steps_since_switch_of(unit, step), config))
            saved = _bytes_saved(evidence, name)
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
    known: dict[str, float] = {}
    for name, unit in state.units.items():
        forced = config.forced(name)
        if forced and forced[0] == "bf16":
            decided[name] = Decision("bf16", "forced to bf16: bf16")
            continue
        is_low = unit.running != "bf16" or forced is not None
        cost = damage_of(state, name)
        if cost is None and is_low:  # it does damage still: the last known figure counts
            cost = unit.score
        if cost is None and not forced:
            precision = None if unit.precision is None else unit.precision if not is_low else "bf16"
            decided[name] = Decision(precision, why_unmeasured(state, name))
            continue
        backing_off = not is_low and _backing_off(unit, step)
        locked = bool(forced) or is_cooling(steps_since_switch_of(unit, step), config) or backing_off
        if cost is not None:
            known[name] = cost
        candidates.append(Candidate(name, cost or 0.0, _bytes_saved(evidence, name), is_low, locked))
    needed = _bytes_to_save(state, evidence) if config.bandwidth_aware else None
    share = 1.0 - config.hysteresis_margin
    chosen = choose_low_set(candidates, budget=config.damage_budget, entry_share=share, bytes_to_save=needed)
    for candidate in candidates:
        name = candidate.name
        why = chosen.reasons[name]
        if candidate.locked and not candidate.is_low and _backing_off(state.units[name], step):
            why = _backoff_text(state.units[name])
        damage = f"damage {known[name]:.3g} in loss" if name in known else "damage not known"
        decided[name] = Decision("int8" if name in chosen.names else "bf16", f"{damage}: {why}", known.get(name))
    return decided


def _backing_off(unit: UnitState, step: int) -> bool:
    return unit.backoff_until is not None and step < unit.backoff_until


def _backoff_text(unit: UnitState) -> str:
    return f"it raised the loss {unit.rollbacks} times: bf16 until step {unit.backoff_until}"


def _bytes_saved(evidence: Evidence, name: str) -> int:
    return evidence.unit_bytes[name]["bf16"] - evidence.unit_bytes[name]["int8"]


def _bytes_to_save(state: PolicyState, evidence: Evidence) -> int:
    assert evidence.transfer is not None  # _require_evidence has checked
    return evidence.transfer.bytes_to_save(sum(evidence.unit_bytes[name]["bf16"] for name in state.units))


def _require_evidence(state: PolicyState, config: SelectivePrecisionConfig, evidence: Evidence) -> None:
    if not (config.bandwidth_aware or config.scoring == "impact"):
        return
    setting = "bandwidth_aware" if config.bandwidth_aware else 'scoring "impact"'
    for name in state.units:
        missing = sorted({"bf16", "int8"} - set(evidence.unit_bytes.get(name, {})))
        if missing:
            raise SelectiveError(
                f"{setting} needs to know how many bytes {name!r} is in {', '.join(missing)}; "
                "give them in Evidence.unit_bytes"
            )
    if config.bandwidth_aware and evidence.transfer is None:
        raise SelectiveError("bandwidth_aware needs compute time and bus speed; give them in Evidence.transfer")
