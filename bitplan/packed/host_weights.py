"""Packed weights that wait in the host's memory, and cross the bus when a product needs them.

Their bytes lie in pinned memory, of exactly their size, which a GPU can address: to torch and to kernels they are a
tensor of the GPU. A kernel reads a weight's codes once in a product with few rows, so they cross once; of a layer's
experts the chosen ones cross, of an embedding a row. No copy of them is made on the GPU and nothing has to be
scheduled; kernels read pinned memory about as fast as the copy engine does.

Scales, as kernels read them, are made once and lie on the GPU, as for other weights. On a CPU both memories are one:
there the same code runs on a copy, to try it out.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bitplan.base.errors import StoreError
from bitplan.packed.packed_weight import PackedWeight


class _Addressed:
    """Pinned memory as torch takes it for a GPU's: by its address."""

    def __init__(self, buffer: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (buffer.nbytes,),
            "typestr": "|u1",
            "data": (buffer.data_ptr(), False),
            "strides": None,
            "version": 3,
        }
        weakref.finalize(self, _release, buffer).atexit = False


def _release(buffer: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())


def addressed(host: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """A copy of a tensor in pinned memory: as the host sees it, and as a tensor of the device."""
    tensor = host.contiguous()
    size = tensor.nbytes
    if not size:
        return tensor, tensor.to(device)
    buffer = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)  # torch's pinned memory is rounded up
    buffer.copy_(tensor.reshape(-1).view(torch.uint8))
    on_device = buffer
    if device.type == "cuda":
        status = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), size, 0))
        if status:
            raise StoreError(
                f"CUDA refused to pin {size:,} bytes of host memory (error {status}); raise the limit on locked memory "
                "(ulimit -l), or let less lie there"
            )
        on_device = torch.as_tensor(_Addressed(buffer), device=device)
    return _like(buffer, tensor), _like(on_device, tensor)


def _like(flat: Tensor, tensor: Tensor) -> Tensor:
    return flat.view(tensor.dtype).reshape(tensor.shape)


def wait_in_host(weight: PackedWeight, device: torch.device) -> PackedWeight:
    """Let a weight lie in the host's memory, for products on a device; gives the weight."""
    _hold(weight, {name: addressed(part, device) for name, part in weight._buffers.items() if part is not None})
    return weight


def _hold(weight: PackedWeight, parts: dict[str, tuple[Tensor, Tensor]]) -> None:
    for name, (_, on_device) in parts.items():
        weight._buffers[name] = on_device
    weight.waiting = {name: host for name, (host, _) in parts.items()}
    weight.forget()


def join_waiting(weights: Sequence[PackedWeight]) -> dict[str, Tensor]:
    """Codes and scales of weights below each other in one matrix of the host's memory; they become views of it."""
    device, first = weights[0].device, weights[0]
    parts: dict[str, Tensor] = {}
    rows: dict[str, tuple[Tensor, Tensor]] = {}
    for name in (name for name in ("data", "scales") if name in first.waiting):
        rows[name] = addressed(torch.cat([weight.waiting[name] for weight in weights]), device)
        parts[name] = rows[name][1]
    start = 0
    for weight in weights:
        stop = start + weight.shape[0]
        others: dict[str, Any] = {name: (host, weight._buffers[name]) for name, host in weight.waiting.items()}
        _hold(
            weight,
            others | {name: (host[start:stop], on_device[start:stop]) for name, (host, on_device) in rows.items()},
        )
        start = stop
    return parts
