"""Does adaptive FP8 learn as BF16 does, and how fast? A llama from scratch, in BF16 and in FP8 of several kinds.

    python benchmarks/fp8_training.py [--size 1b] [--text FILE] [--tokenizer FILE] [--steps 40] [--seconds 155]

Arms: BF16; "adaptive", FP8 where the policy says; "full", all FP8; torchao's tensorwise and rowwise recipes. The policy
is read (--policy FILE), or the model's layers are measured first at the run's token count, as `fp8 bench` does.

Each arm is a process. All of them compile one layer at the same time, which the other layers share. Then they train in
turns, one process on the GPU at a time: a turn is one seed from its first weights to the held-out loss, and its step
times are those of the GPU (events), the first steps left out. A seed draws the same weights and windows in every arm.
All arms take a turn, then BF16 and adaptive take theirs for the other seeds, then the rest. What cannot end within
--seconds is left out, and so is an arm that is not ready after 60% of them or that failed; the result names it.

The last tenth of the text is kept back: its loss at the end is what is compared, with the spread over the seeds. Beside
it the mean training loss of the last twentieth of the steps, tokens a second, the peak of memory, and how often the
scales that casts went by were guessed wrong. Text is bytes, or tokens of a tokenizer.json (needs tokenizers).
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

import harness
import torch
from fp8_layers import SIZES, measure_policy
from llama_layers import Size, TinyLlama
from torch import Tensor, nn

from bitplan.fp8.apply import apply_fp8
from bitplan.fp8.layers.scale_guesses import guess_counts
from bitplan.fp8.policy.rules import load_policy

COMPARED = ("bf16", "adaptive")
ARMS = (*COMPARED, "full", "torchao tensorwise", "torchao rowwise")
TRAINED = {  # sizes of layers, and how many
    "134m": (Size(1024, 4096, 16, 16, 64), 8),
    "1b": (Size(2048, 8192, 32, 8, 64), 18),
    "tiny": (SIZES["tiny"], 2),
}
KEPT_BACK = 0.1
CURVE_POINTS = 100
BYTES = 256
GUESSES = ("casts", "wrong", "too_small")
READY_SHARE = 0.6  # of the seconds: arms that are not ready by then are left out
Run = dict[str, Any]


# ---- the process that hands out turns --------------------------------------------------------------------------------


class ArmProcess:
    """An arm's process: seeds go in, a line of JSON comes out for each."""

    def __init__(self, arm: str, policy: Path | None) -> None:
        self.arm = arm
        command = [sys.executable, *sys.argv, "--one", arm, *(["--policy", str(policy)] if policy else [])]
        # Three or five of these share a few cores.
        environment = {"TORCHINDUCTOR_COMPILE_THREADS": "2", **os.environ}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def train(self, seed: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seed}\n")
        self.process.stdin.flush()

    def answer(self, until: float) -> Run:
        """The next line, or why there is none: {"failed": reason}."""
        try:
            line = self.lines.get(timeout=max(until - time.monotonic(), 0.01))
        except queue.Empty:
            self.process.kill()
            return {"failed": "the seconds were over"}
        if not line:
            return {"failed": f"the process ended with exit code {self.process.wait()}"}
        answer: Run = json.loads(line)
        return answer

    def end(self) -> None:
        """There are no more seeds: the process ends by itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def close(self) -> None:
        self.end()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()


class Turns:
    """Gives the arms their turns, and keeps what they answer."""

    def __init__(self, options: argparse.Namespace, started: float) -> None:
        self.options, self.started, self.ends = options, started, started + options.seconds
        self.runs: list[Run] = []
        self.left_out: list[str] = []
        self.ready: dict[str, float] = {}  # seconds after the start

    def run(self, policy: Path | None, keep: Any) -> None:
        arms = {arm: ArmProcess(arm, policy) for arm in self.options.arms.split(",")}
        try:
            self._wait_until_ready(arms)
            self._train(arms, keep)
        finally:
            for arm in arms.values():  # all at once: each takes a second or two
                arm.end()
            for arm in arms.values():
                arm.close()

    def _wait_until_ready(self, arms: dict[str, ArmProcess]) -> None:
        until = time.monotonic() + READY_SHARE * (self.ends - time.monotonic())
        for name in list(arms):
            answer = arms[name].answer(until)
            if "failed" in answer:
                self.left_out.append(f"{name}: {answer['failed']}")
                arms.pop(name).close()
            self.ready[name] = round(time.monotonic() - self.started, 1)

    def _train(self, arms: dict[str, ArmProcess], keep: Any) -> None:
        seconds: dict[str, float] = {}  # of an arm's last turn
        for name, seed in turns(list(arms), self.options.seeds):
            started = time.monotonic()
            expected = seconds.get(name, max(seconds.values(), default=0.0))
            if name not in arms or started + expected > self.ends:
                self.left_out.append(f"{name}, seed {seed}")
                continue
            arms[name].train(seed)
            run = arms[name].answer(self.ends)
            if "failed" in run:
                self.left_out.append(f"{name}, seed {seed}: {run['failed']}")
                arms.pop(name).close()
                continue
            seconds[name] = time.monotonic() - started
            self.runs.append(run)
            print(line_of(run), flush=True)
            keep()


def turns(arms: list[str], seeds: int) -> list[tuple[str, int]]:
    """All arms once, then the arms that are compared, then the rest."""
    later = [(arm, seed) for seed in range(1, seeds) for arm in arms]
    return [(arm, 0) for arm in arms] + sorted(later, key=lambda turn: turn[0] not in COMPARED)


def line_of(run: Run) -> str:
    memory = f"{run['peak_bytes'] / 2**30:.1f} GiB" if run["peak_bytes"] else "memory not measured"
    return (
        f"{run['arm']:19} seed {run['seed']}: held-out loss {run['held_out_loss']:.4f}, last {run['last_loss']:.4f}, "
        f"{run['step_ms']['median_ms']:.1f} ms a step, {run['tokens_a_second']:,.0f} tokens/s, {memory}, "
        f"{run['fp8_layers']} FP8 layers"
    )


def summarised(runs: list[Run]) -> dict[str, Any]:
    """Of each arm: losses with their spread over the seeds, speed, and memory."""
    arms = list(dict.fromkeys(run["arm"] for run in runs))
    mine = {arm: [run for run in runs if run["arm"] == arm] for arm in arms}
    speed = {arm: statistics.median(run["tokens_a_second"] for run in mine[arm]) for arm in arms}
    return {
        "losses": {
            key: {arm: _spread([run[key] for run in mine[arm]]) for arm in arms}
            for key in ("held_out_loss", "last_loss")
        },
        "tokens_a_second": speed,
        "times_bf16": {arm: speed[arm] / speed["bf16"] for arm in arms} if "bf16" in speed else {},
        "peak_bytes": {arm: max(run["peak_bytes"] for run in mine[arm]) for arm in arms},
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"mean": statistics.mean(values), "low": min(values), "high": max(values)}


def run_training(options: argparse.Namespace, device: torch.device, document: Run, started: float) -> Run:
    size, count = TRAINED[options.size]
    tokens = options.batch * options.length
    gpu = document["machine"].get("gpu", "cpu").lower().replace(" ", "_")
    name = "fp8_training" if options.size == "134m" else f"fp8_training_{options.size}"
    model = {"size": size.label, "layers": count, "tokens_a_step": tokens, "steps": options.steps}
    turn = Turns(options, started)
    result: Run = {}

    def keep() -> None:
        nonlocal result
        result = document | model | {"policy": message, "ready_s": turn.ready, "left_out": turn.left_out}
        result |= {"parameters": turn.runs[0]["parameters"]} | summarised(turn.runs) | {"runs": turn.runs}
        print(harness.save(f"{name}_{gpu}", result, options.output), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        policy: Path | None = options.policy
        message: Any = {"read_from": policy.name} if policy else None
        if policy is None and "adaptive" in options.arms.split(","):
            policy = Path(folder) / "policy.json"
            asked = vars(options) | {"policy": policy, "policy_tokens": (tokens,)}
            _, message = measure_policy(argparse.Namespace(**asked), [size], device)
        turn.run(policy if policy != options.policy else None, keep)
    if not turn.runs:
        raise SystemExit(f"no arm has trained: {'; '.join(turn.left_out)}")
    keep()
    return result


# ---- an arm's process ------------------------------------------------------------------------------------------------


def serve(arm: str, options: argparse.Namespace, device: torch.device) -> None:
    """Get ready, then train by each seed that is asked for. What goes wrong is an answer, too."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # whatever is printed goes beside the answers
        try:
            trainer = Trainer(arm, options, device)
            trainer.warm_up()
            _send(answers, {"ready": arm})
            for line in sys.stdin:
                _send(answers, trainer.train(int(line)))
        except Exception as error:  # another arm's turns go on
            traceback.print_exc()
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            _send(answers, {"failed": reason[:300]})


