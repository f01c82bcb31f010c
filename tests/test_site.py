"""The documentation as a site: every page is in the navigation, anchors lead somewhere, and it is not too long.

`make docs` builds it, which needs MkDocs; these tests do not.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

import bitplan
from bitplan.cli.app import OLD_VERBS, VERBS
from tools.site import PARTS, ROOT_PAGES, command_line_page, python_page

ROOT = Path(bitplan.__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("**/*.md"))
DEVELOPERS = {"architecture.md", "log.md"}  # read by who works on bitplan; not counted
WORD_LIMIT = 40_000
GENERATED = {*ROOT_PAGES, "reference/command-line.md", "reference/python.md"}
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)")


def words(text: str) -> int:
    """How many words a text has, code and tables included: what stands between spaces and has a letter or a digit."""
    return sum(1 for word in text.split() if re.search(r"\w", word))


def without_code(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as MkDocs and GitHub make them."""
    headings = re.findall(r"^#{1,6} (.+?)\s*$", without_code(page.read_text()), re.MULTILINE)
    return {anchor(heading) for heading in headings}


def anchor(heading: str) -> str:
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def broken_anchors(page: Path, text: str) -> list[str]:
    """Links of a page to headings that are not there; other links are tested with the pages' code."""
    targets = [((page.parent / path if path else page).resolve(), name) for path, name in LINK.findall(text)]
    return [f"{path.name}#{name}" for path, name in targets if path.suffix == ".md" and name not in anchors(path)]


def test_every_page_is_in_the_navigation_once() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = Counter(re.findall(r"[\w/-]+\.md", navigation))
    assert {page for page, count in listed.items() if count > 1} == set()
    assert set(listed) == {page.relative_to(DOCS).as_posix() for page in PAGES} | GENERATED


@pytest.mark.parametrize("page", [*sorted(ROOT.glob("*.md")), *PAGES], ids=lambda page: page.name)
def test_anchors_lead_somewhere(page: Path) -> None:
    assert broken_anchors(page, without_code(page.read_text())) == []


def test_the_check_of_anchors_can_fail() -> None:
    assert anchor("What it gains, and `why`?") == "what-it-gains-and-why"
    text = "[a](search.md#what-it-gains) [b](search.md#nowhere) [c](#no-such)"
    assert broken_anchors(DOCS / "index.md", text) == ["search.md#nowhere", "index.md#no-such"]


def test_the_pages_for_users_are_not_too_long() -> None:
    counts = {str(page): words(page.read_text()) for page in PAGES if page.name not in DEVELOPERS}
    assert sum(counts.values()) < WORD_LIMIT, sorted(counts.items(), key=lambda count: -count[1])


def test_the_reference_has_every_verb_and_every_public_name() -> None:
    verbs = [verb.__name__ for group in VERBS.values() for verb in group if hasattr(verb, "__name__")]
    page = command_line_page()
    assert [verb for verb in verbs if f"## bitplan {verb}\n" not in page] == []
    assert [old for old in OLD_VERBS if f"## bitplan {old}\n" in page] == []
    assert "## bitplan fp8 bench\n" in page
    assert "`--format`" in page
    page = python_page()
    packages = {"bitplan": bitplan, **{f"bitplan.{part}": getattr(bitplan, part) for part in PARTS}}
    public = [f"{where}.{name}" for where, package in packages.items() for name in package.__all__]
    assert [name for name in public if f"{{ #{name} }}" not in page and not name.endswith("__")] == []
