"""Chooses the set of units that go low: within a damage budget, and only as many as hide the transfer.

A score per block cannot answer two questions about all blocks together. How much may they raise the loss: the damage
budget. And do they save time: INT8 does so only while computing does not hide the transfer, so the right set is empty
where the transfer is hidden already, and else the smallest set that hides it.

`choose_low_set` is greedy by damage per byte saved, then drops units that turn out not to be needed. The result is
minimal: without any one unit that may leave, the transfer would no longer be hidden. Finding the set of least damage is
a knapsack problem; for equal blocks, the usual case, the answer is the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bitplan.plan.names import natural_order
from bitplan.plan.selective.config import SelectiveError


@dataclass(frozen=True)
class TransferFacts:
    """Measured, per step: how long computing takes, how fast the bus is, and how often a byte is sent.

    The latter is nearly 2 with a backward: blocks that stay on the device at the turns are sent once.
    """

    compute_ms: float
    bytes_per_ms: float
    crossings: float = 2

    def __post_init__(self) -> None:
        for key in ("compute_ms", "bytes_per_ms", "crossings"):
            value = getattr(self, key)
            if not (math.isfinite(value) and value > 0):
                raise SelectiveError(f"transfer facts: {key} must be a finite number above 0, got {value!r}")

    def bytes_to_save(self, streamed_bytes: int) -> int:
        """By how many bytes the streamed bytes exceed what computing hides; 0 or less: computing hides them all."""
        return streamed_bytes - math.floor(self.compute_ms * self.bytes_per_ms / self.crossings)


@dataclass(frozen=True)
class Candidate:
    """A unit that may be low: its cost (on any common scale), the bytes it saves, and whether it may change.

    `locked` keeps it as it is, low or not: a cooldown, a back-off, a force list.
    """

    name: str
    cost: float
    bytes_saved: int
    is_low: bool = False
    locked: bool = False

    @property
    def cost_per_byte(self) -> float:
        return self.cost / self.bytes_saved if self.bytes_saved > 0 else math.inf


@dataclass(frozen=True)
class LowSet:
    """The units to be low, and for every candidate why it is or is not."""

    names: frozenset[str]
    reasons: Mapping[str, str]
    cost: float
    bytes_saved: int


def choose_low_set(
    candidates: Iterable[Candidate],
    *,
    budget: float = math.inf,
    entry_share: float = 1.0,
    bytes_to_save: int | None = None,
) -> LowSet:
    """The units to be low. A low unit stays while the sum of costs is within `budget`; another enters only within
    `entry_share` of it. With `bytes_to_save`, no more units than needed to save that much.
    """
    order = {candidate.name: candidate for candidate in candidates}
    units = sorted((order[name] for name in natural_order(order)), key=lambda unit: (unit.cost_per_byte, unit.cost))
    reasons = {unit.name: "kept: may not change now" for unit in units if unit.locked}
    chosen = [unit for unit in units if unit.is_low]
    if bytes_to_save is not None and bytes_to_save <= 0:
        out = [unit for unit in units if not unit.locked]
        reasons |= {unit.name: "computing already hides the transfer: no precision is given up" for unit in out}
        return _low_set([unit for unit in chosen if unit.locked], reasons)
    _leave_over_budget(chosen, budget, reasons)
    _enter(units, chosen, budget * entry_share, bytes_to_save, reasons)
    if bytes_to_save is not None:
        _leave_unneeded(chosen, bytes_to_save, reasons)
    for unit in chosen:
        reasons.setdefault(unit.name, f"stays low: cost {unit.cost:.3g} within the budget of {budget:.3g}")
    return _low_set(chosen, reasons)


def _leave_over_budget(chosen: list[Candidate], budget: float, reasons: dict[str, str]) -> None:
    for unit in sorted(chosen, key=lambda unit: -unit.cost_per_byte):
        total = _cost(chosen)
        if total <= budget:
            return
        if not unit.locked:
            chosen.remove(unit)
            reasons[unit.name] = f"leaves: the costs together, {total:.3g}, exceed the budget of {budget:.3g}"


def _enter(
    units: list[Candidate], chosen: list[Candidate], room: float, bytes_to_save: int | None, reasons: dict[str, str]
) -> None:
    for unit in units:
        if unit.is_low or unit.locked:
            continue
        total = _cost([*chosen, unit])
        if unit.bytes_saved <= 0:
            reasons[unit.name] = "stays high: low precision would save no byte"
        elif bytes_to_save is not None and _saved(chosen) >= bytes_to_save:
            reasons[unit.name] = f"stays high: {_saved(chosen)} bytes fewer already hide the transfer"
        elif total > room:
            reasons[unit.name] = f"stays high: the costs would come to {total:.3g}, above {room:.3g} of the budget"
        else:
            chosen.append(unit)
            reasons[unit.name] = f"goes low: cost {unit.cost:.3g}, {total:.3g} with the others, within {room:.3g}"


def _leave_unneeded(chosen: list[Candidate], bytes_to_save: int, reasons: dict[str, str]) -> None:
    """Remove unneeded units, the most costly first, so that the remaining set costs least."""
    for unit in sorted(chosen, key=lambda unit: -unit.cost):
        if not unit.locked and _saved(chosen) - unit.bytes_saved >= bytes_to_save:
            chosen.remove(unit)
            reasons[unit.name] = f"high: {_saved(chosen)} bytes fewer already hide the transfer"


def _cost(units: Iterable[Candidate]) -> float:
    return math.fsum(unit.cost for unit in units)


def _saved(units: Iterable[Candidate]) -> int:
    return sum(unit.bytes_saved for unit in units)


def _low_set(chosen: list[Candidate], reasons: dict[str, str]) -> LowSet:
    return LowSet(frozenset(unit.name for unit in chosen), reasons, _cost(chosen), _saved(chosen))
