"""A tensorwise FP8 linear whose processes share the scale of an operand that is divided among them.

Tensor parallelism divides operands, and with them their maxima: an Fp8Linear of a share would scale each share by
itself, and results would depend on how many shares there are. Here the maximum of a divided operand is replaced by the
group's, as an integer on the device that orders as the magnitudes do (NaN above infinity), before anything is cast.
Nothing waits for the host on a GPU.

Only products by the recipe tensorwise agree; others in the same layer are what `Fp8Linear` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bitplan.formats.fp8 import CastPair, ScaledFp8, cast_reference, pad_rows, padded_tokens, scaling_of
from bitplan.kernels.fp8.cast import cast_layouts
from bitplan.kernels.fp8.product import scaled_product
from bitplan.runtime.fp8.layers import weight_casts as fp8_weight_casts
from bitplan.runtime.fp8.layers.linear import Fp8Linear
from bitplan.runtime.fp8.layers.products import plain_product
from bitplan.runtime.fp8.layers.scale_guesses import TENSORWISE
from bitplan.runtime.fp8.recipe import BF16

Largest = Callable[[Tensor], Tensor]  # int32 [1] of this process -> of the group


def shared_amax_linear(x: Tensor, layer: Fp8Linear, *, divided: tuple[str, ...], largest: Largest) -> Tensor:
    """The layer's forward; operands in `divided` ("input", "weight", "grad") are scaled by the group's maximum."""
    x_MK = x.reshape(-1, x.shape[-1])
    apply: Callable[..., Tensor] = _Agreed.apply
    return apply(x_MK, layer.weight, layer.bias, layer, divided, largest).view(*x.shape[:-1], layer.out_features)


def shared_amax_cast(
    x_RC: Tensor,
    fp8: str,
    eps: float,
    largest: Largest,
    *,
    is_weight: bool = False,
    rows: bool = True,
    cols: bool = True,
) -> CastPair:
    """A tensorwise cast by the group's maximum; both layouts have the one scale."""
    padded = x_RC.shape[0] if is_weight else padded_tokens(TENSORWISE, x_RC.shape[0])
    if not x_RC.is_cuda:
        bits = x_RC.float().abs().amax() if x_RC.numel() else x_RC.new_zeros((), dtype=torch.float32)
        amax = float(largest(bits.view(torch.int32).reshape(1)).view(torch.float32))
        least = max(eps, amax) if amax == amax else float("inf")  # not finite either way: the scale becomes NaN
        x_RC = pad_rows(x_RC, padded)
        made = [cast_reference(each, "tensor", fp8, least) for each in (x_RC, x_RC.t())]
        return CastPair(made[0] if rows else None, made[1] if cols else None)
    from bitplan.kernels.fp8.maxima import partial_amax
    from bitplan.kernels.fp8.triton_cast import cast_tiles

    x_RC = x_RC.contiguous()
    of_group = largest(partial_amax(x_RC).amax().reshape(1))
    out, out_t, _ = cast_tiles(x_RC, "tensor", fp8, eps, padded, rows=rows, cols=cols, pieces=of_group)
    return CastPair(out, out_t)


class _Agreed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_MK: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: Fp8Linear,
        divided: tuple[str, ...],
        largest: Largest,
    ) -> Tensor:
        gemms, eps = layer.gemms, layer.recipe.eps
        ctx.settings = layer, divided, largest
        need_w = ctx.needs_input_grad[1]
        input_largest = largest if "input" in divided else None
        x_rows, x_cols = _cast_for(x_MK, gemms.fprop, gemms.wgrad if need_w else BF16, "e4m3", eps.input, input_largest)
        if x_rows is None:
            y = plain_product(x_MK, weight.t(), bias)
        else:
            w_rows = _weight_cast(weight, gemms.fprop, layer, divided, largest).rows
            assert w_rows is not None
            fast = "fprop" in layer.recipe.fast_accum
            y = scaled_product(x_rows, w_rows, x_MK.dtype, bias=bias, fast_accum=fast)
        kept = (x_cols.codes, x_cols.scale) if x_cols is not None else (x_MK if need_w else None, None)
        ctx.save_for_backward(weight, *kept)
        ctx.bias_dtype = bias.dtype if bias is not None else None
        return y[: x_MK.shape[0]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        weight, kept, kept_scale = ctx.saved_tensors
        layer, divided, largest = ctx.settings
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        dgrad, wgrad = layer.gemms.dgrad if need_x else BF16, layer.gemms.wgrad if need_w else BF16
        grad_largest = largest if "grad" in divided else None
        fp8, fast = layer.recipe.grad_fp8, layer.recipe.fast_accum
        dy_rows, dy_cols = _cast_for(dy_MN, dgrad, wgrad, fp8, layer.recipe.eps.grad, grad_largest)
        dx = dw = None
        if need_x and dy_rows is not None:
            w_cols = _weight_cast(weight, dgrad, layer, divided, largest).cols
            assert w_cols is not None
            dx = scaled_product(dy_rows, w_cols, dy_MN.dtype, fast_accum="dgrad" in fast)[: dy_MN.shape[0]]
        elif need_x:
            dx = plain_product(dy_MN, weight)
        if need_w and dy_cols is not None:
            x_cols = ScaledFp8(kept, kept_scale, scaling_of(wgrad))
            dw = scaled_product(dy_cols, x_cols, weight.dtype, fast_accum="wgrad" in fast)
        elif need_w:
            dw = plain_product(dy_MN.t(), kept).to(weight.dtype)
        db = dy_MN.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if need_b else None
        return dx, dw, db, None, None, None


def _cast_for(
    x: Tensor, rows_by: str, cols_by: str, fp8: str, eps: float, largest: Largest | None
) -> tuple[ScaledFp8 | None, ScaledFp8 | None]:
    rows = cols = None
    for recipe in dict.fromkeys((rows_by, cols_by)):
        if recipe == BF16:
            continue
        asked: dict[str, Any] = {"rows": rows_by == recipe, "cols": cols_by == recipe}
        if recipe == TENSORWISE and largest is not None:
            pair = shared_amax_cast(x, fp8, eps, largest, **asked)
        else:
            pair = cast_layouts(x, recipe, fp8, eps, **asked)
        rows, cols = pair.rows or rows, pair.cols or cols
    return rows, cols


def _weight_cast(weight: Tensor, recipe: str, layer: Fp8Linear, divided: tuple[str, ...], largest: Largest) -> CastPair:
    """Both layouts, kept while the weight does not change: all processes change it in the same step."""
    eps = layer.recipe.eps.weight
    agrees = recipe == TENSORWISE and "weight" in divided
    how = (f"agreed {recipe}", eps)
    reuse = layer.reuse_weight_cast and not (weight.is_cuda and torch.cuda.is_current_stream_capturing())
    cached = fp8_weight_casts._find(weight) if reuse else None
    if cached is not None and how in cached.rows:
        return CastPair(cached.rows[how], cached.cols[how])
    if agrees:
        pair = shared_amax_cast(weight, "e4m3", eps, largest, is_weight=True)
    else:
        pair = cast_layouts(weight, recipe, "e4m3", eps, is_weight=True)
    if reuse:
        fp8_weight_casts._keep(weight, how, pair, captured=False)
    return pair
