"""Fp8NormLinear: RMSNorm or LayerNorm and the linear layer behind it, one module (`layernorm_column` in policies).

Where both fprop and wgrad are FP8, the normalised activations are never written: one pass finds what the norm needs of
each row, a second normalises, rounds and casts, in both layouts. Only x, two numbers a row at most and x^T in FP8 stay
for the backward. Products, choices and weight casts are those of `Fp8Linear`; a BF16 product gets the normalised
matrix in the type of x.

Parameters: `norm.weight`, `norm.bias` (LayerNorm with bias), `weight`, `bias`. Under torch.compile the halves are
single operators, as in `Fp8Linear`.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bitplan.formats.fp8 import FP8_DTYPES, empty_scale, padded_tokens, scaling_of
from bitplan.kernels.fp8.norm import NORMS, NormWeights, norm_and_cast, norm_gradient
from bitplan.kernels.fp8.product import scaled_product
from bitplan.runtime.fp8.layers import weight_casts as fp8_weight_casts
from bitplan.runtime.fp8.layers.linear import Fp8Linear, Fp8Settings, define_operator, run_backward
from bitplan.runtime.fp8.layers.products import plain_product, without_padding
from bitplan.runtime.fp8.recipe import BF16, Fp8LayerError, Fp8Recipe, GemmChoice

_INPUTS = (torch.bfloat16, torch.float16, torch.float32)


class _NormProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_MK: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        kind: str,
        norm_eps: float,
        text: str,
        reuse: bool,
        keep: bool,
    ) -> Tensor:
        need_x, need_w = keep and any(ctx.needs_input_grad[:3]), keep and ctx.needs_input_grad[3]
        run: Any = norm_forward_op if torch.compiler.is_compiling() else run_norm_forward
        y, kept, kept_scale, rstd, mean = run(
            x_MK, norm_weight, norm_bias, weight, bias, kind, norm_eps, text, need_x, need_w, reuse
        )
        ctx.save_for_backward(x_MK, norm_weight, norm_bias, weight, kept, kept_scale, rstd, mean)
        ctx.settings = (kind, norm_eps, text, reuse)
        ctx.bias_dtype = bias.dtype if bias is not None else None
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        x, norm_weight, norm_bias, weight, kept, kept_scale, rstd, mean = ctx.saved_tensors
        needs = ctx.needs_input_grad
        need_x, need_w = any(needs[:3]), needs[3]
        run: Any = norm_backward_op if torch.compiler.is_compiling() else run_norm_backward
        dx, d_norm_weight, d_norm_bias, dw = run(
            dy_MN, x, norm_weight, norm_bias, weight, kept, kept_scale, rstd, mean, *ctx.settings, need_x, need_w
        )
        db = dy_MN.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if needs[4] else None
        made = (dx, d_norm_weight, d_norm_bias, dw, db)
        return (*(each if wanted else None for each, wanted in zip(made, needs, strict=False)), *[None] * 5)


def run_norm_forward(
    x_MK: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    kind: str,
    norm_eps: float,
    text: str,
    need_x: bool,
    need_w: bool,
    reuse: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None]:
    """(y, what wgrad will read, its scale, 1 / deviation, mean); None where there is nothing."""
    settings = Fp8Settings.from_text(text)
    recipe, gemms = settings.recipe, settings.gemms
    rows_by = gemms.fprop if gemms.fprop != BF16 else None
    cols_by = gemms.wgrad if need_w and gemms.wgrad != BF16 else None
    keep_plain = need_w and gemms.wgrad == BF16
    norm = NormWeights(kind, norm_weight, norm_bias, norm_eps)
    plain = keep_plain or rows_by is None
    normed = norm_and_cast(x_MK, norm, rows_by, cols_by, "e4m3", recipe.eps.input, plain=plain)
    if normed.rows is None:
        assert normed.plain is not None
        y = plain_product(normed.plain, weight.t(), bias)
    else:
        with_cols = need_x and gemms.dgrad == gemms.fprop
        w_rows = fp8_weight_casts.weight_rows(weight, gemms.fprop, recipe.eps.weight, with_cols=with_cols, reuse=reuse)
        y = scaled_product(normed.rows, w_rows, x_MK.dtype, bias=bias, fast_accum="fprop" in recipe.fast_accum)
    y = without_padding(y, x_MK.shape[0])
    if normed.cols is not None:
        return y, normed.cols.codes, normed.cols.scale, normed.rstd, normed.mean
    return y, normed.plain if keep_plain else None, None, normed.rstd, normed.mean


def run_norm_backward(
    dy_MN: Tensor,
    x_MK: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor,
    kept: Tensor,
    kept_scale: Tensor | None,
    rstd: Tensor,
    mean: Tensor | None,
    kind: str,
    norm_eps: float,
    text: str,
    reuse: bool,
    need_x: bool,
    need_w: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """(dx, the norm's weight gradient, its bias's, dW); None where not wanted."""
    d_normed, dw = run_backward(dy_MN, kept, kept_scale, weight, text, need_x, need_w, reuse)
    if d_normed is None:
        return None, None, None, dw
    norm = NormWeights(kind, norm_weight, norm_bias, norm_eps)
    dx, d_weight, d_bias = norm_gradient(d_normed, x_MK, norm, mean if kind == "layer" else None, rstd)
    return dx, d_weight.to(norm_weight.dtype), None if d_bias is None else d_bias.to(norm_weight.dtype), dw


def _forward_in_graph(x_MK: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Operators return tensors only: empty ones for None."""
    y, kept, scale, rstd, mean = run_norm_forward(x_MK, *rest)
    return (
        y,
        x_MK.new_empty(0) if kept is None else kept,
        x_MK.new_empty(0) if scale is None else scale,
        rstd,
        rstd.new_empty(0) if mean is None else mean,
    )


