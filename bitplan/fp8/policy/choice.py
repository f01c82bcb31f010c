"""Which products of a layer run in FP8 and by which recipe, and for how many tokens that holds.

This is the one answer: `bitplan fp8 explain` and the table of `apply_fp8` show it, `apply_fp8` builds by it, and the
adapters ask it. It is made from `policy.decide`: what the rules say of the module, or of one product by itself.

A policy answers for the whole module (all three products in FP8, casts shared) and, where they were timed apart, for
each product alone (this one in FP8, the others in BF16). Of two ways to use FP8 the faster by the evidence is taken:

    whole      all three in FP8, where the whole module was measured to win, or is estimated to: its speedup
    some       the products that win alone. Together they share casts, so they save at least the sum of what each
               saves: with savings s = 1 - 1 / speedup they promise a speedup of 1 / (1 - sum of s)

"Some" must promise APART_MARGIN times the speed of the alternative, BF16 or the whole module. A product that loses
alone may still gain beside the others, whose casts it uses at no cost; so a module that wins stays whole, though some
products lose alone, unless the others alone are worth more. If neither way wins: BF16, with the reason. Among recipes
the one with the larger speedup is taken. Version 1 knows whole modules only, and its answers are taken as they are.

Without a shape, all shapes that were measured under the key must agree. A choice is made for one token count. Between
`holds_from` and `holds_to` the policy chooses the same products under the same recipe; a model that is given other
counts should warn.

A policy itself answers BF16 between a loss and a win, and for a shape that was not measured. That gives speed away
where the neighbours leave little doubt: so, if `Question.estimate`, the speedup of a whole module is estimated there,
and every reason that rests on an estimate says so.

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from bitplan.fp8.policy.policy import Fp8Decision, Question, alike_rules, decide, matching_rules, threshold_rule
from bitplan.fp8.policy.rules import LayerRule, Point, Policy
from bitplan.fp8.policy.vocabulary import (
    DEFAULT_RECIPE,
    GEMMS,
    LOSE,
    MODULE,
    PRODUCTS,
    UNDECIDED,
    UNMEASURED,
    shape_obstacle,
)
from bitplan.fp8.recipes import RECIPES

# ---- estimates -------------------------------------------------------------------------------------------------------


# How many times the largest measured count an estimate reaches. One doubling: over every measured doubling the speedup
# rose or stayed the same, and no more is assumed. `Question.extrapolate` asks for all counts.
REACH = 2


@dataclass(frozen=True)
class SpeedupEstimate:
    """A speedup that was not measured, its lower end, and its reason."""

    speedup: float
    low: float
    reason: str


def estimate_speedup(policy: Policy, question: Question) -> SpeedupEstimate | None:
    """The estimate for a layer with a shape, or None where neighbours are missing."""
    tokens, shape = question.tokens, question.shape
    if tokens is None or shape is None:
        return None
    measured = next(iter(matching_rules(policy, question)), None)
    if measured is not None:
        estimate_here = _at(measured, tokens)
        if estimate_here is None or measured.points[0].tokens <= tokens <= measured.points[-1].tokens:
            return estimate_here
    alike = [rule for rule in alike_rules(policy, question) if tokens <= REACH * rule.points[-1].tokens]
    near = [(rule, _equal_counts(rule, question)) for rule in alike]
    estimates = [(rule, _at(rule, least)) for rule, (least, _) in near]
    known = [(rule, estimate) for rule, estimate in estimates if estimate is not None]
    if not known:
        return None
    rule, best = max(known, key=lambda pair: pair[1].low)  # the first of equals
    reason = best.reason
    if rule is not measured:
        reason = f"never measured itself; it has no less work and intensity than {reason}"
    against = _easier_loss(policy, near)
    if against is not None and best.speedup >= policy.speedup_threshold:
        return SpeedupEstimate(against.speedup, against.low, f"{reason}; but no more than {against.reason}")
    return SpeedupEstimate(best.speedup, best.low, reason)


def _equal_counts(rule: LayerRule, question: Question) -> tuple[float, float]:
    """The token counts, sorted, at which a rule's shape has the asked layer's intensity, and its work."""
    tokens, (rows, columns) = question.tokens or 1, question.shape or rule.shape
    if rule.shape == (rows, columns):
        return tokens, tokens
    experts = rule.num_gemms or 1
    rest = experts / tokens + 1 / rows + 1 / columns - 1 / rule.shape[0] - 1 / rule.shape[1]
    by_intensity = experts / rest if rest > 0 else math.inf
    by_work = tokens * rows * columns / (rule.shape[0] * rule.shape[1])
    return min(by_intensity, by_work), max(by_intensity, by_work)


def _easier_loss(policy: Policy, near: Iterable[tuple[LayerRule, tuple[float, float]]]) -> SpeedupEstimate | None:
    """The worst speedup of layers with at least as much work and intensity, if it is below the threshold."""
    estimates = [
        _at(rule, max(most, rule.points[0].tokens)) for rule, (_, most) in near if most <= rule.points[-1].tokens
    ]
    lost = [estimate for estimate in estimates if estimate is not None and estimate.speedup < policy.speedup_threshold]
    return min(lost, key=lambda estimate: estimate.speedup, default=None)


# ---- one measured shape at any count ---------------------------------------------------------------------------------


def _at(rule: LayerRule, tokens: float) -> SpeedupEstimate | None:
    """The estimated speedup of a rule's shape at a token count; None beside a count that was tried and failed."""
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


