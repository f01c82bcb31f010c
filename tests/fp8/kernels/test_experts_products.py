"""Grouped casts and products against their definition, bit for bit, and against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from bitplan.base.errors import FormatError
from bitplan.fp8.kernels import experts_products
from bitplan.fp8.kernels.experts_layout import GroupedFp8, GroupLayout
from bitplan.fp8.kernels.experts_products import cast_experts, cast_tokens, lay_out
from tests.crosses import few
from tests.processes import compile_with_triton

pytest.importorskip("triton")

# Empty experts, one token, all tokens to one expert, skew, counts that are no multiple of any padding, and no tokens.
ROUTINGS = {
    "skewed": [0, 1, 131, 0, 5],
    "one expert takes all": [0, 0, 130, 0],
    "only one expert": [131],
    "whole tiles": [128, 256],
    "nobody": [0, 0, 0],
}
RECIPES = ("tensorwise", "rowwise", "blockwise")


def routed(counts: list[int], device: torch.device, pad: int, impl: str) -> GroupLayout:
    given = torch.tensor(counts, device=device if impl == "triton" else "cpu")
    return lay_out(given, sum(counts), pad, impl=impl)


def tokens(counts: list[int], width: int, seed: int = 0) -> Tensor:
    made = torch.randn(sum(counts), width, generator=torch.Generator().manual_seed(seed))
    return (made * torch.exp2(torch.arange(len(made)) % 7 - 3.0)[:, None]).bfloat16()


def same(result: GroupedFp8 | None, expected: GroupedFp8 | None) -> None:
    assert result is not None
    assert expected is not None
    assert torch.equal(result.codes.cpu().view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(result.scale.cpu(), expected.scale)
    assert result.kind == expected.kind


# ---- layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.cross("counts", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.cross("pad", [16, 128])
def test_layout_on_the_device_matches_the_definition(counts, pad, device) -> None:
    result, expected = routed(counts, device, pad, "triton"), routed(counts, device, pad, "reference")
    used = int((expected.tile_expert >= 0).sum())
    for field in dataclasses.fields(GroupLayout):
        one, other = getattr(result, field.name), getattr(expected, field.name)
        if isinstance(one, Tensor):
            until = used if field.name in ("tile_row", "tile_end") else None
            assert torch.equal(one.cpu()[:until], other[:until]), field.name
        else:
            assert one == other
    assert result.padded_ends[-1] <= result.padded_rows


def test_layout_of_many_experts(device) -> None:
    counts = [(7 * expert) % 61 for expert in range(200)]
    result, expected = routed(counts, device, 16, "triton"), routed(counts, device, 16, "reference")
    assert torch.equal(result.tile_expert.cpu(), expected.tile_expert)
    assert torch.equal(result.by_size.cpu(), expected.by_size)
    used = int(expected.tiles_used)
    assert torch.equal(result.tile_end[:used].cpu(), expected.tile_end[:used])
    assert torch.equal(result.tiles_used.cpu(), expected.tiles_used)


@pytest.mark.parametrize("experts", [1, 3, 8])
@pytest.mark.parametrize("rows", [1, 129, 700])
def test_every_table_begins_at_a_multiple_of_16_bytes(experts, rows, device) -> None:
    counts = [rows] + [0] * (experts - 1)
    layout = routed(counts, device, 16, "triton")
    tables = [getattr(layout, field.name) for field in dataclasses.fields(GroupLayout)]
    starts = [table.storage_offset() * table.itemsize for table in tables if isinstance(table, Tensor)]
    assert len(starts) == 7
    assert not any(start % 16 for start in starts)


@pytest.mark.parametrize(
    ("counts", "wrong"),
    [([5, 10, -2], 3), ([20, -12, 2], 12), ([4, 4, 2], 0), ([3, 3, 3], 1), ([2**31, 1, 1], 2**31 - 8)],
)
def test_wrong_counts_are_cut_to_the_rows_and_told(counts, wrong, device) -> None:
    given = torch.tensor(counts, device=device)
    misrouted = torch.zeros(1, dtype=torch.int32, device=device)
    layout = lay_out(given, 10, 16, misrouted=misrouted, impl="triton")
    assert int(misrouted) == wrong
    assert int(layout.ends.max()) <= 10
    assert int(layout.padded_ends[-1]) <= layout.padded_rows
    if wrong:
        with pytest.raises(FormatError, match="add up to the 10 rows"):
            lay_out(given.cpu(), 10, 16, impl="reference")


def test_odd_counts_are_refused() -> None:
    with pytest.raises(FormatError, match=r"int32 or int64 \[experts\], got torch.float32"):
        lay_out(torch.ones(3), 3, 16)


# ---- casts -----------------------------------------------------------------------------------------------------------


# bfloat16 is cast as words of two numbers, all else one number at a time.
CASES = [pytest.param(counts, torch.bfloat16, id=name) for name, counts in ROUTINGS.items()]
CASES += [pytest.param(ROUTINGS["skewed"], torch.float32, id="skewed float32")]


@pytest.mark.cross(("counts", "dtype"), few(CASES, 4))
@pytest.mark.cross("recipe", RECIPES)
def test_token_cast_matches_the_definition(recipe, counts, dtype, device) -> None:
    pad = 128 if recipe == "blockwise" else 16
    layout, reference = routed(counts, device, pad, "triton"), routed(counts, device, pad, "reference")
    x = tokens(counts, 256 if recipe == "blockwise" else 144).to(dtype)
    rows, cols = cast_tokens(x.to(device), recipe, layout, eps=1e-3, impl="triton")
    expected_rows, expected_cols = cast_tokens(x, recipe, reference, eps=1e-3, impl="reference")
    same(rows, expected_rows)
    assert cols is not None
    assert expected_cols is not None
    used = int(reference.padded_ends[-1])  # behind it is memory that nothing reads
    by = used // 128 if recipe == "blockwise" else None
    same(
        GroupedFp8(cols.codes[:, :used], cols.scale[:by], cols.kind),
        GroupedFp8(expected_cols.codes[:, :used], expected_cols.scale[:by], cols.kind),
    )


@pytest.mark.cross("fp8", ["e4m3", "e5m2"])
@pytest.mark.cross("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rowwise_token_cast_of_every_type_in_one_layout(fp8, dtype, device) -> None:
    counts = [3, 0, 18]
    layout, reference = routed(counts, device, 16, "triton"), routed(counts, device, 16, "reference")
    x = tokens(counts, 48).to(dtype)
    rows, cols = cast_tokens(x.to(device), "rowwise", layout, fp8, cols=False, impl="triton")
    same(rows, cast_tokens(x, "rowwise", reference, fp8, cols=False, impl="reference")[0])
    assert cols is None
    rows, cols = cast_tokens(x.to(device), "rowwise", layout, fp8, rows=False, impl="triton")
    assert rows is None
    assert cols is not None
    expected = cast_tokens(x, "rowwise", reference, fp8, rows=False, impl="reference")[1]
    assert expected is not None
    assert torch.equal(cols.codes[:, :48].cpu().view(torch.uint8), expected.codes[:, :48].view(torch.uint8))


@pytest.mark.cross("fp8", ["e4m3", "e5m2"])
@pytest.mark.cross("asked", [{"rows": False}, {"cols": False}], ids=str)
def test_blocks_of_bfloat16_tokens_in_one_layout(fp8, asked, device) -> None:
    counts = [3, 0, 18]
    layout, reference = routed(counts, device, 128, "triton"), routed(counts, device, 128, "reference")
    x = tokens(counts, 256)
    x[4, 3] = float("inf")
    result = cast_tokens(x.to(device), "blockwise", layout, fp8, impl="triton", **asked)
    for one, other in zip(result, cast_tokens(x, "blockwise", reference, fp8, impl="reference", **asked), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            # Both layouts have 256 columns in 2 blocks that something reads.
            assert torch.equal(*[each.codes.view(torch.uint8)[:, :256].cpu() for each in (one, other)])
            assert torch.equal(*[each.scale[:2].cpu().nan_to_num(-1) for each in (one, other)])


@pytest.mark.parametrize("recipe", RECIPES)
def test_nan_stays_with_its_expert(recipe, device) -> None:
    counts = [10, 20]
    layout = routed(counts, device, 128, "triton")
    x = tokens(counts, 128)
    x[3, 5] = float("nan")
    rows, _ = cast_tokens(x.to(device), recipe, layout, impl="triton")
    assert rows is not None
    values = experts_products._decode_rows(GroupedFp8(rows.codes.cpu(), rows.scale.cpu(), rows.kind), 0, 30)
    assert values[3].isnan().any()
    assert values[10:].isfinite().all()


@pytest.mark.cross("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.cross("recipe", RECIPES)
def test_matrix_cast_matches_the_definition(recipe, dtype, device) -> None:
    shape = (2, 256, 128) if recipe == "blockwise" else (2, 144, 80)
    w = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    w[1] = 0
    result = cast_experts(w.to(device), recipe, 1e-6, impl="triton")
    for one, other in zip(result, cast_experts(w, recipe, 1e-6, impl="reference"), strict=True):
        same(one, other)


def test_sizes_that_do_not_fit_are_refused() -> None:
    layout = lay_out(torch.tensor([4]), 4, 16)
    with pytest.raises(FormatError, match="multiples of 128, got 48"):
        cast_tokens(torch.zeros(4, 48), "blockwise", layout)
    with pytest.raises(FormatError, match="a layout padded to 16"):
        cast_tokens(torch.zeros(4, 128), "blockwise", layout)
    with pytest.raises(FormatError, match="multiples of 16, got 40"):
        cast_experts(torch.zeros(2, 32, 40), "tensorwise")
    with pytest.raises(FormatError, match="experts are cast by tensorwise, rowwise, blockwise, got 'mxfp8'"):
        cast_experts(torch.zeros(2, 32, 32), "mxfp8")


# ---- products --------------------------------------------------------------------------------------------------------


def decoded(cast: GroupedFp8, kind: str, layout: GroupLayout) -> list[Tensor]:
    """What each expert's part stands for, in float64."""
    decode = {"rows": experts_products._decode_rows, "cols": experts_products._decode_cols}[kind]
    if kind == "rows":
        return [decode(cast, *span).double() for span in layout.spans()]
    ends = layout.padded_ends.tolist()
    return [
        decode(cast, at, start, end).double() for at, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
    ]


