"""Loops of the CPU's integer products: 8-bit inputs times packed weights, whole numbers summed within blocks of 32.

    y[m, n] = sum_b scale_x[m, b] scale_w[n, b] sum_{k in b} code_x[m, k] code_w[n, k]

Inputs are rounded in the loop, as `encode` does in their format (`q8_0_gguf`: a float16 scale for 32 numbers, ties away
from zero; `int8_row`: a float32 scale for a token, ties to even), so that codes equal the definition's. Sums within a
block are exact; the rest is float32. A block that is not finite, or too large for its scale, gives no finite result.

| CPU | four products and their sum |
|---|---|
| AVX-512 VNNI, AVX-VNNI | vpdpbusd: unsigned times signed bytes |
| AVX2, AVX-512BW | vpmaddubsw, vpmaddwd: the same, through 16 bits, which 4-bit codes never fill |
| Arm with dot products | sdot: signed bytes |
| others | bytes widened, multiplied, summed |

Where weights must be unsigned, codes are shifted by `OFFSETS`, and the sums begin with minus the offset times the sum
of the inputs' codes (`starts`). 8-bit weights through 16 bits would overflow: there their signs go to the inputs.

**Few inputs** (`rows`): a register of codes is multiplied as it lies, so inputs are arranged to match: for 4-bit codes
those of low nibbles, then those of high ones. Each block has lanes of its own, which its scales multiply.

**Many inputs** (`panels`): the codes of LANES rows are opened once, in an order in which a lane is a row; 4 to 12
inputs at a time are repeated on all lanes. So a block costs eight dot products and one scaling for LANES rows, and no
lanes are summed; where groups have 16 numbers, a scaling for each half. Inputs lie in quads: for each block 4 times 32
codes, 4 scales, 4 starts of each group.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types

from bitplan.base.hardware import cpu_features
from bitplan.base.loops.addresses import (
    float_of_half,
    load_from,
    load_tile,
    prefetch_later,
    read,
    repeat_each,
    take,
    write,
    zero_tile,
)
from bitplan.base.loops.jit import inlined, merged
from bitplan.base.loops.openmp_threads import c_function
from bitplan.base.loops.vectors import (
    VectorType,
    VectorWriter,
    concatenate,
    define,
    evens,
    first_half,
    largest,
    multiply_add,
    narrow,
    odds,
    second_half,
    to_float,
    view,
    widen,
)
from bitplan.formats.cpu_codec import (
    LARGEST_INT8_SCALE,
    MAGNITUDE,
    NEAREST,
    NOT_FINITE,
    as_float,
    flush_small,
    half_away,
    reciprocal_of,
)
from bitplan.packed.products.cpu_rows import (
    BIAS,
    BY_TOKEN,
    CODES,
    CODES_STRIDE,
    COUNT,
    F32,
    FACTOR,
    I8,
    I32,
    INPUTS,
    LANES,
    NEXT_ROW,
    NEXT_THREAD,
    PIECE,
    QUARTER_LANES,
    REGISTER,
    ROWS,
    SCALES,
    SCRATCH,
    SCRATCH_STRIDE,
    STEP,
    U8,
    U16,
    U32,
    WIDTH,
    X,
    Y,
    bfloat16_scales,
    e8m0_scales,
    field,
    float16_scales,
    four_rows,
    half_e8m0_scales,
    row_of,
    transpose_tile,
    uint8_scales_of_128,
    write_4x1,
)

BLOCK, QUAD = 32, 4
BYTE_STEP = max(REGISTER, BLOCK)  # 8-bit codes that are multiplied at a time: whole blocks
BYTE_LANES = BYTE_STEP // 4
BYTE_BLOCKS = BYTE_STEP // BLOCK
OPENED_CODES = 8 * REGISTER  # bytes of a block of LANES rows: eight times four codes of each, then scales, minima
OPENED_BLOCK = OPENED_CODES + REGISTER
HAS_VNNI = {"avx512vnni", "avx512vl"} <= cpu_features() or (LANES == 8 and "avxvnni" in cpu_features())
IS_X86, HAS_SDOT = "avx2" in cpu_features(), "dotprod" in cpu_features()
# By which codes are shifted, to be unsigned.
OFFSETS = {
    "integers": 8 if IS_X86 else 0,
    "e2m1": 12 if IS_X86 else 0,
    "bytes": 128 if HAS_VNNI else 0,
    "signed": 32 if IS_X86 else 0,  # codes of at most six bits
    "unsigned": 0,  # codes of at most five bits, whose groups have minima
}
DOUBLED_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
HAS_MANY_REGISTERS = LANES != 8  # AVX2 has 16, AVX-512 and Arm have 32
INT8, INT32, INT64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


# ---- instructions ---------------------------------------------------------------------------------------------------


def _vpdpbusd(writer: VectorWriter, sums: Any, weights: Any, inputs: Any) -> Any:
    words = [writer.builder.bitcast(operand, sums.type) for operand in (weights, inputs)]
    return writer.call(f"llvm.x86.avx512.vpdpbusd.{32 * sums.type.count}", sums.type, [sums, *words])


_MADD = {
    16: ("llvm.x86.ssse3.pmadd.ub.sw.128", "llvm.x86.sse2.pmadd.wd"),
    32: ("llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"),
    64: ("llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512"),
}


def _vpmaddubsw(writer: VectorWriter, sums: Any, weights: Any, inputs: Any) -> Any:
    size = weights.type.count
    pairs, fours = _MADD[size]
    halves = ir.VectorType(ir.IntType(16), size // 2)
    ones = ir.Constant(halves, [ir.Constant(ir.IntType(16), 1)] * (size // 2))
    products = writer.call(pairs, halves, [weights, inputs])
    return writer.builder.add(sums, writer.call(fours, sums.type, [products, ones]))


def _signs_moved(writer: VectorWriter, sums: Any, weights: Any, inputs: Any) -> Any:
    """Signed times signed bytes: magnitudes of the weights times inputs that have the weights' signs."""
    builder = writer.builder
    sevens = ir.Constant(weights.type, [ir.Constant(INT8, 7)] * weights.type.count)
    signs = builder.ashr(weights, sevens)
    moved = [builder.sub(builder.xor(operand, signs), signs) for operand in (weights, inputs)]
    return _vpmaddubsw(writer, sums, *moved)


