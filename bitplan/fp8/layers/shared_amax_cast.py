"""A tensorwise cast whose scale is by the largest number of several processes, each of which has a part of the tensor.

Maxima are compared as integers, which have the order of the magnitudes (NaN above infinity). Nothing waits for the host
on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bitplan.fp8.casts import CastPair, cast_reference, pad_rows, padded_tokens

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
        made = [cast_reference(layout, "tensor", fp8, least) for layout in (x_RC, x_RC.t())]
        return CastPair(made[0] if rows else None, made[1] if cols else None)
    from bitplan.fp8.kernels.triton_cast import cast_tiles

    x_RC = x_RC.contiguous()
    of_group = largest(amax_bits(x_RC))
    out, out_t, _ = cast_tiles(x_RC, "tensor", fp8, eps, padded, rows=rows, cols=cols, pieces=of_group)
    return CastPair(out, out_t)
