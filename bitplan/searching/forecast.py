"""What a search will take: how long, by steps that are timed before it begins; and memory, within a limit.

Before the first phase a few steps are timed: some tokens through a block and the head, their logits compared, some rows
of a weight rounded. What each phase has of these gives the time of all, here and now; as phases go on, what they really
took corrects it.

Memory: three phases come one after the other, each beside what is in memory already and the weights outside of blocks:

    statistics   a block with its graph, the states of some tokens, sums of its inputs; then logits of some tokens
    rounding     on each thread the copies of some rows of a weight, the factor of its inputs, weights read last
    measuring    a block by a plan, states, logits of the model itself that are kept, and of some tokens of both

Fewer threads, fewer rows at a time and fewer logits that are kept change how long a search takes, and no plan beyond
what the order of sums does. What is left is counted here, tensor by tensor; the factors are how many copies torch has
at a time, counted in the code that makes them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bitplan.base.hardware import free_memory
from bitplan.base.logs import JsonLog
from bitplan.formats.dispatch import parts_of
from bitplan.packed.language.perplexity import MADE_AT_ONCE, measure_perplexity
from bitplan.packed.layer_replacement import packed_shape
from bitplan.plan.structure.describe import is_product
from bitplan.rounding.error_compensation import InputHessian
from bitplan.rounding.weights import round_weight
from bitplan.searching.blocks import BACK, BATCH, LOGITS_AT_ONCE
from bitplan.searching.damage import MOST_NUMBERS, MOST_WEIGHTS, ROUNDED_AT_ONCE, formats_that_hold
from bitplan.searching.goal import COUNTED, Advance, Moment, SearchError, Stage
from bitplan.searching.statistics import AT_ONCE, MOST_OUTPUTS

if TYPE_CHECKING:
    from bitplan.searching.searched_model import SearchSubject

IN_ALL = "in all"
SHARES = 1000
LOG_SECONDS = 1.0
TRUSTED = 0.2  # of what is expected: after as much of it, what it took counts as much as what was expected


@contextmanager
def in_shares(stage: Stage, phase: str, total: int) -> Iterator[Advance]:
    """A context for a stage whose steps take unequal work: progress goes by thousandths of all work."""
    done = shown = 0
    with stage(phase, SHARES) as advance:

        def add(work: int, label: str) -> None:
            nonlocal done, shown
            done += work
            before, shown = shown, SHARES * done // max(1, total)
            advance(shown - before, label)

        yield add


def _pace(took: float, expected: float, trusted: float) -> float:
    """The ratio of time taken to time expected, drawn towards 1 as if `trusted` more seconds had been as expected."""
    return (took + trusted) / (expected + trusted) if expected + trusted > 0 else 1.0


def in_minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


# ---- time ------------------------------------------------------------------------------------------------------------

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


def measure_steps(subject: SearchSubject, windows: Sequence[Tensor], formats: Sequence[str]) -> MeasuredSteps:
    """Time each kind of step once, after one that is not timed; `formats` are those that weights are rounded to."""
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
    column, cell = rounding_steps(subject, formats)
    return MeasuredSteps(
        block / tokens, head / some.ids.shape[1], score / max(1, logits.shape[1] - 1), product, column, cell
    )


def rounding_steps(subject: SearchSubject, formats: Sequence[str]) -> tuple[float, float]:
    """What rounding takes for a column and for a cell, by a few rows of a weight and by more of them.

    Timed on the weight of most rows that one of the formats holds; where no weight is rounded, nothing.
    """
    sites = sorted(subject.sites.values(), key=lambda site: site.shape[0], reverse=True)
    pairs = ((site, fmt) for site in sites for fmt in formats_that_hold(site.shape, formats))
    site, fmt = next(pairs, (None, ""))
    if site is None:
        return 0.0, 0.0
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
    """Predict steps and seconds of each phase of a search from its sizes and measured times of single steps.

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

    began      when the work began, before the first phase: the model was opened and the text cut since
    expected   what each phase will take; without it nothing is said of the whole
    log        where steps are also written as they are done, at most one line in `LOG_SECONDS`
    """

    stage: Stage
    expected: Mapping[str, ExpectedPhase] = field(default_factory=dict)
    began: Moment = field(default_factory=Moment.now)
    log: JsonLog | None = None
    wall: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    _steps: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._started = Moment.now()
        self._logged = -math.inf

    def expect(self, phases: Mapping[str, ExpectedPhase]) -> float:
        """Say what each phase will take, the first of which begins now; returns the seconds of the whole."""
        self.expected, self._started = phases, Moment.now()
        return self._started.wall - self.began.wall + sum(phase.seconds for phase in phases.values())

    @contextmanager
    def __call__(self, phase: str, total: int) -> Iterator[Advance]:
        with self.counted(phase), self.stage(phase, total) as advance:
            done = 0

            def add(count: int, label: str) -> None:
                nonlocal done
                done += count
                self._steps[phase] = self._steps.get(phase, 0) + count
                seconds = self.seconds_in_all(phase)
                self._write(phase, done, total, label, seconds)
                advance(count, label if seconds is None else f"{label}; the search takes about {in_minutes(seconds)}")

            yield add

    def _write(self, phase: str, done: int, total: int, label: str, expected: float | None) -> None:
        now = time.perf_counter()
        if self.log is None or (done < total and now - self._logged < LOG_SECONDS):
            return
        self._logged = now
        seconds = round(now - self.began.wall, 1)
        in_all = None if expected is None else round(expected, 1)
        line = {"phase": phase, "done": done, "of": total, "at": label, "seconds": seconds, "expected_seconds": in_all}
        self.log.write_lines(line)

    def seconds_in_all(self, current: str) -> float | None:
        """An estimate of the seconds since `began`: what is over, and the rest at the pace until now."""
        if current not in self.expected:
            return None
        done = {name: self._share(name) * phase.seconds for name, phase in self.expected.items()}
        over = time.perf_counter() - self._started.wall
        expected_seconds = sum(phase.seconds for phase in self.expected.values())
        pace = _pace(over, sum(done.values()), TRUSTED * expected_seconds)
        remaining = 0.0
        for name, phase in self.expected.items():
            if phase.turn >= self.expected[current].turn:
                wall = self.wall.get(name, 0.0)
                phase_pace = _pace(wall, done[name], TRUSTED * phase.seconds) if done[name] else pace
                remaining += (phase.seconds - done[name]) * phase_pace
        return self._started.wall - self.began.wall + over + remaining

    def _share(self, phase: str) -> float:
        """Which share of a phase's steps is done, from 0 to 1."""
        return min(1.0, self._steps.get(phase, 0) / max(1, self.expected[phase].steps))

    @contextmanager
    def counted(self, phase: str) -> Iterator[None]:
        start = Moment.now()
        try:
            yield
        finally:
            end = Moment.now()
            self.wall[phase] = self.wall.get(phase, 0.0) + end.wall - start.wall
            self.cpu[phase] = self.cpu.get(phase, 0.0) + end.cpu - start.cpu

    def to_dict(self) -> dict[str, dict[str, float]]:
        """The seconds of each phase, and of all since `began`."""
        seconds = {name: Moment(self.wall[name], self.cpu[name]) for name in self.wall}
        seconds[IN_ALL] = Moment(*(end - start for end, start in zip(Moment.now(), self.began, strict=True)))
        return {name: {"wall": round(wall, 2), "cpu": round(cpu, 2)} for name, (wall, cpu) in seconds.items()}


