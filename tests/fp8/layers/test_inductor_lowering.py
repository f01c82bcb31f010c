"""Code that torch.compile generates calls FP8 operators' functions directly, and computes what eager mode does."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitplan.base.compiled_code import FUNCTIONS
from bitplan.fp8.layer_settings import Fp8Recipe, GemmChoice
from bitplan.fp8.layers import joined_mlp, linear_function
from bitplan.fp8.layers.linear import Fp8Linear, Fp8NormLinear

RECIPES = ["tensorwise", pytest.param("blockwise", marks=pytest.mark.long)]


@pytest.fixture
def fresh() -> Iterator[None]:
    """No graph and no generated code of earlier tests."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    torch._dynamo.reset()
    with inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()


class Layers(nn.Module):
    def __init__(self, recipe: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        made: Any = {"recipe": Fp8Recipe(recipe), "bias": False, "dtype": torch.bfloat16}
        self.first, self.second = Fp8NormLinear(128, 256, **made), Fp8Linear(256, 128, **made)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x))
        return y


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], torch.ones_like(y))]


@pytest.mark.usefixtures("fresh")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own
@pytest.mark.parametrize("recipe", RECIPES)
def test_generated_code_calls_the_functions(recipe: str) -> None:
    from torch._inductor.utils import run_and_get_code

    model = Layers(recipe)
    x = torch.randn(2, 64, 128, dtype=torch.bfloat16, requires_grad=True)
    compiled = copy.deepcopy(model)
    compiled.compile(fullgraph=True)
    made, code = run_and_get_code(gradients, compiled, x)
    text = "\n".join(code)
    for name in ("norm_linear_forward", "norm_linear_backward"):
        assert f"bitplan_functions['fp8_{name}'](" in text
    assert "torch.ops.bitplan" not in "\n".join(line for line in text.splitlines() if not line.strip().startswith("#"))
    for one, other in zip(gradients(model, x), made, strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("fresh")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own
def test_a_transposed_input_is_kept_as_the_compiler_was_told() -> None:
    torch.manual_seed(0)
    gemms = GemmChoice("tensorwise", "tensorwise", "bf16")  # x itself is kept for the weight's gradient
    layer = Fp8NormLinear(128, 64, recipe=Fp8Recipe("tensorwise"), gemms=gemms, bias=False, dtype=torch.bfloat16)
    x = torch.randn(128, 32, dtype=torch.bfloat16).t().requires_grad_()
    compiled = copy.deepcopy(layer)
    compiled.compile(fullgraph=True)
    for one, other in zip(gradients(layer, x), gradients(compiled, x), strict=True):
        assert torch.equal(one, other)


def test_every_operator_has_a_function_and_is_bound() -> None:
    pytest.importorskip("triton")
    from bitplan.fp8.layers.bound_operators import BINDERS

    assert {name for name in FUNCTIONS if name.startswith("fp8_")} == set(BINDERS)


def test_operators_keep_torchs_rules() -> None:
    layers = Layers("tensorwise")
    settings = layers.first._text, layers.second._text
    x, norm = torch.randn(32, 64).bfloat16(), torch.ones(64, dtype=torch.bfloat16)
    first, down = torch.randn(128, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    checks: Any = {"test_utils": ("test_autograd_registration", "test_faketensor")}  # others multiply FP8 numbers
    bias, down_bias = torch.randn(128).bfloat16(), torch.randn(64).bfloat16()
    for of_norm, function, of_first, biases in (
        ((norm, None), "silu_gated", down, (None, None)),
        ((norm, norm), "gelu", torch.randn(64, 128).bfloat16(), (bias, down_bias)),
        ((None, None), "relu", torch.randn(64, 128).bfloat16(), (bias, None)),
    ):
        texts = (settings[0] if of_norm[0] is not None else settings[1], settings[1], function)
        given = (x, *of_norm, first, biases[0], of_first, biases[1], *texts, True, True, True, True, True)
        torch.library.opcheck(joined_mlp.forward_op, given, **checks)
        _, *kept = joined_mlp.forward_op(*given)
        wanted = (True, True, biases[0] is not None, True, True)
        backward = (x, x, *of_norm, first, biases[0], of_first, *kept, *texts, *wanted)
        torch.library.opcheck(joined_mlp.backward_op, backward, **checks)
    torch.library.opcheck(
        linear_function.forward_op, (x, None, None, down, None, settings[1], True, True, True), **checks
    )
