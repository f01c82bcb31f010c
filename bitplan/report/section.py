"""A section of the page: its HTML, its lines for the summary, its key figures, and its tables.

Tables are complete in the HTML, so that they can be printed and read without a script; the script sorts and filters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bitplan.report.markup import NONE, Markup, count, join, plural, tag
from bitplan.report.read_records import Record


@dataclass(frozen=True)
class Fact:
    """A key figure at the top of the page: what it is, its value, a note."""

    value: str
    label: str
    note: str = ""


@dataclass(frozen=True)
class Section:
    """`anchor` is the link to it, `body` its HTML, `summary` its sentences at the top of the page."""

    anchor: str
    title: str
    body: Markup
    summary: tuple[object, ...] = ()
    facts: tuple[Fact, ...] = ()
    lead: str = ""  # one sentence: what was decided, how much smaller or faster that is, and at what cost


def one_by_one(
    anchor: str,
    title: str,
    records: Sequence[Record],
    draw: Callable[[Record], tuple[Markup, object, Sequence[Fact]]],
    lead: str = "",
) -> Section:
    """A section with a part for each record; the key figures of several would contradict each other."""
    parts = [draw(record) for record in records]
    bodies = [join([heading(record.name), part[0]]) for record, part in zip(records, parts, strict=True)]
    if len(parts) == 1:
        return Section(anchor, title, parts[0][0], tuple(filter(None, [parts[0][1]])), tuple(parts[0][2]), lead)
    return Section(anchor, title, join(bodies), tuple(filter(None, (part[1] for part in parts))))


def told(record: Record, sentence: object) -> Markup:
    """A sentence for the page's summary, followed by the name of the file that it comes from."""
    return join([sentence, " (", tag("code", record.name), ")"])


def source(record: Record, more: object = "") -> Markup:
    """The line of a part that names the file it came from."""
    torn = f"; {record.torn} torn line left out" if record.torn == 1 else ""
    torn = f"; {record.torn} torn lines left out" if record.torn > 1 else torn
    sampled = f"; {record.sampled}" if record.sampled else ""
    return tag("p", "From ", tag("code", record.name), f" ({record.label}{torn}{sampled}). ", more, class_="from")


def heading(title: str) -> Markup:
    return tag("h3", title)


def cards(drawn: Sequence[Markup]) -> Markup:
    return tag("div", join(drawn), class_="cards") if drawn else Markup("")


def fold(title: str, content: Markup) -> Markup:
    """HTML with details that the reader unfolds by a click on the title."""
    return tag("details", tag("summary", title), content)


MAX_ROWS = 20_000  # of a table: a phone cannot show more
SEARCH_FROM, FOLD_FROM = 13, 40  # rows


@dataclass(frozen=True)
class Cell:
    """What is shown, the number to sort by, and its text if `shown` is an element."""

    shown: object
    number: float | None = None
    word: str = ""


@dataclass(frozen=True)
class Column:
    title: str
    numeric: bool = False
    wide: bool = False  # long text: wraps, and gets the remaining width
    mono: bool = False
    choose: bool = False  # few values: a list to choose from


Row = Sequence[Cell | str]


def table(title: str, columns: Sequence[Column], rows: Sequence[Row], *, folds: bool = True) -> Markup:
    """A sortable table with a caption; searchable when it is long, and then folded away at first."""
    head = tag("tr", *(_heading(column) for column in columns))
    body = join(
        tag("tr", *(_cell(column, cell) for column, cell in zip(columns, row, strict=True))) for row in rows[:MAX_ROWS]
    )
    inner = tag("table", tag("caption", title, class_="unseen"), tag("thead", head), tag("tbody", body))
    left_out = len(rows) - MAX_ROWS
    note = tag("p", f"The first {count(MAX_ROWS)} rows; {count(left_out)} more are in the file.", class_="note")
    tools = _tools(title, columns, rows) if len(rows) >= SEARCH_FROM else Markup("")
    region = tag("div", inner, class_="scroll rows", role="region", tabindex="0", aria_label=title)
    empty = tag("p", "No row matches.", class_="note", data_empty=True, hidden=True)
    more = tag("button", "Show all rows", type="button", class_="more", data_more=True, hidden=True)
    drawn = tag("div", tools, region, empty, more, note if left_out > 0 else "", class_="table", data_table=True)
    return fold(f"{title[:1].upper()}{title[1:]}", drawn) if folds and len(rows) >= FOLD_FROM else drawn


def column_table(title: str, *columns: tuple[Column, Sequence[Cell | str]], folds: bool = True) -> Markup:
    """Draw a table from columns, each with its cells."""
    rows = list(zip(*(cells for _, cells in columns), strict=True))
    return table(title, [column for column, _ in columns], rows, folds=folds)


def figure(value: float | None, write: Callable[[float], str]) -> Cell:
    """A number as text, sorted by its value; a dash where there is none."""
    return Cell(NONE) if value is None else Cell(write(value), value)


def _heading(column: Column) -> Markup:
    button = tag("button", column.title, tag("i", class_="arrow", aria_hidden="true"), type="button")
    return tag("th", button, scope="col", class_="n" if column.numeric else None, aria_sort="none")


def _cell(column: Column, cell: Cell | str) -> Markup:
    shown_cell = cell if isinstance(cell, Cell) else Cell(cell)
    kinds = [name for name, on in (("n", column.numeric), ("long", column.wide), ("mono", column.mono)) if on]
    number = None if shown_cell.number is None else repr(shown_cell.number)
    return tag(
        "td",
        breakable(shown_cell.shown) if column.mono else shown_cell.shown,
        class_=" ".join(kinds) or None,
        data_v=number,
    )


def breakable(name: object) -> Markup:
    """A long name that may be broken after its dots, where there is little room."""
    return name if isinstance(name, Markup) else join(str(name).split("."), f".{tag('wbr')}")


def _tools(title: str, columns: Sequence[Column], rows: Sequence[Row]) -> Markup:
    """Make a table's search field and lists of choices; they need the script, so they are hidden until it runs."""
    search = tag(
        "label",
        tag("span", f"Search {title}", class_="unseen"),
        tag("input", type="search", placeholder="Search: words in any column", autocomplete="off", spellcheck="false"),
    )
    lists = [_choices(index, column, rows) for index, column in enumerate(columns) if column.choose]
    count = tag("output", plural(len(rows), "row"), aria_live="polite")
    return tag("div", search, *lists, count, class_="tools", hidden=True)


def _choices(index: int, column: Column, rows: Sequence[Row]) -> Markup:
    words = {cell if isinstance(cell, str) else cell.word or str(cell.shown) for cell in (row[index] for row in rows)}
    options = [tag("option", f"any {column.title.lower()}", value="")]
    options += [tag("option", word) for word in sorted(words) if word]
    return tag("label", tag("span", column.title, class_="unseen"), tag("select", *options, data_column=str(index)))
