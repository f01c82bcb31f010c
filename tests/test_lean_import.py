"""Importing bitplan is cheap: no GPU is started, and no Triton, numba, gguf or command line is loaded."""

from __future__ import annotations

import subprocess
import sys


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_loads_no_heavy_library() -> None:
    loaded = modules_after("import bitplan")
    assert not loaded & {"triton", "numba", "gguf", "typer", "rich", "pydantic", "matplotlib", "sklearn"}


def test_import_starts_no_gpu() -> None:
    code = "import bitplan, torch; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True)
