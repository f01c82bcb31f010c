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
    recipe          a recipe's name; None takes the best that the policy knows for each layer
    confirm         times the first block of each make in turns, in BF16, as planned and all in FP8, and takes what is
                    shown to be fastest; BF16 otherwise. Its options say how: confirm as you will run
    emulate         also on a CPU, whose FP8 is emulated: for tests
    options         an `Fp8Options`, for what is seldom set

A model's YAML in the place of the policy (`apply_fp8(model, "model.yaml")`) has keys for the FP8 of each part, which
win over `options`; tokens are then the part's fp8_dynamic_num_tokens, else `tokens`, else for the LLM its seq_length x
micro_batch_size.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from bitplan.base.errors import did_you_mean
from bitplan.base.names import keywords_in
from bitplan.fp8.bench.confirm import Example, confirm_blocks
from bitplan.fp8.build import has_fp8, put_decided
from bitplan.fp8.decide import (
    AppliedFp8,
    Confirmed,
    Fp8Options,
    LayerDecision,
    LayerRow,
    PartPlan,
    decide_layers,
    unnumbered,
)
from bitplan.fp8.find_linears import Sites, find_sites
from bitplan.fp8.loongforge import YAML_SUFFIXES, find_policy, open_yaml_model
from bitplan.fp8.policy.rules import Policy, load_policy
from bitplan.fp8.policy.vocabulary import PARTS, Fp8Error, is_count
from bitplan.fp8.self_check import compare_blocks
from bitplan.plan.names import listed

log = logging.getLogger("bitplan")
Tokens = int | Mapping[str, int]


@keywords_in(Fp8Options)
def apply_fp8(
    model: nn.Module,
    policy: Policy | str | Path | None,
    *,
    tokens: Tokens | None = None,
    recipe: str | None = None,
    parts: Collection[str] = PARTS,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    confirm: bool = False,
    example: Example | None = None,
    emulate: bool = False,
    options: Fp8Options | None = None,
) -> AppliedFp8:
    """Replace the layers of a model that the policy puts in FP8; return what was decided and why.

    On an error the model stays as it was. Fields of `options` are still taken as keywords, with a warning.
    """
    options = options or Fp8Options()
    if not isinstance(policy, Policy | str | Path | None):
        raise Fp8Error(f"policy must be a Policy, the path of its file, or None, got a {type(policy).__name__}")
    if isinstance(policy, str | Path) and Path(policy).suffix in YAML_SUFFIXES:
        plans = _plans_of_yaml(Path(policy), tokens, options)
        return _apply(model, plans, confirm, example, emulate, include, exclude)
    rules = load_policy(policy) if isinstance(policy, str | Path) else policy
    if tokens is None:
        raise Fp8Error("tokens is missing: give sequence length x micro batch size of one step")
    unknown = set(parts) - set(PARTS)
    if unknown or not parts:
        raise Fp8Error(f"parts must be among {', '.join(PARTS)}, got {', '.join(sorted(unknown)) or 'none'}")
    _warn_of_unknown_parts(tokens, parts)
    plans = {part: PartPlan(rules, _tokens_of(tokens, part), recipe, options) for part in parts}
    for name, patterns in (("include", include), ("exclude", exclude)):
        if isinstance(patterns, str):
            raise Fp8Error(f"{name} takes a list of patterns, got {patterns!r}; write {name}=[{patterns!r}]")
    return _apply(model, plans, confirm, example, emulate, include, exclude)


def _plans_of_yaml(path: Path, tokens: Tokens | None, options: Fp8Options) -> dict[str, PartPlan]:
    """A plan for each part of a model whose YAML asks for FP8 there."""
    described = open_yaml_model(path)
    sizes = described.parallel()
    options = replace(options, tp=sizes.tp, etp=sizes.etp)
    _warn_of_unknown_parts(tokens, described.options)
    plans = {}
    for part, keys in described.options.items():
        if keys.fp8 is not None:
            by_length = described.tokens if part == "llm" or len(described.options) == 1 else None
            count = keys.fp8_dynamic_num_tokens or _tokens_of(tokens, part) or by_length
            policy = None
            if keys.selective_fp8:
                assert keys.fp8_dynamic_policy_path is not None  # the reader has checked it
                policy = load_policy(find_policy(keys.fp8_dynamic_policy_path, path))
            stored = replace(options, fp8=keys.fp8, fp8_param=keys.fp8_param)
            plans[part] = PartPlan(policy, count, keys.fp8_recipe, stored)
    return plans


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


def _apply(
    model: nn.Module,
    plans: Mapping[str, PartPlan],
    confirm: bool,
    example: Example | None,
    emulate: bool,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
) -> AppliedFp8:
    """Describe the model, decide on every layer, check the decisions, and build the layers."""
    if not isinstance(model, nn.Module):
        raise Fp8Error(f"FP8 goes into a loaded torch.nn.Module, got a {type(model).__name__}; load it first")
    if has_fp8(model):
        raise Fp8Error("the model has FP8 layers already; apply a policy to the model as it was loaded")
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    sites = find_sites(model, include=include, exclude=exclude, example=example)
    decided = decide_layers(sites, plans, device, emulate=emulate)
    layers, compared = compare_blocks(model, sites, decided.layers) if decided.runs else (decided.layers, ())
    confirmed: tuple[Confirmed, ...] = ()
    if confirm and decided.runs:
        layers, confirmed = confirm_blocks(model, sites, layers, plans, example)
    notes = (*decided.notes, *_mlps_apart(sites, layers), *put_decided(model, layers, sites.mlps))
    rows = tuple(LayerRow.of(layer.site, layer.choice) for layer in layers)
    return AppliedFp8(rows, sites.left, confirmed, notes, compared)


def _mlps_apart(sites: Sites, decided: Sequence[LayerDecision]) -> list[str]:
    """MLPs of FP8 layers whose activation is not computed in a cast, and why; blocks that are alike share a line."""
    in_fp8 = {path for layer in decided if layer.choice for path in layer.site.modules}
    notes: dict[str, None] = {}
    for mlp in sites.mlps_apart:
        if {*mlp.first, mlp.down} <= in_fp8:
            between = f"between {' and '.join(mlp.first)} and {mlp.down}"
            notes[unnumbered(f"the activation {between} stays apart: {mlp.why}")] = None
    return list(notes)