def on(device: torch.device, cast: GroupedFp8) -> GroupedFp8:
    return GroupedFp8(cast.codes.to(device), cast.scale.to(device), cast.kind)


def launches(kind: str) -> list[tuple[int, int, bool]]:
    return [(128, 128, True), (64, 128, False)] if kind == "block" else [(128, 256, True), (64, 64, False)]


@pytest.mark.cross("counts", [[0, 1, 131, 0], [70]], ids=["skewed", "one"])
@pytest.mark.cross("recipe", RECIPES)
def test_products_match_float64_of_the_decoded_operands(recipe, counts, device) -> None:
    from bitplan.fp8.kernels.triton_product import GroupedLaunch

    blocks = recipe == "blockwise"
    outputs, inputs = (128, 256) if blocks else (80, 144)
    layout, reference = routed(counts, device, 128, "triton"), routed(counts, device, 128, "reference")
    x, dy = tokens(counts, inputs), tokens(counts, outputs, 1).float()
    w = torch.randn(len(counts), outputs, inputs, generator=torch.Generator().manual_seed(2)).bfloat16()
    bias = torch.randn(len(counts), outputs, generator=torch.Generator().manual_seed(3))
    x_rows, x_cols = cast_tokens(x, recipe, reference)
    dy_rows, dy_cols = cast_tokens(dy, recipe, reference, "e5m2")
    w_rows, w_cols = cast_experts(w, recipe)
    matrices = [experts_products._decode_matrix(w_rows, expert).double() for expert in range(len(counts))]
    y = torch.cat([a @ w.t() + b for a, w, b in zip(decoded(x_rows, "rows", reference), matrices, bias, strict=True)])
    matrices = [experts_products._decode_matrix(w_cols, expert).double() for expert in range(len(counts))]
    dx = torch.cat([a @ w.t() for a, w in zip(decoded(dy_rows, "rows", reference), matrices, strict=True)])
    pairs = zip(decoded(dy_cols, "cols", reference), decoded(x_cols, "cols", reference), strict=True)
    dw = torch.stack([a @ b.t() for a, b in pairs])
    for rows, cols, tma in launches(x_rows.kind):
        options = {"impl": "triton", "launch": GroupedLaunch(rows, cols, 4, 2, tma)}
        made = (
            experts_products.grouped_rows(
                on(device, x_rows), on(device, w_rows), layout, torch.float32, bias=bias.to(device), **options
            ),
            experts_products.grouped_rows(on(device, dy_rows), on(device, w_cols), layout, torch.float32, **options),
            experts_products.grouped_sums(on(device, dy_cols), on(device, x_cols), layout, torch.float32, **options),
        )
        limit = 1e-3 if device.type == "cuda" else 1e-5  # the tensor cores add with 14 bits
        for value, expected in zip(made, (y, dx, dw), strict=True):
            assert (value.cpu().double() - expected).norm() <= limit * expected.norm()
        assert not made[2][torch.tensor(counts) == 0].any()
    emulated = experts_products.grouped_rows(x_rows, w_rows, reference, torch.bfloat16, bias=bias)
    assert (emulated.double() - y).norm() <= 3e-3 * y.norm()
    emulated = experts_products.grouped_sums(dy_cols, x_cols, reference, torch.float32)
    assert (emulated.double() - dw).norm() <= 1e-5 * dw.norm()


