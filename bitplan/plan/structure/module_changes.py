"""What was put on modules from outside: hooks, parametrizations, forwards of somebody else's."""

from __future__ import annotations

from torch import nn

from bitplan.plan.structure.untouched import is_class_patched

_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}


def changes_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """By path: what a module has beside its class's own code; modules with nothing are left out."""
    found: dict[str, tuple[str, ...]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if changes := tuple(_changes(module)):
            found[path] = changes
    return found


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
