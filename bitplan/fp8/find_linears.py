"""Finds where FP8 may go in a model: every linear layer, by its shape, joined where the model was seen to allow it.

Every `nn.Linear` is a candidate, and every layer whose own run was seen to be a product and a bias alone (GPT-2's,
Falcon's), whichever way its weight lies. `recorded_wiring` says which of them read one tensor and are one layer, which
norm a layer may take over, and which MLPs can be joined. The experts of a block are two layers.

Left out unless they are asked for by `include`: the output layer and routers, as the run showed them, and adapters of
peft. A linear that peft has wrapped (its `base_layer`) is a candidate: the base becomes FP8, the adapter stays.

A layer's `kind` and `name` are those of policies; policies are asked by shape, and only version 1 by name:

    qkv      what queries, keys and values come from              layernorm_column; column where no norm is its own
    proj     what reads the result of attention                   row
    fc1      gate and up, or the first projection of an MLP       layernorm_column; column where no norm is its own
    fc2      the last projection of an MLP                        row
    experts  a module that holds their gate, up and down          column_grouped fc1 and row_grouped fc2

Its `part` is "vit" in the half of a vision-language model that reads images: a module made by the `vision_config` of
the model's own config (a key of transformers), or one that computes from convolutions over an image, and not from
tokens, in a model that has both. All else is "llm".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import nn

from bitplan.fp8.policy.policy import Question
from bitplan.fp8.policy.vocabulary import Fp8Error, kind_of, name_of_role
from bitplan.fp8.recorded_wiring import MlpWiring, NormBefore, RecordedRun, Wiring, run_without_numbers
from bitplan.plan.names import ShellPatterns
from bitplan.plan.structure.describe import experts_of, is_product, is_product_alone, multiplies_transposed
from bitplan.plan.structure.families import split_expert
from bitplan.plan.structure.model_view import ExpertsUse, LinearUse, ModelView
from bitplan.plan.structure.recognise import ACTIVATIONS

_LEFT = {"head": "the output layer", "router": "a router"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_BASE = "base_layer"


@dataclass(frozen=True)
class Site:
    """One layer as a policy knows it, and the modules that make it up. `obstacle` says why it cannot be replaced.

    norm   the norm that it may take over; `apart` says why the one in front stays apart, where there is one
    name   as version 1 policies know it; None for what they do not know
    """

    path: str
    part: str
    kind: str
    name: str | None
    shape: tuple[int, int]
    modules: tuple[str, ...]
    norm: NormBefore | None = None
    num_gemms: int | None = None
    moe_router_topk: int | None = None
    obstacle: str | None = None
    apart: str | None = None

    @property
    def is_grouped(self) -> bool:
        return self.num_gemms is not None

    def question(self, tokens: int | None, **more: Any) -> Question:
        """The question to a policy about this layer."""
        keys = ("name", "num_gemms", "moe_router_topk", "shape", "part")
        return Question(self.kind, tokens, **{key: getattr(self, key) for key in keys}, **more)

    def within(self, block: str) -> Site:
        """Return the same layer by its paths inside a block."""
        cut = len(block) + 1 if block else 0
        norm = None if self.norm is None else replace(self.norm, path=self.norm.path[cut:])
        return replace(self, path=self.path[cut:], modules=tuple(path[cut:] for path in self.modules), norm=norm)


@dataclass(frozen=True)
class Sites:
    """The sites of a model in its own order; linears that are left, and why; MLPs that can be joined; MLPs whose
    activation stays apart; what was run."""

    sites: tuple[Site, ...]
    left: tuple[str, ...]
    mlps: tuple[MlpWiring, ...]
    mlps_apart: tuple[MlpWiring, ...]
    run: RecordedRun

    def block_of(self, path: str) -> str:
        """Name a layer's block: as the run showed it, else by the first number in the layer's path."""
        block = self.run.view.block_of(path)
        parts = (part for part in self.run.parts if part and path.startswith(f"{part}."))
        return block or next(parts, "") or block_of(path)


def find_sites(
    model: nn.Module, *, include: Iterable[str] = (), exclude: Iterable[str] = (), example: Any = None
) -> Sites:
    """Every layer that a policy can be asked about; `include` and `exclude` are names or shell patterns of modules."""
    return _Finder(model, tuple(include), tuple(exclude), example).sites()


class _Finder:
    def __init__(self, model: nn.Module, include: tuple[str, ...], exclude: tuple[str, ...], example: Any) -> None:
        self.model, self.asks = model, bool(include)
        self.include, self.exclude = ShellPatterns(include), ShellPatterns(exclude)
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.uses: dict[int, int] = {}
        for module in self.modules.values():
            for parameter in module._parameters.values():
                if parameter is not None:
                    self.uses[id(parameter)] = self.uses.get(id(parameter), 0) + 1
        self.topk = _topk(model)
        vision = getattr(getattr(model, "config", None), "vision_config", None)
        of_vision = (id(vision), type(vision)) if vision is not None else ()
        self.vision = [
            path
            for path, module in self.modules.items()
            if (config := getattr(module, "config", None)) is not None
            and (id(config) in of_vision or type(config) in of_vision)
        ]
        self.run = run_without_numbers(model, example)
        self.wiring = Wiring(model, self.run.view)
        self.reads_images = _reads_images(self.run.view)

    def sites(self) -> Sites:
        paths = [path for path, module in self.model.named_modules() if is_product(module)]
        stacks = {path: use for path, module in self.model.named_modules() if (use := experts_of(module)) is not None}
        experts = {path for path, use in stacks.items() if use.weights}
        for what, patterns in (("include", self.include), ("exclude", self.exclude)):
            patterns.check([*paths, *stacks], what, "linear layer", Fp8Error)
        left = {path: why for path in paths if (why := self._why_left(path)) is not None}
        left |= {path: use.fault for path, use in stacks.items() if not use.weights and self._holds_experts(path)}
        groups: dict[str, tuple[str, ...]] = {}
        linears = set(paths)
        for members in self.wiring.joined():
            if not set(members) & set(left) and self._can_join(members):
                groups |= dict.fromkeys(members, members)
        sites: list[Site] = []
        for path in self.modules:
            members = groups.get(path, (path,))
            if path in experts and self._is_wanted(path):
                sites += self._experts(path, self.modules[path], stacks[path])
            elif path in linears and path not in left and path == members[0]:
                sites.append(self._dense(members))
        shown = tuple(f"{path} ({why})" if why else path for path, why in left.items())
        return Sites(tuple(sites), shown, self.wiring.mlps, self.wiring.mlps_apart, self.run)

    def _is_wanted(self, path: str) -> bool:
        return (not self.asks or bool(self.include.matching(path))) and not self.exclude.matching(path)

    def _why_left(self, path: str) -> str | None:
        """Why a linear is no candidate: "" where it is not wanted, None where it is one."""
        if not self._is_wanted(path):
            return ""
        above = path
        while above := above.rpartition(".")[0]:
            base = getattr(self.modules[above], _BASE, None)
            if isinstance(base, nn.Module) and not path.startswith(f"{above}.{_BASE}"):
                return "an adapter"
        if self.asks:
            return None
        role = self.wiring.role(path)
        if role == "head" and ("" not in self.run.parts or self.run.view.block_of(path)):
            return None  # the last layer of a part or of a block, behind which a head may come
        output = getattr(self.model, "get_output_embeddings", None)
        if not role and callable(output) and output() is self.modules[path]:
            role = "head"
        return _LEFT.get(role)

    def _part(self, path: str) -> str:
        """ "vit" where a module lies in the half that reads images, else "llm"."""
        if any(path == holder or path.startswith(f"{holder}.") for holder in self.vision):
            return "vit"
        return "vit" if path in self.reads_images else "llm"

    def _holds_experts(self, path: str) -> bool:
        """Whether a module was seen to hold stacks of matrices, and FP8 is wanted there."""
        parts = self.run.view.parts.get(path, ())
        return self._is_wanted(path) and any(isinstance(part, LinearUse) and part.experts for part in parts)

    def _norm_before(self, paths: tuple[str, ...]) -> NormBefore | None:
        norm = self.wiring.norm_before(paths)
        if norm is None:
            return None
        parameters = self.modules[norm.path]._parameters.values()
        if norm.why is None and any(self.uses[id(parameter)] > 1 for parameter in parameters if parameter is not None):
            norm = replace(norm, why=f"{norm.path} is shared with another module")
        return norm

    def _dense(self, paths: tuple[str, ...]) -> Site:
        linears = [self.modules[path] for path in paths]
        shape = (sum(features_of(linear)[0] for linear in linears), features_of(linears[0])[1])
        name = name_of_role(self.wiring.role(paths[0]), len(paths))
        norm = self._norm_before(paths)
        taken = norm if norm is not None and norm.why is None else None
        kind = kind_of(name, has_norm=taken is not None)
        obstacle = self._obstacle(paths)
        weight = f"{paths[0]}.weight"
        if split_expert(weight) is not None:
            obstacle = "an expert of its own: experts were measured as one grouped product"
        parent = paths[0].rpartition(".")[0]
        label = "+".join([paths[0], *(path.removeprefix(f"{parent}.") for path in paths[1:])])
        apart = None if norm is None else norm.why
        return Site(label, self._part(paths[0]), kind, name, shape, paths, taken, obstacle=obstacle, apart=apart)

    def _experts(self, path: str, module: nn.Module, experts: ExpertsUse) -> Iterator[Site]:
        for child, kind, name in ((experts.gate_up, "column_grouped", "fc1"), (experts.down, "row_grouped", "fc2")):
            weight = module.get_parameter(child)
            topk = self.topk or getattr(self.modules.get(path.rpartition(".")[0]), "top_k", None)
            obstacle = experts_obstacle(module, experts)
            if self.uses[id(weight)] > 1:
                obstacle = f"{path}.{child} is shared with another module"
            if weight.is_cuda and weight.dtype != torch.bfloat16:
                obstacle = f"grouped products on a GPU take bfloat16, its weights are {weight.dtype}"
            shape = (weight.shape[1], weight.shape[2])
            label, part = f"{path}.{child}".lstrip("."), self._part(path)
            yield Site(label, part, kind, name, shape, (path,), None, weight.shape[0], topk, obstacle)

    def _can_join(self, paths: tuple[str, ...]) -> bool:
        """Whether linears that read one tensor can be one: alike in all but their outputs, and none has an obstacle."""
        linears = [self.modules[path] for path in paths]
        if self._obstacle(paths) is not None or not all(has_output_rows(one) for one in linears):
            return False
        kinds = {
            (weight.dtype, weight.device, weight.requires_grad)
            for one in linears
            if (weight := one.get_parameter("weight")) is not None
        }
        return len(kinds) == 1

    def _obstacle(self, paths: tuple[str, ...]) -> str | None:
        """Why these linears cannot be replaced by FP8 layers; None if they can."""
        for path in paths:
            linear = self.modules[path]
            if not is_product_alone(linear):
                return f"{path} is a {type(linear).__name__}, whose forward is not Linear's own"
            if _has_hooks(linear):
                return f"{path} has hooks, which would be lost"
            if self.uses[id(linear.weight)] > 1:
                return f"the weight of {path} is shared with another module"
            if any(use.module != use.path for use in self.run.view.uses(f"{path}.weight")):
                return f"the weight of {path} is read by another module than its own"
        return None


def experts_obstacle(module: nn.Module, experts: ExpertsUse) -> str | None:
    """Why the experts of a module are not known to be a sum of down(act(gate(x)) * up(x))."""
    if experts.is_columns:
        return "its weights are transposed"
    if experts.gate_up_bias is not None or experts.down_bias is not None:
        return "its experts have biases"
    if experts.is_interleaved:
        return "its gate and up are interleaved"
    if experts.activation not in ACTIVATIONS:
        return f"{type(module).__name__} gates its experts in its own way, not by act(gate) * up"
    if experts.fault:
        return f"{type(module).__name__}: {experts.fault}"
    return "it has hooks, which would be lost" if _has_hooks(module) else None


def _has_hooks(module: nn.Module) -> bool:
    return "forward" in module.__dict__ or any(getattr(module, hooks, None) for hooks in _HOOKS)


def has_output_rows(linear: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a linear is one of torch's, with outputs as rows of its weight."""
    return isinstance(linear, nn.Linear) and not multiplies_transposed(linear, "weight")


