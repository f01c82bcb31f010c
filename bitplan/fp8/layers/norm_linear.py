"""Fp8NormLinear: RMSNorm or LayerNorm and the linear layer behind it, one module (`layernorm_column` in policies).

Where both fprop and wgrad are FP8, the normalised activations are never written: one pass computes each row's
statistics, a second normalises, rounds and casts, in both layouts. Only x, two numbers a row at most and x^T in FP8
stay for the backward. Products, choices and weight casts are those of `Fp8Linear`; a BF16 product gets the normalised
matrix in the type of x.

Parameters: `norm.weight`, `norm.bias` (LayerNorm with bias), `weight`, `bias`.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from bitplan.fp8.kernels.norm import NORMS
from bitplan.fp8.layer_settings import Fp8LayerError, Fp8Recipe, GemmChoice
from bitplan.fp8.layers.linear import Fp8Linear
from bitplan.fp8.layers.linear_function import run_linear
from bitplan.fp8.layers.products import Fp8Settings
from bitplan.fp8.layers.sharded_weight import GatheredWeight, linear_of_gathered
from bitplan.fp8.layers.weight_source import CASTS


class NormParameters(nn.Module):
    """The norm's numbers, in a module named `norm`: trainers leave weight decay off by that name."""

    bias: nn.Parameter | None

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
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        how: dict[str, Any] = {"recipe": recipe, "gemms": gemms, "reuse_weight_cast": reuse_weight_cast}
        super().__init__(in_features, out_features, bias, **how, **where)
        with_bias = norm == "layer" if norm_bias is None else norm_bias
        weight = nn.Parameter(torch.ones(in_features, **where))
        self._set_norm(norm, norm_eps, weight, nn.Parameter(torch.zeros(in_features, **where)) if with_bias else None)

    @classmethod
    def from_modules(
        cls,
        norm: nn.Module,
        linear: nn.Linear,
        *,
        recipe: Fp8Recipe,
        gemms: GemmChoice | None = None,
        reuse_weight_cast: bool = True,
        kind: str | None = None,
        eps: float | None = None,
    ) -> Self:
        """A module over the parameters of a norm and a linear layer.

        `kind` and `eps` say what the norm computes; without `kind` it is nn.LayerNorm, nn.RMSNorm, or one like llama's.
        """
        layer = cls.from_linear(linear, recipe=recipe, gemms=gemms, reuse_weight_cast=reuse_weight_cast)
        if kind is None:
            kind = "layer" if isinstance(norm, nn.LayerNorm) else "rms"
            eps = next((getattr(norm, name) for name in ("eps", "variance_epsilon") if hasattr(norm, name)), None)
        weight = getattr(norm, "weight", None)
        if not isinstance(weight, nn.Parameter) or weight.shape != (linear.in_features,):
            raise Fp8LayerError(
                f"{type(norm).__name__} has no weight of {linear.in_features} numbers to fuse with; keep them apart"
            )
        if eps is None:  # nn.RMSNorm takes the epsilon of the type
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
        self._text = Fp8Settings(self.recipe, self.gemms, (kind, self.norm_eps)).to_text()

    def forward(self, x: Tensor) -> Tensor:
        source, norm = CASTS[int(self.reuse_weight_cast)], self.norm
        if isinstance(self.weight, GatheredWeight):
            gathered: Tensor = linear_of_gathered(x, self.weight, self.bias, self._text, (norm.weight, norm.bias))
            return gathered
        return run_linear(x, self.weight, self.bias, self._text, source, None, norm.weight, norm.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, norm={self.norm_kind}, norm_eps={self.norm_eps}"
