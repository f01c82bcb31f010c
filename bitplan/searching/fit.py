"""fit: the best model for this memory and this context: weights, keys and values in one solution.

What a running model takes is four parts, and a plan decides two of them:

    weights      every tensor in its format; what is not packed, in the type that the model computes in
    K and V      of `context` tokens and `batch` texts, every layer's keys and values in their formats; a layer of a
                 sliding window holds no more than its window
    workspace    what is there while a token is made: one layer's keys and values decoded, the mask, what passes between
                 layers, logits
    overhead     the process itself: Python, torch, transformers, compiled loops; on a GPU, nothing that torch allocates

Workspace and overhead of bitplan are measured together, in a process of their own (`memory_probe`), for this context
and batch; those of other engines are a formula (`engine_memory`). What keys and values cost (`kv_evidence`) are further
groups of the evidence of a search, so one program of the same solver chooses formats of weights and of keys and values
within the memory.

In the folder, beside the files of a search: memory.json, what was measured beside weights; kv_evidence.json, groups
`layers.3.keys` with bytes of one token; and fit.json, what was found, for this goal and for earlier ones. `plan_fit`
answers for another memory, context or batch from these.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, device, nn

from bitplan.base.documents import LIST, NUMBER, OBJECT, SIZE, TEXT, Kind, Reader, is_text, load_document
from bitplan.base.records import write_json
from bitplan.files.engines.targets import get_engine
from bitplan.formats import get_format
from bitplan.formats.elements import ITEM_BYTES
from bitplan.plan.kv_formats import KVFormats
from bitplan.plan.plan import Plan
from bitplan.searching.collect import EVIDENCE, evidence_folder, smallest_bytes, uncorrected
from bitplan.searching.engine_memory import EngineMemory, engine_of, kv_of_choice
from bitplan.searching.evidence import (
    FormatCost,
    SearchEvidence,
    StayingTensor,
    TensorGroup,
    bits_of,
    in_host,
    is_in_host,
    weight_format,
)
from bitplan.searching.explain import explain_plan
from bitplan.searching.goal import (
    MEAN,
    EvidenceFileError,
    Goal,
    GoalError,
    Kinds,
    SearchError,
    aims_of,
    check_kinds,
    kinds_document,
    kinds_text,
)
from bitplan.searching.kv_evidence import JointMeter as JointMeter
from bitplan.searching.kv_evidence import KVShapes, dtype_of, gather_kv, watch_kv
from bitplan.searching.memory_probe import MemoryProbe, Reserve, TokenTimes
from bitplan.searching.plan_meter import MeasuredPlan, PlanMeter, hurt_kind, kl_by_kind, summary_of
from bitplan.searching.run import PLAN, Searcher, SearchOptions, best_of, counted_from_now, solve_and_correct
from bitplan.searching.runtime_formats import candidates, few_bits, target_of
from bitplan.searching.searched_model import SearchSubject, Text, prepare
from bitplan.searching.solver import RivalPlan, Solution, solve
from bitplan.searching.two_memories import (
    USUAL_BITS,
    best_split,
    crossing_first,
    lookups_of,
    place_goal,
    scale_bytes,
    uniform_formats,
    with_places,
    with_workspace,
)

KV_EVIDENCE, FIT = "kv_evidence.json", "fit.json"
DOCUMENT, VERSION = "bitplan-fit", 1
RESERVED = "workspace and overhead"
JOINT = "joint plan"
# Of the page's picture: times what the goal leaves for weights, keys and values; times its context; the solver's gap.
ROOMS, CONTEXTS, PICTURE_GAP = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0), (0.25, 0.5, 1.0, 2.0, 4.0), 1e-3


@dataclass(frozen=True)
class FitGoal:
    """What must fit: bytes of memory for a model that holds `context` tokens of each of `batch` texts, on a device.

    memory   that the running model may take: on a CPU the process, on a GPU what torch allocates
    context  of a text, prompt and answer together
    target   the engine that it shall run in
    kinds    of text of several kinds what counts, as in `Goal`
    ram      bytes of the host's memory, where weights may wait for which `memory`, the GPU's, has no room
    ms       that a token may take then; unless given, as long as a usual format with its best split, or a full GPU
    """

    memory: int
    context: int
    batch: int = 1
    device: str = "cpu"
    target: str = "bitplan"
    kinds: Kinds = MEAN
    ram: int | None = None
    ms: float | None = None

    def __post_init__(self) -> None:
        engine_of(self.target)
        check_kinds(self.kinds)
        for name in ("memory", "context", "batch", "ram", "ms"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise GoalError(f"the goal must be above 0, got {value}", settings={name: None})
        if self.ram is not None and self.target != "bitplan":
            raise GoalError(
                f"two memories are for models that run in bitplan, and this is for {self.target}",
                settings={"ram": None},
            )
        if self.ms is not None and self.ram is None:
            raise GoalError("a time is a goal beside the host's memory", settings={"ram": "64GB"})

    @property
    def engine(self) -> EngineMemory:
        return engine_of(self.target)

    @property
    def dtype(self) -> str | None:
        """The type of what is not packed: float32 in bitplan on a CPU, elsewhere as it is stored."""
        return "float32" if self.engine.overhead is None and device(self.device).type == "cpu" else None

    @property
    def on_gpu(self) -> bool:
        """Whether bitplan itself runs the model on a GPU; scales then also lie in the order of the kernels."""
        return self.engine.overhead is None and device(self.device).type == "cuda"

    @property
    def of_bytes(self) -> Goal:
        """The goal as the solver takes it where only the device's memory is limited."""
        return Goal(nbytes=self.memory, kinds=self.kinds)

    def to_dict(self) -> dict[str, Any]:
        settings = {name: value for name, value in vars(self).items() if name != "kinds" and value is not None}
        return settings | kinds_document(self.kinds)

    def __str__(self) -> str:
        batch = f", {self.batch} texts at once" if self.batch > 1 else ""
        target_text = f"on {self.device}" if self.engine.overhead is None else f"in {self.target}"
        kinds = f", {kinds_text(self.kinds)}" if self.kinds != MEAN else ""
        ram = "" if self.ram is None else f" and {self.ram:,} on the host"
        time = "" if self.ms is None else f", {self.ms:g} ms a token"
        return f"{self.memory:,} bytes{ram}, {self.context:,} tokens of context{batch}, {target_text}{time}{kinds}"


