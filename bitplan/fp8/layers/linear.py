"""Fp8Linear: a linear layer whose three products run in FP8, each by its own recipe, or in BF16 (`products`).

The layer is used like nn.Linear: the same parameters, the same state_dict, the same optimizers. `fp8_param=True` is
the exception: there the weight is FP8 (`stored_weight`). Weight casts are shared by micro-batches (`weight_casts`).

Fp8NormLinear is RMSNorm or LayerNorm and the linear layer behind it, one module (`layernorm_column` in policies). Where
both fprop and wgrad are FP8, the normalised activations are never written: one pass computes each row's statistics, a
second normalises, rounds and casts, in both layouts. Only x, two numbers a row at most and x^T in FP8 stay for the
backward; a BF16 product gets the normalised matrix in the type of x. Its parameters are `norm.weight`, `norm.bias`
(LayerNorm with bias), `weight` and `bias`.

Errors, relative to the norm of the exact result with Gaussian numbers: two operands of E4M3 3.7% (each 2.6%), one of
E4M3 and one of E5M2 6%; beside them the rounding of the output. They do not grow with the sizes, except with fast
accumulation (`fp8.layer_settings`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from bitplan.fp8.kernels.cast import NORMS
from bitplan.fp8.layer_settings import Fp8LayerError, Fp8Recipe, GemmChoice, check_shape, require_fp8
from bitplan.fp8.layers import weight_casts
from bitplan.fp8.layers.linear_function import INPUT_TYPES, run_linear
from bitplan.fp8.layers.products import Fp8Settings
from bitplan.fp8.layers.stored_weight import (
    GatheredWeight,
    ShardGroup,
    linear_of_fp8_param,
    linear_of_gathered,
    plain_numbers,
    save_plain_weight,
    shard_in_fp8,
    store_in_fp8,
    stored_numbers,
)
from bitplan.fp8.layers.weight_source import CASTS, CastsWeight
from bitplan.fp8.recipes import BF16


class Fp8Linear(CastsWeight, nn.Linear):
    """nn.Linear with FP8 products. `gemms` of None: all three by the recipe's own name."""

    is_turned = False  # whether checkpoints hold the transpose of the weight

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
        self.made_with = self.gemms  # whatever `set_products` says since
        self.reuse_weight_cast = reuse
        self.fp8_param = fp8_param
        check_shape(self.gemms, (self.out_features, self.in_features), type(self).__name__)
        if self.weight.device.type != "meta":
            require_fp8(self.weight.device, self.gemms.recipes)
        self._text = Fp8Settings(self.recipe, self.gemms).to_text()
        if fp8_param:
            store_in_fp8(self)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Check after a move that the new device can run FP8; casts of the weight are not moved."""
        weight_casts.drop_casts([self.weight])
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.weight.device.type != "meta":
            require_fp8(self.weight.device, self.gemms.recipes)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.fp8_param:
            save_plain_weight(self, destination, prefix)
        elif f"{prefix}weight" in destination:  # under torch.nn.utils.parametrize it has another name
            destination[f"{prefix}weight"] = plain_numbers(destination[f"{prefix}weight"])
        if self.is_turned and f"{prefix}weight" in destination:
            destination[f"{prefix}weight"] = destination[f"{prefix}weight"].t().contiguous()

    def set_products(self, products: Mapping[str, str]) -> None:
        """Run these products ("fprop", "dgrad", "wgrad") by these recipes, or in "bf16", from the next forward on."""
        if self.fp8_param:
            raise Fp8LayerError("the weight is stored in FP8, so products stay FP8; leave out fp8_param")
        gemms = replace(self.gemms, **products)
        check_shape(gemms, (self.out_features, self.in_features), type(self).__name__)
        if self.weight.device.type != "meta":
            require_fp8(self.weight.device, gemms.recipes)
        self.gemms = gemms
        self._text = replace(Fp8Settings.from_text(self._text), gemms=gemms).to_text()

    def turn_in_checkpoints(self) -> None:
        """Read and write checkpoints with the transpose of the weight, as GPT-2's Conv1D has it."""
        self.is_turned = True
        handle = self.register_load_state_dict_pre_hook(_turn_loaded)  # type: ignore[no-untyped-call]
        self._load_state_dict_pre_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]

    def plain_weight(self) -> Tensor:
        """The weight's numbers: the master's, or the decoded ones, where it is stored in FP8."""
        return self.weight if not self.fp8_param else stored_numbers(self)

    def train(self, mode: bool = True) -> Self:
        if mode != self.training and self.fp8_param:
            self._stored_state = None
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.fp8_param:
            stored: Tensor = linear_of_fp8_param(self, x)
            return stored
        if isinstance(self.weight, GatheredWeight):
            gathered: Tensor = linear_of_gathered(x, self.weight, self.bias, self._text)
            return gathered
        return run_linear(x, self.weight, self.bias, self._text, CASTS[int(self.reuse_weight_cast)])

    def extra_repr(self) -> str:
        products = f"fprop={self.gemms.fprop}, dgrad={self.gemms.dgrad}, wgrad={self.gemms.wgrad}"
        return f"{super().extra_repr()}, {products}, fp8={self.recipe.fp8}"


