"""Runs a compiled loop over rows on threads that need no interpreter (`helper_threads`), piece by piece.

A thread takes the next piece of rows until none is left. The loop's arguments lie in one block of memory, a *job*, in
the form in which the loop's machine code takes them. A small C function gets the job's address, cuts arrays to the
piece and calls the loop, so that a thread without an interpreter can run it. That function is written in LLVM's
language (`CallWriter`), which takes numba no time.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

from bitplan.base.loops import helper_threads
from bitplan.base.loops.jit import address_of, thread_count

# ---- loop calls ------------------------------------------------------------------------------------------------------


Array = np.ndarray[Any, Any]
INT64 = ir.IntType(64)
_numbers = itertools.count()


ADDRESS: Any = ctypes.addressof
BYTE: Any = ctypes.c_char.from_buffer


def data_address(array: Array) -> int:
    """The address of an array's numbers, in a quarter of the time that numpy takes to say it."""
    try:
        return int(ADDRESS(BYTE(array)))
    except (BufferError, TypeError, ValueError):  # with gaps, of no numbers, or not to be written
        return int(array.ctypes.data)


# Words of an array.
SIZE, DATA, SHAPE = 2, 4, 5
RESULTS = 2  # arguments of machine code that come first: where a loop's result goes, and its error


def words_of(argument: Any) -> list[int]:
    """An argument as 64-bit words for machine code; of an array size, item size, address, shape and strides."""
    if isinstance(argument, np.ndarray):
        return [0, 0, argument.size, argument.itemsize, data_address(argument), *argument.shape, *argument.strides]
    if isinstance(argument, tuple):
        return [word for item in argument for word in words_of(item)]
    if isinstance(argument, float):
        return list(struct.unpack("q", struct.pack("d", argument)))
    number = int(argument)
    return [number - 2**64 if number >= 2**63 else number]


class CallWriter:
    """Writes LLVM code of a function that gets the address of an array of 64-bit words, loads them and calls loops."""

    def __init__(self, context: Any, function: Any) -> None:
        self.context, self.function = context, function
        self.builder = ir.IRBuilder(function.append_basic_block())
        self._words = self.builder.inttoptr(function.args[0], ir.PointerType(INT64))

    def number(self, value: int) -> Any:
        return ir.Constant(INT64, value)

    def address(self, word: int) -> Any:
        return self.builder.gep(self._words, [self.number(word)])

    def load(self, word: int) -> Any:
        return self.builder.load(self.address(word))

    def count(self, kind: Any) -> int:
        """How many words machine code takes for an argument of this type."""
        return len(self.context.call_conv.get_function_type(types.none, [kind]).args) - RESULTS

    def call(self, loop: Any, kinds: list[Any], words: list[Any]) -> None:
        """Write a call of the loop at address `loop`, with each word as one argument of its machine code."""
        builder, kind = self.builder, self.context.call_conv.get_function_type(types.none, kinds)
        values = [cgutils.alloca_once(builder, slot.pointee) for slot in kind.args[:RESULTS]]
        for kind_of_word, word in zip(kind.args[RESULTS:], words, strict=True):
            if isinstance(kind_of_word, ir.PointerType):
                values.append(builder.inttoptr(word, kind_of_word))
            elif isinstance(kind_of_word, ir.DoubleType):
                values.append(builder.bitcast(word, kind_of_word))
            else:
                values.append(word if kind_of_word == INT64 else builder.trunc(word, kind_of_word))
        builder.call(builder.inttoptr(loop, ir.PointerType(kind)), values)


def written(write: Callable[[CallWriter], None]) -> Any:
    """Compile a C function of one address; `write` writes its body with the CallWriter that it gets."""
    context = cpu_target.target_context
    library = context.codegen().create_library("call_loop")
    module = library.create_ir_module("call_loop")
    name = f"bitplan_call_loop_{next(_numbers)}"  # of its own, also where two threads make one at once
    writer = CallWriter(context, ir.Function(module, ir.FunctionType(ir.VoidType(), [INT64]), name))
    write(writer)
    writer.builder.ret_void()
    with global_compiler_lock:
        library.add_ir_module(module)
        library.finalize()
        address = library.get_pointer_to_function(name)
    function: Any = ctypes.CFUNCTYPE(None, ctypes.c_int64)(address)
    function.keeps, function.address = library, address
    return function


def form_of(argument: Any) -> Any:
    """What decides an argument's type in loops, to look up what is known: to ask numba takes longer than the work."""
    if isinstance(argument, np.ndarray):
        return argument.dtype, argument.ndim, argument.flags.num
    return tuple(map(form_of, argument)) if isinstance(argument, tuple) else type(argument)


def call_of(loop: Any, arguments: tuple[Any, ...]) -> tuple[Any, int]:
    """A C function of an address of words, which calls the loop at the first with such arguments; that address."""
    key = loop, form_of(arguments)
    if key not in _calls:
        kinds = tuple(map(numba.typeof, arguments))
        _calls[key] = _caller(kinds), address_of(loop, kinds=kinds)
    return _calls[key]


_calls: dict[Any, tuple[Any, int]] = {}


@functools.cache
def _caller(kinds: tuple[Any, ...]) -> Any:
    def write(writer: CallWriter) -> None:
        words = [writer.load(1 + word) for word in range(sum(map(writer.count, kinds)))]
        writer.call(writer.load(0), list(kinds), words)

    return written(write)


