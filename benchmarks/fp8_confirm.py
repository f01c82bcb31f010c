"""Does confirming say what a training step then shows, how long does it take, and does it leave memory behind?

    python benchmarks/fp8_confirm.py [--sizes h4096,h2048] [--tokens 2048,16384] [--timing graph,eager]

A llama of four layers gets `apply_fp8(confirm=True)`, which times one block, compiled. Then all four layers train:
forward and backward, compiled, in turns with BF16, weights cast anew in each step. Beside what confirming said and what
the layers showed: its seconds, compiling included, and the bytes that it leaves allocated beside the model's own, and
that are left when the model has trained and is gone.
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
from pathlib import Path
from typing import Any

import harness
import torch
from fp8_layers import LONGEST, SIZES, _counts, _step
from llama_layers import LlamaLayers, Size

from bitplan.base.paired_timing import OK, release_workspaces, stopwatch_of, time_in_turns
from bitplan.fp8.apply import apply_fp8
from bitplan.fp8.decide import Fp8Options
from bitplan.fp8.policy.report import speedup_interval
from bitplan.fp8.policy.rules import Policy, load_policy

LAYERS = 4
DEFAULT_POLICY = Path(__file__).parent / "policies" / "nvidia_h200_fp8_policy.json"
Row = dict[str, Any]


def confirm_and_train(size: Size, tokens: int, timing: str, policy: Policy | None, options: argparse.Namespace) -> Row:
    device = torch.device(options.device)
    torch.compiler.reset()
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        plain = LlamaLayers(size, LAYERS).to(dtype).train()
        batch = -(-tokens // LONGEST)
        x = torch.randn(batch, tokens // batch, size.hidden, dtype=dtype)
    before = allocated(device)
    model = copy.deepcopy(plain)
    own = sum(each.nbytes for each in model.parameters() if each.is_cuda)
    started = time.monotonic()
    applied = apply_fp8(
        model,
        policy,
        tokens=tokens,
        recipe="tensorwise",
        emulate=device.type == "cpu",
        confirm=True,
        example=x,
        options=Fp8Options(confirm_compiled=options.compile, confirm_timing=timing),
    )
    seconds = time.monotonic() - started
    left = allocated(device) - before - own
    arms = {"bf16": plain, "confirmed": model}
    timed = time_in_turns(
        {name: lambda made=made: _step(lambda: made, x, options.compile) for name, made in arms.items()},  # type: ignore[misc]
        stopwatch_of(device),
        turns=options.turns,
        warmup=3,
        graph=timing == "graph",
    )
    failed = {name: each.message for name, each in timed.items() if each.status != OK}
    if failed:
        raise SystemExit(f"{size.label}, {tokens} tokens, {timing}: {failed}")
    verdict = applied.confirmed[0]
    shown = speedup_interval(timed["bf16"].samples_ms, timed["confirmed"].samples_ms, in_turns=True)
    row = {
        "size": size.label,
        "tokens": tokens,
        "timing": timing,
        "taken": verdict.taken,
        "said": verdict.speedup,
        "shown": None if shown is None else {"speedup": shown.speedup, "low": shown.low, "high": shown.high},
        "seconds": seconds,
        "samples_ms": {name: list(each.samples_ms) for name, each in timed.items()},
    }
    del model, arms, timed
    torch.compiler.reset()  # dynamo keeps what it compiled, and with it tensors
    return row | {"bytes_left": left, "bytes_left_after_training": allocated(device) - before}


def allocated(device: torch.device) -> int:
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    release_workspaces()
    return int(torch.cuda.memory_allocated(device))


def line_of(row: Row) -> str:
    said, shown = row["said"], row["shown"]
    left = f"{row['bytes_left'] / 1e6:.1f} MB left, {row['bytes_left_after_training'] / 1e6:.1f} after training"
    head = f"{row['size']:15} {row['tokens']:6} {row['timing']:6} {row['taken']:5}"
    if said is None or shown is None or row["taken"] == "bf16":
        return f"{head} said {said}, BF16 is kept; {row['seconds']:.1f} s, {left}"
    return (
        f"{head} said {said:.3f}x, four layers show {shown['speedup']:.3f}x ({shown['low']:.3f} to "
        f"{shown['high']:.3f}), {100 * (shown['speedup'] / said - 1):+.1f}%; {row['seconds']:.1f} s, "
        f"{left}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="h4096,h2048", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--tokens", type=_counts, default=(2048, 16384))
    parser.add_argument("--timing", default="graph,eager")
    parser.add_argument("--policy", type=Path, default=DEFAULT_POLICY)
    parser.add_argument("--no-policy", dest="policy", action="store_const", const=None, help="FP8 wherever it can be")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=120.0, help="rows that have not begun by then are left out")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    started = time.monotonic()
    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit, dynamo.fail_on_recompile_limit_hit = 64, True
    policy = None if options.policy is None else load_policy(options.policy)
    document: Row = {
        "benchmark": "fp8_confirm",
        "commit": harness.commit(),
        "machine": harness.machine(options.device),
        "versions": harness.versions(),
        "layers": LAYERS,
    }
    gpu = document["machine"].get("gpu", "cpu").lower().replace(" ", "_")
    rows: list[Row] = []
    left_out: list[str] = []
    for timing in options.timing.split(","):
        for name in options.sizes.split(","):
            for tokens in options.tokens:
                if time.monotonic() - started > options.seconds:
                    left_out.append(f"{name} {tokens} {timing}")
                    continue
                rows.append(confirm_and_train(SIZES[name], tokens, timing, policy, options))
                print(line_of(rows[-1]), flush=True)
                harness.save(f"fp8_confirm_{gpu}", document | {"rows": rows, "left_out": left_out}, options.output)
    if left_out:
        print(f"left out, the seconds were over: {', '.join(left_out)}")


if __name__ == "__main__":
    main()
