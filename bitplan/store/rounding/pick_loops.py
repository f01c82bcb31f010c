"""Which loops round a piece: compiled ones on CPUs where numba is installed, plain torch elsewhere."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from torch import Tensor

# Below this, compiling for the first time takes longer than plain torch.
SMALLEST_FOR_CPU = 2**16
_whole: ContextVar[int] = ContextVar("numbers of the weight that pieces are of", default=0)


def loops_for(matrix: Tensor) -> Any:
    """The module with `round_piece`, `cost_of_scales`, `sweep_piece` and `weighted_cost` for this matrix."""
    return _module("round_columns_cpu" if is_compiled(matrix) else "round_columns")


def is_compiled(matrix: Tensor) -> bool:
    return matrix.device.type == "cpu" and max(matrix.numel(), _whole.get()) >= SMALLEST_FOR_CPU and _has_numba()


@contextmanager
def rounding_rows_of(matrix: Tensor) -> Iterator[None]:
    """Some rows of a weight at a time take the loops that the whole of it would."""
    before = _whole.set(matrix.numel())
    try:
        yield
    finally:
        _whole.reset(before)


@functools.cache
def _has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


@functools.cache
def _module(name: str) -> ModuleType:
    return importlib.import_module(f"bitplan.store.rounding.{name}")