def features_of(linear: nn.Module) -> tuple[int, int]:
    """Outputs and inputs, whichever way the weight lies."""
    rows, columns = linear.get_parameter("weight").shape
    return (columns, rows) if multiplies_transposed(linear, "weight") else (rows, columns)


def _reads_images(view: ModelView) -> set[str]:
    """Paths of linears that compute from convolutions over images and not from tokens, in a model that has both."""
    convolutions = {use.step for use in view.convolutions if use.function in ("conv2d", "conv3d")}
    tokens = {use.step for use in view.embeddings if view.role(use.weight) == "embedding"}
    if not convolutions or not tokens:
        return set()
    sources = {step: {step} for step in convolutions | tokens}
    for step in sorted(view.fed_by):
        sources.setdefault(step, set()).update(*(sources.get(before, ()) for before in view.fed_by[step]))
    reads = {use.path: sources.get(use.step, set()) for use in view.linears}
    return {path for path, roots in reads.items() if roots & convolutions and not roots & tokens}


def _topk(model: nn.Module) -> int | None:
    config = getattr(model, "config", None)
    for part in (config, getattr(config, "text_config", None)):
        topk = getattr(part, "num_experts_per_tok", None)
        if type(topk) is int and topk >= 1:
            return topk
    return None


def block_of(path: str) -> str:
    """The block that a layer is in: up to the first number in its path; empty where there is none."""
    match = re.match(r"(?:.*?\.)??[0-9]+(?=\.)", path)
    return match[0] if match else ""
