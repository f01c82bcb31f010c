"""Loss feedback: measures how a switch changed the loss, and undoes it if it did harm.

A score predicts; a probe batch measures. The runtime takes its loss before and after a switch; this module has the
rest, as state transitions that can be saved between any two probes:

    begin_trial    the units that go low together are on trial
    judge_trial    within the tolerance        -> accepted
                   above it, several suspects  -> halve them and probe again: log2(n) probes find one
                   one suspect left            -> it goes back to bf16 and backs off; the others are probed again
    until a probe is accepted or no unit is left. Each round removes one unit, so it ends.

A back-off doubles with every rollback of the same unit. A loss that is not finite counts as above any tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from bitplan.plan.selective.config import Precision, SelectiveError, SelectivePrecisionConfig
from bitplan.plan.selective.decide import BlockPrecisionHint
from bitplan.plan.selective.state import PolicyState, Trial, UnitState

MAX_DOUBLINGS = 16


@dataclass(frozen=True)
class Verdict:
    """What to do: set the units on trial to `precisions`; "probe" asks for another probe loss."""

    action: Literal["accepted", "probe", "rolled_back"]
    reason: str
    precisions: Mapping[str, Precision]
    culprit: str | None = None


def begin_trial(
    state: PolicyState, hints: Mapping[str, BlockPrecisionHint], loss_before: float, step: int
) -> PolicyState:
    """Open a trial of the units that these hints send low, except forced ones. Without such units there is no trial."""
    if state.trial is not None:
        raise SelectiveError(f"a trial of step {state.trial.step} is still open; judge it before another begins")
    switched = {
        name: hint.precision
        for name, hint in hints.items()
        if hint.changed and hint.precision != "bf16" and not hint.forced
    }
    if not switched:
        return state
    if not math.isfinite(loss_before):
        raise SelectiveError(
            f"step {step}: the probe loss before a switch must be finite, got {loss_before!r}: nothing could be "
            "attributed to the switch; look at the training itself"
        )
    return replace(state, trial=Trial(step, loss_before, switched, (), tuple(switched)))


def judge_trial(state: PolicyState, loss_after: float, config: SelectivePrecisionConfig) -> tuple[PolicyState, Verdict]:
    """The state and the next move, given the probe loss with `trial.probing` low."""
    trial = state.trial
    if trial is None:
        raise SelectiveError("no trial is open; begin_trial opens one when a hint sends a unit low")
    rise = loss_after - trial.loss_before
    is_worse = not rise <= config.loss_tolerance  # written so that NaN counts as worse
    low = trial.probing[0] if len(trial.probing) == 1 else f"{len(trial.probing)} units"
    reason = (
        f"probe loss {trial.loss_before:.6g} -> {loss_after:.6g} with {low} low, tolerance {config.loss_tolerance:g}"
    )
    if is_worse:
        trial = replace(trial, raised=reason)
    if not trial.suspects:
        if not is_worse:
            return replace(state, trial=None), Verdict("accepted", reason, dict(trial.switched))
        suspects = tuple(trial.switched)
    else:
        cleared = set(trial.suspects) - set(trial.probing) if is_worse else set(trial.probing)
        suspects = tuple(name for name in trial.suspects if name not in cleared)
    if len(suspects) > 1:
        probing = suspects[: (len(suspects) + 1) // 2]
        return _probe(state, replace(trial, suspects=suspects, probing=probing), f"{reason}: which of {len(suspects)}")
    return _roll_back(state, trial, suspects[0], config)


def _roll_back(
    state: PolicyState, trial: Trial, culprit: str, config: SelectivePrecisionConfig
) -> tuple[PolicyState, Verdict]:
    unit = state.units[culprit]
    rollbacks = unit.rollbacks + 1
    until = trial.step + config.backoff_steps * 2 ** min(rollbacks - 1, MAX_DOUBLINGS)
    # `raised`, not the last probe: if the other suspects were cleared, the last probe was without the culprit.
    reason = f"rolled back: {trial.switched[culprit]} raised the loss ({trial.raised}); bf16 until step {until}"
    changed = replace(
        unit,
        precision="bf16",
        reason=reason,
        last_switch_step=trial.step,
        rollbacks=rollbacks,
        backoff_until=until,
    )
    state = state.with_units({culprit: changed})
    rest = {name: precision for name, precision in trial.switched.items() if name != culprit}
    if not rest:
        return replace(state, trial=None), Verdict("rolled_back", reason, {culprit: "bf16"}, culprit)
    next_trial = replace(trial, switched=rest, suspects=(), probing=tuple(rest), raised="")
    state, verdict = _probe(state, next_trial, reason)
    return state, replace(verdict, culprit=culprit, precisions={**verdict.precisions, culprit: "bf16"})


def _probe(state: PolicyState, trial: Trial, reason: str) -> tuple[PolicyState, Verdict]:
    """Ask for a probe in which, of the units on trial, only `probing` are low: others would blur the answer."""
    low = set(trial.probing)
    precisions: dict[str, Precision] = {
        name: precision if name in low else "bf16" for name, precision in trial.switched.items()
    }
    units: dict[str, UnitState] = {
        name: replace(state.units[name], precision=precision) for name, precision in precisions.items()
    }
    return replace(state.with_units(units), trial=trial), Verdict("probe", reason, precisions)
