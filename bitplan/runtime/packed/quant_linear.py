"""QuantLinear: a linear layer over a packed weight, and its gradients. `apply_plan` makes them.

    y = x @ decode(weight).T + bias

in one of the ways of `strategy`. The packed weight has no gradient: adapters and biases train over it, and gradients
pass through it to what comes before. The backward expands the weight again, or reads the expanded one that the strategy
keeps, in the same pieces as the forward. It is itself differentiable, so second derivatives exist.

eager, decode and tile_cache give F.linear on decoded weights, computed in float32 on a CPU and rounded once to the
input's type; fused states its own bound (`kernels.matmul`). Under autocast the input is cast as F.linear's would be.
torch.compile runs the layer as it is, between graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from bitplan.formats import Encoded, Format
from bitplan.kernels import decode, encode
from bitplan.kernels.matmul.cpu_matmul import piece_rows
from bitplan.kernels.matmul.fused import FusedMatmul, fused_for
from bitplan.kernels.matmul.row_pieces import (
    Piece,
    decoded_pieces,
    gradient_over_pieces,
    linear_over_pieces,
    why_no_rows,
)
from bitplan.measure.speed.crossover import Pick
from bitplan.runtime.packed.strategy import (
    INPUTS,
    LayerError,
    check_packed,
    check_strategy,
    choose,
    compute_dtype,
    is_capturing,
)
from bitplan.runtime.packed.tile_cache import TileCache
from bitplan.runtime.packed_weight import PackedWeight, State

_PICKS_KEPT = 64


# ---- the product and its gradient ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Product:
    """One call's way to multiply, for its forward and its backward."""

    weight: PackedWeight
    state: State
    pick: Pick
    cache: TileCache | None
    where: str

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        with _no_autocast(x.device):
            if not x.shape[0]:
                return x.new_empty((0, self.weight.shape[0]))
            if self.pick.strategy == "fused":
                return self._fused(x, bias)
            wide = compute_dtype(x.device, x.dtype)
            bias = None if bias is None else bias.to(wide)
            return linear_over_pieces(x.to(wide), self._pieces(wide), self.weight.shape[0], bias).to(x.dtype)

    def input_gradient(self, grad: Tensor) -> Tensor:
        if self.weight.state != self.state:
            raise LayerError(
                f"{self.where}: the packed weight was moved, loaded or written between forward and backward; "
                "run backward first, or the forward again"
            )
        with _no_autocast(grad.device):
            wide = compute_dtype(grad.device, grad.dtype)
            return gradient_over_pieces(grad.to(wide), self._pieces(wide), self.weight.shape[1]).to(grad.dtype)

    def _fused(self, x: Tensor, bias: Tensor | None) -> Tensor:
        fused = fused_for(x.device.type)
        assert fused is not None
        return fused.run(x, self.weight.encoded, self._prepared(fused, x.device), bias, self.pick.launch)

    def _prepared(self, fused: FusedMatmul, device: torch.device) -> Any:
        """What the kernel wants beside the weight: one for each stream, for a kernel may keep counters in it.

        While a graph is captured the first stream's is taken, if there is one: what is made now lives in the graph's
        own memory, and would be made again with every replay.
        """
        encoded, keep = self.weight.encoded, not is_capturing(device)
        key: Hashable = "fused"
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device).cuda_stream
            first = self.weight.derived("first stream", lambda: stream, keep=keep)
            key = "fused" if stream == first or not keep else ("fused", stream)
        return self.weight.derived(key, lambda: fused.prepare(encoded), keep=keep)

    def _pieces(self, dtype: torch.dtype) -> Iterator[Piece]:
        encoded, device = self.weight.encoded, self.weight.device
        if self.pick.strategy == "eager":
            keep = not is_capturing(device)
            made = self.weight.derived(("expanded", dtype), lambda: decode(encoded, dtype), keep=keep)
            return iter([(slice(0, encoded.shape[0]), made)])
        if self.pick.strategy == "tile_cache":
            assert self.cache is not None
            return self.cache.pieces(self.weight, dtype)
        step = piece_rows(encoded.shape[1], dtype) if device.type == "cpu" else encoded.shape[0]
        return decoded_pieces(encoded, dtype, step)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, product: _Product) -> Tensor:
        ctx.product, ctx.bias_dtype = product, None if bias is None else bias.dtype
        return product.linear(x, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        through: Callable[..., Tensor] = _InputGradient.apply
        x_grad = through(grad, ctx.product) if ctx.needs_input_grad[0] else None
        bias_grad = None
        if ctx.needs_input_grad[1]:
            bias_grad = grad.sum(dim=0, dtype=torch.promote_types(grad.dtype, torch.float32)).to(ctx.bias_dtype)
        return x_grad, bias_grad, None


class _InputGradient(torch.autograd.Function):
    """g -> g @ W, whose own gradient is `_Linear` again."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, product: _Product) -> Tensor:
        ctx.product = product
        return product.input_gradient(grad)

    @staticmethod
    def backward(ctx: Any, grad_of_grad: Tensor) -> tuple[Tensor | None, None]:
        through: Callable[..., Tensor] = _Linear.apply
        return through(grad_of_grad, None, ctx.product), None


def _no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Inputs have their type: autocast would compute in another, on a CPU in a slow one."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


# ---- the layer -------------------------------------------------------------------------------------------------------


class QuantLinear(nn.Module):
    """A linear layer whose weight [out_features, in_features] stays packed.

    weight     an Encoded matrix of a format whose blocks lie within a row, or a PackedWeight that another layer has too
    bias       kept as a Parameter, as it is
    strategy   "auto", "eager", "fused", "tile_cache" or "decode"; may be set later
    cache      the TileCache of the model, for "tile_cache" and "auto"
    name       what messages call the layer

    `last_pick` is how the last forward ran and why; `explain(rows)` is how one of so many rows would.
    """

    def __init__(
        self,
        weight: Encoded | PackedWeight,
        bias: Tensor | None = None,
        *,
        strategy: str = "auto",
        cache: TileCache | None = None,
        name: str = "QuantLinear",
    ) -> None:
        super().__init__()
        check_packed(weight, name)
        reason = why_no_rows(weight.fmt)
        if len(weight.shape) != 2 or reason is not None:
            raise LayerError(
                f"{name}: a packed linear needs a matrix in a format whose blocks lie within a row, such as mxfp4 or "
                f"int8_row, got {weight.fmt.name} of shape {weight.shape}{f': {reason}' if reason else ''}"
            )
        self.out_features, self.in_features = weight.shape
        if bias is not None and tuple(bias.shape) != (self.out_features,):
            raise LayerError(f"{name}: the bias must have shape ({self.out_features},), got {tuple(bias.shape)}")
        self.name = name
        self.weight = weight if isinstance(weight, PackedWeight) else PackedWeight(weight)
        self.register_parameter("bias", bias if bias is None or isinstance(bias, nn.Parameter) else nn.Parameter(bias))
        self._picks: dict[Any, Pick] = {}
        self._strategy, self._cache = check_strategy(strategy, name), cache
        self.last_pick: Pick | None = None

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        fmt: Format | str,
        *,
        strategy: str = "auto",
        cache: TileCache | None = None,
        name: str = "QuantLinear",
        **encode_options: Any,
    ) -> Self:
        """Pack a linear layer's weight; the bias is shared with it. Options are those of `bitplan.encode`."""
        encoded = encode(linear.weight, fmt, name=f"{name}.weight", **encode_options)
        made = cls(encoded, linear.bias, strategy=strategy, cache=cache, name=name)
        return made.train(linear.training)

    @property
    def strategy(self) -> str:
        return self._strategy

    @strategy.setter
    def strategy(self, strategy: str) -> None:
        self._strategy = check_strategy(strategy, self.name)
        self._picks.clear()

    @property
    def cache(self) -> TileCache | None:
        return self._cache

    @cache.setter
    def cache(self, cache: TileCache | None) -> None:
        self._cache = cache
        self._picks.clear()

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"format={self.weight.fmt.name}, strategy={self.strategy}"
        )

    def explain(self, rows: int, dtype: torch.dtype | None = None) -> Pick:
        """How a forward of `rows` rows (all leading axes together) would run, and why. Nothing is measured for it.

        dtype   of the input; bfloat16 on CUDA and float32 elsewhere if it is not given
        """
        usual = torch.bfloat16 if self.weight.device.type == "cuda" else torch.float32
        return choose(self.weight, rows, dtype or usual, self.strategy, self.cache, where=self.name, measure=False)

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            run: Callable[[Tensor], Tensor] = torch.compiler.disable(self._forward)
            return run(x)
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        self._check_input(x)
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(x.device.type)
        flat = x.to(dtype).reshape(-1 if x.numel() else x.shape[:-1].numel(), self.in_features)
        self.last_pick = picked = self._pick(flat.shape[0], dtype)
        product = _Product(self.weight, self.weight.state, picked, self.cache, self.name)
        linear: Callable[..., Tensor] = _Linear.apply
        return linear(flat, self.bias, product).reshape(*x.shape[:-1], self.out_features)

    def _check_input(self, x: Tensor) -> None:
        if x.dim() < 1 or x.shape[-1] != self.in_features:
            raise LayerError(
                f"{self.name}: the last axis of the input must have {self.in_features} features, got {tuple(x.shape)}"
            )
        if x.dtype not in INPUTS:
            raise LayerError(
                f"{self.name}: inputs are bfloat16, float16, float32 or float64, got {x.dtype}; cast first"
            )
        if x.device != self.weight.device:
            raise LayerError(f"{self.name}: the input lies on {x.device}, the weight on {self.weight.device}; move one")

    def _pick(self, rows: int, dtype: torch.dtype) -> Pick:
        """As `choose`, decided once for every power of two of rows, as it is measured."""
        weight, cache, strategy = self.weight, self.cache, self.strategy
        bucket = 1 << max(0, rows - 1).bit_length()
        if strategy not in ("auto", "fused") or is_capturing(weight.device):
            return choose(weight, bucket, dtype, strategy, cache, where=self.name)
        room = cache is not None and cache.has_room(weight, compute_dtype(weight.device, dtype))
        key = (bucket, dtype, room, weight.token, weight.state)
        if key not in self._picks:
            if len(self._picks) >= _PICKS_KEPT:
                self._picks.clear()
            self._picks[key] = choose(weight, bucket, dtype, strategy, cache, where=self.name)
        return self._picks[key]

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        if isinstance(state_dict.get(prefix + "weight"), Tensor):
            error_msgs: list[str] = args[-1]
            error_msgs.append(
                f"{prefix}weight: the state holds a float weight and this layer a packed {self.weight.fmt.name} one; "
                "load the state before the plan is applied, or a state that was saved after it"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)
