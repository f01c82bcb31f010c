"""Codes and scales of each format in registers, and the C function that multiplies by its weights.

4-bit codes are decoded in two ways. With AVX-512 a code is looked up in a register that holds the format's 16 numbers.
Any other CPU turns all nibbles of a register into small integers at once, then every fourth byte into floats; E2M1's
numbers are doubled for that (0 1 2 3 4 6 8 12; with AVX2 looked up as bytes), and the product is halved (`cpu_fused`
sets the factor).
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import functools
from typing import Any

import numpy as np

from bitplan.kernels.base.addresses import byte_table, float_of_half, load_from, look_up_16, repeat_each
from bitplan.kernels.base.cpu_features import features
from bitplan.kernels.base.jit import inlined
from bitplan.kernels.base.openmp_threads import c_function
from bitplan.kernels.base.vectors import greater, maximum, to_float, view, widen
from bitplan.kernels.matmul.cpu.rows import (
    LANES,
    byte_products,
    decoded_bytes,
    decoded_nibbles,
    nibble_products,
)

F32, U8, U16, U32, I8, I32 = np.float32, np.uint8, np.uint16, np.uint32, np.int8, np.int32
LOOKS_UP = "avx512f" in features()
HALF_LANES, QUARTER_LANES = LANES // 2, LANES // 4


# ---- 4-bit codes ----------------------------------------------------------------------------------------------------


@inlined
def _as_they_are(codes):
    return codes


@inlined
def _low_by_table(table, codes, byte):
    return look_up_16(table, view(codes >> (8 * byte), I32))


@inlined
def _high_by_table(table, codes, byte):
    return look_up_16(table, view(codes >> (8 * byte + 4), I32))


@inlined
def _open_integers(codes):
    nibbles = view(codes, U8)
    return view((nibbles & 15) - 8, I32), view((nibbles >> 4) - 8, I32)


@inlined
def _open_e2m1(codes):
    nibbles = view(codes, U8)
    return view(_doubled_e2m1(nibbles & 15), I32), view(_doubled_e2m1(nibbles >> 4), I32)


@inlined
def _computed_e2m1(codes):
    """0 1 2 3 4 6 8 12 for codes 0 to 7, their negatives for 8 to 15."""
    m = codes & 7
    doubled = m - greater(m, 4) - greater(m, 5) - (greater(m, 6) & 3) * 255
    negative = greater(codes, 7)
    return (doubled ^ negative) - negative


_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)
_doubled_e2m1 = byte_table((*_DOUBLED, *(-each for each in _DOUBLED))) if LANES == 8 else _computed_e2m1


@inlined
def _low_by_integer(table, opened, byte):  # noqa: ARG001
    return to_float((opened[0] << (24 - 8 * byte)) >> 24, F32)


@inlined
def _high_by_integer(table, opened, byte):  # noqa: ARG001
    return to_float((opened[1] << (24 - 8 * byte)) >> 24, F32)


integers_opened = _as_they_are if LOOKS_UP else _open_integers
e2m1_opened = _as_they_are if LOOKS_UP else _open_e2m1
low = _low_by_table if LOOKS_UP else _low_by_integer
high = _high_by_table if LOOKS_UP else _high_by_integer


# ---- scales: of the blocks in a register, each on its own lanes; or of one block, on all lanes ----------------------


@inlined
def _bfloat16(address, block):
    return repeat_each(view(widen(load_from(address + 2 * block, U16, QUARTER_LANES), U32) << 16, F32), 4)


@inlined
def _float16(address, block):
    return repeat_each(float_of_half(load_from(address + 2 * block, U16, QUARTER_LANES)), 4)


@inlined
def _e8m0(address, block):
    """2^(e - 127): e is a float32's exponent, except for 2^-127, which is subnormal, and byte 255, which is NaN."""
    e = widen(load_from(address + block, U8, QUARTER_LANES), U32)
    return repeat_each(view(maximum(e << 23, 0x400000) | (greater(e, 254) & 0x400000), F32), 4)


