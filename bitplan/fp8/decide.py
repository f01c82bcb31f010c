"""Decides what every layer of a model becomes: FP8 or BF16, which products, by which recipe, and why.

A layer is decided once, for the tokens of its part, by a policy or, without one, by its shape. It stays in BF16 without
a rule, by another recipe, on hardware without FP8, or if it cannot be replaced; the choice says why. A policy of
another GPU is an error.

`AppliedFp8` shows what was decided: one row a layer, with the reason, and a table in which equal blocks share a line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from bitplan.base.paired_timing import Stopwatch
from bitplan.fp8.find_linears import Site, Sites
from bitplan.fp8.layer_settings import AmaxEps, Fp8Recipe, fp8_obstacle
from bitplan.fp8.policy.choice import Fp8Choice, choose_products
from bitplan.fp8.policy.policy import Question, asked_by_shape
from bitplan.fp8.policy.report import TIMINGS, fingerprint_of
from bitplan.fp8.policy.rules import Policy
from bitplan.fp8.policy.vocabulary import DEFAULT_RECIPE, NORM_KIND, PRODUCTS, UNMEASURED, Fp8Error, shape_obstacle
from bitplan.fp8.recipes import expert_recipes


@dataclass(frozen=True)
class Fp8Options:
    """What is seldom set: how FP8 is computed and stored, how a policy is asked, and how blocks are confirmed.

    fp8                "e4m3", or "hybrid": gradients are E5M2
    fp8_param          weights are stored in FP8, and learn in float32
    tp, etp            tensor and expert-tensor parallel sizes that a policy is asked for
    estimate           a count or shape that was not measured is estimated (`policy.choice`); False leaves it BF16
    extrapolate        a win at the largest measured count speaks for larger ones
    confirm_compiled   compiles the blocks first: True, or a mode of torch.compile such as "reduce-overhead"
    confirm_timing     "eager", or "graph": blocks are timed as CUDA graphs
    stopwatch          what times them; None: the device's own
    """

    fp8: str = "e4m3"
    fp8_param: bool = False
    tp: int = 1
    etp: int = 1
    estimate: bool = True
    extrapolate: bool = False
    confirm_compiled: bool | str = False
    confirm_timing: str = "eager"
    stopwatch: Stopwatch | None = None

    def __post_init__(self) -> None:
        Fp8Recipe(fp8=self.fp8)  # type: ignore[arg-type]  # refuses names it does not know
        compiled = self.confirm_compiled
        if self.confirm_timing not in TIMINGS:
            raise Fp8Error(f"confirm_timing must be one of {', '.join(TIMINGS)}, got {self.confirm_timing!r}")
        if not isinstance(compiled, str):
            return
        from torch._inductor import list_mode_options

        modes = list_mode_options()
        if compiled not in modes:
            raise Fp8Error(f"confirm_compiled must be True, False or one of {', '.join(modes)}, got {compiled!r}")
        if self.confirm_timing == "graph" and modes[compiled].get("triton.cudagraphs"):
            raise Fp8Error(
                f"confirm_compiled={compiled!r} makes CUDA graphs by itself, which confirm_timing='graph' cannot "
                "capture in another; leave confirm_timing at 'eager'"
            )


@dataclass(frozen=True)
class PartPlan:
    """How one part of a model is decided: by a policy, or FP8 wherever the shape allows (`policy` None)."""

    policy: Policy | None
    tokens: int | None
    recipe: str | None = None
    options: Fp8Options = Fp8Options()

    def __post_init__(self) -> None:
        Fp8Recipe(self.recipe or DEFAULT_RECIPE)  # refuses names it does not know


@dataclass(frozen=True)
class LayerDecision:
    """A layer and what it shall become; `joins` says whether it may be part of a joined MLP."""

    site: Site
    choice: Fp8Choice
    recipe: Fp8Recipe
    fp8_param: bool
    joins: bool = True

    def within(self, block: str) -> LayerDecision:
        return replace(self, site=self.site.within(block))

    def apart(self, why: str) -> LayerDecision:
        """This decision for the layer alone, without the norm in front and the activation behind."""
        return replace(self, site=replace(self.site, norm=None, apart=why), joins=False)

    def in_bf16(self, reason: str, answer: str) -> LayerDecision:
        choice = replace(self.choice, products=(), answer=answer, reason=reason, speedup=None)
        return replace(self, choice=choice)


@dataclass(frozen=True)
class DecidedLayers:
    """The decision on every layer, in the model's order; `runs` is False where this machine has no FP8."""

    layers: tuple[LayerDecision, ...]
    notes: tuple[str, ...]
    runs: bool