# ---- one problem -----------------------------------------------------------------------------------------------------


def joint_evidence(
    weights: SearchEvidence, kv: SearchEvidence, goal: FitGoal, reserved: int, probe: MemoryProbe | None = None
) -> SearchEvidence:
    """Groups of both in bytes of memory, so that the bytes of a choice are all that the running model takes.

    probe   what products take while they run, and where the goal has two memories, times: then each format may lie in
            either
    """
    wide, engine, lookups = goal.dtype, goal.engine, lookups_of(weights)

    def in_memory(name: str, fmt: str, cost: FormatCost, group: TensorGroup) -> FormatCost:
        stored = weight_format(fmt)
        if wide is None or not get_format(stored).is_cast:
            shapes = (shape for shape, _ in group.tensors.values())
            scales = scale_bytes(stored, shapes, on_gpu=goal.on_gpu and name not in lookups)
            return replace(cost, nbytes=cost.nbytes + scales)
        return replace(cost, nbytes=group.numbers * ITEM_BYTES[wide])

    groups = {
        name: replace(group, formats={fmt: in_memory(name, fmt, cost, group) for fmt, cost in group.formats.items()})
        for name, group in weights.groups.items()
    }
    stays = {
        name: replace(tensor, nbytes=math.prod(tensor.shape) * ITEM_BYTES[wide])
        if wide is not None and tensor.stored in ("bfloat16", "float16", "float32")
        else tensor
        for name, tensor in weights.stays.items()
    }
    stays[RESERVED] = StayingTensor("float32", (), "", "float32", reserved, "beside weights, keys and values")
    for name, group in kv.groups.items():
        shapes = KVShapes({part: shape for part, (shape, _) in group.tensors.items()}, kv.text["windows"])
        formats = {
            fmt: replace(cost, nbytes=shapes.nbytes(fmt, engine, goal, ITEM_BYTES[wide] if wide is not None else 0))
            for fmt, cost in group.formats.items()
        }
        groups[name] = replace(group, formats=formats)
    joint = replace(weights, groups=groups, stays=stays, proven=[], aims=aims_of(goal.kinds, weights.kinds))
    if probe is not None:
        joint = with_workspace(joint, probe)
    if probe is None or probe.times is None or goal.ram is None:
        return joint
    return with_places(joint, probe.times, goal, probe.decoded)


