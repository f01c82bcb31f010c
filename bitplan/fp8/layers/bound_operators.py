"""The operators of compiled FP8 layers with little work for the host: what generated code calls.

A call is the operator itself (`linear_function`, `joined_mlp`) until its kernels are compiled. Then all that stays the
same from step to step (settings, sizes, launches) is bound in a function, which goes on with addresses alone. It is
found by the sizes and types of the operands and by the settings, and computes the same by the same kernels.

Bound are tensorwise products of bfloat16, of a multiple of 16 tokens, outside of CUDA graphs; all else goes on as
before. A bound function returns None, before it launches anything, where it does not fit this time.

Legend: as in `products`; a cast is (codes, codes of the transpose, scale).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bitplan.base.loops.launch import current_stream, empty_on_gpu
from bitplan.fp8.casts import padded_tokens
from bitplan.fp8.kernels.bound_norm import NormGradient, bind_norm_cast, bind_norm_gradient
from bitplan.fp8.kernels.guessed_cast import BoundCast, plan_guess
from bitplan.fp8.layer_settings import SHORT_SUM, GemmChoice
from bitplan.fp8.layers.products import Fp8Settings
from bitplan.fp8.layers.scale_guesses import GRAD, INPUT, guess_for, in_compiled_graphs
from bitplan.fp8.layers.weight_casts import count_backward, kept_layouts, weight_cols, weight_rows

Made = tuple[Tensor, ...]
Bound = Callable[..., Made | None]
Key = tuple[Any, ...]
RECIPE = "tensorwise"
_ALL = GemmChoice.all(RECIPE)
_BF16 = torch.bfloat16
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)


def never(*_: Any) -> None:
    """The bound call of an operator that cannot be bound."""


def fits_products(x: Tensor, *layers: tuple[Tensor, str]) -> bool:
    """Whether products of as many tokens as x has can be bound for these weights and settings."""
    if x.dtype != _BF16 or not x.shape[0] or padded_tokens(RECIPE, x.shape[0]) != x.shape[0] or x.shape[1] % 16:
        return False
    return all(
        weight.dtype == _BF16 and Fp8Settings.from_text(text).gemms == _ALL and not weight.shape[0] % 16
        for weight, text in layers
    )


def types_of(*tensors: Tensor | None) -> tuple[torch.dtype | None, ...]:
    return tuple(None if tensor is None else tensor.dtype for tensor in tensors)


def fit_biases(*biases: Tensor | None) -> bool:
    """Whether products add these themselves."""
    return all(bias is None or bias.dtype == _BF16 for bias in biases)


def fit_norm(weight: Tensor, bias: Tensor | None) -> bool:
    return bias is None or bias.dtype == weight.dtype


def address_of(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def is_ready(device: int, weight: Tensor, *tensors: Tensor | None) -> bool:
    """Whether these can be read by address, on the current device, while no graph is recorded."""
    if _current_device() != device or _is_capturing() or in_compiled_graphs(weight):
        return False
    addresses = 0
    for each in tensors:
        if each is None:
            continue
        if not each.is_contiguous():
            return False
        addresses |= each.data_ptr()
    return not addresses & 15


class BoundProducts:
    """The products of one layer, of operands that were cast, into memory that is allocated here: quicker than torch."""

    def __init__(self, text: str, tokens: int, weight: Tensor, need_x: bool, reuse: bool) -> None:
        recipe = Fp8Settings.from_text(text).recipe
        fast, (outputs, inputs) = recipe.fast_accum, weight.shape
        self.fast_y, self.fast_x = "fprop" in fast, "dgrad" in fast
        self.fast_w = "wgrad" in fast or (bool(fast) and tokens <= SHORT_SUM)
        self.eps, self.need_x, self.reuse = recipe.eps.weight, need_x, reuse
        self.of_y, self.of_x, self.of_w = (
            (shape, (shape[1], 1), _BF16) for shape in ((tokens, outputs), (tokens, inputs), (outputs, inputs))
        )

    def y(self, codes: Any, scale: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        w = kept_layouts(weight, RECIPE, self.eps, is_forward=True)[0] if self.reuse else None
        if w is None:
            w = weight_rows(weight, RECIPE, self.eps, with_cols=self.need_x, reuse=self.reuse)
        y = empty_on_gpu(*self.of_y)
        return torch._scaled_mm(codes, w.turned, scale, w.scale, bias, None, _BF16, self.fast_y, out=y)

    def gradients(self, cast: Any, kept: Tensor, kept_scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(dx, dW)."""
        codes, codes_t, scale = cast
        w = kept_layouts(weight, RECIPE, self.eps, is_forward=False)[1] if self.reuse else None
        if w is None:
            w = weight_cols(weight, RECIPE, self.eps, reuse=self.reuse)
        dx, dw = empty_on_gpu(*self.of_x), empty_on_gpu(*self.of_w)
        torch._scaled_mm(codes, w.turned, scale, w.scale, None, None, _BF16, self.fast_x, out=dx)
        torch._scaled_mm(codes_t, kept.t(), scale, kept_scale, None, None, _BF16, self.fast_w, out=dw)
        if self.reuse:
            count_backward(weight, dw)
        return dx, dw


