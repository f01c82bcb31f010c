"""Does routing precision by sensitivity pay? Fine-tuning in seven arms, and what the statistics cost.

    python benchmarks/selective_precision.py --model SMOLLM2.gguf --text wikitext2_valid.txt
    python benchmarks/selective_precision.py --part cost
    python benchmarks/selective_precision.py --part times --into RESULT.json --model SMOLLM2.gguf --text ...
    python benchmarks/selective_precision.py --tiny --device cpu      seconds, to see that everything runs

Tasks  (a) lora  SmolLM2-135M (`--model`, a folder or a GGUF file), adapters on a frozen, streamed base
       (b) full  a small llama over bytes, trained from scratch on the text, then all its streamed weights fine-tuned
Arms   bf16, int8_row, int8_groups (int8_g128; where a row is no multiple of 128, q8_0_gguf), fp8_row: all blocks alike
       static            the half of the blocks that calibration finds worst bf16, the others int8_row
       dynamic_gradient  scores of gradients with calibration
       dynamic_impact    impact on the loss, per layer, under a damage budget
Per arm and seed: validation loss with the formats of the arm at its end, and with everything in bf16; bytes to the
device a step; step time. Seeds change adapters and batches, not the model or the validation text.

The text is cut in three: pretraining of (b), fine-tuning of both, validation. `--part cost` times steps of the
streaming benchmark's model with the policy off, with the gradient score's statistics, and with impacts, in turns.

With `--together` losses and bytes are those of arms that shared the GPU, and times are taken alone: after an interval
of updates that is not counted, over whole intervals of the real run's length, so that what is done once an interval has
its share. `wall_ms_per_step` is their mean; `step_ms`, the median, leaves it out. `--part times` takes only these, and
puts them into a result that is there.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import harness
import torch
from llama_stack import FULL, TINY, LlamaStack, Size
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from bitplan.streaming.block_stream import BlockStream, stream_blocks
from bitplan.streaming.selective.calibration import CalibrationResult, run_calibration
from bitplan.streaming.selective.config import SelectivePrecisionConfig
from bitplan.streaming.selective.training_policy import SelectivePrecisionPolicy
from bitplan.streaming.training.adamw import AdamWSettings
from bitplan.streaming.transfer.devices import CudaDevice, SimulatedDevice, StreamDevice

ARMS = ("bf16", "int8_row", "int8_groups", "fp8_row", "static", "dynamic_gradient", "dynamic_impact")
BLOCKS = "model.layers.*"
Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    lora_steps: int = 60
    full_steps: int = 120
    pretrain_steps: int = 600
    batch: int = 4
    context: int = 256
    validation: int = 32  # windows
    hidden: int = 256
    layers: int = 6
    slots: int = 3
    rank: int = 8
    lora_lr: float = 1e-3
    full_lr: float = 3e-4
    budget: float = 0.01
    repeats: int = 3
    cost_tokens: int = 4096
    cost: Size = FULL


SMALL = Sizes(
    lora_steps=6, full_steps=6, pretrain_steps=4, batch=2, context=16, validation=2, hidden=128, layers=3, slots=2,
    rank=2, repeats=1, cost_tokens=8, cost=replace(TINY, blocks=3),
)  # fmt: skip


# ---- models and text -------------------------------------------------------------------------------------------------


class LowRank(nn.Module):
    """A frozen linear layer with a trained low-rank path beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=base.weight.dtype)

    def reset(self, generator: torch.Generator) -> None:
        drawn = torch.randn(self.down.weight.shape, generator=generator) / math.sqrt(self.base.in_features)
        self.down.weight.data.copy_(drawn)
        self.up.weight.data.zero_()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


def add_adapters(model: nn.Module, rank: int) -> None:
    model.requires_grad_(False)
    for block in model.get_submodule("model.layers").children():
        for name, module in list(block.named_modules()):
            if isinstance(module, nn.Linear):
                parent, _, local = name.rpartition(".")
                setattr(block.get_submodule(parent), local, LowRank(module, rank))


def byte_llama(sizes: Sizes, dtype: torch.dtype) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=sizes.hidden,
        intermediate_size=3 * sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=sizes.context,
        tie_word_embeddings=False,
    )
    model: nn.Module = LlamaForCausalLM(config).to(dtype)
    return model


