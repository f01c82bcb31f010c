"""The operators of compiled FP8 layers with little work for the host: what generated code calls.

A call is the operator itself (`linear_function`, `joined_mlp`) until its kernels are compiled. Then all that stays the
same from step to step (settings, sizes, launches) is bound in a function, which goes on with addresses alone. It is
found by the sizes and types of the operands and by the settings, and computes the same by the same kernels.

Bound are tensorwise products of bfloat16, of a multiple of 16 tokens, outside of CUDA graphs; all else goes on as
before. A bound function returns None, before it launches anything, where it does not fit this time.

Legend: as in `products`; a cast is (codes, codes of the transpose, scale).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bitplan.base.loops.launch import current_stream, empty_on_gpu, index_of
from bitplan.formats.triton_numbers import float_name
from bitplan.fp8.casts import FP8_DTYPES, padded_tokens
from bitplan.fp8.kernels.cast import split_function
from bitplan.fp8.kernels.guessed_cast import BoundCast, plan_guess
from bitplan.fp8.kernels.triton_activation import fits_width, plan_activated
from bitplan.fp8.kernels.triton_cast import plan_cast
from bitplan.fp8.kernels.triton_norm import plan_norm, plan_sum
from bitplan.fp8.layer_settings import SHORT_SUM, GemmChoice
from bitplan.fp8.layers.products import Fp8Settings
from bitplan.fp8.layers.scale_guesses import GRAD, INPUT, guess_for, in_compiled_graphs
from bitplan.fp8.layers.weight_casts import count_backward, kept_layouts, weight_cols, weight_rows

Results = tuple[Tensor, ...]
Bound = Callable[..., Results | None]
Key = tuple[Any, ...]
RECIPE = "tensorwise"
_ALL = GemmChoice.all(RECIPE)
_BF16 = torch.bfloat16
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)


def _never(*_: Any) -> None:
    """Called in place of a prepared launch where an operator cannot be prepared; gives None."""


def _fits_products(x: Tensor, *layers: tuple[Tensor, str]) -> bool:
    """Whether products of as many tokens as x has can be bound for these weights and settings."""
    if x.dtype != _BF16 or not x.shape[0] or padded_tokens(RECIPE, x.shape[0]) != x.shape[0] or x.shape[1] % 16:
        return False
    return all(
        weight.dtype == _BF16 and Fp8Settings.from_text(text).gemms == _ALL and not weight.shape[0] % 16
        for weight, text in layers
    )


def _types_of(*tensors: Tensor | None) -> tuple[torch.dtype | None, ...]:
    return tuple(None if tensor is None else tensor.dtype for tensor in tensors)


def _fit_biases(*biases: Tensor | None) -> bool:
    """Whether products add these biases themselves."""
    return all(bias is None or bias.dtype == _BF16 for bias in biases)


def _fit_norm(weight: Tensor | None, bias: Tensor | None) -> bool:
    return weight is None or bias is None or bias.dtype == weight.dtype


def _address_of(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _is_ready(device: int, weight: Tensor, *tensors: Tensor | None) -> bool:
    """Whether these can be read by address, on the current device, while no graph is recorded."""
    if _current_device() != device or _is_capturing() or in_compiled_graphs(weight):
        return False
    addresses = 0
    for tensor in tensors:
        if tensor is None:
            continue
        if not tensor.is_contiguous():
            return False
        addresses |= tensor.data_ptr()
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
        """Return the gradients of the input and of the weight."""
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


def _bind_gradient_cast(dy: Tensor, text: str) -> tuple[str, BoundCast | None]:
    """Return the FP8 type of gradients, and a bound cast of dy."""
    recipe = Fp8Settings.from_text(text).recipe
    cast = (True, recipe.grad_fp8, recipe.eps.grad, dy.shape[0], True, True, None)
    return recipe.grad_fp8, plan_guess(dy.shape, dy.dtype, *cast).bind(dy.device)


# ---- a linear layer, behind a norm or not ----------------------------------------------------------------------------


# (stream, addresses of x, of the norm's weight and bias) -> codes, of the transpose, their scale, 1 / deviation, mean
NormCast = Callable[[int, int, int, int], tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor | None]]
# (stream, dy, x, the weight, 1 / deviation, mean) -> dx, the weight's gradient, the bias's
NormGradient = Callable[..., tuple[Tensor, Tensor, Tensor | None]]


def _bind_norm_cast(
    shape: Sequence[int],
    types: tuple[torch.dtype, torch.dtype],
    norm: tuple[str, float],
    eps: float,
    *,
    has_bias: bool,
    cols: bool,
    device: torch.device,
) -> NormCast | None:
    """A norm with its tensorwise cast. `types`: of x and of the norm's weight. `norm`: kind and epsilon.

    Rows are not padded; a norm's bias has the type of its weight. None until the kernels were launched once.
    """
    kind, norm_eps = norm
    rows, width = shape
    with_types = (("SOURCE", types[0]), ("WEIGHT", types[1]))
    programs, find = plan_norm((rows, width), kind, with_types, (("HAS_BIAS", has_bias), ("AMAX", True)), norm_eps)
    key = (kind, types[1], has_bias)
    how = ("tensor", "e4m3", float(eps), rows, True, cols, False, None, key, programs)
    plan = plan_cast((rows, width), types[0], True, *how)
    stats = find.bind(index_of(device)) if find is not None else None
    cast = plan.cast.bind(index_of(device)) if stats is not None and plan.paired else None
    if stats is None or cast is None:
        return None
    fp8, is_layer = FP8_DTYPES["e4m3"], kind == "layer"

    def run(stream: int, x: int, weight: int, bias: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor | None]:
        rstd = empty_on_gpu((rows,), (1,), torch.float32)
        mean = empty_on_gpu((rows,), (1,), torch.float32) if is_layer else None
        partial = empty_on_gpu((programs,), (1,), torch.int32)
        codes = empty_on_gpu((rows, width), (width, 1), fp8)
        codes_t = empty_on_gpu((width, rows), (rows, 1), fp8) if cols else None
        scale = empty_on_gpu((), (), torch.float32)
        at_rstd, at_partial, at_scale = rstd.data_ptr(), partial.data_ptr(), scale.data_ptr()
        at_mean = 0 if mean is None else mean.data_ptr()
        stats(stream, x, weight, bias, at_rstd, at_mean, at_partial)
        of_cols = (0, at_scale, 0) if codes_t is None else (codes_t.data_ptr(), at_scale, at_scale)
        cast(stream, x, codes.data_ptr(), *of_cols, at_partial, at_rstd, at_mean, weight, bias)
        return codes, codes_t, scale, rstd, mean

    return run


def _bind_gradient_of_norm(
    x: Tensor, of_grad: torch.dtype, norm_weight: Tensor, norm_bias: Tensor | None, text: str
) -> NormGradient | None:
    """Prepare the launch of a norm's gradient, for a gradient of type `of_grad` behind it."""
    settings = Fp8Settings.from_text(text)
    assert settings.norm is not None
    kind, has_bias, device = settings.norm[0], norm_bias is not None, index_of(x.device)
    of_x, of_weight, (rows, width) = x.dtype, norm_weight.dtype, x.shape
    named = (("SOURCE", of_x), ("GRAD", of_grad), ("WEIGHT", of_weight))
    programs, find = plan_norm((rows, width), kind, named, (("HAS_BIAS", has_bias),))
    gradient = find.bind(device) if find is not None else None
    matrices = 2 if has_bias else 1
    add = plan_sum(programs, width, matrices, float_name(of_weight)).bind(device) if gradient is not None else None
    if gradient is None or add is None:
        return None

    def run(stream: int, dy: Tensor, x: Any, weight: Any, rstd: Any, mean: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        dx = empty_on_gpu((rows, width), (width, 1), of_x)
        sums = empty_on_gpu((matrices * programs, width), (width, 1), torch.float32)
        total = empty_on_gpu((matrices, width), (width, 1), of_weight)
        addresses = (dy.data_ptr(), x.data_ptr(), weight.data_ptr(), rstd.data_ptr())
        at_mean, at_sums = mean.data_ptr() if kind == "layer" else 0, sums.data_ptr()
        gradient(stream, *addresses, at_mean, dx.data_ptr(), at_sums)
        add(stream, at_sums, total.data_ptr())
        return dx, total[0], total[1] if has_bias else None

    return run


def linear_key(x: Tensor, *rest: Any) -> Key:
    return x.get_device(), x.shape, rest[2].shape, _types_of(x, *rest[:4]), rest[4:]


def bind_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    text: str,
    need_x: bool,
    need_w: bool,
    reuse: bool,
) -> Bound | None:
    settings = Fp8Settings.from_text(text)
    if not _fit_biases(bias) or not _fit_norm(norm_weight, norm_bias) or not _fits_products(x, (weight, text)):
        return _never
    device, products = x.get_device(), BoundProducts(text, x.shape[0], weight, need_x, reuse)
    eps = settings.recipe.eps.input
    cast: BoundCast | None = None
    normed: NormCast | None = None
    if norm_weight is None:
        cast = plan_guess(x.shape, x.dtype, True, "e4m3", eps, x.shape[0], True, need_w, None).bind(x.device)
    else:
        assert settings.norm is not None
        types, has_bias = (x.dtype, norm_weight.dtype), norm_bias is not None
        normed = _bind_norm_cast(x.shape, types, settings.norm, eps, has_bias=has_bias, cols=need_w, device=x.device)
    if cast is None and normed is None:
        return None

    def run(
        x: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        *_: Any,
    ) -> Results | None:
        if not _is_ready(device, weight, x, norm_weight, norm_bias):
            return None
        codes: Tensor | None
        rstd = mean = None
        if norm_weight is not None and normed is not None:
            addresses = (x.data_ptr(), norm_weight.data_ptr(), _address_of(norm_bias))
            codes, kept, scale, rstd, mean = normed(current_stream(device), *addresses)
        else:
            if cast is None or (state := guess_for(RECIPE, weight, INPUT)) is None:
                return None
            codes, kept, scale = cast(current_stream(device), state.data_ptr(), x.data_ptr())
        y = products.y(codes, scale, weight, bias)
        return y, *_without_none((kept, None if kept is None else scale, rstd, mean))

    return run


