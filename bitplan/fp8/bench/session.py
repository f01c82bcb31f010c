"""A run of the layer benchmark from a model's file to a report, and to a policy where one is asked for.

`plan_session` reads the model and lists what would be timed: no GPU is touched, so a dry run works anywhere.
`run_session` times it. In one process the shard of one GPU is timed alone, and the report's settings say so; under
torchrun (WORLD_SIZE above 1) the ranks form groups of tp, and of ep x etp, with their real communication in the times,
and the first rank writes. Calls are eager there: the host must know how many tokens go to which rank, which a CUDA
graph cannot ask.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bitplan.base.paired_timing import stopwatch_of
from bitplan.fp8.bench.bench_options import BenchOptions, BenchOptionsError
from bitplan.fp8.bench.layer_bench import BenchPlan, Way, count_failures, run_bench
from bitplan.fp8.bench.report_log import ReportLog, fingerprint_of
from bitplan.fp8.layer_settings import AmaxEps, Fp8Recipe, usable_device
from bitplan.fp8.loongforge.model_yaml import open_model
from bitplan.fp8.policy.layers import Layer, Parallel, bench_cases, layers_of_shapes, local_layers
from bitplan.fp8.policy.merge import Merged, merge_reports
from bitplan.fp8.policy.report import Report


@dataclass(frozen=True)
class Result:
    """A finished report, how many ways were timed in this run, and the policy it makes where it has both precisions."""

    report: Report
    timed: int
    failures: Mapping[str, int]
    merged: Merged | None


def plan_session(options: BenchOptions, environment: Mapping[str, str] = os.environ) -> BenchPlan:
    """Read the model, divide it, and list the cases; no GPU is needed."""
    name, make_layers, parallel = _layers(options)
    if options.fp8_policy_path and set(options.precisions) != {"bf16", "fp8"}:
        raise BenchOptionsError("a policy compares BF16 with FP8; leave precisions at bf16,fp8, or merge reports later")
    ranks = _ranks(environment, parallel)
    if ranks > 1:
        options = replace(options, timings=tuple(timing for timing in options.timings if timing == "eager"))
    if not options.timings:
        raise BenchOptionsError(
            "under torchrun layers are timed eager alone; use one process", settings={"timings": "eager"}
        )
    recipe = Fp8Recipe(options.fp8_recipe, options.fp8, AmaxEps.from_environment(environment))  # type: ignore[arg-type]
    cases = tuple(bench_cases(make_layers(), options.shape_sweep, recipe.name))
    return BenchPlan(cases, recipe, options, name, parallel, ranks)


def _layers(options: BenchOptions) -> tuple[str, Callable[[], list[Layer]], Parallel]:
    """The layers to time, of a model or of shapes, where they come from, and how they are divided."""
    if options.shapes is not None:
        if options.omni_config_path:
            raise BenchOptionsError(
                f"a model and shapes are given, and one is wanted: {options.omni_config_path} and {options.shapes}"
            )
        tp = options.tp_size or 1
        return "shapes", partial(layers_of_shapes, options.shapes, options.part or "llm", tp), Parallel(tp=tp)
    if not options.omni_config_path:
        raise BenchOptionsError(
            "no model: give MODEL (or TE_LAYER_PERF_OMNI_CONFIG_PATH), a config.json or a YAML, or shapes",
            settings={"shapes": "OUTxIN,..."},
        )
    model = open_model(options.omni_config_path)
    parts = [part for part in model.parts if options.part in (None, part.part)]
    if not parts:
        there = ", ".join(part.part for part in model.parts)
        raise BenchOptionsError(f"{options.omni_config_path}: has no part {options.part!r}; it has {there}")
    parallel = model.parallel(options.tp_size, options.ep_size, options.etp_size)
    return Path(options.omni_config_path).name, partial(local_layers, parts, parallel), parallel


def _ranks(environment: Mapping[str, str], parallel: Parallel) -> int:
    text = environment.get("WORLD_SIZE", "1") or "1"
    if not text.isdigit() or int(text) < 1:
        raise BenchOptionsError(f"WORLD_SIZE must be a whole number from 1, got {text!r}")
    ranks = int(text)
    for what, size in (("tp", parallel.tp), ("ep x etp", parallel.ep * parallel.etp)):
        if ranks > 1 and ranks % size:
            raise BenchOptionsError(
                f"{ranks} processes cannot be divided into groups of {what} = {size}; "
                f"start torchrun with a multiple of {size}, or one process for the shard of one GPU"
            )
    return ranks


def run_session(plan: BenchPlan, *, on_way: Callable[[Way], None] = lambda _: None) -> Result | None:
    """Time all that is not in the report yet. Under torchrun the result is the first rank's; the others get None."""
    from bitplan.fp8.bench.layer_bench import join_ranks
    from bitplan.fp8.bench.modules import ModuleBuilder

    recipes = (plan.recipe.name,) if "fp8" in plan.options.precisions else None
    device = usable_device(plan.options.device, "measure", recipes, int(os.environ.get("LOCAL_RANK", "0")))
    path = plan.options.report_file()
    with join_ranks(plan.ranks, plan.parallel, device) as ranks, ExitStack() as opened:
        builder = ModuleBuilder(plan.recipe, device, ranks.groups)
        log = None
        if ranks.first:
            described: dict[str, Any] = {"model": plan.model, "settings": plan.settings()}
            log = opened.enter_context(ReportLog(path, fingerprint_of(device), plan.recipe.name, **described))
        done = ranks.share(None if log is None else sorted(log.done, key=repr))
        timed = 0
        if not ranks.share(log is not None and log.finished):
            padded, peers = builder.padded_tokens, ranks.peers
            arms = (builder, stopwatch_of(device))
            timed = run_bench(plan, log, *arms, padded_tokens=padded, peers=peers, done=done, on_way=on_way)
    return _result(plan.options, path, timed) if ranks.first else None


def _result(options: BenchOptions, path: Path, timed: int) -> Result:
    report = Report.load(path)
    merged = None
    if set(options.precisions) == {"bf16", "fp8"}:
        merged = merge_reports([report], speedup_threshold=options.speedup_threshold)
    if merged is not None and options.fp8_policy_path:
        merged.policy.save(options.fp8_policy_path)
    return Result(report, timed, count_failures(report.rows), merged)
