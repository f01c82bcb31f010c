"""Puts FP8 layers into a model, and the model's own modules back if something fails half-way.

Weights of joined projections (q, k and v) are copied into one tensor, and the old ones are not kept: a model would need
the memory twice. They are made again from the rows of the joined weight, bit for bit; modules and parameters that
others still hold, such as an optimizer, are put back themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from weakref import ref

from torch import Tensor, nn

from bitplan.plan.fp8.choice import Fp8Choice
from bitplan.runtime.fp8.build import FP8_PARAM_NOTE, Built, build_mlps, build_site
from bitplan.runtime.fp8.find_linears import Site
from bitplan.runtime.fp8.fused_projections import FusedPart, FusedProjections, keep_names
from bitplan.runtime.fp8.layer_settings import Fp8Recipe
from bitplan.runtime.fp8.layers.linear import Fp8Linear, cast_weights_together
from bitplan.runtime.fp8.recorded_wiring import MlpWiring
from bitplan.runtime.fp8.token_watch import TokenWatch


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
        """The same without the norm in front and without the activation behind."""
        return replace(self, site=replace(self.site, norm=None, apart=why), joins=False)

    def in_bf16(self, reason: str, answer: str) -> LayerDecision:
        choice = replace(self.choice, products=(), answer=answer, reason=reason, speedup=None)
        return replace(self, choice=choice)


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
        start = sum(new._head[0].sizes[: new.index]) if isinstance(new, FusedPart) else 0
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
            numbers = layer.plain_weight() if name == "weight" else layer.get_parameter(name)
            made = nn.Parameter(_rows(numbers, rows).to(dtype), requires_grad=trained)
            module._parameters[name] = parameter() if parameter() is not None else made
        return module

    return make


def _rows(numbers: Tensor, rows: slice) -> Tensor:
    return numbers.detach()[rows].clone()