def bind_gradient_cast(dy: Tensor, text: str) -> tuple[str, BoundCast | None]:
    """(FP8 type of gradients, the cast of dy)."""
    recipe = Fp8Settings.from_text(text).recipe
    cast = (True, recipe.grad_fp8, recipe.eps.grad, dy.shape[0], True, True, None)
    return recipe.grad_fp8, plan_guess(dy.shape, dy.dtype, *cast).bind(dy.device)


# ---- one linear layer ------------------------------------------------------------------------------------------------


def linear_key(x: Tensor, weight: Tensor, bias: Tensor | None, *constants: Any) -> Key:
    return x.get_device(), x.shape, weight.shape, types_of(x, weight, bias), constants


def bind_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, text: str, need_x: bool, need_w: bool, reuse: bool
) -> Bound | None:
    if not fit_biases(bias) or not fits_products(x, (weight, text)):
        return never
    device, products = x.get_device(), BoundProducts(text, x.shape[0], weight, need_x, reuse)
    eps = Fp8Settings.from_text(text).recipe.eps.input
    cast = plan_guess(x.shape, x.dtype, True, "e4m3", eps, x.shape[0], True, need_w, None).bind(x.device)
    if cast is None:
        return None

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, *_: Any) -> Made | None:
        if not is_ready(device, weight, x) or (state := guess_for(RECIPE, weight, INPUT)) is None:
            return None
        codes, kept, scale = cast(current_stream(device), state.data_ptr(), x.data_ptr())
        y = products.y(codes, scale, weight, bias)
        return (y, kept, scale) if kept is not None else (y, *empty_tensors(2))

    return run


def linear_backward_key(dy: Tensor, _kept: Tensor, _scale: Tensor, weight: Tensor, *constants: Any) -> Key:
    return dy.get_device(), dy.shape, weight.shape, dy.dtype, weight.dtype, constants


def bind_linear_backward(
    dy: Tensor, _kept: Tensor, _scale: Tensor, weight: Tensor, text: str, need_x: bool, need_w: bool, reuse: bool
) -> Bound | None:
    if not (need_x and need_w) or not fits_products(dy, (weight, text)):
        return never
    device, products = dy.get_device(), BoundProducts(text, dy.shape[0], weight, need_x, reuse)
    fp8, cast = bind_gradient_cast(dy, text)
    if cast is None:
        return None

    def run(dy: Tensor, kept: Tensor, kept_scale: Tensor, weight: Tensor, *_: Any) -> Made | None:
        if not is_ready(device, weight, dy) or (state := guess_for(RECIPE, weight, GRAD, fp8)) is None:
            return None
        made = cast(current_stream(device), state.data_ptr(), dy.data_ptr())
        return products.gradients(made, kept, kept_scale, weight)

    return run


# ---- a norm and a linear layer ---------------------------------------------------------------------------------------


def norm_linear_key(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, weight: Tensor, bias: Tensor | None, *constants: Any
) -> Key:
    return x.get_device(), x.shape, weight.shape, types_of(x, weight, norm_weight, norm_bias, bias), constants


