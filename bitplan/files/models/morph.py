"""Whole models: every weight of a torch module in a format.

`morph_model` gives each chosen Parameter a WeightStore, and eval-mode forwards use the decoded version instead of the
Parameter (`decoded_in_eval`). The Parameters themselves, `state_dict()`, optimizers and training are untouched:
quantization happens after training, not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import Tensor, nn

from bitplan.base.errors import StoreError, did_you_mean
from bitplan.files.models.decoded_in_eval import MorphedParameter, set_slots, slots_of
from bitplan.files.models.weight_store import ActivationObserver, CalibrationGain, EncodeOptions, WeightStore
from bitplan.formats import Encoded, get_format
from bitplan.formats.encoded import EncodedModule
from bitplan.formats.format import NARROW_KERNEL, Format
from bitplan.formats.scale_rules import ScaleRule
from bitplan.plan.format_choices import Wanted, choose_formats
from bitplan.plan.names import ShellPatterns
from bitplan.plan.plan import Choice, Plan, Planned
from bitplan.plan.structure.parameters import LAYERS, NamedParameter, named_parameters_of

# ---- which weight gets which format ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class MorphChoice:
    """The format of one Parameter, and why. `fmt` None: it was left alone."""

    fmt: str | None
    reason: str
    calibration: CalibrationGain | None = None


@dataclass(frozen=True)
class MorphReport:
    """What `morph_model` did with every Parameter, by name, in the model's order."""

    choices: Mapping[str, MorphChoice]

    @property
    def formats(self) -> dict[str, str]:
        return {name: choice.fmt for name, choice in self.choices.items() if choice.fmt is not None}

    @property
    def left_alone(self) -> dict[str, str]:
        return {name: choice.reason for name, choice in self.choices.items() if choice.fmt is None}

    def to_dict(self) -> dict[str, Any]:
        return {name: asdict(choice) for name, choice in self.choices.items()}


def encoded_modules_of(model: nn.Module) -> dict[str, EncodedModule]:
    """Every EncodedModule under every name it has."""
    modules = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in modules if isinstance(module, EncodedModule)}


def _plan(parameters: list[NamedParameter], formats: Wanted, norms: bool) -> tuple[Plan, dict[str, Planned]]:
    """The plan, and the entries of parameters that were morphed before; those that a mapping does not name keep theirs.

    A single format is for all weights.
    """
    before = {
        named.name: Planned(Choice(slot.fmt.name, "morphed before", cause="held"))
        for named in parameters
        if (slot := slots_of(named.module).get(named.local))
    }
    if isinstance(formats, Plan):  # a plan may have only one of the names of a tied parameter
        named = {id(one.parameter) for one in parameters if one.name in formats}
        parameters = [one for one in parameters if one.name in formats or id(one.parameter) not in named]
    tensors = {one.name: one.spec(norms) for one in parameters}
    rules = {"*": formats} if isinstance(formats, Format | str) else formats
    plan = choose_formats(tensors, rules, base=Plan(before), where="morph_model")
    plan.require_whole("morph_model")
    return plan, before


# ---- the public functions --------------------------------------------------------------------------------------------


