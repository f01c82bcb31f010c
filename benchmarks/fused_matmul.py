"""Products over packed weights on a GPU, against BF16 `F.linear` in the same run.

    python benchmarks/fused_matmul.py [--parts batch1,auto,experts,load,peers] [--output FILE]

batch1   one row, mxfp4 and int8_g128 at three shapes, other formats at one: time, share of a device copy on packed
         bytes, and times BF16
auto     QuantLinear(strategy="auto") at 1 to 8192 rows, without and with a tile cache, and the crossover it chose
experts  the experts of a gpt-oss-20b layer, 4 of 32, for 1 and 64 tokens: time over the floor of their bytes
load     a generated checkpoint of gpt-oss-20b's size: peak GPU memory over the file, and that it stays packed
peers    torchao's int8 and int4 weight-only linears, compiled, where torchao is installed

Calls are queued behind a pause of the GPU, so that what a launch costs the host is not in the times; weights are taken
in turn from a set larger than the L2 cache, so that they come from memory.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor
from torch.nn import functional

from bitplan import decode, encode
from bitplan.formats import Encoded
from bitplan.packed.crossover import crossovers_of
from bitplan.packed.products import fused_few_rows as triton_matmul
from bitplan.packed.products.expert_routing import route
from bitplan.packed.products.fused import fused_for
from bitplan.packed.quant_experts import QuantExperts
from bitplan.packed.quant_linear import QuantLinear
from bitplan.packed.tile_cache import TileCache

SHAPES = ((8192, 8192), (28672, 8192), (8192, 28672))
TARGETS = ("mxfp4", "int8_g128")
OTHERS = ("int4_g32", "nvfp4", "fp4_u8_g128", "q4_0_gguf", "int8_row", "fp8_e4m3_row")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048, 8192)
OUT_OF_CACHE_BYTES = 400_000_000
PAUSE_CYCLES = 20_000_000  # ten milliseconds
REPEATS = 9
Call = Callable[[], object]


def queued_us(calls: Sequence[Call], repeats: int = REPEATS, pauses: int = 1) -> list[float]:
    """Microseconds a call, once for each repeat of all the calls in turn."""
    for call in calls:
        call()
    samples = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(pauses * PAUSE_CYCLES)
        start.record()
        for call in calls:
            call()
        stop.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(stop) * 1e3 / len(calls))
    return samples


def spread(samples: list[float]) -> dict[str, float]:
    ordered = sorted(samples)
    return {"median_us": statistics.median(ordered), "min_us": ordered[0], "max_us": ordered[-1]}


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large device-to-device copy kernel."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    times = queued_us([lambda: torch.mul(source, 1.0, out=target)] * 4)
    return 2 * source.nbytes / (statistics.median(times) * 1e-6)


def compile_together(calls: Sequence[Call]) -> None:
    """Run every call once, many at a time: Triton compiles each, and compilers wait for nobody."""
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda call: call(), calls))
    torch.cuda.synchronize()


def turns(nbytes: int) -> int:
    return max(2, -(-OUT_OF_CACHE_BYTES // nbytes))


def copies(encoded: Encoded) -> list[Encoded]:
    return [
        Encoded(encoded.fmt, encoded.shape, **{name: part.clone() for name, part in encoded.parts.items()})
        for _ in range(turns(encoded.nbytes))
    ]


def relative_error(result: Tensor, expected: Tensor) -> float:
    return float((result.double() - expected.double()).norm() / expected.double().norm())


# ---- one row ---------------------------------------------------------------------------------------------------------


def batch1(bandwidth: float) -> list[dict[str, Any]]:
    rows = []
    for shape in SHAPES:
        dense = [torch.randn(shape, device="cuda").bfloat16() for _ in range(turns(shape[0] * shape[1] * 2))]
        x = torch.randn(1, shape[1], device="cuda").bfloat16()
        plain = queued_us([partial(functional.linear, x, w) for w in dense])
        for name in TARGETS + (OTHERS if shape == SHAPES[0] else ()):
            rows.append(
                {"shape": list(shape), "bf16_us": spread(plain), **one_row(name, dense[0], x, plain, bandwidth)}
            )
            print(batch1_line(rows[-1]), flush=True)
        del dense
    return rows


def one_row(name: str, dense: Tensor, x: Tensor, plain: list[float], bandwidth: float) -> dict[str, Any]:
    weights = copies(encode(dense, name))
    arranged = [triton_matmul.arrange_scales(weight) for weight in weights]
    pairs = list(zip(weights, arranged, strict=True))
    expected = x.double() @ decode(weights[0], torch.float32).double().T
    tried = []
    launches = triton_matmul.candidate_launches(weights[0], 1)
    compile_together([partial(triton_matmul.fused_matmul, x, *pairs[0], launch=launch) for launch in launches])
    for launch in launches:
        error = relative_error(triton_matmul.fused_matmul(x, *pairs[0], launch=launch), expected)
        if not error < 4e-3:
            raise SystemExit(f"{name} {launch}: relative error {error:.1e}")
        calls = [partial(triton_matmul.fused_matmul, x, w, a, launch=launch) for w, a in pairs]
        tried.append((statistics.median(queued_us(calls, 3)), launch, error))
    _, launch, error = min(tried, key=lambda one: one[0])
    times = queued_us([partial(triton_matmul.fused_matmul, x, w, a, launch=launch) for w, a in pairs])
    median = statistics.median(times)
    achieved = weights[0].nbytes / (median * 1e-6)
    return {
        "format": name,
        "packed_bytes": weights[0].nbytes,
        "fused_us": spread(times),
        "launch": launch.to_dict(),
        "relative_error": error,
        "bytes_per_s": achieved,
        "share_of_copy": achieved / bandwidth,
        "times_bf16": statistics.median(plain) / median,
    }


def batch1_line(row: dict[str, Any]) -> str:
    return (
        f"batch1 {row['shape'][0]}x{row['shape'][1]} {row['format']:12} {row['fused_us']['median_us']:7.2f} us  "
        f"{row['share_of_copy']:.0%} of copy  {row['times_bf16']:.2f}x BF16 ({row['bf16_us']['median_us']:.1f} us)"
    )


# ---- auto ------------------------------------------------------------------------------------------------------------


def auto(shape: tuple[int, int]) -> list[dict[str, Any]]:
    rows = []
    dense = [torch.randn(shape, device="cuda").bfloat16() for _ in range(turns(shape[0] * shape[1] * 2))]
    for name in TARGETS:
        weights = copies(encode(dense[0], name))
        caches = {"packed": None, "cached": TileCache(2 * 2**30 + len(weights) * shape[0] * shape[1] * 2)}
        layers = {
            kind: [QuantLinear(weight, strategy="auto", cache=cache) for weight in weights]
            for kind, cache in caches.items()
        }
        arranged = triton_matmul.arrange_scales(weights[0])
        products = []
        for count in ROWS[:7]:
            x = torch.randn(count, shape[1], device="cuda").bfloat16()
            for launch in triton_matmul.candidate_launches(weights[0], count):
                products.append(partial(triton_matmul.fused_matmul, x, weights[0], arranged, launch=launch))
        compile_together(products)
        started = time.perf_counter()
        table = crossovers_of(torch.device("cuda", torch.cuda.current_device()))
        for count in ROWS:
            record = table.find_or_measure(weights[0], fused_for("cuda"), count)
        measured_s = time.perf_counter() - started
        if record is None or record.refused:
            raise SystemExit(f"{name}: the fused kernel was refused: {record and record.refused}")
        with torch.no_grad():
            for count in ROWS:
                rows.append(
                    {"shape": list(shape), "format": name, "measuring_s": measured_s} | at(count, dense, layers)
                )
                print(auto_line(rows[-1]), flush=True)
    return rows


def at(count: int, dense: list[Tensor], layers: dict[str, list[QuantLinear]]) -> dict[str, Any]:
    x = torch.randn(count, dense[0].shape[1], device="cuda").bfloat16()
    repeats = REPEATS if count < 2048 else 5
    plain = queued_us([partial(functional.linear, x, w) for w in dense], repeats)
    row: dict[str, Any] = {"rows": count, "bf16_us": spread(plain)}
    for kind, stack in layers.items():
        times = queued_us([partial(layer, x) for layer in stack[:8]], repeats)
        picked = stack[0].last_pick
        assert picked is not None
        row[kind] = {
            "us": spread(times),
            "strategy": picked.strategy,
            "reason": picked.reason,
            "times_bf16": statistics.median(plain) / statistics.median(times),
        }
    return row


def auto_line(row: dict[str, Any]) -> str:
    parts = [
        f"{kind} {row[kind]['strategy']:10} {row[kind]['us']['median_us']:8.1f} us {row[kind]['times_bf16']:.2f}x"
        for kind in ("packed", "cached")
    ]
    return f"auto {row['format']:10} {row['rows']:5} rows  BF16 {row['bf16_us']['median_us']:8.1f} us  " + "  ".join(
        parts
    )


# ---- experts ---------------------------------------------------------------------------------------------------------


def experts(bandwidth: float, *, count: int = 32, hidden: int = 2880, top_k: int = 4) -> list[dict[str, Any]]:
    gate_up = encode(torch.randn(count, 2 * hidden, hidden, device="cuda").bfloat16(), "mxfp4")
    down = encode(torch.randn(count, hidden, hidden, device="cuda").bfloat16(), "mxfp4")
    layer = QuantExperts(gate_up, down, strategy="fused")
    arranged = [triton_matmul.arrange_scales(gate_up), triton_matmul.arrange_scales(down)]
    each = (gate_up.nbytes + down.nbytes) // count
    rows = []
    for tokens in (1, 64):
        x = torch.randn(tokens, hidden, device="cuda").bfloat16()
        routes = [  # other experts each time, so that they come from memory
            torch.stack([torch.randperm(count, device="cuda")[:top_k] for _ in range(tokens)]) for _ in range(8)
        ]
        active = [int(ids.unique().numel()) for ids in routes]
        weights = torch.full((tokens, top_k), 1 / top_k, device="cuda").bfloat16()
        with torch.no_grad():
            # Many small launches: a slow host needs more than one pause to queue them.
            times = queued_us([partial(layer, x, ids, weights) for ids in routes], pauses=6)
            grouped_times = queued_us([partial(grouped, x, gate_up, down, arranged, ids) for ids in routes], pauses=6)
        floor_us = statistics.mean(active) * each / bandwidth * 1e6
        rows.append(
            {
                "tokens": tokens,
                "active_experts": statistics.mean(active),
                "floor_us": floor_us,
                "layer_us": spread(times),
                "products_us": spread(grouped_times),
                "layer_over_floor": statistics.median(times) / floor_us,
            }
        )
        print(
            f"experts {tokens} tokens, {statistics.mean(active):.0f} active: layer {statistics.median(times):.1f} us, "
            f"routing and both products {statistics.median(grouped_times):.1f} us, floor {floor_us:.1f} us",
            flush=True,
        )
    return rows


def grouped(x: Tensor, gate_up: Encoded, down: Encoded, arranged: Sequence[Any], ids: Tensor) -> Tensor:
    """Only the routing and the two grouped products: what the kernels themselves take."""
    routing = route(ids, gate_up.shape[0])
    hidden = triton_matmul.fused_experts(x, gate_up, arranged[0], routing)
    return triton_matmul.fused_experts(hidden[:, ::2].contiguous(), down, arranged[1], routing, per_pair=True)


# ---- a whole checkpoint ----------------------------------------------------------------------------------------------


def load(layers: int | None) -> dict[str, Any]:
    from bitplan.files.gpt_oss import make_checkpoint
    from bitplan.packed.checkpoints.load import load_packed

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        started = time.perf_counter()
        make_checkpoint(path, naming="hf", size="20b", device="cuda", layers=layers)
        made_s = time.perf_counter() - started
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loaded = load_packed(path, device="cuda")
        peak = torch.cuda.max_memory_allocated() - before
        ids = torch.arange(16, device="cuda")[None]
        with torch.no_grad():
            logits = loaded.model(ids).logits
        torch.cuda.synchronize()
        running = torch.cuda.max_memory_allocated() - before
    file_bytes = loaded.report.file_bytes
    row = {
        "layers": layers or 24,
        "file_bytes": file_bytes,
        "made_s": made_s,
        "loaded_s": loaded.report.seconds,
        "peak_bytes": peak,
        "peak_over_file": peak / file_bytes,
        "peak_after_forward_over_file": running / file_bytes,
        "logits_finite": bool(logits.isfinite().all()),
    }
    print(
        f"load {row['layers']} layers, {file_bytes / 2**30:.2f} GiB: made in {made_s:.0f} s, loaded in "
        f"{row['loaded_s']:.1f} s, peak {row['peak_over_file']:.3f} of the file, "
        f"{row['peak_after_forward_over_file']:.3f} with a forward",
        flush=True,
    )
    return row


# ---- peers -----------------------------------------------------------------------------------------------------------


def peers() -> list[dict[str, Any]]:
    """torchao's weight-only linears; a peer that does not run here is recorded with its error."""
    rows: list[dict[str, Any]] = []
    shape = SHAPES[0]
    try:
        quantization: Any = importlib.import_module("torchao.quantization")
    except ImportError as error:
        return [{"peer": "torchao", "error": str(error)}]
    configs = {
        "torchao int8 weight-only": quantization.Int8WeightOnlyConfig,
        "torchao int4 weight-only g128": partial(
            quantization.Int4WeightOnlyConfig, group_size=128, int4_packing_format="tile_packed_to_4d"
        ),
    }
    for peer, config in configs.items():
        row: dict[str, Any] = {"peer": peer, "shape": list(shape)}
        try:
            count = turns(shape[0] * shape[1])
            linears = [
                torch.nn.Linear(*shape[::-1], bias=False, device="cuda", dtype=torch.bfloat16) for _ in range(count)
            ]
            for linear in linears:
                quantization.quantize_(linear, config())
            compiled = [torch.compile(linear) for linear in linears]
            with torch.no_grad():
                for rows_of_x in (1, 16):
                    x = torch.randn(rows_of_x, shape[1], device="cuda").bfloat16()
                    times = queued_us([partial(linear, x) for linear in compiled], 5)
                    row[f"rows_{rows_of_x}_us"] = spread(times)
        except Exception as error:  # a peer may fail in its own ways; the table says so
            row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="batch1,auto,experts,load,peers")
    parser.add_argument("--layers", type=int, help="of the checkpoint; 24 if not given")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    parts = options.parts.split(",")
    torch.manual_seed(0)
    os.environ.setdefault("BITPLAN_CACHE_DIR", tempfile.mkdtemp())
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    document: dict[str, Any] = {
        "benchmark": "fused_matmul",
        "machine": harness.machine("cuda"),
        "versions": harness.versions(),
        "commit": harness.commit(),
        "copy_bytes_per_s": bandwidth,
        "repeats": REPEATS,
    }
    steps: dict[str, Callable[[], Any]] = {
        "batch1": lambda: batch1(bandwidth),
        "auto": lambda: auto(SHAPES[0]),
        "experts": lambda: experts(bandwidth),
        "load": lambda: load(options.layers),
        "peers": peers,
    }
    for part in parts:
        document[part] = steps[part]()
        harness.save("fused_matmul_nvidia_h200", document, options.output)  # what is done stays done


if __name__ == "__main__":
    main()