def linear_backward_key(dy: Tensor, *rest: Any) -> Key:
    return dy.get_device(), dy.shape, rest[2].shape, _types_of(dy, *rest[2:6]), rest[8:]


def bind_linear_backward(
    dy: Tensor,
    _kept: Tensor,
    _scale: Tensor,
    weight: Tensor,
    x: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    _rstd: Tensor | None,
    _mean: Tensor | None,
    text: str,
    need_x: bool,
    need_w: bool,
    reuse: bool,
) -> Bound | None:
    fits = need_x and need_w and _fit_norm(norm_weight, norm_bias)
    if not fits or not _fits_products(dy, (weight, text)):
        return _never
    device, products = dy.get_device(), BoundProducts(text, dy.shape[0], weight, need_x, reuse)
    fp8, cast = _bind_gradient_cast(dy, text)
    of_norm = None
    if norm_weight is not None and x is not None:
        of_norm = _bind_gradient_of_norm(x, dy.dtype, norm_weight, norm_bias, text)
    if cast is None or (norm_weight is not None and of_norm is None):
        return None

    def run(
        dy: Tensor,
        kept: Tensor,
        kept_scale: Tensor,
        weight: Tensor,
        x: Tensor | None,
        norm_weight: Tensor | None,
        _: Tensor | None,
        rstd: Tensor | None,
        mean: Tensor | None,
        *_rest: Any,
    ) -> Results | None:
        if not _is_ready(device, weight, dy, x, norm_weight, rstd, mean):
            return None
        if (state := guess_for(RECIPE, weight, GRAD, fp8)) is None:
            return None
        stream = current_stream(device)
        cast_dy = cast(stream, state.data_ptr(), dy.data_ptr())
        dx, dw = products.gradients(cast_dy, kept, kept_scale, weight)
        of_x = (dx, None, None) if of_norm is None else of_norm(stream, dx, x, norm_weight, rstd, mean)
        return *_without_none(of_x), dw

    return run


