"""Trees to scores: a C function of a job's address, so that threads run it without the interpreter.

64 rows at a time go down a tree together. Its first splits, up to 63, are judged for all of the rows, whether they get
there or not: eight rows a comparison, and no row waits for where it went before. Each split that sends a row to the
right takes the exits on its left from the row's set of exits; of those that are left the first is the row's. From there
rows that are not at a leaf yet go on, step by step.

`Job` and `Steps` (`trees.tree`) say what lies where. Sums are in the order of the trees, row by row: the bits do not
depend on threads, nor on how many rows are predicted at once.

Exact Shapley values of trees, leaf by leaf (TreeSHAP, in the form that GPUTreeSHAP gave it).

A leaf is reached by the splits above it. Of each distinct feature among them two numbers matter: the share of training
rows that pass its splits when its value is not known, and whether the row at hand passes them. The value of the leaf is
divided among these features by a polynomial of degree d, extended feature by feature and divided by one of them at a
time: d^2 steps for a leaf below d features.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types

from bitplan.base.loops.addresses import load_from, read, take, write
from bitplan.base.loops.vectors import VectorType, VectorWriter, define
from bitplan.trees.loops.compiling import c_function, compiled, inlined

# ---- contributions ---------------------------------------------------------------------------------------------------


U = np.uint64


@inlined
def _goes_left(number, at, threshold, missing_left, category, bits):  # type: ignore[no-untyped-def]
    if np.isnan(number):
        return missing_left[at]
    if category[at] < 0:
        return number <= threshold[at]
    if number <= -1 or number >= 32 * bits.shape[1]:
        return False
    code = np.int64(number)
    return (bits[category[at], code >> 5] >> np.uint32(code & 31)) & np.uint32(1) != 0


@compiled
def add_contributions(  # type: ignore[no-untyped-def]
    numbers, root, feature, threshold, missing_left, category, bits,
    values, part_starts, part_feature, part_share, step_starts, step_node, step_left, out,
):  # fmt: skip
    """Add one tree's contributions to out[row, feature].

    Leaf l has parts part_starts[l] .. part_starts[l + 1], one for each distinct feature above it; part p has steps
    step_starts[p] .. step_starts[p + 1], the splits of that feature above the leaf.
    """
    most = 0
    for leaf in range(values.size):
        most = max(most, part_starts[leaf + 1] - part_starts[leaf])
    weights, passes, per = np.empty(most + 1), np.empty(most), np.zeros(most + 2)
    for i in range(1, most + 2):
        per[i] = 1.0 / i
    nodes = 0
    for step in range(step_node.size):
        nodes = max(nodes, step_node[step] + 1)
    is_left = np.empty(nodes, np.bool_)
    for row in range(numbers.shape[0]):
        for node in range(nodes):
            at = root + node
            number = np.float64(numbers[row, feature[at]])
            is_left[node] = _goes_left(number, at, threshold, missing_left, category, bits)
        for leaf in range(values.size):
            first = part_starts[leaf]
            depth = part_starts[leaf + 1] - first
            weights[0] = 1.0
            for part in range(depth):
                one = 1.0
                for step in range(step_starts[first + part], step_starts[first + part + 1]):
                    if is_left[step_node[step]] != step_left[step]:
                        one = 0.0
                        break
                passes[part] = one
                zero = part_share[first + part]
                weights[part + 1] = 0.0
                for i in range(part, -1, -1):
                    if one != 0.0:
                        weights[i + 1] += weights[i] * ((i + 1.0) * per[part + 2])
                    weights[i] *= zero * ((part + 1.0 - i) * per[part + 2])
            without = 0.0  # of every feature whose splits the row does not pass
            for i in range(depth):
                without += weights[i] * per[depth - i]
            for part in range(depth):
                one, zero = passes[part], part_share[first + part]
                total = 0.0
                if one != 0.0:
                    following, factor = weights[depth], zero * per[depth + 1]
                    for i in range(depth - 1, -1, -1):
                        here = following * ((depth + 1.0) * per[i + 1])
                        total += here
                        following = weights[i] - here * (factor * (depth - i))
                elif zero != 0.0:
                    total = without * (depth + 1.0) / zero
                out[row, part_feature[first + part]] += total * (one - zero) * values[leaf]


# ---- predict ---------------------------------------------------------------------------------------------------------


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
# Scratch of a thread: the rows' sets of exits, their nodes, how many rows have 0, 1, ... steps to go, lists of these
# rows (a byte each), and then the tile.
KINDS = 16  # the last: more steps
SETS_AT, NODES_AT, COUNTS_AT, LISTS_AT = 0, 8 * TILE, 16 * TILE, 16 * TILE + 8 * KINDS
TILE_AT = LISTS_AT + KINDS * TILE
# A tree's plan, int64 each: its first split and exit, how many splits send missing values left, and right;
# how many steps follow the exits at most, and whether a node has a set of categories.
FIRST_SPLIT, FIRST_EXIT, LEFT_SPLITS, RIGHT_SPLITS, DEEPEST, HAS_SETS, PLAN_SIZE = range(7)
SPLIT_BYTES, NODE_BYTES = 24, 16
# A node's word: below zero for a leaf; whether missing values go right, or it has a set of categories; the feature; the
# left child, which the right one follows.
MISSING_SHIFT, IS_CATEGORY, FEATURE_SHIFT, FEATURE_MASK, CHILD_MASK = 62, 1 << 61, 32, (1 << 28) - 1, (1 << 32) - 1
STEPS_SHIFT = 32  # of an exit: its node, and the steps from there
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
def _go_down(job, nodes, scratch, deepest, careful):  # type: ignore[no-untyped-def]
    """Rows that are not at a leaf go down to one. Those with as many steps to go follow one another, so that the
    processor guesses the end of each right, and begins the next rows meanwhile."""
    tile = scratch + TILE_AT
    for kind in range(1, min(deepest, KINDS - 1) + 1):
        steps = kind if kind < KINDS - 1 else deepest
        for place in range(read(scratch + COUNTS_AT + 8 * kind, np.int64)):
            row = np.int64(read(scratch + LISTS_AT + TILE * kind + place, np.uint8))
            at = read(scratch + NODES_AT + 8 * row, np.int64)
            for _ in range(steps):
                at = _child(job, nodes, tile, row, at, careful)
            write(scratch + NODES_AT + 8 * row, at)


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
                if read(plan + 8 * DEEPEST, np.int64) == 0:
                    for row in range(size):
                        at = read(exits + 8 * first_bit(read(scratch + SETS_AT + 8 * row, np.int64)), np.int64)
                        score = scores + by_row * row
                        write(score, read(score, np.float64) + read(values + 8 * at, np.float64))
                    continue
                for kind in range(KINDS):
                    write(scratch + COUNTS_AT + 8 * kind, np.int64(0))
                for row in range(size):
                    at = read(exits + 8 * first_bit(read(scratch + SETS_AT + 8 * row, np.int64)), np.int64)
                    write(scratch + NODES_AT + 8 * row, at & CHILD_MASK)
                    kind = at >> STEPS_SHIFT
                    place = read(scratch + COUNTS_AT + 8 * kind, np.int64)
                    write(scratch + LISTS_AT + TILE * kind + place, np.uint8(row))
                    write(scratch + COUNTS_AT + 8 * kind, place + 1)
                deepest = read(plan + 8 * DEEPEST, np.int64)
                if odd or read(plan + 8 * HAS_SETS, np.int64):
                    _go_down(job, nodes, scratch, deepest, True)
                else:
                    _go_down(job, nodes, scratch, deepest, False)
                for row in range(size):
                    score = scores + by_row * row
                    value = read(values + 8 * read(scratch + NODES_AT + 8 * row, np.int64), np.float64)
                    write(score, read(score, np.float64) + value)


@functools.cache
def adder() -> Any:
    """`add_trees`, compiled."""
    return c_function(add_trees)
