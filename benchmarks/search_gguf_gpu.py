"""Searched plans of a larger model against llama.cpp's own files, judged by llama-perplexity's KL, as `search_gguf.py`.

python benchmarks/search_gguf_gpu.py --bin llama.cpp/build/bin --model FOLDER --text TEXT --work FOLDER --device cuda

A GPU gathers the statistics and measures plans on the windows for checks. Processes of one thread each predict, round
what plans need and no more, make files and judge them. The evidence is gathered once; plans are solved for one size
after another, each is measured, and corrects the predictions for those that follow. `--without` names formats: a
size that says `:fewer` is solved without them. Rows are kept in the result file, so that a run that is cut goes on,
and llama.cpp's rows (`--part theirs`) may come from another machine. `--part solved --evidence FILE` solves what a cut
run had gathered elsewhere; `--nearest` rounds these plans to nearest, which takes no statistics and little time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import harness
import torch
from engines import Engine
from llama_judge import CONTEXT, Judge
from search_gguf import CALIBRATION_SHARE, Ours, Row, comparison, judge_in_process, one_thread, room_for

from bitplan.formats import Encoded
from bitplan.records import read_json, read_text
from bitplan.searching import Goal, Searcher
from bitplan.searching.decide.correct import Corrections
from bitplan.searching.decide.explain import explain_plan
from bitplan.searching.decide.solve import solve
from bitplan.searching.errors import GoalError
from bitplan.searching.evidence import FormatCost, SearchEvidence, TensorGroup
from bitplan.searching.gather import collect
from bitplan.searching.gather.damage import RoundedWeights, by_width, projection_of
from bitplan.searching.gather.plan_meter import PlanMeter
from bitplan.searching.gather.searched_model import SearchSubject
from bitplan.searching.gather.statistics import EVIDENCE, InputStatistics
from bitplan.searching.groups import group_tensors
from bitplan.searching.phases import no_stage
from bitplan.searching.prepare import LEAST_WINDOWS, SearchText, prepare
from bitplan.searching.runtime_formats import candidates, target_of
from bitplan.store.export.targets import export_model
from bitplan.store.files.open_files import open_tensors
from bitplan.store.rounding.round_weight import round_weight

THEIRS = ("Q4_0", "IQ4_NL", "Q4_K_M", "Q5_K_M", "Q6_K", "Q3_K_M", "Q4_K_S", "Q5_K_S")
SIZES = ("IQ4_NL:fewer", "Q4_K_M:fewer", "IQ4_NL", "Q5_K_M:fewer", "Q6_K:fewer")
AGREES, WORTH = 0.1, 0.02  # as in a search


@dataclass(frozen=True)
class Source:
    """What processes need to open the model and its text again."""

    model: Path
    calibration: str
    held_out: str
    windows: int
    formats: tuple[str, ...]
    found: Path

    def open(self, device: str | None) -> tuple[SearchSubject, SearchText]:
        subject, text = prepare(self.model, None, self.calibration, self.held_out, windows=self.windows, device=device)
        subject.aim_at(target_of("llama.cpp"))
        return subject, text


@cache
def open_weights(model: Path) -> SearchSubject:
    """The model without the text, which takes long to cut into tokens; once in each process."""
    no_text = [torch.zeros(LEAST_WINDOWS, 8, dtype=torch.int64)]
    subject, _ = prepare(model, no_text, None, no_text)
    subject.aim_at(target_of("llama.cpp"))
    return subject


def round_in_process(ours: Ours, name: str, fmt: str) -> tuple[str, str]:
    ours.round(name, fmt)
    return name, fmt


def warm_in_process(model: Path, fmt: str) -> None:
    """Open the model, and compile what rounds to a format, while a GPU gathers statistics."""
    open_weights(model)
    round_weight(torch.randn(128, 768), fmt, hessian=torch.eye(768), outputs=torch.eye(128))


def predict_in_process(
    source: Source, projection: str, fingerprint: Mapping[str, str]
) -> dict[str, dict[str, tuple[int, float]]]:
    """What every format costs the groups of a projection: bytes and nats."""
    subject = open_weights(source.model)
    rounded = RoundedWeights(subject, InputStatistics.load(source.found, fingerprint))
    wanted, tensors, found = collect.groups_with_formats(subject, source.formats), subject.tensors, {}
    for name, own in group_tensors(tensors, fused=subject.fused).items():
        weights = [weight for each in own for weight in tensors[each].weights]
        if projection_of(weights[0]) != projection:
            continue
        formats = by_width(subject.sites[weights[0]].shape, wanted[name])
        rounded.compare_rounding(weights, formats)
        found[name] = {
            fmt: (
                sum(subject.target.nbytes(fmt, tensors[each].shape) for each in own),
                sum(rounded.predicted(weight, fmt) for weight in weights),
            )
            for fmt in formats
        }
    return found


@dataclass
class Run:
    """One start: what it has found so far is in the result file."""

    options: argparse.Namespace
    found: dict[str, Any]
    result: Path
    ours: Ours
    judge: Judge
    pool: ProcessPoolExecutor
    source: Source
    began: float
    waiting: dict[Future[dict[str, Any]], Row] = field(default_factory=dict)

    def lap(self, what: str) -> None:
        self.found["seconds"][what] = round(time.perf_counter() - self.began, 1)
        harness.save("search_gguf", self.found, self.result)
        print(f"{self.found['seconds'][what]:7.1f} s  {what}", flush=True)

    def judge_row(self, row: Row) -> None:
        """Begin to make and judge a file; `take` waits for it."""
        if row.label not in self.found["rows"]:
            task = self.pool.submit(judge_in_process, self.ours, self.judge, row, self.options.chunks)
            self.waiting[task] = row

    def take(self, *, all_of_them: bool) -> None:
        """Write down rows that are judged."""
        tasks = as_completed(list(self.waiting)) if all_of_them else [each for each in self.waiting if each.done()]
        for task in tasks:
            row = self.waiting.pop(task)
            self.found["rows"][row.label] = done = task.result()
            self.found["comparison"] = comparison(self.found["rows"])
            self.lap(f"judged {row.label}: {done['tensor_bytes'] / 1e6:.2f} MB, KL {done['kl']:.5f}")

    def base_of_judge(self) -> None:
        """What judges need: with half of the threads, for it waits actively, and processes compile beside it."""
        replace(self.judge, threads=max(1, self.options.threads // 2)).prepare(self.options.chunks, 0)

    # ---- the search ------------------------------------------------------------------------------------------------

    def statistics(self) -> tuple[Searcher, dict[str, str]]:
        """On the device; the folder has them afterwards."""
        self.source.found.mkdir(exist_ok=True)
        subject, text = self.source.open(self.options.device)
        searcher = Searcher(subject, text, self.source.formats, self.source.found)
        fingerprint = collect.fingerprint_of_search(subject, text.statistics, text.checks)
        kept = collect.EvidenceFolder(self.source.found).statistics(fingerprint)
        if kept.windows < len(text.statistics):
            collect._gather(RoundedWeights(subject, kept), text.statistics, fingerprint, self.source.found, no_stage)
        return searcher, fingerprint

    def predictions(self, searcher: Searcher, fingerprint: Mapping[str, str]) -> None:
        """evidence.json as a search would have it before its checks; a projection in each process."""
        path = self.source.found / collect.EVIDENCE
        if path.exists():
            return
        subject, text = searcher.subject, searcher.text
        evidence = collect._begin(subject, dict(fingerprint), None, text.statistics, text.checks)
        tensors = subject.tensors
        costs: dict[str, dict[str, tuple[int, float]]] = {}
        projections = dict.fromkeys(map(projection_of, subject.sites))
        for task in as_completed(
            [self.pool.submit(predict_in_process, self.source, each, fingerprint) for each in projections]
        ):
            costs |= task.result()
        for name, own in group_tensors(tensors, fused=subject.fused).items():
            held = {each: (tensors[each].shape, tensors[each].role) for each in own}
            formats = {fmt: FormatCost(nbytes, nats) for fmt, (nbytes, nats) in costs[name].items()}
            evidence.groups[name] = TensorGroup(held, formats)
        evidence.save(path)

    def round_in_pool(
        self, rounded: RoundedWeights, pairs: Iterable[tuple[str, str]], on_done: Callable[[str, str], None]
    ) -> None:
        """What `RoundedWeights.round_all` does, in processes: small matrices keep one core busy each, and no GPU."""
        missing = sorted(rounded.missing(pairs), key=lambda pair: -rounded._work([pair]))
        tasks = [
            self.pool.submit(round_in_process, self.ours, *pair)
            for pair in missing
            if not self.ours.kept(*pair).exists()
        ]
        for task in as_completed(tasks):
            task.result()
            self.take(all_of_them=False)  # rows that were judged meanwhile are not lost where a run is cut
        for name, fmt in missing:
            with open_tensors(self.ours.kept(name, fmt)) as file:
                made = file.read(name)
            assert isinstance(made, Encoded)
            rounded._write(rounded.subject.sites[name], fmt, made)
            on_done(name, fmt)

    def plans(self, evidence: SearchEvidence, meter: PlanMeter) -> None:
        """One size after another; what is measured of one plan corrects the evidence for the next."""
        corrections = Corrections(evidence)
        checked = {name: group.checked for name, group in evidence.groups.items()}
        corrections.add(checked, self.measured(evidence, meter, checked, "the checked format for all"))
        corrections.apply()
        self.lap("checks")
        for label, goal, formats in self.goals(evidence):
            if label in self.found["rows"]:
                continue
            try:
                choice = self.corrected(evidence, meter, corrections, goal, formats)
            except GoalError as error:
                self.found.setdefault("out_of_reach", {})[label] = str(error)
                self.lap(f"{label}: {error}")
                continue
            self.judge_row(self.row_of(evidence, label, choice))
            self.take(all_of_them=False)
            self.lap(f"rounded {label}")

    def plans_of_evidence(self, evidence: SearchEvidence) -> None:
        """Plans as they are solved, none measured before it is judged: of evidence that another machine gathered."""
        nearest = self.options.nearest
        for name, goal, without in self.goals(evidence):
            label = f"{name}, to nearest" if nearest else name
            if label not in self.found["rows"]:
                groups = {name: _left(group, without) for name, group in evidence.groups.items()}
                choice = solve(replace(evidence, groups=groups), goal).choice
                weights = {name: fmt for group, fmt in choice.items() for name in evidence.groups[group].tensors}
                missing = [pair for pair in weights.items() if not nearest and not self.ours.kept(*pair).exists()]
                for task in as_completed([self.pool.submit(round_in_process, self.ours, *pair) for pair in missing]):
                    task.result()
                    self.take(all_of_them=False)
                self.judge_row(replace(self.row_of(evidence, label, choice), nearest=nearest))
                self.lap(f"rounded {label}")

    def row_of(self, evidence: SearchEvidence, label: str, choice: Mapping[str, str]) -> Row:
        size = {"bits": evidence.bits(evidence.nbytes(choice)), "predicted": evidence.predict(choice)}
        mixed = {fmt: sum(1 for each in choice.values() if each == fmt) for fmt in sorted(set(choice.values()))}
        facts = {**size, "formats": mixed, "choice": dict(choice)}
        return Row(label, "searched", explain_plan(evidence, choice).to_document(), facts=facts)

    def goals(self, evidence: SearchEvidence) -> list[tuple[str, Goal, set[str]]]:
        """Labels, goals and formats that are left out, in the order of `--sizes`."""
        found = []
        for words in self.options.sizes:
            size, _, fewer = words.partition(":")
            name = f"{size} bits" if size[0].isdigit() else f"{size}'s bytes"
            if size[0].isdigit():
                goal = Goal(bits=float(size))
            else:
                goal = Goal(nbytes=room_for(evidence, self.found["their_bytes"][size]))
            without = set(self.options.without) if fewer else set[str]()
            found.append((f"searched, {name}{', fewer formats' if fewer else ''}", goal, without))
        return found

    def corrected(
        self, evidence: SearchEvidence, meter: PlanMeter, corrections: Corrections, goal: Goal, without: set[str]
    ) -> Mapping[str, str]:
        """Solve, measure, and where that is not what was predicted, correct and solve again: the best measured one."""
        tried: list[tuple[float, Mapping[str, str]]] = []
        for _ in range(1 + self.options.corrections):
            groups = {name: _left(group, without) for name, group in evidence.groups.items()}
            choice = solve(replace(evidence, groups=groups), goal).choice
            harm = evidence.predict(choice)
            if any(choice == other for _, other in tried):
                break
            if tried and harm > (1 - WORTH) * min(evidence.predict(other) for _, other in tried):
                break
            kl = self.measured(evidence, meter, choice, "a plan")
            tried.append((kl, choice))
            corrections.add(choice, kl)
            corrections.apply()
            if abs(kl - harm) <= AGREES * harm:
                break
        return min(tried, key=lambda pair: pair[0])[1]

    def measured(self, evidence: SearchEvidence, meter: PlanMeter, choice: Mapping[str, str], label: str) -> float:
        meter.prepare(evidence, [choice], no_stage)
        return meter.kl(evidence, choice, label)


def _left(group: TensorGroup, without: set[str]) -> TensorGroup:
    """The group without some formats, unless it has no others."""
    formats = {fmt: cost for fmt, cost in group.formats.items() if fmt not in without}
    return replace(group, formats=formats or group.formats)


def their_part(run: Run) -> None:
    """llama.cpp's own files, one after the other with all threads: their sizes first."""
    for kind in run.options.theirs:
        if kind not in run.found["rows"]:
            row = judge_in_process(run.ours, run.judge, Row(kind, "llama.cpp", kind=kind), run.options.chunks)
            run.found["rows"][kind] = row | {"machine": harness.machine("cpu")}
            run.found["their_bytes"][kind] = row["tensor_bytes"]
            run.lap(f"judged {kind}: {row['tensor_bytes'] / 1e6:.2f} MB, KL {row['kl']:.5f}")


