"""The operators of compiled FP8 layers with little work for the host: what generated code calls.

A call is the operator itself (`linear_function`, `gated_mlp`) until its kernels are compiled. Then all that stays the
same from step to step (settings, sizes, launches) is bound in a function, which goes on with addresses alone. It is
found by the sizes and types of the operands and by the settings, and computes the same by the same kernels.

Bound are tensorwise products without biases, of bfloat16, of a multiple of 16 tokens, outside of CUDA graphs; all else
goes on as before. A bound function returns None, before it launches anything, where it does not fit this time.

Legend: as in `products`; a cast is (codes, codes of the transpose, scale).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bitplan.formats.fp8 import padded_tokens
from bitplan.kernels.base.launch import current_stream, empty_on_gpu
from bitplan.kernels.fp8.bound_norm import bind_norm_cast, bind_norm_gradient
from bitplan.kernels.fp8.guessed_cast import BoundCast, plan_guess
from bitplan.kernels.fp8.triton_gated import FORWARD_LAUNCH, plan_gated
from bitplan.runtime.fp8.compiled_graphs import in_compiled_graphs
from bitplan.runtime.fp8.layer_settings import SHORT_SUM, GemmChoice
from bitplan.runtime.fp8.layers.products import Fp8Settings
from bitplan.runtime.fp8.layers.scale_guesses import GRAD, INPUT, guess_for
from bitplan.runtime.fp8.layers.weight_casts import count_backward, kept_layouts, weight_cols, weight_rows

Made = tuple[Tensor, ...]
Bound = Callable[..., Made | None]
Key = tuple[Any, ...]
RECIPE = "tensorwise"
_ALL = GemmChoice.all(RECIPE)
_BF16 = torch.bfloat16
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)


def _never(*_: Any) -> None:
    """The bound call of an operator that cannot be bound."""


def _fits(x: Tensor, *layers: tuple[Tensor, str]) -> bool:
    """Whether products of as many tokens as x has can be bound for these weights and settings."""
    if x.dtype != _BF16 or not x.shape[0] or padded_tokens(RECIPE, x.shape[0]) != x.shape[0] or x.shape[1] % 16:
        return False
    return all(
        weight.dtype == _BF16 and Fp8Settings.from_text(text).gemms == _ALL and not weight.shape[0] % 16
        for weight, text in layers
    )


def _is_ready(device: int, weight: Tensor, *tensors: Tensor) -> bool:
    """Whether these can be read by address, on the current device, while no graph is recorded."""
    if _current_device() != device or _is_capturing() or in_compiled_graphs(weight):
        return False
    addresses = 0
    for each in tensors:
        if not each.is_contiguous():
            return False
        addresses |= each.data_ptr()
    return not addresses & 15


class _Products:
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

    def y(self, codes: Any, scale: Tensor, weight: Tensor) -> Tensor:
        w = kept_layouts(weight, RECIPE, self.eps, is_forward=True)[0] if self.reuse else None
        if w is None:
            w = weight_rows(weight, RECIPE, self.eps, with_cols=self.need_x, reuse=self.reuse)
        y = empty_on_gpu(*self.of_y)
        return torch._scaled_mm(codes, w.turned, scale, w.scale, None, None, _BF16, self.fast_y, out=y)

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


def _bind_gradient(dy: Tensor, text: str) -> tuple[str, BoundCast | None]:
    """(FP8 type of gradients, the cast of dy)."""
    recipe = Fp8Settings.from_text(text).recipe
    cast = (True, recipe.grad_fp8, recipe.eps.grad, dy.shape[0], True, True, None)
    return recipe.grad_fp8, plan_guess(dy.shape, dy.dtype, *cast).bind(dy.device)


# ---- one linear layer ------------------------------------------------------------------------------------------------


def linear_key(x: Tensor, weight: Tensor, bias: Tensor | None, *constants: Any) -> Key:
    return x.get_device(), x.shape, weight.shape, x.dtype, weight.dtype, bias is None, constants


def bind_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, text: str, need_x: bool, need_w: bool, reuse: bool
) -> Bound | None:
    if bias is not None or not _fits(x, (weight, text)):
        return _never
    device, products = x.get_device(), _Products(text, x.shape[0], weight, need_x, reuse)
    eps = Fp8Settings.from_text(text).recipe.eps.input
    cast = plan_guess(x.shape, x.dtype, True, "e4m3", eps, x.shape[0], True, need_w, None).bind(x.device)
    if cast is None:
        return None

    def run(x: Tensor, weight: Tensor, *_: Any) -> Made | None:
        if not _is_ready(device, weight, x) or (state := guess_for(RECIPE, weight, INPUT)) is None:
            return None
        codes, kept, scale = cast(current_stream(device), state.data_ptr(), x.data_ptr())
        y = products.y(codes, scale, weight)
        return (y, kept, scale) if kept is not None else (y, *_nothing(2))

    return run


def linear_backward_key(dy: Tensor, _kept: Tensor, _scale: Tensor, weight: Tensor, *constants: Any) -> Key:
    return dy.get_device(), dy.shape, weight.shape, dy.dtype, weight.dtype, constants


def bind_linear_backward(
    dy: Tensor, _kept: Tensor, _scale: Tensor, weight: Tensor, text: str, need_x: bool, need_w: bool, reuse: bool
) -> Bound | None:
    if not (need_x and need_w) or not _fits(dy, (weight, text)):
        return _never
    device, products = dy.get_device(), _Products(text, dy.shape[0], weight, need_x, reuse)
    fp8, cast = _bind_gradient(dy, text)
    if cast is None:
        return None

    def run(dy: Tensor, kept: Tensor, kept_scale: Tensor, weight: Tensor, *_: Any) -> Made | None:
        if not _is_ready(device, weight, dy) or (state := guess_for(RECIPE, weight, GRAD, fp8)) is None:
            return None
        made = cast(current_stream(device), state.data_ptr(), dy.data_ptr())
        return products.gradients(made, kept, kept_scale, weight)

    return run


# ---- a norm and a linear layer ---------------------------------------------------------------------------------------


def norm_linear_key(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, weight: Tensor, bias: Tensor | None, *constants: Any
) -> Key:
    tensors = (x.shape, weight.shape, x.dtype, weight.dtype, norm_weight.dtype)
    return x.get_device(), *tensors, norm_bias is None, bias is None, constants


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
    if bias is not None or norm_bias is not None or settings.norm is None or not _fits(x, (weight, text)):
        return _never
    device, products = x.get_device(), _Products(text, x.shape[0], weight, need_x, reuse)
    types, eps = (x.dtype, norm_weight.dtype), settings.recipe.eps.input
    cast = bind_norm_cast(x.shape, types, settings.norm, eps, cols=need_w, device=x.device)
    if cast is None:
        return None

    def run(x: Tensor, norm_weight: Tensor, _: None, weight: Tensor, *_rest: Any) -> Made | None:
        if not _is_ready(device, weight, x, norm_weight):
            return None
        codes, kept, scale, rstd, mean = cast(current_stream(device), x.data_ptr(), norm_weight.data_ptr())
        y = products.y(codes, scale, weight)
        of_wgrad = (kept, scale) if kept is not None else _nothing(2)
        return y, *of_wgrad, rstd, *((mean,) if mean is not None else _nothing(1))

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
    types = (dy.dtype, weight.dtype, x.dtype, norm_weight.dtype)
    return dy.get_device(), dy.shape, weight.shape, types, norm_bias is None, constants


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
    if norm_bias is not None or not (need_x and need_w) or settings.norm is None or not _fits(dy, (weight, text)):
        return _never
    device, products = dy.get_device(), _Products(text, dy.shape[0], weight, need_x, reuse)
    is_layer = settings.norm[0] == "layer"
    fp8, cast = _bind_gradient(dy, text)
    of_norm = bind_norm_gradient(x.shape, (dy.dtype, x.dtype, norm_weight.dtype), settings.norm[0], x.device)
    if cast is None or of_norm is None:
        return None

    def run(
        dy: Tensor,
        kept: Tensor,
        kept_scale: Tensor,
        weight: Tensor,
        x: Tensor,
        norm_weight: Tensor,
        _: None,
        rstd: Tensor,
        mean: Tensor,
        *_rest: Any,
    ) -> Made | None:
        if not _is_ready(device, weight, dy, x, norm_weight, rstd, mean):
            return None
        if (state := guess_for(RECIPE, weight, GRAD, fp8)) is None:
            return None
        stream = current_stream(device)
        made = cast(stream, state.data_ptr(), dy.data_ptr())
        d_normed, dw = products.gradients(made, kept, kept_scale, weight)
        at_mean = mean.data_ptr() if is_layer else 0
        addresses = (d_normed.data_ptr(), x.data_ptr(), norm_weight.data_ptr(), rstd.data_ptr(), at_mean)
        return *of_norm(stream, *addresses), *_nothing(1), dw

    return run


# ---- a gated MLP -----------------------------------------------------------------------------------------------------


def gated_key(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, first: Tensor, down: Tensor, *constants: Any
) -> Key:
    types = (x.dtype, norm_weight.dtype, first.dtype, down.dtype)
    return x.get_device(), x.shape, first.shape, down.shape, types, norm_bias is None, constants


def bind_gated(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    first: Tensor,
    down: Tensor,
    first_text: str,
    down_text: str,
    need_x: bool,
    need_first: bool,
    need_down: bool,
    reuse: bool,
) -> Bound | None:
    of_first = bind_norm_linear(x, norm_weight, norm_bias, first, None, first_text, need_x, need_first, reuse)
    if of_first is None:
        return None
    if of_first is _never or not _fits(x, (down, down_text)) or first.shape[0] % (2 * FORWARD_LAUNCH.cols):
        return _never
    device, shape = x.get_device(), (x.shape[0], first.shape[0])
    products = _Products(down_text, x.shape[0], down, need_x or need_first, reuse)
    eps = Fp8Settings.from_text(down_text).recipe.eps.input
    cast = plan_gated(shape, False, "e4m3", eps, True, need_down, None).bind(x.device)
    if cast is None:
        return None

    def run(x: Tensor, norm_weight: Tensor, norm_bias: None, first: Tensor, down: Tensor, *_: Any) -> Made | None:
        if (state := guess_for(RECIPE, down, INPUT)) is None:
            return None
        made = of_first(x, norm_weight, norm_bias, first)
        if made is None:
            return None
        y, *of_norm = made
        codes, kept, scale = cast(current_stream(device), state.data_ptr(), y.data_ptr(), 0)
        out = products.y(codes, scale, down)
        return out, y, *of_norm, *((kept, scale) if kept is not None else _nothing(2))

    return run


def gated_backward_key(
    dy: Tensor, x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, first: Tensor, down: Tensor, *rest: Any
) -> Key:
    types = (dy.dtype, x.dtype, norm_weight.dtype, first.dtype, down.dtype)
    return dy.get_device(), dy.shape, first.shape, down.shape, types, norm_bias is None, rest[7:]


def bind_gated_backward(
    dy: Tensor, x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, first: Tensor, down: Tensor, *rest: Any
) -> Bound | None:
    first_text, down_text, need_x, need_first, need_down, reuse = rest[7:]
    settings, device = Fp8Settings.from_text(first_text), dy.get_device()
    if norm_bias is not None or settings.norm is None or not (need_x and need_first and need_down):
        return _never
    fits = _fits(dy, (down, down_text)) and _fits(x, (first, first_text))
    if not fits or first.shape[0] % (2 * FORWARD_LAUNCH.cols):
        return _never
    of_down = _Products(down_text, dy.shape[0], down, True, reuse)
    of_first = _Products(first_text, dy.shape[0], first, True, reuse)
    is_layer, eps = settings.norm[0] == "layer", settings.recipe.eps.grad
    down_fp8, cast = _bind_gradient(dy, down_text)
    fp8 = settings.recipe.grad_fp8
    cast_gate = plan_gated((dy.shape[0], first.shape[0]), True, fp8, eps, True, True, None).bind(x.device)
    of_norm = bind_norm_gradient(x.shape, (_BF16, x.dtype, norm_weight.dtype), settings.norm[0], x.device)
    if cast is None or cast_gate is None or of_norm is None:
        return None

    def run(
        dy: Tensor,
        x: Tensor,
        norm_weight: Tensor,
        _: None,
        first: Tensor,
        down: Tensor,
        y: Tensor,
        kept: Tensor,
        kept_scale: Tensor,
        rstd: Tensor,
        mean: Tensor,
        gated: Tensor,
        gated_scale: Tensor,
        *_rest: Any,
    ) -> Made | None:
        if not _is_ready(device, first, dy, x, norm_weight, y, rstd, mean):
            return None
        of_dy, of_gate = guess_for(RECIPE, down, GRAD, down_fp8), guess_for(RECIPE, first, GRAD, fp8)
        if of_dy is None or of_gate is None:
            return None
        stream = current_stream(device)
        made = cast(stream, of_dy.data_ptr(), dy.data_ptr())
        dh, d_down = of_down.gradients(made, gated, gated_scale, down)
        made = cast_gate(stream, of_gate.data_ptr(), y.data_ptr(), dh.data_ptr())
        d_normed, d_first = of_first.gradients(made, kept, kept_scale, first)
        at_mean = mean.data_ptr() if is_layer else 0
        addresses = (d_normed.data_ptr(), x.data_ptr(), norm_weight.data_ptr(), rstd.data_ptr(), at_mean)
        return *of_norm(stream, *addresses), *_nothing(1), d_first, d_down

    return run


def _nothing(count: int) -> list[Tensor]:
    """Operators return tensors only: empty ones for what is not wanted."""
    return [empty_on_gpu((0,), (1,), _BF16) for _ in range(count)]


BINDERS: dict[str, tuple[Callable[..., Key], Callable[..., Bound | None]]] = {
    "fp8_linear_forward": (linear_key, bind_linear),
    "fp8_linear_backward": (linear_backward_key, bind_linear_backward),
    "fp8_norm_linear_forward": (norm_linear_key, bind_norm_linear),
    "fp8_norm_linear_backward": (norm_linear_backward_key, bind_norm_linear_backward),
    "fp8_gated_mlp_forward": (gated_key, bind_gated),
    "fp8_gated_mlp_backward": (gated_backward_key, bind_gated_backward),
}
