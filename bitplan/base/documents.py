"""Reads JSON documents: every error names the file, the key, what was expected and what was found.

`Reader` checks an object against a table of its keys, `Fields` gives one key after another.

Plain checks instead of pydantic: `plan` loads on hosts without it, and a message here is one line in the words of the
document (`patterns[3]: regex must be ...`), where pydantic's is a paragraph.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

from bitplan.base.errors import BitplanError, FileFormatError, did_you_mean
from bitplan.base.records import read_bytes, read_json

MAX_DOCUMENT_BYTES = 64 * 2**20
MAX_RANK = 64
MAX_NUMBERS = 2**48
MAX_DEPTH = 32
_SHOWN = 80
_MESSAGE = 1000
_REQUIRED: Any = object()
Record = TypeVar("Record")


@dataclass(frozen=True)
class Kind:
    """A kind of value that a document's key may have: its name in error messages, and a test.

    read, write   between a document's value and what a record keeps, where these differ: (reader, path, value) -> kept
    """

    text: str
    holds: Callable[[Any], bool]
    read: Callable[[Reader, str, Any], Any] | None = None
    write: Callable[[Any], Any] | None = None


def is_text(value: Any) -> bool:
    """Whether a value is a string that UTF-8 can hold: JSON can spell half of a surrogate pair, which it cannot."""
    if type(value) is not str:
        return False
    try:
        return value.isascii() or bool(value.encode())
    except UnicodeEncodeError:
        return False


def is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def is_shape(value: Any) -> bool:
    if type(value) not in (list, tuple) or len(value) > MAX_RANK or not all(map(is_size, value)):
        return False
    numbers = 1
    for size in value:
        numbers *= max(size, 1)
    return numbers <= MAX_NUMBERS


def is_json(value: Any, depth: int = 0) -> bool:
    """Whether JSON keeps a value exactly: no NaN, no numpy number, no key that is not a string."""
    if depth > MAX_DEPTH:
        return False
    if value is None or type(value) in (bool, int):
        return True
    if type(value) is float:
        return is_number(value)
    if type(value) is str:
        return is_text(value)
    if isinstance(value, list | tuple):
        return all(is_json(item, depth + 1) for item in value)
    if isinstance(value, Mapping):
        return all(is_text(key) and is_json(item, depth + 1) for key, item in value.items())
    return False


STRING = Kind("a string", lambda value: type(value) is str)
TEXT = Kind("a string of valid Unicode", is_text)
NAME = Kind("a string that is not empty", lambda value: is_text(value) and value != "")
FLAG = Kind("true or false", lambda value: type(value) is bool)
LIST = Kind("a list", lambda value: type(value) is list)
NUMBER = Kind("a finite number", is_number)
OBJECT = Kind("an object", lambda value: type(value) is dict)
SIZE = Kind("an integer from 0 to 2^63 - 1", is_size)
SHAPE = Kind(f"a list of at most {MAX_RANK} sizes from 0, at most 2^48 numbers in all", is_shape)
EVIDENCE = Kind("an object of JSON values without NaN", lambda value: isinstance(value, Mapping) and is_json(value))


def one_of(*values: str) -> Kind:
    return Kind(f"one of {', '.join(map(repr, values))}", lambda value: type(value) is str and value in values)


def list_of(kind: Kind, text: str) -> Kind:
    """The kind "list of values of this kind"; `text` is its name in error messages."""
    return Kind(text, lambda value: type(value) is list and all(map(kind.holds, value)))


def or_null(kind: Kind) -> Kind:
    return Kind(f"{kind.text}, or null", lambda value: value is None or kind.holds(value))


def records(record_type: type, *order: str) -> Kind:
    """A list of records; `order` are keys that are written first."""

    def read(reader: Reader, path: str, values: list[Any]) -> list[Any]:
        return [reader.record(record_type, f"{path}[{index}]", value) for index, value in enumerate(values)]

    return Kind(LIST.text, LIST.holds, read, lambda values: [document_of(value, *order) for value in values])


def records_by_name(record_type: type, *order: str, sort: Callable[[Iterable[str]], Iterable[str]] = iter) -> Kind:
    """An object of names to records; `sort` puts names into the order in which they are written."""

    def read(reader: Reader, path: str, values: dict[str, Any]) -> dict[str, Any]:
        named = ((name, f"{path}[{name[:_SHOWN]!r}]", value) for name, value in values.items())
        return {name: reader.record(record_type, at, value) for name, at, value in named}

    def write(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: document_of(values[name], *order) for name in sort(values)}

    return Kind(OBJECT.text, OBJECT.holds, read, write)


def document_key(
    kind: Kind, default: Any = MISSING, *, factory: Any = MISSING, key: str = "", unwritten: Any = MISSING
) -> Any:
    """A field of a dataclass that is also a key of documents: its kind, and its default or default factory.

    key         its name in documents, where that is another
    unwritten   the value with which it is left out of documents
    """
    metadata = {"kind": kind, "key": key, "unwritten": unwritten}
    return field(default=default, default_factory=factory, metadata=metadata)


def keys_of(dataclass_type: type) -> dict[str, Kind]:
    """The keys of the fields of a dataclass that were made by `document_key`, and their kinds."""
    return {key: one.metadata["kind"] for key, one in _fields_by_key(dataclass_type).items()}


def _fields_by_key(dataclass_type: type) -> dict[str, Field[Any]]:
    return {one.metadata["key"] or one.name: one for one in fields(dataclass_type) if "kind" in one.metadata}


def document_of(value: Any, *order: str) -> dict[str, Any]:
    """A record as an object of its document: keys in this order, then others as they are declared."""
    by_key, document = _fields_by_key(type(value)), {}
    for key in dict.fromkeys((*order, *by_key)):
        one = by_key[key]
        item, write = getattr(value, one.name), one.metadata["kind"].write
        if one.metadata["unwritten"] is MISSING or item != one.metadata["unwritten"]:
            document[key] = item if write is None or item is None else write(item)
    return document


@dataclass(frozen=True)
class Reader:
    """Checks the parts of one document; `where` names the file in every error, `error` is their class.

    A strict reader refuses unknown keys; another ignores them, since other programs may have added them.
    """

    where: str
    error: type[BitplanError]
    strict: bool = True

    def keys(self, path: str, value: Any, kinds: Mapping[str, Kind], required: Iterable[str] = ()) -> dict[str, Any]:
        """The object at `path`; refuses unknown keys, missing required keys, and values of a wrong kind."""
        prefix = f"{path}: " if path else ""
        if type(value) is not dict:
            self.fail(path or "the document", OBJECT.text, value)
        for key, item in value.items():
            if key in kinds:
                if not kinds[key].holds(item):
                    self.fail(prefix + key, kinds[key].text, item)
            elif self.strict:
                self.stop(f"{prefix}unknown key {key[:_SHOWN]!r}{did_you_mean(key[:_SHOWN], kinds)}")
        for key in required:
            if key not in value:
                self.miss(prefix + key, kinds[key].text)
        return value

    def fields_of(self, dataclass_type: type, path: str, value: Any, *, every: bool = False) -> dict[str, Any]:
        """The object at `path`, checked by a dataclass's `document_key` fields; `every`: those with defaults, too."""
        kinds = keys_of(dataclass_type)
        bare = (key for key in fields(dataclass_type) if key.default is key.default_factory is MISSING)
        return self.keys(path, value, kinds, kinds if every else [key.name for key in bare])

    def record(
        self, record_type: type[Record], path: str, value: Any, beside: Mapping[str, Kind] | None = None
    ) -> Record:
        """The record at `path`, of a dataclass with `document_key` fields, and those within it.

        Only keys that are not always written may be missing. `beside` are keys of the object that are no fields.
        """
        beside, by_key = beside or {}, _fields_by_key(record_type)
        required = [key for key, one in by_key.items() if one.metadata["unwritten"] is MISSING]
        self.keys(path, value, {**beside, **keys_of(record_type)}, (*beside, *required))
        values = {}
        for key, one in by_key.items():
            item, read = value.get(key, one.metadata["unwritten"]), one.metadata["kind"].read
            if key in value and item is not None and read is not None:
                item = read(self, f"{path}.{key}" if path else key, item)
            if key in value or one.default is one.default_factory is MISSING:
                values[one.name] = item
        return record_type(**values)

    def require_document(self, document: Any, expected: str, noun: str) -> None:
        """Refuse a file of another kind; checked first, before its keys."""
        if type(document) is dict and document.get("document") != expected:
            came = show(document["document"]) if "document" in document else "nothing"
            self.stop(f"this is no {noun}: document must be {expected!r}, got {came}")

    def version(self, document: Any, expected: int) -> None:
        """Refuse another version; checked before the other keys, which may differ in it."""
        if type(document) is dict and "version" in document:
            version = document["version"]
            if type(version) is not int or version != expected:
                self.stop(f"version must be {expected}, which is what this bitplan reads, got {show(version)}")

    def miss(self, key: str, expected: str) -> NoReturn:
        self.stop(f"{key} is missing; it must be {expected}")

    def fail(self, key: str, expected: str, came: Any) -> NoReturn:
        self.stop(f"{key} must be {expected}, got {show(came)}")

    def stop(self, message: str) -> NoReturn:
        raise self.error(f"{self.where}: {short(message, _MESSAGE)}")


