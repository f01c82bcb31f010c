"""The kernels of trees compile for Hopper, where they never run in CI; see packed/products/test_triton_compiles.py.

What only the assembly shows: atomics in shared memory, none of which loop, no fused multiply-add where a split is
judged, no registers that spill.
"""

from __future__ import annotations

import pytest

from tests.processes import compile_with_triton

pytest.importorskip("triton")

PROGRAM = """
import itertools, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from bitplan.trees.cuda import compiling, kernels, score_kernels
from bitplan.trees.objectives import Binary, Gamma, Multiclass, SquaredError

OPTIONS = ("num_warps", "enable_fp_fusion")
NAMES = {"int64": "i64", "int32": "i32", "uint8": "u8", "float32": "fp32", "float64": "fp64"}


def build(kernel, constants):
    options = {name: constants[name] for name in OPTIONS if name in constants}
    constants = {name: value for name, value in constants.items() if name not in OPTIONS}
    given = compiling.arguments_of(kernel, constants, compiling.TABLE_KINDS["float32"])
    names = [name for name in kernel.arg_names if name not in constants]
    types = ["i32" if kind == 2 else "*" + NAMES[str(kind).removeprefix("torch.")] for kind in given]
    kinds = dict(zip(names, types, strict=True))
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(kinds.values()) if kind.startswith("*")}
    signature = kinds | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print("compiled", kernel.fn.__name__)
    return made.asm["ptx"], made.metadata.shared


few = dict(weighted=False, stochastic=True, renews=True)
plain = list(compiling.needed(Binary(), precise=False, kind=kernels.PLAIN, categories=False, **few))
ptx, _ = build(*plain[0])
assert plain[0][0] is kernels.judge_features and "fma.rn.f64" not in ptx and "div.rn.f64" in ptx
if sys.argv[1] == "all":
    more = dict(weighted=True, stochastic=False, renews=False)
    fits = [
        plain,
        compiling.needed(SquaredError(), precise=True, kind=kernels.WITH_L1, categories=True, **more),
        compiling.needed(Multiclass(3), precise=True, kind=kernels.MONOTONE, categories=True, **more),
        compiling.needed(Gamma(), precise=False, kind=kernels.MONOTONE, categories=True, **few),
    ]
    by_row = {"BLOCK": 1024, **score_kernels.OPTIONS}
    others = [(score_kernels.walk_rows, by_row), (score_kernels.add_trees, by_row)]
    for kernel, constants in itertools.chain(*fits, others):
        ptx, shared = build(kernel, constants)
        assert ".local" not in ptx
        if kernel is kernels.add_rows:
            atomics, cells = (5 * 8, 40960) if constants["PRECISE"] else (2 * 16, 32768)
            assert ptx.count("red.shared.add.u32") == atomics, "for each bin"
            assert cells + shared <= 49152, "what a program has without asking"
        if kernel in (kernels.judge_features, score_kernels.enter_floats):
            assert "fma.rn.f64" not in ptx
        if kernel is score_kernels.binary:
            assert "fma.rn.f64" in ptx, "of exp"
"""


@pytest.mark.parametrize("variants", ["some", pytest.param("all", marks=pytest.mark.long)])
def test_kernels_compile_for_hopper(variants: str, tmp_path) -> None:
    assert "compiled judge_features" in compile_with_triton(PROGRAM, variants, folder=tmp_path)
