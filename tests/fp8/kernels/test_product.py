"""Products of scaled FP8 operands: each implementation against float64 of the decoded operands."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from bitplan.base.errors import FormatError
from bitplan.fp8.casts import decode_scaled
from bitplan.fp8.kernels.cast import cast_layouts
from bitplan.fp8.kernels.product import scaled_product, swizzle_scale
from bitplan.fp8.kernels.triton_product import ProductLaunch, block_scaled_product
from tests.crosses import few


def operands(recipe, device, rows=48, cols=256, width=384, fp8="e4m3", is_weight=True):
    generator = torch.Generator().manual_seed(rows + cols)
    a = torch.randn(rows, width, generator=generator).to(device, torch.bfloat16)
    b = torch.randn(cols, width, generator=generator).to(device, torch.bfloat16)
    a_cast = cast_layouts(a, recipe, fp8, cols=False).rows
    b_cast = cast_layouts(b, recipe, is_weight=is_weight, cols=False).rows
    assert a_cast is not None
    assert b_cast is not None
    return a_cast, b_cast


def relative_error(result, a, b, bias=None) -> float:
    expected = decode_scaled(a, torch.float64) @ decode_scaled(b, torch.float64).t()
    if bias is not None:
        expected += bias.double()
    return float((result.double() - expected).norm() / expected.norm())


@pytest.mark.cross("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
@pytest.mark.cross(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-3)])
def test_the_emulation_is_the_product_of_the_decoded(recipe, dtype, bound) -> None:
    a, b = operands(recipe, "cpu", fp8="e5m2")
    bias = torch.randn(b.shape[0], generator=torch.Generator().manual_seed(1))
    result = scaled_product(a, b, dtype, bias=bias)
    assert result.dtype == dtype
    assert relative_error(result, a, b, bias) < bound


@pytest.mark.cross(("fp8", "is_weight"), few([("e4m3", True), ("e4m3", False), ("e5m2", True), ("e5m2", False)], 2))
@pytest.mark.cross(("rows", "cols"), [(5, 128), (66, 256)])
def test_the_block_kernel_is_the_product_of_the_decoded(fp8, is_weight, rows, cols, device) -> None:
    a, b = operands("blockwise", device, rows, cols, fp8=fp8, is_weight=is_weight)
    bias = torch.randn(b.shape[0], generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    bounds = {torch.float32: 1e-6 if device.type == "cpu" else 2e-3, torch.bfloat16: 4e-3}
    for dtype, bound in list(bounds.items())[: 1 if rows > 5 else 2]:  # an interpreter takes long
        assert relative_error(scaled_product(a, b, dtype, bias=bias, impl="triton"), a, b, bias) < bound


def test_launches_of_the_block_kernel_agree(device) -> None:
    a, b = operands("blockwise", device, 200, 256, 128)
    for launch in (ProductLaunch(128, 64, 4, 2, 2), ProductLaunch(64, 128, 4, 3, 1)):
        assert relative_error(block_scaled_product(a, b, torch.float32, launch=launch), a, b) < 2e-3


def test_nan_is_seen(device) -> None:
    x = torch.ones(128, 256, dtype=torch.bfloat16, device=device)
    x[3, 200] = torch.nan
    a = cast_layouts(x, "blockwise", cols=False).rows
    b = cast_layouts(torch.ones_like(x), "blockwise", is_weight=True, cols=False).rows
    for impl in ("auto", "triton"):
        result = scaled_product(a, b, torch.float32, impl=impl)
        assert result[3].isnan().all()
        assert not result[:3].isnan().any()


def test_nothing_times_something_is_the_bias() -> None:
    a, b = operands("tensorwise", "cpu", rows=0)
    bias = torch.randn(b.shape[0])
    assert scaled_product(a, b, torch.float32, bias=bias).shape == (0, 256)


def test_refusals() -> None:
    a, _ = operands("tensorwise", "cpu")
    _, b = operands("rowwise", "cpu")
    with pytest.raises(FormatError, match="no product of scalings tensor and row"):
        scaled_product(a, b, torch.float32)
    with pytest.raises(FormatError, match="impl must be"):
        scaled_product(a, a, torch.float32, impl="magic")
    with pytest.raises(FormatError, match="the block scaled kernel takes 1x128"):
        scaled_product(a, a, torch.float32, impl="triton")


def test_swizzled_scales_lie_as_blackwell_reads_them() -> None:
    """Row r, group g of a tile is byte (r % 32) * 16 + (r // 32) * 4 + g."""
    scale = (torch.arange(130 * 6) % 251).to(torch.uint8).view(130, 6)
    flat = swizzle_scale(scale).view(torch.uint8).view(2, 2, 512)
    for row, group in ((0, 0), (33, 2), (127, 3), (129, 5), (64, 4)):
        place = row % 32 * 16 + row % 128 // 32 * 4 + group % 4
        assert flat[row // 128, group // 4, place] == scale[row, group]


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
@pytest.mark.parametrize("is_weight", [True, False])
def test_the_library_agrees_on_the_gpu(recipe, fp8, is_weight, device) -> None:
    a, b = operands(recipe, device, 513, 1024, 2048, fp8=fp8, is_weight=is_weight)
    for fast, bound in ((True, 2e-2), (False, 4e-3)):
        assert relative_error(scaled_product(a, b, torch.bfloat16, fast_accum=fast), a, b) < bound
    if recipe == "tensorwise":
        assert relative_error(scaled_product(a, b, torch.float32, fast_accum=False), a, b) < 2e-3
