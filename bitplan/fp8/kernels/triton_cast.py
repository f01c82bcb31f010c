"""FP8 casts on the GPU: a matrix is read in tiles, and a tile is written in both layouts from registers.

    tensorwise   maxima of pieces (one read, no writes but a few numbers), then the cast, each program of which reduces
                 those few numbers itself: two launches, no memset, no atomics, nothing waits for the host
    rowwise      maxima of rows and columns by strips, a small launch that finishes them, then the cast
    blockwise    the tile is the block: one launch, one read (mxfp8 too)

The time is that of the bytes moved. Per number of bfloat16: 2 read and 1 + 1 written for blockwise, 2 more read for the
maximum of the others. With a norm in front (`Norm`), the cast reads the norm's input, and the norm's output is never
written. A plan holds what is the same for all casts of a shape: the kernel, how it is cut up, the memory it needs.

Codes and scales equal `bitplan.fp8.casts` bit for bit.

    triton_fp8_rounding   codes and scales           fast_tile      the cast of bfloat16 as words of two numbers
    amax                  what scales come from      here           the cast of everything else

A program of the general cast reads a tile of any type, width and scaling, holds it as float32, and writes it in both
layouts. `fast_tile` does the same faster for plain bfloat16.

Legend: R rows, C columns of the matrix cast; T rows, C columns of a tile; "cols" is the layout of the transpose, [C,
R].
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitplan.base.errors import FormatError
from bitplan.base.loops.launch import PreparedLaunch, can_overlap, dependent_options
from bitplan.formats.triton_numbers import float_name, float_of_bits, magnitude_bits, narrow
from bitplan.fp8.casts import FP8_DTYPES, ScaledFp8, check_castable, empty_scale, scale_of_amax
from bitplan.fp8.kernels.amax import PIECES, PairMaxima, RowScales, partial_amax, plan_amax
from bitplan.fp8.kernels.fast_tile import cast_pairs, fits_pairs, is_aligned, least_scale
from bitplan.fp8.kernels.triton_fp8_rounding import (
    e8m0_of_bits,
    fp8_code,
    inverse_of,
    power_of_two_of_bits,
    scale_of_bits,
)
from bitplan.fp8.kernels.triton_norm import NO_NORM, Norm, NormKey, norm_constants, normalise

CastTiles = tuple[ScaledFp8 | None, ScaledFp8 | None, Tensor | None]


@dataclass(frozen=True)
class CastLaunch:
    """How a cast is cut up. Block scaled casts always have tiles of 128x128.

    rows, cols, warps            of a tile
    pieces, numbers, amax_warps  of the maximum of a tensor: pieces, numbers read at once (None: the fastest for its
                                 kernel), warps
    vector                       adjacent words of a thread, where numbers are read as words of two
    """

    rows: int = 128
    cols: int = 64
    warps: int = 4
    pieces: int = PIECES
    numbers: int | None = None
    amax_warps: int = 8
    vector: int = 4


# The fastest on an H200. Both layouts of a gradient of 16384x28672 in bfloat16, us, and the share of a copy's
# 4.27 TB/s; in brackets what the same took one number at a time:
#     tensor   690  96% (731)   cast 484; tiles of 128x128 the same with twice the registers, of 128x64 487
#     row      720  92% (993)   cast 486; tiles of 128x64 489, the maxima finished by the cast itself 595
#     1x128    494  89% (812)   4 or 8 warps, 4 or 8 words a thread within 1 us; in groups of 8 rows 504, programs that
#                               stay and load ahead 540, hints to L2 to drop what is read 517. Rows alone 330, 100%
#     128x128  484  91% (657)   4 words a thread 488, 8 warps 485
PAIR_LAUNCHES: dict[str, CastLaunch] = {
    "tensor": CastLaunch(256, 64, 8, vector=4),
    "row": CastLaunch(128, 128, 8, vector=4),
    "1x128": CastLaunch(128, 128, 4, vector=8),
    "128x128": CastLaunch(128, 128, 4, vector=8),
}
# One number at a time: tensor 740 us, tiles of 128x128 930; blocks 818 us, in 8 warps 1187.
TILE_LAUNCH = CastLaunch()


# After a norm, 16384x4096 on an H200: 71.5 us; tiles of 128x64 77.9, of 256x64 in 8 warps 79.1, of 64x64 81.6.
NORM_LAUNCH = CastLaunch(128, 128, 4, vector=4)


def launch_of(scaling: str, launch: CastLaunch | None, *, paired: bool, normed: bool = False) -> CastLaunch:
    fastest = NORM_LAUNCH if normed and scaling == "tensor" else PAIR_LAUNCHES.get(scaling, TILE_LAUNCH)
    return launch or (fastest if paired else TILE_LAUNCH)


def cast_tiles(
    x_RC: Tensor,
    scaling: str,
    fp8: str,
    eps: float,
    padded: int,
    *,
    rows: bool,
    cols: bool,
    launch: CastLaunch | None = None,
    norm: Norm | None = None,
    plain: bool = False,
    pieces: Tensor | None = None,
) -> CastTiles:
    """Cast a matrix; return (x, its transpose, x after the norm in its own type if `plain`), each where asked for.

    The result has `padded` rows; those beyond x's are zeros. `pieces`: maxima of all numbers that share the scale of a
    tensor, as `partial_amax` gives them, if they are known already.
    """
    if norm is not None and pieces is None:
        pieces = norm.partial
    kind = norm.key if norm is not None else None
    count = pieces.shape[0] if pieces is not None else None
    x = x_RC if x_RC.is_contiguous() else x_RC.contiguous()
    how = (scaling, fp8, float(eps), padded, rows, cols, plain, launch, kind, count)
    return plan_cast(x.shape, x.dtype, is_aligned(x), *how).run(x, norm, pieces)


class Room:
    """Memory for a cast in one layout."""

    def __init__(self, shape: tuple[int, int], scaling: str, fp8: str) -> None:
        self.shape, self.scaling, self.dtype = shape, scaling, FP8_DTYPES[fp8]
        scale = empty_scale(shape, scaling, torch.device("meta"))
        self.scale_shape, self.scale_stride, self.scale_dtype = scale.shape, scale.stride(), scale.dtype
        # Rows of these scales are padded, and the padding is read.
        self.is_ragged = scaling == "128x128" and scale.stride(0) != scale.shape[1]

    def codes(self, device: torch.device) -> Tensor:
        return torch.empty(*self.shape, dtype=self.dtype, device=device)

    def scale(self, device: torch.device) -> Tensor:
        if self.is_ragged:
            return empty_scale(self.shape, self.scaling, device)
        return torch.empty_strided(self.scale_shape, self.scale_stride, dtype=self.scale_dtype, device=device)


class _CastPlan:
    """The launches and the memory of casts of one shape in one way."""

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        aligned: bool,
        scaling: str,
        fp8: str,
        eps: float,
        padded: int,
        rows: bool,
        cols: bool,
        plain: bool,
        launch: CastLaunch | None,
        norm: NormKey | None,
        pieces: int | None,
    ) -> None:
        for wanted, (height, width) in ((rows, (padded, shape[1])), (cols, (shape[1], padded))):
            if wanted:
                check_castable(torch.empty((height, width), dtype=dtype, device="meta"), scaling, fp8)
        self.scaling, self.fp8, self.eps, self.plain = scaling, fp8, eps, plain
        self.rows = Room((padded, shape[1]), scaling, fp8) if rows else None
        self.cols = Room((shape[1], padded), scaling, fp8) if cols else None
        self.is_empty = not padded * shape[1]
        self.is_idle = not (rows or cols or plain)
        if self.is_empty or self.is_idle:
            return
        self.paired = scaling in PAIR_LAUNCHES and not plain and (norm is None or scaling != "row")
        self.paired = self.paired and fits_pairs(shape, dtype, padded, aligned=aligned)
        launch = launch_of(scaling, launch, paired=self.paired, normed=norm is not None)
        self.amax = launch.pieces, launch.numbers, launch.amax_warps
        if scaling == "tensor" and pieces is None:
            if norm is not None:
                raise FormatError(
                    "a tensorwise cast after a norm takes the maxima of the normalised matrix; "
                    "find them by row_stats(..., with_amax=True)"
                )
            pieces = plan_amax(shape[0] * shape[1], dtype, aligned, *self.amax)[0]
        self.row_scales = self.maxima = None
        if scaling == "row" and self.paired:
            self.maxima = PairMaxima(shape, padded)
        elif scaling == "row":
            self.row_scales = RowScales(shape, dtype, fp8, eps, padded, rows, cols, norm)
        tile = (launch.rows, launch.cols) if scaling in ("tensor", "row") else (128, 128)
        strides = [  # of the scales of squares
            room.scale_stride[0] if scaling == "128x128" and room is not None else 0 for room in (self.rows, self.cols)
        ]
        constants: dict[str, Any] = {"FP8": fp8, "SCALING": scaling, "TO_ROWS": rows, "TO_COLS": cols}
        constants |= norm_constants(norm) | {
            "PIECES": triton.next_power_of_2(max(pieces or 0, 1)),
            "BR": tile[0],
            "BC": tile[1],
        }
        kernel: Any = cast_pairs if self.paired else cast_numbers
        numbers: tuple[float, ...]
        if self.paired:
            least = least_scale(eps, fp8)
            numbers = (shape[0], shape[1] // 16, padded // 16, *strides, pieces or 0, eps, least)
            overlap = (norm is not None or self.maxima is not None) and can_overlap()
            constants |= {"V": launch.vector, "RAGGED": bool(shape[0] % tile[0]), "OVERLAP": overlap}
        else:
            numbers = (*shape, padded, *strides, eps, pieces or 0)
            constants |= {"SOURCE": float_name(dtype), "TO_PLAIN": plain}
        tiles = triton.cdiv(padded, tile[0]) * triton.cdiv(shape[1], tile[1])
        in_order = {name: constants[name] for name in kernel.arg_names if name in constants}
        options: dict[str, Any] = {"num_warps": launch.warps, "enable_fp_fusion": False}
        options |= dependent_options() if constants.get("OVERLAP") else {}
        self.cast = PreparedLaunch(kernel, (tiles,), numbers, in_order, **options)

    def run(self, x: Tensor, norm: Norm | None, pieces: Tensor | None) -> CastTiles:
        device = x.device
        codes = codes_t = scale = scale_t = normed = None
        if self.rows is not None:
            codes, scale = self.rows.codes(device), self.rows.scale(device)
        if self.cols is not None:
            codes_t = self.cols.codes(device)
            scale_t = scale if self.scaling == "tensor" and scale is not None else self.cols.scale(device)
        if self.plain:
            normed = torch.empty_like(x)
        if self.is_empty:
            for empty in (scale, scale_t):
                if empty is not None and empty.numel():  # for an empty matrix, the scale of zeros
                    empty.copy_(scale_of_amax(torch.tensor(self.eps), self.fp8, power_of_two=self.scaling == "tensor"))
        elif not self.is_idle:
            of_norm = norm.pointers if norm is not None else NO_NORM
            if self.scaling == "tensor":
                pieces = pieces if pieces is not None else partial_amax(x, *self.amax)
            elif self.maxima is not None:
                pieces = self.maxima.find(x)
            elif self.row_scales is not None:
                self.row_scales.find(x, scale, scale_t, of_norm)
            first = scale_t if self.scaling == "tensor" and scale is None else scale  # a tensor has one
            self.cast(x, codes, codes_t, first, scale_t, pieces, *(() if self.paired else (normed,)), *of_norm)
        return (
            None if codes is None or scale is None else ScaledFp8(codes, scale, self.scaling),
            None if codes_t is None or scale_t is None else ScaledFp8(codes_t, scale_t, self.scaling),
            normed,
        )


plan_cast = functools.lru_cache(maxsize=4096)(_CastPlan)


# ---- tiles of any type, width and scaling ----------------------------------------------------------------------------


@triton.jit
def read_numbers(x_ptr, r_T, c_C, rows, cols, SOURCE: tl.constexpr):
    """A tile as float32; zeros beyond the last row or column."""
    at_TC = r_T[:, None].to(tl.int64) * cols + c_C[None, :]
    bits_TC = tl.load(x_ptr + at_TC, mask=(r_T < rows)[:, None] & (c_C < cols)[None, :], other=0)
    return float_of_bits(bits_TC, SOURCE)


@triton.jit
def write_codes(out_ptr, out_t_ptr, r_T, c_C, byte_TC, cols, padded, TO_ROWS: tl.constexpr, TO_COLS: tl.constexpr):
    """Store a tile of codes in both layouts, each if asked for."""
    ok_T, ok_C = r_T < padded, c_C < cols
    if TO_ROWS:
        at_TC = r_T[:, None].to(tl.int64) * cols + c_C[None, :]
        tl.store(out_ptr + at_TC, byte_TC, mask=ok_T[:, None] & ok_C[None, :])
    if TO_COLS:
        at_CT = c_C[:, None].to(tl.int64) * padded + r_T[None, :]
        tl.store(out_t_ptr + at_CT, tl.trans(byte_TC), mask=ok_C[:, None] & ok_T[None, :])


@triton.jit(do_not_specialize=["rows", "pieces"])
def cast_numbers(
    x_ptr,
    out_ptr,
    out_t_ptr,
    scale_ptr,
    scale_t_ptr,
    pieces_ptr,
    plain_ptr,
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
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    across = (cols + BC - 1) // BC
    tile = tl.program_id(0)
    if SCALING == "tensor" or SCALING == "row":
        tile = tl.num_programs(0) - 1 - tile  # from the end: the tiles that the maximum read last are still in L2
    down_block, across_block = tile // across, tile % across
    r_T = down_block * BR + tl.arange(0, BR)
    c_C = across_block * BC + tl.arange(0, BC)
    ok_T, ok_C = r_T < rows, c_C < cols
    room_T = r_T < padded
    x_TC = read_numbers(x_ptr, r_T, c_C, rows, cols, SOURCE)
    x_TC = normalise(
        x_TC, r_T, c_C, ok_T, ok_C, rstd_ptr, mean_ptr, weight_ptr, bias_ptr, NORM, WEIGHT, SOURCE, HAS_BIAS
    )
    if TO_PLAIN:
        at_TC = r_T[:, None].to(tl.int64) * cols + c_C[None, :]
        tl.store(plain_ptr + at_TC, narrow(x_TC, SOURCE), mask=ok_T[:, None] & ok_C[None, :])

    if SCALING == "tensor" or SCALING == "128x128":
        if SCALING == "tensor":
            piece = tl.arange(0, PIECES)
            amax = tl.max(tl.load(pieces_ptr + piece, mask=piece < pieces, other=0), axis=0)
            scale = power_of_two_of_bits(amax, eps, FP8)
        else:
            scale = scale_of_bits(tl.max(tl.max(magnitude_bits(x_TC), axis=1), axis=0), eps, FP8)
        byte_TC = fp8_code(x_TC * inverse_of(scale), FP8)
        write_codes(out_ptr, out_t_ptr, r_T, c_C, byte_TC, cols, padded, TO_ROWS, TO_COLS)
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
            write_codes(out_ptr, out_t_ptr, r_T, c_C, fp8_code(x_TC * wide, FP8), cols, padded, True, False)
            g_G = across_block * (BC // 32) + tl.arange(0, BC // 32)
            at_TG = r_T[:, None].to(tl.int64) * (cols // 32) + g_G[None, :]
            tl.store(scale_ptr + at_TG, byte_TG.to(tl.uint8), mask=room_T[:, None] & (g_G < cols // 32)[None, :])
        if TO_COLS:
            amax_GC = tl.max(tl.reshape(magnitude_TC, [BR // 32, 32, BC]), axis=1)
            byte_GC, inverse_GC = e8m0_of_bits(amax_GC, eps, FP8)
            wide = tl.reshape(tl.broadcast_to(inverse_GC[:, None, :], [BR // 32, 32, BC]), [BR, BC])
            write_codes(out_ptr, out_t_ptr, r_T, c_C, fp8_code(x_TC * wide, FP8), cols, padded, False, True)
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
            byte_TC = fp8_code(x_TC * inverse_of(scale_T)[:, None], FP8)
            write_codes(out_ptr, out_t_ptr, r_T, c_C, byte_TC, cols, padded, True, False)
        if TO_COLS:
            if SCALING == "row":
                scale_C = tl.load(scale_t_ptr + c_C, mask=ok_C, other=1.0)
            else:
                scale_C = scale_of_bits(tl.max(magnitude_bits(x_TC), axis=0), eps, FP8)
                tl.store(scale_t_ptr + down_block.to(tl.int64) * cols + c_C, scale_C, mask=ok_C)
            byte_TC = fp8_code(x_TC * inverse_of(scale_C)[None, :], FP8)
            write_codes(out_ptr, out_t_ptr, r_T, c_C, byte_TC, cols, padded, False, True)
