"""HostOptimizer: streamed weights trained on the host by any optimizer of torch, one weight at a time; and Lion.

An optimizer steps one float32 master with its gradient and its settings, and keeps states of it: that is all the host
asks for, and what every `torch.optim.Optimizer` of one parameter does. AdamW has a way of its own (`trained_weight`),
in one pass and in less memory.

What an optimizer can do is tried on small tensors, not read from its name: whether it steps vectors (Muon does not:
AdamW takes these), and whether parts of a weight may be stepped alone (`shard_optimizer`), as with SGD and Lion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from bitplan.base.documents import show
from bitplan.base.errors import StreamError
from bitplan.streaming.training.adamw import AdamWSettings, setting

TRIED_ROWS = 8  # and columns, of the matrix that an optimizer is tried on
PACKED_ROWS = 64  # of one for which optimizers that keep states in bytes do so


@dataclass(frozen=True)
class HostOptimizer:
    """An optimizer of torch for the streamed weights: `HostOptimizer(torch.optim.SGD, 0.1, {"momentum": 0.9})`.

    kind       a class of torch.optim, or one made like them
    settings   its other arguments
    vectors    AdamW for weights that `kind` does not take, as Muon takes matrices alone; its rate follows `lr`
    """

    kind: type[torch.optim.Optimizer]
    lr: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    vectors: AdamWSettings | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "lr", setting("lr", self.lr))
        if not (isinstance(self.kind, type) and issubclass(self.kind, torch.optim.Optimizer)):
            raise StreamError(f"HostOptimizer: expected a class of torch.optim, got {show(self.kind)}")
        try:
            self._tried(torch.ones(TRIED_ROWS, TRIED_ROWS))
        except Exception as error:
            raise StreamError(
                f"{self.name} cannot step a matrix on the host: {type(error).__name__}: {error}; correct its settings "
                f"({show(dict(self.settings))}), or use another optimizer"
            ) from None

    @classmethod
    def lion(cls, lr: float, **settings: Any) -> HostOptimizer:
        """Settings for the optimizer Lion, which torch lacks; further settings: betas, weight_decay."""
        return cls(Lion, lr, settings)

    @property
    def name(self) -> str:
        return f"{self.kind.__module__}.{self.kind.__qualname__}"

    def open(self, master: Tensor) -> torch.optim.Optimizer:
        """Make torch's optimizer for one master."""
        make: Callable[..., torch.optim.Optimizer] = self.kind
        return make([nn.Parameter(master, requires_grad=False)], lr=self.lr, **self.settings)

    @cached_property
    def takes_vectors(self) -> bool:
        try:
            self._tried(torch.ones(TRIED_ROWS))
        except Exception:  # whatever an optimizer raises for what it does not take
            return False
        return True

    @cached_property
    def steps_parts(self) -> bool:
        """Whether the parts of a weight, stepped alone, have the bits of the whole."""
        start = torch.linspace(0.5, 2.0, TRIED_ROWS**2)
        if not self.takes_vectors:
            return False
        parts = torch.cat([self._tried(part.clone()) for part in start.view(2, -1)])
        return torch.equal(self._tried(start.view(TRIED_ROWS, -1).clone()).view(-1), parts)

    @cached_property
    def keeps_floats(self) -> bool:
        """Whether all its states are floating-point numbers, as a checkpoint holds them."""
        optimizer = self.open(torch.ones(PACKED_ROWS, PACKED_ROWS))
        step_alone(optimizer, torch.ones(PACKED_ROWS, PACKED_ROWS))
        states = [one for of_weight in optimizer.state.values() for one in of_weight.values()]
        return all(one.is_floating_point() for one in states if isinstance(one, Tensor))

    def _tried(self, master: Tensor) -> Tensor:
        """A copy of a master after two trial steps, to see what the optimizer does to parts."""
        optimizer = self.open(master)
        for _ in range(2):
            step_alone(optimizer, master.clone())
        return master

    def of(self, shape: tuple[int, ...]) -> Settings:
        """Return the settings for a weight of this shape."""
        if len(shape) == 2 or self.takes_vectors:
            return self
        return self.vectors or AdamWSettings(lr=self.lr)

    def document(self) -> dict[str, Any]:
        vectors = {} if self.vectors is None else {"vectors": self.vectors.document()}
        plain = {name: show(value) for name, value in self.settings.items()}
        return {"kind": self.name, "lr": float(self.lr), **plain, **vectors}

    def with_lr(self, lr: float) -> HostOptimizer:
        """These settings with another learning rate; that of vectors changes by as much."""
        vectors = self.vectors
        if vectors is not None and self.lr:
            vectors = replace(vectors, lr=vectors.lr * lr / self.lr)
        moved = object.__new__(HostOptimizer)  # what was tried once is not tried in every step
        moved.__dict__.update(self.__dict__, lr=lr, vectors=vectors)
        return moved


Settings: TypeAlias = AdamWSettings | HostOptimizer


def step_alone(optimizer: torch.optim.Optimizer, gradient: Tensor) -> None:
    """Run one step of an optimizer that has a single parameter, with this gradient."""
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = gradient
    try:
        optimizer.step()
    finally:
        parameter.grad = None


class Lion(torch.optim.Optimizer):
    """Lion (Chen and others, 2023, arXiv 2302.06675): steps of one size, by the sign of a mean of gradients."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        """Make the optimizer; `betas` are shares of the mean in the step, and in the mean that is kept."""
        checked = AdamWSettings(lr=lr, betas=betas, weight_decay=weight_decay)  # the same numbers are allowed
        super().__init__(params, {"lr": checked.lr, "betas": checked.betas, "weight_decay": checked.weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for parameter in (one for one in group["params"] if one.grad is not None):
                mean = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.add_(mean.lerp(parameter.grad, 1 - beta1).sign_(), alpha=-lr)
                mean.lerp_(parameter.grad, 1 - beta2)
        return loss
