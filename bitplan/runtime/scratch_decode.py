"""Triton decoders that write where they are told: into the scratch of streamed blocks.

The launchers of `kernels.triton_decode` return fresh memory. Copying that into the scratch would read and write every
decoded number once more: by its bytes 0.2 ms for a llama block of 202M weights on an H200 (4.2 TB/s), more than the
decoding itself. These launch the same kernels, with the same settings, on a given output; tests hold them equal to
`decode`. Import this module only where CUDA is (or Triton's interpreter): it loads Triton.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
from torch import Tensor

from bitplan.errors import FormatError
from bitplan.formats import Encoded
from bitplan.kernels import triton_codec, triton_decode
from bitplan.kernels.triton_numbers import Launch, as_bits, device_of, element_name, float_name, scale_name


def decode_into(encoded: Encoded, out: Tensor) -> None:
    """Expand into `out`: contiguous, of the encoded's shape, bfloat16, float16 or float32; waits for nothing."""
    if tuple(out.shape) != encoded.shape or not out.is_contiguous() or out.device != encoded.device:
        raise FormatError(
            f"decode {encoded.fmt.name} of shape {encoded.shape} on {encoded.device}: the output must be contiguous "
            f"and like it, got {tuple(out.shape)} on {out.device}"
        )
    if not out.numel():
        return
    launcher = triton_codec.DECODERS[encoded.fmt.name]
    with device_of(out):
        if launcher is triton_decode.decode_tiles:
            _tiles(encoded, out, triton_decode.TILES)
        elif launcher is triton_decode.decode_byte_groups:
            _byte_groups(encoded, out, triton_decode.BYTE_GROUPS)
        else:
            _nibble_groups(encoded, out, triton_decode.NIBBLE_GROUPS)


def _tiles(encoded: Encoded, out: Tensor, launch: Launch) -> None:
    fmt = encoded.fmt
    rows, cols = fmt.matrix_shape(encoded.shape)
    down, wide = fmt.block.rows or 1, fmt.block.cols
    wide = wide or max(16, triton.next_power_of_2(min(cols, launch.numbers)))
    tall = max(1, launch.numbers // wide)
    tall = min(tall, down) if down > 1 else tall
    across = triton.cdiv(cols, wide)
    triton_decode._decode_tiles[(triton.cdiv(rows, tall) * across,)](
        as_bits(encoded.data),
        encoded.scales,
        as_bits(out),
        rows,
        cols,
        across,
        ELEMENT=element_name(fmt, encoded.device),
        OUT=float_name(out.dtype),
        DOWN=down,
        TALL=tall,
        WIDE=wide,
        VECTOR=min(_vector(launch, out), wide),
        num_warps=launch.warps,
        enable_fp_fusion=False,
    )


def _byte_groups(encoded: Encoded, out: Tensor, launch: Launch) -> None:
    scales, group = _scales(encoded), encoded.fmt.block.cols or 0
    tile = max(1, launch.numbers // group)
    triton_decode._decode_byte_groups[(triton.cdiv(scales.numel(), tile),)](
        as_bits(encoded.data),
        as_bits(scales),
        as_bits(out),
        scales.numel(),
        ELEMENT=element_name(encoded.fmt, encoded.device),
        SCALE=scale_name(encoded.fmt),
        OUT=float_name(out.dtype),
        TILE=tile,
        GROUP=group,
        VECTOR=_vector(launch, out),
        num_warps=launch.warps,
        enable_fp_fusion=False,
    )


def _nibble_groups(encoded: Encoded, out: Tensor, launch: Launch) -> None:
    scales, group, packing = _scales(encoded), encoded.fmt.block.cols or 0, encoded.fmt.packing
    assert packing is not None
    tile = max(1, launch.numbers // group)
    triton_decode._decode_nibble_groups[(triton.cdiv(scales.numel(), tile),)](
        encoded.data,
        as_bits(scales),
        scales if encoded.base is None else encoded.base,
        as_bits(out),
        scales.numel(),
        ELEMENT=element_name(encoded.fmt, encoded.device),
        SCALE=scale_name(encoded.fmt),
        ORDER=packing.order,
        OUT=float_name(out.dtype),
        TILE=tile,
        HALF=group // 2,
        VECTOR=max(1, _vector(launch, out) // 2),
        num_warps=launch.warps,
        enable_fp_fusion=False,
    )


def _scales(encoded: Encoded) -> Tensor:
    assert encoded.scales is not None
    return encoded.scales


def _vector(launch: Launch, out: Tensor) -> int:
    return launch.vector or 16 // out.dtype.itemsize
