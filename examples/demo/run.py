"""`make demo`: from nothing to a trained, measured, planned, packed model, and one page that shows all of it.

Parts pass files to each other as everywhere in bitplan: measure, plan, apply. Each file is written when it is ready, so
a run that is stopped leaves complete files of the parts that were done. The same seed gives the same figures; times
differ.

Prints the demo's results: a short table for each part, and one line of explanation.

The demo's second and third part: what formats do to each layer's output, and a search for the best plan of a size.

The manifest is the plan as rules, for `bitplan plan` and `bitplan verify`.

The demo's fourth part: the model saved by its plan and in single formats, loaded again, and measured.

The files themselves are measured: each model is written, read into a new model, and compared with the trained one,
character by character on text that it has not seen.

The demo's fifth part: boosted trees on a synthetic table, with gradients in float32 and in 16-bit integers.

Fits of the two are timed in turns; compiling, which only the first run of an install needs, is timed apart on a few
rows.

The demo's sixth part, where there is a GPU: a layer in FP8, and products with packed weights.

Without a GPU nothing is measured or guessed; `WITHOUT_GPU` says what would be measured.

The demo's first part: training with streamed blocks, in precisions that the gradients decide.

The blocks wait on the host and are sent to the device in every step: a CUDA GPU if there is one, else the simulated
device, which is host memory behind the same code, with a bus that is slow, like a GPU's compared with its arithmetic.
The streamed weights are trained on the host, in float32; what changes is the format in which they are sent, and so the
weights that forward and backward compute with.

The policy's thresholds, margin, warm-up and cooldown are its defaults. Two settings fit a small model and a short run:
layers are decided one by one, and scores are checked every five steps instead of ten.
"""

from __future__ import annotations

import math
import os
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from bitplan.base.errors import FileFormatError, StoreError
from bitplan.base.records import read_json, write_json
from bitplan.cli.show import human_bytes, progress, say, table
from bitplan.files.compare import compare_models
from bitplan.files.drift import DriftLog, DriftRow
from bitplan.files.models.morph import morph_model
from bitplan.files.models.save_load import load_model, write_model
from bitplan.files.open_files import open_tensors
from bitplan.files.quantize_files import quantize_file
from bitplan.formats import Encoded, get_format
from bitplan.formats.dispatch import encode
from bitplan.fp8.bench.layer_bench import BenchOptions, BenchPlan
from bitplan.fp8.bench.session import plan_session, run_session
from bitplan.fp8.policy.merge import summary
from bitplan.packed.crossover import (
    Crossover,
    Fingerprint,
    Timer,
    gpu_fingerprint,
    measure_crossover,
    pick,
    to_document,
)
from bitplan.packed.language.perplexity import CachedLogits, Quality, measure_perplexity
from bitplan.packed.machine import examine_machine
from bitplan.packed.products.fused import fused_for
from bitplan.plan import Manifest, Plan, check_headers
from bitplan.report import TrainingLog, write_report
from bitplan.searching.goal import Goal
from bitplan.searching.run import SearchOptions, SearchResult, search
from bitplan.streaming.block_stream import BlockStream, stream_blocks
from bitplan.streaming.selective.calibration import CalibrationResult, run_calibration
from bitplan.streaming.selective.config import SelectivePrecisionConfig
from bitplan.streaming.selective.decide import Hints
from bitplan.streaming.selective.training_policy import SelectivePrecisionPolicy
from bitplan.streaming.training.adamw import AdamWSettings
from bitplan.streaming.transfer.devices import SimulatedDevice, StreamDevice
from bitplan.trees import BoostedTreesClassifier
from bitplan.trees.gradients import Array
from examples.demo.tiny_model import CONTEXT, Corpus, TinyTransformer, shipped_text

# ---- training --------------------------------------------------------------------------------------------------------


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


# ---- gpu -------------------------------------------------------------------------------------------------------------


