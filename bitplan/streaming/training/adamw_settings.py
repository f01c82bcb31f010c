"""AdamWSettings: the settings of the host's AdamW, checked where they are made."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from numbers import Real
from typing import Any

from torch import Tensor

from bitplan.base.documents import show
from bitplan.streaming.errors import StreamError


@dataclass(frozen=True)
class AdamWSettings:
    """Settings of torch.optim.AdamW for the streamed weights; what AdamW refuses is refused here."""

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        betas: Any = self.betas
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise StreamError(f"AdamW: betas: expected two numbers, got {_on_one_line(betas)}")
        checked = tuple(setting(f"betas[{at}]", beta, below=1.0) for at, beta in enumerate(betas))
        object.__setattr__(self, "betas", checked)
        for name in ("lr", "eps", "weight_decay"):
            object.__setattr__(self, name, setting(name, getattr(self, name)))

    def with_lr(self, lr: float) -> AdamWSettings:
        return replace(self, lr=lr)

    def of(self, _shape: tuple[int, ...]) -> AdamWSettings:
        """The settings of a weight, which are those of all."""
        return self

    def document(self) -> dict[str, Any]:
        return {**asdict(self), "betas": list(self.betas)}


def setting(name: str, value: Any, *, below: float = math.inf) -> float:
    """A setting of AdamW as a float, if it is a number (or a tensor of one) from 0 to `below`."""
    is_number = isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)
    if isinstance(value, bool) or not is_number or not 0.0 <= float(value) < below:
        wanted = "a finite number of at least 0" if below == math.inf else f"a number of at least 0 and below {below:g}"
        raise StreamError(f"AdamW: {name}: expected {wanted}, got {_on_one_line(value)}")
    return float(value)


def _on_one_line(value: Any) -> str:
    return " ".join(show(value).split())  # a tensor is shown in several
