"""Clips the gradients of a step by the norm of all of them, as torch.nn.utils.clip_grad_norm_ does, to the bit.

Gradients stay as they arrived: for its norm each is widened in one piece of memory, and AdamW multiplies by the factor
(`StepGradients.factor`) as it reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from bitplan.runtime.streaming.errors import BlockNonFiniteError
from bitplan.runtime.streaming.training.gradient_places import Key, StepGradients


@dataclass
class _Graded:
    """An object with the one field of a parameter that torch's clipping reads."""

    grad: Tensor


def clip_step(gradients: StepGradients, keys: Sequence[Key], max_norm: float, also: Sequence[Tensor] = ()) -> float:
    """Scale all gradients, those of `also` (parameters) in place, to a norm of at most `max_norm`; the norm before."""
    gradients.apply_factor()
    norms = [gradients.places.norm(gradients.sums[key]) for key in keys if key in gradients.sums]
    others = [one.grad for one in also if one.grad is not None]
    total = get_total_norm([*(norm.view(1) for norm in norms), *others]) if others else _norm_of(norms)
    norm = float(total)
    if not math.isfinite(norm):
        raise BlockNonFiniteError(
            f"step {gradients.step}: the norm of all gradients is {norm}; the masters are as before it"
        )
    factor = float(torch.clamp(max_norm / (total + 1e-6), max=1.0))  # below 1 for norms just under max_norm, too
    if factor < 1.0:
        gradients.factor = factor
        clip_grads_with_norm_(cast(list[Tensor], [_Graded(one) for one in others]), max_norm, total)
    return norm


def _norm_of(norms: Sequence[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack(list(norms))) if norms else torch.tensor(0.0)
