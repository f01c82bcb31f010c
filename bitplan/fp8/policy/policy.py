"""should_use_fp8: FP8 or BF16 for one layer at one token count, and why. Pure.

In order: an expert's layer is promoted to its grouped kind and its tokens are multiplied by moe_router_topk; the rules
of that kind, name (or expert count), parallel size, shape, recipe and product are looked up; the rule answers for that
token count. If anything is missing, in the question or in the policy, the answer is BF16, and the reason names it.
"Measured and lost", "measured, undecided" and "never measured" are three answers.

This is what the rules say of a whole module, or of one product by itself. `choice.choose_products` uses it to decide
what a layer becomes: all three products in FP8, some of them, or none, with estimates where nothing was measured.

    decision = should_use_fp8("fp8_policy.json", "row", 4096, name="fc2", tp=1)
    decision.use_fp8, decision.answer, decision.reason
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bitplan.base.documents import show
from bitplan.fp8.policy.rules import LayerRule, Point, Policy, load_policy
from bitplan.fp8.policy.vocabulary import (
    COUNT,
    DENSE_KINDS,
    GEMMS,
    GROUPED_KINDS,
    LOCAL_SHAPE,
    LOSE,
    MODULE,
    NORM_KIND,
    PARTS,
    UNDECIDED,
    UNMEASURED,
    WIN,
    Fp8Error,
    check_kind,
    promote,
    shape_obstacle,
)
from bitplan.fp8.recipes import RECIPES


@dataclass(frozen=True)
class Fp8Decision:
    """FP8 or BF16 and why; true if FP8. `kind` and `tokens` are as looked up, after promotion."""

    use_fp8: bool
    answer: str
    reason: str
    kind: str
    tokens: int | None
    gemm: str = MODULE
    recipe: str | None = None
    speedup: float | None = None

    def __bool__(self) -> bool:
        return self.use_fp8

    @property
    def precision(self) -> str:
        return "fp8" if self.use_fp8 else "bf16"

    def to_dict(self) -> dict[str, Any]:
        return {"precision": self.precision} | asdict(self)


@dataclass(frozen=True)
class Question:
    """A question to a policy about one layer.

    `num_tokens` is sequence length x micro batch size; for experts (a grouped kind, or `is_expert`) it is multiplied by
    `moe_router_topk`. Experts are looked up by `etp` and `num_gemms`, the experts on one GPU; others by `name` and
    `tp`. `shape` (local out_features, in_features), `recipe`, `gemm` and `part` narrow a version 2 lookup: without a
    shape all shapes under the key must win, without a recipe the best one is taken. `extrapolate` takes a win at the
    largest measured count for larger counts too, and the reason says so. `estimate`: what was not measured is estimated
    by `choice.choose_products`; `should_use_fp8` knows measurements alone.
    """

    kind: str
    num_tokens: int | None
    name: str | None = None
    tp: int = 1
    etp: int = 1
    num_gemms: int | None = None
    is_expert: bool = False
    moe_router_topk: int | None = None
    shape: tuple[int, int] | None = None
    recipe: str | None = None
    gemm: str = MODULE
    part: str = "llm"
    extrapolate: bool = False
    estimate: bool = True

    def __post_init__(self) -> None:
        check_kind(self.kind, "the question", Fp8Error)
        counts = ("num_tokens", "num_gemms", "moe_router_topk", "tp", "etp")
        for key in counts:
            value = getattr(self, key)
            if not COUNT.holds(value) and not (value is None and key in counts[:3]):
                raise Fp8Error(f"{key} must be {COUNT.text}, got {value!r}")
        for key, known in (("gemm", GEMMS), ("part", PARTS), ("recipe", (None, *RECIPES))):
            if getattr(self, key) not in known:
                raise Fp8Error(f"{key} must be one of {', '.join(map(str, known))}, got {getattr(self, key)!r}")
        if self.shape is not None and not LOCAL_SHAPE.holds(self.shape):
            raise Fp8Error(f"shape must be {LOCAL_SHAPE.text}, got {show(self.shape)}")

    @property
    def looked_up_kind(self) -> str:
        return promote(self.kind, self.is_expert)

    @property
    def tokens(self) -> int | None:
        if self.looked_up_kind not in GROUPED_KINDS or self.num_tokens is None:
            return self.num_tokens
        return None if self.moe_router_topk is None else self.num_tokens * self.moe_router_topk

    @property
    def where(self) -> str:
        if self.looked_up_kind in GROUPED_KINDS:
            return f"{self.looked_up_kind}, etp {self.etp}, num_gemms {self.num_gemms}"
        return f"{self.looked_up_kind}, {self.name or show(self.shape)}, tp {self.tp}"


def should_use_fp8(policy: Policy | str | Path, kind: str, num_tokens: int | None, **more: Any) -> Fp8Decision:
    """FP8 or BF16 for one layer by a policy or its file, with the reason; `more` are other fields of `Question`."""
    return decide(policy if isinstance(policy, Policy) else load_policy(policy), Question(kind, num_tokens, **more))


def decide(policy: Policy, question: Question) -> Fp8Decision:
    """Answer as `should_use_fp8` does, for a question that is already made."""
    missing = _missing(question)
    if missing:
        return _bf16(question, UNMEASURED, missing)
    return (_by_threshold if policy.version == 1 else _by_bands)(policy, question)


def matching_rules(policy: Policy, question: Question) -> list[LayerRule]:
    """The rules of a version 2 policy that a question is answered by."""
    name = None if question.looked_up_kind in GROUPED_KINDS else question.name
    return [
        rule
        for rule in alike_rules(policy, question)
        if (rule.name == name or (name is None and question.shape is not None))
        and question.shape in (None, rule.shape, list(rule.shape))
    ]


def asked_by_shape(policy: Policy, question: Question) -> Question:
    """The question under the kind and the name by which a policy knows a dense layer of this shape.

    A rule of the same kind is taken first, then one that has a norm, or none, as the layer has. A shape that was never
    measured is asked about without a name, under a kind that was.
    """
    if policy.version == 1 or question.looked_up_kind in GROUPED_KINDS:
        return question
    rules = [rule for rule in policy.rules if (rule.part, rule.tp) == (question.part, question.tp)]
    has_norm = question.kind == NORM_KIND
    same = [rule for rule in rules if rule.shape == question.shape]
    if same:
        nearest = min(
            same,
            key=lambda rule: (
                rule.kind != question.kind,
                (rule.kind == NORM_KIND) != has_norm,
                rule.name != question.name,
            ),
        )
        return replace(question, kind=nearest.kind, name=nearest.name)
    kinds = {rule.kind for rule in rules}
    alike = [kind for kind in DENSE_KINDS if kind in kinds and (kind == NORM_KIND) == has_norm]
    kind = question.kind if question.kind in kinds or not alike else alike[-1]
    return replace(question, kind=kind, name=None)


def alike_rules(policy: Policy, question: Question) -> list[LayerRule]:
    """The version 2 rules of the kind, parallel size, recipe and product asked about, of any name and shape."""
    kind = question.looked_up_kind
    size = (None, question.etp, question.num_gemms) if kind in GROUPED_KINDS else (question.tp, None, None)
    return [
        rule
        for rule in policy.rules
        if (rule.part, rule.kind, rule.gemm) == (question.part, kind, question.gemm)
        and (rule.tp, rule.etp, rule.num_gemms) == size
        and question.recipe in (None, rule.recipe)
    ]


# ---- what both versions share ----------------------------------------------------------------------------------------


def _missing(question: Question) -> str:
    """What is missing in the question, in words; empty if nothing is."""
    if question.num_tokens is None:
        return "the token count is not known; give num_tokens (fp8_dynamic_num_tokens in a YAML)"
    if question.looked_up_kind not in GROUPED_KINDS:
        if question.is_expert:
            return f"no grouped kind for {question.kind} inside an expert; only column and row layers are promoted"
        is_known = question.name or question.shape
        return "" if is_known else f"{question.kind} is looked up by name (qkv, proj, fc1, ...), and none was given"
    if question.num_gemms is None:
        return "experts are looked up by num_gemms, the experts on one GPU, and it was not given"
    if question.moe_router_topk is None:
        return "the tokens of experts are multiplied by moe_router_topk, and it was not given"
    return ""


def _bf16(question: Question, answer: str, reason: str, **more: Any) -> Fp8Decision:
    at = {"kind": question.looked_up_kind, "tokens": question.tokens, "gemm": question.gemm}
    return Fp8Decision(False, answer, reason, **({"recipe": question.recipe} | at | more))


# ---- version 1 -------------------------------------------------------------------------------------------------------


def threshold_rule(policy: Policy, question: Question) -> LayerRule | None:
    """The rule of version 1 for a question: of dense kinds by name and tp, of experts by etp and num_gemms."""
    kind = question.looked_up_kind
    keys = ("etp", "num_gemms") if kind in GROUPED_KINDS else ("name", "tp")
    same = (rule for rule in policy.rules if rule.kind == kind)
    return next((rule for rule in same if all(getattr(rule, key) == getattr(question, key) for key in keys)), None)


def _by_threshold(policy: Policy, question: Question) -> Fp8Decision:
    kind, tokens = question.looked_up_kind, question.tokens or 0
    if question.gemm != MODULE:
        return _bf16(question, UNMEASURED, f"a version 1 policy knows whole modules, not {question.gemm}")
    rule = threshold_rule(policy, question)
    if rule is None:
        return _bf16(
            question,
            UNMEASURED,
            f"no rule for {question.where}: measured and lost, or never measured; version 1 does not tell. "
            "Run the benchmark at this size and merge it into the policy",
        )
    if tokens < rule.min_tokens:
        reason = f"{tokens} tokens are below min_tokens {rule.min_tokens} of {rule.where}"
        return _bf16(question, UNMEASURED, f"{reason}; version 1 does not tell whether they were measured")
    obstacle = question.recipe and question.shape and shape_obstacle(question.recipe, question.shape)
    if obstacle:
        return _bf16(question, UNMEASURED, f"{obstacle}; version 1 rules know no shape")
    reason = (
        f"{tokens} tokens are at or above min_tokens {rule.min_tokens} of {rule.where} ({rule.measured_speedup}x there"
    )
    reason += ")" if tokens == rule.min_tokens else "; version 1 does not tell how far above was measured)"
    return Fp8Decision(True, WIN, reason, kind, tokens, MODULE, question.recipe, rule.measured_speedup)


# ---- version 2 -------------------------------------------------------------------------------------------------------


def _by_bands(policy: Policy, question: Question) -> Fp8Decision:
    rules = matching_rules(policy, question)
    if not rules:
        return _bf16(question, UNMEASURED, _why_no_rule(policy, question))
    decisions = []
    for recipe in [recipe for recipe in RECIPES if any(rule.recipe == recipe for rule in rules)]:
        shapes = [_at(rule, question) for rule in rules if rule.recipe == recipe]
        decisions.append(_of_all_shapes(shapes))
    wins = [decision for decision in decisions if decision]
    if wins:
        best = max(wins, key=lambda win: win.speedup or 0.0)  # the first of equals
        others = f"; the best of {len(decisions)} recipes" if len(decisions) > 1 else ""
        return replace(best, reason=best.reason + others)
    if len(decisions) == 1:
        return decisions[0]
    answer = next(word for word in (UNDECIDED, LOSE, UNMEASURED) if any(word == one.answer for one in decisions))
    return _bf16(question, answer, "; ".join(f"{decision.recipe}: {decision.reason}" for decision in decisions))


def _of_all_shapes(shapes: list[Fp8Decision]) -> Fp8Decision:
    """One answer for all shapes under a key: FP8 only if it is the answer for every shape."""
    if len(shapes) == 1:
        return shapes[0]
    against = [decision for decision in shapes if not decision]
    chosen = against[0] if against else min(shapes, key=lambda decision: decision.speedup or 0.0)
    why = "one of them is against FP8" if against else "all are for FP8"
    return replace(chosen, reason=f"no shape was given, {len(shapes)} were measured and {why}: {chosen.reason}")


def _at(rule: LayerRule, question: Question) -> Fp8Decision:
    """Ask one rule about this token count."""
    tokens = question.tokens or 0
    at = bisect_left([point.tokens for point in rule.points], tokens)
    after = rule.points[at] if at < len(rule.points) else None
    before = rule.points[at - 1] if at else None
    if after is not None and after.tokens == tokens:
        return _decision_of(
            rule, question, after.answer == WIN, after.answer, f"measured: {after.describe()}", after.speedup
        )
    if before is None or after is None:
        return _outside(rule, question, before or after)
    if before.answer == after.answer == WIN:
        reason = f"between two measured wins: {before.describe()}, {after.describe()}"
        return _decision_of(rule, question, True, WIN, reason, min(before.speedup or 0.0, after.speedup or 0.0))
    reason = f"{tokens} tokens were never measured, and lie between {before.describe()} and {after.describe()}"
    return _decision_of(rule, question, False, UNMEASURED, f"{reason}; only between two wins is FP8 assumed", None)


def _outside(rule: LayerRule, question: Question, nearest: Point | None) -> Fp8Decision:
    assert nearest is not None  # a rule has a point
    beyond = nearest is rule.points[-1] and (question.tokens or 0) > nearest.tokens
    side = "above the largest" if beyond else "below the smallest"
    reason = f"{question.tokens} tokens were never measured: {side} measured count, {nearest.describe()}"
    if beyond and nearest.answer == WIN and question.extrapolate:
        return _decision_of(rule, question, True, UNMEASURED, f"{reason}; extrapolated, as was asked", nearest.speedup)
    return _decision_of(rule, question, False, UNMEASURED, f"{reason}; not extrapolated", None)


def _decision_of(
    rule: LayerRule, question: Question, use_fp8: bool, answer: str, reason: str, speedup: float | None
) -> Fp8Decision:
    return Fp8Decision(use_fp8, answer, reason, rule.kind, question.tokens, rule.gemm, rule.recipe, speedup)


def _why_no_rule(policy: Policy, question: Question) -> str:
    """Why nothing was measured: the first condition that leaves no rule, and the values that were measured."""
    kind = question.looked_up_kind
    grouped = kind in GROUPED_KINDS
    asked: list[tuple[str, Any]] = [("part", question.part), ("kind", kind)]
    if grouped:
        asked += [("etp", question.etp), ("num_gemms", question.num_gemms)]
    else:
        asked += [("name", question.name), ("tp", question.tp)]
    asked += [("shape", question.shape), ("recipe", question.recipe), ("gemm", question.gemm)]
    rules = list(policy.rules)
    for key, wanted in asked:
        if wanted is None:
            continue
        wanted = tuple(wanted) if key == "shape" else wanted
        remaining = [rule for rule in rules if getattr(rule, key) == wanted]
        if not remaining:
            present = sorted({getattr(rule, key) for rule in rules}, key=str)
            measured = f"; measured: {', '.join(map(str, present[:8]))}" if present else "; the policy has no rules"
            return f"never measured: no rule with {key} {wanted}{measured}"
        rules = remaining
    raise AssertionError("a condition that leaves nothing was found before")
