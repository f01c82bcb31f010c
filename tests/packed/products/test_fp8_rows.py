"""Products in FP8: codes and scales of rows are exact, results within their bound, and what is not exact is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitplan.formats import Encoded
from bitplan.formats.codec import decode, encode
from bitplan.formats.dispatch import rounded
from bitplan.formats.input_formats import INPUT_FORMATS, STATIC, round_input, token_codes
from bitplan.packed.fused_projections import JointProjection
from bitplan.packed.product_strategy import LayerError
from bitplan.packed.products import fp8_rows
from bitplan.packed.products.cpu_fused import FusedOnCpu, RoundedFirst
from bitplan.packed.products.fp8_rows import FORMATS, FP8_INPUT, SHIFT, WIDEST_SPAN, weight_rows, why_inexact
from bitplan.packed.quant_linear import QuantLinear
from tests.packed.linear_samples import exact_linear, normal, packed


@pytest.fixture
def has_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's CPU counts as a GPU with FP8 units; torch's product of scaled rows runs on both."""
    monkeypatch.setattr(fp8_rows, "_why_not_here", lambda _: None)


def of_spans(span: int, blocks: int = 5) -> Encoded:
    """mxfp4 with every code in every block; a row's scales lie up to 2^span apart, and one block is of zeros."""
    codes = torch.arange(16).repeat(2).repeat(blocks).repeat(16, 1)
    scales = torch.full((16, blocks), 120, dtype=torch.uint8)
    scales[1:, -1] = 120 - span
    scales[:, 0] = 0
    codes[:, :32] = 0
    data = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    return Encoded(encode(torch.zeros(1, 32), "mxfp4").fmt, (16, 32 * blocks), data, scales)


@pytest.mark.parametrize("span", [0, 7, WIDEST_SPAN])
def test_mxfp4_is_e4m3_times_a_scale_for_each_row(span: int) -> None:
    weight = of_spans(span)
    assert why_inexact(weight) is None
    codes, scales = weight_rows(weight)
    assert codes.dtype == torch.float8_e4m3fn
    assert torch.equal(codes.float() * scales, decode(weight))


def test_rows_that_span_more_are_refused_by_name() -> None:
    assert why_inexact(of_spans(WIDEST_SPAN + 1)) == "a row's scales span 2^15, more than E4M3's 2^14"
    broken = of_spans(0)
    assert broken.scales is not None
    broken.scales[3, 2] = 255
    assert why_inexact(broken) == "a scale is not a number"
    smallest = of_spans(0)
    assert smallest.scales is not None
    smallest.scales[:] = 0  # 2^-127: below the smallest normal scale of a row
    assert why_inexact(smallest) is None
    codes, scales = weight_rows(smallest)
    assert torch.equal(codes.float() * scales, decode(smallest))


@pytest.mark.parametrize("blocks", [1, 5, 130])
def test_the_kernel_gives_the_same_bits(blocks: int) -> None:
    pytest.importorskip("triton")
    from bitplan.packed.products.triton_fp8_rows import rows_of_mxfp4

    weight = of_spans(9, blocks)
    assert weight.scales is not None
    codes, scales = rows_of_mxfp4(weight.data, weight.scales, SHIFT)
    expected = weight_rows(weight)
    assert torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(scales, expected[1])


def assert_within_bound(y: Tensor, x: Tensor, weight: Encoded, bias: Tensor | None) -> None:
    """As `fp8_rows` says: sums of 14 bits, and one or two roundings to bfloat16."""
    expected, size = exact_linear(round_input(x.float(), FP8_INPUT), weight, bias)
    bound = weight.shape[1] / 32 * 2.0**-13 * size + 2 * 2.0**-8 * (expected.abs() + size * 2.0**-8)
    assert bool(((y.detach().cpu().double() - expected).abs() <= bound).all())


