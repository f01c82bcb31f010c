"""Recipes, epsilons, choices and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bitplan.base.errors import FormatError
from bitplan.fp8 import layer_settings
from bitplan.fp8.casts import cast_reference, decode_scaled
from bitplan.fp8.layer_settings import (
    AmaxEps,
    Fp8LayerError,
    Fp8Recipe,
    Fp8UnavailableError,
    GemmChoice,
    check_shape,
    require_fp8,
)
from bitplan.fp8.layers.grouped_linear import GroupedLinear
from bitplan.fp8.layers.linear import Fp8Linear
from bitplan.fp8.recipes import PRODUCT_PAIRS, RECIPES, SCALINGS, Recipe, ScaleBlock, register_recipe


def test_epsilons_come_from_the_variables() -> None:
    environment = {
        "FP8_QUANT_FWD_INP_AMAX_EPS": "1e-12",
        "FP8_QUANT_FWD_WEIGHT_AMAX_EPS": " 2e-12 ",
        "FP8_QUANT_BWD_GRAD_AMAX_EPS": "",
        "OTHER": "x",
    }
    assert AmaxEps.from_environment(environment) == AmaxEps(input=1e-12, weight=2e-12, grad=0.0)
    assert AmaxEps.from_environment({}) == AmaxEps()


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "small"])
def test_an_epsilon_that_is_none_is_refused(text) -> None:
    with pytest.raises(Fp8LayerError, match=f"FP8_QUANT_BWD_GRAD_AMAX_EPS must be a number from 0.*'{text}'"):
        AmaxEps.from_environment({"FP8_QUANT_BWD_GRAD_AMAX_EPS": text})


def test_wrong_values_are_refused_by_name() -> None:
    with pytest.raises(Fp8LayerError, match="did you mean 'rowwise'"):
        Fp8Recipe("row_wise")  # type: ignore[arg-type]
    with pytest.raises(Fp8LayerError, match="'e4m3' or 'hybrid'"):
        Fp8Recipe("rowwise", "e5m2")  # type: ignore[arg-type]
    with pytest.raises(Fp8LayerError, match="fast_accum names products"):
        Fp8Recipe(fast_accum=("forward",))
    with pytest.raises(Fp8LayerError, match="dgrad must be one of bf16, tensorwise"):
        GemmChoice("bf16", "fp16", "bf16")
    with pytest.raises(Fp8LayerError, match="epsilon of input"):
        AmaxEps(input=-1.0)


def test_gradients_are_e5m2_in_hybrid_mode_only() -> None:
    assert Fp8Recipe("rowwise").grad_fp8 == "e4m3"
    assert Fp8Recipe("rowwise", "hybrid").grad_fp8 == "e5m2"


def test_a_choice_knows_its_recipes() -> None:
    assert GemmChoice.all("rowwise").recipes == ("rowwise",)
    assert GemmChoice("blockwise", "bf16", "tensorwise").recipes == ("blockwise", "tensorwise")
    assert GemmChoice.all("bf16").is_bf16


def test_shapes_that_do_not_fit_are_refused() -> None:
    check_shape(GemmChoice.all("tensorwise"), (16, 48))
    check_shape(GemmChoice.all("bf16"), (3, 5))
    with pytest.raises(Fp8LayerError, match="fc1: in_features 48 is not a multiple of 128, which blockwise needs"):
        check_shape(GemmChoice("tensorwise", "blockwise", "bf16"), (128, 48), "fc1")


def test_a_cpu_emulates_everything() -> None:
    require_fp8("cpu", ("tensorwise", "rowwise", "blockwise", "mxfp8"))


def test_other_devices_are_refused() -> None:
    with pytest.raises(Fp8UnavailableError, match="CUDA GPUs"):
        require_fp8("mps")


def on_a_gpu(monkeypatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "hip", None)


@pytest.mark.parametrize(
    ("capability", "recipes", "missing"),
    [
        ((8, 0), (), "compute capability 8.9"),
        ((9, 0), ("mxfp8",), "block scales"),
        ((8, 9), ("blockwise",), "9.0"),
        ((9, 0), ("tensorwise", "rowwise", "blockwise"), None),
        ((8, 9), ("tensorwise",), None),
        ((10, 0), ("mxfp8",), None),
    ],
)
def test_what_a_gpu_lacks_is_named(monkeypatch, capability, recipes, missing) -> None:
    on_a_gpu(monkeypatch, capability)
    found = layer_settings.fp8_obstacle.__wrapped__(torch.device("cuda"), recipes)
    assert (found is None) == (missing is None)
    if missing is not None:
        assert missing in str(found)
        assert f"a GPU has compute capability {capability[0]}.{capability[1]}" in str(found)


@pytest.fixture
def blockwise64() -> Iterator[Recipe]:
    recipe = Recipe("blockwise64", "1x64", "1x64", 64)
    register_recipe(recipe, **{"1x64": ScaleBlock(1, 64)})
    yield recipe
    del RECIPES[recipe.name], SCALINGS["1x64"]
    PRODUCT_PAIRS.remove(("1x64", "1x64"))


def test_a_new_recipe_is_one_row(blockwise64, monkeypatch) -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 128)
    cast = cast_reference(x, "1x64")
    expected = x.view(40, 2, 64).abs().amax(2) / 448
    assert torch.equal(cast.scale, expected)
    assert (decode_scaled(cast) - x).norm() / x.norm() < 0.03
    layer = Fp8Linear(128, 64, recipe=Fp8Recipe(blockwise64.name))
    optimizer = torch.optim.SGD(layer.parameters(), lr=5.0)
    target = x @ torch.randn(128, 64) / 11
    losses = []
    for _ in range(8):
        loss = (layer(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    with pytest.raises(Fp8LayerError, match="in_features 96 is not a multiple of 64, which blockwise64 needs"):
        Fp8Linear(96, 64, recipe=Fp8Recipe(blockwise64.name))
    with pytest.raises(Fp8LayerError, match="by tensorwise or blockwise, got blockwise64"):
        Fp8Linear(128, 64, recipe=Fp8Recipe(blockwise64.name), fp8_param=True)
    with pytest.raises(Fp8LayerError, match="experts have tensorwise, rowwise, blockwise and bf16, got 'blockwise64'"):
        GroupedLinear(2, 128, 64, recipe=Fp8Recipe(blockwise64.name))
    on_a_gpu(monkeypatch, (9, 0))
    found = layer_settings.fp8_obstacle.__wrapped__(torch.device("cuda"), (blockwise64.name,))
    assert "blockwise64 has no kernels for a GPU and runs on a CPU alone" in found


@pytest.mark.parametrize(
    ("recipe", "scalings", "why"),
    [
        (Recipe("rowwise", "row", "row", 16), {}, "there is a recipe 'rowwise' already"),
        (Recipe("bf16", "row", "row", 16), {}, "there is a recipe 'bf16' already"),
        (Recipe("new", "row", "rows", 16), {}, "scaling must be one of tensor, .* got 'rows'"),
        (Recipe("new", "1x32", "1x32", 16), {}, "a multiple of 16 has no whole blocks of 1x32"),
        (Recipe("new", "row", "row", 16), {"row": ScaleBlock(1, 16)}, "there is another scaling 'row' already"),
        (Recipe("new", "row", "2", 16), {"2": ScaleBlock(2, None)}, "of whole rows one or all share a scale, got 2"),
    ],
)
def test_rows_that_do_not_hold_together_are_refused(recipe, scalings, why) -> None:
    with pytest.raises(FormatError, match=why):
        register_recipe(recipe, **scalings)
    assert list(RECIPES) == ["tensorwise", "rowwise", "blockwise", "mxfp8"]
    assert "new" not in RECIPES
