"""Starting is quick: torch, numpy, Triton, numba and gguf are loaded when a name or a verb needs them.

Modules are counted and not seconds, because seconds differ between machines.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

HEAVY = {"torch", "numpy", "triton", "numba", "gguf", "matplotlib", "sklearn", "transformers"}


def modules_after(statement: str, **environment: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(' '.join(sys.modules), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | environment
    )
    return set(done.stderr.split())


def modules_after_command(*arguments: str, **environment: str) -> set[str]:
    return modules_after(f"from bitplan.cli import run\nassert run({list(arguments)}) == 0", **environment)


def test_import_loads_no_heavy_library_and_no_command_line() -> None:
    loaded = modules_after("import bitplan")
    assert not loaded & (HEAVY | {"typer", "rich", "pydantic"})
    assert len([name for name in loaded if name.startswith("bitplan")]) <= 3  # itself, lazy_names and version


def test_a_name_loads_what_it_needs_and_starts_no_gpu() -> None:
    code = "from bitplan import encode; import sys, torch; assert not torch.cuda.is_initialized()"
    assert not modules_after(code) & (HEAVY - {"torch", "numpy"})


@pytest.mark.parametrize(
    "arguments", [("--version",), ("--help",), ("quantize", "--help"), ("manifest", "show", "--help")]
)
def test_help_loads_no_heavy_library(arguments: tuple[str, ...]) -> None:
    assert not modules_after_command(*arguments) & HEAVY
