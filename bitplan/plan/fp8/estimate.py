"""Estimates a layer's speedup where it was never measured: at other token counts, and at other shapes.

A policy itself answers BF16 between a loss and a win, and for a shape that was not measured. That gives speed away
where the neighbours leave little doubt: so there is an estimate, and every reason that rests on one says so.

    counts    between two measured ones FP8's share of BF16's time runs along a curve over 1 / tokens that follows the
              points around and stays between the two: FP8's fixed costs in a step (casts of weights, launches) are
              spread over its tokens. Below the smallest count FP8 is assumed to take as long as there.
              Above the largest, up to REACH times it, FP8 gains as much as there; if it was falling, it falls on
    shapes    two things decide what FP8 gains: the work of a layer (tokens x out x in, against what a launch costs) and
              its intensity (1 / (1 / tokens + 1 / out + 1 / in): multiplications for each number that is read, cast or
              written). Points of an H200 lie in the order of their intensity nearly without exception, whatever their
              shape and count. So a layer gains at least what a measured layer of the same kind gains at a token count
              at which that layer has neither more work nor a higher intensity; the best of these counts

A layer is not estimated to win if a layer with at least as much work and intensity was measured to lose, nor beside a
count that was tried and failed, nor at a count that was measured for this very shape: a measured loss or "undecided"
stands. `low` is the estimate from the lower ends of the intervals: if it does not reach the threshold, the estimate is
within the noise.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bitplan.plan.fp8.policy import Question, alike_rules, matching_rules
from bitplan.plan.fp8.token_ranges import BandPolicy, BandRule, Point

# How many times the largest measured count an estimate reaches. One doubling: over every measured doubling the speedup
# rose or stayed the same, and no more is assumed. `Question.extrapolate` asks for all counts.
REACH = 2


@dataclass(frozen=True)
class SpeedupEstimate:
    """A speedup that was not measured, its lower end, and its reason."""

    speedup: float
    low: float
    reason: str


def estimate_speedup(policy: BandPolicy, question: Question) -> SpeedupEstimate | None:
    """The estimate for a layer with a shape, or None where neighbours are missing."""
    tokens, shape = question.tokens, question.shape
    if tokens is None or shape is None:
        return None
    own = next(iter(matching_rules(policy, question)), None)
    if own is not None:
        here = _at(own, tokens)
        if here is None or own.points[0].tokens <= tokens <= own.points[-1].tokens:
            return here
    alike = [rule for rule in alike_rules(policy, question) if tokens <= REACH * rule.points[-1].tokens]
    near = [(rule, _equal_counts(rule, question)) for rule in alike]
    estimates = [(rule, _at(rule, least)) for rule, (least, _) in near]
    known = [(rule, estimate) for rule, estimate in estimates if estimate is not None]
    if not known:
        return None
    rule, best = max(known, key=lambda each: each[1].low)  # the first of equals
    reason = best.reason
    if rule is not own:
        reason = f"never measured itself; it has no less work and intensity than {reason}"
    against = _easier_loss(policy, near)
    if against is not None and best.speedup >= policy.speedup_threshold:
        return SpeedupEstimate(against.speedup, against.low, f"{reason}; but no more than {against.reason}")
    return SpeedupEstimate(best.speedup, best.low, reason)


def _equal_counts(rule: BandRule, question: Question) -> tuple[float, float]:
    """The two counts at which a rule's shape has the intensity, or the work, of the layer asked about, sorted.

    Experts share the tokens, so each has the intensity of its share.
    """
    tokens, (rows, columns) = question.tokens or 1, question.shape or rule.shape
    if rule.shape == (rows, columns):
        return tokens, tokens
    experts = rule.num_gemms or 1
    rest = experts / tokens + 1 / rows + 1 / columns - 1 / rule.shape[0] - 1 / rule.shape[1]
    by_intensity = experts / rest if rest > 0 else math.inf
    by_work = tokens * rows * columns / (rule.shape[0] * rule.shape[1])
    return min(by_intensity, by_work), max(by_intensity, by_work)


def _easier_loss(policy: BandPolicy, near: Iterable[tuple[BandRule, tuple[float, float]]]) -> SpeedupEstimate | None:
    """The worst speedup of layers with at least as much work and intensity, if it is below the threshold."""
    estimates = [
        _at(rule, max(most, rule.points[0].tokens)) for rule, (_, most) in near if most <= rule.points[-1].tokens
    ]
    lost = [each for each in estimates if each is not None and each.speedup < policy.speedup_threshold]
    return min(lost, key=lambda each: each.speedup, default=None)


# ---- one measured shape at any count ---------------------------------------------------------------------------------


def _at(rule: BandRule, tokens: float) -> SpeedupEstimate | None:
    """The least speedup of a rule's own shape at a count; None beside a count that was tried and failed."""
    points = rule.points
    index = bisect_left([point.tokens for point in points], tokens)
    after = points[index] if index < len(points) else None
    before = points[index - 1] if index and (after is None or after.tokens > tokens) else None
    beside = [point for point in (before, after) if point is not None]
    if any(point.speedup is None for point in beside):
        return None
    if before is None:
        speedup = _speedup(beside[0]) * tokens / beside[0].tokens
        by = "" if tokens == beside[0].tokens else ", were FP8's time still that"
    elif after is None:
        speedup = _after_the_last(points, tokens)
        by = ", the largest count"
    else:
        speedup = _between(points, index, tokens)
        by = ""
    low = speedup * min((point.low or 0.0) / _speedup(point) for point in beside)
    where = f"{rule.shape[0]}x{rule.shape[1]} at {tokens:.0f} tokens"
    known = " and ".join(point.describe() for point in beside)
    return SpeedupEstimate(speedup, low, f"{where}, about {speedup:.3f}x by {known}{by}")


