"""Rooms and climbs: which folders a piece of work visits, how often it goes back up, and the longest import chain.

    python tools/flows.py                 all flows, each on a tiny model, and the import chain
    python tools/flows.py quantize chain  some of them

A room is a folder of the package (`files/engines`). Calls of functions of the package are followed with sys.setprofile.
A room is visited when a function in it is called from another room. A climb is a visit of a room that the wings' order
puts above the caller's: calls go down from the shell to `base`, and one that goes up was handed over as a function.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import io
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "bitplan"
sys.path.insert(0, str(ROOT))
# From the ground up: a wing calls what stands before it.
ORDER = (
    *("base", "formats", "plan", "rounding", "files", "packed", "streaming", "fp8", "searching", "trees", "report"),
    *("cli", "bitplan"),
)


def room_of(path: str) -> str | None:
    """The folder of a module within the package; None for other code."""
    if not path.startswith(f"{PACKAGE}/"):
        return None
    parent = Path(path).parent.relative_to(PACKAGE)
    return "bitplan" if parent == Path() else str(parent)


class Flow:
    """The rooms that calls go through, in order, and the climbs among them."""

    def __init__(self) -> None:
        self.rooms: dict[str, int] = {}
        self.climbs: dict[tuple[str, str], int] = {}
        self._room = functools.cache(room_of)

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event != "call" or frame.f_code.co_name == "<module>":
            return
        room = self._room(frame.f_code.co_filename)
        if room is None:
            return
        caller = frame.f_back
        while caller is not None and self._room(caller.f_code.co_filename) is None:
            caller = caller.f_back
        before = None if caller is None else self._room(caller.f_code.co_filename)
        if room == before or (caller is not None and caller.f_code.co_name == "<module>"):
            return
        self.rooms[room] = self.rooms.get(room, 0) + 1
        if before is not None and _height(room) > _height(before):
            self.climbs[before, room] = self.climbs.get((before, room), 0) + 1


def _height(room: str) -> int:
    return ORDER.index(room.partition("/")[0])


def follow(work: Callable[[], object]) -> Flow:
    flow = Flow()
    sys.setprofile(flow)
    try:
        work()
    finally:
        sys.setprofile(None)
    return flow


# ---- the flows -------------------------------------------------------------------------------------------------------


def quantize(folder: Path) -> Callable[[], object]:
    from bitplan.cli import run

    text = folder / "text.txt"
    text.write_text(" ".join(["abandon hope all ye who enter here"] * 80))
    model, out = str(_llama(folder)), str(folder / "packed")

    def work() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            _require(run(["quantize", model, out, "--format", "mxfp4", "--text", str(text)]))

    return work


def search(folder: Path) -> Callable[[], object]:
    import torch

    import bitplan

    model = str(_llama(folder))
    ids = torch.randint(0, 60, (8, 16), generator=torch.Generator().manual_seed(0))
    goal = bitplan.Goal(bits=9.0)
    return lambda: bitplan.search(model, [ids], goal=goal, formats=("mxfp4", "int8_row"), out=folder / "found")


def apply_fp8(_folder: Path) -> Callable[[], object]:
    import torch
    from torch import nn

    import bitplan

    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(torch.bfloat16)
    return lambda: bitplan.apply_fp8(model, None, tokens=64, emulate=True, example=torch.randn(64, 64).bfloat16())


def product(_folder: Path) -> Callable[[], object]:
    import torch
    from torch import nn

    import bitplan

    model = nn.Sequential(nn.Linear(128, 128, bias=False))
    bitplan.apply_plan(model, bitplan.choose_formats({"0.weight": (128, 128)}, "mxfp4"))
    rows = torch.randn(2, 128)
    model(rows)  # what is made at the first call is no part of the flow
    return lambda: model(rows)


FLOWS = {"search": search, "quantize": quantize, "apply_fp8": apply_fp8, "product": product}


def _llama(folder: Path) -> Path:
    from tests.cli.verbs.test_perplexity_verb import save_llama

    save_llama(folder / "llama", blocks=1)
    return folder / "llama"


def _require(code: int) -> None:
    if code:
        sys.exit(f"the command ended with {code}")


# ---- imports ---------------------------------------------------------------------------------------------------------


def longest_chain() -> list[str]:
    """The longest path of imports at the top of modules, from the one that nobody imports to the ground."""
    modules = {_module(path): path for path in PACKAGE.rglob("*.py")}
    lazy = {name: _lazy_names(path) for name, path in modules.items() if path.name == "__init__.py"}
    imports = {name: sorted(set(_imports(name, path, modules, lazy)) - {name}) for name, path in modules.items()}

    @functools.cache
    def below(name: str) -> tuple[str, ...]:
        return (name, *max((below(other) for other in imports[name]), key=len, default=()))

    return list(max(map(below, modules), key=len))


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _lazy_names(path: Path) -> dict[str, str]:
    """What a package imports when a name of it is first used: name -> module."""
    guarded = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.If)]
    imports = [node for block in guarded for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def _imports(name: str, path: Path, modules: Iterable[str], lazy: dict[str, dict[str, str]]) -> Iterator[str]:
    """The modules that one imports at its top; what is in functions and under TYPE_CHECKING runs later, or never."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                home = whole if whole in modules else lazy.get(node.module, {}).get(alias.name, node.module)
                if not name.startswith(f"{home}."):
                    yield home


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("flows", nargs="*", metavar="FLOW", help=f"{', '.join(FLOWS)} or chain; all unless given")
    asked = parser.parse_args().flows or [*FLOWS, "chain"]
    for name in asked:
        if name == "chain":
            chain = longest_chain()
            print(f"longest import chain: {len(chain)}\n  " + "\n  ".join(chain))
            continue
        if name not in FLOWS:
            parser.error(f"no flow {name!r}; there are {', '.join(FLOWS)} and chain")
        with tempfile.TemporaryDirectory() as folder:
            flow = follow(FLOWS[name](Path(folder)))
        print(f"{name}: {len(flow.rooms)} rooms, {len(flow.climbs)} climbs")
        print(f"{name}: {', '.join(f'{room} ({count})' for room, count in flow.rooms.items())}")
        for (low, high), count in sorted(flow.climbs.items(), key=lambda item: -item[1]):
            print(f"  climbs from {low} to {high}, {count} times")


if __name__ == "__main__":
    main()