def _kept(kv: SearchEvidence) -> str:
    """The plain format in which keys and values stay where they are not packed."""
    group = next(iter(kv.groups.values()))
    return next(fmt for fmt in group.formats if get_format(fmt).is_cast)


def _in_8_bits(goal: FitGoal) -> str:
    """The format of eight bits in which the goal's engine keeps keys and values."""
    return [*goal.engine.formats][-1]


@dataclass(frozen=True)
class FitRow:
    """A plan within the memory: its parts in bytes, what is predicted, and where it was measured, its figures.

    Of two memories `host` are the bytes of weights in the host's, and `ms` what a token is predicted to take.
    `workspace` is what its largest product takes beyond what was measured.
    """

    label: str
    weights: int
    kv: int
    predicted: float
    choice: Mapping[str, str]
    measured: Mapping[str, Any] = field(default_factory=dict)
    host: int = 0
    ms: float | None = None
    workspace: int = 0

    @property
    def kl(self) -> float | None:
        return self.measured.get("kl")

    @property
    def kinds(self) -> Mapping[str, float]:
        """The distance on each kind of text, where it was measured on several."""
        by_kind: Mapping[str, float] = self.measured.get("kinds", {})
        return by_kind

    def to_dict(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "weights_bytes": self.weights,
            "kv_bytes": self.kv,
            "predicted": self.predicted,
            **({} if self.ms is None else {"host_bytes": self.host, "ms": self.ms}),
            **({"workspace_bytes": self.workspace} if self.workspace else {}),
            **self.measured,
            "choice": dict(self.choice),
        }

    @classmethod
    def from_document(cls, row: Mapping[str, Any]) -> FitRow:
        rest = {key: value for key, value in row.items() if key not in (*_ROW_KEYS, *_ROW_MAY)}
        sizes = row["weights_bytes"], row["kv_bytes"]
        placed = {"host": row.get("host_bytes", 0), "ms": row.get("ms"), "workspace": row.get("workspace_bytes", 0)}
        return cls(row["label"], *sizes, row["predicted"], row["choice"], rest, **placed)


@dataclass
class FitResult:
    """The plan, what it takes, and the plans that were measured beside it; `missing` says which do not fit at all."""

    goal: FitGoal
    plan: Plan
    kv: KVFormats
    row: FitRow
    rows: list[FitRow]
    solution: Solution
    probe: MemoryProbe
    model: str
    numbers: int
    missing: list[str] = field(default_factory=list)
    noise_floor: float | None = None
    tokens: int = 0
    landscape: list[dict[str, Any]] = field(default_factory=list)  # what other memories and contexts would cost

    @property
    def hurt_kind(self) -> str | None:
        """What to say where one kind of text is hurt far more than another."""
        return hurt_kind(self.row.kinds)

    @property
    def needed(self) -> int:
        """The bytes of memory that the running model is predicted to take at most."""
        return self.row.weights + self.row.kv + self.row.workspace + self.probe.nbytes

    def to_document(self) -> dict[str, Any]:
        return {
            "document": DOCUMENT,
            "version": VERSION,
            "model": self.model,
            "goal": self.goal.to_dict(),
            "needed_bytes": self.needed,
            "probe": self.probe.to_dict(),
            "kv_cache": self.kv.to_document(),
            "gap": self.solution.gap,
            "bound": self.solution.bound,
            "plan": self.row.to_dict(),
            "measured": [row.to_dict() for row in self.rows],
            "missing": self.missing,
            "noise_floor": self.noise_floor,
            "tokens": self.tokens,
            **({} if self.hurt_kind is None else {"hurt_kind": self.hurt_kind}),
            "unproven": self.goal.engine.unproven,
            **({"landscape": self.landscape} if self.landscape else {}),
        }

    def save(self, folder: Path) -> None:
        """Write plan.json, and fit.json with the answers for earlier goals; evidence.json is there already."""
        document, path = self.to_document(), folder / FIT
        before = read_fit(path) if path.is_file() else None
        others = [] if before is None else [_without_picture(before), *before["earlier"]]
        document["earlier"] = [earlier for earlier in others if earlier["goal"] != document["goal"]]
        self.plan.save(folder / PLAN)
        write_json(path, document)


