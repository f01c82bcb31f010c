"""Collects the evidence of a model, and goes on where a stopped search was.

In a folder: evidence.safetensors and statistics.safetensors have the statistics of inputs and of gradients, and
evidence.json what each format costs each group. All are written as the work goes, under a fingerprint of weights, text
and versions; what is of another model or text is refused by name.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from bitplan.base import __version__
from bitplan.base.folders import scratch_folder
from bitplan.base.hardware import hash_tensors
from bitplan.files.cluster import Cluster, InFiles, file_sizes, opened_as_here
from bitplan.files.open_files import open_tensors
from bitplan.files.packed_folder import is_model_folder
from bitplan.formats import get_format
from bitplan.plan.manifest import needs_base
from bitplan.searching.blocks import torch_threads
from bitplan.searching.damage import (
    ExpertDamage,
    RoundedWeights,
    by_width,
    experts_together,
    formats_that_hold,
    projection_of,
)
from bitplan.searching.evidence import FormatCost, SearchEvidence, TensorGroup, by_part
from bitplan.searching.forecast import MemoryUse, in_shares, within_memory
from bitplan.searching.goal import EvidenceFileError, SearchError, Stage, no_stage
from bitplan.searching.plan_meter import InputMode, PlanMeter, add_rounded_inputs, candidates_of, ratios_of_kinds
from bitplan.searching.searched_model import SearchSubject, Text, group_tensors, open_subject, prepare
from bitplan.searching.solver import nearest_uniform
from bitplan.searching.statistics import EVIDENCE as INPUT_EVIDENCE
from bitplan.searching.statistics import (
    GRADIENT_TOKENS,
    INPUTS,
    MOST_OUTPUTS,
    STATISTICS,
    InputStatistics,
    ScratchWriter,
    ShareSums,
    StoredTensor,
    WindowShare,
    add_windows,
    how_to_begin_again,
    shares_of,
    steps_of,
    steps_of_share,
    sums_of_share,
)
from bitplan.searching.timing import time_groups

EVIDENCE = "evidence.json"

USUAL_BITS = 4.5
LOOKED_UP = 64  # columns of an embedding's rounding, which compares no columns with each other


def evidence_folder(out: str | Path | None) -> Path | None:
    """The folder that evidence goes to; one that a model lies in is refused, for a search's files are no part of it."""
    if out is None:
        return None
    if is_model_folder(out):
        text = f"{out}: is a model's folder, and evidence is not put among its files; give a folder of its own"
        raise SearchError(text, settings={"out": f"{out}-search"})
    return Path(out)


@dataclass(frozen=True)
class EvidenceFolder:
    """The folder where evidence is kept; None keeps it in memory alone."""

    folder: Path | None

    def statistics(self, fingerprint: Mapping[str, str]) -> InputStatistics:
        if self.folder is None or not (self.folder / STATISTICS).exists():
            return InputStatistics()
        return InputStatistics.load(self.folder, fingerprint)

    def evidence(self) -> SearchEvidence | None:
        if self.folder is None or not (self.folder / EVIDENCE).exists():
            return None
        return SearchEvidence.load(self.folder / EVIDENCE, partly=True)

    def save(self, evidence: SearchEvidence) -> None:
        if self.folder is not None:
            evidence.save(self.folder / EVIDENCE)

    def contents(self) -> str:
        """Describe for a message what the folder of a search holds; an empty string if nothing."""
        parts = []
        if self.folder is not None and (self.folder / STATISTICS).exists():
            with open_tensors(self.folder / STATISTICS) as file:
                windows = int(file.metadata["windows"])
            parts += [f"the statistics of {windows} window{'s' if windows > 1 else ''}"] if windows else []
        evidence = self.evidence()
        if evidence is not None and evidence.groups:
            parts.append(f"what formats cost {len(evidence.groups)} group{'s' if len(evidence.groups) > 1 else ''}")
        return " and ".join(parts)


