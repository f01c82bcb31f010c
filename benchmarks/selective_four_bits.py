"""Do 4-bit formats on the wire, and routing among three formats, beat all-INT8? Fine-tuning with damage in nats.

    python benchmarks/selective_four_bits.py --model lm26m --text shakespeare.txt --workers 4 --limit-s 200
    python benchmarks/selective_four_bits.py --tiny --device cpu      seconds, to see that everything runs

Tasks  lora, lora_fast   adapters on a frozen, streamed base; the second at three times the learning rate
       full, full_fast   all streamed weights, with masters on the host; likewise
Arms   bf16, int8_row, int4_g32, nvfp4, mxfp4, q5_0_gguf, q4_k_gguf: all streamed matrices alike
       Under a byte budget of `--share` of all-INT8's bytes, layer by layer:
       gradient       int4_g32, int8 and bf16, by gradients and calibration errors, decided anew as training goes on
       impact         the same by measured impacts on the loss
       damage         a fixed choice of the three by measured damage in nats (KL), each layer alone
       damage_nvfp4   the same with nvfp4 for int4_g32
       damage_k       the same with q6_k_gguf, q5_k_gguf and q4_k_gguf
       damage_two     the same with bf16 and int4_g32 alone, without the middle
       random         int8 and int4_g32, drawn by the seed: the control
       gradient_k, random_k   the same with q6_k_gguf for int8 and q5_k_gguf for int4_g32 (not unless asked for)
       damage_k_rounded, q5_k_rounded   the formats of damage_k, or q5_k_gguf alone, over a frozen base whose weights
                      were rounded to these formats by error compensation (`round_weight`; not unless asked for)
nvfp4 and GGUF's formats have no encoder on CPUs that keeps up with training, so they are for frozen bases only.

Per arm and seed: held-out loss in the formats of the arm at its end, and the bytes to the device a step, counted by the
stream. Seeds change adapters and batches, not the model or the held-out text. An arm is within BF16's spread where its
mean is not above the worst of BF16's seeds. Several processes share the device, so no times are taken.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import harness
import torch
from safetensors.torch import load_file, save_file
from selective_precision import (
    BLOCKS,
    SMALL,
    LowRank,
    Row,
    Sizes,
    Task,
    Text,
    add_adapters,
    byte_llama,
    matrices,
    spread_of,
    train,
    update_interval,
    validate,
    windows,
)
from torch import Tensor, nn
from torch.nn import functional

import bitplan
from bitplan.formats import get_format
from bitplan.rounding import round_weight
from bitplan.rounding.error_compensation import InputHessian
from bitplan.streaming.block_layout import ParameterSpec, lay_out
from bitplan.streaming.selective.config import SelectivePrecisionConfig
from bitplan.streaming.selective.decide import RungCandidate, choose_rungs
from bitplan.streaming.selective.gradient_statistics import rounding_error
from bitplan.streaming.selective.run_calibration import run_calibration
from bitplan.streaming.selective.training_policy import SelectivePrecisionPolicy
from bitplan.streaming.transfer.devices import CudaDevice, SimulatedDevice, StreamDevice

PLAIN = ("bf16", "int8_row", "int4_g32", "nvfp4", "mxfp4", "q5_0_gguf", "q4_k_gguf")
ROUNDED_ARMS = ("damage_k_rounded", "q5_k_rounded")
K_ARMS = ("gradient_k", "random_k", *ROUNDED_ARMS)
K_FORMATS = ("q6_k_gguf", "q5_k_gguf", "q4_k_gguf")
ROUTED = ("gradient", "impact", "damage", "damage_nvfp4", "damage_k", "damage_two", "random")
SLOW_ENCODERS = ("nvfp4", "q5_0_gguf", "q4_k_gguf", "damage_nvfp4", "damage_k")
FEW = ("bf16", "int8_row", "int4_g32", "q5_0_gguf", "gradient", "damage", "damage_k", "random")
MEASURED = ("int8_row", "int4_g32", "nvfp4", "mxfp4", "q6_k_gguf", "q5_k_gguf", "q4_k_gguf", "q5_0_gguf")
ARMS = {
    "lora": [*PLAIN, *ROUTED],
    "full": [arm for arm in (*PLAIN, *ROUTED) if arm not in SLOW_ENCODERS],
    "lora_fast": list(FEW),
    "full_fast": [arm for arm in FEW if arm not in SLOW_ENCODERS],
}
CALIBRATION_BATCHES = 8
MODEL = Sizes(lora_steps=60, full_steps=60, batch=8, context=256, validation=64, slots=3, rank=8)
FAST = 3.0


# ---- the model -------------------------------------------------------------------------------------------------------


class Experiment:
    """The model, its text, and the tasks, in one process."""

    def __init__(self, options: argparse.Namespace, sizes: Sizes, device: StreamDevice) -> None:
        self.options, self.sizes, self.device = options, sizes, device
        self.dtype = torch.bfloat16 if device.torch_device.type == "cuda" else torch.float32
        words = harness.shipped_text() if options.text is None else options.text.read_text(encoding="utf-8")
        if options.model is None:
            self.model, ids = byte_llama(sizes, self.dtype), torch.tensor(list(words.encode()))
        else:
            from bitplan.packed.language.causal_lm import load_causal_lm

            loaded = load_causal_lm(options.model)
            self.model, ids = loaded.model.to(self.dtype), loaded.encode(words)
        self.start_from = {name: one.detach().clone() for name, one in self.model.state_dict().items()}
        cut = int(0.9 * len(ids))
        self.text = Text(ids[:0], ids[:cut], ids[cut:])

    def task(self, name: str) -> Task:
        """A task; adapters are made when the first one asks for them, and weights start as they were."""
        kind, _, fast = name.partition("_")
        steps = self.sizes.lora_steps if kind == "lora" else self.sizes.full_steps
        lr = (self.sizes.lora_lr if kind == "lora" else self.sizes.full_lr) * (FAST if fast else 1.0)
        start, trained = (self._lora, "adapters") if kind == "lora" else (self._full, "weights")
        interval = update_interval(steps)
        return Task(name, start, self.text, steps, lr, trained, self.sizes, self.device, interval)

    def _full(self, _seed: int) -> nn.Module:
        self.model.load_state_dict(self.start_from)
        return self.model.requires_grad_(True).train()

    def _lora(self, seed: int) -> nn.Module:
        if not any(isinstance(module, LowRank) for module in self._adapted.modules()):
            add_adapters(self._adapted, self.sizes.rank)
        generator = torch.Generator().manual_seed(seed)
        for module in self._adapted.modules():
            if isinstance(module, LowRank):
                module.reset(generator)
        self.set_base(self._adapted, {})
        return self._adapted.train()

    @torch.no_grad()
    def set_base(self, model: nn.Module, rounded: dict[str, Tensor]) -> None:
        """Give the frozen matrices of a model with adapters these weights, the others those they started with."""
        for name, weight in layers_of(model).items():
            weight.copy_(rounded[name] if name in rounded else self.start_from[f"{name}.weight"])

    @cached_property
    def _adapted(self) -> nn.Module:
        """A model of its own for adapters: they change the names of layers."""
        model = copy.deepcopy(self.model)
        model.load_state_dict(self.start_from)
        return model


def layers_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The streamed matrices by plain name, without the `.base` of adapters and without `.weight`."""
    prefix = BLOCKS.removesuffix("*")
    return {
        name.removesuffix(".weight").removesuffix(".base"): one
        for name, one in model.named_parameters()
        if name.startswith(prefix) and one.ndim == 2 and not name.endswith((".up.weight", ".down.weight"))
    }


