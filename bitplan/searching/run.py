"""search: evidence, the best plan for a goal, and the proof that it is one; what it hands over is a `SearchResult`."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from bitplan.base.folders import working_folder
from bitplan.base.hardware import hardware
from bitplan.base.logs import JsonLog
from bitplan.base.names import keywords_in
from bitplan.base.records import write_json
from bitplan.files.certificate import certify_search
from bitplan.files.engines.gguf_source import is_folder_like
from bitplan.files.headers import is_gguf
from bitplan.files.open_files import open_tensors
from bitplan.formats import get_format
from bitplan.packed.language.perplexity import Quality
from bitplan.plan.plan import Plan
from bitplan.searching.collect import EVIDENCE, collect_evidence, evidence_bytes, evidence_folder, smallest_bytes
from bitplan.searching.evidence import ProvenPlan, SearchEvidence, input_of, place_of, weight_format
from bitplan.searching.explain import explain_plan
from bitplan.searching.forecast import (
    MemoryUse,
    PhaseClock,
    expected_phases,
    in_minutes,
    measure_steps,
    within_memory,
)
from bitplan.searching.goal import WINDOWS, Goal, GoalError, Moment, SearchError, Stage, aims_of, no_stage
from bitplan.searching.plan_meter import (
    SHARE,
    InputMode,
    MeasuredPlan,
    PlanMeter,
    check_mode,
    hurt_kind,
    kl_by_kind,
    paired_difference,
    round_cheap_inputs,
    summary_of,
)
from bitplan.searching.runtime_formats import Target, candidates, target_of
from bitplan.searching.searched_model import SearchSubject, SearchText, Text, prepare
from bitplan.searching.solver import (
    Corrections,
    RivalPlan,
    Solution,
    best_uniform,
    front,
    kl_out_of_reach,
    may_win,
    rivals_of,
    size_out_of_reach,
    solve,
    uniform_plans,
    within,
)
from bitplan.searching.statistics import GRADIENT_TOKENS, steps_of
from bitplan.searching.timing import BlockTimes, is_timed, time_block
from bitplan.searching.training_evidence import read_gradients, read_speeds, time_by_policy, weigh_by_gradients

PLAN, FRONT, PROGRESS = "plan.json", "front.json", "progress.jsonl"
DOCUMENT = "bitplan-front"
VERSION = 1


@dataclass
class SearchResult:
    """The plan that a search hands over, what was measured of it and of rivals, and its evidence."""

    plan: Plan
    evidence: SearchEvidence
    goal: Goal
    solution: Solution
    front: list[Solution]
    winner: MeasuredPlan
    rivals: list[MeasuredPlan]
    reference: Quality
    noise_floor: Quality
    corrections: int
    unmeasured: list[RivalPlan] = field(default_factory=list)  # rivals that are predicted to lose
    nearest: Quality | None = None  # the plan without the statistics that its weights were rounded by
    times: BlockTimes | None = None  # with a speed goal: a whole block by the plan
    kinds: tuple[str, ...] = ()  # of each window of the proof, where the text is of several kinds
    inputs_kept: Quality | None = None  # the plan with all inputs as they are, where it rounds some
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)  # of each phase: wall, cpu

    @property
    def lost(self) -> bool:
        """Whether a plan that needs no search was better than the one that was searched, so that it is the result."""
        return self.winner.kind != "plan"

    @property
    def why_lost(self) -> str | None:
        """Why a plan that needs no search is handed over; None where the searched one is."""
        if not self.lost:
            return None
        label, kl, most = self.winner.label, self.winner.kl.mean, self.goal.max_kl
        searched = next((rival.kl.mean for rival in self.rivals if rival.kind == "plan"), None)
        if most is not None and searched is not None and searched > most:
            return (
                f"the searched plan has KL {searched:.4g} on text that was held out, above the goal of {most:g}; "
                f"{label}, which needs no search, has {kl:.4g}, and is the plan"
            )
        return f"{label}, which needs no search, is better and within the goal, and is the plan"

    @property
    def missed_goal(self) -> str | None:
        """What to say where the plan is farther from the model than was asked for, on text that was held out."""
        kl, most = self.winner.kl.mean, self.goal.max_kl
        if most is None or kl <= most:
            return None
        return f"KL {kl:.6g}, above the goal of {most:g}: give more bits or a higher limit"

    @property
    def best_rival(self) -> MeasuredPlan | None:
        """The best of the plans that need no search."""
        return min((one for one in self.rivals if one.kind != "plan"), key=lambda one: one.kl.mean, default=None)

    @property
    def better_beyond_goal(self) -> str | None:
        """What to say where a larger plan that needs no search is nearer to the model, which predictions denied."""
        best = self.best_rival
        if best is None or best.nbytes <= self.winner.nbytes or best.predicted <= self.winner.predicted:
            return None
        interval = paired_difference(self.winner, best).interval
        if interval is None or interval[0] <= 0:
            return None
        bits = self.evidence.bits(best.nbytes)
        more = 100 * (best.nbytes / self.winner.nbytes - 1)
        return (
            f"{best.label}, which needs no search, has KL {best.kl.mean:.4g} where the plan has "
            f"{self.winner.kl.mean:.4g}, with {more:.2g}% more bytes: predictions are wrong for this model; "
            f"a goal of {bits + 5e-4:.3f} bits would take it"
        )

    @property
    def hurt_kind(self) -> str | None:
        """What to say where one kind of text is hurt far more than another."""
        return hurt_kind(kl_by_kind(self.winner.quality, self.kinds))

    @property
    def unseen_experts(self) -> str | None:
        """What to say where no token of the text was sent to some experts."""
        count, total = (self.evidence.text.get(key, 0) for key in ("unseen_experts", "experts"))
        if not count:
            return None
        return (
            f"no token of the text was sent to {count} of {total} experts: they are rounded by what all experts of "
            "their layer got; give more text, or more windows of it"
        )

    def to_document(self) -> dict[str, Any]:
        """The result as the document front.json."""
        evidence = self.evidence
        best = self.best_rival
        return {
            "document": DOCUMENT,
            "version": VERSION,
            "model": evidence.model,
            "goal": self.goal.to_dict(),
            "reference": {
                "bytes": evidence.reference_bytes,
                "bits": evidence.bits(evidence.reference_bytes),
                "perplexity": self.reference.perplexity,
                "tokens": self.reference.tokens,
                "windows": self.reference.windows,
            },
            "noise_floor": summary_of(self.noise_floor),
            "solution": self.solution.to_dict(evidence),
            "corrections": self.corrections,
            **({} if self.times is None else {"block_times": self.times.to_dict()}),
            "plan": self.winner.to_dict(evidence),
            "nearest": None if self.nearest is None else summary_of(self.nearest),
            **({} if self.inputs_kept is None else {"inputs": self._inputs_document(self.inputs_kept)}),
            "lost": self.lost,
            "why_lost": self.why_lost,
            "missed_goal": self.missed_goal,
            "better_beyond_goal": self.better_beyond_goal,
            "unseen_experts": self.unseen_experts,
            **({} if not self.kinds else {"kinds": kl_by_kind(self.winner.quality, self.kinds)}),
            "against_best_rival": None if best is None else _against(self.winner, best),
            "measured": [rival.to_dict(evidence) for rival in self.rivals],
            "unmeasured": [_predicted(evidence, rival) for rival in self.unmeasured],
            "front": [{k: v for k, v in point.to_dict(evidence).items() if k != "choice"} for point in self.front],
            "uniform": [_predicted(evidence, rival) for rival in uniform_plans(evidence)],
            "heat": _heat(evidence, self.winner.choice),
            "seconds": self.seconds,
            "machine": hardware(),
        }

    def _inputs_document(self, unrounded: Quality) -> dict[str, Any]:
        """How many groups round inputs, and the plan's KL with (measured) and without it (`unrounded`), as JSON."""
        choice = self.winner.choice
        summary, kl = summary_of(unrounded), self.winner.kl.mean
        return {
            "groups": sum(input_of(name) is not None for name in choice.values()),
            "of": len(choice),
            "predicted": self.evidence.input_nats(choice),
            "kl_kept": summary["kl"],
            "share": max(0.0, 1 - summary["kl"] / kl) if kl > 0 else 0.0,
        }

    def save(self, folder: Path) -> None:
        """Write plan.json and front.json into the folder; the evidence is there already."""
        self.plan.save(folder / PLAN)
        write_json(folder / FRONT, self.to_document())


