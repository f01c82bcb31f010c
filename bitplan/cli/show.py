"""How results look on a terminal: tables, JSON, lines, progress."""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bitplan.cli.fit_columns import TextColumn, columns_of, share_width, split_columns, wrap
from bitplan.errors import BitplanError
from bitplan.text import visible

if TYPE_CHECKING:
    from rich.console import Console

WIDE = 160  # for output without a width: a pipe, a file
LINE_EVERY_S = 10.0


class StoppedVerbError(BitplanError):
    """Ctrl-C in a verb; the message says what was done until then, and `run` exits as interrupted."""


def show_json(document: Any) -> None:
    """Print JSON on standard output, alone; in ASCII, so that no name can control the terminal."""
    print(json.dumps(document, indent=2).replace("\x7f", "\\u007f"))


def say(line: str) -> None:
    """Print a line of text on standard output; control characters in names are made visible."""
    width = _width()
    print(wrap(visible(line), WIDE * 100 if width is None else width), flush=True)


def table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table; its columns are the keys of the first row, numbers to the right; in parts if it is too wide."""
    from rich.console import Console
    from rich.text import Text

    width = _width() or WIDE
    console = Console(width=width)
    console.print(Text(wrap(visible(title), width), style="bold"), no_wrap=True, overflow="ignore", crop=False)
    shown = [{key: visible(str(value)) for key, value in row.items()} for row in rows]  # names are data: no markup
    for columns in split_columns(columns_of(shown), width):
        _draw(console, columns, share_width(columns, width))


def _draw(console: Console, columns: Sequence[TextColumn], widths: Sequence[int]) -> None:
    """A table in rich's own lines, a row at a time: rich's Table holds and renders all of them, 1 ms for each."""
    from rich.box import HEAVY_HEAD
    from rich.text import Text

    box, outer = HEAVY_HEAD.substitute(console.options), [width + 2 for width in widths]
    header = _row([column.header for column in columns], columns, widths, box.head_left, box.head_vertical)
    head = Text.assemble(f"{box.get_top(outer)}\n", (header, "bold"), f"\n{box.get_row(outer, 'head')}")
    console.print(head, no_wrap=True, overflow="ignore", crop=False)
    for cells in zip(*(column.cells for column in columns), strict=True):
        print(_row(cells, columns, widths, box.mid_left, box.mid_vertical))
    print(box.get_bottom(outer))


def _row(cells: Sequence[str], columns: Sequence[TextColumn], widths: Sequence[int], edge: str, between: str) -> str:
    """The lines of a row: as many as its highest cell has."""
    from rich.cells import cell_len

    def padded(text: str, column: TextColumn, width: int) -> str:
        space = " " * (width - (len(text) if text.isascii() else cell_len(text)))
        return f" {space}{text} " if column.is_number else f" {text}{space} "

    wrapped = [wrap(cell, width).split("\n") for cell, width in zip(cells, widths, strict=True)]
    lines = itertools.zip_longest(*wrapped, fillvalue="")
    return "\n".join(f"{edge}{between.join(map(padded, line, columns, widths))}{edge}" for line in lines)


def _width() -> int | None:
    """The width of the terminal, or COLUMNS; None if nothing limits it."""
    from rich.console import Console

    return Console().width if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit() else None


@contextmanager
def progress(
    what: str, total: int, *, amount: Callable[[int], str] = str, estimates: bool = True
) -> Iterator[Callable[[int, str], None]]:
    """Progress on standard error: a bar on a terminal, elsewhere a line every ten seconds.

    It yields a function of (amount, label); `amount` formats amounts. `estimates` says how long it will take in all,
    unless the labels do.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        with _lines(what, max(total, 1), amount, estimates) as advance:
            yield advance
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
    with Progress(*columns, *([TimeRemainingColumn()] if estimates else []), console=console, transient=True) as bar:
        task = bar.add_task(what, total=max(total, 1))
        yield lambda count, label: bar.update(task, advance=count, description=f"{what} {visible(label)[-40:]}")


@contextmanager
def _lines(
    what: str, total: int, amount: Callable[[int], str], estimates: bool
) -> Iterator[Callable[[int, str], None]]:
    """A thread prints progress every ten seconds, also while a single step takes minutes."""
    done, doing, started, is_over = 0, "", time.monotonic(), threading.Event()
    whole = 0.0  # seconds of it all, by the steps that are done: while one takes its time, the total does not rise

    def advance(count: int, label: str) -> None:
        nonlocal done, doing, whole
        done, doing = done + count, label
        whole = (time.monotonic() - started) * total / done if done else 0.0

    def tell() -> None:
        while not is_over.wait(LINE_EVERY_S):
            seconds = time.monotonic() - started
            left = f", about {_duration(max(whole, seconds))} in all" if estimates else ""
            line = f"{what}: {amount(done)} of {amount(total)} in {_duration(seconds)}"
            line += left if done else ", nothing is done yet"
            print(visible(f"{line}: {doing}" if doing else line), file=sys.stderr, flush=True)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield advance
    finally:
        is_over.set()
        teller.join()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def human_bytes(count: float) -> str:
    """Bytes with a decimal unit, as disks count."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    raise AssertionError("the last unit takes everything")
