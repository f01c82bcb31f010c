"""Imports flow downwards only: the table is the architecture, and this test holds it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import bitplan

PACKAGE = Path(bitplan.__file__).parent
OPEN_TO_ALL = {"errors", "lazy_names", "optional", "records", "text", "version"}
MAY_IMPORT = {
    "formats": set(),
    "kernels": {"formats"},
    "plan": {"formats"},
    "store": {"formats", "kernels", "plan"},
    "measure": {"formats", "kernels", "plan"},
    "runtime": {"formats", "kernels", "plan", "store", "measure"},
    "trees": {"formats", "kernels"},
    "report": set(),
    "cli": {"formats", "kernels", "plan", "store", "measure", "runtime", "trees", "report"},
}


def imported_parts(source: str) -> set[str]:
    """The parts of bitplan that a module imports, at the top or inside a function."""
    parts = set()
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "bitplan":
            names = [f"bitplan.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        parts |= {name.split(".")[1] for name in names if name.startswith("bitplan.")}
    return parts


def test_every_folder_is_in_the_table() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert folders <= set(MAY_IMPORT)


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*/*.py")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_imports_flow_downwards(path: Path) -> None:
    part = path.parent.name
    wrong = imported_parts(path.read_text()) - OPEN_TO_ALL - MAY_IMPORT[part] - {part}
    assert not wrong, f"{path} imports {wrong}"


def test_the_check_can_fail() -> None:
    assert imported_parts("def f():\n    from bitplan.store.files import x") == {"store"}
    assert imported_parts("from bitplan import cli") == {"cli"}