# ---- damage in nats --------------------------------------------------------------------------------------------------


@torch.no_grad()
def measure_damage(experiment: Experiment, formats: list[str]) -> Row:
    """Layer -> format -> KL from the whole model, in nats a token, with that layer alone in that format."""
    device, sizes = experiment.device.torch_device, experiment.sizes
    # In float32: the rounding of bfloat16 activations alone is a KL of 2e-4, more than eight bits do to a layer.
    model = copy.deepcopy(experiment.task("full").start(0)).to(device, torch.float32).eval()
    generator = torch.Generator().manual_seed(5)
    ids = windows(experiment.text.train, sizes.batch, sizes.context, generator).to(device)

    def log_probabilities() -> Tensor:
        logits: Tensor = model(input_ids=ids, use_cache=False).logits.float()
        return functional.log_softmax(logits, -1)

    reference = log_probabilities()
    damage: Row = {}
    for name, weight in layers_of(model).items():
        true = weight.detach().clone()
        as_sent = true.to(experiment.dtype)
        damage[name] = {"bytes": {"bfloat16": bytes_of(as_sent, "bfloat16")}}
        for fmt in formats:
            weight.copy_(true - rounding_error(as_sent, fmt))
            distance = functional.kl_div(log_probabilities(), reference, log_target=True, reduction="sum")
            damage[name][fmt] = max(0.0, float(distance) / ids.numel())
            damage[name]["bytes"][fmt] = bytes_of(as_sent, fmt)
        weight.copy_(true)
    return damage


