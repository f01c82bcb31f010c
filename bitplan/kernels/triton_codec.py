"""Triton twins of `bitplan.formats`: which formats have one, and what limits them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from bitplan.kernels import triton_decode, triton_encode
from bitplan.kernels.triton_numbers import Launch

Encoder = Callable[..., tuple[Tensor, Tensor]]
Decoder = Callable[..., Tensor]

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
