"""`bitplan report` from the shell: a page, JSON, one-line errors."""

from __future__ import annotations

import json

import pytest
import typer

from bitplan.cli import run
from bitplan.cli.verbs.report import report
from bitplan.plan import Choice, Plan
from bitplan.plan.plan import Planned


@pytest.fixture(autouse=True)
def shell(tmp_path, monkeypatch):
    app = typer.Typer()
    app.command()(report)
    app.callback()(lambda: None)
    monkeypatch.setattr("bitplan.cli.app.app", app)
    monkeypatch.chdir(tmp_path)
    Plan({"w": Planned(Choice("mxfp4", "because"), (64, 64), "mlp")}).save("plan.json")


def test_makes_a_page(tmp_path, capsys):
    assert run(["report", "plan.json", "-o", "out.html"]) == 0
    message = capsys.readouterr().out
    assert message.startswith("out.html: ")
    assert message.endswith("1 record: Decisions, Machine and records\n")
    assert "because" in (tmp_path / "out.html").read_text()


def test_a_folder_says_shortly_which_documents_are_no_records(tmp_path, capsys):
    (tmp_path / "evidence.json").write_text('{"document": "bitplan-evidence", "version": 1}')
    (tmp_path / "rules.json").write_text('{"version": 1, "patterns": []}')
    assert run(["report", ".", "-o", "out.html"]) == 0
    assert capsys.readouterr().out.endswith("left out: evidence.json, rules.json: no records of results\n")


def test_as_json_with_a_title_to_the_default_place(tmp_path, capsys):
    assert run(["report", "plan.json", "--title", "My model", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    page = tmp_path / "report.html"
    assert result == {
        "report": "report.html",
        "bytes": page.stat().st_size,
        "records": 1,
        "sections": ["Decisions", "Machine and records"],
    }
    assert "<title>My model</title>" in page.read_text()


def test_errors_are_one_line_and_exit_2(tmp_path, capsys):
    (tmp_path / "other.json").write_text('{"speed": 1}')
    (tmp_path / "bare").mkdir()
    for arguments, message in (
        (["none.json"], "none.json: no such file"),
        (["other.json"], 'other.json: not recognised by its keys ("speed"); expected a record'),
        (["bare"], "bare: holds no record that a page shows"),
        (["plan.json", "-o", "no/such/r.html"], "no/such: no such folder"),
        ([], "Missing argument"),
    ):
        assert run(["report", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert not (tmp_path / "report.html").exists()
