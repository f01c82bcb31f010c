"""Casts of weights that change together, and guesses of scales: what they save must not change what comes out."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bitplan.fp8.layer_settings import Fp8Recipe, GemmChoice
from bitplan.fp8.layers import scale_guesses, weight_casts
from bitplan.fp8.layers.grouped_linear import grouped_of
from bitplan.fp8.layers.linear import Fp8Linear, cast_weights_together, hold_weight_casts
from bitplan.fp8.layers.scale_guesses import GRAD, INPUT, WEIGHT, guess_counts, guess_for
from bitplan.fp8.layers.weight_casts import drop_casts, drop_weight_casts, expire_casts, kept_casts

SIZE = 256


def stack(count: int = 3, device: str = "cuda", recipe: str = "tensorwise") -> nn.Sequential:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layers = (Fp8Linear(SIZE, SIZE, False, recipe=Fp8Recipe(recipe), device=device, dtype=dtype) for _ in range(count))
    return nn.Sequential(*layers)


def fresh(model: nn.Sequential) -> nn.Sequential:
    """The same weights, cast at every use."""
    return nn.Sequential(*(Fp8Linear.from_linear(each, recipe=each.recipe, reuse_weight_cast=False) for each in model))


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    y = model(x)
    return [y, *torch.autograd.grad(y, [x, *model.parameters()], torch.ones_like(y))]


def test_on_a_cpu_nothing_is_recorded() -> None:
    drop_casts()
    model = stack(device="cpu")
    cast_weights_together(model)
    assert not weight_casts._together
    assert guess_for("tensorwise", model[0].weight, WEIGHT) is None
    x = torch.randn(4, SIZE, requires_grad=True)
    for one, other in zip(gradients(model, x), gradients(fresh(model), x), strict=True):
        assert torch.equal(one, other)


def test_an_expired_cast_is_made_again() -> None:
    layer = stack(1, "cpu")[0]
    x = torch.randn(4, SIZE)
    y = layer(x)
    first = kept_casts(layer.weight)
    expire_casts([layer.weight])
    assert kept_casts(layer.weight) is None
    assert torch.equal(layer(x), y)
    assert first is not None


def test_casts_of_experts_are_freed_with_them() -> None:
    drop_casts()
    weight = nn.Parameter(torch.randn(2, 32, 32))
    layer = grouped_of(weight, Fp8Recipe("tensorwise"), GemmChoice.all("tensorwise"))
    layer(torch.randn(4, 32), torch.tensor([1, 3]))
    assert len(weight_casts._kept) == 1
    del weight, layer
    gc.collect()
    assert not weight_casts._kept


@pytest.mark.parametrize("fused", [True, False])
def test_weights_are_cast_anew_after_a_step_of_any_optimizer(fused) -> None:
    """torch's fused optimizers, which Hugging Face's Trainer takes by default, do not count what they write."""
    model = stack(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    x = torch.randn(4, SIZE)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
        assert torch.equal(model(x), fresh(model)(x))


class ClearsGradients(torch.optim.Optimizer):
    """As users write them: past torch's counting, and the gradient is gone when the step ends."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {})

    def step(self) -> None:
        for each in self.param_groups[0]["params"]:
            each.data.add_(each.grad, alpha=-0.5)
            each.grad = None


def write_past_the_counting(model: nn.Module) -> None:
    for each in model.parameters():
        each.data -= 0.5 * each.grad


def zero_in_place(model: nn.Module) -> None:
    for each in model.parameters():
        each.grad.zero_()


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(
    ("step", "clear"),
    [
        (write_past_the_counting, nn.Module.zero_grad),
        (write_past_the_counting, zero_in_place),
        (
            lambda model: ClearsGradients([each for each in model.parameters() if each.requires_grad]).step(),
            lambda _: 0,
        ),
    ],
)
def test_steps_past_torchs_counting_are_noticed_by_the_gradients(step, clear, stored) -> None:
    drop_casts()
    torch.manual_seed(0)
    model = nn.Sequential(Fp8Linear(32, 32, False, recipe=Fp8Recipe("tensorwise"), fp8_param=stored))
    trained = nn.ModuleList() if stored else model
    if stored:
        trained.register_parameter("master", model[0].weight_master)
    x = torch.randn(16, 32)
    for _ in range(3):
        for _ in range(2):
            model(x).square().mean().backward()
        numbers = (model[0].weight_master if stored else model[0].weight).detach()
        step(trained)
        clear(trained)
        expected = Fp8Linear(32, 32, False, recipe=Fp8Recipe("tensorwise"))
        expected.weight = nn.Parameter(numbers.clone())
        assert torch.equal(model(x), expected(x))


