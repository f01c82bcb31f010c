"""Triton kernels for scores: gradients, their rounding into entries, sums and values of leaves.

The arithmetic is that of `trees.loops.gradients`, in float64 and without fused multiply-adds. Only `exp` may differ
from the CPU's, in its last bits. So a kernel that needs it computes what follows from a number a little smaller and
from one a little larger; where both round to the same float32, the CPU's does, too. The few rows where they do not
are *doubtful*: the host computes those.

One round's gradients on the GPU, in float32; they are rounded when a tree enters its rows.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from bitplan.base.loops.launch import PreparedLaunch
from bitplan.trees.cuda.kernels import BINS, byte_of
from bitplan.trees.cuda.limits import Sent
from bitplan.trees.gradients import Array

DOUBTFUL = 2**16  # rows that are listed; more, and the host computes all of them
# Of a table of ranges of rows: start, stop, the first block, the side of the entries, the leaf; a row behind them
# begins with the number of blocks.
PARTS_COLUMNS = 5
_BINS, _DOUBTFUL, _COLUMNS = (tl.constexpr(each) for each in (BINS, DOUBTFUL, PARTS_COLUMNS))
_ROW, _BYTES = tl.constexpr(0xFFFFFFFF), tl.constexpr(16)
LESS, MORE = tl.constexpr(1.0 - 2.0**-49), tl.constexpr(1.0 + 2.0**-49)  # eight units in the last place of an `exp`
ROUND = tl.constexpr(1.5 * 2.0**52)  # added and taken away it rounds numbers below 2^51 to whole ones, ties to even


# ---- gradients -------------------------------------------------------------------------------------------------------


@triton.jit
def squared_error(
    y_ptr, scores_ptr, weights_ptr, grads_ptr, hess_ptr, rows, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    grad = tl.load(scores_ptr + row, mask=inside, other=0.0) - tl.load(y_ptr + row, mask=inside, other=0.0)
    hess = tl.full([BLOCK], 1.0, tl.float64)
    if WEIGHTED:
        hess = tl.load(weights_ptr + row, mask=inside, other=0.0)
        grad = grad * hess
    tl.store(grads_ptr + row, grad.to(tl.float32), mask=inside)
    tl.store(hess_ptr + row, hess.to(tl.float32), mask=inside)


@triton.jit
def _differ(low, high):
    """Whether numbers of one sign between these, or the least bit beside them, may round to different float32."""
    least, most = tl.minimum(low, high), tl.maximum(low, high)
    return (least * LESS).to(tl.float32) != (most * MORE).to(tl.float32)


@triton.jit
def _list_doubtful(doubtful_ptr, row, is_doubtful):
    listed = is_doubtful.to(tl.int32)
    count = tl.sum(listed, 0)
    if count > 0:
        place = tl.atomic_add(doubtful_ptr, count.to(tl.int64), sem="relaxed") + tl.cumsum(listed, 0) - listed
        tl.store(doubtful_ptr + 1 + place, row, mask=is_doubtful & (place < _DOUBTFUL))


@triton.jit
def binary(
    y_ptr, scores_ptr, weights_ptr, grads_ptr, hess_ptr, doubtful_ptr, rows, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    weight = tl.load(weights_ptr + row, mask=inside, other=0.0) if WEIGHTED else 1.0
    y = tl.load(y_ptr + row, mask=inside, other=0.0)
    power = tl.exp(0.0 - tl.load(scores_ptr + row, mask=inside, other=0.0))
    low, high = 1.0 / (1.0 + power * MORE), 1.0 / (1.0 + power * LESS)
    grad, other_grad = (low - y) * weight, (high - y) * weight
    hess, other_hess = low * (1.0 - low) * weight, high * (1.0 - high) * weight
    is_doubtful = (grad.to(tl.float32) != other_grad.to(tl.float32)) | _differ(hess, other_hess)
    _list_doubtful(doubtful_ptr, row, is_doubtful & inside & (low != high))
    tl.store(grads_ptr + row, grad.to(tl.float32), mask=inside)
    tl.store(hess_ptr + row, hess.to(tl.float32), mask=inside)


@triton.jit
def softmax(
    y_ptr,
    scores_ptr,
    weights_ptr,
    grads_ptr,
    hess_ptr,
    doubtful_ptr,
    factor_ptr,
    rows,
    CLASSES: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the softmax loss's gradients and hessians, (classes, rows), from scores of that shape."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    weight = tl.load(weights_ptr + row, mask=inside, other=0.0) if WEIGHTED else 1.0
    y, factor = tl.load(y_ptr + row, mask=inside, other=0.0), tl.load(factor_ptr)
    top = tl.load(scores_ptr + row, mask=inside, other=0.0)
    for place in range(1, CLASSES):
        top = tl.maximum(top, tl.load(scores_ptr + row + place * rows, mask=inside, other=0.0))
    least, most = top * 0.0, top * 0.0
    for place in range(CLASSES):
        power = tl.exp(tl.load(scores_ptr + row + place * rows, mask=inside, other=0.0) - top)
        least, most = least + power * LESS, most + power * MORE
    is_doubtful = row < 0
    for place in range(CLASSES):
        power = tl.exp(tl.load(scores_ptr + row + place * rows, mask=inside, other=0.0) - top)
        low, high = power * LESS / most, power * MORE / least
        is_class = tl.where(y == place, 1.0, 0.0)
        grad, other_grad = (low - is_class) * weight, (high - is_class) * weight
        hess, other_hess = factor * low * (1.0 - low) * weight, factor * high * (1.0 - high) * weight
        is_doubtful = is_doubtful | (grad.to(tl.float32) != other_grad.to(tl.float32)) | _differ(hess, other_hess)
        tl.store(grads_ptr + row + place * rows, grad.to(tl.float32), mask=inside)
        tl.store(hess_ptr + row + place * rows, hess.to(tl.float32), mask=inside)
    _list_doubtful(doubtful_ptr, row, is_doubtful & inside)


@triton.jit
def find_largest(grads_ptr, hess_ptr, tops_ptr, rows, BLOCK: tl.constexpr):
    """The bits of the largest |gradient| and of the largest hessian of each output, as whole numbers.

    Those of infinity and NaN are the largest, and a hessian below zero counts as NaN.
    """
    output = tl.program_id(1).to(tl.int64)
    top_grad, top_hess = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for first in range(tl.program_id(0) * BLOCK, rows, tl.num_programs(0) * BLOCK):
        row = first + tl.arange(0, BLOCK)
        grad = tl.load(grads_ptr + output * rows + row, mask=row < rows, other=0.0)
        hess = tl.load(hess_ptr + output * rows + row, mask=row < rows, other=0.0)
        top_grad = tl.maximum(top_grad, grad.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        top_hess = tl.maximum(top_hess, tl.where(hess < 0.0, 0x7FFFFFFF, hess.to(tl.int32, bitcast=True) & 0x7FFFFFFF))
    tl.atomic_max(tops_ptr + 2 * output, tl.max(top_grad, 0).to(tl.int64), sem="relaxed")
    tl.atomic_max(tops_ptr + 2 * output + 1, tl.max(top_hess, 0).to(tl.int64), sem="relaxed")


@triton.jit
def enter_floats(
    entries_ptr,
    grads_ptr,
    hess_ptr,
    rows_ptr,
    numbers_ptr,
    key_ptr,
    count,
    STOCHASTIC: tl.constexpr,
    ALL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Round gradients as `trees.loops.gradients` does, by the number of the row, and make entries of them."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = at if ALL else tl.load(rows_ptr + at, mask=inside, other=0).to(tl.int64)
    grad = tl.load(grads_ptr + row, mask=inside, other=0.0).to(tl.float64) * tl.load(numbers_ptr)
    hess = tl.load(hess_ptr + row, mask=inside, other=0.0).to(tl.float64) * tl.load(numbers_ptr + 1)
    if STOCHASTIC:
        word = tl.load(key_ptr).to(tl.uint64, bitcast=True) + row.to(tl.uint64) * 0x9E3779B97F4A7C15
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB
        word = word ^ (word >> 31)
        grad += (word >> 32).to(tl.int64).to(tl.float64) * (2.0**-32)
        hess += (word & 0xFFFFFFFF).to(tl.int64).to(tl.float64) * (2.0**-32)
    else:
        grad, hess = grad + 0.5, hess + 0.5
    grad, hess = tl.floor(grad).to(tl.int64), tl.floor(hess).to(tl.int64)
    grad, hess = tl.minimum(tl.maximum(grad, -32767), 32767), tl.minimum(hess, 65535)
    tl.store(entries_ptr + at, (grad << 48) + (hess << 32) + row, mask=inside)


# ---- leaves ----------------------------------------------------------------------------------------------------------


@triton.jit
def _blocks(parts_ptr, PARTS: tl.constexpr):
    return tl.load(parts_ptr + PARTS * _COLUMNS).to(tl.int32)


@triton.jit
def _part_of(parts_ptr, block, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return of a block of rows (places in the entries, which are there, the side, the leaf)."""
    firsts = tl.load(parts_ptr + tl.arange(0, PARTS) * _COLUMNS + 2)
    of = parts_ptr + (tl.sum((firsts <= block).to(tl.int32), 0) - 1) * _COLUMNS
    at = tl.load(of) + (block - tl.load(of + 2)) * BLOCK + tl.arange(0, BLOCK)
    return at, at < tl.load(of + 1), tl.load(of + 3), tl.load(of + 4)