# ---- rounding the frozen base ----------------------------------------------------------------------------------------


@torch.no_grad()
def input_hessians(experiment: Experiment) -> dict[str, Tensor]:
    """X^T X of every streamed matrix, over text that is trained on."""
    device, sizes = experiment.device.torch_device, experiment.sizes
    model = copy.deepcopy(experiment.task("full").start(0)).to(device, torch.float32).eval()
    names, hessians, hooks = set(layers_of(model)), {}, []
    for name, module in model.named_modules():
        if name in names:
            hessians[name] = torch.zeros(module.in_features, module.in_features, device=device)

            def add(_: nn.Module, inputs: tuple[Tensor, ...], total: Tensor = hessians[name]) -> None:
                rows = inputs[0].reshape(-1, total.shape[0]).float()
                total.addmm_(rows.t(), rows)

            hooks.append(module.register_forward_pre_hook(add))
    generator = torch.Generator().manual_seed(7)
    for _ in range(CALIBRATION_BATCHES):
        ids = windows(experiment.text.train, sizes.batch, sizes.context, generator)
        model(input_ids=ids.to(device), use_cache=False)
    for hook in hooks:
        hook.remove()
    return {name: total.cpu() for name, total in hessians.items()}


def rounded_formats(damage: Row, share: float, arms: list[str]) -> dict[str, list[str]]:
    """Layer -> the formats that its weight is rounded to, for these arms."""
    choices = []
    if "damage_k_rounded" in arms:
        choices.append(choose(damage, share, K_FORMATS))
    if "q5_k_rounded" in arms:
        choices.append(dict.fromkeys(damage, "q5_k_gguf"))
    return {name: sorted({one[name] for one in choices} & set(K_FORMATS)) for name in damage}


def round_share(options: argparse.Namespace, experiment: Experiment, damage: Row) -> None:
    """One worker: its share of the layers, rounded by error compensation."""
    number, count = options.worker
    hessians = load_file(options.keep / "hessians.safetensors")
    wanted = rounded_formats(damage, options.share, options.arms)
    done = {}
    for name in sorted(wanted, key=lambda name: hessians[name].shape[0])[number::count]:
        weight = experiment.start_from[f"{name}.weight"].float()
        hessian = InputHessian(hessians[name])
        for fmt in wanted[name]:
            encoded = round_weight(weight, fmt, hessian=hessian)
            done[f"{name}:{fmt}"] = bitplan.decode(encoded, torch.float32).to(experiment.dtype)
    save_file(done, options.keep / f"rounded_{number}.safetensors")


def rounded_weights(options: argparse.Namespace, formats: dict[str, str]) -> dict[str, Tensor]:
    """Layer -> its rounded weight in this choice of formats; layers in bfloat16 are not rounded."""
    stored = {}
    for path in sorted(options.keep.glob("rounded_*.safetensors")):
        stored.update(load_file(path))
    return {name: stored[f"{name}:{fmt}"] for name, fmt in formats.items() if fmt in K_FORMATS}


def bytes_of(weight: Tensor, fmt: str) -> int:
    """What crosses the bus for this matrix."""
    spec = {"weight": ParameterSpec(tuple(weight.shape), weight.dtype)}
    return lay_out(spec, {"weight": get_format(fmt)}).pieces["weight"].nbytes


def choose(damage: Row, share: float, lows: tuple[str, ...]) -> dict[str, str]:
    """Layer -> format: of bfloat16 and `lows`, the least damage within the byte budget."""
    limit = int(share * sum(row["bytes"]["int8_row"] for row in damage.values()))
    units = [
        RungCandidate(
            name,
            {fmt: row["bytes"][fmt] for fmt in ("bfloat16", *lows)},
            {"bfloat16": 0.0} | {fmt: row[fmt] for fmt in lows},
            "bfloat16",
        )
        for name, row in damage.items()
    ]
    return dict(choose_rungs(units, limit).precisions)


