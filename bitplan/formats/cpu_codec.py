"""CPU twins of `bitplan.formats`' encoders and decoders: which formats have one, and how tensors reach the loops.

A tensor is cut into pieces of whole blocks, several for each thread. The loops work on float32 only: other types are
cast in a buffer that stays in the cache, a run of blocks at a time. Importing this module imports numba.

Decoders multiply codes by their block's scale, equal to `bitplan.formats.decode` bit for bit. Arrays are flat: items of
data, one float32 scale per block (widened before as the format says), float32 numbers; blocks lie one after another.

Encoders make one pass over memory, and are equal to `bitplan.formats.encode` bit for bit. Numbers come as their float32
words in a flat uint32 array, blocks one after another. A strip of blocks is read from memory once and from the L1 cache
twice: for the largest magnitudes, then, with the scales known, for the codes. The iterations of each loop are
independent, which keeps the vector units busy; a single loop would wait for its own results. Every encoder returns the
largest magnitude it saw, as a word: NOT_FINITE or more is an infinity or a NaN, and then the output is meaningless.

Rounding uses no conversion instructions (a quarter of an addition's speed on Neoverse): adding a large constant leaves
the rounded number in the low bits of the sum, by the hardware's own rounding to nearest even.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitplan.base.errors import FormatError, NonFiniteError
from bitplan.base.loops.jit import compiled, inlined, on_threads
from bitplan.base.loops.vectors import (
    concatenate,
    copysign,
    evens,
    first_half,
    greater,
    interleave,
    largest,
    load,
    maximum,
    minimum,
    multiply_add,
    narrow,
    odds,
    prefetch,
    same_bits,
    second_half,
    store,
    to_float,
    view,
    widen,
)
from bitplan.formats import codec as definition
from bitplan.formats.encoded import Encoded
from bitplan.formats.format import Format
from bitplan.formats.gguf.blocks import GgufBlocks, GgufMxfp4, GgufVectors
from bitplan.formats.gguf.cpu_block_search import CompiledSearch
from bitplan.formats.gguf.cpu_vector_search import CompiledVectors, decode_vectors, reading_of
from bitplan.formats.gguf.grids import VECTOR_LAYOUTS
from bitplan.formats.gguf.layouts import LAYOUTS
from bitplan.formats.registry import get_format
from bitplan.formats.scale_rules import reciprocal

# ---- cpu encode ------------------------------------------------------------------------------------------------------


F32, U8, U16, U32, I32 = np.float32, np.uint8, np.uint16, np.uint32, np.int32

MAGNITUDE, SIGN, EXPONENT = U32(0x7FFFFFFF), U32(0x80000000), U32(0x7F800000)
NOT_FINITE = 0x7F800000
SMALLEST_SCALE = F32(2.0**-126)
LARGEST_INT8_SCALE = np.nextafter(np.finfo(F32).max / F32(127), F32(0))  # 127 times the next larger float is infinite
ZERO, ONE, EIGHTH = F32(0), F32(1), F32(0.125)

# x + NEAREST: the low byte is x to the nearest integer, ties to even, for |x| < 2^22.
NEAREST = F32(1.5 * 2.0**23)
# x + FLOOR: the low byte is 2 floor(x), or one more, for 1/4 <= x < 2^22. The sum is x - 1/4 rounded to halves: a
# whole x lies on a tie there, and the even neighbour is x itself.
FLOOR = F32(2.0**22 - 0.25)
# The largest float32 below 1/2: floor(x + BELOW_HALF) rounds ties up, where x + 1/2 would lift 0.49999997 to 1.
BELOW_HALF = F32(0.5 - 2.0**-25)
NEAREST_AND_EIGHT, HALF_AND_EIGHT = F32(1.5 * 2.0**23 + 8), F32(8.5)

_EACH_BIT = 1 << np.arange(8, dtype=U8)

STRIP = 64  # blocks of 32: 8 KiB
AHEAD = 4096  # words: prefetched while the codes of one strip are computed


# ---- 8-bit formats: blocks of any length ---------------------------------------------------------------------------


@compiled
def encode_int8(words_BG, data_BG, scales_B):
    """Encode int8_row and int8_g128: scale max |x| / 127, ties to even."""
    worst = U32(0)
    for block in range(scales_B.size):
        top = _largest_magnitude(words_BG[block])
        worst = max(worst, top)
        scales_B[block] = min(flush_small(as_float(top) / F32(127)), LARGEST_INT8_SCALE)
        _round_to_int8(words_BG[block], reciprocal_of(scales_B[block]), data_BG[block])
    return worst


@compiled
def encode_e4m3(words_BG, data_BG, scales_B):
    """Encode fp8_e4m3_row: scale max |x| / 448, ties to even."""
    worst = U32(0)
    for block in range(scales_B.size):
        top = _largest_magnitude(words_BG[block])
        worst = max(worst, top)
        scales_B[block] = flush_small(as_float(top) / F32(448))
        _round_to_e4m3(words_BG[block], reciprocal_of(scales_B[block]), data_BG[block])
    return worst


@compiled
def largest_magnitude(words):
    return _largest_magnitude(words)


@compiled
def round_to_int8(words, inverse, data):
    _round_to_int8(words, inverse, data)


@compiled
def round_to_e4m3(words, inverse, data):
    _round_to_e4m3(words, inverse, data)


@compiled
def encode_bfloat16(words, data):
    """Round float32 words to bfloat16 words, ties to even; wrong for NaN, which the returned word shows."""
    worst = U32(0)
    for i in range(words.size):
        worst = max(worst, U32(words[i] & MAGNITUDE))
        data[i] = _bfloat16(words[i])
    return worst


@inlined
def _largest_magnitude(words):
    top = U32(0)
    for i in range(words.size):
        top = max(top, U32(words[i] & MAGNITUDE))
    return U32(top)


@inlined
def _round_to_int8(words, inverse, data):
    for i in range(words.size):
        data[i] = np.int8(_as_word(F32(as_float(words[i]) * inverse) + NEAREST))


@inlined
def _round_to_e4m3(words, inverse, data):
    for i in range(words.size):
        word = _as_word(as_float(words[i]) * inverse)
        magnitude = U32(word & MAGNITUDE)
        odd = U32(U32(magnitude >> U32(20)) & U32(1))
        normal = U32(U32(magnitude + U32(0x7FFFF) + odd - U32(120 << 23)) >> U32(20))
        subnormal = U32(_as_word(as_float(magnitude) + F32(2.0**14)) - U32(141 << 23))
        code = subnormal if magnitude < U32(121 << 23) else normal
        data[i] = U8(code | U32(U32(word >> U32(24)) & U32(0x80)))


# ---- blocks of 32 --------------------------------------------------------------------------------------------------


@compiled
def encode_q4_0_gguf(words, data, scales):
    """Encode q4_0_gguf: d = the number of largest magnitude / -8 in float16; code = floor(x / d + 8.5), at most 15."""
    highest, lowest, inverses = np.empty(STRIP, I32), np.empty(STRIP, U32), np.empty(STRIP, F32)
    worst = U32(0)
    for first in range(0, scales.size, STRIP):
        strip = scales[first : first + STRIP]
        for i in range(strip.size):
            block = load(words, 32 * (first + i), 32)
            highest[i] = largest(view(block, I32))
            lowest[i] = largest(block)
        top, ties = _q4_0_scales(highest, lowest, inverses, strip)
        worst = max(worst, top)
        if ties:
            _settle_q4_0_ties(words, first, highest, lowest, inverses, strip)
        for i in range(strip.size):
            _prefetch_block(words, 32 * (first + i) + AHEAD)
            scaled = view(load(words, 32 * (first + i), 32), F32) * inverses[i] + HALF_AND_EIGHT
            rounded = minimum(narrow(view(scaled + FLOOR, U32), U8) >> 1, 15)
            store(data, 16 * (first + i), _pack_halves(rounded))
    return worst


@compiled
def encode_q8_0_gguf(words, data, scales):
    """Encode q8_0_gguf: d = max |x| / 127, kept as float16; code = x / d, ties away from zero."""
    tops, inverses = np.empty(STRIP, U32), np.empty(STRIP, F32)
    worst = U32(0)
    for first in range(0, scales.size, STRIP):
        strip = scales[first : first + STRIP]
        worst = max(worst, _block_tops(words, first, tops[: strip.size]))
        for i in range(strip.size):
            exact_scale = F32(as_float(tops[i]) / F32(127))
            strip[i] = _float16(_as_word(exact_scale))
            inverses[i] = reciprocal_of(flush_small(exact_scale))
        for i in range(strip.size):
            _prefetch_block(words, 32 * (first + i) + AHEAD)
            store(data, 32 * (first + i), half_away(view(load(words, 32 * (first + i), 32), F32) * inverses[i]))
    return worst


@compiled
def encode_q4_0_poly(words, data, scales):
    """Encode q4_0_poly: scale max |x| / 7; code = x / scale, ties away from zero, two's complement."""
    tops, divisors = np.empty(STRIP, U32), np.empty(STRIP, F32)
    worst = U32(0)
    for first in range(0, scales.size, STRIP):
        strip = scales[first : first + STRIP]
        worst = max(worst, _block_tops(words, first, tops[: strip.size]))
        for i in range(strip.size):
            scale = flush_small(as_float(tops[i]) / F32(7))
            strip[i] = scale
            divisors[i] = scale if scale > ZERO else F32(np.inf)  # a zero scale gives zero codes
        for i in range(strip.size):
            rounded = half_away(view(load(words, 32 * (first + i), 32), F32) / divisors[i])
            store(data, 16 * (first + i), _pack_pairs(rounded))
    return worst


