"""FP8 casts by Triton against the reference, bit for bit: codes, scales, and how the scales lie.

Two kernels cast bfloat16: "pairs" reads it as words of two numbers, "tiles" is for all else, and for what does not
begin at a multiple of 16 bytes, which is how it is reached here.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from bitplan.base.errors import FormatError
from bitplan.fp8.casts import ScaledFp8, cast_reference
from bitplan.fp8.kernels import triton_cast
from bitplan.fp8.kernels.amax import partial_amax
from bitplan.fp8.kernels.cast import cast_layouts
from bitplan.fp8.kernels.triton_cast import CastLaunch, cast_tiles
from bitplan.fp8.kernels.triton_norm import Norm
from tests.crosses import few

RECIPES = ["tensorwise", "rowwise", "blockwise", "mxfp8"]
KERNELS = ["pairs", "tiles"]
BY_KERNEL = [(recipe, kernel) for recipe in RECIPES for kernel in KERNELS if (recipe, kernel) != ("mxfp8", "pairs")]
HARD = [0.0, -0.0, 1e-40, -3e-39, 2.0**-126, 6e4, -1.17e-7, 448.0, 464.0, 0.0625 * 17]


def numbers(rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Numbers of every size, with subnormals, zeros, ties and a row and a column of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator) * torch.exp(3 * torch.randn(rows, cols, generator=generator))
    x[: min(rows, 4), : min(cols, 64)] *= 1e-38
    x.flatten()[: len(HARD)] = torch.tensor(HARD)
    x[rows // 2] = 0
    x[:, cols // 2] = 0
    return x.to(dtype)


def for_kernel(x: torch.Tensor, kernel: str) -> torch.Tensor:
    """The same numbers where that kernel casts them."""
    if kernel == "pairs":
        return x.contiguous()
    return torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x)


def assert_same(result: ScaledFp8 | None, expected: ScaledFp8 | None) -> None:
    assert result is not None
    assert expected is not None
    assert result.scaling == expected.scaling
    assert torch.equal(result.codes.view(torch.uint8).cpu(), expected.codes.view(torch.uint8))
    assert result.scale.shape == expected.scale.shape
    assert result.scale.stride() == expected.scale.stride() or not result.scale.numel()
    assert torch.equal(result.scale.cpu().nan_to_num(-1), expected.scale.nan_to_num(-1))


def both(x: torch.Tensor, device: torch.device, recipe: str, kernel: str = "pairs", **arguments) -> None:
    result = cast_layouts(for_kernel(x.to(device), kernel), recipe, impl="triton", **arguments)
    arguments.pop("launch", None)
    expected = cast_layouts(x, recipe, impl="reference", **arguments)
    for name in ("rows", "cols"):
        if arguments.get(name, True):
            assert_same(getattr(result, name), getattr(expected, name))
        else:
            assert getattr(result, name) is None


@pytest.mark.cross(("recipe", "kernel"), BY_KERNEL)
@pytest.mark.cross(("rows", "cols", "fp8"), [(1, 128, "e4m3"), (5, 256, "e5m2"), (130, 256, "e4m3")])
def test_triton_matches_reference(recipe, kernel, fp8, rows, cols, device) -> None:
    both(numbers(rows, cols, torch.bfloat16), device, recipe, kernel, fp8=fp8)


@pytest.mark.cross("recipe", RECIPES)
@pytest.mark.cross("dtype", [torch.float32, torch.float16])
def test_other_types_match_too(recipe, dtype, device) -> None:
    x = numbers(33, 256, torch.float32)
    if dtype == torch.float16:
        x = x.clamp(-6e4, 6e4)
    both(x.to(dtype), device, recipe)


@pytest.mark.parametrize(("recipe", "kernel"), few(BY_KERNEL, 4))
def test_weights_match(recipe, kernel, device) -> None:
    shape = (128, 256) if recipe == "blockwise" else (32, 160)
    both(numbers(*shape, torch.bfloat16), device, recipe, kernel, is_weight=True, eps=1e-3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_of_float32_match(recipe, device) -> None:
    both(numbers(128 if recipe == "blockwise" else 32, 128, torch.float32), device, recipe, is_weight=True)


@pytest.mark.cross("recipe", ["tensorwise", "rowwise"])
@pytest.mark.cross(("rows", "cols"), few([(70, 144), (48, 176), (33, 50), (7, 48)], 2))
def test_widths_that_are_no_multiple_of_a_tile(recipe, rows, cols, device) -> None:
    both(numbers(rows, cols, torch.bfloat16), device, recipe)
    both(numbers(rows, cols, torch.bfloat16), device, recipe, is_weight=True)


@pytest.mark.cross(("recipe", "kernel"), BY_KERNEL)
@pytest.mark.cross("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_matches(recipe, kernel, bad, device) -> None:
    x = numbers(20, 128, torch.bfloat16)
    x[3, 100] = bad
    both(x, device, recipe, kernel)


@pytest.mark.cross(("recipe", "kernel"), BY_KERNEL)
@pytest.mark.cross("only", ["rows", "cols"])
def test_only_the_layout_asked_for_is_made(recipe, kernel, only, device) -> None:
    asked = {"rows": only == "rows", "cols": only == "cols"}
    both(numbers(20, 128, torch.bfloat16), device, recipe, kernel, **asked)
    if recipe == "blockwise":
        both(numbers(128, 128, torch.bfloat16), device, recipe, kernel, is_weight=True, **asked)


@pytest.mark.parametrize(("recipe", "kernel"), few(BY_KERNEL, 4))
def test_zeros_and_epsilon_match(recipe, kernel, device) -> None:
    both(torch.zeros(17, 128, dtype=torch.bfloat16), device, recipe, kernel)
    both(torch.zeros(17, 128, dtype=torch.bfloat16), device, recipe, kernel, eps=1e-12)
    both(torch.zeros(0, 128, dtype=torch.bfloat16), device, recipe, kernel)


@pytest.mark.parametrize(("recipe", "kernel"), BY_KERNEL)
def test_subnormal_groups_match(recipe, kernel, device) -> None:
    both((numbers(9, 128, torch.float32) * 1e-42).bfloat16(), device, recipe, kernel)


def test_strides_are_not_assumed(device) -> None:
    x = numbers(256, 40, torch.bfloat16)
    both(x.t(), device, "blockwise")


@pytest.mark.cross(
    "launch", [CastLaunch(64, 128, 4, 7, 512, 4, 8), CastLaunch(32, 256, 4), CastLaunch(128, 64, 8, 3, 256)]
)
@pytest.mark.cross("kernel", KERNELS)
@pytest.mark.cross("recipe", ["tensorwise", "rowwise"])
def test_every_launch_gives_the_same(launch, kernel, recipe, device) -> None:
    both(numbers(70, 144, torch.bfloat16), device, recipe, kernel, launch=launch)


def test_strips_of_rows_and_columns_are_put_together(device) -> None:
    """More columns than a strip has, and more rows than a program reads at once."""
    both(numbers(12, 1040, torch.bfloat16), device, "rowwise")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_maxima_that_are_known_decide_the_scale(dtype, device) -> None:
    x = numbers(20, 48, dtype)
    pieces = torch.tensor([3.0, 7e6, 0.0]).view(torch.int32).to(device)
    rows, cols, _ = cast_tiles(x.to(device), "tensor", "e4m3", 0.0, 20, rows=True, cols=True, pieces=pieces)
    assert_same(rows, cast_reference(x, "tensor", "e4m3", 7e6))
    assert_same(cols, cast_reference(x.t(), "tensor", "e4m3", 7e6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bad", [None, torch.inf, torch.nan])
def test_maxima_of_pieces(dtype, bad, device) -> None:
    for size in (1, 16, 1000, 5008):
        x = torch.randn(1, size, generator=torch.Generator().manual_seed(size)).to(dtype)
        if bad is not None:
            x[0, size - 1] = bad
        result = partial_amax(x.to(device), 7, 256, 4)
        assert 1 <= result.numel() <= 7
        largest = result.max().cpu().view(torch.float32)
        assert torch.equal(largest.nan_to_num(-1, posinf=-2), x.float().abs().max().nan_to_num(-1, posinf=-2))


@pytest.mark.parametrize(
    ("kernel", "dtype", "scaling", "shape"),
    [
        ("pairs", torch.bfloat16, "tensor", (16, 48)),
        ("pairs", torch.bfloat16, "row", (16, 48)),
        ("pairs", torch.bfloat16, "1x128", (128, 128)),
        ("pairs", torch.bfloat16, "128x128", (128, 128)),
        ("numbers", torch.bfloat16, "1x32", (32, 128)),
        ("numbers", torch.bfloat16, "tensor", (16, 40)),
        ("numbers", torch.bfloat16, "row", (24, 48)),
        ("numbers", torch.float16, "tensor", (16, 48)),
        ("numbers", torch.float32, "1x128", (128, 128)),
    ],
)
def test_which_kernel_casts(kernel, dtype, scaling, shape, device, monkeypatch) -> None:
    prepared, real = [], triton_cast.PreparedLaunch
    watched = lambda kernel, *a, **k: prepared.append(kernel) or real(kernel, *a, **k)
    monkeypatch.setattr(triton_cast, "PreparedLaunch", watched)
    triton_cast.plan_cast.cache_clear()
    x = numbers(*shape, dtype).to(device)
    for _ in range(2):  # the second time there is a plan
        cast_tiles(x, scaling, "e4m3", 0.0, shape[0], rows=True, cols=True)
    assert prepared == [getattr(triton_cast, f"cast_{kernel}")]


def test_refusals(device) -> None:
    with pytest.raises(FormatError, match="impl must be"):
        cast_layouts(torch.zeros(16, 128), "tensorwise", impl="cuda")
    with pytest.raises(FormatError, match="whole blocks of 128x128"):
        cast_layouts(torch.zeros(100, 128), "blockwise", is_weight=True)
    with pytest.raises(FormatError, match="whole blocks of 128x128"):
        cast_layouts(torch.zeros(100, 128), "blockwise", is_weight=True, impl="triton")
    with pytest.raises(FormatError, match="whole blocks of 1x128"):
        cast_tiles(torch.zeros(100, 128), "1x128", "e4m3", 0.0, 100, rows=False, cols=True)
    with pytest.raises(FormatError, match="whole blocks of 1x32"):
        cast_layouts(torch.zeros(16, 40), "mxfp8", impl="triton")
    x = torch.zeros(16, 16, device=device)
    norm = Norm("rms", None, x[0], x[0], None)
    with pytest.raises(FormatError, match="maxima of the normalised matrix"):
        cast_tiles(x, "tensor", "e4m3", 0.0, 16, rows=True, cols=True, norm=norm)


@pytest.mark.gpu
@pytest.mark.parametrize(("recipe", "kernel"), BY_KERNEL)
def test_large_matrices_match_on_the_gpu(recipe, kernel, device) -> None:
    both(numbers(1030, 4096, torch.bfloat16), device, recipe, kernel)
    both(numbers(1024, 2048, torch.bfloat16), device, recipe, kernel, is_weight=True)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_large_matrices_of_other_types_match_on_the_gpu(recipe, dtype, device) -> None:
    both(numbers(1030, 4096, torch.float32).clamp(-6e4, 6e4).to(dtype), device, recipe)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
def test_every_magnitude_of_bfloat16_matches_on_the_gpu(recipe, fp8, device) -> None:
    """Row r has the bfloat16 of bits r as its largest magnitude: every scale, its inverse, and codes by it."""
    generator = torch.Generator().manual_seed(5)
    largest = torch.arange(0x8000, dtype=torch.int32)[:, None].expand(-1, 128)
    smaller = torch.randint(0, 0x8000, (0x8000, 128), generator=generator) % (largest + 1)
    bits = torch.where(torch.rand(0x8000, 128, generator=generator) < 0.5, largest, smaller)
    bits[:, 5] = largest[:, 5]
    bits[:, 6] |= 0x8000
    both(bits.to(torch.int16).view(torch.bfloat16), device, recipe, fp8=fp8)
