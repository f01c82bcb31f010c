"""WeightStore: one weight, its master, and the versions derived from it.

The master (FP32) is the truth and the only thing that is ever trained. A version is the master in a format, made at
first use and at most once per state of the master; a device version is a copy of it on a device. Any change of the
master drops them all, so a stale version is never returned. Versions are never written to, and each owns its scales.

How a change is detected: torch counts in-place writes (`_version`; steps of fused optimizers are counted by
`weight_changes`), but not those through `.data`. So the state of a master is: changes made through the store, torch's
count, where the numbers lie, and on a CPU the bits of 256 of them. Not detected are writes through `.data` on a GPU or
to a few numbers only, and optimizer steps replayed by a CUDA graph: call `invalidate()` after those.

A Parameter that is put into a module in the place of the master (`load_state_dict(assign=True)`, `layer.weight = ...`)
becomes the master: torch calls a hook for every such assignment. Not seen is one behind torch's back, into
`module._parameters` (`.to()` under `torch.__future__.set_overwrite_module_params_on_conversion`): call `follow()`.

Threads: the lock is held for lookups and for writing the master, never while encoding. A version whose
master changed while it was being made is not published.

A store remembers how a weight was encoded, from one version to the next, and with an `ActivationObserver` how much each
column of it matters, by the inputs of its layer.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NoReturn, Self, TypedDict, Unpack, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from bitplan.base.errors import NonFiniteError, StoreError
from bitplan.base.weight_changes import count_optimizer_steps, state_of
from bitplan.formats import Encoded, get_format
from bitplan.formats.dispatch import decode, encode
from bitplan.formats.format import NARROW_KERNEL, Format
from bitplan.formats.scale_rules import ScaleRule

# ---- column importance -----------------------------------------------------------------------------------------------


class ActivationObserver:
    """The mean square of every input feature, over all inputs so far.

    It can be a forward hook or pre-hook: `linear.register_forward_hook(observer)`. `axis` is the axis of features: the
    last for a Linear, -3 for a Conv2d.
    """

    def __init__(self, axis: int = -1) -> None:
        self.axis = axis
        self.count = 0
        self._total: Tensor | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: object = None) -> None:
        self.observe(args[0])

    def observe(self, inputs: Tensor) -> None:
        features = inputs.detach().movedim(self.axis, -1)
        total = features.reshape(-1, features.shape[-1]).float().square().sum(dim=0, dtype=torch.float64)
        if self._total is not None and self._total.shape != total.shape:
            raise StoreError(
                f"observer: inputs had {self._total.numel()} features before, and {total.numel()} now; "
                "use one for each layer"
            )
        self._total = total if self._total is None else self._total + total.to(self._total.device)
        self.count += inputs.numel() // max(1, features.shape[-1])

    @property
    def mean_square(self) -> Tensor:
        """Give the mean square of each feature, in float32."""
        if self._total is None or not self.count:
            raise StoreError("observer: it has seen no input; run representative batches through the model first")
        mean = (self._total / self.count).float()
        if not bool(mean.isfinite().all()):
            raise NonFiniteError("observer: the inputs it saw hold NaN or infinity; find the layer they come from")
        return mean


def observe_inputs(inputs: Tensor | Iterable[Tensor] | ActivationObserver) -> ActivationObserver:
    if isinstance(inputs, ActivationObserver):
        return inputs
    observer = ActivationObserver()
    for batch in [inputs] if isinstance(inputs, Tensor) else inputs:
        observer.observe(batch)
    return observer


def weighted_error(master: Tensor, decoded: Tensor, importance: Tensor) -> float:
    """The output's relative error for uncorrelated inputs: squares are weighted with the importance of their column."""
    weights = importance.to(master.device, torch.float64)
    error, signal = (
        float((part.reshape(-1, weights.numel()).square().sum(dim=0, dtype=torch.float64) * weights).sum())
        for part in (master.float() - decoded, master.float())
    )
    return (error / signal) ** 0.5 if signal else 0.0


# ---- encode options --------------------------------------------------------------------------------------------------


class EncodeOptions(TypedDict, total=False):
    """The options of `encode` that a store remembers for a format."""

    scale_rule: ScaleRule | None
    percentile: float
    importance: Tensor | None
    scale: float | Tensor | None
    zero_point: int | None
    base: float | None
    pad: Literal["zero"] | None
    nonfinite: Literal["error", "replace"]


