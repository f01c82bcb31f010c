"""Products with many inputs: parts of the weight are decoded into a buffer in the cache, and multiplied from there.

    y[m, n] = sum_k x[m, k] w[n, k]

Inputs are transposed first, into panels: a panel holds numbers k = 0, 1, ... of up to VECTORS * LANES inputs, side by
side. A tile of sums (rows of the weight times vectors of inputs) stays in registers while k goes through BLOCK numbers:
each step loads the vectors of inputs, and one weight of each row, repeated on all lanes. So decoded weights are not
transposed, and no lanes are summed.

A thread takes a piece of rows. For each BLOCK of k it decodes GROUP rows at a time and multiplies them by all panels,
whose numbers of this BLOCK stay in the second-level cache. Between blocks the sums lie in scratch, row by row of the
weight; they are written to y at the end of the piece. Threads meet twice in a product, whatever its size.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import functools
from typing import Any

import numpy as np

from bitplan.kernels.base.addresses import (
    call_c,
    load_from,
    load_tile,
    multiply_in,
    prefetch_later,
    prefetch_soon,
    read,
    repeat_each,
    repeated,
    store_tile,
    take,
    write,
    zero_tile,
)
from bitplan.kernels.base.jit import inlined, merged
from bitplan.kernels.base.openmp_threads import c_function
from bitplan.kernels.matmul.cpu.rows import (
    BIAS,
    CODES,
    CODES_STRIDE,
    COUNT,
    DECODER,
    FACTOR,
    FIRST,
    INPUTS,
    JOB,
    LANES,
    NEXT_ROW,
    NEXT_THREAD,
    PIECE,
    ROWS,
    SCALES,
    SCALES_STRIDE,
    SCRATCH,
    SCRATCH_STRIDE,
    STEP,
    UNIT,
    WIDTH,
    Y_STRIDE,
    X,
    Y,
    arrange_bytes,
    arrange_nibbles,
    field,
)
from bitplan.kernels.matmul.cpu.transposed import times_plus, transpose_tile

F32, I64 = np.float32, np.int64
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
            here = width if first + row < inputs else 0
            arrange(job, field(job, X) + 4 * (first + row) * here, here, mine, rows + row * stride)
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


def _panels_in_pairs(job):
    _panels(job, _in_pairs)


def _panels_in_halves(job):
    _panels(job, _in_halves)


def _panels_of_bytes(job):
    _panels(job, _as_bytes)


# ---- products -------------------------------------------------------------------------------------------------------


def _tile(rows: int, vectors: int) -> Any:
    """The loop for a tile of this size: sizes must be literals for the compiler."""
    cells = rows * vectors

    @inlined
    def tile(w, x, steps, sums, stride, is_first):
        made = zero_tile(cells, LANES) if is_first else load_tile(sums, stride, rows, vectors, LANES)
        for k in range(0, steps, 4):
            at, on = w + 4 * k, x + 4 * k * vectors * LANES
            for line in range(4 * 4 * vectors * LANES // LINE):
                prefetch_soon(on + AHEAD + LINE * line)
            made = multiply_in(made, repeated(at, ROW_BYTES, rows, LANES), load_tile(on, 0, 1, vectors, LANES))
            on += 4 * vectors * LANES
            made = multiply_in(made, repeated(at + 4, ROW_BYTES, rows, LANES), load_tile(on, 0, 1, vectors, LANES))
            on += 4 * vectors * LANES
            made = multiply_in(made, repeated(at + 8, ROW_BYTES, rows, LANES), load_tile(on, 0, 1, vectors, LANES))
            on += 4 * vectors * LANES
            made = multiply_in(made, repeated(at + 12, ROW_BYTES, rows, LANES), load_tile(on, 0, 1, vectors, LANES))
        store_tile(sums, stride, made, vectors)

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
    whole, whole_inputs = (stop - first) // LANES * LANES, inputs // LANES * LANES
    factors = repeat_each(load_from(factor, F32, 1), LANES)
    for n in range(0, whole, LANES):
        # Adding -0.0 changes no number.
        addends = load_from(bias + 4 * (first + n), F32, LANES) if bias else zero_tile(1, LANES)[0] * F32(-1)
        for m in range(0, whole_inputs, LANES):
            tile = transpose_tile(load_tile(sums + n * stride + 4 * m, stride, LANES, 1, LANES))
            to = field(job, Y) + 4 * (m * rows + first + n)
            store_tile(to, 4 * rows, times_plus(tile, factors, addends), 1)
    for m in range(inputs):
        to, at = field(job, Y) + 4 * (m * rows + first), sums + 4 * m
        for n in range(whole if m < whole_inputs else 0, stop - first):
            result = read(at + n * stride, F32) * read(factor, F32)
            write(to + 4 * n, result + read(bias + 4 * (first + n), F32) if bias else result)


def _products(job):
    """x: panels; each thread has a copy of the job for the decoder."""
    inputs, rows, count, unit = field(job, INPUTS), field(job, ROWS), field(job, COUNT), field(job, UNIT)
    piece, panels = field(job, PIECE), field(job, X)
    mine = field(job, SCRATCH) + take(job + 8 * NEXT_THREAD, 1) * field(job, SCRATCH_STRIDE)
    buffer, all_sums = mine + JOB_BYTES, mine + JOB_BYTES + BUFFER_BYTES
    for place in range(len(JOB)):
        write(mine + 8 * place, field(job, place))
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


_ARRANGED = {"pairs": _panels_in_pairs, "halves": _panels_in_halves, "bytes": _panels_of_bytes}


@functools.cache
def panels_of(order: str) -> Any:
    """The C function that makes panels of inputs: "pairs" or "halves" for 4-bit codes, "bytes" for others."""
    return c_function(_ARRANGED[order])


@functools.cache
def panel_products() -> Any:
    """The C function that multiplies by panels, with any format's decoder."""
    return c_function(_products)
