"""Errors of the library name parameters and the shell names its options; and no decision reads a sentence."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import bitplan
from bitplan.base.errors import FormatError, MissingFolderError
from bitplan.cli import option_of, options_of, run
from tests.cli.test_help import ALL

ROOT = Path(bitplan.__file__).parent
FLAG = re.compile(r"(?<![\w-])--[a-z]")
OTHER_PROGRAMS = re.compile(r"\b(pip install|torchrun) ")
SENTENCE = re.compile(r"reason\.(startswith|endswith)\(| in \w*(\.|_)?reason\b(?!s)|\bin str\(error\)(?!\.)")


def modules() -> Iterator[tuple[Path, str]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield path.relative_to(ROOT), path.read_text()


def raised(text: str) -> Iterator[ast.Raise]:
    return (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Raise))


def test_no_error_of_the_library_names_a_flag() -> None:
    named = [
        f"{path}:{node.lineno}"
        for path, text in modules()
        if path.parts[0] != "cli" and FLAG.search(text)
        for node in raised(text)
        if FLAG.search(ast.unparse(node)) and not OTHER_PROGRAMS.search(ast.unparse(node))
    ]
    assert named == []


def test_every_setting_of_an_error_is_an_option_of_a_verb() -> None:
    options = {name for command in ALL.values() for parameter in command.params for name in parameter.opts}
    settings = {
        key.value
        for path, text in modules()
        if "settings=" in text and path.parts[0] != "cli"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.keyword) and node.arg == "settings"
        for table in ast.walk(node.value)
        if isinstance(table, ast.Dict)
        for key in table.keys
        if isinstance(key, ast.Constant)
    }
    assert {"keep", "force", "target", "pad"} <= settings
    assert {name for name in settings if option_of(name, None) not in options} == set()


def test_an_error_says_its_settings_in_python_and_in_the_shell(tmp_path, capsys) -> None:
    error = FormatError("w: leave it as it is", settings={"keep": "a b", "force": True, "only": None})
    assert str(error) == "w: leave it as it is (keep='a b', force=True, only)"
    shown = error.with_settings(lambda settings: options_of(settings, ["quantize", "m", "out"]))
    assert shown == "w: leave it as it is (--keep 'a b', --force, --only)"
    assert str(MissingFolderError(2, "no such folder", "a")) == "[Errno 2] no such folder: 'a'"
    plan = tmp_path / "plan.json"
    plan.write_text("kept")
    (tmp_path / "config.json").write_text("{}")
    assert run(["quantize", str(tmp_path / "config.json"), str(plan), "--format", "int8_row"]) == 2
    assert "settings" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [("nbytes", 6, "--bytes 6"), ("target", "training", "--for training"), ("chat", False, "--raw")],
)
def test_names_that_differ(name: str, value: object, shown: str) -> None:
    assert option_of(name, value) == shown


@pytest.mark.parametrize(
    ("verb", "settings", "shown"),
    [
        ("quantize m", {"nonfinite": "replace"}, "--nonfinite replace"),
        ("export m", {"nonfinite": "replace"}, "bitplan quantize --nonfinite replace"),
        ("judge m", {"keep": "w", "nonfinite": "replace"}, "--keep w, bitplan quantize --nonfinite replace"),
        ("search m", {"to": "hf", "experts": "bfloat16"}, "bitplan gpt-oss convert --to hf --experts bfloat16"),
        ("gpt-oss convert m", {"to": "hf"}, "--to hf"),
        ("search m", {}, ""),
    ],
)
def test_an_option_that_the_verb_lacks_is_shown_with_a_verb_that_has_it(verb, settings, shown) -> None:
    assert options_of(settings, verb.split()) == shown


def test_no_decision_reads_a_sentence() -> None:
    foreign = {"files/transformers_names.py", "trees/checks.py"}  # what another library raised: nothing else to go by
    found = [
        f"{path}:{number}"
        for path, text in modules()
        if str(path) not in foreign
        for number, line in enumerate(text.splitlines(), 1)
        if SENTENCE.search(line.partition("  #")[0]) and '"""' not in line
    ]
    assert found == []


def test_a_gguf_output_of_other_weights_names_the_verb_that_writes_it_once(tmp_path: Path, capsys) -> None:
    bitplan.save_packed(torch.nn.Linear(32, 32), tmp_path / "in.safetensors")
    assert run(["quantize", str(tmp_path / "in.safetensors"), str(tmp_path / "out.gguf"), "-f", "q8_0_gguf"]) == 2
    assert capsys.readouterr().err.count("bitplan export") == 1
