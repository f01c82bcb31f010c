"""The Gluon products: against the definition and the Triton ones on a GPU; without one, when they are picked, and that
they compile for Hopper and are launched with the same arguments the second time as the first.
"""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from bitplan.base.errors import FormatError
from bitplan.fp8.kernels import experts_products
from bitplan.fp8.kernels.experts_layout import GroupedFp8, GroupLayout
from bitplan.fp8.kernels.experts_products import (
    cast_experts,
    cast_tokens,
    gluon_obstacle,
    grouped_rows,
    grouped_sums,
    lay_out,
    pick_impl,
    token_pad,
)
from tests.processes import compile_with_triton

pytest.importorskip("triton")

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)

# Empty experts, single tokens, tiles of which a group of warps has all, some or none of its rows, and nobody at all.
ROUTINGS = {
    "ragged": [0, 1, 200, 0, 37, 129, 64],
    "single tokens": [1, 1, 1],
    "one takes all": [0, 0, 1000, 0],
    "whole tiles": [128, 256],
    "nobody": [0, 0, 0],
}


@pytest.fixture
def hopper(monkeypatch) -> None:
    """A GPU of compute capability 9 with a Triton that has Gluon, as far as the choice can see."""
    monkeypatch.setattr(experts_products, "capability_of", lambda _: (9, 0))
    monkeypatch.setattr(experts_products, "_gluon_lacks", lambda: None)


# ---- when they are picked --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
@pytest.mark.usefixtures("hopper")
def test_auto_picks_gluon_on_hopper(recipe, fp8) -> None:
    assert pick_impl(recipe, GPU, fp8) == "gluon"
    assert pick_impl(recipe, GPU, fp8, width=7168, pad=128) == "gluon"
    assert gluon_obstacle(recipe, GPU, width=7168, pad=128) is None
    assert token_pad(recipe, "gluon") == 128


