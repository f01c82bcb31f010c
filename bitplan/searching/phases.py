"""Phases of a search: what shows their progress, how long each took, and how long all of them will take.

How long each takes beside the others is known beforehand, from runs on two cores of a Xeon; how fast this machine is,
from the phases and steps that are done. So there is one total from the first step on, of the whole search.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
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


def in_minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


@dataclass(frozen=True)
class ExpectedPhase:
    """Steps and seconds of a phase, all its turns together, on a machine like another.

    turn   phases of one turn come by turns; when one of a later turn begins, they are over
    """

    turn: int
    steps: int
    seconds: float


@dataclass
class PhaseClock:
    """A stage that also counts: by phase, seconds of wall time, and of all of this process' threads.

    expected   what each phase takes beside the others; without it nothing is said of the whole
    """

    stage: Stage
    expected: Mapping[str, ExpectedPhase] = field(default_factory=dict)
    wall: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    _steps: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._started = time.perf_counter()

    @contextmanager
    def __call__(self, what: str, total: int) -> Iterator[Advance]:
        with self.counted(what), self.stage(what, total) as advance:

            def add(count: int, label: str) -> None:
                self._steps[what] = self._steps.get(what, 0) + count
                seconds = self.seconds_in_all(what)
                advance(count, label if seconds is None else f"{label}; the search takes about {in_minutes(seconds)}")

            yield add

    def seconds_in_all(self, current: str) -> float | None:
        """Seconds of the whole search, by the share of its work that is done; None before the first step."""
        if current not in self.expected:
            return None
        done = left = 0.0
        for what, phase in self.expected.items():
            share = min(1.0, self._steps.get(what, 0) / max(1, phase.steps))
            done += share * phase.seconds
            left += (1 - share) * phase.seconds if phase.turn >= self.expected[current].turn else 0.0
        return (time.perf_counter() - self._started) * (done + left) / done if done else None

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
