"""Operators whose functions torch's compiler (Inductor) calls directly, past torch's dispatcher.

Loading Inductor takes seconds, so calls are registered with it when it is loaded: the fakes of operators do that, which
Inductor runs before it generates code. `base.inductor_calls` makes the calls.

Generated code stays in torch's cache on disk and is called by later versions, so the name `FUNCTIONS`, the operators'
names and their arguments may only be added to.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FUNCTIONS: dict[str, Callable[..., tuple[Tensor, ...]]] = {}  # of operators, by name; generated code calls them
_LIBRARY = torch.library.Library("bitplan", "FRAGMENT")


def register_lowerings(module: str) -> None:
    """Import this module, which registers lowerings, if Inductor is loaded."""
    if module not in sys.modules and "torch._inductor.compile_fx" in sys.modules:
        importlib.import_module(module)


def define_operator(signature: str, function: Callable[..., tuple[Tensor, ...]], fake: Callable[..., Any]) -> Any:
    """An operator `bitplan::...` of several results; cheaper for the host than torch.library.custom_op."""
    name = signature.split("(")[0]
    is_lowered = False

    def shapes(*arguments: Any) -> Any:
        nonlocal is_lowered
        if not is_lowered and "torch._inductor.compile_fx" in sys.modules:
            importlib.import_module("bitplan.base.inductor_calls").call_operator(name)
            is_lowered = True
        return fake(*arguments)

    FUNCTIONS[name] = function
    _LIBRARY.define(signature, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"bitplan::{name}", shapes, lib=_LIBRARY)
    return getattr(torch.ops.bitplan, name).default
