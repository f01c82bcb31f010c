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
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from bitplan.kernels.base.numbers import Launch
from bitplan.kernels.codec import triton_decode, triton_encode
from bitplan.kernels.codec.triton_group_search import TritonSearch

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
    "int8_row": triton_decode.decode_tiles,
    "fp8_e4m3_row": triton_decode.decode_tiles,
    "fp8_e4m3_b128": triton_decode.decode_tiles,
    "int8_g128": triton_decode.decode_byte_groups,
    "mxfp8_e4m3": triton_decode.decode_byte_groups,
    "q8_0_gguf": triton_decode.decode_byte_groups,
    "mxfp4": triton_decode.decode_nibble_groups,
    "nvfp4": triton_decode.decode_nibble_groups,
    "int4_g32": triton_decode.decode_nibble_groups,
    "q4_0_gguf": triton_decode.decode_nibble_groups,
}

__all__ = ["DECODERS", "ENCODERS", "Decoder", "Encoder", "Launch"]