@compiled
def encode_int4_g32(words, data, scales):
    """Encode int4_g32: scale max |x| / 7 as bfloat16; code = x / scale to nearest even, + 8."""
    tops, inverses = np.empty(STRIP, U32), np.empty(STRIP, F32)
    worst = U32(0)
    for first in range(0, scales.size, STRIP):
        strip = scales[first : first + STRIP]
        worst = max(worst, _block_tops(words, first, tops[: strip.size]))
        for i in range(strip.size):
            strip[i] = _bfloat16(_as_word(flush_small(as_float(tops[i]) / F32(7))))
            inverses[i] = reciprocal_of(as_float(U32(strip[i]) << U32(16)))
        for i in range(strip.size):
            _prefetch_block(words, 32 * (first + i) + AHEAD)
            sums = view(load(words, 32 * (first + i), 32), F32) * inverses[i] + NEAREST_AND_EIGHT
            store(data, 16 * (first + i), _pack_pairs(narrow(view(sums, U32), U8)))
    return worst


@compiled
def encode_mxfp4(words, data, scales):
    """Encode mxfp4: scale byte = the largest exponent - 2; codes E2M1, ties to even."""
    tops = np.empty(STRIP, U16)
    worst = U16(0)
    for first in range(0, scales.size, STRIP):
        strip = scales[first : first + STRIP]
        for i in range(strip.size):  # the upper half of a word holds its exponent
            tops[i] = largest(odds(view(load(words, 32 * (first + i), 32), U16)) & 0x7F80)
        for i in range(strip.size):
            worst = max(worst, tops[i])
            strip[i] = U8(U16(max(tops[i], U16(2 << 7)) - U16(2 << 7)) >> U16(7))
        for i in range(strip.size):
            _prefetch_block(words, 32 * (first + i) + AHEAD)
            store(
                data,
                16 * (first + i),
                _pack_pairs(_e2m1_of_cpu_encode(load(words, 32 * (first + i), 32), I32(strip[i]))),
            )
    return U32(worst) << U32(16)


