"""Numbers to bins on the GPU, as `trees.loops.rows` finds them, in the form that histograms read."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from bitplan.trees.binning import BinnedRows, Bins
from bitplan.trees.cuda.kernels import BINS, GROUP_BYTES, byte_of, lay_out
from bitplan.trees.cuda.limits import check_memory, find_device
from bitplan.trees.gradients import Array

BLOCK = 1024
ROWS_AT_ONCE = 2**20  # numbers of these are on the card as they are
_BINS, _BYTES, _MISSING = tl.constexpr(BINS), tl.constexpr(GROUP_BYTES), tl.constexpr(255)


@dataclass(frozen=True)
class CudaBins:
    """Bins of all rows on the card, by group of features, row and place in the group (`trees.cuda.kernels`)."""

    panels: Tensor
    rows: int
    groups: int
    width: int  # features of a group

    @property
    def device(self) -> torch.device:
        return self.panels.device


def _empty_panels(rows: int, features: int, more: int) -> CudaBins:
    groups = -(-features // GROUP_BYTES)
    device, size = find_device(), rows * groups * GROUP_BYTES
    check_memory(device, rows, features, size + more)
    return CudaBins(torch.empty(size, dtype=torch.uint8, device=device), rows, groups, -(-features // groups))


def copy_bins(data: BinnedRows) -> CudaBins:
    """Copy bins that the CPU found to the GPU."""
    rows, features = data.rows, len(data.columns)
    binned = _empty_panels(rows, features, 2 * rows * GROUP_BYTES)
    for group in range(binned.groups):
        columns = torch.from_numpy(data.columns[group * binned.width : (group + 1) * binned.width])
        numbers = torch.empty((binned.width, rows), dtype=torch.uint8, device=binned.device)
        numbers[: len(columns)] = columns.to(binned.device)
        if len(columns) < binned.width:  # of no feature: over all bins, so that no atomics wait for each other
            numbers[len(columns) :] = torch.arange(rows, device=binned.device) & 255
        part = binned.panels[group * rows * GROUP_BYTES :]
        lay_out[(triton.cdiv(rows, BLOCK),)](numbers, part, rows, binned.width, BLOCK=BLOCK, num_warps=4)
    return binned


def bin_on_card(x: Array, bins: Bins) -> CudaBins:
    """Replace every number of x by its bin; no feature is a category."""
    rows, features = x.shape
    chunk = min(rows, ROWS_AT_ONCE)
    binned = _empty_panels(rows, features, 2 * chunk * features * x.itemsize)
    limits = np.full((features, BINS), np.inf)
    for feature, edges in enumerate(bins.edges):
        limits[feature, : len(edges)] = edges
    limits_there = torch.from_numpy(limits).to(binned.device)
    for first in range(0, rows, chunk):
        part = x[first : first + chunk]
        numbers = torch.from_numpy(part if part.flags.writeable else part.copy()).to(binned.device)
        bin_numbers[(triton.cdiv(len(part), BLOCK), binned.groups)](
            numbers,
            limits_there,
            binned.panels,
            first,
            len(part),
            rows,
            features,
            numbers.stride(0),
            numbers.stride(1),
            binned.width,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return binned


@triton.jit(do_not_specialize=["first", "count", "rows", "features", "row_stride", "feature_stride", "width"])
def bin_numbers(
    numbers_ptr,
    limits_ptr,
    bins_ptr,
    first,
    count,
    rows,
    features,
    row_stride,
    feature_stride,
    width,
    BLOCK: tl.constexpr,
):
    """The first bin whose upper limit is not below the number, in eight steps; `count` rows from row `first` on."""
    group = tl.program_id(1)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, row = at < count, first + at
    panel = bins_ptr + (group.to(tl.int64) * rows + row) * _BYTES
    for place in range(width):  # not unrolled: a second to compile, and one kernel for all widths
        feature = group * width + place
        if feature < features:
            number = tl.load(numbers_ptr + at * row_stride + feature * feature_stride, mask=inside, other=0.0)
            wide = number.to(tl.float64)
            low = tl.zeros([BLOCK], tl.int32)
            for power in tl.static_range(8):
                limit = tl.load(limits_ptr + feature * _BINS + low + ((128 >> power) - 1))
                low += tl.where(limit < wide, 128 >> power, 0)
            bin_ = tl.where(number == number, low, _MISSING)
        else:  # of no feature: over all bins, so that no atomics wait for each other
            bin_ = (row & 255).to(tl.int32)
        tl.store(panel + byte_of(place, row, width), bin_.to(tl.uint8), mask=inside)
