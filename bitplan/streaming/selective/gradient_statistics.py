"""Gradient statistics per block, gathered every step without stopping the GPU.

After each backward pass the policy wants four figures per block: the L2 norm over all gradients of the block, the
largest |g|, the variance, and the norm relative to the mean of all blocks. Nothing is read on the host in a step: the
reductions are enqueued, and `end_step` sends three numbers per block to pinned memory behind them. `drain(before=step)`
reads the steps before this one, whose numbers have arrived while the GPU works on this one. The result does not depend
on when `drain` is called. Gradients that leave the device during backward come one by one, by `add_gradient`.

A gradient that is missing is not zero. A block with none is excluded for the step; if only some of its tensors lack
one, these are left out of the figures and counted in `missing_tensors`. A block with NaN or infinity is excluded,
because its norm is not known. `impact_of` is the other signal: the change of the loss if a weight were replaced, from
tensors that backward has anyway.

Every gradient is cut into parts, each part gives (mean, variance, max |g|) in float32, and a block's parts are joined
in float64 in a fixed order: a variance far below the square of the mean is still right, and the same gradients give the
same bits. Plain torch is the definition, a part is a tensor; `triton_gradient_statistics` has parts of 64k numbers, one
launch for all tensors of a type. `explain_reduce` says which it will be, and why.

`rounding_error` is W - W_hat, with W_hat in the type that the stream computes in. It encodes without the check that
every number is finite, which would wait for the GPU: the reader of the figure excludes what is not finite.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bitplan.base.errors import MeasureError, did_you_mean
from bitplan.base.hardware import to_device
from bitplan.formats.dispatch import Picked, decode, encode_unchecked
from bitplan.formats.format import Format
from bitplan.streaming.selective.score import RawGradStats, StepStats, compare_blocks


@torch.no_grad()
def rounding_error(weight: Tensor, fmt: Format | str) -> Tensor:
    """The error of rounding a weight to a format, W - W_hat, in the weight's type."""
    return weight.detach() - decode(encode_unchecked(weight.detach(), fmt), weight.dtype)


@torch.no_grad()
def relative_output_error(inputs: Tensor, difference: Tensor, outputs: Tensor) -> Tensor:
    """Compute ||(W - W_hat) x|| / ||y|| of a linear layer, a tensor of one number; NaN where the output is zero."""
    moved = linear_in_fast_type(inputs.reshape(-1, inputs.shape[-1]), difference)
    error: Tensor = torch.linalg.vector_norm(moved.float()) / torch.linalg.vector_norm(outputs.float())
    return error


def linear_in_fast_type(inputs: Tensor, weight: Tensor) -> Tensor:
    """Compute x W^T in the type of x on a GPU; on a CPU, which may have no hardware for small floats, in float32."""
    dtype = inputs.dtype if inputs.is_cuda else torch.float32
    return torch.nn.functional.linear(inputs.to(dtype), weight.to(dtype))


Blocks = Sequence[Sequence[Tensor]]
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Parts(NamedTuple):
    """A row (mean, variance, max |g|) per part; and the sizes of tensors, blocks (in tensors) and full parts.

    `part` is the numbers in a full part; 0: a part is a tensor.
    """

    rows: Tensor
    sizes: tuple[int, ...]
    tensors: tuple[int, ...]
    part: int = 0


@torch.no_grad()
def reduce_blocks(blocks: Blocks) -> Tensor:
    """A row (l2 norm, max |g|, variance) in float64 for each block: a list of gradients, not empty, on one device."""
    return join(reduce_parts(blocks))


@torch.no_grad()
def reduce_parts(blocks: Blocks) -> Parts:
    """The one pass over the numbers; `join` makes blocks from its parts, at once or when more have come."""
    return (triton_parts if explain_reduce(blocks).implementation == "triton" else torch_parts)(blocks)


