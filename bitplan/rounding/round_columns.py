"""Rounding some columns of all rows, in plain torch: the definition, which numba and Triton equal.

A piece is [R, g]: the columns that are rounded before their error is spread to the others. Numbers of a piece stand for
steps * code + offsets; `parts` says which of the S steps [R, S] a column has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitplan.formats.scale_rules import reciprocal
from bitplan.rounding.layout import Grid

MOST_NUMBERS = 2**24  # of one temporary


def round_piece(
    piece: Tensor, factor: Tensor, steps: Tensor, offsets: Tensor, parts: Tensor, grid: Grid
) -> tuple[Tensor, Tensor]:
    """Codes [R, g] and errors [R, g], column by column: the error of each goes to those after it.

    `factor` [g, g] is upper triangular: row j says how columns after j make up for an error of column j, and its
    diagonal is the unit in which errors are counted.
    """
    left, codes, errors = piece.clone(), torch.empty_like(piece), torch.empty_like(piece)
    inverses = reciprocal(steps)
    for j, part in enumerate(parts.tolist()):
        codes[:, j] = grid.nearest((left[:, j] - offsets[:, part]) * inverses[:, part])
        value = codes[:, j] * steps[:, part] + offsets[:, part]
        errors[:, j] = (left[:, j] - value) / factor[j, j]
        left[:, j + 1 :] -= errors[:, j, None] * factor[j, j + 1 :]
    return codes, errors


def cost_of_scales(piece: Tensor, factor: Tensor, scales: Tensor, grid: Grid) -> Tensor:
    """[R, C] scales -> [R, C] squared errors that `round_piece` would make with each of them."""
    rows = max(1, MOST_NUMBERS // max(1, scales.shape[1] * piece.shape[1]))
    return torch.cat(
        [
            _cost_of_scales(piece[at : at + rows], factor, scales[at : at + rows], grid)
            for at in range(0, len(piece), rows)
        ]
    )


def _cost_of_scales(piece: Tensor, factor: Tensor, scales: Tensor, grid: Grid) -> Tensor:
    left = piece.t().unsqueeze(-1).repeat(1, 1, scales.shape[1])  # [g, R, C]
    inverses, cost = reciprocal(scales), torch.zeros_like(scales)
    for j in range(piece.shape[1]):
        error = (left[j] - grid.nearest(left[j] * inverses) * scales) / factor[j, j]
        cost += error.square()
        left[j + 1 :] -= error * factor[j, j + 1 :, None, None]
    return cost


def sweep_piece(
    gradient: Tensor, codes: Tensor, hessian: Tensor, steps: Tensor, parts: Tensor, grid: Grid
) -> tuple[Tensor, Tensor]:
    """Better codes [R, g] one column at a time, all others fixed, and by how much the values changed [R, g].

    `gradient` [R, g] is (weight - value) @ hessian of the piece's columns.
    """
    codes, changes, gradient = codes.clone(), torch.empty_like(codes), gradient.clone()
    inverses = reciprocal(steps)
    for j, part in enumerate(parts.tolist()):
        step = steps[:, part]
        best = codes[:, j] * step + gradient[:, j] / hessian[j, j]
        better = torch.where(step == 0, codes[:, j], grid.nearest(best * inverses[:, part]))
        changes[:, j] = (better - codes[:, j]) * step
        codes[:, j] = better
        gradient -= changes[:, j, None] * hessian[j]
    return codes, changes


def weighted_cost(piece: Tensor, weights: Tensor, scales: Tensor, grid: Grid) -> Tensor:
    """[R, C] scales -> [R, C] errors: the sum over columns of weights * (number - value)^2."""
    inverses = reciprocal(scales)
    cost = torch.zeros_like(scales)
    for j in range(piece.shape[1]):
        column = piece[:, j, None]
        cost += weights[j] * (column - grid.nearest(column * inverses) * scales).square()
    return cost
