"""Whole models: every weight of a torch module in a format, and a comparison of two models.

`morph_model` gives each chosen Parameter a WeightStore and lets eval-mode forwards see the decoded version instead
of the Parameter. The Parameters themselves, `state_dict()`, optimizers and training are untouched: quantization
happens after training, not in it.

How. The class of each module with morphed weights becomes a subclass of itself in which `weight` is a property.
While a forward of an eval-mode module runs on a thread, it gives the decoded version there; anywhere else the
Parameter. The decoded tensor lives no longer than the forward that asked for it. So nothing has to be put back after
an exception, threads do not disturb each other, and what reads weights without calling the layer that owns them
(attention's output projection, torch's fused encoder layer, logits from an embedding) is quantized too. Modules
on the way from the model to such a layer get the subclass for their `forward` alone.
"""

from __future__ import annotations

import copy
import functools
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn

from bitplan.errors import StoreError, did_you_mean
from bitplan.formats import Encoded, Format, get_format
from bitplan.formats.format import NARROW_KERNEL
from bitplan.formats.report import Similarity, similarity
from bitplan.formats.scales import ScaleRule
from bitplan.kernels import decode
from bitplan.store.weights import ActivationObserver, Calibration, EncodeOptions, WeightStore

Formats = Format | str | Mapping[str, Format | str | None]
Weights = nn.Module | Mapping[str, Tensor | Encoded]

_LAYERS = (
    nn.Linear,
    nn.Bilinear,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.modules.conv._ConvNd,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
)
_WEIGHT = re.compile(r"weight|weight_(ih|hh|hr)(_l\d+(_reverse)?)?|(in|q|k|v)_proj_weight")
_SLOTS = "_bitplan_slots"
_BEFORE = "morphed before"
_NONE = "None in the mapping"


# ---- what forward sees -----------------------------------------------------------------------------------------------


@dataclass
class _Slot:
    """A morphed Parameter of a module."""

    store: WeightStore
    fmt: Format

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(copy.deepcopy(self.store, memo), self.fmt)


class _Frame:
    """A running forward of an eval-mode module, and the weights decoded for it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.weights: dict[tuple[int, str], Any] = {}

    def keeps(self, module: nn.Module) -> bool:
        # Attention uses its output projection's weight as its own.
        return module is self.module or isinstance(self.module, nn.MultiheadAttention)


class _Frames(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Frame] = []


_frames = _Frames()


def _run_eval(forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    depth = len(_frames.stack)
    try:
        _frames.stack.append(_Frame(module))
        return forward(module, *args, **kwargs)
    finally:
        del _frames.stack[depth:]


def _seen_by_forward(module: nn.Module, name: str) -> Tensor | None:
    """The decoded version of a morphed Parameter, decoded once per forward of its module."""
    frame = _frames.stack[-1]
    found: Tensor | None = frame.weights.get((id(module), name))
    if found is None:
        slot, parameter = _slots(module)[name], module._parameters[name]
        if not isinstance(parameter, nn.Parameter):
            return parameter  # torch.func.functional_call put its own tensor here: that is what the caller wants to see
        # A Parameter put here for this call alone is quantized as well, and its version not kept.
        store = slot.store if slot.store.follows(parameter) else slot.store._for(parameter)
        found = decode(store.morph(slot.fmt), parameter.dtype)
        if frame.keeps(module):
            frame.weights[id(module), name] = found
    return found


class _Morphed(nn.Module):
    """What the class of a morphed module adds to the class it had."""

    _bitplan_base: type[nn.Module]
    _bitplan_names: frozenset[str]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """A new Parameter in the place of a morphed one is morphed too: `load_state_dict(assign=True)` does this."""
        super().register_parameter(name, param)
        slot = _slots(self).get(name)
        if slot is not None and param is not None and not slot.store.follows(param):
            slot.store = slot.store._for(param)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """`.to`, `.half`, `.cuda`."""
        with self._moving():
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """Parameters change place or type inside: versions move along, for encoding again would lose a file's bytes."""
        before = [
            (name, slot, parameter, parameter.detach(), slot.store.versions)
            for name, slot in _slots(self).items()
            if (parameter := self._parameters.get(name)) is not None
        ]
        yield
        for name, slot, parameter, numbers, versions in before:
            now = self._parameters[name]
            assert isinstance(now, nn.Parameter)
            if now is not parameter:
                slot.store = slot.store._for(now)
            slot.store._moved(numbers, versions, now)

    def __reduce_ex__(self, protocol: Any) -> Any:  # deepcopy; a pickle ends at the stores, which say what to do
        _, _, *state = cast(tuple[Any, ...], super().__reduce_ex__(protocol))
        return _new_morphed, (self._bitplan_base, self._bitplan_names), *state


