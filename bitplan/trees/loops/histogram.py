"""Histograms of boosted trees: for every feature and bin, the sums of gradients and hessians and the number of rows.

Everything is summed as integers, so a sum does not depend on the order of rows, the number of threads or of machines.
A row adds one *increment* to one cell per feature, and three numbers share it:

| gradients | cell | gradient | hessian | rows |
|---|---|---|---|---|
| 8 or 4 bits | one int64 | bits 40..63, signed | bits 16..39 | bits 0..15 |
| float32, as fixed point | two int64 | all of the first | bits 16..63 of the second | bits 0..15 of the second |

At 8 bits 65535 rows fill 127 * 65535 < 2^23, 255 * 65535 < 2^24 and 2^16 exactly: such *narrow* cells serve nodes of up
to `NARROW_ROWS` rows, larger ones are summed in blocks that are *widened* into three int64 (gradient, hessian, rows).
That the exact row count comes for free is why the gradient has the upper 24 bits and not the upper 32.

Stochastic rounding draws from a counter-based generator: the number for a row is a hash of random_state, the round and
the row, so that equal settings give equal codes in whatever order and on however many threads rows are rounded.

A node's rows are *entries*: the number of the row in the lower 32 bits, its gradients above, so that the partition,
which moves entries, carries the gradients along, and a histogram reads them in order. Bins lie in panels of up to 32
features, 8, 16 or 32 bytes a row and never across two cache lines: all that a histogram fetches from afar is one line a
row, asked for 16 rows ahead. Each number of features has a loop of its own, because a trip count known to the compiler
is unrolled; numba's cache tells them apart by the numbers they close over. What it costs: `docs/log.md`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bitplan.base.loops.vectors import load, number_at, same_bits, store
from bitplan.trees.loops.compiling import compiled, inlined, prefetch

BINS = 256
PANEL = 32  # features
GROUP = 4  # features that share half a word; a panel is as wide as its groups
NARROW_ROWS = 65535
CHUNK = 2048  # rows that stay in the L2 cache between the passes over a panel
AHEAD = 16  # rows
ROW = np.uint64(0xFFFFFFFF)  # the part of an entry that is the number of the row
U = np.uint64  # numba checks signed indices for a minus sign, and mixes uint64 with int64 into float64


def words_a_row(width: int) -> int:
    """uint64 a row of a panel of `width` features: a power of two, so that no row lies across two cache lines."""
    return 1 if width <= 8 else 2 if width <= 16 else 4


# ---- entries ---------------------------------------------------------------------------------------------------------


@inlined
def _offsets(key, row, stochastic):  # type: ignore[no-untyped-def]
    """What to add before rounding down: two numbers in [0, 1), or two halves.

    The numbers are splitmix64's: every bit of the counter changes half the bits of the word.
    """
    if not stochastic:
        return 0.5, 0.5
    word = key + U(row) * U(0x9E3779B97F4A7C15)
    word = (word ^ (word >> U(30))) * U(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> U(27))) * U(0x94D049BB133111EB)
    word = word ^ (word >> U(31))
    return np.float64(word >> U(32)) * 2.0**-32, np.float64(word & U(0xFFFFFFFF)) * 2.0**-32


@compiled
def enter_codes(rows, first, grads, hess, numbered, per_grad, per_hess, key, stochastic, entries):  # type: ignore[no-untyped-def]
    """Bits 48..63 the gradient's code, signed, 32..47 the hessian's, 0..31 the row.

    No `rows`: those from `first` on. The number of row 0 among those of all processes is `numbered`.
    """
    for i in range(entries.size):
        row = U(rows[U(i)]) if rows.size else U(first + i)
        for_grad, for_hess = _offsets(key, U(numbered) + row, stochastic)
        grad = np.int64(math.floor(np.float64(grads[row]) * per_grad + for_grad))
        weight = np.int64(math.floor(np.float64(hess[row]) * per_hess + for_hess))
        grad = np.int64(-32767 if grad < -32767 else 32767 if grad > 32767 else grad)  # scales are such that none is
        weight = np.int64(65535 if weight > 65535 else weight)
        entries[U(i)] = U((grad << 48) + (weight << 32)) | row


@compiled
def enter_f32(rows, first, grads, entries):  # type: ignore[no-untyped-def]
    """The upper half is the gradient, as it is: `grads` are the bits of float32, read as uint32."""
    for i in range(entries.size):
        row = U(rows[U(i)]) if rows.size else U(first + i)
        entries[U(i)] = (U(grads[row]) << U(32)) | row


# ---- adding rows: one word a cell ------------------------------------------------------------------------------------


@inlined
def _add_4(cells, base, word, increment):  # type: ignore[no-untyped-def]
    cells[base + (word & U(255))] += increment
    cells[base + U(256) + ((word >> U(8)) & U(255))] += increment
    cells[base + U(512) + ((word >> U(16)) & U(255))] += increment
    cells[base + U(768) + ((word >> U(24)) & U(255))] += increment


@inlined
def _add_row(panel, words, groups, entry, cells):  # type: ignore[no-untyped-def]
    """`words` and `groups` are known to the compiler: what does not apply is not there."""
    increment = ((np.int64(entry) >> 48) << 40) + (((np.int64(entry) >> 32) & 0xFFFF) << 16) + 1
    at = (entry & ROW) * words
    first, second = panel[at], panel[at + U(1)] if groups > 2 else U(0)  # all of the row before any cell: 2% faster
    third, fourth = panel[at + U(2)] if groups > 4 else U(0), panel[at + U(3)] if groups > 6 else U(0)
    _add_4(cells, U(0), first, increment)
    if groups > 1:
        _add_4(cells, U(1024), first >> U(32), increment)
    if groups > 2:
        _add_4(cells, U(2048), second, increment)
    if groups > 3:
        _add_4(cells, U(3072), second >> U(32), increment)
    if groups > 4:
        _add_4(cells, U(4096), third, increment)
    if groups > 5:
        _add_4(cells, U(5120), third >> U(32), increment)
    if groups > 6:
        _add_4(cells, U(6144), fourth, increment)
    if groups > 7:
        _add_4(cells, U(7168), fourth >> U(32), increment)


def _quantized_adder(groups: int) -> Any:
    words = U(words_a_row(groups * GROUP))

    @compiled
    def add_rows(panel, entries, _hess, _grad_unit, _hess_unit, _pairs, cells):  # type: ignore[no-untyped-def]
        """Add at most NARROW_ROWS rows to the cells of one panel."""
        near = entries.size - AHEAD if entries.size > AHEAD else 0
        for i in range(near):
            prefetch(panel, np.int64((entries[U(i + AHEAD)] & ROW) * words))
            _add_row(panel, words, groups, entries[U(i)], cells)
        for i in range(near, entries.size):
            _add_row(panel, words, groups, entries[U(i)], cells)

    return add_rows


# ---- adding rows: two words a cell -----------------------------------------------------------------------------------


@inlined
def _add_pair(cells, at, pair):  # type: ignore[no-untyped-def]
    store(cells, at, load(cells, at, 2) + pair)  # one 16-byte vector: gradient, and hessian with row count


@inlined
def _add_4_pairs(cells, base, word, pair):  # type: ignore[no-untyped-def]
    _add_pair(cells, base + ((word << U(1)) & U(510)), pair)
    _add_pair(cells, base + U(512) + ((word >> U(7)) & U(510)), pair)
    _add_pair(cells, base + U(1024) + ((word >> U(15)) & U(510)), pair)
    _add_pair(cells, base + U(1536) + ((word >> U(23)) & U(510)), pair)


@inlined
def _make_pairs(entries, hess, per_grad, per_hess, pairs):  # type: ignore[no-untyped-def]
    """What each row adds: float32 in multiples of a unit, 2^-31 of the largest hessian, far less for gradients."""
    last = entries.size - 1
    for i in range(entries.size):
        prefetch(hess, np.int64(entries[U(i + AHEAD if i + AHEAD < last else last)] & ROW) * 4)
        entry = entries[U(i)]
        grad, weight = same_bits(np.uint32(entry >> U(32)), np.float32), number_at(hess, entry & ROW, np.float32)
        pairs[U(2 * i)] = np.int64(np.rint(np.float64(grad) * per_grad))
        pairs[U(2 * i + 1)] = (np.int64(np.rint(np.float64(weight) * per_hess)) << 16) + 1


def _float_adder(groups: int) -> Any:
    words = U(words_a_row(groups * GROUP))
    full, half = groups // 2, groups % 2

    @compiled
    def add_rows(panel, entries, hess, grad_unit, hess_unit, pairs, cells):  # type: ignore[no-untyped-def]
        """The same; `hess` are the bytes of float32, `pairs` is space for a chunk.

        Eight features at a time: their cells stay in the L1.
        """
        for start in range(0, entries.size, CHUNK):
            chunk = entries[start : start + CHUNK]
            _make_pairs(chunk, hess, 1.0 / grad_unit, 1.0 / hess_unit, pairs)
            last = chunk.size - 1
            for part in range(full):
                base = U(part * 8 * BINS * 2)
                for i in range(chunk.size):
                    ahead = i + AHEAD if i + AHEAD < last else last
                    prefetch(panel, np.int64((chunk[U(ahead)] & ROW) * words))
                    word = panel[(chunk[U(i)] & ROW) * words + U(part)]
                    pair = load(pairs, 2 * i, 2)
                    _add_4_pairs(cells, base, word, pair)
                    _add_4_pairs(cells, base + U(2048), word >> U(32), pair)
            if half:
                for i in range(chunk.size):
                    word = panel[(chunk[U(i)] & ROW) * words + U(full)]
                    _add_4_pairs(cells, U(full * 8 * BINS * 2), word, load(pairs, 2 * i, 2))

    return add_rows


# ---- adding rows to a few features -----------------------------------------------------------------------------------


@inlined
def _bins_of_4(panel, words, column, entry):  # type: ignore[no-untyped-def]
    """The bins of four features of a row, or of the last two of them: from the lowest byte on."""
    return panel[(entry & ROW) * U(words) + U(column >> 3)] >> U(8 * (column & 6))


@compiled
def add_few_quantized(panel, words, first, last, entries, _hess, _grad_unit, _hess_unit, _pairs, cells):  # type: ignore[no-untyped-def]
    """Add at most NARROW_ROWS rows to the cells of features first..last of a panel: even numbers.

    Four features at a time, two where these are not all; the cells are those of the whole panel.
    """
    near = entries.size - AHEAD if entries.size > AHEAD else 0
    column = first
    while column < last:
        base, is_four = U(column * BINS), column % GROUP == 0 and last - column >= GROUP
        for i in range(entries.size):
            if i < near:
                prefetch(panel, np.int64((entries[U(i + AHEAD)] & ROW) * U(words)))
            word, entry = _bins_of_4(panel, words, column, entries[U(i)]), np.int64(entries[U(i)])
            increment = ((entry >> 48) << 40) + (((entry >> 32) & 0xFFFF) << 16) + 1
            if is_four:
                _add_4(cells, base, word, increment)
            else:
                cells[base + (word & U(255))] += increment
                cells[base + U(256) + ((word >> U(8)) & U(255))] += increment
        column += GROUP if is_four else 2


@compiled
def add_few_floats(panel, words, first, last, entries, hess, grad_unit, hess_unit, pairs, cells):  # type: ignore[no-untyped-def]
    """The same for cells of two words."""
    for start in range(0, entries.size, CHUNK):
        chunk = entries[start : start + CHUNK]
        _make_pairs(chunk, hess, 1.0 / grad_unit, 1.0 / hess_unit, pairs)
        column = first
        while column < last:
            base, is_four = U(column * BINS * 2), column % GROUP == 0 and last - column >= GROUP
            for i in range(chunk.size):
                word, pair = _bins_of_4(panel, words, column, chunk[U(i)]), load(pairs, 2 * i, 2)
                if is_four:
                    _add_4_pairs(cells, base, word, pair)
                else:
                    _add_pair(cells, base + ((word << U(1)) & U(510)), pair)
                    _add_pair(cells, base + U(512) + ((word >> U(7)) & U(510)), pair)
            column += GROUP if is_four else 2


# By the number of groups, each with the same arguments. Compiled when first called.
add_quantized = {groups: _quantized_adder(groups) for groups in range(1, PANEL // GROUP + 1)}
add_floats = {groups: _float_adder(groups) for groups in range(1, PANEL // GROUP + 1)}


# ---- cells -----------------------------------------------------------------------------------------------------------


@inlined
def unpack_cell(cells, words, at):  # type: ignore[no-untyped-def]
    """(gradient, hessian, rows) of cell `at` of cells of one, two (narrow) or three (wide) words."""
    if words == 1:
        cell = cells[U(at)]
        return cell >> 40, (cell >> 16) & 0xFFFFFF, cell & 0xFFFF
    if words == 2:
        cell = cells[U(2 * at + 1)]
        return cells[U(2 * at)], cell >> 16, cell & 0xFFFF
    return cells[U(3 * at)], cells[U(3 * at + 1)], cells[U(3 * at + 2)]


@compiled
def add_wide(cells, words, wide):  # type: ignore[no-untyped-def]
    """Add narrow cells to wide ones."""
    for at in range(wide.size // 3):
        grad, hess, rows = unpack_cell(cells, words, at)
        wide[U(3 * at)] += grad
        wide[U(3 * at + 1)] += hess
        wide[U(3 * at + 2)] += rows


@compiled
def subtract_cells(parent, words, child, child_words, out, out_words):  # type: ignore[no-untyped-def]
    """out = parent - child, whose forms differ."""
    for at in range(parent.size // words):
        grad, hess, rows = unpack_cell(parent, words, at)
        child_grad, child_hess, child_rows = unpack_cell(child, child_words, at)
        grad, hess, rows = grad - child_grad, hess - child_hess, rows - child_rows
        if out_words == 1:
            out[at] = (grad << 40) + (hess << 16) + rows
        elif out_words == 2:
            out[2 * at] = grad
            out[2 * at + 1] = (hess << 16) + rows
        else:
            out[3 * at] = grad
            out[3 * at + 1] = hess
            out[3 * at + 2] = rows
