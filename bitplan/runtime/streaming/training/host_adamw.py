"""BlockAdamW: AdamW over the float32 masters of one block, from gradients in any type (`kernels.adamw`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bitplan.kernels.adamw import prepare_adamw, step_adamw
from bitplan.kernels.adamw_torch import AdamWRates, AdamWTensors
from bitplan.runtime.streaming.training.adamw_settings import AdamWSettings

NUMBERS_AT_A_TIME = 2**24  # for torch's AdamW: with smaller pieces every call waits for all its threads


class BlockAdamW:
    """Masters (contiguous, float32), their moments, and how often each was stepped."""

    def __init__(self, masters: Mapping[str, Tensor]) -> None:
        self.masters = dict(masters)
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}
        self.steps = dict.fromkeys(masters, 0)
        prepare_adamw(masters.values())

    def make_moments(self, name: str) -> None:
        """As AdamW does in its first step."""
        if name not in self.moments:
            master = self.masters[name]
            self.moments[name] = torch.zeros_like(master), torch.zeros_like(master)

    def step(
        self,
        gradients: Mapping[str, Tensor],
        settings: Mapping[str, AdamWSettings],
        scratch: Tensor,
        sent: Mapping[str, Tensor] | None = None,
        factor: float = 1.0,
    ) -> None:
        """Step every master that has a gradient (times `factor`) by its settings, and copy it to `sent`; `scratch` is
        float32, of any size.
        """
        for name, gradient in gradients.items():
            self.make_moments(name)
            tensors = AdamWTensors(self.masters[name], gradient, *self.moments[name], (sent or {}).get(name))
            of = settings[name]
            rates = AdamWRates(of.lr, of.betas, of.eps, of.weight_decay, self.steps[name] + 1, factor)
            step_adamw(tensors, rates, scratch)
            self.steps[name] += 1
