"""Logs grow by whole lines of their own kind, whatever the disk and other people do meanwhile."""

from __future__ import annotations

import errno
import json
import os

import pytest

from bitplan.base.errors import MeasureError, StoreError
from bitplan.base.logs import JsonLog

LINE = {"step": -12, "name": "w"}
TEXT = b'{"step": -12, "name": "w"}\n'


def open_log(path, **options):
    return JsonLog(path, b'{"step": 0, "name": "', noun="drift log", **options)


def append(path):
    with open_log(path) as log:
        log.write_lines(LINE)


def fill_disk(monkeypatch, after=7):
    """Takes a few bytes and no more."""
    real, left = os.write, [after]

    def write(file, data):
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = real(file, data[: left[0]])
        left[0] -= taken
        return taken

    monkeypatch.setattr(os, "write", write)


def test_a_log_takes_lines_of_its_own_kind_only(tmp_path):
    path = tmp_path / "log"
    append(path)
    append(path)
    assert path.read_bytes() == 2 * TEXT
    for torn in range(1, len(TEXT)):
        path.write_bytes(TEXT + TEXT[:torn])
        append(path)
        assert path.read_bytes() == 2 * TEXT
        path.write_bytes(TEXT[:torn])
        append(path)
        assert path.read_bytes() == TEXT
    for other in (b"\x88\0\0\0\0\0\0\0{}", b'{"step": 1, "step_ms": 2.5}\n', b"text", b"\n"):
        path.write_bytes(other)
        with pytest.raises(StoreError, match="log: exists and is not a drift log; nothing was appended"):
            append(path)
        assert path.read_bytes() == other


def test_the_head_is_written_once(tmp_path):
    head = {"step": 0, "name": "the head"}
    for _ in range(2):
        with open_log(tmp_path / "log", head=head) as log:
            log.write_lines(LINE)
    assert [json.loads(line)["name"] for line in (tmp_path / "log").read_text().splitlines()] == ["the head", "w", "w"]


def test_a_call_is_one_write_and_short_writes_are_continued(tmp_path, monkeypatch):
    real, sizes = os.write, []
    with open_log(tmp_path / "log") as log:
        monkeypatch.setattr(os, "write", lambda file, data: sizes.append(len(data)) or real(file, data))
        log.write_lines(LINE, LINE)
        assert sizes == [2 * len(TEXT)]
        monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:7]))
        log.write_lines(LINE)
        assert (tmp_path / "log").read_bytes() == 3 * TEXT  # before it is closed


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    with open_log(tmp_path / "log") as log:
        log.write_lines(LINE)
        fill_disk(monkeypatch)
        with pytest.raises(StoreError, match=r"log: 27 bytes could not be appended \(No space left.*; free some space"):
            log.write_lines(LINE)
        monkeypatch.undo()
        log.write_lines(LINE)
    assert (tmp_path / "log").read_bytes() == 2 * TEXT


def test_a_run_that_must_go_on_counts_what_it_loses(tmp_path, monkeypatch, caplog):
    with open_log(tmp_path / "log", may_lose_lines=True) as log:
        fill_disk(monkeypatch)
        log.write_lines(LINE, LINE)
        log.write_lines(LINE)
        monkeypatch.undo()
        log.write_lines(LINE)
        assert (tmp_path / "log").read_bytes() == TEXT
        (tmp_path / "log").unlink()
        log.write_lines(LINE)
        assert log.lost_lines == 3
    assert (tmp_path / "log").read_bytes() == TEXT
    assert [record.message.split("; ")[-1] for record in caplog.records] == ["telemetry is being lost, the run goes on"]


def test_errors_are_of_the_class_that_was_given(tmp_path):
    log = open_log(tmp_path / "log", error=MeasureError)
    (tmp_path / "log").unlink()
    with pytest.raises(MeasureError, match="log: the drift log was deleted while it was open"):
        log.write_lines(LINE)
    log.close()
    log.close()
    with pytest.raises(MeasureError, match="the drift log is closed; open it again"):
        log.write_lines(LINE)
    with pytest.raises(MeasureError, match="log: the drift log cannot be written: no such folder; give a file in"):
        open_log(tmp_path / "no" / "log", error=MeasureError)
    with pytest.raises(MeasureError, match="is a folder"):
        open_log(tmp_path, error=MeasureError)
