"""The plans that people make without a search: one format for all, or more bits for layers that are said to need it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from bitplan.formats import get_format
from bitplan.searching.evidence import SearchEvidence
from bitplan.searching.groups import place_of

WITHIN = 1.03  # of rivals in this range of bytes the one with the least predicted damage is taken, else the smallest
MOST_UNIFORM = 2  # of those the ones with the least predicted damage
CANNOT_WIN = 1.2  # times the least predicted damage of a uniform plan: predictions are not off by so much
MORE_BITS = 0.9  # a heuristic gives the tensors that it favours at least so many bits more
Kind = Literal["plan", "uniform", "heuristic"]


@dataclass(frozen=True)
class RivalPlan:
    """A label, and a format for every group."""

    label: str
    kind: Kind
    choice: Mapping[str, str]


def uniform_plans(evidence: SearchEvidence) -> list[RivalPlan]:
    """Each format for all groups; where one cannot hold it, the next larger that can."""
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
    """Of uniform plans about as large as the one nearest to some bits a weight, the one that is predicted best."""
    plans = uniform_plans(evidence) or [RivalPlan(fmt, "uniform", _uniform(evidence, fmt)) for fmt in evidence.formats]
    wanted = bits * evidence.numbers / 8
    nearest = min(abs(math.log(evidence.nbytes(plan.choice) / wanted)) for plan in plans)
    close = [
        plan for plan in plans if abs(math.log(evidence.nbytes(plan.choice) / wanted)) <= nearest + math.log(WITHIN)
    ]
    return min(close, key=lambda plan: (evidence.predict(plan.choice), plan.label))


def may_win(evidence: SearchEvidence, rival: RivalPlan, plan: Mapping[str, str], error: float) -> bool:
    """Whether a rival is worth measuring: the best uniform plans always are, heuristics where predictions that are
    off by a factor of `error` leave them a chance.
    """
    most = max(CANNOT_WIN, error) * evidence.predict(plan)
    return rival.kind == "uniform" or evidence.predict(rival.choice) <= most


def _heuristics(evidence: SearchEvidence, nbytes: int) -> list[RivalPlan]:
    """One plan for each heuristic, all with one format for what they do not favour: rounding takes most of a proof.

    Of these formats the one that allows the most heuristics, and with them the fewest bytes.
    """
    best: list[RivalPlan] = []
    for low in evidence.formats:
        tried = (
            _nearest(evidence, nbytes, _two_formats(evidence, label, high, low)) for label, high in HEURISTICS.items()
        )
        found = [rival for rival in tried if rival is not None]
        if (-len(found), _total(evidence, found)) < (-len(best), _total(evidence, best)):
            best = found
    return best


def _total(evidence: SearchEvidence, rivals: Iterable[RivalPlan]) -> int:
    return sum(evidence.nbytes(rival.choice) for rival in rivals)


def _is_common(evidence: SearchEvidence, fmt: str) -> bool:
    """Whether most of the weights can have the format: else a plan of it is a plan of another."""
    held = sum(group.numbers for group in evidence.groups.values() if fmt in group.formats)
    return 2 * held > sum(group.numbers for group in evidence.groups.values())


def _uniform(evidence: SearchEvidence, fmt: str) -> dict[str, str]:
    order = evidence.formats
    choice = {}
    for name, group in evidence.groups.items():
        larger = [each for each in order[order.index(fmt) :] if each in group.formats]
        choice[name] = larger[0] if larger else max(group.formats, key=lambda each: group.formats[each].nbytes)
    return choice


def _two_formats(
    evidence: SearchEvidence, label: str, is_high: Callable[[SearchEvidence, str], bool], low_format: str
) -> Iterable[RivalPlan]:
    """Plans with some groups in each format of more bits, all others in this one."""
    high = {name for name in evidence.groups if is_high(evidence, name)}
    if not _is_common(evidence, low_format) or not high or len(high) == len(evidence.groups):
        return
    low = _uniform(evidence, low_format)
    for high_format in evidence.formats:
        if _is_common(evidence, high_format) and _bits(high_format) >= _bits(low_format) + MORE_BITS:
            more = _uniform(evidence, high_format)
            choice = {name: more[name] if name in high else low[name] for name in evidence.groups}
            yield RivalPlan(f"{label} in {high_format}, others in {low_format}", "heuristic", choice)


def _bits(fmt: str) -> float:
    return get_format(fmt).bits_per_weight((4096, 4096))


def _nearest(evidence: SearchEvidence, nbytes: int, rivals: Iterable[RivalPlan]) -> RivalPlan | None:
    """Of those close above the size the one that is predicted best, else the smallest above it."""
    above = [rival for rival in rivals if evidence.nbytes(rival.choice) >= nbytes]
    close = [rival for rival in above if evidence.nbytes(rival.choice) <= WITHIN * nbytes]
    if close:
        return min(close, key=lambda rival: (evidence.predict(rival.choice), rival.label))
    return min(above, key=lambda rival: (evidence.nbytes(rival.choice), rival.label), default=None)


def _is_outer(evidence: SearchEvidence, name: str) -> bool:
    """The first and the last layer, and what lies outside of them."""
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
