"""The FP8 kernels compile for Hopper, where they never run in CI; see test_triton_compiles.

What only the assembly shows: the GPU's own FP8 conversions, the tensor cores' FP8 products, no divisions that are not
correctly rounded, no registers that spill to memory, none that is read before it is written (see
`fp8.kernels.triton_fp8_rounding.fp8_code`), and how wide memory is read and written.
"""

from __future__ import annotations

import pytest

from tests.processes import compile_with_triton

pytest.importorskip("triton")

PROGRAM = """
import os
import re
import subprocess
import sys
import tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from bitplan.fp8.kernels import triton_activation as activation
from bitplan.fp8.kernels import guessed_cast as guess
from bitplan.fp8.kernels import amax
from bitplan.fp8.kernels import triton_norm as norm
from bitplan.fp8.kernels import experts_general_cast as experts
from bitplan.fp8.kernels import fast_tile as pairs
from bitplan.fp8.kernels import triton_product as product
from bitplan.fp8.kernels import triton_cast as tiles
from bitplan.fp8.kernels.triton_cast import PAIR_LAUNCHES

def some(*choices):
    # A kernel takes a second or more: every run compiles few, the long one all variants.
    return choices if sys.argv[1] == "all" else choices[:1]


TOOL = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")


def build(kernel, arguments, constants, warps, **options):
    return compile(kernel, arguments, constants, warps, **options).asm["ptx"]


def compile(kernel, arguments, constants, warps, **options):
    signature = arguments | {name: "constexpr" for name in constants}
    # All else is a multiple of 16.
    loose = ("rows", "pieces", "eps", "norm_eps", "programs", "across", "down", "row_programs", "length")
    loose += ("rows16", "cols16", "size16", "scale_stride", "scale_t_stride", "least")
    loose += ("experts", "group16", "stride16", "tokens", "features16")
    places = {name: i for i, name in enumerate(kernel.arg_names)}
    aligned = {(places[name],): [["tt.divisibility", 16]] for name in arguments if name not in loose}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps} | options
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def machine_code(made):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        sass = subprocess.run([TOOL, "-sass", file.name], capture_output=True, text=True, check=True).stdout
        usage = subprocess.run([TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True)
    lines = [re.sub(r"/[*].*?[*]/", "", line).strip() for line in sass.splitlines()]
    return lines, int(re.search(r"STACK:(\\d+)", usage.stdout + usage.stderr)[1])


def check_defined(lines, name):
    # R1 is the stack pointer: elsewhere than in an address it stands for a register that nothing has written.
    for line in lines:
        line = re.sub(r"[[]R1[^]]*[]]", "", line)
        is_set = re.match(r"(LDC|MOV|IMAD[.]MOV[.]U32|VIADD|IADD3)[ ]+R1,", line)
        assert is_set or not re.search(r"(?<![.\\w])R1(?!\\w)", line), (name, line)


def pointers(names, kind):
    return dict.fromkeys(names.split(), kind)


TYPES = dict(bf16="*i16", f16="*fp16", f32="*fp32")


def build_tiles(scaling, fp8="e4m3", norm="none", source="bf16"):
    scale, name = "*u8" if scaling == "1x32" else "*fp32", (scaling, fp8, norm, source)
    arguments = pointers("x_ptr", TYPES[source]) | pointers("out_ptr out_t_ptr", "*u8")
    arguments |= pointers("scale_ptr scale_t_ptr", scale) | pointers("pieces_ptr", "*i32")
    arguments |= pointers("plain_ptr", TYPES[source])
    arguments |= pointers("rstd_ptr mean_ptr", "*fp32") | pointers("weight_ptr bias_ptr", "*i16")
    arguments |= pointers("rows cols padded scale_stride scale_t_stride", "i32") | {"eps": "fp32", "pieces": "i32"}
    constants = dict(SOURCE=source, FP8=fp8, SCALING=scaling, NORM=norm, WEIGHT="bf16", HAS_BIAS=norm == "layer")
    constants |= dict(TO_ROWS=True, TO_COLS=True, TO_PLAIN=norm != "none", PIECES=512, BR=128)
    constants["BC"] = 64 if scaling in ("tensor", "row") else 128
    made = compile(tiles.cast_numbers, arguments, constants, 4, enable_fp_fusion=False)
    ptx = made.asm["ptx"]
    assert f"cvt.rn.satfinite.{fp8}x2.f32" in ptx, name
    assert "ld.global.v4" in ptx and ptx.count("st.global.v4.b32") >= 2, name
    assert "div.full" not in ptx and "div.approx" not in ptx, name
    check_defined(machine_code(made)[0], name)


def casts():
    for scaling in some("tensor", "row", "1x128", "128x128", "1x32"):
        build_tiles(scaling)
    if sys.argv[1] == "all":
        build_tiles("tensor", "e5m2")
        build_tiles("1x128", norm="layer")


def other_types():
    for source in some("f32", "f16"):
        for scaling in some("row", "tensor", "128x128"):
            build_tiles(scaling, source=source)


def check_pairs(kernel, arguments, constants, warps, name, rows=True, cols=True, weights=0):
    made = compile(kernel, arguments, constants, warps, enable_fp_fusion=False)
    lines, stack = machine_code(made)
    check_defined(lines, name)
    assert stack == 0 and not any("LDL" in line or "STL" in line for line in lines), name
    reads = re.findall(r"ld[.]global(\\S*)", made.asm["ptx"])
    writes = re.findall(r"st[.]global(\\S*)", made.asm["ptx"])
    # A thread's words of x, four at a time; codes of columns so too, of rows as wide as the launch says.
    words = constants["BR"] * constants["BC"] // 2 // (32 * warps)
    assert reads.count(".v4.b32") >= words // 4, (name, reads)
    wide = ".v4.b32" if constants["V"] == 8 else ".v2.b32"
    expected = {".v4.b32": cols * words // 8}
    expected[wide] = expected.get(wide, 0) + rows * words // constants["V"]
    for width, count in expected.items():
        assert writes.count(width) >= count, (name, writes)
    # A norm's weights, and biases, are read one by one: they may begin anywhere.
    narrow = [width for width in reads + writes if width.endswith(("b8", "b16"))]
    assert len(narrow) <= weights * constants["V"] * 2 and not any("b8" in width for width in narrow), (name, narrow)


def pair_casts():
    arguments = pointers("x_ptr", "*i16") | pointers("out_ptr out_t_ptr", "*u8")
    arguments |= pointers("scale_ptr scale_t_ptr", "*fp32") | pointers("pieces_ptr", "*i32")
    arguments |= pointers("rows cols16 rows16 scale_stride scale_t_stride pieces", "i32")
    arguments |= pointers("eps least", "fp32")
    of_norm = pointers("rstd_ptr mean_ptr", "*fp32") | pointers("weight_ptr bias_ptr", "*i16")
    for scaling, launch in some(*PAIR_LAUNCHES.items()):
        for rows, cols in some((True, True), (True, False), (False, True)):
            fp8 = "e5m2" if scaling == "row" and rows and cols else "e4m3"
            constants = dict(FP8=fp8, SCALING=scaling, TO_ROWS=rows, TO_COLS=cols, PIECES=512)
            constants |= dict(BR=launch.rows, BC=launch.cols, V=launch.vector)
            for norm in ["none"] if scaling == "row" else ["none", "rms", "layer"]:
                constants |= dict(NORM=norm, WEIGHT="bf16", HAS_BIAS=norm == "layer", RAGGED=norm == "layer")
                constants["OVERLAP"] = norm != "none" or scaling == "row"
                unread = dict.fromkeys(dict(none=of_norm, rms=["mean_ptr", "bias_ptr"], layer=[])[norm])
                name = (scaling, rows, cols, norm)
                given = of(pairs.cast_pairs, arguments | of_norm, constants | unread)
                weights = dict(none=0, rms=1, layer=2)[norm]
                check_pairs(pairs.cast_pairs, *given, launch.warps, name, rows, cols, weights)


def guesses():
    arguments = pointers("x_ptr", "*i16") | pointers("out_ptr out_t_ptr", "*u8")
    arguments |= pointers("state_ptr drift_ptr", "*i32")
    sizes, scale = pointers("rows cols padded", "i32"), pointers("scale_ptr", "*fp32")
    launch = guess.GUESS_LAUNCH
    constants = dict(FP8="e4m3", TO_ROWS=True, TO_COLS=True, BR=launch.rows, BC=launch.cols, SOURCE="bf16")
    constants |= dict(V=launch.vector, OVERLAP=True)
    check_pairs(guess._cast, arguments | sizes, constants, launch.warps, "cast")
    check_pairs(guess._check, arguments | scale | sizes | {"eps": "fp32"}, constants, launch.warps, "check")
    for source in some("bf16", "f32"):
        arguments["x_ptr"] = TYPES[source]
        constants |= dict(BR=128, BC=64, SOURCE=source, V=0)
        made = compile(guess._cast, arguments | sizes, constants, 4, enable_fp_fusion=False)
        assert "ld.global.v4" in made.asm["ptx"] and made.asm["ptx"].count("st.global.v4.b32") >= 2
        check_defined(machine_code(made)[0], source)
        made = compile(guess._check, arguments | scale | sizes | {"eps": "fp32"}, constants, 4, enable_fp_fusion=False)
        check_defined(machine_code(made)[0], source)


def activation_casts():
    arguments = pointers("y_ptr dh_ptr", "*i16") | pointers("sums_ptr", "*fp32") | pointers("out_ptr out_t_ptr", "*u8")
    arguments |= pointers("state_ptr drift_ptr", "*i32") | pointers("scale_ptr", "*fp32")
    arguments |= pointers("rows features16 rows16", "i32") | {"eps": "fp32"}
    for kernel in some(activation._cast, activation._check):
        for gradient in some(True, False):
            for act, gated in some(("gelu", False), ("silu", True), ("gelu_tanh", False), ("relu", False)):
                launch = activation.GRADIENT_LAUNCH if gradient else activation.FORWARD_LAUNCH
                sums = gradient and not gated
                constants = dict(ACT=act, GATED=gated, GRADIENT=gradient, SUMS=sums)
                constants |= dict(FP8="e4m3", TO_ROWS=True, TO_COLS=True, OVERLAP=True)
                constants |= dict(BR=launch.rows, BC=launch.cols, V=launch.vector)
                constants |= dict.fromkeys([] if gradient else ["dh_ptr"]) | dict.fromkeys([] if sums else ["sums_ptr"])
                name = (kernel.__name__, gradient, act)
                check_pairs(kernel, *of(kernel, arguments, constants), launch.warps, name)


def expert_casts(*scalings):
    made = dict(x_ptr="*i16", state_ptr="*i32", out_ptr="*u8", scale_ptr="*fp32", out_t_ptr="*u8", scale_t_ptr="*fp32")
    tables = pointers("ends_ptr padded_ends_ptr tile_expert_ptr tile_row_ptr", "*i32")
    made |= tables | pointers("amax_t_ptr", "*i32")
    made |= pointers("experts group16 stride16 cols16 tokens", "i32") | pointers("eps least", "fp32")
    for tokens, scaling in some((True, scalings[0]), (False, scalings[-1])):
        launch = (experts.TOKENS_LAUNCHES if tokens else experts.MATRICES_LAUNCHES)[scaling]
        for rows, cols in some((True, True), (True, False), (False, True)):
            constants = dict(TOKENS=tokens, BR=launch.rows, BC=launch.cols, TO_ROWS=rows, TO_COLS=cols)
            constants |= dict(V=launch.vector, FP8="e4m3", SCALING=scaling, GUESSED=False, MAXIMA=False, EXPERTS=128)
            constants |= dict.fromkeys({} if tokens else tables)
            constants |= dict.fromkeys([] if rows else ["out_ptr", "scale_ptr"])
            constants |= dict.fromkeys([] if cols else ["out_t_ptr", "scale_t_ptr"])
            constants |= dict.fromkeys([] if scaling == "row" and cols else ["amax_t_ptr"])
            if scaling != "tensor" and not (scaling == "row" and rows):
                constants["state_ptr"] = None
            if scaling in ("tensor", "row"):
                maxima = of(experts._cast_words, made, constants | dict(MAXIMA=True))
                largest = compile(experts._cast_words, *maxima, launch.warps)
                assert largest.asm["ptx"].count("ld.global.v4.b32") >= 8 and machine_code(largest)[1] == 0
            ways = [(experts._cast_words, False)]
            if scaling == "tensor":
                ways = [(experts._cast_words, True), (experts._check_tiles, True)] + ways * (rows and cols)
            for kernel, guessed in ways:
                name = (kernel.__name__, scaling, tokens, rows, cols, guessed)
                given = of(kernel, made, constants | dict(GUESSED=guessed))
                check_pairs(kernel, *given, launch.warps, name, rows, cols)


def of(kernel, arguments, constants):
    # Those that a kernel has.
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    known = (name for name in kernel.arg_names if name in arguments and name not in constants)
    return {name: arguments[name] for name in known}, constants


def build_maxima():
    for size in some("i32", "i64"):
        arguments = pointers("x_ptr", "*i16") | pointers("partial_ptr", "*i32")
        ptx = build(amax._amax_of_pieces, arguments | {"size": size}, dict(SOURCE="bf16", NUMBERS=8192), 8)
        assert "ld.global.v4" in ptx
        made = compile(amax._amax_of_pairs, arguments | {"size16": size}, dict(WORDS=8192), 8)
        assert "ld.global.v4" in made.asm["ptx"] and "max.NaN.xorsign.abs.bf16x2" in made.asm["ptx"]
        assert machine_code(made)[1] == 0
    parts = pointers("row_ptr col_ptr", "*i32")
    arguments = pointers("x_ptr", "*i16") | pointers("bits_ptr", "*i32") | pointers("rows cols16 padded length", "i32")
    made = compile(amax._maxima_of_pairs, arguments, dict(BR=8, OVERLAP=True), 4)
    assert made.asm["ptx"].count("ld.global.v4.b32") == 8 and machine_code(made)[1] == 0
    arguments = pointers("x_ptr", "*i16") | parts | pointers("rstd_ptr mean_ptr", "*fp32")
    arguments |= pointers("weight_ptr bias_ptr", "*i16") | pointers("rows cols length", "i32")
    build(amax._strips, arguments, dict(SOURCE="bf16", NORM="none", WEIGHT="none", HAS_BIAS=False, BR=128, BC=128), 8)
    arguments = pointers("row_parts_ptr col_parts_ptr", "*i32") | pointers("scale_ptr scale_t_ptr", "*fp32")
    arguments |= pointers("rows cols padded across down row_programs", "i32") | {"eps": "fp32"}
    build(amax._finish_scales, arguments, dict(FP8="e4m3", WIDTH=64, PARTS=32), 4, enable_fp_fusion=False)


def norms():
    arguments = pointers("x_ptr weight_ptr bias_ptr", "*i16") | pointers("rstd_ptr mean_ptr", "*fp32")
    arguments |= pointers("partial_ptr", "*i32") | {"rows": "i32", "cols": "i32", "norm_eps": "fp32"}
    constants = dict(EACH=16, T=2, SOURCE="bf16", WEIGHT="bf16", NORM="layer", HAS_BIAS=True, AMAX=True, BC=4096)
    constants |= dict(OVERLAP=True)
    build(norm._row_stats, arguments, constants, 8, enable_fp_fusion=False)
    arguments = pointers("dy_ptr x_ptr weight_ptr", "*i16") | pointers("rstd_ptr mean_ptr", "*fp32")
    arguments |= pointers("dx_ptr", "*i16") | pointers("sums_ptr", "*fp32")
    arguments |= {"rows": "i32", "cols": "i32", "programs": "i32"}
    constants = dict(EACH=32, T=2, SOURCE="bf16", GRAD="bf16", WEIGHT="bf16", NORM="rms", HAS_BIAS=False, BC=4096)
    constants |= dict(OVERLAP=True)
    build(norm._norm_gradient, arguments, constants, 8)


def products():
    for a, b, square in some(("e5m2", "e4m3", False), ("e4m3", "e4m3", True)):
        kinds = {"e4m3": "*fp8e4nv", "e5m2": "*fp8e5"}
        arguments = {"a_ptr": kinds[a], "b_ptr": kinds[b]} | pointers("a_scale_ptr b_scale_ptr", "*fp32")
        arguments |= pointers("bias_ptr out_ptr", "*i16") | pointers("rows cols width b_scale_stride", "i32")
        constants = dict(A=a, B=b, SQUARE=square, BIAS="none", OUT="bf16", BM=64, BN=128, GROUP=8, STAGES=4)
        ptx = build(product._block_scaled, arguments, constants, 4)
        assert f"wgmma.mma_async.sync.aligned.m64n128k32.f32.{a}.{b}" in ptx, (a, b)


parts = dict(casts=casts, other_types=other_types, pair_casts=pair_casts, guesses=guesses, maxima=build_maxima)
parts |= dict(activations=activation_casts)
parts |= dict(expert_casts=lambda: expert_casts("tensor"), expert_rows=lambda: expert_casts("row"))
parts |= dict(expert_blocks=lambda: expert_casts("1x128", "128x128"))
parts |= dict(norms=norms, products=products)
for part in sys.argv[2:]:
    parts[part]()
print("compiled")
"""


PARTS = ("casts", "products", "guesses", "activations", "maxima", "norms")
PARTS += ("other_types", "pair_casts", "expert_casts", "expert_blocks", "expert_rows")
RUNS = [pytest.param("some", ("casts", "products"), id="some casts and products")]
RUNS += [pytest.param("all", (part,), id=f"all {part}", marks=pytest.mark.long) for part in PARTS]


@pytest.mark.parametrize(("variants", "parts"), RUNS)
def test_fp8_kernels_compile_for_hopper(variants: str, parts: tuple[str, ...], tmp_path) -> None:
    assert compile_with_triton(PROGRAM, variants, *parts, folder=tmp_path) == "compiled\n"
