"""AdamW on the host, the definition: torch's fused AdamW, some numbers at a time. `adamw` picks this or the loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class AdamWRates(NamedTuple):
    """The settings of one step, as torch.optim.AdamW has them, and a factor of gradients; the first step is step 1."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    step: int
    factor: float = 1.0


class AdamWTensors(NamedTuple):
    """Numbers that lie contiguously, as many in each; `sent` gets the new masters in its type."""

    master: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor
    sent: Tensor | None = None


def step_by_torch(tensors: AdamWTensors, rates: AdamWRates, scratch: Tensor) -> None:
    """The definition; as many numbers at a time as the scratch has, where a gradient in another type is widened."""
    master, gradient, first, second, sent = tensors
    count = torch.tensor(float(rates.step))
    given = (master, gradient, first, second) if sent is None else (master, gradient, first, second, sent)
    for weights, part, mean, square, *copies in pieces(given, len(scratch)):
        if part.dtype != torch.float32 or rates.factor != 1.0:
            part = scratch[: len(part)].copy_(part)
        if rates.factor != 1.0:
            part.mul_(rates.factor)
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
