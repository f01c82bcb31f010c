"""Runs the notebooks of examples/notebooks in this process, without Jupyter, and keeps what their cells print.

python tools/notebooks.py            run all, and fail where a cell does
python tools/notebooks.py --write    and write the outputs into the files

A cell is Python; a line `!bitplan ...` is a command of bitplan, as in Jupyter.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import sys
import tempfile
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples" / "notebooks"
COMMAND = re.compile(r"^(\s*)!bitplan (.*)$", re.MULTILINE)


class NotebookError(RuntimeError):
    """A command of a cell failed."""


def run_command(words: str) -> None:
    from bitplan.cli import run

    code = run(shlex.split(words))
    if code:
        raise NotebookError(f"bitplan {words}: exit code {code}")


def run_notebook(notebook: dict[str, Any]) -> list[str]:
    """Run the cells one after the other in the working directory; returns what each code cell printed."""
    names: dict[str, Any] = {"__name__": "__main__", "_run_command": run_command}
    printed = []
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        source = COMMAND.sub(lambda line: f"{line[1]}_run_command({line[2]!r})", "".join(cell["source"]))
        output = io.StringIO()
        with redirect_stdout(output), redirect_stderr(io.StringIO()):
            exec(compile(source, "<cell>", "exec"), names)
        printed.append(output.getvalue())
    return printed


def with_outputs(notebook: dict[str, Any], printed: list[str]) -> dict[str, Any]:
    """The notebook with what its code cells printed, numbered as they ran."""
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, text) in enumerate(zip(code, printed, strict=True), 1):
        stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
        cell |= {"execution_count": number, "outputs": [stream] if text else []}
    return notebook


def main(write: bool) -> None:
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("COLUMNS", "110")
    warnings.simplefilter("ignore")  # those of libraries, which a reader cannot act on
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = json.loads(path.read_text())
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            printed = run_notebook(notebook)
            os.chdir(ROOT)
        if write:
            path.write_text(json.dumps(with_outputs(notebook, printed), indent=1, ensure_ascii=False) + "\n")
        print(f"{path.name}: {len(printed)} cells")


if __name__ == "__main__":
    main(write=sys.argv[1:] == ["--write"])
