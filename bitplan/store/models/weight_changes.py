"""Tells whether a weight has changed, for everything derived from it (a cast, a packed version, an encoded block).

Torch counts in-place writes to a tensor (`_version`), but not those of its fused optimizers (2.11 and 2.13) or of other
libraries' kernels; Hugging Face's Trainer uses a fused optimizer by default. So after every step of any optimizer a
write is counted here for each parameter that had a gradient. Steps that a CUDA graph replays are not noticed.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

UNCOUNTED = -1  # for a tensor that was made in inference mode, which may change unnoticed
_lock = threading.Lock()
_hook: object = None


def writes_of(tensor: Tensor) -> int:
    """How often the tensor was written to, or `UNCOUNTED`."""
    return UNCOUNTED if tensor.is_inference() else tensor._version


def state_of(tensor: Tensor) -> tuple[int, int]:
    """(writes, address): changes with each counted write, and when the tensor moves to other memory."""
    return writes_of(tensor), tensor.data_ptr()


def count_optimizer_steps() -> None:
    """From now on every optimizer's step raises `_version` of its parameters; call it before you rely on that."""
    global _hook
    if _hook is None:
        with _lock:
            _hook = _hook or register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, *_: object) -> None:
    groups = optimizer.param_groups
    stepped = [each for group in groups for each in group["params"] if each.grad is not None]
    torch.autograd.graph.increment_version([each for each in stepped if not each.is_inference()])


class _OfStorage(Protocol):
    storage: StorageWeakRef


Entry = TypeVar("Entry", bound=_OfStorage)


class KeptByStorage(dict[Hashable, Entry]):
    """Things derived from weights, by the weights' memory: a key begins with the storage's `_cdata`.

    The weak reference in an entry keeps `_cdata` from being reused for another storage, so an entry under a weight's
    key belongs to that weight. Entries of freed weights are dropped each time the count has doubled.
    """

    def __init__(self, least: int) -> None:
        super().__init__()
        self._least, self._swept_at = least, 0

    def add(self, key: Hashable, entry: Entry) -> None:
        if not self:
            self._swept_at = 0
        if len(self) >= 2 * self._swept_at + self._least:
            for gone in [each for each, kept in self.items() if kept.storage.expired()]:
                del self[gone]
            self._swept_at = len(self)
        self[key] = entry
