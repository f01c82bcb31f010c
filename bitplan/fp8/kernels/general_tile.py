"""FP8 casts of any matrix, tile by tile: every type, width and scaling, and a norm in front.

A program reads a tile, holds it as float32, and writes it in both layouts. `fast_tile` does the same faster for plain
bfloat16; all other casts are done here.

Legend: T rows, C columns of a tile; "cols" is the layout of the transpose.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from bitplan.formats.triton_numbers import float_of_bits, magnitude_bits, narrow
from bitplan.fp8.kernels.triton_fp8_rounding import (
    e8m0_of_bits,
    fp8_code,
    inverse_of,
    power_of_two_of_bits,
    scale_of_bits,
)
from bitplan.fp8.kernels.triton_norm import normalise


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
