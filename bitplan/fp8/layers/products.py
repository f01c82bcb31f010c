"""The three products of an FP8 linear layer, each by its own recipe, or in BF16.

    y  = x W^T + bias        fprop    x [M, K]   summed along K with W   [N, K]
    dx = dy W                dgrad    dy [M, N]  summed along N with W^T [K, N]
    dW = dy^T x              wgrad    dy^T [N, M] summed along M with x^T [K, M]

Each tensor is used by two products, summed along another side in each, so a cast reads it once and writes the layouts
that its two products need, and only those: x^T only for wgrad, W^T only for dgrad. Between forward and backward
the layer keeps x^T in FP8 (half the bytes of x), or x where wgrad is BF16. Tokens are padded with zeros inside, so any
count works. BF16 products are computed in the type of x; on a CPU all are computed in float32 of the decoded values.

With a norm in front, x is normalised and cast in one; a BF16 product gets the normalised matrix in the type of x.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from bitplan.fp8.casts import ScaledFp8, scaling_of
from bitplan.fp8.kernels.cast import NormWeights, norm_and_cast, norm_gradient
from bitplan.fp8.kernels.product import scaled_product
from bitplan.fp8.layer_settings import SHORT_SUM, AmaxEps, Fp8Recipe, GemmChoice
from bitplan.fp8.layers.scale_guesses import GRAD, INPUT
from bitplan.fp8.layers.weight_source import WeightSource
from bitplan.fp8.recipes import BF16


@dataclass(frozen=True)
class Fp8Settings:
    """Everything a product needs to know beside its tensors. `norm`: kind and epsilon of the norm in front."""

    recipe: Fp8Recipe
    gemms: GemmChoice
    norm: tuple[str, float] | None = None

    def to_text(self) -> str:
        """One line: torch's operators take strings, and layers with equal settings share a compiled graph."""
        eps, gemms = self.recipe.eps, self.gemms
        words = (self.recipe.name, self.recipe.fp8, "+".join(self.recipe.fast_accum))
        numbers = map(repr, (eps.input, eps.weight, eps.grad))
        return "/".join((*words, gemms.fprop, gemms.dgrad, gemms.wgrad, *numbers, *map(str, self.norm or ())))

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def from_text(text: str) -> Fp8Settings:
        name, fp8, fast, fprop, dgrad, wgrad, *eps = text.split("/")
        recipe = Fp8Recipe(name, fp8, AmaxEps(*map(float, eps[:3])), tuple(filter(None, fast.split("+"))))  # type: ignore[arg-type]
        return Fp8Settings(recipe, GemmChoice(fprop, dgrad, wgrad), (eps[3], float(eps[4])) if eps[3:] else None)


