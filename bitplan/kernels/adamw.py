"""AdamW on the host: float32 masters and moments, a gradient in any type, new weights written to where they are sent.

The definition is torch's fused AdamW (`adamw_torch`). It wants the gradient in float32, and the copy of the new weights
is another pass: 46 bytes a number cross the host's memory where gradient and copy are BF16. `adamw_loop` does all of it
in one pass, with 28, and the same bits: whether these are torch's on this machine is looked at once, before its first
use.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Iterable

import torch
from torch import Tensor

from bitplan.kernels.adamw_torch import AdamWRates, AdamWTensors, step_by_torch
from bitplan.kernels.codec.dispatch import SMALLEST_FOR_CPU, Picked

LOOP_TYPES = (torch.float32, torch.bfloat16)  # of gradients, and of what is sent
_log = logging.getLogger("bitplan")


def step_adamw(tensors: AdamWTensors, rates: AdamWRates, scratch: Tensor) -> None:
    """Step the master and its moments in place; `scratch` is float32, of any size, and so torch's pieces are."""
    if explain_adamw(tensors).implementation == "torch":
        step_by_torch(tensors, rates, scratch)
        return
    from bitplan.kernels.adamw_loop import step_by_loop

    step_by_loop(tensors, rates)


def explain_adamw(tensors: AdamWTensors) -> Picked:
    """What `step_adamw` runs for these tensors."""
    master, gradient, *_, sent = tensors
    for what, dtype in (("a gradient", gradient.dtype), ("sent weights", master.dtype if sent is None else sent.dtype)):
        if dtype not in LOOP_TYPES:
            return Picked("torch", f"{what} of {str(dtype).removeprefix('torch.')}")
    if master.numel() < SMALLEST_FOR_CPU:
        return Picked("torch", f"small: {master.numel()} numbers")
    return loop_choice()


def prepare_adamw(masters: Iterable[Tensor]) -> None:
    """Compile, before the first step, what `step_adamw` would compile in it."""
    if any(master.numel() >= SMALLEST_FOR_CPU for master in masters):
        loop_choice()


@functools.cache
def loop_choice() -> Picked:
    """Whether the loop serves here; compiles it, which takes some seconds the first time on a machine."""
    if importlib.util.find_spec("numba") is None:
        return Picked("torch", "numba is not installed")
    from bitplan.kernels.adamw_loop import differs_from_torch

    if differs := differs_from_torch():
        _log.warning("AdamW on the host: %s; torch's own is used, which takes about twice the time", differs)
        return Picked("torch", differs)
    return Picked("numba", "one pass of the host's memory, with torch's bits")
