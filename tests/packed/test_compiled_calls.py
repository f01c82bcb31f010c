"""What compiled graphs call: the same numbers as the operators, for every device that this machine has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitplan.formats.dispatch import decode
from bitplan.packed import compiled_calls
from bitplan.packed.compiled_calls import CALLS
from bitplan.packed.quant_linear import QuantLinear
from tests.packed.linear_samples import normal, packed

FORMATS = ("mxfp4", "nvfp4", "int8_g128")


@pytest.fixture
def fresh() -> Iterator[None]:
    """No graph and no generated code of earlier tests."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    torch._dynamo.reset()
    with inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()


def code_of(model: nn.Module, x: Tensor, **options: Any) -> tuple[Tensor, str]:
    from torch._inductor.utils import run_and_get_code

    y, code = run_and_get_code(torch.compile(model, fullgraph=True, **options), x)
    return y, "\n".join(code)


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_decoded_into_given_memory(name: str) -> None:
    encoded = packed(name, 512, 256)
    base = [] if encoded.base is None else [encoded.base]
    call = CALLS["decode", name, 512, 256, "bfloat16", "base" if base else ""]
    out = torch.empty((512, 256), dtype=torch.bfloat16)
    call(encoded.data, encoded.scales, *base, out=out)
    assert torch.equal(out, decode(encoded, torch.bfloat16))


@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16])
def test_a_fused_product_is_written_into_given_memory(bias: torch.dtype | None) -> None:
    made = None if bias is None else normal(512).to(bias)
    layer = QuantLinear(packed("nvfp4", 512, 256), made, strategy="fused")
    x = normal(3, 256).bfloat16()
    with torch.no_grad():
        expected = layer(x)
        weight = layer.weight.encoded
        assert layer.last_pick is not None
        (arranged,) = layer._matrix(layer.last_pick, torch.bfloat16).prepared
        given = [*([] if layer.bias is None else [("bias", layer.bias)]), ("base", weight.base)]
        types = (str(arranged.dtype), 1, str(bias))
        call = CALLS["fused", "nvfp4", 512, 256, 3, types, " ".join(name for name, _ in given), "*:fused"]
        out = torch.empty_like(expected)
        unread = torch.zeros(1)
        call(x, weight.data, weight.scales, arranged, unread, unread, *(part for _, part in given), out=out)
    assert torch.equal(out, expected)


def test_a_call_of_a_kind_that_is_not_known_is_refused() -> None:
    with pytest.raises(KeyError, match="squared"):
        CALLS["squared", "mxfp4"]


