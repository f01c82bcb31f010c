"""fit: the best model for this memory and this context: weights, keys and values in one solution.

What a running model takes is four parts, and a plan decides two of them:

    weights      every tensor in its format; what is not packed, in the type that the model computes in
    K and V      of `context` tokens and `batch` texts, every layer's keys and values in their formats; a layer of a
                 sliding window holds no more than its window
    workspace    what is there while a token is made: one layer's keys and values decoded, the mask, what passes between
                 layers, logits
    overhead     the process itself: Python, torch, transformers, compiled loops; on a GPU, nothing that torch allocates

Workspace and overhead are measured together, in a process of their own (`memory_probe`), for this context and batch.
The damage of a layer's keys or values is measured, with nothing else rounded, in the coarsest format; in the others it
is that, by the ratio of squared errors, corrected by all layers at once. These are further groups of the evidence of a
search, so one program of the same solver chooses formats of weights and of keys and values within the memory.

In the folder, beside the files of a search: kv_evidence.json, groups `layers.3.keys` with bytes of one token; and
fit.json, what was found. `plan_fit` answers for another memory, context or batch from these.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.base.documents import OBJECT, SIZE, TEXT, Kind, Reader, is_text, load_document
from bitplan.base.records import write_json
from bitplan.formats import get_format
from bitplan.formats.elements import ITEM_BYTES
from bitplan.packed.kv_cache import KVCache
from bitplan.packed.kv_rows import PackedRows, pack_rows
from bitplan.plan.kv_formats import KEYS, VALUES, KVFormats, kv_nbytes, layers_in, part_name
from bitplan.plan.plan import Plan
from bitplan.searching.collect import EVIDENCE, smallest_bytes, uncorrected
from bitplan.searching.evidence import FormatCost, SearchEvidence, StayingTensor, TensorGroup, weight_format
from bitplan.searching.explain import explain_plan
from bitplan.searching.goal import EvidenceFileError, Goal, GoalError, SearchError, Stage
from bitplan.searching.memory_probe import MemoryProbe, probe_memory
from bitplan.searching.plan_meter import MeasuredPlan, PlanMeter, hurt_kind, kl_by_kind, summary_of
from bitplan.searching.run import PLAN, Searcher, SearchOptions, best_of, solve_and_correct
from bitplan.searching.runtime_formats import candidates, target_of
from bitplan.searching.searched_model import SearchSubject, Text, prepare
from bitplan.searching.solver import Kind as PlanKind
from bitplan.searching.solver import RivalPlan, Solution, solve

KV_EVIDENCE, FIT = "kv_evidence.json", "fit.json"
DOCUMENT, VERSION = "bitplan-fit", 1
KV_CANDIDATES = ("int4_g32", "fp8_e4m3_row", "int8_row")
DAMAGE_TOKENS = 512  # on which every layer's keys and values are measured alone
RESERVED = "workspace and overhead"
_KV_ROLE = "kv"


@dataclass(frozen=True)
class FitGoal:
    """What must fit: bytes of memory for a model that holds `context` tokens of each of `batch` texts, on a device."""

    memory: int
    context: int
    batch: int = 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("memory", "context", "batch"):
            if getattr(self, name) < 1:
                raise GoalError(f"the goal must be above 0, got {getattr(self, name)}", settings={name: None})

    @property
    def dtype(self) -> str | None:
        """The type of what is not packed: float32 on a CPU, elsewhere as it is stored."""
        return "float32" if torch.device(self.device).type == "cpu" else None

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def __str__(self) -> str:
        batch = f", {self.batch} texts at once" if self.batch > 1 else ""
        return f"{self.memory:,} bytes, {self.context:,} tokens of context{batch}, on {self.device}"


# ---- keys and values of a model --------------------------------------------------------------------------------------


@contextmanager
def _with_cache(model: nn.Module, cache: Any) -> Iterator[None]:
    """Within the block, every call of a model gets this cache."""
    handle = model.register_forward_pre_hook(
        lambda _model, args, kwargs: (args, {**kwargs, "past_key_values": cache}), with_kwargs=True
    )
    try:
        yield
    finally:
        handle.remove()


class _WatchedCache(KVCache):
    """A cache that keeps nothing, and shows all keys and values that come in."""

    def __init__(self, config: Any, seen: Callable[[int, Tensor, Tensor], None]) -> None:
        super().__init__(config, KVFormats(), stores=False)
        self._seen = seen

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **options: Any) -> Any:
        self._seen(layer_idx, key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **options)


def squared_errors(rows: Tensor, formats: Sequence[str]) -> dict[str, float]:
    """The mean squared error of rows [batch, heads, tokens, width] in each format."""
    errors = {}
    for name in formats:
        fmt = get_format(name)
        held = PackedRows(fmt, rows.shape[-1], torch.float32, pack_rows(rows, fmt))
        errors[name] = float((held.numbers() - rows.float()).square().mean())
    return errors


@dataclass(frozen=True)
class KVShapes:
    """Heads and width of every layer's keys and values, by their names, and the tokens of layers that have a window."""

    parts: dict[str, tuple[int, int]]
    windows: dict[str, int]

    def nbytes(self, fmt: str | None, goal: FitGoal, item_bytes: int = 0) -> int:
        """Bytes of all layers in one format; None: as they are, with so many bytes a number."""
        return sum(
            self.tokens(name, goal) * kv_nbytes(fmt, heads, width, item_bytes)
            for name, (heads, width) in self.parts.items()
        )

    def tokens(self, name: str, goal: FitGoal) -> int:
        """How many tokens a part holds, of all texts."""
        return min(goal.context, self.windows.get(name.split(".")[1], goal.context)) * goal.batch


