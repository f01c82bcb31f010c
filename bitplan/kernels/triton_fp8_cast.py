"""FP8 casts on the GPU: a matrix is read in tiles, and a tile is written in both layouts from registers.

    tensorwise   maxima of pieces (one read, no writes but a few numbers), then the cast, each program of which reduces
                 those few numbers itself: two launches, no memset, no atomics, nothing waits for the host
    rowwise      maxima of rows and columns by strips, a small launch that finishes them, then the cast
    blockwise    the tile is the block: one launch, one read (mxfp8 too)

The bytes decide. Per number of bfloat16: 2 read and 1 + 1 written for blockwise, 2 more read for the maximum of the
others. With a norm in front (`Norm`), the cast reads what the norm would read, and what it would write is never
written.

Codes and scales equal `bitplan.formats.fp8_scaling` bit for bit. The GPU's conversion rounds to nearest even and
saturates; the interpreter's does not, so it gets the same in integers.

Legend: R rows, C columns of the matrix cast, T rows of a tile; "cols" is the layout of the transpose, [C, R].
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitplan.formats.fp8_scaling import (
    FP8_DTYPES,
    ScaledFp8,
    Scaling,
    check_castable,
    empty_scale,
    scale_of_amax,
)
from bitplan.kernels.triton_numbers import (
    INTERPRETED,
    MAGNITUDE,
    TINY,
    as_bits,
    device_of,
    float_name,
    float_of_bits,
    magnitude_bits,
    narrow,
)

INFINITY_BITS = tl.constexpr(0x7F800000)


@dataclass(frozen=True)
class CastLaunch:
    """Rows and columns of a tile and its warps; pieces of the maximum, numbers read at once for it, and its warps.

    `reload` reads a tile of a row or block scaled cast again for its second layout: 128 registers a thread instead of
    178, so two programs share a multiprocessor. Block scaled casts have tiles of 128x128.
    """

    rows: int = 128
    cols: int = 128
    warps: int = 8
    pieces: int = 1024
    numbers: int = 8192
    amax_warps: int = 8
    reload: bool = False


@dataclass(frozen=True)
class Norm:
    """A norm in front of the cast: what `triton_fp8_norm` found of each row, and the norm's own weights."""

    kind: str  # "rms" or "layer"
    mean: Tensor | None
    rstd: Tensor
    weight: Tensor
    bias: Tensor | None
    partial: Tensor | None = None  # maxima of pieces of the normalised matrix, int32 bits of float32


DEFAULT_LAUNCH = CastLaunch()
BLOCK_LAUNCH = CastLaunch(reload=True)


def cast_tiles(
    x_RC: Tensor,
    scaling: Scaling,
    fp8: str,
    eps: float,
    padded: int,
    *,
    rows: bool,
    cols: bool,
    launch: CastLaunch | None = None,
    norm: Norm | None = None,
    plain: bool = False,
) -> tuple[ScaledFp8 | None, ScaledFp8 | None, Tensor | None]:
    """(x, its transpose, x after the norm in its own type if `plain`), each where asked for.

    `padded` rows come out, those beyond x's are zeros.
    """
    check_castable(x_RC, scaling if scaling != "128x128" else "1x128", fp8)
    if scaling in ("tensor", "row"):
        launch = launch or DEFAULT_LAUNCH
    else:
        launch = replace(launch or BLOCK_LAUNCH, rows=128, cols=128)
    x_RC = x_RC.contiguous()
    shape = x_RC.shape
    out = _room((padded, shape[1]), scaling, fp8, x_RC.device) if rows else None
    out_t = _room((shape[1], padded), scaling, fp8, x_RC.device) if cols else None
    if scaling == "tensor" and out is not None and out_t is not None:
        out_t = ScaledFp8(out_t.codes, out.scale, scaling)
    normed = torch.empty_like(x_RC) if plain else None
    if not padded * shape[1]:
        for made in (out, out_t):
            if made is not None and made.scale.numel():  # of a matrix without numbers, as one of zeros
                made.scale.copy_(scale_of_amax(torch.tensor(eps), fp8))
        return out, out_t, normed
    with device_of(x_RC):
        pieces = None
        if scaling == "tensor":
            pieces = norm.partial if norm is not None else partial_amax(x_RC, launch)
        elif scaling == "row":
            _row_scales(x_RC, out, out_t, fp8, eps, padded, norm)
        _launch_cast(x_RC, scaling, fp8, eps, padded, out, out_t, normed, pieces, launch, norm)
    return out, out_t, normed


