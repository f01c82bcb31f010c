"""Decisions on every threshold, by literal rows; then what must hold for any run."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitplan.streaming.selective.config import SelectiveError, SelectivePrecisionConfig
from bitplan.streaming.selective.decide import (
    Evidence,
    TransferFacts,
    assign_forced,
    compute_hints,
    current_hints,
    decide_with_hysteresis,
    describe_changes,
    is_update_due,
)
from bitplan.streaming.selective.score import BlockGradStats, StepStats
from bitplan.streaming.selective.state import PolicyState, observe

CONFIG = SelectivePrecisionConfig()
EAGER = SelectivePrecisionConfig(
    warmup_steps=0, update_interval_steps=1, history_window=1, min_steps_between_switches=0
)
below = lambda value: math.nextafter(value, -1)

# Seed 000, "Hysteresis Decision". score, current, steps since the last switch, expected.
ROWS = [
    # never assigned: plain thresholds, ambiguous_default between them
    (0.6, None, None, "bf16"),
    (below(0.6), None, None, "bf16"),
    (0.3, None, None, "bf16"),
    (below(0.3), None, None, "int8"),
    (0.0, None, None, "int8"),
    (1.0, None, None, "bf16"),
    # "Currently bf16 -> switch to int8 only if sensitivity < 0.2 (threshold 0.3 - margin 0.1)"
    (0.3, "bf16", None, "bf16"),
    (below(0.3), "bf16", None, "bf16"),
    (0.2, "bf16", None, "bf16"),
    (below(0.2), "bf16", None, "int8"),
    # "Currently int8 -> switch to bf16 only if sensitivity >= 0.6"
    (0.6, "int8", None, "bf16"),
    (below(0.6), "int8", None, "int8"),
    (0.3, "int8", None, "int8"),
    (0.2, "int8", None, "int8"),
    # "Blocks cannot change precision within min_steps_between_switches (default: 20) steps of their last change"
    (0.0, "bf16", 0, "bf16"),
    (0.0, "bf16", 19, "bf16"),
    (0.0, "bf16", 20, "int8"),
    (1.0, "int8", 19, "int8"),
    (1.0, "int8", 20, "bf16"),
]


@pytest.mark.parametrize(("score", "current", "since", "expected"), ROWS)
def test_hysteresis(score, current, since, expected):
    result = decide_with_hysteresis(score, current, CONFIG, steps_since_switch=since)
    assert result.precision == expected
    assert result.reason.startswith("score ")


def test_ambiguous_default_is_for_the_first_assignment_only():
    config = replace(CONFIG, ambiguous_default="int8")
    for score, current, expected in (
        (0.3, None, "int8"),
        (below(0.6), None, "int8"),
        (0.6, None, "bf16"),
        (0.3, "bf16", "bf16"),
    ):
        assert decide_with_hysteresis(score, current, config).precision == expected


def test_reasons_say_what_was_compared():
    assert decide_with_hysteresis(0.1, "bf16", CONFIG).reason == "score 0.1 < 0.2"
    assert decide_with_hysteresis(0.7, "int8", CONFIG).reason == "score 0.7 >= 0.6"
    assert decide_with_hysteresis(0.5, "int8", CONFIG).reason == "score 0.5 not >= 0.6: stays int8"
    cooling = decide_with_hysteresis(0.7, "int8", CONFIG, steps_since_switch=5).reason
    assert cooling == "score 0.7 >= 0.6, but cooling down: 5 of 20 steps since the last switch"


# ---- runs ------------------------------------------------------------------------------------------------------------


def step_of(number, relatives, impacts=None):
    """A step with these relative magnitudes; None is a missing gradient."""
    stats = {n: BlockGradStats(n, value, value, 0.0, value) for n, value in relatives.items() if value is not None}
    excluded = {name: "missing" for name, value in relatives.items() if value is None}
    return StepStats(number, stats, excluded, impacts or {})


def run(config, steps, evidence=None, names=None):
    """Hints of every step, from a list of {block: relative magnitude}; steps count from 1."""
    state, all_hints = PolicyState.start(names or steps[0]), []
    for number, relatives in enumerate(steps, 1):
        state = observe(state, step_of(number, relatives), config)
        state, hints = compute_hints(state, number, config, evidence or Evidence())
        all_hints.append(hints)
    return state, all_hints


def precisions(all_hints, name):
    return [hints[name].precision for hints in all_hints]


def test_warm_up_and_update_interval_with_the_defaults():
    """Ten steps of collection before the first assignment, then every ten (seed, parameter table)."""
    state, result = run(CONFIG, [{"a": 0.0, "b": 4.0}] * 35)
    assert precisions(result, "a") == ["bf16"] * 9 + ["int8"] * 26
    assert [number for number, hints in enumerate(result, 1) if hints["a"].changed] == [10]
    assert state.last_update_step == 30
    assert result[8]["a"].reason == "no assignment yet: bf16"
    assert result[14]["a"].reason == "score 0 < 0.3"


@pytest.mark.parametrize(
    ("collected", "step", "due"), [(9, 9, False), (9, 10, False), (10, 10, True), (10, 11, False), (19, 20, True)]
)
def test_when_an_update_is_due(collected, step, due):
    state = replace(PolicyState.start(["a"]), steps_collected=collected)
    assert is_update_due(state, step, CONFIG) is due
    assert not is_update_due(state, step, replace(CONFIG, mode="static"))
    assert not is_update_due(state, step, replace(CONFIG, enabled=False))


def test_only_the_window_counts():
    config = replace(EAGER, update_interval_steps=6, history_window=5)
    _, result = run(config, [{"a": 100.0}] + [{"a": 0.0}] * 5)
    assert result[-1]["a"].sensitivity == 0.0  # the first step has left the window
    _, result = run(replace(config, history_window=6), [{"a": 12.0}] + [{"a": 0.0}] * 5)
    assert result[-1]["a"].sensitivity == pytest.approx(0.7)  # mean 2.0


def test_a_block_is_held_by_its_cooldown():
    config = replace(CONFIG, warmup_steps=1, update_interval_steps=1, history_window=1)
    _, result = run(config, [{"a": 0.0}] + [{"a": 4.0}] * 25)
    assert precisions(result, "a") == ["int8"] * 20 + ["bf16"] * 6  # switched at 1, free at 21
    assert result[20]["a"].changed


def test_changes_are_told_once():
    _, result = run(EAGER, [{"a": 0.0, "b": 4.0}] * 2)
    assert describe_changes(result[0]) == ["step 1: a is now int8 (score 0 < 0.3)"]
    assert describe_changes(result[1]) == []


def test_a_first_assignment_to_bf16_is_no_switch():
    config = replace(CONFIG, warmup_steps=1, update_interval_steps=1, history_window=1)
    _, result = run(config, [{"a": 4.0}, {"a": 0.0}])
    assert precisions(result, "a") == ["bf16", "int8"]


# Seed, "Three Modes" and "Manual overrides ... take absolute priority in all modes".
MODES = [
    ("off", {"free": "bf16", "high": "bf16", "low": "int8"}),
    ("static", {"free": "bf16", "high": "bf16", "low": "int8"}),
    ("dynamic", {"free": "int8", "high": "bf16", "low": "int8"}),
]


@pytest.mark.parametrize(("mode", "expected"), MODES)
def test_modes_and_force_lists(mode, expected):
    config = replace(EAGER, mode=mode, force_bf16_blocks=("high",), force_int8_blocks=("low",))
    _, result = run(config, [{"free": 0.0, "high": 0.0, "low": 9.0}])
    assert {name: hint.precision for name, hint in result[0].items()} == expected
    assert result[0]["low"].reason == "forced by force_int8_blocks ('low')"


def test_not_enabled_is_bf16_everywhere():
    config = replace(EAGER, enabled=False, force_int8_blocks=("a",))
    _, result = run(config, [{"a": 0.0}])
    assert (result[0]["a"].precision, result[0]["a"].reason) == (
        "bf16",
        "selective precision is not enabled: the stream's own format",
    )


def test_missing_gradients_are_no_score_and_change_nothing():
    state, result = run(EAGER, [{"a": 0.0, "b": None}, {"a": None, "b": None}])
    assert precisions(result, "a") == ["int8", "int8"]
    assert result[1]["a"].reason == "no usable gradient in the last 1 steps (1 missing): no score, no change"
    assert result[1]["b"].sensitivity is None
    assert state.units["b"].precision is None  # still never assigned, so plain thresholds when gradients come
    assert state.units["b"].excluded == {"missing": 2}


def test_calibration_errors_enter_the_score():
    _, result = run(EAGER, [{"a": 1.0}], Evidence(quant_errors={"a": {"int8": 0.05}}))
    assert result[0]["a"].sensitivity == pytest.approx(0.65)


# ---- bandwidth -------------------------------------------------------------------------------------------------------

NAMES = [f"b.{index}" for index in range(4)]
BYTES = {name: {"bf16": 1000, "int8": 520} for name in NAMES}


def with_transfer(compute_ms):
    return Evidence(unit_bytes=BYTES, transfer=TransferFacts(compute_ms, 1000.0, crossings=1))


@pytest.mark.parametrize(
    ("compute_ms", "low"), [(4.0, []), (3.999, ["b.0"]), (3.52, ["b.0"]), (3.51, ["b.0", "b.1"]), (1.0, NAMES[:3])]
)
def test_only_as_many_blocks_as_hide_the_transfer(compute_ms, low):
    """4000 bytes at 1000 a ms; each int8 block saves 480. b.3 is too sensitive in any case."""
    config = replace(EAGER, bandwidth_aware=True)
    relatives = {"b.0": 0.0, "b.1": 0.1, "b.2": 0.2, "b.3": 4.0}
    _, result = run(config, [relatives], with_transfer(compute_ms))
    assert [name for name in NAMES if result[0][name].precision == "int8"] == low
    if compute_ms == 4.0:
        assert "computing already hides the transfer" in result[0]["b.0"].reason


def test_a_low_block_whose_gradient_goes_missing_is_not_the_safest():
    """b.0 keeps its last score, 0.07; b.1 with 0.035 is the one that stays low when one is enough."""
    config = replace(EAGER, bandwidth_aware=True)
    first = {"b.0": 0.2, "b.1": 0.1, "b.2": 4.0, "b.3": 4.0}
    state, result = run(config, [first], with_transfer(3.2))
    assert precisions(result, "b.0") == precisions(result, "b.1") == ["int8"]
    state = observe(state, step_of(2, {**first, "b.0": None}), config)
    _, hints = compute_hints(state, 2, config, with_transfer(3.6))
    assert [hints[name].precision for name in NAMES] == ["bf16", "int8", "bf16", "bf16"]


def test_a_forced_block_counts_towards_hiding():
    config = replace(EAGER, bandwidth_aware=True, force_int8_blocks=("b.3",))
    _, result = run(config, [dict.fromkeys(NAMES, 0.0)], with_transfer(3.52))
    assert [name for name in NAMES if result[0][name].precision == "int8"] == ["b.3"]


@pytest.mark.parametrize(
    ("change", "evidence", "message"),
    [
        ({"bandwidth_aware": True}, Evidence(), "bandwidth_aware needs to know how many bytes 'a' is in bf16, int8"),
        ({"scoring": "impact"}, Evidence(), "scoring \"impact\" needs to know how many bytes 'a'"),
        ({"bandwidth_aware": True}, Evidence(unit_bytes={"a": BYTES["b.0"]}), "give them in Evidence.transfer"),
    ],
)
def test_evidence_that_is_needed(change, evidence, message):
    with pytest.raises(SelectiveError, match=re.escape(message)):
        run(replace(EAGER, **change), [{"a": 0.0}], evidence)


# ---- impact ----------------------------------------------------------------------------------------------------------

IMPACT = replace(EAGER, scoring="impact", damage_budget=1.0)


def impact_run(config, steps, evidence=None):
    """steps: {unit: impact}; None is not measured."""
    state, result = PolicyState.start(NAMES), []
    for number, damages in enumerate(steps, 1):
        impacts = {name: {"int8": value} for name, value in damages.items() if value is not None}
        state = observe(state, StepStats(number, {}, {}, impacts), config)
        state, hints = compute_hints(state, number, config, evidence or Evidence(unit_bytes=BYTES))
        result.append("".join("b" if hint.precision == "bf16" else hint.precision[0] for hint in hints.values()))
    return state, result


# damages of b.0 .. b.3 with a budget of 1.0, entered up to 0.9; i is int8.
IMPACTS = [
    ((0.1, 0.2, 0.3, 0.4), "iiib"),
    ((0.2, 0.3, 0.4, 9.0), "iiib"),  # 0.9: exactly the entry share
    ((0.2, 0.3, 0.41, 9.0), "iibb"),
    ((-0.2, -0.3, 0.4, 9.0), "iiib"),  # signs do not cancel
    ((0.9, 1.0, 1.0, 1.0), "ibbb"),
    ((0.91, 1.0, 1.0, 1.0), "bbbb"),
    ((0.0, 0.0, 0.0, 0.0), "iiii"),
    ((0.1, None, 0.1, 0.1), "ibii"),  # not known is not zero
]


@pytest.mark.parametrize(("damages", "expected"), IMPACTS)
def test_one_budget_in_units_of_loss(damages, expected):
    _, result = impact_run(IMPACT, [dict(zip(NAMES, damages, strict=True))])
    assert result == [expected]


def test_the_budget_has_a_margin_and_the_dearest_leave_first():
    steps = [(0.3, 0.3, 0.3, 9.0), (0.3, 0.3, 0.4, 9.0), (0.3, 0.3, 0.41, 9.0), (0.3, 0.3, 0.31, 9.0)]
    _, result = impact_run(IMPACT, [dict(zip(NAMES, row, strict=True)) for row in steps])
    assert result == ["iiib", "iiib", "iibb", "iibb"]  # 1.0 is within; 1.01 is not; 0.91 is above the entry


def test_a_low_unit_without_a_fresh_figure_keeps_its_last():
    state, result = impact_run(IMPACT, [dict(zip(NAMES, (0.6, 0.6, 9, 9), strict=True)), {"b.1": 0.6}])
    assert result == ["ibbb", "ibbb"]
    assert state.units["b.0"].score == 0.6


def test_forced_units_use_the_budget():
    config = replace(IMPACT, force_int8_blocks=("b.3",), force_bf16_blocks=("b.0",))
    _, result = impact_run(config, [dict.fromkeys(NAMES, 0.4)])
    assert result == ["bibi"]


def test_a_forced_unit_without_a_figure_has_no_score():
    config = replace(IMPACT, force_int8_blocks=("b.3",))
    state, result = impact_run(config, [dict(zip(NAMES, (0.4, 0.4, 0.4, None), strict=True))])
    assert result == ["iibi"]
    assert state.units["b.3"].score is None


def test_impact_with_bandwidth():
    config = replace(IMPACT, bandwidth_aware=True)
    damages = dict(zip(NAMES, (0.3, 0.1, 0.2, 0.05), strict=True))
    for compute_ms, expected in [(4.0, "bbbb"), (3.6, "bbbi"), (3.5, "bibi")]:
        assert impact_run(config, [damages], with_transfer(compute_ms))[1] == [expected]


# ---- what holds for any run ------------------------------------------------------------------------------------------

magnitudes = st.one_of(st.none(), st.floats(0, 4, width=32), st.sampled_from([0.0, 4 / 7, 6 / 7, 12 / 7, 2.0]))
runs = st.lists(st.fixed_dictionaries(dict.fromkeys(NAMES, magnitudes)), min_size=1, max_size=25)
configs = st.builds(
    SelectivePrecisionConfig,
    mode=st.sampled_from(["off", "static", "dynamic"]),
    ambiguous_default=st.sampled_from(["bf16", "int8"]),
    warmup_steps=st.integers(0, 5),
    update_interval_steps=st.integers(1, 4),
    history_window=st.integers(1, 4),
    min_steps_between_switches=st.integers(0, 6),
    force_bf16_blocks=st.sampled_from([(), ("b.0",)]),
    force_int8_blocks=st.sampled_from([(), ("b.1",)]),
    bandwidth_aware=st.booleans(),
    scoring=st.sampled_from(["gradient", "impact"]),
    damage_budget=st.sampled_from([0.5, 2.0]),
)


@settings(deadline=None, max_examples=30)
@given(configs, runs)
def test_force_lists_win_cooldowns_hold_and_inputs_stay_as_they_were(config, steps):
    evidence, state = with_transfer(3.0), PolicyState.start(NAMES)
    last_switch = {}
    for number, relatives in enumerate(steps, 1):
        impacts = {name: {"int8": value / 4} for name, value in relatives.items() if value is not None}
        state = observe(state, step_of(number, relatives, impacts), config)
        before = copy.deepcopy(state)
        after, hints = compute_hints(state, number, config, evidence)
        assert state == before
        assert compute_hints(state, number, config, evidence) == (after, hints)
        for name, hint in hints.items():
            forced = config.forced(name)
            assert hint.reason
            if forced:
                assert hint.precision == forced[0]
            elif hint.changed:
                assert number - last_switch.get(name, -99) >= config.min_steps_between_switches
                last_switch[name] = number
            assert hint.sensitivity is None or any(step[name] is not None for step in steps[:number])
            if config.mode != "dynamic" and not forced:
                assert hint.precision == "bf16"
        state = after


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(*[st.floats(0, 1 / 3)] * 3), max_size=10))
def test_inside_the_budgets_margin_nothing_moves(rows):
    """Three units enter at 0.9 of the budget; within the budget they stay, and the fourth finds no room."""
    steps = [(0.3, 0.3, 0.3, 1.0)] + [(*row, 1.0) for row in rows]
    _, result = impact_run(IMPACT, [dict(zip(NAMES, row, strict=True)) for row in steps])
    assert set(result) == {"iiib"}


@settings(deadline=None, max_examples=25)
@given(st.lists(st.floats(0.2, below(0.6)), min_size=1, max_size=50), st.sampled_from(["bf16", "int8"]))
def test_inside_the_margin_nothing_ever_moves(scores, start):
    """Between 0.2 and 0.6 a block keeps what it has, however the score wanders."""
    current = start
    for score in scores:
        current = decide_with_hysteresis(score, current, CONFIG).precision
        assert current == start


@settings(deadline=None, max_examples=25)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_a_switch_back_needs_the_whole_gap(scores):
    """From one switch to the next the score has crossed from below 0.2 to 0.6 or above, or the other way."""
    current = "bf16"
    for score in scores:
        result = decide_with_hysteresis(score, current, CONFIG).precision
        if result != current:
            assert score < 0.2 if result == "int8" else score >= 0.6
        current = result


def test_steps_must_go_up():
    state = observe(PolicyState.start(["a"]), step_of(3, {"a": 1.0}), CONFIG)
    with pytest.raises(SelectiveError, match="step 3 comes after step 3"):
        observe(state, step_of(3, {"a": 1.0}), CONFIG)
    with pytest.raises(SelectiveError, match="statistics of 'z'"):
        observe(state, step_of(4, {"z": 1.0}), CONFIG)
    with pytest.raises(SelectiveError, match="different names"):
        PolicyState.start(["a", "a"])
    state, _ = run(EAGER, [{"a": 1.0}] * 5)
    with pytest.raises(SelectiveError, match="step 4 is before the last update at step 5"):
        compute_hints(state, 4, EAGER)


def test_force_lists_hold_before_anything_is_scored():
    config = replace(EAGER, force_int8_blocks=("b.1",))
    state, hints = assign_forced(PolicyState.start(NAMES), 0, config)
    assert {name: hint.precision for name, hint in hints.items()} == dict.fromkeys(NAMES, "bf16") | {"b.1": "int8"}
    assert (hints["b.1"].changed, hints["b.1"].forced, hints["b.0"].changed) == (True, True, False)
    assert state.units["b.0"].precision is None, "still not assigned: ambiguous_default is to come"
    assert state.last_update_step is None
    again, hints = assign_forced(state, 1, config)
    assert again == state
    assert not hints["b.1"].changed


def test_current_hints_say_what_holds_and_what_changed():
    state, hints = run(EAGER, [{"b.0": 0.0, "b.1": 4.0}])
    result = current_hints(state, 7, EAGER, {"b.0": "bf16", "b.1": "bf16"})
    for name, hint in hints[0].items():
        assert result[name] == replace(hint, step_id=7, changed=hint.precision != "bf16")
    assert not any(hint.changed for hint in current_hints(state, 7, EAGER).values())
