"""BlockTree: notices that modules of a streamed block were replaced, or that others came, after the stream was opened.

A stream holds the modules whose weights it sends. A module that takes the place of one of them computes with weights of
its own, and the stream would go on to send those of the other. Adapters that are put around modules later are on the
host, for `model.to(...)` moves nothing in a streamed block. Both are refused by name at the next boundary. What changes
no streamed weight (another activation function, adapters on the device) is accepted.

peft merges adapters into weights by writes that torch does not count. Its layers keep a list of what is merged: where
that differs from the last look, or such a layer has left the block (merge_and_unload), the weights count as changed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from bitplan.runtime.streaming.blocks.find import StreamedBlock
from bitplan.runtime.streaming.errors import StreamError

MERGED = "merged_adapters"  # of peft's layers: the names of adapters that are in the weight now


class _Seen(NamedTuple):
    """A module, its children and the names of its parameters when it was last looked at."""

    module: nn.Module
    children: dict[str, nn.Module | None]
    parameters: frozenset[str]


class BlockTree:
    """The modules of one block; a look takes well under a microsecond for each."""

    def __init__(self, block: StreamedBlock, device: torch.device) -> None:
        self._block, self._device = block, device
        self._seen = _look(block.module)
        self._merged = self._look_at_merged()

    def check(self) -> bool:
        """Refuse modules that the stream cannot follow; whether adapters were merged into weights, or taken out."""
        for module, children, parameters in self._seen:
            if module._modules != children or module._parameters.keys() != parameters:
                self._refuse_replaced()
                self._refuse_elsewhere()
                self._seen = _look(self._block.module)
                break
        before, self._merged = self._merged, self._look_at_merged()
        return any(self._merged.get(module) != names for module, names in before.items())

    def _look_at_merged(self) -> dict[nn.Module, tuple[str, ...]]:
        return {one.module: tuple(one.module.__dict__[MERGED]) for one in self._seen if MERGED in one.module.__dict__}

    def _refuse_replaced(self) -> None:
        name, present = self._block.name, set(self._block.module.modules())
        for path, one in self._block.parameters.items():
            if any(module not in present for module, _ in one.places):
                raise StreamError(
                    f"{name}.{path}: its module was replaced or taken out of the block, and the stream would go on to "
                    "send its weights; close the stream, change the model, and stream again"
                )

    def _refuse_elsewhere(self) -> None:
        streamed = {(id(module), local) for one in self._block.parameters.values() for module, local in one.places}
        for path, module in self._block.module.named_modules():
            for local, parameter in module._parameters.items():
                if parameter is None or (id(module), local) in streamed or parameter.device == self._device:
                    continue
                full_name = ".".join(part for part in (self._block.name, path, local) if part)
                raise StreamError(
                    f"{full_name} came into a streamed block and is on {parameter.device}: what is not streamed "
                    f"belongs on {self._device}; move it there, or close the stream and stream again"
                )


def _look(block: nn.Module) -> list[_Seen]:
    return [_Seen(one, dict(one._modules), frozenset(one._parameters)) for one in block.modules()]


def refuse_unmerging(block: StreamedBlock) -> None:
    """Refuse merged adapters that are switched off: peft takes them out of the weight within the layer's forward, where
    it has the copy on the device.
    """
    for module in block.module.modules():
        if module.__dict__.get(MERGED) and module.__dict__.get("_disable_adapters"):
            raise StreamError(
                f"{block.name}: merged adapters are switched off (disable_adapter); call unmerge_adapter() first"
            )
