"""Trees to scores: a C function of a job's address, so that threads run it without the interpreter.

64 rows at a time go down a tree together. Its first splits, up to 63, are judged for all of the rows, whether they get
there or not: eight rows a comparison, and no row waits for where it went before. Each split that sends a row to the
right takes the exits on its left from the row's set of exits; of those that are left the first is the row's. From there
rows that are not at a leaf yet go on, step by step.

`Job` and `Steps` (`trees.tree`) say what lies where. Sums are in the order of the trees, row by row: the bits do not
depend on threads, nor on how many rows are predicted at once.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types

from bitplan.kernels.base.addresses import load_from, read, take, write
from bitplan.kernels.base.jit import inlined
from bitplan.kernels.base.openmp_threads import c_function
from bitplan.kernels.base.vectors import VectorType, VectorWriter, define

TILE = 64  # rows
LANES = 8
LINE = 64  # bytes
INFINITE, MISSING = 1, 2  # what may be odd in a tile
EXITS = 64  # of a tree's first splits: bits of a word
# Places in a job, int64 each. Those that threads change lie in cache lines of their own.
(
    ROWS, STEP, TABLE, ROW_BYTES, COLUMN_BYTES, IS_FLOAT32, FEATURES, SCORES, SCORE_BYTES, SCRATCH, SCRATCH_BYTES,
    OUTPUTS, TREES, PLANS, SPLITS, EXIT_PLACES, NODES, VALUES, SETS, SET_WORDS,
) = range(20)  # fmt: skip
NEXT, NEXT_SCRATCH, HAS_INFINITY, JOB_SIZE = 32, 48, 64, 80
# Scratch of a thread: the rows' sets of exits, their nodes, those that still go down, and then the tile.
SETS_AT, NODES_AT, ACTIVE_AT, TILE_AT = 0, 8 * TILE, 16 * TILE, 24 * TILE + LINE  # LANES more
# A tree's plan, int64 each: its first split and exit, how many splits send missing values left, and right;
# whether all exits are leaves, and whether a node has a set of categories.
FIRST_SPLIT, FIRST_EXIT, LEFT_SPLITS, RIGHT_SPLITS, ONLY_LEAVES, HAS_SETS, PLAN_SIZE = range(7)
SPLIT_BYTES, NODE_BYTES = 24, 16
# A node's word: below zero for a leaf; whether missing values go right, or it has a set of categories; the feature; the
# left child, which the right one follows.
MISSING_SHIFT, IS_CATEGORY, FEATURE_SHIFT, FEATURE_MASK, CHILD_MASK = 62, 1 << 61, 32, (1 << 28) - 1, (1 << 32) - 1
INT64, DOUBLE = ir.IntType(64), ir.DoubleType()


def _narrow_down(missing_goes_right: bool) -> Any:
    """A function of a vector of sets of exits, the address of a tile's lanes and that of a split: the sets after it."""

    def emit(writer: VectorWriter, sets: Any, tile: Any, split: Any) -> Any:
        builder, width = writer.builder, writer.vector.width

        def at(address: Any, bytes_: int, kind: Any) -> Any:
            moved = builder.add(address, ir.Constant(INT64, bytes_))
            return builder.load(builder.inttoptr(moved, ir.PointerType(kind)), align=8)

        def repeated(value: Any) -> Any:
            nothing = ir.Constant(ir.VectorType(value.type, width), ir.Undefined)
            first = builder.insert_element(nothing, value, ir.Constant(ir.IntType(32), 0))
            return writer.shuffle(first, nothing, [0] * width)

        numbers = at(builder.add(tile, at(split, 8, INT64)), 0, ir.VectorType(DOUBLE, width))
        compare = builder.fcmp_unordered if missing_goes_right else builder.fcmp_ordered
        goes_right = compare(">", numbers, repeated(at(split, 0, DOUBLE)))
        return builder.select(goes_right, builder.and_(sets, repeated(at(split, 16, INT64))), sets)

    return define(3, lambda sets, _tile, _split: sets, emit)


def _odd(writer: VectorWriter, seen: Any, numbers: Any) -> Any:
    builder, count = writer.builder, writer.vector.width

    def either(flag: int) -> Any:
        return ir.Constant(ir.VectorType(INT64, count), [flag] * count)

    sizes = writer.call(f"llvm.fabs.v{count}f64", numbers.type, [numbers])
    limit = ir.Constant(numbers.type, [ir.Constant(DOUBLE, float("inf"))] * count)
    infinite = builder.select(builder.fcmp_ordered("==", sizes, limit), either(INFINITE), either(0))
    missing = builder.select(builder.fcmp_unordered("uno", numbers, numbers), either(MISSING), either(0))
    return builder.or_(seen, builder.or_(infinite, missing))


def _first_bit(writer: VectorWriter, word: Any) -> Any:
    return writer.builder.cttz(word, ir.Constant(ir.IntType(1), 1))