def partial_amax(x_RC: Tensor, launch: CastLaunch | None = None) -> Tensor:
    """Bits of the largest magnitude of each piece of x, as float32; how many pieces depends on its size alone."""
    launch = launch or DEFAULT_LAUNCH
    numbers = min(launch.numbers, triton.next_power_of_2(max(x_RC.numel(), 16)))
    pieces = min(launch.pieces, triton.cdiv(x_RC.numel(), numbers))
    partial = torch.empty(max(pieces, 1), dtype=torch.int32, device=x_RC.device)
    if pieces == 0:
        return partial.zero_()
    _partial_amax[(pieces,)](
        as_bits(x_RC).view(-1),
        partial,
        x_RC.numel(),
        SOURCE=float_name(x_RC.dtype),
        NUMBERS=numbers,
        num_warps=launch.amax_warps,
    )
    return partial


def _room(shape: tuple[int, int], scaling: Scaling, fp8: str, device: torch.device) -> ScaledFp8:
    codes = torch.empty(shape, dtype=FP8_DTYPES[fp8], device=device)
    return ScaledFp8(codes, empty_scale(shape, scaling, device), scaling)


def _launch_cast(x, scaling, fp8, eps, padded, out, out_t, normed, pieces, launch, norm) -> None:
    any_made = out if out is not None else out_t
    if any_made is None and normed is None:
        return
    spare = x if any_made is None else any_made.codes.view(torch.uint8)  # for pointers that are not used
    scale = out.scale if out is not None else (out_t.scale if scaling == "tensor" and out_t is not None else spare)
    grid = (triton.cdiv(padded, launch.rows) * triton.cdiv(x.shape[1], launch.cols),)
    _cast_tiles[grid](
        as_bits(x),
        out.codes.view(torch.uint8) if out is not None else spare,
        out_t.codes.view(torch.uint8) if out_t is not None else spare,
        as_bits(normed) if normed is not None else spare,
        scale,
        out_t.scale if out_t is not None else spare,
        pieces if pieces is not None else spare,
        norm.rstd if norm is not None else spare,
        norm.mean if norm is not None and norm.mean is not None else spare,
        as_bits(norm.weight) if norm is not None else spare,
        as_bits(norm.bias) if norm is not None and norm.bias is not None else spare,
        x.shape[0],
        x.shape[1],
        padded,
        out.scale.stride(0) if scaling == "128x128" and out is not None else 0,
        out_t.scale.stride(0) if scaling == "128x128" and out_t is not None else 0,
        eps,
        pieces.shape[0] if pieces is not None else 0,
        SOURCE=float_name(x.dtype),
        FP8=fp8,
        SCALING=scaling,
        NORM=norm.kind if norm is not None else "none",
        WEIGHT=float_name(norm.weight.dtype) if norm is not None else "none",
        HAS_BIAS=norm is not None and norm.bias is not None,
        TO_ROWS=out is not None,
        TO_COLS=out_t is not None,
        TO_PLAIN=normed is not None,
        PIECES=triton.next_power_of_2(pieces.shape[0]) if pieces is not None else 1,
        RELOAD=launch.reload,
        BR=launch.rows,
        BC=launch.cols,
        num_warps=launch.warps,
        enable_fp_fusion=False,
    )


