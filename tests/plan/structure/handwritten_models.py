"""Models as people write them, each a page: what a view must find in them is known by heart."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

WIDTH, HEADS, VOCABULARY = 32, 4, 64


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    return F.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=True).transpose(1, 2).flatten(2)


class RMSNorm(nn.Module):
    """Spelled out, as most people do."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        full = x.float()
        return (full * torch.rsqrt(full.square().mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


# nanoGPT


class CausalSelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(attend(*self.c_attn(x).split(WIDTH, dim=2)))


class NanoMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.gelu = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.gelu(self.c_fc(x)))


class NanoBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = CausalSelfAttention(), NanoMLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(16, WIDTH),
                "h": nn.ModuleList(NanoBlock() for _ in range(layers)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor) -> Tensor:
        positions = torch.arange(idx.shape[1], device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(positions)
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


# torchtitan's llama, and others that differ in one thing


class TitanAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk, self.wv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(attend(self.wq(x), self.wk(x), self.wv(x)))


class TitanFeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, 64, bias=False), nn.Linear(WIDTH, 64, bias=False)
        self.w2 = nn.Linear(64, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TitanBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = TitanAttention(), TitanFeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))


class Titan(nn.Module):
    def __init__(self, block: type[nn.Module] = TitanBlock, layers: int = 2) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(index): block() for index in range(layers)})
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h)
        return self.output(self.norm(h))


class FusedBlock(nn.Module):
    """One projection for q, k and v, one for gate and up, and everything without names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.one, self.two = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.three, self.four = nn.Linear(WIDTH, 128, bias=False), nn.Linear(64, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.two(attend(*self.one(self.a(x)).chunk(3, dim=-1)))
        up, gate = self.three(self.b(x)).chunk(2, dim=-1)
        return x + self.four(up * F.gelu(gate))


class ParallelBlock(nn.Module):
    """Attention and MLP side by side behind one norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(WIDTH), TitanAttention(), TitanFeedForward()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.attention(h) + self.mlp(h)


class LlamaDecoderLayer(nn.Module):
    """The name of a class of transformers, with norms behind attention and MLP as well, as in Gemma 2."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.self_attn, self.mlp = TitanAttention(), TitanFeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x)))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class LeakyBlock(nn.Module):
    """The norm's output goes past the MLP too, and the gate is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(WIDTH)
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, 64, bias=False), nn.Linear(WIDTH, 64, bias=False)
        self.down_proj = nn.Linear(64, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        gate = self.gate_proj(h)
        return h + self.down_proj(F.silu(gate) * self.up_proj(h)) * gate.mean()


# Experts, one Linear each, as in the papers' code


class MoeBlock(nn.Module):
    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.norm, self.gate = RMSNorm(WIDTH), nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(TitanFeedForward() for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, 1)
        weights, chosen = torch.topk(self.gate(flat).softmax(-1), 2)
        result = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, column = torch.where(chosen == number)
            if rows.numel():
                result[rows] += weights[rows, column, None] * expert(flat[rows])
        return x + result.view_as(x)


# Pictures


class DiTBlock(nn.Module):
    """A norm without weights, scaled and moved by what a condition says."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.to_qkv, self.to_out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.ff = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(approximate="tanh"), nn.Linear(64, WIDTH))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition)[:, None].chunk(6, dim=-1)
        h = self.norm1(x) * (1 + scale1) + shift1
        x = x + gate1 * self.to_out(attend(*self.to_qkv(h).chunk(3, dim=-1)))
        return x + gate2 * self.ff(self.norm2(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.time = nn.Conv2d(4, WIDTH, 2, stride=2), nn.Linear(WIDTH, WIDTH)
        self.positions = nn.Parameter(torch.zeros(1, 256, WIDTH))
        self.blocks = nn.ModuleList(DiTBlock() for _ in range(2))
        self.final = nn.Linear(WIDTH, 16)

    def forward(self, latents: Tensor, timestep: Tensor) -> Tensor:
        x = self.patches(latents).flatten(2).transpose(1, 2)
        x = x + self.positions[:, : x.shape[1]]
        angles = timestep[:, None].float() * torch.exp(-torch.arange(WIDTH // 2, device=x.device) / WIDTH)
        condition = self.time(torch.cat([angles.cos(), angles.sin()], dim=-1))
        for block in self.blocks:
            x = block(x, condition)
        return self.final(x)


class ResBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.down, self.middle, self.up = ResBlock(8, 16), ResBlock(16, 16), ResBlock(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        h = self.middle(self.down(F.avg_pool2d(first, 2)))
        return self.last(self.up(torch.cat([F.interpolate(h, scale_factor=2.0), first], dim=1)))


class SpelledGelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