def watch_kv(
    subject: SearchSubject, ids: Tensor, seen: Callable[[str, Tensor], None] = lambda _name, _rows: None
) -> tuple[KVShapes, Tensor]:
    """Run a model as it is; gives the shapes of its keys and values, which `seen` gets, and logarithms of its odds."""
    model = subject.model
    if not hasattr(model, "config"):
        raise SearchError(f"{subject.where}: keys and values are known of models of transformers alone")
    parts: dict[str, tuple[int, int]] = {}

    def see(layer: int, keys: Tensor, values: Tensor) -> None:
        for part, rows in zip((KEYS, VALUES), (keys, values), strict=True):
            name = part_name(layer, part)
            parts[name] = rows.shape[1], rows.shape[3]
            seen(name, rows)

    cache = _WatchedCache(model.config, see)
    with _with_cache(model, cache):
        odds = _log_odds(subject.runner, ids)
    if not parts:
        raise SearchError(f"{subject.where}: no layer gave keys and values to a cache of transformers: nothing to fit")
    spans = {str(index): getattr(layer, "sliding_window", None) for index, layer in enumerate(cache.layers)}
    return KVShapes(parts, {layer: int(span) for layer, span in spans.items() if span}), odds


def gather_kv(
    subject: SearchSubject, meter: PlanMeter, evidence: SearchEvidence, stage: Stage, formats: Sequence[str]
) -> SearchEvidence:
    """What formats of keys and values cost, layer by layer: bytes of one token, and damage, which is measured."""
    ids = meter.windows[0][None, :DAMAGE_TOKENS]
    errors: dict[str, dict[str, float]] = {}

    def seen(name: str, rows: Tensor) -> None:
        errors[name] = squared_errors(rows, formats)

    shapes, reference = watch_kv(subject, ids, seen)
    model, kept = subject.model, _dtype_of(subject)
    coarsest = max(formats, key=lambda fmt: sum(one[fmt] for one in errors.values()))
    groups = {}
    with stage("keys and values", len(shapes.parts)) as advance:
        for name, (heads, width) in shapes.parts.items():
            costs = {kept: FormatCost(kv_nbytes(None, heads, width, ITEM_BYTES[kept]), 0.0)}
            with _with_cache(model, KVCache(model.config, _formats_of({name: coarsest}), stores=False)):
                nats = _kl(reference, _log_odds(subject.runner, ids))
            for fmt in formats:
                share = errors[name][fmt] / errors[name][coarsest] if errors[name][coarsest] else 0.0
                costs[fmt] = FormatCost(kv_nbytes(fmt, heads, width, 0), nats * share)
            groups[name] = TensorGroup({name: ((heads, width), _KV_ROLE)}, costs, checked=coarsest)
            advance(1, name)
    known = replace(evidence, groups=groups, stays={}, proven=[], text={"windows": shapes.windows})
    _check_formats(known, meter, formats, stage)
    return known


def _dtype_of(subject: SearchSubject) -> str:
    """The type in which the model's keys and values are where they are left: that of its tables in the file."""
    stored = [
        entry.stored for entry in subject.stored.entries.values() if entry.stored in ("bfloat16", "float16", "float32")
    ]
    return max(set(stored), key=stored.count) if stored else "bfloat16"