def _predicted(evidence: SearchEvidence, rival: RivalPlan) -> dict[str, Any]:
    nbytes = evidence.nbytes(rival.choice)
    return {
        "label": rival.label,
        "bytes": nbytes,
        "bits": evidence.bits(nbytes),
        "nats": evidence.predict(rival.choice),
    }


def _against(winner: MeasuredPlan, rival: MeasuredPlan) -> dict[str, Any]:
    difference = paired_difference(winner, rival)
    return {
        "label": rival.label,
        "kl_difference": difference.mean,
        "interval": difference.interval and list(difference.interval),
    }


def _heat(evidence: SearchEvidence, choice: Mapping[str, str]) -> list[dict[str, Any]]:
    """A cell for every group of the page's heat map: layer, part, format, its damage, that of the smallest format."""
    cells = []
    for name, fmt in choice.items():
        layer, part = place_of(name)
        group = evidence.groups[name]
        smallest = min(group.formats, key=lambda fmt: group.formats[fmt].nbytes)
        cells.append(
            {
                "group": name,
                "layer": layer,
                "part": part,
                "format": fmt,
                "nats": evidence.nats(name, fmt),
                "bytes": group.formats[fmt].nbytes,
                "bits": 8 * group.formats[fmt].nbytes / group.numbers,
                "nats_in_smallest": evidence.nats(name, smallest),
                "smallest": smallest,
            }
        )
    return cells


