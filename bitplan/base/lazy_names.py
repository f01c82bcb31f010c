"""Names of a package that are imported when they are first used.

torch takes seconds to import. `bitplan --help`, and a script that only reads a plan, need none of it.

A package writes its names once, as imports under `if TYPE_CHECKING`, which type checkers and editors read; what happens
at run time follows from them.
"""

from __future__ import annotations

import ast
import functools
import importlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

from bitplan.base.old_names import is_old_name, old_name


def lazy_names(
    package: str, *, parts: Iterable[str] = (), present: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """The `__getattr__`, `__dir__` and `__all__` of a package.

    parts    its sub-packages, imported when they are first used
    present  public names that it has already

    A name of `bitplan` itself is public there alone: the part that defines it has it, too, and does not list it.
    A name is looked up in its module each time, so that a test may replace it there.
    """
    module_of = _modules_of_names(package)
    names = {*module_of, *parts}

    def get(name: str) -> Any:
        if name not in names:
            if is_old_name(package, name):
                return old_name(package, name)
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules.get(package)
            )
        if name in module_of:
            return getattr(importlib.import_module(module_of[name]), name)
        return importlib.import_module(f"{package}.{name}")

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names})

    elsewhere = set() if package == "bitplan" else _modules_of_names("bitplan").keys()
    return get, list_names, sorted({*module_of, *present} - elsewhere)


@functools.cache
def _modules_of_names(package: str) -> dict[str, str]:
    """Which module defines which name, by the imports under `if TYPE_CHECKING` in the package's own source."""
    module: Any = sys.modules[package]
    source = module.__loader__.get_data(module.__file__)
    guarded = next(node for node in ast.parse(source).body if isinstance(node, ast.If)).body
    imports = [node for node in guarded if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}
