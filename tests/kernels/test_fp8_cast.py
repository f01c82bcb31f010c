"""FP8 casts by Triton against the reference, bit for bit: codes, scales, and how the scales lie."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from bitplan.errors import FormatError
from bitplan.formats.fp8_scaling import ScaledFp8
from bitplan.kernels.fp8_cast import cast_layouts
from bitplan.kernels.triton_fp8_cast import CastLaunch

RECIPES = ["tensorwise", "rowwise", "blockwise", "mxfp8"]
HARD = [0.0, -0.0, 1e-40, -3e-39, 2.0**-126, 6e4, -1.17e-7, 448.0, 464.0, 0.0625 * 17]


def numbers(rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Numbers of every size, with subnormals, zeros, ties and a row and a column of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator) * torch.exp(3 * torch.randn(rows, cols, generator=generator))
    x.flatten()[: len(HARD)] = torch.tensor(HARD)
    x[rows // 2] = 0
    x[:, cols // 2] = 0
    return x.to(dtype)


def assert_same(found: ScaledFp8 | None, expected: ScaledFp8 | None) -> None:
    assert found is not None
    assert expected is not None
    assert found.scaling == expected.scaling
    assert torch.equal(found.codes.view(torch.uint8).cpu(), expected.codes.view(torch.uint8))
    assert found.scale.shape == expected.scale.shape
    assert found.scale.stride() == expected.scale.stride() or not found.scale.numel()
    assert torch.equal(found.scale.cpu().nan_to_num(-1), expected.scale.nan_to_num(-1))


def both(x: torch.Tensor, device: torch.device, recipe: str, **arguments) -> None:
    found = cast_layouts(x.to(device), recipe, impl="triton", **arguments)
    arguments.pop("launch", None)
    expected = cast_layouts(x, recipe, impl="reference", **arguments)
    for name in ("rows", "cols"):
        if arguments.get(name, True):
            assert_same(getattr(found, name), getattr(expected, name))
        else:
            assert getattr(found, name) is None


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
@pytest.mark.parametrize(("rows", "cols"), [(1, 128), (5, 384), (130, 256)])
def test_triton_matches_reference(recipe, fp8, rows, cols, device) -> None:
    both(numbers(rows, cols, torch.bfloat16), device, recipe, fp8=fp8)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types_match_too(recipe, dtype, device) -> None:
    x = numbers(33, 256, torch.float32)
    if dtype == torch.float16:
        x = x.clamp(-6e4, 6e4)
    both(x.to(dtype), device, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_match(recipe, device) -> None:
    both(numbers(256, 384, torch.bfloat16), device, recipe, is_weight=True, eps=1e-3)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_widths_that_are_no_multiple_of_a_tile(recipe, device) -> None:
    both(numbers(200, 144, torch.bfloat16), device, recipe)
    both(numbers(48, 176, torch.bfloat16), device, recipe, is_weight=True)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_matches(recipe, bad, device) -> None:
    x = numbers(40, 256, torch.bfloat16)
    x[3, 200] = bad
    both(x, device, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("only", ["rows", "cols"])
def test_only_the_layout_asked_for_is_made(recipe, only, device) -> None:
    both(numbers(20, 128, torch.bfloat16), device, recipe, rows=only == "rows", cols=only == "cols")


@pytest.mark.parametrize("recipe", RECIPES)
def test_zeros_and_epsilon_match(recipe, device) -> None:
    both(torch.zeros(17, 128, dtype=torch.bfloat16), device, recipe)
    both(torch.zeros(17, 128, dtype=torch.bfloat16), device, recipe, eps=1e-12)
    both(torch.zeros(0, 128, dtype=torch.bfloat16), device, recipe)


def test_strides_are_not_assumed(device) -> None:
    x = numbers(256, 40, torch.bfloat16)
    both(x.t(), device, "blockwise")


@pytest.mark.parametrize(
    "launch", [CastLaunch(64, 128, 4, 7, 512, 4), CastLaunch(32, 256, 4), CastLaunch(128, 64, 8, 3, 256)]
)
def test_every_launch_gives_the_same(launch, device) -> None:
    both(numbers(150, 256, torch.bfloat16), device, "tensorwise", launch=launch)
    both(numbers(150, 256, torch.bfloat16), device, "rowwise", launch=launch)


def test_refusals() -> None:
    with pytest.raises(FormatError, match="impl must be"):
        cast_layouts(torch.zeros(16, 128), "tensorwise", impl="cuda")
    with pytest.raises(FormatError, match="whole blocks of 128x128"):
        cast_layouts(torch.zeros(100, 128), "blockwise", is_weight=True)
    with pytest.raises(FormatError, match="whole blocks of 1x32"):
        cast_layouts(torch.zeros(16, 40), "mxfp8", impl="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_large_matrices_match_on_the_gpu(recipe, device) -> None:
    both(numbers(1030, 4096, torch.bfloat16), device, recipe)
    both(numbers(1024, 2048, torch.bfloat16), device, recipe, is_weight=True)
