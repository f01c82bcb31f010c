"""Fused products, and the loops of rounding, compile for Hopper, and products for Ampere, too.

They never run in CI, and the interpreter sees no assembly.

Triton compiles for a GPU that is not there; only its assembler must be. In a process of its own, for the rest of the
suite has Triton interpret.
"""

from __future__ import annotations

import pytest

from tests.processes import compile_with_triton

pytest.importorskip("triton")

PROGRAM = """
import itertools, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from bitplan.formats.triton_codec import _decode_nibble_groups
from bitplan.packed.products import fused_few_rows as triton_matmul
from bitplan.packed.products import fused_many_rows as triton_wide
from bitplan.packed.products.direct_products import direct_kernel
from bitplan.packed.products.fused_few_rows import few_rows_kernel
from bitplan.packed.products.triton_fp8_rows import rows_kernel

FORMATS = {  # element, scale, type of scales, order, bytes a code, group
    "mxfp4": ("e2m1", "e8m0", "u8", "low_first", True, 32),
    "nvfp4": ("e2m1", "e5m3", "u8", "low_first", True, 16),
    "fp4_u8_g128": ("e2m1", "u8", "u8", "low_first", True, 128),
    "int4_g32": ("int4", "bf16", "i16", "low_first", True, 32),
    "q4_0_gguf": ("int4", "f16", "fp16", "halves", True, 32),
    "int8_row": ("int8", "f32", "fp32", "bytes", False, 0),
    "int8_g128": ("int8", "f32", "fp32", "bytes", False, 128),
    "fp8_e4m3_row": ("e4m3", "f32", "fp32", "bytes", False, 0),
}
assert set(FORMATS) == triton_matmul.FUSED_FORMATS


def build(kernel, pointers, constants, warps, capability=90):
    signature = pointers | {name: "constexpr" for name in constants}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(pointers.values()) if kind.startswith("*")}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": 3}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]


pointers = dict(data_ptr="*u8", scales_ptr="*u8", codes_ptr="*u8", row_scales_ptr="*fp32", blocks="i32")
ptx = build(rows_kernel, pointers, dict(ELEMENT="e4m3", SHIFT=6, TILE=128, WIDE=128), 8)
assert "cvt.rn.satfinite.e4m3x2.f32" in ptx and "st.global.v4" in ptx, "rows in E4M3"

pointers = dict(data_ptr="*u8", scales_ptr="*u8", base_ptr="*fp32", out_ptr="*i16", groups="i32")
constants = dict(ELEMENT="e2m1", SCALE="u8", ORDER="low_first", OUT="bf16", TILE=32, HALF=64, VECTOR=4)
assert "st.global.v4" in build(_decode_nibble_groups, pointers, constants, 8), "fp4_u8_g128"

ways = (("0123", "no"), ("0213", "sorted"))
for name in sys.argv[2:]:
    element, scale, scales, order, nibbles, group = FORMATS[name]
    common = dict(
        out_ptr="*i16", partial_ptr="*fp32", data_ptr="*i8" if element == "int8" else "*u8", scales_ptr="*" + scales,
        factor_ptr="*fp32", bias_ptr="*i16", counters_ptr="*i32",
    )
    fixed = dict(N=512, K=1024, ELEMENT=element, SCALE=scale, NIBBLES=nibbles, GROUP=group, FACTORS=False)
    fixed |= dict(BIAS="bf16", BK=128, STAGES=3, SPLIT=2)
    tables = dict.fromkeys(("tile_expert_ptr", "pairs_ptr", "tile_first_ptr", "tile_count_ptr"), "*i32")
    skinny = dict(x_ptr="*i32" if order == "low_first" else "*i16") | common | tables | {"rows": "i32"}
    for words, grouped in ways if sys.argv[1] == "all" else ways[:1]:
        cut = dict(QUADS_OF_ROW=64, SLICES=2, BN=32, BM=8, WORDS=words)
        ptx = build(few_rows_kernel, skinny, fixed | cut | dict(
            ORDER=order, GROUPED=grouped, PAIRS_A_ROW=2, EXPERTS=4, OVERLAP=grouped == "no",
        ), 2)
        assert "mma.sync" in ptx, name
        assert ("griddepcontrol.wait" in ptx) == (grouped == "no"), name
    wide = dict(x_ptr="*bf16") | common | {"rows": "i32"}
    ptx = build(triton_wide._wide, wide, fixed | dict(BN=64, BM=64, WORDS="0123"), 4)
    assert "wgmma.mma_async" in ptx, name
    straight = {name: kind for name, kind in common.items() if name not in ("partial_ptr", "counters_ptr")}
    straight |= dict(data_ptr="*i32", scales_ptr={"e8m0": "*u8", "u8": "*u8", "f32": "*i32"}.get(scale, "*i16"))
    kept = ("N", "K", "ELEMENT", "SCALE", "GROUP", "FACTORS", "BIAS")
    constants = {each: fixed[each] for each in kept}
    constants |= dict(ORDER=order, ONE_ROW=True, X=1, R=1, W=2, RUN=2, STAGES=3, WORDS="0213", OVERLAP=True)
    pointers = dict(x_ptr="*i32") | straight | {"rows": "i32"}
    ptx = build(direct_kernel, pointers, constants, 2)
    assert "mma.sync" in ptx and "cp.async" not in ptx, name
    assert re.search("griddepcontrol.wait.*?ld.global", ptx, re.DOTALL).group().count("ld.global") == 1, name
    build(direct_kernel, pointers, constants | dict(K=256, RUN=1, OVERLAP=False), 2, capability=80)
    if sys.argv[1] == "all":
        build(few_rows_kernel, skinny, fixed | cut | dict(
            ORDER=order, GROUPED="sorted", PAIRS_A_ROW=2, EXPERTS=4, OVERLAP=False,
        ), 2, capability=80)
        build(triton_wide._wide, wide, fixed | dict(BN=64, BM=64, WORDS="0123"), 4, capability=80)
    print("compiled", name)
"""


