"""The FP8 kernels compile for Hopper, where they never run in CI; see test_triton_compiles.

What only the assembly shows: the GPU's own FP8 conversions, the tensor cores' FP8 products, and no divisions that are
not correctly rounded.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

PROGRAM = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from bitplan.kernels import triton_fp8_cast as cast, triton_fp8_guess as guess, triton_fp8_norm as norm
from bitplan.kernels import triton_fp8_product as product


def build(kernel, arguments, constants, warps, **options):
    signature = arguments | {name: "constexpr" for name in constants}
    # All else is a multiple of 16.
    loose = ("rows", "pieces", "eps", "norm_eps", "programs", "across", "down", "row_programs")
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(arguments) if name not in loose}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps} | options
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


def pointers(names, kind):
    return dict.fromkeys(names.split(), kind)


def build_cast(scaling, fp8, norm="none"):
    scale = "*u8" if scaling == "1x32" else "*fp32"
    arguments = pointers("x_ptr", "*i16") | pointers("out_ptr out_t_ptr", "*u8") | pointers("plain_ptr", "*i16")
    arguments |= pointers("scale_ptr scale_t_ptr", scale) | pointers("pieces_ptr", "*i32")
    arguments |= pointers("rstd_ptr mean_ptr", "*fp32") | pointers("weight_ptr bias_ptr", "*i16")
    arguments |= pointers("rows cols padded scale_stride scale_t_stride", "i32") | {"eps": "fp32", "pieces": "i32"}
    constants = dict(SOURCE="bf16", FP8=fp8, SCALING=scaling, NORM=norm, WEIGHT="bf16", HAS_BIAS=norm == "layer")
    constants |= dict(TO_ROWS=True, TO_COLS=True, TO_PLAIN=norm != "none", PIECES=512, BR=128)
    constants["BC"] = 64 if scaling in ("tensor", "row") else 128
    ptx = build(cast._cast_tiles, arguments, constants, 4, enable_fp_fusion=False)
    assert f"cvt.rn.satfinite.{fp8}x2.f32" in ptx, (scaling, fp8)
    assert "ld.global.v4" in ptx and ptx.count("st.global.v4.b32") >= 2, (scaling, fp8)
    assert "div.full" not in ptx and "div.approx" not in ptx


def casts():
    for scaling in ("tensor", "row", "1x128", "128x128", "1x32"):
        build_cast(scaling, "e4m3")
    build_cast("tensor", "e5m2")
    build_cast("1x128", "e4m3", "layer")


def guesses():
    arguments = pointers("x_ptr", "*i16") | pointers("out_ptr out_t_ptr", "*u8") | pointers("state_ptr", "*i32")
    constants = dict(SOURCE="bf16", FP8="e4m3", TO_ROWS=True, TO_COLS=True, BR=128, BC=64)
    sizes = pointers("rows cols padded", "i32")
    ptx = build(guess._cast, arguments | sizes, constants, 4, enable_fp_fusion=False)
    assert "ld.global.v4" in ptx and ptx.count("st.global.v4.b32") >= 2
    arguments |= pointers("scale_ptr", "*fp32") | sizes | {"eps": "fp32"}
    build(guess._check, arguments, constants, 4, enable_fp_fusion=False)


def maxima():
    for size in ("i32", "i64"):
        arguments = pointers("x_ptr", "*i16") | pointers("partial_ptr", "*i32") | {"size": size}
        ptx = build(cast._partial_amax, arguments, dict(SOURCE="bf16", NUMBERS=8192), 8)
        assert "ld.global.v4" in ptx
    arguments = pointers("x_ptr", "*i16") | pointers("row_ptr col_ptr", "*i32") | pointers("rstd_ptr mean_ptr", "*fp32")
    arguments |= pointers("weight_ptr bias_ptr", "*i16") | pointers("rows cols", "i32")
    build(cast._strip_amax, arguments,
          dict(SOURCE="bf16", NORM="none", WEIGHT="none", HAS_BIAS=False, TILES=4, BR=128, BC=128), 8)
    arguments = pointers("row_parts_ptr col_parts_ptr", "*i32") | pointers("scale_ptr scale_t_ptr", "*fp32")
    arguments |= pointers("rows cols padded across down row_programs", "i32") | {"eps": "fp32"}
    build(cast._finish_scales, arguments, dict(FP8="e4m3", WIDTH=128), 4, enable_fp_fusion=False)


def norms():
    arguments = pointers("x_ptr weight_ptr bias_ptr", "*i16") | pointers("rstd_ptr mean_ptr", "*fp32")
    arguments |= pointers("partial_ptr", "*i32") | {"rows": "i32", "cols": "i32", "norm_eps": "fp32"}
    constants = dict(EACH=16, SOURCE="bf16", WEIGHT="bf16", NORM="layer", HAS_BIAS=True, AMAX=True, BC=4096)
    build(norm._row_stats, arguments, constants, 8, enable_fp_fusion=False)
    arguments = pointers("dy_ptr x_ptr weight_ptr", "*i16") | pointers("rstd_ptr mean_ptr", "*fp32")
    arguments |= pointers("dx_ptr", "*i16") | pointers("sums_ptr", "*fp32")
    arguments |= {"rows": "i32", "cols": "i32", "programs": "i32"}
    constants = dict(EACH=32, SOURCE="bf16", GRAD="bf16", WEIGHT="bf16", NORM="rms", HAS_BIAS=False, BC=4096)
    build(norm._norm_gradient, arguments, constants, 8)


def products():
    for a, b, square in (("e4m3", "e4m3", True), ("e5m2", "e4m3", False)):
        kinds = {"e4m3": "*fp8e4nv", "e5m2": "*fp8e5"}
        arguments = {"a_ptr": kinds[a], "b_ptr": kinds[b]} | pointers("a_scale_ptr b_scale_ptr", "*fp32")
        arguments |= pointers("bias_ptr out_ptr", "*i16") | pointers("rows cols width b_scale_stride", "i32")
        constants = dict(A=a, B=b, SQUARE=square, BIAS="none", OUT="bf16", BM=64, BN=128, GROUP=8, STAGES=4)
        ptx = build(product._block_scaled, arguments, constants, 4)
        assert f"wgmma.mma_async.sync.aligned.m64n128k32.f32.{a}.{b}" in ptx, (a, b)


dict(casts=casts, guesses=guesses, maxima=maxima, norms=norms, products=products)[sys.argv[1]]()
print("compiled")
"""


@pytest.mark.parametrize("part", ["casts", "guesses", "maxima", "norms", "products"])
def test_fp8_kernels_compile_for_hopper(part: str, tmp_path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    program = tmp_path / "compile_for_hopper.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), part], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]
    assert done.stdout.split() == ["compiled"]
