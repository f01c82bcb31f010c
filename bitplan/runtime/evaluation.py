"""Runs a model during its training without leaving a trace: no gradients, no dropout, no random numbers used up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Everything in eval mode under no_grad; modes and random number generators are as before afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            model.eval()
            yield
    finally:
        for module, training in modes:
            module.training = training