# ---- choices ---------------------------------------------------------------------------------------------------------


# The gain over BF16, or over the whole module, that some products must promise. A single product has casts and launches
# of its own, which cost the host time in a whole layer that the time of one module does not show: on an H200 at 512
# tokens wgrad alone promised 1.068x (fc1) and 1.029x (fc2) in CUDA graphs, and the layer made of them ran at 0.67x
# without graphs. The margin is above these.
APART_MARGIN = 1.10

_ANY_COUNT = 2**47  # beyond any model's tokens
_STEP = 2**0.125  # between the counts that are tried to find how far a choice holds; shorter runs may be missed


@dataclass(frozen=True)
class Fp8Choice:
    """Products in FP8 (none: BF16), the recipe, why, and the range of tokens for which this holds (None: no end).

    `tokens` and both bounds count rows of the product: for experts after topk.
    """

    products: tuple[str, ...]
    recipe: str | None
    answer: str
    reason: str
    tokens: int | None
    speedup: float | None = None
    holds_from: int | None = None
    holds_to: int | None = None

    def __bool__(self) -> bool:
        return bool(self.products)

    @property
    def precision(self) -> str:
        if not self.products:
            return "bf16"
        return "fp8" if self.products == PRODUCTS else f"fp8 {', '.join(self.products)}"

    def precision_of(self, product: str) -> str:
        return "fp8" if product in self.products else "bf16"

    def to_dict(self) -> dict[str, Any]:
        return {"precision": self.precision} | asdict(self)


def choose_products(policy: Policy, question: Question, *, apart: bool = True) -> Fp8Choice:
    """The products of one layer that run in FP8, by `question.recipe` or else by the recipe that is fastest in the
    policy.

    `apart=False` is for layers that run all three products in FP8 or none.
    """
    question = replace(question, gemm=MODULE)
    choices = [_by_recipe(policy, replace(question, recipe=recipe), apart) for recipe in _recipes(policy, question)]
    wins = [choice for choice in choices if choice]
    if not wins:
        return choices[0] if len(choices) == 1 else _none_of(choices)
    best = max(wins, key=lambda win: win.speedup or 0.0)  # the first of equals
    others = f"; the best of {len(choices)} recipes" if len(choices) > 1 else ""
    return replace(best, reason=best.reason + others)


def _recipes(policy: Policy, question: Question) -> Sequence[str | None]:
    if question.recipe is not None:
        return (question.recipe,)
    if policy.version == 1:
        return (DEFAULT_RECIPE,)  # it names no recipe
    recipes = {rule.recipe for rule in (policy.rules if question.estimate else _rules_of(policy, question))}
    return [recipe for recipe in RECIPES if recipe in recipes] or (None,)


def _rules_of(policy: Policy, question: Question) -> list[LayerRule]:
    """The policy's rules for a layer: of the whole module, and of each of its products."""
    return [rule for gemm in GEMMS for rule in matching_rules(policy, replace(question, gemm=gemm))]


