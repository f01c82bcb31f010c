"""The CPU's fused products against decoded weights in float64: every format, odd sizes, threads, both ways of codes."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from bitplan.base.loops import jit, openmp_threads
from bitplan.formats import Encoded, get_format
from bitplan.formats.codec import decode
from bitplan.formats.dispatch import encode
from bitplan.formats.gguf.grids import VECTOR_LAYOUTS
from bitplan.formats.gguf.layouts import LAYOUTS
from bitplan.packed.products import cpu_fused
from bitplan.packed.products.cpu_fused import BLOCKS, BYTES, FORMATS, FusedOnCpu
from tests.packed.linear_samples import pack

UNIT = 2.0**-24


@pytest.fixture(autouse=True)
def _ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where torch has a kernel for int4_g32, and with threads for small products."""
    monkeypatch.setattr(cpu_fused, "_takes_torch", lambda *_: False)
    monkeypatch.setattr(cpu_fused, "LEAST_FOR_THREADS", 0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run(x: Tensor, weight: Encoded, bias: Tensor | None = None) -> Tensor:
    kernel = FusedOnCpu()
    assert kernel.why_not(weight, x.dtype) is None
    return kernel.run(x, weight, kernel.prepare(weight), bias, None)


def check(y: Tensor, x: Tensor, weight: Encoded, bias: Tensor | None = None) -> None:
    w = decode(weight).double()
    exact, size = x.double() @ w.T, x.double().abs() @ w.abs().T
    if bias is not None:
        exact, size = exact + bias, size + bias.abs()
    assert y.dtype == x.dtype
    rounding = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[x.dtype]
    assert bool(((y.double() - exact).abs() <= (x.shape[1] + 4) * UNIT * size + rounding * exact.abs()).all())


@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_decoded_weights_in_float32(name: str) -> None:
    # rows that fill no tile; a row that fills no register; inputs that fill no tile; one thread and two
    for rows, cols, inputs, threads in (
        (37, 256, 1, 2),
        (1, 640, 3, 1),
        (6, 416, 4, 2),
        (5, 160, 9, 1),
        (4, 128, 1, 1),
    ):
        weight = pack(normal(rows, cols), name)
        x, bias = normal(inputs, cols, seed=1), normal(rows, seed=2)
        with jit.use_threads(threads):
            check(run(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("name", FORMATS)
def test_a_last_block_that_is_not_whole_counts_as_far_as_it_goes(name: str) -> None:
    weight, x = pack(normal(9, 203), name), normal(2, 203, seed=1)
    check(run(x, weight), x, weight)


@pytest.mark.parametrize("name", FORMATS)
def test_many_inputs_multiply_by_decoded_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_fused, "_most_inputs", lambda _weight: 4)
    monkeypatch.setattr(cpu_fused, "MOST_IN_PANELS", 48)
    # rows that fill no group; a part of a row; panels of one and two vectors; more inputs than one turn takes
    for rows, cols, inputs, threads in ((37, 640, 55, 2), (5, 419, 5, 1)):
        weight = pack(normal(rows, cols), name)
        x, bias = normal(inputs, cols, seed=1), normal(rows, seed=2)
        with jit.use_threads(threads):
            check(run(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("name", FORMATS)
def test_many_inputs_need_not_fill_vectors_nor_rows_registers(name: str) -> None:
    """A few inputs beyond whole vectors; rows that end within a register, and end right behind a part; no bias."""
    for rows, cols, inputs in ((33, 576, 17), (50, 528, 36), (18, 160, 29)):
        weight, x = pack(normal(rows, cols), name), normal(inputs, cols, seed=1)
        check(run(x, weight), x, weight)


def test_many_inputs_give_the_sign_of_zero_with_and_without_a_bias() -> None:
    weight, x = encode(-torch.ones(16, 128), "int8_row"), torch.zeros(16, 128)
    plain, biased = run(x, weight), run(x, weight, torch.full((16,), -0.0))
    assert torch.equal(torch.signbit(plain), torch.signbit(biased))
    assert torch.equal(run(x, weight, torch.ones(16)), torch.ones(16, 16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_are_rounded_once(dtype: torch.dtype) -> None:
    weight, x = encode(normal(8, 128), "int8_row"), normal(3, 128, seed=1).to(dtype)
    check(run(x, weight, normal(8, seed=2).to(dtype)), x, weight, normal(8, seed=2).to(dtype))


def test_inputs_need_not_be_contiguous_and_may_be_none() -> None:
    weight = encode(normal(8, 128), "mxfp4")
    for x in (normal(128, 3).T, normal(3, 256)[:, ::2]):
        assert torch.equal(run(x, weight), run(x.contiguous(), weight))
    assert run(normal(0, 128), weight).shape == (0, 8)


@pytest.mark.parametrize("name", ["int8_row", "fp8_e4m3_row"])
def test_rows_of_any_length(name: str) -> None:
    for cols in (16, 33, 100):
        weight, x = encode(normal(5, cols), name), normal(1, cols, seed=1)
        check(run(x, weight), x, weight)


def test_every_code_and_extreme_scales_are_decoded_as_the_definition_says() -> None:
    """One input number is 1, all others 0: the product is the decoded weight itself."""
    for name in ("int4_g32", "q4_0_poly", "q4_0_gguf", "mxfp4", "mxfp4_gguf", "nvfp4", "fp4_u8_g128"):
        weight = encode(normal(16, 128), name)
        data = torch.arange(256, dtype=torch.uint8).repeat(4).reshape(16, 64)
        scales = weight.scales
        assert scales is not None
        if name == "mxfp4":
            scales = torch.tensor([1, 2, 127, 250], dtype=torch.uint8).expand(16, 4).contiguous()
        if name == "mxfp4_gguf":
            scales = torch.tensor([0, 1, 2, 252], dtype=torch.uint8).expand(16, 4).contiguous()
        codes = Encoded(weight.fmt, weight.shape, data.reshape(weight.data.shape), scales, weight.base)
        expected = decode(codes).T
        torch.testing.assert_close(run(torch.eye(128), codes), expected, rtol=2.0**-22, atol=0)
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    fp8 = every[(every & 127) != 127].view(torch.float8_e4m3fn).reshape(1, 254)
    weight = Encoded(get_format("fp8_e4m3_row"), (1, 254), fp8, torch.ones(1, 1))
    assert torch.equal(run(torch.eye(254), weight), decode(weight).T)


def test_the_largest_scale_of_gguf_s_mxfp4_is_a_number() -> None:
    halves = torch.full((24, 64), 0x11, dtype=torch.uint8)
    weight = Encoded(get_format("mxfp4_gguf"), (24, 128), halves, torch.full((24, 4), 255, dtype=torch.uint8))
    for rows in (1, 32):
        assert torch.equal(run(torch.eye(128)[:rows], weight), torch.full((rows, 24), 2.0**127))


def any_blocks(name: str) -> Encoded:
    """6 rows of 512 numbers: any bytes, but for infinite or NaN scales."""
    layout = LAYOUTS.get(name) or VECTOR_LAYOUTS[name]
    raw = torch.randint(256, (6, 512 // layout.numbers, layout.block_bytes), generator=torch.Generator().manual_seed(3))
    raw, start = raw.to(torch.uint8), 0
    for part, size in layout.parts:
        if part in ("d", "dmin"):
            raw[..., start + 1] &= 0x7B | 0x80
        start += size
    return Encoded(get_format(name), (6, 512), raw.reshape(6, -1))


@pytest.mark.parametrize("name", BLOCKS)
def test_any_bytes_of_gguf_s_blocks_are_decoded_to_the_bit(name: str) -> None:
    """With one input, tiles and panels: scales, minima and codes of every kind, float16 numbers of all sizes."""
    weight = any_blocks(name)
    expected = decode(weight).T
    for inputs in (1, 4, 32):
        x = torch.eye(512).split(inputs)
        assert torch.equal(torch.cat([run(each, weight) for each in x]), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_not_finite_stays_so(name: str) -> None:
    weight, x = encode(normal(8, 256), name), normal(3, 256, seed=1)
    x[1, 5] = float("nan")
    assert run(x, weight).isnan().any(dim=1).tolist() == [False, True, False]


def test_scales_that_are_no_number_give_none() -> None:
    for name, bits in (
        ("mxfp4", 255),
        ("int4_g32", 0x7FC0),
        ("q4_0_gguf", 0x7E00),
        ("nvfp4", 0x7F),
        ("q8_0_gguf", 0x7E00),
    ):
        weight = encode(normal(8, 128), name)
        assert weight.scales is not None
        words = weight.scales.view(torch.uint8 if weight.scales.itemsize == 1 else torch.int16)
        words[3, 1] = bits
        assert run(normal(1, 128, seed=1), weight).isnan().tolist() == [[n == 3 for n in range(8)]]


def test_a_bound_call_takes_other_inputs_of_its_size() -> None:
    weight, bias, kernel = encode(normal(8, 128), "int8_g128"), normal(8, seed=2), FusedOnCpu()
    bound = kernel.bind(normal(1, 128), weight, kernel.prepare(weight), bias, None)
    assert bound is not None
    for seed in (3, 4):
        x = normal(1, 128, seed=seed)
        y = bound(x, (1, 1, 8))
        assert y.shape == (1, 1, 8)
        check(y[0], x, weight, bias)


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "said"),
    [
        ("mxfp8_e4m3", (8, 64), torch.float32, "no mxfp8_e4m3"),
        ("mxfp4", (8, 128), torch.float64, "float64"),
        ("mxfp4", (0, 128), torch.float32, "at least"),
        ("int8_row", (8, 3), torch.float32, "at least"),
    ],
)
def test_why_not_says_what_is_wrong(name: str, shape: tuple[int, int], dtype: torch.dtype, said: str) -> None:
    assert said in str(FusedOnCpu().why_not(encode(normal(*shape), name), dtype))


def test_python_s_threads_run_it_where_torch_has_another_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp_threads, "_openmp", lambda: None)
    weight, x = encode(normal(40, 128), "int4_g32"), normal(1, 128, seed=1)
    with jit.use_threads(3):
        check(run(x, weight), x, weight)


def _in_a_fork(results: multiprocessing.Queue[bool]) -> None:
    weight, x = encode(normal(40, 128), "int8_row"), normal(1, 128, seed=1)
    with jit.use_threads(2):
        y = run(x, weight)
    results.put(bool(torch.allclose(y, x @ decode(weight).T, atol=1e-3)))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_does_not_wait_for_threads_it_has_not() -> None:
    weight, x = encode(normal(40, 128), "int8_row"), normal(1, 128, seed=1)
    with jit.use_threads(2):
        run(x, weight)  # the parent's threads exist
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_in_a_fork, args=(results,))
    child.start()
    assert results.get(timeout=60)
    child.join(10)


SMALLER_CPU = """
import torch
from bitplan.packed.products import cpu_rows as codes, cpu_rows as rows
from tests.packed.products import test_cpu_fused as t
t.cpu_fused._takes_torch = lambda *_: False
t.cpu_fused._why_not_here = lambda: None
assert (rows.LANES, codes.LOOKS_UP) == ({lanes}, False)
weight, x = t.encode(t.normal(5, 352), "{name}", pad="zero"), t.normal(29, 352, seed=1)
t.check(t.run(x, weight), x, weight)  # panels of one vector and of two
t.check(t.run(x[:5], weight), x[:5], weight)
t.check(t.run(x[:1], weight), x[:1], weight)
"""


@pytest.mark.long
@pytest.mark.skipif(not cpu_fused._on_x86(), reason="names CPUs of x86")
@pytest.mark.parametrize(
    ("cpu", "has", "lanes", "name"),
    [
        ("haswell", "+avx,+avx2,+fma,+f16c,+sse4.2", 8, "mxfp4"),
        *(
            ("haswell", "+avx,+avx2,+fma,+f16c,+sse4.2", 8, name)
            for name in ("iq4_nl_gguf", "q3_k_gguf", "q5_1_gguf", "iq2_xs_gguf")
        ),
        *(("sandybridge", "+avx,+fma,+f16c,+sse4.2", 4, name) for name in ("iq4_nl_gguf", "q5_0_gguf", "q4_k_gguf")),
        *(("sandybridge", "+avx,+fma,+f16c,+sse4.2", 4, name) for name in ("int4_g32", "q4_0_poly", "iq3_s_gguf")),
    ],
)
def test_a_cpu_without_avx512_gives_the_same_products(cpu: str, has: str, lanes: int, name: str) -> None:
    """Compiled for AVX2, and for registers of four numbers, as Arm's are: this CPU runs that too."""
    script = SMALLER_CPU.format(lanes=lanes, name=name)
    smaller = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": has, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", script], check=True, env=os.environ | smaller, timeout=300)


def test_formats_with_byte_codes_are_those_of_eight_bits() -> None:
    assert all(get_format(name).packing is None for name in BYTES)
