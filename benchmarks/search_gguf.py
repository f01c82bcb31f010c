"""Searched plans with compensated rounding against llama.cpp's own files, all judged by llama-perplexity's KL.

python benchmarks/search_gguf.py --bin llama.cpp/build/bin --model FOLDER --text TEXT --work FOLDER

Statistics, and llama.cpp's importance matrix, come from the first part of the text, figures from the rest. For each
type of llama-quantize a plan of no more bytes is solved; plans are solved for sizes in bits a weight, too. Beside them
uniform plans, to nearest and compensated, and (--plans 30) random ones: how well is their damage predicted? A weight
is rounded once to a format, by the inputs that `quantize --text` gathers. Rows are kept in the result file: the same
command goes on.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import torch
from engines import Engine
from search import BITS, random_plan, spearman

from bitplan.formats import Encoded, get_format
from bitplan.plan.plan import Plan, Planned
from bitplan.records import read_json, read_text
from bitplan.searching import Goal, Searcher
from bitplan.searching.decide.explain import explain_plan
from bitplan.searching.decide.solve import solve
from bitplan.searching.evidence import SearchEvidence
from bitplan.searching.gather_evidence import gather_evidence
from bitplan.searching.prepare import prepare
from bitplan.searching.run import solve_and_correct
from bitplan.searching.runtime_formats import target_of
from bitplan.store.export.targets import export_model
from bitplan.store.files.headers import plan_for_file
from bitplan.store.files.open_files import open_tensors, write_tensors
from bitplan.store.files.tensor_file import Promise
from bitplan.store.rounding.input_statistics import EvidenceFile
from bitplan.store.rounding.round_weight import round_weight

THEIRS = ("IQ4_NL", "Q4_0", "Q4_K_M", "Q5_K_M", "Q3_K_M", "Q6_K")
FORMATS = ("q3_k_gguf", "q4_k_gguf", "q5_k_gguf", "q6_k_gguf")
UNIFORM = ("q4_k_gguf", "q4_0_gguf", "q3_k_gguf", "q5_k_gguf", "q6_k_gguf", "iq4_nl_gguf")
EMBEDDING = "q6_k_gguf"
CALIBRATION_SHARE = 0.6
CONTEXT = 512
BASE = "--kl-divergence-base"
# After each window its number, then means so far and their errors: of the perplexity, its change, the KL, the change of
# probabilities, the same top token. The last of them is at times lost when its log closes: then it runs again.
_MEAN = r"\s+\S+\s+±\s+\S+"
RUNNING = re.compile(rf"^\s*(\d+){_MEAN}{_MEAN}\s+(\S+)\s+±\s+(\S+){_MEAN}\s+%\s+(\S+)\s+±\s+\S+\s+%", re.MULTILINE)
TRIES = 3


@dataclass(frozen=True)
class Judge:
    """llama.cpp's own tools, on one text."""

    engine: Engine
    work: Path

    def kl(self, model: Path, chunks: int) -> dict[str, float]:
        """KL from the float32 file, in nats a token, over the second half of each window."""
        base = self.work / f"base-{chunks}.kld"
        text, plain = self.work / "judge.txt", self.work / "float32.gguf"
        if not base.exists():
            options = self._options(chunks)
            self._make(base, lambda part: ["llama-perplexity", "-m", plain, "-f", text, *options, BASE, part])
        for _ in range(TRIES):
            said = self._run("llama-perplexity", "-m", model, *self._options(chunks), BASE, base, "--kl-divergence")
            found = {int(row[1]): row for row in RUNNING.finditer(said)}.get(chunks)
            if found is not None:
                return {"kl": float(found[2]), "kl_error": float(found[3]), "same_top": float(found[4]) / 100}
        raise SystemExit(f"llama-perplexity gave no KL of {model.name}: {said[-600:]}")

    def quantized(self, kind: str, chunks: int) -> Path:
        """llama-quantize's file of a type, with an importance matrix."""
        matrix, output = self.work / "imatrix.gguf", self.work / f"theirs-{kind}.gguf"
        plain = self.work / "float32.gguf"
        if not matrix.exists():
            text = self.work / "calibration.txt"
            options = self._options(chunks)
            self._make(matrix, lambda part: ["llama-imatrix", "-m", plain, "-f", text, "-o", part, *options])
        if not output.exists():
            threads = self.engine.threads
            self._make(output, lambda part: ["llama-quantize", "--imatrix", matrix, plain, part, kind, threads])
        return output

    def _make(self, path: Path, command: Callable[[Path], list[object]]) -> None:
        """A file that a tool writes: it has its name only when it is whole."""
        part = path.with_stem(f"part-{path.stem}")
        self._run(*command(part))
        part.replace(path)

    def _options(self, chunks: int) -> list[object]:
        return ["-c", CONTEXT, "-b", CONTEXT, "--chunks", chunks, "-t", self.engine.threads]

    def _run(self, *words: object) -> str:
        tool, *rest = map(str, words)
        command = [str(self.engine.bin / tool), *rest]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{tool} ended with {done.returncode}: {(done.stdout + done.stderr)[-600:]}")
        return done.stdout + done.stderr


