"""The demo's sixth part, where there is a GPU: a layer in FP8, and products with packed weights.

Without a GPU nothing is measured or guessed; `WITHOUT_GPU` says what would be measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bitplan.cli.demo.training import Advance
from bitplan.kernels import encode
from bitplan.kernels.matmul.fused import fused_for
from bitplan.measure.speed.crossover import Crossover, Timer, measure_crossover, pick
from bitplan.measure.speed.crossover_files import Fingerprint, to_document
from bitplan.plan.fp8.bench_options import BenchOptions
from bitplan.plan.fp8.merge import summary
from bitplan.records import write_json
from bitplan.runtime.fp8.bench.session import Request, Session, plan_session, run_session

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


def plan_fp8(output: Path, sizes: GpuSizes, device: str) -> Session:
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
    )
    return plan_session(Request(options, timings=sizes.timings, products_apart=False, device=device), {})


def measure_fp8(session: Session, advance: Advance) -> list[dict[str, Any]]:
    """Write times to fp8.jsonl and their policy to fp8-policy.json; returns the policy's summary."""
    result = run_session(session, on_way=lambda way: advance(1, way.label))
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