def _row_scales(x, out, out_t, fp8, eps, padded, norm) -> None:
    """Scales of every row and of every column of x, as far as a layout asks for them."""
    rows, cols = x.shape
    across = triton.cdiv(cols, 128)
    tiles = 8
    while tiles > 1 and across * triton.cdiv(rows, 128 * tiles) < 512:
        tiles //= 2
    down = triton.cdiv(rows, 128 * tiles)
    row_parts = torch.empty((across, rows), dtype=torch.int32, device=x.device)
    col_parts = torch.empty((down, cols), dtype=torch.int32, device=x.device)
    spare = row_parts
    _strip_amax[(across, down)](
        as_bits(x),
        row_parts,
        col_parts,
        norm.rstd if norm is not None else spare,
        norm.mean if norm is not None and norm.mean is not None else spare,
        as_bits(norm.weight) if norm is not None else spare,
        as_bits(norm.bias) if norm is not None and norm.bias is not None else spare,
        rows,
        cols,
        SOURCE=float_name(x.dtype),
        NORM=norm.kind if norm is not None else "none",
        WEIGHT=float_name(norm.weight.dtype) if norm is not None else "none",
        HAS_BIAS=norm is not None and norm.bias is not None,
        TILES=tiles,
        BR=128,
        BC=128,
        num_warps=8,
        enable_fp_fusion=False,
    )
    width = 128
    row_programs = triton.cdiv(padded, width) if out is not None else 0
    col_programs = triton.cdiv(cols, width) if out_t is not None else 0
    _finish_scales[(row_programs + col_programs,)](
        row_parts,
        col_parts,
        out.scale if out is not None else spare,
        out_t.scale if out_t is not None else spare,
        rows,
        cols,
        padded,
        across,
        down,
        row_programs,
        eps,
        FP8=fp8,
        WIDTH=width,
        num_warps=4,
        enable_fp_fusion=False,
    )


# ---- numbers ---------------------------------------------------------------------------------------------------------


@triton.jit
def fp8_code(y, FP8: tl.constexpr):
    """Scaled numbers -> FP8 bits (uint8): nearest even, saturating, NaN 0x7F."""
    if INTERPRETED:
        BITS: tl.constexpr = 3 if FP8 == "e4m3" else 2
        LIMIT: tl.constexpr = 448.0 if FP8 == "e4m3" else 57344.0
        LEAST: tl.constexpr = 121 if FP8 == "e4m3" else 113  # exponent field of the smallest normal number
        magnitude = tl.minimum(tl.where(y != y, 0.0, tl.abs(y)), LIMIT)
        exponent = tl.maximum(magnitude.to(tl.int32, bitcast=True), LEAST << 23) & INFINITY_BITS
        rounded = magnitude + (exponent + ((23 - BITS) << 23)).to(tl.float32, bitcast=True)
        code = rounded.to(tl.int32, bitcast=True) + (exponent >> (23 - BITS)) - (LEAST << BITS)
        code = (code & 0x7F) | ((y.to(tl.int32, bitcast=True) >> 24) & 0x80)
        byte = tl.where(y != y, 0x7F, code).to(tl.uint8)
    elif FP8 == "e4m3":
        byte = y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        byte = y.to(tl.float8e5).to(tl.uint8, bitcast=True)
    return byte


@triton.jit
def scale_of_bits(amax_bits, eps, FP8: tl.constexpr):
    """Bits of a largest magnitude -> its scale: at least eps / limit and 2^-126, NaN where it is not finite."""
    LIMIT: tl.constexpr = 448.0 if FP8 == "e4m3" else 57344.0
    is_finite = amax_bits < INFINITY_BITS
    amax = tl.where(is_finite, amax_bits, 0).to(tl.float32, bitcast=True)
    scale = tl.maximum(tl.div_rn(tl.maximum(amax, eps), LIMIT), TINY)
    return tl.where(is_finite, scale, float("nan"))


@triton.jit
def inverse_of(scale):
    return tl.div_rn(1.0, scale)


