"""Gives an eval-mode forward the decoded version of a weight in place of the Parameter.

The class of each module with morphed weights becomes a subclass of itself in which `weight` is a property. While a
forward of an eval-mode module runs on a thread, the property gives the decoded version on that thread, and the
Parameter everywhere else. The decoded tensor lives no longer than the forward that asked for it. So nothing has to be
restored after an exception, threads do not disturb each other, and code that reads weights without calling the layer
that owns them (attention's output projection, torch's fused encoder layer, logits from an embedding) gets quantized
weights too. Modules on the way from the model to such a layer get the subclass for their `forward` alone.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from bitplan.files.models.weight_store import WeightStore
from bitplan.formats.dispatch import decode
from bitplan.formats.format import Format

_SLOTS = "_bitplan_slots"


@dataclass
class MorphedParameter:
    """Where a packed version of a Parameter is kept, and the format that eval-mode forwards use."""

    store: WeightStore
    fmt: Format

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(copy.deepcopy(self.store, memo), self.fmt)


class _Frame:
    """One forward of a module in eval mode while it runs, and the weights that were decoded for it."""

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
    weight: Tensor | None = frame.weights.get((id(module), name))
    if weight is None:
        slot, parameter = slots_of(module)[name], module._parameters[name]
        if not isinstance(parameter, nn.Parameter):
            return parameter  # a tensor of torch.func.functional_call, which the caller wants to use
        # A Parameter that is here for this call only is quantized as well, and its version is not kept.
        store = slot.store if slot.store.follows(parameter) else slot.store._for(parameter)
        weight = decode(store.morph(slot.fmt), parameter.dtype)
        if frame.keeps(module):
            frame.weights[id(module), name] = weight
    return weight


class Morphed(nn.Module):
    """Methods that the class of a morphed module has beside those of its original class."""

    _bitplan_base: type[nn.Module]
    _bitplan_names: frozenset[str]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Morph a new Parameter in the place of a morphed one, as after `load_state_dict(assign=True)`."""
        super().register_parameter(name, param)
        slot = slots_of(self).get(name)
        if slot is not None and param is not None and not slot.store.follows(param):
            slot.store = slot.store._for(param)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Called by torch's `.to`, `.half` and `.cuda`: moves or casts Parameters and their packed versions."""
        with self._moving():
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """A context in which Parameters change device or type; packed versions follow, with the same bytes."""
        before = [
            (name, slot, parameter, parameter.detach(), slot.store.versions)
            for name, slot in slots_of(self).items()
            if (parameter := self._parameters.get(name)) is not None
        ]
        yield
        for name, slot, parameter, numbers, versions in before:
            now = self._parameters[name]
            assert isinstance(now, nn.Parameter)
            if now is not parameter:
                slot.store = slot.store._for(now)
            slot.store._moved(numbers, versions, now)

    def __reduce_ex__(self, protocol: Any) -> Any:  # for deepcopy; the stores refuse to be pickled
        _, _, *state = cast(tuple[Any, ...], super().__reduce_ex__(protocol))
        return _new_morphed, (self._bitplan_base, self._bitplan_names), *state


class MorphedRNN(Morphed):
    """A morphed recurrent layer, which gives torch a list of all its weights: the list is made anew for each call."""

    @property
    def _flat_weights(self) -> list[Tensor | None]:
        if self.training or not _frames.stack:
            flat_weights: list[Tensor | None] = self.__dict__["_flat_weights"]
            return flat_weights
        frame = _frames.stack[-1]
        key = (id(self), "_flat_weights")
        if frame.module is not self or key not in frame.weights:
            flat = [_detached(getattr(self, name, None)) for name in self.__dict__["_flat_weights_names"]]
            if frame.module is not self:
                return flat
            frame.weights[key] = flat
            nn.RNNBase.flatten_parameters(self)  # type: ignore[arg-type]  # cuDNN wants one piece of memory
        weights: list[Tensor | None] = frame.weights[key]
        return weights

    @_flat_weights.setter
    def _flat_weights(self, weights: list[Tensor | None]) -> None:
        self.__dict__["_flat_weights"] = weights

    def flatten_parameters(self) -> None:
        """Do nothing in eval mode, where the Parameters are not used; some models call this in every forward."""
        if self.training or not _frames.stack:
            with self._moving():
                super().flatten_parameters()  # type: ignore[misc]

    def _weights_have_changed(self) -> bool:
        """False in eval mode: torch would take the decoded weights for new Parameters, and keep them."""
        refs, names = self.__dict__["_flat_weight_refs"], self.__dict__["_flat_weights_names"]
        now = [self._parameters.get(name) for name in names]
        return any(ref is not None and one is not None and ref() is not one for ref, one in zip(refs, now, strict=True))


def _detached(tensor: Tensor | None) -> Tensor | None:
    """The tensor, detached: cuDNN's flattening moves the tensors of the list, and a Parameter must stay where it is."""
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
        mixin = MorphedRNN if issubclass(base, nn.RNNBase) else Morphed
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


def slots_of(module: nn.Module) -> dict[str, MorphedParameter]:
    slots: dict[str, MorphedParameter] = module.__dict__.get(_SLOTS, {})
    return slots


def set_slots(module: nn.Module, slots: dict[str, MorphedParameter], *, on_path: bool) -> None:
    """Morph exactly these Parameters of a module; with none left, the module gets its original class back."""
    base = module._bitplan_base if isinstance(module, Morphed) else type(module)
    module.__dict__.pop(_SLOTS, None)
    if slots:
        module.__dict__[_SLOTS] = slots
    cls = _morphed_class(base, frozenset(slots)) if slots or on_path else base
    object.__setattr__(module, "__class__", cls)
