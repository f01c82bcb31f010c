"""Encode and decode against memory bandwidth: how close each format comes to copying the same bytes.

    python benchmarks/formats.py --device cpu      # float32 <-> format, against tensor.clone() and gguf-py
    python benchmarks/formats.py --device cuda     # bfloat16 and float32, against a device-to-device copy

Bandwidth counts bytes really read and written, scales included: the floor of an encode is its input plus its output.
`share_of_copy` is that bandwidth over the fastest copy's of the run; all are timed in turns. On a GPU the kernels are
timed by themselves, and `call_ms` is a whole call of `bitplan.encode` or `decode`, waiting for its result: it adds the
host's part, and for encode the check that every scale is finite.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor

from bitplan import formats
from bitplan.formats import Encoded, get_format
from bitplan.formats.dispatch import decode, encode, explain_decode, explain_encode

CPU_FORMATS = (
    *("bfloat16", "int8_row", "int8_g128", "q4_0_gguf", "q4_0_poly", "q8_0_gguf", "mxfp4", "mxfp4_gguf", "int4_g32"),
    "fp8_e4m3_row",
)
GPU_FORMATS = ("int8_row", "int8_g128", "fp8_e4m3_row", "mxfp4", "mxfp8_e4m3", "q8_0_gguf", "int4_g32", "q4_0_gguf")
GGUF_TYPES = {"q4_0_gguf": "Q4_0", "q8_0_gguf": "Q8_0", "mxfp4_gguf": "MXFP4"}
COLS = 4096
GGUF_SHARE = 16  # gguf-py and plain torch get a sixteenth of the numbers: their time is linear, and minutes otherwise


def measure(device: str, values: int, repeats: int) -> dict[str, Any]:
    """Everything for one device, as a document."""
    shape = (values // COLS, COLS)
    generator = torch.Generator(device).manual_seed(0)
    numbers = torch.randn(shape, generator=generator, device=device)
    inputs = {"float32": numbers} if device == "cpu" else {"bfloat16": numbers.bfloat16(), "float32": numbers}
    rows: list[dict[str, Any]] = []
    copies: dict[str, Any] = {}
    for dtype, x in inputs.items():
        for name in CPU_FORMATS if device == "cpu" else GPU_FORMATS:
            result = measure_format(name, x, repeats)
            rows += result["rows"]
            copies[f"{dtype} beside {name}"] = result["copy"]
    # The fastest copy of the run is the yardstick: how fast one runs depends on what was freed before it.
    yardstick = max(copy["gb_per_s"] for copy in copies.values())
    for row in rows:
        row["share_of_copy"] = row["gb_per_s"] / yardstick
    return {
        "benchmark": "formats",
        "device": device,
        "machine": harness.machine(device),
        "versions": harness.versions(),
        "commit": harness.commit(),
        "shape": list(shape),
        "repeats": repeats,
        "peers": f"plain torch and gguf-py on 1/{GGUF_SHARE} of the numbers, their time times {GGUF_SHARE}",
        "copy_gb_per_s": yardstick,
        "copy": copies,
        "rows": rows,
    }


def measure_format(name: str, x: Tensor, repeats: int) -> dict[str, Any]:
    """One format both ways, in turns with a copy and, on the CPU, with plain torch and gguf-py."""
    fmt = get_format(name)
    encoded = encode(x, fmt)
    variants = {"copy": _copy(x)} | (_gpu_variants(x, encoded) if x.is_cuda else _cpu_variants(x, encoded))
    samples = harness.time_in_turns(variants, repeats, cuda=x.is_cuda)
    if x.is_cuda:
        calls = {"encode": lambda: encode(x, fmt), "decode": lambda: decode(encoded, x.dtype)}
        waiting = {way: _waiting(call) for way, call in calls.items()}
        samples |= {f"call {way}": times for way, times in harness.time_in_turns(waiting, repeats).items()}
    copy = harness.summary(samples["copy"])
    copy_rate = 2 * x.nbytes / copy["median_ms"] / 1e6
    rows = []
    for way in ("encode", "decode"):
        time = harness.summary(samples[way])
        rate = (x.nbytes + encoded.nbytes) / time["median_ms"] / 1e6
        row = {
            "format": name,
            "way": way,
            "dtype": str(x.dtype).removeprefix("torch."),
            **time,
            "gb_per_s": rate,
            "implementation": _picked(way, x, encoded),
            "samples_ms": [round(sample, 5) for sample in samples[way]],
        }
        if f"call {way}" in samples:
            row["call_ms"] = harness.summary(samples[f"call {way}"])["median_ms"]
        for peer in ("torch", "gguf"):
            if f"{peer} {way}" in samples:
                peer_ms = harness.summary(samples[f"{peer} {way}"])["median_ms"] * GGUF_SHARE
                row[f"times_faster_than_{peer}"] = peer_ms / time["median_ms"]
        rows.append(row)
    return {"rows": rows, "copy": {**copy, "gb_per_s": copy_rate}}


def _gpu_variants(x: Tensor, encoded: Encoded) -> dict[str, Callable[[], object]]:
    from bitplan.formats.triton_codec import DECODERS, ENCODERS

    fmt = encoded.fmt
    return {"encode": lambda: ENCODERS[fmt.name](x, fmt), "decode": lambda: DECODERS[fmt.name](encoded, x.dtype)}


def _cpu_variants(x: Tensor, encoded: Encoded) -> dict[str, Callable[[], object]]:
    fmt = encoded.fmt
    small = x[: x.shape[0] // GGUF_SHARE]
    small_encoded = encode(small, fmt)
    return {
        "encode": lambda: encode(x, fmt),
        "decode": lambda: decode(encoded, x.dtype),
        "torch encode": lambda: formats.encode(small, fmt),
        "torch decode": lambda: formats.decode(small_encoded, x.dtype),
        **_gguf_variants(fmt.name, small, small_encoded),
    }


def _waiting(call: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        result = call()
        torch.cuda.synchronize()
        return result

    return run


def _copy(x: Tensor) -> Callable[[], object]:
    if not x.is_cuda:
        return x.clone
    target = torch.empty_like(x)
    return lambda: target.copy_(x)


def _picked(way: str, x: Tensor, encoded: Encoded) -> str:
    picked = explain_encode(x, encoded.fmt) if way == "encode" else explain_decode(encoded, x.dtype)
    return picked.implementation


def _gguf_variants(name: str, x: Tensor, encoded: Encoded) -> dict[str, Callable[[], object]]:
    if name not in GGUF_TYPES:
        return {}
    import gguf

    kind = gguf.GGMLQuantizationType[GGUF_TYPES[name]]
    numbers = x.numpy()
    packed = gguf.quants.quantize(numbers, kind)
    assert packed.tobytes() == encoded.to_bytes(), f"{name} differs from gguf-py"
    return {
        "gguf encode": lambda: gguf.quants.quantize(numbers, kind),
        "gguf decode": lambda: gguf.quants.dequantize(packed, kind),
    }


def show(document: dict[str, Any]) -> None:
    heads = ("ms", "GB/s", "of copy", "call ms", "x torch", "x gguf")
    print(f"{'format':14} {'way':7} {'dtype':9} " + " ".join(f"{head:>8}" for head in heads) + "  by")
    for row in document["rows"]:
        torch_times = f"{row['times_faster_than_torch']:.1f}" if "times_faster_than_torch" in row else ""
        gguf_times = f"{row['times_faster_than_gguf']:.1f}" if "times_faster_than_gguf" in row else ""
        call_ms = f"{row['call_ms']:.3f}" if "call_ms" in row else ""
        print(
            f"{row['format']:14} {row['way']:7} {row['dtype']:9} {row['median_ms']:8.3f} {row['gb_per_s']:8.1f} "
            f"{row['share_of_copy']:8.1%} {call_ms:>8} {torch_times:>8} {gguf_times:>8}  {row['implementation']}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--values", type=int, default=2**26, help="numbers in the tensor (default 64M)")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path, help="where the JSON goes (default benchmarks/results)")
    arguments = parser.parse_args()
    document = measure(arguments.device, arguments.values, arguments.repeats)
    processor = document["machine"].get("gpu", document["machine"]["cpu"])
    path = harness.save(f"formats_{processor.lower().replace(' ', '_').replace('-', '_')}", document, arguments.output)
    show(document)
    print(f"written: {path.name}")


if __name__ == "__main__":
    main()
