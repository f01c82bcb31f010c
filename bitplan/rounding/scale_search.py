"""Scales of blocks: which are tried, and by weighted search the best of them.

Tried are multiples of the scale that a block's largest number asks for, as the format stores them, and the plain
encoder's own. The least sum over columns of weight_k * (number_k - scale * code_k)^2 wins; it is fitted to its codes by
least squares, and the codes to it, for as long as that gains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitplan.formats.format import Format
from bitplan.formats.gguf.blocks import GgufQ40
from bitplan.formats.scale_rules import power_of_two_scale, reciprocal
from bitplan.rounding.layout import Grid, ScaledBlocks
from bitplan.rounding.pick_loops import loops_for

FITS = 3
POWERS = (1.0, 2.0, 0.5)
FEW_BITS = tuple(1.0 / (0.84 + 0.04 * step) for step in range(24))  # 4 bits: up to 1.19, down to 0.57 of the largest
FEWEST_BITS = tuple(1.1 * 0.93**step for step in range(32))  # 2 bits: down to a tenth
WHOLE_BYTES = tuple(1.0 / (1.0 + 0.02 * step) for step in range(8))
BYTE_FLOATS = tuple(2.0 ** (-step / 8) for step in range(8))  # where in its binade the largest number lands


@dataclass(frozen=True)
class ScaleLadder:
    """What a format's scales can be. Numbers in and out are scales as they are loaded, float32."""

    fmt: Format
    grid: Grid
    base: Tensor | None = None

    @property
    def multiples(self) -> tuple[float, ...]:
        """The multiples that are tried, of the scale that puts the largest number on the largest code."""
        assert self.fmt.element is not None
        if self.fmt.power_of_two_scales:
            return POWERS
        bits = self.fmt.element.bits
        if bits == 8:
            return BYTE_FLOATS if self.grid.is_float else WHOLE_BYTES
        steps = FEW_BITS if bits > 2 else FEWEST_BITS
        return steps + tuple(-step for step in steps) if self.is_signed else steps

    @property
    def is_signed(self) -> bool:
        """Whether scales may be negative: GGUF's Q4_0 is defined so; readers of other formats may not expect it."""
        return isinstance(self.fmt, GgufQ40)

    def as_stored(self, wanted: Tensor) -> Tensor:
        """The scales that the format would load after storing these."""
        assert self.fmt.scales is not None
        return self.fmt.scales.load(self.store(wanted), self.base).float()

    def store(self, wanted: Tensor) -> Tensor:
        assert self.fmt.scales is not None
        if self.fmt.power_of_two_scales:  # which take powers of two alone: the nearest in ratio
            wanted = torch.where(wanted > 0, torch.exp2(torch.log2(wanted).round()), 0.0)
        return self.fmt.scales.store(wanted, self.base)

    def candidates(self, largest: Tensor) -> Tensor:
        """List scales to try, [..., C], for largest magnitudes of blocks, [...]; those that overflow become zero."""
        start = (
            power_of_two_scale(largest, self.grid.high) if self.fmt.power_of_two_scales else largest / self.grid.high
        )
        scales = self.as_stored(start.unsqueeze(-1) * start.new_tensor(self.multiples))
        return torch.where(scales.isfinite(), scales, 0.0)


def search_scales(matrix: Tensor, weights: Tensor, plain: Tensor, layout: ScaledBlocks, ladder: ScaleLadder) -> Tensor:
    """Find scales [strips, across] for [R, filled] numbers and [filled] weights, none worse than those of `plain`."""
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
    """List the scales that are tried for the blocks of a piece, [strips, C], the plain encoder's first."""
    largest = layout.largest_of_strips(piece.abs().amax(1))
    return torch.cat([plain.unsqueeze(-1), ladder.candidates(largest)], dim=1)


def least_of(cost: Tensor) -> tuple[Tensor, Tensor]:
    """Find the least of [B, C] costs, [B], and its place, [B, 1], the first of equals; NaN never wins."""
    least, place = torch.where(cost.isnan(), torch.inf, cost).min(1, keepdim=True)
    return least.squeeze(1), place
