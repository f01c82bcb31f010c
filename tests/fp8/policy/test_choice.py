"""Whole module, single products, recipes and bounds: literal speedups in, the choice out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bitplan.base.records import parse_json
from bitplan.fp8.policy.choice import APART_MARGIN, choose_products
from bitplan.fp8.policy.merge import merge_reports
from bitplan.fp8.policy.policy import Question, decide
from bitplan.fp8.policy.rules import read_policy
from bitplan.fp8.policy.vocabulary import PRODUCTS
from tests.fp8.policy.fp8_policies import POLICIES, TOKENS, random_policy
from tests.fp8.policy.fp8_samples import VERSION_1, experts, report, series

FC2 = Question("row", 4096, name="fc2", shape=(4096, 14336), recipe="blockwise")
STILL = (1.0,) * 10


def policy_of(module, fprop=None, dgrad=None, wgrad=None, tokens=4096, threshold=1.0):
    rows = [] if module is None else series({tokens: module}, noise=STILL)
    for gemm, speedup in zip(PRODUCTS, (fprop, dgrad, wgrad), strict=True):
        if speedup is not None:
            rows += series({tokens: speedup}, gemm=gemm, noise=STILL)
    return merge_reports([report(rows)], speedup_threshold=threshold).policy


@pytest.mark.parametrize(
    ("speedups", "products"),
    [
        ((1.4,), PRODUCTS),
        ((0.9,), ()),
        ((1.4, 1.1, 1.1, 1.1), PRODUCTS),
        ((1.05, 1.2, 1.2, 1.2), PRODUCTS),  # measured whole, it is not taken at the 2.0 that the three promise
        ((1.4, 0.9, 0.9, 0.9), PRODUCTS),  # a product that loses alone gains beside the others
        ((1.02, 1.1, 1.1, 0.7), ("fprop", "dgrad")),  # worth 1 / (1 - 2 x 0.0909) = 1.22
        ((0.95, 1.1, 1.1, 0.7), ("fprop", "dgrad")),
        ((0.95, 1.1, 1.1, 1.1), ()),  # each wins alone and together they lose: not believed
        ((0.95, 0.9, 0.9, 0.9), ()),
        ((None, 1.2, 0.9, 0.9), ("fprop",)),
        ((None, 1.1, 1.1, 1.1), PRODUCTS),  # the module was not timed: nothing speaks against it
    ],
)
def test_whole_or_some(speedups, products):
    choice = choose_products(policy_of(*speedups), FC2)
    assert choice.products == products
    assert bool(choice) == bool(products)
    assert choice.reason
    assert [choice.precision_of(gemm) for gemm in PRODUCTS] == [
        "fp8" if gemm in products else "bf16" for gemm in PRODUCTS
    ]


def test_the_speedup_of_some_is_the_sum_of_their_savings():
    choice = choose_products(policy_of(0.95, 1.25, 2.0, 0.7), FC2)
    assert choice.products == ("fprop", "dgrad")
    assert choice.speedup == pytest.approx(1 / (1 - 0.2 - 0.5), rel=1e-6)
    assert choice.precision == "fp8 fprop, dgrad"
    assert choice.to_dict()["precision"] == "fp8 fprop, dgrad"


# ---- products apart need a margin ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "wgrad", "products"),
    [
        (0.99, 1.068, ()),  # fc1 and fc2 of an H200 at 512 tokens, which did not hold in the layer
        (0.94, 1.029, ()),
        (0.9, APART_MARGIN - 0.001, ()),
        (0.9, APART_MARGIN + 0.001, ("wgrad",)),
        (1.2, 1.2 * APART_MARGIN - 0.001, PRODUCTS),  # the whole module by the same margin
        (1.2, 1.2 * APART_MARGIN + 0.001, ("wgrad",)),
    ],
)
def test_some_products_need_a_margin(module, wgrad, products):
    choice = choose_products(policy_of(module, 0.8, 0.8, wgrad), FC2)
    assert choice.products == products
    if not products:
        message = (
            f"products apart (wgrad) promise {wgrad:.3f}x, less than the {APART_MARGIN:.3f}x that casts and launches"
        )
        assert choice.reason.startswith(message)
        assert f"the whole module: measured: lose at 4096 tokens ({module:.3f}x" in choice.reason
        assert choice.answer == "lose"


def test_the_margin_is_over_the_threshold_and_never_below_bf16():
    for threshold, wgrad, products in (
        (1.2, 1.25, ()),
        (1.2, 1.33, ("wgrad",)),
        (0.5, 1.05, ()),
        (0.5, 1.2, ("wgrad",)),
    ):
        choice = choose_products(policy_of(0.45, 0.4, 0.4, wgrad, threshold=threshold), FC2)
        assert choice.products == products
    slower = choose_products(policy_of(0.6, 0.4, 0.4, 0.4, threshold=0.5), FC2)
    assert (slower.products, slower.speedup) == (PRODUCTS, pytest.approx(0.6))


def test_layers_that_cannot_run_products_apart():
    policy = policy_of(1.02, 1.2, 1.2, 0.7)
    assert choose_products(policy, FC2).products == ("fprop", "dgrad")
    assert choose_products(policy, FC2, apart=False).products == PRODUCTS
    policy = policy_of(0.9, 1.2, 1.2, 0.7)
    assert choose_products(policy, FC2).products == ("fprop", "dgrad")
    whole = choose_products(policy, FC2, apart=False)
    assert (whole.products, whole.reason) == ((), decide(policy, FC2).reason)
    assert choose_products(policy_of(None, 1.1, 1.1, 1.1), FC2, apart=False).products == PRODUCTS


# ---- recipes, shapes, versions ---------------------------------------------------------------------------------------


def test_the_better_recipe_is_taken_and_a_named_one_is_kept_to():
    reports = [report(series({4096: 1.2})), report(series({4096: 1.5}), recipe="tensorwise")]
    policy = merge_reports(reports, across_recipes=True).policy
    assert choose_products(policy, replace(FC2, recipe=None)).recipe == "tensorwise"
    assert choose_products(policy, FC2).recipe == "blockwise"
    lost = [report(series({4096: 0.5})), report(series({4096: 0.6}), recipe="tensorwise")]
    choice = choose_products(merge_reports(lost, across_recipes=True).policy, replace(FC2, recipe=None))
    assert (choice.products, choice.answer) == ((), "lose")
    assert "tensorwise: " in choice.reason
    assert "blockwise: " in choice.reason


def test_without_a_shape_all_that_were_measured_must_agree():
    def policy(first, second, **more):
        dense = {"part": "llm", "kind": "row", "name": "fc2", "tp": 1}
        rows = series(first, shape=(4096, 14336), **dense) + series(second, shape=(4096, 2048), **dense)
        return merge_reports([report([*rows, *series(**more, **dense)] if more else rows)]).policy

    asked = replace(FC2, shape=None)
    both = choose_products(policy({4096: 1.3, 8192: 1.4}, {4096: 1.2}), replace(asked, estimate=False))
    assert (both.products, both.speedup, both.holds_from, both.holds_to) == (PRODUCTS, pytest.approx(1.2), 4096, 4096)
    assert "2 were measured; all are for FP8" in both.reason
    one = choose_products(policy({4096: 1.3}, {4096: 0.9}), asked)
    assert (one.products, one.answer) == ((), "lose")
    assert "one of them is against FP8" in one.reason
    apart = {"speedups": {4096: 1.3}, "gemm": "wgrad", "shape": (4096, 2048)}
    mixed = choose_products(policy({4096: 1.3}, {4096: 0.9}, **apart), asked)
    assert (mixed.products, mixed.answer) == ((), "undecided")
    assert "which differ in the products that win; give the shape" in mixed.reason
    alone = merge_reports([report(series({512: 0.8, 4096: 1.5}))]).policy
    assert choose_products(alone, replace(asked, num_tokens=3000)) == choose_products(
        alone, replace(FC2, num_tokens=3000)
    )


def test_version_1_and_experts():
    policy = read_policy(parse_json(VERSION_1.encode(), where="version 1"))
    choice = choose_products(policy, replace(FC2, num_tokens=8192))
    assert (choice.products, choice.recipe, choice.holds_from, choice.holds_to) == (PRODUCTS, "blockwise", 8192, None)
    assert choose_products(policy, replace(FC2, num_tokens=8192, recipe=None)) == choice  # version 1's recipe
    assert not choose_products(policy, replace(FC2, num_tokens=8191))  # version 1 is not estimated
    asked = Question("row", 53, is_expert=True, num_gemms=64, moe_router_topk=8)
    choice = choose_products(policy, asked)
    assert (choice.tokens, choice.holds_from) == (424, 424)
    grouped = merge_reports([report(series({424: 1.2, 848: 1.3}, **experts("row_grouped")))]).policy
    choice = choose_products(grouped, replace(asked, num_tokens=100, estimate=False))
    assert (choice.tokens, choice.holds_from, choice.holds_to) == (800, 424, 848)


def test_what_is_missing_means_bf16():
    policy = policy_of(1.4)
    for change in ({"num_tokens": None}, {"tp": 2}, {"part": "vit"}, {"kind": "column"}, {"shape": (64, 64)}):
        choice = choose_products(policy, replace(FC2, **change))
        assert (choice.products, choice.answer) == ((), "unmeasured")
    other = choose_products(policy, replace(FC2, name="fc9"))  # the same shape under another name
    assert other.reason.startswith("estimated 1.400x: never measured itself")
    assert not choose_products(policy, replace(FC2, name="fc9", estimate=False))


# ---- how far a choice holds ------------------------------------------------------------------------------------------


def test_bounds_of_a_band():
    policy = merge_reports([report(series({512: 0.8, 2048: 1.2, 4096: 1.3, 8192: 0.9, 16384: 1.4}))]).policy

    def bounds(tokens, **more):
        result = choose_products(policy, replace(FC2, num_tokens=tokens, **more, estimate=False))
        return result.products == PRODUCTS and (result.holds_from, result.holds_to)

    assert bounds(3000) == (2048, 4096)
    assert bounds(3000, extrapolate=True) == (2048, 4096)  # what lies above the loss is another band
    assert bounds(16384) == (16384, 16384)
    assert bounds(99999, extrapolate=True) == (16384, None)
    assert not bounds(99999)
    assert bounds(2048) == (2048, 4096)


def test_bounds_of_an_estimate_are_where_it_crosses_the_threshold():
    rows = series({512: 0.8, 2048: 1.2, 4096: 1.3, 8192: 0.9, 32768: 1.4}, noise=STILL)
    policy = merge_reports([report(rows)]).policy
    result = choose_products(policy, replace(FC2, num_tokens=3000))
    assert 900 < result.holds_from < 1100
    assert 5500 < result.holds_to < 7500
    for tokens, products in (
        (result.holds_from - 1, ()),
        (result.holds_from, PRODUCTS),
        (result.holds_to, PRODUCTS),
        (result.holds_to + 1, ()),
    ):
        assert choose_products(policy, replace(FC2, num_tokens=tokens)).products == products
    last = choose_products(policy, replace(FC2, num_tokens=40000))
    assert last.holds_to == 65536  # twice the largest


def test_bounds_of_some_products():
    """wgrad wins alone from 512 to 8192, but only up to 2048 by the margin; from 4096 on the whole module wins."""
    rows = series({512: 0.7, 1024: 0.8, 2048: 0.9, 4096: 1.3, 8192: 1.4}, noise=STILL)
    rows += series({512: 1.2, 1024: 1.15, 2048: 1.12, 4096: 1.05, 8192: 1.1}, gemm="wgrad", noise=STILL)
    policy = merge_reports([report(rows)]).policy
    result = choose_products(policy, replace(FC2, num_tokens=1024, estimate=False))
    assert (result.products, result.holds_from, result.holds_to) == (("wgrad",), 512, 2048)
    result = choose_products(policy, replace(FC2, num_tokens=4096, estimate=False))
    assert (result.products, result.holds_from, result.holds_to) == (PRODUCTS, 4096, 8192)


# The same examples every time: a choice that holds for less than 9% of a count may not be seen, and a random policy may
# have one.
@settings(max_examples=20, deadline=None, derandomize=True)
@given(POLICIES, TOKENS, st.booleans(), st.booleans(), st.sampled_from([None, "tensorwise"]))
@example(random_policy(22), 22, True, True, None)  # another choice at 19 and 20 alone
def test_inside_the_bounds_the_choice_is_the_same_and_beyond_it_is_another(policy, tokens, estimate, apart, recipe):
    asked = Question("row", tokens, name="fc2", shape=(128, 256), recipe=recipe, estimate=estimate)
    choice = choose_products(policy, asked, apart=apart)
    if not choice:
        assert (choice.holds_from, choice.holds_to, choice.speedup) == (None, None, None)
        return
    assert choice.holds_from <= tokens <= (choice.holds_to or tokens)

    def products(count):
        again = replace(asked, num_tokens=count, recipe=choice.recipe)
        return choose_products(policy, again, apart=apart).products

    inside = {choice.holds_from, (choice.holds_from + tokens) // 2, choice.holds_to or 10**6}
    assert {products(count) for count in inside} == {choice.products}
    beyond = {choice.holds_from - 1, (choice.holds_to or 0) + 1} - {0, 1 if choice.holds_to is None else 0}
    assert choice.products not in {products(count) for count in beyond}


def test_the_reason_counts_the_recipes_that_were_compared():
    question = replace(FC2, recipe=None)
    reports = [report(series({4096: 1.4}, noise=STILL))]
    assert "recipes" not in choose_products(merge_reports(reports).policy, question).reason
    reports.append(report(series({4096: 1.5}, noise=STILL), recipe="tensorwise"))
    policy = merge_reports(reports, across_recipes=True).policy
    assert choose_products(policy, question).reason.endswith("; the best of 2 recipes")
