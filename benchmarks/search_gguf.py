"""Searched plans with compensated rounding against llama.cpp's own files, all judged by llama-perplexity's KL.

python benchmarks/search_gguf.py --bin llama.cpp/build/bin --model FOLDER --text TEXT --work FOLDER --workers 12
python benchmarks/search_gguf.py ... --device cuda --sizes IQ4_NL Q4_K_M --theirs --uniform --random 0

Statistics, and llama.cpp's importance matrix, come from the first part of the text, figures from the rest. One search
gathers the evidence; plans are solved and corrected for one size after another: bits a weight, or the bytes of a type
of llama-quantize. Beside them uniform plans, to nearest and compensated, plans with the first and last layers in more
bits, and random ones: how well is their damage predicted? Files are made and judged beside the search. Rows are kept in
the result file as they come: the same command goes on, and llama.cpp's rows may be of another machine. The table comes
last. A GGUF model is written as a folder first: bitplan export model.gguf FOLDER --to hf.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import harness
import torch
from engines import Engine
from llama_judge import CONTEXT, Judge
from search import BITS, random_plan, spearman

from bitplan.base.records import read_json, read_text
from bitplan.files.engines.targets import export_model
from bitplan.files.open_files import open_tensors, write_tensors
from bitplan.files.tensor_file import TensorSpec
from bitplan.formats import Encoded, get_format
from bitplan.plan.plan import Plan
from bitplan.searching import Goal, SearchOptions
from bitplan.searching.damage import RoundedWeights
from bitplan.searching.evidence import SearchEvidence
from bitplan.searching.explain import explain_plan
from bitplan.searching.goal import Advance, GoalError, no_stage
from bitplan.searching.plan_meter import PlanMeter
from bitplan.searching.run import Searcher, solve_and_correct
from bitplan.searching.runtime_formats import candidates, target_of
from bitplan.searching.searched_model import prepare
from bitplan.searching.solver import rivals_of, uniform_plans

THEIRS = (
    *("Q2_K", "IQ3_S", "Q3_K_S", "Q3_K_M", "IQ4_XS", "IQ4_NL"),
    *("Q4_0", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K"),
)
SIZES = ("Q3_K_M", "IQ4_NL", "Q4_K_M", "Q5_K_M", "Q6_K", *map(str, BITS))  # Q4_0 has IQ4_NL's bytes
FORMATS = ("q2_k_gguf", "q3_k_gguf", "iq4_nl_gguf", "q4_k_gguf", "q5_k_gguf", "q6_k_gguf")
HEURISTIC = "first and last layers"
CALIBRATION_SHARE = 0.6


@dataclass(frozen=True)
class Row:
    """A file to make and to judge: llama-quantize's of a type, or ours of formats for groups of tensors."""

    label: str
    by: str
    choice: Mapping[str, str] = field(default_factory=dict)
    nearest: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Run:
    """One start: what it has found so far is in the result file. Judges work on threads beside the search."""

    options: argparse.Namespace
    found: dict[str, Any]
    judge: Judge
    judges: ThreadPoolExecutor
    began: float
    prepared: Future[None] | None = None
    waiting: list[Future[None]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    # ---- rows --------------------------------------------------------------------------------------------------------

    def lap(self, what: str) -> None:
        """Write down what is found until now, and when; without llama.cpp's base there is nothing to go on for."""
        if self.prepared is not None and self.prepared.done():
            self.prepared.result()
        with self.lock:
            self.found["seconds"][what] = round(time.perf_counter() - self.began, 1)
            self.found["comparison"] = comparison(self.found["rows"])
            harness.save("search_gguf", self.found, self.options.result)
        print(f"{self.found['seconds'][what]:7.1f} s  {what}", flush=True)

    @contextmanager
    def stage(self, what: str, total: int) -> Iterator[Advance]:
        """A phase of the search, as its progress: the time at its end is kept."""
        with no_stage(what, total) as advance:
            yield advance
        self.lap(what)

    def add(self, row: Row, weights: tuple[SearchEvidence, RoundedWeights] | None = None) -> None:
        """Begin to make a file and to judge it, unless it is known; `wait` waits for it."""
        if row.label not in self.found["rows"]:
            with self.lock:
                self.found["unjudged"][row.label] = {"by": row.by, **row.facts}
            self.waiting.append(self.judges.submit(self._judge, row, weights))

    def wait(self) -> None:
        for each in self.waiting:
            each.result()
        self.waiting.clear()

    def _judge(self, row: Row, weights: tuple[SearchEvidence, RoundedWeights] | None) -> None:
        assert self.prepared is not None
        if weights is None:
            self.prepared.result()
            path = self.judge.quantized(row.label)
        else:
            path = self.options.work / f"{re.sub('[^a-z0-9]+', '-', row.label.lower())}.gguf"
            plan = explain_plan(weights[0], row.choice)
            if row.nearest:
                export_model(self.options.model, path, "gguf", plan, force=True)
            else:
                write_compensated(self.options.model, plan, *weights, row.choice, path)
            self.prepared.result()
        size = {"file_bytes": path.stat().st_size, "tensor_bytes": tensor_bytes(path)}
        done = {"by": row.by, **row.facts, **size, **self.judge.kl(path, self.options.chunks)}
        path.unlink()
        with self.lock:
            self.found["rows"][row.label] = done
            del self.found["unjudged"][row.label]
            if weights is None:
                self.found["their_bytes"][row.label] = size["tensor_bytes"]
        self.lap(f"judged {row.label}: {size['tensor_bytes'] / 1e6:.2f} MB, KL {done['kl']:.5f}")

    def prepare_judge(self) -> None:
        """What all rows need: half of the threads, for it waits actively, and the search begins beside it."""
        options, rows = self.options, self.found["rows"]
        chunks = options.imatrix_chunks if any(kind not in rows for kind in options.theirs) else 0
        replace(self.judge, threads=max(1, options.threads // 2)).prepare(options.chunks, chunks)
        self.lap("llama.cpp's base")

    # ---- the search --------------------------------------------------------------------------------------------------

    def search(self, calibration: str, held_out: str) -> None:
        options, target = self.options, target_of("llama.cpp")
        subject, text = prepare(
            options.model, None, calibration, held_out, windows=options.windows, device=options.device
        )
        subject.aim_at(target)
        folder = options.work / "found"
        folder.mkdir(exist_ok=True)
        names = candidates(target, options.formats)
        searcher = Searcher(subject, text, names, folder, SearchOptions(stage=self.stage, workers=options.workers))
        evidence, meter = searcher.collect(Goal(bits=options.near_bits))
        if any(not size[0].isdigit() and size not in self.found["their_bytes"] for size in options.sizes):
            self.wait()
        for size in options.sizes:
            self.solve(size, evidence, meter)
        others = [*uniform_rows(evidence, options.uniform, options.embedding), *random_rows(evidence, options.random)]
        for row in others:
            self.add_rounded(row, evidence, meter)

    def solve(self, size: str, evidence: SearchEvidence, meter: PlanMeter) -> None:
        """The plan of a size; with sizes in bits also what the first/last heuristic makes of it."""
        in_bits = size[0].isdigit()
        name = f"{size} bits" if in_bits else f"{size}'s bytes"
        label = ", ".join(["searched", name, *self.options.note])
        if label in self.found["rows"]:
            return
        goal = Goal(bits=float(size)) if in_bits else Goal(nbytes=room_for(evidence, self.found["their_bytes"][size]))
        try:
            solution, corrections, _ = solve_and_correct(evidence, goal, meter, self.stage)
        except GoalError as error:
            self.found.setdefault("out_of_reach", {})[label] = str(error)
            self.lap(f"{label}: {error}")
            return
        row = row_of(evidence, label, "searched", solution.choice)
        row = replace(row, facts={**row.facts, "corrections": corrections})
        self.add_rounded(row, evidence, meter)
        if self.options.nearest:
            self.add_rounded(replace(row, label=f"{label}, to nearest", nearest=True), evidence, meter)
        for rival in rivals_of(evidence, solution.nbytes) if in_bits else ():
            if rival.label.startswith(HEURISTIC):
                other = row_of(evidence, f"{name}: {rival.label}", "heuristic", rival.choice)
                self.add_rounded(other, evidence, meter)

    def add_rounded(self, row: Row, evidence: SearchEvidence, meter: PlanMeter) -> None:
        """Round what a plan needs, then leave it to the judges."""
        if row.label in self.found["rows"]:
            return
        if not row.nearest:
            meter.prepare(evidence, [row.choice], self.stage)
        self.add(row, (evidence, meter.rounded))


def row_of(evidence: SearchEvidence, label: str, by: str, choice: Mapping[str, str]) -> Row:
    mixed = {fmt: sum(1 for each in choice.values() if each == fmt) for fmt in sorted(set(choice.values()))}
    size = {"bits": evidence.bits(evidence.nbytes(choice)), "predicted": evidence.predict(choice)}
    return Row(label, by, choice, facts={**size, "formats": mixed, "choice": dict(choice)})


def uniform_rows(evidence: SearchEvidence, formats: Iterable[str], embedding: str) -> list[Row]:
    """One format for all, or for all but the embedding, compensated and to nearest."""
    rows, uniform = [], {rival.label: rival.choice for rival in uniform_plans(evidence)}
    large = uniform.get(embedding, {})
    for fmt in (each for each in formats if each in uniform):
        plain = uniform[fmt]
        other = {name: large.get(name, each) if "embed" in name else each for name, each in plain.items()}
        for label, choice in {fmt: plain, f"{fmt}, embedding {embedding}": other}.items():
            if choice is plain or choice != plain:
                row = row_of(evidence, f"{label}, compensated", "uniform", choice)
                rows += [row, replace(row, label=f"{label}, nearest", by="nearest", nearest=True)]
    return rows


def random_rows(evidence: SearchEvidence, count: int) -> list[Row]:
    generator = random.Random(0)
    choices = [random_plan(evidence, generator) for _ in range(count)]
    return [row_of(evidence, f"random plan {at}", "random", choice) for at, choice in enumerate(choices)]


def room_for(evidence: SearchEvidence, their_bytes: int) -> int:
    """The bytes that a plan may have so that our file has no more tensor bytes: norms are float32 in both files."""
    stays = sum(tensor.nbytes for tensor in evidence.stays.values())
    in_float32 = 4 * sum(math.prod(tensor.shape) for tensor in evidence.stays.values())
    return their_bytes - in_float32 + stays


# ---- files -----------------------------------------------------------------------------------------------------------


def write_compensated(
    model: Path,
    plan: Plan,
    evidence: SearchEvidence,
    rounded: RoundedWeights,
    choice: Mapping[str, str],
    output: Path,
) -> None:
    """A GGUF file of weights as the search has rounded them."""
    packed = {
        name: fmt
        for group, fmt in choice.items()
        for name in evidence.groups[group].tensors
        if not get_format(fmt).is_cast
    }
    folder = output.with_suffix("")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(model, folder, ignore=lambda _, names: [name for name in names if "safetensors" in name])
    with open_tensors(model) as file:
        tensors = {
            name: rounded.encoded(name, packed[name]).to("cpu") if name in packed else file.read(name)
            for name in file.specs
        }
    promises = [
        TensorSpec.of(name, each.shape, each.fmt)
        if isinstance(each, Encoded)
        else TensorSpec.of(name, tuple(each.shape), None, each.dtype)
        for name, each in tensors.items()
    ]
    with write_tensors(folder / "model.safetensors", promises) as writer:
        for name, each in tensors.items():
            writer.write(name, each)
    export_model(folder, output, "gguf", plan, force=True)
    shutil.rmtree(folder)


def tensor_bytes(path: Path) -> int:
    with open_tensors(path) as file:
        return sum(spec.nbytes for spec in file.specs.values())


# ---- the table -------------------------------------------------------------------------------------------------------


def kl_at(rows: Mapping[str, Any], by: str, nbytes: int) -> float | None:
    """The best of some rows at a size: their front, log KL as straight lines between its points; None outside of it."""
    points = sorted((row["tensor_bytes"], row["kl"]) for row in rows.values() if row["by"] == by)
    front: list[tuple[int, float]] = []
    for size, kl in points:
        if not front or kl < front[-1][1]:
            front.append((size, kl))
    below = [point for point in front if point[0] <= nbytes]
    above = [point for point in front if point[0] > nbytes]
    if not below or (not above and nbytes > 1.01 * below[-1][0]):
        return None
    if not above:
        return below[-1][1]
    (size, kl), (larger, less) = below[-1], above[0]
    share = (nbytes - size) / (larger - size)
    return math.exp((1 - share) * math.log(kl) + share * math.log(less))


def comparison(rows: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each searched plan beside the best of llama.cpp, and of our uniform plans, at its size."""
    found = []
    for label, row in sorted(rows.items(), key=lambda item: item[1]["tensor_bytes"]):
        if row["by"] == "searched":
            size = row["tensor_bytes"]
            line = {
                "plan": label,
                "mb": size / 1e6,
                "bits": row["bits"],
                "predicted": row["predicted"],
                "kl": row["kl"],
            }
            for name, by in (("llama.cpp", "llama.cpp"), ("nearest", "nearest"), ("compensated", "uniform")):
                other = kl_at(rows, by, size)
                line |= {name: other, f"of_{name}": None if other is None else row["kl"] / other}
            found.append(line)
    return found


def print_table(found: Mapping[str, Any]) -> None:
    keys = ("mb", "bits", "predicted", "kl", "llama.cpp", "of_llama.cpp", "nearest", "of_nearest", "compensated")
    print(f"\n{'plan':28}" + "".join(f"{key:>14}" for key in (*keys, "of_compensated")))
    for line in found["comparison"]:
        cells = ("-" if line[key] is None else f"{line[key]:.4f}" for key in (*keys, "of_compensated"))
        print(f"{line['plan']:28}" + "".join(f"{cell:>14}" for cell in cells))
    for label, row in sorted(found["rows"].items(), key=lambda item: (item[1]["tensor_bytes"], item[1]["kl"])):
        if row["by"] != "random":
            print(
                f"{label:75} {row['by']:>10} {row['tensor_bytes'] / 1e6:8.3f} MB  {row['kl']:.5f} {row['kl_error']:.5f}"
            )
    if "random_plans" in found:
        rank, count = found["random_plans"]["spearman"], found["random_plans"]["count"]
        print(f"Spearman of predicted and measured, {count} random plans: {rank:.4f}")
    print(f"seconds: {found['seconds']}")


def main() -> None:
    options, began = _arguments(), time.perf_counter()
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    options.result = options.result or harness.RESULTS / f"search_gguf_{options.model.name}.json"
    found: dict[str, Any] = read_json(options.result) if options.result.exists() else {"benchmark": "search_gguf"}
    engine = Engine(options.bin, options.threads)
    found |= {"command": harness.command(), "model": options.model.name, "machine": harness.machine(options.device)}
    found |= {"commit": harness.commit(), "versions": {**harness.versions(), "llama.cpp": engine.version}}
    named = ("windows", "imatrix_chunks", "chunks", "threads", "workers", "formats", "near_bits")
    found["settings"] = {name: getattr(options, name) for name in named}
    found["settings"] |= {"text": options.text.name, "calibration_share": CALIBRATION_SHARE, "context": CONTEXT}
    found |= {"rows": found.get("rows", {}), "their_bytes": found.get("their_bytes", {}), "seconds": {}}
    found["unjudged"] = {}
    found["their_bytes"] |= {
        label: row["tensor_bytes"] for label, row in found["rows"].items() if row["by"] == "llama.cpp"
    }
    text = read_text(options.text)
    cut = int(len(text) * CALIBRATION_SHARE)
    (options.work / "calibration.txt").write_text(text[:cut], encoding="utf-8")
    (options.work / "judge.txt").write_text(text[cut:], encoding="utf-8")
    if not (options.work / "float32.gguf").exists():
        export_model(options.model, options.work / "float32.gguf", "gguf", "float32")
    judge = Judge(options.bin, options.work, options.judge_threads)
    with ThreadPoolExecutor(options.judges) as judges:
        run = Run(options, found, judge, judges, began)
        run.lap("begun")
        run.prepared = judges.submit(run.prepare_judge)
        for kind in options.theirs:
            run.add(Row(kind, "llama.cpp"))
        run.search(text[:cut], text[cut:])
        run.lap("plans")
        run.wait()
    pairs = [(row["predicted"], row["kl"]) for row in found["rows"].values() if row["by"] == "random"]
    if len(pairs) > 2:
        rank = spearman([pair[0] for pair in pairs], [pair[1] for pair in pairs])
        found["random_plans"] = {"count": len(pairs), "spearman": rank}
    del found["unjudged"]
    run.lap("all")
    print_table(found)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, required=True, help="where llama.cpp's tools lie")
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="a folder for files on the way")
    parser.add_argument("--device", default="cpu", help="for statistics and measuring, such as cuda")
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), help="bits a weight, or a type for its bytes")
    parser.add_argument("--near-bits", type=float, default=4.5, help="the size at which projections are checked")
    parser.add_argument("--formats", nargs="*", default=list(FORMATS), help="candidates of the search")
    parser.add_argument("--note", nargs="*", default=[], help="added to labels, such as 'fewer formats'")
    parser.add_argument("--nearest", action="store_true", help="searched plans also rounded to nearest")
    parser.add_argument("--uniform", nargs="*", default=list(FORMATS), help="formats of uniform plans")
    parser.add_argument("--embedding", default="q6_k_gguf", help="uniform plans also with the embedding in this one")
    parser.add_argument("--theirs", nargs="*", default=list(THEIRS), help="types of llama-quantize")
    parser.add_argument("--random", type=int, default=30, help="random plans")
    parser.add_argument("--windows", type=int, default=32, help="windows for statistics")
    parser.add_argument("--imatrix-chunks", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0, help="processes that round; none: threads")
    parser.add_argument("--judges", type=int, default=1, help="files that are made and judged at once")
    parser.add_argument("--judge-threads", type=int, default=1, help="threads of each")
    parser.add_argument("--result", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
