"""Finishes the sums of the fused products: adds up the parts of a split, scales, adds the bias."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def is_last_of_split(acc, partial_ptr, counter_ptr, split, size, at, ok, SPLIT: tl.constexpr):
    """Leave this program's sum for the others; true for the last of them to come, which sets the counter back."""
    tl.store(partial_ptr + split * size + at, acc, mask=ok)
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == SPLIT - 1
    if is_last:
        tl.store(counter_ptr, 0)
    return is_last


@triton.jit
def sum_of_split(partial_ptr, size, at, ok, SPLIT: tl.constexpr):
    """What all programs of a tile left, added in order: the result does not depend on who came last."""
    total = tl.load(partial_ptr + at, mask=ok, other=0.0, cache_modifier=".cg")
    for other in tl.static_range(1, SPLIT):
        total += tl.load(partial_ptr + other * size + at, mask=ok, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def scaled_with_bias(
    acc,
    scales_ptr,
    factor_ptr,
    bias_ptr,
    row,
    GROUP: tl.constexpr,
    FACTORS: tl.constexpr,
    BIAS: tl.constexpr,
):
    """[outputs, rows] sums times their row's scale (or a factor, the tensor's or the row's), plus their bias."""
    if GROUP == 0:
        acc *= tl.load(scales_ptr + row)[:, None]
    elif FACTORS:
        acc *= tl.load(factor_ptr + row)[:, None]
    else:
        acc *= tl.load(factor_ptr)
    if BIAS != "none":
        bias = tl.load(bias_ptr + row)
        if BIAS == "bf16":
            bias = (bias.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        acc += bias[:, None]
    return acc
