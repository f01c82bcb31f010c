"""Counts the writes of optimizers, which torch's own counter misses.

What is derived from a weight (a cast, a packed version, an encoded block) is kept while torch's count of in-place
writes, `tensor._version`, stands still. torch's fused optimizers write without counting (2.11 and 2.13), and so do the
kernels of others; Hugging Face's Trainer takes a fused one by default. So after every step of any optimizer the
parameters that had a gradient are counted here. A step that a CUDA graph replays is not seen.
"""

from __future__ import annotations

import threading

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

_lock = threading.Lock()
_hook: object = None


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