# ---- search ----------------------------------------------------------------------------------------------------------

MOST_CORRECTIONS = 3
AGREES = 0.1  # predicted and measured within a tenth: nothing to correct
WORTH = 0.02  # a corrected plan that promises less damage by this share is measured; of less, four windows say nothing


@dataclass(frozen=True)
class SearchOptions:
    """How a search works, but for what it is to find.

    device       where to compute, such as cuda
    context      tokens in a window of `text`; 512 unless given, or what the model has
    windows      how many windows of text the statistics are of
    gradients    for training: a saved state of selective precision; groups count by the gradients it saw
    fp8_policy   with a speed goal: a policy file, by whose times formats fp8_* count
    all_rivals   measure heuristics that are predicted to lose as well
    inputs       "8": products round their inputs to eight bits where the target can; "auto": where speed is asked for
                 the solver says of which layers, else where it adds little (`plan_meter.SHARE`); "keep": none do
    workers      processes of one thread each that round weights on CPUs, beside a GPU or in place of threads; a script
                 that asks for some begins under `if __name__ == "__main__":`; or the address of a Dask scheduler, whose
                 workers round them and take the statistics of a model that is a file, to the same plan
    memory       bytes that the process may have; what is free less a tenth unless given. What does not fit is refused
    stage        shows progress: called with a name and a number of steps, gives a context of what to call for each
    note         called before the work with what it will take
    began        from when on its seconds count; unless given, from the call on
    """

    device: str | None = None
    context: int | None = None
    windows: int = WINDOWS
    gradients: str | Path | None = None
    fp8_policy: str | Path | None = None
    all_rivals: bool = False
    workers: int | str = 0
    memory: int | None = None
    stage: Stage = no_stage
    note: Callable[[str], None] = lambda _line: None
    inputs: InputMode = "keep"
    began: Moment | None = None


def counted_from_now(options: SearchOptions | None) -> SearchOptions:
    """The options, or the defaults, with the moment of this call as the beginning unless they have another."""
    how = options or SearchOptions()
    return how if how.began is not None else replace(how, began=Moment.now())


