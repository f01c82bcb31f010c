"""Where the products of an FP8 layer get their weight, and how the tensors beside it are cast.

`shared_amax_cast` is for tensors of which several processes have a part each: the scale is by the largest number of
all. Maxima are compared as integers, which have the order of the magnitudes (NaN above infinity). Nothing waits for the
host on a GPU.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from bitplan.fp8.casts import CastPair, ScaledFp8, cast_reference, pad_rows, padded_tokens
from bitplan.fp8.kernels.cast import cast_layouts
from bitplan.fp8.layers.scale_guesses import guess_for
from bitplan.fp8.layers.weight_casts import count_backward, expire_casts, weight_cols, weight_rows
from bitplan.fp8.recipes import BF16

log = logging.getLogger("bitplan")


class WeightSource:
    """Where products get the weight, and how tensors are cast beside it. This one casts the weight itself.

    `reuse`: micro-batches share that cast. `grad_type`: type of the weight's gradient; None: the weight's own type.
    """

    grad_type: torch.dtype | None = None

    def __init__(self, reuse: bool) -> None:
        self.reuse = reuse

    def rows(self, weight: Tensor, recipe: str, eps: float, *, with_cols: bool) -> ScaledFp8:
        """The weight [N, K] for fprop. `with_cols`: dgrad will ask for the other layout of the same cast."""
        return weight_rows(weight, recipe, eps, with_cols=with_cols, reuse=self.reuse)

    def cols(self, weight: Tensor, recipe: str, eps: float) -> ScaledFp8:
        """The cast of the transposed weight, [K, N], for dgrad (the gradient of the input)."""
        return weight_cols(weight, recipe, eps, reuse=self.reuse)

    def count_backward(self, weight: Tensor, gradient: Tensor) -> None:
        """Note that a gradient of the weight was computed; where casts are reused, this tells when a step is over."""
        if self.reuse:
            count_backward(weight, gradient)

    def plain(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight in `dtype`, for products in BF16."""
        return weight

    def cast(
        self, x: Tensor, recipe: str, fp8: str, eps: float, weight: Tensor, role: str, *, rows: bool, cols: bool
    ) -> CastPair:
        """Cast the input or the output's gradient (`role` says which) for its products."""
        return cast_layouts(x, recipe, fp8, eps, rows=rows, cols=cols, guess=guess_for(recipe, weight, role, fp8))

    def cast_for(
        self, x: Tensor, rows_by: str, cols_by: str, fp8: str, eps: float, weight: Tensor, role: str
    ) -> tuple[ScaledFp8 | None, ScaledFp8 | None]:
        """A tensor cast for its two products: once if both have the same recipe, else once for each."""
        if rows_by == cols_by:
            if rows_by == BF16:
                return None, None
            return self.cast(x, rows_by, fp8, eps, weight, role, rows=True, cols=True)
        rows = cols = None
        if rows_by != BF16:
            rows = self.cast(x, rows_by, fp8, eps, weight, role, rows=True, cols=False).rows
        if cols_by != BF16:
            cols = self.cast(x, cols_by, fp8, eps, weight, role, rows=False, cols=True).cols
        return rows, cols


CASTS = (WeightSource(reuse=False), WeightSource(reuse=True))  # by whether casts are reused


class CastsWeight(nn.Module):
    """A layer that keeps casts of its `weight` from one call to the next, as long as it may."""

    reuse_weight_cast: bool

    def train(self, mode: bool = True) -> Self:
        """Switch as nn.Module does; weights are cast anew, so writes before a switch need not be counted."""
        if mode != self.training and self.reuse_weight_cast:
            expire_casts([cast(Tensor, self.weight)])
        return super().train(mode)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set as nn.Module does; where FSDP2 so puts its shards in place, every forward casts what was gathered."""
        super().__setattr__(name, value)
        if name == "weight" and self.__dict__.get("reuse_weight_cast") and _is_shard(value):
            self.reuse_weight_cast = False
            _say_that_casts_are_not_reused()


def _is_shard(weight: Any) -> bool:
    tensors = sys.modules.get("torch.distributed.tensor")  # FSDP2 has imported it
    return tensors is not None and isinstance(weight, tensors.DTensor)


_said = False


def _say_that_casts_are_not_reused() -> None:
    global _said
    if not _said:
        _said = True
        log.warning(
            "bitplan: FSDP2 shards FP8 layers, so every forward casts their weights, in each micro-batch; call "
            "gather_weights_in_fp8(model) before fully_shard to cast once a step and to gather one byte a number"
        )


Largest = Callable[[Tensor], Tensor]  # int32 [1] of this process -> of the group


def amax_bits(x: Tensor) -> Tensor:
    """The largest magnitude of a matrix as int32 [1]."""
    if x.is_cuda:
        from bitplan.fp8.kernels.amax import partial_amax

        return partial_amax(x.contiguous()).amax().reshape(1)
    largest = x.float().abs().amax() if x.numel() else x.new_zeros((), dtype=torch.float32)
    return largest.view(torch.int32).reshape(1)


def shared_amax_cast(
    x_RC: Tensor,
    fp8: str,
    eps: float,
    largest: Largest,
    *,
    recipe: str = "tensorwise",
    is_weight: bool = False,
    rows: bool = True,
    cols: bool = True,
) -> CastPair:
    """A tensorwise cast by the group's maximum; both layouts have the one scale."""
    padded = x_RC.shape[0] if is_weight else padded_tokens(recipe, x_RC.shape[0])
    if not x_RC.is_cuda:
        amax = float(largest(amax_bits(x_RC)).view(torch.float32))
        least = max(eps, amax) if amax == amax else float("inf")  # NaN or infinite: the scale becomes NaN
        x_RC = pad_rows(x_RC, padded)
        casts = [cast_reference(layout, "tensor", fp8, least) for layout in (x_RC, x_RC.t())]
        return CastPair(casts[0] if rows else None, casts[1] if cols else None)
    from bitplan.fp8.kernels.triton_cast import cast_tiles

    x_RC = x_RC.contiguous()
    of_group = largest(amax_bits(x_RC))
    out, out_t, _ = cast_tiles(x_RC, "tensor", fp8, eps, padded, rows=rows, cols=cols, pieces=of_group)
    return CastPair(out, out_t)
