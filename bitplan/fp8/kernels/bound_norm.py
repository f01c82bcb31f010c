"""A norm with its tensorwise cast, and the norm's gradient, of one shape and with little work for the host.

They launch the kernels of `triton_norm` and `triton_cast` with addresses alone, on the current device. Kernels must
have been launched before, by `norm_and_cast` and `norm_gradient`: before that there is nothing to bind, and the result
is None. A norm's bias has the type of its weight. The caller ensures that all addresses are multiples of 16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bitplan.base.loops.launch import empty_on_gpu, index_of
from bitplan.formats.triton_numbers import float_name
from bitplan.fp8.casts import FP8_DTYPES
from bitplan.fp8.kernels.triton_cast import plan_cast
from bitplan.fp8.kernels.triton_norm import plan_norm, plan_sum

# (stream, addresses of x, of the norm's weight and bias) -> codes, of the transpose, their scale, 1 / deviation, mean
NormCast = Callable[[int, int, int, int], tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor | None]]
# (stream, addresses of dy, x, the weight, 1 / deviation and mean) -> dx, the weight's gradient, the bias's
NormGradient = Callable[[int, int, int, int, int, int], tuple[Tensor, Tensor, Tensor | None]]


def bind_norm_cast(
    shape: Sequence[int],
    types: tuple[torch.dtype, torch.dtype],
    norm: tuple[str, float],
    eps: float,
    *,
    has_bias: bool,
    cols: bool,
    device: torch.device,
) -> NormCast | None:
    """`types`: of x and of the norm's weight. `norm`: kind and epsilon. Rows are not padded."""
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


def bind_norm_gradient(
    shape: Sequence[int],
    types: tuple[torch.dtype, torch.dtype, torch.dtype],
    kind: str,
    device: torch.device,
    *,
    has_bias: bool,
) -> NormGradient | None:
    """`types`: of dy, x and the norm's weight."""
    of_grad, of_x, of_weight = types
    rows, width = shape
    named = (("SOURCE", of_x), ("GRAD", of_grad), ("WEIGHT", of_weight))
    programs, find = plan_norm((rows, width), kind, named, (("HAS_BIAS", has_bias),))
    gradient = find.bind(index_of(device)) if find is not None else None
    matrices = 2 if has_bias else 1
    plan = plan_sum(programs, width, matrices, float_name(of_weight))
    add = plan.bind(index_of(device)) if gradient is not None else None
    if gradient is None or add is None:
        return None

    def run(stream: int, dy: int, x: int, weight: int, rstd: int, mean: int) -> tuple[Tensor, Tensor, Tensor | None]:
        dx = empty_on_gpu((rows, width), (width, 1), of_x)
        sums = empty_on_gpu((matrices * programs, width), (width, 1), torch.float32)
        total = empty_on_gpu((matrices, width), (width, 1), of_weight)
        at_sums = sums.data_ptr()
        gradient(stream, dy, x, weight, rstd, mean, dx.data_ptr(), at_sums)
        add(stream, at_sums, total.data_ptr())
        return dx, total[0], total[1] if has_bias else None

    return run
