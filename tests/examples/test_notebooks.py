"""The notebooks run as they are, and print what they show, but for numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tools.notebooks import FOLDER, NotebookError, run_notebook

# The two that train or search language models take seconds; the tutorial and docs/search.md run the same calls.
SLOW = {"own_model_in_five_minutes", "fit_a_model_to_memory"}
NOTEBOOKS = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.long] if path.stem in SLOW else [])
    for path in sorted(FOLDER.glob("*.ipynb"))
]


def without_numbers(text: str) -> str:
    return " ".join(re.sub(r"[+-]?\d[\d.,]*(e[+-]\d+)?", "0", text).split())


def shown(notebook: dict[str, list[dict[str, list[dict[str, list[str]]]]]]) -> list[str]:
    code = [cell for cell in notebook["cells"] if "outputs" in cell]
    return ["".join("".join(output["text"]) for output in cell["outputs"]) for cell in code]


def test_there_are_four() -> None:
    assert len(NOTEBOOKS) == 4


@pytest.mark.parametrize("path", NOTEBOOKS)
def test_a_notebook_prints_what_it_shows(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "110")
    notebook = json.loads(path.read_text())
    printed = run_notebook(notebook)
    kept = shown(notebook)
    assert any(kept)
    first_lines = [[without_numbers(text.partition("\n")[0]) for text in texts] for texts in (printed, kept)]
    assert first_lines[0] == first_lines[1]


def test_a_cell_or_a_command_that_fails_is_seen() -> None:
    cell = {"cell_type": "code", "source": ["!bitplan inspect nothing-of-this-name"]}
    with pytest.raises(NotebookError, match="exit code 2"):
        run_notebook({"cells": [cell]})
    with pytest.raises(ZeroDivisionError):
        run_notebook({"cells": [{"cell_type": "code", "source": ["1 / 0"]}]})