@compiled
def encode_mxfp4_gguf(words, data, scales, rounds_up):
    """Encode as ggml: ties towards zero, no -0; from the word rounds_up[exponent] on, its logarithm is rounded up."""
    tops = np.empty(STRIP, U32)
    worst = U32(0)
    for first in range(0, scales.size, STRIP):
        strip = scales[first : first + STRIP]
        worst = max(worst, _block_tops(words, first, tops[: strip.size]))
        for i in range(strip.size):
            exponent = I32(tops[i] >> U32(23))
            exponent += I32(tops[i] >= rounds_up[exponent])
            strip[i] = U8(max(exponent, I32(2)) - I32(2))
        for i in range(strip.size):
            block = load(words, 32 * (first + i), 32)
            # One step down, then odd: numbers on a tie go below it, and numbers above it stay above.
            off_ties = (maximum(block & MAGNITUDE, 1) - 1) | 1
            rounded = _e2m1_of_cpu_encode(off_ties, I32(strip[i]))
            sign = (_sign_bytes(block) >> 4) & greater(rounded, 0) & 8
            store(data, 16 * (first + i), _pack_halves(rounded | sign))
    return worst


# ---- scales --------------------------------------------------------------------------------------------------------


@inlined
def _block_tops(words, first, tops):
    """The largest magnitude of each block of 32, and of all."""
    worst = U32(0)
    for i in range(tops.size):
        tops[i] = largest(load(words, 32 * (first + i), 32) & MAGNITUDE)
    for i in range(tops.size):
        worst = max(worst, tops[i])
    return worst


@inlined
def _q4_0_scales(highest, lowest, inverses, scales):
    """Scales from the words of the most positive and the most negative number of each block, if it has any."""
    worst, ties = U32(0), U32(0)
    for i in range(scales.size):
        above = U32(max(highest[i], I32(0)))
        below = U32(lowest[i] & MAGNITUDE)
        top = max(above, below)
        worst = max(worst, top)
        ties |= U32(lowest[i] == U32(above | SIGN))
        d = F32(as_float(top | (SIGN if above == top else U32(0))) * EIGHTH)
        scales[i] = _float16(_as_word(d))
        inverses[i] = ONE / d if F32(abs(d)) >= SMALLEST_SCALE else ZERO
    return worst, ties > U32(0)


