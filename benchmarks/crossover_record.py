"""Measures the record of launches that comes with the package: `bitplan/data/crossover_GPU.json`.

    python benchmarks/crossover_record.py --output crossover_nvidia_h200.json [--seconds 85]

To be run when a file of `crossover.GPU_SOURCES` has changed, with nothing else on the GPU. Processes compile the
launches side by side, then one process measures weight by weight, the most used first, and writes the file after each.
What an output of the same kernels has already is not measured again. A weight that fails, or for which no time is left,
is named and left out: it is measured at its first use instead.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from bitplan.base.records import write_json
from bitplan.formats import Encoded, get_format
from bitplan.formats.codec import encode
from bitplan.packed import crossover
from bitplan.packed.crossover import MOST_FUSED_ROWS, Crossover, measure_crossover
from bitplan.packed.products.fused import FusedMatmul, fused_for

# Outputs and inputs of the layers of llamas of 1B and 8B, joined projections first.
SMALL = ((16384, 2048), (2048, 8192), (3072, 2048), (2048, 2048), (128256, 2048))
LARGE = ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096), (128256, 4096))
ALONE = ((14336, 4096), (1024, 4096))  # of 8B's layers that run by themselves, with many rows
FORMATS = ("mxfp4", "int8_g128", "int4_g32", "nvfp4", "fp8_e4m3_row")
Job = tuple[str, int, int, tuple[int, ...]]


def jobs() -> list[Job]:
    """Format, shape and row counts, the most used first."""
    first, others = FORMATS[:2], FORMATS[2:]
    return [
        *((fmt, *shape, (1, 64)) for fmt in first for shape in SMALL),
        *((fmt, *shape, (1,)) for fmt in others for shape in SMALL),
        *((fmt, *shape, (1, 4, 16, 64, 2048)) for fmt in first for shape in LARGE),
        *((fmt, *shape, (1, 64, 2048)) for fmt in others for shape in LARGE),
        *((fmt, *shape, (64, 2048)) for fmt in FORMATS for shape in ALONE),
        ("mxfp4", 512, 2048, (64,)),
    ]


def compile_share(index: int, count: int, until: float, work: list[Job]) -> None:
    """Launch every `count`-th of all launches once; the compiled kernels lie in Triton's cache."""
    fused = fused_for("cuda")
    assert fused is not None
    launches = [
        (fmt, (outputs, inputs), rows, launch)
        for fmt, outputs, inputs, counts in work
        for rows in counts
        if rows <= MOST_FUSED_ROWS
        for launch in fused.launches(_zeros(fmt, (outputs, inputs)), rows)
    ]
    for fmt, shape, rows, launch in launches[index::count]:
        if time.monotonic() > until:
            return
        weight = _zeros(fmt, shape)
        x = torch.zeros((rows, shape[1]), dtype=torch.bfloat16, device="cuda")
        try:
            fused.run(x, weight, fused.prepare(weight), None, launch)
        except Exception as error:
            print(f"FAILED {fmt} {shape} at {rows} rows, {dict(launch)}: {str(error)[-300:]}", flush=True)


def _zeros(fmt: str, shape: tuple[int, int]) -> Encoded:
    made = get_format(fmt)
    parts = made.part_shapes(shape)
    return Encoded(
        made, shape, **{name: torch.zeros(size, dtype=dtype, device="cuda") for name, (dtype, size) in parts.items()}
    )


def measured(job: Job, fused: FusedMatmul) -> Crossover:
    fmt, outputs, inputs, counts = job
    weight = encode(torch.randn((outputs, inputs), device="cuda") * 0.02, fmt)
    return measure_crossover(weight, fused, row_counts=counts)


def lines_of(record: Crossover) -> list[str]:
    return [
        f"{record.format} {record.out_features} x {record.in_features}, {timing.rows} rows: "
        f"{ {way: round(statistics.median(samples) * 1e3, 1) for way, samples in timing.samples_ms.items()} } us, "
        f"{list((timing.launch or {}).values())} {record.refused or ''}"
        for timing in record.timings
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=300, help="begin no new weight after so many")
    parser.add_argument("--compile-seconds", type=float, default=180, help="and compile no more after so many")
    args = parser.parse_args()
    began = time.monotonic()
    context = multiprocessing.get_context("spawn")
    fingerprint = crossover.gpu_fingerprint(torch.cuda.get_device_name(0))
    made: dict[Any, Crossover] = {}
    if args.output.exists():
        made |= crossover.from_document(json.loads(args.output.read_text()), fingerprint, where=str(args.output))
    work = [job for job in jobs() if job[:3] not in made]
    count = max(1, len(os.sched_getaffinity(0)) - 1)
    until = began + args.compile_seconds
    processes = [context.Process(target=compile_share, args=(index, count, until, work)) for index in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print(f"compiled in {time.monotonic() - began:.1f} s", flush=True)
    fused = fused_for("cuda")
    assert fused is not None
    for job in work:
        if time.monotonic() - began > args.seconds:
            print(f"no time left for {job}", flush=True)
            continue
        try:
            record = measured(job, fused)
        except Exception as error:
            print(f"FAILED {job}: {type(error).__name__}: {str(error)[-300:]}", flush=True)
            continue
        made[record.key] = record
        write_json(args.output, crossover.to_document(made, fingerprint))
        print("\n".join(lines_of(record)), flush=True)
    print(f"{len(made)} of {len(jobs())} weights in {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
