"""Numbers of mxfp4 as E4M3 with a scale for each row, in one pass: the Triton twin of `fp8_rows.weight_rows`.

A program makes some blocks of one row. It reads the scale bytes of the whole row for the largest, which are few.
Codes and scales equal the definition's bit for bit where `fp8_rows.why_inexact` finds nothing.

Legend: N rows, K numbers of a row, G blocks of 32, B bytes of a block.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitplan.base.loops.launch import PreparedLaunch
from bitplan.formats.triton_numbers import float_of_e2m1, has_e4m3_instructions, power_of_two, round_e4m3

BLOCKS, WARPS = 128, 8  # of a program


def rows_of_mxfp4(data: Tensor, scales: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    """Codes, and the scales of rows [rows, 1]: 2^-shift of a row's largest."""
    rows, blocks = scales.shape
    codes = torch.empty((rows, 32 * blocks), dtype=torch.float8_e4m3fn, device=data.device)
    row_scales = torch.empty((rows, 1), dtype=torch.float32, device=data.device)
    launch = _launch(rows, blocks, "e4m3" if has_e4m3_instructions(data.device) else "e4m3_in_integers", shift)
    launch(data.contiguous(), scales.contiguous(), codes, row_scales)
    return codes, row_scales


@functools.lru_cache(4096)
def _launch(rows: int, blocks: int, element: str, shift: int) -> PreparedLaunch:
    tile = min(BLOCKS, triton.next_power_of_2(blocks))
    constants = {"ELEMENT": element, "SHIFT": shift, "TILE": tile, "WIDE": triton.next_power_of_2(blocks)}
    grid = rows, triton.cdiv(blocks, tile)
    return PreparedLaunch(rows_kernel, grid, (blocks,), constants, num_warps=WARPS, enable_fp_fusion=False)


@triton.jit
def rows_kernel(
    data_ptr,
    scales_ptr,
    codes_ptr,
    row_scales_ptr,
    blocks,
    ELEMENT: tl.constexpr,
    SHIFT: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scales_ptr += row * blocks
    every_G = tl.arange(0, WIDE)
    power_G = tl.load(scales_ptr + every_G, mask=every_G < blocks, other=0).to(tl.int32)
    row_power = tl.maximum(tl.max(power_G, axis=0) - SHIFT, 1)
    if tl.program_id(1) == 0:
        tl.store(row_scales_ptr + row, power_of_two(row_power))
    block_G = tl.program_id(1) * TILE + tl.arange(0, TILE)
    ok_G = block_G < blocks
    power_G = tl.load(scales_ptr + block_G, mask=ok_G, other=0).to(tl.int32)
    scale_G1 = power_of_two(tl.maximum(power_G - row_power + 127, 1))[:, None]
    at_GB = tl.max_contiguous(block_G[:, None] * 16 + tl.arange(0, 16)[None, :], (1, 8))
    byte_GB = tl.load(data_ptr + row * blocks * 16 + at_GB, mask=ok_G[:, None], other=0).to(tl.int32)
    low_GB = float_of_e2m1((byte_GB & 0x08) << 28, (byte_GB & 0x07) << 22) * scale_G1
    high_GB = float_of_e2m1((byte_GB & 0x80) << 24, (byte_GB & 0x70) << 18) * scale_G1
    value_GC = tl.reshape(tl.join(low_GB, high_GB), [TILE, 32])
    at_GC = block_G[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(codes_ptr + row * blocks * 32 + at_GC, round_e4m3(value_GC, ELEMENT), mask=ok_G[:, None])
