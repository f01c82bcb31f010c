"""GroupedLinear against float64: outputs, input gradients, weight gradients, under every routing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bitplan.base.errors import FormatError
from bitplan.fp8.layer_settings import AmaxEps, Fp8LayerError, Fp8Recipe, GemmChoice
from bitplan.fp8.layers.grouped_linear import GroupedLinear
from bitplan.fp8.layers.weight_casts import drop_weight_casts

ROUTINGS = {
    "skewed": [1, 0, 60, 3],
    "one takes all": [0, 0, 45, 0],
    "whole blocks": [128, 0, 0, 128],
    "nobody": [0, 0, 0, 0],
}
# Relative to the norm of the exact result: two operands of E4M3 give 3.7% with Gaussian numbers, one of E5M2 6%.
LIMITS = {"e4m3": 0.045, "hybrid": 0.07}


def made(gemms: GemmChoice, fp8: str = "e4m3", *, experts: int = 4, bias: bool = False, **options) -> GroupedLinear:
    torch.manual_seed(0)
    recipe = Fp8Recipe(fp8=fp8, eps=AmaxEps(1e-12, 1e-12, 1e-12))
    return GroupedLinear(experts, 128, 256, recipe=recipe, gemms=gemms, bias=bias, **options)


def ran(
    layer: GroupedLinear, counts: list[int], dtype: torch.dtype = torch.float32, *, add: bool = False
) -> list[Tensor | None]:
    """y, dx, dw, db."""
    generator = torch.Generator().manual_seed(1)
    device = layer.weight.device
    x = torch.randn(sum(counts), layer.in_features, generator=generator).to(device, dtype).requires_grad_()
    dy = torch.randn(sum(counts), layer.out_features, generator=generator).to(device, dtype)
    if not add:
        layer.weight.grad = None
    y = layer(x, torch.tensor(counts, device=device))
    y.backward(dy)
    return [y.detach(), x.grad, layer.weight.grad, None if layer.bias is None else layer.bias.grad]


def exact(layer: GroupedLinear, counts: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(counts), layer.in_features, generator=generator).double()
    dy = torch.randn(sum(counts), layer.out_features, generator=generator).double()
    w = layer.weight.detach().double().cpu()
    xs, dys = x.split(counts), dy.split(counts)
    bias = (
        layer.bias.detach().double().cpu() if layer.bias is not None else torch.zeros(len(counts), w.shape[1]).double()
    )
    return [
        torch.cat([a @ m.t() + b for a, m, b in zip(xs, w, bias, strict=True)]),
        torch.cat([g @ m for g, m in zip(dys, w, strict=True)]),
        torch.stack([g.t() @ a for g, a in zip(dys, xs, strict=True)]),
        torch.stack([g.sum(0) for g in dys]),
    ]


def close(result: Tensor | None, expected: Tensor, limit: float) -> None:
    assert result is not None
    assert result.shape == expected.shape
    assert (result.double().cpu() - expected).norm() <= limit * expected.norm()


@pytest.mark.cross("counts", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.cross("recipe", ["tensorwise", "rowwise", "blockwise", "bf16"])
@pytest.mark.cross("fp8", ["e4m3", "hybrid"])
def test_results_are_close_to_float64(recipe, fp8, counts) -> None:
    layer = made(GemmChoice.all(recipe), fp8, bias=True)
    limit = 1e-6 if recipe == "bf16" else LIMITS[fp8]  # float32 in, and no 16-bit product on a CPU
    result, expected = ran(layer, counts), exact(layer, counts)
    for one, other in zip(result[:3], expected[:3], strict=True):
        close(one, other, limit)
    close(result[3], expected[3], 1e-6)
    assert result[2] is not None
    assert not result[2][torch.tensor(counts) == 0].any()


def test_products_mix_recipes() -> None:
    layer = made(GemmChoice("rowwise", "bf16", "blockwise"))
    result, expected = ran(layer, [20, 0, 90, 1]), exact(layer, [20, 0, 90, 1])
    close(result[0], expected[0], 0.045)
    close(result[1], expected[1], 1e-6)
    close(result[2], expected[2], 0.045)
    assert (result[2].double() - expected[2]).norm() > 1e-3 * expected[2].norm()  # it was FP8 indeed


def test_an_experts_result_does_not_depend_on_the_others() -> None:
    layer, alone = made(GemmChoice.all("tensorwise")), made(GemmChoice.all("tensorwise"), experts=1)
    with torch.no_grad():
        alone.weight.copy_(layer.weight[2:3])
    x = torch.randn(50, 128) * torch.tensor([1.0, 1000.0]).repeat_interleave(25)[:, None]
    together = layer(x, torch.tensor([0, 0, 25, 25]))
    assert torch.equal(together[:25], alone(x[:25], torch.tensor([25])))


@pytest.mark.skipif(torch.cuda.is_available(), reason="beside a GPU Triton compiles, and takes no tensors of the CPU")
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_triton_products_under_the_interpreter(recipe) -> None:
    pytest.importorskip("triton")
    result = ran(made(GemmChoice.all(recipe), "hybrid", impl="triton"), [1, 0, 20, 3])
    expected = ran(made(GemmChoice.all(recipe), "hybrid", impl="reference"), [1, 0, 20, 3])
    for one, other in zip(result[:3], expected[:3], strict=True):
        close(one, other.double(), 1e-5)


def test_bfloat16_in_and_out() -> None:
    layer = made(GemmChoice.all("rowwise"), dtype=torch.bfloat16)
    result, expected = ran(layer, [4, 9, 0, 2], torch.bfloat16), exact(layer, [4, 9, 0, 2])
    assert [one.dtype for one in result[:3]] == [torch.bfloat16] * 3
    for one, other in zip(result[:3], expected[:3], strict=True):
        close(one, other, 0.05)


def test_weight_casts_are_shared_until_the_weight_changes(monkeypatch) -> None:
    from bitplan.fp8.kernels import experts_products as kernels

    casts = []
    cast = kernels.cast_experts
    monkeypatch.setattr(kernels, "cast_experts", lambda *given, **how: casts.append(how) or cast(*given, **how))
    layer = made(GemmChoice.all("rowwise"))
    first = ran(layer, [4, 4, 4, 4])[0]
    ran(layer, [2, 2, 2, 2], add=True)
    assert casts == [{"rows": True, "cols": True, "guess": None}]  # guesses are for tensorwise casts on a GPU
    with torch.no_grad():
        layer.weight.mul_(2)
    again = ran(layer, [4, 4, 4, 4])[0]
    assert len(casts) == 2
    close(again, 2 * first.double(), 1e-6)
    layer.weight.data.mul_(0.5)  # a write that torch does not count: told by the gradient, which `ran` clears
    close(ran(layer, [4, 4, 4, 4])[0], first.double(), 1e-6)
    layer.weight.data.mul_(2)
    drop_weight_casts(layer)
    close(ran(layer, [4, 4, 4, 4], add=True)[0], 2 * first.double(), 1e-6)
    without = made(GemmChoice.all("rowwise"), reuse_weight_cast=False)
    casts.clear()
    close(ran(without, [4, 4, 4, 4])[0], first.double(), 1e-6)
    assert [(each["rows"], each["cols"]) for each in casts] == [(True, False), (False, True)]


def test_in_a_captured_graph_each_layout_is_cast_once_for_each_forward(monkeypatch) -> None:
    from bitplan.fp8.kernels import experts_products as kernels
    from bitplan.fp8.layers import weight_casts

    casts = []
    cast = kernels.cast_experts
    monkeypatch.setattr(kernels, "cast_experts", lambda *given, **how: casts.append(how) or cast(*given, **how))
    layer = made(GemmChoice.all("rowwise"))
    expected = ran(layer, [4, 4, 4, 4])
    both = [(True, True)]
    assert [(each["rows"], each["cols"]) for each in casts] == both
    with monkeypatch.context() as graph:
        graph.setattr(weight_casts, "_is_capturing", lambda _weight: True)
        for forward in (2, 3):  # each casts anew: a replay cannot check whether the weight changed
            result = ran(layer, [4, 4, 4, 4])
            assert all(torch.equal(one, other) for one, other in zip(result[:3], expected[:3], strict=True))
            assert [(each["rows"], each["cols"]) for each in casts] == forward * both
        layer(torch.zeros(16, 128, requires_grad=True), torch.tensor([4, 4, 4, 4]))  # leaves a cast behind
    ran(layer, [4, 4, 4, 4])
    assert len(casts) == 5  # outside nothing of a graph is read: its memory is the graph's


def test_a_layer_made_on_meta_works_over_a_weight_that_is_there() -> None:
    layer, given = made(GemmChoice.all("rowwise"), device="meta"), made(GemmChoice.all("rowwise"))
    layer.weight = given.weight
    assert torch.equal(ran(layer, [4, 4, 0, 4])[0], ran(given, [4, 4, 0, 4])[0])


def test_frozen_weights_and_inputs_ask_for_nothing() -> None:
    layer = made(GemmChoice.all("blockwise"))
    layer.weight.requires_grad_(False)
    result = ran(layer, [5, 5, 0, 0])
    assert result[2] is None
    close(result[1], exact(layer, [5, 5, 0, 0])[1], 0.045)
    with torch.no_grad():
        close(layer(torch.zeros(3, 128), torch.tensor([1, 1, 1, 0])), torch.zeros(3, 256), 0)


def test_zero_and_nan_inputs() -> None:
    layer = made(GemmChoice.all("tensorwise"))
    x = torch.zeros(6, 128)
    assert not layer(x, torch.tensor([2, 2, 2, 0])).any()
    x[0, 0] = float("inf")
    y = layer(x, torch.tensor([2, 2, 2, 0]))
    assert y[:2].isnan().all()
    assert y[2:].isfinite().all()


def test_wrong_arguments_say_what_is_wrong() -> None:
    layer = made(GemmChoice.all("rowwise"))
    with pytest.raises(
        Fp8LayerError, match=r"rows \[tokens, 128\] sorted by expert, got torch.float32 of shape \(4, 64\)"
    ):
        layer(torch.zeros(4, 64), torch.tensor([4, 0, 0, 0]))
    with pytest.raises(Fp8LayerError, match=r"must have the 4 experts, on cpu, got shape \(3,\)"):
        layer(torch.zeros(4, 128), torch.tensor([4, 0, 0]))
    with pytest.raises(FormatError, match="add up to the 4 rows of x"):
        layer(torch.zeros(4, 128), torch.tensor([4, 1, 0, 0]))
    with pytest.raises(Fp8LayerError, match="blockwise and bf16, got 'mxfp8'"):
        GroupedLinear(2, 128, 128, recipe=Fp8Recipe("mxfp8"))
    with pytest.raises(Fp8LayerError, match="in_features 96 is not a multiple of 128"):
        GroupedLinear(2, 96, 128, recipe=Fp8Recipe("blockwise"))
    with pytest.raises(Fp8LayerError, match="at least one expert"):
        GroupedLinear(0, 128, 128, recipe=Fp8Recipe())


def test_a_compiled_layer_runs_between_graphs() -> None:
    torch._dynamo.reset()
    layer = made(GemmChoice.all("rowwise"))
    expected = ran(layer, [4, 0, 9, 1])
    layer.compile(backend="aot_eager")
    for one, other in zip(ran(layer, [4, 0, 9, 1])[:3], expected[:3], strict=True):
        assert torch.equal(one, other)


def test_check_routing_tells_what_the_device_saw() -> None:
    layer = made(GemmChoice.all("rowwise"))
    layer.check_routing()
    layer.misrouted.fill_(7)
    with pytest.raises(Fp8LayerError, match="7 rows too many, missing or negative"):
        layer.check_routing()
    layer.check_routing()


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [[0, 1, 700, 3], [0, 0, 513, 0], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize(
    ("recipe", "fp8", "impl"),
    [
        ("tensorwise", "e4m3", "torch"),
        ("rowwise", "e4m3", "torch"),
        ("rowwise", "hybrid", "triton"),
        ("tensorwise", "e4m3", "triton"),
        ("tensorwise", "e4m3", "auto"),
        ("rowwise", "hybrid", "auto"),
        ("blockwise", "e4m3", "triton"),
        ("blockwise", "hybrid", "auto"),
        ("bf16", "e4m3", "auto"),
    ],
)
def test_results_on_a_gpu_are_close_to_float64(recipe, fp8, impl, counts) -> None:
    layer = made(GemmChoice.all(recipe), fp8, bias=True, impl=impl, device="cuda", dtype=torch.bfloat16)
    result, expected = ran(layer, counts, torch.bfloat16), exact(layer, counts)
    limit = 0.02 if recipe == "bf16" else LIMITS[fp8] + 0.01
    for one, other in zip(result[:3], expected[:3], strict=True):
        close(one, other, limit)
    layer.check_routing()


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [[0, 1, 700, 3], [0, 0, 513, 0], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize(("recipe", "fp8"), [("tensorwise", "e4m3"), ("rowwise", "hybrid")])
def test_gluon_products_are_close_to_float64(recipe, fp8, counts) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs compute capability 9")
    torch.manual_seed(0)
    of = {"recipe": Fp8Recipe(recipe, fp8=fp8, eps=AmaxEps(1e-12, 1e-12, 1e-12)), "dtype": torch.bfloat16}
    layer = GroupedLinear(4, 256, 512, bias=True, impl="gluon", device="cuda", **of)
    result, expected = ran(layer, counts, torch.bfloat16), exact(layer, counts)
    for one, other in zip(result[:3], expected[:3], strict=True):
        close(one, other, LIMITS[fp8] + 0.01)
    auto = GroupedLinear(4, 256, 512, bias=True, device="cuda", **of)
    auto.load_state_dict(layer.state_dict())
    for one, other in zip(result[:3], ran(auto, counts, torch.bfloat16)[:3], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("in_features", "pad"), [(256, 128), (384, 16)])
def test_rows_are_padded_for_the_product_that_sums_them(in_features, pad, monkeypatch) -> None:
    from bitplan.fp8.kernels import experts_products as kernels

    monkeypatch.setattr(kernels, "capability_of", lambda _: (9, 0))
    monkeypatch.setattr(kernels, "_gluon_lacks", lambda: None)
    layer = GroupedLinear(2, in_features, 256, recipe=Fp8Recipe("rowwise"), device="meta")
    assert layer._pad(torch.device("cuda", 0)) == pad


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
def test_a_forward_and_backward_never_wait_for_the_host(recipe) -> None:
    layer = made(GemmChoice.all(recipe), device="cuda", dtype=torch.bfloat16)
    x = torch.randn(300, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    counts = torch.tensor([100, 0, 200, 0], device="cuda")
    layer(x, counts).sum().backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x, counts).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("fp8", ["e4m3", "hybrid"])
def test_every_cast_goes_by_the_guesses_of_its_weight_and_role(fp8, monkeypatch) -> None:
    from bitplan.fp8.kernels import experts_products as kernels
    from bitplan.fp8.layers import grouped_linear

    monkeypatch.setattr(grouped_linear, "guess_for", lambda *what, **more: (*what, *more.values()))
    given: list[tuple] = []
    for name in ("cast_tokens", "cast_experts"):
        cast = getattr(kernels, name)
        monkeypatch.setattr(
            kernels, name, lambda *args, guess, cast=cast, **how: given.append(guess) or cast(*args, **how)
        )
    layer = made(GemmChoice.all("tensorwise"), fp8)
    ran(layer, [4, 0, 9, 1])
    grad = "e4m3" if fp8 == "e4m3" else "e5m2"
    expected = [("input", "e4m3", 4), ("weight", 4), ("grad", grad, 4)]
    assert [(recipe, *more) for recipe, _, *more in given] == [("tensorwise", *each) for each in expected]
    assert all(weight.data_ptr() == layer.weight.data_ptr() for _, weight, *_ in given)


@pytest.mark.gpu
def test_guesses_of_experts_change_no_bit_and_are_right_from_the_second_step_on() -> None:
    from bitplan.fp8.layers import scale_guesses
    from bitplan.fp8.layers.weight_casts import expire_casts

    scale_guesses._kept.clear()
    layer = made(GemmChoice.all("tensorwise"), device="cuda", dtype=torch.bfloat16)
    fresh = made(GemmChoice.all("tensorwise"), device="cuda", dtype=torch.bfloat16)
    expected = ran(fresh, [100, 0, 200, 3], torch.bfloat16)[:3]
    scale_guesses._kept.clear()
    for _ in range(5):
        expire_casts([layer.weight])
        for one, other in zip(ran(layer, [100, 0, 200, 3], torch.bfloat16)[:3], expected, strict=True):
            assert torch.equal(one, other)
    counts = scale_guesses.guess_counts()
    assert counts == {"input": (15, 3, 3), "weight": (20, 4, 4), "grad": (15, 3, 3)}  # one expert has no tokens


@pytest.mark.gpu
def test_a_graph_of_experts_keeps_its_guesses_from_replay_to_replay() -> None:
    layer = made(GemmChoice.all("tensorwise"), device="cuda", dtype=torch.bfloat16)
    other = made(GemmChoice.all("tensorwise"), device="cuda", dtype=torch.bfloat16, reuse_weight_cast=False)
    x = torch.randn(300, 128, device="cuda", dtype=torch.bfloat16)
    counts = torch.tensor([100, 0, 199, 1], device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        layer(x, counts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        y = layer(x, counts)
    for size, routing in ((1.0, [100, 0, 199, 1]), (64.0, [0, 300, 0, 0]), (64.0, [3, 0, 296, 1]), (1.0, [75] * 4)):
        x.copy_(size * torch.randn_like(x))
        counts.copy_(torch.tensor(routing))
        graph.replay()
        with torch.no_grad():
            assert torch.equal(y, other(x, counts))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")  # captured on one, run on another
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_graph_of_a_step_casts_the_experts_once_and_follows_their_weights(recipe, monkeypatch) -> None:
    from bitplan.fp8.kernels import experts_products as kernels

    layer = made(GemmChoice.all(recipe), device="cuda", dtype=torch.bfloat16)
    other = made(GemmChoice.all(recipe), device="cuda", dtype=torch.bfloat16, reuse_weight_cast=False)
    x = torch.randn(300, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    counts = torch.tensor([100, 0, 199, 1], device="cuda")

    def step(each: GroupedLinear) -> tuple[Tensor, ...]:
        y = each(x, counts)
        return (y, *torch.autograd.grad(y, [x, each.weight], torch.ones_like(y)))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(layer)
    torch.cuda.synchronize()
    casts = []
    cast = kernels.cast_experts
    graph = torch.cuda.CUDAGraph()
    with monkeypatch.context() as counted, torch.cuda.graph(graph):
        counted.setattr(kernels, "cast_experts", lambda *given, **how: casts.append(how) or cast(*given, **how))
        result = step(layer)
    assert [(each["rows"], each["cols"]) for each in casts] == [(True, True)]
    for _ in range(3):
        with torch.no_grad():
            layer.weight.mul_(1.5)
            other.weight.copy_(layer.weight)
        graph.replay()
        for one, expected in zip(result, step(other), strict=True):
            assert torch.equal(one, expected)


@pytest.mark.gpu
def test_wrong_counts_on_a_gpu_are_told_afterwards() -> None:
    layer = made(GemmChoice.all("rowwise"), device="cuda", dtype=torch.bfloat16)
    x = torch.randn(30, 128, device="cuda", dtype=torch.bfloat16)
    layer(x, torch.tensor([30, 30, -5, 0], device="cuda"))
    with pytest.raises(Fp8LayerError, match="did not add up"):
        layer.check_routing()