def run_forward(
    x_MK: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    text: str,
    need_x: bool,
    need_w: bool,
    source: WeightSource,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return y, x as wgrad will read it, its scale, 1 / deviation and mean; None for what is not needed.

    With a norm (`norm_weight`) x is normalised first. Where wgrad is BF16 it reads x itself, or x after the norm.
    """
    settings = Fp8Settings.from_text(text)
    fprop, wgrad, eps = settings.gemms.fprop, settings.gemms.wgrad if need_w else BF16, settings.recipe.eps.input
    if norm_weight is None:
        x_rows, x_cols = source.cast_for(x_MK, fprop, wgrad, "e4m3", eps, weight, INPUT)
        y = product_of(x_MK, x_rows, weight, bias, settings, need_x, source)
        return y, *((None, None) if x_cols is None else (x_cols.codes, x_cols.scale)), None, None
    keep_plain = need_w and wgrad == BF16
    rows_by, cols_by = (None if recipe == BF16 else recipe for recipe in (fprop, wgrad))
    norm = _norm(settings, norm_weight, norm_bias)
    normed = norm_and_cast(x_MK, norm, rows_by, cols_by, "e4m3", eps, plain=keep_plain or rows_by is None)
    normed_MK = x_MK if normed.plain is None else normed.plain
    y = product_of(normed_MK, normed.rows, weight, bias, settings, need_x, source)
    if normed.cols is not None:
        return y, normed.cols.codes, normed.cols.scale, normed.rstd, normed.mean
    return y, normed.plain if keep_plain else None, None, normed.rstd, normed.mean


def product_of(
    x_MK: Tensor,
    x_rows: ScaledFp8 | None,
    weight: Tensor,
    bias: Tensor | None,
    settings: Fp8Settings,
    need_x: bool,
    source: WeightSource,
) -> Tensor:
    """Compute a layer's output y; with `x_rows`, x cast already, only type and rows of x are read."""
    recipe, gemms = settings.recipe, settings.gemms
    if x_rows is None:
        return plain_product(x_MK, source.plain(weight, x_MK.dtype).t(), bias)
    with_cols = need_x and gemms.dgrad == gemms.fprop
    w_rows = source.rows(weight, gemms.fprop, recipe.eps.weight, with_cols=with_cols)
    y = scaled_product(x_rows, w_rows, x_MK.dtype, bias=bias, fast_accum="fprop" in recipe.fast_accum)
    return _without_padding(y, x_MK.shape[0])


def run_backward(
    dy_MN: Tensor,
    kept: Tensor,
    kept_scale: Tensor | None,
    weight: Tensor,
    x_MK: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    rstd: Tensor | None,
    mean: Tensor | None,
    text: str,
    need_x: bool,
    need_w: bool,
    source: WeightSource,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return gradients of input, norm's weight, norm's bias and weight; None where not wanted, or without a norm."""
    settings = Fp8Settings.from_text(text)
    recipe, gemms = settings.recipe, settings.gemms
    dgrad, wgrad = gemms.dgrad if need_x else BF16, gemms.wgrad if need_w else BF16
    cast = source.cast_for(dy_MN, dgrad, wgrad, recipe.grad_fp8, recipe.eps.grad, weight, GRAD)
    dx, dw = gradients_of(cast, dy_MN, kept, kept_scale, weight, settings, need_x, need_w, source)
    return *norm_gradients(dx, x_MK, norm_weight, norm_bias, rstd, mean, settings), dw


def gradients_of(
    cast: tuple[ScaledFp8 | None, ScaledFp8 | None],
    dy_MN: Tensor,
    kept: Tensor,
    kept_scale: Tensor | None,
    weight: Tensor,
    settings: Fp8Settings,
    need_x: bool,
    need_w: bool,
    source: WeightSource,
) -> tuple[Tensor | None, Tensor | None]:
    """Return dx and dW of a dy that was cast, in layouts that are not None; dy itself is read for its type alone."""
    recipe, gemms = settings.recipe, settings.gemms
    dy_rows, dy_cols = cast
    grad_type = source.grad_type or weight.dtype
    dx = dw = None
    if dy_rows is not None:
        w_cols = source.cols(weight, gemms.dgrad, recipe.eps.weight)
        dx = scaled_product(dy_rows, w_cols, dy_MN.dtype, fast_accum="dgrad" in recipe.fast_accum)
        dx = _without_padding(dx, dy_MN.shape[0])
    elif need_x:
        dx = plain_product(dy_MN, source.plain(weight, dy_MN.dtype))
    if dy_cols is not None:
        assert kept_scale is not None
        x_cols = ScaledFp8(kept, kept_scale, scaling_of(gemms.wgrad))
        fast = "wgrad" in recipe.fast_accum or (bool(recipe.fast_accum) and dy_MN.shape[0] <= SHORT_SUM)
        dw = scaled_product(dy_cols, x_cols, grad_type, fast_accum=fast)
    elif need_w:
        dw = plain_product(dy_MN.t(), kept).to(grad_type)
    if dw is not None:
        source.count_backward(weight, dw)
    return dx, dw


def norm_gradients(
    d_normed: Tensor | None,
    x_MK: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    rstd: Tensor | None,
    mean: Tensor | None,
    settings: Fp8Settings,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Take the gradient behind a norm through it: gradients of input, weight and bias; without a norm it stays."""
    if d_normed is None or norm_weight is None:
        return d_normed, None, None
    assert x_MK is not None
    assert rstd is not None
    norm = _norm(settings, norm_weight, norm_bias)
    return norm_gradient(d_normed, x_MK, norm, mean if norm.kind == "layer" else None, rstd)


def _norm(settings: Fp8Settings, weight: Tensor, bias: Tensor | None) -> NormWeights:
    assert settings.norm is not None
    return NormWeights(settings.norm[0], weight, bias, settings.norm[1])


def _without_padding(product: Tensor, rows: int) -> Tensor:
    """The first rows, as a tensor of its own to autograd: what a layer gives may be written in place."""
    return product if product.shape[0] == rows else product.unsafe_split_with_sizes((rows, product.shape[0] - rows))[0]


def plain_product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a times b in a's type; on a CPU in float32, where 16-bit products are slower by far, and rounded once."""
    wide = torch.float32 if a.device.type == "cpu" else a.dtype
    with torch.autocast(a.device.type, enabled=False):
        out = a.to(wide) @ b.to(wide)
    return (out if bias is None else out + bias.to(wide)).to(a.dtype)
