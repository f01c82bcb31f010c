"""Phases of a search: what shows their progress, how long each took, and how long all of them will take.

Before the first phase a few of its steps are timed: some tokens through a block and the head, their logits compared,
some rows of a weight rounded. What each phase has of these gives the time of all, here and now; as phases go on, what
they really took corrects it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bitplan.formats.dispatch import parts_of
from bitplan.packed.language.perplexity import measure_perplexity
from bitplan.rounding.error_compensation import InputHessian
from bitplan.rounding.weights import round_weight
from bitplan.searching.gather.blocks import BACK, LOGITS_AT_ONCE
from bitplan.searching.gather.searched_model import SearchSubject

IN_ALL = "in all"
SHARES = 1000
COUNTED = 1000  # weights in one step of progress
TRUSTED = 0.2  # of what is expected: after as much of it, what it took counts as much as what was expected
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


def _pace(took: float, expected: float, trusted: float) -> float:
    """How many times as long as expected steps took; after few of them, about as long."""
    return (took + trusted) / (expected + trusted) if expected + trusted > 0 else 1.0


def in_minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


# Of a usual search: plans that are rounded, projections that are checked, plans that are corrected by and proven.
PLANS, PARTS, CORRECTIONS, RIVALS = 2.2, 6, 3, 3
SAMPLE_TOKENS, SAMPLE_NUMBERS, FEW_ROWS = 128, 2**19, 64  # tokens, numbers of a weight, and rows of it
TURNS, TURNS_S = 5, 0.5  # of each step


@dataclass(frozen=True)
class MeasuredSteps:
    """Seconds that this machine takes now.

    block     for a token in one block; `head` in norm and head, `score` to compare its logits with others
    product   for a product of two numbers and its sum, in a matrix
    column    to round a weight, for each of its columns; and `cell` for each pair of a number and a column
    """

    block: float
    head: float
    score: float
    product: float
    column: float
    cell: float

    def rounding(self, rows: int, columns: int) -> float:
        return self.column * columns + self.cell * rows * columns**2


def measure_steps(subject: SearchSubject, windows: Sequence[Tensor], fmt: str | None) -> MeasuredSteps:
    """Time each kind of step once, after one that is not timed; `fmt` is a format that is rounded to, if any is."""
    runner, ids = subject.runner, windows[0][None, :SAMPLE_TOKENS]
    tokens = ids.shape[1]
    with torch.no_grad(), runner.outside():
        states = runner.enter(ids)
        block = 0.0
        if runner.blocks:
            with runner.block_weights(0):
                block = _seconds(lambda: runner.run_block(0, states))
        some = next(states.pieces(max(1, LOGITS_AT_ONCE // 8 // runner.vocabulary)))
        head = _seconds(lambda: runner.leave(some))
        logits = runner.leave(some)[:, : SAMPLE_TOKENS // 4]
    scored = [some.ids[0, : logits.shape[1]].cpu()]
    score = _seconds(lambda: measure_perplexity(lambda _: logits, scored, reference=lambda _: logits))
    width = min((site.shape[-1] for site in subject.sites.values()), default=1)
    rows, square = (
        torch.ones(SAMPLE_TOKENS, width, device=runner.device),
        torch.zeros(width, width, device=runner.device),
    )
    product = _seconds(lambda: square.addmm_(rows.T, rows)) / (SAMPLE_TOKENS * width**2)
    column, cell = _rounding_steps(subject, fmt)
    return MeasuredSteps(
        block / tokens, head / some.ids.shape[1], score / max(1, logits.shape[1] - 1), product, column, cell
    )


def _rounding_steps(subject: SearchSubject, fmt: str | None) -> tuple[float, float]:
    """What rounding takes for a column and for a cell, by a few rows of a weight and by more of them."""
    if fmt is None:
        return 0.0, 0.0
    site = max(subject.sites.values(), key=lambda each: each.shape[0])
    columns = site.shape[-1]
    rows = subject.weight(site.name)[: max(2 * FEW_ROWS, SAMPLE_NUMBERS // columns)]
    inputs = InputHessian(torch.eye(columns, device=rows.device))
    with parts_of(subject.numbers_with(site.name)):
        few = _seconds(lambda: round_weight(rows[:FEW_ROWS], fmt, hessian=inputs))
        many = _seconds(lambda: round_weight(rows, fmt, hessian=inputs))
    cell = max(0.0, many - few) / max(1, len(rows) - FEW_ROWS) / columns**2
    return max(0.0, few - cell * FEW_ROWS * columns**2) / columns, cell


def _seconds(step: Callable[[], object]) -> float:
    """The least of some turns, after one that is not timed: other programs may interrupt any of them."""
    step()
    turns: list[float] = []
    while len(turns) < TURNS and sum(turns) < TURNS_S:
        start = time.perf_counter()
        step()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        turns.append(time.perf_counter() - start)
    return min(turns)


def expected_phases(
    shapes: Sequence[tuple[int, ...]], blocks: int, text: Mapping[str, int], formats: int, steps: MeasuredSteps
) -> dict[str, ExpectedPhase]:
    """The time of each phase, by what it does.

    shapes   of the weights that are searched; of experts, of each
    text     tokens by phase: "statistics" and of them "watched", "checks", "proof"; and "steps" and "windows" of it
    """
    sizes = [(math.prod(shape[:-1]), shape[-1]) for shape in shapes]
    pass_s = blocks * steps.block + steps.head
    squares = sum(columns**2 for _, columns in sizes) / 2  # of two weights about one has inputs of its own
    gathered = text["statistics"] * (pass_s + squares * steps.product) + BACK * text["watched"] * pass_s
    sampled = sum((rows + formats * max(128, rows / 32)) * columns**2 for rows, columns in sizes) * steps.product
    compared = (
        PARTS * formats * max((steps.rounding(max(128, rows // 32), columns) for rows, columns in sizes), default=0)
    )
    rounded = PLANS * sum(steps.rounding(rows, columns) for rows, columns in sizes)
    numbers = sum(rows * columns for rows, columns in sizes)

    def measured(turn: int, steps_done: int, plans: int, tokens: int) -> ExpectedPhase:
        return ExpectedPhase(turn, steps_done, plans * tokens * (pass_s + steps.score))

    return {
        "statistics": ExpectedPhase(0, text["steps"], gathered),
        "rounding": ExpectedPhase(1, SHARES, sampled + compared),
        "rounding plans": ExpectedPhase(2, int(PLANS * numbers / COUNTED), rounded),
        "checking": measured(2, PARTS, PARTS, text["checks"]),
        "correcting": measured(2, CORRECTIONS, CORRECTIONS, text["checks"]),
        "measuring the model": measured(3, 2 * text["windows"], 2, text["proof"]),
        "proving": measured(4, RIVALS * text["windows"], RIVALS, text["proof"]),
    }


@dataclass(frozen=True)
class ExpectedPhase:
    """Steps and seconds of a phase, all its turns together.

    turn   phases of one turn come by turns; when one of a later turn begins, they are over
    """

    turn: int
    steps: int
    seconds: float


@dataclass
class PhaseClock:
    """A stage that also counts: by phase, seconds of wall time, and of all of this process' threads.

    expected   what each phase will take; without it nothing is said of the whole
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
        """Seconds of the whole search: those that are over, and what is left as fast as it went until now."""
        if current not in self.expected:
            return None
        done = {what: self._share(what) * phase.seconds for what, phase in self.expected.items()}
        over = time.perf_counter() - self._started
        whole = sum(phase.seconds for phase in self.expected.values())
        pace = _pace(over, sum(done.values()), TRUSTED * whole)
        left = 0.0
        for what, phase in self.expected.items():
            if phase.turn >= self.expected[current].turn:
                own = _pace(self.wall.get(what, 0.0), done[what], TRUSTED * phase.seconds) if done[what] else pace
                left += (phase.seconds - done[what]) * own
        return over + left

    def _share(self, what: str) -> float:
        """How much of a phase is done."""
        return min(1.0, self._steps.get(what, 0) / max(1, self.expected[what].steps))

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
