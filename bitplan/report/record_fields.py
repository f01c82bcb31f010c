"""One JSON object of a record, read key by key.

The report reads the files of other parts and imports none of them, so it checks only what it shows, and accepts unknown
keys: a newer writer may have more of them.
"""

from __future__ import annotations

from typing import Any

from bitplan.documents import Fields, Kind
from bitplan.errors import FileFormatError

LARGEST = 1e30


class ReportError(FileFormatError):
    """A record that cannot be shown: not one of ours, or broken."""


def is_number(value: Any) -> bool:
    """A number that can be drawn: finite, and far below the largest float, so that sums and ranges are finite too."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


class RecordFields(Fields):
    error = ReportError
    number_kind = Kind("a number", is_number)
