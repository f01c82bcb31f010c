"""Which loops round a piece: compiled ones where numba (CPUs) or Triton (GPUs) is installed, plain torch elsewhere."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from bitplan.formats.dispatch import parts_of, size_with_others

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
    """Within the block, compiled loops use `count` threads, whatever torch uses."""
    if not _has("numba"):
        return nullcontext()
    from bitplan.base.loops.jit import use_threads

    return use_threads(count)


@functools.cache
def _has(library: str) -> bool:
    return importlib.util.find_spec(library) is not None
