"""A forward of blocks that wait on the host: streamed, and by accelerate's own cpu_offload.

    python benchmarks/stream_forward.py [--blocks 8] [--tokens 4096] [--tiny --device cpu]

The model is that of benchmarks/streaming.py, in BF16, without gradients, for accelerate's offloading is made for that:

    resident      everything on the GPU
    streamed      stream_blocks(train="nothing"), three slots
    accelerate    cpu_offload, a block at a time (preload_module_classes), as it does for a model whose blocks are named
"""

from __future__ import annotations

import argparse
import copy
import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import torch
from llama_stack import FULL, TINY, LlamaStack, Size
from stream_rows import Row
from streaming import Run, document_of, inputs

from bitplan.streaming.block_stream import stream_blocks
from bitplan.streaming.transfer.devices import CudaDevice, SimulatedDevice, StreamDevice

SLOTS = 3


def measure_forward(size: Size, device: StreamDevice, repeats: int) -> list[Row]:
    """One row a variant."""
    accelerate: Any = importlib.import_module("accelerate")  # first: without it nothing is measured
    model, x = LlamaStack(size).eval(), inputs(size, size.tokens[0], device.torch_device)
    model.checkpoints = False
    rows: list[Row] = []

    def add(variant: str, run: LlamaStack, **more: str) -> None:
        rows.append({"tokens": size.tokens[0], "variant": variant, **more, **_timed(lambda: run(x), repeats, device)})
        print(f"{size.tokens[0]:>6} tokens  {variant:<10} {rows[-1]['median_ms']:9.1f} ms", flush=True)

    resident = copy.deepcopy(model).to(device.torch_device)
    add("resident", resident)
    del resident
    with stream_blocks(model, "layers.*", device=device, slots=SLOTS, train="nothing"):
        add("streamed", model)
    accelerate.cpu_offload(model, execution_device=device.torch_device, preload_module_classes=["LlamaBlock"])
    add("accelerate", model, version=accelerate.__version__)
    for row in rows:
        row["times_streamed"] = row["median_ms"] / rows[1]["median_ms"]
    return rows


@torch.no_grad()
def _timed(forward: Callable[[], object], repeats: int, device: StreamDevice) -> dict[str, float]:
    """Wall time of forwards that are waited for one by one."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        forward()
        device.finish(device.mark())
        times.append((time.perf_counter() - started) * 1e3)
    return {"median_ms": statistics.median(times[1:]), "min_ms": min(times[1:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of toy size, to see that everything runs")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    size = TINY if options.tiny else replace(FULL, blocks=options.blocks, tokens=(options.tokens,))
    device: StreamDevice = CudaDevice("cuda") if options.device == "cuda" else SimulatedDevice()
    rows = measure_forward(size, device, options.repeats)
    document = document_of("streaming, forward of offloaded blocks", size, device, Run((SLOTS,)), rows)
    name = "streaming_forward_" + document["machine"].get("gpu", "simulated").lower().replace(" ", "_")
    print(harness.save(name, document, options.output))


if __name__ == "__main__":
    main()
