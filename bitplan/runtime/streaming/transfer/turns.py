"""Turns: one thread at a time uses a stream, and a step belongs to the thread that computes in it first.

Forwards outside a step take turns block by block: each block is loaded, computes and leaves the modules as they were.
Within a step turns would not do: between the moment when autograd asks for a weight and its use, another thread could
load another block there. So other threads are refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from bitplan.runtime.streaming.errors import StreamError


class Turns:
    """A lock with a limit (it may be entered again by its thread), and the thread of the open step."""

    def __init__(self, timeout_s: float) -> None:
        self._lock, self._timeout_s = threading.RLock(), timeout_s
        self._serial: int | None = None
        self._thread = threading.current_thread()

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=self._timeout_s):
            raise StreamError(
                f"another thread has used this stream for over {self._timeout_s:g} s; let one thread use it at a time"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def claim_step(self, serial: int, place: str) -> None:
        """Give the step of this serial number to the calling thread, or refuse it; within a turn, in a forward."""
        thread = threading.current_thread()
        if self._serial != serial:
            self._serial, self._thread = serial, thread
        elif thread is not self._thread:
            raise StreamError(
                f"{place}: the step is computed by thread {self._thread.name!r}, and {thread.name!r} computes in it "
                "too: one thread computes a step; end_step first, or run forwards of several threads outside a step, "
                "under torch.no_grad()"
            )


class _Loader(Protocol):
    @property
    def turns(self) -> Turns: ...


class _HasLoader(Protocol):
    @property
    def _loader(self) -> _Loader: ...


Owner = TypeVar("Owner", bound=_HasLoader)
Given = ParamSpec("Given")
Result = TypeVar("Result")


def alone(method: Callable[Concatenate[Owner, Given], Result]) -> Callable[Concatenate[Owner, Given], Result]:
    """A method that runs while no other thread uses the stream."""

    @wraps(method)
    def in_turn(self: Owner, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        with self._loader.turns:
            return method(self, *args, **kwargs)

    return in_turn
