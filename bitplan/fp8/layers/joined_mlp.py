"""JoinedMlp: down(act(up(x))), or down(act(gate(x)) * up(x)), of FP8 layers, behind a norm or not, act in the casts.

An MLP after `apply_fp8` is a first layer (an Fp8NormLinear or Fp8Linear; of gate and up where it is gated) and an
Fp8Linear for down. Between them stand an activation in the forward, whose result is only cast, and its gradient in the
backward, which is only cast. Here both are computed in the cast (`bitplan.fp8.kernels.cast`): neither is written
in bfloat16 and read again. The modules inside keep their names and can still be called one by one.

It computes as those modules would; only act(gate) is not rounded to bfloat16 before it is multiplied. Where the
kernels do not fit (other types than bfloat16, no guess of a scale yet in a CUDA graph), the activation is computed
first and then cast. Modules that have hooks or were replaced, or weights that FSDP2 gathers in FP8, are called one by
one, by the code of the MLP itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bitplan.fp8.casts import FP8_DTYPES, CastPair, empty_scale, padded_tokens
from bitplan.fp8.kernels.cast import RECIPE, activation_gradient, cast_activated
from bitplan.fp8.layer_settings import GemmChoice
from bitplan.fp8.layers.linear import Fp8Linear, Fp8NormLinear
from bitplan.fp8.layers.linear_function import INPUT_TYPES, backward_shapes, define_layer_operator, forward_shapes
from bitplan.fp8.layers.products import (
    Fp8Settings,
    gradients_of,
    norm_gradients,
    product_of,
    run_backward,
    run_forward,
)
from bitplan.fp8.layers.scale_guesses import GRAD, INPUT, guess_for
from bitplan.fp8.layers.stored_weight import GatheredWeight
from bitplan.fp8.layers.weight_source import CASTS, WeightSource

ALL_PRODUCTS = GemmChoice.all(RECIPE)


class JoinedMlp(nn.Module):
    """Takes the place of an MLP, with all that it has, under the same names.

    first     path of the layer of the first product: of gate with up inside, or of both in one, where it is gated
    down      path of the layer of the last product
    tail      names of modules that are called on down's output
    function  what lies between the products, one of `fp8.kernels.cast.FUNCTIONS`
    """

    def __init__(self, mlp: nn.Module, first: str, down: str, function: str, tail: Sequence[str] = ()) -> None:
        super().__init__()
        vars(self).update(vars(mlp))
        self.joined_function = function
        self._original = (mlp,)  # in a tuple, and with the same children: its code runs where this does not fit
        self._first, self._down, self._tail = self.get_submodule(first), self.get_submodule(down), tuple(tail)
        called = {name: part for name, part in vars(mlp).items() if callable(part) and not isinstance(part, type)}
        self._joined = tuple((called | dict(mlp.named_children())).items())
        self._watched = tuple(module for child in self.children() for module in child.modules())

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_first", "_down"):  # children of the MLP, not of this module itself
            vars(self)[name] = value
        else:
            super().__setattr__(name, value)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        first: Any = self._first._modules.get("fused", self._first)
        down: Any = self._down
        if args or kwargs or not self._is_as_joined() or joining_obstacle(first, down) or not _fits(x, first):
            output: Tensor = self._by_its_own_code(x, *args, **kwargs)
            return output
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        norm = first.norm if isinstance(first, Fp8NormLinear) else None
        of_norm = (None, None) if norm is None else (norm.weight, norm.bias)
        source = CASTS[int(first.reuse_weight_cast and down.reuse_weight_cast)]
        weights, texts = (first.weight, first.bias, down.weight, down.bias), (first._text, down._text)
        settings = (*texts, self.joined_function, source, torch.is_grad_enabled())
        y: Tensor = _Mlp.apply(x.reshape(-1, x.shape[-1]), *of_norm, *weights, *settings)  # type: ignore[no-untyped-call]
        y = y.view(*x.shape[:-1], down.weight.shape[0])
        for name in self._tail:
            y = getattr(self, name)(y)
        return y

    def _by_its_own_code(self, *args: Any, **kwargs: Any) -> Any:
        mlp, attributes = self._original[0], vars(self)
        for name in vars(mlp):
            vars(mlp)[name] = attributes[name]  # what was set on this module since
        return mlp.forward(*args, **kwargs)

    def _is_as_joined(self) -> bool:
        """Whether no part was replaced, and none must be called itself: users and FSDP2 have hooks there."""
        modules = self._modules
        for name, part in self._joined:
            if modules.get(name) is not part and getattr(self, name) is not part:
                return False
        if torch.compiler.is_compiling():
            return not has_hooks(self._watched)
        if torch.nn.modules.module._has_any_global_hook():
            return False
        for module in self._watched:  # their dictionaries: this is done in each call, and an attribute takes longer
            has = module.__dict__
            if has["_forward_hooks"] or has["_forward_pre_hooks"] or "forward" in has:
                return False
            if has["_backward_hooks"] or has["_backward_pre_hooks"]:
                return False
        return True


def _fits(x: Tensor, first: Any) -> bool:
    """Whether an input suits the joined MLP; others go to the layers themselves, whose errors say what is wrong."""
    return isinstance(x, Tensor) and x.dtype in INPUT_TYPES and x.ndim > 0 and x.shape[-1] == first.weight.shape[1]


def joining_obstacle(first: nn.Module, down: nn.Module) -> str | None:
    """Why these two layers cannot be joined by `JoinedMlp`."""
    if not isinstance(first, Fp8Linear) or not isinstance(down, Fp8Linear) or isinstance(down, Fp8NormLinear):
        return "its projections are not all FP8"
    for layer in (first, down):
        if (layer.gemms is not ALL_PRODUCTS and layer.gemms != ALL_PRODUCTS) or layer.fp8_param:
            return f"not all products are {RECIPE}, with weights that are cast"
        if isinstance(layer.weight, GatheredWeight):
            return "FSDP2 gathers its weights in FP8"
    return None


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    return any(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        for module in modules
    )


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_MK: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        first: Tensor,
        first_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
        first_text: str,
        down_text: str,
        function: str,
        source: WeightSource,
        keep: bool,
    ) -> Tensor:
        needs = ctx.needs_input_grad
        need_x = keep and (needs[0] or needs[1] or needs[2])
        need_first, need_down = keep and needs[3], keep and needs[5]
        # What down's gradient is multiplied with further on is wanted for the first bias, too.
        need_between = need_x or need_first or (keep and needs[4])
        in_graph = torch.compiler.is_compiling()
        run: Any = forward_op if in_graph else run_mlp_forward
        tensors, texts = (norm_weight, norm_bias, first, first_bias, down, down_bias), (first_text, down_text, function)
        wanted = (need_x, need_first, need_between, need_down)
        y, *kept = run(x_MK, *tensors, *texts, *wanted, source.reuse if in_graph else source)
        ctx.save_for_backward(x_MK, norm_weight, norm_bias, first, first_bias, down, *kept)
        ctx.settings = (texts, source)
        ctx.bias_type = None if down_bias is None else down_bias.dtype
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        texts, source = ctx.settings
        needs = ctx.needs_input_grad
        wanted = (needs[0] or needs[1] or needs[2], needs[3], needs[4], needs[5])
        in_graph = torch.compiler.is_compiling()
        run: Any = backward_op if in_graph else run_mlp_backward
        results = run(dy_MN, *ctx.saved_tensors, *texts, *wanted, source.reuse if in_graph else source)
        of_down_bias = dy_MN.sum(0, dtype=torch.float32).to(ctx.bias_type) if needs[6] else None
        gradients = (gradient if need else None for gradient, need in zip(results, needs[:6], strict=True))
        return *gradients, of_down_bias, *(None,) * 5


def run_mlp_forward(
    x_MK: Tensor,
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
    source: WeightSource,
) -> tuple[Tensor | None, ...]:
    """Compute an MLP; return its output, the first product, and what the backward reads.

    That is the input cast for wgrad, its scale, 1 / deviation and mean of the norm, the activated cast, its scale.
    """
    of_first = run_forward(x_MK, norm_weight, norm_bias, first, first_bias, first_text, need_x, need_first, source)
    y = of_first[0]
    settings = Fp8Settings.from_text(down_text)
    (rows, cols), _ = _cast(y, None, down, INPUT, settings, function, rows=True, cols=need_down)
    out = product_of(y, rows, down, down_bias, settings, need_between, source)
    return out, *of_first, *((None, None) if cols is None else (cols.codes, cols.scale))


def run_mlp_backward(
    dy_MN: Tensor,
    x_MK: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    first: Tensor,
    first_bias: Tensor | None,
    down: Tensor,
    y: Tensor,
    kept: Tensor,
    kept_scale: Tensor,
    rstd: Tensor,
    mean: Tensor | None,
    activated: Tensor,
    activated_scale: Tensor,
    first_text: str,
    down_text: str,
    function: str,
    need_x: bool,
    need_first: bool,
    need_bias: bool,
    need_down: bool,
    source: WeightSource,
) -> tuple[Tensor | None, ...]:
    """Return gradients of input, norm's weight and bias, first weight and bias, and down; None if not wanted."""
    need_between = need_x or need_first or need_bias
    no_norm = (None,) * 5
    dh, _, _, d_down = run_backward(
        dy_MN, activated, activated_scale, down, *no_norm, down_text, need_between, need_down, source
    )
    if dh is None:
        return None, None, None, None, None, d_down
    sums = first_bias.dtype if need_bias and first_bias is not None else None
    if not need_x and not need_first:
        total = activation_gradient(y, dh, function).sum(0, dtype=torch.float32).to(sums)
        return None, None, None, None, total, d_down
    settings = Fp8Settings.from_text(first_text)
    cast, of_bias = _cast(y, dh, first, GRAD, settings, function, rows=need_x, cols=need_first, sums=sums)
    dx, d_first = gradients_of(cast, dh, kept, kept_scale, first, settings, need_x, need_first, source)
    of_norm = norm_gradients(dx, x_MK, norm_weight, norm_bias, rstd, mean, settings)
    return *of_norm, d_first, of_bias, d_down


