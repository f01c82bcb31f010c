"""A section of the page: its HTML, its lines for the summary, and its key figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bitplan.report.markup import Markup, join, tag
from bitplan.report.read_records import Record


@dataclass(frozen=True)
class Fact:
    """A key figure for the top of the page."""

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


def source(record: Record, more: object = "") -> Markup:
    """Which file this came from."""
    torn = f"; {record.torn} torn line left out" if record.torn == 1 else ""
    torn = f"; {record.torn} torn lines left out" if record.torn > 1 else torn
    sampled = f"; {record.sampled}" if record.sampled else ""
    return tag("p", "From ", tag("code", record.name), f" ({record.label}{torn}{sampled}). ", more, class_="from")


def heading(title: str) -> Markup:
    return tag("h3", title)


def cards(drawn: Sequence[Markup]) -> Markup:
    return tag("div", join(drawn), class_="cards") if drawn else Markup("")


def fold(title: str, content: Markup) -> Markup:
    """Details that are folded away at first."""
    return tag("details", tag("summary", title), content)
