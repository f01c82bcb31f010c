"""Does one plan over a run pay? A llama from scratch, streamed: all BF16, and by `RunController`, three seeds each.

    python benchmarks/run_controller.py                     on a GPU, about two minutes
    python benchmarks/run_controller.py --tiny --device cpu     seconds, to see that everything runs

Sizes  lm26m   hidden 512, 7 layers: 22 million weights in its blocks
       wide    hidden 2048, 3 layers: 182 million weights
Arms   bf16        transformers' model, its blocks trained on the host (`train="weights"`), sent in BF16
       controlled  the same with `apply_fp8` and a `RunController`

A first run of the controlled arm, which is not counted, compiles the kernels and times what may be low; those times are
what the counted runs go by. A seed draws the same weights and batches in both arms. Held-out loss is that of the text's
last tenth at the end; the text is bytes that come with the package. `ms` is the mean of the steps between the first
decision and the final part, `whole_ms` that of the whole run with all measuring; beside both the ratio to bf16's of the
same seed. How many steps there are follows from --seconds.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import traceback
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from bitplan.fp8.apply import apply_fp8
from bitplan.report import TrainingLog, write_report
from bitplan.streaming.block_stream import stream_blocks
from bitplan.streaming.selective.run_controller import RunController, RunSettings
from bitplan.streaming.training.adamw import AdamWSettings
from bitplan.streaming.transfer.devices import CudaDevice, SimulatedDevice, StreamDevice

SEEDS = (0, 1, 2)
WARM_STEPS = 6
Row = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A model, its batches, and its share of the time."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    layers: int
    rows: int
    length: int
    lr: float
    share: float = 0.5

    def model(self) -> LlamaForCausalLM:
        config = LlamaConfig(
            vocab_size=256, hidden_size=self.hidden, intermediate_size=self.ffn, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, max_position_embeddings=self.length,
            tie_word_embeddings=True,
        )  # fmt: skip
        return LlamaForCausalLM(config).to(torch.bfloat16)


SIZES = {
    "lm26m": Shape(512, 1536, 8, 4, 7, 64, 512, 1e-3, 0.45),
    "wide": Shape(2048, 8192, 16, 4, 3, 32, 1024, 4e-4, 0.55),
}
TINY = {"lm26m": Shape(128, 256, 4, 2, 2, 2, 32, 3e-3)}


class Text:
    def __init__(self, shape: Shape, device: torch.device) -> None:
        data = torch.frombuffer(bytearray(harness.shipped_text().encode()), dtype=torch.uint8).long()
        cut = len(data) * 9 // 10
        self.trained, self.held, self.shape, self.device = data[:cut], data[cut:], shape, device

    def batch(self, seed: int, step: int, rows: int) -> Tensor:
        random = torch.Generator().manual_seed(1_000_003 * seed + step)
        starts = torch.randint(len(self.trained) - self.shape.length, (rows,), generator=random)
        return torch.stack([self.trained[at : at + self.shape.length] for at in starts.tolist()]).to(self.device)

    def windows(self, most: int) -> list[Tensor]:
        whole = self.held[: len(self.held) // self.shape.length * self.shape.length].view(-1, self.shape.length)
        return list(whole[:most].to(self.device).split(max(1, self.shape.rows // 2)))


def loss_of(model: Any, batch: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def train(
    arm: str,
    shape: Shape,
    device: StreamDevice,
    seed: int,
    steps: int,
    folder: Path,
    times: dict[str, float] | None = None,
    slots: Any = 3,
) -> Row:
    """One run, and what came of it."""
    text = Text(shape, device.torch_device)
    torch.manual_seed(seed)
    model: Any = shape.model()
    fp8 = None
    if arm == "controlled":
        on_gpu = device.torch_device.type == "cuda"
        model = model.to(device.torch_device)
        where: dict[str, Any] = {"recipe": "tensorwise", "emulate": not on_gpu}
        fp8 = apply_fp8(model, None, tokens=shape.rows * shape.length, **where)
        model = model.cpu()
    label = f"{arm} seed {seed}"
    log_path, run_path = folder / f"{label}.training.jsonl", folder / f"{label}.run.jsonl"
    optimizer = AdamWSettings(lr=shape.lr, weight_decay=0.01)
    with (
        stream_blocks(
            model, "model.layers.*", device=device, slots=slots, train="weights", optimizer=optimizer
        ) as stream,
        TrainingLog(log_path, run=label) as log,
    ):
        assert stream.training is not None
        rest = [one for name, one in model.named_parameters() if not name.startswith("model.layers.")]
        own = torch.optim.AdamW(rest, lr=shape.lr, weight_decay=0.01, fused=device.torch_device.type == "cuda")
        few = max(1, shape.rows // 8)
        control = None
        if arm == "controlled":
            settings = RunSettings(
                total_steps=steps, final_share=0.1, timing_steps=4, groups=2, measure_every=max(50, steps // 2),
                feedback_every=max(1, steps // 4), loss_tolerance=0.02,
            )  # fmt: skip
            control = RunController(
                stream, settings, probe=lambda number: loss_of(model, text.batch(9, number, few)), log=run_path,
                times=times,
            )  # fmt: skip
        handle: Any = control or stream
        ended, losses = [], []
        stream.synchronize()
        began = time.perf_counter()
        for step in range(steps):
            rate = min(1.0, (step + 1) / 10) * (1 - 0.9 * step / steps)
            stream.training.lr = shape.lr * rate
            own.param_groups[0]["lr"] = shape.lr * rate
            handle.begin_step(step)
            loss = loss_of(model, text.batch(seed, step, shape.rows))
            loss.backward()
            own.step()
            own.zero_grad()
            handle.end_step()
            losses.append(loss.detach())
            ended.append(time.perf_counter())
        stream.synchronize()
        whole = time.perf_counter() - began
        for step, loss in enumerate(losses):
            log.write(step, float(loss))
        model.eval()
        with torch.no_grad():
            held = statistics.mean(float(loss_of(model, one)) for one in text.windows(96))
        first = 3 if control is None or times is not None else steps // 2
        last = steps if control is None else min(steps, settings.final_from)
        each = [after - before for before, after in pairwise(ended[first - 1 : last])]
        row: Row = {
            "arm": arm, "seed": seed, "steps": steps, "loss": round(held, 5), "train_loss": round(float(losses[-1]), 5),
            "ms": round(statistics.mean(each) * 1e3, 3), "median_ms": round(statistics.median(each) * 1e3, 3),
            "whole_ms": round(whole / steps * 1e3, 3), "slots": slots,
        }  # fmt: skip
        if stream.stats.last is not None:
            row["last_step"] = {
                key: round(getattr(stream.stats.last, key), 3)
                for key in ("step_ms", "compute_ms", "stall_ms", "copy_ms", "bytes_h2d")
            }
        if control is not None:
            changes = {name: one["reason"] for name, one in control.state.reasons.items()}
            row |= {"times": control.times, "noise": control.state.noise, "impacts": control.state.impacts}
            row |= {"records": control.state.records, "locked": control.state.locked, "reasons": changes}
            row["fp8_layers"] = str(fp8).splitlines()[0]
            control.close()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return row


def low_share(path: Path, steps: int) -> dict[str, float]:
    """Of all rows of each part and all steps, how many were low."""
    from bitplan.plan.from_records import read_run_log

    log = read_run_log(path)
    low: dict[str, float] = {}
    for name, row in log.rows.items():
        part, now, since, total = name.rpartition(".")[2], row["format"], 0, 0
        for one in [one for one in log.changes if one.name == name]:
            total += (one.step - since) * (now != row["format"])
            now, since = one.to, one.step
        total += (steps - since) * (now != row["format"])
        blocks = sum(other.endswith(f".{part}") for other in log.rows)
        low[part] = low.get(part, 0.0) + total / steps / blocks
    return {part: round(share, 4) for part, share in low.items()}


def summary(rows: list[Row]) -> Row:
    """Means, the seeds' spread, and ratios by seed."""
    arms = {arm: {row["seed"]: row for row in rows if row["arm"] == arm} for arm in ("bf16", "controlled")}
    both = sorted(set(arms["bf16"]) & set(arms["controlled"]))
    if not both:
        return {}
    result: Row = {"seeds": both}
    for arm, by_seed in arms.items():
        losses = [by_seed[seed]["loss"] for seed in both]
        result[arm] = {
            "loss_mean": round(statistics.mean(losses), 5),
            "loss_min_max": [min(losses), max(losses)],
            **{key: round(statistics.mean(by_seed[seed][key] for seed in both), 3) for key in ("ms", "whole_ms")},
        }
    apart = [arms["controlled"][seed]["loss"] - arms["bf16"][seed]["loss"] for seed in both]
    result["loss_apart"] = {"mean": round(statistics.mean(apart), 5), "by_seed": [round(one, 5) for one in apart]}
    for key in ("ms", "median_ms", "whole_ms"):
        ratios = [arms["bf16"][seed][key] / arms["controlled"][seed][key] for seed in both]
        result[f"speed_{key}"] = {
            "mean": round(statistics.mean(ratios), 4),
            "by_seed": [round(one, 4) for one in ratios],
        }
    return result


