"""Every Python snippet of the README and docs runs, in a process and a folder of its own."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from bitplan.formats import list_formats

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPETS = [
    pytest.param(code, id=f"{page.name}-{number}")
    for page in PAGES
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("code", SNIPPETS)
def test_snippet_runs(code, tmp_path):
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_pages_quote_the_results_and_nothing_else():
    tables = runpy.run_path(str(ROOT / "benchmarks" / "tables.py"))
    text = (ROOT / "README.md").read_text()
    assert tables["demo_table"]() in text
    assert tables["speed_table"]() in text
    text = (ROOT / "docs" / "quality.md").read_text()
    assert tables["quality_table"]() in text
    assert tables["grid_table"]() in text
    text = (ROOT / "docs" / "manifest.md").read_text()
    assert tables["fused_table"]() in text
    assert tables["auto_table"]() in text
    assert tables["trees_table"]() in (ROOT / "docs" / "trees.md").read_text()


def test_every_format_is_in_its_page():
    text = (ROOT / "docs" / "formats.md").read_text()
    assert [fmt.name for fmt in list_formats() if not re.search(rf"\b{fmt.name}\b", text)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
