"""What is timed for each kind of layer: the right modules, real gradients, casts in every step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitplan.base.paired_timing import stopwatch_of, time_in_turns
from bitplan.fp8.bench.layer_bench import BenchPlan, ParallelGroups, Way
from bitplan.fp8.bench.session import ModuleBuilder, step_of
from bitplan.fp8.layer_settings import Fp8Recipe, GemmChoice
from bitplan.fp8.layers import weight_casts
from bitplan.fp8.layers.grouped_linear import GroupedLinear
from bitplan.fp8.layers.linear import Fp8Linear, Fp8NormLinear
from bitplan.fp8.policy.layers import Case, Layer, Parallel

CPU = torch.device("cpu")
RECIPE = Fp8Recipe("blockwise")
BF16 = GemmChoice.all("bf16")
FP8 = GemmChoice.all("blockwise")


def layer(kind):
    grouped = kind.endswith("grouped")
    return Layer("llm", kind, "fc1", "mlp", (256, 128), 1, Parallel(), 4 if grouped else None, 2 if grouped else None)


@pytest.mark.parametrize(
    ("kind", "plain", "fp8"),
    [
        ("layernorm_column", nn.Sequential, Fp8NormLinear),
        ("column", nn.Linear, Fp8Linear),
        ("row", nn.Linear, Fp8Linear),
        ("duplicated", nn.Linear, Fp8Linear),
        ("column_grouped", GroupedLinear, GroupedLinear),
        ("row_grouped", GroupedLinear, GroupedLinear),
    ],
)
def test_modules_and_their_gradients(kind, plain, fp8, monkeypatch):
    builder = ModuleBuilder(RECIPE, CPU, ParallelGroups())
    made = []
    monkeypatch.setattr(
        "bitplan.fp8.bench.session.step_of", lambda module, *x: made.append((module, x)) or step_of(module, *x)
    )
    way = Way(Case(layer(kind), 40), "eager", "zipf" if kind.endswith("grouped") else None)
    for gemms in (BF16, FP8):
        gradients = builder(way, gemms)()()
        assert gradients[0].shape == (40, 128)
        assert all(each.isfinite().all() and each.abs().sum() > 0 for each in gradients)
    assert type(made[0][0]) is plain
    assert type(made[1][0]) is fp8
    if kind.endswith("grouped"):
        assert made[0][1][1].tolist() == made[1][1][1].tolist()
        assert sum(made[0][1][1].tolist()) == 40


def test_weights_are_cast_once_in_every_step(monkeypatch):
    casts = []
    real = weight_casts.cast_layouts
    monkeypatch.setattr(weight_casts, "cast_layouts", lambda *args, **more: casts.append(1) or real(*args, **more))
    step = ModuleBuilder(RECIPE, CPU, ParallelGroups())(Way(Case(layer("row"), 40), "eager"), FP8)()
    casts.clear()
    for count in (1, 2, 3):
        step()
        assert len(casts) == count


def test_padded_tokens():
    builder = ModuleBuilder(RECIPE, CPU, ParallelGroups())
    assert builder.padded_tokens(Way(Case(layer("row"), 100), "eager")) == 128
    assert builder.padded_tokens(Way(Case(layer("row_grouped"), 130), "eager", "uniform")) == 4 * 128
    assert (
        ModuleBuilder(Fp8Recipe("mxfp8"), CPU, ParallelGroups()).padded_tokens(
            Way(Case(layer("row_grouped"), 130), "eager", "uniform")
        )
        is None
    )
    shared = ModuleBuilder(RECIPE, CPU, ParallelGroups(ep=object()))
    assert shared.padded_tokens(Way(Case(layer("row_grouped"), 130), "eager", "uniform")) is None


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("kind", ["layernorm_column", "row", "column_grouped"])
def test_gpu_arms_run_eager_and_as_graphs(kind, graph):
    device = torch.device("cuda")
    builder = ModuleBuilder(Fp8Recipe("tensorwise"), device, ParallelGroups())
    way = Way(Case(layer(kind), 512), "graph" if graph else "eager", "zipf" if kind.endswith("grouped") else None)
    choices = BenchPlan((), Fp8Recipe("tensorwise")).choices()
    arms = {name: builder(way, gemms) for name, gemms in choices.items()}
    result = time_in_turns(arms, stopwatch_of(device), turns=4, warmup=2, graph=graph)
    assert {name: timed.message for name, timed in result.items() if timed.status != "ok"} == {}
    assert all(timed.peak_bytes > 0 for timed in result.values())


def test_arms_are_bfloat16_where_fp8_is_not_emulated():
    kinds = [ModuleBuilder(RECIPE, torch.device(name), ParallelGroups()).dtype for name in ("cpu", "cuda")]
    assert kinds == [torch.float32, torch.bfloat16]
