"""A norm followed by an FP8 cast, and the norm's gradient: the reference and the dispatcher.

    normed = norm_and_cast(x_RC, NormWeights("rms", weight, None, 1e-6), "blockwise", rows=True, cols=True)

The norm is that of torch.nn.RMSNorm or LayerNorm: computed in float32, weight and bias included, and rounded once to
the type of x; that matrix is then cast. Mean and deviation are sums, so Triton and torch may differ in their last bit,
and a code where a number sits on a tie.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitplan.base.errors import FormatError
from bitplan.fp8.casts import ScaledFp8, padded_tokens, scaling_of
from bitplan.fp8.kernels.cast import cast_layouts
from bitplan.fp8.recipes import find_recipe

NORMS = ("rms", "layer")


@dataclass(slots=True, eq=False)
class NormWeights:
    """A norm over the last dimension."""

    kind: str
    weight: Tensor
    bias: Tensor | None
    eps: float

    def __post_init__(self) -> None:
        if self.kind not in NORMS:
            raise FormatError(f"a norm is one of {', '.join(NORMS)}, got {self.kind!r}")


class Normed(NamedTuple):
    """The cast layouts asked for, the normalised matrix if asked for, and what the gradient needs of each row."""

    rows: ScaledFp8 | None
    cols: ScaledFp8 | None
    plain: Tensor | None
    rstd: Tensor
    mean: Tensor | None


def norm_and_cast(
    x_RC: Tensor,
    norm: NormWeights,
    rows_by: str | None,
    cols_by: str | None,
    fp8: str = "e4m3",
    eps: float = 0.0,
    *,
    plain: bool = False,
    impl: str = "auto",
) -> Normed:
    """Normalise, and cast by the recipe of each layout; None for a layout that is not wanted."""
    x_RC = x_RC.contiguous()  # and so is the normalised matrix, as operators promise torch's compiler
    if impl == "triton" or (impl == "auto" and x_RC.is_cuda):
        return _by_triton(x_RC, norm, rows_by, cols_by, fp8, eps, plain)
    mean, rstd = reference_stats(x_RC, norm)
    normed = apply_norm(x_RC, norm, mean, rstd)
    rows = cast_layouts(normed, rows_by, fp8, eps, cols=False, impl="reference").rows if rows_by else None
    cols = cast_layouts(normed, cols_by, fp8, eps, rows=False, impl="reference").cols if cols_by else None
    return Normed(rows, cols, normed if plain else None, rstd, mean)


def _by_triton(
    x: Tensor, norm: NormWeights, rows_by: str | None, cols_by: str | None, fp8: str, eps: float, plain: bool
) -> Normed:
    cast, norms = _kernels()
    with_amax = any(name is not None and find_recipe(name).has_one_scale for name in (rows_by, cols_by))
    stats = norms.row_stats(x, norm.kind, norm.weight, norm.bias, norm.eps, with_amax=with_amax)
    rows = cols = normed = None
    for recipe in (rows_by, cols_by) if rows_by != cols_by else (rows_by,):
        if recipe is None:
            continue
        tiles = cast.cast_tiles(
            x,
            scaling_of(recipe),
            fp8,
            eps,
            padded_tokens(recipe, x.shape[0]),
            rows=recipe == rows_by,
            cols=recipe == cols_by,
            norm=stats,
            plain=plain and normed is None,
        )
        rows, cols = tiles[0] or rows, tiles[1] or cols
        normed = tiles[2] if normed is None else normed
    if plain and normed is None:  # no cast layout is wanted
        normed = apply_norm(x, norm, stats.mean, stats.rstd)
    return Normed(rows, cols, normed, stats.rstd, stats.mean)


@functools.cache
def _kernels() -> tuple[Any, Any]:
    """The modules of Triton's casts and norms, kept: an import statement in a function would run at each call."""
    from bitplan.fp8.kernels import triton_cast, triton_norm

    return triton_cast, triton_norm


def reference_stats(x_RC: Tensor, norm: NormWeights) -> tuple[Tensor | None, Tensor]:
    """(mean of each row or None, 1 / its deviation), float32."""
    x = x_RC.float()
    mean = x.mean(1) if norm.kind == "layer" else None
    if mean is not None:
        x = x - mean[:, None]
    return mean, 1.0 / torch.sqrt(x.square().mean(1) + norm.eps)


def apply_norm(x_RC: Tensor, norm: NormWeights, mean_R: Tensor | None, rstd_R: Tensor) -> Tensor:
    x = x_RC.float() if mean_R is None else x_RC.float() - mean_R[:, None]
    x = x * rstd_R[:, None] * norm.weight.float()
    return (x if norm.bias is None else x + norm.bias.float()).to(x_RC.dtype)


def norm_gradient(
    dy_RC: Tensor, x_RC: Tensor, norm: NormWeights, mean_R: Tensor | None, rstd_R: Tensor, *, impl: str = "auto"
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(dx, the weight's gradient, the bias's); the last two added in float32 and rounded to the weight's type."""
    if impl == "triton" or (impl == "auto" and x_RC.is_cuda):
        norms = _kernels()[1]
        row_norm = norms.Norm(norm.kind, mean_R, rstd_R, norm.weight, norm.bias)
        gradients: tuple[Tensor, Tensor, Tensor | None] = norms.norm_gradient(dy_RC, x_RC.contiguous(), row_norm)
        return gradients
    x = x_RC.float() if mean_R is None else x_RC.float() - mean_R[:, None]
    unit, dy = x * rstd_R[:, None], dy_RC.float()
    g = dy * norm.weight.float()
    dx = g - unit * (g * unit).mean(1, keepdim=True)
    if norm.kind == "layer":
        dx = dx - g.mean(1, keepdim=True)
    dx = (dx * rstd_R[:, None]).to(x_RC.dtype)
    weight_dtype = norm.weight.dtype
    return dx, (dy * unit).sum(0).to(weight_dtype), dy.sum(0).to(weight_dtype) if norm.bias is not None else None
