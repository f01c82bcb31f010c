"""Layers as different projects write them, forward and backward, compiled: BF16, all FP8, and torchao, in turns.

    python benchmarks/fp8_styles.py [--cases llama:h4096:2048,nanogpt:h4096:16384,...] [--timing eager,graph]

A case is a style of `layer_styles`, a size and a token count. The usual ones are every style at h4096 with 2,048 and
16,384 tokens, and two styles at h3072, a width that no launch was tuned on. Each case has a process of its own: all
compile at once, then one after the other is timed, launched one by one ("eager") and as a CUDA graph of the step.
A step casts all weights anew, as after an optimizer's step. Ratios are BF16's time over the arm's: the median of the
turns' ratios with its interval. The table ends with what is wanted: at least `WANTED`, never below torchao in the run,
never below 0.99 of BF16.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
from fp8_layers import LAYERS, LONGEST, OTHER_SIZES, SIZES, _arm, _run_thrice, _says_ready, _step, _torchao
from layer_styles import STYLES, StyledLayers

from bitplan.base.paired_timing import stopwatch_of, time_in_turns
from bitplan.fp8.apply import apply_fp8

ALL_SIZES = SIZES | OTHER_SIZES
CASES = [f"{style}:h4096:{tokens}" for style in STYLES for tokens in (2048, 16384)]
CASES += ["llama:h3072:16384", "nanogpt:h3072:16384"]
WANTED = {"nanogpt": {2048: 1.20, 16384: 1.42}, "": {2048: 1.30, 16384: 1.55}}
TORCHAO = "torchao tensorwise"


def time_case(case: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    style, size, count = case.split(":")
    tokens, device = int(count), torch.device(options.device)
    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit, dynamo.fail_on_recompile_limit_hit = 64, True  # many models share a layer's code
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        plain = StyledLayers(style, ALL_SIZES[size], LAYERS).to(dtype).train()
        batch = -(-tokens // LONGEST)
        x = torch.randn(batch, tokens // batch, plain.size.hidden, dtype=dtype)
    model = copy.deepcopy(plain)
    given: dict[str, Any] = {"tokens": tokens, "recipe": "tensorwise", "example": x[:1, :64]}
    applied = apply_fp8(model, None, **given, emulate=device.type == "cpu")
    makers: dict[str, Any] = {"bf16": lambda: plain, "fp8": lambda: model}
    if options.torchao:
        makers[TORCHAO] = partial(_torchao, plain, "tensorwise")
    steps = {name: partial(_once, {}, make, x, options.compile) for name, make in makers.items()}
    for step in steps.values():
        _run_thrice(step)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if options.waits:
        print("ready", flush=True)
        sys.stdin.readline()
    rows = []
    for timing in options.timing.split(","):
        result = time_in_turns(steps, stopwatch_of(device), turns=options.turns, warmup=3, graph=timing == "graph")
        row: dict[str, Any] = {"style": style, "size": plain.size.label, "tokens": tokens, "timing": timing}
        row |= {"fp8_layers": applied.fp8_layers, "summary": str(applied).splitlines()}
        rows.append(row | {"arms": {name: _arm(each, result["bf16"]) for name, each in result.items()}})
    return rows


def _once(made: dict[str, Any], make: Any, x: torch.Tensor, compiled: bool) -> Any:
    """The step of an arm, compiled once for both ways of timing."""
    if "step" not in made:
        made["step"] = _step(make, x, compiled)
    return made["step"]


def run_cases(options: argparse.Namespace) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "2"}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for index, case in enumerate(options.cases.split(",")):
            output = Path(folder) / f"{index}.json"
            again = [sys.executable, *sys.argv, "--waits", "--cases", case, "--output", str(output)]
            process = subprocess.Popen(again, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
            processes.append((case, process, output))
        ready = [_says_ready(process) for _, process, _ in processes]
        print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
        for (case, process, output), is_ready in zip(processes, ready, strict=True):
            if is_ready:
                process.communicate("go\n")
            if process.wait() == 0 and is_ready:
                rows += json.loads(output.read_text())["rows"]
                print(*table(rows)[-1:], f"after {time.monotonic() - began:.0f} s", flush=True)
            else:
                failed.append(case)
    return {"rows": rows, "failed": failed}


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [f"{'style':8} {'size':16} {'tokens':>6} {'timing':6} {'BF16 ms':>8} {'FP8':>20} {'torchao':>20}  wanted"]
    for row in rows:
        arms = row["arms"]
        ours, theirs = (_shown(arms.get(name)) for name in ("fp8", TORCHAO))
        least = WANTED.get(row["style"], WANTED[""]).get(row["tokens"], 0.99)
        base = arms["bf16"].get("median_ms")
        ratio, other = _speedup(arms.get("fp8")), _speedup(arms.get(TORCHAO))
        met = ratio >= max(least, 0.99) and ratio >= other
        lines.append(
            f"{row['style']:8} {row['size']:16} {row['tokens']:6} {row['timing']:6} "
            f"{base if base is None else format(base, '.3f'):>8} {ours:>20} {theirs:>20}  "
            f"{least:.2f} {'met' if met else 'MISSED'}"
        )
    return lines


def _speedup(arm: dict[str, Any] | None) -> float:
    return arm["ratio"]["speedup"] if arm and arm.get("ratio") else 0.0


def _shown(arm: dict[str, Any] | None) -> str:
    if arm is None or not arm.get("ratio"):
        return "" if arm is None else arm["status"]
    ratio = arm["ratio"]
    return f"{ratio['speedup']:.3f} ({ratio['low']:.3f}-{ratio['high']:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="STYLE:SIZE:TOKENS,...")
    parser.add_argument("--timing", default="eager,graph")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--no-torchao", dest="torchao", action="store_false")
    parser.add_argument("--waits", action="store_true", help=argparse.SUPPRESS)  # to be told when it may be timed
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    if options.waits:
        options.output.write_text(json.dumps({"rows": time_case(options.cases, options)}))
        return
    machine = harness.machine(torch.device(options.device).type)
    document = {"benchmark": "fp8_styles", "commit": harness.commit(), "machine": machine}
    result = run_cases(options)
    gpu = machine.get("gpu", "cpu").lower().replace(" ", "_")
    path = harness.save(f"fp8_styles_{gpu}", document | {"versions": harness.versions()} | result, options.output)
    for row in result["rows"]:
        if row["timing"] == options.timing.split(",")[0] and row["tokens"] == 16384:
            print(f"\n{row['style']} {row['size']} {row['tokens']}", *row["summary"], sep="\n")
    print(f"\n{path}", *table(result["rows"]), sep="\n")
    if result["failed"]:
        raise SystemExit(f"failed: {', '.join(result['failed'])}")


if __name__ == "__main__":
    main()