@triton.jit(do_not_specialize=["rows"])
def collect_rows(parts_ptr, entries_ptr, rows, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Copy rows that lie on the other side of `entries` to the same place of its first side."""
    for block in range(tl.program_id(0), _blocks(parts_ptr, PARTS), tl.num_programs(0)):
        at, inside, side, _leaf = _part_of(parts_ptr, block, PARTS, BLOCK)
        if side == 1:
            tl.store(entries_ptr + at, tl.load(entries_ptr + rows + at, mask=inside, other=0), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def sum_leaves(
    parts_ptr,
    entries_ptr,
    grads_ptr,
    hess_ptr,
    numbers_ptr,
    sums_ptr,
    rows,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums of float32 gradients and hessians over the rows of each leaf, as multiples of units."""
    for block in range(tl.program_id(0), _blocks(parts_ptr, PARTS), tl.num_programs(0)):
        at, inside, side, leaf = _part_of(parts_ptr, block, PARTS, BLOCK)
        row = tl.load(entries_ptr + side * rows + at, mask=inside, other=0) & _ROW
        grad = tl.load(grads_ptr + row, mask=inside, other=0.0).to(tl.float64) * tl.load(numbers_ptr)
        hess = tl.load(hess_ptr + row, mask=inside, other=0.0).to(tl.float64) * tl.load(numbers_ptr + 1)
        grads, weights = ((grad + ROUND) - ROUND).to(tl.int64), ((hess + ROUND) - ROUND).to(tl.int64)
        tl.atomic_add(sums_ptr + 2 * leaf, tl.sum(grads, 0), sem="relaxed")
        tl.atomic_add(sums_ptr + 2 * leaf + 1, tl.sum(weights, 0), sem="relaxed")


@triton.jit(do_not_specialize=["rows"])
def add_values(parts_ptr, entries_ptr, values_ptr, scores_ptr, rows, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Add the value of its leaf to the score of each row."""
    for block in range(tl.program_id(0), _blocks(parts_ptr, PARTS), tl.num_programs(0)):
        at, inside, side, leaf = _part_of(parts_ptr, block, PARTS, BLOCK)
        row = tl.load(entries_ptr + side * rows + at, mask=inside, other=0) & _ROW
        score = tl.load(scores_ptr + row, mask=inside, other=0.0)
        tl.store(scores_ptr + row, score + tl.load(values_ptr + leaf), mask=inside)


@triton.jit(do_not_specialize=["count", "rows", "depth", "width"])
def walk_rows(
    numbers_ptr,
    bins_ptr,
    features_ptr,
    left_bins_ptr,
    left_ptr,
    right_ptr,
    values_ptr,
    scores_ptr,
    count,
    rows,
    depth,
    width,
    BLOCK: tl.constexpr,
):
    """Add leaf values to scores of rows that the tree was not grown from: each goes down the tree."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = tl.load(numbers_ptr + at, mask=inside, other=0).to(tl.int64)
    node = tl.zeros([BLOCK], tl.int32)
    for _step in range(depth):
        here = tl.maximum(node, 0)
        feature = tl.load(features_ptr + here).to(tl.int32)
        byte = ((feature // width).to(tl.int64) * rows + row) * _BYTES + byte_of(feature % width, row, width)
        goes_left = tl.load(left_bins_ptr + here * _BINS + tl.load(bins_ptr + byte).to(tl.int32))
        child = tl.where(goes_left > 0, tl.load(left_ptr + here), tl.load(right_ptr + here))
        node = tl.where(node >= 0, child, node)
    leaf = tl.where(node < 0, -1 - node, 0)
    score = tl.load(scores_ptr + row, mask=inside, other=0.0)
    tl.store(scores_ptr + row, score + tl.load(values_ptr + leaf), mask=inside)


# ---- gradients -------------------------------------------------------------------------------------------------------


BLOCK = 1024


class EntryWriter:
    """Writes entries of float32 gradients of all rows, or of some."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._sent = Sent(3, device)  # two factors and a key
        self._of_all = {
            stochastic: PreparedLaunch(
                enter_floats, *_blocks_of(rows), _entering(stochastic, of_all=True), num_warps=4, enable_fp_fusion=False
            )
            for stochastic in (False, True)
        }

    def compile(self, grads: Tensor) -> None:
        """Begin to compile what rounds of all rows launch; see `base.loops.launch.compiling_together`."""
        self._of_all[True].compile(self._sent.there, grads, grads, grads, *self._numbers())

    def write(self, gradients: CudaGradients, entries: Tensor, rows: Array | range) -> None:
        scales, stochastic = (gradients.grad_scale, gradients.hess_scale), gradients.key is not None
        host = self._sent.host.numpy()
        host[:2].view(np.float64)[:] = [1.0 / scale if scale else 0.0 for scale in scales]
        host[2:].view(np.uint64)[:] = gradients.key or 0
        self._sent.send()
        parts = entries, gradients.grads, gradients.hessians
        if isinstance(rows, range):
            self._of_all[stochastic](*parts, gradients.grads, *self._numbers())
            return
        chosen, (grid, count) = torch.from_numpy(np.asarray(rows, np.int32)).to(entries.device), _blocks_of(len(rows))
        shape = _entering(stochastic, of_all=False)
        enter_floats[grid](*parts, chosen, *self._numbers(), *count, **shape, num_warps=4, enable_fp_fusion=False)

    def _numbers(self) -> tuple[Tensor, Tensor]:
        return self._sent.there[:2].view(torch.float64), self._sent.there[2:]


def _blocks_of(rows: int) -> tuple[tuple[int], tuple[int]]:
    """A grid, and the number that goes with it."""
    return (triton.cdiv(max(rows, 1), BLOCK),), (rows,)


def _entering(stochastic: bool, *, of_all: bool) -> dict[str, Any]:
    """Constants of `enter_floats`."""
    return {"STOCHASTIC": stochastic, "ALL": of_all, "BLOCK": BLOCK}


@dataclass(frozen=True)
class CudaGradients:
    """float32 gradients and hessians of all rows, and how they are to be rounded; no key: to nearest."""

    grads: Tensor
    hessians: Tensor
    grad_scale: float
    hess_scale: float
    key: int | None
    writer: EntryWriter

    def enter(self, entries: Tensor, rows: Array | range) -> None:
        """Write the entries of some rows."""
        self.writer.write(self, entries, rows)