def test_weights_that_are_swapped_for_an_evaluation_are_noticed() -> None:
    drop_casts()
    model, x = stack(1, "cpu").train(), torch.randn(16, SIZE)
    expected = model(x)
    kept = model[0].weight.detach().clone()
    model.eval()
    model[0].weight.data.mul_(0.5)  # as moving averages are put in place, past torch's counting
    assert torch.equal(model(x), expected / 2)
    model[0].weight.data.copy_(kept)
    assert torch.equal(model.train()(x), expected)


def test_nothing_is_kept_while_compiled_graphs_are_made(monkeypatch) -> None:
    model = stack(device="cpu")
    x = torch.randn(4, SIZE, requires_grad=True)
    expected = gradients(fresh(model), x)
    monkeypatch.setattr(weight_casts, "in_compiled_graphs", lambda _weight: True)
    for one, other in zip(gradients(model, x), expected, strict=True):
        assert torch.equal(one, other)
    assert all(kept_casts(layer.weight) is None for layer in model)
    hold_weight_casts(model)
    held = kept_casts(model[0].weight)
    assert weight_casts.weight_rows(model[0].weight, "tensorwise", 0.0, with_cols=True, reuse=True) is held.rows
    assert weight_casts.weight_cols(model[0].weight, "tensorwise", 0.0, reuse=True) is held.cols
    drop_casts()


class Replayed(weight_casts._Together):
    """Cast together on a CPU: a replay casts into memory of its own, as a graph does."""

    recorded = 0

    def _record(self, weights):
        self.casts = self._cast(weights)
        self.graph = SimpleNamespace(replay=lambda: None)
        self.recorded += 1


def test_together_leaves_alone_what_is_held_and_answers_only_for_its_own() -> None:
    drop_casts()
    model = stack(3, "cpu")
    how = ("tensorwise", 0.0)
    together = Replayed([(each.weight, *how) for each in model[:2]])
    weight_casts._together |= {weight_casts._memory_key(each.weight): together for each in model[:2]}
    hold_weight_casts(model[0])
    held = kept_casts(model[0].weight)
    assert not together.refresh(model[1].weight, how)  # half of them are current
    weight_casts._kept[weight_casts._memory_key(model[0].weight)].version = -1  # changed
    third = Replayed([(each.weight, *how) for each in model])
    assert third.refresh(model[2].weight, how)
    again = kept_casts(model[0].weight)
    assert again.rows.codes.data_ptr() == held.rows.codes.data_ptr()
    assert kept_casts(model[1].weight).rows is third.casts[1].rows
    expire_casts(model.parameters())
    assert not third.refresh(model[2].weight, ("blockwise", 0.0))
    assert not together.refresh(model[2].weight, how)
    drop_casts([model[0].weight])
    assert not weight_casts._together


def test_together_sees_that_one_was_given_other_memory() -> None:
    drop_casts()
    model, how = stack(2, "cpu"), ("tensorwise", 0.0)
    together = Replayed([(each.weight, *how) for each in model])
    assert together.refresh(model[0].weight, how)
    model[1].weight.data = model[1].weight.data.clone() * 2
    expire_casts([each.weight for each in model])
    assert together.refresh(model[0].weight, how)
    assert together.recorded == 2
    expected = weight_casts._cast(model[1].weight, *how)
    assert torch.equal(kept_casts(model[1].weight).rows.scale, expected.rows.scale)


