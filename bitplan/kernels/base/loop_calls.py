"""C functions that call a numba loop whose arguments lie in memory, in the form in which its machine code takes them.

So a thread that has no interpreter can call the loop: it needs one address. The function is written in LLVM's
language, which takes numba no time.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

Array = np.ndarray[Any, Any]
INT64 = ir.IntType(64)
_numbers = itertools.count()


def words_of(given: Any) -> list[int]:
    """As numba has it: of an array no owner, its size, bytes of a number, where it lies, its shape and strides."""
    if isinstance(given, np.ndarray):
        return [0, 0, given.size, given.itemsize, given.ctypes.data, *given.shape, *given.strides]
    if isinstance(given, tuple):
        return [word for each in given for word in words_of(each)]
    if isinstance(given, float):
        return list(struct.unpack("q", struct.pack("d", given)))
    number = int(given)
    return [number - 2**64 if number >= 2**63 else number]


class CallWriter:
    """Writes the function: `place(word)` is the address of a word of what it gets."""

    def __init__(self, context: Any, function: Any) -> None:
        self.context, self.function = context, function
        self.builder = ir.IRBuilder(function.append_basic_block())
        self._words = self.builder.inttoptr(function.args[0], ir.PointerType(INT64))

    def number(self, value: int) -> Any:
        return ir.Constant(INT64, value)

    def place(self, word: int) -> Any:
        return self.builder.gep(self._words, [self.number(word)])

    def load(self, word: int) -> Any:
        return self.builder.load(self.place(word))

    def value(self, kind: Any, word: int) -> tuple[Any, int]:
        """An argument that begins at this word, and the word after it."""
        if isinstance(kind, types.Array):
            fields = [self.load(word + at) for at in range(5 + 2 * kind.ndim)]
            shape, strides = fields[5 : 5 + kind.ndim], fields[5 + kind.ndim :]
            return self.array(kind, fields[3], fields[4], shape, strides), word + len(fields)
        if isinstance(kind, types.BaseTuple):  # type: ignore[attr-defined]
            values = []
            for each in kind.types:
                value, word = self.value(each, word)
                values.append(value)
            return self.context.make_tuple(self.builder, kind, values), word
        held = self.load(word)
        if kind == types.float64:
            held = self.builder.bitcast(held, ir.DoubleType())
        elif kind == types.boolean:
            held = self.builder.icmp_signed("!=", held, self.number(0))
        return held, word + 1

    def array(self, kind: Any, itemsize: Any, data: Any, shape: list[Any], strides: list[Any]) -> Any:
        builder, size = self.builder, self.number(1)
        view = self.context.make_array(kind)(self.context, builder)
        for length in shape:
            size = builder.mul(size, length)
        view.data = builder.inttoptr(data, self.context.get_data_type(kind.dtype).as_pointer())
        view.nitems, view.itemsize = size, itemsize
        view.shape, view.strides = cgutils.pack_array(builder, shape), cgutils.pack_array(builder, strides)
        view.meminfo = cgutils.get_null_value(view.meminfo.type)
        view.parent = cgutils.get_null_value(view.parent.type)
        return view._getvalue()

    def call(self, loop: Any, kinds: list[Any], values: list[Any]) -> None:
        """Call the loop at this address, which returns nothing."""
        kind = ir.PointerType(self.context.call_conv.get_function_type(types.none, kinds))
        self.context.call_conv.call_function(self.builder, self.builder.inttoptr(loop, kind), types.none, kinds, values)


def written(write: Callable[[CallWriter], None]) -> Any:
    """A C function of one address; `write` writes what it does, up to its end."""
    context = cpu_target.target_context
    context.refresh()
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
    made: Any = ctypes.CFUNCTYPE(None, ctypes.c_int64)(address)
    made.keeps, made.address = library, address
    return made


@functools.cache
def caller(kinds: tuple[Any, ...]) -> Any:
    """Calls the loop whose address is the first word, with arguments of these types, which follow it."""

    def write(writer: CallWriter) -> None:
        values, word = [], 1
        for kind in kinds:
            value, word = writer.value(kind, word)
            values.append(value)
        writer.call(writer.load(0), list(kinds), values)

    return written(write)
