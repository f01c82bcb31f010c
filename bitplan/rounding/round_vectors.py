"""Rounding GGUF's blocks of vectors (IQ2, IQ3) so that columns make up for each other's errors.

Eight columns are rounded at once, to the nearest vector or two with legal signs, each column weighted by what is left
to it by the columns after it; the errors of the eight go to the columns after them as those of single columns do.
Scales of a block are searched just before its columns are rounded. Sweeps then move the multiples of groups, d, and
eight numbers at a time to the vector that is nearest to their best place, each only where the outputs' error falls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitplan.formats.gguf.blocks import GgufVectors
from bitplan.formats.gguf.grids import (
    MOST,
    NUMBERS,
    SIGNED,
    TorchVectors,
    VectorLayout,
    VectorParts,
    VectorSearch,
    as_half,
    codebook,
    search_vectors,
    signs_of,
)
from bitplan.formats.gguf.search import column_weights
from bitplan.rounding.error_compensation import OrderedFactor
from bitplan.rounding.layout import VectorScales, inverse_of, unordered
from bitplan.rounding.round_columns import is_compiled
from bitplan.rounding.scale_search import move_if_better


def round_vectors(matrix: Tensor, by: OrderedFactor, fmt: GgufVectors, sweeps: int) -> Tensor:
    """Round numbers [R, filled] to a format of vectors; returns the stored bytes [R, bytes per row]."""
    layout, search = fmt.vectors, search_for(matrix)
    v, scales = _compensate(matrix, by, layout, search)
    gradient = (matrix - scales.values(v)) @ by.damped
    if is_compiled(matrix):
        from bitplan.rounding.round_columns_cpu import sweep_vectors
    else:
        sweep_vectors = _sweep_vectors
    sweep_vectors(gradient, v, by.damped, scales, sweeps)
    ones = torch.ones_like(v[:1, :NUMBERS])
    nearest = search.nearest(
        v.reshape(-1, NUMBERS), ones, torch.ones_like(v[:, 0]).repeat(v.shape[1] // NUMBERS), layout
    )
    stored = scales.stored.reshape(len(nearest.vectors), -1).to(torch.uint8)
    blocks = VectorParts(nearest.vectors, nearest.signs, scales.d.reshape(-1).half(), stored)
    return layout.pack(blocks).reshape(len(matrix), -1)


def search_for(matrix: Tensor) -> VectorSearch:
    if not is_compiled(matrix):
        return TorchVectors()
    from bitplan.formats.gguf.cpu_vector_search import CompiledVectors

    return CompiledVectors()


def _compensate(
    matrix: Tensor, by: OrderedFactor, layout: VectorLayout, search: VectorSearch
) -> tuple[Tensor, VectorScales]:
    """Round block after block, errors passed on to later columns: the vectors' numbers [R, filled], and scales."""
    round_piece: Any = _round_piece
    if is_compiled(matrix):
        from bitplan.rounding.round_columns_cpu import round_vector_piece as round_piece
    rows, filled = matrix.shape
    scales = VectorScales(
        layout, matrix.new_empty(rows, filled // NUMBERS), matrix.new_empty(rows, filled // layout.group)
    )
    left, v, per_block = matrix[:, by.columns].contiguous(), torch.empty_like(matrix), NUMBERS // layout.group
    for at_block, block in enumerate(by.blocks):
        columns = slice(at_block * NUMBERS, (at_block + 1) * NUMBERS)
        inside, factor = by.columns[columns] - block * NUMBERS, by.factor[columns, columns]
        weights = factor.diagonal().square().reciprocal()
        numbers, ordered = torch.empty_like(left[:, columns]), torch.empty_like(weights)
        numbers[:, inside], ordered[inside] = left[:, columns], weights
        blocks = search_vectors(numbers, column_weights(numbers, ordered, layout.group), layout, search)
        scales.d[:, block] = blocks.d.float()
        scales.stored[:, block * per_block : (block + 1) * per_block] = blocks.scales.float()
        steps = blocks.d.float().unsqueeze(1) * layout.multiples(blocks.scales)
        unit_steps = steps[:, inside[::SIGNED] // layout.group]
        v[:, columns], errors = round_piece(left[:, columns], factor, weights, unit_steps, layout)
        rest = left[:, columns.stop :]
        if rest.shape[1]:
            rest -= errors @ by.factor[columns, columns.stop :]
    return unordered(v, by.columns), scales


def _round_piece(
    piece: Tensor, factor: Tensor, weights: Tensor, steps: Tensor, layout: VectorLayout
) -> tuple[Tensor, Tensor]:
    """Vectors' numbers and errors, [R, n], of columns in order; `steps` [R, n / 8] are their scales."""
    left, v, errors = piece.clone(), torch.empty_like(piece), torch.empty_like(piece)
    for unit in range(piece.shape[1] // SIGNED):
        at = slice(unit * SIGNED, (unit + 1) * SIGNED)
        v[:, at] = _nearest(left[:, at], weights[at], steps[:, unit], layout)
        for j in range(at.start, at.stop):
            errors[:, j] = (left[:, j] - v[:, j] * steps[:, unit]) / factor[j, j]
            left[:, j + 1 :] -= errors[:, j, None] * factor[j, j + 1 :]
    return v, errors


def _nearest(x: Tensor, weights: Tensor, steps: Tensor, layout: VectorLayout) -> Tensor:
    """The numbers, with signs, of the vectors that are nearest to x [R, 8] by weighted distance."""
    nearest = TorchVectors().nearest(x.contiguous(), weights.reshape(1, -1).contiguous(), steps, layout)
    numbers: Tensor = codebook(layout.ggml_type, x.device).numbers[nearest.vectors.long()].flatten(1)
    return numbers * signs_of(nearest.signs)


def _sweep_vectors(gradient: Tensor, v: Tensor, hessian: Tensor, scales: VectorScales, sweeps: int) -> None:
    """Improve the scales and vectors' numbers `v`, in place; `gradient` [R, K] is (weight - value) @ hessian."""
    layout, per_block = scales.layout, NUMBERS // scales.layout.group
    for _ in range(sweeps):
        for block in range(v.shape[1] // NUMBERS):
            first, d = block * NUMBERS, scales.d[:, block]
            for group in range(block * per_block, (block + 1) * per_block):
                at = slice(group * layout.group, (group + 1) * layout.group)
                now = layout.multiples(scales.stored[:, group])
                rise, curve = (v[:, at] * gradient[:, at]).sum(1), ((v[:, at] @ hessian[at, at]) * v[:, at]).sum(1)
                wanted = torch.where(d > 0, (now + rise / curve / d) / layout.unit, 1.0)
                tried = ((wanted - 1) * 0.5).round().clamp(0, MOST)
                move = move_if_better((layout.multiples(tried) - now) * d, rise, curve)
                scales.stored[:, group] = torch.where(move != 0, tried, scales.stored[:, group])
                gradient -= (move.unsqueeze(1) * v[:, at]) @ hessian[at]
            at = slice(first, first + NUMBERS)
            multiples = layout.multiples(scales.stored[:, block * per_block : (block + 1) * per_block])
            way = v[:, at] * multiples.repeat_interleave(layout.group, 1)
            rise, curve = (way * gradient[:, at]).sum(1), ((way @ hessian[at, at]) * way).sum(1)
            tried = as_half((d + rise / curve).clamp(min=0.0))
            move = move_if_better(tried - d, rise, curve)
            scales.d[:, block] = torch.where(move != 0, tried, d)
            gradient -= (move.unsqueeze(1) * way) @ hessian[at]
            steps = scales.d[:, block, None] * multiples
            for unit in range(NUMBERS // SIGNED):
                at = slice(first + unit * SIGNED, first + (unit + 1) * SIGNED)
                own_hessian, step = hessian[at, at], steps[:, unit * SIGNED // layout.group]
                best = v[:, at] * step.unsqueeze(1) + gradient[:, at] @ inverse_of(own_hessian)
                tried = _nearest(best, own_hessian.diagonal(), step, layout)
                change = (tried - v[:, at]) * step.unsqueeze(1)
                gain = 2 * (change * gradient[:, at]).sum(1) - ((change @ own_hessian) * change).sum(1)
                change = torch.where((gain > 0).unsqueeze(1), change, 0.0)
                v[:, at] = torch.where((gain > 0).unsqueeze(1), tried, v[:, at])
                gradient -= change @ hessian[at]
