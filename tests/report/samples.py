"""Records that look like those of a real run, made by the real writers wherever one runs without a GPU.

`python -m tests.report.samples FOLDER` writes them and `FOLDER/report.html`, to look at.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import sys
from pathlib import Path

import torch

from bitplan.base.errors import Finding
from bitplan.base.records import write_json
from bitplan.files.drift import DriftLog
from bitplan.formats.codec import encode
from bitplan.fp8.policy.merge import merge_reports
from bitplan.fp8.policy.report import Fingerprint, Report, Row
from bitplan.packed.crossover import Crossover, Timing, to_document
from bitplan.plan import Choice, Plan
from bitplan.plan.plan import Planned
from bitplan.report import TrainingLog
from bitplan.streaming.selective.calibration import Calibration
from bitplan.streaming.selective.decide import BlockPrecisionHint
from bitplan.streaming.selective.training_policy import PrecisionTelemetry
from bitplan.streaming.telemetry import StreamStepStats

RESULTS = Path(__file__).parent.parent.parent / "benchmarks" / "results"
LAYERS = 24
H200 = Fingerprint("NVIDIA H200", "580.82", "2.11.0", "3.6.0", "0.1.0", "abc1234")


def write_samples(folder: Path) -> list[Path]:
    """One record of every kind."""
    writers = (
        write_search,
        write_plan,
        write_findings,
        write_training,
        write_precision,
        write_stream,
        write_fp8,
        write_crossover,
        write_drift,
        write_calibration,
    )
    written = [path for write in writers for path in write(folder)]
    names = ("quality_smollm2_135m", "trees_neoverse_n1", "demo", "formats_neoverse_n1", "fused_matmul_nvidia_h200")
    return written + [RESULTS / f"{name}.json" for name in names]


def write_search(folder: Path, layers: int = LAYERS) -> list[Path]:
    """What a search of such a model writes for the report."""
    rng = random.Random(1)
    parts = ("qkv", "o_proj", "gate_up", "down_proj")
    heat = [_heat(rng, f"model.layers.{layer}", str(layer), part) for layer in range(layers) for part in parts]
    heat.append(_heat(rng, "model", "", "embed_tokens"))
    measured = {"kl_interval": [0.019, 0.023], "nll_difference": 0.01, "perplexity": 15.6, "tokens": 6144}
    plan = {"label": "searched plan", "kind": "plan", "bytes": 9e8, "bits": 4.5, "predicted": 0.02, "kl": 0.021}
    rivals = [
        {"label": "q4_0_gguf", "kind": "uniform", "bytes": 9.01e8, "bits": 4.51, "predicted": 0.043, "kl": 0.045},
        {"label": "attention in int8_row, others in mxfp4", "kind": "heuristic", "bytes": 9.9e8, "bits": 5.0}
        | {"predicted": 0.06, "kl": 0.058},
    ]
    points = [(bits / 4, 0.5 * 4.0 ** (4 - bits / 4) / 10) for bits in range(12, 34)]
    document = {
        "document": "bitplan-front",
        "version": 1,
        "model": "model",
        "goal": {"bits": 4.5},
        "reference": {"bytes": 3.2e9, "bits": 16.0, "perplexity": 15.3, "tokens": 6144, "windows": 12},
        "noise_floor": {"kl": 0.0001},
        "solution": {"nats": 0.02, "bytes": 9e8, "bits": 4.5, "bound": 0.02, "gap": 0.0},
        "corrections": 1,
        "plan": plan | measured,
        "lost": False,
        "measured": [each | measured for each in (plan, *rivals)],
        "front": [{"bits": bits, "bytes": bits * 2e8, "nats": nats} for bits, nats in points],
        "uniform": [{"label": "q4_0_gguf", "bits": 4.5, "bytes": 9e8, "nats": 0.043}],
        "heat": heat,
    }
    write_json(folder / "front.json", document)
    return [folder / "front.json"]


def _heat(rng: random.Random, prefix: str, layer: str, part: str) -> dict[str, object]:
    fmt, bits = rng.choice([("q4_k_gguf", 4.5), ("q6_k_gguf", 6.5625), ("int8_row", 8.0)])
    figures = {"nats": rng.random() * 1e-3, "bytes": bits * 1e6, "bits": bits, "nats_in_smallest": rng.random() * 1e-2}
    return {"group": f"{prefix}.{part}", "layer": layer, "part": part, "format": fmt, "smallest": "q2_k_gguf"} | figures


def write_plan(folder: Path, layers: int = LAYERS) -> list[Path]:
    rng = random.Random(0)
    shapes = {"q": (2048, 2048), "k": (512, 2048), "v": (512, 2048), "o": (2048, 2048)}
    entries = {"model.embed_tokens.weight": _planned("bfloat16", (49152, 2048), "embedding", "rule 1: embeddings stay")}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for part, shape in shapes.items():
            entries[f"{prefix}.self_attn.{part}_proj.weight"] = _by_error(rng, shape, "attention", 1.0)
        for part in ("gate", "up", "down"):
            shape = (2048, 8192) if part == "down" else (8192, 2048)
            entries[f"{prefix}.mlp.{part}_proj.weight"] = _by_error(rng, shape, "mlp", 2.2 if part == "down" else 0.8)
        for part in ("input", "post_attention"):
            name = f"{prefix}.{part}_layernorm.weight"
            entries[name] = _planned("bfloat16", (2048,), "norm", "rule 2: norms stay in bfloat16")
    entries["lm_head.weight"] = _planned("bfloat16", (49152, 2048), "head", "forced, over mxfp4 (rule 7)")
    path = folder / "plan.json"
    Plan(entries).save(path)
    return [path]


def _planned(fmt: str, shape: tuple[int, ...], role: str, reason: str, evidence: dict[str, float] | None = None):
    return Planned(Choice(fmt, reason, evidence), shape, role)


def _by_error(rng: random.Random, shape: tuple[int, ...], role: str, scale: float) -> Planned:
    error = scale * rng.lognormvariate(-3.4, 0.6)
    evidence = {"mxfp4": round(error, 4), "int8_g128": round(error / 11, 5)}
    if error < 0.05:
        reason = f"calibration error of mxfp4 {error:.3f} < 0.050"
        return _planned("mxfp4", shape, role, reason, evidence)
    if error / 11 < 0.012:
        reason = f"calibration error of mxfp4 {error:.3f} >= 0.050; int8_g128 {error / 11:.4f} < 0.012"
        return _planned("int8_g128", shape, role, reason, evidence)
    return _planned("bfloat16", shape, role, f"no candidate within its bound: int8_g128 {error / 11:.4f}", evidence)


def write_findings(folder: Path) -> list[Path]:
    result = [
        Finding("unused-rule", "patterns[4]", "regex 'model\\.rotary.*' matches no tensor"),
        Finding("norm-not-finite", "model.layers.7.input_layernorm.weight", "1 NaN and 0 infinite of 2048 numbers"),
    ]
    path = folder / "findings.json"
    write_json(path, [finding._asdict() for finding in result])
    return [path]


def write_training(folder: Path, steps: int = 400) -> list[Path]:
    versions = {"bitplan": "0.1.0", "torch": "2.13.0"}
    paths = []
    for run, level, seed in (("bf16 blocks", 1.82, 1), ("selective precision", 1.84, 2)):
        rng, path = random.Random(seed), folder / f"train_{run.split()[0]}.jsonl"
        with TrainingLog(path, run=run, machine={"cpu": "Neoverse-N1", "cores": 2}, versions=versions) as log:
            for step in range(steps):
                loss = level + 2.4 * math.exp(-step / 60) + rng.gauss(0, 0.05)
                more = {} if step % 25 else {"validation_loss": level + 0.06 + 2.4 * math.exp(-step / 60)}
                log.write(step, loss, **more)
        paths.append(path)
    return paths


def write_precision(folder: Path, updates: int = 60) -> list[Path]:
    rng, path = random.Random(3), folder / "precision.jsonl"
    low: set[str] = set()
    sizes = {f"block.{index}": {"bf16": 33_554_432, "int8": 16_908_288} for index in range(LAYERS)}
    with PrecisionTelemetry(path, clock=iter(range(updates)).__next__) as telemetry:
        for update in range(updates):
            hints = {}
            for index, name in enumerate(sizes):
                base = 0.15 + 0.7 * abs(index - LAYERS / 2) / (LAYERS / 2)
                score = min(1.0, max(0.0, base * (0.6 + 0.4 * math.exp(-update / 20)) + rng.gauss(0, 0.05)))
                before = name in low
                low = low | {name} if score < 0.3 else low - {name} if score >= 0.6 else low
                precision = "int8" if name in low else "bf16"
                reason = f"score {score:.2f} " + ("< 0.3" if name in low else ">= 0.3")
                changed = before != (name in low)
                hints[name] = BlockPrecisionHint(name, precision, reason, update * 50, score, changed)
            telemetry.record(update * 50, hints, unit_bytes=sizes)
    return [path]


def write_stream(folder: Path, steps: int = 40, *, timeline: bool = True) -> list[Path]:
    rng, path = random.Random(4), folder / ("stream.jsonl" if timeline else "stream_totals.jsonl")
    lines = []
    for step in range(steps):
        copies, waits, at, free = [], [], 0.0, 0.0
        for block in range(12):
            took = rng.uniform(3.2, 3.8)
            copies.append({"name": f"block.{block}", "start_ms": at, "end_ms": at + took, "bytes": 201_326_592})
            at += took
            if at > free:
                waits.append({"start_ms": free, "end_ms": at})
                free = at
            free += rng.uniform(3.0, 3.9)
        out = [{"name": f"block.{b}", "start_ms": free - 30 + 2 * b, "end_ms": free - 28.6 + 2 * b} for b in range(12)]
        stall, copy = (sum(item["end_ms"] - item["start_ms"] for item in each) for each in (waits, copies))
        figures = {
            "step": step,
            "step_ms": free,
            "compute_ms": free - stall,
            "stall_ms": stall,
            "copy_ms": copy,
            "overlap": 1 - stall / copy,
            "bytes_h2d": 12 * 201_326_592,
            "bytes_h2d_by_format": {"int8_row": 8 * 201_326_592, "bfloat16": 4 * 201_326_592},
            "bytes_d2h": 12 * 8_388_608,
            "bytes_d2h_by_format": {"float32": 12 * 8_388_608},
            "h2d_gb_per_s": 12 * 201_326_592 / copy / 1e6,
            "loads": 12,
            "prefetch_hits": 11,
            "prefetch_misses": 1,
            "vram_peak_bytes": 7_400_000_000 + step * 1_000_000,
            "pinned_peak_bytes": 2_500_000_000,
        }
        known = {each.name for each in dataclasses.fields(StreamStepStats)}
        assert set(figures) <= known, "the telemetry's fields have changed"
        lines.append(
            figures | ({"timeline": {"copies": copies, "waits": waits, "copies_out": out}} if timeline else {})
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [path]


def write_fp8(folder: Path) -> list[Path]:
    rows = [
        *_layer("layernorm_column", "fc1", (28672, 4096), 1.25, 1800),
        *_layer("row", "fc2", (4096, 14336), 1.18, 3200),
        *_layer("row", "proj", (4096, 4096), 0.99, 30000),
        *_layer("layernorm_column", "qkv", (6144, 4096), 1.08, 6500),
    ]
    report = Report(H200, "blockwise", tuple(rows), "llama-8b", {}, "fp8_report.jsonl")
    log, policy = folder / "fp8_report.jsonl", folder / "fp8_policy.json"
    log.write_text(report.to_lines())
    merge_reports([report]).policy.save(policy)
    return [policy, log]


def _layer(kind: str, name: str, shape: tuple[int, int], best: float, middle: float) -> list[Row]:
    rng, rows = random.Random(name), []
    for tokens in (256, 512, 1024, 2048, 4096, 8192, 16384, 32768):
        speedup = 0.55 + (best - 0.55) / (1 + (middle / 4 / tokens) ** 1.5)
        bf16 = [shape[0] * shape[1] * (tokens + 200) / 2.4e11 * rng.gauss(1, 0.01) for _ in range(12)]
        fp8 = [ms / speedup * rng.gauss(1, 0.015) for ms in bf16]
        for precision, samples in (("bf16", bf16), ("fp8", fp8)):
            common = {"gemm": "module", "timing": "graph", "tokens": tokens, "status": "ok", "in_turns": True}
            layer = {"part": "llm", "kind": kind, "name": name, "shape": shape, "tp": 1}
            rows.append(Row(precision=precision, samples_ms=tuple(samples), **layer, **common))
    return rows


def write_crossover(folder: Path) -> list[Path]:
    result = {}
    for fmt, speed in (("mxfp4", 1.0), ("int8_g128", 1.7)):
        rng, timings = random.Random(fmt), []
        for rows in (2**power for power in range(14)):
            times = {
                "fused": 0.016 * speed + 0.00011 * rows,
                "decode": 0.087 + 0.00004 * rows,
                "expanded": 0.043 + 0.00004 * rows,
            }
            samples = {way: tuple(ms * rng.gauss(1, 0.03) for _ in range(15)) for way, ms in times.items()}
            timings.append(Timing(rows, samples, {"rows": 8}))
        record = Crossover(fmt, 8192, 8192, tuple(timings))
        result[record.key] = record
    path = folder / "nvidia_h200.json"
    write_json(path, to_document(result, {"gpu": "NVIDIA H200", "driver": "580.82", "torch": "2.11.0"}))
    return [path]


def write_drift(folder: Path) -> list[Path]:
    generator = torch.Generator().manual_seed(0)
    path = folder / "drift.jsonl"
    masters = {
        f"layers.{i}.{part}.weight": torch.randn(32, 128, generator=generator)
        for i in range(12)
        for part in ("up", "down")
    }
    packed = {name: encode(x, "mxfp4" if "up" in name else "int8_row") for name, x in masters.items()}
    with DriftLog(path) as log:
        for step in range(0, 500, 100):
            log.add(step, [(name, masters[name], packed[name]) for name in masters])
            for x in masters.values():
                x += 0.004 * torch.randn(x.shape, generator=generator) * torch.rand(1, generator=generator)
    return [path]


def write_calibration(folder: Path) -> list[Path]:
    rng = random.Random(5)
    base = {"mxfp4": 0.11, "int8_row": 0.008, "fp8_e4m3_row": 0.026}
    parts = ("attn.qkv", "attn.out", "mlp.up", "mlp.down")
    layers: dict[str, dict[str, dict[str, float | None]]] = {}
    blocks: dict[str, dict[str, dict[str, float | None]]] = {fmt: {} for fmt in base}
    for batch in ("0", "1"):
        names = [f"blocks.{index}.{part}" for index in range(LAYERS) for part in parts]
        layers[batch] = {
            name: {fmt: error * rng.lognormvariate(0, 0.35) for fmt, error in base.items()} for name in names
        }
        for fmt, error in base.items():
            blocks[fmt][batch] = {
                f"blocks.{index}": 1.4 * error * rng.lognormvariate(0, 0.3) for index in range(LAYERS)
            }
    path = folder / "calibration.json"
    fingerprint = {"weights": {}, "quantizer": {}, "layout": {}, "data": {}, "versions": {"bitplan": "0.1.0"}}
    Calibration(fingerprint, layers, blocks).save(path)
    return [path]


if __name__ == "__main__":
    from bitplan.report import write_report

    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    write_report(write_samples(target), target / "report.html")
    print(target / "report.html")
