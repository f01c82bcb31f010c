"""The weights part of benchmarks/streaming.py: full fine-tuning, with FP32 masters and AdamW on the host.

A step cannot be shorter than any of these, each taken alone on the same machine:

    computing     forward and backward of the same blocks, all on the GPU, with gradients of the weights
    in, out       the bytes that cross the bus each way, at the bandwidth of pinned copies that way
    optimizer     AdamW over all masters and moments (24 bytes read or written a number, and its gradient), by as many
                  threads as torch has here

The update of a step is applied as a whole, so it starts when the last gradient has arrived, and runs beside the next
step's forward. So this design has a bound of its own: computing, and what the optimizer takes longer than a forward.

`--profile` adds the stages of a step on the host: copying gradients out (with waiting for the backward), waiting for
the last of them, AdamW, writing the bytes to send; and the step with torch's own AdamW in place of the loop.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from llama_stack import LlamaStack, Size
from stream_decode import pinned_bandwidth
from torch import Tensor

from bitplan.formats.dispatch import Picked
from bitplan.streaming.block_stream import BlockStream, stream_blocks
from bitplan.streaming.training import trained_weight as adamw
from bitplan.streaming.training.adamw import AdamWSettings
from bitplan.streaming.transfer.devices import StreamDevice

FORWARD_SHARE = 1 / 4  # of a checkpointed step that computes gradients of weights: one of four times the products
Row = dict[str, Any]


def measure_weights(
    size: Size,
    device: StreamDevice,
    slots: Any,
    repeats: int,
    x_of: Callable[[int], Tensor],
    *,
    profile: bool,
) -> Row:
    """One row for each token count; `x_of` gives the inputs."""
    model = LlamaStack(size)
    for name, one in model.named_parameters():
        one.requires_grad_(name.endswith(".weight"))
    weights = sum(one.numel() for one in model.parameters() if one.requires_grad)
    resident = copy.deepcopy(model).to(device.torch_device)
    computing = {tokens: _median_ms(_resident_step(resident, x_of(tokens)), repeats, device) for tokens in size.tokens}
    del resident
    optimizer_ms = host_adamw_ms(weights // size.blocks) * size.blocks
    rows: list[Row] = []
    settings = AdamWSettings(lr=1e-5)
    with stream_blocks(
        model, "layers.*", device=device, formats="bfloat16", slots=slots, train="weights", optimizer=settings
    ) as stream:
        for tokens in size.tokens:
            step = _streamed_step(model, x_of(tokens), stream)
            median = _median_ms(step, repeats, device)
            stream.synchronize()
            last = stream.stats.last
            assert last is not None
            into, out = (
                pinned_bandwidth(device, stream.stats.slot_bytes),
                pinned_bandwidth(device, stream.stats.slot_bytes, out=True),
            )
            parts = {
                "computing": computing[tokens],
                "in": last.bytes_h2d / into * 1e3,
                "out": last.bytes_d2h / out * 1e3,
                "optimizer": optimizer_ms,
            }
            design = computing[tokens] + max(0.0, optimizer_ms - FORWARD_SHARE * computing[tokens])
            rows.append(
                {
                    "tokens": tokens,
                    "variant": "weights",
                    "median_ms": median,
                    "parts_ms": parts,
                    "bound_ms": max(parts.values()),
                    "bound_by": max(parts, key=lambda name: parts[name]),
                    "times_bound": median / max(parts.values()),
                    "bound_of_design_ms": design,
                    "times_bound_of_design": median / design,
                    "threads": torch.get_num_threads(),
                    "adamw": asdict(adamw.loop_choice()),
                }
            )
            print(line_of(rows[-1]), flush=True)
            if profile:
                rows[-1]["stages_ms"] = stages(stream, step, repeats, device)
                rows[-1]["with_torchs_adamw_ms"] = with_torchs_adamw_ms(stream, step, repeats, device)
                print("        stages", _figures(rows[-1]["stages_ms"]), flush=True)
                print(f"        with torch's AdamW {rows[-1]['with_torchs_adamw_ms']:.1f}", flush=True)
    return {"rows": rows, "weights": weights}


def line_of(row: Row) -> str:
    parts = "  ".join(f"{name} {value:.1f}" for name, value in row["parts_ms"].items())
    times = f"{row['times_bound']:.2f} x the largest, {row['times_bound_of_design']:.2f} x what this design allows"
    return f"{row['tokens']:>6} tokens  weights  {row['median_ms']:9.1f} ms  {parts}  {times}"


STAGES = {"gradients": "_add", "last gradient": "_require_whole", "adamw": "_step_block", "bytes": "_encode"}


def stages(stream: BlockStream, step: Callable[[], None], repeats: int, device: StreamDevice) -> dict[str, float]:
    """Milliseconds a step of each stage, by the host's clock; the first two run beside the backward."""
    training, spent = stream.training, dict.fromkeys(STAGES, 0.0)
    for name, method in STAGES.items():
        _clocked(training, method, spent, name)
    try:
        _median_ms(step, repeats, device)
        stream.synchronize()
    finally:
        for method in STAGES.values():
            training.__dict__.pop(method)
    return {name: seconds * 1e3 / (repeats + 1) for name, seconds in spent.items()}


def _clocked(training: Any, method: str, spent: dict[str, float], name: str) -> None:
    call = getattr(training, method)

    def run(*arguments: Any) -> None:
        started = time.perf_counter()
        call(*arguments)
        spent[name] += time.perf_counter() - started

    setattr(training, method, run)


def with_torchs_adamw_ms(stream: BlockStream, step: Callable[[], None], repeats: int, device: StreamDevice) -> float:
    chosen = adamw.loop_choice
    adamw.loop_choice = lambda: Picked("torch", "for comparison")  # type: ignore[assignment]
    try:
        median = _median_ms(step, repeats, device)
        stream.synchronize()
        return median
    finally:
        adamw.loop_choice = chosen


def _figures(values: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.1f}" for name, value in values.items())


def host_adamw_ms(numbers: int) -> float:
    """One AdamW step over a block's masters on the host."""
    master = torch.zeros(numbers)
    master.grad = torch.ones(numbers)
    optimizer = torch.optim.AdamW([master], lr=1e-5, fused=True)
    optimizer.step()
    times = []
    for _ in range(3):
        started = time.perf_counter()
        optimizer.step()
        times.append((time.perf_counter() - started) * 1e3)
    return min(times)


def _resident_step(model: LlamaStack, x: Tensor) -> Callable[[], None]:
    def step() -> None:
        model(x).float().square().mean().backward()
        model.zero_grad(set_to_none=True)

    return step


def _streamed_step(model: LlamaStack, x: Tensor, stream: BlockStream) -> Callable[[], None]:
    numbers = iter(range(10**9))

    def step() -> None:
        stream.begin_step(next(numbers))
        model(x).float().square().mean().backward()
        stream.end_step()

    return step


def _median_ms(step: Callable[[], None], repeats: int, device: StreamDevice) -> float:
    """Wall time: the host works, too. The last update is waited for by the step after it, as in training."""
    step()
    device.finish(device.mark())
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        step()
        device.finish(device.mark())
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)
