"""Whole module, single products, recipes and bounds: literal speedups in, the choice out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bitplan.plan.fp8_choice import choose_products
from bitplan.plan.fp8_merge import merge_reports
from bitplan.plan.fp8_policy import Question, read_policy
from bitplan.plan.fp8_terms import PRODUCTS
from bitplan.records import parse_json
from tests.plan.fp8_samples import SEED_POLICY, experts, report, series

FC2 = Question("row", 4096, name="fc2", shape=(4096, 14336), recipe="blockwise")
STILL = (1.0,) * 10


def policy_of(module, fprop=None, dgrad=None, wgrad=None, tokens=4096):
    rows = [] if module is None else series({tokens: module}, noise=STILL)
    for gemm, speedup in zip(PRODUCTS, (fprop, dgrad, wgrad), strict=True):
        if speedup is not None:
            rows += series({tokens: speedup}, gemm=gemm, noise=STILL)
    return merge_reports([report(rows)]).policy


@pytest.mark.parametrize(
    ("speedups", "products"),
    [
        ((1.4,), PRODUCTS),
        ((0.9,), ()),
        ((1.4, 1.1, 1.1, 1.1), PRODUCTS),
        ((1.4, 0.9, 0.9, 0.9), PRODUCTS),  # a product that loses alone gains beside the others
        ((1.02, 1.1, 1.1, 0.7), ("fprop", "dgrad")),  # worth 1 / (1 - 2 x 0.0909) = 1.22
        ((0.95, 1.1, 1.1, 0.7), ("fprop", "dgrad")),
        ((0.95, 1.1, 1.1, 1.1), ()),  # each wins alone and together they lose: not believed
        ((0.95, 0.9, 0.9, 0.9), ()),
        ((None, 1.1, 0.9, 0.9), ("fprop",)),
        ((None, 1.1, 1.1, 1.1), PRODUCTS),  # the module was not timed: nothing speaks against it
    ],
)
def test_whole_or_some(speedups, products):
    choice = choose_products(policy_of(*speedups), FC2)
    assert choice.products == products
    assert bool(choice) == bool(products)
    assert choice.reason


def test_the_speedup_of_some_is_the_sum_of_their_savings():
    choice = choose_products(policy_of(0.95, 1.25, 2.0, 0.7), FC2)
    assert choice.products == ("fprop", "dgrad")
    assert choice.speedup == pytest.approx(1 / (1 - 0.2 - 0.5), rel=1e-6)
    assert choice.precision == "fp8 fprop, dgrad"


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


def test_bounds_of_a_band():
    policy = merge_reports([report(series({512: 0.8, 2048: 1.2, 4096: 1.3, 8192: 0.9, 16384: 1.4}))]).policy
    inside = choose_products(policy, replace(FC2, num_tokens=3000))
    assert (inside.holds_from, inside.holds_to) == (2048, 4096)
    last = choose_products(policy, replace(FC2, num_tokens=16384))
    assert (last.holds_from, last.holds_to) == (16384, 16384)
    beyond = choose_products(policy, replace(FC2, num_tokens=99999, extrapolate=True))
    assert (beyond.products, beyond.holds_from, beyond.holds_to) == (PRODUCTS, 16384, None)
    assert not choose_products(policy, replace(FC2, num_tokens=99999))


def test_version_1_and_experts():
    policy = read_policy(parse_json(SEED_POLICY.encode(), where="seed"))
    choice = choose_products(policy, replace(FC2, num_tokens=8192))
    assert (choice.products, choice.recipe, choice.holds_from, choice.holds_to) == (PRODUCTS, "blockwise", 8192, None)
    asked = Question("row", 53, is_expert=True, num_gemms=64, moe_router_topk=8)
    choice = choose_products(policy, asked)
    assert (choice.tokens, choice.holds_from) == (424, 424)
    grouped = merge_reports([report(series({424: 1.2, 848: 1.3}, **experts("row_grouped")))]).policy
    choice = choose_products(grouped, replace(asked, num_tokens=100))
    assert (choice.tokens, choice.holds_from, choice.holds_to) == (800, 424, 848)


def test_what_is_missing_means_bf16():
    policy = policy_of(1.4)
    for change in ({"num_tokens": None}, {"name": "fc9"}, {"tp": 2}, {"part": "vit"}, {"shape": (64, 64)}):
        choice = choose_products(policy, replace(FC2, **change))
        assert (choice.products, choice.answer) == ((), "unmeasured")
