"""Builds the FP8 layer of one site beside the model: weights fused, norm taken over, names unchanged.

One linear becomes an Fp8Linear over the same parameters. Several become one layer of fused weights inside the first of
them (`fused_projections`). Where a norm feeds nothing else and is a plain RMS or layer norm (compared on a random
input, because classes that look alike differ), the layer is an Fp8NormLinear, which normalises in its cast, and the
module in the norm's place passes its input on. An MLP that computes down(silu(gate(x)) * up(x)), compared so too, is
joined: the gating happens in the casts (`layers.joined_mlp`). The experts of a block become two grouped products, each
by its own choice (`experts`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor, nn
from torch.nn import functional

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
from bitplan.runtime.fp8.layers.joined_mlp import JoinedMlp, has_hooks, joining_obstacle
from bitplan.runtime.fp8.layers.linear import Fp8Linear
from bitplan.runtime.fp8.layers.norm_linear import Fp8NormLinear

FP8_PARAM_NOTE = (
    "fp8_param: weights are stored in FP8 and learn in float32 (weight_master of each layer), "
    "which is what state dicts hold, under the model's own names"
)
_TOLERANCE = 2.0**-6  # two roundings to bfloat16


@dataclass
class Built:
    """Modules by path, the first of them, and the path of the module that keeps the names of state dicts."""

    first: str
    modules: dict[str, nn.Module]
    keeper: str | None = None
    notes: tuple[str, ...] = ()


def build_site(
    model: nn.Module, choices: Mapping[Site, Fp8Choice], recipe: Fp8Recipe, *, fp8_param: bool = False
) -> Built:
    """The layer of one site; the two sites of an experts module are built together."""
    site, choice = next(iter(choices.items()))
    if site.is_grouped:
        return _build_experts(model, choices, recipe)
    gemms = gemms_of(choice, recipe)
    linears = [_linear(model, path) for path in site.modules]
    fused = _join(linears)
    norm = None if site.norm is None or fp8_param else model.get_submodule(site.norm)
    if norm is not None and is_plain_norm(norm):
        layer: Fp8Linear = Fp8NormLinear.from_modules(norm, fused, recipe=recipe, gemms=gemms)
        return _place(site, linears, layer, site.norm)
    layer = Fp8Linear.from_linear(fused, recipe=recipe, gemms=gemms, fp8_param=fp8_param)
    built = _place(site, linears, layer, None)
    if norm is not None:
        built.notes = (f"{type(norm).__name__} is neither RMS nor layer norm as we know them: it stays apart",)
    return built


def has_fp8(model: nn.Module) -> bool:
    return any(isinstance(module, Fp8Linear | Fp8Experts) for module in model.modules())


def gemms_of(choice: Fp8Choice, recipe: Fp8Recipe) -> GemmChoice:
    name = choice.recipe or recipe.name
    return GemmChoice(*(name if product in choice.products else BF16 for product in PRODUCTS))


def is_plain_norm(norm: nn.Module) -> bool:
    """Whether a norm is x / rms(x) * weight, or torch's layer norm, with nothing of its own added."""
    if isinstance(norm, nn.LayerNorm):
        return type(norm) is nn.LayerNorm and norm.elementwise_affine and len(norm.normalized_shape) == 1
    weight = getattr(norm, "weight", None)
    eps = next((getattr(norm, name) for name in ("eps", "variance_epsilon") if hasattr(norm, name)), None)
    if not isinstance(weight, nn.Parameter) or weight.ndim != 1 or getattr(norm, "bias", None) is not None:
        return False
    if weight.device.type == "meta":
        return True  # on meta nothing can be compared; block classes whose norms are taken over are known
    if not bool(weight.any()):
        return False  # zeros would agree with any norm
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn((4, weight.shape[0]), generator=generator, device=weight.device).to(weight.dtype)
    with torch.no_grad():
        expected = functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
        off = (norm(x).float() - expected).norm() / expected.norm()
    return bool(off <= _TOLERANCE)


# ---- gated MLPs ------------------------------------------------------------------------------------------------------

