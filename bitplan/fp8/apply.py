"""apply_fp8: asks a policy about every linear layer of a model, puts FP8 where it was measured to win, and reports it.

    applied = apply_fp8(model, "policy.json", tokens=8192)     # before the optimizer is made
    print(applied)                                             # a line for each layer, with the reason
    optimizer = torch.optim.AdamW(model.parameters())

The decision is made once, here. Every linear layer is a candidate by its shape (`find_linears`). Layers that win
become FP8 layers; all others stay the modules that they are. What belongs together is seen in what the model computes
(`recorded_wiring`): projections of one input (q, k and v; gate and up) are decided together and become one layer, as
they were measured; where a norm feeds nothing else, that layer also does the norm, in its cast; an MLP's activation is
computed in casts, too. One block of each make is compared with its BF16 self (`self_check`), and what differs stays
apart, or BF16. State dicts keep their names. A layer stays in BF16 without a rule, by another recipe, on hardware
without FP8, or if it cannot be replaced; the summary says why. A policy of another GPU is an error.

    policy          a policy or its file, asked by shape; None puts FP8 wherever a layer's shape allows it, which may be
                    slower
    tokens          sequence length x micro batch size of one step, for all parts or by part: {"llm": 8192, "vit": 1024}
    include         names of modules, or shell patterns of them: only these linears, the output layer too if it is named
    exclude         likewise: not these
    example         an input of the model: a tensor, a tuple of arguments or a dict of keywords. It is run without
                    numbers, to see what the model computes, and confirmed on. Most models need none
    estimate        a count or shape that was not measured is estimated (`fp8.policy.choice`); False leaves it BF16
    recipe          a recipe's name; None takes the best that the policy knows for each layer
    confirm         times the first block of each make in turns, in BF16, as planned and all in FP8, and takes what is
                    shown to be fastest; BF16 otherwise.
                    `confirm_compiled` compiles the blocks first (True, or a mode of torch.compile such as
                    "reduce-overhead"), `confirm_timing="graph"` times them as CUDA graphs: confirm as you will run
    emulate         also on a CPU, whose FP8 is emulated: for tests

`apply_fp8_config` takes the same from a YAML's keys, a plan for each part of a vision-language model.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitplan.base.errors import did_you_mean
from bitplan.base.paired_timing import Stopwatch
from bitplan.fp8.bench.confirm import Example, confirm_block, inputs_without_example, seen_inputs
from bitplan.fp8.bench.report_log import fingerprint_of
from bitplan.fp8.build import LayerDecision, has_fp8, put_decided
from bitplan.fp8.find_linears import Site, Sites, find_sites
from bitplan.fp8.layer_settings import AmaxEps, Fp8Recipe, fp8_obstacle
from bitplan.fp8.loongforge.model_yaml import Fp8Options, find_policy, open_yaml_model
from bitplan.fp8.policy.choice import Fp8Choice, choose_products
from bitplan.fp8.policy.policy import Policy, Question, asked_by_shape, load_policy
from bitplan.fp8.policy.report import TIMINGS
from bitplan.fp8.policy.token_ranges import BandPolicy
from bitplan.fp8.policy.vocabulary import (
    DEFAULT_RECIPE,
    NORM_KIND,
    PARTS,
    PRODUCTS,
    UNMEASURED,
    Fp8Error,
    is_count,
    shape_obstacle,
)
from bitplan.fp8.recipes import expert_recipes
from bitplan.fp8.self_check import built_block, compare_blocks, make_of
from bitplan.fp8.summary import AppliedFp8, Compared, Confirmed, LayerRow
from bitplan.plan.names import listed

log = logging.getLogger("bitplan")
Tokens = int | Mapping[str, int]


@dataclass(frozen=True)
class PartPlan:
    """How one part of a model is decided: by a policy, or FP8 wherever the shape allows (`policy` None)."""

    policy: Policy | None
    tokens: int | None
    recipe: str | None = None
    fp8: str = "e4m3"
    fp8_param: bool = False
    tp: int = 1
    etp: int = 1
    extrapolate: bool = False
    estimate: bool = True

    def __post_init__(self) -> None:
        Fp8Recipe(self.recipe or DEFAULT_RECIPE, self.fp8)  # type: ignore[arg-type]  # refuses names it does not know


def apply_fp8(
    model: nn.Module,
    policy: Policy | str | Path | None,
    *,
    tokens: Tokens,
    recipe: str | None = None,
    fp8: str = "e4m3",
    fp8_param: bool = False,
    tp: int = 1,
    etp: int = 1,
    parts: Collection[str] = PARTS,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    extrapolate: bool = False,
    estimate: bool = True,
    confirm: bool = False,
    confirm_compiled: bool | str = False,
    confirm_timing: str = "eager",
    example: Example | None = None,
    emulate: bool = False,
    stopwatch: Stopwatch | None = None,
) -> AppliedFp8:
    """Replace the layers of a model that the policy puts in FP8; return what was decided and why.

    On an error the model stays as it was.
    """
    if not isinstance(policy, Policy | str | Path | None):
        raise Fp8Error(f"policy must be a Policy, the path of its file, or None, got a {type(policy).__name__}")
    rules = load_policy(policy) if isinstance(policy, str | Path) else policy
    unknown = set(parts) - set(PARTS)
    if unknown or not parts:
        raise Fp8Error(f"parts must be among {', '.join(PARTS)}, got {', '.join(sorted(unknown)) or 'none'}")
    _warn_of_unknown_parts(tokens, parts)
    plans = {
        part: PartPlan(rules, _tokens_of(tokens, part), recipe, fp8, fp8_param, tp, etp, extrapolate, estimate)
        for part in parts
    }
    for name, patterns in (("include", include), ("exclude", exclude)):
        if isinstance(patterns, str):
            raise Fp8Error(f"{name} takes a list of patterns, got {patterns!r}; write {name}=[{patterns!r}]")
    trial = _Trial(confirm, confirm_compiled, confirm_timing, example, stopwatch)
    return _apply(model, plans, trial, emulate, include, exclude)


def apply_fp8_config(
    model: nn.Module,
    path: str | Path,
    *,
    tokens: Tokens | None = None,
    confirm: bool = False,
    confirm_compiled: bool | str = False,
    confirm_timing: str = "eager",
    example: Example | None = None,
    emulate: bool = False,
    stopwatch: Stopwatch | None = None,
) -> AppliedFp8:
    """`apply_fp8` by the FP8 keys of a model's YAML. Tokens are the part's fp8_dynamic_num_tokens, else `tokens`, else
    for the LLM its seq_length x micro_batch_size."""
    described = open_yaml_model(path)
    sizes = described.parallel()
    _warn_of_unknown_parts(tokens, described.options)
    plans = {}
    for part, options in described.options.items():
        if options.fp8 is not None:
            by_length = described.tokens if part == "llm" or len(described.options) == 1 else None
            count = options.fp8_dynamic_num_tokens or _tokens_of(tokens, part) or by_length
            plans[part] = _plan_of(options, path, count, sizes.tp, sizes.etp)
    return _apply(model, plans, _Trial(confirm, confirm_compiled, confirm_timing, example, stopwatch), emulate)


def _plan_of(options: Fp8Options, path: str | Path, tokens: int | None, tp: int, etp: int) -> PartPlan:
    policy = None
    if options.selective_fp8:
        assert options.fp8_dynamic_policy_path is not None  # the reader has checked it
        policy = load_policy(find_policy(options.fp8_dynamic_policy_path, path))
    assert options.fp8 is not None
    return PartPlan(policy, tokens, options.fp8_recipe, options.fp8, options.fp8_param, tp, etp)


def _warn_of_unknown_parts(tokens: Tokens | None, parts: Collection[str]) -> None:
    """Warn of a token count for a part that the model does not have: most often its name is misspelled."""
    unknown = sorted(set(tokens) - set(parts)) if isinstance(tokens, Mapping) else []
    if unknown:
        log.warning(
            "bitplan: tokens names %s, no part of this model: its counts are not used; the parts are %s%s",
            listed(unknown),
            ", ".join(parts),
            did_you_mean(unknown[0].lower(), parts),
        )


def _tokens_of(tokens: Tokens | None, part: str) -> int | None:
    count = tokens.get(part) if isinstance(tokens, Mapping) else tokens
    if count is not None and not is_count(count):
        raise Fp8Error(f"tokens must be an integer from 1 (sequence length x micro batch size), got {count!r}")
    return count


# ---- deciding --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Trial:
    """How blocks are confirmed; a setting that cannot work is refused before anything is timed."""

    wanted: bool
    compiled: bool | str
    timing: str
    example: Example | None
    stopwatch: Stopwatch | None

    def __post_init__(self) -> None:
        if self.timing not in TIMINGS:
            raise Fp8Error(f"confirm_timing must be one of {', '.join(TIMINGS)}, got {self.timing!r}")
        if not isinstance(self.compiled, str):
            return
        from torch._inductor import list_mode_options

        modes = list_mode_options()
        if self.compiled not in modes:
            raise Fp8Error(f"confirm_compiled must be True, False or one of {', '.join(modes)}, got {self.compiled!r}")
        if self.timing == "graph" and modes[self.compiled].get("triton.cudagraphs"):
            raise Fp8Error(
                f"confirm_compiled={self.compiled!r} makes CUDA graphs by itself, which confirm_timing='graph' cannot "
                "capture in another; leave confirm_timing at 'eager'"
            )


def _apply(
    model: nn.Module,
    plans: Mapping[str, PartPlan],
    trial: _Trial,
    emulate: bool,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
) -> AppliedFp8:
    if not isinstance(model, nn.Module):
        raise Fp8Error(f"FP8 goes into a model that is loaded, a torch.nn.Module, got a {type(model).__name__}")
    if has_fp8(model):
        raise Fp8Error("the model has FP8 layers already; apply a policy to the model as it was loaded")
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    lacking = _lacking(device, emulate)
    notes = [] if lacking else _notes(plans.values(), device)
    sites = find_sites(model, include=include, exclude=exclude, example=trial.example)
    asked: dict[Question, Fp8Choice] = {}
    decided = [_decide(site, plans.get(site.part), lacking, device, asked) for site in sites.sites]
    compared: tuple[Compared, ...] = ()
    confirmed: tuple[Confirmed, ...] = ()
    if lacking is None:
        decided, compared = compare_blocks(model, sites, decided)
        if trial.wanted:
            decided, confirmed = _confirm(model, sites, decided, plans, trial)
        notes += [f"{fault}. Norms and projections stay apart there" for fault in sites.run.faults]
        notes += _unmeasured(plans, decided)
    notes += put_decided(model, decided, sites.mlps)
    rows = tuple(LayerRow.of(each.site, each.choice) for each in decided)
    return AppliedFp8(rows, sites.left, confirmed, tuple(notes), compared)


def _lacking(device: torch.device, emulate: bool) -> str | None:
    if device.type == "cpu" and not emulate:
        return "no FP8 hardware: the model is on the CPU; move it to the GPU first"
    obstacle = fp8_obstacle(device)
    return None if obstacle is None else f"no FP8 hardware: {obstacle}"


def _notes(plans: Iterable[PartPlan], device: torch.device) -> list[str]:
    """Refuse a policy of another GPU; list other differences from the machine that it was measured on."""
    notes: dict[str, None] = {}
    for plan in plans:
        if isinstance(plan.policy, BandPolicy):
            if device.type == "cpu":
                notes[f"emulated on the CPU; the policy is of {plan.policy.fingerprint.gpu}"] = None
                continue
            differences = plan.policy.require_same_gpu(fingerprint_of(device))
            notes |= dict.fromkeys(f"{plan.policy.where}: {each}" for each in differences)
        elif plan.policy is not None:
            notes[f"{plan.policy.where}: version 1 does not say on which GPU it was measured"] = None
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
    recipe = Fp8Recipe(name, plan.fp8, AmaxEps.from_environment(os.environ))  # type: ignore[arg-type]
    return LayerDecision(site, choice, recipe, plan.fp8_param)


def _choose(site: Site, plan: PartPlan, asked: dict[Question, Fp8Choice]) -> tuple[Fp8Choice, Site]:
    """The policy's choice for one layer, and the layer as the policy knows it.

    Blocks are alike, so `asked` keeps the answer to each question.
    """
    if plan.policy is None:
        name = plan.recipe or DEFAULT_RECIPE
        obstacle = shape_obstacle(name, site.shape)
        if site.is_grouped and name not in expert_recipes():
            obstacle = f"experts have the recipes {', '.join(expert_recipes())}, not {name}"
        if obstacle is not None:
            return _bf16(obstacle), site
        reason = "FP8 everywhere was asked for, without a policy"
        return Fp8Choice(PRODUCTS, name, UNMEASURED, reason, plan.tokens), site
    how: dict[str, Any] = {"tp": plan.tp, "etp": plan.etp, "recipe": plan.recipe, "extrapolate": plan.extrapolate}
    question = asked_by_shape(plan.policy, site.question(plan.tokens, **how))
    if question not in asked:
        asked[question] = choose_products(plan.policy, question, estimate=plan.estimate)
    choice, known = asked[question], replace(site, kind=question.kind, name=question.name or site.name)
    if choice and question.kind == NORM_KIND and site.norm is None:
        choice = replace(choice, reason=f"{choice.reason}; measured with its norm fused, which here stays apart")
    return choice, known


def _unmeasured(plans: Mapping[str, PartPlan], decided: Sequence[LayerDecision]) -> list[str]:
    """The shapes that a policy has never measured, with the command that measures them."""
    notes: dict[str, None] = {}
    for part, plan in plans.items():
        if not isinstance(plan.policy, BandPolicy):
            continue
        known = {rule.shape for rule in plan.policy.rules if rule.part == part}
        sites = [each.site for each in decided if each.site.part == part and not each.site.is_grouped]
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


# ---- confirming ------------------------------------------------------------------------------------------------------


def _confirm(
    model: nn.Module, sites: Sites, decided: list[LayerDecision], plans: Mapping[str, PartPlan], trial: _Trial
) -> tuple[list[LayerDecision], tuple[Confirmed, ...]]:
    """Time the first block of each make; all blocks of that make get what is shown to be fastest, or stay BF16."""
    blocks: dict[str, list[tuple[LayerDecision, LayerDecision]]] = {}
    for each in decided:
        everything = _all_fp8(each, each.site.part in plans)
        blocks.setdefault(sites.block_of(each.site.path), []).append((each, everything))
    results: dict[tuple[object, ...], Confirmed] = {}
    by_site = {each.site: each for each in decided}
    for path, members in blocks.items():
        if not any(everything.choice for _, everything in members):
            continue
        make = make_of(path, [each for each, _ in members])
        if make not in results:
            results[make] = _confirm_one(model, sites, path, members, plans, trial)
        by_site |= {each.site: _after(each, everything, results[make]) for each, everything in members}
    return [by_site[each.site] for each in decided], tuple(results.values())


def _all_fp8(decided: LayerDecision, is_asked_for: bool) -> LayerDecision:
    """The same layer with all products in FP8, where it can be."""
    site, name = decided.site, decided.recipe.name
    can = shape_obstacle(name, site.shape) is None and (not site.is_grouped or name in expert_recipes())
    if not is_asked_for or site.obstacle is not None or not can or decided.choice.products == PRODUCTS:
        return decided
    return replace(decided, choice=replace(decided.choice, products=PRODUCTS, recipe=name, speedup=None))


def _confirm_one(
    model: nn.Module,
    sites: Sites,
    path: str,
    members: list[tuple[LayerDecision, LayerDecision]],
    plans: Mapping[str, PartPlan],
    trial: _Trial,
) -> Confirmed:
    plan = next(plans[each.site.part] for each, everything in members if everything.choice)
    if trial.example is not None:
        inputs = seen_inputs(model, path, trial.example)
    else:
        inputs = inputs_without_example(model, path, members[0][0].site.shape[1], plan.tokens or 1)
    plain = model.get_submodule(path)

    def built(chosen: list[LayerDecision]) -> nn.Module | None:
        if not any(each.choice for each in chosen):
            return None
        return built_block(plain, path, chosen, sites.mlps)

    planned, everything = [each for each, _ in members], [each for _, each in members]
    return confirm_block(
        path or "the model",
        plain,
        built(planned),
        inputs,
        everything=built(everything) if everything != planned else None,
        threshold=1.0 if plan.policy is None else plan.policy.speedup_threshold,
        compiled=trial.compiled,
        graph=trial.timing == "graph",
        stopwatch=trial.stopwatch,
    )


def _after(decided: LayerDecision, everything: LayerDecision, verdict: Confirmed) -> LayerDecision:
    if verdict.taken == "plan" or (verdict.taken == "bf16" and not decided.choice):
        return decided
    if verdict.taken == "all":
        reason = f"all FP8, by confirming {verdict.block}: {verdict.reason}"
        choice = replace(everything.choice, answer=verdict.answer, reason=reason)
        return decided if everything == decided else replace(everything, choice=choice)
    return decided.in_bf16(f"turned down by confirming {verdict.block}: {verdict.reason}", verdict.answer)
