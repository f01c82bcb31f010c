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
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import numpy as np

from bitplan.kernels.base.addresses import (
    every_eighth,
    every_fourth_of_halves,
    load_from,
    multiply_in,
    prefetch_later,
    read,
    scale_in,
    sum_of_lanes,
    take,
    write,
    zero_tile,
)
from bitplan.kernels.base.cpu_features import float_lanes
from bitplan.kernels.base.jit import inlined, merged

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
)
X, INPUTS, WIDTH, CODES, CODES_STRIDE, SCALES, SCALES_STRIDE, Y, ROWS, BIAS, SCRATCH, SCRATCH_STRIDE = range(12)
TABLE, FACTOR, PIECE, NEXT_ROW, NEXT_THREAD, FIRST, COUNT, Y_STRIDE, DECODER, UNIT = range(12, len(JOB))


@inlined
def field(job, place):
    return read(job + 8 * place, I64)


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
        whole = first == start and start + STEP <= width
        source = x + 4 * first
        if not whole:
            _copy_with_zeros(x, width, first, start, buffer, STEP)
            source = buffer
        numbers, gap = load_from(source, F32, STEP), (start - first) // 8 if without_gaps else 0
        to, each = arranged + 4 * (start - gap), REGISTER - 4 * gap
        if halves:
            write(to + 7 * each, every_fourth_of_halves(numbers, 7))
            write(to + 6 * each, every_fourth_of_halves(numbers, 6))
            write(to + 5 * each, every_fourth_of_halves(numbers, 5))
            write(to + 4 * each, every_fourth_of_halves(numbers, 4))
            write(to + 3 * each, every_fourth_of_halves(numbers, 3))
            write(to + 2 * each, every_fourth_of_halves(numbers, 2))
            write(to + each, every_fourth_of_halves(numbers, 1))
            write(to, every_fourth_of_halves(numbers, 0))
        else:
            write(to + 7 * each, every_eighth(numbers, 7))
            write(to + 6 * each, every_eighth(numbers, 6))
            write(to + 5 * each, every_eighth(numbers, 5))
            write(to + 4 * each, every_eighth(numbers, 4))
            write(to + 3 * each, every_eighth(numbers, 3))
            write(to + 2 * each, every_eighth(numbers, 2))
            write(to + each, every_eighth(numbers, 1))
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
        place, at_x = at // per_scale, x + 4 * STEP * step
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
            scales(scales_at[0], place),
            scales(scales_at[1], place),
            scales(scales_at[2], place),
            scales(scales_at[3], place),
        )
        sums = scale_in(sums, of_rows, parts)
    return sums


