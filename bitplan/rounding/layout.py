"""The numbers that a format's codes stand for (`Grid`), how its blocks lie on a matrix [R, K] (`ScaledBlocks`), and how
codes and scales become an Encoded. A grid is arithmetic: rounding many candidates at once needs no table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bitplan.formats import Encoded
from bitplan.formats.elements import Element, IntegerElement
from bitplan.formats.format import Format, to_blocks
from bitplan.formats.gguf.blocks import GgufVectors
from bitplan.formats.gguf.grids import NUMBERS, SIGNED, VectorLayout

# ---- numbers of codes ------------------------------------------------------------------------------------------------


_EXPONENT = 0x7F800000  # of a float32
_FLOATS = {"e2m1": (1, 0.5), "e4m3": (3, 2.0**-9), "e5m2": (2, 2.0**-16)}  # mantissa bits, smallest step
MOST_BITS = 8


@dataclass(frozen=True)
class Grid:
    """Numbers of one element in units of its scale.

    Integers: all from `low` to `high`. Floats: `mantissa` is 2^-(bits of the mantissa), so that numbers of a binade
    are `mantissa` times its power of two apart, and never less than `least`. With a `table`: its numbers, rising.
    """

    low: float
    high: float
    mantissa: float = 0.0
    least: float = 1.0
    table: tuple[float, ...] | None = None

    @property
    def is_float(self) -> bool:
        return self.mantissa > 0

    def nearest(self, scaled: Tensor) -> Tensor:
        """The nearest number of the grid to each float32, ties to even codes, in a table to the smaller number."""
        if self.table is not None:
            numbers = scaled.new_tensor(self.table)
            return numbers[torch.bucketize(scaled, (numbers[:-1] + numbers[1:]) / 2)]
        if not self.is_float:
            return scaled.round().clamp(self.low, self.high)
        power = (scaled.view(torch.int32) & _EXPONENT).view(torch.float32)
        step = (power * self.mantissa).clamp(min=self.least)
        return ((scaled / step).round() * step).clamp(self.low, self.high)


def grid_of(element: Element | None) -> Grid | None:
    """None for elements whose rounding leaves nothing to gain (16 bits and more) or to choose (the sign alone)."""
    if element is None or element.bits > MOST_BITS:
        return None
    if isinstance(element, IntegerElement):
        return Grid(float(element.low), float(element.high))
    if element.name in _FLOATS:
        bits, least = _FLOATS[element.name]
        return Grid(-element.limit, element.limit, math.ldexp(1.0, -bits), least)
    return None


# ---- blocks on a matrix ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScaledBlocks:
    """Blocks of `height` rows and `width` columns on `rows` x `cols` numbers, of which `filled` columns are stored;
    `together` columns are rounded at once.
    """

    rows: int
    cols: int
    filled: int
    height: int
    width: int
    together: int = 1

    @property
    def across(self) -> int:
        return -(-self.filled // self.width)

    @property
    def strips(self) -> int:
        return -(-self.rows // self.height)

    def sum_of_strips(self, per_row: Tensor) -> Tensor:
        """Add the rows that share scales: [R, ...] becomes [strips, ...]."""
        if self.height == 1:
            return per_row
        missing = self.strips * self.height - self.rows
        padded = torch.cat([per_row, per_row.new_zeros((missing, *per_row.shape[1:]))]) if missing else per_row
        return padded.reshape(self.strips, self.height, *per_row.shape[1:]).sum(1)

    def largest_of_strips(self, per_row: Tensor) -> Tensor:
        if self.height == 1:
            return per_row
        missing = self.strips * self.height - self.rows
        padded = torch.cat([per_row, per_row.new_zeros(missing)]) if missing else per_row
        return padded.reshape(self.strips, self.height).amax(1)

    def to_rows(self, per_strip: Tensor) -> Tensor:
        """Repeat what strips have, [strips, ...], for each of their rows, [R, ...]."""
        return per_strip if self.height == 1 else per_strip.repeat_interleave(self.height, 0)[: self.rows]


def layout_of(fmt: Format, shape: tuple[int, ...]) -> ScaledBlocks:
    """A block that is the whole tensor is seen as the matrix's, not as one long row."""
    if fmt.block.is_tensor:
        rows, cols = math.prod(shape[:-1]), shape[-1]
        return ScaledBlocks(rows, cols, cols, max(rows, 1), max(cols, 1))
    rows, cols = fmt.matrix_shape(shape)
    filled = fmt.padded_cols(cols)
    together = SIGNED if isinstance(fmt, GgufVectors) else 1
    return ScaledBlocks(rows, cols, filled, fmt.block.rows or 1, fmt.block.cols or max(filled, 1), together)


