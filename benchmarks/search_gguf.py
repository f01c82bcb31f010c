"""Searched plans with compensated rounding against llama.cpp's own files, all judged by llama-perplexity's KL.

python benchmarks/search_gguf.py --bin llama.cpp/build/bin --model FOLDER --text TEXT --work FOLDER --threads 16

Statistics, and llama.cpp's importance matrix, come from the first part of the text, figures from the rest. Plans are
solved for sizes in bits a weight, and for the bytes of llama-quantize's types. Beside them uniform plans, to nearest
and compensated, a plan with the first and last layers in more bits, and random ones: how well is their damage
predicted? Weights are rounded once to each format, in processes of one thread each, and so are files made and judged.
Rows are kept in the result file: the same command goes on. The table comes last. A GGUF model is written as a folder
first: bitplan export model.gguf FOLDER --to hf.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import torch
from engines import Engine
from llama_judge import CONTEXT, Judge
from search import BITS, random_plan, spearman

from bitplan.formats import Encoded, get_format
from bitplan.plan.plan import Plan, Planned
from bitplan.records import read_json, read_text
from bitplan.searching import Goal, Searcher
from bitplan.searching.decide.explain import explain_plan
from bitplan.searching.decide.rivals import rivals_of
from bitplan.searching.decide.solve import solve
from bitplan.searching.evidence import SearchEvidence
from bitplan.searching.gather.damage import formats_that_hold
from bitplan.searching.gather_evidence import gather_evidence
from bitplan.searching.prepare import prepare
from bitplan.searching.runtime_formats import target_of
from bitplan.store.export.targets import export_model
from bitplan.store.files.headers import plan_for_file
from bitplan.store.files.open_files import open_tensors, write_tensors
from bitplan.store.files.tensor_file import Promise
from bitplan.store.rounding.input_statistics import EvidenceFile
from bitplan.store.rounding.round_weight import round_weight

THEIRS = (
    "Q2_K",
    "IQ3_S",
    "Q3_K_S",
    "Q3_K_M",
    "IQ4_XS",
    "IQ4_NL",
    "Q4_0",
    "Q4_K_S",
    "Q4_K_M",
    "Q5_K_S",
    "Q5_K_M",
    "Q6_K",
)
MATCHED = ("Q3_K_M", "IQ4_NL", "Q4_K_M", "Q5_K_M", "Q6_K")  # Q4_0 has IQ4_NL's bytes
FORMATS = ("q2_k_gguf", "q3_k_gguf", "iq4_nl_gguf", "q4_k_gguf", "q5_k_gguf", "q6_k_gguf")
UNIFORM = ("q3_k_gguf", "q4_k_gguf", "q4_0_gguf", "iq4_nl_gguf", "q5_k_gguf", "q6_k_gguf")
HEURISTIC = "first and last layers"
CALIBRATION_SHARE = 0.6


@dataclass(frozen=True)
class Row:
    """A file to make and to judge: llama-quantize's of a type, or ours of a plan."""

    label: str
    by: str
    plan: Mapping[str, Any] | None = None  # the plan's document, which goes to another process
    kind: str | None = None
    nearest: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ours:
    """A model and its weights in formats, each rounded once, by what `quantize --text` rounds with."""

    model: Path
    work: Path

    @property
    def evidence(self) -> Path:
        return self.work / "inputs.safetensors"

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Matrices and their shapes, the largest first."""
        with open_tensors(self.model) as file:
            shapes = {name: spec.shape for name, spec in file.specs.items() if len(spec.shape) == 2}
        return dict(sorted(shapes.items(), key=lambda item: -math.prod(item[1])))

    def kept(self, name: str, fmt: str) -> Path:
        return self.work / "rounded" / f"{name}.{fmt}.safetensors"

    def round(self, name: str, fmt: str) -> None:
        with open_tensors(self.model) as file, EvidenceFile(self.evidence) as evidence:
            hessian, outputs = evidence.hessian(name), evidence.outputs(name)
            found = round_weight(file.read_float(name), fmt, hessian=hessian, outputs=outputs, name=name)
        with write_tensors(self.kept(name, fmt), [Promise(name, found.shape, found.fmt)]) as writer:
            writer.write(name, found)

    def compensated(self, plan: Plan, output: Path) -> None:
        """A GGUF file of a plan."""
        folder = output.with_suffix("")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.model, folder, ignore=lambda _, names: [n for n in names if "safetensors" in n])
        tensors: dict[str, Encoded | torch.Tensor] = {}
        with open_tensors(self.model) as file:
            for name, entry in plan.entries.items():
                if _is_packed(entry):
                    with open_tensors(self.kept(name, entry.choice.format)) as rounded:
                        tensors[name] = rounded.read(name)
                else:
                    tensors[name] = file.read(name)
        promises = [
            Promise(name, each.shape, each.fmt)
            if isinstance(each, Encoded)
            else Promise(name, tuple(each.shape), None, each.dtype)
            for name, each in tensors.items()
        ]
        with write_tensors(folder / "model.safetensors", promises) as writer:
            for name, each in tensors.items():
                writer.write(name, each)
        export_model(folder, output, "gguf", plan, force=True)
        shutil.rmtree(folder)


def _is_packed(entry: Planned) -> bool:
    return entry.stored is None and not get_format(entry.choice.format).is_cast


def uniform_plan(model: Path, fmt: str, embedding: str) -> Plan:
    with open_tensors(model) as file:
        return plan_for_file(file, {"*embed*": embedding, "*": fmt}, output="out.gguf")


def tensor_bytes(path: Path) -> int:
    with open_tensors(path) as file:
        return sum(spec.nbytes for spec in file.specs.values())


# ---- what processes do -----------------------------------------------------------------------------------------------


def one_thread() -> None:
    torch.set_num_threads(1)


def round_in_process(ours: Ours, name: str, fmt: str) -> float:
    started = time.perf_counter()
    ours.round(name, fmt)
    return time.perf_counter() - started


def judge_in_process(ours: Ours, judge: Judge, row: Row, chunks: int) -> dict[str, Any]:
    if row.kind is not None:
        path = judge.quantized(row.kind)
    else:
        assert row.plan is not None
        path = ours.work / f"{re.sub('[^a-z0-9]+', '-', row.label.lower())}.gguf"
        plan = Plan.from_document(row.plan)
        if row.nearest:
            export_model(ours.model, path, "gguf", plan, force=True)
        else:
            ours.compensated(plan, path)
    size = {"file_bytes": path.stat().st_size, "tensor_bytes": tensor_bytes(path)}
    found = {"by": row.by, **row.facts, **size, **judge.kl(path, chunks)}
    path.unlink()
    return found


# ---- the run ---------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """One start: what it has found so far is in the result file."""

    options: argparse.Namespace
    found: dict[str, Any]
    result: Path
    ours: Ours
    judge: Judge
    pool: Executor

    def round_all(self, formats: Iterable[str]) -> list[Any]:
        (self.ours.work / "rounded").mkdir(exist_ok=True)
        every = list(formats)
        tasks = [(name, fmt) for name, shape in self.ours.weights().items() for fmt in formats_that_hold(shape, every)]
        wanted = [task for task in tasks if not self.ours.kept(*task).exists()]
        return [self.pool.submit(round_in_process, self.ours, *task) for task in wanted]

    def judge_all(self, rows: Iterable[Row]) -> None:
        known = self.found.setdefault("rows", {})
        waiting = {
            self.pool.submit(judge_in_process, self.ours, self.judge, row, self.options.chunks): row
            for row in rows
            if row.label not in known
        }
        for done in as_completed(waiting):
            label = waiting[done].label
            known[label] = row = done.result()
            harness.save("search_gguf", self.found, self.result)
            print(f"{label}: {row['file_bytes'] / 1e6:.2f} MB, KL {row['kl']:.5f}", flush=True)

    def search(self, text: str, cut: int) -> SearchEvidence:
        subject, parts = prepare(self.options.model, None, text[:cut], text[cut:], windows=self.options.windows)
        subject.aim_at(target_of("llama.cpp"))
        folder = self.ours.work / "found"
        folder.mkdir(exist_ok=True)
        return Searcher(subject, parts, self.options.formats, folder).collect(Goal(bits=4.5))[0]


def uniform_rows(options: argparse.Namespace) -> list[Row]:
    rows = []
    for fmt in options.uniform:
        for embedding in dict.fromkeys((fmt, options.embedding)):
            plan = uniform_plan(options.model, fmt, embedding)
            label = fmt if embedding == fmt else f"{fmt}, embedding {embedding}"
            facts = {"bits": 8 * plan.nbytes / sum(entry.numbers for entry in plan.entries.values())}
            rows.append(Row(f"{label}, compensated", "uniform", plan.to_document(), facts=facts))
            rows.append(Row(f"{label}, nearest", "nearest", plan.to_document(), nearest=True, facts=facts))
    return rows


def searched_rows(evidence: SearchEvidence, bits: Iterable[float], theirs: Mapping[str, Any]) -> list[Row]:
    """Plans for sizes and for the bytes of their types; for sizes also what the first/last heuristic makes of them."""

    def row(label: str, by: str, choice: Mapping[str, str]) -> Row:
        size = {"bits": evidence.bits(evidence.nbytes(choice)), "predicted": evidence.predict(choice)}
        return Row(label, by, explain_plan(evidence, choice).to_document(), facts={**size, "choice": dict(choice)})

    rows = []
    for kind in (each for each in MATCHED if each in theirs):
        goal = Goal(nbytes=room_for(evidence, theirs[kind]["tensor_bytes"]))
        rows.append(row(f"searched, {kind}'s bytes", "searched", solve(evidence, goal).choice))
    for each in bits:
        solution = solve(evidence, Goal(bits=each))
        rows.append(row(f"searched, {each} bits", "searched", solution.choice))
        rivals = [rival for rival in rivals_of(evidence, solution.nbytes) if rival.label.startswith(HEURISTIC)]
        rows += [row(f"{each} bits: {rival.label}", "heuristic", rival.choice) for rival in rivals]
    return rows


def random_rows(evidence: SearchEvidence, count: int) -> list[Row]:
    generator = random.Random(0)
    choices = [random_plan(evidence, generator) for _ in range(count)]
    return [
        Row(
            f"random plan {at}",
            "random",
            explain_plan(evidence, choice).to_document(),
            facts={"predicted": evidence.predict(choice)},
        )
        for at, choice in enumerate(choices)
    ]


def room_for(evidence: SearchEvidence, their_bytes: int) -> int:
    """The bytes that a plan may have so that our file has no more tensor bytes: norms are float32 in both files."""
    stays = sum(tensor.nbytes for tensor in evidence.stays.values())
    in_float32 = 4 * sum(math.prod(tensor.shape) for tensor in evidence.stays.values())
    return their_bytes - in_float32 + stays


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
    print(f"Spearman of predicted and measured, {found['random_plans']['count']} random plans: "
          f"{found['random_plans']['spearman']:.4f}; seconds: {found['seconds']}")  # fmt: skip


def main() -> None:
    options, started = _arguments(), time.perf_counter()
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    result = options.result or harness.RESULTS / f"search_gguf_{options.model.name}.json"
    found: dict[str, Any] = read_json(result) if result.exists() else {"benchmark": "search_gguf"}
    found |= {"command": harness.command(), "model": options.model.name, "machine": harness.machine("cpu")}
    engine = Engine(options.bin, options.threads)
    found |= {"commit": harness.commit(), "versions": {**harness.versions(), "llama.cpp": engine.version}}
    named = ("windows", "rounding_windows", "chunks", "threads", "formats")
    found["settings"] = {name: getattr(options, name) for name in named}
    found["settings"] |= {"text": options.text.name, "calibration_share": CALIBRATION_SHARE, "context": CONTEXT}
    seconds = found["seconds"] = {}

    def lap(what: str) -> None:
        seconds[what] = round(time.perf_counter() - started, 1)
        print(f"{what}: {seconds[what]} s", flush=True)

    text = read_text(options.text)
    cut = int(len(text) * CALIBRATION_SHARE)
    ours = Ours(options.model, options.work)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.threads, mp_context=context, initializer=one_thread) as pool:
        run = Run(options, found, result, ours, Judge(options.bin, options.work, 1), pool)
        (options.work / "calibration.txt").write_text(text[:cut], encoding="utf-8")
        (options.work / "judge.txt").write_text(text[cut:], encoding="utf-8")
        if not (options.work / "float32.gguf").exists():
            export_model(options.model, options.work / "float32.gguf", "gguf", "float32")
        Judge(options.bin, options.work, options.threads).prepare(options.chunks, options.rounding_windows)
        lap("llama.cpp's base and imatrix")
        if not ours.evidence.exists():
            gather_evidence(options.model, text[:cut], options.work, windows=options.rounding_windows).rename(
                ours.evidence
            )
        lap("statistics")
        rounding = run.round_all(dict.fromkeys((*options.formats, *options.uniform, options.embedding)))
        evidence = run.search(text, cut)
        lap("search")
        found["rounding_seconds"] = sum(each.result() for each in rounding) or found.get("rounding_seconds", 0)
        lap("rounding")
        run.judge_all([Row(kind, "llama.cpp", kind=kind) for kind in options.theirs])
        run.judge_all([*searched_rows(evidence, options.bits, found["rows"]), *uniform_rows(options)])
        lap("plans")
        run.judge_all(random_rows(evidence, options.plans))
        lap("random plans")
    pairs = [(row["predicted"], row["kl"]) for row in found["rows"].values() if row["by"] == "random"]
    rank = spearman([pair[0] for pair in pairs], [pair[1] for pair in pairs]) if len(pairs) > 2 else math.nan
    found["random_plans"] = {"count": len(pairs), "spearman": rank}
    found["comparison"] = comparison(found["rows"])
    harness.save("search_gguf", found, result)
    print_table(found)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, required=True, help="where llama.cpp's tools lie")
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="a folder for files on the way")
    parser.add_argument("--bits", type=float, nargs="*", default=BITS)
    parser.add_argument("--formats", nargs="*", default=list(FORMATS), help="candidates of the search")
    parser.add_argument("--uniform", nargs="*", default=list(UNIFORM), help="formats of uniform plans")
    parser.add_argument("--embedding", default="q6_k_gguf", help="uniform plans also with the embedding in this one")
    parser.add_argument("--theirs", nargs="*", default=list(THEIRS), help="types of llama-quantize")
    parser.add_argument("--windows", type=int, default=24, help="windows for the search")
    parser.add_argument("--rounding-windows", type=int, default=400, help="for rounding, and the importance matrix")
    parser.add_argument("--chunks", type=int, default=20)
    parser.add_argument("--plans", type=int, default=30, help="random plans")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--result", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
