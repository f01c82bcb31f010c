"""Builds the FP8 layer of one site beside the model: weights fused, norm taken over, names unchanged.

One linear becomes an Fp8Linear over the same parameters. Several become one layer of fused weights inside the first of
them (`fused_projections`). Where a norm was seen to feed nothing else (`recorded_wiring`), the layer is an
Fp8NormLinear, which normalises in its cast, and the module in the norm's place passes its input on. An MLP that was
seen to be one, and nothing else, is joined: its activation happens in the casts (`layers.joined_mlp`). The experts of a
block become two grouped products, each by its own choice (`experts`).

Puts FP8 layers into a model, and the model's own modules back if something fails half-way.

Weights of joined projections (q, k and v) are copied into one tensor, and the old ones are not kept: a model would need
the memory twice. They are made again from the rows of the joined weight, bit for bit; modules and parameters that
others still hold, such as an optimizer, are put back themselves.

Warns once when a model is given token counts that its FP8 plan was not made for.

A plan is made for one token count and holds for the band around it. The watch sits on the first FP8 layer of a part and
compares the rows of its input, which the host knows, with that band: no value of a tensor is read and the GPU is not
waited for. It warns once, through the log, and then removes itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from bitplan.fp8.decide import LayerDecision
from bitplan.fp8.find_linears import Site
from bitplan.fp8.fused_projections import FusedPart, FusedProjections, NormTakenOver, join_rows, keep_names
from bitplan.fp8.layer_settings import Fp8Recipe, GemmChoice
from bitplan.fp8.layers.grouped_linear import Fp8Experts
from bitplan.fp8.layers.joined_mlp import JoinedMlp, joining_obstacle
from bitplan.fp8.layers.linear import Fp8Linear, cast_weights_together
from bitplan.fp8.layers.norm_linear import Fp8NormLinear
from bitplan.fp8.policy.choice import Fp8Choice
from bitplan.fp8.policy.vocabulary import PRODUCTS
from bitplan.fp8.recipes import BF16
from bitplan.fp8.recorded_wiring import MlpWiring, holder_of

# ---- token watch -----------------------------------------------------------------------------------------------------


log = logging.getLogger("bitplan")


class TokenWatch:
    """A forward hook that compares token counts with the band a plan holds for; None: no upper end."""

    def __init__(self, path: str, lowest: int, highest: int | None, planned: int) -> None:
        self.path, self.lowest, self.highest, self.planned = path, lowest, highest, planned
        self.spoken = False
        self._handle: Any = None

    def attach(self, module: nn.Module) -> TokenWatch:
        self._handle = module.register_forward_pre_hook(self)
        return self

    def __call__(self, module: nn.Module, inputs: Sequence[Any]) -> None:
        if self.spoken or not module.training or not inputs or not isinstance(inputs[0], Tensor):
            return  # generation runs one token at a time, which no plan is for
        x = inputs[0]
        tokens = x.numel() // max(x.shape[-1], 1)
        if tokens < self.lowest or (self.highest is not None and tokens > self.highest):
            self._speak(tokens)

    def _speak(self, tokens: int) -> None:
        self.spoken = True
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        band = f"from {self.lowest}" + (f" to {self.highest}" if self.highest is not None else " up")
        log.warning(
            "bitplan: %s was given %d tokens; its FP8 plan was made for %d and holds %s, beyond which nothing was "
            "measured to win; apply the policy with the real count, or measure it",
            self.path,
            tokens,
            self.planned,
            band,
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_handle": None}  # a copy cannot remove the original's hook


# ---- build -----------------------------------------------------------------------------------------------------------


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
    joins_biases = _can_join_biases(linears)
    fused = _join(linears, joins_biases)
    if site.norm is None or fp8_param:
        layer: Fp8Linear = Fp8Linear.from_linear(fused, recipe=recipe, gemms=gemms, fp8_param=fp8_param)
    else:
        norm, kind, eps = model.get_submodule(site.norm.path), site.norm.kind, site.norm.eps
        layer = Fp8NormLinear.from_modules(norm, fused, recipe=recipe, gemms=gemms, kind=kind, eps=eps)
    if fused is not modules[0] and len(modules) == 1:
        layer.turn_in_checkpoints()
    biases = [None if joins_biases else linear.bias for linear in linears]
    return _place(site, linears, layer, None if site.norm is None or fp8_param else site.norm.path, biases)


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
        count = len(first.shared.sizes) if isinstance(first, FusedProjections) else 1
        is_whole = is_whole and not any(getattr(module, "has_bias", False) for module in (first, *others))
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


def _can_join_biases(linears: Sequence[nn.Linear]) -> bool:
    """Whether the biases of linears can be one: all have one, or a single linear; trained or frozen as the weight."""
    if len(linears) == 1:
        return True
    trained = linears[0].weight.requires_grad
    return all(linear.bias is not None and linear.bias.requires_grad == trained for linear in linears)


def _join(linears: Sequence[nn.Linear], joins_biases: bool) -> nn.Linear:
    """One linear with the weights of several; a single linear is returned as it is."""
    if len(linears) == 1:
        return linears[0]
    first = linears[0]
    with torch.device("meta"):
        fused = nn.Linear(first.in_features, sum(linear.out_features for linear in linears), joins_biases)
    trained = first.weight.requires_grad
    fused.weight = nn.Parameter(join_rows([linear.weight for linear in linears]), requires_grad=trained)
    if joins_biases:
        biases = [linear.bias for linear in linears]
        fused.bias = nn.Parameter(join_rows(biases), requires_grad=trained)
    return fused.train(first.training)


def _place(
    site: Site, linears: Sequence[nn.Linear], layer: Fp8Linear, norm: str | None, biases: Sequence[nn.Parameter | None]
) -> Built:
    """The layer where the linears were, and the names that its tensors keep; `biases` stay with single projections."""
    single = len(linears) == 1
    head_path = site.modules[0]
    modules: dict[str, nn.Module] = {head_path: layer}
    if not single:
        sizes = [linear.out_features for linear in linears]
        head = FusedProjections(layer, sizes, biases[0]).train(layer.training)
        modules = {head_path: head}
        for index, path in list(enumerate(site.modules))[1:]:
            modules[path] = FusedPart(head, index, biases[index]).train(layer.training)
    if norm is not None:
        modules[norm] = NormTakenOver(layer.get_submodule("norm"))
    keeper = holder_of([*site.modules, *([norm] if norm else [])])
    return Built(head_path, modules, None if single and norm is None else keeper)


# ---- experts ---------------------------------------------------------------------------------------------------------


def _build_experts(model: nn.Module, choices: Mapping[Site, Fp8Choice], recipe: Fp8Recipe) -> Built:
    path = next(iter(choices)).modules[0]
    experts = model.get_submodule(path)
    gemms = {site.name: gemms_of(choice, recipe) for site, choice in choices.items()}
    layer = Fp8Experts(experts, recipe, gemms["fc1"], gemms["fc2"]).train(experts.training)
    return Built(path, {path: layer}, path)


# ---- replacements ----------------------------------------------------------------------------------------------------


def put_decided(
    model: nn.Module, decided: Sequence[LayerDecision], mlps: Sequence[MlpWiring], *, watch: bool = True
) -> list[str]:
    """Make the FP8 layers one after the other, and put each into the model when it is made; on an error, none.

    Returns notes.
    """
    replaced = Replacements(model)
    try:
        return _put_all(model, decided, mlps, replaced, watch=watch)
    except BaseException as error:
        replaced.restore(error)
        raise


def _put_all(
    model: nn.Module,
    decided: Sequence[LayerDecision],
    mlps: Sequence[MlpWiring],
    replaced: Replacements,
    *,
    watch: bool,
) -> list[str]:
    notes: dict[str, None] = {}
    watched: dict[str, tuple[str, list[Fp8Choice]]] = {}
    joins = {path for each in decided if each.choice and each.joins for path in each.site.modules}
    for each in decided:
        if not each.choice:
            continue
        partners = [other for other in decided if other.site.modules == each.site.modules]
        if each is not next(other for other in partners if other.choice):
            continue  # the two products of one set of experts are built together
        choices = {other.site: other.choice for other in partners}
        built = build_site(model, choices, each.recipe, fp8_param=each.fp8_param)
        replaced.put_built(built)
        if each.fp8_param:
            notes[FP8_PARAM_NOTE] = None
        if not each.site.is_grouped:
            watched.setdefault(each.site.part, (built.first, []))[1].append(each.choice)
    joined: dict[str, str] = {}
    wanted = [wiring for wiring in mlps if {*wiring.first, wiring.down} <= joins]
    for wiring, mlp in build_mlps(model, wanted):
        replaced.put(wiring.path, mlp)
        joined |= dict.fromkeys((*wiring.first, wiring.down), wiring.path)
    cast_weights_together(model)
    if watch:
        for first, choices_of_part in watched.values():
            _watch(model, joined.get(first, first), choices_of_part)
    return list(notes)


def _watch(model: nn.Module, path: str, choices: Sequence[Fp8Choice]) -> None:
    """One watch for all dense FP8 layers of a part: they see the same tokens."""
    lows = [each.holds_from for each in choices if each.holds_from is not None]
    highs = [each.holds_to for each in choices if each.holds_to is not None]
    planned = choices[0].tokens
    if lows and planned is not None:
        TokenWatch(path, max(lows), min(highs) if highs else None, planned).attach(model.get_submodule(path))


class Replacements:
    """Modules of a model that were replaced, in order."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._undo: list[Callable[[], None]] = []
        self._keepers: set[str] = set()
        self._lost: list[str] = []  # layers whose numbers are no longer there

    def put(self, path: str, module: nn.Module) -> None:
        """Put a module in the place of another."""
        old = self._model.get_submodule(path)
        make_old = self._maker_of(path, old, module)
        self._undo.append(lambda: self._model.set_submodule(path, make_old()))
        self._model.set_submodule(path, module)

    def put_built(self, built: Built) -> None:
        """Put a layer into the model, with the names that state dicts keep."""
        for path, module in built.modules.items():
            self.put(path, module)
        if built.keeper is not None and built.keeper not in self._keepers:
            self._keepers.add(built.keeper)
            for handle in keep_names(self._model.get_submodule(built.keeper)):
                self._undo.append(handle.remove)

    def restore(self, error: BaseException) -> None:
        """Make the model what it was; what cannot be is said with the error."""
        for undo in reversed(self._undo):
            undo()
        if self._lost:
            error.add_note(
                f"apply_fp8 failed half-way, and frozen weights of {', '.join(self._lost)} had been stored in FP8: "
                "they are now as FP8 rounds them; load the model again. All other layers are as they were"
            )

    def _maker_of(self, path: str, old: nn.Module, new: nn.Module) -> Callable[[], nn.Module]:
        head = new._head[0] if isinstance(new, FusedPart) else new
        layer = head.fused if isinstance(head, FusedProjections) else head
        if not isinstance(old, nn.Linear) or not isinstance(layer, Fp8Linear) or layer.weight is old.weight:
            return lambda: old  # the new module has its tensors
        start = sum(new._head[0].shared.sizes[: new.index]) if isinstance(new, FusedPart) else 0
        if layer.fp8_param and layer.weight_master is None:
            self._lost.append(path)
        return _maker_from_rows(old, layer, slice(start, start + old.out_features))


def _maker_from_rows(old: nn.Linear, layer: Fp8Linear, rows: slice) -> Callable[[], nn.Module]:
    """A function that returns this linear, or one like it with the rows of a layer."""
    kept, own = ref(old), vars(old) | {"_parameters": dict.fromkeys(old._parameters)}
    tensors = {name: (ref(one), one.dtype, one.requires_grad) for name, one in old.named_parameters()}

    def make() -> nn.Module:
        module = kept()
        if module is not None:
            return module
        module = nn.Linear.__new__(nn.Linear)
        vars(module).update(own)
        for name, (parameter, dtype, trained) in tensors.items():
            kept_parameter = parameter()
            if kept_parameter is None:
                numbers = layer.plain_weight() if name == "weight" else layer.get_parameter(name)
                kept_parameter = nn.Parameter(_rows(numbers, rows).to(dtype), requires_grad=trained)
            module._parameters[name] = kept_parameter
        return module

    return make


def _rows(numbers: Tensor, rows: slice) -> Tensor:
    return numbers.detach()[rows].clone()