@pytest.mark.parametrize(
    ("recipe", "given", "why"),
    [
        ("blockwise", {}, r"scales of rows and columns \(tensorwise, rowwise\), got blockwise"),
        ("rowwise", {"width": 384}, "a multiple of 256 wide, got 384"),
        ("tensorwise", {"width": 256, "pad": 16}, "sums 128 tokens at once, got a layout padded to 16"),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_what_stands_against_it_is_told(recipe, given, why) -> None:
    with pytest.raises(FormatError, match=f"the gluon product cannot do this: .*{why}; use 'auto'"):
        pick_impl(recipe, GPU, impl="gluon", **given)
    expected = "triton" if recipe == "blockwise" else "torch"
    assert pick_impl(recipe, GPU, **given) == expected  # as before there was Gluon
    assert pick_impl(recipe, GPU, "e5m2", **given) == "triton"


def test_other_devices_are_told(monkeypatch) -> None:
    assert pick_impl("rowwise", CPU) == "reference"
    assert gluon_obstacle("rowwise", CPU) == "it runs on compute capability 9 (Hopper), got cpu"
    monkeypatch.setattr(experts_products, "capability_of", lambda _: (10, 0))
    assert gluon_obstacle("rowwise", GPU) == "it runs on compute capability 9 (Hopper), got cuda:0"
    assert pick_impl("rowwise", GPU) == "triton"
    layout = lay_out(torch.tensor([4]), 4, 128)
    _, cols = cast_tokens(torch.ones(4, 256), "rowwise", layout)
    assert cols is not None
    with pytest.raises(FormatError, match="cannot do this: it runs on compute capability 9"):
        grouped_sums(cols, cols, layout, torch.float32, impl="gluon")


def test_a_triton_without_the_names_is_told(monkeypatch) -> None:
    import triton
    from triton.experimental.gluon import language
    from triton.experimental.gluon.language.nvidia import hopper as names

    look = experts_products._gluon_lacks.__wrapped__
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert look() == "Triton's interpreter has no Gluon"
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    assert look() is None
    with monkeypatch.context() as patch:
        patch.setattr(language, "warp_specialize", lambda *_: None)
        assert look().endswith("has no warp_specialize(functions_and_args, ...) in Gluon")
    monkeypatch.delattr(names, "warpgroup_mma")
    assert look() == f"Triton {triton.__version__} has no warpgroup_mma in Gluon"
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon.language.nvidia", None)
    assert look().startswith("no Gluon could be imported: ")


def test_casts_say_whether_scales_are_those_of_whole_experts() -> None:
    layout = lay_out(torch.tensor([3, 0, 2]), 5, 128)
    for recipe in ("tensorwise", "rowwise"):
        made = [*cast_tokens(torch.randn(5, 32), recipe, layout), *cast_experts(torch.randn(3, 32, 32), recipe)]
        assert [each.uniform for each in made if each is not None] == [recipe == "tensorwise"] * 4


# ---- on a GPU --------------------------------------------------------------------------------------------------------


class Operands:
    """Casts on a GPU, made there from one seed."""

    def __init__(self, counts: list[int], outputs: int, inputs: int, recipe: str, grad: str = "e4m3") -> None:
        generator = torch.Generator("cuda").manual_seed(0)

        def made(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda").bfloat16()

        self.layout = lay_out(torch.tensor(counts, device="cuda"), sum(counts), 128)
        self.x_rows, self.x_cols = cast_tokens(made(sum(counts), inputs), recipe, self.layout)
        self.dy_rows, self.dy_cols = cast_tokens(made(sum(counts), outputs), recipe, self.layout, grad)
        self.w_rows, self.w_cols = cast_experts(made(len(counts), outputs, inputs), recipe)
        self.bias = torch.randn(len(counts), outputs, generator=generator, device="cuda")

    def products(self, layout: GroupLayout, dtype: torch.dtype, impl: str, **options) -> list[Tensor]:
        """Forward with bias, input gradient, weight gradient."""
        move = self._on_cpu if impl == "reference" else lambda cast: cast
        bias = self.bias.cpu() if impl == "reference" else self.bias
        options |= {"impl": impl}
        return [
            grouped_rows(move(self.x_rows), move(self.w_rows), layout, dtype, bias=bias, **options),
            grouped_rows(move(self.dy_rows), move(self.w_cols), layout, dtype, **options),
            grouped_sums(move(self.dy_cols), move(self.x_cols), layout, dtype, **options),
        ]

    @staticmethod
    def _on_cpu(cast: GroupedFp8) -> GroupedFp8:
        return GroupedFp8(cast.codes.cpu(), cast.scale.cpu(), cast.kind)


def close(result: Tensor, expected: Tensor, limit: float) -> None:
    assert result.shape == expected.shape
    assert result.isfinite().all()
    assert (result.double().cpu() - expected.double().cpu()).norm() <= limit * expected.double().norm()


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs compute capability 9"
)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("counts", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "float32 sums"])
@pytest.mark.parametrize("grad", ["e4m3", "e5m2"])
def test_products_match_the_definition_and_triton(counts, recipe, fast, grad) -> None:
    given = Operands(counts, 512, 768, recipe, grad)
    reference = lay_out(torch.tensor(counts), sum(counts), 128, impl="reference")
    result = given.products(given.layout, torch.float32, "gluon", fast_accum=fast)
    exact = given.products(reference, torch.float32, "reference")
    triton = given.products(given.layout, torch.float32, "triton", fast_accum=fast)
    for one, definition, other in zip(result, exact, triton, strict=True):
        close(one, definition, 1e-3)  # the tensor cores add with 14 bits
        close(one, other, 1e-6)  # in the same order
    assert not result[2][torch.tensor(counts) == 0].any()


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_results_of_every_type(dtype, recipe) -> None:
    given = Operands(ROUTINGS["ragged"], 256, 512, recipe)
    wide = given.products(given.layout, torch.float32, "gluon")
    for one, other in zip(given.products(given.layout, dtype, "gluon"), wide, strict=True):
        assert one.dtype == dtype
        assert torch.equal(one, other.to(dtype))  # rounded once


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("outputs", [16, 144, 192])
def test_weight_gradients_of_any_height_and_contractions_of_any_length(outputs) -> None:
    given = Operands(ROUTINGS["ragged"], outputs, 256, "rowwise")
    close(
        grouped_sums(given.dy_cols, given.x_cols, given.layout, torch.float32, impl="gluon"),
        grouped_sums(given.dy_cols, given.x_cols, given.layout, torch.float32, impl="triton"),
        1e-6,
    )
    close(
        grouped_rows(given.dy_rows, given.w_cols, given.layout, torch.float32, impl="gluon"),
        grouped_rows(given.dy_rows, given.w_cols, given.layout, torch.float32, impl="triton"),
        1e-6,
    )


@pytest.mark.gpu
@needs_hopper
def test_many_tiles_for_every_program_and_both_rings() -> None:
    counts = [1000, 24, 0, 3072, 128, 4000]
    given = Operands(counts, 1024, 2048, "rowwise")
    for _ in range(3):
        result = given.products(given.layout, torch.bfloat16, "gluon", fast_accum=False)
        for one, other in zip(
            result, given.products(given.layout, torch.bfloat16, "triton", fast_accum=False), strict=True
        ):
            close(one, other, 1e-4)
    short = Operands([100] * 64, 512, 512, "tensorwise")  # a ring of three stages
    for one, other in zip(
        short.products(short.layout, torch.bfloat16, "gluon"),
        short.products(short.layout, torch.bfloat16, "triton"),
        strict=True,
    ):
        close(one, other, 1e-4)


@pytest.mark.gpu
@needs_hopper
def test_sums_in_float32_are_more_exact() -> None:
    counts, inputs = [300], 16384
    layout = lay_out(torch.tensor(counts, device="cuda"), 300, 128)
    generator = torch.Generator("cuda").manual_seed(0)
    x, w = (torch.rand(*shape, generator=generator, device="cuda") for shape in ((300, inputs), (1, 256, inputs)))
    x_rows, _ = cast_tokens(x, "tensorwise", layout)
    w_rows, _ = cast_experts(w, "tensorwise")
    assert x_rows is not None
    assert w_rows is not None
    exact = (x_rows.codes.double() * x_rows.scale[0].double()) @ (w_rows.codes[0].double() * w_rows.scale[0, 0]).t()
    errors = {
        fast: float((grouped_rows(x_rows, w_rows, layout, torch.float32, fast_accum=fast, impl="gluon") - exact).norm())
        for fast in (True, False)
    }
    assert errors[False] <= 5e-4 * float(exact.norm())  # four sums of 2^-14 each
    assert errors[True] >= 4 * errors[False]


@pytest.mark.gpu
@needs_hopper
def test_pointers_of_any_alignment() -> None:
    given = Operands(ROUTINGS["ragged"], 256, 256, "rowwise")
    expected = grouped_rows(given.x_rows, given.w_rows, given.layout, torch.float32, impl="gluon")
    room = torch.zeros(given.layout.rows + 1, device="cuda")
    room[1:] = given.x_rows.scale
    for start in (1, 0, 1):
        scale = room[1:] if start else given.x_rows.scale
        moved = GroupedFp8(given.x_rows.codes, scale, "vector")
        assert torch.equal(grouped_rows(moved, given.w_rows, given.layout, torch.float32, impl="gluon"), expected)


@pytest.mark.gpu
@needs_hopper
def test_a_cuda_graph_holds_them() -> None:
    given = Operands(ROUTINGS["ragged"], 256, 256, "tensorwise")
    expected = given.products(given.layout, torch.bfloat16, "gluon")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = given.products(given.layout, torch.bfloat16, "gluon")
    graph.replay()
    for one, other in zip(result, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@needs_hopper
def test_auto_is_gluon_and_never_waits_for_the_host() -> None:
    given = Operands(ROUTINGS["ragged"], 256, 512, "tensorwise")
    auto = given.products(given.layout, torch.bfloat16, "auto")
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = given.products(given.layout, torch.bfloat16, "gluon")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one, other in zip(auto, result, strict=True):
        assert torch.equal(one, other)


# ---- without a GPU: compiled for Hopper, and what the launcher gets --------------------------------------------------

PROGRAM = """
import re, subprocess, sys, types
import torch, triton
from triton.backends.compiler import GPUTarget

RECORDED = []

def plain(argument):
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    if hasattr(argument, "base"):  # what a launcher reads of a descriptor
        rounds = getattr(argument, "round_f32_to_tf32", False)  # older ones have none
        return argument.base.data_ptr(), tuple(argument.shape), tuple(argument.strides), argument.padding, rounds
    return argument

class Launcher:
    def __init__(self, source, metadata):
        pass

    def __call__(self, *arguments):
        RECORDED.append(tuple(map(plain, arguments)))

class Utils:
    load_binary = staticmethod(lambda *arguments: (1, 2, 32, 0, 1024))
    unload_module = staticmethod(lambda module: None)
    get_device_properties = staticmethod(lambda device: {"max_shared_mem": 232448, "warpSize": 32})

class Driver:
    utils, launcher_cls = Utils(), Launcher
    get_current_device = staticmethod(lambda: None)
    get_current_stream = staticmethod(lambda device: 77)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

triton.runtime.driver.set_active(Driver())
torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(multi_processor_count=132)
from bitplan.fp8.kernels import experts_hopper_products as gluon
from bitplan.fp8.kernels.experts_products import GroupedFp8, lay_out

COMPILED = []
ordinary = gluon._Launch._launch_ordinarily
def watched(self, *arguments):
    COMPILED.append(ordinary(self, *arguments))
    return COMPILED[-1]
gluon._Launch._launch_ordinarily = watched

def codes(*shape, fp8=torch.float8_e4m3fn):
    return torch.zeros(shape, dtype=torch.uint8).view(fp8)

def rows(counts, uniform, fast, bias, dtype):
    layout = lay_out(torch.tensor(counts), sum(counts), 128)
    a = GroupedFp8(codes(sum(counts), 384), torch.ones(sum(counts)), "vector", uniform)
    b = GroupedFp8(codes(2, 512, 384), torch.ones(2, 512), "vector", uniform)
    out = torch.zeros(sum(counts), 512, dtype=dtype)
    gluon.rows_product(a, b, layout, out, torch.ones(2, 512) if bias else None, fast_accum=fast)

def sums(counts, uniform, fast, fp8, dtype):
    layout = lay_out(torch.tensor(counts), sum(counts), 128)
    a = GroupedFp8(codes(192, layout.padded_rows, fp8=fp8), torch.ones(2, 192), "vector", uniform)
    b = GroupedFp8(codes(256, layout.padded_rows), torch.ones(2, 256), "vector", uniform)
    gluon.sums_product(a, b, layout, torch.zeros(2, 192, 256, dtype=dtype), fast_accum=fast)

def check(product, *how):
    begun = len(COMPILED), len(RECORDED)
    for counts in ([5, 300], [5, 300], [200, 100]):  # another number of rows is the same launch
        product(counts, *how)
    assert len(COMPILED) - begun[0] == 1, "known ones go straight to the launcher"
    first, second, third = RECORDED[begun[1]:]
    def essence(recorded):  # without addresses, which differ: grid, stream, kernel, descriptors, numbers, constants
        descriptors = tuple(each[1:] for each in recorded[9:12])
        return recorded[:6] + descriptors + recorded[20:]
    assert essence(first) == essence(second), (first, second)
    assert first[:4] == (132, 1, 1, 77) and first[-1] == 132, first
    assert all(isinstance(each, int) for each in second[12:20]) and len(second) == len(first) == 32
    return COMPILED[-1].asm, third

def spills(cubin):
    with open("product.cubin", "wb") as file:
        file.write(cubin)
    tool = triton.knobs.nvidia.cuobjdump.path
    said = subprocess.run([tool, "-res-usage", "product.cubin"], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\\d+)", said)[1])

wgmma = "wgmma.mma_async.sync.aligned.m64n{}k32.f32.{}"
e5m2, bf16, f32 = torch.float8_e5m2, torch.bfloat16, torch.float32
PARTS = {
    "rows": [(rows, True, True, False, bf16, 256, "e4m3.e4m3"), (rows, False, False, True, f32, 128, "e4m3.e4m3")],
    "sums": [(sums, False, True, e5m2, f32, 256, "e5m2.e4m3"), (sums, True, False, e5m2, bf16, 128, "e5m2.e4m3")],
}
for product, *how, wide, kinds in PARTS[sys.argv[1]]:
    asm, third = check(product, *how)
    assert wgmma.format(wide, kinds) in asm["ptx"], how
    assert "cp.async.bulk.tensor.2d.shared" in asm["ptx"] and "cp.async.bulk.tensor.2d.global" in asm["ptx"]
    assert spills(asm["cubin"]) == 0, how
    assert third[9][1] == ((300, 384) if product is rows else (192, 512)), third
print("compiled")
"""


@pytest.mark.long
@pytest.mark.parametrize("part", ["rows", "sums"])
def test_kernels_compile_for_hopper_and_are_launched_the_same_again(part, tmp_path) -> None:
    assert compile_with_triton(PROGRAM, part, folder=tmp_path) == "compiled\n"
