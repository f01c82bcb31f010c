"""Running a model's forward without altering the model: no hooks, no lasting attributes, no random numbers used up.

What was put on modules from outside: hooks, parametrizations, forwards of somebody else's.
"""

from __future__ import annotations

import contextlib
import copy
import random
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


@contextlib.contextmanager
def calls_through(call: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """Modules called in this thread go through `call`, without their hooks; those of other threads as ever."""
    ours, usual = threading.get_ident(), nn.Module.__call__

    def through(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != ours:
            return usual(module, *args, **kwargs)
        return call(module, args, kwargs)

    nn.Module.__call__ = through  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = usual  # type: ignore[method-assign]


def without_hooks() -> contextlib.AbstractContextManager[None]:
    """Modules called in this thread compute what their own code says, whatever was put on them."""
    return calls_through(lambda module, args, kwargs: own_forward(module)(*args, **kwargs))


class _AllSeenError(Exception):
    """Raised to stop a model once all inputs are recorded."""


def record_inputs(model: nn.Module, root: nn.Module, paths: set[str], given: Inputs, inputs: dict[str, Inputs]) -> None:
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
        root(*given[0], **given[1])


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
    """Put back what a forward writes into its modules: attributes, and the items of their dicts, lists and sets."""
    kept: list[tuple[dict[str, Any], dict[str, Any], list[tuple[Any, Any]]]] = []
    for module in model.modules():
        holds = [(value, value.copy()) for value in module.__dict__.values() if type(value) in (dict, list, set)]
        kept.append((module.__dict__, dict(module.__dict__), holds))
    try:
        yield
    finally:
        for attributes, before, holds in kept:
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
    """By path: what a module has beside its class's own code; modules with nothing are left out."""
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
