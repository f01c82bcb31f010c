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

Bins lie in panels of 16 features: 16 bytes a row, read as two uint64. The cells of a panel (32 KiB) stay in the L1
cache, threads take whole panels, and the rows of a node, which are scattered, are asked for 16 rows ahead.
Neoverse-N1, one thread, ns per row and feature, machine half busy: 0.82 over all rows, 0.90 gathering every tenth,
1.2 gathering 4096 of a million; 28 features in rows of 32 bytes 0.81 and 1.95 (0.85 where rows are aligned); indices
that numba must check for a minus sign 0.95 and 1.03.
"""

from __future__ import annotations

import numpy as np

from bitplan.kernels.jit import compiled, inlined
from bitplan.kernels.vectors import load, prefetch, store

BINS = 256
PANEL = 16  # features
NARROW_ROWS = 65535
CHUNK = 4096  # rows that stay in the L2 cache between the two halves of a panel
AHEAD = 16  # rows
U = np.uint64  # numba checks signed indices for a minus sign, and mixes uint64 with int64 into float64


@inlined
def _add_4(cells, base, word, increment):  # type: ignore[no-untyped-def]
    cells[base + (word & U(255))] += increment
    cells[base + U(256) + ((word >> U(8)) & U(255))] += increment
    cells[base + U(512) + ((word >> U(16)) & U(255))] += increment
    cells[base + U(768) + ((word >> U(24)) & U(255))] += increment


@inlined
def _add_8(cells, base, word, increment):  # type: ignore[no-untyped-def]
    _add_4(cells, base, word, increment)
    _add_4(cells, base + U(1024), word >> U(32), increment)


@compiled
def increments_i16(rows, grads, hess, _grad_unit, _hess_unit, increments):  # type: ignore[no-untyped-def]
    """What each row adds: int8 gradients, uint8 hessians."""
    last = rows.size - 1
    for i in range(rows.size):
        ahead = np.int64(rows[U(min(i + AHEAD, last))])
        prefetch(grads, ahead)
        prefetch(hess, ahead)
        row = U(rows[U(i)])
        increments[U(i)] = (np.int64(grads[row]) << 40) + (np.int64(hess[row]) << 16) + 1


@compiled
def increments_i8(rows, grads, hess, _grad_unit, _hess_unit, increments):  # type: ignore[no-untyped-def]
    """The same for 4 + 4 bits: two rows share a byte of `grads` and one of `hess`, the even row in the low half."""
    last = rows.size - 1
    for i in range(rows.size):
        ahead = np.int64(rows[U(min(i + AHEAD, last))]) >> 1
        prefetch(grads, ahead)
        prefetch(hess, ahead)
        row = U(rows[U(i)])
        shift = np.int64((row & U(1)) << U(2))
        grad = ((np.int64(grads[row >> U(1)]) >> shift & 15) ^ 8) - 8
        weight = np.int64(hess[row >> U(1)]) >> shift & 15
        increments[U(i)] = (grad << 40) + (weight << 16) + 1


@compiled
def increments_f32(rows, grads, hess, grad_unit, hess_unit, increments):  # type: ignore[no-untyped-def]
    """Two words a row: float32 in multiples of a unit, 2^-31 of the largest hessian, far less for gradients."""
    per_grad, per_hess, last = 1.0 / grad_unit, 1.0 / hess_unit, rows.size - 1
    for i in range(rows.size):
        ahead = np.int64(rows[U(min(i + AHEAD, last))])
        prefetch(grads, ahead)
        prefetch(hess, ahead)
        row = U(rows[U(i)])
        increments[U(2 * i)] = np.int64(np.rint(np.float64(grads[row]) * per_grad))
        increments[U(2 * i + 1)] = (np.int64(np.rint(np.float64(hess[row]) * per_hess)) << 16) + 1


@compiled
def add_rows(panel, width, rows, increments, cells):  # type: ignore[no-untyped-def]
    """Add one-word increments of at most NARROW_ROWS rows to the cells of one panel.

    One loop per width, because a trip count known to the compiler is unrolled.
    """
    last = rows.size - 1
    if width <= 4:
        for i in range(rows.size):
            prefetch(panel, np.int64(rows[U(min(i + AHEAD, last))]) << 1)
            _add_4(cells, U(0), panel[U(rows[U(i)]) << U(1)], increments[U(i)])
    elif width <= 8:
        for i in range(rows.size):
            prefetch(panel, np.int64(rows[U(min(i + AHEAD, last))]) << 1)
            _add_8(cells, U(0), panel[U(rows[U(i)]) << U(1)], increments[U(i)])
    elif width <= 12:
        for i in range(rows.size):
            prefetch(panel, np.int64(rows[U(min(i + AHEAD, last))]) << 1)
            at = U(rows[U(i)]) << U(1)
            _add_8(cells, U(0), panel[at], increments[U(i)])
            _add_4(cells, U(2048), panel[at + U(1)], increments[U(i)])
    else:
        for i in range(rows.size):
            prefetch(panel, np.int64(rows[U(min(i + AHEAD, last))]) << 1)
            at = U(rows[U(i)]) << U(1)
            _add_8(cells, U(0), panel[at], increments[U(i)])
            _add_8(cells, U(2048), panel[at + U(1)], increments[U(i)])


@inlined
def _add_pair(cells, at, pair):  # type: ignore[no-untyped-def]
    store(cells, at, load(cells, at, 2) + pair)  # one 16-byte vector: gradient, and hessian with row count


@inlined
def _add_4_pairs(cells, base, word, pair):  # type: ignore[no-untyped-def]
    _add_pair(cells, base + ((word << U(1)) & U(510)), pair)
    _add_pair(cells, base + U(512) + ((word >> U(7)) & U(510)), pair)
    _add_pair(cells, base + U(1024) + ((word >> U(15)) & U(510)), pair)
    _add_pair(cells, base + U(1536) + ((word >> U(23)) & U(510)), pair)


@compiled
def add_rows_in_pairs(panel, width, rows, increments, cells):  # type: ignore[no-untyped-def]
    """The same for increments of two words. 8 features at a time: their cells are as large as a panel of one word."""
    for start in range(0, rows.size, CHUNK):
        chunk, pairs = rows[start : start + CHUNK], increments[2 * start : 2 * (start + CHUNK)]
        last = chunk.size - 1
        for part in range((width + 7) // 8):
            base = U(part * 8 * BINS * 2)
            both = part * 8 + 4 < width
            for i in range(chunk.size):
                prefetch(panel, np.int64(chunk[U(min(i + AHEAD, last))]) << 1)
                word = panel[(U(chunk[U(i)]) << U(1)) + U(part)]
                pair = load(pairs, 2 * i, 2)
                _add_4_pairs(cells, base, word, pair)
                if both:
                    _add_4_pairs(cells, base + U(2048), word >> U(32), pair)


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
    """out = parent - child, in whatever form each has; out may be parent itself where their forms agree."""
    if (
        words == child_words == out_words
    ):  # fields of a difference never borrow: every field of the child is within its parent's
        for at in range(out.size):
            out[at] = parent[at] - child[at]
        return
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