def draw(damage: Row, share: float, seed: int, high: str, low: str) -> dict[str, str]:
    """Layers in random order go to the low format until the bytes fit; the others have the high one."""
    limit = share * sum(row["bytes"]["int8_row"] for row in damage.values())
    left, formats = sum(row["bytes"][high] for row in damage.values()), dict.fromkeys(damage, high)
    for name in random.Random(seed).sample(sorted(damage), len(damage)):
        if left > limit:
            formats[name] = low
            left -= damage[name]["bytes"][high] - damage[name]["bytes"][low]
    return formats


# ---- arms ------------------------------------------------------------------------------------------------------------


def fixed_formats(arm: str, model: nn.Module, damage: Row, share: float, seed: int) -> dict[str, str] | None:
    """The format of every streamed matrix by plain name; None: the arm decides as it goes."""
    if arm in PLAIN:
        chosen = dict.fromkeys(layers_of(model), "bfloat16" if arm == "bf16" else arm)
    elif arm == "q5_k_rounded":
        chosen = dict.fromkeys(damage, "q5_k_gguf")
    elif arm == "random":
        chosen = draw(damage, share, seed, "int8_row", "int4_g32")
    elif arm == "random_k":
        chosen = draw(damage, share, seed, "q6_k_gguf", "q5_k_gguf")
    elif arm in ("gradient", "impact", "gradient_k"):
        return None
    else:
        lows = {
            "damage": ("int8_row", "int4_g32"),
            "damage_nvfp4": ("int8_row", "nvfp4"),
            "damage_k": K_FORMATS,
            "damage_two": ("int4_g32",),
        }[arm.removesuffix("_rounded")]
        chosen = choose(damage, share, lows)
    return chosen


def by_own_names(chosen: dict[str, str], model: nn.Module) -> dict[str, str]:
    full = {id(one): name for name, one in model.named_parameters()}
    return {full[id(one)]: chosen[name] for name, one in layers_of(model).items()}


def policy_config(arm: str, task: Task, damage: Row, share: float) -> SelectivePrecisionConfig:
    int8 = sum(row["bytes"]["int8_row"] for row in damage.values())
    bf16 = sum(row["bytes"]["bfloat16"] for row in damage.values())
    return SelectivePrecisionConfig(
        telemetry_enabled=False,
        log_decisions=False,
        scoring=arm.removesuffix("_k"),
        granularity="layer",
        low_precisions=("int8", "int4"),
        int8_format="q6_k_gguf" if arm.endswith("_k") else "int8_row",
        int4_format="q5_k_gguf" if arm.endswith("_k") else "int4_g32",
        byte_share=share * int8 / bf16,
        update_interval_steps=task.interval,
        warmup_steps=task.interval,
        min_steps_between_switches=task.interval,
        impact_turns=1,
    )


def run_one(experiment: Experiment, task: Task, arm: str, seed: int, damage: Row) -> Row:
    share = experiment.options.share
    model = task.start(seed)
    chosen_formats = fixed_formats(arm, model, damage, share, seed)
    formats = None if chosen_formats is None else by_own_names(chosen_formats, model)
    if arm in ROUNDED_ARMS and chosen_formats is not None:
        experiment.set_base(model, rounded_weights(experiment.options, chosen_formats))
    started = time.perf_counter()
    with ExitStack() as stack:
        lines = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "steps.jsonl"
        stream = stack.enter_context(task.stream(model, telemetry=lines, formats=formats))
        policy = None
        if formats is None:
            generator = torch.Generator().manual_seed(5)
            batches = [
                {
                    "input_ids": windows(task.text.train, task.sizes.batch, task.sizes.context, generator),
                    "use_cache": False,
                }
                for _ in range(2)
            ]
            config = policy_config(arm, task, damage, share)
            lows = [config.int8_format, config.int4_format]
            calibration = run_calibration(stream, batches, formats=lows, samples=len(batches), progress=False)
            policy = stack.enter_context(SelectivePrecisionPolicy(stream, config, calibration=calibration))
        losses, _ = train(task, stream, policy, model, seed)
        stream.synchronize()
        own = validate(model, task.validation(), task.sizes.batch)
        chosen = stream.formats
        steps = [json.loads(line) for line in lines.read_text().splitlines()][-task.steps :]
    weights = matrices(chosen, model)
    counts = {fmt: sum(chosen[name] == fmt for name in weights) for fmt in {chosen[name] for name in weights}}
    return {
        "task": task.name,
        "arm": arm,
        "seed": seed,
        "lr": task.lr,
        "validation_loss": own,
        "train_loss_first": losses[0],
        "train_loss_last": statistics.mean(losses[-5:]),
        "bytes_h2d_per_step": statistics.mean(step["bytes_h2d"] for step in steps),
        "layers_by_format": dict(sorted(counts.items())),
        "seconds": time.perf_counter() - started,
    }