class Fields:
    """An object of a document that is read key by key: a method per type of value, with a default if the key may be
    missing or null. Other keys are ignored.
    """

    error: type[BitplanError] = FileFormatError
    number_kind = NUMBER

    def __init__(self, value: Any, where: str) -> None:
        self.where = where
        if type(value) is not dict:
            raise self.error(f"{where} must be {OBJECT.text}, got {show(value)}")
        self.value: dict[str, Any] = value

    def __contains__(self, key: str) -> bool:
        return self.value.get(key) is not None

    def get(self, key: str, kind: Kind, default: Any = _REQUIRED) -> Any:
        value = self.value.get(key)
        if value is None:
            if default is _REQUIRED:
                Reader(self.where, self.error).miss(_key(key), kind.text)
            return default
        if not kind.holds(value):
            self.fail(key, kind.text, value)
        return value

    def text(self, key: str, default: Any = _REQUIRED) -> str:
        return str(self.get(key, STRING, default))

    def flag(self, key: str, default: Any = _REQUIRED) -> bool:
        return bool(self.get(key, FLAG, default))

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        return self.get(key, self.number_kind, default)

    def whole(self, key: str, default: Any = _REQUIRED) -> Any:
        kind = Kind("a whole number", lambda value: type(value) is int and self.number_kind.holds(value))
        return self.get(key, kind, default)

    def numbers(self, key: str, default: Any = _REQUIRED) -> list[float]:
        numbers: list[float] = self.get(key, list_of(self.number_kind, "a list of numbers"), default)
        return numbers

    def fields(self, key: str, default: Any = _REQUIRED) -> Self:
        return type(self)(self.get(key, OBJECT, default), self._path_of(key))

    def items(self, key: str, default: Any = _REQUIRED) -> Iterator[tuple[str, Self]]:
        """Yield name and value of each object inside the object under `key`."""
        for name, value in self.fields(key, default).value.items():
            yield name, type(self)(value, f"{self._path_of(key)}[{name[:_SHOWN]!r}]")

    def each(self, key: str, default: Any = _REQUIRED) -> Iterator[Self]:
        """Yield each object of the list under `key`."""
        for index, value in enumerate(self.get(key, LIST, default)):
            yield type(self)(value, f"{self._path_of(key)}[{index}]")

    def fail(self, key: str, expected: str, got: Any) -> NoReturn:
        Reader(self.where, self.error).fail(_key(key), expected, got)

    def _path_of(self, key: str) -> str:
        return f"{self.where}: {_key(key)}"


