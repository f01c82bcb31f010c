"""Products of whole numbers on a CPU against their definition, on the instructions of this CPU and of smaller ones."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import bitplan
from bitplan.formats import Encoded
from bitplan.formats.gguf.blocks import GgufBlocks
from bitplan.formats.input_formats import round_input
from bitplan.packed.products.cpu_fused import BLOCKS, INTEGER_INPUTS, MOST_DIRECT, OF_INTEGERS, IntegersOnCpu
from bitplan.packed.quant_linear import QuantLinear
from tests.packed.linear_samples import pack
from tests.packed.products.test_cpu_fused import any_blocks

UNIT = 2.0**-24
AVX2 = "+avx,+avx2,+fma,+f16c,+ssse3,+sse4.1,+sse4.2,+bmi,+bmi2,+popcnt,+movbe,+lzcnt"
SMALLER_CPUS = {"haswell": AVX2, "skylake-avx512": f"{AVX2},+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512cd"}


def assert_is_the_definition(layer: QuantLinear, x: torch.Tensor, calls: int = 1) -> None:
    """Within the bound that `cpu_fused` states; all calls but the first are bound."""
    rounded = round_input(x, layer.inputs or "", torch.float32).double()
    weight = bitplan.decode(layer.weight.encoded).double()
    bias = 0.0 if layer.bias is None else layer.bias.detach().double()
    expected, size = rounded @ weight.T + bias, rounded.abs() @ _summed(layer.weight.encoded, weight).T
    bound = (x.shape[-1] + 4) * UNIT * size + 4 * UNIT * expected.abs()
    for _ in range(calls):
        assert ((layer(x).double() - expected).abs() <= bound).all()


def _summed(encoded: Encoded, weight: torch.Tensor) -> torch.Tensor:
    """The magnitudes of what is summed for each weight: minima are summed by themselves."""
    lows = None
    if isinstance(encoded.fmt, GgufBlocks):
        layout = encoded.fmt.layout
        lows = layout.scales_in(encoded.data.reshape(-1, layout.block_bytes))[1]
    if lows is None:
        return weight.abs()
    low = lows.double().reshape(len(weight), -1).repeat_interleave(layout.group, 1)[:, : weight.shape[1]]
    return (weight - low).abs() + low.abs()


@pytest.mark.parametrize("inputs", INTEGER_INPUTS)
@pytest.mark.parametrize("fmt", OF_INTEGERS)
def test_products_are_the_definition(fmt: str, inputs: str) -> None:
    for width in (128, 224, 576):
        weight = torch.randn(37, width)
        layer = QuantLinear(pack(weight, fmt), torch.randn(37), inputs=inputs, strategy="fused")
        for rows in (1, 3, MOST_DIRECT, MOST_DIRECT + 1, 15, 29):
            x = torch.randn(rows, width) * torch.logspace(-3, 2, rows).unsqueeze(1)
            x[0, 5] = 40.0
            with torch.no_grad():
                assert_is_the_definition(layer, x, calls=2)
        assert layer.last_pick is not None
        assert "sums whole numbers" in layer.last_pick.reason


def test_every_pair_of_codes_is_multiplied_exactly() -> None:
    """All weights of 8 bits times all inputs of 8 bits: nothing saturates in 16 bits."""
    codes = torch.arange(-127, 128).float()
    weight, x = torch.zeros(255, 64), torch.full((255, 64), 127.0)
    weight[:, :32], x[:, :32] = codes.unsqueeze(1), codes.unsqueeze(1)
    weight[:, 63] = 127.0
    x[:, 32:63] = 0
    layer = QuantLinear(bitplan.encode(weight, "int8_row"), inputs="int8_row", strategy="fused")
    expected = 32 * codes.unsqueeze(1) * codes + 127 * 127
    with torch.no_grad():
        assert torch.equal(layer(x), expected)
        assert torch.equal(torch.cat([layer(row.unsqueeze(0)) for row in x]), expected)


@pytest.mark.parametrize("inputs", INTEGER_INPUTS)
def test_inputs_of_other_products_are_rounded_to_the_bit(inputs: str) -> None:
    for rows, width in ((1, 32), (9, 100), (700, 512)):
        x = torch.randn(rows, width) * torch.logspace(-30, 3, rows).unsqueeze(1)
        assert torch.equal(IntegersOnCpu(inputs)._rounded(x), round_input(x, inputs))


@pytest.mark.parametrize("fmt", [fmt for fmt in BLOCKS if fmt in OF_INTEGERS])
def test_any_bytes_of_gguf_s_blocks_are_multiplied_without_overflow(fmt: str) -> None:
    few = any_blocks(fmt)
    layer = QuantLinear(Encoded(few.fmt, (24, 512), few.data.repeat(4, 1)), inputs="int8_row", strategy="fused")
    signs = torch.where(torch.rand(9, 512) < 0.5, -127.0, 127.0)
    with torch.no_grad():
        for x in (torch.full((1, 512), 127.0), -torch.full((1, 512), 127.0), signs[:2], signs, torch.randn(1, 512)):
            assert_is_the_definition(layer, x)
    assert "for up to 2 rows" not in layer.explain(9).reason  # more are not multiplied in float32


@pytest.mark.parametrize("rows", [1, 12])
@pytest.mark.parametrize("inputs", INTEGER_INPUTS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_gives_no_finite_result(rows: int, inputs: str, bad: float) -> None:
    layer = QuantLinear(bitplan.encode(torch.randn(32, 256), "q4_0_gguf"), inputs=inputs)
    x = torch.randn(rows, 256)
    x[-1, 200] = bad
    with torch.no_grad():
        y = layer(x)
    assert not y[-1].isfinite().any()
    assert y[:-1].isfinite().all()


def test_numbers_before_and_after_the_inputs_are_not_read_as_inputs() -> None:
    layer = QuantLinear(bitplan.encode(torch.randn(33, 100), "int4_g32", pad="zero"), inputs="int8")
    around = torch.full((40, 100), torch.nan)
    for rows in (1, 13):
        around[4 : 4 + rows] = torch.randn(rows, 100)
        with torch.no_grad():
            assert_is_the_definition(layer, around[4 : 4 + rows])


@pytest.mark.parametrize("fmt", ["nvfp4", "fp8_e4m3_row", "q4_0_poly"])
def test_other_formats_round_their_inputs_first(fmt: str) -> None:
    layer = QuantLinear(bitplan.encode(torch.randn(16, 256), fmt), inputs="int8")
    with torch.no_grad():
        assert_is_the_definition(layer, torch.randn(3, 256))
    kernel = IntegersOnCpu("q8_0_gguf")
    assert kernel.why_no_integers(layer.weight.encoded) == (
        f"{fmt} has no integer kernel; {', '.join(OF_INTEGERS)} have"
    )


@pytest.mark.parametrize("strategy", ["auto", "eager", "decode", "fused"])
@pytest.mark.parametrize("inputs", ["int8", "int8_row", "fp8"])
def test_every_strategy_rounds(strategy: str, inputs: str) -> None:
    layer = QuantLinear(bitplan.encode(torch.randn(16, 128), "int8_row"), inputs=inputs, strategy=strategy)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(2, 3, 128, dtype=dtype)
        expected = round_input(x, layer.inputs or "", torch.float32) @ bitplan.decode(layer.weight.encoded).T
        with torch.no_grad():
            for _ in range(2):
                y = layer(x)
                assert y.dtype == dtype
                torch.testing.assert_close(
                    y, expected.to(dtype), rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-4
                )


def test_gradients_pass_as_if_inputs_were_not_rounded() -> None:
    layer = QuantLinear(bitplan.encode(torch.randn(16, 128), "int8_row"), inputs="int8")
    x = torch.randn(4, 128, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, bitplan.decode(layer.weight.encoded).sum(0).expand(4, -1))


def test_the_format_of_inputs_is_set_and_unset() -> None:
    layer = QuantLinear.from_linear(nn.Linear(128, 32), "int8_row")
    x = torch.randn(2, 128)
    with torch.no_grad():
        kept = layer(x)
        layer.inputs = "int8"
        assert "inputs=q8_0_gguf" in repr(layer)
        assert not torch.equal(layer(x), kept)
        layer.inputs = "keep"
        assert torch.equal(layer(x), kept)


@pytest.mark.long
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="names of x86 CPUs")
@pytest.mark.parametrize("cpu", SMALLER_CPUS)
def test_smaller_cpus_give_the_same(cpu: str, tmp_path: object) -> None:
    env = os.environ | {
        "NUMBA_CPU_NAME": cpu,
        "NUMBA_CPU_FEATURES": SMALLER_CPUS[cpu],
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    chosen = [
        f"{__file__}::test_products_are_the_definition",
        f"{__file__}::{test_any_bytes_of_gguf_s_blocks_are_multiplied_without_overflow.__name__}",
        f"{__file__}::{test_every_pair_of_codes_is_multiplied_exactly.__name__}",
    ]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", *chosen]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


def test_compiled_graphs_round_inputs_as_well() -> None:
    layer = QuantLinear(bitplan.encode(torch.randn(32, 128), "q4_0_gguf"), inputs="int8")
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for rows in (1, 9):
            x = torch.randn(rows, 128)
            assert torch.equal(compiled(x), layer(x))
        layer.inputs = "keep"
        assert torch.equal(compiled(x), layer(x))
