"""Names of a package that are imported when they are first used.

torch takes seconds to import. `bitplan --help`, and a script that only reads a plan, need none of it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, Iterable[str]], *, parts: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package: which module defines which names, and which parts are sub-packages.

    A name is looked up in its module each time, so that a test may replace it there.
    """
    module_of = {name: f"{package}.{module}" for module, names in modules.items() for name in names}
    known = {*module_of, *parts}

    def get(name: str) -> Any:
        if name not in known:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules.get(package)
            )
        if name in module_of:
            return getattr(importlib.import_module(module_of[name]), name)
        return importlib.import_module(f"{package}.{name}")

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *known})

    return get, list_names