def test_implementations_that_cannot_are_refused() -> None:
    cpu = torch.device("cpu")
    assert experts_products.pick_impl("rowwise", cpu) == "reference"
    with pytest.raises(FormatError, match="on compute capability 9, got blockwise e4m3 on cpu"):
        experts_products.pick_impl("blockwise", cpu, impl="torch")
    with pytest.raises(FormatError, match="impl must be one of auto"):
        experts_products.pick_impl("rowwise", cpu, impl="cublas")
    layout = lay_out(torch.tensor([4]), 4, 16)
    _, cols = cast_tokens(torch.ones(4, 16), "rowwise", layout)
    assert cols is not None
    with pytest.raises(FormatError, match="sums 128 tokens at once, got a layout padded to 16"):
        experts_products.grouped_sums(cols, cols, layout, torch.float32, impl="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_torch_products_match_the_definition(recipe, device) -> None:
    counts, outputs, inputs = [0, 1, 200, 0, 37], 144, 208
    layout, reference = routed(counts, device, 16, "triton"), routed(counts, device, 16, "reference")
    x, dy = tokens(counts, inputs), tokens(counts, outputs, 1)
    w_rows, _ = cast_experts(torch.randn(len(counts), outputs, inputs).bfloat16(), recipe)
    (x_rows, x_cols), (_, dy_cols) = cast_tokens(x, recipe, reference), cast_tokens(dy, recipe, reference)
    result = experts_products.grouped_rows(on(device, x_rows), on(device, w_rows), layout, torch.bfloat16, impl="torch")
    expected = experts_products.grouped_rows(x_rows, w_rows, reference, torch.float32)
    assert (result.cpu() - expected).norm() <= 5e-3 * expected.norm()
    result = experts_products.grouped_sums(
        on(device, dy_cols), on(device, x_cols), layout, torch.bfloat16, impl="torch"
    )
    expected = experts_products.grouped_sums(dy_cols, x_cols, reference, torch.float32)
    assert (result.cpu() - expected).norm() <= 5e-3 * expected.norm()
    assert not result[torch.tensor(counts) == 0].any()


# ---- compiling -------------------------------------------------------------------------------------------------------

PROGRAM = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from bitplan.fp8.kernels import experts_general_cast as cast
from bitplan.fp8.kernels import triton_product as matmul


def build(kernel, arguments, constants, warps=8, stages=3):
    signature = arguments | {name: "constexpr" for name in constants}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(arguments.values()) if kind.startswith("*")}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


