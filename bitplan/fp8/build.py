"""Builds FP8 layers beside a model and puts them into it: weights joined, norms taken over, names unchanged.

One linear becomes an Fp8Linear over the same parameters. Several become one layer of joined weights inside the first of
them (`fused_projections`). Where a norm was seen to feed nothing else (`recorded_wiring`), the layer is an
Fp8NormLinear, which normalises in its cast, and the module in the norm's place passes its input on. An MLP that was
seen to be one, and nothing else, is joined: its activation happens in the casts (`layers.joined_mlp`). The experts of a
block become two grouped products, each by its own choice.

If something fails half-way the model gets its own modules back (`Replacements`). Weights of joined projections (q, k
and v) are copied into one tensor, and the old ones are not kept: a model would need the memory twice. They are made
again from the rows of the joined weight, bit for bit; modules and parameters that others still hold, such as an
optimizer, are put back themselves.

A choice is made for one token count and holds for the band around it. A `TokenWatch` on the first FP8 layer of a part
compares the rows of its input, which the host knows, with that band: no value of a tensor is read and the GPU is not
waited for. It warns once, through the log, and then removes itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from bitplan.fp8.decide import LayerDecision
from bitplan.fp8.find_linears import features_of, has_output_rows
from bitplan.fp8.fused_projections import FusedPart, FusedProjections, NormTakenOver, keep_names
from bitplan.fp8.layer_settings import GemmChoice
from bitplan.fp8.layers.grouped_linear import Fp8Experts
from bitplan.fp8.layers.joined_mlp import JoinedMlp, joining_obstacle
from bitplan.fp8.layers.linear import Fp8Linear, Fp8NormLinear, cast_weights_together
from bitplan.fp8.policy.vocabulary import PRODUCTS
from bitplan.fp8.recipes import BF16
from bitplan.fp8.recorded_wiring import MlpWiring, holder_of
from bitplan.plan.structure.describe import multiplies_transposed

log = logging.getLogger("bitplan")
FP8_PARAM_NOTE = (
    "fp8_param: weights are stored in FP8 and learn in float32 (weight_master of each layer), "
    "which is what state dicts hold, under the model's own names"
)


def has_fp8(model: nn.Module) -> bool:
    return any(isinstance(module, Fp8Linear | Fp8Experts) for module in model.modules())


def put_decided(
    model: nn.Module, decided: Sequence[LayerDecision], mlps: Sequence[MlpWiring], *, watch: bool = True
) -> list[str]:
    """Make the FP8 layers one after the other, and put each into the model when it is made; on an error, none.

    Returns notes.
    """
    replaced = Replacements(model)
    try:
        by_modules: dict[tuple[str, ...], list[LayerDecision]] = {}
        for layer in decided:
            by_modules.setdefault(layer.site.modules, []).append(layer)
        built = [layers for layers in by_modules.values() if any(layer.choice for layer in layers)]
        for layers in built:
            build_layer(model, layers, replaced)
        may_join = {path for layer in decided if layer.choice and layer.joins for path in layer.site.modules}
        joined = _join_mlps(model, mlps, may_join, replaced)
        cast_weights_together(model)
        if watch:
            _watch(model, [layers[0] for layers in built if not layers[0].site.is_grouped], joined)
    except BaseException as error:
        replaced.restore(error)
        raise
    return [FP8_PARAM_NOTE] if any(layers[0].fp8_param for layers in built) else []


# ---- token watch -----------------------------------------------------------------------------------------------------


def _watch(model: nn.Module, layers: Sequence[LayerDecision], joined: Mapping[str, str]) -> None:
    """Attach a TokenWatch to the first FP8 layer of each part of a model: its dense layers see the same tokens."""
    by_part: dict[str, list[LayerDecision]] = {}
    for layer in layers:
        by_part.setdefault(layer.site.part, []).append(layer)
    for members in by_part.values():
        lows = [layer.choice.holds_from for layer in members if layer.choice.holds_from is not None]
        highs = [layer.choice.holds_to for layer in members if layer.choice.holds_to is not None]
        first, planned = members[0].site.modules[0], members[0].choice.tokens
        if lows and planned is not None:
            path = joined.get(first, first)
            TokenWatch(path, max(lows), min(highs) if highs else None, planned).attach(model.get_submodule(path))


class TokenWatch:
    """A forward hook that warns once when a token count lies outside the range that the plan was made for."""

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


# ---- layers ----------------------------------------------------------------------------------------------------------


def build_layer(model: nn.Module, layers: Sequence[LayerDecision], replaced: Replacements) -> None:
    """Put the layer of one decision into the model; the two products of an experts module are built together."""
    layer = next(layer for layer in layers if layer.choice)
    if not layer.site.is_grouped:
        _build_dense(model, layer, replaced)
        return
    path = layer.site.modules[0]
    experts = model.get_submodule(path)
    gemms = {product.site.name: _gemms(product) for product in layers}
    replaced.put(path, Fp8Experts(experts, layer.recipe, gemms["fc1"], gemms["fc2"]).train(experts.training))
    replaced.keep_names_in(path)


def _gemms(layer: LayerDecision) -> GemmChoice:
    name = layer.choice.recipe or layer.recipe.name
    return GemmChoice(*(name if product in layer.choice.products else BF16 for product in PRODUCTS))


def _build_dense(model: nn.Module, decided: LayerDecision, replaced: Replacements) -> None:
    site, paths = decided.site, decided.site.modules
    how: dict[str, Any] = {"recipe": decided.recipe, "gemms": _gemms(decided)}
    modules = [model.get_submodule(path) for path in paths]
    linears = [_as_linear(module) for module in modules]
    joins_biases = _can_join_biases(linears)
    fused = _join(linears, joins_biases)
    norm = None if decided.fp8_param else site.norm
    if norm is None:
        layer = Fp8Linear.from_linear(fused, fp8_param=decided.fp8_param, **how)
    else:
        layer = Fp8NormLinear.from_modules(model.get_submodule(norm.path), fused, kind=norm.kind, eps=norm.eps, **how)
    if len(paths) == 1:
        if multiplies_transposed(modules[0], "weight"):
            layer.turn_in_checkpoints()
        replaced.put(paths[0], layer)
    else:
        biases = [None if joins_biases else linear.bias for linear in linears]
        head = FusedProjections(layer, [linear.out_features for linear in linears], biases[0]).train(layer.training)
        replaced.put(paths[0], head)
        for index in range(1, len(paths)):
            replaced.put(paths[index], FusedPart(head, index, biases[index]).train(layer.training))
    if norm is not None:
        replaced.put(norm.path, NormTakenOver(layer.get_submodule("norm")))
    if len(paths) > 1 or norm is not None:
        replaced.keep_names_in(holder_of([*paths, *([norm.path] if norm is not None else [])]))


def _join_mlps(
    model: nn.Module, mlps: Sequence[MlpWiring], may_join: set[str], replaced: Replacements
) -> dict[str, str]:
    """Put a `JoinedMlp` in the place of each MLP whose layers became FP8 so that it can run; its path by theirs."""
    joined: dict[str, str] = {}
    for wiring in mlps:
        if not {*wiring.first, wiring.down} <= may_join:
            continue
        first, down = (model.get_submodule(path) for path in (wiring.first[0], wiring.down))
        others = [model.get_submodule(path) for path in wiring.first[1:]]
        is_whole = all(isinstance(other, FusedPart) and other._head[0] is first for other in others)
        count = len(first.shared.sizes) if isinstance(first, FusedProjections) else 1
        has_own_bias = any(getattr(module, "has_bias", False) for module in (first, *others))
        layer = first.fused if isinstance(first, FusedProjections) else first
        if is_whole and count == len(wiring.first) and not has_own_bias and joining_obstacle(layer, down) is None:
            cut = len(wiring.path) + 1
            mlp = model.get_submodule(wiring.path)
            first_path, down_path = wiring.first[0][cut:], wiring.down[cut:]
            replaced.put(wiring.path, JoinedMlp(mlp, first_path, down_path, wiring.function, wiring.tail))
            joined |= dict.fromkeys((*wiring.first, wiring.down), wiring.path)
    return joined


def _as_linear(module: nn.Module) -> nn.Linear:
    """A linear of torch's itself; of another layer one with its weight, or the transpose of [inputs, outputs]."""
    if has_output_rows(module):
        return module
    outputs, inputs = features_of(module)
    with torch.device("meta"):
        linear = nn.Linear(inputs, outputs, bias=False)
    weight = module.get_parameter("weight")
    if multiplies_transposed(module, "weight"):
        weight = nn.Parameter(weight.detach().t().contiguous(), requires_grad=weight.requires_grad)
    linear.weight = weight
    linear.register_parameter("bias", module._parameters.get("bias"))
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
    for name in ("weight", "bias") if joins_biases else ("weight",):
        rows = torch.cat([linear.get_parameter(name).detach() for linear in linears])
        setattr(fused, name, nn.Parameter(rows, requires_grad=trained))
    return fused.train(first.training)