# ---- memory ----------------------------------------------------------------------------------------------------------

KEPT_LOGITS_BYTES = 2**29  # of the model itself, where there is room: they are made of last states
LOADED_LATER = 350 * 10**6  # compiled loops, the solver, allocators
LEFT_FREE = 0.1  # of free memory, where nobody gives a limit
ROUNDING_COPIES, LOGITS_COPIES, GRAPH_COPIES, FACTOR_COPIES, STATES_COPIES, HEAD = 13, 7, 4, 10, 3, 64
LEAST_ROUNDED = 2**21


@dataclass(frozen=True)
class MemoryUse:
    """What a search keeps in memory: threads that round, numbers that each rounds at once, bytes of kept logits."""

    needed: int
    limit: int
    threads: int
    rounded_at_once: int
    kept_logits: int


def within_memory(
    subject: SearchSubject, statistics: Sequence[Tensor], measured: Sequence[Tensor], limit: int | None
) -> MemoryUse:
    """The fastest way that stays under a limit, which is of the whole process; what cannot is refused.

    statistics, measured   windows of the text that each phase has at once
    limit                  bytes; what is free now, less a tenth, unless given
    """
    resident = _resident()
    most = resident + int((1 - LEFT_FREE) * free_memory()) if limit is None else limit
    base = resident + LOADED_LATER + sum(map(_copied, subject.runner.parameters_outside()))
    gathering = base + _gathering(subject, statistics)
    threads, rounded = max(1, torch.get_num_threads()), ROUNDED_AT_ONCE
    while base + _rounding(subject, threads, rounded) > most and (threads > 1 or rounded > LEAST_ROUNDED):
        threads, rounded = (threads - 1, rounded) if threads > 1 else (1, rounded // 2)
    measuring = base + _measuring(subject, measured)
    on_cpu = subject.device.type == "cpu"  # a GPU computes logits in less time than it takes to store them
    asked = sum(map(len, measured)) * subject.runner.vocabulary * 4
    kept_logits = max(0, min(KEPT_LOGITS_BYTES, asked, most - measuring)) if on_cpu else 0
    needed = max(gathering, base + _rounding(subject, threads, rounded), measuring + kept_logits)
    if needed > most:
        whose = "were given" if limit is not None else "are free"
        raise SearchError(
            f"{subject.where}: a search takes about {needed / 1e9:.1f} GB of memory, and {most / 1e9:.1f} GB {whose}; "
            "end other programs, give shorter windows or more memory",
            settings={"context": None, "memory": f"{math.ceil(needed / 1e8) / 10:.1f}GB"},
        )
    return MemoryUse(needed, most, threads, rounded, kept_logits)


def _resident() -> int:
    """The resident bytes of this process; 0 where the system does not say."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * 4096 if pages.is_file() else 0


def _copied(parameter: Tensor) -> int:
    """Bytes of a float32 copy of a parameter; 0 where the parameter itself is float32 in memory."""
    return 0 if parameter.dtype == torch.float32 and not parameter.is_meta else 4 * parameter.numel()


def _in_largest_block(subject: SearchSubject) -> int:
    """How many numbers the parameters of the largest block have."""
    return max((sum(map(Tensor.numel, block.parameters())) for block in subject.runner.blocks), default=0)


def _width(subject: SearchSubject) -> int:
    return next((module.embedding_dim for module in subject.model.modules() if isinstance(module, nn.Embedding)), 1)


def _gathering(subject: SearchSubject, windows: Sequence[Tensor]) -> int:
    runner, width, length = subject.runner, _width(subject), max(map(len, windows))
    states = 4 * STATES_COPIES * min(AT_ONCE, sum(map(len, windows))) * width
    shapes = [
        [
            packed_shape(module, "weight", tuple(module.get_parameter("weight").shape))
            for module in block.modules()
            if is_product(module)
        ]
        for block in runner.blocks
    ]
    sums = max((sum(_sums(*shape) for shape in block) for block in shapes), default=0) + 4 * width**2
    through = max((sum(map(sum, block)) for block in shapes), default=0)
    graph = 4 * BATCH * (GRAPH_COPIES * through + 3 * length * max(1, width // HEAD))
    tokens = length * len(windows) if not runner.blocks else min(length, max(1, LOGITS_AT_ONCE // runner.vocabulary))
    logits = 4 * LOGITS_COPIES * tokens * runner.vocabulary
    largest = max(math.prod(site.shape) for site in subject.sites.values())
    hashed = 2 * 4 * largest  # while it is looked at whether the file's order of rows is the model's
    return max(states + sums + max(4 * _in_largest_block(subject) + graph, logits), hashed)


def _sums(outputs: int, inputs: int) -> int:
    return 4 * (inputs**2 + (outputs if outputs <= MOST_OUTPUTS else 0) ** 2)


def _rounding(subject: SearchSubject, threads: int, at_once: int) -> int:
    shapes = [site.shape for site in subject.sites.values()]
    largest = max(map(math.prod, shapes))
    widest = max(shape[-1] for shape in shapes)
    copied = any(_copied(parameter) for parameter in subject.model.parameters())
    weights = min(MOST_WEIGHTS * largest, MOST_NUMBERS) if copied else 0
    encoded = 2 * largest  # the parts of one, and all of them together
    return threads * 4 * (ROUNDING_COPIES * min(largest, at_once) + weights + FACTOR_COPIES * widest**2) + encoded


def _measuring(subject: SearchSubject, windows: Sequence[Tensor]) -> int:
    runner, tokens = subject.runner, sum(map(len, windows))
    outside = sum(map(Tensor.numel, runner.parameters_outside()))
    through = 4 * BATCH * GRAPH_COPIES * _width(subject) * 8
    pieces = 6 * 4 * min(MADE_AT_ONCE, max(map(len, windows)) * runner.vocabulary)
    return 4 * (outside + 2 * _in_largest_block(subject) + STATES_COPIES * tokens * _width(subject)) + through + pieces