def _turn_loaded(_layer: nn.Module, state: dict[str, Any], prefix: str, *_more: Any) -> None:
    if prefix + "weight" in state:
        state[prefix + "weight"] = state[prefix + "weight"].t().contiguous()


class NormParameters(nn.Module):
    """The norm's numbers, in a module named `norm`: trainers leave weight decay off by that name."""

    bias: nn.Parameter | None

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)


class Fp8NormLinear(Fp8Linear):
    """A layer that computes a norm over in_features and then a linear layer."""

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


def gather_weights_in_fp8(module: nn.Module) -> dict[str, str]:
    """Have FSDP2 gather the weights of FP8 layers in FP8; call it before `fully_shard`, and make the optimizer after.

    Returns the layers whose weights cross as they are, and why.
    """
    group, left = ShardGroup(), {}
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, CastsWeight)}
    if not layers:
        raise Fp8LayerError("gather_weights_in_fp8: the model has no FP8 layers; call apply_fp8 first")
    weight_casts.drop_casts(layer.get_parameter("weight") for layer in layers.values())
    for name, layer in layers.items():
        layer.reuse_weight_cast = False
        why = shard_in_fp8(layer, group) if isinstance(layer, Fp8Linear) else "its experts have a scale each"
        if why:
            left[name] = why
    return left


def hold_weight_casts(module: nn.Module) -> None:
    """Cast the weights of all FP8 layers now, at fixed addresses, for CUDA graphs; call it again after each step."""
    for weight, settings in _cast_weights(module):
        for name in dict.fromkeys((settings.gemms.fprop, settings.gemms.dgrad)):
            if name != BF16:
                weight_casts.hold_cast(weight, name, settings.recipe.eps.weight)


def cast_weights_together(module: nn.Module) -> None:
    """Cast the weights of all FP8 layers on a GPU together after each step, by one launch, from now on."""
    weight_casts.cast_together(
        (weight, settings.gemms.fprop, settings.recipe.eps.weight)
        for weight, settings in _cast_weights(module)
        if weight.requires_grad and settings.gemms.fprop == settings.gemms.dgrad != BF16
    )


def _cast_weights(module: nn.Module) -> Iterator[tuple[Tensor, Fp8Settings]]:
    """Yield each weight that a module's FP8 layers cast, with the settings of the cast."""
    for layer in module.modules():
        if isinstance(layer, Fp8Linear) and layer.reuse_weight_cast and layer.weight.dtype in INPUT_TYPES:
            yield layer.weight, Fp8Settings.from_text(layer._text)