class _MorphedRNN(_Morphed):
    """Recurrent layers hand a list of all their weights to torch; it is put together for the call."""

    @property
    def _flat_weights(self) -> list[Tensor | None]:
        if self.training or not _frames.stack:
            kept: list[Tensor | None] = self.__dict__["_flat_weights"]
            return kept
        frame = _frames.stack[-1]
        key = (id(self), "_flat_weights")
        if frame.module is not self or key not in frame.weights:
            flat = [_detached(getattr(self, name, None)) for name in self.__dict__["_flat_weights_names"]]
            if frame.module is not self:
                return flat
            frame.weights[key] = flat
            nn.RNNBase.flatten_parameters(self)  # type: ignore[arg-type]  # cuDNN wants one piece of memory
        found: list[Tensor | None] = frame.weights[key]
        return found

    @_flat_weights.setter
    def _flat_weights(self, weights: list[Tensor | None]) -> None:
        self.__dict__["_flat_weights"] = weights

    def flatten_parameters(self) -> None:
        """Some models ask for this in every forward; in eval the Parameters are not used, so they may lie anywhere."""
        if self.training or not _frames.stack:
            with self._moving():
                super().flatten_parameters()  # type: ignore[misc]

    def _weights_have_changed(self) -> bool:
        """Torch would take the decoded weights for new Parameters, and keep them."""
        refs, names = self.__dict__["_flat_weight_refs"], self.__dict__["_flat_weights_names"]
        now = [self._parameters.get(name) for name in names]
        return any(ref is not None and one is not None and ref() is not one for ref, one in zip(refs, now, strict=True))


def _detached(tensor: Tensor | None) -> Tensor | None:
    """cuDNN's flattening moves the tensors of the list; a Parameter must stay where it is."""
    return tensor.detach() if isinstance(tensor, nn.Parameter) and tensor.is_cuda else tensor


def _new_morphed(base: type[nn.Module], names: frozenset[str]) -> nn.Module:
    cls = _morphed_class(base, names)
    return cls.__new__(cls)


_classes: dict[tuple[type[nn.Module], frozenset[str]], type[nn.Module]] = {}


def _morphed_class(base: type[nn.Module], names: frozenset[str]) -> type[nn.Module]:
    """The subclass of `base` whose `names` are properties and whose eval-mode forward opens a frame."""
    if (base, names) not in _classes:
        namespace: dict[str, Any] = {name: _weight_property(name) for name in names}
        namespace |= {key: getattr(base, key) for key in ("__module__", "__qualname__", "__doc__")}
        namespace |= {"_bitplan_base": base, "_bitplan_names": names}
        if base.forward is not nn.Module.forward:
            namespace["forward"] = _framed(base.forward)
        mixin = _MorphedRNN if issubclass(base, nn.RNNBase) else _Morphed
        metaclass: Any = type(base)
        _classes[base, names] = metaclass(base.__name__, (mixin, base), namespace)
    return _classes[base, names]


