"""When a weight has changed: what all that is derived from one (a cast, a packed version, an encoded block) asks.

Torch counts in-place writes to a tensor (`_version`), but not those of its fused optimizers (2.11 and 2.13), nor of the
kernels of others; Hugging Face's Trainer takes a fused one by default. So after every step of any optimizer the
parameters that had a gradient are counted here. A step that a CUDA graph replays is not seen.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

UNCOUNTED = -1  # writes to a tensor that was made in inference mode, which may change at any time
_lock = threading.Lock()
_hook: object = None


def writes_of(tensor: Tensor) -> int:
    """How often the tensor was written to, or `UNCOUNTED`."""
    return UNCOUNTED if tensor.is_inference() else tensor._version


def state_of(tensor: Tensor) -> tuple[int, int]:
    """(writes, address): another after each write that is counted, and in other memory."""
    return writes_of(tensor), tensor.data_ptr()


def count_optimizer_steps() -> None:
    """From now on every optimizer's step raises `_version` of what it changed; call it before relying on that."""
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
    """What is derived from weights, by their memory: a key begins with the storage's `_cdata`.

    The weak reference in an entry keeps that identity from being given to another storage, so what is found under the
    key of a weight is of that weight. Entries of weights that are gone are dropped each time the count has doubled.
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