@dataclass(frozen=True)
class Text:
    """Token ids in three parts."""

    pretrain: Tensor
    train: Tensor
    validation: Tensor

    @classmethod
    def cut(cls, ids: Tensor, context: int) -> Text:
        first, second = int(0.6 * len(ids)), int(0.9 * len(ids))
        text = cls(ids[:first], ids[first:second], ids[second:])
        if min(map(len, (text.pretrain, text.train, text.validation))) <= context + 1:
            raise SystemExit(f"the text has {len(ids)} tokens, too few for a context of {context}")
        return text


def windows(ids: Tensor, count: int, context: int, generator: torch.Generator | None) -> Tensor:
    """Random windows, or without a generator evenly spaced ones."""
    room = len(ids) - context
    if generator is None:
        starts = torch.linspace(0, room - 1, count).long()
    else:
        starts = torch.randint(room, (count,), generator=generator)
    return ids[starts[:, None] + torch.arange(context)]


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


@torch.no_grad()
def validate(model: nn.Module, validation: Tensor, batch: int) -> float:
    model.eval()
    losses = [loss_of(model, part) * len(part) for part in validation.split(batch)]
    model.train()
    return float(torch.stack(losses).sum()) / len(validation)


# ---- tasks -----------------------------------------------------------------------------------------------------------


