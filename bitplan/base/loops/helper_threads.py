"""Runs a C function of one address (`openmp_threads.c_function`) on threads that wait in compiled code.

A thread of Python's pool starts work after 50 to 80 us, one after the other, for each needs the interpreter's lock.
These never ask for it. The caller begins at once and takes pieces until none is left; helpers join it as they wake up,
and one that comes too late goes to sleep again. The caller waits only for helpers that began. So little work takes no
longer than on one thread, and threads wake each other.

A helper looks for the next work for about a tenth of a millisecond before it sleeps; for one or two within
`staying_awake`, for work that comes piece after piece, on cores that nobody else needs. Where another thread is using
the process's helpers, the caller works alone, or, for long work, has a second set of them.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types

from bitplan.base.loops.addresses import INT64, _pointer, read, write
from bitplan.base.loops.atomics import LINE, wait
from bitplan.base.loops.jit import inlined, on_threads, use_threads
from bitplan.base.loops.openmp_threads import c_function
from bitplan.base.loops.vectors import VectorWriter, define

# Looks of a waiting thread before it yields its core: where threads may be more than cores, and where each has one. A
# pause between looks takes 5 to 50 ns.
SHARED_LOOKS, OWN_LOOKS = 8, 2000
# Looks of a helper before it sleeps, of which one in so many yields: a tenth of a millisecond, and one or two.
SLEEP_LOOKS, AWAKE_LOOKS, LOOKS_A_YIELD = 2_000, 24_000, 8
FAN_OUT = 2  # sleepers that each thread wakes
# Places of the pool, bytes: work that nobody took yet, sleepers that nobody wakes yet, those to be woken by others,
# whether there is work, threads inside and those that came, how many may; the work; a helper's looks; how many helpers
# there are; the system's semaphore.
(
    COUNT,
    SLEEPERS,
    TO_WAKE,
    IS_OPEN,
    INSIDE,
    CAME,
    MOST,
    FUNCTION,
    JOB,
    OWNED,
    STOP,
    PATIENCE,
    THREADS,
    SEMAPHORE,
    POOL_BYTES,
) = (8 * LINE * place for place in range(15))
# A request: the pool, whether this is a helper, and what the caller wants done.
POOL, IS_HELPER, WANTED_FUNCTION, WANTED_JOB, HELPERS, IS_DONE = (8 * place for place in range(6))
INT32 = ir.IntType(32)


def _change(operation: str) -> Any:
    """A function of an address and a number: changes the int64 there, returns the old one; in one order for all."""
    return define(
        2,
        lambda _address, _number: types.int64,
        lambda writer, address, number: writer.builder.atomic_rmw(
            operation,
            _pointer(writer, address, INT64),
            writer.context.cast(writer.builder, number, writer.kinds[1], types.int64),
            "seq_cst",
        ),
    )


def _see(writer: VectorWriter, address: Any) -> Any:
    return writer.builder.load_atomic(_pointer(writer, address, INT64), "seq_cst", 8)


def _take_one(writer: VectorWriter, address: Any, seen: Any) -> Any:
    builder = writer.builder
    less = builder.sub(seen, ir.Constant(INT64, 1))
    pair = builder.cmpxchg(_pointer(writer, address, INT64), seen, less, "seq_cst", "seq_cst")
    return builder.zext(builder.extract_value(pair, 1), INT64)


def _call(writer: VectorWriter, function: Any, job: Any) -> Any:
    kind = ir.FunctionType(ir.VoidType(), [INT64])
    writer.builder.call(writer.builder.inttoptr(function, ir.PointerType(kind)), [job])
    return writer.context.get_dummy_value()


def _system(name: str) -> Any:
    """The system's function of a semaphore's address."""

    def emit(writer: VectorWriter, address: Any) -> Any:
        kind = ir.FunctionType(INT32, [ir.PointerType(ir.IntType(8))])
        function = cgutils.get_or_insert_function(writer.builder.module, kind, name)
        return writer.builder.call(function, [_pointer(writer, address, ir.IntType(8))])

    return define(1, lambda _address: types.int32, emit)


add, swap, see = _change("add"), _change("xchg"), define(1, lambda _address: types.int64, _see)
take_one = define(2, lambda _address, _seen: types.int64, _take_one)  # 1 if it was as seen, and is one less now
call = define(2, lambda _function, _job: types.void, _call)
wake_one, sleep = _system("sem_post"), _system("sem_wait")


@inlined
def _one_less(address):  # type: ignore[no-untyped-def]
    """Take one from a count above zero; 0 if there is none."""
    left = see(address)
    while left > 0:
        if take_one(address, left):
            return 1
        left = see(address)
    return 0


@inlined
def _wake(pool):  # type: ignore[no-untyped-def]
    """Wake some of the sleepers that are still to be woken."""
    for _ in range(FAN_OUT):
        if _one_less(pool + TO_WAKE) and _one_less(pool + SLEEPERS):
            wake_one(pool + SEMAPHORE)


@inlined
def _await_work(pool):  # type: ignore[no-untyped-def]
    """Look for work, then sleep until woken; 1 where work was taken."""
    look = 0
    while look < see(pool + PATIENCE):
        if _one_less(pool + COUNT):
            return 1
        look += 1
        wait(look % LOOKS_A_YIELD, LOOKS_A_YIELD - 2)
    add(pool + SLEEPERS, 1)
    # Work may have come just before this thread was counted; where somebody is waking it already, it sleeps for that.
    if see(pool + COUNT) > 0 and _one_less(pool + SLEEPERS):
        return 0
    while sleep(pool + SEMAPHORE) != 0:  # a signal ends it early
        pass
    return 0


@inlined
def _help(pool):  # type: ignore[no-untyped-def]
    while see(pool + STOP) == 0:
        if not _await_work(pool):
            continue
        add(pool + INSIDE, 1)
        if see(pool + IS_OPEN):  # then it stays so while this thread is inside
            _wake(pool)
            if add(pool + CAME, 1) < read(pool + MOST, np.int64):
                call(read(pool + FUNCTION, np.int64), read(pool + JOB, np.int64))
        add(pool + INSIDE, -1)


@inlined
def _run(pool, function, job, helpers):  # type: ignore[no-untyped-def]
    if swap(pool + OWNED, 1) != 0:
        return 0
    write(pool + FUNCTION, function)
    write(pool + JOB, job)
    write(pool + MOST, helpers)
    write(pool + CAME, np.int64(0))
    swap(pool + IS_OPEN, 1)
    add(pool + COUNT, helpers)
    missing = helpers - (read(pool + THREADS, np.int64) - see(pool + SLEEPERS))  # after those that look for work
    if missing > 0:
        swap(pool + TO_WAKE, missing)
        _wake(pool)
    call(function, job)
    swap(pool + IS_OPEN, 0)
    swap(pool + TO_WAKE, 0)
    while _one_less(pool + COUNT):  # work that nobody took
        pass
    look = 0
    while see(pool + INSIDE) > 0:
        look += 1
        wait(look, OWN_LOOKS if see(pool + PATIENCE) > SLEEP_LOOKS else SHARED_LOOKS)
    swap(pool + OWNED, 0)
    return 1


def serve(request):  # type: ignore[no-untyped-def]
    pool = read(request + POOL, np.int64)
    if read(request + IS_HELPER, np.int64):
        _help(pool)
    else:
        wanted = read(request + WANTED_FUNCTION, np.int64), read(request + WANTED_JOB, np.int64)
        is_done = _run(pool, wanted[0], wanted[1], read(request + HELPERS, np.int64))
        write(request + IS_DONE, np.int64(is_done))


@functools.cache
def _server() -> Any:
    return c_function(serve)


class _Helpers:
    """The threads of this process; more are started when more are asked for."""

    def __init__(self) -> None:
        self._space = np.zeros(POOL_BYTES // 8 + LINE, np.int64)
        self._address = -(-self._space.ctypes.data // (8 * LINE)) * 8 * LINE
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()
        self._patience = ctypes.c_int64.from_address(self._address + PATIENCE)
        self.look_as_long_as_asked()
        self.has_semaphores = ctypes.CDLL(None).sem_init(ctypes.c_void_p(self._address + SEMAPHORE), 0, 0) == 0

    def look_as_long_as_asked(self) -> None:
        self._patience.value = AWAKE_LOOKS if are_awake() else SLEEP_LOOKS

    def run(self, function: Any, job: int, helpers: int) -> bool:
        """False, and nothing is done, if another thread is using them."""
        if len(self._threads) < helpers:
            self._start(helpers)
        request = np.array([self._address, 0, function.address, job, helpers, 0])
        _server()(request.ctypes.data)
        return bool(request[-1])

    def _start(self, helpers: int) -> None:
        request = np.array([self._address, 1])
        with self._starting:
            while len(self._threads) < helpers:
                thread = threading.Thread(
                    target=lambda: _server()(request.ctypes.data), name="bitplan-helper", daemon=True
                )
                thread.start()
                self._threads.append(thread)
            ctypes.c_int64.from_address(self._address + THREADS).value = len(self._threads)

    def stop(self) -> None:
        """The interpreter ends: no thread may be in compiled code when that is gone."""
        ctypes.c_int64.from_address(self._address + STOP).value = 1
        for _ in self._threads:
            ctypes.CDLL(None).sem_post(ctypes.c_void_p(self._address + SEMAPHORE))
        for thread in self._threads:
            thread.join()


_lock = threading.Lock()
_sets: list[_Helpers] = []
_asked = _cores = 0  # threads of blocks of `staying_awake`


def _set(place: int) -> _Helpers | None:
    """None where the system has no semaphores without names: macOS, Windows."""
    if len(_sets) <= place and sys.platform.startswith("linux"):
        with _lock:
            if len(_sets) <= place:
                _sets.append(_Helpers())
    return _sets[place] if _sets and _sets[place].has_semaphores else None


@contextmanager
def staying_awake(threads: int, cores: int) -> Iterator[None]:
    """Within the block, work for so many threads follows work so soon that waking helpers would take longer than it;
    unless all such blocks together ask for more threads than cores: who waits would take a core from who works."""
    _ask(threads, cores)
    try:
        yield
    finally:
        _ask(-threads, cores)


def _ask(threads: int, cores: int) -> None:
    global _asked, _cores
    with _lock:
        _asked, _cores = max(_asked + threads, 0), cores
        for each in _sets:
            each.look_as_long_as_asked()


def are_awake() -> bool:
    """Whether helpers look for work all the time (`staying_awake`)."""
    return 0 < _asked <= _cores


def looks() -> int:
    """How often threads of a team that wait for each other should look before they yield their cores."""
    return OWN_LOOKS if are_awake() else SHARED_LOOKS


def run(function: Any, job: int, threads: int, sets: int = 1) -> None:
    """Call a `c_function` with the address of a job on up to `threads` threads, this one included.

    All calls together do the work, each takes pieces until none is left; how many there are is not certain. Where other
    threads are using all of `sets` sets of helpers, there is one call.
    """
    if threads > 1 and _set(0) is None:
        with use_threads(threads):
            on_threads(lambda _: function(job), range(threads))
        return
    for place in range(sets if threads > 1 else 0):
        helpers = _set(place)
        if helpers is not None and helpers.run(function, job, threads - 1):
            return
    function(job)


def _forget() -> None:
    """A forked process has the pools, but none of their threads."""
    global _sets, _lock, _asked
    _sets, _lock, _asked = [], threading.Lock(), 0


@atexit.register
def stop() -> None:
    """End all helpers; the next `run` starts others."""
    ended = _sets
    _forget()
    for each in ended:
        each.stop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
