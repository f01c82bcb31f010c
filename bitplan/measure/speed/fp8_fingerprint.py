"""The fingerprint of this machine and this software, as FP8 reports and policies carry it.

On a CPU FP8 is emulated, and the fingerprint says so instead of naming a GPU: such times are never merged with those of
a GPU, and a policy made from them is refused on every GPU.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import subprocess
from pathlib import Path

import torch

from bitplan.measure.speed.crossover_files import gpu_fingerprint
from bitplan.plan.fp8.report import Fingerprint
from bitplan.version import __version__

EMULATED = "none: FP8 emulated on the CPU"


def fingerprint_of(device: torch.device) -> Fingerprint:
    """What a time on this device depends on, except the layer."""
    if device.type == "cuda":
        stated = gpu_fingerprint(torch.cuda.get_device_name(device))
        gpu, driver, triton = stated["gpu"], stated["driver"], stated["triton"]
    else:
        gpu, driver, triton = EMULATED, "none", _triton_version()
    return Fingerprint(gpu, driver, str(torch.__version__), triton, __version__, commit())


def _triton_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "none"


@functools.cache
def commit() -> str:
    """The commit of a checkout, with `+changes` if files differ from it; without git, BITPLAN_COMMIT."""
    if stated := os.environ.get("BITPLAN_COMMIT"):
        return stated
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return "none"
    head = _git(root, "rev-parse", "--short=12", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return f"{head}{'+changes' if changed else ''}" if head else "none"


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