def _forward_shapes(x_MK, norm_weight, norm_bias, weight, bias, kind, norm_eps, text, need_x, need_w, reuse):  # type: ignore[no-untyped-def]  # noqa: ARG001
    wgrad = Fp8Settings.from_text(text).gemms.wgrad
    y = x_MK.new_empty((x_MK.shape[0], weight.shape[0]))
    rstd = x_MK.new_empty(x_MK.shape[0], dtype=torch.float32)
    mean = x_MK.new_empty(x_MK.shape[0] if kind == "layer" else 0, dtype=torch.float32)
    if not need_w:
        return y, x_MK.new_empty(0), x_MK.new_empty(0), rstd, mean
    if wgrad == BF16:
        return y, x_MK.new_empty(x_MK.shape), x_MK.new_empty(0), rstd, mean
    shape = (x_MK.shape[1], padded_tokens(wgrad, x_MK.shape[0]))
    scale = empty_scale(shape, scaling_of(wgrad), x_MK.device)
    return y, x_MK.new_empty(shape, dtype=FP8_DTYPES["e4m3"]), scale, rstd, mean


def _backward_in_graph(dy_MN: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(dy_MN.new_empty(0) if each is None else each for each in run_norm_backward(dy_MN, *rest))


def _backward_shapes(dy_MN, x_MK, norm_weight, norm_bias, weight, *rest):  # type: ignore[no-untyped-def]
    need_x, need_w = rest[-2:]
    dw = weight.new_empty(weight.shape) if need_w else dy_MN.new_empty(0)
    if not need_x:
        return dy_MN.new_empty(0), dy_MN.new_empty(0), dy_MN.new_empty(0), dw
    d_bias = dy_MN.new_empty(0) if norm_bias is None else norm_weight.new_empty(norm_weight.shape)
    return x_MK.new_empty(x_MK.shape), norm_weight.new_empty(norm_weight.shape), d_bias, dw


norm_forward_op = define_operator(
    "fp8_norm_linear_forward(Tensor x, Tensor norm_weight, Tensor? norm_bias, Tensor weight, Tensor? bias, str kind, "
    "float norm_eps, str text, bool need_x, bool need_w, bool reuse) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward_in_graph,
    _forward_shapes,
)
norm_backward_op = define_operator(
    "fp8_norm_linear_backward(Tensor dy, Tensor x, Tensor norm_weight, Tensor? norm_bias, Tensor weight, Tensor kept, "
    "Tensor kept_scale, Tensor rstd, Tensor mean, str kind, float norm_eps, str text, bool reuse, bool need_x, "
    "bool need_w) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward_in_graph,
    _backward_shapes,
)


class NormParameters(nn.Module):
    """The norm's numbers, in a module named `norm`: trainers leave weight decay off by that name."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)


class Fp8NormLinear(Fp8Linear):
    """A norm over in_features, then a linear layer, in one."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        norm: str = "rms",
        norm_eps: float = 1e-6,
        norm_bias: bool | None = None,
        recipe: Fp8Recipe,
        gemms: GemmChoice | None = None,
        reuse_weight_cast: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            bias,
            recipe=recipe,
            gemms=gemms,
            reuse_weight_cast=reuse_weight_cast,
            device=device,
            dtype=dtype,
        )
        with_bias = norm == "layer" if norm_bias is None else norm_bias
        self._set_norm(
            norm,
            norm_eps,
            nn.Parameter(torch.ones(in_features, device=device, dtype=dtype)),
            nn.Parameter(torch.zeros(in_features, device=device, dtype=dtype)) if with_bias else None,
        )

    @classmethod
    def from_modules(
        cls,
        norm: nn.Module,
        linear: nn.Linear,
        *,
        recipe: Fp8Recipe,
        gemms: GemmChoice | None = None,
        reuse_weight_cast: bool = True,
    ) -> Self:
        """A module over the parameters of a norm (nn.LayerNorm, nn.RMSNorm, or one like llama's) and a linear layer."""
        layer = cls.from_linear(linear, recipe=recipe, gemms=gemms, reuse_weight_cast=reuse_weight_cast)
        eps = next((getattr(norm, name) for name in ("eps", "variance_epsilon") if hasattr(norm, name)), None)
        weight = getattr(norm, "weight", None)
        if not isinstance(weight, nn.Parameter) or weight.shape != (linear.in_features,):
            raise Fp8LayerError(
                f"{type(norm).__name__} has no weight of {linear.in_features} numbers to fuse with; keep them apart"
            )
        kind = "layer" if isinstance(norm, nn.LayerNorm) else "rms"
        if eps is None:  # nn.RMSNorm: the smallest step of the type
            eps = torch.finfo(weight.dtype).eps
        layer._set_norm(kind, eps, weight, getattr(norm, "bias", None))
        return layer

    def _set_norm(self, kind: str, eps: float, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        if kind not in NORMS:
            raise Fp8LayerError(f"norm must be one of {', '.join(NORMS)}, got {kind!r}")
        if self.fp8_param:
            raise Fp8LayerError("a fused norm takes fp8_param=False; use Fp8Linear behind a norm of its own")
        self.norm_kind, self.norm_eps = kind, float(eps)
        self.norm = NormParameters(weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if x.shape[-1] != self.in_features or x.dtype not in _INPUTS:
            raise Fp8LayerError(
                f"a layer of {self.in_features} inputs takes bfloat16, float16 or float32 numbers "
                f"[..., {self.in_features}], got {x.dtype} of shape {tuple(x.shape)}"
            )
        out: Tensor = _NormProduct.apply(  # type: ignore[no-untyped-call]
            x.reshape(-1, x.shape[-1]),
            self.norm.weight,
            self.norm.bias,
            self.weight,
            self.bias,
            self.norm_kind,
            self.norm_eps,
            self._text,
            self.reuse_weight_cast,
            torch.is_grad_enabled(),  # inside the function it is off either way
        )
        return out.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, norm={self.norm_kind}, norm_eps={self.norm_eps}"
