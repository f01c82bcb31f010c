"""`fp8_param=True`: a layer whose weight is stored in FP8, and how any optimizer trains it.

    layer.weight         Parameter [N, K] of float8_e4m3fn, without a gradient: an optimizer cannot add to FP8
    layer.weight_scale   buffer: one number (tensorwise), or one for each 128x128 square (blockwise)
    layer.weight_master  float32 Parameter [N, K]: the numbers that learn; None where the weight was frozen

The products read the FP8 weight; the gradient goes to the master, in float32. So an optimizer, gradient clipping and a
trainer that take `model.parameters()` work as with any layer. A forward that finds the master changed casts it into
`weight`, in place. A frozen weight (adapters, inference) has no master and takes one byte; dgrad's transpose takes one
more while it is kept.

A state_dict holds all three; it loads into such a layer, not into nn.Linear. A master that was not saved starts from
the FP8 weight. The transpose of codes is a cast of the transpose for these two recipes; rowwise and mxfp8 scale the two
layouts apart and are refused. Under torch.compile the layer runs between graphs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bitplan.formats.fp8 import ScaledFp8, decode_scaled, empty_scale, scaling_of
from bitplan.kernels.fp8.cast import cast_layouts
from bitplan.kernels.fp8.product import scaled_product
from bitplan.runtime.fp8.layers.products import cast_for, plain_product
from bitplan.runtime.fp8.layers.scale_guesses import GRAD, INPUT
from bitplan.runtime.fp8.recipe import BF16, Fp8LayerError
from bitplan.store.models.weight_changes import count_optimizer_steps

STORABLE = ("tensorwise", "blockwise")


def store_in_fp8(layer: Any) -> None:
    """Replace the layer's weight by its FP8 cast."""
    recipe = storage_recipe(layer)
    if layer.weight.device.type == "meta":
        codes = layer.weight.new_empty(layer.weight.shape, dtype=torch.float8_e4m3fn)
        scale = empty_scale(_shape(layer), scaling_of(recipe, is_weight=True), layer.weight.device)
    else:
        cast = cast_layouts(layer.weight.detach(), recipe, eps=layer.recipe.eps.weight, is_weight=True, cols=False).rows
        assert cast is not None
        codes, scale = cast.codes, cast.scale
    master = nn.Parameter(layer.weight.detach().float()) if layer.weight.requires_grad else None
    layer.weight = nn.Parameter(codes, requires_grad=False)
    layer.register_buffer("weight_scale", scale)
    layer.register_parameter("weight_master", master)
    layer._stored_state = None if master is None else _state(master)
    count_optimizer_steps()
    layer._transpose = None
    layer.register_load_state_dict_pre_hook(_start_master_from_weight)


def _state(tensor: Tensor) -> tuple[int, int] | None:
    """What is another after each change of a tensor that torch counts; None where it does not count."""
    return None if tensor.is_inference() else (tensor._version, tensor.data_ptr())


def _start_master_from_weight(layer: Any, state: dict[str, Any], prefix: str, *_more: Any) -> None:
    """A state dict that was saved without masters still loads."""
    codes, scale = state.get(prefix + "weight"), state.get(prefix + "weight_scale")
    if layer.weight_master is None or prefix + "weight_master" in state or codes is None or scale is None:
        return
    if (
        codes.dtype == layer.weight.dtype
        and codes.shape == layer.weight.shape
        and scale.shape == layer.weight_scale.shape
    ):
        stored = ScaledFp8(codes, scale, scaling_of(storage_recipe(layer), is_weight=True))
        state[prefix + "weight_master"] = decode_scaled(stored)


@torch.no_grad()
def _follow_master(layer: Any) -> None:
    """Cast a master that has changed into the weight; in a CUDA graph always, for replays ask nobody."""
    master = layer.weight_master
    if master is None:
        return
    capturing = master.is_cuda and torch.cuda.is_current_stream_capturing()
    state = _state(master)
    if state is not None and state == layer._stored_state and not capturing:
        return
    recipe, eps = storage_recipe(layer), layer.recipe.eps.weight
    cast = cast_layouts(master.detach(), recipe, eps=eps, is_weight=True, cols=False).rows
    assert cast is not None
    layer.weight.copy_(cast.codes)
    layer.weight_scale.copy_(cast.scale)
    layer._stored_state = state


def storage_recipe(layer: Any) -> str:
    """The recipe that the stored weight follows: that of the products that read it."""
    used: set[str] = {name for name in (layer.gemms.fprop, layer.gemms.dgrad) if name != BF16} or {layer.recipe.name}
    if len(used) > 1 or not used <= set(STORABLE):
        raise Fp8LayerError(
            f"fp8_param stores one weight for fprop and dgrad, by {' or '.join(STORABLE)}, "
            f"got {', '.join(sorted(used))}; use fp8_param=False"
        )
    return used.pop()