def test_held_in_inference_mode_and_changed_outside() -> None:
    layer = stack(1, "cpu")[0]
    with torch.inference_mode():
        hold_weight_casts(layer)
    held = kept_casts(layer.weight).rows.codes.data_ptr()
    with torch.no_grad():
        layer.weight.mul_(3)
    hold_weight_casts(layer)
    assert kept_casts(layer.weight).rows.codes.data_ptr() == held
    drop_casts()


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_the_first_that_is_asked_for_has_all_cast(recipe) -> None:
    model = stack(recipe=recipe)
    plain = fresh(model)
    cast_weights_together(model)
    x = torch.randn(32, SIZE, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for step in range(4):
        with torch.no_grad():
            for each in model:
                each.weight.mul_(1.5)
        model[0](x)
        assert all(kept_casts(each.weight) is not None for each in model), step
        for one, other in zip(gradients(model, x), gradients(plain, x), strict=True):
            assert torch.equal(one, other)
    assert len({id(weight_casts._together[weight_casts._memory_key(each.weight)]) for each in model}) == 1


@pytest.mark.gpu
def test_one_that_changes_alone_is_cast_alone() -> None:
    model = stack()
    plain = fresh(model)
    cast_weights_together(model)
    x = torch.randn(32, SIZE, device="cuda", dtype=torch.bfloat16)
    model(x)
    with torch.no_grad():
        model[1].weight.mul_(2)
    assert torch.equal(model(x), plain(x))
    with torch.no_grad():
        for each in model:
            each.weight.mul_(2)
    assert torch.equal(model(x), plain(x))


@pytest.mark.gpu
def test_memory_goes_when_casts_are_dropped() -> None:
    drop_casts()
    model = stack()
    before = torch.cuda.memory_allocated()
    cast_weights_together(model)
    x = torch.randn(32, SIZE, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        model(x)
    assert torch.cuda.memory_allocated() > before + 3 * SIZE * SIZE
    drop_weight_casts(model)
    assert torch.cuda.memory_allocated() < before + 3 * SIZE * SIZE
    assert torch.equal(model(x), fresh(model)(x))


@pytest.mark.gpu
def test_products_apart_and_frozen_weights_stay_out() -> None:
    drop_casts()
    recipe = Fp8Recipe("tensorwise")
    apart = Fp8Linear(SIZE, SIZE, recipe=recipe, gemms=GemmChoice("tensorwise", "bf16", "tensorwise"), device="cuda")
    frozen = Fp8Linear(SIZE, SIZE, recipe=recipe, device="cuda").requires_grad_(False)
    cast_weights_together(nn.Sequential(apart, frozen))
    assert not weight_casts._together


@pytest.mark.gpu
def test_casts_are_freed_with_the_model() -> None:
    drop_casts()
    x = torch.randn(32, SIZE, device="cuda", dtype=torch.bfloat16)
    stack(2)(x).sum().backward()  # kernels are compiled, libraries have their workspaces
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = stack(2)
    cast_weights_together(model)
    model(x).sum().backward()
    assert len(weight_casts._together) == 2
    del model
    gc.collect()
    assert not weight_casts._together
    assert torch.cuda.memory_allocated() - before < SIZE * SIZE  # of a weight's casts; guesses take 36 bytes


@pytest.mark.gpu
def test_guesses_are_right_from_the_second_step_on() -> None:
    scale_guesses._kept.clear()
    model = stack(2)
    x = torch.randn(32, SIZE, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    expected = gradients(fresh(model), x)
    scale_guesses._kept.clear()
    for _ in range(5):
        expire_casts(model.parameters())
        for one, other in zip(gradients(model, x), expected, strict=True):
            assert torch.equal(one, other)
    assert guess_counts() == dict.fromkeys((INPUT, WEIGHT, GRAD), (10, 2, 2))


@pytest.mark.gpu
def test_another_stream_waits_for_the_last() -> None:
    model = stack(1)
    x = torch.randn(4096, SIZE, device="cuda", dtype=torch.bfloat16)
    y = model(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(10):
        with torch.cuda.stream(side):
            other = model(x)
        assert torch.equal(model(x), y)
        torch.cuda.current_stream().wait_stream(side)
        assert torch.equal(other, y)


@pytest.mark.gpu
def test_a_graph_keeps_its_guesses_from_replay_to_replay() -> None:
    scale_guesses._kept.clear()
    model = stack(1)
    x = torch.randn(64, SIZE, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        model(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        y = model(x)
    for size in (1.0, 1.0, 64.0, 64.0):
        x.fill_(size)
        graph.replay()
        with torch.no_grad():
            assert torch.equal(y, fresh(model)(x))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own, of torch 2.11
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # the first that torch makes, for its memory
@pytest.mark.gpu
def test_compiled_graphs_follow_the_weights() -> None:
    scale_guesses._kept.clear()
    model = stack(2)
    cast_weights_together(model)
    run = torch.compile(model, mode="reduce-overhead")
    x = torch.randn(64, SIZE, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for _ in range(5):  # the first warms up, the second records
        torch.compiler.cudagraph_mark_step_begin()
        result = [each.clone() for each in gradients(run, x)]
        for one, other in zip(result, gradients(fresh(model), x), strict=True):
            assert torch.equal(one, other)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.5)
