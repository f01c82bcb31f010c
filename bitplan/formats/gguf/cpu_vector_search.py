"""IQ2's and IQ3's blocks by compiled loops: the nearest vectors with the bits of `TorchVectors` in
`formats.gguf.grids`, and numbers with those of `VectorLayout.decode`.

Sums are made for all halves of a vector (64 or 81) and not for all vectors; vectors lie by their first half, and a
first half is passed over where even the best second half could not make it the least. Importing this module imports
numba.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitplan.base.loops.jit import compiled, inlined, on_threads
from bitplan.base.loops.vectors import concatenate, load, store
from bitplan.formats.gguf.cpu_block_search import runs_of
from bitplan.formats.gguf.grids import NUMBERS, Found, VectorLayout, codebook, ninth_sign, signs_of

F32, U32 = np.float32, np.uint32
ZERO = F32(0)
Array = np.ndarray[Any, Any]


@functools.cache
def book_of(ggml_type: str) -> tuple[Array, ...]:
    """A codebook as the loops take it: numbers [K, width], levels [L]; and, by first halves, where the vectors of each
    begin, their second halves and their places in the list.
    """
    book = codebook(ggml_type)
    order = book.first.argsort(stable=True)
    count = len(book.levels) ** (book.numbers.shape[1] // 2)
    begins = torch.searchsorted(book.first[order], torch.arange(count + 1))
    lists = (begins, book.second[order], order)
    return (book.numbers.numpy(), book.levels.numpy(), *(part.numpy().astype(np.uint32) for part in lists))


class CompiledVectors:
    """A `VectorSearch` on the CPU."""

    def nearest(self, x: Tensor, w: Tensor, scale: Tensor, layout: VectorLayout) -> Found:
        count, size = x.shape
        vectors = torch.empty((count, size // layout.width), dtype=torch.int32)
        signs = torch.empty((count, size // 8), dtype=torch.uint8)
        vv, xv = torch.empty(count), torch.empty(count)
        arrays = [tensor.contiguous().numpy() for tensor in (x, w, scale)]
        out = [tensor.numpy() for tensor in (vectors, signs, vv, xv)]
        book, even = book_of(layout.ggml_type), layout.even
        on_threads(lambda run: nearest_of_groups(*arrays, *book, even, run.start, run.stop, *out), runs_of(count))
        return Found(vectors, signs, vv, xv)


@functools.cache
def reading_of(layout: VectorLayout) -> tuple[Array, Array, Array, Any]:
    """What `decode_vectors` reads blocks by: where parts lie, the vectors, signs of a byte or of seven bits, and
    the smallest multiple.
    """
    starts = itertools.accumulate((size for _, size in layout.parts), initial=0)
    at = dict(zip((name for name, _ in layout.parts), starts, strict=False))
    mixed, step = at.get("mixed"), NUMBERS // layout.width // 8
    parts = {
        "vectors": at.get("vectors", mixed),
        "vectors_apart": 8 if "mixed" in at else step,  # bytes from those of 32 numbers to the next
        "words": at.get("words", None if mixed is None else mixed + 4),
        "words_apart": 8 if "mixed" in at else 4,
        **{name: at.get(name) for name in ("pairs", "high", "signs", "scales")},
    }
    bits = torch.arange(256, dtype=torch.uint8)
    signs = signs_of(bits if not layout.even else ninth_sign(bits & 127)).reshape(256, 8).numpy()
    where = np.array([-1 if start is None else start for start in parts.values()], np.int64)
    return where, codebook(layout.ggml_type).numbers.numpy().ravel(), signs.ravel(), F32(layout.unit)


# ---- compiled ------------------------------------------------------------------------------------------------------


@compiled
def decode_vectors(raw, halves, where, book, signs, unit, width, group, out):
    """Decode blocks of 256 numbers: d x multiple of the group x the vector's numbers x their signs.

    halves   d of each block in float32
    where    see `reading_of`; -1 for a part that these blocks have not
    """
    vectors, vectors_apart, words, words_apart = where[0], where[1], where[2], where[3]
    pairs, high, minus, scales = where[4], where[5], where[6], where[7]
    block_bytes = raw.size // halves.size
    for block in range(halves.size):
        base = block * block_bytes
        for eight in range(32):
            part, lane = eight >> 2, eight & 3
            word = U32(0)
            if words >= 0:
                at = base + words + words_apart * part
                word = (
                    U32(raw[at])
                    | U32(raw[at + 1]) << U32(8)
                    | U32(raw[at + 2]) << U32(16)
                    | U32(raw[at + 3]) << U32(24)
                )
            if scales >= 0:
                index = eight * 8 // group
                stored = (raw[base + scales + (index >> 1)] >> (4 * (index & 1))) & 15
            else:
                stored = word >> U32(28)
            if minus >= 0:
                bits = np.int64(raw[base + minus + eight])
            elif pairs >= 0:
                bits = np.int64(raw[base + pairs + 2 * eight + 1] >> 1)
            else:
                bits = np.int64((word >> U32(7 * lane)) & U32(127))
            step = halves[block] * ((F32(stored) * F32(2) + F32(1)) * unit)
            target = 256 * block + 8 * eight
            if width == 8:
                if pairs >= 0:
                    vector = (
                        np.int64(raw[base + pairs + 2 * eight]) | np.int64(raw[base + pairs + 2 * eight + 1] & 1) << 8
                    )
                else:
                    vector = np.int64(raw[base + vectors + vectors_apart * part + lane])
                    if high >= 0:
                        vector |= np.int64((raw[base + high + part] >> (2 * lane)) & 3) << 8
                numbers = load(book, 8 * vector, 8)
            else:
                at = base + vectors + vectors_apart * part + 2 * lane
                first, second = np.int64(raw[at]), np.int64(raw[at + 1])
                if high >= 0:
                    first |= np.int64((raw[base + high + part] >> (2 * lane)) & 1) << 8
                    second |= np.int64((raw[base + high + part] >> (2 * lane + 1)) & 1) << 8
                numbers = concatenate(load(book, 4 * first, 4), load(book, 4 * second, 4))
            store(out, target, step * numbers * load(signs, 8 * bits, 8))


@compiled
def nearest_of_groups(x_NG, w_PG, scale_N, numbers, levels, begins, seconds, indices, even, start, stop, *out):
    vectors_N, signs_N, vv_N, xv_N = out
    size, width = x_NG.shape[1], numbers.shape[1]
    v_G, one_G, two_G = np.empty(size, F32), np.empty(size, F32), np.empty(size, F32)
    room = empty_room()
    pair = np.empty(2, np.int32)
    for group in range(start, stop):
        period, scale = group % w_PG.shape[0], scale_N[group]
        for byte in range(size // 8):
            at = 8 * byte
            signs_N[group, byte] = nearest_eight(
                x_NG, group, at, w_PG, period, at, scale, numbers, levels, begins, seconds, indices, even, room, pair
            )
            for vector in range(8 // width):
                vectors_N[group, at // width + vector] = pair[vector]
            numbers_of_eight(signs_N[group, byte], pair, numbers, v_G, at)
        for i in range(size):
            w, v = w_PG[period, i], v_G[i]
            one_G[i], two_G[i] = w * (v * v), w * (x_NG[group, i] * v)
        half = size
        while half > 1:
            half //= 2
            for i in range(half):
                one_G[i] += one_G[i + half]
                two_G[i] += two_G[i + half]
        vv_N[group], xv_N[group] = one_G[0], two_G[0]


@inlined
def numbers_of_eight(signs, pair, numbers, v, at):
    width = numbers.shape[1]
    for j in range(8):
        number = numbers[pair[j // width], j % width]
        v[at + j] = -number if signs >> j & 1 else number


@inlined
def nearest_eight(
    x_NG, group, first, w_PG, period, w_first, scale, numbers, levels, begins, seconds, indices, even, room, pair
):
    """The vectors of eight numbers, one or two, into `pair`; returns their signs, a bit each.

    room   terms and what wrong signs add, [24 or 32]; both for the two halves of a vector, [64 or 81]
    """
    terms, wrongs, one_H, two_H, one_wrong_H, two_wrong_H = room
    signs, minus, square, double = 0, 0, F32(scale * scale), F32(scale + scale)
    for j in range(8):
        if x_NG[group, first + j] < ZERO:
            signs |= 1 << j
            minus += 1
    turns = even and minus % 2 == 1
    turned, lost, lost_turned, other = -1, ZERO, ZERO, 0
    width = numbers.shape[1]
    for vector in range(8 // width):
        at = vector * width
        for j in range(width):
            x, w = x_NG[group, first + at + j], w_PG[period, w_first + at + j]
            p, q = F32(w * square), F32(double * F32(w * abs(x)))
            if width == 4:
                _terms(levels, p, q, terms, wrongs, 8 * j, 8)
            else:
                _terms(levels, p, q, terms, wrongs, 3 * j, 3)
        if width == 4:
            _sums_of_two(terms, 0, one_H)
            _sums_of_two(terms, 16, two_H)
            if turns:
                _least_of_two(wrongs, 0, one_wrong_H)
                _least_of_two(wrongs, 16, two_wrong_H)
        else:
            _sums_of_four(terms, 0, one_H)
            _sums_of_four(terms, 12, two_H)
            if turns:
                _least_of_four(wrongs, 0, one_wrong_H)
                _least_of_four(wrongs, 12, two_wrong_H)
        if width == 8 and turns:
            turned = 0
            pair[0] = _nearest_vector(room, True, begins, seconds, indices)[1]
            continue
        cost, pair[vector] = _nearest_vector(room, False, begins, seconds, indices)
        if turns:
            cost_turned, index_turned = _nearest_vector(room, True, begins, seconds, indices)
            if vector == 0:
                lost, lost_turned, other = cost, cost_turned, index_turned
            elif F32(lost_turned + cost) <= F32(cost_turned + lost):
                pair[0], turned = other, 0
            else:
                pair[1], turned = index_turned, 1
    if turned >= 0:  # the sign that adds least
        flipped, least = 0, ZERO
        for j in range(width):
            at = turned * width + j
            q = F32(double * F32(w_PG[period, w_first + at] * abs(x_NG[group, first + at])))
            added = F32(numbers[pair[turned], j] * F32(q + q))
            if j == 0 or added < least:
                flipped, least = at, added
        signs ^= 1 << flipped
    return signs


@inlined
def empty_room():
    """Makes the buffers of `nearest_eight`."""
    return (
        np.empty(32, F32),
        np.empty(32, F32),
        np.empty(81, F32),
        np.empty(81, F32),
        np.empty(81, F32),
        np.empty(81, F32),
    )


@inlined
def _terms(levels, p, q, terms, wrongs, at, count):
    for level in range(count):
        number = levels[level]
        terms[at + level] = number * F32(F32(number * p) - q)
        wrongs[at + level] = number * F32(q + q)


@inlined
def _sums_of_two(terms, at, out):
    for a in range(8):
        first = terms[at + a]
        for b in range(8):
            out[8 * a + b] = first + terms[at + 8 + b]


@inlined
def _least_of_two(wrongs, at, out):
    for a in range(8):
        one = wrongs[at + a]
        for b in range(8):
            other = wrongs[at + 8 + b]
            out[8 * a + b] = one if one < other else other


@inlined
def _sums_of_four(terms, at, out):
    """Sums of four numbers with three levels each, 81."""
    for a in range(3):
        for b in range(3):
            first_two = terms[at + a] + terms[at + 3 + b]
            for c in range(3):
                for d in range(3):
                    out[27 * a + 9 * b + 3 * c + d] = first_two + F32(terms[at + 6 + c] + terms[at + 9 + d])


@inlined
def _least_of_four(wrongs, at, out):
    for a in range(3):
        for b in range(3):
            one = min(wrongs[at + a], wrongs[at + 3 + b])
            for c in range(3):
                for d in range(3):
                    other = min(wrongs[at + 6 + c], wrongs[at + 9 + d])
                    out[27 * a + 9 * b + 3 * c + d] = one if one < other else other


@inlined
def _nearest_vector(room, turns, begins, seconds, indices):
    """The least cost of a vector, with its index; of equal ones the first."""
    terms, wrongs, one_H, two_H, one_wrong_H, two_wrong_H = room
    count = begins.size - 1
    start, least_second, least_turn, wrong = 0, ZERO, F32(np.inf), ZERO
    if count == 64:  # the sum of least terms is the least of the sums
        start = 8 * _least(terms, 0, 8)[1] + _least(terms, 8, 8)[1]
        least_second = F32(_least(terms, 16, 8)[0] + _least(terms, 24, 8)[0])
        if turns:
            least_turn = min(_least(wrongs, 16, 8)[0], _least(wrongs, 24, 8)[0])
    else:
        for j in range(4):
            start = 3 * start + _least(terms, 3 * j, 3)[1]
        first_half, second_half = (
            _least(terms, 12, 3)[0] + _least(terms, 15, 3)[0],
            _least(terms, 18, 3)[0] + _least(terms, 21, 3)[0],
        )
        least_second = F32(first_half + second_half)
        if turns:
            for j in range(4, 8):
                least_turn = min(least_turn, _least(wrongs, 3 * j, 3)[0])
    best, index = F32(np.inf), np.uint32(0)
    for step in range(count + 1):
        part = np.uint32(step - 1 if step > 0 else start)
        first = one_H[part]
        bound = F32(first + least_second)
        if turns:
            wrong = one_wrong_H[part]
            bound = F32(bound + (wrong if wrong < least_turn else least_turn))
        if bound > best or (step > 0 and part == start):
            continue
        for at in range(begins[part], begins[part + np.uint32(1)]):
            second = seconds[at]
            cost = F32(first + two_H[second])
            if turns:
                other = two_wrong_H[second]
                cost = F32(cost + (wrong if wrong < other else other))
            if cost < best or (cost == best and indices[at] < index):
                best, index = cost, indices[at]
    return best, index


@inlined
def _least(numbers, first, count):
    """The least of some numbers, with its index."""
    least, index = numbers[first], 0
    for at in range(1, count):
        number = numbers[first + at]
        index = at if number < least else index
        least = number if number < least else least
    return least, index