def _framed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def framed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.training:
            return forward(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            return torch.compiler.disable(_run_eval)(forward, self, args, kwargs)
        return _run_eval(forward, self, args, kwargs)

    return framed


def _weight_property(name: str) -> property:
    def weight(self: nn.Module) -> Tensor | None:
        if not self.training and _frames.stack:
            return _seen_by_forward(self, name)
        if name not in self._parameters:
            raise AttributeError(name)
        return self._parameters[name]

    return property(weight)


def _slots(module: nn.Module) -> dict[str, _Slot]:
    slots: dict[str, _Slot] = module.__dict__.get(_SLOTS, {})
    return slots


def _set_slots(module: nn.Module, slots: dict[str, _Slot], *, on_path: bool) -> None:
    """Morph exactly these Parameters of a module; the class it had comes back when nothing is left to do."""
    base = module._bitplan_base if isinstance(module, _Morphed) else type(module)
    module.__dict__.pop(_SLOTS, None)
    if slots:
        module.__dict__[_SLOTS] = slots
    cls = _morphed_class(base, frozenset(slots)) if slots or on_path else base
    object.__setattr__(module, "__class__", cls)


# ---- which weight gets which format ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class MorphChoice:
    """What became of one Parameter, and why. `fmt` None: it was left alone."""

    fmt: str | None
    reason: str
    calibration: Calibration | None = None


@dataclass(frozen=True)
class MorphReport:
    """Every Parameter of the model by name, in the model's order."""

    choices: Mapping[str, MorphChoice]

    @property
    def formats(self) -> dict[str, str]:
        return {name: choice.fmt for name, choice in self.choices.items() if choice.fmt is not None}

    @property
    def left_alone(self) -> dict[str, str]:
        return {name: choice.reason for name, choice in self.choices.items() if choice.fmt is None}

    def to_dict(self) -> dict[str, Any]:
        return {name: asdict(choice) for name, choice in self.choices.items()}


@dataclass(frozen=True)
class _Place:
    """A Parameter by one of its names."""

    name: str
    module: nn.Module
    local: str
    parameter: nn.Parameter

    @property
    def key(self) -> tuple[int, str]:
        """The same for all names of one module's Parameter."""
        return id(self.module), self.local

    @property
    def owner(self) -> str:
        return self.name[: -len(self.local)].rstrip(".")

    @property
    def role(self) -> Literal["weight", "bias", "norm", "other"]:
        if "bias" in self.local:
            return "bias"
        if "norm" in type(self.module).__name__.lower():
            return "norm"
        return "weight" if isinstance(self.module, _LAYERS) and _WEIGHT.fullmatch(self.local) else "other"

    def matches(self, pattern: str) -> bool:
        """Whether a pattern names the Parameter, or a module that it lies in."""
        parts = self.name.split(".")
        return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def _places(model: nn.Module) -> list[_Place]:
    """Every Parameter under every name it has: modules used twice and tied weights appear twice."""
    return [
        _Place(f"{path}.{local}".lstrip("."), module, local, parameter)
        for path, module in model.named_modules(remove_duplicate=False)
        for local, parameter in module._parameters.items()
        if parameter is not None
    ]


def _choose(place: _Place, formats: Formats, norms: bool) -> tuple[Format | None, str]:
    """The format of one Parameter and the reason; None leaves it alone."""
    refused = "not in the mapping"
    for pattern, wanted in formats.items() if isinstance(formats, Mapping) else [(None, formats)]:
        if pattern is None or place.matches(pattern):
            if wanted is None:
                return None, f"{pattern!r}: {_NONE}"
            why_not = _why_not(place, pattern, norms)
            if not why_not:
                fmt = get_format(wanted)
                return fmt, f"{fmt.name} for all weights" if pattern is None else f"{pattern!r} in the mapping"
            refused = why_not
    slot = _slots(place.module).get(place.local)
    return (slot.fmt, _BEFORE) if slot else (None, refused)


def _why_not(place: _Place, pattern: str | None, norms: bool) -> str:
    """Biases, norms and parameters of unknown layers are morphed only where they are asked for by their own name."""
    named = pattern is not None and pattern.rpartition(".")[2] == place.local
    if not place.parameter.is_floating_point():
        return f"{place.parameter.dtype}: left alone"
    if place.role == "bias" and not named:
        return "bias: left alone"
    if place.role == "norm" and not norms and pattern not in (place.name, place.owner):
        return "norm: left alone"
    if place.role == "other" and not named:
        return f"not a weight of a known layer ({type(place.module).__name__}): left alone unless named"
    return ""


def _check_patterns(patterns: Mapping[str, Any], places: list[_Place], what: str) -> None:
    unmatched = [pattern for pattern in patterns if not any(place.matches(pattern) for place in places)]
    if unmatched:
        known = {place.name for place in places} | {place.owner for place in places}
        listed = ", ".join(f"{pattern!r}{did_you_mean(pattern, known)}" for pattern in unmatched)
        raise StoreError(f"{what} names nothing in the model: {listed}")


# ---- the public functions --------------------------------------------------------------------------------------------


def morph_model(
    model: nn.Module,
    formats: Formats,
    *,
    norms: bool = False,
    scale_rule: ScaleRule | None = None,
    pad: Literal["zero"] | None = None,
    observers: Mapping[str, ActivationObserver] | None = None,
) -> MorphReport:
    """Hold the model's weights in a format; from now on its eval-mode forwards use them.

    formats    one format for the weights of all known layers, or a mapping: the name or a glob of a parameter or of a
               module (then all in it) to a format, or to None (leave it alone). The first that matches wins; one
               that matches nothing is an error. A parameter that none matches stays as it is; tied ones count as one.
    norms      also the weights of normalization layers; biases only where a pattern ends in their own name
    observers  from `observe_model`: choose the scales of these parameters by the inputs seen, not by `scale_rule`

    Weights of modules in training mode are the FP32 Parameters, and so is what is read outside of any forward of the
    model and its modules. Under torch.compile training is compiled and evaluation is not. If a weight cannot be
    encoded, the error names it and the model is as it was.
    """
    if isinstance(model, nn.modules.linear.NonDynamicallyQuantizableLinear):
        raise StoreError("an attention's out_proj runs inside the attention: morph the MultiheadAttention that owns it")
    places, observers = _places(model), observers or {}
    _check_patterns(formats if isinstance(formats, Mapping) else {}, places, "the mapping")
    _check_patterns(observers, places, "observers")
    options = EncodeOptions(scale_rule=scale_rule, pad=pad)
    store_of = _store_finder(model)
    choices: dict[tuple[int, str], MorphChoice] = {}
    slots: dict[tuple[int, str], _Slot] = {}
    for place in places:
        if place.key in choices:  # the same module under a second name
            continue
        fmt, reason = _choose(place, formats, norms)
        if fmt is None:
            choices[place.key] = MorphChoice(None, reason)
            continue
        slots[place.key] = slot = _Slot(store_of(place), fmt)
        if reason == _BEFORE:
            choices[place.key] = MorphChoice(fmt.name, reason)
        else:
            choices[place.key] = _morph(slot, reason, observers.get(place.name), options)
    _morph_ties(places, choices, slots)
    if not slots:
        reasons = "; ".join(sorted({choice.reason for choice in choices.values()})) or "it has no parameters"
        raise StoreError(f"nothing in this {type(model).__name__} was morphed: {reasons}")
    _attach(model, slots)
    return MorphReport({place.name: choices[place.key] for place in places})


def attach_encoded(model: nn.Module, encoded: Mapping[str, Encoded]) -> None:
    """Take versions as a file holds them: each is kept to the bit, and its Parameter becomes what it stands for.

    A tied parameter may come under one of its names, or under each: the same bytes, or another format.
    """
    places = {place.name: place for place in _places(model)}
    groups: dict[int, dict[str, Encoded]] = {}
    for name, version in encoded.items():
        if name not in places:
            raise StoreError(f"the model has no parameter {name!r}{did_you_mean(name, places)}")
        parameter = places[name].parameter
        if version.shape != tuple(parameter.shape):
            raise StoreError(f"{name}: the parameter has shape {tuple(parameter.shape)}, its encoding {version.shape}")
        first = groups.setdefault(id(parameter), {}).setdefault(version.fmt.name, version)
        if first is not version and first.to_bytes() != version.to_bytes():
            raise StoreError(f"{name}: another name of this tied parameter brings other {version.fmt.name} bytes")
    store_of = _store_finder(model)
    slots = {}
    for name, place in places.items():
        versions = groups.get(id(place.parameter))
        if versions is not None:
            fmt = encoded[name].fmt if name in encoded else next(iter(versions.values())).fmt
            slots[place.key] = _Slot(store_of(place), fmt)
        elif place.local in _slots(place.module):
            slots[place.key] = _slots(place.module)[place.local]
    for place in places.values():
        if versions := groups.pop(id(place.parameter), None):
            store_of(place).adopt(*versions.values())
    _attach(model, slots)


def unmorph_model(model: nn.Module) -> None:
    """Take everything back: the classes, the versions. The Parameters keep the numbers they have."""
    _attach(model, {})


def stores_of(model: nn.Module) -> dict[str, WeightStore]:
    """The store of every morphed parameter; tied ones share theirs."""
    return {place.name: slot.store for place in _places(model) if (slot := _slots(place.module).get(place.local))}


def formats_of(model: nn.Module) -> dict[str, Format]:
    """The format of every morphed parameter."""
    return {place.name: slot.fmt for place in _places(model) if (slot := _slots(place.module).get(place.local))}


@contextmanager
def observe_model(model: nn.Module) -> Iterator[dict[str, ActivationObserver]]:
    """Watch what reaches the weights: run representative batches inside, hand the result to `morph_model`.

    Watched are the inputs of Linear, convolutions, attention's input projections and the first layer of recurrent ones;
    no one can see those of an Embedding (indices), of a transposed convolution (rows) or inside a recurrence.
    """
    observers: dict[str, ActivationObserver] = {}
    names = {place.key: place.name for place in reversed(_places(model))}

    def watch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for local, inputs, axis in _inputs_of(module, args, kwargs):
            observers.setdefault(names[id(module), local], ActivationObserver(axis)).observe(inputs)

    handles = [
        module.register_forward_pre_hook(watch, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, _LAYERS)
    ]
    try:
        yield observers
    finally:
        for handle in handles:
            handle.remove()
    if not observers:
        raise StoreError(
            "no input reached a layer that can be observed; run batches through the model inside the `with`"
        )


def _inputs_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Tensor, int]]:
    """(parameter, the inputs it meets, the axis of features) for a call of a layer."""
    first = ("query", "key", "value") if isinstance(module, nn.MultiheadAttention) else ("input",)
    named = dict(zip(first, args, strict=False)) | kwargs
    if isinstance(module, nn.MultiheadAttention):
        whole = module._qkv_same_embed_dim
        met = {
            ("in_proj_weight" if whole else f"{role[0]}_proj_weight", id(named[role])): named[role] for role in first
        }
        yield from ((local, inputs, -1) for (local, _), inputs in met.items())
        return
    inputs = named.get("input")
    inputs = inputs.data if isinstance(inputs, nn.utils.rnn.PackedSequence) else inputs
    if not isinstance(inputs, Tensor):
        return
    if isinstance(module, nn.Linear | nn.RNNCellBase):
        yield "weight" if isinstance(module, nn.Linear) else "weight_ih", inputs, -1
    elif isinstance(module, nn.RNNBase):
        yield "weight_ih_l0", inputs, -1
        if module.bidirectional:
            yield "weight_ih_l0_reverse", inputs, -1
    elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and module.kernel_size[-1] < NARROW_KERNEL:
        yield "weight", inputs, -1 - len(module.kernel_size)