def merge_options(recipe: EncodeOptions, options: EncodeOptions) -> EncodeOptions:
    """Given options (not None) replace remembered ones; a new rule drops remembered options that it would not use."""
    stated = {key: value for key, value in options.items() if value is not None}
    merged: dict[str, object] = dict(recipe)
    if "scale_rule" in stated:
        merged.pop("scale", None)
        if stated["scale_rule"] != "mse":
            merged.pop("importance", None)
    return cast(EncodeOptions, merged | stated)


def same_options(one: EncodeOptions, two: EncodeOptions) -> bool:
    def equal(key: str) -> bool:
        first, right = one.get(key), two.get(key)
        if isinstance(first, Tensor) and isinstance(right, Tensor):
            return first is right or (first.shape == right.shape and torch.equal(first, right.to(first.device)))
        return not isinstance(first, Tensor) and not isinstance(right, Tensor) and first == right

    # `pad` decides whether a version can exist, not its numbers.
    return all(equal(key) for key in (one.keys() | two.keys()) - {"pad"})


# ---- weight store ----------------------------------------------------------------------------------------------------


SAMPLES = 256
State = tuple[object, ...]


@dataclass(frozen=True)
class CalibrationGain:
    """The gain of calibration: the relative error of the layer's output before (default scale rule) and after."""

    fmt: str
    rows_seen: int
    error_before: float
    error_after: float


