"""AdamW on the host: float32 masters and moments, a gradient in any type, new weights written to where they are sent.

The definition is torch's fused AdamW. It wants the gradient in float32 and leaves the copy of the new weights to us: 46
bytes a number cross the host's memory where gradient and copy are BF16. `adamw_loop` does all of it in one pass, with
28, and the same bits: whether these are torch's on this machine is looked at once, before the loop is first used.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bitplan.kernels.codec.dispatch import SMALLEST_FOR_CPU, Picked

LOOP_TYPES = (torch.float32, torch.bfloat16)  # of gradients, and of what is sent
_log = logging.getLogger("bitplan")


class AdamWRates(NamedTuple):
    """The settings of one step, as torch.optim.AdamW has them; the first step is step 1."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    step: int


class AdamWTensors(NamedTuple):
    """Numbers that lie contiguously, as many in each; `sent` gets the new masters in its type."""

    master: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor
    sent: Tensor | None = None


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


def step_by_torch(tensors: AdamWTensors, rates: AdamWRates, scratch: Tensor) -> None:
    """The definition; as many numbers at a time as the scratch has, where a gradient in another type is widened."""
    master, gradient, first, second, sent = tensors
    count = torch.tensor(float(rates.step))
    given = (master, gradient, first, second) if sent is None else (master, gradient, first, second, sent)
    for weights, part, mean, square, *copies in pieces(given, len(scratch)):
        if part.dtype != torch.float32:
            part = scratch[: len(part)].copy_(part)
        torch._fused_adamw_(
            [weights],
            [part],
            [mean],
            [square],
            [],
            [count],
            lr=rates.lr,
            beta1=rates.betas[0],
            beta2=rates.betas[1],
            weight_decay=rates.weight_decay,
            eps=rates.eps,
            amsgrad=False,
            maximize=False,
        )
        for copied in copies:
            copied.copy_(weights)


def pieces(tensors: Sequence[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Contiguous tensors of as many numbers, `size` numbers at a time."""
    flat = [tensor.detach().view(-1) for tensor in tensors]
    for start in range(0, len(flat[0]), size):
        yield [one[start : start + size] for one in flat]
