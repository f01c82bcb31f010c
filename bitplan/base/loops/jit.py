"""Compiles CPU loops with numba: without the interpreter lock, cached on disk.

Nothing is compiled at import. The first call of a kernel takes one to a few seconds, once per machine: the
machine code goes to `__pycache__` beside the source (or numba's own folder where that is read-only), and later
processes load it in milliseconds. numba checks only the file of the function itself, so after an edit of a module
whose functions are compiled *into* others (`vectors`), delete `__pycache__`.

Loops are spread over Python threads, not over numba's: numba's own threading layers kill the process when two threads
call them at once (workqueue) or after a fork (OpenMP), and spin beside torch's threads.
"""

from __future__ import annotations

import contextvars
import functools
import gc
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from llvmlite.binding import ffi as llvm  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import intrinsic

from bitplan.base.loops.prepared_code import cache_of

# What it takes to have one more thread do a part: the interpreter's lock goes from thread to thread, and each has to
# wake up for it. On a virtual machine with 16 cores 44 us for each of 16 threads, 81 for the second of two; and n
# threads are not n times as fast. Fits of 100,000 rows took least time there with 100 to 150 us (55: up to a fifth
# more).
HAND_OUT_NS = 100_000
Piece = TypeVar("Piece")
Result = TypeVar("Result")
# Passes of numba's compiler over what loops do not have: closures, `with`, exceptions, sums of whole arrays.
UNUSED_PASSES = {
    "WithLifting",
    "InlineClosureLikes",
    "RewriteDynamicRaises",
    "MakeFunctionToJitFunction",
    "FindLiterallyCalls",
    "LiteralUnroll",
    "LiteralPropagationSubPipelinePass",
    "InlineOverloads",
    "NopythonRewrites",
    "DumpParforDiagnostics",
}


class LoopCompiler(CompilerBase):  # type: ignore[misc]
    """numba's compiler without what loops do not need. It makes no cycles worth collecting while it runs, but so many
    objects that Python would look for them again and again. And it finds out again and again what the sum of two
    integers is: that is remembered while a function is compiled.
    """

    unused_passes = UNUSED_PASSES

    def define_pipelines(self) -> list[Any]:
        manager = DefaultPassBuilder.define_nopython_pipeline(self.state)
        manager.passes = [each for each in manager.passes if each[0].__name__ not in self.unused_passes]
        return [manager]

    def compile_extra(self, func: Any) -> Any:
        was_enabled, context = gc.isenabled(), self.state.typingctx
        resolve = context.resolve_function_type
        known: dict[Any, Any] = {}

        def remembered(function: Any, arguments: Any, named: Any) -> Any:
            if named or not all(isinstance(kind, types.Type) for kind in arguments):
                return type(context).resolve_function_type(context, function, arguments, named)
            key = function, tuple(arguments)
            if key not in known:
                known[key] = type(context).resolve_function_type(context, function, arguments, named)
            return known[key]

        gc.disable()
        context.resolve_function_type = remembered
        try:
            return super().compile_extra(func)
        finally:
            context.resolve_function_type = resolve
            if was_enabled:
                gc.enable()


class _PartLibrary(JITCodeLibrary):  # type: ignore[misc]
    """Code that is linked into kernels and is never called by itself: numba would make machine code of each part, too,
    which takes a sixth of the time.
    """

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0  # which numba has for functions without a wrapper

    @property
    def codegen(self) -> _PartLibrary:
        return self

    def set_env(self, name: str, env: Any) -> None:
        """Do nothing: the environment is for code that handles Python objects."""


@functools.cache
def _of_parts(compiler: type[LoopCompiler]) -> type[LoopCompiler]:
    """The compiler for what is linked into kernels."""

    class PartCompiler(compiler):  # type: ignore[valid-type, misc]
        def compile_extra(self, func: Any) -> Any:
            self.state.library = _PartLibrary(self.state.targetctx.codegen(), func.__qualname__)
            return super().compile_extra(func)

    return PartCompiler


class OneTypeCompiler(LoopCompiler):
    """For loops in which a variable has one type from beginning to end: a sixth less to compile. Where it has not,
    numba may find no type for it, or takes the wider one for both.
    """

    unused_passes = UNUSED_PASSES | {"ReconstructSSA"}


OPTIONS: dict[str, Any] = {"error_model": "numpy", "no_cfunc_wrapper": True}


def compiled(function: Callable[..., Any], compiler: type[LoopCompiler] = LoopCompiler) -> Any:
    """A kernel that Python calls."""
    made = numba.njit(function, nogil=True, pipeline_class=compiler, **OPTIONS)
    made._cache = cache_of(function)
    return made


