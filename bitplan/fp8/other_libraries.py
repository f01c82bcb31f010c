"""Hands a policy to other FP8 libraries: a filter for torchao, and decisions for TransformerEngine's module classes.

    from torchao.float8 import convert_to_float8_training
    convert_to_float8_training(model, module_filter_fn=torchao_filter(model, policy, tokens=8192), config=config)

A policy says where OUR layers win. Other libraries cast apart from the norm and run q, k and v as three products, so
they gain less, and where we win narrowly they may lose: use a policy with a speedup threshold above 1 for them. They
run all three products of a layer in FP8 or none, so they get answers for whole modules; otherwise the answers are those
of `apply_fp8`.

Neither TransformerEngine nor Megatron is imported: whoever has a class of theirs has loaded it, and it is compared with
the classes that the loaded library has (`_CLASSES`). The table and arguments were compared with the sources of
TransformerEngine 2.20 and Megatron-LM of August 2026; UNTESTED against the running library: the tests put modules with
such classes in its place. `LayerNormMLP` holds two products, for which a policy has no single answer: it gets none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from bitplan.fp8.find_linears import find_sites
from bitplan.fp8.policy.choice import Fp8Choice, choose_products
from bitplan.fp8.policy.policy import Question, asked_by_shape
from bitplan.fp8.policy.rules import Policy
from bitplan.fp8.policy.vocabulary import GROUPED_KINDS, Fp8Error, promote, shape_obstacle

TORCHAO_RECIPES = ("tensorwise", "rowwise")
_MEGATRON, _ENGINE = "megatron.core.extensions.transformer_engine", "transformer_engine.pytorch"
# (module, class) -> the kind of such a layer, or the kind by `parallel_mode`, which Megatron's wrappers have fixed.
# Wrappers come first: they are made from TransformerEngine's own classes.
_CLASSES: dict[tuple[str, str], dict[str | None, str] | str] = {
    (_MEGATRON, "TELayerNormColumnParallelLinear"): "layernorm_column",
    (_MEGATRON, "TEColumnParallelLinear"): "column",
    (_MEGATRON, "TERowParallelLinear"): "row",
    (_MEGATRON, "TEColumnParallelGroupedLinear"): "column_grouped",
    (_MEGATRON, "TERowParallelGroupedLinear"): "row_grouped",
    (_MEGATRON, "TELinear"): "duplicated",
    (_ENGINE, "LayerNormLinear"): {"column": "layernorm_column", None: "layernorm_column"},
    (_ENGINE, "GroupedLinear"): {"column": "column_grouped", "row": "row_grouped", None: "column_grouped"},
    (_ENGINE, "Linear"): {"column": "column", "row": "row", None: "duplicated"},
    (f"{_ENGINE}.ops", "Linear"): {"column": "column", "row": "row", None: "duplicated"},
}


def torchao_filter(
    model: nn.Module,
    policy: Policy,
    *,
    tokens: int,
    recipe: str | None = "tensorwise",
    tp: int = 1,
    extrapolate: bool = False,
    estimate: bool = True,
) -> Callable[[nn.Module, str], bool]:
    """A `module_filter_fn`: true for linears of layers that the policy puts in FP8 as a whole."""
    if recipe is not None and recipe not in TORCHAO_RECIPES:
        raise Fp8Error(f"torchao's float8 linears have the recipes {', '.join(TORCHAO_RECIPES)}, got {recipe!r}")
    chosen: set[str] = set()
    for site in find_sites(model).sites:
        if site.is_grouped or site.obstacle is not None:
            continue
        how: dict[str, Any] = {"tp": tp, "recipe": recipe, "extrapolate": extrapolate, "estimate": estimate}
        if choose_products(policy, asked_by_shape(policy, site.question(tokens, **how)), apart=False):
            chosen.update(site.modules)

    def takes(module: nn.Module, path: str) -> bool:
        if path not in chosen or type(module) is not nn.Linear:
            return False
        return shape_obstacle("tensorwise", (module.out_features, module.in_features)) is None

    return takes


def transformer_engine_kind(cls: type, init_kwargs: Mapping[str, Any] | None = None) -> str | None:
    """The kind of a module class of TransformerEngine, or of Megatron's wrapper of one; None for any other class."""
    kwargs = init_kwargs or {}
    for (library, name), kinds in _CLASSES.items():
        known = getattr(sys.modules.get(library), name, None)
        if isinstance(known, type) and issubclass(cls, known):
            mode = kwargs.get("parallel_mode", kwargs.get("tensor_parallel_mode"))
            kind = kinds if isinstance(kinds, str) else kinds.get(mode)
            return None if kind is None else promote(kind, bool(kwargs.get("is_expert")))
    return None


def transformer_engine_decision(
    policy: Policy,
    *,
    tokens: int,
    tp: int = 1,
    etp: int = 1,
    moe_router_topk: int | None = None,
    part: str = "llm",
    extrapolate: bool = False,
    estimate: bool = True,
) -> Callable[..., Fp8Choice | None]:
    """`decide(cls, ub_name, init_kwargs)`, to be called when a module is made; it gives None for unknown classes."""

    def decide(cls: type, ub_name: str | None = None, init_kwargs: Mapping[str, Any] | None = None) -> Fp8Choice | None:
        kwargs = init_kwargs or {}
        kind = transformer_engine_kind(cls, kwargs)
        if kind is None:
            return None
        gemms = kwargs.get("num_gemms")
        question = Question(
            kind,
            tokens,
            name=ub_name or kwargs.get("ub_name") or kwargs.get("tp_comm_buffer_name"),
            tp=tp,
            etp=etp,
            num_gemms=gemms if kind in GROUPED_KINDS else None,
            moe_router_topk=moe_router_topk,
            part=part,
            extrapolate=extrapolate,
            estimate=estimate,
        )
        return choose_products(policy, question, apart=False)

    return decide