def _morph(slot: _Slot, reason: str, observer: ActivationObserver | None, options: EncodeOptions) -> MorphChoice:
    if observer is None or slot.fmt.is_cast:
        slot.store.morph(slot.fmt, **options)
        return MorphChoice(slot.fmt.name, reason + ("" if observer is None else "; a cast has no scales to calibrate"))
    gain = slot.store.calibrate(slot.fmt, observer, pad=options["pad"])
    told = f"{reason}; calibrated on {gain.rows_seen} inputs, error {gain.error_before:.3g} -> {gain.error_after:.3g}"
    return MorphChoice(slot.fmt.name, told, gain)


def _morph_ties(
    places: list[_Place], choices: dict[tuple[int, str], MorphChoice], slots: dict[tuple[int, str], _Slot]
) -> None:
    """A tied weight is one weight: named under one of its names it is morphed under all, but for an explicit None."""
    morphed = {id(place.parameter): place for place in reversed(places) if place.key in slots}
    for place in places:
        twin = morphed.get(id(place.parameter))
        if twin is not None and place.key not in slots and not choices[place.key].reason.endswith(_NONE):
            slots[place.key] = _Slot(slots[twin.key].store, slots[twin.key].fmt)
            choices[place.key] = MorphChoice(slots[twin.key].fmt.name, f"tied to {twin.name}")


