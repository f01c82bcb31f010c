"""The 70b part of benchmarks/streaming.py: steps of a model of 70B's shape, whose blocks never all lie on the GPU.

80 llama blocks of h8192, ffn28672 and 8 heads of keys and values (68.4 billion weights; no embedding and no head),
adapters of rank 16, checkpointing, three slots. Every block crosses the bus and is computed at its full size.

What is not real: the numbers on the host. All blocks' weights are one block's, and `SHARED` blocks' bytes lie in pinned
memory and are sent again and again, because filling 68 GB (INT8) or 137 GB (BF16) takes longer than everything that is
measured here, and the machine has 128 GiB. So this shows what a step takes on the bus and on the GPU, and how much
memory it takes there; a host that holds the whole model is not shown by it.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from llama_stack import LlamaBlock, LlamaStack, LowRankLinear, Size, rotary
from stream_decode import pinned_bandwidth
from torch import Tensor, nn

from bitplan.streaming import block_stream as stream_module
from bitplan.streaming.block_stream import stream_blocks
from bitplan.streaming.find_blocks import BlockLayout
from bitplan.streaming.transfer.devices import StreamDevice
from bitplan.streaming.transfer.host_memory import Fill, MemoryHost

LARGE = Size(80, 8192, 28672, 64, 16, 1024, (4096,), torch.bfloat16, kv_heads=8)
TINY_LARGE = Size(5, 128, 256, 4, 4, 8, (8,), torch.float32, kv_heads=2)
SHARED = 2
STARTED = time.perf_counter()
Row = dict[str, Any]


class SharedHost(MemoryHost):
    """Holds the bytes of the first blocks; every later block is sent from them."""

    def put(self, block: str, layout: BlockLayout, fill: Fill) -> Tensor:
        if block not in self._buffers and len(set(map(id, self._buffers.values()))) >= SHARED:
            first = list(self._buffers)[len(self._buffers) % SHARED]
            self._buffers[block], self._layouts[block] = self._buffers[first], layout
        return self._buffers[block] if block in self._buffers else super().put(block, layout, fill)

    def close(self) -> None:
        for block in list(self._buffers)[SHARED:]:
            del self._buffers[block], self._layouts[block]
        super().close()


def make_large(size: Size) -> LlamaStack:
    """A stack whose blocks have adapters and norms of their own, and the base weights of one block."""
    some = torch.randn(2**22, generator=torch.Generator().manual_seed(0)).to(size.dtype)
    shared: dict[str, Tensor] = {}
    stack = LlamaStack(replace(size, blocks=0))
    tables = rotary(size)
    for _ in range(size.blocks):
        with torch.device("meta"):
            block = LlamaBlock(size)
        block.cos, block.sin = tables
        block.norms = nn.ParameterList(
            nn.Parameter(torch.ones(size.hidden, dtype=size.dtype), requires_grad=False) for _ in range(2)
        )
        for name, module in block.named_modules():
            if isinstance(module, LowRankLinear):
                outputs, inputs = module.weight.shape
                if name not in shared:
                    numbers = some.repeat(-(-outputs * inputs // len(some)))[: outputs * inputs]
                    shared[name] = numbers.mul_(0.5 / inputs**0.5).view(outputs, inputs)
                module.weight = nn.Parameter(shared[name], requires_grad=False)
                module.down = nn.Parameter(torch.randn(module.down.shape).to(size.dtype) / inputs**0.5)
                module.up = nn.Parameter(torch.zeros(module.up.shape, dtype=size.dtype))
        stack.layers.append(block)
    return stack


def measure_large(
    size: Size, device: StreamDevice, slots: Any, repeats: int, step_of: Callable[[Any, int, Any], Callable[[], None]]
) -> list[Row]:
    """One row for each format; `step_of` makes a step of a model, a number of tokens and a stream."""
    model, rows = make_large(size), []
    _say("the model is made")
    for name, formats in (("int8", "int8_row"), ("bf16", None)):
        with (
            mock.patch.object(stream_module, "open_host", return_value=SharedHost(device, pinned=True)),
            stream_blocks(model, "layers.*", device=device, formats=formats, slots=slots) as stream,
        ):
            _say(f"{name} is set up")
            for tokens in size.tokens:
                times, step = [], step_of(model, tokens, stream)
                for _ in range(repeats + 1):
                    started = time.perf_counter()
                    step()
                    device.finish(device.mark())
                    times.append((time.perf_counter() - started) * 1e3)
                last = stream.stats.last
                assert last is not None
                into = pinned_bandwidth(device, stream.stats.slot_bytes)
                row = {
                    "tokens": tokens,
                    "variant": name,
                    "median_ms": statistics.median(times[1:]),
                    "first_step_ms": times[0],
                    "transfer_ms": last.bytes_h2d / into * 1e3,
                    "stall_ms": last.stall_ms,
                    "bytes_h2d": last.bytes_h2d,
                    "h2d_gb_per_s": last.h2d_gb_per_s,
                    "vram_peak_bytes": last.vram_peak_bytes,
                    "ring_bytes": stream.stats.vram_bytes,
                    "block_bytes": stream.stats.slot_bytes,
                    "weights": sum(one.numel() for block in stream.blocks for one in block.module.parameters()),
                    "blocks_of_bytes_on_the_host": SHARED,
                }
                rows.append(row)
                print(line_of(row), flush=True)
    return rows


def line_of(row: Row) -> str:
    text = f"{row['tokens']:>6} tokens  {row['weights'] / 1e9:.1f}B weights  {row['variant']:<5}"
    text += f" {row['median_ms']:9.1f} ms  (first {row['first_step_ms']:.0f})"
    text += f"  copying alone {row['transfer_ms']:.1f} ms  stall {row['stall_ms']:.1f} ms"
    peak, ring = row["vram_peak_bytes"] / 1e9, row["ring_bytes"] / 1e9
    return f"{text}  peak {peak:.2f} GB, of it slots and scratch {ring:.2f} GB"


def _say(text: str) -> None:
    print(f"{time.perf_counter() - STARTED:6.1f} s  {text}", file=sys.stderr, flush=True)
