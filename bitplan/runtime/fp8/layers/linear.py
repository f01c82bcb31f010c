"""Fp8Linear: a linear layer whose three products run in FP8, each by its own recipe, or in BF16.

    y  = x W^T + bias        fprop    x [M, K]   summed along K with W   [N, K]
    dx = dy W                dgrad    dy [M, N]  summed along N with W^T [K, N]
    dW = dy^T x              wgrad    dy^T [N, M] summed along M with x^T [K, M]

Each tensor is used by two products, summed along another side in each, so a cast reads it once and writes the layouts
that its two products need, and only those: no wgrad, no x^T; no input gradient, no W^T. Between forward and backward
the layer keeps x^T in FP8 (half the bytes of x), or x where wgrad is BF16. Tokens are padded with zeros inside, so any
count works. Weight casts are shared by micro-batches (`weight_casts`).

The layer is used like nn.Linear: the same parameters, the same state_dict, the same optimizers. `fp8_param=True` is
the exception: there the weight is FP8 (`fp8_param`). Under torch.compile the two halves are single operators
(`bitplan::fp8_linear_forward`, `..._backward`), so a model compiles without a graph break, and what is kept of weights
stays outside the graph, whose memory planning would otherwise reuse it. In eager mode nothing is in between. BF16
products are computed in the type of x; on a CPU all are computed in float32 of the decoded values.

Errors, relative to the norm of the exact result with Gaussian numbers: two operands of E4M3 3.7% (each 2.6%), one of
E4M3 and one of E5M2 6%; beside them the rounding of the output. They do not grow with the sizes but for fast
accumulation (`runtime.fp8.recipe`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bitplan.formats.fp8 import FP8_DTYPES, ScaledFp8, empty_scale, padded_tokens, scaling_of
from bitplan.kernels.fp8.product import scaled_product
from bitplan.runtime.fp8.layers import weight_casts as fp8_weight_casts
from bitplan.runtime.fp8.layers.products import cast_for, plain_product, without_padding
from bitplan.runtime.fp8.layers.scale_guesses import GRAD, INPUT
from bitplan.runtime.fp8.layers.stored_weight import linear_of_fp8_param, store_in_fp8
from bitplan.runtime.fp8.recipe import (
    BF16,
    AmaxEps,
    Fp8LayerError,
    Fp8Recipe,
    GemmChoice,
    check_shape,
    require_fp8,
)

_INPUTS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Fp8Settings:
    """Everything a product needs to know beside its tensors."""

    recipe: Fp8Recipe
    gemms: GemmChoice

    def to_text(self) -> str:
        """One line: operators of torch take strings, and layers set alike share a compiled graph."""
        eps = self.recipe.eps
        gemms = self.gemms
        words = (self.recipe.name, self.recipe.fp8, "+".join(self.recipe.fast_accum))
        return "/".join((*words, gemms.fprop, gemms.dgrad, gemms.wgrad, *map(repr, (eps.input, eps.weight, eps.grad))))

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def from_text(text: str) -> Fp8Settings:
        name, fp8, fast, fprop, dgrad, wgrad, *eps = text.split("/")
        recipe = Fp8Recipe(name, fp8, AmaxEps(*map(float, eps)), tuple(filter(None, fast.split("+"))))  # type: ignore[arg-type]
        return Fp8Settings(recipe, GemmChoice(fprop, dgrad, wgrad))


def fp8_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, settings: Fp8Settings, *, reuse_weight_cast: bool = True
) -> Tensor:
    """x [..., K] times weight [N, K] plus bias, differentiable; the weight is cast as the products ask."""
    return _linear_by_text(x, weight, bias, settings.to_text(), reuse_weight_cast)


def _linear_by_text(x: Tensor, weight: Tensor, bias: Tensor | None, text: str, reuse: bool) -> Tensor:
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    shape = x.shape
    if shape[-1] != weight.shape[1] or x.dtype not in _INPUTS:
        raise Fp8LayerError(
            f"a layer of {weight.shape[1]} inputs takes bfloat16, float16 or float32 numbers [..., {weight.shape[1]}], "
            f"got {x.dtype} of shape {tuple(shape)}"
        )
    keep = torch.is_grad_enabled()  # inside the function it is off either way
    if len(shape) == 2:
        y: Tensor = _Fp8Product.apply(x, weight, bias, text, reuse, keep)  # type: ignore[no-untyped-call]
        return y
    y = _Fp8Product.apply(x.reshape(-1, shape[-1]), weight, bias, text, reuse, keep)  # type: ignore[no-untyped-call]
    return y.view(*shape[:-1], weight.shape[0])


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, weight: Tensor, bias: Tensor | None, text: str, reuse: bool, keep: bool
    ) -> Tensor:
        need_x, need_w = keep and ctx.needs_input_grad[0], keep and ctx.needs_input_grad[1]
        run: Any = forward_op if torch.compiler.is_compiling() else run_forward
        y, kept, kept_scale = run(x_MK, weight, bias, text, need_x, need_w, reuse)
        if need_w and text.split("/")[5] == BF16:  # wgrad's recipe; Dynamo warns of what from_text keeps
            kept = x_MK
        ctx.save_for_backward(kept, kept_scale, weight)
        ctx.settings = (text, reuse)
        ctx.bias_dtype = bias.dtype if bias is not None else None
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        kept, kept_scale, weight = ctx.saved_tensors
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        run: Any = backward_op if torch.compiler.is_compiling() else run_backward
        text, reuse = ctx.settings
        dx, dw = None, None
        if need_x or need_w:
            dx, dw = run(dy_MN, kept, kept_scale, weight, text, need_x, need_w, reuse)
        db = dy_MN.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if need_b else None
        return dx if need_x else None, dw if need_w else None, db, None, None, None


# ---- the products ----------------------------------------------------------------------------------------------------


def run_forward(
    x_MK: Tensor, weight: Tensor, bias: Tensor | None, text: str, need_x: bool, need_w: bool, reuse: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(y, what wgrad will read of x, its scale); the last two are None where wgrad is BF16 or not wanted."""
    settings = Fp8Settings.from_text(text)
    recipe, gemms = settings.recipe, settings.gemms
    wgrad = gemms.wgrad if need_w else BF16
    x_rows, x_cols = cast_for(x_MK, gemms.fprop, wgrad, "e4m3", recipe.eps.input, (weight, INPUT))
    if x_rows is None:
        y = plain_product(x_MK, weight.t(), bias)
    else:
        with_cols = need_x and gemms.dgrad == gemms.fprop
        w_rows = fp8_weight_casts.weight_rows(weight, gemms.fprop, recipe.eps.weight, with_cols=with_cols, reuse=reuse)
        y = scaled_product(x_rows, w_rows, x_MK.dtype, bias=bias, fast_accum="fprop" in recipe.fast_accum)
    y = without_padding(y, x_MK.shape[0])
    return (y, None, None) if x_cols is None else (y, x_cols.codes, x_cols.scale)