def _store_finder(model: nn.Module) -> Callable[[_Place], WeightStore]:
    """One store per Parameter: those the model has, and new ones."""
    stores = {id(store._master): store for store in stores_of(model).values()}

    def find(place: _Place) -> WeightStore:
        if id(place.parameter) not in stores:
            stores[id(place.parameter)] = WeightStore(place.parameter, name=place.name)
        return stores[id(place.parameter)]

    return find


def _attach(model: nn.Module, slots: Mapping[tuple[int, str], _Slot]) -> None:
    """Make these, and only these, the morphed Parameters of a model."""
    modules = dict(model.named_modules(remove_duplicate=False))
    owners = {owner for owner, _ in slots}
    on_path = {
        id(modules[".".join(parts[:end])])
        for path, module in modules.items()
        if id(module) in owners
        for parts in [path.split(".")]
        for end in range(len(parts))
    }
    for module in model.modules():
        mine = {local: slots[id(module), local] for local in module._parameters if (id(module), local) in slots}
        _set_slots(module, mine, on_path=id(module) in on_path)
        for handle, hook in list(module._forward_pre_hooks.items()):
            if hook is _no_shortcut:
                del module._forward_pre_hooks[handle]
    if slots and not isinstance(model, nn.TransformerEncoderLayer):
        model.register_forward_pre_hook(_no_shortcut)


