"""Mean, variance and max |x| of many tensors in one launch, each number read once: for statistics of gradients.

The definition is `torch_parts` in `gradient_statistics`, whose parts are whole tensors; `join` there takes both
kinds of parts.

A program takes 64k numbers of one tensor, finds the tensor by its address in a table, and keeps a running (mean, sum of
squared deviations, max |g|): each 8k numbers are summed around their own mean and merged into it (Chan's rule), so that
nothing large is subtracted. Addresses change from step to step and are sent in one small pinned copy; the map from
program to tensor depends on sizes only and stays on the device.

Legend: P parts (programs), T tensors.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitplan.base.hardware import to_device

BLOCK = 8192
ROUNDS = 8
PART = BLOCK * ROUNDS
_NAMES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def kernel_parts(tensors: Sequence[Tensor]) -> Tensor:
    """A row (mean, variance, max |x|) per part of PART numbers, in the order of the tensors; one launch per type."""
    flat = [_dense(tensor) for tensor in tensors]
    sizes = tuple(grad.numel() for grad in flat)
    device = flat[0].device
    rows = torch.empty((sum(-(-size // PART) for size in sizes), 3), dtype=torch.float32, device=device)
    addresses = to_device(torch.tensor([grad.data_ptr() for grad in flat], dtype=torch.int64), device)
    for dtype in dict.fromkeys(grad.dtype for grad in flat):
        chosen = tuple(grad.dtype == dtype for grad in flat)
        programs = _programs(sizes, chosen, device)
        aligned = all(grad.data_ptr() % 16 == 0 for grad in flat if grad.dtype == dtype)
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            _reduce[(programs[0].numel(),)](
                addresses,
                *programs,
                rows,
                DTYPE=_NAMES[dtype],
                ALIGNED=aligned,
                BLOCK=BLOCK,
                ROUNDS=ROUNDS,
                num_warps=8,
            )
    return rows


def _dense(grad: Tensor) -> Tensor:
    """The gradient if its numbers lie without gaps, in any order; else a copy."""
    return grad if grad.is_contiguous() or (grad.ndim > 1 and grad.mT.is_contiguous()) else grad.contiguous()


@lru_cache(maxsize=64)
def _programs(sizes: Sequence[int], chosen: Sequence[bool], device: torch.device) -> tuple[Tensor, ...]:
    """For every program: its row, its tensor, where in the tensor it starts, and how many numbers the tensor has."""
    rows, row = [], 0
    for tensor, (size, is_chosen) in enumerate(zip(sizes, chosen, strict=True)):
        for start in range(0, size, PART):
            if is_chosen:
                rows.append((row, tensor, start, size))
            row += 1
    table = to_device(torch.tensor(rows, dtype=torch.int64).t().contiguous(), device)
    return tuple(table.unbind(0))


@triton.jit
def _reduce(
    addresses_T,
    row_P,
    tensor_P,
    offset_P,
    size_P,
    rows_P3,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    program = tl.program_id(0)
    source = tl.load(addresses_T + tl.load(tensor_P + program)).to(tl.pointer_type(DTYPE))
    if ALIGNED:  # 16 bytes a load
        source = tl.multiple_of(source, 16)
    start = tl.multiple_of(tl.load(offset_P + program), 8192)
    size = tl.load(size_P + program)
    seen = 0.0
    mean = 0.0
    squares = 0.0
    peak = 0.0
    for turn in range(ROUNDS):
        at = start + turn * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        if start + (turn + 1) * BLOCK <= size:  # without a mask, which would load every number by itself
            x = tl.load(source + at).to(tl.float32)
        else:
            x = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
        number = tl.sum(inside.to(tl.float32))
        here = tl.sum(x) / tl.maximum(number, 1.0)
        away = tl.where(inside, x - here, 0.0)
        total = seen + number
        share = number / tl.maximum(total, 1.0)
        apart = here - mean
        squares += tl.sum(away * away) + apart * apart * seen * share
        mean += apart * share
        peak = tl.maximum(peak, tl.max(tl.abs(x)))
        seen = total
    out = rows_P3 + 3 * tl.load(row_P + program)
    tl.store(out, mean)
    tl.store(out + 1, squares / seen)
    tl.store(out + 2, peak)
