"""How results look on a terminal: tables, JSON, lines, progress.

Cells that fit their column: lines break between words, in names after a dot, and never within a number.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len

from bitplan.base.errors import BitplanError, visible

if TYPE_CHECKING:
    from rich.console import Console

# ---- fit columns -----------------------------------------------------------------------------------------------------


WHOLE_WORD = 16  # a word of up to this length is never divided: formats, figures, roles
WHOLE_CELL = 10  # a cell of up to this length is never divided: "26.11 kB", "12 of 96"
LONGEST_PIECE = 26  # a piece of a name that is longer loses its middle
LEAST_TEXT = 20  # sentences in a narrower column are hard to read
_BREAK = re.compile(r"(?<=[./:\\])(?=[^./:\\])")
_NUMBER = re.compile(r"[-+]?[0-9][0-9.,]*([eE][-+]?[0-9]+)?[%x]?")


@dataclass(eq=False)
class TextColumn:
    """A column's header and cells, the least width that divides no word, and the width that keeps cells on one line."""

    key: str
    cells: Sequence[str]

    def __post_init__(self) -> None:
        header = self.key.replace("_", " ")
        texts = [header, *self.cells]
        self.header = header
        self.natural = max(map(cell_len, texts))
        self.is_number = bool(self.cells) and all(map(_is_figure, self.cells))
        self.is_text = any(" " in cell and cell_len(cell) > LEAST_TEXT for cell in self.cells)
        least = max(_least(word) for text in texts for word in (text.split() or [""]))
        least = max(least, *(cell_len(cell) for cell in self.cells if cell_len(cell) <= WHOLE_CELL), 0)
        self.least = max(least, min(self.natural, LEAST_TEXT)) if self.is_text else least


def columns_of(rows: Sequence[Mapping[str, Any]]) -> list[TextColumn]:
    """A column for each key of the first row, with the cells of all rows."""
    return [TextColumn(key, [str(row[key]) for row in rows]) for key in (rows[0] if rows else ())]


def split_columns(columns: Sequence[TextColumn], width: int) -> list[list[TextColumn]]:
    """Tables of columns that fit the width; each after the first begins with the columns that tell the rows apart.

    If one table does not hold all columns, empty columns are left out.
    """
    if _width_of(columns) > width:
        columns = [column for column in columns if any(column.cells)]
    tables: list[list[TextColumn]] = [[]]
    for column in columns:
        if tables[-1] and _width_of([*tables[-1], column]) > width:
            tables.append(_telling_apart(columns, width))
        if not any(shown is column for shown in tables[-1]):
            tables[-1].append(column)
    return tables


def _telling_apart(columns: Sequence[TextColumn], width: int) -> list[TextColumn]:
    """Choose as many columns, from the first, as make all rows differ; only the first if those are too wide."""
    chosen: list[TextColumn] = []
    for column in columns:
        if len(set(column.cells)) > 1:
            chosen.append(column)
            if len(set(zip(*(other.cells for other in chosen), strict=True))) == len(column.cells):
                break
    return chosen if chosen and _width_of(chosen) <= width // 2 else [columns[0]]


def share_width(columns: Sequence[TextColumn], width: int) -> list[int]:
    """A width for each column: first the least, then more for names and figures, then for sentences."""
    widths = [column.least for column in columns]
    spare = width - _outer(len(columns)) - sum(widths)
    for at in sorted(range(len(columns)), key=lambda at: columns[at].is_text):
        more = max(0, min(spare, columns[at].natural - widths[at]))
        widths[at] += more
        spare -= more
    return widths


def _outer(columns: int) -> int:
    return 3 * columns + 1  # a border and two spaces for each, and the last border


def _width_of(columns: Sequence[TextColumn]) -> int:
    return _outer(len(columns)) + sum(column.least for column in columns)


def wrap(text: str, width: int) -> str:
    """The text in lines of this width."""
    lines: list[str] = []
    for word in re.split(r" (?=[^ ])", text):
        if lines and cell_len(lines[-1]) + 1 + cell_len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines += _divide(word, width)
    return "\n".join(lines)


def _divide(word: str, width: int) -> list[str]:
    """A word as it is, or a name over several lines, each ending at a dot, a slash or a colon."""
    if cell_len(word) <= width:
        return [word]
    lines = [""]
    for piece in _pieces(word):
        if lines[-1] and cell_len(lines[-1]) + cell_len(piece) > width:
            lines.append("")
        lines[-1] += shorten(piece, width)
    return lines


def shorten(name: str, width: int) -> str:
    """A name cut to the width: its middle is replaced by an ellipsis where it is too long."""
    if cell_len(name) <= width:
        return name
    head, tail = (width - 1) // 2, width - 1 - (width - 1) // 2
    while head + tail > 2 and cell_len(name[:head]) + cell_len(name[-tail:]) + 1 > width:  # letters of two cells
        head, tail = max(1, head - 1), max(1, tail - 1)
    return f"{name[:head]}…{name[-tail:]}"