def solved_part(run: Run) -> None:
    """Plans of evidence that was gathered elsewhere: statistics to round with, if any, are gathered here."""
    (run.ours.work / "rounded").mkdir(exist_ok=True)
    run.judge.prepare(run.options.chunks, 0)
    if not run.options.nearest:
        run.statistics()
        run.lap("statistics")
    run.plans_of_evidence(SearchEvidence.load(run.options.evidence))
    run.take(all_of_them=True)


def our_part(run: Run) -> None:
    RoundedWeights.round_all = lambda rounded, pairs, on_done: run.round_in_pool(rounded, pairs, on_done)  # type: ignore[method-assign,assignment]
    (run.ours.work / "rounded").mkdir(exist_ok=True)
    warm = [run.pool.submit(warm_in_process, run.source.model, fmt) for fmt in run.source.formats]
    base = threading.Thread(target=run.base_of_judge)
    base.start()
    searcher, fingerprint = run.statistics()
    run.lap("statistics")
    for task in warm:
        task.result()
    run.lap("compiled")
    run.predictions(searcher, fingerprint)
    run.lap("predictions")
    evidence, meter = searcher.collect(Goal(bits=run.options.near_bits))
    run.lap("projections, checked")
    base.join()
    run.lap("llama.cpp's base")
    run.plans(evidence, meter)
    run.take(all_of_them=True)


