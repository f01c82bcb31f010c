"""Which products of a layer run in FP8 and by which recipe, and for how many tokens that holds.

A policy answers about the whole module (all three products in FP8, casts shared) and, where they were timed apart, of
each product alone (that one in FP8, the others in BF16). Of two ways to use it the faster, by the evidence, is taken:

    whole      all three in FP8, where the whole module was measured to win: its speedup
    some       those products that win alone. Together they share casts, so they save at least the sum of what each
               saves: with savings s = 1 - 1 / speedup the speedup is at least 1 / (1 - sum of s)

A product that loses alone may still gain beside the others, whose casts it uses for nothing; that is why a module that
wins is not taken apart by products that lose alone unless the rest is worth more. Neither way: BF16, with the reason.
Among recipes the one with the larger speedup is taken.

`estimate=True` asks `fp8_estimate` where nothing was measured, and the reason says that it is an estimate.

A choice is made for one token count. `holds_from` and `holds_to` bound the counts for which the same evidence says the
same; a model that is given other counts should be told.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from bitplan.plan.fp8_bands import BandPolicy
from bitplan.plan.fp8_estimate import Estimate, estimate_speedup
from bitplan.plan.fp8_policy import Decision, Policy, Question, decide, matching_rules
from bitplan.plan.fp8_terms import LOSE, MODULE, PRODUCTS, RECIPES, UNDECIDED, UNMEASURED
from bitplan.plan.fp8_thresholds import ThresholdPolicy


@dataclass(frozen=True)
class Choice:
    """Products in FP8 (none: BF16), the recipe, why, and from how many to how many tokens it holds (None: no end).

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


def choose_products(policy: Policy, question: Question, *, estimate: bool = False) -> Choice:
    """The products of one layer that run in FP8; of `question.recipe`, or of the recipe that the policy knows best."""
    question = replace(question, gemm=MODULE)
    recipes = _recipes(policy, question, estimate)
    found = [_by_recipe(policy, replace(question, recipe=recipe), estimate) for recipe in recipes]
    wins = [each for each in found if each]
    if not wins:
        return found[0] if len(found) == 1 else _none_of(found)
    best = max(wins, key=lambda each: each.speedup or 0.0)  # the first of equals
    others = f"; the best of {len(found)} recipes" if len(found) > 1 else ""
    return replace(best, reason=best.reason + others)


def _recipes(policy: Policy, question: Question, estimate: bool) -> Iterable[str | None]:
    if question.recipe is not None or isinstance(policy, ThresholdPolicy):
        return (question.recipe,)
    if estimate:
        return [recipe for recipe in RECIPES if any(rule.recipe == recipe for rule in policy.rules)] or (None,)
    asked = [replace(question, gemm=gemm) for gemm in (MODULE, *PRODUCTS)]
    found = {rule.recipe for each in asked for rule in matching_rules(policy, each)}
    return [recipe for recipe in RECIPES if recipe in found] or (None,)


def _by_recipe(policy: Policy, question: Question, estimate: bool) -> Choice:
    whole = decide(policy, question)
    if estimate and isinstance(policy, BandPolicy) and not whole and whole.answer == UNMEASURED:
        guess = estimate_speedup(policy, question)
        if guess is not None:
            return _estimated(policy, question, whole, guess)
    apart = [gemm for gemm in PRODUCTS if _is_apart(policy, question, gemm)]
    alone = {gemm: decide(policy, replace(question, gemm=gemm)) for gemm in apart}
    some = tuple(gemm for gemm in PRODUCTS if alone.get(gemm))
    worth = 1 / max(1 - sum(_saving(alone[gemm]) for gemm in some), 1e-3) if some else 0.0
    if whole and (whole.speedup or 0.0) >= worth:
        return _choice(policy, question, whole, PRODUCTS, (MODULE,), whole.reason, whole.speedup)
    if some and not (some == PRODUCTS and whole.answer in (LOSE, UNDECIDED)):
        told = "; ".join(f"{gemm} {alone[gemm].reason}" for gemm in some)
        beside = f"more than the whole module ({whole.reason})" if whole else f"the whole module: {whole.reason}"
        return _choice(policy, question, alone[some[0]], some, some, f"{told}; {beside}", worth)
    reason = whole.reason
    if some:
        reason = f"each product wins alone, but the whole module does not: {whole.reason}"
    return Choice((), question.recipe, whole.answer, reason, whole.tokens)


def _estimated(policy: BandPolicy, question: Question, whole: Decision, guess: Estimate) -> Choice:
    """The whole module by its estimate: products apart gain too little over it to be guessed at."""
    wins = guess.speedup >= policy.speedup_threshold
    reason = f"estimated {guess.speedup:.3f}x: {guess.reason}"
    if not wins:
        return Choice((), question.recipe, UNMEASURED, reason, whole.tokens)
    tokens = whole.tokens or 1
    return Choice(PRODUCTS, question.recipe, UNMEASURED, reason, tokens, guess.speedup, tokens, guess.tokens_to)


def _is_apart(policy: Policy, question: Question, gemm: str) -> bool:
    return isinstance(policy, BandPolicy) and bool(matching_rules(policy, replace(question, gemm=gemm)))


def _saving(decision: Decision) -> float:
    return 1 - 1 / max(decision.speedup or 1.0, 1.0)


def _choice(
    policy: Policy,
    question: Question,
    decision: Decision,
    products: tuple[str, ...],
    gemms: tuple[str, ...],
    reason: str,
    speedup: float | None,
) -> Choice:
    bounds = [_bounds(policy, replace(question, gemm=gemm)) for gemm in gemms]
    highs = [high for _, high in bounds if high is not None]
    return Choice(
        products,
        question.recipe or decision.recipe,
        decision.answer,
        reason,
        decision.tokens,
        speedup,
        max(low for low, _ in bounds),
        min(highs) if highs else None,
    )


def _bounds(policy: Policy, question: Question) -> tuple[int, int | None]:
    """From and to how many tokens the rules that a win rests on say the same."""
    tokens = question.tokens or 1
    if isinstance(policy, ThresholdPolicy):
        size: dict[str, Any] = {key: getattr(question, key) for key in ("name", "tp", "etp", "num_gemms")}
        rule = policy.find(question.looked_up_kind, **size)
        return (1 if rule is None else rule.min_tokens), None
    lows, highs = [1], []
    for each in matching_rules(policy, question):
        low, high = next(((low, high) for low, high in each.bands if low <= tokens <= high), (tokens, tokens))
        if question.extrapolate and tokens > each.points[-1].tokens:
            low, high = (each.bands[-1][0] if each.bands else tokens), 2**62
        lows.append(low)
        highs.append(high)
    end = min(highs) if highs else tokens
    return max(lows), None if end == 2**62 else end


def _none_of(found: list[Choice]) -> Choice:
    first = next((each for each in found if each.answer in (UNDECIDED, LOSE)), found[0])
    told = "; ".join(f"{each.recipe}: {each.reason}" for each in found)
    return replace(first, recipe=None, reason=told)
