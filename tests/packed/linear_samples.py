"""Weights, inputs and reference products for the tests of packed linears, and the size of a small model of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitplan.formats import Encoded, get_format
from bitplan.formats.codec import decode
from bitplan.formats.dispatch import encode

FORMATS = ("mxfp4", "fp4_u8_g128", "nvfp4", "int8_row", "int8_g128", "int4_g32", "q4_0_gguf", "fp8_e4m3_row")
# Unit roundoff of the type a result is rounded to; sums are float32's (2^-24).
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 2.0**-53}
# Settings of a config of transformers.
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed(name: str, rows: int = 48, cols: int = 256, seed: int = 0) -> Encoded:
    return pack(normal(rows, cols, seed=seed), name)


def pack(x: Tensor, name: str) -> Encoded:
    """A weight whose rows end within a block, as `pad="zero"` gives it, by a loop that asks for whole blocks."""
    fmt, (rows, cols) = get_format(name), x.shape
    filled = torch.nn.functional.pad(x, (0, fmt.padded_cols(cols) - cols))
    return Encoded(fmt, (rows, cols), **encode(filled, fmt).parts)


def exact_linear(x: Tensor, weight: Encoded, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """In float64: the product of the decoded weight, and the sum of magnitudes that rounding errors are measured by."""
    w, wide = decode(weight).double().cpu(), x.detach().double().cpu()
    extra = 0.0 if bias is None else bias.detach().double().cpu()
    size = wide.abs() @ w.abs().T + (extra.abs() if isinstance(extra, Tensor) else 0.0)
    return wide @ w.T + extra, size
