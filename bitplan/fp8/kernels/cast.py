"""FP8 casts of a matrix in the layouts that products need: the dispatcher.

    pair = cast_layouts(x_RC, "blockwise", rows=True, cols=True)
    pair.rows   x as it lies, for products that sum along C
    pair.cols   its transpose, for products that sum along R

Rows are padded with zeros to what the recipe needs (16, 32 or 128), so any count of tokens works; a weight is not
padded and must fit. A GPU gets the Triton kernels, a CPU the reference; "triton" on a CPU runs under Triton's
interpreter, for tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bitplan.base.errors import FormatError
from bitplan.fp8.casts import (
    CastPair,
    cast_reference,
    pad_rows,
    padded_tokens,
    scaling_of,
)

if TYPE_CHECKING:
    from bitplan.fp8.kernels.triton_cast import CastLaunch

IMPLEMENTATIONS = ("auto", "reference", "triton")


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
    into: CastPair | None = None,
) -> CastPair:
    """Cast a matrix by a recipe, in the layouts asked for.

    `guess`: a state of `guessed_cast`, which saves a tensorwise cast on the GPU its second read. `into`: memory for
    both layouts, which such a cast writes to instead of its own.
    """
    if impl == "triton" or (impl == "auto" and x_RC.is_cuda):
        x = x_RC if x_RC.is_contiguous() else x_RC.contiguous()
        aligned, guessed = not x.data_ptr() & 15, guess is not None
        cast = _plan(x.shape, x.dtype, aligned, recipe, fp8, eps, is_weight, rows, cols, launch, guessed)
        return cast(x, guess) if into is None else cast(x, guess, into)
    if impl not in IMPLEMENTATIONS:
        raise FormatError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    scaling = scaling_of(recipe, is_weight=is_weight)
    x_RC = pad_rows(x_RC, _rows_of_cast(x_RC.shape[0], recipe, is_weight))
    return CastPair(
        cast_reference(x_RC, scaling, fp8, eps) if rows else None,
        cast_reference(x_RC.t(), scaling, fp8, eps) if cols else None,
    )


@functools.lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, int],
    dtype: torch.dtype,
    aligned: bool,
    recipe: str,
    fp8: str,
    eps: float,
    is_weight: bool,
    rows: bool,
    cols: bool,
    launch: CastLaunch | None,
    guessed: bool,
) -> Callable[..., CastPair]:
    """How the GPU casts matrices like this one, with everything but the tensors fixed: a layer repeats it each step."""
    scaling = scaling_of(recipe, is_weight=is_weight)
    padded = _rows_of_cast(shape[0], recipe, is_weight)
    if guessed and scaling == "tensor" and 0 not in shape and (rows or cols):
        from bitplan.fp8.kernels.guessed_cast import plan_guess

        return plan_guess(shape, dtype, aligned, fp8, eps, padded, rows, cols, launch).run
    from bitplan.fp8.kernels.triton_cast import cast_tiles

    def cast(x: Tensor, _: Tensor | None) -> CastPair:
        return CastPair(*cast_tiles(x, scaling, fp8, eps, padded, rows=rows, cols=cols, launch=launch)[:2])

    return cast


def _rows_of_cast(rows: int, recipe: str, is_weight: bool) -> int:
    return rows if is_weight else padded_tokens(recipe, rows)