def _log_odds(runner: Any, ids: Tensor) -> Tensor:
    (states,) = runner.through_blocks([ids])
    with torch.no_grad(), runner.outside():
        return runner.leave(states)[0].double().log_softmax(-1)  # type: ignore[no-any-return]


def _kl(reference: Tensor, other: Tensor) -> float:
    return max(0.0, float((reference.exp() * (reference - other)).sum(-1).mean()))


def _check_formats(evidence: SearchEvidence, meter: PlanMeter, formats: Sequence[str], stage: Stage) -> None:
    """Measure keys of all layers, then values, in each format at once, and correct what single layers predict."""
    with stage("checking keys and values", 2 * len(formats)) as advance:
        for part in (KEYS, VALUES):
            names = [name for name in evidence.groups if name.endswith(f".{part}")]
            for fmt in formats:
                choice = dict.fromkeys(names, fmt)
                measured = meter.kl(evidence, choice, f"{part} in {fmt}")
                predicted = sum(evidence.groups[name].formats[fmt].predicted for name in names)
                for name in names:
                    cost = evidence.groups[name].formats[fmt]
                    ratio = measured / predicted if predicted > 0 and measured > 0 else 1.0
                    evidence.groups[name].formats[fmt] = replace(cost, predicted=cost.predicted * ratio)
                advance(1, f"{part} in {fmt}")


def _formats_of(choice: Mapping[str, str]) -> KVFormats:
    """The formats of keys and values that a choice has; groups of weights are not looked at."""
    parts: dict[str, dict[int, str]] = {KEYS: {}, VALUES: {}}
    for name, fmt in choice.items():
        match = re.fullmatch(r"layers\.([0-9]+)\.(keys|values)", name)
        if match is not None and not get_format(fmt).is_cast:
            parts[match[2]][int(match[1])] = fmt
    layers = 1 + max((layer for one in parts.values() for layer in one), default=-1)
    keys, values = ([one.get(layer) for layer in range(layers)] or [None] for one in parts.values())
    return KVFormats(layers_in(keys) if layers else None, layers_in(values) if layers else None)


class JointMeter(PlanMeter):
    """Measures choices for groups of weights and of keys and values together."""

    def _around(self, choice: Mapping[str, str]) -> Callable[[], AbstractContextManager[None]]:
        model = self._runner.model
        return lambda: _with_cache(model, KVCache(model.config, _formats_of(choice), stores=False))


# ---- one problem -----------------------------------------------------------------------------------------------------


def joint_evidence(weights: SearchEvidence, kv: SearchEvidence, goal: FitGoal, reserved: int) -> SearchEvidence:
    """Groups of both in bytes of memory, so that the bytes of a choice are all that the running model takes."""
    wide = goal.dtype

    def in_memory(fmt: str, cost: FormatCost, group: TensorGroup) -> FormatCost:
        if wide is None or not get_format(weight_format(fmt)).is_cast:
            return cost
        return replace(cost, nbytes=group.numbers * ITEM_BYTES[wide])

    groups = {
        name: replace(group, formats={fmt: in_memory(fmt, cost, group) for fmt, cost in group.formats.items()})
        for name, group in weights.groups.items()
    }
    stays = {
        name: replace(tensor, nbytes=math.prod(tensor.shape) * ITEM_BYTES[wide])
        if wide is not None and tensor.stored in ("bfloat16", "float16", "float32")
        else tensor
        for name, tensor in weights.stays.items()
    }
    stays[RESERVED] = StayingTensor("float32", (), "", "float32", reserved, "measured in a process of its own")
    shapes = KVShapes({}, kv.text["windows"])
    for name, group in kv.groups.items():
        tokens = shapes.tokens(name, goal)
        formats = {
            fmt: replace(cost, nbytes=tokens * in_memory(fmt, cost, group).nbytes)
            for fmt, cost in group.formats.items()
        }
        groups[name] = replace(group, formats=formats)
    return replace(weights, groups=groups, stays=stays, proven=[])


def _kept(kv: SearchEvidence) -> str:
    """The format that stands for keys and values as they are."""
    group = next(iter(kv.groups.values()))
    return next(fmt for fmt in group.formats if get_format(fmt).is_cast)


