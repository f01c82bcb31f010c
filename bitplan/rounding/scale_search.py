"""Scales of blocks: which are tried, and by weighted search the best of them.

Tried are multiples of the scale that a block's largest number asks for, as the format stores them, and the plain
encoder's own. The least sum over columns of weight_k * (number_k - scale * code_k)^2 wins; it is fitted to its codes by
least squares, and the codes to it, for as long as that gains.

`GroupScales` are the scales and minima of GGUF's blocks, which move to where the outputs' error is least while all
codes stay. A group's number is d x integer x code - dmin x integer; where a layout has no integers, d and the minimum
are float16 numbers themselves. Each of them alone has a best value by least squares; what the layout stores lies next
to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitplan.formats.format import Format
from bitplan.formats.gguf.blocks import GgufQ40
from bitplan.formats.gguf.layouts import BlockParts, Layout
from bitplan.formats.scale_rules import power_of_two_scale, reciprocal
from bitplan.rounding.layout import Grid, ScaledBlocks
from bitplan.rounding.round_columns import loops_for

FITS = 3
POWERS = (1.0, 2.0, 0.5)
FEW_BITS = tuple(1.0 / (0.84 + 0.04 * step) for step in range(24))  # 4 bits: up to 1.19, down to 0.57 of the largest
FEWEST_BITS = tuple(1.1 * 0.93**step for step in range(32))  # 2 bits: down to a tenth
WHOLE_BYTES = tuple(1.0 / (1.0 + 0.02 * step) for step in range(8))
BYTE_FLOATS = tuple(2.0 ** (-step / 8) for step in range(8))  # where in its binade the largest number lands


@dataclass(frozen=True)
class ScaleLadder:
    """The scales that a format can store, to choose from. Scales are float32, as they are after loading."""

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
    least, index = least_of(cost)
    scale = tried.gather(1, index).squeeze(1)
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
    """Find the least of [B, C] costs, [B], and its index, [B, 1], the first of equals; NaN never wins."""
    least, index = torch.where(cost.isnan(), torch.inf, cost).min(1, keepdim=True)
    return least.squeeze(1), index


# ---- scales and minima of GGUF's blocks ------------------------------------------------------------------------------


@dataclass
class GroupScales:
    """Scales of all GGUF blocks of [R, filled] numbers: d, dmin [R, blocks], integers [R, groups]; in float32."""

    layout: Layout
    d: Tensor
    dmin: Tensor
    scales: Tensor
    mins: Tensor

    @classmethod
    def empty(cls, matrix: Tensor, layout: Layout) -> GroupScales:
        blocks, groups = (matrix.shape[1] // size for size in (layout.numbers, layout.group))
        d, dmin = (matrix.new_zeros(len(matrix), blocks) for _ in range(2))
        scales, mins = (matrix.new_ones(len(matrix), groups) for _ in range(2))
        return cls(layout, d, dmin, scales, mins)

    def put(self, block: int, parts: BlockParts) -> None:
        groups = self.groups(block)
        self.d[:, block] = parts.d.float()
        if parts.dmin is not None:  # taken away where it has integers, added where it has none
            self.dmin[:, block] = -parts.dmin.float() if self.layout.has_groups else parts.dmin.float()
        if parts.scales is not None:
            self.scales[:, groups] = parts.scales.float()
        if parts.mins is not None:
            self.mins[:, groups] = parts.mins.float()

    def parts(self, codes: Tensor) -> BlockParts:
        """All blocks as they are stored, row by row, with codes [R, filled] as stored."""
        layout = self.layout
        codes, d, dmin = codes.reshape(-1, layout.numbers), self.d.reshape(-1).half(), self.dmin.reshape(-1).half()
        if not layout.has_groups:
            return BlockParts(codes, d, dmin if layout.has_min else None)
        scales, mins = (part.reshape(-1, layout.group_count).to(torch.int8) for part in (self.scales, self.mins))
        return BlockParts(codes, d, -dmin, scales, mins) if layout.has_min else BlockParts(codes, d, None, scales)

    def values(self, codes: Tensor) -> Tensor:
        """Return the numbers that codes stand for, [R, filled]."""
        blocks = self.d.shape[1]
        steps, offsets = (
            (unit.unsqueeze(-1) * part.reshape(len(part), blocks, -1)).reshape(len(part), -1)
            for unit, part in ((self.d, self.scales), (self.dmin, self.mins))
        )
        return codes * steps.repeat_interleave(self.layout.group, 1) + offsets.repeat_interleave(self.layout.group, 1)

    def groups(self, block: int) -> slice:
        return slice(block * self.layout.group_count, (block + 1) * self.layout.group_count)

    def steps(self, block: int) -> Tensor:
        """Return what a code is multiplied by, [R, groups of the block], rounded once as the decoder does."""
        return self.d[:, block, None] * self.scales[:, self.groups(block)]

    def offsets(self, block: int) -> Tensor:
        return self.dmin[:, block, None] * self.mins[:, self.groups(block)]

    def improve(self, block: int, codes: Tensor, gradient: Tensor, hessian: Tensor) -> tuple[Tensor, Tensor]:
        """Improve a block's scales in place for codes [R, n]; returns changes of values, and the gradient after them.

        `gradient` [R, n] is (weight - value) @ the whole Hessian, in the block's columns; `hessian` [n, n] is its own.
        """
        before = self._values(block, codes)
        slope = gradient.clone()
        if self.layout.has_groups:
            self._improve_integers(block, codes, slope, hessian)
        self._improve_floats(block, codes, slope, hessian)
        return self._values(block, codes) - before, slope

    def _improve_integers(self, block: int, codes: Tensor, slope: Tensor, hessian: Tensor) -> None:
        layout, first = self.layout, block * self.layout.group_count
        assert layout.scale_low is not None
        assert layout.scale_high is not None
        bounds = [(self.scales, self.d, layout.scale_low)] + [(self.mins, self.dmin, 0)] * layout.has_min
        for group in range(layout.group_count):
            at = slice(group * layout.group, (group + 1) * layout.group)
            for integers, units, least in bounds:
                unit, now = units[:, block], integers[:, first + group]
                way = codes[:, at] if integers is self.scales else None
                rise, curve, change = _along(way, slope[:, at], hessian[at], at)
                wanted = now + torch.where((curve > 0) & (unit != 0), rise / curve / unit, 0.0)
                wanted = wanted.round().clamp(least, layout.scale_high)
                move = move_if_better((wanted - now) * unit, rise, curve)
                integers[:, first + group] = torch.where(move != 0, wanted, now)
                slope -= move.unsqueeze(-1) * change

    def _improve_floats(self, block: int, codes: Tensor, slope: Tensor, hessian: Tensor) -> None:
        groups, wide = self.groups(block), self.layout.group
        scales, mins = (part[:, groups].repeat_interleave(wide, 1) for part in (self.scales, self.mins))
        for units, way in [(self.d, codes * scales)] + [(self.dmin, mins)] * self.layout.has_min:
            rise, curve, change = _along(way, slope, hessian, slice(None))
            now = units[:, block]
            wanted = (now + torch.where(curve > 0, rise / curve, 0.0)).half().float()
            if self.layout.has_groups and units is self.dmin:
                wanted = wanted.clamp(max=0.0)
            move = move_if_better(torch.where(wanted.isfinite(), wanted - now, 0.0), rise, curve)
            units[:, block] = torch.where(move != 0, wanted, now)
            slope -= move.unsqueeze(-1) * change

    def _values(self, block: int, codes: Tensor) -> Tensor:
        steps, offsets = (
            part.repeat_interleave(self.layout.group, 1) for part in (self.steps(block), self.offsets(block))
        )
        return codes * steps + offsets


def _along(way: Tensor | None, slope: Tensor, hessian: Tensor, at: slice) -> tuple[Tensor, Tensor, Tensor]:
    """[R] each: slope and curvature of the error, as it falls, along a change of values `way` [R, g] in the columns
    `at`; and by how much the slope of all n columns falls with it, [R, n]. `way` None is a change of one everywhere.

    hessian   [g, n]: the rows of those columns
    """
    if way is None:
        change = hessian.sum(0, keepdim=True)
        return slope.sum(1), change[:, at].sum(1).expand(len(slope)), change
    change = way @ hessian
    return (way * slope).sum(1), (way * change[:, at]).sum(1), change


def move_if_better(move: Tensor, rise: Tensor, curve: Tensor) -> Tensor:
    """Return the moves of scales by which the error becomes smaller, and 0 for the others."""
    return torch.where(2 * move * rise > move.square() * curve, move, 0.0)
