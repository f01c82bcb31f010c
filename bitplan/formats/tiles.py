"""Tiles and blocks: walking a matrix in pieces of bounded size, and cutting a piece into blocks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bitplan.formats.format import Format

TILE_NUMBERS = 2**20  # a multiple of 8, so that no packed byte lies in two tiles
GPU_TILE_NUMBERS = 2**24  # a GPU takes a million numbers in less time than it takes to start an operation
Tile = tuple[slice, slice]


def tiles(fmt: Format, rows: int, cols: int, device: torch.device | None = None) -> Iterator[Tile]:
    """Pieces of about a million numbers, of more on a GPU, each made of whole blocks.

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
