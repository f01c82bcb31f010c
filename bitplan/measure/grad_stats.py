"""Gradient statistics per block, gathered every step without stopping the GPU.

After each backward pass the policy wants four figures per block (seed 000, "Gradient Collection"): the L2 norm over all
gradients of the block, the largest |g|, the variance, and the norm relative to the mean of all blocks. Reading a figure
on the host waits for the GPU, so nothing is read here in a step: the reductions are enqueued, three numbers per block
stay on their device, and `drain` reads all steps since the last time in one copy, at the update interval or
before a checkpoint. What comes out is the same whenever it is drained.

The reductions are in `grad_reduce`: on a GPU one kernel reads every gradient once.

A gradient that is missing is not zero. A block with none is excluded for the step; where only some of its tensors have
one, the others are left out of the figures and counted in `missing_tensors`. A block with NaN or infinity is
excluded, because its norm is not known.

`loss_impact` is the other signal: what replacing a weight would do to the loss, from what backward has at hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from bitplan.errors import BitplanError, did_you_mean
from bitplan.measure.grad_reduce import reduce_blocks
from bitplan.plan.selective_score import RawGradStats, StepStats, compare_blocks

MAX_PENDING_STEPS = 1024  # then the rows move to the host, if nobody has drained: memory stays bounded, nothing is lost
Gradients = nn.Module | Iterable[Tensor | None]


class GradStatsError(BitplanError, ValueError):
    """Gradients that cannot be measured, or measured at the wrong time."""


@dataclass
class _Step:
    """One step's figures, still on their devices: blocks, and for each a row (l2 norm, max |g|, variance)."""

    rows: list[tuple[list[str], Tensor]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    impacts: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    step_id: int = -1

    @property
    def blocks(self) -> set[str]:
        return {*self.missing, *(name for names, _ in self.rows for name in names)}


class GradStatsCollector:
    """Collects the statistics of registered blocks, step by step; see the module's head for how."""

    def __init__(self, blocks: Iterable[str]) -> None:
        self.blocks = tuple(blocks)
        self.missing_tensors: Counter[str] = Counter()
        self._known = set(self.blocks)
        self._open = _Step()
        self._pending: list[_Step] = []
        self._read: list[StepStats] = []
        if not self.blocks or len(self._known) != len(self.blocks):
            raise GradStatsError(f"blocks must have different names, at least one, got {self.blocks!r}")

    @torch.no_grad()
    def add(self, blocks: Mapping[str, Gradients]) -> None:
        """Enqueue the reductions of these blocks' gradients, which may be freed afterwards. Once per block and step."""
        done = self._open.blocks
        groups: dict[torch.device, dict[str, list[Tensor]]] = {}
        for name, source in blocks.items():
            self._require_known(name)
            if name in done:
                raise GradStatsError(f"gradients of {name!r} came twice in one step; call end_step in between")
            found = self._present(name, _gradients(source))
            if not found:
                self._open.missing.append(name)
                continue
            if len({grad.device for grad in found}) > 1:
                raise GradStatsError(f"gradients of {name!r} lie on several devices; a block is measured on one")
            groups.setdefault(found[0].device, {})[name] = found
        for grads in groups.values():
            self._open.rows.append((list(grads), reduce_blocks(list(grads.values()))))

    def add_impact(self, block: str, precision: str, impact: Tensor) -> None:
        """Add to a unit's loss impact in this step: a tensor of one number, as `loss_impact` gives; it stays there."""
        self._require_known(block)
        key, value = (block, precision), impact.detach().reshape(())
        self._open.impacts[key] = self._open.impacts[key] + value if key in self._open.impacts else value

    def end_step(self, step_id: int) -> None:
        """Close the step; a block that nothing was added for is missing."""
        done = self._open.blocks
        self._open.missing += [name for name in self.blocks if name not in done]
        self._open.step_id = step_id
        self._pending.append(self._open)
        self._open = _Step()
        if len(self._pending) >= MAX_PENDING_STEPS:
            self._read_pending()

    def drop_step(self) -> None:
        """Forget the step under way, as after an error in it."""
        self._open = _Step()

    def drain(self) -> list[StepStats]:
        """Every step since the last drain, oldest first: the one call that waits for the device."""
        self._read_pending()
        found, self._read = self._read, []
        return found

    def _present(self, name: str, grads: Iterable[Tensor | None]) -> list[Tensor]:
        found = []
        for grad in grads:
            if grad is None:
                self.missing_tensors[name] += 1
            elif grad.layout != torch.strided or not grad.dtype.is_floating_point:
                kind = f"{grad.dtype}, {grad.layout}".replace("torch.", "")
                raise GradStatsError(f"gradient of {name!r}: expected dense floating-point numbers, got {kind}")
            elif grad.numel():
                found.append(grad)
        return found

    def _require_known(self, name: str) -> None:
        if name not in self._known:
            raise GradStatsError(f"{name!r} is not a registered block{did_you_mean(name, self.blocks)}")

    def _read_pending(self) -> None:
        tensors = [rows for step in self._pending for _, rows in step.rows]
        tensors += [impact.reshape(1) for step in self._pending for impact in step.impacts.values()]
        figures = iter(_to_host(tensors))
        by_step = [[next(figures) for _ in step.rows] for step in self._pending]
        for step, values in zip(self._pending, by_step, strict=True):
            raw: dict[str, RawGradStats | None] = dict.fromkeys(step.missing)
            for (names, _), flat in zip(step.rows, values, strict=True):
                for at, name in enumerate(names):
                    raw[name] = RawGradStats(*flat[3 * at : 3 * at + 3])
            impacts: dict[str, dict[str, float]] = {}
            for block, precision in step.impacts:
                impacts.setdefault(block, {})[precision] = next(figures)[0]
            self._read.append(compare_blocks(step.step_id, {name: raw[name] for name in self.blocks}, impacts))
        self._pending = []


def collect_grad_stats(collector: GradStatsCollector, blocks: Mapping[str, Gradients], step_id: int) -> None:
    """After a backward pass: measure the gradients of all blocks, each a module or a list of gradients.

    Of a module those parameters count that are trained; of frozen ones nothing is expected.
    """
    collector.add(blocks)
    collector.end_step(step_id)


@torch.no_grad()
def loss_impact(grad_output: Tensor, inputs: Tensor, weight: Tensor, weight_hat: Tensor) -> Tensor:
    """<dL/dy, (W - W_hat) x> of a linear layer y = W x, a tensor of one number in units of loss.

    The first-order rise of the loss if W_hat stands in for W is minus this. It needs no gradient of the weight, so it
    holds for frozen weights too; where there is one, it equals <dL/dW, W - W_hat>.
    """
    difference = (weight.to(torch.float32) - weight_hat.to(torch.float32)).to(inputs.device)
    moved = nn.functional.linear(inputs.reshape(-1, inputs.shape[-1]).to(torch.float32), difference)
    return (grad_output.reshape(moved.shape).to(torch.float32) * moved).sum()


def _gradients(source: Gradients) -> Iterable[Tensor | None]:
    if isinstance(source, nn.Module):
        return [parameter.grad for parameter in source.parameters() if parameter.requires_grad]
    return source


def _to_host(tensors: list[Tensor]) -> list[list[float]]:
    """Every tensor's numbers, with one copy per device."""
    found: list[list[float]] = [[] for _ in tensors]
    devices: dict[torch.device, list[int]] = {}
    for at, tensor in enumerate(tensors):
        devices.setdefault(tensor.device, []).append(at)
    for places in devices.values():
        numbers = torch.cat([tensors[at].reshape(-1).double() for at in places]).cpu().tolist()
        start = 0
        for at in places:
            found[at] = numbers[start : start + tensors[at].numel()]
            start += tensors[at].numel()
    return found
