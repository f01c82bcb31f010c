"""How a product is run, as text: a constant of a compiled graph, read once.

    1:fused outputs=32 rows=8;64:fused;*:decode

1 row: the fused kernel with this launch. Up to 64 rows: the fused kernel with its default launch. More: decoded.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

from bitplan.errors import ArgumentError
from bitplan.kernels.matmul.fused import Launch
from bitplan.measure.speed.crossover import Pick


class ProductWay(NamedTuple):
    """A strategy, and the launch of its kernel where one was chosen."""

    strategy: str
    launch: Launch | None = None


def text_of(picks: Iterable[tuple[int | None, Pick]]) -> str:
    """Text of picks, each with the most rows it is for, in rising order; the last pick is for any more (None)."""
    parts = []
    for rows, pick in picks:
        launch = "".join(f" {name}={value}" for name, value in (pick.launch or {}).items())
        parts.append(f"{'*' if rows is None else rows}:{pick.strategy}{launch}")
    return ";".join(parts)


def way_at(text: str, rows: int) -> ProductWay:
    """The way for this many rows."""
    for most, way in _read(text):
        if most is None or rows <= most:
            return way
    raise ArgumentError(f"ways {text!r} say nothing of {rows} rows; the last one must be for any number, '*'")


@functools.lru_cache(4096)
def _read(text: str) -> tuple[tuple[int | None, ProductWay], ...]:
    return tuple(_read_one(part, text) for part in text.split(";"))


def _read_one(part: str, text: str) -> tuple[int | None, ProductWay]:
    try:
        rows, _, rest = part.partition(":")
        strategy, *pairs = rest.split()
        launch = {name: int(value) for name, value in (pair.split("=") for pair in pairs)}
        return (None if rows == "*" else int(rows)), ProductWay(strategy, launch or None)
    except ValueError:
        raise ArgumentError(f"expected ROWS:STRATEGY NAME=NUMBER..., got {part!r} in the ways {text!r}") from None
