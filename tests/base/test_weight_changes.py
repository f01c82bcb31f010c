"""Fused optimizers raise the count of in-place writes like the others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitplan.base.weight_changes import count_optimizer_steps


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_step_is_counted(kind, fused) -> None:
    count_optimizer_steps()
    stepped, idle = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    stepped.grad = torch.ones(4)
    before = stepped._version
    kind([stepped, idle], lr=0.1, fused=fused).step()
    assert stepped._version > before
    assert idle._version == 0


class ClearsGradients(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        for each in self.param_groups[0]["params"]:
            each.data.mul_(0.5)  # not counted by torch
            each.grad = None


def test_a_step_that_clears_its_gradients_is_counted() -> None:
    count_optimizer_steps()
    stepped = nn.Parameter(torch.ones(4))
    optimizer = ClearsGradients([stepped])
    stepped.grad = torch.ones(4)
    before = stepped._version
    optimizer.step()
    assert stepped._version > before
