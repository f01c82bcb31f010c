"""GatedMlp: down(silu(gate(norm(x))) * up(norm(x))) of FP8 layers, with the gating in the casts.

A llama's MLP after `apply_fp8` is an Fp8NormLinear for gate and up, and an Fp8Linear for down. Between them stand
silu(gate) * up in the forward, whose result is only cast, and its gradient in the backward, which is only cast. Here
both are computed in the cast (`bitplan.kernels.fp8.gated`): neither is written in bfloat16 and read again. The
modules inside keep their names and can still be called one by one.

It computes as those modules would; only silu(gate) is not rounded to bfloat16 before it is multiplied. Where the
kernels do not fit (other types than bfloat16, no guess of a scale yet in a CUDA graph), the gating is computed first
and then cast. Modules that have hooks or were replaced, or weights that FSDP2 gathers in FP8, are called one by one, by
the code of the MLP itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bitplan.formats.fp8 import FP8_DTYPES, CastPair, empty_scale, padded_tokens
from bitplan.kernels.fp8.gated import RECIPE, cast_gated
from bitplan.runtime.fp8.layer_settings import GemmChoice
from bitplan.runtime.fp8.layers.linear import Fp8Linear
from bitplan.runtime.fp8.layers.linear_function import (
    INPUT_TYPES,
    define_operator,
    norm_backward_shapes,
    norm_forward_shapes,
)
from bitplan.runtime.fp8.layers.norm_linear import Fp8NormLinear
from bitplan.runtime.fp8.layers.products import (
    Fp8Settings,
    gradients_of,
    norm_gradients,
    product_of,
    run_backward,
    run_norm_forward,
)
from bitplan.runtime.fp8.layers.scale_guesses import GRAD, INPUT, guess_for
from bitplan.runtime.fp8.layers.sharded_weight import GatheredWeight
from bitplan.runtime.fp8.layers.weight_source import CASTS, WeightSource

ALL_PRODUCTS = GemmChoice.all(RECIPE)


class GatedMlp(nn.Module):
    """Takes the place of an MLP, with all that it has, under the same names: gate with up inside, up, down."""

    def __init__(self, mlp: nn.Module, gate: str, up: str, down: str, activation: str | None) -> None:
        super().__init__()
        vars(self).update(vars(mlp))
        self.names = (gate, up, down)
        self._alone = type(mlp).forward
        named = {name: getattr(self, name) for name in (*self.names, *([activation] if activation else []))}
        self._joined = tuple(named.items())
        self._watched = tuple(each for child in self.children() for each in child.modules())

    def forward(self, x: Tensor) -> Tensor:
        (_, gate), _, (_, down), *_ = self._joined
        first: Any = gate._modules.get("fused", gate)
        if not self._is_as_joined() or gating_obstacle(first, down) or not _fits(x, first):
            made: Tensor = self._alone(self, x)
            return made
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        weights, texts = (first.weight, down.weight), (first._text, down._text)
        source = CASTS[int(first.reuse_weight_cast and down.reuse_weight_cast)]
        x_MK, keep = x.reshape(-1, x.shape[-1]), torch.is_grad_enabled()
        y: Tensor = _Gated.apply(x_MK, *weights, first.norm.weight, first.norm.bias, *texts, source, keep)  # type: ignore[no-untyped-call]
        return y.view(*x.shape[:-1], down.weight.shape[0])

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
        for each in self._watched:  # their dictionaries: this is done in each call, and an attribute takes longer
            own = each.__dict__
            if own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own:
                return False
            if own["_backward_hooks"] or own["_backward_pre_hooks"]:
                return False
        return True


def _fits(x: Tensor, first: Any) -> bool:
    """Others go to the layers themselves, whose errors say what is wrong."""
    return isinstance(x, Tensor) and x.dtype in INPUT_TYPES and x.ndim > 0 and x.shape[-1] == first.weight.shape[1]


def gating_obstacle(first: nn.Module, down: nn.Module) -> str | None:
    """Why these two layers cannot be joined by `GatedMlp`."""
    if not isinstance(first, Fp8NormLinear) or not isinstance(down, Fp8Linear) or isinstance(down, Fp8NormLinear):
        return "gate and up are not one FP8 layer with its norm, or down is not FP8"
    if first.bias is not None or down.bias is not None:
        return "its layers have biases"
    for layer in (first, down):
        if (layer.gemms is not ALL_PRODUCTS and layer.gemms != ALL_PRODUCTS) or layer.fp8_param:
            return f"not all products are {RECIPE}, with weights that are cast"
        if isinstance(layer.weight, GatheredWeight):
            return "FSDP2 gathers its weights in FP8"
    return None


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    return any(
        each._forward_hooks or each._forward_pre_hooks or each._backward_hooks or each._backward_pre_hooks
        for each in modules
    )


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_MK: Tensor,
        first: Tensor,
        down: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        first_text: str,
        down_text: str,
        source: WeightSource,
        keep: bool,
    ) -> Tensor:
        needs = ctx.needs_input_grad
        need_x = keep and (needs[0] or needs[3] or needs[4])
        wanted = (need_x, keep and needs[1], keep and needs[2])
        in_graph = torch.compiler.is_compiling()
        run: Any = forward_op if in_graph else run_gated_forward
        texts = (first_text, down_text)
        made = run(x_MK, norm_weight, norm_bias, first, down, *texts, *wanted, source.reuse if in_graph else source)
        y, *kept = made
        ctx.save_for_backward(x_MK, norm_weight, norm_bias, first, down, *kept)
        ctx.settings = (texts, source)
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        texts, source = ctx.settings
        needs = ctx.needs_input_grad
        wanted = (needs[0] or needs[3] or needs[4], needs[1], needs[2])
        in_graph = torch.compiler.is_compiling()
        run: Any = backward_op if in_graph else run_gated_backward
        dx, d_norm_weight, d_norm_bias, d_first, d_down = run(
            dy_MN, *ctx.saved_tensors, *texts, *wanted, source.reuse if in_graph else source
        )
        return (
            dx if needs[0] else None,
            d_first if needs[1] else None,
            d_down if needs[2] else None,
            d_norm_weight if needs[3] else None,
            d_norm_bias if needs[4] else None,
            *(None,) * 4,
        )


def run_gated_forward(
    x_MK: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    first: Tensor,
    down: Tensor,
    first_text: str,
    down_text: str,
    need_x: bool,
    need_first: bool,
    need_down: bool,
    source: WeightSource,
) -> tuple[Tensor | None, ...]:
    """(output; gate and up; normalised x for wgrad, its scale, 1 / deviation, mean; gated numbers for wgrad, scale)."""
    made = run_norm_forward(x_MK, norm_weight, norm_bias, first, None, first_text, need_x, need_first, source)
    y_M2F, *of_norm = made
    settings = Fp8Settings.from_text(down_text)
    rows, cols = _cast(y_M2F, None, down, INPUT, settings, rows=True, cols=need_down)
    out = product_of(y_M2F, rows, down, None, settings, need_x or need_first, source)
    return out, y_M2F, *of_norm, *((None, None) if cols is None else (cols.codes, cols.scale))


def run_gated_backward(
    dy_MN: Tensor,
    x_MK: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    first: Tensor,
    down: Tensor,
    y_M2F: Tensor,
    kept: Tensor,
    kept_scale: Tensor,
    rstd: Tensor,
    mean: Tensor | None,
    gated: Tensor,
    gated_scale: Tensor,
    first_text: str,
    down_text: str,
    need_x: bool,
    need_first: bool,
    need_down: bool,
    source: WeightSource,
) -> tuple[Tensor | None, ...]:
    """(dx, the norm's weight gradient, its bias's, gradient of the first weight, of down); None where not wanted."""
    need_gated = need_x or need_first
    dh, d_down = run_backward(dy_MN, gated, gated_scale, down, down_text, need_gated, need_down, source)
    if dh is None:
        return None, None, None, None, d_down
    settings = Fp8Settings.from_text(first_text)
    cast = _cast(y_M2F, dh, first, GRAD, settings, rows=need_x, cols=need_first)
    d_normed, d_first = gradients_of(cast, dh, kept, kept_scale, first, settings, need_x, need_first, source)
    of_norm = norm_gradients(d_normed, x_MK, norm_weight, norm_bias, rstd, mean, first_text)
    return *of_norm, d_first, d_down


def _cast(
    y_M2F: Tensor, dh: Tensor | None, weight: Tensor, role: str, settings: Fp8Settings, *, rows: bool, cols: bool
) -> CastPair:
    """The gated numbers, or with `dh` the gradient of gate and up, cast beside this weight."""
    recipe = settings.recipe
    fp8, eps = ("e4m3", recipe.eps.input) if dh is None else (recipe.grad_fp8, recipe.eps.grad)
    return cast_gated(y_M2F, dh, fp8, eps, rows=rows, cols=cols, guess=guess_for(RECIPE, weight, role, fp8))


# ---- operators for compiled graphs ----------------------------------------------------------------------------------


def _forward_shapes(x_MK, norm_weight, norm_bias, first, down, first_text, down_text, *rest):  # type: ignore[no-untyped-def]  # noqa: ARG001
    need_x, need_first, need_down, reuse = rest
    y_M2F, *of_norm = norm_forward_shapes(
        x_MK, norm_weight, norm_bias, first, None, first_text, need_x, need_first, reuse
    )  # type: ignore[no-untyped-call]
    y = x_MK.new_empty((x_MK.shape[0], down.shape[0]))
    if not need_down:
        return y, y_M2F, *of_norm, x_MK.new_empty(0), x_MK.new_empty(0)
    shape = (down.shape[1], padded_tokens(RECIPE, x_MK.shape[0]))
    kept = x_MK.new_empty(shape, dtype=FP8_DTYPES["e4m3"])
    return y, y_M2F, *of_norm, kept, empty_scale(shape, "tensor", x_MK.device)


def _backward_shapes(dy_MN, x_MK, norm_weight, norm_bias, first, down, *rest):  # type: ignore[no-untyped-def]
    need_x, need_first, need_down, reuse = rest[-4:]
    given = (dy_MN, None, None, first, x_MK, norm_weight, norm_bias, need_x, need_first, reuse)
    d_down = down.new_empty(down.shape) if need_down else dy_MN.new_empty(0)
    return *norm_backward_shapes(*given), d_down  # type: ignore[no-untyped-call]


forward_op = define_operator(
    "fp8_gated_mlp_forward(Tensor x, Tensor norm_weight, Tensor? norm_bias, Tensor first, Tensor down, "
    "str first_text, str down_text, bool need_x, bool need_first, bool need_down, bool reuse) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    run_gated_forward,
    _forward_shapes,
)
backward_op = define_operator(
    "fp8_gated_mlp_backward(Tensor dy, Tensor x, Tensor norm_weight, Tensor? norm_bias, Tensor first, Tensor down, "
    "Tensor y, Tensor kept, Tensor kept_scale, Tensor rstd, Tensor mean, Tensor gated, Tensor gated_scale, "
    "str first_text, str down_text, bool need_x, bool need_first, bool need_down, bool reuse) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    run_gated_backward,
    _backward_shapes,
)
