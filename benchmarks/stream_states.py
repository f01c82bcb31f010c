"""Losses of training with states in little memory: moments in 8 bits, masters in 16 bits beside a BF16 weight.

    python benchmarks/stream_states.py --text TEXT                     three seeds of a small llama from scratch
    python benchmarks/stream_states.py --text TEXT --model FOLDER      fine-tunes that model as well
    ... --seeds 6 --width 64 --layers 2 --rows 4                       more seeds of a smaller one, in less time

Every arm has the same start, batches and rates; weights are BF16 numbers, gradients are rounded to BF16 as they cross
the bus, products are float32. Steps are those of `TrainedWeight`, as in a stream.

    float32           float32 masters and moments: the arm that counts
    float32 again     the same at a rate that is higher by a millionth: how far runs come apart by themselves
    int8              `StreamOptions(moments="int8")`
    int8 beside       float32's run, with moments in 8 bits beside its own that get the same gradients: the error of the
                      updates they would make, by either moment and by both
    bitsandbytes      its AdamW8bit on float32 masters, where it is installed
    gradients ...     float32 states, gradients in 8 bits (blocks of 256, scale of the largest): to nearest, at random,
                      or to nearest with what rounding lost added to the next gradient (error feedback)

An arm is good if its mean differs from float32's by less than the standard error of the pairs.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from bitplan.streaming.find_blocks import StreamedParameter
from bitplan.streaming.options import SMALLEST_IN_8_BITS
from bitplan.streaming.training.adamw import AdamWSettings, SmallMoments
from bitplan.streaming.training.optimizers import HostOptimizer
from bitplan.streaming.training.trained_weight import MomentFormat, TrainedWeight

GRADIENT_BLOCK = 256
BETAS, EPS = (0.9, 0.999), 1e-8
ROUNDINGS = ("gradients to nearest", "gradients at random", "gradients with error feedback")


class Arm:
    """The weights of a model, trained by one arm."""

    def __init__(self, name: str, model: nn.Module, lr: float) -> None:
        self._parameters = dict(model.named_parameters())
        weights = {key: nn.Parameter(one.detach().bfloat16()) for key, one in self._parameters.items()}
        formats: dict[str, MomentFormat] = {
            key: "int8" if name == "int8" and one.numel() >= SMALLEST_IN_8_BITS else "float32"
            for key, one in weights.items()
        }
        self._weights = {
            key: TrainedWeight(key, StreamedParameter(key, one, ()), formats[key]) for key, one in weights.items()
        }
        self._bf16, self._scratch = weights, torch.empty(2**18)
        self._settings: Any = AdamWSettings(lr=lr * (1 + 1e-6 * (name == "float32 again")), weight_decay=0.01)
        self.beside = Beside() if name == "int8 beside" else None
        if name == "bitsandbytes":
            peer = importlib.import_module("bitsandbytes")
            self._settings = HostOptimizer(peer.optim.AdamW8bit, lr, {"weight_decay": 0.01})
        self._round = rounding(name, weights)
        self.show()

    def show(self) -> None:
        """Give the model the weights, as BF16 numbers."""
        with torch.no_grad():
            for key, one in self._parameters.items():
                self._weights[key].write_back()
                one.copy_(self._bf16[key])

    def step(self, share: float) -> None:
        settings = self._settings.with_lr(self._settings.lr * share)
        for key, one in self._parameters.items():
            assert one.grad is not None
            weight = self._weights[key]
            gradient = self._round(key, one.grad).bfloat16()
            weight.step(gradient, settings, self._scratch)
            if self.beside is not None and one.numel() >= SMALLEST_IN_8_BITS:
                self.beside.step(weight, gradient)
            one.grad = None
        self.show()

    @property
    def bytes_a_weight(self) -> float:
        nbytes = sum(sum(one.host_bytes.values()) for one in self._weights.values())
        return nbytes / sum(one.numel() for one in self._bf16.values())


class Beside:
    """Moments in 8 bits beside float32's, from the same gradients, and how far their updates are from float32's."""

    def __init__(self) -> None:
        self._small: dict[str, SmallMoments] = {}
        self._sums = torch.zeros(4, dtype=torch.float64)

    def step(self, weight: TrainedWeight, gradient: Tensor) -> None:
        """`weight` has taken its step by the gradient."""
        flat = gradient.view(-1).float()
        small = self._small.setdefault(weight.name, SmallMoments.zeros(len(flat)))
        exact = [one.view(-1) for one in weight.read_states().values()]
        first, second = small.read()
        first.lerp_(flat, 1 - BETAS[0])
        second.mul_(BETAS[1]).addcmul_(flat, flat, value=1 - BETAS[1])
        correction = (1 - BETAS[1] ** weight.steps) ** 0.5
        right, *others = (
            mean / (square.sqrt() / correction + EPS)
            for mean, square in (exact, (first, exact[1]), (exact[0], second), (first, second))
        )
        sums = [right.square().sum(), *((one - right).square().sum() for one in others)]
        self._sums += torch.stack(sums).double()
        small.write(first, second, f"{weight.name} {weight.steps}")

    @property
    def errors(self) -> dict[str, float]:
        """Root mean square of the updates' errors, relative to the updates."""
        shares = (self._sums[1:] / self._sums[0]).sqrt().tolist()
        return {name: round(share, 4) for name, share in zip(("first", "second", "both"), shares, strict=True)}


