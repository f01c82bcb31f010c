"""Runs a compiled loop on torch's own threads.

torch's CPU build on Linux contains GNU OpenMP, whose threads wait for work by spinning: they start work within a few
microseconds, Python's threads in fifty. `GOMP_parallel` is the function that every program compiled with OpenMP calls;
looked up through torch's library, it is torch's own, with the same threads. Where torch has another OpenMP, and in a
process that was forked (whose pool has no threads), Python's threads run it.

A loop is a C function of one address, that of its job. It is called once on every thread, and all calls together
do the work: each takes pieces until none is left (`addresses.take`).
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba.core import types
from numba.core.ccallback import CFunc

from bitplan.base.loops.jit import LoopCompiler, on_threads, use_threads
from bitplan.base.loops.prepared_code import cache_of

_forked = False


def c_function(function: Callable[..., Any], compiler: type[LoopCompiler] = LoopCompiler) -> Any:
    """Compiles f(address) as a C function, cached on disk; Python may call it, which releases the interpreter lock."""
    compiled: Any = CFunc(function, ((types.int64,), types.void), {}, {"error_model": "numpy"}, pipeline_class=compiler)
    compiled._cache = cache_of(function)
    compiled.compile()
    called: Any = ctypes.CFUNCTYPE(None, ctypes.c_int64)(compiled.address)
    called.keeps, called.address = compiled, compiled.address
    return called


def run(function: Any, job: int, threads: int) -> None:
    """Call a `c_function` with the address of a job on `threads` threads, this one included, and wait."""
    if threads == 1:
        function(job)
        return
    start = None if _forked else _openmp()
    if start is not None:
        start(function.address, job, threads, 0)
        return
    with use_threads(threads):
        on_threads(lambda _: function(job), range(threads))


@functools.cache
def _openmp() -> Any | None:
    """GNU OpenMP's function that starts a parallel region, from torch's library; None if torch has another OpenMP."""
    import torch  # whoever runs products has it

    libraries = sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.so"))
    if not libraries or "OpenMP" not in torch.__config__.parallel_info():
        return None
    try:
        start = ctypes.CDLL(str(libraries[0])).GOMP_parallel
    except (OSError, AttributeError):  # built without OpenMP, or with LLVM's
        return None
    start.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    start.restype = None
    return start


def _has_no_threads() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_has_no_threads)
