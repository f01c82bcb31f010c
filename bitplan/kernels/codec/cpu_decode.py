"""CPU decoders: codes times their block's scale, equal to `bitplan.formats.decode` bit for bit.

Arrays are flat: items of data, one float32 scale per block, float32 numbers; blocks lie one after another. Scales come
as float32: `cpu_codec` widens them as the format says.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import numpy as np

from bitplan.kernels.base.jit import compiled, inlined
from bitplan.kernels.base.vectors import concatenate, greater, interleave, load, store, to_float, view, widen

F32, U8, U16, U32, I8, I32 = np.float32, np.uint8, np.uint16, np.uint32, np.int8, np.int32


# ---- 8-bit formats: blocks of any length ---------------------------------------------------------------------------


@compiled
def decode_int8(data, scales, out):
    """int8_row, int8_g128."""
    codes_BG, out_BG = data.reshape(scales.size, -1), out.reshape(scales.size, -1)
    for block in range(scales.size):
        for i in range(out_BG.shape[1]):
            out_BG[block, i] = F32(codes_BG[block, i]) * scales[block]


@compiled
def decode_by_table(data, scales, out, table):
    """Codes that index a table of 256 numbers: fp8_e4m3_row, mxfp8_e4m3."""
    codes_BG, out_BG = data.reshape(scales.size, -1), out.reshape(scales.size, -1)
    for block in range(scales.size):
        for i in range(out_BG.shape[1]):
            out_BG[block, i] = table[codes_BG[block, i]] * scales[block]


@compiled
def take(table, places, out):
    for i in range(places.size):
        out[i] = table[places[i]]


# ---- blocks of 32: bytes, or nibbles in 16 bytes -------------------------------------------------------------------


@compiled
def decode_q8_0_gguf(data, scales, out):
    for block in range(scales.size):
        store(out, 32 * block, _integers(load(data, 32 * block, 32)) * scales[block])


@compiled
def decode_q4_0_gguf(data, scales, out):
    for block in range(scales.size):
        packed = load(data, 16 * block, 16)
        store(out, 32 * block, _integers(concatenate(packed & 15, packed >> 4) - 8) * scales[block])


@compiled
def decode_int4_g32(data, scales, out):
    for block in range(scales.size):
        packed = load(data, 16 * block, 16)
        store(out, 32 * block, _integers(interleave(packed & 15, packed >> 4) - 8) * scales[block])


@compiled
def decode_q4_0_poly(data, scales, out):
    for block in range(scales.size):
        packed = load(data, 16 * block, 16)
        store(out, 32 * block, _integers((interleave(packed & 15, packed >> 4) ^ 8) - 8) * scales[block])


@compiled
def decode_mxfp4(data, scales, out):
    for block in range(scales.size):
        packed = load(data, 16 * block, 16)
        store(out, 32 * block, _e2m1(interleave(packed & 15, packed >> 4)) * scales[block])


@compiled
def decode_nvfp4(data, scales, out):
    for block in range(scales.size):  # blocks of 16
        packed = load(data, 8 * block, 8)
        store(out, 16 * block, _e2m1(interleave(packed & 15, packed >> 4)) * scales[block])


@compiled
def decode_mxfp4_gguf(data, scales, out):
    """Twice the element times half the scale, since a scale may be 2^128; + 0, because ggml's table has no -0."""
    for block in range(scales.size):
        packed = load(data, 16 * block, 16)
        doubled = _e2m1(concatenate(packed & 15, packed >> 4)) * F32(2) + F32(0)
        store(out, 32 * block, doubled * scales[block])


@inlined
def _integers(codes):
    """Bytes that hold signed integers -> float32."""
    return to_float(widen(view(codes, I8), I32), F32)


@inlined
def _e2m1(codes):
    """E2M1 codes in bytes -> float32. 0 .5 1 1.5 2 3 4 6 need only the upper two bytes of a float32."""
    magnitudes = codes & 7
    high = ((codes & 8) << 4) | ((greater(magnitudes, 0) & 0x3F) + (magnitudes >> 2))
    low = (codes << 6) & greater(magnitudes, 1)
    return view(widen(view(interleave(low, high), U16), U32) << 16, F32)