@dataclass
class Task:
    """One model to fine-tune: `start(seed)` gives it as at the beginning, on the host."""

    name: str
    start: Callable[[int], nn.Module]
    text: Text
    steps: int
    lr: float
    train: str
    sizes: Sizes
    device: StreamDevice
    interval: int  # steps between updates of a policy
    untimed_steps: int = 0  # at the beginning: they compile kernels

    def shortened(self, timed_steps: int) -> Task:
        """The same training for the clock: an interval to warm up, then whole intervals, at least two."""
        intervals = max(2, -(-timed_steps // self.interval))
        few = replace(self.sizes, validation=self.sizes.batch)
        return replace(self, steps=self.interval * (1 + intervals), sizes=few, untimed_steps=self.interval)

    def stream(self, model: nn.Module, **options: Any) -> BlockStream:
        if self.train == "weights":
            options["optimizer"] = AdamWSettings(lr=self.lr)
        return stream_blocks(model, BLOCKS, device=self.device, train=self.train, slots=self.sizes.slots, **options)  # type: ignore[arg-type]

    def batches(self, seed: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(1000 + seed)
        for _ in range(self.steps):
            ids = windows(self.text.train, self.sizes.batch, self.sizes.context, generator)
            yield ids.to(self.device.torch_device, non_blocking=True)

    def validation(self) -> Tensor:
        ids = windows(self.text.validation, self.sizes.validation, self.sizes.context, None)
        return ids.to(self.device.torch_device)

    def calibrate(self) -> CalibrationResult:
        """Once per task: on the model as it starts."""
        generator = torch.Generator().manual_seed(5)
        samples = [
            {"input_ids": windows(self.text.train, self.sizes.batch, self.sizes.context, generator), "use_cache": False}
            for _ in range(2)
        ]
        with self.stream(self.start(0)) as stream:
            return run_calibration(stream, samples, formats=["int8_row", "fp8_e4m3_row"], progress=False)


def lora_task(model_path: Path, words: str, sizes: Sizes, device: StreamDevice, dtype: torch.dtype) -> Task:
    from bitplan.packed.checkpoints.causal_lm import load_causal_lm

    loaded = load_causal_lm(model_path)
    ids = loaded.encode(words)
    model = loaded.model.to(dtype)
    add_adapters(model, sizes.rank)

    def start(seed: int) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        for module in model.modules():
            if isinstance(module, LowRank):
                module.reset(generator)
        return model.train()

    steps, text = sizes.lora_steps, Text.cut(ids, sizes.context)
    return Task("lora", start, text, steps, sizes.lora_lr, "adapters", sizes, device, update_interval(steps))


def full_task(text: str, sizes: Sizes, device: StreamDevice, dtype: torch.dtype, start_from: Path) -> Task:
    """`start_from`: keeps the pretrained model, so that arms in several processes and sittings start from the same."""
    cut = Text.cut(torch.tensor(list(text.encode()), dtype=torch.int64), sizes.context)
    if start_from.exists():
        pretrained = load_file(start_from)
    else:
        pretrained = pretrain(cut, sizes, device.torch_device)
        save_file(pretrained, start_from)

    def start(_seed: int) -> nn.Module:
        model = byte_llama(sizes, dtype)
        model.load_state_dict(pretrained)
        return model.train()

    steps = sizes.full_steps
    return Task("full", start, cut, steps, sizes.full_lr, "weights", sizes, device, update_interval(steps))


def update_interval(steps: int) -> int:
    """Twelve updates in a run."""
    return max(1, steps // 12)


def pretrain(text: Text, sizes: Sizes, device: torch.device) -> dict[str, Tensor]:
    """The byte model from scratch, in float32, resident."""
    model = byte_llama(sizes, torch.float32).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=sizes.pretrain_steps + 1)
    generator = torch.Generator().manual_seed(3)
    for _ in range(sizes.pretrain_steps):
        loss = loss_of(model, windows(text.pretrain, 4 * sizes.batch, sizes.context, generator).to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    print(f"pretrained for {sizes.pretrain_steps} steps, last loss {float(loss.detach()):.3f}", flush=True)
    return {name: one.detach().cpu() for name, one in model.state_dict().items()}


# ---- arms ------------------------------------------------------------------------------------------------------------


def plain_formats(arm: str, model: nn.Module) -> dict[str, str]:
    """The formats of an arm that treats all blocks alike, by parameter."""
    whole = {"bf16": "bfloat16", "int8_row": "int8_row", "fp8_row": "fp8_e4m3_row"}
    result = {}
    for name, one in model.named_parameters():
        if (
            name.startswith("model.layers.")
            and one.ndim == 2
            and ".up.weight" not in name
            and ".down.weight" not in name
        ):
            result[name] = whole.get(arm) or ("int8_g128" if one.shape[1] % 128 == 0 else "q8_0_gguf")
    return result


def policy_config(arm: str, task: Task, calibration: CalibrationResult) -> SelectivePrecisionConfig:
    base = SelectivePrecisionConfig(telemetry_enabled=False, log_decisions=False)
    interval = task.interval
    quick = {"update_interval_steps": interval, "warmup_steps": interval, "min_steps_between_switches": 2 * interval}
    if arm == "static":
        errors = {name: row["int8_row"] for name, row in calibration.blocks.items()}
        worst = sorted(errors, key=lambda name: -errors[name])[: len(errors) // 2]
        others = tuple(name for name in errors if name not in worst)
        return replace(base, mode="static", force_bf16_blocks=tuple(worst), force_int8_blocks=others)
    if arm == "dynamic_gradient":
        return replace(base, **quick)  # type: ignore[arg-type]
    return replace(
        base,
        scoring="impact",
        granularity="layer",
        damage_budget=task.sizes.budget,
        impact_turns=1,  # a dozen updates is too few to take turns
        **quick,  # type: ignore[arg-type]
    )


def run_arm(task: Task, arm: str, seed: int, calibration: CalibrationResult) -> Row:
    model = task.start(seed)
    with ExitStack() as stack:
        lines = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "steps.jsonl"
        is_plain = arm in ("bf16", "int8_row", "int8_groups", "fp8_row")
        streamed = {} if not is_plain else known_formats(plain_formats(arm, model), task)
        stream = stack.enter_context(task.stream(model, telemetry=lines, formats=streamed or None))
        policy = None
        if not is_plain:
            config = policy_config(arm, task, calibration)
            policy = stack.enter_context(SelectivePrecisionPolicy(stream, config, calibration=calibration))
        losses, elapsed_s = train(task, stream, policy, model, seed)
        stream.synchronize()
        validation = task.validation()
        own = validate(model, validation, task.sizes.batch)
        formats = stream.formats
        stream.set_formats(dict.fromkeys(matrices(formats, model), "bfloat16"))
        stream.begin_step(task.steps)
        in_bf16 = validate(model, validation, task.sizes.batch)
        steps = [json.loads(line) for line in lines.read_text().splitlines()]
    weights = matrices(formats, model)
    shares = {fmt: sum(formats[name] == fmt for name in weights) / len(weights) for fmt in set(formats.values())}
    return {
        "task": task.name,
        "arm": arm,
        "seed": seed,
        "validation_loss": own,
        "validation_loss_bf16": in_bf16,
        "train_losses": losses,
        "bytes_h2d_per_step": statistics.mean(step["bytes_h2d"] for step in steps),
        "step_ms": statistics.median(step["step_ms"] for step in steps[task.untimed_steps :]),
        "wall_ms_per_step": elapsed_s * 1e3 / (task.steps - task.untimed_steps),
        "share_by_format": {fmt: share for fmt, share in sorted(shares.items()) if share},
    }


def known_formats(formats: dict[str, str], task: Task) -> dict[str, str]:
    """Adapters are not streamed: a format for them would name nothing."""
    return {name: fmt for name, fmt in formats.items() if task.train == "weights" or ".base." in name}


def matrices(formats: dict[str, str], model: nn.Module) -> list[str]:
    """Streamed matrices, by full name."""
    parameters = dict(model.named_parameters())
    return [name for name in formats if parameters[name].ndim == 2]


def train(
    task: Task, stream: BlockStream, policy: SelectivePrecisionPolicy | None, model: nn.Module, seed: int
) -> tuple[list[float], float]:
    streamed = {id(one.parameter) for block in stream.blocks for one in block.parameters.values()}
    resident = [one for one in model.parameters() if one.requires_grad and id(one) not in streamed]
    optimizer = torch.optim.AdamW(resident, lr=task.lr)
    losses: list[Tensor] = []
    started = time.perf_counter()
    for step, ids in enumerate(task.batches(seed)):
        if step and step == task.untimed_steps:
            float(losses[-1])  # waits for the device
            started = time.perf_counter()
        (policy or stream).begin_step(step)
        loss = loss_of(model, ids)
        loss.backward()
        if policy is not None:
            policy.collect_block_grad_stats()
            policy.compute_hints(step)
        optimizer.step()
        optimizer.zero_grad()
        (policy or stream).end_step()
        losses.append(loss.detach())
    result = torch.stack(losses).tolist()  # waits for the device
    return result, time.perf_counter() - started


def run_experiment(tasks: list[Task], seeds: int, arms: Sequence[str], stored: Path | None = None) -> list[Row]:
    """`stored`: a file of rows, one a line; what is in it is not run again, and each new row is added at once."""
    rows = stored_rows(stored)
    done = {(row["task"], row["arm"], row["seed"]) for row in rows}
    for task in tasks:
        wanted = [(arm, seed) for arm in arms for seed in range(seeds) if (task.name, arm, seed) not in done]
        calibration = task.calibrate() if wanted else None
        for arm, seed in wanted:
            if calibration is not None:
                rows.append(run_arm(task, arm, seed, calibration))
                if stored is not None:
                    with stored.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
                print(
                    f"{task.name} {arm:<16} seed {seed}  loss {rows[-1]['validation_loss']:.4f}"
                    f"  {rows[-1]['bytes_h2d_per_step'] / 1e6:.2f} MB a step  {rows[-1]['step_ms']:.1f} ms",
                    flush=True,
                )
                gc.collect()
    return rows


def stored_rows(stored: Path | None) -> list[Row]:
    if stored is None or not stored.exists():
        return []
    return [json.loads(line) for line in stored.read_text(encoding="utf-8").splitlines()]


def summarize(rows: list[Row]) -> list[Row]:
    """Per task and arm: mean and spread over seeds, and the loss against bf16, seed by seed."""
    result = []
    for task in dict.fromkeys(row["task"] for row in rows):
        reference = {
            row["seed"]: row["validation_loss"] for row in rows if row["task"] == task and row["arm"] == "bf16"
        }
        for arm in dict.fromkeys(row["arm"] for row in rows):
            mine = [row for row in rows if row["task"] == task and row["arm"] == arm]
            result.append(
                {
                    "task": task,
                    "arm": arm,
                    **spread_of(mine, reference),
                    "loss_bf16_mean": statistics.mean(row["validation_loss_bf16"] for row in mine),
                    "bytes_h2d_per_step": statistics.mean(row["bytes_h2d_per_step"] for row in mine),
                    "step_ms": statistics.median(row["step_ms"] for row in mine),
                    "wall_ms_per_step": statistics.median(row["wall_ms_per_step"] for row in mine),
                }
            )
    return result


def spread_of(rows: Sequence[Row], bf16: Mapping[int, float]) -> Row:
    """The losses of an arm: how many seeds, mean and spread, and the same against bf16's of the same seeds."""
    losses = [row["validation_loss"] for row in rows]
    apart = [row["validation_loss"] - bf16[row["seed"]] for row in rows]
    return {
        "seeds": len(rows),
        "loss_mean": statistics.mean(losses),
        "loss_min": min(losses),
        "loss_max": max(losses),
        "above_bf16_mean": statistics.mean(apart),
        "above_bf16_min": min(apart),
        "above_bf16_max": max(apart),
    }


# ---- cost ------------------------------------------------------------------------------------------------------------


def run_cost(sizes: Sizes, device: StreamDevice) -> Row:
    """Steps of the streaming benchmark's model under three policies that never switch, in turns of one interval."""
    size, tokens = sizes.cost, sizes.cost_tokens
    model = LlamaStack(size)
    rows = max(1, tokens // size.sequence)
    x = torch.randn(rows, size.sequence, size.hidden, dtype=size.dtype).to(device.torch_device).requires_grad_()
    never = SelectivePrecisionConfig(telemetry_enabled=False, warmup_steps=2**30)
    configs = {
        "off": replace(never, mode="off"),
        "gradient": never,
        # Before its first update everything is measured, which is in the turn that is not counted.
        "impact": replace(never, scoring="impact", granularity="layer", warmup_steps=1, damage_budget=1e-30),
    }
    interval = never.update_interval_steps
    samples: dict[str, list[float]] = {name: [] for name in configs}
    with ExitStack() as stack:
        stream = stack.enter_context(stream_blocks(model, "layers.*", device=device, slots=3))
        policies = {name: stack.enter_context(SelectivePrecisionPolicy(stream, one)) for name, one in configs.items()}
        optimizer = torch.optim.AdamW(model.adapters, lr=1e-4)
        for turn in range(sizes.repeats + 1):
            for name, policy in policies.items():
                elapsed_ms = _time_steps(policy, model, optimizer, x, turn * interval, interval)
                if turn:  # the first turn compiles kernels
                    samples[name].append(elapsed_ms / interval)
        direct_ms = _time_statistics(policies["gradient"], model, x, (sizes.repeats + 1) * interval)
    off = statistics.median(samples["off"])
    return {
        "tokens": tokens,
        "step_ms": {name: {"median": statistics.median(result), "all": result} for name, result in samples.items()},
        "share": {name: statistics.median(samples[name]) / off - 1 for name in ("gradient", "impact")},
        "statistics_ms": direct_ms,
        "statistics_share": direct_ms / off,
        "limit": 0.005,
    }


def _time_steps(
    policy: SelectivePrecisionPolicy,
    model: LlamaStack,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    at: int,
    count: int,
) -> float:
    _wait(x)
    started = time.perf_counter()
    for step in range(at, at + count):
        policy.begin_step(step)
        model(x).float().square().mean().backward()
        policy.collect_block_grad_stats()
        policy.compute_hints(step)
        optimizer.step()
        optimizer.zero_grad()
        policy.end_step()
    _wait(x)
    return (time.perf_counter() - started) * 1e3


def _time_statistics(
    policy: SelectivePrecisionPolicy, model: LlamaStack, x: Tensor, at: int, repeats: int = 20
) -> float:
    """The statistics alone, on gradients that are there: what the device takes for them in a step."""
    policy.begin_step(at)
    model(x).float().square().mean().backward()
    adapters = policy.units.adapters()
    gradients = {name: [one.grad for one in result] for name, result in adapters.items()}

    def collect() -> None:
        policy.collector.add(gradients)
        policy.collector.end_step(0)

    collect()
    _wait(x)
    if x.is_cuda:
        result = harness.time_in_turns({"collect": collect}, repeats, cuda=True)["collect"]
    else:
        result = harness.time_in_turns({"collect": collect}, repeats)["collect"]
    policy.end_step()
    return statistics.median(result)


def _wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


# ---- the whole -------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace, sizes: Sizes, device: StreamDevice) -> Row:
    kind = device.torch_device.type
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    text = harness.shipped_text() if options.text is None else options.text.read_text(encoding="utf-8")
    if options.part == "times":
        return take_times(options, device, text, dtype)
    parts = {"experiment", "cost"} if options.part == "all" else {options.part}
    document: Row = {
        "benchmark": "selective_precision",
        "machine": harness.machine(kind),
        "versions": harness.versions(),
        "commit": harness.commit(),
        "simulated": kind != "cuda",
        "sizes": {key: value for key, value in vars(sizes).items() if key != "cost"},
        "dtype": str(dtype).removeprefix("torch."),
    }
    if "experiment" in parts:
        document |= _experiment(options, sizes, device, text, dtype)
    if "cost" in parts:
        document["cost"] = run_cost(sizes, device)
    return document


def _experiment(options: argparse.Namespace, sizes: Sizes, device: StreamDevice, text: str, dtype: torch.dtype) -> Row:
    with _tasks(options, sizes, device, text, dtype) as (tasks, keep):
        if not options.together:
            stored = keep / f"{'+'.join(options.arms)}.jsonl"
            rows = run_experiment(tasks, options.seeds, options.arms, stored)
            return {"rows": rows, "arms": summarize(rows) if "bf16" in options.arms else []}
        rows = _together(options, keep)
        # Losses and bytes do not mind sharing the GPU; times do, and are taken alone.
        return with_times({"rows": rows}, run_alone(tasks, options.arms, options.timed_steps))


@contextmanager
def _tasks(
    options: argparse.Namespace, sizes: Sizes, device: StreamDevice, text: str, dtype: torch.dtype
) -> Iterator[tuple[list[Task], Path]]:
    """The tasks, and the folder that keeps what they start from."""
    with tempfile.TemporaryDirectory() as folder:
        keep = options.keep or Path(folder)
        keep.mkdir(parents=True, exist_ok=True)
        tasks = [] if options.model is None else [lora_task(options.model, text, sizes, device, dtype)]
        tasks.append(full_task(text, sizes, device, dtype, keep / "pretrained.safetensors"))
        yield tasks, keep


def run_alone(tasks: list[Task], arms: Sequence[str], timed_steps: int) -> Row:
    """Times of every task and arm with the GPU to itself, and how they were taken."""
    short = [task.shortened(timed_steps) for task in tasks]
    return {
        "steps": {task.name: task.steps - task.untimed_steps for task in short},
        "interval": {task.name: task.interval for task in short},
        "commit": harness.commit(),
        "rows": run_experiment(short, 1, arms),
    }


def with_times(document: Row, times: Row) -> Row:
    """The document with these times instead of those it has; tasks and arms without new ones keep theirs."""
    alone = {(row["task"], row["arm"]): row for row in times["rows"]}
    rows = [
        row | {key: alone.get((row["task"], row["arm"]), row)[key] for key in ("step_ms", "wall_ms_per_step")}
        for row in document["rows"]
    ]
    message = {key: value for key, value in times.items() if key != "rows"}
    message["arms"] = sorted({row["arm"] for row in times["rows"]})
    stored = {key: value for key, value in document.items() if key != "timed_steps"}
    return stored | {"rows": rows, "arms": summarize(rows), "times": message}


def take_times(options: argparse.Namespace, device: StreamDevice, text: str, dtype: torch.dtype) -> Row:
    """A result that is there, with times taken now; its sizes are those of its run, its losses and bytes stay."""
    document: Row = json.loads(options.into.read_text(encoding="utf-8"))
    given = {key: value for key, value in document["sizes"].items() if key in vars(Sizes())}
    arms = [arm for arm in options.arms if any(row["arm"] == arm for row in document["rows"])]
    with _tasks(options, replace(SMALL if options.tiny else Sizes(), **given), device, text, dtype) as (tasks, _):
        result = {row["task"] for row in document["rows"]}
        if result - {task.name for task in tasks}:
            raise SystemExit(f"{options.into} has the tasks {', '.join(sorted(result))}: --model names that of lora")
        times = run_alone([task for task in tasks if task.name in result], arms, options.timed_steps)
    return with_times(document, times | {"machine": harness.machine(device.torch_device.type)})


def _together(options: argparse.Namespace, keep: Path) -> list[Row]:
    """Every arm in a process of its own, all at once: a small model leaves the GPU waiting for the host."""
    running = {}
    for arm in options.arms:
        command = [sys.executable, *sys.argv, "--part", "experiment", "--alone", "--arms", arm]
        command += ["--keep", str(keep), "--output", str(keep / f"{arm}.json")]
        running[arm] = subprocess.Popen(command)
    rows = []
    for arm, process in running.items():
        if process.wait():
            raise SystemExit(f"arm {arm} failed with exit code {process.returncode}")
        rows += stored_rows(keep / f"{arm}.jsonl")
    return rows


def show(document: Row) -> None:
    if "arms" in document:
        print(
            "task  arm             loss (spread)            above bf16 (spread)         in bf16  MB/step  ms/step  wall"
        )
    for row in document.get("arms", []):
        print(
            f"{row['task']:<5} {row['arm']:<15} {row['loss_mean']:.4f} ({row['loss_min']:.4f}..{row['loss_max']:.4f})"
            f"  {row['above_bf16_mean']:+.4f} ({row['above_bf16_min']:+.4f}..{row['above_bf16_max']:+.4f})"
            f"  {row['loss_bf16_mean']:.4f}  {row['bytes_h2d_per_step'] / 1e6:8.2f} {row['step_ms']:8.1f}"
            f" {row['wall_ms_per_step']:6.1f}"
        )
    if "cost" in document:
        cost = document["cost"]
        times = ", ".join(f"{name} {row['median']:.2f} ms" for name, row in cost["step_ms"].items())
        print(f"cost at {cost['tokens']} tokens a step: {times}")
        for name, share in cost["share"].items():
            print(f"  {name}: {share:+.2%} of a step (limit {cost['limit']:.1%})")
        print(f"  statistics alone: {cost['statistics_ms']:.3f} ms, {cost['statistics_share']:.3%} of a step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("experiment", "cost", "times", "all"), default="all")
    parser.add_argument("--into", type=Path, help="with --part times: the result whose times are taken again")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    parser.add_argument("--model", type=Path, help="SmolLM2-135M, a folder or a GGUF file; without it only task (b)")
    parser.add_argument("--text", type=Path, help="plain text; default: the text that bitplan ships")
    parser.add_argument("--seeds", type=int, default=3)
    for field in ("lora-steps", "full-steps", "pretrain-steps", "batch", "context", "repeats", "cost-tokens"):
        parser.add_argument(f"--{field}", type=int)
    parser.add_argument("--arms", type=lambda names: names.split(","), default=list(ARMS), help=", ".join(ARMS))
    parser.add_argument("--together", action="store_true", help="a process for each arm; times are taken apart, alone")
    parser.add_argument("--alone", dest="together", action="store_false")
    parser.add_argument(
        "--timed-steps", type=int, default=10, help="the least steps that times are taken over; whole intervals"
    )
    parser.add_argument("--keep", type=Path, help="a folder that keeps every row; a run that was cut goes on from it")
    parser.add_argument("--budget", type=float, help="damage budget of dynamic_impact, in units of loss")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.device == "cpu" and not arguments.tiny:
        parser.error("--device cpu goes with --tiny: the simulated device measures nothing")
    if (arguments.part == "times") != (arguments.into is not None):
        parser.error("--part times and --into go together: it puts times into a result that is there")
    sizes = SMALL if arguments.tiny else Sizes()
    given = {key: value for key, value in vars(arguments).items() if key in vars(sizes) and value is not None}
    sizes = replace(sizes, **given)
    device: StreamDevice = CudaDevice("cuda") if arguments.device == "cuda" else SimulatedDevice()
    document = measure(arguments, sizes, device)
    name = "selective_precision_" + (document["machine"].get("gpu", "simulated").lower().replace(" ", "_"))
    print(harness.save(name, document, arguments.output or arguments.into))
    show(document)


if __name__ == "__main__":
    main()
