"""`bitplan demo`: from a model trained a moment ago to packed files and an honest table."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from bitplan.cli.show import human_bytes, progress, table
from bitplan.cli.tiny_model import Corpus, TinyTransformer, perplexity, shipped_text, train
from bitplan.records import write_json
from bitplan.store.compare import compare_models
from bitplan.store.model_files import load_model, save_model
from bitplan.store.models import morph_model

FORMATS = (
    "bfloat16",
    "fp8_e4m3_row",
    "int8_row",
    "q8_0_gguf",
    "nvfp4",
    "q4_0_gguf",
    "mxfp4",
    "int4",
    "ternary_absmean",
)
SEED = 0


def run_demo(output: Path, *, fast: bool = False, quiet: bool = False) -> dict[str, Any]:
    """Train, quantize to several formats, save, load again, and measure what was loaded."""
    torch.manual_seed(SEED)
    output.mkdir(parents=True, exist_ok=True)
    corpus = Corpus(shipped_text())
    model = TinyTransformer(corpus.vocabulary)
    steps, windows = (8, corpus.held_out_windows(16)) if fast else (100, corpus.held_out_windows(256))
    started = time.perf_counter()
    with progress("training", steps, hidden=quiet) as advance:
        train(model, corpus, steps, lambda step, loss: advance(1, f"step {step + 1}/{steps}, loss {loss:.2f}"))
    trained_s = time.perf_counter() - started
    rows = [_measure("float32", model, output, windows, corpus.vocabulary)]
    with progress("quantizing", len(FORMATS), hidden=quiet) as advance:
        for name in FORMATS:
            rows.append(_measure(name, model, output, windows, corpus.vocabulary))
            advance(1, name)
    result = {"steps": steps, "train_seconds": round(trained_s, 1), "seed": SEED, "formats": rows}
    write_json(output / "demo.json", result)
    if not quiet:
        _show(result, model, output)
    return result


def _measure(name: str, model: TinyTransformer, output: Path, windows: torch.Tensor, vocabulary: int) -> dict[str, Any]:
    """Save the model in a format, load the file into a new model, and compare that with the original."""
    path = output / f"model.{name}.safetensors"
    loaded = TinyTransformer(vocabulary)
    loaded.load_state_dict(model.state_dict())
    if name != "float32":
        morph_model(loaded, name)
    save_model(loaded, path)
    fresh = load_model(path, TinyTransformer(vocabulary)).eval()
    difference = compare_models(model, fresh).overall
    return {
        "format": name,
        "bytes": path.stat().st_size,
        "cosine": difference.cosine,
        "sqnr_db": difference.to_dict()["sqnr_db"],
        "perplexity": perplexity(fresh, windows),
        "file": path.name,
    }


def _show(result: dict[str, Any], model: TinyTransformer, output: Path) -> None:
    weights = sum(parameter.numel() for parameter in model.parameters())
    rows = [
        {
            "format": row["format"],
            "bytes": human_bytes(row["bytes"]),
            "cosine": f"{row['cosine']:.6f}",
            "SQNR dB": "exact" if row["sqnr_db"] is None else f"{row['sqnr_db']:.1f}",
            "perplexity": f"{row['perplexity']:.3f}",
        }
        for row in result["formats"]
    ]
    title = f"{weights:,} weights trained for {result['train_seconds']} s; perplexity per character on held-out text"
    table(title, rows)
    print(f"files: {output}/model.FORMAT.safetensors, figures: {output}/demo.json")
    print(f"next:  bitplan inspect {output}/model.mxfp4.safetensors")
    print(f"       bitplan formats --on {output}/model.float32.safetensors:blocks.0.up.weight")
