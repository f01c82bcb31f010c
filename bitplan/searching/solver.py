"""Chooses a format for every group: the least predicted damage within the goal, by mixed-integer programming (HiGHS).

A choice is one of a few formats for each group, so this is a knapsack with several limits: a 0/1 variable for each
pair of group and format, one row that says each group has one format, and a row for each limit. HiGHS proves how
far its answer can be from the best one; bound and gap are in the solution. The same evidence gives the same answer.

Corrects predicted damage by plans that were measured: by how much is each format off, and where?

The KL of a plan is the sum over its groups of predicted damage x exp(correction). A correction has a part for its
format, one for the format in this projection, and one that grows with how much worse the format is than the one in
which the projection was checked; whole plans have one more, `together`. There are more of these than plans, so each is
taken as small unless measurements say otherwise: least squares of logarithms, with an expected size for each.

Rivals are the plans that people make without a search: one format for all, or more bits for layers that are said to
need it.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from bitplan.base.optional import require
from bitplan.searching.evidence import SearchEvidence, bits_of, place_of, weight_format
from bitplan.searching.goal import Goal, GoalError, aims_of

# ---- correct ---------------------------------------------------------------------------------------------------------


NOISE = 0.05  # of the logarithm of a measured KL
TOGETHER, OF_FORMAT, OF_CELL, BY_DAMAGE = 0.3, 0.5, 0.35, 0.15  # the sizes that corrections are expected to have
MOST = math.log(30.0)  # no format is off by more
Cell = tuple[str, str]  # a projection and a format


@dataclass
class Corrections:
    """Corrects an evidence's damage of formats by the KL of whole plans that were measured (`add`, then `apply`)."""

    evidence: SearchEvidence
    _measured: list[tuple[dict[Cell, float], float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        evidence = self.evidence
        self._together = evidence.together
        self._factors = {
            (name, fmt): cost.factor for name, group in evidence.groups.items() for fmt, cost in group.formats.items()
        }
        self._checks = self._checked_cells()

    def add(self, choice: Mapping[str, str], kl: float) -> None:
        """Add a measurement: a format for every group, and the KL measured with all of them."""
        cells = self._damage(choice)
        if kl > 0 and sum(cells.values()) > 0:
            inputs = sum(self.evidence.groups[name].formats[fmt].inputs for name, fmt in choice.items())
            self._measured.append((cells, kl / self._together, inputs))

    def apply(self) -> None:
        """Set the factors of formats, and the factor of all together, to fit every measurement so far."""
        if not self._measured:
            return
        of_format, of_cell, by_damage, together = self._fit()
        steps = self._steps_from_check()
        for name, group in self.evidence.groups.items():
            part = place_of(name)[1]
            for candidate, cost in group.formats.items():
                fmt = weight_format(candidate)
                size = of_format.get(fmt, 0.0) + of_cell.get((part, fmt), 0.0) + by_damage * steps.get((part, fmt), 0.0)
                factor = self._factors[name, candidate] * math.exp(max(-MOST, min(MOST, size)))
                group.formats[candidate] = replace(cost, factor=factor)
        self.evidence.together = self._together * math.exp(together)

    def _fit(self) -> tuple[dict[str, float], dict[Cell, float], float, float]:
        numpy = require("numpy", purpose="searching a plan")
        optimize = require("scipy.optimize", purpose="searching a plan", extra="search")
        observations = [
            *((cells, sum(cells.values()), 0.0, 0.0) for cells in self._checks),
            *((*one, 1.0) for one in self._measured),
        ]
        cells = sorted({cell for observed, *_ in observations for cell in observed})
        formats = sorted({fmt for _, fmt in cells})
        steps = self._steps_from_check()
        damage = numpy.array([[observed.get(cell, 0.0) for cell in cells] for observed, *_ in observations])
        measured_kl = numpy.log(numpy.array([kl for _, kl, _, _ in observations]))
        of_inputs = numpy.array([inputs for _, _, inputs, _ in observations])  # measured, so nothing corrects them
        is_whole = numpy.array([of_plan for *_, of_plan in observations])
        # Columns: formats, cells, the growth with damage; `together` acts on whole plans and not on cells.
        design = numpy.zeros((len(cells), len(formats) + len(cells) + 1))
        for row, (part, fmt) in enumerate(cells):
            design[row, formats.index(fmt)] = design[row, len(formats) + row] = 1.0
            design[row, -1] = steps.get((part, fmt), 0.0)
        sizes = numpy.array([OF_FORMAT] * len(formats) + [OF_CELL] * len(cells) + [BY_DAMAGE, TOGETHER])

        def residuals(scaled: Any) -> Any:
            moved = damage * numpy.exp(numpy.clip(design @ (scaled * sizes)[:-1], -MOST, MOST))
            apart = numpy.log(moved.sum(1) + of_inputs) + is_whole * scaled[-1] * TOGETHER - measured_kl
            return numpy.concatenate([apart / NOISE, scaled])

        solution = optimize.least_squares(residuals, numpy.zeros(len(sizes))).x * sizes
        of_format = dict(zip(formats, map(float, solution), strict=False))
        of_cell = dict(zip(cells, map(float, solution[len(formats) :]), strict=False))
        return of_format, of_cell, float(solution[-2]), float(solution[-1])

    def _damage(self, choice: Mapping[str, str]) -> dict[Cell, float]:
        """The predicted nats of a choice by (projection, format), before any correction."""
        cells: dict[Cell, float] = {}
        for name, fmt in choice.items():
            group, cell = self.evidence.groups[name], (place_of(name)[1], weight_format(fmt))
            nats = group.formats[fmt].predicted * group.factor * self._factors[name, fmt]
            cells[cell] = cells.get(cell, 0.0) + nats
        return {cell: nats for cell, nats in cells.items() if nats > 0}

    def _checked_cells(self) -> list[dict[Cell, float]]:
        """For each projection that was measured in all layers at once: its nats by (projection, format)."""
        parts: dict[str, dict[str, str]] = {}
        for name, group in self.evidence.groups.items():
            if group.checked in group.formats:
                parts.setdefault(place_of(name)[1], {})[name] = group.checked
        return [cells for choice in parts.values() if (cells := self._damage(choice))]

    def _steps_from_check(self) -> dict[Cell, float]:
        """The logarithm of a format's damage over that of the format in which its projection was checked."""
        logarithms: dict[Cell, list[float]] = {}
        for name, group in self.evidence.groups.items():
            checked = group.formats.get(group.checked)
            for fmt, cost in group.formats.items():
                if checked is not None and checked.predicted > 0 and cost.predicted > 0:
                    step = math.log(cost.predicted / checked.predicted)
                    logarithms.setdefault((place_of(name)[1], weight_format(fmt)), []).append(step)
        return {cell: sum(steps) / len(steps) for cell, steps in logarithms.items()}


# ---- solver ----------------------------------------------------------------------------------------------------------


FRONT_POINTS = 40
GAP = 1e-6
MOST_NODES = 200_000  # a limit on work and not on time, which would make answers differ between machines
NODES_OF_TWO = 1_000  # of two memories, where places of equal layers can be exchanged, and proofs take long
_SPAN = 1e4  # objectives are scaled to this: HiGHS stops at an absolute gap of 1e-6
What = Literal[
    "nats", "harm", "bytes", "host", "us"
]  # harm: nats, each group by its weight, on the worst of several aims


@dataclass(frozen=True)
class Solution:
    """A format for every group.

    bound      the least that any choice could cost
    gap        how far the solver may be from that, relative to what the best choice that it knows costs
    promised   by what share another plan, which was not measured, is predicted to cost less after the last correction
    """

    choice: Mapping[str, str]
    nats: float
    nbytes: int
    us: float | None
    bound: float
    gap: float
    promised: float = 0.0

    def to_dict(self, evidence: SearchEvidence) -> dict[str, Any]:
        return {
            "nats": self.nats,
            "bytes": self.nbytes,
            "bits": evidence.bits(self.nbytes),
            **({} if self.us is None else {"us": self.us}),
            "bound": self.bound,
            "gap": self.gap,
            "promised": self.promised,
            "choice": dict(self.choice),
        }


def solve(
    evidence: SearchEvidence, goal: Goal, *, force: Mapping[str, str] | None = None, gap: float = GAP
) -> Solution:
    """The best choice within the goal; `force` fixes groups to formats. A goal out of reach names the nearest one."""
    problem = _Problem(evidence, goal.rows if goal.is_timed else None, dict(force or {}))
    limits: dict[What, float] = {}
    most_bytes = goal.most_bytes(evidence.numbers)
    if most_bytes is not None:
        limits["bytes"] = most_bytes
    if goal.faster is not None:
        limits["us"] = _reference_time(evidence, goal.rows) / goal.faster
    if goal.host is not None:
        limits["host"] = goal.host
    if goal.us is not None:
        limits["us"] = goal.us
    objective: What = "us" if goal.asks_for_least_time else "harm" if limits else "bytes"
    if goal.max_kl is not None and objective != "harm":
        limits["nats"] = goal.max_kl
    solution = problem.best(objective, limits, gap)
    if solution is None:
        raise _nearest(evidence, problem, goal, limits)
    if goal.max_kl is not None and solution.nats > goal.max_kl:
        raise GoalError(kl_out_of_reach(evidence, goal.max_kl, solution.nats, force))
    return solution


def plan_for(evidence: SearchEvidence, goal: Goal) -> Mapping[str, str]:
    """The choice that a search measured to be best for this goal; for another goal, the one that is predicted best."""
    proven = evidence.proven_for(goal.to_dict())
    evidence.aims = aims_of(goal.kinds, evidence.kinds)
    return solve(evidence, goal).choice if proven is None else proven.choice


def kl_out_of_reach(evidence: SearchEvidence, most: float, least: float, force: Mapping[str, str] | None = None) -> str:
    """A sentence for errors: the other limits allow a KL of `least` nats, `most` was asked for, and what it takes."""
    alone = _Problem(evidence, None, dict(force or {})).best("bytes", {"nats": most}, GAP)
    needed = "no choice of these formats reaches it" if alone is None else _size(evidence.numbers, alone.nbytes)
    return (
        f"within the other limits the least KL is {least:.4g} nats, and {most:g} was asked for; "
        f"the fewest bytes for that: {needed}"
    )


def within(evidence: SearchEvidence, goal: Goal, choice: Mapping[str, str], kl: float) -> bool:
    """Whether a plan with this measured KL is within the goal."""
    most = goal.most_bytes(evidence.numbers)
    if most is not None and evidence.nbytes(choice) > most:
        return False
    if goal.host is not None and evidence.host_bytes(choice) > goal.host:
        return False
    if goal.us is not None and (evidence.microseconds(choice, goal.rows) or 0.0) > goal.us:
        return False
    if goal.faster is not None:
        us = evidence.microseconds(choice, goal.rows)
        if us is None or us > _reference_time(evidence, goal.rows) / goal.faster:
            return False
    return goal.max_kl is None or kl <= goal.max_kl


def front(evidence: SearchEvidence, *, points: int = FRONT_POINTS) -> list[Solution]:
    """Plans for which no other has both fewer bytes and less damage, from the smallest to the least harmful.

    Each is the best of all for its size: these are the corners of the convex hull of all plans, which are found by
    taking steps (a group to a larger format) in the order of nats saved a byte. Of many, some are left out evenly.
    """
    choice = {}
    steps: list[tuple[float, str, str]] = []
    for name, group in evidence.groups.items():
        hull = _hull([(cost.nbytes, evidence.nats(name, fmt), fmt) for fmt, cost in group.formats.items()])
        choice[name] = hull[0][2]
        for (less, worse, _), (more, better, fmt) in pairwise(hull):
            steps.append(((worse - better) / (more - less), name, fmt))
    steps.sort(key=lambda step: -step[0])
    choices = [dict(choice)]
    for index, (rate, name, fmt) in enumerate(steps):
        choice[name] = fmt
        if index + 1 == len(steps) or steps[index + 1][0] < rate:
            choices.append(dict(choice))
    shown = min(points, len(choices))
    spread_choices = [choices[at * (len(choices) - 1) // max(1, shown - 1)] for at in range(shown)]
    return [_corner(evidence, one) for one in spread_choices]


def _corner(evidence: SearchEvidence, choice: Mapping[str, str]) -> Solution:
    nats = evidence.predict(choice)
    return Solution(choice, nats, evidence.nbytes(choice), None, nats, 0.0)


def _hull(costs: Sequence[tuple[int, float, str]]) -> list[tuple[int, float, str]]:
    """The formats on the lower convex hull of bytes and nats, the smallest first."""
    hull: list[tuple[int, float, str]] = []
    for nbytes, nats, fmt in sorted(costs):
        if hull and nats >= hull[-1][1]:
            continue
        while len(hull) > 1:
            (b0, n0, _), (b1, n1, _) = hull[-2:]
            if (n0 - n1) * (nbytes - b1) > (n1 - nats) * (b1 - b0):
                break
            hull.pop()
        if hull and hull[-1][0] == nbytes:
            hull.pop()
        hull.append((nbytes, nats, fmt))
    return hull


def _reference_time(evidence: SearchEvidence, rows: int) -> float:
    times = [group.reference_us.get(rows) for group in evidence.groups.values()]
    known_times = [time for time in times if time is not None]
    if len(known_times) < len(times):
        measured = sorted({row for group in evidence.groups.values() for row in group.reference_us})
        at = f"times at {', '.join(map(str, measured))} rows" if measured else "no times"
        raise GoalError(
            f"the evidence has {at}, and the goal is at {rows}; search again for speed",
            settings={"faster": None, "rows": rows},
        )
    return sum(known_times)


def _size(numbers: int, nbytes: int) -> str:
    return f"{nbytes:,} bytes ({8 * nbytes / numbers:.3f} bits a weight)"


def size_out_of_reach(goal: Goal, smallest: int, numbers: int, why: str = "") -> GoalError:
    """What to raise where even the smallest plan is larger than the goal: with the least that can be asked for."""
    limit = goal.most_bytes(numbers)
    assert limit is not None
    text = f"no plan has {_size(numbers, limit)} or less; the smallest has {_size(numbers, smallest)}"
    least = {"nbytes": smallest} if goal.nbytes is not None else {"bits": math.ceil(8000 * smallest / numbers) / 1000}
    return GoalError(f"{text}{why}; raise the limit, or allow smaller formats", settings=least)


def _nearest(evidence: SearchEvidence, problem: _Problem, goal: Goal, limits: Mapping[What, float]) -> GoalError:
    """The error for a goal that no plan reaches: which goals could be reached."""
    smallest = problem.best("bytes", {}, GAP)
    assert smallest is not None
    if "bytes" in limits and smallest.nbytes > limits["bytes"]:
        return size_out_of_reach(goal, smallest.nbytes, evidence.numbers)
    if goal.host is not None:
        return _nearest_in_two(problem, goal, limits)
    if "us" in limits:
        within: dict[What, float] = {"bytes": limits["bytes"]} if "bytes" in limits else {}
        fastest = problem.best("us", within, GAP)
        assert fastest is not None
        reach = _reference_time(evidence, goal.rows) / (fastest.us or 1.0)
        text = f"no plan is {goal.faster:g} times as fast as BF16 at {goal.rows} rows; the fastest is {reach:.2f} times"
        return GoalError(text, settings={"faster": math.floor(100 * reach) / 100})
    best = problem.best("nats", {}, GAP)
    assert best is not None
    return GoalError(
        f"no plan has a KL of {goal.max_kl:g} nats or less; the least is {best.nats:.4g}, with "
        f"{_size(evidence.numbers, best.nbytes)}; allow larger formats, or more",
        settings={"max_kl": float(f"{1.001 * best.nats:.4g}")},
    )


def _nearest_in_two(problem: _Problem, goal: Goal, limits: Mapping[What, float]) -> GoalError:
    """The error for a goal of two memories that no plan reaches: which goals could be reached."""
    memories: dict[What, float] = {quantity: limits[quantity] for quantity in ("bytes", "host") if quantity in limits}
    fastest = problem.best("us", memories, GAP)
    if fastest is None:
        needed = problem.best("host", {"bytes": limits["bytes"]}, GAP)
        assert needed is not None
        host = problem.evidence.host_bytes(needed.choice)
        return GoalError(
            f"no plan lies in {limits['bytes']:,.0f} bytes on the GPU and {limits['host']:,.0f} on the host; beside a "
            f"full GPU the smallest takes {host:,} on the host; raise either, or allow smaller formats"
        )
    if goal.us is not None:
        return GoalError(
            f"no plan takes {goal.us / 1e3:.2f} ms for the products of a token; the fastest in these memories takes "
            f"{(fastest.us or 0.0) / 1e3:.2f}; allow more time, or give the GPU more memory"
        )
    best = problem.best("nats", memories, GAP)
    assert best is not None
    return GoalError(
        f"no plan in these memories has a KL of {goal.max_kl:g} nats or less; the least is {best.nats:.4g}"
    )


@contextmanager
def _quiet_stdout() -> Iterator[None]:
    """A context that discards standard output, where HiGHS prints lines of its own: the output may be JSON."""
    sys.stdout.flush()
    saved, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(nowhere)


class _Problem:
    """The evidence as vectors over pairs of group and format; pairs that another of their group beats are left out."""

    def __init__(self, evidence: SearchEvidence, rows: int | None, force: Mapping[str, str]) -> None:
        self.evidence, self._rows = evidence, rows
        if rows is not None:
            _reference_time(evidence, rows)  # raises where there are no times
        unknown = [name for name in force if name not in evidence.groups]
        if unknown:
            raise GoalError(f"force names {unknown[0]!r}, no group of the evidence; name its groups")
        self._pairs: list[tuple[str, str]] = []
        for name, group in evidence.groups.items():
            if name in force and force[name] not in group.formats:
                raise GoalError(f"{name}: forced to {force[name]} without evidence; search with it first")
            formats = [force[name]] if name in force else self._undominated(name, list(group.formats))
            self._pairs += [(name, fmt) for fmt in formats]
        self._costs: dict[What, list[float]] = {
            "nats": [evidence.nats(name, fmt) for name, fmt in self._pairs],
            "bytes": [float(evidence.groups[name].formats[fmt].nbytes) for name, fmt in self._pairs],
            "host": [float(evidence.groups[name].formats[fmt].host) for name, fmt in self._pairs],
        }
        self._harms = list(zip(*(evidence.harms(name, fmt) for name, fmt in self._pairs), strict=True))
        if rows is not None:
            self._costs["us"] = [evidence.groups[name].formats[fmt].us[rows] for name, fmt in self._pairs]

    def _undominated(self, name: str, formats: Sequence[str]) -> list[str]:
        """Formats that no other of the group beats in everything; of equals the first stays."""
        group = self.evidence.groups[name]
        if self._rows is not None:
            formats = [fmt for fmt in formats if self._rows in group.formats[fmt].us]
            if not formats:
                raise GoalError(f"{name}: no format was timed at {self._rows} rows; search again for speed")

        def costs(fmt: str) -> tuple[float, ...]:
            cost = group.formats[fmt]
            sizes = (cost.nbytes, cost.host, cost.workspace)
            return (group.nats(fmt), *sizes, *(() if self._rows is None else (cost.us[self._rows],)))

        undominated = []
        for index, fmt in enumerate(formats):
            mine = costs(fmt)
            beaten = any(
                all(theirs <= our_cost for theirs, our_cost in zip(costs(other), mine, strict=True))
                and (costs(other) != mine or at < index)
                for at, other in enumerate(formats)
                if at != index
            )
            if not beaten:
                undominated.append(fmt)
        return undominated

    def best(self, objective: What, limits: Mapping[What, float], gap: float) -> Solution | None:
        """The choice that costs least within the limits, None where there is none."""
        tightened = dict(limits)
        if "bytes" in tightened:
            tightened["bytes"] -= self.evidence.staying_bytes
        for _ in range(8):  # HiGHS keeps rows to a millionth; bytes are kept exactly
            solved = self._solve(objective, tightened, gap)
            if solved is None:
                return None
            choice, bound, distance = solved
            nbytes = self.evidence.nbytes(choice)
            totals: dict[What, int] = {"bytes": nbytes, "host": self.evidence.host_bytes(choice)}
            over = {
                name: totals[name] - limits[name] for name in totals if name in limits and totals[name] > limits[name]
            }
            if not over:
                us = None if self._rows is None else self.evidence.microseconds(choice, self._rows)
                return Solution(choice, self.evidence.predict(choice), nbytes, us, bound, distance)
            for quantity, more in over.items():
                tightened[quantity] -= more
        return None

    def _solve(
        self, objective: What, limits: Mapping[What, float], gap: float
    ) -> tuple[dict[str, str], float, float] | None:
        optimize = require("scipy.optimize", purpose="searching a plan", extra="search")
        numpy = require("numpy", purpose="searching a plan")
        aims = numpy.array(self._harms if objective == "harm" else [self._costs[objective]])
        scale = _SPAN / max(float(aims.sum(1).max()), 1e-300)
        costs = aims[0]
        # Of several aims the largest is one more variable, after the pairs, and all that is to be small.
        more = numpy.zeros(int(len(aims) > 1))
        # And one that is no less than the workspace of any product, which counts once.
        work = numpy.array([float(self.evidence.groups[name].formats[fmt].workspace) for name, fmt in self._pairs])
        most = float(work.max())
        spare = numpy.zeros(int(most > 0))
        beside = len(more) + len(spare)
        names = list(self.evidence.groups)
        rows = numpy.array([names.index(name) for name, _ in self._pairs])
        one_each = (rows[None, :] == numpy.arange(len(names))[:, None]).astype(float)
        constraints = [optimize.LinearConstraint(_widened(one_each, beside), 1, 1)]
        if len(more):
            below = numpy.hstack([aims * scale, -numpy.ones((len(aims), 1))])
            constraints.append(optimize.LinearConstraint(_widened(below, len(spare)), -numpy.inf, 0))
            costs = 0 * costs
        if len(spare):
            at = numpy.flatnonzero(work)
            fits = numpy.zeros((len(at), len(work) + beside))
            fits[numpy.arange(len(at)), at], fits[:, -1] = work[at] / most, -1
            constraints.append(optimize.LinearConstraint(fits, -numpy.inf, 0))
        for quantity, limit in limits.items():
            if limit < 0:
                return None
            row = numpy.array(self._costs[quantity])
            unit = max(limit, float(row.max()) * 1e-6, 1e-300)
            row = _widened(row[None, :] / unit, beside)
            if quantity == "bytes" and len(spare):
                row[0, -1] = most / unit
            constraints.append(optimize.LinearConstraint(row, -numpy.inf, limit / unit))
        with _quiet_stdout():
            result = optimize.milp(
                numpy.concatenate([costs * scale, more + 1, spare + scale * most * (objective == "bytes")]),
                integrality=numpy.concatenate([numpy.ones(len(costs)), more, spare]),
                bounds=optimize.Bounds(0, numpy.concatenate([numpy.ones(len(costs)), more + numpy.inf, spare + 1])),
                constraints=constraints,
                options={"mip_rel_gap": gap, "node_limit": NODES_OF_TWO if "host" in limits else MOST_NODES},
            )
        if result.x is None:
            return None
        choice: dict[str, tuple[float, str]] = {}
        for (name, fmt), share in zip(self._pairs, result.x[: len(costs)], strict=True):
            if name not in choice or share > choice[name][0]:
                choice[name] = (share, fmt)
        bound = result.mip_dual_bound if result.mip_dual_bound is not None else result.fun
        distance = result.mip_gap if result.mip_gap is not None else 0.0
        return {name: fmt for name, (_, fmt) in choice.items()}, float(bound / scale), float(distance)


def _widened(rows: Any, columns: int) -> Any:
    """A matrix of constraints with so many columns of zeros added."""
    numpy = require("numpy", purpose="searching a plan")
    return numpy.pad(rows, ((0, 0), (0, columns)))


# ---- rivals ----------------------------------------------------------------------------------------------------------

WITHIN = 1.03  # of rivals in this range of bytes the one with the least predicted damage is taken, else the smallest
MOST_UNIFORM = 2  # of those the ones with the least predicted damage
CANNOT_WIN = 1.2  # times the least predicted damage of a uniform plan: predictions are not off by so much
MORE_BITS = 0.9  # a heuristic gives the tensors that it favours at least so many bits more
Kind = Literal["plan", "uniform", "heuristic"]


@dataclass(frozen=True)
class RivalPlan:
    """A plan to compare with that needs no search: a label, a kind, and a format for every group."""

    label: str
    kind: Kind
    choice: Mapping[str, str]


def uniform_plans(evidence: SearchEvidence) -> list[RivalPlan]:
    """Make a plan of each format for all groups; a group that it does not hold has the next larger that it does."""
    return [RivalPlan(fmt, "uniform", _uniform(evidence, fmt)) for fmt in evidence.formats if _is_common(evidence, fmt)]


def rivals_of(evidence: SearchEvidence, nbytes: int) -> list[RivalPlan]:
    """Uniform plans and heuristics with no fewer bytes than a plan, the nearest ones."""
    unique: dict[tuple[tuple[str, str], ...], RivalPlan] = {}
    for rival in [*best_uniform(evidence, nbytes), *_heuristics(evidence, nbytes)]:
        unique.setdefault(tuple(sorted(rival.choice.items())), rival)
    return list(unique.values())


def best_uniform(evidence: SearchEvidence, nbytes: int) -> list[RivalPlan]:
    """The one or two uniform plans of little more bytes that are predicted best, else the next larger one."""
    uniform = sorted(uniform_plans(evidence), key=lambda rival: evidence.nbytes(rival.choice))
    above = [rival for rival in uniform if evidence.nbytes(rival.choice) >= nbytes]
    close = [rival for rival in above if evidence.nbytes(rival.choice) <= WITHIN * nbytes]
    close.sort(key=lambda rival: evidence.predict(rival.choice))
    worst = CANNOT_WIN * evidence.predict(close[0].choice) if close else 0.0
    return [rival for rival in close[:MOST_UNIFORM] if evidence.predict(rival.choice) <= worst] or above[:1]


def nearest_uniform(evidence: SearchEvidence, bits: float) -> RivalPlan:
    """The uniform plan that is predicted best, of those about as large as the one nearest to some bits a weight."""
    plans = uniform_plans(evidence) or [RivalPlan(fmt, "uniform", _uniform(evidence, fmt)) for fmt in evidence.formats]
    nbytes = bits * evidence.numbers / 8
    nearest = min(abs(math.log(evidence.nbytes(plan.choice) / nbytes)) for plan in plans)
    close = [
        plan for plan in plans if abs(math.log(evidence.nbytes(plan.choice) / nbytes)) <= nearest + math.log(WITHIN)
    ]
    return min(close, key=lambda plan: (evidence.predict(plan.choice), plan.label))


def may_win(evidence: SearchEvidence, rival: RivalPlan, plan: Mapping[str, str], error: float) -> bool:
    """Whether a rival is worth measuring, if its prediction may be wrong by a factor of `error`."""
    most = max(CANNOT_WIN, error) * evidence.predict(plan)
    return rival.kind == "uniform" or evidence.predict(rival.choice) <= most


def _heuristics(evidence: SearchEvidence, nbytes: int) -> list[RivalPlan]:
    """Make a plan for each heuristic, all with one format for what they do not favour: rounding takes most of a proof.

    Of these formats the one that allows the most heuristics, and with them the fewest bytes.
    """
    best: list[RivalPlan] = []
    for low in evidence.formats:
        tried = (
            _nearest_above(evidence, nbytes, _two_formats(evidence, label, high, low))
            for label, high in HEURISTICS.items()
        )
        heuristics = [rival for rival in tried if rival is not None]
        if (-len(heuristics), _total(evidence, heuristics)) < (-len(best), _total(evidence, best)):
            best = heuristics
    return best


def _total(evidence: SearchEvidence, rivals: Iterable[RivalPlan]) -> int:
    return sum(evidence.nbytes(rival.choice) for rival in rivals)


def _is_common(evidence: SearchEvidence, fmt: str) -> bool:
    """Whether most of the weights can have the format: else a plan of it would mostly be a plan of another.

    Rounded inputs are a rival's where they are all that there is, or may be faster: else they only add damage.
    """
    is_timed = any(group.formats[fmt].us for group in evidence.groups.values() if fmt in group.formats)
    if weight_format(fmt) != fmt and not is_timed and _is_common(evidence, weight_format(fmt)):
        return False
    numbers = sum(group.numbers for group in evidence.groups.values() if fmt in group.formats)
    return 2 * numbers > sum(group.numbers for group in evidence.groups.values())


def _uniform(evidence: SearchEvidence, fmt: str) -> dict[str, str]:
    order = evidence.formats
    choice = {}
    for name, group in evidence.groups.items():
        larger = [name for name in order[order.index(fmt) :] if name in group.formats]
        choice[name] = larger[0] if larger else max(group.formats, key=lambda name: group.formats[name].nbytes)
    return choice


def _two_formats(
    evidence: SearchEvidence, label: str, is_high: Callable[[SearchEvidence, str], bool], low_format: str
) -> Iterable[RivalPlan]:
    """Plans that give groups chosen by `is_high` each format of more bits, and all others `low_format`."""
    high = {name for name in evidence.groups if is_high(evidence, name)}
    if not _is_common(evidence, low_format) or not high or len(high) == len(evidence.groups):
        return
    low = _uniform(evidence, low_format)
    for high_format in evidence.formats:
        if _is_common(evidence, high_format) and bits_of(high_format) >= bits_of(low_format) + MORE_BITS:
            more = _uniform(evidence, high_format)
            choice = {name: more[name] if name in high else low[name] for name in evidence.groups}
            yield RivalPlan(f"{label} in {high_format}, others in {low_format}", "heuristic", choice)


def _nearest_above(evidence: SearchEvidence, nbytes: int, rivals: Iterable[RivalPlan]) -> RivalPlan | None:
    """The plan that is predicted best of those close above the size, else the smallest above it."""
    above = [rival for rival in rivals if evidence.nbytes(rival.choice) >= nbytes]
    close = [rival for rival in above if evidence.nbytes(rival.choice) <= WITHIN * nbytes]
    if close:
        return min(close, key=lambda rival: (evidence.predict(rival.choice), rival.label))
    return min(above, key=lambda rival: (evidence.nbytes(rival.choice), rival.label), default=None)


def _is_outer(evidence: SearchEvidence, name: str) -> bool:
    """Whether a group lies in the first or last layer, or outside of the layers."""
    layers = sorted({int(layer) for group in evidence.groups if (layer := place_of(group)[0])})
    layer = place_of(name)[0]
    return not layer or int(layer) in (layers[0], layers[-1])


def _is_attention(evidence: SearchEvidence, name: str) -> bool:
    return any(role == "attn" for _, role in evidence.groups[name].tensors.values())


def _is_embedding(evidence: SearchEvidence, name: str) -> bool:
    return any(role == "embed" for _, role in evidence.groups[name].tensors.values())


HEURISTICS: dict[str, Callable[[SearchEvidence, str], bool]] = {
    "first and last layers": _is_outer,
    "attention": _is_attention,
    "embeddings": _is_embedding,
}
