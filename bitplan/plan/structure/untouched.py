"""Running a model's forward without altering the model: no hooks, no lasting attributes, no random numbers used up.

What was put on modules from outside: hooks, parametrizations, forwards of somebody else's.

`examples_for` makes inputs that a module's forward takes, from its config, or from the arguments of its forward.

They say only what kind of input it is: the run has no numbers beside token ids and positions.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

Inputs = tuple[tuple[Any, ...], dict[str, Any]]  # of one call


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """What a call computes: the forward behind torch.compile's wrapper, and behind accelerate's hook."""
    inner = module._modules.get("_orig_mod")
    if inner is not None:
        return inner
    forward: Callable[..., Any] = module.forward
    if "_hf_hook" in module.__dict__ and "_old_forward" in module.__dict__:
        forward = module.__dict__["_old_forward"]
    return forward


def has_foreign_forward(module: nn.Module) -> bool:
    """Whether a forward was put on the instance, or on the class by somebody else than its author."""
    return "forward" in module.__dict__ or is_class_patched(type(module))


def is_class_patched(kind: type) -> bool:
    """Whether a class's forward was defined elsewhere: functions know the name of the class they were written in."""
    holder = next((base for base in kind.__mro__ if "forward" in base.__dict__), None)
    forward = holder.__dict__["forward"] if holder is not None else None
    qualified = getattr(forward, "__qualname__", None)
    if holder is None or holder is nn.Module or qualified is None:
        return False
    return bool(qualified != f"{holder.__qualname__}.forward" or forward.__module__ != holder.__module__)


ThroughCall = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
_lock = threading.Lock()
_calls_of: dict[int, list[ThroughCall]] = {}  # by thread: what its modules' calls go through, the innermost last
_usual = nn.Module.__call__


