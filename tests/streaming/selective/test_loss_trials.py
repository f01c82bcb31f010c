"""Trials: who raised the loss, found by probes; rolled back, and kept back for twice as long each time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitplan.streaming.selective.config import SelectiveError, SelectivePrecisionConfig
from bitplan.streaming.selective.decide import BlockPrecisionHint, compute_hints
from bitplan.streaming.selective.score import BlockGradStats, StepStats
from bitplan.streaming.selective.state import PolicyState, observe
from bitplan.streaming.selective.training_policy import MAX_DOUBLINGS, advance_trial, begin_trial

CONFIG = SelectivePrecisionConfig(
    warmup_steps=0,
    update_interval_steps=1,
    history_window=1,
    min_steps_between_switches=0,
    loss_feedback=True,
    loss_tolerance=0.5,
    backoff_steps=100,
)


def quiet(number, names):
    return StepStats(number, {name: BlockGradStats(name, 0.0, 0.0, 0.0, 0.0) for name in names}, {})


def switched(count, step=1, config=CONFIG):
    """A state in which all units have just gone low, and its hints."""
    names = [f"u.{index}" for index in range(count)]
    state = observe(PolicyState.start(names), quiet(step, names), config)
    return compute_hints(state, step, config)


# loss before, loss after, accepted: the tolerance is 0.5, exactly on it is accepted.
TOLERANCE = [
    (1.0, 1.0, True),
    (1.0, 1.5, True),
    (1.0, math.nextafter(1.5, 2), False),
    (1.0, 0.0, True),
    (1.0, math.nan, False),
    (1.0, math.inf, False),
]


@pytest.mark.parametrize(("before", "after", "accepted"), TOLERANCE)
def test_tolerance(before, after, accepted):
    state, hints = switched(1)
    state, verdict = advance_trial(begin_trial(state, hints, before, 1), after, CONFIG)
    assert verdict.action == ("accepted" if accepted else "rolled_back")
    assert state.units["u.0"].precision == ("int8" if accepted else "bf16")
    assert state.trial is None
    assert f"{before:.6g} -> {after:.6g}" in verdict.reason


def settle(state, bad):
    """Probe until it is settled; the loss rises by 1 for each bad unit that is low."""
    probes, culprits = 0, []
    while state.trial is not None:
        low = [name for name in state.trial.switched if state.units[name].precision != "bf16"]
        assert set(low) == set(state.trial.probing)
        state, verdict = advance_trial(state, 1.0 + sum(name in bad for name in low), CONFIG)
        probes += 1
        culprits += [verdict.culprit] if verdict.culprit else []
    return state, culprits, probes


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 12), st.sets(st.integers(0, 11)))
def test_exactly_the_bad_units_are_rolled_back(count, bad):
    state, hints = switched(count)
    bad_names = {f"u.{index}" for index in bad if index < count}
    state, culprits, probes = settle(begin_trial(state, hints, 1.0, 1), bad_names)
    assert set(culprits) == bad_names
    assert {name for name, unit in state.units.items() if unit.precision == "bf16"} == bad_names
    assert probes <= (len(bad_names) + 1) * (1 + math.ceil(math.log2(count)))


@pytest.mark.parametrize(("culprit", "says"), [("u.0", "1 -> 2 with u.0 low"), ("u.3", "1 -> 2 with 4 units low")])
def test_a_rollback_quotes_the_probe_in_which_the_loss_rose(culprit, says):
    """u.3 is found by clearing the others: the last probe was without it, and within the tolerance."""
    state, hints = switched(4)
    state, culprits, _ = settle(begin_trial(state, hints, 1.0, 1), {culprit})
    assert culprits == [culprit]
    assert f"raised the loss (probe loss {says}, tolerance" in state.units[culprit].reason


def test_one_culprit_of_eight_takes_five_probes():
    """All low; three halvings; the other seven once more."""
    state, hints = switched(8)
    assert settle(begin_trial(state, hints, 1.0, 1), {"u.5"})[1:] == (["u.5"], 5)


def test_units_that_are_bad_only_together():
    state, hints = switched(4)
    state = begin_trial(state, hints, 1.0, 1)
    while state.trial is not None:
        low = sum(unit.precision != "bf16" for unit in state.units.values())
        state, _ = advance_trial(state, 2.0 if low == 4 else 1.0, CONFIG)
    assert sum(unit.precision == "bf16" for unit in state.units.values()) == 1


# rollbacks so far, the step of the trial, back-off until: 100 steps, doubling.
BACKOFF = [(0, 10, 110), (1, 10, 210), (2, 10, 410), (MAX_DOUBLINGS, 0, 100 * 2**16), (40, 0, 100 * 2**16)]


@pytest.mark.parametrize(("rollbacks", "step", "until"), BACKOFF)
def test_back_off_doubles(rollbacks, step, until):
    state, hints = switched(1)
    state = state.with_units({"u.0": replace(state.units["u.0"], rollbacks=rollbacks)})
    state, _ = advance_trial(begin_trial(state, hints, 1.0, step), 9.0, CONFIG)
    unit = state.units["u.0"]
    assert (unit.backoff_until, unit.rollbacks, unit.last_switch_step) == (until, rollbacks + 1, step)


@pytest.mark.parametrize(("step", "expected"), [(100, "bf16"), (101, "int8")])
def test_a_unit_stays_back_until_its_back_off_ends(step, expected):
    state, hints = switched(1)
    state, _ = advance_trial(begin_trial(state, hints, 1.0, 1), 9.0, CONFIG)  # until step 101
    state = observe(state, quiet(step, ["u.0"]), CONFIG)
    _, hints = compute_hints(state, step, CONFIG)
    assert hints["u.0"].precision == expected
    if expected == "bf16":
        assert "it raised the loss 1 times: bf16 until step 101" in hints["u.0"].reason


def test_an_open_trial_freezes_decisions():
    state, hints = switched(2)
    state = begin_trial(state, hints, 1.0, 1)
    state, _ = advance_trial(state, 9.0, CONFIG)  # u.0 is probed, u.1 is bf16 meanwhile
    loud = StepStats(2, {"u.0": BlockGradStats("u.0", 9.0, 9.0, 0.0, 9.0)}, {})
    state, hints = compute_hints(observe(state, loud, CONFIG), 2, CONFIG)
    assert [hint.precision for hint in hints.values()] == ["int8", "bf16"]
    assert not any(hint.changed for hint in hints.values())


def test_forced_and_unchanged_units_are_not_on_trial():
    config = replace(CONFIG, force_int8_blocks=("u.0",))
    state, hints = switched(2, config=config)
    trial = begin_trial(state, hints, 1.0, 1).trial
    assert trial is not None
    assert dict(trial.switched) == {"u.1": "int8"}
    still = {
        "u.0": BlockPrecisionHint("u.0", "int8", "r", 1),
        "u.1": BlockPrecisionHint("u.1", "bf16", "r", 1, None, True),
    }
    assert begin_trial(state, still, 1.0, 1) == state


def test_refusals():
    state, hints = switched(1)
    with pytest.raises(SelectiveError, match="must be finite, got nan"):
        begin_trial(state, hints, math.nan, 1)
    with pytest.raises(SelectiveError, match="no trial is open"):
        advance_trial(state, 1.0, CONFIG)
    state = begin_trial(state, hints, 1.0, 1)
    with pytest.raises(SelectiveError, match="a trial of step 1 is still open"):
        begin_trial(state, hints, 1.0, 2)
