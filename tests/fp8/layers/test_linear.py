"""Fp8Linear: outputs and gradients against float64, routing, weight casts, compiled graphs, refusals."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from bitplan.fp8.layer_settings import AmaxEps, Fp8LayerError, Fp8Recipe, GemmChoice
from bitplan.fp8.layers import products, weight_casts, weight_source
from bitplan.fp8.layers.linear import Fp8Linear, hold_weight_casts
from bitplan.fp8.layers.products import Fp8Settings
from bitplan.fp8.layers.weight_casts import drop_casts, drop_weight_casts, kept_casts
from tests.crosses import few

RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8")
# Relative to the norm of the exact result: two operands of E4M3 (2.6% each), or one of E5M2 (5.2%).
E4M3_BOUND, E5M2_BOUND = 0.045, 0.068
K, N = 256, 384


@pytest.fixture(autouse=True)
def _no_casts_left():
    drop_weight_casts()
    yield
    drop_weight_casts()


def error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.detach().double() - expected).norm() / expected.norm())


def run(layer: nn.Module, tokens: int, dtype=torch.float32, device="cpu", seed: int = 0):
    """(output, input gradient, weight gradient), and the same exactly."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, K, generator=generator).to(device, dtype).requires_grad_()
    g = torch.randn(tokens, N, generator=generator).to(device, dtype)
    y = layer(x)
    y.backward(g)
    weight = layer.weight
    exact_x, exact_w, exact_g = x.detach().double(), weight.detach().double(), g.double()
    exact_y = exact_x @ exact_w.t() + (layer.bias.detach().double() if layer.bias is not None else 0.0)
    return (y, x.grad, weight.grad), (exact_y, exact_g @ exact_w, exact_g.t() @ exact_x), g


@pytest.mark.cross("recipe", RECIPES)
@pytest.mark.cross("tokens", [1, 5, 128, 513])
def test_outputs_and_gradients_are_near_float64(recipe, tokens) -> None:
    torch.manual_seed(0)
    layer = Fp8Linear(K, N, recipe=Fp8Recipe(recipe))
    result, exact, g = run(layer, tokens)
    assert [error(a, b) < E4M3_BOUND for a, b in zip(result, exact, strict=True)] == [True] * 3
    assert error(result[0], exact[0]) > 0.01  # it was FP8
    torch.testing.assert_close(layer.bias.grad, g.sum(0))


@pytest.mark.parametrize(
    ("asked", "short", "fast"),
    [(("fprop",), 512, [True, False, True]), (("fprop",), 4, [True, False, False]), ((), 512, [False, False, False])],
)
def test_short_sums_are_added_fast_unless_no_product_is(monkeypatch, asked, short, fast) -> None:
    product, seen = products.scaled_product, []

    def spy(*args, fast_accum: bool, **options):
        seen.append(fast_accum)
        return product(*args, fast_accum=fast_accum, **options)

    monkeypatch.setattr(products, "scaled_product", spy)
    monkeypatch.setattr(products, "SHORT_SUM", short)
    run(Fp8Linear(K, N, recipe=Fp8Recipe("tensorwise", fast_accum=asked)), 32)
    assert seen == fast


def test_a_layer_without_numbers_is_made_on_any_machine() -> None:
    assert Fp8Linear(K, N, recipe=Fp8Recipe("tensorwise"), device="meta").weight.is_meta


@pytest.mark.parametrize("recipe", RECIPES)
def test_hybrid_gradients_are_e5m2(recipe) -> None:
    torch.manual_seed(0)
    layer = Fp8Linear(K, N, bias=False, recipe=Fp8Recipe(recipe, "hybrid"), dtype=torch.bfloat16)
    result, exact, _ = run(layer, 64, torch.bfloat16)
    errors = [error(a, b) for a, b in zip(result, exact, strict=True)]
    assert errors[0] < E4M3_BOUND
    assert E4M3_BOUND < errors[1] < E5M2_BOUND
    assert E4M3_BOUND < errors[2] < E5M2_BOUND
    assert [each.dtype for each in result] == [torch.bfloat16] * 3


@pytest.mark.parametrize("choice", list(itertools.product([True, False], repeat=3)))
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_every_choice_sends_each_product_its_way(choice, recipe) -> None:
    torch.manual_seed(0)
    gemms = GemmChoice(*(recipe if fp8 else "bf16" for fp8 in choice))
    result, exact, _ = run(Fp8Linear(K, N, recipe=Fp8Recipe(recipe), gemms=gemms), 50)
    errors = [error(a, b) for a, b in zip(result, exact, strict=True)]
    assert [each > 0.01 for each in errors] == list(choice)  # float32 of this CPU errs by 1e-7
    assert all(each < E4M3_BOUND for each in errors)


