"""Corrects predicted damage by plans that were measured: by how much is each format off, and where?

The KL of a plan is the sum over its groups of predicted damage x exp(correction). A correction has a part for its
format, one for the format in this projection, and one that grows with how much worse the format is than the one in
which the projection was checked; whole plans have one more, `together`. There are more of these than plans, so each is
taken as small unless measurements say otherwise: least squares of logarithms, with an expected size for each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bitplan.optional import require
from bitplan.searching.evidence import SearchEvidence
from bitplan.searching.groups import place_of

NOISE = 0.05  # of the logarithm of a measured KL
TOGETHER, OF_FORMAT, OF_CELL, BY_DAMAGE = 0.3, 0.5, 0.35, 0.15  # the sizes that corrections are expected to have
MOST = math.log(30.0)  # no format is off by more
Cell = tuple[str, str]  # a projection and a format


@dataclass
class Corrections:
    """Evidence as it is now, and the whole plans that were measured since; `apply` changes the evidence."""

    evidence: SearchEvidence
    _measured: list[tuple[dict[Cell, float], float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        evidence = self.evidence
        self._together = evidence.together
        self._factors = {
            (name, fmt): cost.factor for name, group in evidence.groups.items() for fmt, cost in group.formats.items()
        }
        self._checks = self._checked_cells()

    def add(self, choice: Mapping[str, str], kl: float) -> None:
        """A format for every group, and the KL that was measured with all of them."""
        cells = self._damage(choice)
        if kl > 0 and sum(cells.values()) > 0:
            self._measured.append((cells, kl / self._together))

    def apply(self) -> None:
        """The factors of formats and `together`, from everything that was measured so far."""
        if not self._measured:
            return
        of_format, of_cell, by_damage, together = self._fit()
        steps = self._steps_from_check()
        for name, group in self.evidence.groups.items():
            part = place_of(name)[1]
            for fmt, cost in group.formats.items():
                size = of_format.get(fmt, 0.0) + of_cell.get((part, fmt), 0.0) + by_damage * steps.get((part, fmt), 0.0)
                factor = self._factors[name, fmt] * math.exp(max(-MOST, min(MOST, size)))
                group.formats[fmt] = replace(cost, factor=factor)
        self.evidence.together = self._together * math.exp(together)

    def _fit(self) -> tuple[dict[str, float], dict[Cell, float], float, float]:
        numpy = require("numpy", purpose="searching a plan")
        optimize = require("scipy.optimize", purpose="searching a plan", extra="search")
        known = [
            *((cells, sum(cells.values()), 0.0) for cells in self._checks),
            *((*one, 1.0) for one in self._measured),
        ]
        cells = sorted({cell for observed, _, _ in known for cell in observed})
        formats = sorted({fmt for _, fmt in cells})
        steps = self._steps_from_check()
        damage = numpy.array([[observed.get(cell, 0.0) for cell in cells] for observed, _, _ in known])
        wanted = numpy.log(numpy.array([kl for _, kl, _ in known]))
        is_whole = numpy.array([whole for _, _, whole in known])
        # Columns: formats, cells, the growth with damage; `together` acts on whole plans and not on cells.
        design = numpy.zeros((len(cells), len(formats) + len(cells) + 1))
        for row, (part, fmt) in enumerate(cells):
            design[row, formats.index(fmt)] = design[row, len(formats) + row] = 1.0
            design[row, -1] = steps.get((part, fmt), 0.0)
        sizes = numpy.array([OF_FORMAT] * len(formats) + [OF_CELL] * len(cells) + [BY_DAMAGE, TOGETHER])

        def residuals(scaled: Any) -> Any:
            moved = damage * numpy.exp(numpy.clip(design @ (scaled * sizes)[:-1], -MOST, MOST))
            apart = numpy.log(moved.sum(1)) + is_whole * scaled[-1] * TOGETHER - wanted
            return numpy.concatenate([apart / NOISE, scaled])

        found = optimize.least_squares(residuals, numpy.zeros(len(sizes))).x * sizes
        of_format = dict(zip(formats, map(float, found), strict=False))
        of_cell = dict(zip(cells, map(float, found[len(formats) :]), strict=False))
        return of_format, of_cell, float(found[-2]), float(found[-1])

    def _damage(self, choice: Mapping[str, str]) -> dict[Cell, float]:
        """Nats by projection and format, as they were predicted at first."""
        cells: dict[Cell, float] = {}
        for name, fmt in choice.items():
            group, cell = self.evidence.groups[name], (place_of(name)[1], fmt)
            nats = group.formats[fmt].predicted * group.factor * self._factors[name, fmt]
            cells[cell] = cells.get(cell, 0.0) + nats
        return {cell: nats for cell, nats in cells.items() if nats > 0}

    def _checked_cells(self) -> list[dict[Cell, float]]:
        """Of each projection that was measured in all layers at once, what it costs: its factor makes that so."""
        parts: dict[str, dict[str, str]] = {}
        for name, group in self.evidence.groups.items():
            if group.checked in group.formats:
                parts.setdefault(place_of(name)[1], {})[name] = group.checked
        return [cells for choice in parts.values() if (cells := self._damage(choice))]

    def _steps_from_check(self) -> dict[Cell, float]:
        """How much worse a format is than the one in which its projection was checked, as a logarithm."""
        found: dict[Cell, list[float]] = {}
        for name, group in self.evidence.groups.items():
            checked = group.formats.get(group.checked)
            for fmt, cost in group.formats.items():
                if checked is not None and checked.predicted > 0 and cost.predicted > 0:
                    step = math.log(cost.predicted / checked.predicted)
                    found.setdefault((place_of(name)[1], fmt), []).append(step)
        return {cell: sum(steps) / len(steps) for cell, steps in found.items()}