def _through(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    calls = _calls_of.get(threading.get_ident())
    return calls[-1](module, args, kwargs) if calls else _usual(module, *args, **kwargs)


@contextlib.contextmanager
def calls_through(call: ThroughCall) -> Iterator[None]:
    """A context in which modules called in this thread go through `call`, without their hooks; others may do as much.

    One function stands in for `nn.Module.__call__` until the last thread has left: each that put back what it had found
    would leave another's there.
    """
    global _usual
    thread = threading.get_ident()
    with _lock:
        if nn.Module.__call__ is not _through:
            _usual = nn.Module.__call__
            nn.Module.__call__ = _through  # type: ignore[method-assign]
        _calls_of.setdefault(thread, []).append(call)
    try:
        yield
    finally:
        with _lock:
            _calls_of[thread].pop()
            if not _calls_of[thread]:
                del _calls_of[thread]
            if not _calls_of and nn.Module.__call__ is _through:
                nn.Module.__call__ = _usual  # type: ignore[method-assign]


def without_hooks() -> contextlib.AbstractContextManager[None]:
    """Modules called in this thread compute what their own code says, whatever was put on them."""
    return calls_through(lambda module, args, kwargs: own_forward(module)(*args, **kwargs))


_eager_runs = 0
_stance: Any = None


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """A context in which what torch.compile made runs as it is written, in all threads; others may do as much.

    The compiler's stance is the process's: the last that leaves puts back what the first has found.
    """
    global _eager_runs, _stance
    with _lock:
        if _stance is None and "torch._dynamo" in sys.modules:  # else nothing can have been compiled
            _stance = torch.compiler.set_stance("force_eager")
        _eager_runs += 1
    try:
        yield
    finally:
        with _lock:
            _eager_runs -= 1
            if not _eager_runs and _stance is not None:
                _stance.__exit__(None, None, None)
                _stance = None


class _AllSeenError(Exception):
    """Raised to stop a model once all inputs are recorded."""


def record_inputs(model: nn.Module, root: nn.Module, paths: set[str], shown: Inputs, inputs: dict[str, Inputs]) -> None:
    """Run a model without its hooks, and put what it gives to these modules into `inputs`."""
    by_module = {id(model.get_submodule(path)): path for path in paths}

    def call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        path = by_module.get(id(module))
        if path is not None and path not in inputs:
            inputs[path] = copied_inputs((args, dict(kwargs)))
            if len(inputs) == len(paths):
                raise _AllSeenError
        return own_forward(module)(*args, **kwargs)

    with contextlib.suppress(_AllSeenError), calls_through(call):
        root(*shown[0], **shown[1])


def copied_inputs(inputs: Inputs) -> Inputs:
    """Inputs for one call, which may write into them: a cache of keys and values would be longer in the next."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().clone()
        if isinstance(leaf, nn.Module):
            return leaf
        try:
            return copy.deepcopy(leaf)
        except (RuntimeError, TypeError, ValueError):  # a lock, a process group, a tensor with a history
            return leaf

    copies: Inputs = tree_map(copied, inputs)
    return copies


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """A context after which modules have again what a forward changed: attributes, items of dicts, lists, sets."""
    saved: list[tuple[dict[str, Any], dict[str, Any], list[tuple[Any, Any]]]] = []
    for module in model.modules():
        holds = [(value, value.copy()) for value in module.__dict__.values() if type(value) in (dict, list, set)]
        saved.append((module.__dict__, dict(module.__dict__), holds))
    try:
        yield
    finally:
        for attributes, before, holds in saved:
            if attributes.keys() != before.keys() or any(attributes[name] is not before[name] for name in before):
                attributes.clear()
                attributes.update(before)
            for container, items in holds:
                if isinstance(container, list):
                    if len(container) != len(items) or any(a is not b for a, b in zip(container, items, strict=True)):
                        container[:] = items
                elif isinstance(container, set):
                    if container != items:
                        container.clear()
                        container.update(items)
                elif list(container) != list(items) or any(container[key] is not items[key] for key in items):
                    container.clear()
                    container.update(items)


@contextlib.contextmanager
def same_random_numbers() -> Iterator[None]:
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(state)


# ---- module changes --------------------------------------------------------------------------------------------------


_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}


def changes_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """List by path what a module has beside its class's own code; modules with nothing are left out."""
    by_path: dict[str, tuple[str, ...]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if changes := tuple(_changes(module)):
            by_path[path] = changes
    return by_path


def _changes(module: nn.Module) -> list[str]:
    changes = [word for hooks, word in _HOOKS.items() if getattr(module, hooks, None)]
    if "forward" in module.__dict__:
        changes.append("forward of its own")
    if is_class_patched(type(module)):
        changes.append("patched class")
    if "parametrizations" in module._modules:
        changes.append("parametrization")
    if module.__dict__.get("_compiled_call_impl") is not None:
        changes.append("compiled")
    return changes


# ---- example inputs --------------------------------------------------------------------------------------------------


TOKENS = 8
MOST_TRIES = 40

Example = tuple[tuple[Any, ...], dict[str, Any]]


def examples_for(model: nn.Module) -> Iterator[Example]:
    """Yield example inputs to try on a model, the likeliest to fit first."""
    config = getattr(model, "config", None)
    if config is not None and hasattr(model, "main_input_name"):
        yield from _from_config(model, config)
    yield from itertools.islice(_from_signature(model), MOST_TRIES)


def _ids(size: int, length: int = TOKENS) -> Tensor:
    return torch.arange(3, 3 + length).remainder(max(size, 1))[None]


def _setting(config: Any, *names: str) -> Any:
    """The first setting that a config or one of its inner configs has."""
    inner = [config, *(getattr(config, key, None) for key in ("text_config", "vision_config", "audio_config"))]
    for part in inner:
        for name in names:
            value = getattr(part, name, None)
            if value is not None:
                return value
    return None


def _from_config(model: nn.Module, config: Any) -> Iterator[Example]:
    taken = set(_parameters(model))
    main = str(model.main_input_name)
    size = _setting(config, "vocab_size")
    settings = {"use_cache": False} if "use_cache" in taken or "kwargs" in taken else {}
    if main == "input_ids" and isinstance(size, int):
        lengths = (TOKENS, 64, 256)
        for length in lengths:
            keywords: dict[str, Any] = {"input_ids": _ids(size, length)}
            if "decoder_input_ids" in taken and getattr(config, "is_encoder_decoder", False):
                keywords["decoder_input_ids"] = _ids(size, length)
            yield (), keywords | ({"use_cache": False} if "use_cache" in taken else {})
            yield (), keywords
    if main == "pixel_values":
        points = {"input_points": torch.zeros(1, 1, 2, 2)} if "input_points" in taken else {}
        for pixels in _pixels(config):
            yield from (((), {"pixel_values": pixels, **given}) for given in ((points, {}) if points else ({},)))
    if main == "input_features":
        bins = _setting(config, "num_mel_bins", "input_dim", "feature_size") or 80
        frames = 2 * (_setting(config, "max_source_positions") or 32)
        for shape in ((1, bins, frames), (1, frames, bins)):
            keywords = {"input_features": torch.zeros(shape)}
            if "decoder_input_ids" in taken and isinstance(size, int):
                keywords["decoder_input_ids"] = _ids(size)
            yield (), keywords | ({"use_cache": False} if "use_cache" in taken else {})
    if main == "input_values":
        yield (), {"input_values": torch.zeros(1, 4000)} | settings
        yield (), {"input_values": torch.zeros(1, _setting(config, "audio_channels", "num_channels") or 1, 4000)}
        bins, frames = _setting(config, "num_mel_bins") or 128, _setting(config, "max_length") or 1024
        yield (), {"input_values": torch.zeros(1, frames, bins)}
    if "input_ids" in taken and "pixel_values" in taken and isinstance(size, int):
        for pixels in _pixels(config):
            yield (), {"input_ids": _ids(size), "pixel_values": pixels}


def _pixels(config: Any) -> Iterator[Tensor]:
    channels = _setting(config, "num_channels", "in_channels", "in_chans") or 3
    side, frames = _setting(config, "image_size", "img_size"), _setting(config, "num_frames")
    if isinstance(frames, int) and isinstance(side, int):
        yield torch.zeros(1, frames, channels, side, side)
    sides = [side] if isinstance(side, int) else []
    if isinstance(side, list | tuple) and len(side) == 2:
        yield torch.zeros(1, channels, *side)
    for pixels in (*sides, 32, 64, 224):
        yield torch.zeros(1, channels, pixels, pixels)


def _parameters(model: nn.Module) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(model.forward).parameters)


def _from_signature(model: nn.Module) -> Iterator[Example]:
    """Every required argument as one of a few kinds: what the model's first layers take."""
    required = [
        parameter
        for parameter in _parameters(model).values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    variadic = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in _parameters(model).values())
    if not required and not variadic:
        required = [next(iter(_parameters(model).values()), None)]  # type: ignore[list-item]
    kinds = list(_kinds(model))
    for chosen in itertools.product(kinds, repeat=max(1, len(required))):
        yield chosen, {}


def _kinds(model: nn.Module) -> Iterator[Tensor]:
    tables = [size for module in model.modules() if type(size := getattr(module, "num_embeddings", None)) is int]
    inputs = [size for module in model.modules() if type(size := getattr(module, "in_features", None)) is int]
    channels: dict[int, int] = {}
    for module in model.modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            channels.setdefault(len(module.kernel_size), module.in_channels)
    dtype = next((parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), torch.float32)
    for rank in sorted(channels, reverse=True):
        yield torch.zeros(1, channels[rank], *(32,) * rank, dtype=dtype)
    if tables:
        yield _ids(tables[0])
    for width in dict.fromkeys(inputs[:1]):
        yield torch.zeros(1, TOKENS, width, dtype=dtype)
        yield torch.zeros(1, width, dtype=dtype)
    yield torch.zeros(1, dtype=torch.long)
    yield torch.zeros(1, dtype=dtype)
