"""Estimates at other counts and shapes: literal speedups in, literal estimates out; none with nothing to go by."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitplan.fp8.policy.choice import REACH, choose_products, estimate_speedup
from bitplan.fp8.policy.merge import merge_reports
from bitplan.fp8.policy.policy import Question
from bitplan.fp8.policy.report import Row
from bitplan.fp8.policy.vocabulary import PRODUCTS
from tests.fp8.policy.fp8_samples import experts, report, series

STILL = (1.0,) * 10
ASKED = Question("row", 1024, name="fc2", shape=(4096, 14336), recipe="blockwise")


def rows(shape, speedups, name="fc2", noise=STILL):
    return series(speedups, part="llm", kind="row", name=name, shape=shape, tp=1, noise=noise)


def policy_of(*groups):
    return merge_reports([report([row for group in groups for row in group])]).policy


def near(value):
    return None if value is None else pytest.approx(value, rel=1e-9)


def speedup_at(policy, tokens, shape=(4096, 14336), **more):
    result = estimate_speedup(policy, replace(ASKED, num_tokens=tokens, shape=shape, **more))
    return None if result is None else result.speedup


ONE = policy_of(rows((4096, 14336), {512: 0.8, 2048: 1.4}))


# ---- counts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "speedup"),
    [
        (512, 0.8),
        (1024, 1.12),  # FP8's share of the time is 1.25 and 0.714; two thirds of the way over 1 / tokens
        (2048, 1.4),
        (500, 0.8 * 500 / 512),  # below: as if FP8 took as long as at 512 tokens
        (256, 0.4),
        (2049, 1.4),  # above: what it gained at the largest count
        (4096, 1.4),
        (4097, None),  # beyond twice the largest count nothing is assumed
    ],
)
def test_other_counts(tokens, speedup):
    assert REACH == 2
    assert speedup_at(ONE, tokens) == near(speedup)


def test_two_points_are_exact_where_fp8_costs_a_fixed_time_more():
    """BF16 takes 1 a token, FP8 0.5 a token and 400 a step: from two counts every other one follows."""
    policy = policy_of(rows((4096, 14336), {count: count / (0.5 * count + 400) for count in (512, 8192)}))
    for count in (600, 800, 1024, 4096):
        assert speedup_at(policy, count) == near(count / (0.5 * count + 400))


def test_more_points_bend_the_curve():
    """Where the host is the limit up to about 1500 tokens, the line from 1024 to 2048 alone would be too low."""
    gain = {512: 0.5, 1024: 0.8, 2048: 1.3, 4096: 1.4, 8192: 1.45}
    both = speedup_at(policy_of(rows((4096, 14336), {1024: 0.8, 2048: 1.3})), 1536)
    assert both < speedup_at(policy_of(rows((4096, 14336), gain)), 1536) < 1.3


def test_a_fall_towards_the_largest_count_goes_on():
    policy = policy_of(rows((4096, 14336), {4096: 1.5, 8192: 1.3}))
    assert speedup_at(policy, 16384) == near(1.1)
    assert speedup_at(policy, 10000) == near(1.3 - 0.2 * math.log2(10000 / 8192))
    assert speedup_at(policy_of(rows((4096, 14336), {4096: 1.3, 8192: 1.5})), 16384) == near(1.5)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.3, 2.0), min_size=2, max_size=6), st.integers(512, 16384))
def test_an_estimate_never_leaves_the_points_beside_it(speedups, tokens):
    counts = [512 * 2**index for index in range(len(speedups))]
    result = speedup_at(policy_of(rows((4096, 14336), dict(zip(counts, speedups, strict=True)))), tokens)
    if tokens > counts[-1]:
        return
    at = max(index for index, count in enumerate(counts) if count <= tokens)
    ends = speedups[at : at + (1 if counts[at] == tokens else 2)]
    assert min(ends) - 1e-9 <= result <= max(ends) + 1e-9


# ---- shapes ----------------------------------------------------------------------------------------------------------

PAIR = policy_of(rows((2048, 8192), {512: 0.6, 1024: 0.9}))


@pytest.mark.parametrize(
    ("shape", "tokens", "speedup"),
    [
        ((8192, 2048), 1024, 0.9),  # turned round: the same work and intensity
        ((4096, 8192), 512, 1 / (1 / 0.6 - (1 / 0.6 - 1 / 0.9) / 4)),  # the intensity of 585 tokens, the work of 1024
        ((2048, 4096), 2048, 0.9),  # the work of 1024 tokens, the intensity of 1638
        ((2048, 4096), 512, 0.3),  # the work of 256 tokens: below the smallest count
        ((64, 64), 512, 0.6 * 64 * 64 / (2048 * 8192)),
        ((16384, 16384), 1024, 0.9),  # easier than the largest count
        ((4096, 8192), 2049, None),  # beyond twice the largest count
    ],
)
def test_other_shapes(shape, tokens, speedup):
    assert speedup_at(PAIR, tokens, shape) == near(speedup)


def test_the_best_of_those_that_are_no_easier():
    policy = policy_of(rows((2048, 2048), {1024: 0.9}), rows((4096, 2048), {1024: 1.2}))
    result = estimate_speedup(policy, replace(ASKED, shape=(4096, 4096)))
    assert result.speedup == near(1.2)
    message = (
        "never measured itself; it has no less work and intensity than 4096x2048 at 1365 tokens, about 1.200x by win"
    )
    assert result.reason.startswith(message)


def test_what_is_easier_and_lost_speaks_against():
    harder = rows((2048, 2048), {1024: 1.3})
    asked = replace(ASKED, shape=(4096, 4096))
    assert choose_products(policy_of(harder, rows((8192, 8192), {1024: 1.4})), asked).products == PRODUCTS
    against = choose_products(policy_of(harder, rows((8192, 8192), {1024: 0.9})), asked)
    assert against.products == ()
    assert against.reason.startswith("estimated 0.900x: never measured itself")
    assert "; but no more than 8192x8192 at 1024 tokens, about 0.900x by lose at 1024 tokens" in against.reason


def test_the_name_does_not_matter_for_another_shape():
    policy = policy_of(rows((2048, 2048), {512: 1.3}, name="proj"))
    assert speedup_at(policy, 512) == near(1.3)
    for change in ({"kind": "column"}, {"tp": 2}, {"part": "vit"}, {"recipe": "rowwise"}):
        assert speedup_at(policy, 512, **change) is None


def test_experts_by_their_count():
    """512 rows of 64 experts are 8 for each: their intensity hardly depends on the shape, their work does."""
    policy = policy_of(series({512: 1.2, 1024: 1.3}, noise=STILL, **experts("row_grouped")))
    asked = Question("row_grouped", 64, num_gemms=64, moe_router_topk=8, shape=(8192, 2048), recipe="blockwise")
    assert 1.2 < estimate_speedup(policy, asked).speedup < 1.201
    half = estimate_speedup(policy, replace(asked, shape=(3584, 2048), num_tokens=128)).speedup
    assert half == near(1.2)  # 1024 rows of half the shape: the work of 512
    assert estimate_speedup(policy, replace(asked, num_gemms=32)) is None


# ---- what comes of it ------------------------------------------------------------------------------------------------


def test_a_choice_by_estimate_says_so_and_only_where_it_is_wanted():
    assert not choose_products(ONE, replace(ASKED, estimate=False))
    choice = choose_products(ONE, ASKED)
    assert choice.products == PRODUCTS
    assert choice.answer == "unmeasured"
    assert choice.reason.startswith("estimated 1.120x: 4096x14336 at 1024 tokens, about 1.120x by lose at 512 tokens")
    assert (choice.holds_from, choice.holds_to) == (788, 4096)  # the share is 1 at 787.7 tokens
    below = choose_products(ONE, replace(ASKED, num_tokens=600))
    assert (below.products, below.answer) == ((), "unmeasured")
    assert below.reason.startswith("estimated 0.8")


def test_within_the_noise_it_is_bf16():
    policy = policy_of(rows((4096, 14336), {512: 0.8, 2048: 1.1}, noise=(1.0, 1.03, 0.97) * 4))
    close = choose_products(policy, replace(ASKED, num_tokens=1200))
    assert close.products == ()
    assert close.reason.startswith("estimated 1.0")
    assert "; within the noise: it may be 0.9" in close.reason
    assert choose_products(policy, replace(ASKED, num_tokens=1900))


def test_a_shape_that_the_recipe_cannot_cast_is_bf16():
    choice = choose_products(ONE, replace(ASKED, num_tokens=2048, shape=(8192, 14400)))
    assert (choice.products, choice.answer) == ((), "unmeasured")
    assert choice.reason == "in_features 14400 is not a multiple of 128, which blockwise needs"


def test_what_was_measured_is_not_estimated():
    assert choose_products(ONE, replace(ASKED, num_tokens=512)).answer == "lose"
    assert choose_products(ONE, replace(ASKED, num_tokens=2048)).answer == "win"
    far = choose_products(ONE, replace(ASKED, num_tokens=99999))
    assert "above the largest" in far.reason


@pytest.mark.parametrize("failed", [256, 1024, 4096])
def test_beside_a_count_that_failed_nothing_is_estimated(failed):
    row = Row(
        "llm", "row", (4096, 14336), failed, "module", "graph", "fp8", "error", name="fc2", tp=1, message="no kernel"
    )
    own = [*rows((4096, 14336), {512: 1.2, 2048: 1.4}), row, replace(row, precision="bf16")]
    policy = policy_of(own, rows((2048, 2048), {128: 1.5, 8192: 1.6}))  # nor is it by another shape
    beside = {256: (128, 256, 300), 1024: (800, 1024, 1500), 4096: (2100, 4096, 5000)}
    for tokens in beside[failed]:
        assert estimate_speedup(policy, replace(ASKED, num_tokens=tokens)) is None
        assert not choose_products(policy, replace(ASKED, num_tokens=tokens))


def test_the_better_recipe_by_estimate():
    reports = [
        report(rows((2048, 8192), {2048: 1.2})),
        report(rows((2048, 8192), {2048: 1.5}), recipe="tensorwise"),
    ]
    policy = merge_reports(reports, across_recipes=True).policy
    assert choose_products(policy, replace(ASKED, recipe=None, num_tokens=2048)).recipe == "tensorwise"
