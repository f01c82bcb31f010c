"""silu(gate) * up followed by an FP8 cast, and its gradient so too: the reference and the dispatcher.

    cast_gated(y_R2F, None, ...)     h = silu(gate) * up [R, F], of gate and up side by side in y
    cast_gated(y_R2F, dh_RF, ...)    the gradient of y [R, 2 F]

Computed in float32 and rounded once to the type of y; that matrix is then cast tensorwise.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from bitplan.formats.fp8 import CastPair
from bitplan.kernels.fp8.cast import cast_layouts

RECIPE = "tensorwise"  # only one scale for all numbers is guessed, and a guess is what a cast in one read needs


def cast_gated(
    y_R2F: Tensor,
    dh_RF: Tensor | None,
    fp8: str = "e4m3",
    eps: float = 0.0,
    *,
    rows: bool = True,
    cols: bool = True,
    guess: Tensor | None = None,
) -> CastPair:
    """Gate, or with `dh_RF` find the gradient of gate and up, and cast. `guess`: a state of `guessed_cast`."""
    if guess is not None:
        from bitplan.kernels.fp8.triton_gated import cast_by_guess, fits_gated

        if fits_gated(y_R2F, dh_RF):
            return cast_by_guess(y_R2F, dh_RF, fp8, eps, guess, rows=rows, cols=cols)
    made = gate(y_R2F) if dh_RF is None else gate_gradient(y_R2F, dh_RF)
    return cast_layouts(made, RECIPE, fp8, eps, rows=rows, cols=cols, guess=guess)


def gate(y_R2F: Tensor) -> Tensor:
    first, up = y_R2F.float().chunk(2, dim=-1)
    return (functional.silu(first) * up).to(y_R2F.dtype)


def gate_gradient(y_R2F: Tensor, dh_RF: Tensor) -> Tensor:
    """The gradient of gate and up, side by side."""
    first, up = y_R2F.float().chunk(2, dim=-1)
    dh, part = dh_RF.float(), torch.sigmoid(first)
    of_gate = dh * up * (part * (1.0 + first * (1.0 - part)))
    return torch.cat((of_gate, dh * (first * part)), dim=-1).to(y_R2F.dtype)
