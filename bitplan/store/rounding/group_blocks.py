"""Error-compensated rounding in GGUF's blocks of groups (the K-quants): scales by the format's own weighted search.

A block's scales and minima are searched just before its columns are rounded, from the weights as they are then, with
the weights that the factor gives its columns; codes then take part in compensation, and both in sweeps, as in other
formats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitplan.formats.gguf.blocks import GgufBlocks
from bitplan.formats.gguf.layouts import Layout
from bitplan.formats.gguf.search import SearchBySums, TorchSums, search_blocks
from bitplan.store.rounding.code_grids import Grid
from bitplan.store.rounding.group_scales import GroupScales
from bitplan.store.rounding.layout import unordered
from bitplan.store.rounding.pick_loops import in_batches, is_compiled, loops_for


def grid_of_groups(fmt: GgufBlocks) -> Grid:
    table = fmt.layout.table
    if table is not None:
        return Grid(float(table[0]), float(table[-1]), table=tuple(map(float, table)))
    return Grid(float(fmt.layout.low), float(fmt.layout.high))


def stored_codes(numbers: Tensor, fmt: GgufBlocks) -> Tensor:
    """uint8: what is stored for the numbers that codes stand for."""
    if fmt.layout.table is None:
        return (numbers - fmt.layout.low).to(torch.uint8)
    return torch.searchsorted(numbers.new_tensor(fmt.layout.table), numbers.contiguous()).to(torch.uint8)


def round_groups(
    matrix: Tensor, hessian: Tensor, factor: Tensor, fmt: GgufBlocks, blocks: list[int], at: Tensor, sweeps: int
) -> Tensor:
    """Round [R, filled] numbers -> [R, bytes per row]; `at` are their columns in order, `factor` is in that order."""
    scales = GroupScales.empty(matrix, fmt.layout)
    if in_batches(matrix):
        codes = _compensate_batches(matrix, factor, fmt.layout, grid_of_groups(fmt), blocks, at, scales)
    elif is_compiled(matrix):
        codes = _compensate_compiled(matrix, factor, fmt, blocks, at, scales)
    else:
        codes = _compensate(matrix, factor, fmt, blocks, at, scales)
    _sweep(matrix, hessian, codes, scales, fmt, sweeps)
    packed = fmt.layout.pack(scales.parts(stored_codes(codes, fmt)))
    return packed.reshape(len(matrix), -1)


def _compensate(
    matrix: Tensor, factor: Tensor, fmt: GgufBlocks, blocks: list[int], at: Tensor, scales: GroupScales
) -> Tensor:
    layout, loops, grid, search = fmt.layout, loops_for(matrix), grid_of_groups(fmt), SearchBySums(TorchSums())
    left, codes, width = matrix[:, at].contiguous(), torch.empty_like(matrix), layout.numbers
    for place, block in enumerate(blocks):
        first, last = place * width, (place + 1) * width
        inside, own = at[first:last] - block * width, factor[first:last, first:last]
        piece, weights = torch.empty_like(left[:, first:last]), torch.empty_like(matrix[0, :width])
        piece[:, inside] = left[:, first:last]
        weights[inside] = own.diagonal().square().reciprocal()
        scales.put(block, search_blocks(piece, weights, layout, search))
        own_codes, errors = loops.round_piece(
            left[:, first:last], own, scales.steps(block), scales.offsets(block), inside // layout.group, grid
        )
        codes[:, at[first:last]] = own_codes
        left[:, last:] -= errors @ factor[first:last, last:]
    return codes


def _compensate_compiled(
    matrix: Tensor, factor: Tensor, fmt: GgufBlocks, blocks: list[int], at: Tensor, scales: GroupScales
) -> Tensor:
    """As `_compensate`, by compiled loops: of small matrices calls of torch take longer than what they compute."""
    from bitplan.store.rounding.round_columns_cpu import BlockRounder

    width = fmt.layout.numbers
    left, codes = matrix[:, at].contiguous(), torch.empty_like(matrix)
    weights = _block_weights(unordered(factor.diagonal().square().reciprocal()[None], at)[0], width)
    rounder = BlockRounder(fmt.layout, grid_of_groups(fmt), weights, at % width, scales)
    for place, block in enumerate(blocks):
        own = slice(place * width, (place + 1) * width)
        codes[:, own], errors = rounder.round(left[:, own], factor[own, own], block, own)
        if own.stop < matrix.shape[1]:
            left[:, own.stop :] -= errors @ factor[own, own.stop :]
    return unordered(codes, at)


def _sweep(matrix: Tensor, hessian: Tensor, codes: Tensor, scales: GroupScales, fmt: GgufBlocks, sweeps: int) -> None:
    """Scales and codes, each to its best place while all others stay: both change where they are."""
    layout, loops, grid = fmt.layout, loops_for(matrix), grid_of_groups(fmt)
    width = layout.numbers
    each = range(matrix.shape[1] // width)
    gradient = (matrix - scales.values(codes)) @ hessian
    if is_compiled(matrix):
        from bitplan.store.rounding.round_columns_cpu import sweep_groups

        sweep_groups(gradient, codes, hessian, scales, grid, sweeps)
        return
    parts = torch.arange(width) // layout.group
    for done in range(sweeps):
        if in_batches(matrix):
            _sweep_batches(gradient, hessian, codes, scales, grid, is_last=done + 1 == sweeps)
            continue
        for block in each:
            cols = _columns(block, width)
            own, here = hessian[cols, cols], gradient[:, cols]
            moved, slope = scales.improve(block, codes[:, cols], here, own)
            codes[:, cols], changes = loops.sweep_piece(slope, codes[:, cols], own, scales.steps(block), parts, grid)
            gradient -= (moved + changes) @ hessian[cols]


def _compensate_batches(
    matrix: Tensor, factor: Tensor, layout: Layout, grid: Grid, blocks: list[int], at: Tensor, scales: GroupScales
) -> Tensor:
    """On GPUs: as `_compensate`, three launches for a block; nothing waits."""
    from bitplan.kernels.codec.triton_group_search import search_into
    from bitplan.kernels.codec.triton_rounding import round_piece

    width = layout.numbers
    factor = factor.contiguous()
    left, codes = matrix[:, at].contiguous(), torch.empty_like(matrix)
    parts = (at % width // layout.group).int()
    places = unordered((torch.arange(len(at), device=at.device) % width).int()[None], at)[0]  # in the order of a block
    weights = _block_weights(unordered(factor.diagonal().square().reciprocal()[None], at)[0], width)
    unused = torch.empty((len(matrix), width), dtype=torch.uint8, device=matrix.device)
    for place, block in enumerate(blocks):
        first, last = place * width, (place + 1) * width
        own, groups = slice(block * width, (block + 1) * width), scales.groups(block)
        d, dmin = scales.d[:, block : block + 1], scales.dmin[:, block : block + 1]
        search_into(
            left[:, first:last],
            weights[own],
            layout,
            places[own],
            d,
            dmin,
            scales.scales[:, groups],
            scales.mins[:, groups],
            unused,
        )
        if layout.has_groups:  # taken away where it has integers, added where it has none
            dmin.neg_()
        codes[:, first:last], errors = round_piece(
            left[:, first:last],
            factor[first:last, first:last],
            scales.steps(block),
            scales.offsets(block),
            parts[first:last],
            grid,
        )
        left[:, last:].addmm_(errors, factor[first:last, last:], alpha=-1)
    return unordered(codes, at)


def _sweep_batches(
    gradient: Tensor, hessian: Tensor, codes: Tensor, scales: GroupScales, grid: Grid, *, is_last: bool
) -> None:
    """One of the sweeps on GPUs: codes, scales and gradient change where they are."""
    from bitplan.kernels.codec.triton_batches import BlockScales, sweep_batches
    from bitplan.kernels.codec.triton_group_sweep import sweep_groups

    layout, cols = scales.layout, gradient.shape[1]
    if not layout.has_groups and not layout.has_min:  # a float16 number for each block: many blocks in one launch
        scaled = BlockScales("f16", layout.numbers, grid, is_signed=True)
        sweep_batches(gradient, codes, scales.d, hessian, scaled, is_last=is_last)
        return
    changes = gradient.new_empty(len(gradient), layout.numbers)
    for first in range(0, cols, layout.numbers):
        stop = first + layout.numbers
        sweep_groups(
            gradient, codes, hessian, first, layout, grid, scales.d, scales.dmin, scales.scales, scales.mins, changes
        )
        others = slice(stop if is_last else 0, cols)
        gradient[:, others].addmm_(changes, hessian[first:stop, others], alpha=-1)


def _block_weights(weights: Tensor, width: int) -> Tensor:
    """Weights of columns as the search of each block takes them: with a mean near 1, none too small."""
    given = weights.double().reshape(-1, width)
    return (given / given.mean(1, keepdim=True).clamp(min=1e-300)).clamp(1e-6, 1e6).float().reshape(-1)


def _columns(block: int, width: int) -> slice:
    return slice(block * width, (block + 1) * width)