def _none_of(choices: list[Fp8Choice]) -> Fp8Choice:
    first = next((choice for choice in choices if choice.answer in (UNDECIDED, LOSE)), choices[0])
    reasons = "; ".join(f"{choice.recipe}: {choice.reason}" for choice in choices)
    return replace(first, recipe=None, reason=reasons)


def _by_recipe(policy: Policy, question: Question, apart: bool) -> Fp8Choice:
    """The products that run in FP8 by `question.recipe`, and for which token counts that holds."""
    if policy.version == 1:
        return _by_threshold(policy, question)
    shapes = []
    if question.shape is None:  # all shapes measured under the key, by any recipe
        shapes = sorted({rule.shape for rule in _rules_of(policy, replace(question, recipe=None))})
    if len(shapes) > 1:
        return _of_all_shapes([_by_recipe(policy, replace(question, shape=shape), apart) for shape in shapes])
    asked = replace(question, shape=shapes[0]) if shapes else question
    choice = _at_count(policy, asked, apart)
    return _bounded(policy, asked, choice, apart) if choice else choice


def _by_threshold(policy: Policy, question: Question) -> Fp8Choice:
    decision, rule = decide(policy, question), threshold_rule(policy, question)
    known = (question.recipe, decision.answer, decision.reason, decision.tokens, decision.speedup)
    return Fp8Choice(PRODUCTS, *known, rule.min_tokens) if decision and rule is not None else Fp8Choice((), *known)


def _of_all_shapes(choices: list[Fp8Choice]) -> Fp8Choice:
    """One choice for all shapes under a key: FP8 only if every shape has the same products in FP8."""
    first = next((choice for choice in choices if not choice), choices[0])
    prefix = f"no shape was given and {len(choices)} were measured"
    if not first:
        return replace(first, reason=f"{prefix}; one of them is against FP8: {first.reason}")
    if any(choice.products != first.products for choice in choices):
        reason = f"{prefix}, which differ in the products that win; give the shape"
        return Fp8Choice((), first.recipe, UNDECIDED, reason, first.tokens)
    least = min(choices, key=lambda choice: choice.speedup or 0.0)
    highs = [choice.holds_to for choice in choices if choice.holds_to is not None]
    return replace(
        least,
        reason=f"{prefix}; all are for FP8: {least.reason}",
        holds_from=max(choice.holds_from or 1 for choice in choices),
        holds_to=min(highs, default=None),
    )


# ---- at one count ----------------------------------------------------------------------------------------------------


def _at_count(policy: Policy, question: Question, apart: bool) -> Fp8Choice:
    """Choose the whole module, some of its products, or BF16, at one token count."""
    for_module = decide(policy, question)
    if question.estimate and not for_module and for_module.answer == UNMEASURED:
        for_module = _estimated(policy, question, for_module)
    # The products that were measured apart and win.
    asked = {gemm: replace(question, gemm=gemm) for gemm in PRODUCTS}
    decisions = {
        gemm: decide(policy, asked_of_gemm)
        for gemm, asked_of_gemm in asked.items()
        if matching_rules(policy, asked_of_gemm)
    }
    alone = {gemm: decision for gemm, decision in decisions.items() if decision}
    some = tuple(alone)
    recipe = question.recipe or for_module.recipe
    if some == PRODUCTS and not for_module and for_module.answer == UNMEASURED:  # nothing is known against all three
        reason = f"{_answers_text(alone)}; the whole module: {for_module.reason}"
        return Fp8Choice(PRODUCTS, recipe, alone[PRODUCTS[0]].answer, reason, for_module.tokens, _promise(alone))
    promise = _promise(alone)
    needed = APART_MARGIN * max((for_module.speedup or 0.0) if for_module else policy.speedup_threshold, 1.0)
    if apart and some != PRODUCTS and promise >= needed:
        beside = "more than the whole module" if for_module else "the whole module"
        reason = f"{_answers_text(alone)}; {beside}: {for_module.reason}"
        return Fp8Choice(some, recipe, alone[some[0]].answer, reason, for_module.tokens, promise)
    if for_module:
        return Fp8Choice(PRODUCTS, recipe, for_module.answer, for_module.reason, for_module.tokens, for_module.speedup)
    reason = _why_not(some, promise, needed, for_module) if apart or some == PRODUCTS else for_module.reason
    return Fp8Choice((), recipe, for_module.answer, reason, for_module.tokens)


