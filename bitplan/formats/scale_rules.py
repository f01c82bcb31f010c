"""Scales: how a block's scale is stored, and the rules that choose it.

A rule gives each block a `limit`, the magnitude that lands on the element's largest code. The scale is limit / largest
code (`scale_of_limit`); where scales are powers of two (mxfp4, mxfp8) it is OCP's 2^(floor(log2 limit) - floor(log2
largest code)) (`power_of_two_scale`), and the largest numbers of a block may saturate. It is stored in the narrow type
that the format names, and numbers are quantized against the scale *as stored*. A scale below the smallest normal number
(2^-126, or 2^-1022 where scales are float64) is stored as zero and its block as zeros: the reciprocal of anything much
smaller would overflow.

Rules: `absmax` the largest |x| (default) · `absmean` a fixed multiple of mean |x|, best for
Gaussian numbers · `percentile` that quantile of |x| · `mse` the multiple of absmax with the smallest squared error,
weighted by `importance` when activations were observed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SMALLEST_SCALE = 2.0**-126
SMALLEST_SCALE_FLOAT64 = 2.0**-1022
E8M0_BIAS, E8M0_NAN = 127, 255
ScaleRule = Literal["absmax", "absmean", "percentile", "mse"]
SCALE_RULES: tuple[ScaleRule, ...] = ("absmax", "absmean", "percentile", "mse")
# The multiples of absmax that `mse` tries: formats of few codes clip much; power-of-two scales have only neighbours.
MSE_POWERS = (1.0, 2.0, 0.5)
MSE_FINE = tuple(0.98**step for step in range(20))
MSE_DEEP = tuple(0.955**step for step in range(50))


class ScaleStorage:
    """How scales are stored that are kept as an ordinary float type."""

    needs_base = False

    def __init__(self, dtype_name: str) -> None:
        self.dtype_name = dtype_name

    @property
    def dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype_name)
        return dtype

    def store(self, scale: Tensor, base: Tensor | None) -> Tensor:
        return flush_small(scale).to(self.dtype)

    def load(self, stored: Tensor, base: Tensor | None) -> Tensor:
        import torch

        return stored if stored.dtype == torch.float64 else stored.float()


class PowerOfTwoScales(ScaleStorage):
    """E8M0: one byte e, the scale is 2^(e - 127); byte 255 is NaN. `store` takes exact powers of two."""

    def __init__(self) -> None:
        super().__init__("uint8")

    def store(self, scale: Tensor, base: Tensor | None) -> Tensor:
        import torch

        exponent = torch.frexp(scale).exponent - 1 + E8M0_BIAS
        return torch.where(scale > 0, exponent.clamp(0, 254), 0).to(torch.uint8)

    def load(self, stored: Tensor, base: Tensor | None) -> Tensor:
        import torch

        bits = stored.int() << 23  # the exponent field of a float32, except at the two ends
        bits = torch.where(stored == 0, 0x00400000, bits)
        return torch.where(stored == E8M0_NAN, 0x7FC00000, bits).view(torch.float32)


class BasedScales(ScaleStorage):
    """Narrow scales times one float32 `base` per tensor: E4M3 (NVFP4) or linear uint8 (the gpt-oss manifest's)."""

    needs_base = True

    def __init__(self, dtype_name: str, largest: float) -> None:
        super().__init__(dtype_name)
        self.largest = largest

    def base_for(self, largest_scale: Tensor) -> Tensor:
        return flush_small(divided(largest_scale.float(), self.largest))

    def store(self, scale: Tensor, base: Tensor | None) -> Tensor:
        import torch

        assert base is not None
        steps = torch.where(base > 0, scale / base, 0.0).clamp(max=self.largest)
        if self.dtype_name == "uint8":  # a nonzero block keeps a nonzero scale
            steps = torch.where(scale > 0, steps.round().clamp(min=1.0), 0.0)
        return steps.to(self.dtype)

    def load(self, stored: Tensor, base: Tensor | None) -> Tensor:
        assert base is not None
        return flush_small(stored.float() * base)


def divided(x: Tensor, number: float) -> Tensor:
    """Divide a tensor by a number, rounded once on every device: CUDA would multiply by the rounded reciprocal."""
    import torch

    return x / torch.full((), number, dtype=x.dtype, device=x.device)


def power_of_two_scale(limit: Tensor, largest_code: float) -> Tensor:
    """OCP Microscaling's rule: 2^(floor(log2 limit) - floor(log2 largest code)); ggml's own is `GgufMxfp4`'s."""
    import torch

    exponent = torch.frexp(limit).exponent - math.frexp(largest_code)[1]
    return torch.where(limit > 0, torch.ldexp(torch.ones_like(limit), exponent), 0.0)


def scale_of_limit(limit: Tensor, largest_code: float) -> Tensor:
    """The scale limit / largest_code; one step smaller if it was rounded up and a number would be infinite."""
    import torch

    scale = divided(limit, largest_code)
    overflows = limit.isfinite() & (scale * largest_code).isinf()
    return torch.where(overflows, scale.nextafter(torch.zeros_like(scale)), scale)


def flush_small(scale: Tensor) -> Tensor:
    """Zero for scales whose reciprocal would overflow, keeping the sign of the rest."""
    import torch

    smallest = SMALLEST_SCALE_FLOAT64 if scale.dtype == torch.float64 else SMALLEST_SCALE
    return torch.where(scale.abs() < smallest, torch.zeros_like(scale), scale)


def reciprocal(scale: Tensor) -> Tensor:
    """The reciprocal of a scale, and 0 for a zero scale, so that a zero block's codes are zero."""
    import torch

    return torch.where(scale == 0, 0.0, 1.0 / scale)


def limit_of_blocks(blocks: Tensor, rule: ScaleRule, *, gauss: float | None, percentile: float) -> Tensor:
    """Give the limit of each block, [B], for [B, g] numbers, by any rule but `mse`, which starts from absmax."""
    import torch

    if blocks.shape[-1] == 0:
        return blocks.new_zeros(blocks.shape[0])
    if rule == "absmean":
        assert gauss is not None
        wide = torch.promote_types(blocks.dtype, torch.float32)  # the mean of 16-bit numbers needs more bits
        return (blocks.abs().mean(dim=-1, dtype=torch.float64) * gauss).to(wide)
    if rule == "percentile":
        share = round(percentile / 100 * blocks.shape[-1], 6)  # 99.9 % of 1000 is 999, not 999.0000000000001
        return blocks.abs().kthvalue(max(1, math.ceil(share)), dim=-1).values
    low, high = torch.aminmax(blocks, dim=-1)
    return torch.maximum(high, -low).abs()
