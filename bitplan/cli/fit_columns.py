"""Cells that fit their column: lines break between words, in names after a dot, and never within a number."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len

WHOLE_WORD = 16  # a word of up to this length is never divided: formats, figures, roles
WHOLE_CELL = 10  # a cell of up to this length is never divided: "26.11 kB", "12 of 96"
LONGEST_PIECE = 24  # a piece of a name that is longer loses its middle
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
    """The keys of the first row are the columns."""
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
        if not any(each is column for each in tables[-1]):
            tables[-1].append(column)
    return tables


def _telling_apart(columns: Sequence[TextColumn], width: int) -> list[TextColumn]:
    """As many columns, from the first, as make all rows differ; only the first if those are too wide."""
    chosen: list[TextColumn] = []
    for column in columns:
        if len(set(column.cells)) > 1:
            chosen.append(column)
            if len(set(zip(*(each.cells for each in chosen), strict=True))) == len(column.cells):
                break
    return chosen if chosen and _width_of(chosen) <= width // 2 else [columns[0]]


def share_width(columns: Sequence[TextColumn], width: int) -> list[int]:
    """A width for each column: first the least, then more for names and figures, then for sentences."""
    given = [column.least for column in columns]
    spare = width - _outer(len(columns)) - sum(given)
    for at in sorted(range(len(columns)), key=lambda at: columns[at].is_text):
        more = max(0, min(spare, columns[at].natural - given[at]))
        given[at] += more
        spare -= more
    return given


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
    """A name that is too long, without its middle."""
    if cell_len(name) <= width:
        return name
    head, tail = (width - 1) // 2, width - 1 - (width - 1) // 2
    while head + tail > 2 and cell_len(name[:head]) + cell_len(name[-tail:]) + 1 > width:  # letters of two cells
        head, tail = max(1, head - 1), max(1, tail - 1)
    return f"{name[:head]}…{name[-tail:]}"


def _pieces(word: str) -> list[str]:
    """Where a name may be divided; a figure such as 0.25 is one piece."""
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
