"""The interval: exact cuts against tables of the sign test and of Mann and Whitney's, its answers on each threshold."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitplan.fp8.policy.report import answer_of, rank_test_cut, sign_test_cut, speedup_interval
from bitplan.fp8.policy.vocabulary import Fp8Error


@pytest.mark.parametrize(
    ("pairs", "cut"), [(1, None), (5, None), (6, 0), (8, 0), (9, 1), (10, 1), (12, 2), (20, 5), (25, 7), (50, 17)]
)
def test_cuts_are_those_of_the_tables_of_the_sign_test(pairs, cut):
    assert sign_test_cut(pairs, 0.95) == cut


@pytest.mark.parametrize(
    ("first", "second", "cut"),
    [(3, 3, None), (4, 4, 0), (5, 5, 2), (6, 6, 5), (8, 8, 13), (10, 10, 23), (4, 10, 5), (20, 20, 127)],
)
def test_cuts_are_those_of_the_tables_of_mann_and_whitney(first, second, cut):
    assert rank_test_cut(first, second, 0.95) == cut
    assert rank_test_cut(second, first, 0.95) == cut


@pytest.mark.parametrize(("first", "second"), [(3, 4), (4, 4), (2, 6)])
def test_rank_cut_is_exact_by_counting_every_order(first, second):
    for confidence in (0.6, 0.8, 0.95):
        cut = rank_test_cut(first, second, confidence)
        orders = list(itertools.combinations(range(first + second), first))
        statistics = [sum(places) - first * (first - 1) // 2 for places in orders]
        outside = lambda most, values=statistics: sum(each <= most for each in values) / len(values)
        if cut is not None:
            assert outside(cut) <= (1 - confidence) / 2
        assert outside(0 if cut is None else cut + 1) > (1 - confidence) / 2


def test_beyond_forty_samples_the_approximation_meets_the_exact_count():
    assert rank_test_cut(20, 20, 0.95) - 2 <= rank_test_cut(20, 21, 0.95) - 7 <= rank_test_cut(20, 20, 0.95) + 2
    assert rank_test_cut(1, 60, 0.95) == 0 or rank_test_cut(1, 60, 0.95) is None


@pytest.mark.parametrize(
    ("low", "high", "answer"),
    [
        (1.0, 1.2, "win"),  # the least speedup that counts, so the threshold itself does
        (math.nextafter(1.0, 0), 1.2, "undecided"),
        (0.9, 1.0, "undecided"),
        (0.9, math.nextafter(1.0, 0), "lose"),
        (1.0, 1.0, "win"),
    ],
)
def test_answers_on_the_threshold(low, high, answer):
    assert answer_of(low, high, 1.0) == answer


def test_five_turns_decide_by_crossed_times():
    """2.1.1: TE_LAYER_PERF_ITERS=5."""
    result = speedup_interval([2.0, 2.01, 2.02, 1.99, 2.0], [1.0, 1.01, 1.02, 0.99, 1.0], in_turns=True)
    assert result.method == "crossed"
    assert result.answer(1.0) == "win"
    assert result.low <= result.speedup <= result.high
    assert speedup_interval([2.0] * 3, [1.0] * 3, in_turns=True) is None


def test_turns_divide_the_drift_of_the_gpu_out():
    drift = [1.0, 1.1, 1.2, 1.4, 1.6, 1.9, 2.2, 2.6]
    bf16, fp8 = [1.05 * each for each in drift], drift
    assert speedup_interval(bf16, fp8, in_turns=True).answer(1.0) == "win"
    assert speedup_interval(bf16, fp8, in_turns=False).answer(1.0) == "undecided"


def test_one_wild_sample_decides_nothing():
    calm = [1.0] * 10
    wild = [*calm[:-1], 100.0]
    assert speedup_interval(wild, calm, in_turns=True).speedup == 1.0
    assert speedup_interval(calm, wild, in_turns=True, confidence=0.95).high == 1.0


def test_noise_alone_is_undecided_as_often_as_promised():
    """No difference at all: at most about 5 in 100 may be called a win or a loss."""
    draw = random.Random(0)
    for turns, in_turns in ((10, True), (5, True), (20, False)):
        wrong = 0
        for _ in range(400):
            times = [[draw.lognormvariate(0, 0.05) for _ in range(turns)] for _ in range(2)]
            wrong += speedup_interval(*times, in_turns=in_turns).answer(1.0) != "undecided"
        assert wrong <= 0.075 * 400


@pytest.mark.parametrize("bad", [[], [0.0] * 6, [math.nan] * 6, [math.inf] * 6, [-1.0] * 6])
def test_bad_times(bad):
    with pytest.raises(Fp8Error, match="times must be numbers above 0"):
        speedup_interval([1.0] * 6, bad, in_turns=True)


@pytest.mark.parametrize("confidence", [0.4, 1.0, math.nan])
def test_bad_confidence(confidence):
    with pytest.raises(Fp8Error, match=r"confidence must be from 0\.5"):
        speedup_interval([1.0] * 6, [1.0] * 6, in_turns=True, confidence=confidence)


TIMES = st.lists(st.floats(0.1, 10), min_size=4, max_size=12)


@settings(max_examples=40, deadline=None)
@given(TIMES, TIMES, st.booleans())
def test_the_interval_holds_its_middle_and_widens_with_confidence(bf16, fp8, in_turns):
    wide = speedup_interval(bf16, fp8, in_turns=in_turns, confidence=0.95)
    narrow = speedup_interval(bf16, fp8, in_turns=in_turns, confidence=0.6)
    assert wide.low <= wide.speedup <= wide.high
    if wide.method == narrow.method:
        assert wide.low <= narrow.low
        assert narrow.high <= wide.high
