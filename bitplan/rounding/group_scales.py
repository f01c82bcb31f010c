"""Scales and minima of GGUF's blocks, moved to where the outputs' error is least while all codes stay.

A group's number is d x integer x code - dmin x integer; where a layout has no integers, d and the minimum are float16
numbers themselves. Each of them alone has its best place by least squares; what the layout stores lies next to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bitplan.formats.gguf.layouts import BlockParts, Layout


@dataclass
class GroupScales:
    """All blocks of [R, filled] numbers: d and dmin [R, blocks], integers [R, groups]; float32 throughout."""

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
        """Better scales for a block's codes [R, n]: by how much the values changed [R, n], and the gradient after it.

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
                move = _if_better((wanted - now) * unit, rise, curve)
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
            move = _if_better(torch.where(wanted.isfinite(), wanted - now, 0.0), rise, curve)
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


def _if_better(move: Tensor, rise: Tensor, curve: Tensor) -> Tensor:
    """The move where the error becomes smaller, else none."""
    return torch.where(2 * move * rise > move.square() * curve, move, 0.0)