@dataclass(frozen=True)
class Ours:
    """A model whose weights are rounded to a format when a plan first asks for it, and kept in files."""

    model: Path
    work: Path
    windows: int

    def evidence(self, text: str) -> Path:
        path = self.work / "inputs.safetensors"
        if not path.exists():
            gather_evidence(self.model, text, self.work, windows=self.windows).rename(path)
        return path

    def rounded(self, name: str, fmt: str) -> Encoded:
        """A weight by compensated rounding: what `quantize --text` makes of it."""
        kept = self.work / "rounded" / f"{name}.{fmt}.safetensors"
        if not kept.exists():
            kept.parent.mkdir(exist_ok=True)
            with open_tensors(self.model) as file, EvidenceFile(self.work / "inputs.safetensors") as evidence:
                found = round_weight(file.read_float(name), fmt, hessian=evidence.hessian(name), name=name)
            with write_tensors(kept, [Promise(name, found.shape, found.fmt)]) as writer:
                writer.write(name, found)
        with open_tensors(kept) as file:
            encoded = file.read(name)
        assert isinstance(encoded, Encoded)
        return encoded

    def compensated(self, plan: Plan) -> Path:
        """A GGUF file of a plan."""
        folder, output = self.work / "mixed", self.work / "ours.gguf"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.model, folder, ignore=lambda _, names: [n for n in names if "safetensors" in n])
        with open_tensors(self.model) as file:
            tensors = {
                name: self.rounded(name, entry.choice.format) if _is_packed(entry) else file.read(name)
                for name, entry in plan.entries.items()
            }
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
        return output

    def nearest(self, plan: Plan) -> Path:
        """The same with every weight rounded to nearest."""
        output = self.work / "nearest.gguf"
        export_model(self.model, output, "gguf", plan, force=True)
        return output


def _is_packed(entry: Planned) -> bool:
    return entry.stored is None and not get_format(entry.choice.format).is_cast


def uniform_plan(model: Path, fmt: str, embedding: str) -> Plan:
    """One format for all matrices but the embedding, which llama.cpp has in Q6_K."""
    with open_tensors(model) as file:
        return plan_for_file(file, {"*embed*": embedding, "*": fmt}, output="out.gguf")


def tensor_bytes(path: Path) -> int:
    with open_tensors(path) as file:
        return sum(spec.nbytes for spec in file.specs.values())