def _without_picture(document: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key not in ("landscape", "earlier")}


def _plan_of(weights: SearchEvidence, kv: SearchEvidence, choice: Mapping[str, str]) -> tuple[Plan, KVFormats]:
    """Turn a joint choice into a plan of the tensors, with reasons, and the formats of keys and values."""
    chosen = {name: fmt.removesuffix("@host") for name, fmt in choice.items() if name in weights.groups}
    tensors, formats = explain_plan(weights, chosen), kv_of_choice(choice)
    waiting = {tensor for name in chosen if is_in_host(choice[name]) for tensor in weights.groups[name].tensors}
    reasons = {
        part: f"{group.nats(choice[name]):.3g} nats, {group.formats[choice[name]].nbytes} bytes a token, as measured"
        for name, group in kv.groups.items()
        for part in group.tensors
    }
    entries = {
        name: replace(entry, choice=replace(entry.choice, place="host")) if name in waiting else entry
        for name, entry in tensors.entries.items()
    }
    return Plan({**entries, **formats.entries(reasons)}, padding=tensors.padding), formats


def _row(
    joint: SearchEvidence,
    kv: SearchEvidence,
    label: str,
    choice: Mapping[str, str],
    goal: FitGoal,
    times: TokenTimes | None = None,
) -> FitRow:
    in_kv = sum(joint.groups[name].formats[choice[name]].nbytes for name in kv.groups)
    work = joint.workspace(choice)
    total_bytes = joint.nbytes(choice) - joint.stays[RESERVED].nbytes - work
    row = FitRow(label, total_bytes - in_kv, in_kv, joint.predict(choice), choice, workspace=work)
    if times is None or goal.ram is None:
        return row
    products = joint.microseconds(choice, goal.batch)
    assert products is not None
    return replace(row, host=joint.host_bytes(choice), ms=times.token_us(products) / 1e3)


def landscape(
    weights: SearchEvidence, kv: SearchEvidence, goal: FitGoal, reserved: Callable[[int], int]
) -> list[dict[str, Any]]:
    """What is predicted of the best plans for memories and contexts around a goal; those with no plan are left out."""
    beside, points = reserved(goal.context), []
    memories = [beside + int(times * (goal.memory - beside)) for times in ROOMS]
    for times in CONTEXTS:
        context = max(2, int(times * goal.context))
        joint = joint_evidence(weights, kv, replace(goal, context=context), reserved(context))
        for memory in memories:
            try:
                solution = solve(joint, replace(goal, memory=memory).of_bytes, gap=PICTURE_GAP)
            except GoalError:
                continue
            row = _row(joint, kv, JOINT, solution.choice, goal)
            sizes = {"weights_bytes": row.weights, "kv_bytes": row.kv}
            points.append({"memory": memory, "context": context, "predicted": row.predicted, **sizes})
    return points


def _within(joint: SearchEvidence, kv: SearchEvidence, goal: FitGoal) -> None:
    """Raise where no plan fits into the goal's memory, with what the smallest would take."""
    least = {name: min(cost.nbytes for cost in group.formats.values()) for name, group in joint.groups.items()}
    reserved, in_kv = joint.stays[RESERVED].nbytes, sum(least[name] for name in kv.groups)
    weights = joint.staying_bytes - reserved + sum(least.values()) - in_kv
    _refuse_below(joint.model, goal, weights, in_kv, reserved)


def _refuse_below(model: str, goal: FitGoal, weights: int, in_kv: int, reserved: int) -> None:
    """Raise for a memory below that of the smallest plan; the message has both, and the context that would fit."""
    needed = weights + in_kv + reserved
    if needed <= goal.memory + (goal.ram or 0) and in_kv + reserved <= goal.memory:
        return
    shorter = int(goal.context * (goal.memory - weights - reserved) / max(1, in_kv))
    hint = f"; with this memory a context of about {shorter:,} tokens fits" if shorter >= 2 else ""
    raise GoalError(
        f"{model}: {goal.memory:,} bytes are too few for {goal.context:,} tokens of context and a batch of "
        f"{goal.batch}: the smallest plan takes {needed:,}, of which weights {weights:,}, keys and values {in_kv:,}, "
        f"workspace and overhead {reserved:,}{hint}",
        settings={"memory": f"{math.ceil(needed / 1e6)}MB"},
    )