def _pieces(word: str) -> list[str]:
    """Divide a name where it may be divided; a figure such as 0.25 is one piece."""
    if len(word) <= WHOLE_WORD or _NUMBER.fullmatch(word):
        return [word]
    pieces = _BREAK.split(word)
    joined = [pieces[0]]
    for piece in pieces[1:]:
        decimal = re.search(r"[0-9][.:]$", joined[-1]) and piece[:1].isdigit()
        joined[len(joined) - 1 :] = [joined[-1] + piece] if decimal else [joined[-1], piece]
    return joined


def _least(word: str) -> int:
    if _NUMBER.fullmatch(word):
        return cell_len(word)
    return max(min(cell_len(piece), LONGEST_PIECE) for piece in _pieces(word))


def _is_figure(text: str) -> bool:
    return text in ("", "exact") or _NUMBER.fullmatch(text) is not None


# ---- show ------------------------------------------------------------------------------------------------------------


WIDE = 160  # for output without a width: a pipe, a file
LINE_EVERY_S = 10.0


class StoppedVerbError(BitplanError):
    """Ctrl-C in a verb; the message says what was done until then, and `run` exits as interrupted."""


def show_json(document: Any) -> None:
    """Print JSON on standard output, alone; in ASCII, so that no name can control the terminal."""
    print(json.dumps(document, indent=2).replace("\x7f", "\\u007f"))


def say(line: str, *, divided: bool = True) -> None:
    """Print a line of text on standard output; control characters in names are made visible.

    A line that someone will copy, with a command, is not divided: the terminal shows it in several and copies one.
    """
    width = _width() if divided else None
    print(wrap(visible(line), WIDE * 100 if width is None else width), flush=True)


def table(title: str, rows: Sequence[Mapping[str, Any]], *, extra: Sequence[str] = ()) -> None:
    """Print a table; its columns are the keys of the first row, numbers to the right; in parts if it is too wide.

    extra   columns that a narrow terminal does without, the most useful first, so that one part is enough
    """
    from rich.console import Console
    from rich.text import Text

    width = _width() or WIDE
    console = Console(width=width)
    console.print(Text(wrap(visible(title), width), style="bold"), no_wrap=True, overflow="ignore", crop=False)
    shown = [{key: visible(str(value)) for key, value in row.items()} for row in rows]  # names are data: no markup
    columns, left_out = columns_of(shown), []
    for key in reversed(extra):
        if _width_of(columns) > width:
            left_out += [column.header for column in columns if column.key == key]
            columns = [column for column in columns if column.key != key]
    for part in split_columns(columns, width):
        _draw(console, part, share_width(part, width))
    if left_out:
        say(f"a wider terminal and --json also show: {', '.join(reversed(left_out))}")


def _draw(console: Console, columns: Sequence[TextColumn], widths: Sequence[int]) -> None:
    """Print a table in rich's own lines, a row at a time: rich's Table takes 1 ms for each."""
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
    """Draw one row of a table: as many lines as its highest cell needs."""
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

    console = Console()  # whose file is there where standard output is closed
    return console.width if console.file.isatty() or os.environ.get("COLUMNS", "").isdigit() else None


@contextmanager
def progress(
    title: str, total: int, *, amount: Callable[[int], str] = str, estimates: bool = True
) -> Iterator[Callable[[int, str], None]]:
    """A context that shows progress on standard error: a bar on a terminal, elsewhere a line every ten seconds.

    It yields a function of (amount, label); `amount` formats amounts. `estimates` says how long it will take in all,
    unless the labels do.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        with _lines(title, max(total, 1), amount, estimates) as advance:
            yield advance
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
    with Progress(*columns, *([TimeRemainingColumn()] if estimates else []), console=console, transient=True) as bar:
        task = bar.add_task(title, total=max(total, 1))
        yield lambda count, label: bar.update(task, advance=count, description=f"{title} {visible(label)[-40:]}")


@contextmanager
def _lines(
    title: str, total: int, amount: Callable[[int], str], estimates: bool
) -> Iterator[Callable[[int, str], None]]:
    """A context in which a thread prints progress every ten seconds, also during a step of minutes."""
    done, doing, started, is_over = 0, "", time.monotonic(), threading.Event()
    whole = 0.0  # seconds of it all, by the steps that are done: while one takes its time, the total does not rise

    def advance(count: int, label: str) -> None:
        nonlocal done, doing, whole
        done, doing = done + count, label
        whole = (time.monotonic() - started) * total / done if done else 0.0

    def tell() -> None:
        while not is_over.wait(LINE_EVERY_S):
            seconds = time.monotonic() - started
            rest = f", about {duration(max(whole, seconds))} in all" if estimates else ""
            line = f"{title}: {amount(done)} of {amount(total)} in {duration(seconds)}"
            line += rest if done else ", nothing is done yet"
            print(visible(f"{line}: {doing}" if doing else line), file=sys.stderr, flush=True)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield advance
    finally:
        is_over.set()
        teller.join()


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, in words."""
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