# ---- replacements ----------------------------------------------------------------------------------------------------


class Replacements:
    """The modules of a model that were replaced, in order, so that all can be put back on an error."""

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

    def keep_names_in(self, path: str) -> None:
        """Let the module at this path read and write state dicts under the names that its layers had."""
        if path not in self._keepers:
            self._keepers.add(path)
            for handle in keep_names(self._model.get_submodule(path)):
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
        if not has_output_rows(old) or not isinstance(layer, Fp8Linear) or layer.weight is old.weight:
            return lambda: old  # the new module has its tensors
        start = sum(new._head[0].shared.sizes[: new.index]) if isinstance(new, FusedPart) else 0
        if layer.fp8_param and layer.weight_master is None:
            self._lost.append(path)
        return _maker_from_rows(old, layer, slice(start, start + old.out_features))


def _maker_from_rows(old: nn.Linear, layer: Fp8Linear, rows: slice) -> Callable[[], nn.Module]:
    """A function that returns this linear, or one like it with the rows of a layer."""
    kind, old_module, attributes = type(old), ref(old), vars(old) | {"_parameters": dict.fromkeys(old._parameters)}
    tensors = {name: (ref(one), one.dtype, one.requires_grad) for name, one in old.named_parameters()}

    def make() -> nn.Module:
        module = old_module()
        if module is not None:
            return module
        module = kind.__new__(kind)
        vars(module).update(attributes)
        for name, (parameter, dtype, trained) in tensors.items():
            kept_parameter = parameter()
            if kept_parameter is None:
                numbers = layer.plain_weight() if name == "weight" else layer.get_parameter(name)
                kept_parameter = nn.Parameter(numbers.detach()[rows].clone().to(dtype), requires_grad=trained)
            module._parameters[name] = kept_parameter
        return module

    return make
