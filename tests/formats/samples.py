"""Numbers that the formats are tried on, and how two tensors are compared: by their bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bitplan.formats.format import Format
from bitplan.formats.registry import list_formats

# Blocks that hold their own scales have one rule and no codes of their own to look at: tests/formats/gguf has theirs.
WITH_CODES = [fmt for fmt in list_formats() if not fmt.is_opaque]
# For tests on rows shorter than GGUF's blocks of 256.
SMALL_BLOCKS = [fmt for fmt in list_formats() if fmt.block.cols != 256]
ALL_FORMATS = [pytest.param(fmt, id=fmt.name) for fmt in WITH_CODES]
SCALED_FORMATS = [pytest.param(fmt, id=fmt.name) for fmt in WITH_CODES if not fmt.is_cast]
# By every run: each format under its default rule and one other, which one differs from format to format.
FORMATS_AND_RULES = [
    pytest.param(fmt, rule, id=f"{fmt.name}-{rule}", marks=[] if rule in often else [pytest.mark.long])
    for place, fmt in enumerate(WITH_CODES)
    for rules in [fmt.rules or (None,)]
    for often in [(fmt.default_rule if fmt.rules else None, rules[place % len(rules)])]
    for rule in rules
]
# Rows and columns that no block and no byte divides, empty ones, and a convolution kernel.
SHAPES = [(), (0,), (1,), (7,), (31,), (33,), (0, 64), (5, 0), (3, 5), (2, 3, 3, 3), (4, 5, 64), (3, 160), (131, 130)]
SHAPE_PARAMS = [pytest.param(shape, id="x".join(map(str, shape)) or "scalar") for shape in SHAPES]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same(left: Tensor, right: Tensor) -> bool:
    """Equal in type, shape and every bit, so that -0.0 is not 0.0 and a NaN is itself."""
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(bits(left), bits(right))


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def heavy_tailed(*shape: int, seed: int = 0) -> Tensor:
    return gaussian(*shape, seed=seed) / gaussian(*shape, seed=seed + 1).abs().clamp(min=0.05)


def every_16_bit_float(dtype: torch.dtype) -> Tensor:
    """The finite ones of the 2^16 patterns of float16 or bfloat16, as float32."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype).float()
    return every[every.isfinite()]


def every_byte() -> Tensor:
    return torch.arange(256, dtype=torch.uint8)


def per_block(fmt: Format, x: Tensor) -> Tensor:
    """[blocks, numbers per block] of a matrix whose columns are whole blocks, or of a whole tensor or its rows."""
    if fmt.block.is_tensor:
        return x.reshape(1, -1)
    rows, cols = fmt.block.rows or 1, fmt.block.cols or x.shape[-1]
    tall = x.reshape(x.shape[0] // rows, rows, x.shape[1] // cols, cols)
    return tall.transpose(1, 2).reshape(-1, rows * cols)
