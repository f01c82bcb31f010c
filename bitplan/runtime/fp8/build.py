"""Builds the FP8 layer of one site beside the model: weights fused, norm taken over, names unchanged.

One linear becomes an Fp8Linear over the same parameters. Several become one layer of fused weights inside the first of
them (`fused_projections`). Where a norm was seen to feed nothing else (`recorded_wiring`), the layer is an
Fp8NormLinear, which normalises in its cast, and the module in the norm's place passes its input on. An MLP that was
seen to be one, and nothing else, is joined: its activation happens in the casts (`layers.joined_mlp`). The experts of a
block become two grouped products, each by its own choice (`experts`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import nn

from bitplan.formats.fp8_recipes import BF16
from bitplan.plan.fp8.choice import Fp8Choice
from bitplan.plan.fp8.vocabulary import PRODUCTS
from bitplan.runtime.fp8.experts import Fp8Experts
from bitplan.runtime.fp8.find_linears import Site
from bitplan.runtime.fp8.fused_projections import (
    FusedPart,
    FusedProjections,
    NormTakenOver,
    join_rows,
)
from bitplan.runtime.fp8.layer_settings import Fp8Recipe, GemmChoice
from bitplan.runtime.fp8.layers.joined_mlp import JoinedMlp, joining_obstacle
from bitplan.runtime.fp8.layers.linear import Fp8Linear
from bitplan.runtime.fp8.layers.norm_linear import Fp8NormLinear
from bitplan.runtime.fp8.recorded_wiring import MlpWiring

FP8_PARAM_NOTE = (
    "fp8_param: weights are stored in FP8 and learn in float32 (weight_master of each layer), "
    "which is what state dicts hold, under the model's own names"
)


@dataclass
class Built:
    """Modules by path, the first of them, and the path of the module that keeps the names of state dicts."""

    first: str
    modules: dict[str, nn.Module]
    keeper: str | None = None


def build_site(
    model: nn.Module, choices: Mapping[Site, Fp8Choice], recipe: Fp8Recipe, *, fp8_param: bool = False
) -> Built:
    """The layer of one site; the two sites of an experts module are built together."""
    site, choice = next(iter(choices.items()))
    if site.is_grouped:
        return _build_experts(model, choices, recipe)
    gemms = gemms_of(choice, recipe)
    modules = [model.get_submodule(path) for path in site.modules]
    linears = [_turned(module) for module in modules]
    fused = _join(linears)
    if site.norm is None or fp8_param:
        layer: Fp8Linear = Fp8Linear.from_linear(fused, recipe=recipe, gemms=gemms, fp8_param=fp8_param)
    else:
        norm, kind, eps = model.get_submodule(site.norm.path), site.norm.kind, site.norm.eps
        layer = Fp8NormLinear.from_modules(norm, fused, recipe=recipe, gemms=gemms, kind=kind, eps=eps)
    if fused is not modules[0] and len(modules) == 1:
        layer.turn_in_checkpoints()
    return _place(site, linears, layer, None if site.norm is None or fp8_param else site.norm.path)


def has_fp8(model: nn.Module) -> bool:
    return any(isinstance(module, Fp8Linear | Fp8Experts) for module in model.modules())


def gemms_of(choice: Fp8Choice, recipe: Fp8Recipe) -> GemmChoice:
    name = choice.recipe or recipe.name
    return GemmChoice(*(name if product in choice.products else BF16 for product in PRODUCTS))


def build_mlps(model: nn.Module, mlps: Sequence[MlpWiring]) -> Iterator[tuple[MlpWiring, JoinedMlp]]:
    """A `JoinedMlp` for each MLP whose layers became FP8 so that it can run."""
    for wiring in mlps:
        first, down = (model.get_submodule(path) for path in (wiring.first[0], wiring.down))
        others = [model.get_submodule(path) for path in wiring.first[1:]]
        is_whole = all(isinstance(other, FusedPart) and other._head[0] is first for other in others)
        count = len(first.sizes) if isinstance(first, FusedProjections) else 1
        layer = first.fused if isinstance(first, FusedProjections) else first
        if is_whole and count == len(wiring.first) and joining_obstacle(layer, down) is None:
            cut = len(wiring.path) + 1
            mlp = model.get_submodule(wiring.path)
            joined = JoinedMlp(mlp, wiring.first[0][cut:], wiring.down[cut:], wiring.function, wiring.tail)
            yield wiring, joined


# ---- dense -----------------------------------------------------------------------------------------------------------


def _turned(module: nn.Module) -> nn.Linear:
    """A linear itself; of one whose weight is [inputs, outputs] (Conv1D) a linear with the transpose."""
    if isinstance(module, nn.Linear):
        return module
    weight = module.get_parameter("weight")
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[0], weight.shape[1], bias=False)
    linear.weight = nn.Parameter(weight.detach().t().contiguous(), requires_grad=weight.requires_grad)
    linear.bias = module.get_parameter("bias")
    return linear.train(module.training)


def _join(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One linear with the weights of several; a single linear is returned as it is."""
    if len(linears) == 1:
        return linears[0]
    first = linears[0]
    with torch.device("meta"):
        fused = nn.Linear(first.in_features, sum(each.out_features for each in linears), first.bias is not None)
    trained = first.weight.requires_grad
    fused.weight = nn.Parameter(join_rows([each.weight for each in linears]), requires_grad=trained)
    biases = [each.bias for each in linears if each.bias is not None]
    if biases:
        fused.bias = nn.Parameter(join_rows(biases), requires_grad=trained)
    return fused.train(first.training)


def _place(site: Site, linears: Sequence[nn.Linear], layer: Fp8Linear, norm: str | None) -> Built:
    """The layer where the linears were, and the names that its tensors keep."""
    single = len(linears) == 1
    head_path = site.modules[0]
    modules: dict[str, nn.Module] = {head_path: layer}
    if not single:
        head = FusedProjections(layer, [each.out_features for each in linears]).train(layer.training)
        modules = {head_path: head}
        modules |= {path: FusedPart(head, index).train(layer.training) for index, path in _rest(site)}
    if norm is not None:
        modules[norm] = NormTakenOver(layer.get_submodule("norm"))
    keeper = _common_parent([*site.modules, *([norm] if norm else [])])
    return Built(head_path, modules, None if single and norm is None else keeper)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _common_parent(paths: Sequence[str]) -> str:
    """The path of the module that contains all of these."""
    parents = [path.split(".")[:-1] for path in paths]
    shared = takewhile(lambda words: len(set(words)) == 1, zip(*parents, strict=False))
    return ".".join(words[0] for words in shared)


def _rest(site: Site) -> list[tuple[int, str]]:
    return [(index, path) for index, path in enumerate(site.modules) if index]


# ---- experts ---------------------------------------------------------------------------------------------------------


def _build_experts(model: nn.Module, choices: Mapping[Site, Fp8Choice], recipe: Fp8Recipe) -> Built:
    path = next(iter(choices)).modules[0]
    experts = model.get_submodule(path)
    gemms = {site.name: gemms_of(choice, recipe) for site, choice in choices.items()}
    layer = Fp8Experts(experts, recipe, gemms["fc1"], gemms["fc2"]).train(experts.training)
    return Built(path, {path: layer}, path)
