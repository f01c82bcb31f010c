"""The report as a running benchmark writes it: whole lines, resumed after a kill, never mixed with another run."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from bitplan.fp8.policy.report import Report, ReportLog
from bitplan.fp8.policy.vocabulary import BenchReportError
from tests.fp8.policy.fp8_samples import H200, series
from tests.processes import Program

ROWS = series({512: 0.8, 4096: 1.2})


def open_log(path, **change):
    given = {"fingerprint": H200, "recipe": "blockwise", "model": "m", "settings": {"iters": 10}} | change
    return ReportLog(path, given.pop("fingerprint"), given.pop("recipe"), **given)


def test_write_resume_finish(tmp_path):
    path = tmp_path / "r.jsonl"
    with open_log(path) as log:
        log.append(ROWS[0])
        log.append(ROWS[1])
    with pytest.raises(BenchReportError, match="unfinished: 2 rows"):
        Report.load(path)
    with open_log(path) as log:
        assert log.rows == ROWS[:2]
        for row in ROWS:
            if row.key not in log.done:
                log.append(row)
        log.finish()
        log.finish()
    assert Report.load(path).rows == tuple(ROWS)
    with open_log(path) as log:
        assert log.finished
        with pytest.raises(BenchReportError, match="finished; a new measurement needs a new file"):
            log.append(ROWS[0])


def test_a_torn_line_is_cut_off_wherever_it_was_torn(tmp_path):
    path = tmp_path / "r.jsonl"
    with open_log(path) as log:
        for row in ROWS:
            log.append(row)
    whole = path.read_bytes()
    ends = [at + 1 for at, byte in enumerate(whole) if byte == 10]
    for size in range(0, len(whole) + 1, 61):
        path.write_bytes(whole[:size])
        with open_log(path) as log:
            assert len(log.rows) == max(sum(end <= size for end in ends) - 1, 0)
            for row in ROWS[len(log.rows) :]:
                log.append(row)
        assert path.read_bytes() == whole


def test_a_row_twice(tmp_path):
    with open_log(tmp_path / "r.jsonl") as log:
        log.append(ROWS[0])
        with pytest.raises(BenchReportError, match="is already there; skip what is in `done`"):
            log.append(ROWS[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fingerprint": replace(H200, gpu="NVIDIA H100")}, "begun with fingerprint .*H200.*, this run has .*H100"),
        ({"recipe": "rowwise"}, 'begun with recipe "blockwise", this run has "rowwise"; use another path'),
        ({"settings": {"iters": 5}}, "begun with settings"),
        ({"model": "other"}, "begun with model"),
    ],
)
def test_another_run_is_refused_and_the_file_stays(tmp_path, change, message):
    path = tmp_path / "r.jsonl"
    open_log(path).close()
    before = path.read_bytes()
    with pytest.raises(BenchReportError, match=message):
        open_log(path, **change)
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", [b"my diary", b"line\nmy diary", b'{"a": 1}\n', b"\n\n"])
def test_a_file_that_is_not_a_report_is_left_as_it_is(tmp_path, text):
    path = tmp_path / "r.jsonl"
    path.write_bytes(text)
    with pytest.raises(BenchReportError):
        open_log(path)
    assert path.read_bytes() == text


def test_a_recipe_that_is_none_is_known_before_the_work(tmp_path):
    with pytest.raises(BenchReportError, match="recipe must be one of"):
        open_log(tmp_path / "r.jsonl", recipe="int8")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_killed_in_the_middle(tmp_path):
    """A process that is killed while it writes leaves whole lines, and the next one goes on."""
    path = tmp_path / "r.jsonl"
    code = (
        "from tests.fp8.policy.test_report_log import open_log\n"
        "from tests.fp8.policy.fp8_samples import series\n"
        f"import itertools\nlog = open_log({str(path)!r})\n"
        "for tokens in itertools.count(1):\n    for row in series({tokens: 1.1}): log.append(row)\n"
    )
    program = Program(code, folder=tmp_path)
    program.wait_until(lambda: path.exists() and path.stat().st_size >= 4096)
    assert program.signal(signal.SIGKILL) == -signal.SIGKILL
    with open_log(path) as log:
        assert log.rows
        log.finish()
    assert list(Report.load(path).rows) == log.rows