@keywords_in(SearchOptions)
def search(
    model: nn.Module | str | Path,
    batches: Sequence[Tensor] | None = None,
    *,
    goal: Goal | Mapping[str, Any],
    text: Text | None = None,
    held_out: Sequence[Tensor] | str | Mapping[str, str] | None = None,
    formats: Sequence[str] | None = None,
    target: str = "bitplan",
    keep: Sequence[str] = (),
    only: Sequence[str] = (),
    out: str | Path | None = None,
    options: SearchOptions | None = None,
) -> SearchResult:
    """Find the best plan for a model within a goal, and prove it on text that was not used to find it.

    model      an nn.Module that maps token ids [windows, length] to logits, or a path: a Hugging Face folder or GGUF
    batches    token ids, [length] or [windows, length]; or `text`, plain, where the model is a path; of several kinds a
               mapping from names to contents, of which names that end in .jsonl have conversations, and None stands
               for text that the model writes itself
    goal       Goal(bits=4.5), or a mapping of its fields; several limits hold together
    held_out   other text, for the proof; without it the last quarter of the text is kept for that
    formats    candidates; those of `target` unless given, with IQ2 and IQ3 where weights may have few bits
    out        a folder for evidence.json, plan.json and front.json; a stopped search goes on there
    options    how it works: device, windows, processes, memory, progress
    """
    how = counted_from_now(options)
    search_goal = goal if isinstance(goal, Goal) else Goal(**goal)
    runtime = target_of(target)
    check_mode(how.inputs, runtime, candidates(runtime, formats))
    if runtime.streamed and search_goal.faster is not None and how.fp8_policy is None:
        raise GoalError(
            "speed of training needs a policy: whatever weights cross in, they are multiplied in BF16 where none says "
            "FP8",
            settings={"fp8_policy": "FILE"},
        )
    if how.gradients is not None and not runtime.streamed:
        text = f"gradients are of training, and the plan is for {runtime.name}"
        raise SearchError(text, settings={"target": "training"})
    if not isinstance(model, nn.Module):
        _require_folder(Path(model), runtime)
    folder = evidence_folder(out)
    with _as_it_was(model):
        subject, cut = prepare(
            model,
            batches,
            text,
            held_out,
            keep=keep,
            only=only,
            context=how.context,
            windows=how.windows,
            device=how.device,
            stage=how.stage,
        )
        subject.aim_at(runtime)
        aims_of(search_goal.kinds, cut.kinds)  # refused now, not after minutes
        most = search_goal.most_bytes(subject.numbers)
        names = candidates(runtime, formats, None if most is None else 8 * most / subject.numbers)
        searcher = Searcher(subject, cut, names, folder, how)
        searcher.require_size(search_goal)
        how.note(searcher.needs())
        return searcher.find(search_goal)