def _sdot(writer: VectorWriter, sums: Any, weights: Any, inputs: Any) -> Any:
    if sums.type.count == 4:
        return writer.call("llvm.aarch64.neon.sdot.v4i32.v16i8", sums.type, [sums, weights, inputs])
    halves = [
        _sdot(writer, *(_part(writer, operand, half, 2) for operand in (sums, weights, inputs))) for half in range(2)
    ]
    return writer.shuffle(halves[0], halves[1], range(sums.type.count))


def _widened(writer: VectorWriter, sums: Any, weights: Any, inputs: Any) -> Any:
    builder, count = writer.builder, weights.type.count
    wide = ir.VectorType(ir.IntType(16), count)
    products = builder.mul(builder.sext(weights, wide), builder.sext(inputs, wide))
    for first in range(4):
        picked = writer.shuffle(products, products, range(first, count, 4))
        sums = builder.add(sums, builder.sext(picked, sums.type))
    return sums


def _part(writer: VectorWriter, vector: Any, index: int, parts: int) -> Any:
    size = vector.type.count // parts
    return writer.shuffle(vector, vector, range(index * size, (index + 1) * size))


_SIGNED = _sdot if HAS_SDOT else _widened
DOTS: dict[str, Callable[..., Any]] = {
    "integers": _vpdpbusd if HAS_VNNI else _vpmaddubsw if IS_X86 else _SIGNED,
    "bytes": _vpdpbusd if HAS_VNNI else _signs_moved if IS_X86 else _SIGNED,
}
DOTS["e2m1"] = DOTS["signed"] = DOTS["unsigned"] = DOTS["integers"]


def dot_of(kind: str) -> Any:
    """dot(sums, weights, inputs): int32 lanes, each plus four products of bytes."""
    return define(3, lambda sums, _weights, _inputs: sums, DOTS[kind])