def morph_model(
    model: nn.Module,
    formats: Wanted | None,
    *,
    norms: bool = False,
    scale_rule: ScaleRule | None = None,
    pad: Literal["zero"] | None = None,
    observers: Mapping[str, ActivationObserver] | None = None,
) -> MorphReport:
    """Quantize the model's weights to a format; from now on its eval-mode forwards use them.

    formats    one format for the weights of all known layers, or what `choose_formats` takes: a plan, a manifest, or a
               mapping of names or shell patterns, of parameters or of modules (then all in them), to a format or to
               None (leave it alone). The first pattern that matches wins; a pattern that matches nothing is an error. A
               parameter that no pattern matches stays as it is; tied ones count as one. None undoes everything
    norms      also the weights of normalization layers; biases only where a pattern ends in their own name
    observers  from `observe_model`: choose the scales of these parameters by their inputs, not by `scale_rule`

    Modules in training mode use the FP32 Parameters, and so does code outside of any forward of the model and its
    modules. Under torch.compile training is compiled and evaluation is not. If a weight cannot be encoded, the error
    names it and the model is as it was.
    """
    if formats is None:
        unmorph_model(model)
        return MorphReport({})
    if isinstance(model, nn.modules.linear.NonDynamicallyQuantizableLinear):
        raise StoreError("an attention's out_proj runs inside the attention: morph the MultiheadAttention that owns it")
    parameters, observers = named_parameters_of(model), observers or {}
    plan, before = _plan(parameters, formats, norms)
    ShellPatterns(observers).check([one.name for one in parameters], "observers")
    options = EncodeOptions(scale_rule=scale_rule, pad=pad or plan.pad)
    store_of = _store_finder(model)
    choices: dict[tuple[int, str], MorphChoice] = {}
    slots: dict[tuple[int, str], MorphedParameter] = {}
    for named in sorted(parameters, key=lambda one: one.name not in plan):
        if named.key in choices:  # the same module under a second name
            continue
        if named.name not in plan:
            choices[named.key] = MorphChoice(None, "not in the plan")
            continue
        entry = plan.entries[named.name]
        fmt, reason = get_format(entry.choice.format), entry.choice.reason
        if entry.stored is not None:
            choices[named.key] = MorphChoice(None, reason)
            continue
        slots[named.key] = slot = MorphedParameter(store_of(named), fmt)
        if entry is before.get(named.name):
            choices[named.key] = MorphChoice(fmt.name, reason)
        else:
            choices[named.key] = _morph(slot, reason, observers.get(named.name), options)
    _morph_ties(parameters, plan, choices, slots)
    if not slots:
        reasons = "; ".join(sorted({choice.reason for choice in choices.values()})) or "it has no parameters"
        raise StoreError(f"nothing in this {type(model).__name__} was morphed: {reasons}")
    _attach(model, slots)
    return MorphReport({one.name: choices[one.key] for one in parameters})


def attach_encoded(model: nn.Module, encoded: Mapping[str, Encoded]) -> None:
    """Take versions from a file: each is kept bit for bit, and its Parameter gets the decoded numbers.

    A tied parameter may be given under one of its names, or under each: with the same bytes, or in other formats.
    """
    parameters = {one.name: one for one in named_parameters_of(model)}
    groups: dict[int, dict[str, Encoded]] = {}
    for name, version in encoded.items():
        if name not in parameters:
            raise StoreError(f"the model has no parameter {name!r}{did_you_mean(name, parameters)}")
        parameter = parameters[name].parameter
        if version.shape != tuple(parameter.shape):
            shapes = f"the parameter has shape {tuple(parameter.shape)}, its encoding {version.shape}"
            raise StoreError(f"{name}: {shapes}; give encodings of this model's own weights")
        first = groups.setdefault(id(parameter), {}).setdefault(version.fmt.name, version)
        if first is not version and first.to_bytes() != version.to_bytes():
            other = f"another name of this tied parameter brings other {version.fmt.name} bytes"
            raise StoreError(f"{name}: {other}; give it under one of its names")
    store_of = _store_finder(model)
    slots = {}
    for name, named in parameters.items():
        versions = groups.get(id(named.parameter))
        if versions is not None:
            fmt = encoded[name].fmt if name in encoded else next(iter(versions.values())).fmt
            slots[named.key] = MorphedParameter(store_of(named), fmt)
        elif named.local in slots_of(named.module):
            slots[named.key] = slots_of(named.module)[named.local]
    for named in parameters.values():
        if versions := groups.pop(id(named.parameter), None):
            store_of(named).adopt(*versions.values())
    _attach(model, slots)


def unmorph_model(model: nn.Module) -> None:
    """Undo `morph_model`: drop the versions and restore the classes. Parameters keep their numbers."""
    if not stores_of(model) and any(isinstance(module, EncodedModule) for module in model.modules()):
        raise StoreError(
            f"morph_model(model, None): this {type(model).__name__} is packed, not morphed; "
            "bitplan.dequantize(model) makes it plain"
        )
    _attach(model, {})


def stores_of(model: nn.Module) -> dict[str, WeightStore]:
    """Map the name of every morphed parameter to its WeightStore; tied names have the same one."""
    return {
        named.name: slot.store
        for named in named_parameters_of(model)
        if (slot := slots_of(named.module).get(named.local))
    }


