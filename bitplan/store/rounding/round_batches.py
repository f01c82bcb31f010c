"""Compensated rounding on GPUs: the loops of `error_compensation` and `group_blocks`, many columns in one launch.

A matrix has thousands of columns, and a launch takes longer than a column: what belongs to a batch of them is one
kernel, and one matrix product takes its errors to all others. Nothing here waits for the GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitplan.formats.gguf.layouts import Layout
from bitplan.store.rounding.code_grids import Grid
from bitplan.store.rounding.group_scales import GroupScales
from bitplan.store.rounding.layout import ScaledBlocks
from bitplan.store.rounding.pick_loops import in_batches
from bitplan.store.rounding.scale_search import ScaleLadder


def takes_batches(matrix: Tensor, layout: ScaledBlocks, ladder: ScaleLadder) -> bool:
    """Whether the kernels know the format: a scale for a few columns of one row."""
    if not in_batches(matrix) or layout.height > 1:
        return False
    from bitplan.kernels.codec.triton_batches import BlockScales

    return BlockScales(ladder.fmt, layout.width, ladder.grid, (), False, None).is_known


def compensate_batches(
    matrix: Tensor,
    factor: Tensor,
    plain: Tensor,
    layout: ScaledBlocks,
    ladder: ScaleLadder,
    blocks: list[int],
    at: Tensor,
) -> tuple[Tensor, Tensor]:
    """Codes and scales, as `error_compensation.compensate` gives them."""
    from bitplan.kernels.codec import triton_batches

    scaled = triton_batches.BlockScales(
        ladder.fmt, layout.width, ladder.grid, ladder.multiples, ladder.is_signed, ladder.base
    )
    factor = factor.contiguous()
    left, order = matrix[:, at].contiguous(), torch.tensor(blocks, dtype=torch.int32, device=matrix.device)
    codes, scales, plain = torch.empty_like(left), plain.clone(), plain.contiguous()
    errors = matrix.new_empty(len(matrix), scaled.span)
    for start in range(0, layout.filled, scaled.span):
        stop = min(start + scaled.span, layout.filled)
        triton_batches.round_batch(left, factor, plain, order, start, scaled, codes, scales, errors)
        left[:, stop:].addmm_(errors[:, : stop - start], factor[start:stop, stop:], alpha=-1)
    return unordered(codes, at), scales


def sweep_batches(
    gradient: Tensor, hessian: Tensor, codes: Tensor, scales: Tensor, layout: ScaledBlocks, ladder: ScaleLadder
) -> None:
    """One of the sweeps of `error_compensation.sweep`: codes, scales and gradient change where they are."""
    from bitplan.kernels.codec import triton_batches

    scaled = triton_batches.BlockScales(
        ladder.fmt, layout.width, ladder.grid, ladder.multiples, ladder.is_signed, ladder.base
    )
    changes = gradient.new_empty(len(gradient), scaled.span)
    for start in range(0, layout.filled, scaled.span):
        stop = min(start + scaled.span, layout.filled)
        triton_batches.sweep_batch(gradient, codes, scales, hessian, start, scaled, changes)
        gradient.addmm_(changes[:, : stop - start], hessian[start:stop], alpha=-1)


def compensate_groups(
    matrix: Tensor, factor: Tensor, layout: Layout, grid: Grid, blocks: list[int], at: Tensor, scales: GroupScales
) -> Tensor:
    """Codes, as `group_blocks.round_groups` rounds them before its sweeps; `scales` are written."""
    from bitplan.kernels.codec.triton_group_search import search_into
    from bitplan.kernels.codec.triton_rounding import round_piece

    width = layout.numbers
    factor = factor.contiguous()
    left, codes = matrix[:, at].contiguous(), torch.empty_like(matrix)
    parts = (at % width // layout.group).int()
    places = unordered((torch.arange(len(at), device=at.device) % width).int()[None], at)[0]  # in the order of a block
    weights = block_weights(unordered(factor.diagonal().square().reciprocal()[None], at)[0], width)
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


def sweep_group_batches(gradient: Tensor, hessian: Tensor, codes: Tensor, scales: GroupScales, grid: Grid) -> None:
    """One of the sweeps of `group_blocks`: codes, scales and gradient change where they are."""
    from bitplan.kernels.codec.triton_group_sweep import sweep_groups

    layout = scales.layout
    changes = gradient.new_empty(len(gradient), layout.numbers)
    for first in range(0, gradient.shape[1], layout.numbers):
        sweep_groups(
            gradient,
            codes,
            hessian,
            first,
            layout,
            grid,
            scales.d,
            scales.dmin,
            scales.scales,
            scales.mins,
            changes,
        )
        gradient.addmm_(changes, hessian[first : first + layout.numbers], alpha=-1)


def unordered(ordered: Tensor, at: Tensor) -> Tensor:
    """Columns back to where they were."""
    found = torch.empty_like(ordered)
    found[:, at] = ordered
    return found


def block_weights(weights: Tensor, width: int) -> Tensor:
    """Weights of columns as the search of each block takes them: with a mean near 1, none too small."""
    given = weights.double().reshape(-1, width)
    return (given / given.mean(1, keepdim=True).clamp(min=1e-300)).clamp(1e-6, 1e6).float().reshape(-1)
