"""Ctrl-C at a chosen line of bitplan/streaming, or while a copy is made; and other ends of a copy."""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import bitplan.streaming
from tests.streaming.stream_samples import TIMEOUT_S

CAUGHT = threading.Event()
FOLDER = str(Path(bitplan.streaming.__file__).parent)


def stop_thread() -> None:
    raise SystemExit


def break_bus() -> None:
    raise RuntimeError("the bus fell off")


def interrupt() -> None:
    """Send Ctrl-C to the main thread, and hold the copy until that was caught."""
    CAUGHT.clear()
    _thread.interrupt_main()
    assert CAUGHT.wait(TIMEOUT_S)


class Interrupter:
    """Counts the lines that a thread runs while it is on, and raises at line `at` (None: only counts).

    Made before the threads that are to be traced. `where` is the line at which it has raised.
    """

    def __init__(self, at: int | None, thread: str = "MainThread") -> None:
        self.at, self.thread = at, thread
        self.lines, self.where, self._is_on = 0, "", False

    @contextmanager
    def in_threads(self) -> Iterator[None]:
        """Trace the threads that start within, while it is on."""
        before = threading.gettrace()
        threading.settrace(self._trace)
        try:
            yield
        finally:
            threading.settrace(before)  # type: ignore[arg-type]

    @contextmanager
    def on(self) -> Iterator[None]:
        before = sys.gettrace()
        self._is_on = True
        if self.thread == "MainThread":
            sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)
            self._is_on = False

    def _trace(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(FOLDER) else None

    def _line(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "line" and self._is_on and threading.current_thread().name == self.thread:
            self.lines += 1
            if self.lines - 1 == self.at:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"
                raise KeyboardInterrupt(self.where)
        return self._line
