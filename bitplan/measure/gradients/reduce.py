"""L2 norm, max |g| and variance of the gradients of many blocks, left on their device: nothing waits for a result.

Every gradient is cut into parts, each part gives (mean, variance, max |g|) in float32, and a block's parts are joined
in float64: no large numbers are subtracted, so a variance far below the square of the mean is still right. Parts are
joined in a fixed order, so the same gradients give the same bits, and a resumed run the same decisions.

    definition   plain torch, a part is a tensor: runs anywhere, reads each gradient a few times
    Triton       `kernels.gradient_statistics`, a part is 64k numbers: one launch for all tensors of a type

`explain_reduce` says which it will be, and why.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from bitplan.kernels.base.host_copy import to_device
from bitplan.kernels.codec.dispatch import Picked

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
    if explain_reduce(blocks).implementation == "triton":
        return triton_parts(blocks)
    return torch_parts(blocks)


def explain_reduce(blocks: Blocks) -> Picked:
    """What `reduce_blocks` would run."""
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
    """The definition: one part per tensor."""
    flat = [grad for grads in blocks for grad in grads]
    rows = []
    for grad in flat:
        wide = grad.reshape(-1).to(torch.float64 if grad.dtype == torch.float64 else torch.float32)
        variance, mean = torch.var_mean(wide, correction=0)
        rows.append(torch.stack([mean, variance, torch.linalg.vector_norm(wide, torch.inf)]).double())
    return Parts(torch.stack(rows), tuple(grad.numel() for grad in flat), tuple(map(len, blocks)))


def triton_parts(blocks: Blocks) -> Parts:
    """The same in parts of 64k numbers."""
    from bitplan.kernels.gradient_statistics import PART, kernel_parts

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
