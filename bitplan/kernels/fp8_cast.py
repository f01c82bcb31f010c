"""FP8 casts of a matrix in the layouts that products need: the dispatcher.

    pair = cast_layouts(x_RC, "blockwise", rows=True, cols=True)
    pair.rows   x as it lies, for products that sum along C
    pair.cols   its transpose, for products that sum along R

Rows are padded with zeros to what the recipe needs (16, 32 or 128), so any count of tokens works; of a weight nothing
is padded, it must fit. A GPU gets the Triton kernels, a CPU the reference; "triton" on a CPU runs under Triton's
interpreter, for tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from bitplan.errors import FormatError
from bitplan.formats.fp8_scaling import (
    ScaledFp8,
    cast_reference,
    pad_rows,
    padded_tokens,
    scaling_of,
)

if TYPE_CHECKING:
    from bitplan.kernels.triton_fp8_cast import CastLaunch

IMPLEMENTATIONS = ("auto", "reference", "triton")


class CastPair(NamedTuple):
    """The layouts asked for; the others are None."""

    rows: ScaledFp8 | None = None
    cols: ScaledFp8 | None = None


def cast_layouts(
    x_RC: Tensor,
    recipe: str,
    fp8: str = "e4m3",
    eps: float = 0.0,
    *,
    is_weight: bool = False,
    rows: bool = True,
    cols: bool = True,
    impl: str = "auto",
    launch: CastLaunch | None = None,
    guess: Tensor | None = None,
) -> CastPair:
    """Cast a matrix by a recipe, each layout that is asked for. `guess`: a state of `triton_fp8_guess`, which saves a
    tensorwise cast on the GPU its second read and changes no bit."""
    if impl not in IMPLEMENTATIONS:
        raise FormatError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    scaling = scaling_of(recipe, is_weight=is_weight)
    padded = x_RC.shape[0] if is_weight else padded_tokens(recipe, x_RC.shape[0])
    if impl == "triton" or (impl == "auto" and x_RC.is_cuda):
        if guess is not None and scaling == "tensor" and x_RC.numel() and (rows or cols):
            from bitplan.kernels.triton_fp8_guess import cast_by_guess

            return CastPair(*cast_by_guess(x_RC, guess, fp8, eps, padded, rows=rows, cols=cols, launch=launch))
        from bitplan.kernels.triton_fp8_cast import cast_tiles

        made = cast_tiles(x_RC, scaling, fp8, eps, padded, rows=rows, cols=cols, launch=launch)
        return CastPair(made[0], made[1])
    x_RC = pad_rows(x_RC, padded)
    return CastPair(
        cast_reference(x_RC, scaling, fp8, eps) if rows else None,
        cast_reference(x_RC.t(), scaling, fp8, eps) if cols else None,
    )
