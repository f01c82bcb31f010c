"""Phases of a search: what shows their progress, and how long each took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

IN_ALL = "in all"
SHARES = 1000
Advance = Callable[[int, str], None]
# What shows progress: called with what is done and how many steps it has, gives what to call for each.
Stage = Callable[[str, int], AbstractContextManager[Advance]]


@contextmanager
def no_stage(_what: str, _total: int) -> Iterator[Advance]:
    yield lambda _count, _label: None


@contextmanager
def in_shares(stage: Stage, what: str, total: int) -> Iterator[Advance]:
    """A stage whose steps differ in work: shown in thousandths of all of it, so that what is left can be told."""
    done = shown = 0
    with stage(what, SHARES) as advance:

        def add(work: int, label: str) -> None:
            nonlocal done, shown
            done += work
            before, shown = shown, SHARES * done // max(1, total)
            advance(shown - before, label)

        yield add


@dataclass
class PhaseClock:
    """A stage that also counts: by phase, seconds of wall time, and of all of this process' threads."""

    stage: Stage
    wall: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, what: str, total: int) -> Iterator[Advance]:
        with self.counted(what), self.stage(what, total) as advance:
            yield advance

    @contextmanager
    def counted(self, what: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.wall[what] = self.wall.get(what, 0.0) + time.perf_counter() - wall
            self.cpu[what] = self.cpu.get(what, 0.0) + time.process_time() - cpu

    def to_dict(self) -> dict[str, dict[str, float]]:
        return {what: {"wall": round(self.wall[what], 2), "cpu": round(self.cpu[what], 2)} for what in self.wall}
