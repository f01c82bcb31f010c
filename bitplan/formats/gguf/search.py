"""Scales of GGUF's blocks: a search for the least squared error, weighted where inputs were observed.

A group of numbers x is held as scale x code + low, with low of zero where a layout has no minimum. For given scales the
best codes are the nearest, and for given codes the best scales are a least-squares fit: the search starts from several
ranges, and fits and rounds in turn. Where a group's scale is d x an integer, d is fitted to the groups' scales, the
integers are tried one up and one down, and d is fitted again. A step is taken only if it makes the error smaller,
measured with float16 numbers as they will be stored.

Numbers are summed by halves, [0, n/2) + [n/2, n), which fixes the order of additions: a CPU, a GPU and the compiled
loops give the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from bitplan.formats.gguf.layouts import BlockParts, Layout
from bitplan.formats.scale_rules import flush_small, reciprocal

if TYPE_CHECKING:
    from torch import Tensor

FLOAT16_MAX = 65504.0
FIT_STEPS = 2  # how often the best start is fitted
REFINEMENTS = 2  # of d, after the integers of all groups were tried


class Start(NamedTuple):
    """A start of the search: the whole range (or the extreme) times `width`; `clip` is the share cut at the low end."""

    width: float
    clip: float = 0.0


class Sums(NamedTuple):
    """Sums over each group, with v the numbers of its nearest codes: w (x - value)^2, w v v, w v, w x v."""

    error: Tensor
    vv: Tensor
    v: Tensor
    xv: Tensor


def starts(layout: Layout) -> tuple[Start, ...]:
    """The starts that are tried: formats of few codes clip much, formats of many codes hardly."""
    count = layout.high - layout.low + 1
    if layout.has_min:
        few, some, many = (1.0, 0.9, 0.8, 0.7, 0.6), (1.0, 0.95, 0.9, 0.85, 0.8), (1.0, 0.97, 0.94, 0.9, 0.85)
        widths = {4: few, 16: some, 32: many}[count]
        return tuple(Start(width, clip) for width in widths for clip in ((0.5,) if width == 1.0 else (0.0, 0.5, 1.0)))
    if layout.table is not None:
        return tuple(Start(sign * (1.05 - 0.05 * step)) for sign in (1.0, -127 / 113) for step in range(9))
    if count == 8:
        return tuple(Start(sign * (1.1 - 0.075 * step)) for sign in (1.0, -4 / 3) for step in range(9))
    step = 0.02 if count == 32 else 0.015
    return tuple(Start(1.04 - step * index) for index in range(14 if count == 32 else 9))


# ---- sums of groups, by definition ----------------------------------------------------------------------------------


class TorchSums:
    """Plain torch. x [R, P, g]; w [P, g], or [1, g]; scale and low [R, P]; all float32."""

    def best_scales(self, x: Tensor, w: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """The scale and the low end with the least error over all starts, each fitted once, and the best again."""
        import torch

        best = best_low = least = None
        for scale, low in self._starting(x, layout):
            sums = self.sums(x, w, scale, low, layout)
            scale, low = fitted(x, w, sums, scale, low, layout)
            error = self.errors(x, w, scale, low, layout)
            if best is None or best_low is None or least is None:
                best, best_low, least = scale, low, error
            else:
                better = error < least
                best, best_low = torch.where(better, scale, best), torch.where(better, low, best_low)
                least = torch.where(better, error, least)
        assert best is not None
        assert best_low is not None
        assert least is not None
        for _ in range(FIT_STEPS):
            scale, low = fitted(x, w, self.sums(x, w, best, best_low, layout), best, best_low, layout)
            error = self.errors(x, w, scale, low, layout)
            better = error < least
            best, best_low = torch.where(better, scale, best), torch.where(better, low, best_low)
            least = torch.where(better, error, least)
        return best, best_low

    def sums(self, x: Tensor, w: Tensor, scale: Tensor, low: Tensor, layout: Layout) -> Sums:
        v = _values(_codes(x, scale, low, layout), layout)
        error = _error(x, w, v, scale, low)
        return Sums(error, by_halves(w * (v * v)), by_halves(w * v), by_halves(w * (x * v)))

    def errors(self, x: Tensor, w: Tensor, scale: Tensor, low: Tensor, layout: Layout) -> Tensor:
        """Give the error alone, which is the first of what `sums` gives."""
        return _error(x, w, _values(_codes(x, scale, low, layout), layout), scale, low)

    def codes(self, x: Tensor, scale: Tensor, low: Tensor, layout: Layout) -> Tensor:
        """Return the nearest codes, [R, P, g] uint8."""
        import torch

        return (_codes(x, scale, low, layout) - (0 if layout.table else layout.low)).to(torch.uint8)

    def _starting(self, x: Tensor, layout: Layout) -> list[tuple[Tensor, Tensor]]:
        import torch

        bottom, top = torch.aminmax(x, dim=-1)
        if not layout.has_min:
            extreme = torch.where(top > -bottom, top, bottom)
            end = float(layout.table[0] if layout.table else layout.low)
            return [(extreme * (start.width / end), torch.zeros_like(top)) for start in starts(layout)]
        if layout.has_groups:  # a minimum is only subtracted, so the low end is at most 0
            bottom = bottom.clamp(max=0.0)
        width = top - bottom
        return [
            (width * (start.width / layout.high), bottom + width * ((1.0 - start.width) * start.clip))
            for start in starts(layout)
        ]


def _codes(x: Tensor, scale: Tensor, low: Tensor, layout: Layout) -> Tensor:
    """The nearest codes as floats: their numbers, or indices of the table."""
    scaled = (x - low.unsqueeze(-1)) * reciprocal(flush_small(scale)).unsqueeze(-1)
    if layout.table is None:
        return scaled.round().clamp(layout.low, layout.high)
    indices = scaled.new_zeros(scaled.shape)
    for one, two in zip(layout.table, layout.table[1:], strict=False):
        indices += scaled > (one + two) / 2
    return indices


def _error(x: Tensor, w: Tensor, v: Tensor, scale: Tensor, low: Tensor) -> Tensor:
    difference = x - (v * scale.unsqueeze(-1) + low.unsqueeze(-1))
    return by_halves(w * (difference * difference))


def _values(codes: Tensor, layout: Layout) -> Tensor:
    import torch

    if layout.table is None:
        return codes
    return torch.tensor(layout.table, dtype=torch.float32, device=codes.device)[codes.int()]


def by_halves(numbers: Tensor) -> Tensor:
    """The sum over the last axis, whose length is a power of two, always in the same order."""
    while numbers.shape[-1] > 1:
        half = numbers.shape[-1] // 2
        numbers = numbers[..., :half] + numbers[..., half:]
    return numbers[..., 0]


def fitted(x: Tensor, w: Tensor, sums: Sums, scale: Tensor, low: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """The scale and low end that fit the codes best; unchanged where the codes do not determine them."""
    import torch

    alone = torch.where(sums.vv > 0, sums.xv / sums.vv, scale)
    if not layout.has_min:
        return alone, low
    weight, x_sum = by_halves(w), by_halves(w * x)
    spread = weight * sums.vv - sums.v * sums.v
    new = torch.where(spread > 0, (weight * sums.xv - x_sum * sums.v) / spread, scale)
    new_low = torch.where(spread > 0, (x_sum - new * sums.v) / weight, low)
    if not layout.has_groups:
        return new, new_low
    above = new_low > 0
    return torch.where(above, alone, new), torch.where(above, 0.0, new_low)


# ---- whole blocks --------------------------------------------------------------------------------------------------


class BlockSearch(Protocol):
    """The whole search: by sums, or in one launch on a GPU."""

    def parts(self, x: Tensor, w: Tensor, layout: Layout) -> BlockParts:
        """Search x [R, P, g] with weights w [P, g], or [1, g]: blocks, row by row, with codes."""


class SearchBySums:
    """The definition: `math` has the slow parts."""

    def __init__(self, math: TorchSums) -> None:
        self.math = math

    def parts(self, x: Tensor, w: Tensor, layout: Layout) -> BlockParts:
        math = self.math
        scale, low = math.best_scales(x, w, layout)
        if layout.has_groups:
            parts = _Blocks(x, w, layout, math).parts(scale, low)
        else:
            parts = _single(x, w, scale, low, layout, math)
        stored, added = layout.group_scales(parts)
        shape = x.shape[:2]
        added = stored.new_zeros(shape) if added is None else added.reshape(shape)
        codes = math.codes(x, stored.reshape(shape), added, layout)
        return parts._replace(codes=codes.reshape(-1, layout.numbers))


def search_blocks(matrix: Tensor, importance: Tensor | None, layout: Layout, search: BlockSearch) -> BlockParts:
    """Find the blocks, row by row, for [R, C] float32 numbers of whole blocks and a weight for each column."""
    x = matrix.reshape(matrix.shape[0], -1, layout.group)
    return search.parts(x, column_weights(matrix, importance, layout.group), layout)


def column_weights(matrix: Tensor, importance: Tensor | None, group: int) -> Tensor:
    """Scale [P, g] weights to a mean near 1; none is zero: columns without inputs count where there are no others."""
    import torch

    if importance is None:
        return matrix.new_ones((1, group))
    per_column = importance.to(matrix.device, torch.float64).reshape(-1)
    weights = (per_column / per_column.mean().clamp(min=1e-300)).clamp(1e-6, 1e6).float()
    return weights.repeat(matrix.shape[1] // per_column.numel()).reshape(-1, group)


def _half(numbers: Tensor) -> Tensor:
    """Numbers rounded to float16, in float32."""
    import torch

    return numbers.clamp(-FLOAT16_MAX, FLOAT16_MAX).to(torch.float16).float()


def _single(x: Tensor, w: Tensor, scale: Tensor, low: Tensor, layout: Layout, math: TorchSums) -> BlockParts:
    """Blocks of one group: the scale and the low end are float16 numbers themselves."""
    import torch

    scale, low = _half(scale), _half(low)
    sums = math.sums(x, w, scale, low, layout)
    for _ in range(REFINEMENTS):
        new, new_low = fitted(x, w, sums, scale, low, layout)
        new = _half(new)
        if layout.has_min:  # the best low end for the rounded scale
            new_low = _half((by_halves(w * x) - new * sums.v) / by_halves(w))
        tried = math.sums(x, w, new, new_low, layout)
        better = tried.error < sums.error
        scale, low = torch.where(better, new, scale), torch.where(better, new_low, low)
        sums = Sums(*(torch.where(better, one, two) for one, two in zip(tried, sums, strict=True)))
    halves = scale.reshape(-1).half(), low.reshape(-1).half()
    return BlockParts(scale, halves[0], halves[1] if layout.has_min else None)


class _Blocks:
    """Blocks of groups: d and dmin, and the integers that multiply them to a group's scale and minimum."""

    def __init__(self, x: Tensor, w: Tensor, layout: Layout, math: TorchSums) -> None:
        self.x, self.w, self.layout, self.math = x, w, layout, math
        self.grid = (x.shape[0], -1, layout.group_count)

    def parts(self, scale: Tensor, low: Tensor) -> BlockParts:
        import torch

        layout = self.layout
        assert layout.scale_low is not None
        assert layout.scale_high is not None
        sums = self.math.sums(self.x, self.w, scale, low, layout)
        curve = by_halves(self.w).expand(scale.shape)
        d, scales = self._integers(scale, sums.vv, layout.scale_low, layout.scale_high)
        dmin, mins = self._integers(-low, curve, 0, layout.scale_high if layout.has_min else 0)
        for _ in range(REFINEMENTS):
            scales, mins = self._neighbours(d, dmin, scales, mins)
            d, dmin = self._fitted(d, dmin, scales, mins)
        scales, mins = self._neighbours(d, dmin, scales, mins)
        flat = [part.reshape(-1, layout.group_count).to(torch.int8) for part in (scales, mins)]
        halves = [part.reshape(-1).half() for part in (d, dmin)]
        if not layout.has_min:
            return BlockParts(scale, halves[0], None, flat[0])
        return BlockParts(scale, halves[0], halves[1], flat[0], flat[1])

    def _integers(self, numbers: Tensor, weights: Tensor, least: int, most: int) -> tuple[Tensor, Tensor]:
        """Find [R, Q] steps in float16 and [R, Q, G] integers such that step x integer is near the numbers."""
        import torch

        numbers, weights = numbers.reshape(self.grid), weights.reshape(self.grid)
        if not most:
            return numbers.new_zeros(numbers.shape[:2]), torch.zeros_like(numbers)
        bottom, top = torch.aminmax(numbers, dim=-1)
        ends = [top / most]
        if least < 0:
            extreme = torch.where(top > -bottom, top, bottom)
            ends = [extreme / least, extreme / most]
        best = integers = error = None
        for end in ends:
            for multiple in (1.0, 0.985, 1.015, 0.97, 1.03):
                step = _half(end * multiple)
                tried = (numbers * reciprocal(step).unsqueeze(-1)).round().clamp(least, most)
                difference = numbers - tried * step.unsqueeze(-1)
                lost = by_halves(weights * (difference * difference))
                if best is None or integers is None or error is None:
                    best, integers, error = step, tried, lost
                    continue
                better = lost < error
                best, error = torch.where(better, step, best), torch.where(better, lost, error)
                integers = torch.where(better.unsqueeze(-1), tried, integers)
        assert best is not None
        assert integers is not None
        return best, integers

    def _groups(self, d: Tensor, dmin: Tensor, scales: Tensor, mins: Tensor) -> tuple[Tensor, Tensor]:
        """The scale and low end of each group, [R, P]."""
        scale = (d.unsqueeze(-1) * scales).reshape(self.x.shape[:2])
        return scale, -(dmin.unsqueeze(-1) * mins).reshape(self.x.shape[:2])

    def _errors(self, d: Tensor, dmin: Tensor, scales: Tensor, mins: Tensor) -> Tensor:
        scale, low = self._groups(d, dmin, scales, mins)
        return self.math.errors(self.x, self.w, scale, low, self.layout).reshape(self.grid)

    def _neighbours(self, d: Tensor, dmin: Tensor, scales: Tensor, mins: Tensor) -> tuple[Tensor, Tensor]:
        """Move integer scales and minima of groups by -1, 0 or 1, whichever gives the least error; return them."""
        import torch

        layout = self.layout
        best, best_min = scales, mins
        least = self._errors(d, dmin, scales, mins)
        for up in (-1.0, 0.0, 1.0):
            for up_min in (-1.0, 0.0, 1.0) if layout.has_min else (0.0,):
                if not up and not up_min:
                    continue
                tried = (scales + up).clamp(layout.scale_low, layout.scale_high)
                tried_min = (mins + up_min).clamp(0, layout.scale_high)
                error = self._errors(d, dmin, tried, tried_min)
                better = error < least
                best, best_min = torch.where(better, tried, best), torch.where(better, tried_min, best_min)
                least = torch.where(better, error, least)
        return best, best_min

    def _fitted(self, d: Tensor, dmin: Tensor, scales: Tensor, mins: Tensor) -> tuple[Tensor, Tensor]:
        """Fit d and dmin by least squares to the present codes and integers, where that makes the error smaller."""
        import torch

        groups = self._groups(d, dmin, scales, mins)
        sums = Sums(*(part.reshape(self.grid) for part in self.math.sums(self.x, self.w, *groups, self.layout)))
        weight = by_halves(self.w).expand(self.x.shape[:2]).reshape(self.grid)
        x_sum = by_halves(self.w * self.x).reshape(self.grid)
        aa, ax = by_halves(sums.vv * (scales * scales)), by_halves(sums.xv * scales)
        new = torch.where(aa > 0, ax / aa, d)
        new_min = dmin
        if self.layout.has_min:
            ab = by_halves(sums.v * (scales * mins))
            bb, bx = by_halves(weight * (mins * mins)), by_halves(x_sum * mins)
            spread = aa * bb - ab * ab
            both = spread > aa * bb * 1e-6
            new = torch.where(both, (ax * bb - bx * ab) / spread, new)
            new_min = torch.where(both, (ax * ab - bx * aa) / spread, dmin)
        new, new_min = _half(new), _half(new_min)
        error = by_halves(self._errors(new, new_min, scales, mins))
        better = error < by_halves(sums.error)
        return torch.where(better, new, d), torch.where(better, new_min, dmin)