@dataclass
class Searcher:
    """A model and its text: plans for one goal after another, of evidence that is gathered once."""

    subject: SearchSubject
    text: SearchText
    formats: Sequence[str]
    folder: Path | None = None
    options: SearchOptions = field(default_factory=SearchOptions)
    meter: type[PlanMeter] = PlanMeter
    _collected: tuple[SearchEvidence, PlanMeter] | None = None

    def __post_init__(self) -> None:
        self.stage = self.clock = PhaseClock(self.options.stage, began=self.options.began or Moment.now())

    def expect(self) -> float:
        """Time a few steps of each kind; gives the seconds that the whole search will take, with those until now."""
        target, text = self.subject.target, self.text
        rounded = [name for name in self.formats if not get_format(name).is_cast and not target.streamed]
        steps = measure_steps(self.subject, text.statistics, rounded)
        tokens = {use: sum(map(len, windows)) for use, windows in vars(text).items() if isinstance(windows, list)}
        tokens |= {
            "watched": min(tokens["statistics"], GRADIENT_TOKENS),
            "steps": steps_of(self.subject, text.statistics, 0),
            "windows": len(text.proof),
        }
        shapes = [site.shape for site in self.subject.sites.values()]
        return self.clock.expect(
            expected_phases(shapes, len(self.subject.runner.blocks), tokens, len(self.formats), steps)
        )

    def find(self, goal: Goal) -> SearchResult:
        """The best plan within the goal, proven; written where there is a folder."""
        self.require_size(goal)
        self._read_training(goal)
        with self.working("search or fit"):
            with self._logged(goal):
                result = self._find(goal)
                result.seconds = self.clock.to_dict()
                if self.folder is not None:
                    result.save(self.folder)
                    self._certify(self.folder)
            return result

    def working(self, noun: str) -> AbstractContextManager[None]:
        """A context in which nobody else writes into the folder: sums are read from its files piece by piece."""
        return nullcontext() if self.folder is None else working_folder(self.folder, noun)

    def _certify(self, folder: Path) -> None:
        """Write the certificate of the folder, with the hashes of the model's files where it has some."""
        files: list[Path] = []
        if self.subject.path is not None:
            with open_tensors(self.subject.path) as file:
                files = file.files
        certify_search(folder, self.subject.path or Path(self.subject.where), files)

    @contextmanager
    def _logged(self, goal: Goal) -> Iterator[None]:
        """A context that writes steps into a log in the folder, for a report that follows the search."""
        if self.folder is None:
            yield
            return
        path, document = self.folder / PROGRESS, "bitplan-search-progress"
        model = "a model" if self.subject.path is None else self.subject.path.name
        try:
            with JsonLog(
                path, f'{{"document": "{document}"'.encode(), noun="log of a search", may_lose_lines=True
            ) as self.clock.log:
                start = {"document": document, "version": 1, "model": model, "goal": str(goal)}
                self.clock.log.write_lines(start)
                yield
        finally:
            self.clock.log = None
            path.unlink(missing_ok=True)

    def _find(self, goal: Goal) -> SearchResult:
        evidence, meter = self.collect(goal)
        is_free = self.options.inputs == "auto" and goal.faster is None
        # What rounded inputs may add is left free below a limit of KL.
        aim = replace(goal, max_kl=goal.max_kl / (1 + SHARE)) if is_free and goal.max_kl is not None else goal
        solution, corrections, error = solve_and_correct(evidence, aim, meter, self.stage)
        if is_free:
            choice = round_cheap_inputs(evidence, solution.choice, goal)
            solution = replace(solution, choice=choice, nats=evidence.predict(choice))
        solution, times = self._confirm_speed(evidence, goal, solution)
        result = replace(self._prove(evidence, goal, solution, corrections, error), times=times)
        evidence.add_proven(ProvenPlan(goal.to_dict(), max(0.0, result.winner.kl.mean), dict(result.winner.choice)))
        self._save_corrected(evidence)
        return result

    def collect(self, goal: Goal) -> tuple[SearchEvidence, PlanMeter]:
        """Gather the evidence (once), and return it with a meter that measures plans on the windows for checks."""
        rows = goal.rows if goal.faster is not None else None
        if self._collected is None or (rows is not None and not is_timed(self._collected[0], rows)):
            most = goal.most_bytes(self.subject.numbers)
            self._collected = collect_evidence(
                self.subject,
                self.text.statistics,
                self.text.checks,
                self.formats,
                folder=self.folder,
                unscored=self.text.unscored,
                kinds=self.text.check_kinds,
                near_bits=None if most is None else 8 * most / self.subject.numbers,
                inputs=self.options.inputs,
                rows=rows,
                workers=self.options.workers,
                memory=self.memory_use,
                stage=self.stage,
            )
            self._add_evidence_of_training(*self._collected, goal)
        self._collected[0].aims = aims_of(goal.kinds, self.text.kinds)
        return self._collected

    def _add_evidence_of_training(self, evidence: SearchEvidence, meter: PlanMeter, goal: Goal) -> None:
        for group in evidence.groups.values():
            group.weight = 1.0  # the folder may have those of another run
        norms, speeds = self._read_training(goal)
        if norms is not None:
            weigh_by_gradients(evidence, self.subject, meter.rounded.statistics, norms)
        if speeds is not None:
            time_by_policy(evidence, self.subject, speeds, goal.rows)

    def _read_training(self, goal: Goal) -> tuple[dict[str, float] | None, dict[str, float] | None]:
        """Norms of gradients, and speeds in FP8; what is of another model is refused before anything is measured."""
        norms = None if self.options.gradients is None else read_gradients(self.options.gradients, self.subject)
        has_speeds = self.options.fp8_policy is not None and goal.faster is not None
        return norms, read_speeds(self.options.fp8_policy or "", self.subject, goal.rows) if has_speeds else None

    @cached_property
    def memory_use(self) -> MemoryUse:
        """The threads and buffers of the search that fit into the memory limit; an error if none do."""
        measured = max(self.text.checks, self.text.proof, key=lambda windows: sum(map(len, windows)))
        return within_memory(self.subject, self.text.statistics, measured, self.options.memory)

    @cached_property
    def judge(self) -> PlanMeter:
        """The meter that measures plans on the held-out windows."""
        return self.meter_on(self.text.proof, self.text.kinds)

    def meter_on(self, windows: Sequence[Tensor], kinds: Sequence[str]) -> PlanMeter:
        assert self._collected is not None
        rounded, kept_logits = self._collected[1].rounded, self.memory_use.kept_logits // 2
        return self.meter(rounded, windows, unscored=self.text.unscored, kept_bytes=kept_logits, kinds=kinds)

    @cached_property
    def reference(self) -> tuple[Quality, Quality]:
        """Measurements of the unquantized model: its quality, and its noise floor in bfloat16."""
        with self.stage("measuring the model", 2 * len(self.text.proof)) as advance:
            reference = self.judge.reference(lambda count: advance(count, "the model itself"))
            return reference, self.judge.noise_floor(lambda count: advance(count, "noise floor"))

    def _prove(
        self, evidence: SearchEvidence, goal: Goal, solution: Solution, corrections: int, error: float
    ) -> SearchResult:
        """Measure the plan, and rivals that may be better, on held-out text; hand over the best within the goal."""
        reference, floor = self.reference
        every = rivals_of(evidence, solution.nbytes)
        rivals = [plan for plan in every if self.options.all_rivals or may_win(evidence, plan, solution.choice, error)]
        plan, *others = self.measured(evidence, [RivalPlan("searched plan", "plan", solution.choice), *rivals])
        winner = best_of(evidence, goal, plan, others, by_gradients=self.options.gradients is not None)
        more = int(any(map(input_of, winner.choice.values())))
        with self.stage("proving", len(self.text.proof) * (1 + more)) as advance:
            label = f"{winner.label}, without statistics"
            nearest = self.judge.measure(
                evidence, winner.choice, label, lambda count: advance(count, label), nearest=True
            )
            unrounded = f"{winner.label}, inputs as they are"
            inputs_kept = None
            if any(map(input_of, winner.choice.values())):
                inputs_kept = self.judge.measure(
                    evidence, winner.choice, unrounded, lambda count: advance(count, unrounded), inputs={}
                )
        return SearchResult(
            explain_plan(evidence, winner.choice, rows=goal.rows if goal.faster is not None else None),
            evidence,
            goal,
            solution,
            front(evidence),
            winner,
            [plan, *others],
            reference,
            floor,
            corrections,
            [rival for rival in every if rival not in rivals],
            nearest,
            kinds=self.text.kinds,
            inputs_kept=inputs_kept,
        )

    def measured(self, evidence: SearchEvidence, plans: Sequence[RivalPlan]) -> list[MeasuredPlan]:
        """Measure each of these plans on held-out text."""
        self.judge.prepare(evidence, [plan.choice for plan in plans], self.stage)
        with self.stage("proving", len(self.text.proof) * len(plans)) as advance:
            return [self.judge.measured(evidence, plan, partial(_advance, advance, plan.label)) for plan in plans]

    def _confirm_speed(
        self, evidence: SearchEvidence, goal: Goal, solution: Solution
    ) -> tuple[Solution, BlockTimes | None]:
        """Time a whole block by the plan; where it misses the speed that its layers promised, ask for more once."""
        if goal.faster is None or self.subject.target.streamed:
            return solution, None
        with self.stage("timing blocks", 2) as advance:
            times = self._time(evidence, solution, goal.rows)
            advance(1, "the plan")
            if times is None or times.faster >= goal.faster:
                return solution, times
            try:
                tighter = solve(evidence, replace(goal, faster=goal.faster * goal.faster / times.faster))
            except GoalError:
                return solution, times
            again = self._time(evidence, tighter, goal.rows)
            advance(1, "a faster plan")
        return (tighter, again) if again is not None and again.faster > times.faster else (solution, times)

    def _time(self, evidence: SearchEvidence, solution: Solution, rows: int) -> BlockTimes | None:
        formats = {name: fmt for group, fmt in solution.choice.items() for name in evidence.groups[group].tensors}
        return time_block(self.subject, formats, rows)

    def require_size(self, goal: Goal) -> None:
        """Refuse a size that no plan has, or that the model has already, before minutes are spent."""
        numbers, stored = self.subject.numbers, self.subject.stored.nbytes
        most, least = goal.most_bytes(numbers), smallest_bytes(self.subject, self.formats)
        if most is not None and least > most:
            raise size_out_of_reach(goal, least, numbers, self._why_so_large(most))
        if most is not None and stored <= most and goal.faster is None and goal.max_kl is None:
            raise GoalError(
                f"{self.subject.where}: the model fits as it is: {stored:,} bytes, {8 * stored / numbers:.3f} bits a "
                f"weight, and {most:,} bytes are allowed; give a smaller size",
                settings={"bits": None, "nbytes": None},
            )

    def needs(self) -> str:
        """A sentence on the bytes that a search takes in memory and on disk; more than there is is refused."""
        memory = self.memory_use
        took = in_minutes(self.expect())
        words = (
            f"the search takes about {took} and {memory.needed / 1e9:.1f} GB of memory, of {memory.limit / 1e9:.1f} GB"
        )
        if self.folder is None:
            return words
        lasting, scratch = evidence_bytes(self.subject, self.text.statistics)
        folder = self.folder.absolute()
        free = shutil.disk_usage(next(parent for parent in (folder, *folder.parents) if parent.exists())).free
        on_disk = (
            f"statistics take about {lasting / 1e6:,.0f} MB in {folder}, and {scratch / 1e6:,.0f} MB more until then"
        )
        if lasting + scratch > free:
            text = f"{on_disk}; {free / 1e6:,.0f} MB are free there: give a folder on another disk"
            raise SearchError(text, settings={"out": None})
        return f"{on_disk}; {words}"

    def _why_so_large(self, most: int) -> str:
        """Say why most bytes stay, where tensors that stay take more than is allowed."""
        by_reason = Counter[str]()
        for tensor in self.subject.stays.values():
            by_reason[tensor.reason] += tensor.nbytes
        if by_reason.total() <= most:
            return ""
        reason, nbytes = by_reason.most_common(1)[0]
        return f"; {by_reason.total():,} bytes stay as they are, {nbytes:,} of them: {reason}"

    def _save_corrected(self, evidence: SearchEvidence) -> None:
        """Write corrections into the evidence file, where formats that this search did not ask for stay."""
        if self.folder is None:
            return
        saved = SearchEvidence.load(self.folder / EVIDENCE)
        for name, group in evidence.groups.items():
            factors = {weight_format(fmt): cost.factor for fmt, cost in group.formats.items()}
            every = {**saved.groups[name].formats, **group.formats}
            corrected = {
                fmt: replace(cost, factor=factors.get(weight_format(fmt), cost.factor)) for fmt, cost in every.items()
            }
            saved.groups[name] = replace(group, formats=corrected)
        saved.together, saved.proven = evidence.together, evidence.proven
        saved.save(self.folder / EVIDENCE)


