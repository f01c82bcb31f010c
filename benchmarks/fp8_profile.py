"""Where the time of two llama layers goes: the kernels of one replay of a CUDA graph, BF16 and all FP8.

    python benchmarks/fp8_profile.py [--sizes h4096] [--tokens 512,2048,16384]

A step is that of `fp8_layers.py`: compiled, forward and backward, every weight cast anew. torch's profiler names each
kernel of a replay with its time; kernels are summed by name and by what they do:

    products     matrix products of linear layers              norms       norms, with the casts that they are part of
    attention    its kernels, forward and backward              casts       FP8 casts of inputs, weights and gradients
    checks       of guessed scales                              others      rotary embeddings, sums, gating in BF16
    gaps         when no kernel runs, between the first and the last

"bound" is what would be left if casts, norms and others moved their bytes at the speed of a copy: products and
attention as they are, and the bytes of the rest (`least_bytes`) over the speed of a copy of 1 GiB in the same run.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from pathlib import Path
from typing import Any

import fp8_layers
import harness
import torch
from llama_layers import Size

KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("attention", ("flash", "fmha", "sdpa", "attention", "softmax", "cudnn::fusion")),
    ("products", ("gemm", "nvjet", "cutlass", "cublas", "splitk")),
    ("checks", ("_check",)),
    ("norms", ("_row_stats", "_norm_gradient", "_add_parts", "rms_norm")),
    ("casts", ("cast_pairs", "cast_numbers", "_cast", "_amax_of", "_maxima_of")),
)
REPLAYS = 3
COPIED_BYTES = 1 << 30


def kind_of(kernel: str) -> str:
    """What a kernel does, by its name."""
    name = kernel.lower()
    return next((kind for kind, words in KINDS if any(word in name for word in words)), "others")


def least_bytes(size: Size, tokens: int, layers: int) -> int:
    """Bytes that casts, norms and residual sums of an all FP8 step must move, if each reads and writes only once.

    Cast in both layouts: 4 bytes a number. In front of a product with a norm: statistics read 2 more, the gradient
    reads two matrices and writes one. Gating: 6 bytes a feature forward, 10 backward. Sums and rotations: read and
    write in BF16.
    """
    attention, keys = size.heads * size.head_dim, size.kv_heads * size.head_dim
    qkv = attention + 2 * keys
    weights = (qkv + attention + 3 * size.ffn) * size.hidden * 4
    norms = 2 * tokens * size.hidden * (2 + 4 + 6)
    casts = tokens * (attention * 4 + 2 * size.hidden * 4 + qkv * 4 + size.ffn * (6 + 10))
    others = tokens * (4 * size.hidden * 6 + 2 * (attention + keys) * 4)
    return layers * (weights + norms + casts + others)


def profile_arm(arms: fp8_layers.Arms, name: str) -> dict[str, Any]:
    step = arms.step(name)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    on_gpu = [each for each in profile.events() if str(each.device_type).endswith("CUDA")]
    return summarise([(each.name, each.time_range.start, each.time_range.end) for each in on_gpu])


def summarise(events: list[tuple[str, float, float]]) -> dict[str, Any]:
    """Kernels as (name, start, end) in us of `REPLAYS` replays -> times of one replay."""
    kernels: dict[str, list[float]] = {}
    busy, reached = 0.0, 0.0
    for name, start, end in sorted(events, key=lambda event: event[1]):
        kernels.setdefault(name, []).append(end - start)
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    span = reached - min(start for _, start, _ in events)
    kinds: dict[str, float] = {}
    rows = []
    for name, times in sorted(kernels.items(), key=lambda item: -sum(item[1])):
        kinds[kind_of(name)] = kinds.get(kind_of(name), 0.0) + sum(times) / REPLAYS
        rows.append(
            {
                "kernel": name[:150],
                "kind": kind_of(name),
                "count": len(times) / REPLAYS,
                "us": round(sum(times) / REPLAYS, 1),
                "median_us": round(statistics.median(times), 1),
            }
        )
    kinds["gaps"] = (span - busy) / REPLAYS
    return {
        "us": round(span / REPLAYS, 1),
        "kinds": {key: round(value, 1) for key, value in kinds.items()},
        "kernels": rows,
    }


def copy_speed() -> float:
    """Bytes a second of a copy, read and written."""
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(21)]
    for event in events:
        event.record()
        target.copy_(source)
    torch.cuda.synchronize()
    times = [first.elapsed_time(second) for first, second in itertools.pairwise(events[10:])]
    return float(2 * COPIED_BYTES / (statistics.median(times) / 1000))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="h4096", help=f"of {', '.join(fp8_layers.SIZES)}")
    parser.add_argument("--tokens", type=fp8_layers._counts, default=(512, 2048, 16384))
    parser.add_argument("--recipe", default="tensorwise")
    parser.add_argument("--arms", default="bf16,full")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    options.compile, options.torchao, options.restless = True, "", False
    device, rows = torch.device("cuda"), []
    document: dict[str, Any] = {
        "benchmark": "fp8_profile",
        "commit": harness.commit(),
        "machine": harness.machine("cuda"),
        "versions": harness.versions(),
    }
    copied = document["copy_bytes_per_s"] = copy_speed()
    for name in options.sizes.split(","):
        size = fp8_layers.SIZES[name]
        for tokens in options.tokens:
            arms = fp8_layers.Arms("measured", size, tokens, options, device)
            for arm in options.arms.split(","):
                row: dict[str, Any] = {"size": name, "tokens": tokens, "arm": arm} | profile_arm(arms, arm)
                if arm == "full":
                    rest_us = least_bytes(size, tokens, fp8_layers.LAYERS) / copied * 1e6
                    row["bound_us"] = round(row["kinds"]["products"] + row["kinds"].get("attention", 0.0) + rest_us, 1)
                rows.append(row)
                print(name, tokens, arm, row["us"], row["kinds"], row.get("bound_us", ""), flush=True)
    gpu = document["machine"]["gpu"].lower().replace(" ", "_")
    print(harness.save(f"fp8_profile_{gpu}", document | {"rows": rows}, options.output))


if __name__ == "__main__":
    main()
