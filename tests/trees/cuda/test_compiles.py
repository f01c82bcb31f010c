"""The kernels of trees compile for Hopper, where they never run in CI; see packed/products/test_triton_compiles.py.

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
from bitplan.trees.cuda import binning, judge, kernels, predict, score_kernels

KINDS = dict.fromkeys(("sets_ptr", "lefts_ptr", "ranks_ptr", "result_sets_ptr"), "*u8")
KINDS |= dict(bins_ptr="*u8", columns_ptr="*u8", grads_ptr="*i8", hess_ptr="*u8", rows_ptr="*i32", gains_ptr="*fp64")
KINDS |= dict.fromkeys(("numbers_ptr", "y_ptr", "scores_ptr", "weights_ptr", "values_ptr", "factor_ptr"), "*fp64")
KINDS |= dict(bounds_ptr="*fp64") | dict.fromkeys(("width", "groups", "trees", "outputs", "words", "sets"), "i32")
KINDS |= dict.fromkeys(("rows", "features", "count", "blocks", "depth", "first", "row_stride", "feature_stride"), "i32")


def build(kernel, warps, **constants):
    names = kernel.arg_names[: -len(constants)]
    assert kernel.arg_names == names + list(constants), kernel
    floats = dict(grads_ptr="*fp32", hess_ptr="*fp32", left_bins_ptr="*u8", left_ptr="*i32", right_ptr="*i32")
    floats |= dict(numbers_ptr="*i32") if kernel is score_kernels.walk_rows else {}
    floats |= dict(numbers_ptr="*fp32", limits_ptr="*fp64", bins_ptr="*u8") if kernel is binning.bin_numbers else {}
    floats |= dict(nodes_ptr="*i32", trees_ptr="*i32", bits_ptr="*i32", thresholds_ptr="*fp64")
    known = KINDS | floats if kernel.fn.__module__ not in (kernels.__name__, judge.__name__) else KINDS
    kinds = {name: known.get(name, "*i64") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(kinds.values()) if kind.startswith("*")}
    signature = kinds | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print("compiled", kernel.fn.__name__)
    return made.asm["ptx"]


def check_exact(ptx):
    assert "fma.rn.f64" not in ptx and "div.rn.f64" in ptx
    assert ".local" not in ptx


check_exact(build(judge.judge_features, 2, K=32, HAS_L1=False, MONOTONE=False, SETS=False))
if sys.argv[1] == "all":
    shared = dict(K=32, SHARED=True, TILE=kernels.TILE, TILES=kernels.TILES)
    ptx = build(kernels.add_rows, 16, WIDTH=14, **shared)
    assert ptx.count("red.shared.add.u32") == 2 * 14, "two atomics a bin"
    assert ".local" not in ptx
    for sets in (False, True):
        build(kernels.part_rows, 8, K=32, BLOCK=1024, SETS=sets)
        build(judge.pick_features, 1, K=32, WIDE=256, SETS=sets)
    check_exact(build(judge.order_sets, judge.ORDER_WARPS, K=32))
    for has_l1, monotone in ((True, False), (False, True)):
        check_exact(build(judge.judge_features, 2, K=32, HAS_L1=has_l1, MONOTONE=monotone, SETS=True))
        check_exact(build(judge.judge_sets, 2, K=32, HAS_L1=has_l1, MONOTONE=monotone))
    build(kernels.lay_out, 4, BLOCK=1024)
    parts = dict(PARTS=512, BLOCK=1024)
    for kernel in (score_kernels.collect_rows, score_kernels.sum_leaves, score_kernels.add_values):
        build(kernel, 8, **parts)
    shape = dict(WEIGHTED=True, BLOCK=1024)
    build(score_kernels.squared_error, 4, **shape)
    assert "fma.rn.f64" in build(score_kernels.binary, 4, **shape), "of exp"
    build(score_kernels.softmax, 4, CLASSES=3, **shape)
    rounding = dict(STOCHASTIC=True, ALL=True, BLOCK=1024)
    assert "fma.rn.f64" not in build(score_kernels.enter_floats, 4, **rounding)
    build(score_kernels.walk_rows, 4, BLOCK=1024)
    build(score_kernels.find_largest, 4, BLOCK=1024)
    for sets in (False, True):
        assert "fma.rn.f64" not in build(predict.add_trees, 8, BLOCK=predict.BLOCK, SETS=sets)
    build(binning.bin_numbers, 4, BLOCK=1024)
"""


@pytest.mark.parametrize("variants", ["some", pytest.param("all", marks=pytest.mark.long)])
def test_kernels_compile_for_hopper(variants: str, tmp_path) -> None:
    assert "compiled judge_features" in compile_with_triton(PROGRAM, variants, folder=tmp_path)
