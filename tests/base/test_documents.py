"""Records that declare their document: what is written is read back, and what is wrong is named by its path."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from bitplan.base.documents import (
    NAME,
    NUMBER,
    SIZE,
    Kind,
    Reader,
    document_key,
    document_of,
    keys_of,
    records,
    records_by_name,
)
from bitplan.base.errors import FileFormatError

READER = Reader("shelf.json", FileFormatError)
WIDTHS = Kind("a list", lambda value: type(value) is list, lambda _reader, _path, value: tuple(value), list)


@dataclass(frozen=True)
class Book:
    title: str = document_key(NAME)
    nbytes: int = document_key(SIZE, key="bytes")
    widths: tuple[int, ...] = document_key(WIDTHS, (), unwritten=())
    price: float | None = document_key(NUMBER, None, unwritten=None)
    seen: int = 0  # in memory alone


@dataclass(frozen=True)
class Shelf:
    books: list[Book] = document_key(records(Book, "bytes"))
    named: dict[str, Book] = document_key(records_by_name(Book, sort=sorted), factory=dict)


def book(title: str = "a", **more: object) -> dict[str, object]:
    return {"title": title, "bytes": 3, **more}


def test_what_is_written_is_read_back() -> None:
    shelf = Shelf([Book("a", 3, seen=7)], {"z": Book("z", 0, (1, 2), 0.5), "b": Book("b", 1)})
    document = document_of(shelf)
    assert document == {
        "books": [book()],
        "named": {"b": {"title": "b", "bytes": 1}, "z": {"title": "z", "bytes": 0, "widths": [1, 2], "price": 0.5}},
    }
    assert list(document["books"][0]) == ["bytes", "title"]
    assert list(document["named"]) == ["b", "z"]
    assert READER.record(Shelf, "", document) == Shelf([Book("a", 3)], shelf.named)
    assert list(keys_of(Book)) == ["title", "bytes", "widths", "price"]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "the document must be an object, got \\[\\]"),
        ({"books": []}, "named is missing"),  # it has a default, and is always written
        ({"books": [], "named": {}, "odd": 1}, "unknown key 'odd'"),
        ({"books": [book(), {"title": "b"}], "named": {}}, r"books\[1\]: bytes is missing"),
        ({"books": [], "named": {"x": book(bytes=-1)}}, r"named\['x'\]: bytes must be an integer from 0"),
        ({"books": [], "named": {"x": 1}}, r"named\['x'\] must be an object, got 1"),
        ({"books": [book(widths={})], "named": {}}, r"books\[0\]: widths must be a list"),
        ({"books": [book(seen=1)], "named": {}}, r"books\[0\]: unknown key 'seen'"),
    ],
)
def test_what_is_wrong_is_named_by_its_path(document: object, message: str) -> None:
    with pytest.raises(FileFormatError, match=f"shelf.json: {message}"):
        READER.record(Shelf, "", document)


def test_keys_beside_the_fields_are_checked_and_left() -> None:
    document = {"version": 1, **book()}
    assert READER.record(Book, "", document, {"version": SIZE}) == Book("a", 3)
    with pytest.raises(FileFormatError, match="version is missing"):
        READER.record(Book, "", book(), {"version": SIZE})
