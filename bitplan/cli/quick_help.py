"""Help and completion that load neither torch nor pydantic, which typer imports to check values: 0.15 s of CPU."""

from __future__ import annotations

import functools
import glob
import os
from typing import Any

from typer.core import TyperCommand, TyperGroup


class QuickCommand(TyperCommand):
    """A verb that accepts any value while the shell completes a line; its text is as wide as the terminal."""

    def __init__(self, *arguments: Any, help: str | None = None, **settings: Any) -> None:
        paragraphs = (help or "").split("\n\n")  # typer would keep the ends of the docstring's lines
        super().__init__(*arguments, help="\n\n".join(" ".join(text.split()) for text in paragraphs), **settings)

    def get_params(self, ctx: Any) -> list[Any]:
        return _quick(super().get_params(ctx), ctx)


class QuickGroup(TyperGroup):
    """A group of verbs that accepts any value while the shell completes a line."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _quick(super().get_params(ctx), ctx)


def _quick(params: list[Any], ctx: Any) -> list[Any]:
    for param in params:
        if ctx.resilient_parsing:  # the shell completes a line: nothing will run
            param.process_value = _as_typed
        elif getattr(param, "is_flag", False) and param.default is None:
            param.default = False  # --help, --install-completion: typer checks that None is no bool
        if hasattr(param, "display_type_rich"):
            param.display_type_rich = functools.partial(_shown_type, param)
    return params


# typer shows Python's names of types.
_TYPES = {"str": "TEXT", "int": "NUMBER", "float": "NUMBER", "path": "PATH", "file": "PATH", "directory": "PATH"}


def _shown_type(param: Any, ctx: Any) -> str | None:
    """What is to be typed behind an option: its metavar, or a word for the type; nothing behind a flag."""
    if getattr(param, "is_flag", False):
        return None
    if param.metavar is not None and param.param_type_name == "option":
        return str(param.metavar)
    kind: str = param.display_type(ctx).strip("<>").removeprefix("list[").removesuffix("]").removesuffix(" range")
    return _TYPES.get(kind, kind)


def _as_typed(_ctx: Any, value: Any) -> Any:
    return value


def format_names(incomplete: str) -> list[str]:
    """The formats whose names begin with `incomplete`."""
    from bitplan.formats.registry import list_formats

    return [fmt.name for fmt in list_formats() if fmt.name.startswith(incomplete)]


def manifest_names(incomplete: str) -> list[str]:
    """The shipped manifests whose names begin with `incomplete`, then folders and JSON files."""
    return shipped_names(incomplete) + [
        os.path.join(path, "") if os.path.isdir(path) else path
        for path in sorted(glob.glob(f"{glob.escape(incomplete)}*"))
        if os.path.isdir(path) or path.endswith(".json")
    ]


def shipped_names(incomplete: str) -> list[str]:
    """The shipped manifests whose names begin with `incomplete`."""
    from bitplan.plan.manifest import SHIPPED

    return [name for name in SHIPPED if name.startswith(incomplete)]
