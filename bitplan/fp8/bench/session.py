"""A run of the layer benchmark from a model's file to a report, and to a policy where one is asked for.

`plan_session` reads the model and lists what would be timed: no GPU is touched, so a dry run works anywhere.
`run_session` times it. In one process the shard of one GPU is timed alone, and the report's settings say so; under
torchrun (WORLD_SIZE above 1) the ranks form groups of tp, and of ep x etp, with their real communication in the times,
and the first rank writes. Calls are eager there: the host must know how many tokens go to which rank, which a CUDA
graph cannot ask.

For each kind of layer its BF16 and its FP8 module are timed at the local shape:

    layernorm_column    BF16: nn.RMSNorm, then nn.Linear                FP8: Fp8NormLinear
    column, row,
    duplicated          BF16: nn.Linear                                 FP8: Fp8Linear
    column_grouped,
    row_grouped         BF16 and FP8: GroupedLinear, tokens by the way's routing

A step is a forward and a backward with a random gradient, for the input and every parameter; weights are cast exactly
once in each step. In one process layers are the shard of one GPU. With groups (torchrun), layers that are divided over
several GPUs are ColumnParallel, RowParallel and (experts) ExpertParallel, in both precisions, so both times include the
communication. Each rank then routes its own tokens over all experts:

    uniform    as many tokens for every expert, except the remainder: the aim of balancing losses in training
    zipf       the r-th busiest expert gets a share in proportion to 1 / r: a few experts do most of the work and many
               get less than a kernel's block. It is the normal case, and where padding costs most

Both assign every token and draw no random number, so that a report can be repeated. The busiest experts are not
neighbours: the order of experts in a checkpoint says nothing about how busy they are.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.base.paired_timing import Arm, Call, stopwatch_of
from bitplan.fp8.bench.layer_bench import (
    BenchOptions,
    BenchOptionsError,
    BenchPlan,
    ParallelGroups,
    Way,
    count_failures,
    join_ranks,
    run_bench,
)
from bitplan.fp8.casts import padded_tokens
from bitplan.fp8.kernels.experts_products import pick_impl, token_pad
from bitplan.fp8.layer_settings import AmaxEps, Fp8Recipe, GemmChoice, usable_device
from bitplan.fp8.layers.grouped_linear import GroupedLinear, cast_dropper
from bitplan.fp8.layers.linear import Fp8Linear, Fp8NormLinear, cast_weights_together
from bitplan.fp8.layers.parallel import ColumnParallel, ExpertParallel, RowParallel
from bitplan.fp8.loongforge import open_model
from bitplan.fp8.policy.layers import Layer, Parallel, bench_cases, layers_of_shapes, local_layers
from bitplan.fp8.policy.merge import Merged, merge_reports
from bitplan.fp8.policy.report import ROUTINGS, Report, ReportLog, fingerprint_of
from bitplan.fp8.policy.vocabulary import GROUPED_KINDS, Fp8Error, is_count
from bitplan.fp8.recipes import expert_recipes


@dataclass(frozen=True)
class ModuleBuilder:
    """Makes the arms of a way on one device: bfloat16 on a GPU, float32 where FP8 is emulated."""

    recipe: Fp8Recipe
    device: torch.device
    groups: ParallelGroups

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def __call__(self, way: Way, gemms: GemmChoice) -> Arm:
        return lambda: self._step(way, gemms)

    def padded_tokens(self, way: Way) -> int | None:
        """The rows that FP8 kernels really multiply; None where other ranks send some of them."""
        layer = way.case.layer
        recipe = self.recipe.name
        if layer.kind not in GROUPED_KINDS:
            return padded_tokens(recipe, way.case.tokens)
        if recipe not in expert_recipes() or self.groups.ep is not None:
            return None
        pad = token_pad(recipe, pick_impl(recipe, self.device, self.recipe.grad_fp8, "auto", width=layer.shape[1]))
        counts = route_tokens(way.case.tokens, layer.num_gemms or 1, way.routing or "uniform")
        return sum(-(-count // pad) * pad for count in counts)

    def _step(self, way: Way, gemms: GemmChoice) -> Call:
        layer, tokens = way.case.layer, way.case.tokens
        x = torch.randn((tokens, layer.shape[1]), device=self.device).to(self.dtype)
        if layer.kind in GROUPED_KINDS:
            experts = (layer.num_gemms or 1) * (1 if self.groups.ep is None else layer.parallel.ep)
            counts = torch.tensor(route_tokens(tokens, experts, way.routing or "uniform"))
            return step_of(self._grouped(layer, gemms), x, counts.to(self.device))
        return step_of(self._dense(layer, gemms), x)

    def _dense(self, layer: Layer, gemms: GemmChoice) -> nn.Module:
        out, width = layer.shape
        where: dict[str, Any] = {"device": self.device, "dtype": self.dtype}
        with_norm = layer.kind == "layernorm_column"
        if not gemms.is_bf16:
            kind = Fp8NormLinear if with_norm else Fp8Linear
            local = kind(width, out, bias=False, recipe=self.recipe, gemms=gemms, **where)
            cast_weights_together(local)  # as `apply_fp8` does
            return self._divided(layer, local)
        linear = self._divided(layer, nn.Linear(width, out, bias=False, **where))
        return nn.Sequential(nn.RMSNorm(width, eps=1e-6, **where), linear) if with_norm else linear

    def _divided(self, layer: Layer, local: nn.Module) -> nn.Module:
        if self.groups.tp is None or layer.kind == "duplicated":
            return local
        return RowParallel(local, self.groups.tp) if layer.kind == "row" else ColumnParallel(local, self.groups.tp)

    def _grouped(self, layer: Layer, gemms: GemmChoice) -> nn.Module:
        out, width = layer.shape
        module: nn.Module = GroupedLinear(
            layer.num_gemms or 1, width, out, recipe=self.recipe, gemms=gemms, device=self.device, dtype=self.dtype
        )
        if self.groups.etp is not None:
            kind = RowParallel if layer.kind == "row_grouped" else ColumnParallel
            module = kind(module, self.groups.etp)
        return module if self.groups.ep is None else ExpertParallel(module, self.groups.ep)


def step_of(module: nn.Module, x: Tensor, *more: Tensor) -> Call:
    """A forward and backward with a random gradient, for the input and every parameter."""
    x.requires_grad_()
    inputs = [x, *(parameter for parameter in module.parameters() if parameter.requires_grad)]
    with torch.no_grad():
        gradient = torch.randn_like(module(x, *more))
    drop_casts = cast_dropper(module)

    def step() -> tuple[Tensor, ...]:
        drop_casts()
        return torch.autograd.grad(module(x, *more), inputs, gradient)

    return step


def route_tokens(tokens: int, experts: int, routing: str) -> tuple[int, ...]:
    """How many tokens each expert gets, even or skewed as `routing` says; they add up to `tokens`."""
    if not (is_count(tokens) and is_count(experts)):
        raise Fp8Error(f"tokens and experts must be integers from 1, got {tokens!r} and {experts!r}")
    if routing not in ROUTINGS:
        raise Fp8Error(f"routing must be one of {', '.join(ROUTINGS)}, got {routing!r}")
    shares = [1.0] * experts if routing == "uniform" else [1 / (rank + 1) for rank in _shuffled(experts)]
    return _proportional_counts(tokens, shares)


def _shuffled(experts: int) -> list[int]:
    """A fixed shuffle: steps of about 0.618 of the count, the nearest that shares no factor with it."""
    steps = range(max(1, round(experts * 0.618)), 2 * experts + 1)
    step = next(step for step in steps if math.gcd(step, experts) == 1)
    return [index * step % experts for index in range(experts)]


def _proportional_counts(total: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in proportion to the shares, which add up to the total: the largest remainders are rounded up."""
    exact = [total * share / math.fsum(shares) for share in shares]
    counts = [math.floor(share) for share in exact]
    order = sorted(range(len(shares)), key=lambda index: (counts[index] - exact[index], index))
    for index in order[: total - sum(counts)]:
        counts[index] += 1
    return tuple(counts)


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
        names = ", ".join(part.part for part in model.parts)
        raise BenchOptionsError(f"{options.omni_config_path}: has no part {options.part!r}; it has {names}")
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
