"""The result of loading a packed checkpoint: the model, and the bytes and seconds it took."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

CHECKS = ("headers", "deep")


@dataclass(frozen=True)
class LoadReport:
    """What was loaded: bytes of the file and on the device, and the peak of memory there while loading.

    `peak_bytes` is the peak of torch's allocator minus what was allocated before; None on a CPU, where nothing counts.
    """

    path: str
    layout: str
    device: str
    file_bytes: int
    device_bytes: int
    packed_bytes: int
    packed_tensors: int
    plain_tensors: int
    seconds: float
    peak_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Loaded(NamedTuple):
    """A model that runs, and the report of loading it."""

    model: nn.Module
    report: LoadReport


class PeakMemory:
    """The most that was allocated on a GPU since this object was made; making it resets torch's own peak."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)

    def read(self) -> int | None:
        if self._device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self._device) - self._before