@inlined
def _settle_q4_0_ties(words, first, highest, lowest, inverses, scales):
    """In a block whose extremes are +m and -m, the first of them decides the sign of d."""
    for i in range(scales.size):
        if lowest[i] == U32(U32(max(highest[i], I32(0))) | SIGN):
            for j in range(32):
                word = words[32 * (first + i) + j]
                if U32(word | SIGN) == lowest[i]:
                    if word >= SIGN:
                        scales[i] ^= U16(0x8000)
                        inverses[i] = -inverses[i]
                    break


@inlined
def flush_small(scale):
    return F32(scale) if F32(scale) >= SMALLEST_SCALE else ZERO


@inlined
def reciprocal_of(scale):
    return F32(ONE / scale) if scale > ZERO else ZERO


@inlined
def _float16(word):
    """The float16 word nearest to a float32 word, ties to even; infinity from 65520 on."""
    magnitude = U32(word & MAGNITUDE)
    odd = U32(U32(magnitude >> U32(13)) & U32(1))
    normal = U32(U32(magnitude + U32(0xFFF) + odd - U32(112 << 23)) >> U32(13))
    subnormal = U32(_as_word(as_float(magnitude) + F32(0.5)) - U32(0x3F000000))
    half = subnormal if magnitude < U32(113 << 23) else normal
    half = half if magnitude < U32(0x477FF000) else U32(0x7C00)
    return U16(half | U32(U32(word >> U32(16)) & U32(0x8000)))


@inlined
def _bfloat16(word):
    """The bfloat16 word nearest to a float32 word, ties to even."""
    return U16(U32(word + U32(0x7FFF) + U32(U32(word >> U32(16)) & U32(1))) >> U32(16))


@inlined
def as_float(word):
    return same_bits(U32(word), F32)


@inlined
def _as_word(number):
    return same_bits(F32(number), U32)


# ---- codes of 32 numbers -------------------------------------------------------------------------------------------


@inlined
def _e2m1_of_cpu_encode(words, scale_byte):
    """E2M1 codes of numbers over 2^(scale_byte - 127), ties to even, in bytes.

    Each number is added to its own power of two (but no less than the scale's) times 2^22, where float32 has the
    spacing of E2M1: the sum's mantissa counts steps in the binade, its exponent counts binades, and steps + 2 binades
    is the code. The constant's mantissa starts the count so that both bases cancel.
    """
    if scale_byte < 64 or scale_byte >= 192:  # keep the sum in range
        words = view(view(words, F32) * (F32(2.0**64) if scale_byte < 64 else F32(2.0**-64)), U32)
        scale_byte = scale_byte + 64 if scale_byte < 64 else scale_byte - 64
    power = maximum(words & EXPONENT, U32(scale_byte) << U32(23))
    constant = as_float(((127 + 22) << 23) + 0x10000 - 2 * (scale_byte + 22))
    sums = multiply_add(copysign(view(power, F32), view(words, F32)), constant, view(words, F32))
    halves = view(sums, np.int16)
    counts = evens(halves) + (odds(halves) >> 6)  # lower byte: the code, up to 8; the upper byte gets the sign later
    limits = view((counts & 0) | 0x0807, U8)
    nibbles = minimum(view(counts, U8), limits)
    return evens(nibbles) + odds(nibbles)


@inlined
def half_away(scaled):
    """The nearest integers, ties away from zero, in bytes; |x| < 128."""
    words = view(scaled, U32)
    magnitudes = narrow(view(view(words & MAGNITUDE, F32) + BELOW_HALF + FLOOR, U32), U8) >> 1
    negative = view(view(_sign_bytes(words), np.int8) >> 7, U8)
    return (magnitudes ^ negative) - negative


@inlined
def _sign_bytes(words):
    """The highest byte of each word, whose highest bit is the sign."""
    return odds(view(odds(view(words, U16)), U8))


@inlined
def _pack_pairs(codes):
    """The low four bits of each byte, even index in the low nibble."""
    return (evens(codes) & 15) | (odds(codes) << 4)


@inlined
def _pack_halves(codes):
    """Number j in the low nibble of byte j, number j + 16 in the high one."""
    return first_half(codes) | (second_half(codes) << 4)


@inlined
def _prefetch_block(words, index):
    prefetch(words, index)
    prefetch(words, index + 16)


