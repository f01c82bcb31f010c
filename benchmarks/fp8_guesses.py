"""Which guess of a gradient's FP8 scale is seldom wrong? Rules compared on the gradients of a training run.

    python benchmarks/fp8_guesses.py [--steps 60] [--series FILE]

A small llama trains on a CPU, and in every step the scale that the definition gives the gradient of each layer is
recorded, as an exponent of two; once with embeddings of deviation 1, where training is smooth, and once with 0.02,
where gradients jump by factors of 100. More can be read: a list of steps, each a list of exponents in the order of the
backward, the upper layers first. The inputs of layers without a norm in front are recorded too, and have rules of their
own. Then each rule guesses, step by step:

    room        how many octaves a scale may be above the definition's before the cast is repeated
    wrong ones  a wrong guess becomes the nearest scale that will do, or the middle of the room
    drift       a guess moves as far as the gradient cast before it, that of the layer above, has just moved

A guess that is too small would saturate, and one that is too large would lose more octaves than the room has: either is
cast again, which costs time and no precision. What room costs is the mean of the octaves above the definition.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
from fp8_training import rate_share
from llama_layers import Size, TinyLlama
from torch import Tensor, nn

from bitplan.fp8.casts import FP8_LIMITS

SIZE, LAYERS = Size(64, 256, 1, 1, 64), 18
BATCH, LENGTH = 4, 128
FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "fc1", "up_proj": "fc1"}


@dataclass(frozen=True)
class Rule:
    room: int
    middle: bool = False
    drift: bool = False


RULES = (
    Rule(0),
    Rule(3),
    Rule(5),
    Rule(5, middle=True),
    Rule(3, middle=True, drift=True),
    Rule(4, middle=True, drift=True),
    Rule(5, middle=True, drift=True),
    Rule(6, middle=True, drift=True),
)


INPUT_RULES = (
    Rule(0),
    Rule(1),
    Rule(2, middle=True),
    Rule(3, middle=True),
    Rule(3, middle=True, drift=True),
    Rule(4, middle=True),
)
GUESSED_INPUTS = ("o_proj", "down_proj")  # the others are cast behind their norm, by the definition's scale


def record(steps: int, deviation: float) -> tuple[list[list[int]], list[list[int]]]:
    """Exponents of the definition's scales: [steps][gradients in the order of the backward], [steps][inputs]."""
    torch.manual_seed(0)
    data = torch.frombuffer(bytearray(harness.shipped_text().encode()), dtype=torch.uint8).long()
    model = TinyLlama(SIZE, LAYERS, 256).train()
    with torch.no_grad():
        model.embed_tokens.weight.mul_(deviation)
    largest: dict[str, float] = {}
    of_inputs: dict[str, float] = {}

    def see_input(name: str, _module: nn.Module, inputs: tuple[Tensor]) -> None:
        of_inputs[name] = float(inputs[0].detach().abs().max())

    def see(name: str, _module: nn.Module, _inputs: Any, outputs: tuple[Tensor]) -> None:
        largest[name] = max(largest.get(name, 0.0), float(outputs[0].detach().abs().max()))

    for name, module in model.model.named_modules():
        if isinstance(module, nn.Linear):
            where, _, last = name.rpartition(".")
            module.register_full_backward_hook(partial(see, f"{where}.{FUSED.get(last, last)}"))
            if last in GUESSED_INPUTS:
                module.register_forward_pre_hook(partial(see_input, name))
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(rate_share, steps=steps, warm_up=steps // 3))
    draw = torch.Generator().manual_seed(1000)
    series: list[Any] = []
    inputs: list[Any] = []
    for _ in range(steps):
        starts = torch.randint(0, len(data) - LENGTH - 1, (BATCH,), generator=draw).tolist()
        window = torch.stack([data[start : start + LENGTH + 1] for start in starts])
        optimizer.zero_grad()
        largest.clear()
        model(window[:, :-1], window[:, 1:]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        for kept, maxima in ((series, largest), (inputs, of_inputs)):
            kept.append([math.ceil(math.log2(amax / FP8_LIMITS["e4m3"])) for amax in maxima.values()])
    return series, inputs


def simulate(series: list[list[int]], rule: Rule) -> dict[str, float]:
    """Shares of the casts after the first step: guesses that were too small, and too large; mean octaves above."""
    last = series[0]
    used = [right + (rule.room // 2 if rule.middle else 0) for right in last]
    casts = too_small = too_large = above = 0
    for step in series[1:]:
        moved = 0
        for place, right in enumerate(step):
            guess = used[place] + (moved if rule.drift else 0)
            casts, too_small, too_large = (
                casts + 1,
                too_small + (guess < right),
                too_large + (guess > right + rule.room),
            )
            if not right <= guess <= right + rule.room:
                nearest = min(max(guess, right), right + rule.room)
                guess = right + rule.room // 2 if rule.middle else nearest
            moved, used[place] = right - last[place], guess
            above += guess - right
        last = step
    return {"too_small": too_small / casts, "too_large": too_large / casts, "octaves_above": above / casts}


def _rows(runs: dict[str, list[list[int]]], rules: tuple[Rule, ...]) -> list[dict[str, Any]]:
    return [{"run": name, **asdict(rule), **simulate(series, rule)} for name, series in runs.items() for rule in rules]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--series", type=Path, default=None, help="exponents that were recorded elsewhere, as one more run"
    )
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    recorded = {"smooth": record(options.steps, 1.0), "jumps": record(options.steps, 0.02)}
    runs = {name: gradients for name, (gradients, _) in recorded.items()}
    inputs = {f"inputs, {name}": each for name, (_, each) in recorded.items()}
    if options.series is not None:
        runs[options.series.stem] = json.loads(options.series.read_text())
    rows = _rows(runs, RULES)
    input_rows = _rows(inputs, INPUT_RULES)
    head = {"benchmark": "fp8_guesses", "commit": harness.commit(), "machine": harness.machine("cpu")}
    document = head | {"versions": harness.versions(), "rows": rows, "exponents": runs}
    document |= {"input_rows": input_rows, "input_exponents": inputs}
    for row in rows + input_rows:
        wrong = row["too_small"] + row["too_large"]
        what = f"room {row['room']}{', middle' if row['middle'] else ''}{', drift' if row['drift'] else ''}"
        print(
            f"{row['run']:14} {what:24} wrong {wrong:6.1%}: too small {row['too_small']:6.1%}, "
            f"too large {row['too_large']:6.1%}; octaves above {row['octaves_above']:.2f}"
        )
    print(harness.save("fp8_guesses", document, options.output))


if __name__ == "__main__":
    main()