def _cast(
    y: Tensor,
    dh: Tensor | None,
    weight: Tensor,
    role: str,
    settings: Fp8Settings,
    function: str,
    *,
    rows: bool,
    cols: bool,
    sums: torch.dtype | None = None,
) -> tuple[CastPair, Tensor | None]:
    """The activated numbers, or with `dh` the gradient of the first product, cast beside this weight."""
    recipe = settings.recipe
    fp8, eps = ("e4m3", recipe.eps.input) if dh is None else (recipe.grad_fp8, recipe.eps.grad)
    guess = guess_for(RECIPE, weight, role, fp8)
    return cast_activated(y, dh, function, fp8, eps, rows=rows, cols=cols, sums=sums, guess=guess)


# ---- operators for compiled graphs ----------------------------------------------------------------------------------


def _forward_shapes(x_MK, norm_weight, norm_bias, first, first_bias, down, down_bias, first_text, *rest):  # type: ignore[no-untyped-def]  # noqa: ARG001
    _, _, need_x, need_first, _, need_down, reuse = rest
    arguments = (x_MK, norm_weight, norm_bias, first, first_bias, first_text, need_x, need_first, reuse)
    of_first = forward_shapes(*arguments)  # type: ignore[no-untyped-call]
    y = x_MK.new_empty((x_MK.shape[0], down.shape[0]))
    if not need_down:
        return y, *of_first, x_MK.new_empty(0), x_MK.new_empty(0)
    shape = (down.shape[1], padded_tokens(RECIPE, x_MK.shape[0]))
    kept = x_MK.new_empty(shape, dtype=FP8_DTYPES["e4m3"])
    return y, *of_first, kept, empty_scale(shape, "tensor", x_MK.device)


