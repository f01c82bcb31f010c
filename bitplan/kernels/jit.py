"""How bitplan compiles its CPU loops: numba, without the interpreter lock, kept on disk.

Nothing is compiled at import. The first call of a kernel takes one to a few seconds, once per machine: the
machine code goes to `__pycache__` beside the source (or numba's own folder where that is read-only), and later
processes load it in milliseconds. numba checks only the file of the function itself, so after an edit of a module
whose functions are compiled *into* others (`vectors`), delete `__pycache__`.

Loops are spread over Python threads, not over numba's: numba's own layers end the process when two threads
call them at once (workqueue), after a fork (OpenMP), and spin beside torch's threads.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numba
import torch

Piece = TypeVar("Piece")
Found = TypeVar("Found")


def compiled(function: Callable[..., Any]) -> Any:
    """A kernel that Python calls."""
    try:
        return numba.njit(function, cache=True, nogil=True, error_model="numpy")
    except RuntimeError:  # numba found no folder it may write to: compile in every process
        return numba.njit(function, nogil=True, error_model="numpy")


def inlined(function: Callable[..., Any]) -> Any:
    """A part of kernels: compiled into each of them."""
    return numba.njit(function, nogil=True, error_model="numpy", forceinline=True)


def on_threads(work: Callable[[Piece], Found], pieces: Sequence[Piece]) -> list[Found]:
    """`work` on every piece, results in order, on as many threads as torch uses: this one and helpers."""
    found: dict[int, Found] = {}
    left = iter(range(len(pieces)))  # shared: whoever is free takes the next

    def take_pieces() -> None:
        for place in left:
            found[place] = work(pieces[place])

    helpers = min(torch.get_num_threads(), len(pieces)) - 1
    running = [_helpers(torch.get_num_threads() - 1).submit(take_pieces) for _ in range(helpers)]
    try:
        take_pieces()
    finally:
        for helper in running:
            if not helper.cancel():  # one that never started has nothing left to do
                helper.result()
    return [found[place] for place in range(len(pieces))]


@functools.lru_cache(maxsize=1)
def _helpers(count: int) -> ThreadPoolExecutor:
    """Threads that stay: starting one takes as long as a million numbers."""
    return ThreadPoolExecutor(count, thread_name_prefix="bitplan")


if hasattr(os, "register_at_fork"):  # a forked process has the pool, but none of its threads
    os.register_at_fork(after_in_child=_helpers.cache_clear)
