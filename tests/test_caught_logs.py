"""What a test sees of what was logged while it ran."""

from __future__ import annotations

import logging

import pytest

from tests.caught_logs import CaughtLogs

LOGGER = logging.getLogger("tests.of_caught_logs")


def test_records_are_caught_from_the_level_that_is_asked_for(caplog: CaughtLogs):
    LOGGER.info("too quiet")
    LOGGER.warning("%d loud", 1)
    with caplog.at_level("INFO", LOGGER.name):
        LOGGER.info("quiet")
    LOGGER.info("too quiet again")
    assert caplog.messages == ["1 loud", "quiet"]
    assert caplog.text.splitlines()[0].startswith(f"WARNING  {LOGGER.name}:test_caught_logs.py:")
    caplog.clear()
    assert (caplog.records, caplog.text) == ([], "")


def test_a_logger_that_passes_nothing_on_is_heard(monkeypatch, request):
    monkeypatch.setattr(LOGGER, "propagate", False)
    caught = request.getfixturevalue("caplog")
    LOGGER.warning("alone")
    assert caught.messages == ["alone"]


def test_a_call_with_wrong_arguments_fails(caplog: CaughtLogs):
    with pytest.raises(TypeError):
        LOGGER.warning("%d and %d", 1)
    assert len(caplog.records) == 1
