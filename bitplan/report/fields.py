"""One JSON object of a record, read key by key; what is wrong is said with file, place, key, expected and got.

The report reads what other parts wrote and imports none of them, so it checks only what it shows. It does not refuse
keys it does not know: a newer writer may say more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NoReturn

from bitplan.errors import FileFormatError

_SHOWN = 80
LARGEST = 1e30
_REQUIRED: Any = object()


class ReportError(FileFormatError):
    """A record that cannot be shown: not one of ours, or broken."""


class Fields:
    """An object and where it is; a method per type of value, with a default where the key may be missing or null."""

    def __init__(self, value: Any, where: str) -> None:
        self.where = where
        if not isinstance(value, dict):
            self.fail("", "an object", value)
        self.value: dict[str, Any] = value

    def __contains__(self, key: str) -> bool:
        return self.value.get(key) is not None

    def text(self, key: str, default: Any = _REQUIRED) -> str:
        return str(self._get(key, "a string", lambda value: isinstance(value, str), default))

    def flag(self, key: str, default: Any = _REQUIRED) -> bool:
        return bool(self._get(key, "true or false", lambda value: isinstance(value, bool), default))

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        return self._get(key, "a number", is_number, default)

    def whole(self, key: str, default: Any = _REQUIRED) -> Any:
        return self._get(key, "a whole number", lambda value: is_number(value) and isinstance(value, int), default)

    def numbers(self, key: str, default: Any = _REQUIRED) -> list[float]:
        result: list[float] = self._get(
            key, "a list of numbers", lambda value: isinstance(value, list) and all(map(is_number, value)), default
        )
        return result

    def fields(self, key: str, default: Any = _REQUIRED) -> Fields:
        return Fields(self._get(key, "an object", lambda value: isinstance(value, dict), default), self._place(key))

    def items(self, key: str, default: Any = _REQUIRED) -> Iterator[tuple[str, Fields]]:
        """The objects in an object, by name."""
        for name, value in self.fields(key, default).value.items():
            yield name, Fields(value, f"{self._place(key)}[{name[:_SHOWN]!r}]")

    def each(self, key: str, default: Any = _REQUIRED) -> Iterator[Fields]:
        """The objects in a list."""
        result = self._get(key, "a list", lambda value: isinstance(value, list), default)
        for index, value in enumerate(result):
            yield Fields(value, f"{self._place(key)}[{index}]")

    def fail(self, key: str, expected: str, got: Any) -> NoReturn:
        place = self._place(key) if key else self.where
        raise ReportError(f"{place} must be {expected}, got {shown(got)}")

    def _place(self, key: str) -> str:
        return f"{self.where}: {key if key.isidentifier() and len(key) <= _SHOWN else shown(key)}"

    def _get(self, key: str, expected: str, holds: Any, default: Any) -> Any:
        result = self.value.get(key)
        if result is None:
            if default is _REQUIRED:
                raise ReportError(f"{self._place(key)} is missing; it must be {expected}")
            return default
        if not holds(result):
            self.fail(key, expected, result)
        return result


def is_number(value: Any) -> bool:
    """A number that can be drawn: finite, and far from where floats end, so that sums and ranges are finite too."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def shown(value: Any) -> str:
    """A value for a message: short, on one line."""
    try:
        text = json.dumps(value, ensure_ascii=True)
    except RecursionError:  # the parser goes a little deeper than the writer
        text = f"a deeply nested {'list' if isinstance(value, list) else 'object'}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
