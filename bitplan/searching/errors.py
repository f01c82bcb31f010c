"""What a search refuses."""

from __future__ import annotations

from bitplan.errors import BitplanError, FileFormatError


class SearchError(BitplanError, ValueError):
    """A model, text or set of formats that cannot be searched."""


class GoalError(SearchError):
    """A goal that no plan reaches; the message has the nearest one that some plan does."""


class EvidenceFileError(SearchError, FileFormatError):
    """An evidence file that cannot be read, or is of another model, text, formats or version."""
