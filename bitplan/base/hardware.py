"""The machine that a figure is from, and the code that made it: by what they are, never by a host's name."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from bitplan.base.version import __version__

LIBRARIES = ("gguf", "numba", "numpy", "safetensors", "tokenizers", "torch", "transformers", "triton")
_MEMORY = Path("/proc/meminfo")


@functools.cache
def cpu_model() -> str:
    """The processor's name; on Arm only lscpu has it."""
    try:
        text = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return platform.processor() or platform.machine()
    named = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return named.get("Model name", platform.machine()).strip()


def hardware() -> dict[str, Any]:
    """Processor, cores, system and memory."""
    facts: dict[str, Any] = {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if hasattr(os, "sysconf"):
        facts["memory_gib"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return facts


def free_memory() -> int:
    """Bytes of memory that programs can have; where the system does not say, 4 GiB."""
    available = re.search(r"MemAvailable:\s+(\d+) kB", _MEMORY.read_text()) if _MEMORY.is_file() else None
    return 4 * 2**30 if available is None else 1024 * int(available[1])


@functools.cache
def code_versions() -> dict[str, str]:
    """Versions of bitplan, Python and the libraries that numbers depend on."""
    versions = {"python": platform.python_version(), "bitplan": __version__}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@functools.cache
def code_sha256() -> str:
    """A hash of bitplan's own source files: a version that is being worked on has one number for many states."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