def _send(answers: TextIO, answer: Run) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


class Trainer:
    """One arm's model, made and compiled once; a seed's weights are loaded into it."""

    def __init__(self, arm: str, options: argparse.Namespace, device: torch.device) -> None:
        self.arm, self.options, self.device = arm, options, device
        dynamo: Any = torch._dynamo.config
        dynamo.recompile_limit, dynamo.fail_on_recompile_limit_hit = 64, True  # never eager without a word
        self.data, self.vocabulary = read_text(options)
        self.data = self.data.to(device)
        self.model = self._plain(0)
        self.fp8_layers = self._convert()
        if options.compile:
            for layer in self.model.model.layers:  # layers alike share what was compiled for the first
                layer.compile()

    def _plain(self, seed: int) -> TinyLlama:
        torch.manual_seed(seed)
        with self.device:
            model = TinyLlama(*TRAINED[self.options.size], self.vocabulary)
        return model.to(torch.bfloat16 if self.device.type == "cuda" else torch.float32).train()

    def _convert(self) -> int:
        options = self.options
        if self.arm == "bf16":
            return 0
        if self.arm.startswith("torchao"):
            return _convert_by_torchao(self.model, self.arm.split()[1])
        policy = load_policy(options.policy) if self.arm == "adaptive" else None
        given = {"tokens": options.batch * options.length, "recipe": options.recipe}
        return apply_fp8(self.model, policy, **given, emulate=self.device.type == "cpu").fp8_layers

    def warm_up(self) -> None:
        """One layer forward and backward: compiles what all layers share, in little memory."""
        layers, width = self.model.model, self.model.norm.weight
        shape = (self.options.batch, self.options.length, len(width))
        x = torch.randn(shape, device=self.device, dtype=width.dtype, requires_grad=True)
        only, layers.layers = layers.layers, nn.ModuleList([layers.layers[0]])
        layers(x).sum().backward()
        layers.layers = only
        self._free()

    def _free(self) -> None:
        """Leave the memory to the next arm."""
        self.model.zero_grad()
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def train(self, seed: int) -> Run:
        options, before = self.options, guess_counts()
        self.model.load_state_dict(self._plain(seed).state_dict())
        self._free()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        split = int(len(self.data) * (1 - KEPT_BACK))
        losses, times = self._steps(seed, self.data[:split])
        step_ms = harness.summary(times[min(5, len(times) - 1) :])
        peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        run = {
            "arm": self.arm,
            "seed": seed,
            "held_out_loss": self._held_out_loss(self.data[split:]),
            "last_loss": statistics.mean(losses[-max(options.steps // 20, 1) :]),
            "first_loss": losses[0],
            "every": max(options.steps // CURVE_POINTS, 1),
            "losses": [round(loss, 5) for loss in losses[:: max(options.steps // CURVE_POINTS, 1)]],
            "step_ms": step_ms,
            "tokens_a_second": options.batch * options.length / step_ms["median_ms"] * 1e3,
            "peak_bytes": peak,
            "fp8_layers": self.fp8_layers,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "guessed_scales": _guesses_since(before),
        }
        self._free()
        return run

    def _steps(self, seed: int, seen: Tensor) -> tuple[list[float], list[float]]:
        """(loss, milliseconds) of each step."""
        model, options = self.model, self.options
        parameters: list[Tensor] = list(model.parameters())
        # Masters in float32: bfloat16 weights would round most updates away, in every arm.
        masters = [parameter.detach().float().clone() for parameter in parameters]
        optimizer = torch.optim.AdamW(masters, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        share = partial(rate_share, steps=options.steps, warm_up=options.warm_up)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
        draw = torch.Generator().manual_seed(1000 + seed)
        losses, marks = [], [_mark(self.device)]
        for _ in range(options.steps):
            starts = torch.randint(0, len(seen) - options.length - 1, (options.batch,), generator=draw).tolist()
            window = torch.stack([seen[start : start + options.length + 1] for start in starts])
            loss = model(window[:, :-1], window[:, 1:])
            loss.backward()
            for master, parameter in zip(masters, parameters, strict=True):
                master.grad, parameter.grad = parameter.grad.float() if parameter.grad is not None else None, None
            torch.nn.utils.clip_grad_norm_(masters, 1.0)
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                torch._foreach_copy_(parameters, masters)
            losses.append(loss.detach())
            marks.append(_mark(self.device))
        return torch.stack(losses).float().tolist(), _times_between(marks)

    def _held_out_loss(self, data: Tensor) -> float:
        """The mean loss of all windows side by side, in the arm's own precision."""
        options = self.options
        count = (len(data) - 1) // options.length
        if count < 1:
            raise SystemExit(
                f"the last tenth of the text has {len(data)} tokens, less than a window of {options.length}"
            )
        ids = data[: count * options.length].view(count, -1)
        targets = data[1 : count * options.length + 1].view(count, -1)
        losses: list[float] = []
        # Launched one by one: compiling again, for a pass without gradients, would take longer than the pass.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            for at in range(0, count, options.batch):
                part = slice(at, at + options.batch)
                losses.append(float(self.model(ids[part], targets[part])) * len(ids[part]))
        return float(sum(losses) / count)


def rate_share(step: int, steps: int, warm_up: int) -> float:
    """The learning rate of a step, as a share of the highest: up in a line, then down to a tenth along a cosine."""
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / max(steps - warm_up, 1))


def read_text(options: argparse.Namespace) -> tuple[Tensor, int]:
    """(tokens, how many there are to choose from)."""
    text = harness.shipped_text() if options.text is None else Path(options.text).read_text(encoding="utf-8")
    if options.tokenizer is None:
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long(), BYTES
    tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(str(options.tokenizer))
    return torch.tensor(tokenizer.encode(text).ids), tokenizer.get_vocab_size()


def _convert_by_torchao(model: nn.Module, recipe: str) -> int:
    """The layers of the blocks, counted as `apply_fp8` counts them: projections of one input are one."""
    float8: Any = importlib.import_module("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    float8.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: ".layers." in name)
    names = [name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"]
    return sum(not name.endswith(("k_proj", "v_proj", "up_proj")) for name in names)


def _guesses_since(before: dict[str, tuple[int, int, int]]) -> dict[str, dict[str, int]]:
    return {
        role: {name: now - then for name, now, then in zip(GUESSES, counts, before[role], strict=True)}
        for role, counts in guess_counts().items()
    }


def _mark(device: torch.device) -> Any:
    """A moment: on the GPU's own clock, if there is one."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _times_between(marks: list[Any]) -> list[float]:
    if isinstance(marks[0], float):
        return [(end - start) * 1e3 for start, end in pairwise(marks)]
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairwise(marks)]


def main() -> None:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(TRAINED), default="134m", help="tiny: to try the command")
    parser.add_argument("--arms", default=",".join(ARMS), help=f"of {', '.join(ARMS)}")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--warm-up", type=int, default=20, help="steps in which the rate rises to --lr")
    parser.add_argument("--text", default=None, help="a file; without it the text that bitplan ships")
    parser.add_argument("--tokenizer", type=Path, default=None, help="a tokenizer.json; without it bytes")
    parser.add_argument("--recipe", default="tensorwise")
    parser.add_argument("--policy", type=Path, default=None, help="read the policy instead of measuring it")
    parser.add_argument("--threshold", type=float, default=1.0, help="the least speedup for which FP8 is used")
    parser.add_argument("--timing", type=lambda text: text.split(","), default=["graph"], help="eager, graph")
    parser.add_argument("--turns", type=int, default=12, help="of the policy's measurements")
    parser.add_argument("--seconds", type=float, default=1200.0, help="for everything")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--report", type=Path, default=Path("fp8_training_report.jsonl"))
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)  # an arm's process that was started here
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.one is not None:
        serve(options.one, options, device)
        return
    document: dict[str, Any] = {
        "benchmark": "fp8_training",
        "commit": harness.commit(),
        "machine": harness.machine(device.type),
        "versions": harness.versions(),
    }
    result = run_training(options, device, document, started)
    print()
    for run in result["runs"]:
        print(line_of(run))
    for arm, value in result["losses"]["held_out_loss"].items():
        times = result["times_bf16"].get(arm)
        print(
            f"{arm:19} held-out loss {value['mean']:.4f} ({value['low']:.4f} to {value['high']:.4f}), "
            f"{result['tokens_a_second'][arm]:,.0f} tokens/s" + (f", {times:.3f} times BF16" if times else "")
        )
    if result["left_out"]:
        print(f"left out: {'; '.join(result['left_out'])}")


if __name__ == "__main__":
    main()
