"""Error-compensated rounding in GGUF's blocks of groups (the K-quants): scales by the format's own weighted search.

A block's scales and minima are searched just before its columns are rounded, from the weights as they are then, with
the weights that the factor gives its columns; codes then take part in compensation and sweeps as in other formats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitplan.formats.gguf.blocks import GgufBlocks
from bitplan.formats.gguf.layouts import BlockParts
from bitplan.formats.gguf.search import GroupSums, TorchSums, search_blocks
from bitplan.store.rounding.grids import Grid
from bitplan.store.rounding.loops import is_compiled, loops_for


def grid_of_groups(fmt: GgufBlocks) -> Grid | None:
    """None for codes that are places in a table."""
    return None if fmt.layout.table is not None else Grid(float(fmt.layout.low), float(fmt.layout.high))


def round_groups(
    matrix: Tensor, hessian: Tensor, factor: Tensor, fmt: GgufBlocks, blocks: list[int], at: Tensor, sweeps: int
) -> Tensor:
    """Round [R, filled] numbers -> [R, bytes per row]; `at` are their columns in order, `factor` is in that order."""
    layout, loops, grid = fmt.layout, loops_for(matrix), grid_of_groups(fmt)
    assert grid is not None
    left, codes, width = matrix[:, at].contiguous(), torch.empty_like(matrix), layout.numbers
    steps, offsets = (matrix.new_zeros(len(matrix), len(at) // layout.group) for _ in range(2))
    found: dict[int, BlockParts] = {}
    for place, block in enumerate(blocks):
        first, last = place * width, (place + 1) * width
        inside, own = at[first:last] - block * width, factor[first:last, first:last]
        piece, weights = torch.empty_like(left[:, first:last]), torch.empty_like(matrix[0, :width])
        piece[:, inside] = left[:, first:last]
        weights[inside] = own.diagonal().square().reciprocal()
        found[block] = search_blocks(piece, weights, layout, _sums(matrix))
        groups = slice(block * layout.group_count, (block + 1) * layout.group_count)
        steps[:, groups], low = layout.group_scales(found[block])
        if low is not None:
            offsets[:, groups] = low
        own_codes, errors = loops.round_piece(
            left[:, first:last], own, steps[:, groups], offsets[:, groups], (inside // layout.group).cpu(), grid
        )
        codes[:, at[first:last]] = own_codes
        left[:, last:] -= errors @ factor[first:last, last:]
    codes = _swept(matrix, hessian, codes, steps, offsets, fmt, sweeps)
    packed = [
        layout.pack(found[block]._replace(codes=(codes[:, _columns(block, width)] - layout.low).to(torch.uint8)))
        for block in range(len(blocks))
    ]
    return torch.cat(packed, dim=1)


def _swept(
    matrix: Tensor, hessian: Tensor, codes: Tensor, steps: Tensor, offsets: Tensor, fmt: GgufBlocks, sweeps: int
) -> Tensor:
    layout, loops, grid = fmt.layout, loops_for(matrix), grid_of_groups(fmt)
    width = layout.numbers
    values = codes * steps.repeat_interleave(layout.group, 1) + offsets.repeat_interleave(layout.group, 1)
    gradient = (matrix - values) @ hessian
    parts = torch.arange(width) // layout.group
    for _ in range(sweeps):
        for block in range(matrix.shape[1] // width):
            cols, groups = _columns(block, width), _columns(block, layout.group_count)
            codes[:, cols], changes = loops.sweep_piece(
                gradient[:, cols], codes[:, cols], hessian[cols, cols], steps[:, groups], parts, grid
            )
            gradient -= changes @ hessian[cols]
    return codes


def _columns(block: int, width: int) -> slice:
    return slice(block * width, (block + 1) * width)


def _sums(matrix: Tensor) -> GroupSums:
    if not is_compiled(matrix):
        return TorchSums()
    from bitplan.kernels.codec.gguf_search import NumbaSums

    return NumbaSums()
