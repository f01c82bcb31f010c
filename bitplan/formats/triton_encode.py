"""Triton encoders: one read of the numbers, one write of codes and scales, equal to `bitplan.formats.encode`.

Legend: R rows, C columns, G groups, B bytes of a group. Tensors carry their axes in their names. Groups are
contiguous across row ends, so the kernels of group formats treat a matrix as one list of groups.

A NaN or an infinity in a block makes its scale NaN or infinite (E8M0: byte 255), and leaves its codes undefined.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitplan.base.loops.launch import PreparedLaunch
from bitplan.formats.format import Format
from bitplan.formats.triton_numbers import (
    Launch,
    as_bits,
    device_of,
    e8m0_of_limit,
    element_name,
    float_name,
    float_of_bits,
    flush_small,
    magnitude_bits,
    magnitude_pair_of_word,
    mark_nonfinite,
    nibble_signs_of_word,
    pair_of_word,
    power_of_two,
    reciprocal,
    round_bf16,
    round_e2m1,
    round_e4m3,
    round_half_away,
    round_to_integer,
    scale_name,
    whole_groups,
)

# A row of up to this many numbers stays in registers between the maximum and the rounding; a longer one is read again,
# from L2 as far as it fits.
LONGEST_ROW_HELD = 16384
ROWS = Launch(numbers=4096, warps=4, vector=16)
BYTE_GROUPS = Launch(numbers=4096, warps=4, vector=16)
NIBBLE_GROUPS = Launch(numbers=4096, warps=4, vector=32)  # one thread, one group of 32: no exchange between threads


def encode_rows(matrix_RC: Tensor, fmt: Format, launch: Launch | None = None) -> tuple[Tensor, Tensor]:
    """Encode with one float32 scale per row: int8_row, fp8_e4m3_row."""
    data, scales = _empty_parts(matrix_RC, fmt)
    if not matrix_RC.numel():
        return data, scales.zero_()
    element, source = element_name(fmt, matrix_RC.device), float_name(matrix_RC.dtype)
    _rows_launch(matrix_RC.shape, fmt, element, source, launch or ROWS)(matrix_RC, data, scales)
    return data, scales


@functools.lru_cache(4096)
def _rows_launch(shape: tuple[int, int], fmt: Format, element: str, source: str, launch: Launch) -> PreparedLaunch:
    """A launch without its tensors: inputs of products are encoded in every call of a layer."""
    rows, cols = shape
    wide = max(16, triton.next_power_of_2(cols) if cols <= LONGEST_ROW_HELD else launch.numbers)
    tall = max(1, launch.numbers // wide)
    constants = {
        "LARGEST": largest(fmt),
        "LARGEST_SCALE": largest_scale(fmt),
        "ELEMENT": element,
        "SOURCE": source,
        "TALL": tall,
        "WIDE": wide,
        "PIECES": triton.cdiv(cols, wide),
        "VECTOR": min(launch.vector or 16, wide),
    }
    grid, warps = (triton.cdiv(rows, tall),), _warps_for(wide * tall, launch)
    return PreparedLaunch(_encode_rows, grid, (rows, cols), constants, num_warps=warps, enable_fp_fusion=False)


def encode_byte_groups(matrix_RC: Tensor, fmt: Format, launch: Launch | None = None) -> tuple[Tensor, Tensor]:
    """Encode one byte per number, with scales per group: int8_g128, mxfp8_e4m3, q8_0_gguf."""
    launch = launch or BYTE_GROUPS
    constants = _constants(matrix_RC, fmt) | {"SCALE": scale_name(fmt), "GROUP": fmt.block.cols}
    constants["VECTOR"] = launch.vector or 16
    return _encode_groups(_encode_byte_groups, matrix_RC, fmt, launch, constants)


def encode_nibble_groups(matrix_RC: Tensor, fmt: Format, launch: Launch | None = None) -> tuple[Tensor, Tensor]:
    """Encode two neighbours per byte, the even one low, in groups of 32: mxfp4, int4_g32."""
    launch = launch or NIBBLE_GROUPS
    constants = _constants(matrix_RC, fmt) | {"VECTOR": (launch.vector or 32) // 2}
    return _encode_groups(_encode_nibble_groups, matrix_RC, fmt, launch, constants, read_as=_as_pairs)


def encode_q4_0(matrix_RC: Tensor, fmt: Format, launch: Launch | None = None) -> tuple[Tensor, Tensor]:
    """Encode q4_0_gguf: numbers j and j + 16 of a group of 32 share a byte; the extreme, with its sign, is code -8."""
    return _encode_groups(_encode_q4_0, matrix_RC, fmt, launch or BYTE_GROUPS, {})


def _constants(matrix_RC: Tensor, fmt: Format) -> dict[str, Any]:
    return {
        "LARGEST": largest(fmt),
        "LARGEST_SCALE": largest_scale(fmt),
        "LARGEST_EXPONENT": math.frexp(largest(fmt))[1] - 1,  # floor(log2)
        "ELEMENT": element_name(fmt, matrix_RC.device),
    }


def _encode_groups(
    kernel: Any,
    matrix_RC: Tensor,
    fmt: Format,
    launch: Launch,
    constants: dict[str, Any],
    read_as: Callable[[Tensor], Tensor] = as_bits,
) -> tuple[Tensor, Tensor]:
    """Launch a kernel over all groups of a format."""
    data, scales = _empty_parts(matrix_RC, fmt)
    groups, tile = scales.numel(), max(1, launch.numbers // (fmt.block.cols or 1))
    if groups:
        with device_of(matrix_RC):
            kernel[(triton.cdiv(groups, tile),)](
                read_as(matrix_RC),
                as_bits(data),
                as_bits(scales),
                groups,
                **constants,
                SOURCE=float_name(matrix_RC.dtype),
                TILE=tile,
                num_warps=launch.warps,
                enable_fp_fusion=False,
            )
    return data, scales


@triton.jit(do_not_specialize=["rows"])
def _encode_rows(
    x_ptr,
    data_ptr,
    scales_ptr,
    rows,
    cols,
    LARGEST: tl.constexpr,
    LARGEST_SCALE: tl.constexpr,
    ELEMENT: tl.constexpr,
    SOURCE: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    PIECES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * TALL
    row_R = tl.arange(0, TALL)
    col_C = tl.max_contiguous(tl.arange(0, WIDE), VECTOR)
    ok_R = first + row_R < rows
    x_ptr += first * cols
    data_ptr += first * cols
    if PIECES == 1:
        at_RC = row_R[:, None] * cols + col_C[None, :]
        ok_RC = ok_R[:, None] & (col_C < cols)[None, :]
        x_RC = float_of_bits(tl.load(x_ptr + at_RC, mask=ok_RC, other=0), SOURCE)
        limit_R = tl.max(magnitude_bits(x_RC), axis=1)
    else:
        limit_RC = tl.zeros([TALL, WIDE], tl.int32)
        for start in range(0, PIECES * WIDE, WIDE):
            at_RC = row_R[:, None] * cols + (start + col_C)[None, :]
            ok_RC = ok_R[:, None] & (start + col_C < cols)[None, :]
            x_RC = float_of_bits(tl.load(x_ptr + at_RC, mask=ok_RC, other=0), SOURCE)
            limit_RC = tl.maximum(limit_RC, magnitude_bits(x_RC))
        limit_R = tl.max(limit_RC, axis=1)
    scale_R = flush_small(scale_of_limit(limit_R, LARGEST, LARGEST_SCALE))
    inverse_R = reciprocal(scale_R)
    tl.store(scales_ptr + first + row_R, scale_R, mask=ok_R)
    if PIECES == 1:
        code_RC = round_byte(x_RC * inverse_R[:, None], ELEMENT)
        tl.store(data_ptr + at_RC, code_RC, mask=ok_RC)
    else:
        for start in range(0, PIECES * WIDE, WIDE):
            at_RC = row_R[:, None] * cols + (start + col_C)[None, :]
            ok_RC = ok_R[:, None] & (start + col_C < cols)[None, :]
            x_RC = float_of_bits(tl.load(x_ptr + at_RC, mask=ok_RC, other=0), SOURCE)
            code_RC = round_byte(x_RC * inverse_R[:, None], ELEMENT)
            tl.store(data_ptr + at_RC, code_RC, mask=ok_RC)


@triton.jit(do_not_specialize=["groups"])
def _encode_byte_groups(
    x_ptr,
    data_ptr,
    scales_ptr,
    groups,
    LARGEST: tl.constexpr,
    LARGEST_SCALE: tl.constexpr,
    LARGEST_EXPONENT: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    SOURCE: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    VECTOR: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * TILE
    group_G = tl.arange(0, TILE)
    ok_G = first + group_G < groups
    at_GC = group_G[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x_GC = float_of_bits(tl.load(x_ptr + first * GROUP + at_GC, mask=ok_G[:, None], other=0), SOURCE)
    limit_G = tl.max(magnitude_bits(x_GC), axis=1)
    if SCALE == "e8m0":
        byte_G = e8m0_of_limit(limit_G, LARGEST_EXPONENT)
        inverse_G = power_of_two(254 - byte_G)
        stored_G = mark_nonfinite(byte_G, limit_G)
    else:
        wanted_G = scale_of_limit(limit_G, LARGEST, LARGEST_SCALE)
        flushed_G = flush_small(wanted_G)
        inverse_G = reciprocal(flushed_G)
        # GGUF rounds the scale after the codes are made; scales that would be flushed are far below float16
        stored_G = wanted_G.to(tl.float16) if SCALE == "f16" else flushed_G
    code_GC = round_byte(x_GC * inverse_G[:, None], ELEMENT)
    tl.store(scales_ptr + first + group_G, stored_G, mask=ok_G)
    tl.store(data_ptr + first * GROUP + tl.max_contiguous(at_GC, (1, VECTOR)), code_GC, mask=ok_G[:, None])


@triton.jit(do_not_specialize=["groups"])
def _encode_nibble_groups(
    word_ptr,
    data_ptr,
    scales_ptr,
    groups,
    LARGEST: tl.constexpr,
    LARGEST_SCALE: tl.constexpr,
    LARGEST_EXPONENT: tl.constexpr,
    ELEMENT: tl.constexpr,
    SOURCE: tl.constexpr,
    TILE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    # A word holds the two numbers of a byte, so that words and bytes have one shape and nothing is shuffled.
    first = tl.program_id(0).to(tl.int64) * TILE
    group_G = tl.arange(0, TILE)
    ok_G = first + group_G < groups
    at_GB = group_G[:, None] * 16 + tl.arange(0, 16)[None, :]
    word_GB = tl.load(word_ptr + first * 16 + at_GB, mask=ok_G[:, None], other=0)
    if ELEMENT == "e2m1":
        even_GB, odd_GB = magnitude_pair_of_word(word_GB, SOURCE)
    else:
        even_GB, odd_GB = pair_of_word(word_GB, SOURCE)
    limit_G = tl.max(tl.maximum(magnitude_bits(even_GB), magnitude_bits(odd_GB)), axis=1)
    if ELEMENT == "e2m1":
        byte_G = e8m0_of_limit(limit_G, LARGEST_EXPONENT)
        half_inverse_G = power_of_two(253 - byte_G)  # the byte is at most 252: a normal number
        even_GB = round_e2m1(even_GB, half_inverse_G[:, None])
        odd_GB = round_e2m1(odd_GB, half_inverse_G[:, None])
        code_GB = even_GB + odd_GB * 16 + nibble_signs_of_word(word_GB, SOURCE)
        stored_G = mark_nonfinite(byte_G, limit_G)
    else:
        stored_G = round_bf16(flush_small(scale_of_limit(limit_G, LARGEST, LARGEST_SCALE)))
        inverse_G = reciprocal(float_of_bits(stored_G, "bf16"))
        even_GB = round_to_integer(even_GB * inverse_G[:, None])
        odd_GB = round_to_integer(odd_GB * inverse_G[:, None])
        code_GB = even_GB + odd_GB * 16 + 0x88  # codes are stored plus 8
    tl.store(scales_ptr + first + group_G, stored_G, mask=ok_G)
    at_GB = tl.max_contiguous(at_GB, (1, VECTOR))
    tl.store(data_ptr + first * 16 + at_GB, code_GB.to(tl.uint8), mask=ok_G[:, None])


@triton.jit(do_not_specialize=["groups"])
def _encode_q4_0(x_ptr, data_ptr, scales_ptr, groups, SOURCE: tl.constexpr, TILE: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * TILE
    group_G = tl.arange(0, TILE)
    ok_G = first + group_G < groups
    lane_B = tl.arange(0, 16)
    at_GB = group_G[:, None] * 32 + lane_B[None, :]
    low_GB = float_of_bits(tl.load(x_ptr + first * 32 + at_GB, mask=ok_G[:, None], other=0), SOURCE)
    high_GB = float_of_bits(tl.load(x_ptr + first * 32 + at_GB + 16, mask=ok_G[:, None], other=0), SOURCE)
    limit_G = tl.max(tl.maximum(magnitude_bits(low_GB), magnitude_bits(high_GB)), axis=1)
    # The sign of the first number of the largest magnitude: the smallest 2 * place + sign; its low bit is the sign.
    place_low_GB = _place_and_sign(low_GB, limit_G[:, None], lane_B[None, :])
    place_high_GB = _place_and_sign(high_GB, limit_G[:, None], lane_B[None, :] + 16)
    sign_G = tl.min(tl.minimum(place_low_GB, place_high_GB), axis=1) & 1
    wanted_G = (limit_G | (sign_G << 31)).to(tl.float32, bitcast=True) * -0.125
    inverse_G = reciprocal(flush_small(wanted_G))[:, None]
    code_GB = _round_q4_0(low_GB * inverse_G) | (_round_q4_0(high_GB * inverse_G) << 4)
    tl.store(scales_ptr + first + group_G, wanted_G.to(tl.float16), mask=ok_G)
    at_GB = group_G[:, None] * 16 + lane_B[None, :]
    tl.store(data_ptr + first * 16 + at_GB, code_GB.to(tl.uint8), mask=ok_G[:, None])


@triton.jit
def scale_of_limit(limit_bits, LARGEST: tl.constexpr, LARGEST_SCALE: tl.constexpr):
    """For a finite limit, a scale whose product with the largest code is finite; else a scale that is not finite."""
    scale = tl.div_rn(limit_bits.to(tl.float32, bitcast=True), LARGEST)
    return tl.where(limit_bits < 0x7F800000, tl.minimum(scale, LARGEST_SCALE), scale)


@triton.jit
def _place_and_sign(x, limit_bits, place):
    bits = x.to(tl.int32, bitcast=True)
    return tl.where((bits & 0x7FFFFFFF) == limit_bits, place * 2 + ((bits >> 31) & 1), 64)


@triton.jit
def _round_q4_0(y):
    return tl.minimum((y + 8.5).to(tl.int32), 15)  # y >= -8: the cast cuts towards zero as trunc does


@triton.jit
def round_byte(y, ELEMENT: tl.constexpr):
    # Integers need no clamp: |x| <= limit, and scale and inverse are each off by at most 2^-24 of themselves.
    if ELEMENT == "int8":
        code = round_to_integer(y).to(tl.int8)
    elif ELEMENT == "int8_half_away":
        code = round_half_away(y).to(tl.int8)
    else:
        code = round_e4m3(y, ELEMENT)
    return code


def _empty_parts(matrix_RC: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    rows, cols = matrix_RC.shape
    if fmt.block.cols is not None:
        whole_groups(fmt, cols)
    assert fmt.scales is not None
    assert matrix_RC.is_contiguous()
    data = torch.empty((rows, fmt.data_cols(cols)), dtype=fmt.storage, device=matrix_RC.device)
    across = 1 if fmt.block.cols is None else cols // fmt.block.cols
    return data, torch.empty((rows, across), dtype=fmt.scales.dtype, device=matrix_RC.device)


def _as_pairs(matrix_RC: Tensor) -> Tensor:
    """Neighbours as one integer. A view that starts between words (an odd slice of a larger tensor) is copied first."""
    word = torch.int64 if matrix_RC.dtype == torch.float32 else torch.int32
    aligned = matrix_RC.data_ptr() % word.itemsize == 0
    return (matrix_RC if aligned else matrix_RC.clone()).view(word)


def largest(fmt: Format) -> float:
    assert fmt.element is not None
    return float(fmt.element.limit)


@functools.cache
def largest_scale(fmt: Format) -> float:
    """The scale of the largest float32, by the definition."""
    return float(fmt.scale_for(torch.tensor(torch.finfo(torch.float32).max)))


def _warps_for(numbers: int, launch: Launch) -> int:
    """The warps that keep the launch's numbers per thread if a row is longer than the launch's tile."""
    return max(1, min(16, launch.warps * numbers // launch.numbers))