def fingerprint_of_search(
    subject: SearchSubject, windows: Sequence[Tensor], checks: Sequence[Tensor]
) -> dict[str, str]:
    """Hashes of what evidence depends on: weights, windows of text, versions."""
    return {
        "weights": subject.fingerprint(),
        "text": hash_tensors([*windows, *checks]),
        "searched": _searched(subject),
        "grouping": "streamed" if subject.target.streamed else "fused" if subject.fused else "single",
        "files": subject.target.export or "bitplan",  # by which bytes are counted
        "bitplan": __version__,
        "torch": torch.__version__.partition("+")[0],
    }


def _searched(subject: SearchSubject) -> str:
    """The tensors that are not left as they are, which --keep, --only and the target say: others have no statistics."""
    digest = hashlib.blake2b("\n".join(sorted(subject.tensors)).encode(), digest_size=8).hexdigest()
    return f"{len(subject.tensors)} tensors, {digest}"


def collect_evidence(
    subject: SearchSubject,
    windows: Sequence[Tensor],
    checks: Sequence[Tensor],
    formats: Sequence[str],
    *,
    folder: Path | None = None,
    unscored: int = 1,
    kinds: Sequence[str] = (),
    near_bits: float | None = None,
    inputs: InputMode = "keep",
    rows: int | None = None,
    workers: int | str = 0,
    memory: MemoryUse | None = None,
    stage: Stage = no_stage,
) -> tuple[SearchEvidence, PlanMeter]:
    """Everything that a plan is solved from; and the meter on the windows for checks, for corrections.

    windows     text for the statistics
    checks      other windows of it, on which each projection is measured in one format, in all layers at once
    kinds       where the text is of several kinds: the kind of each of those windows
    near_bits   the size that is wanted: groups are measured in the best format of about this size
    inputs      "8": products round their inputs to eight bits where the target can; "auto": or do not
    rows        also time every format at so many rows
    workers     processes that round weights, or the address of a Dask scheduler, whose workers take statistics, too
    memory      what is kept in memory; unless given, as much as is free
    """
    evidence_folder = EvidenceFolder(folder)
    fingerprint = fingerprint_of_search(subject, windows, checks)
    before = evidence_folder.evidence()
    if before is not None:
        require_same(before, fingerprint, str(folder))
    memory = memory or within_memory(subject, windows, checks, None)
    statistics = evidence_folder.statistics(fingerprint)
    rounded = RoundedWeights(subject, statistics, workers, memory.threads, memory.rounded_at_once)
    if rounded.statistics.windows < len(windows):
        with rounded.compiling(formats):
            rounded.statistics = _gather(rounded, windows, fingerprint, folder, stage)
    evidence = _begin(subject, fingerprint, before, windows, checks)
    evidence.text |= count_experts(subject, rounded.statistics)
    meter = PlanMeter(rounded, checks, unscored=unscored, kept_bytes=memory.kept_logits // 2, kinds=kinds)
    formats_of = groups_with_formats(subject, formats)
    _predict(rounded, evidence, formats_of, evidence_folder, stage)
    parts = _unchecked_parts(evidence, formats_of)
    if parts:
        bits = near_bits or USUAL_BITS
        asked = {name: _only(evidence.groups[name], formats_of[name]) for name in formats_of}
        # What was checked before a stop has a factor by now, and must not change the format that is checked.
        groups = {name: replace(group, factor=1.0) for name, group in asked.items()}
        rival = nearest_uniform(replace(evidence, groups=groups), bits)  # measured as a whole later on: rounded once
        tried = {part: {name: rival.choice[name] for name in names} for part, names in parts.items()}
        meter.prepare(evidence, list(tried.values()), stage)
        with stage("checking", len(parts)) as advance:
            for part, choice in tried.items():
                _check_part(evidence, choice, meter, part)
                advance(1, part)
                evidence_folder.save(evidence)
    members = subject.groups(subject.tensors)
    candidates = {name: candidates_of(subject, members[name], formats_of[name], inputs) for name in formats_of}
    if inputs != "keep":
        add_rounded_inputs(evidence, meter, candidates, stage)
        evidence_folder.save(evidence)
    if rows is not None:
        timed = dict.fromkeys(name for candidate_names in candidates.values() for name in candidate_names)
        with stage("timing", len(formats_of)) as advance:
            time_groups(subject, evidence, rows, () if subject.target.streamed else list(timed), advance)
    evidence.complete = True
    evidence_folder.save(evidence)
    evidence.groups = {name: _only(evidence.groups[name], candidates[name]) for name in formats_of}
    return evidence, meter


def _gather(
    rounded: RoundedWeights,
    windows: Sequence[Tensor],
    fingerprint: Mapping[str, str],
    folder: Path | None,
    stage: Stage,
) -> InputStatistics:
    """Gather statistics of all windows, here or on a cluster's workers, saved after every few of them."""
    subject, statistics, sums_folder = rounded.subject, rounded.statistics, folder or rounded.scratch
    digests, address, shares = subject.digests(), rounded.workers, shares_of(windows, statistics.windows)
    with stage("statistics", steps_of(subject, windows, statistics.windows)) as advance, ExitStack() as opened:
        answers = None
        if isinstance(address, str) and subject.path is not None:
            cluster = opened.enter_context(Cluster(address))
            answers = opened.enter_context(closing(_sums_of_workers(cluster, subject, shares)))
        while statistics.windows < len(windows):
            with scratch_folder(sums_folder, "sums") as scratch:
                if answers is None:
                    add_windows(subject, windows, statistics, scratch, lambda n: advance(n, "blocks"))
                else:
                    _add_answers(subject, statistics, answers, scratch, lambda n: advance(n, "blocks"))
                statistics.save(sums_folder, fingerprint, digests)
            statistics = InputStatistics.load(sums_folder, fingerprint)
    return statistics


def _predict(
    rounded: RoundedWeights,
    evidence: SearchEvidence,
    formats_of: Mapping[str, Sequence[str]],
    evidence_folder: EvidenceFolder,
    stage: Stage,
) -> None:
    """Predict the damage of formats for groups, where the evidence lacks it; saved after each group."""
    subject, experts, tensors = rounded.subject, ExpertDamage(rounded), rounded.subject.tensors
    members = subject.groups(tensors)
    weights = {name: [weight for tensor in members[name] for weight in tensors[tensor].weights] for name in formats_of}
    missing: dict[str, list[str]] = {}
    for name, candidates in formats_of.items():
        known_costs = evidence.groups[name].formats if name in evidence.groups else {}
        absent = [fmt for fmt in candidates if fmt not in known_costs]
        if absent:
            missing[name] = by_width(subject.sites[weights[name][0]].shape, absent)
    if not missing:
        return
    compared: dict[str, dict[str, None]] = {}  # formats by the first weight of each projection
    firsts: dict[str, str] = {}
    for name, formats in missing.items():
        for weight in weights[name]:
            first = firsts.setdefault(projection_of(weight), weight)
            compared.setdefault(first, {}).update(dict.fromkeys(formats))

    def compare(weight: str) -> None:
        for fmt in compared[weight]:
            if not get_format(fmt).is_cast:
                rounded.gain(projection_of(weight), fmt)

    def costs(name: str) -> dict[str, float]:
        return {fmt: _predicted(rounded, experts, weights[name], fmt) for fmt in missing[name]}

    work = {name: sum(_work(subject, weight) for weight in weights[name]) * len(missing[name]) for name in missing}
    first_work = {weight: _work(subject, weight) * len(formats) for weight, formats in compared.items()}
    total = sum(work.values()) + sum(first_work.values())
    with in_shares(stage, "rounding", total) as advance, rounded.predicting() as each_of:
        for weight, _ in zip(compared, each_of(compare, list(compared)), strict=True):
            advance(first_work[weight], f"what statistics gain for {projection_of(weight)}")
        for name, nats_by_format in zip(missing, each_of(costs, list(missing)), strict=True):
            shapes_and_roles = {tensor: (tensors[tensor].shape, tensors[tensor].role) for tensor in members[name]}
            group = evidence.groups.get(name) or TensorGroup(shapes_and_roles)
            for fmt, nats in nats_by_format.items():
                nbytes = sum(subject.target.nbytes(fmt, shape) for shape, _ in shapes_and_roles.values())
                group.formats[fmt] = FormatCost(nbytes, nats)
            evidence.groups[name] = group
            evidence_folder.save(evidence)
            advance(work[name], name)


def _work(subject: SearchSubject, weight: str) -> int:
    """A weight's share of the time of rounding: each number is compared with those of all later columns."""
    site = subject.sites[weight]
    return math.prod(site.shape) * (site.shape[-1] if site.linears or site.slice is not None else LOOKED_UP)


def _unchecked_parts(evidence: SearchEvidence, names: Iterable[str]) -> dict[str, list[str]]:
    """Groups by projection, over all layers; only projections of which some group was not checked."""
    return {
        part: members
        for part, members in by_part(names).items()
        if any(not evidence.groups[name].checked for name in members)
    }


def _check_part(evidence: SearchEvidence, choice: Mapping[str, str], meter: PlanMeter, part: str) -> None:
    """Measure one projection in all layers at once, and scale its predictions by what was found.

    What the prediction leaves out, correlations between outputs and between positions, differs more between projections
    than between layers of one; and many small changes together are measured with less noise than one.
    """
    quality = meter.measure(evidence, choice, f"{part} of all layers")
    assert quality.against is not None
    measured, ratios = max(0.0, quality.against.kl.mean), ratios_of_kinds(quality, meter.kinds)
    predicted = sum(evidence.groups[name].formats[fmt].predicted for name, fmt in choice.items())
    for name, fmt in choice.items():
        if predicted > 0 and measured > 0:
            evidence.groups[name].factor = measured / predicted
        evidence.groups[name].checked, evidence.groups[name].kinds = fmt, ratios


def require_same(evidence: SearchEvidence, fingerprint: Mapping[str, str], where: str) -> None:
    """Refuse evidence of other weights, text or versions; the error says what differs."""
    for part, value in fingerprint.items():
        if evidence.fingerprint.get(part) != value:
            raise EvidenceFileError(
                f"{where}: its evidence is of another model or run: {part} was "
                f"{str(evidence.fingerprint.get(part))[:40]!r}, is {value[:40]!r}; "
                f"give another folder, or {how_to_begin_again(Path(where))}"
            )


def _begin(
    subject: SearchSubject,
    fingerprint: dict[str, str],
    before: SearchEvidence | None,
    windows: Sequence[Tensor],
    checks: Sequence[Tensor],
) -> SearchEvidence:
    text = {
        "windows": len(windows),
        "context": max(len(window) for window in windows),
        "checks": len(checks),
        "tokens": sum(len(window) for window in windows),
    }
    groups = {} if before is None else {name: uncorrected(group) for name, group in before.groups.items()}
    return SearchEvidence(
        subject.where,
        subject.numbers,
        dict(fingerprint),
        text,
        subject.stays,
        groups,
        subject.stored.nbytes,
        complete=False,
        proven=[] if before is None else before.proven,
    )


def uncorrected(group: TensorGroup) -> TensorGroup:
    """A copy of a group without the factors by which an earlier search corrected its formats' damage."""
    return replace(group, formats={fmt: replace(cost, factor=1.0) for fmt, cost in group.formats.items()})


def count_experts(subject: SearchSubject, statistics: InputStatistics) -> dict[str, int]:
    """How many experts all layers have, and to how many of them no token of the text was sent; nothing without any."""

    def experts(names: Iterable[str]) -> int:
        slices = [subject.sites[name].slice for name in names]
        return len({(expert.stack.rpartition(".")[0], expert.expert) for expert in slices if expert is not None})

    expert_count = experts(subject.sites)
    unseen = experts(name for name in statistics.unseen if name in subject.sites)
    return {"experts": expert_count, "unseen_experts": unseen} if expert_count else {}


def evidence_bytes(subject: SearchSubject, windows: Sequence[Tensor]) -> tuple[int, int]:
    """About how many bytes statistics take on disk: those that stay, and those that are there while they are gathered.

    Layers that read one input share a matrix of its columns; of few outputs there is one of theirs, too. What every
    block got waits on disk for the way back.
    """
    kept_bytes, tensors = 0, subject.tensors
    for names in group_tensors(tensors, fused=True, joined_names=subject.seen_groups).values():
        kept_bytes += 4 * len(tensors[names[0]].weights) * tensors[names[0]].shape[-1] ** 2
        outputs = [subject.sites[weight].shape[0] for name in names for weight in tensors[name].weights]
        kept_bytes += 4 * sum(rows**2 for rows in outputs if rows <= MOST_OUTPUTS)
    width = next((module.embedding_dim for module in subject.model.modules() if isinstance(module, nn.Embedding)), 0)
    tokens = min(GRADIENT_TOKENS, sum(map(len, windows)))
    return kept_bytes, kept_bytes + 4 * tokens * width * len(subject.runner.blocks)


def smallest_bytes(subject: SearchSubject, formats: Sequence[str]) -> int:
    """The bytes of the smallest plan that these formats allow; no weight is read for it."""
    tensors = subject.tensors
    groups = subject.groups(tensors)
    return sum(tensor.nbytes for tensor in subject.stays.values()) + sum(
        min(sum(subject.target.nbytes(fmt, tensors[name].shape) for name in groups[group]) for fmt in held_formats)
        for group, held_formats in groups_with_formats(subject, formats).items()
    )


def groups_with_formats(subject: SearchSubject, formats: Sequence[str]) -> dict[str, list[str]]:
    """Every group with the formats that hold all of its tensors."""
    formats_by_group, tensors = {}, subject.tensors
    for name, members in subject.groups(tensors).items():
        held_formats = list(formats)
        for tensor in members:
            shape, first = tensors[tensor].shape, subject.sites[tensors[tensor].weights[0]]
            held_formats = formats_that_hold(shape, held_formats)
            if first.slice is not None:  # packed experts are stacked, and a stack has one factor
                held_formats = [fmt for fmt in held_formats if not needs_base(fmt)]
                if subject.target.packs_layers:  # both stacks of a layer or neither
                    held_formats = [fmt for fmt in held_formats if not get_format(fmt).is_cast] or held_formats
            if not held_formats:
                raise SearchError(
                    f"{subject.where}: {tensor}: rows of {shape[-1]} are not whole blocks of any of "
                    f"{', '.join(formats)}; add a format with smaller blocks, or leave it as it is",
                    settings={"formats": None, "keep": tensor},
                )
        formats_by_group[name] = held_formats
    return formats_by_group


def _predicted(rounded: RoundedWeights, experts: ExpertDamage, weights: Sequence[str], fmt: str) -> float:
    return sum(
        rounded.predicted(names[0], fmt)
        if rounded.subject.sites[names[0]].slice is None
        else experts.predicted(names, fmt)
        for names in experts_together(rounded.subject, weights)
    )


def _only(group: TensorGroup, formats: Sequence[str]) -> TensorGroup:
    """A copy of a group with these candidates alone; the evidence file keeps all that were ever asked for."""
    return replace(group, formats={fmt: group.formats[fmt] for fmt in formats})


GATHERED_WINDOWS = 96


def gather_evidence(
    model: str | Path,
    text: Text,
    folder: str | Path,
    *,
    windows: int = GATHERED_WINDOWS,
    context: int | None = None,
    device: str | None = None,
    on_step: Callable[[int, int], None] | None = None,
) -> Path:
    """Write evidence.safetensors of a Hugging Face folder or GGUF into a folder that exists; where it lies comes back.

    windows   how many windows of the text, spread over it; more are better, and cost one pass forward each
    on_step   called after each block with how many steps are done, and of how many
    """
    into = Path(folder)
    subject, cut = prepare(model, None, text, (), context=context, windows=windows, device=device)
    statistics, digests, done = InputStatistics(), subject.digests(), 0
    steps = steps_of(subject, cut.statistics, 0)

    def step(count: int) -> None:
        nonlocal done
        done += count
        if on_step:
            on_step(done, steps)

    while statistics.windows < len(cut.statistics):
        with scratch_folder(into, "sums") as scratch:
            add_windows(subject, cut.statistics, statistics, scratch, step)
            statistics.save(into, {}, digests)
        statistics = InputStatistics.load(into, {})
    return into / INPUT_EVIDENCE


# ---- statistics by the workers of a cluster --------------------------------------------------------------------------

_taking_sums = threading.Lock()  # how many threads torch uses is of a process, and so are the model's hooks


class SumsOfShares:
    """Computes sums of text windows on a Dask worker, with the open model and a scratch folder for matrices."""

    def __init__(self, subject: SearchSubject, files: Sequence[Path], threads: int, scratch: Path) -> None:
        self.files, self._subject, self._threads, self._scratch = files, subject, threads, scratch

    def make(self, share: WindowShare) -> InFiles:
        """Compute the sums of a share, with the client's number of threads: products depend on it in the last bit."""
        folder = self._scratch / f"{share.first}-{'-'.join(share.takes)}"
        folder.mkdir(exist_ok=True)
        with _taking_sums, torch_threads(self._threads):
            share_sums, files = sums_of_share(self._subject, share, folder)
        for stored in files.values():
            stored.wait()
        return InFiles(
            (share_sums.small, share_sums.shared, share_sums.experts),
            {key: replace(stored, written=None) for key, stored in files.items()},
        )

    def close(self) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)


