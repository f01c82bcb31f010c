"""Limits of time that hold on a machine that is slow, busy, or counting the lines that run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

LOOP_SECONDS = 0.02  # what `_loop` takes on an ordinary machine
TRIES = 3


def assert_quick(call: Callable[[], object], seconds: float) -> None:
    """The call takes less than so many seconds of an ordinary machine's processor, at least once in three times.

    The seconds are this thread's. A machine on which a loop of Python takes longer has that much more of them, and
    three times as many where every line is traced.
    """
    took = []
    for _ in range(TRIES):
        took.append(_measured(call))
        if took[-1] < seconds:
            return
        limit = seconds * max(1.0, _measured(_loop) / LOOP_SECONDS) * (3 if sys.gettrace() else 1)
        if took[-1] < limit:
            return
    raise AssertionError(f"took {took} seconds of the processor; at most {limit:.2f}")


def _measured(call: Callable[[], object]) -> float:
    started = time.thread_time()
    call()
    return time.thread_time() - started


def _loop() -> None:
    """Half a million steps."""
    total = 0
    for number in range(500_000):
        total += number & 7
