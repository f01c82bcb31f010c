"""Warns once when a model is given token counts that its FP8 plan was not made for.

A plan is made for one token count and holds for the band around it. The watch sits on the first FP8 layer of a part and
compares the rows of its input, which the host knows, with that band: no value of a tensor is read and the GPU is not
waited for. It warns once, through the log, and then removes itself.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

log = logging.getLogger("bitplan")


class TokenWatch:
    """A forward hook that compares token counts with the band a plan holds for; None: no upper end."""

    def __init__(self, path: str, lowest: int, highest: int | None, planned: int) -> None:
        self.path, self.lowest, self.highest, self.planned = path, lowest, highest, planned
        self.spoken = False
        self._handle: Any = None

    def attach(self, module: nn.Module) -> TokenWatch:
        self._handle = module.register_forward_pre_hook(self)
        return self

    def __call__(self, module: nn.Module, inputs: Sequence[Any]) -> None:
        if self.spoken or not module.training or not inputs or not isinstance(inputs[0], Tensor):
            return  # generation runs one token at a time, which no plan is for
        x = inputs[0]
        tokens = x.numel() // max(x.shape[-1], 1)
        if tokens < self.lowest or (self.highest is not None and tokens > self.highest):
            self._speak(tokens)

    def _speak(self, tokens: int) -> None:
        self.spoken = True
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        band = f"from {self.lowest}" + (f" to {self.highest}" if self.highest is not None else " up")
        log.warning(
            "bitplan: %s was given %d tokens; its FP8 plan was made for %d and holds %s, beyond which nothing was "
            "measured to win; apply the policy with the real count, or measure it",
            self.path,
            tokens,
            self.planned,
            band,
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_handle": None}  # a copy cannot remove the original's hook