@dataclass(frozen=True)
class FitRow:
    """A plan within the memory: its parts in bytes, what is predicted, and where it was measured, its distance."""

    label: str
    weights: int
    kv: int
    predicted: float
    choice: Mapping[str, str]
    measured: MeasuredPlan | None = None

    def to_dict(self) -> dict[str, Any]:
        measured = {} if self.measured is None else summary_of(self.measured.quality)
        return {
            "label": self.label,
            "weights_bytes": self.weights,
            "kv_bytes": self.kv,
            "predicted": self.predicted,
            **measured,
            "choice": dict(self.choice),
        }


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
    kinds: tuple[str, ...] = ()  # of each window of the proof, where the text is of several kinds

    @property
    def hurt_kind(self) -> str | None:
        """What to say where one kind of text is hurt far more than another."""
        return None if self.row.measured is None else hurt_kind(kl_by_kind(self.row.measured.quality, self.kinds))

    @property
    def needed(self) -> int:
        """The bytes of memory that the running model is predicted to take at most."""
        return self.row.weights + self.row.kv + self.probe.nbytes

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
            **(
                {}
                if self.row.measured is None or not self.kinds
                else {"kinds": kl_by_kind(self.row.measured.quality, self.kinds)}
            ),
        }

    def save(self, folder: Path) -> None:
        """plan.json and fit.json; evidence is there already."""
        self.plan.save(folder / PLAN)
        write_json(folder / FIT, self.to_document())


def _plan_of(weights: SearchEvidence, kv: SearchEvidence, choice: Mapping[str, str]) -> tuple[Plan, KVFormats]:
    """The plan of a joint choice: tensors with their reasons, and a part for every layer's keys and values."""
    tensors = explain_plan(weights, {name: fmt for name, fmt in choice.items() if name in weights.groups})
    formats = _formats_of(choice)
    reasons = {
        name: f"{group.nats(choice[name]):.3g} nats, {group.formats[choice[name]].nbytes} bytes a token, as measured"
        for name, group in kv.groups.items()
    }
    return Plan({**tensors.entries, **formats.entries(reasons)}, padding=tensors.padding), formats


def _row(joint: SearchEvidence, kv: SearchEvidence, label: str, choice: Mapping[str, str]) -> FitRow:
    in_kv = sum(joint.groups[name].formats[choice[name]].nbytes for name in kv.groups)
    whole = joint.nbytes(choice) - joint.stays[RESERVED].nbytes
    return FitRow(label, whole - in_kv, in_kv, joint.predict(choice), choice)


def _within(joint: SearchEvidence, kv: SearchEvidence, goal: FitGoal) -> None:
    """Refuse a memory that no plan has."""
    least = {name: min(cost.nbytes for cost in group.formats.values()) for name, group in joint.groups.items()}
    reserved, in_kv = joint.stays[RESERVED].nbytes, sum(least[name] for name in kv.groups)
    weights = joint.staying_bytes - reserved + sum(least.values()) - in_kv
    _refuse_below(joint.model, goal, weights, in_kv, reserved)


def _refuse_below(model: str, goal: FitGoal, weights: int, in_kv: int, reserved: int) -> None:
    """Refuse a memory below the smallest plan's, by what that takes, and by the context that there is room for."""
    needed = weights + in_kv + reserved
    if needed <= goal.memory:
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
    memory: int,
    context: int,
    batch: int = 1,
    text: Text | None = None,
    held_out: Sequence[Tensor] | str | None = None,
    formats: Sequence[str] | None = None,
    keep: Sequence[str] = (),
    out: str | Path | None = None,
    plan_only: bool = False,
    options: SearchOptions | None = None,
) -> FitResult:
    """Find the formats of weights, keys and values with which a model and a context fit into a memory, and prove them.

    model        an nn.Module of transformers, or a path: a Hugging Face folder or GGUF
    memory       bytes that the running model may take: on a CPU the process, on a GPU what torch allocates
    context      tokens of a text, prompt and answer together; `batch` texts at once
    text         as `bitplan.search` takes it, of one or several kinds, where the model is a path; else `batches`
    out          a folder for the evidence, plan.json and fit.json; a stopped run goes on there
    plan_only    answer from the evidence that an earlier run left in `out`: nothing of the model is run
    options      how it works: device, windows, progress; `options.context` are the tokens of a window of text
    """
    how = options or SearchOptions()
    goal = FitGoal(memory, context, batch, how.device or "cpu")
    if plan_only:
        return plan_fit("fit" if out is None else out, goal)
    target = target_of("bitplan")
    names = candidates(target, formats)
    subject, cut = prepare(
        model, batches, text, held_out, keep=keep, context=how.context, windows=how.windows, device=how.device
    )
    subject.aim_at(target)
    folder = None if out is None else Path(out)
    fitter = _Fitter(subject, Searcher(subject, cut, names, folder, how), goal, folder)
    return fitter.find()


