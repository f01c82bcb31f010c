"""The registered operators: opcheck, compiled and exported models without a break, and equal numbers in all of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bitplan.base.errors import ArgumentError
from bitplan.packed.crossover import Pick
from bitplan.packed.linear_operator import Matrix
from bitplan.packed.product_strategy import LayerError, text_of, way_at
from bitplan.packed.quant_linear import QuantLinear
from bitplan.packed.tile_cache import TileCache
from tests.packed.linear_samples import normal, packed


def arguments(name: str, strategy: str, dtype: torch.dtype = torch.float32) -> tuple[object, ...]:
    layer = QuantLinear(packed(name, 16, 128), strategy=strategy)
    matrix: Matrix = layer._matrix(Pick(strategy, "asked for"), dtype)
    ways = text_of([(None, Pick(strategy, "asked for"))])
    prepared = (*matrix.prepared, None, None, None)[:3]
    return *matrix[:3], *prepared, matrix.expanded, name, 16, ways, 0, 0


@pytest.mark.parametrize(
    ("name", "strategy"), [("mxfp4", "decode"), pytest.param("int8_g128", "eager", marks=pytest.mark.long)]
)
def test_opcheck(name: str, strategy: str) -> None:
    weight = arguments(name, strategy)
    x, bias = normal(3, 128).requires_grad_(), normal(16, seed=2).requires_grad_()
    torch.library.opcheck(torch.ops.bitplan.packed_linear.default, (x, bias, *weight))
    gradient = (normal(3, 16).requires_grad_(), *weight[:8], 128, *weight[9:])
    torch.library.opcheck(torch.ops.bitplan.packed_input_gradient.default, gradient)


class Model(nn.Module):
    """A packed layer of every strategy that graphs have, one of them twice."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.first = QuantLinear(packed("mxfp4", 64, 128, seed=seed), normal(64), strategy="decode")
        self.second = QuantLinear(packed("nvfp4", 64, 64, seed=seed), strategy="eager")
        self.third = QuantLinear(
            packed("int8_g128", 48, 128, seed=seed), strategy="tile_cache", cache=TileCache(48 * 128 * 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.second(torch.relu(self.first(x))))
        y: Tensor = self.third(torch.cat((hidden, hidden), dim=-1))
        return y


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.long), "aot_eager"])
def test_a_compiled_model_has_no_break_and_gives_the_same_numbers_and_gradients(backend: str) -> None:
    torch._dynamo.reset()
    model = Model()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x = normal(3, 128).requires_grad_()
    expected = model(x)
    (wanted,) = torch.autograd.grad(expected.square().sum(), x)
    y = compiled(x)
    (got,) = torch.autograd.grad(y.square().sum(), x)
    assert torch.equal(y, expected)
    assert torch.equal(got, wanted)
    with torch.no_grad():
        for rows in (1, 4, 9):  # the number of rows becomes a variable of the graph
            x = normal(2, rows, 128)
            assert torch.equal(compiled(x), model(x))


def test_a_compiled_model_sees_another_state_and_another_strategy() -> None:
    torch._dynamo.reset()
    model, x = Model(), normal(3, 128)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        before = compiled(x)
        model.load_state_dict(Model(seed=5).state_dict())
        after = compiled(x)
        assert torch.equal(after, model(x))
        assert not torch.equal(after, before)
        assert model.second.last_pick == Pick("eager", "asked for")
        model.second.strategy = "decode"
        torch.testing.assert_close(compiled(x), after)


@pytest.mark.long
def test_inductor_compiles_it() -> None:
    torch._dynamo.reset()
    model, x = Model(), normal(3, 128)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, fullgraph=True)(x), model(x), rtol=1e-5, atol=1e-5)


def test_an_exported_model_gives_the_same_numbers_for_any_number_of_rows() -> None:
    model, x = Model(), normal(3, 128)
    with pytest.raises(LayerError, match="run the model once with such an input, then export it"):
        torch.export.export(model, (x,))
    with torch.no_grad():
        model(x)
        model.third.strategy = "decode"  # a graph pins tiles when it is compiled, and an export is not
        rows = torch.export.Dim("rows", min=2, max=64)
        exported = torch.export.export(model, (x,), dynamic_shapes={"x": {0: rows}}).module()
        for count in (2, 7):
            x = normal(count, 128)
            assert torch.equal(exported(x), model(x))


def test_autocast_in_a_graph_casts_as_outside() -> None:
    torch._dynamo.reset()
    model, x = Model(), normal(3, 128)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        y = torch.compile(model, backend="eager", fullgraph=True)(x)
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, model(x))


def test_a_model_in_a_graph_still_moves_casts_and_saves() -> None:
    torch._dynamo.reset()
    model, x = Model(), normal(3, 128)
    with torch.no_grad():
        torch.compile(model, backend="eager", fullgraph=True)(x)
    assert model.second.graph.expanded is not None
    assert not any("graph" in name for name in model.state_dict())
    model.bfloat16()
    assert model.second.graph.expanded is None


def test_a_tile_in_a_graph_is_pinned_and_counted() -> None:
    torch._dynamo.reset()
    cache = TileCache(48 * 256 * 4)
    layers = [QuantLinear(packed("mxfp4", seed=seed), strategy="tile_cache", cache=cache) for seed in (0, 1)]
    x = normal(2, 256)
    with torch.no_grad():
        assert torch.equal(torch.compile(layers[0], backend="eager", fullgraph=True)(x), layers[0](x))
        assert cache.counters.nbytes == 48 * 256 * 4
        with pytest.raises(RuntimeError, match="no room for it"):  # torch puts the place in front of it
            torch.compile(layers[1], backend="eager", fullgraph=True)(x)
        cache.clear()
        assert cache.counters.nbytes == 48 * 256 * 4
        layers[0].weight.forget()
        assert cache.counters.nbytes == 0


def test_ways_are_text_and_back() -> None:
    launch = {"outputs": 32, "rows": 8}
    text = text_of([(1, Pick("fused", "measured", launch)), (64, Pick("fused", "")), (None, Pick("decode", ""))])
    assert text == "1:fused outputs=32 rows=8;64:fused;*:decode"
    assert [way_at(text, rows) for rows in (1, 2, 65)] == [
        ("fused", launch, None),
        ("fused", None, None),
        ("decode", None, None),
    ]
    rounded = text_of([(None, Pick("fused", "", {"rows": 8}))], "q8_0_gguf")
    assert rounded == "*:fused input=q8_0_gguf rows=8"
    assert way_at(rounded, 3) == ("fused", {"rows": 8}, "q8_0_gguf")
    with pytest.raises(ArgumentError, match="nothing of 9 rows"):
        way_at("8:decode", 9)
    with pytest.raises(ArgumentError, match="expected ROWS:STRATEGY"):
        way_at("8:fused outputs", 9)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch captures one to begin with
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_on_a_gpu_compiled_captured_and_eager_agree(mode: str) -> None:
    torch._dynamo.reset()
    names = ("mxfp4", "nvfp4", "int8_g128", "fp8_e4m3_row")
    layers = [QuantLinear(packed(name, 256, 256), strategy="fused") for name in names]
    model, x = nn.Sequential(*layers).cuda(), normal(2, 256).cuda().bfloat16()
    with torch.no_grad():
        expected = model(x)
        for _ in range(3):  # the second time by the bound call
            assert torch.equal(model(x), expected)
        compiled = torch.compile(model, mode=mode, fullgraph=True)
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(compiled(x), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(x)
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, expected)