narrow_by_left, narrow_by_right = _narrow_down(False), _narrow_down(True)
odd_lanes = define(2, lambda seen, _numbers: seen, _odd)  # INFINITE and MISSING, in addition to those seen before
any_lane = define(
    1,
    lambda _sets: types.int64,
    lambda writer, value: writer.call(f"llvm.vector.reduce.or.v{LANES}i64", INT64, [value]),
)
first_bit = define(1, lambda _word: types.int64, _first_bit)
lanes_of = define(  # a literal, in each lane
    1,
    lambda _word: VectorType(types.int64, LANES),
    lambda writer, _word: ir.Constant(ir.VectorType(INT64, LANES), [writer.kinds[0].literal_value] * LANES),
)


@inlined
def _fill_tile(job, first, size, tile):  # type: ignore[no-untyped-def]
    """Copy rows as float64, feature by feature; says what is odd in them. Places behind the last row are zero."""
    table, by_row = read(job + 8 * TABLE, np.int64), read(job + 8 * ROW_BYTES, np.int64)
    by_column, features = read(job + 8 * COLUMN_BYTES, np.int64), read(job + 8 * FEATURES, np.int64)
    table += first * by_row
    if read(job + 8 * IS_FLOAT32, np.int64):
        for row in range(size):
            for feature in range(features):
                number = np.float64(read(table + row * by_row + feature * by_column, np.float32))
                write(tile + 8 * (TILE * feature + row), number)
    else:
        for row in range(size):
            for feature in range(features):
                write(tile + 8 * (TILE * feature + row), read(table + row * by_row + feature * by_column, np.float64))
    odd = lanes_of(0)
    for feature in range(features):
        for row in range(size, (size + 2 * LANES - 1) // (2 * LANES) * (2 * LANES)):  # `_narrow` reads so many
            write(tile + 8 * (TILE * feature + row), 0.0)
        for row in range(0, size, LANES):
            odd = odd_lanes(odd, load_from(tile + 8 * (TILE * feature + row), np.float64, LANES))
    return any_lane(odd)


@inlined
def _in_set(job, place, number):  # type: ignore[no-untyped-def]
    words = read(job + 8 * SET_WORDS, np.int64)
    if number <= -1 or number >= 32 * words:  # as LightGBM: the fraction is cut off
        return False
    code = np.int64(number)
    word = read(read(job + 8 * SETS, np.int64) + 4 * (place * words + (code >> 5)), np.uint32)
    return (word >> np.uint32(code & 31)) & np.uint32(1) != 0


@inlined
def _narrow(job, plan, size, scratch):  # type: ignore[no-untyped-def]
    """The exits of the rows of a tile, by a tree's first splits: two times eight rows at once."""
    begin = read(job + 8 * SPLITS, np.int64) + SPLIT_BYTES * read(plan + 8 * FIRST_SPLIT, np.int64)
    middle = begin + SPLIT_BYTES * read(plan + 8 * LEFT_SPLITS, np.int64)
    end = middle + SPLIT_BYTES * read(plan + 8 * RIGHT_SPLITS, np.int64)
    for row in range(0, size, 2 * LANES):
        tile = scratch + TILE_AT + 8 * row
        a, b = lanes_of(-1), lanes_of(-1)
        for split in range(begin, middle, SPLIT_BYTES):
            a, b = narrow_by_left(a, tile, split), narrow_by_left(b, tile + 8 * LANES, split)
        for split in range(middle, end, SPLIT_BYTES):
            a, b = narrow_by_right(a, tile, split), narrow_by_right(b, tile + 8 * LANES, split)
        write(scratch + SETS_AT + 8 * row, a)
        write(scratch + SETS_AT + 8 * (row + LANES), b)


@inlined
def _child(job, nodes, tile, row, at, careful):  # type: ignore[no-untyped-def]
    """Where a row goes from a node; a leaf leads to itself. `careful`: numbers may be missing, or nodes have sets."""
    node = nodes + NODE_BYTES * at
    word, threshold = read(node, np.int64), read(node + 8, np.float64)
    number = read(tile + 8 * (TILE * ((word >> FEATURE_SHIFT) & FEATURE_MASK) + row), np.float64)
    to_right = np.int64(number > threshold)
    if careful:
        if word & IS_CATEGORY and number == number:
            to_right = np.int64(not _in_set(job, np.int64(threshold), number))
        to_right |= np.int64(number != number) & (word >> MISSING_SHIFT) & 1
    return (word & CHILD_MASK) + to_right


@inlined
def _word(nodes, at):  # type: ignore[no-untyped-def]
    return read(nodes + NODE_BYTES * at, np.int64)


@inlined
def _go_down(job, nodes, scratch, active, careful):  # type: ignore[no-untyped-def]
    """Rows that are not at a leaf go down to one, eight together: a step waits for the one before it, other rows do
    not."""
    tile, at, rows = scratch + TILE_AT, scratch + NODES_AT, scratch + ACTIVE_AT
    last = read(rows + 8 * (active - 1), np.int64)
    for place in range(active, active + LANES):  # behind the end the last row is done again
        write(rows + 8 * place, last)
    for first in range(rows, rows + 8 * active, 8 * LANES):
        in_a, in_b, in_c = read(first, np.int64), read(first + 8, np.int64), read(first + 16, np.int64)
        in_d, in_e, in_f = read(first + 24, np.int64), read(first + 32, np.int64), read(first + 40, np.int64)
        in_g, in_h = read(first + 48, np.int64), read(first + 56, np.int64)
        a, b, c = read(at + 8 * in_a, np.int64), read(at + 8 * in_b, np.int64), read(at + 8 * in_c, np.int64)
        d, e, f = read(at + 8 * in_d, np.int64), read(at + 8 * in_e, np.int64), read(at + 8 * in_f, np.int64)
        g, h = read(at + 8 * in_g, np.int64), read(at + 8 * in_h, np.int64)
        while True:
            a, b = _child(job, nodes, tile, in_a, a, careful), _child(job, nodes, tile, in_b, b, careful)
            c, d = _child(job, nodes, tile, in_c, c, careful), _child(job, nodes, tile, in_d, d, careful)
            e, f = _child(job, nodes, tile, in_e, e, careful), _child(job, nodes, tile, in_f, f, careful)
            g, h = _child(job, nodes, tile, in_g, g, careful), _child(job, nodes, tile, in_h, h, careful)
            some = _word(nodes, a) & _word(nodes, b) & _word(nodes, c) & _word(nodes, d)
            if some & _word(nodes, e) & _word(nodes, f) & _word(nodes, g) & _word(nodes, h) < 0:  # all are leaves
                break
        write(at + 8 * in_a, a)
        write(at + 8 * in_b, b)
        write(at + 8 * in_c, c)
        write(at + 8 * in_d, d)
        write(at + 8 * in_e, e)
        write(at + 8 * in_f, f)
        write(at + 8 * in_g, g)
        write(at + 8 * in_h, h)


def add_trees(job):  # type: ignore[no-untyped-def]
    """Add every tree to the scores of all rows of a job, with the other threads that call this."""
    rows, step = read(job + 8 * ROWS, np.int64), read(job + 8 * STEP, np.int64)
    trees, outputs = read(job + 8 * TREES, np.int64), read(job + 8 * OUTPUTS, np.int64)
    nodes, values = read(job + 8 * NODES, np.int64), read(job + 8 * VALUES, np.int64)
    scratch, by_row = read(job + 8 * SCRATCH, np.int64), read(job + 8 * SCORE_BYTES, np.int64)
    scratch += read(job + 8 * SCRATCH_BYTES, np.int64) * take(job + 8 * NEXT_SCRATCH, 1)
    while True:
        begin = take(job + 8 * NEXT, step)
        if begin >= rows:
            return
        for first in range(begin, min(begin + step, rows), TILE):
            size = min(first + TILE, rows) - first
            odd = _fill_tile(job, first, size, scratch + TILE_AT)
            if odd & INFINITE:
                write(job + 8 * HAS_INFINITY, np.int64(1))
            for tree in range(trees):
                plan = read(job + 8 * PLANS, np.int64) + 8 * PLAN_SIZE * tree
                exits = read(job + 8 * EXIT_PLACES, np.int64) + 8 * read(plan + 8 * FIRST_EXIT, np.int64)
                _narrow(job, plan, size, scratch)
                scores = read(job + 8 * SCORES, np.int64) + 8 * (tree % outputs) + by_row * first
                if read(plan + 8 * ONLY_LEAVES, np.int64):
                    for row in range(size):
                        at = read(exits + 8 * first_bit(read(scratch + SETS_AT + 8 * row, np.int64)), np.int64)
                        score = scores + by_row * row
                        write(score, read(score, np.float64) + read(values + 8 * at, np.float64))
                    continue
                active = np.int64(0)
                for row in range(size):
                    at = read(exits + 8 * first_bit(read(scratch + SETS_AT + 8 * row, np.int64)), np.int64)
                    write(scratch + NODES_AT + 8 * row, at)
                    write(scratch + ACTIVE_AT + 8 * active, row)
                    active += np.int64(read(nodes + NODE_BYTES * at, np.int64) >= 0)
                if active > 0 and (odd or read(plan + 8 * HAS_SETS, np.int64)):
                    _go_down(job, nodes, scratch, active, True)
                elif active > 0:
                    _go_down(job, nodes, scratch, active, False)
                for row in range(size):
                    score = scores + by_row * row
                    value = read(values + 8 * read(scratch + NODES_AT + 8 * row, np.int64), np.float64)
                    write(score, read(score, np.float64) + value)


@functools.cache
def adder() -> Any:
    """`add_trees`, compiled."""
    return c_function(add_trees)