# ---- several processes -----------------------------------------------------------------------------------------------


def jobs(options: argparse.Namespace) -> list[tuple[str, str, int]]:
    """What matters most first: a run that is cut short has whole tasks."""
    arms = {task: options.arms or ARMS[task] for task in options.tasks}
    return [(task, arm, seed) for task in options.tasks for seed in range(options.seeds) for arm in arms[task]]


def work(options: argparse.Namespace, sizes: Sizes, device: StreamDevice) -> None:
    """One worker: its share of the jobs, a row at a time, until the time is up."""
    number, count = options.worker
    torch.set_num_threads(1)
    experiment = Experiment(options, sizes, device)
    damage = json.loads((options.keep / "damage.json").read_text())
    if options.round:
        round_share(options, experiment, damage)
        return
    with (options.keep / f"rows_{number}.jsonl").open("a", encoding="utf-8") as file:
        for task, arm, seed in jobs(options)[number::count]:
            if time.time() > options.until:
                print(f"worker {number}: the time is up before {task} {arm} seed {seed}", flush=True)
                return
            try:
                row = run_one(experiment, experiment.task(task), arm, seed, damage)
            except Exception as error:  # the other arms go on; the result names this one
                traceback.print_exc()
                row = {"task": task, "arm": arm, "seed": seed, "failure": f"{type(error).__name__}: {error}"}
                file.write(json.dumps(row) + "\n")
                continue
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(
                f"{task:<9} {arm:<13} seed {seed}  loss {row['validation_loss']:.4f}"
                f"  {row['bytes_h2d_per_step'] / 1e6:.2f} MB a step  {row['seconds']:.1f} s",
                flush=True,
            )


def start_workers(options: argparse.Namespace, started: float, *more: str) -> list[int]:
    """Run all workers, and wait for them."""
    running = []
    for number in range(options.workers):
        command = [sys.executable, *sys.argv, "--worker", str(number), str(options.workers), *more]
        command += ["--keep", str(options.keep), "--until", str(started + options.limit_s)]
        running.append(subprocess.Popen(command))
    codes = [process.wait() for process in running]
    if any(codes):
        print(f"workers ended with exit codes {codes}", flush=True)
    return codes


def run(options: argparse.Namespace, sizes: Sizes, device: StreamDevice) -> Row:
    started = time.time()
    with tempfile.TemporaryDirectory() as folder:
        options.keep = options.keep or Path(folder)
        options.keep.mkdir(parents=True, exist_ok=True)
        for fmt in ("int8_row", "int4_g32", "mxfp4"):  # compiled once, before several processes want them
            bitplan.encode(torch.zeros(64, 64, dtype=torch.bfloat16), fmt)
            bitplan.encode(torch.zeros(64, 64), fmt)
        experiment = Experiment(options, sizes, device)
        damage = measure_damage(experiment, list(MEASURED))
        (options.keep / "damage.json").write_text(json.dumps(damage))
        print(f"damage measured after {time.time() - started:.1f} s", flush=True)
        if set(options.arms or ()) & set(ROUNDED_ARMS):
            save_file(input_hessians(experiment), options.keep / "hessians.safetensors")
            start_workers(options, started, "--round")
            print(f"the base is rounded after {time.time() - started:.1f} s", flush=True)
        del experiment
        codes = start_workers(options, started)
        files = sorted(options.keep.glob("rows_*.jsonl"))
        rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    kind = device.torch_device.type
    failures = [row for row in rows if "failure" in row]
    rows = [row for row in rows if "failure" not in row]
    return {
        "benchmark": "selective_four_bits",
        "machine": harness.machine(kind),
        "versions": harness.versions(),
        "commit": harness.commit(),
        "simulated": kind != "cuda",
        "sizes": {key: value for key, value in vars(sizes).items() if key != "cost"},
        "share_of_int8": options.share,
        "damage": damage,
        "rows": sorted(rows, key=lambda row: (row["task"], row["arm"], row["seed"])),
        "arms": summarize(rows),
        "failures": failures,
        "exit_codes": codes,
    }