def _require_folder(path: Path, target: Target) -> None:
    """Refuse a GGUF file whose plan could not be applied: only llama.cpp's files keep its names."""
    is_known = not path.is_file() or not is_gguf(path) or is_folder_like(path)
    if not is_known and target.export != "gguf" and not target.streamed:
        raise SearchError(
            f"{path}: GGUF of an architecture whose names in transformers are not known, so a plan for {target.name} "
            "could not be applied; search the model's folder, or for llama.cpp",
            settings={"target": "llama.cpp"},
        )


@contextmanager
def _as_it_was(model: nn.Module | str | Path) -> Iterator[None]:
    """A context after which each module of a model is in training or evaluation mode as before."""
    modes = [(module, module.training) for module in model.modules()] if isinstance(model, nn.Module) else []
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training


def best_of(
    evidence: SearchEvidence, goal: Goal, plan: MeasuredPlan, others: Sequence[MeasuredPlan], *, by_gradients: bool
) -> MeasuredPlan:
    """The best by measurement; a plan above the limit of KL loses to any other that is within the whole goal."""
    allowed = [rival for rival in others if within(evidence, goal, rival.choice, rival.kl.mean)]
    if goal.max_kl is not None and plan.kl.mean > goal.max_kl and allowed:
        return min(allowed, key=_is_better(goal))
    if by_gradients:
        allowed = [rival for rival in allowed if evidence.harm(rival.choice) <= evidence.harm(plan.choice)]
    return min([plan, *allowed], key=_is_better(goal))