def _no_shortcut(*_: object) -> None:
    """Does nothing; a TransformerEncoderLayer around the morphed module sees a hook, and calls its parts one by one."""


# ---- comparison ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agreement:
    """How close two tensors, or all tensors of two models, are; `a` is the reference."""

    count: int
    cosine: float
    sqnr_db: float
    relative_error: float
    max_error: float
    format_a: str | None = None
    format_b: str | None = None

    @classmethod
    def of(cls, sums: Similarity, count: int, *formats: str | None) -> Self:
        return cls(count, sums.cosine, sums.sqnr_db, sums.relative_error, sums.max_error, *formats)

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity: the SQNR of equal tensors is null."""
        values = asdict(self)
        return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}


@dataclass(frozen=True)
class ModelComparison:
    layers: Mapping[str, Agreement]
    overall: Agreement

    def to_dict(self) -> dict[str, Any]:
        layers = {name: layer.to_dict() for name, layer in self.layers.items()}
        return {"overall": self.overall.to_dict(), "layers": layers}


def compare_models(a: Weights, b: Weights) -> ModelComparison:
    """Compare the weights that inference sees: the decoded version where there is one, else the parameter.

    Models, or mappings of names to tensors and encodings such as a state_dict. Tied parameters count once.
    """
    ours, theirs = _effective(a), _effective(b)
    missing = [f"{name!r} only in a" for name in ours.counted if name not in theirs.known]
    missing += [f"{name!r} only in b" for name in theirs.counted if name not in ours.known]
    counted = _counted(ours, theirs)
    missing += [
        f"{name!r} is {ours.weights[name].shape} in a, {theirs.weights[name].shape} in b"
        for name in counted
        if ours.weights[name].shape != theirs.weights[name].shape
    ]
    if missing:
        raise StoreError(f"the two cannot be compared: {', '.join(missing)}")
    layers, total = {}, Similarity()
    for name in counted:
        one, two = ours.weights[name], theirs.weights[name]
        first = one.numbers()
        sums = similarity(first, two.numbers().to(first.device))
        layers[name] = Agreement.of(sums, first.numel(), one.fmt, two.fmt)
        total += sums
    return ModelComparison(layers, Agreement.of(total, sum(layer.count for layer in layers.values())))


@dataclass(frozen=True)
class _Weight:
    shape: tuple[int, ...]
    fmt: str | None
    numbers: Callable[[], Tensor]


@dataclass(frozen=True)
class _Effective:
    """The weights of one side by all their names; `counted` leaves out second names of the same numbers."""

    weights: Mapping[str, _Weight]
    counted: frozenset[str]
    buffers: frozenset[str]
    is_model: bool

    @property
    def known(self) -> frozenset[str]:
        return self.buffers | self.weights.keys()


def _counted(ours: _Effective, theirs: _Effective) -> list[str]:
    """What both have, each parameter once; only a model can tell which names are the same parameter."""
    sides = [side.counted for side in (ours, theirs) if side.is_model] or [ours.counted]
    return [name for name in ours.weights if name in theirs.weights and any(name in side for side in sides)]


def _effective(model: Weights) -> _Effective:
    if not isinstance(model, nn.Module):
        given = {name: _weight(value) for name, value in model.items()}
        return _Effective(given, frozenset(given), frozenset(), is_model=False)
    weights: dict[str, _Weight] = {}
    first_names: dict[tuple[int, str | None], str] = {}
    for place in _places(model):
        slot, weight = _slots(place.module).get(place.local), _weight(place.parameter)
        if slot is not None:
            weight = _Weight(weight.shape, slot.fmt.name, functools.partial(slot.store.simulate, slot.fmt))
        weights[place.name] = weight
        first_names.setdefault((id(place.parameter), weight.fmt), place.name)
    buffers = frozenset(name for name, _ in model.named_buffers(remove_duplicate=False))
    return _Effective(weights, frozenset(first_names.values()), buffers, is_model=True)


def _weight(value: Tensor | Encoded) -> _Weight:
    if isinstance(value, Encoded):
        return _Weight(value.shape, value.fmt.name, functools.partial(decode, value))
    return _Weight(tuple(value.shape), None, value.detach)
