"""Format: a name that fixes a byte layout.

A format is an element (which numbers), a block (how many share a scale), a scale storage and a
packing. Blocks lie along rows of a matrix: a tensor is seen as [rows, cols], see `matrix_shape`.
Two byte layouts never share a name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bitplan.formats.elements import ITEM_BYTES, Element, Packing, torch_dtype
from bitplan.formats.scale_rules import (
    MSE_DEEP,
    MSE_FINE,
    MSE_POWERS,
    SCALE_RULES,
    PowerOfTwoScales,
    ScaleRule,
    ScaleStorage,
    limit_of_blocks,
    power_of_two_scale,
    reciprocal,
    scale_of_limit,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NARROW_KERNEL = 32
PartShapes = dict[str, tuple["torch.dtype", tuple[int, ...]]]


@dataclass(frozen=True)
class Block:
    """A block of `rows` x `cols` numbers that share a scale; cols None is a whole row, both None the whole tensor."""

    rows: int | None
    cols: int | None

    @property
    def is_tensor(self) -> bool:
        return self.rows is None


TENSOR = Block(None, None)
ROW = Block(1, None)


@dataclass(frozen=True)
class Format:
    """One number format. A format without an element is a plain cast to `storage`."""

    name: str
    description: str
    storage_name: str
    element: Element | None = None
    block: Block = TENSOR
    scales: ScaleStorage | None = None
    packing: Packing | None = None
    default_rule: ScaleRule = "absmax"
    zero_point: bool = False
    # Stored interleaved, block by block (scale first), as GGUF and poly's Q4_0 do.
    interleaved: bool = False
    # The type in which scales and rounding are computed: float64 if float32 cannot hold the codes.
    work_name: str = "float32"
    # Whether x / scale is computed by division, as in poly; block formats multiply by the reciprocal, which is faster.
    divides: bool = False

    @property
    def storage(self) -> torch.dtype:
        return torch_dtype(self.storage_name)

    @property
    def work(self) -> torch.dtype:
        return torch_dtype(self.work_name)

    @property
    def is_cast(self) -> bool:
        return self.element is None

    @property
    def is_opaque(self) -> bool:
        """Whether blocks are bytes that hold codes and scales together, so that `data` is the only part."""
        return False

    @property
    def rules(self) -> tuple[ScaleRule, ...]:
        if self.element is None:
            return ()
        return tuple(rule for rule in SCALE_RULES if rule != "absmean" or self.element.gauss is not None)

    @property
    def power_of_two_scales(self) -> bool:
        return isinstance(self.scales, PowerOfTwoScales)

    @property
    def mse_multiples(self) -> tuple[float, ...]:
        """The multiples of absmax that scale_rule="mse" tries."""
        if self.power_of_two_scales:
            return MSE_POWERS
        return MSE_DEEP if self.element is not None and self.element.bits <= 4 else MSE_FINE

    # ---- how numbers become codes; GGUF's formats override the first three ------------------------------------------

    def limits(self, blocks: Tensor, rule: ScaleRule, percentile: float) -> Tensor:
        """Give the limit of each block, [B], for [B, g] numbers, by any rule but `mse`, which starts from absmax."""
        assert self.element is not None
        return limit_of_blocks(blocks, rule, gauss=self.element.gauss, percentile=percentile)

    def scale_for(self, limit: Tensor) -> Tensor:
        """The scale for a block whose largest magnitude is `limit`, before it is rounded to its stored type."""
        assert self.element is not None
        if self.power_of_two_scales:
            return power_of_two_scale(limit, self.element.limit)
        return scale_of_limit(limit, self.element.limit)

    def quantize(
        self, blocks: Tensor, exact_scales: Tensor, base: Tensor | None, zero_point: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Turn [B, g] numbers into codes: given [B] exact scales, return [B, g] codes and [B] scales as stored."""
        import torch

        assert self.element is not None
        assert self.scales is not None
        stored = self.scales.store(exact_scales, base)
        column = self.scales.load(stored, base).unsqueeze(-1)
        if self.element.is_sign and zero_point is None:  # a quotient of the smallest numbers would be zero
            return self.element.round(torch.where(column == 0, 0.0, blocks)), stored
        scaled = torch.where(column == 0, 0.0, blocks / column) if self.divides else blocks * reciprocal(column)
        if zero_point is not None:  # rounded before it is shifted, so that ties do not depend on the zero point
            scaled = scaled.round() + self.element.value(zero_point, self.work)
        return self.element.round(scaled), stored

    def dequantize(self, codes: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
        """Turn [B, g] codes and [B] loaded scales back into [B, g] numbers, in the working precision."""
        assert self.element is not None
        values = self.element.value(codes, self.work)
        if zero_point is not None:
            values = values - self.element.value(zero_point, self.work)
        return values * scale.to(self.work).unsqueeze(-1)

    # ---- shapes of the parts: pure functions of the tensor's shape ---------------------------------------------------

    def bits_per_weight(self, shape: tuple[int, ...]) -> float:
        count = math.prod(shape)
        return 8 * self.nbytes(shape) / count if count else 0.0

    def matrix_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """How a tensor is seen as [rows, cols].

        The last axis is cols. A tensor of three or more axes whose last is narrower than 32 is a
        convolution kernel: there cols are all axes but the first.
        """
        if self.block.is_tensor:
            return 1, math.prod(shape)
        lead = self._lead(shape)
        return math.prod(lead), math.prod(shape[len(lead) :])

    def padded_cols(self, cols: int) -> int:
        """Cols rounded up to whole blocks; not for blocks of several rows, which may be incomplete at the edge."""
        if self.block.cols is None or self.block.rows != 1:
            return cols
        return -(-cols // self.block.cols) * self.block.cols

    def data_cols(self, cols: int) -> int:
        """How many stored items a row of `cols` numbers takes."""
        padded = self.padded_cols(cols)
        return padded if self.packing is None else self.packing.packed_length(padded)

    def grid(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """How many blocks a tensor of this shape has, down and across."""
        if self.block.is_tensor:
            return 1, 1
        rows, cols = self.matrix_shape(shape)
        return -(-rows // (self.block.rows or 1)), 1 if self.block.cols is None else -(-cols // self.block.cols)

    def part_shapes(self, shape: tuple[int, ...]) -> PartShapes:
        """Every part an Encoded of this shape has: name -> (dtype, shape), in storage order."""
        return {part: (torch_dtype(name), size) for part, (name, size) in self.part_layouts(shape).items()}

    def part_layouts(self, shape: tuple[int, ...]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """List the parts of a tensor of this shape as `part_shapes` does, with names of dtypes: this needs no torch."""
        parts = {"data": (self.storage_name, self._data_shape(shape))}
        if self.scales is not None:
            down, across = self.grid(shape)
            lead = self._lead(shape) if self.block.rows == 1 else (down,)
            parts["scales"] = (self.scales.dtype_name, () if self.block.is_tensor else (*lead, across))
            if self.scales.needs_base:
                parts["base"] = ("float32", ())
        if self.zero_point:
            assert self.element is not None
            parts["zero_point"] = (self.element.codes_name, ())
        return parts

    def nbytes(self, shape: tuple[int, ...]) -> int:
        return sum(math.prod(size) * ITEM_BYTES[name] for name, size in self.part_layouts(shape).values())

    def _lead(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The axes of a shape that make up the rows of its matrix."""
        if len(shape) > 2 and shape[-1] < NARROW_KERNEL:
            return shape[:1]
        return shape[:-1]

    def _data_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self.is_cast:
            return shape
        cols = self.matrix_shape(shape)[1]
        width = self.data_cols(cols)
        if self.packing is None and width == cols:
            return shape
        return (width,) if self.block.is_tensor else (*self._lead(shape), width)


# ---- tiles and blocks ------------------------------------------------------------------------------------------------

TILE_NUMBERS = 2**20  # a multiple of 8, so that no packed byte lies in two tiles
GPU_TILE_NUMBERS = 2**24  # a GPU takes a million numbers in less time than it takes to start an operation
Tile = tuple[slice, slice]


def tiles(fmt: Format, rows: int, cols: int, device: torch.device | None = None) -> Iterator[Tile]:
    """Slices of a matrix of about a million numbers, of more on a GPU, each made of whole blocks.

    Pieces are whole rows, unless one block is the whole tensor: then its single row is cut.
    """
    if not rows * cols:
        return
    numbers = TILE_NUMBERS if device is None or device.type == "cpu" else GPU_TILE_NUMBERS
    height = fmt.block.rows
    if height is None:
        for start in range(0, cols, numbers):
            yield slice(0, 1), slice(start, min(start + numbers, cols))
        return
    step = max(1, numbers // cols // height) * height
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows)), slice(0, cols)


def tile_of_grid(fmt: Format, grid: Tensor, tile: Tile) -> Tensor:
    """The rows of a per-block [down, across] tensor that belong to a tile: a view."""
    height = fmt.block.rows or 1
    return grid[tile[0].start // height : -(-tile[0].stop // height)]


def to_blocks(fmt: Format, piece: Tensor) -> Tensor:
    """Cut [r, c] numbers into blocks, [B, g], in row-major order of the grid; ragged edges are filled with zeros."""
    height, width = fmt.block.rows or 1, fmt.block.cols
    if width is None:
        return piece
    rows, cols = piece.shape
    down, across = -(-rows // height), -(-cols // width)
    if (down * height, across * width) != (rows, cols):
        filled = piece.new_zeros((down * height, across * width))
        filled[:rows, :cols] = piece
        piece = filled
    return piece.reshape(down, height, across, width).transpose(1, 2).reshape(down * across, height * width)


def from_blocks(fmt: Format, blocks: Tensor, rows: int, cols: int) -> Tensor:
    """The inverse of `to_blocks`, filling dropped: [B, g] -> [rows, cols]."""
    height, width = fmt.block.rows or 1, fmt.block.cols
    if width is None:
        return blocks
    down, across = -(-rows // height), -(-cols // width)
    piece = blocks.reshape(down, across, height, width).transpose(1, 2).reshape(down * height, across * width)
    return piece[:rows, :cols]
