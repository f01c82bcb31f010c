"""CPU encoders: each is one pass over memory, equal to `bitplan.formats.encode` bit for bit.

Numbers come as their float32 words in a flat uint32 array, blocks one after another. A strip of blocks is read from
memory once and from the L1 cache twice: for the largest magnitudes, then, with the scales known, for the codes. The
iterations of each loop are independent, which keeps the vector units busy; a single loop would wait for its own
results. Every encoder returns the largest magnitude it saw, as a word: NOT_FINITE or more is an infinity or a NaN, and
then the output is meaningless.

Rounding uses no conversion instructions (a quarter of an addition's speed on Neoverse): adding a large constant leaves
the rounded number in the low bits of the sum, by the hardware's own rounding to nearest even.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import numpy as np

from bitplan.kernels.base.jit import compiled, inlined
from bitplan.kernels.base.vectors import (
    copysign,
    evens,
    first_half,
    greater,
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
    view,
)

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

STRIP = 64  # blocks of 32: 8 KiB
AHEAD = 4096  # words: prefetched while the codes of one strip are computed


# ---- 8-bit formats: blocks of any length ---------------------------------------------------------------------------


@compiled
def encode_int8(words_BG, data_BG, scales_B):
    """int8_row, int8_g128: scale max |x| / 127, ties to even."""
    worst = U32(0)
    for block in range(scales_B.size):
        top = _largest_magnitude(words_BG[block])
        worst = max(worst, top)
        scales_B[block] = min(_flush_small(_as_float(top) / F32(127)), LARGEST_INT8_SCALE)
        _round_to_int8(words_BG[block], _reciprocal(scales_B[block]), data_BG[block])
    return worst


@compiled
def encode_e4m3(words_BG, data_BG, scales_B):
    """fp8_e4m3_row: scale max |x| / 448, ties to even."""
    worst = U32(0)
    for block in range(scales_B.size):
        top = _largest_magnitude(words_BG[block])
        worst = max(worst, top)
        scales_B[block] = _flush_small(_as_float(top) / F32(448))
        _round_to_e4m3(words_BG[block], _reciprocal(scales_B[block]), data_BG[block])
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
    """float32 words -> bfloat16 words, ties to even; wrong for NaN, which the returned word shows to the caller."""
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
        data[i] = np.int8(_as_word(F32(_as_float(words[i]) * inverse) + NEAREST))


@inlined
def _round_to_e4m3(words, inverse, data):
    for i in range(words.size):
        word = _as_word(_as_float(words[i]) * inverse)
        magnitude = U32(word & MAGNITUDE)
        odd = U32(U32(magnitude >> U32(20)) & U32(1))
        normal = U32(U32(magnitude + U32(0x7FFFF) + odd - U32(120 << 23)) >> U32(20))
        subnormal = U32(_as_word(_as_float(magnitude) + F32(2.0**14)) - U32(141 << 23))
        code = subnormal if magnitude < U32(121 << 23) else normal
        data[i] = U8(code | U32(U32(word >> U32(24)) & U32(0x80)))


# ---- blocks of 32 --------------------------------------------------------------------------------------------------


@compiled
def encode_q4_0_gguf(words, data, scales):
    """d = the number of largest magnitude / -8, kept as float16; code = floor(x / d + 8.5), at most 15."""
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
    """d = max |x| / 127, kept as float16; code = x / d, ties away from zero."""
    tops, inverses = np.empty(STRIP, U32), np.empty(STRIP, F32)
    worst = U32(0)
    for first in range(0, scales.size, STRIP):
        strip = scales[first : first + STRIP]
        worst = max(worst, _block_tops(words, first, tops[: strip.size]))
        for i in range(strip.size):
            wanted = F32(_as_float(tops[i]) / F32(127))
            strip[i] = _float16(_as_word(wanted))
            inverses[i] = _reciprocal(_flush_small(wanted))
        for i in range(strip.size):
            _prefetch_block(words, 32 * (first + i) + AHEAD)
            store(data, 32 * (first + i), _half_away(view(load(words, 32 * (first + i), 32), F32) * inverses[i]))
    return worst


@compiled
def encode_q4_0_poly(words, data, scales):
    """Scale max |x| / 7; code = x / scale, ties away from zero, two's complement."""
    tops, divisors = np.empty(STRIP, U32), np.empty(STRIP, F32)
    worst = U32(0)
    for first in range(0, scales.size, STRIP):
        strip = scales[first : first + STRIP]
        worst = max(worst, _block_tops(words, first, tops[: strip.size]))
        for i in range(strip.size):
            scale = _flush_small(_as_float(tops[i]) / F32(7))
            strip[i] = scale
            divisors[i] = scale if scale > ZERO else F32(np.inf)  # a zero scale gives zero codes
        for i in range(strip.size):
            rounded = _half_away(view(load(words, 32 * (first + i), 32), F32) / divisors[i])
            store(data, 16 * (first + i), _pack_pairs(rounded))
    return worst


