"""Scales of blocks by weighted search: least sums over columns of weight_k * (number_k - scale * code_k)^2.

Tried are multiples of the scale that the block's largest number asks for, and the plain encoder's own. The best of them
is fitted to its codes by least squares, and the codes to it, for as long as that gains.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitplan.formats.scales.rules import reciprocal
from bitplan.store.rounding.layout import ScaledBlocks
from bitplan.store.rounding.pick_loops import loops_for
from bitplan.store.rounding.scale_ladder import ScaleLadder

FITS = 3


def search_scales(matrix: Tensor, weights: Tensor, plain: Tensor, layout: ScaledBlocks, ladder: ScaleLadder) -> Tensor:
    """[R, filled] numbers and [filled] weights -> [strips, across] scales, none worse than those of `plain`."""
    loops = loops_for(matrix)
    best = [
        _search(loops, matrix[:, at], weights[at], plain[:, block], layout, ladder)
        for block, at in enumerate(block_slices(layout))
    ]
    return torch.stack(best, dim=1) if best else plain


def block_slices(layout: ScaledBlocks) -> list[slice]:
    return [slice(start, min(start + layout.width, layout.filled)) for start in range(0, layout.filled, layout.width)]


def _search(
    loops: Any, piece: Tensor, weights: Tensor, plain: Tensor, layout: ScaledBlocks, ladder: ScaleLadder
) -> Tensor:
    tried = candidates_of(piece, plain, layout, ladder)
    cost = layout.sum_of_strips(loops.weighted_cost(piece, weights, layout.to_rows(tried), ladder.grid))
    least, place = least_of(cost)
    scale = tried.gather(1, place).squeeze(1)
    for _ in range(FITS):
        rows = layout.to_rows(scale).unsqueeze(-1)
        codes = ladder.grid.nearest(piece * reciprocal(rows))
        above = layout.sum_of_strips((weights * codes * piece).sum(1))
        below = layout.sum_of_strips((weights * codes * codes).sum(1))
        fitted = ladder.as_stored(torch.where(below > 0, above / below, scale))
        cost = layout.sum_of_strips(
            loops.weighted_cost(piece, weights, layout.to_rows(fitted.unsqueeze(-1)), ladder.grid)
        )
        better = cost[:, 0] < least
        scale, least = torch.where(better, fitted, scale), torch.where(better, cost[:, 0], least)
    return scale


def candidates_of(piece: Tensor, plain: Tensor, layout: ScaledBlocks, ladder: ScaleLadder) -> Tensor:
    """[strips, C]: what is tried for the blocks of a piece, the plain encoder's scale first."""
    largest = layout.largest_of_strips(piece.abs().amax(1))
    return torch.cat([plain.unsqueeze(-1), ladder.candidates(largest)], dim=1)


def least_of(cost: Tensor) -> tuple[Tensor, Tensor]:
    """[B] the least of [B, C] costs, and its place [B, 1], the first of equals; what is not a number never wins."""
    least, place = torch.where(cost.isnan(), torch.inf, cost).min(1, keepdim=True)
    return least.squeeze(1), place
