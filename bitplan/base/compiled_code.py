"""Registers direct calls with torch's compiler (Inductor) when it is loaded; loading it takes seconds."""

from __future__ import annotations

import importlib
import sys


def register_lowerings(module: str) -> None:
    """Import this module, which registers lowerings, if Inductor is loaded. Fakes of operators call it: Inductor runs
    them before it generates code."""
    if module not in sys.modules and "torch._inductor.compile_fx" in sys.modules:
        importlib.import_module(module)