@compiled
def encode_int4_g32(words, data, scales):
    """Scale max |x| / 7 as bfloat16; code = x / scale to nearest even, + 8."""
    tops, inverses = np.empty(STRIP, U32), np.empty(STRIP, F32)
    worst = U32(0)
    for first in range(0, scales.size, STRIP):
        strip = scales[first : first + STRIP]
        worst = max(worst, _block_tops(words, first, tops[: strip.size]))
        for i in range(strip.size):
            strip[i] = _bfloat16(_as_word(_flush_small(_as_float(tops[i]) / F32(7))))
            inverses[i] = _reciprocal(_as_float(U32(strip[i]) << U32(16)))
        for i in range(strip.size):
            _prefetch_block(words, 32 * (first + i) + AHEAD)
            sums = view(load(words, 32 * (first + i), 32), F32) * inverses[i] + NEAREST_AND_EIGHT
            store(data, 16 * (first + i), _pack_pairs(narrow(view(sums, U32), U8)))
    return worst


@compiled
def encode_mxfp4(words, data, scales):
    """Scale byte: the largest exponent - 2; codes E2M1, ties to even."""
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
            store(data, 16 * (first + i), _pack_pairs(_e2m1(load(words, 32 * (first + i), 32), I32(strip[i]))))
    return U32(worst) << U32(16)


@compiled
def encode_mxfp4_gguf(words, data, scales, rounds_up):
    """As ggml: ties towards zero, no -0; from the word rounds_up[exponent] on, its logarithm is rounded up."""
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
            rounded = _e2m1(off_ties, I32(strip[i]))
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
        d = F32(_as_float(top | (SIGN if above == top else U32(0))) * EIGHTH)
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
def _flush_small(scale):
    return F32(scale) if F32(scale) >= SMALLEST_SCALE else ZERO


@inlined
def _reciprocal(scale):
    return F32(ONE / scale) if scale > ZERO else ZERO


@inlined
def _float16(word):
    """The float16 word nearest to a float32 word, ties to even; infinity from 65520 on."""
    magnitude = U32(word & MAGNITUDE)
    odd = U32(U32(magnitude >> U32(13)) & U32(1))
    normal = U32(U32(magnitude + U32(0xFFF) + odd - U32(112 << 23)) >> U32(13))
    subnormal = U32(_as_word(_as_float(magnitude) + F32(0.5)) - U32(0x3F000000))
    half = subnormal if magnitude < U32(113 << 23) else normal
    half = half if magnitude < U32(0x477FF000) else U32(0x7C00)
    return U16(half | U32(U32(word >> U32(16)) & U32(0x8000)))


@inlined
def _bfloat16(word):
    """The bfloat16 word nearest to a float32 word, ties to even."""
    return U16(U32(word + U32(0x7FFF) + U32(U32(word >> U32(16)) & U32(1))) >> U32(16))


@inlined
def _as_float(word):
    return same_bits(U32(word), F32)


@inlined
def _as_word(number):
    return same_bits(F32(number), U32)


# ---- codes of 32 numbers -------------------------------------------------------------------------------------------


@inlined
def _e2m1(words, scale_byte):
    """E2M1 codes of numbers over 2^(scale_byte - 127), ties to even, in bytes.

    Each number is added to its own power of two (but no less than the scale's) times 2^22, where float32 has the
    spacing of E2M1: the sum's mantissa counts steps in the binade, its exponent counts binades, and steps + 2 binades
    is the code. The constant's mantissa starts the count so that both bases cancel.
    """
    if scale_byte < 64 or scale_byte >= 192:  # keep the sum in range
        words = view(view(words, F32) * (F32(2.0**64) if scale_byte < 64 else F32(2.0**-64)), U32)
        scale_byte = scale_byte + 64 if scale_byte < 64 else scale_byte - 64
    power = maximum(words & EXPONENT, U32(scale_byte) << U32(23))
    constant = _as_float(((127 + 22) << 23) + 0x10000 - 2 * (scale_byte + 22))
    sums = multiply_add(copysign(view(power, F32), view(words, F32)), constant, view(words, F32))
    halves = view(sums, np.int16)
    counts = evens(halves) + (odds(halves) >> 6)  # lower byte: the code, up to 8; the upper byte gets the sign later
    limits = view((counts & 0) | 0x0807, U8)
    nibbles = minimum(view(counts, U8), limits)
    return evens(nibbles) + odds(nibbles)


@inlined
def _half_away(scaled):
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