def _estimated(policy: Policy, question: Question, decision: Fp8Decision) -> Fp8Decision:
    """The whole module by its estimate; single products are not estimated, because they gain too little."""
    guess = estimate_speedup(policy, question)
    if guess is None:
        return decision
    reason = f"estimated {guess.speedup:.3f}x: {guess.reason}"
    if not guess.low >= policy.speedup_threshold:
        noise = f"; within the noise: it may be {guess.low:.3f}x" if guess.speedup >= policy.speedup_threshold else ""
        return replace(decision, reason=reason + noise)
    obstacle = question.recipe and question.shape and shape_obstacle(question.recipe, question.shape)
    if obstacle:
        return replace(decision, reason=obstacle)
    return replace(decision, use_fp8=True, reason=reason, speedup=guess.speedup)


def _promise(alone: dict[str, Fp8Decision]) -> float:
    """The speedup to expect if several products run in FP8, from the speedup of each alone: their savings add up."""
    saved = sum(1 - 1 / max(decision.speedup or 1.0, 1.0) for decision in alone.values())
    return 1 / max(1 - saved, 1e-3)


def _answers_text(alone: dict[str, Fp8Decision]) -> str:
    return "; ".join(f"{gemm} {decision.reason}" for gemm, decision in alone.items())


def _why_not(some: tuple[str, ...], promise: float, needed: float, for_module: Fp8Decision) -> str:
    if not some:
        return for_module.reason
    if some == PRODUCTS:
        return f"each product wins alone, but the whole module does not: {for_module.reason}"
    less = f"promise {promise:.3f}x, less than the {needed:.3f}x that casts and launches of their own ask for"
    return f"products apart ({', '.join(some)}) {less}; the whole module: {for_module.reason}"


# ---- how far it holds ------------------------------------------------------------------------------------------------


def _bounded(policy: Policy, question: Question, choice: Fp8Choice, apart: bool) -> Fp8Choice:
    """Add to a choice the token counts between which it stays the same."""
    tokens = question.tokens or 1
    near = [rule for gemm in GEMMS for rule in alike_rules(policy, replace(question, gemm=gemm))]
    rules = Policy(near, policy.fingerprint, policy.speedup_threshold, policy.confidence, where=policy.where)

    def same(rows: int) -> bool:
        asked = replace(question, num_tokens=rows, moe_router_topk=1)  # rows are counted after topk
        return _at_count(rules, asked, apart).products == choice.products

    counts = _turning_counts(_rules_of(rules, question), near)
    low = _last_same(same, tokens, sorted((count for count in counts if count < tokens), reverse=True))
    high = _last_same(same, tokens, sorted(count for count in counts if count > tokens))
    return replace(choice, holds_from=low, holds_to=None if high == _ANY_COUNT else high)


def _turning_counts(rules: Iterable[LayerRule], near: Iterable[LayerRule]) -> set[int]:
    """Counts so close that between two of them a choice changes at most once.

    A choice changes at measured counts, at the end of estimates, and between these where an estimate crosses the
    threshold.
    """
    measured = {point.tokens for rule in rules for point in rule.points}
    ends = {REACH * rule.points[-1].tokens for rule in near}
    counts = {1, _ANY_COUNT} | {count + by for count in measured | ends for by in (-1, 0, 1)}
    at = 1.0
    while at < max(ends):
        counts.add(int(at))
        at *= _STEP
    return {count for count in counts if count > 0}


def _last_same(same: Callable[[int], bool], tokens: int, counts: Iterable[int]) -> int:
    """The last count, on the way from `tokens` through `counts`, at which the choice is still the same."""
    last = tokens
    for count in counts:
        if same(count):
            last = count
            continue
        other = count
        while abs(other - last) > 1:
            middle = (last + other) // 2
            last, other = (middle, other) if same(middle) else (last, middle)
        return last
    return last