# ---- fit -------------------------------------------------------------------------------------------------------------


def fit(
    model: nn.Module | str | Path,
    batches: Sequence[Tensor] | None = None,
    *,
    goal: FitGoal | Mapping[str, Any],
    text: Text | None = None,
    held_out: Sequence[Tensor] | str | Mapping[str, str] | None = None,
    formats: Sequence[str] | None = None,
    keep: Sequence[str] = (),
    out: str | Path | None = None,
    plan_only: bool = False,
    options: SearchOptions | None = None,
) -> FitResult:
    """Find the formats of weights, keys and values with which a model and a context fit into a memory, and prove them.

    model        an nn.Module of transformers, or a path: a Hugging Face folder or GGUF
    goal         FitGoal(memory=24 * 10**9, context=32768), or a mapping of its fields
    text         as `bitplan.search` takes it, of one or several kinds, where the model is a path; else `batches`
    formats      candidates for weights; unless given the target's, with IQ2 and IQ3 where weights may have few bits
    out          a folder for the evidence, plan.json and fit.json; a stopped run goes on there
    plan_only    answer from the evidence that an earlier run left in `out`: nothing of the model is run
    options      how it works: device, windows, progress; `options.context` are the tokens of a window of text
    """
    how = counted_from_now(options)
    fit_goal = goal if isinstance(goal, FitGoal) else FitGoal(**goal)
    if plan_only:
        return plan_fit("fit" if out is None else out, fit_goal)
    runtime = target_of(fit_goal.target)
    names = candidates(runtime, formats)
    folder = evidence_folder(out)
    subject, cut = prepare(
        model,
        batches,
        text,
        held_out,
        keep=keep,
        context=how.context,
        windows=how.windows,
        device=how.device,
        stage=how.stage,
    )
    subject.aim_at(runtime)
    if "cache_params" in inspect.signature(subject.model.forward).parameters:
        raise SearchError(
            f"{subject.where}: {type(subject.model).__name__} keeps states of one size and no keys and values, which a "
            "fit is for; `bitplan search` finds its weights' formats"
        )
    aims_of(fit_goal.kinds, cut.kinds)  # refused now, not after minutes
    loaded = _with_kernels(subject, fit_goal.engine, names, is_asked=bool(formats))
    searcher = Searcher(subject, cut, loaded, folder, how, meter=JointMeter)
    return _Fitter(subject, searcher, fit_goal, folder, is_asked=bool(formats)).find()


def _with_kernels(subject: SearchSubject, engine: EngineMemory, names: Sequence[str], *, is_asked: bool) -> list[str]:
    """The formats that the engine has products for; one that was asked for and that it has none for is refused."""
    kernels = get_engine(engine.kernels)
    if kernels is None:
        return list(names)
    experts = any(".experts." in name for name in subject.tensors)
    loaded = {*kernels.weights} & {*(kernels.experts if experts else kernels.weights)}
    missing = [name for name in names if name not in loaded and not get_format(name).is_cast]
    if missing and is_asked:
        raise SearchError(
            f"{kernels.version} has no kernel for {missing[0]}; it has {', '.join(sorted(loaded))}",
            settings={"formats": None},
        )
    return [name for name in names if name not in missing]