def main() -> None:
    options, began = _arguments(), time.perf_counter()
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = read_json(options.result) if options.result.exists() else {"benchmark": "search_gguf"}
    if options.part != "theirs":
        engine = Engine(options.bin, options.threads)
        found |= {"command": harness.command(), "model": options.model.name, "machine": harness.machine(options.device)}
        found |= {"commit": harness.commit(), "versions": {**harness.versions(), "llama.cpp": engine.version}}
        named = ("windows", "imatrix_chunks", "chunks", "threads", "formats", "without", "corrections")
        found["settings"] = {name: getattr(options, name) for name in named}
        found["settings"] |= {"text": options.text.name, "calibration_share": CALIBRATION_SHARE, "context": CONTEXT}
    found |= {"rows": found.get("rows", {}), "their_bytes": found.get("their_bytes", {}), "seconds": {}}
    text = read_text(options.text)
    cut = int(len(text) * CALIBRATION_SHARE)
    (options.work / "calibration.txt").write_text(text[:cut], encoding="utf-8")
    (options.work / "judge.txt").write_text(text[cut:], encoding="utf-8")
    if not (options.work / "float32.gguf").exists():
        export_model(options.model, options.work / "float32.gguf", "gguf", "float32")
    ours = _Ours(options.model, options.work)
    formats = candidates(target_of("llama.cpp"), options.formats or None)
    formats = tuple(fmt for fmt in formats if fmt not in ("bfloat16",))
    source = Source(options.model, text[:cut], text[cut:], options.windows, formats, options.work / "found")
    context = multiprocessing.get_context("spawn")
    judge = Judge(options.bin, options.work, options.threads if options.part == "theirs" else options.judge_threads)
    with ProcessPoolExecutor(options.threads, mp_context=context, initializer=one_thread) as pool:
        run = Run(options, found, options.result, ours, judge, pool, source, began)
        run.lap("begun")
        if options.part == "theirs":
            judge.prepare(options.chunks, options.imatrix_chunks)
            run.lap("llama.cpp's base and imatrix")
            their_part(run)
        elif options.part == "solved":
            solved_part(run)
        else:
            our_part(run)
    found["comparison"] = comparison(found["rows"])
    run.lap("all")


