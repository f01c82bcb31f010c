"""Names of tensors: in natural order, cut at the layer's number, and listed in messages."""

from __future__ import annotations

import re
from collections.abc import Iterable


def natural_order(names: Iterable[str]) -> list[str]:
    """Sorted with numbers in names compared as numbers."""
    return sorted(names, key=lambda name: (_natural_key(name), name))


def _natural_key(name: str) -> list[tuple[int, int, str]]:
    pieces = re.split(r"([0-9]+)", name)
    # A number is ordered by its length, then its digits: no conversion that a long one could break.
    return [
        (1, len(piece.lstrip("0")), piece.lstrip("0")) if index % 2 else (0, 0, piece)
        for index, piece in enumerate(pieces)
    ]


def listed(names: Iterable[str], limit: int = 10) -> str:
    """Names for a message: all of them, or the first few and how many more."""
    names = list(names)
    shown = ", ".join(repr(name[:120]) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def split_layer(name: str) -> tuple[str, str, str]:
    """What stands before the layer's number, the number, and what stands after; no number: the name, '', ''."""
    match = re.fullmatch(r"((?:[^.]*\.)*?)([0-9]{1,9})(\..*)", name)
    return (match[1], match[2], match[3]) if match else (name, "", "")


def number_ranges(numbers: Iterable[str]) -> str:
    """Numbers in order, runs as `first..last`."""
    runs: list[list[int]] = []
    for number in map(int, numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}..{high}" for low, high in runs)
