"""A report of a run that goes on, in a real browser."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bitplan.base.errors import BitplanError
from bitplan.cli import run
from bitplan.cli.verbs.report import records_among
from bitplan.report import TrainingLog
from bitplan.report.live import LiveReport

from .browser import Browser


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveReport]:
    with LiveReport(lambda: records_among([tmp_path])[0], title="a run") as result:
        thread = threading.Thread(target=result.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield result
        result.shutdown()
        thread.join()


def answer(server: LiveReport, path: str, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    return response.status, response.read().decode()


LOADED = (  # the first change of the page brings a new document, in which this promise is made again
    "new Promise((done) => { const look = () => document.body.textContent.includes('WHAT') ? done(true) "
    ": setTimeout(look, 20); look(); })"
)


def test_an_open_page_follows_a_run(server: LiveReport, tmp_path: Path) -> None:
    with Browser() as browser:
        page = browser.open(server.address)
        assert page.run(LOADED.replace("WHAT", "No record has been written yet."))
        with TrainingLog(tmp_path / "log.jsonl", run="first") as log:
            log.write(0, 4.25)
            for _ in range(100):  # the page goes away while it is asked: then it is asked again
                try:
                    if page.run(LOADED.replace("WHAT", "4.25")):
                        break
                except RuntimeError:
                    continue
            assert "4.25" in page.run("document.body.textContent")
            assert page.run("document.getElementById('live').textContent") in ("live", "")
        assert not page.problems
        assert {address for address in page.requests if not address.startswith(server.address)} == set()
        page.close()


def test_only_this_machine_by_its_name_is_answered(server: LiveReport, tmp_path: Path) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert answer(server, "/")[0] == 200
    assert answer(server, "/", Host="evil.example")[0] == 403
    assert answer(server, "/stamp", Host=f"localhost:{server.server_port}")[0] == 200
    assert answer(server, "/../log.jsonl")[0] == 404
    before = answer(server, "/stamp")[1]
    with TrainingLog(tmp_path / "log.jsonl", run="first") as log:
        log.write(0, 4.25)
        middle = answer(server, "/stamp")[1]
        log.write(1, 4.0)
    assert len({before, middle, answer(server, "/stamp")[1]}) == 3


def test_a_broken_record_is_shown_as_the_message(server: LiveReport, tmp_path: Path) -> None:
    server.find_records = lambda: [tmp_path / "plan.json"]
    (tmp_path / "plan.json").write_text("{")
    status, page = answer(server, "/")
    assert status == 200
    assert "plan.json" in page


def test_a_port_in_use_and_a_folder_that_is_nowhere(server: LiveReport, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BitplanError, match=rf"port {server.server_port} of 127.0.0.1: .*; give another port, or 0"):
        LiveReport(list, title="", port=server.server_port)
    assert run(["report", "--live", "no/such/folder"]) == 2
    assert "neither it nor its folder exists" in capsys.readouterr().err
