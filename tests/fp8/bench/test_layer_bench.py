"""The run of a benchmark: ways, arms, rows, resuming, failures; with layers that take the time they are told."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bitplan.base.paired_timing import CpuStopwatch
from bitplan.fp8.bench.layer_bench import BenchOptions, BenchPlan, count_failures, run_bench
from bitplan.fp8.layer_settings import Fp8Recipe
from bitplan.fp8.policy.choice import choose_products
from bitplan.fp8.policy.layers import Case, Layer, Parallel
from bitplan.fp8.policy.merge import merge_reports
from bitplan.fp8.policy.policy import Question
from bitplan.fp8.policy.report import Report, ReportLog
from tests.fp8.policy.fp8_samples import H200

FC2 = Layer("llm", "row", "fc2", "mlp", (128, 256), 2, Parallel())
EXPERTS = Layer("llm", "row_grouped", "fc2", "expert", (128, 64), 2, Parallel(ep=2), 4, 2)
RECIPE = Fp8Recipe("blockwise")


def plan_of(*cases, **more):
    return BenchPlan(tuple(cases), RECIPE, BenchOptions(**({"iters": 8, "warmup": 1, "timings": ("graph",)} | more)))


class Clock:
    """Time that only the fake layers move."""

    def __init__(self):
        self.now, self.built, self.fail = 0.0, [], {}
        self.stopwatch = CpuStopwatch(lambda: self.now)

    def builder(self, ms):
        """`ms(way, in FP8)` is how long a step takes."""

        def build(way, gemms):
            products = tuple(each for each in ("fprop", "dgrad", "wgrad") if getattr(gemms, each) != "bf16")

            def arm():
                self.built.append((way.label, products))
                if products in self.fail:
                    raise self.fail[products]

                def step():
                    self.now += ms(way, products) / 1e3

                return step

            return arm

        return build


def open_log(path, plan):
    return ReportLog(path, H200, "blockwise", model="m", settings=plan.settings())


def saves_a_tenth(_way, products):
    return 10.0 - len(products)


def run(path, plan, clock, ms=saves_a_tenth, **more):
    with open_log(path, plan) as log:
        return run_bench(plan, log, clock.builder(ms), clock.stopwatch, **more)


def test_rows_of_a_dense_layer_and_the_policy_they_make(tmp_path):
    plan, clock = plan_of(Case(FC2, 512), Case(FC2, 1024)), Clock()
    assert run(tmp_path / "r.jsonl", plan, clock) == 2
    report = Report.load(tmp_path / "r.jsonl")
    assert [(row.tokens, row.gemm, row.precision) for row in report.rows[:8]] == [
        (512, gemm, precision) for gemm in ("module", "fprop", "dgrad", "wgrad") for precision in ("bf16", "fp8")
    ]
    assert all(row.in_turns and len(row.samples_ms) == 8 for row in report.rows)
    assert {row.samples_ms[0] for row in report.rows if row.precision == "bf16"} == {10.0}
    assert {row.samples_ms[0] for row in report.rows if row.precision == "fp8"} == {7.0, 9.0}
    merged = merge_reports([report])
    assert not merged.findings
    question = Question("row", 700, name="fc2", shape=(128, 256), recipe="blockwise")
    assert choose_products(merged.policy, question).products == ("fprop", "dgrad", "wgrad")
    assert report.settings["weight_casts"] == "every step"


def test_experts_are_routed_twice_and_say_how_they_were_padded(tmp_path):
    plan, clock = plan_of(Case(EXPERTS, 512), timings=("eager", "graph")), Clock()
    assert run(tmp_path / "r.jsonl", plan, clock, padded_tokens=lambda _: 1024) == 4
    rows = Report.load(tmp_path / "r.jsonl").rows
    assert {(row.routing, row.timing) for row in rows} == {
        (routing, timing) for routing in ("uniform", "zipf") for timing in ("eager", "graph")
    }
    assert {(row.precision, row.padded_tokens) for row in rows} == {("bf16", None), ("fp8", 1024)}
    assert {(row.ep, row.topk, row.num_gemms) for row in rows} == {(2, 2, 4)}


def test_a_layer_that_is_there_twice_is_timed_once(tmp_path):
    clock = Clock()
    assert run(tmp_path / "r.jsonl", plan_of(Case(FC2, 512), Case(FC2, 512)), clock) == 1


def test_a_killed_run_goes_on_and_mixed_rows_are_not_in_turns(tmp_path):
    plan = plan_of(Case(FC2, 512), Case(FC2, 1024))
    run(tmp_path / "whole.jsonl", plan, Clock())
    lines = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    for stored in range(1, len(lines)):
        path = tmp_path / f"{stored}.jsonl"
        path.write_bytes(b"".join(lines[:stored]) + lines[stored][: stored % 7])  # and now and then a torn line
        clock = Clock()
        timed = run(path, plan, clock)
        rows = Report.load(path).rows
        whole = Report.load(tmp_path / "whole.jsonl").rows
        assert [row.key for row in rows] == [row.key for row in whole]
        assert timed == len({label for label, _ in clock.built})
        mixed = (stored - 1) % 8 != 0 and stored - 1 < 16
        assert [row.in_turns for row in rows].count(False) == (8 - (stored - 1) % 8 if mixed else 0)
        assert rows[: stored - 1] == whole[: stored - 1]


def test_a_finished_report_is_not_measured_again(tmp_path):
    plan = plan_of(Case(FC2, 512))
    run(tmp_path / "r.jsonl", plan, Clock())
    clock = Clock()
    assert run(tmp_path / "r.jsonl", plan, clock) == 0
    assert clock.built == []


def test_memory_and_other_failures_are_rows_and_the_rest_goes_on(tmp_path):
    plan, clock = plan_of(Case(FC2, 512)), Clock()
    everything = ("fprop", "dgrad", "wgrad")
    clock.fail = {everything: torch.OutOfMemoryError("CUDA out of memory"), ("wgrad",): RuntimeError("no kernel")}
    run(tmp_path / "r.jsonl", plan, clock)
    report = Report.load(tmp_path / "r.jsonl")
    status = {(row.gemm, row.precision): row.status for row in report.rows}
    assert status["module", "fp8"] == "oom"
    assert status["wgrad", "fp8"] == "error"
    assert status["fprop", "fp8"] == "ok"
    assert status["module", "bf16"] == "ok"
    assert count_failures(report.rows) == {"oom": 1, "error": 1}
    merged = merge_reports([report])
    assert any("no kernel" in finding for finding in merged.findings)
    choice = choose_products(merged.policy, Question("row", 512, name="fc2", shape=(128, 256), recipe="blockwise"))
    assert choice.products == ("fprop", "dgrad")


def test_a_shape_that_the_recipe_cannot_cast_is_written_and_not_timed(tmp_path):
    odd = Layer("llm", "row", "fc2", "mlp", (100, 256), 2, Parallel())
    plan, clock = plan_of(Case(odd, 512, "out_features 100 is not a multiple of 128, which blockwise needs")), Clock()
    run(tmp_path / "r.jsonl", plan, clock)
    assert clock.built == []
    rows = Report.load(tmp_path / "r.jsonl").rows
    assert {(row.status, row.message[:16]) for row in rows} == {("error", "out_features 100")}


@pytest.mark.parametrize(
    ("change", "arms"),
    [
        ({}, ["bf16", "fp8", "fprop", "dgrad", "wgrad"]),
        ({"products_apart": False}, ["bf16", "fp8"]),
        ({"precisions": ("bf16",)}, ["bf16"]),
        ({"precisions": ("fp8",), "products_apart": False}, ["fp8"]),
    ],
)
def test_arms(change, arms, tmp_path):
    plan = plan_of(Case(FC2, 512), **change)
    assert list(plan.choices()) == arms
    run(tmp_path / "r.jsonl", plan, Clock())
    rows = Report.load(tmp_path / "r.jsonl").rows
    assert {row.precision for row in rows} == set(plan.options.precisions)


def test_the_estimate_grows_with_the_work():
    small = plan_of(Case(FC2, 512)).estimated_minutes()
    assert 0 < small < plan_of(Case(FC2, 512), Case(FC2, 1024)).estimated_minutes()
    assert plan_of(Case(FC2, 512), iters=100).estimated_minutes() > small
    assert plan_of(Case(FC2, 512, "cannot")).estimated_minutes() == 0
    assert plan_of(Case(replace(FC2, shape=FC2.shape[::-1]), 512)).estimated_minutes() == small
