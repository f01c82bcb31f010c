"""How results look on a terminal: tables, JSON, progress bars."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

Force = Annotated[bool, typer.Option("--force", help="Replace a file that exists.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def show_json(document: Any) -> None:
    """JSON on standard output, and nothing else there."""
    print(json.dumps(document, indent=2, ensure_ascii=False))


def table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """A table whose columns are the keys of the first row; numbers to the right."""
    shown = Table(title=Text(visible(title)), title_justify="left", title_style="bold", header_style="bold")
    for key in rows[0] if rows else ():
        is_number = all(_is_numeric(row[key]) for row in rows)
        shown.add_column(key.replace("_", " "), justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(Text(visible(str(value))) for value in row.values()))  # names are data: no markup in them
    Console(soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else 160).print(shown)


def visible(text: str) -> str:
    """Text of a file without what a terminal would obey: a tensor's name may hold escape sequences, or line ends."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def _is_numeric(value: Any) -> bool:
    text = str(value)
    return text == "exact" or text.replace(".", "").replace("-", "").replace("+", "").replace("e", "").isdigit()


@contextmanager
def progress(what: str, total: int, *, hidden: bool = False) -> Iterator[Callable[[int, str], None]]:
    """A bar on standard error; call what it yields with (amount, label)."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=hidden or not console.is_terminal) as bar:
        task = bar.add_task(what, total=max(total, 1))
        yield lambda amount, label: bar.update(task, advance=amount, description=escape(f"{what} {label[-40:]}"))


def human_bytes(count: float) -> str:
    """Bytes with a decimal unit, as disks count."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    raise AssertionError("the last unit takes everything")
