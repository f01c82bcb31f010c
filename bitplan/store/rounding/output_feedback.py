"""Error-compensated rounding between the rows of a weight: what one output loses, others make up for.

The error that counts is then tr(G E H E^T), with E = weight - value, H = X^T X of the inputs, and G = the second
moments of the loss's gradients by the outputs: to second order the change of the loss, where inputs and gradients are
taken as independent. Rows are rounded some at a time, those with the largest gradients first. The errors of each batch
go to the rows not yet rounded, in the proportions that the Cholesky factor of G's inverse gives: between rows this is
what `error_compensation` does between columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from bitplan.errors import FormatError
from bitplan.formats import Encoded
from bitplan.kernels import decode
from bitplan.store.rounding.error_compensation import MUST_BE, check_statistics, factor_of
from bitplan.store.rounding.layout import ScaledBlocks, join_rows, rows_of
from bitplan.store.rounding.pick_loops import is_compiled, rounding_rows_of

# Rounds a matrix [rows, filled], given its rows as `encode` has them.
RoundRows = Callable[[Tensor, Encoded, ScaledBlocks], Encoded]
DAMPING = 0.05
BATCHES, BATCHES_UNCOMPILED = 24, 8  # without compiled loops every batch takes as long as the whole weight
FEWEST_ROWS = 16


def check_outputs(outputs: Tensor, layout: ScaledBlocks, name: str) -> None:
    """Refuse what cannot be second moments; all zeros are moments of outputs that no loss minds."""
    check_statistics(outputs, (layout.rows, layout.rows), "outputs", name)
    below = int((outputs.diagonal() < 0).sum())
    if below:
        raise FormatError(
            f"{name}: `outputs` is not positive definite: {below} numbers of its diagonal are below zero; it must be "
            f"{MUST_BE['outputs']}"
        )


def takes_feedback(outputs: Tensor | None, layout: ScaledBlocks) -> bool:
    """Whether rows can be rounded apart from each other, and some output has a gradient."""
    return outputs is not None and layout.height == 1 and layout.rows > 1 and float(outputs.diagonal().sum()) > 0


def round_with_feedback(
    matrix: Tensor, outputs: Tensor, plain: Encoded, layout: ScaledBlocks, round_rows: RoundRows, name: str
) -> Encoded:
    """Round [R, filled] numbers; `outputs` [R, R] is G, in any unit."""
    order = outputs.diagonal().argsort(descending=True, stable=True).to(matrix.device)
    factor = factor_of(outputs.to(matrix.device), DAMPING, order, name, "outputs")[1]
    left, made = matrix[order], []
    step = max(FEWEST_ROWS, -(-layout.rows // (BATCHES if is_compiled(matrix) else BATCHES_UNCOMPILED)))
    for first in range(0, layout.rows, step):
        last = min(first + step, layout.rows)
        piece = left[first:last].contiguous()
        own_rows, part = rows_of(plain, layout, order[first:last]), replace(layout, rows=last - first)
        with rounding_rows_of(matrix):
            made.append(round_rows(piece, own_rows, part))
        values = decode(made[-1], torch.float32).reshape(last - first, -1)
        errors = piece - torch.nn.functional.pad(values, (0, layout.filled - values.shape[1]))
        own = factor[first:last, first:last].T
        left[last:] -= factor[first:last, last:].T @ torch.linalg.solve_triangular(own, errors, upper=False)
    return join_rows(made, plain, order)


def error_between_outputs(matrix: Tensor, values: Tensor, hessian: Tensor, outputs: Tensor) -> float:
    """tr(G E H E^T)."""
    error = matrix - values
    return float((outputs.to(error.device).float() * (error @ hessian @ error.T)).double().sum())
