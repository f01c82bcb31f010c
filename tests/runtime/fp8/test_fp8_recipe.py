"""Recipes, epsilons, choices and what is refused."""

from __future__ import annotations

import pytest
import torch

from bitplan.runtime.fp8 import recipe as fp8_recipe
from bitplan.runtime.fp8.recipe import (
    AmaxEps,
    Fp8LayerError,
    Fp8Recipe,
    Fp8UnavailableError,
    GemmChoice,
    check_shape,
    require_fp8,
)


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
    fp8_recipe.fp8_obstacle.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    try:
        result = fp8_recipe.fp8_obstacle(torch.device("cuda"), recipes)
    finally:
        fp8_recipe.fp8_obstacle.cache_clear()
    assert (result is None) == (missing is None)
    if missing is not None:
        assert missing in str(result)
        assert f"a GPU has compute capability {capability[0]}.{capability[1]}" in str(result)
