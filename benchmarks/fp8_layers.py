"""Llama layers forward and backward: compiled BF16, full FP8, adaptive FP8, and torchao, in one run and in turns.

    python benchmarks/fp8_layers.py [--parts measured,held-out,shapes] [--sizes h4096,h2048] [--seconds 420]
    python benchmarks/fp8_layers.py --train [--text FILE]          default: the text that bitplan ships

policy     first: `bench-layers` for the sizes at 512 ... 16384 tokens, in CUDA graphs and launched one by one, "eager".
           The adaptive arm asks a policy merged of the times that were taken as it runs itself; --policy keeps the one
           of both, by which FP8 must win either way. A report that is there (--report) is gone on with
measured   two layers at 512, 2048 and 16384 tokens; the first of the sizes also by torchao
held-out   the same at 768, 3072 and 12288, which the policy does not know, by its estimates
shapes     layers of sizes that the policy does not know, at 512, 3072 and 16384, by its estimates
train      a language model from scratch, in BF16, adaptive FP8 and full FP8, three seeds each: the last losses

Every arm is compiled, and a step casts all weights anew, as after an optimizer's step. Rows are timed by --timing: a
CUDA graph of the whole step, or eager. Ratios are BF16 time over the
arm's time: the median of the turns' ratios with the interval that the policy uses. "best" is the adaptive arm against
the better of BF16 and full FP8. Parts stop when --seconds are over and say what they left out. An arm that cannot be
made or run is recorded with its reason.
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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import harness
import torch
from llama_layers import LlamaLayers, Size, TinyLlama
from torch import Tensor, nn

from bitplan.cli.tiny_model import shipped_text
from bitplan.measure.fp8_fingerprint import fingerprint_of
from bitplan.measure.fp8_report_log import ReportLog
from bitplan.measure.paired_timing import OK, Arm, Call, Timed, stopwatch_of, time_in_turns
from bitplan.plan.fp8_bands import BandPolicy
from bitplan.plan.fp8_interval import speedup_interval
from bitplan.plan.fp8_layers import Layer, Parallel, bench_cases, local_layers
from bitplan.plan.fp8_merge import merge_reports, summary
from bitplan.plan.fp8_models import model_parts
from bitplan.plan.fp8_policy import Policy, load_policy
from bitplan.plan.fp8_report import Report
from bitplan.runtime.fp8_apply import apply_fp8
from bitplan.runtime.fp8_bench import BenchPlan, run_bench
from bitplan.runtime.fp8_bench_modules import ModuleBuilder
from bitplan.runtime.fp8_bench_ranks import Groups
from bitplan.runtime.fp8_experts import cast_dropper
from bitplan.runtime.fp8_recipe import Fp8Recipe
from bitplan.runtime.fp8_scale_guesses import guess_counts

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
TRAIN_SIZE, TRAIN_LAYERS = Size(1024, 4096, 16, 16, 64), 8


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
) -> tuple[dict[str, BandPolicy], dict[str, Any]]:
    """Time the layers of the sizes, as `bitplan bench-layers` does, and merge: a policy for each way of timing."""
    layers: dict[Any, Layer] = {}
    for size in sizes:
        for layer in local_layers(model_parts(size.config(LAYERS)), Parallel()):
            layers.setdefault((layer.kind, layer.name, layer.shape), layer)
    sweep = [(tokens, 1) for tokens in options.policy_tokens]
    recipe = Fp8Recipe(options.recipe)
    cases = tuple(bench_cases(layers.values(), sweep, recipe.name))
    plan = BenchPlan(cases, recipe, turns=options.turns, warmup=3, timings=tuple(options.timing))
    budget = Budget(options.seconds)
    builder = ModuleBuilder(recipe, device, Groups())
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
    told = {"measurements": timed, "seconds": time.monotonic() - started, "findings": list(merged.findings)}
    policies = {
        timing: merge_reports(reports, speedup_threshold=options.threshold, timing=timing).policy
        for timing in options.timing
    }
    return policies, told | {"rules": {timing: summary(policy) for timing, policy in policies.items()}}


def _stop_when(budget: Budget, what: str) -> None:
    if budget.over(what):
        raise SystemExit(f"the policy's seconds are over at {what}; run again with the same --report to go on")


# ---- layers ----------------------------------------------------------------------------------------------------------


class Arms:
    """The steps at one size and count. Each is made and compiled once, for both ways of timing."""

    def __init__(self, part: str, size: Size, tokens: int, options: argparse.Namespace, device: torch.device) -> None:
        torch.compiler.reset()
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with device:
            self.plain = LlamaLayers(size, LAYERS).to(dtype).train()
            batch = -(-tokens // LONGEST)
            self.x = torch.randn(batch, tokens // batch, size.hidden, dtype=dtype)
        self.compiled = options.compile
        self.given = {"tokens": tokens, "recipe": options.recipe, "emulate": device.type == "cpu"}
        self.steps: dict[str, Call] = {}
        self.made: dict[str, Callable[[], nn.Module]] = {"bf16": lambda: self.plain, "full": self.full}
        is_first = size == SIZES[options.sizes.split(",")[0]]
        for name in options.torchao.split(",") if options.torchao and part == "measured" and is_first else ():
            self.made[f"torchao {name}"] = partial(_torchao, self.plain, name)

    def full(self) -> nn.Module:
        model = copy.deepcopy(self.plain)
        apply_fp8(model, None, **self.given)
        return model

    def add_adaptive(self, policy: BandPolicy) -> dict[str, Any]:
        """What a policy decides, and under "arm" which arm that is: one of the others where it is the same layers."""
        model = copy.deepcopy(self.plain)
        applied = apply_fp8(model, policy, **self.given)
        layers = [
            {"layer": row.path, "precision": row.precision, "reason": row.reason}
            for row in applied.rows[: len(applied.rows) // LAYERS]
        ]
        precisions = [row["precision"] for row in layers]
        arm = " | ".join(precisions)
        if len(set(precisions)) == 1:
            arm = {"bf16": "bf16", "fp8": "full"}.get(precisions[0], arm)
        self.made.setdefault(arm, lambda: model)
        return {"arm": arm, "fp8_layers": applied.fp8_layers, "layers": layers}

    def arms(self, adaptive: str) -> dict[str, Arm]:
        names = ["bf16", "full", adaptive, *(name for name in self.made if name.startswith("torchao"))]
        return {name: partial(self.step, name) for name in dict.fromkeys(names)}

    def step(self, name: str) -> Call:
        if name not in self.steps:
            self.steps[name] = _step(self.made[name], self.x, self.compiled)
        return self.steps[name]


def _torchao(plain: nn.Module, recipe: str) -> nn.Module:
    float8: Any = importlib.import_module("torchao.float8")
    model = copy.deepcopy(plain)
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    return float8.convert_to_float8_training(model, config=config)  # type: ignore[no-any-return]


def _step(make: Callable[[], nn.Module], x: Tensor, compiled: bool) -> Call:
    model = make()
    x = x.clone().requires_grad_()
    gradient = torch.randn_like(x)
    if compiled:
        for layer in cast(nn.ModuleList, model.layers):  # layers alike share what was compiled for the first
            layer.compile()
    run = model
    wanted = [x, *(each for each in model.parameters() if each.requires_grad)]

    drop_casts = cast_dropper(model)

    def step() -> None:
        drop_casts()
        torch.autograd.grad(run(x), wanted, gradient)

    return step


def time_layers(
    part: str,
    size: Size,
    tokens: int,
    policies: dict[str, BandPolicy],
    options: argparse.Namespace,
    device: torch.device,
) -> list[dict[str, Any]]:
    arms = Arms(part, size, tokens, options, device)
    rows = []
    for timing, policy in policies.items():
        told = arms.add_adaptive(policy)
        timed = time_in_turns(
            arms.arms(told["arm"]), stopwatch_of(device), turns=options.turns, warmup=3, graph=timing == "graph"
        )
        found = timed[told["arm"]]
        if told["arm"] not in ("bf16", "full"):
            del timed[told["arm"]]
        timed["adaptive"] = found
        row: dict[str, Any] = {
            "part": part,
            "size": size.label,
            "tokens": tokens,
            "timing": timing,
            "adaptive": told,
            "arms": {name: _arm(each, timed["bf16"]) for name, each in timed.items()},
            "best": _against_best(timed),
        }
        print(line_of(row), flush=True)
        rows.append(row)
    return rows


def _arm(found: Timed, bf16: Timed) -> dict[str, Any]:
    if found.status != OK:
        return {"status": found.status, "message": found.message}
    told: dict[str, Any] = {"status": OK, **harness.summary(list(found.samples_ms)), "peak_bytes": found.peak_bytes}
    return told | {"samples_ms": list(found.samples_ms), "ratio": _ratio(bf16, found)}


def _ratio(slow: Timed, fast: Timed) -> dict[str, float] | None:
    """How many times faster, with its interval."""
    if slow.status != OK or fast.status != OK:
        return None
    if slow is fast:
        return {"speedup": 1.0, "low": 1.0, "high": 1.0}
    found = speedup_interval(slow.samples_ms, fast.samples_ms, in_turns=slow.in_turns and fast.in_turns)
    return None if found is None else {"speedup": found.speedup, "low": found.low, "high": found.high}


def _against_best(timed: dict[str, Timed]) -> dict[str, Any] | None:
    candidates = {name: timed[name] for name in ("bf16", "full") if timed[name].status == OK}
    if not candidates or timed["adaptive"].status != OK:
        return None
    best = min(candidates, key=lambda name: statistics.median(candidates[name].samples_ms))
    return {"arm": best, "ratio": _ratio(candidates[best], timed["adaptive"])}


def line_of(row: dict[str, Any]) -> str:
    told = []
    for name, arm in row["arms"].items():
        ratio = arm.get("ratio")
        shown = arm["status"] if ratio is None else f"{ratio['speedup']:.3f}x ({ratio['low']:.3f}-{ratio['high']:.3f})"
        told.append(f"{name} {shown}")
    best = row["best"] and row["best"]["ratio"]
    against = f"  of the better {best['speedup']:.3f}" if best else ""
    median = row["arms"]["bf16"].get("median_ms")
    base = f"{median:.3f} ms" if median else "failed"
    return (
        f"{row['part']:9} {row['timing']:5} {row['size']:14} {row['tokens']:6}  BF16 {base}  "
        + "  ".join(told[1:])
        + against
    )


def run_layers(
    options: argparse.Namespace, device: torch.device, keep: Callable[[dict[str, Any]], Path]
) -> dict[str, Any]:
    sizes = [SIZES[name] for name in options.sizes.split(",")]
    policies, told = measure_policy(options, sizes, device)
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    result = {"recipe": options.recipe, "policy": told, "rows": rows, "left_out": left_out}
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


# ---- training --------------------------------------------------------------------------------------------------------


def run_training(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """A model from scratch on bytes of a text, in each arm by several seeds, all at once, each in its own process."""
    size, count = _train_size(options)
    tokens = options.batch * options.length
    options.policy_tokens = (tokens,)
    with tempfile.TemporaryDirectory() as folder:
        options.policy = Path(folder) / "policy.json"
        _, told = measure_policy(options, [size], device)
        running = {
            (arm, seed): subprocess.Popen([sys.executable, *sys.argv, "--one", f"{arm}:{seed}", "--keep", folder])
            for seed in range(options.seeds)
            for arm in ("bf16", "adaptive", "full")
        }
        for (arm, seed), process in running.items():
            if process.wait():
                raise SystemExit(f"{arm}, seed {seed} failed with exit code {process.returncode}")
        runs = [json.loads((Path(folder) / f"{arm}:{seed}.json").read_text()) for arm, seed in running]
    spread: dict[str, list[float]] = {}
    for run in runs:
        spread.setdefault(run["arm"], []).append(run["last_loss"])
    shown = {arm: {"mean": statistics.mean(each), "low": min(each), "high": max(each)} for arm, each in spread.items()}
    model = {"size": size.label, "layers": count, "parameters": runs[0]["parameters"]}
    return {"policy": told, "runs": runs, "losses": shown, "tokens_a_step": tokens, "steps": options.steps} | model


def _train_size(options: argparse.Namespace) -> tuple[Size, int]:
    return (SIZES["tiny"], 2) if options.sizes == "tiny" else (TRAIN_SIZE, TRAIN_LAYERS)


def train_one(options: argparse.Namespace, device: torch.device) -> None:
    """One arm and seed, in a process that `run_training` started."""
    arm, seed = options.one.split(":")
    text = shipped_text().encode() if options.text is None else Path(options.text).read_bytes()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().to(device)
    policy = load_policy(options.keep / "policy.json") if arm == "adaptive" else None
    run = {"arm": arm, "seed": int(seed)} | _train(arm, int(seed), data, policy, options, device)
    (options.keep / f"{options.one}.json").write_text(json.dumps(run))
    print(f"train {arm:8} seed {seed}: last loss {run['last_loss']:.4f}, {run['fp8_layers']} FP8 layers", flush=True)


def _train(
    arm: str, seed: int, data: Tensor, policy: Policy | None, options: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    torch.manual_seed(seed)
    size, count = _train_size(options)
    with device:
        model = TinyLlama(size, count, 256).to(torch.bfloat16 if device.type == "cuda" else torch.float32).train()
    layers = 0
    if arm != "bf16":
        tokens = options.batch * options.length
        layers = apply_fp8(model, policy, tokens=tokens, recipe=options.recipe, emulate=device.type == "cpu").fp8_layers
    # Masters in float32: bfloat16 weights would round most updates away, in every arm.
    masters = [parameter.detach().float().clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=options.steps)
    if options.compile:
        for layer in model.model.layers:  # layers alike share what was compiled for the first
            layer.compile()
    draw = torch.Generator().manual_seed(1000 + seed)
    losses = []
    for _ in range(options.steps):
        starts = torch.randint(0, len(data) - options.length - 1, (options.batch,), generator=draw).tolist()
        window = torch.stack([data[start : start + options.length + 1] for start in starts])
        loss = model(window[:, :-1], window[:, 1:])
        loss.backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad.float() if parameter.grad is not None else None, None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), masters)
        losses.append(loss.detach())
        if len(losses) % 100 == 0:
            print(f"train {arm:8} seed {seed}: step {len(losses)}", flush=True)
    values = torch.stack(losses).float().tolist()
    return {
        "last_loss": statistics.mean(values[-max(options.steps // 20, 1) :]),
        "first_loss": values[0],
        "losses": values[:: max(options.steps // 100, 1)],
        "fp8_layers": layers,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "guessed_scales": {role: {"casts": all_, "wrong": wrong} for role, (all_, wrong) in guess_counts().items()},
    }


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
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--text", default=None)
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)  # arm:seed, of a process that --train started
    parser.add_argument("--keep", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=6e-4)
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.one is not None:
        train_one(options, device)
        return
    name = f"fp8_{'training' if options.train else 'layers'}"
    document: dict[str, Any] = {
        "benchmark": name,
        "commit": harness.commit(),
        "machine": harness.machine(device.type),
        "versions": harness.versions(),
    }
    gpu = document["machine"].get("gpu", "cpu").lower().replace(" ", "_")

    def keep(result: dict[str, Any]) -> Path:
        return harness.save(f"{name}_{gpu}", document | result, options.output)

    result = run_training(options, device) if options.train else run_layers(options, device, keep)
    print(f"\n{keep(result)}")
    if options.train:
        for arm, found in result["losses"].items():
            print(f"{arm:9} last loss {found['mean']:.4f} ({found['low']:.4f} to {found['high']:.4f})")
        return
    for row in result["rows"]:
        print(line_of(row))
    if result["left_out"]:
        print(f"left out, the seconds were over: {', '.join(result['left_out'])}")


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(item) for item in text.split(","))


if __name__ == "__main__":
    main()
