"""The decode part of benchmarks/streaming.py: what a packed block costs on the GPU once it has arrived.

For one llama block in each format: the transfer of its bytes, its decoding into the scratch, and its seven products at
1k, 4k and 16k tokens, by two ways that give the same numbers up to the order of sums:

    scratch   decode the block, then torch's own products, which is what the runtime does
    fused     products straight over the slot's packed bytes. They want scales in another order (`arrange`), made
              after each transfer; and they give x @ W.T only, so a backward (dy @ W) needs the scratch anyway

The runtime should change where fused wins at the tokens of a training step, arranging included.
"""

from __future__ import annotations

import statistics
from typing import Any

import harness
import torch
from llama_stack import LlamaBlock, Size
from torch import Tensor
from torch.nn import functional

from bitplan.formats.dispatch import encode
from bitplan.packed.products.fused import fused_for
from bitplan.streaming.find_blocks import BlockLayout, ParameterSpec, Piece, lay_out
from bitplan.streaming.options import resolve_formats
from bitplan.streaming.transfer.devices import StreamDevice
from bitplan.streaming.transfer.host_memory import exact_buffer

FORMATS = ("bfloat16", "int8_row", "int8_g128", "fp8_e4m3_row", "mxfp4", "int4_g32")
Row = dict[str, Any]


def pinned_bandwidth(device: StreamDevice, nbytes: int, copies: int = 20, *, out: bool = False) -> float:
    """Bytes a second of copies of this size from pinned memory (`out`: to it), one after another on the copy stream."""
    host, there = exact_buffer(nbytes), device.allocate(nbytes, "bandwidth")
    device.pin(host)
    copy, target, source = (device.copy_out, host, there) if out else (device.copy_in, there, host)
    done = [copy(target, source, device.mark()) for _ in range(copies)]
    device.finish(done[-1].end)
    seconds = [device.elapsed_ms(*one) / 1e3 for one in done[2:]]
    device.unpin(host)
    device.give_back(there)
    return float(nbytes / statistics.median(seconds))


class PackedBlock:
    """One block's matrices in a slot and a scratch, as the runtime has them."""

    def __init__(self, size: Size, fmt: str, device: StreamDevice) -> None:
        torch.manual_seed(0)
        shapes = {name: one.shape for name, one in LlamaBlock(size).named_parameters() if not one.requires_grad}
        specs = {name: ParameterSpec(tuple(shape), size.dtype) for name, shape in shapes.items()}
        self.layout: BlockLayout = lay_out(specs, resolve_formats(fmt, {"block": specs})["block"])
        where = device.torch_device
        self.slot = torch.empty(self.layout.nbytes, dtype=torch.uint8, device=where)
        self.scratch = torch.empty(self.layout.scratch_nbytes, dtype=torch.uint8, device=where)
        for piece in self.layout.pieces.values():
            weight = torch.randn(piece.spec.shape, device=where).mul_(0.02).to(size.dtype)
            piece.write(self.slot, encode(weight, piece.fmt))
        self.matrices: list[Piece] = [one for one in self.layout.pieces.values() if len(one.spec.shape) == 2]

    def decode(self) -> None:
        self.layout.decode_into(self.slot, self.scratch)

    def products(self, x: dict[int, Tensor]) -> None:
        for piece in self.matrices:
            functional.linear(x[piece.spec.shape[1]], piece.weight(self.slot, self.scratch))


def measure_formats(size: Size, device: StreamDevice, repeats: int) -> list[Row]:
    """A row for each format and token count."""
    rows = []
    for fmt in FORMATS:
        block = PackedBlock(size, fmt, device)
        bandwidth = pinned_bandwidth(device, block.layout.nbytes)
        shared = {
            "format": fmt,
            "block_bytes": block.layout.nbytes,
            "pinned_gb_per_s": bandwidth / 1e9,
            "transfer_ms": block.layout.nbytes / bandwidth * 1e3,
        }
        for tokens in size.tokens:
            rows.append(shared | {"tokens": tokens} | measure_products(block, size, tokens, device, repeats))
            print(line_of(rows[-1]), flush=True)
    return rows


def measure_products(block: PackedBlock, size: Size, tokens: int, device: StreamDevice, repeats: int) -> Row:
    where = device.torch_device
    x = {width: torch.randn(tokens, width, device=where).to(size.dtype) for width in (size.hidden, size.ffn)}
    variants = {"decode": block.decode, "products": lambda: block.products(x)}
    why_not = _why_not_fused(block, size.dtype)
    fused = None if why_not else fused_for(where.type)
    if fused is not None:
        packed = [(piece.spec.shape[1], piece.encoded(block.slot)) for piece in block.matrices]
        prepared = [fused.prepare(weight) for _, weight in packed]

        def run_fused() -> None:
            for (width, weight), own in zip(packed, prepared, strict=True):
                fused.run(x[width], weight, own, None, None)

        def arrange() -> None:
            for _, weight in packed:
                fused.prepare(weight)

        variants |= {"arrange": arrange, "fused": run_fused}
    samples = harness.time_in_turns(variants, repeats, cuda=where.type == "cuda")
    row: Row = {f"{name}_ms": statistics.median(times) for name, times in samples.items()}
    row["samples_ms"] = samples
    row["scratch_ms"] = row["decode_ms"] + row["products_ms"]
    if why_not:
        return row | {"fused_refused": why_not}
    row["fused_over_scratch"] = (row["arrange_ms"] + row["fused_ms"]) / row["scratch_ms"]
    return row | {"faster": "fused" if row["fused_over_scratch"] < 1 else "scratch"}


def _why_not_fused(block: PackedBlock, dtype: torch.dtype) -> str | None:
    if block.matrices[0].decoded is None:
        return "sent in its own type: there is nothing to decode"
    fused = fused_for(block.slot.device.type)
    if fused is None:
        return f"no fused product on {block.slot.device.type}"
    return next((why for piece in block.matrices if (why := fused.why_not(piece.encoded(block.slot), dtype))), None)


def line_of(row: Row) -> str:
    text = f"{row['tokens']:>6} tokens  {row['format']:<13} transfer {row['transfer_ms']:7.3f} ms"
    text += f"  decode {row['decode_ms']:6.3f} ms ({row['decode_ms'] / row['transfer_ms']:.1%} of it)"
    text += f"  products {row['products_ms']:8.3f} ms"
    if "fused_refused" in row:
        return text + f"  fused: no ({row['fused_refused']})"
    text += f"  fused {row['fused_ms']:8.3f} + {row['arrange_ms']:.3f} ms"
    return text + f"  = {row['fused_over_scratch']:.2f} x scratch: {row['faster']}"