def decide_layers(sites: Sites, plans: Mapping[str, PartPlan], device: torch.device, *, emulate: bool) -> DecidedLayers:
    """Decide on every layer by the plan of its part of the model."""
    lacking = _lacking(device, emulate)
    notes = [] if lacking else _differences(plans.values(), device)
    asked: dict[Question, Fp8Choice] = {}
    layers = tuple(_decide(site, plans.get(site.part), lacking, device, asked) for site in sites.sites)
    if lacking is None:
        notes += [f"{fault}. Norms and projections stay apart there" for fault in sites.run.faults]
        notes += _unmeasured(plans, layers)
    return DecidedLayers(layers, tuple(notes), lacking is None)


def all_in_fp8(decided: LayerDecision, is_asked_for: bool) -> LayerDecision:
    """Return the same layer with all products in FP8, where these can be."""
    site, name = decided.site, decided.recipe.name
    can = shape_obstacle(name, site.shape) is None and (not site.is_grouped or name in expert_recipes())
    if not is_asked_for or site.obstacle is not None or not can or decided.choice.products == PRODUCTS:
        return decided
    return replace(decided, choice=replace(decided.choice, products=PRODUCTS, recipe=name, speedup=None))


def _lacking(device: torch.device, emulate: bool) -> str | None:
    if device.type == "cpu" and not emulate:
        return "no FP8 hardware: the model is on the CPU; move it to the GPU first"
    obstacle = fp8_obstacle(device)
    return None if obstacle is None else f"no FP8 hardware: {obstacle}"


def _differences(plans: Iterable[PartPlan], device: torch.device) -> list[str]:
    """Differences from the machine on which policies were measured; a policy of another GPU is refused."""
    notes: dict[str, None] = {}
    for policy in (plan.policy for plan in plans if plan.policy is not None):
        if device.type == "cpu" and policy.fingerprint is not None:
            notes[f"emulated on the CPU; the policy is of {policy.gpu}"] = None
        else:
            differences = policy.require_same_gpu(fingerprint_of(device))
            notes |= dict.fromkeys(f"{policy.where}: {difference}" for difference in differences)
    return list(notes)


def _decide(
    site: Site, plan: PartPlan | None, lacking: str | None, device: torch.device, asked: dict[Question, Fp8Choice]
) -> LayerDecision:
    if plan is None:
        return LayerDecision(site, _bf16(f"FP8 was not asked for in the part {site.part}"), Fp8Recipe(), False)
    choice, site = _choose(site, plan, asked)
    name = choice.recipe or plan.recipe or DEFAULT_RECIPE
    obstacle = lacking or site.obstacle or (fp8_obstacle(device, (name,)) if choice else None)
    if obstacle is not None:
        choice = replace(choice, products=(), answer=UNMEASURED, reason=obstacle, speedup=None)
    recipe = Fp8Recipe(name, plan.options.fp8, AmaxEps.from_environment(os.environ))  # type: ignore[arg-type]
    return LayerDecision(site, choice, recipe, plan.options.fp8_param)


def _choose(site: Site, plan: PartPlan, asked: dict[Question, Fp8Choice]) -> tuple[Fp8Choice, Site]:
    """The policy's choice for a layer, and the layer as it knows it; `asked` caches answers: blocks are alike."""
    if plan.policy is None:
        name = plan.recipe or DEFAULT_RECIPE
        obstacle = shape_obstacle(name, site.shape)
        if site.is_grouped and name not in expert_recipes():
            obstacle = f"experts have the recipes {', '.join(expert_recipes())}, not {name}"
        if obstacle is not None:
            return _bf16(obstacle), site
        reason = "FP8 everywhere was asked for, without a policy"
        return Fp8Choice(PRODUCTS, name, UNMEASURED, reason, plan.tokens), site
    keys = ("tp", "etp", "estimate", "extrapolate")
    how: dict[str, Any] = {key: getattr(plan.options, key) for key in keys}
    question = asked_by_shape(plan.policy, site.question(plan.tokens, recipe=plan.recipe, **how))
    if question not in asked:
        asked[question] = choose_products(plan.policy, question)
    choice, known = asked[question], replace(site, kind=question.kind, name=question.name or site.name)
    if choice and question.kind == NORM_KIND and site.norm is None:
        choice = replace(choice, reason=f"{choice.reason}; measured with its norm fused, which here stays apart")
    return choice, known


def _unmeasured(plans: Mapping[str, PartPlan], decided: Sequence[LayerDecision]) -> list[str]:
    """The shapes that a policy has never measured, with the command that measures them."""
    notes: dict[str, None] = {}
    for part, plan in plans.items():
        if plan.policy is None or plan.policy.version == 1:
            continue
        known = {rule.shape for rule in plan.policy.rules if rule.part == part}
        sites = [layer.site for layer in decided if layer.site.part == part and not layer.site.is_grouped]
        shapes = dict.fromkeys(
            f"{site.shape[0]}x{site.shape[1]}{':norm' if site.norm else ''}"
            for site in sites
            if site.shape not in known and site.obstacle is None
        )
        if shapes:
            recipe = plan.recipe or next((rule.recipe for rule in plan.policy.rules), DEFAULT_RECIPE)
            more = f"bitplan fp8 bench --shapes {','.join(shapes)} --part {part} --recipe {recipe} --report more.jsonl"
            into = f"bitplan fp8 merge more.jsonl --into {plan.policy.where} --output {plan.policy.where} --force"
            notes[f"never measured: {', '.join(shapes)}; measure them: {more} && {into}"] = None
    return list(notes)