@dataclass
class _Fitter:
    subject: SearchSubject
    searcher: Searcher
    goal: FitGoal
    folder: Path | None

    def find(self) -> FitResult:
        how, goal = self.searcher.options, self.goal
        probe = probe_memory(self.subject.model, goal.context, goal.batch, goal.device)
        shapes, _ = watch_kv(self.subject, self.searcher.text.checks[0][None, :8])
        in_kv = min(shapes.nbytes(fmt, goal) for fmt in KV_CANDIDATES)
        least = smallest_bytes(self.subject, self.searcher.formats)
        _refuse_below(self.subject.where, goal, least, in_kv, probe.nbytes)
        self._refuse_whole(shapes, probe)
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
        how.note(self.searcher.needs())
        near = Goal(nbytes=max(least, min(goal.memory - probe.nbytes - in_kv, self.subject.stored.nbytes - 1)))
        weights, meter = self.searcher.collect(near)
        joint_meter = self._meter(meter, self.searcher.text.checks)
        kv = self._kv(weights, joint_meter)
        joint = joint_evidence(weights, kv, goal, probe.nbytes)
        _within(joint, kv, goal)
        limit = Goal(nbytes=goal.memory)
        solution, _, _ = solve_and_correct(joint, limit, joint_meter, self.searcher.stage)
        _take_corrections(joint, weights, kv)
        result = self._prove(weights, kv, joint, limit, solution, probe, meter)
        self._save(weights, kv, result)
        return result

    def _refuse_whole(self, shapes: KVShapes, probe: MemoryProbe) -> None:
        """Say so where nothing needs another format: then there is nothing to find."""
        goal, subject = self.goal, self.subject
        wide = goal.dtype or _dtype_of(subject)
        numbers = sum(parameter.numel() for parameter in subject.model.parameters())
        weights = subject.stored.nbytes if goal.dtype is None else numbers * ITEM_BYTES[wide]
        needed = weights + shapes.nbytes(None, goal, ITEM_BYTES[wide]) + probe.nbytes
        if needed <= goal.memory:
            raise GoalError(
                f"{subject.where}: the model fits as it is: {needed:,} bytes with keys and values, and "
                f"{goal.memory:,} are allowed; give less memory, a longer context or more texts at once",
                settings={"memory": None},
            )

    def _meter(self, meter: PlanMeter, windows: Sequence[Tensor]) -> JointMeter:
        kept = self.searcher.memory_use.kept_logits // 2
        return JointMeter(meter.rounded, windows, unscored=self.searcher.text.unscored, kept_bytes=kept)

    def _kv(self, weights: SearchEvidence, meter: JointMeter) -> SearchEvidence:
        """The evidence of keys and values: that of the folder where it is of the same model and text, or gathered."""
        path = None if self.folder is None else self.folder / KV_EVIDENCE
        if path is not None and path.is_file():
            known = SearchEvidence.load(path)
            group = next(iter(known.groups.values()))
            if known.fingerprint == weights.fingerprint and {*KV_CANDIDATES} <= {*group.formats}:
                # Corrections by plans are those of one run, and are made again.
                return replace(
                    known, groups={name: uncorrected(one) for name, one in known.groups.items()}, together=1.0
                )
        known = gather_kv(self.subject, meter, weights, self.searcher.stage, KV_CANDIDATES)
        if path is not None:
            known.save(path)
        return known

    def _prove(
        self,
        weights: SearchEvidence,
        kv: SearchEvidence,
        joint: SearchEvidence,
        limit: Goal,
        solution: Solution,
        probe: MemoryProbe,
        meter: PlanMeter,
    ) -> FitResult:
        """Measure the joint plan, and weights by the same solver beside fixed keys and values, on held-out text."""
        choices: dict[str, Mapping[str, str]] = {"joint plan": solution.choice}
        missing = []
        for label, fmt in {"K and V as they are": _kept(kv), "K and V in 8 bits": "int8_row"}.items():
            try:
                choices[label] = solve(joint, limit, force=dict.fromkeys(kv.groups, fmt)).choice
            except GoalError:
                missing.append(f"{label}: no format of weights leaves room for them")
        judge = self._meter(meter, self.searcher.text.proof)
        judge.prepare(joint, list(choices.values()), self.searcher.stage)
        text = self.searcher.text
        with self.searcher.stage("proving", len(text.proof) * (1 + len(choices))) as advance:
            floor = judge.noise_floor(lambda count: advance(count, "noise floor"))
            rows = []
            for label, choice in choices.items():
                kind: PlanKind = "plan" if label == "joint plan" else "heuristic"
                measured = judge.measured(joint, RivalPlan(label, kind, choice), partial(_advance, advance, label))
                rows.append(replace(_row(joint, kv, label, choice), measured=measured))
        plans = [row.measured for row in rows if row.measured is not None]
        winner = best_of(joint, limit, plans[0], plans[1:], by_gradients=False)
        row = next(row for row in rows if row.measured is winner)
        plan, formats = _plan_of(weights, kv, row.choice)
        assert floor.against is not None
        return FitResult(
            self.goal,
            plan,
            formats,
            row,
            rows,
            solution,
            probe,
            weights.model,
            weights.numbers,
            missing,
            floor.against.kl.mean,
            floor.tokens,
            self.searcher.text.kinds,
        )

    def _save(self, weights: SearchEvidence, kv: SearchEvidence, result: FitResult) -> None:
        """Corrections into both files of evidence, plan and fit.json."""
        if self.folder is None:
            return
        self.searcher._save_corrected(weights)
        kv.save(self.folder / KV_EVIDENCE)
        result.save(self.folder)


