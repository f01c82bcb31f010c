"""The gradient score on worked figures, and the choice of a set: budget, and no more bytes than hiding takes."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitplan.streaming.selective.config import SelectiveError, SelectivePrecisionConfig
from bitplan.streaming.selective.decide import Candidate, TransferFacts, choose_low_set, decide_with_hysteresis
from bitplan.streaming.selective.score import (
    BlockGradStats,
    RawGradStats,
    StepStats,
    average_stats,
    compare_blocks,
    compute_sensitivity_score,
    estimate_damage,
    mean_of,
)

CONFIG = SelectivePrecisionConfig()


def stats(relative, name="b"):
    return BlockGradStats(name, relative, relative, 0.0, relative)


# relative magnitude, calibration error, sensitivity; thresholds 2.0 and 0.05, weights 0.7 and 0.3 (seed, section 2).
ROWS = [
    (0.0, None, 0.0),
    (1.0, None, 0.35),
    (2.0, None, 0.7),  # without calibration the score cannot exceed 0.7
    (1e9, None, 0.7),
    (2.0, 0.0, 0.7),
    (0.0, 0.05, 0.3),  # exactly at quant_error_threshold
    (0.0, 0.08, 0.3),
    (0.0, 0.025, 0.15),
    (2.0, 0.05, 1.0),
    (1e9, 1e9, 1.0),
    (1.0, 0.025, 0.5),
    (4 / 7, None, 0.2),
    (6 / 7, None, 0.3),
    (12 / 7, None, 0.6),
]


@pytest.mark.parametrize(("relative", "error", "expected"), ROWS)
def test_score(relative, error, expected):
    assert compute_sensitivity_score(stats(relative), error, CONFIG) == pytest.approx(expected, abs=1e-15)


# Seed, "The Problem": a gradient as the table words it, calibration error, what the table says the block needs.
PROBLEM = [
    (0.5, 0.01, "int8"),  # blocks 0-5: low, 0.01-0.02
    (0.5, 0.02, "int8"),
    (1.0, 0.03, "bf16"),  # blocks 20-30: moderate, 0.03-0.04, "mixed": between the thresholds, so the default
    (0.3, 0.03, "int8"),
    (1.0, 0.04, "bf16"),
    (2.0, 0.05, "bf16"),  # blocks 44-47: high, 0.05-0.08
    (2.0, 0.08, "bf16"),
]


@pytest.mark.parametrize(("relative", "error", "needs"), PROBLEM)
def test_the_table_of_blocks(relative, error, needs):
    score = compute_sensitivity_score(stats(relative), error, CONFIG)
    assert decide_with_hysteresis(score, None, CONFIG).precision == needs


@pytest.mark.parametrize(("error", "precision"), [(0.033, "int8"), (0.0334, "bf16"), (0.05, "bf16"), (1.0, "bf16")])
def test_a_calibration_error_alone_keeps_bf16(error, precision):
    """An error of 0.033 (0.2 * 0.05 / 0.3) and more keeps a bf16 block from int8 for ever."""
    score = compute_sensitivity_score(stats(0.0), error, CONFIG)
    assert decide_with_hysteresis(score, "bf16", CONFIG).precision == precision


def test_weights_that_sum_above_one_are_cut():
    config = SelectivePrecisionConfig(grad_weight=2.0, error_weight=1.0)
    assert compute_sensitivity_score(stats(2.0), 0.05, config) == 1.0


@pytest.mark.parametrize("error", [math.nan, math.inf, -0.1])
def test_a_calibration_error_that_is_none_is_refused(error):
    with pytest.raises(SelectiveError, match="calibration error of 'b'"):
        compute_sensitivity_score(stats(1.0), error, CONFIG)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_statistics_that_are_none_are_refused(value):
    with pytest.raises(SelectiveError, match="relative_magnitude must be a finite number from 0"):
        BlockGradStats("b", 1.0, 1.0, 1.0, value)


# ---- comparing blocks ------------------------------------------------------------------------------------------------


def test_relative_magnitude_is_over_the_mean_of_the_usable_blocks():
    raw = {
        "a": RawGradStats(1.0, 1.0, 0.5),
        "b": RawGradStats(3.0, 2.0, 0.5),
        "c": None,
        "d": RawGradStats(math.nan, 1.0, 1.0),
        "e": RawGradStats(1.0, math.inf, 1.0),
    }
    step = compare_blocks(7, raw)
    assert {name: row.relative_magnitude for name, row in step.stats.items()} == {"a": 0.5, "b": 1.5}
    assert step.excluded == {"c": "missing", "d": "non_finite", "e": "non_finite"}


def test_a_zero_gradient_counts_but_a_step_of_zeros_says_nothing():
    zero, one = RawGradStats(0.0, 0.0, 0.0), RawGradStats(1.0, 1.0, 0.0)
    assert compare_blocks(0, {"a": zero, "b": one}).stats["a"].relative_magnitude == 0.0
    assert compare_blocks(0, {"a": zero, "b": zero}).excluded == {"a": "all_zero", "b": "all_zero"}
    assert compare_blocks(0, {"a": None}).stats == {}


def test_impacts_that_are_not_finite_are_left_out_and_said():
    step = compare_blocks(0, {"a": RawGradStats(1.0, 1.0, 0.0)}, {"a": {"int8": math.nan, "fp8": -0.5}})
    assert (step.impacts, step.excluded) == ({"a": {"fp8": -0.5}}, {"a": "non_finite"})
    with pytest.raises(SelectiveError, match="must be finite"):
        StepStats(0, {}, {}, {"a": {"int8": math.inf}})


def test_averages_are_over_the_steps_that_count():
    def step(number, value):
        return compare_blocks(number, {"a": value, "b": RawGradStats(2.0, 4.0, 1.0)})

    result = average_stats([step(0, RawGradStats(2.0, 1.0, 0.0)), step(1, None), step(2, RawGradStats(6.0, 3.0, 2.0))])
    assert result["a"] == BlockGradStats("a", 4.0, 2.0, 1.0, 1.25)  # (1 + 1.5) / 2: a missing step is no zero
    assert "c" not in result


def test_means_of_very_large_numbers_do_not_overflow():
    assert mean_of([1.5e308, 1.5e308]) == 1.5e308


def test_damage_is_the_mean_of_absolutes_and_not_known_is_not_zero():
    assert estimate_damage([0.25, -0.75, math.nan]) == 0.5
    assert estimate_damage([math.nan]) is None
    assert estimate_damage([]) is None


# ---- choosing a set --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compute_ms", "expected"),
    [(10.0, 0), (12.0, -200), (9.99, 1), (5.0, 500), (1e-9, 1000)],
)
def test_bytes_to_save_sits_on_what_computing_hides(compute_ms, expected):
    """1000 bytes cross twice at 200 bytes a ms: 10 ms."""
    assert TransferFacts(compute_ms, 200.0).bytes_to_save(1000) == expected


@pytest.mark.parametrize(
    "change", [{"compute_ms": 0}, {"compute_ms": math.nan}, {"bytes_per_ms": -1.0}, {"crossings": 0}]
)
def test_transfer_facts_are_checked(change):
    with pytest.raises(SelectiveError, match="transfer facts"):
        TransferFacts(**{"compute_ms": 1.0, "bytes_per_ms": 1.0, **change})


def units(*costs, saved=100, **change):
    return [Candidate(f"u.{index}", cost, saved, **change) for index, cost in enumerate(costs)]


# costs, budget, bytes to save, chosen
SETS = [
    ((0.1, 0.2, 0.3), math.inf, None, {0, 1, 2}),
    ((0.125, 0.25, 0.375), 0.375, None, {0, 1}),  # exactly the budget
    ((0.125, 0.25, 0.375), 0.374, None, {0}),
    ((0.3, 0.1, 0.2), math.inf, 100, {1}),  # exactly hidden
    ((0.3, 0.1, 0.2), math.inf, 101, {1, 2}),
    ((0.3, 0.1, 0.2), math.inf, 0, set()),  # computing hides it: none
    ((0.3, 0.1, 0.2), math.inf, -5, set()),
    ((0.3, 0.1, 0.2), math.inf, 10_000, {0, 1, 2}),  # out of reach: as much as there is
    ((0.3, 0.1, 0.2), 0.1, 10_000, {1}),  # the budget is above the wish
]


@pytest.mark.parametrize(("costs", "budget", "wanted", "expected"), SETS)
def test_choice(costs, budget, wanted, expected):
    result = choose_low_set(units(*costs), budget=budget, bytes_to_save=wanted)
    assert result.names == {f"u.{index}" for index in expected}
    assert set(result.reasons) == {f"u.{index}" for index in range(len(costs))}


@pytest.mark.parametrize(("cost", "is_low", "expected"), [(0.9, False, True), (0.95, False, False), (0.95, True, True)])
def test_a_unit_enters_within_a_share_of_the_budget_and_stays_within_all_of_it(cost, is_low, expected):
    result = choose_low_set([Candidate("u", cost, 1, is_low=is_low)], budget=1.0, entry_share=0.9)
    assert ("u" in result.names) is expected


def test_a_large_unit_makes_a_small_one_unneeded():
    """The small one is cheaper per byte and taken first; once the large one is there, it hides nothing more."""
    result = choose_low_set([Candidate("small", 0.1, 10), Candidate("large", 2.0, 100)], bytes_to_save=95)
    assert result.names == {"large"}


def test_what_saves_nothing_stays_high():
    assert choose_low_set([Candidate("norm", 0.0, 0)]).names == frozenset()


candidates = st.lists(
    st.tuples(st.floats(0, 10, width=32), st.integers(1, 1000), st.booleans(), st.booleans()), max_size=8
).map(lambda rows: [Candidate(f"u.{index}", *row) for index, row in enumerate(rows)])


def cost_of(units, chosen):
    return math.fsum(unit.cost for unit in units if unit.name in chosen.names)


@settings(deadline=None, max_examples=25)
@given(candidates, st.floats(0, 30), st.integers(-100, 4000) | st.none())
def test_a_choice_is_within_budget_minimal_and_repeatable(result, budget, wanted):
    chosen = choose_low_set(result, budget=budget, bytes_to_save=wanted)
    assert chosen == choose_low_set(list(reversed(result)), budget=budget, bytes_to_save=wanted)
    by_name = {unit.name: unit for unit in result}
    locked = {unit.name for unit in result if unit.locked and unit.is_low}
    assert locked <= chosen.names
    assert not {unit.name for unit in result if unit.locked and not unit.is_low} & chosen.names
    assert cost_of(result, chosen) <= budget or chosen.names == locked
    if wanted is not None and wanted > 0:
        saved = sum(by_name[name].bytes_saved for name in chosen.names)
        for name in chosen.names - locked:
            assert saved - by_name[name].bytes_saved < wanted  # without any one of them it shows again


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 8), st.integers(1, 9), st.floats(0.5, 12))
def test_equal_blocks_give_the_smallest_set_that_hides(count, saved, share):
    """Against all subsets: where blocks are equal in bytes the greedy choice is the best."""
    costs = [0.1 * (index * 7 % 5) for index in range(count)]
    wanted = math.ceil(share * saved)
    units = [Candidate(f"u.{i}", cost, saved) for i, cost in enumerate(costs)]
    result = choose_low_set(units, bytes_to_save=wanted)
    sets = [
        subset
        for size in range(count + 1)
        for subset in itertools.combinations(range(count), size)
        if size * saved >= wanted
    ]
    if not sets:
        assert len(result.names) == count
        return
    smallest = min(map(len, sets))
    assert len(result.names) == smallest
    assert cost_of(units, result) == pytest.approx(min(sum(costs[i] for i in s) for s in sets if len(s) == smallest))