class WeightStore:
    """A master and its versions. A Parameter, or any float32 tensor, is shared and followed, not copied.

    A tensor of another float type is copied to float32. A Parameter of another type is followed as it is: its optimizer
    must hold a float32 master, if one is needed.
    """

    _master: Tensor | None
    _seen: State  # the state of the master that the versions belong to

    def __init__(self, master: Tensor, *, name: str = "weight") -> None:
        if nn.parameter.is_lazy(master) or master.is_meta or not master.is_floating_point():
            kind = "uninitialized" if nn.parameter.is_lazy(master) else f"{master.dtype} on {master.device}"
            raise StoreError(f"{name}: a store needs a float tensor with numbers in it, got {kind}")
        self._set_up(name, tuple(master.shape))
        shared = isinstance(master, nn.Parameter) or master.dtype == torch.float32
        self._set_master(master if shared else master.detach().float())
        self._seen = self._state()
        count_optimizer_steps()

    @classmethod
    def from_encoded(cls, encoded: Encoded, *, name: str = "weight") -> Self:
        """A store from a file: one version and no master yet; `unpack` makes the master."""
        store = cls.__new__(cls)
        store._set_up(name, encoded.shape)
        store._versions[encoded.fmt.name] = encoded
        return store

    def _set_up(self, name: str, shape: tuple[int, ...]) -> None:
        self.name = name
        self.shape = shape
        self._master = None
        self._refusal = ""  # why the master is no longer the module's weight
        self._generation = 0
        self._seen = (0,)
        self._versions: dict[str, Encoded] = {}
        self._device_versions: dict[tuple[torch.device, str], Encoded] = {}
        self._recipes: dict[str, EncodeOptions] = {}
        self._lock = threading.RLock()  # lookups, and writes of the master
        self._update_lock = threading.RLock()  # one update at a time
        self._encode_locks: dict[str, threading.Lock] = {}  # one encoder per format

    def __repr__(self) -> str:
        master = "master" if self.has_master else "no master"
        return f"WeightStore({self.name!r}, shape={self.shape}, {master}, versions={sorted(self.versions)})"

    # ---- reading -----------------------------------------------------------------------------------------------------

    @property
    def master(self) -> Tensor:
        """The master as float32; shares memory if it is float32."""
        return self._need_master("read").detach().float()

    @property
    def has_master(self) -> bool:
        return self._master is not None

    @property
    def versions(self) -> Mapping[str, Encoded]:
        """The encoded versions that match the master now, by name of their format."""
        with self._lock:
            self._refresh()
            return MappingProxyType(dict(self._versions))

    def active(self, fmt: Format | str) -> Encoded | None:
        """The version in this format if it exists and the master has not changed since."""
        return self.versions.get(get_format(fmt).name)

    def recipe(self, fmt: Format | str) -> EncodeOptions:
        """The options that versions in this format are made with."""
        with self._lock:
            return copy.copy(self._recipes.get(get_format(fmt).name, {}))

    def follows(self, tensor: Tensor) -> bool:
        """Whether this very tensor is the master."""
        return self._master is tensor

    # ---- versions ----------------------------------------------------------------------------------------------------

    def morph(self, fmt: Format | str, **options: Unpack[EncodeOptions]) -> Encoded:
        """The version in this format, encoded if need be.

        Options are those of `encode`. They are remembered: a later morph, for example after an update, uses them again.
        Other options make the version anew.
        """
        return self._morph(get_format(fmt), options, force=False)

    def force_morph(self, fmt: Format | str, **options: Unpack[EncodeOptions]) -> Encoded:
        """Encode again even where a valid version exists."""
        return self._morph(get_format(fmt), options, force=True)

    def simulate(self, fmt: Format | str, **options: Unpack[EncodeOptions]) -> Tensor:
        """Quantize and dequantize: the float32 numbers that inference in this format uses."""
        return decode(self.morph(fmt, **options))

    def to_device(self, device: torch.device | str, fmt: Format | str) -> Encoded:
        """The version on a device, with its scales; kept until the master changes."""
        target = torch.empty(0, device=device).device  # "cuda" becomes the current one, cuda:0
        version = self.morph(fmt)
        if version.device == target:
            return version
        key = (target, version.fmt.name)
        with self._lock:
            self._refresh()
            if key in self._device_versions and self._versions.get(key[1]) is version:
                return self._device_versions[key]
        moved = version.to(target)
        with self._lock:
            self._refresh()
            if self._versions.get(key[1]) is version:
                return self._device_versions.setdefault(key, moved)
        return moved

    def drop(self, fmt: Format | str) -> None:
        """Free the version in this format, and its device copies."""
        name = get_format(fmt).name
        with self._lock:
            if self._master is None and self._versions.keys() == {name}:
                raise StoreError(
                    f"{self.name}: {name} is all that is left, for the master was released; unpack it first"
                )
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._versions.pop(name, None)
        for key in [key for key in self._device_versions if key[1] == name]:
            del self._device_versions[key]

    def _morph(self, fmt: Format, options: EncodeOptions, *, force: bool) -> Encoded:
        with self._lock:
            recipe = merge_options(self._recipes.get(fmt.name, {}), options)
            existing = None if force else self._find(fmt, recipe)
            turn = self._encode_locks.setdefault(fmt.name, threading.Lock())
        if existing is not None:
            return existing
        with turn:
            return self._make(fmt, recipe, force=force)

    def _find(self, fmt: Format, recipe: EncodeOptions) -> Encoded | None:
        self._refresh()
        made_with = self._recipes.get(fmt.name, {})
        return self._versions.get(fmt.name) if same_options(made_with, recipe) else None

    def _make(self, fmt: Format, recipe: EncodeOptions, *, force: bool) -> Encoded:
        """Encode from the master itself, or from a copy if the master changes meanwhile."""
        for from_copy in (False, True):
            with self._lock:
                existing = None if force else self._find(fmt, recipe)
                if existing is not None:
                    return existing
                state, master = self._refresh(), self._need_master(f"morph to {fmt.name}").detach()
                master = master.clone() if from_copy else master
            encoded = self._encode(master, fmt, recipe)
            with self._lock:
                if self._refresh() == state:
                    self._forget(fmt.name)
                    self._versions[fmt.name] = encoded
                    self._recipes[fmt.name] = recipe
                    return encoded
        return encoded  # of the master during this call; it has changed since, so the version is not kept

    def _encode(self, master: Tensor, fmt: Format, recipe: EncodeOptions) -> Encoded:
        with _plain_tensors():
            wide = master if master.dtype in (torch.float32, torch.float64) else master.float()
            return encode(wide, fmt, **recipe, name=self.name)

    # ---- changing the master -----------------------------------------------------------------------------------------

    def apply_gradients(self, gradient: Tensor, lr: float) -> None:
        """Subtract lr * gradient from the master; every version is dropped."""
        self._check_shape("gradient", gradient)
        with self._update_lock, self._lock, torch.no_grad():
            master = self._need_master("apply gradients")
            try:
                master.sub_(gradient.to(master), alpha=lr)
            finally:
                self.invalidate()

    def update(self, new: Tensor | Callable[[Tensor], Tensor | None]) -> None:
        """Replace the master's numbers; every version is dropped.

        A function gets a copy of the master and returns new numbers, or changes the copy and returns None; if it
        raises, nothing has happened.
        """
        with self._update_lock:
            if not isinstance(new, Tensor):
                mine = self._need_master("update by a function").detach().clone()
                new = mine if (result := new(mine)) is None else result
            self._check_shape("update", new)
            with self._lock:
                self._write(new)
                self.invalidate()

    def invalidate(self) -> None:
        """Drop every version: the master was changed in a way that cannot be seen."""
        with self._lock:
            if self._master is None:
                raise StoreError(
                    f"{self.name}: the master was released, so the versions cannot be made again; "
                    "`unpack` makes a master of one"
                )
            self._generation += 1
            self._refresh()

    def follow(self, master: Tensor) -> None:
        """Take another tensor for the master, and drop every version; a module's new Parameter is followed anyway."""
        if tuple(master.shape) != self.shape:
            raise StoreError(f"{self.name}: a store of shape {self.shape} cannot follow {tuple(master.shape)}")
        with self._update_lock, self._lock:
            self._set_master(WeightStore(master, name=self.name)._need_master("follow"))
            self._generation += 1
            self._refresh()

    def _set_master(self, master: Tensor) -> None:
        self._master, self._refusal = master, ""
        if isinstance(master, nn.Parameter):
            _watch_modules()
            _followers.setdefault(master, WeakSet()).add(self)

    def _replaced_by(self, parameter: nn.Parameter) -> None:
        """Follow another Parameter, which the module has now; refused later if it cannot be the master."""
        try:
            self.follow(parameter)
        except StoreError as error:
            self._refusal = f"its Parameter was replaced in the module: {error}; make a store of the new one"

    def unpack(self, fmt: Format | str) -> Tensor:
        """Set the master to the decoded version in this format; that version stays, all others are dropped."""
        name = get_format(fmt).name
        while True:
            version = self.versions.get(name)
            if version is None:
                self._refuse(f"unpack {name}: there is no such version")
            with _plain_tensors():
                numbers = decode(version)
            with self._update_lock, self._lock:
                self._refresh()
                if self._versions.get(name) is version:
                    return self._adopt(numbers, {name: version})

    def adopt(self, version: Encoded, *others: Encoded) -> Tensor:
        """Take versions from elsewhere, such as a file; the master becomes the decoded numbers of the largest."""
        versions = (version, *others)
        for version in versions:
            if version.shape != self.shape:
                raise StoreError(f"{self.name}: the shape is {self.shape}, and that of the version {version.shape}")
        with _plain_tensors():
            numbers = decode(max(versions, key=lambda version: version.nbytes))
        with self._update_lock, self._lock:
            device = numbers.device if self._master is None else self._master.device
            return self._adopt(numbers, {version.fmt.name: version.to(device) for version in versions})

    def release_master(self) -> None:
        """Free the master's memory; versions remain usable, and `unpack` makes a master again."""
        with self._lock:
            self._refresh()
            if isinstance(self._master, nn.Parameter):
                raise StoreError(f"{self.name}: the master is a Parameter that a module holds; a store cannot free it")
            if not self._versions:
                raise StoreError(f"{self.name}: there is no version yet, so nothing would be left; morph first")
            self._master = None
            self._seen = self._state()

    def _adopt(self, numbers: Tensor, versions: dict[str, Encoded]) -> Tensor:
        self._write(numbers)
        self.invalidate()
        self._versions.update(versions)
        return self.master

    def _write(self, numbers: Tensor) -> None:
        if self._master is None:
            with _plain_tensors():
                self._master = numbers.detach().to(torch.float32, copy=True)
            count_optimizer_steps()
        else:
            with torch.no_grad():
                self._master.copy_(numbers)

    # ---- calibration -------------------------------------------------------------------------------------------------

    def calibrate(
        self,
        fmt: Format | str,
        inputs: Tensor | Iterable[Tensor] | ActivationObserver,
        **options: Unpack[EncodeOptions],
    ) -> CalibrationGain:
        """Choose this format's scales by the error of the layer's output on representative inputs, and morph.

        inputs  activations [*, in_features], several of them, or an observer. For a convolution one feature per
                channel. Later morphs use them again on the then current weights.
        """
        fmt = get_format(fmt)
        if fmt.is_cast:
            raise StoreError(f"{self.name}: {fmt.name} is a plain cast, with no scales to calibrate; morph it as it is")
        observer = observe_inputs(inputs)
        importance = self._importance_of(observer.mean_square)
        plain = merge_options(merge_options(self.recipe(fmt), options), {"scale_rule": fmt.default_rule})
        master = self._need_master("calibrate").detach().clone()
        before = self._encode(master, fmt, plain)
        after = self.morph(fmt, **merge_options(options, {"scale_rule": "mse", "importance": importance}))
        errors = (weighted_error(master, decode(version), importance) for version in (before, after))
        return CalibrationGain(fmt.name, observer.count, *errors)

    def _importance_of(self, mean_square: Tensor) -> Tensor:
        """Mean squares per input feature -> one weight per column of this weight."""
        count, shape = mean_square.numel(), self.shape
        if len(shape) > 2 and shape[-1] < NARROW_KERNEL:  # a convolution: features are channels, groups share columns
            if count % shape[1] == 0:
                per_channel = mean_square.reshape(-1, shape[1]).mean(dim=0)
                return per_channel.repeat_interleave(torch.Size(shape[2:]).numel())
        elif shape and count == shape[-1]:
            return mean_square
        expected = f"a multiple of {shape[1]}" if len(shape) > 2 else f"{shape[-1] if shape else 1}"
        raise StoreError(
            f"{self.name}: the activations have {count} features, a weight of shape {shape} takes {expected}"
        )

    # ---- state -------------------------------------------------------------------------------------------------------

    def _state(self) -> State:
        self._require_followed()
        master = self._master
        if master is None:
            return (self._generation,)
        return (self._generation, *state_of(master), master.dtype, master.device, _sample(master))

    def _refresh(self) -> State:
        """Drop stale versions; returns the present state of the master. Call it under the lock."""
        state = self._state()
        if state != self._seen:
            self._versions.clear()
            self._device_versions.clear()
            self._seen = state
        return state

    def _moved(self, before: Tensor, versions: Mapping[str, Encoded], master: Tensor) -> None:
        """Keep versions of a moved or cast Parameter if the numbers are the same, and move them too."""
        same = bool(versions) and not master.is_meta and torch.equal(before.to(master), master)
        with self._lock:
            self._set_master(master)
            self._refresh()
            if same:
                self._versions.update({name: version.to(master.device) for name, version in versions.items()})

    def _for(self, parameter: nn.Parameter) -> WeightStore:
        """A store for the Parameter that replaced this one: with the same recipes, without versions."""
        twin = WeightStore(parameter, name=self.name)
        with self._lock:
            twin._recipes.update(self._recipes)
        return twin

    def _require_followed(self) -> None:
        if self._refusal:
            raise StoreError(f"{self.name}: {self._refusal}")

    def _need_master(self, action: str) -> Tensor:
        self._require_followed()
        master = self._master
        if master is None:
            self._refuse(f"cannot {action}: there is no master")
        return master

    def _refuse(self, problem: str) -> NoReturn:
        names = ", ".join(sorted(self.versions)) or "none"
        step = "unpack one of them to make a master" if self._master is None else "morph first"
        raise StoreError(f"{self.name}: {problem} (versions: {names}); {step}")

    def _check_shape(self, label: str, tensor: Tensor) -> None:
        if tuple(tensor.shape) != self.shape:
            raise StoreError(f"{self.name}: the {label} has shape {tuple(tensor.shape)}, the weight {self.shape}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """The copy has its own master (that of the copied module) and shares the versions, which nobody writes to."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        with self._lock:
            self._refresh()
            twin._set_up(self.name, self.shape)
            if self._master is not None:
                twin._set_master(copy.deepcopy(self._master, memo))
            twin._versions.update(self._versions)
            twin._recipes.update(self._recipes)
            twin._seen = twin._state()
        return twin

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise StoreError(
            f"{self.name}: a morphed weight is not pickled; save the model with bitplan, save its state_dict, "
            "or undo it first: morph_model(model, None)"
        )


# ---- a master that a module replaces ---------------------------------------------------------------------------------


_followers: WeakIdKeyDictionary = WeakIdKeyDictionary()  # a Parameter -> the stores whose master it is
_watching = threading.Lock()
_hook: object = None


def _watch_modules() -> None:
    """Tell stores from now on which Parameter a module got instead of their master."""
    global _hook
    with _watching:
        _hook = _hook or register_module_parameter_registration_hook(_on_registration)


def _on_registration(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    before = module._parameters.get(name)
    if before is not None and before is not parameter and before in _followers:
        for store in list(_followers[before]):
            if store.follows(before):
                store._replaced_by(parameter)


# ---- reading a master's state ----------------------------------------------------------------------------------------


def _sample(master: Tensor) -> bytes:
    """The bits of some numbers, evenly spread over the tensor's memory; on a GPU reading them would mean waiting."""
    if master.device.type != "cpu" or not master.numel():
        return b""
    span = 1 + sum((size - 1) * stride for size, stride in zip(master.shape, master.stride(), strict=True))
    step = -(-span // SAMPLES)
    some = master.detach().as_strided((-(-span // step),), (step,), master.storage_offset())
    return some.contiguous().view(torch.uint8).numpy().tobytes()


@contextmanager
def _plain_tensors() -> Iterator[None]:
    """A context in which tensors are made that may outlive the call: no autograd, no inference tensors."""
    with torch.inference_mode(False), torch.no_grad():
        yield
