"""Allocates memory that outlives the CUDA graphs of torch.compile(mode="reduce-overhead").

Those graphs share a pool of memory and must know everything in it: a tensor that stays and is no output of theirs is an
error. While torch warms up to a graph or records it, whatever its thread allocates comes from that pool. So what FP8
layers keep from step to step, guesses of scales, is allocated by another thread; casts of weights are not kept then.
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
    """Is torch.compile recording a CUDA graph with this weight, or warming up to it?"""
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or not weight.is_cuda or not torch._C._is_key_in_tls("tree_manager_containers"):
        return False  # of another thread, they are none of ours
    manager = trees.get_manager(weight.device.index, create_if_none_exists=False)
    # It warms up and records on a stream of its own. (It says that it records only once it has.)
    return manager is not None and manager.stream == torch.cuda.current_stream(weight.device)


def allocate_outside(make: Callable[[], Made]) -> Made:
    """What `make` allocates, from the memory that all share."""
    with ThreadPoolExecutor(1) as another:
        return another.submit(make).result()
