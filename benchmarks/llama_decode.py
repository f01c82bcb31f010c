"""A llama that decodes token by token over a static cache, for benchmarks/decode.py: Hugging Face's names, torch alone.

Layers are alike, so torch.compile compiles one and runs all with it. A step takes tokens [batch, 1] and writes their
keys and values at `position`; `prefill` takes many tokens and writes none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 128256


@dataclass(frozen=True)
class Shape:
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int = 16


SHAPES = {
    "tiny": Shape(256, 512, 4, 2, 64, 2),
    "1b": Shape(2048, 8192, 32, 8, 64),
    "3b": Shape(3072, 8192, 24, 8, 128),  # no launch was tuned on it, and no record is shipped
    "8b": Shape(4096, 14336, 32, 8, 128),
}


class Attention(nn.Module):
    keys: Tensor
    values: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.register_buffer("keys", None, persistent=False)
        self.register_buffer("values", None, persistent=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, position: Tensor | None, mask: Tensor | None) -> Tensor:
        size = self.shape
        query, key, value = (
            layer(x).unflatten(-1, (-1, size.head_dim)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
        if position is None:
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        else:
            self.keys.index_copy_(2, position, key)
            self.values.index_copy_(2, position, value)
            grouped = query.reshape(x.shape[0], size.kv_heads, -1, size.head_dim)
            scores = (grouped @ self.keys.transpose(2, 3)).float() * size.head_dim**-0.5 + mask
            mixed = (scores.softmax(-1).to(x.dtype) @ self.values).reshape(x.shape[0], size.heads, 1, size.head_dim)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(shape), Mlp(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=1e-6)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, position: Tensor | None, mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, position, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DecodingLlama(nn.Module):
    """Embedding, layers, norm, output; `prepare` makes the cache for a batch."""

    def __init__(self, shape: Shape, context: int) -> None:
        super().__init__()
        self.shape, self.context = shape, context
        self.embed_tokens = nn.Embedding(VOCABULARY, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.lm_head = nn.Linear(shape.hidden, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def prepare(self, batch: int) -> None:
        weight, size = self.norm.weight, self.shape
        for layer in self.layers:
            for name in ("keys", "values"):
                made = torch.randn(batch, size.kv_heads, self.context, size.head_dim, device=weight.device)
                setattr(layer.self_attn, name, made.to(weight.dtype))

    def step(self, ids: Tensor, position: Tensor) -> Tensor:
        """The logits [batch, vocabulary] after one more token each."""
        x = self.embed_tokens(ids)
        cos, sin = self._angles(position, x.dtype)
        mask = torch.zeros(self.context, device=x.device).masked_fill(
            torch.arange(self.context, device=x.device) > position, float("-inf")
        )
        for layer in self.layers:
            x = layer(x, cos, sin, position, mask)
        logits: Tensor = self.lm_head(self.norm(x[:, -1]))
        return logits

    def prefill(self, ids: Tensor) -> Tensor:
        """The logits after the last of many tokens."""
        x = self.embed_tokens(ids)
        cos, sin = self._angles(torch.arange(ids.shape[1], device=ids.device), x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, None, None)
        logits: Tensor = self.lm_head(self.norm(x[:, -1]))
        return logits

    forward = prefill

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        width = self.shape.head_dim
        frequency = 10000 ** (-torch.arange(0, width, 2, device=positions.device) / width)
        angles = torch.outer(positions, frequency).repeat(1, 2)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin
