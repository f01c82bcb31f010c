"""The model of the streaming benchmark: llama blocks with low-rank adapters on a frozen base, and two plain offloads.

Written out here, because the GPU host has torch and no transformers. Base weights are random; every block is the first
one rolled by its number, which is as good for timing and a hundred times faster than drawing billions of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Size:
    blocks: int
    hidden: int
    ffn: int
    heads: int
    rank: int
    sequence: int
    tokens: tuple[int, ...]
    dtype: torch.dtype
    kv_heads: int | None = None  # fewer heads of keys and values than of queries


FULL = Size(24, 4096, 11008, 32, 16, 1024, (1024, 4096, 16384), torch.bfloat16)
COMPILE: dict[str, Any] = {"dynamic": False}
TINY = Size(5, 128, 256, 4, 4, 8, (8, 16), torch.float32)


class LowRankLinear(nn.Module):
    """A frozen linear and the trained low-rank path beside it."""

    def __init__(self, inputs: int, outputs: int, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype), requires_grad=False)
        self.down = nn.Parameter(torch.randn(rank, inputs).to(dtype) / math.sqrt(inputs))
        self.up = nn.Parameter(torch.zeros(outputs, rank, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight) + functional.linear(functional.linear(x, self.down), self.up)


def rotary(size: Size) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding."""
    width = size.hidden // size.heads
    angles = torch.outer(torch.arange(size.sequence), 10000 ** (-torch.arange(0, width, 2) / width)).repeat(1, 2)
    return angles.cos().to(size.dtype), angles.sin().to(size.dtype)


class Attention(nn.Module):
    """Causal attention of a llama's block, whose layers q, k, v and o and tables of rotations a subclass makes."""

    cos: Tensor
    sin: Tensor
    width: int
    q: nn.Module
    k: nn.Module
    v: nn.Module
    o: nn.Module

    def _attention(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(
            self._rotate(query), self._rotate(key), value, is_causal=True, enable_gqa=key.shape[1] < query.shape[1]
        )
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out

    def _rotate(self, x: Tensor) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        out: Tensor = x * self.cos + torch.cat((-high, low), dim=-1) * self.sin
        return out


class LlamaBlock(Attention):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.width = size.hidden // size.heads

        def linear(inputs: int, outputs: int) -> LowRankLinear:
            return LowRankLinear(inputs, outputs, size.rank, size.dtype)

        keys = size.hidden // size.heads * (size.kv_heads or size.heads)
        self.q, self.o = linear(size.hidden, size.hidden), linear(size.hidden, size.hidden)
        self.k, self.v = linear(size.hidden, keys), linear(size.hidden, keys)
        self.gate, self.up = linear(size.hidden, size.ffn), linear(size.hidden, size.ffn)
        self.down = linear(size.ffn, size.hidden)
        self.norms = nn.ParameterList(
            nn.Parameter(torch.ones(size.hidden, dtype=size.dtype), requires_grad=False) for _ in range(2)
        )
        for name, table in zip(("cos", "sin"), rotary(size), strict=True):
            self.register_buffer(name, table)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attention(functional.rms_norm(x, x.shape[-1:], self.norms[0]))
        hidden = functional.rms_norm(x, x.shape[-1:], self.norms[1])
        out: Tensor = x + self.down(functional.silu(self.gate(hidden)) * self.up(hidden))
        return out


class LlamaStack(nn.Module):
    """Blocks under checkpointing, unless `checkpoints` is off.

    Reentrant checkpointing costs the host least; it needs an input with gradients.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.checkpoints = True
        self.layers = nn.ModuleList(LlamaBlock(size) for _ in range(size.blocks))
        generator = torch.Generator().manual_seed(0)
        for first in self.layers[:1].modules():
            if isinstance(first, LowRankLinear):
                scale = 0.5 / math.sqrt(first.weight.shape[1])
                first.weight.data.normal_(0, scale, generator=generator)
        for number, layer in enumerate(self.layers):
            for mine, first in zip(layer.modules(), self.layers[0].modules(), strict=True):
                if number and isinstance(mine, LowRankLinear) and isinstance(first, LowRankLinear):
                    mine.weight.data.copy_(first.weight.data.roll(number, 0))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) if self.checkpoints else layer(x)
        return x

    @property
    def adapters(self) -> list[nn.Parameter]:
        return [one for one in self.parameters() if one.requires_grad]


def compile_blocks(model: LlamaStack) -> None:
    """Every block by torch.compile; they share their code, so it is compiled once for each number of tokens."""
    torch._dynamo.config.recompile_limit = 64  # with and without gradients, streamed and not, for each of them
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, **COMPILE)


class PlainOffload:
    """What others do, written plainly: whole weights, tensor by tensor, into fresh memory for every block.

    ahead=True   diffusers' group offloading with a stream: pinned weights; while a block computes, the next one in
                 forward order is copied on a side stream. It knows nothing of backward: there, blocks are copied when
                 they are needed. (Diffusers would also prefetch the wrong neighbour then; that is left out.)
    ahead=False  accelerate's cpu_offload: pageable weights, copied synchronously when a block starts.
    """

    def __init__(self, blocks: nn.ModuleList, device: torch.device, *, ahead: bool) -> None:
        self.device, self.ahead, self.blocks = device, ahead, list(blocks)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" and ahead else None
        self.sources = [self._sources(block) for block in self.blocks]
        self.coming: dict[int, list[Tensor]] = {}
        self.last = -1
        for index, block in enumerate(self.blocks):
            block.forward = self._wrapped(index, block.forward)

    def close(self) -> None:
        for block in self.blocks:
            del block.forward

    def _sources(self, block: nn.Module) -> list[tuple[Any, str, Any, Tensor]]:
        result = []
        for module in block.modules():
            for name, one in module._parameters.items():
                if one is not None and not one.requires_grad:
                    pin = self.ahead and self.device.type == "cuda"
                    result.append((module, name, one, one.detach().pin_memory() if pin else one.detach()))
        return result

    def _load(self, index: int) -> list[Tensor]:
        return [source.to(self.device, non_blocking=self.ahead, copy=True) for *_, source in self.sources[index]]

    def _wrapped(self, index: int, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any) -> Tensor:
            weights = self._take(index)
            for (module, name, _, _), weight in zip(self.sources[index], weights, strict=True):
                module._parameters[name] = weight
            try:
                return forward(*args)
            finally:
                for module, name, one, _ in self.sources[index]:
                    module._parameters[name] = one

        return run

    def _take(self, index: int) -> list[Tensor]:
        # Backward comes to block 0 from block 1; a new forward comes to it from block 0 itself.
        forward, self.last = index > self.last or index == self.last == 0, index
        weights = self.coming.pop(index, None)
        self.coming.clear()
        if self.stream is None:
            return self._load(index) if weights is None else weights
        current = torch.cuda.current_stream(self.device)
        if weights is None:
            with torch.cuda.stream(self.stream):
                weights = self._load(index)
        current.wait_stream(self.stream)
        for weight in weights:
            weight.record_stream(current)
        if forward and index + 1 < len(self.blocks):
            with torch.cuda.stream(self.stream):
                self.coming[index + 1] = self._load(index + 1)
        return weights
