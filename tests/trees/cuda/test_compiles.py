"""The kernels of trees compile for Hopper, where they never run in CI; see tests/kernels/test_triton_compiles.py.

What only the assembly shows: atomics in shared memory, none of which loop, no fused multiply-add where a split is
judged, no registers that spill.
"""

from __future__ import annotations

import pytest

from tests.processes import compile_with_triton

pytest.importorskip("triton")

PROGRAM = """
import re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from bitplan.trees.cuda import kernels

KINDS = dict(bins_ptr="*u8", columns_ptr="*u8", grads_ptr="*i8", hess_ptr="*u8", rows_ptr="*i32", gains_ptr="*fp64")
KINDS |= dict(numbers_ptr="*fp64", rows="i32", features="i32", count="i32", blocks="i32")
WAVE = dict(WIDTH=14, K=32)


def build(kernel, warps, **constants):
    names = kernel.arg_names[: -len(constants)]
    assert kernel.arg_names == names + list(constants), kernel
    kinds = {name: KINDS.get(name, "*i64") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(kinds.values()) if kind.startswith("*")}
    signature = kinds | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print("compiled", kernel.fn.__name__)
    return made.asm["ptx"]


shared = dict(IN_GROUPS=2, K=32, SHARED=True, TILE=kernels.TILE, TILES=kernels.TILES)
ptx = build(kernels.add_rows, 8, WIDTH=14, **shared)
assert ptx.count("red.shared.add.u32") == 2 * 14, "two atomics a bin"
assert ".local" not in ptx
ptx = build(kernels.judge_features, 2, K=32, HAS_L1=False)
assert "fma.rn.f64" not in ptx and "div.rn.f64" in ptx
if sys.argv[1] == "all":
    build(kernels.part_rows, 8, **WAVE, BLOCK=1024)
    build(kernels.pick_features, 1, K=32, WIDE=32)
    build(kernels.judge_features, 2, K=32, HAS_L1=True)
    build(kernels.lay_out, 4, WIDTH=14, BLOCK=1024)
    for nibbles in (False, True):
        build(kernels.enter_rows, 4, NIBBLES=nibbles, ALL=nibbles, BLOCK=1024)
    build(kernels.collect_rows, 8, PARTS=256, BLOCK=1024)
"""


@pytest.mark.parametrize("variants", ["some", pytest.param("all", marks=pytest.mark.long)])
def test_kernels_compile_for_hopper(variants: str, tmp_path) -> None:
    assert "compiled judge_features" in compile_with_triton(PROGRAM, variants, folder=tmp_path)