@inlined
def _nibbles_2x4(opened, low, high, scales, table, codes, scales_at, x, stride, row_bytes, per_scale):
    sums = zero_tile(8, LANES)
    for step in range(-(-row_bytes // REGISTER)):
        at = min(step * REGISTER, row_bytes - REGISTER)
        place, at_x = at // per_scale, x + 4 * STEP * step
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
        sums = scale_in(sums, (scales(scales_at[0], place), scales(scales_at[1], place)), parts)
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
                codes, at = _four_rows(job, CODES, n), _four_rows(job, SCALES, n)
                sums = _nibbles_4x1(opened, low, high, scales, table, codes, at, x, row_bytes, per_scale)
                _write_4x1(job, n, sums)
        else:
            for n in range(first, stop, 2):
                codes2, at2 = _two_rows(job, CODES, n), _two_rows(job, SCALES, n)
                for m in range(0, inputs, 4):
                    at_x = x + m * stride
                    sums8 = _nibbles_2x4(
                        opened, low, high, scales, table, codes2, at2, at_x, stride, row_bytes, per_scale
                    )
                    _write_2x4(job, n, m, sums8)
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
        here, each = to + 4 * STEP * step - (start - at), REGISTER - (start - at)
        write(here + 7 * each, high(table, c, 3) * s)
        write(here + 6 * each, low(table, c, 3) * s)
        write(here + 5 * each, high(table, c, 2) * s)
        write(here + 4 * each, low(table, c, 2) * s)
        write(here + 3 * each, high(table, c, 1) * s)
        write(here + 2 * each, low(table, c, 1) * s)
        write(here + each, high(table, c, 0) * s)
        write(here, low(table, c, 0) * s)


# ---- 8-bit codes ----------------------------------------------------------------------------------------------------


@inlined
def _bytes_4x1(number, scale, codes, scales_at, x, width, block):
    sums, last = zero_tile(4, LANES), width - LANES
    for place in range(width // block if block else 1):
        parts = zero_tile(4, LANES)
        for chunk in range(block // LANES if block else -(-width // LANES)):
            start = place * block + chunk * LANES
            at = min(start, last)
            numbers = (number(codes[0] + at), number(codes[1] + at), number(codes[2] + at), number(codes[3] + at))
            prefetch_later(codes[0] + (4 + start // LANES % 4) * width + at)  # of the next four rows, in turn
            parts = multiply_in(parts, numbers, _one_input(x + 4 * start))
        of_rows = (
            scale(scales_at[0], place),
            scale(scales_at[1], place),
            scale(scales_at[2], place),
            scale(scales_at[3], place),
        )
        sums = scale_in(sums, of_rows, parts)
    return sums


@inlined
def _bytes_2x4(number, scale, codes, scales_at, x, stride, width, block):
    sums, last = zero_tile(8, LANES), width - LANES
    for place in range(width // block if block else 1):
        parts = zero_tile(8, LANES)
        for chunk in range(block // LANES if block else -(-width // LANES)):
            start = place * block + chunk * LANES
            at = min(start, last)
            parts = multiply_in(
                parts, (number(codes[0] + at), number(codes[1] + at)), _four_inputs(x + 4 * start, stride)
            )
        sums = scale_in(sums, (scale(scales_at[0], place), scale(scales_at[1], place)), parts)
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
                codes, at = _four_rows(job, CODES, n), _four_rows(job, SCALES, n)
                _write_4x1(job, n, _bytes_4x1(number, scale, codes, at, x, padded, block))
        else:
            for n in range(first, stop, 2):
                codes2, at2 = _two_rows(job, CODES, n), _two_rows(job, SCALES, n)
                for m in range(0, inputs, 4):
                    sums8 = _bytes_2x4(number, scale, codes2, at2, x + m * stride, stride, padded, block)
                    _write_2x4(job, n, m, sums8)
        first = take(job + 8 * NEXT_ROW, piece)


@inlined
def _decode_bytes(number, scale, codes, scales_at, width, block, first, count, to):
    """Chunks of LANES numbers, first .. first + count, of a row; `first` begins a block."""
    if block:
        for place in range(first * LANES // block, (first + count) * LANES // block):
            of_block, start = scale(scales_at, place), place * block
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
def _four_rows(job, part, n):
    return row_of(job, part, n), row_of(job, part, n + 1), row_of(job, part, n + 2), row_of(job, part, n + 3)


@inlined
def _two_rows(job, part, n):
    return row_of(job, part, n), row_of(job, part, n + 1)


@inlined
def _write(job, n, m, total):
    rows = field(job, ROWS)
    if n < rows and m < field(job, INPUTS):
        bias = field(job, BIAS)
        result = total * read(field(job, FACTOR), F32)
        write(field(job, Y) + 4 * (m * rows + n), result + read(bias + 4 * n, F32) if bias else result)


@inlined
def _write_4x1(job, n, sums):
    _write(job, n, 0, sum_of_lanes(sums[0]))
    _write(job, n + 1, 0, sum_of_lanes(sums[1]))
    _write(job, n + 2, 0, sum_of_lanes(sums[2]))
    _write(job, n + 3, 0, sum_of_lanes(sums[3]))


@inlined
def _write_2x4(job, n, m, sums):
    _write(job, n, m, sum_of_lanes(sums[0]))
    _write(job, n, m + 1, sum_of_lanes(sums[1]))
    _write(job, n, m + 2, sum_of_lanes(sums[2]))
    _write(job, n, m + 3, sum_of_lanes(sums[3]))
    _write(job, n + 1, m, sum_of_lanes(sums[4]))
    _write(job, n + 1, m + 1, sum_of_lanes(sums[5]))
    _write(job, n + 1, m + 2, sum_of_lanes(sums[6]))
    _write(job, n + 1, m + 3, sum_of_lanes(sums[7]))