def test_recipes_can_be_mixed(monkeypatch) -> None:
    torch.manual_seed(0)
    seen = []
    real = products.scaled_product
    monkeypatch.setattr(
        products, "scaled_product", lambda a, b, *rest, **more: seen.append(a.scaling) or real(a, b, *rest, **more)
    )
    gemms = GemmChoice("blockwise", "rowwise", "tensorwise")
    result, exact, _ = run(Fp8Linear(K, N, recipe=Fp8Recipe("blockwise"), gemms=gemms), 50)
    assert seen == ["1x128", "row", "tensor"]
    assert all(error(a, b) < E4M3_BOUND for a, b in zip(result, exact, strict=True))


def test_only_the_layouts_needed_are_cast(monkeypatch) -> None:
    made = []
    real = weight_source.cast_layouts

    def record(x, recipe, fp8, eps, *, rows=True, cols=True, **more):
        made.append((tuple(x.shape), rows, cols))
        return real(x, recipe, fp8, eps, rows=rows, cols=cols, **more)

    monkeypatch.setattr(weight_source, "cast_layouts", record)
    layer = Fp8Linear(K, N, bias=False, recipe=Fp8Recipe("tensorwise"))
    layer.weight.requires_grad_(False)
    x = torch.randn(16, K, requires_grad=True)
    layer(x).sum().backward()
    assert made == [((16, K), True, False), ((16, N), True, False)]  # a frozen weight: no wgrad layouts
    made.clear()
    layer.weight.requires_grad_(True)
    layer(x.detach()).sum().backward()
    assert made == [((16, K), True, True), ((16, N), False, True)]  # no input gradient: no dgrad layout
    made.clear()
    with torch.no_grad():
        layer(x)
    assert made == [((16, K), True, False)]


