"""Names come from files, and files from strangers: no name acts on the terminal, and tables fit 80 columns."""

from __future__ import annotations

import json
import re
import time

import pytest
import safetensors.torch
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bitplan.base.errors import visible
from bitplan.cli import run, show
from bitplan.cli.show import columns_of, share_width, split_columns, wrap
from tests.crosses import few

HOSTILE = "\x1b]0;owned\x07\x9b31m\x7f\u202eevil\u2066[red]x[/red][/] [link=x]\r\n.weight"
SHOWN = r"\x1b]0;owned\x07\x9b31m\x7f\u202eevil\u2066[red]x[/red][/] [link=x]\r\n.weight"
LONG = "model.layers.10.self_attn.q_proj.weight"
NEVER = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
VERBS = {
    "inspect": ["inspect", "m.safetensors"],
    "quantize": ["quantize", "m.safetensors", "out.safetensors", "-f", "int8_row", "--force"],
    "compare": ["compare", "m.safetensors", "p.safetensors"],
    "compare --scales": ["compare", "--scales", "m.safetensors", "p.safetensors"],
    "check": ["check", "rules.json", "m.safetensors", "--deep"],
    "findings": ["check", "gpt-oss", "m.safetensors"],
    "plan": ["plan", "rules.json", "m.safetensors"],
    "inspect --tensor": ["inspect", "m.safetensors", "--tensor", HOSTILE],
    "gpt-oss convert": ["gpt-oss", "convert", "m.safetensors", "c.gguf", "--to", "gguf"],
}
BESIDE = {
    "mermaid": ["plan", "rules.json", "m.safetensors", "--mermaid"],
    "file": ["inspect", HOSTILE],
    "manifest": ["plan", HOSTILE, "m.safetensors"],
    "format": ["quantize", "m.safetensors", "out.safetensors", "-f", HOSTILE],
    "option": ["inspect", "m.safetensors", f"--{HOSTILE}"],
    "verb": [HOSTILE],
    "output": ["quantize", "m.safetensors", f"no{HOSTILE}/x.safetensors", "-f", "int8_row"],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("names")
    generator = torch.Generator().manual_seed(0)
    names = [HOSTILE, LONG, "a" * 90 + ".weight", "block.0.attn.qkv.weight"]
    tensors = {name: torch.randn(4, 64, generator=generator) for name in names}
    safetensors.torch.save_file(tensors, folder / "m.safetensors")
    rules = [{"regex": "(.|\\n)*", "format": "mxfp4", "role": HOSTILE[:20]}]
    (folder / "rules.json").write_text(json.dumps({"version": 1, "patterns": rules}))
    assert run(["quantize", str(folder / "m.safetensors"), str(folder / "p.safetensors"), "-f", "mxfp4"]) == 0
    return folder


@pytest.fixture(autouse=True)
def here(files, monkeypatch):
    monkeypatch.chdir(files)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("case", few([*VERBS, *BESIDE], 8))
def test_a_name_cannot_act_on_the_terminal(case, capsys):
    for more in ([], ["--json"]):
        assert run([*({**VERBS, **BESIDE}[case]), *more]) in (0, 1, 2)
        message = capsys.readouterr()
        assert message.out or message.err
        assert not NEVER.search(message.out + message.err)


def test_names_are_shown_literally_and_come_back_from_json(capsys):
    assert visible(HOSTILE) == SHOWN
    assert visible(LONG) is LONG
    assert run(["inspect", "m.safetensors", "--json"]) == 0
    assert HOSTILE in [row["name"] for row in json.loads(capsys.readouterr().out)["tensors"]]
    assert run(["inspect", "m.safetensors"]) == 0
    assert "[red]x[/red][/]" in capsys.readouterr().out


@pytest.mark.parametrize("case", VERBS)
def test_tables_fit_80_columns_and_divide_no_word(case, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "2000")
    run(VERBS[case])
    wide = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "80")
    run(VERBS[case])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    lines = [line for line in lines if not line.startswith("a wider terminal")]
    words = set(re.findall(r"[^\s│┃/.:\\]+", wide))  # between the places where a name may end a line
    for word in re.findall(r"[^\s│┃/.:\\]+", "\n".join(line for line in lines if "━" not in line and "─" not in line)):
        assert word in words or "…" in word, word