@triton.jit
def e8m0_of_bits(amax_bits, eps, FP8: tl.constexpr):
    """Bits of a largest magnitude -> (E8M0 byte, 1 / its scale): exact powers of two, NaN where it is not finite."""
    LIMIT: tl.constexpr = 448.0 if FP8 == "e4m3" else 57344.0
    is_finite = amax_bits < INFINITY_BITS
    amax = tl.maximum(tl.where(is_finite, amax_bits, 0).to(tl.float32, bitcast=True), eps)
    byte = (tl.div_rn(amax, LIMIT).to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
    inverse = ((254 - byte) << 23).to(tl.float32, bitcast=True)
    return tl.where(is_finite, byte, 255), tl.where(is_finite, inverse, float("nan"))


@triton.jit
def normalise(
    x_TC,
    r_T,
    c_C,
    ok_T,
    ok_C,
    rstd_ptr,
    mean_ptr,
    weight_ptr,
    bias_ptr,
    NORM: tl.constexpr,
    WEIGHT: tl.constexpr,
    SOURCE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """The norm of these numbers, rounded to the type of x as the norm by itself would give it."""
    if NORM != "none":
        rstd_T = tl.load(rstd_ptr + r_T, mask=ok_T, other=0.0)
        if NORM == "layer":
            x_TC = x_TC - tl.load(mean_ptr + r_T, mask=ok_T, other=0.0)[:, None]
        weight_C = float_of_bits(tl.load(weight_ptr + c_C, mask=ok_C, other=0), WEIGHT)
        x_TC = x_TC * rstd_T[:, None] * weight_C[None, :]
        if HAS_BIAS:
            x_TC = x_TC + float_of_bits(tl.load(bias_ptr + c_C, mask=ok_C, other=0), WEIGHT)[None, :]
        x_TC = tl.where(ok_T[:, None] & ok_C[None, :], x_TC, 0.0)
        x_TC = float_of_bits(narrow(x_TC, SOURCE), SOURCE)
    return x_TC


# ---- maxima ----------------------------------------------------------------------------------------------------------


@triton.jit
def _partial_amax(x_ptr, partial_ptr, size, SOURCE: tl.constexpr, NUMBERS: tl.constexpr):
    piece = tl.program_id(0)
    at = tl.arange(0, NUMBERS)
    step = tl.num_programs(0).to(tl.int64) * NUMBERS
    largest = tl.zeros([NUMBERS], tl.int32)
    for start in range(piece.to(tl.int64) * NUMBERS, size, step):
        bits = tl.load(x_ptr + start + at, mask=start + at < size, other=0)
        largest = tl.maximum(largest, _magnitude_of(bits, SOURCE))
    tl.store(partial_ptr + piece, _float_bits(tl.max(largest, axis=0), SOURCE))


@triton.jit
def _magnitude_of(bits, SOURCE: tl.constexpr):
    """|x| as an integer that orders as |x| does, in its own width: one operation a number, and NaN is the largest."""
    if SOURCE == "f32":
        magnitude = bits.to(tl.int32, bitcast=True) & MAGNITUDE
    else:
        magnitude = bits.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
    return magnitude


@triton.jit
def _float_bits(magnitude, SOURCE: tl.constexpr):
    """Such an integer -> the bits of the float32 that it stands for."""
    if SOURCE == "bf16":
        bits = magnitude << 16
    elif SOURCE == "f16":
        bits = magnitude.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
    else:
        bits = magnitude
    return bits & MAGNITUDE


@triton.jit(do_not_specialize=["rows"])
def _strip_amax(
    x_ptr,
    row_ptr,
    col_ptr,
    rstd_ptr,
    mean_ptr,
    weight_ptr,
    bias_ptr,
    rows,
    cols,
    SOURCE: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILES: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Largest magnitudes of a strip of BC columns: of each row in it, and of each column over TILES * BR rows."""
    strip, part = tl.program_id(0), tl.program_id(1)
    c_C = strip * BC + tl.arange(0, BC)
    ok_C = c_C < cols
    largest_C = tl.zeros([BC], tl.int32)
    for tile in range(TILES):
        r_T = (part * TILES + tile) * BR + tl.arange(0, BR)
        ok_T = r_T < rows
        at_TC = r_T[:, None].to(tl.int64) * cols + c_C[None, :]
        bits_TC = tl.load(x_ptr + at_TC, mask=ok_T[:, None] & ok_C[None, :], other=0)
        x_TC = float_of_bits(bits_TC, SOURCE)
        x_TC = normalise(
            x_TC, r_T, c_C, ok_T, ok_C, rstd_ptr, mean_ptr, weight_ptr, bias_ptr, NORM, WEIGHT, SOURCE, HAS_BIAS
        )
        magnitude_TC = magnitude_bits(x_TC)
        tl.store(row_ptr + strip.to(tl.int64) * rows + r_T, tl.max(magnitude_TC, axis=1), mask=ok_T)
        largest_C = tl.maximum(largest_C, tl.max(magnitude_TC, axis=0))
    tl.store(col_ptr + part.to(tl.int64) * cols + c_C, largest_C, mask=ok_C)


@triton.jit(do_not_specialize=["rows", "padded", "across", "down", "row_programs"])
def _finish_scales(
    row_parts_ptr,
    col_parts_ptr,
    scale_ptr,
    scale_t_ptr,
    rows,
    cols,
    padded,
    across,
    down,
    row_programs,
    eps,
    FP8: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The first programs finish rows, the others columns."""
    program = tl.program_id(0)
    largest = tl.zeros([WIDTH], tl.int32)
    if program < row_programs:
        r = program * WIDTH + tl.arange(0, WIDTH)
        for part in range(across):
            at = part * rows + r
            largest = tl.maximum(largest, tl.load(row_parts_ptr + at, mask=r < rows, other=0))
        tl.store(scale_ptr + r, scale_of_bits(largest, eps, FP8), mask=r < padded)
    else:
        c = (program - row_programs) * WIDTH + tl.arange(0, WIDTH)
        for part in range(down):
            at = part * cols + c
            largest = tl.maximum(largest, tl.load(col_parts_ptr + at, mask=c < cols, other=0))
        tl.store(scale_t_ptr + c, scale_of_bits(largest, eps, FP8), mask=c < cols)


# ---- the cast --------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows", "pieces"])
def _cast_tiles(
    x_ptr,
    out_ptr,
    out_t_ptr,
    plain_ptr,
    scale_ptr,
    scale_t_ptr,
    pieces_ptr,
    rstd_ptr,
    mean_ptr,
    weight_ptr,
    bias_ptr,
    rows,
    cols,
    padded,
    scale_stride,
    scale_t_stride,
    eps,
    pieces,
    SOURCE: tl.constexpr,
    FP8: tl.constexpr,
    SCALING: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TO_ROWS: tl.constexpr,
    TO_COLS: tl.constexpr,
    TO_PLAIN: tl.constexpr,
    PIECES: tl.constexpr,
    RELOAD: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    across = (cols + BC - 1) // BC
    tile = tl.program_id(0)
    if SCALING == "tensor" or SCALING == "row":
        tile = tl.num_programs(0) - 1 - tile  # from the end: what the maximum read last is still in L2
    down_block, across_block = tile // across, tile % across
    r_T = down_block * BR + tl.arange(0, BR)
    c_C = across_block * BC + tl.arange(0, BC)
    ok_T, ok_C = r_T < rows, c_C < cols
    room_T = r_T < padded
    at_TC = r_T[:, None].to(tl.int64) * cols + c_C[None, :]
    x_TC = float_of_bits(tl.load(x_ptr + at_TC, mask=ok_T[:, None] & ok_C[None, :], other=0), SOURCE)
    x_TC = normalise(
        x_TC, r_T, c_C, ok_T, ok_C, rstd_ptr, mean_ptr, weight_ptr, bias_ptr, NORM, WEIGHT, SOURCE, HAS_BIAS
    )
    if TO_PLAIN:
        tl.store(plain_ptr + at_TC, narrow(x_TC, SOURCE), mask=ok_T[:, None] & ok_C[None, :])
    room_TC = room_T[:, None] & ok_C[None, :]
    at_CT = c_C[:, None].to(tl.int64) * padded + r_T[None, :]
    room_CT = ok_C[:, None] & room_T[None, :]

    if SCALING == "tensor" or SCALING == "128x128":
        if SCALING == "tensor":
            piece = tl.arange(0, PIECES)
            amax = tl.max(tl.load(pieces_ptr + piece, mask=piece < pieces, other=0), axis=0)
        else:
            amax = tl.max(tl.max(magnitude_bits(x_TC), axis=1), axis=0)
        scale = scale_of_bits(amax, eps, FP8)
        byte_TC = fp8_code(x_TC * inverse_of(scale), FP8)
        if TO_ROWS:
            tl.store(out_ptr + at_TC, byte_TC, mask=room_TC)
        if TO_COLS:
            tl.store(out_t_ptr + at_CT, tl.trans(byte_TC), mask=room_CT)
        if SCALING == "tensor":
            if tl.program_id(0) == 0:
                tl.store(scale_ptr, scale)
        else:
            if TO_ROWS:
                tl.store(scale_ptr + down_block * scale_stride + across_block, scale)
            if TO_COLS:
                tl.store(scale_t_ptr + across_block * scale_t_stride + down_block, scale)
    elif SCALING == "1x32":
        magnitude_TC = magnitude_bits(x_TC)
        if TO_ROWS:
            amax_TG = tl.max(tl.reshape(magnitude_TC, [BR, BC // 32, 32]), axis=2)
            byte_TG, inverse_TG = e8m0_of_bits(amax_TG, eps, FP8)
            wide = tl.reshape(tl.broadcast_to(inverse_TG[:, :, None], [BR, BC // 32, 32]), [BR, BC])
            tl.store(out_ptr + at_TC, fp8_code(x_TC * wide, FP8), mask=room_TC)
            g_G = across_block * (BC // 32) + tl.arange(0, BC // 32)
            at_TG = r_T[:, None].to(tl.int64) * (cols // 32) + g_G[None, :]
            tl.store(scale_ptr + at_TG, byte_TG.to(tl.uint8), mask=room_T[:, None] & (g_G < cols // 32)[None, :])
        if TO_COLS:
            amax_GC = tl.max(tl.reshape(magnitude_TC, [BR // 32, 32, BC]), axis=1)
            byte_GC, inverse_GC = e8m0_of_bits(amax_GC, eps, FP8)
            wide = tl.reshape(tl.broadcast_to(inverse_GC[:, None, :], [BR // 32, 32, BC]), [BR, BC])
            tl.store(out_t_ptr + at_CT, tl.trans(fp8_code(x_TC * wide, FP8)), mask=room_CT)
            h_G = down_block * (BR // 32) + tl.arange(0, BR // 32)
            at_GC = c_C[None, :].to(tl.int64) * (padded // 32) + h_G[:, None]
            tl.store(scale_t_ptr + at_GC, byte_GC.to(tl.uint8), mask=ok_C[None, :] & (h_G < padded // 32)[:, None])
    else:
        if TO_ROWS:
            if SCALING == "row":
                scale_T = tl.load(scale_ptr + r_T, mask=room_T, other=1.0)
            else:
                scale_T = scale_of_bits(tl.max(magnitude_bits(x_TC), axis=1), eps, FP8)
                tl.store(scale_ptr + across_block.to(tl.int64) * padded + r_T, scale_T, mask=room_T)
            tl.store(out_ptr + at_TC, fp8_code(x_TC * inverse_of(scale_T)[:, None], FP8), mask=room_TC)
        if TO_COLS:
            if (
                RELOAD and TO_ROWS
            ):  # from L1: held in registers through both layouts, one program fills a multiprocessor
                x_TC = float_of_bits(tl.load(x_ptr + at_TC, mask=ok_T[:, None] & ok_C[None, :], other=0), SOURCE)
                x_TC = normalise(
                    x_TC, r_T, c_C, ok_T, ok_C, rstd_ptr, mean_ptr, weight_ptr, bias_ptr, NORM, WEIGHT, SOURCE, HAS_BIAS
                )
            if SCALING == "row":
                scale_C = tl.load(scale_t_ptr + c_C, mask=ok_C, other=1.0)
            else:
                scale_C = scale_of_bits(tl.max(magnitude_bits(x_TC), axis=0), eps, FP8)
                tl.store(scale_t_ptr + down_block.to(tl.int64) * cols + c_C, scale_C, mask=ok_C)
            tl.store(out_t_ptr + at_CT, tl.trans(fp8_code(x_TC * inverse_of(scale_C)[None, :], FP8)), mask=room_CT)