def test_shapes_of_the_input_are_kept_and_empty_ones_work() -> None:
    layer = Fp8Linear(K, N, recipe=Fp8Recipe("blockwise"))
    assert layer(torch.randn(2, 3, K)).shape == (2, 3, N)
    x = torch.randn(0, K, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == (0, K)
    assert not layer.weight.grad.any()


@pytest.mark.parametrize("tokens", [128, 17])
def test_an_output_may_be_written_in_place(tokens) -> None:
    """As ReLU(inplace=True) does; 17 tokens are padded inside."""
    layer, x = Fp8Linear(K, N, recipe=Fp8Recipe("blockwise")), torch.randn(tokens, K, requires_grad=True)
    torch.relu(layer(x)).sum().backward()
    expected, x.grad = x.grad, None
    torch.relu_(layer(x)).sum().backward()
    assert torch.equal(x.grad, expected)


def test_it_is_a_linear_to_optimizers_and_checkpoints() -> None:
    linear = nn.Linear(K, N)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    layer = Fp8Linear.from_linear(linear, recipe=Fp8Recipe("rowwise"))
    assert layer.weight is linear.weight
    assert list(layer.state_dict()) == list(linear.state_dict())
    before = linear.weight.detach().clone()
    layer(torch.randn(8, K)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, linear.weight)
    layer.load_state_dict(nn.Linear(K, N).state_dict())


def test_amax_epsilon_reaches_the_cast() -> None:
    """An epsilon far above every number leaves them no codes."""
    layer = Fp8Linear(K, N, bias=False, recipe=Fp8Recipe("tensorwise", eps=AmaxEps(input=1e9)))
    assert not layer(torch.randn(4, K)).any()
    layer = Fp8Linear(K, N, bias=False, recipe=Fp8Recipe("tensorwise", eps=AmaxEps(grad=1e9)))
    x = torch.randn(4, K, requires_grad=True)
    layer(x).sum().backward()
    assert not x.grad.any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_zeros_and_nan(recipe) -> None:
    layer = Fp8Linear(K, N, bias=False, recipe=Fp8Recipe(recipe))
    x = torch.zeros(4, K, requires_grad=True)
    y = layer(x)
    (y * 0).sum().backward()
    assert not y.any()
    assert x.grad.isfinite().all()
    bad = torch.ones(4, K)
    bad[1, 3] = torch.inf
    assert layer(bad)[1].isnan().all()


# ---- weight casts ----------------------------------------------------------------------------------------------------


def count_casts(monkeypatch) -> list[tuple[bool, bool]]:
    made: list[tuple[bool, bool]] = []
    real = weight_casts.cast_layouts

    def record(*arguments, rows=True, cols=True, **more):
        made.append((rows, cols))
        return real(*arguments, rows=rows, cols=cols, **more)

    monkeypatch.setattr(weight_casts, "cast_layouts", record)
    return made


def test_micro_batches_share_one_weight_cast_and_a_step_ends_it(monkeypatch) -> None:
    made = count_casts(monkeypatch)
    layer = Fp8Linear(K, N, recipe=Fp8Recipe("blockwise"))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    for _ in range(3):
        layer(torch.randn(8, K, requires_grad=True)).sum().backward()
    assert made == [(True, True)]
    optimizer.step()
    x = torch.randn(8, K)
    result = layer(x)
    assert len(made) == 2
    fresh = Fp8Linear.from_linear(layer, recipe=layer.recipe, reuse_weight_cast=False)
    assert torch.equal(result, fresh(x))


def test_without_reuse_nothing_is_kept(monkeypatch) -> None:
    made = count_casts(monkeypatch)
    layer = Fp8Linear(K, N, recipe=Fp8Recipe("blockwise"), reuse_weight_cast=False)
    layer(torch.randn(8, K, requires_grad=True)).sum().backward()
    assert made == [(True, False), (False, True)]
    assert kept_casts(layer.weight) is None


def test_a_new_weight_at_the_same_address_is_not_taken_for_the_old() -> None:
    drop_casts()  # of tests before
    x = torch.randn(4, K)
    for seed in range(20):  # memory of the one before is given to the next
        torch.manual_seed(seed)
        layer = Fp8Linear(K, N, recipe=Fp8Recipe("tensorwise"))
        fresh = Fp8Linear.from_linear(layer, recipe=layer.recipe, reuse_weight_cast=False)
        assert torch.equal(layer(x), fresh(x))
        del layer, fresh
    assert len(weight_casts._kept) < 20


def test_loading_a_state_dict_ends_a_cast() -> None:
    layer, other = (Fp8Linear(K, N, recipe=Fp8Recipe("tensorwise")) for _ in range(2))
    x = torch.randn(4, K)
    layer(x)
    layer.load_state_dict(other.state_dict())
    assert torch.equal(layer(x), other(x))


def test_casts_that_others_made_do_not_outlive_a_held_one() -> None:
    layer = Fp8Linear(K, N, recipe=Fp8Recipe("tensorwise"))
    hold_weight_casts(layer)
    stored = weight_casts._find(layer.weight)
    assert stored is not None
    stored.rows["agreed tensorwise", 0.0] = next(iter(stored.rows.values()))
    with torch.no_grad():
        layer.weight.mul_(2)
    again = weight_casts._find(layer.weight)
    assert again is not None
    assert [how[0] for how in again.rows] == ["tensorwise"]


def test_held_casts_stay_at_their_address() -> None:
    layer = Fp8Linear(K, N, recipe=Fp8Recipe("blockwise"))
    hold_weight_casts(layer)
    first = kept_casts(layer.weight)
    with torch.no_grad():
        layer.weight.mul_(2)
    hold_weight_casts(layer)
    again = kept_casts(layer.weight)
    assert first is not None
    assert again is not None
    for one, two in ((first.rows, again.rows), (first.cols, again.cols)):
        assert one.codes.data_ptr() == two.codes.data_ptr()
    x = torch.randn(4, K)
    fresh = Fp8Linear.from_linear(layer, recipe=layer.recipe, reuse_weight_cast=False)
    assert torch.equal(layer(x), fresh(x))
    with torch.no_grad():
        layer.weight.mul_(2)
    assert torch.equal(layer(x), fresh(x))
    drop_weight_casts(layer)
    assert kept_casts(layer.weight) is None


def test_inference_tensors_work() -> None:
    with torch.inference_mode():
        layer = Fp8Linear(K, N, recipe=Fp8Recipe("tensorwise"))
        x = torch.randn(4, K)
        first = layer(x)
        layer.weight.mul_(2)
        layer.bias.mul_(2)
        torch.testing.assert_close(layer(x), 2 * first)


# Dynamo makes an instance of every autograd function it traces, and torch warns of that.
dynamo_warns = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


# ---- compiled --------------------------------------------------------------------------------------------------------


@dynamo_warns
@pytest.mark.parametrize(
    "gemms",
    few(
        [
            GemmChoice.all("blockwise"),
            pytest.param(GemmChoice("tensorwise", "bf16", "rowwise"), marks=pytest.mark.long),
            GemmChoice("bf16", "mxfp8", "bf16"),
        ],
        1,
    ),
)
def test_a_compiled_layer_is_one_graph_and_the_same(gemms) -> None:
    torch._dynamo.reset()
    layer = Fp8Linear(K, N, recipe=Fp8Recipe("blockwise"), gemms=gemms)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for tokens in (7, 33):
        results = []
        for each in (layer, compiled):
            layer.zero_grad()
            x = torch.randn(tokens, K, generator=torch.Generator().manual_seed(1)).requires_grad_()
            y = each(x)
            y.square().sum().backward()
            results.append((y.detach(), x.grad, layer.weight.grad, layer.bias.grad))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@dynamo_warns
def test_a_compiled_layer_sees_the_optimizers_step() -> None:
    torch._dynamo.reset()
    layer = Fp8Linear(K, N, recipe=Fp8Recipe("tensorwise"))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    x = torch.randn(8, K)
    for _ in range(3):
        y = compiled(x)
        y.sum().backward()
        assert torch.equal(y, layer(x))
        optimizer.step()


def test_settings_go_through_text() -> None:
    settings = Fp8Settings(
        Fp8Recipe("blockwise", "hybrid", AmaxEps(1e-12, 0.0, 3.5e-7), ("fprop",)),
        GemmChoice("bf16", "mxfp8", "rowwise"),
    )
    assert Fp8Settings.from_text(settings.to_text()) == settings
    bare = Fp8Settings(Fp8Recipe(fast_accum=()), GemmChoice.all("bf16"))
    assert Fp8Settings.from_text(bare.to_text()) == bare


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(Fp8LayerError, match="in_features 100 is not a multiple of 16, which tensorwise needs"):
        Fp8Linear(100, 64, recipe=Fp8Recipe("tensorwise"))
    layer = Fp8Linear(K, N, recipe=Fp8Recipe("tensorwise"))
    with pytest.raises(Fp8LayerError, match=r"takes bfloat16.*got torch.float32 of shape \(4, 17\)"):
        layer(torch.randn(4, 17))
    with pytest.raises(Fp8LayerError, match="float64"):
        layer(torch.randn(4, K, dtype=torch.float64))


def test_a_weight_changed_between_forward_and_backward_is_refused() -> None:
    layer = Fp8Linear(K, N, recipe=Fp8Recipe("tensorwise"))
    y = layer(torch.randn(4, K, requires_grad=True))
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_autocast_casts_the_input() -> None:
    layer = Fp8Linear(K, N, recipe=Fp8Recipe("tensorwise"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.randn(4, K)).dtype == torch.bfloat16


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("fp8", ["e4m3", "hybrid"])
@pytest.mark.parametrize("tokens", [5, 513])
def test_the_gpu_is_near_float64(recipe, fp8, tokens) -> None:
    torch.manual_seed(0)
    layer = Fp8Linear(K, N, recipe=Fp8Recipe(recipe, fp8), device="cuda", dtype=torch.bfloat16)
    result, exact, _ = run(layer, tokens, torch.bfloat16, "cuda")
    bounds = [E4M3_BOUND, *([E5M2_BOUND if fp8 == "hybrid" else E4M3_BOUND] * 2)]
    for a, b, bound in zip(result, exact, bounds, strict=True):
        assert error(a, b) < bound


@pytest.mark.gpu
def test_mxfp8_is_refused_where_the_gpu_lacks_it() -> None:
    if torch.cuda.get_device_capability()[0] >= 10:
        pytest.skip("this GPU has block scales")
    with pytest.raises(Fp8LayerError.__mro__[1], match="mxfp8 needs hardware with block scales"):
        Fp8Linear(K, N, recipe=Fp8Recipe("mxfp8"), device="cuda")


@pytest.mark.gpu
def test_a_cuda_graph_casts_anew_or_reads_what_is_held() -> None:
    torch.manual_seed(0)
    layer = Fp8Linear(K, N, recipe=Fp8Recipe("tensorwise"), device="cuda", dtype=torch.bfloat16)
    x = torch.randn(64, K, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.no_grad():
        layer(x)
    torch.cuda.synchronize()
    for held in (False, True):
        if held:
            hold_weight_casts(layer)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), torch.no_grad():
            y = layer(x)
        with torch.no_grad():
            layer.weight.mul_(2)
        if held:
            hold_weight_casts(layer)
        graph.replay()
        with torch.no_grad():
            assert torch.equal(y, layer(x))
        drop_weight_casts()


@dynamo_warns
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # Inductor's own
@pytest.mark.gpu
def test_a_compiled_layer_on_the_gpu() -> None:
    torch._dynamo.reset()
    layer = Fp8Linear(K, N, recipe=Fp8Recipe("blockwise"), device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(64, K, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    compiled(x).sum().backward()
    first = x.grad
    x.grad = None
    layer(x).sum().backward()
    assert torch.equal(first, x.grad)