def main() -> None:
    options = _arguments()
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    result = options.result or harness.RESULTS / f"search_gguf_{options.model.name}.json"
    found: dict[str, Any] = read_json(result) if result.exists() else {"benchmark": "search_gguf"}
    engine = Engine(options.bin, options.threads)
    found |= {"model": options.model.name, "machine": harness.machine("cpu"), "commit": harness.commit()}
    found |= {"versions": {**harness.versions(), "llama.cpp": engine.version}}
    found |= {
        "settings": {
            "text": options.text.name,
            "calibration_share": CALIBRATION_SHARE,
            "statistics_windows": options.windows,
            "rounding_windows": options.rounding_windows,
            "imatrix_chunks": options.rounding_windows,
            "context": CONTEXT,
            "chunks": options.chunks,
            "plan_chunks": options.plan_chunks,
            "formats": options.formats,
        }
    }
    judge, ours = Judge(engine, options.work), Ours(options.model, options.work, options.rounding_windows)
    _prepare_files(options, judge)
    rows = found.setdefault("rows", {})

    def measure(label: str, make: Callable[[], Path], **facts: Any) -> None:
        if label not in rows:
            path = make()
            size = {"file_bytes": path.stat().st_size, "tensor_bytes": tensor_bytes(path)}
            rows[label] = facts | size | judge.kl(path, options.chunks)
            harness.save("search_gguf", found, result)
            print(f"{label}: {size['file_bytes'] / 1e6:.2f} MB, KL {rows[label]['kl']:.5f}", flush=True)

    text = read_text(options.text)
    cut = int(len(text) * CALIBRATION_SHARE)
    ours.evidence(text[:cut])
    for fmt in options.uniform:
        for embedding in dict.fromkeys((EMBEDDING, fmt)):
            plan = uniform_plan(options.model, fmt, embedding)
            label = fmt if embedding == fmt else f"{fmt}, embedding {embedding}"
            facts = {"bits": 8 * plan.nbytes / sum(entry.numbers for entry in plan.entries.values())}
            measure(f"{label}, compensated", lambda plan=plan: ours.compensated(plan), by="uniform", **facts)  # type: ignore[misc]
            measure(f"{label}, nearest", lambda plan=plan: ours.nearest(plan), by="nearest", **facts)  # type: ignore[misc]
        if fmt == options.uniform[0]:
            for kind in THEIRS:
                measure(kind, lambda kind=kind: judge.quantized(kind, options.rounding_windows), by="llama.cpp")  # type: ignore[misc]
    subject, cut_text = prepare(options.model, None, text[:cut], text[cut:], windows=options.windows)
    subject.aim_at(target_of("llama.cpp"))
    searcher = Searcher(subject, cut_text, options.formats, options.work / "found")
    (options.work / "found").mkdir(exist_ok=True)
    evidence, meter = searcher.collect(Goal(bits=4.5))

    def searched(goal: Goal, label: str, by: str) -> None:
        if label in rows:
            return
        solution = solve_and_correct(evidence, goal, meter)[0] if options.correct else solve(evidence, goal)
        plan, nats = explain_plan(evidence, solution.choice), evidence.predict(solution.choice)
        facts = {"by": by, "bits": evidence.bits(solution.nbytes), "predicted": nats, "choice": dict(solution.choice)}
        measure(label, lambda: ours.compensated(plan), **facts)

    for kind in THEIRS:
        if kind != "Q4_0":  # of IQ4_NL's bytes
            searched(Goal(nbytes=_room(evidence, rows[kind]["tensor_bytes"])), f"searched, {kind}'s bytes", "searched")
    for bits in options.bits:
        searched(Goal(bits=bits), f"searched, {bits} bits", "searched")
    generator, pairs = random.Random(0), found.setdefault("random_plans", {}).setdefault("pairs", [])
    for index in range(options.plans):
        choice = random_plan(evidence, generator)
        if index >= len(pairs):
            path = ours.compensated(explain_plan(evidence, choice))
            pairs.append([evidence.predict(choice), judge.kl(path, options.plan_chunks)["kl"]])
            if len(pairs) > 2:
                found["random_plans"]["spearman"] = spearman(*([pair[at] for pair in pairs] for at in (0, 1)))
            harness.save("search_gguf", found, result)


def _room(evidence: SearchEvidence, their_bytes: int) -> int:
    """The bytes that a plan may have so that our file has no more tensor bytes: norms are float32 in both files."""
    stays = sum(tensor.nbytes for tensor in evidence.stays.values())
    in_float32 = 4 * sum(_numbers(tensor.shape) for tensor in evidence.stays.values())
    return their_bytes - in_float32 + stays


def _numbers(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _prepare_files(options: argparse.Namespace, judge: Judge) -> None:
    text = read_text(options.text)
    cut = int(len(text) * CALIBRATION_SHARE)
    (judge.work / "calibration.txt").write_text(text[:cut], encoding="utf-8")
    (judge.work / "judge.txt").write_text(text[cut:], encoding="utf-8")
    if not (judge.work / "float32.gguf").exists():
        export_model(options.model, judge.work / "float32.gguf", "gguf", "float32")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, required=True, help="where llama.cpp's tools lie")
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="a folder for files on the way")
    parser.add_argument("--bits", type=float, nargs="*", default=BITS)
    parser.add_argument("--formats", nargs="*", default=list(FORMATS), help="candidates of the search")
    parser.add_argument("--uniform", nargs="*", default=list(UNIFORM), help="formats of uniform plans")
    parser.add_argument("--windows", type=int, default=24, help="windows for the search")
    parser.add_argument("--rounding-windows", type=int, default=96, help="for rounding, and the importance matrix")
    parser.add_argument("--chunks", type=int, default=20)
    parser.add_argument("--plans", type=int, default=0, help="random plans")
    parser.add_argument("--plan-chunks", type=int, default=5)
    parser.add_argument("--correct", action="store_true", help="correct predictions by measuring, as a search does")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--result", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
