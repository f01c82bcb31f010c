"""Products of scaled FP8 operands: out [M, N] = a [M, K] times b [N, K] transposed, each times its scales.

Ways to compute it, `impl`:

    "emulate"  decoded to float32, multiplied in float32, rounded once to the output's type: what a CPU does
    "cublas"   torch's scaled matrix product, for every recipe; "1x128" with "128x128" or "1x128" needs compute
               capability 9.0, "1x32" 10.0
    "triton"   our kernel, for "1x128" with either: sums of a block in the tensor cores, scaled and added in float32
    "auto"     emulate on a CPU; on a GPU cublas where it takes the operands, else triton

Every product of a layer has this one form, because a cast writes the layout that it needs. The tensor cores add FP8
products with about 14 bits; with `fast_accum` the running sum stays there over all of K, without it the sum moves to
float32 every few steps (see `fp8.layer_settings`). Block scaled products always move the sum, at each block.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import torch
from torch import Tensor

from bitplan.base.errors import FormatError
from bitplan.fp8.casts import ScaledFp8, decode_scaled
from bitplan.fp8.recipes import BLOCK, MX_BLOCK, PRODUCT_PAIRS

PRODUCT_IMPLEMENTATIONS = ("auto", "emulate", "cublas", "triton")


def scaled_product(
    a_MK: ScaledFp8,
    b_NK: ScaledFp8,
    out_dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    fast_accum: bool = True,
    impl: str = "auto",
) -> Tensor:
    """Compute a times b transposed, [M, N], plus bias [N]."""
    (rows, width), (cols, other_width) = a_MK.codes.shape, b_NK.codes.shape
    if width != other_width or (a_MK.scaling, b_NK.scaling) not in PRODUCT_PAIRS or impl not in PRODUCT_IMPLEMENTATIONS:
        _refuse(a_MK, b_NK, impl)
    if not rows or not cols or not width:
        out = torch.zeros((rows, cols), dtype=out_dtype, device=a_MK.codes.device)
        return out if bias is None else out + bias.to(out_dtype)
    if impl == "auto":
        impl = pick_product(a_MK, b_NK)
    if impl == "emulate":
        return _emulated(a_MK, b_NK, out_dtype, bias)
    if impl == "triton":
        from bitplan.fp8.kernels.triton_product import block_scaled_product

        return block_scaled_product(a_MK, b_NK, out_dtype, bias)
    return _by_torch(a_MK, b_NK, out_dtype, bias, fast_accum)


def _refuse(a_MK: ScaledFp8, b_NK: ScaledFp8, impl: str) -> NoReturn:
    if impl not in PRODUCT_IMPLEMENTATIONS:
        raise FormatError(f"impl must be one of {', '.join(PRODUCT_IMPLEMENTATIONS)}, got {impl!r}")
    if a_MK.shape[1] != b_NK.shape[1]:
        raise FormatError(f"a product sums along the same length, got {a_MK.shape} and {b_NK.shape}")
    raise FormatError(
        f"no product of scalings {a_MK.scaling} and {b_NK.scaling}; there are "
        f"{', '.join(' with '.join(pair) for pair in sorted(PRODUCT_PAIRS))}"
    )


def pick_product(a_MK: ScaledFp8, b_NK: ScaledFp8) -> str:
    """The implementation that impl="auto" stands for with these operands."""
    if not a_MK.codes.is_cuda:
        return "emulate"
    if a_MK.scaling != "1x128":
        return "cublas"
    hopper = capability_of(a_MK.codes.device)[0] == 9
    # The library's block scaled product takes E4M3 alone, on Hopper alone.
    return "cublas" if hopper and a_MK.fp8 == b_NK.fp8 == "e4m3" else "triton"


@functools.cache
def capability_of(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _emulated(a_MK: ScaledFp8, b_NK: ScaledFp8, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    with torch.autocast(a_MK.codes.device.type, enabled=False):
        out = decode_scaled(a_MK) @ decode_scaled(b_NK).t()
    if bias is not None:
        out += bias.float()
    return out.to(out_dtype)


def _by_torch(
    a_MK: ScaledFp8, b_NK: ScaledFp8, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool
) -> Tensor:
    """The library adds a bias of the output's type to 16-bit outputs of tensor scales; else it is added here.

    Row scaled and block scaled products give bfloat16 only; other types are cast afterwards.
    """
    scaling, b_KN = a_MK.scaling, b_NK.turned
    if scaling == "tensor":
        inside = None
        if bias is not None and out_dtype != torch.float32 and bias.dtype == out_dtype:
            inside, bias = bias, None
        out = torch._scaled_mm(a_MK.codes, b_KN, a_MK.scale, b_NK.scale, inside, None, out_dtype, fast_accum)
        return out if bias is None else out + bias.to(out_dtype)
    if scaling == "row":
        scale_b = b_NK.scale.t()
        out = torch._scaled_mm(a_MK.codes, b_KN, a_MK.scale, scale_b, None, None, torch.bfloat16, fast_accum)
    else:
        out = _by_blocks(a_MK, b_NK, b_KN)
    if out.dtype != out_dtype:
        out = out.to(out_dtype)
    return out if bias is None else out + bias.to(out_dtype)


def _by_blocks(a_MK: ScaledFp8, b_NK: ScaledFp8, b_KN: Tensor) -> Tensor:
    functional: Any = torch.nn.functional
    kinds = {"1x128": "BlockWise1x128", "128x128": "BlockWise128x128", "1x32": "BlockWise1x32"}
    mx = a_MK.scaling == "1x32"
    swizzle = functional.SwizzleType.SWIZZLE_32_4_4 if mx else None
    out: Tensor = functional.scaled_mm(
        a_MK.codes,
        b_KN,
        swizzle_scale(a_MK.scale) if mx else a_MK.scale,
        getattr(functional.ScalingType, kinds[a_MK.scaling]),
        swizzle_scale(b_NK.scale) if mx else _square_scale(b_NK),
        getattr(functional.ScalingType, kinds[b_NK.scaling]),
        swizzle,
        swizzle,
        output_dtype=torch.bfloat16,
    )
    return out


def _square_scale(b_NK: ScaledFp8) -> Tensor:
    """Scales of 128x128 squares as torch's product takes them: [K / 128 padded to fours, N / 128], column-major."""
    if b_NK.scaling != "128x128":
        return b_NK.scale
    down, across = b_NK.scale.shape
    padded = -(-across // 4) * 4
    return b_NK.scale.as_strided((padded, down), (1, padded))


def swizzle_scale(scale_RG: Tensor) -> Tensor:
    """E8M0 scales as the tensor cores of Blackwell read them: tiles of 128 rows by 4, rows 32 apart side by side."""
    rows, groups = scale_RG.shape
    tall, wide = -(-rows // BLOCK), -(-groups // 4)
    padded = torch.nn.functional.pad(scale_RG, (0, wide * 4 - groups, 0, tall * BLOCK - rows))
    tiles = padded.view(tall, 4, MX_BLOCK, wide, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(torch.float8_e8m0fnu)
