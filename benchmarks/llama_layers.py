"""Llama layers for the FP8 benchmark, under Hugging Face's names, and a small language model made of them.

Written out here so that the benchmark needs torch alone. `LlamaDecoderLayer` has the names and the order of calls of
transformers' class of that name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Size:
    """Sizes of a layer; heads are 128 wide unless `head_dim` says otherwise."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int = 128

    @property
    def label(self) -> str:
        return f"h{self.hidden}_ffn{self.ffn}"

    def config(self, layers: int) -> dict[str, object]:
        """The config.json that `bitplan fp8 bench` reads."""
        return {
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
        }


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.q_proj = nn.Linear(size.hidden, size.heads * size.head_dim, bias=False)
        self.k_proj = nn.Linear(size.hidden, size.kv_heads * size.head_dim, bias=False)
        self.v_proj = nn.Linear(size.hidden, size.kv_heads * size.head_dim, bias=False)
        self.o_proj = nn.Linear(size.heads * size.head_dim, size.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.size.head_dim)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = functional.scaled_dot_product_attention(
            rotated(query, cos, sin), rotated(key, cos, sin), value, is_causal=True, enable_gqa=True
        )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size.hidden, size.ffn, bias=False)
        self.up_proj = nn.Linear(size.hidden, size.ffn, bias=False)
        self.down_proj = nn.Linear(size.ffn, size.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class LlamaDecoderLayer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(size), Mlp(size)
        self.input_layernorm = nn.RMSNorm(size.hidden, eps=1e-6)
        self.post_attention_layernorm = nn.RMSNorm(size.hidden, eps=1e-6)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class LlamaLayers(nn.Module):
    """A stack of layers on hidden states."""

    def __init__(self, size: Size, count: int) -> None:
        super().__init__()
        self.size = size
        self.layers = nn.ModuleList(LlamaDecoderLayer(size) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = angles(x.shape[1], self.size.head_dim, x.device, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


class TinyLlama(nn.Module):
    """A language model: embedding, layers, norm, output.

    Embeddings have a deviation of 1, as nn.Embedding makes them. With 0.02, as the other weights have, the first norms
    multiply gradients by 50, and the loss jumps about in the first steps, whatever the arithmetic.
    """

    def __init__(self, size: Size, count: int, vocabulary: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, size.hidden)
        self.model = LlamaLayers(size, count)
        self.norm = nn.RMSNorm(size.hidden, eps=1e-6)
        self.lm_head = nn.Linear(size.hidden, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2 and parameter is not self.embed_tokens.weight:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * count) if residual else 1.0))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        logits = self.lm_head(self.norm(self.model(self.embed_tokens(ids))))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def angles(length: int, width: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    frequency = 10000 ** (-torch.arange(0, width, 2, device=device) / width)
    angles = torch.outer(torch.arange(length, device=device), frequency).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin
