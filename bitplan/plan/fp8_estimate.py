"""What a layer would gain where it was never measured: between measured token counts, and between measured shapes.

A policy's own answer between a loss and a win is BF16, and for a shape that was not measured too. Both throw speed away
where the neighbours leave little doubt, so whoever asks for it gets an estimate, and every reason says that it is one:

    tokens    between two measured counts the speedup runs along a straight line over the logarithm of the count
    shapes    of the same kind, parallel size, recipe and product, under any name: those that fit into the asked one
              (smaller), and those that it fits into (larger). FP8 gains with size, since casts cost per number and
              products per multiplication; so what the best of the smaller gains, the asked one gains at least. Where
              all smaller ones lose, a straight line over the logarithm of out x in, to the least of the larger ones

Nothing is estimated outside the measured counts, beside a count that was tried and failed, nor for a shape that no
measured one is smaller than. A count that was measured for the very shape is never estimated: lost and undecided stay
what they are.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bitplan.plan.fp8_bands import BandPolicy, BandRule, Point
from bitplan.plan.fp8_policy import Question
from bitplan.plan.fp8_terms import GROUPED_KINDS


@dataclass(frozen=True)
class Estimate:
    """A speedup that was not measured, from what it comes, and up to how many tokens its neighbours reach."""

    speedup: float
    reason: str
    tokens_to: int


def estimate_speedup(policy: BandPolicy, question: Question) -> Estimate | None:
    """The estimate for a layer with a shape, or None where neighbours are missing."""
    tokens, shape = question.tokens, question.shape
    if tokens is None or shape is None:
        return None
    rules = list(_alike(policy, question))
    own = [rule for rule in rules if tuple(rule.shape) == tuple(shape) and rule.name == _name(question)]
    if own:
        return _at(own[0], tokens)
    smaller = _known(rules, tokens, lambda rule: rule.shape[0] <= shape[0] and rule.shape[1] <= shape[1])
    larger = _known(rules, tokens, lambda rule: rule.shape[0] >= shape[0] and rule.shape[1] >= shape[1])
    if not smaller:
        return None
    below, low = max(smaller, key=lambda each: each[1].speedup)
    if low.speedup >= policy.speedup_threshold or not larger:
        return _told(shape, f"a smaller one, {low.reason}", low.speedup, low.tokens_to)
    above, high = min(larger, key=lambda each: each[1].speedup)
    share = _share(_size(below), shape[0] * shape[1], _size(above))
    speedup = low.speedup + share * (high.speedup - low.speedup)
    told = f"between a smaller one, {low.reason}, and a larger one, {high.reason}"
    return _told(shape, told, speedup, min(low.tokens_to, high.tokens_to))


def _known(
    rules: Iterable[BandRule], tokens: int, takes: Callable[[BandRule], bool]
) -> list[tuple[BandRule, Estimate]]:
    """The rules of some shapes that have a speedup at this count, with it."""
    found = [(rule, _at(rule, tokens)) for rule in rules if takes(rule)]
    return [(rule, estimate) for rule, estimate in found if estimate is not None]


def _alike(policy: BandPolicy, question: Question) -> Iterable[BandRule]:
    kind = question.looked_up_kind
    size = (None, question.etp, question.num_gemms) if kind in GROUPED_KINDS else (question.tp, None, None)
    return (
        rule
        for rule in policy.rules
        if (rule.part, rule.kind, rule.gemm) == (question.part, kind, question.gemm)
        and (rule.tp, rule.etp, rule.num_gemms) == size
        and question.recipe in (None, rule.recipe)
    )


def _name(question: Question) -> str | None:
    return None if question.looked_up_kind in GROUPED_KINDS else question.name


def _at(rule: BandRule, tokens: int) -> Estimate | None:
    """The speedup of a rule's own shape at a count between two that have one."""
    points = rule.points
    index = bisect_left([point.tokens for point in points], tokens)
    if index == len(points) or (index == 0 and points[0].tokens != tokens):
        return None
    after = points[index]
    before = after if after.tokens == tokens else points[index - 1]
    first, second = before.speedup, after.speedup
    if first is None or second is None:
        return None  # it was tried there and failed
    speedup = first + _share(before.tokens, tokens, after.tokens) * (second - first)
    where = f"{rule.shape[0]}x{rule.shape[1]}"
    return Estimate(speedup, f"{where} about {speedup:.3f}x by {_between(before, after)}", points[-1].tokens)


def _between(before: Point, after: Point) -> str:
    if before is after:
        return after.told()
    return f"{before.told()} and {after.told()}"


def _told(shape: tuple[int, int], told: str, speedup: float, tokens_to: int) -> Estimate:
    return Estimate(speedup, f"{shape[0]}x{shape[1]} was never measured; {told}", tokens_to)


def _size(rule: BandRule) -> int:
    return rule.shape[0] * rule.shape[1]


def _share(low: int, at: int, high: int) -> float:
    return 0.0 if low == high else (math.log(at) - math.log(low)) / (math.log(high) - math.log(low))
