"""Does adaptive FP8 learn as BF16 does? A language model from scratch, in BF16, adaptive FP8 and full FP8.

    python benchmarks/fp8_training.py [--steps 300] [--seeds 3] [--text FILE]      default: the text that bitplan ships

A llama of 134 million parameters on bytes: first its layers are measured at the run's token count, as `bench-layers`
does, and make the policy of the adaptive arm. Then each arm trains by several seeds, all at once, each in a process of
its own; a seed draws the same weights and windows in every arm. The last tenth of the text is kept back: its loss at
the end is what is compared, with the spread over the seeds. Beside it the mean training loss of the last twentieth of
the steps, and how often the scales that casts went by were guessed wrong.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness
import torch
from fp8_layers import SIZES, measure_policy
from llama_layers import Size, TinyLlama
from torch import Tensor

from bitplan.cli.demo.tiny_model import shipped_text
from bitplan.plan.fp8.policy import Policy, load_policy
from bitplan.runtime.fp8.apply import apply_fp8
from bitplan.runtime.fp8.layers.scale_guesses import guess_counts

ARMS = ("bf16", "adaptive", "full")
TRAIN_SIZE, TRAIN_LAYERS = Size(1024, 4096, 16, 16, 64), 8
KEPT_BACK = 0.1
VOCABULARY = 256  # bytes


def run_training(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    size, count = _size_of(options)
    tokens = options.batch * options.length
    options.policy_tokens = (tokens,)
    with tempfile.TemporaryDirectory() as folder:
        options.policy = Path(folder) / "policy.json"
        _, message = measure_policy(options, [size], device)
        running = {
            (arm, seed): subprocess.Popen([sys.executable, *sys.argv, "--one", f"{arm}:{seed}", "--keep", folder])
            for seed in range(options.seeds)
            for arm in ARMS
        }
        for (arm, seed), process in running.items():
            if process.wait():
                raise SystemExit(f"{arm}, seed {seed} failed with exit code {process.returncode}")
        runs = [json.loads((Path(folder) / f"{arm}:{seed}.json").read_text()) for arm, seed in running]
    losses = {
        key: {arm: _spread([run[key] for run in runs if run["arm"] == arm]) for arm in ARMS}
        for key in ("held_out_loss", "last_loss")
    }
    model = {"size": size.label, "layers": count, "parameters": runs[0]["parameters"]}
    return {"policy": message, "runs": runs, "losses": losses, "tokens_a_step": tokens, "steps": options.steps} | model


def _spread(values: list[float]) -> dict[str, float]:
    return {"mean": statistics.mean(values), "low": min(values), "high": max(values)}


def _size_of(options: argparse.Namespace) -> tuple[Size, int]:
    return (SIZES["tiny"], 2) if options.tiny else (TRAIN_SIZE, TRAIN_LAYERS)


def train_one(options: argparse.Namespace, device: torch.device) -> None:
    """One arm and seed, in a process that `run_training` started."""
    arm, seed = options.one.split(":")
    text = shipped_text().encode() if options.text is None else Path(options.text).read_bytes()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().to(device)
    policy = load_policy(options.keep / "policy.json") if arm == "adaptive" else None
    run = {"arm": arm, "seed": int(seed)} | _train(arm, int(seed), data, policy, options, device)
    (options.keep / f"{options.one}.json").write_text(json.dumps(run))
    print(
        f"{arm:8} seed {seed}: held-out loss {run['held_out_loss']:.4f}, last {run['last_loss']:.4f}, "
        f"{run['fp8_layers']} FP8 layers",
        flush=True,
    )


def _train(
    arm: str, seed: int, data: Tensor, policy: Policy | None, options: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    torch.manual_seed(seed)
    size, count = _size_of(options)
    with device:
        model = TinyLlama(size, count, VOCABULARY)
    model = model.to(torch.bfloat16 if device.type == "cuda" else torch.float32).train()
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
    split = int(len(data) * (1 - KEPT_BACK))
    seen, unseen = data[:split], data[split:]
    draw = torch.Generator().manual_seed(1000 + seed)
    losses = []
    for _ in range(options.steps):
        starts = torch.randint(0, len(seen) - options.length - 1, (options.batch,), generator=draw).tolist()
        window = torch.stack([seen[start : start + options.length + 1] for start in starts])
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
            print(f"{arm:8} seed {seed}: step {len(losses)}", flush=True)
    values = torch.stack(losses).float().tolist()
    return {
        "held_out_loss": _held_out_loss(model, unseen, options),
        "last_loss": statistics.mean(values[-max(options.steps // 20, 1) :]),
        "first_loss": values[0],
        "losses": values[:: max(options.steps // 100, 1)],
        "fp8_layers": layers,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "guessed_scales": {role: {"casts": all_, "wrong": wrong} for role, (all_, wrong) in guess_counts().items()},
    }


def _held_out_loss(model: TinyLlama, data: Tensor, options: argparse.Namespace) -> float:
    """The mean loss of all windows side by side, in the arm's own precision."""
    count = (len(data) - 1) // options.length
    if count < 1:
        raise SystemExit(f"the last tenth of the text has {len(data)} bytes, less than one window of {options.length}")
    ids = data[: count * options.length].view(count, -1)
    targets = data[1 : count * options.length + 1].view(count, -1)
    losses: list[float] = []
    # Launched one by one: compiling again, for a pass without gradients, would take longer than the pass.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for at in range(0, count, options.batch):
            part = slice(at, at + options.batch)
            losses.append(float(model(ids[part], targets[part])) * len(ids[part]))
    return float(sum(losses) / count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--text", default=None)
    parser.add_argument("--tiny", action="store_true", help="a model of two small layers, to try the command")
    parser.add_argument("--recipe", default="tensorwise")
    parser.add_argument("--threshold", type=float, default=1.0, help="the least speedup for which FP8 is used")
    parser.add_argument("--timing", type=lambda text: text.split(","), default=["graph"], help="eager, graph")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=120.0, help="for the policy")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--report", type=Path, default=Path("fp8_training_report.jsonl"))
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)  # arm:seed, of a process that was started here
    parser.add_argument("--keep", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.one is not None:
        train_one(options, device)
        return
    document: dict[str, Any] = {
        "benchmark": "fp8_training",
        "commit": harness.commit(),
        "machine": harness.machine(device.type),
        "versions": harness.versions(),
    }
    gpu = document["machine"].get("gpu", "cpu").lower().replace(" ", "_")
    result = run_training(options, device)
    print(f"\n{harness.save(f'fp8_training_{gpu}', document | result, options.output)}")
    for key, arms in result["losses"].items():
        for arm, value in arms.items():
            print(f"{key:14} {arm:9} {value['mean']:.4f} ({value['low']:.4f} to {value['high']:.4f})")


if __name__ == "__main__":
    main()
