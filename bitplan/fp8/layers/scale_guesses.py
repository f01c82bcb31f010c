"""Guesses of tensorwise scales, kept from one step to the next: three for each weight, or for each of its experts.

The numbers of a layer's input, weight and output gradient are about as large as in the last step; so their casts start
from the last scale (`bitplan.fp8.kernels.guessed_cast`). The guesses belong to the weight's memory, like its casts
(`weight_casts`), so eager and compiled code find them alike, and they are freed with the weight.

For inputs and weights they change the time of a cast, never its result. The largest number of a gradient jumps about
from step to step: in a training run the last scale was wrong in 37% of the casts. So gradients have room: their scale
may be up to 32 times the definition's. And they follow the layer above: how far that one's gradient has just moved.
docs/adaptive-fp8.md has the rules that were compared.

A state is used by one cast at a time. Where a layer runs on another stream than last time, that stream first waits for
the last one. A CUDA graph uses the states that are there when it is captured; if there are none yet, the graph runs
without.

The graphs of torch.compile(mode="reduce-overhead") share a pool of memory, and torch must know every tensor in it: one
that stays and is no graph's output is an error. While torch warms up or records a graph, everything that its thread
allocates comes from that pool. So guesses, which stay from step to step, are allocated by another thread
(`allocate_outside`); casts of weights are not kept then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from bitplan.base.weight_changes import KeptByStorage
from bitplan.fp8.recipes import RECIPES

# ---- memory outside of compiled graphs -------------------------------------------------------------------------------


Result = TypeVar("Result")


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


def allocate_outside(make: Callable[[], Result]) -> Result:
    """The result of `make`, allocated from the general pool of memory."""
    with ThreadPoolExecutor(1) as another:
        return another.submit(make).result()


# ---- guesses ---------------------------------------------------------------------------------------------------------


INPUT, WEIGHT, GRAD = "input", "weight", "grad"
ROOM = {INPUT: 2, WEIGHT: 0, GRAD: 5}  # octaves by which a scale may be larger than the definition's


@dataclass
class _Kept:
    storage: StorageWeakRef
    role: str
    state: Tensor
    stream: torch.cuda.Stream  # the stream that used it last


# Storage, offset in it, role, FP8 type (E5M2 has other scales than E4M3), experts. Not the address: FSDP frees the
# memory of a storage and allocates it anew elsewhere, and the guess is still right.
_Key = tuple[int, int | torch.SymInt, str, str, int]
_kept: KeptByStorage[_Kept] = KeptByStorage(64)


def guess_for(recipe: str, weight: Tensor, role: str, fp8: str = "e4m3", experts: int = 1) -> Tensor | None:
    """The guess for a cast by a recipe, or one for each expert; None where the cast does without."""
    if not weight.is_cuda or not RECIPES[recipe].has_one_scale:
        return None
    key = (weight.untyped_storage()._cdata, weight.storage_offset(), role, fp8, experts)
    kept = _kept.get(key)
    if kept is None:
        if torch.cuda.is_current_stream_capturing():  # a guess made in a graph would be reset by each replay
            return None
        return _new(key, weight)
    is_elsewhere = torch._C._cuda_getCurrentRawStream(weight.get_device()) != kept.stream.cuda_stream
    if is_elsewhere and not torch.cuda.is_current_stream_capturing():
        stream = torch.cuda.current_stream(weight.device)
        stream.wait_stream(kept.stream)
        kept.stream = stream
    return kept.state


def guess_counts() -> dict[str, tuple[int, int, int]]:
    """Casts so far by role, wrong guesses, and those too small; each expert's counts. Waits for the GPU."""
    from bitplan.fp8.kernels.guessed_cast import counts_of

    totals = dict.fromkeys((INPUT, WEIGHT, GRAD), (0, 0, 0))
    for kept in _kept.values():
        casts, wrong, too_small = totals[kept.role]
        more = counts_of(kept.state)
        totals[kept.role] = (casts + more.casts, wrong + more.wrong, too_small + more.too_small)
    return totals


def _new(key: _Key, weight: Tensor) -> Tensor:
    from bitplan.fp8.kernels.guessed_cast import clear_state, empty_state

    state = allocate_outside(lambda: empty_state(weight.device, key[-1]))
    stream = torch.cuda.current_stream(weight.device)
    stream.wait_stream(torch.cuda.default_stream(weight.device))  # which may still be writing the state's memory
    state.record_stream(stream)
    clear_state(state, ROOM[key[2]], follows=key[2] == GRAD)
    _kept.add(key, _Kept(StorageWeakRef(weight.untyped_storage()), key[2], state, stream))
    return state
