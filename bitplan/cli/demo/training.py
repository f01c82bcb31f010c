"""The demo's first part: training with streamed blocks, in precisions that the gradients decide.

The blocks wait on the host and are sent to the device in every step: a CUDA GPU if there is one, else the simulated
device, which is host memory behind the same code, with a bus that is slow, like a GPU's compared with its arithmetic.
The streamed weights are trained on the host, in float32; what changes is the format in which they are sent, and so the
weights that forward and backward compute with.

The policy's thresholds, margin, warm-up and cooldown are its defaults. Two settings fit a small model and a short run:
layers are decided one by one, and scores are checked every five steps instead of ten.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bitplan.cli.demo.tiny_model import Corpus, TinyTransformer
from bitplan.plan.selective.config import SelectivePrecisionConfig
from bitplan.plan.selective.decide import Hints
from bitplan.report import TrainingLog
from bitplan.runtime.selective.training_policy import SelectivePrecisionPolicy
from bitplan.runtime.streaming.stream_blocks import BlockStream, stream_blocks
from bitplan.runtime.streaming.training.adamw_settings import AdamWSettings
from bitplan.runtime.streaming.transfer.devices import SimulatedDevice, StreamDevice

BLOCKS = "blocks.*"
SLOTS = 3
BUS_BYTES_PER_S = 200e6  # of the simulated device: some milliseconds a block, which takes some tens to compute
CONFIG = SelectivePrecisionConfig(granularity="layer", update_interval_steps=5, telemetry_file="precision.jsonl")
LEARNING_RATE, WEIGHT_DECAY, WARMUP = 3e-3, 0.05, 20
VALIDATE_EVERY = 20
Advance = Callable[[int, str], None]


@dataclass(frozen=True)
class Move:
    """A layer that is sent in another precision from the next step on, and the policy's reason."""

    step: int
    layer: str
    before: str
    after: str
    reason: str


def train_streamed(
    model: TinyTransformer,
    batches: list[tuple[Tensor, Tensor]],
    held_out: Tensor,
    output: Path,
    *,
    device: str,
    log_head: dict[str, Any],
    advance: Advance,
) -> dict[str, Any]:
    """Train the model; writes training.jsonl, stream.jsonl and precision.jsonl on the way."""
    settings = AdamWSettings(lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    started = time.perf_counter()
    with (
        TrainingLog(output / "training.jsonl", run="dynamic precision", **log_head) as log,
        stream_blocks(
            model,
            BLOCKS,
            device=open_stream_device(device),
            slots=SLOTS,
            train="weights",
            optimizer=settings,
            telemetry=output / "stream.jsonl",
        ) as stream,
        SelectivePrecisionPolicy(stream, CONFIG, folder=output) as policy,
    ):
        run = _Training(stream, policy, log, held_out)
        # Errors of INT8 in the layers before training: the smaller part of a score.
        advance(0, "measuring INT8's error first")
        policy.calibrate([ids for ids, _ in batches], progress=False)
        for step, (ids, targets) in enumerate(batches):
            loss = run.step(step, ids, targets, len(batches))
            advance(1, f"step {step + 1}/{len(batches)}, loss {loss:.2f}, {run.low_count} layers in INT8")
        stream.synchronize()
        figures = run.figures()
    model.to("cpu").eval()
    return figures | {"device": device, "seconds": round(time.perf_counter() - started, 1)}


class _Training:
    def __init__(
        self, stream: BlockStream, policy: SelectivePrecisionPolicy, log: TrainingLog, held_out: Tensor
    ) -> None:
        self.stream, self.policy, self.log = stream, policy, log
        self.device = stream.device.torch_device
        self.held_out = held_out.to(self.device)
        streamed = {id(one.parameter) for block in stream.blocks for one in block.parameters.values()}
        resident = [one for one in stream.model.parameters() if id(one) not in streamed]
        self.optimizer = torch.optim.AdamW(resident, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        self.losses: list[float] = []
        self.moves: list[Move] = []
        self.hints: Hints = {}
        self.bytes_sent = self.bytes_not_sent = 0

    @property
    def low_count(self) -> int:
        return sum(precision != "bf16" for precision in self.policy.precisions.values())

    def step(self, step: int, ids: Tensor, targets: Tensor, steps: int) -> float:
        """One step of the lifecycle, and its lines."""
        before = dict(self.policy.precisions)
        self.policy.begin_step(step)
        self._count_bytes()
        loss = self._loss(ids.to(self.device), targets.to(self.device))
        loss.backward()
        # Not earlier: the update of the last step may be under way until the block is needed.
        self._set_rate(LEARNING_RATE * rate_shape(step, steps))
        self.policy.collect_block_grad_stats()
        self.hints = self.policy.compute_hints(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        more = {} if step % VALIDATE_EVERY and step + 1 < steps else {"validation_loss": self._validate()}
        self.policy.end_step()
        self.moves += [
            Move(step, name, before[name], hint.precision, hint.reason)
            for name, hint in self.hints.items()
            if hint.changed
        ]
        self.losses.append(float(loss.detach()))
        self.log.write(step, self.losses[-1], **more, learning_rate=self.optimizer.param_groups[0]["lr"])
        return self.losses[-1]

    def _loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.stream.model(ids).flatten(0, 1), targets.flatten())

    def _validate(self) -> float:
        """The loss on held-out text, with the weights and formats of this step."""
        with torch.no_grad():
            return float(self._loss(self.held_out[:, :-1], self.held_out[:, 1:]))

    def _set_rate(self, rate: float) -> None:
        assert self.stream.training is not None
        self.stream.training.lr = rate
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _count_bytes(self) -> None:
        """Count the bytes of sending all matrices once, in the precisions of this step and in bfloat16."""
        for name, sizes in self.policy.unit_bytes.items():
            sent = sizes[self.policy.precisions[name]]
            self.bytes_sent += sent
            self.bytes_not_sent += sizes["bf16"] - sent

    def figures(self) -> dict[str, Any]:
        precisions = self.policy.precisions
        return {
            "steps": len(self.losses),
            "first_loss": self.losses[0],
            "last_loss": self.losses[-1],
            "layers": len(precisions),
            "layers_by_precision": dict(Counter(precisions.values())),
            "moves": [asdict(move) for move in self.moves],
            "stays": {name: hint.reason for name, hint in self.hints.items()},
            "bytes_sent": self.bytes_sent,
            "bytes_not_sent": self.bytes_not_sent,
            "ring_slots": self.stream.stats.ring_slots,
            "blocks": len(self.stream.blocks),
            "thresholds": {
                "bf16_from": CONFIG.bf16_threshold,
                "first_int8_below": CONFIG.int8_threshold,
                "later_int8_below": CONFIG.go_low_below,
                "update_interval_steps": CONFIG.update_interval_steps,
                "min_steps_between_switches": CONFIG.min_steps_between_switches,
            },
        }


def open_stream_device(device: str) -> StreamDevice | str:
    """A GPU by its name; for "cpu" the simulated device with its bus."""
    return SimulatedDevice(bytes_per_s=BUS_BYTES_PER_S) if device == "cpu" else device


def rate_shape(step: int, steps: int) -> float:
    """A warm-up, then a cosine down to a tenth."""
    return min(1.0, (step + 1) / WARMUP) * (0.1 + 0.9 * (1 + math.cos(math.pi * step / steps)) / 2)


def made_batches(corpus: Corpus, steps: int, size: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """The batches of all steps; the same for the same seed."""
    return list(corpus.batches(steps, size, torch.Generator().manual_seed(seed + 1)))
