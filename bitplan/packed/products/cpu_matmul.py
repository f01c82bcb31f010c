"""Other products with packed weights on a CPU than ours (`cpu_fused`): torch's 4-bit kernel, and pieces in float32.

**Pieces.** The matrix is expanded a few megabytes at a time (`pieces`), in float32 always: a CPU without bfloat16
hardware multiplies bfloat16 thirty times slower. A piece is a quarter of the last-level cache: smaller pieces lose time
at the start of each product, larger ones to memory. The whole matrix is never expanded at once.

**torch's 4-bit kernel** (`_dyn_quant_matmul_4bit`, KleidiAI on Arm) multiplies integers: each row of x is rounded to
8-bit integers with a step of (max(x, 0) - min(x, 0)) / 255, so a result is off by at most step * sum_k |w_nk|; for
normally distributed inputs by 0.5 to 0.9 % in norm. It takes int4_g32 unchanged, but copied into its own order:
bfloat16 scales (with float32 scales it runs 150 times slower), codes q + 8, even index low.

The kernel is tried once: a machine that lacks it, or on which it gives wrong numbers, uses pieces.

Neoverse-N1, 2 cores under other load (on an idle machine all times are about half), 4096 x 4096, ms at 1 / 16 / 128
rows:

| | int4_g32 | q4_0_gguf | mxfp4 | int8_row |
|---|---|---|---|---|
| torch's 4-bit kernel | 1.5 / 14 / 90 | | | |
| pieces of 8 MiB | 20 / 49 / 171 | 18 / 49 / 173 | 21 / 50 / 176 | 17 / 47 / 174 |
| expanded before | 6.0 / 31 / 138 | 6.0 / 31 / 136 | 5.9 / 31 / 137 | 6.0 / 31 / 137 |

float32 `nn.Linear` 4.7 / 29 / 133. q4_0_gguf by size of piece: 1 MiB 33 / 139 / 260, 4 MiB 25 / 61 / 167, 8 MiB
19 / 49 / 168, 16 MiB 15 / 42 / 149, all at once 12 / 36 / 142.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from bitplan.base.errors import FormatError
from bitplan.formats import Encoded
from bitplan.formats.codec import decode, encode

FOUR_BIT_FORMAT = "int4_g32"
GROUP = 32
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_MIB = 2**20
_SUFFIXES = {"K": 2**10, "M": 2**20, "G": 2**30}


# ---- pieces ----------------------------------------------------------------------------------------------------------


@functools.cache
def piece_bytes() -> int:
    """A quarter of the last-level cache, within 2 and 16 MiB; 8 MiB if the cache size is unknown."""
    sizes = []
    for path in sorted(_CACHES.glob("index*/size")):
        text = path.read_text().strip()
        if text[:-1].isdigit() and text[-1:] in _SUFFIXES:
            sizes.append(int(text[:-1]) * _SUFFIXES[text[-1]])
    return min(max(max(sizes, default=32 * _MIB) // 4, 2 * _MIB), 16 * _MIB)


def piece_rows(in_features: int, dtype: torch.dtype) -> int:
    """How many rows of a matrix make a piece."""
    return max(1, piece_bytes() // max(1, in_features * dtype.itemsize))


# ---- torch's 4-bit kernel --------------------------------------------------------------------------------------------


def why_not_four_bit(weight: Encoded, dtype: torch.dtype) -> str | None:
    """Why torch's 4-bit kernel cannot run this product; None if it can."""
    if weight.fmt.name != FOUR_BIT_FORMAT:
        return f"torch's 4-bit kernel holds {FOUR_BIT_FORMAT}, not {weight.fmt.name}"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"torch's 4-bit kernel computes in float32, the input is {dtype}"
    if weight.fmt.padded_cols(weight.shape[1]) <= GROUP or not weight.shape[0]:
        return f"torch's 4-bit kernel needs rows of more than {GROUP} weights, got shape {weight.shape}"
    return _why_not_here()


def pack_four_bit(weight: Encoded) -> Tensor:
    """The weight in the kernel's own order, bytes."""
    assert weight.scales is not None
    rows, cols = weight.shape[0], weight.fmt.padded_cols(weight.shape[1])
    return _pack(weight.data, weight.scales, rows, cols)


def four_bit_linear(x_MK: Tensor, weight: Encoded, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x @ W.T + bias in float32, x rounded to 8-bit integers row by row. A row that is not finite gives NaN."""
    rows, cols = weight.shape[0], weight.fmt.padded_cols(weight.shape[1])
    x = torch.nn.functional.pad(x_MK.float(), (0, cols - weight.shape[1])).contiguous()
    if not x.shape[0]:
        return x.new_empty((0, rows))
    y = _multiply(x, packed, rows, cols)
    # The kernel finds extremes by comparisons, which miss NaN.
    y += (x * 0).sum(dim=1, keepdim=True)
    return y if bias is None else y.add_(bias)


def four_bit_bound(x_MK: Tensor, w_NK: Tensor) -> Tensor:
    """How far, [M, N], rounding x to 8-bit integers may take a result from the exact product."""
    step = (x_MK.amax(dim=1).clamp(min=0) - x_MK.amin(dim=1).clamp(max=0)) / 255
    return step.unsqueeze(1) * w_NK.abs().sum(dim=1)


def _pack(data: Tensor, scales: Tensor, rows: int, cols: int) -> Tensor:
    packed: Tensor = torch.ops.aten._dyn_quant_pack_4bit_weight(
        data.contiguous(), scales.contiguous(), None, GROUP, cols, rows
    )
    if packed.dtype != torch.uint8:
        raise FormatError(f"torch packed 4-bit weights of shape ({rows}, {cols}) for its slow reference, not a kernel")
    return packed


def _multiply(x: Tensor, packed: Tensor, rows: int, cols: int) -> Tensor:
    y: Tensor = torch.ops.aten._dyn_quant_matmul_4bit(x, packed, GROUP, cols, rows)
    return y


@functools.cache
def _why_not_here() -> str | None:
    """Try the kernel once on this machine, on rows that are not whole tiles."""
    if not hasattr(torch.ops.aten, "_dyn_quant_matmul_4bit"):
        return f"torch {torch.__version__} has no 4-bit kernel"
    generator = torch.Generator().manual_seed(0)
    w, x = (torch.randn(rows, 96, generator=generator) for rows in (19, 3))
    weight = encode(w, FOUR_BIT_FORMAT)
    decoded = decode(weight, torch.float32)
    try:
        product = four_bit_linear(x, weight, pack_four_bit(weight))
    except (RuntimeError, FormatError) as error:
        return f"torch's 4-bit kernel does not run on this machine: {str(error).splitlines()[0][:200]}"
    beyond = (product - x @ decoded.T).abs() - four_bit_bound(x, decoded)
    if not bool((beyond <= 1e-4).all()):
        return "torch's 4-bit kernel gives wrong results on this machine"
    return None