@dataclass
class _Fitter:
    subject: SearchSubject
    searcher: Searcher
    goal: FitGoal
    folder: Path | None
    is_asked: bool  # whether the formats of weights were given

    def find(self) -> FitResult:
        goal, searcher = self.goal, self.searcher
        reserve = Reserve(self.subject.model, goal, self.folder, writes=True, source=self.subject.path)
        probe = reserve.at(goal.context)
        shapes, _ = watch_kv(self.subject, searcher.text.checks[0][None, :8])
        in_kv = min(shapes.nbytes(fmt, goal.engine, goal) for fmt in goal.engine.formats)
        if not self.is_asked:
            room = goal.memory + (goal.ram or 0) - probe.nbytes - shapes.nbytes(_in_8_bits(goal), goal.engine, goal)
            searcher.formats = (*few_bits(self.subject.target, 8 * room / self.subject.numbers), *searcher.formats)
        least = smallest_bytes(self.subject, searcher.formats)
        _refuse_below(self.subject.where, goal, least, in_kv, probe.nbytes)
        self._refuse_whole(shapes, probe)
        with searcher.working("search or fit"):
            return self._find(probe, reserve, least, in_kv)

    def _find(self, probe: MemoryProbe, reserve: Reserve, least: int, in_kv: int) -> FitResult:
        goal, searcher = self.goal, self.searcher
        searcher.options.note(searcher.needs())
        near = max(least, min(goal.memory - probe.nbytes - in_kv, self.subject.stored.nbytes - 1))
        if goal.ram is not None:  # where time is what is short, as large as what it is compared with
            numbers = sum(parameter.numel() for parameter in self.subject.model.parameters())
            near = max(near, min(int(numbers * USUAL_BITS / 8), self.subject.stored.nbytes - 1))
        weights, _ = searcher.collect(Goal(nbytes=near, kinds=goal.kinds))
        meter = searcher.meter_on(searcher.text.checks, searcher.text.check_kinds)
        kv = self._kv(weights, meter)
        joint = joint_evidence(weights, kv, goal, probe.nbytes, probe)
        _within(joint, kv, goal)
        limit = _limit(joint, goal, probe)
        solution, _, _ = solve_and_correct(joint, limit, meter, searcher.stage)
        _take_corrections(joint, weights, kv)
        result = self._prove(weights, kv, joint, limit, solution, probe)
        if self.folder is not None:
            if goal.ram is None:
                result.landscape = landscape(weights, kv, goal, reserve.estimate)
            searcher._save_corrected(weights)
            kv.save(self.folder / KV_EVIDENCE)
            result.save(self.folder)
        return result

    def _refuse_whole(self, shapes: KVShapes, probe: MemoryProbe) -> None:
        """Say so where nothing needs another format: then there is nothing to find."""
        goal, subject = self.goal, self.subject
        kv_dtype = goal.dtype or goal.engine.kept or dtype_of(subject)
        numbers = sum(parameter.numel() for parameter in subject.model.parameters())
        weights = subject.stored.nbytes if goal.dtype is None else numbers * ITEM_BYTES[goal.dtype]
        needed = weights + shapes.nbytes(kv_dtype, goal.engine, goal) + probe.nbytes
        if needed <= goal.memory:
            raise GoalError(
                f"{subject.where}: the model fits as it is: {needed:,} bytes with keys and values, and "
                f"{goal.memory:,} are allowed; give less memory, a longer context or more texts at once",
                settings={"memory": None},
            )

    def _kv(self, weights: SearchEvidence, meter: PlanMeter) -> SearchEvidence:
        """The evidence of keys and values: that of the folder where it is of the same model and text, or gathered."""
        path = None if self.folder is None else self.folder / KV_EVIDENCE
        if path is not None and path.is_file():
            evidence = SearchEvidence.load(path)
            group = next(iter(evidence.groups.values()))
            if evidence.fingerprint == weights.fingerprint and {*self.goal.engine.formats} <= {*group.formats}:
                # Corrections by plans are those of one run, and are made again.
                return replace(
                    evidence, groups={name: uncorrected(one) for name, one in evidence.groups.items()}, together=1.0
                )
        evidence = gather_kv(self.subject, meter, weights, self.searcher.stage, self.goal.engine)
        if path is not None:
            evidence.save(path)
        return evidence

    def _prove(
        self,
        weights: SearchEvidence,
        kv: SearchEvidence,
        joint: SearchEvidence,
        limit: Goal,
        solution: Solution,
        probe: MemoryProbe,
    ) -> FitResult:
        """Measure the joint plan, and weights by the same solver beside fixed keys and values, on held-out text."""
        goal, times = self.goal, probe.times
        plans, missing = [RivalPlan(JOINT, "plan", _placed(joint, goal, solution.choice))], []
        if goal.ram is not None:
            for fmt in _compared(joint, solution.choice):
                with suppress(GoalError):  # too large for both memories
                    split = best_split(joint, fmt, limit)
                    plans.append(RivalPlan(f"{fmt} for all", "uniform", _placed(joint, goal, split.choice)))
        for label, fmt in {"K and V as they are": _kept(kv), "K and V in 8 bits": _in_8_bits(goal)}.items():
            try:
                choice = solve(joint, limit, force=dict.fromkeys(kv.groups, fmt)).choice
            except GoalError:
                missing.append(f"{label}: no format of weights leaves room for them")
                continue
            if choice == solution.choice:
                missing.append(f"{label}: that is the {JOINT}")
            else:
                plans.append(RivalPlan(label, "heuristic", _placed(joint, goal, choice)))
        _, floor = self.searcher.reference
        measured = self.searcher.measured(joint, plans)
        winner = best_of(joint, limit, measured[0], measured[1:], by_gradients=False)
        rows = [
            replace(_row(joint, kv, rival.label, rival.choice, goal, times), measured=self._figures(rival))
            for rival in measured
        ]
        row = rows[measured.index(winner)]
        plan, formats = _plan_of(weights, kv, row.choice)
        assert floor.against is not None
        decided = (self.goal, plan, formats, row, rows, solution, probe, weights.model, weights.numbers, missing)
        return FitResult(*decided, floor.against.kl.mean, floor.tokens)

    def _figures(self, plan: MeasuredPlan) -> dict[str, Any]:
        by_kind = kl_by_kind(plan.quality, self.searcher.text.kinds)
        return summary_of(plan.quality) | ({"kinds": by_kind} if by_kind else {})