def _key(key: str) -> str:
    """A key from a document, shortened for a message."""
    return key if key.isidentifier() and len(key) <= _SHOWN else show(key)


def short(text: str, limit: int = 120) -> str:
    """Text from a document for a message: on one line, at most `limit` characters."""
    printable = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text[: limit + 1])
    return printable if len(text) <= limit else f"{printable[:limit]}..."


def show(value: Any) -> str:
    """A value as JSON writes it, in a few characters and on one line."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def load_bytes(path: str | Path, error: type[BitplanError], *, max_bytes: int, noun: str = "JSON document") -> bytes:
    """The bytes of a file; any failure to read it is an `error` of one line that names the file."""
    try:
        return read_bytes(path, max_bytes=max_bytes, noun=noun)
    except (OSError, ValueError) as fault:
        raise reading_error(fault, path, error) from None


def load_document(path: str | Path, error: type[BitplanError]) -> Any:
    """The JSON in a file; any failure to read it is an `error` of one line that names the file."""
    try:
        return read_json(path, max_bytes=MAX_DOCUMENT_BYTES)
    except (OSError, ValueError) as fault:
        raise reading_error(fault, path, error) from None


def reading_error(fault: OSError | ValueError, path: str | Path, error: type[BitplanError]) -> BitplanError:
    """A failure to read a file as an `error`; a ValueError that is not ours is of a path with a null character."""
    if isinstance(fault, FileFormatError):
        return fault if isinstance(fault, error) else error(str(fault))
    reason = fault.strerror if isinstance(fault, OSError) else None
    return error(f"{short(str(path))}: cannot be read: {reason or fault}")