# ---- row pieces ------------------------------------------------------------------------------------------------------


HELPER_NS, AWAKE_HELPER_NS = 20_000.0, 7_000.0  # of work, for which a thread is asked to help: one that is awake
PIECES_A_THREAD = 4
STEP = 1024  # rows: pieces are multiples of it, so that no two share a cache line
# Words of a job: the next row, rows of a piece and of all, the loop's address; then the arguments.
NEXT, PIECE, COUNT, LOOP, GIVEN = range(5)


@dataclass(slots=True)  # not frozen: that takes three times as long to make, and small tables make many
class Cut:
    """An argument of `run`: of the array the loop gets a piece's rows, cut along `axis`, `share` to a number."""

    array: Array
    axis: int = 0
    share: int = 1


@dataclass(slots=True)
class First:
    """An argument of `run`: the loop gets the number of a piece's first row, plus `more`."""

    more: int = 0


@dataclass(slots=True)
class End:
    """An argument of `run`: the loop gets the number after a piece's last row."""


def threads_for(count: int, row_ns: float) -> int:
    work = count * row_ns
    if work < 2 * AWAKE_HELPER_NS:
        return 1
    least = AWAKE_HELPER_NS if helper_threads.are_awake() else HELPER_NS
    return min(thread_count(), max(int(work / least), 1))


def piece_rows(count: int, threads: int, pieces: int = PIECES_A_THREAD) -> int:
    """How many rows each piece gets when `count` rows are divided for this many threads."""
    return max(-(-count // (threads * pieces * STEP)), 1) * STEP


def run(loop: Any, count: int, row_ns: float, *arguments: Any, pieces: int = PIECES_A_THREAD) -> None:
    """Call a `compiled` loop that returns nothing for all of `count` rows, of which each takes `row_ns`.

    Arguments are as they are, or `Cut`, `First`, `End`. Each thread gets about so many pieces.
    """
    threads = threads_for(count, row_ns)
    if threads == 1:
        loop(*[
            argument.array if (kind := type(argument)) is Cut
            else argument.more if kind is First
            else count if kind is End
            else argument
            for argument in arguments
        ])  # fmt: skip
        return
    key = loop, *map(_key, arguments)
    if key not in _known:
        forms = tuple(map(_form_of, arguments))
        _known[key] = _taker(forms), address_of(loop, kinds=tuple(kind for kind, _, _ in forms))
    taker, address = _known[key]
    job = [0, piece_rows(count, threads, pieces), count, address]
    for argument in arguments:
        job += _words(argument)
    words = np.array(job, np.int64)
    helper_threads.run(taker, words.ctypes.data, threads)


_known: dict[Any, tuple[Any, int]] = {}  # by loop and arguments: the function that takes pieces, and the loop's address


def _key(argument: Any) -> Any:
    if isinstance(argument, Cut):
        return form_of(argument.array), argument.axis, argument.share
    return form_of(argument)


def _form_of(argument: Any) -> tuple[Any, int, int]:
    """The type that the loop gets; the axis along which it is cut (-1: it is not, -2: first row, -3: end); share."""
    if isinstance(argument, Cut):
        kind = numba.typeof(argument.array)
        return (kind.copy(layout="A") if argument.axis else kind), argument.axis, argument.share
    if isinstance(argument, First | End):
        return types.int64, -2 if isinstance(argument, First) else -3, 1
    return numba.typeof(argument), -1, 1


def _words(argument: Any) -> list[int]:
    if isinstance(argument, First):
        return [argument.more]
    return [0] if isinstance(argument, End) else words_of(argument.array if isinstance(argument, Cut) else argument)


@functools.cache
def _taker(forms: tuple[tuple[Any, int, int], ...]) -> Any:
    """A C function of a job's address that takes one piece of rows after the other and calls the loop on it."""
    return written(lambda writer: _write_taker(writer, forms))


def _write_taker(writer: CallWriter, forms: tuple[tuple[Any, int, int], ...]) -> None:
    builder, number = writer.builder, writer.number
    piece, count, loop = (writer.load(word) for word in (PIECE, COUNT, LOOP))
    again, work, done = (writer.function.append_basic_block() for _ in range(3))
    builder.branch(again)
    builder.position_at_end(again)
    first = builder.atomic_rmw("add", writer.address(NEXT), piece, "monotonic")
    builder.cbranch(builder.icmp_signed("<", first, count), work, done)
    builder.position_at_end(work)
    end = builder.add(first, piece)
    end = builder.select(builder.icmp_signed("<", end, count), end, count)
    values, word = [], GIVEN
    for kind, axis, share in forms:
        words = [writer.load(word + at) for at in range(writer.count(kind))]
        word += len(words)
        if axis >= 0:
            length, stride = SHAPE + axis, SHAPE + kind.ndim + axis
            begin = builder.sdiv(first, number(share))
            words[length] = builder.sub(builder.sdiv(builder.add(end, number(share - 1)), number(share)), begin)
            words[DATA] = builder.add(words[DATA], builder.mul(begin, words[stride]))
            words[SIZE] = functools.reduce(builder.mul, words[SHAPE : SHAPE + kind.ndim])
        elif axis < -1:
            words = [end if axis == -3 else builder.add(words[0], first)]
        values += words
    writer.call(loop, [kind for kind, _, _ in forms], values)
    builder.branch(again)
    builder.position_at_end(done)
