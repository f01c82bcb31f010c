"""Exported files in the engines they are for: do they load, and is the model the one we wrote?

For llama.cpp: each export runs in `llama-perplexity`, and the same tokens are scored here by reading the file back with
transformers in float32. llama-perplexity scores the second half of each window of a text, so that is scored here, too.
Beside it, the squared error of the weights over that of llama-quantize's file of the same type. `--families` exports a
tiny model of every family in float32 and scores it against transformers' own, on letters in random order.

python benchmarks/engines.py --bin llama.cpp/build/bin --model FOLDER --text TEXT [--gguf FILE]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import ROOT, commit, machine, save, versions
from torch.nn import functional

from bitplan.files.engines.targets import export_model
from bitplan.files.open_files import open_tensors
from bitplan.packed.checkpoints.causal_lm import load_causal_lm

CONTEXT = 512
FORMATS = (
    *("float16", "q8_0_gguf", "q6_k_gguf", "q5_k_gguf", "q4_k_gguf", "q4_0_gguf"),
    *("iq4_nl_gguf", "q3_k_gguf", "q2_k_gguf"),
)
MIXED = {"*self_attn*": "q6_k_gguf", "*attn_*": "q6_k_gguf", "*mlp*": "q4_k_gguf", "*ffn_*": "q4_k_gguf"}
MIXED |= {"*embed_tokens*": "q8_0_gguf", "token_embd*": "q8_0_gguf"}
THEIR_NAMES = {"q3_k_gguf": "Q3_K_S", "q4_k_gguf": "Q4_K_S", "q5_k_gguf": "Q5_K_S"}
# After each window the perplexity so far. The last of them is at times lost when its log closes: one more is asked for.
RUNNING = re.compile(r"\[(\d+)\]([0-9.]+|nan)")
VERSION = re.compile(r"version:?\s*(.*)")


@dataclass(frozen=True)
class Engine:
    bin: Path
    threads: int

    def perplexity(self, model: Path, text: Path, chunks: int, context: int = CONTEXT) -> float:
        options = {"-m": model, "-f": text, "-c": context, "-b": context, "--chunks": chunks + 1, "-t": self.threads}
        options |= {"-fa": "off", "-ctk": "f32", "-ctv": "f32"}  # in float16, its default, tokens go to other experts
        command = [self.bin / "llama-perplexity", *(word for option in options.items() for word in option)]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
        found = dict(RUNNING.findall(done.stdout)).get(str(chunks))
        if done.returncode or found is None:
            said = (done.stdout + done.stderr)[-600:]
            raise SystemExit(f"llama-perplexity ended with {done.returncode} on {model.name}: {said}")
        return float(found)

    def quantize(self, source: Path, output: Path, kind: str) -> None:
        command = [
            self.bin / "llama-quantize",
            "--pure",
            "--token-embedding-type",
            "q8_0",
            source,
            output,
            kind,
            self.threads,
        ]
        subprocess.run([*map(str, command)], capture_output=True, check=True)

    @property
    def version(self) -> str:
        done = subprocess.run(
            [str(self.bin / "llama-perplexity"), "--version"], capture_output=True, text=True, check=False
        )
        found = VERSION.search(done.stdout + done.stderr)
        return found[1].strip() if found else "unknown"


def ours(model: Path, text: str, chunks: int, context: int = CONTEXT) -> float:
    """Perplexity over the second half of each window, all but its last prediction, as llama-perplexity takes it."""
    lm = load_causal_lm(model)
    ids = lm.encode(text)
    total = count = 0.0
    for start in range(0, min(chunks, len(ids) // context) * context, context):
        window = ids[start : start + context].clone()
        if len(lm.prefix):
            window[0] = lm.prefix[0]
        with torch.no_grad():
            logits = lm(window[None])[0, context // 2 : -1]
        total += float(functional.cross_entropy(logits.double(), window[context // 2 + 1 :], reduction="sum"))
        count += context - context // 2 - 1
    return float(torch.tensor(total / count, dtype=torch.float64).exp())


def lost(plain: Path, packed: Path) -> float:
    """The squared error of all weights of two axes, but for embeddings."""
    total = 0.0
    with open_tensors(plain) as one, open_tensors(packed) as two:
        for name, spec in one.specs.items():
            if len(spec.shape) == 2 and not name.startswith("token_embd"):
                total += float((one.read_float(name).double() - two.read_float(name).double()).square().sum())
    return total


def wanted(source: Path, fmt: str) -> Any:
    if fmt != "mixed":
        return fmt
    with open_tensors(source) as file:
        return {pattern: kind for pattern, kind in MIXED.items() if any(_matches(pattern, name) for name in file.specs)}


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(pattern.replace(".", r"\.").replace("*", ".*"), name) is not None


def run(engine: Engine, source: Path, text: Path, chunks: int, formats: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "float16.gguf"
        for fmt in formats:
            output = Path(folder) / f"{fmt}.gguf"
            report = export_model(source, output, "gguf", wanted(source, fmt))
            theirs, own = (
                engine.perplexity(output, text, chunks),
                ours(output, text.read_text(encoding="utf-8"), chunks),
            )
            kinds = sorted({row.format for row in report.rows})
            row = {
                "format": fmt,
                "formats": kinds,
                "bytes": output.stat().st_size,
                "llama_cpp": theirs,
                "bitplan": round(own, 4),
                "difference": round(theirs / own - 1, 6),
            }
            if plain.exists() and fmt not in ("float16", "mixed"):
                other = Path(folder) / f"theirs-{fmt}.gguf"
                engine.quantize(plain, other, THEIR_NAMES.get(fmt) or fmt.removesuffix("_gguf").upper())
                row["squared_error_of_llama_quantize"] = round(lost(plain, output) / lost(plain, other), 4)
                other.unlink()
            rows.append(row)
            print(json.dumps(row), flush=True)
            if fmt != "float16":
                output.unlink()
    return rows


def run_families(engine: Engine) -> list[dict[str, Any]]:
    """Every family that is exported, from random weights: the engine must compute what transformers computes."""
    sys.path.insert(0, str(ROOT))
    from tests.files.engines.tiny_models import MODELS, save_tiny

    rows = []
    letters = torch.randint(26, (16, 64), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "letters.txt"
        text.write_text("".join(chr(97 + int(letter)) for letter in letters.flatten()))
        for kind in MODELS:
            model, output = Path(folder) / kind, Path(folder) / f"{kind}.gguf"
            save_tiny(model, kind)
            export_model(model, output, "gguf", "bfloat16" if kind == "gpt_oss" else "float32")
            theirs, own = engine.perplexity(output, text, 12, 32), ours(model, text.read_text(), 12, 32)
            rows.append(
                {
                    "family": kind,
                    "llama_cpp": theirs,
                    "transformers": round(own, 4),
                    "difference": round(theirs / own - 1, 6),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", type=Path, required=True, help="where llama-perplexity lies")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--gguf", type=Path, help="a GGUF file to quantize again")
    parser.add_argument("--families", action="store_true", help="tiny models of every family")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--formats", nargs="*", default=[*FORMATS, "mixed"], help="for --model")
    parser.add_argument("--gguf-formats", nargs="*", default=["float32", "q8_0_gguf", "q4_k_gguf"], help="for --gguf")
    parser.add_argument("--most", type=float, default=0.005, help="the largest difference that passes")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    if given.text is None and (given.model or given.gguf):
        parser.error("--model and --gguf need a --text")
    engine = Engine(given.bin, given.threads)
    models: dict[str, list[dict[str, Any]]] = {}
    families = run_families(engine) if given.families else []
    for source, formats in ((given.model, given.formats), (given.gguf, given.gguf_formats)):
        if source is not None:
            models[source.stem] = run(engine, source, given.text, given.chunks, formats)
    document = {
        "benchmark": "engines",
        "machine": machine("cpu"),
        "versions": {**versions(), "llama.cpp": engine.version},
        "commit": commit(),
        "text": {"file": given.text.name if given.text else None, "context": CONTEXT, "chunks": given.chunks},
        "families": families,
        "models": models,
    }
    print(save("engines", document, given.output))
    worst = max((abs(row["difference"]) for rows in (families, *models.values()) for row in rows), default=0.0)
    if worst > given.most:
        sys.exit(f"perplexities differ by {worst:.2%}, more than {given.most:.2%}")


if __name__ == "__main__":
    main()