@pytest.mark.usefixtures("has_fp8")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16])
def test_a_layer_multiplies_in_fp8(name: str, bias: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    one, x = packed(name, 48, 256), (8 * normal(2, 9, 256)).bfloat16()
    added = None if bias is None else normal(48, seed=3).to(bias)
    layer = QuantLinear(one, added, strategy="fp8", inputs="fp8")
    with torch.no_grad():
        first = layer(x)
        assert_within_bound(first, x, one, added)
        monkeypatch.setattr(layer, "_forward", None)  # the next calls are bound
        assert torch.equal(layer(x), first)
        assert torch.equal(layer(x.flatten(0, 1)[:17]), first.flatten(0, 1)[:17])
    monkeypatch.undo()


@pytest.mark.usefixtures("has_fp8")
def test_gradients_pass_and_rounding_counts_as_no_change() -> None:
    layer = QuantLinear(packed("mxfp4", 48, 256), normal(48), strategy="fp8", inputs="fp8")
    x = normal(5, 256).bfloat16().requires_grad_()
    y = layer(x)
    grad = normal(5, 48, seed=2).bfloat16()
    y.backward(grad)
    exact = grad.float() @ decode(layer.weight.encoded)
    assert x.grad is not None
    assert (x.grad.float() - exact).norm() <= 2.0**-7 * exact.norm()
    with torch.no_grad():
        assert torch.equal(layer(x), y)


@pytest.mark.usefixtures("has_fp8")
def test_numbers_that_fit_no_longer_are_seen() -> None:
    layer, x = QuantLinear(of_spans(0), strategy="fp8", inputs="fp8"), normal(3, 160).bfloat16()
    with torch.no_grad():
        layer(x)
        layer.weight.scales[2, 1] = 120 - WIDEST_SPAN - 1
        with pytest.raises(LayerError, match="a row's scales span 2"):
            layer(x)


@pytest.mark.parametrize(
    ("name", "given", "shape", "dtype", "expected"),
    [
        ("mxfp4", None, (48, 256), torch.bfloat16, "its inputs are not rounded, and must be in fp8_e4m3_row"),
        ("mxfp4", "int8_row", (48, 256), torch.bfloat16, "its inputs are in int8_row, and must be in fp8_e4m3_row"),
        ("int4_g32", "fp8", (48, 256), torch.bfloat16, "int4_g32 is not E4M3 times a scale for each row"),
        ("mxfp4", "fp8", (48, 256), torch.float32, "FP8 products give bfloat16, the input is torch.float32"),
        ("mxfp4", "fp8", (40, 256), torch.bfloat16, "multiples of 16, got shape (40, 256)"),
        ("mxfp4", "fp8", (48, 240), torch.bfloat16, "rows of whole blocks, and multiples of 16, got shape (48, 240)"),
        ("mxfp4", "fp8", (48, 256), torch.bfloat16, "FP8 products run on NVIDIA's GPUs, the weight lies on cpu"),
    ],
)
def test_what_cannot_run_in_fp8_is_refused_by_name(
    name: str, given: str | None, shape: tuple[int, int], dtype: torch.dtype, expected: str
) -> None:
    layer = QuantLinear(packed(name, *shape), strategy="fp8", inputs=given, name="up")
    with pytest.raises(LayerError) as refused:
        layer(normal(3, shape[1]).to(dtype))
    assert str(refused.value).startswith(f"up: strategy 'fp8' cannot run for {name} of shape {shape} on cpu: ")
    assert expected in str(refused.value)
    assert "strategy='auto'" in str(refused.value)


@pytest.mark.usefixtures("has_fp8")
@pytest.mark.parametrize("name", FORMATS)
def test_joined_layers_cast_their_input_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [
        QuantLinear(packed(name, rows, 256, seed=rows), strategy="fp8", inputs="fp8", name=f"{rows}")
        for rows in (48, 16)
    ]
    x = normal(40, 256).bfloat16()
    with torch.no_grad():
        apart = [layer(x) for layer in layers]
        JointProjection(layers, "both")
        casts: list[Tensor] = []

        def counted(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
            casts.append(x)
            return token_codes(x, name)

        monkeypatch.setattr(fp8_rows, "token_codes", counted)
        for _ in range(2):
            for layer, expected in zip(layers, apart, strict=True):
                assert torch.equal(layer(x), expected)
    assert len(casts) == 2


def test_a_bound_call_rounds_its_inputs() -> None:
    kernel, weight = RoundedFirst(FusedOnCpu(), FP8_INPUT), packed("mxfp4", 48, 256)
    x = normal(3, 256).bfloat16()
    prepared = kernel.prepare(weight)
    if kernel.why_not(weight, x.dtype) is not None:
        pytest.skip("no fused kernel for this CPU")
    bound = kernel.bind(x, weight, prepared, None, None)
    assert bound is not None
    assert torch.equal(bound(x, (3, 48)), kernel.run(x, weight, prepared, None, None))


# ---- compiled --------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A norm before a product in FP8, and an activation before one that reads packed bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(256, dtype=torch.bfloat16)
        self.up = QuantLinear(packed("mxfp4", 256, 256), strategy="fp8", inputs="fp8")
        self.down = QuantLinear(packed("int8_row", 256, 256), normal(256), strategy="decode", inputs="int8_row")
        self.out = QuantLinear(packed("fp8_e4m3_row", 64, 256), normal(64).bfloat16(), strategy="fp8", inputs="fp8")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.down(nn.functional.silu(self.up(self.norm(x)))))
        return y


@pytest.mark.long
@pytest.mark.usefixtures("has_fp8")
def test_the_compiler_joins_casts_with_what_comes_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code for a GPU, run on this machine's CPU."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor
    from torch._inductor.utils import run_and_get_code

    from bitplan.packed import inductor_lowering

    monkeypatch.setattr(inductor_lowering, "_is_on_gpu", lambda _: True)
    torch._dynamo.reset()
    model, x = Block(), normal(2, 9, 256).bfloat16()
    with torch.no_grad(), inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        expected = model(x)
        y, parts = run_and_get_code(torch.compile(model, fullgraph=True), x)
        code = "\n".join(parts)
    torch._dynamo.reset()
    assert (y - expected).float().norm() <= 0.03 * expected.float().norm()  # numbers between kernels are not rounded
    assert code.count("extern_kernels._scaled_mm(") == 2
    assert code.count("bitplan_functions['e4m3_rows']") == 1
    assert code.count("bitplan_calls[('decode', 'int8_row'") == 1
    assert "input=" not in code.replace("assert_size_stride", "")
    assert code.count("async_compile.cpp_pybinding(") <= 5  # casts with what is before them, sums with biases, a bias


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 17, 300, 2048])
def test_on_a_gpu_results_lie_within_the_bound(name: str, rows: int) -> None:
    one, x = packed(name, 160, 4096), (8 * normal(rows, 4096)).bfloat16()
    layer: Any = QuantLinear(one, strategy="fp8", inputs="fp8").cuda()
    with torch.no_grad():
        first = layer(x.cuda())
        assert_within_bound(first, x, one, None)
        assert torch.equal(layer(x.cuda()), first)
        compiled = torch.compile(layer, fullgraph=True)(x.cuda())
        assert_within_bound(compiled, x, one, None)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in INPUT_FORMATS if name != STATIC])
def test_on_a_gpu_inputs_are_rounded_to_the_same_numbers(name: str) -> None:
    x = (3 * normal(2, 7, 512)).bfloat16().cuda()
    x[0, 0] = 0
    assert torch.equal(rounded(x, name, x.dtype), round_input(x, name))
