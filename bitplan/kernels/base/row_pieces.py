"""Runs a compiled loop over rows on threads that need no interpreter (`helper_threads`), piece by piece.

A thread takes the next piece of rows until none is left. The loop's arguments lie in one block of memory, a *job*, in
the form in which numba's machine code takes them; a small function, written in LLVM's language so that it takes numba
no time, cuts arrays to the piece and calls the loop.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

from bitplan.kernels.base import helper_threads
from bitplan.kernels.base.jit import address_of, thread_count

Array = np.ndarray[Any, Any]
HELPER_NS = 20_000.0  # of work, for which a thread is asked to help
PIECES_A_THREAD = 4
STEP = 1024  # rows: pieces are multiples of it, so that no two share a cache line
INT64 = ir.IntType(64)
# Words of a job: the next row, rows of a piece and of all, the loop's address; then the arguments.
NEXT, PIECE, COUNT, LOOP, GIVEN = range(5)
_numbers = itertools.count()


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
    """As numba has it: of an array no owner, its size, bytes of a number, where it lies, its shape and strides."""
    if isinstance(given, Cut):
        given = given.array
    if isinstance(given, np.ndarray):
        return [0, 0, given.size, given.itemsize, given.ctypes.data, *given.shape, *given.strides]
    if isinstance(given, First):
        return [given.more]
    if isinstance(given, End):
        return [0]
    if isinstance(given, float):
        return list(struct.unpack("q", struct.pack("d", given)))
    number = int(given)
    return [number - 2**64 if number >= 2**63 else number]


@functools.cache
def _address(loop: Any, kinds: tuple[Any, ...]) -> int:
    return address_of(loop, kinds=kinds)


@functools.cache
def _taker(forms: tuple[tuple[Any, int, int], ...]) -> Any:
    """A C function of a job's address, which takes pieces and calls the loop."""
    context = cpu_target.target_context
    context.refresh()
    library = context.codegen().create_library("take_pieces")
    module = library.create_ir_module("take_pieces")
    name = f"bitplan_take_pieces_{next(_numbers)}"  # of its own, also where two threads make one at once
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [INT64]), name)
    builder = ir.IRBuilder(function.append_basic_block())
    job = builder.inttoptr(function.args[0], ir.PointerType(INT64))

    def number(value: int) -> Any:
        return ir.Constant(INT64, value)

    def place(word: int) -> Any:
        return builder.gep(job, [number(word)])

    piece, count, loop = (builder.load(place(word)) for word in (PIECE, COUNT, LOOP))
    again, work, done = (function.append_basic_block() for _ in range(3))
    builder.branch(again)
    builder.position_at_end(again)
    first = builder.atomic_rmw("add", place(NEXT), piece, "monotonic")
    builder.cbranch(builder.icmp_signed("<", first, count), work, done)
    builder.position_at_end(work)
    end = builder.add(first, piece)
    end = builder.select(builder.icmp_signed("<", end, count), end, count)
    values, word = [], GIVEN
    for kind, axis, share in forms:
        if axis == -3:
            values.append(end)
        elif isinstance(kind, types.Array):
            view = context.make_array(kind)(context, builder)
            fields = [builder.load(place(word + at)) for at in range(5 + 2 * kind.ndim)]
            shape, strides = fields[5 : 5 + kind.ndim], fields[5 + kind.ndim :]
            data = fields[4]
            if axis >= 0:
                begin = builder.sdiv(first, number(share))
                rows = builder.sub(builder.sdiv(builder.add(end, number(share - 1)), number(share)), begin)
                data = builder.add(data, builder.mul(begin, strides[axis]))
                shape[axis] = rows
            size = number(1)
            for length in shape:
                size = builder.mul(size, length)
            view.data = builder.inttoptr(data, context.get_data_type(kind.dtype).as_pointer())
            view.nitems, view.itemsize = size, fields[3]
            view.shape, view.strides = cgutils.pack_array(builder, shape), cgutils.pack_array(builder, strides)
            view.meminfo = cgutils.get_null_value(view.meminfo.type)
            view.parent = cgutils.get_null_value(view.parent.type)
            values.append(view._getvalue())
        else:
            held = builder.load(place(word))
            if axis == -2:
                held = builder.add(held, first)
            elif kind == types.float64:
                held = builder.bitcast(held, ir.DoubleType())
            elif kind == types.boolean:
                held = builder.icmp_signed("!=", held, number(0))
            values.append(held)
        word += 5 + 2 * kind.ndim if isinstance(kind, types.Array) else 1
    kinds = [kind for kind, _, _ in forms]
    target = builder.inttoptr(loop, ir.PointerType(context.call_conv.get_function_type(types.none, kinds)))
    context.call_conv.call_function(builder, target, types.none, kinds, values)
    builder.branch(again)
    builder.position_at_end(done)
    builder.ret_void()
    with global_compiler_lock:
        library.add_ir_module(module)
        library.finalize()
        address = library.get_pointer_to_function(name)
    made: Any = ctypes.CFUNCTYPE(None, ctypes.c_int64)(address)
    made.keeps, made.address = library, address
    return made