def look_up(writer: VectorWriter, codes: Any, numbers: Sequence[int]) -> Any:
    """These 16 numbers, as bytes, of codes below 16."""
    size = codes.type.count
    if IS_X86:
        name = {16: "llvm.x86.ssse3.pshuf.b.128", 32: "llvm.x86.avx2.pshuf.b", 64: "llvm.x86.avx512.pshuf.b.512"}[size]
        table = ir.Constant(codes.type, [ir.Constant(INT8, number) for number in numbers] * (size // 16))
        return writer.call(name, codes.type, [table, codes])
    table = ir.Constant(codes.type, [ir.Constant(INT8, number) for number in numbers])
    return writer.call("llvm.aarch64.neon.tbl1.v16i8", codes.type, [table, codes])


def _repeated_byte(vector: Any, number: int) -> Any:
    return ir.Constant(vector.type, [ir.Constant(INT8, number)] * vector.type.count)


def _opened_nibbles(writer: VectorWriter, kind: str, nibbles: Any) -> Any:
    if kind == "e2m1":
        return look_up(writer, nibbles, [number + OFFSETS["e2m1"] for number in DOUBLED_E2M1])
    shift = 8 - OFFSETS["integers"]
    return writer.builder.sub(nibbles, _repeated_byte(nibbles, shift)) if shift else nibbles


def _opened(writer: VectorWriter, kind: str, codes: Any, is_high: bool) -> Any:
    """The weights' codes in a register of bytes: all of 8 bits, or those of low or high nibbles."""
    builder = writer.builder
    if kind in ("bytes", "unsigned"):
        return builder.xor(codes, _repeated_byte(codes, OFFSETS[kind])) if OFFSETS[kind] else codes
    mask = builder.lshr(codes, _repeated_byte(codes, 4)) if is_high else builder.and_(codes, _repeated_byte(codes, 15))
    return _opened_nibbles(writer, kind, mask)


def _opener(kind: str, is_high: bool) -> Any:
    return define(1, lambda codes: codes, lambda writer, codes: _opened(writer, kind, codes, is_high))


def _through_half(writer: VectorWriter, number: Any) -> Any:
    return writer.builder.fpext(writer.builder.fptrunc(number, ir.HalfType()), ir.FloatType())


def splat(writer: VectorWriter, number: Any, count: int) -> Any:
    nothing = ir.Constant(ir.VectorType(number.type, count), ir.Undefined)
    return writer.shuffle(writer.builder.insert_element(nothing, number, ir.Constant(INT32, 0)), nothing, [0] * count)


through_half = define(1, lambda number: number, _through_half)  # a float32 rounded to float16
first_lane = define(
    1, lambda vector: vector.lane, lambda writer, v: writer.builder.extract_element(v, ir.Constant(INT32, 0))
)
negated_times = define(  # an int32 vector, a literal: minus their product
    2,
    lambda vector, _number: vector,
    lambda writer, v, _n: writer.builder.mul(
        v, ir.Constant(v.type, [ir.Constant(INT32, -writer.kinds[1].literal_value)] * v.type.count)
    ),
)
ones_like = define(1, lambda vector: vector, lambda _writer, v: _repeated_byte(v, 1))
zero_words = define(  # int32 zeros, as many as a literal says
    1,
    lambda count: VectorType(types.int32, count.literal_value),
    lambda writer, _count: ir.Constant(ir.VectorType(INT32, writer.kinds[0].literal_value), None),
)
sum_words = define(
    1,
    lambda vector: vector.lane,
    lambda writer, v: writer.call(f"llvm.vector.reduce.add.v{v.type.count}i32", INT32, [v]),
)


# ---- inputs, rounded ------------------------------------------------------------------------------------------------


@inlined
def numbers_at(x, width, first, buffer):
    """The address of 32 numbers of x from `first` on: there, or where its row ends in the buffer, with zeros."""
    address = x + 4 * first
    if first + BLOCK > width:
        for i in range(BLOCK):
            write(buffer + 4 * i, read(x + 4 * (first + i), F32) if first + i < width else F32(0))
        address = buffer
    return address


@inlined
def scale_of_token(x, width):
    """int8_row's scale; NaN or infinity where a number is."""
    top = U32(0)
    for k in range(width):
        top = max(top, U32(read(x + 4 * k, U32) & MAGNITUDE))
    scale = min(flush_small(as_float(top) / F32(127)), LARGEST_INT8_SCALE)
    return scale if top < NOT_FINITE else as_float(top)


@inlined
def rounded_block(address, by_token, of_token):
    """32 numbers -> their codes as bytes, their scale."""
    words = load_from(address, U32, 32)
    if by_token:
        scale = of_token
        codes = narrow(view(view(words, F32) * reciprocal_of(of_token) + NEAREST, U32), U8)
    else:
        exact_scale = as_float(largest(words & MAGNITUDE)) / F32(127)
        scale = through_half(F32(exact_scale))
        codes = half_away(view(words, F32) * reciprocal_of(flush_small(exact_scale)))
    return view(codes, I8), scale


@inlined
def _as_they_lie(codes):
    return codes


@inlined
def _evens_first(codes):
    return concatenate(evens(codes), odds(codes))


def _rounded_rows(job):
    """Every row of x as the numbers that it is rounded to, in float32."""
    rows, width, piece, by_token = field(job, ROWS), field(job, WIDTH), field(job, PIECE), field(job, BY_TOKEN)
    buffer = field(job, SCRATCH) + take(job + 8 * NEXT_THREAD, 1) * field(job, SCRATCH_STRIDE)
    first = take(job + 8 * NEXT_ROW, piece)
    while first < rows:
        for m in range(first, min(first + piece, rows)):
            x, y = field(job, X) + 4 * m * width, field(job, Y) + 4 * m * width
            of_token = scale_of_token(x, width) if by_token else F32(0)
            for k in range(0, width, BLOCK):
                codes, scale = rounded_block(numbers_at(x, width, k, buffer), by_token, of_token)
                numbers = to_float(widen(codes, I32), F32) * F32(scale)
                if k + BLOCK <= width:
                    write(y + 4 * k, numbers)
                else:
                    write(buffer, numbers)
                    for i in range(width - k):
                        write(y + 4 * (k + i), read(buffer + 4 * i, F32))
        first = take(job + 8 * NEXT_ROW, piece)


# ---- few inputs -----------------------------------------------------------------------------------------------------


@inlined
def _arrange_nibbles(job, x, width, padded, buffer, to, dot, offset, order):
    by_token = field(job, BY_TOKEN)
    of_token = scale_of_token(x, width) if by_token else F32(0)
    for step in range(-(-padded // STEP)):
        start = step * STEP
        first, at = min(start, padded - STEP), to + 4 * REGISTER * step
        for block in range(QUARTER_LANES):
            number = first + BLOCK * block
            codes, scale = rounded_block(numbers_at(x, width, number, buffer), by_token, of_token)
            codes, lane = order(codes), at + 16 * block
            scale = scale if number >= start else F32(0)  # a block that the register before has, too
            low, high = first_half(codes), second_half(codes)
            write(lane, low)
            write(lane + REGISTER, high)
            write(lane + 2 * REGISTER, repeat_each(load_from(_kept(scale, buffer), F32, 1), 4))
            if offset:
                sums = dot(dot(zero_words(4), ones_like(low), low), ones_like(high), high)
                write(lane + 3 * REGISTER, negated_times(sums, offset))


@inlined
def _kept(number, address):
    write(address, F32(number))
    return address


@inlined
def _arrange_bytes(job, x, width, padded, buffer, to, dot, offset):
    by_token = field(job, BY_TOKEN)
    of_token = scale_of_token(x, width) if by_token else F32(0)
    for step in range(-(-padded // BYTE_STEP)):
        start = step * BYTE_STEP
        first, at = min(start, padded - BYTE_STEP), to + 3 * BYTE_STEP * step
        for block in range(BYTE_BLOCKS):
            number = first + BLOCK * block
            codes, scale = rounded_block(numbers_at(x, width, number, buffer), by_token, of_token)
            lane = at + BLOCK * block
            scale = scale if number >= start else F32(0)
            write(lane, codes)
            write(lane + BYTE_STEP, repeat_each(load_from(_kept(scale, buffer), F32, 1), 8))
            if offset:
                write(lane + 2 * BYTE_STEP, negated_times(dot(zero_words(8), ones_like(codes), codes), offset))


@inlined
def _nibble_sums(codes, at, low, high, dot, start, x_low, x_high):
    packed = load_from(codes + at, U8, REGISTER)
    return to_float(dot(dot(start, low(packed), x_low), high(packed), x_high), F32)


@inlined
def _nibbles_4x1(low, high, dot, scales, offset, codes, scales_at, x, row_bytes):
    sums0, sums1, sums2, sums3 = zero_tile(4, LANES)
    for step in range(-(-row_bytes // REGISTER)):
        at, inputs_at = min(step * REGISTER, row_bytes - REGISTER), x + 4 * REGISTER * step
        block = at // 16
        x_low, x_high = load_from(inputs_at, I8, REGISTER), load_from(inputs_at + REGISTER, I8, REGISTER)
        x_scales = load_from(inputs_at + 2 * REGISTER, F32, LANES)
        start = load_from(inputs_at + 3 * REGISTER, I32, LANES) if offset else zero_words(LANES)
        prefetch_later(codes[0] + at + 4 * row_bytes)
        prefetch_later(codes[1] + at + 4 * row_bytes)
        prefetch_later(codes[2] + at + 4 * row_bytes)
        prefetch_later(codes[3] + at + 4 * row_bytes)
        ints0 = _nibble_sums(codes[0], at, low, high, dot, start, x_low, x_high)
        ints1 = _nibble_sums(codes[1], at, low, high, dot, start, x_low, x_high)
        ints2 = _nibble_sums(codes[2], at, low, high, dot, start, x_low, x_high)
        ints3 = _nibble_sums(codes[3], at, low, high, dot, start, x_low, x_high)
        sums0 = multiply_add(ints0, scales(scales_at[0], block) * x_scales, sums0)
        sums1 = multiply_add(ints1, scales(scales_at[1], block) * x_scales, sums1)
        sums2 = multiply_add(ints2, scales(scales_at[2], block) * x_scales, sums2)
        sums3 = multiply_add(ints3, scales(scales_at[3], block) * x_scales, sums3)
    return sums0, sums1, sums2, sums3


@inlined
def _byte_sums(codes, at, opened, dot, start, x):
    return to_float(dot(start, opened(load_from(codes + at, I8, BYTE_STEP)), x), F32)


@inlined
def _bytes_4x1(opened, dot, scales, offset, codes, scales_at, x, width):
    sums0, sums1, sums2, sums3 = zero_tile(4, BYTE_LANES)
    for step in range(-(-width // BYTE_STEP)):
        at, inputs_at = min(step * BYTE_STEP, width - BYTE_STEP), x + 3 * BYTE_STEP * step
        x_codes, x_scales = load_from(inputs_at, I8, BYTE_STEP), load_from(inputs_at + BYTE_STEP, F32, BYTE_LANES)
        start = load_from(inputs_at + 2 * BYTE_STEP, I32, BYTE_LANES) if offset else zero_words(BYTE_LANES)
        prefetch_later(codes[0] + at + 4 * width)
        prefetch_later(codes[1] + at + 4 * width)
        prefetch_later(codes[2] + at + 4 * width)
        prefetch_later(codes[3] + at + 4 * width)
        ints0 = _byte_sums(codes[0], at, opened, dot, start, x_codes)
        ints1 = _byte_sums(codes[1], at, opened, dot, start, x_codes)
        ints2 = _byte_sums(codes[2], at, opened, dot, start, x_codes)
        ints3 = _byte_sums(codes[3], at, opened, dot, start, x_codes)
        sums0 = multiply_add(ints0, scales(scales_at[0], at) * x_scales, sums0)
        sums1 = multiply_add(ints1, scales(scales_at[1], at) * x_scales, sums1)
        sums2 = multiply_add(ints2, scales(scales_at[2], at) * x_scales, sums2)
        sums3 = multiply_add(ints3, scales(scales_at[3], at) * x_scales, sums3)
    return sums0, sums1, sums2, sums3


@merged
def nibble_rows(job, low, high, dot, scales, offset, order):
    """The job of a 4-bit format with few inputs: every thread rounds all of them, then takes rows of the weight."""
    inputs, width, row_bytes, rows = field(job, INPUTS), field(job, WIDTH), field(job, CODES_STRIDE), field(job, ROWS)
    mine = field(job, SCRATCH) + take(job + 8 * NEXT_THREAD, 1) * field(job, SCRATCH_STRIDE)
    x, stride, piece = mine + 4 * BLOCK, 4 * REGISTER * (-(-row_bytes // REGISTER)), field(job, PIECE)
    for m in range(inputs):
        numbers = field(job, X) + 4 * m * width
        _arrange_nibbles(job, numbers, width, 2 * row_bytes, mine, x + m * stride, dot, offset, order)
    first = take(job + 8 * NEXT_ROW, piece)
    while first < rows:
        for n in range(first, min(first + piece, rows), 4):
            codes, at = four_rows(job, CODES, n), four_rows(job, SCALES, n)
            for m in range(inputs):
                write_4x1(job, n, m, _nibbles_4x1(low, high, dot, scales, offset, codes, at, x + m * stride, row_bytes))
        first = take(job + 8 * NEXT_ROW, piece)


@merged
def byte_rows(job, opened, dot, scales, offset):
    """The job of an 8-bit format with few inputs, as `nibble_rows`."""
    inputs, width, row_bytes, rows = field(job, INPUTS), field(job, WIDTH), field(job, CODES_STRIDE), field(job, ROWS)
    mine = field(job, SCRATCH) + take(job + 8 * NEXT_THREAD, 1) * field(job, SCRATCH_STRIDE)
    x, stride, piece = mine + 4 * BLOCK, 3 * BYTE_STEP * (-(-row_bytes // BYTE_STEP)), field(job, PIECE)
    for m in range(inputs):
        numbers = field(job, X) + 4 * m * width
        _arrange_bytes(job, numbers, width, row_bytes, mine, x + m * stride, dot, offset)
    first = take(job + 8 * NEXT_ROW, piece)
    while first < rows:
        for n in range(first, min(first + piece, rows), 4):
            codes, at = four_rows(job, CODES, n), four_rows(job, SCALES, n)
            for m in range(inputs):
                write_4x1(job, n, m, _bytes_4x1(opened, dot, scales, offset, codes, at, x + m * stride, row_bytes))
        first = take(job + 8 * NEXT_ROW, piece)


def rows_bytes(padded: int, inputs: int, *, nibbles: bool) -> int:
    """Scratch of a thread for few inputs; threads share no cache line."""
    of_input = 4 * REGISTER * -(-padded // STEP) if nibbles else 3 * BYTE_STEP * -(-padded // BYTE_STEP)
    return 4 * BLOCK + inputs * of_input + 64


# ---- many inputs ----------------------------------------------------------------------------------------------------


@merged
def quads(job, offset, order, has_minima, groups):
    """Round all inputs into `y`, four at a time; those past the last are zero. Starts of weights with minima are what
    these are multiplied by.
    """
    inputs, width, padded = field(job, INPUTS), field(job, WIDTH), field(job, COUNT)
    buffer = field(job, SCRATCH) + take(job + 8 * NEXT_THREAD, 1) * field(job, SCRATCH_STRIDE)
    by_token, blocks, size = field(job, BY_TOKEN), padded // BLOCK, QUAD * (BLOCK + 4 + 4 * groups)
    m = take(job + 8 * NEXT_ROW, 1)
    while m < -(-inputs // QUAD) * QUAD:
        count = width if m < inputs else 0
        x, to, lane = field(job, X) + 4 * m * count, field(job, Y) + m // QUAD * blocks * size, m % QUAD
        of_token = scale_of_token(x, count) if by_token else F32(0)
        for block in range(blocks):
            codes, scale = rounded_block(numbers_at(x, count, BLOCK * block, buffer), by_token, of_token)
            codes, at = order(codes), to + block * size
            write(at + BLOCK * lane, codes)
            write(at + BLOCK * QUAD + 4 * lane, F32(scale))
            start = at + (BLOCK + 4) * QUAD + 4 * lane
            if groups == 2:
                _write_start(first_half(codes), 4, start, scale, offset, has_minima)
                _write_start(second_half(codes), 4, start + 4 * QUAD, scale, offset, has_minima)
            else:
                _write_start(codes, 8, start, scale, offset, has_minima)
        m = take(job + 8 * NEXT_ROW, 1)


@inlined
def _write_start(codes, words, to, scale, offset, has_minima):
    if has_minima or offset:
        total = sum_words(_dot_integers(zero_words(words), ones_like(codes), codes))
        if has_minima:
            write(to, F32(total * F32(scale)))
        else:
            write(to, I32(-offset * total))


def _block_sums(kind: str, count: int, has_minima: bool, groups: int) -> Any:
    """(opened block, quads, bytes from quad to quad, sums) -> sums with the block's products, of LANES rows for each of
    `count` inputs.
    """
    tile = types.UniTuple(VectorType(types.float32, LANES), count)  # type: ignore[attr-defined]

    def emit(writer: VectorWriter, opened: Any, x: Any, stride: Any, floats: Any) -> Any:
        builder = writer.builder

        def load(address: Any, offset: int, llvm: Any) -> Any:
            pointer = builder.add(address, ir.Constant(INT64, offset))
            return builder.load(builder.inttoptr(pointer, ir.PointerType(llvm)), align=1)

        quads = [builder.add(x, builder.mul(stride, ir.Constant(INT64, quad))) for quad in range(count // QUAD)]
        inputs = [(quads[m // QUAD], m % QUAD) for m in range(count)]
        words, bytes_ = ir.VectorType(INT32, LANES), ir.VectorType(INT8, REGISTER)
        lanes, fma = ir.VectorType(ir.FloatType(), LANES), f"llvm.fma.v{LANES}f32"
        scaled = [builder.extract_value(floats, m) for m in range(count)]
        for group in range(groups):
            starts = (BLOCK + 4 + 4 * group) * QUAD
            sums = [ir.Constant(words, None)] * count
            if OFFSETS[kind]:
                sums = [splat(writer, load(at, starts + 4 * lane, INT32), LANES) for at, lane in inputs]
            for four in range(group * 8 // groups, (group + 1) * 8 // groups):
                weights = load(opened, REGISTER * four, bytes_)
                for m, (at, lane) in enumerate(inputs):
                    codes = splat(writer, load(at, BLOCK * lane + 4 * four, INT32), LANES)
                    sums[m] = DOTS[kind](writer, sums[m], weights, builder.bitcast(codes, bytes_))
            scales = load(opened, OPENED_CODES + REGISTER * group, lanes)
            for m, (at, lane) in enumerate(inputs):
                of_input = splat(writer, load(at, BLOCK * QUAD + 4 * lane, ir.FloatType()), LANES)
                values = [builder.sitofp(sums[m], lanes), builder.fmul(scales, of_input), scaled[m]]
                scaled[m] = writer.call(fma, lanes, values)
                if has_minima:
                    beside = splat(writer, load(at, starts + 4 * lane, ir.FloatType()), LANES)
                    values = [load(opened, OPENED_CODES + REGISTER * (groups + group), lanes), beside, scaled[m]]
                    scaled[m] = writer.call(fma, lanes, values)
        return cgutils.pack_array(builder, scaled)

    return define(4, lambda _opened, _x, _stride, _floats: tile, emit)


def _zero_floats(count: int) -> Any:
    tile = types.UniTuple(VectorType(types.float32, LANES), count)  # type: ignore[attr-defined]
    zero = ir.Constant(ir.VectorType(ir.FloatType(), LANES), None)
    return define(1, lambda _any: tile, lambda writer, _any: cgutils.pack_array(writer.builder, [zero] * count))


def _write_tile(count: int) -> Any:
    """A writer (sums, y, bytes from input to input, number of inputs, factor, bias) of the inputs that exist."""

    def emit(writer: VectorWriter, floats: Any, y: Any, stride: Any, remaining: Any, factor_and_bias: Any) -> Any:
        builder = writer.builder
        factor, addend = (builder.extract_value(factor_and_bias, index) for index in range(2))
        for m in range(count):
            with builder.if_then(builder.icmp_signed("<", ir.Constant(INT64, m), remaining)):
                number = builder.fadd(builder.fmul(builder.extract_value(floats, m), factor), addend)
                pointer = builder.add(y, builder.mul(stride, ir.Constant(INT64, m)))
                builder.store(number, builder.inttoptr(pointer, ir.PointerType(number.type)), align=1)
        return writer.context.get_dummy_value()

    return define(5, lambda *_kinds: types.void, emit)


def _write_opened(kind: str, size: int = OPENED_BLOCK) -> Any:
    """A writer (tile of packed codes, of which vector j has word j of every row; address) of opened blocks."""

    def emit(writer: VectorWriter, tile: Any, address: Any) -> Any:
        builder, bytes_ = writer.builder, ir.VectorType(INT8, REGISTER)

        def store(codes: Any, offset: int) -> None:
            pointer = builder.add(address, ir.Constant(INT64, offset))
            builder.store(codes, builder.inttoptr(pointer, ir.PointerType(bytes_)), align=1)

        for j in range(LANES):
            codes = builder.bitcast(builder.extract_value(tile, j), bytes_)
            if kind in ("bytes", "unsigned"):
                store(_opened(writer, kind, codes, is_high=False), REGISTER * (j % 8) + size * (j // 8))
            else:
                low_at = OPENED_BLOCK * (j // 4) + REGISTER * (j % 4)
                store(_opened(writer, kind, codes, is_high=False), low_at)
                store(_opened(writer, kind, codes, is_high=True), low_at + 4 * REGISTER)
        return writer.context.get_dummy_value()

    return define(2, lambda _tile, _address: types.void, emit)


@inlined
def _open_rows(job, n, to, write_opened, scale, words_of_block):
    """LANES rows of the weight from row n on, opened."""
    codes, row_bytes = row_of(job, CODES, n), field(job, CODES_STRIDE)
    for step in range(-(-row_bytes // REGISTER)):
        at = min(step * REGISTER, row_bytes - REGISTER)
        word = at // 4
        target = to + OPENED_BLOCK * (word // words_of_block) + REGISTER * (word % words_of_block)
        write_opened(transpose_tile(load_tile(codes + at, row_bytes, LANES, 1, LANES)), target)
    for row in range(LANES):
        scales = row_of(job, SCALES, n + row)
        for block in range(row_bytes // (4 * words_of_block)):
            write(to + OPENED_BLOCK * block + OPENED_CODES + 4 * row, scale(scales, block))


def _tiles_of(kind: str, count: int, has_minima: bool, groups: int) -> Any:
    """Tiles of `count` inputs, as many as there are; gives where the next input is, and how many are left."""
    block_sums, zero_floats = _block_sums(kind, count, has_minima, groups), _zero_floats(count)
    write_tile, size, quad_block = _write_tile(count), _opened_block(has_minima, groups), _quad_block(groups)

    @inlined
    def tiles(opened, blocks, x, y, stride, remaining, ends):
        quad_bytes = blocks * quad_block
        while remaining > count - QUAD:
            sums, at, inputs_at = zero_floats(0), opened, x
            for _ in range(blocks):
                sums = block_sums(at, inputs_at, quad_bytes, sums)
                at, inputs_at = at + size, inputs_at + quad_block
            write_tile(sums, y, stride, remaining, ends)
            x, y, remaining = x + count // QUAD * quad_bytes, y + count * stride, remaining - count
        return x, y, remaining

    return tiles


def _all_tiles(kind: str, *, has_minima: bool = False, groups: int = 1) -> Any:
    small = _tiles_of(kind, QUAD, has_minima, groups)
    if not HAS_MANY_REGISTERS:
        return small
    large, middle = (_tiles_of(kind, count * QUAD, has_minima, groups) for count in (3, 2))

    @inlined
    def tiles(opened, blocks, x, y, stride, remaining, ends):
        x, y, remaining = large(opened, blocks, x, y, stride, remaining, ends)
        x, y, remaining = middle(opened, blocks, x, y, stride, remaining, ends)
        return small(opened, blocks, x, y, stride, remaining, ends)

    return tiles


def _opened_block(has_minima: bool, groups: int) -> int:
    """Bytes of a block of LANES rows whose groups, one or two, have minima or not."""
    return OPENED_CODES + REGISTER * groups * (1 + has_minima)


def _quad_block(groups: int) -> int:
    """Bytes of a block of four inputs: codes, scales, starts of groups."""
    return QUAD * (BLOCK + 4 + 4 * groups)


@merged
def panel_rows(job, write_opened, scale, words_of_block, tiles):
    """x: quads. Every thread opens LANES rows of the weight at a time, and multiplies them by all inputs."""
    inputs, rows, row_bytes = field(job, INPUTS), field(job, ROWS), field(job, CODES_STRIDE)
    opened = field(job, SCRATCH) + take(job + 8 * NEXT_THREAD, 1) * field(job, SCRATCH_STRIDE)
    blocks, bias = row_bytes // (4 * words_of_block), field(job, BIAS)
    factors = repeat_each(load_from(field(job, FACTOR), F32, 1), LANES)
    n = take(job + 8 * NEXT_ROW, LANES)
    while n < rows:
        first = min(n, rows - LANES)  # the last rows may be written twice, by the same numbers
        _open_rows(job, first, opened, write_opened, scale, words_of_block)
        # Adding -0.0 changes no number.
        addends = load_from(bias + 4 * first, F32, LANES) if bias else factors * F32(0) * F32(-1)
        tiles(opened, blocks, field(job, X), field(job, Y) + 4 * first, 4 * rows, inputs, (factors, addends))
        n = take(job + 8 * NEXT_ROW, LANES)


def block_rows_of(kind: str, has_minima: bool, groups: int) -> Any:
    """The same for GGUF's blocks of so many numbers and bytes: codes of LANES rows are written as bytes, their groups'
    scales and minima beside them, and both are opened from there.
    """
    opened_size, numbers_of_group = _opened_block(has_minima, groups), 1 + has_minima
    write_codes, write_scales = _write_opened("unsigned", opened_size), _write_scales(opened_size, groups)
    tiles = _all_tiles(kind, has_minima=has_minima, groups=groups)

    @merged
    def block_rows(job, written, numbers, size):
        inputs, rows, count, bias = field(job, INPUTS), field(job, ROWS), field(job, COUNT), field(job, BIAS)
        opened = field(job, SCRATCH) + take(job + 8 * NEXT_THREAD, 1) * field(job, SCRATCH_STRIDE)
        codes = opened + opened_size * (count // BLOCK + LANES)
        scales, scales_of_row = codes + LANES * count, 4 * LANES * (-(-(groups * count // BLOCK) // LANES))
        factors = repeat_each(load_from(field(job, FACTOR), F32, 1), LANES)
        n = take(job + 8 * NEXT_ROW, LANES)
        while n < rows:
            first = min(n, rows - LANES)
            for row in range(LANES):
                source, to = row_of(job, CODES, first + row), codes + count * row
                for block in range(count // numbers):
                    at = scales + scales_of_row * row + 4 * groups * (numbers // BLOCK) * block
                    written(source + size * block, to + numbers * block, at, at + LANES * scales_of_row)
            for step in range(-(-count // REGISTER)):
                at = min(step * REGISTER, count - REGISTER)
                target = opened + opened_size * (at // BLOCK) + REGISTER * (at % BLOCK // 4)
                write_codes(transpose_tile(load_tile(codes + at, count, LANES, 1, LANES)), target)
            for index in range(numbers_of_group):
                for step in range(scales_of_row // (4 * LANES)):
                    at = scales + LANES * scales_of_row * index + 4 * LANES * step
                    target = opened + opened_size * (LANES // groups) * step + OPENED_CODES + REGISTER * groups * index
                    write_scales(transpose_tile(load_tile(at, scales_of_row, LANES, 1, LANES)), target)
            addends = load_from(bias + 4 * first, F32, LANES) if bias else factors * F32(0) * F32(-1)
            y = field(job, Y) + 4 * first
            tiles(opened, count // BLOCK, field(job, X), y, 4 * rows, inputs, (factors, addends))
            n = take(job + 8 * NEXT_ROW, LANES)

    return block_rows


def _write_scales(size: int, groups: int) -> Any:
    """A writer (tile of numbers, of which vector j has group j of every row; address in an opened block)."""

    def emit(writer: VectorWriter, tile: Any, address: Any) -> Any:
        builder = writer.builder
        for j in range(LANES):
            numbers = builder.extract_value(tile, j)
            pointer = builder.add(address, ir.Constant(INT64, size * (j // groups) + REGISTER * (j % groups)))
            builder.store(numbers, builder.inttoptr(pointer, ir.PointerType(numbers.type)), align=1)
        return writer.context.get_dummy_value()

    return define(2, lambda _tile, _address: types.void, emit)


def quads_bytes(inputs: int, padded: int, groups: int = 1) -> int:
    return -(-inputs // QUAD) * _quad_block(groups) * (padded // BLOCK)


def opened_blocks_bytes(padded: int, has_minima: bool, groups: int) -> int:
    """Scratch of a thread that multiplies by GGUF's blocks, whose scales are opened for LANES groups at a time."""
    opened = _opened_block(has_minima, groups) * (padded // BLOCK + LANES)
    return opened + LANES * (padded + 4 * (1 + has_minima) * (groups * padded // BLOCK + LANES)) + 64


# ---- scales: of the blocks in a register, each on its own lanes; or of one block ------------------------------------


@inlined
def _float16_of_bytes(address, number):
    return repeat_each(float_of_half(load_from(address + 2 * (number // BLOCK), U16, BYTE_BLOCKS)), 8)


@inlined
def _float32_of_row(address, number):  # noqa: ARG001
    return repeat_each(load_from(address, F32, 1), BYTE_LANES)


@inlined
def _float32_of_128(address, number):
    return repeat_each(load_from(address + 4 * (number // 128), F32, 1), BYTE_LANES)


@inlined
def _one_float16(address, block):
    return first_lane(float_of_half(load_from(address + 2 * block, U16, 1)))


@inlined
def _one_bfloat16(address, block):
    return as_float(U32(read(address + 2 * block, U16)) << U32(16))


@inlined
def _one_e8m0(address, block):
    e = U32(read(address + block, U8))
    return as_float(max(U32(e << U32(23)), U32(0x400000)) | (U32(0x400000) if e > U32(254) else U32(0)))


@inlined
def _one_half_e8m0(address, block):
    e = U32(read(address + block, U8))
    return as_float(max(U32((max(e, U32(1)) - U32(1)) << U32(23)), U32(0x400000) if e else U32(0x200000)))


@inlined
def _one_uint8_of_128(address, block):
    return F32(read(address + block // 4, U8))


@inlined
def _one_of_row(address, block):  # noqa: ARG001
    return read(address, F32)


@inlined
def _one_of_128(address, block):
    return read(address + 4 * (block // 4), F32)


# ---- a function for each format -------------------------------------------------------------------------------------


INTEGERS, E2M1, BYTES, SIGNED = (OFFSETS[kind] for kind in ("integers", "e2m1", "bytes", "signed"))
_dot_integers, _dot_e2m1, _dot_bytes = dot_of("integers"), dot_of("e2m1"), dot_of("bytes")
_low, _high = _opener("integers", is_high=False), _opener("integers", is_high=True)
_low_e2m1, _high_e2m1 = _opener("e2m1", is_high=False), _opener("e2m1", is_high=True)
_opened_bytes = _opener("bytes", is_high=False)
_open_integers, _open_e2m1, _open_bytes = _write_opened("integers"), _write_opened("e2m1"), _write_opened("bytes")
_tiles_of_integers, _tiles_of_e2m1, _tiles_of_bytes = _all_tiles("integers"), _all_tiles("e2m1"), _all_tiles("bytes")


def _q4_0_gguf(job):
    nibble_rows(job, _low, _high, _dot_integers, float16_scales, INTEGERS, _as_they_lie)


def _q4_0_gguf_panels(job):
    panel_rows(job, _open_integers, _one_float16, 4, _tiles_of_integers)


def _int4_g32(job):
    nibble_rows(job, _low, _high, _dot_integers, bfloat16_scales, INTEGERS, _evens_first)


def _int4_g32_panels(job):
    panel_rows(job, _open_integers, _one_bfloat16, 4, _tiles_of_integers)


def _mxfp4(job):
    nibble_rows(job, _low_e2m1, _high_e2m1, _dot_e2m1, e8m0_scales, E2M1, _evens_first)


def _mxfp4_panels(job):
    panel_rows(job, _open_e2m1, _one_e8m0, 4, _tiles_of_e2m1)


def _mxfp4_gguf(job):
    nibble_rows(job, _low_e2m1, _high_e2m1, _dot_e2m1, half_e8m0_scales, E2M1, _as_they_lie)


def _mxfp4_gguf_panels(job):
    panel_rows(job, _open_e2m1, _one_half_e8m0, 4, _tiles_of_e2m1)


def _fp4_u8_g128(job):
    nibble_rows(job, _low_e2m1, _high_e2m1, _dot_e2m1, uint8_scales_of_128, E2M1, _evens_first)


def _fp4_u8_g128_panels(job):
    panel_rows(job, _open_e2m1, _one_uint8_of_128, 4, _tiles_of_e2m1)


def _q8_0_gguf(job):
    byte_rows(job, _opened_bytes, _dot_bytes, _float16_of_bytes, BYTES)


def _q8_0_gguf_panels(job):
    panel_rows(job, _open_bytes, _one_float16, 8, _tiles_of_bytes)


def _int8_row(job):
    byte_rows(job, _opened_bytes, _dot_bytes, _float32_of_row, BYTES)


def _int8_row_panels(job):
    panel_rows(job, _open_bytes, _one_of_row, 8, _tiles_of_bytes)


def _int8_g128(job):
    byte_rows(job, _opened_bytes, _dot_bytes, _float32_of_128, BYTES)


def _int8_g128_panels(job):
    panel_rows(job, _open_bytes, _one_of_128, 8, _tiles_of_bytes)


def _quads_in_halves(job):
    quads(job, INTEGERS, _as_they_lie, False, 1)


def _quads_in_pairs(job):
    quads(job, INTEGERS, _evens_first, False, 1)


def _quads_for_e2m1(job):
    quads(job, E2M1, _evens_first, False, 1)


def _quads_for_e2m1_in_halves(job):
    quads(job, E2M1, _as_they_lie, False, 1)


def _quads_for_bytes(job):
    quads(job, BYTES, _as_they_lie, False, 1)


def _quads_for_signed(job):
    quads(job, SIGNED, _as_they_lie, False, 1)


def _quads_for_signed_16(job):
    quads(job, SIGNED, _as_they_lie, False, 2)


def _quads_for_unsigned(job):
    quads(job, 0, _as_they_lie, True, 1)


def _quads_for_unsigned_16(job):
    quads(job, 0, _as_they_lie, True, 2)


_FUNCTIONS = {
    "q4_0_gguf": (_q4_0_gguf, _quads_in_halves, _q4_0_gguf_panels),
    "int4_g32": (_int4_g32, _quads_in_pairs, _int4_g32_panels),
    "mxfp4": (_mxfp4, _quads_for_e2m1, _mxfp4_panels),
    "mxfp4_gguf": (_mxfp4_gguf, _quads_for_e2m1_in_halves, _mxfp4_gguf_panels),
    "fp4_u8_g128": (_fp4_u8_g128, _quads_for_e2m1, _fp4_u8_g128_panels),
    "q8_0_gguf": (_q8_0_gguf, _quads_for_bytes, _q8_0_gguf_panels),
    "int8_row": (_int8_row, _quads_for_bytes, _int8_row_panels),
    "int8_g128": (_int8_g128, _quads_for_bytes, _int8_g128_panels),
}

_OF_BLOCKS = {
    ("bytes", 1): _quads_for_bytes,
    ("signed", 1): _quads_for_signed,
    ("signed", 2): _quads_for_signed_16,
    ("unsigned", 1): _quads_for_unsigned,
    ("unsigned", 2): _quads_for_unsigned_16,
}


@functools.cache
def few_inputs(format_name: str) -> Any:
    """The C function that rounds a few inputs and multiplies them by a format's weights."""
    return c_function(_FUNCTIONS[format_name][0])


@functools.cache
def many_inputs(format_name: str) -> tuple[Any, Any]:
    """The C functions that round many inputs, and that multiply them."""
    _, rounded, multiplied = _FUNCTIONS[format_name]
    return _rounding(rounded), c_function(multiplied)


def many_bytes(format_name: str, inputs: int, padded: int) -> tuple[int, int]:  # noqa: ARG001
    """Memory of rounded inputs, and of each thread that multiplies them; threads share no cache line."""
    return quads_bytes(inputs, padded), OPENED_BLOCK * (padded // BLOCK) + 64


def rounds_quads(kind: str, groups: int) -> Any:
    """The C function that rounds many inputs for GGUF's blocks, of so many groups in 32 numbers."""
    return _rounding(_OF_BLOCKS[kind, groups])


@functools.cache
def rounded_rows() -> Any:
    """The C function that rounds inputs for products of other kinds."""
    return c_function(_rounded_rows)


_rounding = functools.cache(c_function)
