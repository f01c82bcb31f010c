"""`bitplan doctor` from the shell: tables, JSON that a report shows, exit 1 when something needed is broken."""

from __future__ import annotations

import json
import re
from importlib import metadata

import pytest
import typer

from bitplan.cli import run
from bitplan.cli.verbs.doctor import doctor
from bitplan.packed import machine
from bitplan.report import write_report


def is_installed() -> bool:
    try:
        return bool(metadata.requires("bitplan"))
    except metadata.PackageNotFoundError:
        return False


# What bitplan needs is known from its installed metadata.
pytestmark = pytest.mark.skipif(not is_installed(), reason="bitplan runs from its source here; pip install -e .")


@pytest.fixture(autouse=True)
def shell(tmp_path, monkeypatch):
    app = typer.Typer()
    app.command()(doctor)
    app.callback()(lambda: None)
    monkeypatch.setattr("bitplan.cli.app.app", app)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BITPLAN_CACHE_DIR", str(tmp_path / "cache"))


def test_tables(capsys):
    assert run(["doctor", "--no-measure"]) == 0
    out = capsys.readouterr().out
    for message in ("fast paths", "CPU encode and decode (numba)", "measured crossovers", "next: "):
        assert message in out
    assert re.search(r"torch(<2\.\d+,)?>=2", out)


def test_json_is_a_record_that_a_report_shows(tmp_path, capsys):
    assert run(["doctor", "--json", "--no-measure"]) == 0
    text = capsys.readouterr().out
    result = json.loads(text)
    assert result["document"] == "bitplan-machine"
    assert result["versions"]["torch"] == metadata.version("torch")  # a CUDA build adds to torch.__version__
    assert result["bandwidth"] is None
    (tmp_path / "machine.json").write_text(text)
    write_report(["machine.json"], "r.html")
    assert result["machine"]["cpu"] in (tmp_path / "r.html").read_text()


def test_exit_1_when_something_needed_is_broken(monkeypatch, capsys):
    monkeypatch.setattr(machine.importlib.metadata, "requires", lambda _: ["torch>=99", "no-such-thing>=1"])
    assert run(["doctor", "--no-measure"]) == 1
    out = capsys.readouterr().out
    assert "broken: no-such-thing: not installed; pip install 'no-such-thing>=1'" in out
    assert "broken: torch: " in out
    assert "pip install --upgrade 'torch>=99'" in out