def bind_norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    text: str,
    need_x: bool,
    need_w: bool,
    reuse: bool,
) -> Bound | None:
    settings = Fp8Settings.from_text(text)
    fits = fit_biases(bias) and fit_norm(norm_weight, norm_bias) and settings.norm is not None
    if not fits or not fits_products(x, (weight, text)):
        return never
    assert settings.norm is not None
    device, products = x.get_device(), BoundProducts(text, x.shape[0], weight, need_x, reuse)
    types, eps = (x.dtype, norm_weight.dtype), settings.recipe.eps.input
    cast = bind_norm_cast(
        x.shape, types, settings.norm, eps, has_bias=norm_bias is not None, cols=need_w, device=x.device
    )
    if cast is None:
        return None

    def run(
        x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, weight: Tensor, bias: Tensor | None, *_rest: Any
    ) -> Made | None:
        if not is_ready(device, weight, x, norm_weight, norm_bias):
            return None
        addresses = (x.data_ptr(), norm_weight.data_ptr(), address_of(norm_bias))
        codes, kept, scale, rstd, mean = cast(current_stream(device), *addresses)
        y = products.y(codes, scale, weight, bias)
        of_wgrad = (kept, scale) if kept is not None else empty_tensors(2)
        return y, *of_wgrad, rstd, *((mean,) if mean is not None else empty_tensors(1))

    return run


def norm_linear_backward_key(
    dy: Tensor,
    _kept: Tensor,
    _scale: Tensor,
    weight: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    _rstd: Tensor,
    _mean: Tensor,
    *constants: Any,
) -> Key:
    return dy.get_device(), dy.shape, weight.shape, types_of(dy, weight, x, norm_weight, norm_bias), constants


def bind_norm_linear_backward(
    dy: Tensor,
    _kept: Tensor,
    _scale: Tensor,
    weight: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    _rstd: Tensor,
    _mean: Tensor,
    text: str,
    need_x: bool,
    need_w: bool,
    reuse: bool,
) -> Bound | None:
    settings = Fp8Settings.from_text(text)
    fits = fit_norm(norm_weight, norm_bias) and need_x and need_w and settings.norm is not None
    if not fits or not fits_products(dy, (weight, text)):
        return never
    assert settings.norm is not None
    device, products = dy.get_device(), BoundProducts(text, dy.shape[0], weight, need_x, reuse)
    is_layer = settings.norm[0] == "layer"
    fp8, cast = bind_gradient_cast(dy, text)
    of_norm = bind_gradient_of_norm(x, dy.dtype, norm_weight, norm_bias, settings)
    if cast is None or of_norm is None:
        return None

    def run(
        dy: Tensor,
        kept: Tensor,
        kept_scale: Tensor,
        weight: Tensor,
        x: Tensor,
        norm_weight: Tensor,
        _: Tensor | None,
        rstd: Tensor,
        mean: Tensor,
        *_rest: Any,
    ) -> Made | None:
        if not is_ready(device, weight, dy, x, norm_weight, rstd, mean):
            return None
        if (state := guess_for(RECIPE, weight, GRAD, fp8)) is None:
            return None
        stream = current_stream(device)
        made = cast(stream, state.data_ptr(), dy.data_ptr())
        d_normed, dw = products.gradients(made, kept, kept_scale, weight)
        at_mean = mean.data_ptr() if is_layer else 0
        addresses = (d_normed.data_ptr(), x.data_ptr(), norm_weight.data_ptr(), rstd.data_ptr(), at_mean)
        return *without_none(of_norm(stream, *addresses)), dw

    return run


def bind_gradient_of_norm(
    x: Tensor, of_gradient: torch.dtype, norm_weight: Tensor, norm_bias: Tensor | None, settings: Fp8Settings
) -> NormGradient | None:
    assert settings.norm is not None
    types, has_bias = (of_gradient, x.dtype, norm_weight.dtype), norm_bias is not None
    return bind_norm_gradient(x.shape, types, settings.norm[0], x.device, has_bias=has_bias)


def without_none(made: tuple[Tensor | None, ...]) -> list[Tensor]:
    """Operators return tensors only: empty ones for None."""
    return [empty_tensors(1)[0] if tensor is None else tensor for tensor in made]


def empty_tensors(count: int) -> list[Tensor]:
    """Operators return tensors only: empty ones for what is not wanted."""
    return [empty_on_gpu((0,), (1,), _BF16) for _ in range(count)]
