"""Tells whether a weight has changed, for everything derived from it (a cast, a packed version, an encoded block).

Torch counts in-place writes to a tensor (`_version`), but not those of its fused optimizers (2.11 and 2.13) or of other
libraries' kernels; Hugging Face's Trainer uses a fused optimizer by default. So after every step of any optimizer a
write is counted here for each parameter that had a gradient, before the step or after it. Steps that a CUDA graph
replays are not noticed.

Nor does torch count writes through `weight.data`, as in loops without an optimizer. They are told by the gradient
(`GradientWatch`): before the next step it is cleared.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

UNCOUNTED = -1  # for a tensor that was made in inference mode, which may change unnoticed
_lock = threading.Lock()
_hook: object = None
_in_step: WeakKeyDictionary[Optimizer, list[Tensor]] = WeakKeyDictionary()


def writes_of(tensor: Tensor) -> int:
    """How often the tensor was written to, or `UNCOUNTED`."""
    return UNCOUNTED if tensor.is_inference() else tensor._version


def state_of(tensor: Tensor) -> tuple[int, int]:
    """A pair (writes, address) that changes with each counted write, and when the tensor moves to other memory."""
    return UNCOUNTED if tensor.is_inference() else tensor._version, tensor.data_ptr()


def count_optimizer_steps() -> None:
    """Make every optimizer's step raise `_version` of its parameters from now on; call it before you rely on that."""
    global _hook
    if _hook is None:
        with _lock:
            _hook = _hook or (
                register_optimizer_step_pre_hook(_before_step),
                register_optimizer_step_post_hook(_after_step),
            )


def _before_step(optimizer: Optimizer, *_: object) -> None:
    _in_step[optimizer] = _with_gradients(optimizer)  # the step may clear them


def _after_step(optimizer: Optimizer, *_: object) -> None:
    stepped = {id(tensor): tensor for tensor in (*_in_step.pop(optimizer, ()), *_with_gradients(optimizer))}
    torch.autograd.graph.increment_version([tensor for tensor in stepped.values() if not tensor.is_inference()])


def _with_gradients(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]


_NO_GRADIENT = -2


class GradientWatch:
    """Tells by a weight's gradient whether a step is over, since something was derived from that weight.

    Between steps gradients are only added up: torch counts one write to `grad` for each backward. A gradient that was
    taken away, or written to by others, means that a step may be over. Asking too soon costs time, and nothing else.
    """

    def __init__(self, weight: Tensor) -> None:
        self._writes, self._backwards = _gradient_writes(weight), 0

    def count_backward(self, gradient: Tensor) -> None:
        """Say that this gradient was computed; where it is the first, torch takes it as the weight's own."""
        if self._writes == _NO_GRADIENT and not self._backwards:
            self._writes = gradient._version - 1
        self._backwards += 1

    def is_step_over(self, weight: Tensor) -> bool:
        if not self._backwards:
            return False
        return _gradient_writes(weight) != self._writes + self._backwards


def _gradient_writes(weight: Tensor) -> int:
    """How often the weight's gradient was written to."""
    gradient = weight.grad if weight.is_leaf else None
    return _NO_GRADIENT if gradient is None else gradient._version


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
            for old in [old for old, entry_of_old in self.items() if entry_of_old.storage.expired()]:
                del self[old]
            self._swept_at = len(self)
        self[key] = entry