def open_sums(path: Path, sizes: Mapping[str, int], names: Sequence[str], device: str, threads: int) -> SumsOfShares:
    """Open the client's model on a worker, where these of its weights are watched."""
    from distributed import get_worker

    def opening() -> SumsOfShares:
        subject = open_subject(path, device)
        subject.sites = {name: subject.sites[name] for name in names}
        scratch = Path(tempfile.mkdtemp(prefix="bitplan-sums-", dir=get_worker().local_directory))
        return SumsOfShares(subject, _files_of(path), threads, scratch)

    return opened_as_here(path, sizes, opening)


def _files_of(path: Path) -> list[Path]:
    with open_tensors(path) as file:
        return list(file.files)


Answer = tuple[ShareSums, Iterator[tuple[str, Tensor]]]


def _sums_of_workers(
    cluster: Cluster, subject: SearchSubject, shares: Sequence[WindowShare]
) -> Generator[Answer, None, None]:
    """Yield the sums of shares from a cluster, in order, each share's gradients before its inputs."""
    assert subject.path is not None
    path, names, threads = subject.path.absolute(), list(subject.sites), torch.get_num_threads()
    prepare = partial(open_sums, path, file_sizes(_files_of(path)), names, subject.device.type, threads)
    parts = [part for share in shares for part in share.divided()]
    for part, (facts, tensors) in zip(parts, cluster.map_in_files(prepare, parts), strict=True):
        small, shared, experts = facts
        yield ShareSums(small, shared, experts, part), tensors


def _add_answers(
    subject: SearchSubject,
    statistics: InputStatistics,
    answers: Iterator[Answer],
    scratch: Path,
    on_step: Callable[[int], None],
) -> None:
    """Add the workers' sums of the next share to `statistics`: gradients come first, inputs in a second answer."""
    writer = ScratchWriter()
    answered: list[tuple[ShareSums, dict[str, StoredTensor]]] = []
    for sums, tensors in answers:
        files: dict[str, StoredTensor] = {}
        for key, tensor in tensors:
            files |= writer.write(scratch / f"sums-{len(answered)}-{len(files)}", {key: tensor})
        answered.append((sums, files))
        on_step(steps_of_share(subject, sums.of))
        if INPUTS in sums.of.takes:
            break
    for sums_and_files in answered:
        statistics.add(*sums_and_files)
