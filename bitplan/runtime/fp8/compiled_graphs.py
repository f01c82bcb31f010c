"""Allocates memory that outlives the CUDA graphs of torch.compile(mode="reduce-overhead").

Those graphs share a pool of memory, and torch must know every tensor in it: one that stays and is no graph's output is
an error. While torch warms up or records a graph, everything that its thread allocates comes from that pool. So the
guesses of scales, which FP8 layers keep from step to step, are allocated by another thread; casts of weights are not
kept then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

Made = TypeVar("Made")


def in_compiled_graphs(weight: Tensor) -> bool:
    """Whether torch.compile is recording, or warming up, a CUDA graph with this weight."""
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or not weight.is_cuda or not torch._C._is_key_in_tls("tree_manager_containers"):
        return False  # graphs of another thread do not concern this one
    # As trees.get_manager does, which makes what it does not find, under a lock: this is asked in every call.
    container = trees.get_obj(trees.local, "tree_manager_containers").get(weight.get_device())
    if container is None or container.tree_manager is None:
        return False
    # torch warms up and records on a stream of its own. (Its flag for recording is set only afterwards.)
    return bool(container.tree_manager.stream == torch.cuda.current_stream(weight.device))


def allocate_outside(make: Callable[[], Made]) -> Made:
    """The result of `make`, allocated from the general pool of memory."""
    with ThreadPoolExecutor(1) as another:
        return another.submit(make).result()