def _limit(joint: SearchEvidence, goal: FitGoal, probe: MemoryProbe) -> Goal:
    """The solver's goal: a limit of bytes, or with `goal.ram` limits of both memories and of the time."""
    if goal.ram is None:
        return goal.of_bytes
    assert probe.times is not None
    return place_goal(joint, probe.times, goal, goal.of_bytes)


def _placed(joint: SearchEvidence, goal: FitGoal, choice: Mapping[str, str]) -> Mapping[str, str]:
    return choice if goal.ram is None else crossing_first(joint, choice)


def _compared(joint: SearchEvidence, choice: Mapping[str, str]) -> list[str]:
    """The uniform formats nearest to a plan's bits a weight, one above and one below, to measure beside it."""
    chosen_formats = {
        name: fmt for name, fmt in choice.items() if in_host(fmt.removesuffix("@host")) in joint.groups[name].formats
    }
    numbers = sum(joint.groups[name].numbers for name in chosen_formats)
    bits = sum(joint.groups[name].numbers * bits_of(fmt) for name, fmt in chosen_formats.items()) / max(1, numbers)
    formats = sorted(uniform_formats(joint), key=lambda fmt: (bits_of(fmt), fmt))
    above = [fmt for fmt in formats if bits_of(fmt) >= bits][:1]
    return [*[fmt for fmt in formats if bits_of(fmt) < bits][-1:], *above]


def _take_corrections(joint: SearchEvidence, *parts: SearchEvidence) -> None:
    """Copy the corrections that measured plans gave the costs of formats from `joint` into each of its `parts`."""
    for part_evidence in parts:
        for name, group in part_evidence.groups.items():
            costs = joint.groups[name].formats
            corrected = {fmt: replace(cost, factor=costs[fmt].factor) for fmt, cost in group.formats.items()}
            part_evidence.groups[name] = replace(group, formats=corrected)
        part_evidence.together = joint.together


_GOAL_KEYS = {"memory": SIZE, "context": SIZE, "batch": SIZE, "device": TEXT, "target": TEXT}
_GOAL_MAY = {"ram": SIZE, "ms": NUMBER}
_CHOICE = Kind("an object of groups to formats", lambda item: type(item) is dict and all(map(is_text, item.values())))
_ROW_KEYS = {"label": TEXT, "weights_bytes": SIZE, "kv_bytes": SIZE, "predicted": NUMBER, "choice": _CHOICE}
_ROW_MAY = {"host_bytes": SIZE, "ms": NUMBER, "workspace_bytes": SIZE}
_FIT_KEYS = {"model": TEXT, "plan": OBJECT, "measured": LIST, "missing": LIST, "tokens": SIZE, "gap": NUMBER}
_FIT_KEYS |= {"bound": NUMBER}