def stored_weight(layer: Any) -> ScaledFp8:
    return ScaledFp8(layer.weight, layer.weight_scale, scaling_of(storage_recipe(layer), is_weight=True))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def linear_of_fp8_param(layer: Any, x: Tensor) -> Tensor:
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if layer.weight.dtype != torch.float8_e4m3fn:
        raise Fp8LayerError(
            f"a layer with fp8_param has a weight of {torch.float8_e4m3fn}, got {layer.weight.dtype}: .to(dtype) casts "
            "it as any other; move such a layer with .to(device), and build it again"
        )
    if x.shape[-1] != layer.in_features:
        raise Fp8LayerError(f"a layer of {layer.in_features} inputs got numbers of shape {tuple(x.shape)}")
    _follow_master(layer)
    x_MK = x.reshape(-1, x.shape[-1])
    trains = torch.is_grad_enabled() and layer.weight_master is not None and layer.weight_master.requires_grad
    out: Tensor = _StoredProduct.apply(  # type: ignore[no-untyped-call]
        x_MK, layer.bias, layer.weight_master, layer, trains
    )
    return out.view(*x.shape[:-1], layer.out_features)


class _StoredProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, bias: Tensor | None, _master: Tensor | None, layer: Any, trains: bool
    ) -> Tensor:
        recipe, gemms = layer.recipe, layer.gemms
        x_rows, x_cols = cast_for(
            x_MK, gemms.fprop, gemms.wgrad if trains else BF16, "e4m3", recipe.eps.input, (layer.weight, INPUT)
        )
        weight = stored_weight(layer)
        if x_rows is None:
            y = plain_product(x_MK, decode_scaled(weight, x_MK.dtype).t(), bias)
        else:
            y = scaled_product(x_rows, weight, x_MK.dtype, bias=bias, fast_accum="fprop" in recipe.fast_accum)
        none = x_MK.new_empty(0)
        saved = (x_cols.codes, x_cols.scale) if x_cols is not None else (x_MK if trains else none, none)
        ctx.save_for_backward(*saved, layer.weight)
        ctx.layer, ctx.bias_dtype = layer, None if bias is None else bias.dtype
        return y[: x_MK.shape[0]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        kept, kept_scale, _ = ctx.saved_tensors  # reading the weight here has torch refuse one that has changed
        layer, recipe, gemms = ctx.layer, ctx.layer.recipe, ctx.layer.gemms
        dgrad = gemms.dgrad if ctx.needs_input_grad[0] else BF16
        wgrad = gemms.wgrad if ctx.needs_input_grad[2] else BF16
        dy_rows, dy_cols = cast_for(dy_MN, dgrad, wgrad, recipe.grad_fp8, recipe.eps.grad, (layer.weight, GRAD))
        dw = None
        if dy_cols is not None:
            x_cols = ScaledFp8(kept, kept_scale, scaling_of(gemms.wgrad))
            dw = scaled_product(dy_cols, x_cols, torch.float32, fast_accum="wgrad" in recipe.fast_accum)
        elif ctx.needs_input_grad[2]:
            dw = plain_product(dy_MN.t(), kept).float()
        dx = None
        if ctx.needs_input_grad[0]:
            weight = stored_weight(layer)
            if dy_rows is None:
                dx = plain_product(dy_MN, decode_scaled(weight, dy_MN.dtype))
            else:
                w_cols = kept_transpose(layer)
                dx = scaled_product(dy_rows, w_cols, dy_MN.dtype, fast_accum="dgrad" in recipe.fast_accum)
            dx = dx[: dy_MN.shape[0]]
        db = dy_MN.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if ctx.needs_input_grad[1] else None
        return dx, db, dw, None, None


def kept_transpose(layer: Any) -> ScaledFp8:
    """The weight for dgrad, made once for each state of the weight; in a CUDA graph always (see fp8_weight_casts)."""
    capturing = layer.weight.is_cuda and torch.cuda.is_current_stream_capturing()
    state = None if capturing else _state(layer.weight)
    if state is None:
        return transposed(stored_weight(layer))
    if layer._transpose is None or layer._transpose[0] != state:
        layer._transpose = (state, transposed(stored_weight(layer)))
    kept: ScaledFp8 = layer._transpose[1]
    return kept


def transposed(weight: ScaledFp8) -> ScaledFp8:
    """The other layout of a weight with one scale, or one for each square: the same numbers, exactly."""
    codes = weight.codes.view(torch.uint8).t().contiguous().view(weight.codes.dtype)
    if weight.scaling == "tensor":
        return ScaledFp8(codes, weight.scale, weight.scaling)
    scale = empty_scale((codes.shape[0], codes.shape[1]), weight.scaling, codes.device)
    return ScaledFp8(codes, scale.copy_(weight.scale.t()), weight.scaling)


def _shape(layer: Any) -> tuple[int, int]:
    return layer.weight.shape[0], layer.weight.shape[1]
