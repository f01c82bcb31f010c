"""Where a policy was not measured: blocks of a made-up GPU against the better of BF16 and full FP8, at least 0.99x.

A policy is measured, with noise, at two sizes of a llama and six counts, and asked about counts between them and about
other sizes. What counts is the block, as in a training step; single layers may miss by more where FP8 gains little.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bitplan.fp8.policy import choice as fp8_choice
from bitplan.fp8.policy.choice import choose_products
from bitplan.fp8.policy.merge import merge_reports
from bitplan.fp8.policy.policy import Question
from bitplan.fp8.policy.report import Report
from bitplan.fp8.policy.rules import Policy
from bitplan.fp8.policy.vocabulary import PRODUCTS
from tests.fp8.policy.fp8_costs import GPUS, MEASURED, OTHERS, Gpu, measure

H200_REPORT = Path(__file__).parents[3] / "benchmarks/policies/nvidia_h200_fp8_report.jsonl"
COUNTS = (512, 1024, 2048, 4096, 8192, 16384)
SPARSE = (512, 2048, 8192, 16384)
BETWEEN = (600, 768, 1280, 1800, 3072, 5000, 12288)
OUTSIDE = (256, 400, 500, 17000, 24000, 32768)
ASKED = (512, 640, 768, 1024, 1536, 3072, 8192, 16384)
TIMINGS = [("graph",), ("graph", "eager")]


@pytest.fixture(autouse=True)
def no_bounds(monkeypatch):
    """Finding how far a choice holds asks thirty times what the choice itself does, and nothing here looks at it."""
    monkeypatch.setattr(fp8_choice, "_bounded", lambda _policy, _question, choice, *_how: choice)


def share_of_the_better(gpu, policy, model, tokens, timing, **how):
    """The time of the better of a BF16 and a full FP8 block over that of the block by the policy."""
    plain = full = ours = 0.0
    for kind, name, shape in model.layers:
        question = Question(kind, tokens, name=name, shape=shape, recipe="tensorwise", **how)
        chosen = choose_products(policy, question).products
        plain, full, ours = (
            total + gpu.layer_us(kind, shape, tokens, products, timing)
            for total, products in ((plain, ()), (full, PRODUCTS), (ours, chosen))
        )
    return min(plain, full) / ours


def worst(gpu, policy, asked, timing, **how):
    """The least share, and at which hidden size and count."""
    return min((share_of_the_better(gpu, policy, *each, timing, **how), each[0].hidden, each[1]) for each in asked)


def cases(models, counts):
    return [(model, tokens) for model in models for tokens in counts]


@pytest.mark.cross("timings", TIMINGS, ids="+".join)
@pytest.mark.cross("gpu", GPUS.values(), ids=GPUS)
def test_counts_that_were_not_measured(gpu, timings):
    for counts in (COUNTS, SPARSE):
        policy = measure(gpu, MEASURED, counts, timings=timings)
        share, *where = worst(gpu, policy, cases(MEASURED, BETWEEN), timings[-1])
        assert share >= 0.99, where


@pytest.mark.cross("timings", TIMINGS, ids="+".join)
@pytest.mark.cross("gpu", GPUS.values(), ids=GPUS)
def test_counts_outside_those_that_were_measured(gpu, timings):
    policy = measure(gpu, MEASURED, COUNTS, timings=timings)
    share, *where = worst(gpu, policy, cases(MEASURED, OUTSIDE), timings[-1])
    assert share >= 0.99, where


@pytest.mark.cross("timings", TIMINGS, ids="+".join)
@pytest.mark.cross("gpu", GPUS.values(), ids=GPUS)
def test_shapes_that_were_not_measured(gpu, timings):
    """Sizes between those measured and up to half as large again; then those that are still smaller or larger."""
    policy = measure(gpu, MEASURED, COUNTS, timings=timings)
    near = [model for model in OTHERS if 2048 <= model.hidden <= 1.5 * 4096]
    share, *where = worst(gpu, policy, cases(near, ASKED), timings[-1])
    assert share >= 0.99, where
    far = [model for model in OTHERS if model not in near]
    share, *where = worst(gpu, policy, cases(far, ASKED), timings[-1])
    assert share >= 0.98, where


def test_shapes_beside_one_that_was_measured():
    """From one size alone the others are still held, though not all to 0.99."""
    gpu = Gpu()
    policy = measure(gpu, MEASURED[:1], COUNTS)
    share, *where = worst(gpu, policy, cases(OTHERS[2:7], ASKED), "eager")
    assert share >= 0.97, where


def test_without_estimates_the_demand_is_missed():
    """What the estimates are for: BF16 wherever nothing was measured loses to full FP8."""
    gpu = Gpu()
    policy = measure(gpu, MEASURED, COUNTS)
    assert worst(gpu, policy, cases(OTHERS, (16384,)), "eager", estimate=False)[0] < 0.7


def test_products_apart_keep_to_it():
    """With products timed apart a policy may mix; the block is still held to the better of the two."""
    gpu = Gpu()
    policy = measure(gpu, MEASURED, COUNTS, products=True)
    share, *where = worst(gpu, policy, cases(MEASURED, (*COUNTS, *BETWEEN)), "eager")
    assert share >= 0.99, where


@pytest.mark.parametrize(("timing", "misses"), [("graph", 0), ("eager", 2)])
def test_counts_left_out_of_what_an_h200_measured(timing, misses):
    """Its own report, with one count at a time unknown: what is chosen against what was measured there."""
    whole = merge_reports([Report.load(H200_REPORT)], timing=timing).policy
    rules = [rule for rule in whole.rules if rule.gemm == "module"]
    wrong = []
    for unknown in (1024, 2048, 4096, 8192):
        known = [replace(rule, points=tuple(p for p in rule.points if p.tokens != unknown)) for rule in rules]
        policy = Policy(known, whole.fingerprint, whole.speedup_threshold, whole.confidence)
        for rule in rules:
            (truth,) = (point for point in rule.points if point.tokens == unknown)
            asked = Question(rule.kind, unknown, name=rule.name, shape=rule.shape, recipe=rule.recipe)
            choice = choose_products(policy, asked)
            if bool(choice) != (truth.speedup >= 1):
                wrong.append(choice)
    assert len(rules) == 8
    assert len(wrong) == misses
    assert all(not choice and "within the noise" in choice.reason for choice in wrong)
