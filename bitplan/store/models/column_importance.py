"""Measures how much each column of a weight matters, from the inputs of its layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.errors import NonFiniteError, StoreError


class ActivationObserver:
    """The mean square of every input feature, over all inputs so far.

    It can be a forward hook or pre-hook: `linear.register_forward_hook(observer)`. `axis` is the axis of features: the
    last for a Linear, -3 for a Conv2d.
    """

    def __init__(self, axis: int = -1) -> None:
        self.axis = axis
        self.count = 0
        self._total: Tensor | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: object = None) -> None:
        self.observe(args[0])

    def observe(self, inputs: Tensor) -> None:
        features = inputs.detach().movedim(self.axis, -1)
        total = features.reshape(-1, features.shape[-1]).float().square().sum(dim=0, dtype=torch.float64)
        if self._total is not None and self._total.shape != total.shape:
            raise StoreError(f"observer: inputs had {self._total.numel()} features before, and {total.numel()} now")
        self._total = total if self._total is None else self._total + total.to(self._total.device)
        self.count += inputs.numel() // max(1, features.shape[-1])

    @property
    def mean_square(self) -> Tensor:
        """One float32 number per feature."""
        if self._total is None or not self.count:
            raise StoreError("observer: it has seen no input; run representative batches through the model first")
        mean = (self._total / self.count).float()
        if not bool(mean.isfinite().all()):
            raise NonFiniteError("observer: the inputs it saw hold NaN or infinity; find the layer they come from")
        return mean


def observe_inputs(inputs: Tensor | Iterable[Tensor] | ActivationObserver) -> ActivationObserver:
    if isinstance(inputs, ActivationObserver):
        return inputs
    observer = ActivationObserver()
    for batch in [inputs] if isinstance(inputs, Tensor) else inputs:
        observer.observe(batch)
    return observer


def weighted_error(master: Tensor, decoded: Tensor, importance: Tensor) -> float:
    """The output's relative error for uncorrelated inputs: squares are weighted with the importance of their column."""
    weights = importance.to(master.device, torch.float64)
    error, signal = (
        float((part.reshape(-1, weights.numel()).square().sum(dim=0, dtype=torch.float64) * weights).sum())
        for part in (master.float() - decoded, master.float())
    )
    return (error / signal) ** 0.5 if signal else 0.0