def _advance(advance: Callable[[int, str], None], label: str, count: int) -> None:
    advance(count, label)


def _is_better(goal: Goal) -> Callable[[MeasuredPlan], tuple[float, float]]:
    """Plans are ordered by what the goal leaves open: by bytes where only a distance is given, else by distance."""
    if goal.asks_for_fewest_bytes:
        return lambda plan: (plan.nbytes, plan.counted)
    return lambda plan: (plan.counted, plan.nbytes)


def solve_and_correct(
    evidence: SearchEvidence, goal: Goal, meter: PlanMeter, stage: Stage = no_stage
) -> tuple[Solution, int, float]:
    """Solve and measure the plan; while that is not what was predicted, correct the formats' damage and solve again.

    The text for this is that of the checks. Uniform plans of the size, which the proof measures too, come first: what
    they say of their formats counts before a plan is solved. Of all plans that were solved the best by measurement is
    given; and how many times it was solved again, and by which factor the prediction of a plan was off at most.
    """
    tried: list[tuple[float, Solution]] = []
    error, corrections = 1.0, Corrections(evidence)
    # Beside other limits a plan has the least damage it can; whether that is within `max_kl` is measured.
    limits = goal if goal.asks_for_fewest_bytes else replace(goal, max_kl=None)

    def measured(choice: Mapping[str, str], label: str) -> tuple[float, float]:
        """Measure a choice: its KL, and the figure that the goal is about."""
        meter.prepare(evidence, [choice], stage)
        with stage("correcting", 1) as advance:
            if evidence.aims:
                quality = meter.measure(evidence, choice, label)
                assert quality.against is not None
                kl, counted = quality.against.kl.mean, meter.counted(evidence, quality)
            else:
                kl = counted = meter.kl(evidence, choice, label)
            advance(1, label)
        corrections.add(choice, kl)
        return kl, counted

    uniform = best_uniform(evidence, solve(evidence, limits).nbytes)
    rivals = [(measured(rival.choice, rival.label)[1], rival.choice) for rival in uniform]
    corrections.apply()
    for done in range(MOST_CORRECTIONS + 1):
        try:
            solution = solve(evidence, limits)
        except GoalError:  # by corrected predictions; what was measured within the goal counts more
            if not any(kl <= (goal.max_kl or 0.0) for kl, _ in tried):
                raise
            break
        if not _is_worth_it(evidence, goal, solution, [other for _, other in tried]):
            break
        predicted = evidence.predict(solution.choice)
        kl, counted = measured(solution.choice, "the plan")
        tried.append((counted, solution))
        if kl > 0 and predicted > 0:
            error = max(error, kl / predicted, predicted / kl)
        if done == MOST_CORRECTIONS or abs(kl - predicted) <= AGREES * predicted:
            break
        corrections.apply()
    kl, choice = min(rivals, key=lambda pair: pair[0], default=(math.inf, {}))
    cut = _cut_to_goal(evidence, limits, choice) if kl < min(tried_kl for tried_kl, _ in tried) else None
    if cut is not None and all(cut.choice != other.choice for _, other in tried):
        tried.append((measured(cut.choice, "the best uniform plan, cut to the goal")[1], cut))
    corrections.apply()
    if goal.asks_for_fewest_bytes:
        reached = [solution for measured, solution in tried if measured <= (goal.max_kl or 0.0)]
        nearest = min(tried, key=lambda pair: pair[0])[1]
        best = min(reached, key=lambda solution: solution.nbytes) if reached else nearest
        return replace(best, nats=evidence.predict(best.choice)), len(tried) - 1, error
    least, best = min(tried, key=lambda pair: pair[0])
    if goal.max_kl is not None and least > goal.max_kl:
        raise GoalError(kl_out_of_reach(evidence, goal.max_kl, least))
    return _by_all_evidence(evidence, limits, best, [other for _, other in tried]), len(tried) - 1, error


