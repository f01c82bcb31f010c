"""Atomics inside numba, with which threads of a team wait for each other without the interpreter.

All work on places of an int64 array that the threads share; use places in different cache lines (`LINE` apart). A wait
looks so many times, with pauses, and then yields the core between looks: a team may have more threads than cores. Where
other processes want the core, Linux lets them have it for milliseconds then.
"""

# mypy: disable-error-code="untyped-decorator"
from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic

from bitplan.base.loops.jit import inlined

LINE = 16  # int64 between places: two cache lines, since processors fetch them in pairs
CLOSED = 2**40  # more threads than there are
INT32, INT64 = ir.IntType(32), ir.IntType(64)
PAUSES: dict[str, tuple[str, list[Any]]] = {  # LLVM's functions, by processor, with their arguments
    "x86_64": ("llvm.x86.sse2.pause", []),
    "aarch64": ("llvm.aarch64.isb", [ir.Constant(INT32, 15)]),
}


def _pointer(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [index])


def _read_and_change(operation: str) -> Any:
    """A function of an array, a place and a value: changes the number there by `operation`, returns the old one."""

    def build(_typing: Any, array: Any, index: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            at = _pointer(context, builder, array, values[0], values[1])
            return builder.atomic_rmw(operation, at, context.cast(builder, values[2], value, types.int64), "acq_rel")

        return types.int64(array, index, value), generate

    return intrinsic(build)


fetch_add, exchange = _read_and_change("add"), _read_and_change("xchg")


@intrinsic
def read(_typing: Any, array: Any, index: Any) -> Any:
    """array[index]; also shows everything that was written before this number."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.load_atomic(_pointer(context, builder, array, values[0], values[1]), "acquire", 8)

    return types.int64(array, index), generate


@intrinsic
def write(_typing: Any, array: Any, index: Any, value: Any) -> Any:
    """array[index] = value, after all earlier writes."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        number = context.cast(builder, values[2], value, types.int64)
        builder.store_atomic(number, _pointer(context, builder, array, values[0], values[1]), "release", 8)
        return context.get_dummy_value()

    return types.void(array, index, value), generate


@intrinsic
def give_way(_typing: Any) -> Any:
    """Yield this core to another thread."""

    def generate(context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(INT32, []), "sched_yield")
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def pause(_typing: Any) -> Any:
    """A moment in which a processor leaves what it has to the other thread of its core: 5 to 50 ns."""

    def generate(context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        name, given = PAUSES.get(platform.machine(), ("", []))
        if name:
            kind = ir.FunctionType(ir.VoidType(), [each.type for each in given])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), given)
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def cycles(_typing: Any) -> Any:
    """The processor's clock, which all cores share; it takes some 20 cycles. Always 0 where that is not known."""

    def generate(_context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        if platform.machine() == "aarch64":
            return builder.asm(ir.FunctionType(INT64, []), "mrs $0, cntvct_el0", "=r", [], side_effect=True)
        if platform.machine() != "x86_64":
            return ir.Constant(INT64, 0)
        name, kind = "llvm.readcyclecounter", ir.FunctionType(INT64, [])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])

    return types.int64(), generate


@inlined
def wait(look, looks):  # type: ignore[no-untyped-def]
    """What to do after a look that saw nothing new."""
    if look > looks:
        give_way()
    else:
        pause()


@inlined
def wait_for_change(places, place, seen, looks):  # type: ignore[no-untyped-def]
    """Wait until places[place] is not `seen`; from `looks` looks on the core is yielded."""
    look = 0
    while read(places, place) == seen:
        look += 1
        wait(look, looks)


@inlined
def lock(places, place, looks):  # type: ignore[no-untyped-def]
    look = 0
    while exchange(places, place, 1) != 0:
        while read(places, place) != 0:
            look += 1
            wait(look, looks)


@inlined
def unlock(places, place):  # type: ignore[no-untyped-def]
    write(places, place, 0)


@inlined
def meet(places, place, team, looks):  # type: ignore[no-untyped-def]
    """Wait until all threads of a team are here. Uses `place` and `place + LINE`."""
    turn = read(places, place + LINE)
    if fetch_add(places, place, 1) == team - 1:
        write(places, place, 0)
        fetch_add(places, place + LINE, 1)
    else:
        wait_for_change(places, place + LINE, turn, looks)


@inlined
def gather(me, places, place, team, looks):  # type: ignore[no-untyped-def]
    """`meet` in two halves: the first thread goes on when all others wait, these when it calls `release`."""
    if me == 0:
        look = 0
        while read(places, place) < team - 1:
            look += 1
            wait(look, looks)
        write(places, place, 0)
    else:
        turn = read(places, place + LINE)
        fetch_add(places, place, 1)
        wait_for_change(places, place + LINE, turn, looks)


@inlined
def release(places, place):  # type: ignore[no-untyped-def]
    fetch_add(places, place + LINE, 1)


@inlined
def join(places, came, size, most, patience, looks):  # type: ignore[no-untyped-def]
    """The number of this thread in a team, from 0, and how many it has; -1: it began without this thread.

    At most `most` come. The first waits for the others, but yields no more often than `patience`: which is sure to end.
    """
    me, look = fetch_add(places, came, 1), 0
    if me >= CLOSED:
        return np.int64(-1), np.int64(0)
    if me == 0:
        while read(places, came) < most and look <= looks + patience:
            look += 1
            wait(look, looks)
        write(places, size, exchange(places, came, CLOSED))
    else:
        wait_for_change(places, size, 0, looks)
    return me, read(places, size)
