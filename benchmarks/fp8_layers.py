"""Llama layers forward and backward: compiled BF16, full FP8, adaptive FP8, and torchao, in one run and in turns.

    python benchmarks/fp8_layers.py [--parts measured,held-out,shapes] [--sizes h4096,h2048] [--seconds 420]
    python benchmarks/fp8_layers.py --no-policy --parts measured --timing graph,reduce-overhead

policy     first: `fp8 bench` for the sizes at 512 ... 16384 tokens, in CUDA graphs and launched one by one, "eager".
           The adaptive arm asks a policy merged of the times that were taken as it runs itself; --policy keeps the one
           of both, by which FP8 must win either way. A report that is there (--report) is gone on with
measured   two layers at 512, 2048 and 16384 tokens; the first of the sizes also by torchao
held-out   the same at 768, 3072 and 12288, which the policy does not know, by its estimates
shapes     layers of sizes that the policy does not know, at 512, 3072 and 16384, by its estimates

Arms: BF16; "full", all FP8; "adaptive", what the policy says; "confirmed", the same with apply_fp8(confirm=True), which
times one block first, compiled and run as the row is. At the first size of "measured" also "restless": full with output
gradients that change by a factor of 64 from step to step, so that every guess of their scales is wrong.

Every arm is compiled, and a step casts all weights anew, as after an optimizer's step. Rows are timed by --timing: a
CUDA graph of the whole step, or eager; with both, that first size also has rows compiled by mode="reduce-overhead",
where torch makes the graphs, by the policy of CUDA graphs and without torchao. Ratios are BF16 time over the arm's: the
median of the turns' ratios with the interval that the policy uses. "best" is the adaptive arm, "confirmed_best" the
confirmed one, against the better of BF16 and full FP8. Parts stop when --seconds are over and say what they left out.
An arm that cannot be made or run is recorded with its reason.

--no-policy measures no policy and leaves out the arms that ask one; "reduce-overhead" is then one of --timing. With
--side-by-side each size and count has a process of its own: all compile at once, then one after the other is timed.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

import harness
import torch
from llama_layers import LlamaLayers, Size
from torch import Tensor, nn

from bitplan.base.paired_timing import OK, Arm, Call, Timed, stopwatch_of, time_in_turns
from bitplan.fp8.apply import apply_fp8
from bitplan.fp8.bench.layer_bench import BenchOptions, BenchPlan, ParallelGroups, run_bench
from bitplan.fp8.bench.session import ModuleBuilder
from bitplan.fp8.decide import Fp8Options
from bitplan.fp8.layer_settings import Fp8Recipe
from bitplan.fp8.layers.grouped_linear import cast_dropper
from bitplan.fp8.policy.layers import Layer, Parallel, bench_cases, local_layers, model_parts
from bitplan.fp8.policy.merge import merge_reports, summary
from bitplan.fp8.policy.report import Report, ReportLog, fingerprint_of, speedup_interval
from bitplan.fp8.policy.rules import Policy

SIZES = {
    "h4096": Size(4096, 14336, 32, 8),
    "h2048": Size(2048, 8192, 16, 4),
    "tiny": Size(128, 256, 2, 1, 64),
}
OTHER_SIZES = {"h3072": Size(3072, 8192, 24, 8), "h5120": Size(5120, 13824, 40, 8)}
POLICY_TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
TOKENS = {"measured": (512, 2048, 16384), "held-out": (768, 3072, 12288), "shapes": (512, 3072, 16384)}
LAYERS = 2
LONGEST = 2048  # tokens of a sequence
RESTLESS, REDUCED = "restless", "reduce-overhead"


class Budget:
    """Seconds that a part may take; what does not fit is left out by name."""

    def __init__(self, seconds: float) -> None:
        self.ends = time.monotonic() + seconds
        self.left_out: list[str] = []

    def over(self, what: str) -> bool:
        if time.monotonic() < self.ends:
            return False
        self.left_out.append(what)
        return True


# ---- the policy ------------------------------------------------------------------------------------------------------


def measure_policy(
    options: argparse.Namespace, sizes: list[Size], device: torch.device
) -> tuple[dict[str, Policy], dict[str, Any]]:
    """Time the layers of the sizes, as `bitplan fp8 bench` does, and merge: a policy for each way of timing."""
    layers: dict[Any, Layer] = {}
    for size in sizes:
        for layer in local_layers(model_parts(size.config(LAYERS)), Parallel()):
            layers.setdefault((layer.kind, layer.name, layer.shape), layer)
    sweep = [(tokens, 1) for tokens in options.policy_tokens]
    recipe = Fp8Recipe(options.recipe)
    cases = tuple(bench_cases(layers.values(), sweep, recipe.name))
    plan = BenchPlan(cases, recipe, BenchOptions(iters=options.turns, warmup=3, timings=tuple(options.timing)))
    budget = Budget(options.seconds)
    builder = ModuleBuilder(recipe, device, ParallelGroups())
    settings = plan.settings() | {"sizes": [size.label for size in sizes], "tokens": list(options.policy_tokens)}
    started = time.monotonic()
    with ReportLog(options.report, fingerprint_of(device), recipe.name, model="llama layers", settings=settings) as log:
        timed = run_bench(
            plan,
            log,
            builder,
            stopwatch_of(device),
            padded_tokens=builder.padded_tokens,
            on_way=lambda way: _stop_when(budget, way.label),
        )
    reports = [Report.load(options.report)]
    merged = merge_reports(reports, speedup_threshold=options.threshold)
    if options.policy is not None:
        merged.policy.save(options.policy)
    message = {"measurements": timed, "seconds": time.monotonic() - started, "findings": list(merged.findings)}
    policies = {
        timing: merge_reports(reports, speedup_threshold=options.threshold, timing=timing).policy
        for timing in options.timing
    }
    return policies, message | {"rules": {timing: summary(policy) for timing, policy in policies.items()}}


def _stop_when(budget: Budget, what: str) -> None:
    if budget.over(what):
        raise SystemExit(f"the policy's seconds are over at {what}; run again with the same --report to go on")


# ---- layers ----------------------------------------------------------------------------------------------------------


class Arms:
    """The steps at one size and count. Each is made and compiled once, for both ways of timing."""

    def __init__(self, part: str, size: Size, tokens: int, options: argparse.Namespace, device: torch.device) -> None:
        torch.compiler.reset()
        dynamo: Any = torch._dynamo.config
        dynamo.recompile_limit, dynamo.fail_on_recompile_limit_hit = 64, True  # many models share a layer's code
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with device:
            self.plain = LlamaLayers(size, LAYERS).to(dtype).train()
            batch = -(-tokens // LONGEST)
            self.x = torch.randn(batch, tokens // batch, size.hidden, dtype=dtype)
        self.compiled = options.compile
        self.given = {"tokens": tokens, "recipe": options.recipe, "emulate": device.type == "cpu"}
        self.steps: dict[tuple[str, str | None], Call] = {}
        self.made: dict[str, Callable[[], nn.Module]] = {"bf16": lambda: self.plain, "full": self.full}
        if part == "measured" and size == SIZES[options.sizes.split(",")[0]]:
            if options.restless:
                self.made[RESTLESS] = self.full
            for name in options.torchao.split(",") if options.torchao else ():
                self.made[f"torchao {name}"] = partial(_torchao, self.plain, name)
        self.extra = [name for name in self.made if name not in ("bf16", "full")]

    def full(self) -> nn.Module:
        model = copy.deepcopy(self.plain)
        apply_fp8(model, None, **self.given)
        return model

    def add_adaptive(self, policy: Policy, run: str | None = None) -> dict[str, Any]:
        """What a policy decides, and under "arm" which arm that is: one of the others where it is the same layers.

        Where it is told how it will run, the decision is confirmed so.
        """
        model = copy.deepcopy(self.plain)
        confirm: dict[str, Any] = {}
        if run is not None:
            mode = REDUCED if run == REDUCED and self.compiled else self.compiled
            timing = "graph" if run == "graph" else "eager"
            options = Fp8Options(confirm_compiled=mode, confirm_timing=timing)
            confirm = {"confirm": True, "example": self.x, "options": options}
        started = time.monotonic()
        applied = apply_fp8(model, policy, **self.given, **confirm)
        seconds = time.monotonic() - started
        layers = [
            {"layer": row.path, "precision": row.precision, "reason": row.reason}
            for row in applied.rows[: len(applied.rows) // LAYERS]
        ]
        precisions = [row["precision"] for row in layers]
        arm = " | ".join(precisions)
        if len(set(precisions)) == 1:
            arm = {"bf16": "bf16", "fp8": "full"}.get(precisions[0], arm)
        self.made.setdefault(arm, lambda: model)
        message = {"arm": arm, "fp8_layers": applied.fp8_layers, "layers": layers}
        confirmed = [asdict(each) for each in applied.confirmed]
        return message | ({"confirmed": confirmed, "seconds": seconds} if confirm else {})

    def arms(self, chosen: Sequence[str], mode: str | None = None) -> dict[str, Arm]:
        names = dict.fromkeys(["bf16", "full", *chosen, *(self.extra if mode is None else ())])
        return {name: partial(self.step, name, mode) for name in names}

    def step(self, name: str, mode: str | None = None) -> Call:
        if (name, mode) not in self.steps:
            self.steps[name, mode] = _step(self.made[name], self.x, self.compiled, mode, restless=name == RESTLESS)
        return self.steps[name, mode]


def _torchao(plain: nn.Module, recipe: str) -> nn.Module:
    float8: Any = importlib.import_module("torchao.float8")
    model = copy.deepcopy(plain)
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    return float8.convert_to_float8_training(model, config=config)  # type: ignore[no-any-return]


def _step(
    make: Callable[[], nn.Module], x: Tensor, compiled: bool, mode: str | None = None, *, restless: bool = False
) -> Call:
    model = make() if mode is None else copy.deepcopy(make())
    x = x.clone().requires_grad_()
    gradient = torch.randn_like(x)
    factor = torch.ones((), device=x.device, dtype=x.dtype)
    if compiled:
        for layer in cast(nn.ModuleList, model.layers):  # layers alike share what was compiled for the first
            layer.compile(mode=mode)
    wanted = [x, *(each for each in model.parameters() if each.requires_grad)]

    drop_casts = cast_dropper(model)

    def step() -> None:
        drop_casts()
        if mode is not None:
            torch.compiler.cudagraph_mark_step_begin()
        if restless:
            factor.neg_().add_(65)  # 1, 64, 1, 64, ..., in a CUDA graph too
        torch.autograd.grad(model(x), wanted, gradient * factor if restless else gradient)

    return step


def time_layers(
    part: str,
    size: Size,
    tokens: int,
    policies: dict[str, Policy] | None,
    options: argparse.Namespace,
    device: torch.device,
) -> list[dict[str, Any]]:
    arms = Arms(part, size, tokens, options, device)
    runs: dict[str, Policy | None] = dict.fromkeys(options.timing) if policies is None else dict(policies)
    if policies is not None and RESTLESS in arms.made and len(runs) > 1:
        runs[REDUCED] = policies["graph"]
    if options.waits:
        for run in runs:
            mode = REDUCED if run == REDUCED else None
            for step in arms.arms([], mode).values():
                _run_thrice(step)
        print("ready", flush=True)
        sys.stdin.readline()
    return [_time_run(arms, run, policy, part, size, tokens, options.turns) for run, policy in runs.items()]


def _run_thrice(arm: Arm) -> None:
    """Compile an arm; one that cannot run is recorded when it is timed."""
    try:
        step = arm()
        for _ in range(3):
            step()
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)


def _time_run(
    arms: Arms, run: str, policy: Policy | None, part: str, size: Size, tokens: int, turns: int
) -> dict[str, Any]:
    mode = REDUCED if run == REDUCED else None
    message: dict[str, dict[str, Any]] = {}
    if policy is not None:
        message = {"adaptive": arms.add_adaptive(policy), "confirmed": arms.add_adaptive(policy, run)}
    chosen = {name: each["arm"] for name, each in message.items()}
    made = arms.arms(list(chosen.values()), mode)
    result = time_in_turns(made, stopwatch_of(arms.x.device), turns=turns, warmup=3, graph=run == "graph")
    timed = {name: each for name, each in result.items() if name in ("bf16", "full", *arms.extra)}
    timed |= {name: result[arm] for name, arm in chosen.items()}
    row: dict[str, Any] = {"part": part, "size": size.label, "tokens": tokens, "timing": run} | message
    row |= {
        "arms": {name: _arm(each, timed["bf16"]) for name, each in timed.items()},
        "best": _against_best(timed, "adaptive"),
        "confirmed_best": _against_best(timed, "confirmed"),
    }
    print(line_of(row), flush=True)
    return row


def _arm(result: Timed, bf16: Timed) -> dict[str, Any]:
    if result.status != OK:
        return {"status": result.status, "message": result.message}
    message: dict[str, Any] = {
        "status": OK,
        **harness.summary(list(result.samples_ms)),
        "peak_bytes": result.peak_bytes,
    }
    return message | {"samples_ms": list(result.samples_ms), "ratio": _ratio(bf16, result)}


def _ratio(slow: Timed, fast: Timed) -> dict[str, float] | None:
    """How many times faster, with its interval."""
    if slow.status != OK or fast.status != OK:
        return None
    if slow is fast:
        return {"speedup": 1.0, "low": 1.0, "high": 1.0}
    result = speedup_interval(slow.samples_ms, fast.samples_ms, in_turns=slow.in_turns and fast.in_turns)
    return None if result is None else {"speedup": result.speedup, "low": result.low, "high": result.high}


def _against_best(timed: dict[str, Timed], chosen: str) -> dict[str, Any] | None:
    candidates = {name: timed[name] for name in ("bf16", "full") if timed[name].status == OK}
    if not candidates or chosen not in timed or timed[chosen].status != OK:
        return None
    best = min(candidates, key=lambda name: statistics.median(candidates[name].samples_ms))
    return {"arm": best, "ratio": _ratio(candidates[best], timed[chosen])}


def line_of(row: dict[str, Any]) -> str:
    message = []
    for name, arm in row["arms"].items():
        ratio = arm.get("ratio")
        shown = arm["status"] if ratio is None else f"{ratio['speedup']:.3f}x ({ratio['low']:.3f}-{ratio['high']:.3f})"
        message.append(f"{name} {shown}")
    ratios = [row[key] and row[key]["ratio"] for key in ("best", "confirmed_best")]
    against = "  of the better " + ", ".join(f"{each['speedup']:.3f}" if each else "?" for each in ratios)
    median = row["arms"]["bf16"].get("median_ms")
    base = f"{median:.3f} ms" if median else "failed"
    return (
        f"{row['part']:9} {row['timing']:15} {row['size']:14} {row['tokens']:6}  BF16 {base}  "
        + "  ".join(message[1:])
        + against
    )


def run_layers(
    options: argparse.Namespace, device: torch.device, keep: Callable[[dict[str, Any]], Path]
) -> dict[str, Any]:
    sizes = [SIZES[name] for name in options.sizes.split(",")]
    policies, message = measure_policy(options, sizes, device) if options.asks_policy else (None, None)
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    result = {"recipe": options.recipe, "policy": message, "rows": rows, "left_out": left_out}
    keep(result)
    for part in options.parts.split(","):
        budget = Budget(options.seconds)
        for size in list(OTHER_SIZES.values()) if part == "shapes" else sizes:
            for tokens in options.tokens or TOKENS[part]:
                if not budget.over(f"{part} {size.label} {tokens}"):
                    rows += time_layers(part, size, tokens, policies, options, device)
                    keep(result)  # what is done stays done
        left_out += budget.left_out
    return result


def run_side_by_side(options: argparse.Namespace) -> dict[str, Any]:
    """The rows of a process for each size and count."""
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {"recipe": options.recipe, "policy": None, "rows": rows, "left_out": []}
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for size in options.sizes.split(","):
            for tokens in options.tokens or TOKENS["measured"]:
                output = Path(folder) / f"{size}_{tokens}.json"
                again = [sys.executable, *sys.argv, "--waits", "--sizes", size, "--tokens", str(tokens)]
                again += ["--output", str(output), *(["--torchao", ""] if size != options.sizes.split(",")[0] else [])]
                process = subprocess.Popen(again, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                processes.append((f"measured {size} {tokens}", process, output))
        ready = [_says_ready(process) for _, process, _ in processes]
        for (name, process, output), is_ready in zip(processes, ready, strict=True):
            if is_ready:
                print(process.communicate("go\n")[0].strip().split("\n")[-1], flush=True)
            if process.wait() == 0 and is_ready:
                rows += json.loads(output.read_text())["rows"]
            else:
                result["left_out"].append(name)
    return result


def _says_ready(process: subprocess.Popen[str]) -> bool:
    assert process.stdout is not None
    return any(line.strip() == "ready" for line in iter(process.stdout.readline, ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="measured,held-out,shapes", help="of measured, held-out and shapes")
    parser.add_argument("--sizes", default="h4096,h2048", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--tokens", type=_counts, default=None, help="other counts than the parts have")
    parser.add_argument("--policy-tokens", type=_counts, default=POLICY_TOKENS)
    parser.add_argument("--recipe", default="tensorwise")
    parser.add_argument("--threshold", type=float, default=1.0, help="the least speedup for which FP8 is used")
    parser.add_argument("--timing", type=lambda text: text.split(","), default=["eager", "graph"], help="eager, graph")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--torchao", default="tensorwise,rowwise", help="torchao's recipes; empty for none")
    parser.add_argument("--seconds", type=float, default=420.0, help="for the policy, and for each part")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--report", type=Path, default=Path("fp8_layers_report.jsonl"))
    parser.add_argument("--policy", type=Path, default=None, help="keep the policy here")
    parser.add_argument("--no-policy", dest="asks_policy", action="store_false", help="only BF16, all FP8 and torchao")
    parser.add_argument("--no-restless", dest="restless", action="store_false", help="leave out that arm")
    parser.add_argument("--side-by-side", action="store_true", help="with --no-policy: compile all at once")
    parser.add_argument("--waits", action="store_true", help=argparse.SUPPRESS)  # to be told when it may be timed
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    if options.side_by_side and (options.asks_policy or options.parts != "measured"):
        parser.error("--side-by-side takes --no-policy --parts measured")
    device = torch.device(options.device)
    document: dict[str, Any] = {
        "benchmark": "fp8_layers",
        "commit": harness.commit(),
        "machine": harness.machine(device.type),
        "versions": harness.versions(),
    }
    gpu = document["machine"].get("gpu", "cpu").lower().replace(" ", "_")

    def keep(result: dict[str, Any]) -> Path:
        return harness.save(f"fp8_layers_{gpu}", document | result, options.output)

    result = (
        run_side_by_side(options) if options.side_by_side and not options.waits else run_layers(options, device, keep)
    )
    print(f"\n{keep(result)}")
    for row in result["rows"]:
        print(line_of(row))
    if result["left_out"]:
        print(f"left out, the seconds were over: {', '.join(result['left_out'])}")


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(item) for item in text.split(","))


if __name__ == "__main__":
    main()