def _by_all_evidence(evidence: SearchEvidence, goal: Goal, best: Solution, tried: Sequence[Solution]) -> Solution:
    """The best measured plan, predicted by the final evidence; `promised`: by how much another may be better.

    By that another plan may promise less damage. Where it was measured, it is known to be worse.
    """
    last, harm = solve(evidence, goal), evidence.harm(best.choice)
    is_new = harm > 0 and all(last.choice != other.choice for other in tried)
    promised = max(0.0, 1 - evidence.harm(last.choice) / harm) if is_new else 0.0
    return replace(best, nats=evidence.predict(best.choice), bound=last.bound, gap=last.gap, promised=promised)


def _is_worth_it(evidence: SearchEvidence, goal: Goal, solution: Solution, tried: Sequence[Solution]) -> bool:
    """Whether a plan by corrected evidence promises enough over those that were measured to be rounded and measured."""
    if any(solution.choice == other.choice for other in tried):
        return False
    if not tried or goal.asks_for_fewest_bytes:
        return True
    return evidence.harm(solution.choice) < (1 - WORTH) * min(evidence.harm(other.choice) for other in tried)


def _cut_to_goal(evidence: SearchEvidence, goal: Goal, choice: Mapping[str, str]) -> Solution | None:
    """The best plan that has no format of more bytes than a choice has: close to it, where little is to be saved.

    None where the choice is within the size itself, or where other limits need larger formats.
    """
    limit = goal.most_bytes(evidence.numbers)
    if limit is None or evidence.nbytes(choice) <= limit:
        return None
    groups = {}
    for name, group in evidence.groups.items():
        most = group.formats[choice[name]].nbytes
        smaller = {fmt: cost for fmt, cost in group.formats.items() if cost.nbytes < most or fmt == choice[name]}
        groups[name] = replace(group, formats=smaller)
    try:
        return solve(replace(evidence, groups=groups), goal)
    except GoalError:
        return None
