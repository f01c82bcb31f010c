"""Text of the package and its pages names modules that exist: a module that moved is renamed in words, too."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import bitplan
from tools.flows import longest_chain

PACKAGE = Path(bitplan.__file__).parent
ROOT = PACKAGE.parent
DOTTED = re.compile(r"(?<![\w./-])bitplan((?:\.[a-z_]\w*)+)")
WINGS = "|".join(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
WITHOUT_BITPLAN = re.compile(rf"`((?:{WINGS})(?:\.[a-z_]\w*)+)`")
TABLE_ROW = re.compile(r"^    ([a-z_][\w.]*(?:, [a-z_][\w.]*)*)(?:  +\S|$)", re.MULTILINE)
OLD_PARTS = {"kernels", "measure", "runtime", "store"}  # base.names has them
NO_NAMES = {"json", "toml", "html", "crc32"}  # ends of file names, keys of metadata
VAGUE = {"place", "places", "each", "found", "made", "said", "own", "take", "judge"}
# Loops and kernels whose hashes are recorded: under new names they would have to be compiled or measured again.
RECORDED = (
    "base/loops",
    "formats/gguf/triton_group_search.py",
    "formats/triton_encode.py",
    "fp8/kernels",
    "packed/products",
    "trees/cuda",
    "trees/loops",
)


def modules() -> set[str]:
    paths = (path.relative_to(ROOT).with_suffix("") for path in PACKAGE.rglob("*.py"))
    return {".".join(path.parts).removesuffix(".__init__") for path in paths}


MODULES = modules()


def documents() -> Iterator[tuple[str, str]]:
    """Pages, and the docstrings of modules; not the log and the changes, which tell of what was."""
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        if path.name not in ("CHANGELOG.md", "log.md", "NOTES.md"):
            yield str(path.relative_to(ROOT)), path.read_text()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
        yield str(path.relative_to(ROOT)), "\n".join(ast.get_docstring(node, clean=False) or "" for node in nodes)


def is_known(name: str) -> bool:
    """Whether a dotted name is a module, or a name in one."""
    parts = name.split(".")
    if len(parts) > 1 and (parts[1] in OLD_PARTS or parts[-1] in NO_NAMES):
        return True
    while parts and ".".join(parts) not in MODULES:
        parts.pop()
    rest = name.split(".")[len(parts) :]
    if not rest:
        return True
    found = importlib.import_module(".".join(parts))
    return hasattr(found, rest[0])


def test_dotted_names_are_of_modules_that_exist() -> None:
    stale = {
        f"{where}: bitplan{name}"
        for where, text in documents()
        for name in DOTTED.findall(text)
        if not is_known(f"bitplan{name}")
    }
    assert sorted(stale) == []


def test_names_of_wings_in_docstrings_are_of_modules_that_exist() -> None:
    """`streaming.telemetry`, as modules call each other."""
    named = {
        (where, name) for where, text in documents() if where.endswith(".py") for name in WITHOUT_BITPLAN.findall(text)
    }
    assert len(named) > 30
    assert sorted(f"{where}: {name}" for where, name in named if not is_known(f"bitplan.{name}")) == []


@pytest.mark.parametrize(
    "package", sorted(path.parent for path in PACKAGE.rglob("__init__.py")), ids=lambda path: path.name
)
def test_a_package_describes_modules_that_it_has(package: Path) -> None:
    """The table under "Which module does which step": its first column names modules and folders of the package."""
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text()), clean=False) or ""
    listed = [name for row in TABLE_ROW.findall(text) for name in row.split(", ")]
    there = {path.stem for path in package.iterdir()}
    assert [name for name in listed if name.split(".")[0] not in there] == []


def test_variables_and_parameters_say_what_they_hold() -> None:
    vague = set()
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        for node in [] if name.startswith(RECORDED) else [node for one in functions for node in ast.walk(one)]:
            bound = node.arg if isinstance(node, ast.arg) else ""
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound = node.id
            if bound in VAGUE:
                vague.add(f"{name}:{node.lineno}: {bound}")
    assert sorted(vague) == []


def test_the_longest_chain_of_imports_does_not_grow() -> None:
    assert len(longest_chain()) <= 24