@inlined
def _e4m3(address, block):
    """For blocks of 16; gives 2^-8 times the scale: E4M3's bits read as a float16. 0x7F is NaN."""
    return repeat_each(_e4m3_numbers(load_from(address + block, U8, HALF_LANES)), 2)


@inlined
def _e4m3_numbers(codes):
    wide = widen(codes, U16)
    magnitude = wide & 0x7F
    return float_of_half((magnitude << 7) | ((wide & 0x80) << 8) | (greater(magnitude, 0x7E) & 0x7FFF))


@inlined
def _float32_of_all(address, block):
    return repeat_each(load_from(address + 4 * block, F32, 1), LANES)


@inlined
def _float16_of_all(address, block):
    return repeat_each(float_of_half(load_from(address + 2 * block, U16, 1)), LANES)


# ---- 8-bit codes ----------------------------------------------------------------------------------------------------


@inlined
def _int8(address):
    return to_float(widen(load_from(address, I8, LANES), I32), F32)


@inlined
def _e4m3_codes(address):
    return _e4m3_numbers(load_from(address, U8, LANES))


# ---- a function for each format -------------------------------------------------------------------------------------


def _int4_g32(job):
    nibble_products(job, integers_opened, low, high, _bfloat16, 16, False)


def _int4_g32_decoded(job):
    decoded_nibbles(job, integers_opened, low, high, _bfloat16, 16)


def _q4_0_gguf(job):
    nibble_products(job, integers_opened, low, high, _float16, 16, True)


def _q4_0_gguf_decoded(job):
    decoded_nibbles(job, integers_opened, low, high, _float16, 16)


def _mxfp4(job):
    nibble_products(job, e2m1_opened, low, high, _e8m0, 16, False)


def _mxfp4_decoded(job):
    decoded_nibbles(job, e2m1_opened, low, high, _e8m0, 16)


def _nvfp4(job):
    nibble_products(job, e2m1_opened, low, high, _e4m3, 8, False)


def _nvfp4_decoded(job):
    decoded_nibbles(job, e2m1_opened, low, high, _e4m3, 8)


def _int8_row(job):
    byte_products(job, _int8, _float32_of_all, 0)


def _int8_row_decoded(job):
    decoded_bytes(job, _int8, _float32_of_all, 0)


def _int8_g128(job):
    byte_products(job, _int8, _float32_of_all, 128)


def _int8_g128_decoded(job):
    decoded_bytes(job, _int8, _float32_of_all, 128)


def _q8_0_gguf(job):
    byte_products(job, _int8, _float16_of_all, 32)


def _q8_0_gguf_decoded(job):
    decoded_bytes(job, _int8, _float16_of_all, 32)


def _fp8_e4m3_row(job):
    byte_products(job, _e4m3_codes, _float32_of_all, 0)


def _fp8_e4m3_row_decoded(job):
    decoded_bytes(job, _e4m3_codes, _float32_of_all, 0)


_FUNCTIONS = {
    "int4_g32": (_int4_g32, _int4_g32_decoded),
    "q4_0_gguf": (_q4_0_gguf, _q4_0_gguf_decoded),
    "mxfp4": (_mxfp4, _mxfp4_decoded),
    "nvfp4": (_nvfp4, _nvfp4_decoded),
    "int8_row": (_int8_row, _int8_row_decoded),
    "int8_g128": (_int8_g128, _int8_g128_decoded),
    "q8_0_gguf": (_q8_0_gguf, _q8_0_gguf_decoded),
    "fp8_e4m3_row": (_fp8_e4m3_row, _fp8_e4m3_row_decoded),
}


@functools.cache
def products_of(format_name: str) -> Any:
    """The C function that multiplies by a format's weights, compiled at first use and cached on disk."""
    return c_function(_FUNCTIONS[format_name][0])


@functools.cache
def decoder_of(format_name: str) -> Any:
    """The C function that decodes a part of the weight's rows, in the order of registers."""
    return c_function(_FUNCTIONS[format_name][1])
