"""The demo's fourth part: the model saved by its plan and in single formats, loaded again, and measured.

The files themselves are measured: each model is written, read into a new model, and compared with the trained one,
character by character on text that it has not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from bitplan.cli.demo.tiny_model import CONTEXT, TinyTransformer
from bitplan.cli.demo.training import Advance
from bitplan.errors import StoreError
from bitplan.formats import Encoded, get_format
from bitplan.measure.quality.perplexity import CachedLogits, Quality, measure_perplexity
from bitplan.plan import Header, Manifest, Plan, check_headers
from bitplan.records import write_json
from bitplan.store.checks.drift import DriftLog, DriftRow, log_drift
from bitplan.store.compare import compare_models
from bitplan.store.files.open_files import open_tensors
from bitplan.store.models.morph import morph_model
from bitplan.store.models.save_load import load_model, save_model
from bitplan.store.quantize_files import quantize_file

REFERENCE = "float32"
BASELINE = "bfloat16"
PLAN = "plan"
FORMATS = (
    BASELINE,
    "fp8_e4m3_row",
    "int8_row",
    "q8_0_gguf",
    "nvfp4",
    "q4_0_gguf",
    "mxfp4",
    "int4",
    "ternary_absmean",
)
CACHED_BYTES = 2**28
BATCH = 32


def model_file(output: Path, name: str) -> Path:
    return output / f"model.{name}.safetensors"


def save_reference(model: nn.Module, output: Path) -> None:
    """Write the trained model as it is."""
    save_model(model, model_file(output, REFERENCE))


def pack_by_plan(output: Path, plan: Plan, manifest: Manifest, step: int) -> list[DriftRow]:
    """Write model.plan.safetensors, check it against the manifest, and log how far each packed weight is off."""
    source, packed = model_file(output, REFERENCE), model_file(output, PLAN)
    quantize_file(source, packed, plan, evidence=output / "evidence.safetensors")
    with open_tensors(packed) as file, open_tensors(source) as masters, DriftLog(output / "drift.jsonl") as log:
        headers = {name: Header(spec.format, spec.shape, spec.nbytes) for name, spec in file.specs.items()}
        findings = check_headers(manifest, headers)
        if findings:
            raise StoreError(f"{packed}: is not what the manifest says: {findings[0].where}: {findings[0].message}")
        layers = [
            (name, masters.read_float(name), encoded)
            for name in file.specs
            if isinstance(encoded := file.read(name), Encoded) and not encoded.fmt.is_cast
        ]
        return log_drift(log, step, layers)


class DemoComparison:
    """Every saved model against the trained one, on the same windows of text."""

    def __init__(self, model: TinyTransformer, vocabulary: int, windows: Tensor, output: Path) -> None:
        self.model, self.vocabulary, self.output = model, vocabulary, output
        self.windows: Sequence[Tensor] = list(windows)
        self._reference = CachedLogits(model, CACHED_BYTES)
        self.rows: list[dict[str, Any]] = []
        self._measured: list[dict[str, Any]] = []

    def measure(self, name: str) -> None:
        """Measure a format, whose file is written first, or an existing file."""
        path = model_file(self.output, name)
        if not path.exists():
            copy = TinyTransformer(self.vocabulary)
            copy.load_state_dict(self.model.state_dict())
            morph_model(copy, name)
            save_model(copy, path)
        loaded = load_model(path, TinyTransformer(self.vocabulary)).eval()
        reference = None if name == REFERENCE else self._reference
        quality = measure_perplexity(loaded, self.windows, reference=reference, batch=BATCH, name=name)
        difference = compare_models(self.model, loaded).overall
        self.rows.append(
            {
                "format": name,
                "bytes": path.stat().st_size,
                "cosine": difference.cosine,
                "sqnr_db": difference.to_dict()["sqnr_db"],
                "perplexity": quality.perplexity,
                "file": path.name,
            }
        )
        self._measured.append(_row(name, path, quality))

    def measure_all(self, advance: Advance) -> list[dict[str, Any]]:
        """The reference, the plan, and every single format; quality.json is written after each."""
        for name in (REFERENCE, PLAN, *FORMATS):
            self.measure(name)
            self._write()
            advance(1, name)
        return self.rows

    def _write(self) -> None:
        settings = {"model": "demo transformer", "text": "shakespeare.txt", "context": CONTEXT}
        settings["tokens"] = self._measured[0]["tokens"]
        document = {"reference_row": self._measured[0], "rows": self._measured[1:], "settings": settings}
        write_json(self.output / "quality.json", document)


def count_measured() -> int:
    """How often `measure_all` advances."""
    return len(FORMATS) + 2


def _row(name: str, path: Path, quality: Quality) -> dict[str, Any]:
    with open_tensors(path) as file:
        bits = 8 * sum(spec.nbytes for spec in file.specs.values())
        numbers = sum(get_format(REFERENCE).nbytes(spec.shape) for spec in file.specs.values()) / 4
    return {"format": name, "bits_per_weight": bits / numbers, **quality.to_dict()}