def explain_reduce(blocks: Blocks) -> Picked:
    """Say which implementation `reduce_blocks` would run."""
    first = blocks[0][0]
    if not first.is_cuda:
        return Picked("torch", f"the kernel is for CUDA, these are on {first.device.type}")
    if not _has_triton():
        return Picked("torch", "Triton is not installed")
    odd = {grad.dtype for grads in blocks for grad in grads} - set(KERNEL_DTYPES)
    if odd:
        return Picked("torch", f"no kernel for {', '.join(sorted(map(str, odd)))}")
    return Picked("triton", "one launch for all gradients of a type")


def torch_parts(blocks: Blocks) -> Parts:
    """Reduce gradients, one part per tensor; this is the definition."""
    flat = [grad for grads in blocks for grad in grads]
    rows = []
    for grad in flat:
        wide = grad.reshape(-1).to(torch.float64 if grad.dtype == torch.float64 else torch.float32)
        variance, mean = torch.var_mean(wide, correction=0)
        rows.append(torch.stack([mean, variance, torch.linalg.vector_norm(wide, torch.inf)]).double())
    return Parts(torch.stack(rows), tuple(grad.numel() for grad in flat), tuple(map(len, blocks)))


def triton_parts(blocks: Blocks) -> Parts:
    """Reduce gradients in parts of 64k numbers, as `torch_parts` does in whole tensors."""
    from bitplan.streaming.selective.triton_gradient_statistics import PART, kernel_parts

    flat = [grad for grads in blocks for grad in grads]
    return Parts(kernel_parts(flat), tuple(grad.numel() for grad in flat), tuple(map(len, blocks)), PART)


def gather_parts(blocks: Sequence[Sequence[Parts]]) -> Parts:
    """The parts of blocks whose gradients came one after another, as in backward, in one Parts."""
    pieces = [one for parts in blocks for one in parts]
    if len({one.part for one in pieces}) > 1:
        raise ValueError("parts of the definition and of the kernel do not mix: gradients of a device are of one kind")
    sizes = tuple(size for one in pieces for size in one.sizes)
    tensors = tuple(sum(len(one.sizes) for one in parts) for parts in blocks)
    return Parts(torch.cat([one.rows.double() for one in pieces]), sizes, tensors, pieces[0].part)


def join(parts: Parts) -> Tensor:
    """Figures of blocks from their parts, by the law of total variance."""
    index, numbers_BP = _layout(parts.sizes, parts.tensors, parts.part, parts.rows.device)
    padded = torch.cat([parts.rows.double(), parts.rows.new_zeros((1, 3), dtype=torch.float64)])
    mean_BP, variance_BP, peak_BP = padded[index].unbind(-1)
    total_B = numbers_BP.sum(1)
    mean_B = (numbers_BP * mean_BP).sum(1) / total_B
    spread_BP = variance_BP + (mean_BP - mean_B[:, None]).square()
    variance_B = (numbers_BP * spread_BP).sum(1) / total_B
    l2_B = (numbers_BP * (variance_BP + mean_BP.square())).sum(1).sqrt()
    return torch.stack([l2_B, peak_BP.amax(1), variance_B], dim=1)