def _after_the_last(points: Sequence[Point], tokens: float) -> float:
    last = _speedup(points[-1])
    if len(points) == 1 or points[-2].speedup is None:
        return last
    fallen = max(points[-2].speedup - last, 0.0) / math.log(points[-1].tokens / points[-2].tokens)
    return max(last - fallen * math.log(tokens / points[-1].tokens), 0.0)


def _between(points: Sequence[Point], index: int, tokens: float) -> float:
    """The speedup by a curve of FP8's share of BF16's time over 1 / tokens, through all points up to a failed one."""
    first, end = index, index
    while first and points[first - 1].speedup is not None:
        first -= 1
    while end < len(points) and points[end].speedup is not None:
        end += 1
    known = points[first:end][::-1]  # 1 / tokens rises
    shares = [1 / _speedup(point) for point in known]
    return 1 / max(_rising_curve([1 / point.tokens for point in known], shares, 1 / tokens), sys.float_info.min)


def _rising_curve(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """A cubic between each two points; its slopes (Fritsch and Butland's) keep it between the two."""
    steps = [after - before for before, after in pairwise(xs)]
    slopes = [(after - before) / step for (before, after), step in zip(pairwise(ys), steps, strict=True)]
    at = min(max(bisect_left(xs, x), 1), len(steps)) - 1
    ends = []
    for point in (at, at + 1):
        if point in (0, len(steps)):
            ends.append(slopes[at])
        elif slopes[point - 1] * slopes[point] <= 0:
            ends.append(0.0)
        else:
            one, two = 2 * steps[point] + steps[point - 1], steps[point] + 2 * steps[point - 1]
            ends.append((one + two) / (one / slopes[point - 1] + two / slopes[point]))
    t = (x - xs[at]) / steps[at]
    line = ys[at] * (1 - t) ** 2 * (1 + 2 * t) + ys[at + 1] * t**2 * (3 - 2 * t)
    return line + steps[at] * t * (1 - t) * ((1 - t) * ends[0] - t * ends[1])


def _speedup(point: Point) -> float:
    assert point.speedup is not None  # points without a speedup were refused before
    return point.speedup
