"""Tells what a figure depends on: the machine, its GPU and driver, libraries, bitplan's code, the content of tensors.

A machine is described by what it is, never by a host's name.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitplan.base import __version__
from bitplan.base.errors import StoreError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LIBRARIES = ("gguf", "numba", "numpy", "safetensors", "tokenizers", "torch", "transformers", "triton")
_MEMORY = Path("/proc/meminfo")
_SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

# ---- the host --------------------------------------------------------------------------------------------------------


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
    """Describes the host: processor, cores, system and memory."""
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


def read_size(text: str) -> int | None:
    """The bytes of 6GB, 900 MB, 1.5GiB or a plain number; None if the text is no size."""
    match = re.fullmatch(r"\s*([0-9]{1,40}(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _SIZES:
        return None
    return int(float(match[1]) * _SIZES[match[2].upper()])


def give_back_memory() -> None:
    """Return freed memory to the system: glibc would keep it, 40 MB after finding bins or loading a model."""
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


@functools.cache
def cpu_features() -> frozenset[str]:
    """LLVM's names of the CPU's features, such as avx2, avx512f, f16c, neon, dotprod, as numba compiles for it.

    NUMBA_CPU_NAME and NUMBA_CPU_FEATURES may name a smaller CPU than the machine has. numba caches compiled code under
    the same description, so code for one CPU never runs on another.
    """
    from numba.core.registry import cpu_target

    listed = cpu_target.target_context.codegen().magic_tuple()[2]
    return frozenset(feature[1:] for feature in listed.split(",") if feature.startswith("+"))


def float_lanes() -> int:
    """How many float32 a register holds."""
    return 16 if "avx512f" in cpu_features() else 8 if "avx2" in cpu_features() else 4


# ---- GPUs ------------------------------------------------------------------------------------------------------------


def describe_gpu(gpu: str) -> dict[str, str]:
    """The GPU of this name, its driver, and the libraries that a measured time depends on."""
    import torch

    index = next(i for i in range(torch.cuda.device_count()) if torch.cuda.get_device_name(i) == gpu)
    major, minor = torch.cuda.get_device_capability(index)
    return {
        "gpu": gpu,
        "capability": f"{major}.{minor}",
        "driver": _driver_version(),
        "torch": torch.__version__,
        "triton": version_of("triton") or "none",
        "bitplan": __version__,
    }


def _driver_version() -> str:
    import torch

    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return str(torch._C._cuda_getDriverVersion())  # type: ignore[attr-defined]


def known_device(name: torch.device | str, next_step: str) -> torch.device:
    """The device of this name; an unknown name, or a GPU that does not exist, is an error of one line."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise StoreError(f"device {str(name)!r}: there is no such kind; use cpu, or cuda with or without :N") from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise StoreError(f"device {str(name)!r}: torch sees no GPU here; {next_step}", settings={"device": "cpu"})
        if device.index is not None and device.index >= count:
            raise StoreError(f"device {str(name)!r}: the GPUs here are cuda:0 to cuda:{count - 1}; use one of them")
    return device


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device; on CUDA through pinned memory, which torch reuses once the copy is done."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)


# ---- libraries, code, tensors ----------------------------------------------------------------------------------------


def version_of(package: str) -> str | None:
    """The version of an installed package, by its metadata."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def code_versions() -> dict[str, str]:
    """Versions of bitplan, Python and the libraries that numbers depend on, of those that are installed."""
    versions = {name: version for name in LIBRARIES if (version := version_of(name)) is not None}
    return {"python": platform.python_version(), "bitplan": __version__, **versions}


@functools.cache
def code_sha256() -> str:
    """A hash of bitplan's own source files: a version that is being worked on has one number for many states."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def hash_tensors(tensors: Iterable[Tensor]) -> str:
    """A hash of tensors: their numbers, types and shapes."""
    import torch

    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
