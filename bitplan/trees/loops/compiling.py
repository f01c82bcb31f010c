"""How the loops of trees are compiled: each of their variables has one type, which spares time when they first run."""

from __future__ import annotations

import functools

import numpy as np

from bitplan.base.loops import jit, openmp_threads
from bitplan.base.loops.addresses import prefetch_soon

compiled = functools.partial(jit.compiled, compiler=jit.OneTypeCompiler)
inlined = functools.partial(jit.inlined, compiler=jit.OneTypeCompiler)
called = functools.partial(jit.called, compiler=jit.OneTypeCompiler)
c_function = functools.partial(openmp_threads.c_function, compiler=jit.OneTypeCompiler)


@inlined
def prefetch(array, index):  # type: ignore[no-untyped-def]
    """Ask for the cache line of array[index], into all caches: what is only in the first one (`vectors.prefetch`), as
    x86 processors then have it, is lost again before it is used, among the cells of a histogram."""
    prefetch_soon(np.int64(array.ctypes.data) + np.int64(index) * array.itemsize)