def inlined(function: Callable[..., Any], compiler: type[LoopCompiler] = LoopCompiler) -> Any:
    """A part of kernels, compiled into each of them. Python cannot call it: a wrapper would take time to compile."""
    pipeline = _of_parts(compiler)  # type: ignore[arg-type]  # a class is hashable; mypy doubts it
    return numba.njit(function, forceinline=True, no_cpython_wrapper=True, pipeline_class=pipeline, **OPTIONS)


def merged(function: Callable[..., Any]) -> Any:
    """A part of kernels that each of them calls in one place: written into it before anything is compiled."""
    return numba.njit(function, inline="always", pipeline_class=LoopCompiler, **OPTIONS)


def called(function: Callable[..., Any], compiler: type[LoopCompiler] = LoopCompiler) -> Any:
    """A large part of kernels, compiled once, which kernels call."""
    return numba.njit(function, no_cpython_wrapper=True, pipeline_class=_of_parts(compiler), **OPTIONS)  # type: ignore[arg-type]


def address_of(kernel: Any, *examples: Any, kinds: tuple[Any, ...] | None = None) -> int:
    """The address of a `compiled` kernel's machine code for arguments of these types, for `call_at` in other kernels.

    A kernel that is called by name is compiled into its caller, and again into the caller's caller; by address it is
    not.
    """
    if kinds is None:
        kinds = tuple(map(numba.typeof, examples))
    kernel.compile(kinds)
    made = kernel.overloads[kinds]
    return int(made.library.get_pointer_to_function(made.fndesc.llvm_func_name))


def _caller(result: Any) -> Any:
    def build(_typing: Any, address: Any, arguments: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            kind = context.call_conv.get_function_type(result, arguments.types)
            function = builder.inttoptr(values[0], ir.PointerType(kind))
            parts = cgutils.unpack_tuple(builder, values[1], len(arguments.types))
            _, made = context.call_conv.call_function(builder, function, result, arguments.types, parts)
            return context.get_dummy_value() if result is types.void else made

        return result(address, arguments), generate

    return intrinsic(build)


# call_at(address, (argument, ...)) of a kernel that returns an int64; run_at of one that returns nothing.
call_at, run_at = _caller(types.int64), _caller(types.void)


_chosen: contextvars.ContextVar[int | None] = contextvars.ContextVar("threads", default=None)


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Within the block, `on_threads` uses `count` threads."""
    before = _chosen.set(count)
    try:
        yield
    finally:
        _chosen.reset(before)


def thread_count() -> int:
    """The count of `use_threads`, else as many threads as torch uses, else as this process may use cores."""
    return _chosen.get() or (sys.modules["torch"].get_num_threads() if "torch" in sys.modules else _usual_threads())


@functools.cache
def _usual_threads() -> int:
    """OMP_NUM_THREADS, which torch and scikit-learn go by, or the cores that this process may run on."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if wanted.isdecimal() and int(wanted):
        return int(wanted)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worthwhile_threads(work_ns: float) -> int:
    """How many threads do some work soonest, if there are as many: n of them take n hand-outs and work / n."""
    return max(math.isqrt(int(work_ns / HAND_OUT_NS)), 1)


def on_threads(work: Callable[[Piece], Result], pieces: Sequence[Piece]) -> list[Result]:
    """`work` on every piece, results in order, on `thread_count()` threads: this one and helpers."""
    if len(pieces) == 1:
        return [work(pieces[0])]
    results: dict[int, Result] = {}
    left = iter(range(len(pieces)))  # shared: a free thread takes the next piece

    def take_pieces() -> None:
        for place in left:
            results[place] = work(pieces[place])

    threads = thread_count()
    helpers = min(threads, len(pieces)) - 1
    running = [
        _helpers(threads - 1).submit(contextvars.copy_context().run, take_pieces)  # helpers see `use_threads`, too
        for _ in range(helpers)
    ]
    try:
        take_pieces()
    finally:
        for helper in running:
            if not helper.cancel():  # a helper that never started has nothing to do
                helper.result()
    return [results[place] for place in range(len(pieces))]


@functools.lru_cache(maxsize=8)  # callers may alternate between numbers of threads
def _helpers(count: int) -> ThreadPoolExecutor:
    """Threads that are kept: starting one takes as long as a million numbers."""
    return ThreadPoolExecutor(count, thread_name_prefix="bitplan")


def _await_compilers() -> None:
    """Before a fork: a thread in numba or LLVM would leave its lock taken in the child for ever, and LLVM half-way."""
    global_compiler_lock.acquire()
    llvm.lib._lock.__enter__()


def _let_compile() -> None:
    llvm.lib._lock.__exit__()
    global_compiler_lock.release()


if hasattr(os, "register_at_fork"):  # a forked process has the pool, but none of its threads
    os.register_at_fork(after_in_child=_helpers.cache_clear)
    os.register_at_fork(before=_await_compilers, after_in_parent=_let_compile, after_in_child=_let_compile)
