"""Chooses a rung for every unit, of bf16, 8 bits and 4 bits, so that all bytes fit a budget with the least damage.

Two precisions leave one question a unit: low or not. With a third there is an order to descend in: eight bits cost a
unit little and save half its bytes, four bits cost it more and save a quarter on top. `choose_rungs` lets the units
descend step by step, the least damage per saved byte first, until the bytes fit, and then lets those rise again that
need not have descended. For each unit only the rungs on the lower convex hull of (bytes, damage) count: a rung above it
is dearer than a mix of its neighbours.

The present rung of a unit is taken for a little better than it is (`margin`): a change must gain more than noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from bitplan.plan.names import natural_order


@dataclass(frozen=True)
class RungCandidate:
    """A unit: bytes and damage of each precision that it may have, and its present one. `locked`: it may not change."""

    name: str
    nbytes: Mapping[str, int]
    damage: Mapping[str, float]
    current: str
    locked: bool = False


class Descent(NamedTuple):
    """One step down for one unit."""

    damage_per_byte: float
    order: int
    name: str
    above: str
    below: str
    saved: int


@dataclass(frozen=True)
class Rungs:
    """The precision of every candidate, the reason, and all bytes together."""

    precisions: Mapping[str, str]
    reasons: Mapping[str, str]
    nbytes: int


def choose_rungs(candidates: Iterable[RungCandidate], byte_limit: int, *, margin: float = 0.0) -> Rungs:
    """The rungs with the least damage, greedily, whose bytes together are at most `byte_limit`.

    Where even the lowest rungs exceed it (locked units), all that may descend are at their lowest.
    """
    by_name = {unit.name: unit for unit in candidates}
    units = [by_name[name] for name in natural_order(by_name)]
    precisions = {unit.name: unit.current if unit.locked else _largest(unit) for unit in units}
    reasons = {unit.name: "kept: may not change now" for unit in units if unit.locked}
    total = sum(unit.nbytes[precisions[unit.name]] for unit in units)
    descents = sorted(one for index, unit in enumerate(units) for one in _descents(unit, index, margin))
    taken: list[Descent] = []
    for one in descents:
        if total <= byte_limit:
            break
        taken.append(one)
        precisions[one.name] = one.below
        total -= one.saved
    for one in reversed(taken):  # the last descent may have saved more than was needed
        if total + one.saved <= byte_limit and precisions[one.name] == one.below:
            precisions[one.name] = one.above
            total += one.saved
    for unit in units:
        damage = unit.damage.get(precisions[unit.name], 0.0)
        reasons.setdefault(unit.name, f"damage {damage:.3g}, {total} of {byte_limit} bytes together")
    return Rungs(precisions, reasons, total)


def _largest(unit: RungCandidate) -> str:
    return max(unit.nbytes, key=lambda precision: unit.nbytes[precision])


def _descents(unit: RungCandidate, order: int, margin: float) -> Iterable[Descent]:
    """The steps along the lower hull, from the most bytes to the fewest; each costs more per byte than the last."""
    if unit.locked:
        return
    damage = {
        precision: value * (1.0 - margin) if precision == unit.current else value
        for precision, value in unit.damage.items()
    }
    at = _largest(unit)
    while True:
        lower = [precision for precision in damage if unit.nbytes[precision] < unit.nbytes[at]]
        if not lower:
            return

        def per_byte(precision: str, above: str = at) -> float:
            return (damage[precision] - damage[above]) / (unit.nbytes[above] - unit.nbytes[precision])

        below = min(lower, key=lambda precision: (per_byte(precision), unit.nbytes[precision]))
        yield Descent(per_byte(below), order, unit.name, at, below, unit.nbytes[at] - unit.nbytes[below])
        at = below