def test_a_table_that_is_too_wide_comes_in_parts(capsys):
    show.table("wide", [{"name": LONG, **{f"column_{letter}": "1234567.25" for letter in "abcdefgh"}}])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert out.count("weight") == 2
    assert out.count("1234567.25") == 8
    figures = {f"column_{letter}": "1234567.25" for letter in "abcdef"}
    show.table("wide", [{"part": "llm", "size": f"tp {size}", **figures, "note": ""} for size in (1, 2)])
    out = capsys.readouterr().out
    assert out.count("tp 2") == 2  # what tells the rows apart comes again
    assert out.count("llm") == 2
    assert "note" not in out


def test_columns_that_few_need_are_left_out_before_a_table_is_divided(capsys):
    rows = [{"name": LONG, **{f"column_{letter}": "1234567.25" for letter in "abcdefg"}}]
    show.table("wide", rows, extra=("column_f", "column_b", "column_c"))
    out = capsys.readouterr().out
    assert out.count("1234567.25") == 5
    assert "column f" in out.split("a wider terminal")[0]
    assert out.endswith("a wider terminal and --json also show: column b, column c\n")
    show.table("narrow", [{"name": "short", "figure": "1"}], extra=("figure",))
    assert "figure" in capsys.readouterr().out


def test_where_a_line_may_end():
    assert wrap("at most 0.00012 of model.layers.10.self_attn.q_proj.weight", 20).split("\n") == [
        "at most 0.00012 of",
        "model.layers.10.",
        "self_attn.q_proj.",
        "weight",
    ]
    assert wrap("a" * 40, 11) == "aaaaa…aaaaa"


def test_work_without_a_terminal_says_how_far_it_is(capsys, monkeypatch):
    monkeypatch.setattr(show, "LINE_EVERY_S", 0.02)
    with show.progress("packing", 4, amount=lambda count: f"{count} files") as advance:
        advance(1, HOSTILE)
        last, printed = time.monotonic() + 300, ""
        while "packing: 1 files" not in printed.rpartition("\n")[0] and time.monotonic() < last:  # a thread prints it
            time.sleep(0.01)
            message = capsys.readouterr()
            assert message.out == ""
            printed += message.err
    line = printed.rpartition("\n")[0].splitlines()[-1]  # on a busy machine the first may come before the file
    assert re.match(r"packing: 1 files of 4 files in \d+ s, about \d+ s in all: ", line)
    assert SHOWN in line
    assert not NEVER.search(printed)


def test_a_bar_shows_names_literally(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    with show.progress("packing", 4) as advance:
        advance(1, HOSTILE)
    message = capsys.readouterr().err
    assert SHOWN[-40:] in message
    assert "\x1b]0;" not in message


@pytest.mark.parametrize("seconds", [3, 75, 7500])
def test_durations(seconds):
    assert show.duration(seconds) == {3: "3 s", 75: "1 min 15 s", 7500: "2 h 5 min"}[seconds]


@pytest.mark.parametrize("width", ["60", "100"])
def test_tables_are_those_of_rich(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", width)
    rows = [
        {"name": f"layer.{n}", "bytes": str(10**n), "why": "a reason " * n, "text": "\u4e2d\u6587"} for n in range(4)
    ]
    show.table("title", rows)
    printed = capsys.readouterr().out
    console = Console(width=int(width))
    console.print("title")
    for columns in split_columns(columns_of(rows), int(width)):
        widths = share_width(columns, int(width))
        drawn = Table()
        for column, size in zip(columns, widths, strict=True):
            side = "right" if column.is_number else "left"
            drawn.add_column(Text(wrap(column.header, size)), justify=side, width=size, no_wrap=True)
        for cells in zip(*(column.cells for column in columns), strict=True):
            drawn.add_row(*(Text(wrap(cell, size)) for cell, size in zip(cells, widths, strict=True)))
        console.print(drawn, crop=False)
    assert printed == capsys.readouterr().out
