"""Loops of the CPU's fused products: weights are decoded in registers, times x, summed in float32.

A job is an array of int64 (`JOB` names its fields). Every thread that runs it arranges the inputs for itself, then
takes a few rows of the weight at a time until none are left. A tile is 4 rows of the weight times one input, or 2 times
4.

**4-bit codes.** A register is loaded as 32-bit lanes, 8 codes in each. A shift gives number j of every lane, so inputs
are arranged to match: all first numbers of the lanes, then all second numbers. Blocks have lanes of their own, so one
multiplication scales the sums of a whole register's codes. With AVX-512 the 16 numbers of a format lie in one register,
and a code is looked up in it by its low four bits: no masks, no conversion. Elsewhere bytes become small integers,
twice the number for E2M1, and those are converted (`codes`).

**8-bit codes** are widened and converted, 4 to 16 at a time.

If a row is not whole registers, its last register begins earlier: it repeats codes that were used before, and their
inputs are zero this time. So a row must be at least one register long.

**Many inputs.** Parts of the weight are decoded into a buffer in the cache, and multiplied from there.

    y[m, n] = sum_k x[m, k] w[n, k]

Inputs are transposed first, into panels: a panel holds numbers k = 0, 1, ... of up to VECTORS * LANES inputs, side by
side. A tile of sums (rows of the weight times vectors of inputs) stays in registers while k goes through BLOCK numbers:
each step loads the vectors of inputs, and one weight of each row, repeated on all lanes. So decoded weights are not
transposed, and no lanes are summed.

A thread takes a piece of rows. For each BLOCK of k it decodes GROUP rows at a time and multiplies them by all panels,
whose numbers of this BLOCK stay in the second-level cache. Between blocks the sums lie in scratch, row by row of the
weight; they are written to y at the end of the piece. Threads meet twice in a product, whatever its size.

**Decoding.** 4-bit codes are decoded in two ways. With AVX-512 a code is looked up in a register that holds the
format's 16 numbers. Any other CPU turns all nibbles of a register into small integers at once, then every fourth byte
into floats; E2M1's numbers are doubled for that (0 1 2 3 4 6 8 12; with AVX2 looked up as bytes), and the product is
halved (`cpu_fused` sets the factor).
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba.core import cgutils

from bitplan.base.hardware import cpu_features, float_lanes
from bitplan.base.loops.addresses import (
    byte_table,
    call_c,
    every_eighth,
    every_fourth_of_halves,
    float_of_half,
    load_from,
    load_tile,
    look_up_16,
    multiply_in,
    prefetch_later,
    prefetch_soon,
    read,
    repeat_each,
    repeated,
    scale_in,
    store_tile,
    sum_of_lanes,
    take,
    write,
    zero_tile,
)
from bitplan.base.loops.jit import inlined, merged
from bitplan.base.loops.openmp_threads import c_function
from bitplan.base.loops.vectors import VectorWriter, define, greater, maximum, to_float, view, widen

F32, U32, I64 = np.float32, np.uint32, np.int64
LANES = float_lanes()
REGISTER = 4 * LANES  # bytes
STEP = 2 * REGISTER  # 4-bit codes in a register
JOB = (
    "x",  # float32 [inputs, width], contiguous
    "inputs",
    "width",  # numbers in a row of the weight, without padding
    "codes",
    "codes_stride",  # bytes from row to row
    "scales",
    "scales_stride",
    "y",  # float32 [inputs, rows], contiguous
    "rows",
    "bias",  # float32 [rows], or 0
    "scratch",
    "scratch_stride",  # bytes for each thread
    "table",  # 16 float32
    "factor",  # address of a float32 that multiplies all results
    "piece",  # rows taken at a time
    "next_row",
    "next_thread",
    "first",  # where decoding begins in a row, in units: registers of 4-bit codes, or LANES 8-bit numbers
    "count",  # number of units; in `panels`, of numbers in a row
    "y_stride",  # bytes from a decoded row to the next
    "decoder",  # address of the C function that decodes
    "unit",  # numbers in a unit
    "by_token",  # of integer products: whether a whole row of x has one scale
)
X, INPUTS, WIDTH, CODES, CODES_STRIDE, SCALES, SCALES_STRIDE, Y, ROWS, BIAS, SCRATCH, SCRATCH_STRIDE = range(12)
TABLE, FACTOR, PIECE, NEXT_ROW, NEXT_THREAD, FIRST, COUNT, Y_STRIDE, DECODER, UNIT, BY_TOKEN = range(12, len(JOB))


@inlined
def field(job, index):
    return read(job + 8 * index, I64)


# ---- inputs, arranged -----------------------------------------------------------------------------------------------


@inlined
def _copy_with_zeros(x, width, first, start, to, count):
    """Copy numbers first .. first + count of x; zeros outside start .. width."""
    for i in range(count):
        k = first + i
        write(to + 4 * i, read(x + 4 * k, F32) if start <= k < width else F32(0))


@inlined
def arrange_nibbles(x, width, padded, buffer, arranged, halves, without_gaps):
    """`without_gaps` leaves out lanes of the last register that repeat codes, as `_decode_nibbles` does: it is
    written first, and its vectors from the last on, for each begins with lanes that are written over."""
    steps = -(-padded // STEP)
    for turn in range(steps):
        step = steps - 1 - turn
        start = step * STEP
        first = min(start, padded - STEP)
        is_whole = first == start and start + STEP <= width
        source = x + 4 * first
        if not is_whole:
            _copy_with_zeros(x, width, first, start, buffer, STEP)
            source = buffer
        numbers, gap = load_from(source, F32, STEP), (start - first) // 8 if without_gaps else 0
        to, step_bytes = arranged + 4 * (start - gap), REGISTER - 4 * gap
        if halves:
            write(to + 7 * step_bytes, every_fourth_of_halves(numbers, 7))
            write(to + 6 * step_bytes, every_fourth_of_halves(numbers, 6))
            write(to + 5 * step_bytes, every_fourth_of_halves(numbers, 5))
            write(to + 4 * step_bytes, every_fourth_of_halves(numbers, 4))
            write(to + 3 * step_bytes, every_fourth_of_halves(numbers, 3))
            write(to + 2 * step_bytes, every_fourth_of_halves(numbers, 2))
            write(to + step_bytes, every_fourth_of_halves(numbers, 1))
            write(to, every_fourth_of_halves(numbers, 0))
        else:
            write(to + 7 * step_bytes, every_eighth(numbers, 7))
            write(to + 6 * step_bytes, every_eighth(numbers, 6))
            write(to + 5 * step_bytes, every_eighth(numbers, 5))
            write(to + 4 * step_bytes, every_eighth(numbers, 4))
            write(to + 3 * step_bytes, every_eighth(numbers, 3))
            write(to + 2 * step_bytes, every_eighth(numbers, 2))
            write(to + step_bytes, every_eighth(numbers, 1))
            write(to, every_eighth(numbers, 0))


@inlined
def arrange_bytes(x, width, padded, mine):
    for chunk in range(-(-padded // LANES)):
        start = chunk * LANES
        first, to = min(start, padded - LANES), mine + 4 * start
        if first == start and start + LANES <= width:
            write(to, load_from(x + 4 * first, F32, LANES))
        else:
            _copy_with_zeros(x, width, first, start, to, LANES)


# ---- 4-bit codes ----------------------------------------------------------------------------------------------------


@inlined
def _four(number, table, codes, byte):
    return (
        number(table, codes[0], byte),
        number(table, codes[1], byte),
        number(table, codes[2], byte),
        number(table, codes[3], byte),
    )


@inlined
def _two(number, table, codes, byte):
    return number(table, codes[0], byte), number(table, codes[1], byte)


@inlined
def _one_input(x):
    return (load_from(x, F32, LANES),)


@inlined
def _four_inputs(x, stride):
    return (
        load_from(x, F32, LANES),
        load_from(x + stride, F32, LANES),
        load_from(x + 2 * stride, F32, LANES),
        load_from(x + 3 * stride, F32, LANES),
    )


@inlined
def _prefetch_four(codes, at):
    """Ask for the next four rows: a row is too short for the CPU to foresee them, and 4-bit codes are soon used up."""
    prefetch_later(codes[0] + at)
    prefetch_later(codes[1] + at)
    prefetch_later(codes[2] + at)
    prefetch_later(codes[3] + at)


@inlined
def _nibbles_4x1(opened, low, high, scales, table, codes, scales_at, x, row_bytes, per_scale):
    sums = zero_tile(4, LANES)
    for step in range(-(-row_bytes // REGISTER)):
        at = min(step * REGISTER, row_bytes - REGISTER)
        group, at_x = at // per_scale, x + 4 * STEP * step
        c = (
            opened(load_from(codes[0] + at, U32, LANES)),
            opened(load_from(codes[1] + at, U32, LANES)),
            opened(load_from(codes[2] + at, U32, LANES)),
            opened(load_from(codes[3] + at, U32, LANES)),
        )
        _prefetch_four(codes, at + 4 * row_bytes)
        parts = multiply_in(zero_tile(4, LANES), _four(low, table, c, 0), _one_input(at_x))
        parts = multiply_in(parts, _four(high, table, c, 0), _one_input(at_x + REGISTER))
        parts = multiply_in(parts, _four(low, table, c, 1), _one_input(at_x + 2 * REGISTER))
        parts = multiply_in(parts, _four(high, table, c, 1), _one_input(at_x + 3 * REGISTER))
        parts = multiply_in(parts, _four(low, table, c, 2), _one_input(at_x + 4 * REGISTER))
        parts = multiply_in(parts, _four(high, table, c, 2), _one_input(at_x + 5 * REGISTER))
        parts = multiply_in(parts, _four(low, table, c, 3), _one_input(at_x + 6 * REGISTER))
        parts = multiply_in(parts, _four(high, table, c, 3), _one_input(at_x + 7 * REGISTER))
        of_rows = (
            scales(scales_at[0], group),
            scales(scales_at[1], group),
            scales(scales_at[2], group),
            scales(scales_at[3], group),
        )
        sums = scale_in(sums, of_rows, parts)
    return sums


@inlined
def _nibbles_2x4(opened, low, high, scales, table, codes, scales_at, x, stride, row_bytes, per_scale):
    sums = zero_tile(8, LANES)
    for step in range(-(-row_bytes // REGISTER)):
        at = min(step * REGISTER, row_bytes - REGISTER)
        group, at_x = at // per_scale, x + 4 * STEP * step
        c = (opened(load_from(codes[0] + at, U32, LANES)), opened(load_from(codes[1] + at, U32, LANES)))
        prefetch_later(codes[0] + at + 2 * row_bytes)
        prefetch_later(codes[1] + at + 2 * row_bytes)
        parts = multiply_in(zero_tile(8, LANES), _two(low, table, c, 0), _four_inputs(at_x, stride))
        parts = multiply_in(parts, _two(high, table, c, 0), _four_inputs(at_x + REGISTER, stride))
        parts = multiply_in(parts, _two(low, table, c, 1), _four_inputs(at_x + 2 * REGISTER, stride))
        parts = multiply_in(parts, _two(high, table, c, 1), _four_inputs(at_x + 3 * REGISTER, stride))
        parts = multiply_in(parts, _two(low, table, c, 2), _four_inputs(at_x + 4 * REGISTER, stride))
        parts = multiply_in(parts, _two(high, table, c, 2), _four_inputs(at_x + 5 * REGISTER, stride))
        parts = multiply_in(parts, _two(low, table, c, 3), _four_inputs(at_x + 6 * REGISTER, stride))
        parts = multiply_in(parts, _two(high, table, c, 3), _four_inputs(at_x + 7 * REGISTER, stride))
        sums = scale_in(sums, (scales(scales_at[0], group), scales(scales_at[1], group)), parts)
    return sums


@merged
def nibble_products(job, opened, low, high, scales, per_scale, halves):
    """The job of a 4-bit format.

    opened, low, high   `opened` prepares a register's codes; `low` and `high` make numbers of nibbles of byte 0 to 3
    scales              (address, block) -> the scales of all lanes
    per_scale           bytes of codes that share a scale
    """
    inputs, padded, rows = field(job, INPUTS), 2 * field(job, CODES_STRIDE), field(job, ROWS)
    thread = take(job + 8 * NEXT_THREAD, 1)
    mine = field(job, SCRATCH) + thread * field(job, SCRATCH_STRIDE)
    stride = 4 * STEP * (-(-padded // STEP))
    tiled = inputs if inputs == 1 else 4 * (-(-inputs // 4))
    for row in range(tiled):
        width = field(job, WIDTH) if row < inputs else 0
        arrange_nibbles(
            field(job, X) + 4 * row * width, width, padded, mine, mine + 4 * STEP + row * stride, halves, False
        )
    x, table = mine + 4 * STEP, load_from(field(job, TABLE), F32, 16)
    row_bytes, piece = field(job, CODES_STRIDE), field(job, PIECE)
    first = take(job + 8 * NEXT_ROW, piece)
    while first < rows:
        stop = min(first + piece, rows)
        if inputs == 1:
            for n in range(first, stop, 4):
                codes, at = four_rows(job, CODES, n), four_rows(job, SCALES, n)
                sums = _nibbles_4x1(opened, low, high, scales, table, codes, at, x, row_bytes, per_scale)
                write_4x1(job, n, 0, sums)
        else:
            for n in range(first, stop, 2):
                codes2, at2 = two_rows(job, CODES, n), two_rows(job, SCALES, n)
                for m in range(0, inputs, 4):
                    at_x = x + m * stride
                    sums8 = _nibbles_2x4(
                        opened, low, high, scales, table, codes2, at2, at_x, stride, row_bytes, per_scale
                    )
                    write_2x4(job, n, m, sums8)
        first = take(job + 8 * NEXT_ROW, piece)


@inlined
def _decode_nibbles(opened, low, high, scales, table, codes, scales_at, row_bytes, per_scale, first, count, to):
    """Registers first .. first + count of a row -> STEP numbers each; of the row's last one, those that are new.
    They are written in `arrange_nibbles`' turn, with up to a register of other bytes before `to`."""
    for turn in range(count):
        step = count - 1 - turn
        start = (first + step) * REGISTER
        at = min(start, row_bytes - REGISTER)
        c, s = opened(load_from(codes + at, U32, LANES)), scales(scales_at, at // per_scale)
        target, step_bytes = to + 4 * STEP * step - (start - at), REGISTER - (start - at)
        write(target + 7 * step_bytes, high(table, c, 3) * s)
        write(target + 6 * step_bytes, low(table, c, 3) * s)
        write(target + 5 * step_bytes, high(table, c, 2) * s)
        write(target + 4 * step_bytes, low(table, c, 2) * s)
        write(target + 3 * step_bytes, high(table, c, 1) * s)
        write(target + 2 * step_bytes, low(table, c, 1) * s)
        write(target + step_bytes, high(table, c, 0) * s)
        write(target, low(table, c, 0) * s)


# ---- 8-bit codes ----------------------------------------------------------------------------------------------------


@inlined
def _bytes_4x1(number, scale, codes, scales_at, x, width, block):
    sums, last = zero_tile(4, LANES), width - LANES
    for group in range(width // block if block else 1):
        parts = zero_tile(4, LANES)
        for chunk in range(block // LANES if block else -(-width // LANES)):
            start = group * block + chunk * LANES
            at = min(start, last)
            numbers = (number(codes[0] + at), number(codes[1] + at), number(codes[2] + at), number(codes[3] + at))
            prefetch_later(codes[0] + (4 + start // LANES % 4) * width + at)  # of the next four rows, in turn
            parts = multiply_in(parts, numbers, _one_input(x + 4 * start))
        of_rows = (
            scale(scales_at[0], group),
            scale(scales_at[1], group),
            scale(scales_at[2], group),
            scale(scales_at[3], group),
        )
        sums = scale_in(sums, of_rows, parts)
    return sums


@inlined
def _bytes_2x4(number, scale, codes, scales_at, x, stride, width, block):
    sums, last = zero_tile(8, LANES), width - LANES
    for group in range(width // block if block else 1):
        parts = zero_tile(8, LANES)
        for chunk in range(block // LANES if block else -(-width // LANES)):
            start = group * block + chunk * LANES
            at = min(start, last)
            parts = multiply_in(
                parts, (number(codes[0] + at), number(codes[1] + at)), _four_inputs(x + 4 * start, stride)
            )
        sums = scale_in(sums, (scale(scales_at[0], group), scale(scales_at[1], group)), parts)
    return sums


@merged
def byte_products(job, number, scale, block):
    """The job of an 8-bit format.

    number   address -> LANES numbers
    scale    (address, block) -> a block's scale, on all lanes
    block    numbers that share a scale; 0: a row
    """
    inputs, padded, rows = field(job, INPUTS), field(job, CODES_STRIDE), field(job, ROWS)
    thread = take(job + 8 * NEXT_THREAD, 1)
    x = field(job, SCRATCH) + thread * field(job, SCRATCH_STRIDE)
    stride = 4 * LANES * (-(-padded // LANES))
    tiled = inputs if inputs == 1 else 4 * (-(-inputs // 4))
    for row in range(tiled):
        width = field(job, WIDTH) if row < inputs else 0
        arrange_bytes(field(job, X) + 4 * row * width, width, padded, x + row * stride)
    piece = field(job, PIECE)
    first = take(job + 8 * NEXT_ROW, piece)
    while first < rows:
        stop = min(first + piece, rows)
        if inputs == 1:
            for n in range(first, stop, 4):
                codes, at = four_rows(job, CODES, n), four_rows(job, SCALES, n)
                write_4x1(job, n, 0, _bytes_4x1(number, scale, codes, at, x, padded, block))
        else:
            for n in range(first, stop, 2):
                codes2, at2 = two_rows(job, CODES, n), two_rows(job, SCALES, n)
                for m in range(0, inputs, 4):
                    sums8 = _bytes_2x4(number, scale, codes2, at2, x + m * stride, stride, padded, block)
                    write_2x4(job, n, m, sums8)
        first = take(job + 8 * NEXT_ROW, piece)


@inlined
def _decode_bytes(number, scale, codes, scales_at, width, block, first, count, to):
    """Chunks of LANES numbers, first .. first + count, of a row; `first` begins a block."""
    if block:
        for group in range(first * LANES // block, (first + count) * LANES // block):
            of_block, start = scale(scales_at, group), group * block
            for chunk in range(block // LANES):
                at = start + chunk * LANES
                write(to + 4 * (at - first * LANES), number(codes + at) * of_block)
    else:
        of_row = scale(scales_at, 0)
        for chunk in range(count):
            at = min((first + chunk) * LANES, width - LANES)
            write(to + 4 * LANES * chunk, number(codes + at) * of_row)


# ---- many inputs: decoded rows for `panels` --------------------------------------------------------------------------


@merged
def decoded_nibbles(job, opened, low, high, scales, per_scale):
    """Decode registers first .. first + count of every row of 4-bit codes into `y`."""
    rows, piece, first, count = field(job, ROWS), field(job, PIECE), field(job, FIRST), field(job, COUNT)
    table, width = load_from(field(job, TABLE), F32, 16), field(job, CODES_STRIDE)
    row = take(job + 8 * NEXT_ROW, piece)
    while row < rows:
        for n in range(row, min(row + piece, rows)):
            codes, at, to = row_of(job, CODES, n), row_of(job, SCALES, n), field(job, Y) + n * field(job, Y_STRIDE)
            _decode_nibbles(opened, low, high, scales, table, codes, at, width, per_scale, first, count, to)
        row = take(job + 8 * NEXT_ROW, piece)


@merged
def decoded_bytes(job, number, scale, block):
    """Decode chunks first .. first + count of every row of 8-bit codes into `y`."""
    rows, piece, first, count = field(job, ROWS), field(job, PIECE), field(job, FIRST), field(job, COUNT)
    row = take(job + 8 * NEXT_ROW, piece)
    while row < rows:
        for n in range(row, min(row + piece, rows)):
            codes, at, to = row_of(job, CODES, n), row_of(job, SCALES, n), field(job, Y) + n * field(job, Y_STRIDE)
            _decode_bytes(number, scale, codes, at, field(job, CODES_STRIDE), block, first, count, to)
        row = take(job + 8 * NEXT_ROW, piece)


# ---- rows and results -----------------------------------------------------------------------------------------------


@inlined
def row_of(job, part, n):
    """The address of a row's codes or scales; for a row past the end, those of the last row."""
    return field(job, part) + min(n, field(job, ROWS) - 1) * field(job, part + 1)


@inlined
def four_rows(job, part, n):
    return row_of(job, part, n), row_of(job, part, n + 1), row_of(job, part, n + 2), row_of(job, part, n + 3)


@inlined
def two_rows(job, part, n):
    return row_of(job, part, n), row_of(job, part, n + 1)


@inlined
def _write(job, n, m, total):
    rows = field(job, ROWS)
    if n < rows and m < field(job, INPUTS):
        bias = field(job, BIAS)
        result = total * read(field(job, FACTOR), F32)
        write(field(job, Y) + 4 * (m * rows + n), result + read(bias + 4 * n, F32) if bias else result)


@inlined
def write_4x1(job, n, m, sums):
    _write(job, n, m, sum_of_lanes(sums[0]))
    _write(job, n + 1, m, sum_of_lanes(sums[1]))
    _write(job, n + 2, m, sum_of_lanes(sums[2]))
    _write(job, n + 3, m, sum_of_lanes(sums[3]))


@inlined
def write_2x4(job, n, m, sums):
    _write(job, n, m, sum_of_lanes(sums[0]))
    _write(job, n, m + 1, sum_of_lanes(sums[1]))
    _write(job, n, m + 2, sum_of_lanes(sums[2]))
    _write(job, n, m + 3, sum_of_lanes(sums[3]))
    _write(job, n + 1, m, sum_of_lanes(sums[4]))
    _write(job, n + 1, m + 1, sum_of_lanes(sums[5]))
    _write(job, n + 1, m + 2, sum_of_lanes(sums[6]))
    _write(job, n + 1, m + 3, sum_of_lanes(sums[7]))


# ---- cpu transposed --------------------------------------------------------------------------------------------------


def _transpose(writer: VectorWriter, tile: Any) -> Any:
    """Lanes and vectors whose numbers differ in one bit change places, bit after bit."""
    lanes = writer.kinds[0].count
    vectors = [writer.builder.extract_value(tile, index) for index in range(lanes)]
    bit = 1
    while bit < lanes:
        low = [lane if not lane & bit else lanes + (lane ^ bit) for lane in range(lanes)]
        high = [lane | bit if not lane & bit else lanes + lane for lane in range(lanes)]
        for index in range(lanes):
            if not index & bit:
                a, b = vectors[index], vectors[index | bit]
                vectors[index], vectors[index | bit] = writer.shuffle(a, b, low), writer.shuffle(a, b, high)
        bit *= 2
    return cgutils.pack_array(writer.builder, vectors)


def _times_plus(writer: VectorWriter, tile: Any, factor: Any, addend: Any) -> Any:
    builder, count = writer.builder, writer.kinds[0].count
    vectors = [builder.extract_value(tile, index) for index in range(count)]
    return cgutils.pack_array(builder, [builder.fadd(builder.fmul(vector, factor), addend) for vector in vectors])


# Tuples of float32 vectors: lane i of vector j is lane j of vector i before; each vector times one plus another.
transpose_tile = define(1, lambda tile: tile, _transpose)
times_plus = define(3, lambda tile, _factor, _addend: tile, _times_plus)


# ---- cpu panels ------------------------------------------------------------------------------------------------------


VECTORS = 2  # of inputs in a panel
TILE_ROWS = 6 if LANES == 8 else 12  # AVX2 has 16 registers, AVX-512 and Arm have 32
BLOCK = 512  # numbers of a row that are decoded at a time
GROUP = 24  # rows that are decoded at a time
ROW_BYTES = 4 * BLOCK + 64  # of a decoded row: other rows lie in other sets of the first-level cache
LINE, AHEAD = 64, 2048  # bytes of a cache line; how far ahead of the loop inputs are asked for
JOB_BYTES = (-(-8 * len(JOB) // LINE) + 1) * LINE  # and a line before decoded rows
BUFFER_BYTES = ROW_BYTES * GROUP
PIECES_PER_THREAD, MOST_GROUPS = 4, 4


# ---- sizes ----------------------------------------------------------------------------------------------------------


def piece_rows(rows: int, threads: int) -> int:
    """Rows that a thread takes at a time: whole groups, few enough that all threads end together."""
    return min(max(rows // (threads * PIECES_PER_THREAD) // GROUP, 1), MOST_GROUPS) * GROUP


def arranging_bytes(count: int) -> int:
    """Scratch of a thread that makes panels of rows of `count` numbers; threads share no cache line."""
    return 4 * STEP + LANES * (4 * count + LINE) + LINE


def product_bytes(piece: int, inputs: int) -> int:
    """Scratch of a thread that multiplies."""
    return JOB_BYTES + BUFFER_BYTES + piece * 4 * LANES * (-(-inputs // LANES) + 1) + LINE


def numbers_in_panels(inputs: int, count: int) -> int:
    return -(-inputs // LANES) * LANES * count


# ---- inputs -> panels -----------------------------------------------------------------------------------------------


@inlined
def _panel(job, first):
    """(address of the panel of input `first`, inputs in the panel)"""
    count = field(job, COUNT)
    panel = first // (VECTORS * LANES)
    wide = -(-field(job, INPUTS) // LANES) - panel * VECTORS
    return field(job, Y) + 4 * panel * VECTORS * LANES * count, min(wide, VECTORS) * LANES


@merged
def _panels(job, arrange):
    """Write x to `y` as panels, LANES inputs at a time, each arranged as decoded rows are."""
    inputs, width, count = field(job, INPUTS), field(job, WIDTH), field(job, COUNT)
    mine = field(job, SCRATCH) + take(job + 8 * NEXT_THREAD, 1) * field(job, SCRATCH_STRIDE)
    rows, stride = mine + 4 * STEP, 4 * count + LINE
    first = take(job + 8 * NEXT_ROW, LANES)
    while first < inputs:
        for row in range(LANES):
            length = width if first + row < inputs else 0
            arrange(job, field(job, X) + 4 * (first + row) * length, length, mine, rows + row * stride)
        panel, wide = _panel(job, first)
        to = panel + 4 * (first % (VECTORS * LANES))
        for k in range(0, count, LANES):
            tile = transpose_tile(load_tile(rows + 4 * k, stride, LANES, 1, LANES))
            store_tile(to + 4 * k * wide, 4 * wide, tile, 1)
        first = take(job + 8 * NEXT_ROW, LANES)


@inlined
def _in_pairs(job, x, width, buffer, to):
    arrange_nibbles(x, width, 2 * field(job, CODES_STRIDE), buffer, to, False, True)


@inlined
def _in_halves(job, x, width, buffer, to):
    arrange_nibbles(x, width, 2 * field(job, CODES_STRIDE), buffer, to, True, True)


@inlined
def _as_bytes(job, x, width, buffer, to):  # noqa: ARG001
    arrange_bytes(x, width, field(job, CODES_STRIDE), to)


@inlined
def _as_they_come(job, x, width, buffer, to):  # noqa: ARG001
    arrange_bytes(x, width, field(job, COUNT), to)


def _panels_in_pairs(job):
    _panels(job, _in_pairs)


def _panels_in_halves(job):
    _panels(job, _in_halves)


def _panels_of_bytes(job):
    _panels(job, _as_bytes)


def _panels_of_blocks(job):
    _panels(job, _as_they_come)


# ---- products -------------------------------------------------------------------------------------------------------


def _tile(rows: int, vectors: int) -> Any:
    """The loop for a tile of this size: sizes must be literals for the compiler."""
    cells = rows * vectors

    @inlined
    def tile(w, x, steps, sums, stride, is_first):
        added = zero_tile(cells, LANES) if is_first else load_tile(sums, stride, rows, vectors, LANES)
        for k in range(0, steps, 4):
            at, on = w + 4 * k, x + 4 * k * vectors * LANES
            for line in range(4 * 4 * vectors * LANES // LINE):
                prefetch_soon(on + AHEAD + LINE * line)
            added = multiply_in(added, repeated(at, ROW_BYTES, rows, LANES), load_tile(on, 0, 1, vectors, LANES))
            on += 4 * vectors * LANES
            added = multiply_in(added, repeated(at + 4, ROW_BYTES, rows, LANES), load_tile(on, 0, 1, vectors, LANES))
            on += 4 * vectors * LANES
            added = multiply_in(added, repeated(at + 8, ROW_BYTES, rows, LANES), load_tile(on, 0, 1, vectors, LANES))
            on += 4 * vectors * LANES
            added = multiply_in(added, repeated(at + 12, ROW_BYTES, rows, LANES), load_tile(on, 0, 1, vectors, LANES))
        store_tile(sums, stride, added, vectors)

    return tile


_tile_of_two, _tile_of_one = _tile(TILE_ROWS, 2), _tile(12, 1)


@inlined
def _group(vectors, w, x, steps, sums, stride, is_first):
    """All rows of a group times one panel."""
    if vectors == 2:
        for row in range(0, GROUP, TILE_ROWS):
            _tile_of_two(w + ROW_BYTES * row, x, steps, sums + row * stride, stride, is_first)
    else:
        for row in range(0, GROUP, 12):
            _tile_of_one(w + ROW_BYTES * row, x, steps, sums + row * stride, stride, is_first)


@inlined
def _prefetch_next(job, row, rows, k):
    """Ask for the codes that these rows need next: a part of a row is too short for the CPU to foresee the next."""
    stride, count = field(job, CODES_STRIDE), field(job, COUNT)
    start, stop = k * stride // count, min((k + BLOCK) * stride // count, stride)
    for n in range(row, row + rows):
        for at in range(start, stop, LINE):
            prefetch_later(field(job, CODES) + n * stride + at)


@inlined
def _write_piece(job, first, stop, sums, stride):
    """Sums of rows first .. stop, times the factor and with the bias, to y: squares, then what is left."""
    factor, bias, inputs, rows = field(job, FACTOR), field(job, BIAS), field(job, INPUTS), field(job, ROWS)
    whole_rows, whole_inputs = (stop - first) // LANES * LANES, inputs // LANES * LANES
    factors = repeat_each(load_from(factor, F32, 1), LANES)
    for n in range(0, whole_rows, LANES):
        # Adding -0.0 changes no number.
        addends = load_from(bias + 4 * (first + n), F32, LANES) if bias else zero_tile(1, LANES)[0] * F32(-1)
        for m in range(0, whole_inputs, LANES):
            tile = transpose_tile(load_tile(sums + n * stride + 4 * m, stride, LANES, 1, LANES))
            to = field(job, Y) + 4 * (m * rows + first + n)
            store_tile(to, 4 * rows, times_plus(tile, factors, addends), 1)
    for m in range(inputs):
        to, at = field(job, Y) + 4 * (m * rows + first), sums + 4 * m
        for n in range(whole_rows if m < whole_inputs else 0, stop - first):
            result = read(at + n * stride, F32) * read(factor, F32)
            write(to + 4 * n, result + read(bias + 4 * (first + n), F32) if bias else result)


def _products(job):
    """x: panels; each thread has a copy of the job for the decoder."""
    inputs, rows, count, unit = field(job, INPUTS), field(job, ROWS), field(job, COUNT), field(job, UNIT)
    piece, panels = field(job, PIECE), field(job, X)
    mine = field(job, SCRATCH) + take(job + 8 * NEXT_THREAD, 1) * field(job, SCRATCH_STRIDE)
    buffer, all_sums = mine + JOB_BYTES, mine + JOB_BYTES + BUFFER_BYTES
    for index in range(len(JOB)):
        write(mine + 8 * index, field(job, index))
    write(mine + 8 * Y, buffer)
    write(mine + 8 * Y_STRIDE, I64(ROW_BYTES))
    write(mine + 8 * PIECE, I64(GROUP))
    vectors = -(-inputs // LANES)
    stride = 4 * LANES * (vectors + 1)  # not a power of two, so that columns of sums use all sets of a cache
    first = take(job + 8 * NEXT_ROW, piece)
    while first < rows:
        stop = min(first + piece, rows)
        for k in range(0, count, BLOCK):
            steps = min(BLOCK, count - k)
            write(mine + 8 * FIRST, k // unit)
            write(mine + 8 * COUNT, -(-steps // unit))
            for row in range(first, stop, GROUP):
                write(mine + 8 * CODES, field(job, CODES) + row * field(job, CODES_STRIDE))
                write(mine + 8 * SCALES, field(job, SCALES) + row * field(job, SCALES_STRIDE))
                write(mine + 8 * ROWS, min(GROUP, stop - row))
                write(mine + 8 * NEXT_ROW, I64(0))
                call_c(field(job, DECODER), mine)
                _prefetch_next(job, row, min(GROUP, stop - row), k + BLOCK)
                sums = all_sums + (row - first) * stride
                for vector in range(0, vectors, VECTORS):
                    wide = min(VECTORS, vectors - vector)
                    x = panels + 4 * LANES * (vector * count + wide * k)
                    _group(wide, buffer, x, steps, sums + 4 * LANES * vector, stride, k == 0)
        _write_piece(job, first, stop, all_sums, stride)
        first = take(job + 8 * NEXT_ROW, piece)


_ARRANGED = {
    "pairs": _panels_in_pairs,
    "halves": _panels_in_halves,
    "bytes": _panels_of_bytes,
    "blocks": _panels_of_blocks,
}


@functools.cache
def panels_of(order: str) -> Any:
    """The C function that makes panels of inputs: "pairs" or "halves" for 4-bit codes, "bytes" for those of 8 bits,
    "blocks" for numbers in their own order.
    """
    return c_function(_ARRANGED[order])


@functools.cache
def panel_products() -> Any:
    """The C function that multiplies by panels, with any format's decoder."""
    return c_function(_products)


# ---- cpu codes -------------------------------------------------------------------------------------------------------


U8, U16, I8, I32 = np.uint8, np.uint16, np.int8, np.int32
LOOKS_UP = "avx512f" in cpu_features()
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
def _open_signed(codes):
    nibbles = view(codes, U8)
    return view(((nibbles & 15) ^ 8) - 8, I32), view(((nibbles >> 4) ^ 8) - 8, I32)


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
_doubled_e2m1 = byte_table((*_DOUBLED, *(-number for number in _DOUBLED))) if LANES == 8 else _computed_e2m1


@inlined
def _low_by_integer(table, opened, byte):  # noqa: ARG001
    return to_float((opened[0] << (24 - 8 * byte)) >> 24, F32)


@inlined
def _high_by_integer(table, opened, byte):  # noqa: ARG001
    return to_float((opened[1] << (24 - 8 * byte)) >> 24, F32)


integers_opened = _as_they_are if LOOKS_UP else _open_integers
_signed_opened = _as_they_are if LOOKS_UP else _open_signed
e2m1_opened = _as_they_are if LOOKS_UP else _open_e2m1
low = _low_by_table if LOOKS_UP else _low_by_integer
high = _high_by_table if LOOKS_UP else _high_by_integer


# ---- scales: of the blocks in a register, each on its own lanes; or of one block, on all lanes ----------------------


@inlined
def bfloat16_scales(address, block):
    return repeat_each(view(widen(load_from(address + 2 * block, U16, QUARTER_LANES), U32) << 16, F32), 4)


@inlined
def float16_scales(address, block):
    return repeat_each(float_of_half(load_from(address + 2 * block, U16, QUARTER_LANES)), 4)


@inlined
def _float32_scales(address, block):
    return repeat_each(load_from(address + 4 * block, F32, QUARTER_LANES), 4)


@inlined
def e8m0_scales(address, block):
    """2^(e - 127): e is a float32's exponent, except for 2^-127, which is subnormal, and byte 255, which is NaN."""
    e = widen(load_from(address + block, U8, QUARTER_LANES), U32)
    return repeat_each(view(maximum(e << 23, 0x400000) | (greater(e, 254) & 0x400000), F32), 4)


@inlined
def half_e8m0_scales(address, block):
    """2^(e - 128), for codes that are doubled: 2^(e - 127) of byte 255, which is a number to ggml, is no float32."""
    e = widen(load_from(address + block, U8, QUARTER_LANES), U32)
    least = (greater(e, 0) & 0x200000) + 0x200000  # 2^-128 and 2^-127, which are subnormal
    return repeat_each(view(maximum((maximum(e, 1) - 1) << 23, least), F32), 4)


@inlined
def uint8_scales_of_128(address, block):
    return repeat_each(to_float(widen(load_from(address + block // 4, U8, 1), I32), F32), LANES)


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
    nibble_products(job, integers_opened, low, high, bfloat16_scales, 16, False)


def _int4_g32_decoded(job):
    decoded_nibbles(job, integers_opened, low, high, bfloat16_scales, 16)


def _q4_0_poly(job):
    nibble_products(job, _signed_opened, low, high, _float32_scales, 16, False)


def _q4_0_poly_decoded(job):
    decoded_nibbles(job, _signed_opened, low, high, _float32_scales, 16)


def _q4_0_gguf(job):
    nibble_products(job, integers_opened, low, high, float16_scales, 16, True)


def _q4_0_gguf_decoded(job):
    decoded_nibbles(job, integers_opened, low, high, float16_scales, 16)


def _mxfp4(job):
    nibble_products(job, e2m1_opened, low, high, e8m0_scales, 16, False)


def _mxfp4_decoded(job):
    decoded_nibbles(job, e2m1_opened, low, high, e8m0_scales, 16)


def _mxfp4_gguf(job):
    nibble_products(job, e2m1_opened, low, high, half_e8m0_scales, 16, True)


def _mxfp4_gguf_decoded(job):
    decoded_nibbles(job, e2m1_opened, low, high, half_e8m0_scales, 16)


def _fp4_u8_g128(job):
    nibble_products(job, e2m1_opened, low, high, uint8_scales_of_128, 16, False)


def _fp4_u8_g128_decoded(job):
    decoded_nibbles(job, e2m1_opened, low, high, uint8_scales_of_128, 16)


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
    "q4_0_poly": (_q4_0_poly, _q4_0_poly_decoded),
    "q4_0_gguf": (_q4_0_gguf, _q4_0_gguf_decoded),
    "mxfp4": (_mxfp4, _mxfp4_decoded),
    "mxfp4_gguf": (_mxfp4_gguf, _mxfp4_gguf_decoded),
    "fp4_u8_g128": (_fp4_u8_g128, _fp4_u8_g128_decoded),
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