def _bf16(reason: str) -> Fp8Choice:
    return Fp8Choice((), None, UNMEASURED, reason, None)


# ---- what was decided ------------------------------------------------------------------------------------------------


_SHOWN_REASON = 100


@dataclass(frozen=True)
class LayerRow:
    """One layer and what became of it. `tokens` counts rows of its product: for experts after topk."""

    path: str
    part: str
    kind: str
    name: str | None
    shape: tuple[int, int]
    precision: str
    recipe: str | None
    answer: str
    tokens: int | None
    speedup: float | None
    reason: str

    @classmethod
    def of(cls, site: Site, choice: Fp8Choice) -> LayerRow:
        apart = f"; its norm stays apart: {site.apart}" if choice and site.apart is not None else ""
        layer = (site.path, site.part, site.kind, site.name, site.shape)
        outcome = (choice.precision, choice.recipe if choice else None, choice.answer, choice.tokens, choice.speedup)
        return cls(*layer, *outcome, choice.reason + apart)


@dataclass(frozen=True)
class Confirmed:
    """A whole block, timed in turns with BF16: the speedup of what was taken, and its interval.

    `taken`: "plan", "all" (every layer of the block in FP8, where that was faster still) or "bf16".
    """

    block: str
    answer: str
    reason: str
    taken: str
    speedup: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Compared:
    """A block in FP8 and in BF16 on random inputs: the norm of their difference over that of what BF16 adds.

    `kept`: "all" of FP8, "apart" (norms and activations stay the model's own code) or "bf16", beyond the bound.
    """

    block: str
    difference: float | None
    bound: float
    kept: str
    reason: str


@dataclass(frozen=True)
class AppliedFp8:
    """Every layer that was decided on, the blocks that were compared and confirmed, and notes."""

    rows: tuple[LayerRow, ...]
    left: tuple[str, ...] = ()
    confirmed: tuple[Confirmed, ...] = ()
    notes: tuple[str, ...] = ()
    compared: tuple[Compared, ...] = ()

    @property
    def fp8_layers(self) -> int:
        return sum(row.precision != "bf16" for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        """The table, with confirmations and notes below it."""
        lines = [f"{self.fp8_layers} of {len(self.rows)} layers in FP8", *_table(_grouped(self.rows))]
        if self.left:
            lines.append(f"left as they are: {_listed(self.left)}")
        lines += [f"compared {result.block}: {result.reason}" for result in self.compared]
        lines += [f"confirmed {result.block}: {result.answer}: {result.reason}" for result in self.confirmed]
        return "\n".join([*lines, *self.notes])


def _grouped(rows: Sequence[LayerRow]) -> list[dict[str, str]]:
    """Rows that differ only in the number of their block share a line."""
    groups: dict[tuple[Any, ...], tuple[LayerRow, int]] = {}
    for row in rows:
        key = (unnumbered(row.path), row.shape, row.precision, row.recipe, row.reason)
        first, count = groups.get(key, (row, 0))
        groups[key] = (first, count + 1)
    return [
        {
            "layer": unnumbered(row.path) if count > 1 else row.path,
            "count": str(count),
            "kind": row.kind,
            "shape": f"{row.shape[0]}x{row.shape[1]}",
            "tokens": str(row.tokens or "?"),
            "precision": row.precision,
            "recipe": row.recipe or "",
            "speedup": "" if row.speedup is None else f"{row.speedup:.2f}x",
            "why": row.reason if len(row.reason) <= _SHOWN_REASON else row.reason[: _SHOWN_REASON - 3] + "...",
        }
        for row, count in groups.values()
    ]


def unnumbered(text: str) -> str:
    """Paths with a star in the place of the numbers of blocks."""
    return re.sub(r"(^|\.)[0-9]+(?=[. ]|$)", r"\1*", text)


def _table(rows: Sequence[dict[str, str]]) -> list[str]:
    if not rows:
        return []
    widths = {key: max(len(key), *(len(row[key]) for row in rows)) for key in rows[0]}
    lines = [{key: key for key in rows[0]}, *rows]
    return ["  ".join(line[key].ljust(widths[key]) for key in line).rstrip() for line in lines]


def _listed(names: Sequence[str]) -> str:
    shown = list(dict.fromkeys(unnumbered(name) for name in names))
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")
