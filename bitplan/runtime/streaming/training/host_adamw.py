"""BlockAdamW: AdamW over the float32 masters of one block, from gradients in any type.

It calls torch's fused AdamW, so the numbers are torch's. It takes some numbers at a time: a gradient in another type is
widened in memory that is used again and again (`gradient_places` says why), and new weights are written to where they
are sent from in the same piece. Pieces that a core's cache holds would save 16 of the 46 bytes a number that cross the
host's memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

NUMBERS_AT_A_TIME = 2**24  # smaller pieces were slower on a busy host; on a quiet one they are not measured


class BlockAdamW:
    """Masters (contiguous, float32), their moments, and how often each was stepped."""

    def __init__(
        self, masters: Mapping[str, Tensor], betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        self.masters = dict(masters)
        self._betas, self._eps, self._weight_decay = betas, eps, weight_decay
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}
        self.steps = dict.fromkeys(masters, 0)

    def make_moments(self, name: str) -> None:
        """As AdamW does in its first step."""
        if name not in self.moments:
            master = self.masters[name]
            self.moments[name] = torch.zeros_like(master), torch.zeros_like(master)

    def step(
        self, gradients: Mapping[str, Tensor], lr: float, scratch: Tensor, sent: Mapping[str, Tensor] | None = None
    ) -> None:
        """Step every master that has a gradient, and copy it to `sent`; `scratch` is float32, of any size."""
        for name, gradient in gradients.items():
            self.make_moments(name)
            tensors = (self.masters[name], gradient, *self.moments[name], (sent or {}).get(name))
            count = torch.tensor(float(self.steps[name] + 1))
            for master, part, first, second, *copies in pieces(
                [one for one in tensors if one is not None], len(scratch)
            ):
                if part.dtype != torch.float32:
                    part = scratch[: len(part)].copy_(part)
                self._step(master, part, first, second, count, lr)
                for copied in copies:
                    copied.copy_(master)
            self.steps[name] += 1

    def _step(self, master: Tensor, gradient: Tensor, first: Tensor, second: Tensor, count: Tensor, lr: float) -> None:
        torch._fused_adamw_(
            [master],
            [gradient],
            [first],
            [second],
            [],
            [count],
            lr=lr,
            beta1=self._betas[0],
            beta2=self._betas[1],
            weight_decay=self._weight_decay,
            eps=self._eps,
            amsgrad=False,
            maximize=False,
        )


def pieces(tensors: Sequence[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Contiguous tensors of as many numbers, `size` numbers at a time."""
    flat = [tensor.detach().view(-1) for tensor in tensors]
    for start in range(0, len(flat[0]), size):
        yield [one[start : start + size] for one in flat]