OFTEN = [("some", ("mxfp4",))]
REST = [
    ("all", ("mxfp4", "nvfp4", "fp4_u8_g128", "int4_g32")),
    ("all", ("q4_0_gguf", "int8_g128", "fp8_e4m3_row", "int8_row")),
]


@pytest.mark.parametrize(
    ("variants", "names"), [*OFTEN, *(pytest.param(*given, marks=pytest.mark.long) for given in REST)], ids=str
)
def test_every_format_compiles_for_hopper(variants: str, names: tuple[str, ...], tmp_path) -> None:
    printed = compile_with_triton(PROGRAM, variants, *names, folder=tmp_path)
    assert printed.split() == [word for name in names for word in ("compiled", name)]


ROUNDING = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from bitplan.formats.gguf.layouts import LAYOUTS
from bitplan.rounding.triton_rounding import _round_batch, _sweep_batch
from bitplan.formats.gguf.triton_group_search import _search_blocks
from bitplan.rounding.triton_rounding import _sweep_groups


def build(kernel, types=(), **constants):
    types = dict(types) | {name: "constexpr" for name in constants}
    signature = {
        name: types.get(name, "*fp32" if name.endswith("_ptr") else "i32") for name in kernel.arg_names
    }
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    options = {"num_warps": 1, "enable_fp_fusion": False}
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]


E2M1 = dict(KIND="float", LOW=-6.0, HIGH=6.0, MANTISSA=0.5, LEAST=0.5, TABLE=0, SPAN=128)
for scale, width in (("e4m3", 16), ("e8m0", 32), ("bf16", 32), ("u8", 32)):
    build(_round_batch, {"blocks_ptr": "*i32"}, **E2M1, SCALE=scale, WIDTH=width, MANY=32, HIGH_EXPONENT=3)
    build(_sweep_batch, **E2M1, SCALE=scale, WIDTH=width, SIGNED=False)
for name in ("iq4_nl_gguf", "q3_k_gguf", "q4_k_gguf"):
    each = LAYOUTS[name]
    fixed = dict(LOW=float(each.low), HIGH=float(each.high), TABLE=len(each.table or ()), COUNT=each.group_count)
    fixed |= dict(HAS_GROUPS=each.has_groups, HAS_MIN=each.has_min)
    fixed |= dict(SCALE_LOW=float(each.scale_low or 0), SCALE_HIGH=float(each.scale_high or 0))
    build(_search_blocks, {"codes_ptr": "*u8", "order_ptr": "*i32"}, **fixed, SIZE=each.group)
    kind = dict(KIND="table" if each.table else "integer", MANTISSA=0.0, LEAST=1.0)
    build(_sweep_groups, **fixed, **kind, ROWS=2, WIDE=each.numbers, GROUP=each.group)
print("compiled")
"""


@pytest.mark.long
def test_rounding_compiles_for_hopper(tmp_path) -> None:
    assert compile_with_triton(ROUNDING, folder=tmp_path).split() == ["compiled"]
