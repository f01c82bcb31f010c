"""RunController: one plan over a training run: compute, what crosses the bus, and moments, block by block.

    applied = apply_fp8(model, None, tokens=8192, recipe="tensorwise")   # what FP8 would be, where it is low
    stream = stream_blocks(model, "model.layers.*", device="cuda", train="weights")
    control = SelectivePrecisionPolicy.over_run(stream, total_steps=1000, probe=lambda number: loss_of(held[number]))
    for step, batch in enumerate(batches):
        control.begin_step(step)             # instead of stream.begin_step: what was decided takes effect
        model(**batch).loss.backward()
        optimizer.step(); optimizer.zero_grad()
        control.end_step()

A block has a row for each part: `fprop`, `dgrad`, `wgrad` (BF16, or what `apply_fp8` gave its layers), `wire` (its own
type, or `RunSettings.wire`) and `moments`, which are decided when the stream is made (`StreamOptions(moments="auto")`)
and do not change in a run. Everything begins high. Then

    timing     the first steps run in turns with some parts low; a part stays in question if low is faster. What is all
               high is timed first and last, and counts by the faster
    measuring  the gradient of a fixed batch, all high, against each part of some blocks low: the impact of a row is the
               square of the relative change. Another batch changes it, too: `noise`. The rows that save most time for
               their impact go low while the sum of impacts is within `noise_share` of the noise
    feedback   the loss of the fixed batch with the plan and all high; where it rises above `loss_tolerance`, rows go
               high for good, the greatest impact first
    final      from the last `final_share` of the schedule on: impacts are measured again, and the rows go high one
               after the other, the greatest impact first; the last of them before the last step

Measuring leaves no trace: its steps are dropped, gradients and random numbers are put back. So a run in which only the
changes are made (`replay_run`) has the same losses; times and measurements are evidence in the log, which
has a line for each change. Decisions are pure functions (`choose_option`, `choose_rows`, `final_queue`).
A resumed run repeats the steps behind its state to the bit, too: what depends on the hour is times alone, and those
that the log has of these steps are taken over.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

from bitplan.base.documents import (
    FLAG,
    LIST,
    NAME,
    OBJECT,
    SIZE,
    Kind,
    Reader,
    document_key,
    is_number,
    load_document,
    or_null,
)
from bitplan.base.errors import FormatError, PlanFileError
from bitplan.base.logs import JsonLog
from bitplan.base.records import Closing, write_json
from bitplan.formats import get_format
from bitplan.plan.from_records import RUN_LOG, RunChange, RunLog, read_run_log
from bitplan.plan.plan import Choice, PartKind, Plan, Planned
from bitplan.streaming.block_stream import BlockStream
from bitplan.streaming.find_blocks import StreamedBlock
from bitplan.streaming.selective.calibration import evaluating
from bitplan.streaming.selective.config import SelectiveError, SelectiveFileError
from bitplan.streaming.selective.decide import Candidate, choose_low_set
from bitplan.streaming.training.processes import several_processes

log = logging.getLogger("bitplan")
PRODUCTS = ("fprop", "dgrad", "wgrad")
WIRE, MOMENTS, BF16 = "wire", "moments", "bfloat16"
HIGH, AGAIN = "high", "high again"  # keys of times
SAMPLED = 4096  # numbers of each weight's gradient
LARGEST = 1e30
_BEGINS = b'{"document": "' + RUN_LOG.encode() + b'", "version": 0'
Probe = Callable[[int], Tensor]
Option = frozenset[str]  # the parts that are low

_POSITIVE = Kind("a number above 0", lambda value: is_number(value) and value > 0)
_SHARE = Kind("a number from 0 to below 1", lambda value: is_number(value) and 0 <= value < 1)
_WEIGHT = Kind("a number from 0", lambda value: is_number(value) and value >= 0)
_COUNT = Kind("an integer from 1", lambda value: type(value) is int and 1 <= value < 2**31)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The settings of a controller.

    total_steps     of the schedule
    final_share     the last part of it, in which precision rises again
    wire            the format of blocks that cross in few bytes
    timing_steps    steps that each way of running is timed over, after `settle_steps` that are not
    least_gain      share of a step's time that low must save
    noise_share     how much all low rows together may change the gradient, as a share of what another batch does
    measure_every, feedback_every    steps; None: a third and a tenth of the schedule
    loss_tolerance  the rise of the probe's loss that is accepted
    groups          blocks are measured in at most so many groups of neighbours
    """

    total_steps: int = document_key(_COUNT)
    final_share: float = document_key(_SHARE, 0.1)
    wire: str = document_key(NAME, "int8_row")
    timing_steps: int = document_key(_COUNT, 4)
    settle_steps: int = document_key(_COUNT, 2)
    least_gain: float = document_key(_SHARE, 0.01)
    noise_share: float = document_key(_POSITIVE, 0.25)
    measure_every: int | None = document_key(or_null(_COUNT), None)
    feedback_every: int | None = document_key(or_null(_COUNT), None)
    loss_tolerance: float = document_key(_WEIGHT, 0.01)
    groups: int = document_key(_COUNT, 4)

    def __post_init__(self) -> None:
        Reader("RunSettings", SelectiveError).fields_of(RunSettings, "", asdict(self))
        try:
            get_format(self.wire)
        except FormatError as error:
            raise SelectiveError(f"RunSettings: wire: {error}") from None

    @property
    def final_from(self) -> int:
        return self.total_steps - round(self.total_steps * self.final_share)

    def is_due(self, step: int, every: int | None, share: int, last: int | None) -> bool:
        return last is None or step - last >= (every or max(1, self.total_steps // share))


@runtime_checkable
class SwitchesProducts(Protocol):
    """A layer whose products can be switched between recipes of FP8 and "bf16", as `Fp8Linear` is."""

    made_with: Any

    def set_products(self, products: Mapping[str, str]) -> None: ...


class RunRow(NamedTuple):
    """One part of a block, with its two formats: `high`, and the cheaper `low` to which the controller may switch it.

    `low` is None where the part always stays in `high`. `reason` says why a run begins in `high`.
    """

    block: str
    part: str
    high: str
    low: str | None
    kind: PartKind
    reason: str

    @property
    def name(self) -> str:
        return f"{self.block}.{self.part}"


# ---- decisions -------------------------------------------------------------------------------------------------------


class Chosen(NamedTuple):
    """The fastest option so far, what each of its parts saves in ms, and what is to be timed next (None: nothing)."""

    option: Option
    gains: dict[str, float]
    wanted: Option | None


def option_key(option: Option) -> str:
    return "+".join(part for part in (*PRODUCTS, WIRE) if part in option) or HIGH


def choose_option(parts: Option, times: Mapping[str, float], least_gain: float) -> Chosen:
    """Choose which parts run in low precision: first all products, then the wire, then each product high again."""
    option: Option = frozenset()
    gains: dict[str, float] = {}
    products = parts - {WIRE}
    for part in (None, WIRE, *PRODUCTS):
        if part is None or part == WIRE:
            high, low = option, option | (products if part is None else parts & {WIRE})
        else:
            high, low = option - {part}, option
        if high == low or (part in PRODUCTS and len(products) == 1):
            continue
        for one in (high, low):
            if option_key(one) not in times:
                return Chosen(option, gains, one)
        saved = times[option_key(high)] - times[option_key(low)]
        option = low if saved > least_gain * times[option_key(high)] else high
        if option == low:
            gains |= dict.fromkeys(products if part is None else [part], saved / (len(products) if part is None else 1))
    return Chosen(option, {part: gains[part] for part in option}, None)


class RowDecision(NamedTuple):
    """A row's format from now on, and why."""

    name: str
    is_low: bool
    reason: str
    evidence: dict[str, Any]


def choose_rows(
    rows: Sequence[RunRow],
    low: frozenset[str],
    gains: Mapping[str, float],
    impacts: Mapping[str, float],
    budget: float,
    locked: frozenset[str],
) -> list[RowDecision]:
    """Which rows are low: those whose part saves time, by impact for the time saved, within the budget."""
    blocks = len({row.block for row in rows})
    asked = [row for row in rows if row.part in gains and row.name in impacts and row.name not in locked]
    candidates = [
        Candidate(row.name, impacts[row.name], max(1, round(gains[row.part] * 1e6 / blocks)), row.name in low)
        for row in asked
    ]
    chosen = choose_low_set(candidates, budget=budget, entry_share=0.8)
    decided = []
    for row in rows:
        evidence: dict[str, Any] = {"budget": budget}
        if row.name in impacts:
            evidence["impact"] = impacts[row.name]
        if row.part in gains:
            evidence["ms_saved"] = gains[row.part] / blocks
        if row.name in chosen.reasons:
            decided.append(RowDecision(row.name, row.name in chosen.names, chosen.reasons[row.name], evidence))
        elif row.name in low:
            why = "raised by loss feedback" if row.name in locked else f"low {row.part} was not measured to save time"
            decided.append(RowDecision(row.name, False, why, evidence))
    return decided


def final_queue(impacts: Mapping[str, float], first: int, total: int) -> list[tuple[int, str]]:
    """When each row is raised, (step, row): the greatest impact first, evenly from step `first` to the end."""
    order = sorted(impacts, key=lambda name: -impacts[name])
    steps = max(1, total - 1 - first)
    return [(first + index * steps // max(1, len(order)), name) for index, name in enumerate(order)]


# ---- state -----------------------------------------------------------------------------------------------------------


@dataclass
class RunState:
    """Everything that later decisions depend on.

    reasons    row -> step, reason and evidence of its last change
    times      option -> ms a step
    locked     rows that loss feedback has raised
    queue      (step, row), to be raised in the final part
    records    how many changes the log has
    timing     the way of running that is being timed, as a `TimedWay`
    has_timed  whether the run timed a way itself: `times` may be another run's
    """

    low: list[str] = document_key(LIST, factory=list)
    reasons: dict[str, Any] = document_key(OBJECT, factory=dict)
    times: dict[str, float] = document_key(OBJECT, factory=dict)
    impacts: dict[str, float] = document_key(OBJECT, factory=dict)
    noise: float | None = document_key(or_null(_WEIGHT), None)
    locked: list[str] = document_key(LIST, factory=list)
    queue: list[Any] | None = document_key(or_null(LIST), None)
    measured_at: int | None = document_key(or_null(SIZE), None)
    probed_at: int | None = document_key(or_null(SIZE), None)
    records: int = document_key(SIZE, 0)
    last_step: int | None = document_key(or_null(SIZE), None)
    timing: Any = document_key(or_null(OBJECT), None)
    has_timed: bool = document_key(FLAG, False)


@dataclass
class TimedWay:
    """A measurement of one way of running: the parts in low precision, its first step, and its time once known."""

    parts: list[str] = document_key(LIST)
    first: int = document_key(SIZE)
    ms: float | None = document_key(or_null(_WEIGHT), None)

    @property
    def key(self) -> str:
        return option_key(frozenset(self.parts))


DOCUMENT, VERSION = "bitplan-run-state", 2
_KEYS = {"document": NAME, "version": SIZE, "settings": OBJECT, "rows": OBJECT, "state": OBJECT}


class RunController(Closing):
    """Decides the plan of one run on one stream; the module's docstring has the phases.

    Users make one by `SelectivePrecisionPolicy.over_run` and `replay_run`.

    probe   gives the loss of a fixed batch, number 0 or 1, with its graph: small batches will do
    log     a file that gets a line for each change; None: changes are logged by `logging` alone
    times   `times` of a controller of the same model on the same machine: nothing is timed again
    clock   seconds; another one is for tests
    """

    probe: Probe | None = None

    def __init__(
        self,
        stream: BlockStream,
        settings: RunSettings,
        *,
        probe: Probe | None,
        log: str | Path | None = None,
        times: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if stream.train == "nothing":
            raise SelectiveError("RunController needs gradients; give the stream another train= than 'nothing'")
        if several_processes():
            raise SelectiveError(
                "RunController times and measures one process, and ranks would decide differently; train in one, or "
                "use replay_run with the log of a run in one"
            )
        self._set_up(stream, settings, clock, log)
        self.probe = probe
        self.state.times = dict(times or {})

    def _set_up(
        self, stream: BlockStream, settings: RunSettings, clock: Callable[[], float], path: str | Path | None
    ) -> None:
        self.stream, self.settings, self._clock = stream, settings, clock
        self.state = RunState()
        self._layers = {block.name: layers_of(block) for block in stream.blocks}
        self.rows = {row.name: row for row in rows_of(stream, self._layers, settings.wire)}
        for low in (self.rows, ()):  # a wire format that does not fit the model is an error now
            stream.set_formats(self._wire_formats(low))
        self._began: tuple[int, float] | None = None  # the step and second from which the present way is timed
        self._resumed_at = 0
        self._recorded: Mapping[tuple[str, int], float] = {}  # from the log: what was low, and its first step
        self._script: list[RunChange] | None = None
        self._applied: frozenset[str] | None = None
        if path is not None and Path(path).exists() and Path(path).stat().st_size:
            self._log: JsonLog | None = None
            self._old_log: Path | None = Path(path)  # only `load` may go on with it
        else:
            self._log, self._old_log = (None if path is None else self._open_log(path)), None

    @classmethod
    def replay(cls, stream: BlockStream, log: str | Path | RunLog) -> Self:
        """A controller that makes the changes of a log at their steps, and measures nothing."""
        script = log if isinstance(log, RunLog) else read_run_log(log)
        control = cls.__new__(cls)
        settings = Reader(script.where, SelectiveFileError).fields_of(RunSettings, "settings", script.settings)
        control._set_up(stream, RunSettings(**settings), time.perf_counter, None)
        now, then = control._described(), script.rows
        for name in dict.fromkeys((*then, *now)):
            if now.get(name, {}).get("format") != then.get(name, {}).get("format"):
                raise SelectiveFileError(
                    f"{script.where}: {name} began as {then.get(name, {}).get('format', 'nothing')} and is "
                    f"{now.get(name, {}).get('format', 'nothing')} here: replay with the model, the FP8 layers and the "
                    "moments of that run"
                )
        control._script = list(script.changes)
        return control

    def _open_log(self, path: str | Path) -> JsonLog:
        head = {"document": RUN_LOG, "version": 1, "settings": asdict(self.settings), "rows": self._described()}
        return JsonLog(path, _BEGINS, noun="log of a run's plan", head=head, may_lose_lines=True)

    def close(self) -> None:
        """End the log; the stream and the layers keep what they have."""
        if self._log is not None:
            self._log.close()

    @property
    def times(self) -> dict[str, float]:
        """Milliseconds a step of each way of running that was timed, by what was in low precision."""
        return dict(self.state.times)

    @property
    def plan(self) -> Plan:
        """Return the present plan: a row for each part of each block, with reason and evidence of its last change."""
        entries = {}
        for name, row in self.rows.items():
            last = self.state.reasons.get(name)
            reason, evidence, cause = row.reason, None, "default"
            if last is not None:
                reason, evidence, cause = last["reason"], {"step": last["step"], **last["evidence"]}, "policy"
            choice = Choice(self._format(row), reason, evidence, cause)  # type: ignore[arg-type]
            entries[name] = Planned(choice, kind=row.kind)
        return Plan(entries)

    def scalars(self) -> dict[str, float]:
        """For charts: the share of blocks in which each part is low."""
        parts = Counter(row.part for row in self.rows.values() if row.low is not None)
        low = Counter(self.rows[name].part for name in self.state.low)
        return {f"run_plan/low_{part}": low[part] / count for part, count in parts.items()}

    def _format(self, row: RunRow) -> str:
        return row.low if row.low is not None and row.name in self.state.low else row.high

    def _described(self) -> dict[str, dict[str, str]]:
        return {row.name: {"format": row.high, "kind": row.kind, "reason": row.reason} for row in self.rows.values()}

    # ---- the lifecycle -----------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Make decisions that are due, then begin the stream's step with them."""
        if self._old_log is not None:
            raise SelectiveError(
                f"{self._old_log}: has the changes of an earlier run; call load with that run's state to go on with "
                "it, or give another name"
            )
        state = self.state
        if state.last_step is not None and step < state.last_step:
            raise SelectiveError(f"step {step} is before step {state.last_step}: steps must go up")
        if self._script is not None:
            while self._script and self._script[0].step <= step:
                change = self._script.pop(0)
                row = self.rows[change.name]
                is_low = change.to != row.high
                self._note(step, [RowDecision(change.name, is_low, change.reason, dict(change.evidence))])
        elif step >= self.settings.final_from:
            self._raise(step)
        elif self._is_timed(step):
            self._decide(step)
        state.last_step = step
        self._run_with(frozenset(state.low), step)
        self._begin_timing(step)

    def end_step(self) -> None:
        """Close the step of the stream."""
        self.stream.end_step()

    # ---- phases ------------------------------------------------------------------------------------------------------

    @property
    def _parts(self) -> Option:
        return frozenset(row.part for row in self.rows.values() if row.low is not None)

    def _chosen(self) -> Chosen:
        return choose_option(self._parts, self.state.times, self.settings.least_gain)

    def _is_timed(self, step: int) -> bool:
        """Continue to time ways of running; returns True once all are timed."""
        timing: TimedWay | None = self.state.timing
        if timing is not None:
            if step < self._timed_until(timing) or (timing.ms is None and self._began is None):
                return False
            self._keep_time(step, timing)
        chosen = self._chosen()
        wanted = chosen.wanted
        if wanted is None:
            # The first steps of a run are slower: what was timed first must not lose by that.
            if not self.state.has_timed or not chosen.option or AGAIN in self.state.times:
                return True
            wanted = frozenset()
        self.state.timing, self._began = TimedWay(sorted(wanted), step), None
        self._note(
            step,
            [
                RowDecision(row.name, row.part in wanted, f"timed: {option_key(wanted)}", {"ms": self.times})
                for row in self.rows.values()
                if row.low is not None
            ],
        )
        return False

    def _timed_until(self, timing: TimedWay) -> int:
        return timing.first + self.settings.settle_steps + self.settings.timing_steps

    def _begin_timing(self, step: int) -> None:
        """Start the clock behind the steps that settle; a run that was resumed settles again, within the same steps."""
        timing: TimedWay | None = self.state.timing
        if timing is None or timing.ms is not None or self._began is not None:
            return
        settled = max(timing.first, self._resumed_at) + self.settings.settle_steps
        if step >= min(settled, self._timed_until(timing) - 1):
            self._began = step, self._now()

    def _end_timing(self, step: int, timing: TimedWay) -> None:
        """Stop the clock before `step`, where a whole step was timed."""
        if self._began is not None and step > self._began[0]:
            timing.ms = round((self._now() - self._began[1]) * 1e3 / (step - self._began[0]), 4)
            self._began = None

    def _now(self) -> float:
        self.stream.device.finish(self.stream.device.mark())
        return self._clock()

    def _keep_time(self, step: int, timing: TimedWay) -> None:
        """Record the time of a step in the way that is timed, from the log if an earlier process timed it."""
        self._end_timing(step, timing)
        key, state = timing.key, self.state
        took = self._recorded.get((key, timing.first), timing.ms)
        assert took is not None
        if self._log is not None:
            line = {"number": state.records, "step": step, "timed": key, "first": timing.first, "ms": took}
            self._log.write_lines(line)
        state.times[key] = min(took, state.times.get(key, took))
        if key == HIGH and len(state.times) > 1:
            state.times[AGAIN] = took
        state.timing, state.has_timed = None, True

    def _decide(self, step: int) -> None:
        """Measure impacts, choose rows, and look at the loss, where that is due."""
        settings, state = self.settings, self.state
        chosen = self._chosen()
        if settings.is_due(step, settings.measure_every, 3, state.measured_at):
            state.measured_at = step
            rows = (row for row in self.rows.values() if row.low is not None and row.part in chosen.option)
            self._measure(step, {row.name for row in rows} - {*state.locked})
            budget = settings.noise_share * (state.noise or 0.0)
            switchable = [row for row in self.rows.values() if row.low is not None]
            low, locked = frozenset(state.low), frozenset(state.locked)
            decided = choose_rows(switchable, low, chosen.gains, state.impacts, budget, locked)
            for one in decided:
                one.evidence.update(noise=state.noise, ms=self.times)
            self._note(step, decided)
        if state.low and settings.is_due(step, settings.feedback_every, 10, state.probed_at):
            state.probed_at = step
            self._look_at_loss(step)

    def _look_at_loss(self, step: int) -> None:
        state, settings = self.state, self.settings
        high = self._probe_loss(frozenset(), step)
        if not math.isfinite(high):
            log.warning(
                "bitplan: step %d: the probe's loss is %s with all high; look at the training itself", step, high
            )
            return
        while state.low:
            loss = self._probe_loss(frozenset(state.low), step)
            if loss - high <= settings.loss_tolerance:  # False for NaN
                return
            worst = max(state.impacts.get(name, 0.0) for name in state.low)
            names = [name for name in state.low if state.impacts.get(name, 0.0) >= worst]
            shown = loss if math.isfinite(loss) else None
            evidence = {"loss": shown, "loss_high": high, "impact": worst}
            reason = f"loss feedback: {loss:.6g} with the plan, {high:.6g} all high; the greatest impact goes high"
            state.locked += names
            self._note(step, [RowDecision(name, False, reason, dict(evidence)) for name in names])

    def _raise(self, step: int) -> None:
        """Raise rows to high precision again, as the last part of the schedule has it."""
        state, settings = self.state, self.settings
        state.timing = None
        if state.queue is None:
            if state.low and step < settings.total_steps - 1:
                state.measured_at = step
                self._measure(step, state.low)
            impacts = {name: state.impacts.get(name, 0.0) for name in state.low}
            state.queue = [list(one) for one in final_queue(impacts, step, settings.total_steps)]
        due = [name for at, name in state.queue if at <= step and name in state.low]
        reason = f"final part of the schedule, from step {settings.final_from}: by falling impact"
        evidence = {name: {"impact": state.impacts.get(name), "noise": state.noise} for name in due}
        self._note(step, [RowDecision(name, False, reason, evidence[name]) for name in due])

    # ---- measuring ---------------------------------------------------------------------------------------------------

    def _measure(self, step: int, rows: Collection[str]) -> None:
        """Measure the impact of these rows, and the noise; a group of blocks that has none of them costs nothing."""
        state, first = self.state, self._gradient(frozenset(), step, 0)
        size = float(first.square().sum())
        state.impacts, state.noise = {}, None
        if not (math.isfinite(size) and size > 0):
            log.warning("bitplan: step %d: the probe's gradient has the norm %s; all stays high", step, math.sqrt(size))
            return

        def change(other: Tensor) -> float:
            value = float((other - first).square().sum()) / size
            return min(value, LARGEST) if math.isfinite(value) else LARGEST

        state.noise = change(self._gradient(frozenset(), step, 1))
        blocks = [block.name for block in self.stream.blocks]
        count = min(self.settings.groups, len(blocks))
        for part in sorted({self.rows[name].part for name in rows}):
            for index in range(count):
                group = blocks[index * len(blocks) // count : (index + 1) * len(blocks) // count]
                names = [name for name in (f"{block}.{part}" for block in group) if name in rows]
                if names:
                    impact = change(self._gradient(frozenset(names), step, 0))
                    state.impacts |= dict.fromkeys(names, impact / len(names))

    def _gradient(self, low: frozenset[str], step: int, number: int) -> Tensor:
        """Run fixed batch `number` forward and backward, with `low` rows in low formats; return gradient samples.

        They are one float32 vector on the CPU, of evenly spaced numbers of every gradient. The next begin_step drops
        the step.
        """
        self._run_with(low, step)
        with self._no_trace():
            self._probe(number).backward()
            gradients = [one.grad for one in self._adapters() if one.grad is not None]
            if self.stream.training is not None:
                gradients += self.stream.training.arrived()
            if not gradients:
                raise SelectiveError(
                    "probe: no gradient reached the blocks; return the loss of a batch, with its graph"
                )
            samples = [one.detach().reshape(-1)[:: max(1, one.numel() // SAMPLED)].float().cpu() for one in gradients]
        return torch.cat(samples)

    def _probe_loss(self, low: frozenset[str], step: int) -> float:
        self._run_with(low, step)
        with evaluating(self.stream.model):
            return float(self._probe(0))

    def _probe(self, number: int) -> Tensor:
        if self.probe is None:
            raise SelectiveError("RunController measures: give probe=, which returns the loss of batch number 0 or 1")
        loss = self.probe(number)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise SelectiveError(f"probe({number}): expected the loss as a tensor of one number, got {loss!r}")
        return loss

    def _adapters(self) -> Iterator[nn.Parameter]:
        for block in self.stream.blocks:
            streamed = {id(one.parameter) for one in block.parameters.values()}
            yield from (one for one in block.module.parameters() if one.requires_grad and id(one) not in streamed)

    @contextmanager
    def _no_trace(self) -> Iterator[None]:
        """A context after which gradients, buffers and random numbers are as before."""
        kept = [(one, one.grad) for one in self.stream.model.parameters()]
        buffers = [(one, one.detach().clone()) for one in self.stream.model.buffers()]
        devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
        try:
            with torch.random.fork_rng(devices=devices):
                torch.manual_seed(0)
                for one, _ in kept:
                    one.grad = None
                yield
        finally:
            for one, gradient in kept:
                one.grad = gradient
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)

    # ---- changes -----------------------------------------------------------------------------------------------------

    def _note(self, step: int, decided: Sequence[RowDecision]) -> None:
        """Apply the decisions that change something, and write a line to the log for each."""
        state, lines = self.state, []
        low = set(state.low)
        for one in decided:
            row = self.rows[one.name]
            before = self._format(row)
            if (one.name in low) == one.is_low:
                continue
            low ^= {one.name}
            state.low = [name for name in self.rows if name in low]
            evidence = {key: value for key, value in one.evidence.items() if value is not None}
            state.reasons[one.name] = {"step": step, "reason": one.reason, "evidence": evidence}
            lines.append(self._line(state.records, one.name) | {"from": before})
            state.records += 1
        if lines and self._log is not None:
            self._log.write_lines(*lines)
        if lines and self._script is None:
            log.info("bitplan: step %d: %d rows of the plan change: %s", step, len(lines), lines[0]["reason"])

    def _line(self, number: int, name: str) -> dict[str, Any]:
        """The log's line of a row's last change."""
        row, last = self.rows[name], self.state.reasons[name]
        head = {"number": number, "step": last["step"], "name": name, "from": row.high, "to": self._format(row)}
        return head | {"reason": last["reason"], "evidence": last["evidence"]}

    def _run_with(self, low: frozenset[str], step: int) -> None:
        """Begin the step with these rows low, or begin it anew."""
        if low != self._applied:
            self.stream.set_formats(self._wire_formats(low))
            for block in self.stream.blocks:
                for layer, applied in self._layers[block.name]:
                    wanted = {part: applied[part] if f"{block.name}.{part}" in low else "bf16" for part in PRODUCTS}
                    layer.set_products(wanted)
            self._applied = low
        self.stream.begin_step(step)

    def _wire_formats(self, low: Collection[str]) -> dict[str, str]:
        formats = {}
        for block in self.stream.blocks:
            for path, one in block.parameters.items():
                if one.parameter.ndim >= 2:
                    own_type = str(one.parameter.dtype).removeprefix("torch.")
                    formats[f"{block.name}.{path}"] = self.settings.wire if f"{block.name}.{WIRE}" in low else own_type
        return formats

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that later decisions depend on, as values that JSON holds exactly; between steps.

        What is being timed counts by the steps until now: what saving takes is no part of it.
        """
        if self.state.timing is not None and self.state.last_step is not None:
            self._end_timing(self.state.last_step + 1, self.state.timing)
        head = {"document": DOCUMENT, "version": VERSION, "settings": asdict(self.settings)}
        return {**head, "rows": self._described(), "state": asdict(self.state)}

    def load_state_dict(self, document: Mapping[str, Any], *, where: str = "the state of a run's plan") -> None:
        """Go on as the saved controller would have; of another model or other settings it is refused.

        Times that the log has of steps after the state are taken over, so that the steps are made again as they were.
        """
        reader = Reader(where, SelectiveFileError)
        reader.require_document(document, DOCUMENT, "state of a run's plan")
        reader.version(document, VERSION)
        item = reader.keys("", document, _KEYS, tuple(_KEYS))
        for key, mine in (("settings", asdict(self.settings)), ("rows", self._described())):
            for name in dict.fromkeys((*item[key], *mine)):
                if item[key].get(name) != mine.get(name):
                    reader.stop(
                        f"{key}: {name} was {item[key].get(name)}, is {mine.get(name)}: resume with the old one"
                    )
        state = RunState(**reader.fields_of(RunState, "state", item["state"], every=True))
        for name in (*state.low, *state.locked, *state.reasons, *state.impacts):
            if name not in self.rows or self.rows[name].low is None:
                reader.stop(f"state names {name!r}, no row that changes")
        if state.timing is not None:
            state.timing = TimedWay(**reader.fields_of(TimedWay, "state.timing", state.timing, every=True))
            if not self._parts.issuperset(state.timing.parts):
                reader.stop(f"state.timing names {state.timing.parts}, expected parts of {sorted(self._parts)}")
        logged, self.state, self._applied, self._began = self.state.records, state, None, None
        self._resumed_at = 0 if state.last_step is None else state.last_step + 1
        if self._old_log is not None:
            self._recorded = _times_in(self._old_log)
            self._log, self._old_log = self._open_log(self._old_log), None
        elif logged < state.records:  # a new log: it begins with what is low
            lines, state.records = [self._line(number, name) for number, name in enumerate(state.low)], len(state.low)
            if self._log is not None:
                self._log.write_lines(*lines)
        if self._log is not None:
            self._log.write_lines({"number": state.records, "resumed_after": state.last_step})

    def save(self, path: str | Path) -> None:
        """Write the state into a file, whole or not at all; save the stream and the optimizer with it."""
        write_json(path, self.state_dict())

    def load(self, path: str | Path) -> None:
        self.load_state_dict(load_document(path, SelectiveFileError), where=str(path))


def _times_in(path: Path) -> Mapping[tuple[str, int], float]:
    try:
        return read_run_log(path).times
    except PlanFileError as error:  # a log may lose lines, and the run goes on
        log.warning("bitplan: %s; what it timed after the state is timed anew, and may be decided otherwise", error)
        return {}


# ---- rows ------------------------------------------------------------------------------------------------------------


def layers_of(block: StreamedBlock) -> list[tuple[SwitchesProducts, dict[str, str]]]:
    """Layers of a block whose products can be switched, each with the recipe that each product was made with."""
    return [
        (module, {part: str(getattr(module.made_with, part)) for part in PRODUCTS})
        for module in block.module.modules()
        if isinstance(module, SwitchesProducts)
    ]


def rows_of(
    stream: BlockStream, layers: Mapping[str, list[tuple[SwitchesProducts, dict[str, str]]]], wire: str
) -> Iterator[RunRow]:
    """Yield the rows of every block, all in high precision."""
    states = stream.plan
    for block in stream.blocks:
        for part in PRODUCTS:
            recipes = [applied[part] for _, applied in layers[block.name] if applied[part] != "bf16"]
            if recipes:
                yield RunRow(block.name, part, BF16, f"fp8:{recipes[0]}", "product", "a run begins in BF16")
        matrices = [one.parameter for one in block.parameters.values() if one.parameter.ndim >= 2]
        if matrices:
            own_type = str(matrices[0].dtype).removeprefix("torch.")
            yield RunRow(
                block.name, WIRE, own_type, wire if wire != own_type else None, "wire", "a run begins in its own type"
            )
        moments = [states[name] for path in block.parameters if (name := f"{block.name}.{path}.{MOMENTS}") in states]
        if moments:
            small = next((one for one in moments if one.format != "float32"), moments[0])
            reason = f"{small.reason}: decided when the stream was made, and so through the run"
            yield RunRow(block.name, MOMENTS, small.format, None, "state", reason)
