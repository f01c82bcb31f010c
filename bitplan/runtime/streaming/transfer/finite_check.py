"""FiniteCheck: detects NaN and infinity in what blocks compute, and in gradients, without waiting for the device.

Each block has a number on the device, to which 0 times the sum of the block's output is added: it becomes NaN if
anything in the output is not finite. At the end of the step the numbers are copied to the host asynchronously, and read
when they have arrived: at end_step, or else at the next begin_step. The first such block, in forward order, is the
cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitplan.runtime.streaming.errors import BlockNonFiniteError
from bitplan.runtime.streaming.transfer.devices import Mark, StreamDevice


class SentFlags(NamedTuple):
    """A step's flags on their way to the host, and the mark of their arrival."""

    step: int
    flags: Tensor
    mark: Mark


class FiniteCheck:
    """One flag a block, and the flags of earlier steps that have not been read yet."""

    def __init__(self, device: StreamDevice, names: Sequence[str]) -> None:
        self._device, self._names = device, list(names)
        self._flags = torch.zeros(len(names), device=device.torch_device)
        self._by_block = self._flags.unbind()
        self._pending: list[SentFlags] = []

    def start(self) -> None:
        self._flags.zero_()

    def look_at(self, block: int, output: Any) -> None:
        """Note whether a block's output is finite; queues two small kernels."""
        for tensor in _float_tensors(output):  # detached: Ctrl-C could leave torch.no_grad() on for the rest of the run
            self._by_block[block].add_(tensor.detach().sum(dtype=torch.float32), alpha=0)  # infinity times 0 is NaN

    def send(self, step: int) -> SentFlags:
        """Send the step's flags to the host."""
        host = torch.empty(len(self._names), pin_memory=self._flags.is_cuda)
        host.copy_(self._flags, non_blocking=True)
        return SentFlags(step, host, self._device.mark())

    def keep(self, sent: SentFlags) -> None:
        """Let `find` read the flags of a step."""
        self._pending.append(sent)

    def find(self, *, wait: bool = False) -> BlockNonFiniteError | None:
        """The first step that was not finite, among those whose flags have arrived (or all: `wait`); reported once."""
        while self._pending and (wait or self._device.has_passed(self._pending[0].mark)):
            failure = self.read(self._pending.pop(0))
            if failure is not None:
                return failure
        return None

    def read(self, sent: SentFlags) -> BlockNonFiniteError | None:
        """The error that a step's flags show, if any; waits until they have arrived."""
        bad = self.not_finite(sent)
        if not bad:
            return None
        return BlockNonFiniteError(
            f"{bad[0]}, step {sent.step}: its output holds NaN or infinity ({len(bad)} of {len(self._names)} "
            "blocks do, this is the first); look at its inputs, learning rate and formats; begin_step goes on"
        )

    def not_finite(self, sent: SentFlags) -> list[str]:
        """The names whose flags are not finite; waits until they have arrived."""
        self._device.finish(sent.mark)
        return [name for name, flag in zip(self._names, sent.flags.isfinite().tolist(), strict=True) if not flag]


def _float_tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, tuple | list):
        for item in output:
            yield from _float_tensors(item)