def scales_of(encoded: Encoded, layout: ScaledBlocks) -> Tensor:
    """Return the scales as the format loads them, [strips, across] float32."""
    assert encoded.scales is not None
    assert encoded.fmt.scales is not None
    return encoded.fmt.scales.load(encoded.scales, encoded.base).float().reshape(layout.strips, layout.across)


def assemble(fmt: Format, shape: tuple[int, ...], codes: Tensor, stored: Tensor, base: Tensor | None) -> Encoded:
    """Make an Encoded of codes [R, filled], given as the numbers they stand for, and scales [strips, across]."""
    assert fmt.element is not None
    parts = fmt.part_shapes(shape)
    packed = fmt.element.round(codes + 0.0)  # + 0.0: no code for -0
    if fmt.packing is not None:
        blocks = packed.reshape(1, -1) if fmt.block.is_tensor else to_blocks(fmt, packed)
        packed = fmt.packing.pack(blocks)
    return Encoded(fmt, shape, packed.reshape(parts["data"][1]), stored.reshape(parts["scales"][1]), base)


def with_rows_of(encoded: Encoded, other: Encoded, layout: ScaledBlocks, strips: Tensor) -> Encoded:
    """Copy `encoded`, but take the rows of the strips in a mask from `other`."""
    if not bool(strips.any()):
        return encoded
    if layout.strips == 1:
        return other
    rows, chosen = layout.to_rows(strips), {}
    for part, which in (("data", rows), ("scales", strips)):
        if part not in encoded.parts:
            continue
        ours, theirs = (one.parts[part].reshape(len(which), -1).view(torch.uint8) for one in (encoded, other))
        mixed = torch.where(which.unsqueeze(-1), theirs, ours)
        chosen[part] = mixed.view(encoded.parts[part].dtype).reshape(encoded.parts[part].shape)
    return Encoded(encoded.fmt, encoded.shape, chosen["data"], chosen.get("scales"), encoded.base)


def rows_of(encoded: Encoded, layout: ScaledBlocks, rows: Tensor) -> Encoded:
    """An encoding of some rows of an encoded matrix, whose rows must share no scale."""
    fmt, shape = encoded.fmt, (len(rows), layout.cols)
    shapes = fmt.part_shapes(shape)
    parts = {
        part: encoded.parts[part].reshape(layout.rows, -1)[rows].reshape(shapes[part][1])
        for part in ("data", "scales")
        if part in encoded.parts
    }
    return Encoded(fmt, shape, parts["data"], parts.get("scales"), encoded.base)


def join_rows(pieces: Sequence[Encoded], like: Encoded, order: Tensor) -> Encoded:
    """The inverse of `rows_of`: one encoding of `pieces`, of which the i-th row belongs at row `order[i]`."""
    parts = {}
    for part in ("data", "scales"):
        if part in like.parts:
            joined = torch.cat([piece.parts[part].reshape(piece.shape[0], -1) for piece in pieces])
            in_order = torch.empty_like(joined)
            in_order[order] = joined
            parts[part] = in_order.reshape(like.parts[part].shape)
    return Encoded(like.fmt, like.shape, parts["data"], parts.get("scales"), like.base)


def unordered(ordered: Tensor, at: Tensor) -> Tensor:
    """Undo an order of columns: column j of `ordered` goes back to column `at[j]`."""
    columns = torch.empty_like(ordered)
    columns[:, at] = ordered
    return columns


@dataclass
class VectorScales:
    """The scales of [R, filled] numbers in vectors: d [R, blocks] and multiples as stored [R, groups], in float32."""

    layout: VectorLayout
    d: Tensor
    stored: Tensor

    def steps(self) -> Tensor:
        """The scale of each group, float32 [R, groups]: the numbers of its codebook vectors are multiplied by it."""
        wide = self.d.repeat_interleave(NUMBERS // self.layout.group, 1)
        return wide * self.layout.multiples(self.stored)

    def values(self, v: Tensor) -> Tensor:
        return v * self.steps().repeat_interleave(self.layout.group, 1)


def inverse_of(block: Tensor) -> Tensor:
    """The inverse of [..., 8, 8] parts of a Hessian, computed in float64."""
    inverse: Tensor = torch.linalg.inv(block.double())
    return inverse.float()