# ---- cpu decode ------------------------------------------------------------------------------------------------------


I8 = np.int8


# ---- 8-bit formats: blocks of any length ---------------------------------------------------------------------------


@compiled
def decode_int8(data, scales, out):
    """Decode int8_row and int8_g128."""
    codes_BG, out_BG = data.reshape(scales.size, -1), out.reshape(scales.size, -1)
    for block in range(scales.size):
        for i in range(out_BG.shape[1]):
            out_BG[block, i] = F32(codes_BG[block, i]) * scales[block]


@compiled
def decode_by_table(data, scales, out, table):
    """Decode codes that index a table of 256 numbers: fp8_e4m3_row, mxfp8_e4m3."""
    codes_BG, out_BG = data.reshape(scales.size, -1), out.reshape(scales.size, -1)
    for block in range(scales.size):
        for i in range(out_BG.shape[1]):
            out_BG[block, i] = table[codes_BG[block, i]] * scales[block]


@compiled
def look_up(table, indices, out):
    for i in range(indices.size):
        out[i] = table[indices[i]]


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


# ---- GGUF's blocks with their scales among the codes ----------------------------------------------------------------


@compiled
def decode_gguf_blocks(raw, scales, lows, planes, first_code, table, group, numbers, out):
    """Decode `numbers` of each block: (code + first_code, or the table's number) * scale, + low where there is one.

    planes   of each plane: its first byte, its bits, its codes in consecutive bytes, the place of its bits in a code
    """
    codes, block_bytes, groups = np.empty(numbers, U8), raw.size * numbers // out.size, numbers // group
    for block in range(out.size // numbers):
        for plane in range(planes.shape[0]):
            offset, bits, run, shift = planes[plane]
            first, mask = block * block_bytes + offset, (1 << bits) - 1
            if run == 1:  # single bits, one code after another
                for byte in range(numbers // 8):
                    part = greater(load(_EACH_BIT, 0, 8) & raw[first + byte], 0) & (1 << shift)
                    store(codes, 8 * byte, load(codes, 8 * byte, 8) | part)
                continue
            lanes = 8 // bits
            for chunk in range(numbers // (lanes * run)):
                for lane in range(lanes):
                    for k in range(0, run, 16):
                        at = (chunk * lanes + lane) * run + k
                        part = ((load(raw, first + chunk * run + k, 16) >> (bits * lane)) & mask) << shift
                        store(codes, at, load(codes, at, 16) | part if plane else part)
        for group_at in range(block * groups, (block + 1) * groups):
            at = (group_at - block * groups) * group
            for k in range(0, group, 16):
                target = group_at * group + k
                if table is None:
                    values = to_float(widen(load(codes, at + k, 16), I32), F32) + first_code
                else:
                    for one in range(16):
                        out[target + one] = table[codes[at + k + one]]
                    values = load(out, target, 16)
                values = values * scales[group_at]
                store(out, target, values if lows is None else values + lows[group_at])


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


# ---- cpu codec -------------------------------------------------------------------------------------------------------


BLOCK_SEARCH = CompiledSearch()  # for GGUF's blocks, whose scales are searched
VECTOR_SEARCH = CompiledVectors()
Array = np.ndarray[Any, Any]
Encoder = Callable[[Tensor, Format], tuple[Tensor, Tensor | None]]
Decoder = Callable[[Encoded, torch.dtype], Tensor]
# Kernels take flat arrays.
EncodeKernel = Callable[[Array, Array, Array], int]  # words, codes, scales -> the largest magnitude
DecodeKernel = Callable[[Array, Array, Array], None]  # codes, float32 scales, float32 numbers
RoundKernel = Callable[[Array, Any, Array], None]  # words, 1 / scale, codes

PIECES_PER_THREAD = 4  # a thread that falls behind leaves pieces to the others
SMALLEST_PIECE = 2**17
RUN = 2**15  # numbers: 128 KiB of float32, which torch casts on the calling thread
LONG_ROW = 2**20  # threads share a row of this length
NEAR_THE_END = 64  # words before the end of a binade, where ggml's logarithm may round up

# The types as which kernels read numbers that numpy has no type for.
_WORDS = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}


# ---- encoding ------------------------------------------------------------------------------------------------------


def _block_encoder(kernel: EncodeKernel) -> Encoder:
    def encode(matrix: Tensor, fmt: Format) -> tuple[Tensor, Tensor | None]:
        data, scales = _empty_parts(matrix, fmt)
        if not matrix.numel():
            return data, scales.zero_()
        numbers, codes, scale_array = matrix.reshape(-1), _array(data), _array(scales)
        size, width = numbers.numel() // scale_array.size, codes.size // scale_array.size
        read = _reader(numbers, size)

        def work(piece: slice) -> int:
            return max(
                kernel(words, codes[run.start * width : run.stop * width], scale_array[run])
                for run, words in read(piece)
            )

        _check_finite(on_threads(work, _pieces(scale_array.size, size)), fmt)
        return data, scales

    return encode


def _row_encoder(kernel: EncodeKernel, round_to_codes: RoundKernel) -> Encoder:
    """An encoder for blocks of any length; `round_to_codes` is the second half of `kernel`."""

    def in_matrices(words: Array, codes: Array, scales: Array) -> int:
        return kernel(words.reshape(scales.size, -1), codes.reshape(scales.size, -1), scales)

    encode_whole_rows = _block_encoder(in_matrices)

    def encode(matrix: Tensor, fmt: Format) -> tuple[Tensor, Tensor | None]:
        if fmt.block.cols is not None or matrix.shape[1] < LONG_ROW:
            return encode_whole_rows(matrix, fmt)
        data, scales = _empty_parts(matrix, fmt)
        for row, codes, scale in zip(matrix, data, scales, strict=True):
            scale.copy_(_scale_of_long_row(row, fmt))
            _round_long_row(row, reciprocal(scale).numpy()[0], _array(codes), round_to_codes)
        return data, scales

    return encode


def _scale_of_long_row(row: Tensor, fmt: Format) -> Tensor:
    read = _reader(row, 1)

    def work(piece: slice) -> int:
        return max(int(largest_magnitude(words)) for _, words in read(piece))

    tops = on_threads(work, _pieces(row.numel(), 1))
    _check_finite(tops, fmt)
    assert fmt.scales is not None
    limit = torch.tensor([max(tops)], dtype=torch.int32).view(torch.float32)
    return fmt.scales.store(fmt.scale_for(limit), None)


def _round_long_row(row: Tensor, inverse: Any, codes: Array, round_to_codes: RoundKernel) -> None:
    read = _reader(row, 1)

    def work(piece: slice) -> None:
        for run, words in read(piece):
            round_to_codes(words, inverse, codes[run])

    on_threads(work, _pieces(row.numel(), 1))


def _encode_bfloat16(matrix: Tensor, fmt: Format) -> tuple[Tensor, Tensor | None]:
    if matrix.dtype != torch.float32:
        return matrix.to(fmt.storage), None
    data = torch.empty(matrix.shape, dtype=fmt.storage)
    words, codes = _array(matrix).view(np.uint32), _array(data)
    tops = on_threads(lambda piece: encode_bfloat16(words[piece], codes[piece]), _pieces(words.size, 1))
    if max(tops, default=0) > NOT_FINITE:  # torch decides which NaN a NaN becomes
        data.copy_(matrix)
    return data, None


def _encode_mxfp4_gguf(words: Array, codes: Array, scales: Array) -> int:
    worst: int = encode_mxfp4_gguf(words, codes, scales, _rounds_up())
    return worst


@functools.cache
def _rounds_up() -> Array:
    """The first word for each float32 exponent that ggml's rounded logarithm lifts to the next binade."""
    fmt = get_format("mxfp4_gguf")
    ends = torch.arange(1, 256, dtype=torch.int32) << 23
    near = (ends.unsqueeze(1) - torch.arange(NEAR_THE_END, 0, -1, dtype=torch.int32)).view(torch.float32)
    lifted = fmt.scale_for(near) > fmt.scale_for(near[:, :1])
    first = ends - lifted.sum(dim=1, dtype=torch.int32)
    return np.append(first.numpy().view(np.uint32), np.uint32(0xFFFFFFFF))


def _empty_parts(matrix: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    assert fmt.scales is not None
    rows, cols = matrix.shape
    across = 1 if fmt.block.cols is None else cols // fmt.block.cols
    data = torch.empty((rows, fmt.data_cols(cols)), dtype=fmt.storage)
    return data, torch.empty((rows, across), dtype=fmt.scales.dtype)


def _check_finite(tops: list[int], fmt: Format) -> None:
    if max(tops) >= _first_refused(fmt):
        raise NonFiniteError(f"{fmt.name}: a number to encode, or its scale, is not finite")


@functools.cache
def _first_refused(fmt: Format) -> int:
    """The first float32 word that the definition refuses: not finite, or too large for the format."""
    block = torch.zeros(1, fmt.block.cols or 1)

    def is_refused(word: int) -> bool:
        block[0, 0] = torch.tensor(word, dtype=torch.int32).view(torch.float32)
        try:
            definition.encode(block, fmt)
        except FormatError:
            return True
        return False

    return bisect.bisect_left(range(NOT_FINITE), True, key=is_refused)


# ---- decoding ------------------------------------------------------------------------------------------------------


def _decoder(kernel: DecodeKernel) -> Decoder:
    def decode(encoded: Encoded, dtype: torch.dtype) -> Tensor:
        out = torch.empty(encoded.shape, dtype=dtype)
        if not out.numel():
            return out
        assert encoded.scales is not None
        numbers, codes, table = out.view(-1), _array(encoded.data), _scale_table(encoded.fmt, encoded.base)
        scale_array = _array(encoded.scales)
        size, width = numbers.numel() // scale_array.size, codes.size // scale_array.size
        if size >= LONG_ROW:
            for row in range(scale_array.size):
                at = slice(row * size, (row + 1) * size)
                _decode_long_row(kernel, codes[at], _load_scales(scale_array[row : row + 1], table), numbers[at])
            return out
        write = _writer(numbers, size)

        def work(piece: slice) -> None:
            for run, run_out in write(piece):
                kernel(codes[run.start * width : run.stop * width], _load_scales(scale_array[run], table), run_out)

        on_threads(work, _pieces(scale_array.size, size))
        return out

    return decode


def _decode_long_row(kernel: DecodeKernel, codes: Array, scale: Array, numbers: Tensor) -> None:
    write = _writer(numbers, 1)

    def work(piece: slice) -> None:
        for run, run_out in write(piece):
            kernel(codes[run], scale, run_out)

    on_threads(work, _pieces(codes.size, 1))


def _decode_e4m3(codes: Array, scales: Array, numbers: Array) -> None:
    decode_by_table(codes, scales, numbers, _E4M3_NUMBERS)


def _decode_gguf(encoded: Encoded, dtype: torch.dtype) -> Tensor:
    fmt = encoded.fmt
    assert isinstance(fmt, GgufBlocks)
    layout = fmt.vectors if isinstance(fmt, GgufVectors) else fmt.layout
    out = torch.empty(encoded.shape, dtype=dtype)
    raw = encoded.data.reshape(-1, layout.block_bytes)
    write, decode_run = _writer(out.view(-1), layout.numbers), _reader_of_blocks(fmt, raw)

    def work(piece: slice) -> None:
        for run, run_out in write(piece):
            decode_run(run, run_out)

    on_threads(work, _pieces(len(raw), layout.numbers))
    return out


def _reader_of_blocks(fmt: GgufBlocks, raw: Tensor) -> Callable[[slice, Array], None]:
    if isinstance(fmt, GgufVectors):
        halves, of_vectors = fmt.vectors.halves(raw).float(), (*reading_of(fmt.vectors), fmt.vectors.width)
        return lambda run, to: decode_vectors(_array(raw[run]), _array(halves[run]), *of_vectors, fmt.vectors.group, to)
    layout, (scale, low) = fmt.layout, fmt.layout.scales_in(raw)
    table = None if layout.table is None else np.array(layout.table, F32)
    settings = _planes(fmt.name), F32(layout.low), table, layout.group, layout.numbers
    return lambda run, to: decode_gguf_blocks(
        _array(raw[run]), _array(scale[run]), None if low is None else _array(low[run]), *settings, to
    )


@functools.cache
def _planes(name: str) -> Array:
    """The planes of a layout, [planes, 4], as `decode_gguf_blocks` takes them."""
    layout, rows, shift = LAYOUTS[name], [], 0
    firsts = dict(zip((part for part, _ in layout.parts), _starts([size for _, size in layout.parts]), strict=True))
    for index, plane in enumerate(layout.planes):
        rows.append((firsts[f"plane{index}"], plane.bits, plane.run, shift))
        shift += plane.bits
    return np.array(rows, np.int64)


def _starts(sizes: list[int]) -> list[int]:
    return [0, *itertools.accumulate(sizes)][:-1]


def _scale_table(fmt: Format, base: Tensor | None) -> Array | None:
    """The number of each word of a narrow scale; None for float32 scales."""
    assert fmt.scales is not None
    if fmt.scales.dtype == torch.float32:
        return None
    return _fixed_scale_table(fmt) if base is None else _loaded_words(fmt, base)


@functools.cache
def _fixed_scale_table(fmt: Format) -> Array:
    return _loaded_words(fmt, None)


def _loaded_words(fmt: Format, base: Tensor | None) -> Array:
    assert fmt.scales is not None
    words = torch.arange(2 ** (8 * fmt.scales.dtype.itemsize), dtype=torch.int32)
    narrow = words.to(torch.uint8) if fmt.scales.dtype.itemsize == 1 else words.to(torch.int16)
    loaded = fmt.scales.load(narrow.view(fmt.scales.dtype), base)
    return (loaded / 2 if isinstance(fmt, GgufMxfp4) else loaded).float().numpy()


def _load_scales(words: Array, table: Array | None) -> Array:
    if table is None:
        return words
    scales = np.empty(words.size, np.float32)
    look_up(table, words, scales)
    return scales


# ---- pieces --------------------------------------------------------------------------------------------------------


def _pieces(count: int, size: int) -> list[slice]:
    """Slices of `count` blocks of `size` numbers, cut for the threads."""
    count_of_pieces = min(PIECES_PER_THREAD * torch.get_num_threads(), count * size // SMALLEST_PIECE)
    step = -(-count // max(1, count_of_pieces))
    return [slice(start, min(start + step, count)) for start in range(0, count, max(1, step))]


def _runs(piece: slice, size: int) -> Iterator[slice]:
    step = max(1, RUN // size)
    for start in range(piece.start, piece.stop, step):
        yield slice(start, min(start + step, piece.stop))


def _reader(numbers: Tensor, size: int) -> Callable[[slice], Iterator[tuple[slice, Array]]]:
    """Gives the float32 words of a piece: all at once, or run by run where they must be cast."""

    def read_cast(piece: slice) -> Iterator[tuple[slice, Array]]:
        for run in _runs(piece, size):
            yield run, _array(numbers[run.start * size : run.stop * size].float()).view(np.uint32)

    if numbers.dtype != torch.float32:
        return read_cast
    words = _array(numbers).view(np.uint32)  # not in the threads: making a view takes a tenth of a kernel's time
    return lambda piece: iter([(piece, words[piece.start * size : piece.stop * size])])


def _writer(numbers: Tensor, size: int) -> Callable[[slice], Iterator[tuple[slice, Array]]]:
    """Gives float32 memory of a piece to fill: in place, or run by run in a buffer that is cast before the next run."""

    def write_cast(piece: slice) -> Iterator[tuple[slice, Array]]:
        for run in _runs(piece, size):
            buffer = torch.empty((run.stop - run.start) * size)
            yield run, _array(buffer)
            numbers[run.start * size : run.stop * size].copy_(buffer)

    if numbers.dtype != torch.float32:
        return write_cast
    array = _array(numbers)
    return lambda piece: iter([(piece, array[piece.start * size : piece.stop * size])])


def _array(tensor: Tensor) -> Array:
    """A flat view: numbers of 8 bits and float32 as they are, 16-bit floats as words."""
    array: Array = tensor.view(_WORDS.get(tensor.dtype, tensor.dtype)).numpy().reshape(-1)
    return array.view(np.uint16) if array.itemsize == 2 else array


_E4M3_NUMBERS = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float().numpy()

ENCODERS: dict[str, Encoder] = {
    "bfloat16": _encode_bfloat16,
    "int8_row": _row_encoder(encode_int8, round_to_int8),
    "int8_g128": _row_encoder(encode_int8, round_to_int8),
    "fp8_e4m3_row": _row_encoder(encode_e4m3, round_to_e4m3),
    "q8_0_gguf": _block_encoder(encode_q8_0_gguf),
    "q4_0_gguf": _block_encoder(encode_q4_0_gguf),
    "q4_0_poly": _block_encoder(encode_q4_0_poly),
    "int4_g32": _block_encoder(encode_int4_g32),
    "mxfp4": _block_encoder(encode_mxfp4),
    "mxfp4_gguf": _block_encoder(_encode_mxfp4_gguf),
}

DECODERS: dict[str, Decoder] = {
    "int8_row": _decoder(decode_int8),
    "int8_g128": _decoder(decode_int8),
    "fp8_e4m3_row": _decoder(_decode_e4m3),
    "mxfp8_e4m3": _decoder(_decode_e4m3),
    "q8_0_gguf": _decoder(decode_q8_0_gguf),
    "q4_0_gguf": _decoder(decode_q4_0_gguf),
    "q4_0_poly": _decoder(decode_q4_0_poly),
    "int4_g32": _decoder(decode_int4_g32),
    "mxfp4": _decoder(decode_mxfp4),
    "mxfp4_gguf": _decoder(decode_mxfp4_gguf),
    "nvfp4": _decoder(decode_nvfp4),
    **dict.fromkeys((*LAYOUTS, *VECTOR_LAYOUTS), _decode_gguf),
}
