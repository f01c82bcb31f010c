"""The public names: a change here is a change users see."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import bitplan
from bitplan.base.errors import MissingLibraryError

ROOT = Path(bitplan.__file__).parents[1]
PARTS = ("files", "formats", "fp8", "packed", "plan", "report", "rounding", "searching", "streaming", "trees")
LAZY = ("", ".files", ".formats", ".fp8", ".packed", ".plan", ".rounding", ".searching", ".streaming", ".trees")
NAMES = {
    "BitplanError",
    "Choice",
    "Fp8Options",
    "Goal",
    "Manifest",
    "Plan",
    "apply_fp8",
    "apply_plan",
    "choose_formats",
    "compare_models",
    "decode",
    "dequantize",
    "describe",
    "encode",
    "fit",
    "get_format",
    "load_packed",
    "open_tensors",
    "quantize_file",
    "read_plan",
    "round_inputs",
    "save_packed",
    "search",
    "stream_blocks",
    "streaming_callback",
    "warm_up",
    "write_report",
}
_IMPORT = re.compile(
    r"^\s*(?:from\s+(bitplan[\w.]*)\s+import\s+(\([^)]*\)|[^\n]+)|import\s+(bitplan[\w.]*))", re.MULTILINE
)


OTHER_MODULES = ("", "transformers", "peft", "lm_eval", "trees.dask")


def imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except MissingLibraryError as error:  # the library is an optional one
        pytest.skip(str(error))


def deep_imports(text: str) -> list[str]:
    """The imports of a page or an example that are not of `bitplan`, or of one of its parts, or of no public name."""
    wrong = []
    for value in _IMPORT.finditer(text):
        module = value[1] or value[3]
        if module.removeprefix("bitplan").lstrip(".") not in (
            "",
            "transformers",
            "peft",
            "lm_eval",
            "trees.dask",
            *PARTS,
        ):
            wrong.append(f"{module} is no public module")
            continue
        public = {*imported(module).__all__, *(PARTS if module == "bitplan" else ())}
        names = re.findall(r"\w+(?:\s+as\s+\w+)?", value[2] or "")
        wrong += [f"{module} has no public {name}" for name in names if name.split()[0] not in public]
    return wrong


def test_public_names_are_these() -> None:
    assert set(bitplan.__all__) == NAMES


def test_every_public_name_exists_and_says_what_it_is() -> None:
    for name in NAMES:
        assert getattr(bitplan, name).__doc__, name


@pytest.mark.parametrize("part", LAZY)
def test_lazy_names_are_listed_exist_and_hide_no_module(part: str) -> None:
    package = importlib.import_module(f"bitplan{part}")
    assert sorted(package.__all__) == list(dict.fromkeys(sorted(package.__all__)))
    assert set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        assert getattr(package, name) is not None
    # An import of a module sets its name in the package: a public name like it would sometimes be the module.
    modules = {path.stem for path in Path(str(package.__file__)).parent.glob("*")}
    assert not modules & set(package.__all__)


def test_every_public_name_has_one_place() -> None:
    places: dict[str, list[str]] = {}
    for part in ("", *PARTS):
        for name in imported(f"bitplan.{part}".rstrip(".")).__all__:
            places.setdefault(name, []).append(part)
    assert {name: parts for name, parts in places.items() if len(parts) > 1} == {}
    assert bitplan.encode is bitplan.formats.encode
    assert bitplan.decode is bitplan.formats.decode
    assert len(places) <= 90


@pytest.mark.parametrize("first", ["packed", *(pytest.param(part, marks=pytest.mark.long) for part in PARTS)])
def test_the_order_of_imports_changes_nothing(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One part first, then the others: every public name is the same module's object as in this process."""
    code = (
        "import importlib, sys\n"
        f"parts = {PARTS}\n"
        "for part in (sys.argv[1], *parts): importlib.import_module('bitplan.' + part)\n"
        "import bitplan\n"
        "homes = [('bitplan', bitplan), *(('bitplan.' + part, getattr(bitplan, part)) for part in parts)]\n"
        "for where, module in homes:\n"
        "    for name in module.__all__:\n"
        "        found = getattr(module, name)\n"
        "        print(where, name, getattr(found, '__module__', ''), getattr(found, '__qualname__', type(found)))\n"
    )
    there = subprocess.run([sys.executable, "-c", code, first], capture_output=True, text=True, check=True).stdout
    printed = io.StringIO()
    monkeypatch.setattr(sys, "argv", ["-c", first])
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert there == printed.getvalue()
    assert "bitplan encode bitplan.formats.dispatch encode" in there


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'bitplan' has no attribute 'encod'"):
        bitplan.encod  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'encod'"):
        from bitplan import encod  # noqa: F401


def test_parts_are_reachable_after_import_bitplan() -> None:
    assert bitplan.trees.load_trees.__name__ == "load_trees"


@pytest.mark.parametrize(
    "path",
    [path for pattern in ("*.md", "docs/**/*.md", "examples/*.py") for path in sorted(ROOT.glob(pattern))],
    ids=lambda path: path.name,
)
def test_docs_and_examples_import_public_names_only(path: Path) -> None:
    assert not deep_imports(path.read_text())


def test_the_check_of_imports_can_fail() -> None:
    assert deep_imports("from bitplan.plan.plan import Plan\n") == ["bitplan.plan.plan is no public module"]
    assert deep_imports("from bitplan.plan import (\n    Planned,\n    nothing,\n)\n") == [
        "bitplan.plan has no public nothing"
    ]
    assert deep_imports("import bitplan.files.models.weight_store\n") == [
        "bitplan.files.models.weight_store is no public module"
    ]
    assert not deep_imports("from bitplan import Plan as P, trees\nimport bitplan\n")


# Functions of many parameters that are still to get an options object; no other may have more than twelve.
LONG_SIGNATURES = {"search", "stream_blocks"}


def test_no_other_public_function_has_more_than_twelve_parameters() -> None:
    packages = [imported(f"bitplan.{part}".rstrip(".")) for part in ("", *PARTS)]
    public = {name: getattr(package, name) for package in packages for name in package.__all__}
    counts = {
        name: len(inspect.signature(each).parameters) for name, each in public.items() if inspect.isfunction(each)
    }
    assert {name for name, count in counts.items() if count > 12} <= LONG_SIGNATURES
