"""The conductor's rules on their thresholds; within a step hints only tighten, whatever happens."""

from __future__ import annotations

import copy
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitplan.streaming.selective.decide import BlockPrecisionHint
from bitplan.streaming.transfer.transfer_limits import (
    ConductorError,
    HeuristicPolicyBridge,
    Phase,
    Pressure,
    RuntimeLimitHints,
)

BASE = RuntimeLimitHints(max_inflight_h2d=3, max_inflight_d2h=2, prefetch_window_cap=4)
BRIDGE = HeuristicPolicyBridge(BASE)
EASY, TIGHT = Pressure(10, 100), Pressure(95, 100)


def limits(hints):
    return hints.max_inflight_h2d, hints.max_inflight_d2h, hints.prefetch_window_cap, hints.suppress_speculative


def walk(*steps, bridge=BRIDGE):
    """The state after a step begins and these (phase, pressure) follow."""
    state = bridge.begin_step(bridge.start(), 0)
    for phase, pressure in steps:
        state = bridge.enter(state, phase, pressure)
    return state


FREE = (3, 2, 4, False)
# phase, bytes used of 1000, limits
ROWS = [
    (Phase.BACKWARD, 800, FREE),  # exactly 80% is not above it
    (Phase.BACKWARD, 801, (3, 2, 1, True)),
    (Phase.BACKWARD, 1000, (3, 2, 1, True)),
    (Phase.FORWARD, 1000, FREE),
    (Phase.STEP_END, 1000, FREE),
    (Phase.OPTIMIZER, 0, (1, 2, 4, True)),
    (Phase.OPTIMIZER, 1000, (1, 2, 4, True)),
]


@pytest.mark.parametrize(("phase", "used", "expected"), ROWS)
def test_rules(phase, used, expected):
    before = {Phase.FORWARD: [], Phase.OPTIMIZER: [Phase.FORWARD, Phase.BACKWARD]}.get(phase, [Phase.FORWARD])
    state = walk(*((one, EASY) for one in before), (phase, Pressure(used, 1000)))
    assert limits(state.hints) == expected
    assert bool(state.hints.reasons) == (expected != FREE)


def test_hints_stay_tight_until_the_next_step():
    state = walk((Phase.FORWARD, EASY), (Phase.BACKWARD, TIGHT), (Phase.FORWARD, EASY), (Phase.BACKWARD, EASY))
    assert limits(state.hints) == (3, 2, 1, True)
    assert state.hints.reasons == ("backward: memory 95.0% full, above 80%",)
    state = BRIDGE.enter(BRIDGE.enter(state, Phase.OPTIMIZER, EASY), Phase.STEP_END, EASY)
    assert limits(state.hints) == (1, 2, 1, True)
    assert limits(BRIDGE.begin_step(state, 1).hints) == FREE


def test_full_slots_shrink_the_window_from_the_fourth_check_on():
    full = (Phase.FORWARD, Pressure(0, 1, slots_full=True))
    windows = [walk(*[full] * count).hints.prefetch_window_cap for count in range(8)]
    assert windows == [4, 4, 4, 4, 3, 2, 1, 1]
    interrupted = [full, full, full, (Phase.FORWARD, EASY), full, full, full]
    assert walk(*interrupted).hints.prefetch_window_cap == 4


def hint(precision):
    return BlockPrecisionHint("b", precision, "r", 0)


def test_precisions_are_those_of_the_steps_begin():
    state = BRIDGE.begin_step(BRIDGE.start(), 0, {"b": hint("int8")})
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.STEP_END):
        state = BRIDGE.enter(state, phase, TIGHT)
        assert dict(state.hints.block_precision_map) == {"b": "int8"}
    state = BRIDGE.begin_step(state, 1, {"b": hint("bf16")})
    assert dict(state.hints.block_precision_map) == {"b": "bf16"}
    with pytest.raises(TypeError):
        state.hints.block_precision_map["b"] = "int8"


def test_phases_out_of_order():
    start = BRIDGE.start()
    with pytest.raises(ConductorError, match="phase forward cannot follow nothing"):
        BRIDGE.enter(start, Phase.FORWARD, EASY)
    state = walk((Phase.FORWARD, EASY))
    with pytest.raises(
        ConductorError, match=r"phase optimizer cannot follow forward \(step 0\); expected forward or backward"
    ):
        BRIDGE.enter(state, Phase.OPTIMIZER, EASY)
    with pytest.raises(ConductorError, match="phase step_begin cannot follow forward"):
        BRIDGE.begin_step(state, 1)
    with pytest.raises(ConductorError, match="begins with begin_step"):
        BRIDGE.enter(state, Phase.STEP_BEGIN, EASY)
    with pytest.raises(ConductorError, match="step 0 comes after step 0"):
        BRIDGE.begin_step(walk((Phase.STEP_END, EASY)), 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RuntimeLimitHints(0, 1, 1), "max_inflight_h2d must be an integer from 1, got 0"),
        (lambda: RuntimeLimitHints(1, 1, True), "prefetch_window_cap must be an integer from 1, got True"),
        (lambda: HeuristicPolicyBridge(BASE, vram_pressure_above=80), "above 0, at most 1, got 80"),
        (lambda: HeuristicPolicyBridge(BASE, pressure_window=0), "pressure_window must be an integer from 1, got 0"),
        (lambda: Pressure(1, 0).vram_share, "got 1 of 0"),
        (lambda: Pressure(-1, 5).vram_share, "got -1 of 5"),
    ],
)
def test_limits_that_cannot_be(make, message):
    with pytest.raises(ConductorError, match=re.escape(message)):
        make()


looks = st.lists(
    st.tuples(
        st.sampled_from([Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]),
        st.builds(Pressure, st.integers(0, 100), st.just(100), st.booleans()),
    ),
    max_size=20,
)


@settings(deadline=None, max_examples=25)
@given(looks)
def test_within_a_step_hints_only_tighten_and_states_are_values(steps):
    state = BRIDGE.begin_step(BRIDGE.start(), 0)
    for phase, pressure in steps:
        before = copy.copy(state)
        try:
            after = BRIDGE.enter(state, phase, pressure)
        except ConductorError:
            continue
        assert state == before
        assert after == BRIDGE.enter(state, phase, pressure)
        pairs = zip(limits(after.hints), limits(state.hints), strict=True)
        h2d, d2h, window, quiet = pairs
        assert all(new <= old for new, old in (h2d, d2h, window))
        assert quiet[0] >= quiet[1]
        assert min(limits(after.hints)[:3]) >= 1
        state = after


def test_no_memory_in_use_is_no_fault():
    assert Pressure(0, 5).vram_share == 0.0
