"""Layers as different projects write them, for the FP8 benchmark: the same work under other names and in other pieces.

llama      transformers' llama: q_proj, k_proj, v_proj, o_proj; gate_proj, up_proj, down_proj; RMS norms
titan      torchtitan's llama: attention.wq, wk, wv, wo; feed_forward.w1, w3, w2; attention_norm, ffn_norm
fused      q, k and v in one linear, gate and up in another, as Phi-3 has them
nanogpt    nanoGPT's block: c_attn, c_proj; c_fc of four times the width, GELU, c_proj; layer norms; biases everywhere
"""

from __future__ import annotations

import torch
from llama_layers import LlamaDecoderLayer, Size, angles, rotated
from torch import Tensor, nn
from torch.nn import functional


class TitanAttention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_dim = size.head_dim
        self.wq = nn.Linear(size.hidden, size.heads * size.head_dim, bias=False)
        self.wk = nn.Linear(size.hidden, size.kv_heads * size.head_dim, bias=False)
        self.wv = nn.Linear(size.hidden, size.kv_heads * size.head_dim, bias=False)
        self.wo = nn.Linear(size.heads * size.head_dim, size.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
        xq, xk, xv = (each.view(batch, length, -1, self.head_dim).transpose(1, 2) for each in (xq, xk, xv))
        xq, xk = rotated(xq, cos, sin), rotated(xk, cos, sin)
        mixed = functional.scaled_dot_product_attention(xq, xk, xv, is_causal=True, enable_gqa=True)
        out: Tensor = self.wo(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class FeedForward(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.w1 = nn.Linear(size.hidden, size.ffn, bias=False)
        self.w2 = nn.Linear(size.ffn, size.hidden, bias=False)
        self.w3 = nn.Linear(size.hidden, size.ffn, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return out


class TitanBlock(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention, self.feed_forward = TitanAttention(size), FeedForward(size)
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(size.hidden, eps=1e-5) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class FusedAttention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_dim, self.sizes = size.head_dim, [size.heads * size.head_dim, *[size.kv_heads * size.head_dim] * 2]
        self.qkv_proj = nn.Linear(size.hidden, sum(self.sizes), bias=False)
        self.o_proj = nn.Linear(self.sizes[0], size.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        parts = self.qkv_proj(x).split(self.sizes, dim=-1)
        query, key, value = (each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in parts)
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class FusedMlp(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(size.hidden, 2 * size.ffn, bias=False)
        self.down_proj = nn.Linear(size.ffn, size.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: Tensor = self.down_proj(functional.silu(gate) * up)
        return out


class FusedBlock(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.self_attn, self.mlp = FusedAttention(size), FusedMlp(size)
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(size.hidden, eps=1e-5) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class LayerNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class CausalSelfAttention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.c_attn, self.c_proj = nn.Linear(size.hidden, 3 * size.hidden), nn.Linear(size.hidden, size.hidden)
        self.resid_dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.c_attn(x).split(width, dim=2)
        query, key, value = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.resid_dropout(self.c_proj(mixed.transpose(1, 2).contiguous().view(batch, length, width)))
        return out


class GeluMlp(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.c_fc, self.gelu, self.c_proj = (
            nn.Linear(size.hidden, size.ffn),
            nn.GELU(),
            nn.Linear(size.ffn, size.hidden),
        )
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.c_proj(self.gelu(self.c_fc(x))))
        return out


class GptBlock(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.ln_1, self.attn = LayerNorm(size.hidden), CausalSelfAttention(size)
        self.ln_2, self.mlp = LayerNorm(size.hidden), GeluMlp(size)

    def forward(self, x: Tensor, _cos: Tensor, _sin: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


STYLES = {"llama": LlamaDecoderLayer, "titan": TitanBlock, "fused": FusedBlock, "nanogpt": GptBlock}


def size_for(style: str, size: Size) -> Size:
    """The size as a style has it: nanoGPT's MLP is four times as wide as the model."""
    return Size(size.hidden, 4 * size.hidden, size.heads, size.heads, size.head_dim) if style == "nanogpt" else size


class StyledLayers(nn.Module):
    """A stack of layers of one style on hidden states."""

    def __init__(self, style: str, size: Size, count: int) -> None:
        super().__init__()
        self.size = size_for(style, size)
        self.layers = nn.ModuleList(STYLES[style](self.size) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = angles(x.shape[1], self.size.head_dim, x.device, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x
