"""FiniteCheck: whether any block computed NaN or infinity, found without waiting for the device.

After each block one number a block on the device takes in 0 times the sum of what the block gave: NaN from then on if
anything in it was not finite. At the end of the step the numbers are copied to the host beside the work, and read when
the copy has arrived: at end_step if it has, else at the next begin_step. The first such block, in forward order, is
where the trouble starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bitplan.runtime.devices import Mark, StreamDevice
from bitplan.runtime.stream_errors import BlockNonFiniteError


class FiniteCheck:
    """One flag a block, and the flags of earlier steps that have not been read yet."""

    def __init__(self, device: StreamDevice, names: Sequence[str]) -> None:
        self._device, self._names = device, list(names)
        self._flags = torch.zeros(len(names), device=device.torch_device)
        self._pending: list[tuple[int, Tensor, Mark]] = []

    def start(self) -> None:
        self._flags.zero_()

    def look_at(self, block: int, output: Any) -> None:
        """Note whether a block's output is finite; queues three small kernels."""
        with torch.no_grad():
            for tensor in _float_tensors(output):
                self._flags[block].add_(tensor.detach().sum(dtype=torch.float32) * 0)

    def stop(self, step: int) -> None:
        """Send the step's flags to the host."""
        host = torch.empty(len(self._names), pin_memory=self._flags.is_cuda)
        host.copy_(self._flags, non_blocking=True)
        self._pending.append((step, host, self._device.mark()))

    def find(self, *, wait: bool = False) -> BlockNonFiniteError | None:
        """The first step that was not finite, among those whose flags have arrived (or all: `wait`); told once."""
        while self._pending and (wait or self._device.has_passed(self._pending[0][2])):
            step, flags, mark = self._pending.pop(0)
            self._device.finish(mark)
            bad = [name for name, flag in zip(self._names, flags.isfinite().tolist(), strict=True) if not flag]
            if bad:
                return BlockNonFiniteError(
                    f"{bad[0]}, step {step}: its output holds NaN or infinity ({len(bad)} of {len(self._names)} "
                    "blocks do, this is the first); look at its inputs, learning rate and formats; begin_step goes on"
                )
        return None


def _float_tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, tuple | list):
        for item in output:
            yield from _float_tensors(item)
