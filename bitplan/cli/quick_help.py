"""Help and completion without pydantic, which typer imports to check values: 0.15 s of CPU that neither needs."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


class QuickCommand(TyperCommand):
    """A verb that accepts any value while the shell completes a line."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _quick(super().get_params(ctx), ctx)


class QuickGroup(TyperGroup):
    """The same for a group of verbs."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _quick(super().get_params(ctx), ctx)


def _quick(params: list[Any], ctx: Any) -> list[Any]:
    for param in params:
        if ctx.resilient_parsing:  # the shell completes a line: nothing will run
            param.process_value = _as_typed
        elif getattr(param, "is_flag", False) and param.default is None:
            param.default = False  # --help, --install-completion: typer checks that None is no bool
    return params


def _as_typed(_ctx: Any, value: Any) -> Any:
    return value
