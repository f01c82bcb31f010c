"""Matrix products over packed weights on the GPU: x [M, K] times W [N, K], W read once, as it is stored.

    out_MN = fused_matmul(x_MK, weight, arranged, bias)         arranged = arrange_scales(weight), once per weight
    out_PN = fused_experts(x, weight_ENK, arranged, routing)    every pair (token, expert) of a layer in one launch

x and out are bfloat16. Codes become bfloat16 in registers and meet x in the tensor cores; sums are float32. Where a
code times its scale is a bfloat16 (mxfp4, nvfp4) or is rounded to one as `decode` does (int4_g32, q4_0_gguf), the
product equals `decode` then `F.linear` but for the order of the float32 sums; the other formats are scaled in
float32 after the sum over a block, which rounds less than `decode` does.

The floor, and how it is approached (H200, mxfp4, M = 1): 0.53 bytes a weight over 4.2 TB/s leave 4.2 lane slots of the
integer pipe (64 lanes an SM) a weight at full speed. The decoder of `decode_words` takes 1.25; tensor cores keep
multiplications off the lanes. Split-K gives enough programs, and the last to finish adds up the others. The kernel is
in `few_rows_kernel`. Up to 8 rows `direct` is faster, which needs neither shared memory nor split-K; more than 64 rows
go to `fused_many_rows`.

Legend: N outputs, K inputs, M rows of x, E experts, P pairs.

The kernel of `fused_few_rows`.

Legend: N outputs, K inputs, M rows of x, B bytes of a step, S scales of a step, L slices.

How a fused product may be cut up: launches worth measuring, and one that is never far off.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitplan.base.errors import FormatError
from bitplan.base.loops.launch import INTERPRETED, PreparedLaunch
from bitplan.formats.codec import decode, encode
from bitplan.formats.encoded import Encoded
from bitplan.formats.format import Format
from bitplan.formats.registry import get_format
from bitplan.formats.triton_numbers import narrow
from bitplan.packed.products.decode_words import (
    floats_of_bytes,
    floats_of_nibbles,
    is_last_of_split,
    multiplier_of_scale,
    scaled_with_bias,
    split_pairs,
    sum_of_split,
    words_of_bytes,
    words_of_nibbles,
)
from bitplan.packed.products.direct_products import direct_launch, direct_pointers, prepare_direct, runs_direct
from bitplan.packed.products.expert_routing import WIDEST_TILE, Routing, tile_rows
from bitplan.packed.products.fused_many_rows import wide_candidates, wide_matmul
from bitplan.packed.products.fused_weights import (
    FUSED_FORMATS,
    WIDEST_STEP,
    ArrangedScales,
    MatmulLaunch,
    arrange_scales,
    can_overlap,
    join_scales,
    why_not_fused,
)

# ---- fused choices ---------------------------------------------------------------------------------------------------


STEP = 128
FEW_OUTPUTS = 4096  # up to which programs of 16 outputs are better than larger ones


def candidate_launches(weight: Encoded, rows: int) -> list[MatmulLaunch]:
    """Launches worth measuring for this many rows of x: those that came first somewhere on an H200."""
    tile = tile_rows(rows)
    if rows > 2 * WIDEST_TILE:
        return wide_candidates(weight, rows)
    if rows > WIDEST_TILE:  # two tiles, or one that is read from shared memory
        return [*_cut(weight, tile, [(32, 4, 1), (32, 2, 2)]), *wide_candidates(weight, rows)[:2]]
    if rows > 8:  # outputs, slices, split
        cuts = [(64, 4, 1), (32, 4, 1), (32, 2, 2)] if rows <= 16 else [(32, 4, 1), (32, 2, 2)]
        return [*_cut(weight, tile, cuts), *(_direct(weight, tile, [(16, 8, 3)]) if rows <= 16 else [])]
    if not runs_direct(weight.device):
        return _cut(weight, tile, [(32, 2, 4), (32, 2, 2), (64, 2, 1), (32, 4, 1)])
    nibbles = weight.fmt.packing is not None
    if weight.shape[-2] <= FEW_OUTPUTS:
        of_bytes = [] if nibbles else _cut(weight, tile, [(16, 4, 1)])
        return [*_direct(weight, tile, [(16, 16, 5), (16, 8, 5), (16, 4, 5)]), *of_bytes]
    if nibbles:
        cuts = [(32, 8, 3), (16, 8, 5), (16, 4, 5), (16, 4, 3)]
        return [*_direct(weight, tile, cuts), *_cut(weight, tile, [(64, 2, 1)])]
    return [*_direct(weight, tile, [(32, 8, 3), (16, 8, 5)]), *_cut(weight, tile, [(32, 4, 1), (16, 4, 1)])]


def _cut(weight: Encoded, tile: int, cuts: list[tuple[int, int, int]]) -> list[MatmulLaunch]:
    return [
        MatmulLaunch(outputs, tile, STEP, slices, split, slices, 3, overlap=1)
        for outputs, slices, split in cuts
        if split == 1 or weight.shape[-1] >= 2 * split * slices * STEP
    ]


def _direct(weight: Encoded, tile: int, cuts: list[tuple[int, int, int]]) -> list[MatmulLaunch]:
    """Of outputs, warps and stages; with fewer warps where there are not inputs for all; runs of two if there are."""
    if not runs_direct(weight.device):
        return []
    inputs = STEP if weight.fmt.packing is not None else STEP // 2
    most = 1 << max(0, (weight.shape[-1] // inputs).bit_length() - 1)
    launches = [
        direct_launch(outputs, tile, min(warps, most), stages, run=2 if 2 * warps <= most else 1)
        for outputs, warps, stages in cuts
    ]
    return list(dict.fromkeys(launches))


def default_launch(weight: Encoded, rows: int) -> MatmulLaunch:
    """A launch that is never far off: enough programs to fill the GPU, found on an H200."""
    if rows > 2 * WIDEST_TILE:
        return wide_candidates(weight, rows)[0]
    if rows <= 8 and runs_direct(weight.device):
        return candidate_launches(weight, rows)[0]
    outputs, slices = (32, 4) if rows <= 16 else (32, 2)
    programs = triton.cdiv(weight.shape[-2], outputs) * triton.cdiv(rows, tile_rows(rows))
    split = 1
    while programs * split < 256 and split < 4 and weight.shape[-1] >= 4 * split * slices * STEP:
        split *= 2
    return MatmulLaunch(outputs, tile_rows(rows), STEP, slices, split, slices, 3, overlap=1)


# ---- few rows kernel -------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows"])
def few_rows_kernel(
    x_ptr,
    out_ptr,
    partial_ptr,
    data_ptr,
    scales_ptr,
    factor_ptr,
    bias_ptr,
    counters_ptr,
    tile_expert_ptr,
    pairs_ptr,
    tile_first_ptr,
    tile_count_ptr,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    ORDER: tl.constexpr,
    NIBBLES: tl.constexpr,
    GROUP: tl.constexpr,
    FACTORS: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPED: tl.constexpr,
    PAIRS_A_ROW: tl.constexpr,
    EXPERTS: tl.constexpr,
    QUADS_OF_ROW: tl.constexpr,
    SLICES: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    WORDS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    block, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    lane_M = tl.arange(0, BM)
    PER_BYTE: tl.constexpr = 2 if NIBBLES else 1
    BYTES: tl.constexpr = BK // PER_BYTE
    STEPS: tl.constexpr = (K + BK * SLICES - 1) // (BK * SLICES)
    EACH: tl.constexpr = (STEPS + SPLIT - 1) // SPLIT
    WHOLE: tl.constexpr = K % (BK * SLICES) == 0
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # before anything is read that the kernel before may write
    if GROUPED != "no":
        expert = tl.load(tile_expert_ptr + tile)
        if GROUPED == "sorted":
            if expert < 0:
                return
            ok_M = lane_M < tl.load(tile_count_ptr + tile)
            out_M = tl.load(pairs_ptr + tl.load(tile_first_ptr + tile) + lane_M, mask=ok_M, other=0)
        else:
            ok_M = lane_M == 0
            out_M = tile + lane_M
        x_M = out_M // PAIRS_A_ROW
        if (expert < 0) | (expert >= EXPERTS):
            n_N = block * BN + tl.arange(0, BN)
            at_NM = out_M[None, :].to(tl.int64) * N + n_N[:, None]
            tl.store(out_ptr + at_NM, tl.full([BN, BM], 0x7FC0, tl.int16), mask=(n_N < N)[:, None] & ok_M[None, :])
            return
    else:
        expert = 0
        out_M = tile * BM + lane_M
        ok_M = out_M < rows
        x_M = out_M
    n_N = block * BN + tl.arange(0, BN)
    row_N = tl.minimum(n_N, N - 1) if N % BN != 0 else n_N

    # A step covers SLICES neighbouring pieces of K, one for each group of warps: no program waits for another's sum.
    slice_L = tl.arange(0, SLICES)
    byte_LB = slice_L[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    data_ptr += expert.to(tl.int64) * (N * (K // PER_BYTE)) if GROUPED != "no" else 0
    at_LNB = row_N[None, :, None].to(tl.int64) * (K // PER_BYTE) + byte_LB[:, None, :]
    # "halves": byte j of a block holds inputs j and j + 16
    input_LB = byte_LB // 16 * 32 + byte_LB % 16 if ORDER == "halves" else byte_LB
    X_WIDTH: tl.constexpr = K // 2 if ORDER == "low_first" else K
    X_STEP: tl.constexpr = SLICES * BK // 2 if ORDER == "low_first" else SLICES * BK
    at_LBM = x_M[None, None, :].to(tl.int64) * X_WIDTH + input_LB[:, :, None]
    IS_PRE: tl.constexpr = GROUP != 0 and GROUP < 128
    IS_POST: tl.constexpr = GROUP == 128
    S: tl.constexpr = BK // GROUP if IS_PRE else 1
    PER_SCALE: tl.constexpr = BYTES // S
    QUADS: tl.constexpr = QUADS_OF_ROW
    if IS_PRE:
        scales_ptr += expert.to(tl.int64) * (QUADS * N * 4) if GROUPED != "no" else 0
        scale_LS = slice_L[:, None] * S + tl.arange(0, S)[None, :]
        at_LNS = row_N[None, :, None] * 4 + (scale_LS // 4 * (N * 4) + scale_LS % 4)[:, None, :]
    elif IS_POST:
        scales_ptr += expert.to(tl.int64) * ((K // 128) * N) if GROUPED != "no" else 0
        at_LN = slice_L[:, None] * N + row_N[None, :]
    else:
        scales_ptr += expert.to(tl.int64) * N if GROUPED != "no" else 0

    acc_LNM = tl.zeros([SLICES, BN, BM], tl.float32)
    for step in tl.range(split * EACH, tl.minimum(split * EACH + EACH, STEPS), num_stages=STAGES):
        ok_LBM = ok_M[None, None, :]
        if WHOLE:
            byte_LNB = tl.load(data_ptr + step * (SLICES * BYTES) + at_LNB)
        else:
            ok_LB = step * (SLICES * BYTES) + byte_LB < K // PER_BYTE
            ok_LBM = ok_LBM & ok_LB[:, :, None]
            byte_LNB = tl.load(data_ptr + step * (SLICES * BYTES) + at_LNB, mask=ok_LB[:, None, :], other=0)
        if IS_POST:
            if WHOLE:
                scale_LN = tl.load(scales_ptr + step * (SLICES * N) + at_LN).to(tl.float32)
            else:
                ok_L1 = (step * SLICES + slice_L < K // 128)[:, None]
                scale_LN = tl.load(scales_ptr + step * (SLICES * N) + at_LN, mask=ok_L1, other=0).to(tl.float32)
        if NIBBLES:
            if IS_PRE:
                stored_LNS = tl.load(scales_ptr + step * (SLICES * S * N) + at_LNS)
                first_LNS, second_LNS = multiplier_of_scale(stored_LNS, SCALE, WORDS)
                first = tl.reshape(
                    tl.broadcast_to(first_LNS[:, :, :, None], [SLICES, BN, S, PER_SCALE]), [SLICES, BN, BYTES]
                )
                if SCALE == "f16":
                    second = tl.reshape(
                        tl.broadcast_to(second_LNS[:, :, :, None], [SLICES, BN, S, PER_SCALE]), [SLICES, BN, BYTES]
                    )
                else:
                    second = first
            else:
                first = tl.full(
                    [SLICES, BN, BYTES], 0x7E807E80 if WORDS != "none" else 0x3F800000, tl.int32
                )  # 2^126, or 1.0
                second = first
            if WORDS != "none":
                low_LNB, high_LNB = words_of_nibbles(byte_LNB, first, second, ELEMENT, SCALE, WORDS)
            else:
                low_LNB, high_LNB = floats_of_nibbles(byte_LNB, first, ELEMENT)
            if ORDER == "low_first":
                pair_LBM = tl.load(x_ptr + step * X_STEP + at_LBM, mask=ok_LBM, other=0)
                xlow_LBM, xhigh_LBM = split_pairs(pair_LBM, WORDS)
            else:
                xlow_LBM = _wide(tl.load(x_ptr + step * X_STEP + at_LBM, mask=ok_LBM, other=0), WORDS)
                xhigh_LBM = _wide(tl.load(x_ptr + step * X_STEP + at_LBM + 16, mask=ok_LBM, other=0), WORDS)
            if IS_POST:
                sum_LNM = tl.dot(low_LNB, xlow_LBM, input_precision="ieee")
                sum_LNM = tl.dot(high_LNB, xhigh_LBM, sum_LNM, input_precision="ieee")
                acc_LNM += sum_LNM * scale_LN[:, :, None]
            else:
                acc_LNM = tl.dot(low_LNB, xlow_LBM, acc_LNM, input_precision="ieee")
                acc_LNM = tl.dot(high_LNB, xhigh_LBM, acc_LNM, input_precision="ieee")
        else:
            w_LNB = words_of_bytes(byte_LNB, ELEMENT) if WORDS != "none" else floats_of_bytes(byte_LNB, ELEMENT)
            x_LBM = _wide(tl.load(x_ptr + step * X_STEP + at_LBM, mask=ok_LBM, other=0), WORDS)
            if IS_POST:
                acc_LNM += tl.dot(w_LNB, x_LBM, input_precision="ieee") * scale_LN[:, :, None]
            else:
                acc_LNM = tl.dot(w_LNB, x_LBM, acc_LNM, input_precision="ieee")
    if OVERLAP:
        # Not earlier: programs of the next launch would take the places of programs that still have weights to read.
        tl.extra.cuda.gdc_launch_dependents()
    acc_NM = tl.sum(acc_LNM, axis=0)

    ok_NM = (n_N < N)[:, None] & ok_M[None, :]
    at_NM = out_M[None, :].to(tl.int64) * N + n_N[:, None]
    if SPLIT > 1:
        size = rows.to(tl.int64) * N
        counter_ptr = counters_ptr + tile * tl.num_programs(0) + block
        if not is_last_of_split(acc_NM, partial_ptr, counter_ptr, split, size, at_NM, ok_NM, SPLIT):
            return
        acc_NM = sum_of_split(partial_ptr, size, at_NM, ok_NM, SPLIT)
    bias_ptr += expert * N if GROUPED != "no" else 0
    acc_NM = scaled_with_bias(acc_NM, scales_ptr, factor_ptr, bias_ptr, row_N, GROUP, FACTORS, BIAS)
    tl.store(out_ptr + at_NM, narrow(acc_NM, "bf16"), mask=ok_NM)


@triton.jit
def _wide(bits, WORDS: tl.constexpr):
    """bfloat16 bits as the type the product is taken in."""
    if WORDS != "none":
        x = bits.to(tl.bfloat16, bitcast=True)
    else:
        x = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x


# ---- fused few rows --------------------------------------------------------------------------------------------------


__all__ = [
    "FUSED_FORMATS",
    "ArrangedScales",
    "MatmulLaunch",
    "arrange_scales",
    "bind_matmul",
    "candidate_launches",
    "default_launch",
    "fused_experts",
    "fused_matmul",
    "join_scales",
    "why_not_fused",
]


def fused_matmul(
    x: Tensor,
    weight: Encoded,
    arranged: ArrangedScales,
    bias: Tensor | None = None,
    launch: MatmulLaunch | None = None,
) -> Tensor:
    """x [M, K] times weight [N, K], plus bias [N]."""
    _check(x, weight, bias)
    rows = x.shape[0]
    out = torch.empty((rows, weight.shape[0]), dtype=torch.bfloat16, device=x.device)
    if rows == 0:
        return out
    launch = launch or default_launch(weight, rows)
    if launch.direct:
        how = prepare_direct(x.device, weight, arranged, _name_of(bias), rows, launch)
        how(x, out, *direct_pointers(weight, arranged, bias))
        return out
    if launch.rows > WIDEST_TILE:
        wide_matmul(x, weight, arranged, bias, out, launch)
        return out
    tiles = triton.cdiv(rows, launch.rows)
    _launch(x, weight, arranged, bias, out, launch, tiles, None, per_pair=True)
    return out


def fused_experts(
    x: Tensor,
    weight: Encoded,
    arranged: ArrangedScales,
    routing: Routing,
    bias: Tensor | None = None,
    *,
    per_pair: bool = False,
    launch: MatmulLaunch | None = None,
) -> Tensor:
    """Row p of the result is x[p // top_k] (or x[p] with `per_pair`) times the weight [N, K] of pair p's expert."""
    _check(x, weight, bias)
    pairs = routing.pairs
    expected = pairs if per_pair else pairs // routing.top_k
    if x.shape[0] != expected:
        raise FormatError(f"{pairs} pairs of {routing.top_k} experts a token take {expected} rows, got {x.shape[0]}")
    out = torch.empty((pairs, weight.shape[-2]), dtype=torch.bfloat16, device=x.device)
    if pairs == 0:
        return out
    launch = launch or default_experts_launch(routing)
    _launch(x, weight, arranged, bias, out, launch, routing.tile_expert.shape[0], routing, per_pair=per_pair)
    return out


def default_experts_launch(routing: Routing) -> MatmulLaunch:
    """Two slices, for an expert's matrix has few inputs, and a step of four would leave a loop of six steps."""
    return MatmulLaunch(64 if routing.rows <= 16 else 32, routing.rows, STEP, 2, 1, 2, 3, overlap=1)


def words_for(fmt: Format, launch: MatmulLaunch, device: torch.device) -> str:
    """Which decoder a launch uses, see `decode_words`: the faster one where it was tried and found right."""
    if INTERPRETED or torch.version.hip is not None:
        return "none"
    if fmt.name not in ("mxfp4", "nvfp4", "fp4_u8_g128", "int4_g32"):
        return "0123"
    key = (fmt.name, replace(launch, split=1, overlap=0), device)
    if key not in _order_holds:
        if torch.cuda.is_current_stream_capturing():  # nothing can be tried out in here
            return "0123"
        _order_holds[key] = _try_order(*key)
    return "0213" if _order_holds[key] else "0123"


_order_holds: dict[tuple[str, MatmulLaunch, torch.device], bool] = {}


def _try_order(format_name: str, launch: MatmulLaunch, device: torch.device) -> bool:
    """Whether the faster decoder gives the right product on one tile, four steps of every code."""
    fmt = get_format(format_name)
    shape = (launch.outputs, 4 * launch.step * launch.slices)
    count = torch.arange(math.prod(shape), device=device)
    values = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6], device=device)[count * 7 % 8]
    weight = encode((values * torch.where(count * 5 % 3 == 0, -0.125, 0.25)).reshape(shape), fmt)
    x = torch.randn((launch.rows, shape[1]), generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    out = torch.empty((launch.rows, launch.outputs), dtype=torch.bfloat16, device=device)
    _launch(x, weight, arrange_scales(weight), None, out, launch, 1, None, per_pair=True, words="0213")
    expected = x.double() @ decode(weight, torch.float64).T
    return bool(((out - expected).norm() <= 0.01 * expected.norm()).item())


def _check(x: Tensor, weight: Encoded, bias: Tensor | None) -> None:
    reason = why_not_fused(weight, x.dtype)
    if reason is not None:
        raise FormatError(f"{reason}; use strategy 'decode' or 'auto'")
    if x.dim() != 2 or x.shape[1] != weight.shape[-1] or not x.is_contiguous():
        raise FormatError(f"inputs must be contiguous [rows, {weight.shape[-1]}], got {tuple(x.shape)}")
    if bias is not None and bias.shape != weight.shape[:-1]:
        raise FormatError(f"the bias must have shape {weight.shape[:-1]}, got {tuple(bias.shape)}")


def _launch(
    x: Tensor,
    weight: Encoded,
    arranged: ArrangedScales,
    bias: Tensor | None,
    out: Tensor,
    launch: MatmulLaunch,
    tiles: int,
    routing: Routing | None,
    *,
    per_pair: bool,
    words: str | None = None,
) -> None:
    kind = _name_of(bias)
    how = _prepare(
        x.device, weight, arranged, kind, out.shape[0], launch, tiles, routing, per_pair=per_pair, words=words
    )
    split = how.grid[2]
    shape = (split, out.shape[0], weight.shape[-2])
    partial = torch.empty(shape, dtype=torch.float32, device=x.device) if split > 1 else arranged.counters
    how(x, out, partial, *_weight_pointers(weight, arranged, bias), *_routing_pointers(arranged, routing))


def bind_matmul(
    x: Tensor, weight: Encoded, arranged: ArrangedScales, bias: Tensor | None, launch: MatmulLaunch
) -> tuple[Callable[..., None], int] | None:
    """What launches this product for other x of this shape, and its split; None where it was not launched before.

    It takes the stream and the addresses of x, of the result and, where the split is not 1, of room for the parts.
    """
    rows = x.shape[0]
    if launch.direct and not INTERPRETED:
        how = prepare_direct(x.device, weight, arranged, _name_of(bias), rows, launch)
        straight = how.bind(x.get_device(), *direct_pointers(weight, arranged, bias))
        return None if straight is None else (functools.partial(_without_parts, straight), 1)
    if launch.rows > WIDEST_TILE or INTERPRETED:
        return None
    tiles = triton.cdiv(rows, launch.rows)
    how = _prepare(x.device, weight, arranged, _name_of(bias), rows, launch, tiles, None, per_pair=True)
    bound = how.bind(x.get_device(), *_weight_pointers(weight, arranged, bias), *_routing_pointers(arranged, None))
    return None if bound is None else (bound, how.grid[2])


def _without_parts(launch: Callable[..., None], stream: int, x: int, out: int, _: int) -> None:
    launch(stream, x, out)


def _weight_pointers(weight: Encoded, arranged: ArrangedScales, bias: Tensor | None) -> tuple[Tensor, ...]:
    unread = arranged.counters  # a pointer that is not read
    given = unread if bias is None else bias.contiguous()
    return weight.data, arranged.scales, arranged.factor, given, arranged.counters


def _routing_pointers(arranged: ArrangedScales, routing: Routing | None) -> tuple[Tensor, ...]:
    unread = (arranged.counters,) * 3
    if routing is None:
        return (arranged.counters, *unread)
    return (routing.tile_expert, *(routing.order or unread))


def _name_of(bias: Tensor | None) -> str:
    return "none" if bias is None else {torch.bfloat16: "bf16", torch.float32: "f32"}[bias.dtype]


def _prepare(
    device: torch.device,
    weight: Encoded,
    arranged: ArrangedScales,
    bias: str,
    rows: int,
    launch: MatmulLaunch,
    tiles: int,
    routing: Routing | None,
    *,
    per_pair: bool,
    words: str | None = None,
) -> PreparedLaunch:
    """All of a launch but its pointers."""
    blocks = triton.cdiv(weight.shape[-2], launch.outputs)
    split = launch.split if blocks * tiles <= arranged.counters.shape[0] else 1
    return _prepared(
        weight.fmt.name,
        weight.shape[-2:],
        launch,
        (blocks, tiles, split),
        rows,
        bias,
        "no" if routing is None else "as they come" if routing.order is None else "sorted",
        None if routing is None else routing.tile_expert.dtype,
        1 if per_pair or routing is None else routing.top_k,
        weight.shape[0] if routing is not None else 1,
        arranged.scales.shape[1] if arranged.scales.dim() == 4 else 0,
        arranged.kind(weight.fmt),
        arranged.factor.dim() == 1,
        words or words_for(weight.fmt, launch, device),
        can_overlap(device),
        device,
    )


@functools.lru_cache(4096)
def _prepared(
    format_name: str,
    shape: tuple[int, int],
    launch: MatmulLaunch,
    grid: tuple[int, int, int],
    rows: int,
    bias: str,
    grouped: str,
    of_experts: torch.dtype | None,  # noqa: ARG001 (a launch is for tensors of one type, on one device)
    pairs_a_row: int,
    experts: int,
    quads: int,
    scale: str,
    factors: bool,
    words: str,
    overlaps: bool,
    device: torch.device,  # noqa: ARG001 (as above)
) -> PreparedLaunch:
    fmt, (outputs, inputs) = get_format(format_name), shape
    assert fmt.element is not None
    order = fmt.packing.order if fmt.packing is not None else "bytes"
    group = fmt.block.cols or 0
    if launch.step % STEP or launch.step * launch.slices > WIDEST_STEP or (group == 128 and launch.step != 128):
        raise FormatError(f"{fmt.name}: {launch.slices} slices of {launch.step} inputs do not fit blocks of {group}")
    overlap = launch.overlap == 1 and overlaps
    constants = {
        "N": outputs,
        "K": inputs,
        "ELEMENT": fmt.element.name,
        "SCALE": scale,
        "ORDER": order,
        "NIBBLES": fmt.packing is not None,
        "GROUP": group,
        "FACTORS": factors,
        "BIAS": bias,
        "GROUPED": grouped,
        "PAIRS_A_ROW": pairs_a_row,
        "EXPERTS": experts,
        "QUADS_OF_ROW": quads,
        "SLICES": launch.slices,
        "BN": launch.outputs,
        "BM": launch.rows,
        "BK": launch.step,
        "SPLIT": grid[2],
        "STAGES": launch.stages,
        "WORDS": words,
        "OVERLAP": overlap,
    }
    options = {"num_warps": launch.warps, **({"launch_pdl": True} if overlap else {})}
    types = {0: torch.int32} if order == "low_first" else {}
    if scale == "e5m3":
        types[4] = torch.uint8
    return PreparedLaunch(few_rows_kernel, grid, (rows,), constants, types=types, **options)
