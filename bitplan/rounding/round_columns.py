"""Rounding some columns of all rows, in plain torch: the definition, which numba and Triton equal.

A piece is [R, g]: the columns that are rounded before their error is spread to the others. Numbers of a piece stand for
steps * code + offsets; `parts` says which of the S steps [R, S] a column has.

`loops_for` says which loops round a matrix: these, or compiled ones where numba (CPUs) or Triton (GPUs) is installed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from bitplan.formats.dispatch import parts_of, size_with_others
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
    """Return the squared errors [R, C] that `round_piece` would make with each of the scales [R, C]."""
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
    """Return the error [R, C] of rounding to nearest with each of the scales [R, C]: the sum over columns of weights *
    (number - value)^2.
    """
    inverses = reciprocal(scales)
    cost = torch.zeros_like(scales)
    for j in range(piece.shape[1]):
        column = piece[:, j, None]
        cost += weights[j] * (column - grid.nearest(column * inverses) * scales).square()
    return cost


# ---- which loops -----------------------------------------------------------------------------------------------------


# Below this, compiling for the first time takes longer than plain torch.
SMALLEST_FOR_CPU = 2**16


def loops_for(matrix: Tensor) -> Any:
    """The module with `round_piece`, `cost_of_scales`, `sweep_piece` and `weighted_cost` for this matrix."""
    if in_batches(matrix):
        return importlib.import_module("bitplan.rounding.triton_rounding")
    name = "round_columns_cpu" if is_compiled(matrix) else "round_columns"
    return importlib.import_module(f"bitplan.rounding.{name}")


def in_batches(matrix: Tensor) -> bool:
    """Whether many columns are rounded in one launch: on GPUs."""
    return matrix.device.type == "cuda" and _has("triton")


def is_compiled(matrix: Tensor) -> bool:
    return matrix.device.type == "cpu" and size_with_others(matrix.numel()) >= SMALLEST_FOR_CPU and _has("numba")


def rounding_rows_of(matrix: Tensor) -> AbstractContextManager[None]:
    """Some rows of a weight at a time take the loops that the whole of it would."""
    return parts_of(matrix.numel())


def compiled_on_threads(count: int) -> AbstractContextManager[None]:
    """Have compiled loops use `count` threads within the `with` block, whatever torch uses."""
    if not _has("numba"):
        return nullcontext()
    from bitplan.base.loops.jit import use_threads

    return use_threads(count)


@functools.cache
def _has(library: str) -> bool:
    return importlib.util.find_spec(library) is not None
