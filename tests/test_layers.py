"""Imports flow downwards only: the tables are the architecture, and these tests hold them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import bitplan

PACKAGE = Path(bitplan.__file__).parent
OPEN_TO_ALL = {
    "documents",
    "errors",
    "folders",
    "lazy_names",
    "logs",
    "optional",
    "records",
    "text",
    "version",
    "yaml_reader",
}
# layer -> what it may import: layers, or single rooms of them
MAY_IMPORT = {
    "formats": set(),
    "kernels": {"formats"},
    "plan": {"formats"},
    "store": {"formats", "kernels", "plan"},
    "measure": {"formats", "kernels", "plan"},
    "runtime": {"formats", "kernels", "plan", "store", "measure"},
    "searching": {"formats", "kernels", "plan", "store", "measure", "runtime"},
    "trees": {"formats", "kernels.base"},
    "report": set(),
    "cli": {"formats", "kernels", "plan", "store", "measure", "runtime", "searching", "trees", "report"},
}
# room -> the rooms beside it that it may import; the modules of the folder that holds it are open to it
ROOMS = {
    "cli": {"demo": set(), "verbs": {"demo"}},
    "formats": {"gguf": {"scales"}, "scales": {"gguf"}},
    "kernels": {"base": set(), "codec": {"base"}, "fp8": {"base"}, "matmul": {"base", "codec"}},
    "kernels.fp8": {"experts": set()},
    "kernels.matmul": {"cpu": set(), "direct": set()},
    "measure": {"gradients": {"quality"}, "quality": set(), "speed": set()},
    "plan": {"fp8": set(), "selective": set(), "structure": set()},
    "report": {"pages": set()},
    "runtime": {"fp8": set(), "packed": set(), "selective": {"streaming"}, "streaming": set()},
    "runtime.fp8": {"bench": {"layers"}, "layers": set()},
    "runtime.fp8.layers": {"compiled": set()},
    "runtime.packed": {"checkpoints": {"gpt_oss"}, "gpt_oss": set(), "operators": set()},
    "runtime.streaming": {"blocks": set(), "training": {"blocks", "transfer"}, "transfer": {"blocks"}},
    "searching": {"decide": set(), "gather": {"decide"}},
    "store": {
        "checks": {"files", "models"},
        "files": set(),
        "gpt_oss": {"files"},
        "models": {"export", "files", "gpt_oss"},
        "rounding": {"files"},
        "export": {"files", "gpt_oss", "rounding"},
    },
    "store.files": {"poly": set(), "schemes": set()},
    "trees": {
        "cuda": {"distributed", "loops"},
        "dask": {"distributed"},
        "distributed": {"loops"},
        "evaluation": {"distributed"},
        "files": {"inputs", "losses", "models"},
        "inputs": {"distributed"},
        "loops": set(),
        "losses": {"distributed", "evaluation", "loops"},
        "models": {"distributed", "evaluation", "files", "inputs", "loops", "losses"},
    },
}


def name_of(path: Path) -> str:
    """plan.fp8.choice for bitplan/plan/fp8/choice.py; plan.fp8 for its __init__.py."""
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
    """store.files for bitplan.store.files.anything."""
    inner = name.removeprefix("bitplan").lstrip(".")
    while inner and inner not in MODULES:
        inner = inner.rpartition(".")[0]
    return inner


def is_within(name: str, room: str) -> bool:
    return name == room or name.startswith(f"{room}.")


def wrong_imports(name: str, source: str) -> list[str]:
    """Imports that the tables do not allow."""
    layer = name.split(".")[0]
    wrong = []
    for other in imported(source):
        open_to_all = other.split(".")[0] in OPEN_TO_ALL
        if layer not in MAY_IMPORT or open_to_all or any(is_within(other, each) for each in MAY_IMPORT[layer]):
            continue
        if not is_within(other, layer) or _crosses_rooms(name, other):
            wrong.append(other)
    return wrong


def _crosses_rooms(name: str, other: str) -> bool:
    """Do two modules of a layer lie in rooms side by side, the first of which may not import the second?"""
    for folder, rooms in ROOMS.items():
        if is_within(name, folder) and is_within(other, folder) and name != folder and other != folder:
            mine, theirs = (each[len(folder) + 1 :].split(".")[0] for each in (name, other))
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
    assert wrong_imports("plan.plan", "def f():\n    from bitplan.store.files.gguf import x") == ["store.files.gguf"]
    assert wrong_imports("runtime.fp8.apply", "from bitplan.runtime.packed import apply_plan") == [
        "runtime.packed.apply_plan"
    ]
    assert wrong_imports("trees.grow", "import bitplan.kernels.codec.dispatch") == ["kernels.codec.dispatch"]
    assert wrong_imports("trees.grow", "from bitplan.kernels.base.jit import compiled") == []
    assert wrong_imports("runtime.selective.units", "from bitplan.runtime.streaming.errors import StreamError") == []
