"""Casts of an operand for its two products, and the plain product where a product is not FP8."""

from __future__ import annotations

import torch
from torch import Tensor

from bitplan.formats.fp8 import ScaledFp8
from bitplan.kernels.fp8.cast import cast_layouts
from bitplan.runtime.fp8.layers.scale_guesses import guess_for
from bitplan.runtime.fp8.recipe import BF16


def without_padding(made: Tensor, rows: int) -> Tensor:
    return made if made.shape[0] == rows else made[:rows]


def cast_for(
    x: Tensor, rows_by: str, cols_by: str, fp8: str, eps: float, of: tuple[Tensor, str]
) -> tuple[ScaledFp8 | None, ScaledFp8 | None]:
    """A tensor for its two products: one cast where they go by one recipe, one each where they do not.

    `of`: the weight it is multiplied with and what it is to that, for the guess of its scale.
    """
    if rows_by == cols_by:
        if rows_by == BF16:
            return None, None
        pair = cast_layouts(x, rows_by, fp8, eps, guess=guess_for(rows_by, *of, fp8))
        return pair.rows, pair.cols
    rows = cols = None
    if rows_by != BF16:
        rows = cast_layouts(x, rows_by, fp8, eps, cols=False, guess=guess_for(rows_by, *of, fp8)).rows
    if cols_by != BF16:
        cols = cast_layouts(x, cols_by, fp8, eps, rows=False, guess=guess_for(cols_by, *of, fp8)).cols
    return rows, cols


def plain_product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a times b in a's type; on a CPU in float32, where 16-bit products are slower by far, and rounded once."""
    wide = torch.float32 if a.device.type == "cpu" else a.dtype
    with torch.autocast(a.device.type, enabled=False):
        out = a.to(wide) @ b.to(wide)
    return (out if bias is None else out + bias.to(wide)).to(a.dtype)
