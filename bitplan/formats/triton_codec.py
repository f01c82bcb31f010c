"""Triton twins of `bitplan.formats`: which formats have one.

    data_RD, scales_grid = ENCODERS[name](matrix_RC, fmt, launch=None)   absmax rule; matrix contiguous, whole blocks
    values = DECODERS[name](encoded, dtype, launch=None)                 bfloat16, float16 or float32
    blocks = BLOCK_SEARCH.parts(x_RPG, weights_PG, layout)               GGUF's blocks, whose scales are searched

Nothing here waits for the GPU. A NaN or an infinity in the matrix shows as a scale that is not finite (E8M0: 255), and
so does a scale that overflows float16, which the reference refuses too: a caller that finds one gives the matrix to the
reference, for its error or its `nonfinite="replace"`.

The budget, from and to bfloat16 on an H200: 132 SMs x 128 lanes x 1.98 GHz over a device copy's 4.24 TB/s is 7.9
instruction slots per byte moved. Instructions per number are those of the machine code (Triton 3.6, sm_90, defaults
below, the never-taken slow path of divisions included), so memory is the limit everywhere:

| format | bytes | slots | encode | decode |
|---|---|---|---|---|
| int8_row | 3.00 | 23.7 | 12.5 | 5.5 |
| int8_g128 | 3.03 | 23.9 | 14.4 | 5.8 |
| fp8_e4m3_row | 3.00 | 23.7 | 11.2 | 5.3 |
| mxfp4 | 2.53 | 20.0 | 13.2 | 10.8 |

Triton decoders: codes times scales in float32, then rounded to the type asked for; equal to `formats.decode`.

Legend: R rows, C columns, G groups, B bytes of a group. Each thread stores 16 bytes at a time, and its loads are held
to the codes that go with them (`tl.max_contiguous`): a wider load would send every number through shared memory.

NaN is where the reference has it, but may have other bits: each processor has its own NaN.

Each decoder writes new memory, or `out`: a caller that has a place for the numbers (the scratch of streamed blocks)
would otherwise copy all of them: for int8 to bfloat16, four bytes a number on top of three.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitplan.base.errors import FormatError
from bitplan.base.loops.launch import PreparedLaunch, current_device, current_stream, empty_on_gpu, index_of
from bitplan.formats import triton_encode
from bitplan.formats.encoded import Encoded
from bitplan.formats.gguf.triton_group_search import TritonSearch
from bitplan.formats.triton_numbers import (
    Launch,
    element_name,
    float_name,
    float_of_e2m1,
    float_of_e4m3,
    load_scale,
    narrow,
    scale_name,
    whole_groups,
)

# ---- triton decode ---------------------------------------------------------------------------------------------------


TILES = Launch(numbers=4096, warps=4)
BYTE_GROUPS = Launch(numbers=4096, warps=4)
NIBBLE_GROUPS = Launch(numbers=4096, warps=8)


def decode_tiles(
    encoded: Encoded, dtype: torch.dtype, launch: Launch | None = None, out: Tensor | None = None
) -> Tensor:
    """Decode with scales per row or per 128 x 128 tile: int8_row, fp8_e4m3_row, fp8_e4m3_b128."""
    return _run(_tiles_launch, encoded, dtype, launch or TILES, out)


def decode_byte_groups(
    encoded: Encoded, dtype: torch.dtype, launch: Launch | None = None, out: Tensor | None = None
) -> Tensor:
    """Decode one byte per number, with scales per group: int8_g128, mxfp8_e4m3, q8_0_gguf."""
    return _run(_byte_groups_launch, encoded, dtype, launch or BYTE_GROUPS, out)


def decode_nibble_groups(
    encoded: Encoded, dtype: torch.dtype, launch: Launch | None = None, out: Tensor | None = None
) -> Tensor:
    """Decode two numbers per byte, with scales per group: mxfp4, nvfp4, int4_g32, q4_0_gguf."""
    return _run(_nibble_groups_launch, encoded, dtype, launch or NIBBLE_GROUPS, out)


def decode_launch(encoded: Encoded, dtype: torch.dtype) -> PreparedLaunch:
    """The launch that decodes matrices of this format and shape; it takes codes, scales, base and output.

    The base is a pointer of kernels for nibbles alone, and is that of the scales where the format has none.
    """
    if encoded.fmt.packing is not None:
        return _nibble_groups_launch(encoded, dtype, NIBBLE_GROUPS)
    if encoded.fmt.block.rows == 1 and encoded.fmt.block.cols is not None:
        return _byte_groups_launch(encoded, dtype, BYTE_GROUPS)
    return _tiles_launch(encoded, dtype, TILES)


def bind_with_numbers(
    encoded: Encoded,
    dtype: torch.dtype,
    compute: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    bias: Tensor | None,
) -> Callable[[Tensor, Any], Tensor | None] | None:
    """A call that decodes these parts into new memory and computes; None if no such launch was compiled."""
    index = index_of(encoded.device)
    assert encoded.scales is not None
    third = () if encoded.fmt.packing is None else (encoded.scales if encoded.base is None else encoded.base,)
    launch = decode_launch(encoded, dtype).around_output(index, encoded.data, encoded.scales, *third)
    if launch is None:
        return None
    run, (programs, *_), before, after = launch
    shape, strides = encoded.shape, (encoded.shape[1], 1)

    def product(x: Tensor, _shape: Any = None) -> Tensor | None:  # each Python call less is a call less for every layer
        if current_device() != index:
            return None
        numbers = empty_on_gpu(shape, strides, dtype)
        run(programs, 1, 1, current_stream(index), *before, numbers.data_ptr(), *after)
        return compute(x, numbers, bias)

    return product


def _run(
    prepare: Callable[[Encoded, torch.dtype, Launch], PreparedLaunch],
    encoded: Encoded,
    dtype: torch.dtype,
    launch: Launch,
    out: Tensor | None,
) -> Tensor:
    out = _out(encoded, dtype, out)
    run = prepare(encoded, dtype, launch)
    if out.numel():
        assert encoded.scales is not None
        data, scales = encoded.data.contiguous(), encoded.scales.contiguous()
        base = (scales if encoded.base is None else encoded.base,) if encoded.fmt.packing is not None else ()
        run(data, scales, *base, out)
    return out


def _tiles_launch(encoded: Encoded, dtype: torch.dtype, launch: Launch) -> PreparedLaunch:
    fmt = encoded.fmt
    rows, cols = fmt.matrix_shape(encoded.shape)
    down, wide = fmt.block.rows or 1, fmt.block.cols
    wide = wide or max(16, triton.next_power_of_2(min(cols, launch.numbers)))
    tall = max(1, launch.numbers // wide)
    tall = min(tall, down) if down > 1 else tall  # a program's rows share a tile's scale
    across = triton.cdiv(cols, wide)
    return _prepared(
        _decode_tiles,
        triton.cdiv(rows, tall) * across,
        (rows, cols, across),
        launch.warps,
        ELEMENT=element_name(fmt, encoded.device),
        OUT=float_name(dtype),
        DOWN=down,
        TALL=tall,
        WIDE=wide,
        VECTOR=min(_vector(launch, dtype), wide),
    )


def _byte_groups_launch(encoded: Encoded, dtype: torch.dtype, launch: Launch) -> PreparedLaunch:
    constants = {"GROUP": encoded.fmt.block.cols, "VECTOR": _vector(launch, dtype)}
    return _groups_launch(_decode_byte_groups, encoded, dtype, launch, constants)


def _nibble_groups_launch(encoded: Encoded, dtype: torch.dtype, launch: Launch) -> PreparedLaunch:
    fmt = encoded.fmt
    assert fmt.packing is not None
    constants = {"ORDER": fmt.packing.order, "HALF": (fmt.block.cols or 0) // 2}
    constants["VECTOR"] = max(1, _vector(launch, dtype) // 2)
    return _groups_launch(_decode_nibble_groups, encoded, dtype, launch, constants)


def _groups_launch(
    kernel: Any, encoded: Encoded, dtype: torch.dtype, launch: Launch, constants: dict[str, Any]
) -> PreparedLaunch:
    """The launch of a kernel over all groups of an encoding."""
    fmt, scales = encoded.fmt, encoded.scales
    assert scales is not None
    whole_groups(fmt, fmt.matrix_shape(encoded.shape)[1])
    groups, tile = scales.numel(), max(1, launch.numbers // (fmt.block.cols or 1))
    constants |= {"ELEMENT": element_name(fmt, encoded.device), "SCALE": scale_name(fmt)}
    constants |= {"OUT": float_name(dtype), "TILE": tile}
    in_order = {name: constants[name] for name in kernel.arg_names if name in constants}
    return _prepared(kernel, triton.cdiv(groups, tile), (groups,), launch.warps, **in_order)


@functools.lru_cache(4096)
def _prepared(kernel: Any, programs: int, numbers: tuple[int, ...], warps: int, **constants: Any) -> PreparedLaunch:
    """A launch without its tensors, which leaves the host little to do: a model decodes a weight in every layer."""
    return PreparedLaunch(kernel, (programs,), numbers, constants, num_warps=warps, enable_fp_fusion=False)


@triton.jit(do_not_specialize=["rows", "across"])
def _decode_tiles(
    data_ptr,
    scales_ptr,
    out_ptr,
    rows,
    cols,
    across,
    ELEMENT: tl.constexpr,
    OUT: tl.constexpr,
    DOWN: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    program = tl.program_id(0)
    first = (program // across).to(tl.int64) * TALL
    tile_across = program % across
    row_R = tl.arange(0, TALL)
    col_C = tl.max_contiguous(tile_across * WIDE + tl.arange(0, WIDE), VECTOR)
    ok_R = first + row_R < rows
    ok_RC = ok_R[:, None] & (col_C < cols)[None, :]
    at_RC = row_R[:, None] * cols + col_C[None, :]
    code_RC = tl.load(data_ptr + first * cols + at_RC, mask=ok_RC, other=0)
    if DOWN == 1:
        scale_R1 = tl.load(scales_ptr + first + row_R, mask=ok_R, other=0)[:, None]
    else:
        scale_R1 = tl.load(scales_ptr + first // DOWN * across + tile_across)
    value_RC = _float_of_byte(code_RC, ELEMENT) * scale_R1
    tl.store(out_ptr + first * cols + at_RC, narrow(value_RC, OUT), mask=ok_RC)


@triton.jit(do_not_specialize=["groups"])
def _decode_byte_groups(
    data_ptr,
    scales_ptr,
    out_ptr,
    groups,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    OUT: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    VECTOR: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * TILE
    group_G = tl.arange(0, TILE)
    ok_G = first + group_G < groups
    at_GC = group_G[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    at_GC = tl.max_contiguous(at_GC, (1, VECTOR))
    code_GC = tl.load(data_ptr + first * GROUP + at_GC, mask=ok_G[:, None], other=0)
    scale_G = load_scale(tl.load(scales_ptr + first + group_G, mask=ok_G, other=0), 1.0, SCALE)
    value_GC = _float_of_byte(code_GC, ELEMENT) * scale_G[:, None]
    tl.store(out_ptr + first * GROUP + at_GC, narrow(value_GC, OUT), mask=ok_G[:, None])


@triton.jit(do_not_specialize=["groups"])
def _decode_nibble_groups(
    data_ptr,
    scales_ptr,
    base_ptr,
    out_ptr,
    groups,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    ORDER: tl.constexpr,
    OUT: tl.constexpr,
    TILE: tl.constexpr,
    HALF: tl.constexpr,
    VECTOR: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * TILE
    group_G = tl.arange(0, TILE)
    ok_G = first + group_G < groups
    lane_B = tl.arange(0, HALF)
    at_GB = tl.max_contiguous(group_G[:, None] * HALF + lane_B[None, :], (1, VECTOR))
    byte_GB = tl.load(data_ptr + first * HALF + at_GB, mask=ok_G[:, None], other=0).to(tl.int32)
    base = 1.0
    if SCALE == "e4m3" or SCALE == "u8":
        base = tl.load(base_ptr)
    scale_G = load_scale(tl.load(scales_ptr + first + group_G, mask=ok_G, other=0), base, SCALE)
    if ELEMENT == "e2m1":
        low_GB = float_of_e2m1((byte_GB & 0x08) << 28, (byte_GB & 0x07) << 22) * scale_G[:, None]
        high_GB = float_of_e2m1((byte_GB & 0x80) << 24, (byte_GB & 0x70) << 18) * scale_G[:, None]
    else:  # stored plus 8
        low_GB = ((byte_GB & 0x0F) - 8).to(tl.float32) * scale_G[:, None]
        high_GB = ((byte_GB >> 4) - 8).to(tl.float32) * scale_G[:, None]
    out_ptr += first * (2 * HALF)
    if ORDER == "low_first":
        value_GC = tl.reshape(tl.join(low_GB, high_GB), [TILE, 2 * HALF])
        at_GC = group_G[:, None] * (2 * HALF) + tl.arange(0, 2 * HALF)[None, :]
        tl.store(out_ptr + at_GC, narrow(value_GC, OUT), mask=ok_G[:, None])
    else:
        at_GB = group_G[:, None] * (2 * HALF) + lane_B[None, :]
        tl.store(out_ptr + at_GB, narrow(low_GB, OUT), mask=ok_G[:, None])
        tl.store(out_ptr + at_GB + HALF, narrow(high_GB, OUT), mask=ok_G[:, None])


@triton.jit
def _float_of_byte(code, ELEMENT: tl.constexpr):
    is_integer: tl.constexpr = ELEMENT == "int8" or ELEMENT == "int8_half_away"
    return code.to(tl.float32) if is_integer else float_of_e4m3(code, ELEMENT)


def _out(encoded: Encoded, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    if out is None:
        return torch.empty(encoded.shape, dtype=dtype, device=encoded.device)
    is_like = (tuple(out.shape), out.dtype, out.device) == (encoded.shape, dtype, encoded.device)
    if not is_like or not out.is_contiguous():
        raise FormatError(
            f"decode {encoded.fmt.name} of shape {encoded.shape} on {encoded.device} as {dtype}: the output must be "
            f"contiguous and like it, got {out.dtype} {tuple(out.shape)} with strides {out.stride()} on {out.device}"
        )
    return out


def _vector(launch: Launch, dtype: torch.dtype) -> int:
    return launch.vector or 16 // dtype.itemsize


# ---- triton codec ----------------------------------------------------------------------------------------------------


Encoder = Callable[..., tuple[Tensor, Tensor]]
Decoder = Callable[..., Tensor]

BLOCK_SEARCH = TritonSearch()  # for GGUF's blocks, whose scales are searched
ENCODERS: dict[str, Encoder] = {
    "int8_row": triton_encode.encode_rows,
    "fp8_e4m3_row": triton_encode.encode_rows,
    "int8_g128": triton_encode.encode_byte_groups,
    "mxfp8_e4m3": triton_encode.encode_byte_groups,
    "q8_0_gguf": triton_encode.encode_byte_groups,
    "mxfp4": triton_encode.encode_nibble_groups,
    "int4_g32": triton_encode.encode_nibble_groups,
    "q4_0_gguf": triton_encode.encode_q4_0,
}

DECODERS: dict[str, Decoder] = {
    "int8_row": decode_tiles,
    "fp8_e4m3_row": decode_tiles,
    "fp8_e4m3_b128": decode_tiles,
    "int8_g128": decode_byte_groups,
    "mxfp8_e4m3": decode_byte_groups,
    "q8_0_gguf": decode_byte_groups,
    "mxfp4": decode_nibble_groups,
    "nvfp4": decode_nibble_groups,
    "fp4_u8_g128": decode_nibble_groups,
    "int4_g32": decode_nibble_groups,
    "q4_0_gguf": decode_nibble_groups,
}

__all__ = ["DECODERS", "ENCODERS", "Decoder", "Encoder", "Launch"]
