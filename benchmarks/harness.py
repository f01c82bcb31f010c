"""What every benchmark shares: who measured, how often, how far apart, and where the result goes.

A result names the machine by what it is, never by what it is called. Variants are timed in turns, so that a
disturbance hits them all; the median counts, the spread is kept.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import torch

from bitplan.base import __version__
from bitplan.base.hardware import cpu_model
from bitplan.base.records import atomic_file

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
CYCLES_A_SECOND, LONGEST_WAIT_S = 2_000_000_000, 0.2  # of a GPU that waits for its host
LONG_LINE = 200  # what is shorter than this stays on one line
PACKAGES = (
    "torch", "triton", "numba", "numpy", "gguf", "torchao", "lightgbm", "optuna", "xgboost", "xgboost-cpu",
    "scikit-learn", "transformers",
)  # fmt: skip


def machine(device: str) -> dict[str, Any]:
    """What measured: processor, cores, and the GPU with its driver if it is one."""
    result: dict[str, Any] = {
        "cpu": cpu_model(),
        "cores": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        result |= {
            "gpu": properties.name,
            "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "cuda": torch.version.cuda,
        }
    return result


def versions() -> dict[str, str]:
    result = {"python": platform.python_version(), "bitplan": __version__}
    for package in PACKAGES:
        try:
            result[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return result


def shipped_text() -> str:
    """A slice of Shakespeare (public domain) that comes with the package."""
    return resources.files("bitplan").joinpath("data/shakespeare.txt").read_text(encoding="utf-8")


def commit() -> str:
    """The commit measured, marked `+changes` when the tree differs from it.

    On a machine that has the files without their history, BITPLAN_COMMIT says it.
    """
    if stated := os.environ.get("BITPLAN_COMMIT"):
        return stated
    head = _first_line("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    dirty = _first_line("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    return f"{head}{'+changes' if dirty else ''}" if head else "unknown"


def time_in_turns(
    variants: Mapping[str, Callable[[], object]], repeats: int, *, cuda: bool = False
) -> dict[str, list[float]]:
    """Milliseconds of every repeat of every variant, after one warm-up each.

    On a GPU by events, all work queued before the first is read. Before each turn the GPU waits as long as the host
    took to launch one, so that it never runs out of work in the middle of a sample.
    """
    for run in variants.values():
        run()
    if cuda:
        return _cuda_ms(variants, repeats)
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, run in variants.items():
            samples[name].append(_wall_ms(run))
    return samples


def summary(samples: list[float]) -> dict[str, float]:
    """The median, and the spread from the tenth to the ninetieth percentile."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return {
        "median_ms": statistics.median(ordered),
        "min_ms": ordered[0],
        "p10_ms": ordered[round(0.1 * last)],
        "p90_ms": ordered[round(0.9 * last)],
    }


def command() -> str:
    """The command line of this process, from the repository's root; files by name alone, wherever they lie."""
    program, *arguments = sys.argv
    named = [Path(each).name if "/" in each else each for each in arguments]
    return shlex.join(["python", f"benchmarks/{Path(program).name}", *named])


def save(name: str, document: Mapping[str, Any], output: Path | None) -> Path:
    """Write a result where results live, or where the caller says, with the command that made it."""
    path = output or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"benchmark": document["benchmark"], "command": command()} if "benchmark" in document else {}
    with atomic_file(path) as file:
        file.write(format_rows({**head, **document}).encode() + b"\n")
    return path


def format_rows(value: Any, indent: str = "") -> str:
    """JSON with a row to a line: an object or a list is divided only where it holds rows, so that diffs stay short."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    inner = indent + " "
    if isinstance(value, Mapping) and (not indent or (len(text) > LONG_LINE and len(indent) < 2)):
        items = [
            f"{inner}{json.dumps(key, ensure_ascii=False)}: {format_rows(each, inner)}" for key, each in value.items()
        ]
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(each, Mapping | list) for each in value) and len(text) > LONG_LINE:
        rows = [inner + json.dumps(each, ensure_ascii=False, allow_nan=False) for each in value]
        return "[\n" + ",\n".join(rows) + f"\n{indent}]"
    return text


def _wall_ms(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    result = run()
    elapsed = (time.perf_counter() - started) * 1e3
    del result  # freeing it is not part of the work
    return elapsed


def _cuda_ms(variants: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in variants}
    started = time.perf_counter()
    for run in variants.values():
        run()
    waited_s = min(1.5 * (time.perf_counter() - started), LONGEST_WAIT_S)
    for _ in range(repeats):
        torch.cuda._sleep(int(waited_s * CYCLES_A_SECOND))
        for name, run in variants.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            stop.record()
            events[name].append((start, stop))
    torch.cuda.synchronize()
    return {name: [float(start.elapsed_time(stop)) for start, stop in pairs] for name, pairs in events.items()}


def _first_line(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip().split("\n")[0]
