"""Runs a compiled loop over rows on threads that need no interpreter (`helper_threads`), piece by piece.

A thread takes the next piece of rows until none is left. The loop's arguments lie in one block of memory, a *job*; a
small function (`loop_calls`) cuts arrays to the piece and calls the loop.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numba.core import types

from bitplan.kernels.base import helper_threads
from bitplan.kernels.base.jit import address_of, thread_count
from bitplan.kernels.base.loop_calls import CallWriter, words_of, written

Array = np.ndarray[Any, Any]
HELPER_NS = 20_000.0  # of work, for which a thread is asked to help
PIECES_A_THREAD = 4
STEP = 1024  # rows: pieces are multiples of it, so that no two share a cache line
# Words of a job: the next row, rows of a piece and of all, the loop's address; then the arguments.
NEXT, PIECE, COUNT, LOOP, GIVEN = range(5)


@dataclass(frozen=True)
class Cut:
    """An array of which the loop gets the rows of a piece: along `axis`, `share` rows to a number."""

    array: Array
    axis: int = 0
    share: int = 1


@dataclass(frozen=True)
class First:
    """The number of a piece's first row, and a number that is added to it."""

    more: int = 0


@dataclass(frozen=True)
class End:
    """The number after a piece's last row."""


def threads_for(count: int, row_ns: float) -> int:
    return min(thread_count(), max(int(count * row_ns / HELPER_NS), 1))


def piece_rows(count: int, threads: int) -> int:
    """Rows of a piece."""
    return max(-(-count // (threads * PIECES_A_THREAD * STEP)), 1) * STEP


def run(loop: Any, count: int, row_ns: float, *arguments: Any) -> None:
    """Call a `compiled` loop that returns nothing for all of `count` rows, of which each takes `row_ns`.

    Arguments are as they are, or `Cut`, `First`, `End`.
    """
    threads = threads_for(count, row_ns)
    if threads == 1:
        loop(*(_whole(each, count) for each in arguments))
        return
    forms = tuple(map(_form_of, arguments))
    job = [0, piece_rows(count, threads), count, _address(loop, tuple(kind for kind, _, _ in forms))]
    for each in arguments:
        job += _words(each)
    words = np.array(job, np.int64)
    helper_threads.run(_taker(forms), words.ctypes.data, threads)


def _whole(given: Any, count: int) -> Any:
    if isinstance(given, Cut):
        return given.array
    return given.more if isinstance(given, First) else count if isinstance(given, End) else given


def _form_of(given: Any) -> tuple[Any, int, int]:
    """The type that the loop gets; the axis along which it is cut (-1: it is not, -2: first row, -3: end); share."""
    if isinstance(given, Cut):
        kind = numba.typeof(given.array)
        return (kind.copy(layout="A") if given.axis else kind), given.axis, given.share
    if isinstance(given, First | End):
        return types.int64, -2 if isinstance(given, First) else -3, 1
    return numba.typeof(given), -1, 1


def _words(given: Any) -> list[int]:
    if isinstance(given, First):
        return [given.more]
    return [0] if isinstance(given, End) else words_of(given.array if isinstance(given, Cut) else given)


@functools.cache
def _address(loop: Any, kinds: tuple[Any, ...]) -> int:
    return address_of(loop, kinds=kinds)


@functools.cache
def _taker(forms: tuple[tuple[Any, int, int], ...]) -> Any:
    """A C function of a job's address, which takes pieces and calls the loop."""
    return written(lambda writer: _write_taker(writer, forms))


def _write_taker(writer: CallWriter, forms: tuple[tuple[Any, int, int], ...]) -> None:
    builder, number = writer.builder, writer.number
    piece, count, loop = (writer.load(word) for word in (PIECE, COUNT, LOOP))
    again, work, done = (writer.function.append_basic_block() for _ in range(3))
    builder.branch(again)
    builder.position_at_end(again)
    first = builder.atomic_rmw("add", writer.place(NEXT), piece, "monotonic")
    builder.cbranch(builder.icmp_signed("<", first, count), work, done)
    builder.position_at_end(work)
    end = builder.add(first, piece)
    end = builder.select(builder.icmp_signed("<", end, count), end, count)
    values, word = [], GIVEN
    for kind, axis, share in forms:
        if axis >= 0:
            itemsize, data, *rest = (writer.load(word + at) for at in range(3, 5 + 2 * kind.ndim))
            shape, strides = rest[: kind.ndim], rest[kind.ndim :]
            begin = builder.sdiv(first, number(share))
            shape[axis] = builder.sub(builder.sdiv(builder.add(end, number(share - 1)), number(share)), begin)
            data = builder.add(data, builder.mul(begin, strides[axis]))
            values.append(writer.array(kind, itemsize, data, shape, strides))
            word += 5 + 2 * kind.ndim
            continue
        value, word = writer.value(kind, word)
        values.append(end if axis == -3 else builder.add(value, first) if axis == -2 else value)
    writer.call(loop, [kind for kind, _, _ in forms], values)
    builder.branch(again)
    builder.position_at_end(done)