WITHOUT_GPU = (
    "there is no CUDA GPU here. With one, this part times the linear layers of an 8B llama's block in BF16 and FP8 at "
    "three token counts, and products with 4-bit weights, fused against decoded"
)
# One block of a llama of 8B parameters.
MODEL = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


@dataclass(frozen=True)
class GpuSizes:
    """What is measured; the defaults take some seconds on a GPU of the H100's class."""

    model: dict[str, Any]
    sweep: tuple[tuple[int, int], ...] = ((256, 1), (2048, 1), (8192, 1))
    iters: int = 10
    timings: tuple[str, ...] = ("graph",)
    formats: tuple[str, ...] = ("mxfp4", "q4_0_gguf")
    side: int = 4096
    rows: tuple[int, ...] = (1, 16, 128, 1024, 4096)


def plan_fp8(output: Path, sizes: GpuSizes, device: str) -> BenchPlan:
    """List what would be timed; writes the model's description to fp8-model.json."""
    described = output / "fp8-model.json"
    write_json(described, sizes.model)
    options = BenchOptions(
        omni_config_path=str(described),
        report_path=str(output / "fp8.jsonl"),
        fp8_policy_path=str(output / "fp8-policy.json"),
        iters=sizes.iters,
        warmup=2,
        shape_sweep=sizes.sweep,
        timings=sizes.timings,
        products_apart=False,
        device=device,
    )
    return plan_session(options, {})


def measure_fp8(plan: BenchPlan, advance: Advance) -> list[dict[str, Any]]:
    """Write times to fp8.jsonl and their policy to fp8-policy.json; returns the policy's summary."""
    result = run_session(plan, on_way=lambda way: advance(1, way.label))
    assert result is not None
    return [] if result.merged is None else summary(result.merged.policy)


def measure_fused(
    output: Path,
    sizes: GpuSizes,
    device: str,
    advance: Advance,
    fingerprint: Fingerprint,
    *,
    timer: Timer | None = None,
) -> list[dict[str, Any]]:
    """Write times of each way to crossover.json; returns the fastest way at each row count."""
    crossovers: dict[tuple[str, int, int], Crossover] = {}
    generator = torch.Generator(device).manual_seed(0)
    for name in sizes.formats:
        numbers = torch.randn(sizes.side, sizes.side, generator=generator, device=device)
        record = measure_crossover(
            encode(numbers, name), fused_for(device), timer=timer, row_counts=sizes.rows, dtype=torch.bfloat16
        )
        crossovers[record.key] = record
        write_json(output / "crossover.json", to_document(crossovers, fingerprint))
        advance(1, name)
    return [_fastest(record, rows) for record in crossovers.values() for rows in sizes.rows]


def _fastest(record: Crossover, rows: int) -> dict[str, Any]:
    timing = record.at(rows)
    times = {way: timing.median_ms(way) for way in ("fused", "decode", "expanded")}
    return {
        "format": record.format,
        "rows": rows,
        "fastest": pick(record, rows, room=True).strategy,
        **{f"{way}_ms": time for way, time in times.items()},
    }


# ---- trees -----------------------------------------------------------------------------------------------------------


PRECISIONS = ("f32", "i16")
FEATURES = 16
WARM_ROWS, WARM_TREES = 2000, 2


def made_table(rows: int, seed: int) -> tuple[Array, Array]:
    """Numbers of several distributions, and a class that depends on products and bands of them; a tenth is noise."""
    rng = np.random.default_rng([seed, FEATURES])
    x = rng.standard_normal((rows, FEATURES)).astype(np.float32)
    x[:, 4:8] = np.exp(0.5 * x[:, 4:8])
    x[:, 8:10] = np.round(2 * x[:, 8:10])
    product: Array = x[:, 0] * x[:, 1]
    wave: Array = np.cos(2 * x[:, 3])
    band: Array = 0.5 * (x[:, 8] > 1)
    score: Array = product + np.abs(x[:, 2])
    score = score - x[:, 4] + band
    score = score - wave * x[:, 5]
    y = score + 0.5 * rng.standard_normal(rows) > np.median(score)
    return x, np.where(rng.random(rows) < 0.1, ~y, y).astype(np.float64)


