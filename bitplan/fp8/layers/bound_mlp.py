"""The operators of a joined MLP in compiled graphs, with little work for the host; as in `bound_operators`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitplan.base.loops.launch import current_stream, empty_on_gpu, index_of
from bitplan.formats.triton_numbers import float_name
from bitplan.fp8.kernels.activation import split_function
from bitplan.fp8.kernels.triton_activation import fits_width, plan_activated
from bitplan.fp8.kernels.triton_norm import plan_sum
from bitplan.fp8.layers.bound_operators import (
    RECIPE,
    Bound,
    BoundProducts,
    Key,
    Made,
    address_of,
    bind_gradient_cast,
    bind_gradient_of_norm,
    bind_linear,
    bind_norm_linear,
    empty_tensors,
    fit_biases,
    fit_norm,
    fits_products,
    is_ready,
    never,
    types_of,
    without_none,
)
from bitplan.fp8.layers.products import Fp8Settings
from bitplan.fp8.layers.scale_guesses import GRAD, INPUT, guess_for

_BF16 = torch.bfloat16


def mlp_key(x: Tensor, *rest: Any) -> Key:
    _, _, first, _, down, _ = rest[:6]
    return x.get_device(), x.shape, first.shape, down.shape, types_of(x, *rest[:6]), rest[6:]


def bind_mlp(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    first: Tensor,
    first_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    first_text: str,
    down_text: str,
    function: str,
    need_x: bool,
    need_first: bool,
    need_between: bool,
    need_down: bool,
    reuse: bool,
) -> Bound | None:
    wanted = (first_text, need_x, need_first, reuse)
    if norm_weight is None:
        of_first = bind_linear(x, first, first_bias, *wanted)
    else:
        of_first = bind_norm_linear(x, norm_weight, norm_bias, first, first_bias, *wanted)
    if of_first is None:
        return None
    fits = of_first is not never and fit_biases(down_bias) and fits_width(first.shape[0], split_function(function)[1])
    if not fits or not fits_products(x, (down, down_text)):
        return never
    device, shape = x.get_device(), (x.shape[0], first.shape[0])
    products = BoundProducts(down_text, x.shape[0], down, need_between, reuse)
    eps = Fp8Settings.from_text(down_text).recipe.eps.input
    cast = plan_activated(shape, *split_function(function), False, "e4m3", eps, True, need_down, False, None).bind(
        x.device
    )
    if cast is None:
        return None

    def run(
        x: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        first: Tensor,
        first_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
        *_: Any,
    ) -> Made | None:
        if (state := guess_for(RECIPE, down, INPUT)) is None:
            return None
        of_norm = () if norm_weight is None else (norm_weight, norm_bias)
        made = of_first(x, *of_norm, first, first_bias)
        if made is None:
            return None
        y, *others = made
        codes, kept, scale = cast(current_stream(device), state.data_ptr(), y.data_ptr(), 0, 0)
        out = products.y(codes, scale, down, down_bias)
        others += empty_tensors(4 - len(others))
        return out, y, *others, *((kept, scale) if kept is not None else empty_tensors(2))

    return run


def mlp_backward_key(dy: Tensor, x: Tensor, *rest: Any) -> Key:
    _, _, first, _, down = rest[:5]
    return dy.get_device(), dy.shape, first.shape, down.shape, types_of(dy, x, *rest[:5]), rest[12:]


def bind_mlp_backward(
    dy: Tensor,
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    first: Tensor,
    first_bias: Tensor | None,
    down: Tensor,
    *rest: Any,
) -> Bound | None:
    first_text, down_text, function, need_x, need_first, need_bias, need_down, reuse = rest[7:]
    settings, device, tokens = Fp8Settings.from_text(first_text), dy.get_device(), dy.shape[0]
    fits = need_x and need_first and need_down and fits_width(first.shape[0], split_function(function)[1])
    fits = fits and (norm_weight is None or fit_norm(norm_weight, norm_bias))
    if not fits or not fits_products(dy, (down, down_text)) or not fits_products(x, (first, first_text)):
        return never
    of_down = BoundProducts(down_text, tokens, down, True, reuse)
    of_first = BoundProducts(first_text, tokens, first, True, reuse)
    is_layer, eps = settings.norm is not None and settings.norm[0] == "layer", settings.recipe.eps.grad
    down_fp8, cast = bind_gradient_cast(dy, down_text)
    fp8, width = settings.recipe.grad_fp8, first.shape[0]
    plan = plan_activated((tokens, width), *split_function(function), True, fp8, eps, True, True, need_bias, None)
    cast_between = plan.bind(x.device)
    of_norm = None if norm_weight is None else bind_gradient_of_norm(x, _BF16, norm_weight, norm_bias, settings)
    tiles, bias_type = plan.sums, None if first_bias is None else first_bias.dtype
    add = None
    if tiles is not None and bias_type is not None:
        add = plan_sum(*tiles, 1, float_name(bias_type)).bind(index_of(x.device))
    if cast is None or cast_between is None or (norm_weight is not None and of_norm is None):
        return None
    if tiles is not None and add is None:
        return None

    def run(
        dy: Tensor,
        x: Tensor,
        norm_weight: Tensor | None,
        _: Tensor | None,
        first: Tensor,
        _bias: Tensor | None,
        down: Tensor,
        y: Tensor,
        kept: Tensor,
        kept_scale: Tensor,
        rstd: Tensor,
        mean: Tensor,
        activated: Tensor,
        activated_scale: Tensor,
        *_rest: Any,
    ) -> Made | None:
        if not is_ready(device, first, dy, x, norm_weight, y, rstd, mean):
            return None
        of_dy, of_between = guess_for(RECIPE, down, GRAD, down_fp8), guess_for(RECIPE, first, GRAD, fp8)
        if of_dy is None or of_between is None:
            return None
        stream = current_stream(device)
        made = cast(stream, of_dy.data_ptr(), dy.data_ptr())
        dh, d_down = of_down.gradients(made, activated, activated_scale, down)
        sums = None if tiles is None else empty_on_gpu(tiles, (width, 1), torch.float32)
        made = cast_between(stream, of_between.data_ptr(), y.data_ptr(), dh.data_ptr(), address_of(sums))
        total = None
        if add is not None and sums is not None and bias_type is not None:
            total = empty_on_gpu((width,), (1,), bias_type)
            add(stream, sums.data_ptr(), total.data_ptr())
        dx, d_first = of_first.gradients(made, kept, kept_scale, first)
        of_x: tuple[Tensor | None, ...] = (dx, None, None)
        if norm_weight is not None and of_norm is not None:
            at_mean = mean.data_ptr() if is_layer else 0
            of_x = of_norm(stream, dx.data_ptr(), x.data_ptr(), norm_weight.data_ptr(), rstd.data_ptr(), at_mean)
        return *without_none(of_x), d_first, *without_none((total,)), d_down

    return run
