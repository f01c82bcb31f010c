"""`bitplan demo`: from nothing to a trained, measured, planned, packed model, and one page that shows all of it.

Parts pass files to each other as everywhere in bitplan: measure, plan, apply. Each file is written when it is ready, so
a run that is stopped leaves complete files of the parts that were done. The same seed gives the same figures; times
differ.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bitplan.cli.demo import show
from bitplan.cli.demo.gpu import MODEL, WITHOUT_GPU, GpuSizes, measure_fp8, measure_fused, plan_fp8
from bitplan.cli.demo.plan import FOUR_BITS, calibrate, find_plan, manifest_of, passes
from bitplan.cli.demo.quality import (
    FORMATS,
    PLAN,
    REFERENCE,
    DemoComparison,
    count_measured,
    pack_by_plan,
    save_reference,
)
from bitplan.cli.demo.tiny_model import Corpus, TinyTransformer, shipped_text
from bitplan.cli.demo.training import made_batches, train_streamed
from bitplan.cli.demo.trees import boost_twice, count_fits
from bitplan.cli.show import progress
from bitplan.errors import FileFormatError, StoreError
from bitplan.measure.machine import examine_machine
from bitplan.measure.speed.crossover_files import gpu_fingerprint
from bitplan.plan import Manifest
from bitplan.records import read_json, write_json
from bitplan.report import write_report

# The files of the report, in this order; a part that was not run has none.
RECORDS = (
    "front.json",
    "plan.json",
    "quality.json",
    "training.jsonl",
    "precision.jsonl",
    "stream.jsonl",
    "fp8-policy.json",
    "crossover.json",
    "calibration.json",
    "drift.jsonl",
    "trees.json",
    "demo.json",
    "machine.json",
)
EVIDENCE = ("evidence.json", "evidence.safetensors", "statistics.safetensors")
OTHERS = ("manifest.json", "fp8-model.json", "fp8.jsonl", "report.html", *EVIDENCE)
VALIDATION_WINDOWS = 32
TITLE = "bitplan demo"


@dataclass(frozen=True)
class Size:
    """The size of each part of the demo."""

    steps: int
    batch: int
    windows: int
    calibration_batches: int
    search_windows: int
    rows: int
    trees: int
    repeats: int


FULL = Size(steps=180, batch=8, windows=64, calibration_batches=4, search_windows=48, rows=60_000, trees=40, repeats=3)
FAST = Size(steps=16, batch=2, windows=8, calibration_batches=1, search_windows=8, rows=4000, trees=5, repeats=1)


def run_demo(
    output: Path, *, fast: bool = False, quiet: bool = False, seed: int = 0, force: bool = False
) -> dict[str, Any]:
    """Train, calibrate, plan, pack, boost, and write a report of it into a folder; returns the figures of demo.json."""
    prepare_folder(output, force=force)
    return _Demo(output, FAST if fast else FULL, seed, quiet).run()


def prepare_folder(output: Path, *, force: bool = False) -> None:
    """Make the folder, check that it is writable, and remove the files of an earlier demo, but no others.

    Files with these names that no demo wrote are removed only with `force`.
    """
    if output.exists() and not output.is_dir():
        raise StoreError(f"{output}: is a file, and the demo writes a folder; give another name with --output")
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
        models = [f"model.{name}.safetensors" for name in (REFERENCE, PLAN, *FORMATS)]
        old_files = [output / name for name in (*RECORDS, *OTHERS, *models) if os.path.lexists(output / name)]
        if old_files and not force and not _is_a_demos(output):
            raise StoreError(
                f"{old_files[0]}: exists already, and no demo wrote it; replace it with --force, or give another "
                "folder with --output"
            )
        for path in old_files:
            path.unlink()
    except OSError as error:
        raise StoreError(
            f"{output}: the demo cannot write there ({error.strerror or error}); give another folder with --output"
        ) from None


def _is_a_demos(output: Path) -> bool:
    """Whether a demo began here: its figures are the first file that it writes."""
    try:
        figures = read_json(output / "demo.json")
    except (OSError, FileFormatError):
        return False
    return isinstance(figures, dict) and {"seed", "fast", "weights"} <= set(figures)


class _Demo:
    def __init__(self, output: Path, size: Size, seed: int, quiet: bool) -> None:
        self.output, self.size, self.seed, self.quiet = output, size, seed, quiet
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def run(self) -> dict[str, Any]:
        torch.manual_seed(self.seed)
        self.corpus = Corpus(shipped_text())
        self.model = TinyTransformer(self.corpus.vocabulary)
        weights = sum(parameter.numel() for parameter in self.model.parameters())
        figures: dict[str, Any] = {"seed": self.seed, "fast": self.size is FAST, "weights": weights}
        self._write("demo.json", figures)
        self.machine = examine_machine(measure=self.device == "cuda")
        self._write("machine.json", self.machine)
        self._tell(show.say_start, figures, self.output)
        training = self._train()
        figures |= {"steps": training["steps"], "train_seconds": training["seconds"], "training": training}
        figures["calibration"], figures["plan"] = self._plan()
        figures["drift"], figures["formats"] = self._pack()
        figures["trees"] = self._boost()
        figures["gpu"] = self._gpu()
        self._write("demo.json", figures)
        written = [name for name in RECORDS if (self.output / name).exists()]
        write_report([self.output / name for name in written], self.output / "report.html", title=TITLE)
        self._tell(show.say_end, self.output)
        return figures | {"records": written, "report": str(self.output / "report.html")}

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _train(self) -> dict[str, Any]:
        self.batches = made_batches(self.corpus, self.size.steps, self.size.batch, self.seed)
        with progress("1/6 training", self.size.steps) as advance:
            figures = train_streamed(
                self.model,
                self.batches,
                self.corpus.held_out_windows(VALIDATION_WINDOWS),
                self.output,
                device=self.device,
                log_head={key: self.machine[key] for key in ("machine", "versions")},
                advance=advance,
            )
        self._tell(show.show_training, figures)
        return figures

    def _plan(self) -> tuple[dict[str, Any], dict[str, Any]]:
        batches = [ids for ids, _ in self.batches[: self.size.calibration_batches]]
        with progress("2/6 calibrating", passes(len(batches))) as advance:
            errors = calibrate(self.model, batches, self.output, device=self.device, advance=advance).layers
        self.model.to("cpu").eval()
        self._tell(show.show_calibration, errors)
        save_reference(self.model, self.output)
        text = torch.cat([ids for ids, _ in self.batches])[: 2 * self.size.search_windows]
        held_out = self.corpus.held_out_windows(self.size.windows // 2)
        found = find_plan(self.model, text, held_out, self.output, count=self.size.search_windows)
        self.plan = found.plan
        document = manifest_of(self.plan)
        self.manifest = Manifest.from_document(document, where="the demo's manifest")
        self._write("manifest.json", document)
        self._tell(show.show_plan, found)
        sizes = self.plan.bytes_by_role_and_format()[-1]
        formats = {name: choice.format for name, choice in self.plan.items()}
        planned = {"bytes": sizes.nbytes, "times_smaller_than_bf16": sizes.ratio, "formats": formats}
        planned |= {"kl": found.winner.kl.mean, "predicted_kl": found.winner.predicted, "lost": found.lost}
        return {"layers": errors, "worst_in": FOUR_BITS[0]}, planned

    def _pack(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        drift = pack_by_plan(self.output, self.plan, self.manifest, self.size.steps)
        windows = self.corpus.held_out_windows(self.size.windows)
        comparison = DemoComparison(self.model, self.corpus.vocabulary, windows, self.output)
        with progress("4/6 packing", count_measured()) as advance:
            rows = comparison.measure_all(advance)
        self._tell(show.show_formats, rows, windows[:, 1:].numel())  # the first character of a window is given
        return [row.to_dict() for row in drift], rows

    def _boost(self) -> list[dict[str, Any]]:
        size = self.size
        with progress("5/6 boosting", count_fits(size.repeats)) as advance:
            runs = boost_twice(size.rows, size.trees, size.repeats, self.seed, advance)
        head = {"benchmark": "trees", "machine": self.machine["machine"], "versions": self.machine["versions"]}
        self._write("trees.json", head | {"runs": runs})
        self._tell(show.show_trees, runs)
        return runs

    def _gpu(self) -> dict[str, Any]:
        if self.device != "cuda":
            self._tell(show.begin, f"6. Not measured: {WITHOUT_GPU}")
            return {"measured": False, "reason": WITHOUT_GPU}
        sizes, gpu = GpuSizes(MODEL), torch.cuda.get_device_name()
        session = plan_fp8(self.output, sizes, self.device)
        with progress("6/6 FP8", len(session.plan.ways())) as advance:
            fp8 = measure_fp8(session, advance)
        with progress("6/6 fused products", len(sizes.formats)) as advance:
            fused = measure_fused(self.output, sizes, self.device, advance, gpu_fingerprint(gpu))
        self._tell(show.show_gpu, gpu, fp8, fused)
        return {"measured": True, "gpu": gpu, "fp8": fp8, "fused": fused}

    # ---- files and words ---------------------------------------------------------------------------------------------

    def _write(self, name: str, document: Any) -> None:
        write_json(self.output / name, document)

    def _tell(self, tell: Callable[..., None], *given: Any) -> None:
        if not self.quiet:
            tell(*given)