tables = dict.fromkeys(("expert_ptr", "row_ptr", "ends_ptr"), "*i32")
cast_tables = dict.fromkeys(("ends_ptr", "padded_ends_ptr", "tile_expert_ptr", "tile_row_ptr"), "*i32")
numbers = dict(rows="i32", experts="i32", tiles="i32")
build(cast._lay_out, dict(counts_ptr="*i64", out_ptr="*i32", misrouted_ptr="*i32") | numbers,
      dict(EXPERTS=128, PAD=16, TILE=128, CHUNK=64))
for scaling, group in [("row", 0), ("tensor", 0), ("1x128", 0), ("128x128", 256)]:
    fixed = dict(C=512, GROUP=group, SOURCE="bf16", SCALING=scaling, BR=128, BC=128, TO_ROWS=True, TO_COLS=True)
    pointers = dict(x_ptr="*i16", amax_ptr="*i32", out_ptr="*u8", scale_ptr="*fp32")
    pointers |= dict(out_t_ptr="*u8", scale_t_ptr="*fp32") | cast_tables | dict(amax_t_ptr="*i32")
    fixed |= dict(FP8="e5m2" if scaling == "row" else "e4m3")
    for maxima in (True, False) if scaling in ("row", "tensor") else (False,):
        ptx = build(cast._cast_numbers, pointers | dict(tokens="i32", cols_stride="i32", eps="fp32"),
                    fixed | dict(MAXIMA=maxima))
        assert ("cvt.rn.satfinite.e" in ptx) != maxima