def run_backward(
    dy_MN: Tensor,
    kept: Tensor,
    kept_scale: Tensor | None,
    weight: Tensor,
    text: str,
    need_x: bool,
    need_w: bool,
    reuse: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """(dx, dW); None for one that is not wanted."""
    settings = Fp8Settings.from_text(text)
    recipe, gemms = settings.recipe, settings.gemms
    dgrad, wgrad = gemms.dgrad if need_x else BF16, gemms.wgrad if need_w else BF16
    dy_rows, dy_cols = cast_for(dy_MN, dgrad, wgrad, recipe.grad_fp8, recipe.eps.grad, (weight, GRAD))
    dx = dw = None
    if dy_rows is not None:
        w_cols = fp8_weight_casts.weight_cols(weight, dgrad, recipe.eps.weight, reuse=reuse)
        dx = scaled_product(dy_rows, w_cols, dy_MN.dtype, fast_accum="dgrad" in recipe.fast_accum)
        dx = without_padding(dx, dy_MN.shape[0])
    elif need_x:
        dx = plain_product(dy_MN, weight)
    if dy_cols is not None:
        assert kept_scale is not None
        x_cols = ScaledFp8(kept, kept_scale, scaling_of(wgrad))
        dw = scaled_product(dy_cols, x_cols, weight.dtype, fast_accum="wgrad" in recipe.fast_accum)
    elif need_w:
        dw = plain_product(dy_MN.t(), kept).to(weight.dtype)
    return dx, dw


# ---- operators for compiled graphs ----------------------------------------------------------------------------------


def define_operator(signature: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """An operator `bitplan::...` for every device. torch.library.custom_op also checks each call for aliases, which
    costs the host as much as a launch."""
    name = signature.split("(")[0]
    _LIBRARY.define(signature, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"bitplan::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.bitplan, name).default


_LIBRARY = torch.library.Library("bitplan", "FRAGMENT")


def _forward_in_graph(x_MK: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Operators return tensors only: empty ones for None."""
    y, kept, scale = run_forward(x_MK, *rest)
    return y, x_MK.new_empty(0) if kept is None else kept, x_MK.new_empty(0) if scale is None else scale


def _forward_shapes(x_MK, weight, bias, text, need_x, need_w, reuse):  # type: ignore[no-untyped-def]  # noqa: ARG001
    wgrad = Fp8Settings.from_text(text).gemms.wgrad
    y = x_MK.new_empty((x_MK.shape[0], weight.shape[0]))
    if not need_w or wgrad == BF16:
        return y, x_MK.new_empty(0), x_MK.new_empty(0)
    shape = (x_MK.shape[1], padded_tokens(wgrad, x_MK.shape[0]))
    scale = empty_scale(shape, scaling_of(wgrad), x_MK.device)
    return y, x_MK.new_empty(shape, dtype=FP8_DTYPES["e4m3"]), scale


def _backward_in_graph(dy_MN: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    dx, dw = run_backward(dy_MN, *rest)
    return dy_MN.new_empty(0) if dx is None else dx, dy_MN.new_empty(0) if dw is None else dw


def _backward_shapes(dy_MN, kept, kept_scale, weight, text, need_x, need_w, reuse):  # type: ignore[no-untyped-def]  # noqa: ARG001
    dx = dy_MN.new_empty((dy_MN.shape[0], weight.shape[1]) if need_x else 0)
    return dx, weight.new_empty(weight.shape) if need_w else dy_MN.new_empty(0)


forward_op = define_operator(
    "fp8_linear_forward(Tensor x, Tensor weight, Tensor? bias, str text, bool need_x, bool need_w, bool reuse) "
    "-> (Tensor, Tensor, Tensor)",
    _forward_in_graph,
    _forward_shapes,
)
backward_op = define_operator(
    "fp8_linear_backward(Tensor dy, Tensor kept, Tensor kept_scale, Tensor weight, str text, bool need_x, "
    "bool need_w, bool reuse) -> (Tensor, Tensor)",
    _backward_in_graph,
    _backward_shapes,
)


# ---- the layer -------------------------------------------------------------------------------------------------------


class Fp8Linear(nn.Linear):
    """nn.Linear with FP8 products. `gemms` of None: all three by the recipe's own name."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: Fp8Recipe,
        gemms: GemmChoice | None = None,
        fp8_param: bool = False,
        reuse_weight_cast: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self._set_up(recipe, gemms, fp8_param, reuse_weight_cast)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        recipe: Fp8Recipe,
        gemms: GemmChoice | None = None,
        fp8_param: bool = False,
        reuse_weight_cast: bool = True,
    ) -> Self:
        """A layer over the same parameters: an optimizer that has them goes on working."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.in_features, layer.out_features = linear.in_features, linear.out_features
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.training = linear.training
        layer._set_up(recipe, gemms, fp8_param, reuse_weight_cast)
        return layer

    def _set_up(self, recipe: Fp8Recipe, gemms: GemmChoice | None, fp8_param: bool, reuse: bool) -> None:
        self.recipe, self.gemms = recipe, gemms or GemmChoice.all(recipe.name)
        self.reuse_weight_cast = reuse
        self.fp8_param = fp8_param
        check_shape(self.gemms, (self.out_features, self.in_features), type(self).__name__)
        if self.weight.device.type != "meta":
            require_fp8(self.weight.device, self.gemms.recipes)
        self._text = Fp8Settings(self.recipe, self.gemms).to_text()
        if fp8_param:
            store_in_fp8(self)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Moved to another device: can that one do it? What was kept of the weight stays behind."""
        fp8_weight_casts.drop_casts([self.weight])
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.weight.device.type != "meta":
            require_fp8(self.weight.device, self.gemms.recipes)
        return self

    def forward(self, x: Tensor) -> Tensor:
        if self.fp8_param:
            stored: Tensor = linear_of_fp8_param(self, x)
            return stored
        return _linear_by_text(x, self.weight, self.bias, self._text, self.reuse_weight_cast)

    def extra_repr(self) -> str:
        products = f"fprop={self.gemms.fprop}, dgrad={self.gemms.dgrad}, wgrad={self.gemms.wgrad}"
        return f"{super().extra_repr()}, {products}, fp8={self.recipe.fp8}"


def hold_weight_casts(module: nn.Module) -> None:
    """Cast the weights of all FP8 layers now, at addresses that stay, for CUDA graphs; again after each step."""
    for weight, settings in _cast_weights(module):
        for name in dict.fromkeys((settings.gemms.fprop, settings.gemms.dgrad)):
            if name != BF16:
                fp8_weight_casts.hold_cast(weight, name, settings.recipe.eps.weight)


def cast_weights_together(module: nn.Module) -> None:
    """After a step, cast the weights of all FP8 layers at once, by one launch of the host; on a GPU."""
    fp8_weight_casts.cast_together(
        (weight, settings.gemms.fprop, settings.recipe.eps.weight)
        for weight, settings in _cast_weights(module)
        if weight.requires_grad and settings.gemms.fprop == settings.gemms.dgrad != BF16
    )


def _cast_weights(module: nn.Module) -> Iterator[tuple[Tensor, Fp8Settings]]:
    """Weights that FP8 layers cast, and how."""
    for layer in module.modules():
        if isinstance(layer, Fp8Linear) and layer.reuse_weight_cast and layer.weight.dtype in _INPUTS:
            yield layer.weight, Fp8Settings.from_text(layer._text)