def read_fit(path: str | Path) -> dict[str, Any]:
    """fit.json, with what an answer from evidence needs of it checked; the rest is for people and the report."""
    document: dict[str, Any] = load_document(path, EvidenceFileError)
    reader = Reader(str(path), EvidenceFileError, strict=False)
    reader.require_document(document, DOCUMENT, "fit.json of a fit")
    reader.version(document, VERSION)
    document.setdefault("earlier", [])
    reader.keys("", document, {"earlier": LIST}, ("earlier",))
    for number, one in enumerate([document, *document["earlier"]]):
        where = f"earlier[{number - 1}]." if number else ""
        reader.keys(where.rstrip("."), one, _FIT_KEYS, (*_FIT_KEYS, "goal", "probe"))
        reader.keys(f"{where}goal", one["goal"], _GOAL_KEYS | _GOAL_MAY, tuple(_GOAL_KEYS))
        MemoryProbe.from_document(one["probe"], reader, f"{where}probe")
        for row in (one["plan"], *one["measured"]):
            reader.keys(f"{where}plan", row, _ROW_KEYS | _ROW_MAY, tuple(_ROW_KEYS))
    return document


def plan_fit(folder: str | Path, goal: FitGoal) -> FitResult:
    """Plan for a goal from an earlier fit's evidence, without running a model; nothing is written."""
    source = Path(folder)
    for name in (EVIDENCE, KV_EVIDENCE, FIT):
        if not (source / name).is_file():
            raise EvidenceFileError(
                f"{source}: no {name}: not the folder of a finished fit; run `bitplan fit` with this output first"
            )
    weights, kv = SearchEvidence.load(source / EVIDENCE), SearchEvidence.load(source / KV_EVIDENCE)
    document = read_fit(source / FIT)
    earlier = next((one for one in (document, *document["earlier"]) if one["goal"] == goal.to_dict()), None)
    if earlier is not None:
        return _as_found(earlier, weights, kv, goal)
    if document["goal"]["target"] != goal.target:
        raise EvidenceFileError(
            f"{source}: its evidence is of a fit for {document['goal']['target']}, and {goal.target} is asked for; fit "
            "into another folder",
            settings={"target": document["goal"]["target"], "out": None},
        )
    probe = Reserve(document["model"], goal, source).at(goal.context)
    joint = joint_evidence(weights, kv, goal, probe.nbytes, probe)
    _within(joint, kv, goal)
    limit = _limit(joint, goal, probe)
    solution = solve(joint, limit)
    row = _row(joint, kv, JOINT, _placed(joint, goal, solution.choice), goal, probe.times)
    rows = [row]
    if goal.ram is not None:
        for fmt in _compared(joint, row.choice):
            with suppress(GoalError):  # too large for both memories
                split = _placed(joint, goal, best_split(joint, fmt, limit).choice)
                rows.append(_row(joint, kv, f"{fmt} for all", split, goal, probe.times))
    return FitResult(
        goal, *_plan_of(weights, kv, row.choice), row, rows, solution, probe, weights.model, weights.numbers
    )


def _as_found(document: Mapping[str, Any], weights: SearchEvidence, kv: SearchEvidence, goal: FitGoal) -> FitResult:
    """Rebuild the FitResult of an earlier fit from its document and the evidence; an error if they do not match."""
    groups = {**weights.groups, **kv.groups}
    for one in (document["plan"], *document["measured"]):
        choice = one["choice"]
        if choice.keys() != groups.keys() or any(
            choice[name].removesuffix("@host") not in groups[name].formats for name in groups
        ):
            raise EvidenceFileError(
                f"{FIT}: {one['label']!r:.80} has not one format of every group: fit the model again"
            )
    row, *rows = (FitRow.from_document(one) for one in (document["plan"], *document["measured"]))
    total_bytes = row.weights + row.kv + row.workspace + document["probe"]["nbytes"]
    solution = Solution(row.choice, row.predicted, total_bytes, None, document["bound"], document["gap"])
    probe = MemoryProbe.from_document(document["probe"], Reader(FIT, EvidenceFileError), "probe")
    decided = (*_plan_of(weights, kv, row.choice), row, rows, solution, probe)
    rest = (document["missing"], document["noise_floor"], document["tokens"], document.get("landscape", []))
    return FitResult(goal, *decided, weights.model, weights.numbers, *rest)
