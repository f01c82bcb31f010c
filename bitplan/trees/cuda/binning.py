"""Numbers to bins on the GPU, as `trees.loops.rows.bin_numbers` finds them, in the form that histograms read."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from bitplan.trees.binning import BinnedRows, Bins
from bitplan.trees.cuda.kernels import BINS, byte_of, group_bytes, lay_out
from bitplan.trees.cuda.limits import check_memory, find_device
from bitplan.trees.cuda.tables import CudaTable
from bitplan.trees.gradients import Array

BLOCK = 1024
OPTIONS: dict[str, Any] = {"num_warps": 4}
ROWS_AT_ONCE = 2**20  # numbers of these are on the card as they are
_BINS, _MISSING = tl.constexpr(BINS), tl.constexpr(255)


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


def _empty_panels(rows: int, columns: int, row_bytes: int, more: int) -> CudaBins:
    groups = -(-columns // row_bytes)
    device, size = find_device(), rows * groups * row_bytes
    check_memory(device, rows, columns, size + more)
    return CudaBins(torch.empty(size, dtype=torch.uint8, device=device), rows, groups, -(-columns // groups))


def copy_bins(data: BinnedRows, precise: bool) -> CudaBins:
    """Bins that the CPU found."""
    rows, row_bytes = data.rows, group_bytes(precise)
    panels = _empty_panels(rows, len(data.columns), row_bytes, 2 * rows * row_bytes)
    for group in range(panels.groups):
        columns = torch.from_numpy(data.columns[group * panels.width : (group + 1) * panels.width])
        numbers = torch.empty((panels.width, rows), dtype=torch.uint8, device=panels.device)
        numbers[: len(columns)] = columns.to(panels.device)
        if len(columns) < panels.width:  # of no feature: over all bins, so that no atomics wait for each other
            numbers[len(columns) :] = torch.arange(rows, device=panels.device) & 255
        part = panels.panels[group * rows * row_bytes :]
        lay_out[(triton.cdiv(rows, BLOCK),)](numbers, part, rows, panels.width, row_bytes, BLOCK=BLOCK, **OPTIONS)
    return panels


def bin_on_card(x: Array | CudaTable, bins: Bins, precise: bool) -> CudaBins:
    """Every number of x replaced by its bin, by the card."""
    rows, columns, row_bytes = len(x), len(bins.edges), group_bytes(precise)
    chunk = rows if isinstance(x, CudaTable) else min(rows, ROWS_AT_ONCE)
    more = 0 if isinstance(x, CudaTable) else 2 * chunk * x.shape[1] * x.itemsize
    panels = _empty_panels(rows, columns, row_bytes, more)
    limits = np.full((columns, BINS), np.inf)
    for column, edges in enumerate(bins.edges):
        limits[column, : len(edges)] = edges
    limits_there = torch.from_numpy(limits).to(panels.device)
    sources = torch.from_numpy(2 * bins.features.astype(np.int32) + bins.is_category).to(panels.device)
    for first in range(0, rows, max(chunk, 1)):
        if isinstance(x, CudaTable):
            numbers = x.numbers
        else:
            part = x[first : first + chunk]
            numbers = torch.from_numpy(part if part.flags.writeable else part.copy()).to(panels.device)
        bin_numbers[(triton.cdiv(len(numbers), BLOCK), panels.groups)](
            numbers,
            limits_there,
            sources,
            panels.panels,
            first,
            len(numbers),
            rows,
            columns,
            panels.width,
            row_bytes,
            numbers.stride(0),
            numbers.stride(1),
            BLOCK=BLOCK,
            **OPTIONS,
        )
    return panels


NUMBERS = ["first", "count", "rows", "columns", "width", "row_bytes", "row_stride", "feature_stride"]


@triton.jit(do_not_specialize=NUMBERS)
def bin_numbers(
    numbers_ptr,
    limits_ptr,
    sources_ptr,
    bins_ptr,
    first,
    count,
    rows,
    columns,
    width,
    row_bytes,
    row_stride,
    feature_stride,
    BLOCK: tl.constexpr,
):
    """The first bin whose upper limit is not below the number, in eight steps; `count` rows from row `first` on.

    A category's bin has it as its limit; one that has none is missing.
    """
    group = tl.program_id(1)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, row = at < count, first + at
    panel = bins_ptr + (group.to(tl.int64) * rows + row) * row_bytes
    for place in range(width):
        column = group * width + place
        bin_ = (row & 255).to(tl.int32)  # of no feature: over all bins, so that no atomics wait for each other
        if column < columns:
            source = tl.load(sources_ptr + column)
            feature = (source >> 1).to(tl.int64)
            number = tl.load(numbers_ptr + at * row_stride + feature * feature_stride, mask=inside, other=0.0)
            wide = number.to(tl.float64)
            low = tl.zeros([BLOCK], tl.int32)
            limits = limits_ptr + column * _BINS
            for power in tl.static_range(8):
                limit = tl.load(limits + low + ((128 >> power) - 1))
                low += tl.where(limit < wide, 128 >> power, 0)
            is_known = (source & 1 == 0) | (tl.load(limits + low) == wide)
            bin_ = tl.where((number == number) & is_known, low, _MISSING)
        tl.store(panel + byte_of(place, row, width), bin_.to(tl.uint8), mask=inside)