_SILU = ("F", "functional", "nn", "torch", "silu")


@dataclass(frozen=True)
class GatedNames:
    """An MLP by its path, and the names of its three projections."""

    path: str
    gate: str
    up: str
    down: str


def find_gated(model: nn.Module, sites: Sequence[Site]) -> list[GatedNames]:
    """MLPs among these sites that compute down(silu(gate(x)) * up(x)), behind a norm that gate and up take over.

    They are found before their layers are replaced, which `build_gated` does afterwards.
    """
    downs = {_parent(site.modules[0]): site.modules[0] for site in sites if site.name == "fc2" and not site.is_grouped}
    found = []
    for site in sites:
        path = _parent(site.modules[0])
        if site.name != "fc1" or len(site.modules) != 2 or site.norm is None or not path or path not in downs:
            continue
        names = [each.rpartition(".")[2] for each in (*site.modules, downs[path])]
        if is_plain_gating(model.get_submodule(path), *names):
            found.append(GatedNames(path, *names))
    return found


def is_plain_gating(mlp: nn.Module, gate: str, up: str, down: str) -> bool:
    """Whether a module computes down(silu(gate(x)) * up(x)) and nothing else.

    Its code may name nothing but these layers and silu: numbers alone would not show a clamp that is not reached, or
    dropout while it is off.
    """
    linears = [mlp.get_submodule(name) for name in (gate, up, down)]
    weight = getattr(linears[0], "weight", None)
    own = mlp._parameters or mlp._buffers or mlp._state_dict_hooks or mlp._load_state_dict_pre_hooks
    if own or "forward" in vars(mlp) or has_hooks(mlp.modules()) or not _names_only_gating(mlp, gate, up, down):
        return False
    if not all(type(each) is nn.Linear for each in linears) or not isinstance(weight, Tensor) or weight.is_meta:
        return False
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn((1, 4, weight.shape[1]), generator=generator, device=weight.device).to(weight.dtype)
    with torch.no_grad():
        expected = linears[2](functional.silu(linears[0](x)) * linears[1](x)).float()
        made = mlp(x)
        if not isinstance(made, Tensor) or made.shape != expected.shape:
            return False
        return bool((made.float() - expected).norm() / expected.norm() <= _TOLERANCE)


def activation_name(mlp: nn.Module, *layers: str) -> str | None:
    """What the code of a gated MLP names beside its layers: an attribute with the activation, or None."""
    return next((name for name in type(mlp).forward.__code__.co_names if name not in {*layers, *_SILU}), None)


def _names_only_gating(mlp: nn.Module, *layers: str) -> bool:
    code = getattr(type(mlp).forward, "__code__", None)
    if code is None or code.co_freevars or not all(each is None or isinstance(each, str) for each in code.co_consts):
        return False
    others = set(code.co_names) - {*layers, *_SILU}
    if not others <= set(vars(mlp)) | set(mlp._modules) or len(others) > 1:
        return False
    kinds = [getattr(mlp, name) for name in others]
    return all(each is functional.silu or type(each).__name__ in ("SiLU", "SiLUActivation") for each in kinds)


def build_gated(model: nn.Module, found: Sequence[GatedNames]) -> Iterator[tuple[JoinedMlp, GatedNames]]:
    """A `JoinedMlp` for each MLP whose two layers became FP8 so that it can run."""
    for each in found:
        mlp = model.get_submodule(each.path)
        head, down = mlp.get_submodule(each.gate), mlp.get_submodule(each.down)
        if joining_obstacle(getattr(head, "fused", head), down) is None:
            activation = activation_name(mlp, each.gate, each.up, each.down)
            parts = [each.up, *([activation] if activation else [])]
            yield JoinedMlp(mlp, each.gate, each.down, "silu_gated", parts=parts), each


# ---- dense -----------------------------------------------------------------------------------------------------------


def _linear(model: nn.Module, path: str) -> nn.Linear:
    layer = model.get_submodule(path)
    assert isinstance(layer, nn.Linear)
    return layer


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
