"""Devices by name, checked before anything is read or drawn for them.

Copies small tables from the host to a device without waiting for the device's work.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitplan.base.errors import StoreError

# ---- host copy -------------------------------------------------------------------------------------------------------


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device; on CUDA through pinned memory, which torch reuses once the copy is done."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)


# ---- devices ---------------------------------------------------------------------------------------------------------


def known_device(device: torch.device | str, next_step: str) -> torch.device:
    """The device of this name; an unknown name, or a GPU that does not exist, is an error of one line."""
    try:
        place = torch.device(device)
    except RuntimeError:
        raise StoreError(
            f"device {str(device)!r}: there is no such kind; use cpu, or cuda with or without :N"
        ) from None
    if place.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise StoreError(f"device {str(device)!r}: torch sees no GPU here; {next_step}", settings={"device": "cpu"})
        if place.index is not None and place.index >= count:
            raise StoreError(f"device {str(device)!r}: the GPUs here are cuda:0 to cuda:{count - 1}; use one of them")
    return place