@lru_cache(maxsize=64)
def _layout(sizes: tuple[int, ...], tensors: tuple[int, ...], part: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The indices of each block's parts, padded with the row of zeros at the end, and the numbers in each part."""
    numbers: list[int] = []
    lengths, tensor = [], iter(sizes)
    for count in tensors:
        before = len(numbers)
        for _ in range(count):
            size = next(tensor)
            numbers += [min(part or size, size - start) for start in range(0, size, part or size)]
        lengths.append(len(numbers) - before)
    counts = torch.tensor([*numbers, 0], dtype=torch.float64)
    starts = torch.tensor(list(accumulate((0, *lengths)))[:-1])
    offsets = torch.arange(max(lengths))
    index = torch.where(offsets < torch.tensor(lengths)[:, None], starts[:, None] + offsets, len(numbers))
    return to_device(index, device), to_device(counts[index], device)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


Gradients = nn.Module | Iterable[Tensor | None]


class GradStatsError(MeasureError):
    """Gradients that cannot be measured, or a call at the wrong time."""


@dataclass
class _Step:
    """One step's figures, still on their devices: blocks, and for each a row (l2 norm, max |g|, variance)."""

    rows: list[tuple[list[str], Tensor]] = field(default_factory=list)
    parts: dict[str, list[Parts]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    impacts: list[tuple[Tensor, _Share]] = field(default_factory=list)

    @property
    def blocks(self) -> set[str]:
        return {*self.missing, *self.parts, *(name for names, _ in self.rows for name in names)}

    def join_parts(self) -> None:
        """Join the blocks whose gradients came one by one; all blocks of a device together."""
        groups: dict[torch.device, list[str]] = {}
        for name, parts in self.parts.items():
            groups.setdefault(parts[0].rows.device, []).append(name)
        for names in groups.values():
            self.rows.append((names, join(gather_parts([self.parts[name] for name in names]))))
        self.parts = {}


class _Share(NamedTuple):
    """To which block and precision a measured impact is added, and with which weight."""

    block: str
    precision: str
    scale: float


@dataclass(frozen=True)
class _Sent:
    """A step that was closed: its figures are being copied to the host."""

    step_id: int
    names: list[list[str]]
    missing: list[str]
    impacts: list[_Share]
    copies: list[_Copy]

    def read(self, blocks: tuple[str, ...]) -> StepStats:
        figures = iter(_arrived(self.copies, len(self.names) + len(self.impacts)))
        raw: dict[str, RawGradStats | None] = dict.fromkeys(self.missing)
        for names in self.names:
            flat = next(figures)
            for at, name in enumerate(names):
                raw[name] = RawGradStats(*flat[3 * at : 3 * at + 3])
        impacts: dict[str, dict[str, float]] = {}
        for block, precision, scale in self.impacts:
            row = impacts.setdefault(block, {})
            row[precision] = row.get(precision, 0.0) + scale * next(figures)[0]
        return compare_blocks(self.step_id, {name: raw[name] for name in blocks}, impacts)


@dataclass(frozen=True)
class _Copy:
    """Numbers of one device on their way: which figures they are, their lengths, and an event of their arrival."""

    indices: list[int]
    lengths: list[int]
    numbers: Tensor
    event: torch.cuda.Event | None


class GradStatsCollector:
    """Collects gradient statistics of registered blocks, step by step; the module's docstring says how."""

    def __init__(self, blocks: Iterable[str]) -> None:
        self.blocks = tuple(blocks)
        self.missing_tensors: Counter[str] = Counter()
        self._known = set(self.blocks)
        self._open = _Step()
        self._sent: list[_Sent] = []
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
            gradients = self._present(name, _gradients(source))
            if not gradients:
                self._open.missing.append(name)
                continue
            if len({grad.device for grad in gradients}) > 1:
                raise GradStatsError(f"gradients of {name!r} lie on several devices; a block is measured on one")
            groups.setdefault(gradients[0].device, {})[name] = gradients
        for grads in groups.values():
            self._open.rows.append((list(grads), reduce_blocks(list(grads.values()))))

    @torch.no_grad()
    def add_gradient(self, block: str, gradient: Tensor) -> None:
        """Enqueue the reduction of one gradient of a block; the block is complete when the step ends.

        Several gradients of one weight (micro-batches, each freed before the next) count as numbers of one block.
        """
        self._require_known(block)
        if block in self._open.blocks and block not in self._open.parts:
            raise GradStatsError(f"gradients of {block!r} came at once and one by one in a step; use one of the two")
        for grad in self._present(block, [gradient]):
            self._open.parts.setdefault(block, []).append(reduce_parts([[grad]]))

    def add_impact(self, block: str, precision: str, impact: Tensor, scale: float = 1.0) -> None:
        """Add `scale` times a tensor of one number, as `impact_of` gives, to a unit's loss impact in this step.

        The numbers are added up on the host, when they are read: a GPU kernel for each sum would cost more.
        """
        self._require_known(block)
        self._open.impacts.append((impact.detach().reshape(()), _Share(block, precision, scale)))

    def drop_impacts(self, block: str) -> None:
        """Forget a unit's loss impact in this step: a part of it was not measured."""
        self._open.impacts = [one for one in self._open.impacts if one[1].block != block]

    @torch.no_grad()
    def end_step(self, step_id: int) -> None:
        """Close the step, and send its numbers to the host; a block that nothing was added for is missing."""
        step, self._open = self._open, _Step()
        step.join_parts()
        done = step.blocks
        missing = [*step.missing, *(name for name in self.blocks if name not in done)]
        copies = _send([*(rows for _, rows in step.rows), *(impact for impact, _ in step.impacts)])
        shares = [share for _, share in step.impacts]
        self._sent.append(_Sent(step_id, [names for names, _ in step.rows], missing, shares, copies))

    def drop_step(self) -> None:
        """Forget the open step, as after an error in it."""
        self._open = _Step()

    def drain(self, *, before: int | None = None) -> list[StepStats]:
        """Every step since the last drain, or only those before a step, oldest first: the only call that waits."""
        ready = [sent for sent in self._sent if before is None or sent.step_id < before]
        self._sent = self._sent[len(ready) :]
        return [sent.read(self.blocks) for sent in ready]

    def _present(self, name: str, grads: Iterable[Tensor | None]) -> list[Tensor]:
        present = []
        for grad in grads:
            if grad is None:
                self.missing_tensors[name] += 1
            elif grad.layout != torch.strided or not grad.dtype.is_floating_point:
                kind = f"{grad.dtype}, {grad.layout}".replace("torch.", "")
                raise GradStatsError(f"gradient of {name!r}: expected dense floating-point numbers, got {kind}")
            elif grad.numel():
                present.append(grad)
        return present

    def _require_known(self, name: str) -> None:
        if name not in self._known:
            raise GradStatsError(f"{name!r} is not a registered block{did_you_mean(name, self.blocks)}")


def collect_grad_stats(collector: GradStatsCollector, blocks: Mapping[str, Gradients], step_id: int) -> None:
    """Measure the gradients of all blocks (modules, or lists of gradients) after a backward pass."""
    collector.add(blocks)
    collector.end_step(step_id)


@torch.no_grad()
def impact_of(grad_output: Tensor, inputs: Tensor, difference: Tensor) -> Tensor:
    """Compute <dL/dy, (W - W_hat) x> of a linear layer y = W x, a tensor of one number in units of loss.

    The first-order rise of the loss if W_hat stands in for W is minus this. It needs no gradient of the weight, so it
    works for frozen weights too; for trained ones it equals <dL/dW, W - W_hat>. The product is computed in the type of
    the inputs, and summed in float32.
    """
    inputs = inputs.detach().reshape(-1, inputs.shape[-1])
    moved = linear_in_fast_type(inputs, difference)
    return (grad_output.reshape(inputs.shape[0], -1).float() * moved).sum()


def _gradients(source: Gradients) -> Iterable[Tensor | None]:
    if isinstance(source, nn.Module):
        return [parameter.grad for parameter in source.parameters() if parameter.requires_grad]
    return source


def _send(tensors: list[Tensor]) -> list[_Copy]:
    """Send figures to the host, in one copy per device, queued behind its work; nothing waits."""
    groups: dict[torch.device, list[int]] = {}
    for at, tensor in enumerate(tensors):
        groups.setdefault(tensor.device, []).append(at)
    copies = []
    for device, indices in groups.items():
        numbers = torch.cat([tensors[at].reshape(-1) for at in indices]).double()
        event = None
        if device.type == "cuda":
            numbers = numbers.to("cpu", non_blocking=True)  # into pinned memory
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
        copies.append(_Copy(indices, [tensors[at].numel() for at in indices], numbers, event))
    return copies


def _arrived(copies: list[_Copy], count: int) -> list[list[float]]:
    """Return the numbers of every figure, in order."""
    rows: list[list[float]] = [[] for _ in range(count)]
    for copy in copies:
        if copy.event is not None:
            copy.event.synchronize()
        numbers, start = copy.numbers.tolist(), 0
        for at, length in zip(copy.indices, copy.lengths, strict=True):
            rows[at] = numbers[start : start + length]
            start += length
    return rows
