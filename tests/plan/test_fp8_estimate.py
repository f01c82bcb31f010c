"""Estimates between measured counts and shapes; none where there is nothing to go by."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bitplan.plan.fp8_choice import choose_products
from bitplan.plan.fp8_estimate import estimate_speedup
from bitplan.plan.fp8_merge import merge_reports
from bitplan.plan.fp8_policy import Question
from bitplan.plan.fp8_report import Row
from tests.plan.fp8_samples import experts, report, series

STILL = (1.0,) * 10
ASKED = Question("row", 1024, name="fc2", shape=(4096, 14336), recipe="blockwise")


def rows(shape, speedups, name="fc2"):
    return series(speedups, part="llm", kind="row", name=name, shape=shape, tp=1, noise=STILL)


def policy_of(*groups):
    return merge_reports([report([row for group in groups for row in group])]).policy


ONE = policy_of(rows((4096, 14336), {512: 0.8, 2048: 1.4}))
TWO = policy_of(rows((2048, 8192), {512: 0.6, 2048: 1.2, 8192: 1.3}), rows((8192, 8192), {512: 0.9, 2048: 1.4}))


@pytest.mark.parametrize(("tokens", "speedup"), [(512, 0.8), (1024, 1.1), (2048, 1.4), (511, None), (2049, None)])
def test_between_counts(tokens, speedup):
    found = estimate_speedup(ONE, replace(ASKED, num_tokens=tokens))
    assert (None if found is None else found.speedup) == (None if speedup is None else pytest.approx(speedup))


@pytest.mark.parametrize(
    ("shape", "tokens", "speedup"),
    [
        ((4096, 8192), 2048, 1.2),  # the smaller one wins: at least as much
        ((16384, 16384), 2048, 1.4),  # the largest of the smaller ones
        ((4096, 8192), 512, 0.75),  # the smaller one loses: half way to the larger one
        ((2048, 8192), 1024, 0.9),
        ((1024, 8192), 2048, None),  # nothing is smaller
        ((4096, 4096), 2048, None),
        ((4096, 8192), 4096, 1.25),
        ((4096, 8192), 16384, None),
    ],
)
def test_between_shapes(shape, tokens, speedup):
    found = estimate_speedup(TWO, replace(ASKED, shape=shape, num_tokens=tokens))
    assert (None if found is None else found.speedup) == (None if speedup is None else pytest.approx(speedup))


def test_the_name_does_not_matter_for_another_shape():
    policy = policy_of(rows((2048, 2048), {512: 1.3}, name="proj"))
    assert estimate_speedup(policy, replace(ASKED, num_tokens=512)).speedup == pytest.approx(1.3)
    assert estimate_speedup(policy, replace(ASKED, num_tokens=512, kind="column")) is None
    assert estimate_speedup(policy, replace(ASKED, num_tokens=512, tp=2)) is None
    assert estimate_speedup(policy, replace(ASKED, num_tokens=512, part="vit")) is None
    assert estimate_speedup(policy, replace(ASKED, num_tokens=512, recipe="rowwise")) is None


def test_experts_by_their_count():
    policy = policy_of(series({512: 1.2}, noise=STILL, **experts("row_grouped")))
    asked = Question("row_grouped", 64, num_gemms=64, moe_router_topk=8, shape=(8192, 2048), recipe="blockwise")
    assert estimate_speedup(policy, asked).speedup == pytest.approx(1.2)
    assert estimate_speedup(policy, replace(asked, num_gemms=32)) is None


def test_a_choice_by_estimate_says_so_and_only_when_asked():
    asked = replace(ASKED, num_tokens=1024)
    assert not choose_products(ONE, asked)
    choice = choose_products(ONE, asked, estimate=True)
    assert choice.products == ("fprop", "dgrad", "wgrad")
    assert choice.answer == "unmeasured"
    assert choice.reason.startswith("estimated 1.100x: 4096x14336 about 1.100x by lose at 512 tokens")
    assert (choice.holds_from, choice.holds_to) == (1024, 2048)
    below = choose_products(ONE, replace(ASKED, num_tokens=600), estimate=True)
    assert (below.products, below.answer) == ((), "unmeasured")
    assert below.reason.startswith("estimated 0.8")


def test_what_was_measured_is_not_estimated():
    assert choose_products(ONE, replace(ASKED, num_tokens=512), estimate=True).answer == "lose"
    assert choose_products(ONE, replace(ASKED, num_tokens=2048), estimate=True).answer == "win"
    far = choose_products(ONE, replace(ASKED, num_tokens=99999), estimate=True)
    assert "above the largest" in far.reason


def test_beside_a_count_that_failed_nothing_is_estimated():
    failed = Row(
        "llm", "row", (4096, 14336), 1024, "module", "graph", "fp8", "error", name="fc2", tp=1, message="no kernel"
    )
    group = [*rows((4096, 14336), {512: 0.8, 2048: 1.4}), failed, replace(failed, precision="bf16")]
    policy = policy_of(group)
    for tokens in (800, 1024, 1500):
        assert estimate_speedup(policy, replace(ASKED, num_tokens=tokens)) is None
        assert not choose_products(policy, replace(ASKED, num_tokens=tokens), estimate=True)


def test_the_better_recipe_by_estimate():
    reports = [
        report(rows((2048, 8192), {2048: 1.2})),
        report(rows((2048, 8192), {2048: 1.5}), recipe="tensorwise"),
    ]
    policy = merge_reports(reports, across_recipes=True).policy
    asked = replace(ASKED, recipe=None, num_tokens=2048)
    assert choose_products(policy, asked, estimate=True).recipe == "tensorwise"