def boost_twice(
    rows: int, trees: int, repeats: int, seed: int, advance: Advance, output: Path | None = None
) -> list[dict[str, Any]]:
    """One row of figures for each precision; a quarter as many rows again are held out for the AUC.

    The model of the last precision goes to trees-model.json in `output`.
    """
    from sklearn.metrics import roc_auc_score  # type: ignore[import-untyped]

    x, y = made_table(rows + rows // 4, seed)
    compile_s = {}
    for precision in PRECISIONS:
        advance(0, f"compiling {precision}, the first time only")
        started = time.perf_counter()
        _fit(x[:WARM_ROWS], y[:WARM_ROWS], precision, WARM_TREES, seed).decision_function(x[:100])
        compile_s[precision] = time.perf_counter() - started
        advance(1, f"compiled {precision}")
    times: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
    models = {}
    for _ in range(repeats):
        for precision in PRECISIONS:
            started = time.perf_counter()
            models[precision] = _fit(x[:rows], y[:rows], precision, trees, seed)
            times[precision].append(time.perf_counter() - started)
            advance(1, f"{trees} trees in {precision}")
    if output is not None:
        models[PRECISIONS[-1]].save(output / "trees-model.json")
    return [
        {
            "contender": f"bitplan_{precision}",
            "rows": rows,
            "features": FEATURES,
            "trees": trees,
            "seed": seed,
            "train_s": statistics.median(times[precision]),
            "train_s_samples": times[precision],
            "compile_s": compile_s[precision],
            "auc": float(roc_auc_score(y[rows:], models[precision].decision_function(x[rows:]))),
        }
        for precision in PRECISIONS
    ]


def count_fits(repeats: int) -> int:
    """How often `boost_twice` advances."""
    return len(PRECISIONS) * (1 + repeats)


def _fit(x: Array, y: Array, precision: str, trees: int, seed: int) -> BoostedTreesClassifier:
    return BoostedTreesClassifier(n_estimators=trees, gradient_precision=precision, random_state=seed).fit(x, y)


# ---- quality ---------------------------------------------------------------------------------------------------------


REFERENCE = "float32"
BASELINE = "bfloat16"
PLAN = "plan"
FORMATS = (
    BASELINE,
    "fp8_e4m3_row",
    "int8_row",
    "q8_0_gguf",
    "nvfp4",
    "q4_0_gguf",
    "mxfp4",
    "int4",
    "ternary_absmean",
)
CACHED_BYTES = 2**28
BATCH = 32


def model_file(output: Path, name: str) -> Path:
    return output / f"model.{name}.safetensors"


def save_reference(model: nn.Module, output: Path) -> None:
    """Write the trained model as it is."""
    write_model(model, model_file(output, REFERENCE))


def pack_by_plan(output: Path, plan: Plan, manifest: Manifest, step: int) -> list[DriftRow]:
    """Write model.plan.safetensors, check it against the manifest, and log how far each packed weight is off."""
    source, packed = model_file(output, REFERENCE), model_file(output, PLAN)
    quantize_file(source, packed, plan, evidence=output / "evidence.safetensors")
    with open_tensors(packed) as file, open_tensors(source) as masters, DriftLog(output / "drift.jsonl") as log:
        headers = file.specs
        findings = check_headers(manifest, headers)
        if findings:
            raise StoreError(f"{packed}: is not what the manifest says: {findings[0].where}: {findings[0].message}")
        layers = [
            (name, masters.read_float(name), encoded)
            for name in file.specs
            if isinstance(encoded := file.read(name), Encoded) and not encoded.fmt.is_cast
        ]
        return log.add(step, layers)


class DemoComparison:
    """Every saved model against the trained one, on the same windows of text."""

    def __init__(self, model: TinyTransformer, vocabulary: int, windows: Tensor, output: Path) -> None:
        self.model, self.vocabulary, self.output = model, vocabulary, output
        self.windows: Sequence[Tensor] = list(windows)
        self._reference = CachedLogits(model, CACHED_BYTES)
        self.rows: list[dict[str, Any]] = []
        self._measured: list[dict[str, Any]] = []

    def measure(self, name: str) -> None:
        """Measure a format, whose file is written first, or an existing file."""
        path = model_file(self.output, name)
        if not path.exists():
            copy = TinyTransformer(self.vocabulary)
            copy.load_state_dict(self.model.state_dict())
            morph_model(copy, name)
            write_model(copy, path)
        loaded = load_model(path, TinyTransformer(self.vocabulary)).eval()
        reference = None if name == REFERENCE else self._reference
        quality = measure_perplexity(loaded, self.windows, reference=reference, batch=BATCH, name=name)
        difference = compare_models(self.model, loaded).overall
        self.rows.append(
            {
                "format": name,
                "bytes": path.stat().st_size,
                "cosine": difference.cosine,
                "sqnr_db": difference.to_dict()["sqnr_db"],
                "perplexity": quality.perplexity,
                "file": path.name,
            }
        )
        self._measured.append(_row(name, path, quality))

    def measure_all(self, advance: Advance) -> list[dict[str, Any]]:
        """The reference, the plan, and every single format; quality.json is written after each."""
        for name in (REFERENCE, PLAN, *FORMATS):
            self.measure(name)
            self._write()
            advance(1, name)
        return self.rows

    def _write(self) -> None:
        settings = {"model": "demo transformer", "text": "shakespeare.txt", "context": CONTEXT}
        settings["tokens"] = self._measured[0]["tokens"]
        document = {"reference_row": self._measured[0], "rows": self._measured[1:], "settings": settings}
        write_json(self.output / "quality.json", document)


def count_measured() -> int:
    """How often `measure_all` advances."""
    return len(FORMATS) + 2


def _row(name: str, path: Path, quality: Quality) -> dict[str, Any]:
    with open_tensors(path) as file:
        bits = 8 * sum(spec.nbytes for spec in file.specs.values())
        numbers = sum(get_format(REFERENCE).nbytes(spec.shape) for spec in file.specs.values()) / 4
    return {"format": name, "bits_per_weight": bits / numbers, **quality.to_dict()}


# ---- plan ------------------------------------------------------------------------------------------------------------


EIGHT_BITS = ("int8_row", "fp8_e4m3_row")
FOUR_BITS = ("q4_0_gguf", "nvfp4", "mxfp4")
CANDIDATES = ("mxfp4", "nvfp4", "q4_0_gguf", "int8_row", "bfloat16")
GOAL = Goal(bits=5.0)


def calibrate(
    model: nn.Module, batches: list[Tensor], output: Path, *, device: str, advance: Advance
) -> CalibrationResult:
    """Relative output errors of every layer and block in the candidates; calibration.json grows with every pass."""
    return run_calibration(
        model,
        batches,
        formats=(*EIGHT_BITS, *FOUR_BITS),
        samples=len(batches),
        cache=output / "calibration.json",
        blocks=BLOCKS,
        device=device,
        progress=lambda _done, _total, what: advance(1, what),
    )


def passes(batches: int) -> int:
    """How often `calibrate` advances."""
    return batches * (1 + len(EIGHT_BITS) + len(FOUR_BITS))


def find_plan(model: nn.Module, windows: Tensor, held_out: Tensor, output: Path, *, count: int) -> SearchResult:
    """The best plan within the goal: plan.json, evidence.json and front.json."""
    return search(
        model,
        list(windows),
        goal=GOAL,
        held_out=list(held_out),
        formats=CANDIDATES,
        out=output,
        options=SearchOptions(windows=count, stage=lambda what, total: progress(f"3/6 {what}", total)),
    )


def manifest_of(plan: Plan) -> dict[str, Any]:
    """The plan as rules: what `bitplan plan` resolves to the same formats."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, entry in plan.entries.items():
        groups.setdefault((entry.choice.format, entry.role), []).append(name)
    rules = [
        {"regex": "|".join(re.escape(name) for name in names), "format": fmt, "role": role}
        for (fmt, role), names in sorted(groups.items())
    ]
    return {"version": 1, "model": "bitplan demo", "patterns": rules}


def worst_and_best(errors: Mapping[str, Mapping[str, float]], fmt: str, count: int) -> list[tuple[str, float]]:
    """The layers with the largest errors in a format, then those with the smallest."""
    ordered = sorted(((name, row[fmt]) for name, row in errors.items()), key=lambda pair: -pair[1])
    return ordered if len(ordered) <= 2 * count else [*ordered[:count], *ordered[-count:]]


# ---- show ------------------------------------------------------------------------------------------------------------


MOVES_SHOWN = 8
LAYERS_SHOWN = 3


def begin(line: str) -> None:
    """The first line of a part, after an empty one."""
    print()
    say(line)


def say_start(figures: Mapping[str, Any], output: Path) -> None:
    say(f"bitplan demo: {figures['weights']:,} weights, seed {figures['seed']}; files go to {output}/")


def show_training(figures: Mapping[str, Any]) -> None:
    moves = figures["moves"]
    first_step = moves[0]["step"] if moves else None
    first = [move for move in moves if move["step"] == first_step]
    later = [move for move in moves if move["step"] != first_step]
    rule = figures["thresholds"]
    where = "a simulated device" if figures["device"] == "cpu" else figures["device"]
    begin(
        f"1. Trained {figures['steps']} steps in {figures['seconds']} s, loss {figures['first_loss']:.2f} to "
        f"{figures['last_loss']:.2f}; {figures['blocks']} blocks streamed through "
        f"{figures['ring_slots']} slots of {where}"
    )
    if first:
        summary = f"of {figures['layers']} layers {len(first)} went to INT8 at the first decision, step {first_step}"
        say(summary if later else f"{summary}; none changed after that")
    if later:
        table(f"{len(later)} changes after that{_more(later)}", [_move(move) for move in later[:MOVES_SHOWN]])
    say(
        f"why: every {rule['update_interval_steps']} steps each layer is scored by its gradient, relative to the other "
        f"layers', and by INT8's error; first score < {rule['first_int8_below']}: INT8; later BF16 -> INT8 "
        f"below {rule['later_int8_below']}, INT8 -> BF16 from {rule['bf16_from']} on (the policy's defaults)"
    )
    whole = figures["bytes_sent"] + figures["bytes_not_sent"]
    counts = ", ".join(f"{count} {name.upper()}" for name, count in sorted(figures["layers_by_precision"].items()))
    say(f"end: {counts}; {figures['bytes_not_sent'] / whole:.0%} of the bytes of an all-BF16 run were not sent")


def _more(rows: Sequence[Any]) -> str:
    return f", the first {MOVES_SHOWN} of them" if len(rows) > MOVES_SHOWN else ""


def _move(move: Mapping[str, Any]) -> dict[str, Any]:
    change = f"{move['before'].upper()} -> {move['after'].upper()}"
    return {"step": move["step"], "layer": move["layer"], "change": change, "why": move["reason"]}


def show_calibration(errors: Mapping[str, Mapping[str, float]]) -> None:
    fmt = FOUR_BITS[0]
    shown = worst_and_best(errors, fmt, LAYERS_SHOWN)
    rows = [
        {
            "layer": name,
            "best 8 bits": _best(errors[name], EIGHT_BITS),
            "best 4 bits": _best(errors[name], FOUR_BITS),
            "worst 4 bits": _best(errors[name], FOUR_BITS, max),
        }
        for name, _ in shown
    ]
    begin("2. Calibrated: relative error of each layer's output, on real activations")
    table(f"the {LAYERS_SHOWN} worst layers in {fmt}, then the {LAYERS_SHOWN} best, of {len(errors)}", rows)


def _best(row: Mapping[str, float], formats: Sequence[str], choose: Callable[..., str] = min) -> str:
    name = choose(formats, key=lambda fmt: row[fmt])
    return f"{row[name]:.4f}  {name}"


def show_plan(found: SearchResult) -> None:
    plan, evidence = found.plan, found.evidence
    total = plan.bytes_by_role_and_format()[-1]
    begin(f"3. Searched: {found.goal}; measured on {found.reference.tokens:,} characters that were held out")
    rows = [
        {
            "plan": f"* {each.label}" if each is found.winner else each.label,
            "bits a weight": f"{evidence.bits(each.nbytes):.2f}",
            "predicted KL": f"{each.predicted:.5f}",
            "KL, nats": f"{each.kl.mean:.5f}",
            "perplexity": f"{each.quality.perplexity:.3f}",
        }
        for each in found.rivals
    ]
    table(f"{len(plan)} tensors, {human_bytes(total.nbytes)}: {total.ratio or 0:.2f} times smaller than bfloat16", rows)
    if found.lost:
        say(f"the search lost: {found.winner.label} is better and within the goal, so plan.json is that")
    costs = {name: choice.evidence["nats"] for name, choice in plan.items() if choice.evidence}
    name = max(costs, key=lambda each: costs[each])
    say(f"such as {name}, {plan[name].format}: {plan[name].reason}")


def show_formats(rows: Sequence[Mapping[str, Any]], tokens: int) -> None:
    bf16 = next(row for row in rows if row["format"] == BASELINE)
    shown = [
        {
            "format": f"* {row['format']}" if row["format"] == PLAN else row["format"],
            "file": human_bytes(row["bytes"]),
            "of bf16": f"{row['bytes'] / bf16['bytes']:.2f}",
            "cosine": f"{row['cosine']:.6f}",
            "SQNR dB": "exact" if row["sqnr_db"] is None else f"{row['sqnr_db']:.1f}",
            "perplexity": f"{row['perplexity']:.3f}",
            "to bf16": f"{row['perplexity'] / bf16['perplexity'] - 1:+.2%}",
        }
        for row in rows
    ]
    begin("4. Packed, saved, loaded again and measured")
    table(f"perplexity per character, {tokens:,} held-out characters predicted; * is the plan above", shown)


def show_trees(runs: Sequence[Mapping[str, Any]]) -> None:
    shown = [
        {
            "gradients": run["contender"].removeprefix("bitplan_").upper(),
            "training": f"{run['train_s']:.2f} s",
            "AUC": f"{run['auc']:.4f}",
            "compiling, apart": f"{run['compile_s']:.1f} s",
        }
        for run in runs
    ]
    first = runs[0]
    begin(f"5. Boosted {first['trees']} trees on a made table")
    table(f"{first['rows']:,} rows of {first['features']} features; median of {len(first['train_s_samples'])}", shown)


def show_gpu(gpu: str, fp8: Sequence[Mapping[str, Any]], fused: Sequence[Mapping[str, Any]]) -> None:
    begin(f"6. Measured on {gpu}")
    table("a block's linear layers, FP8 against BF16", list(fp8))
    rows = [
        {key: "" if value is None else f"{value:.4f}" if key.endswith("_ms") else value for key, value in row.items()}
        for row in fused
    ]
    table("products with packed weights, milliseconds by rows of input", rows)


def say_end(output: Path) -> None:
    begin(f"files:  {output}/ (manifest.json, plan.json, model.plan.safetensors, demo.json and the records)")
    say(f"next:   bitplan inspect {output}/model.plan.safetensors", divided=False)
    say(f"        bitplan verify {output}/manifest.json {output}/model.plan.safetensors", divided=False)
    say(f"        bitplan inspect {output}/model.float32.safetensors --tensor blocks.0.up.weight", divided=False)
    say(f"report: {output}/report.html")


# ---- run -------------------------------------------------------------------------------------------------------------


# The files of the report, in this order; a part that was not run has none.
RECORDS = (
    "front.json",
    "plan.json",
    "quality.json",
    "training.jsonl",
    "precision.jsonl",
    "stream.jsonl",
    "fp8-policy.json",
    "crossover.json",
    "calibration.json",
    "drift.jsonl",
    "trees.json",
    "trees-model.json",
    "demo.json",
    "machine.json",
)
EVIDENCE = ("evidence.json", "evidence.safetensors", "statistics.safetensors", "bitplan_evidence.json")
OTHERS = ("manifest.json", "fp8-model.json", "fp8.jsonl", "report.html", *EVIDENCE)
VALIDATION_WINDOWS = 32
TITLE = "bitplan demo"


@dataclass(frozen=True)
class Size:
    """The size of each part of the demo."""

    steps: int
    batch: int
    windows: int
    calibration_batches: int
    search_windows: int
    rows: int
    trees: int
    repeats: int


FULL = Size(steps=180, batch=8, windows=64, calibration_batches=4, search_windows=48, rows=60_000, trees=40, repeats=3)
FAST = Size(steps=16, batch=2, windows=8, calibration_batches=1, search_windows=8, rows=4000, trees=5, repeats=1)


def run_demo(
    output: Path, *, fast: bool = False, quiet: bool = False, seed: int = 0, force: bool = False
) -> dict[str, Any]:
    """Train, calibrate, plan, pack, boost, and write a report of it into a folder; returns the figures of demo.json."""
    prepare_folder(output, force=force)
    return _Demo(output, FAST if fast else FULL, seed, quiet).run()


def prepare_folder(output: Path, *, force: bool = False) -> None:
    """Make the folder, check that it is writable, and remove the files of an earlier demo, but no others.

    Files with these names that no demo wrote are removed only with `force`.
    """
    if output.exists() and not output.is_dir():
        raise StoreError(f"{output}: is a file, and the demo writes a folder; give another name with --output")
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
        models = [f"model.{name}.safetensors" for name in (REFERENCE, PLAN, *FORMATS)]
        old_files = [output / name for name in (*RECORDS, *OTHERS, *models) if os.path.lexists(output / name)]
        if old_files and not force and not _is_a_demos(output):
            raise StoreError(
                f"{old_files[0]}: exists already, and no demo wrote it; replace it with --force, or give another "
                "folder with --output"
            )
        for path in old_files:
            path.unlink()
    except OSError as error:
        raise StoreError(
            f"{output}: the demo cannot write there ({error.strerror or error}); give another folder with --output"
        ) from None


def _is_a_demos(output: Path) -> bool:
    """Whether a demo began here: its figures are the first file that it writes."""
    try:
        figures = read_json(output / "demo.json")
    except (OSError, FileFormatError):
        return False
    return isinstance(figures, dict) and {"seed", "fast", "weights"} <= set(figures)


class _Demo:
    def __init__(self, output: Path, size: Size, seed: int, quiet: bool) -> None:
        self.output, self.size, self.seed, self.quiet = output, size, seed, quiet
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def run(self) -> dict[str, Any]:
        torch.manual_seed(self.seed)
        self.corpus = Corpus(shipped_text())
        self.model = TinyTransformer(self.corpus.vocabulary)
        weights = sum(parameter.numel() for parameter in self.model.parameters())
        figures: dict[str, Any] = {"seed": self.seed, "fast": self.size is FAST, "weights": weights}
        self._write("demo.json", figures)
        self.machine = examine_machine(measure=self.device == "cuda")
        self._write("machine.json", self.machine)
        self._tell(say_start, figures, self.output)
        training = self._train()
        figures |= {"steps": training["steps"], "train_seconds": training["seconds"], "training": training}
        figures["calibration"], figures["plan"] = self._plan()
        figures["drift"], figures["formats"] = self._pack()
        figures["trees"] = self._boost()
        figures["gpu"] = self._gpu()
        self._write("demo.json", figures)
        written = [name for name in RECORDS if (self.output / name).exists()]
        write_report([self.output / name for name in written], self.output / "report.html", title=TITLE)
        self._tell(say_end, self.output)
        return figures | {"records": written, "report": str(self.output / "report.html")}

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _train(self) -> dict[str, Any]:
        self.batches = made_batches(self.corpus, self.size.steps, self.size.batch, self.seed)
        with progress("1/6 training", self.size.steps) as advance:
            figures = train_streamed(
                self.model,
                self.batches,
                self.corpus.held_out_windows(VALIDATION_WINDOWS),
                self.output,
                device=self.device,
                log_head={key: self.machine[key] for key in ("machine", "versions")},
                advance=advance,
            )
        self._tell(show_training, figures)
        return figures

    def _plan(self) -> tuple[dict[str, Any], dict[str, Any]]:
        batches = [ids for ids, _ in self.batches[: self.size.calibration_batches]]
        with progress("2/6 calibrating", passes(len(batches))) as advance:
            errors = calibrate(self.model, batches, self.output, device=self.device, advance=advance).layers
        self.model.to("cpu").eval()
        self._tell(show_calibration, errors)
        save_reference(self.model, self.output)
        text = torch.cat([ids for ids, _ in self.batches])[: 2 * self.size.search_windows]
        held_out = self.corpus.held_out_windows(self.size.windows // 2)
        found = find_plan(self.model, text, held_out, self.output, count=self.size.search_windows)
        self.plan = found.plan
        document = manifest_of(self.plan)
        self.manifest = Manifest.from_document(document, where="the demo's manifest")
        self._write("manifest.json", document)
        self._tell(show_plan, found)
        sizes = self.plan.bytes_by_role_and_format()[-1]
        formats = {name: choice.format for name, choice in self.plan.items()}
        planned = {"bytes": sizes.nbytes, "times_smaller_than_bf16": sizes.ratio, "formats": formats}
        planned |= {"kl": found.winner.kl.mean, "predicted_kl": found.winner.predicted, "lost": found.lost}
        return {"layers": errors, "worst_in": FOUR_BITS[0]}, planned

    def _pack(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        drift = pack_by_plan(self.output, self.plan, self.manifest, self.size.steps)
        windows = self.corpus.held_out_windows(self.size.windows)
        comparison = DemoComparison(self.model, self.corpus.vocabulary, windows, self.output)
        with progress("4/6 packing", count_measured()) as advance:
            rows = comparison.measure_all(advance)
        self._tell(show_formats, rows, windows[:, 1:].numel())  # the first character of a window is given
        return [row.to_dict() for row in drift], rows

    def _boost(self) -> list[dict[str, Any]]:
        size = self.size
        with progress("5/6 boosting", count_fits(size.repeats)) as advance:
            runs = boost_twice(size.rows, size.trees, size.repeats, self.seed, advance, self.output)
        head = {"benchmark": "trees", "machine": self.machine["machine"], "versions": self.machine["versions"]}
        self._write("trees.json", head | {"runs": runs})
        self._tell(show_trees, runs)
        return runs

    def _gpu(self) -> dict[str, Any]:
        if self.device != "cuda":
            self._tell(begin, f"6. Not measured: {WITHOUT_GPU}")
            return {"measured": False, "reason": WITHOUT_GPU}
        sizes, gpu = GpuSizes(MODEL), torch.cuda.get_device_name()
        plan = plan_fp8(self.output, sizes, self.device)
        with progress("6/6 FP8", len(plan.ways())) as advance:
            fp8 = measure_fp8(plan, advance)
        with progress("6/6 fused products", len(sizes.formats)) as advance:
            fused = measure_fused(self.output, sizes, self.device, advance, gpu_fingerprint(gpu))
        self._tell(show_gpu, gpu, fp8, fused)
        return {"measured": True, "gpu": gpu, "fp8": fp8, "fused": fused}

    # ---- files and words ---------------------------------------------------------------------------------------------

    def _write(self, name: str, document: Any) -> None:
        write_json(self.output / name, document)

    def _tell(self, tell: Callable[..., None], *given: Any) -> None:
        if not self.quiet:
            tell(*given)
