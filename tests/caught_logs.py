"""`caplog` as pytest has it, for the tests that ask for it: pytest's own catches what every test logs.

That takes a look at each of some 600 loggers of other libraries, six times a test.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

FORMAT = "%(levelname)-8s %(name)s:%(filename)s:%(lineno)d %(message)s"


class CaughtLogs(logging.Handler):
    """What was logged while a test ran."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(FORMAT))
        self.records: list[logging.LogRecord] = []
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self._lines.append(self.format(record))  # a call with wrong arguments fails here

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        raise

    @property
    def text(self) -> str:
        return "".join(f"{line}\n" for line in self._lines)

    @property
    def messages(self) -> list[str]:
        return [record.getMessage() for record in self.records]

    def clear(self) -> None:
        self.records.clear()
        self._lines.clear()

    @contextmanager
    def at_level(self, level: int | str, logger: str | None = None) -> Iterator[None]:
        """Within the block a logger, or the root, logs from this level on."""
        changed = logging.getLogger(logger)
        before = changed.level
        changed.setLevel(level)
        try:
            yield
        finally:
            changed.setLevel(before)


@pytest.fixture
def caplog() -> Iterator[CaughtLogs]:
    caught = CaughtLogs()
    loggers = [one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger)]
    ends = [logging.root, *(one for one in loggers if not one.propagate)]
    for logger in ends:
        logger.addHandler(caught)
    yield caught
    for logger in ends:
        logger.removeHandler(caught)