kinds = {"e4m3": "fp8e4nv", "e5m2": "fp8e5"}
for scales, fast, a, tma in [("block", True, "e5m2", True), ("vector", True, "e4m3", True),
                             ("vector", False, "e5m2", False), ("block", True, "e4m3", False)]:
    operand = lambda kind: f"tensordesc<{kinds[kind]}[128, 128]>" if tma else "*" + kinds[kind]
    pointers = dict(a_ptr=operand(a), b_ptr=operand("e4m3"), a_scales_ptr="*fp32", b_scales_ptr="*fp32")
    pointers |= dict(bias_ptr="*fp32", out_ptr="*i16") | tables | dict(rows="i32", tiles="i32", stride="i32")
    fixed = dict(SCALES=scales, A=a, B="e4m3", OUT="bf16", FAST=fast, BM=128, BN=128, BK=128, HALVES=1, TOGETHER=8)
    fixed |= dict(TMA=tma)
    for height, width, length in ((0, 512, 1024), (512, 1024, 0)):  # rows of tokens; sums over them
        sizes = dict(HEIGHT=height, WIDTH=width, LENGTH=length, BIAS=not height)
        ptx = build(matmul._tile_product, pointers, sizes | fixed)
        assert "wgmma.mma_async" in ptx, (scales, a, tma)
        assert ("cp.async.bulk.tensor" in ptx) == tma
print("compiled")
"""


@pytest.mark.long
def test_kernels_compile_for_hopper(tmp_path) -> None:
    assert compile_with_triton(PROGRAM, folder=tmp_path) == "compiled\n"
