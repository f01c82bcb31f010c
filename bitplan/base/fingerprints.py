"""What a measurement depends on: the GPU with its driver and libraries, and the content of tensors."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from bitplan.base.version import __version__


def describe_gpu(gpu: str) -> dict[str, str]:
    """The GPU of this name, its driver, and the libraries that a measured time depends on."""
    index = next(i for i in range(torch.cuda.device_count()) if torch.cuda.get_device_name(i) == gpu)
    major, minor = torch.cuda.get_device_capability(index)
    return {
        "gpu": gpu,
        "capability": f"{major}.{minor}",
        "driver": _driver_version(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "bitplan": __version__,
    }


def _driver_version() -> str:
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return str(torch._C._cuda_getDriverVersion())  # type: ignore[attr-defined]


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def hash_tensors(tensors: Iterable[Tensor]) -> str:
    """A hash of numbers, types and shapes."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