def formats_of(model: nn.Module) -> dict[str, Format]:
    """The format of every morphed parameter."""
    return {
        named.name: slot.fmt
        for named in named_parameters_of(model)
        if (slot := slots_of(named.module).get(named.local))
    }


@contextmanager
def observe_model(model: nn.Module) -> Iterator[dict[str, ActivationObserver]]:
    """A context that records the inputs of weights: run batches inside, then give the result to `morph_model`.

    It records inputs of Linear, convolutions, attention's input projections and the first layer of recurrent layers; it
    cannot record those of an Embedding (indices), of a transposed convolution (rows) or inside a recurrence.
    """
    observers: dict[str, ActivationObserver] = {}
    names = {named.key: named.name for named in reversed(named_parameters_of(model))}

    def watch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for local, inputs, axis in _inputs_of(module, args, kwargs):
            observers.setdefault(names[id(module), local], ActivationObserver(axis)).observe(inputs)

    handles = [
        module.register_forward_pre_hook(watch, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, LAYERS)
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
    """Yield (parameter, its inputs, the axis of features) for each weight that a call of a layer multiplies by."""
    first = ("query", "key", "value") if isinstance(module, nn.MultiheadAttention) else ("input",)
    named = dict(zip(first, args, strict=False)) | kwargs
    if isinstance(module, nn.MultiheadAttention):
        joined = module._qkv_same_embed_dim
        met = {
            ("in_proj_weight" if joined else f"{role[0]}_proj_weight", id(named[role])): named[role] for role in first
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


def _morph(
    slot: MorphedParameter, reason: str, observer: ActivationObserver | None, options: EncodeOptions
) -> MorphChoice:
    if observer is None or slot.fmt.is_cast:
        slot.store.morph(slot.fmt, **options)
        return MorphChoice(slot.fmt.name, reason + ("" if observer is None else "; a cast has no scales to calibrate"))
    gain = slot.store.calibrate(slot.fmt, observer, pad=options["pad"])
    explained = (
        f"{reason}; calibrated on {gain.rows_seen} inputs, error {gain.error_before:.3g} -> {gain.error_after:.3g}"
    )
    return MorphChoice(slot.fmt.name, explained, gain)


def _morph_ties(
    parameters: list[NamedParameter],
    plan: Plan,
    choices: dict[tuple[int, str], MorphChoice],
    slots: dict[tuple[int, str], MorphedParameter],
) -> None:
    """Morph a tied weight under all its names if one of them is named, except where None is explicit."""
    morphed = {id(one.parameter): one for one in reversed(parameters) if one.key in slots}
    for named in parameters:
        twin = morphed.get(id(named.parameter))
        is_kept = named.name in plan and plan[named.name].cause == "kept"
        if twin is not None and named.key not in slots and not is_kept:
            slots[named.key] = MorphedParameter(slots[twin.key].store, slots[twin.key].fmt)
            choices[named.key] = MorphChoice(slots[twin.key].fmt.name, f"tied to {twin.name}")


def _store_finder(model: nn.Module) -> Callable[[NamedParameter], WeightStore]:
    """A function that gives one store per Parameter: the model's existing ones, or new ones."""
    stores = {id(store._master): store for store in stores_of(model).values()}

    def find(named: NamedParameter) -> WeightStore:
        if id(named.parameter) not in stores:
            stores[id(named.parameter)] = WeightStore(named.parameter, name=named.name)
        return stores[id(named.parameter)]

    return find


def _attach(model: nn.Module, slots: Mapping[tuple[int, str], MorphedParameter]) -> None:
    """Make the Parameters named in `slots` morphed ones, and all others of the model plain again."""
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
        set_slots(module, mine, on_path=id(module) in on_path)
        for handle, hook in list(module._forward_pre_hooks.items()):
            if hook is _no_shortcut:
                del module._forward_pre_hooks[handle]
    if slots and not isinstance(model, nn.TransformerEncoderLayer):
        model.register_forward_pre_hook(_no_shortcut)


def _no_shortcut(*_: object) -> None:
    """Do nothing: a module with this hook calls its parts one by one (nn.TransformerEncoderLayer)."""