@dataclass(frozen=True)
class _Ours(Ours):
    """Rounds with the statistics of the search."""

    @property
    def evidence(self) -> Path:
        return self.work / "found" / EVIDENCE


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, required=True, help="where llama.cpp's tools lie")
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="a folder for files on the way")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--part", choices=("ours", "theirs", "solved"), default="ours")
    parser.add_argument("--nearest", action="store_true", help="with --part solved: weights are rounded to nearest")
    parser.add_argument("--evidence", type=Path, help="with --part solved: evidence.json of another machine")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--sizes", nargs="*", default=list(SIZES), help="bits, or a type for its bytes; with :fewer without --without"
    )
    parser.add_argument("--near-bits", type=float, default=5.4, help="the size at which projections are checked")
    parser.add_argument("--formats", nargs="*", default=[], help="candidates; all that llama.cpp loads unless given")
    parser.add_argument("--without", nargs="*", default=[], help="formats that sizes with :fewer do without")
    parser.add_argument("--theirs", nargs="*", default=list(THEIRS), help="types of llama-quantize")
    parser.add_argument("--corrections", type=int, default=1, help="how often a size is solved again at most")
    parser.add_argument("--windows", type=int, default=32, help="windows for statistics")
    parser.add_argument("--imatrix-chunks", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--judge-threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