def _take_corrections(joint: SearchEvidence, *parts: SearchEvidence) -> None:
    """What measured plans said of formats, into the evidence of weights and of keys and values."""
    for known in parts:
        for name, group in known.groups.items():
            costs = joint.groups[name].formats
            corrected = {fmt: replace(cost, factor=costs[fmt].factor) for fmt, cost in group.formats.items()}
            known.groups[name] = replace(group, formats=corrected)
        known.together = joint.together


def _advance(advance: Callable[[int, str], None], label: str, count: int) -> None:
    advance(count, label)


_PROBE_KEYS = {"context": SIZE, "batch": SIZE, "device": TEXT, "nbytes": SIZE}
_GOAL_KEYS = {"memory": SIZE, "context": SIZE, "batch": SIZE, "device": TEXT}
_CHOICE = Kind("an object of groups to formats", lambda item: type(item) is dict and all(map(is_text, item.values())))


def read_fit(path: str | Path) -> dict[str, Any]:
    """fit.json, with what an answer from evidence needs of it checked; the rest is for people and the report."""
    document: dict[str, Any] = load_document(path, EvidenceFileError)
    reader = Reader(str(path), EvidenceFileError, strict=False)
    reader.require_document(document, DOCUMENT, "fit.json of a fit")
    reader.version(document, VERSION)
    reader.keys("", document, {"model": TEXT, "plan": OBJECT}, ("model", "plan", "goal", "probe"))
    reader.keys("goal", document["goal"], _GOAL_KEYS, tuple(_GOAL_KEYS))
    reader.keys("probe", document["probe"], _PROBE_KEYS, tuple(_PROBE_KEYS))
    reader.keys("plan", document["plan"], {"label": TEXT, "choice": _CHOICE}, ("label", "choice"))
    return document


def plan_fit(folder: str | Path, goal: FitGoal) -> FitResult:
    """The plan for a goal from the evidence of an earlier fit, without a model's run: what was measured for this goal,
    or else what is predicted best; nothing is written.
    """
    place = Path(folder)
    for name in (EVIDENCE, KV_EVIDENCE, FIT):
        if not (place / name).is_file():
            raise EvidenceFileError(
                f"{place}: no {name}: not the folder of a finished fit; run `bitplan fit` with this output first"
            )
    weights, kv = SearchEvidence.load(place / EVIDENCE), SearchEvidence.load(place / KV_EVIDENCE)
    before = read_fit(place / FIT)
    probe = MemoryProbe(**before["probe"])
    if not probe.is_of(goal.context, goal.batch, goal.device):
        probe = probe_memory(before["model"], goal.context, goal.batch, goal.device)
    joint = joint_evidence(weights, kv, goal, probe.nbytes)
    _within(joint, kv, goal)
    solution = solve(joint, Goal(nbytes=goal.memory))
    known = before["goal"] == goal.to_dict()
    choice = before["plan"]["choice"] if known else solution.choice
    row = _row(joint, kv, before["plan"]["label"] if known else "joint plan", choice)
    plan, formats = _plan_of(weights, kv, choice)
    return FitResult(goal, plan, formats, row, [row], solution, probe, weights.model, weights.numbers)
