"""Streaming blocks to a GPU: how close a step comes to the larger of computing and copying.

    python benchmarks/streaming.py [--part steps|decode|offload|weights|70b] [--tiny --device cpu] [--slots 3 12 auto]
    python benchmarks/streaming.py --arms resident,int8 --tokens 1024,4096 --trace int8   some rows, and what takes time
    python benchmarks/streaming.py --compile    blocks of every variant through torch.compile

Model: 24 llama blocks (h4096, ffn11008), adapters of rank 16 on a frozen base, checkpointing, AdamW on the adapters;
1k, 4k and 16k tokens a step in sequences of 1024. Per token count, in one run:

    resident      everything on the GPU: what computing alone takes
    bf16, int8, mix60    streamed through `--slots` slots: all BF16, all INT8 (int8_row), 60% of blocks INT8
    one-ahead     plain offload in the manner of diffusers' group offloading
    pageable      synchronous pageable copies, as accelerate's cpu_offload (itself: stream_forward.py)

floor = max(resident, bytes really copied / measured bandwidth of pinned copies of a block's size)
gap   = step / floor - 1
simulated = what a perfect ring of so many slots would take (streaming_bound.py)

`--part decode` is about one block: see stream_decode.py. `--part weights` is full fine-tuning: see stream_weights.py;
with `--blocks 6`, for it takes 16 bytes of host memory a weight. `--part offload` streams INT8 with and without
offload_activations: what it saves on the device, and what it costs in time. `--part 70b`: see stream_70b.py.

`--tiny --device cpu` runs all of it on the simulated device in seconds; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import harness
import stream_70b
import stream_decode
import stream_trace
import stream_weights
import streaming_bound
import torch
from llama_stack import COMPILE, FULL, TINY, LlamaStack, PlainOffload, Size, compile_blocks
from stream_decode import pinned_bandwidth
from stream_rows import Row, Slots, line_of, slots_of, slots_order, table_of
from torch import Tensor

from bitplan.streaming.block_stream import BlockStream, stream_blocks
from bitplan.streaming.options import StreamOptions
from bitplan.streaming.transfer.devices import CudaDevice, SimulatedDevice, StreamDevice

WARM_UP = 2
MANY_TOKENS = 16_000
STARTED = time.perf_counter()
NO_STALL = 0.002
ARMS = ("resident", "bf16", "int8", "mix60", "one-ahead", "pageable")


@dataclass(frozen=True)
class Run:
    """What is measured: variants, each streamed one with these numbers of slots."""

    slots: tuple[Slots, ...] = (3,)
    repeats: int = 7
    arms: tuple[str, ...] = ARMS
    trace: tuple[str, ...] = ()
    compile: bool = False
    profile: bool = False


def formats_of(size: Size) -> dict[str, Any]:
    chosen = streaming_bound.packed_blocks("mix60", size.blocks)
    mix = {f"layers.{block}": "int8_row" if block in chosen else "bfloat16" for block in range(size.blocks)}
    return {"bf16": "bfloat16", "int8": "int8_row", "mix60": mix}


def inputs(size: Size, tokens: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(max(1, tokens // size.sequence), size.sequence, size.hidden, generator=generator)
    return x.to(size.dtype).to(device).requires_grad_()


class Stepper:
    """One training step of the adapters, the same for every variant."""

    def __init__(self, model: LlamaStack, x: Tensor, stream: BlockStream | None = None) -> None:
        self.model, self.x, self.stream, self.step = model, x, stream, 0
        self.optimizer = torch.optim.AdamW(model.adapters, lr=1e-5, fused=True)

    def __call__(self) -> None:
        if self.stream is not None:
            self.stream.begin_step(self.step)
        self.model(self.x).float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.stream is not None:
            self.stream.end_step()
        self.step += 1


def time_steps(step: Callable[[], None], repeats: int, device: torch.device) -> list[float]:
    """Milliseconds of each step; on a GPU all are queued before the first is read, as in training."""
    for _ in range(min(WARM_UP, repeats)):
        step()
    if device.type != "cuda":
        samples = []
        for _ in range(repeats):
            started = time.perf_counter()
            step()
            samples.append((time.perf_counter() - started) * 1e3)
        return samples
    torch.cuda.synchronize(device)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize(device)
    return [float(one.elapsed_time(two)) for one, two in itertools.pairwise(marks)]


# ---- variants: each is set up once and run at every token count ------------------------------------------------------


def run_resident(model: LlamaStack, batches: dict[int, Tensor], run: Run) -> list[Row]:
    device = next(iter(batches.values())).device
    resident = copy.deepcopy(model).to(device)
    if run.compile:
        compile_blocks(resident)
    _say("resident is set up")
    return [_timed("resident", tokens, Stepper(resident, x), run, device) for tokens, x in batches.items()]


def run_streamed(
    name: str,
    model: LlamaStack,
    batches: dict[int, Tensor],
    formats: Any,
    device: StreamDevice,
    run: Run,
    *,
    offload: bool = False,
) -> list[Row]:
    rows: list[Row] = []
    options: dict[str, Any] = {
        "offload_activations": offload,
        "options": StreamOptions(compile=COMPILE if run.compile else False),
    }
    with stream_blocks(model, "layers.*", device=device, formats=formats, slots=run.slots[0], **options) as stream:
        _say(f"{name} is set up")
        for slots in run.slots:
            stream.set_slots(slots)
            for tokens, x in batches.items():
                if slots != "auto" and any(row["tokens"] == tokens and row["stall_share"] < NO_STALL for row in rows):
                    continue  # more slots help where a step waits for copies
                row = _timed(name, tokens, Stepper(model, x, stream), run, device.torch_device)
                rows.append(row | {"slots": slots} | _figures_of(stream))
    return rows


def _figures_of(stream: BlockStream) -> Row:
    last = (stats := stream.stats).last
    assert last is not None
    return {
        "bytes_h2d": last.bytes_h2d,
        "bytes_h2d_by_format": dict(last.bytes_h2d_by_format),
        "bytes_d2h": last.bytes_d2h,
        "block_bytes": stats.slot_bytes,
        "loads": last.loads,
        "prefetch_misses": last.prefetch_misses,
        "h2d_gb_per_s": last.h2d_gb_per_s,
        "stall_ms": last.stall_ms,
        "stall_share": last.stall_ms / last.step_ms,
        "overlap": last.overlap,
        "vram_peak_bytes": last.vram_peak_bytes,
        "ring_bytes": stats.vram_bytes,
        "ring_slots": stats.ring_slots,
        "resident_blocks": stats.resident_blocks,
        "pinned_bytes": stats.pinned_bytes,
    }


def run_plain(name: str, model: LlamaStack, batches: dict[int, Tensor], run: Run, *, ahead: bool) -> list[Row]:
    device = next(iter(batches.values())).device
    if run.compile:
        compile_blocks(model)
    offload = PlainOffload(model.layers, device, ahead=ahead)
    _say(f"{name} is set up")
    try:
        return [_timed(name, tokens, Stepper(model, x), run, device) for tokens, x in batches.items()]
    finally:
        offload.close()


def _timed(variant: str, tokens: int, step: Stepper, run: Run, device: torch.device) -> Row:
    repeats = run.repeats if tokens < MANY_TOKENS else min(run.repeats, 3)  # long steps differ little
    row: Row = {"tokens": tokens, "variant": variant, **harness.summary(time_steps(step, repeats, device))}
    _say(f"{variant}, {tokens} tokens: {row['median_ms']:.1f} ms a step")
    if variant in run.trace and device.type == "cuda" and tokens < MANY_TOKENS:
        row["trace"] = stream_trace.trace(step)
        _say(stream_trace.line_of(variant, tokens, row["trace"]))
        if tokens == min(FULL.tokens):
            _say(stream_trace.host_profile(step))
    return row


def _say(text: str) -> None:
    """What is going on, for setting up takes longer than measuring."""
    print(f"{time.perf_counter() - STARTED:6.1f} s  {text}", file=sys.stderr, flush=True)


def run_all(model: LlamaStack, size: Size, device: StreamDevice, run: Run) -> list[Row]:
    batches = {tokens: inputs(size, tokens, device.torch_device) for tokens in size.tokens}
    rows = run_resident(model, batches, run)
    streamed_rows = []
    for name, formats in formats_of(size).items():
        if name not in run.arms:
            continue
        streamed = run_streamed(name, model, batches, formats, device, run)
        # Copies within steps were at times faster than those measured alone.
        alone = pinned_bandwidth(device, streamed[0]["block_bytes"])
        bandwidth = max(alone, *(1e9 * (row["h2d_gb_per_s"] or 0.0) for row in streamed))
        streamed_rows += [(row, bandwidth) for row in streamed]
    # A GPU gets slower as it gets warm: the shorter time of two is what computing takes.
    few = {tokens: x for tokens, x in batches.items() if tokens < MANY_TOKENS}
    for row, again in zip(rows, run_resident(model, few, replace(run, trace=())), strict=False):
        row["again_ms"] = again["median_ms"]
    compute_ms = {row["tokens"]: min(row["median_ms"], row.get("again_ms", row["median_ms"])) for row in rows}
    rows += [row | bound_of(row, rate, compute_ms[row["tokens"]], size.blocks) for row, rate in streamed_rows]
    # Streaming has left the adapters on the device, where these want them too.
    if "one-ahead" in run.arms:
        rows += run_plain("one-ahead", model, batches, run, ahead=True)
    if "pageable" in run.arms:
        rows += run_plain("pageable", model, few, replace(run, repeats=1), ahead=False)
    rows.sort(key=lambda row: (row["tokens"], slots_order(row.get("slots", 0))))
    for row in rows:
        row["times_resident"] = row["median_ms"] / compute_ms[row["tokens"]]
        print(line_of(row), flush=True)
    return rows


def bound_of(row: Row, bandwidth: float, computed_ms: float, blocks: int) -> Row:
    """What a step takes at least: by the larger of computing and copying, and by a perfect ring of its slots."""
    transfer_ms = row["bytes_h2d"] / bandwidth * 1e3
    bound_ms = max(computed_ms, transfer_ms)
    simulated_ms = bound_ms
    if row["loads"]:
        packed = streaming_bound.packed_blocks(row["variant"], blocks)
        copy_ms = transfer_ms / row["loads"]
        ring = row["ring_slots"], computed_ms, copy_ms, row["resident_blocks"]
        simulated = streaming_bound.simulate(blocks, *ring, packed=packed)
        simulated_ms = simulated["step_ms"]
    return {
        "pinned_gb_per_s": bandwidth / 1e9,
        "transfer_ms": transfer_ms,
        "bound_ms": bound_ms,
        "times_bound": row["median_ms"] / bound_ms,
        "is_transfer_bound": transfer_ms > computed_ms,
        "simulated_ms": simulated_ms,
        "times_simulated": row["median_ms"] / simulated_ms,
    }


def run_offload(model: LlamaStack, size: Size, device: StreamDevice, run: Run) -> list[Row]:
    """The same steps with block inputs on the device and in pinned memory; inputs are checkpointed both times."""
    batches = {tokens: inputs(size, tokens, device.torch_device) for tokens in size.tokens}
    rows = []
    for name, offload in (("kept", False), ("offloaded", True)):
        model.checkpoints = not offload  # the stream does it then
        rows += run_streamed(name, model, batches, "int8_row", device, run, offload=offload)
    stored = {row["tokens"]: row for row in rows if row["variant"] == "kept"}
    rows.sort(key=lambda row: row["tokens"])
    for row in rows:
        row["times_kept"] = row["median_ms"] / stored[row["tokens"]]["median_ms"]
        row["saved_bytes"] = stored[row["tokens"]]["vram_peak_bytes"] - row["vram_peak_bytes"]
        text = f"{row['tokens']:>6} tokens  {row['variant']:<10} {row['median_ms']:9.2f} ms"
        text += f"  {row['times_kept']:.3f} x kept  peak {row['vram_peak_bytes'] / 1e9:.3f} GB"
        text += f" (saved {row['saved_bytes'] / 1e9:.3f})  out {row['bytes_d2h'] / 1e9:.3f} GB"
        print(f"{text}  stall {row['stall_share']:.1%}", flush=True)
    return rows


# ---- what was asked for ----------------------------------------------------------------------------------------------


def criteria(rows: list[Row]) -> list[Row]:
    """Each demand with its figure."""
    result: list[Row] = []
    streamed = {(row["tokens"], row["slots"], row["variant"]): row for row in rows if "times_bound" in row}
    plain = {(row["tokens"], row["variant"]): row for row in rows if "times_bound" not in row}

    def demand(name: str, value: float, limit: float, *, at_least: bool) -> None:
        met = value >= limit if at_least else value <= limit
        result.append({"demand": name, "value": value, "limit": limit, "at_least": at_least, "met": met})

    for (tokens, slots, variant), row in streamed.items():
        demand(f"step over bound, {variant}, {tokens} tokens, {slots} slots", row["times_bound"], 1.03, at_least=False)
    for tokens, slots in sorted({key[:2] for key in streamed}, key=lambda key: (key[0], slots_order(key[1]))):
        bf16, int8, mix = (streamed.get((tokens, slots, name)) for name in ("bf16", "int8", "mix60"))
        case = f"{tokens} tokens, {slots} slots"
        if bf16 is None:
            continue
        if int8 is not None and bf16["bytes_h2d"]:
            demand(f"INT8 bytes over BF16, {case}", int8["bytes_h2d"] / bf16["bytes_h2d"], 0.52, at_least=False)
        # A gain in time is asked for where time goes into copying, so where the faster of the two still is bound by it.
        for name, other, limit in (("all-INT8", int8, 1.8), ("60% mix", mix, 1.35)):
            if other is not None and other["is_transfer_bound"]:
                demand(f"{name} against BF16, {case}", bf16["median_ms"] / other["median_ms"], limit, at_least=True)
        for name in ("resident", "one-ahead", "pageable"):
            if (tokens, name) in plain:
                ratio = plain[tokens, name]["median_ms"] / bf16["median_ms"]
                result.append({"ratio": f"{name} over streamed BF16, {case}", "value": ratio})
    return result


def measure(size: Size, device: StreamDevice, run: Run) -> dict[str, Any]:
    rows = run_all(LlamaStack(size), size, device, run)
    return document_of("streaming", size, device, run, rows) | {"criteria": criteria(rows)}


def document_of(name: str, size: Size, device: StreamDevice, run: Run, rows: list[Row]) -> dict[str, Any]:
    kind = device.torch_device.type
    return {
        "benchmark": name,
        "machine": harness.machine(kind),
        "versions": harness.versions(),
        "commit": harness.commit(),
        "model": {
            "blocks": size.blocks,
            "hidden": size.hidden,
            "ffn": size.ffn,
            "rank": size.rank,
            "sequence": size.sequence,
            "dtype": str(size.dtype).removeprefix("torch."),
        },
        "simulated": kind != "cuda",
        "slots": list(run.slots),
        "compiled": run.compile,
        "rows": rows,
    }


def measure_part(part: str, size: Size, device: StreamDevice, run: Run) -> dict[str, Any]:
    if part == "steps":
        return measure(size, device, run)
    if part == "weights":
        more = stream_weights.measure_weights(
            size,
            device,
            run.slots[0],
            run.repeats,
            lambda tokens: inputs(size, tokens, device.torch_device),
            profile=run.profile,
        )
        return document_of("streaming, weights part", size, device, run, more.pop("rows")) | more
    if part == "70b":
        size = stream_70b.TINY_LARGE if size is TINY else stream_70b.LARGE
        x = inputs(size, size.tokens[0], device.torch_device)
        step_of = lambda model, _, stream: Stepper(model, x, stream)
        rows = stream_70b.measure_large(size, device, run.slots[0], run.repeats, step_of)
    elif part == "offload":
        rows = run_offload(LlamaStack(size), size, device, run)
    else:
        rows = stream_decode.measure_formats(size, device, run.repeats)
    return document_of(f"streaming, {part} part", size, device, run, rows)


def named(parser: argparse.ArgumentParser, text: str) -> tuple[str, ...]:
    names = tuple(text.split(",")) if text else ()
    if unknown := sorted(set(names) - set(ARMS)):
        parser.error(f"unknown variants {', '.join(unknown)}; expected some of {', '.join(ARMS)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("steps", "decode", "offload", "weights", "70b"), default="steps")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of toy size, to see that everything runs")
    parser.add_argument("--blocks", type=int, default=FULL.blocks, help="how many blocks (not with --tiny)")
    parser.add_argument("--slots", type=slots_of, nargs="+", default=[3], help="numbers, or auto: as many as fit")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--arms", default=",".join(ARMS), help="some variants alone; resident is always measured")
    parser.add_argument("--tokens", help="some token counts alone: 1024,4096")
    parser.add_argument(
        "--trace", default="", help="variants of which to say how busy the bus, the GPU and the host are"
    )
    parser.add_argument("--compile", action="store_true", help="blocks of every variant through torch.compile")
    parser.add_argument("--profile", action="store_true", help="--part weights: what each stage of a step takes")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.device == "cpu" and not arguments.tiny:
        parser.error("--device cpu goes with --tiny: the simulated device measures nothing")
    size = TINY if arguments.tiny else Size(arguments.blocks, *list(vars(FULL).values())[1:])
    if arguments.tokens:
        size = replace(size, tokens=tuple(int(count) for count in arguments.tokens.split(",")))
    arms, trace = (named(parser, one) for one in (arguments.arms, arguments.trace))
    run = Run(tuple(arguments.slots), arguments.repeats, arms, trace, arguments.compile, arguments.profile)
    device: StreamDevice = CudaDevice("cuda") if arguments.device == "cuda" else SimulatedDevice()
    document = measure_part(arguments.part, size, device, run)
    kind = "streaming_" if arguments.part == "steps" else f"streaming_{arguments.part}_"
    name = kind + document["machine"].get("gpu", "simulated").lower().replace(" ", "_")
    print(harness.save(name, document, arguments.output))
    if arguments.part == "steps":
        print(table_of(document["rows"]))
    for one in document.get("criteria", []):
        if "met" in one:
            sign = ">=" if one["at_least"] else "<="
            print(f"{'met   ' if one['met'] else 'MISSED'} {one['demand']}: {one['value']:.3f} ({sign} {one['limit']})")
        else:
            print(f"       {one['ratio']}: {one['value']:.2f}")


if __name__ == "__main__":
    main()