def rounding(name: str, weights: dict[str, nn.Parameter]) -> Callable[[str, Tensor], Tensor]:
    if name not in ROUNDINGS:
        return lambda _key, gradient: gradient
    lost = {key: torch.zeros(one.shape, dtype=torch.bfloat16) for key, one in weights.items()}
    random = torch.Generator().manual_seed(0)

    def in_8_bits(key: str, gradient: Tensor) -> Tensor:
        wanted = gradient + lost[key].float() if name == "gradients with error feedback" else gradient
        flat = wanted.reshape(-1)
        rows = nn.functional.pad(flat, (0, -len(flat) % GRADIENT_BLOCK)).view(-1, GRADIENT_BLOCK)
        scales = rows.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
        up = torch.rand(rows.shape, generator=random) if name == "gradients at random" else 0.5
        sent = ((rows / scales + up).floor() * scales).view(-1)[: len(flat)].view(gradient.shape)
        lost[key] = (wanted - sent).bfloat16()
        return sent

    return in_8_bits


def train(name: str, model: nn.Module, tokens: Tensor, held_out: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """One run; the loss of held-out text at its end."""
    arm, started = Arm(name, model, options["lr"]), time.process_time()
    random = torch.Generator().manual_seed(options["seed"])
    steps, rows, length = options["steps"], options["rows"], options["length"]
    for step in range(steps):
        starts = torch.randint(len(tokens) - length, (rows,), generator=random)
        batch = torch.stack([tokens[start : start + length] for start in starts.tolist()])
        model(input_ids=batch, labels=batch).loss.backward()
        arm.step(min(1.0, (step + 1) / 10) * (1 - step / steps))
    model.eval()
    with torch.no_grad():
        windows = held_out[: len(held_out) // length * length].view(-1, length)[: options["windows"]].split(8)
        losses = [float(model(input_ids=one, labels=one).loss) for one in windows]
    spent = time.process_time() - started
    result = {"arm": name, "seed": options["seed"], "loss": round(statistics.mean(losses), 5)}
    if arm.beside is not None:
        result["errors_of_updates"] = arm.beside.errors
    return {**result, "state_bytes_a_weight": round(arm.bytes_a_weight, 3), "cpu_s": round(spent, 1)}


def table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means by arm, and how far each is from float32's in pairs of one seed, beside the seeds' spread."""
    losses: dict[str, list[float]] = {}
    for row in rows:
        losses.setdefault(row["arm"], []).append(row["loss"])
    base = losses["float32"]
    spread = statistics.stdev(base) if len(base) > 1 else None
    means = {arm: round(statistics.mean(of_arm), 5) for arm, of_arm in losses.items()}
    pairs = {
        arm: [one - other for one, other in zip(of_arm, base, strict=True)]
        for arm, of_arm in losses.items()
        if arm != "float32"
    }
    errors = {arm: statistics.stdev(of_arm) / len(of_arm) ** 0.5 for arm, of_arm in pairs.items() if len(of_arm) > 1}
    return {
        "means": means,
        "apart_from_float32": {arm: round(statistics.mean(of_arm), 5) for arm, of_arm in pairs.items()},
        "standard_error_of_pairs": {arm: round(error, 5) for arm, error in errors.items()},
        "spread_of_seeds": None if spread is None else round(spread, 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--rows", type=int, default=8, help="of 64 bytes, a step")
    parser.add_argument("--windows", type=int, default=64, help="of 64 tokens, whose loss is the held-out loss")
    parser.add_argument("--arms", type=lambda names: names.split(","), help="some of the arms, float32 among them")
    parser.add_argument("--tuning-steps", type=int, default=60)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    text = arguments.text.read_text(encoding="utf-8")
    peer = ["bitsandbytes"] if importlib.util.find_spec("bitsandbytes") else []
    arms = arguments.arms or ["float32", "float32 again", "int8", *peer, *ROUNDINGS]
    scratch_rows, tuning_rows = [], []
    data = torch.tensor(list(text.encode()[:1_000_000]))
    small = LlamaConfig(
        vocab_size=256, hidden_size=arguments.width, intermediate_size=arguments.width * 8 // 3 // 16 * 16,
        num_hidden_layers=arguments.layers, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128,
        tie_word_embeddings=True,
    )  # fmt: skip
    common = {"length": 64, "windows": arguments.windows}
    for seed in range(arguments.seeds):
        for arm in arms:
            torch.manual_seed(seed)
            options = {"lr": 3e-3, "steps": arguments.steps, "rows": arguments.rows, "seed": seed, **common}
            scratch_rows.append(train(arm, LlamaForCausalLM(small), data[:-50_000], data[-50_000:], options))
            print(scratch_rows[-1], flush=True)
    document = {"from_scratch": {**table(scratch_rows), "steps": arguments.steps, "rows": scratch_rows}}
    if arguments.model is not None:
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        ids = torch.tensor(tokenizer(text[:600_000])["input_ids"])
        for seed in range(arguments.seeds):
            for arm in [arm for arm in arms if arm in ("float32", "int8")]:
                model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
                options = {"lr": 2e-4, "steps": arguments.tuning_steps, "rows": 2, "seed": seed, **common}
                tuning_rows.append(train(arm, model, ids[:-8_000], ids[-8_000:], options))
                print(tuning_rows[-1], flush=True)
        document["fine_tuned"] = {**table(tuning_rows), "steps": arguments.tuning_steps, "rows": tuning_rows}
    facts = {"machine": harness.machine("cpu"), "versions": harness.versions(), "commit": harness.commit()}
    print(harness.save("stream_states", {"benchmark": "stream_states", **facts, **document}, arguments.output))


if __name__ == "__main__":
    main()