def _without_none(results: tuple[Tensor | None, ...]) -> list[Tensor]:
    """Replace None by an empty tensor, since an operator returns tensors only."""
    return [empty_on_gpu((0,), (1,), _BF16) if tensor is None else tensor for tensor in results]


# ---- a joined MLP ----------------------------------------------------------------------------------------------------


def mlp_key(x: Tensor, *rest: Any) -> Key:
    _, _, first, _, down, _ = rest[:6]
    return x.get_device(), x.shape, first.shape, down.shape, _types_of(x, *rest[:6]), rest[6:]


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
    of_first = bind_linear(x, norm_weight, norm_bias, first, first_bias, first_text, need_x, need_first, reuse)
    if of_first is None:
        return None
    fits = of_first is not _never and _fit_biases(down_bias) and fits_width(first.shape[0], split_function(function)[1])
    if not fits or not _fits_products(x, (down, down_text)):
        return _never
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
    ) -> Results | None:
        if (state := guess_for(RECIPE, down, INPUT)) is None:
            return None
        first_results = of_first(x, norm_weight, norm_bias, first, first_bias)
        if first_results is None:
            return None
        y, *others = first_results
        codes, kept, scale = cast(current_stream(device), state.data_ptr(), y.data_ptr(), 0, 0)
        out = products.y(codes, scale, down, down_bias)
        return out, y, *others, *_without_none((kept, None if kept is None else scale))

    return run