def measure_size(
    name: str, shape: Shape, device: StreamDevice, budget: float, folder: Path, save: Any, deadline: float
) -> Row:
    """All runs of one size; a run that would not end by the deadline is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    result: Row = {"shape": vars(shape), "rows": [], "errors": []}
    save(name, result)
    try:
        started = time.perf_counter()
        warm = train("bf16", shape, device, 90, WARM_STEPS, folder)
        first = train("controlled", shape, device, 91, 50, folder)
        result["first_run"] = {"times": first["times"], "seconds": round(time.perf_counter() - started, 1)}
        steps = int(budget / (len(SEEDS) * 2.3 * min(warm["ms"], warm["median_ms"]) / 1e3))
        steps = max(24, min(steps, 400))
        save(name, result)
        longest = 0.0
        for seed in SEEDS:
            for arm in ("bf16", "controlled"):
                times = first["times"] if arm == "controlled" else None
                now = time.perf_counter()
                if now + longest > deadline:
                    result["errors"].append(f"{arm} of seed {seed} was left out: no time")
                    continue
                row = train(arm, shape, device, seed, steps, folder, times)
                longest = max(longest, time.perf_counter() - now)
                if arm == "controlled":
                    row["low_share"] = low_share(folder / f"{arm} seed {seed}.run.jsonl", steps)
                result["rows"].append(row)
                result["summary"] = summary(result["rows"])
                save(name, result)
                shown = {key: value for key, value in row.items() if key not in ("impacts", "reasons")}
                print(name, json.dumps(shown), flush=True)
        if time.perf_counter() + longest > deadline:
            return result
        (folder / "resident").mkdir(exist_ok=True)
        result["bf16_with_slots_auto"] = train("bf16", shape, device, 0, 24, folder / "resident", slots="auto")
    except Exception as error:
        traceback.print_exc()
        result["errors"].append(f"{type(error).__name__}: {error}"[:500])
    save(name, result)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    parser.add_argument("--sizes", type=lambda names: names.split(","))
    parser.add_argument("--seconds", type=float, default=80, help="of training, for all sizes")
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds after which no run is begun")
    parser.add_argument("--folder", type=Path, default=Path("run_controller"), help="where logs and the page go")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    device: StreamDevice = CudaDevice("cuda") if arguments.device == "cuda" else SimulatedDevice()
    table = TINY if arguments.tiny else SIZES
    document: Row = {
        "benchmark": "run_controller",
        "command": harness.command(),
        "machine": harness.machine(arguments.device),
        "versions": harness.versions(),
        "commit": harness.commit(),
        "simulated": arguments.device != "cuda",
        "sizes": {},
    }
    name = "run_controller_" + document["machine"].get("gpu", "simulated").lower().replace(" ", "_")

    def save(size: str, result: Row) -> None:
        document["sizes"][size] = result
        harness.save(name, document, arguments.output)

    began, given = time.perf_counter(), 0.0
    for size in arguments.sizes or list(table):
        shape = table[size]
        given += shape.share
        folder = arguments.folder / size
        measure_size(
            size, shape, device, arguments.seconds * shape.share, folder, save, began + arguments.deadline * given
        )
        pages = [*sorted(folder.glob("*seed 0.*.jsonl")), *sorted(folder.glob("*seed [12].training.jsonl"))]
        if pages:
            write_report(pages, folder / "report.html", title=f"One plan over a run: {size}")
        print(size, json.dumps(document["sizes"][size].get("summary"), indent=1), flush=True)


if __name__ == "__main__":
    main()
