"""The numbers that codes stand for, as arithmetic: rounding many candidates at once needs no table."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bitplan.formats.elements import Element, IntegerElement

_EXPONENT = 0x7F800000  # of a float32
_FLOATS = {"e2m1": (1, 0.5), "e4m3": (3, 2.0**-9), "e5m2": (2, 2.0**-16)}  # mantissa bits, smallest step
MOST_BITS = 8


@dataclass(frozen=True)
class Grid:
    """Numbers of one element in units of its scale.

    Integers: all from `low` to `high`. Floats: `mantissa` is 2^-(bits of the mantissa), so that numbers of a binade
    are `mantissa` times its power of two apart, and never less than `least`. With a `table`: its numbers, rising.
    """

    low: float
    high: float
    mantissa: float = 0.0
    least: float = 1.0
    table: tuple[float, ...] | None = None

    @property
    def is_float(self) -> bool:
        return self.mantissa > 0

    def nearest(self, scaled: Tensor) -> Tensor:
        """The nearest number of the grid to each float32, ties to even codes, in a table to the smaller number."""
        if self.table is not None:
            numbers = scaled.new_tensor(self.table)
            return numbers[torch.bucketize(scaled, (numbers[:-1] + numbers[1:]) / 2)]
        if not self.is_float:
            return scaled.round().clamp(self.low, self.high)
        power = (scaled.view(torch.int32) & _EXPONENT).view(torch.float32)
        step = (power * self.mantissa).clamp(min=self.least)
        return ((scaled / step).round() * step).clamp(self.low, self.high)


def grid_of(element: Element | None) -> Grid | None:
    """None for elements whose rounding leaves nothing to gain (16 bits and more) or to choose (the sign alone)."""
    if element is None or element.bits > MOST_BITS:
        return None
    if isinstance(element, IntegerElement):
        return Grid(float(element.low), float(element.high))
    if element.name in _FLOATS:
        bits, least = _FLOATS[element.name]
        return Grid(-element.limit, element.limit, math.ldexp(1.0, -bits), least)
    return None