def mlp_backward_key(dy: Tensor, x: Tensor, *rest: Any) -> Key:
    _, _, first, _, down = rest[:5]
    return dy.get_device(), dy.shape, first.shape, down.shape, _types_of(dy, x, *rest[:5]), rest[12:]


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
    fits = fits and _fit_norm(norm_weight, norm_bias)
    if not fits or not _fits_products(dy, (down, down_text)) or not _fits_products(x, (first, first_text)):
        return _never
    of_down = BoundProducts(down_text, tokens, down, True, reuse)
    of_first = BoundProducts(first_text, tokens, first, True, reuse)
    eps = settings.recipe.eps.grad
    down_fp8, cast = _bind_gradient_cast(dy, down_text)
    fp8, width = settings.recipe.grad_fp8, first.shape[0]
    plan = plan_activated((tokens, width), *split_function(function), True, fp8, eps, True, True, need_bias, None)
    cast_between = plan.bind(x.device)
    of_norm = None if norm_weight is None else _bind_gradient_of_norm(x, _BF16, norm_weight, norm_bias, first_text)
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
    ) -> Results | None:
        if not _is_ready(device, first, dy, x, norm_weight, y, rstd, mean):
            return None
        of_dy, of_between = guess_for(RECIPE, down, GRAD, down_fp8), guess_for(RECIPE, first, GRAD, fp8)
        if of_dy is None or of_between is None:
            return None
        stream = current_stream(device)
        cast_gradient = cast(stream, of_dy.data_ptr(), dy.data_ptr())
        dh, d_down = of_down.gradients(cast_gradient, activated, activated_scale, down)
        sums = None if tiles is None else empty_on_gpu(tiles, (width, 1), torch.float32)
        cast_gradient = cast_between(stream, of_between.data_ptr(), y.data_ptr(), dh.data_ptr(), _address_of(sums))
        total = None
        if add is not None and sums is not None and bias_type is not None:
            total = empty_on_gpu((width,), (1,), bias_type)
            add(stream, sums.data_ptr(), total.data_ptr())
        dx, d_first = of_first.gradients(cast_gradient, kept, kept_scale, first)
        of_x = (dx, None, None) if of_norm is None else of_norm(stream, dx, x, norm_weight, rstd, mean)
        return *_without_none(of_x), d_first, *_without_none((total,)), d_down

    return run


# Operators by name: what a bound call depends on, and how it is bound.
BINDERS: dict[str, tuple[Callable[..., Key], Callable[..., Bound | None]]] = {
    "fp8_norm_linear_forward": (linear_key, bind_linear),
    "fp8_norm_linear_backward": (linear_backward_key, bind_linear_backward),
    "fp8_mlp_forward": (mlp_key, bind_mlp),
    "fp8_mlp_backward": (mlp_backward_key, bind_mlp_backward),
}