def summarize(rows: list[Row]) -> list[Row]:
    result = []
    for task, arms in ARMS.items():
        by_arm: dict[str, dict[int, Row]] = {}
        for row in rows:
            if row["task"] == task:
                by_arm.setdefault(row["arm"], {})[row["seed"]] = row
        bf16 = {seed: row["validation_loss"] for seed, row in by_arm.get("bf16", {}).items()}
        int8 = [row["bytes_h2d_per_step"] for row in by_arm.get("int8_row", {}).values()]
        for arm in (*arms, *K_ARMS):
            mine = by_arm.get(arm, {})
            common = sorted(set(mine) & set(bf16))
            if not common or not int8:
                continue
            losses = spread_of([mine[seed] for seed in common], bf16)
            sent = statistics.mean(mine[seed]["bytes_h2d_per_step"] for seed in common)
            result.append(
                {
                    "task": task,
                    "arm": arm,
                    **losses,
                    "bf16_max": max(bf16.values()),
                    "is_within_bf16": losses["loss_mean"] <= max(bf16.values()),
                    "bytes_h2d_per_step": sent,
                    "int8_over_this": statistics.mean(int8) / sent,
                    "layers_by_format": mine[common[0]]["layers_by_format"],
                }
            )
    return result


def show(document: Row) -> None:
    print("task      arm          seeds  loss (lowest to highest)  above bf16 (spread)   within  MB/step  int8/this")
    for row in document["arms"]:
        print(
            f"{row['task']:<9} {row['arm']:<13} {row['seeds']}      {row['loss_mean']:.4f} ({row['loss_min']:.4f} to "
            f"{row['loss_max']:.4f})  {row['above_bf16_mean']:+.4f} ({row['above_bf16_min']:+.4f} to "
            f"{row['above_bf16_max']:+.4f})  {'yes' if row['is_within_bf16'] else 'no ':<6} "
            f"{row['bytes_h2d_per_step'] / 1e6:7.2f}  {row['int8_over_this']:.2f}"
        )
    for row in document["failures"]:
        print(f"FAILED {row['task']} {row['arm']} seed {row['seed']}: {row['failure']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    parser.add_argument("--model", type=Path, help="a causal language model; without it a small one over bytes")
    parser.add_argument("--text", type=Path, help="plain text; default: the text that bitplan ships")
    parser.add_argument("--tasks", type=lambda names: names.split(","), default=list(ARMS), help=", ".join(ARMS))
    parser.add_argument("--arms", type=lambda names: names.split(","), help="some of the arms alone")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.7, help="of all-INT8's bytes, for the arms with a budget")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--limit-s", type=float, default=3600.0, help="no run starts later than this")
    parser.add_argument("--keep", type=Path, help="a folder that keeps every row")
    for field in ("lora-steps", "full-steps", "batch", "context", "validation"):
        parser.add_argument(f"--{field}", type=int)
    parser.add_argument("--lora-lr", type=float)
    parser.add_argument("--full-lr", type=float)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--round", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if set(options.arms or ()) & set(ROUNDED_ARMS) and any(task.startswith("full") for task in options.tasks):
        parser.error("arms over a rounded base are for frozen bases; add --tasks lora,lora_fast")
    small = replace(SMALL, hidden=256, layers=4, lora_steps=4, full_steps=4, batch=2, context=16)
    given: dict[str, Any] = {
        key: value for key, value in vars(options).items() if key in vars(MODEL) and value is not None
    }
    sizes = replace(small if options.tiny else MODEL, **given)
    device: StreamDevice = CudaDevice("cuda") if options.device == "cuda" else SimulatedDevice()
    if options.worker is not None:
        work(options, sizes, device)
        return
    document = run(options, sizes, device)
    name = "selective_four_bits_" + (document["machine"].get("gpu", "simulated").lower().replace(" ", "_"))
    print(harness.save(name, document, options.output))
    show(document)


if __name__ == "__main__":
    main()