class Layers(nn.Module):
    """Each strategy that graphs have, with biases and without."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.layers = nn.Sequential(
            QuantLinear(packed("mxfp4", 512, 256), normal(512), strategy="decode"),
            QuantLinear(packed("nvfp4", 256, 512), strategy="eager"),
            QuantLinear(packed("int8_g128", 512, 256), normal(512, seed=1), strategy="eager"),
            QuantLinear(packed("nvfp4", 256, 512), strategy="decode"),
            QuantLinear(packed("mxfp4", 512, 256), normal(512, seed=2), strategy="fused"),
        ).to(device)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


@pytest.mark.long
@pytest.mark.usefixtures("fresh")
def test_inductor_calls_products_past_the_dispatcher() -> None:
    model, x = Layers(), normal(3, 256)
    with torch.no_grad():
        y, code = code_of(model, x)
        assert torch.equal(y, model(x))
        assert "torch.ops.bitplan" not in code.replace("'torch.ops.bitplan.packed_linear.default'", "")
        assert code.count("bitplan_calls[('linear', ") == 5
        y, code = code_of(model, normal(7, 256), dynamic=True)  # any number of rows
        assert torch.equal(y, model(normal(7, 256)))
        assert code.count("bitplan_calls[('linear', ") == 5


@pytest.mark.long
@pytest.mark.usefixtures("fresh")
def test_products_with_gradients_are_called_past_the_dispatcher() -> None:
    model, x = Layers(), normal(3, 256).requires_grad_()
    y, code = code_of(model, x)
    y.square().sum().backward()
    compiled, x.grad = x.grad, None
    biases = [layer.bias.grad for layer in model.layers if isinstance(layer, QuantLinear) and layer.bias is not None]
    model.zero_grad()
    model(x).square().sum().backward()
    expected = [layer.bias.grad for layer in model.layers if isinstance(layer, QuantLinear) and layer.bias is not None]
    assert code.count("bitplan_calls[('linear', ") == 5
    assert x.grad is not None
    torch.testing.assert_close([compiled, *biases], [x.grad, *expected], rtol=1e-5, atol=1e-4)


@pytest.mark.long
@pytest.mark.usefixtures("fresh")
def test_on_a_gpu_the_compiler_plans_memory_and_products_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code for a GPU, run on this machine's CPU by the slower paths of the calls."""
    import torch._inductor.compile_fx  # lowerings are for a compiler that is loaded

    from bitplan.packed import inductor_lowering

    monkeypatch.setattr(inductor_lowering, "_is_on_gpu", lambda _: True)
    model, x = Layers(), normal(3, 256)
    with torch.no_grad():
        expected = model(x)
        y, code = code_of(model, x)
        assert (y - expected).norm() <= 1e-5 * expected.norm()
        assert code.count("bitplan_calls[('decode', ") == 2
        assert code.count("extern_kernels.mm(") + code.count("extern_kernels.addmm(") == 4
    x = x.requires_grad_()
    y = torch.compile(model, fullgraph=True)(x)
    y.sum().backward()
    compiled, x.grad = x.grad, None
    model(x).sum().backward()
    assert compiled is not None
    assert x.grad is not None
    assert (compiled - x.grad).norm() <= 1e-5 * x.grad.norm()


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("rows", [1, 40, 300])
def test_on_a_gpu_bound_calls_give_the_same_numbers(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = ("decode", "fused") if rows <= 64 else ("decode", "eager")
    layers = [
        QuantLinear(packed(name, 256, 256, seed=seed), normal(256) if seed else None, strategy=way)
        for seed, name in enumerate((*FORMATS, "int4_g32", "fp8_e4m3_row", "int8_row"))
        for way in ways
    ]
    model, x = nn.Sequential(*layers).cuda(), normal(rows, 256).cuda().bfloat16()
    with torch.no_grad():
        expected = model(x)
        compiled = torch.compile(model, fullgraph=True)
        torch.testing.assert_close(compiled(x), expected, rtol=0.02, atol=0.02)
        first = compiled(x)
        monkeypatch.setattr(compiled_calls, "multiply", None)  # calls after the first ones are bound
        assert torch.equal(compiled(x), first)
    x = x.requires_grad_()
    monkeypatch.undo()
    compiled(x).float().square().sum().backward()
    found, x.grad = x.grad, None
    model(x).float().square().sum().backward()
    assert found is not None
    assert x.grad is not None
    assert (found - x.grad).norm() <= 0.02 * x.grad.norm()


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh")
def test_on_a_gpu_a_graph_holds_few_decoded_matrices_at_a_time() -> None:
    layers = [QuantLinear(packed("mxfp4", 2048, 2048, seed=seed), strategy="decode") for seed in range(6)]
    model, x = nn.Sequential(*layers).cuda(), normal(64, 2048).cuda().bfloat16()
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True)
        expected = compiled(x)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        assert torch.equal(compiled(x), expected)
        matrix = 2048 * 2048 * 2
        assert torch.cuda.max_memory_allocated() - before <= 1.5 * matrix


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh")
def test_on_a_gpu_products_of_many_rows_are_not_bound_and_right() -> None:
    layer = QuantLinear(packed("int8_g128", 256, 256), strategy="fused").cuda()
    x = normal(64, 256).cuda().bfloat16()
    with torch.no_grad():
        expected = layer(x)
        compiled = torch.compile(layer, fullgraph=True)
        for _ in range(3):
            assert torch.equal(compiled(x), expected)
