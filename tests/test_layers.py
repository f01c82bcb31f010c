"""Imports flow downwards only: the tables are the architecture, and these tests hold them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import bitplan
from tools.flows import longest_chain

PACKAGE = Path(bitplan.__file__).parent
OPEN_TO_ALL = "base"
# wing -> what it may import besides base: wings, or single rooms of them
MAY_IMPORT: dict[str, set[str]] = {
    "base": set(),
    "formats": set(),
    "plan": {"formats"},
    "rounding": {"formats"},
    "files": {"formats", "plan", "rounding"},
    "packed": {"files", "formats", "plan"},
    "searching": {"files", "formats", "fp8.policy", "packed", "plan", "rounding", "streaming.selective"},
    "streaming": {"files", "formats", "packed", "plan"},
    "fp8": {"formats", "plan"},
    "trees": set(),
    "report": {"plan"},
    "cli": {
        "base",
        "files",
        "formats",
        "fp8",
        "packed",
        "plan",
        "report",
        "rounding",
        "searching",
        "streaming",
        "trees",
    },
}
# room -> the rooms beside it that it may import; the modules of the folder that holds it are open to it
ROOMS: dict[str, dict[str, set[str]]] = {
    "base": {"loops": set()},
    "cli": {"verbs": set()},
    "files": {"engines": {"gpt_oss", "schemes"}, "gpt_oss": set(), "models": {"engines", "gpt_oss"}, "schemes": set()},
    "formats": {"gguf": set()},
    "fp8": {
        "bench": {"kernels", "layers", "policy"},
        "kernels": set(),
        "layers": {"kernels", "policy"},
        "policy": set(),
    },
    "packed": {"checkpoints": set(), "language": {"checkpoints"}, "products": set()},
    "plan": {"structure": set()},
    "streaming": {"selective": {"training", "transfer"}, "training": {"transfer"}, "transfer": {"selective"}},
    "trees": {"cuda": {"distributed", "loops"}, "dask": {"distributed"}, "distributed": {"loops"}, "loops": set()},
}


def name_of(path: Path) -> str:
    """fp8.policy.choice for bitplan/fp8/policy/choice.py; fp8.policy for its __init__.py."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def imported(source: str) -> tuple[str, ...]:
    """The modules of bitplan that a module imports, at the top, for its types, or inside a function."""
    names: list[str] = []
    for node in _statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(_module_of(name) for name in names if name == "bitplan" or name.startswith("bitplan."))


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements within: a tenth of the nodes, of which most are parts of expressions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child
            yield from _statements(child)


def _module_of(name: str) -> str:
    """files.gguf for bitplan.files.gguf.anything."""
    inner = name.removeprefix("bitplan").lstrip(".")
    while inner and inner not in MODULES:
        inner = inner.rpartition(".")[0]
    return inner


def is_within(name: str, room: str) -> bool:
    return name == room or name.startswith(f"{room}.")


def wrong_imports(name: str, source: str) -> list[str]:
    """Imports that the tables do not allow."""
    wing = name.split(".")[0]
    wrong = []
    for other in imported(source):
        allowed = (OPEN_TO_ALL, *MAY_IMPORT.get(wing, ())) if wing != OPEN_TO_ALL else ()
        if wing not in MAY_IMPORT or any(is_within(other, room) for room in allowed):
            continue
        if not is_within(other, wing) or _crosses_rooms(name, other):
            wrong.append(other)
    return wrong


def _crosses_rooms(name: str, other: str) -> bool:
    """Do two modules of a wing lie in rooms side by side, the first of which may not import the second?"""
    for folder, rooms in ROOMS.items():
        if is_within(name, folder) and is_within(other, folder) and name != folder and other != folder:
            mine, theirs = (full[len(folder) + 1 :].split(".")[0] for full in (name, other))
            if mine in rooms and theirs in rooms and mine != theirs and theirs not in rooms[mine]:
                return True
    return False


def test_every_folder_is_in_the_tables() -> None:
    folders = {name for name, path in MODULES.items() if name and path.name == "__init__.py"}
    rooms = {f"{folder}.{room}" for folder, rooms in ROOMS.items() for room in rooms}
    assert folders == set(MAY_IMPORT) | rooms


def test_imports_flow_downwards() -> None:
    wrong = {name: wrong_imports(name, path.read_text()) for name, path in MODULES.items() if name}
    assert not {name: others for name, others in wrong.items() if others}


def test_no_circle_of_imports() -> None:
    """Not at the top, not for types, not hidden in a function. Packages say only what they offer, by name."""
    graph = {
        name: {other for other in imported(path.read_text()) if other != name and other}
        for name, path in MODULES.items()
        if path.name != "__init__.py"
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_the_checks_can_fail() -> None:
    assert wrong_imports("plan.plan", "def f():\n    from bitplan.files.gguf import x") == ["files.gguf"]
    assert wrong_imports("fp8.apply", "from bitplan.packed import apply_plan") == ["packed.apply_plan"]
    assert wrong_imports("trees.grow", "import bitplan.formats.dispatch") == ["formats.dispatch"]
    assert wrong_imports("base.records", "import bitplan.plan.plan") == ["plan.plan"]
    assert wrong_imports("trees.grow", "from bitplan.base.loops.jit import compiled") == []
    assert wrong_imports("streaming.selective.units", "from bitplan.streaming.telemetry import StepTelemetry") == []


def test_imports_at_the_top_of_modules_are_no_longer_chain_than_twenty() -> None:
    chain = longest_chain()
    assert len(chain) <= 20, " -> ".join(chain)