def _backward_shapes(dy_MN, x_MK, norm_weight, norm_bias, first, first_bias, down, *rest):  # type: ignore[no-untyped-def]
    need_x, need_first, need_bias, need_down, reuse = rest[-5:]
    d_down = down.new_empty(down.shape) if need_down else dy_MN.new_empty(0)
    total = first_bias.new_empty(first_bias.shape) if need_bias else dy_MN.new_empty(0)
    arguments = (dy_MN, None, None, first, x_MK, norm_weight, norm_bias, need_x, need_first, reuse)
    *of_norm, d_first = backward_shapes(*arguments)  # type: ignore[no-untyped-call]
    return *of_norm, d_first, total, d_down


forward_op = define_layer_operator(
    "fp8_mlp_forward(Tensor x, Tensor? norm_weight, Tensor? norm_bias, Tensor first, Tensor? first_bias, Tensor down, "
    "Tensor? down_bias, str first_text, str down_text, str function, bool need_x, bool need_first, "
    "bool need_between, bool need_down, bool reuse) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    run_mlp_forward,
    _forward_shapes,
)
backward_op = define_layer_operator(
    "fp8_mlp_backward(Tensor dy, Tensor x, Tensor? norm_weight, Tensor? norm_bias, Tensor first, Tensor? first_bias, "
    "Tensor down, Tensor y, Tensor kept, Tensor kept_scale, Tensor rstd, Tensor mean, Tensor activated, "
    "Tensor activated_scale, str first_text, str down_text, str function, bool need_x, bool need_first, "
    "bool need_bias, bool need_down, bool reuse) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    run_mlp_backward,
    _backward_shapes,
)
