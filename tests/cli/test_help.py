"""The command line as one product: every verb says what it is for, and its example works as typed."""

from __future__ import annotations

import json
import re
import shlex
import shutil

import pytest
import typer
from rich.text import Text
from typer.core import TyperOption

from bitplan.cli import run
from bitplan.cli.app import OLD_VERBS, VERBS, app
from tests.cli.verbs.test_perplexity_verb import save_llama
from tests.crosses import few
from tests.fp8.policy.fp8_samples import report, series

PANELS = ["Measure", "Plan", "Apply", "Run", "Look"]
EXAMPLE = re.compile(r"Example: bitplan (.+)")
WRITES = {"plan": "plan.json", "quantize": "model.mxfp4.safetensors", "fp8 merge": "policy.json"}


def commands(group, path=()):
    """Every verb with its click command, through groups."""
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


ALL = dict(commands(typer.main.get_command(app)))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """The files that the examples name."""
    folder = tmp_path_factory.mktemp("help")
    save_llama(folder / "llama", blocks=1)
    shutil.copy(folder / "llama" / "model.safetensors", folder / "model.safetensors")
    shutil.copy(folder / "llama" / "config.json", folder / "config.json")
    (folder / "text.txt").write_text(" ".join(["abandon hope all ye who enter here"] * 40))
    (folder / "raw.json").write_text(json.dumps({"block.[i].mlp.weight": "mxfp4"}))
    for name, tp in (("tp1.json", 1), ("tp2.json", 2)):
        report(series({1024: 0.8, 4096: 1.4, 16384: 1.5}, tp=tp)).save(folder / name)
    at = str(folder)
    small = ["--layers", "1", "--expert-count", "2", "--hidden", "64", "--intermediate", "64"]
    assert run(["gpt-oss", "make", f"{at}/gpt-oss-20b", "--to", "hf", *small]) == 0
    packed = f"{at}/model.mxfp4.safetensors"
    assert run(["quantize", f"{at}/model.safetensors", packed, "--format", "mxfp4", "--keep", "*norm*"]) == 0
    assert run(["plan", "llama", f"{at}/model.safetensors", "-o", f"{at}/plan.json"]) == 0
    assert run(["quantize", f"{at}/llama", f"{at}/packed", "--format", "int8_row"]) == 0
    assert run(["plan", f"{at}/model.safetensors", "--format", "int8_row", "-o", f"{at}/other.json"]) == 0
    assert run(["compare", "--scales", f"{at}/model.safetensors", packed, "--jsonl", f"{at}/drift.jsonl"]) == 0
    assert run(["fp8", "merge", "--reports", f"{at}/tp1.json", f"{at}/tp2.json", "--output", f"{at}/policy.json"]) == 0
    return folder


def test_verbs_are_grouped_by_what_they_are_for(capsys):
    assert list(VERBS) == PANELS
    assert run(["--help"]) == 0
    message = capsys.readouterr().out
    assert re.findall(r"╭─ (\w+) ─", message)[1:] == PANELS
    for name in ALL:
        assert f" {name.split()[0]} " in message
    assert len([name for name in ALL if " " not in name]) == 15
    assert {name.split()[0] for name in ALL if " " in name} == {"fp8", "gpt-oss", "manifest"}


@pytest.mark.parametrize("old", OLD_VERBS)
def test_an_old_verb_works_with_a_warning_and_is_not_in_the_help(old, capsys):
    assert run([old, "--no-such-option"]) == 2
    assert "No such option" in capsys.readouterr().err
    assert run(["--help"]) == 0
    assert f"│ {old} " not in capsys.readouterr().out


def test_the_warning_names_the_new_verb(capsys):
    assert run(["formats"]) == 0
    shown = capsys.readouterr()
    assert "mxfp4" in shown.out
    assert shown.err == "bitplan: warning: `formats` is `bitplan inspect` now; the next version has no `formats`\n"


@pytest.mark.parametrize(
    "name", [*sorted(set(ALL) - {"fit", "search"}), pytest.param("search", marks=pytest.mark.long)]
)
def test_the_example_works_as_typed(name, prepared, tmp_path, monkeypatch, capsys):
    result = EXAMPLE.search(" ".join((ALL[name].help or "").split()))
    assert result, f"{name}: its help has no example"
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    words = shlex.split(result[1])
    assert words[: len(name.split())] == name.split()
    for made in ("small", "model.gguf"):
        assert not (tmp_path / made).exists()
    if name in WRITES:
        (tmp_path / WRITES[name]).unlink()
    # The policy here is of another model.
    message = ("Exit 1 when there are findings", "Exit 1 too when the policy knows none")
    fine = (0, 1) if any(each in (ALL[name].help or "") for each in message) else (0,)
    assert run(words) in fine, capsys.readouterr().err


@pytest.mark.parametrize(
    "name", few(sorted(set(ALL) - {"bench", "fp8 bench", "fp8 confirm", "fit", "judge", "search"}), 8)
)  # test it themselves
def test_with_json_standard_output_is_one_document(name, prepared, tmp_path, monkeypatch, capsys):
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    words = shlex.split(EXAMPLE.search(" ".join((ALL[name].help or "").split()))[1])
    if name in WRITES:
        (tmp_path / WRITES[name]).unlink()
    assert run([*words, "--json"]) in (0, 1)
    json.loads(capsys.readouterr().out)
    assert run([name.split()[0], "--no-such-option", "--json"]) == 2
    message = capsys.readouterr()
    assert message.out == ""
    assert message.err.startswith("bitplan: ")


def test_bare_bitplan_shows_the_help(capsys):
    for arguments in ([], ["manifest"]):
        assert run(arguments) in (0, 2)
        message = capsys.readouterr()
        assert "Usage: bitplan" in message.out
        assert message.err == ""


@pytest.mark.parametrize("name", sorted(ALL))
def test_options_are_named_alike(name):
    options = {option for parameter in ALL[name].params for option in parameter.opts if option.startswith("-")}
    assert "--json" in options
    for short, long in (("-o", ("--output", "--report")), ("-f", ("--format",))):
        assert short not in options or options & set(long)


def test_a_typo_gets_a_suggestion(capsys):
    assert run(["chekc"]) == 2
    assert "'check'" in capsys.readouterr().err
    assert run(["watch", "folder"]) == 2
    assert "'watch'; `bitplan report RUN --live` shows" in capsys.readouterr().err
    assert run(["fp8", "zzz"]) == 2
    assert "'zzz'; there are bench, merge, explain, confirm\n" in capsys.readouterr().err
    assert run(["inspect", "--jsn", "x"]) == 2
    assert "--json" in capsys.readouterr().err


def test_tab_completion_is_there(capsys):
    assert run(["--help"]) == 0
    assert "--install-completion" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ALL)
def test_help_shows_brackets(verb):
    """rich takes [ab] for markup and swallows it, where it is not escaped."""
    texts = [ALL[verb].help, *(getattr(param, "help", None) for param in ALL[verb].params)]
    for text in filter(None, texts):
        assert Text.from_markup(text).plain == text.replace("\\[", "["), text


@pytest.mark.skipif(not hasattr(TyperOption, "display_type_rich"), reason="typer before 0.29 writes types its own way")
@pytest.mark.parametrize("verb", ["quantize", "search"])
def test_help_shows_what_to_type_and_no_types_of_python(verb, capsys):
    assert run([verb, "--help"]) == 0
    text = capsys.readouterr().out
    assert not re.search(r"<(str|int|path|bool|list)|list\[", text)
    assert re.search(r"--only +TEXT", text)
    assert re.search(r"--force +Replace", text)
