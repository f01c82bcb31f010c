"""Options that several verbs have, each declared once, and verbs whose help and completion are quick.

Help and completion load neither torch nor pydantic, which typer imports to check values: 0.15 s of CPU.
"""

from __future__ import annotations

import functools
import glob
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from bitplan.fp8.recipes import RECIPES


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


# ---- options ---------------------------------------------------------------------------------------------------------

Rule = Literal["absmax", "absmean", "percentile", "mse"]

Force = Annotated[bool, typer.Option("--force", help="Replace a file that exists.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Recipe = Annotated[str | None, typer.Option("--recipe", help=" or ".join(", ".join(RECIPES).rsplit(", ", 1)) + ".")]
KeysValues = Annotated[
    str | None,
    typer.Option(
        "--kv", metavar="K[:V]", help="Formats of the cache's keys and values: int8, fp8, int4, int8:int4; or keep."
    ),
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads.")]
Emulated = Annotated[
    Literal["cuda", "cpu"], typer.Option("--device", help="cpu emulates FP8: to try the command, not to decide.")
]
ManifestName = Annotated[
    str | None,
    typer.Option(
        help="By rules on names instead: a file, or the name of a shipped manifest.", autocompletion=manifest_names
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Config and tokenizer for weights alone: a folder, or a GGUF file."),
]
PlanFile = Annotated[Path | None, typer.Option(help="By a plan, or the folder of a `search`, with its evidence.")]
Keep = Annotated[list[str] | None, typer.Option(help=r"Leave tensors of this name or shell pattern (* ? \[ab]).")]
Only = Annotated[list[str] | None, typer.Option(help="Quantize these and nothing else.")]
ScaleRule = Annotated[Rule | None, typer.Option(help="How scales are chosen.")]
Pad = Annotated[Literal["zero"] | None, typer.Option(help="Fill rows' last blocks with zeros.")]
Evidence = Annotated[
    Path | None,
    typer.Option(help="Better numbers in the same bytes, from statistics: evidence.safetensors, imatrix.gguf."),
]
DaskAddress = Annotated[
    str | None, typer.Option("--dask", metavar="ADDRESS", help="Have the workers of this Dask scheduler do the work.")
]
Bits = Annotated[float | None, typer.Option("--bits", help="At most this many bits a weight, scales included.")]
Bytes = Annotated[str | None, typer.Option("--bytes", metavar="SIZE", help="At most this size: 6GB, 900MB.")]
MaxKl = Annotated[
    float | None,
    typer.Option("--max-kl", help="At most this far from the model, in nats a token; alone: fewest bytes."),
]
Faster = Annotated[
    float | None, typer.Option("--faster", help="At least this many times BF16's speed, by measured times.")
]
KindsOfText = Annotated[
    str,
    typer.Option(
        "--goal", metavar="KINDS", help="With several --text: their mean counts, the worst, or shares: 0.7:0.3."
    ),
]
Rows = Annotated[int, typer.Option("--rows", help="With --faster: at how many rows (tokens at once).")]
